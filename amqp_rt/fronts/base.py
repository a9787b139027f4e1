"""What a protocol must provide, and what the rest of the program provides to it.

A *front* recognises protocol headers and makes *engines*. An engine turns bytes into
events and calls into bytes; it does no I/O. Whatever the wire, the program sees links:
a :class:`SendingLink` carries messages from us to the peer, a :class:`ReceivingLink`
from the peer to us. An *endpoint* is bound to a link when it attaches and hears what
happens on it, a batch per chunk of input.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias

from msgspec import Struct

from ..events import Event, Peer
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error, Outcome
from ..termini import Coordinator, Source, Target
from ..unsettled import Unsettled, UnsettledMap

#: An encoded AMQP 1.0 message, whole or as pieces in order. Pieces are never joined
#: when they are large; they go to the socket as they are.
Payload: TypeAlias = bytes | Sequence[bytes]

#: ``role`` (Part 2 §2.8.1).
SENDER, RECEIVER = False, True
#: ``snd-settle-mode`` (Part 2 §2.8.2).
SND_UNSETTLED, SND_SETTLED, SND_MIXED = 0, 1, 2
#: ``rcv-settle-mode`` (Part 2 §2.8.3).
RCV_FIRST, RCV_SECOND = 0, 1


class IncomingDelivery(Protocol):
    """A message on its way from the peer to us."""

    link: ReceivingLink
    tag: bytes
    message_format: int
    #: The sender has settled: no outcome will be heard.
    settled: bool
    #: We settle after the sender (``rcv-settle-mode`` second).
    second: bool
    #: The state that the sender attached, for example a transactional state.
    state: Any
    #: What we said of it.
    local_state: Any
    #: The encoded message, complete once ``complete`` is true. On a streaming link use
    #: ``read_chunks`` instead.
    payload: bytes
    complete: bool
    aborted: bool
    #: It is streamed although its link is not, because it is large.
    streamed: bool
    #: Free for the endpoint.
    context: Any

    def read_chunks(self) -> list[bytes]:
        """What has arrived since the last call; taking it reopens the session window."""

    def settle(self, outcome: Any) -> None:
        """Say *outcome*; settled at once, or after the sender where it settles second."""

    def update(self, state: Any) -> None:
        """Say *state* without settling (Part 2 §2.6.12)."""


class OutgoingDelivery(Protocol):
    """A message on its way from us to the peer."""

    link: SendingLink
    #: -1 until its first frame has left: the peer cannot know of it then.
    delivery_id: int
    tag: bytes
    #: We have settled it: nothing more will be heard.
    settled: bool
    #: The peer's latest state; an outcome once it is terminal.
    state: Any
    #: The peer has settled.
    remote_settled: bool
    #: Free for the endpoint.
    context: Any

    def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a further piece of a streamed message; ``more=False`` ends it."""

    def abort(self) -> None:
        """Give up an unfinished message (Part 2 §2.7.5 ``aborted``)."""

    def settle(self, state: Any = None) -> None:
        """Forget it, and tell the peer if it has not settled itself."""


class Link(Protocol):
    """What both directions have in common. Values before ``accept`` are the peer's."""

    name: str
    #: Ours: ``SENDER`` or ``RECEIVER``.
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
    #: Both sides are attached.
    attached: bool
    #: The protocol's session object, the same for links of one session, and its connection. Whether
    #: they are over, ``session.ended`` and ``connection.over`` say; what is put into ``followers`` of
    #: either is called when it is, after its links have heard so.
    session: Any
    connection: Any
    #: Deliveries that were unsettled when the link ended: to be looked at in ``on_detached``.
    unsettled: list[Any]
    #: What the peer remembers of a link of this name, until both sides are attached; None if
    #: nothing.
    remote_unsettled: Mapping[bytes, Any] | None
    #: There is more of it, which did not fit the peer's frame.
    remote_incomplete: bool
    #: Both sides have attached with an unsettled map: the link goes on where one before it ended
    #: (Part 2 §2.6.13).
    resumed: bool
    #: What was handed to the attach and the peer has no record of. On a link that sends it is to be
    #: sent anew, if at all; on one that receives it counts as settled. If the link was not
    #: resumed, that the peer does not know it means nothing.
    unknown: list[Unsettled]
    #: A map did not fit its frame: nothing new can be sent on this link. It is suspended when all
    #: that can be resumed has been, and has to be attached again then.
    incomplete: bool
    #: Free for the owner.
    context: Any

    def refuse(self, error: Error) -> None:
        """Answer an attach request with a null terminus, then detach (Part 2 §2.6.3)."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Say detach. Nothing may be sent on the link afterwards; saying it twice is the same
        as once. The endpoint hears ``on_detached`` when the peer has answered."""

    def end(self, error: Error | None, closed: bool) -> None:
        """Be over at once, and let the endpoint hear it: for a link that another one takes over,
        whose peer may never answer a detach. Nothing is said."""

    def remember(self) -> UnsettledMap:
        """What the link leaves unsettled, once it is over: hand it to the next attach.

        What a link has sent is without its payload: put it in, or it cannot be sent again. What
        had not left (``delivery_id`` -1) and unfinished messages are not in it.
        """


