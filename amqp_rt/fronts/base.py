"""Interfaces between a protocol and the rest of the program, in both directions.

A *front* recognises protocol headers and creates *engines*. An engine turns bytes into events and
calls into bytes; it does no I/O. For every protocol, the program sees links: a :class:`SendingLink`
carries messages from us to the peer, a :class:`ReceivingLink` from the peer to us. An *endpoint* is
bound to a link when it attaches, and its methods are called with the link's events, in one batch
per chunk of input.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import Struct

from ..events import Event, Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error, Outcome, Rejected
from ..termini import Coordinator, Source, Target
from ..transactions import DeliveryState, TransactionBranches
from ..unsettled import Unsettled, UnsettledMap

#: An encoded AMQP 1.0 message, whole or as pieces in order. Large pieces are never joined; they go
#: to the socket as they are.
Payload: TypeAlias = bytes | Sequence[bytes]

#: A front's own type of deliveries.
D = TypeVar("D")

#: ``role`` (Part 2 §2.8.1).
SENDER, RECEIVER = False, True
#: ``snd-settle-mode`` (Part 2 §2.8.2).
SND_UNSETTLED, SND_SETTLED, SND_MIXED = 0, 1, 2
#: ``rcv-settle-mode`` (Part 2 §2.8.3).
RCV_FIRST, RCV_SECOND = 0, 1


class IncomingDelivery(Protocol):
    """Delivery received from the peer."""

    link: ReceivingLink
    tag: bytes
    message_format: int
    #: The sender has settled and expects no outcome.
    settled: bool
    #: We settle after the sender (``rcv-settle-mode`` second).
    second: bool
    #: State set by the sender, for example a transactional state.
    state: DeliveryState | None
    #: State set by us.
    local_state: DeliveryState | None
    #: The encoded message, whole once ``complete`` is true. On a streaming link use ``read_chunks``
    #: instead.
    payload: bytes
    complete: bool
    aborted: bool
    #: Streamed because of its size, although its link is not streaming.
    streamed: bool
    #: The sender resumes it: an earlier link left it unsettled (Part 2 §2.6.13).
    resumed: bool
    #: Free for use by the endpoint.
    context: Any

    def read_chunks(self) -> list[bytes]:
        """Return the chunks that arrived since the last call, and reopen the session window."""

    def settle(self, outcome: DeliveryState) -> None:
        """Set *outcome*; settled at once, or after the sender where ``second`` is true."""

    def update(self, state: DeliveryState) -> None:
        """Send *state* without settling (Part 2 §2.6.12)."""


class OutgoingDelivery(Protocol):
    """Delivery that we send to the peer."""

    link: SendingLink
    #: -1 until the first frame has left; until then the peer cannot know the delivery.
    delivery_id: int
    tag: bytes
    #: Settled by us; no further notification follows.
    settled: bool
    #: The peer's latest state; an outcome once it is terminal.
    state: DeliveryState | None
    #: Settled by the peer.
    remote_settled: bool
    #: Free for use by the endpoint.
    context: Any

    def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a further piece of a streamed message; ``more=False`` ends it."""

    def abort(self) -> None:
        """Abort an unfinished message (Part 2 §2.7.5 ``aborted``)."""

    def settle(self, state: DeliveryState | None = None) -> None:
        """Settle, with a disposition to the peer if it has not settled already."""


class LinkCarrier(Protocol):
    """Session or connection that carries links."""

    #: Functions that are called when it ends, after its links have been notified; by the objects
    #: that follow it.
    followers: dict[object, Callable[[], None]]


class LinkSession(LinkCarrier, Protocol):
    """Session of links."""

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""


class LinkConnection(LinkCarrier, Protocol):
    """Connection of links."""

    @property
    def over(self) -> bool:
        """Whether the connection has ended."""


