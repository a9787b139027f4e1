"""Return dead letters to their sources, each exactly once, also across interruptions.

A group of the queue leases all of them. The messages that are not chosen are returned to the queue at once;
from then on the broker knows the choice: the messages that the group still holds. These are published in
pieces, each under the number after its last message, and a piece is accepted, and so removed from the queue,
once it is published at all destinations.

A run after a failure asks each destination for its position. Messages with a lower number were chosen and
published, so they are accepted and not sent again, even if the choice has changed since.

This module does not depend on Spark.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from uuid import uuid4

from msgspec import Struct

from amqp_rt.errors import AmqpError, DeliveryRejected, LinkRefused

from .. import connections
from ..leasing import leased
from ..options import SOURCE, Options, read_options
from ..spans import Span
from .conf import JobConf
from .publishing import PIECE_BYTES, Pace, Publisher, replayed, short

_log = logging.getLogger("amqp_rt_spark")

#: Most destinations of one replay. Their names come from messages.
DESTINATIONS_MAX: Final = 1_000
#: Most ranges that are returned with one request.
_RANGES: Final = 1_000


class Letter(Struct, frozen=True):
    """A leased message: its number, its destination, and whether it is chosen for replay.

    If *to* is empty, there is no destination.
    """

    number: int
    to: str
    chosen: bool


def no_way(queue: str, to: str) -> str:
    """Return the reason why nothing of *queue* may be sent to the address *to*; empty if it may.

    The address may come from a message, so anyone with the right to send to the queue can set it.
    """
    if not to:
        return "it does not name the queue that dead-lettered it"
    if to == queue or to.startswith("$") or "/$" in to:
        return "nothing is replayed to there"
    return ""


def waiting(conf: JobConf, queue: str, name: str) -> int:
    """Return how many messages an interrupted replay named *name* has left leased."""
    try:
        state = connections.call(conf.endpoint, queue, "LEASE-STATE", group=group_of(name))
    except AmqpError:
        return 0
    return int(state["next"]) - int(state["first"])


def group_of(name: str) -> str:
    """Return the group that leases messages for a replay named *name*."""
    return short(f"replay to {name}")


class Return:
    """Replay of all messages that a queue has now.

    Args:
        conf: Connection settings.
        queue: The queue.
        name: Name of the replay. A replay continues an interrupted one of the same name.
        choose: Returns the messages that the group has leased, with the decision on each.
        pace: Rate of the replay.

    Attributes:
        id: Value of the annotation of replayed messages.
        sent: Destination → messages that were published.
        failed: Destination → messages that were chosen, could not be sent there, and stay.
        refused: Destination → why nothing, or not everything, can be sent there.
        finished: Messages that an earlier run had published.
        kept: Messages that stay in the queue.
    """

    def __init__(
        self,
        conf: JobConf,
        queue: str,
        name: str,
        choose: Callable[[], Iterable[Letter]],
        pace: Pace,
    ) -> None:
        self.id = f"{queue}-{uuid4().hex[:12]}"
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.finished = 0
        self.kept = 0
        self._conf = conf
        self._queue = queue
        self._group = group_of(name)
        self._choose = choose
        self._pace = pace
        self._publishers: dict[str, Publisher] = {}
        self._generation = 0

    def run(self) -> None:
        """Replay the chosen messages.

        Raises:
            AmqpError: The replay was interrupted. The next one of the same name continues it.
        """
        state = self._open()
        if state["next"] > state["first"]:
            _log.info("going on with %d messages", state["next"] - state["first"])
            self._round(state, began=True)
            # Messages returned to the queue then are considered again.
            state = self._open()
        left = int(state["available"])
        while left > 0:
            state = self._more(state, left)
            count = int(state["next"]) - int(state["first"])
            if not count:
                break
            left -= count
            state = self._round(state, began=False)

    def _call(self, operation: str, body: Any = None, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = connections.call(
            self._conf.endpoint, self._queue, operation, body, group=self._group, **given
        )
        return found

    def _open(self) -> dict[str, Any]:
        state = self._call("OPEN-LEASE")
        self._generation = int(state["generation"])
        return state

    def _more(self, state: dict[str, Any], most: int) -> dict[str, Any]:
        """Lease up to *most* messages, as many as the broker lets one group hold."""
        while (missing := most - (int(state["next"]) - int(state["first"]))) > 0:
            before = state["next"]
            state = self._call("LEASE", generation=self._generation, count=missing)
            if state["next"] == before:
                break
        return state

    def _round(self, state: dict[str, Any], *, began: bool) -> dict[str, Any]:
        """Replay the chosen ones of the leased messages, and return the others to the queue.

        Args:
            state: State of the group.
            began: Whether an earlier run may have published some of them.
        """
        producer = f"{self._queue}/{self._group}/{state['id']}"
        goes: dict[int, str] = {}
        back = set()
        for letter in sorted(self._choose(), key=lambda each: each.number):
            to, number = letter.to, letter.number
            publisher = self._publisher(to, producer, began=began) if to else None
            if publisher is not None and (letter.chosen or number < publisher.next):
                goes[number] = to
            else:
                back.add(number)
                self.failed[to] += letter.chosen
        self._give_back(back)
        self._publish(goes, int(state["first"]), int(state["next"]))
        return self._call("ACCEPT-LEASE", generation=self._generation, to=state["next"])

    def _publisher(self, to: str, producer: str, *, began: bool) -> Publisher | None:
        """Return the publisher to the address *to*; None if the broker refuses it or there are too many."""
        found = self._publishers.get(to)
        if found is None and to not in self.refused:
            if len(self._publishers) + len(self.refused) >= DESTINATIONS_MAX:
                return None
            try:
                found = self._publishers[to] = Publisher(self._conf, to, producer)
            except LinkRefused as error:
                if began and error.condition != "amqp:not-found":
                    # An earlier run may have published some there: those must not return to the queue.
                    raise
                self.refused[to] = error.description
        return found

    def _give_back(self, numbers: set[int]) -> None:
        """Return these messages to the queue."""
        ranges = list(_ranges(sorted(numbers)))
        for begin in range(0, len(ranges), _RANGES):
            some = ranges[begin : begin + _RANGES]
            self._call("RETURN-LEASE", some, generation=self._generation)
        self.kept += len(numbers)

    def _publish(self, goes: dict[int, str], first: int, end: int) -> None:
        """Send the messages of *goes* in pieces, and accept each piece once all of it is published."""
        messages: dict[str, list[tuple[int, bytes]]] = {}
        count = size = 0
        for number, message in leased(self._options(), Span(self._queue, 0, first, end, "")):
            if number not in goes:
                continue
            payload = replayed(message, self.id)
            messages.setdefault(goes[number], []).append((number, payload))
            count += 1
            size += len(payload)
            if count >= self._pace.piece or size >= PIECE_BYTES:
                self._piece(messages, number + 1)
                self._call("ACCEPT-LEASE", generation=self._generation, to=number + 1)
                messages = {}
                count = size = 0
        self._piece(messages, end)

    def _piece(self, messages: dict[str, list[tuple[int, bytes]]], end: int) -> None:
        self._pace.wait(sum(map(len, messages.values())))
        for to, some in messages.items():
            try:
                self._send(to, some, end)
            except DeliveryRejected:
                # None of the piece is published. Sent one by one, the rejected messages show.
                for number, payload in some:
                    try:
                        self._send(to, [(number, payload)], number + 1)
                    except DeliveryRejected as error:
                        # Before any later message is sent there: a number below the last published
                        # one counts as published.
                        self._give_back({number})
                        self.failed[to] += 1
                        self.refused.setdefault(to, error.description)

    def _send(self, to: str, messages: list[tuple[int, bytes]], end: int) -> None:
        count = self._publishers[to].publish(messages, end)
        self.sent[to] += count
        self.finished += len(messages) - count

    def _options(self) -> Options:
        given = self._conf.options(address=self._queue, mode="lease", group=self._group)
        return read_options(given, SOURCE)


def _ranges(numbers: list[int]) -> Iterator[list[int]]:
    """Yield the ascending *numbers* as ranges, ends excluded."""
    begin = end = -1
    for number in numbers:
        if number != end:
            if begin >= 0:
                yield [begin, end]
            begin = number
        end = number + 1
    if begin >= 0:
        yield [begin, end]
