"""A channel: what its methods do (0-9-1 §1.3 to §1.8, with RabbitMQ's extensions).

Methods that have to wait for somebody, such as for the right to a queue, hold up what follows them on
their channel and nothing else.
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

#: The queue that is none: who consumes from it gets replies to what it asks (RabbitMQ's direct reply-to).
REPLY_TO: Final = "amq.rabbitmq.reply-to"

#: What comes back goes to others, and they see that it is not the first time.
REQUEUED: Final = Modified(delivery_failed=True)
#: What is given up goes to the dead-letter address.
DISCARDED: Final = Rejected()

_PUBLISH_CODE: Final = m.BasicPublish.code.to_bytes(4, "big")
_DELIVER_CODE: Final = m.BasicDeliver.code.to_bytes(4, "big")
_ACK_CODE: Final = m.BasicAck.code.to_bytes(4, "big")
_ACK: Final = Layout(">IQB")
#: How the content header of a message begins: its class, and the weight.
_BASIC_HEADER: Final = b"\0\x3c\0\0"
_EXCLUSIVE: Final = Symbol("exclusive")
_PRIORITY: Final = Symbol("priority")
_OFFSET: Final = Symbol("rabbitmq:stream-offset-spec")
#: Unanswered messages of a channel where the client sets no bound: as many as it could set. Each of
#: them lies in its queue all the while, which has its own bounds.
_UNACKED_MAX: Final = 65_535
#: What a method costs that is neither a message nor its acknowledgement, in frames: it declares
#: something, or attaches a link.
_METHOD_WORK: Final = 20
#: Work of one turn on one method, in frames.
_WORK_MAX: Final = 200
#: Queues that a message is handed to between two looks at that, and what one of them costs.
_QUEUES_OF_A_STEP: Final = 10
_QUEUE_WORK: Final = 5
#: Deliveries that are answered between two looks, and what one costs: another may take its place.
_ANSWERS_OF_A_STEP: Final = 10
_ANSWER_WORK: Final = 5
#: What one step of a purge is worth, in frames.
_PURGE_WORK: Final = 100
#: Links for destinations that nobody has an inlet for.
_LINKS_MAX: Final = 256
#: Why messages are refused for which their publisher is to blame, or the options of the broker.
_MENDABLE: Final = frozenset(("amqp:precondition-failed", "amqp:unauthorized-access"))
#: Outcome of a queue that has been deleted between two turns of a message.
_GONE: Final = Rejected(Error("amqp:not-found", "the queue has been deleted"))
#: Who takes messages for a queue, the link on which they come, and the queue's name.
_Way: TypeAlias = tuple[Any, ReceivingLink, str]


class Publication:
    """One message that was published, until all who got it have said what became of it.

    Args:
        number: Its number among those that are confirmed, 0 if it is not.
        method: How it was published.
        content: What to return if it goes nowhere; None if nobody wants it back.
        awaited: Those who got it.
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
        """One of them has said what became of it."""
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
            # A queue that has gone since the message was routed does not count, unless it was the last.
            if self.unroutable and not self.taken and self.content is not None:
                self.channel.give_back(self.method, *self.content)
            if self.number:
                self.channel.confirm(self.number, acknowledged=not self.failed)


