"""AMQP 0-9-1 as a front of a broker (:mod:`amqp_rt.fronts`)."""

from __future__ import annotations

from amqp_rt.fronts import TRACINGS, ServerOptions
from amqp_rt.fronts.tracing import ClientSecretsTracing

from .engine import Engine
from .frames import PROTOCOL_HEADER
from .recent import Recents
from .tracing import ClientMask, FrameNames

TRACINGS[PROTOCOL_HEADER] = ClientSecretsTracing(ClientMask, FrameNames)


class Front:
    """Front for clients of AMQP 0-9-1, such as pika, Celery and amqplib.

    ::

        Broker(fronts=[amqp_rt.fronts.amqp10.Front(), amqp_rt_amqp091.Front()])
    """

    name = "amqp0-9-1"
    headers: tuple[bytes, ...] = (PROTOCOL_HEADER,)
    preferred_header = PROTOCOL_HEADER

    def __init__(self) -> None:
        self._recents = Recents()

    def server(self, options: ServerOptions, now: float) -> Engine:
        """Create the engine for a connection that a client opened."""
        return Engine(options, self._recents, now)
