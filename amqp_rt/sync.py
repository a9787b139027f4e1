"""API for threads and scripts: the same classes with blocking calls and ``with`` blocks.

::

    with sync.connect("amqp://127.0.0.1:5672") as peer, peer.sender("orders") as orders:
        orders.send(order)

    with sync.Broker() as broker:
        (url,) = broker.listen("amqp://127.0.0.1:0")

Everything runs under trio in a thread of its own, which starts with the first block entered in the
process and ends with the last one. Several threads may use the same object at once. Handlers, hooks
and verifiers that are plain functions run in worker threads, so that they may block as well; those
that are ``async def`` run under trio.

If a thread is interrupted (Ctrl-C) while it waits, the call that it waits for is cancelled. A handler
in a worker thread cannot be cancelled: its end is awaited.
"""

from __future__ import annotations

from .bridge import thread_entrance
from .broker.broker import Broker as _Broker
from .container.container import Container as _Container
from .container.recovery import connect as _connect
from .mesh.mesh import Mesh as _Mesh

__all__ = ["Broker", "Container", "Mesh", "connect"]

# Their types for type checkers are in sync.pyi.
Broker = thread_entrance(_Broker)
Container = thread_entrance(_Container)
Mesh = thread_entrance(_Mesh)
connect = thread_entrance(_connect)
