"""Steps of senders that never wait: from an encoded message to its delivery, and from the delivery to its outcome.

Apart from :mod:`.sending`, whose classes add all that waits, so that they can be compiled: each message passes through
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, cast

import trio
from trio.lowlevel import reschedule

from ..compiling import mypyc_attr
from ..errors import AmqpError, LinkDetached, LocalProtocolError
from ..fronts.base import OutgoingDelivery, Payload, SendingLink
from ..message import Message
from ..outcomes import ACCEPTED, RELEASED, Accepted, Outcome, Received
from ..transactions import TransactionalState
from .encoding import encode_plain
from .links import Stage, refusal

#: Messages that are gathered for one run: what a link has no room for is gathered again when it has.
RUN_MESSAGES: Final = 64


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiptSteps:
    """State of a :class:`~.sending.Receipt`, and its steps."""

    #: The delivery; None until the message has left.
    raw: OutgoingDelivery | None = None
    #: Cause why the outcome will never be known.
    error: AmqpError | None = None
    _outcome: Outcome | None = None
    #: Tasks that wait for the outcome.
    _waiting: list[trio.lowlevel.Task] | None = None

    def __init__(
        self,
        sender: SenderSteps,
        payload: Payload,
        message_format: int = 0,
        *,
        unfinished: bool = False,
        transaction: Any = None,
    ) -> None:
        # What is not set before the message leaves is an attribute of the class: there is one of these per message.
        self._sender = sender
        #: Encoded message to send; dropped when it cannot be needed any more.
        self.payload: Payload = payload
        self.message_format = message_format
        #: Whether the payload is only the beginning of the message.
        self.unfinished = unfinished
        #: Transaction of the message, until it has an outcome; of the class
        #: :class:`~.transactions.Transaction`, whose module refers to this one.
        self.transaction: Any = transaction

    @property
    def done(self) -> bool:
        """Whether the outcome, or the cause of its absence, is known."""
        return self._outcome is not None or self.error is not None

    def withdraw(self) -> bool:
        """Withdraw the message if it has not left yet; return whether it was withdrawn."""
        return self._sender.withdraw(self)

    def give_up(self) -> None:
        """Withdraw the message, or if it has left, settle it without waiting for its outcome.

        Settling makes the receiver of a request cancel its handler.
        """
        if self.done or self._sender.withdraw(self):
            return
        if self.raw is not None:
            self.raw.settle()
        self.fail(LinkDetached("the sender gave up the message", condition="amqp:not-allowed"))

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome."""
        if self._outcome is None and self.error is None:
            self._outcome = outcome
            if self.raw is not None:
                # The delivery is over. A cycle of references would keep both in memory until Python collects them.
                self.raw.context = None
            self._settle()

    def fail(self, error: AmqpError) -> None:
        """Set the error for which the outcome will never be known."""
        if self._outcome is None and self.error is None:
            self.error = error
            if self.raw is not None and self.raw.settled:
                # As in finish(). Others may be resumed, and are found by their receipts then.
                self.raw.context = None
            self._settle()

    def _settle(self) -> None:
        self.payload = b""
        self._sender.done(self)
        transaction = self.transaction
        if transaction is not None:
            self.transaction = None
            error = self.error
            if error is None and type(self._outcome) is not Accepted:
                error = refusal(cast("Outcome", self._outcome))
            transaction.done(self, error)
        if self._waiting is not None:
            self._wake()

    def _wake(self) -> None:
        """Wake the tasks that wait for the outcome."""
        waiting, self._waiting = self._waiting, None
        for task in waiting or ():
            reschedule(task)


