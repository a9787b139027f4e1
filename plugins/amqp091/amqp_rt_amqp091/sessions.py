"""Session of a channel: its links, its end, and what its parts need of the connection.

The parts of a channel, such as its consumers or its transactions, refer to the session and to each
other, but never to the channel, which owns them: only the session does, until it ends. Otherwise
reference cycles would keep a channel, and its connection, alive until a full collection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from amqp_rt.fronts import AttachRequested, Event, Limits, Peer, Rejected, Topology

from . import methods as m
from .faults import Fault
from .recent import Recents

if TYPE_CHECKING:
    from amqp_rt.fronts.deliveries import FrontDelivery
    from amqp_rt.fronts.links import FrontLink, FrontReceivingLink

    from .contents import BaseChannel
    from .links import SendingLink, Way
    from .outgoing import OutgoingDelivery

#: Passes the outcomes of deliveries to the endpoint of their link.
Conclude: TypeAlias = "Callable[[SendingLink, list[OutgoingDelivery]], None]"
#: Conditions of rejections that the publisher, or the configuration of the broker, could avoid.
_MENDABLE: Final = frozenset(("amqp:precondition-failed", "amqp:unauthorized-access"))


class ServerConnection(Protocol):
    """Connection that a client opened, as far as the parts of its channels use it."""

    #: The method being handled, which a close for its fault has to name.
    context: m.Method | None
    #: Cost of the current frame in frames, beyond one.
    spent: int
    #: Messages sent to consumers in this turn.
    given: int
    #: Consumers that have credit but no room in the output, or in this turn.
    thirsty: dict[SendingLink, None]
    #: Inlets found within this chunk, by channel, method and properties.
    ways: dict[tuple[int, bytes, bytes], list[Way]]
    #: Functions that are called when the connection ends, by the objects that follow it.
    followers: dict[object, Callable[[], None]]

    @property
    def over(self) -> bool: ...

    @property
    def peer(self) -> Peer: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def topology(self) -> Topology | None: ...

    @property
    def recents(self) -> Recents: ...

    @property
    def frame_max_out(self) -> int: ...

    @property
    def output_size(self) -> int: ...

    @property
    def hears_cancel(self) -> bool: ...

    def write(self, channel: int, method: m.Method) -> None:
        """Send a method."""

    def write_content(
        self, channel: int, method: m.Method, properties: m.BasicProperties, body: bytes
    ) -> None:
        """Send a method with its content."""

    def write_octets(self, data: bytes) -> None:
        """Send encoded frames."""

    def report(self, event: Event) -> None:
        """Queue an event for the owner of the connection."""

    def next_name(self) -> int:
        """Return a number unique to one link of the connection."""

    def hold(self, size: int) -> None:
        """Count *size* octets more that a channel holds."""

    def let_go(self, size: int) -> None:
        """Subtract *size* octets no longer held."""

    def spend(self, work: int) -> None:
        """Add *work*, in frames, to the cost of the current frame."""

    def schedule(self, step: Callable[[], None]) -> None:
        """Call *step* soon, in the next call of the driver."""

    def work_later(self, step: Callable[[], None]) -> None:
        """Call *step* in the next ``receive``, after other connections."""

    def confirm_later(self, flush: Callable[[], None]) -> None:
        """Call *flush*, which sends confirms, with the next output."""

    def post(self, way: Any, link: FrontReceivingLink, delivery: FrontDelivery) -> None:
        """Queue a message, for inlet *way* or else for *link*, until the end of this chunk."""

    def answer(self, conclude: Conclude, link: SendingLink, delivery: OutgoingDelivery) -> None:
        """Queue a settlement until the end of this chunk, when *conclude* passes it on."""

    def flush(self) -> None:
        """Pass on everything published and settled so far."""

    def guard(self, channel: BaseChannel | None, step: Callable[[], None]) -> None:
        """Run *step*, and answer its fault if it raises one."""

    def fail(self, channel: BaseChannel | None, fault: Fault, method: m.Method | None) -> None:
        """Close *channel*, or the connection if the fault demands it."""


class Session:
    """A channel as brokers see it, and as its parts do.

    Args:
        engine: The connection.
        number: The channel number.
        owner: The channel.
    """

    def __init__(self, engine: ServerConnection, number: int, owner: BaseChannel) -> None:
        self.engine = engine
        self.number = number
        #: The channel; None after its end.
        self.owner: BaseChannel | None = owner
        self.ended = False
        self.links: set[FrontLink] = set()
        #: Functions to call when the channel has ended, by the object that waits for that.
        self.followers: dict[object, Callable[[], None]] = {}

    def write(self, method: m.Method) -> None:
        """Send a method."""
        self.engine.write(self.number, method)

    def fail(self, fault: Fault, method: m.Method) -> None:
        """Close the channel, or the connection if the fault demands it, unless it has ended."""
        if self.owner is not None:
            self.engine.fail(self.owner, fault, method)

    def report_refusal(self, outcome: Rejected) -> None:
        """Close the channel if a message without confirms was rejected for a fault of its publisher.

        The standard wants a message that is unroutable, or finds no room, to be dropped; the inlet
        has logged that. A fault that the publisher can correct must reach it, and a channel
        exception is the only way.
        """
        error = outcome.error
        if error is not None and str(error.condition) in _MENDABLE:
            self.fail(Fault.of(error), m.BasicPublish())

    def link_name(self, purpose: str) -> str:
        """Return a name for a link, unique on the connection."""
        return f"{self.number}-{purpose}-{self.engine.next_name()}"

    def request(self, link: FrontLink) -> None:
        """Request the attach of *link*."""
        self.links.add(link)
        self.engine.report(AttachRequested(link))

    def drop(self, link: FrontLink) -> None:
        """End *link*, which is not needed any more."""
        self.links.discard(link)
        link.end(None, True)

    def end_links(self) -> None:
        """End all links; their unsettled deliveries go back to the queues (§4.5)."""
        for link in list(self.links):
            link.end(None, True)
        # Each of them refers to the session.
        self.links.clear()

    def end(self) -> None:
        """End the session after its links and all other parts of the channel."""
        self.ended = True
        self.owner = None
        followers, self.followers = self.followers, {}
        for follower in followers.values():
            follower()
