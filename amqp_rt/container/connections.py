"""Connections and sessions as used by applications, for either side's dialling.

A :class:`Connection` owns one engine at a time. If we dialled the connection and it may recover,
the engine is replaced when the old one has ended, and every sender and receiver attaches again on
it (:mod:`~amqp_rt.container.recovery`); the application's objects stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from secrets import token_hex
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import trio

from ..errors import AmqpError, ConnectionLost, LocalProtocolError, SessionEnded
from ..events import (
    AttachRequested,
    Closed,
    ConnectionFailed,
    Event,
    LinksMoved,
    LoginRequested,
    Opened,
    Peer,
)
from ..fronts.base import LinkConnection, ReceivingLink, SendingLink, ServerEngine
from ..limits import Limits
from ..outcomes import Error
from ..policies import Policy
from .boxes import Outbox
from .calling import Calling
from .codecs import Codecs
from .composing import MessageProperties
from .engines import ConnectionEngine, EngineSession
from .home import AttachedLinks, Home
from .links import PASSING_CONDITIONS, LinkHandle, Member, fresh
from .managing import ManagementClient, management_of
from .receiving import Receiver, ReceiverOptions
from .requests import ReplyStream, Requests, check_reply
from .sender_options import SenderOptions
from .sending import Sender
from .transactions import ControlLink, Transaction

log = logging.getLogger("amqp_rt.connections")

T = TypeVar("T")

#: ``opening`` until both opens are exchanged, ``recovering`` while a lost connection is dialled
#: again, ``closed`` after the permanent end.
State = Literal["opening", "open", "recovering", "closed"]

#: Characters of an address that become part of a link's name, for readers of traces.
_NAME_MAX: Final = 200


#: ``returner(session, member, error, ended)``: see :meth:`Session.returns`.
Returner: TypeAlias = "Callable[[Session, Member, AmqpError, bool], bool]"
#: ``session_returner(session, error)`` begins again, after a pause, a session that its peer has
#: ended; returns whether that is tried.
SessionReturner: TypeAlias = "Callable[[Session, SessionEnded], bool]"


class TokenGate(Protocol):
    """TokenGate that a connection's peer needs for its addresses."""

    def restart(self) -> None:
        """Mark all tokens as missing: the peer of a new connection has none."""

    def admit(self, member: Member, session: Session) -> None:
        """Attach *member* in *session*, now or when the token for its address has been put."""

    async def authorize(self, address: str) -> None:
        """Put a token for *address*; see :meth:`Connection.authorize`."""


class AttachHandler(AttachedLinks, Protocol):
    """Handler of the links that peers request."""

    def attach(self, connection: Connection, link: ReceivingLink | SendingLink) -> None:
        """Accept or refuse *link*, at once or later."""

    def reauthorize(self, connection: Connection, why: str) -> None:
        """Detach the links for which *connection* no longer has the right."""

    def moved(self, connection: Connection, anchor: LinkConnection) -> None:
        """Judge the links of *anchor* by the rights of *connection*, to which they have moved."""

    def connection_ended(self, engine: object) -> None:
        """Remove the links of *engine*, whose connection has ended."""


class OpenHandler(Protocol):
    """Handler of the logins and opens of connections that peers open."""

    def start_login(self, connection: Connection, event: LoginRequested) -> None:
        """Start checking a step of a client's login."""

    def opened(self, connection: Connection) -> bool:
        """Handle the peer's open; return False if the connection was closed."""


class LinkClasses(NamedTuple):
    """Classes of the links that connections open, and of their calls."""

    sender: type[Sender] = Sender
    receiver: type[Receiver] = Receiver
    requests: type[Requests] = Requests


class ConnectionHome(Home, Protocol):
    """Container, as its connections use it."""

    @property
    def link_classes(self) -> LinkClasses:
        """Classes of the links that connections open from now on, observed ones where there are observers."""

    @property
    def attaching(self) -> AttachHandler:
        """Handler of the links that peers request."""

    @property
    def entry(self) -> OpenHandler:
        """Handler of logins and opens."""

    async def consume(self, connection: Connection, nodes: Sequence[Any]) -> None:
        """Consume from the addresses of the peer with *nodes*."""


