"""A client of AMQP 0-9-1 for trio (0-9-1 §2.4, API layer), for any broker of this protocol.

::

    async with connect("amqp://127.0.0.1") as connection, connection.channel() as channel:
        await channel.declare_queue("orders", durable=True)
        await channel.publish(b"an order", key="orders")
        async with channel.consume("orders") as deliveries:
            async for delivery in deliveries:
                delivery.ack()

A refusal by the server raises :class:`~amqp_rt.AmqpError` with a condition of AMQP 1.0, as
everywhere in this package, and the server's text. Cancelling a call that waits for an answer does
not undo the request: the channel stays usable, and the answer is dropped.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from amqp_rt import ClientTls
from amqp_rt.addresses import parse_url
from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectFailed,
    DeliveryNotAccepted,
    DeliveryRejected,
)
from amqp_rt.fronts import (
    DEFAULT_LIMITS,
    Closed,
    ConnectionFailed,
    Error,
    Event,
    Limits,
    Opened,
    QueueState,
)
from amqp_rt.fronts.amqp10 import ClientMechanism
from amqp_rt.net.dial import dial
from amqp_rt.net.driver import run_connection

from . import methods as m
from .client_channels import EngineChannel, OnAnswer
from .client_engine import ClientEngine, ClientOptions, Plain
from .faults import CHANNEL_ERROR, RESOURCE_ERROR, Fault, condition_of
from .methods import BasicProperties
from .values import ReceivedMessage

T = TypeVar("T", bound=m.Method)


class Delivery:
    """A message received from the server."""

    def __init__(self, channel: EngineChannel, message: ReceivedMessage) -> None:
        self._channel = channel
        self._tag: int = message.method.delivery_tag
        self.body: bytes = message.body
        self.properties: BasicProperties = message.properties
        self.exchange: str = message.method.exchange
        self.routing_key: str = message.method.routing_key
        #: Whether the message was delivered before, and may have been processed already.
        self.redelivered: bool = message.method.redelivered

    def ack(self, *, multiple: bool = False) -> None:
        """Acknowledge the message; with *multiple*, also all before it on the channel."""
        self._channel.say(m.BasicAck(delivery_tag=self._tag, multiple=multiple))

    def nack(self, *, multiple: bool = False, requeue: bool = True) -> None:
        """Refuse the message: requeue it, or without *requeue* dead-letter it."""
        self._channel.say(m.BasicNack(delivery_tag=self._tag, multiple=multiple, requeue=requeue))


class _Answer:
    """A callback for an answer, and a way to wait for it."""

    def __init__(self) -> None:
        self._came = trio.Event()
        self._answer: m.Method | ReceivedMessage | Fault | None = None
        self._then: OnAnswer | None = None

    def __call__(self, answer: m.Method | ReceivedMessage | Fault) -> None:
        self._answer = answer
        self._came.set()
        if self._then is not None:
            self._then(answer)

    def then(self, on_answer: OnAnswer) -> None:
        """Call *on_answer* with the answer, which has not arrived, since its task was cancelled."""
        self._then = on_answer

    async def wait(self) -> m.Method | ReceivedMessage:
        """Wait for the answer and return it.

        Raises:
            AmqpError: The request failed, or the channel or connection has ended.
        """
        await self._came.wait()
        answer = self._answer
        assert answer is not None
        if isinstance(answer, Fault):
            raise _said(answer)
        return answer


class _Mandatory:
    """A mandatory message, which may be returned."""

    def __init__(self, exchange: str, key: str, body: bytes) -> None:
        self.exchange = exchange
        self.key = key
        self.body = body
        self.returned = False

    def is_same(self, back: m.BasicReturn, body: bytes) -> bool:
        """Whether the returned message is this one, or cannot be distinguished from it."""
        same = (self.exchange, self.key) == (back.exchange, back.routing_key)
        return same and self.body == body


class Consumer:
    """Async iterator over the messages of a queue.

    Iteration ends when the server cancels the consumer, for example because the queue was deleted.
    """

    def __init__(self, tag: str, limits: Limits) -> None:
        self.tag = tag
        self._limits = limits
        #: Messages received before the application asked for them, and their octets.
        self._waiting: deque[Delivery] = deque()
        self._size = 0
        self._ended = False
        self._fault: Fault | None = None
        self._came = trio.Event()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next message.

        Raises:
            AmqpError: The channel or its connection has ended; the error has the cause.
        """
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._fault is not None:
                raise _said(self._fault)
            if self._ended:
                raise StopAsyncIteration
            if self._came.is_set():
                # Keep an event that is not set: another task may be waiting for it.
                self._came = trio.Event()
            await self._came.wait()
        delivery = self._waiting.popleft()
        self._size -= len(delivery.body)
        return delivery

    def _put(self, delivery: Delivery) -> bool:
        """Keep *delivery* until the application asks for it; return False if there is no room."""
        size = self._size + len(delivery.body)
        limits = self._limits
        if self._waiting and (
            len(self._waiting) >= limits.session_window or size > limits.session_window_bytes
        ):
            return False
        self._size = size
        self._waiting.append(delivery)
        self._came.set()
        return True

    def _end(self, fault: Fault | None) -> None:
        self._ended = True
        self._fault = self._fault or fault
        self._came.set()


