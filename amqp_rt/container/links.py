"""What a sender and a receiver have in common: a link that attaches, is lost, comes back, ends.

The application holds a :class:`LinkHandle` for as long as it likes. The engine's link behind it
comes and goes with the connection; the :class:`~amqp_rt.container.connections.Session` that the
handle is a member of says when.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeVar

import trio

from ..errors import AmqpError, LinkDetached, LinkEnded, LinkRefused
from ..limits import Limits
from ..outcomes import Error
from ..termini import outlives_connection
from ..unsettled import UnsettledMap

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("amqp_rt.connections")

E = TypeVar("E", bound=AmqpError)

#: Seconds that a peer has to answer our detach before we go on without the answer.
DETACH_GRACE_S: Final = 5.0
#: Times in a row that a link is attached again because its unsettled map did not fit a frame, without
#: that making it smaller.
ROUNDS_MAX: Final = 16
#: Redirects that one link follows in a row, and the seconds after which it is another row.
REDIRECTS_MAX: Final = 5
REDIRECTS_FORGOTTEN_S: Final = 60.0

#: Detaching with one of these, a peer may take the same link again, such as after maintenance. Any other
#: condition, such as *not-found* or *unauthorized-access*, would only be said again.
PASSING_CONDITIONS: Final = frozenset({"amqp:link:detach-forced", "amqp:connection:forced"})

#: ``waiting`` for a connection, ``attaching``, ``attached``, ``detaching``, ``over``.
Stage = Literal["waiting", "attaching", "attached", "detaching", "over"]


def fresh(error: E) -> E:
    """A copy of *error* to raise.

    Many tasks hear of one loss. Were they to raise one object, each would add its own traceback to
    everybody's.
    """
    copy = type(error)(error.description, condition=error.condition, info=error.info)
    copy.__cause__ = error.__cause__
    return copy


def gone(kind: type[E], error: Error | None, address: object) -> E:
    """The exception for a link that the peer ended, or would not attach."""
    where = "the anonymous terminus" if address is None else repr(address)
    if error is None:
        return kind(f"the peer detached the link to {where}")
    why = error.description or "the peer ended the link"
    return kind(
        # Most peers name the address themselves.
        why if where in why else f"{where}: {why}",
        condition=str(error.condition),
        info=error.info,
    )


def is_passing(error: Error | None, closed: bool) -> bool:
    """Whether a peer that detaches like this may take the same link again."""
    if error is None:
        # It is suspended (Part 2 §2.6.5).
        return not closed
    return error.condition in PASSING_CONDITIONS


class Owner(Protocol):
    """Whose member a link is: a session of a connection, or the handler of a link of the peer's."""

    @property
    def going(self) -> bool:
        """It ends: links that go now go with it, and it says what becomes of them."""

    @property
    def may_come_back(self) -> bool:
        """Another one will take its place: the link is attached again then."""

    @property
    def limits(self) -> Limits:
        """The bounds of the connection."""

    def add(self, member: Any) -> None:
        """A link joins: it attaches now, or when there is a connection again."""

    def remove(self, member: Any) -> None:
        """A link has closed, or was detached for good."""

    def follow(self, member: Any, error: Error) -> bool:
        """Take a link where a redirect points; whether that is tried."""

    def returns(self, member: Any, error: AmqpError, *, ended: bool) -> bool:
        """Attach a link again that its peer has detached; whether that is tried.

        Args:
            member: The link.
            error: Why; if it comes to nothing, the member hears this.
            ended: The peer gave no error. The link is attached again only if its connection closes
                within the next moment, too: stopping peers detach all links first.
        """


