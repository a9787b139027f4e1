"""Bridges at work: connections to brokers outside, and the links that are joined with links of the mesh."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from random import SystemRandom
from typing import Any, Final, cast
from urllib.parse import quote

import trio

from ..container.connections import Connection
from ..container.container import Container
from ..container.recovery import Reconnect
from ..errors import AmqpError, LocalProtocolError
from ..fronts.base import (
    RCV_FIRST,
    RECEIVER,
    SENDER,
    SND_SETTLED,
    SND_UNSETTLED,
    LinkSession,
    ReceivingLink,
    SendingLink,
)
from ..fronts.hosts import BareHost
from ..outcomes import Error
from ..termini import Coordinator, Source, Target
from .bridges import Bridge, Pull, Push
from .hops import LEG, PINNED, ROUTE, read_leg
from .neighbours import Sessions
from .records import GIVES, LINK_ROUTED, PATTERN, TAKES, Offer
from .rules import MeshRules
from .splices import Splice
from .tracing import context_writer, traced
from .via import Revised, ViaCheck, ViaWriter

log = logging.getLogger("amqp_rt.mesh")
random = SystemRandom().random

#: Seconds until a link that was refused or lost is opened again, doubled each time; as they are shortened at random, members that
#: lost the same broker do not return at once.
_RETRY_S: Final = 0.1
_RETRY_MAX_S: Final = 5.0
#: Seconds until a broker is dialled again that refused the login.
_REFUSED_S: Final = 10.0
#: Messages in succession that have been in this mesh before, after which the link pauses: the broker offers them to us again.
LOOPS_MAX: Final = 100
_LOOPS_PAUSE_S: Final = 30.0
#: Seconds that messages under way get to be settled before a link is detached.
_QUIET_S: Final = 5.0
_LOOK_S: Final = 0.02


class PulledLink:
    """Link to pull from outside in the form of one that a peer requests; opened when the mesh has accepted the other end.

    Until then the broker outside gives nothing, and knows of nothing.

    Args:
        pull: What to pull.
        name: Name of the link.
        outer: The sessions outside.
    """

    role = RECEIVER
    rcv_settle_mode = RCV_FIRST
    desired_capabilities = ()
    attached = False
    credit = 0
    #: A link that is not opened cannot end with a session.
    ended = False

    def __init__(self, pull: Pull, name: str, outer: Sessions) -> None:
        self.name = name
        self.source = Source(address=pull.address)
        self.target = Target(address=pull.to)
        self.snd_settle_mode = SND_SETTLED if pull.settled else SND_UNSETTLED
        #: The link was requested from the broker.
        self.opened = False
        self._outer = outer

    @property
    def session(self) -> PulledLink:
        """Stand for the session of the link."""
        return self

    def accept(
        self, endpoint: Splice, *, max_message_size: int, stream_above: int, **_answer: Any
    ) -> None:
        """Open the link."""
        try:
            link = self._outer.attach_receiver(
                self.name,
                endpoint,
                source=self.source,
                target=self.target,
                snd_settle_mode=self.snd_settle_mode,
                max_message_size=max_message_size,
            )
        except LocalProtocolError as fault:
            endpoint.on_detached(self, Error.of(fault), closed=True)
            return
        link.stream_above = stream_above
        self.opened = True
        endpoint.opened(link)

    def refuse(self, error: Error) -> None:
        """Do nothing: the mesh has refused the other end, and there is no link outside."""

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Do nothing: there is no link outside."""


