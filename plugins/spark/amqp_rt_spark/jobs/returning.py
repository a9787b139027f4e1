"""Dead letters go back to where they came from, each exactly once, whatever is interrupted.

A group of the queue sets all of them aside (a lease). Somebody looks which ones are chosen; the others go
back at once, and from then on the broker knows the choice: it is what the group has left. These are
published in pieces, each under the number after its last message, and a piece is accepted, and so
gone from the queue, when it has been published everywhere.

Whoever begins again after a failure asks each destination how far it got. What has a lower number was
chosen and is published, so it is accepted and nothing else, even if the choice is another one by now.

Nothing here knows Spark.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from uuid import uuid4

from msgspec import Struct

from amqp_rt.errors import AmqpError, DeliveryRejected, LinkRefused

from .. import wire
from ..leasing import leased
from ..options import SOURCE, Options, read_options
from ..reading import Span
from .conf import JobConf
from .publishing import PIECE_BYTES, Pace, Publisher, replayed, short

_log = logging.getLogger("amqp_rt_spark")

#: Destinations of one replay. Their names come from messages.
DESTINATIONS_MAX: Final = 1_000
#: Ranges that go back with one request.
_RANGES: Final = 1_000


class Letter(Struct, frozen=True):
    """A message that is set aside: its number, where it would go, and whether it is to.

    It goes nowhere if *to* is empty.
    """

    number: int
    to: str
    chosen: bool


def no_way(queue: str, to: str) -> str:
    """Why nothing of *queue* is sent to the address *to*; an empty text if there is no reason.

    The address may come from a message, and whoever may send to the queue has a say in it.
    """
    if not to:
        return "it does not say who gave it up"
    if to == queue or to.startswith("$") or "/$" in to:
        return "nothing is replayed to there"
    return ""


def waiting(conf: JobConf, queue: str, name: str) -> int:
    """How many messages a replay of that *name* has set aside that was interrupted."""
    try:
        state = wire.call(conf.endpoint, queue, "LEASE-STATE", group=group_of(name))
    except AmqpError:
        return 0
    return int(state["next"]) - int(state["first"])


def group_of(name: str) -> str:
    """The group that sets messages aside for a replay of that *name*."""
    return short(f"replay to {name}")


class Return:
    """One replay of all that waits in a queue now.

    Args:
        conf: Where the broker is.
        queue: The queue.
        name: Of the replay. One of the same name goes on with what an interrupted one has left.
        choose: Says of each message that the group has aside what becomes of it.
        pace: How fast it goes.

    Attributes:
        id: What the messages say of themselves.
        sent: Destination → messages that were published.
        failed: Destination → messages that were chosen, could not be sent there, and stay.
        refused: Destination → why nothing, or not everything, can be sent there.
        finished: Messages that an earlier run had published.
        kept: Messages that stay.
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
        """Replay what is chosen.

        Raises:
            AmqpError: It was interrupted. The next one of the same name goes on with it.
        """
        state = self._open()
        if state["next"] > state["first"]:
            _log.info("going on with %d messages", state["next"] - state["first"])
            self._round(state, began=True)
            # What was given back then is looked at again.
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
        found: dict[str, Any] = wire.call(
            self._conf.endpoint, self._queue, operation, body, group=self._group, **given
        )
        return found

    def _open(self) -> dict[str, Any]:
        state = self._call("OPEN-LEASE")
        self._generation = int(state["generation"])
        return state

    def _more(self, state: dict[str, Any], most: int) -> dict[str, Any]:
        """Set up to *most* messages aside, as many as the broker lets one group have."""
        while (missing := most - (int(state["next"]) - int(state["first"]))) > 0:
            before = state["next"]
            state = self._call("LEASE", generation=self._generation, count=missing)
            if state["next"] == before:
                break
        return state

    def _round(self, state: dict[str, Any], *, began: bool) -> dict[str, Any]:
        """Replay what is chosen of what is set aside, and give the rest back.

        Args:
            state: Of the group.
            began: Some of it may have been published before this run.
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
        """Who publishes to *to*; None if nobody can."""
        found = self._publishers.get(to)
        if found is None and to not in self.refused:
            if len(self._publishers) + len(self.refused) >= DESTINATIONS_MAX:
                return None
            try:
                found = self._publishers[to] = Publisher(self._conf, to, producer)
            except LinkRefused as error:
                if began and error.condition != "amqp:not-found":
                    # It may have got some of them already: these are not to go back.
                    raise
                self.refused[to] = error.description
        return found

    def _give_back(self, numbers: set[int]) -> None:
        """These stay in the queue."""
        ranges = list(_ranges(sorted(numbers)))
        for begin in range(0, len(ranges), _RANGES):
            some = ranges[begin : begin + _RANGES]
            self._call("RETURN-LEASE", some, generation=self._generation)
        self.kept += len(numbers)

    def _publish(self, goes: dict[int, str], first: int, end: int) -> None:
        """Send what *goes* in pieces, and be done with each as soon as all of it is published."""
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
                # Nothing of it is published. One by one shows which of them are not taken.
                for number, payload in some:
                    try:
                        self._send(to, [(number, payload)], number + 1)
                    except DeliveryRejected as error:
                        # Before anything later is sent there: what has a lower number than the last
                        # one that was published counts as published.
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
    """*numbers*, which rise, as ranges without their ends."""
    begin = end = -1
    for number in numbers:
        if number != end:
            if begin >= 0:
                yield [begin, end]
            begin = number
        end = number + 1
    if begin >= 0:
        yield [begin, end]
