"""Stream of the records of logs, in batches that are ranges of offsets."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final
from uuid import uuid4

from amqp_rt.errors import AmqpError

from . import connections
from .data_loss import DataLost, describe_loss, note_loss
from .logs import LogState, release_hold
from .offsets import Eras, Positions, eras_of, offset_of, positions_of, renamed
from .options import OURS, Options
from .reading import is_like
from .spans import Span
from .streams import Stream

_log = logging.getLogger("amqp_rt_spark")

#: A broker's conditions for a log of another incarnation, or one that is being deleted.
_ANOTHER_LOG: Final = ("amqp:precondition-failed", "amqp:resource-deleted")


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
            if pattern and is_like(address, pattern):
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
                connections.call(
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
            connections.call(
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
                raise DataLost(describe_loss(f"{address}/partitions/{number}", stop, start))

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
                connections.call(
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
