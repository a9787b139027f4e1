"""Stream of the messages of a queue at any broker, by way of files: a repeated micro-batch is identical, and
no message is lost.

A plain queue cannot deliver a message again once it is settled. So a task receives its share of the available
messages, leaves them unsettled, writes them to a file, accepts them, and reads its rows from that file; when
the batch is repeated, the file exists, and nothing is received. An offset is the number of a batch (*epoch*)
and its *plan*: the number of tasks, and the share of each. Spark keeps it in its checkpoint before any message
is received, so a repeated batch never receives more than its plan.

Duplicates are possible for messages that were in a file and not yet accepted when their task, or the
connection, ended: the broker redelivers them, and marks them so. Redelivered messages are looked up by
``message-id`` and content in the remaining files; a message without ``message-id`` cannot be distinguished
from another one like it, and is treated as new.
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

from . import connections
from .data_loss import DataLost
from .drains import Drain
from .link_ends import Window
from .losses import is_loss
from .options import Options
from .rows import Records
from .spans import Snapshot, Span
from .streams import Stream
from .wire import Wire

_VERSION: Final = 1
#: Default for the messages of a batch: a queue that is being filled has no end.
BATCH_MESSAGES: Final = 10_000
#: Most messages of a task: a session holds 5,000 unsettled ones (limits.unsettled_max).
TASK_MESSAGES: Final = 4_000


# --- Files ---------------------------------------------------------------------------------------
#
# MAGIC; the messages as received, each after its length; an identity of 16 octets for each of them, zero if
# unknown; and _FOOTER: the number of messages, whether the queue was empty then, the offset of the
# identities, and the CRC-32 of everything before.

_MAGIC: Final = b"amqp-rt spool 1\n"
_LENGTH: Final = struct.Struct(">I")
_FOOTER: Final = struct.Struct(">IBQI")
_ID_SIZE: Final = 16
_NOBODY: Final = bytes(_ID_SIZE)
_SUFFIX: Final = ".spool"
#: Messages of a file that are decoded as one group.
_AT_ONCE: Final = 100


class SpoolFile:
    """A file being written. Published as a whole or not at all, and only once.

    Args:
        path: Path of the published file.

    Raises:
        OSError: The file cannot be written.
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
        """Close the file, and delete it unless it was published."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, payload: bytes, identity: bytes) -> None:
        """Append a message."""
        self._write(_LENGTH.pack(len(payload)))
        self._write(payload)
        self._ids += identity
        self.count += 1
        self.size += len(payload)

    def publish(self, *, dry: bool) -> bool:
        """Publish the file under its path; return False if one exists there already, which stays.

        Args:
            dry: Whether the queue was empty.

        Raises:
            OSError: The file cannot be written or published.
        """
        at = self._file.tell()
        self._write(bytes(self._ids))
        self._file.write(_FOOTER.pack(self.count, dry, at, self._crc))
        self._file.flush()
        os.fsync(self._file.fileno())
        try:
            # A link, because a rename would replace the file of another attempt.
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
        raise DataLost(f"{path} is damaged: its footer does not match its contents")
    return _Footer(count, bool(dry), ids_at, crc)


def spooled(path: Path) -> Iterator[bytes]:
    """Yield the messages in the file *path*.

    Raises:
        DataLost: The file is damaged.
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
    """Return the identities of the messages in the file *path*, without unknown ones."""
    with open(path, "rb") as file:
        footer = _footer(path, file)
        file.seek(footer.ids_at)
        octets = file.read(footer.count * _ID_SIZE)
    return {octets[at : at + _ID_SIZE] for at in range(0, len(octets), _ID_SIZE)} - {_NOBODY}


def had_no_more(path: Path) -> bool:
    """Return whether the queue was empty after the messages of the file *path*."""
    with open(path, "rb") as file:
        return _footer(path, file).dry


def _identity(payload: bytes) -> tuple[bytes, bool]:
    """Return the identity of the message in *payload*, and whether it may have been delivered before."""
    try:
        message = Message.decode(payload)
        header = message.header
        again = not header.first_acquirer or header.delivery_count > 0
        if message.message_id is None:
            return _NOBODY, again
        return blake2b(message.bare, digest_size=_ID_SIZE).digest(), again
    except (DecodeError, ValueError):
        # Reported when the rows are read.
        return _NOBODY, False


# --- Offsets -------------------------------------------------------------------------------------


class Plan(Struct, frozen=True):
    """Messages that the tasks of a batch receive from one queue."""

    #: Most messages of each task.
    tasks: tuple[int, ...]
    #: Octets after which a task grants no more credit.
    bytes: int | None = None


