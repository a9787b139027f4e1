"""Carrying one engine on one byte stream, with plain calls that never wait.

A carrier moves bytes between an engine and a channel, which is a non-blocking socket or has the
same interface. It decides when to read and send, when to give up, and how to end. The waiting is
done by a host: two tasks (:mod:`.driver`), one task for all sockets (:mod:`.reactor`), or a plain
thread (:mod:`.blocking`). Therefore this module depends neither on trio nor on a protocol.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Protocol, TypeAlias

from ..clock import Clock
from ..events import Closed, ConnectionFailed, Event
from ..fronts.base import ProtocolEngine
from ..limits import Limits
from ..outcomes import Error

#: Bytes requested from a channel at a time; larger reads gain nothing.
READ_SIZE: Final = 65_536
#: Chunks read from one connection before the others get a turn.
READS_IN_A_ROW: Final = 4
#: Chunks read from a dead channel at most, which are more than its buffer usually has.
_LAST_READS: Final = 32
#: Work of an engine before the others get a turn (see ``ProtocolEngine.work_max``): some
#: milliseconds.
_WORK_IN_A_ROW: Final = 1_000
#: Bytes sent by one connection before the others get a turn.
_SENT_IN_A_ROW: Final = 1_048_576
#: Small buffers are joined up to this size; larger ones are not copied.
_JOIN_MAX: Final = 65_536
_LARGE: Final = 16_384
#: Buffers passed to one ``sendmsg``; below every system's IOV_MAX.
GATHER_MAX: Final = 512
#: Seconds, and bytes, until the stream is dropped after our last output, so that the peer can read
#: it. Tests shorten the time; it is not final, since mypyc writes what is into the code.
_LINGER_S: float = 1.0
_LINGER_BYTES: Final = 1_048_576
#: Reading stops when this many times ``output_max`` wait. The engine holds back output of links at
#: one; another one may be in flight. Only output caused by reading comes on top, and two peers that
#: both send as much as possible must not stop reading each other.
_PAUSE_AT: Final = 3

#: Windows has no ``sendmsg``.
_GATHERS: Final = hasattr(socket.socket, "sendmsg")

Handle: TypeAlias = Callable[[list[Event]], None]


class NonBlockingSocket(Protocol):
    """Interface of a non-blocking socket; ``BlockingIOError`` means "not now"."""

    def recv(self, size: int, /) -> bytes: ...
    def send(self, data: bytes | memoryview, /) -> int: ...
    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class CarrierHost(Protocol):
    """Waiting side of a carrier. Its calls to the carrier come from the host's own context."""

    def watch(self, carrier: Carrier) -> None:
        """Note that ``wants_read`` or ``wants_write`` has changed."""

    def alarm(self, carrier: Carrier) -> None:
        """Note that ``wakes_at`` has become earlier."""

    def later(self, carrier: Carrier) -> None:
        """Call ``flush`` in the scheduler's next pass, or at the end of the current one."""

    def ended(self, carrier: Carrier) -> None:
        """Note that the carrier has ended (``over``)."""


