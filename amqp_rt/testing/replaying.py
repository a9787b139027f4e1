"""One side of a recorded connection, played again to a live program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Final

import trio
from msgspec import Struct

from ..clock import Clock, SystemClock
from ..errors import AmqpError
from ..fronts.base import ProtocolEngine
from ..net.traces import Kind, Trace, Traced, TraceWriter
from .octets import Frame, Splitter

__all__ = ["Replayed", "record", "replay"]

_READ: Final = 65_536
#: Frames whose number and place are up to the one who says them.
_AT_WILL: Final = frozenset({"empty", "flow"})


class Replayed(Struct):
    """What the live program said, beside what its part was in the trace."""

    heard: list[Frame]
    expected: list[Frame]

    @property
    def differences(self) -> list[str]:
        """Where the program said other performatives than in the trace; flows do not count."""
        heard = [frame.name for frame in self.heard if frame.name not in _AT_WILL]
        expected = [frame.name for frame in self.expected if frame.name not in _AT_WILL]
        found = [
            f"frame {at}: {mine} instead of {theirs}"
            for at, (mine, theirs) in enumerate(zip(heard, expected, strict=False))
            if mine != theirs
        ]
        if len(heard) != len(expected):
            found.append(f"{len(heard)} frames instead of {len(expected)}")
        return found


def _spoken(frames: list[Frame]) -> int:
    """How many of *frames* say something. Of empty ones there can be one more or less in a trace
    than in another, when two timers end in the same moment; nobody waits for them."""
    return sum(frame.name != "empty" for frame in frames)


class _Turn(Struct):
    """A chunk of our side: when it was written, and after how many frames of the other one."""

    at_s: float
    frames: int
    data: bytes


async def replay(
    trace: Trace, stream: trio.abc.Stream, *, client: bool, grace_s: float = 1.0
) -> Replayed:
    """Play the client's, or the server's, part of *trace* over *stream*.

    What that side wrote is written at the same times, under a virtual clock in no time, and never
    before the other side has said as many frames as in the trace. Of a recorded login the
    responses are missing, so a server must let the client in without; a client has to give its links
    the names that they have in the trace. The stream stays open.

    Args:
        trace: What was recorded, by whichever side.
        stream: To the program that plays the other part.
        client: Whose part is played: the client's or the server's.
        grace_s: Seconds that the other side may take longer than in the trace.

    Raises:
        AmqpError: The trace has octets that were not kept.
    """
    turns, expected = _parts(trace, client)
    splitter = Splitter()
    heard: list[Frame] = []
    spoken = 0
    changed = trio.Event()
    ended = False
    begin = trio.current_time()

    async def read() -> None:
        nonlocal changed, ended, spoken
        while not ended:
            try:
                data = await stream.receive_some(_READ)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            frames = splitter.feed(bytes(data))
            heard.extend(frames)
            spoken += _spoken(frames)
            ended = not data
            changed.set()
            changed = trio.Event()

    async def wait_for(count: int) -> None:
        with trio.move_on_after(grace_s):
            while spoken < count and not ended:
                await changed.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for turn in turns:
            await trio.sleep_until(begin + turn.at_s)
            await wait_for(turn.frames)
            try:
                await stream.send_all(turn.data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                break  # the differences say what is missing
        await wait_for(_spoken(expected))
        nursery.cancel_scope.cancel()
    return Replayed(heard, expected)


def _parts(trace: Trace, client: bool) -> tuple[list[_Turn], list[Frame]]:
    """What our side writes, and what the other one wrote."""
    ours = Kind.SENT if client == trace.client else Kind.RECEIVED
    splitter = Splitter()
    turns: list[_Turn] = []
    expected: list[Frame] = []
    spoken = 0
    for each in trace.records:
        if each.kind in (Kind.OMITTED_RECEIVED, Kind.OMITTED_SENT):
            raise AmqpError("a trace of another protocol than AMQP 1.0 cannot be played again")
        if each.kind is ours:
            turns.append(_Turn(each.at_s, spoken, each.data))
        elif each.kind in (Kind.SENT, Kind.RECEIVED):
            frames = splitter.feed(each.data)
            expected += frames
            spoken += _spoken(frames)
    return turns, expected


@contextmanager
def record(
    engine: ProtocolEngine,
    path: str | PathLike[str],
    *,
    client: bool,
    address: str = "",
    clock: Clock | None = None,
) -> Iterator[ProtocolEngine]:
    """*engine*, with a trace in the file *path* of what it hears and says within the block.

    For those who drive engines themselves; a container does it by ``Container(trace=FOLDER)``.

    Args:
        engine: Drive what the block gets instead of it.
        path: Written anew.
        client: The engine is that of a client.
        address: The other side, in words.
        clock: The clock of the engine, by default the system's.
    """
    with open(path, "wb", buffering=0) as file:
        writer = TraceWriter(file, client=client, address=address, clock=clock or SystemClock())
        try:
            yield Traced(engine, writer)
        finally:
            writer.close()