class LinkHandle:
    """A link of ours as the application sees it, over however many connections in a row.

    Args:
        session: Whose member it is.
        address: Where it leads; None where the peer makes the address, or there is none.
        name: The link's name (Part 2 §2.6.1).
    """

    def __init__(self, session: Owner, address: str | None, name: str) -> None:
        self.name = name
        #: The agreed address: as asked for, or as the peer made it.
        self.address = address
        self._session = session
        self._raw: Any = None
        self._stage: Stage = "waiting"
        self._was_attached = False
        self._error: AmqpError | None = None
        #: Tasks that wait for the stage, or for whatever else a subclass announces.
        self._changes = trio.lowlevel.ParkingLot()
        self._redirects = 0
        self._redirected_at = 0.0
        #: What the link left unsettled, to be resumed by the next one (Part 2 §2.6.13); None if the
        #: peer does not keep its side of it.
        self._memory: UnsettledMap | None = None
        #: Whose terminus it is, if that is kept when the connection is lost.
        self._keeper: str | None = None
        #: How much of that the present link began with, and how often in a row that was no less.
        self._left = 0
        self._rounds = 0
        #: The peer has ended the link without an error, and may be closing the connection.
        self._undecided = False

    # --- state ---------------------------------------------------------------------------

    @property
    def link(self) -> Any:
        """The link of the present connection.

        Raises:
            LinkDetached: There is none at the moment, or no more.
        """
        if self._stage != "attached":
            self._refuse_if_over()
            raise LinkDetached(f"{self!r} is not attached at the moment")
        return self._raw

    @property
    def attached(self) -> bool:
        """Both sides are attached."""
        return self._stage == "attached"

    @property
    def closed(self) -> bool:
        """Closed by us, or over for good."""
        return self._stage == "over" or self._stage == "detaching"

    def _refuse_if_over(self) -> None:
        if self._error is not None:
            raise fresh(self._error)
        if self.closed:
            raise LinkDetached(f"{self!r} was closed", condition="amqp:illegal-state")

    # --- waiting -------------------------------------------------------------------------

    async def wait_attached(self) -> None:
        """Wait until the link is attached, or attached again after a lost connection.

        Cancelled, the attach stays asked for; close the link to withdraw it.

        Raises:
            LinkRefused: The peer would not have it; its condition says why.
            LinkDetached: It was detached.
            SessionEnded: So was its session.
            ConnectionLost: The connection is gone for good.
        """
        while self._stage != "attached":
            self._refuse_if_over()
            await self._changes.park()

    async def __aenter__(self) -> Self:
        """Wait until the link is attached. Cancelled, the attach is withdrawn.

        A peer that attaches, sends and detaches in one breath is heard all the same.
        """
        try:
            await self.wait_attached()
        except BaseException as error:
            if not (isinstance(error, LinkDetached) and self._was_attached):
                self.abandon()
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the link; after an exception without waiting for anything."""
        if error is None:
            await self.close()
        else:
            self.abandon()

    async def close(self) -> None:
        """Detach for good."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Detach at once, without waiting for anything. Nothing happens if it is over already."""
        if not self.closed:
            self._say_detach(closed=True)

    # --- detaching -----------------------------------------------------------------------

    def _say_detach(self, *, closed: bool) -> None:
        """Say detach, and be over as far as the application is concerned."""
        self._session.remove(self)
        raw = self._raw
        self._stage = "over" if raw is None else "detaching"
        self._let_go(LinkDetached("the link was closed", condition="amqp:illegal-state"))
        self._changes.unpark_all()
        if raw is not None:
            raw.detach(closed=closed)

    async def _detach(self, *, closed: bool = True) -> None:
        """Detach, and wait until the peer has: its side is gone then, and the name is free."""
        if not self.closed:
            self._say_detach(closed=closed)
        with trio.move_on_after(DETACH_GRACE_S):
            while self._stage == "detaching":
                await self._changes.park()

    # --- what the session says --------------------------------------------------------------

    def attach(self, core: Any) -> None:
        """Attach, or after a lost connection attach again, on *core*, the engine's session.

        Raises:
            LocalProtocolError: The name is taken, or the peer allows no more links.
        """
        if self._undecided:
            self._undecided = False
            self._interrupted(None)
        self._stage = "attaching"
        self._raw = None
        self._raw = self._ask(core)

    def _ask(self, core: Any) -> Any:
        """Attach on *core*; returns the link."""
        raise NotImplementedError

    def lost(self, error: AmqpError) -> None:
        """It will not be attached again: everybody who waits hears *error*."""
        self._undecided = False
        if self._stage == "detaching":
            self._stage = "over"
        elif self._stage != "over":
            self._session.remove(self)
            self._error = error
            self._stage = "over"
            self._let_go(error)
        self._raw = None
        self._changes.unpark_all()

    def move(self, session: Owner, address: str | None) -> None:
        """Go on as a member of *session*, at *address*: the peer has redirected us there."""
        self._session = session
        if address is not None:
            self._readdress(address)
        session.add(self)

    def _readdress(self, address: str) -> None:
        """Ask for *address* from now on."""
        self.address = address

    # --- what the link says -----------------------------------------------------------------

    def on_attached(self, link: Any) -> None:
        """Both sides are attached."""
        self._raw = link
        if self.closed:
            link.detach()
            return
        self._stage = "attached"
        self._was_attached = True
        self._begin(link)
        self._changes.unpark_all()

    def _begin(self, link: Any) -> None:
        """It is attached: start to work."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        """The link is over: detached by either side, or with its session or connection."""
        if self._raw is not None and link is not self._raw:
            return  # one of a connection before
        self._raw = None
        if self._stage == "detaching" or self._stage == "over":
            self._stage = "over"
            self._changes.unpark_all()
            return
        self._stage = "waiting"
        if self._session.going:
            # The session says what becomes of us: lost, or attached to another one.
            if self._session.may_come_back:
                self._remember(link)
                self._interrupted(error)
        elif error is not None and error.condition == "amqp:link:redirect" and self._follow(error):
            # Elsewhere nobody knows what was sent here.
            self._memory = None
            self._interrupted(error)
        elif link.incomplete and error is None and not closed and self._goes_on(link):
            self._interrupted(None)
            self._attach_again()
        elif not self._waits_to_return(link, error, closed):
            return
        self._changes.unpark_all()

    def _waits_to_return(self, link: Any, error: Error | None, closed: bool) -> bool:
        """Whether the link will be attached again, although its connection stands."""
        why: AmqpError
        if not self._was_attached:
            why = gone(LinkRefused, error, self.address)
        elif error is None and closed:
            why = gone(LinkEnded, error, self.address)
        else:
            why = gone(LinkDetached, error, self.address)
        if is_passing(error, closed) and not link.incomplete:
            if self._session.returns(self, why, ended=False):
                if closed:
                    self._forget()
                else:
                    self._remember(link)
                self._interrupted(error)
                return True
        elif isinstance(why, LinkEnded) and self._session.returns(self, why, ended=True):
            self._forget()
            self._undecided = True
            return False
        if self._was_attached and error is not None:
            log.warning("link lost: %r: %s", self.name, why)
        self.lost(why)
        return False

    def _forget(self) -> None:
        """The peer has closed its side, and resumes nothing."""
        self._keeper = self._memory = None

    def _remember(self, link: Any) -> None:
        """Keep what *link* left unsettled, if the peer does."""
        if self._keeper is None:
            self._memory = None
        elif link is not None:
            self._memory = link.remember()

    def _goes_on(self, link: Any) -> bool:
        """Whether it helps to attach again: the maps did not fit their frames (Part 2 §2.6.13)."""
        self._remember(link)
        if self._memory is None:
            return False
        self._rounds = 0 if len(self._memory) < self._left else self._rounds + 1
        return self._rounds <= ROUNDS_MAX

    def _attach_again(self) -> None:
        try:
            self._session.add(self)
        except AmqpError as error:
            self.lost(error)

    def _to_resume(self, core: Any) -> UnsettledMap | None:
        """What the attach on *core* resumes: with another peer than before, nothing."""
        if self._keeper != core.engine.peer.container_id:
            return None
        return self._memory

    def _resumed_as(self, link: Any, terminus: Any) -> UnsettledMap | None:
        """Both sides are attached, *terminus* is the peer's; what was to be resumed, if anything."""
        memory, self._memory = self._memory, None
        self._left = 0 if memory is None else len(memory)
        self._keeper = link.peer.container_id if outlives_connection(terminus) else None
        return memory

    def _follow(self, error: Error) -> bool:
        """Go where a redirect points; whether that is tried (Part 2 §2.8.18)."""
        now = trio.current_time()
        if now - self._redirected_at > REDIRECTS_FORGOTTEN_S:
            self._redirects = 0
        self._redirected_at = now
        self._redirects += 1
        if self._redirects > REDIRECTS_MAX:
            return False
        if not self._session.follow(self, error):
            return False
        # Otherwise its session would attach it as well, on the connection after the present one.
        self._session.remove(self)
        return True

    def _interrupted(self, error: Error | None) -> None:
        """The link is gone and may come back; ``_memory`` is what it can resume then."""

    def _let_go(self, error: AmqpError) -> None:
        """The link will not come back, because of *error*: give up what waits for it."""
