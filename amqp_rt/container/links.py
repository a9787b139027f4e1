"""Base of senders and receivers: a link that attaches, is lost, attaches again and ends.

The application may keep a :class:`LinkHandle` for any time. The engine's link behind it is replaced
with the connection, under control of the :class:`~amqp_rt.container.connections.Session` of which
the handle is a member.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeVar

import trio

from ..errors import (
    AmqpError,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkEnded,
    LinkRefused,
)
from ..events import Peer
from ..limits import Limits
from ..outcomes import Error, Modified, Outcome, Rejected
from ..termini import outlives_connection
from ..unsettled import UnsettledMap
from ..values import Symbol
from .codecs import Codecs
from .engines import EngineSession

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("amqp_rt.connections")

E = TypeVar("E", bound=AmqpError)

#: Seconds that a peer has to answer our detach before we continue without the answer.
DETACH_GRACE_S: Final = 5.0
#: Times in succession that a link is attached again because its unsettled map did not fit a frame,
#: without the map getting smaller.
ROUNDS_MAX: Final = 16
#: Redirects in succession that one link follows, and seconds without a redirect after which
#: counting starts again.
REDIRECTS_MAX: Final = 5
REDIRECTS_FORGOTTEN_S: Final = 60.0

#: Property of an open: the member of a mesh that its sender is.
MESH_MEMBER: Final = Symbol("x-opt-mesh")
#: Conditions with which a peer detaches, for example for maintenance, but may accept the same link
#: again. After any other condition, such as *not-found* or *unauthorized-access*, it would only
#: refuse again.
PASSING_CONDITIONS: Final = frozenset({"amqp:link:detach-forced", "amqp:connection:forced"})

#: Stages of a link: ``waiting`` for a connection, ``attaching``, ``attached``, ``detaching``,
#: ``over``.
Stage = Literal["waiting", "attaching", "attached", "detaching", "over"]


def fresh(error: E) -> E:
    """Return a copy of *error* to raise.

    Many tasks may raise the error of one loss. If they raised the same object, each would add its
    own traceback to that of the others.
    """
    copy = type(error)(error.description, condition=error.condition, info=error.info)
    copy.__cause__ = error.__cause__
    return copy


def refusal(outcome: Outcome) -> AmqpError:
    """Return the exception for an *outcome* other than *accepted*.

    For released and modified messages ``info["outcome"]`` holds it.
    """
    if isinstance(outcome, Rejected):
        if outcome.error is None:
            return DeliveryRejected(
                "the receiver rejected the message", condition="amqp:not-allowed"
            )
        return outcome.error.raised_as(DeliveryRejected)
    how = "released"
    if isinstance(outcome, Modified):
        how = (
            "gave back, as a failed attempt," if outcome.delivery_failed else "gave back, modified,"
        )
    return DeliveryNotAccepted(f"the receiver {how} the message", info={"outcome": outcome})


def gone(kind: type[E], error: Error | None, address: object) -> E:
    """Create the exception for a link that the peer ended or refused."""
    where = "the anonymous terminus" if address is None else repr(address)
    if error is None:
        return kind(f"the peer detached the link to {where}")
    why = error.description or "the peer ended the link"
    return kind(
        # Most peers include the address in the description.
        why if where in why else f"{where}: {why}",
        condition=str(error.condition),
        info=error.info,
    )


def is_transient(error: Error | None, closed: bool) -> bool:
    """Whether a peer that detaches like this may accept the same link again."""
    if error is None:
        # Without ``closed`` the link is suspended (Part 2 §2.6.5).
        return not closed
    return error.condition in PASSING_CONDITIONS


def _keeper_of(peer: Peer) -> str:
    """Return a name of *peer* and of all others over which the termini of its links can be reached.

    That is the container-id, or the mesh of which the peer is a member: a link that attaches again at
    another member leads to the same destination.
    """
    member = peer.properties.get(MESH_MEMBER)
    mesh = member.get("mesh") if isinstance(member, Mapping) else None
    return f"x-opt-mesh:{mesh}" if isinstance(mesh, str) else peer.container_id


class Member(Protocol):
    """Member of a session: a sender, a receiver, or a node that consumes from a broker."""

    @property
    def name(self) -> str:
        """Name of the link (Part 2 §2.6.1)."""

    def attach(self, core: EngineSession) -> None:
        """Attach on the engine's session *core*; called again after a lost connection."""

    def lost(self, error: AmqpError) -> None:
        """Handle the permanent loss of the session, or its refusal of the link."""


