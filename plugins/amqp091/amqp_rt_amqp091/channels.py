"""Channels that clients open (0-9-1 §1.3 to §1.9, with RabbitMQ's extensions).

A channel reads frames and passes each method to the part that carries it out. Its parts own their
state; they are made in the order in which they need each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, Final

from amqp_rt.fronts import ACCEPTED, AmqpError, Error
from amqp_rt.fronts.links import FrontLink
from amqp_rt.fronts.recent import OCTETS_MAX

from . import faults
from . import methods as m
from .confirms import Confirms
from .consumers import Consumers
from .contents import BaseChannel
from .declaring import Declarations
from .deliveries import DeliveryWriter
from .execution import Execution
from .faults import Fault
from .frames import METHOD, Frame
from .getting import Getters
from .publishing import Publisher
from .recent import read_publish
from .replies import DirectReplies
from .routes import Routes
from .sessions import Session
from .settling import Settlement
from .transactions import Transactions
from .window import DeliveryWindow

if TYPE_CHECKING:
    from .engine import Engine

_PUBLISH_CODE: Final = m.BasicPublish.code.to_bytes(4, "big")
_ACK_CODE: Final = m.BasicAck.code.to_bytes(4, "big")
_ACK: Final = Layout(">IQB")
#: Start of the content header of a message: class and weight.
_BASIC_HEADER: Final = b"\0\x3c\0\0"
#: Cost in frames of a method that is neither a publish nor an ack: it declares something, or
#: attaches a link.
_METHOD_WORK: Final = 20


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
        session = Session(engine, number, self)
        execution = Execution(session)
        window = DeliveryWindow()
        writer = DeliveryWriter(session, window)
        routes = Routes(session, execution)
        replies = DirectReplies(session, execution, window, writer)
        confirms = Confirms(session)
        declarations = Declarations(session, execution, routes)
        consumers = Consumers(session, execution, window, writer, declarations, replies)
        transactions = Transactions(session, execution, consumers, confirms)
        self.session: Session = session
        self.execution: Execution = execution
        self.window: DeliveryWindow = window
        self.routes: Routes = routes
        self.replies: DirectReplies = replies
        self.confirms: Confirms = confirms
        self.declarations: Declarations = declarations
        self.consumers: Consumers = consumers
        self.transactions: Transactions = transactions
        self.getters: Getters = Getters(session, execution, window, writer, declarations, routes)
        self.settlement: Settlement = Settlement(
            session, execution, window, consumers, transactions
        )
        self.publisher: Publisher = Publisher(
            session, execution, routes, confirms, transactions, replies
        )

    # --- frames --------------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame of this channel, or hold it behind a method that is not complete.

        Raises:
            Fault: The frame is not allowed now, or its method failed.
        """
        execution = self.execution
        if self.closing:
            self._on_frame_while_closing(frame)
        elif (execution.held_up or execution.backlog or execution.deferred is not None) and not (
            execution.lets_publish and self._may_overtake(frame)
        ):
            execution.hold(frame)
        else:
            self.take(frame)

    def _may_overtake(self, frame: Frame) -> bool:
        """Whether *frame* is part of a publish and no frame is held up before it."""
        return (
            not self.execution.backlog
            and self.execution.deferred is None
            and (frame.type != METHOD or frame.payload.startswith(_PUBLISH_CODE))
        )

    def _on_method_octets(self, payload: bytes) -> None:
        # Fast path for the methods that come with each message: basic.publish and basic.ack.
        engine = self.engine
        if payload.startswith(_PUBLISH_CODE):
            publisher = self.publisher
            publisher.method_octets = payload
            known = engine.recents.methods.get(payload)
            if known is None:
                known = read_publish(payload)
                if known is None:
                    # Malformed, or not UTF-8: the general decoder reports which.
                    publisher.place = None
                    super()._on_method_octets(payload)
                    return
                if len(payload) <= OCTETS_MAX:
                    engine.recents.methods.put(payload, known)
            engine.context = self._carrier = known.method
            publisher.place = known.place
        elif payload.startswith(_ACK_CODE) and len(payload) == _ACK.size:
            _, tag, bits = _ACK.unpack(payload)
            engine.context = m.BasicAck(delivery_tag=tag, multiple=bool(bits & 1))
            self.settlement.settle(tag, multiple=bool(bits & 1), outcome=ACCEPTED)
        else:
            super()._on_method_octets(payload)

    def _on_header(self, payload: bytes) -> None:
        self.publisher.header_octets = octets = payload[12:]
        known = self.engine.recents.properties.get(octets) if payload[:4] == _BASIC_HEADER else None
        if known is not None and self._carrier is not None and self._properties is None:
            self._begin(known, int.from_bytes(payload[4:12], "big"))
            return
        super()._on_header(payload)

    def _begin(self, properties: m.BasicProperties, size: int) -> None:
        octets = self.publisher.header_octets
        if len(octets) <= OCTETS_MAX:
            self.engine.recents.properties.put(octets, properties)
        super()._begin(properties, size)

    def _on_method(self, method: m.Method) -> None:
        self.engine.flush()
        self.engine.spend(_METHOD_WORK)
        handler_of = _HANDLERS.get(type(method))
        if handler_of is None:
            raise Fault(faults.COMMAND_INVALID, f"{method.name} is not a method for clients here")
        try:
            handler_of(self)(method)
        except AmqpError as error:
            raise Fault.of(error) from error

    def _on_content(
        self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes
    ) -> None:
        self.publisher.publish(method, properties, body)

    def flush(self) -> None:
        """Send the confirms that are due."""
        self.confirms.flush()

    # --- opening and closing -------------------------------------------------------------

    @property
    def links(self) -> Mapping[int, FrontLink]:
        """Links of the channel, by handle."""
        links = sorted(self.session.links, key=lambda each: each.handle)
        return {link.handle: link for link in links}

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
        self.replies.end()
        self.session.end_links()
        self.consumers.end()
        self.getters.end()
        self.routes.end()
        self.transactions.end()
        self.execution.end()
        self.window.unacked.clear()
        self._end()
        self.session.end()

    def reject_open(self, method: m.ChannelOpen) -> None:
        """Refuse to open the channel again.

        Raises:
            Fault: Always.
        """
        raise Fault(faults.CHANNEL_ERROR, f"channel {self.number} is open already")

    def close(self, method: m.ChannelClose) -> None:
        """End the channel because the client closes it."""
        self.end()
        self.write(m.ChannelCloseOk())
        self.engine.release(self)

    def ignore(self, method: m.Method) -> None:
        """Ignore an answer: the consumer is removed already, and the flow is never stopped here."""


