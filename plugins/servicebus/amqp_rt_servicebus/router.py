"""Ways of messages from one entity to others: forwarding, dead letters, copies for subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from amqp_rt.limits import DEFAULT_LIMITS, Limits

from .entity import Entity, Failure
from .fields import StoredFields, apply_copy
from .messages import Stored, copied, enqueued
from .nodes import AnyNode, QueueNode, SubscriptionNode, TopicNode
from .rules import ACTION_FAILED, Copy, Selection

#: Copies of one message that may result on all its ways together; a topic that it reaches after that does not
#: get it. Subscriptions that forward to their own topic would multiply it otherwise.
COPIES_MAX: Final = 10_000

#: Why a message was not forwarded: reasons of transfer dead letters.
NOT_FOUND: Final = "MessagingEntityNotFoundException"
DISABLED: Final = "MessagingEntityDisabledException"
FULL: Final = "QuotaExceededException"
TOO_MANY_COPIES: Final = "MaxTransferCopiesExceeded"

_TTL_MAX_MS: Final = 0xFFFF_FFFF


class Router:
    """Ways between the entities of one namespace.

    Args:
        find: Returns the queue or topic of a name, None if there is none.
        limits: Bounds of the codec.
    """

    def __init__(
        self,
        find: Callable[[str], QueueNode | TopicNode | None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._find = find
        self._limits = limits
        #: Calls that put a message into an entity, within each other, and the copies that they made.
        self._depth = 0
        self._copies = 0

    def wire(self, node: AnyNode) -> None:
        """Let the messages of *node* go where its declaration says, from now on."""
        entity = node.entity
        if isinstance(node, TopicNode):
            topic = node
            entity.forward = lambda stored: self._fan_out(topic, stored)
            entity.forward_counts = False
            return
        entity.forward = self._way_to(node.declared.forward_to)
        dead_letters = entity.dead_letters
        if dead_letters is not None:
            dead_letters.forward = self._way_to(node.declared.forward_dead_lettered_messages_to)

    def _way_to(self, target: str | None) -> Callable[[Stored], Failure | None] | None:
        if target is None:
            return None
        return lambda stored: self._forward(target, stored)

    def _forward(self, target: str, stored: Stored) -> Failure | None:
        """Put *stored* into the entity *target*; return why that is impossible."""
        # The target is looked up for each message: it may be deleted and declared again.
        node = self._find(target)
        if node is None:
            return NOT_FOUND, f"the messaging entity {target!r} could not be found"
        if node.declared.status in ("Disabled", "SendDisabled"):
            return DISABLED, f"the messaging entity {target!r} is disabled for sending"
        if not node.entity.fits(stored.size):
            return FULL, f"the messaging entity {target!r} has no room"
        if isinstance(node, TopicNode) and self._copies >= COPIES_MAX:
            return (
                TOO_MANY_COPIES,
                f"the message has {COPIES_MAX} copies already, and topic {target!r} would make more",
            )
        self._depth += 1
        try:
            node.entity.receive(stored)
        finally:
            self._leave()
        return None

    def _leave(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._copies = 0

    def _fan_out(self, topic: TopicNode, stored: Stored) -> Failure | None:
        """Give each subscription of *topic* the copies that its rules select. That never fails as a whole."""
        self._depth += 1
        try:
            evaluation = topic.rules.evaluation(StoredFields(stored, self._limits))
            for name, selection in topic.rules.select(evaluation).items():
                node = topic.subscriptions.get(name.lower())
                if node is not None:
                    self._give(node, stored, selection)
        finally:
            self._leave()
        return None

    def _give(self, node: SubscriptionNode, stored: Stored, selection: Selection) -> None:
        failure: Failure | None = None
        for copy in selection.copies:
            changed = self._copy(node.topic, stored, copy)
            if changed is None:
                failure = (
                    ACTION_FAILED,
                    f"rule {copy.rule!r} would make the application properties too large",
                )
                continue
            self._copies += 1
            node.topic.entity.copied_bytes += changed.size
            node.entity.accept(changed)
        for each in selection.failures:
            failure = each.reason, f"rule {each.rule!r}: {each.description}"
        if failure is not None and node.declared.dead_lettering_on_filter_evaluation_exceptions:
            dead = self._copy(node.topic, stored, Copy())
            assert dead is not None, "a copy without changes has the size of the message"
            self._copies += 1
            node.topic.entity.copied_bytes += dead.size
            _bury(node.entity, dead, failure)

    def _copy(self, topic: TopicNode, stored: Stored, copy: Copy) -> Stored | None:
        """Return a copy for a subscription, None if its properties would be too large."""
        made = copied(stored)
        # The default of the topic counts in its subscriptions, where the message arrives.
        topic_ms = topic.entity.options.ttl_s * 1000
        if topic_ms <= _TTL_MAX_MS and (made.ttl_ms is None or topic_ms < made.ttl_ms):
            made.ttl_ms = round(topic_ms)
        return made if apply_copy(made, copy, self._limits) else None


def _bury(entity: Entity, stored: Stored, failure: Failure) -> None:
    """Dead-letter a message that the rules of a subscription have failed on."""
    now = entity.timing.begin()
    entity.shelf.assign(stored, partitioned=entity.options.partitioned)
    enqueued(stored, now, entity.options.ttl_s)
    entity.outcomes.bury(stored, *failure)
    entity.finish()
