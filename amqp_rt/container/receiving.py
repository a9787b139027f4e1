"""Receiving: deliveries, and the links they come on.

What the peer sends lies in a plain list, bounded by the credit that was given for it
(decision 26). Taking from it is no checkpoint as long as something is there, except every so
often, so that a loop over a busy receiver does not starve the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, cast

import trio

from ..errors import (
    AmqpError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    LinkDetached,
    LinkRefused,
    LocalProtocolError,
)
from ..fronts.base import RCV_FIRST, SND_MIXED, IncomingDelivery, ReceivingLink
from ..limits import Limits
from ..message import MESSAGE_FORMAT, Message
from ..outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Modified,
    Outcome,
    Rejected,
)
from ..termini import DeleteOnClose, Source, Target
from ..transactions import TransactionalState
from ..values import Described, Symbol, ULong
from .credit import CreditWindow
from .links import LinkHandle, gone
from .payloads import decode_payload
from .streams import ByteStream

if TYPE_CHECKING:
    from .links import Owner
    from .transactions import Transaction

__all__ = ["CREDIT", "Delivery", "Receiver", "ReceiverOptions", "gone"]

T = TypeVar("T")

#: Deliveries without an outcome that a receiver holds or has asked for, unless said otherwise.
CREDIT: Final = 500
#: Name and descriptor of the filter that is a selector.
_SELECTOR: Final = Symbol("apache.org:selector-filter:string")
_SELECTOR_CODE: Final = ULong(0x0000_468C_0000_0004)
#: Deliveries taken in a row, and seconds, before a receiver lets others run.
_TURN_MESSAGES: Final = 100
_TURN_S: Final = 0.001


class ReceiverOptions(TypedDict, total=False):
    """What ``peer.receiver(address, …)`` takes.

    * ``name``: of the link; made up if left out. Without an address, and not ``dynamic``, it is what a
      subscription is found by that was left with :meth:`Receiver.suspend`: to close it for good.
    * ``credit``: deliveries without an outcome that may be here or on their way; at most 8 MiB of
      them wait. 0 asks for nothing: see :meth:`Receiver.get` and :meth:`Receiver.start`.
    * ``mode``: ``"move"`` takes messages from the node, ``"copy"`` browses (Part 3 §3.5.7).
    * ``filter``: filters by name, see Part 3 §3.5.8; what the peer applies is in ``source.filter``.
    * ``selector``: a condition for messages, such as ``"kind = 'a' AND JMSPriority > 4"``, as one
      more filter (``apache.org:selector-filter:string``). A peer that does not put it in place is
      refused with ``LinkRefused``, since everything would come.
    * ``dynamic``: the peer makes a node; its address is ``receiver.address``. It lives as long as the
      link: after a lost connection there is another one.
    * ``durable``: 1 or 2: the subscription outlives the link (Part 3 §3.5.5). Give it a ``name``, and
      leave with :meth:`Receiver.suspend`.
    * ``timeout``: seconds that the peer is asked to keep its side of the link while a lost connection
      is dialled again (Part 3 §3.5.3). If it does, deliveries in hand can still be settled then.
    * ``snd_settle_mode``: 1 asks for settled messages, 0 for unsettled ones.
    * ``rcv_settle_mode``: 1 says outcomes and lets the sender settle (Part 2 §2.8.3).
    * ``streaming``: deliveries are handed out as they begin; read them with ``chunks``.
    * ``capabilities``: of the source, for example ``"queue"``.
    * ``properties``: of the link.
    * ``target``: our own address, for peers that look at it.
    """

    name: str
    credit: int
    mode: Literal["move", "copy"] | None
    filter: Mapping[object, object] | None
    selector: str | None
    dynamic: bool
    durable: int
    timeout: int
    snd_settle_mode: int
    rcv_settle_mode: int
    streaming: bool
    capabilities: Sequence[str]
    properties: Mapping[object, object] | None
    target: str | None


class Delivery:
    """One message as it was delivered, and what we say of it (Part 3 §3.4).

    The outcomes are said at once and do not wait. ``async with delivery:`` (or ``with``) says one
    by how the block ends, unless one was said in it: at its end *accepted*; if it was cancelled
    *released*; ``Reject``, ``Release`` and ``Modify`` are what they are called, and stop at the
    block; any other exception is *modified (delivery-failed)*, a ``DecodeError`` *rejected*, and
    goes on.
    """

    __slots__ = ("_message", "raw")

    def __init__(self, raw: IncomingDelivery) -> None:
        #: What the link delivered.
        self.raw = raw
        self._message: Message | None = None

    # --- the message ---------------------------------------------------------------------

    @property
    def message(self) -> Message:
        """The message, its sections decoded when they are used.

        Raises:
            DecodeError: The payload is no message.
            LocalProtocolError: It is being streamed: use :meth:`head` and :meth:`chunks`.
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
        """The body of the message as it stands there: bytes, a sequence, or a value."""
        return self.message.body

    @property
    def payload(self) -> bytes:
        """The encoded message, whatever its format."""
        return self.raw.payload

    def decode(self, kind: type[T]) -> T:
        """The body as *kind*, by the message's content-type.

        Raises:
            DecodeError: It is not one; the reason names the field.
        """
        found: T = decode_payload(self.message, kind)
        return found

    def chunks(self) -> ByteStream:
        """The body of a streamed message as it arrives, to be iterated once.

        Waiting for the next chunk may be cancelled: nothing is lost.
        """
        stream = _stream_of(self.raw)
        if stream is None:
            raise LocalProtocolError("the receiver is not streaming: the body is here at once")
        return stream

    async def head(self) -> Message:
        """The message without its body, of a streamed message once the body begins.

        Cancelled, nothing is lost.

        Raises:
            DecodeError: It is malformed.
            AmqpError: The sender gave up the message, or the link is gone.
        """
        stream = _stream_of(self.raw)
        if stream is None:
            await trio.lowlevel.checkpoint()
            return self.message
        return await stream.head()

    # --- the delivery --------------------------------------------------------------------

    @property
    def tag(self) -> bytes:
        """The delivery-tag (Part 2 §2.8.7)."""
        return self.raw.tag

    @property
    def message_format(self) -> int:
        """0 for messages of Part 3; anything else is the sender's own."""
        return self.raw.message_format

    @property
    def link(self) -> ReceivingLink:
        """The link that it came on."""
        return self.raw.link

    @property
    def presettled(self) -> bool:
        """The sender has settled: it does not hear what we say."""
        return self.raw.settled

    @property
    def outcome(self) -> Outcome | None:
        """What we have said of it, in a transaction perhaps; None as long as nothing was said."""
        said = self.raw.local_state
        if type(said) is TransactionalState:
            said = said.outcome
        return cast("Outcome | None", said)

    def accept(self, *, transaction: Transaction | None = None) -> None:
        """Processed; the sender may forget it."""
        self.settle(ACCEPTED, transaction=transaction)

    def release(self, *, transaction: Transaction | None = None) -> None:
        """Not processed, and nothing changed; somebody may get it again."""
        self.settle(RELEASED, transaction=transaction)

    def modify(
        self,
        *,
        failed: bool = True,
        undeliverable_here: bool = False,
        annotations: Mapping[object, object] | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        """Not processed, and changed thus (Part 3 §3.4.5).

        Args:
            failed: The attempt counts: ``delivery-count`` grows.
            undeliverable_here: Do not send it to this link again.
            annotations: Merged into the message annotations.
            transaction: As for :meth:`settle`.
        """
        self.settle(
            Modified(failed, undeliverable_here or None, annotations), transaction=transaction
        )

    def reject(
        self,
        description: str = "",
        *,
        condition: str = "amqp:precondition-failed",
        info: Mapping[object, object] | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        """Invalid; it will never be processed. The sender is told why."""
        self.settle(
            Rejected(Error(Symbol(condition), description or None, info)), transaction=transaction
        )

    def settle(self, outcome: Outcome, *, transaction: Transaction | None = None) -> None:
        """Say *outcome*. Saying the same again changes nothing; on a link that is gone it is in vain.

        Args:
            outcome: What is to become of it.
            transaction: The outcome holds when this is committed. Until then, and if it is rolled
                back, the delivery stays in our hands, and another outcome can be said afterwards.

        Raises:
            LocalProtocolError: Another outcome has been said, or *transaction* is not open or of
                another connection.
            TransactionRolledBack: *transaction* is of no use any more.
            LinkDetached: The link is gone, so that nothing can be said within *transaction*.
        """
        if transaction is not None:
            transaction.retire(self, outcome)
            return
        self.raw.settle(outcome)
        self._let_go()

    def unsay(self, txn_id: bytes) -> bool:
        """Forget what was said in a transaction that is over; whether that was the last word."""
        said = self.raw.local_state
        if type(said) is not TransactionalState or said.txn_id != txn_id:
            return False
        self.raw.local_state = None
        return True

    def _let_go(self) -> None:
        """It has its outcome: there is room for another, and what is still to come is dropped."""
        context = self.raw.context
        if type(context) is Receiver:
            context.freed(self.raw)
        elif isinstance(context, _Streamed):
            context.stream.close()
            context.receiver.freed(self.raw)

    async def settled(self) -> None:
        """Wait until the sender has settled; at once where we settle with our outcome.

        Cancelled, the outcome stands as it was said.

        Raises:
            LinkDetached: The link is gone before the sender settled: whether it has heard our
                outcome is in doubt.
            ConnectionLost: So is the connection.
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
        """Say what the end of the block says; whether *error* was meant for us alone."""
        from .routes import RaisedOutcome  # which needs this module

        meant = isinstance(error, RaisedOutcome)
        if type(self.raw.local_state) is TransactionalState:
            # Its transaction says how this ends.
            return meant
        if self.outcome is not None or self.raw.settled:
            self._let_go()
        elif error is None:
            self.accept()
        elif isinstance(error, RaisedOutcome):
            self.settle(error.outcome)
        elif isinstance(error, DecodeError):
            self.reject(error.description, condition=error.condition)
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
        """Not a checkpoint."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Say the outcome. Not a checkpoint: it cannot be cancelled."""
        return self._end(error)

    def __repr__(self) -> str:
        return f"<Delivery {self.tag.hex()}: {len(self.raw.payload)} bytes, {self.outcome}>"


class _Streamed:
    """What a streaming receiver keeps with a delivery."""

    __slots__ = ("receiver", "stream")

    def __init__(self, receiver: Receiver, raw: IncomingDelivery) -> None:
        self.receiver = receiver
        self.stream = ByteStream(raw, receiver.limits)


def _stream_of(raw: IncomingDelivery) -> ByteStream | None:
    context = raw.context
    if isinstance(context, _Streamed):
        return context.stream
    # A node that was declared streaming keeps the stream itself.
    return context if isinstance(context, ByteStream) else None


def _receiver_of(raw: IncomingDelivery) -> Receiver | None:
    context = raw.context
    if isinstance(context, _Streamed):
        return context.receiver
    return context if isinstance(context, Receiver) else None


class Receiver(LinkHandle):
    """A link on which the peer sends to us; made by ``peer.receiver(...)``, used in ``async with``.

    ``async for delivery in receiver`` takes deliveries as they come, and ends when we close the
    receiver. If the peer ends the link for good, it raises what :meth:`receive` does: ``LinkEnded`` for a
    source that has come to its end. Several tasks may take from one receiver.

    Each delivery wants an outcome, said by hand or by ``async with delivery:``. Credit is given
    again as outcomes are said, so ``credit`` bounds what is being worked on (decision 26).

    While a lost connection is dialled again, taking waits. Where the peer keeps its side of the
    link meanwhile (``timeout``, ``durable``, or what it answered of its own accord), the deliveries
    of the old connection that had no outcome stay as they are: one that is said in between is heard
    when the link is resumed. With ``rcv_settle_mode=1`` nothing is delivered twice.

    Elsewhere they will be delivered again; saying an outcome is in vain.
    """

    def __init__(
        self,
        session: Owner,
        address: str | None,
        *,
        name: str,
        credit: int = CREDIT,
        mode: Literal["move", "copy"] | None = None,
        filter: Mapping[object, object] | None = None,  # noqa: A002  # the standard's word
        selector: str | None = None,
        dynamic: bool = False,
        durable: int = 0,
        timeout: int = 0,
        snd_settle_mode: int = SND_MIXED,
        rcv_settle_mode: int = RCV_FIRST,
        streaming: bool = False,
        capabilities: Sequence[str] = (),
        properties: Mapping[object, object] | None = None,
        target: str | None = None,
    ) -> None:
        if credit < 0:
            raise ValueError(f"credit must not be negative, it is {credit}")
        if mode not in (None, "move", "copy"):
            raise ValueError(f"mode is 'move' or 'copy', not {mode!r}")
        super().__init__(session, address, name)
        filters: dict[object, object] = {
            Symbol(name): value for name, value in (filter or {}).items()
        }
        if selector is not None:
            filters[_SELECTOR] = Described(_SELECTOR_CODE, selector)
        self._selects = selector is not None
        self._asked: Source | None = Source(
            address=None if dynamic else address,
            dynamic=dynamic,
            dynamic_node_properties={Symbol("lifetime-policy"): DeleteOnClose()}
            if dynamic
            else None,
            distribution_mode=Symbol(mode) if mode else None,
            filter=filters or None,
            durable=durable,
            expiry_policy=Symbol("never" if durable else "session-end"),
            timeout=timeout,
            capabilities=tuple(Symbol(each) for each in capabilities),
        )
        if address is None and not dynamic:
            # Whatever the peer has kept for a link of this name.
            self._asked = None
        #: As the peer answered it.
        self._answered: Source | None = None
        self._target = Target(address=target)
        self._credit = credit
        self._modes = (snd_settle_mode, rcv_settle_mode)
        self._streaming = streaming
        self._properties = properties
        self._window: CreditWindow | None = None
        self._inbox: deque[IncomingDelivery] = deque()
        #: Deliveries that count against the credit: here, or in the application's hands.
        self._held: set[IncomingDelivery] = set()
        #: Deliveries of a link before this one, which is to be resumed or has been.
        self._suspended: set[IncomingDelivery] = set()
        #: Those of them that nobody has taken.
        self._untaken: list[IncomingDelivery] = []
        self._takers: list[trio.lowlevel.Task] = []
        self._getting = False
        #: No credit is given until it is started again.
        self._stopped = False
        #: The peer has ended the link without an error.
        self._ended = False
        self._turn = 0
        self._since = 0.0

    # --- state ---------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """The source as the peer answered it: filters that are in place, mode, capabilities.

        Raises:
            LinkDetached: The link has not been attached yet, or never was.
        """
        if self._answered is None:
            self._refuse_if_over()
            raise LinkDetached(f"{self!r} is not attached yet")
        return self._answered

    @property
    def credit(self) -> int:
        """Deliveries that the peer may still send."""
        return self._raw.credit if self._stage == "attached" else 0

    @property
    def available(self) -> int:
        """Deliveries that the peer said it has waiting."""
        return self._raw.available if self._stage == "attached" else 0

    @property
    def waiting(self) -> int:
        """Deliveries that have arrived and were not taken."""
        return len(self._inbox)

    @property
    def limits(self) -> Limits:
        """The bounds of the connection."""
        return self._session.limits

    # --- taking --------------------------------------------------------------------------

    async def receive(self, *, within: float | None = None) -> Delivery:
        """The next delivery, waiting for it if there is none.

        Cancelled while it waits, nothing has been taken.

        Args:
            within: Seconds to wait; the credit stays given, see :meth:`get` to take it back.

        Raises:
            DeadlineExceeded: Nothing came within *within* seconds.
            LinkDetached: The link is gone; what had arrived was given out before. ``LinkEnded`` if
                the peer gave no error.
            ConnectionLost: So is its connection, for good.
        """
        if self._inbox:
            self._turn += 1
            if self._turn >= _TURN_MESSAGES or trio.current_time() - self._since > _TURN_S:
                await self._take_turns()
        if not self._inbox:
            if within is None:
                await self._arrival()
            else:
                with trio.move_on_after(within):
                    await self._arrival()
                if not self._inbox:
                    raise DeadlineExceeded(f"nothing came from {self.address!r} in {within:g} s")
            self._turn = 0
            self._since = trio.current_time()
        return self._take()

    def receive_nowait(self) -> Delivery | None:
        """The next delivery, or None if none has arrived."""
        return self._take() if self._inbox else None

    async def receive_batch(
        self, most: int = 100, *, within: float | None = None
    ) -> list[Delivery]:
        """At least one and at most *most* deliveries: those that are there.

        Cancelled while it waits, nothing has been taken. Raises what :meth:`receive` does.
        """
        found = [await self.receive(within=within)]
        inbox = self._inbox
        while inbox and len(found) < most:
            found.append(self._take())
        return found

    async def get(self, *, within: float = 0.0) -> Delivery | None:
        """One delivery if the node has one, or gets one within *within* seconds (Part 2 §2.6.10).

        Asks for one if no credit is out, and takes unused credit back with a drain before it says
        None, so that nothing comes unasked. One task at a time.

        Cancelled, the credit may still bring a delivery, which the next call returns; a receiver with
        credit of its own goes on as before.

        Raises:
            LinkDetached: The link is gone.
            ConnectionLost: So is its connection, for good.
        """
        if self._getting:
            raise trio.BusyResourceError("another task is in get()")
        self._getting = True
        try:
            await trio.lowlevel.checkpoint()
            if not self._inbox:
                await self.wait_attached()
                if not self._raw.credit:
                    self._raw.grant(1)
                if within > 0:
                    with trio.move_on_after(within):
                        await self._arrival()
                if not self._inbox:
                    stopped = self._stopped
                    try:
                        await self.drain()
                    finally:
                        # A drain that was cancelled must not leave the receiver without credit.
                        if not stopped:
                            self.start()
        finally:
            self._getting = False
        return self._take() if self._inbox else None

    async def drain(self) -> None:
        """Let the peer use its credit now or give it back, and wait for that (Part 2 §2.6.7).

        What it still sent can be taken. No new credit is given before :meth:`start`.

        Cancelled, the drain goes on.

        Raises:
            LinkDetached: The link is gone.
            ConnectionLost: So is its connection, for good.
        """
        await trio.lowlevel.checkpoint()
        await self.wait_attached()
        self._stopped = True
        if self._window is not None:
            self._window.open = False
        link = self._raw
        if link.credit:
            link.drain()
            while link.attached and link.credit:
                await self._changes.park()
        self._refuse_if_over()

    def stop(self) -> None:
        """Take the credit back: nothing more is asked for. What is on its way still comes."""
        self._stopped = True
        if self._window is not None:
            self._window.close()
        elif self._stage == "attached":
            self._raw.grant(0)

    def start(self, credit: int | None = None) -> None:
        """Give credit again after :meth:`stop` or :meth:`drain`, or other credit than so far."""
        if credit is not None:
            if credit < 0:
                raise ValueError(f"credit must not be negative, it is {credit}")
            self._credit = credit
        self._stopped = False
        if self._stage == "attached":
            self._open_window(self._raw)

    def finish(self) -> None:
        """Ask for nothing more, give back what was not taken, and let iterating end.

        Deliveries that were taken may still be settled.
        """
        self._ended = True
        self._error = LinkDetached("the receiver was stopped", condition="amqp:illegal-state")
        self.stop()
        self._give_back()
        self._wake(len(self._takers))

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        """The next delivery. Cancelled while it waits, nothing has been taken."""
        if not self._inbox:
            try:
                return await self.receive()
            except LinkDetached:
                if self._error is None or self._ended:
                    raise StopAsyncIteration from None
                raise
        self._turn += 1
        if self._turn >= _TURN_MESSAGES or trio.current_time() - self._since > _TURN_S:
            await self._take_turns()
        return self._take() if self._inbox else await self.__anext__()

    async def _take_turns(self) -> None:
        """Let others run: taking what is here is no checkpoint."""
        await trio.lowlevel.checkpoint()
        self._turn = 0
        self._since = trio.current_time()

    async def _arrival(self) -> None:
        """Until something is there to be taken."""
        task = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._takers.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        while not self._inbox:
            self._refuse_if_over()
            self._takers.append(task)
            await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self, most: int) -> None:
        takers = self._takers
        woken = takers[:most]
        del takers[:most]
        for task in woken:
            trio.lowlevel.reschedule(task)

    def _take(self) -> Delivery:
        raw = self._inbox.popleft()
        if self._streaming:
            raw.context = _Streamed(self, raw)
        if raw.settled:
            self.freed(raw)
        return Delivery(raw)

    def freed(self, raw: IncomingDelivery) -> None:
        """A delivery has its outcome: there is room for another."""
        held = self._held
        if raw in held:
            held.discard(raw)
            if self._window is not None:
                self._window.freed(1, len(raw.payload))

    async def wait_settled(self, raw: IncomingDelivery) -> None:
        """Wait until the sender has settled something, *raw* perhaps. Cancelled: no trace."""
        if not raw.link.attached and raw not in self._suspended:
            self._refuse_if_over()
            raise ConnectionLost(
                "the connection was lost before the sender settled: whether it has heard our "
                "outcome is in doubt"
            )
        await self._changes.park()

    # --- ending --------------------------------------------------------------------------

    async def close(self) -> None:
        """Detach for good: what was not taken is released, a durable subscription ends.

        Cancelled, the detach still goes out.
        """
        self._give_back()
        await self._detach()
        await trio.lowlevel.checkpoint()

    async def suspend(self) -> None:
        """Detach without closing: a durable subscription stays and gathers messages (X23).

        Cancelled, the detach still goes out.
        """
        self._give_back()
        await self._detach(closed=False)
        await trio.lowlevel.checkpoint()

    def abandon(self) -> None:
        """Detach at once; what was not taken is released."""
        if not self.closed:
            self._give_back()
        super().abandon()

    def _give_back(self) -> None:
        for raw in self._inbox:
            if not raw.settled and raw.link.attached:
                raw.settle(RELEASED)
        self._inbox.clear()

    # --- what the session and the link say --------------------------------------------------

    def _ask(self, core: Any) -> Any:
        return core.attach_receiver(
            self.name,
            self,
            source=self._asked,
            target=self._target,
            snd_settle_mode=self._modes[0],
            rcv_settle_mode=self._modes[1],
            streaming=self._streaming,
            properties=self._properties,
            unsettled=self._to_resume(core),
        )

    def _readdress(self, address: str) -> None:
        super()._readdress(address)
        if self._asked is not None:
            self._asked.address = address

    def on_attached(self, link: Any) -> None:
        """Both sides are attached."""
        if self._selects and _SELECTOR not in (link.source.filter or {}) and not self.closed:
            link.detach()
            self.lost(
                LinkRefused(
                    f"the peer does not select messages of {self.address!r}: all would come",
                    condition="amqp:not-implemented",
                )
            )
        else:
            super().on_attached(link)

    def _begin(self, link: Any) -> None:
        if link.source is not None:
            self.address = link.source.address
        self._answered = link.source or Source()
        memory = self._resumed_as(link, link.source)
        if memory is not None:
            # Those are settled, or come again under another tag.
            lost = link.unknown if link.resumed else memory.values()
            self._drop({entry.delivery for entry in lost})
            self._inbox += [raw for raw in self._untaken if raw in self._suspended]
            self._wake(len(self._inbox))
        self._untaken.clear()
        self._open_window(link)

    def _drop(self, gone: set[Any]) -> None:
        """The sender has done with these: what was not taken need not be."""
        self._inbox = deque(raw for raw in self._inbox if raw not in gone)
        self._held -= gone
        self._suspended -= gone

    def _open_window(self, link: ReceivingLink) -> None:
        if not self._credit:
            if self._window is not None:
                self._window.close()
            self._window = None
            return
        window = self._window = CreditWindow(link, messages=self._credit)
        window.held = len(self._held)
        window.held_bytes = sum([len(raw.payload) for raw in self._held])
        if not self._stopped:
            window.opened()

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Messages have arrived; on a streaming receiver they have begun."""
        if self.closed or self._error is not None:
            for each in deliveries:
                if not each.settled:
                    each.settle(RELEASED)
            return
        for each in deliveries:
            each.context = self
        if self._window is not None:
            self._held.update(deliveries)
            self._window.took(len(deliveries), sum([len(each.payload) for each in deliveries]))
        self._inbox += deliveries
        if self._takers:
            self._wake(len(deliveries))
        if self._changes and not link.credit:
            # A drain that was answered with as many messages as it could be: no flow follows.
            self._changes.unpark_all()

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Streamed messages have gone on."""
        for each in deliveries:
            if isinstance(each.context, _Streamed):
                each.context.stream.on_data()

    def on_settled(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """The sender has settled these; what was said in a transaction holds then."""
        for each in deliveries:
            if each.settled and type(each.local_state) is TransactionalState:
                self.freed(each)
        aborted = {each for each in deliveries if each.aborted}
        if aborted:
            # Resumed only to say that they come again, as new ones.
            for each in aborted:
                self.freed(each)
            self._drop(aborted)
        self._changes.unpark_all()

    def on_flow(self, link: ReceivingLink) -> None:
        """A drain is answered, or the sender spoke of what it has."""
        if self._window is not None:
            self._window.freed(0, 0)
        self._changes.unpark_all()

    def _interrupted(self, error: Error | None) -> None:
        """What has no outcome is resumed, or will be delivered again on the next connection."""
        self._suspended = {entry.delivery for entry in (self._memory or {}).values()}
        self._untaken += [raw for raw in self._inbox if not raw.settled]
        self._inbox = deque(raw for raw in self._inbox if raw.settled)
        self._held.intersection_update(self._suspended.union(self._inbox))
        self._window = None

    def _let_go(self, error: AmqpError) -> None:
        self._suspended.clear()
        self._untaken.clear()
        if self._window is not None:
            self._window.open = False
        self._wake(len(self._takers))

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._stage}, credit {self.credit}"
        return f"<Receiver {self.address!r}, {state}, {self.waiting} waiting>"
