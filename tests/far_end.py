"""Peers for tests of our client: a server's engine, controlled by the test.

Real bytes over streams in memory; the test decides what the peer answers, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.core.engine import Engine
from amqp_rt.events import AttachRequested, ConnectionFailed, Event, LoginRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.net.driver import run_connection
from amqp_rt.net.memory import MemoryNetwork, MemoryStream
from amqp_rt.outcomes import Error, Outcome
from amqp_rt.termini import Source
from amqp_rt.testing.pairs import Recorder


class _Line(trio.abc.HalfCloseableStream):
    """The peer's end of a stream, which a test can mute or cut."""

    def __init__(self, stream: MemoryStream, cut: int | None) -> None:
        self.mute = False
        #: Frames, of both directions together, that still pass before the line is cut.
        self.left = cut
        self.frames = 0
        self._pieces = (bytearray(), bytearray())
        self._stream = stream

    def _pass(self, data: bytes | bytearray | memoryview, *, inbound: bool) -> bytes:
        """Return the whole frames of *data* that still pass; keep the rest until it is whole."""
        held = self._pieces[inbound]
        held += data
        at = 0
        while self.left != 0 and len(held) - at >= 8:
            size = 8 if held[at : at + 4] == b"AMQP" else int.from_bytes(held[at : at + 4], "big")
            if size < 8:
                # Not a frame: the engine reports the error.
                size = len(held) - at
            if len(held) - at < size:
                break
            at += size
            self.frames += 1
            if self.left is not None:
                self.left -= 1
        passed = bytes(held[:at])
        del held[:at]
        return passed

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.mute:
            await trio.lowlevel.checkpoint()
            return
        passed = self._pass(data, inbound=False)
        if passed:
            await self._stream.send_all(passed)
        if self.left == 0:
            await self._stream.aclose()
            raise trio.BrokenResourceError("cut")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while True:
            if self.left == 0:
                await self._stream.aclose()
                return b""
            data = await self._stream.receive_some(max_bytes)
            if not data:
                return data
            if not self.mute and (passed := self._pass(data, inbound=True)):
                return passed

    async def aclose(self) -> None:
        await self._stream.aclose()


class FarEnd:
    """Peers at names of a memory network, with all links and engines that they have had.

    Args:
        settle: Outcome of each message from our side; None leaves them unsettled.
        credit: Granted on each link on which our side sends; 0 grants none.
        on_attach: Answers attach requests; by default they are accepted with a Recorder.
        on_open: Called with each engine that is open.
        limits: Limits of the peer's engines.
    """

    def __init__(
        self,
        *,
        settle: Outcome | None = None,
        credit: int = 0,
        on_attach: Callable[[Any], None] | None = None,
        on_open: Callable[[Engine], None] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.settle = settle
        self.credit = credit
        self.on_attach = on_attach or self.accept
        self.on_open = on_open
        self.limits = limits
        #: The container-id in the peer's open.
        self.container_id = "far"
        self.network = MemoryNetwork()
        self.engines: list[Engine] = []
        #: Names that were dialled, in order.
        self.dialled: list[str] = []
        self.links: list[Any] = []
        self.recorders: list[Recorder] = []
        self.failures: list[Error] = []
        self._scopes: list[trio.CancelScope] = []
        self._lines: list[_Line] = []
        #: Frames after which each of the next connections is cut.
        self.cuts: deque[int] = deque()
        self._listening: dict[str, trio.MemoryReceiveChannel[Any]] = {}
        self._changed = trio.Event()

    # --- for tests ------------------------------------------------------------------------

    @property
    def link(self) -> Any:
        """The latest link."""
        return self.links[-1]

    @property
    def heard(self) -> Recorder:
        """Recorder of the latest accepted link."""
        return self.recorders[-1]

    @property
    def engine(self) -> Engine:
        """The latest connection."""
        return self.engines[-1]

    def accept(self, link: Any, **options: Any) -> Recorder:
        """Accept *link* with a Recorder."""
        recorder = Recorder(settle=self.settle, credit=self.credit)
        self.recorders.append(recorder)
        source = link.source
        if isinstance(source, Source) and source.dynamic and "source" not in options:
            options["source"] = Source(address=f"made-{len(self.links)}", dynamic=True)
        link.accept(recorder, **options)
        return recorder

    def drop(self) -> None:
        """Lose the connection without a close."""
        self._scopes[-1].cancel()

    def mute(self) -> None:
        """Make the peer hang: on the latest connection, it neither reads nor writes from now on."""
        self._lines[-1].mute = True

    def cut(self, frames: int) -> None:
        """Lose the latest connection after *frames* more frames, counting both directions."""
        self._lines[-1].left = frames

    @property
    def frames(self) -> int:
        """Number of frames that the latest connection has carried."""
        return self._lines[-1].frames

    def close_door(self, name: str) -> None:
        """Stop listening at *name*; existing connections stay."""
        self._listening.pop(name).close()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until *condition* holds, evaluating it after each input of the peer and every 10 ms."""
        for _ in range(1000):
            if condition():
                return
            self._changed = trio.Event()
            with trio.move_on_after(0.01):
                await self._changed.wait()
        raise AssertionError("it never came to that")

    # --- running --------------------------------------------------------------------------

    async def listen(
        self, name: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve at ``memory://name`` until the listener is closed."""
        door = self._listening[name] = self.network.listen(name)
        task_status.started()
        async with trio.open_nursery() as nursery:
            try:
                async for stream in door:
                    self.dialled.append(name)
                    nursery.start_soon(self._serve, stream)
            except trio.ClosedResourceError:
                pass

    async def _serve(self, stream: Any) -> None:
        engine = amqp10.Front().server(
            ServerOptions(container_id=self.container_id, limits=self.limits, sasl_required=False),
            trio.current_time(),
        )
        self.engines.append(engine)
        line = _Line(stream, self.cuts.popleft() if self.cuts else None)
        self._lines.append(line)

        def handle(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, AttachRequested):
                    self.links.append(event.link)
                    self.on_attach(event.link)
                elif isinstance(event, LoginRequested):
                    handle(event.exchange.succeed(None, None))
                elif isinstance(event, ConnectionFailed):
                    self.failures.append(event.error)
                elif isinstance(event, Opened) and self.on_open is not None:
                    self.on_open(engine)
            self._changed.set()

        with trio.CancelScope() as scope:
            self._scopes.append(scope)
            await run_connection(line, engine, handle, limits=self.limits)


@asynccontextmanager
async def connected(far: FarEnd, name: str = "far", **options: Any) -> AsyncIterator[Connection]:
    """Open our client's connection to *far*; it recovers only if *options* ask for that."""
    options.setdefault("reconnect", None)
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, name)
        async with (
            Container("us", network=far.network) as us,
            us.connect(f"memory://{name}", **options) as peer,
        ):
            yield peer
        nursery.cancel_scope.cancel()
