"""Receivers: links on which peers send to us.

Arrived deliveries wait in a plain list, whose length is bounded by the credit given (decision
0004). Taking one is not a checkpoint as long as the list has some, except at intervals, so that a
loop over a busy receiver does not starve other tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

import trio

from ..errors import (
    AmqpError,
    ConnectionLost,
    DeadlineExceeded,
    LinkDetached,
    LinkRefused,
)
from ..fronts.base import RCV_FIRST, SND_MIXED, IncomingDelivery, ReceivingLink
from ..limits import Limits
from ..outcomes import (
    RELEASED,
    Error,
)
from ..termini import DeleteOnClose, Source, Target
from ..transactions import TransactionalState
from ..values import Described, Symbol, ULong
from .codecs import Codecs
from .credit import CreditWindow
from .deliveries import Delivery, DeliveryHolder, StreamedBody
from .engines import EngineSession
from .links import LinkHandle

if TYPE_CHECKING:
    from .links import Owner

#: Default number of deliveries without an outcome that a receiver holds or has given credit for.
CREDIT: Final = 500
#: Name and descriptor of the selector filter.
_SELECTOR: Final = Symbol("apache.org:selector-filter:string")
_SELECTOR_CODE: Final = ULong(0x0000_468C_0000_0004)
#: Deliveries taken in succession, and seconds, before a receiver lets other tasks run.
_TURN_MESSAGES: Final = 100
_TURN_S: Final = 0.001


class ReceiverOptions(TypedDict, total=False):
    """Options of ``peer.receiver(address, …)``.

    * ``name``: name of the link; generated if omitted. Without an address, and not ``dynamic``, it
      identifies a subscription that was left with :meth:`Receiver.suspend`, so that it can be
      closed.
    * ``credit``: deliveries without an outcome that may be here or under way; at most 8 MiB of them
      wait. 0 gives no credit: see :meth:`Receiver.get` and :meth:`Receiver.start`.
    * ``mode``: ``"move"`` takes messages from the node, ``"copy"`` browses (Part 3 §3.5.7).
    * ``filter``: filters by name, see Part 3 §3.5.8; those that the peer applies are in
      ``source.filter``.
    * ``selector``: a condition for messages, such as ``"kind = 'a' AND JMSPriority > 4"``, as a
      further filter (``apache.org:selector-filter:string``). If the peer does not apply it, the
      link is refused with ``LinkRefused``, since all messages would arrive.
    * ``dynamic``: the peer creates a node, whose address is ``receiver.address``. It exists as long
      as the link: after a lost connection there is another one.
    * ``durable``: 1 or 2: the subscription outlives the link (Part 3 §3.5.5). Give it a ``name``,
      and leave it with :meth:`Receiver.suspend`.
    * ``timeout``: seconds that the peer is asked to keep its side of the link while a lost
      connection is dialled again (Part 3 §3.5.3). If it does, deliveries that we hold can still be
      settled afterwards.
    * ``snd_settle_mode``: 1 asks for settled messages, 0 for unsettled ones.
    * ``rcv_settle_mode``: 1 sends outcomes and lets the sender settle first (Part 2 §2.8.3).
    * ``streaming``: deliveries are returned as soon as they begin; read them with ``chunks``.
    * ``capabilities``: capabilities of the source, for example ``"queue"``.
    * ``properties``: properties of the link.
    * ``target``: our own address, for peers that use it.
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


