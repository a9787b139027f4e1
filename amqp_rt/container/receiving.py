"""Receiving: deliveries, and the links they come on.

What the peer sends lies in a plain list, bounded by the credit that was given for it
(decision 26). Taking from it is no checkpoint as long as something is there, except every so
often, so that a loop over a busy receiver does not starve the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import trio

from ..errors import AmqpError, DecodeError, LinkDetached, LinkRefused, LocalProtocolError
from ..fronts.base import RCV_FIRST, SND_MIXED, IncomingDelivery, ReceivingLink
from ..message import Message
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
from ..values import Symbol
from .credit import CreditWindow
from .payloads import decode_payload
from .streams import ByteStream

if TYPE_CHECKING:
    from .connections import Session

T = TypeVar("T")

#: Deliveries taken in a row, and seconds, before a receiver lets others run.
TURN_MESSAGES: Final = 100
TURN_S: Final = 0.001


class Delivery:
    """One message as it was delivered, and what we say of it (Part 3 §3.4).

    The outcomes are said at once and do not wait. As a context manager, sync or async, it is
    accepted at the end of the block, released if the block was cancelled, and modified
    (delivery-failed) if it raised, unless an outcome was said before.
    """

    __slots__ = ("_message", "_settled", "_stream", "raw")

    def __init__(self, raw: IncomingDelivery) -> None:
        #: What the link delivered.
        self.raw = raw
        self._message: Message | None = None
        self._settled: trio.Event | None = None
        self._stream: ByteStream | None = None

    @property
    def message(self) -> Message:
        """The message, its sections decoded when they are used.

        Raises:
            DecodeError: The payload is no message.
        """
        if self._message is None:
            if self.raw.message_format:
                raise DecodeError(f"message-format {self.raw.message_format} is not 0: use payload")
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

    @property
    def tag(self) -> bytes:
        """The delivery-tag (Part 2 §2.8.7)."""
        return self.raw.tag

    @property
    def message_format(self) -> int:
        """0 for messages of Part 3; anything else is the sender's own."""
        return self.raw.message_format

    @property
    def link(self) -> Any:
        """The link that it came on."""
        return self.raw.link

    @property
    def presettled(self) -> bool:
        """The sender does not want to hear of it."""
        return self.raw.settled

    def decode(self, kind: type[T]) -> T:
        """The body as *kind*, by the message's content-type.

        Raises:
            DecodeError: It is not one.
        """
        found: T = decode_payload(self.message, kind)
        return found

    def accept(self) -> None:
        """Processed; the sender may forget it."""
        self.settle(ACCEPTED)

    def release(self) -> None:
        """Not processed, and nothing changed; somebody may get it again."""
        self.settle(RELEASED)

    def modify(
        self,
        *,
        failed: bool = True,
        undeliverable_here: bool = False,
        annotations: Mapping[object, object] | None = None,
    ) -> None:
        """Not processed, and changed thus (Part 3 §3.4.5)."""
        self.settle(Modified(failed, undeliverable_here or None, annotations))

    def reject(self, description: str = "", *, condition: str = "amqp:precondition-failed") -> None:
        """Invalid; it will never be processed. The sender is told why."""
        self.settle(Rejected(Error(Symbol(condition), description or None)))

    def settle(self, outcome: Outcome) -> None:
        """Say *outcome*. Saying the same again changes nothing.

        Raises:
            LocalProtocolError: Another outcome has been said.
        """
        self.raw.settle(outcome)
        receiver = self.raw.context
        if isinstance(receiver, Receiver):
            receiver.freed(self.raw)

    @property
    def outcome(self) -> Any:
        """What we have said of it; None as long as nothing was said."""
        return getattr(self.raw, "local_state", None)

    async def settled(self) -> None:
        """Wait until the sender has settled; at once where we settle first.

        Cancelled, the outcome stands as it was said.

        Raises:
            LinkDetached: The link is gone before the sender settled.
        """
        while not self.raw.settled:
            if not self.raw.link.attached:
                raise LinkDetached("the link is gone before the sender settled")
            receiver = self.raw.context
            if not isinstance(receiver, Receiver) or receiver.link.rcv_settle_mode == RCV_FIRST:
                break
            await receiver.wait_settled()
        await trio.lowlevel.checkpoint()

    def chunks(self) -> ByteStream:
        """The body of a streamed message as it arrives; see :class:`ByteStream`."""
        if self._stream is None:
            self._stream = ByteStream(self.raw, self.raw.link.connection.limits)
            receiver = self.raw.context
            if isinstance(receiver, Receiver):
                receiver.streams[self.raw] = self._stream
        return self._stream

    def _end(self, error: BaseException | None) -> None:
        if self.outcome is not None or self.raw.settled:
            self._free()
            return
        if error is None:
            self.accept()
        elif isinstance(error, trio.Cancelled | KeyboardInterrupt):
            self.release()
        elif (outcome := getattr(error, "outcome", None)) is not None:
            self.settle(outcome)
        elif isinstance(error, DecodeError):
            self.reject(error.description, condition=error.condition)
        else:
            self.settle(MODIFIED_FAILED)

    def _free(self) -> None:
        receiver = self.raw.context
        if isinstance(receiver, Receiver):
            receiver.freed(self.raw)

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    async def __aenter__(self) -> Delivery:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    def __repr__(self) -> str:
        return f"<Delivery {self.tag.hex()}: {len(self.raw.payload)} bytes, {self.outcome}>"


