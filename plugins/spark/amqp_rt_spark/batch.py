"""Batch of the records of logs, or of messages in queues, between bounds."""

from __future__ import annotations

from msgspec import Struct

from amqp_rt.errors import AmqpError

from . import connections
from .logs import LogState, log_state
from .offsets import Positions
from .options import OURS, Options
from .reading import Reading, named_offsets
from .spans import Snapshot, Span


class Bounds(Struct):
    """Bounds that filters set on the rows; a batch need not read rows outside."""

    addresses: set[str] | None = None
    partitions: set[int] | None = None
    #: Offsets from *first* on and before *end*; times in milliseconds, likewise.
    first: int | None = None
    end: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class Batch(Reading):
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
            found = connections.call(endpoint, address, "READ")
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
        found = named_offsets(address, state, self.options.ending_offsets, "endingOffsets", latest)
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