class Session:
    """Session of a connection, with windows of its own that its links share.

    Created by ``peer.session(...)``. Every connection has a default session for links opened on the
    connection itself, begun on first use.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        window: int | None = None,
        window_bytes: int | None = None,
        keeper: TokenGate | None = None,
    ) -> None:
        self.connection = connection
        #: Puts the tokens that the session's links need.
        self._keeper = keeper
        self._window = window
        self._window_bytes = window_bytes
        #: The engine's session; None while there is no connection.
        self.core: EngineSession | None = None
        self._members: dict[Member, None] = {}
        self._control: ControlLink | None = None
        self._ended = False

    @property
    def ending(self) -> bool:
        """Whether the session or its connection is ending, so that its links end with it."""
        return self.core is None or bool(self.core.ended) or self.connection.engine_over

    @property
    def ended(self) -> bool:
        """Whether the session has ended permanently."""
        return self._ended

    @property
    def limits(self) -> Limits:
        """Limits of the session's connection."""
        return self.connection.container.limits

    @property
    def codecs(self) -> Codecs:
        """Codecs of payloads."""
        return self.connection.container.codecs

    def follow(self, member: LinkHandle, error: Error) -> bool:
        """Move a redirected link to its new place; return whether that is tried."""
        return self.connection.follow(member, error)

    def returns(self, member: Member, error: AmqpError, *, ended: bool) -> bool:
        """Attach a detached link again after a pause; return whether that is tried.

        With *ended* there was no error: the link is attached again only if the connection closes
        shortly after, and gets *error* otherwise.
        """
        returner = self.connection.returner
        return returner is not None and returner(self, member, error, ended)

    def end_pause(
        self, member: Member, core: EngineSession | None, error: AmqpError | None
    ) -> None:
        """Attach *member* after its pause, or report *error* to it.

        Does nothing if the member or *core* has ended in the meantime.
        """
        if member not in self._members or core is not self.core or self.ending:
            return
        if error is not None:
            member.lost(error)
            return
        try:
            self._attach(member)
        except LocalProtocolError as failure:
            member.lost(failure)

    def restart(self, core: EngineSession | None) -> None:
        """Begin again after the pause that followed the end of *core*, if still needed."""
        connection = self.connection
        if self._ended or core is not self.core or connection.engine_over:
            # Ended permanently, or the next connection begins it or has done so.
            return
        try:
            self.begin(connection.engine)
        except LocalProtocolError as error:
            self.lose(error)

    @property
    def may_be_replaced(self) -> bool:
        """Whether the session or its connection ended for a passing reason and will be replaced."""
        connection = self.connection
        if connection.engine_over:
            return connection.recovers
        return connection.session_returner is not None and self._is_ended_transiently()

    def _is_ended_transiently(self) -> bool:
        """Whether the peer has ended the session, but might accept another one."""
        error = None if self.core is None else self.core.error
        return error is not None and error.condition in PASSING_CONDITIONS

    def begin(self, engine: ConnectionEngine) -> None:
        """Begin on *engine*, and attach the members.

        Raises:
            LocalProtocolError: The peer allows no more sessions.
        """
        core = engine.begin(window=self._window, window_bytes=self._window_bytes)
        core.on_ended = self._on_ended
        self.core = core
        for member in list(self._members):
            try:
                self._attach(member)
            except LocalProtocolError as error:
                member.lost(error)

    def _attach(self, member: Member) -> None:
        assert self.core is not None
        if self._keeper is None:
            member.attach(self.core)
        else:
            self._keeper.admit(member, self)

    def admitted(self, member: Member, core: EngineSession | None) -> None:
        """Attach *member* on *core*, now that the token that it waited for has been put."""
        if member in self._members and core is self.core and core is not None and not self.ending:
            try:
                member.attach(core)
            except LocalProtocolError as error:
                member.lost(error)

    def _on_ended(self, error: Error | None) -> None:
        if self._ended or self.connection.engine_over:
            return  # The connection decides whether the session is lost.
        why = SessionEnded("the peer ended the session")
        if error is not None:
            why = SessionEnded(
                f"the session ended: {error.description or error.condition}",
                condition=str(error.condition),
                info=error.info,
            )
        returner = self.connection.session_returner
        if not (returner is not None and self._is_ended_transiently() and returner(self, why)):
            self.lose(why)

    def add(self, member: Member) -> None:
        """Add a sender or receiver, which attaches now or when there is a connection again.

        Raises:
            SessionEnded: The session has ended.
            ConnectionLost: Its connection has ended permanently.
            LocalProtocolError: The link's name is taken, or the peer allows no more links.
        """
        self.connection.refuse_if_closed()
        if self._ended:
            raise SessionEnded("the session has ended")
        if self.core is not None and not self.ending:
            self._attach(member)
        self._members[member] = None

    def remove(self, member: Member) -> None:
        """Remove a member that was closed or detached permanently."""
        self._members.pop(member, None)

    def lose(self, error: AmqpError) -> None:
        """End the session permanently, and report *error* to all its members."""
        self._ended = True
        self.connection.forget_session(self)
        members = list(self._members)
        self._members.clear()
        for member in members:
            member.lost(error)

    def end(self) -> None:
        """End the session and its links at once."""
        if not self._ended:
            self._ended = True
            if self.core is not None:
                self.core.end()
            self.lose(SessionEnded("the session was ended"))

    def transaction(self) -> Transaction:
        """Create a transaction for links of the session; see :meth:`Connection.transaction`."""
        control = self._control
        if control is None or control.closed:
            control = ControlLink(self, self.connection.new_name("transactions"))
            self.add(control)
            self._control = control
        return Transaction(control)

    def sender(self, address: str | None = None, **options: Unpack[SenderOptions]) -> Sender:
        """Create a sender to *address*; see :meth:`Connection.sender`."""
        named = "name" in options
        if not named:
            options["name"] = self.connection.new_name(address)
        sender = self.connection.container.link_classes.sender(self, address, **options)
        sender.named = named
        self.add(sender)
        return sender

    def receiver(self, address: str | None = None, **options: Unpack[ReceiverOptions]) -> Receiver:
        """Create a receiver from *address*; see :meth:`Connection.receiver`."""
        if options.get("durable") and "name" not in options:
            raise ValueError(
                "a durable receiver needs a name: it outlives the link, and is found again by "
                'container-id and name=, such as receiver("news", name="inbox", durable=1)'
            )
        options.setdefault("name", self.connection.new_name(address))
        receiver = self.connection.container.link_classes.receiver(self, address, **options)
        self.add(receiver)
        return receiver

    @property
    def senders(self) -> list[Sender]:
        """Senders of the session."""
        return [each for each in self._members if isinstance(each, Sender)]

    def __repr__(self) -> str:
        state = "ended" if self._ended else "waiting" if self.core is None else self.core.state
        return f"<Session {state}, {len(self._members)} links>"