class Receiver:
    """A link on which the peer sends to us; made by ``peer.receiver(...)``.

    ``async for delivery in receiver`` takes deliveries as they come and ends when the receiver is
    closed. Only one task at a time may wait.
    """

    def __init__(
        self,
        session: Session,
        address: str | None,
        *,
        name: str,
        credit: int = 500,
        mode: Literal["move", "copy"] | None = None,
        filter: Mapping[object, object] | None = None,  # noqa: A002  # the standard's word
        dynamic: bool = False,
        durable: int = 0,
        snd_settle_mode: int = SND_MIXED,
        rcv_settle_mode: int = RCV_FIRST,
        streaming: bool = False,
        capabilities: Sequence[str] = (),
        properties: Mapping[object, object] | None = None,
        target: str | None = None,
    ) -> None:
        self._session = session
        self.name = name
        #: The agreed address; of a dynamic node the one that the peer made.
        self.address = address
        self._asked = Source(
            address=None if dynamic else address,
            dynamic=dynamic,
            dynamic_node_properties={Symbol("lifetime-policy"): DeleteOnClose()}
            if dynamic
            else None,
            distribution_mode=Symbol(mode) if mode else None,
            filter=filter,
            durable=durable,
            capabilities=tuple(Symbol(each) for each in capabilities),
        )
        self._target = Target(address=target)
        self._prefetch = credit
        self._modes = (snd_settle_mode, rcv_settle_mode)
        self._streaming = streaming
        self._properties = properties
        self._raw: ReceivingLink | None = None
        self._window: CreditWindow | None = None
        self._inbox: deque[IncomingDelivery] = deque()
        #: Taken out by ``streams`` as their bodies are read.
        self.streams: dict[IncomingDelivery, ByteStream] = {}
        self._held: set[IncomingDelivery] = set()
        self._waiting: trio.lowlevel.Task | None = None
        self._attached = trio.Event()
        self._was_attached = False
        self._settling: trio.Event | None = None
        self._flowed: trio.Event | None = None
        self._error: AmqpError | None = None
        self._closed = False
        self._turn = 0
        self._since = 0.0

    # --- state ---------------------------------------------------------------------------

    @property
    def link(self) -> ReceivingLink:
        """The link as it is now.

        Raises:
            LinkDetached: There is none.
        """
        if self._raw is None:
            raise LinkDetached("the receiver is not attached")
        return self._raw

    @property
    def source(self) -> Source:
        """The source as the peer answered it: filters that are in place, modes, capabilities."""
        return self.link.source or Source()

    @property
    def credit(self) -> int:
        """Deliveries that the peer may still send."""
        return self._raw.credit if self._raw is not None else 0

    @property
    def waiting(self) -> int:
        """Deliveries that have arrived and were not taken."""
        return len(self._inbox)

    @property
    def closed(self) -> bool:
        """Closed by us, or detached for good by the peer."""
        return self._closed

    # --- taking --------------------------------------------------------------------------

    async def receive(self) -> Delivery:
        """The next delivery, waiting for it if there is none.

        Cancelled while it waits, nothing has been taken.

        Raises:
            LinkDetached: The link is gone; what had arrived was given out before.
            ConnectionLost: So is its connection, for good.
        """
        if self._inbox:
            self._turn += 1
            if self._turn >= TURN_MESSAGES or trio.current_time() - self._since > TURN_S:
                await trio.lowlevel.checkpoint()
                self._turn = 0
                self._since = trio.current_time()
                if not self._inbox:
                    return await self.receive()
            return self._take()
        while not self._inbox:
            self._refuse_if_over()
            await self._park()
        self._turn = 0
        self._since = trio.current_time()
        return self._take()

    def receive_nowait(self) -> Delivery | None:
        """The next delivery, or None if none has arrived."""
        return self._take() if self._inbox else None

    async def receive_batch(self, most: int = 100) -> list[Delivery]:
        """At least one and at most *most* deliveries: those that are there.

        Cancelled while it waits, nothing has been taken.
        """
        found = [await self.receive()]
        while self._inbox and len(found) < most:
            found.append(self._take())
        return found

    async def get(self, *, within: float = 0.0) -> Delivery | None:
        """One delivery if there is one within *within* seconds, else None (Part 2 §2.6.10).

        For receivers with ``credit=0``: grants one credit, and takes it back with a drain, so
        that nothing can arrive unasked. Cancelled, the credit may still bring one delivery;
        the next call returns it.
        """
        if self._inbox:
            return self._take()
        self._refuse_if_over()
        link = self.link
        link.grant(1)
        if within > 0:
            with trio.move_on_after(within):
                while not self._inbox:
                    self._refuse_if_over()
                    await self._park()
        if not self._inbox:
            await self.drain()
        return self._take() if self._inbox else None

    async def drain(self) -> None:
        """Let the peer use its credit now or give it back, and wait for it (Part 2 §2.6.7).

        What it still sent can be received. The receiver gets no new credit before :meth:`start`.
        Cancelled, the drain goes on.
        """
        if self._window is not None:
            self._window.open = False
        link = self.link
        while True:
            self._flowed = trio.Event()
            link.drain()
            await self._flowed.wait()
            if self._raw is not link or not link.attached:
                self._refuse_if_over()
                return
            if not link.credit:
                return

    def stop(self) -> None:
        """Take the credit back: nothing more is asked for. What is under way still comes."""
        if self._window is not None:
            self._window.close()
        elif self._raw is not None:
            self._raw.grant(0)

    def start(self, credit: int | None = None) -> None:
        """Give credit again after :meth:`stop` or :meth:`drain`."""
        if credit is not None:
            self._prefetch = credit
        if self._raw is not None:
            self._open_window(self._raw)

    async def close(self) -> None:
        """Detach for good. What was not taken is released. Cancelled, the detach still goes out."""
        if not self._closed:
            self._closed = True
            self._session.remove(self)
            self._give_back()
            if self._raw is not None and self._raw.attached:
                self._raw.detach()
            self._wake()
        await trio.lowlevel.checkpoint()

    async def wait_attached(self) -> None:
        """Wait for the peer's answer to our attach.

        Cancelled, the attach stays asked for; close the receiver to withdraw it.

        Raises:
            LinkRefused: The peer would not have it; its condition says why.
        """
        await self._attached.wait()
        if self._error is not None:
            raise self._error

    async def __aenter__(self) -> Receiver:
        try:
            await self.wait_attached()
        except BaseException:
            self._abandon()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        with trio.CancelScope(shield=True):
            await self.close()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        try:
            return await self.receive()
        except AmqpError:
            if self._closed and self._error is None:
                raise StopAsyncIteration from None
            raise

    def _abandon(self) -> None:
        self._closed = True
        self._session.remove(self)
        if self._raw is not None:
            self._raw.detach()

    def _take(self) -> Delivery:
        raw = self._inbox.popleft()
        if raw.settled and self._raw is not None and not self._streaming:
            self.freed(raw)
        return Delivery(raw)

    def _refuse_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise LinkDetached("the receiver is closed")

    async def _park(self) -> None:
        if self._waiting is not None:
            raise LocalProtocolError("another task is waiting at this receiver")
        self._waiting = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiting = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(waiting)

    def freed(self, raw: IncomingDelivery) -> None:
        """A delivery has its outcome: there is room for another."""
        if raw in self._held:
            self._held.discard(raw)
            if self._window is not None:
                self._window.freed(1, len(raw.payload))

    async def wait_settled(self) -> None:
        """Wait until the sender has settled something, or the link is gone."""
        if self._settling is None:
            self._settling = trio.Event()
        await self._settling.wait()

    def _give_back(self) -> None:
        for raw in self._inbox:
            if not raw.settled and raw.link.attached:
                raw.settle(RELEASED)
        self._inbox.clear()

    def _open_window(self, link: ReceivingLink) -> None:
        if self._prefetch:
            self._window = CreditWindow(link, messages=self._prefetch)
            held = len(self._held)
            self._window.held = held
            self._window.held_bytes = sum(len(raw.payload) for raw in self._held)
            self._window.opened()
        else:
            self._window = None

    # --- what the session and the link say --------------------------------------------------

    def attach(self, core: Any) -> None:
        """Attach, or after a lost connection attach again, on the session *core*."""
        self._raw = core.attach_receiver(
            self.name,
            self,
            source=self._asked,
            target=self._target,
            snd_settle_mode=self._modes[0],
            rcv_settle_mode=self._modes[1],
            streaming=self._streaming,
            properties=self._properties,
        )

    def lost(self, error: AmqpError) -> None:
        """The connection is gone for good."""
        self._fail(error)

    def on_attached(self, link: ReceivingLink) -> None:
        self._raw = link
        if link.source is not None:
            self.address = link.source.address
        if self._closed:
            link.detach()
            return
        self._held.clear()
        self._open_window(link)
        self._was_attached = True
        self._attached.set()

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        for each in deliveries:
            each.context = self
        if self._closed:
            for each in deliveries:
                if not each.settled:
                    each.settle(RELEASED)
            return
        if self._window is not None:
            self._held.update(deliveries)
            self._window.took(len(deliveries), sum([len(each.payload) for each in deliveries]))
        self._inbox += deliveries
        self._wake()

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        for each in deliveries:
            stream = self.streams.get(each)
            if stream is not None:
                stream.on_data()
                if each.complete or each.aborted:
                    del self.streams[each]

    def on_settled(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        if self._settling is not None:
            self._settling.set()
            self._settling = None

    def on_flow(self, link: ReceivingLink) -> None:
        if self._flowed is not None:
            self._flowed.set()
        if self._window is not None:
            self._window.freed(0, 0)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        self._window = None
        for each in self.streams.values():
            each.on_data()
        self.streams.clear()
        if self._flowed is not None:
            self._flowed.set()
        if self._settling is not None:
            self._settling.set()
            self._settling = None
        if self._closed:
            self._wake()
            return
        if self._session.may_come_back and not closed:
            # Attached again with the next connection; what was unsettled is the peer's to repeat.
            self._inbox = deque(raw for raw in self._inbox if raw.settled)
            self._held.clear()
            self._attached = trio.Event()
            return
        kind = LinkDetached if self._was_attached else LinkRefused
        self._fail(gone(kind, error, self.address))

    def _fail(self, error: AmqpError) -> None:
        self._session.remove(self)
        if self._error is None:
            self._error = error
        self._closed = True
        self._attached.set()
        self._wake()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"credit {self.credit}, {self.waiting} waiting"
        return f"<Receiver {self.address!r}, {state}>"


def gone(kind: type[AmqpError], error: Error | None, address: object) -> AmqpError:
    """The exception for a link that the peer ended."""
    if error is None:
        return kind(f"the peer detached the link to {address!r}")
    said = error.raised_as(kind)
    if not said.description:
        said.description = f"the link to {address!r} is gone"
    return said
