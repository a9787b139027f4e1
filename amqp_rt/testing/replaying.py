"""Replay of one side of a recorded connection against a live program."""

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
from ..net.traces.octets import Frame, Splitter
from ..net.traces.recording import Kind, Trace, Traced, TraceWriter

__all__ = ["Replayed", "record", "replay"]

_READ: Final = 65_536
#: Frames that may differ in number and position.
_AT_WILL: Final = frozenset({"empty", "flow"})


class Replayed(Struct):
    """Frames that the live program sent, and those that its side sent in the trace."""

    heard: list[Frame]
    expected: list[Frame]

    @property
    def differences(self) -> list[str]:
        """Differences between the sequences of performatives, without flows."""
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
    """Count the frames that are not empty.

    Traces of equal runs may differ by an empty frame, if two timers expire at the same moment; so
    no replay waits for empty frames.
    """
    return sum(frame.name != "empty" for frame in frames)


class _Turn(Struct):
    """A chunk of our side: its time, and the number of the other side's frames before it."""

    at_s: float
    frames: int
    data: bytes


async def replay(
    trace: Trace, stream: trio.abc.Stream, *, client: bool, grace_s: float = 1.0
) -> Replayed:
    """Play the client's, or the server's, part of *trace* over *stream*.

    Its octets are sent at the recorded times (instantly under a virtual clock), but not before the
    other side has sent as many frames as in the trace. Recorded logins lack the responses, so a
    server must accept the client without them; a client has to give its links the names they have
    in the trace. The stream stays open.

    Args:
        trace: The recording, by either side.
        stream: Stream to the program that plays the other part.
        client: Whether the client's part is played, else the server's.
        grace_s: Seconds that the other side may be slower than in the trace.

    Raises:
        AmqpError: The trace is of another protocol, whose octets were not kept.
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
                break  # missing frames appear in the differences
        await wait_for(_spoken(expected))
        nursery.cancel_scope.cancel()
    return Replayed(heard, expected)


def _parts(trace: Trace, client: bool) -> tuple[list[_Turn], list[Frame]]:
    """Return the chunks that our side sends, and the frames of the other side."""
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
    """Yield a wrapper of *engine* that traces its input and output to the file *path*.

    For code that drives engines itself; containers have ``Container(trace=FOLDER)``.

    Args:
        engine: The engine; drive the yielded object instead of it.
        path: The file, which is overwritten.
        client: Whether the engine is a client's.
        address: Description of the peer.
        clock: Clock of the engine, by default the system's.
    """
    with open(path, "wb", buffering=0) as file:
        writer = TraceWriter(file, client=client, address=address, clock=clock or SystemClock())
        try:
            yield Traced(engine, writer)
        finally:
            writer.close()
