"""Parts of engines of protocols with channels: output, events, octets held, and logins (:mod:`amqp_rt.fronts.base`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from ..errors import AmqpError
from ..events import Event, Peer
from ..limits import Limits
from .deliveries import FrontDelivery
from .links import FrontReceivingLink

__all__ = ["BareEngine", "GatheringEngine", "LoginEngine", "LoginExchange"]

#: Sending link of a protocol, and a delivery that it has sent.
LinkT = TypeVar("LinkT")
DeliveryT = TypeVar("DeliveryT")

#: Default bound on frames handled in a row: none.
_WORK_MAX: Final = 1 << 30


class BareEngine:
    """A connection without its stream, as far as no protocol matters; the base of engines.

    Subclasses write with :meth:`write_data` and report events with :meth:`report`. Within a call of the
    driver they set ``_receiving``, and return what :meth:`_done` returns.

    Args:
        limits: Bounds on resources that the peer may use.
        peer: The peer, as far as it is known.
        now: The time, in seconds of the clock that all later calls use.
    """

    def __init__(self, limits: Limits, peer: Peer, now: float) -> None:
        self.limits = limits
        self.peer = peer
        self.on_output: Callable[[], None] = _nothing
        #: Bound on the frames of one call of ``receive``, and whether the last call left some.
        self.work_max = _WORK_MAX
        self.unread = False
        #: Whether as much input is in hand as may be.
        self.congested = False
        #: Whether the channels have ended.
        self.over = False
        self.followers: dict[object, Callable[[], None]] = {}
        self.output_size = 0
        #: Octets held for all channels together.
        self.held = 0
        #: Cost of the present input in frames, beyond their number.
        self.spent = 0
        self._output: list[bytes] = []
        self._signalled = False
        #: Whether the driver is calling: it takes the output after that, without a signal.
        self._receiving = False
        self._events: list[Event] = []
        #: Time of the latest call, and of the latest output that was taken.
        self._now = self._said_at = now

    # --- called by the driver ------------------------------------------------------------

    def take(self) -> list[bytes]:
        """Return the buffers to send."""
        self._before_take()
        output, self._output = self._output, []
        self.output_size = 0
        self._signalled = False
        if output:
            self._said_at = self._now
        return output

    # --- hooks ---------------------------------------------------------------------------

    def _before_take(self) -> None:
        """Write output that was put off."""

    def flush(self) -> None:
        """Pass on everything put off, before anything else happens."""

    def _confirm(self) -> None:
        """Send the confirms that are due."""

    # --- called by subclasses and channels -----------------------------------------------

    def write_data(self, data: bytes) -> None:
        """Add *data* to the output."""
        self._output.append(data)
        self.output_size += len(data)
        if not self._receiving:
            self._wake()

    def _wake(self) -> None:
        if not self._signalled and not self._receiving:
            self._signalled = True
            self.on_output()

    def _done(self) -> list[Event]:
        """End a call of the driver; return the events reported within it."""
        self.flush()
        self._confirm()
        self._receiving = False
        if self._output and not self._signalled:
            self._wake()
        events, self._events = self._events, []
        return events

    def report(self, event: Event) -> None:
        """Queue an event for the owner of the connection."""
        self._events.append(event)

    def hold(self, size: int) -> None:
        """Count *size* octets more that a channel holds: incomplete content, or held frames.

        Raises:
            AmqpError: All channels together hold too many (``amqp:resource-limit-exceeded``).
        """
        self.held += size
        most = max(self.limits.session_window_bytes, 2 * self.limits.message_size_max)
        if self.held > most:
            raise AmqpError(
                f"the channels have more than {most} octets of incomplete messages",
                condition="amqp:resource-limit-exceeded",
            )

    def let_go(self, size: int) -> None:
        """Subtract *size* octets no longer held."""
        self.held -= size

    def spend(self, work: int) -> None:
        """Add *work*, in frames, to the cost of the present input (see ``work_max``)."""
        self.spent += work

    def _notify_followers(self) -> None:
        """Call the functions that follow the connection, which has ended."""
        followers, self.followers = self.followers, {}
        for follower in followers.values():
            follower()


class GatheringEngine(BareEngine, Generic[LinkT, DeliveryT]):
    """A connection that a client opened: gathers what it publishes and settles, until the end of each chunk.

    Queues and exchanges get the messages of a chunk in one call, and endpoints its outcomes, which
    :meth:`flush` passes on.
    """

    def __init__(self, limits: Limits, peer: Peer, now: float) -> None:
        super().__init__(limits, peer, now)
        #: Routes found within this chunk, by what they follow from.
        self.ways: dict[tuple[Any, ...], Any] = {}
        #: Messages published within this chunk, by inlet and link.
        self._posts: dict[tuple[int, FrontReceivingLink], tuple[Any, list[FrontDelivery]]] = {}
        #: Whether messages have been passed on; subclasses that follow it set it back.
        self._posted = False
        #: Deliveries settled within this chunk, by link, after what passes them on.
        self._answered: dict[
            LinkT, tuple[Callable[[LinkT, list[DeliveryT]], None], list[DeliveryT]]
        ] = {}
        #: Steps for the next call of the driver, and those for a later turn.
        self._scheduled: dict[Callable[[], None], None] = {}
        self._working: dict[Callable[[], None], None] = {}

    def schedule(self, step: Callable[[], None]) -> None:
        """Call *step* soon, in the next call of the driver."""
        self._scheduled[step] = None
        self._wake()

    def work_later(self, step: Callable[[], None]) -> None:
        """Call *step* in the next ``receive``, after other connections."""
        self._working[step] = None
        self.unread = True
        self._wake()

    def post(self, way: Any, link: FrontReceivingLink, delivery: FrontDelivery) -> None:
        """Queue a message, for inlet *way* or else for *link*, until the end of this chunk."""
        key = (id(way), link)
        found = self._posts.get(key)
        if found is None:
            self._posts[key] = (way, [delivery])
        else:
            found[1].append(delivery)

    def answer(
        self,
        conclude: Callable[[LinkT, list[DeliveryT]], None],
        link: LinkT,
        delivery: DeliveryT,
    ) -> None:
        """Queue a settlement until the end of this chunk, when *conclude* passes it on."""
        found = self._answered.get(link)
        if found is None:
            self._answered[link] = (conclude, [delivery])
        else:
            found[1].append(delivery)

    def flush(self) -> None:
        """Pass on everything published and settled so far, before anything else happens."""
        if self.ways:
            self.ways.clear()
        while self._answered:
            answered, self._answered = self._answered, {}
            for sender, (conclude, deliveries) in answered.items():
                conclude(sender, deliveries)
        while self._posts:
            posts, self._posts = self._posts, {}
            self._posted = True
            for (_, link), (way, posted) in posts.items():
                if way is None:
                    link.put(posted)
                else:
                    way.deliver(link, posted)


class LoginEngine(Protocol):
    """Engine of a server that a client logs in to."""

    def login_challenged(self, data: bytes) -> list[Event]:
        """Send a challenge of the mechanism."""

    def login_succeeded(self, user: str | None, identity: Any, mechanism: str) -> list[Event]:
        """Accept the login as *user*, None for an anonymous one."""

    def login_failed(self) -> None:
        """Refuse the login."""


class LoginExchange:
    """A login that waits for the application's answer (:class:`amqp_rt.fronts.LoginRequested`)."""

    def __init__(self, engine: LoginEngine, mechanism: str) -> None:
        self.mechanism = mechanism
        #: Why the login can only fail; empty if it may succeed.
        self.refused = ""
        self._engine = engine

    def challenge(self, data: bytes) -> list[Event]:
        """Send a challenge of the mechanism to the client."""
        return self._engine.login_challenged(data)

    def succeed(
        self, user: str | None, identity: Any = None, data: bytes | None = None
    ) -> list[Event]:
        """Accept the login as *user*."""
        return self._engine.login_succeeded(user, identity, self.mechanism)

    def fail(self) -> None:
        """Refuse the login."""
        self._engine.login_failed()


def _nothing() -> None:
    """Ignore output: no owner is set yet."""
