"""Links: credit, and how deliveries are assembled and split (Part 2 §2.6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..codec.composites import encode_composite
from ..errors import LocalProtocolError
from ..events import Peer
from ..outcomes import Error, Received
from ..termini import Coordinator, Source, Target
from ..unsettled import Unsettled, UnsettledMap
from . import serial
from .delivery import Delivery, Sending, is_outcome
from .frames import (
    Fault,
    any_transfer,
    encode_state,
    final_frame,
    first_transfer,
    later_transfer,
    link_fault,
)
from .lifecycle import (
    ATTACHED,
    CLOSED,
    DETACHED,
    LINK,
    Half,
    Step,
    link_state,
)
from .performatives import RECEIVER, SENDER, Attach, Detach, Flow, Transfer
from .resume import (
    Action,
    Known,
    action_for,
    known_of,
    offset_of,
    read_unsettled,
    state_at_target,
    whole,
)

if TYPE_CHECKING:
    from .session import Session

SND_UNSETTLED: Final = 0
SND_SETTLED: Final = 1
SND_MIXED: Final = 2
RCV_SECOND: Final = 1

#: Flow property that acquires messages in a transaction (Part 4 §4.4.3).
_TXN_ID: Final = "txn-id"

#: Memory for a piece of an incomplete message besides its bytes. A message may arrive in pieces of
#: one octet, and the limit is on the memory used, not on the bytes sent.
_CHUNK_COST: Final = 64


class Link:
    """Base class of sending and receiving links."""

    #: Whether the link refers to deliveries of other links, as a coordinator's does. Then input is
    #: handed over after that of the other links, and output leaves after their dispositions.
    _in_order: bool = False

    def __init__(self, session: Session, name: str, role: bool) -> None:
        self.session = session
        self.name = name
        #: Our role on the wire: SENDER or RECEIVER.
        self.role = role
        self.handle: int = -1
        self.remote_handle: int = -1
        self.ours = Half(LINK, DETACHED, ours=True)
        self.theirs = Half(LINK, DETACHED, ours=False)
        self.endpoint: Any = None
        self.source: Any = None
        self.target: Any = None
        self.snd_settle_mode: int = 2
        self.rcv_settle_mode: int = 0
        #: The peer's limit on a sending link, ours on a receiving link; 0 means no limit.
        self.max_message_size: int = 0
        self.properties: Mapping[object, object] = {}
        self.offered_capabilities: tuple[str, ...] = ()
        self.desired_capabilities: tuple[str, ...] = ()
        #: The unsettled map of the peer's attach; dropped once both sides are attached and the map
        #: has been processed.
        self.remote_unsettled: dict[bytes, Any] | None = None
        self.remote_incomplete: bool = False
        #: Whether we attach with an unsettled map, its contents, and whether it is complete.
        self.resumes: bool = False
        self.said: dict[Any, Any] = {}
        self.said_all: bool = True
        #: Whether both sides gave a map: a delivery absent from a side's map has no record there.
        self.resumed: bool = False
        #: One of the maps was incomplete (§2.6.13): the link sends no new deliveries, is suspended
        #: as soon as it has made the maps shorter, and has to be attached again.
        self.incomplete: bool = False
        #: Deliveries that we remember and the peer does not. On a sending link they would have to
        #: be sent as new, if at all. On a receiving link they count as settled, provided that
        #: ``resumed`` is set.
        self.unknown: list[Unsettled] = []
        #: Deliveries left by an earlier link and not processed on this one yet.
        self._remembered: UnsettledMap = {}
        self.attached: bool = False
        #: The peer answered our attach with a null terminus; its detach follows.
        self.refused: bool = False
        #: Deliveries that were unsettled when the link was detached; set by ``end``.
        self.unsettled: list[Any] = []
        self.context: Any = None
        self.delivery_count: int = 0
        self.credit: int = 0
        self.available: int = 0
        #: Whether the link may have had deliveries. Ending one that never had any needs no search.
        self.used: bool = False
        self._over: bool = False
        #: The engine itself has refused the peer's request: accepting it has no effect.
        self._denied: bool = False
        #: Why the link ended or we detached it, and whether the detach closed it.
        self._cause: Error | None = None
        self._closed: bool = False
        #: Bytes that the peer's attach adds to ``Engine.kept``.
        self._kept: int = 0
        self._flow_due: bool = False
        #: The peer expects a flow as soon as we have attached.
        self._echo: bool = False

    @property
    def connection(self) -> Any:
        """Engine that carries the link."""
        return self.session.engine

    @property
    def peer(self) -> Peer:
        """Peer of the link's connection."""
        return self.session.engine.peer

    @property
    def state(self) -> str:
        """Name of the link's state (§2.6.3)."""
        return link_state(self.ours, self.theirs)

    @property
    def over(self) -> bool:
        """Whether the link has ended, by a detach or with its session."""
        return self._over

    def refuse(self, error: Error) -> None:
        """Answer an attach request with null termini, then detach with *error* (§2.6.3).

        No effect if the session has ended already.

        Raises:
            LocalProtocolError: The link is attached already.
            EncodeError: *error* has no encoding.
        """
        if self._over or self._denied:
            return
        if self.ours.stage is not DETACHED:
            raise LocalProtocolError(f"link {self.name!r} is attached already")
        encode_composite(error)
        try:
            self.session.say_attach(self, null_termini=True)
        except LocalProtocolError as fault:
            # The peer's frames cannot even hold the name that it gave the link (§2.7.3).
            self.session.end(Error.of(fault))
            return
        self._say_detach(error, closed=True)
        if self.theirs.stage is not ATTACHED:
            # The peer has detached already; no further frame of this link follows.
            self.forget_said()

    def deny(self, error: Error) -> None:
        """Refuse the peer's request on behalf of the link's owner, who need not answer it."""
        self.refuse(error)
        self._denied = True
        self._cause = error
        self._closed = True

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Send detach, and drop the link's queued output. A second call has no effect.

        ``closed=False`` suspends the link: its name and unsettled deliveries may be resumed
        (§2.6.5). The endpoint's ``on_detached`` is called when the peer has answered.

        Raises:
            EncodeError: *error* has no encoding. Nothing was sent.
        """
        if self._over or self.ours.stage is not ATTACHED:
            return
        self._say_detach(error, closed=closed)

    def _say_detach(self, error: Error | None, *, closed: bool) -> None:
        session = self.session
        detach = final_frame(
            session.channel, Detach(self.handle, closed, error), session.engine.frame_size_out
        )
        session.flush_dispositions()
        self.attached = False
        self.drop_queued()
        self._cause = error
        self.ours.take(Step.DETACH_CLOSED if closed else Step.DETACH)
        session.write_bytes(detach)
        if self.theirs.stage is not ATTACHED and self.theirs.stage is not DETACHED:
            session.release_link(self)

    def drop_queued(self) -> None:
        """Drop queued output."""

    @property
    def has_early(self) -> bool:
        """Whether transfers arrived before the link was accepted and are held."""
        return False

    def take_early(self) -> None:
        """Process transfers held since before the attach was answered."""

    # --- the peer's frames ---------------------------------------------------------------

    def on_attach(self, attach: Attach) -> None:
        """Handle the peer's attach, which answers ours or requests a link.

        Raises:
            Fault: A field has an invalid value.
        """
        self.theirs.take(Step.ATTACH)
        self.remote_handle = attach.handle
        self._kept += self.session.engine.keep_said()
        self.properties = attach.properties or {}
        self.offered_capabilities = attach.offered_capabilities
        self.desired_capabilities = attach.desired_capabilities
        self.snd_settle_mode = attach.snd_settle_mode
        self.rcv_settle_mode = attach.rcv_settle_mode
        _check_termini(attach)
        self.source = attach.source
        self.target = attach.target
        if attach.snd_settle_mode > SND_MIXED or attach.rcv_settle_mode > RCV_SECOND:
            raise link_fault("amqp:invalid-field", "there is no such settle mode")
        if attach.unsettled is not None:
            self.remote_unsettled = read_unsettled(attach.unsettled, self.session.limits)
            self.remote_incomplete = attach.incomplete_unsettled

    # --- resuming (§2.6.13) ----------------------------------------------------------------

    def set_unsettled(self, unsettled: UnsettledMap | None) -> None:
        """Set the deliveries that an earlier link left unsettled; None if none is remembered."""
        if unsettled is not None:
            self.resumes = True
            for tag, entry in unsettled.items():
                if entry.delivery is None or not entry.delivery.settled:
                    # Deliveries given up in the meantime are omitted, which the peer takes as
                    # settled.
                    self._remembered[tag] = entry

    def states(self) -> list[tuple[bytes, Any]]:
        """Return the entries of our unsettled map."""
        raise NotImplementedError

    def resume(self) -> None:
        """Compare the unsettled maps and act on them, now that both sides are attached."""
        remote = self.remote_unsettled
        self.remote_unsettled = None
        self.resumed = self.resumes and remote is not None
        # A peer without a map remembers nothing, and in that sense its map is complete.
        self.incomplete = remote is not None and (self.remote_incomplete or not self.said_all)
        try:
            self._resume({} if remote is None else remote)
        except Fault as fault:
            self.detach(Error(fault.condition, fault.description))

    def _resume(self, remote: dict[bytes, Any]) -> None:
        raise NotImplementedError

    def reduce(self) -> None:
        """Continue a resumed link, or suspend it again if it only served to shorten the maps."""

    def remember(self) -> UnsettledMap:
        """Return the deliveries left unsettled, for the next attach; call it after the end.

        Payloads that we sent are not kept here: where ``payload`` is None, the caller has to add
        it, or the message cannot be sent again.
        """
        raise NotImplementedError

    def on_detach(self, detach: Detach) -> None:
        """Handle the peer's detach: answer it and notify the endpoint."""
        self.theirs.take(Step.DETACH_CLOSED if detach.closed else Step.DETACH)
        self.flush_batch()
        if self.ours.stage is ATTACHED:
            self.attached = False
            self.session.flush_dispositions()
            self.drop_queued()
            self.ours.take(Step.DETACH_CLOSED if detach.closed else Step.DETACH)
            self.session.write(Detach(self.handle, detach.closed, None))
        if self.ours.stage is DETACHED:
            # Not accepted yet: accept() or refuse() will answer.
            return
        self.session.release_link(self)
        # If we detached, the peer's answer gives no reason, and ours is reported.
        self.end(
            self._cause if detach.error is None else detach.error,
            detach.closed or self.ours.stage is CLOSED,
        )

    def end(self, error: Error | None, closed: bool) -> None:
        """End the link, for any cause, and notify its endpoint."""
        if self._over:
            return
        self.drop_queued()
        self.flush_batch()
        self._over = True
        self._cause = error
        self._closed = closed
        self.attached = False
        self.credit = 0
        self.unsettled = self.session.unsettled_of(self) + self.unsettled
        self.forget_said()
        endpoint = self.endpoint
        if endpoint is not None:
            endpoint.on_detached(self, error, closed)
            # The endpoint refers to the link, and the link to its session and engine: this
            # reference back would keep them and their buffers in memory until a full garbage
            # collection.
            self.endpoint = None

    def forget_said(self) -> None:
        """Stop counting the memory that the peer's attach takes."""
        self.session.engine.kept -= self._kept
        self._kept = 0

    def on_flow(self, flow: Flow) -> None:
        """Handle the peer's flow for this link."""
        if flow.echo:
            if self.ours.stage is DETACHED:
                self._echo = True
            else:
                self.flow_due()
        self.session.touch(self)

    def write_flow(self) -> bool:
        """Write the pending flow, unless the link is no longer attached."""
        self._flow_due = False
        if self.ours.stage is not ATTACHED or self.refused:
            return False
        self.session.write(self.flow())
        return True

    def flow(self) -> Flow:
        """Create a flow of this link."""
        raise NotImplementedError

    def flush_batch(self) -> None:
        """Pass the chunk's contents so far to the endpoint."""

    # --- accepting -----------------------------------------------------------------------

    def _answer(
        self,
        endpoint: Any,
        source: Any,
        target: Any,
        properties: Mapping[object, object] | None,
        offered_capabilities: Sequence[str],
    ) -> bool:
        if self._over or self._denied:
            # The link ended or was refused before its owner answered.
            endpoint.on_detached(self, self._cause, self._closed)
            return False
        if self.ours.stage is not DETACHED:
            raise LocalProtocolError(f"link {self.name!r} is attached already")
        if source is not None:
            self.source = source
        if target is not None:
            self.target = target
        try:
            self.session.say_attach(
                self, properties=properties, offered=tuple(offered_capabilities)
            )
        except LocalProtocolError as fault:
            # The answer repeats the peer's termini and exceeds the peer's own frame size, so the
            # peer is refused instead of an error raised here.
            self.deny(Error.of(fault))
            endpoint.on_detached(self, self._cause, True)
            return False
        self.endpoint = endpoint
        gone = self.theirs.stage is not ATTACHED
        if gone and not self.has_early:
            # The peer attached and detached before we answered.
            self._say_detach(None, closed=True)
            self.end(None, True)
            return False
        self.attached = True
        self.resume()
        if not self.attached:
            return False
        if self._echo:
            self._echo = False
            self.flow_due()
        endpoint.on_attached(self)
        if self.has_early:
            self.take_early()
        if gone:
            # The peer detached without waiting for our answer: process its transfers and end the
            # link.
            if self.attached:
                self._say_detach(None, closed=True)
            self.end(None, True)
            return False
        self.reduce()
        return self.attached

    def flow_due(self) -> None:
        """Send a flow of this link with the next flush."""
        if not self._flow_due:
            self._flow_due = True
            self.session.flow_due(self)

    def __repr__(self) -> str:
        kind = "sends" if self.role == SENDER else "receives"
        return f"<Link {self.name!r} {kind}, {self.state}, credit {self.credit}>"