class Carrier:
    """Connection of *engine* and *channel*, driven by a host.

    Output caused by a chunk of input is sent right after it. Other output waits for the host's
    ``flush`` in the scheduler's next pass, so that the output of one pass makes one write: a reply
    and the settlement of its request, or the messages of many tasks.

    Args:
        channel: Where bytes are read and sent; its owner closes it after the end.
        engine: The engine to carry.
        handle: Called with the events of each chunk. A plain call.
        limits: ``output_max`` and ``write_stall_s`` are used here.
        clock: The clock of the engine.
        gathers: The channel has ``sendmsg``.
        closes: Closing the channel ends the stream properly; False where the end needs an exchange
            of its own, as in TLS. A peer that breaks a rule of TLS gets an answer, too.
        linger_s: Seconds that the peer has to read our last output; one by default.
    """

    __slots__ = (
        "_again",
        "_bounded",
        "_broken",
        "_closes",
        "_discarded",
        "_dismissed",
        "_eof",
        "_gathers",
        "_gives_up_at",
        "_handle",
        "_heard_close",
        "_host",
        "_inside",
        "_leaves_at",
        "_leaving",
        "_limits",
        "_linger_s",
        "_pending",
        "_pending_size",
        "_sending",
        "_stalls_at",
        "_watched_write",
        "channel",
        "clock",
        "engine",
        "failure",
        "notified",
        "over",
        "resuming",
        "token",
        "wakes_at",
        "wants_read",
        "wants_write",
    )

    def __init__(
        self,
        channel: NonBlockingSocket,
        engine: ProtocolEngine,
        handle: Handle,
        *,
        limits: Limits,
        clock: Clock,
        gathers: bool = _GATHERS,
        closes: bool = True,
        linger_s: float | None = None,
    ) -> None:
        self.channel = channel
        self.engine = engine
        self.clock = clock
        #: The carrier has ended, and the host may release it: nothing more will be read or sent.
        self.over = False
        #: Exception raised by the program in a step, if any.
        self.failure: Exception | None = None
        self.wants_read = True
        #: The channel is full; ``writable`` has to be called when it has room.
        self.wants_write = False
        #: The engine has unprocessed input, with which ``flush`` continues.
        self.resuming = False
        #: When ``expire`` has to be called, in the engine's clock.
        self.wakes_at = inf
        #: Free for use by the host.
        self.token = -1
        #: Whether endpoints or the owner may have been notified of something; reset by the host.
        self.notified = False
        self._handle = handle
        self._limits = limits
        self._gathers = gathers
        self._closes = closes
        self._linger_s = _LINGER_S if linger_s is None else linger_s
        self._host: CarrierHost | None = None
        self._pending: list[bytes | memoryview] = []
        self._pending_size = 0
        self._inside = False
        self._sending = False
        #: Whether the engine may have more output than it has just given.
        self._again = True
        self._eof = False
        self._broken: str | None = None
        #: The peer has closed the connection in the protocol.
        self._heard_close = False
        self._watched_write = False
        self._leaving = False
        #: The peer broke a rule below the protocol. It may still read the answer.
        self._dismissed = False
        self._discarded = 0
        #: One of the three below is set.
        self._bounded = False
        self._stalls_at = inf
        self._leaves_at = inf
        self._gives_up_at = inf

    # --- called by the host --------------------------------------------------------------

    def start(self, host: CarrierHost, initial: bytes = b"") -> None:
        """Begin, with bytes that were read from the channel already."""
        self._host = host
        self.engine.work_max = _WORK_IN_A_ROW
        self.engine.on_output = self.output
        if initial:
            self._feed(initial)
        self._send()
        self._settle()

    def become(self, engine: ProtocolEngine, handle: Handle) -> None:
        """Carry *engine* from now on, which continues with the connection of the present one.

        For the present engine to call while it receives; it passes on what it has received.
        """
        self.engine.on_output = nothing
        self.engine = engine
        self._handle = handle
        engine.work_max = _WORK_IN_A_ROW
        engine.on_output = self.output

    def readable(self) -> int:
        """Read one chunk from the channel; return its size."""
        try:
            data = self.channel.recv(READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._fail_read(error)
            self._settle()
            return 0
        if not data:
            self._take_eof()
        elif self.engine.finished or self._dismissed:
            self._discarded += len(data)
            if self._discarded > _LINGER_BYTES:
                self._end()
                return 0
        else:
            self._feed(data)
            self._send()
        self._settle()
        return len(data)

    def writable(self) -> None:
        """Continue sending, since the channel has room again."""
        self.wants_write = False
        self._stalls_at = inf
        # Otherwise each later step would look at timers that are not set.
        self._bounded = self._leaves_at < inf or self._gives_up_at < inf
        self.flush()

    def hang_up(self) -> None:
        """Handle a channel that is dead in both directions."""
        if self.wants_write:
            self.writable()
        else:
            # What the peer sent before is still there if reading had paused.
            self._read_last_words()
            self.drop("the peer is gone")

    def flush(self) -> None:
        """Continue with unprocessed input, and send pending output."""
        if self.resuming:
            self.resuming = False
            if not self.engine.finished:
                self._feed(b"")
        self._send()
        self._settle()

    def expire(self, now: float) -> None:
        """Handle the timers that are due, when ``wakes_at`` may have come."""
        self.wakes_at = inf
        if now >= self._stalls_at:
            self.drop(f"the peer has not read for {self._limits.write_stall_s:g} s")
        elif now >= self._gives_up_at:
            self.drop("the peer did not answer our close in time")
        elif now >= self._leaves_at:
            self._end()
        else:
            if now >= self.engine.deadline:
                self._inside = True
                try:
                    self._report(self.engine.tick(now))
                finally:
                    self._inside = False
            self._send()
            self._settle()

    def stop(self, grace_s: float) -> None:
        """End politely: our close is sent, and the peer has *grace_s* to answer."""
        if self.over:
            return
        self._bounded = True
        self._gives_up_at = self.clock.monotonic() + grace_s
        self.engine.close()
        self.flush()

    def drop(self, why: str) -> None:
        """End abruptly. Engine and links are notified; *why* is reported to the owner."""
        if self.over:
            return
        self.engine.on_output = nothing
        events = self._lose(why)
        self._end()
        self._report(events)

    def _lose(self, why: str) -> list[Event]:
        """Tell the engine that the connection ends for the reason *why*; return its events."""
        if self.engine.finished:
            return []
        events = self.engine.receive_eof(self.clock.monotonic())
        for at, event in enumerate(events):
            if isinstance(event, ConnectionFailed):
                events[at] = ConnectionFailed(Error(event.error.condition, why))
        return events

    def fail(self, error: Exception) -> None:
        """Drop the connection after a step raised *error*, and keep *error* for the owner.

        An exception in a step is a fault of the program.
        """
        if self.failure is None:
            self.failure = error
        try:
            self.drop("an internal error")
        except Exception as another:
            self.failure.add_note(f"dropping the connection then raised {another!r}")
            if not self.over:
                self._end()

    # --- output --------------------------------------------------------------------------

    def output(self) -> None:
        """Schedule a flush, since the engine has output or has finished.

        May be called from anywhere in the program, also from within the engine: nothing is sent
        here.
        """
        if self._inside or self._sending or self.over:
            self._again = True
            return
        if self.wants_write and (self.wants_read or self._eof):
            self._watch_clock()
        else:
            # Also if the channel is full, when reading has paused: the engine may be able to take more.
            assert self._host is not None
            self._host.later(self)

    def _send(self) -> None:
        """Send until no output is left, the channel is full, or other connections are due."""
        if self.wants_write or self._leaving or self._broken is not None:
            return
        engine = self.engine
        if self._dismissed:
            self._leave()
            return
        sent_in_a_row = 0
        self._sending = True
        try:
            self._again = True
            while self._pending or (self._again and self._take()):
                pending = self._pending
                if len(pending) == 1 or not self._gathers:
                    buffer = pending[0]
                    offered = len(buffer)
                    sent = self.channel.send(buffer)
                else:
                    gathered = pending[:GATHER_MAX]
                    offered = sum(map(len, gathered))
                    sent = self.channel.sendmsg(gathered)
                if sent == self._pending_size:
                    self._pending = []
                    self._pending_size = 0
                else:
                    self._pending_size -= sent
                    drop_sent(self._pending, sent)
                if sent < offered:
                    self._block()
                    return
                sent_in_a_row += sent
                if sent_in_a_row >= _SENT_IN_A_ROW:
                    assert self._host is not None
                    self._host.later(self)
                    return
        except (BlockingIOError, InterruptedError):
            self._block()
            return
        except OSError as error:
            self._break(error)
            return
        finally:
            self._sending = False
        if not engine.finished:
            return
        if self._heard_close and self._closes:
            # No further input is expected that closing could leave unread.
            self._end()
        else:
            self._leave()

    def _take(self) -> bool:
        """Take output from the engine; join small buffers, leave large ones to ``sendmsg``."""
        # An engine that notifies endpoints while it gives its output may have more afterwards.
        self._again = getattr(self.engine, "notifies", True)
        if self._again:
            self.notified = True
        buffers = self.engine.take()
        if not buffers:
            return False
        if len(buffers) == 1:
            self._pending = [buffers[0]]
            self._pending_size = len(buffers[0])
            return True
        size = self._pending_size = sum(map(len, buffers))
        self._pending = [b"".join(buffers)] if size <= _JOIN_MAX else _join_small(buffers)
        return True

    def _block(self) -> None:
        self.wants_write = True
        self._bounded = True
        self._stalls_at = self.clock.monotonic() + self._limits.write_stall_s

    def _break(self, error: OSError) -> None:
        if self._broken is None:
            self._broken = error.strerror or str(error)

    def _fail_read(self, error: OSError) -> None:
        """End the connection after a failed read.

        Where the channel has a way of its own to end, it may have answered a fault of the peer:
        closing at once would reset the connection, and the reset may overtake the answer.
        """
        if self._closes or self._leaving:
            self._break(error)
            return
        self._dismissed = True
        self.engine.on_output = nothing
        self._pending = []
        self._pending_size = 0
        self._report(self._lose(error.strerror or str(error)))
        self._send()

    # --- input ---------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        self._inside = True
        self.notified = True
        try:
            events = self.engine.receive(data, self.clock.monotonic())
            if events:
                if self.engine.finished:
                    self._heard_close = any(isinstance(event, Closed) for event in events)
                self._handle(events)
        finally:
            self._inside = False

    def _take_eof(self) -> None:
        self._eof = True
        if self._leaving:
            self._end()
            return
        if not self.engine.finished:
            self._inside = True
            try:
                self._report(self.engine.receive_eof(self.clock.monotonic()))
            finally:
                self._inside = False
        self._send()
        if not self.engine.finished:
            # The engine may still have output, but only for a limited time.
            self._bounded = True
            self._gives_up_at = self.clock.monotonic() + self._limits.write_stall_s

    def _report(self, events: list[Event]) -> None:
        if events:
            self.notified = True
            self._handle(events)

    # --- the end -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Update the host's waits; called after every step."""
        if self.over:
            return
        if self._broken is not None:
            self._read_last_words()
            self.drop(self._broken)
            return
        host = self._host
        assert host is not None
        reads = not self._eof
        writes = self.wants_write
        if writes and reads:
            waiting = self._pending_size + self.engine.output_size
            reads = waiting <= _PAUSE_AT * self._limits.output_max
        if self.engine.unread and not self.engine.finished:
            if reads and not self.resuming:
                self.resuming = True
                host.later(self)
            reads = False
        elif self.engine.congested and not self.engine.finished:
            reads = False
        if reads != self.wants_read or writes != self._watched_write:
            self.wants_read = reads
            self._watched_write = writes
            host.watch(self)
        deadline = self.engine.deadline
        if deadline < self.wakes_at and deadline <= (now := self.clock.monotonic()):
            # Due already: the grace period of a close begins when the close is sent. The engine may wake tasks.
            self.notified = True
            self._report(self.engine.tick(now))
            self._watch_clock()
        elif deadline < self.wakes_at or self._bounded:
            self._watch_clock()

    def _watch_clock(self) -> None:
        deadline = self.engine.deadline
        if self._bounded:
            deadline = min(deadline, self._stalls_at, self._leaves_at, self._gives_up_at)
        if deadline < self.wakes_at:
            self.wakes_at = deadline
            assert self._host is not None
            self._host.alarm(self)

    def _read_last_words(self) -> None:
        """Read remaining input after a failed send: the peer may have sent the reason."""
        for _ in range(_LAST_READS):
            if self._eof or self.engine.finished:
                return
            try:
                data = self.channel.recv(READ_SIZE)
            except OSError:
                return
            if not data:
                return
            self._feed(data)
            if self.engine.unread:
                return

    def _leave(self) -> None:
        """Shut down writing after all output, and give the peer a moment to read.

        Closing with unread input would reset the connection, and the reset may overtake output that
        the peer has not read yet.
        """
        try:
            self.channel.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._block()
            return
        except OSError:
            self._end()
            return
        if self._eof:
            self._end()
            return
        self._leaving = True
        self._bounded = True
        self._leaves_at = self.clock.monotonic() + self._linger_s

    def _end(self) -> None:
        self.over = True
        self.engine.on_output = nothing
        if self._host is not None:
            self._host.ended(self)

    def leave(self) -> None:
        """Release the host, once nothing calls the carrier any more: each refers to the other."""
        self._host = None


def drop_sent(pending: list[bytes | memoryview], sent: int) -> None:
    """Remove the first *sent* bytes of *pending*."""
    gone = 0
    for buffer in pending:
        if sent < len(buffer):
            break
        sent -= len(buffer)
        gone += 1
    del pending[:gone]
    if sent:
        pending[0] = memoryview(pending[0])[sent:]


def _join_small(buffers: list[bytes]) -> list[bytes | memoryview]:
    """Join neighbouring small buffers; the bytes remain the same."""
    joined: list[bytes | memoryview] = []
    run: list[bytes] = []
    size = 0
    for buffer in buffers:
        if len(buffer) < _LARGE:
            run.append(buffer)
            size += len(buffer)
            if size < _JOIN_MAX:
                continue
        if run:
            joined.append(b"".join(run))
            run, size = [], 0
        if len(buffer) >= _LARGE:
            joined.append(buffer)
    if run:
        joined.append(b"".join(run))
    return joined


def nothing() -> None:
    """Do nothing; the default of callbacks."""
