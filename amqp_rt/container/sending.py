"""Senders, and the outcomes of their messages.

A message without credit waits in the sender, and messages leave in order as credit arrives.
Outcomes arrive in batches, and wake only tasks that wait for them: no message costs a task, a
channel or an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

import trio

from ..errors import (
    AmqpError,
    ConnectionLost,
    LinkDetached,
    LocalProtocolError,
    TransactionRolledBack,
    WouldBlock,
)
from ..fronts.base import (
    RCV_FIRST,
    SND_MIXED,
    SND_SETTLED,
    SND_UNSETTLED,
    Payload,
)
from ..message import Message, MessageFields
from ..outcomes import Accepted, Error, Outcome
from ..termini import Coordinator, Source, Target
from ..values import Symbol
from .composing import MessageProperties, build_message, make_message
from .encoding import encode_plain
from .engines import EngineSession
from .handling import TURN_S
from .links import DETACH_GRACE_S, LinkHandle, fresh, refusal
from .sender_options import InDoubt
from .submitting import RUN_MESSAGES, ReceiptSteps, SenderSteps
from .writing import StreamedMessage

if TYPE_CHECKING:
    from .links import Owner
    from .transactions import Transaction

#: Default number of messages without an outcome that a sender holds.
PENDING_MAX: Final = 1000
#: Messages that a loop of sends may submit before other tasks run.
_TURN_MESSAGES: Final = 64
#: Runs of messages that ``send_many`` submits before other tasks run, if there is time.
_TURN_RUNS: Final = 4


class Receipt(ReceiptSteps):
    """Receipt of a message that was sent or is queued, which gets its outcome."""

    __slots__ = ()

    @property
    def known_outcome(self) -> Outcome | None:
        """Outcome, if it is known."""
        return self._outcome

    async def outcome(self) -> Outcome:
        """Wait for the outcome, of any kind. A message sent settled counts as accepted.

        If cancelled, the message remains sent or queued, and its outcome can be awaited again.

        Raises:
            LinkDetached: The link ended before the outcome arrived: the message is in doubt.
            ConnectionLost: The connection was lost, with the same doubt.
        """
        await self._wait()
        if self.error is not None:
            raise fresh(self.error)
        assert self._outcome is not None
        return self._outcome

    async def accepted(self) -> Outcome:
        """Wait for the outcome, and raise if it is not *accepted*. Cancelling: see :meth:`outcome`.

        Raises:
            DeliveryRejected: The receiver rejected the message as invalid, with a reason.
            DeliveryNotAccepted: The message was released or modified.
            LinkDetached: See :meth:`outcome`.
            ConnectionLost: See :meth:`outcome`.
        """
        outcome = await self.outcome()
        if type(outcome) is not Accepted:
            raise refusal(outcome)
        return outcome

    async def _wait(self) -> None:
        if self._outcome is None and self.error is None:
            task = trio.lowlevel.current_task()
            if self._waiting is None:
                self._waiting = [task]
            else:
                self._waiting.append(task)

            def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
                assert self._waiting is not None
                self._waiting.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)

    def _wait_no_more(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Handle the cancellation of the only task that waits."""
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED

    def __repr__(self) -> str:
        state: object = self.error or self._outcome
        if state is None:
            state = "waits for credit" if self.raw is None else "sent"
        return f"<Receipt: {state}>"


