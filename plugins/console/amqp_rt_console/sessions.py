"""Sessions of the HTTP door, each of which is an AMQP connection of its user in memory.

The user logs in by SASL, so that rights, limits, the back-off after failed logins and the end of the session are those of
any other connection: a broker that closes the connection ends the session.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf
from secrets import token_bytes, token_urlsafe
from typing import Any, Final

import trio
from msgspec import Struct

from amqp_rt import Broker, Connection, Limits
from amqp_rt.addresses import host_in
from amqp_rt.container.doors import DoorArrival
from amqp_rt.container.local import Visitor
from amqp_rt.container.managing import ManagementClient

from .problems import Problem

#: Container-id of the connections of sessions.
CONTAINER_ID: Final = "http"
#: Seconds for one operation of management.
WITHIN_S: Final = 10.0


class Login(Struct, frozen=True):
    """Credentials of a request: mechanisms of SASL that have them, and what tells them from those of others."""

    mechanisms: tuple[Any, ...]
    #: Octets with all of the credentials, empty without any. They are hashed before they are kept.
    secret: bytes
    virtual_host: str = ""


class WebSession:
    """Session of a user: an AMQP connection, and management over it."""

    def __init__(self, connection: Connection, login: Login, ends_at: float) -> None:
        #: Connection of the user, on which links can be opened too.
        self.connection = connection
        #: Client of the broker's ``$management``.
        self.management: ManagementClient = connection.management(within=WITHIN_S)
        self.virtual_host = login.virtual_host
        #: Name of the user; None for one who did not log in.
        self.user: str | None = next(
            (name for each in login.mechanisms if (name := getattr(each, "user", None))), None
        )
        #: Token of forms and scripts, by which requests of other sites are told from those of our pages.
        self.csrf = token_urlsafe(24)
        #: Whether a browser holds it by a cookie.
        self.has_cookie = False
        self._ends_at = ends_at
        self._idle_s = inf
        self._scope = trio.CancelScope()
        self._scope.deadline = ends_at

    @property
    def alive(self) -> bool:
        """Whether its connection is open."""
        return self.connection.state == "open" and not self._scope.cancel_called

    def expire_when_idle(self, seconds: float) -> None:
        """End the session after *seconds* without :meth:`touch`."""
        self._idle_s = seconds
        self.touch()

    def touch(self) -> None:
        """Note that the session is in use."""
        self._scope.deadline = min(self._ends_at, trio.current_time() + self._idle_s)

    def end(self) -> None:
        """Close the connection soon, without waiting."""
        self._scope.cancel()

    async def wait_ended(self) -> None:
        """Wait until the session has ended."""
        with self._scope:
            await self.connection.wait_closed()

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
        #: All sessions, the oldest first.
        self._all: dict[WebSession, None] = {}
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

    def find(self, token: str) -> WebSession | None:
        """Return the session of a browser's cookie, None if there is none, or none any more."""
        session = self._by_cookie.get(self._digest(token.encode("utf-8", "surrogateescape")))
        if session is None or not session.alive:
            return None
        session.touch()
        return session

    async def log_in(self, login: Login, arrival: DoorArrival) -> tuple[WebSession, str]:
        """Open a session for a browser; return it, and the token for its cookie.

        If cancelled, there is no session.

        Raises:
            AuthenticationFailed: The login failed.
            AmqpError: The connection was refused for another reason.
            Problem: There are too many sessions.
        """
        token = token_urlsafe(32)
        digest = self._digest(token.encode())
        session = await self._open(
            login, arrival, self._limits.http_session_s, self._by_cookie, digest
        )
        session.has_cookie = True
        session.expire_when_idle(self._limits.http_session_idle_s)
        return session, token

    async def for_request(self, login: Login, arrival: DoorArrival) -> WebSession:
        """Return the session for requests that have *login* in their headers, a new one at most each minute.

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
                    kept_s = self._limits.http_login_kept_s
                    session = await self._open(login, arrival, kept_s, self._by_header, digest)
                return session
        finally:
            if not gate.locked() and self._gates.get(digest) is gate:
                del self._gates[digest]

    async def _open(
        self,
        login: Login,
        arrival: DoorArrival,
        most_s: float,
        table: dict[bytes, WebSession],
        digest: bytes,
    ) -> WebSession:
        """Log in, and start the task of the session, which *table* has under *digest* until its end."""
        self._make_room()
        visitor = Visitor(
            mechanisms=login.mechanisms,
            address=arrival.address,
            container_id=CONTAINER_ID,
            secure=arrival.secure,
            certificate=arrival.certificate,
        )

        async def run(*, task_status: trio.TaskStatus[WebSession]) -> None:
            async with self._broker.local(login.virtual_host, visitor=visitor) as connection:
                session = WebSession(connection, login, trio.current_time() + most_s)
                table[digest] = session
                self._all[session] = None
                task_status.started(session)
                try:
                    await session.wait_ended()
                finally:
                    self._all.pop(session, None)
                    if table.get(digest) is session:
                        del table[digest]

        self._opening += 1
        try:
            session: WebSession = await self._nursery.start(run)
        finally:
            self._opening -= 1
        arrival.logged_in()
        return session

    def _make_room(self) -> None:
        """End the oldest session of a header if there are too many: its next request opens another.

        Raises:
            Problem: All are sessions of browsers.
        """
        if len(self._all) + self._opening < self._limits.http_sessions_max:
            return
        oldest = next((each for each in self._all if not each.has_cookie and each.alive), None)
        if oldest is None:
            raise Problem(
                503,
                f"there are {self._limits.http_sessions_max} sessions already: try again later",
                "amqp:resource-limit-exceeded",
                {"retry-after": "60"},
            )
        del self._all[oldest]
        oldest.end()
