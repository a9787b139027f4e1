"""Queues, exchanges and bindings that peers declare, if the protocol permits it (0-9-1 §3.1, 0-10).

A :class:`~amqp_rt.broker.topology.topologies.Topologies` belongs to a broker; a
:class:`~amqp_rt.broker.topology.topology.Topology` is the view of one peer on its virtual host, limited to
its rights (:class:`~amqp_rt.fronts.base.Topology`). Queues are ordinary nodes of the broker, so that links of
every protocol reach them. Properties that queues have only in these protocols, such as deletion with the last
consumer, are kept here.
"""