class Link(Protocol):
    """Base of sending and receiving links. Before ``accept`` the values are the peer's."""

    name: str
    #: Our role: ``SENDER`` or ``RECEIVER``.
    role: bool
    peer: Peer
    source: Source | None
    target: Target | Coordinator | None
    snd_settle_mode: int
    rcv_settle_mode: int
    max_message_size: int
    properties: Mapping[object, object]
    offered_capabilities: tuple[str, ...]
    desired_capabilities: tuple[str, ...]
    #: Address of our terminus as the peer wrote it, where the container has mapped it to the one in
    #: ``source`` or ``target``; None if the peer gave none, or asked for a dynamic node.
    asked: str | None
    #: Both sides are attached.
    attached: bool
    #: Deliveries that were unsettled when the link ended, for use in ``on_detached``.
    unsettled: list[Any]
    #: The peer's unsettled map for a link of this name, until both sides are attached; None if the
    #: peer remembers nothing.
    remote_unsettled: Mapping[bytes, Any] | None
    #: The peer's map is incomplete, because it did not fit its frame.
    remote_incomplete: bool
    #: Our map, if we have attached with one, was complete.
    sent_all: bool
    #: Both sides have attached with an unsettled map: the link continues an earlier one (Part 2 §2.6.13).
    resumed: bool
    #: Deliveries that were passed to the attach and are not in the peer's map. On a sending link they have to be sent as
    #: new, if at all; on a receiving link they count as settled. Unless the link was resumed, their absence means nothing.
    unknown: list[Unsettled]
    #: One of the maps did not fit its frame: no new delivery can be sent on this link. It is suspended
    #: when all deliveries that can be resumed have been, and has to be attached again.
    incomplete: bool
    #: Free for use by the link's owner.
    context: Any

    @property
    def session(self) -> LinkSession:
        """Session, shared by its links."""

    @property
    def connection(self) -> LinkConnection:
        """Connection of the session."""

    def relay(self, other: Any) -> None:
        """Answer with the unsettled map of the peer of *other*, with which this link is joined; before ``accept``.

        The two peers compare their maps, and nothing is remembered here.
        """

    def refuse(self, error: Error) -> None:
        """Answer an attach request with a null terminus, then detach (Part 2 §2.6.3)."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Send detach. Nothing may be sent on the link afterwards; a second call has no effect.

        The endpoint's ``on_detached`` is called when the peer has answered.
        """

    def end(self, error: Error | None, closed: bool) -> None:
        """End the link at once and notify the endpoint, without sending anything.

        For a link that another one takes over, whose peer may never answer a detach.
        """

    def remember(self) -> UnsettledMap:
        """Return the deliveries left unsettled by an ended link, for its next attach.

        Deliveries that we sent come without their payload: add it, or they cannot be sent again.
        Those that had not left (``delivery_id`` -1) and unfinished messages are omitted.
        """


