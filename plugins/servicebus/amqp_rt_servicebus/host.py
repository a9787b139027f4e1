"""Links to the entities of one namespace: where they attach, and why they are refused.

The texts and conditions of refusals are those by which the SDKs choose their exceptions (Service Bus facts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final, Protocol

import trio

from amqp_rt.broker.building import Inlet, Subscription, Transactions
from amqp_rt.clock import Clock
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import (
    SENDER,
    Coordinator,
    Error,
    Peer,
    ReceivingLink,
    SendingLink,
    Source,
    Symbol,
    ULong,
)
from amqp_rt.fronts.base import SND_SETTLED
from amqp_rt.fronts.hosts import BareHost
from amqp_rt.limits import Limits
from amqp_rt.values import Described

from .addresses import DEAD_LETTERS, Place, place_of
from .arrivals import StoredFactory
from .conditions import ENTITY_DISABLED, NO_ROOM, NOT_ALLOWED, TIMEOUT
from .entity import Entity
from .nodes import AnyNode, QueueNode, SubscriptionNode, TopicNode
from .senders import Sender
from .sessions import Session

SESSION_FILTER: Final = "com.microsoft:session-filter"
#: Link property of receivers with a session: the end of its lock, in ticks.
LOCKED_UNTIL: Final = Symbol("com.microsoft:locked-until-utc")
#: Link property of senders: the entity to which messages go by way of the target, for transactions with that.
VIA_DESTINATION: Final = "com.microsoft:transfer-destination-address"
#: Link property of attaches: milliseconds to wait for a session.
ATTACH_TIMEOUT: Final = "com.microsoft:timeout"
#: Link property of senders: octets of a batch, which clients fill up to that size.
BATCH_SIZE: Final = Symbol("com.microsoft:max-message-batch-size")

#: Ticks of .NET at 1970, and in a second.
_TICKS_AT_1970: Final = 621_355_968_000_000_000
_TICKS: Final = 10_000_000
#: Seconds that an attach waits for a session, unless it says so itself, and the most that it may say.
SESSION_WAIT_S: Final = 60.0
SESSION_WAIT_MAX_S: Final = 600.0
#: Octets of a batch of messages, unless the namespace has the limits of the service.
BATCH_BYTES_MAX: Final = 1024 * 1024
#: Link of an attach that names no session filter, which differs from one that names any session.
_NO_FILTER: Final = object()


def not_found(address: str) -> Error:
    """Return the error for an entity that does not exist; JavaScript reads its text."""
    return Error("amqp:not-found", f"The messaging entity '{address:.300}' could not be found.")


class Names(Protocol):
    """Entities of a namespace by their addresses."""

    def node(self, path: Sequence[str]) -> AnyNode | None:
        """Return the entity at a path in lower case, None if there is none."""


class HostServices(Protocol):
    """Services of a broker, as far as its host of a namespace needs them."""

    clock: Clock
    limits: Limits
    transactions: Transactions

    def start(self, task: Callable[..., Any], *arguments: object) -> bool:
        """Run an async function while the broker runs; return False if it stops."""

    def may_send(self, peer: Peer, address: str) -> Error | None:
        """Return why *peer* may not send to *address*, None if it may."""

    def has_other(self, link: ReceivingLink | SendingLink) -> bool:
        """Return whether the address of *link* is one of the broker's own nodes or handlers."""


class _SessionAttach:
    """Attach of a receiver that waits for any session.

    Args:
        host: The host.
        node: The entity.
        part: The entity itself, whose sessions they are.
        link: The link.
    """

    def __init__(self, host: NamespaceHost, node: AnyNode, part: Entity, link: SendingLink) -> None:
        self._host = host
        self._node = node
        self._part = part
        self._link = link
        self._number = part.wait_for_session(self._take, settled=_settles(link))
        self._answered = trio.Event()
        node.waiting[self] = self.refuse
        link.session.followers[self] = self._give_up

    def _take(self, subscription: Subscription) -> bool:
        """Attach with the session of *subscription*; return whether the link is still there."""
        self._leave()
        if self._link.session.ended:
            return False
        self._host.accept_session(self._link, self._node, self._part, subscription)
        return True

    def refuse(self, error: Error) -> None:
        """Refuse the link, and stop waiting."""
        self._give_up()
        self._link.refuse(error)

    def _give_up(self) -> None:
        self._part.sessions.stop_waiting(self._number)
        self._leave()

    def _leave(self) -> None:
        self._node.waiting.pop(self, None)
        self._link.session.followers.pop(self, None)
        self._answered.set()

    async def run(self) -> None:
        """Wait for the session as long as the client does, by the time of the event loop."""
        with trio.move_on_after(_wait_of(self._link)):
            await self._answered.wait()
        if not self._answered.is_set():
            self.refuse(
                Error(
                    TIMEOUT, f"no session of {self._part.path!r} was free within the time to wait"
                )
            )