class Puller:
    """Task that pulls from one address outside.

    Args:
        outside: The broker outside.
        pull: What to pull.
        inner: Sessions of the member's connection to itself.
        check: Check of the messages.
    """

    def __init__(self, outside: Outside, pull: Pull, inner: Sessions, check: ViaCheck) -> None:
        self._outside = outside
        self._pull = pull
        self._inner = inner
        self._check = check
        self._splice: Splice | None = None
        self._held = False
        #: Set when the links have ended, or are to end.
        self._wakeup = trio.Event()
        self._ended = False
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether messages are under way."""
        return self._splice is not None and self._splice.busy

    def hold(self) -> None:
        """Pull nothing more."""
        self._held = True
        if self._splice is not None:
            self._splice.hold()

    async def run(self) -> None:
        """Keep the link open while the broker can be reached."""
        pause = _RETRY_S
        while True:
            await self._outside.wait_open()
            since = trio.current_time()
            self._check.in_row = 0
            if not self._held:
                await self._pull_once()
            if self._check.in_row >= LOOPS_MAX:
                pause = _LOOPS_PAUSE_S
            elif not self._outside.open or trio.current_time() - since > _RETRY_MAX_S:
                pause = _RETRY_S
            await trio.sleep(pause * (1 - 0.5 * random()))
            pause = min(2 * pause, _RETRY_MAX_S)

    async def _pull_once(self) -> None:
        """Join the two links, and wait for their end."""
        outside, pull = self._outside, self._pull
        where = f"{outside.bridge.name}/{pull.address}"
        self._count += 1
        self._ended, self._wakeup = False, trio.Event()
        outer = outside.sessions()
        pulled = PulledLink(pull, f"{outside.container.name}/{where}", outer)
        try:
            self._splice = Splice(
                cast("ReceivingLink", pulled),
                self._inner,
                f"bridge/{where}/{self._count}",
                revise=self._revise,
                outer=True,
                limits=outside.limits,
                on_ended=self._on_ended,
            )
        except LocalProtocolError as fault:
            log.warning("bridge %r: %r is not pulled: %s", outside.bridge.name, pull.address, fault)
            return
        await self._wakeup.wait()
        if not self._ended:
            log.warning(
                "bridge %r: the broker offers messages of this mesh from %r again and again; trying again in %g s",
                outside.bridge.name,
                pull.address,
                _LOOPS_PAUSE_S,
            )
            await self._let_go(self._splice)
        elif pulled.opened and outside.open:
            log.warning(
                "bridge %r: the link from %r ended: %s",
                outside.bridge.name,
                pull.address,
                self._splice.error,
            )
        else:
            log.debug(
                "bridge %r: %r is not pulled: %s",
                outside.bridge.name,
                pull.address,
                self._splice.error,
            )
        self._splice = None
        # RabbitMQ 3 keeps what was on its way when the link was detached until the session ends.
        outer.end()

    async def _let_go(self, splice: Splice) -> None:
        """Let the messages under way be settled, then detach."""
        splice.hold()
        with trio.move_on_after(_QUIET_S):
            while splice.busy:  # noqa: ASYNC110
                await trio.sleep(_LOOK_S)
        splice.inlet.detach()
        with trio.move_on_after(_QUIET_S):
            while not self._ended:  # noqa: ASYNC110
                await trio.sleep(_LOOK_S)

    def _revise(self, octets: bytes, complete: bool) -> Revised:
        revised = self._check(octets, complete)
        if self._check.in_row >= LOOPS_MAX:
            self._wakeup.set()
        return revised

    def _on_ended(self, splice: Splice) -> None:
        self._ended = True
        self._wakeup.set()


class ClientLine:
    """Connection to the broker outside for the links of one session of a client.

    Transactions belong to a connection, and any link of one may use their ids.

    Args:
        outside: The broker outside.
        session: The session.
    """

    def __init__(self, outside: Outside, session: LinkSession) -> None:
        self._outside = outside
        self._session = session
        self._scope = trio.CancelScope()
        #: Links that wait for the connection, with their addresses outside; None once it is open.
        self._waiting: list[tuple[ReceivingLink | SendingLink, str | None]] | None = []
        self._connection: Connection
        self._sessions: Sessions

    def end(self) -> None:
        """Disconnect."""
        self._scope.cancel()

    def place(self, link: ReceivingLink | SendingLink, address: str | None) -> None:
        """Join *link* with one to *address* outside; None for the coordinator of transactions."""
        if self._waiting is not None:
            self._waiting.append((link, address))
        else:
            self._outside.nursery.start_soon(self._join, link, address)

    async def run(self) -> None:
        """Stay connected until the session or the connection ends."""
        outside = self._outside
        error = Error("amqp:not-found", f"bridge {outside.bridge.name!r} is not connected")
        try:
            with self._scope:
                options = {**outside.options, "reconnect": None, "on_state": self._changed}
                async with outside.container.connect(outside.bridge.url, **options) as connection:
                    self._connection = connection
                    self._sessions = Sessions(connection, self._session)
                    waiting, self._waiting = self._waiting or [], None
                    for each in waiting:
                        outside.nursery.start_soon(self._join, *each)
                    await connection.wait_closed()
        except (AmqpError, OSError) as fault:
            log.warning("bridge %r: a client's session: %s", outside.bridge.name, fault)
        finally:
            outside.forget(self._session, self)
            self._session.followers.pop(self, None)
            for link, _ in self._waiting or ():
                if not link.session.ended:
                    link.refuse(error)

    def _changed(self, connection: Connection) -> None:
        if connection.state == "open":
            self._outside.lines.add(connection)
        else:
            self._outside.lines.discard(connection)

    async def _join(self, link: ReceivingLink | SendingLink, address: str | None) -> None:
        try:
            if address is not None:
                await self._connection.authorize(address)
            if not link.session.ended:
                self._outside.join(link, self._sessions, address)
        except AmqpError as fault:
            if not link.session.ended:
                link.refuse(Error.of(fault))


class Outside:
    """Broker outside of the mesh, to which one bridge leads.

    Args:
        bridge: The bridge.
        container: The container.
        local: The container's connection to itself.
        mesh: Name of the mesh.
        on_change: Called when the broker can be reached, or cannot any more.
    """

    def __init__(
        self,
        bridge: Bridge,
        container: Container,
        local: Connection,
        mesh: str,
        on_change: Callable[[], None],
    ) -> None:
        self.bridge = bridge
        self.container = container
        self.options = {"reconnect": Reconnect(give_up_after_s=inf), **bridge.options}
        self.limits = bridge.options.get("limits") or container.limits
        #: Whether messages can be sent to the broker now.
        self.open = False
        #: Connections to the broker.
        self.lines: set[Connection] = set()
        self.nursery: trio.Nursery
        self._on_change = on_change
        self._writer = ViaWriter(mesh, container.limits)
        self.checks = [ViaCheck(mesh, bridge.hops_max, container.limits) for _ in bridge.pull]
        self._pullers = [
            Puller(self, pull, Sessions(local), check)
            for pull, check in zip(bridge.pull, self.checks, strict=True)
        ]
        self._connection: Connection | None = None
        self._pushes: dict[str, Sessions] = {}
        self._clients: dict[LinkSession, ClientLine] = {}
        self._changes = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._stopping = False

    # --- the connection ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, again and again, and pull; until cancelled, or :meth:`close`."""
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            for each in self._pullers:
                nursery.start_soon(each.run)
            while not self._stopping:
                try:
                    await self._stay_connected()
                except (AmqpError, OSError) as fault:
                    log.warning("bridge %r: %s", self.bridge.name, fault)
                finally:
                    self._set_open(False)
                with trio.CancelScope() as self._scope:
                    if not self._stopping:
                        await trio.sleep(_REFUSED_S * (1 - 0.5 * random()))
            nursery.cancel_scope.cancel()

    async def _stay_connected(self) -> None:
        """Connect, and wait for the permanent end of the connection."""
        try:
            with trio.CancelScope() as self._scope:
                connecting = self.container.connect(
                    self.bridge.url, on_state=self._changed, **self.options
                )
                # Left by an end of the scope without an exception, so that outcomes still leave.
                async with connecting as connection:
                    with trio.CancelScope() as self._scope:
                        await connection.wait_closed()
        finally:
            if self._connection is not None:
                self.lines.discard(self._connection)

    def close(self) -> None:
        """Disconnect, and end :meth:`run`."""
        self._stopping = True
        self._scope.cancel()

    def _changed(self, connection: Connection) -> None:
        self.lines.add(connection)
        self._connection = connection
        if connection.state != "open":
            self._set_open(False)
        elif not self.open:
            self.nursery.start_soon(self._authorize, connection, connection.engine)

    async def _authorize(self, connection: Connection, engine: object) -> None:
        """Put the tokens that links need, then use the connection."""
        try:
            for address in (
                *(each.address for each in self.bridge.pull),
                *(each.to for each in self.bridge.push),
            ):
                await connection.authorize(address)
        except AmqpError as fault:
            log.warning("bridge %r: %s", self.bridge.name, fault)
            connection.close()
            return
        if connection.state == "open" and connection.engine is engine:
            self._pushes = {each.address: Sessions(connection) for each in self.bridge.push}
            self._set_open(True)

    def _set_open(self, is_open: bool) -> None:
        if is_open != self.open:
            self.open = is_open
            self._changes.unpark_all()
            self._on_change()

    async def wait_open(self) -> None:
        """Wait until the broker can be reached."""
        await trio.lowlevel.checkpoint()
        while not self.open:
            await self._changes.park()

    def sessions(self) -> Sessions:
        """Return sessions for the links of one use."""
        assert self._connection is not None
        return Sessions(self._connection)

    # --- what leads outside ------------------------------------------------------------------------

    def push(self, link: ReceivingLink, push: Push) -> None:
        """Join *link* with one to the address to which its messages are pushed."""
        if not self.open:
            self._refuse_absent(link)
            return
        try:
            self.join(link, self._pushes[push.address], push.to)
        except LocalProtocolError as fault:
            link.refuse(Error("amqp:not-found", fault.description))

    def pin(self, link: ReceivingLink | SendingLink, address: str | None) -> None:
        """Join *link* with one on the connection of its session, to *address*, or to the coordinator."""
        client = self._clients.get(link.session)
        if client is None:
            if not self.open:
                self._refuse_absent(link)
                return
            if len(self._clients) >= self.container.limits.mesh_bridge_sessions_max:
                link.refuse(
                    Error("amqp:resource-limit-exceeded", "mesh_bridge_sessions_max connections")
                )
                return
            client = self._clients[link.session] = ClientLine(self, link.session)
            link.session.followers[client] = client.end
            self.nursery.start_soon(client.run)
        client.place(link, address)

    def has(self, session: LinkSession) -> bool:
        """Return whether links of *session* lead here."""
        return session in self._clients

    def _revision(self, address: str) -> Callable[[bytes, bool], Revised]:
        """Return the revision of messages that leave the mesh for *address*."""
        container = self.container
        return traced(self._writer, context_writer(container.observers, address, container.limits))

    def forget(self, session: LinkSession, client: ClientLine) -> None:
        """Remove the connection of *session*, which has ended."""
        if self._clients.get(session) is client:
            del self._clients[session]

    def join(
        self, link: ReceivingLink | SendingLink, opener: Sessions, address: str | None
    ) -> None:
        """Join *link* with one to *address* outside.

        Raises:
            LocalProtocolError: No link can be opened.
        """
        Splice(
            link,
            opener,
            name_outside(link),
            address=address,
            revise=self._revision(address)
            if link.role == RECEIVER and address is not None
            else None,
            # The broker has no use for our routes.
            properties={
                key: value for key, value in link.properties.items() if key not in (ROUTE, LEG)
            },
            outer=link.role == SENDER,
            limits=self.limits,
            siblings=opener.siblings,
        )

    def _refuse_absent(self, link: ReceivingLink | SendingLink) -> None:
        link.refuse(Error("amqp:not-found", f"bridge {self.bridge.name!r} is not connected"))

    # --- leaving -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Pull nothing more."""
        for each in self._pullers:
            each.hold()

    @property
    def busy(self) -> bool:
        """Whether messages that were pulled are under way."""
        return any(each.busy for each in self._pullers)