class ReceivingLink(Link, Protocol):
    """A link on which the peer sends to us."""

    #: Deliveries that the peer may still send.
    credit: int
    #: Deliveries that the peer said it could send at once, by its last flow.
    available: int
    #: Messages that are larger are streamed although the others are not, 0 for none; and whether
    #: there have been any.
    stream_above: int
    has_streamed: bool

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
        """Attach our side. Omitted termini are answered as the peer asked for them.

        Messages of more than *stream_above* bytes are streamed although the others are not; 0 for
        none. *unsettled* is what an earlier link of this name left; None remembers nothing.
        """

    def grant(self, credit: int, *, properties: Mapping[object, object] | None = None) -> None:
        """Let the peer send *credit* more deliveries, counted from now (Part 2 §2.6.7).

        *properties* go with the flow, such as the ``txn-id`` of an acquisition.
        """

    def drain(self) -> None:
        """Ask the peer to use the credit now or give it back; ``on_flow`` follows."""


class SendingLink(Link, Protocol):
    """A link on which we send to the peer."""

    #: Deliveries that we may still send.
    credit: int
    #: The peer wants the credit used or given back.
    draining: bool
    #: False while the session window or the output buffer is full. ``send`` still works
    #: then, and waits inside; a considerate endpoint waits for ``on_credit`` instead.
    writable: bool
    #: ``properties`` of the latest flow that had some, as far as they are kept: the ``txn-id`` of an
    #: acquisition.
    flow_properties: Mapping[object, object] | None
    # Fronts set the next two; they are attributes and no link properties, which a peer could send.
    #: The link takes no more messages, although some may be unsettled: it is no consumer.
    idle: bool
    #: The peer returns messages by the same outcome as failed ones: redeliver them without a pause.
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
        """Attach our side. Omitted termini are answered as the peer asked for them.

        *unsettled* is what an earlier link of this name left; None remembers nothing.
        """

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: Any = None,
        more: bool = False,
    ) -> OutgoingDelivery:
        """Send one message, or with ``more`` its first piece. Uses one credit.

        Raises:
            LocalProtocolError: No credit, not attached, or another message of this link is
                unfinished. Nothing was sent.
        """

    def drained(self) -> None:
        """Nothing more to send: give back the credit if the peer is draining."""

    def offer(self, available: int) -> None:
        """Tell the peer how many deliveries wait (``available``), with the next flow."""


class ReceivingEndpoint(Protocol):
    """Hears a :class:`ReceivingLink`. Calls come from within the engine: do not block."""

    def on_attached(self, link: ReceivingLink) -> None:
        """Both sides are attached. ``source``, ``target`` and modes are now the agreed ones."""

    def deliver(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Complete messages, in order; on a streaming link messages that have begun."""

    def on_data(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """Streamed messages only: these deliveries have new chunks, ended or were aborted."""

    def on_settled(self, link: ReceivingLink, deliveries: list[Any]) -> None:
        """The sender has settled, or changed the state of, these unsettled deliveries."""

    def on_flow(self, link: ReceivingLink) -> None:
        """The sender spoke of its credit: a drain is answered, or ``available`` changed."""

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """The link is over: detached by either side, or its session or connection ended.

        Called exactly once per accepted or attached link; ``closed`` is false if the peer
        may come back for it. Outcomes that are said from now on are heard by nobody, unless what
        ``link.remember()`` returns is handed to another attach.
        """


class SendingEndpoint(Protocol):
    """Hears a :class:`SendingLink`. Calls come from within the engine: do not block."""

    def on_attached(self, link: SendingLink) -> None:
        """Both sides are attached. ``source``, ``target`` and modes are now the agreed ones."""

    def on_credit(self, link: SendingLink) -> None:
        """There is credit or room again, or the peer drains, or asked for an echo."""

    def on_outcomes(self, link: SendingLink, deliveries: list[Any]) -> None:
        """The peer changed the state of these deliveries, or settled them.

        One that the peer has settled is settled here too by the time this is called.
        """

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """As for receiving endpoints; what the peer never settled is in ``link.unsettled``."""


class ProtocolEngine(Protocol):
    """One connection without its stream."""

    #: Called when there is something to send, or nothing ever again.
    on_output: Callable[[], None]
    #: About how many frames ``receive`` handles before it leaves the rest to its next call, so that
    #: whatever shares the thread gets its turn.
    work_max: int

    @property
    def unread(self) -> bool:
        """``receive`` has left something: call it again, with no more bytes if none came."""

    @property
    def finished(self) -> bool:
        """Nothing more will be said."""

    @property
    def output_size(self) -> int:
        """Bytes waiting in ``take``."""

    @property
    def peer(self) -> Peer:
        """Who is on the other side."""

    @property
    def deadline(self) -> float:
        """When ``tick`` wants to be called, in the clock of ``now``; ``inf`` for never."""

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the peer. Its faults are answered and reported, not raised."""

    def receive_eof(self, now: float) -> list[Event]:
        """The peer's half of the stream has ended."""

    def tick(self, now: float) -> list[Event]:
        """Let time pass: idle timeouts, empty frames, handshake deadline."""

    def take(self) -> list[bytes]:
        """Buffers to send, in order; they belong to the caller now."""

    def close(self, error: Error | None = None) -> None:
        """Say close, in the protocol's own way. ``finished`` follows the peer's answer."""


#: The argument that names an exchange for messages that would go nowhere, and its older spelling.
ALTERNATE: Final = ("alternate-exchange", "alternate_exchange")


class ServerEngine(ProtocolEngine, Protocol):
    """One connection that a client opened, as a container sees it."""

    @property
    def over(self) -> bool:
        """Its links have ended, or do now: no more can be attached."""

    @property
    def sessions(self) -> Mapping[int, Any]:
        """The protocol's session objects, for management: each has its ``channel``, its ``links`` by
        number, and ``end(error)``."""


class Exchange(Struct, frozen=True, kw_only=True):
    """How an exchange is declared (0-9-1 §3.1.3)."""

    name: str
    type: str = "direct"
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, object] = {}

    @property
    def alternate(self) -> str | None:
        """The exchange for what goes nowhere from here."""
        for name in ALTERNATE:
            found = self.arguments.get(name)
            if isinstance(found, str) and found:
                return found
        return None


