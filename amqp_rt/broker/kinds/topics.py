"""Nodes that are topics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from ...errors import AmqpError
from ...fronts.base import LinkConnection
from ...outcomes import Error
from ...termini import Source
from ..durable.journal import Journal
from ..durable.units import Unit
from ..entries import Entry
from ..nodes import TOPIC, Topic
from ..producers import Intake
from ..queue.observed import ObservedQueue
from ..queue.queue import MessageQueue
from ..queue.subscriptions import Subscription
from ..statistics import SubscriptionStats
from ..termini import KeptSource, Key, SharedSource, Terminus
from ..terms import Terms
from ..topics import MessageTopic, TopicLedger
from .base import Node, Space
from .queues import peek


class TopicNode(Node):
    """Node that gives each message to every current subscriber."""

    kind = TOPIC
    declaration = Topic
    declared: Topic
    held: MessageTopic

    @classmethod
    def make(
        cls,
        space: Space,
        declared: Topic,
        *,
        number: int,
        owner: LinkConnection | None,
        transient: bool,
        new: bool,
    ) -> Self:
        services = space.services
        watch = None
        if services.journals is not None and not transient:
            watch = services.journals.watch(space.name, declared.name, space.record)

        def new_queue() -> MessageQueue:
            queue = (MessageQueue if watch is None else ObservedQueue)(
                services.memory,
                services.clock.wall,
                partial(_drop_copy, space, declared.name),
                monotonic=services.clock.monotonic,
                limits=services.limits,
            )
            if watch is not None and isinstance(queue, ObservedQueue):
                queue.watch = watch
            return queue

        topic = MessageTopic(
            services.memory,
            services.clock.wall,
            new_queue,
            backlog_max=declared.backlog_max or 0,
            backlog_bytes_max=declared.backlog_bytes_max or 0,
            limits=services.limits,
        )

        topic.on_alarm = services.turns.set_alarm
        topic.on_unfinished = services.turns.resume_later
        ledger = None
        if services.journal is not None and number:
            ledger = TopicLedger(services.journal, topic, declared.name)
        node = cls(
            space,
            declared,
            topic,
            Intake(topic),
            topic,
            ledger,
            number=number,
            owner=owner,
            # Topics promise nothing beyond the links that are attached now.
            volatile=True,
        )
        node.inlet.on_expiring = partial(services.expiring.__setitem__, node, None)
        node.inlet.ttl_s = declared.ttl_s
        return node

    def redeclare(self, declared: Topic) -> None:
        super().redeclare(declared)
        limits, topic = self.services.limits, self.held
        topic.backlog_max = declared.backlog_max or limits.backlog_max
        topic.backlog_bytes_max = declared.backlog_bytes_max or limits.backlog_bytes_max
        self.inlet.ttl_s = declared.ttl_s
        for producer in self.intake.producers:
            producer.ttl_s = declared.ttl_s

    async def restore_subscription(self, journal: Journal, terminus: Terminus) -> None:
        queue = terminus.queue
        if queue is not None:
            await self.services.pager.restore(journal, terminus.number, queue)
            self.services.expiring[self] = None

    def owns(self, owner: object) -> bool:
        return super().owns(owner) or owner in self.held.queues

    # --- Attaching ---

    def refuse_consumer(self, terms: Terms) -> Error | None:
        most = self.services.limits.stored_subscriptions_max
        if (
            self.services.journal is not None
            and (terms.keeps or terms.shared)
            and isinstance(terms.source, Source)
            and terms.source.durable
            and len(self.held.stored) >= most
        ):
            return Error(
                "amqp:resource-limit-exceeded",
                f"{self.declared.name!r} has {most} durable subscriptions already",
            )
        return None

    def consume(self, terms: Terms, *, batches: bool = False) -> Subscription:
        subscription = self.held.subscribe(
            default_outcome=terms.default_outcome,
            outcomes=terms.outcomes,
            settled=terms.settled,
            filters=terms.filters,
        )
        subscription.transactions = self.services.transactions
        return subscription

    def make_source(self, key: Key, terms: Terms, number: int) -> Terminus:
        topic, termini = self.held, self.services.termini
        identity, queue = topic.open(terms.filters)
        terminus: Terminus
        if terms.shared:
            terminus = SharedSource(termini, key, terms, queue, number)
            terminus.on_end.append(partial(topic.close, identity))
        else:
            subscription = topic.join(
                identity,
                default_outcome=terms.default_outcome,
                outcomes=terms.outcomes,
                settled=terms.settled,
            )
            subscription.transactions = self.services.transactions
            terminus = KeptSource(termini, key, terms, subscription, queue, number)
        topic.on_end_slow[identity] = terminus.fail
        if number and self.services.journal is not None:
            topic.keep(identity, self.services.journal, number)
        return terminus

    def delete_stored_terminus(self, unit: Unit, terminus: Terminus) -> None:
        if terminus.sending:
            unit.clear(terminus.number)

    def stored_consumers(self) -> Sequence[Subscription]:
        return self.held.consumers if self.number else ()

    def stop(self, failure: AmqpError) -> None:
        super().stop(failure)
        for queue in self.held.queues:
            queue.deleted = True
            self.services.pager.release(queue, failure)

    def sweep(self) -> None:
        self.held.sweep()

    # --- Operators ---

    def subscriptions(self) -> list[SubscriptionStats]:
        """Return the statistics of the subscriptions, in the order of their creation."""
        return [stats for stats, _ in self._subscriptions()]

    def subscription(self, name: str, container: str | None = None) -> SubscriptionStats:
        """Return the statistics of the subscription *name*, of *container* if that is given.

        Raises:
            AmqpError: There is no such subscription, or there are several.
        """
        return self._subscription(name, container)[0]

    async def peek_subscription(
        self, name: str, count: int = 1, container: str | None = None
    ) -> list[bytes]:
        """Return the first *count* available messages of a subscription.

        They are encoded as they would be sent now.

        Raises:
            AmqpError: There is no such subscription, or there are several.
        """
        return await peek(self.services, self._subscription(name, container)[1], count)

    def _subscription(
        self, name: str, container: str | None
    ) -> tuple[SubscriptionStats, MessageQueue]:
        every = self._subscriptions()
        found = [each for each in every if each[0].name == name]
        if container is not None:
            found = [each for each in found if each[0].container == container]
        if len(found) != 1:
            known = ", ".join(f"{stats.name!r} of {stats.container!r}" for stats, _ in every)
            raise AmqpError(
                f"{self.declared.name!r} has {len(found) or 'no'} subscriptions {name!r}; there are: "
                f"{known or 'none'}",
                condition="amqp:not-found",
            )
        return found[0]

    def _subscriptions(self) -> list[tuple[SubscriptionStats, MessageQueue]]:
        kept = {each.queue: each.key for each in self.termini if each.queue is not None}
        found = []
        for queue in self.held.queues:
            consumers = list(queue.consumers.values())
            links = [each.link for each in consumers if each.link.attached]
            if queue in kept:
                _, _, container, _, name, _ = kept[queue]
            elif links:
                container, name = links[0].peer.container_id, links[0].name
            else:
                continue  # its link is being attached
            stats = SubscriptionStats(
                container=container,
                name=name,
                kept=queue in kept,
                available=queue.available,
                acquired=queue.acquired,
                delayed=queue.delayed,
                bytes=queue.bytes,
                consumers=len(links),
            )
            found.append((stats, queue))
        return found


def _drop_copy(space: Space, name: str, entry: Entry, reason: str, error: Error | None) -> bool:
    """Drop a subscriber's copy of *entry* at the topic *name*."""
    space.dead_letters.drop(name, entry, reason, error, "subscriptions have no dead_letter")
    return False
