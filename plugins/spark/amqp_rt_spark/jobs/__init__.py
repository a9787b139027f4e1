"""Ready-made jobs over queues, logs and dead letters: for the command line, notebooks and clusters."""
