"""Channels that clients open (0-9-1 §1.3 to §1.8, with RabbitMQ's extensions).

A method that has to wait, for example until a link to a queue is authorised, holds up the frames
behind it on its channel and no others.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Container, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec.structs import replace

from amqp_rt.fronts import (
    ACCEPTED,
    Accepted,
    AmqpError,
    AttachRequested,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Error,
    Exchange,
    LocalProtocolError,
    Message,
    Modified,
    Outcome,
    QueueDeclaration,
    Rejected,
    Source,
    Symbol,
    Target,
    Timestamp,
    Topology,
    TransactionalState,
)

from . import faults
from . import methods as m
from .codec import write_header, write_shortstr
from .contents import BASIC, BaseChannel
from .faults import Fault
from .frames import METHOD, OVERHEAD, Frame, delivered_frames
from .links import IncomingDelivery, Link, OutgoingDelivery, Publishing, ReceivingLink, SendingLink
from .messages import (
    Content,
    Invalid,
    from_message,
    front_of,
    joined,
    parts_of,
    place_of,
    to_arguments,
    to_message,
)
from .recent import OCTETS_MAX, Delivered, Published
from .values import ContentHeader, Seconds

if TYPE_CHECKING:
    from .engine import Engine

#: Pseudo-queue of RabbitMQ's direct reply-to: its consumer receives the replies to its requests.
REPLY_TO: Final = "amq.rabbitmq.reply-to"

#: Outcome of a requeue: consumers see the next delivery marked as redelivered.
REQUEUED: Final = Modified(delivery_failed=True)
#: Outcome of a reject or nack without requeue: the message is dead-lettered.
DISCARDED: Final = Rejected()

_PUBLISH_CODE: Final = m.BasicPublish.code.to_bytes(4, "big")
_DELIVER_CODE: Final = m.BasicDeliver.code.to_bytes(4, "big")
_ACK_CODE: Final = m.BasicAck.code.to_bytes(4, "big")
_ACK: Final = Layout(">IQB")
#: Start of the content header of a message: class and weight.
_BASIC_HEADER: Final = b"\0\x3c\0\0"
_EXCLUSIVE: Final = Symbol("exclusive")
_PRIORITY: Final = Symbol("priority")
_OFFSET: Final = Symbol("rabbitmq:stream-offset-spec")
#: Unacknowledged messages of a channel whose client sets no bound: the highest bound that it could
#: set. Each of them stays in its queue meanwhile, which has bounds of its own.
_UNACKED_MAX: Final = 65_535
#: Cost in frames of a method that is neither a publish nor an ack: it declares something, or
#: attaches a link.
_METHOD_WORK: Final = 20
#: Work on one method within one turn, in frames.
_WORK_MAX: Final = 200
#: Queues that a message is handed to between two checks of the work done, and the cost of each in
#: frames.
_QUEUES_OF_A_STEP: Final = 10
_QUEUE_WORK: Final = 5
#: Deliveries that are settled between two checks of the work done, and the cost of each in frames:
#: settling one may send another.
_ANSWERS_OF_A_STEP: Final = 10
_ANSWER_WORK: Final = 5
#: Cost of one step of a purge, in frames.
_PURGE_WORK: Final = 100
#: Links of a channel for ``basic.get``, and as many to publish to nodes without an inlet.
_LINKS_MAX: Final = 256
#: Conditions of rejections that the publisher, or the configuration of the broker, could avoid.
_MENDABLE: Final = frozenset(("amqp:precondition-failed", "amqp:unauthorized-access"))
#: Outcome for a queue that was deleted between two steps of routing a message.
_GONE: Final = Rejected(Error("amqp:not-found", "the queue has been deleted"))
#: Inlet of a queue (None if the link itself carries the messages), the link and the queue's name.
_Way: TypeAlias = tuple[Any, ReceivingLink, str]


class Publication:
    """A published message, until every queue that it went to has returned an outcome.

    Args:
        number: Its sequence number for publisher confirms, 0 if it is not confirmed.
        method: Its ``basic.publish``.
        content: Properties and body to return if it is unroutable; None unless it is mandatory.
        awaited: Number of queues it went to.
    """

    __slots__ = (
        *("awaited", "channel", "content", "failed", "method", "number", "taken", "unroutable"),
    )

    def __init__(
        self,
        channel: Channel,
        number: int,
        method: m.BasicPublish,
        content: tuple[m.BasicProperties, bytes] | None,
        awaited: int,
    ) -> None:
        self.channel = channel
        self.number = number
        self.method = method
        self.content = content
        self.awaited = awaited
        self.failed = False
        self.unroutable = 0
        self.taken = False

    def on_outcome(self, outcome: Any) -> None:
        """Count the outcome of one queue; confirm or return the message after the last one."""
        self.awaited -= 1
        if type(outcome) is TransactionalState:
            outcome = outcome.outcome
        if type(outcome) is Rejected and outcome.error is not None:
            if outcome.error.condition == "amqp:not-found":
                self.unroutable += 1
            else:
                self.failed = True
                if not self.number:
                    self.channel.refused(outcome)
        elif type(outcome) is Accepted:
            self.taken = True
        else:
            self.failed = True
        if not self.awaited:
            # A queue deleted after the message was routed does not count, unless no other queue
            # took it.
            if self.unroutable and not self.taken and self.content is not None:
                self.channel.give_back(self.method, *self.content)
            if self.number:
                self.channel.confirm(self.number, acknowledged=not self.failed)


class Channel(BaseChannel):
    """A channel of a connection that a client opened; a session for the broker.

    Args:
        engine: The connection.
        number: The channel number.
    """

    carriers = (m.BasicPublish,)

    engine: Engine

    def __init__(self, engine: Engine, number: int) -> None:
        super().__init__(number)
        self.engine = engine
        #: Whether the client accepts messages (``channel.flow``).
        self.flowing = True
        #: Deliveries that the client has not settled, by delivery-tag, in order.
        self.unacked: dict[int, OutgoingDelivery] = {}
        self.consumers: dict[str, SendingLink] = {}
        #: Whether frames wait until the method before them is complete; ``backlog`` has the frames,
        #: ``backlog_size`` their octets.
        self.held_up = False
        #: Whether publishing may continue while other frames are held up.
        self._lets_publish = False
        self.backlog: deque[Frame] = deque()
        self.backlog_size = 0
        #: Name of the queue declared last: an empty name in a method refers to it.
        self._queue = ""
        self._prefetch = 0
        self._prefetch_all = 0
        self._prefetch_size = 0
        self._last_tag = 0
        self._links: set[Link] = set()
        self._getters: dict[str, SendingLink] = {}
        self._senders: dict[str, ReceivingLink] = {}
        #: Link shared by all messages to nodes that need no link of their own; None after the end
        #: of the channel.
        self._publishing: Publishing | None = Publishing(self)
        #: Octets of the current ``basic.publish``, and of the properties in its content header.
        self._said = b""
        self._told = b""
        #: Exchange and routing key of the current ``basic.publish`` as encoded annotations.
        self._place: bytes | None = None
        #: Tag of the consumer of direct replies, and the address of these replies.
        self._reply_tag: str | None = None
        self._reply_address = ""
        #: Step to run when the channel resumes, before the backlog.
        self._deferred: Callable[[], None] | None = None
        # Confirms.
        self._confirms = False
        self._last_number = 0
        self._unconfirmed: dict[int, None] = {}
        self._acknowledged: list[int] = []
        # Transactions.
        self._control: ReceivingLink | None = None
        self._txn_id: bytes = b""
        self._enlisted: list[OutgoingDelivery] = []

    # --- frames --------------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame of this channel, or hold it behind a method that is not complete.

        Raises:
            Fault: The frame is not allowed now, or its method failed.
        """
        if self.closing:
            self._on_frame_while_closing(frame)
        elif (self.held_up or self.backlog or self._deferred is not None) and not (
            self._lets_publish and self._publishes(frame)
        ):
            self._hold(frame)
        else:
            self._take(frame)

    @property
    def _waits(self) -> bool:
        """Whether frames have to wait for an answer, or for a method to complete."""
        return self.held_up or self._deferred is not None

    def _publishes(self, frame: Frame) -> bool:
        """Whether *frame* is part of a publish and no frame is held up before it."""
        return (
            not self.backlog
            and self._deferred is None
            and (frame.type != METHOD or frame.payload.startswith(_PUBLISH_CODE))
        )

    def _hold(self, frame: Frame) -> None:
        size = len(frame.payload) + OVERHEAD
        self.backlog.append(frame)
        self.backlog_size += size
        self.engine.hold(size)

    def resume(self) -> None:
        """Continue after the method that held up the channel has completed."""
        self.held_up = self._lets_publish = False
        if (self.backlog or self._deferred is not None) and not self.closing:
            self.engine.schedule(self)

    def _when_stored(self, queue: str, method: m.Method, step: Callable[[], None]) -> None:
        """Run *step* of *method* once the messages published to *queue* before are in it.

        A method sees the effects of those before it on its channel (§4.4), and a message that is
        still being written to the store is in no queue yet. Other channels are not held up.
        """
        topology = self.engine.topology

        def again() -> None:
            self._when_stored(queue, method, step)

        def done() -> None:
            self.engine.context = method
            step()

        link = self._senders.get(queue)
        if link is not None and not (link.attached or link.over):
            # The link that publishes to this queue still waits for authorisation.
            self.held_up = True
            link.on_answer = lambda _refused: self._go_on_with(again)
        elif topology is None or not topology.wait_stored(queue, partial(self._go_on_with, done)):
            done()
        else:
            self.held_up = True

    def _go_on_with(self, following: Callable[[], None]) -> None:
        """Do *following*, for which the channel was held up, and then process the input held since."""
        if self.closing or self.ended:
            return
        self._deferred = following
        self.resume()

    def _work(self, steps: Generator[int, None, None]) -> None:
        """Run *steps*, which yield their cost in frames.

        Steps that exceed the work of one turn run in later turns; frames of the channel wait
        meanwhile.
        """
        engine = self.engine
        left = _WORK_MAX
        for work in steps:
            engine.spend(work)
            left -= work
            if left <= 0:
                self._deferred = partial(self._work_on, steps, engine.context)
                engine.work_later(self)
                return

    def _work_on(self, steps: Generator[int, None, None], method: m.Method | None) -> None:
        if not (self.closing or self.ended):
            self.engine.context = method
            self._work(steps)

    def go_on(self) -> None:
        """Run the deferred step and handle held frames, as far as the work of one turn goes.

        Frames behind a method that has to wait are left, and the rest of the work follows in a
        later turn.
        """
        engine = self.engine
        enough = engine.spent + _WORK_MAX
        if self._deferred is not None:
            step, self._deferred = self._deferred, None
            self.engine.guard(self, step)
        while self.backlog and not self._waits and not self.closing:
            frame = self.backlog.popleft()
            self.backlog_size -= len(frame.payload) + OVERHEAD
            self.engine.let_go(len(frame.payload) + OVERHEAD)
            self.engine.guard(self, partial(self._take, frame))
            engine.spend(1)
            if engine.spent >= enough and self.backlog and not self._waits:
                engine.work_later(self)
                return

    def _on_method_octets(self, payload: bytes) -> None:
        # Fast path for the methods that come with each message: basic.publish and basic.ack.
        engine = self.engine
        if payload.startswith(_PUBLISH_CODE):
            known = engine.recents.methods.get(payload)
            if known is None:
                known = _read_publish(payload)
                if known is None:
                    # Malformed, or not UTF-8: the general decoder reports which.
                    super()._on_method_octets(payload)
                    self._place = None
                    self._said = payload
                    return
                if len(payload) <= OCTETS_MAX:
                    engine.recents.methods.put(payload, known)
            engine.context = self._carrier = known.method
            self._said = payload
            self._place = known.place
        elif payload.startswith(_ACK_CODE) and len(payload) == _ACK.size:
            _, tag, bits = _ACK.unpack(payload)
            engine.context = m.BasicAck(delivery_tag=tag, multiple=bool(bits & 1))
            self._settle(tag, multiple=bool(bits & 1), outcome=ACCEPTED)
        else:
            super()._on_method_octets(payload)

    def _on_header(self, payload: bytes) -> None:
        self._told = told = payload[12:]
        known = self.engine.recents.properties.get(told) if payload[:4] == _BASIC_HEADER else None
        if known is not None and self._carrier is not None and self._properties is None:
            self._begin(known, int.from_bytes(payload[4:12], "big"))
            return
        super()._on_header(payload)

    def _begin(self, properties: m.BasicProperties, size: int) -> None:
        if len(self._told) <= OCTETS_MAX:
            self.engine.recents.properties.put(self._told, properties)
        super()._begin(properties, size)

    def _on_method(self, method: m.Method) -> None:
        self.engine.flush()
        self.engine.spend(_METHOD_WORK)
        handler = _HANDLERS.get(type(method))
        if handler is None:
            raise Fault(faults.COMMAND_INVALID, f"{method.name} is not a method for clients here")
        try:
            handler(self, method)
        except AmqpError as error:
            raise Fault.of(error) from error

    def _on_content(
        self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes
    ) -> None:
        self._on_publish(method, properties, body)

    # --- closing -------------------------------------------------------------------------

    @property
    def links(self) -> Mapping[int, Link]:
        """Links of the channel, by handle."""
        return {link.handle: link for link in sorted(self._links, key=lambda each: each.handle)}

    def end(self, error: Error | None = None) -> None:
        """End the channel and requeue the deliveries that the client has not settled (§4.5).

        With an *error*, close it from our side: the client receives ``channel.close``.
        """
        if error is not None:
            fault = Fault(faults.CONNECTION_FORCED, error.description or str(error.condition))
            self.engine.close_channel(self, fault, None)
            return
        if self.ended:
            return
        self.engine.drop_replies(self)
        for link in list(self._links):
            link.end(None, True)
        # Each of them refers to the channel: a reference cycle would keep it, and its connection,
        # alive until a full collection.
        self._links.clear()
        self.consumers.clear()
        self._getters.clear()
        self._senders.clear()
        self._enlisted.clear()
        self._publishing = self._control = self._deferred = None
        self.engine.let_go(self.backlog_size)
        self.backlog_size = 0
        self.backlog.clear()
        self.unacked.clear()
        self._end()

    def _on_close(self, method: m.ChannelClose) -> None:
        self.end()
        self.write(m.ChannelCloseOk())
        self.engine.release(self)

    def _on_flow(self, method: m.ChannelFlow) -> None:
        self.flowing = method.active
        self.write(m.ChannelFlowOk(active=method.active))
        if method.active:
            self._offer_credit()

    def _on_flow_ok(self, method: m.ChannelFlowOk) -> None:
        """Ignore the answer: the server never sends ``channel.flow``."""

    def _on_open(self, method: m.ChannelOpen) -> None:
        raise Fault(faults.CHANNEL_ERROR, f"channel {self.number} is open already")

    # --- topology ------------------------------------------------------------------------

    @property
    def _topology(self) -> Topology:
        topology = self.engine.topology
        if topology is None:
            raise Fault(faults.NOT_IMPLEMENTED, "nothing can be declared here")
        return topology

    def _queue_named(self, name: str) -> str:
        if name:
            return name
        if not self._queue:
            raise Fault(faults.NOT_FOUND, "no queue is named, and none was declared here before")
        return self._queue

    def _on_exchange_declare(self, method: m.ExchangeDeclare) -> None:
        if method.passive:
            self._topology.exchange(method.exchange)
        else:
            try:
                self._topology.declare_exchange(
                    Exchange(
                        name=method.exchange,
                        type=method.type,
                        durable=method.durable,
                        auto_delete=method.auto_delete,
                        internal=method.internal,
                        arguments=to_arguments(method.arguments),
                    )
                )
            except AmqpError as error:
                if error.condition == "amqp:not-implemented":
                    # Reply code of the standard for an unknown exchange type.
                    raise Fault(faults.COMMAND_INVALID, error.description) from error
                raise
        if not method.no_wait:
            self.write(m.ExchangeDeclareOk())

    def _on_exchange_delete(self, method: m.ExchangeDelete) -> None:
        try:
            self._topology.delete_exchange(method.exchange, if_unused=method.if_unused)
        except AmqpError as error:
            # Deleting an exchange that does not exist is no error (RabbitMQ).
            if error.condition != "amqp:not-found":
                raise
        if not method.no_wait:
            self.write(m.ExchangeDeleteOk())

    def _on_exchange_bind(self, method: m.ExchangeBind) -> None:
        self._topology.bind_exchange(
            method.destination, method.source, method.routing_key, to_arguments(method.arguments)
        )
        if not method.no_wait:
            self.write(m.ExchangeBindOk())

    def _on_exchange_unbind(self, method: m.ExchangeUnbind) -> None:
        self._topology.unbind_exchange(
            method.destination, method.source, method.routing_key, to_arguments(method.arguments)
        )
        if not method.no_wait:
            self.write(m.ExchangeUnbindOk())

    def _on_queue_declare(self, method: m.QueueDeclare) -> None:
        if method.queue == REPLY_TO or method.queue.startswith(f"{REPLY_TO}."):
            # A client checks whether the address of a requester still accepts replies.
            found = method.queue == REPLY_TO or self.engine.replies.get(method.queue) is not None
            if not found:
                raise Fault(faults.NOT_FOUND, "the consumer of that reply address has gone")
            if not method.no_wait:
                self.write(m.QueueDeclareOk(queue=method.queue, consumer_count=1))
            return
        name = self._queue_named(method.queue) if method.passive else method.queue
        self._when_stored(name, method, partial(self._declare_queue, name, method))

    def _declare_queue(self, name: str, method: m.QueueDeclare) -> None:
        if method.passive:
            state = self._topology.queue(name)
        else:
            state = self._topology.declare_queue(
                QueueDeclaration(
                    name=name,
                    durable=method.durable,
                    exclusive=method.exclusive,
                    auto_delete=method.auto_delete,
                    arguments=to_arguments(method.arguments),
                )
            )
        self._queue = state.name
        if not method.no_wait:
            self.write(
                m.QueueDeclareOk(
                    queue=state.name,
                    message_count=state.messages,
                    consumer_count=state.consumers,
                )
            )

    def _on_queue_bind(self, method: m.QueueBind) -> None:
        queue = self._queue_named(method.queue)
        key = method.routing_key
        if not key and not method.queue:
            # With both names empty, the routing key is the name of the queue (§1.7.2.3).
            key = queue
        self._topology.bind_queue(queue, method.exchange, key, to_arguments(method.arguments))
        if not method.no_wait:
            self.write(m.QueueBindOk())

    def _on_queue_unbind(self, method: m.QueueUnbind) -> None:
        queue = self._queue_named(method.queue)
        self._topology.unbind_queue(
            queue, method.exchange, method.routing_key, to_arguments(method.arguments)
        )
        self.write(m.QueueUnbindOk())

    def _on_queue_purge(self, method: m.QueuePurge) -> None:
        queue = self._queue_named(method.queue)
        self._when_stored(queue, method, partial(self._purge_queue, queue, method))

    def _purge_queue(self, queue: str, method: m.QueuePurge) -> None:
        purging = self._topology.purge_queue(queue)

        def steps() -> Generator[int, None, None]:
            count = 0
            for count in purging:  # noqa: B007 - the last value is used
                yield _PURGE_WORK
            if not method.no_wait:
                self.write(m.QueuePurgeOk(message_count=count))

        self._work(steps())

    def _on_queue_delete(self, method: m.QueueDelete) -> None:
        queue = self._queue_named(method.queue)
        self._when_stored(queue, method, partial(self._delete_queue, queue, method))

    def _delete_queue(self, queue: str, method: m.QueueDelete) -> None:
        count = 0
        try:
            count = self._topology.delete_queue(
                queue,
                if_unused=method.if_unused,
                if_empty=method.if_empty,
            )
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
        if not method.no_wait:
            self.write(m.QueueDeleteOk(message_count=count))

    # --- receiving -----------------------------------------------------------------------

    def next_tag(self) -> int:
        """Return the next delivery-tag; tags count from 1 on each channel."""
        self._last_tag += 1
        return self._last_tag

    def room(self) -> int:
        """Return how many more unsettled messages the channel may have."""
        room = _UNACKED_MAX - len(self.unacked)
        if self._prefetch_all:
            room = min(room, self._prefetch_all - len(self.unacked))
        if self._prefetch_size and self._size_held() >= self._prefetch_size:
            return 0
        return room

    def _size_held(self) -> int:
        return sum(delivery.size for delivery in self.unacked.values())

    def _on_qos(self, method: m.BasicQos) -> None:
        self._prefetch_size = method.prefetch_size
        if method.global_:
            self._prefetch_all = method.prefetch_count
        else:
            # RabbitMQ's interpretation: the count applies to each consumer started from now on.
            self._prefetch = method.prefetch_count
        self.write(m.BasicQosOk())
        self._offer_credit()

    def _look(self, queue: str) -> int:
        """Return the number of messages ready in *queue*, 0 if there is no such queue.

        A missing queue is no error here: it may be created on first use, or be a node of the
        application. The answer to the link's attach decides.

        Raises:
            AmqpError: The queue is exclusive to another connection.
        """
        topology = self.engine.topology
        if topology is None:
            return 0
        try:
            return topology.queue(queue).messages
        except AmqpError as error:
            # The attach of the link reports the missing right.
            if error.condition not in ("amqp:not-found", "amqp:unauthorized-access"):
                raise
            return 0

    def _request(self, link: Link) -> None:
        """Request the attach of *link*; the channel is held up until the answer."""
        self.held_up = True
        self._links.add(link)
        self.engine.report(AttachRequested(link))

    def _link_name(self, what: str) -> str:
        return f"{self.number}-{what}-{self.engine.next_name()}"

    def _on_consume(self, method: m.BasicConsume) -> None:
        tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
        if tag in self.consumers or tag == self._reply_tag:
            raise Fault(faults.NOT_ALLOWED, f"consumer tag {tag!r} is in use on this channel")
        if method.queue == REPLY_TO:
            self._consume_replies(method, tag)
            return
        queue = self._queue_named(method.queue)
        if len(self._links) > self.engine.limits.handle_max:
            raise Fault(
                faults.RESOURCE_ERROR,
                f"a channel has at most {self.engine.limits.handle_max} consumers and the like",
            )
        self._look(queue)
        arguments = method.arguments
        source = Source(address=queue, default_outcome=REQUEUED)
        offset = arguments.get("x-stream-offset")
        if offset is not None:
            source.filter = {_OFFSET: _offset(offset)}
        link = SendingLink(self, tag, source, no_ack=method.no_ack, prefetch=self._prefetch)
        link.name = self._link_name(f"consume-{tag}")
        properties: dict[object, object] = {}
        if method.exclusive:
            properties[_EXCLUSIVE] = True
        priority = arguments.get("x-priority")
        if isinstance(priority, int) and not isinstance(priority, bool):
            properties[_PRIORITY] = int(priority)
        link.properties = properties
        link.on_answer = partial(self._consuming, method, link)
        link.on_end = partial(self._consumer_ended, link)
        self._request(link)
        self._lets_publish = True

    def _consuming(self, method: m.BasicConsume, link: SendingLink, refused: Error | None) -> None:
        if self.closing or self.ended:
            return
        if refused is not None:
            self._links.discard(link)
            if refused.condition == "amqp:resource-locked":
                # Another consumer is exclusive, or this one asked to be while others consume.
                refused = Error("amqp:unauthorized-access", refused.description)
            self.engine.fail(self, Fault.of(refused), method)
            return
        self.consumers[link.tag] = link
        if not method.no_wait:
            self.write(m.BasicConsumeOk(consumer_tag=link.tag))
        self.resume()

    def _consumer_ended(self, link: SendingLink, error: Error | None) -> None:
        """Remove a consumer whose queue was deleted or whose right was revoked, and cancel it.

        Only clients with the capability ``consumer_cancel_notify`` receive ``basic.cancel``.
        """
        self._links.discard(link)
        if self.consumers.pop(link.tag, None) is link and self.engine.hears_cancel:
            self.write(m.BasicCancel(consumer_tag=link.tag, no_wait=True))

    def _on_cancel(self, method: m.BasicCancel) -> None:
        tag = method.consumer_tag
        link = self.consumers.pop(tag, None)
        if link is not None:
            link.on_end = lambda _error: self._links.discard(link)
            link.once = 0
            if link.held:
                # The client can still settle these deliveries; the link ends with the last of them.
                link.idle = True
                if self.engine.topology is not None and link.source is not None:
                    self.engine.topology.idle(str(link.source.address))
            else:
                self._drop(link)
        elif tag == self._reply_tag:
            self._reply_tag = None
            self.engine.drop_replies(self)
        if not method.no_wait:
            self.write(m.BasicCancelOk(consumer_tag=tag))

    def _on_cancel_ok(self, method: m.BasicCancelOk) -> None:
        """Ignore the answer: the consumer is removed already."""

    def _drop(self, link: Link) -> None:
        self._links.discard(link)
        link.end(None, True)

    def convert(self, octets: bytes, link: SendingLink) -> Content:
        """Convert an encoded AMQP 1.0 message from *link* to 0-9-1.

        Raises:
            LocalProtocolError: The message is malformed.
        """
        address = "" if link.source is None else str(link.source.address)
        try:
            return from_message(octets, address, self.engine.limits)
        except AmqpError as error:
            raise LocalProtocolError(f"the message is malformed: {error.description}") from error

    def deliver(
        self, link: SendingLink, payload: bytes, context: Any, settled: bool
    ) -> OutgoingDelivery:
        """Send an encoded AMQP 1.0 message to a consumer by ``basic.deliver``.

        Raises:
            LocalProtocolError: The message is malformed.
        """
        engine = self.engine
        address = "" if link.source is None else str(link.source.address)
        delivered = engine.recents.delivered
        parts = parts_of(payload, address)
        known = None if parts is None else delivered.get(parts.key)
        if parts is None or known is None:
            content = self.convert(payload, link)
            body = content.body
            known = _delivered(content)
            place = b"" if known is None else known.place
            if (
                parts is not None
                and known is not None
                and len(payload) - len(parts.body) <= OCTETS_MAX
            ):
                delivered.put(parts.key, known)
        else:
            content = None
            body = parts.body
            place = parts.place or known.place
        delivery = OutgoingDelivery(link, self.next_tag(), context, settled)
        delivery.size = len(body)
        octets = None
        if known is not None:
            octets = delivered_frames(
                self.number,
                link.said or _said_to(link),
                delivery.number,
                known.redelivered,
                place,
                known.properties,
                body,
                engine.frame_max_out,
            )
        if octets is not None:
            engine.write_octets(octets)
            return delivery
        # The message needs several frames, or its properties do not fit a frame.
        content = content or self.convert(payload, link)
        engine.write_content(
            self.number,
            m.BasicDeliver(
                consumer_tag=link.tag,
                delivery_tag=delivery.number,
                redelivered=content.redelivered,
                exchange=content.exchange,
                routing_key=content.routing_key,
            ),
            content.properties,
            content.body,
        )
        return delivery

    def _on_get(self, method: m.BasicGet) -> None:
        queue = self._queue_named(method.queue)
        self._when_stored(queue, method, partial(self._get, queue, method))

    def _get(self, queue: str, method: m.BasicGet) -> None:
        self._look(queue)
        key = f"{'n' if method.no_ack else 'a'}{queue}"
        link = self._getters.get(key)
        if link is not None and link.attached:
            self.held_up = True
            self._ask(method, queue, link)
            return
        if len(self._getters) >= _LINKS_MAX:
            self._drop_idle_getters()
        link = SendingLink(
            self,
            self._link_name(f"get-{queue}"),
            Source(address=queue, default_outcome=REQUEUED),
            no_ack=method.no_ack,
            prefetch=0,
        )
        link.once = 0
        link.idle = True
        link.on_answer = partial(self._getting, method, queue, link)
        link.on_end = partial(self._getter_ended, method, link)
        self._getters[key] = link
        self._request(link)

    def _drop_idle_getters(self) -> None:
        for key, link in list(self._getters.items()):
            if not link.held:
                del self._getters[key]
                self._drop(link)

    def _getting(
        self, method: m.BasicGet, queue: str, link: SendingLink, refused: Error | None
    ) -> None:
        if self.closing or self.ended:
            return
        if refused is not None:
            self._links.discard(link)
            self.engine.fail(self, Fault.of(refused), method)
            return
        self._ask(method, queue, link)

    def _getter_ended(self, method: m.BasicGet, link: SendingLink, error: Error | None) -> None:
        self._links.discard(link)
        if link.draining and not (self.closing or self.ended):
            why = error or Error("amqp:not-found", "the queue has gone")
            self.engine.fail(self, Fault.of(why), method)

    def _ask(self, method: m.BasicGet, queue: str, link: SendingLink) -> None:
        """Request a message of the queue; answer by ``get-ok`` or ``get-empty``."""

        def got(content: Content, delivery: OutgoingDelivery) -> None:
            link.on_drained = None
            link.draining = False
            delivery.size = len(content.body)
            self.engine.write_content(
                self.number,
                m.BasicGetOk(
                    delivery_tag=delivery.number,
                    redelivered=content.redelivered,
                    exchange=content.exchange,
                    routing_key=content.routing_key,
                    message_count=self._look(queue),
                ),
                content.properties,
                content.body,
            )
            self.resume()

        def nothing() -> None:
            self.write(m.BasicGetEmpty())
            self.resume()

        link.on_message = got
        link.on_drained = nothing
        link.once = 1
        link.draining = True
        link.offer_credit()

    def _on_ack(self, method: m.BasicAck) -> None:
        self._settle(method.delivery_tag, multiple=method.multiple, outcome=ACCEPTED)

    def _on_reject(self, method: m.BasicReject) -> None:
        outcome = REQUEUED if method.requeue else DISCARDED
        self._settle(method.delivery_tag, multiple=False, outcome=outcome)

    def _on_nack(self, method: m.BasicNack) -> None:
        outcome = REQUEUED if method.requeue else DISCARDED
        self._settle(method.delivery_tag, multiple=method.multiple, outcome=outcome)

    def _on_recover(self, method: m.BasicRecover) -> None:
        self._recover(method.requeue)
        self.write(m.BasicRecoverOk())

    def _on_recover_async(self, method: m.BasicRecoverAsync) -> None:
        self._recover(method.requeue)

    def _recover(self, requeue: bool) -> None:
        if not requeue:
            raise Fault(
                faults.NOT_IMPLEMENTED, "messages go back to their queues: recover with requeue"
            )
        self._conclude_all([each for each in self.unacked.values() if not each.enlisted], REQUEUED)

    def _settle(self, tag: int, *, multiple: bool, outcome: Outcome) -> None:
        """Settle the delivery with *tag* with *outcome*; with *multiple*, all up to it (§1.8.3.13).

        Raises:
            Fault: No unsettled delivery has this tag.
        """
        if not multiple:
            found = self.unacked.get(tag)
            if found is None or found.enlisted:
                raise Fault(faults.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
            self._conclude([found], outcome)
            return
        if tag and (tag > self._last_tag or not any(n <= tag for n in self.unacked)):
            raise Fault(faults.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        chosen = []
        for number, delivery in self.unacked.items():
            if tag and number > tag:
                break
            if not delivery.enlisted:
                chosen.append(delivery)
        self._conclude_all(chosen, outcome)

    def _conclude_all(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Settle *deliveries* with *outcome*; many of them a few at a time."""
        size = _ANSWERS_OF_A_STEP
        if len(deliveries) <= size:
            self.engine.spend(_ANSWER_WORK * len(deliveries))
            self._conclude(deliveries, outcome)
            return

        def steps() -> Generator[int, None, None]:
            for at in range(0, len(deliveries), size):
                # Some may have been settled or taken away since.
                chosen = [
                    each for each in deliveries[at : at + size] if each.number in self.unacked
                ]
                self._conclude(chosen, outcome)
                self.engine.flush()
                yield _ANSWER_WORK * size

        self._work(steps())

    def _conclude(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Settle *deliveries* with *outcome*: enlisted in the transaction if the channel has one,
        else with the other settlements of this chunk.
        """
        if self._control is not None:
            self._enlist(deliveries, outcome)
            return
        engine = self.engine
        for delivery in deliveries:
            link = delivery.link
            link.forget(delivery)
            # A detached link belongs to a queue deleted meanwhile: settling has no effect.
            if link.attached:
                delivery.state = outcome
                delivery.settled = True
                delivery.remote_settled = True
                engine.answer(link, delivery)

    def conclude(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Pass outcomes of *deliveries* to the queue, then offer the credit that became free."""
        if link.attached:
            link.endpoint.on_outcomes(link, deliveries)
            self._after_answer(link)
            if self._prefetch_all or self._prefetch_size:
                self._offer_credit()

    def _enlist(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Send *outcome* for *deliveries* as part of the current transaction."""
        by_link: dict[SendingLink, list[OutgoingDelivery]] = {}
        for delivery in deliveries:
            if not delivery.link.attached:
                delivery.link.forget(delivery)
                continue
            delivery.enlisted = True
            delivery.state = TransactionalState(self._txn_id, outcome)
            self._enlisted.append(delivery)
            by_link.setdefault(delivery.link, []).append(delivery)
        for link, chosen in by_link.items():
            if link.attached:
                link.endpoint.on_outcomes(link, chosen)

    def _after_answer(self, link: SendingLink) -> None:
        if link.once is None:
            link.offer_credit()
        elif not link.held and link.tag not in self.consumers and link.tag != link.name:
            # The consumer was cancelled, and this was its last unsettled delivery.
            self._drop(link)

    def _offer_credit(self) -> None:
        """Offer every consumer of the channel the credit it has now."""
        for link in list(self.consumers.values()):
            link.offer_credit()

    # --- direct replies ------------------------------------------------------------------

    def _consume_replies(self, method: m.BasicConsume, tag: str) -> None:
        if not method.no_ack:
            raise Fault(
                faults.PRECONDITION_FAILED, f"{REPLY_TO} has no acknowledgements: set no-ack"
            )
        if self._reply_tag is not None:
            raise Fault(faults.PRECONDITION_FAILED, "the channel has a consumer of replies already")
        self._reply_tag = tag
        # The address cannot be guessed: only receivers of a request know it.
        self._reply_address = f"{REPLY_TO}.{secrets.token_urlsafe(24)}"
        self.engine.replies[self._reply_address] = self
        if not method.no_wait:
            self.write(m.BasicConsumeOk(consumer_tag=tag))

    def reply(self, address: str, properties: m.BasicProperties, body: bytes) -> bool:
        """Deliver a reply to this channel; return False if its consumer has gone or does not read.

        A consumer that does not read gets at most ``output_max`` bytes: replies have neither credit
        nor a queue to wait in.
        """
        if self._reply_tag is None or address != self._reply_address or self.closing:
            return False
        if self.engine.output_size >= self.engine.limits.output_max:
            return False
        self.engine.write_content(
            self.number,
            m.BasicDeliver(
                consumer_tag=self._reply_tag, delivery_tag=self.next_tag(), routing_key=address
            ),
            properties,
            body,
        )
        return True

    # --- publishing ----------------------------------------------------------------------

    def _on_publish(
        self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes
    ) -> None:
        if method.immediate:
            raise Fault(faults.NOT_IMPLEMENTED, "immediate is not offered: use a TTL of 0")
        peer = self.engine.peer
        user = properties.user_id
        if user is not None and peer.user is not None and user != peer.user:
            raise Fault(
                faults.PRECONDITION_FAILED,
                f"user-id is {user!r:.50}, and the connection is that of {peer.user!r:.50}",
            )
        if properties.reply_to == REPLY_TO:
            if self._reply_tag is None:
                raise Fault(
                    faults.PRECONDITION_FAILED,
                    f"consume from {REPLY_TO} before you ask for replies",
                )
            properties = replace(properties, reply_to=self._reply_address)
            # Another channel has another reply address, so these octets must not be a cache key.
            self._told = b""
        number = 0
        if self._confirms:
            self._last_number += 1
            number = self._last_number
            self._unconfirmed[number] = None
        exchange = method.exchange
        if not exchange and method.routing_key.startswith(f"{REPLY_TO}."):
            waiting = self.engine.replies.get(method.routing_key)
            if waiting is None or not waiting.reply(method.routing_key, properties, body):
                self._nowhere(method, properties, body, number)
            elif number:
                self.confirm(number, acknowledged=True)
            return
        # Routes are found once for the messages of one chunk with equal method and properties: no
        # other method runs between them.
        place = (self.number, self._said, self._told)
        ways = self.engine.ways.get(place) if self._told else None
        if ways is None and not exchange and not _is_copied(properties):
            ways = self.engine.ways[place] = [self._way_to(method.routing_key, routed=False)]
        if ways is None or len(ways) > _QUEUES_OF_A_STEP:
            self._work(self._spread(method, properties, body, number, ways))
            return
        said = self._prepare(method, properties, body, number, len(ways))
        if said is not None:
            for way, link, _ in ways:
                self.engine.post(way, link, IncomingDelivery(link, *said))

    def _spread(
        self,
        method: m.BasicPublish,
        properties: m.BasicProperties,
        body: bytes,
        number: int,
        ways: list[_Way] | None,
    ) -> Generator[int, None, None]:
        """Hand a message to all queues that it is routed to; yield the cost of each step in frames.

        All of them share one payload.
        """
        topology = self.engine.topology
        deletions: AbstractContextManager[Container[str]] = nullcontext(())
        if topology is not None and method.exchange:
            deletions = topology.deletions()
        with deletions as gone:
            if ways is None:
                ways = yield from self._find_ways(method, properties, gone)
            said = self._prepare(method, properties, body, number, len(ways))
            if said is None:
                return
            told = said[1]
            for count, (way, link, name) in enumerate(ways, 1):
                if name not in gone:
                    self.engine.post(way, link, IncomingDelivery(link, *said))
                elif told is not None:
                    told(_GONE)
                if not count % _QUEUES_OF_A_STEP:
                    self.engine.flush()
                    yield _QUEUE_WORK * _QUEUES_OF_A_STEP

    def _find_ways(
        self, method: m.BasicPublish, properties: m.BasicProperties, gone: Container[str]
    ) -> Generator[int, None, list[_Way]]:
        """Find the inlets for a message; yield the cost of each step in frames."""
        exchange = method.exchange
        topology = self.engine.topology
        keys = _keys(method.routing_key, properties, self.engine.limits.routing_keys_max)
        names: dict[str, None] = {}
        if not exchange:
            names = dict.fromkeys(keys)
        elif topology is None:
            raise Fault(faults.NOT_FOUND, f"there is no exchange {exchange!r:.100}")
        else:
            headers = to_arguments(properties.headers or {})
            yield from topology.routing(exchange, keys, headers, names)
        found = []
        for name in names:
            if name in gone:
                continue
            found.append(self._way_to(name, routed=bool(exchange)))
            if not len(found) % _QUEUES_OF_A_STEP:
                yield _QUEUES_OF_A_STEP // 2
        self.engine.ways[self.number, self._said, self._told] = found
        return found

    def _prepare(
        self,
        method: m.BasicPublish,
        properties: m.BasicProperties,
        body: bytes,
        number: int,
        awaited: int,
    ) -> tuple[bytes, Callable[[Any], None] | None, Any] | None:
        """Return payload, callback for outcomes and transactional state of a message's deliveries.

        With no queue (*awaited* is 0), return or drop the message at once; the result is None.
        """
        seen = _without_bcc(properties)
        if not awaited:
            self._nowhere(method, seen, body, number)
            return None
        payload = self._payload(method, seen, body)
        told: Callable[[Any], None] | None = None
        if number or method.mandatory:
            content = (seen, body) if method.mandatory else None
            told = Publication(self, number, method, content, awaited).on_outcome
        state = None if self._control is None else TransactionalState(self._txn_id)
        return payload, told, state

    def _payload(self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes) -> bytes:
        """Encode the message as AMQP 1.0, from the cached front if there is one.

        Raises:
            Fault: A property is invalid.
        """
        told, place = self._told, self._place
        fronts = self.engine.recents.fronts
        front = fronts.get(told) if told else None
        try:
            if front is None:
                front = front_of(properties)
                if front is not None and told and len(told) <= OCTETS_MAX:
                    fronts.put(told, front)
            if front is None or place is None:
                return to_message(
                    properties, body, exchange=method.exchange, routing_key=method.routing_key
                )
        except (Invalid, AmqpError) as error:
            raise Fault(faults.PRECONDITION_FAILED, str(error)) from error
        return joined(front, place, body)

    def _way_to(self, name: str, *, routed: bool) -> _Way:
        """Return the inlet of node *name*, or a link to it, which is requested if there is none.

        Raises:
            Fault: The node refuses messages from this client.
        """
        topology = self.engine.topology
        if topology is not None:
            publishing = self._publishing or Publishing(self)
            way = topology.inlet(name, publishing, routed=routed)
            if isinstance(way, Error):
                raise Fault.of(way)
            if way is not None:
                return way, publishing, name
        link = self._senders.get(name)
        if link is None or link.over:
            if len(self._senders) >= _LINKS_MAX:
                oldest = next(iter(self._senders))
                self._drop(self._senders.pop(oldest))
            link = ReceivingLink(self, self._link_name(f"publish-{name}"), Target(address=name))
            self._senders[name] = link
            self._links.add(link)
            self.engine.report(AttachRequested(link))
        return None, link, name

    def _nowhere(
        self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes, number: int
    ) -> None:
        """Return an unroutable message if it is mandatory, and confirm it."""
        if method.mandatory:
            self.give_back(method, properties, body)
        if number:
            self.confirm(number, acknowledged=True)

    def give_back(self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes) -> None:
        """Return an unroutable mandatory message to its publisher."""
        if self.closing or self.ended:
            return
        self.engine.write_content(
            self.number,
            m.BasicReturn(
                reply_code=faults.NO_ROUTE,
                reply_text=faults.NAMES[faults.NO_ROUTE],
                exchange=method.exchange,
                routing_key=method.routing_key,
            ),
            properties,
            body,
        )

    def refused(self, outcome: Rejected) -> None:
        """Close the channel if a message without confirms was rejected for a fault of its
        publisher.

        The standard wants a message that is unroutable, or finds no room, to be dropped; the inlet
        has logged that. A fault that the publisher can correct must reach it, and a channel
        exception is the only way.
        """
        error = outcome.error
        if error is not None and str(error.condition) in _MENDABLE:
            method = m.BasicPublish()
            self.engine.fail(self, Fault.of(error), method)

    # --- confirms ------------------------------------------------------------------------

    def _on_confirm_select(self, method: m.ConfirmSelect) -> None:
        if self._control is not None:
            raise Fault(faults.PRECONDITION_FAILED, "a channel with transactions has no confirms")
        self._confirms = True
        if not method.nowait:
            self.write(m.ConfirmSelectOk())

    def confirm(self, number: int, *, acknowledged: bool) -> None:
        """Confirm message *number*, by an ack if all its queues keep it, else by a nack."""
        if self.closing or self.ended or number not in self._unconfirmed:
            return
        if acknowledged:
            self._acknowledged.append(number)
            self.engine.mark_dirty(self)
        else:
            self.flush()
            del self._unconfirmed[number]
            self.write(m.BasicNack(delivery_tag=number))

    def flush(self) -> None:
        """Send the pending acks, in as few frames as possible."""
        acknowledged, self._acknowledged = self._acknowledged, []
        if self.closing or self.ended or not acknowledged:
            return
        for number in acknowledged:
            del self._unconfirmed[number]
        acknowledged.sort()
        least = next(iter(self._unconfirmed), self._last_number + 1)
        together = 0
        while together < len(acknowledged) and acknowledged[together] < least:
            together += 1
        if together:
            self.write(m.BasicAck(delivery_tag=acknowledged[together - 1], multiple=together > 1))
        for number in acknowledged[together:]:
            self.write(m.BasicAck(delivery_tag=number))

    # --- transactions --------------------------------------------------------------------

    def _on_tx_select(self, method: m.TxSelect) -> None:
        if self._confirms:
            raise Fault(faults.PRECONDITION_FAILED, "a channel with confirms has no transactions")
        if self._control is not None:
            self.write(m.TxSelectOk())
            return
        link = ReceivingLink(self, self._link_name("tx"), Coordinator())
        link.on_answer = partial(self._selected, method, link)
        link.on_end = partial(self._control_ended, method)
        self._request(link)

    def _selected(self, method: m.Method, link: ReceivingLink, refused: Error | None) -> None:
        if self.closing or self.ended:
            return
        if refused is not None:
            self._links.discard(link)
            self.engine.fail(self, Fault.of(refused), method)
            return
        self._control = link
        self._declare(method, m.TxSelectOk())

    def _control_ended(self, method: m.Method, error: Error | None) -> None:
        why = error or Error("amqp:internal-error", "the transactions of the channel have ended")
        if not (self.closing or self.ended):
            self.engine.fail(self, Fault.of(why), method)

    def _declare(self, method: m.Method, answer: m.Method) -> None:
        """Begin a transaction, and then send *answer*."""

        def declared(outcome: Any) -> None:
            if self.closing or self.ended:
                return
            if isinstance(outcome, Declared):
                self._txn_id = outcome.txn_id
                self.write(answer)
                self.resume()
            else:
                self.engine.fail(self, _fault_of(outcome), method)

        self._tell_control(Declare(), declared)

    def _tell_control(self, said: object, on_outcome: Callable[[Any], None]) -> None:
        assert self._control is not None
        self.held_up = True
        payload = Message(said, body_kind="value").encode()
        self._control.put([IncomingDelivery(self._control, payload, on_outcome)])

    def _on_tx_commit(self, method: m.TxCommit) -> None:
        self._discharge(method, m.TxCommitOk(), fail=False)

    def _on_tx_rollback(self, method: m.TxRollback) -> None:
        self._discharge(method, m.TxRollbackOk(), fail=True)

    def _discharge(self, method: m.Method, answer: m.Method, *, fail: bool) -> None:
        if self._control is None:
            raise Fault(faults.PRECONDITION_FAILED, "the channel has no transactions: select first")
        again = partial(self._go_on_with, partial(self._discharge, method, answer, fail=fail))
        if any(isinstance(link, ReceivingLink) and link.wait_empty(again) for link in self._links):
            # What was published before belongs to the transaction: the right to send it is still
            # being asked for, or its queue has no room yet.
            self.held_up = True
            return
        enlisted, self._enlisted = self._enlisted, []

        def discharged(outcome: Any) -> None:
            if self.closing or self.ended:
                return
            done = isinstance(outcome, Accepted)
            for delivery in enlisted:
                delivery.enlisted = False
                if done and not fail:
                    delivery.settled = True
                    delivery.link.forget(delivery)
                else:
                    # The deliveries are unsettled again, as before the transaction.
                    delivery.state = None
            if not done:
                self.engine.fail(self, _fault_of(outcome), method)
                return
            self._declare(method, answer)
            for link in {delivery.link for delivery in enlisted}:
                self._after_answer(link)
            self._offer_credit()

        self._tell_control(Discharge(self._txn_id, fail), discharged)


def _is_copied(properties: m.BasicProperties) -> bool:
    """Whether the headers name more routing keys."""
    headers = properties.headers
    return headers is not None and ("CC" in headers or "BCC" in headers)


def _keys(key: str, properties: m.BasicProperties, keys_max: int) -> list[str]:
    """Return the routing key and those of the headers ``CC`` and ``BCC`` (RabbitMQ's
    sender-selected distribution).

    Raises:
        Fault: A header is no array of strings, or there are more than *keys_max* keys.
    """
    headers = properties.headers
    keys = [key]
    if not headers:
        return keys
    for name in ("CC", "BCC"):
        others = headers.get(name)
        if others is None:
            continue
        if not isinstance(others, list) or not all(isinstance(each, str) for each in others):
            raise Fault(
                faults.PRECONDITION_FAILED, f"the header {name} is an array of routing keys"
            )
        keys += others
    if len(keys) > keys_max:
        raise Fault(
            faults.PRECONDITION_FAILED,
            f"a message has at most {keys_max} routing keys, those in CC and BCC included,"
            f" got {len(keys)}",
        )
    return keys


def _without_bcc(properties: m.BasicProperties) -> m.BasicProperties:
    """Return the properties as consumers see them, without the header ``BCC``."""
    headers = properties.headers
    if not headers or "BCC" not in headers:
        return properties
    seen = {name: value for name, value in headers.items() if name != "BCC"}
    return replace(properties, headers=seen)


def _read_publish(payload: bytes) -> Published | None:
    """Decode ``basic.publish``; None if it is malformed or a name is not UTF-8."""
    try:
        first = 7 + payload[6]
        second = first + 1 + payload[first]
        if len(payload) != second + 1:
            return None
        method = m.BasicPublish(
            reserved_1=payload[4] << 8 | payload[5],
            exchange=payload[7:first].decode(),
            routing_key=payload[first + 1 : second].decode(),
            mandatory=bool(payload[second] & 1),
            immediate=bool(payload[second] & 2),
        )
    except (IndexError, UnicodeDecodeError):
        return None
    return Published(method, place_of(payload[6:first], payload[first:second]))


def _delivered(content: Content) -> Delivered | None:
    """Encode the parts of a delivery before its body, for messages alike; None if a value does not
    fit its field.
    """
    try:
        return Delivered(
            content.redelivered,
            write_shortstr(content.exchange) + write_shortstr(content.routing_key),
            write_header(ContentHeader(BASIC, 0, content.properties))[12:],
        )
    except ValueError:
        return None


def _said_to(link: SendingLink) -> bytes:
    """Encode ``basic.deliver`` up to the consumer-tag of *link*, and keep it there."""
    link.said = _DELIVER_CODE + write_shortstr(link.tag)
    return link.said


def _offset(value: object) -> object:
    """Convert ``x-stream-offset`` to the value of an AMQP 1.0 filter."""
    if isinstance(value, Seconds):
        return Timestamp(value.value * 1000)
    return value


def _fault_of(outcome: Any) -> Fault:
    """Convert the outcome of a failed transaction to the fault that closes the channel."""
    error = outcome.error if isinstance(outcome, Rejected) else None
    if error is None:
        return Fault(faults.INTERNAL_ERROR, "the transaction failed")
    return Fault(faults.PRECONDITION_FAILED, error.description or str(error.condition))


_HANDLERS: Final[Mapping[type[m.Method], Callable[[Channel, Any], None]]] = {
    m.ChannelOpen: Channel._on_open,
    m.ChannelFlow: Channel._on_flow,
    m.ChannelFlowOk: Channel._on_flow_ok,
    m.ChannelClose: Channel._on_close,
    m.ExchangeDeclare: Channel._on_exchange_declare,
    m.ExchangeDelete: Channel._on_exchange_delete,
    m.ExchangeBind: Channel._on_exchange_bind,
    m.ExchangeUnbind: Channel._on_exchange_unbind,
    m.QueueDeclare: Channel._on_queue_declare,
    m.QueueBind: Channel._on_queue_bind,
    m.QueueUnbind: Channel._on_queue_unbind,
    m.QueuePurge: Channel._on_queue_purge,
    m.QueueDelete: Channel._on_queue_delete,
    m.BasicQos: Channel._on_qos,
    m.BasicConsume: Channel._on_consume,
    m.BasicCancel: Channel._on_cancel,
    m.BasicCancelOk: Channel._on_cancel_ok,
    m.BasicGet: Channel._on_get,
    m.BasicAck: Channel._on_ack,
    m.BasicReject: Channel._on_reject,
    m.BasicNack: Channel._on_nack,
    m.BasicRecover: Channel._on_recover,
    m.BasicRecoverAsync: Channel._on_recover_async,
    m.ConfirmSelect: Channel._on_confirm_select,
    m.TxSelect: Channel._on_tx_select,
    m.TxCommit: Channel._on_tx_commit,
    m.TxRollback: Channel._on_tx_rollback,
}

__all__ = ["REPLY_TO", "Channel"]
