"""A stream of the messages of a queue at any broker, by way of files: each micro-batch is the same when it
is done again, and nothing is lost.

A broker that knows nothing but queues cannot give a message twice. So a task takes its share of what
waits, leaves it unsettled, writes it to a file, accepts it, and reads its rows from that file; when the
batch is done again the file is there already, and nothing is taken. An offset is the number of a batch
(*epoch*) and its *plan*: how many tasks there are, and how much each takes. Spark keeps that in its checkpoint
before anything is taken, so that a batch that is done again never takes more than it did.

What can come twice is what was in a file and not yet accepted when its task, or the connection, ended: the
broker delivers it again, and says so. Messages that come again are looked up by ``message-id`` and content
in the files that are left; what has no ``message-id`` cannot be told from another one like it, and
is taken as another one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Self
from uuid import uuid4

from msgspec import Struct

from amqp_rt import Message
from amqp_rt.errors import AmqpError, DecodeError, LinkDetached
from amqp_rt.outcomes import ACCEPTED, RELEASED

from . import wire
from .losses import is_loss
from .options import Options
from .reading import Snapshot, Span, Stream
from .rows import Records
from .wire import DataLost

_VERSION: Final = 1
#: Messages of a batch, if nobody says how many: a queue that is being filled has no end.
BATCH_MESSAGES: Final = 10_000
#: Messages of a task: a session holds 5,000 that are not settled (limits.unsettled_max).
TASK_MESSAGES: Final = 4_000


# --- Files ---------------------------------------------------------------------------------------
#
# MAGIC; messages as they came, each after its length; 16 octets for each of them, which say which message
# it is, zero if nobody can say; and _FOOTER: how many messages, whether the queue had no more, where the 16
# octets begin, and CRC-32 of everything before.

_MAGIC: Final = b"amqp-rt spool 1\n"
_LENGTH: Final = struct.Struct(">I")
_FOOTER: Final = struct.Struct(">IBQI")
_ID_SIZE: Final = 16
_NOBODY: Final = bytes(_ID_SIZE)
_SUFFIX: Final = ".spool"
#: Messages of a file that are decoded together.
_AT_ONCE: Final = 100


class SpoolFile:
    """A file while it is written. It is there as a whole or not at all, and once.

    Args:
        path: Where it is to be.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.size = 0
        self._ids = bytearray()
        self._crc = 0
        self._aside = path.with_name(f"{path.name}.{uuid4().hex}")
        handle = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = os.fdopen(handle, "wb")
        self._write(_MAGIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """What was not published is gone."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, payload: bytes, identity: bytes) -> None:
        """Add a message."""
        self._write(_LENGTH.pack(len(payload)))
        self._write(payload)
        self._ids += identity
        self.count += 1
        self.size += len(payload)

    def publish(self, *, dry: bool) -> bool:
        """Have it be there; false if there was one already, which stays.

        Args:
            dry: Whether the queue had no more.

        Raises:
            OSError: It cannot be kept.
        """
        at = self._file.tell()
        self._write(bytes(self._ids))
        self._file.write(_FOOTER.pack(self.count, dry, at, self._crc))
        self._file.flush()
        os.fsync(self._file.fileno())
        try:
            # A link, since a rename would replace what another attempt has written.
            os.link(self._aside, self.path)
        except FileExistsError:
            return False
        _sync_folder(self.path.parent)
        return True

    def _write(self, octets: bytes) -> None:
        self._crc = zlib.crc32(octets, self._crc)
        self._file.write(octets)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Footer(Struct):
    count: int
    dry: bool
    ids_at: int
    crc: int


def _footer(path: Path, file: BinaryIO) -> _Footer:
    file.seek(0, os.SEEK_END)
    end = file.tell() - _FOOTER.size
    if end < len(_MAGIC):
        raise DataLost(f"{path} is damaged: it is too short")
    file.seek(end)
    count, dry, ids_at, crc = _FOOTER.unpack(file.read(_FOOTER.size))
    if ids_at + count * _ID_SIZE != end:
        raise DataLost(f"{path} is damaged: its end says nothing that fits")
    return _Footer(count, bool(dry), ids_at, crc)


def spooled(path: Path) -> Iterator[bytes]:
    """The messages in the file *path*.

    Raises:
        DataLost: It is not as it was written.
    """
    with open(path, "rb") as file:
        footer = _footer(path, file)
        file.seek(0)
        crc = zlib.crc32(file.read(len(_MAGIC)))
        while file.tell() < footer.ids_at:
            head = file.read(_LENGTH.size)
            payload = file.read(min(_LENGTH.unpack(head)[0], footer.ids_at - file.tell()))
            crc = zlib.crc32(payload, zlib.crc32(head, crc))
            yield payload
        if zlib.crc32(file.read(footer.count * _ID_SIZE), crc) != footer.crc:
            raise DataLost(f"{path} is damaged: its checksum is another one")


def identities(path: Path) -> set[bytes]:
    """Which messages are in the file *path*."""
    with open(path, "rb") as file:
        footer = _footer(path, file)
        file.seek(footer.ids_at)
        octets = file.read(footer.count * _ID_SIZE)
    return {octets[at : at + _ID_SIZE] for at in range(0, len(octets), _ID_SIZE)} - {_NOBODY}


def had_no_more(path: Path) -> bool:
    """Whether the queue had no more when the file *path* was written."""
    with open(path, "rb") as file:
        return _footer(path, file).dry


def _identity(payload: bytes) -> tuple[bytes, bool]:
    """Which message *payload* is, and whether it may have been delivered before."""
    try:
        message = Message.decode(payload)
        header = message.header
        again = not header.first_acquirer or header.delivery_count > 0
        if message.message_id is None:
            return _NOBODY, again
        return blake2b(message.bare, digest_size=_ID_SIZE).digest(), again
    except (DecodeError, ValueError):
        # Whoever reads the rows will say so.
        return _NOBODY, False


# --- Offsets -------------------------------------------------------------------------------------


class Plan(Struct, frozen=True):
    """What the tasks of a batch take from one queue."""

    #: Messages at most, of each task.
    tasks: tuple[int, ...]
    #: Octets after which a task asks for no more.
    bytes: int | None = None


class Epoch(Struct, frozen=True):
    """The place after a batch: its number, and how it was planned."""

    #: Of the stream, whatever folder it is in; empty before the first batch.
    spool: str
    number: int
    plans: Mapping[str, Plan]


def epoch_offset(epoch: Epoch) -> dict[str, Any]:
    """*epoch* as a checkpoint keeps it."""
    return {
        "epoch": epoch.number,
        "plan": {
            address: {"bytes": plan.bytes, "tasks": list(plan.tasks)}
            for address, plan in sorted(epoch.plans.items())
        },
        "spool": epoch.spool,
        "v": _VERSION,
    }


def epoch_of(offset: Mapping[str, Any]) -> Epoch:
    """What :func:`epoch_offset` has said.

    Raises:
        ValueError: It is the offset of something else.
    """
    if offset.get("v") != _VERSION or "epoch" not in offset or "spool" not in offset:
        raise ValueError(f"the checkpoint holds no offset of a spool, but {str(offset)[:200]}")
    plans = {
        str(address): Plan(
            tuple(int(each) for each in plan["tasks"]),
            None if plan["bytes"] is None else int(plan["bytes"]),
        )
        for address, plan in offset["plan"].items()
    }
    return Epoch(str(offset["spool"]), int(offset["epoch"]), plans)


class Share(Struct, frozen=True):
    """What one task reads: a file, which it writes first if it is not there."""

    address: str
    path: str
    messages: int
    bytes: int | None
    #: Files that the driver has written, which this task reads, too.
    before: tuple[str, ...] = ()


# --- The stream ----------------------------------------------------------------------------------


class _Probe(Struct):
    """The message that has told the driver that there are some; it is not settled yet."""

    drain: wire.Drain
    delivery: Any


class SpoolStream(Stream):
    """A stream of the messages of queues, each of which is in a file before it is accepted.

    Every broker has queues, and few say how many messages wait there. The driver takes one to see whether
    there are some, and puts it with the batch that it plans then.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if not options.spool_dir:
            raise ValueError(
                "mode=spool needs the option spoolDir: a folder that the driver and all workers see, where "
                "messages are kept until they are written"
            )
        if options.starting_offsets != "earliest" or options.starting_timestamp is not None:
            raise ValueError("a queue has no offsets to start at: it is read from where it is")
        if options.min_messages:
            raise ValueError(
                "minMessagesPerTrigger takes a broker that says how many wait, which not all do: leave "
                "it away with mode=spool"
            )
        self._root = Path(options.spool_dir)
        self._probes: dict[str, _Probe] = {}
        #: Whether the query ends by itself; and then, which queues had no more at some time since.
        self._ends = False
        self._dry: set[str] = set()
        #: What this run has planned last.
        self._planned: Epoch | None = None
        #: The files of the stream that were looked at, and what is in them.
        self._seen: dict[Path, set[bytes]] = {}

    # --- what Spark calls, in its spelling ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Before the first batch."""
        return epoch_offset(Epoch("", 0, {}))

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Plan the next batch, if there is a message for it; else *start*."""
        self.commit(start)
        at = epoch_of(start)
        if not at.spool:
            self._look_for_others()
        self._note_dry(at)
        waiting = [address for address in sorted(self.options.addresses) if self._waits(address)]
        if not waiting:
            return dict(start)
        plans = self._share_out(waiting, limit)
        self._planned = Epoch(at.spool or uuid4().hex, at.number + 1, plans)
        return epoch_offset(self._planned)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Nobody knows how far it goes."""
        return None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on a queue that had no more once is done with."""
        self._ends = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Share]:
        """The tasks of the batch that ends at *end*.

        Raises:
            DataLost: The folder is not the one that it was.
            ValueError: It is not one batch.
        """
        begin, stop = epoch_of(start), epoch_of(end)
        if begin.number == stop.number:
            return []
        if stop.number != begin.number + 1 or begin.spool not in ("", stop.spool):
            raise ValueError(
                f"a batch goes from epoch {begin.number} of {begin.spool!r} to epoch {stop.number} of "
                f"{stop.spool!r}: does another query use this checkpoint?"
            )
        mine = self._root / stop.spool
        if stop.number > 1 and not mine.is_dir() and self.options.fail_on_data_loss:
            raise DataLost(
                f"{mine} is not there: spoolDir was emptied, or is another folder than before, and what the "
                "last batch has taken is not there either; failOnDataLoss=false goes on without it"
            )
        folder = mine / _number(stop.number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (mine, self._root):
            _sync_folder(each)
        # The same whether this run has planned the batch or an earlier one: what is not there is taken.
        found = []
        for address, plan in stop.plans.items():
            probed = _path(folder, address, 0)
            self._keep(self._probes.pop(address, None), probed)
            before: tuple[str, ...] = (str(probed),)
            for task, messages in enumerate(plan.tasks, 1):
                path = str(_path(folder, address, task))
                found.append(Share(address, path, messages, plan.bytes, before))
                before = ()
        return found

    def records(self, span: Share | Span | Snapshot | None) -> Iterator[Records]:
        """Yield the messages of *span*, the same ones whenever it is asked; they are in a file by then.

        Raises:
            AmqpError: They cannot be taken, or are not there any more (:class:`.wire.DataLost`).
        """
        if not isinstance(span, Share):
            return
        paths = [Path(each) for each in span.before]
        if span.messages:
            path = Path(span.path)
            paths.append(path)
            if not path.exists():
                self._fill(span, path)
        for path in paths:
            try:
                waiting = spooled(path)
                while payloads := list(islice(waiting, _AT_ONCE)):
                    yield Records(span.address, payloads)
            except FileNotFoundError as error:
                raise DataLost(f"{path} is not there any more: was spoolDir emptied?") from error

    # --- inside: the driver ---

    def _settle(self, end: dict[str, Any]) -> None:
        """Files of the last batch stay, and of the one before: what is in them may come again."""
        at = epoch_of(end)
        if not at.spool:
            return
        with contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self._root / at.spool):
                if folder.name < _number(at.number - 1):
                    shutil.rmtree(folder.path, ignore_errors=True)

    def _look_for_others(self) -> None:
        for path in self._root.glob(f"*/*/*{_SUFFIX}"):
            raise ValueError(
                f"spoolDir {str(self._root)!r} holds messages of another checkpoint ({path.parent.parent.name}): "
                "each query has a folder of its own. If that checkpoint is gone, nobody reads them any more: "
                "remove the folder to give them up"
            )

    def _note_dry(self, at: Epoch) -> None:
        """Which queues had no more, as the files of the batch say that this run has planned."""
        if self._ends and self._planned is not None and at.number == self._planned.number:
            folder = self._root / at.spool / _number(at.number)
            for address, plan in at.plans.items():
                paths = (_path(folder, address, task) for task, _ in enumerate(plan.tasks, 1))
                if any(had_no_more(path) for path in paths if path.exists()):
                    self._dry.add(address)

    def _waits(self, address: str) -> bool:
        """Whether *address* has a message, which is held then."""
        probe = self._probes.get(address)
        if probe is not None and not probe.drain.over:
            return True
        self._probes.pop(address, None)
        if address in self._dry:
            return False
        probe = wire.retried(self.options.endpoint, lambda there: self._probe(there, address))
        if probe is not None:
            self._probes[address] = probe
            return True
        if self._ends:
            self._dry.add(address)
        return False

    def _probe(self, there: wire.Wire, address: str) -> _Probe | None:
        drain = self._drain(there, address)
        found = drain.take(1)
        if found:
            return _Probe(drain, found[0])
        drain.close()
        return None

    def _share_out(self, waiting: list[str], limit: Any) -> dict[str, Plan]:
        """What each of the queues that have messages is asked for."""
        options = self.options
        rows = getattr(limit, "max_rows", None) or options.max_messages or BATCH_MESSAGES
        octets = getattr(limit, "max_bytes", None) or options.max_bytes
        most = min(options.max_per_partition or TASK_MESSAGES, TASK_MESSAGES)
        plans = {}
        for number, address in enumerate(waiting):
            # One of them is here already; the task is there for what has come since, too.
            share = max(rows // len(waiting) + (number < rows % len(waiting)) - 1, 0)
            wanted = -(-options.min_partitions // len(waiting))
            count = max(-(-share // most), min(wanted, share), 1)
            tasks = tuple(
                share * (each + 1) // count - share * each // count for each in range(count)
            )
            each = None if octets is None else max(octets // (len(waiting) * count), 1)
            plans[address] = Plan(tasks, each)
        return plans

    # --- inside: both ---

    def _keep(self, probe: _Probe | None, path: Path) -> None:
        """Write what has told us that there are messages; nothing if another run has planned the batch, or
        others have it again by now. Then nobody writes it any more, whoever still has it."""
        if probe is not None:
            try:
                with probe.drain as drain:
                    if not drain.over and not path.exists():
                        self._spool(drain, path, [[probe.delivery]])
            except AmqpError as error:
                if not is_loss(error):
                    raise
        if not path.exists():
            with SpoolFile(path) as file:
                file.publish(dry=False)

    def _fill(self, share: Share, path: Path) -> None:
        """Take what *share* says, and have it be in a file."""
        if not path.parent.is_dir():
            raise DataLost(
                f"{path.parent} is not there: is spoolDir a folder that the driver and all workers see?"
            )

        def fill(there: wire.Wire) -> None:
            # An attempt that was interrupted has published its file, or has given back what it took.
            if not path.exists():
                with self._drain(there, share.address) as drain:
                    self._spool(drain, path, self._rounds(drain, share))

        wire.retried(self.options.endpoint, fill)

    def _drain(self, there: wire.Wire, address: str) -> wire.Drain:
        return wire.Drain(there, address, selector=self.options.selector)

    def _rounds(self, drain: wire.Drain, share: Share) -> Iterator[list[Any]]:
        """What *share* says, bit by bit; the last bit is empty if the queue had no more."""
        left, size = share.messages, 0
        window = wire.Window(self.options.credit)
        while left and (share.bytes is None or size < share.bytes):
            asked = min(window.credit, left)
            found = drain.take(asked)
            left -= len(found)
            arrived = sum(delivery.size for delivery in found)
            size += arrived
            window.note(len(found), arrived)
            yield found
            if len(found) < asked:
                yield []
                return

    def _spool(self, drain: wire.Drain, path: Path, rounds: Iterable[list[Any]]) -> None:
        """Write what came, and only then accept it."""
        taken: list[Any] = []
        known: list[Any] = []
        dry = False
        with SpoolFile(path) as file:
            for deliveries in rounds:
                dry = not deliveries
                live: set[bytes] | None = None
                for delivery in deliveries:
                    identity, again = _identity(delivery.payload)
                    if again and identity != _NOBODY:
                        if live is None:
                            live = self._live(path.parent.parent)
                        if identity in live:
                            known.append(delivery)
                            continue
                    file.add(delivery.payload, identity)
                    taken.append(delivery)
                    # The file has it.
                    delivery.payload = b""
            if drain.over:
                raise LinkDetached(
                    f"reading {str(path)!r} has ended: the broker has given others what was taken"
                )
            won = file.publish(dry=dry)
        # Another attempt of this task was first: what it has not got is for others.
        for delivery in taken:
            delivery.settle(ACCEPTED if won else RELEASED)
        for delivery in known:
            delivery.settle(ACCEPTED)

    def _live(self, folder: Path) -> set[bytes]:
        """Which messages are in the files that are left."""
        found = {path: self._seen.get(path) for path in folder.glob(f"*/*{_SUFFIX}")}
        self._seen = {
            path: identities(path) if known is None else known for path, known in found.items()
        }
        return set().union(*self._seen.values())


def _number(epoch: int) -> str:
    """The name of the folder of *epoch*: as text they are in order, too."""
    return f"{epoch:012d}"


def _path(folder: Path, address: str, task: int) -> Path:
    """Where what *task* takes from *address* is kept; 0 is the driver's."""
    return folder / f"{sha256(address.encode()).hexdigest()[:16]}-{task}{_SUFFIX}"
