"""Kinds of nodes: one class for each, of which :mod:`~amqp_rt.broker.spaces` makes the nodes."""
