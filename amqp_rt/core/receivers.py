"""Receiving links: credit granted, and deliveries put together from transfers (Part 2 §2.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..errors import LocalProtocolError
from ..limits import Limits
from ..outcomes import Error, Received
from ..termini import Coordinator
from ..transactions import DeliveryState, TransactionalState
from ..unsettled import Unsettled, UnsettledMap
from . import serial
from .frames import Fault, link_fault, misplaced_received
from .lifecycle import DETACHED
from .links import RCV_SECOND, SND_SETTLED, Link
from .performatives import RECEIVER, Attach, Flow, Transfer
from .resume import offset_of, position_after, whole
from .states import Known, is_outcome, known_of

if TYPE_CHECKING:
    from .session import Session

#: Memory for a piece of an incomplete message besides its bytes. A message may arrive in pieces of
#: one octet, and the limit is on the memory used, not on the bytes sent.
_CHUNK_COST: Final = 64


class Delivery:
    """Delivery received from the peer."""

    #: Queued already for the link's next batch of notifications, which names a delivery only once.
    noted: bool = False
    #: The sender resumes a delivery that is unknown here; its transfers are ignored (§2.7.5).
    ignored: bool = False
    #: An earlier link left this delivery unsettled (§2.6.13).
    resumed: bool = False
    #: Bytes of a resumed delivery that will arrive again although they are here already.
    repeated: int = 0
    #: Handed out before it had arrived completely, because of its size: read it in chunks.
    streamed: bool = False

    #: Settled by the sender, which expects no outcome.
    settled: bool = False
    #: Settled by us, or no longer possible to settle.
    local_settled: bool = False
    #: States set by the sender, and by us.
    state: DeliveryState | None = None
    local_state: DeliveryState | None = None
    payload: bytes = b""
    complete: bool = False
    aborted: bool = False
    second: bool = False
    context: Any = None
    _chunks: list[bytes] | None = None
    _size: int = 0
    _unread: int = 0

    def __init__(
        self, link: ReceiverLink, delivery_id: int, tag: bytes, message_format: int
    ) -> None:
        self.link = link
        self.delivery_id = delivery_id
        self.tag = tag
        self.message_format = message_format

    @property
    def size(self) -> int:
        """Number of payload bytes received so far."""
        return self._size

    def resume(self, link: ReceiverLink, delivery_id: int, second: bool) -> None:
        """Continue as a delivery of *link*, which resumes the delivery's earlier link (§2.6.13)."""
        self.link = link
        self.resumed = True
        self.delivery_id = delivery_id
        self.second = second
        self.local_settled = False
        self.state = None
        if type(self.local_state) is TransactionalState:
            # The transaction ended with its connection, and the provisional state with it.
            self.local_state = None

    def repeat_outcome(self) -> None:
        """Repeat the outcome that was set on an earlier link, or between two links."""
        session = self.link.session
        session.queue_disposition(RECEIVER, self.delivery_id, not self.second, self.local_state)
        if not self.second:
            self.local_settled = True
            session.incoming.pop(self.delivery_id, None)

    def read_chunks(self) -> list[bytes]:
        """Return the chunks that arrived since the last call, and reopen the session window."""
        chunks = self._chunks or []
        if chunks:
            self._chunks = None
            self.link.session.release(self._unread)
            self._unread = 0
        return chunks

    def keep(self, data: bytes) -> None:
        """Keep *data*, the next chunk."""
        if self._chunks is None:
            self._chunks = [data]
        else:
            self._chunks.append(data)

    def settle(self, outcome: DeliveryState) -> None:
        """Set *outcome*: settled at once, or after the sender where the link settles second.

        Setting the same outcome again has no effect. An outcome that was set within a transaction
        and not settled may be followed by another. If the link is detached nothing is sent now;
        the outcome is sent if the sender resumes the delivery.

        Raises:
            LocalProtocolError: Another outcome has been set, or the outcome is larger than the
                peer's frames. Nothing was sent.
            EncodeError: The outcome has no encoding.
        """
        known = self.local_state
        if known is not None and is_outcome(known) and not self._provisional:
            if known != outcome:
                raise LocalProtocolError(
                    f"the delivery has the outcome {self.local_state!r} already",
                    condition="amqp:illegal-state",
                )
            return
        if not self.local_settled and self.link.attached:
            session = self.link.session
            if self.second and not self.settled:
                session.queue_disposition(RECEIVER, self.delivery_id, False, outcome)
            else:
                if not self.settled:
                    session.queue_disposition(RECEIVER, self.delivery_id, True, outcome)
                self.local_settled = True
                session.incoming.pop(self.delivery_id, None)
        self.local_state = outcome

    @property
    def _provisional(self) -> bool:
        """Whether our state depends on a transaction and may still be replaced."""
        return type(self.local_state) is TransactionalState and not self.local_settled

    def update(self, state: DeliveryState) -> None:
        """Send *state* without settling (§2.6.12).

        Raises:
            LocalProtocolError: The delivery has an outcome or is settled, also because its link is
                detached; or the state is larger than the peer's frames.
            EncodeError: The state has no encoding.
        """
        if (
            self.local_settled
            or self.settled
            or (is_outcome(self.local_state) and not self._provisional)
        ):
            raise LocalProtocolError("the delivery is settled, or has an outcome")
        if self.link.attached:
            self.link.session.queue_disposition(RECEIVER, self.delivery_id, False, state)
        self.local_state = state

    def __repr__(self) -> str:
        said = self.local_state if self.local_state is not None else "no outcome"
        return f"<Delivery {self.delivery_id} on {self.link.name!r}: {self._size} bytes, {said}>"


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
        #: Work of the endpoint for each delivery, beside that of its frames; see ``Engine.spent``.
        self.delivery_work: int = 0
        self.flow_report: Callable[[], Mapping[object, object]] | None = None
        self.draining: bool = False
        #: Deliveries beyond the credit that the peer may still send, because it may not have seen
        #: the flow that reduced the credit.
        self._excess: int = 0
        self._ask_echo: bool = False
        self._provisional: bool = False
        self._current: Delivery | None = None
        self._batch: list[Delivery] = []
        self.run_head: bytes = b""  # what frames of a run have in common, once known
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

    def accept_run(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Accept those of *deliveries* that have no outcome, in one run; return the others: see :class:`.Session`."""
        return self.session.accept_run(self, deliveries)

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
        if self._ended:
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
        if self._ended:
            return
        self.draining = True
        self.flow_due()

    def report(self) -> None:
        """Send a flow with the present credit, for the properties that ``flow_report`` gives it."""
        if not self._ended:
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

    def _is_early(self, transfer: Transfer) -> bool:
        """Return whether the next delivery may begin with *transfer* without credit (S3 2.3.8)."""
        if type(transfer.state) is TransactionalState:
            return False
        return serial.difference(self.delivery_count, self._first_count) < self._early_max

    def _keep_early(self, transfer: Transfer, data: bytes) -> None:
        """Hold a transfer of a link that has not been accepted yet.

        Raises:
            Fault: The held transfers begin too many deliveries, are too large, or belong to a
                transaction. Its discharge could otherwise come first, as it waits for no answer.
        """
        session = self.session
        if type(transfer.state) is TransactionalState:
            raise link_fault(
                "amqp:link:transfer-limit-exceeded", "a transfer of a transaction before any credit"
            )
        if not self._early_more:
            if self._early_begun >= self._early_max:
                raise link_fault("amqp:link:transfer-limit-exceeded", "transfer before any credit")
            self._early_begun += 1
        cost = len(data) + _CHUNK_COST
        if self._early_cost + cost > session.limits.message_size_max:
            raise link_fault(
                "amqp:link:message-size-exceeded",
                "the transfers sent before the attach was answered exceed max-message-size",
            )
        self._early_more = transfer.more and not transfer.aborted
        self._early_cost += cost
        session.assemble(cost)
        self._early.append((transfer, data))

    def _release_early(self) -> list[tuple[Transfer, bytes]]:
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
            for transfer, data in self._release_early():
                if not self.attached:
                    break
                self.on_transfer(transfer, data, 0, len(data))
        except Fault as fault:
            self.flush_batch()
            self.detach(Error(fault.condition, fault.description))
        else:
            self.flush_batch()

    def on_transfer(self, transfer: Transfer, data: bytes, at: int, end: int) -> None:  # noqa: C901
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
                and not self._is_early(transfer)
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
                    raise misplaced_received()
                if self.max_message_size and size > self.max_message_size and not transfer.aborted:
                    raise self._too_large()
                self._use_credit()
                session.engine.spent += self.delivery_work
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
                raise misplaced_received()
            if transfer.settled and not delivery.settled:
                delivery.settled = True
                session.incoming.pop(delivery.delivery_id, None)
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
                delivery.keep(data[at:end])
            return
        if chunks := delivery._chunks:
            chunks.append(data[at:end])
            delivery.payload = b"".join(chunks)
            delivery._chunks = None
            session.assemble(-delivery._unread)
            delivery._unread = 0
        else:
            delivery.payload = data[at:end]
        # Also after frames without octets, of which nothing is kept.
        self._current = None
        delivery.complete = True
        if not self._batch:
            session.touch(self)
        self._batch.append(delivery)
        if self._in_order:
            session.engine.dispatch()

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
        return [(tag, _state_at_target(entry, limits)) for tag, entry in self._remembered.items()]

    def _resume(self, remote: dict[bytes, Any]) -> None:
        """Settle deliveries that only we remember; grant credit to resume the others."""
        if not self.remote_incomplete:
            for tag in [tag for tag in self._remembered if tag not in remote]:
                entry = self._remembered.pop(tag)
                delivery = entry.delivery
                if isinstance(delivery, Delivery) and self.resumed:
                    delivery.settled = True
                self.unknown.append(entry)
        self._reserved = len([tag for tag in self.sent_unsettled if tag in remote])
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
        if self.relays and self.resumed:
            return self._begin_relayed(transfer, delivery_id, tag)
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

    def _begin_relayed(self, transfer: Transfer, delivery_id: int, tag: bytes) -> Delivery:
        """Begin a delivery that the sender resumes at the peer of another link; see :meth:`Link.relay`."""
        self._use_credit()
        self.used = True
        delivery = Delivery(self, delivery_id, tag, transfer.message_format or 0)
        delivery.resumed = True
        mode = transfer.rcv_settle_mode
        delivery.second = (self.rcv_settle_mode if mode is None else mode) == RCV_SECOND
        delivery.state = transfer.state
        if transfer.settled or transfer.aborted:
            delivery.settled = True
        else:
            self.session.add_incoming(delivery)
        return delivery

    def _hand_out(self, delivery: Delivery) -> None:
        """Deliver a message that was complete before the link was resumed."""
        if self.streaming:
            delivery._chunks = [delivery.payload]
            delivery._unread = len(delivery.payload) + _CHUNK_COST
            self.session.hold(delivery._unread)
        self.session.touch(self)
        self._batch.append(delivery)

    def _compare(self, delivery: Delivery, state: DeliveryState | None) -> None:
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
                session.incoming.pop(delivery.delivery_id, None)
                delivery.local_state = state
                delivery.local_settled = True
                delivery.settled = True
                self.on_settled(delivery)
            else:
                delivery.repeat_outcome()
        elif delivery.settled and delivery.complete:
            self.on_settled(delivery)

    def _prepare(self, delivery: Delivery, state: DeliveryState | None) -> None:
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
                    "amqp:invalid-field",
                    "a delivery is resumed beyond the octets that were received",
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
            (in_vain if self.incomplete and tag in self.sent_unsettled else found)[tag] = entry
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
            delivery.keep(data)
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
        delivery.aborted = delivery.settled = delivery.local_settled = True
        session.incoming.pop(delivery.delivery_id, None)
        self._drop(delivery)
        self._current = None
        if delivery.complete:
            # Resumed only to be dropped; the endpoint received the message long ago.
            self.on_settled(delivery)
        elif (self.streaming or delivery.streamed) and not first:
            session.touch(self)
            self._progress.append(delivery)
        elif self.relays and delivery.resumed:
            # A node behind us has a part of it.
            session.touch(self)
            self._batch.append(delivery)
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
        delivery._chunks = None

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
        self._release_early()
        delivery = self._current
        if delivery is not None:
            self._current = None
            if delivery.ignored or delivery.complete:
                return
            streamed = self.streaming or delivery.streamed
            if not streamed and not delivery.settled:
                payload = b"".join(delivery._chunks or ())
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
            self.session.incoming.pop(delivery.delivery_id, None)
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
        elif self.flow_report is not None:
            flow.properties = self.flow_report()
        return flow


def _state_at_target(entry: Unsettled, limits: Limits) -> Any:
    """Return the state of a remembered delivery for the receiver's unsettled map."""
    state = entry.state
    payload = entry.payload
    delivery = entry.delivery
    if isinstance(delivery, Delivery):
        state = delivery.local_state
        payload = delivery.payload
    if known_of(state) is Known.OUTCOME:
        return state
    if entry.message_format or not payload:
        # Either a message format whose sections cannot be counted, or a stream whose beginning has
        # been read and dropped.
        return None
    return position_after(whole(payload), limits)
