"""Sending: messages out, outcomes back.

A message that has no credit yet waits in the sender, at most ``max_pending`` of them, and leaves
in order as credit comes. Outcomes arrive a batch at a time; nothing here costs a task, a channel
or an event per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import trio

from ..errors import (
    AmqpError,
    ConnectionLost,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
    LocalProtocolError,
    WouldBlock,
)
from ..fronts.base import (
    RCV_FIRST,
    SND_MIXED,
    SND_SETTLED,
    OutgoingDelivery,
    Payload,
    SendingLink,
)
from ..message import Message
from ..outcomes import ACCEPTED, RELEASED, Accepted, Error, Outcome, Received, Rejected
from ..termini import Source, Target
from ..values import Symbol
from .payloads import encode_payload
from .receiving import gone

if TYPE_CHECKING:
    from .connections import Session

#: What becomes of messages whose outcome a lost connection kept from us.
InDoubt = Literal["raise", "resend"]

R = TypeVar("R", bound="Receipt")

_PIECE_MAX: Final = 65_536


class Receipt:
    """A message that was sent, or waits to be; tells its outcome."""

    __slots__ = ("_error", "_outcome", "_sender", "_waiting", "message_format", "payload", "raw")

    def __init__(self, sender: Sender, payload: Payload, message_format: int) -> None:
        self._sender = sender
        self.payload = payload
        self.message_format = message_format
        #: The delivery, once it has left.
        self.raw: OutgoingDelivery | None = None
        self._outcome: Outcome | None = None
        self._error: AmqpError | None = None
        self._waiting: trio.lowlevel.Task | None = None

    @property
    def done(self) -> bool:
        """The outcome, or why there is none, is known."""
        return self._outcome is not None or self._error is not None

    async def outcome(self) -> Outcome:
        """Wait for the outcome, whatever it is.

        Cancelled, the message stays sent and its outcome can be asked for again.

        Raises:
            LinkDetached: The link went before the outcome came: it is in doubt.
            ConnectionLost: So did the connection.
        """
        if not self.done:
            if self._waiting is not None:
                raise LocalProtocolError("another task is waiting for this outcome")
            self._waiting = trio.lowlevel.current_task()

            def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
                self._waiting = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    async def accepted(self) -> Outcome:
        """Wait for the outcome, and raise if it is not *accepted*.

        Raises:
            DeliveryRejected: The message is invalid to the receiver, which says why.
            DeliveryNotAccepted: It was released or modified.
            LinkDetached: See :meth:`outcome`.
            ConnectionLost: See :meth:`outcome`.
        """
        outcome = await self.outcome()
        if type(outcome) is not Accepted:
            raise refusal(outcome)
        return outcome

    def withdraw(self) -> bool:
        """Take the message back if it has not left yet; whether it was taken back."""
        return self._sender.withdraw(self)

    def give_up(self) -> None:
        """Settle the delivery without waiting for its outcome, or withdraw the message.

        The receiver hears that nobody waits any more: a request's handler is cancelled.
        """
        if self.done or self._sender.withdraw(self):
            return
        if self.raw is not None:
            self.raw.settle()
        self.fail(LinkDetached("given up by the caller", condition="amqp:not-allowed"))

    def finish(self, outcome: Outcome) -> None:
        """The outcome is known."""
        if not self.done:
            self._outcome = outcome
            self._resume()

    def fail(self, error: AmqpError) -> None:
        """The outcome will not be known."""
        if not self.done:
            self._error = error
            self._resume()

    def _resume(self) -> None:
        self.payload = b""
        self._sender.done(self)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(waiting)

    def __repr__(self) -> str:
        state: object = self._error or self._outcome
        if state is None:
            state = "waits for credit" if self.raw is None else "sent"
        return f"<Receipt: {state}>"


def refusal(outcome: Outcome) -> AmqpError:
    """The exception that says that *outcome* is not *accepted*."""
    if isinstance(outcome, Rejected):
        if outcome.error is None:
            return DeliveryRejected(
                "the receiver rejected the message", condition="amqp:not-allowed"
            )
        return outcome.error.raised_as(DeliveryRejected)
    return DeliveryNotAccepted(f"the receiver gave the message back: {outcome}")


class Sender:
    """A link on which we send; made by ``peer.sender(...)``.

    Several tasks may send at once; messages leave in the order of the calls.
    """

    def __init__(
        self,
        session: Session,
        address: str | None,
        *,
        name: str,
        max_pending: int = 1000,
        settled: bool | None = None,
        rcv_settle_mode: int = RCV_FIRST,
        in_doubt: InDoubt = "raise",
        keep_waiting: bool = True,
        dynamic: bool = False,
        durable: int = 0,
        capabilities: Sequence[str] = (),
        properties: Mapping[object, object] | None = None,
        source: str | None = None,
    ) -> None:
        if max_pending < 1:
            raise ValueError("max_pending must be at least 1")
        self._session = session
        self.name = name
        #: The agreed address; None is the anonymous terminus, which routes by ``to``.
        self.address = address
        self.max_pending = max_pending
        self._asked = Target(
            address=None if dynamic else address,
            dynamic=dynamic,
            durable=durable,
            capabilities=tuple(Symbol(each) for each in capabilities),
        )
        self._source = Source(address=source)
        self._settled = settled
        self._modes = (
            SND_MIXED if settled is None else SND_SETTLED if settled else 0,
            rcv_settle_mode,
        )
        self._in_doubt = in_doubt
        #: Messages that had not left when the connection was lost go out on the next one.
        self._keep_waiting = keep_waiting
        self._properties = properties
        self._raw: SendingLink | None = None
        #: Messages that wait for credit.
        self._queue: deque[Receipt] = deque()
        #: Messages that have left and have no outcome.
        self._unsettled: dict[Receipt, None] = {}
        self._attached = trio.Event()
        self._was_attached = False
        self._room: trio.Event | None = None
        self._change: trio.Event | None = None
        self._streaming = False
        self._error: AmqpError | None = None
        self._closed = False

    # --- state ---------------------------------------------------------------------------

    @property
    def link(self) -> SendingLink:
        """The link as it is now.

        Raises:
            LinkDetached: There is none.
        """
        if self._raw is None:
            raise LinkDetached("the sender is not attached")
        return self._raw

    @property
    def target(self) -> Target:
        """The target as the peer answered it."""
        found = self.link.target
        return found if isinstance(found, Target) else Target()

    @property
    def credit(self) -> int:
        """Messages that the peer takes now."""
        return self._raw.credit if self._raw is not None and self._raw.attached else 0

    @property
    def pending(self) -> int:
        """Messages without an outcome: those that wait for credit and those that have left."""
        return len(self._queue) + len(self._unsettled)

    @property
    def closed(self) -> bool:
        """Closed by us, or detached for good by the peer."""
        return self._closed

    # --- sending -------------------------------------------------------------------------

    async def send(self, message: object, **properties: Any) -> Outcome:
        """Send a message and wait for its outcome.

        Args:
            message: A :class:`~amqp_rt.message.Message`, or a payload to make one of.
            properties: Whatever :class:`~amqp_rt.message.Message` takes, for example
                ``ttl_s``, ``priority``, ``durable``, ``subject``, ``application_properties``.

        Cancelled while the message waits for credit, it is withdrawn and was not sent. Cancelled
        after it left, it stays sent, and its outcome is not heard.

        Raises:
            DeliveryRejected: The message is invalid to the receiver, which says why.
            DeliveryNotAccepted: It was released or modified.
            LinkDetached: The link went before the outcome came: it is in doubt.
            ConnectionLost: So did the connection.
        """
        payload = self.encode(message, properties)
        while self.pending >= self.max_pending:
            await self.wait_for_room()
        receipt = self.submit(Receipt(self, payload, 0))
        try:
            return await receipt.accepted()
        except trio.Cancelled:
            self.withdraw(receipt)
            raise

    def send_nowait(self, message: object, **properties: Any) -> Receipt:
        """Send a message without waiting; the receipt tells its outcome.

        Raises:
            WouldBlock: ``max_pending`` messages have no outcome yet. Nothing was sent.
            LinkDetached: The sender is closed, or its link gone for good.
        """
        if self.pending >= self.max_pending:
            raise WouldBlock(f"{self.pending} messages of this sender are pending")
        return self.submit(Receipt(self, self.encode(message, properties), 0))

    async def send_many(self, messages: Iterable[object], **properties: Any) -> int:
        """Send messages one behind the other, up to ``max_pending`` at a time without an outcome.

        Returns the number of messages, once all are accepted.

        Cancelled, those that have left stay sent and the others were not.

        Raises:
            DeliveryRejected: One was rejected; those behind it may have been sent.
            DeliveryNotAccepted: One was released or modified.
            LinkDetached: The link is gone; outcomes are in doubt.
            ConnectionLost: So is the connection.
        """
        receipts: deque[Receipt] = deque()
        count = 0
        try:
            for message in messages:
                payload = self.encode(message, properties)
                while receipts and receipts[0].done:
                    await self._judge(receipts.popleft())
                while self.pending >= self.max_pending:
                    await self.wait_for_room()
                receipts.append(self.submit(Receipt(self, payload, 0)))
                count += 1
            while receipts:
                await self._judge(receipts.popleft())
        except trio.Cancelled:
            for receipt in receipts:
                self.withdraw(receipt)
            raise
        return count

    @staticmethod
    async def _judge(receipt: Receipt) -> None:
        if receipt.done and type(receipt._outcome) is Accepted:
            return
        await receipt.accepted()

    async def send_payload(self, payload: Payload, *, message_format: int = 0) -> Outcome:
        """Send an encoded message as it is; otherwise as :meth:`send`."""
        while self.pending >= self.max_pending:
            await self.wait_for_room()
        receipt = self.submit(Receipt(self, payload, message_format))
        try:
            return await receipt.accepted()
        except trio.Cancelled:
            self.withdraw(receipt)
            raise

    def stream(self, message: Message | None = None, **properties: Any) -> StreamedMessage:
        """A message whose body is written piece by piece, never whole in memory.

        ``async with sender.stream(content_type="video/mp4") as body: await body.write(chunk)``.
        At the end of the block the message is complete and its outcome was waited for; an
        exception aborts it.
        """
        front = message if message is not None else Message(b"", **properties)
        return StreamedMessage(self, front)

    def encode(self, message: object, properties: Mapping[str, Any]) -> Payload:
        """The encoded message for a payload and its properties.

        Raises:
            EncodeError: A value has no encoding.
            LocalProtocolError: The anonymous terminus is used without ``to``.
        """
        if isinstance(message, Message):
            built = message.replace(**properties) if properties else message
        else:
            built = make_message(message, properties)
        if self.address is None and built.to is None and not self._asked.dynamic:
            raise LocalProtocolError(
                "a message to the anonymous terminus needs to=…",
                condition="amqp:precondition-failed",
            )
        return built.encode()

    def submit(self, receipt: R) -> R:
        """Send the message of *receipt*, or queue it until there is credit.

        Raises:
            LinkDetached: The sender is closed, or its link gone for good.
        """
        self._refuse_if_over()
        link = self._raw
        if (
            link is not None
            and link.attached
            and link.credit
            and not self._queue
            and not self._streaming
            and link.writable
        ):
            self._transfer(link, receipt)
        else:
            self._queue.append(receipt)
        return receipt

    def _transfer(self, link: SendingLink, receipt: Receipt) -> None:
        try:
            raw = link.send(
                receipt.payload,
                receipt,
                settled=self._settled,
                message_format=receipt.message_format,
            )
        except LocalProtocolError as error:
            receipt.fail(error)
            return
        receipt.raw = raw
        if raw.settled:
            receipt.finish(ACCEPTED)
        else:
            self._unsettled[receipt] = None
            if self._in_doubt != "resend":
                receipt.payload = b""

    def withdraw(self, receipt: Receipt) -> bool:
        """Take back a message that waits for credit; whether it was still here."""
        try:
            self._queue.remove(receipt)
        except ValueError:
            return False
        receipt.fail(LinkDetached("withdrawn before it was sent", condition="amqp:not-allowed"))
        return True

    def done(self, receipt: Receipt) -> None:
        """A receipt is done: there is room for another message."""
        self._unsettled.pop(receipt, None)
        if self._room is not None and self.pending < self.max_pending:
            self._room.set()
            self._room = None

    async def wait_for_room(self) -> None:
        """Wait until a message more may be pending. Cancelled, nothing has changed."""
        self._refuse_if_over()
        if self._room is None:
            self._room = trio.Event()
        await self._room.wait()

    def _refuse_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise LinkDetached("the sender is closed")

    # --- ending --------------------------------------------------------------------------

    async def close(self) -> None:
        """Wait until every message has its outcome, then detach.

        Cancelled, the link is detached at once: messages without an outcome are in doubt, and
        those that had not left are not sent.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        try:
            while self.pending and self._error is None:
                await self._changed()
        finally:
            self._closed = True
            self._session.remove(self)
            if self._raw is not None:
                self._raw.detach()
            self._fail_pending(LinkDetached("the sender was closed"))
        await trio.lowlevel.checkpoint()

    async def wait_attached(self) -> None:
        """Wait for the peer's answer to our attach.

        Cancelled, the attach stays asked for; close the sender to withdraw it.

        Raises:
            LinkRefused: The peer would not have it; its condition says why.
        """
        await self._attached.wait()
        if self._error is not None:
            raise self._error

    async def __aenter__(self) -> Sender:
        try:
            await self.wait_attached()
        except BaseException:
            self._closed = True
            self._session.remove(self)
            if self._raw is not None:
                self._raw.detach()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.close()
        else:
            with trio.CancelScope(shield=True) as scope:
                scope.cancel()
                await self.close()

    async def _changed(self) -> None:
        """Wait until something has happened to pending messages."""
        if self._room is None:
            self._room = trio.Event()
        if self._change is None:
            self._change = trio.Event()
        await self._change.wait()

    def _note_change(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None

    # --- what the session and the link say --------------------------------------------------

    def attach(self, core: Any) -> None:
        """Attach, or after a lost connection attach again, on the session *core*."""
        self._raw = core.attach_sender(
            self.name,
            self,
            source=self._source,
            target=self._asked,
            snd_settle_mode=self._modes[0],
            rcv_settle_mode=self._modes[1],
            properties=self._properties,
        )

    def lost(self, error: AmqpError) -> None:
        """The connection is gone for good."""
        self._fail(error)

    def on_attached(self, link: SendingLink) -> None:
        self._raw = link
        if isinstance(link.target, Target):
            self.address = link.target.address
        if self._closed:
            link.detach()
            return
        self._was_attached = True
        self._attached.set()

    def on_credit(self, link: SendingLink) -> None:
        self._note_change()
        queue = self._queue
        if not self._streaming:
            while queue and link.credit and link.writable:
                self._transfer(link, queue.popleft())
        if link.draining and not queue and not self._streaming:
            link.drained()

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        for each in deliveries:
            if each.remote_settled:
                state = each.state
                # Settled without a state: the source's default outcome holds (Part 3 §3.5.3).
                outcome = RELEASED if state is None else state
                each.context.finish(outcome)
            elif each.state is not None and not isinstance(each.state, Received):
                outcome = each.state
                each.settle()
                each.context.finish(outcome)
        self._note_change()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self._note_change()
        if self._closed:
            self._fail_pending(LinkDetached("the sender was closed"))
            return
        if self._session.may_come_back and not closed:
            self._attached = trio.Event()
            doubtful = list(self._unsettled)
            if self._in_doubt == "resend":
                for receipt in doubtful:
                    receipt.raw = None
                self._unsettled.clear()
                self._queue.extendleft(reversed(doubtful))
            else:
                for receipt in doubtful:
                    receipt.fail(
                        ConnectionLost("the connection was lost before the outcome: it is in doubt")
                    )
            if not self._keep_waiting:
                waiting, self._queue = self._queue, deque()
                for receipt in waiting:
                    receipt.fail(ConnectionLost("the connection was lost before it was sent"))
            return
        kind = LinkDetached if self._was_attached else LinkRefused
        self._fail(gone(kind, error, self.address))

    def _fail(self, error: AmqpError) -> None:
        self._session.remove(self)
        if self._error is None:
            self._error = error
        self._closed = True
        self._fail_pending(error)
        self._attached.set()

    def _fail_pending(self, error: AmqpError) -> None:
        for receipt in [*self._unsettled, *self._queue]:
            receipt.fail(error)
        self._unsettled.clear()
        self._queue.clear()
        if self._room is not None:
            self._room.set()
            self._room = None
        self._note_change()

    def __repr__(self) -> str:
        where = "anonymous" if self.address is None else repr(self.address)
        state = "closed" if self._closed else f"credit {self.credit}, {self.pending} pending"
        return f"<Sender {where}, {state}>"


class StreamedMessage:
    """A message that is being written; see :meth:`Sender.stream`.

    Memory is bounded by the session window: ``write`` waits while it is closed.
    """

    def __init__(self, sender: Sender, front: Message) -> None:
        self._sender = sender
        self._front = front
        self._receipt: Receipt | None = None
        self._raw: OutgoingDelivery | None = None

    async def __aenter__(self) -> StreamedMessage:
        sender = self._sender
        sender._refuse_if_over()
        while sender._streaming or sender._queue or not sender.credit:
            sender._refuse_if_over()
            await sender._changed()
        sender._streaming = True
        receipt = Receipt(sender, b"", 0)
        self._raw = sender.link.send(
            self._front.encode_front(), receipt, settled=sender._settled, more=True
        )
        receipt.raw = self._raw
        if not self._raw.settled:
            sender._unsettled[receipt] = None
        self._receipt = receipt
        return self

    async def write(self, data: bytes) -> None:
        """Send *data* as the next part of the body, as a data section (Part 3 §3.2.6).

        Cancelled while it waits, none of *data* was sent; the message is aborted when the
        block ends with the cancellation.

        Raises:
            LinkDetached: The link is gone, and the message with it.
        """
        sender = self._sender
        raw = self._raw
        if raw is None:
            raise LocalProtocolError("the stream is not open: use it in `async with`")
        view = memoryview(data)
        for at in range(0, len(view), _PIECE_MAX):
            piece = bytes(view[at : at + _PIECE_MAX])
            while not raw.link.writable:
                self._refuse_if_gone()
                await sender._changed()
            self._refuse_if_gone()
            raw.write(_data_section(piece))
        await trio.lowlevel.checkpoint()

    def _refuse_if_gone(self) -> None:
        receipt = self._receipt
        if receipt is not None and receipt._error is not None:
            raise receipt._error
        if self._raw is not None and not self._raw.link.attached:
            raise LinkDetached("the link is gone, and the unfinished message with it")

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sender, raw, receipt = self._sender, self._raw, self._receipt
        if raw is None or receipt is None:
            return
        self._raw = None
        sender._streaming = False
        if error is not None:
            raw.abort()
            receipt.fail(LinkDetached("aborted", condition="amqp:not-allowed"))
            if raw.link.attached:
                sender.on_credit(raw.link)
            return
        self._refuse_if_gone()
        raw.write(b"", more=False)
        if raw.link.attached:
            sender.on_credit(raw.link)
        if raw.settled and not receipt.done:
            receipt.finish(ACCEPTED)
        await receipt.accepted()


def _data_section(data: bytes) -> bytes:
    """One data section: descriptor 0x75 and a binary."""
    size = len(data)
    if size < 256:
        return b"\x00\x53\x75\xa0" + bytes((size,)) + data
    return b"\x00\x53\x75\xb0" + size.to_bytes(4, "big") + data


def make_message(payload: object, properties: Mapping[str, Any]) -> Message:
    """A message for a typed payload: its body and content-type follow from what it is."""
    given = properties.get("content_type")
    content_type, body, kind = encode_payload(payload, given)
    if content_type is not None and given is None:
        return Message(body, body_kind=kind, content_type=content_type, **properties)
    return Message(body, body_kind=kind, **properties)