class ReceivingLink(Link, Protocol):
    """Link on which the peer sends to us."""

    #: Deliveries that the peer may still send.
    credit: int
    #: Deliveries that the peer could send at once, according to its last flow.
    available: int
    #: Messages larger than this are streamed although the others are not, 0 for none; and whether any was.
    stream_above: int
    has_streamed: bool
    #: Work of the endpoint for each delivery beside that of its frames, in frames (``work_max`` of the engine). AMQP 1.0
    #: then reads fewer frames at a time, so that one connection does not hold up the others.
    delivery_work: int
    #: Returns the properties of each flow that has no others, in AMQP 1.0; None for none.
    flow_report: Callable[[], Mapping[object, object]] | None

    def accept(
        self,
        endpoint: ReceivingEndpoint,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        max_message_size: int | None = None,
        streaming: bool = False,
        stream_above: int = 0,
        rcv_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Attach our side. Omitted termini are answered as the peer requested them.

        Messages of more than *stream_above* bytes are streamed although the others are not; 0 for
        none. *unsettled* holds the deliveries left by an earlier link of this name; None if none is
        remembered.
        """

    def grant(self, credit: int, *, properties: Mapping[object, object] | None = None) -> None:
        """Let the peer send *credit* more deliveries, counted from now (Part 2 §2.6.7).

        *properties* go with the flow, such as the ``txn-id`` of an acquisition.
        """

    def drain(self) -> None:
        """Ask the peer to use the credit now or give it back; ``on_flow`` follows."""

    def report(self) -> None:
        """Send a flow with the present credit, for the properties of ``flow_report``."""


class SendingLink(Link, Protocol):
    """Link on which we send to the peer."""

    #: Deliveries that we may still send.
    credit: int
    #: The peer wants the credit used or given back.
    draining: bool
    #: False while the session window or the output buffer is full. ``send`` still works then and
    #: queues the message; well-behaved endpoints wait for ``on_credit`` instead.
    writable: bool
    #: ``properties`` of the latest flow that had some: the ``txn-id`` of an acquisition, the load of a node of a mesh.
    flow_properties: Mapping[object, object] | None
    # Fronts set the next two. They are attributes and not link properties, which a peer could send.
    #: The link takes no more messages and does not count as a consumer, although some of its
    #: messages may be unsettled.
    idle: bool
    #: The peer uses the same outcome to return messages as for failed ones: redeliver them without
    #: delay.
    requeues: bool

    def accept(
        self,
        endpoint: SendingEndpoint,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        snd_settle_mode: int | None = None,
        properties: Mapping[object, object] | None = None,
        offered_capabilities: Sequence[str] = (),
        unsettled: UnsettledMap | None = None,
    ) -> None:
        """Attach our side. Omitted termini are answered as the peer requested them.

        *unsettled* holds the deliveries left by an earlier link of this name; None if none is
        remembered.
        """

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        more: bool = False,
    ) -> OutgoingDelivery:
        """Send one message, or with ``more`` its first piece. Uses one credit.

        Raises:
            CreditTooSmall: The peer grants credit in bytes too, which does not cover this message.
                ``credit`` is 0 from then on, until ``on_credit`` reports more. A node leaves the
                message to others meanwhile. Nothing was sent.
            LocalProtocolError: No credit, not attached, another message of this link is unfinished,
                or the peer never accepts this message. Nothing was sent.
        """

    def drained(self) -> None:
        """Give back unused credit if the peer drains and nothing is left to send."""

    def offer(self, available: int) -> None:
        """Set the number of waiting deliveries that the next flow reports (``available``)."""


class ReceivingEndpoint(Protocol):
    """Handler of a :class:`ReceivingLink`'s events. Called within the engine: do not block."""

    def on_attached(self, link: ReceivingLink) -> None:
        """Handle the attach of both sides; ``source``, ``target`` and modes are the agreed ones."""

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Handle complete messages, in order; on a streaming link messages that have begun."""

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Handle streamed messages that have new chunks, have ended or were aborted."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Handle unsettled deliveries that the sender has settled, or whose state it changed."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Handle the sender's flow: the answer to a drain, or a change of ``available``."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Handle the end of the link: a detach by either side, or its session or connection ended.

        Called exactly once per accepted or attached link; ``closed`` is false if the peer may
        resume it. Outcomes set from now on are not sent, unless the map that ``link.remember()``
        returns is passed to another attach.
        """


class SendingEndpoint(Protocol):
    """Handler of a :class:`SendingLink`'s events. Called within the engine: do not block."""

    def on_attached(self, link: SendingLink) -> None:
        """Handle the attach of both sides; ``source``, ``target`` and modes are the agreed ones."""

    def on_credit(self, link: SendingLink) -> None:
        """Handle new credit or room, the start of a drain, or the request for an echo."""

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Handle deliveries that the peer has settled, or whose state it changed.

        Deliveries settled by the peer are settled here too by the time of the call.
        """

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """Handle the end of the link, as a receiving endpoint does.

        ``link.unsettled`` holds the deliveries that the peer has not settled.
        """


class ProtocolEngine(Protocol):
    """Connection without I/O.

    An engine may have an attribute ``notifies``: whether the next ``take`` may notify endpoints, for example that there
    is room again. Without it that is assumed, and output leaves a pass of the scheduler later.
    """

    #: Called when there is output to send, or when the engine has finished.
    on_output: Callable[[], None]
    #: Frames, approximately, that ``receive`` handles before it leaves the rest to its next call,
    #: so that other work in the thread gets its turn.
    work_max: int

    @property
    def unread(self) -> bool:
        """Whether ``receive`` left input: call it again, with empty bytes if no more arrived."""

    @property
    def congested(self) -> bool:
        """Whether as much input is in hand as may be: nothing is read until ``on_output`` has been called.

        False where the protocol bounds what its peer may send ahead.
        """

    @property
    def finished(self) -> bool:
        """Whether the engine has ended and produces no more output."""

    @property
    def output_size(self) -> int:
        """Number of bytes waiting in ``take``."""

    @property
    def peer(self) -> Peer:
        """Peer of the connection."""

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called, in the clock of ``now``; ``inf`` for never."""

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Process bytes from the peer. Its faults are answered and reported, not raised."""

    def receive_eof(self, now: float) -> list[Event]:
        """Handle the end of the peer's half of the stream."""

    def tick(self, now: float) -> list[Event]:
        """Handle everything due at *now*: idle timeout, empty frames, handshake deadline."""

    def take(self) -> list[bytes]:
        """Take the buffers to send, in order; from now on the caller owns them."""

    def close(self, error: Error | None = None) -> None:
        """Send close in the protocol's own way. ``finished`` follows the peer's answer."""


#: Argument of an exchange that names the exchange for unroutable messages, and its older spelling.
ALTERNATE: Final = ("alternate-exchange", "alternate_exchange")


class ServerEngine(ProtocolEngine, Protocol):
    """Connection that a client opened, as a container sees it."""

    @property
    def over(self) -> bool:
        """Whether the links of the connection have ended or are ending: no more can be attached."""

    @property
    def sessions(self) -> Mapping[int, Any]:
        """The protocol's session objects, for management.

        Each has its ``channel``, its ``links`` by number, and ``end(error)``.
        """


class Exchange(Struct, frozen=True, kw_only=True):
    """Declaration of an exchange (0-9-1 §3.1.3)."""

    name: str
    type: str = "direct"
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, object] = {}

    @property
    def alternate(self) -> str | None:
        """Name of the exchange for messages that this one cannot route; None if not set."""
        for name in ALTERNATE:
            found = self.arguments.get(name)
            if isinstance(found, str) and found:
                return found
        return None


