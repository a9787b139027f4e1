"""Sending links: messages split into transfers as credit and windows allow (Part 2 §2.6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..errors import LocalProtocolError
from ..outcomes import Received
from ..termini import Coordinator
from ..transactions import DeliveryState
from ..unsettled import Unsettled, UnsettledMap
from . import serial
from .frames import any_transfer, encode_state, first_transfer, later_transfer, link_fault
from .lifecycle import DETACHED
from .links import SND_SETTLED, SND_UNSETTLED, Link
from .performatives import SENDER, Attach, Flow, Transfer
from .resume import Action, action_for, offset_of, whole
from .states import Known, known_of

if TYPE_CHECKING:
    from .session import Session

#: Flow property that acquires messages in a transaction (Part 4 §4.4.3).
_TXN_ID: Final = "txn-id"
#: How busy the node is, as nodes of a mesh tell each other: two numbers.
_LOAD: Final = "x-opt-load"


class Sending:
    """Delivery that we send to the peer."""

    #: See :class:`Delivery`.
    noted: bool = False
    #: Octets that ``local_state`` takes in the first frame.
    state_size: int = 0
    #: Bytes so far of a message that is sent in pieces.
    size: int = 0
    #: An earlier link left this delivery unsettled (§2.6.13).
    resumed: bool = False
    #: The receiver's outcome is known from its unsettled map, and ``settle`` confirms it.
    confirms: bool = False

    #: Assigned when the first frame leaves; -1 before.
    delivery_id: int = -1
    remote_settled: bool = False
    #: State set by the peer.
    state: DeliveryState | None = None
    #: State that we send with the first frame, for example a transactional state.
    local_state: DeliveryState | None = None
    complete: bool = False
    aborted: bool = False
    context: Any = None

    def __init__(self, link: SenderLink, tag: bytes, message_format: int, settled: bool) -> None:
        # What most deliveries never change are attributes of the class: there is one of these per message.
        self.link = link
        self.tag = tag
        self.message_format = message_format
        #: Settled by us; no further notification follows.
        self.settled = settled

    def resume(self, link: SenderLink) -> None:
        """Continue as a delivery of *link*, which resumes the delivery's earlier link (§2.6.13)."""
        self.link = link
        self.resumed = True
        self.confirms = False
        self.delivery_id = -1
        self.settled = False
        self.remote_settled = False
        self.state = None
        self.local_state = None
        self.state_size = 0
        self.complete = True

    def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a further piece of a message begun with ``more``; ``more=False`` ends it.

        Raises:
            LocalProtocolError: The message is complete or aborted, its link is detached, or the
                message becomes too large for the peer. Nothing was sent.
        """
        if self.complete:
            raise LocalProtocolError("the message is complete")
        self.link.continue_sending(self, data, more)

    def abort(self) -> None:
        """Abort an unfinished message (§2.7.5 ``aborted``). The peer drops the part that it has.

        Raises:
            LocalProtocolError: The message is complete.
        """
        if self.aborted:
            return
        if self.complete:
            raise LocalProtocolError("the message is complete; it can no longer be aborted")
        self.link.abort(self)

    def settle(self, state: DeliveryState | None = None) -> None:
        """Settle, with a disposition to the peer if it has not settled already.

        Raises:
            LocalProtocolError: *state* is larger than the peer's frames, or is *received*. Nothing
                has changed.
            EncodeError: *state* has no encoding.
        """
        if self.settled:
            return
        if type(state) is Received:
            raise LocalProtocolError("only the receiver may set the state *received* (§3.4.1)")
        if self.confirms:
            self.link.confirm(self, state)
            return
        if self.delivery_id >= 0:
            session = self.link.session
            if self.delivery_id in session.sent_unsettled:
                session.queue_disposition(SENDER, self.delivery_id, True, state)
                session.forget_outgoing(self.delivery_id)
        self.settled = True
        if self.resumed:
            self.link.finished(self)

    def __repr__(self) -> str:
        return f"<Sending {self.delivery_id} on {self.link.name!r}: {self.state}>"


class _Queued:
    """Piece of a delivery that waits for the session window or for room in the output."""

    def __init__(self, sending: Sending, data: bytes, more: bool) -> None:
        self.sending = sending
        self.data = data
        self.at: int = 0
        self.more = more


#: Octets of a message that ``send_run`` sends at most: it copies them.
_RUN_PAYLOAD_MAX: Final = 16_384
#: Shared by links with nothing queued: an empty deque takes more memory than the rest of a link.
_NOTHING: Final[deque[_Queued]] = deque()


class SenderLink(Link):
    """Link on which we send to the peer."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name, SENDER)
        self.draining: bool = False
        self.flow_properties: Mapping[object, object] | None = None
        #: Properties of the next flow.
        self._reported: Mapping[object, object] | None = None
        self.idle: bool = False
        self.requeues: bool = False
        #: Number of the last delivery-tag.
        self.tags: int = 0
        self._current: Sending | None = None
        self._queue: deque[_Queued] = _NOTHING
        #: Number of deliveries counted in delivery_count whose first frame has not left.
        self._unsent: int = 0
        #: Number of the last of these for which the peer has taken the credit back.
        self._uncredited: int = 0
        self._provisional: bool = False
        self._outcomes: list[Sending] = []
        self._credited: bool = False
        self._drain_due: bool = False
        self._drain_answered: bool = False
        #: Transfers that resume deliveries and wait for credit.
        self._resuming: list[_Queued] = []
        #: Resumed deliveries that are not settled yet.
        self._open: dict[Sending, None] = {}

    def accept(
        self,
        endpoint: Any,
        *,
        source: Any = None,
        target: Any = None,
        snd_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Attach our side of a link that the peer requested (§2.6.3).

        Omitted termini are answered as the peer requested them. The endpoint's ``on_attached`` is
        called before this returns, or ``on_detached`` if the link has ended.

        *unsettled* holds the deliveries left by an earlier link of this name (§2.6.13); without it
        the attach carries no map, and nothing counts as remembered.

        Raises:
            LocalProtocolError: The link is attached already.
            EncodeError: An argument has no encoding.
        """
        if snd_settle_mode is not None:
            self.snd_settle_mode = snd_settle_mode
        self.set_unsettled(unsettled)
        if (
            self._answer(endpoint, source, target, properties, offered_capabilities)
            and self._credited
        ):
            # The flow came before our answer, and no other event may follow for a long time.
            self._credited = False
            endpoint.on_credit(self)

    @property
    def writable(self) -> bool:
        """Whether the session window and the output have room; see ``on_credit``."""
        if self.incomplete:
            return False
        if self._queue or not self.session.has_room():
            self.session.engine.wait_for_room(self)
            return False
        return True

    def send(
        self,
        payload: bytes | Sequence[bytes],
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
    ) -> Sending:
        """Send one message, or with ``more`` its first piece. Uses one credit (§2.6.7).

        Data that does not fit the session window or the output is queued, in order.

        Raises:
            LocalProtocolError: No credit, not attached, another message of this link is unfinished,
                an unsettled map was incomplete, the message is too large for the peer, *settled*
                contradicts the settle mode, or *tag*, *message_format* or *state* is invalid.
                Nothing was sent.
            EncodeError: *state* has no encoding.
        """
        if not self.attached:
            raise LocalProtocolError(f"link {self.name!r} is not attached")
        if self.credit <= 0:
            raise LocalProtocolError(
                f"link {self.name!r} has no credit", condition="amqp:link:transfer-limit-exceeded"
            )
        if self._current is not None:
            raise LocalProtocolError(f"a message of link {self.name!r} is unfinished")
        if self.incomplete:
            raise LocalProtocolError("with an incomplete unsettled map nothing new may be sent")
        if type(state) is Received:
            raise LocalProtocolError("only the receiver may set the state *received* (§3.4.1)")
        if self.snd_settle_mode == SND_SETTLED:
            if settled is False:
                raise LocalProtocolError("the link sends settled deliveries only")
            settled = True
        elif settled is None:
            settled = False
        elif settled and self.snd_settle_mode == SND_UNSETTLED:
            raise LocalProtocolError("the link sends unsettled deliveries only")
        data = payload if isinstance(payload, bytes) else b"".join(payload)
        if self.max_message_size and len(data) > self.max_message_size:
            raise LocalProtocolError(
                f"{len(data)} bytes are more than the {self.max_message_size} that the peer takes",
                condition="amqp:link:message-size-exceeded",
            )
        if tag is None:
            self.tags = (self.tags + 1) & 0xFFFFFFFF
            tag = self.tags.to_bytes(4, "big")
        elif len(tag) > 32:
            raise LocalProtocolError("a delivery-tag has at most 32 octets")
        if message_format < 0 or message_format > 0xFFFFFFFF:
            raise LocalProtocolError("a message-format is a number from 0 to 4294967295")
        session = self.session
        room = session.payload_max
        sending = Sending(self, tag, message_format, settled)
        if state is not None:
            sending.state_size = len(encode_state(state))
            room -= sending.state_size
            if room <= 0:
                raise LocalProtocolError(
                    "the state does not fit a frame of the peer's",
                    condition="amqp:frame-size-too-small",
                )
            sending.local_state = state
        sending.context = context
        sending.complete = not more
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & 0xFFFFFFFF
        if self.available:
            self.available -= 1
        if more:
            self._current = sending
            sending.size = len(data)
        size = len(data)
        if (
            not self._queue
            and size <= room
            and session.remote_incoming_window > 0
            and not more
            and session.engine.output_size < session.engine.output_max
        ):
            if len(tag) == 4 and not message_format and state is None and not self._in_order:
                # As in _emit(), for most messages.
                number = sending.delivery_id = session.add_outgoing(sending)
                session.write_transfer(
                    first_transfer(session.channel, self.handle, number, tag, settled, False, size),
                    data,
                )
            else:
                self._emit(sending, data, 0, size, False)
        else:
            self._unsent += 1
            self._enqueue(_Queued(sending, data, more))
            session.queue_link(self)
        return sending

    def send_run(
        self, payloads: list[Any], contexts: list[Any], settled: bool | None = None
    ) -> list[Sending]:
        """Send the first of *payloads*, with *contexts*, as ``send`` does; return their deliveries.

        Stops before a message that could not leave at once in one frame, or that ``send`` would refuse.
        """
        mode = self.snd_settle_mode
        if (
            not self.attached
            or self._current is not None
            or self.incomplete
            or self._queue
            or self._in_order
            or (settled is False and mode == SND_SETTLED)
            or (settled is True and mode == SND_UNSETTLED)
            or self.session.engine.options.whole_frames
        ):
            return []
        size_max = min(self.session.payload_max, _RUN_PAYLOAD_MAX)
        if self.max_message_size:
            size_max = min(size_max, self.max_message_size)
        return self.session.send_run(
            self,
            payloads,
            contexts,
            settled is True or mode == SND_SETTLED,
            min(self.credit, len(payloads)),
            size_max,
        )

    def send_resumed(
        self,
        payload: bytes,
        context: Any = None,
        *,
        settled: bool,
        tag: bytes,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
        aborted: bool = False,
    ) -> Sending:
        """Send on a delivery that the peer of another link resumes, as it came; see :meth:`Link.relay`.

        Other than with ``send``, *state* may be *received*, and *settled* may contradict the settle mode:
        the peers' maps say what the transfer has to carry (Part 3 §3.4.6). A state that does not fit the
        peer's frames is left out, and the delivery settled without it.

        Raises:
            LocalProtocolError: No credit, not attached, or another message of this link is unfinished.
                Nothing was sent.
        """
        if not self.attached or self.credit <= 0 or self._current is not None:
            raise LocalProtocolError(
                f"link {self.name!r} is not attached, has no credit, or sends another message"
            )
        sending = Sending(self, tag, message_format, settled)
        sending.resumed = True
        sending.context = context
        sending.complete = not more
        sending.aborted = aborted
        if state is not None and not aborted:
            self._set_state(sending, state)
        self.credit -= 1
        self.delivery_count = serial.add(self.delivery_count, 1)
        if self.available:
            self.available -= 1
        if more:
            self._current = sending
            sending.size = len(payload)
        self._unsent += 1
        self._enqueue(_Queued(sending, payload, more))
        self.session.queue_link(self)
        return sending

    def _enqueue(self, queued: _Queued) -> None:
        if self._queue is _NOTHING:
            self._queue = deque()
        self._queue.append(queued)

    def continue_sending(self, sending: Sending, data: bytes, more: bool) -> None:
        """Send a further piece of an unfinished message; see ``Sending.write``."""
        if self._ended or not self.attached:
            raise LocalProtocolError(f"link {self.name!r} is not attached")
        size = sending.size + len(data)
        if self.max_message_size and size > self.max_message_size:
            raise LocalProtocolError(
                f"{size} bytes are more than the {self.max_message_size} that the peer takes",
                condition="amqp:link:message-size-exceeded",
            )
        sending.size = size
        if not more:
            sending.complete = True
            self._current = None
        self._enqueue(_Queued(sending, data, more))
        self.session.queue_link(self)
        if not more and self._resuming:
            self._queue_resuming()

    def abort(self, sending: Sending) -> None:
        """Abort an unfinished message; see ``Sending.abort``."""
        sending.complete = True
        sending.aborted = True
        sending.settled = True
        if sending.delivery_id >= 0:
            # Whether or not the abort itself still leaves, the peer's dispositions of it no longer
            # count.
            self.session.forget_outgoing(sending.delivery_id)
        if self._current is sending:
            self._current = None
        if self._ended or not self.attached:
            return
        while self._queue and self._queue[-1].sending is sending:
            self._queue.pop()
        self._enqueue(_Queued(sending, b"", False))
        self.session.queue_link(self)
        if self._resuming:
            self._queue_resuming()

    # --- resuming (§2.6.13) ----------------------------------------------------------------

    def set_unsettled(self, unsettled: UnsettledMap | None, relays: Any = None) -> None:
        super().set_unsettled(unsettled, relays)
        # Generated tags continue after those that are in use (§2.8.7).
        for tag in self._remembered:
            if len(tag) == 4:
                self.tags = max(self.tags, int.from_bytes(tag, "big"))

    def states(self) -> list[tuple[bytes, Any]]:
        """Return the entries of our unsettled map."""
        return [(tag, entry.state) for tag, entry in self._remembered.items()]

    def _resume(self, remote: dict[bytes, Any]) -> None:
        """Perform the action of the decision table for each delivery (Part 3 §3.4.6).

        Deliveries that only the receiver remembers are skipped: the receiver has our map, and takes
        them as settled.
        """
        for tag in list(self._remembered):
            known = tag in remote
            if not known and self.remote_incomplete:
                continue
            entry = self._remembered[tag]
            theirs = remote.get(tag)
            action = action_for(entry.state, theirs, known=known)
            if action is Action.RESEND:
                self._resend(entry)
            elif action is Action.CONTINUE or action is Action.RESTART:
                if entry.payload is None:
                    self._abort(entry)
                else:
                    self._resume_sending(entry, theirs if action is Action.CONTINUE else None)
            elif action is Action.ABORT:
                self._abort(entry)
            else:
                sending = self._again(entry)
                if action is Action.CONFIRM:
                    sending.state = theirs
                    sending.confirms = True
                    self._report(sending)
                elif action is Action.RESTATE:
                    sending.state = entry.state
                    self._send_state(sending, entry.state)
                else:
                    sending.state = entry.state
                    sending.settled = True
                    self._report(sending)
                    if action is Action.SETTLE:
                        self._send_state(sending, None)
                    else:
                        self.finished(sending)

    def _again(self, entry: Unsettled) -> Sending:
        """Return the object that represents a remembered delivery on this link."""
        live = entry.delivery
        if isinstance(live, Sending):
            sending = live
            sending.resume(self)
        else:
            sending = Sending(self, entry.tag, entry.message_format, False)
            sending.context = entry.context
            sending.resume(self)
            entry.delivery = sending
        self._open[sending] = None
        return sending

    def _resend(self, entry: Unsettled) -> None:
        """Leave a delivery to its owner, who decides whether to send it as new.

        With an incomplete map the delivery stays remembered, since nothing new may be sent.
        """
        if not self.incomplete:
            del self._remembered[entry.tag]
            self.unknown.append(entry)

    def _resume_sending(self, entry: Unsettled, position: Received | None) -> None:
        data = whole(entry.payload)
        if 0 < self.max_message_size < len(data):
            # The peer's max-message-size is smaller than before.
            self._abort(entry)
            return
        at = 0
        if position is not None and not entry.message_format:
            at = offset_of(data, position, self.session.limits)
            if at < 0:
                raise link_fault(
                    "amqp:invalid-field",
                    "the unsettled map claims more octets than the delivery has",
                )
        sending = self._again(entry)
        if at:
            sending.local_state = position
            sending.state_size = len(encode_state(position))
        self._resuming.append(_Queued(sending, data[at:], False))

    def _abort(self, entry: Unsettled) -> None:
        """Abort at the receiver; without an outcome the message has to be sent as new."""
        sending = Sending(self, entry.tag, entry.message_format, True)
        sending.resume(self)
        sending.aborted = True
        sending.settled = True
        self._open[sending] = None
        self._resuming.append(_Queued(sending, b"", False))
        if known_of(entry.state) is Known.OUTCOME:
            del self._remembered[entry.tag]
            sending.state = entry.state
            sending.context = entry.context
            self._report(sending)
        else:
            self._resend(entry)

    def _report(self, sending: Sending) -> None:
        """Notify the endpoint of *sending* in the same way as of any outcome."""
        self._outcomes.append(sending)
        self.session.touch(self)

    def _send_state(self, sending: Sending, state: DeliveryState | None) -> None:
        """Queue a transfer without payload that carries only the state of *sending*."""
        if state is not None:
            self._set_state(sending, state)
        self._resuming.append(_Queued(sending, b"", False))

    def _set_state(self, sending: Sending, state: DeliveryState) -> None:
        """Let the first transfer of *sending* carry *state*, if that fits."""
        size = len(encode_state(state))
        if size < self.session.payload_max:
            sending.local_state = state
            sending.state_size = size
        else:
            # The state does not fit the peer's frames: settling without it has to suffice.
            sending.settled = True

    def confirm(self, sending: Sending, outcome: DeliveryState | None) -> None:
        """Confirm the receiver's outcome, or *outcome* if the owner applied that instead."""
        sending.confirms = False
        if self._ended or not self.attached:
            sending.settled = True
            return
        theirs = sending.state
        if outcome is None or outcome == theirs:
            sending.settled = True
            self._send_state(sending, theirs)
        else:
            sending.state = outcome
            self._send_state(sending, outcome)
        self._queue_resuming()

    def finished(self, sending: Sending) -> None:
        """Remove a resumed delivery that is settled."""
        self._open.pop(sending, None)
        entry = self._remembered.get(sending.tag)
        if entry is not None and entry.delivery is sending:
            del self._remembered[sending.tag]

    def reduce(self) -> None:
        """Queue the resumptions, or suspend the link; see :meth:`Link.reduce`."""
        self.flush_batch()
        self._queue_resuming()
        self._suspend_reduced()

    def _suspend_reduced(self) -> None:
        """Suspend the link when the maps cannot become shorter (§2.6.13).

        The maps of the next attach may then be complete.
        """
        if self.incomplete and self.attached and not self._open and not self._queue:
            self.detach(closed=False)

    def _queue_resuming(self) -> None:
        """Queue resumptions as far as there is credit, but not in the middle of a message."""
        if not self._resuming or self.credit <= 0 or self._current is not None:
            return
        most = min(self.credit, len(self._resuming))
        for queued in self._resuming[:most]:
            self._enqueue(queued)
        del self._resuming[:most]
        self.credit -= most
        self.delivery_count = serial.add(self.delivery_count, most)
        self._unsent += most
        self.session.queue_link(self)

    def remember(self) -> UnsettledMap:
        """Return the deliveries left unsettled; see :meth:`Link.remember`."""
        found: UnsettledMap = {}
        for tag, entry in self._remembered.items():
            if not (isinstance(entry.delivery, Sending) and entry.delivery.settled):
                found[tag] = entry
        for sending in self.unsettled:
            # Deliveries that have not left, or whose last piece has not been written, cannot be
            # resumed.
            if (
                sending.delivery_id >= 0
                and sending.complete
                and not sending.settled
                and sending.tag not in found
            ):
                found[sending.tag] = Unsettled(
                    tag=sending.tag,
                    message_format=sending.message_format,
                    context=sending.context,
                    delivery=sending,
                )
        return found

    def emit_queued(self) -> bool:
        """Send one queued frame; return True if more may leave."""
        queued = self._queue[0]
        sending = queued.sending
        room = self.session.payload_max
        if sending.delivery_id < 0:
            if self._unsent <= self._uncredited:
                # The peer took the credit back. A flow that restores it queues the link again.
                if self._drain_due:
                    self.drained()
                return False
            self._unsent -= 1
            room -= sending.state_size
        if sending.aborted:
            self._queue.popleft()
            self._emit_aborted(sending)
        else:
            size = len(queued.data) - queued.at
            if size > room:
                self._emit(sending, queued.data, queued.at, queued.at + room, True)
                queued.at += room
            else:
                self._queue.popleft()
                self._emit(sending, queued.data, queued.at, len(queued.data), queued.more)
        if sending.resumed and sending.settled:
            self.finished(sending)
            self._suspend_reduced()
        if self._drain_due and not self._queue:
            self.drained()
        return len(self._queue) > 0

    def _emit(self, sending: Sending, data: bytes, at: int, end: int, more: bool) -> None:
        session = self.session
        size = end - at
        if sending.delivery_id >= 0:
            header = later_transfer(session.channel, self.handle, more, size)
        else:
            if self._in_order:
                session.flush_dispositions()
            sending.delivery_id = session.add_outgoing(sending)
            if (
                len(sending.tag) == 4
                and sending.message_format == 0
                and sending.local_state is None
                and not sending.resumed
            ):
                header = first_transfer(
                    session.channel,
                    self.handle,
                    sending.delivery_id,
                    sending.tag,
                    sending.settled,
                    more,
                    size,
                )
            else:
                header = any_transfer(
                    session.channel,
                    Transfer(
                        self.handle,
                        sending.delivery_id,
                        sending.tag,
                        sending.message_format,
                        sending.settled,
                        more,
                        state=sending.local_state,
                        resume=sending.resumed,
                    ),
                    size,
                )
        if at or end != len(data):
            data = data[at:end]
        session.write_transfer(header, data)

    def _emit_aborted(self, sending: Sending) -> None:
        session = self.session
        if sending.delivery_id < 0:
            sending.delivery_id = session.next_delivery_id()
        transfer = Transfer(
            self.handle,
            sending.delivery_id,
            sending.tag,
            0,
            settled=True,
            resume=sending.resumed,
            aborted=True,
        )
        session.write_transfer(any_transfer(session.channel, transfer, 0), b"")

    def drained(self) -> None:
        """Give back unused credit if the peer drains and nothing is left to send (§2.6.7)."""
        if not self.draining or self._ended or (self._drain_answered and not self.credit):
            return
        if self._queue and not (
            self._queue[0].sending.delivery_id < 0 and self._unsent <= self._uncredited
        ):
            self._drain_due = True
            return
        self._drain_due = False
        self._drain_answered = True
        self.delivery_count = serial.add(self.delivery_count, self.credit)
        self.credit = 0
        self.flow_due()

    def report(self, properties: Mapping[object, object]) -> None:
        """Send a flow with *properties*, the state of our side of the link (§2.7.4).

        Those of a flow that has not left yet are replaced.
        """
        self._reported = properties
        self.flow_due()

    def offer(self, available: int) -> None:
        """Set the number of waiting deliveries that the next flow reports (``available``)."""
        self.available = available

    def on_attach(self, attach: Attach) -> None:
        super().on_attach(attach)
        self.max_message_size = attach.max_message_size or 0
        if isinstance(attach.target, Coordinator):
            self._in_order = True

    def on_flow(self, flow: Flow) -> None:
        """Handle the receiver's flow: credit, drain, or a request for our state (§2.6.7)."""
        counted = flow.delivery_count
        if flow.link_credit is not None:
            # A receiver that has not seen our attach cannot know our delivery-count, which began at
            # 0.
            behind = serial.difference(self.delivery_count, 0 if counted is None else counted)
            self.used = True
            credit = flow.link_credit - max(behind, 0)
            self.credit = max(0, credit)
            # Credit taken back is no longer available to deliveries that have not left (§2.6.7).
            self._uncredited = min(self._unsent, max(0, -credit))
            if self._resuming and self.attached:
                self._queue_resuming()
            if self._queue:
                self.session.queue_link(self)
        self.draining = flow.drain
        self._drain_answered = False
        if flow.properties is not None:
            # Flows, unlike attaches, do not count as memory; so other properties are not kept.
            self.flow_properties = {
                name: value
                for name, value in flow.properties.items()
                if name == _TXN_ID or (name == _LOAD and _is_load(value))
            }
        self._credited = True
        super().on_flow(flow)

    def on_outcome(self, sending: Sending) -> None:
        """Add *sending*, whose state the receiver changed or settled, to the next batch."""
        if sending.resumed and sending.settled:
            self.finished(sending)
        if sending.noted:
            return
        if not sending.settled:
            sending.noted = True
            self._provisional = True
        if not self._outcomes:
            self.session.touch(self)
        self._outcomes.append(sending)

    def on_room(self) -> None:
        """Notify the endpoint that the window or the output has room again."""
        if self.attached and self.endpoint is not None:
            self.endpoint.on_credit(self)

    def flush_batch(self) -> None:
        endpoint = self.endpoint
        if endpoint is None or self.ours.stage is DETACHED:
            return
        if self._outcomes:
            outcomes = self._outcomes
            self._outcomes = []
            if self._provisional:
                self._provisional = False
                for sending in outcomes:
                    sending.noted = False
            endpoint.on_outcomes(self, outcomes)
        if self._credited:
            self._credited = False
            if self.attached:
                endpoint.on_credit(self)
        if self.incomplete:
            self._suspend_reduced()

    def drop_queued(self) -> None:
        # None of these has left, so that the session does not know them.
        last: Sending | None = None
        for queued in self._queue:
            sending = queued.sending
            if (
                sending is not last
                and sending.delivery_id < 0
                and not sending.settled
                and not sending.resumed
            ):
                self.unsettled.append(sending)
            last = sending
        for sending in self._open:
            if sending.delivery_id < 0 and not sending.settled:
                self.unsettled.append(sending)
        self._open.clear()
        self._resuming.clear()
        self._queue.clear()
        self._unsent = 0
        self._uncredited = 0
        self._current = None

    def flow(self) -> Flow:
        """Create a flow of this link that counts only deliveries that have left."""
        flow = self.session.flow(
            handle=self.handle,
            delivery_count=serial.add(self.delivery_count, -self._unsent),
            link_credit=self.credit + self._unsent - self._uncredited,
            available=self.available + self._unsent,
            drain=self.draining,
        )
        if self._reported is not None:
            flow.properties = self._reported
            self._reported = None
        return flow


def _is_load(value: object) -> bool:
    """Return whether *value* is a list of two numbers, which takes little memory."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int) and 0 <= each <= 0xFFFFFFFF for each in value)
    )
