"""Sessions of the HTTP door, each of which is an AMQP connection of its user in memory.

The user logs in by SASL, so that rights, limits, the back-off after failed logins and the end of the session are those of
any other connection: a broker that closes the connection ends the session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from math import inf
from secrets import token_bytes, token_urlsafe
from typing import Any, Final, TypeAlias

import trio
from msgspec import Struct

from amqp_rt import Broker, Connection, Limits
from amqp_rt.addresses import host_in, network_of
from amqp_rt.container.doors import DoorArrival
from amqp_rt.container.local import Visitor
from amqp_rt.container.managing import ManagementClient
from amqp_rt.security.scram import saslprep

from .problems import Problem

#: Container-id of the connections of sessions.
CONTAINER_ID: Final = "http"
#: Seconds for one operation of management.
WITHIN_S: Final = 10.0
#: Octets of the name of a virtual host, which has to fit the frame that opens a connection.
_VIRTUAL_HOST_MAX: Final = 255
#: Operations for whose time a session that has ended stays open while a request uses it.
_LAST_OPERATIONS: Final = 2

#: Whose share of sessions and streams something is: kind and name of a user, a certificate, or an address.
Owner: TypeAlias = tuple[str, str]


class Login(Struct, frozen=True):
    """Credentials of a request: mechanisms of SASL that have them, and what tells them from those of others."""

    mechanisms: tuple[Any, ...]
    #: Octets with all of the credentials, empty without any. They are hashed before they are kept.
    secret: bytes
    virtual_host: str = ""

    @property
    def user(self) -> str | None:
        """Name of the user; None for one who did not give one."""
        names = (getattr(each, "user", None) for each in self.mechanisms)
        return next((name for name in names if name), None)

    @property
    def anonymous(self) -> bool:
        """Whether it has no credentials."""
        return not self.secret and not any(each.name == "EXTERNAL" for each in self.mechanisms)

    def owner(self, arrival: DoorArrival) -> Owner:
        """Return whose share a session of this login counts in: the user's, whatever way the name is written."""
        if self.user is not None:
            try:
                return "user", saslprep(self.user)
            except ValueError:
                return "user", self.user
        if arrival.certificate is not None and not self.secret:
            return "certificate", repr(arrival.certificate)
        return "address", network_of(host_in(arrival.address))