class QueueDeclaration(Struct, frozen=True, kw_only=True):
    """Declaration of a queue by a peer (0-9-1 §3.1.3). An empty name requests a new one."""

    name: str = ""
    durable: bool = False
    exclusive: bool = False
    auto_delete: bool = False
    #: Arguments as 0-9-1 names them. A protocol that names them otherwise sets ``options`` instead.
    arguments: Mapping[str, object] = {}
    #: Options of :class:`amqp_rt.broker.Queue`, by their names.
    options: Mapping[str, object] = {}
    #: Exchange that gets the messages rejected by consumers; empty for none.
    alternate: str = ""
    #: Seconds without consumers after which an auto-delete queue is deleted, and whether only if it is empty.
    auto_delete_s: float = 0.0
    keeps_messages: bool = False
    #: An exclusive queue is free for others when its owner has gone, and an auto-delete one is not deleted
    #: before. By default an exclusive queue is deleted with its owner.
    outlives_owner: bool = False
    #: A queue that exists is found whatever its declaration, unless *alternate* is another one. An
    #: exclusive declaration makes it exclusive, unless it has consumers.
    sticky: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether the queue outlives the process."""
        return self.durable and (self.outlives_owner or not self.exclusive)


class QueueState(Struct, frozen=True, kw_only=True):
    """Current state of a queue: waiting messages and consumers."""

    name: str
    messages: int
    consumers: int
    #: Its declaration; None if it was declared by other means than by peers.
    declared: QueueDeclaration | None = None


class BindingMatch(Struct, frozen=True, kw_only=True):
    """Parts of a binding that exist, of one that a peer asks for."""

    exchange: bool
    queue: bool
    #: Whether some binding of the exchange is one of that queue; whether some is and has that key; and
    #: whether some is, has it, and has those arguments.
    queue_matched: bool = False
    key_matched: bool = False
    arguments_matched: bool = False


class Topology(Protocol):
    """Queues, exchanges and bindings of a virtual host, as one peer sees them on one connection.

    What is exclusive belongs to an owner: the connection, or an anchor that outlives it. For protocols
    whose peers declare them. No method waits. Failures raise :class:`~amqp_rt.errors.AmqpError`:
    ``amqp:not-found``, ``amqp:precondition-failed``, ``amqp:unauthorized-access``, ``amqp:resource-locked``
    for a node exclusive to another connection, ``amqp:not-implemented``,
    ``amqp:resource-limit-exceeded``.
    """

    def declare_queue(self, wanted: QueueDeclaration) -> QueueState:
        """Create a queue, or find an existing one with the same declaration."""

    def queue(self, name: str) -> QueueState:
        """Return the current state of queue *name*."""

    def declaration(self, name: str) -> QueueDeclaration | None:
        """Return how peers declared queue *name*, None if it was declared by other means.

        The work does not depend on its consumers, as that of :meth:`queue` does.
        """

    def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue with its messages and bindings; return the number of its messages."""

    def purge_queue(self, name: str) -> Generator[int, None, None]:
        """Drop the waiting messages of a queue step by step; yield the number dropped so far."""

    def wait_stored(self, queue: str, on_stored: Callable[[], None]) -> bool:
        """Call *on_stored* once messages that are being stored for *queue* have been added to it.

        Return False, without a call, if there are none.
        """

    def declare_exchange(
        self,
        wanted: Exchange,
        *,
        sticky: bool = False,
        name_max: int = 127,
        free_name: bool = False,
    ) -> None:
        """Create an exchange, or find an existing one with the same declaration.

        With *sticky* one that exists is found whatever its declaration, unless its type, or the alternate
        exchange if *wanted* has one, is another (``amqp:not-allowed``). A new one, of a name of up to
        *name_max* octets, is then created only if its alternate exchange exists. A *free_name* has any
        characters but control characters.
        """

    def exchange(self, name: str) -> Exchange:
        """Return the declaration of exchange *name*."""

    def delete_exchange(
        self, name: str, *, if_unused: bool = False, unless_alternate: bool = False
    ) -> None:
        """Delete an exchange with its bindings.

        With *unless_alternate* not the alternate of a queue or of another exchange (``amqp:not-allowed``).
        """

    def bind_queue(
        self,
        name: str,
        exchange: str,
        key: str,
        arguments: Mapping[str, object],
        *,
        once: bool = False,
        scoped: bool = False,
    ) -> None:
        """Bind queue *name* to *exchange*.

        With *once* nothing is added if a binding of the queue has that key. A new binding that is
        *scoped* ends with the owner, and is not stored.
        """

    def bind_alone(
        self,
        name: str,
        exchange: str,
        key: str,
        arguments: Mapping[str, object],
        *,
        scoped: bool = False,
    ) -> Generator[int, None, None]:
        """Bind queue *name* once to *exchange*; other queues lose their bindings of that key.

        There may be very many: the generator yields their number in its last step. One refusal is that of all.
        """

    def unbind_queue(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> bool:
        """Remove the binding of queue *name* to *exchange*; return whether it existed."""

    def unbind_key(self, name: str, exchange: str, key: str) -> Generator[int, None, bool]:
        """Remove all bindings of queue *name* to *exchange* that have *key*; return whether there were any.

        There may be very many: the generator yields their number in its last step. Those that are added
        meanwhile stay.
        """

    def bound(
        self,
        exchange: str,
        queue: str | None = None,
        key: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> BindingMatch:
        """Return what there is of such a binding of *exchange*; what is None matches any."""

    def arguments_of(
        self, exchange: str, name: str, key: str, *, is_exchange: bool = False
    ) -> list[dict[str, object]]:
        """Return the arguments of each binding with *key* of queue *name* to *exchange*, or of exchange *name*.

        Any right at each of both is enough. More than ``bindings_listed_max`` are an error.
        """

    def bind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Bind exchange *name* to *exchange*."""

    def unbind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Remove the binding of exchange *name* to *exchange*, if it exists."""

    def routing(
        self,
        exchange: str,
        keys: Sequence[str],
        headers: Mapping[str, object],
        found: dict[str, None],
        *,
        alternate: bool = True,
        chained: bool = True,
    ) -> Generator[int, None, None]:
        """Add to *found* the queues to which a named exchange routes a message with *keys*.

        Without *alternate*, a message that it cannot route does not go to its alternate exchange; unless
        *chained*, an alternate exchange that cannot route the message drops it. The generator yields the
        work done since its last step, in frames, so that a front can continue it in a later turn.
        """

    def deletions(self) -> AbstractContextManager[Container[str]]:
        """Collect the names of queues that are deleted within the block.

        Between two turns of a message a queue to which it is routed may be deleted, and declared
        again without the binding that led there.
        """

    def inlet(
        self, queue: str, link: ReceivingLink, *, routed: bool
    ) -> ReceivingEndpoint | Error | None:
        """Return an endpoint that adds deliveries of *link* to *queue*; *link* needs no credit.

        None if there is no such queue, or if the right to send can only be checked when a link
        attaches; an error if the peer may not send there. That right is not checked for messages
        *routed* by an exchange.
        """

    def count_message(self, exchange: str, argument: str) -> int:
        """Return the number of one more message of *exchange*, from 1; 0 if its *argument* is not true."""

    def remembers(self, exchange: str) -> bool:
        """Return whether *exchange* remembers the last message published to it (``qpid.ive``)."""

    def remember(
        self, exchange: str, keys: Sequence[str], headers: Mapping[str, object], payload: bytes
    ) -> None:
        """Remember a message, in the format of 1.0, as the last one published to *exchange*.

        It was sent with these routing keys and headers, may be routed to no queue, and belongs to no
        transaction. A new binding of a queue that matches it gets it.
        """

    def is_ready(self, queue: str) -> bool:
        """Return whether a consumer of *queue* has credit and room for a message."""

    def wall(self) -> float:
        """Return the time by which messages expire, in seconds since 1970."""

    def scarce(self, on_room: Callable[[], None]) -> bool:
        """Return whether memory is scarce, so that the peer should stop sending.

        *on_room* is called once memory is no longer scarce.
        """

    def idle(self, queue: str) -> None:
        """Note that a consumer takes no more messages, though its link stays for unsettled ones.

        An auto-delete queue is deleted with its last consumer.
        """

    def claim(self, queue: str, link: object, copies: Sequence[D]) -> list[D]:
        """Acquire messages of which *link*, with distribution-mode *copy*, has sent *copies* from *queue*.

        Returns the copies of those that could be acquired: unsettled deliveries from now on, whose outcomes
        go to the endpoint of *link*. The front keeps them among its unsettled ones. Others are unchanged.
        """

    def moved(self, peer: Peer) -> None:
        """Use the rights of *peer* from now on: the owner has moved to its connection.

        Raises:
            ValueError: It is another user, or in another virtual host.
        """

    def close(self) -> None:
        """Delete the owner's exclusive nodes when it has ended, or free those that outlive it."""


class ServerOptions(Struct, kw_only=True):
    """Options that a listener passes to its engines."""

    container_id: str
    limits: Limits = DEFAULT_LIMITS
    #: SASL mechanisms to offer, strongest first; empty with ``sasl_required=False`` means that a
    #: client may open without SASL.
    mechanisms: tuple[str, ...] = ("ANONYMOUS",)
    sasl_required: bool = True
    address: str = ""
    offered_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] = {}
    #: Returns the highest number of a session's channel for a peer, called when it has opened and before we do;
    #: None for that of the limits. Fronts whose protocol agrees on channels before the login ignore it.
    channel_max_for: Callable[[Peer], int] | None = None
    #: Returns the topology that the peer of a connection may change, called once its virtual host
    #: is known; None if nothing can be declared.
    topology: Callable[[Peer, LinkConnection], Topology] | None = None
    #: Returns the branches of distributed transactions that the peer of a session may use, likewise.
    branches: Callable[[Peer, LinkConnection], TransactionBranches] | None = None
    #: Answer a link with the address that its peer asked for, not with the one that it was mapped to.
    echo_addresses: bool = False
    #: Write errors with all fields of the standard (Part 2 §2.8.14), an absent ``info`` as an empty map,
    #: for clients that read fields by their positions.
    whole_errors: bool = False
    #: Write performatives with all fields of the standard (Part 2 §2.7), absent ones as nulls, for such
    #: clients.
    whole_frames: bool = False


class Front(Protocol):
    """Protocol that listeners can accept."""

    name: str
    #: The protocol headers that this front answers: of eight octets in AMQP, otherwise first octets of any
    #: number, such as ``b"GET /"``. None may be the beginning of another front's.
    headers: tuple[bytes, ...]
    #: Protocol header sent in reply to a client whose own header no front answers, if it resembles
    #: that more than those of other fronts.
    preferred_header: bytes

    def server(self, options: ServerOptions, now: float) -> ServerEngine:
        """Create an engine for a client's connection; its input begins with the header."""


@runtime_checkable
class LastingFront(Front, Protocol):
    """Front that holds state without a connection, such as sessions that wait for their client.

    A container calls it from the front's first connection on. A front of this kind belongs to one
    running container.
    """

    #: Called when ``deadline`` has become earlier. The container sets it.
    on_deadline: Callable[[], None]

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` has to be called, in the clock of ``server``; ``inf`` for never."""

    def tick(self, now: float) -> None:
        """Handle what is due at *now*, such as the end of sessions.

        Work that would take long is divided: a deadline that is not after *now* gets another call, after
        other tasks. Not called any more when the container has begun to stop.
        """

    def close(self) -> None:
        """End all state: the container stops, and all connections have ended.

        The front may serve another container afterwards.
        """


class Host(Protocol):
    """Collection of addresses: an application's routes, a broker, management."""

    @property
    def capabilities(self) -> Sequence[str]:
        """Capabilities that this host adds to those offered on connections (Part 2 §2.7.1)."""

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*, now or later; return False if the address is not ours."""

    def kept_source(self, link: SendingLink) -> Source | None:
        """Return the source kept for *link*, whose peer gives none; None if none is kept.

        An example is a durable subscription (Part 3 §3.5.5).
        """

    def kept_terminus(self, link: ReceivingLink | SendingLink) -> Source | Target | None:
        """Return the terminus that *link* would resume or end; None if there is none.

        The terminus is one that is kept for links of this name, for any user.
        """

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to *address* on *link*, which has an anonymous terminus.

        The endpoint's ``deliver`` is called with the link's deliveries and must not touch its
        credit. None if the address is not ours, an error if access is refused.
        """

    def hold_post(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Let the discharge of the transaction that *delivery* is posted in, if it is one of this host,
        wait for *delivery*, which cannot be handed over yet; :meth:`release_post` follows."""

    def release_post(self, delivery: IncomingDelivery) -> None:
        """End the wait for *delivery*, which was handed over or refused."""

    def refuse_post(
        self, link: ReceivingLink, delivery: IncomingDelivery, outcome: Rejected
    ) -> bool:
        """Refuse *delivery* within the transaction that it is posted in; False if it is none of this
        host."""

    def virtual_host(self, hostname: str) -> str | None:
        """Return the name of the virtual host for peers that connect to *hostname* (Part 2 §2.7.1).

        None if there is no such host, and the connection has to be refused.
        """

    def own_name(self, address: str, virtual_host: str) -> str:
        """Return the name under which rights at *address* are granted.

        For an alias this is the name of its node; otherwise it is *address* itself.
        """

    def is_dynamic(self, address: str, virtual_host: str) -> bool:
        """Return whether *address* was created for a link (Part 3 §3.5.3 ``dynamic``).

        Such an address cannot be guessed: peers that know it may send replies there without a right
        of their own.
        """


__all__ = [
    "ALTERNATE",
    "RCV_FIRST",
    "RCV_SECOND",
    "RECEIVER",
    "SENDER",
    "SND_MIXED",
    "SND_SETTLED",
    "SND_UNSETTLED",
    "BindingMatch",
    "Exchange",
    "Front",
    "Host",
    "IncomingDelivery",
    "LastingFront",
    "Link",
    "Outcome",
    "OutgoingDelivery",
    "Payload",
    "ProtocolEngine",
    "QueueDeclaration",
    "QueueState",
    "ReceivingEndpoint",
    "ReceivingLink",
    "SendingEndpoint",
    "SendingLink",
    "ServerEngine",
    "ServerOptions",
    "Topology",
    "Unsettled",
    "UnsettledMap",
]
