"""AMQP 1.0 connection without I/O (Part 2 §2.4, Part 5 §5.3).

Bytes in, events out; calls in, bytes out; the time is an argument. The engine maps channels to
sessions and owns the output; sessions and links hold their own rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

from ..errors import AmqpError, LocalProtocolError
from ..events import Closed, ConnectionFailed, Event, Opened, Peer
from ..outcomes import Error
from .frames import (
    AMQP_FRAME,
    AMQP_HEADER,
    EMPTY_FRAME,
    FRAME_SIZE_MIN,
    SASL_HEADER,
    TLS_HEADER,
    WHOLE_FRAME_GROWTH,
    Fault,
    FrameBuffer,
    above_channel_max,
    connection_fault,
    link_fault,
    no_session,
    performative_frame,
    read_disposition,
    whole_frame,
)
from .lifecycle import (
    AWAITS_LOGIN,
    CLOSED,
    CONNECTION,
    HEADER,
    MAPPED,
    OPENED,
    READS_FRAMES,
    READS_HEADER,
    READS_NOTHING,
    READS_SASL,
    START,
    UNMAPPED,
    Half,
    Step,
    connection_state,
)
from .links import Link
from .options import EngineOptions
from .performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    Transfer,
    read_last,
)
from .receivers import ReceiverLink
from .repeated import final_frame, read_performative, repeated_frame
from .sasl import SaslLayer
from .senders import SenderLink
from .session import Session

UNBOUNDED_WORK: Final = 2**31 - 1
# Shared by engines without queued sessions: an empty deque takes more memory than the rest.
_NO_SESSIONS: Final[deque[Session]] = deque()
#: Work of a performative other than transfer or disposition, in units of one frame. An attach costs
#: more in proportion to its octets: its address is looked up and its filters are compiled.
_PERFORMATIVE_WORK: Final = 4
#: Bytes of a performative that are kept without being counted, and bytes counted for each element.
_SAID_FREE: Final = 1024
_ELEMENT_BYTES: Final = 8


def _no_output() -> None:
    """Ignore output; the default of ``Engine.on_output``."""


class Engine:
    """AMQP 1.0 connection of either side.

    ``receive`` never raises for the peer's faults: it queues the answer that the standard requires
    and reports :class:`~amqp_rt.events.ConnectionFailed`.
    """

    def __init__(self, options: EngineOptions, *, client: bool, now: float) -> None:
        self.options = options
        self.limits = options.limits
        self.client = client
        self.on_output: Callable[[], None] = _no_output
        self.finished: bool = False
        #: The connection is closing or closed. Set before its links are notified of their end.
        self.over: bool = False
        self.peer = Peer(address=options.address)
        #: The peer counts credit twice if it was topped up while transfers were in flight.
        self.peer_miscounts = False
        self.ours = Half(CONNECTION, START, ours=True)
        self.theirs = Half(CONNECTION, START, ours=False)
        self.sessions: dict[int, Session] = {}
        #: Called once after the connection has ended, after its sessions.
        self.followers: dict[object, Callable[[], None]] = {}
        #: Octets of a frame that are kept free for its absent fields; 0 if they are not written.
        self._growth: int = WHOLE_FRAME_GROWTH if options.whole_frames else 0
        #: The peer's max-frame-size, as far as we use it.
        self.frame_size_out: int = FRAME_SIZE_MIN - self._growth
        self.output_size: int = 0
        self.output_max: int = self.limits.output_max
        #: Bytes beyond the first KiB that would be kept of the performative being read, and the sum
        #: that is kept of earlier ones (``Limits.attach_bytes_max``).
        self.said: int = 0
        self.kept: int = 0
        #: Bytes of incomplete messages, over all sessions.
        self.assembling: int = 0
        #: Unread bytes of streamed messages, over all sessions.
        self.held: int = 0
        self._remote: dict[int, Session] = {}
        #: Highest channel number that we allow the peer, and use ourselves.
        self.channel_max: int = options.limits.channel_max
        self._remote_channel_max: int = 65535
        self._buffer = FrameBuffer(self.limits.frame_size_before_open)
        #: Input that is read next, as one of the constants in ``lifecycle``.
        self.layer: int = READS_HEADER
        #: Whether the login has succeeded, or the client does without SASL.
        self.sasl_done: bool = False
        #: Present from the first SASL header to the end of the login.
        self._sasl: SaslLayer | None = None
        #: Buffers that the next take returns.
        self.output: list[bytes] = []
        self._events: list[Event] = []
        self._touched: list[Link] = []
        #: Link of the transfer that was read last, until the next frame is looked at.
        self.run_link: ReceiverLink | None = None
        self._dirty: list[Session] = []
        self._queued: deque[Session] = _NO_SESSIONS
        self._waiting: dict[SenderLink, None] = {}
        self._room: bool = False
        self._receiving: bool = False
        #: Work done by one call of ``receive`` before it leaves the rest to the next call: about one unit
        #: for each frame, more for costly ones. Set by drivers of several connections in one thread.
        self.work_max: int = UNBOUNDED_WORK
        #: ``receive`` has left input unread.
        self.unread: bool = False
        #: Never: windows bound what the peer may send ahead.
        self.congested: bool = False
        #: Whether the next ``take`` may notify endpoints, since links wait for room.
        self.notifies: bool = False
        #: Work of this call, beyond one unit for each frame.
        self.spent: int = 0
        self._signalled: bool = False
        self._failed: Error | None = None
        self._close_reported: bool = False
        self._now = now
        self._handshake_deadline = now + (options.handshake_s or self.limits.handshake_s)
        self._close_deadline = inf
        #: Our close was sent; its grace period begins with the next tick, as our time may be old.
        self._grace_begins = False
        #: Time at which octets of the peer arrived last.
        self.last_received: float = now
        self._send_interval = inf
        self._next_send = inf
        self._sent: bool = False
        if client:
            if options.client_mechanisms:
                self._sasl = SaslLayer(self)
            else:
                self.sasl_done = True
                self._start_amqp()

    # --- called by the driver ------------------------------------------------------------

    @property
    def state(self) -> str:
        """Name of the connection's state in §2.4.6."""
        return connection_state(self.ours, self.theirs)

    @property
    def open_received(self) -> bool:
        """Whether the peer's open has arrived."""
        return self.theirs.stage is OPENED or self.theirs.stage is CLOSED

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called; ``inf`` for never."""
        if self.finished:
            return inf
        deadline = min(self._handshake_deadline, self._close_deadline, self._next_send)
        if self.theirs.stage is OPENED and self.limits.idle_timeout_s:
            deadline = min(deadline, self.last_received + 2 * self.limits.idle_timeout_s)
        return deadline

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Process bytes from the peer: every whole frame in them, as far as ``work_max`` allows."""
        self._now = now
        self.last_received = now
        self.unread = False
        self.spent = 0
        if self.layer == READS_NOTHING:
            return []
        if data:
            self._buffer.feed(data)
        return self.run()

    def run(self) -> list[Event]:
        """Process input that has arrived, and return its events."""
        self._receiving = True
        try:
            while True:
                try:
                    self._read()
                    break
                except AmqpError as error:
                    # The rest of this chunk is still read, since the peer's close may be in it.
                    self._fail(error.condition, error.description)
            self.dispatch()
        finally:
            self._receiving = False
        if self._room:
            self._give_room()
        if self._dirty or self.output or self._queued or self.finished:
            self._signalled = False
            self.wake()
        events, self._events = self._events, []
        return events

    def receive_eof(self, now: float) -> list[Event]:
        """Handle the end of the peer's half of the stream; no more input follows."""
        self._now = now
        if not self.finished:
            clean = self.theirs.stage is CLOSED or self.ours.stage is CLOSED
            error = self._failed
            if clean and error is None:
                self._report_closed(None)
            elif error is None:
                self._failed = Error("amqp:connection:forced", "the stream ended without a close")
                self.report(ConnectionFailed(self._failed))
            self._finish()
        events, self._events = self._events, []
        return events

    def tick(self, now: float) -> list[Event]:
        """Handle everything due at *now*: idle timeout, empty frames, other deadlines."""
        self._now = now
        if self.finished:
            return []
        if self._grace_begins:
            self._grace_begins = False
            self._close_deadline = now + self.limits.close_grace_s
        if now >= self._close_deadline:
            if self._failed is None:
                self._report_closed(None)
            self._finish()
        elif now >= self._handshake_deadline:
            self._fail("amqp:connection:forced", "the handshake took too long")
            # A peer that has not even opened the connection gets no grace period for its close.
            self._finish()
        elif (
            self.theirs.stage is OPENED
            and self.limits.idle_timeout_s
            and now >= self.last_received + 2 * self.limits.idle_timeout_s
        ):
            self._fail(
                "amqp:resource-limit-exceeded",
                f"nothing heard for {2 * self.limits.idle_timeout_s:g} s: idle timeout",
            )
        elif now >= self._next_send:
            self._next_send = now + self._send_interval
            if not self._sent and not self.output and self.ours.stage is OPENED:
                self.write_raw(EMPTY_FRAME)
            self._sent = False
        events, self._events = self._events, []
        return events

    def take(self) -> list[bytes]:
        """Take the buffers to send, in order. Small urgent frames precede queued transfers."""
        self._signalled = True
        if self._dirty:
            self._flush_dirty()
        if self._queued:
            self._emit_queued()
            if self._dirty:
                # A link has sent all that it may, and answers a drain. No other take may follow for long.
                self._flush_dirty()
        output = self.output
        if output:
            self.output = []
            self._sent = True
            self.output_size = 0
            if self._queued:
                # More is ready; the driver calls again once this has been sent.
                self._signalled = False
                self.wake()
            if self._waiting:
                self._give_room()
        self._signalled = False
        return output

    def close(self, error: Error | None = None) -> None:
        """Send close (§2.4.3). ``finished`` follows the peer's answer.

        A second call has no effect. Before our open no close can be sent: the connection just ends.

        Raises:
            EncodeError: *error* has no encoding. Nothing was sent.
        """
        if self.finished or self.ours.stage is CLOSED:
            return
        if self.ours.stage is not OPENED:
            self.layer = READS_NOTHING
            self._finish()
            return
        self._send_close(error)
        if self.theirs.stage is CLOSED:
            self._finish()

    # --- called by the application -------------------------------------------------------

    def begin(
        self,
        *,
        window: int | None = None,
        window_bytes: int | None = None,
        properties: Mapping[object, object] | None = None,
    ) -> Session:
        """Begin a session (§2.5.1); it may be used at once.

        Args:
            window: Transfer frames that the peer may send ahead.
            window_bytes: Bytes of unread messages that the session may hold.
            properties: Properties of the begin.

        Raises:
            LocalProtocolError: The connection is not open, the peer allows no more sessions, or
                *properties* are larger than its frames.
            EncodeError: *properties* have no encoding.
        """
        if self.ours.stage is not OPENED:
            raise LocalProtocolError("the connection is not open")
        session = self._new_session(window, window_bytes)
        session.send_begin(properties)
        self.sessions[session.channel] = session
        return session

    def _new_session(self, window: int | None, window_bytes: int | None) -> Session:
        channel = 0
        while channel in self.sessions:
            channel += 1
        if channel > min(self._remote_channel_max, self.channel_max):
            raise LocalProtocolError(
                f"no channel is left: at most {channel} sessions are allowed",
                condition="amqp:resource-limit-exceeded",
            )
        return Session(
            self,
            channel,
            self.limits.session_window if window is None else window,
            self.limits.session_window_bytes if window_bytes is None else window_bytes,
        )

    # --- called by sessions and links ----------------------------------------------------

    def frame_of(self, channel: int, performative: Any) -> bytes:
        """Encode the frame of *performative*.

        Raises:
            LocalProtocolError: The frame is larger than the peer's limit (§2.7.1).
            EncodeError: A field has no encoding.
        """
        encoded = repeated_frame if isinstance(performative, Begin) else performative_frame
        data = encoded(channel, performative)
        if len(data) > self.frame_size_out:
            raise LocalProtocolError(
                f"the {type(performative).__name__.lower()} needs {len(data)} bytes, and the peer "
                f"takes frames of {self.frame_size_out}",
                condition="amqp:frame-size-too-small",
            )
        return data

    def write_frame(self, channel: int, performative: Any) -> None:
        """Queue a small frame without payload."""
        self.write_bytes(performative_frame(channel, performative))

    def write_bytes(self, data: bytes) -> None:
        """Queue encoded frames, unless our close has been sent."""
        if self.ours.stage is OPENED:
            self.write_raw(data)

    def write_pieces(self, header: bytes, payload: bytes) -> None:
        """Queue a transfer frame; a large payload is not copied."""
        if self._growth:
            header = whole_frame(header)
        size = len(payload)
        if size <= 16_384:
            self.output.append(header + payload)
        else:
            self.output.append(header)
            self.output.append(payload)
        self.output_size += len(header) + size
        if not self._signalled:
            self.wake()

    def wake(self) -> None:
        """Notify the driver of output, once per take."""
        if not self._signalled and not self._receiving:
            self._signalled = True
            self.on_output()

    def touch(self, link: Link) -> None:
        """Schedule the notification of *link*'s endpoint for the end of the chunk."""
        self._touched.append(link)

    def report(self, event: Event) -> None:
        """Queue an event for the owner of the connection."""
        self._events.append(event)

    def mark_dirty(self, session: Session) -> None:
        """Schedule dispositions or flows of *session* for the next take."""
        self._dirty.append(session)

    def queue_session(self, session: Session) -> None:
        """Queue *session*, which has frames waiting for room; sessions take turns."""
        if self._queued is _NO_SESSIONS:
            self._queued = deque()
        if session not in self._queued:
            self._queued.append(session)
        self.wake()

    def wait_for_room(self, link: SenderLink) -> None:
        """Notify the link's endpoint when it may write again."""
        self._waiting[link] = None
        self.notifies = True

    def note_room(self) -> None:
        """Note that a window has opened, or that deliveries were settled."""
        if self._waiting:
            self._room = True

    def promised_beside(self, session: Session) -> int:
        """Return the number of frames that the other sessions of this connection may receive."""
        if len(self.sessions) <= 1 and session.channel in self.sessions:
            return 0
        promised = 0
        for other in self.sessions.values():
            if other is not session:
                promised += other.incoming_window
        return promised

    def release_session(self, session: Session) -> None:
        """Free the channels of *session*, which both sides have ended."""
        if self.sessions.get(session.channel) is session:
            del self.sessions[session.channel]
        if self._remote.get(session.remote_channel) is session:
            del self._remote[session.remote_channel]

    # --- output --------------------------------------------------------------------------

    def write_raw(self, data: bytes) -> None:
        """Queue *data*, in whichever state the connection is."""
        if self._growth:
            data = whole_frame(data)
        self.output.append(data)
        self.output_size += len(data)
        self.wake()

    def _flush_dirty(self) -> None:
        dirty, self._dirty = self._dirty, []
        for session in dirty:
            session.flush()

    def _emit_queued(self) -> None:
        """Send queued frames until the output is full; sessions take turns, one frame each."""
        queued = self._queued
        while queued and self.output_size < self.output_max:
            session = queued.popleft()
            if session.emit_queued(alone=not queued):
                queued.append(session)

    def _give_room(self) -> None:
        self._room = False
        waiting = self._waiting
        self._waiting = {}
        self.notifies = False
        for link in waiting:
            link.on_room()

    # --- input ---------------------------------------------------------------------------

    def _read(self) -> None:
        buffer = self._buffer
        left = self.work_max
        while True:
            if self.layer == READS_FRAMES:
                if left <= self.spent:
                    # The rest may be less than a whole frame; the next call finds out.
                    self.unread = True
                    return
                if not buffer.next_frame():
                    return
                left -= 1
                self._on_frame(buffer)
                if (link := self.run_link) is not None:
                    # The transfer may begin a run of its link.
                    self.run_link = None
                    if buffer.at < len(buffer.data):
                        left -= link.session.read_run(link, buffer, left - self.spent)
            elif self.layer == READS_SASL:
                if not buffer.next_frame():
                    return
                assert self._sasl is not None
                self._sasl.on_frame(buffer)
            elif self.layer == READS_HEADER:
                header = buffer.take_header()
                if not header:
                    return
                self._on_header(header)
            else:
                if self.layer == AWAITS_LOGIN and buffer.held() > self.limits.login_ahead_max:
                    raise connection_fault(
                        "amqp:resource-limit-exceeded",
                        "too much was sent before the login's answer",
                    )
                return

    def _on_frame(self, buffer: FrameBuffer) -> None:
        if buffer.kind != AMQP_FRAME:
            raise connection_fault(
                "amqp:connection:framing-error", f"frame type {buffer.kind} is not AMQP"
            )
        data = buffer.data
        at = buffer.body
        end = buffer.end
        if at == end:
            if self.theirs.stage is HEADER:
                raise connection_fault("amqp:not-allowed", "an empty frame came before open")
            return
        if self.ours.stage is CLOSED:
            self._after_close(data, at, end)
            return
        code = -1
        if end - at > 3 and data[at] == 0 and data[at + 1] == 0x53:
            code = data[at + 2]
        if code == 0x14:
            session = self._remote.get(buffer.channel)
            if session is None or self.theirs.stage is not OPENED:
                raise no_session("transfer", buffer.channel, self.channel_max)
            if session.ours.stage is MAPPED:
                try:
                    session.on_transfer(data, at, end)
                except Fault as fault:
                    self._end_session(session, fault)
        elif code == 0x15 and self.theirs.stage is OPENED:
            session = self._remote.get(buffer.channel)
            if session is None:
                raise no_session("disposition", buffer.channel, self.channel_max)
            if session.ours.stage is MAPPED:
                session.on_disposition(read_disposition(data, at, end, self.limits))
        else:
            self._on_performative(data, at, end, buffer.channel)

    def _on_performative(self, data: bytes, at: int, end: int, channel: int) -> None:
        performative, elements = read_performative(data, at, end, self.limits)
        self.spent += _PERFORMATIVE_WORK + elements // 2
        self.said = max(0, end - at + _ELEMENT_BYTES * elements - _SAID_FREE)
        if self.theirs.stage is not OPENED:
            if not isinstance(performative, Open):
                name = type(performative).__name__.lower()
                raise connection_fault("amqp:not-allowed", f"{name} came before open")
            if channel:
                # Before open the highest channel is 0 (§2.4.1).
                raise connection_fault(
                    "amqp:connection:framing-error", f"open came on channel {channel}"
                )
            self._on_open(performative)
            return
        if isinstance(performative, Close):
            self._on_close(performative)
            return
        if isinstance(performative, Open):
            raise connection_fault("amqp:not-allowed", "open came twice")
        if isinstance(performative, Begin):
            self._on_begin(performative, channel)
            return
        session = self._remote.get(channel)
        if session is None:
            raise no_session(type(performative).__name__.lower(), channel, self.channel_max)
        if isinstance(performative, End):
            session.on_end(performative)
            return
        if session.ours.stage is not MAPPED:
            # Ended by us; frames in flight are ignored (§2.5.4).
            return
        try:
            if isinstance(performative, Flow):
                session.on_flow(performative)
            elif isinstance(performative, Attach):
                self.spent += 2 * (end - at)
                session.on_attach(performative)
            elif isinstance(performative, Detach):
                session.on_detach(performative)
            elif isinstance(performative, Transfer):
                # With an unusual encoding of its descriptor, as the disposition below.
                session.on_transfer(data, at, end)
            elif isinstance(performative, Disposition):
                session.on_disposition(performative)
        except Fault as fault:
            self._end_session(session, fault)

    def _end_session(self, session: Session, fault: Fault) -> None:
        if fault.scope != "session":
            raise fault
        self.dispatch()
        session.end(Error(fault.condition, fault.description))

    def dispatch(self) -> None:
        """Pass the chunk's contents to the endpoints: one call per link and kind."""
        while self._touched:
            touched = self._touched
            self._touched = []
            for link in touched:
                link.flush_batch()

    def _on_header(self, header: bytes) -> None:
        if header == AMQP_HEADER:
            if not self.sasl_done and (self.client or self.options.sasl_required):
                self._refuse_header(SASL_HEADER, header)
                return
            self.theirs.take(Step.HEADER)
            if self.ours.stage is START:
                self.ours.take(Step.HEADER)
                self.write_raw(AMQP_HEADER)
            self.layer = READS_FRAMES
            if self.client and self.ours.stage is HEADER:
                self._send_open()
        elif (
            header == SASL_HEADER
            and not self.sasl_done
            and (self.client or self.options.mechanisms)
        ):
            self.layer = READS_SASL
            if self._sasl is None:
                self._sasl = SaslLayer(self)
        else:
            self._refuse_header(SASL_HEADER if self.options.sasl_required else AMQP_HEADER, header)

    def _refuse_header(self, ours: bytes, header: bytes) -> None:
        """Answer a protocol header that we do not support with one that we do, and end (§2.2)."""
        said = self.ours.stage is not START or self._sasl is not None or self.sasl_done
        if not said:
            self.write_raw(ours)
        theirs = "requires TLS" if header == TLS_HEADER else "speaks another protocol or version"
        self._failed = Error("amqp:connection:framing-error", f"the peer {theirs}")
        self.report(ConnectionFailed(self._failed))
        self._finish()

    # --- called by the SASL layer --------------------------------------------------------

    def end_sasl(self) -> None:
        """Continue with the protocol header of AMQP, after a login that succeeded."""
        if self._sasl is not None:
            self._sasl.end()
            self._sasl = None
        self.sasl_done = True
        self.layer = READS_HEADER
        if self.client:
            self._start_amqp()

    def fail_login(self, description: str) -> None:
        """End the connection, since its login failed."""
        self._failed = Error("amqp:unauthorized-access", description)
        self.report(ConnectionFailed(self._failed))
        self._finish()

    # --- open and close ------------------------------------------------------------------

    def _start_amqp(self) -> None:
        self.ours.take(Step.HEADER)
        self.write_raw(AMQP_HEADER)
        if self.options.pipelined:
            self._send_open()

    def _send_open(self) -> None:
        limits = self.limits
        options = self.options
        self.ours.take(Step.OPEN)
        idle = int(limits.idle_timeout_s * 1000) or None
        performative = Open(
            container_id=options.container_id,
            hostname=options.hostname,
            max_frame_size=limits.frame_size_max,
            channel_max=self.channel_max,
            idle_time_out=idle,
            offered_capabilities=options.offered_capabilities,
            desired_capabilities=options.desired_capabilities,
            properties=options.properties or None,
        )
        self.write_raw(repeated_frame(0, performative))

    def _on_open(self, performative: Open) -> None:
        self.theirs.take(Step.OPEN)
        limits = self.limits
        self._buffer.size_max = limits.frame_size_max
        self._handshake_deadline = inf
        self.peer_miscounts = _note_peer(self.peer, performative, client=self.client)
        if self.ours.stage is HEADER:
            if self.options.channel_max_for is not None:
                self.channel_max = self.options.channel_max_for(self.peer)
            self._send_open()
        if performative.max_frame_size < FRAME_SIZE_MIN:
            raise connection_fault(
                "amqp:invalid-field",
                f"max-frame-size {performative.max_frame_size} is below {FRAME_SIZE_MIN}",
            )
        if len(performative.container_id) > limits.name_max:
            raise connection_fault("amqp:invalid-field", "the container-id is too long")
        frame_size = min(performative.max_frame_size, limits.frame_size_max)
        self.frame_size_out = frame_size - self._growth
        for session in self.sessions.values():
            session.set_frame_size(self.frame_size_out)
        self._remote_channel_max = performative.channel_max
        if performative.idle_time_out:
            seconds = performative.idle_time_out / 1000
            if seconds < limits.idle_timeout_min_s:
                raise connection_fault(
                    "amqp:not-allowed",
                    f"an idle-time-out of {performative.idle_time_out} ms is too small to keep",
                )
            self._send_interval = seconds / 4
            self._next_send = self._now + self._send_interval
        self.report(Opened(self.peer))

    def _on_begin(self, begin: Begin, channel: int) -> None:
        if channel > self.channel_max:
            raise above_channel_max(channel, self.channel_max)
        if channel in self._remote:
            raise connection_fault("amqp:not-allowed", f"channel {channel} has a session already")
        if begin.remote_channel is not None:
            session = self.sessions.get(begin.remote_channel)
            if session is None or session.theirs.stage is not UNMAPPED:
                raise connection_fault(
                    "amqp:not-allowed",
                    f"begin answers channel {begin.remote_channel}, where nothing was begun",
                )
            session.on_begin(begin, channel)
            self._remote[channel] = session
            return
        if len(self.sessions) > self.channel_max:
            raise connection_fault(
                "amqp:resource-limit-exceeded", f"more than {len(self.sessions)} sessions"
            )
        session = self._new_session(None, None)
        try:
            session.kept = self.charge_memory()
        except Fault as fault:
            raise connection_fault(fault.condition, fault.description) from None
        session.on_begin(begin, channel)
        session.send_begin()
        self.sessions[session.channel] = session
        self._remote[channel] = session

    def charge_memory(self) -> int:
        """Count the memory that the connection keeps for the performative being read.

        Returns:
            The number to subtract from :attr:`kept` when the memory is released.

        Raises:
            Fault: The limit is exceeded; nothing is counted. The fault is one of a link.
        """
        if self.said > self.limits.attach_bytes_max - self.kept:
            raise link_fault(
                "amqp:resource-limit-exceeded",
                f"the contents of a connection's attaches exceed {self.limits.attach_bytes_max}"
                " bytes",
            )
        self.kept += self.said
        return self.said

    def _on_close(self, close: Close) -> None:
        self.theirs.take(Step.CLOSE)
        self.dispatch()
        if self.ours.stage is OPENED:
            self._flush_dirty()
            self.ours.take(Step.CLOSE)
            self.write_raw(repeated_frame(0, Close()))
        self._lose_sessions(close.error)
        self._report_closed(close.error)
        self._finish()

    def _after_close(self, data: bytes, at: int, end: int) -> None:
        """Process a frame after our close was sent: only the peer's close counts (§2.4.3)."""
        close = read_last(data, at, end, self.limits)
        if close is not None:
            self.theirs.stage = CLOSED
            self._report_closed(close.error)
            self._finish()
        elif self.theirs.stage is HEADER:
            # Our close crossed the peer's open; its close follows.
            self.theirs.stage = OPENED

    def _send_close(self, error: Error | None) -> None:
        close = final_frame(0, Close(error), self.frame_size_out, whole=self.options.whole_errors)
        self._flush_dirty()
        self.ours.take(Step.CLOSE)
        self._queued.clear()
        self.write_raw(close)
        self._handshake_deadline = inf
        self._close_deadline = self._now
        self._grace_begins = True
        self._lose_sessions(error)

    def _fail(self, condition: str, description: str) -> None:
        """Fail the connection, and report the fault to the peer as far as the protocol allows.

        The cause is a violation by the peer or a timeout.
        """
        if self._failed is not None or self.finished:
            self.layer = READS_NOTHING
            self._finish()
            return
        self._failed = Error(condition, description)
        if self.ours.stage is HEADER and self.layer == READS_FRAMES:
            # A close must not precede open: send open, then close with the reason.
            self._send_open()
        self.report(ConnectionFailed(self._failed))
        if self.ours.stage is OPENED and self.layer == READS_FRAMES:
            self._send_close(self._failed)
            if self.theirs.stage is CLOSED:
                self._finish()
        else:
            self.layer = READS_NOTHING
            self._finish()

    def _lose_sessions(self, error: Error | None) -> None:
        self.over = True
        for session in list(self.sessions.values()):
            session.lose(error)
        self.sessions.clear()
        self._remote.clear()
        self._waiting.clear()
        self._queued.clear()
        followers, self.followers = self.followers, {}
        for follow in followers.values():
            follow()

    def _report_closed(self, error: Error | None) -> None:
        if not self._close_reported and self._failed is None:
            self._close_reported = True
            self._events.append(Closed(error))

    def _finish(self) -> None:
        """End the connection for good; queued output still leaves."""
        if self.finished:
            return
        self.layer = READS_NOTHING
        self._lose_sessions(self._failed)
        # Sessions refer to their engine: without this the cycle would keep its buffers.
        self._dirty.clear()
        self.finished = True
        self._close_deadline = inf
        self._handshake_deadline = inf
        if self._sasl is not None:
            self._sasl.end()
            self._sasl = None
        self._signalled = False
        self.wake()


def _note_peer(peer: Peer, performative: Open, *, client: bool) -> bool:
    """Note what the open of *peer* says; return whether the peer counts credit twice."""
    peer.container_id = performative.container_id
    if not client:
        # Without a hostname here, the one from SASL or TLS applies, or else the default (§2.7.1).
        peer.virtual_host = performative.hostname or peer.virtual_host
    peer.offered_capabilities = performative.offered_capabilities
    peer.desired_capabilities = performative.desired_capabilities
    peer.properties = performative.properties or {}
    # RabbitMQ before 4.0 counts link-credit from its own delivery-count: it grants transfers twice.
    version = peer.properties.get("version")
    return (
        peer.properties.get("product") == "RabbitMQ"
        and isinstance(version, str)
        and version.startswith("3.")
    )