class ClientChannel:
    """A channel. Use :meth:`ClientConnection.channel` to open one."""

    def __init__(
        self, connection: ClientConnection, half: EngineChannel, *, confirms: bool
    ) -> None:
        self._connection = connection
        self._half = half
        self._confirms = confirms
        self._consumers: dict[str, Consumer] = {}
        self._numbers = 0
        #: Mandatory messages not yet confirmed, in order of publishing.
        self._mandatory: list[_Mandatory] = []
        self._flows = trio.Event()
        self._flows.set()
        half.on_message = self._on_message
        half.on_cancel = self._on_cancel
        half.on_flow = self._on_flow
        half.on_end = self._on_end

    # --- --- callbacks of the engine ---

    def _on_message(self, message: ReceivedMessage) -> None:
        if isinstance(message.method, m.BasicReturn):
            # Its confirm follows: RabbitMQ promises this order, and so do we.
            back = message.method
            for each in self._mandatory:
                if not each.returned and each.is_same(back, message.body):
                    each.returned = True
                    break
            return
        consumer = self._consumers.get(message.method.consumer_tag)
        if consumer is not None and not consumer._put(Delivery(self._half, message)):
            # Acknowledgements would have bounded the messages by the prefetch.
            del self._consumers[consumer.tag]
            self._half.say(m.BasicCancel(consumer_tag=consumer.tag, no_wait=True))
            consumer._end(Fault(RESOURCE_ERROR, "messages come faster than they are taken"))

    def _on_cancel(self, tag: str) -> None:
        consumer = self._consumers.pop(tag, None)
        if consumer is not None:
            consumer._end(None)

    def _on_flow(self) -> None:
        if self._half.flowing:
            self._flows.set()
        elif self._flows.is_set():
            # Keep an event that is not set: publishers that wait for it would miss the set of
            # another.
            self._flows = trio.Event()

    def _on_end(self, fault: Fault | None) -> None:
        self._flows.set()
        self._connection._wake_publishers()
        consumers, self._consumers = self._consumers, {}
        for consumer in consumers.values():
            consumer._end(fault)

    # --- --- methods ---

    async def _ask(self, method: m.Method) -> m.Method | ReceivedMessage:
        return await self._connection._ask(lambda on_answer: self._half.ask(method, on_answer))

    async def _answer(self, method: m.Method, kind: type[T]) -> T:
        answer = await self._ask(method)
        assert isinstance(answer, kind)
        return answer

    async def declare_queue(
        self,
        name: str = "",
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        passive: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> QueueState:
        """Declare a queue; with *passive*, only check that it exists.

        Without a *name* the server chooses one.
        """
        answer = await self._answer(
            m.QueueDeclare(
                queue=name,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                passive=passive,
                arguments=dict(arguments or {}),
            ),
            m.QueueDeclareOk,
        )
        return QueueState(
            name=answer.queue, messages=answer.message_count, consumers=answer.consumer_count
        )

    async def delete_queue(
        self, name: str, *, if_unused: bool = False, if_empty: bool = False
    ) -> int:
        """Delete a queue; return how many messages it had."""
        answer = await self._answer(
            m.QueueDelete(queue=name, if_unused=if_unused, if_empty=if_empty), m.QueueDeleteOk
        )
        return answer.message_count

    async def purge_queue(self, name: str) -> int:
        """Drop the messages ready in a queue; return how many there were."""
        return (await self._answer(m.QueuePurge(queue=name), m.QueuePurgeOk)).message_count

    async def bind_queue(
        self,
        name: str,
        exchange: str,
        key: str = "",
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Bind queue *name* to *exchange*."""
        await self._ask(
            m.QueueBind(
                queue=name, exchange=exchange, routing_key=key, arguments=dict(arguments or {})
            )
        )

    async def unbind_queue(
        self,
        name: str,
        exchange: str,
        key: str = "",
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Remove a binding of queue *name* to *exchange*."""
        await self._ask(
            m.QueueUnbind(
                queue=name, exchange=exchange, routing_key=key, arguments=dict(arguments or {})
            )
        )

    async def declare_exchange(
        self,
        name: str,
        type: str = "direct",  # noqa: A002 - the standard's term
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        passive: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Declare an exchange; with *passive*, only check that it exists."""
        await self._ask(
            m.ExchangeDeclare(
                exchange=name,
                type=type,
                durable=durable,
                auto_delete=auto_delete,
                internal=internal,
                passive=passive,
                arguments=dict(arguments or {}),
            )
        )

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange with its bindings."""
        await self._ask(m.ExchangeDelete(exchange=name, if_unused=if_unused))

    async def bind_exchange(
        self,
        name: str,
        source: str,
        key: str = "",
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Bind exchange *name* to exchange *source*."""
        await self._ask(
            m.ExchangeBind(
                destination=name, source=source, routing_key=key, arguments=dict(arguments or {})
            )
        )

    async def publish(
        self,
        body: bytes,
        *,
        key: str = "",
        exchange: str = "",
        properties: BasicProperties | None = None,
        mandatory: bool = False,
    ) -> None:
        """Publish a message; with confirms, wait until the server has confirmed it.

        If cancelled while waiting, the message may or may not have been published.

        Raises:
            DeliveryRejected: The server answered with a nack.
            DeliveryNotAccepted: It is *mandatory* and unroutable.
            AmqpError: The channel is closed, or a property cannot be encoded.
        """
        await self._wait_for_room()
        method = m.BasicPublish(exchange=exchange, routing_key=key, mandatory=mandatory)
        done = trio.Event()
        awaited = _Mandatory(exchange, key, body)
        taken = False

        def confirmed(acknowledged: bool) -> None:
            nonlocal taken
            taken = acknowledged
            if mandatory:
                self._mandatory.remove(awaited)
            done.set()

        try:
            self._half.publish(method, properties or BasicProperties(), body, confirmed)
        except Fault as fault:
            raise _said(fault) from None
        except ValueError as error:
            raise AmqpError(str(error), condition="amqp:invalid-field") from error
        if not self._confirms:
            await trio.lowlevel.checkpoint()
            return
        if mandatory:
            self._mandatory.append(awaited)
        await done.wait()
        if self._half.ended and not taken:
            closed = Fault(CHANNEL_ERROR, "the channel was closed before the server had it")
            raise _said(self._half.fault or closed)
        if awaited.returned:
            raise DeliveryNotAccepted(
                f"nothing is bound for {key!r:.100}", condition="amqp:not-found"
            )
        if not taken:
            raise DeliveryRejected(
                "the server does not take the message", condition="amqp:resource-limit-exceeded"
            )

    async def _wait_for_room(self) -> None:
        """Wait for the server to accept messages and the output to have room, or for the end."""
        connection = self._connection
        while not (self._half.ended or self._half.closing):
            # Other publishers that waited may have used the room.
            connection._look()
            if not self._flows.is_set():
                await self._flows.wait()
            elif not connection._writable.is_set():
                await connection._writable.wait()
            else:
                return

    async def get(self, queue: str, *, no_ack: bool = False) -> Delivery | None:
        """Get a message of *queue*, None if it is empty.

        If cancelled while waiting, the message is requeued when it arrives; with *no_ack* it is lost.
        """
        answer = _Answer()

        def requeue(found: m.Method | ReceivedMessage | Fault) -> None:
            if isinstance(found, ReceivedMessage) and not no_ack:
                tag = found.method.delivery_tag
                self._half.say(m.BasicReject(delivery_tag=tag, requeue=True))

        self._half.ask(m.BasicGet(queue=queue, no_ack=no_ack), answer)
        try:
            found = await answer.wait()
        except trio.Cancelled:
            answer.then(requeue)
            raise
        return Delivery(self._half, found) if isinstance(found, ReceivedMessage) else None

    async def qos(self, count: int, *, whole_channel: bool = False) -> None:
        """Bound the unacknowledged messages of each new consumer, or of the whole channel."""
        await self._ask(m.BasicQos(prefetch_count=count, global_=whole_channel))

    @asynccontextmanager
    async def consume(
        self,
        queue: str,
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, object] | None = None,
    ) -> AsyncIterator[Consumer]:
        """Consume from *queue* within the block.

        Messages not acknowledged by the end of the block stay so until the channel ends. With
        *no_ack* no message needs an acknowledgement, and nothing bounds what the server sends: a
        consumer that is too slow is cancelled.
        """
        self._numbers += 1
        tag = f"ctag-{self._numbers}"
        consumer = self._consumers[tag] = Consumer(tag, self._connection._engine.limits)
        try:
            await self._ask(
                m.BasicConsume(
                    queue=queue,
                    consumer_tag=tag,
                    no_ack=no_ack,
                    exclusive=exclusive,
                    arguments=dict(arguments or {}),
                )
            )
            yield consumer
        finally:
            if self._consumers.pop(tag, None) is not None:
                self._half.say(m.BasicCancel(consumer_tag=tag, no_wait=True))
            consumer._end(None)

    async def select(self) -> None:
        """Start transactions: publishes and acknowledgements take effect with their commit."""
        await self._ask(m.TxSelect())

    async def commit(self) -> None:
        """Commit the publishes and acknowledgements since the last commit or rollback."""
        await self._ask(m.TxCommit())

    async def rollback(self) -> None:
        """Roll back the publishes and acknowledgements since the last commit or rollback."""
        await self._ask(m.TxRollback())


class ClientConnection:
    """A connection. Use :func:`connect` to open one."""

    def __init__(self, engine: ClientEngine) -> None:
        self._engine = engine
        self._opened = trio.Event()
        self._over = trio.Event()
        self._error: Error | None = None
        #: Set while there is room for messages.
        self._writable = trio.Event()
        self._writable.set()
        engine.on_room = self._look

    @property
    def server_properties(self) -> Mapping[object, object]:
        """Properties of the server, from ``connection.start``."""
        return self._engine.peer.properties

    @property
    def blocked(self) -> str | None:
        """Reason of the server for blocking publishers, None while it accepts messages.

        Publishing waits meanwhile.
        """
        return self._engine.blocked

    @asynccontextmanager
    async def channel(
        self, *, confirms: bool = True, prefetch: int = 100
    ) -> AsyncIterator[ClientChannel]:
        """Open a channel for the block.

        Args:
            confirms: Whether ``publish`` waits for the server's confirm. Not allowed with
                transactions.
            prefetch: Unacknowledged messages that each consumer may have; 0 for any number.
        """
        opened = _Answer()
        try:
            half = self._engine.open_channel(opened)
        except Fault as fault:
            raise _said(fault) from None
        try:
            await opened.wait()
            if confirms:
                await self._ask(half.confirm)
            channel = ClientChannel(self, half, confirms=confirms)
            if prefetch:
                await channel.qos(prefetch)
            yield channel
        finally:
            half.close()

    async def update_secret(self, secret: str, reason: str = "") -> None:
        """Send a new secret, such as a token, before the old one expires.

        Raises:
            AmqpError: The server does not accept it.
        """
        await self._ask(
            lambda on_answer: self._engine.update_secret(secret.encode(), reason, on_answer)
        )

    # --- --- used by the channels and the driver ---

    async def _ask(self, ask: Callable[[OnAnswer], None]) -> m.Method | ReceivedMessage:
        answer = _Answer()
        ask(answer)
        return await answer.wait()

    def _wake_publishers(self) -> None:
        """Make publishers that wait for room check again, for example after the channel's end."""
        self._writable.set()
        self._look()

    def _look(self) -> None:
        """Set or replace ``_writable`` according to the room for messages."""
        engine = self._engine
        blocked = engine.blocked is not None or engine.output_size >= engine.limits.output_max
        if not blocked or engine.finished:
            self._writable.set()
        elif self._writable.is_set():
            self._writable = trio.Event()

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Closed | ConnectionFailed):
                self._error = event.error
                self._over.set()
            if isinstance(event, Opened | Closed | ConnectionFailed):
                self._opened.set()
        self._look()

    async def _close(self) -> None:
        self._engine.close()
        await self._over.wait()


@asynccontextmanager
async def connect(
    url: str,
    *,
    tls: ClientTls | ssl.SSLContext | None = None,
    name: str = "",
    mechanisms: tuple[ClientMechanism, ...] | None = None,
    heartbeat_s: int = 60,
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[ClientConnection]:
    """Connect to *url*, ``amqp://USER:PASSWORD@HOST/VHOST`` or ``amqps://...``, for the block.

    The default user is ``guest``, the default virtual host ``/``, as in all clients of 0-9-1. A
    channel that a fault closes leaves the connection and its other channels open.

    Args:
        url: Address of the server.
        tls: TLS settings for ``amqps``; by default the certificate authorities of the system are
            trusted.
        name: Name under which brokers list the connection.
        mechanisms: SASL mechanisms in order of preference; by default PLAIN with the user and
            password of the URL. ``External()`` uses the certificate of *tls*.
        heartbeat_s: Longest time between heartbeats in seconds, 0 for none. The connection fails
            after two of them without any octets from the server.
        limits: Bounds on resources that the server may use.

    Raises:
        ConnectFailed: The server cannot be reached, or does not speak 0-9-1.
        AuthenticationFailed: The server refuses the login.
    """
    where = parse_url(url)
    if where.scheme in ("ws", "wss", "memory"):
        raise ConnectFailed(
            f"cannot connect to {where}: AMQP 0-9-1 has no {where.scheme}; use amqp or amqps",
            condition="amqp:not-implemented",
        )
    with trio.move_on_after(limits.handshake_s) as scope:
        dialled = await dial(where, tls=tls, limits=limits)
    if scope.cancelled_caught:
        raise ConnectFailed(f"cannot connect to {where}: no answer within {limits.handshake_s} s")
    engine = ClientEngine(
        ClientOptions(
            mechanisms=mechanisms or (Plain(where.user or "guest", where.password or "guest"),),
            virtual_host=where.virtual_host or "/",
            properties={"connection_name": name} if name else {},
            limits=limits,
            heartbeat_s=heartbeat_s,
            address=str(where),
        ),
        trio.current_time(),
    )
    connection = ClientConnection(engine)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_connection, dialled.stream, engine, connection._hear)
        try:
            await connection._opened.wait()
            if connection._over.is_set():
                raise _not_connected(str(where), connection._error)
            yield connection
            with trio.move_on_after(limits.close_grace_s):
                await connection._close()
        except Exception as error:
            # Raised below, outside of the nursery, which would wrap it in an exception group.
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _not_connected(where: str, error: Error | None) -> ConnectFailed:
    said = "the connection was closed" if error is None else error.description or error.condition
    kind = ConnectFailed
    if error is not None and error.condition == AuthenticationFailed.default_condition:
        kind = AuthenticationFailed
    return kind(f"cannot connect to {where}: {said}")


def _said(fault: Fault) -> AmqpError:
    """Convert a fault to the exception for callers."""
    return AmqpError(fault.text, condition=condition_of(fault.code))


__all__ = ["ClientChannel", "ClientConnection", "Consumer", "Delivery", "connect"]