class WebSession:
    """Session of a user: an AMQP connection, and management over it.

    A session that has ended takes no new requests; those that use it already may finish.
    """

    def __init__(
        self, connection: Connection, login: Login, arrival: DoorArrival, ends_at: float
    ) -> None:
        #: Connection of the user, on which links can be opened too.
        self.connection = connection
        #: Client of the broker's ``$management``.
        self.management: ManagementClient = connection.management(within=WITHIN_S)
        self.virtual_host = login.virtual_host
        #: Name of the user; None for one who did not log in.
        self.user = login.user
        #: Whose share it counts in, and whether that is a stranger's.
        self.owner = login.owner(arrival)
        self.anonymous = login.anonymous
        #: Token of forms and scripts, by which requests of other sites are told from those of our pages.
        self.csrf = token_urlsafe(24)
        #: Whether a browser holds it by a cookie.
        self.has_cookie = False
        #: Time of the last request, on trio's clock.
        self.used_at = trio.current_time()
        self._uses = 0
        self._unused = trio.Event()
        self._ends_at = ends_at
        self._idle_s = inf
        self._scope = trio.CancelScope()
        self._scope.deadline = ends_at

    @property
    def alive(self) -> bool:
        """Whether its connection is open, and it has not ended."""
        return self.connection.state == "open" and not self._scope.cancel_called

    def expire_when_idle(self, seconds: float) -> None:
        """End the session after *seconds* without :meth:`touch`."""
        self._idle_s = seconds
        self.touch()

    def touch(self) -> None:
        """Note that the session is in use."""
        self._scope.deadline = min(self._ends_at, trio.current_time() + self._idle_s)

    @property
    def in_use(self) -> bool:
        """Whether a request uses it."""
        return self._uses > 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Note that a request uses the session until the end of the block."""
        self._uses += 1
        self.used_at = trio.current_time()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._unused.set()

    def end(self) -> None:
        """End the session, without waiting: its connection is closed once no request uses it."""
        self._scope.cancel()

    async def wait_ended(self) -> None:
        """Wait until the session has ended."""
        with self._scope:
            await self.connection.wait_closed()

    async def wait_unused(self, within: float) -> None:
        """Wait until no request uses the session or its connection is closed, *within* seconds at most."""
        with trio.move_on_after(within):
            while self._uses and self.connection.state == "open":
                self._unused = trio.Event()
                await self._unused.wait()

    def __repr__(self) -> str:
        return f"<WebSession of {self.user!r}>"


class WebSessions:
    """Sessions of one door, by the cookies and the headers of their requests.

    Args:
        broker: The broker.
        nursery: Tasks of the sessions, until the door closes.
    """

    def __init__(self, broker: Broker, nursery: trio.Nursery) -> None:
        self._broker = broker
        self._nursery = nursery
        self._limits: Limits = broker.container.limits
        #: All sessions, the oldest first, with those that have ended and are in use.
        self._all: dict[WebSession, None] = {}
        self._shares: Counter[Owner] = Counter()
        #: Sessions whose login is being checked.
        self._opening = 0
        #: By the digest of a token or of credentials: neither is kept.
        self._by_cookie: dict[bytes, WebSession] = {}
        self._by_header: dict[bytes, WebSession] = {}
        self._gates: dict[bytes, trio.Lock] = {}
        self._key = token_bytes(32)

    def __len__(self) -> int:
        return len(self._all)

    def _digest(self, *parts: bytes) -> bytes:
        found = blake2b(key=self._key, digest_size=32)
        for each in parts:
            found.update(len(each).to_bytes(8, "big") + each)
        return found.digest()

    def find(
        self, token: str, arrival: DoorArrival, uses: ExitStack, *, touch: bool = True
    ) -> WebSession | None:
        """Return the session of a browser's cookie, None if there is none, or none any more.

        Args:
            token: The token in the cookie.
            arrival: How the request has arrived.
            uses: The session is in use until this is closed.
            touch: Whether the request puts off the end of an idle session.
        """
        session = self._by_cookie.get(self._digest(token.encode("utf-8", "surrogateescape")))
        if session is None or not session.alive:
            return None
        if touch:
            session.touch()
        uses.enter_context(session.used())
        arrival.logged_in()
        return session

    async def log_in(
        self, login: Login, arrival: DoorArrival, uses: ExitStack
    ) -> tuple[WebSession, str]:
        """Open a session for a browser, in use until *uses* is closed; return it, and the token for its cookie.

        If cancelled, there is no session, or one whose token is lost, which ends as idle ones do.

        Raises:
            AuthenticationFailed: The login failed.
            AmqpError: The connection was refused for another reason.
            Problem: There are too many sessions.
        """
        token = token_urlsafe(32)
        digest = self._digest(token.encode())
        session = await self._open(login, arrival, uses, self._by_cookie, digest)
        return session, token

    async def for_request(self, login: Login, arrival: DoorArrival, uses: ExitStack) -> WebSession:
        """Return the session for requests that have *login* in their headers, a new one at most each minute.

        It is in use until *uses* is closed.

        Raises:
            AuthenticationFailed: The login failed.
            AmqpError: The connection was refused for another reason.
            Problem: There are too many sessions.
        """
        digest = self._digest(
            *(each.name.encode() for each in login.mechanisms),
            login.secret,
            login.virtual_host.encode(),
            # Connections have one address, which counts for failed logins.
            host_in(arrival.address).encode(),
            repr(arrival.certificate).encode(),
        )
        gate = self._gates.setdefault(digest, trio.Lock())
        try:
            async with gate:
                session = self._by_header.get(digest)
                if session is None or not session.alive:
                    return await self._open(login, arrival, uses, self._by_header, digest)
                uses.enter_context(session.used())
                arrival.logged_in()
                return session
        finally:
            if not gate.locked() and self._gates.get(digest) is gate:
                del self._gates[digest]

    async def _open(
        self,
        login: Login,
        arrival: DoorArrival,
        uses: ExitStack,
        table: dict[bytes, WebSession],
        digest: bytes,
    ) -> WebSession:
        """Log in, and start the task of the session, which *table* has under *digest* until its end."""
        limits = self._limits
        if len(login.virtual_host.encode()) > _VIRTUAL_HOST_MAX:
            raise Problem(400, f"the virtual host has more than {_VIRTUAL_HOST_MAX} octets")
        if self._opening >= limits.http_sessions_max:
            raise self._full()
        visitor = Visitor(
            mechanisms=login.mechanisms,
            address=arrival.address,
            container_id=CONTAINER_ID,
            secure=arrival.secure,
            certificate=arrival.certificate,
        )
        by_cookie = table is self._by_cookie

        async def run(*, task_status: trio.TaskStatus[WebSession]) -> None:
            async with self._broker.local(login.virtual_host, visitor=visitor) as connection:
                most_s = limits.http_session_s if by_cookie else limits.http_login_kept_s
                session = WebSession(connection, login, arrival, trio.current_time() + most_s)
                # Not before the login: a stranger who gives a user's name ends no session of that user.
                self._make_room(session.owner)
                if by_cookie:
                    session.has_cookie = True
                    session.expire_when_idle(limits.http_session_idle_s)
                table[digest] = session
                self._all[session] = None
                self._shares[session.owner] += 1
                try:
                    # Before the request knows of it: it must not be ended for another one until then.
                    uses.enter_context(session.used())
                    task_status.started(session)
                    await session.wait_ended()
                    if table.get(digest) is session:
                        del table[digest]
                    await session.wait_unused(limits.http_body_s + _LAST_OPERATIONS * WITHIN_S)
                finally:
                    self._forget(session)
                    if table.get(digest) is session:
                        del table[digest]

        self._opening += 1
        try:
            session: WebSession = await self._nursery.start(run)
        finally:
            self._opening -= 1
        arrival.logged_in()
        return session

    def _forget(self, session: WebSession) -> None:
        """Count *session* no longer."""
        if session in self._all:
            del self._all[session]
            self._shares[session.owner] -= 1
            if not self._shares[session.owner]:
                del self._shares[session.owner]

    def _make_room(self, owner: Owner) -> None:
        """End a session that no request uses if *owner* has its share of sessions, or there are too many.

        Those of headers are ended first, since their next request opens another.

        Raises:
            Problem: All that may be ended for *owner* are in use.
        """
        most = self._limits.http_sessions_max
        # One user never keeps out all others.
        share = min(self._limits.http_sessions_user_max, max(1, most // 2))
        if self._shares[owner] >= share:
            own = (each for each in self._all if each.owner == owner and not each.in_use)
            found = min(own, key=lambda each: (each.has_cookie, each.used_at), default=None)
            if found is None:
                raise Problem(
                    429,
                    f"{share} sessions of the user are in use (http_sessions_user_max): try again later",
                    "amqp:resource-limit-exceeded",
                    {"retry-after": "60"},
                )
        elif len(self._all) < most:
            return
        else:
            found = self._idle_for(owner)
            if found is None:
                raise self._full()
        self._forget(found)
        found.end()

    def _idle_for(self, owner: Owner) -> WebSession | None:
        """Return the session to end for one of *owner*, the longest unused of the first group that has one.

        Groups are the owner's headers, those without a login, headers of others, and cookies of the owner. Sessions of
        other browsers are left alone.
        """

        def group(each: WebSession) -> int:
            own = each.owner == owner
            if own and not each.has_cookie:
                return 0
            if each.anonymous:
                return 1
            return 3 if each.has_cookie else 2

        may_end = (
            each
            for each in self._all
            if not each.in_use and (not each.has_cookie or each.anonymous or each.owner == owner)
        )
        return min(may_end, key=lambda each: (group(each), each.used_at), default=None)

    def _full(self) -> Problem:
        return Problem(
            503,
            f"there are {self._limits.http_sessions_max} sessions already: try again later",
            "amqp:resource-limit-exceeded",
            {"retry-after": "60"},
        )
