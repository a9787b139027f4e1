"""What applications hold: containers, connections, senders, receivers, calls."""
