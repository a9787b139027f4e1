"""Queues, topics and subscriptions of a namespace: declarations, entities with their links, and facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from amqp_rt.broker.building import Intake, Memory
from amqp_rt.clock import Clock
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import Error

from .atom import Described, MessageCounts, RuntimeFacts
from .bounds import DEFAULT_BOUNDS, Bounds
from .conditions import ENTITY_DISABLED
from .declarations import Queue, Rule, Subscription, Topic
from .entity import Entity
from .faults import Faults
from .options import Options
from .rules import SubscriptionRules, TopicRules
from .stored import Stored
from .topic_entity import TopicEntity

#: Answer to links of an entity that is deleted.
DELETED: Final = Error("amqp:not-found", "the entity has been deleted")


class Services:
    """Objects that all entities of a namespace share.

    Args:
        memory: Memory account.
        clock: Clock of message times.
        limits: Bounds of the codec.
        set_alarm: Calls ``tick`` of an entity at a time of the monotonic clock.
        resume_later: Calls ``resume`` of an entity in a later turn.
        bounds: Bounds of the namespace.
        faults: Errors that a test wants in place of what entities would do.
        message_bytes_max: Bytes of one message, where the entity sets no limit; None for that of the broker.
        quota: Returns why the service would refuse a message; None for no such limits.
    """

    def __init__(
        self,
        memory: Memory,
        clock: Clock,
        *,
        limits: Limits = DEFAULT_LIMITS,
        set_alarm: Callable[[Any, float], None],
        resume_later: Callable[[Any], None],
        bounds: Bounds = DEFAULT_BOUNDS,
        faults: Faults,
        message_bytes_max: int | None = None,
        quota: Callable[[Stored], Error | None] | None = None,
    ) -> None:
        self.memory = memory
        self.clock = clock
        self.limits = limits
        self.set_alarm = set_alarm
        self.resume_later = resume_later
        self.bounds = bounds
        self.faults = faults
        self.message_bytes_max = message_bytes_max
        self.quota = quota


class Node:
    """A queue, a topic or a subscription.

    Args:
        path: Address as it was declared.
        entity: Its messages.
        services: Objects that all entities share.
    """

    def __init__(self, path: str, entity: Entity, services: Services) -> None:
        self.path = path
        self.entity = entity
        self.services = services
        self.created_at = self.updated_at = services.clock.wall()
        #: Senders to the entity. Sub-queues have none.
        self.intake = Intake(entity)
        self.intake.duplicates = entity.duplicates
        #: Links that receive; those of subscriptions are counted at their topic.
        self.receivers = 0
        #: Attaches that wait for a session; each can be refused.
        self.waiting: dict[object, Callable[[Error], None]] = {}
        entity.is_used = self._is_used
        entity.message_bytes_max = services.message_bytes_max
        if services.quota is not None:
            entity.quota = services.quota
        for part in entity.parts:
            part.bounds = services.bounds
            self._wire(part)

    def _wire(self, part: Entity) -> None:
        part.on_alarm = lambda at: self.services.set_alarm(part, at)
        part.on_unfinished = lambda: self.services.resume_later(part)
        part.fault = lambda on: self.services.faults.take(on, part.path)
        # An entity sets its first alarm, for the time after which it is idle, before it has a host.
        if part.alarm != inf:
            self.services.set_alarm(part, part.alarm)

    def _is_used(self) -> bool:
        return bool(self.intake.producers or self.waiting)

    def refuse_waiting(self, error: Error) -> None:
        """Refuse the attaches that wait for a session."""
        for refuse in list(self.waiting.values()):
            refuse(error)

    def detach(self, error: Error, *, senders: bool = True, receivers: bool = True) -> None:
        """Detach the links of the entity and its sub-queues with *error*."""
        if receivers:
            self.refuse_waiting(error)
            for part in self.entity.parts:
                for subscription in list(part.consumers.values()):
                    subscription.link.detach(error)
        if senders:
            for producer in list(self.intake.producers):
                producer.link.detach(error)

    def counts(self) -> MessageCounts:
        """Return the numbers of messages by state."""
        sizes = self.entity.sizes()
        return MessageCounts(
            active=sizes.active + sizes.deferred,
            dead_letter=sizes.dead_letters,
            scheduled=sizes.scheduled,
            transfer_dead_letter=sizes.transfer_dead_letters,
        )

    def facts(self) -> RuntimeFacts:
        """Return the state for the administration."""
        return RuntimeFacts(
            created_at=self.created_at,
            updated_at=self.updated_at,
            accessed_at=max(each.timing.used_at for each in self.entity.parts),
            size_in_bytes=self.entity.sizes().bytes,
            counts=self.counts(),
        )

    def _apply(
        self, before: Queue | Topic | Subscription, after: Queue | Topic | Subscription
    ) -> None:
        """Apply a changed declaration, and detach the links for which it matters."""
        self.updated_at = self.services.clock.wall()
        self.entity.reconfigure(self._options(after))
        if before.status != after.status:
            self.detach(
                Error(ENTITY_DISABLED, f"{self.path!r} has changed its status to {after.status}"),
                senders=after.status in ("Disabled", "SendDisabled"),
                receivers=after.status in ("Disabled", "ReceiveDisabled"),
            )
        elif getattr(after, "forward_to", None) and not getattr(before, "forward_to", None):
            self.detach(
                Error(
                    "amqp:link:detach-forced", f"{self.path!r} forwards its messages from now on"
                ),
                senders=False,
            )

    def _options(self, declared: Queue | Topic | Subscription) -> Options:
        return Options.of(declared)

    def delete(self) -> None:
        """Delete the messages and detach the links."""
        self.detach(DELETED)
        self.entity.delete()


class QueueNode(Node):
    """A queue of a namespace."""

    def __init__(self, declared: Queue, services: Services) -> None:
        options = Options.of(declared)
        entity = Entity(
            declared.name, options, services.memory, services.clock, limits=services.limits
        )
        super().__init__(declared.name, entity, services)
        self.declared = declared

    def describe(self) -> Described:
        """Return the queue as the administration shows it."""
        return Described(self.declared, self.facts())

    def update(self, declared: Queue) -> None:
        """Apply another declaration of the same name."""
        before, self.declared = self.declared, declared
        self._apply(before, declared)


class SubscriptionNode(Node):
    """A subscription of a topic.

    Raises:
        InvalidRule: A filter or an action is malformed.
        TooManyRules: A bound of the topic would be exceeded.
    """

    def __init__(self, topic: TopicNode, declared: Subscription, services: Services) -> None:
        path = f"{topic.declared.name}/Subscriptions/{declared.name}"
        now_ms = round(services.clock.wall() * 1000)
        self.topic = topic
        self.rules: SubscriptionRules = topic.rules.add(
            declared.name, declared.rules or (), now_ms=now_ms
        )
        entity = Entity(
            path, self._options(declared), services.memory, services.clock, limits=services.limits
        )
        super().__init__(path, entity, services)
        self.declared = declared

    def _options(self, declared: Any) -> Options:
        # The size is that of the topic.
        return replace(Options.of(declared), bytes_max=inf)

    def describe(self) -> Described:
        """Return the subscription as the administration shows it."""
        return Described(self.declared, self.facts())

    def describe_rule(self, name: str) -> Described:
        """Return a rule as the administration shows it.

        Raises:
            RuleNotFound: There is no such rule.
        """
        rule = self.rules[name]
        at = rule.created_ms / 1000
        return Described(rule.declaration, RuntimeFacts(created_at=at, updated_at=at))

    def add_rule(self, rule: Rule) -> None:
        """Add a rule; errors are those of :meth:`.rules.SubscriptionRules.add`."""
        self.rules.add(rule, now_ms=round(self.services.clock.wall() * 1000))

    def update(self, declared: Subscription) -> None:
        """Apply another declaration of the same name; the rules stay."""
        before, self.declared = self.declared, declared
        self._apply(before, declared)

    def delete(self) -> None:
        """Delete the messages and the rules, and detach the links."""
        super().delete()
        self.topic.rules.remove(self.declared.name)


class TopicNode(Node):
    """A topic of a namespace; subscriptions are added to it."""

    entity: TopicEntity

    def __init__(self, declared: Topic, services: Services) -> None:
        options = Options.of(declared)
        entity = TopicEntity(
            declared.name, options, services.memory, services.clock, limits=services.limits
        )
        super().__init__(declared.name, entity, services)
        self.declared = declared
        self.rules = TopicRules(services.bounds.rules)
        #: By name in lower case.
        self.subscriptions: dict[str, SubscriptionNode] = {}
        entity.count_bytes = self._count_bytes

    def _count_bytes(self) -> int:
        return sum(each.entity.sizes().bytes for each in self.subscriptions.values())

    def _is_used(self) -> bool:
        return super()._is_used() or any(
            part.consumers for each in self.subscriptions.values() for part in each.entity.parts
        )

    def facts(self) -> RuntimeFacts:
        """Return the state for the administration: sizes with those of the subscriptions."""
        found = super().facts()
        return RuntimeFacts(
            created_at=found.created_at,
            updated_at=found.updated_at,
            accessed_at=found.accessed_at,
            size_in_bytes=found.size_in_bytes + self._count_bytes(),
            counts=MessageCounts(scheduled=found.counts.scheduled),
            subscription_count=len(self.subscriptions),
        )

    def describe(self) -> Described:
        """Return the topic as the administration shows it."""
        return Described(self.declared, self.facts())

    def update(self, declared: Topic) -> None:
        """Apply another declaration of the same name; the subscriptions stay."""
        before, self.declared = self.declared, declared
        self._apply(before, declared)

    def walk(self) -> Iterator[SubscriptionNode]:
        """Yield the subscriptions in the order of their names."""
        for name in sorted(self.subscriptions):
            yield self.subscriptions[name]

    def delete(self) -> None:
        """Delete the topic with its subscriptions."""
        for each in list(self.subscriptions.values()):
            each.delete()
        self.subscriptions.clear()
        super().delete()


#: What has an address of its own.
AnyNode: TypeAlias = QueueNode | TopicNode | SubscriptionNode