#: Method → function that returns what carries it out on a channel.
_HANDLERS: Final[Mapping[type[m.Method], Callable[[Channel], Callable[[Any], None]]]] = {
    m.ChannelOpen: lambda channel: channel.reject_open,
    m.ChannelFlow: lambda channel: channel.consumers.set_flow,
    m.ChannelFlowOk: lambda channel: channel.ignore,
    m.ChannelClose: lambda channel: channel.close,
    m.ExchangeDeclare: lambda channel: channel.declarations.declare_exchange,
    m.ExchangeDelete: lambda channel: channel.declarations.delete_exchange,
    m.ExchangeBind: lambda channel: channel.declarations.bind_exchange,
    m.ExchangeUnbind: lambda channel: channel.declarations.unbind_exchange,
    m.QueueDeclare: lambda channel: channel.declarations.declare_queue,
    m.QueueBind: lambda channel: channel.declarations.bind_queue,
    m.QueueUnbind: lambda channel: channel.declarations.unbind_queue,
    m.QueuePurge: lambda channel: channel.declarations.purge_queue,
    m.QueueDelete: lambda channel: channel.declarations.delete_queue,
    m.BasicQos: lambda channel: channel.consumers.set_bounds,
    m.BasicConsume: lambda channel: channel.consumers.consume,
    m.BasicCancel: lambda channel: channel.consumers.cancel,
    m.BasicCancelOk: lambda channel: channel.ignore,
    m.BasicGet: lambda channel: channel.getters.get,
    m.BasicAck: lambda channel: channel.settlement.acknowledge,
    m.BasicReject: lambda channel: channel.settlement.reject,
    m.BasicNack: lambda channel: channel.settlement.nack,
    m.BasicRecover: lambda channel: channel.settlement.recover,
    m.BasicRecoverAsync: lambda channel: channel.settlement.recover_async,
    m.ConfirmSelect: lambda channel: channel.publisher.select_confirms,
    m.TxSelect: lambda channel: channel.transactions.select,
    m.TxCommit: lambda channel: channel.transactions.commit,
    m.TxRollback: lambda channel: channel.transactions.roll_back,
}

__all__ = ["Channel"]