class Receiver(LinkHandle, DeliveryHolder):
    """Link on which the peer sends to us, created by ``peer.receiver(...)``; use ``async with``.

    ``async for delivery in receiver`` takes deliveries as they arrive, and ends when we close the
    receiver. If the peer ends the link permanently, it raises the error of :meth:`receive`:
    ``LinkEnded`` for a source that has come to its end. Several tasks may take from one receiver.

    Each delivery needs an outcome, set explicitly or by ``async with delivery:``. Credit is given
    again as outcomes are set, so ``credit`` bounds the deliveries in processing (decision 0004).

    While a lost connection is dialled again, taking waits. If the peer keeps its side of the link
    meanwhile (because of ``timeout`` or ``durable``, or by its own choice), deliveries of the old
    connection without an outcome remain valid: an outcome set in between is sent when the link is
    resumed. With ``rcv_settle_mode=1`` no message is delivered twice.

    Otherwise they will be delivered again; setting their outcome has no effect.
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
            # Request the source that the peer has kept for a link of this name.
            self._asked = None
        #: The source in the peer's attach.
        self._answered: Source | None = None
        self._target = Target(address=target)
        self._credit = credit
        self._modes = (snd_settle_mode, rcv_settle_mode)
        self._streaming = streaming
        self._properties = properties
        self._window: CreditWindow | None = None
        self._inbox: deque[IncomingDelivery] = deque()
        #: Deliveries that count against the credit: waiting here, or held by the application.
        self._held: set[IncomingDelivery] = set()
        #: Deliveries of an earlier link that is to be resumed or has been.
        self._suspended: set[IncomingDelivery] = set()
        #: Those of them that the application has not taken.
        self._untaken: list[IncomingDelivery] = []
        self._takers: list[trio.lowlevel.Task] = []
        self._getting = False
        #: Whether a task in get() waits for a delivery for which it has given the credit.
        self._asking = False
        #: Link that was asked to drain and has not answered; None after that, or once it has credit again.
        self._draining: ReceivingLink | None = None
        #: Whether no credit is given until the next start.
        self._stopped = False
        #: Whether iteration ends without an error: after :meth:`finish`, or when the peer has
        #: detached a link that it had attached.
        self._ended = False
        self._turn = 0
        self._since = 0.0

    # --- state ---------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """Source in the peer's attach: filters in effect, mode, capabilities.

        Raises:
            LinkDetached: The link is not attached yet, or never was.
        """
        if self._answered is None:
            self._refuse_if_over()
            raise LinkDetached(f"{self!r} is not attached yet")
        return self._answered

    @property
    def credit(self) -> int:
        """Number of deliveries that the peer may still send."""
        return self._raw.credit if self._stage == "attached" else 0

    @property
    def available(self) -> int:
        """Number of deliveries that the peer has reported as waiting."""
        return self._raw.available if self._stage == "attached" else 0

    @property
    def waiting(self) -> int:
        """Number of deliveries that have arrived and not been taken."""
        return len(self._inbox)

    @property
    def limits(self) -> Limits:
        """Limits of the connection."""
        return self._session.limits

    @property
    def codecs(self) -> Codecs:
        """Codecs of payloads."""
        return self._session.codecs

    # --- taking --------------------------------------------------------------------------

    async def receive(self, *, within: float | None = None) -> Delivery:
        """Return the next delivery, waiting for one if necessary.

        If cancelled while waiting, nothing has been taken.

        Args:
            within: Seconds to wait; the credit remains given: see :meth:`get` to take it back.

        Raises:
            DeadlineExceeded: Nothing arrived within *within* seconds.
            LinkDetached: The link has ended, and all arrived deliveries were taken. ``LinkEnded``
                if the peer gave no error.
            ConnectionLost: The connection has ended permanently.
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
        """Return the next delivery, or None if none has arrived."""
        return self._take() if self._inbox else None

    async def receive_batch(
        self, most: int = 100, *, within: float | None = None
    ) -> list[Delivery]:
        """Return at least one and at most *most* deliveries: those that have arrived.

        If cancelled while waiting, nothing has been taken. Raises the errors of :meth:`receive`.
        """
        found = [await self.receive(within=within)]
        inbox = self._inbox
        while inbox and len(found) < most:
            found.append(self._take())
        return found

    async def get(self, *, within: float = 0.0) -> Delivery | None:
        """Return one delivery if the node has one within *within* seconds (Part 2 §2.6.10).

        Gives credit for one if none is given, and takes unused credit back with a drain before it
        returns None, so that nothing arrives unrequested. Only one task at a time may call it.

        If cancelled, the credit may still bring a delivery, which the next call returns; a receiver
        with its own credit continues as before.

        Raises:
            LinkDetached: The link has ended.
            ConnectionLost: The connection has ended permanently.
            BusyResourceError: Another task is in this method.
        """
        if self._getting:
            raise trio.BusyResourceError("another task is in get()")
        self._getting = True
        try:
            await trio.lowlevel.checkpoint()
            deadline = trio.current_time() + within
            answered = False
            while not (self._inbox or answered):
                await self.wait_attached()
                answered = await self._get_from(self._raw, deadline)
        finally:
            self._getting = False
        return self._take() if self._inbox else None

    async def _get_from(self, link: ReceivingLink, deadline: float) -> bool:
        """Ask *link* for a delivery until *deadline*; whether the peer has answered that it has none.

        It has not if a delivery has arrived, or if the link has gone, and the next one is to be asked.
        """
        # The answer to a drain before, of a call that was cancelled, takes the credit back.
        await self._wait_drained(link)
        if self._inbox or not link.attached:
            return False
        if not link.credit:
            link.grant(1)
        if trio.current_time() < deadline:
            self._asking = True
            try:
                with trio.move_on_at(deadline):
                    await self._arrival()
            finally:
                self._asking = False
        if self._inbox or not self.attached:
            return False
        link = self._raw
        window = self._window
        if window is not None:
            window.open = False
        try:
            if link.credit:
                self._drain(link)
                await self._wait_drained(link)
        finally:
            # A drain that was cancelled must not leave the receiver without its own credit, and one
            # that was stopped meanwhile wants none.
            if window is not None and window is self._window and not self._stopped:
                self._draining = None
                window.opened()
        return link.attached

    async def _wait_drained(self, link: ReceivingLink) -> None:
        """Wait until a drain of *link*, if there is one, has been answered or is of no use any more."""
        while link.attached and link is self._draining and link.credit:
            await self.changes.park()
        self._draining = None

    def _drain(self, link: ReceivingLink) -> None:
        self._draining = link
        link.drain()

    async def drain(self) -> None:
        """Make the peer use its credit now or return it, and wait for that (Part 2 §2.6.7).

        Deliveries that it sends until then can be taken. No new credit is given before
        :meth:`start`.

        If cancelled, the drain continues.

        Raises:
            LinkDetached: The link has ended.
            ConnectionLost: The connection has ended permanently.
        """
        await trio.lowlevel.checkpoint()
        await self.wait_attached()
        self._stopped = True
        if self._window is not None:
            self._window.open = False
        link = self._raw
        if link.credit:
            self._drain(link)
            await self._wait_drained(link)
        self._refuse_if_over()

    def stop(self) -> None:
        """Take the credit back. Deliveries that are under way still arrive."""
        self._stopped = True
        if self._window is not None:
            self._window.close()
        elif self._stage == "attached":
            self._raw.grant(0)
            # A drain that another task waits for is not answered any more.
            self.changes.unpark_all()

    def start(self, credit: int | None = None) -> None:
        """Give credit again after :meth:`stop` or :meth:`drain`, or change the credit."""
        if credit is not None:
            if credit < 0:
                raise ValueError(f"credit must not be negative, it is {credit}")
            self._credit = credit
        self._stopped = False
        if self._stage == "attached":
            self._open_window(self._raw)
            self._draining = None
            # A drain that another task waits for is not answered any more.
            self.changes.unpark_all()

    def finish(self) -> None:
        """Take the credit back, release untaken deliveries, and let iterations end.

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
        """Return the next delivery. If cancelled while waiting, nothing has been taken."""
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
        """Let other tasks run, since taking arrived deliveries is not a checkpoint."""
        await trio.lowlevel.checkpoint()
        self._turn = 0
        self._since = trio.current_time()

    async def _arrival(self) -> None:
        """Wait until a delivery can be taken."""
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
            raw.context = StreamedBody(self, raw, self.limits)
        if raw.settled:
            self.freed(raw)
        return Delivery(raw)

    def freed(self, raw: IncomingDelivery) -> None:
        """Free the room of *raw*, which has its outcome."""
        held = self._held
        if raw in held:
            held.discard(raw)
            if self._window is not None:
                self._window.freed(1, len(raw.payload))

    async def wait_settled(self, raw: IncomingDelivery) -> None:
        """Wait until the sender has settled a delivery, *raw* or another.

        Cancelling changes nothing.

        Raises:
            ConnectionLost: *raw* is of an earlier connection, and not resumed.
        """
        if not raw.link.attached and raw not in self._suspended:
            self._refuse_if_over()
            raise ConnectionLost(
                "the connection was lost before the sender settled: whether it has heard our "
                "outcome is in doubt"
            )
        await self.changes.park()

    # --- ending --------------------------------------------------------------------------

    async def close(self) -> None:
        """Detach permanently: untaken deliveries are released, and a durable subscription ends.

        If cancelled, the detach is still sent.
        """
        self._give_back()
        await self._detach()
        await trio.lowlevel.checkpoint()

    async def suspend(self) -> None:
        """Detach without closing: a durable subscription remains and collects messages.

        If cancelled, the detach is still sent.
        """
        self._give_back()
        await self._detach(closed=False)
        await trio.lowlevel.checkpoint()

    def abandon(self) -> None:
        """Detach at once; untaken deliveries are released."""
        if not self.closed:
            self._give_back()
        super().abandon()

    def _give_back(self) -> None:
        for raw in self._inbox:
            if not raw.settled and raw.link.attached:
                raw.settle(RELEASED)
        self._inbox.clear()

    # --- called by the session and the link -------------------------------------------------

    def _attach_on(self, core: EngineSession) -> Any:
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

    def _set_address(self, address: str) -> None:
        super()._set_address(address)
        if self._asked is not None:
            self._asked.address = address

    def on_attached(self, link: Any) -> None:
        """Handle that both sides are attached; refuse a link without the requested selector."""
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
            # Deliveries unknown to the peer are settled, or will be delivered again with another
            # tag.
            lost = link.unknown if link.resumed else memory.values()
            self._drop({entry.delivery for entry in lost})
            self._inbox += [raw for raw in self._untaken if raw in self._suspended]
            self._wake(len(self._inbox))
        self._untaken.clear()
        self._open_window(link)
        if self._asking and not self._inbox and not link.credit:
            link.grant(1)

    def _drop(self, gone: set[Any]) -> None:
        """Drop deliveries that the sender has forgotten."""
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

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Queue messages that have arrived, or on a streaming receiver have begun."""
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
        if self.changes and not link.credit:
            # If messages use all of the credit of a drain, no flow follows.
            self.changes.unpark_all()

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Pass on further data of streamed messages."""
        for each in deliveries:
            if isinstance(each.context, StreamedBody):
                each.context.stream.on_data()

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Handle deliveries settled by the sender: outcomes in transactions are final then."""
        for each in deliveries:
            if each.settled and type(each.local_state) is TransactionalState:
                self.freed(each)
        aborted = {each for each in deliveries if each.aborted}
        if aborted:
            # Resumed and aborted: the sender will send them again as new deliveries.
            for each in aborted:
                self.freed(each)
            self._drop(aborted)
        self.changes.unpark_all()

    def on_flow(self, link: ReceivingLink) -> None:
        """Handle the answer to a drain, or a report of available messages."""
        if self._window is not None:
            self._window.freed(0, 0)
        self.changes.unpark_all()

    def _interrupted(self, error: Error | None) -> None:
        """Keep deliveries without an outcome for resuming; others will be delivered again."""
        self._suspended = {entry.delivery for entry in (self._memory or {}).values()}
        self._untaken += [raw for raw in self._inbox if not raw.settled]
        self._inbox = deque(raw for raw in self._inbox if raw.settled)
        self._held.intersection_update(self._suspended.union(self._inbox))
        self._window = None

    def _fail_waiting(self, error: AmqpError) -> None:
        self._suspended.clear()
        self._untaken.clear()
        if self._window is not None:
            self._window.open = False
        self._wake(len(self._takers))

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._stage}, credit {self.credit}"
        return f"<Receiver {self.address!r}, {state}, {self.waiting} waiting>"
