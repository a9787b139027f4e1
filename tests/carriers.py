"""Kinds of streams over which the driver runs a connection, for tests that must hold for all of them."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from math import inf
from typing import Any

import trio
from certificates import certificates

from amqp_rt.events import Event, Peer
from amqp_rt.fronts.base import ProtocolEngine
from amqp_rt.limits import Limits
from amqp_rt.net.driver import run_connection
from amqp_rt.net.layers import LayeredStream
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.reactor import Reactor
from amqp_rt.net.tls import ClientTls, ServerTls, TlsLayer, client_layer, encrypt
from amqp_rt.net.websocket import WebSocketStream, accept_websocket, request_websocket
from amqp_rt.outcomes import Error

#: Kinds with virtual time, which costs nothing; over sockets time is real.
VIRTUAL = ["memory", "stream", "tls", "tls-stream", "ws"]
REAL = ["tcp", "unix", "tcp-reactor", "unix-reactor", "tls-tcp-reactor", "ws-tls-tcp-reactor"]


class Closing(trio.abc.SendStream):
    """WebSocket as the peer's sending half: octets after the connection's end are dropped, and closing it
    ends both directions."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            pass

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.stream.aclose()


class Carried:
    """Kind of stream: makes pairs of streams, and drives one end of them."""

    def __init__(
        self, kind: str, reactor: Reactor | None, owned: AsyncExitStack, nursery: trio.Nursery
    ) -> None:
        self.kind = kind
        self.virtual = kind in VIRTUAL
        self._reactor = reactor
        self._owned = owned
        self._nursery = nursery

    def seconds(self, wanted: float) -> float:
        """Return *wanted*, or nearly nothing where time is real."""
        return wanted if self.virtual else 0.05

    async def pair(self) -> tuple[trio.abc.Stream, Any]:
        """Return a stream for the driver, and the peer's end of it."""
        ours, theirs = await self._pair()
        if "tls" in self.kind:
            ours, theirs = await encrypted(ours, theirs)
        if "ws" in self.kind:
            ours, theirs = await websockets(ours, theirs, self._nursery)
            self._owned.push_async_callback(trio.aclose_forcefully, theirs)
            return ours, trio.StapledStream(Closing(theirs), theirs)
        return ours, theirs

    async def _pair(self) -> tuple[trio.abc.Stream, Any]:
        if self.virtual:
            ours, theirs = memory_stream_pair()
            self._owned.push_async_callback(trio.aclose_forcefully, theirs)
            if self.kind.endswith("stream"):
                # A stapled stream hides the kind of its parts from the driver.
                return trio.StapledStream(ours, ours), theirs
            return ours, theirs
        if self.kind.startswith("unix"):
            first, second = trio.socket.socketpair()
        else:
            with socket.create_server(("127.0.0.1", 0)) as server:
                first = trio.socket.from_stdlib_socket(
                    socket.create_connection(server.getsockname())
                )
                second = trio.socket.from_stdlib_socket(server.accept()[0])
        peer = trio.SocketStream(second)
        self._owned.push_async_callback(trio.aclose_forcefully, peer)
        return trio.SocketStream(first), peer

    async def run(
        self, stream: trio.abc.Stream, engine: ProtocolEngine, events: list[Event], **options: Any
    ) -> None:
        """Drive *engine*, and append its events to *events*."""
        handle = options.pop("handle", events.extend)
        await run_connection(stream, engine, handle, reactor=self._reactor, **options)


async def encrypted(
    ours: trio.abc.Stream, theirs: trio.abc.Stream
) -> tuple[LayeredStream, LayeredStream]:
    """Return both ends of a connection with TLS on them; our end is the server."""
    known = certificates()
    ends: list[LayeredStream] = []

    async def shake(stream: trio.abc.Stream, layer: TlsLayer) -> None:
        ends.append(await encrypt(stream, layer, within=5))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake, ours, ServerTls(known.server).layer())
        nursery.start_soon(shake, theirs, client_layer(ClientTls(known.ca), "localhost"))
    return (ends[0], ends[1]) if ends[0].below is ours else (ends[1], ends[0])


async def websockets(
    ours: trio.abc.Stream, theirs: trio.abc.Stream, home: trio.Nursery
) -> tuple[WebSocketStream, WebSocketStream]:
    """Return both ends of a WebSocket, trusted by each other, with tasks in *home*; our end is the server."""
    ends: dict[str, WebSocketStream] = {}
    # The time that a write may wait is left to the driver here.
    limits = Limits(websocket_message_max=1 << 30, write_stall_s=600)

    async def accept() -> None:
        ends["ours"] = await accept_websocket(ours, path="/", origins=(), limits=limits, within=5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        ends["theirs"] = await request_websocket(theirs, host="localhost", path="/", limits=limits)
    for end in ends.values():
        end.trust()
    return ends["ours"], ends["theirs"]


class Echo:
    """Engine that returns its input as output: a protocol of one rule."""

    def __init__(self, *, repeat: int = 1) -> None:
        self.on_output = lambda: None
        self.finished = False
        self.deadline = inf
        self.output_size = 0
        self.peer = Peer()
        self.heard = 0
        self.chunks: list[int] = []
        self.ticks: list[float] = []
        self._repeat = repeat
        self._output: list[bytes] = []

    work_max = 0
    unread = False
    congested = False
    notifies = True

    def say(self, *buffers: bytes) -> None:
        self._output += buffers
        self.output_size += sum(map(len, buffers))
        self.on_output()

    def receive(self, data: bytes, now: float) -> list[Event]:
        self.heard += len(data)
        self.chunks.append(len(data))
        self.say(*[data] * self._repeat)
        return []

    def receive_eof(self, now: float) -> list[Event]:
        self.finished = True
        self.on_output()
        return []

    def tick(self, now: float) -> list[Event]:
        self.ticks.append(now)
        self.deadline = inf
        return []

    def take(self) -> list[bytes]:
        output, self._output, self.output_size = self._output, [], 0
        return output

    def close(self, error: Error | None = None) -> None:
        self.finished = True
        self.on_output()