class Connection:
    """Connection to a peer, with its sessions, links, calls and transactions.

    Both sides are equal: over one connection we send, receive and call, and the peer reaches the
    nodes of our container.
    """

    def __init__(
        self,
        container: ConnectionHome,
        engine: ServerEngine | None = None,
        *,
        dialled: bool = False,
    ) -> None:
        self.container = container
        self._engine = cast("ConnectionEngine | None", engine)
        self.dialled = dialled
        #: Whether a lost connection is dialled again.
        self.recovers = False
        #: Called with the connection when ``state`` has changed; not awaited.
        self.on_state: Callable[[Connection], object] | None = None
        #: Puts tokens at the peer; set by the dialler.
        self.tokens: TokenGate | None = None
        #: Moves redirected links to their new place; set by the dialler.
        self.redirector: Callable[[LinkHandle, Error], bool] | None = None
        #: Attaches detached links again; set by the dialler.
        self.returner: Returner | None = None
        #: Begins ended sessions again; set by the dialler.
        self.session_returner: SessionReturner | None = None
        #: Cause of the end of the latest engine; None until its end and after a clean one.
        self.ended_with: Error | None = None
        #: Whether the latest engine has been open.
        self.stood = False
        self._trust: Callable[[], None] | None = None
        self._state: State = "opening"
        #: Tasks that wait for another state, if there have been some.
        self._changes: trio.lowlevel.ParkingLot | None = None
        self._closing = False
        self._error: ConnectionLost | None = None
        self._sessions: dict[Session, None] = {}
        self._default: Session | None = None
        self._names = count(1)
        #: Part of the names of links, drawn for the first.
        self._prefix = ""
        self._requests: Requests | None = None

    # --- state ---------------------------------------------------------------------------

    @property
    def engine(self) -> ConnectionEngine:
        """Engine of the connection, which another one replaces after a lost connection.

        Raises:
            ConnectionLost: No peer has been reached yet.
        """
        if self._engine is None:
            raise ConnectionLost("there is no connection yet")
        return self._engine

    @property
    def peer(self) -> Peer:
        """Peer of the connection.

        Raises:
            ConnectionLost: No peer has been reached yet.
        """
        if self._engine is None:
            raise ConnectionLost("there is no connection yet")
        return self._engine.peer

    @property
    def state(self) -> State:
        """Current state of the connection."""
        return self._state

    @property
    def engine_over(self) -> bool:
        """Whether the current engine is closing or has ended, or there is none."""
        return self._engine is None or self._engine.over

    @property
    def closing(self) -> bool:
        """Whether we have begun to close the connection."""
        return self._closing

    async def wait_open(self) -> None:
        """Wait until the connection is open, or open again. Cancelling changes nothing.

        Raises:
            ConnectionLost: The connection has ended permanently.
        """
        await trio.lowlevel.checkpoint()
        while self._state != "open":
            self.refuse_if_closed()
            await self.wait_changed()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended permanently. Cancelling changes nothing."""
        if self._state == "closed":
            await trio.lowlevel.checkpoint()
        while self._state != "closed":
            await self.wait_changed()

    async def wait_changed(self) -> None:
        """Wait until ``state`` changes. Cancelling changes nothing."""
        if self._changes is None:
            self._changes = trio.lowlevel.ParkingLot()
        await self._changes.park()

    def refuse_if_closed(self) -> None:
        """Raise an error if the connection has ended permanently.

        Raises:
            ConnectionLost: The connection has ended; the cause is given if it is known.
        """
        if self._error is not None:
            raise fresh(self._error)

    def _become(self, state: State) -> None:
        if state != self._state:
            self._state = state
            if self._changes is not None:
                self._changes.unpark_all()
            if self.on_state is not None:
                try:
                    self.on_state(self)
                except Exception:
                    log.exception("on_state failed")

    # --- events of the engine ----------------------------------------------------------------

    def start(self, engine: ConnectionEngine, trust: Callable[[], None] | None = None) -> None:
        """Use *engine* from now on; *trust* is called once the peer's open has arrived."""
        self._engine = engine
        self._trust = trust
        self.ended_with = None
        self.stood = False

    def handle(self, events: list[Event]) -> None:
        """Process the events of the engine. Not a checkpoint."""
        refused = False
        for event in events:
            if isinstance(event, AttachRequested):
                if not refused:
                    self.container.attaching.attach(self, event.link)
            elif isinstance(event, LoginRequested):
                self.container.entry.start_login(self, event)
            elif isinstance(event, LinksMoved):
                if not refused:
                    self.container.attaching.moved(self, event.anchor)
            elif isinstance(event, Opened):
                if not self.dialled:
                    refused = not self.container.entry.opened(self)
                # A peer that refuses the connection sends open and close together.
                if len(events) == 1 or not any(
                    isinstance(each, (Closed, ConnectionFailed)) for each in events
                ):
                    self._on_opened()
            else:
                self.ended_with = event.error
                self._on_over()

    def _on_opened(self) -> None:
        self.stood = True
        if self._trust is not None:
            self._trust()
        if self.tokens is not None:
            self.tokens.restart()
        self._become("open")
        for session in list(self._sessions):
            try:
                session.begin(self.engine)
            except LocalProtocolError as error:
                session.lose(error)

    def _on_over(self) -> None:
        if not self.dialled or self._closing or (self.stood and not self.recovers):
            self.lose(self.lost_error())
        elif self.stood:
            self._become("recovering")

    def lost_error(self) -> ConnectionLost:
        """Return the error for waiting tasks after the permanent end of the connection."""
        error = self.ended_with
        if self._closing and (error is None or not error.description):
            return ConnectionLost("the connection was closed")
        if error is None:
            return ConnectionLost("the peer closed the connection")
        return ConnectionLost(
            f"the connection was lost: {error.description or error.condition}",
            condition=str(error.condition),
            info=error.info,
        )

    def lose(self, error: ConnectionLost) -> None:
        """End the connection permanently, and report *error* to all its sessions."""
        self.recovers = False
        self._fail_sessions(error)
        self._become("closed")

    def _fail_sessions(self, error: ConnectionLost) -> None:
        if self._error is None:
            self._error = error
            for session in list(self._sessions):
                session.lose(error)

    # --- closing -------------------------------------------------------------------------

    def close(self, error: Error | None = None) -> None:
        """Send close and return at once; :meth:`wait_closed` waits for the peer's answer.

        Tasks that wait for something on the connection get ``ConnectionLost`` now.
        """
        if self._closing:
            return
        self._closing = True
        self.recovers = False
        if self._engine is None or self._engine.finished:
            self.lose(ConnectionLost("the connection was closed"))
        else:
            self._engine.close(error)
            self._fail_sessions(ConnectionLost("the connection was closed"))

    async def aclose(self) -> None:
        """Close, and wait for the peer's answer for as long as the engine allows.

        If cancelled, the close has been sent all the same.
        """
        self.close()
        await self.wait_closed()

    # --- links ---------------------------------------------------------------------------

    @property
    def senders(self) -> list[Sender]:
        """Senders of all sessions."""
        return [each for session in self._sessions for each in session.senders]

    def new_name(self, address: str | None) -> str:
        """Return a link name that is new for this pair of containers (Part 2 §2.6.1)."""
        if not self._prefix:
            self._prefix = token_hex(4)
        return f"{(address or 'anonymous')[:_NAME_MAX]}-{self._prefix}-{next(self._names)}"

    @property
    def default_session(self) -> Session:
        """Session of links that are opened on the connection itself.

        Raises:
            ConnectionLost: The connection has ended permanently.
        """
        if self._default is None:
            self._default = self._new_session()
        return self._default

    def _new_session(
        self, *, window: int | None = None, window_bytes: int | None = None
    ) -> Session:
        self.refuse_if_closed()
        session = Session(self, window=window, window_bytes=window_bytes, keeper=self.tokens)
        return self._begin(session)

    def _begin(self, session: Session) -> Session:
        if self._state == "open" and not self.engine_over:
            session.begin(self.engine)
        self._sessions[session] = None
        return session

    def session_for_tokens(self) -> Session:
        """Begin a session whose links need no tokens themselves."""
        self.refuse_if_closed()
        return self._begin(Session(self))

    def forget_session(self, session: Session) -> None:
        """Remove *session*, which has ended."""
        self._sessions.pop(session, None)
        if self._default is session:
            self._default = None

    @asynccontextmanager
    async def session(
        self, *, window: int | None = None, window_bytes: int | None = None
    ) -> AsyncIterator[Session]:
        """Open a separate session, ended with the block.

        Neither beginning nor ending it is a checkpoint.

        Args:
            window: Transfer frames that the peer may send ahead.
            window_bytes: Bytes of unread streamed messages that may wait here.

        Raises:
            ConnectionLost: The connection has ended permanently.
            LocalProtocolError: The peer allows no more sessions.
        """
        session = self._new_session(window=window, window_bytes=window_bytes)
        try:
            yield session
        finally:
            session.end()

    def sender(self, address: str | None = None, **options: Unpack[SenderOptions]) -> Sender:
        """Create a sender to *address*; its ``async with`` waits until it is attached.

        Args:
            address: Address to send to; None for the anonymous terminus, which routes by ``to``.
            options: See :class:`~amqp_rt.container.sender_options.SenderOptions`.

        Raises:
            ConnectionLost: The connection has ended permanently.
        """
        return self.default_session.sender(address, **options)

    def receiver(self, address: str | None = None, **options: Unpack[ReceiverOptions]) -> Receiver:
        """Create a receiver from *address*; its ``async with`` waits until it is attached.

        Args:
            address: Address to receive from; omit it with ``dynamic=True``, or with the ``name`` of
                a link whose source the peer has kept.
            options: See :class:`~amqp_rt.container.receiving.ReceiverOptions`.

        Raises:
            ValueError: The receiver is durable but has no name.
            ConnectionLost: The connection has ended permanently.
        """
        return self.default_session.receiver(address, **options)

    def transaction(self) -> Transaction:
        """Create a transaction for messages and outcomes sent on the links of the connection.

        ``async with connection.transaction() as txn:`` declares it;
        ``out.send(…, transaction=txn)`` and ``delivery.accept(transaction=txn)`` take part. See
        :class:`~amqp_rt.container.transactions.Transaction`.

        Raises:
            ConnectionLost: The connection has ended permanently.
        """
        return self.default_session.transaction()

    async def authorize(self, address: str) -> None:
        """Put a token for *address* at the peer, and renew it as long as the connection lasts.

        Links do this themselves; call it for addresses that messages name in their ``to``. Does
        nothing on a connection without ``token=``. If cancelled, the token is put all the same.

        Raises:
            AuthenticationFailed: There is no token, or the peer does not accept it.
            ConnectionLost: The connection has ended permanently.
        """
        self.refuse_if_closed()
        if self.tokens is not None:
            await self.tokens.authorize(address)

    def follow(self, link: LinkHandle, error: Error) -> bool:
        """Move a redirected *link* to its new place; return whether that is tried."""
        return self.redirector is not None and self.redirector(link, error)

    # --- requests ------------------------------------------------------------------------

    @overload
    async def call(
        self,
        address: str,
        *args: Any,
        within: float | None = ...,
        **properties: Unpack[MessageProperties],
    ) -> Any: ...

    @overload
    async def call(
        self,
        address: str,
        *args: Any,
        reply: type[T],
        within: float | None = ...,
        **properties: Unpack[MessageProperties],
    ) -> T: ...

    async def call(
        self,
        address: str,
        *args: Any,
        reply: Any = Any,
        within: float | None = None,
        **properties: Unpack[MessageProperties],
    ) -> Any:
        """Send a request to the node at *address* and wait for its reply.

        While a lost connection is dialled again, the call waits. A request that had been sent when
        the connection was lost is in doubt, and raises ``ConnectionLost``.

        Args:
            address: The ``@rpc`` node.
            args: The request: nothing, one payload, or several as a list.
            reply: The type that the reply is decoded as; ``Message`` gives the whole message.
            within: Seconds; the deadline travels with the request.
            properties: Further properties of the request's message, except ``message_id``,
                ``correlation_id`` and ``reply_to``, which identify the reply.

        When cancelled or past its deadline, the request is abandoned and its handler cancelled.

        Raises:
            CallFailed: The node answered with an error; see its condition.
            DeadlineExceeded: There was no reply within *within* seconds.
            DeliveryRejected: The node rejected the request as invalid.
            DeliveryNotAccepted: The node released the request, without processing it.
            LinkRefused: There is no such node, or we may not call it.
            ConnectionLost: The connection was lost; whether the request was processed is in doubt.
            UnreadableReply: The reply cannot be decoded as *reply*.
            TypeError: *reply* is not a type that payloads can be decoded as; nothing was sent.
        """
        reply = check_reply(reply, self.container.codecs)
        requests = self._requests or self._calls()
        return await requests.call(address, args, reply, within, properties)

    def stream(
        self,
        address: str,
        *args: Any,
        reply: Any = Any,
        within: float | None = None,
        credit: int = 100,
        **properties: Unpack[MessageProperties],
    ) -> ReplyStream:
        """Send a request to the node at *address* and iterate over its streamed reply.

        ``async for row in peer.stream("export", day, reply=Row): …``. The handler runs at most
        *credit* replies ahead. Leaving the loop early, or exceeding *within* (seconds for the whole
        stream), cancels the handler.

        Raises:
            CallFailed: Raised while iterating, like the other errors of :meth:`call`.
            TypeError: *reply* is not a type that payloads can be decoded as.
        """
        reply = check_reply(reply, self.container.codecs)
        return self._calls().stream(address, args, reply, within, credit, properties)

    def calling(self, *policies: Policy, idempotent: bool = False) -> Calling:
        """Return an object whose ``call`` follows *policies*, the first outermost.

        ``await peer.calling(Retry(3), Breaker()).call("orders/price", "A-1", reply=Decimal)``. Keep
        the object, or the policies, for as long as the connection: budgets, circuits and replies
        are theirs. See :mod:`amqp_rt.policies`.

        Args:
            policies: ``Retry``, ``Hedge``, ``Breaker``, ``Bulkhead``, ``Cache``, in any order.
            idempotent: Whether the node may process a request twice without harm, so that requests
                in doubt are repeated, and slow ones sent twice.

        Raises:
            TypeError: A policy is none.
            ValueError: ``Hedge`` without *idempotent*.
        """
        return Calling(self._calls(), policies, idempotent=idempotent)

    def _calls(self) -> Requests:
        if self._requests is None:
            self._requests = self.container.link_classes.requests(self)
        return self._requests

    def management(self, entity: str = "", *, within: float | None = 10.0) -> ManagementClient:
        """Return a client of the peer's ``$management`` node, or of that of one of its entities.

        Args:
            entity: An address; omit it for the peer itself.
            within: Seconds that each operation may take.
        """
        return management_of(self, entity, within)

    async def serve(self, *nodes: Any) -> None:
        """Consume from the peer's addresses with nodes of our container of the same names.

        For peers that are brokers: a ``node`` receives from the queue at its address, an ``rpc``
        answers requests from it, a ``source`` sends to it. Returns when all are attached; they are
        served until the connection or the container ends.

        If cancelled, links that are attached continue.

        Args:
            nodes: Functions with a declaration, or objects with such methods; none means every node
                of the container without captures, except those that handle links themselves.

        Raises:
            LinkRefused: The peer has no such address.
            ConnectionLost: The connection was lost.
        """
        await self.container.consume(self, nodes)

    async def relay(self, outbox: Outbox) -> None:
        """Send the messages that *outbox* has committed to the peer, until cancelled.

        This is :meth:`Outbox.run <amqp_rt.outbox.Outbox.run>`, also for asyncio and for threads. ``Container(outbox=...)`` does it
        for the peer whose addresses the container serves.

        Raises:
            ConnectionLost: The connection has ended and is not established again.
        """
        await outbox.run(self)

    def __repr__(self) -> str:
        who = None if self._engine is None else self._engine.peer
        name = f" to {who.container_id!r}" if who is not None and who.container_id else ""
        return f"<Connection{name}, {self.state}>"
