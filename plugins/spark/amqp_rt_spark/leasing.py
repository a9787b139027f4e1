"""Stream of the messages of a queue, each of which is taken once and can be read repeatedly.

The broker leases messages to a group and numbers them (``LEASE`` at ``<queue>/$management``). A batch is a
range of these numbers, so a repeated batch is identical; once it is written, its messages are accepted,
which removes them. Other consumers of the queue are served as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from amqp_rt import Message
from amqp_rt.errors import AmqpError, LinkDetached

from . import connections, spelling
from .data_loss import DataLost, note_loss
from .losses import Patience
from .malformed import decoded
from .options import Options
from .rows import Records, RowMaker
from .spans import Snapshot, Span, cut
from .streams import Stream

_VERSION: Final = 1
_GROUP: Final = "amqp_rt:lease-group"
_ID: Final = "amqp_rt:lease-id"
_FROM: Final = "amqp_rt:lease-from"
_TO: Final = "amqp_rt:lease-to"


class Group(Struct, frozen=True):
    """Position of a group in a queue."""

    generation: int
    #: The lowest number that is not accepted yet, and the number that the next leased message gets.
    first: int
    next: int
    #: Messages available in the queue.
    available: int
    #: Distinguishes the lease from an earlier or later one of the same group, after a release or an expiry.
    id: str


#: Queue → lease id of the group there, and a number.
Places = Mapping[str, tuple[str, int]]


def lease_offset(places: Places) -> dict[str, Any]:
    """Return *places* as an offset for the checkpoint."""
    found = {address: {"id": id_, "n": number} for address, (id_, number) in sorted(places.items())}
    return {"leases": found, "v": _VERSION}


def leased_places(offset: Mapping[str, Any]) -> Places:
    """Return the places in *offset*, which :func:`lease_offset` made.

    Raises:
        ValueError: The offset is not one of leases.
    """
    if offset.get("v") != _VERSION or not isinstance(offset.get("leases"), Mapping):
        raise ValueError(f"the checkpoint holds no offset of leases, but {str(offset)[:200]}")
    return {
        str(address): (str(each["id"]), int(each["n"]))
        for address, each in offset["leases"].items()
    }


def leased(options: Options, span: Span) -> Iterator[tuple[int, Message]]:
    """Yield the messages of *span* that the group holds, with their numbers.

    Raises:
        DataLost: The group no longer holds this range.
        AmqpError: The messages cannot be read.
    """
    for numbers, payloads in leased_payloads(options, span):
        yield from zip(numbers, map(decoded, payloads), strict=True)


def leased_payloads(options: Options, span: Span) -> Iterator[tuple[list[int], list[bytes]]]:
    """Yield the messages of *span* that the group holds, encoded and with their numbers. After a loss of the
    broker, continue at the next number.

    Raises:
        DataLost: The group no longer holds this range.
        AmqpError: The messages cannot be read.
    """
    endpoint = options.endpoint
    patience = Patience(endpoint.retry_s)
    start = span.start
    while start < span.end:
        said: dict[Any, Any] = {_GROUP: options.group, _FROM: start, _TO: span.end}
        if span.incarnation:
            said[_ID] = span.incarnation
        try:
            there = connections.wire(endpoint)
            for payloads in there.leased(span.address, said, credit=options.credit):
                numbers = spelling.numbers(payloads)
                after = numbers[-1] + 1
                yield numbers, payloads
                start = after
            return
        except LinkDetached as error:
            if error.condition in ("amqp:not-found", "amqp:precondition-failed"):
                raise DataLost(
                    f"{span.address!r}: the lease has ended: {error.description}"
                ) from error
            patience.bear(error, start)
        except AmqpError as error:
            patience.bear(error, start)
        connections.forget(endpoint)


def _needs_group(options: Options) -> None:
    if not options.group:
        raise ValueError(
            "mode=lease needs the option group: the broker keeps the messages under that name"
        )


class LeaseBatch:
    """Batch of the messages that a group holds of queues at the moment; reading changes nothing."""

    def __init__(self, options: Options) -> None:
        _needs_group(options)
        self.options = options

    def partitions(self) -> list[Span]:
        """Return the tasks of the batch."""
        options = self.options
        ranges = []
        for address in options.addresses:
            state = connections.call(options.endpoint, address, "LEASE-STATE", group=options.group)
            ranges.append(
                Span(address, 0, int(state["first"]), int(state["next"]), str(state["id"]))
            )
        return list(cut(ranges, options.min_partitions, options.max_per_partition))

    def records(self, span: Span) -> Iterator[Records]:
        """Yield the messages of *span*, except those that the group has returned.

        Raises:
            AmqpError: The messages cannot be read, or are gone (:class:`DataLost`).
        """
        for numbers, payloads in leased_payloads(self.options, span):
            yield Records(span.address, payloads, None, numbers)

    def read(self, span: Span) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of *span*."""
        return RowMaker(self.options).rows(self.records(span))