class Epoch(Struct, frozen=True):
    """Position after a batch: its number, and its plan."""

    #: Id of the stream, in every folder; empty before the first batch.
    spool: str
    number: int
    plans: Mapping[str, Plan]


def epoch_offset(epoch: Epoch) -> dict[str, Any]:
    """Return *epoch* as an offset for the checkpoint."""
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
    """Return the epoch in *offset*, which :func:`epoch_offset` made.

    Raises:
        ValueError: The offset is not one of a spool.
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
    """Input of one task: a file, which the task writes first if it does not exist."""

    address: str
    path: str
    messages: int
    bytes: int | None
    #: Files that the driver has written and this task reads, too.
    before: tuple[str, ...] = ()


# --- The stream ----------------------------------------------------------------------------------


class _Probe(Struct):
    """Message that showed the driver that a queue has some; not settled yet."""

    drain: Drain
    delivery: Any


class SpoolStream(Stream):
    """Stream of the messages of queues, each of which is in a file before it is accepted.

    Not every broker reports how many messages a queue has. So the driver receives one to find out whether
    there are some, and adds it to the batch that it plans then.
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
                "minMessagesPerTrigger needs the number of waiting messages, which not all brokers report: leave "
                "it out with mode=spool"
            )
        self._root = Path(options.spool_dir)
        self._probes: dict[str, _Probe] = {}
        #: Whether the query ends with ``availableNow``; and if so, queues that were empty once since then.
        self._ends = False
        self._dry: set[str] = set()
        #: The last plan of this run.
        self._planned: Epoch | None = None
        #: Files of the stream that were read, with the identities in them.
        self._seen: dict[Path, set[bytes]] = {}

    # --- Called by Spark, under its names ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the position before the first batch."""
        return epoch_offset(Epoch("", 0, {}))

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Delete files of old batches, and plan the next one; return *start* if no message is available.

        Raises:
            ValueError: The folder is of another checkpoint, or of a later state of this one.
        """
        at = epoch_of(start)
        if not at.spool:
            self._look_for_others()
        self._look_for_later(at)
        self.commit(start)
        self._note_dry(at)
        waiting = [address for address in sorted(self.options.addresses) if self._waits(address)]
        if not waiting:
            return dict(start)
        plans = self._share_out(waiting, limit)
        self._planned = Epoch(at.spool or uuid4().hex, at.number + 1, plans)
        return epoch_offset(self._planned)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return None: the end of a queue is unknown."""
        return None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Finish with each queue once it has been empty."""
        self._ends = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Share]:
        """Return the tasks of the batch that ends at *end*.

        Raises:
            DataLost: The folder of the stream is missing.
            ValueError: The offsets are not those of one batch.
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
                f"{mine} is missing: spoolDir was emptied, or is another folder than before, and the messages of the "
                "last batch are missing too; failOnDataLoss=false continues without them"
            )
        folder = mine / _number(stop.number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (mine, self._root):
            _sync_folder(each)
        # Works for plans of this run and of earlier ones: tasks fill the files that do not exist.
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
        """Yield the messages of *span*, the same ones on every call; they are in a file before that.

        Raises:
            AmqpError: They cannot be received, or are gone (:class:`.data_loss.DataLost`).
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

    # --- Internals of the driver ---

    def _settle(self, end: dict[str, Any]) -> None:
        """Delete files, except those of the last two batches: their messages may be redelivered."""
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
                "each query has a folder of its own. If that checkpoint is gone, no query will read them: "
                "remove the folder to discard them"
            )

    def _look_for_later(self, at: Epoch) -> None:
        # The checkpoint has a plan before its folder exists. Planned anew, a batch of fewer tasks would leave out
        # files, which are deleted then, and others would be read once more.
        later = [
            int(path.parent.name)
            for path in (self._root / at.spool).glob(f"*/*{_SUFFIX}")
            if path.parent.name > _number(at.number)
        ]
        if at.spool and later:
            raise ValueError(
                f"spoolDir {str(self._root)!r} holds messages of epoch {max(later)}, and the checkpoint ends at "
                f"{at.number}, so it is a backup: restore the latest one. If that is gone, look whether the messages "
                f"of the epochs from {min(later)} on were written, and remove their folders in "
                f"{str(self._root / at.spool)!r} to give them up"
            )

    def _note_dry(self, at: Epoch) -> None:
        """Note queues that were empty, according to the files of the batch, if this run has planned it."""
        if self._ends and self._planned is not None and at.number == self._planned.number:
            folder = self._root / at.spool / _number(at.number)
            for address, plan in at.plans.items():
                paths = (_path(folder, address, task) for task, _ in enumerate(plan.tasks, 1))
                if any(had_no_more(path) for path in paths if path.exists()):
                    self._dry.add(address)

    def _waits(self, address: str) -> bool:
        """Return whether *address* has a message, and keep it unsettled if so."""
        probe = self._probes.get(address)
        if probe is not None and not probe.drain.over:
            return True
        self._probes.pop(address, None)
        if address in self._dry:
            return False
        probe = connections.retried(
            self.options.endpoint, lambda there: self._probe(there, address)
        )
        if probe is not None:
            self._probes[address] = probe
            return True
        if self._ends:
            self._dry.add(address)
        return False

    def _probe(self, there: Wire, address: str) -> _Probe | None:
        drain = self._drain(there, address)
        found = drain.take(1)
        if found:
            return _Probe(drain, found[0])
        drain.close()
        return None

    def _share_out(self, waiting: list[str], limit: Any) -> dict[str, Plan]:
        """Divide the batch among the queues that have messages."""
        options = self.options
        rows = getattr(limit, "max_rows", None) or options.max_messages or BATCH_MESSAGES
        octets = getattr(limit, "max_bytes", None) or options.max_bytes
        most = min(options.max_per_partition or TASK_MESSAGES, TASK_MESSAGES)
        plans = {}
        for number, address in enumerate(waiting):
            # The probe counts as one message. The tasks receive the rest, also of later arrivals.
            share = max(rows // len(waiting) + (number < rows % len(waiting)) - 1, 0)
            wanted = -(-options.min_partitions // len(waiting))
            count = max(-(-share // most), min(wanted, share), 1)
            tasks = tuple(
                share * (each + 1) // count - share * each // count for each in range(count)
            )
            each = None if octets is None else max(octets // (len(waiting) * count), 1)
            plans[address] = Plan(tasks, each)
        return plans

    # --- Internals of driver and tasks ---

    def _keep(self, probe: _Probe | None, path: Path) -> None:
        """Write the probe's message to *path*, unless another run has done so or the broker has taken it back.
        Without a message, publish an empty file, so that no other attempt writes one later."""
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
        """Receive the messages of *share* into a file.

        Raises:
            DataLost: The folder is missing.
        """
        if not path.parent.is_dir():
            raise DataLost(
                f"{path.parent} is not there: is spoolDir a folder that the driver and all workers see?"
            )

        def fill(there: Wire) -> None:
            # An interrupted attempt has either published its file or released its messages.
            if not path.exists():
                with self._drain(there, share.address) as drain:
                    self._spool(drain, path, self._rounds(drain, share))

        connections.retried(self.options.endpoint, fill)

    def _drain(self, there: Wire, address: str) -> Drain:
        return Drain(there, address, selector=self.options.selector)

    def _rounds(self, drain: Drain, share: Share) -> Iterator[list[Any]]:
        """Yield the deliveries of *share* in groups; the last one is empty if the queue was."""
        left, size = share.messages, 0
        window = Window(self.options.credit)
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

    def _spool(self, drain: Drain, path: Path, rounds: Iterable[list[Any]]) -> None:
        """Write the deliveries to a file, and accept them only after it is published."""
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
                    # Free the payload, which the file now has.
                    delivery.payload = b""
            if drain.over:
                raise LinkDetached(
                    f"reading {str(path)!r} has ended: the broker delivered its messages to others"
                )
            won = file.publish(dry=dry)
        # If another attempt of this task was first, release the messages that its file may not have.
        for delivery in taken:
            delivery.settle(ACCEPTED if won else RELEASED)
        for delivery in known:
            delivery.settle(ACCEPTED)

    def _live(self, folder: Path) -> set[bytes]:
        """Return the identities of the messages in the remaining files."""
        found = {path: self._seen.get(path) for path in folder.glob(f"*/*{_SUFFIX}")}
        self._seen = {
            path: identities(path) if known is None else known for path, known in found.items()
        }
        return set().union(*self._seen.values())


def _number(epoch: int) -> str:
    """Return the folder name of *epoch*, padded so that names sort by number."""
    return f"{epoch:012d}"


def _path(folder: Path, address: str, task: int) -> Path:
    """Return the path of the messages that *task* receives from *address*; 0 is the driver."""
    return folder / f"{sha256(address.encode()).hexdigest()[:16]}-{task}{_SUFFIX}"
