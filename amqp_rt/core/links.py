"""Links: attaching, detaching and resuming, for both directions (Part 2 §2.6).

What differs by direction is in :mod:`~amqp_rt.core.receivers` and :mod:`~amqp_rt.core.senders`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..codec.composites import encode_composite
from ..errors import LocalProtocolError
from ..events import Peer
from ..outcomes import Error
from ..termini import Coordinator, Source, Target
from ..unsettled import Unsettled, UnsettledMap
from .frames import Fault, link_fault
from .lifecycle import ATTACHED, CLOSED, DETACHED, LINK, Half, Step, link_state
from .performatives import SENDER, Attach, Detach, Flow
from .repeated import final_frame
from .resume import fitting, read_unsettled

if TYPE_CHECKING:
    from .session import Session

SND_UNSETTLED: Final = 0
SND_SETTLED: Final = 1
SND_MIXED: Final = 2
RCV_SECOND: Final = 1


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
        self.source: Source | None = None
        self.target: Target | Coordinator | None = None
        #: Address of our terminus as the peer wrote it; set by the link's owner if it maps addresses.
        self.asked: str | None = None
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
        self.sent_unsettled: dict[Any, Any] = {}
        self.sent_all: bool = True
        #: The link is joined with one of another connection, whose peer compares the unsettled maps;
        #: see :meth:`relay`.
        self.relays: bool = False
        self._relayed: Mapping[bytes, Any] | None = None
        self._relayed_all: bool = True
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
        self._ended: bool = False
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
        """Engine that carries the link, or what stands for it.

        The owner of the engine may set ``Session.carrier`` before it answers the first attach of a session whose links
        are those of a client of another node. It then has the client's peer, too.
        """
        carrier = self.session.carrier
        return self.session.engine if carrier is None else carrier

    @property
    def peer(self) -> Peer:
        """Peer of the link's connection."""
        carrier = self.session.carrier
        if carrier is None:
            return self.session.engine.peer
        peer: Peer = carrier.peer
        return peer

    @property
    def state(self) -> str:
        """Name of the link's state (§2.6.3)."""
        return link_state(self.ours, self.theirs)

    @property
    def ended(self) -> bool:
        """Whether the link has ended, by a detach or with its session."""
        return self._ended

    def refuse(self, error: Error) -> None:
        """Answer an attach request with null termini, then detach with *error* (§2.6.3).

        No effect if the session has ended already.

        Raises:
            LocalProtocolError: The link is attached already.
            EncodeError: *error* has no encoding.
        """
        if self._ended or self._denied:
            return
        if self.ours.stage is not DETACHED:
            raise LocalProtocolError(f"link {self.name!r} is attached already")
        encode_composite(error)
        try:
            self.session.send_attach(self, null_termini=True)
        except LocalProtocolError as fault:
            # The peer's frames cannot even hold the name that it gave the link (§2.7.3).
            self.session.end(Error.of(fault))
            return
        self._send_detach(error, closed=True)
        if self.theirs.stage is not ATTACHED:
            # The peer has detached already; no further frame of this link follows.
            self.refund_memory()

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
        if self._ended or self.ours.stage is not ATTACHED:
            return
        self._send_detach(error, closed=closed)

    def _send_detach(self, error: Error | None, *, closed: bool) -> None:
        session = self.session
        engine = session.engine
        detach = final_frame(
            session.channel,
            Detach(self.handle, closed, error),
            engine.frame_size_out,
            whole=engine.options.whole_errors,
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
        self._kept += self.session.engine.charge_memory()
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

    def set_unsettled(self, unsettled: UnsettledMap | None, relays: Any = None) -> None:
        """Set the deliveries that an earlier link left unsettled, None if none is remembered; or the
        link *relays* that remembers nothing either, see :meth:`relay`."""
        if relays is not None:
            self.relay(relays)
        if unsettled is not None:
            self.resumes = True
            for tag, entry in unsettled.items():
                if entry.delivery is None or not entry.delivery.settled:
                    # Deliveries given up in the meantime are omitted, which the peer takes as
                    # settled.
                    self._remembered[tag] = entry

    def relay(self, other: Any) -> None:
        """Stand for the peer of *other*, a link of another connection; call it before our attach.

        Our attach carries the unsettled map that *other*'s peer has sent. The two peers compare their
        maps as if they had one link (§2.6.13, Part 3 §3.4.6), and this link remembers nothing: resumed
        deliveries arrive like others, with ``resumed`` set, and leave by ``SenderLink.send_resumed``.
        A map that does not fit our frame is shortened, for which the peer of *other* has to be told
        that the answer is incomplete; this is done if *other* relays the answer.
        """
        self.relays = True
        self._relayed = other.remote_unsettled
        self._relayed_all = not other.remote_incomplete and other.sent_all
        self.resumes = self._relayed is not None

    def map_to_send(self, room: int) -> bool:
        """Set ``sent_unsettled`` to our unsettled map, as far as it fits *room* octets; return whether it
        is complete."""
        relayed = self._relayed
        states = self.states() if relayed is None else list(relayed.items())
        self.sent_unsettled, self.sent_all = fitting(
            states, room, self.session.limits.unsettled_max
        )
        self._relayed = None
        return self.sent_all and self._relayed_all

    def states(self) -> list[tuple[bytes, Any]]:
        """Return the entries of our unsettled map."""
        raise NotImplementedError

    def resume(self) -> None:
        """Compare the unsettled maps and act on them, now that both sides are attached."""
        if self.relays:
            # The map is for the other link. The owner of both drops it when that has been attached.
            self.resumed = self.resumes and self.remote_unsettled is not None
            return
        remote = self.remote_unsettled
        self.remote_unsettled = None
        self.resumed = self.resumes and remote is not None
        # A peer without a map remembers nothing, and in that sense its map is complete.
        self.incomplete = remote is not None and (self.remote_incomplete or not self.sent_all)
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
        if self._ended:
            return
        self.drop_queued()
        self.flush_batch()
        self._ended = True
        self._cause = error
        self._closed = closed
        self.attached = False
        self.credit = 0
        self.unsettled = self.session.unsettled_of(self) + self.unsettled
        self.refund_memory()
        endpoint = self.endpoint
        if endpoint is not None:
            endpoint.on_detached(self, error, closed)
            # The endpoint refers to the link, and the link to its session and engine: this
            # reference back would keep them and their buffers in memory until a full garbage
            # collection.
            self.endpoint = None

    def refund_memory(self) -> None:
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

    def answered_termini(self) -> tuple[Source | None, Target | Coordinator | None]:
        """Return source and target of our attach, our own with the address that the peer asked for if
        such addresses are repeated."""
        source, target = self.source, self.target
        if self.asked is not None and self.session.engine.options.echo_addresses:
            if self.role != SENDER:
                if isinstance(target, Target):
                    target = copy.copy(target)
                    target.address = self.asked
            elif source is not None:
                source = copy.copy(source)
                source.address = self.asked
        return source, target

    def _answer(
        self,
        endpoint: Any,
        source: Any,
        target: Any,
        properties: Mapping[object, object] | None,
        offered_capabilities: Sequence[str],
    ) -> bool:
        if self._ended or self._denied:
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
            self.session.send_attach(
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
            self._send_detach(None, closed=True)
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
                self._send_detach(None, closed=True)
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
