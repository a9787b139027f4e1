"""Doors: listeners whose connections speak a protocol that no front has, such as HTTP.

Their users log in over connections in memory (:class:`~amqp_rt.container.local.Visitor`). The streams count as
connections of the container, strangers until one of their users has logged in.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from msgspec import Struct

from ..errors import ConnectFailed
from ..events import Certificate
from ..net.tls import ServerTls, encrypt

log = logging.getLogger("amqp_rt.container")


class DoorArrival(Struct, frozen=True, kw_only=True):
    """How a stream has arrived at a door."""

    #: The peer's address, such as ``192.0.2.1:50000``.
    address: str
    #: Call it once a user has logged in: the connection does not count as a stranger's any more.
    logged_in: Callable[[], None]
    #: Whether it was encrypted, and the certificate that the peer has presented.
    secure: bool = False
    certificate: Certificate | None = None


#: ``await serve(stream, arrival)``: runs one connection until it ends.
ServeDoor: TypeAlias = Callable[[trio.abc.Stream, DoorArrival], Awaitable[None]]


class Door:
    """Connections of one door, each of which *serve* runs.

    Args:
        serve: Runs one connection. An exception ends that connection only, and is logged.
        tls: Certificates, if the streams are those within TLS.
        handshake_s: Seconds for the handshake of TLS.
    """

    def __init__(self, serve: ServeDoor, tls: ServerTls | None, handshake_s: float) -> None:
        self._serve = serve
        self._tls = tls
        self._handshake_s = handshake_s

    async def accept(
        self, stream: trio.abc.Stream, address: str, logged_in: Callable[[], None]
    ) -> None:
        """Run one connection until it ends; then close *stream*. If cancelled, it is closed at once."""
        try:
            arrival = DoorArrival(address=address, logged_in=logged_in)
            if self._tls is not None:
                layer = self._tls.layer()
                stream = await encrypt(stream, layer, within=self._handshake_s)
                arrival = DoorArrival(
                    address=address,
                    logged_in=logged_in,
                    secure=True,
                    certificate=layer.certificate,
                )
            await self._serve(stream, arrival)
        except ConnectFailed as error:
            log.info("connection from %s refused: %s", address, error.description)
        except Exception:
            # A fault of ours: it must not end the other connections.
            log.exception("the connection from %s broke", address)
        finally:
            await trio.aclose_forcefully(stream)