class Bridges(BareHost):
    """Bridges of one member, and the host of the addresses that lead outside.

    Links come here along a route only, those of the member's own clients too.

    Args:
        bridges: The bridges.
        container: The container.
        local: The container's connection to itself.
        mesh: Name of the mesh.
        rules: Rules of the mesh.
    """

    def __init__(
        self,
        bridges: Sequence[Bridge],
        container: Container,
        local: Connection,
        mesh: str,
        rules: MeshRules,
    ) -> None:
        self._rules = rules
        #: Called when the offers have changed.
        self.on_change: Callable[[], None] | None = None
        self._outsides = [Outside(each, container, local, mesh, self._changed) for each in bridges]
        self._running = 0
        self._ended = trio.Event()

    async def run(self) -> None:
        """Serve all bridges until cancelled, or :meth:`close`."""
        try:
            async with trio.open_nursery() as nursery:
                for each in self._outsides:
                    nursery.start_soon(each.run)
        finally:
            self._ended.set()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def offers(self) -> dict[str, Offer]:
        """Return what is offered now."""
        found: dict[str, Offer] = {}
        for outside in self._outsides:
            if not outside.open:
                continue
            for push in outside.bridge.push:
                distribution = self._rules.rule_for(push.address).distribution
                found[push.address] = Offer(TAKES, distribution)
            prefix = outside.bridge.prefix.replace("{", "{{").replace("}", "}}")
            if prefix:
                found[f"{prefix}{{address:rest}}"] = Offer(TAKES | GIVES | LINK_ROUTED | PATTERN)
        return found

    def leads_outside(self, address: str) -> bool:
        """Return whether links to *address* lead outside while the broker can be reached."""
        return any(
            each.open and (each.bridge.pushed(address) or each.bridge.linked(address))
            for each in self._outsides
        )

    def is_outside(self, connection: Connection) -> bool:
        """Return whether *connection* is one to a broker outside."""
        return any(connection in each.lines for each in self._outsides)

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Join *link* with one outside, if it has come along a route and its address leads there."""
        if ROUTE not in link.properties:
            return False
        terminus = link.source if link.role == SENDER else link.target
        if isinstance(terminus, Coordinator):
            found = next((each for each in self._outsides if each.has(link.session)), None)
            if found is not None:
                found.pin(link, None)
            return found is not None
        if not isinstance(terminus, Source | Target) or not isinstance(terminus.address, str):
            return False
        for outside in self._outsides:
            push = outside.bridge.pushed(terminus.address)
            address = outside.bridge.linked(terminus.address)
            if push is not None and link.role == RECEIVER:
                outside.push(cast("ReceivingLink", link), push)
            elif address:
                outside.pin(link, address)
            else:
                continue
            return True
        return False

    def states(self) -> dict[str, int]:
        """Return for each bridge whether its broker can be reached (1) or not (0)."""
        return {each.bridge.name: int(each.open) for each in self._outsides}

    def refused(self) -> dict[str, int]:
        """Return for each bridge how many messages had been in this mesh, or in too many."""
        return {
            each.bridge.name: sum(check.refused for check in each.checks) for each in self._outsides
        }

    # --- leaving -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Pull nothing more."""
        for each in self._outsides:
            each.hold()

    @property
    def busy(self) -> bool:
        """Whether messages that were pulled are under way."""
        return any(each.busy for each in self._outsides)

    async def close(self) -> None:
        """Disconnect from all brokers, and wait for their answers."""
        for each in self._outsides:
            each.close()
        await self._ended.wait()


def name_outside(link: ReceivingLink | SendingLink) -> str:
    """Return the name that *link*, which has come along a route, gets outside.

    The broker sees one container, ours, and takes a second link of a name for the first one, attached again. A client's
    link therefore has the client's names before its own: it is the same from any node of the mesh, and is not that of
    another client. Names of legs are unique in the mesh already.
    """
    leg = read_leg(link.properties)
    if leg.band != PINNED:
        return link.name
    # No leg's name begins like this: it begins with the id of a node.
    return "/".join(("", quote(leg.user, safe=""), quote(leg.container, safe=""), link.name))