class NamespaceHost(BareHost):
    """Host of one namespace's entities (``fronts.base.Host``).

    Args:
        names: The entities.
        services: What it needs of the broker.
        batch_bytes_max: Octets of a batch or a message, where the entity sets no limit.
        receivers_max: Links that receive from one queue, or from all subscriptions of a topic.
    """

    def __init__(
        self,
        names: Names,
        services: HostServices,
        *,
        batch_bytes_max: int | None = None,
        receivers_max: float = inf,
    ) -> None:
        self._names = names
        self._services = services
        self._batch_bytes_max = batch_bytes_max
        self._receivers_max = receivers_max

    # --- Attaching ---

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*, now or when a session is free; return False if its address is not ours."""
        terminus: Any = link.source if link.role == SENDER else link.target
        if terminus is None or isinstance(terminus, Coordinator) or terminus.dynamic:
            return False
        address = terminus.address
        if not isinstance(address, str) or not address:
            return False
        place = place_of(address)
        if place.name.startswith("$"):
            return False
        node = self._names.node(place.path)
        part = None if node is None else part_of(node, place)
        if node is None or part is None:
            if self._services.has_other(link):
                return False
            link.refuse(not_found(link.asked or address))
            return True
        if place.management:
            # The handler of all management nodes answers there.
            return False
        if (fault := part.fault("attach")) is not None:
            link.refuse(fault)
            return True
        try:
            if link.role == SENDER:
                self._attach_receiver(link, node, part, place)  # type: ignore[arg-type]
            else:
                self._attach_sender(link, node, part, place)  # type: ignore[arg-type]
        except AmqpError as error:
            link.refuse(Error.of(error))
        return True

    def _attach_sender(
        self, link: ReceivingLink, node: AnyNode, part: Entity, place: Place
    ) -> None:
        """Attach a link of a client that sends.

        Raises:
            AmqpError: Nothing can be sent there, or not now.
        """
        if place.sub_queue or isinstance(node, SubscriptionNode):
            raise AmqpError(
                f"{part.path!r} takes no messages of clients: send to the queue or topic",
                condition=NOT_ALLOWED,
            )
        via = link.properties.get(VIA_DESTINATION)
        if via is not None:
            # A transaction may span entities here: the message need not wait at the entity in between.
            node = self._destination(link, via)
            part = node.entity
        if node.declared.status in ("Disabled", "SendDisabled"):
            raise AmqpError(f"{part.path!r} is disabled for sending", condition=ENTITY_DISABLED)
        kilobytes = node.declared.max_message_size_in_kilobytes
        size = self._batch_bytes_max if kilobytes is None else kilobytes * 1024
        batch = BATCH_BYTES_MAX if size is None else min(size, BATCH_BYTES_MAX)
        link.accept(
            Sender(node.intake, part, self._services, size_max=size),
            max_message_size=size,
            properties={BATCH_SIZE: ULong(batch)},
        )
        if size is not None:
            # Larger messages are rejected: Python does not tell why a link was detached from under a message.
            link.max_message_size = max(size, self._services.limits.message_size_max)

    def _destination(self, link: ReceivingLink, address: object) -> QueueNode | TopicNode:
        """Return the entity *address*, to which messages of *link* go by way of its target.

        Raises:
            AmqpError: There is none, or the client may not send to it.
        """
        if not isinstance(address, str):
            raise AmqpError(
                f"{VIA_DESTINATION} is {address!r:.80}, not an address",
                condition="amqp:invalid-field",
            )
        place = place_of(address)
        node = self._names.node(place.path)
        if node is None or place.sub_queue or place.management:
            raise not_found(address).raised_as(AmqpError)
        if isinstance(node, SubscriptionNode):
            raise AmqpError(f"{node.path!r} takes no messages of clients", condition=NOT_ALLOWED)
        refused = self._services.may_send(link.peer, node.path.lower())
        if refused is not None:
            raise refused.raised_as(AmqpError)
        return node

    def _attach_receiver(
        self, link: SendingLink, node: AnyNode, part: Entity, place: Place
    ) -> None:
        """Attach a link of a client that receives.

        Raises:
            AmqpError: Nothing can be received there, or not now, or its session is locked.
        """
        if isinstance(node, TopicNode):
            raise AmqpError(
                f"{part.path!r} is a topic: receive from one of its subscriptions",
                condition=NOT_ALLOWED,
            )
        disabled = part.refuse_consumer()
        if disabled is not None:
            raise disabled.raised_as(AmqpError)
        if part.forward is not None:
            raise AmqpError(
                f"{part.path!r} forwards its messages: receive where they arrive",
                condition=NOT_ALLOWED,
            )
        count = _counted_at(node).receivers
        if count >= self._receivers_max:
            raise AmqpError(
                f"{part.path!r} has {count} receivers already, those of its topic included",
                condition=NO_ROOM,
            )
        wanted = _session_wanted(link)
        if wanted is _NO_FILTER:
            consumer = part.consume(settled=_settles(link))
            self._accept_receiver(link, node, consumer)
            return
        if wanted is not None and not isinstance(wanted, str):
            raise AmqpError(
                f"the session filter is {wanted!r:.80}, neither a text nor null",
                condition="amqp:invalid-field",
            )
        session_id = None if wanted is None else str(wanted)
        subscription = part.consume_session(session_id, settled=_settles(link))
        if subscription is not None:
            self.accept_session(link, node, part, subscription)
            return
        if link.session.ended:
            # Its end would not be noticed any more: the attach would wait for its full time.
            return
        waiting = _SessionAttach(self, node, part, link)
        if not self._services.start(waiting.run):
            waiting.refuse(Error(TIMEOUT, "the broker stops"))

    def accept_session(
        self, link: SendingLink, node: AnyNode, part: Entity, subscription: Subscription
    ) -> None:
        """Attach *link* with the session that *subscription* has locked."""
        session = part.session_of(subscription)
        assert session is not None, "it has just been locked"
        self._accept_receiver(
            link,
            node,
            subscription,
            source=_source_with(link, session),
            properties={LOCKED_UNTIL: int(session.until * _TICKS) + _TICKS_AT_1970},
        )

    def _accept_receiver(
        self, link: SendingLink, node: AnyNode, subscription: Subscription, **answer: Any
    ) -> None:
        """Attach *link*, and count it as long as it receives."""
        counted = _counted_at(node)
        counted.receivers += 1

        def leave() -> None:
            counted.receivers -= 1

        subscription.on_end.append(leave)
        subscription.transactions = self._services.transactions
        link.accept(subscription, **answer)

    # --- Other questions of the container ---

    def relay(self, address: str, link: ReceivingLink) -> Inlet | Error | None:
        """Return the endpoint for messages to *address* on a link with an anonymous terminus."""
        place = place_of(address)
        node = self._names.node(place.path)
        if node is None or place.management or place.sub_queue:
            return None
        if isinstance(node, SubscriptionNode):
            return Error(NOT_ALLOWED, f"{node.path!r} takes no messages of clients")
        # The relay grants the credit of its link, which is for many addresses.
        return Inlet(
            node.intake,
            node.entity,
            StoredFactory("lenient", self._services.limits),
            self._services.clock.wall,
            volatile=True,
            check=node.entity.check,
            transactions=self._services.transactions,
        )


def part_of(node: AnyNode, place: Place) -> Entity | None:
    """Return the entity or sub-queue at *place*, None if there is no such sub-queue."""
    if not place.sub_queue:
        return node.entity
    if isinstance(node, TopicNode):
        return None
    return node.entity.dead_letters if place.sub_queue == DEAD_LETTERS else node.entity.transfers


def _counted_at(node: AnyNode) -> AnyNode:
    """Return the node at which the receivers of *node* are counted."""
    return node.topic if isinstance(node, SubscriptionNode) else node


def _settles(link: SendingLink) -> bool:
    return link.snd_settle_mode == SND_SETTLED


def _session_wanted(link: SendingLink) -> object:
    """Return the session that *link* asks for, None for any, :data:`_NO_FILTER` for none."""
    source = link.source
    filters = None if source is None else source.filter
    if not filters or SESSION_FILTER not in filters:
        return _NO_FILTER
    wanted = filters[SESSION_FILTER]
    return wanted.value if isinstance(wanted, Described) else wanted


def _source_with(link: SendingLink, session: Session) -> Source:
    """Return the source as the client asked for it, with the id of its session as a plain text."""
    asked = link.source
    assert asked is not None, "it had the filter"
    filters: Mapping[object, object] = {Symbol(SESSION_FILTER): session.id}
    return Source(
        address=asked.address,
        durable=asked.durable,
        expiry_policy=asked.expiry_policy,
        timeout=asked.timeout,
        filter=filters,
        outcomes=asked.outcomes,
        capabilities=asked.capabilities,
    )


def _wait_of(link: SendingLink) -> float:
    """Return the seconds that *link* waits for a session."""
    given = link.properties.get(ATTACH_TIMEOUT)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        return SESSION_WAIT_S
    return min(given / 1000, SESSION_WAIT_MAX_S) if given != inf else SESSION_WAIT_MAX_S
