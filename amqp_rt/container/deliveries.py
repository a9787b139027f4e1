"""Deliveries as applications hold them: a message, and methods that set its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from ..errors import DecodeError, LocalProtocolError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..limits import Limits
from ..message import MESSAGE_FORMAT, Message
from ..observers import UnreadObserver, error_of
from ..outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, Modified, Outcome, Rejected
from ..transactions import TransactionalState
from ..unread import UnreadMessage
from ..values import Symbol
from .codecs import Codecs, default_codecs
from .raising import RaisedOutcome, is_undecodable, with_pause
from .streams import ByteStream

if TYPE_CHECKING:
    from .transactions import Transaction

T = TypeVar("T")


class DeliveryHolder:
    """Base of receivers: a delivery refers to its receiver, to give back its room."""

    @property
    def codecs(self) -> Codecs:
        """Codecs of payloads."""
        raise NotImplementedError

    def freed(self, raw: IncomingDelivery) -> None:
        """Free the room of *raw*, which has its outcome."""
        raise NotImplementedError

    async def wait_settled(self, raw: IncomingDelivery) -> None:
        """Wait until the sender has settled a delivery, *raw* or another."""
        raise NotImplementedError


class Delivery:
    """Delivery of a message, with methods that set its outcome (Part 3 §3.4).

    Setting an outcome sends it at once and does not wait. ``async with delivery:`` (or ``with``)
    sets one at the end of the block, unless the block has set one: *accepted* at its normal end,
    and *released* if it was cancelled. ``Reject``, ``Release`` and ``Modify`` set the outcome of
    that name, and are not raised further. Any other exception is raised further, and sets *modified
    (delivery-failed)*, or *rejected* for a ``DecodeError``.
    """

    __slots__ = ("_codecs", "_message", "raw")

    def __init__(self, raw: IncomingDelivery, codecs: Codecs | None = None) -> None:
        #: The delivery of the engine's link.
        self.raw = raw
        self._message: Message | None = None
        self._codecs = codecs

    def observed_by(self, observer: UnreadObserver) -> ObservedDelivery:
        """Return the delivery with an observer of its outcomes."""
        return ObservedDelivery(self.raw, observer, self._codecs, self._message)

    def keep(self, message: Message) -> None:
        """Keep *message*, the one of the delivery, which has been decoded already."""
        self._message = message

    # --- the message ---------------------------------------------------------------------

    @property
    def message(self) -> Message:
        """Message, whose sections are decoded on first use.

        Raises:
            DecodeError: The payload is not a message.
            LocalProtocolError: The message is being streamed: use :meth:`head` and :meth:`chunks`.
        """
        if self._message is None:
            if self.raw.message_format != MESSAGE_FORMAT:
                raise DecodeError(
                    f"message-format {self.raw.message_format:#x} is not known here: use payload"
                )
            if _stream_of(self.raw) is not None:
                raise LocalProtocolError("the message is being streamed: use head() and chunks()")
            self._message = Message.decode(self.raw.payload)
        return self._message

    @property
    def body(self) -> Any:
        """Body of the message without conversion: bytes, a sequence, or a value."""
        return self.message.body

    @property
    def payload(self) -> bytes:
        """Encoded message, in any format."""
        return self.raw.payload

    def decode(self, kind: type[T]) -> T:
        """Decode the body as *kind*, according to the message's content-type.

        Raises:
            DecodeError: The body is not a valid *kind*; the reason names the field, and ``info["errors"]`` has
                path and message of each fault.
            TypeError: *kind* is not a type that payloads can be decoded as.
        """
        codecs = self._codecs
        if codecs is None:
            receiver = _receiver_of(self.raw)
            codecs = default_codecs() if receiver is None else receiver.codecs
        found: T = codecs.decoding(kind)(self.message, kind)
        return found

    def chunks(self) -> ByteStream:
        """Return the body of a streamed message as it arrives, to be iterated over once.

        Waiting for the next chunk may be cancelled: nothing is lost.

        Raises:
            LocalProtocolError: The receiver is not streaming.
        """
        stream = _stream_of(self.raw)
        if stream is None:
            raise LocalProtocolError("the receiver is not streaming: the body is here at once")
        return stream

    async def head(self) -> Message:
        """Return the message without its body; if it is streamed, once the body begins.

        Cancelling loses nothing.

        Raises:
            DecodeError: The message is malformed.
            AmqpError: The sender aborted the message, or the link has ended.
        """
        stream = _stream_of(self.raw)
        if stream is None:
            await trio.lowlevel.checkpoint()
            return self.message
        return await stream.head()

    # --- the delivery --------------------------------------------------------------------

    @property
    def tag(self) -> bytes:
        """Delivery-tag (Part 2 §2.8.7)."""
        return self.raw.tag

    @property
    def message_format(self) -> int:
        """Message-format: 0 for messages of Part 3, else a format of the sender's own."""
        return self.raw.message_format

    @property
    def link(self) -> ReceivingLink:
        """Link of the delivery."""
        return self.raw.link

    @property
    def presettled(self) -> bool:
        """Whether the sender has settled: then it does not get our outcome."""
        return self.raw.settled

    @property
    def outcome(self) -> Outcome | None:
        """Outcome that we have set, possibly in a transaction; None if there is none."""
        said = self.raw.local_state
        if type(said) is TransactionalState:
            said = said.outcome
        return cast("Outcome | None", said)

    def accept(self, *, transaction: Transaction | None = None) -> None:
        """Set the outcome *accepted*: the message is processed, and the sender may forget it."""
        self.settle(ACCEPTED, transaction=transaction)

    def release(self, *, transaction: Transaction | None = None) -> None:
        """Set the outcome *released*: not processed and not changed, to be delivered again."""
        self.settle(RELEASED, transaction=transaction)

    def modify(
        self,
        *,
        failed: bool = True,
        undeliverable_here: bool = False,
        annotations: Mapping[object, object] | None = None,
        delay_s: float | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        """Set the outcome *modified*: not processed, and changed as given (Part 3 §3.4.5).

        Args:
            failed: The attempt counts: ``delivery-count`` is increased.
            undeliverable_here: The message is not to be sent to this link again.
            annotations: Entries to merge into the message annotations.
            delay_s: Seconds for which a queue of this broker keeps the message before it delivers it again. It is
                the annotation ``x-opt-delivery-delay`` of the outcome; other brokers may only store it.
            transaction: As for :meth:`settle`.

        Raises:
            ValueError: *delay_s* is negative or not finite, or *failed* is False.
        """
        changes = with_pause(annotations, delay_s, failed=failed)
        self.settle(Modified(failed, undeliverable_here or None, changes), transaction=transaction)

    def reject(
        self,
        description: str = "",
        *,
        condition: str = "amqp:precondition-failed",
        info: Mapping[object, object] | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        """Set the outcome *rejected*: invalid, never to be processed; the sender gets the error."""
        self.settle(
            Rejected(Error(Symbol(condition), description or None, info)), transaction=transaction
        )

    def settle(self, outcome: Outcome, *, transaction: Transaction | None = None) -> None:
        """Set *outcome*. Setting the same one again, or on a link that has ended, has no effect.

        Args:
            outcome: The outcome.
            transaction: The outcome takes effect when this is committed. Until then, and if it is
                rolled back, we still hold the delivery, and can set another outcome afterwards.

        Raises:
            LocalProtocolError: Another outcome has been set, or *transaction* is not open or
                belongs to another connection.
            TransactionRolledBack: *transaction* cannot be committed any more.
            LinkDetached: The link has ended, so that no outcome can be set within *transaction*.
        """
        if transaction is not None:
            transaction.retire(self, outcome)
            return
        self.raw.settle(outcome)
        self._release()

    def retract_outcome(self, txn_id: bytes) -> bool:
        """Remove the outcome set in the transaction *txn_id*; return whether there was one."""
        said = self.raw.local_state
        if type(said) is not TransactionalState or said.txn_id != txn_id:
            return False
        self.raw.local_state = None
        return True

    def _release(self) -> None:
        """Free the room of a delivery with an outcome, and drop the rest of a streamed message."""
        context = self.raw.context
        if isinstance(context, DeliveryHolder):
            context.freed(self.raw)
        elif isinstance(context, StreamedBody):
            context.stream.close()
            context.receiver.freed(self.raw)

    async def settled(self) -> None:
        """Wait until the sender has settled; returns at once if we settle with our outcome.

        If cancelled, the outcome remains as it was sent.

        Raises:
            LinkDetached: The link ended before the sender settled: whether it received our outcome
                is in doubt.
            ConnectionLost: The connection was lost, with the same doubt.
        """
        await trio.lowlevel.checkpoint()
        raw = self.raw
        while raw.second and not raw.settled:
            receiver = _receiver_of(raw)
            if receiver is None:
                raise LocalProtocolError("only deliveries of a receiver can be waited for")
            await receiver.wait_settled(raw)

    # --- as a block ----------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> bool:
        """Set the outcome for the end of the block; return whether *error* goes no further."""
        meant = isinstance(error, RaisedOutcome)
        if type(self.raw.local_state) is TransactionalState:
            # The end of its transaction decides.
            return meant
        if self.outcome is not None or self.raw.settled:
            self._release()
        elif error is None:
            self.accept()
        elif isinstance(error, RaisedOutcome):
            self.settle(error.outcome)
        elif is_undecodable(error):
            self.reject(error.description, condition=error.condition, info=error.info or None)
        elif isinstance(error, Exception):
            self.settle(MODIFIED_FAILED)
        else:
            self.release()
        return meant

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._end(error)

    async def __aenter__(self) -> Delivery:
        """Return the delivery. Not a checkpoint."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Set the outcome. Not a checkpoint: this cannot be cancelled."""
        return self._end(error)

    def __repr__(self) -> str:
        return f"<Delivery {self.tag.hex()}: {len(self.raw.payload)} bytes, {self.outcome}>"


class ObservedDelivery(Delivery):
    """Delivery whose outcomes are observed."""

    __slots__ = ("_observer",)

    def __init__(
        self,
        raw: IncomingDelivery,
        observer: UnreadObserver,
        codecs: Codecs | None = None,
        message: Message | None = None,
    ) -> None:
        super().__init__(raw, codecs)
        self._observer = observer
        self._message = message

    def settle(self, outcome: Outcome, *, transaction: Transaction | None = None) -> None:
        """Set *outcome*; see :meth:`Delivery.settle`."""
        operation = self._observer.begin_unread(unread(self.raw, self._message))
        error: str | None = None
        try:
            super().settle(outcome, transaction=transaction)
        except Exception as failure:
            error = error_of(failure)
            raise
        finally:
            if operation is not None:
                operation.end(error)


def unread(delivery: IncomingDelivery, message: Message | None = None) -> UnreadMessage:
    """Return the message of *delivery* for observers; *message* is the one that has been decoded already."""
    if delivery.message_format != MESSAGE_FORMAT or not delivery.complete:
        return UnreadMessage(None)
    return UnreadMessage(delivery.payload, message)


class StreamedBody:
    """Context of a delivery of a streaming receiver."""

    __slots__ = ("receiver", "stream")

    def __init__(self, receiver: DeliveryHolder, raw: IncomingDelivery, limits: Limits) -> None:
        self.receiver = receiver
        self.stream = ByteStream(raw, limits)


def _stream_of(raw: IncomingDelivery) -> ByteStream | None:
    context = raw.context
    if isinstance(context, StreamedBody):
        return context.stream
    # A node that was declared with streaming=True keeps the stream itself.
    return context if isinstance(context, ByteStream) else None


def _receiver_of(raw: IncomingDelivery) -> DeliveryHolder | None:
    context = raw.context
    if isinstance(context, StreamedBody):
        return context.receiver
    return context if isinstance(context, DeliveryHolder) else None
