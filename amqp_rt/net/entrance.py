"""Entry of accepted streams: TLS and WebSocket where used, up to the client's protocol header."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Final

import trio
from msgspec import Struct

from ..errors import ConnectFailed
from ..events import Certificate
from ..fronts.base import Front
from ..limits import DEFAULT_LIMITS, Limits
from .carrier import nothing
from .edges import Edges, HandedOver, HandshakeFailed, facts_of
from .preamble import HEADER_SIZE, TLS_HEADER, select_front
from .tls import CLIENT_HELLO, ServerTls, TlsLayer, encrypt

log = logging.getLogger("amqp_rt.net")

#: Header of a protocol that plug-ins have, or that none has → its name, and its plug-in's name of it.
_OTHER_PROTOCOLS: Final = {
    b"AMQP\x00\x00\x09\x01": ("AMQP 0-9-1", "amqp091"),
    b"AMQP\x01\x01\x00\x0a": ("AMQP 0-10", "amqp010"),
    b"AMQP\x01\x01\x00\x09": ("AMQP 0-9", ""),
    b"AMQP\x01\x01\x08\x00": ("AMQP 0-8", ""),
}
#: Seconds that an edge has to say that a handshake took too long.
_EDGE_GRACE_S: Final = 1.0


class ListenerPolicy(Struct, kw_only=True, frozen=True):
    """Protocols and security that a listener expects of clients.

    On ``amqp`` with certificates there are three ways to connect: in clear, with TLS from the first
    octet, and by AMQP's own upgrade to TLS (Part 5 §5.2.1). With ``tls_required`` only the last two
    are accepted, and ``ws``, which has no upgrade, is refused.
    """

    fronts: Sequence[Front]
    #: ``amqp``, ``amqps``, ``ws`` or ``wss``.
    scheme: str = "amqp"
    tls: ServerTls | None = None
    tls_required: bool = False
    #: Path of WebSockets, and origins of the pages that may open them.
    path: str = "/"
    origins: Collection[str] = ()
    limits: Limits = DEFAULT_LIMITS
    #: Processes that carry TLS and WebSocket instead of this one.
    edges: Edges | None = None


class Entered(Struct, kw_only=True):
    """Stream on which a client has sent its protocol header."""

    stream: trio.abc.Stream
    front: Front
    #: Octets read from the stream, the protocol header first.
    received: bytes
    #: The stream is encrypted.
    secure: bool
    #: The client's verified certificate, if it presented one.
    certificate: Certificate | None
    #: Server name that the client requested in TLS.
    server_name: str
    #: Call it once the client has logged in: from then on larger messages are accepted.
    trust: Callable[[], None]
    #: Call it at the end of the connection.
    left: Callable[[], None] = nothing


async def enter(
    stream: trio.abc.Stream, entrance: ListenerPolicy, *, address: str
) -> Entered | None:
    """Receive all that precedes a client's first AMQP or SASL frame.

    None if the client fails before; *stream* is closed then. A log line gives the reason, except
    after a timeout or when the stream ended. Everything together may take ``limits.handshake_s``.
    Never raises for faults of the peer.
    """
    deadline = trio.current_time() + entrance.limits.handshake_s
    layer: TlsLayer | None = None
    handed: HandedOver | None = None
    trust: Callable[[], None] = nothing
    entered: Entered | None = None

    async def secured(received: bytes) -> trio.abc.Stream:
        nonlocal layer, handed
        assert entrance.tls is not None
        if handed := await _at_an_edge(stream, entrance, "amqps", received, address, deadline):
            return handed.stream
        layer = entrance.tls.layer()
        within = min(entrance.limits.tls_handshake_s, deadline - trio.current_time())
        return await encrypt(stream, layer, received=received, within=max(0.0, within))

    def unknown(data: bytes) -> None:
        plain = layer is None and handed is None
        refuse_unknown(data, address, tls_missing=entrance.tls_required and plain)

    try:
        if entrance.scheme == "ws" and entrance.tls_required:
            raise ConnectFailed("a WebSocket without TLS, which is required here")
        if entrance.scheme in ("ws", "wss"):
            handed = await _at_an_edge(stream, entrance, entrance.scheme, b"", address, deadline)
        if handed is not None:
            stream, trust = handed.stream, handed.trust
        elif entrance.scheme in ("amqps", "wss"):
            stream = await secured(b"")
        if entrance.scheme in ("ws", "wss") and handed is None:
            from .websocket import accept_websocket

            websocket = await accept_websocket(
                stream,
                path=entrance.path,
                origins=entrance.origins,
                limits=entrance.limits,
                within=deadline - trio.current_time(),
            )
            stream, trust = websocket, websocket.trust
        while True:
            plain = layer is None and handed is None
            upgrades = entrance.tls is not None and plain and entrance.scheme == "amqp"
            refuses = upgrades and entrance.tls_required
            found = await select_front(
                stream,
                () if refuses else entrance.fronts,
                others=(CLIENT_HELLO, TLS_HEADER) if upgrades else (),
                preferred=TLS_HEADER if refuses else None,
                within=deadline - trio.current_time(),
                on_unknown=unknown,
            )
            if found is None:
                return None
            front, received = found
            if not isinstance(front, bytes):
                break
            if front == TLS_HEADER:
                with trio.move_on_at(deadline) as scope:
                    await stream.send_all(TLS_HEADER)
                if scope.cancelled_caught:
                    raise ConnectFailed("the peer does not read")
                received = received[HEADER_SIZE:]
            stream = await secured(received)
        known = facts_of(layer) if handed is None else handed.arrival
        entered = Entered(
            stream=stream, front=front, received=received, secure=known.secure,
            certificate=known.certificate, server_name=known.server_name, trust=trust,
            left=nothing if handed is None else handed.left,
        )  # fmt: skip
        return entered
    except HandshakeFailed:
        # The edge has logged why.
        return None
    except ConnectFailed as error:
        log.info("connection from %s refused: %s", address, error.description)
        await trio.aclose_forcefully(stream)
        return None
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        await trio.aclose_forcefully(stream)
        return None
    finally:
        if handed is not None and entered is None:
            handed.left()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(handed.stream)


async def _at_an_edge(
    stream: trio.abc.Stream,
    entrance: ListenerPolicy,
    scheme: str,
    received: bytes,
    address: str,
    deadline: float,
) -> HandedOver | None:
    """Pass *stream* on to an edge, which unwraps it; None if there is no edge for it.

    Raises:
        ConnectFailed: The edge has ended, refuses the connection, or does not answer.
    """
    edge = None if entrance.edges is None else entrance.edges.next()
    if edge is None or not isinstance(stream, trio.SocketStream):
        return None
    client = socket.socket(fileno=stream.socket.detach())
    within = max(0.0, deadline - trio.current_time())
    # The edge ends handshakes in time, and says so. The hub gives up if it does not.
    with trio.move_on_after(within + _EDGE_GRACE_S):
        return await edge.unwrap(
            client,
            scheme=scheme,
            path=entrance.path,
            address=address,
            received=received,
            within=within,
        )
    raise ConnectFailed(f"the edge process {edge.pid} does not answer")


def refuse_unknown(data: bytes, address: str, *, tls_missing: bool = False) -> None:
    """Log why the connection from *address*, which began with *data*, is refused.

    With *tls_missing* it had to begin with TLS.
    """
    why = f"it speaks no protocol that is offered here, and began with {data[:8]!r}"
    spoken, front = _OTHER_PROTOCOLS.get(data[:HEADER_SIZE], ("", ""))
    if front:
        why = (
            f"it speaks {spoken}, which is not offered here: install amqp-rt-{front} and give --front {front}"
            f" (in a program, fronts=[{front!r}])"
        )
    elif spoken:
        why = f"it speaks {spoken}, which no plug-in has: use a client of AMQP 1.0, 0-9-1 or 0-10"
    if data.startswith(CLIENT_HELLO):
        why = "it began TLS, and the listener has no certificate: amqp:// and ws:// are without"
    elif tls_missing:
        why = "it did not begin TLS, which is required here"
    log.info("connection from %s refused: %s", address, why)
