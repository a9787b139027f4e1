"""Senders, receivers and calls of containers with observers.

Separate classes, so that others do not even check whether they are observed. Handlers are observed by
:class:`~amqp_rt.container.serving.ObservedRun`, and links of ``@node.link`` by the classes of ``observed_feeding``.
Steps that each message takes are in :mod:`.observing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Unpack

from ..errors import AmqpError, ConnectionLost
from ..events import Peer
from ..fronts.base import OutgoingDelivery, Payload, SendingLink
from ..message import Message
from ..observers import (
    Kind,
    ObservedLink,
    ObservedOperation,
    Observer,
    UnreadObserver,
    bind,
    error_of,
)
from ..outcomes import Outcome
from ..trace_context import TRACEPARENT, with_trace
from .composing import MessageProperties
from .connections import Connection, LinkClasses, Session
from .deliveries import Delivery, unread
from .observing import ObservedReceiptSteps, ObservedSenderSteps, end_accepted
from .pending_calls import PendingCall
from .receiving import Receiver
from .requests import Outgoing, Requests, StreamedReply, StreamLink
from .sending import Receipt, Sender

if TYPE_CHECKING:
    from .transactions import Transaction


#: Addresses whose observers a connection keeps for its calls.
_OBSERVERS_MAX: Final = 1_024


def _peer_of(connection: Connection) -> Peer | None:
    try:
        return connection.peer
    except ConnectionLost:
        return None


def observers_of(connection: Connection, kind: Kind, address: str | None) -> UnreadObserver | None:
    """Bind the observers of *connection*'s container to a link of *kind* that we open on it."""
    observers: Sequence[Observer] = connection.container.observers
    peer = _peer_of(connection)
    link = ObservedLink(kind=kind, address=address or "", peer=peer, dialled=connection.dialled)
    return bind(observers, link)


class ObservedReceipt(ObservedReceiptSteps, Receipt):
    """Receipt that ends the operation of its message."""

    __slots__ = ()


class ObservedSending(ObservedSenderSteps, Sender):
    """Sender whose observers hear of each message: the operation begins when it is encoded, and ends with its outcome."""

    def _begin(self, link: Any) -> None:
        # Before the messages that wait leave; the address may be one that the peer has created.
        self._bound = False
        super()._begin(link)

    async def send(
        self,
        message: object,
        *,
        transaction: Transaction | None = None,
        **properties: Unpack[MessageProperties],
    ) -> Outcome:
        """Send a message and wait for its outcome; see :meth:`Sender.send`. Cancelling ends the operation."""
        if self.pending >= self.max_pending:
            await self._wait_for_room()
        payload = self.encode(message, properties)
        operation = self.begun
        try:
            return await self._send(payload, 0, transaction)
        except BaseException as error:
            self._forget_begun()
            if operation is not None:
                operation.end("cancelled" if not isinstance(error, Exception) else error_of(error))
            raise

    def send_nowait(
        self,
        message: object,
        *,
        transaction: Transaction | None = None,
        **properties: Unpack[MessageProperties],
    ) -> Receipt:
        """Send a message, or queue it for credit, without waiting; see :meth:`Sender.send_nowait`."""
        payload = self.encode(message, properties)
        operation = self.begun
        try:
            return self._send_nowait(payload, 0, transaction)
        except AmqpError as error:
            self._forget_begun()
            if operation is not None:
                operation.end(error_of(error))
            raise

    def _forget_begun(self) -> None:
        """Forget the operation of a message that got no receipt: it is not that of the next one."""
        self.encoded, self.begun = False, None

    def _submit_all(
        self, submitted: list[Any], payloads: list[Payload], receipts: deque[Any]
    ) -> bool:
        """Submit messages, and end the operations of those that are not sent because one before them was not."""
        before = len(receipts)
        why = "cancelled"
        try:
            return super()._submit_all(submitted, payloads, receipts)
        except AmqpError as error:
            why = error_of(error)
            raise
        finally:
            for receipt in submitted[len(receipts) - before :]:
                if receipt.operation is not None:
                    receipt.operation.end(why)

    def withdraw(self, receipt: Receipt) -> bool:
        """Withdraw the message if it has not left, which cancels its operation."""
        waits = receipt.raw is None and not receipt.done
        if waits and isinstance(receipt, ObservedReceipt):
            receipt.end_operation("cancelled")
        return super().withdraw(receipt)

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """End the operations of accepted messages, and handle states that the receiver has sent."""
        end_accepted(deliveries)
        super().on_outcomes(link, deliveries)

    def begin_stream(self, front: Message) -> Receipt:
        """Send or queue the beginning of *front*, with the trace context of its operation.

        Raises:
            LinkDetached: The sender is closed, or its link has ended permanently.
            ConnectionLost: The connection has ended permanently.
        """
        self.begun = operation = self.begin_operation(front)
        self.encoded = True
        return super().begin_stream(
            front if operation is None else with_trace(front, operation.trace)
        )


class ObservedSender(ObservedSending):
    """Observed sender on a link that we open."""

    def __init__(self, session: Session, address: str | None, **options: Any) -> None:
        super().__init__(session, address, **options)
        self._receipts = self._own_receipts = ObservedReceipt
        self._connection = session.connection

    def _bind_observer(self) -> UnreadObserver | None:
        return observers_of(self._connection, "send", self.address)


