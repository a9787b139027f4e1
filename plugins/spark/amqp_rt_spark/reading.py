"""Reading of logs and queues, as far as batches and streams have it in common: nodes, starts, tasks and rows.

Neither this module nor its subclasses depend on Spark. The methods of :class:`.batch.Batch` and
:class:`.log_streams.LogStream` are those that Spark calls, under its names and in its order (:mod:`.readers`
adds its base classes), so they can be driven without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from amqp_rt.errors import AmqpError
from amqp_rt.values import Timestamp

from . import connections
from .data_loss import describe_loss, note_loss
from .dialects import spelling_of
from .logs import LogState, Part, log_state
from .offsets import Positions
from .options import OURS, Options
from .rows import Records, RowMaker
from .spans import Snapshot, Span, cut
from .wire import Wire


class Reading:
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
                for name in connections.retried(
                    self.options.endpoint, lambda there: list(there.names("amqp_rt.log"))
                )
                if is_like(name, pattern)
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

        def probe(there: Wire) -> dict[int, int]:
            found = {}
            for number, part in state.parts.items():
                probed = there.probe(address, number, moment, spelling=spelling)
                found[number] = part.next if probed is None else probed
            return found

        return connections.retried(endpoint, probe)

    def _cursor(self, address: str) -> dict[int, int]:
        endpoint, address = self.options.place(address)
        found = connections.call(endpoint, address, "CURSOR", group=self.options.group)
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
        return named_offsets(address, state, wanted, "startingOffsets", first)

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
            text = describe_loss(node, start, min(stop, part.first))
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
            for payloads in connections.browsed(
                endpoint,
                address,
                selector=options.selector,
                most=span.most,
                credit=options.credit,
            ):
                yield Records(address, payloads, broker=broker)
            return
        ours = options.logs == OURS
        for offsets, payloads, times in connections.records(
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


def is_like(name: str, pattern: str) -> bool:
    """Return whether *pattern* matches *name*. The broker's own nodes need a pattern that begins with "$"."""
    return fnmatchcase(name, pattern) and (pattern[0] == "$" or not name.startswith("$"))


def named_offsets(
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
