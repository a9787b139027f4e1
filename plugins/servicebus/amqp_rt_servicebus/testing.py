"""A namespace of Service Bus on a real loopback port, beside the test.

The namespace has its own thread and event loop, so that all kinds of tests can use it, with any client in the same
process or another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, cast, overload
from urllib.parse import urlsplit

import trio
from msgspec.structs import replace

from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import Error
from amqp_rt.security.tokens import Validator
from amqp_rt.testing import LoopbackBroker

from .addresses import WEBSOCKET_PATH
from .atom import EntityPath
from .bounds import Bounds
from .certificates import OwnCertificate, can_make
from .configuration import read_configuration
from .declarations import Declaration, Hub, Queue, Rule, SasKey, Subscription, Topic
from .entity import Entity
from .faults import OCCASIONS, Fault
from .hub_handles import HubHandle, message_of
from .messages import DESCRIPTION, REASON, application_properties, arrived, encoded
from .namespace import FRAME_SIZE_MAX, Namespace
from .nodes import AnyNode
from .operations import OPERATIONS
from .options import Sizes
from .quotas import SERVICE_LIMITS
from .requests import Requests
from .steps import at_once
from .stored import State, Stored

__all__ = ["EntityHandle", "HeldMessage", "ServiceBus"]

T = TypeVar("T")

#: Seconds between two checks of an entity that a test waits for, and the default of the seconds that it waits.
_LOOK_S: Final = 0.002
PATIENCE_S: Final = 5.0


class HeldMessage:
    """A message that an entity holds, as tests see it.

    Attributes:
        message: The message, with the annotations of the service.
        sequence_number: Its number.
        delivery_count: Deliveries that have failed.
        locked: Whether a receiver has it.
        state: ``active``, ``deferred`` or ``scheduled``.
        reason: Why it is a dead letter, None if it is none or there is no reason.
        description: Description of that reason.
        source: Path of the entity that dead-lettered it, empty if none did.
    """

    def __init__(self, stored: Stored) -> None:
        self.message = Message.decode(encoded(stored))
        self.sequence_number = stored.number
        self.delivery_count = stored.delivery_count
        self.locked = stored.token is not None
        self.state = stored.state.name.lower()
        properties = application_properties(stored)
        self.reason: str | None = properties.get(REASON)
        self.description: str | None = properties.get(DESCRIPTION)
        self.source = stored.dead_letter_source

    @property
    def body(self) -> Any:
        """Body of the message."""
        return self.message.body

    @property
    def application_properties(self) -> Mapping[str, Any]:
        """Application properties of the message."""
        return self.message.application_properties

    def __repr__(self) -> str:
        return f"<HeldMessage {self.sequence_number}: {self.body!r:.80}, {self.state}>"


class EntityHandle:
    """A queue, topic or subscription of the namespace, for tests: plain calls, from any thread."""

    def __init__(self, owner: ServiceBus, *path: str) -> None:
        self._owner = owner
        self.path = path

    def _node(self) -> AnyNode:
        return self._owner.namespace.existing(self.path)

    @property
    def stats(self) -> Sizes:
        """Numbers of messages by state, and their bytes.

        Raises:
            EntityNotFound: The entity does not exist.
        """

        def sizes() -> Sizes:
            return self._node().entity.sizes()

        return self._owner.call(sizes)

    @property
    def messages(self) -> list[HeldMessage]:
        """Active messages, locked ones included, in the order of their numbers."""
        return self._held(lambda node: node.entity, State.ACTIVE)

    @property
    def deferred(self) -> list[HeldMessage]:
        """Deferred messages."""
        return self._held(lambda node: node.entity, State.DEFERRED)

    @property
    def scheduled(self) -> list[HeldMessage]:
        """Messages that are not due yet."""
        return self._held(lambda node: node.entity, State.SCHEDULED)

    @property
    def dead_letters(self) -> list[HeldMessage]:
        """Messages of the dead-letter queue."""
        return self._held(lambda node: node.entity.dead_letters)

    @property
    def transfer_dead_letters(self) -> list[HeldMessage]:
        """Messages that could not be forwarded."""
        return self._held(lambda node: node.entity.transfers)

    def _held(
        self, part_of: Callable[[AnyNode], Entity | None], state: State | None = None
    ) -> list[HeldMessage]:
        def collect() -> list[HeldMessage]:
            part = part_of(self._node())
            if part is None:
                return []
            found = [part.shelf.find(number) for number in part.shelf.numbers]
            return [
                HeldMessage(each)
                for each in found
                if each is not None and (state is None or each.state == state)
            ]

        return self._owner.call(collect)

    def send(self, body: object = None, **fields: Any) -> int:
        """Put a message into the entity, as if a client had sent it; return its sequence number.

        Args:
            body: The body, or a whole :class:`~amqp_rt.Message`. A text is sent in UTF-8 as the SDKs send it,
                in a data section; a message with a text has it as an ``amqp-value``.
            fields: Other arguments of :class:`~amqp_rt.Message`, such as ``subject`` and ``group_id``.

        Raises:
            AmqpError: The entity refuses the message.
        """
        message = message_of(body, fields)

        def put() -> int:
            node = self._node()
            stored = arrived(bytes(message.encode()))
            # The requests of clients check what is sent, and remember the id for duplicates.
            return at_once(Requests(node.entity).schedule([stored]))[0]

        return self._owner.call(put)

    def purge(
        self, part: Literal["messages", "dead_letters", "transfer_dead_letters"] = "messages"
    ) -> int:
        """Remove all messages that are not locked, or those of a sub-queue; return how many there were.

        Raises:
            ValueError: *part* is out of its range.
        """

        def purge() -> int:
            entity = self._node().entity
            parts = {
                "messages": entity,
                "dead_letters": entity.dead_letters,
                "transfer_dead_letters": entity.transfers,
            }
            if part not in parts:
                raise ValueError(f"part is {part!r:.80}, not one of {', '.join(parts)}")
            found = parts[part]
            return 0 if found is None else found.purge()

        return self._owner.call(purge)

    def expire_locks(self) -> int:
        """End all locks now, as if their time were over; return how many messages were locked."""

        def expire() -> int:
            return sum(part.expire_locks() for part in self._node().entity.parts)

        return self._owner.call(expire)

    def wait_until(
        self, condition: Callable[[Sizes], bool], *, timeout_s: float = PATIENCE_S
    ) -> Sizes:
        """Wait until *condition* is true of the numbers of messages; return those.

        Raises:
            AssertionError: It was not within *timeout_s* seconds of real time.
        """
        __tracebackhide__ = True

        async def wait() -> Sizes:
            with trio.move_on_after(timeout_s):
                while True:
                    sizes = self._node().entity.sizes()
                    if condition(sizes):
                        return sizes
                    await trio.sleep(_LOOK_S)
            raise AssertionError(
                f"{'/'.join(self.path)!r} did not become as wanted within {timeout_s:g} s:"
                f" {self._node().entity.sizes()!r}"
            )

        return self._owner.broker.call(wait)

    def __repr__(self) -> str:
        return f"<EntityHandle {'/'.join(self.path)!r}>"


class ServiceBus:
    """A namespace at a free port of 127.0.0.1, which runs within a ``with`` block.

    ::

        with ServiceBus(Queue("orders", lock_duration=30)) as servicebus:
            client = ServiceBusClient.from_connection_string(servicebus.connection_string)

    Calls are allowed in any thread.

    Args:
        declarations: Entities that exist from the start.
        config: Configuration file with more of them; see :mod:`.configuration`.
        keys: Shared access policies of the namespace.
        validators: Validators of web tokens.
        realistic: Whether the limits of the service apply.
        frame_size_max: Largest frame, in octets; 262,144 as of namespaces that are not premium.
        one_session: Whether a connection has one session only, as Microsoft's guide to AMQP says. The SDKs begin several.
        bounds: Bounds of the namespace.
        options: Options of :class:`~amqp_rt.Broker`, such as ``tls``.
    """

    def __init__(
        self,
        *declarations: Declaration,
        config: str | Path | None = None,
        keys: Mapping[str, SasKey] | None = None,
        validators: Iterable[Validator] = (),
        realistic: bool = False,
        frame_size_max: int = FRAME_SIZE_MAX,
        one_session: bool = False,
        bounds: Bounds | None = None,
        **options: Any,
    ) -> None:
        if config is not None:
            found = read_configuration(config)
            declarations = (*found.declarations, *declarations)
            keys = keys or found.keys or None
        self.namespace = Namespace(
            *declarations,
            keys=keys,
            validators=validators,
            realistic=realistic,
            frame_size_max=frame_size_max,
            one_session=one_session,
            bounds=bounds,
        )
        self._certificate: OwnCertificate | None = None
        if "tls" not in options and can_make():
            options["tls"] = self._certificate = OwnCertificate()
        if realistic and "limits" not in options:
            options["limits"] = Limits(**SERVICE_LIMITS)
        # The synchronous SDK for Python sends the origin that a page would; tokens are what protects the namespace.
        options.setdefault("origins", ("*",))
        self._websocket_port: int | None = None
        addons = [self.namespace, *options.pop("addons", ())]
        #: The broker with the namespace.
        self.broker = LoopbackBroker(addons=addons, **options)

    def __enter__(self) -> Self:
        self.broker.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.broker.__exit__(kind, error, traceback)

    # --- Clients ---

    @property
    def port(self) -> int:
        """Port for AMQP and for the administration."""
        return self.broker.port

    @property
    def connection_string(self) -> str:
        """Connection string of the namespace, with the right to do everything.

        Clients for messages connect in clear, those of the administration with TLS.
        """
        return self.connection_string_for()

    def connection_string_for(
        self,
        policy: str | None = None,
        entity: str = "",
        *,
        over: Literal["amqp", "amqps", "wss"] = "amqp",
    ) -> str:
        """Return a connection string with the key of a shared access policy.

        Args:
            policy: Name of the policy; by default the first one of the namespace.
            entity: Entity that the string is for.
            over: ``amqps`` for AMQP with TLS, ``wss`` for the port of :attr:`websocket_url`.

        Raises:
            ValueError: There is no such policy or transport.
        """
        urls = {
            "amqp": lambda: self.broker.url,
            # Certificates are issued to names, and clients check them.
            "amqps": lambda: f"amqps://localhost:{self.port}",
            "wss": lambda: self.websocket_url,
        }
        if over not in urls:
            raise ValueError(f"over is {over!r:.80}, not one of {', '.join(urls)}")
        url = urls[over]()
        return self.call(lambda: self.namespace.connection_string(url, policy, entity))

    @property
    def ca_file(self) -> str:
        """PEM file of the authority of the certificate, which clients have to trust.

        ``connection_verify`` of the SDK for Python, ``NODE_EXTRA_CA_CERTS`` for JavaScript.

        Raises:
            RuntimeError: The certificate is one of the test, or none can be made.
        """
        if self._certificate is None:
            raise RuntimeError(
                "the fixture has no certificate of its own: install amqp-rt-servicebus[tls], and leave tls out"
            )
        return self._certificate.ca_file

    @property
    def admin_options(self) -> dict[str, Any]:
        """Options of ``ServiceBusAdministrationClient.from_connection_string`` of the SDK for Python.

        Raises:
            RuntimeError: As for :attr:`ca_file`.
        """
        return {"connection_verify": self.ca_file}

    @property
    def websocket_url(self) -> str:
        """URL at which WebSockets with TLS are accepted, from the first time on that it is asked for.

        For Python it is the ``custom_endpoint_address``; JavaScript takes the port from the connection string
        (``connection_string_for(over="wss")``).
        """
        if self._websocket_port is None:
            (url,) = self.broker.call(
                self.broker.broker.listen, f"wss://127.0.0.1:0{WEBSOCKET_PATH}"
            )
            self._websocket_port = urlsplit(url).port
        return f"wss://localhost:{self._websocket_port}"

    # --- Entities ---

    @overload
    def declare(self, first: Hub, *more: Declaration) -> HubHandle: ...

    @overload
    def declare(self, first: Queue | Topic, *more: Declaration) -> EntityHandle: ...

    def declare(self, first: Declaration, *more: Declaration) -> EntityHandle | HubHandle:
        """Create entities; return a handle of the first. Equal declarations change nothing.

        A hub that exists gets the consumer groups and keys of its new declaration.

        Raises:
            EntityExists: Another entity has the name.
            ValueError: An entity cannot be as declared.
        """
        self.call(lambda: self.namespace.declare_all(first, *more))
        if isinstance(first, Hub):
            return self.hub(first.name)
        return EntityHandle(self, first.name)

    def declare_subscription(self, topic: str, declared: Subscription) -> EntityHandle:
        """Create a subscription of a topic that exists; return its handle."""
        self.call(lambda: self.namespace.declare((topic, declared.name), declared))
        return EntityHandle(self, topic, declared.name)

    def declare_rule(self, topic: str, subscription: str, rule: Rule) -> None:
        """Create a rule of a subscription that exists."""
        self.call(lambda: self.namespace.declare((topic, subscription, rule.name), rule))

    def update(self, *path: str, **options: Any) -> None:
        """Change options of a queue, topic or subscription, such as ``status="Disabled"``."""

        def change() -> None:
            node = self.namespace.existing(path)
            declared = replace(node.declared, **options)
            self.namespace.update(cast("EntityPath", path), declared)

        self.call(change)

    def delete(self, *path: str) -> None:
        """Delete a queue or topic, a subscription or a rule, named by its path."""
        self.call(lambda: self.namespace.delete(cast("EntityPath", path)))

    def delete_hub(self, name: str) -> None:
        """Delete the event hub *name* with its events, and detach its links."""
        self.call(lambda: self.namespace.delete_hub(name))

    def hub(self, name: str) -> HubHandle:
        """Return a handle of the event hub *name*, which need not exist yet."""
        return HubHandle(self.broker, self.namespace.hubs, name)

    def queue(self, name: str) -> EntityHandle:
        """Return a handle of the queue *name*, which need not exist yet."""
        return EntityHandle(self, name)

    def topic(self, name: str) -> EntityHandle:
        """Return a handle of the topic *name*, which need not exist yet."""
        return EntityHandle(self, name)

    def subscription(self, topic: str, name: str) -> EntityHandle:
        """Return a handle of a subscription, which need not exist yet."""
        return EntityHandle(self, topic, name)

    # --- Time and faults ---

    def advance(self, seconds: float) -> None:
        """Advance the clock of messages, and complete what becomes due before returning.

        Locks, times to live, schedules, duplicates and idle times follow it; tokens and clients do not.
        """
        self.broker.advance(seconds)
        self.call(lambda: None)

    @property
    def now(self) -> datetime:
        """The present time of messages."""
        return datetime.fromtimestamp(self.broker.clock.wall(), UTC)

    def fault(
        self,
        condition: str,
        *,
        on: str = "send",
        times: int = 1,
        entity: str | None = None,
        description: str = "a fault that the test wants",
    ) -> None:
        """Let something fail in the next *times* cases, with the error *condition*.

        ``attach``: a link is refused. ``send``: a message, a batch or scheduled messages are rejected. ``receive``: the link
        of a receiver is detached instead of being sent a message, which stays. ``settle``: an outcome is
        answered with the error, and the message stays locked. ``read``: a request for the properties of an event hub or its
        partitions is answered with the error. The name of an operation at ``$management``, such as
        ``peek-message``: it is answered with the error.

        Args:
            condition: Error condition, such as ``com.microsoft:server-busy``.
            on: What fails.
            times: How often.
            entity: Path of the queue, topic, event hub, subscription (``TOPIC/Subscriptions/NAME``) or sub-queue; any by default.
            description: Description of the error.

        Raises:
            ValueError: *on* or *times* is out of its range.
        """
        if on not in OCCASIONS:
            operation = on if on in OPERATIONS else f"com.microsoft:{on}"
            if operation not in OPERATIONS:
                known = (*OCCASIONS, *(each.partition(":")[2] for each in OPERATIONS))
                raise ValueError(f"on is {on!r:.80}, not one of {', '.join(known)}")
            on = operation
        if entity is not None:
            self.call(lambda: self.namespace.check_name(entity))
        fault = Fault(
            error=Error(condition, description),
            on=on,
            path=None if entity is None else entity.lower(),
            times=times,
        )
        self.call(lambda: self.namespace.faults.add(fault))

    def disconnect(self) -> int:
        """Close all connections of clients; return how many there were."""
        return self.broker.disconnect()

    def expire_locks(self) -> int:
        """End all locks of all entities now; return how many messages were locked."""

        def expire() -> int:
            return sum(
                part.expire_locks() for node in self.namespace.walk() for part in node.entity.parts
            )

        return self.call(expire)

    def call(self, function: Callable[[], T]) -> T:
        """Call *function* in the thread of the namespace, and return its result.

        What earlier calls have begun and was too much for one turn of the event loop is finished first.
        """

        async def run() -> T:
            turns = self.broker.broker.host.turns
            while turns.unfinished:
                await trio.lowlevel.checkpoint()
            return function()

        return self.broker.call(run)

    def __repr__(self) -> str:
        return f"<ServiceBus {self.broker!r}>"
