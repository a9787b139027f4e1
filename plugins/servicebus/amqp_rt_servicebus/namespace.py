"""Namespace of Service Bus: an add-on that makes a broker answer Microsoft's SDKs.

::

    namespace = Namespace(Queue("orders"), Topic("prices", [Subscription("eu")]))
    async with Broker(addons=[namespace]) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        print(namespace.connection_string(url))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast
from urllib.parse import urlsplit

from amqp_rt import Broker, Profile, Rights
from amqp_rt.broker.building import Transactions
from amqp_rt.clock import Clock
from amqp_rt.fronts import SENDER, Error, Host, Peer, ReceivingLink, SendingLink
from amqp_rt.limits import Limits
from amqp_rt.security.tokens import Validator

from .addresses import address_of, place_of
from .admin_front import AdminFront
from .administration import (
    Administration,
    EntityExists,
    EntityNotFound,
    QuotaExceeded,
    Response,
)
from .atom import Declared, Described, EntityPath, NamespaceFacts
from .bounds import DEFAULT_BOUNDS, SERVICE_BOUNDS, Bounds
from .declarations import (
    Declaration,
    Hub,
    Queue,
    Rule,
    SasKey,
    Subscription,
    Topic,
    check_policies,
)
from .faults import Faults
from .host import NamespaceHost
from .hub_operations import HubOperations
from .hubs import HubHost
from .message_quotas import check_message
from .nodes import AnyNode, QueueNode, Services, SubscriptionNode, TopicNode
from .operations import Operations
from .policy_logins import PolicyLogin
from .quotas import QUOTAS, UNLIMITED, Quotas
from .router import Router
from .rules import (
    RuleExists,
    RuleNotFound,
    TooManyRules,
)
from .tokens import DEFAULT_KEY, DEFAULT_POLICY, Policies, TokenAuthorizer, cbs_of

__all__ = ["Namespace", "Namespaces"]

#: Largest frame that listeners of a namespace accept unless told otherwise, in octets.
FRAME_SIZE_MAX: Final = 1024 * 1024


class Namespace:
    """Queues, topics and event hubs of one namespace, and an add-on of a broker (``Broker(addons=[namespace])``).

    Methods other than the constructor are called in the event loop of the broker.

    Args:
        declarations: Entities that exist from the start.
        keys: Shared access policies of the namespace by name; by default one, ``RootManageSharedAccessKey``
            with the key ``SAS_KEY_VALUE``, as the emulator has it.
        validators: Validators of web tokens, such as :class:`amqp_rt.Jwt`.
        realistic: Whether the limits of the service apply; otherwise only those of the broker do.
        name: Name of the namespace, as the administration shows it.
        frame_size_max: Largest frame that its listeners accept, in octets. 1 MiB is that of premium
            namespaces; others have 262,144.
        one_session: Whether a connection has one session only, as Microsoft's guide to AMQP says. The SDKs begin several.
        bounds: What clients may make the namespace hold and do; by default those of the service if it is
            realistic.

    Raises:
        ValueError: A declaration cannot be, or two have the same name.
    """

    def __init__(
        self,
        *declarations: Declaration,
        keys: Mapping[str, SasKey] | None = None,
        validators: Iterable[Validator] = (),
        realistic: bool = False,
        name: str = "tests",
        frame_size_max: int = FRAME_SIZE_MAX,
        one_session: bool = False,
        bounds: Bounds | None = None,
    ) -> None:
        self.name = name
        self._frame_size_max = frame_size_max
        self._channel_max = 0 if one_session else None
        self.bounds = bounds or (SERVICE_BOUNDS if realistic else DEFAULT_BOUNDS)
        self.keys = dict(keys) if keys is not None else {DEFAULT_POLICY: SasKey(DEFAULT_KEY)}
        check_policies(self.keys)
        self.quotas: Quotas = QUOTAS if realistic else UNLIMITED
        self.quotas.check_keys(f"namespace {name!r:.80}", self.keys)
        self._validators = tuple(validators)
        self._declared = declarations
        self._nodes: dict[str, QueueNode | TopicNode] = {}
        self._services: Services | None = None
        self._router = Router(self._find)
        #: Errors that a test wants in place of what entities would do.
        self.faults = Faults()
        #: The event hubs.
        self.hubs = HubHost(self.faults, realistic=realistic)
        self._profile: Profile | None = None
        self.administration = Administration(
            self, TokenAuthorizer(self._policies_at, self._validators)
        )
        self._created_at = self._modified_at = 0.0
        #: Names that are about to be declared: entities may forward to those declared after them.
        self._expected: set[str] = set()

    # --- Installing ---

    def install(self, broker: Broker) -> None:
        """Add the entities to *broker*, and let all its listeners speak as the service does.

        Raises:
            ValueError: A declaration cannot be, the namespace is in a broker already, or this one has no
                management.
        """
        for host in self._create(broker):
            broker.container.add_host(host, first=True)
        self._profile = self._dialect()
        broker.container.set_profile(self._profile)
        _answer_requests(broker, lambda peer: self)

    def install_beside(self, broker: Broker) -> None:
        """Add the entities to *broker* for those listeners that have the :attr:`profile` of this namespace.

        Raises:
            ValueError: As for :meth:`install`.
        """
        self._profile = self._dialect(*self._create(broker, prefix=f"{self.name}/"))

    def _dialect(self, *hosts: Host) -> Profile:
        return Profile(
            name=f"namespace {self.name}",
            properties={"product": "Microsoft.ServiceBus", "version": "amqp_rt"},
            address=address_of,
            echo_addresses=True,
            whole_errors=True,
            whole_frames=True,
            settle_second=False,
            cbs=cbs_of(self._policies_at, self._validators),
            sasl=[
                *("ANONYMOUS", "MSSBCBS", "AMQPCBS", "OAUTHBEARER", "XOAUTH2"),
                PolicyLogin(lambda: self.keys),
            ],
            frame_size_max=self._frame_size_max,
            channel_max=self._channel_max,
            connections_max=self.quotas.connections,
            annotations="lenient",
            hosts=hosts,
        )

    def _create(self, broker: Broker, *, prefix: str = "") -> list[Host]:
        """Create the entities; return their hosts, in the order in which these are asked for an address.

        *prefix* begins the names of nodes of the broker that the namespace needs, so that those of other namespaces have
        other names.
        """
        if self._services is not None:
            raise ValueError("a namespace is installed in one broker, and this one has one")
        if broker.management is None:
            raise ValueError("a namespace needs management nodes: leave out management=False")
        host = broker.host
        self._services = Services(
            host.memory,
            host.clock,
            limits=host.limits,
            faults=self.faults,
            message_bytes_max=self.quotas.message_bytes,
            quota=partial(check_message, limits=host.limits) if self.quotas is QUOTAS else None,
            set_alarm=host.set_alarm,
            resume_later=host.turns.resume_later,
            bounds=self.bounds,
        )
        self._router = Router(self._find, host.limits, copies_max=self.bounds.copies_max)
        self._created_at = self._modified_at = host.clock.wall()
        declared, self._declared = self._declared, ()
        self.declare_all(*declared)
        self.hubs.bind(broker, prefix=prefix)
        return [
            self.hubs,
            NamespaceHost(
                self,
                _BrokerServices(broker),
                batch_bytes_max=self.quotas.message_bytes,
                receivers_max=self.quotas.receivers,
            ),
        ]

    @property
    def profile(self) -> Profile:
        """Dialect of the listeners of this namespace, for ``broker.listen(url, profile=namespace.profile)``.

        Needed only if a broker has several namespaces (:class:`Namespaces`).

        Raises:
            RuntimeError: The namespace is in no broker yet.
        """
        if self._profile is None:
            raise RuntimeError("the namespace is in no broker yet: pass it in Broker(addons=[…])")
        return self._profile

    def connection_string(self, url: str, policy: str | None = None, entity: str = "") -> str:
        """Return the connection string of the namespace for clients of the listener at *url*.

        Unless the listener is one for TLS, clients connect in clear (``UseDevelopmentEmulator``).

        Args:
            url: As ``broker.listen`` has returned it.
            policy: Name of the shared access policy; by default the first one of the namespace.
            entity: Entity that the string is for, which may have policies of its own.

        Raises:
            ValueError: There is no such policy.
        """
        known = dict(self.keys)
        for _, keys in self._policies_at(entity.lower()):
            known.update(keys)
        name = next(iter(known), "") if policy is None else policy
        if name not in known:
            raise ValueError(f"there is no policy {name!r}; there are {', '.join(known) or 'none'}")
        where = urlsplit(url)
        host = where.hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        port = f":{where.port}" if where.port is not None else ""
        parts = [
            f"Endpoint=sb://{host}{port}",
            f"SharedAccessKeyName={name}",
            f"SharedAccessKey={known[name].key}",
        ]
        if where.scheme not in ("amqps", "wss"):
            parts.append("UseDevelopmentEmulator=true")
        if entity:
            parts.append(f"EntityPath={entity}")
        return ";".join(parts) + ";"

    # --- Finding ---

    def _find(self, name: str) -> QueueNode | TopicNode | None:
        return self._nodes.get(name.lower())

    def node(self, path: Sequence[str]) -> AnyNode | None:
        """Return the queue, topic or subscription at *path*, in any case; None if there is none."""
        found = self._nodes.get(path[0].lower())
        if len(path) == 1:
            return found
        if not isinstance(found, TopicNode):
            return None
        return found.subscriptions.get(path[1].lower())

    def walk(self) -> Iterator[AnyNode]:
        """Yield all queues, topics and subscriptions."""
        for node in list(self._nodes.values()):
            yield node
            if isinstance(node, TopicNode):
                yield from node.walk()

    def existing(self, path: Sequence[str]) -> AnyNode:
        """Return the queue, topic or subscription at *path*.

        Raises:
            EntityNotFound: There is none.
        """
        found = self.node(path[:2])
        if found is None:
            raise EntityNotFound(
                f"The messaging entity '{'/'.join(path[:2]):.300}' could not be found."
            )
        return found

    def check_name(self, address: str) -> None:
        """Check that *address* is that of an entity or a hub.

        Raises:
            EntityNotFound: It is not.
        """
        place = place_of(address)
        if self.node(place.path) is None and self.hubs.declared(place.name) is None:
            raise EntityNotFound(f"The messaging entity '{address:.300}' could not be found.")

    def _policies_at(self, address: str) -> Iterator[Policies]:
        """Yield the shared access policies that apply at *address*, a path in lower case."""
        yield "", self.keys
        name = address
        while name:
            found = self._nodes.get(name)
            declared = self.hubs.declared(name) if found is None else found.declared
            if declared is not None and declared.keys:
                yield name, declared.keys
            name = name.rpartition("/")[0]

    # --- Changing (administration.Entities) ---

    def declare_all(self, *declarations: Declaration) -> None:
        """Create entities, with the subscriptions of topics; an equal declaration changes nothing.

        Raises:
            EntityExists: Another entity has the name.
            QuotaExceeded: There are too many.
            TypeError: One is no declaration.
            ValueError: An entity cannot be as declared.
        """
        for each in declarations:
            if not isinstance(each, Queue | Topic | Hub):
                raise TypeError(f"{each!r:.80} is no Queue, Topic or Hub")
        self._expected = {each.name.lower() for each in declarations}
        try:
            for each in declarations:
                if isinstance(each, Hub):
                    self.declare_hub(each)
                    continue
                found = self._find(each.name)
                if found is None or found.declared != each:
                    self.declare((each.name,), each)
        finally:
            self._expected = set()

    def declare(self, path: EntityPath, declared: Declared) -> None:
        """Create an entity. A new topic brings its subscriptions, and these their rules.

        Raises:
            EntityExists: The name is taken.
            EntityNotFound: The topic or subscription that it belongs to does not exist.
            QuotaExceeded: There are too many of them.
            ValueError: It cannot be as declared.
        """
        self.quotas.check(declared)
        match declared:
            case Queue() | Topic():
                self._declare_top(declared)
            case Subscription():
                topic = self.existing(path[:1])
                self._declare_subscription(cast("TopicNode", topic), declared)
            case Rule():
                self._declare_rule(path, declared)
        self._touch()

    def declare_hub(self, declared: Hub) -> None:
        """Create an event hub, or change the consumer groups, the retention and the keys of one that exists.

        Raises:
            EntityExists: A queue or topic has the name.
            QuotaExceeded: There are too many entities.
            ValueError: It cannot be as declared, or the hub has another number of partitions.
        """
        self.quotas.check(declared)
        if declared.name not in self.hubs:
            self._check_new(declared.name)
        self.hubs.declare(declared)
        self._touch()

    def _check_new(self, name: str) -> None:
        """Check that there may be a further entity with *name*.

        Raises:
            EntityExists: Another one has it.
            QuotaExceeded: There are too many.
        """
        if name.lower() in self._nodes or name in self.hubs:
            raise EntityExists(
                f"The messaging entity '{name}' already exists: queues, topics and event hubs share their names."
            )
        count = len(self._nodes) + len(self.hubs)
        if count >= self.bounds.entities_max:
            raise QuotaExceeded(f"the namespace has {count} entities already")

    def _declare_top(self, declared: Queue | Topic) -> None:
        key = declared.name.lower()
        self._check_new(declared.name)
        self._check_targets(declared.name, declared)
        services = self._running()
        node: QueueNode | TopicNode
        if isinstance(declared, Queue):
            node = QueueNode(declared, services)
        else:
            node = TopicNode(declared, services)
        self._nodes[key] = node
        self._router.wire(node)
        node.entity.on_idle = lambda: self._delete_idle((declared.name,), node)
        if isinstance(node, TopicNode):
            try:
                for each in declared.subscriptions if isinstance(declared, Topic) else ():
                    self._declare_subscription(node, each)
            except Exception:
                # All or nothing: a subscription of a new topic may have a malformed rule.
                del self._nodes[key]
                node.delete()
                raise

    def _declare_subscription(self, topic: AnyNode, declared: Subscription) -> None:
        if not isinstance(topic, TopicNode):
            raise EntityNotFound(f"{topic.path!r} is no topic")
        key = declared.name.lower()
        if key in topic.subscriptions:
            raise EntityExists(
                f"The messaging entity '{topic.path}/Subscriptions/{declared.name}' already exists."
            )
        if len(topic.subscriptions) >= self.bounds.subscriptions_max:
            raise QuotaExceeded(
                f"topic {topic.path!r} has {len(topic.subscriptions)} subscriptions already"
            )
        self._check_targets(f"{topic.path}/Subscriptions/{declared.name}", declared)
        node = SubscriptionNode(topic, declared, self._running())
        topic.subscriptions[key] = node
        self._router.wire(node)
        node.entity.on_idle = lambda: self._delete_idle((topic.path, declared.name), node)

    def _declare_rule(self, path: EntityPath, rule: Rule) -> None:
        node = self._subscription(path)
        try:
            node.add_rule(rule)
        except RuleExists as error:
            raise EntityExists(str(error)) from None
        except TooManyRules as error:
            raise QuotaExceeded(str(error)) from None

    def _subscription(self, path: Sequence[str]) -> SubscriptionNode:
        node = self.existing(path)
        if not isinstance(node, SubscriptionNode):
            raise EntityNotFound(f"{node.path!r} is no subscription")
        return node

    def _check_targets(self, path: str, declared: Queue | Topic | Subscription) -> None:
        """Check the entities to which *declared* forwards.

        Raises:
            ValueError: One does not exist, or is the entity itself.
        """
        for option in ("forward_to", "forward_dead_lettered_messages_to"):
            target = getattr(declared, option, None)
            if target is None:
                continue
            if target.lower() == path.lower():
                raise ValueError(f"{path!r}: {option} is the entity itself")
            if self._find(target) is None and target.lower() not in self._expected:
                raise ValueError(f"{path!r}: {option} is {target!r:.300}, which does not exist")

    def update(self, path: EntityPath, declared: Declared) -> None:
        """Replace the options of an entity; subscriptions of a topic and rules of a subscription stay.

        Raises:
            EntityNotFound: It does not exist.
            ValueError: It cannot be as declared.
        """
        self.quotas.check(declared)
        if isinstance(declared, Rule):
            node = self._subscription(path)
            try:
                node.rules.replace(declared)
            except RuleNotFound as error:
                raise EntityNotFound(str(error)) from None
            except TooManyRules as error:
                raise QuotaExceeded(str(error)) from None
            return
        found = self.existing(path)
        if type(found.declared) is not type(declared):
            raise ValueError(f"{found.path!r} is no {type(declared).__name__.lower()}")
        self._check_targets(found.path, declared)
        found.update(declared)  # type: ignore[arg-type]
        self._router.wire(found)
        self._touch()

    def delete(self, path: EntityPath) -> None:
        """Delete a queue or topic, a subscription or a rule, and all that belongs to it.

        Raises:
            EntityNotFound: It does not exist.
        """
        if len(path) == 3:
            try:
                self._subscription(path).rules.remove(path[2])
            except RuleNotFound as error:
                raise EntityNotFound(str(error)) from None
            return
        node = self.existing(path)
        if isinstance(node, SubscriptionNode):
            del node.topic.subscriptions[node.declared.name.lower()]
        else:
            del self._nodes[node.declared.name.lower()]
        node.delete()
        self._touch()

    def delete_hub(self, name: str) -> None:
        """Delete an event hub with its events.

        Raises:
            AmqpError: It does not exist.
        """
        self.hubs.delete(name)
        self._touch()

    def _delete_idle(self, path: tuple[str, ...], node: AnyNode) -> None:
        if self.node(path) is node:
            self.delete(cast("EntityPath", path))

    def _touch(self) -> None:
        self._modified_at = self._running().clock.wall()

    def _running(self) -> Services:
        if self._services is None:
            raise RuntimeError("the namespace is in no broker yet: pass it in Broker(addons=[…])")
        return self._services

    # --- Describing (administration.Entities) ---

    def get(self, path: EntityPath) -> Described:
        """Return an entity, with its name as it was declared.

        Raises:
            EntityNotFound: It does not exist.
        """
        if len(path) == 3:
            try:
                return self._subscription(path).describe_rule(path[2])
            except RuleNotFound as error:
                raise EntityNotFound(str(error)) from None
        return self.existing(path).describe()

    def queues(self, skip: int, top: int) -> Sequence[Described]:
        """Return at most *top* queues in the order of their names, without the first *skip*."""
        return self._page(QueueNode, skip, top)

    def topics(self, skip: int, top: int) -> Sequence[Described]:
        """Return topics as :meth:`queues` does."""
        return self._page(TopicNode, skip, top)

    def _page(self, kind: type, skip: int, top: int) -> list[Described]:
        names = sorted(name for name, node in self._nodes.items() if isinstance(node, kind))
        return [self._nodes[name].describe() for name in names[skip : skip + top]]

    def subscriptions(self, topic: str, skip: int, top: int) -> Sequence[Described]:
        """Return subscriptions of a topic as :meth:`queues` does."""
        node = self.existing((topic,))
        if not isinstance(node, TopicNode):
            raise EntityNotFound(f"{topic!r:.300} is no topic")
        return [each.describe() for each in list(node.walk())[skip : skip + top]]

    def rules(self, topic: str, subscription: str, skip: int, top: int) -> Sequence[Described]:
        """Return rules of a subscription as :meth:`queues` does."""
        node = self._subscription((topic, subscription))
        names = sorted(each.declaration.name for each in node.rules)
        return [node.describe_rule(name) for name in names[skip : skip + top]]

    def namespace(self) -> NamespaceFacts:
        """Return the properties of the namespace."""
        return NamespaceFacts(
            name=self.name, created_at=self._created_at, modified_at=self._modified_at
        )


class Namespaces:
    """Several namespaces in one broker, an add-on in their place; each has listeners of its own.

    ::

        first, second = Namespace(Queue("q")), Namespace(Queue("q"), name="second")
        async with Broker(addons=[Namespaces(first, second)]) as broker:
            (url,) = await broker.listen("amqp://127.0.0.1:0", profile=first.profile)
            print(first.connection_string(url))

    Listeners without the profile of a namespace reach the broker's own nodes only.

    Args:
        namespaces: The namespaces.

    Raises:
        ValueError: Two have the same name.
    """

    def __init__(self, *namespaces: Namespace) -> None:
        names = [each.name for each in namespaces]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two namespaces are named {name!r}: pass name= to one of them")
        self._namespaces = namespaces

    def install(self, broker: Broker) -> None:
        """Add the entities of all namespaces to *broker*.

        Raises:
            ValueError: As for :meth:`Namespace.install`.
        """
        for each in self._namespaces:
            each.install_beside(broker)
        by_profile = {each.profile: each for each in self._namespaces}
        _answer_requests(broker, lambda peer: by_profile.get(peer.profile))


def _hubs_of(namespace: Namespace | None) -> HubHost | None:
    return None if namespace is None else namespace.hubs


def _answer_requests(broker: Broker, find: Callable[[Peer], Namespace | None]) -> None:
    """Answer operations and requests of the administration for the namespace that a client reaches."""

    def answer(
        peer: Peer, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Response:
        namespace = find(peer)
        if namespace is None:
            return Response(404, {"content-type": "text/plain"}, b"there is no namespace here\n")
        return namespace.administration.handle(method, target, headers, body)

    assert broker.management is not None, "each namespace has checked that"
    Operations(find, broker.host.limits).install(broker.management)
    HubOperations(lambda peer: _hubs_of(find(peer))).install(broker.management)
    broker.container.add_front(AdminFront(answer))


class _BrokerServices:
    """Services of a broker (``host.HostServices``)."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.clock: Clock = broker.host.clock
        self.limits: Limits = broker.host.limits
        self.transactions: Transactions = broker.host.transactions

    def start(self, task: Callable[..., Any], *arguments: object) -> bool:
        """Run an async function while the broker runs; return False if it stops."""
        return self._broker.container.start_handler(task, *arguments)

    def may_send(self, peer: Peer, address: str) -> Error | None:
        """Return why *peer* may not send to *address*, None if it may."""
        return self._broker.container.permissions.decide(peer, Rights.SEND, address)

    def has_other(self, link: ReceivingLink | SendingLink) -> bool:
        """Return whether the address of *link* is a node of the broker or an address of a handler."""
        sends = link.role == SENDER
        terminus: Any = link.source if sends else link.target
        address: str = terminus.address
        if address in self._broker.host.space(link.peer.virtual_host).nodes:
            return True
        container = self._broker.container
        # A target may also be an address that was created for a link of a client.
        return (
            container.nodes.handler_at(address, sends=sends) is not None
            or address in container.replies.dynamic
        )