class QueueDeclaration(Struct, frozen=True, kw_only=True):
    """How a queue is declared by a peer that may (0-9-1 §3.1.3). An empty name asks for a new one."""

    name: str = ""
    durable: bool = False
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, object] = {}


class QueueState(Struct, frozen=True, kw_only=True):
    """A queue as it is: messages that wait, and consumers."""

    name: str
    messages: int
    consumers: int


class Topology(Protocol):
    """Queues, exchanges and bindings of a virtual host, as one peer sees them on one connection.

    For protocols whose peers declare them. Nothing waits here. What cannot be done raises
    :class:`~amqp_rt.errors.AmqpError`: ``amqp:not-found``, ``amqp:precondition-failed``,
    ``amqp:unauthorized-access``, ``amqp:resource-locked`` for what is exclusive to another
    connection, ``amqp:not-implemented``, ``amqp:resource-limit-exceeded``.
    """

    def declare_queue(self, wanted: QueueDeclaration) -> QueueState:
        """Make a queue, or find the equal one that there is."""

    def queue(self, name: str) -> QueueState:
        """The queue *name*, as it is now."""

    def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue with its messages and bindings; how many messages it had."""

    def purge_queue(self, name: str) -> Generator[int, None, None]:
        """Drop what waits in a queue, a step at a time; yields how many messages that were so far."""

    def wait_stored(self, queue: str, on_stored: Callable[[], None]) -> bool:
        """Call *on_stored* once the messages that are being stored for *queue* are in it.

        False, without a call, if there are none.
        """

    def declare_exchange(self, wanted: Exchange) -> None:
        """Make an exchange, or find the equal one that there is."""

    def exchange(self, name: str) -> Exchange:
        """How exchange *name* was declared."""

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange with its bindings."""

    def bind_queue(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Let *exchange* lead to queue *name*."""

    def unbind_queue(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Undo that, if it is so."""

    def bind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Let *exchange* lead to exchange *name*."""

    def unbind_exchange(
        self, name: str, exchange: str, key: str, arguments: Mapping[str, object]
    ) -> None:
        """Undo that, if it is so."""

    def routing(
        self,
        exchange: str,
        keys: Sequence[str],
        headers: Mapping[str, object],
        found: dict[str, None],
    ) -> Generator[int, None, None]:
        """Add to *found* the queues that a message with *keys* for a named exchange goes to.

        The generator yields what its work since then is worth, in frames: a front that has done enough
        in one turn goes on with it in a later one.
        """

    def deletions(self) -> AbstractContextManager[Container[str]]:
        """Collect the names of queues that are deleted within the block.

        Between two turns of a message a queue that it is routed to may be deleted, and declared again
        without the binding that has led there.
        """

    def inlet(
        self, queue: str, link: ReceivingLink, *, routed: bool
    ) -> ReceivingEndpoint | Error | None:
        """The way into a queue: its ``deliver`` takes deliveries of *link*, which needs no credit.

        None if there is no such queue, or it takes a link to send there; an error if the peer may not
        send there itself, which nobody asks of what an exchange has *routed* there.
        """

    def scarce(self, on_room: Callable[[], None]) -> bool:
        """Whether memory is scarce, so that the peer had better send nothing; *on_room* is called once
        it is not any more."""

    def idle(self, queue: str) -> None:
        """A consumer of the peer takes no more messages, though its link is there for those in hand."""

    def close(self) -> None:
        """The connection is over: what it had for itself goes with it."""


class ServerOptions(Struct, kw_only=True):
    """What a listener tells the engines it makes."""

    container_id: str
    limits: Limits = DEFAULT_LIMITS
    #: SASL mechanisms to offer, strongest first; empty with ``sasl_required=False`` means
    #: that a client may open without SASL.
    mechanisms: tuple[str, ...] = ("ANONYMOUS",)
    sasl_required: bool = True
    address: str = ""
    offered_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] = {}
    #: What a peer on a connection may declare, asked once its virtual host is known; None if nothing
    #: can be declared.
    topology: Callable[[Peer, Any], Topology] | None = None


class Front(Protocol):
    """A protocol that listeners can speak."""

    name: str
    #: The eight-byte protocol headers it answers to.
    headers: tuple[bytes, ...]
    #: What a client with a header nobody answers to is told to use.
    preferred_header: bytes

    def server(self, options: ServerOptions, now: float) -> ServerEngine:
        """An engine for a connection that a client opened; it gets the header bytes too."""


class TraceMask(Protocol):
    """One direction of a traced connection without its secrets."""

    def feed(self, data: bytes) -> bytes:
        """*data* as it may be shown; what is not whole yet may be held back."""

    def rest(self) -> bytes:
        """Return the masked rest that was held back when the connection ended."""


class TracedFrame(Struct, frozen=True):
    """One frame as a drawing of a trace names it."""

    name: str
    channel: int
    #: Octets of its payload.
    size: int
    #: Why it is malformed; empty if it is not.
    fault: str = ""


class TraceReader(Protocol):
    """Cuts one direction of a traced connection into frames."""

    #: Octets of a frame that is not whole yet.
    held: bytes

    def feed(self, data: bytes) -> list[TracedFrame]:
        """The frames that are whole now. What cannot be read is a frame with a ``fault``."""


class Tracing(Protocol):
    """Masks and readers for traces of one protocol. Both get what follows the client's protocol header."""

    def mask(self, *, client: bool) -> TraceMask:
        """A mask for what the client, or the server, writes."""

    def reader(self) -> TraceReader:
        """A reader of one direction."""


#: Protocol header → how its connections are traced. Plug-ins register theirs when they are imported:
#: of other protocols only sizes are kept, since it is not known where their secrets are.
TRACINGS: Final[dict[bytes, Tracing]] = {}


class Host(Protocol):
    """A collection of addresses: an application's routes, a broker, management."""

    @property
    def capabilities(self) -> Sequence[str]:
        """What it adds to the offered capabilities of connections (Part 2 §2.7.1)."""

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept or refuse *link*, now or later, and return True; False if the address is not ours."""

    def recall(self, link: SendingLink) -> Source | None:
        """The source that is kept for *link*, whose peer names none, such as that of a durable
        subscription (Part 3 §3.5.5); None if there is none."""

    def takes_over(self, link: ReceivingLink | SendingLink) -> Source | Target | None:
        """The terminus that is kept for links of the name of *link*, whatever their user, and that
        *link* would go on with or end; None if there is none."""

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Where messages of the anonymous terminus *link* for *address* go.

        The endpoint's ``deliver`` is called with the link's deliveries and must not touch
        its credit. None if the address is not ours, an error if it refuses.
        """

    def virtual_host(self, hostname: str) -> str | None:
        """The name of the virtual host that peers get who say *hostname* (Part 2 §2.7.1); None if
        there is no such host, and the connection is to be refused."""

    def own_name(self, address: str, virtual_host: str) -> str:
        """The name by which rights at *address* are given, such as that of the node which it is an
        alias of; *address* itself otherwise."""

    def is_dynamic(self, address: str, virtual_host: str) -> bool:
        """Whether *address* was made for a link, and nobody can guess it: who knows it may answer
        there without a right of its own (Part 3 §3.5.3 ``dynamic``)."""


__all__ = [
    "ALTERNATE",
    "RCV_FIRST",
    "RCV_SECOND",
    "RECEIVER",
    "SENDER",
    "SND_MIXED",
    "SND_SETTLED",
    "SND_UNSETTLED",
    "TRACINGS",
    "Exchange",
    "Front",
    "Host",
    "IncomingDelivery",
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
    "TraceMask",
    "TraceReader",
    "TracedFrame",
    "Tracing",
    "Unsettled",
    "UnsettledMap",
]