class Channel(BaseChannel):
    """One channel of a connection that a client opened; to the broker, a session.

    Args:
        engine: The connection.
        number: Its number.
    """

    carriers = (m.BasicPublish,)

    engine: Engine

    def __init__(self, engine: Engine, number: int) -> None:
        super().__init__(number)
        self.engine = engine
        #: The client takes messages (``channel.flow``).
        self.flowing = True
        #: The client's unanswered messages, by delivery-tag, in order.
        self.unacked: dict[int, OutgoingDelivery] = {}
        self.consumers: dict[str, SendingLink] = {}
        #: Frames that wait until the method before them is done, and their octets.
        self.held_up = False
        #: But messages need not wait.
        self._lets_publish = False
        self.backlog: deque[Frame] = deque()
        self.backlog_size = 0
        #: The queue that was declared last: an empty name means it.
        self._queue = ""
        self._prefetch = 0
        self._prefetch_all = 0
        self._prefetch_size = 0
        self._last_tag = 0
        self._links: set[Link] = set()
        self._getters: dict[str, SendingLink] = {}
        self._senders: dict[str, ReceivingLink] = {}
        #: What carries messages to nodes that ask for no link of their own; None once the channel is over.
        self._publishing: Publishing | None = Publishing(self)
        #: The octets of the method and the properties of what is published.
        self._said = b""
        self._told = b""
        #: Where it goes, as annotations say it.
        self._place: bytes | None = None
        #: The tag of the consumer of direct replies, and the address by which it is reached.
        self._reply_tag: str | None = None
        self._reply_address = ""
        #: The method that held up the channel, to be done when it goes on.
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
        """A frame of this channel.

        Raises:
            Fault: It may not come now, or cannot be done.
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
        """Whether frames have to wait: for an answer, or until a method is done."""
        return self.held_up or self._deferred is not None

    def _publishes(self, frame: Frame) -> bool:
        """Whether *frame* belongs to a message, and nothing before it is held up."""
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
        """What held up the channel is done."""
        self.held_up = self._lets_publish = False
        if (self.backlog or self._deferred is not None) and not self.closing:
            self.engine.schedule(self)

    def _when_stored(self, queue: str, method: m.Method, step: Callable[[], None]) -> None:
        """Do *step*, for *method*, once the messages that were published to *queue* before are in it.

        A method sees the effects of those before it on its channel (§4.4), and a message that is being
        written to the store is in no queue yet. Other channels are not held up.
        """
        topology = self.engine.topology

        def go_on_with(following: Callable[[], None]) -> None:
            if self.closing or self.ended:
                return
            self._deferred = following
            self.resume()

        def again() -> None:
            self._when_stored(queue, method, step)

        def done() -> None:
            self.engine.context = method
            step()

        link = self._senders.get(queue)
        if link is not None and not (link.attached or link.over):
            # The right to send there is still being asked for.
            self.held_up = True
            link.on_answer = lambda _refused: go_on_with(again)
        elif topology is None or not topology.wait_stored(queue, partial(go_on_with, done)):
            done()
        else:
            self.held_up = True

    def _work(self, steps: Generator[int, None, None]) -> None:
        """Do *steps*, which yield what they are worth in frames.

        What is too much for one turn is done in later ones, and frames of the channel wait meanwhile.
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
        """Take what was held up, until something holds it up again; of much the rest comes later."""
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
        # What comes with each message goes the short way.
        engine = self.engine
        if payload.startswith(_PUBLISH_CODE):
            known = engine.recents.methods.get(payload)
            if known is None:
                known = _read_publish(payload)
                if known is None:
                    # Something is wrong with it, or nearly.
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
            raise Fault(faults.COMMAND_INVALID, f"{method.name} is nothing that a client says here")
        try:
            handler(self, method)
        except AmqpError as error:
            raise Fault.of(error) from error

    def _on_content(
        self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes
    ) -> None:
        self._on_publish(method, properties, body)

    # --- the end -------------------------------------------------------------------------

    @property
    def links(self) -> Mapping[int, Link]:
        """Its links, by number."""
        return {link.handle: link for link in sorted(self._links, key=lambda each: each.handle)}

    def end(self, error: Error | None = None) -> None:
        """Nothing happens on it any more: what the client has in hand goes back (§4.5).

        With an *error* it is we who end it, and the client is told.
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
        # Each of them refers to the channel: no cycle is to keep it, and its connection.
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
        """We never stop the client so: there is nothing to do."""

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
                    # The book's code for a type that there is not.
                    raise Fault(faults.COMMAND_INVALID, error.description) from error
                raise
        if not method.no_wait:
            self.write(m.ExchangeDeclareOk())

    def _on_exchange_delete(self, method: m.ExchangeDelete) -> None:
        try:
            self._topology.delete_exchange(method.exchange, if_unused=method.if_unused)
        except AmqpError as error:
            # Deleting what is not there is no mistake (RabbitMQ).
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
            # Somebody wants to know whether it may answer there.
            found = method.queue == REPLY_TO or self.engine.replies.get(method.queue) is not None
            if not found:
                raise Fault(faults.NOT_FOUND, "nobody waits for replies there any more")
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
            # Both left out, the key is the queue's name (§1.7.2.3).
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
            for count in purging:  # noqa: B007 - the last one counts
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
        """The next delivery-tag; they count from 1 on each channel."""
        self._last_tag += 1
        return self._last_tag

    def room(self) -> int:
        """Unanswered messages that there may still be on the channel."""
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
            # RabbitMQ's reading: for each consumer that comes from now on.
            self._prefetch = method.prefetch_count
        self.write(m.BasicQosOk())
        self._offer_credit()

    def _look(self, queue: str) -> int:
        """How many messages wait in *queue*. One that is not there may be made on its first use, or be
        a node of the application: then whoever is asked for the link says so.

        Raises:
            AmqpError: The queue is exclusive to another connection.
        """
        topology = self.engine.topology
        if topology is None:
            return 0
        try:
            return topology.queue(queue).messages
        except AmqpError as error:
            # The link that takes the message is refused with the right that is missing.
            if error.condition not in ("amqp:not-found", "amqp:unauthorized-access"):
                raise
            return 0

    def _request(self, link: Link) -> None:
        """Ask for *link*; the channel is held up until somebody answers."""
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
                # Another consumer is exclusive, or this one wants to be.
                refused = Error("amqp:unauthorized-access", refused.description)
            self.engine.fail(self, Fault.of(refused), method)
            return
        self.consumers[link.tag] = link
        if not method.no_wait:
            self.write(m.BasicConsumeOk(consumer_tag=link.tag))
        self.resume()

    def _consumer_ended(self, link: SendingLink, error: Error | None) -> None:
        """Its queue has gone, or its right to it: tell the client, if it wants to know."""
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
                # They can still be answered; the link goes with the last one of them.
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
        """The client has heard that its consumer is gone."""

    def _drop(self, link: Link) -> None:
        self._links.discard(link)
        link.end(None, True)

    def convert(self, octets: bytes, link: SendingLink) -> Content:
        """A message as this protocol says it.

        Raises:
            LocalProtocolError: It cannot.
        """
        address = "" if link.source is None else str(link.source.address)
        try:
            return from_message(octets, address, self.engine.limits)
        except AmqpError as error:
            raise LocalProtocolError(f"the message is malformed: {error.description}") from error

    def deliver(
        self, link: SendingLink, payload: bytes, context: Any, settled: bool
    ) -> OutgoingDelivery:
        """Give a message of AMQP 1.0 to a consumer.

        Raises:
            LocalProtocolError: It cannot be said here.
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
        # It takes several frames, or not all of it can be said.
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
        """Have one message of the queue, or none if there is none."""

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
        """The client answers its messages (§1.8.3.13)."""
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
        """Say *outcome* of *deliveries*: of many a few at a time."""
        size = _ANSWERS_OF_A_STEP
        if len(deliveries) <= size:
            self.engine.spend(_ANSWER_WORK * len(deliveries))
            self._conclude(deliveries, outcome)
            return

        def steps() -> Generator[int, None, None]:
            for at in range(0, len(deliveries), size):
                # Some may have been taken away since.
                chosen = [
                    each for each in deliveries[at : at + size] if each.number in self.unacked
                ]
                self._conclude(chosen, outcome)
                self.engine.flush()
                yield _ANSWER_WORK * size

        self._work(steps())

    def _conclude(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Say *outcome* of *deliveries*: with what else the client answers in this chunk, outside of
        transactions."""
        if self._control is not None:
            self._enlist(deliveries, outcome)
            return
        engine = self.engine
        for delivery in deliveries:
            link = delivery.link
            link.forget(delivery)
            # If it is not attached, its queue has been deleted meanwhile.
            if link.attached:
                delivery.state = outcome
                delivery.settled = True
                delivery.remote_settled = True
                engine.answer(link, delivery)

    def conclude(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Tell the queue what was answered, and have more of it."""
        if link.attached:
            link.endpoint.on_outcomes(link, deliveries)
            self._after_answer(link)
            if self._prefetch_all or self._prefetch_size:
                self._offer_credit()

    def _enlist(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Say *outcome* of *deliveries* in the transaction."""
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
            # It was cancelled, and this was the last that it had.
            self._drop(link)

    def _offer_credit(self) -> None:
        """Consumers may have more than before."""
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
        # Nobody can guess it: who knows it has been asked.
        self._reply_address = f"{REPLY_TO}.{secrets.token_urlsafe(24)}"
        self.engine.replies[self._reply_address] = self
        if not method.no_wait:
            self.write(m.BasicConsumeOk(consumer_tag=tag))

    def reply(self, address: str, properties: m.BasicProperties, body: bytes) -> bool:
        """Deliver a reply to this channel; False if its consumer is gone or does not read.

        A consumer that does not read gets ``output_max`` bytes and no more: replies have neither credit
        nor a queue in which they could wait.
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
            # Whoever asks next has another address.
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
        # Of the messages of one chunk that say the same it is found out once where they go: nothing
        # happens between them.
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
        """Hand a message to all queues that it goes to, yielding what that is worth in frames.

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
        """Find out who takes a message."""
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
        """The payload for all queues, who hears what became of it, and its transaction.

        None if there is no queue, which is answered at once.
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
        """The message of AMQP 1.0."""
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
        """Who takes messages for node *name*, and the link on which they come."""
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
        """Nobody gets the message."""
        if method.mandatory:
            self.give_back(method, properties, body)
        if number:
            self.confirm(number, acknowledged=True)

    def give_back(self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes) -> None:
        """Return what was mandatory and goes nowhere."""
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
        """End the channel if a message of a publisher that awaits no confirm breaks a rule.

        A message that goes nowhere, or finds no room, is dropped as the book wants it: the way in has
        logged that. What the publisher could mend it has to learn, and there is no other way to say it.
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
        """Message *number* is kept by all who got it, or is not."""
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
        """Say what has been confirmed, in as few words as that takes."""
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
        """Begin a transaction, and then say *answer*."""

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
                    # It is as if nothing had been said of it.
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
    """Whether headers name more routing keys."""
    headers = properties.headers
    return headers is not None and ("CC" in headers or "BCC" in headers)


def _keys(key: str, properties: m.BasicProperties, keys_max: int) -> list[str]:
    """The routing key with those of the headers ``CC`` and ``BCC`` (RabbitMQ's sender-selected
    distribution).

    Raises:
        Fault: They are no keys, or too many.
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
    """The properties as others see them."""
    headers = properties.headers
    if not headers or "BCC" not in headers:
        return properties
    seen = {name: value for name, value in headers.items() if name != "BCC"}
    return replace(properties, headers=seen)


def _read_publish(payload: bytes) -> Published | None:
    """``basic.publish`` from its octets; None if it is ill, or names what is no text."""
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
    """How consumers are told of such messages; None if it cannot be said."""
    try:
        return Delivered(
            content.redelivered,
            write_shortstr(content.exchange) + write_shortstr(content.routing_key),
            write_header(ContentHeader(BASIC, 0, content.properties))[12:],
        )
    except ValueError:
        return None


def _said_to(link: SendingLink) -> bytes:
    """How ``basic.deliver`` to a consumer begins."""
    link.said = _DELIVER_CODE + write_shortstr(link.tag)
    return link.said


def _offset(value: object) -> object:
    """``x-stream-offset`` as a filter of AMQP 1.0."""
    if isinstance(value, Seconds):
        return Timestamp(value.value * 1000)
    return value


def _fault_of(outcome: Any) -> Fault:
    """Why a transaction was not done."""
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
