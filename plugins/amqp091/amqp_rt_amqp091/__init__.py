"""AMQP 0-9-1 for amqp_rt: methods, field tables and frames, without I/O."""
