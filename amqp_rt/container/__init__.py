"""Containers of nodes, connections, senders, receivers and calls."""