class Owner(Protocol):
    """Owner of a link: a session of a connection, or the handler of a link of the peer's."""

    @property
    def ending(self) -> bool:
        """Whether the owner is ending, so that it decides whether its links attach again."""

    @property
    def may_be_replaced(self) -> bool:
        """Whether another owner will take its place, on which the link is attached again."""

    @property
    def limits(self) -> Limits:
        """Limits of the connection."""

    @property
    def codecs(self) -> Codecs:
        """Codecs of payloads."""

    def add(self, member: Member) -> None:
        """Add a link, which attaches now or when there is a connection again."""

    def remove(self, member: Member) -> None:
        """Remove a link that was closed or detached permanently."""

    def follow(self, member: LinkHandle, error: Error) -> bool:
        """Move a redirected link to its new place; return whether that is tried."""

    def returns(self, member: Member, error: AmqpError, *, ended: bool) -> bool:
        """Attach a link again that its peer has detached; return whether that is tried.

        Args:
            member: The link.
            error: The cause, reported to the member if the link cannot be attached again.
            ended: The peer gave no error. The link is attached again only if its connection closes
                shortly after too: stopping peers detach all links first.
        """


class LinkHandle:
    """Link of ours as the application uses it, across the connections that replace each other.

    Args:
        session: Owner of the link.
        address: Address of the peer's terminus; None if the peer creates the address, or there is
            none.
        name: The link's name (Part 2 §2.6.1).
    """

    def __init__(self, session: Owner, address: str | None, name: str) -> None:
        self.name = name
        #: The agreed address: as requested, or as the peer created it.
        self.address = address
        self._session = session
        #: Link of the current connection, sending or receiving as the subclass is; None while there is
        #: none, which the stage tells.
        self._raw: Any = None
        self._stage: Stage = "waiting"
        self._was_attached = False
        self._error: AmqpError | None = None
        #: Tasks that wait for the stage, or for other changes that a subclass announces.
        self.changes = trio.lowlevel.ParkingLot()
        self._redirects = 0
        self._redirected_at = 0.0
        #: Unsettled deliveries, to be resumed by the next link (Part 2 §2.6.13); None if the peer
        #: does not keep its side of them.
        self._memory: UnsettledMap | None = None
        #: The peer that keeps its terminus after a lost connection, by :func:`_keeper_of`; None if
        #: none does.
        self._keeper: str | None = None
        #: Size of the map with which the present link began, and how many times in succession it
        #: has not got smaller.
        self._left = 0
        self._rounds = 0
        #: Whether the peer has ended the link without an error, and may be closing the connection.
        self._undecided = False

    # --- state ---------------------------------------------------------------------------

    @property
    def link(self) -> Any:
        """Link of the current connection.

        Raises:
            LinkDetached: The link is not attached at the moment, or was closed.
            AmqpError: The error with which the link ended permanently.
        """
        if self._stage != "attached":
            self._refuse_if_over()
            raise LinkDetached(f"{self!r} is not attached at the moment")
        return self._raw

    @property
    def attached(self) -> bool:
        """Whether both sides are attached."""
        return self._stage == "attached"

    @property
    def closed(self) -> bool:
        """Whether the link was closed by us or has ended permanently."""
        return self._stage == "over" or self._stage == "detaching"

    def _refuse_if_over(self) -> None:
        if self._error is not None:
            raise fresh(self._error)
        if self.closed:
            raise LinkDetached(f"{self!r} was closed", condition="amqp:illegal-state")

    # --- waiting -------------------------------------------------------------------------

    async def wait_attached(self) -> None:
        """Wait until the link is attached, or attached again after a lost connection.

        If cancelled, the attach remains requested; close the link to withdraw it.

        Raises:
            LinkRefused: The peer refused the link; see its condition.
            LinkDetached: The link was detached.
            SessionEnded: The session was ended.
            ConnectionLost: The connection has ended permanently.
        """
        while self._stage != "attached":
            self._refuse_if_over()
            await self.changes.park()

    async def __aenter__(self) -> Self:
        """Wait until the link is attached. If cancelled, the attach is withdrawn.

        No error is raised if the peer has attached and detached before this task runs: messages
        that it sent in between are still received.
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
        """Detach permanently."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Detach at once, without waiting for anything. Does nothing if the link has ended."""
        if not self.closed:
            self._send_detach(closed=True)

    # --- detaching -----------------------------------------------------------------------

    def _send_detach(self, *, closed: bool) -> None:
        """Send detach, and end the link for the application."""
        self._session.remove(self)
        raw = self._raw
        self._stage = "over" if raw is None else "detaching"
        self._fail_waiting(LinkDetached("the link was closed", condition="amqp:illegal-state"))
        self.changes.unpark_all()
        if raw is not None:
            raw.detach(closed=closed)

    async def _detach(self, *, closed: bool = True) -> None:
        """Detach and wait for the peer's detach, at most ``DETACH_GRACE_S`` seconds.

        After it the peer's side has ended, and the name is free.
        """
        if not self.closed:
            self._send_detach(closed=closed)
        with trio.move_on_after(DETACH_GRACE_S):
            while self._stage == "detaching":
                await self.changes.park()

    # --- called by the session --------------------------------------------------------------

    def attach(self, core: EngineSession) -> None:
        """Attach, or after a lost connection attach again, on *core*, the engine's session.

        Raises:
            LocalProtocolError: The name is taken, or the peer allows no more links.
        """
        if self._undecided:
            self._undecided = False
            self._interrupted(None)
        self._stage = "attaching"
        self._raw = None
        self._raw = self._attach_on(core)

    def _attach_on(self, core: EngineSession) -> Any:
        """Attach on *core*, and return the link."""
        raise NotImplementedError

    def lost(self, error: AmqpError) -> None:
        """End the link permanently, and raise *error* in all tasks that wait for it."""
        self._undecided = False
        if self._stage == "detaching":
            self._stage = "over"
        elif self._stage != "over":
            self._session.remove(self)
            self._error = error
            self._stage = "over"
            self._fail_waiting(error)
        self._raw = None
        self.changes.unpark_all()

    def move(self, session: Owner, address: str | None) -> None:
        """Continue as a member of *session* at *address*, after a redirect."""
        self._session = session
        if address is not None:
            self._set_address(address)
        session.add(self)

    def _set_address(self, address: str) -> None:
        """Request *address* from now on."""
        self.address = address

    # --- called by the engine's link --------------------------------------------------------

    def on_attached(self, link: Any) -> None:
        """Handle that both sides are attached."""
        self._raw = link
        if self.closed:
            link.detach()
            return
        self._stage = "attached"
        self._was_attached = True
        self._begin(link)
        self.changes.unpark_all()

    def _begin(self, link: Any) -> None:
        """Start to work, now that the link is attached."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        """Handle the end of the link, by either side or with its connection."""
        if self._raw is not None and link is not self._raw:
            return  # An earlier connection's link.
        self._raw = None
        if self._stage == "detaching" or self._stage == "over":
            self._stage = "over"
            self.changes.unpark_all()
            return
        self._stage = "waiting"
        if self._session.ending:
            # The session decides whether the link is lost or attached on another one.
            if self._session.may_be_replaced:
                self._remember(link)
                self._interrupted(error)
        elif error is not None and error.condition == "amqp:link:redirect" and self._follow(error):
            # The other peer has no record of deliveries sent here.
            self._memory = None
            self._interrupted(error)
        elif link.incomplete and error is None and not closed and self._may_retry_attach(link):
            self._interrupted(None)
            self._attach_again()
        elif not self._waits_to_return(link, error, closed):
            return
        self.changes.unpark_all()

    def _waits_to_return(self, link: Any, error: Error | None, closed: bool) -> bool:
        """Whether the link will be attached again, although its connection is still open."""
        why: AmqpError
        if not self._was_attached:
            why = gone(LinkRefused, error, self.address)
        elif error is None and closed:
            why = gone(LinkEnded, error, self.address)
        else:
            why = gone(LinkDetached, error, self.address)
        if is_transient(error, closed) and not link.incomplete:
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
        """Drop the unsettled map: the peer has closed its side, and resumes nothing."""
        self._keeper = self._memory = None

    def _remember(self, link: Any) -> None:
        """Keep the unsettled deliveries of *link*, if the peer does."""
        if self._keeper is None:
            self._memory = None
        elif link is not None:
            self._memory = link.remember()

    def _may_retry_attach(self, link: Any) -> bool:
        """Whether attaching again helps, as the maps did not fit their frames (Part 2 §2.6.13)."""
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

    def _to_resume(self, core: EngineSession) -> UnsettledMap | None:
        """Return the map to resume with an attach on *core*; None if the peer is another one."""
        if self._keeper != _keeper_of(core.engine.peer):
            return None
        return self._memory

    def _resumed_as(self, link: Any, terminus: Any) -> UnsettledMap | None:
        """Return the map that was to be resumed, and note whether *terminus*, the peer's, is kept.

        Called when both sides are attached; None if there was nothing to resume.
        """
        memory, self._memory = self._memory, None
        self._left = 0 if memory is None else len(memory)
        self._keeper = _keeper_of(link.peer) if outlives_connection(terminus) else None
        return memory

    def _follow(self, error: Error) -> bool:
        """Follow a redirect (Part 2 §2.8.18); return whether that is tried."""
        now = trio.current_time()
        if now - self._redirected_at > REDIRECTS_FORGOTTEN_S:
            self._redirects = 0
        self._redirected_at = now
        self._redirects += 1
        if self._redirects > REDIRECTS_MAX:
            return False
        if not self._session.follow(self, error):
            return False
        # Otherwise its session would attach it too, on the next connection.
        self._session.remove(self)
        return True

    def _interrupted(self, error: Error | None) -> None:
        """Handle the end of a link that may be attached again and resume ``_memory`` then."""

    def _fail_waiting(self, error: AmqpError) -> None:
        """Give up everything that waits for the link, which ended permanently with *error*."""
