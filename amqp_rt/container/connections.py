"""Connections as applications hold them, whoever dialled.

A :class:`Connection` owns one engine at a time. For a connection that we dialled and that may
recover, the engine is replaced when the old one is gone, and every sender and receiver attaches
again on it (:mod:`~amqp_rt.container.recovery`); the objects that the application holds stay.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import trio

from ..errors import AmqpError, ConnectionLost, SessionEnded
from ..events import (
    AttachRequested,
    Closed,
    ConnectionFailed,
    Event,
    LoginRequested,
    Opened,
    Peer,
)
from ..fronts.base import ProtocolEngine
from ..outcomes import Error
from .receiving import Receiver
from .requests import Requests
from .sending import Sender

if TYPE_CHECKING:
    from .container import Container

log = logging.getLogger("amqp_rt.connections")

T = TypeVar("T")


class Member(Protocol):
    """A sender or receiver of a session."""

    name: str

    def attach(self, core: Any) -> None:
        """Attach on the session *core*."""

    def lost(self, error: AmqpError) -> None:
        """The session is gone for good."""


class Session:
    """A session of a connection: its own windows, and the links that share them.

    Made by ``peer.session(...)``; every connection has one of its own for what is opened on the
    connection directly.
    """

    def __init__(
        self, connection: Connection, *, window: int | None, window_bytes: int | None
    ) -> None:
        self.connection = connection
        self._window = window
        self._window_bytes = window_bytes
        #: The session of the engine, None while there is no connection.
        self.core: Any = None
        self._members: dict[Member, None] = {}
        self._ended = False

    @property
    def may_come_back(self) -> bool:
        """The connection is going, and another one may take its place."""
        return self.connection.engine_over and self.connection.recovers

    def begin(self, engine: Any) -> None:
        """Begin on *engine*; the members attach."""
        self.core = engine.begin(window=self._window, window_bytes=self._window_bytes)
        self.core.on_ended = self._on_ended
        for member in list(self._members):
            member.attach(self.core)

    def _on_ended(self, error: Error | None) -> None:
        self.core = None
        if self.may_come_back or self._ended:
            return
        self._ended = True
        self.connection.forget_session(self)
        said = SessionEnded("the session ended") if error is None else error.raised_as(SessionEnded)
        for member in list(self._members):
            member.lost(said)

    def add(self, member: Member) -> None:
        """A sender or receiver joins: it attaches now, or when there is a connection again."""
        if self._ended:
            raise SessionEnded("the session has ended")
        self.connection.refuse_if_closed()
        self._members[member] = None
        if self.core is not None:
            member.attach(self.core)

    def remove(self, member: Member) -> None:
        """It has closed, or was detached for good."""
        self._members.pop(member, None)

    def lose(self, error: AmqpError) -> None:
        """The connection is gone for good."""
        self._ended = True
        for member in list(self._members):
            member.lost(error)
        self._members.clear()

    def end(self) -> None:
        """End the session; its links are over."""
        if not self._ended:
            self._ended = True
            self.connection.forget_session(self)
            if self.core is not None:
                self.core.end()
            for member in list(self._members):
                member.lost(SessionEnded("the session was ended"))

    def sender(self, address: str | None = None, **options: Any) -> Sender:
        """A sender to *address*; see :meth:`Connection.sender`."""
        name = options.pop("name", None) or self.connection.new_name(address)
        sender = Sender(self, address, name=name, **options)
        self.add(sender)
        return sender

    def receiver(self, address: str | None = None, **options: Any) -> Receiver:
        """A receiver from *address*; see :meth:`Connection.receiver`."""
        name = options.pop("name", None) or self.connection.new_name(address)
        receiver = Receiver(self, address, name=name, **options)
        self.add(receiver)
        return receiver

    def __repr__(self) -> str:
        state = "ended" if self._ended else "waiting" if self.core is None else self.core.state
        return f"<Session {state}, {len(self._members)} links>"


class Connection:
    """A connection to a peer, and all that can be done over it.

    Both sides are equal: over one connection we send, receive and call, and the peer reaches the
    nodes of our container.
    """

    def __init__(
        self,
        container: Container,
        engine: ProtocolEngine | None = None,
        *,
        dialled: bool = False,
        recovers: bool = False,
    ) -> None:
        self.container = container
        self.engine: Any = engine
        self.dialled = dialled
        #: A lost connection is dialled again.
        self.recovers = recovers
        self._sessions: dict[Session, None] = {}
        self._default: Session | None = None
        self._names = count(1)
        self._prefix = token_hex(4)
        self._opened = trio.Event()
        self._closed = trio.Event()
        self._closing = False
        self._error: ConnectionLost | None = None
        #: Why the engine ended; read by recovery.
        self.ended_with: Error | None = None
        self.ended_cleanly = False
        self.requests = Requests(self)

    # --- state ---------------------------------------------------------------------------

    @property
    def peer(self) -> Peer:
        """Who is at the other end."""
        found: Peer = self.engine.peer
        return found

    @property
    def state(self) -> Literal["opening", "open", "recovering", "closed"]:
        """How things stand."""
        if self._closed.is_set():
            return "closed"
        if self._opened.is_set() and not self.engine_over:
            return "open"
        return "recovering" if self.ended_with is not None or self._default else "opening"

    @property
    def engine_over(self) -> bool:
        """The present engine is going or gone."""
        return self.engine is None or bool(self.engine.over)

    @property
    def closing(self) -> bool:
        """We have begun to close it."""
        return self._closing

    async def wait_open(self) -> None:
        """Wait until both sides have said open.

        Cancelled, nothing has changed.

        Raises:
            ConnectionLost: It never will be.
        """
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    async def opened(self) -> None:
        """Wait until the present engine has heard the peer's open."""
        await self._opened.wait()

    async def wait_closed(self) -> None:
        """Wait until the connection is over for good. Cancelled, nothing has changed."""
        await self._closed.wait()

    def refuse_if_closed(self) -> None:
        """Raise if the connection is over for good.

        Raises:
            ConnectionLost: It is.
        """
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ConnectionLost("the connection was closed")

    # --- what the driver says ----------------------------------------------------------------

    def handle(self, events: list[Event]) -> None:
        """Take what the engine reports. Not a checkpoint."""
        for event in events:
            if isinstance(event, AttachRequested):
                self.container.attach(self, event.link)
            elif isinstance(event, LoginRequested):
                self.container.start_login(self, event)
            elif isinstance(event, Opened):
                self._on_opened()
            elif isinstance(event, Closed):
                self.ended_with = event.error
                self.ended_cleanly = event.error is None
                self._on_over()
            elif isinstance(event, ConnectionFailed):
                self.ended_with = event.error
                self.ended_cleanly = False
                self._on_over()

    def start(self, engine: Any) -> None:
        """A new engine takes over."""
        self.engine = engine
        self.ended_with = None
        self._opened = trio.Event()

    def _on_opened(self) -> None:
        self._opened.set()
        for session in self._sessions:
            if session.core is None:
                session.begin(self.engine)

    def _on_over(self) -> None:
        if not self.recovers or self._closing:
            self.lose(self.lost_error())

    def lost_error(self) -> ConnectionLost:
        """What waiters are told when the connection is gone for good."""
        error = self.ended_with
        if self._closing and (error is None or not error.description):
            return ConnectionLost("the connection was closed")
        if error is None:
            return ConnectionLost("the peer closed the connection")
        said = error.raised_as(ConnectionLost)
        assert isinstance(said, ConnectionLost)
        return said

    def lose(self, error: ConnectionLost) -> None:
        """The connection is over for good; everybody who waits hears *error*."""
        if self._closed.is_set():
            return
        self._error = error
        self.recovers = False
        self.requests.lose(error)
        for session in list(self._sessions):
            session.lose(error)
        self._sessions.clear()
        self._opened.set()
        self._closed.set()

    # --- closing -------------------------------------------------------------------------

    def close(self, error: Error | None = None) -> None:
        """Say close and return at once; :meth:`wait_closed` waits for the peer's answer."""
        if self._closing:
            return
        self._closing = True
        self.recovers = False
        if self.engine is None or self.engine.finished:
            self.lose(ConnectionLost("the connection was closed"))
        else:
            self.engine.close(error)

    async def aclose(self) -> None:
        """Close and wait for the peer's answer, a few seconds at most.

        Cancelled, the close has been said all the same.
        """
        self.close()
        await self._closed.wait()

    # --- links ---------------------------------------------------------------------------

    def new_name(self, address: str | None) -> str:
        """A link name that is new for this pair of containers (Part 2 §2.6.1)."""
        return f"{(address or 'anonymous')[:200]}-{self._prefix}-{next(self._names)}"

    @property
    def default_session(self) -> Session:
        """The session of links that are opened on the connection itself."""
        if self._default is None:
            self._default = self._new_session(None, None)
        return self._default

    def _new_session(self, window: int | None, window_bytes: int | None) -> Session:
        self.refuse_if_closed()
        session = Session(self, window=window, window_bytes=window_bytes)
        self._sessions[session] = None
        if self._opened.is_set() and not self.engine_over:
            session.begin(self.engine)
        return session

    def forget_session(self, session: Session) -> None:
        """It has ended."""
        self._sessions.pop(session, None)
        if self._default is session:
            self._default = None

    @asynccontextmanager
    async def session(
        self, *, window: int | None = None, window_bytes: int | None = None
    ) -> AsyncIterator[Session]:
        """A session of its own, ended with the block.

        Args:
            window: Transfer frames that the peer may send ahead.
            window_bytes: Bytes of unread streamed messages that may wait here.
        """
        session = self._new_session(window, window_bytes)
        try:
            yield session
        finally:
            session.end()

    def sender(self, address: str | None = None, **options: Any) -> Sender:
        """A sender to *address*; use it in ``async with``, which waits until it is attached.

        Args:
            address: Where to; None for the anonymous terminus, which routes by ``to``.
            options: See :class:`~amqp_rt.container.sending.Sender`: ``max_pending``,
                ``settled``, ``rcv_settle_mode``, ``in_doubt``, ``dynamic``, ``capabilities``,
                ``name``, ``properties``.

        Raises:
            ConnectionLost: The connection is over.
        """
        return self.default_session.sender(address, **options)

    def receiver(self, address: str | None = None, **options: Any) -> Receiver:
        """A receiver from *address*; use it in ``async with``, which waits until it is attached.

        Args:
            address: Where from; leave it out with ``dynamic=True``.
            options: See :class:`~amqp_rt.container.receiving.Receiver`: ``credit``, ``mode``,
                ``filter``, ``dynamic``, ``rcv_settle_mode``, ``streaming``, ``durable``, ``name``,
                ``capabilities``, ``properties``.

        Raises:
            ConnectionLost: The connection is over.
        """
        return self.default_session.receiver(address, **options)

    # --- requests ------------------------------------------------------------------------

    @overload
    async def call(self, address: str, *args: Any, within: float | None = ...) -> Any: ...

    @overload
    async def call(
        self,
        address: str,
        *args: Any,
        reply: type[T],
        within: float | None = ...,
        **properties: Any,
    ) -> T: ...

    @overload
    async def call(
        self, address: str, *args: Any, within: float | None = ..., **properties: Any
    ) -> Any: ...

    async def call(
        self,
        address: str,
        *args: Any,
        reply: Any = Any,
        within: float | None = None,
        **properties: Any,
    ) -> Any:
        """Ask the node at *address* and wait for its reply.

        Args:
            address: The ``@rpc`` node.
            args: The request: nothing, one payload, or several as a list.
            reply: The type that the reply is decoded as.
            within: Seconds; the deadline travels with the request.
            properties: Further properties of the request's message.

        Cancelled, or past its deadline, the request is given up and its handler is cancelled.

        Raises:
            CallFailed: The node answered with an error; its condition says which.
            DeadlineExceeded: There was no reply within *within* seconds.
            DeliveryRejected: The request was invalid to the node.
            LinkRefused: There is no such node, or we may not call it.
            ConnectionLost: The connection went; whether the node has acted is in doubt.
            DecodeError: The reply is no *reply*.
        """
        return await self.requests.call(address, args, reply, within, properties)

    def stream(
        self,
        address: str,
        *args: Any,
        reply: Any = Any,
        within: float | None = None,
        credit: int = 100,
        **properties: Any,
    ) -> AsyncIterator[Any]:
        """Ask the node at *address* and iterate over its streamed reply.

        The handler runs only as far ahead as *credit* replies. Leaving the loop, being cancelled
        or exceeding *within* (seconds for the whole stream) cancels the handler.

        Raises:
            CallFailed: As :meth:`call`, and so are the others, while iterating.
        """
        return self.requests.stream(address, args, reply, within, credit, properties)

    async def serve(self, *nodes: Any) -> None:
        """Let nodes of our container consume from the peer's addresses of the same names.

        For peers that are brokers: a ``node`` receives from the queue at its address, an ``rpc``
        answers requests that wait there, a ``source`` sends to it. Returns when all are attached;
        they work until the connection or the container ends.

        Args:
            nodes: Functions with a declaration, or objects with such methods; none means every
                node of the container that has no captures.

        Raises:
            LinkRefused: The peer has no such address.
        """
        await self.container.consume(self, nodes)

    def __repr__(self) -> str:
        who = self.engine.peer if self.engine is not None else None
        name = f" to {who.container_id!r}" if who is not None and who.container_id else ""
        return f"<Connection{name}, {self.state}>"