class ReceiverLink(Link):
    """Link on which the peer sends to us."""

    #: Properties of the next flow.
    _flow_properties: Mapping[object, object] | None = None

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name, RECEIVER)
        self.streaming: bool = False
        #: Messages larger than this are handed out before they have arrived; 0 for none.
        self.stream_above: int = 0
        #: Whether any message was larger.
        self.has_streamed: bool = False
        self.draining: bool = False
        #: Deliveries beyond the credit that the peer may still send, because it may not have seen
        #: the flow that reduced the credit.
        self._excess: int = 0
        self._ask_echo: bool = False
        self._provisional: bool = False
        self._current: Delivery | None = None
        self._batch: list[Delivery] = []
        self._progress: list[Delivery] = []
        self._settled: list[Delivery] = []
        self._flowed: bool = False
        #: Credit granted by the link itself, for deliveries that the sender has to resume.
        self._reserved: int = 0
        #: Part of an incomplete message that had arrived when the link ended.
        self._partial: Unsettled | None = None
        #: Number of deliveries that may begin without credit, and the delivery-count of the first
        #: one.
        self._early_max: int = 0
        self._first_count: int = 0
        #: Transfers held until the attach is answered, the number of deliveries that they begin,
        #: whether the last one is incomplete, and the memory that they take.
        self._early: list[tuple[Transfer, bytes]] = []
        self._early_begun: int = 0
        self._early_more: bool = False
        self._early_cost: int = 0

    def accept(
        self,
        endpoint: Any,
        *,
        source: Any = None,
        target: Any = None,
        max_message_size: int | None = None,
        streaming: bool = False,
        stream_above: int = 0,
        rcv_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Attach our side of a link that the peer requested (§2.6.3).

        Omitted termini are answered as the peer requested them. The endpoint's ``on_attached`` is
        called before this returns, or ``on_detached`` if the link has ended.

        Messages of more than *stream_above* bytes are streamed although the others are not.

        *unsettled* holds the deliveries left by an earlier link of this name (§2.6.13); without it
        the attach carries no map, and nothing counts as remembered.

        Raises:
            LocalProtocolError: The link is attached already.
            EncodeError: An argument has no encoding.
        """
        self.set_streaming(streaming, max_message_size)
        self.stream_above = stream_above
        if rcv_settle_mode is not None:
            self.rcv_settle_mode = rcv_settle_mode
        self.set_unsettled(unsettled)
        if isinstance(self.target, Coordinator):
            self._in_order = True
        self._answer(endpoint, source, target, properties, offered_capabilities)

    def set_streaming(self, streaming: bool, max_message_size: int | None) -> None:
        """Choose between assembled and streamed messages, and set the maximum message size."""
        limits = self.session.limits
        self.streaming = streaming
        if max_message_size is not None:
            self.max_message_size = max_message_size
        elif streaming:
            self.max_message_size = limits.streaming_message_size_max
        else:
            self.max_message_size = limits.message_size_max

    def grant(
        self,
        credit: int,
        *,
        echo: bool = False,
        properties: Mapping[object, object] | None = None,
    ) -> None:
        """Allow the peer *credit* more deliveries, counted from now.

        The ``flow`` carries a total and the delivery-count from which it was computed, never a
        difference, so that transfers in flight are not granted twice (§2.6.7). It leaves with the
        next flush. No effect on a link that has ended.

        A smaller number than before takes credit back. Deliveries that the peer sends before it has
        processed the flow are still accepted; with *echo* the peer answers the flow, and
        ``on_flow`` follows.

        *properties* go with the flow, such as the ``txn-id`` of an acquisition (Part 4 §4.4.3).

        Raises:
            LocalProtocolError: *credit* is not an unsigned 32-bit number.
        """
        if credit < 0 or credit > 0xFFFFFFFF:
            raise LocalProtocolError("credit is a number from 0 to 4294967295")
        if self._over:
            return
        promised = self.credit + self._excess
        self._excess = promised - credit if promised > credit else 0
        if self.session.engine.peer_miscounts:
            # Such a peer adds this credit to the deliveries that it has sent by then, which may be
            # all that were promised.
            self._excess = min(promised, credit)
        self.credit = credit
        self.draining = False
        if echo:
            self._ask_echo = True
        if properties is not None:
            self._flow_properties = properties
        self.flow_due()

    @property
    def arriving(self) -> bool:
        """Whether a delivery has used its credit and has not arrived completely."""
        return self._current is not None

    def drain(self) -> None:
        """Ask the peer to use its credit now or give it back (§2.6.7). ``on_flow`` follows."""
        if self._over:
            return
        self.draining = True
        self.flow_due()

    def on_attach(self, attach: Attach) -> None:
        super().on_attach(attach)
        if attach.initial_delivery_count is None and attach.source is not None:
            raise link_fault(
                "amqp:invalid-field", "the sender's attach has no initial-delivery-count"
            )
        self.delivery_count = attach.initial_delivery_count or 0
        if self.ours.stage is DETACHED:
            # The peer requests the link and may send before we answer.
            self._early_max = self.session.limits.early_deliveries_max
            self._first_count = self.delivery_count

    def _is_early(self) -> bool:
        """Return whether the next delivery may begin without credit (S3 2.3.8)."""
        return serial.difference(self.delivery_count, self._first_count) < self._early_max

    def _keep_early(self, transfer: Transfer, data: bytes) -> None:
        """Hold a transfer of a link that has not been accepted yet.

        Raises:
            Fault: The held transfers begin too many deliveries, or are too large.
        """
        session = self.session
        if not self._early_more:
            if self._early_begun >= self._early_max:
                raise link_fault("amqp:link:transfer-limit-exceeded", "transfer before any credit")
            self._early_begun += 1
        cost = len(data) + _CHUNK_COST
        if self._early_cost + cost > session.limits.message_size_max:
            raise link_fault(
                "amqp:link:message-size-exceeded",
                "what came before the link was accepted is larger than a message may be",
            )
        self._early_more = transfer.more and not transfer.aborted
        self._early_cost += cost
        session.assemble(cost)
        self._early.append((transfer, data))

    def _let_go_of_early(self) -> list[tuple[Transfer, bytes]]:
        early = self._early
        if early:
            self._early = []
            self.session.assemble(-self._early_cost)
        return early

    @property
    def has_early(self) -> bool:
        """Whether transfers are held; see :attr:`Link.has_early`."""
        return bool(self._early)

    def take_early(self) -> None:
        """Process the held transfers of a link that has just been accepted."""
        try:
            for transfer, data in self._let_go_of_early():
                if not self.attached:
                    break
                self.on_transfer(transfer, data, 0, len(data))
        except Fault as fault:
            self.flush_batch()
            self.detach(Error(fault.condition, fault.description))
        else:
            self.flush_batch()

    def on_transfer(self, transfer: Transfer, data: bytes, at: int, end: int) -> None:
        """Process one frame of a delivery (§2.7.5).

        Raises:
            Fault: The frame exceeds a limit, or breaks a rule of the link or of its delivery.
        """
        session = self.session
        if not self.attached:
            if self.ours.stage is DETACHED:
                self._keep_early(transfer, data[at:end])
            return
        delivery = self._current
        first = delivery is None
        size = end - at
        if delivery is None:
            if (
                self.credit <= 0
                and self._excess <= 0
                and self._reserved <= 0
                and not self._is_early()
            ):
                raise link_fault(
                    "amqp:link:transfer-limit-exceeded", f"link {self.name!r} has no credit"
                )
            tag = transfer.delivery_tag
            delivery_id = transfer.delivery_id
            if delivery_id is None or tag is None:
                raise link_fault(
                    "amqp:invalid-field", "a first transfer needs a delivery-id and a delivery-tag"
                )
            if len(tag) > session.limits.delivery_tag_max:
                raise link_fault("amqp:invalid-field", "the delivery-tag is longer than 32 octets")
            if transfer.resume:
                delivery = self._begin_resumed(transfer, delivery_id, tag)
                if delivery.ignored:
                    return
                first = False
            else:
                if self._remembered or self.incomplete:
                    self._refuse_new(tag)
                if type(transfer.state) is Received:
                    raise _misplaced_received()
                if self.max_message_size and size > self.max_message_size and not transfer.aborted:
                    raise self._too_large()
                self._use_credit()
                delivery = Delivery(self, delivery_id, tag, transfer.message_format or 0)
                mode = transfer.rcv_settle_mode
                delivery.second = (self.rcv_settle_mode if mode is None else mode) == RCV_SECOND
                delivery.state = transfer.state
                if self.snd_settle_mode == SND_SETTLED or transfer.settled:
                    delivery.settled = True
                elif mode is not None and mode > self.rcv_settle_mode:
                    raise link_fault(
                        "amqp:invalid-field", "the link was not attached to be settled second"
                    )
                session.add_incoming(delivery)
        else:
            if transfer.delivery_id is not None and transfer.delivery_id != delivery.delivery_id:
                raise link_fault(
                    "amqp:invalid-field",
                    f"delivery {transfer.delivery_id} begins within delivery {delivery.delivery_id}",
                )
            if transfer.delivery_tag is not None and transfer.delivery_tag != delivery.tag:
                raise link_fault("amqp:invalid-field", "the delivery-tag changed within a delivery")
            if delivery.ignored:
                if transfer.aborted or not transfer.more:
                    self._current = None
                return
            if type(transfer.state) is Received:
                raise _misplaced_received()
            if transfer.settled and not delivery.settled:
                delivery.settled = True
                session.forget_incoming(delivery.delivery_id)
            if transfer.state is not None:
                delivery.state = transfer.state
            if (
                self.max_message_size
                and delivery._size + size > self.max_message_size
                and not transfer.aborted
                and not delivery.resumed
            ):
                raise self._too_large()
        if transfer.aborted:
            self._abort(delivery, first)
            return
        if delivery.resumed:
            if delivery.complete:
                # The whole message was here already.
                self._current = delivery if transfer.more else None
                return
            repeated = min(delivery.repeated, size)
            delivery.repeated -= repeated
            at += repeated
            size -= repeated
            if self.max_message_size and delivery._size + size > self.max_message_size:
                raise self._too_large()
        delivery._size += size
        if self.streaming or delivery.streamed:
            self._stream(delivery, transfer.more, first, data[at:end])
            return
        if transfer.more:
            if self.stream_above and delivery._size > self.stream_above:
                self._start_streaming(delivery, data[at:end])
                return
            self._current = delivery
            if size:
                cost = size + _CHUNK_COST
                delivery._unread += cost
                session.assemble(cost)
                delivery._chunks.append(data[at:end])
            return
        if delivery._chunks:
            delivery._chunks.append(data[at:end])
            delivery.payload = b"".join(delivery._chunks)
            delivery._chunks = []
            session.assemble(-delivery._unread)
            delivery._unread = 0
            self._current = None
        else:
            delivery.payload = data[at:end]
        delivery.complete = True
        if not self._batch:
            session.touch(self)
        self._batch.append(delivery)
        if self._in_order:
            session.engine.hand_over()

    def _use_credit(self) -> None:
        if self.credit > 0:
            self.credit -= 1
        elif self._excess > 0:
            self._excess -= 1
        elif self._reserved > 0:
            self._reserved -= 1
        self.delivery_count = (self.delivery_count + 1) & 0xFFFFFFFF
        if self.available:
            self.available -= 1

    # --- resuming (§2.6.13) ----------------------------------------------------------------

    def states(self) -> list[tuple[bytes, Any]]:
        """Return the entries of our unsettled map."""
        limits = self.session.limits
        return [(tag, state_at_target(entry, limits)) for tag, entry in self._remembered.items()]

    def _resume(self, remote: dict[bytes, Any]) -> None:
        """Settle deliveries that only we remember; grant credit to resume the others."""
        if not self.remote_incomplete:
            for tag in [tag for tag in self._remembered if tag not in remote]:
                entry = self._remembered.pop(tag)
                delivery = entry.delivery
                if isinstance(delivery, Delivery) and self.resumed:
                    delivery.settled = True
                self.unknown.append(entry)
        self._reserved = len([tag for tag in self.said if tag in remote])
        if self._reserved:
            self.flow_due()

    def _refuse_new(self, tag: bytes) -> None:
        """Check a delivery that is not resumed, while others may be.

        Raises:
            Fault: A map was incomplete, or the delivery-tag is that of a remembered delivery.
        """
        if self.incomplete:
            raise link_fault(
                "amqp:not-allowed", "with an incomplete unsettled map deliveries are only resumed"
            )
        if tag in self._remembered:
            raise link_fault(
                "amqp:invalid-field", "the delivery-tag is that of an unsettled delivery"
            )

    def _begin_resumed(self, transfer: Transfer, delivery_id: int, tag: bytes) -> Delivery:
        """Begin a delivery that the sender resumes."""
        entry = self._remembered.pop(tag, None)
        if entry is None:
            # Not in our map: the standard requires that it be ignored (§2.7.5).
            self._use_credit()
            delivery = Delivery(self, delivery_id, tag, 0)
            delivery.ignored = True
            if transfer.more and not transfer.aborted:
                self._current = delivery
            self._flowed = True
            self.session.touch(self)
            return delivery
        if self._reserved:
            self._reserved -= 1
            self.delivery_count = (self.delivery_count + 1) & 0xFFFFFFFF
        else:
            self._use_credit()
        self.used = True
        mode = transfer.rcv_settle_mode
        second = (self.rcv_settle_mode if mode is None else mode) == RCV_SECOND
        live = entry.delivery
        if isinstance(live, Delivery):
            delivery = live
            delivery.resume(self, delivery_id, second)
        else:
            delivery = Delivery(self, delivery_id, tag, entry.message_format)
            delivery.payload = whole(entry.payload)
            delivery._size = len(delivery.payload)
            delivery.complete = entry.complete
            delivery.local_state = entry.state
            delivery.context = entry.context
            delivery.resume(self, delivery_id, second)
            if delivery.complete and delivery.local_state is None and not transfer.aborted:
                # No handler has received the message yet.
                self._hand_out(delivery)
        if transfer.settled:
            delivery.settled = True
        else:
            self.session.add_incoming(delivery)
        if not transfer.aborted:
            self._compare(delivery, transfer.state)
            if not delivery.complete:
                self._prepare(delivery, transfer.state)
        return delivery

    def _hand_out(self, delivery: Delivery) -> None:
        """Deliver a message that was complete before the link was resumed."""
        if self.streaming:
            delivery._chunks = [delivery.payload]
            delivery._unread = len(delivery.payload) + _CHUNK_COST
            self.session.hold(delivery._unread)
        self.session.touch(self)
        self._batch.append(delivery)

    def _compare(self, delivery: Delivery, state: Any) -> None:
        """Reconcile our state of a resumed delivery with the sender's *state*, if any."""
        said = delivery.local_state
        final = known_of(state) is Known.OUTCOME
        if final:
            delivery.state = state
        if is_outcome(said) or (final and delivery.complete):
            # The outcome is decided: the rest of the message, if any is sent, is ignored.
            delivery.complete = True
            if delivery.settled:
                delivery.local_settled = True
                self.on_settled(delivery)
            elif final:
                # The sender's outcome is definitive (§3.4.6, row 13): return the same one, settled.
                session = self.session
                session.queue_disposition(RECEIVER, delivery.delivery_id, True, state)
                session.forget_incoming(delivery.delivery_id)
                delivery.local_state = state
                delivery.local_settled = True
                delivery.settled = True
                self.on_settled(delivery)
            else:
                delivery.say_again()
        elif delivery.settled and delivery.complete:
            self.on_settled(delivery)

    def _prepare(self, delivery: Delivery, state: Any) -> None:
        """Prepare to receive the rest of a message whose beginning is here.

        Raises:
            Fault: The sender continues behind the end of the part that we have.
        """
        have = delivery._size
        start = 0
        if type(state) is Received:
            start = offset_of(delivery.payload, state, self.session.limits)
            if start < 0:
                raise link_fault(
                    "amqp:invalid-field", "a delivery is resumed behind what we have of it"
                )
        delivery.repeated = have - start
        if have:
            self._current = delivery
            cost = have + _CHUNK_COST
            delivery._unread = cost
            delivery._chunks = [delivery.payload]
            delivery.payload = b""
            if self.streaming:
                self.session.hold(cost)
                self.session.touch(self)
                self._batch.append(delivery)
            else:
                self.session.assemble(cost)

    def remember(self) -> UnsettledMap:
        """Return the deliveries left unsettled; see :meth:`Link.remember`."""
        found: UnsettledMap = {}
        in_vain: UnsettledMap = {}
        for tag, entry in self._remembered.items():
            # If the map cannot name all of them, those named this time go last, so that each gets
            # its turn.
            (in_vain if self.incomplete and tag in self.said else found)[tag] = entry
        for delivery in self.unsettled:
            if delivery.settled or not (delivery.complete or delivery.payload):
                continue
            state = delivery.local_state
            found[delivery.tag] = Unsettled(
                tag=delivery.tag,
                state=state if known_of(state) is Known.OUTCOME else None,
                payload=delivery.payload,
                complete=delivery.complete,
                message_format=delivery.message_format,
                context=delivery.context,
                delivery=delivery,
            )
        partial = self._partial
        if partial is not None:
            found[partial.tag] = partial
        found.update(in_vain)
        return found

    def _stream(self, delivery: Delivery, more: bool, first: bool, data: bytes) -> None:
        if data:
            cost = len(data) + _CHUNK_COST
            self.session.hold(cost)
            delivery._unread += cost
            delivery._chunks.append(data)
        delivery.complete = not more
        self._current = delivery if more else None
        self.session.touch(self)
        if first:
            self._batch.append(delivery)
        elif not self._progress or self._progress[-1] is not delivery:
            self._progress.append(delivery)

    def _start_streaming(self, delivery: Delivery, data: bytes) -> None:
        """Begin to stream a message that has become too large to be assembled."""
        unread = delivery._unread
        if unread:
            self.session.assemble(-unread)
            self.session.hold(unread)
        delivery.streamed = True
        self.has_streamed = True
        self._stream(delivery, True, True, data)

    def _too_large(self) -> Fault:
        return link_fault(
            "amqp:link:message-size-exceeded",
            f"the message is larger than the {self.max_message_size} bytes allowed",
        )

    def _abort(self, delivery: Delivery, first: bool) -> None:
        """Discard a delivery that the sender has aborted: there is nothing to settle (§2.7.5)."""
        session = self.session
        delivery.aborted = True
        delivery.settled = True
        delivery.local_settled = True
        session.forget_incoming(delivery.delivery_id)
        self._drop(delivery)
        self._current = None
        if delivery.complete:
            # Resumed only to be dropped; the endpoint received the message long ago.
            self.on_settled(delivery)
        elif (self.streaming or delivery.streamed) and not first:
            session.touch(self)
            self._progress.append(delivery)
        elif self.credit == 0 or not self.streaming:
            # The credit is used although nothing is delivered; the endpoint may top it up.
            self._flowed = True
            session.touch(self)

    def _drop(self, delivery: Delivery) -> None:
        if self.streaming or delivery.streamed:
            self.session.release(delivery._unread)
        else:
            self.session.assemble(-delivery._unread)
        delivery._unread = 0
        delivery._chunks = []

    def on_flow(self, flow: Flow) -> None:
        """Handle the sender's flow: available messages, and credit given back."""
        if flow.available is not None:
            self.available = flow.available
        if flow.delivery_count is not None:
            advanced = serial.difference(flow.delivery_count, self.delivery_count)
            if advanced > 0:
                # A drain returns credit by advancing the count (§2.6.7). Only the sender may
                # advance it, and its flow may refer to a credit that we have changed since.
                self.delivery_count = flow.delivery_count
                left = self.credit - advanced
                self.credit = max(0, left)
                self._excess = max(0, self._excess + min(0, left))
        self._flowed = True
        super().on_flow(flow)

    def on_settled(self, delivery: Delivery) -> None:
        """Add *delivery*, which the sender settled or whose state changed, to the next batch."""
        if delivery.noted:
            return
        if not delivery.settled:
            delivery.noted = True
            self._provisional = True
        if not self._settled:
            self.session.touch(self)
        self._settled.append(delivery)

    def flush_batch(self) -> None:
        endpoint = self.endpoint
        if endpoint is None:
            return
        if self._batch:
            batch = self._batch
            self._batch = []
            self.used = True
            endpoint.deliver(self, batch)
        if self._progress:
            progress = self._progress
            self._progress = []
            endpoint.on_data(self, progress)
        if self._settled:
            settled = self._settled
            self._settled = []
            if self._provisional:
                self._provisional = False
                for delivery in settled:
                    delivery.noted = False
            endpoint.on_settled(self, settled)
        if self._flowed:
            self._flowed = False
            endpoint.on_flow(self)

    def drop_queued(self) -> None:
        self._let_go_of_early()
        delivery = self._current
        if delivery is not None:
            self._current = None
            if delivery.ignored or delivery.complete:
                return
            streamed = self.streaming or delivery.streamed
            if not streamed and not delivery.settled:
                payload = b"".join(delivery._chunks)
                if payload:
                    # Not the delivery itself, which would keep the link in memory; no handler has
                    # seen it.
                    self._partial = Unsettled(
                        tag=delivery.tag,
                        payload=payload,
                        complete=False,
                        message_format=delivery.message_format,
                    )
            self._drop(delivery)
            delivery.aborted = streamed or delivery.settled
            delivery.local_settled = True
            self.session.forget_incoming(delivery.delivery_id)
            if streamed:
                self._progress.append(delivery)
                self.session.touch(self)

    def end(self, error: Error | None, closed: bool) -> None:
        """End the link, for any cause, and release its streamed bytes."""
        super().end(error, closed)
        if self.streaming or self.has_streamed:
            # Whether read or dropped, these bytes no longer count against the session window.
            for delivery in self.unsettled:
                self.session.release(delivery._unread)
                delivery._unread = 0

    def flow(self) -> Flow:
        """Create a flow of this link. Before the peer's attach the delivery-count is unknown."""
        echo = self._ask_echo
        self._ask_echo = False
        flow = self.session.flow(
            handle=self.handle,
            delivery_count=None if self.theirs.stage is DETACHED else self.delivery_count,
            link_credit=self.credit + self._reserved,
            drain=self.draining,
            echo=echo,
        )
        if self._flow_properties is not None:
            flow.properties = self._flow_properties
            self._flow_properties = None
        return flow


def _check_termini(attach: Attach) -> None:
    """Refuse termini of extension types (§3.5), since the fields accept any value.

    Raises:
        Fault: A terminus is not of a type that the standard defines.
    """
    source, target = attach.source, attach.target
    if source is not None and not isinstance(source, Source):
        raise link_fault("amqp:not-implemented", "the source is of a type that is not known here")
    if target is not None and not isinstance(target, Target | Coordinator):
        raise link_fault("amqp:not-implemented", "the target is of a type that is not known here")


def _misplaced_received() -> Fault:
    return link_fault(
        "amqp:invalid-field", "a sender says *received* only where it resumes a delivery (§3.4.1)"
    )


class _Queued:
    """Piece of a delivery that waits for the session window or for room in the output."""

    def __init__(self, sending: Sending, data: bytes, more: bool) -> None:
        self.sending = sending
        self.data = data
        self.at: int = 0
        self.more = more


class SenderLink(Link):
    """Link on which we send to the peer."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name, SENDER)
        self.draining: bool = False
        self.flow_properties: Mapping[object, object] | None = None
        self.idle: bool = False
        self.requeues: bool = False
        self._tags: int = 0
        self._current: Sending | None = None
        self._queue: deque[_Queued] = deque()
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
        state: Any = None,
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
            raise LocalProtocolError("only the receiver says how much it has received (§3.4.1)")
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
            self._tags = (self._tags + 1) & 0xFFFFFFFF
            tag = self._tags.to_bytes(4, "big")
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
        if (
            not self._queue
            and len(data) <= room
            and session.remote_incoming_window > 0
            and not more
            and session.engine.output_size < session.engine.output_max
        ):
            self._emit(sending, data, 0, len(data), False)
        else:
            self._unsent += 1
            self._queue.append(_Queued(sending, data, more))
            session.queue_link(self)
        return sending

    def go_on(self, sending: Sending, data: bytes, more: bool) -> None:
        """Send a further piece of an unfinished message; see ``Sending.write``."""
        if self._over or not self.attached:
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
        self._queue.append(_Queued(sending, data, more))
        self.session.queue_link(self)
        if not more and self._resuming:
            self._queue_resuming()

    def give_up(self, sending: Sending) -> None:
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
        if self._over or not self.attached:
            return
        while self._queue and self._queue[-1].sending is sending:
            self._queue.pop()
        self._queue.append(_Queued(sending, b"", False))
        self.session.queue_link(self)
        if self._resuming:
            self._queue_resuming()

    # --- resuming (§2.6.13) ----------------------------------------------------------------

    def set_unsettled(self, unsettled: UnsettledMap | None) -> None:
        super().set_unsettled(unsettled)
        # Generated tags continue after those that are in use (§2.8.7).
        for tag in self._remembered:
            if len(tag) == 4:
                self._tags = max(self._tags, int.from_bytes(tag, "big"))

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
                    self._go_on_with(entry, theirs if action is Action.CONTINUE else None)
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
                    self._say(sending, entry.state)
                else:
                    sending.state = entry.state
                    sending.settled = True
                    self._report(sending)
                    if action is Action.SETTLE:
                        self._say(sending, None)
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

    def _go_on_with(self, entry: Unsettled, position: Received | None) -> None:
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
                    "the unsettled map says that more was received than there is",
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

    def _say(self, sending: Sending, state: Any) -> None:
        """Queue a transfer without payload that carries only the state of *sending*."""
        if state is not None:
            size = len(encode_state(state))
            if size < self.session.payload_max:
                sending.local_state = state
                sending.state_size = size
            else:
                # The state does not fit the peer's frames: settling without it has to suffice.
                sending.settled = True
        self._resuming.append(_Queued(sending, b"", False))

    def confirm(self, sending: Sending, outcome: Any) -> None:
        """Confirm the receiver's outcome, or *outcome* if the owner applied that instead."""
        sending.confirms = False
        if self._over or not self.attached:
            sending.settled = True
            return
        theirs = sending.state
        if outcome is None or outcome == theirs:
            sending.settled = True
            self._say(sending, theirs)
        else:
            sending.state = outcome
            self._say(sending, outcome)
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
        self._queue.extend(self._resuming[:most])
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
        if not self.draining or self._over or (self._drain_answered and not self.credit):
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
                name: value for name, value in flow.properties.items() if name == _TXN_ID
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
        return self.session.flow(
            handle=self.handle,
            delivery_count=serial.add(self.delivery_count, -self._unsent),
            link_credit=self.credit + self._unsent - self._uncredited,
            available=self.available + self._unsent,
            drain=self.draining,
        )
