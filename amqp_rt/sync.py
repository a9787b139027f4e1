"""The same classes for threads and scripts: calls that wait, and ``with`` blocks.

::

    with sync.connect("amqp://127.0.0.1:5672") as peer, peer.sender("orders") as orders:
        orders.send(order)

    with sync.Broker() as broker:
        (url,) = broker.listen("amqp://127.0.0.1:0")

Everything runs under trio in one thread of its own, which begins with the first block that is entered
in the process and ends with the last one. Objects may be used by several threads at once. Handlers,
hooks and verifiers that are plain functions run in worker threads, so that they may wait as well;
those that are ``async def`` run under trio.

A thread that is interrupted (Ctrl-C) while it waits cancels what it waits for. A handler in a thread
cannot be cancelled: it is waited for.
"""

from __future__ import annotations

from .container.container import Container as _Container
from .container.recovery import connect as _connect
from .doors import thread_entrance
from .runtime import Broker as _Broker

__all__ = ["Broker", "Container", "connect"]

# What they are to a type checker stands in sync.pyi.
Broker = thread_entrance(_Broker)
Container = thread_entrance(_Container)
connect = thread_entrance(_connect)