class LeaseStream(Stream):
    """Stream of messages that are leased from queues.

    Each start of the query opens its group again, which fences off the previous run.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        _needs_group(options)
        if options.starting_offsets != "earliest" or options.starting_timestamp is not None:
            raise ValueError("a queue has no offsets to start at: a lease goes on where it was")
        if options.selector:
            raise ValueError("a lease takes the messages of a queue as they come: no selector")
        #: Queue → generation and lease id, once this run has opened it.
        self._opened: dict[str, tuple[int, str]] = {}
        #: Queue → number at which a query with ``availableNow`` ends; None without that trigger.
        self._until: dict[str, int] | None = None
        self._latest: Places | None = None

    # --- Called by Spark, under its names ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the lowest numbers that the groups hold and have not accepted."""
        states = {address: self._state(address) for address in self.options.addresses}
        return lease_offset({address: (each.id, each.first) for address, each in states.items()})

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Accept the messages before *start*, lease those of the next batch, and return its end."""
        if start is not None:
            self.commit(start)
        begin = leased_places(self.initialOffset() if start is None else start)
        states = {address: self._state(address) for address in self.options.addresses}
        self._latest = {
            address: (each.id, each.next + each.available) for address, each in states.items()
        }
        at = {address: self._at(address, state, begin) for address, state in states.items()}
        there = {
            address: self._up_to(address, state.next + state.available) - at[address]
            for address, state in states.items()
        }
        available = sum(max(count, 0) for count in there.values())
        if not self._enough(available, ends=self._until is not None):
            return lease_offset({each: (states[each].id, at[each]) for each in at})
        most = getattr(limit, "max_rows", self.options.max_messages if limit is None else None)
        left = available if most is None else min(most, available)
        end = {}
        order = sorted(at)
        turn = self._turn % len(order)
        self._turn += 1
        for number, address in enumerate(order[turn:] + order[:turn]):
            # The part of its share that a queue cannot fill is left for the next ones.
            share = -(-left // (len(at) - number))
            count = min(max(there[address], 0), share)
            number_ = self._extended(address, states[address], at[address] + count)
            end[address] = states[address].id, number_
            left -= number_ - at[address]
        return lease_offset(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the offset after all available messages, as if they were leased.

        The member ``waiting`` marks it for the listener (:mod:`.listening`): Spark before 4.2 reports
        the end of the batch in its place.
        """
        if self._latest is None:
            return None
        found = lease_offset(self._latest)
        for each in found["leases"].values():
            each["waiting"] = True
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit the query to the messages that are available now."""
        states = {address: self._state(address) for address in self.options.addresses}
        self._until = {address: each.next + each.available for address, each in states.items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Span]:
        """Return the tasks of the batch between two offsets.

        Raises:
            DataLost: The group no longer holds its messages.
        """
        begin, stop = leased_places(start), leased_places(end)
        ranges = []
        for address, (id_, last) in stop.items():
            state = self._state(address)
            if id_ != state.id:
                self._replaced(address)
                continue
            known, first = begin.get(address, (id_, state.first))
            if known != id_:
                # The start belongs to an earlier lease; this one began with its lowest number.
                first = state.first
            if first < last and not state.first <= first <= last <= state.next:
                raise self._ended(address, state, first, last)
            if first < last:
                ranges.append(Span(address, 0, first, last, id_))
        return list(cut(ranges, self.options.min_partitions, self.options.max_per_partition))

    def records(self, span: Span | Snapshot | None) -> Iterator[Records]:
        """Yield the messages of *span*, the same ones on every call.

        Raises:
            DataLost: The group no longer holds them.
        """
        if not isinstance(span, Span):
            return
        expected = span.start
        for numbers, payloads in leased_payloads(self.options, span):
            for number in numbers:
                self._check(span, expected, number)
                expected = number + 1
            yield Records(span.address, payloads, None, numbers)
        self._check(span, expected, span.end)

    # --- Internals ---

    def _settle(self, end: dict[str, Any]) -> None:
        """Accept the messages before *end*, which removes them from the queue."""
        for address, (id_, number) in leased_places(end).items():
            if address not in self.options.addresses:
                continue
            state = self._state(address)
            if id_ == state.id and number > state.first:
                self._call(address, "ACCEPT-LEASE", to=min(number, state.next))

    def _at(self, address: str, state: Group, begin: Places) -> int:
        """Return the number at which the group continues.

        Raises:
            DataLost: The checkpoint and the lease do not match.
        """
        id_, number = begin.get(address, (state.id, state.first))
        if id_ != state.id:
            self._replaced(address)
            return state.first
        if number > state.next:
            raise self._ended(address, state, number, number)
        return number

    def _replaced(self, address: str) -> None:
        text = (
            f"the lease of {self.options.group!r} on {address!r}, to which the checkpoint belongs, was "
            "released, or has ended after its leaseTtl; its messages went back to the queue, and those that "
            "were written and not accepted are delivered again: failOnDataLoss=false begins with the waiting ones"
        )
        note_loss(self.options, text)

    def _call(self, address: str, operation: str, **given: Any) -> Group:
        if address in self._opened:
            generation, id_ = self._opened[address]
            given = {"generation": generation, "id": id_, **given}
        found = connections.call(
            self.options.endpoint, address, operation, group=self.options.group, **given
        )
        numbers = {name: int(found[name]) for name in ("generation", "first", "next", "available")}
        return Group(**numbers, id=str(found["id"]))

    def _state(self, address: str) -> Group:
        """Return the position of the group, opening its lease first in this run."""
        if address in self._opened:
            return self._call(address, "LEASE-STATE")
        given = {} if self.options.lease_ttl is None else {"seconds": self.options.lease_ttl}
        state = self._call(address, "OPEN-LEASE", **given)
        self._opened[address] = state.generation, state.id
        return state

    def _ended(self, address: str, state: Group, first: int, last: int) -> DataLost:
        return DataLost(
            f"{self.options.group!r} has the messages from {state.first} on and before {state.next} of "
            f"{address!r}, and the checkpoint is about {first} to {last}: the lease has ended, and its "
            "messages went back to the queue; a new checkpoint begins with them"
        )

    def _up_to(self, address: str, number: int) -> int:
        if self._until is None:
            return number
        return min(number, self._until.get(address, number))

    def _extended(self, address: str, state: Group, end: int) -> int:
        """Lease up to *end*; return the end reached, which is earlier if other consumers emptied the queue."""
        while state.next < end:
            before = state.next
            state = self._call(
                address,
                "LEASE",
                count=end - state.next,
            )
            if state.next == before:
                break
        return min(end, state.next)

    def _check(self, span: Span, expected: int, number: int) -> None:
        if number > expected and self.options.fail_on_data_loss:
            raise DataLost(
                f"{span.address!r}: the messages {expected} to {number - 1} are gone, which were not "
                "durable; failOnDataLoss=false goes on without them"
            )
