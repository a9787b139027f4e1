"""A network in memory with faults given as data, and all randomness drawn from one seed.

Both ends of a connection are the streams of :mod:`amqp_rt.net.memory`; a line between them takes
the octets of one end and passes them to the other with the faults applied. Drivers, engines and all
layers above run as over sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from socket import SHUT_WR
from typing import Final
from zlib import crc32

import trio

from ..errors import ConnectFailed
from ..net.memory import MemoryNetwork, MemoryStream, memory_stream_pair
from .faults import Corrupt, Cut, Delay, HalfClose, InjectedFault, Slow, Split, Stall

__all__ = ["SimulatedNetwork", "SimulationTrace"]

#: Octets that a line reads at a time.
_PIECE: Final = 65_536
#: Longest latency without faults, in seconds.
_LATENCY_S: Final = 0.02
#: Seconds between pieces of split octets, so that each is read separately.
_GAP_S: Final = 1e-6

#: Names of frame bodies by descriptor code (Part 2 §2.7, Part 5 §5.3.3).
_NAMES: Final = {
    **dict(
        enumerate(
            (
                *("open", "begin", "attach", "flow", "transfer"),
                *("disposition", "detach", "end", "close"),
            ),
            0x10,
        )
    ),
    **dict(
        enumerate(
            (
                *("sasl-mechanisms", "sasl-init", "sasl-challenge"),
                *("sasl-response", "sasl-outcome"),
            ),
            0x40,
        )
    ),
}


class SimulationTrace:
    """Record of a simulation: a line for each frame, commit and fault.

    Equal seeds give equal lines.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        """Append *text* with the time."""
        self.lines.append(f"{trio.current_time():12.6f} {text}")

    def __str__(self) -> str:
        return "\n".join(self.lines)


