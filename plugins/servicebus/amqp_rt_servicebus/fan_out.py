"""Messages on their way through a topic to its subscriptions, in turns of the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from amqp_rt.limits import DEFAULT_LIMITS, Limits

from .entity import Entity
from .fields import StoredFields, apply_copy
from .messages import copied, enqueued
from .nodes import SubscriptionNode, TopicNode
from .rules import ACTION_FAILED, Copy, Found, SubscriptionRules
from .stored import Stored

#: Steps of rules, and octets of application properties that an action changes, in the time of a unit of
#: ``Memory.work``; and the units for a copy beside that.
_STEPS_OF_WORK: Final = 12
_OCTETS_OF_WORK: Final = 16
_WORK_OF_A_COPY: Final = 5

_TTL_MAX_MS: Final = 0xFFFF_FFFF


class Travel:
    """All ways of one message of a client, over entities that forward it."""

    def __init__(self) -> None:
        #: Copies that topics have made of it, and those that are to be expected of the topics where it waits.
        self.copies = 0
        self.expected = 0


class _Passing:
    """Message that is being examined by the rules of a topic.

    Args:
        stored: The message.
        travel: Its ways until here.
        topic: Rules of the topic.
        limits: Bounds of the codec.
    """

    def __init__(self, stored: Stored, travel: Travel, topic: TopicNode, limits: Limits) -> None:
        self.stored = stored
        self.travel = travel
        #: Copies that are to be expected: one for each subscription.
        self.expected = len(topic.subscriptions)
        travel.expected += self.expected
        self.evaluation = topic.rules.evaluation(StoredFields(stored, limits))
        self.results: Iterator[Found | None] = topic.rules.examine(self.evaluation)
        #: Steps of the evaluation that count as work already.
        self.counted = 0
        #: Bytes that are reserved for the message while it waits; its first copy takes their place.
        self.reserved = 0
        #: Result for which there was no memory.
        self.held_back: Found | None = None
        #: Subscription of the last failure, and the reason and the description of its dead letter.
        self.failed: SubscriptionRules | None = None
        self.failure = ("", "")


class FanOut:
    """Copies of the messages of one topic for its subscriptions.

    A message is examined at once, as far as the turn allows. The rest, and the messages behind it, wait for later
    turns, and for memory: no copy is made that does not fit into it.

    Args:
        topic: The topic.
        enter: Makes the travel of a message the current one while it calls a function.
        limits: Bounds of the codec.
    """

    def __init__(
        self,
        topic: TopicNode,
        enter: Callable[[Travel, Callable[[], object]], object],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._topic = topic
        self._enter = enter
        self._limits = limits
        self._memory = topic.services.memory
        self._passing: deque[_Passing] = deque()
        #: Whether a call of :meth:`resume` is to come.
        self._asked = False
        topic.entity.count_waiting = lambda: len(self._passing)

    def put(self, stored: Stored, travel: Travel) -> None:
        """Give each subscription the copies of *stored* that its rules select, now or in later turns."""
        passing = _Passing(stored, travel, self._topic, self._limits)
        if not self._passing and self._memory.work > 0 and self._advance(passing):
            return
        self._topic.entity.reserve_room(stored)
        passing.reserved = len(stored.payload)
        self._passing.append(passing)
        self._resume_later()

    def _resume_later(self) -> None:
        if not self._asked and self not in self._memory.waiting:
            self._asked = True
            self._topic.services.resume_later(self)

    def resume(self) -> None:
        """Continue with the messages that wait, as far as this turn allows."""
        self._asked = False
        entity = self._topic.entity
        while self._passing and not entity.deleted:
            if self._memory.work <= 0 or not self._advance(self._passing[0]):
                self._resume_later()
                return
            # A subscription that forwards may have deleted the topic.
            if self._passing:
                entity.release_room(self._passing.popleft().stored)
        self._passing.clear()
        self._memory.waiting.pop(self, None)
        entity.notify_waiting()

    def _advance(self, passing: _Passing) -> bool:
        """Examine a message as far as this turn and the memory allow; return whether that is done."""
        memory = self._memory
        evaluation = passing.evaluation
        while True:
            found = passing.held_back or next(passing.results, _DONE)
            passing.held_back = None
            units = (evaluation.steps - passing.counted) // _STEPS_OF_WORK
            memory.work -= units
            passing.counted += units * _STEPS_OF_WORK
            if found is _DONE:
                self._fail(passing)
                passing.travel.expected -= passing.expected
                return True
            if found is not None:
                if memory.held - passing.reserved + passing.stored.size > memory.limit:
                    passing.held_back = found
                    memory.waiting[self] = self._resume_later
                    return False
                self._give(passing, *found)
            if memory.work <= 0:
                return False

    def _give(self, passing: _Passing, owner: SubscriptionRules, result: Any) -> None:
        """Give the subscription of *owner* a copy, or note that its rules have failed."""
        if passing.failed is not None and passing.failed is not owner:
            self._fail(passing)
        if not isinstance(result, Copy):
            passing.failed = owner
            passing.failure = result.reason, f"rule {result.rule!r}: {result.description}"
            return
        node = self._node_of(owner)
        if node is None:
            return
        changed = self._copy(passing.stored, result)
        if changed is None:
            passing.failed = owner
            passing.failure = (
                ACTION_FAILED,
                f"rule {result.rule!r} would make the application properties too large",
            )
            return
        self._made(passing, changed)
        self._enter(passing.travel, lambda: node.entity.accept(changed))

    def _fail(self, passing: _Passing) -> None:
        """Dead-letter a message once for a subscription whose rules have failed on it, if it is so declared."""
        owner, passing.failed = passing.failed, None
        node = None if owner is None else self._node_of(owner)
        if node is None or not node.declared.dead_lettering_on_filter_evaluation_exceptions:
            return
        dead = self._copy(passing.stored, Copy())
        assert dead is not None, "a copy without changes has the size of the message"
        self._made(passing, dead)
        failure = passing.failure
        self._enter(passing.travel, lambda: _bury(node.entity, dead, failure))

    def _made(self, passing: _Passing, copy: Stored) -> None:
        travel = passing.travel
        travel.copies += 1
        if passing.expected:
            passing.expected -= 1
            travel.expected -= 1
        self._topic.entity.copied_bytes += copy.size
        self._memory.work -= _WORK_OF_A_COPY

    def _node_of(self, owner: SubscriptionRules) -> SubscriptionNode | None:
        """Return the subscription with the rules *owner*, None if it has been deleted."""
        node = self._topic.subscriptions.get(owner.name.lower())
        return node if node is not None and node.rules is owner else None

    def _copy(self, stored: Stored, copy: Copy) -> Stored | None:
        """Return a copy for a subscription, None if its properties would be too large."""
        made = copied(stored)
        # The default of the topic counts in its subscriptions, where the message arrives.
        topic_ms = self._topic.entity.options.ttl_s * 1000
        if topic_ms <= _TTL_MAX_MS and (made.ttl_ms is None or topic_ms < made.ttl_ms):
            made.ttl_ms = round(topic_ms)
        if copy.properties is not None:
            # They are read and written again.
            self._memory.work -= (stored.body_at - stored.content_at) // _OCTETS_OF_WORK
        return made if apply_copy(made, copy, self._limits) else None


_DONE: Final[Any] = object()


def _bury(entity: Entity, stored: Stored, failure: tuple[str, str]) -> None:
    """Dead-letter a message that the rules of a subscription have failed on."""
    now = entity.timing.begin()
    entity.shelf.assign(stored, partitioned=entity.options.partitioned)
    enqueued(stored, now, entity.options.ttl_s)
    entity.outcomes.bury(stored, *failure)
    entity.finish()
