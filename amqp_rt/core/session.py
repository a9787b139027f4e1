"""Sessions: windows, delivery-ids, ranges of dispositions, handles of links (Part 2 §2.5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from ..errors import LocalProtocolError
from ..events import AttachRequested
from ..outcomes import ACCEPTED, Error, Received
from ..transactions import DeliveryState, TransactionalState
from ..unsettled import UnsettledMap
from . import serial
from .frames import (
    PLAIN_FRAME,
    PLAIN_SIZE,
    PLAIN_TAG,
    PLAIN_TAG_SIZE,
    Fault,
    FrameBuffer,
    connection_fault,
    encode_state,
    encoded_disposition,
    link_fault,
    read_transfer,
    run_head,
    session_fault,
    short_state,
    whole_state,
)
from .lifecycle import (
    ATTACHED,
    DETACHED,
    ENDED,
    MAPPED,
    SESSION,
    UNMAPPED,
    Half,
    Step,
    session_state,
)
from .links import RCV_SECOND, SND_SETTLED, Link
from .performatives import RECEIVER, SENDER, Attach, Begin, Detach, Disposition, End, Flow
from .receivers import Delivery, ReceiverLink
from .repeated import final_frame
from .senders import SenderLink, Sending
from .states import is_outcome

if TYPE_CHECKING:
    from .engine import Engine

#: Octets of a frame reserved for the frame header and the longest transfer that we write.
_TRANSFER_OVERHEAD: Final = 128
#: Maximum octets that the two fields of an unsettled map add to an attach, beside its entries.
_MAP_OVERHEAD: Final = 24
#: Our outgoing-window is constant: only the peer's incoming-window limits sending.
_OUTGOING_WINDOW: Final = 0x7FFFFFFF
#: Shared by sessions without queued links: an empty deque takes more memory than the rest of a session.
_NO_LINKS: Final[deque[SenderLink]] = deque()
#: Frames granted even to the last of many sessions, so that none is starved.
_WINDOW_MIN: Final = 8


def _ignore(error: Error | None) -> None:
    """Ignore the end of the session; the default of ``Session.on_ended``."""


class Session:
    """Pair of windows, and the links that share them."""

    def __init__(self, engine: Engine, channel: int, window: int, window_bytes: int) -> None:
        self.engine = engine
        self.carrier: Any = None  # what its links name as their connection, if not the engine
        self.limits = engine.limits
        self.channel = channel
        self.remote_channel: int = -1
        self.ours = Half(SESSION, UNMAPPED, ours=True)
        self.theirs = Half(SESSION, UNMAPPED, ours=False)
        self.on_ended: Callable[[Error | None], None] = _ignore
        #: Why the session ended, if known; set before its links are notified.
        self.error: Error | None = None
        #: Called once after the session has ended and its links have been notified.
        self.followers: dict[object, Callable[[], None]] = {}
        self.properties: Mapping[object, object] = {}
        #: Bytes that the peer's begin adds to ``Engine.kept``.
        self.kept: int = 0
        self.payload_max: int = 0
        # Sending (§2.5.6): ids count transfer frames, and the window is the peer's.
        self.next_outgoing_id: int = 0
        self.initial_outgoing_id: int = 0
        self.remote_incoming_window: int = 0
        self._delivery_id: int = 0
        self._outgoing: dict[int, Sending] = {}
        self._queued_links: deque[SenderLink] = _NO_LINKS
        self._queued: dict[SenderLink, None] = {}
        # Receiving.
        self.next_incoming_id: int = 0
        self.incoming_window: int = 0
        self._window = max(1, min(window, window_bytes // self.limits.frame_size_max))
        self._window_bytes = window_bytes
        self._held: int = 0
        #: Deliveries that we received and that are not settled, by id.
        self.incoming: dict[int, Delivery] = {}
        #: Unsettled deliveries of each link, while all links end together.
        self._left: dict[Link, list[Any]] | None = None
        # Links by our handle, by the peer's handle, and by (name, our role).
        self.links: dict[int, Link] = {}
        self._remote: dict[int, Link] = {}
        self._names: dict[tuple[str, bool], Link] = {}
        #: Links requested by the peer and not answered yet, also after the peer has detached them.
        self._unanswered: dict[Link, None] = {}
        #: Unused handles below the number of our links, as a heap: the lowest is used first.
        self._free_handles: list[int] = []
        self.handle_max: int = self.limits.handle_max
        self.remote_handle_max: int = 0xFFFFFFFF
        # Output gathered for the next flush.
        self._dirty: bool = False
        self._session_flow: bool = False
        self._link_flows: list[Link] = []
        self._range_role: bool = RECEIVER
        self._range_first: int = 0
        self._range_last: int = 0
        self._range_settled: bool = False
        self._range_state: DeliveryState | None = None
        self._range_encoded: bytes = b""
        self._whole: bool = engine.options.whole_errors
        self._range_open: bool = False

    @property
    def ended(self) -> bool:
        """Whether either side has ended the session, or its connection is lost."""
        return self.ours.stage is ENDED

    @property
    def state(self) -> str:
        """Name of the session's state in §2.5.5."""
        return session_state(self.ours, self.theirs)

    # --- our side ------------------------------------------------------------------------

    def attach_sender(
        self,
        name: str,
        endpoint: Any,
        *,
        source: Any = None,
        target: Any = None,
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        max_message_size: int = 0,
        properties: Mapping[object, object] | None = None,
        desired_capabilities: tuple[str, ...] = (),
        unsettled: UnsettledMap | None = None,
        relays: Any = None,
    ) -> SenderLink:
        """Attach a link on which we send (§2.6.3). The endpoint is notified of the result.

        With *unsettled* the attach resumes a link of that name: the map holds the deliveries that
        the link left unsettled (§2.6.13). None means that no earlier link is remembered. With
        *relays*, a link of another connection, ours stands for the peer of that; see :meth:`Link.relay`.

        Raises:
            LocalProtocolError: The name is taken, the session has ended, no handle is left, or the
                attach is larger than the peer's frames. Nothing was sent.
            EncodeError: An argument has no encoding.
        """
        link = SenderLink(self, name)
        self._begin_attach(link, endpoint, source, target, snd_settle_mode, rcv_settle_mode)
        link.desired_capabilities = desired_capabilities
        link.set_unsettled(unsettled, relays)
        self.send_attach(link, properties=properties, own_max_message_size=max_message_size)
        return link

    def attach_receiver(
        self,
        name: str,
        endpoint: Any,
        *,
        source: Any = None,
        target: Any = None,
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        max_message_size: int | None = None,
        streaming: bool = False,
        properties: Mapping[object, object] | None = None,
        desired_capabilities: tuple[str, ...] = (),
        unsettled: UnsettledMap | None = None,
        relays: Any = None,
    ) -> ReceiverLink:
        """Attach a link on which the peer sends (§2.6.3). The endpoint is notified of the result.

        *unsettled* and *relays* are as for :meth:`attach_sender`.

        Raises:
            LocalProtocolError: The name is taken, the session has ended, no handle is left, or the
                attach is larger than the peer's frames. Nothing was sent.
            EncodeError: An argument has no encoding.
        """
        link = ReceiverLink(self, name)
        link.set_streaming(streaming, max_message_size)
        self._begin_attach(link, endpoint, source, target, snd_settle_mode, rcv_settle_mode)
        link.desired_capabilities = desired_capabilities
        link.set_unsettled(unsettled, relays)
        self.send_attach(link, properties=properties)
        return link

    def _begin_attach(
        self,
        link: Link,
        endpoint: Any,
        source: Any,
        target: Any,
        snd_settle_mode: int,
        rcv_settle_mode: int,
    ) -> None:
        if self.ended:
            raise LocalProtocolError("the session has ended")
        if (link.name, link.role) in self._names:
            raise LocalProtocolError(f"the session has a link {link.name!r} of this role already")
        if len(self.links) + len(self._unanswered) > self.remote_handle_max:
            # The links that the peer has requested will need handles too.
            raise LocalProtocolError(
                f"the peer allows {self.remote_handle_max + 1} links in a session",
                condition="amqp:resource-limit-exceeded",
            )
        link.endpoint = endpoint
        link.source = source
        link.target = target
        link.snd_settle_mode = snd_settle_mode
        link.rcv_settle_mode = rcv_settle_mode

    def send_attach(
        self,
        link: Link,
        *,
        null_termini: bool = False,
        properties: Mapping[object, object] | None = None,
        offered: tuple[str, ...] = (),
        own_max_message_size: int = 0,
    ) -> None:
        """Write the attach of our side of *link*, and give it the lowest free handle.

        Raises:
            LocalProtocolError: The attach is larger than the peer's frames.
            EncodeError: A field has no encoding. Nothing was sent, and nothing has changed.
        """
        handle = self._free_handles[0] if self._free_handles else len(self.links)
        sends = link.role == SENDER
        source, target = (None, None) if null_termini else link.answered_termini()
        attach = Attach(
            name=link.name,
            handle=handle,
            role=link.role,
            snd_settle_mode=link.snd_settle_mode,
            rcv_settle_mode=link.rcv_settle_mode,
            source=source,
            target=target,
            initial_delivery_count=link.delivery_count if sends else None,
            max_message_size=(own_max_message_size if sends else link.max_message_size) or None,
            offered_capabilities=offered,
            desired_capabilities=()
            if null_termini
            else link.desired_capabilities
            if link.theirs.stage is DETACHED
            else (),
            properties=properties or None,
        )
        frame = self.engine.frame_of(self.channel, attach)
        if link.resumes and not null_termini:
            room = self.engine.frame_size_out - len(frame) - _MAP_OVERHEAD
            attach.incomplete_unsettled = not link.map_to_send(room)
            attach.unsettled = link.sent_unsettled
            frame = self.engine.frame_of(self.channel, attach)
        if self._free_handles:
            heappop(self._free_handles)
        link.handle = handle
        self.links[handle] = link
        self._names.setdefault((link.name, link.role), link)
        self._unanswered.pop(link, None)
        link.ours.take(Step.ATTACH)
        self.write_bytes(frame)

    def end(self, error: Error | None = None) -> None:
        """Send end (§2.5.4), and end all links at once. A second call has no effect.

        Raises:
            EncodeError: *error* has no encoding. Nothing was sent.
        """
        if self.ours.stage is not MAPPED:
            return
        end = final_frame(self.channel, End(error), self.engine.frame_size_out, whole=self._whole)
        self._flush()
        self.ours.take(Step.END)
        self.engine.write_bytes(end)
        self._over(error)
        if self.theirs.stage is ENDED:
            self.engine.release_session(self)

    def write(self, performative: Any) -> None:
        """Write *performative* on this session's channel, unless we have ended the session."""
        if self.ours.stage is MAPPED:
            self.engine.write_frame(self.channel, performative)

    def write_bytes(self, frame: bytes) -> None:
        """Write an encoded frame of this session's channel, unless we have ended the session."""
        if self.ours.stage is MAPPED:
            self.engine.write_bytes(frame)

    def write_transfer(self, header: bytes, payload: bytes) -> None:
        """Write a transfer frame and count it in the window."""
        self.next_outgoing_id = (self.next_outgoing_id + 1) & 0xFFFFFFFF
        self.remote_incoming_window -= 1
        self.engine.write_pieces(header, payload)

    def has_room(self) -> bool:
        """Return whether a message sent now would leave at once."""
        return (
            self.remote_incoming_window > 0
            and len(self._outgoing) < self.limits.unsettled_max
            and self.engine.output_size < self.engine.output_max
        )

    # --- sending -------------------------------------------------------------------------

    def next_delivery_id(self) -> int:
        """Return the id of the next delivery to leave, and advance the counter."""
        delivery_id = self._delivery_id
        self._delivery_id = (delivery_id + 1) & 0xFFFFFFFF
        return delivery_id

    def add_outgoing(self, sending: Sending) -> int:
        """Assign an id to *sending*, and keep it until it is settled."""
        delivery_id = self._delivery_id
        self._delivery_id = (delivery_id + 1) & 0xFFFFFFFF
        if not sending.settled:
            self._outgoing[delivery_id] = sending
        return delivery_id

    def send_run(
        self,
        link: SenderLink,
        payloads: list[Any],
        contexts: list[Any],
        settled: bool,
        most: int,
        size_max: int,
    ) -> list[Sending]:
        """Send the first *most* of *payloads* on *link*, a frame each; see :meth:`SenderLink.send_run`.

        Fewer if the windows or the output have no room for more, or a payload is larger than *size_max*.
        """
        engine, outgoing = self.engine, self._outgoing
        most = min(most, self.remote_incoming_window, self.limits.unsettled_max - len(outgoing))
        room = engine.output_max - engine.output_size
        head = run_head(self.channel, link.handle)
        end = b"\x43\x41\x42" if settled else b"\x43\x42\x42"
        tags, number = link.tags, self._delivery_id
        sent: list[Sending] = []
        frames: list[bytes] = []
        written = 0
        for at in range(most):
            payload = payloads[at]
            if type(payload) is not bytes or written >= room:
                break
            size = len(payload)
            if size > size_max:
                break
            tags = (tags + 1) & 0xFFFFFFFF
            tag = tags.to_bytes(4, "big")
            sending = Sending(link, tag, 0, settled)
            sending.context = contexts[at]
            sending.complete = True
            sending.delivery_id = number
            if not settled:
                outgoing[number] = sending
            sent.append(sending)
            frames.append(
                PLAIN_FRAME.pack(size + PLAIN_SIZE, head, number, PLAIN_TAG, tag, end) + payload
            )
            number = (number + 1) & 0xFFFFFFFF
            written += size + PLAIN_SIZE
        if sent:
            count = len(sent)
            link.tags = tags
            link.credit -= count
            link.delivery_count = (link.delivery_count + count) & 0xFFFFFFFF
            link.available = max(0, link.available - count)
            self._delivery_id = number
            self.next_outgoing_id = (self.next_outgoing_id + count) & 0xFFFFFFFF
            self.remote_incoming_window -= count
            engine.output += frames
            engine.output_size += written
            engine.wake()
        return sent

    @property
    def sent_unsettled(self) -> dict[int, Sending]:
        """Unsettled deliveries that we sent, by id, the oldest first."""
        return self._outgoing

    def forget_outgoing(self, delivery_id: int) -> None:
        """Remove a settled delivery that we sent."""
        self._outgoing.pop(delivery_id, None)

    def queue_link(self, link: SenderLink) -> None:
        """Queue *link*, which has frames to send; links take turns, a frame each (fair writing)."""
        if link not in self._queued:
            self._queued[link] = None
            if self._queued_links is _NO_LINKS:
                self._queued_links = deque()
            self._queued_links.append(link)
        self.engine.queue_session(self)

    def emit_queued(self, *, alone: bool) -> bool:
        """Send one queued frame, or with *alone* as many as window and output allow.

        *alone* means that no other session has queued frames. Return True if more could leave; a
        closed window is reopened by a flow.
        """
        links = self._queued_links
        while links and self.remote_incoming_window > 0:
            if self.engine.output_size >= self.engine.output_max:
                return True
            link = links.popleft()
            if link._queue and link.emit_queued():
                links.append(link)
            else:
                self._queued.pop(link, None)
            if not alone:
                break
        return bool(links) and self.remote_incoming_window > 0

    # --- receiving -----------------------------------------------------------------------

    def add_incoming(self, delivery: Delivery) -> None:
        """Register a delivery that has begun.

        Raises:
            Fault: Its id is that of an unsettled delivery.
        """
        delivery_id = delivery.delivery_id
        if delivery_id in self.incoming:
            raise session_fault(
                "amqp:invalid-field", f"delivery-id {delivery_id} is in use and unsettled"
            )
        if not delivery.settled:
            self.incoming[delivery_id] = delivery

    def accept_run(self, link: ReceiverLink, deliveries: list[Delivery]) -> list[Delivery]:
        """Accept *deliveries* of *link*, as :meth:`Delivery.settle` does for one; return those to settle one by one.

        These are settled, have a state of ours, or belong to another link; and all, if the link settles second or is
        detached.
        """
        if not link.attached or link.rcv_settle_mode == RCV_SECOND:
            return deliveries
        incoming = self.incoming
        left: list[Delivery] = []
        # The id that would extend the range of the next disposition.
        follows = -1
        for delivery in deliveries:
            if (
                delivery.link is not link
                or delivery.settled
                or delivery.local_settled
                or delivery.second
                or delivery.local_state is not None
            ):
                left.append(delivery)
                continue
            number = delivery.delivery_id
            if number == follows:
                self._range_last = number
            else:
                self.queue_disposition(RECEIVER, number, True, ACCEPTED)
            follows = (number + 1) & 0xFFFFFFFF
            delivery.local_settled = True
            delivery.local_state = ACCEPTED
            incoming.pop(number, None)
        return left

    def assemble(self, size: int) -> None:
        """Add *size* to the bytes of incomplete messages; a negative size subtracts.

        Raises:
            Fault: The incomplete messages of the connection exceed their limit together.
        """
        engine = self.engine
        engine.assembling += size
        if size > 0 and engine.assembling > self.limits.session_window_bytes:
            raise link_fault(
                "amqp:resource-limit-exceeded",
                "the unfinished messages of this connection are too large together",
            )

    def hold(self, size: int) -> None:
        """Count unread bytes of a streamed message."""
        self._held += size
        self.engine.held += size

    def release(self, size: int) -> None:
        """Discount streamed bytes that were read or dropped; the window may open again."""
        if size and self.ours.stage is MAPPED:
            self._held -= size
            self.engine.held -= size
            self._mark_dirty()
            self.engine.wake()

    def touch(self, link: Link) -> None:
        """Schedule the notification of *link*'s endpoint for the end of this chunk."""
        self.engine.touch(link)

    def _open_window(self) -> int:
        """Return the number of frames that the peer may send, given the free memory (§2.5.6)."""
        limits = self.limits
        if len(self.incoming) >= limits.unsettled_max:
            return 0
        of_all = max(limits.session_window_bytes, self._window_bytes) - self.engine.held
        free = min(self._window_bytes - self._held, of_all) // limits.frame_size_max
        free -= self.engine.promised_beside(self)
        if free < _WINDOW_MIN and self._held == 0:
            free = _WINDOW_MIN
        return max(0, min(self._window, free))

    def narrow(self, frames: int) -> None:
        """Let the peer send *frames* ahead at most: at once while no link is attached, else when it has used more (§2.5.6)."""
        self._window = min(self._window, frames)
        if self.incoming_window > self._window and not self.links:
            self.incoming_window = self._window
            self._session_flow = True
            self._mark_dirty()

    # --- the peer's frames ---------------------------------------------------------------

    def on_begin(self, begin: Begin, channel: int) -> None:
        """Handle the peer's begin."""
        self.theirs.take(Step.BEGIN)
        self.remote_channel = channel
        self.next_incoming_id = begin.next_outgoing_id
        self.remote_incoming_window = begin.incoming_window
        self.remote_handle_max = begin.handle_max
        self.properties = begin.properties or {}

    def set_frame_size(self, size: int) -> None:
        """Set the largest frame size that the peer accepts."""
        self.payload_max = size - _TRANSFER_OVERHEAD

    def send_begin(self, properties: Mapping[object, object] | None = None) -> None:
        """Map our side (§2.5.1).

        Raises:
            LocalProtocolError: The begin is larger than the peer's frames.
            EncodeError: *properties* have no encoding. Nothing was sent.
        """
        self.set_frame_size(self.engine.frame_size_out)
        self.incoming_window = self._open_window()
        self.initial_outgoing_id = self.next_outgoing_id
        frame = self.engine.frame_of(
            self.channel,
            Begin(
                remote_channel=self.remote_channel if self.remote_channel >= 0 else None,
                next_outgoing_id=self.next_outgoing_id,
                incoming_window=self.incoming_window,
                outgoing_window=_OUTGOING_WINDOW,
                handle_max=self.handle_max,
                properties=properties or None,
            ),
        )
        self.ours.take(Step.BEGIN)
        self.engine.write_bytes(frame)

    def on_attach(self, attach: Attach) -> None:
        """Handle the peer's attach: the answer to ours, or a request for a new link."""
        if attach.handle > self.handle_max:
            raise connection_fault(
                "amqp:connection:framing-error",
                f"handle {attach.handle} is above the handle-max {self.handle_max}",
            )
        if attach.handle in self._remote:
            raise session_fault("amqp:session:handle-in-use", f"handle {attach.handle} is in use")
        if len(attach.name) > self.limits.name_max:
            raise session_fault("amqp:invalid-field", "the link name is too long")
        our_role = not attach.role
        link = self._names.get((attach.name, our_role))
        if link is not None and link.theirs.stage is DETACHED and link.endpoint is not None:
            self._remote[attach.handle] = link
            self._answered(link, attach)
            return
        if link is not None:
            # A second attach of a live name takes the link over (§2.6.1).
            stolen = Error("amqp:link:stolen", "the link was attached again")
            if link.ours.stage is DETACHED:
                link.deny(stolen)
            else:
                link.detach(stolen)
            self._names.pop((attach.name, our_role), None)
            if self.ended:
                return
        if len(self.links) + len(self._unanswered) > self.remote_handle_max:
            raise session_fault(
                "amqp:resource-limit-exceeded", "your handle-max leaves us no handle to answer with"
            )
        if len(self._unanswered) > self.handle_max:
            raise session_fault("amqp:resource-limit-exceeded", "too many links wait for an answer")
        link = (
            SenderLink(self, attach.name) if our_role == SENDER else ReceiverLink(self, attach.name)
        )
        self._remote[attach.handle] = link
        self._names[attach.name, our_role] = link
        self._unanswered[link] = None
        try:
            link.on_attach(attach)
        except Fault as fault:
            link.deny(Error(fault.condition, fault.description))
            return
        self.engine.report(AttachRequested(link))

    def _answered(self, link: Link, attach: Attach) -> None:
        """Handle the answer to our attach.

        Each side decides its own terminus and its own settle mode (§2.6.3, §2.7.3).
        """
        local = attach.source is None if link.role == RECEIVER else attach.target is None
        if local:
            # Refused: the peer's detach follows and gives the reason (§2.6.3).
            link.theirs.take(Step.ATTACH)
            link.remote_handle = attach.handle
            link.refused = True
            return
        source, target = link.source, link.target
        snd_settle_mode, rcv_settle_mode = link.snd_settle_mode, link.rcv_settle_mode
        try:
            link.on_attach(attach)
        except Fault as fault:
            link.detach(Error(fault.condition, fault.description))
            return
        if link.role == SENDER:
            link.source = source
            link.snd_settle_mode = snd_settle_mode
        else:
            link.target = target
            link.rcv_settle_mode = rcv_settle_mode
        if link.ours.stage is ATTACHED:
            link.attached = True
            link.resume()
            if link.attached:
                link.endpoint.on_attached(link)
                link.reduce()

    def on_flow(self, flow: Flow) -> None:
        """Handle a flow: the peer's windows, and with a handle a link's credit (§2.5.6, §2.6.7)."""
        before = self.remote_incoming_window
        seen = flow.next_incoming_id
        if seen is None:
            # The peer has not seen our begin yet: all frames that we have sent are in flight.
            seen = self.initial_outgoing_id
        self.remote_incoming_window = (
            serial.difference(seen, self.next_outgoing_id) + flow.incoming_window
        )
        self.next_incoming_id = flow.next_outgoing_id
        if flow.handle is not None:
            link = self._remote.get(flow.handle)
            if link is None:
                raise session_fault(
                    "amqp:session:unattached-handle", f"flow on unattached handle {flow.handle}"
                )
            link.on_flow(flow)
        elif flow.echo:
            self._session_flow = True
            self._mark_dirty()
        if self.remote_incoming_window > before and before <= 0:
            if self._queued_links:
                self.engine.queue_session(self)
            self.engine.note_room()

    def on_transfer(self, data: bytes, at: int, end: int) -> None:
        """Handle one transfer frame (§2.7.5)."""
        transfer, payload = read_transfer(data, at, end, self.limits)
        if self.incoming_window <= 0:
            raise session_fault(
                "amqp:session:window-violation", "a transfer came in spite of a closed window"
            )
        self.next_incoming_id = (self.next_incoming_id + 1) & 0xFFFFFFFF
        self.incoming_window -= 1
        if not self._dirty and self.incoming_window * 2 <= self._window:
            self._mark_dirty()
        link = self._remote.get(transfer.handle)
        if not isinstance(link, ReceiverLink):
            if link is None:
                raise session_fault(
                    "amqp:session:unattached-handle",
                    f"transfer on unattached handle {transfer.handle}",
                )
            raise session_fault(
                "amqp:session:errant-link", f"transfer on a link {link.name!r} that we send on"
            )
        try:
            link.on_transfer(transfer, data, payload, end)
            self.engine.run_link = link
        except Fault as fault:
            if fault.scope != "link":
                raise
            error = Error(fault.condition, fault.description)
            link.flush_batch()
            if link.ours.stage is DETACHED:
                link.deny(error)
            else:
                link.detach(error)

    def read_run(self, link: ReceiverLink, buffer: FrameBuffer, work: int) -> int:
        """Receive whole messages of *link* that follow one of its transfers, at most for *work* (§2.7.5).

        Most transfers carry a whole message of format 0 in the encoding that our own senders use. Frames of
        one link then begin with the same octets, which are compared instead of being decoded. A frame that
        differs in anything, or that a rule might forbid, ends the run and is left to :meth:`on_transfer`.

        No endpoint is called, so that nothing but the numbers counted here changes during a run.

        Returns:
            The number of frames.
        """
        head = link.run_head
        if not head:
            head = link.run_head = run_head(self.remote_channel, link.remote_handle)
        data = buffer.data
        at = buffer.at
        if (
            data[at + 4 : at + 20] != head
            or link._current is not None
            or link.streaming
            or link._in_order
            or link.incomplete
            or link._remembered
            or not link.attached
            or self.limits.delivery_tag_max < PLAIN_TAG_SIZE
        ):
            return 0
        most = min(self.incoming_window, link.credit, work // (1 + link.delivery_work))
        size_max = buffer.size_max
        if link.max_message_size:
            size_max = min(size_max, link.max_message_size + PLAIN_SIZE)
        presettled = link.snd_settle_mode == SND_SETTLED
        second = link.rcv_settle_mode == RCV_SECOND
        incoming = self.incoming
        batch = link._batch
        before = len(batch)
        length = len(data)
        count = size = 0
        # Size and head of the frame before: messages of a stream are often of one size.
        known = b""
        while count < most:
            begin = data[at : at + 20]
            if begin != known:
                if begin[4:] != head:
                    break
                size = data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
                if size < PLAIN_SIZE or size > size_max:
                    break
                known = begin
            end = at + size
            if end > length:
                break
            flags = data[at + 30 : at + PLAIN_SIZE]
            if flags == b"\x43\x42\x42":
                settled = presettled
            elif flags == b"\x43\x41\x42":
                settled = True
            else:
                break
            if data[at + 24] != 0xA0 or data[at + 25] != PLAIN_TAG_SIZE:
                break
            delivery_id = (
                data[at + 20] << 24 | data[at + 21] << 16 | data[at + 22] << 8 | data[at + 23]
            )
            if delivery_id in incoming:
                break
            delivery = Delivery(link, delivery_id, data[at + 26 : at + 30], 0)
            delivery.payload = data[at + PLAIN_SIZE : end]
            delivery._size = size - PLAIN_SIZE
            delivery.complete = True
            if second:
                delivery.second = True
            if settled:
                delivery.settled = True
            else:
                incoming[delivery_id] = delivery
            batch.append(delivery)
            at = end
            count += 1
        if count:
            buffer.at = at
            self.next_incoming_id = (self.next_incoming_id + count) & 0xFFFFFFFF
            self.incoming_window -= count
            if not self._dirty and self.incoming_window * 2 <= self._window:
                self._mark_dirty()
            link.credit -= count
            link.delivery_count = (link.delivery_count + count) & 0xFFFFFFFF
            link.available = max(0, link.available - count)
            self.engine.spent += link.delivery_work * count
            if not before:
                self.touch(link)
        return count

    def on_disposition(self, disposition: Disposition) -> None:
        """Handle the peer's disposition of a range of deliveries (§2.7.6); ignore unknown ids.

        The work is proportional to the unsettled deliveries, never to the width of the range.
        """
        first = disposition.first
        last = first if disposition.last is None else disposition.last
        span = ((last - first) & 0xFFFFFFFF) + 1
        if span > 0x80000000:
            # The range ends before it begins, in serial number arithmetic: it is empty.
            return
        state = disposition.state
        settled = disposition.settled
        if disposition.role == RECEIVER:
            outgoing = self._outgoing
            found = serial.in_range(outgoing, first, span)
            self.engine.spent += len(found) // 4
            for delivery_id in found:
                sending = outgoing.get(delivery_id)
                if sending is None:
                    continue
                known = sending.state
                if known is None:
                    sending.state = state
                    if settled and not (sending.resumed or sending.noted):
                        # As below and in on_outcome(), without a call for each message.
                        sending.remote_settled = True
                        sending.settled = True
                        del outgoing[delivery_id]
                        link = sending.link
                        if not link._outcomes:
                            self.touch(link)
                        link._outcomes.append(sending)
                        continue
                if state is None or state == known:
                    if not settled:
                        # Not a change: a peer may repeat it a thousand times in one chunk.
                        continue
                elif known is not None:
                    if type(known) is not TransactionalState and is_outcome(known):
                        # An outcome is final; only a provisional one may change (§3.4).
                        sending.link.detach(
                            Error(
                                "amqp:illegal-state",
                                f"delivery {delivery_id} was given two outcomes that contradict",
                            )
                        )
                    else:
                        sending.state = state
                if settled:
                    sending.remote_settled = True
                    sending.settled = True
                    del outgoing[delivery_id]
                sending.link.on_outcome(sending)
            if settled:
                self.engine.note_room()
        else:
            incoming = self.incoming
            found = serial.in_range(incoming, first, span)
            self.engine.spent += len(found) // 4
            for delivery_id in found:
                delivery = incoming.get(delivery_id)
                if delivery is None:
                    continue
                if not settled and (state is None or state == delivery.state):
                    continue
                if type(state) is Received:
                    delivery.link.detach(
                        Error(
                            "amqp:invalid-field",
                            "a sender may send *received* only when it resumes a delivery",
                        )
                    )
                    continue
                if state is not None:
                    delivery.state = state
                if settled:
                    delivery.settled = True
                    delivery.local_settled = True
                    del incoming[delivery_id]
                    self._mark_dirty()
                delivery.link.on_settled(delivery)

    def on_detach(self, detach: Detach) -> None:
        """Handle the peer's detach of a link."""
        link = self._remote.pop(detach.handle, None)
        if link is None:
            raise session_fault(
                "amqp:session:unattached-handle", f"detach of unattached handle {detach.handle}"
            )
        link.on_detach(detach)

    def on_end(self, end: End) -> None:
        """Handle the peer's end: answer it, and end all links."""
        self.theirs.take(Step.END)
        if self.ours.stage is MAPPED:
            self._flush()
            self.ours.take(Step.END)
            self.engine.write_frame(self.channel, End())
            self._over(end.error)
        self.engine.release_session(self)

    def lose(self, error: Error | None) -> None:
        """End the session after its connection was lost."""
        if self.ours.stage is not ENDED:
            self.ours.stage = ENDED
            self._over(error)

    def _over(self, error: Error | None) -> None:
        self.error = error
        self.engine.held -= self._held
        self._held = 0
        self.engine.kept -= self.kept
        self.kept = 0
        for link in dict.fromkeys(
            [*self.links.values(), *self._remote.values(), *self._unanswered]
        ):
            link.end(error, False)
        self._unanswered.clear()
        self._names.clear()
        self.links.clear()
        self._free_handles.clear()
        self._remote.clear()
        self._outgoing.clear()
        self.incoming.clear()
        self._left = None
        self._queued.clear()
        self._queued_links.clear()
        self._link_flows.clear()
        followers, self.followers = self.followers, {}
        for follow in followers.values():
            follow()
        self.on_ended(error)

    def release_link(self, link: Link) -> None:
        """Free handle and name of *link*, which both sides have detached."""
        if self.links.get(link.handle) is link:
            del self.links[link.handle]
            heappush(self._free_handles, link.handle)
        if self._remote.get(link.remote_handle) is link:
            del self._remote[link.remote_handle]
        if self._names.get((link.name, link.role)) is link:
            del self._names[link.name, link.role]

    def unsettled_of(self, link: Link) -> list[Any]:
        """Return the unsettled deliveries of *link*, and remove them from the session."""
        found: list[Any] = []
        if not link.used:
            return found
        if self.ours.stage is ENDED:
            return self._left_by(link)
        if link.role == SENDER:
            for sending in list(self._outgoing.values()):
                if sending.link is link:
                    found.append(sending)
                    del self._outgoing[sending.delivery_id]
        else:
            for delivery in list(self.incoming.values()):
                if delivery.link is link:
                    found.append(delivery)
                    delivery.local_settled = True
                    del self.incoming[delivery.delivery_id]
            # The window may have been closed because of these; now it may open for other links.
            self._mark_dirty()
        return found

    def _left_by(self, link: Link) -> list[Any]:
        """Return the unsettled deliveries of *link*, now that all links end with the session.

        They are grouped in one pass, since a search for each link would take as many passes as links.
        """
        found: list[Any] = []
        if self._left is None:
            left: dict[Link, list[Any]] = {}
            last: Link | None = None
            for sending in self._outgoing.values():
                if sending.link is not last:
                    last = sending.link
                    found = left.setdefault(last, [])
                found.append(sending)
            for delivery in self.incoming.values():
                if delivery.link is not last:
                    last = delivery.link
                    found = left.setdefault(last, [])
                found.append(delivery)
            self._left = left
        found = self._left.pop(link, [])
        # Notifying one link of its end may have settled deliveries of another.
        if link.role == SENDER:
            return [sending for sending in found if sending.delivery_id in self._outgoing]
        found = [delivery for delivery in found if delivery.delivery_id in self.incoming]
        for delivery in found:
            delivery.local_settled = True
        return found

    # --- output --------------------------------------------------------------------------

    def flow(
        self,
        *,
        handle: int | None = None,
        delivery_count: int | None = None,
        link_credit: int | None = None,
        available: int | None = None,
        drain: bool = False,
        echo: bool = False,
    ) -> Flow:
        """Create a flow with the session's current windows; open the incoming one if allowed."""
        self.incoming_window = max(self.incoming_window, self._open_window())
        return Flow(
            next_incoming_id=self.next_incoming_id if self.remote_channel >= 0 else None,
            incoming_window=self.incoming_window,
            next_outgoing_id=self.next_outgoing_id,
            outgoing_window=_OUTGOING_WINDOW,
            handle=handle,
            delivery_count=delivery_count,
            link_credit=link_credit,
            available=available,
            drain=drain,
            echo=echo,
        )

    def flow_due(self, link: Link) -> None:
        """Send a flow of *link* with the next flush."""
        self._link_flows.append(link)
        self._mark_dirty()
        self.engine.wake()

    def queue_disposition(
        self, role: bool, delivery_id: int, settled: bool, state: DeliveryState | None
    ) -> None:
        """Queue *state* of a delivery; adjacent ids with equal state share one disposition.

        The error of a state that is larger than the peer's frames is shortened.

        Raises:
            LocalProtocolError: The state is larger even then.
            EncodeError: The state has no encoding. Nothing will be sent.
        """
        if self._range_open:
            if (
                delivery_id == (self._range_last + 1) & 0xFFFFFFFF
                and settled == self._range_settled
                and role == self._range_role
                and (state is self._range_state or state == self._range_state)
            ):
                self._range_last = delivery_id
                return
            self.flush_dispositions()
        encoded = encode_state(whole_state(state) if self._whole else state)
        if len(encoded) > self.payload_max:
            # The error's info, such as all faults of a payload, may exceed the peer's frames.
            short = short_state(state)
            encoded = encode_state(whole_state(short) if self._whole else short)
        if len(encoded) > self.payload_max:
            raise LocalProtocolError(
                f"a state of {len(encoded)} bytes does not fit the peer's frames",
                condition="amqp:frame-size-too-small",
            )
        self._range_encoded = encoded
        self._range_open = True
        self._range_role = role
        self._range_first = delivery_id
        self._range_last = delivery_id
        self._range_settled = settled
        self._range_state = state
        self._mark_dirty()
        self.engine.wake()

    def flush_dispositions(self) -> None:
        """Write the disposition of the range gathered so far."""
        if self._range_open:
            self._range_open = False
            if self.ours.stage is MAPPED:
                self.engine.write_bytes(
                    encoded_disposition(
                        self.channel,
                        self._range_role,
                        self._range_first,
                        self._range_last,
                        self._range_settled,
                        self._range_encoded,
                    )
                )
            self._range_state = None

    def _mark_dirty(self) -> None:
        if not self._dirty:
            self._dirty = True
            self.engine.mark_dirty(self)

    def flush(self) -> None:
        """Write the gathered output: a disposition, flows of links, and the session's flow."""
        self._dirty = False
        if self.ours.stage is MAPPED:
            self._flush()

    def _flush(self) -> None:
        self.flush_dispositions()
        if self._link_flows:
            links = self._link_flows
            self._link_flows = []
            for link in links:
                if link.write_flow():
                    # A link's flow carries all fields of a session's flow.
                    self._session_flow = False
        if self._session_flow or (
            self.remote_channel >= 0
            and self.incoming_window * 2 <= self._window
            and self._open_window() > self.incoming_window
        ):
            self._session_flow = False
            self.write(self.flow())