class _Frames:
    """Finds the ends of frames in one direction."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._size = 0
        self._crc = 0

    def split(self, data: bytes) -> Iterator[tuple[bytes, str]]:
        """Yield parts of *data*, each with the frame it completes, as name, size and checksum."""
        while data:
            take = self._left or 8 - len(self._head)
            part, data = data[:take], data[take:]
            self._crc = crc32(part, self._crc)
            self._size += len(part)
            if not self._left:
                self._head += part
                if len(self._head) < 8:
                    yield part, ""
                    return
                if not self._head.startswith(b"AMQP"):
                    self._left = max(int.from_bytes(self._head[:4], "big") - 8, 0)
            else:
                self._left -= len(part)
                if len(self._head) < 11:
                    self._head += part[: 11 - len(self._head)]
            if self._left:
                yield part, ""
                continue
            yield part, f"{self._name():15} {self._size:6} {self._crc:08x}"
            self._head, self._size, self._crc = b"", 0, 0

    def _name(self) -> str:
        head = self._head
        if head.startswith(b"AMQP"):
            return "header"
        if len(head) < 11:
            return "empty"
        return _NAMES.get(head[10], "?") if head[8:10] == b"\0\x53" else "?"


class _Over(Exception):
    """No more octets pass the line in this direction."""


class _Line:
    """A connection and its faults."""

    def __init__(
        self,
        network: SimulatedNetwork,
        number: int,
        hosts: tuple[str, str],
        ends: tuple[MemoryStream, MemoryStream],
    ) -> None:
        self.network = network
        self.number = number
        #: The host that dialled, and the one that listens.
        self.hosts = hosts
        self.scope = trio.CancelScope()
        self.over = False
        self._ends = ends
        self._luck = network.luck(f"line {number}")
        self._frames = 0
        self._cut_at: int | None = None
        self._latency_s = self._luck.uniform(0, _LATENCY_S)
        self._piece = _PIECE
        self._rates: dict[bool, int] = {}
        self._passed = {False: 0, True: 0}
        marks: dict[bool, list[tuple[int, InjectedFault]]] = {False: [], True: []}
        for fault in network.faults:
            if getattr(fault, "connection", None) != number:
                continue
            if isinstance(fault, Split):
                self._piece = min(self._piece, fault.size)
            elif isinstance(fault, Delay):
                self._latency_s += fault.seconds
            elif isinstance(fault, Slow):
                self._rates[fault.back] = fault.octets_per_s
            elif isinstance(fault, Cut) and fault.frames is not None:
                self._cut_at = min(fault.frames, self._cut_at or fault.frames)
            elif isinstance(fault, Corrupt):
                marks[fault.back].append((fault.octet, fault))
            elif isinstance(fault, Cut | HalfClose | Stall):
                marks[fault.back].append((fault.octets, fault))
        self._marks = {
            back: deque(sorted(found, key=lambda mark: mark[0])) for back, found in marks.items()
        }

    def __str__(self) -> str:
        return f"#{self.number} {self.hosts[0]}–{self.hosts[1]}"

    def cut(self, why: str) -> None:
        """Close both ends of the connection."""
        if not self.over:
            self.over = True
            self.network.trace.add(f"{self} {why}")
            for end in self._ends:
                end.close()
            self.scope.cancel()

    def vanish(self, host: str, why: str) -> None:
        """Close the end of *host* only; the other host does not see the end of the connection."""
        if not self.over:
            self.over = True
            self.network.trace.add(f"{self} {why}")
            self._ends[host == self.hosts[1]].close()
            self.scope.cancel()

    async def run(self) -> None:
        """Carry octets both ways until both directions have ended."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, False)
                nursery.start_soon(self._carry, True)
        if not self.over:
            self.cut("has ended")
        self.network.forget(self)

    async def _carry(self, back: bool) -> None:
        source, sink = self._ends if not back else self._ends[::-1]
        frames = _Frames()
        try:
            while data := await self._take(source):
                await trio.sleep(self._latency_s * self._luck.uniform(0.5, 1))
                for part, completed in frames.split(data):
                    await self._pass(part, sink, back)
                    if completed:
                        self._count(completed, back)
            await trio.sleep(self._latency_s)
        except _Over:
            pass
        if not self.over:
            self.network.trace.add(f"{self} {_arrow(back)} end")
            sink.shutdown(SHUT_WR)
        # Read on and discard: a sender must not block because the receiver has gone.
        while await self._take(source):
            pass

    async def _take(self, source: MemoryStream) -> bytes:
        await source.wait_readable()
        try:
            return source.recv(_PIECE)
        except OSError:
            return b""

    async def _pass(self, data: bytes, sink: MemoryStream, back: bool) -> None:
        marks, rate = self._marks[back], self._rates.get(back)
        while data:
            await self.network.passable(*(self.hosts[::-1] if back else self.hosts))
            passed = self._passed[back]
            if self.network.is_calm:
                marks.clear()
            elif marks and marks[0][0] <= passed:
                data = await self._trouble(marks.popleft()[1], data)
                continue
            size = min(self._piece, marks[0][0] - passed) if marks else self._piece
            if rate is not None:
                size = min(size, max(rate // 10, 1))
            part, data = data[:size], data[size:]
            try:
                while True:
                    try:
                        sink.send(part)
                        break
                    except BlockingIOError:
                        await sink.wait_writable()
            except OSError:
                raise _Over from None
            self._passed[back] += len(part)
            if rate is not None:
                await trio.sleep(len(part) / rate)
            elif self._piece < _PIECE:
                await trio.sleep(_GAP_S)

    async def _trouble(self, fault: InjectedFault, data: bytes) -> bytes:
        """Apply a fault that is due; return the octets that remain of *data*."""
        self.network.trace.add(f"{self} {fault}")
        if isinstance(fault, Corrupt):
            return bytes([data[0] ^ fault.mask]) + data[1:]
        if isinstance(fault, Stall):
            await self.network.stalled(fault.seconds)
            return data
        if isinstance(fault, Cut):
            self.cut("is cut")
            await trio.lowlevel.checkpoint()
        raise _Over

    def _count(self, completed: str, back: bool) -> None:
        self._frames += 1
        self.network.trace.add(f"{self} {_arrow(back)} {completed}")
        if self.network.count() or (self._frames == self._cut_at and not self.network.is_calm):
            self.cut("is cut")
            raise _Over


def _arrow(back: bool) -> str:
    return "←" if back else "→"


class _HostNetwork(MemoryNetwork):
    """The network as one host uses it."""

    def __init__(self, network: SimulatedNetwork, host: str) -> None:
        super().__init__()
        self._network = network
        self._host = host

    def listen(self, name: str) -> trio.MemoryReceiveChannel[MemoryStream]:
        return self._network.listen(self._host, name)

    async def dial(self, name: str) -> MemoryStream:
        return await self._network.dial(self._host, name)


class SimulatedNetwork:
    """Connects hosts by lines with faults.

    Args:
        faults: The faults to inject.
        luck: Returns an independent random generator for a name.
        trace: Records the events.
        nursery: Runs the lines.
    """

    def __init__(
        self,
        faults: Sequence[InjectedFault],
        luck: Callable[[str], Random],
        trace: SimulationTrace,
        nursery: trio.Nursery,
    ) -> None:
        self.faults = faults
        self.luck = luck
        self.trace = trace
        #: Frames of all connections so far.
        self.frames = 0
        #: Whether a cut after a number of frames of all connections has happened.
        self.was_cut = False
        self._cuts = {
            fault.frames
            for fault in faults
            if isinstance(fault, Cut) and fault.connection is None and fault.frames is not None
        }
        self._nursery = nursery
        self._listeners: dict[str, tuple[str, MemoryNetwork]] = {}
        self._lines: list[_Line] = []
        self._dialled = 0
        #: Number of partitions of each host in effect.
        self._apart: dict[str, int] = {}
        #: Number of faults in effect by which octets of the first host do not reach the second, or
        #: any if that is None.
        self._mute: dict[tuple[str, str | None], int] = {}
        self._joined = trio.Event()
        #: Set when all faults have ended.
        self._calm = trio.Event()

    def door(self, host: str) -> MemoryNetwork:
        """Return the network for *host* to dial and listen on."""
        return _HostNetwork(self, host)

    def listen(self, host: str, name: str) -> trio.MemoryReceiveChannel[MemoryStream]:
        """Listen at *name* for *host*."""
        known = self._listeners.get(name)
        listening = MemoryNetwork() if known is None or known[0] != host else known[1]
        channel = listening.listen(name)
        self._listeners[name] = host, listening
        return channel

    async def dial(self, host: str, name: str) -> MemoryStream:
        """Connect *host* to the listener at *name*, waiting for the end of partitions.

        Raises:
            ConnectFailed: No host listens there.
        """
        await trio.sleep(_LATENCY_S / 10)
        await self.passable(host)
        known = self._listeners.get(name)
        if known is None:
            raise ConnectFailed(f"cannot connect to memory://{name}: nothing listens there")
        listener, listening = known
        # The answer has to come back.
        await self.passable(host, listener)
        await self.passable(listener, host)
        far = await listening.dial(name)
        ours, near = memory_stream_pair()
        line = _Line(self, self._dialled, (host, listener), (near, far))
        self._dialled += 1
        self._lines.append(line)
        self.trace.add(f"{line} is dialled")
        self._nursery.start_soon(line.run)
        return ours

    def forget(self, line: _Line) -> None:
        """Remove a line that has ended."""
        self._lines.remove(line)

    def count(self) -> bool:
        """Count a frame; return whether its connection is to be cut now."""
        self.frames += 1
        if self.frames in self._cuts and not self.is_calm:
            self.was_cut = True
            return True
        return False

    # --- --- faults of hosts -----------------------------------------------------------------

    def drop(self, host: str, *, silent: bool = False) -> None:
        """Remove the listeners of *host* and cut its connections, unseen by peers if *silent*."""
        for name in [name for name, (owner, _) in self._listeners.items() if owner == host]:
            del self._listeners[name]
        if not silent:
            self.cut(host)
            return
        for line in [each for each in self._lines if host in each.hosts]:
            line.vanish(host, "is dead")

    def cut(self, host: str) -> None:
        """Cut the connections of *host*; both sides see their end."""
        for line in [each for each in self._lines if host in each.hosts]:
            line.cut("is cut")

    @contextmanager
    def apart(self, host: str) -> Iterator[None]:
        """Cut *host* off from all others within the block."""
        self._apart[host] = self._apart.get(host, 0) + 1
        self.trace.add(f"{host} is cut off")
        try:
            yield
        finally:
            self._apart[host] -= 1
            self.trace.add(f"{host} is reached again")
            self._rejoin()

    @contextmanager
    def mute(self, host: str, to: str | None = None) -> Iterator[None]:
        """Delay what *host* sends, to host *to* or to all, within the block."""
        way = host, to
        self._mute[way] = self._mute.get(way, 0) + 1
        self.trace.add(f"{host} does not reach {to or 'others'}")
        try:
            yield
        finally:
            self._mute[way] -= 1
            self.trace.add(f"{host} reaches {to or 'others'} again")
            self._rejoin()

    def _rejoin(self) -> None:
        self._joined.set()
        self._joined = trio.Event()

    async def passable(self, sender: str, receiver: str | None = None) -> None:
        """Wait until octets of *sender* reach *receiver*, or others at all."""
        while self._is_blocked(sender, receiver):
            await self._joined.wait()

    def _is_blocked(self, sender: str, receiver: str | None) -> bool:
        if self._apart and (self._apart.get(sender) or self._apart.get(receiver or sender)):
            return True
        mute = self._mute
        return bool(mute and (mute.get((sender, None)) or mute.get((sender, receiver))))

    async def stalled(self, seconds: float) -> None:
        """Wait for *seconds*, or until all faults have ended."""
        with trio.move_on_after(seconds):
            await self._calm.wait()

    @property
    def is_calm(self) -> bool:
        """Whether all faults have ended."""
        return self._calm.is_set()

    def calm(self) -> None:
        """End all faults, and begin no others. Slow connections stay slow."""
        self._calm.set()
