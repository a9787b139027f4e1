"""Input of queries: ranges of logs, planned by their offsets, and messages in queues.

This module does not depend on Spark. The methods of :class:`LogStream` and :class:`Batch` are those that Spark
calls, under its names and in its order (:mod:`.readers` adds its base classes), so they can be driven without
it.

An offset for a checkpoint identifies the log by its incarnation beside its address: a log that was deleted
and created again is a different one, whose offsets denote other records. Its keys are sorted, since Spark
compares the texts of two offsets. Beside each number is the era of the record before it, which changes when
the broker is started: a store restored from a backup gives new records numbers that other records had before.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final
from uuid import uuid4

from msgspec import Struct

from amqp_rt.errors import AmqpError
from amqp_rt.values import Timestamp

from . import wire
from .dialects import dialect_of, spelling_of
from .options import OURS, Options
from .rows import Records, RowMaker
from .wire import DataLost

_log = logging.getLogger("amqp_rt_spark")

_VERSION: Final = 1
#: A broker's conditions for a log of another incarnation, or one that is being deleted.
_ANOTHER_LOG: Final = ("amqp:precondition-failed", "amqp:resource-deleted")


def note_loss(options: Options, text: str) -> None:
    """Log that messages are lost, as *text* says.

    Raises:
        DataLost: ``failOnDataLoss`` is set.
    """
    if options.fail_on_data_loss:
        raise DataLost(text)
    _log.warning("%s", text)


class Span(Struct, frozen=True):
    """Records of one partition of a log, from *start* on and before *end*: the input of one task."""

    address: str
    partition: int
    start: int
    end: int
    incarnation: str


class Snapshot(Struct, frozen=True):
    """Messages in a queue, *most* at most: the input of one browsing task."""

    address: str
    most: int | None


class Part(Struct, frozen=True):
    """Bounds of a partition: its oldest offset, the next one, and the bytes in between."""

    first: int
    next: int
    bytes: int

    @property
    def mean(self) -> int:
        """Mean bytes of a record."""
        return self.bytes // max(self.next - self.first, 1)


class LogState(Struct, frozen=True):
    """Description of a log by its broker."""

    incarnation: str
    parts: dict[int, Part]
    #: Id of each era, and its first offset in each partition; the latest era last.
    eras: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def era(self, number: int, offset: int) -> str:
        """Return the era of the record before *offset* in partition *number*; empty if unknown."""
        for id_, starts in reversed(self.eras):
            if starts[number] < offset:
                return id_
        return ""


#: Address → incarnation, and partition → offset.
Positions = dict[str, tuple[str, dict[int, int]]]
#: Address and partition → the era of the record before the offset there.
Eras = dict[tuple[str, int], str]


def offset_of(positions: Positions, eras: Eras | None = None) -> dict[str, Any]:
    """Return *positions*, and their *eras* as far as known, as an offset for the checkpoint."""
    found: dict[str, Any] = {}
    for address, (incarnation, parts) in sorted(positions.items()):
        known = {
            str(part): era for part in sorted(parts) if (era := (eras or {}).get((address, part)))
        }
        found[address] = {
            **({"e": known} if known else {}),
            "id": incarnation,
            "p": {str(part): parts[part] for part in sorted(parts)},
        }
    return {"logs": found, "v": _VERSION}


def eras_of(offset: Mapping[str, Any]) -> Eras:
    """Return the eras in *offset*, which :func:`offset_of` made; older checkpoints have none."""
    return {
        (str(address), int(part)): str(era)
        for address, each in offset["logs"].items()
        for part, era in each.get("e", {}).items()
    }


def positions_of(offset: Mapping[str, Any]) -> Positions:
    """Return the positions in *offset*, which :func:`offset_of` made.

    Raises:
        ValueError: The offset is not one of logs.
    """
    if offset.get("v") != _VERSION or not isinstance(offset.get("logs"), Mapping):
        raise ValueError(f"the checkpoint holds no offset of logs, but {str(offset)[:200]}")
    return {
        str(address): (
            str(each["id"]),
            {int(part): int(number) for part, number in each["p"].items()},
        )
        for address, each in offset["logs"].items()
    }


def log_state(options: Options, address: str) -> LogState:
    """Query the state of the log *address*.

    Raises:
        AmqpError: The node does not exist.
        ValueError: The node is not a log.
    """
    dialect = dialect_of(options)
    node, (endpoint, address) = address, options.place(address)
    if dialect is not None:
        incarnation, ends = wire.retried(endpoint, lambda there: dialect.state(there, address))
        parts = {number: Part(first, after, 0) for number, (first, after) in ends.items()}
        return LogState(incarnation, parts)
    found = wire.call(endpoint, address, "READ")
    if found["kind"] != "log":
        raise ValueError(
            f"{node!r} is a {found['kind']}, not a log: stream a queue with mode=lease or mode=spool, or read its "
            "waiting messages with a batch"
        )
    return LogState(
        str(found["incarnation"]),
        {
            int(part["partition"]): Part(int(part["first"]), int(part["next"]), int(part["bytes"]))
            for part in found["partitions"]
        },
        tuple(
            (str(era["id"]), tuple(int(start) for start in era["starts"]))
            for era in found.get("eras", ())
        ),
    )


class _Reading:
    """Base of streams and batches. The constructor makes no connection."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def _addresses(self) -> tuple[str, ...]:
        """Return the nodes to read at the moment."""
        pattern = self.options.address_pattern
        if not pattern:
            return self.options.nodes
        return tuple(
            sorted(
                name
                for name in wire.retried(
                    self.options.endpoint, lambda there: list(there.names("amqp_rt.log"))
                )
                if _is_like(name, pattern)
            )
        )

    def _states(self) -> dict[str, LogState]:
        """Return the states of the logs to read, without those that a pattern matched and that are gone."""
        found = {address: self._log_state(address) for address in self._addresses()}
        return {address: state for address, state in found.items() if state is not None}

    def _log_state(self, address: str) -> LogState | None:
        """Return the state of the log *address*; None if it is gone and only a pattern matched it, or if its
        broker is no longer among the URLs."""
        if not self._is_reached(address):
            return None
        try:
            return log_state(self.options, address)
        except AmqpError as error:
            if not self.options.address_pattern or error.condition != "amqp:not-found":
                raise
            return None

    def _is_reached(self, address: str) -> bool:
        """Return whether the log *address* of a checkpoint is at a broker among the URLs."""
        several = len(self.options.urls) > 1 or "://" in address
        return not several or address in self.options.nodes

    def _at_time(self, address: str, state: LogState, moment_ms: int) -> dict[int, int]:
        """Return the first offset at or after a time, for each partition."""
        moment = Timestamp(moment_ms)
        spelling = spelling_of(self.options)
        endpoint, address = self.options.place(address)

        def probe(there: wire.Wire) -> dict[int, int]:
            found = {}
            for number, part in state.parts.items():
                probed = there.probe(address, number, moment, spelling=spelling)
                found[number] = part.next if probed is None else probed
            return found

        return wire.retried(endpoint, probe)

    def _cursor(self, address: str) -> dict[int, int]:
        endpoint, address = self.options.place(address)
        found = wire.call(endpoint, address, "CURSOR", group=self.options.group)
        return {int(part): int(offset) for part, offset in found.items()}

    def _begin(self, address: str, state: LogState) -> dict[int, int]:
        """Return the start that the options select at the moment."""
        wanted = self.options.starting_offsets
        first = {number: part.first for number, part in state.parts.items()}
        if self.options.starting_timestamp is not None:
            return self._at_time(address, state, self.options.starting_timestamp)
        if wanted == "latest":
            return {number: part.next for number, part in state.parts.items()}
        if wanted == "committed":
            return first | self._cursor(address)
        if wanted == "earliest":
            return first
        self._check_named(wanted, "startingOffsets")
        return _named(address, state, wanted, "startingOffsets", first)

    def _check_named(self, given: Mapping[str, Any], option: str) -> None:
        """Refuse offsets of logs that are not read, which would be ignored."""
        if self.options.address_pattern:
            # Logs that match the pattern may be created later.
            return
        for name in given:
            if name not in self.options.nodes:
                raise ValueError(
                    f"{option} names the log {name!r}, which is not read: there is "
                    f"{', '.join(map(repr, self.options.nodes))}"
                )

    def _spans(self, begin: Positions, end: Positions, states: dict[str, LogState]) -> list[Span]:
        """Return tasks for the records between *begin* and *end*."""
        ranges = []
        for address, (incarnation, parts) in sorted(end.items()):
            starts = begin[address][1]
            for number, stop in sorted(parts.items()):
                start = starts.get(number, 0)
                state = states[address].parts.get(number)
                if state is not None:
                    start = self._there(address, number, start, stop, state)
                if start < stop:
                    ranges.append(Span(address, number, start, stop, incarnation))
        return list(cut(ranges, self.options.min_partitions, self.options.max_per_partition))

    def _there(self, address: str, number: int, start: int, stop: int, part: Part) -> int:
        """Return *start*, or the beginning of the records that are left.

        Raises:
            DataLost: Records are lost, and ``failOnDataLoss`` is set.
        """
        node = f"{address}/partitions/{number}"
        if start < min(stop, part.first):
            text = wire.lost(node, start, min(stop, part.first))
        elif stop > part.next:
            text = f"{node} ends at {part.next}, though it had {stop}: it has lost records"
        else:
            return start
        note_loss(self.options, text)
        return min(part.first, stop) if start < part.first else start

    def read(self, span: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of *span*, the same ones on every call; raises the errors of :meth:`records`."""
        return RowMaker(self.options).rows(self.records(span))

    def records(self, span: Any) -> Iterator[Records]:
        """Yield the encoded messages of *span*, the same ones on every call.

        Raises:
            AmqpError: They cannot be read, or are gone (:class:`DataLost`).
        """
        if span is None:
            return
        options = self.options
        endpoint, address = options.place(span.address)
        broker = endpoint.url
        if isinstance(span, Snapshot):
            for payloads in wire.browsed(
                endpoint,
                address,
                selector=options.selector,
                most=span.most,
                credit=options.credit,
            ):
                yield Records(address, payloads, broker=broker)
            return
        ours = options.logs == OURS
        for offsets, payloads, times in wire.records(
            endpoint,
            address,
            span.partition,
            span.start,
            span.end,
            # Other brokers report neither the log's incarnation, nor the reason of gaps in offsets.
            incarnation=span.incarnation if ours and options.fail_on_data_loss else "",
            selector=options.selector,
            credit=options.credit,
            may_lose=not (ours and options.fail_on_data_loss),
            spelling=spelling_of(options),
            batches=ours,
        ):
            yield Records(address, payloads, span.partition, offsets, broker, times)


def renamed(offset: Mapping[str, Any], states: Mapping[str, LogState]) -> Mapping[str, Any]:
    """Return *offset*, from a checkpoint, with the current names of its logs.

    A log gets another name when one broker becomes several, or the reverse, and when a broker is reached
    under another URL. Its incarnation stays.
    """
    now = {state.incarnation: name for name, state in states.items() if state.incarnation}
    known = offset["logs"]
    names = {
        name: now.get(each["id"], name) if name not in states else name
        for name, each in known.items()
    }
    if len(set(names.values())) < len(names):
        # Two logs would become one; the reader of the offset reports that.
        return offset
    return {**offset, "logs": {names[name]: each for name, each in known.items()}}


def release_hold(endpoint: wire.Endpoint, address: str, holder: str) -> None:
    """Release the hold of *holder* on the log *address* for retention, if there is one."""
    try:
        wire.call(endpoint, address, "HOLD", {}, holder=holder, seconds=0)
    except AmqpError as error:
        # The hold also ends after its time.
        _log.warning("the hold of %r on %s is not released: %s", holder, address, error)


def _is_like(name: str, pattern: str) -> bool:
    """Return whether *pattern* matches *name*. The broker's own nodes need a pattern that begins with "$"."""
    return fnmatchcase(name, pattern) and (pattern[0] == "$" or not name.startswith("$"))


def _named(
    address: str, state: LogState, given: Any, option: str, other: dict[int, int]
) -> dict[int, int]:
    """Return the offsets given in an option, and those in *other* for the remaining partitions.

    Raises:
        ValueError: The option names a partition that does not exist.
    """
    named: dict[int, int] = given.get(address, {})
    for number in named:
        if number not in state.parts:
            raise ValueError(f"{option} names partition {number}, which {address!r} does not have")
    return other | named


def cut(ranges: list[Span], least: int, most: int | None) -> Iterator[Span]:
    """Yield *ranges* in *least* pieces at least, of *most* records at most, as equal as possible."""
    total = sum(span.end - span.start for span in ranges)
    size = total
    if len(ranges) < least:
        size = -(-total // least)
    if most is not None:
        size = min(size, most)
    for span in ranges:
        length = span.end - span.start
        pieces = -(-length // max(size, 1))
        for piece in range(pieces):
            yield Span(
                span.address,
                span.partition,
                span.start + length * piece // pieces,
                span.start + length * (piece + 1) // pieces,
                span.incarnation,
            )


def joined(spans: Iterable[Any], options: Options) -> list[tuple[Any, ...]]:
    """Return *spans* as tasks, each with the spans that it reads in turn: small ones share a task, of
    ``minMessagesPerPartition`` at least."""
    alone = [(span,) for span in spans]
    found: list[tuple[Any, ...]] = []
    missing = 0
    for task in alone:
        (span,) = task
        # The sizes of other spans are unknown before they are read.
        size = span.end - span.start if isinstance(span, Span) else options.min_per_partition
        if missing > 0:
            found[-1] += task
            missing -= size
        else:
            found.append(task)
            missing = options.min_per_partition - size
    if missing > 0 and len(found) > 1:
        found[-2:] = [found[-2] + found[-1]]
    return alone if len(found) < options.min_partitions else found


class Stream(_Reading, ABC):
    """Base of streams."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.ending_offsets != "latest" or options.ending_timestamp is not None:
            raise ValueError(
                "a stream has no end: endingOffsets and endingTimestamp are for batches"
            )
        if options.mode == "browse":
            raise ValueError("a queue is browsed by a batch, spark.read, not by a stream")
        #: Offset that was last settled at the broker.
        self._settled: Any = None
        self._waiting_since: float | None = None
        #: Number of planned batches: each begins with another partition or queue.
        self._turn = 0
        self._now: Callable[[], float] = time.monotonic

    def commit(self, end: dict[str, Any]) -> None:
        """Settle everything before *end* at the broker, once.

        Spark calls this when the next batch has been planned, and never for the last one. But it requests
        the next offset only after noting the previous batch as done, so that request commits its start, too.
        """
        if end != self._settled:
            self._settle(end)
            self._settled = end

    @abstractmethod
    def _settle(self, end: dict[str, Any]) -> None:
        """Settle everything before *end* at the broker."""

    def stop(self) -> None:
        """Do nothing: the connection ends with the process."""

    def _enough(self, available: int, *, ends: bool) -> bool:
        """Return whether a batch should be planned: enough messages are available, or ``maxTriggerDelay`` is over."""
        if ends or not available or available >= self.options.min_messages:
            self._waiting_since = None
            return True
        now = self._now()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self.options.max_delay:
            return False
        self._waiting_since = None
        return True


class StartRemembered(Stream):
    """Plans batches for Spark before 4.2, which does not pass the start of the next one.

    A batch starts at the end of the last planned one. After a restart, Spark first requests the tasks of an empty
    batch at the last planned end, and then repeats that batch if it is not done.
    """

    _planned_end: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, within the bounds of the options."""
        start = self._planned_end
        if start is None:
            start = self.initialOffset()  # type: ignore[attr-defined]
        found: dict[str, Any] = super().latestOffset(start)  # type: ignore[misc]
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        """Return the tasks of the batch between two offsets, and remember its end."""
        found: list[Any] = super().partitions(start, end)  # type: ignore[misc]
        self._planned_end = end
        return found


class LogStream(Stream):
    """Stream of the records of logs.

    Every batch is a range of offsets, which Spark keeps in its checkpoint before anything is read, so a
    repeated batch has the same records. With a ``group`` the broker stores the position of the stream, and
    also a start that depends on the time of asking, ``latest`` or a time: Spark asks for it more than once.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        ours = options.logs == OURS
        moving = options.starting_timestamp is not None or options.starting_offsets in (
            "latest",
            "committed",
        )
        if not ours:
            if options.starting_offsets == "latest":
                raise ValueError(
                    f"a stream of logs={options.logs} does not start at latest, since that position would not be "
                    "stored: give startingTimestamp, or offsets"
                )
            # A time gives the same records again as long as they are kept.
            moving = False
        if moving and not options.group:
            raise ValueError(
                "a stream that starts at latest, committed or a time needs the option group: the "
                "broker keeps the place under that name"
            )
        self._moving = moving
        self._holder = f"spark:{options.group or uuid4()}"
        #: Whether there may be a hold: with a group, an earlier run may have left one.
        self._holds = bool(options.group)
        #: States of the logs when a query with ``availableNow`` began.
        self._until: dict[str, LogState] | None = None
        self._latest: dict[str, LogState] | None = None
        #: Start of the last planned batch.
        self._started: Positions = {}

    # --- Called by Spark, under its names ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the start of a query without a checkpoint, the same on every call."""
        return offset_of(
            {
                address: (state.incarnation, self._initial(address, state))
                for address, state in self._states().items()
            }
        )

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch, within the bounds of the options; *start* if it has to wait.

        Raises:
            DataLost: Records are lost or logs are gone, and ``failOnDataLoss`` is set.
        """
        if start is not None:
            self.commit(start)
        states = self._latest = self._states()
        begin = positions_of(self.initialOffset() if start is None else start)
        eras = {} if start is None else eras_of(start)
        if start is not None and begin.keys() - states.keys():
            now = renamed(start, states)
            begin, eras = positions_of(now), eras_of(now)
        self._started = begin
        end: Positions = {}
        waiting: dict[tuple[str, int], tuple[int, int, int]] = {}
        pattern = self.options.address_pattern
        for address in begin.keys() - states.keys():
            # Logs that are no longer requested may be missing.
            if pattern and _is_like(address, pattern):
                self._gone(address)
        for address, state in states.items():
            known = begin.get(address)
            if known is None and pattern:
                if self._until is not None and address not in self._until:
                    # A query with availableNow ignores logs created after its begin.
                    continue
                # A new log: its start is recorded first, and the next batch reads from there.
                end[address] = state.incarnation, {n: part.first for n, part in state.parts.items()}
                continue
            starts = self._initial(address, state) if known is None else known[1]
            if known is not None and known[0] != state.incarnation:
                self._replaced(address, known[0], state.incarnation)
                starts = {number: part.first for number, part in state.parts.items()}
                eras = {key: era for key, era in eras.items() if key[0] != address}
            else:
                self._check_eras(address, starts, eras, state)
            end[address] = state.incarnation, dict(starts)
            until = self._last(address, state)
            for number, part in state.parts.items():
                at = starts.get(number, part.first)
                if at > part.next and self.options.fail_on_data_loss:
                    raise DataLost(
                        f"{address!r}, partition {number}, ends at {part.next}, and the checkpoint "
                        f"is at {at}: it has lost records"
                    )
                stop = until.get(number, part.next)
                end[address][1][number] = at
                if stop > at:
                    waiting[address, number] = at, stop, part.mean
        available = sum(stop - at for at, stop, _ in waiting.values())
        if not self._enough(available, ends=self._until is not None):
            self._let_go(states)
            return offset_of(begin) if start is None else dict(start)
        for (address, number), stop in self._admitted(waiting, limit).items():
            if stop > end[address][1][number]:
                end[address][1][number] = stop
                eras[address, number] = states[address].era(number, stop)
        planned = offset_of(end, eras)
        if planned == start:
            self._let_go(states)
        return planned

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ends of the logs as last queried, from which Spark computes the lag.

        For observers of the query's progress (:mod:`.listening`) it also contains the mean sizes of records
        and the start of the batch.
        """
        if self._latest is None:
            return None
        found = offset_of(
            {
                address: (
                    state.incarnation,
                    {number: part.next for number, part in state.parts.items()},
                )
                for address, state in self._latest.items()
            }
        )
        for address, state in self._latest.items():
            means = {number: part.mean for number, part in state.parts.items()}
            begin = self._started.get(address, ("", {}))[1]
            found["logs"][address]["mean"] = {str(number): means[number] for number in means}
            found["logs"][address]["from"] = {str(number): begin[number] for number in begin}
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit the query to the records that exist now."""
        self._until = self._states()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Span]:
        """Return the tasks of the batch between two offsets, which were logged before.

        Raises:
            DataLost: Some of its records are gone.
            ValueError: It ends before it begins.
        """
        begin, stop = positions_of(start), positions_of(end)
        names = begin.keys() | stop.keys()
        if not self.options.address_pattern and names - set(self.options.nodes):
            # The number of brokers has changed between one and several since the checkpoint began.
            there = self._states()
            start, end = dict(renamed(start, there)), dict(renamed(end, there))
            begin, stop = positions_of(start), positions_of(end)
        before, after = eras_of(start), eras_of(end)
        states = {}
        for address in sorted(stop):
            state = self._log_state(address)
            if state is None:
                self._gone(address)
                del stop[address]
            else:
                states[address] = state
        for address, (incarnation, parts) in stop.items():
            if states[address].incarnation != incarnation:
                self._replaced(address, incarnation, states[address].incarnation)
                stop[address] = states[address].incarnation, {}
                begin[address] = states[address].incarnation, {}
                continue
            known = begin.get(address)
            if known is None and self.options.address_pattern:
                begin[address] = incarnation, dict(parts)
            elif known is None:
                begin[address] = incarnation, self._initial(address, states[address])
            elif known[0] != incarnation:
                first = {number: part.first for number, part in states[address].parts.items()}
                begin[address] = incarnation, first
            self._check_order(address, begin[address][1], parts, states[address])
            if known is not None and known[0] == incarnation:
                self._check_eras(address, known[1], before, states[address])
            self._check_eras(address, parts, after, states[address])
        self._hold(begin, stop)
        return self._spans(begin, stop, states)

    # --- Internals ---

    def _settle(self, end: dict[str, Any]) -> None:
        """Set the group's cursors to *end*."""
        if not self.options.group or self.options.logs != OURS:
            return
        for address, (incarnation, parts) in positions_of(end).items():
            if not self._is_reached(address):
                continue
            endpoint, name = self.options.place(address)
            try:
                wire.call(
                    endpoint,
                    name,
                    "SET-CURSOR",
                    parts,
                    group=self.options.group,
                    incarnation=incarnation,
                )
            except AmqpError as error:
                # The log may be gone, which is permitted with a pattern, or replaced by another one.
                # The next planning handles both according to failOnDataLoss.
                gone = bool(self.options.address_pattern) and error.condition == "amqp:not-found"
                if not gone and error.condition not in _ANOTHER_LOG:
                    raise

    def _initial(self, address: str, state: LogState) -> dict[int, int]:
        if not self._moving:
            return self._begin(address, state)
        found = self._cursor(address)
        if set(found) < set(state.parts):
            # Stored once and for all: Spark asks again when the first batch is repeated.
            found = self._begin(address, state) | found
            endpoint, name = self.options.place(address)
            wire.call(
                endpoint,
                name,
                "SET-CURSOR",
                found,
                group=self.options.group,
                incarnation=state.incarnation,
            )
        return found

    def _last(self, address: str, state: LogState) -> dict[int, int]:
        """Return the ends at which a query with ``availableNow`` stops."""
        if self._until is None or address not in self._until:
            return {}
        known = self._until[address]
        if known.incarnation != state.incarnation:
            return {}
        return {number: part.next for number, part in known.parts.items()}

    def _replaced(self, address: str, known: str, found: str) -> None:
        text = (
            f"{address!r} was deleted and made again: the checkpoint belongs to the log {known}, and "
            f"this is {found}; failOnDataLoss=false begins with the records of the new one"
        )
        note_loss(self.options, text)

    def _gone(self, address: str) -> None:
        text = (
            f"the log {address!r}, which the checkpoint is about, is not there any more; "
            "failOnDataLoss=false goes on without it"
        )
        note_loss(self.options, text)

    def _check_eras(
        self, address: str, offsets: dict[int, int], eras: Eras, state: LogState
    ) -> None:
        """Check that the records before *offsets* are those of the checkpoint.

        Raises:
            DataLost: They are others, since the log continued from an earlier state.
        """
        for number, offset in offsets.items():
            known, there = eras.get((address, number)), state.era(number, offset)
            if not known or not there or known == there:
                continue
            text = (
                f"the broker of {address!r} was restored from a backup: partition {number} has other records "
                f"before {offset} than those that were read; failOnDataLoss=false continues at {offset}, and a new "
                "checkpoint starts at startingOffsets"
            )
            note_loss(self.options, text)

    def _check_order(
        self, address: str, begin: dict[int, int], end: dict[int, int], state: LogState
    ) -> None:
        for number, stop in end.items():
            start = begin.get(number, 0)
            part = state.parts.get(number)
            # A first batch that is repeated begins with the records left: a loss, not a mix-up.
            if start > stop and not (part is not None and start == part.first):
                raise ValueError(
                    f"a batch of {address!r}, partition {number}, begins at {start} and ends at "
                    f"{stop}: does another query use this checkpoint, or this group?"
                )
            if start > stop and self.options.fail_on_data_loss:
                raise DataLost(wire.lost(f"{address}/partitions/{number}", stop, start))

    def _admitted(
        self, waiting: dict[tuple[str, int], tuple[int, int, int]], limit: Any
    ) -> dict[tuple[str, int], int]:
        """Return the end of the batch in each partition, which gets its share of the limits.

        Each batch begins with the next partition, since there may be fewer messages than partitions.
        """
        rows = getattr(limit, "max_rows", None)
        octets = getattr(limit, "max_bytes", None)
        # Spark passes one bound at a time. One of another kind means everything (Trigger.Once).
        if limit is None or rows is not None or octets is not None:
            rows = self.options.max_messages if rows is None else rows
            octets = self.options.max_bytes if octets is None else octets
        total = sum(stop - at for at, stop, _ in waiting.values())
        size = sum((stop - at) * mean for at, stop, mean in waiting.values())
        share = 1.0
        if rows is not None and total > rows:
            share = rows / total
        if octets is not None and size > octets:
            share = min(share, octets / size)
        ends = {}
        left = total if rows is None else rows
        order = sorted(waiting.items())
        turn = self._turn % max(len(order), 1)
        self._turn += 1
        for key, (at, stop, _) in order[turn:] + order[:turn]:
            # At least one from each, as far as the limit permits, so that no partition starves.
            count = min(stop - at, max(int((stop - at) * share), 1), left)
            ends[key] = at + count
            left -= count
        return ends

    def _hold(self, begin: Positions, end: Positions) -> None:
        """Keep the records of the batch from retention."""
        if not self.options.hold or self.options.logs != OURS:
            return
        self._holds = True
        for address, (incarnation, parts) in end.items():
            starts = begin[address][1]
            offsets = {number: min(starts.get(number, 0), stop) for number, stop in parts.items()}
            if not offsets:
                continue
            endpoint, name = self.options.place(address)
            try:
                wire.call(
                    endpoint,
                    name,
                    "HOLD",
                    offsets,
                    holder=self._holder,
                    seconds=self.options.hold,
                    incarnation=incarnation,
                )
            except AmqpError as error:
                # The hold is only a precaution: lost records are noticed in any case.
                _log.warning("retention is not kept away from %s: %s", address, error)

    def _let_go(self, addresses: Iterable[str]) -> None:
        """Release the holds: all planned batches are written, and no other is planned now.

        A query with ``availableNow`` asks once more after its last batch, so its hold ends with it. One that is
        stopped or killed leaves the hold of its last batch, which may have to be read again.
        """
        if not self._holds or self.options.logs != OURS:
            return
        self._holds = False
        for address in addresses:
            release_hold(*self.options.place(address), self._holder)


class Bounds(Struct):
    """Bounds that filters set on the rows; a batch need not read rows outside."""

    addresses: set[str] | None = None
    partitions: set[int] | None = None
    #: Offsets from *first* on and before *end*; times in milliseconds, likewise.
    first: int | None = None
    end: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class Batch(_Reading):
    """Records of logs between two positions, or messages of queues, which are browsed."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.starting_offsets == "committed" and not options.group:
            raise ValueError("startingOffsets=committed needs the option group")
        if options.mode == "spool":
            raise ValueError("a spool is for streams: a batch browses the queue, with mode=browse")
        self.bounds = Bounds()

    def partitions(self) -> list[Span | Snapshot]:
        """Return the tasks."""
        addresses = [
            address
            for address in self._addresses()
            if self.bounds.addresses is None
            or self.options.place(address)[1] in self.bounds.addresses
        ]
        spans: list[Span | Snapshot] = []
        states: dict[str, LogState] = {}
        for address in addresses:
            most = self._queue(address)
            if most is not None:
                spans.append(Snapshot(address, most if most >= 0 else None))
            else:
                states[address] = log_state(self.options, address)
        begin = {
            address: (state.incarnation, self._begin(address, state))
            for address, state in states.items()
        }
        end = {
            address: (state.incarnation, self._end(address, state))
            for address, state in states.items()
        }
        self._narrow(begin, end, states)
        return spans + self._spans(begin, end, states)

    def only_logs(self) -> bool:
        """Return whether only logs are read: rows of queues have no offsets."""
        return all(self._queue(address) is None for address in self._addresses())

    def _queue(self, address: str) -> int | None:
        """Return the number of messages in a queue, -1 if its broker does not report it; None for a log."""
        options = self.options
        if options.mode == "log" or options.address_pattern or options.logs != OURS:
            return None
        endpoint, address = self.options.place(address)
        try:
            found = wire.call(endpoint, address, "READ")
        except AmqpError:
            # A broker without this management: only browsing is possible there.
            if self.options.mode == "browse":
                return -1
            raise
        if found["kind"] == "log":
            if self.options.mode == "browse":
                raise ValueError(f"{address!r} is a log: read it with mode=log")
            return None
        # Limited to the present number, or reading a busy queue would never end.
        return int(found["available"]) + int(found["acquired"])

    def _end(self, address: str, state: LogState) -> dict[int, int]:
        latest = {number: part.next for number, part in state.parts.items()}
        if self.options.ending_timestamp is not None:
            return self._at_time(address, state, self.options.ending_timestamp)
        if self.options.ending_offsets == "latest":
            return latest
        self._check_named(self.options.ending_offsets, "endingOffsets")
        found = _named(address, state, self.options.ending_offsets, "endingOffsets", latest)
        for number, stop in found.items():
            if stop > latest[number]:
                raise ValueError(
                    f"endingOffsets names {stop}, and {address!r}, partition {number}, ends at "
                    f"{latest[number]}"
                )
        return found

    def _narrow(self, begin: Positions, end: Positions, states: dict[str, LogState]) -> None:
        """Remove the rows that the filters exclude."""
        bounds = self.bounds
        for address, state in states.items():
            starts, stops = begin[address][1], end[address][1]
            since = until = None
            if bounds.since_ms is not None:
                since = self._at_time(address, state, bounds.since_ms)
            if bounds.until_ms is not None:
                until = self._at_time(address, state, bounds.until_ms)
            for number in state.parts:
                if bounds.partitions is not None and number not in bounds.partitions:
                    stops[number] = starts[number]
                if bounds.first is not None:
                    starts[number] = max(starts[number], bounds.first)
                if bounds.end is not None:
                    stops[number] = min(stops[number], bounds.end)
                if since is not None:
                    starts[number] = max(starts[number], since[number])
                if until is not None:
                    stops[number] = min(stops[number], until[number])
                starts[number] = min(starts[number], max(stops[number], 0))
                stops[number] = max(stops[number], starts[number])
