"""Traces: files with the input and output of a connection, for inspection and for replay.

A trace begins with ``AMQPTRC`` and the octet 1. Records follow: a kind (one octet), microseconds
since the start of the connection (eight octets), a length (four), and that many octets. The first
record describes the connection, as JSON. The octets are those of the engine, so that TLS and
WebSocket are removed. The responses of a SASL login, tokens, and the passwords of managed users are
masked (:mod:`.masks`); other messages are recorded with any secrets they contain.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from msgspec import Struct

from ...clock import Clock
from ...errors import AmqpError
from ...events import Event, Peer
from ...fronts.base import ProtocolEngine
from ...fronts.tracing import TRACINGS, TraceMask, Tracing
from ...limits import DEFAULT_LIMITS, Limits
from ...outcomes import Error
from .masks import MASK, FrameMask

__all__ = [
    "Kind",
    "Mask",
    "Trace",
    "TraceRecord",
    "TraceSink",
    "TraceSource",
    "TraceWriter",
    "Traced",
    "Traces",
    "read_trace",
    "traced",
]

_log = logging.getLogger("amqp_rt.net")

MAGIC: Final = b"AMQPTRC\x01"
_RECORD: Final = struct.Struct(">BQI")
_AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
_SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
#: Maximum octets of a SASL frame that are held back; the standard allows 512 (Part 5 §5.3.3).
_HELD_MAX: Final = 65_536


class Kind(IntEnum):
    """Kind of a record."""

    ABOUT = 0
    RECEIVED = 1
    SENT = 2
    #: The peer has ended its half of the stream.
    RECEIVED_EOF = 3
    #: The connection has ended.
    END = 4
    #: The trace had no room for further records.
    CUT = 5
    #: Octets of a protocol whose secrets are unknown here: their number, in eight octets.
    OMITTED_RECEIVED = 6
    OMITTED_SENT = 7


class TraceRecord(Struct, frozen=True):
    """Record of a trace."""

    kind: Kind
    #: Seconds since the start of the connection.
    at_s: float
    data: bytes


class _About(Struct, frozen=True):
    client: bool
    address: str
    began: float


class Trace(Struct, frozen=True, kw_only=True):
    """Recorded connection."""

    #: Whether the recording side was the one that dialled.
    client: bool
    #: Address of the other side, as text.
    address: str
    #: Start of the connection, in seconds since 1970.
    began: float
    records: list[TraceRecord]
    #: Description of a damage at the end of the file; the records are those before it.
    damage: str = ""

    def chunks(self, *, client: bool) -> list[tuple[float, bytes]]:
        """Return seconds and octets of all chunks that the client, or the server, sent."""
        wanted = Kind.SENT if client == self.client else Kind.RECEIVED
        return [(record.at_s, record.data) for record in self.records if record.kind is wanted]


class TraceSink(Protocol):
    """Object that takes the input and output of one connection."""

    def received(self, data: bytes) -> None:
        """Take *data*, which the peer sent."""

    def sent(self, data: bytes) -> None:
        """Take *data*, which we sent."""

    def received_eof(self) -> None:
        """Note that the peer has ended its half of the stream."""

    def close(self) -> None:
        """Note that the connection has ended."""


class TraceSource(Protocol):
    """Object that makes sinks for connections, such as :class:`Traces`."""

    def open(self, *, client: bool, address: str, clock: Clock) -> TraceSink | None:
        """Return the sink for a connection that begins, None for none."""


class Traces:
    """Folder of traces, one file for each connection.

    Traces contain messages; therefore only their owner may read them. They are written
    synchronously, which delays the connection by as much as the file system takes.

    Args:
        folder: Created if it does not exist.
        limits: ``trace_bytes_max`` for each trace and ``trace_total_bytes_max`` for all together:
            input and output above them are not recorded.
    """

    def __init__(self, folder: str | PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.folder = Path(folder)
        self._limits = limits
        self._left = limits.trace_total_bytes_max
        self._count = 0
        self._complained = False

    def open(self, *, client: bool, address: str, clock: Clock) -> TraceWriter | None:
        """Open a trace of one connection; None if that fails, which is logged once."""
        if self._left <= 0:
            self._complain(f"{self.folder} has {self._limits.trace_total_bytes_max} bytes of them")
            return None
        self._count += 1
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        side = "client" if client else "server"
        path = self.folder / f"{began}-{os.getpid()}-{self._count:06d}-{side}.amqptrace"
        file: BinaryIO
        try:
            self.make_folder()
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file = os.fdopen(handle, "wb", buffering=0)
        except OSError as error:
            self._complain(f"{path} cannot be written: {error.strerror or error}")
            return None
        return TraceWriter(
            file,
            client=client,
            address=address,
            clock=clock,
            bytes_max=min(self._limits.trace_bytes_max, self._left),
            spend=self._spend,
        )

    def make_folder(self) -> None:
        """Create the folder, unless it exists.

        Raises:
            OSError: The folder cannot be created or written.
        """
        self.check_folder()
        # Only the last component is created, so that a mistyped path fails.
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def check_folder(self) -> None:
        """Check that the folder can be created, or exists and can be written, without creating it.

        Raises:
            OSError: It cannot; the error has the reason.
        """
        written = self.folder if self.folder.exists() else self.folder.parent
        mode = written.stat().st_mode
        if not stat.S_ISDIR(mode):
            number = errno.EEXIST if written == self.folder else errno.ENOTDIR
        elif not os.access(written, os.W_OK | os.X_OK):
            number = errno.EACCES
        else:
            return
        raise OSError(number, os.strerror(number), str(written))

    def _spend(self, size: int) -> bool:
        """Return whether *size* more bytes are allowed; once they are not, no more bytes are."""
        allowed = size <= self._left
        self._left = self._left - size if allowed else 0
        return allowed

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("connections are not traced any more: %s", why)


class TraceWriter:
    """Writer of one trace; closed when the connection ends or the file fails."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        client: bool,
        address: str,
        clock: Clock,
        bytes_max: int = DEFAULT_LIMITS.trace_bytes_max,
        spend: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self._file: BinaryIO | None = file
        self._clock = clock
        self._began = clock.monotonic()
        self._left = bytes_max
        self._spend = spend
        # For input, and for output: secrets are sent by the side that dialled.
        self._masks = Mask.pair(client=client)
        about = json.dumps({"client": client, "address": address, "began": clock.wall()})
        # Written even if there is little room, so that the trace identifies its connection.
        beginning = MAGIC + self._record(Kind.ABOUT, about.encode())
        spend(len(beginning))
        self._left -= len(beginning)
        self._write(beginning)

    def received(self, data: bytes) -> None:
        """Record *data*, which the peer sent."""
        self._octets(Kind.RECEIVED, data)

    def sent(self, data: bytes) -> None:
        """Record *data*, which we sent."""
        self._octets(Kind.SENT, data)

    def received_eof(self) -> None:
        """Record that the peer has ended its half of the stream."""
        self._put(self._record(Kind.RECEIVED_EOF, b""))

    def close(self) -> None:
        """Record the end of the connection, and close the file."""
        for kind, mask in zip((Kind.RECEIVED, Kind.SENT), self._masks, strict=True):
            if rest := mask.rest():
                self._put(self._record(kind, rest))
        self._put(self._record(Kind.END, b""))
        self._close()

    def _octets(self, kind: Kind, data: bytes) -> None:
        if self._file is None or not data:
            return
        kind, shown = self._masks[kind is Kind.SENT].record(kind, data)
        if shown:
            self._put(self._record(kind, shown))

    def _record(self, kind: Kind, data: bytes) -> bytes:
        at_us = max(0, round((self._clock.monotonic() - self._began) * 1e6))
        return _RECORD.pack(kind, at_us, len(data)) + data

    def _put(self, octets: bytes) -> None:
        if self._file is None:
            return
        # Keep room for the record that marks the trace as cut.
        if len(octets) + _RECORD.size > self._left or not self._spend(len(octets)):
            self._write(self._record(Kind.CUT, b""))
            self._close()
            return
        self._left -= len(octets)
        self._write(octets)

    def _write(self, octets: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(octets)
        except OSError as error:
            _log.warning("a trace breaks off: %s", error.strerror or error)
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                _log.warning("a trace breaks off: %s", error.strerror or error)


class Mask:
    """Mask for the login's responses in one direction of a connection.

    Until AMQP begins, octets are held back until their frame is complete. Another protocol is
    masked as its plug-in has registered (``TRACINGS``); without one it is omitted,
    since the positions of its passwords are unknown.

    Args:
        secrets: Whether this is the direction of messages with tokens and passwords.
    """

    def __init__(self, *, secrets: bool) -> None:
        self._plain = False
        self._held = b""
        self.unknown = False
        #: Mask of the frames after the login, if they may contain secrets.
        self._frames: TraceMask | None = FrameMask() if secrets else None
        self._secrets = secrets
        self._opposite: Mask | None = None

    @classmethod
    def pair(cls, *, client: bool) -> tuple[Mask, Mask]:
        """Create the masks for input and output of a client or a server."""
        masks = cls(secrets=not client), cls(secrets=client)
        for one, other in zip(masks, reversed(masks), strict=True):
            one._opposite = other
        return masks

    def _follow(self, tracing: Tracing) -> None:
        """Mask the rest as *tracing* does; only the client's header identifies the protocol."""
        if not (self._plain or self._held or self.unknown):
            self._frames = tracing.mask(client=self._secrets)
            self._plain = True

    def rest(self) -> bytes:
        """Return the masked rest that was held back of an incomplete frame."""
        return self._frames.rest() if self._plain and self._frames is not None else b""

    def _after_login(self, data: bytes) -> bytes:
        return data if self._frames is None else self._frames.feed(data)

    def record(self, kind: Kind, data: bytes) -> tuple[Kind, bytes]:
        """Feed *data*; return the kind and the octets of its record: none if its secrets are not determined yet."""
        shown = self.feed(data)
        if not self.unknown:
            return kind, shown
        omitted = Kind.OMITTED_SENT if kind is Kind.SENT else Kind.OMITTED_RECEIVED
        return omitted, len(data).to_bytes(8, "big")

    def feed(self, data: bytes) -> bytes:
        """Return *data* masked, as far as its frames are complete."""
        if self._plain:
            return self._after_login(data)
        if self.unknown:
            return b""
        held = self._held + data
        shown: list[bytes] = []
        at = 0
        while len(held) - at >= 8:
            if held[at : at + 4] == b"AMQP":
                header = held[at : at + 8]
                if header == _AMQP_HEADER:
                    self._plain = True
                    shown += [header, self._after_login(held[at + 8 :])]
                    at = len(held)
                    break
                tracing = TRACINGS.get(header) if not at and self._opposite is not None else None
                if tracing is not None and self._secrets:
                    self._held = b""
                    self._follow(tracing)
                    assert self._opposite is not None
                    self._opposite._follow(tracing)
                    return header + self._after_login(held[8:])
                if header != _SASL_HEADER:
                    self.unknown = True
                    return b""
                shown.append(header)
                at += 8
                continue
            size = int.from_bytes(held[at : at + 4], "big")
            if not 8 <= size <= _HELD_MAX:
                self.unknown = True
                return b""
            if len(held) - at < size:
                break
            shown.append(_masked(held[at : at + size]))
            at += size
        self._held = held[at:]
        return b"".join(shown)


#: Descriptors of a client's frames in a login (Part 5 §5.3.3).
_SASL_INIT: Final = b"\x00\x53\x41"
_SASL_RESPONSE: Final = b"\x00\x53\x43"


def _masked(frame: bytes) -> bytes:
    """Mask the response in a SASL frame with asterisks, except for the user name of PLAIN."""
    body = 4 * frame[4]
    kind = frame[body : body + 3]
    if kind[:2] == b"\x00\x53" and kind not in (_SASL_INIT, _SASL_RESPONSE):
        return frame  # certainly not a response
    found = None
    if kind in (_SASL_INIT, _SASL_RESPONSE):
        found = _response(frame, body + 3, init=kind == _SASL_INIT)
    if found is None:
        # Malformed: only its length is shown.
        return frame[:body] + MASK * (len(frame) - body)
    mechanism, at, end = found
    if mechanism == b"ANONYMOUS":
        return frame
    response = frame[at:end]
    parts = response.split(b"\0", 2)
    if mechanism == b"PLAIN" and len(parts) == 3:
        at = end - len(parts[2])
    return frame[:at] + MASK * (end - at) + frame[end:]


def _response(frame: bytes, at: int, *, init: bool) -> tuple[bytes, int, int] | None:
    """Return the mechanism and the range of the response; None if the list is not standard."""
    try:
        if frame[at] == 0xC0:
            at += 3
        elif frame[at] == 0xD0:
            at += 9
        elif frame[at] == 0x45:
            return b"", at, at
        else:
            return None
        mechanism = b""
        if init:
            if frame[at] != 0xA3:
                return None
            mechanism = frame[at + 2 : at + 2 + frame[at + 1]]
            at += 2 + frame[at + 1]
        if at >= len(frame) or frame[at] == 0x40:
            return mechanism, at, at
        if frame[at] == 0xA0:
            size, at = frame[at + 1], at + 2
        elif frame[at] == 0xB0:
            size, at = int.from_bytes(frame[at + 1 : at + 5], "big"), at + 5
        else:
            return None
    except IndexError:
        return None
    return (mechanism, at, at + size) if at + size <= len(frame) else None


class Traced:
    """Engine whose input and output go to a sink, too; its driver uses it like the engine itself."""

    def __init__(self, engine: ProtocolEngine, writer: TraceSink) -> None:
        self._engine = engine
        self._writer = writer

    @property
    def peer(self) -> Peer:
        return self._engine.peer

    @property
    def on_output(self) -> Callable[[], None]:
        return self._engine.on_output

    @on_output.setter
    def on_output(self, call: Callable[[], None]) -> None:
        self._engine.on_output = call

    @property
    def work_max(self) -> int:
        return self._engine.work_max

    @work_max.setter
    def work_max(self, work: int) -> None:
        self._engine.work_max = work

    @property
    def unread(self) -> bool:
        return self._engine.unread

    @property
    def congested(self) -> bool:
        return self._engine.congested

    @property
    def finished(self) -> bool:
        return self._engine.finished

    @property
    def output_size(self) -> int:
        return self._engine.output_size

    @property
    def notifies(self) -> bool:
        return bool(getattr(self._engine, "notifies", True))

    @property
    def deadline(self) -> float:
        return self._engine.deadline

    def receive(self, data: bytes, now: float) -> list[Event]:
        if data:
            self._writer.received(data)
        return self._engine.receive(data, now)

    def receive_eof(self, now: float) -> list[Event]:
        self._writer.received_eof()
        return self._engine.receive_eof(now)

    def tick(self, now: float) -> list[Event]:
        return self._engine.tick(now)

    def take(self) -> list[bytes]:
        buffers = self._engine.take()
        if buffers:
            self._writer.sent(b"".join(buffers))
        return buffers

    def close(self, error: Error | None = None) -> None:
        self._engine.close(error)

    def stop(self) -> None:
        """Close the sink, after the end of the connection."""
        self._writer.close()


def trace(
    traces: TraceSource | None, engine: ProtocolEngine, *, client: bool, clock: Clock
) -> Traced | None:
    """Return *engine* with a sink of *traces*, to be stopped at its end; None if they have none for it."""
    if traces is None:
        return None
    writer = traces.open(client=client, address=engine.peer.address, clock=clock)
    return None if writer is None else Traced(engine, writer)


@contextmanager
def traced(
    traces: TraceSource | None, engine: ProtocolEngine, *, client: bool, clock: Clock
) -> Iterator[ProtocolEngine]:
    """Give input and output of *engine* to a sink of *traces* within the block, if it has one for it."""
    found = trace(traces, engine, client=client, clock=clock)
    if found is None:
        yield engine
        return
    try:
        yield found
    finally:
        found.stop()


# --- reading ------------------------------------------------------------------------------------


def read_trace(path: str | PathLike[str]) -> Trace:
    """Read the trace in a file; of a damaged one the records before the damage.

    Raises:
        AmqpError: The file cannot be read, is empty, or is not a trace; the message gives the
            reason.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise AmqpError(f"{path} cannot be read: {error.strerror or error}") from None
    if not data:
        raise AmqpError(f"{path} is empty: nothing was recorded in it")
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise AmqpError(f"{path} is a trace that ends after {len(data)} bytes")
        if data.startswith(MAGIC[:-1]):
            raise AmqpError(f"{path} is a trace of version {data[7]}; this release reads 1")
        raise AmqpError(f"{path} is no trace: it does not begin with {MAGIC[:-1].decode()}")
    records: list[TraceRecord] = []
    damage = ""
    at = len(MAGIC)
    while at < len(data) and not damage:
        if len(data) - at < _RECORD.size:
            damage = f"the file ends within a record, at byte {len(data)}"
            break
        kind, at_us, size = _RECORD.unpack_from(data, at)
        begin = at + _RECORD.size
        if kind not in iter(Kind):
            damage = f"there is no kind of record {kind}, at byte {at}"
        elif begin + size > len(data):
            damage = f"the file ends within a record, at byte {len(data)}"
        else:
            records.append(TraceRecord(Kind(kind), at_us / 1e6, data[begin : begin + size]))
            at = begin + size
    about = _about(records[0]) if records else None
    if about is None:
        raise AmqpError(
            f"{path} is a damaged trace: {damage or 'the record of the connection is missing'}"
        )
    return Trace(
        client=about.client,
        address=about.address,
        began=about.began,
        records=records[1:],
        damage=damage,
    )


def _about(record: TraceRecord) -> _About | None:
    if record.kind is not Kind.ABOUT:
        return None
    try:
        told = json.loads(record.data)
        return _About(bool(told["client"]), str(told["address"]), float(told["began"]))
    except (ValueError, KeyError, TypeError):
        return None