class Sender(LinkHandle, SenderSteps):
    """Link on which we send; created by ``peer.sender(...)``, used in ``async with``.

    Several tasks may send at once; messages leave in the order of the calls. Leaving the block
    waits until every message has its outcome; leaving it with an exception does not.

    While a lost connection is dialled again, messages wait. If the peer keeps its side of the link
    meanwhile (because of ``timeout``, or by its own choice), messages that had left are resumed:
    outcomes known to the peer are received, partly received messages are completed, and messages
    without a record are sent again, so that nothing is lost or duplicated.

    Otherwise messages that had left and have no outcome are *in doubt*: the peer may or may not
    have received them. Their senders get ``ConnectionLost``, unless the sender was created with
    ``in_doubt="resend"``; for an incomplete streamed message they always do.
    """

    def __init__(
        self,
        session: Owner,
        address: str | None,
        *,
        name: str,
        max_pending: int = PENDING_MAX,
        settled: bool | None = None,
        rcv_settle_mode: int = RCV_FIRST,
        in_doubt: InDoubt = "raise",
        keep_waiting: bool = True,
        dynamic: bool = False,
        durable: int = 0,
        timeout: int = 0,
        capabilities: Sequence[str] = (),
        properties: Mapping[object, object] | None = None,
        source: str | None = None,
        outcomes: Sequence[str] = (),
    ) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, not {max_pending}")
        if in_doubt not in ("raise", "resend"):
            raise ValueError(f"in_doubt is 'raise' or 'resend', not {in_doubt!r}")
        super().__init__(session, address, name)
        #: Whether the application chose the name, and may use it again.
        self.named = True
        #: What encodes payloads before msgspec does; None for most applications.
        self._codecs = session.codecs.encoding
        kind = type(self)
        SenderSteps.__init__(
            self,
            Receipt,
            max_pending=max_pending,
            settled=settled,
            resends=in_doubt == "resend",
            anonymous=address is None and not dynamic,
            plain=kind.submit is Sender.submit
            and kind._transfer is Sender._transfer
            and kind.done is Sender.done,
        )
        self._asked: Target | Coordinator = Target(
            address=None if dynamic else address,
            dynamic=dynamic,
            durable=durable,
            timeout=timeout,
            capabilities=tuple(Symbol(each) for each in capabilities),
        )
        #: The target in the peer's attach.
        self._answered: Target | None = None
        self._source = Source(address=source, outcomes=tuple(Symbol(each) for each in outcomes))
        self._modes = (
            SND_MIXED if settled is None else SND_SETTLED if settled else SND_UNSETTLED,
            rcv_settle_mode,
        )
        #: Whether messages that had not left when the connection was lost are sent on the next one.
        self._keep_waiting = keep_waiting
        self._properties = properties
        self._turn = 0

    # --- state ---------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """Target in the peer's attach.

        Raises:
            LinkDetached: The link is not attached yet, or never was.
        """
        if self._answered is None:
            self._refuse_if_over()
            raise LinkDetached(f"{self!r} is not attached yet")
        return self._answered

    @property
    def credit(self) -> int:
        """Number of messages that the peer accepts now."""
        return self._raw.credit if self._stage == "attached" else 0

    @property
    def starving(self) -> Receipt | None:
        """First message that waits because the peer grants no credit; None if none does."""
        waits = self._queue and self._stage == "attached" and self._raw.credit <= 0
        return self._queue[0] if waits else None

    # --- sending -------------------------------------------------------------------------

    async def send(
        self,
        message: object,
        *,
        transaction: Transaction | None = None,
        **properties: Unpack[MessageProperties],
    ) -> Outcome:
        """Send a message and wait for its outcome, which is *accepted*.

        Args:
            message: A :class:`~amqp_rt.message.Message`, or a payload to create one from.
            transaction: The message is delivered only when this is committed; the outcome is the
                one that it will have then.
            properties: Arguments of :class:`~amqp_rt.message.Message`, for example ``ttl_s``,
                ``priority``, ``durable``, ``subject``, ``application_properties``.

        If cancelled while the message waits for credit, it is withdrawn: nothing was sent. If
        cancelled after it has left, it remains sent, and its outcome is dropped.

        Raises:
            DeliveryRejected: The receiver rejected the message as invalid, with a reason.
            DeliveryNotAccepted: The message was released or modified.
            LocalProtocolError: The message is larger than the peer allows; nothing was sent.
            LinkDetached: The link ended before the outcome arrived: the message is in doubt.
            ConnectionLost: The connection was lost, with the same doubt.
            TransactionRolledBack: The transaction cannot be committed any more.
        """
        return await self._send(self.encode(message, properties), 0, transaction)

    async def send_payload(self, payload: Payload, *, message_format: int = 0) -> Outcome:
        """Send an encoded message without changes, in any format; otherwise like :meth:`send`."""
        return await self._send(payload, message_format)

    async def _send(
        self, payload: Payload, message_format: int, transaction: Transaction | None = None
    ) -> Outcome:
        if len(self._queue) + len(self._unsettled) >= self.max_pending:
            await self._wait_for_room()
        receipt: Receipt = self._receipts(self, payload, message_format, transaction=transaction)
        if transaction is not None:
            try:
                transaction.add(receipt, self.link)
            except AmqpError:
                self._notify_room()
                raise
        self.submit(receipt)
        # As in accepted(), without further coroutines, which each wake-up of the task passes through.
        if receipt._outcome is None and receipt.error is None:
            receipt._waiting = [trio.lowlevel.current_task()]
            try:
                await trio.lowlevel.wait_task_rescheduled(receipt._wait_no_more)
            except trio.Cancelled:
                self._drop_outcome(receipt)
                raise
        elif receipt.error is None:
            await self._take_turns()
        if receipt.error is not None:
            raise fresh(receipt.error)
        outcome = receipt._outcome
        if type(outcome) is not Accepted:
            raise refusal(cast("Outcome", outcome))
        return outcome

    def _drop_outcome(self, receipt: Receipt) -> None:
        """Withdraw a message, or if it has left, let :meth:`close` not wait long for an outcome that no task will get."""
        if not (receipt.done or self.withdraw(receipt)):
            self._dropped[receipt] = None
            self.changes.unpark_all()

    def send_nowait(
        self,
        message: object,
        *,
        transaction: Transaction | None = None,
        **properties: Unpack[MessageProperties],
    ) -> Receipt:
        """Send a message, or queue it for credit, without waiting.

        The arguments are those of :meth:`send`; the receipt gets the outcome. The end of a
        transaction's block waits for it.

        Raises:
            WouldBlock: ``max_pending`` messages have no outcome yet. Nothing was sent.
            LocalProtocolError: The message is larger than the peer allows.
            LinkDetached: The sender is closed, or its link has ended permanently.
            ConnectionLost: The connection has ended permanently.
        """
        return self._send_nowait(self.encode(message, properties), 0, transaction)

    def send_payload_nowait(self, payload: Payload, *, message_format: int = 0) -> Receipt:
        """Send an encoded message without changes; otherwise like :meth:`send_nowait`."""
        return self._send_nowait(payload, message_format)

    def _send_nowait(
        self, payload: Payload, message_format: int, transaction: Transaction | None = None
    ) -> Receipt:
        self._refuse_if_over()
        if self.pending >= self.max_pending:
            raise WouldBlock(f"{self.pending} messages to {self.address!r} have no outcome yet")
        receipt: Receipt = self._receipts(self, payload, message_format, transaction=transaction)
        if transaction is not None:
            transaction.add(receipt, self.link)
        self.submit(receipt)
        if isinstance(receipt.error, LocalProtocolError):
            raise receipt.error
        return receipt

    async def send_many(
        self, messages: Iterable[object], **properties: Unpack[MessageProperties]
    ) -> int:
        """Send messages in order, with up to ``max_pending`` at a time without an outcome.

        Returns the number of messages, once all are accepted.

        If cancelled, messages that have left remain sent, and the others are not sent.

        Raises:
            DeliveryRejected: A message was rejected. No further message is taken from *messages*;
                later ones that had left remain sent, and the others are not sent.
            DeliveryNotAccepted: A message was released or modified; otherwise the same.
            LinkDetached: The link has ended; outcomes are in doubt.
            ConnectionLost: The connection was lost; outcomes are in doubt.
        """
        receipts: deque[Receipt] = deque()
        remaining = iter(messages)
        encode: Callable[[object], Payload] | None = partial(self.encode, properties=properties)
        if type(self).encode is Sender.encode and not properties and not self._anonymous:
            encode = None
        count = runs = 0
        since = 0.0
        over = False
        try:
            while not over:
                # Outcomes arrive only while this task waits: it looks for them when it has waited, or when there
                # is no room.
                while receipts and type(receipts[0]._outcome) is Accepted:
                    receipts.popleft()
                if receipts and receipts[0].done:
                    break
                if len(receipts) >= self.max_pending:
                    # Outcomes may arrive out of order: this bounds the receipts behind the first
                    # one as well.
                    await receipts[0].accepted()
                    runs = 0
                if len(self._queue) + len(self._unsettled) >= self.max_pending:
                    await self._wait_for_room()
                    runs = 0
                if not runs:
                    since = trio.current_time()
                room = self.max_pending - max(len(receipts), self.pending)
                most = max(1, min(room, RUN_MESSAGES))
                submitted, over = self.submit_run(remaining, most, receipts, encode)
                count += submitted
                runs += 1
                if runs == _TURN_RUNS or trio.current_time() - since > TURN_S:
                    runs = 0
                    await trio.lowlevel.checkpoint()
            while receipts:
                if type(receipts[0]._outcome) is not Accepted:
                    await receipts[0].accepted()
                receipts.popleft()
        finally:
            for receipt in receipts:
                self._drop_outcome(receipt)
        return count

    def stream(
        self, message: Message | None = None, **properties: Unpack[MessageFields]
    ) -> StreamedMessage:
        """Create a message whose body is written in pieces and never held in memory as a whole.

        ``async with sender.stream(content_type="video/mp4") as body: await body.write(chunk)``. The
        end of the block completes the message and waits for its outcome like :meth:`send`. An
        exception in the block aborts it: the receiver drops the received part (Part 2 §2.7.5).

        Args:
            message: Message with the sections around the body; its own body is not sent.
            properties: As for :meth:`send`.
        """
        if message is None:
            front = Message(b"", **properties)
        else:
            front = message.replace(**properties, body=b"")
        self._refuse_without_to(front)
        return StreamedMessage(self, front)

    def encode(self, message: object, properties: MessageProperties | Mapping[str, Any]) -> Payload:
        """Encode a payload and its properties as a message.

        Raises:
            EncodeError: A value has no encoding.
            LocalProtocolError: The message is for the anonymous terminus and has no ``to``.
        """
        if not properties and not isinstance(message, Message) and not self._anonymous:
            return encode_plain(message, self._codecs)
        if type(message) is Message and not properties:
            built = message
        elif "compress" in properties or isinstance(message, Message):
            built = build_message(message, properties, self._codecs)
        else:
            # As in build_message(), without another call for each message.
            built = make_message(message, properties, self._codecs)
        if self._anonymous:
            self._refuse_without_to(built)
        return built.encode()

    def _refuse_without_to(self, message: Message) -> None:
        if self._anonymous and message.to is None:
            raise LocalProtocolError(
                "a message to the anonymous terminus needs an address: to=…",
                condition="amqp:precondition-failed",
            )

    async def wait_for_room(self) -> None:
        """Wait until fewer than ``max_pending`` messages have no outcome.

        Cancelling changes nothing. No room is reserved: another task may have used the room by the
        time that a message is sent.

        Raises:
            LinkDetached: The link has ended permanently.
            ConnectionLost: The connection has ended permanently.
        """
        await self._wait_for_room()
        # The caller may not use the room, so the next waiting task checks as well.
        self._notify_room()

    async def _wait_for_room(self) -> None:
        """Wait for room that the caller uses at once, or passes on with :meth:`_notify_room`."""
        self._refuse_if_over()
        while self.pending >= self.max_pending:
            self._crowd += 1
            try:
                await self._room.park()
            finally:
                self._crowd -= 1
            self._refuse_if_over()

    def _notify_room(self) -> None:
        """Wake the next task that waits for room, so that it checks for some."""
        if self._crowd:
            self._room.unpark()

    async def _take_turns(self) -> None:
        """Let other tasks run at intervals, since sending without waiting is not a checkpoint."""
        self._turn += 1
        if self._turn >= _TURN_MESSAGES:
            self._turn = 0
            await trio.lowlevel.checkpoint()

    def begin_stream(self, front: Message) -> Receipt:
        """Send or queue the beginning of *front*, up to its body.

        Raises:
            LinkDetached: The sender is closed, or its link has ended permanently.
            ConnectionLost: The connection has ended permanently.
        """
        receipt: Receipt = self._receipts(self, front.encode_front(), unfinished=True)
        self.submit(receipt)
        return receipt

    def end_stream(self, receipt: Receipt) -> None:
        """Let other messages leave, after a streamed message that is complete or aborted."""
        if self.open_stream is receipt:
            self.open_stream = None
            if self._stage == "attached":
                self._pump(self._raw)

    # --- ending --------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until every message has its outcome, and those sent settled have left.

        Outcomes other than *accepted* raise no error here; see the receipts. Cancelling changes
        nothing.

        Raises:
            LinkDetached: The link has ended permanently; outcomes are in doubt.
            ConnectionLost: The connection has ended permanently.
        """
        while self.pending or not self._flushed:
            await self.changes.park()
        self._refuse_if_over()

    @property
    def _flushed(self) -> bool:
        """Whether all that was sent has left, as far as there is a link."""
        return self._stage != "attached" or self._raw.writable

    async def close(self) -> None:
        """Wait until every message has its outcome or is in doubt, then detach.

        With a ``name`` of the application's, also wait for the peer's detach, so that the name is free
        afterwards. Otherwise the detach leaves together with what follows, such as the connection's close.

        Outcomes of messages whose ``send`` was cancelled get ``DETACH_GRACE_S`` seconds, five.

        If cancelled, the link is detached at once: messages that have left without an outcome are
        in doubt, and those that wait for credit are not sent.
        """
        try:
            if not self.closed:
                while self.pending > len(self._dropped) or not self._flushed:
                    await self.changes.park()
                if self.pending or not self._flushed:
                    with trio.move_on_after(DETACH_GRACE_S):
                        await self.flush()
        except AmqpError:
            pass  # Tasks that wait for an outcome have got the error
        finally:
            self.abandon()
        if self.named:
            await self._detach()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    # --- called by the session and the link -------------------------------------------------

    def _attach_on(self, core: EngineSession) -> Any:
        return core.attach_sender(
            self.name,
            self,
            source=self._source,
            target=self._asked,
            snd_settle_mode=self._modes[0],
            rcv_settle_mode=self._modes[1],
            properties=self._properties,
            unsettled=self._to_resume(core),
        )

    def _set_address(self, address: str) -> None:
        super()._set_address(address)
        if isinstance(self._asked, Target):
            self._asked.address = address

    def _begin(self, link: Any) -> None:
        if isinstance(link.target, Target):
            self.address = link.target.address
            self._answered = link.target
        memory = self._resumed_as(link, link.target if self._keep_waiting else None)
        if memory:
            if link.resumed:
                # The peer has no record of these: none of them has arrived.
                self._again([entry.context for entry in link.unknown])
            else:
                self._doubt(
                    [entry.context for entry in memory.values()],
                    "the peer remembers nothing of the link",
                    None,
                )
        self._pump(link)

    def _remember(self, link: Any) -> None:
        super()._remember(link)
        memory = self._memory or {}
        for tag, entry in list(memory.items()):
            if entry.context.transaction is None:
                entry.payload = entry.context.payload
            else:
                # The message was rolled back with its transaction.
                del memory[tag]

    def _interrupted(self, error: Error | None) -> None:
        """Handle a lost connection: messages that have left are resumed, in doubt, or resent."""
        why = "the peer closed it" if error is None else error.description or str(error.condition)
        kept = {entry.context for entry in (self._memory or {}).values()}
        doubtful: list[Receipt] = []
        unsent: list[Receipt] = []
        for receipt in self._unsettled:
            if receipt in kept:
                continue
            if receipt.raw is not None and receipt.raw.delivery_id < 0 and not receipt.unfinished:
                unsent.append(receipt)
            else:
                doubtful.append(receipt)
        self.open_stream = None
        for receipt in [*self._unsettled, *self._queue]:
            if receipt.transaction is not None:
                receipt.fail(TransactionRolledBack(f"the connection was lost ({why})"))
        self._queue = deque(receipt for receipt in self._queue if not receipt.done)
        self._again(unsent)
        self._doubt(doubtful, why, None if error is None else str(error.condition))
        if not self._keep_waiting:
            waiting = list(self._queue)
            self._queue.clear()
            for receipt in waiting:
                receipt.fail(ConnectionLost(f"the connection was lost before it was sent ({why})"))

    def _doubt(self, receipts: list[Receipt], why: str, condition: str | None) -> None:
        """Fail or resend messages of which it is unknown whether they have arrived."""
        again: list[Receipt] = []
        for receipt in receipts:
            if receipt.done:
                continue
            if self._resends and not receipt.unfinished:
                again.append(receipt)
            else:
                receipt.fail(
                    ConnectionLost(
                        f"no outcome came before the connection was lost ({why}): "
                        "the message may have been taken or not",
                        condition=condition,
                    )
                )
        self._again(again)

    def _again(self, receipts: list[Receipt]) -> None:
        """Queue messages to be sent again, before those that wait."""
        again = [receipt for receipt in receipts if not receipt.done]
        for receipt in again:
            receipt.raw = None
            self._unsettled.pop(receipt, None)
        self._queue.extendleft(reversed(again))

    def _fail_waiting(self, error: AmqpError) -> None:
        for receipt in [*self._unsettled, *self._queue]:
            receipt.fail(error)
        self._unsettled.clear()
        self._queue.clear()
        self.open_stream = None
        self._room.unpark_all()

    def __repr__(self) -> str:
        where = "anonymous" if self.address is None else repr(self.address)
        state = "closed" if self.closed else f"{self._stage}, credit {self.credit}"
        return f"<Sender {where}, {state}, {self.pending} pending>"