class ObservedReceiving(Receiver):
    """Receiver whose observers hear of each delivery that is taken, and of its outcome."""

    _observer: UnreadObserver | None = None
    _settling: UnreadObserver | None = None

    def _take(self) -> Delivery:
        delivery = super()._take()
        if self._observer is not None:
            found = unread(delivery.raw)
            operation = self._observer.begin_unread(found)
            if found.message is not None:
                delivery.keep(found.message)
            if operation is not None:
                operation.end()
        if self._settling is None:
            return delivery
        return delivery.observed_by(self._settling)


class ObservedReceiver(ObservedReceiving):
    """Observed receiver on a link that we open."""

    def __init__(self, session: Session, address: str | None, **options: Any) -> None:
        super().__init__(session, address, **options)
        self._connection = session.connection

    def _begin(self, link: Any) -> None:
        super()._begin(link)
        self._observer = observers_of(self._connection, "receive", self.address)
        self._settling = observers_of(self._connection, "settle", self.address)


class _TracedProperties(dict[str, Any]):
    """Properties of a request with the operation that it belongs to."""

    operation: ObservedOperation


class ObservedRequests(Requests):
    """Calls with observers. Under policies each attempt is an operation of its own."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        #: Address → its observer. An application calls few addresses, or chooses them itself.
        self._observers: dict[str, UnreadObserver | None] = {}
        self._streams: dict[PendingCall, ObservedOperation] = {}

    def _begin_call(self, address: str) -> ObservedOperation | None:
        if address not in self._observers:
            if len(self._observers) >= _OBSERVERS_MAX:
                self._observers.clear()
            self._observers[address] = observers_of(self._connection, "call", address)
        observer = self._observers[address]
        return None if observer is None else observer.begin(None)

    def _request(
        self,
        sender: Sender,
        reply_to: str | None,
        args: tuple[Any, ...],
        deadline: float,
        properties: Mapping[str, Any],
    ) -> PendingCall:
        call = super()._request(sender, reply_to, args, deadline, properties)
        if isinstance(properties, _TracedProperties):
            properties.operation.identify(call.key, call.key)
        return call

    async def call(
        self,
        address: str,
        args: tuple[Any, ...],
        kind: Any,
        within: float | None,
        properties: Mapping[str, Any],
    ) -> Any:
        """Send a request and wait for its reply; see :meth:`Connection.call`."""
        operation = self._begin_call(address)
        if operation is None:
            return await super().call(address, args, kind, within, properties)
        error: str | None = "cancelled"
        try:
            traced = _traced(operation, args, properties, properties)
            found = await super().call(address, args, kind, within, traced)
            error = None
        except Exception as failure:
            error = error_of(failure)
            raise
        finally:
            operation.end(error)
        return found

    async def attempt(self, outgoing: Outgoing) -> Message:
        """Send *outgoing* once and return its reply, as :meth:`Requests.attempt` does."""
        operation = self._begin_call(outgoing.address)
        if operation is None:
            return await super().attempt(outgoing)
        error: str | None = "cancelled"
        given = outgoing.properties
        try:
            outgoing.properties = _traced(operation, outgoing.args, outgoing.own, given)
            reply = await super().attempt(outgoing)
            error = None
        except Exception as failure:
            error = error_of(failure)
            raise
        finally:
            outgoing.properties = given
            operation.end(error)
        return reply

    async def begin(self, stream: StreamedReply) -> tuple[StreamLink, PendingCall]:
        """Send the request of *stream*. If cancelled, nothing was sent."""
        operation = self._begin_call(stream.address)
        if operation is None:
            return await super().begin(stream)
        try:
            stream.properties = _traced(operation, stream.args, stream.own, stream.properties)
            parts, call = await super().begin(stream)
        except BaseException as error:
            operation.end("cancelled" if not isinstance(error, Exception) else error_of(error))
            raise
        self._streams[call] = operation
        return parts, call

    def end(self, parts: StreamLink, call: PendingCall, *, complete: bool) -> None:
        """End a stream, and its operation. Not a checkpoint."""
        operation = self._streams.pop(call, None)
        if operation is not None:
            error = None if complete else "cancelled"
            operation.end(error if call.failure is None else error_of(call.failure))
        super().end(parts, call, complete=complete)


#: Classes of links and calls where there are observers.
OBSERVED: Final = LinkClasses(ObservedSender, ObservedReceiver, ObservedRequests)


def _traced(
    operation: ObservedOperation,
    args: tuple[Any, ...],
    own: Mapping[str, Any],
    properties: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Return *properties* of a request with the trace context of *operation*, and the operation itself.

    A trace context that the application has given, among its *own* properties, stays.
    """
    traced = _TracedProperties(properties)
    traced.operation = operation
    given = own.get("application_properties")
    if given is None and len(args) == 1 and isinstance(args[0], Message):
        given = args[0].application_properties
    if operation.trace and not (given and TRACEPARENT in given):
        traced["application_properties"] = {**(given or {}), **operation.trace}
    return traced