@mypyc_attr(allow_interpreted_subclasses=True)
class SenderSteps:
    """State of a :class:`~.sending.Sender`, and its steps.

    Args:
        receipts: Class of the receipts.
        max_pending: Messages without an outcome at most.
        settled: Whether messages are sent settled; None as the peer wants it.
        resends: Whether messages in doubt are sent again.
        anonymous: Whether messages are routed by their ``to``.
        plain: Whether messages are sent, and receipts finished, by the classes here and not by classes derived from them.
    """

    # These are of LinkHandle, which every sender is as well.
    _stage: Stage
    _raw: Any
    _codecs: Any
    _keeper: str | None
    changes: trio.lowlevel.ParkingLot

    def __init__(
        self,
        receipts: type[ReceiptSteps],
        *,
        max_pending: int,
        settled: bool | None,
        resends: bool,
        anonymous: bool,
        plain: bool,
    ) -> None:
        self.max_pending = max_pending
        self._settled = settled
        self._resends = resends
        self._anonymous = anonymous
        self._plain = plain
        #: Class of the receipts, which observed senders replace, and the one that is known here.
        self._receipts: Any = receipts
        self._own_receipts: Any = receipts
        #: Messages that wait for credit.
        self._queue: deque[Any] = deque()
        #: Messages that have left and have no outcome, in the order in which they left.
        self._unsettled: dict[Any, None] = {}
        #: Those of them whose outcome no task awaits, since their sending was cancelled.
        self._dropped: dict[Any, None] = {}
        #: The streamed message that is being written: no other message can leave meanwhile.
        self.open_stream: Any = None
        #: Tasks that wait to submit a message, and their number.
        self._room = trio.lowlevel.ParkingLot()
        self._crowd = 0

    def _refuse_if_over(self) -> None:
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Number of messages without an outcome, waiting for credit or sent."""
        return len(self._queue) + len(self._unsettled)

    def takes_now(self, most: int) -> bool:
        """Whether the link is attached, and fewer than *most* messages have no outcome."""
        # As attached and pending, without two more calls for each request.
        return self._stage == "attached" and len(self._queue) + len(self._unsettled) < most

    def submit(self, receipt: ReceiptSteps) -> None:
        """Send a message, or queue it.

        Raises:
            LinkDetached: The sender is closed, or its link has ended permanently.
            ConnectionLost: The connection has ended permanently.
        """
        if self._stage != "attached":
            self._refuse_if_over()
            self._queue.append(receipt)
            return
        link = self._raw
        if (
            not self._queue
            and self.open_stream is None
            and link.credit > 0
            and link.attached
            and link.writable
        ):
            self._transfer(link, receipt)
        else:
            self._queue.append(receipt)
            link.offer(len(self._queue))

    def submit_run(
        self,
        messages: Iterator[object],
        most: int,
        receipts: deque[Any],
        encode: Callable[[object], Payload] | None,
    ) -> tuple[int, bool]:
        """Encode and submit up to *most* of *messages*, and append their receipts.

        Args:
            messages: Messages, or payloads to create them from.
            most: Number of messages, at least 1.
            receipts: The list of receipts.
            encode: Encodes a message; None if there is nothing to add to a message or payload.

        Returns:
            The number of messages, and whether no more are to be submitted: there are none, or one could not be sent.

        Raises:
            LinkDetached: See :meth:`submit`.
            ConnectionLost: See :meth:`submit`.
        """
        new = self._receipts
        payloads: list[Payload] = []
        submitted: list[ReceiptSteps] = []
        try:
            for message in islice(messages, most):
                payload: Payload
                if encode is not None:
                    payload = encode(message)
                elif type(message) is not bytes and isinstance(message, Message):
                    payload = message.encode()
                else:
                    payload = encode_plain(message, self._codecs)
                payloads.append(payload)
                submitted.append(new(self, payload))
        except BaseException:
            # Those before the one that could not be taken or encoded are sent.
            self._submit_all(submitted, payloads, receipts)
            raise
        sent = self._submit_all(submitted, payloads, receipts)
        return len(submitted), len(submitted) < most or not sent

    def _submit_all(
        self, submitted: list[ReceiptSteps], payloads: list[Payload], receipts: deque[Any]
    ) -> bool:
        """Submit messages up to the first that cannot be sent, and append their receipts to *receipts*.

        Returns:
            Whether all could be sent.
        """
        count = 0
        if (
            self._plain
            and self._stage == "attached"
            and not self._queue
            and self.open_stream is None
            and (run := getattr(self._raw, "send_run", None)) is not None
        ):
            # As submit() and _transfer() do. Links of other protocols take messages one by one.
            count = self._have_left(submitted, run(payloads, submitted, self._settled))
            receipts += submitted[:count]
        while count < len(submitted):
            if self._queue and self._stage == "attached":
                # What submit() does where others wait already, without a call for each message.
                left = submitted[count:]
                self._queue += left
                receipts += left
                self._raw.offer(len(self._queue))
                return True
            receipt = submitted[count]
            count += 1
            self.submit(receipt)
            receipts.append(receipt)
            if receipt.error is not None:
                return False
        return True

    def _pump_run(self, queue: deque[Any]) -> None:
        """Send the first messages that wait, up to one that is not sent like most."""
        run = getattr(self._raw, "send_run", None)
        if run is None:
            return
        left = RUN_MESSAGES
        while left == RUN_MESSAGES:
            receipts: list[ReceiptSteps] = []
            payloads: list[Payload] = []
            for receipt in islice(queue, min(self._raw.credit, RUN_MESSAGES)):
                if receipt.message_format or receipt.unfinished or receipt.transaction is not None:
                    break
                receipts.append(receipt)
                payloads.append(receipt.payload)
            raws = run(payloads, receipts, self._settled)
            for _ in raws:
                queue.popleft()
            left = self._have_left(receipts, raws)

    def _have_left(self, receipts: list[ReceiptSteps], raws: list[Any]) -> int:
        """Note that the first of *receipts* have left as *raws*; return how many."""
        unsettled, keeps = self._unsettled, self._resends or self._keeper is not None
        count = 0
        for raw in raws:
            receipt = receipts[count]
            count += 1
            receipt.raw = raw
            if raw.settled:
                receipt.finish(ACCEPTED)
            else:
                unsettled[receipt] = None
                if not keeps:
                    receipt.payload = b""
        return count

    def _transfer(self, link: SendingLink, receipt: Any) -> None:
        try:
            raw = link.send(
                receipt.payload,
                receipt,
                settled=self._settled,
                message_format=receipt.message_format,
                state=None if receipt.transaction is None else receipt.transaction.state(),
                more=receipt.unfinished,
            )
        except LocalProtocolError as error:
            receipt.fail(error)
            return
        receipt.raw = raw
        if receipt.unfinished:
            self.open_stream = receipt
            self.changes.unpark_all()
        elif raw.settled:
            receipt.finish(ACCEPTED)
            return
        self._unsettled[receipt] = None
        if not self._resends and self._keeper is None and raw.delivery_id >= 0:
            # The payload is not sent again, unless it still waits for the session's window.
            receipt.payload = b""

    def _pump(self, link: SendingLink) -> None:
        """Send as much as credit and room allow; return the credit if the peer drains."""
        queue = self._queue
        if len(queue) > 1 and self._plain and self.open_stream is None:
            self._pump_run(queue)
        while queue and self.open_stream is None and link.credit > 0 and link.writable:
            self._transfer(link, queue.popleft())
        link.offer(len(queue))
        if link.draining and (link.credit <= 0 or not (queue or self.open_stream)):
            # Also if there is no credit left to return: the peer waits for the answer.
            link.drained()

    def withdraw(self, receipt: Any) -> bool:
        """Withdraw a message that waits for credit; return whether it was still queued."""
        if receipt.raw is not None or receipt.done:
            return False
        try:
            self._queue.remove(receipt)
        except ValueError:
            return False
        receipt.fail(LinkDetached("withdrawn before it was sent", condition="amqp:not-allowed"))
        return True

    def done(self, receipt: Any) -> None:
        """Free the room of a receipt that is done."""
        self._unsettled.pop(receipt, None)
        if self._dropped:
            self._dropped.pop(receipt, None)
        self._give_room(1, receipt is self.open_stream)

    def _give_room(self, count: int, streamed: bool = False) -> None:
        """Wake the tasks that wait for the outcomes of *count* messages, or that of the stream being written."""
        if self._crowd:
            self._room.unpark(count=count)
        if self.changes and (streamed or self.pending <= len(self._dropped)):
            # flush() waits for the last outcome, the writer of a stream for that of its message.
            self.changes.unpark_all()

    def on_credit(self, link: SendingLink) -> None:
        """Send more, after new credit or room, or when the peer drains."""
        self._pump(link)
        if self.changes:
            self.changes.unpark_all()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Handle states that the receiver has sent for these messages."""
        own = self._own_receipts if self._plain else None
        unsettled, dropped, freed = self._unsettled, self._dropped, 0
        for each in deliveries:
            state = each.state
            if type(state) is Accepted and each.remote_settled:
                context = each.context
                if (
                    type(context) is own
                    and context._outcome is None
                    and context.error is None
                    and context.transaction is None
                    and not context.unfinished
                ):
                    receipt: ReceiptSteps = context
                    # What finish() and done() do, without three calls for each message.
                    receipt._outcome = state
                    receipt.payload = b""
                    each.context = None
                    unsettled.pop(receipt, None)
                    if dropped:
                        dropped.pop(receipt, None)
                    waiting = receipt._waiting
                    if waiting is not None:
                        receipt._waiting = None
                        for task in waiting:
                            reschedule(task)
                    freed += 1
                    continue
            if type(state) is TransactionalState:
                # The outcome that the message will have when the transaction is committed.
                state = state.outcome
            if each.remote_settled:
                # Settled without a state: the default outcome applies (Part 3 §3.5.3).
                each.context.finish(RELEASED if state is None else state)
            elif state is not None and not isinstance(state, Received):
                # The receiver settles second, after us (Part 2 §2.8.3).
                each.settle()
                each.context.finish(state)
        if freed:
            self._give_room(freed)
