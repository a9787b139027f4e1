"""Dialling and reconnecting: failover lists, back-off, redirects.

The first connection is made while the caller waits. Until it is open, and whenever it is lost
later, all URLs are tried repeatedly with growing pauses; senders and receivers attach again by
themselves. A link that its peer has detached for a passing reason attaches again in the same way.
The connection is given up when

- another attempt would fail in the same way: the peer refused the login, or closed with a condition
  of :data:`FINAL_CONDITIONS`;
- there was no connection for ``give_up_after_s``;
- the application has closed it.

A close with ``amqp:connection:redirect`` is followed at once, and a detach with
``amqp:link:redirect`` moves that link to a separate connection to the named host.
"""

from __future__ import annotations

import logging
import os
import random
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import inf
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

import trio
from msgspec import Struct
from msgspec.structs import replace

from ..addresses import Url, parse_urls
from ..errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    LinkDetached,
    SessionEnded,
)
from ..fronts.amqp10 import ClientMechanism, ClientOptions, client
from ..limits import Limits, check_seconds
from ..net.dial import Transport, dial
from ..net.driver import TRIO_CLOCK, run_connection
from ..net.proxies import proxy_for
from ..net.tls import ClientTls
from ..net.traces.recording import trace
from ..outcomes import Error
from ..security.mechanisms import Anonymous, External, Plain, may_send_in_clear, reveals
from ..security.scram import Scram
from ..termini import ANONYMOUS_RELAY
from ..values import Symbol
from .connections import Connection, ConnectionHome
from .home import Home, NetworkHome
from .links import LinkHandle
from .loops import require_trio
from .tokens import TokenKeeper, TokenProvider

if TYPE_CHECKING:
    from .connections import Session
    from .container import Container
    from .links import Member

log = logging.getLogger("amqp_rt.connections")

#: Errors of a connection whose peer takes our header for a broken TLS handshake: the peer closes,
#: or sends an alert first.
_SPEAKS_TLS: Final = (
    "the stream ended without a close",
    "the peer speaks another protocol or version",
)

DEFAULT_URL: Final = "amqp://127.0.0.1:5672"
#: Redirects of a connection followed in succession, so that two peers cannot redirect us endlessly.
REDIRECTS_MAX: Final = 5
#: Connections that one connection keeps for redirected links.
REDIRECT_CONNECTIONS_MAX: Final = 16
#: Seconds within which a stopping peer that has detached links is expected to close the connection.
CLOSING_S: Final = 0.1
#: Seconds that a connection gets to close when its block ends, and when the block is left with an
#: exception.
CLOSE_GRACE_S: Final = 5.0
HASTY_CLOSE_GRACE_S: Final = 0.5
#: Conditions of a close after which another attempt would fail in the same way.
FINAL_CONDITIONS: Final = frozenset(
    {
        "amqp:unauthorized-access",
        "amqp:not-found",
        "amqp:not-allowed",
        "amqp:not-implemented",
        "amqp:invalid-field",
        "amqp:decode-error",
        "amqp:illegal-state",
        "amqp:connection:framing-error",
    }
)


class Reconnect(Struct, frozen=True, kw_only=True):
    """Policy of reconnecting: until the first connection is open, and whenever it is lost."""

    #: Seconds before the first attempt, and the longest pause between two.
    first_delay_s: float = 0.1
    delay_max_s: float = 10.0
    #: Factor by which each pause is longer than the previous one, until a connection has been open
    #: for ``delay_max_s``.
    factor: float = 2.0
    #: Fraction by which each pause may be shortened at random, so that the clients of a broker that
    #: restarts do not all connect at once.
    jitter: float = 0.5
    #: Seconds without a connection after which it is given up.
    give_up_after_s: float = 300.0

    def __post_init__(self) -> None:
        check_seconds("first_delay_s", self.first_delay_s)
        check_seconds("delay_max_s", self.delay_max_s)
        check_seconds("give_up_after_s", self.give_up_after_s, most=inf)
        if not 1 <= self.factor < inf:
            raise ValueError(f"factor must be a number of at least 1, got {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be 0 to 1, got {self.jitter}")


class _Pauses(Struct):
    """Pauses of a link that its peer detaches repeatedly."""

    #: Start of the first of them, and end of the latest one.
    since: float
    until: float
    delay: float


class DialOptions(Struct, kw_only=True):
    """All parameters of dialling except the URLs."""

    mechanisms: tuple[ClientMechanism, ...] | None
    virtual_host: str | None
    limits: Limits
    properties: Mapping[object, object]
    desired_capabilities: tuple[str, ...]
    pipelined: bool
    within: float
    plain_in_clear: bool
    tls: ClientTls | ssl.SSLContext | None
    tls_upgrade: bool
    transport: Transport | None
    proxy: str | None
    reconnect: Reconnect | None
    token: TokenProvider | None
    set_token: bool | None
    jitter: Callable[[], float]


@asynccontextmanager
async def connect(
    urls: str | Sequence[str] | None = None,
    *,
    container: Container | None = None,
    auth: ClientMechanism | Sequence[ClientMechanism] | None = None,
    token: TokenProvider | None = None,
    set_token: bool | None = None,
    sasl: bool = True,
    virtual_host: str | None = None,
    limits: Limits | None = None,
    idle_timeout_s: float | None = None,
    properties: Mapping[object, object] | None = None,
    desired_capabilities: Sequence[str] = (),
    pipelined: bool = True,
    within: float = 10.0,
    plain_in_clear: bool = False,
    tls: ClientTls | ssl.SSLContext | None = None,
    tls_upgrade: bool = False,
    transport: Transport | None = None,
    proxy: str | None = None,
    reconnect: Reconnect | None = Reconnect(),  # noqa: B008  # frozen
    jitter: Callable[[], float] = random.random,
    on_state: Callable[[Connection], object] | None = None,
) -> AsyncIterator[Connection]:
    """Connect to a peer; leaving the block closes the connection.

    Args:
        urls: One URL, several as a failover list, or None for ``$AMQP_URL``, else
            ``amqp://127.0.0.1:5672``.
        container: The container whose container-id and nodes the peer gets; by default one is
            created.
        auth: Mechanisms, best first. By default SCRAM or PLAIN with the URL's user and password if
            it has them, else EXTERNAL if *tls* has a certificate, else ANONYMOUS.
        token: Provider of tokens for the peer's addresses, such as
            :class:`~amqp_rt.container.tokens.Sas`: each link attaches when its token has been put,
            and all tokens are renewed before they expire.
        set_token: True puts tokens by ``set-token`` of the OASIS draft, False by ``put-token``,
            which Azure supports. By default the first if the peer offers ``AMQP_CBS_V1_0``.
        sasl: False omits the SASL layer.
        virtual_host: ``hostname`` of our open; by default the URL's path, else its host.
        limits: Limits of the connection, by default the container's.
        idle_timeout_s: Seconds of silence that we announce; 0 for none.
        properties: Properties of our open.
        desired_capabilities: Desired capabilities of our open.
        pipelined: False waits for the peer's header before sending open, which rhea's server needs.
        within: Seconds for one attempt, from the first packet to the peer's open.
        plain_in_clear: Allow sending a password over a network unencrypted.
        tls: Trusted authorities and our certificate, for encrypted URLs; by default the authorities
            that the system trusts, and no certificate.
        tls_upgrade: Request TLS on the port of ``amqp://`` URLs (Part 5 §5.2.1), and do not connect
            without.
        transport: ``await transport(url)`` opens the stream of each attempt instead of a socket,
            such as a pipe to another process. TLS and WebSockets run on top of it, if the scheme
            requires them.
        proxy: URL of a proxy for TCP, below TLS and WebSockets: ``socks5h://``, ``socks4a://`` or
            ``http://``, with ``USER:PASSWORD@`` if required; ``env`` reads HTTPS_PROXY, HTTP_PROXY,
            ALL_PROXY and NO_PROXY. SOCKS needs ``amqp-rt[proxy]``.
        reconnect: Policy for reconnecting, if the connection cannot be made or is lost. None tries
            every URL once.
        jitter: Source of numbers from 0 to 1 for the pauses between attempts.
        on_state: Called with the connection when its ``state`` has changed; not awaited.

    If cancelled while connecting, nothing remains. Leaving the block sends close and waits for the
    answer, at most 5 seconds, or half a second after an exception.

    Raises:
        ConnectFailed: No URL could be connected to within ``reconnect.give_up_after_s``, or each
            would refuse again; the error names the URLs and the causes.
        AuthenticationFailed: The peer refused the login.
    """
    require_trio("connect")
    where = parse_urls(urls if urls is not None else os.environ.get("AMQP_URL") or DEFAULT_URL)
    if proxy is not None:
        if transport is not None:
            raise ValueError("give transport or proxy: a transport opens the stream itself")
        for each in where:
            proxy_for(each, proxy, os.environ)
    async with AsyncExitStack() as stack:
        if container is None:
            from .container import Container  # Imported here because it imports this module

            container = await stack.enter_async_context(Container(f"client-{token_hex(8)}"))
        given = limits or container.limits
        if idle_timeout_s is not None:
            given = replace(given, idle_timeout_s=idle_timeout_s)
        mechanisms: tuple[ClientMechanism, ...] | None = None
        if not sasl:
            mechanisms = ()
        elif auth is not None:
            mechanisms = tuple(auth) if isinstance(auth, Sequence) else (auth,)
        dialling = DialOptions(
            mechanisms=mechanisms,
            virtual_host=virtual_host,
            limits=given,
            properties=dict(properties or {}),
            desired_capabilities=tuple(Symbol(each) for each in desired_capabilities),
            pipelined=pipelined,
            within=within,
            plain_in_clear=plain_in_clear,
            tls=tls,
            tls_upgrade=tls_upgrade,
            transport=transport,
            proxy=proxy,
            reconnect=reconnect,
            token=token,
            set_token=set_token,
            jitter=jitter,
        )
        dialler = Dialler(container, where, dialling)
        connection = dialler.connection
        connection.on_state = on_state
        container.dialled.add(connection)
        container.start_connection(dialler.run)
        hasty = True
        try:
            await dialler.first()
            yield connection
            hasty = False
        finally:
            try:
                with closing_grace(hasty=hasty) as grace:
                    await dialler.close(grace)
            finally:
                container.dialled.discard(connection)
                if not dialler.has_stopped:
                    dialler.stop()
                    with trio.CancelScope(shield=True):
                        await dialler.wait_stopped()


def closing_grace(*, hasty: bool) -> trio.CancelScope:
    """Limit the time for closing a connection; after an exception it is shielded."""
    return trio.move_on_after(HASTY_CLOSE_GRACE_S if hasty else CLOSE_GRACE_S, shield=hasty)


def client_options(
    container: Home, limits: Limits, *, hostname: str | None = None, **options: Any
) -> ClientOptions:
    """Return the options of our open for an engine of *container*."""
    return ClientOptions(
        container_id=container.name,
        hostname=hostname,
        limits=limits,
        offered_capabilities=(Symbol(ANONYMOUS_RELAY),),
        **options,
    )


class DiallingHome(ConnectionHome, NetworkHome, Protocol):
    """Container, as the tasks that dial its connections use it."""


class Dialler:
    """Task that connects one connection, and reconnects it.

    Args:
        container: The container of the connection.
        urls: The URLs to try.
        dialling: The parameters of dialling.
        patient: Whether the first connection is retried as well.
    """

    def __init__(
        self,
        container: DiallingHome,
        urls: Sequence[Url],
        dialling: DialOptions,
        *,
        patient: bool = True,
    ) -> None:
        self.connection = Connection(container, dialled=True)
        self.connection.redirector = self._redirect_link
        self.connection.returner = self._return_link
        self.connection.session_returner = self._return_session
        self._tokens: TokenKeeper | None = None
        if dialling.token is not None:
            self._tokens = TokenKeeper(
                self.connection, dialling.token, set_token=dialling.set_token
            )
            self.connection.tokens = self._tokens
        self.stopped = trio.Event()
        self._container = container
        self._urls = deque(urls)
        self._dialling = dialling
        self._patient = patient
        #: Whether there is a stream, on which octets may be under way.
        self._carrying = False
        self._scope = trio.CancelScope()
        self._failure: AmqpError | None = None
        #: The next pause, and when the latest connection was dialled: one that was lost soon after
        #: its open does not shorten the pauses.
        self._delay = 0.0
        self._began = 0.0
        #: The peer's redirect; tried once, before the URLs.
        self._redirected: Url | None = None
        self._redirects = 0
        self._at: Url | None = None
        #: Connections for redirected links, by URL.
        self._elsewhere: dict[Url, Dialler] = {}
        #: Number of links that are being redirected, or wait until they attach again.
        self._moving = 0
        self._pauses: WeakKeyDictionary[Any, _Pauses] = WeakKeyDictionary()
        self._moved = trio.lowlevel.ParkingLot()

    async def first(self) -> None:
        """Wait for the first connection, or for the last failure to make one.

        If cancelled, dialling continues until :meth:`stop`.

        Raises:
            ConnectFailed: No connection could be made.
            AuthenticationFailed: The peer refused the login.
        """
        while self.connection.state == "opening":
            await self.connection.wait_changed()
        if self._failure is not None and not self.connection.stood:
            raise self._failure

    async def close(self, grace: trio.CancelScope) -> None:
        """Close the connection and those of redirected links; wait for the peers' answers.

        *grace* limits the time. Its deadline is moved once the answers have arrived.
        """
        for each in self._all():
            each.connection.close()
        for each in self._all():
            await each.connection.wait_closed()
        for each in self._all():
            if each._carrying:
                # The last octets may be under way: those of a WebSocket are sent by a task.
                soon = trio.current_time() + HASTY_CLOSE_GRACE_S
                grace.deadline = min(grace.deadline, soon)
                await each.stopped.wait()

    @property
    def has_stopped(self) -> bool:
        """Whether all tasks of the connection and of redirected links have ended."""
        return self.stopped.is_set() and not self._elsewhere and not self._moving

    def stop(self) -> None:
        """Stop dialling, and drop connections that are not closed yet."""
        for each in self._all():
            each._scope.cancel()

    async def wait_stopped(self) -> None:
        """Wait until all tasks of the connection and of redirected links have ended."""
        for each in self._all():
            if not each.stopped.is_set():
                await each.stopped.wait()
            while each._moving:
                await each._moved.park()

    def _all(self) -> list[Dialler]:
        found = [self]
        for each in self._elsewhere.values():
            found += each._all()
        return found

    async def run(self) -> None:
        """Connect, and reconnect, until the connection has ended permanently."""
        connection = self.connection
        keeper = self._tokens
        if keeper is not None:
            self._container.start_connection(keeper.run)
        try:
            with self._scope:
                self._failure = await self._run()
        finally:
            if self._failure is not None:
                connection.lose(_as_lost(self._failure))
            else:
                connection.lose(connection.lost_error())
            if keeper is not None:
                keeper.stop()
            for dialler in self._elsewhere.values():
                dialler.connection.close()
            self.stopped.set()

    async def _run(self) -> AmqpError | None:
        """Run until the connection has ended permanently.

        Returns:
            The cause, if it is not the error with which the engine ended.
        """
        connection = self.connection
        policy = self._dialling.reconnect
        since = trio.current_time()
        failure = await self._try_each()
        if (
            failure is not None
            and policy is not None
            and self._patient
            and not connection.closing
            and not _is_final(failure)
        ):
            log.warning("%s; trying again", failure)
            failure = await self._redial(policy, since)
        while failure is None and policy is not None and connection.recovers:
            lost = connection.lost_error()
            error = connection.ended_with
            if error is not None and error.condition in FINAL_CONDITIONS:
                log.warning("connection given up: %s", lost)
                break
            log.warning("%s; connecting again", lost)
            failure = await self._redial(policy, trio.current_time())
            if failure is not None:
                log.warning("connection given up: %s", failure)
        return failure

    async def _redial(self, policy: Reconnect, since: float) -> AmqpError | None:
        """Dial again with growing pauses; None once a connection was open and has ended.

        Args:
            policy: The lengths of the pauses, and the time after which to give up.
            since: Start of the time without a connection.
        """
        if not self._delay or since - self._began >= policy.delay_max_s:
            self._delay = policy.first_delay_s
        while True:
            if self._redirected is None:
                await trio.sleep(self._pause(policy, self._delay))
                self._delay = min(self._delay * policy.factor, policy.delay_max_s)
            if self.connection.closing:
                return None
            failure = await self._try_each()
            if failure is None or _is_final(failure):
                return failure
            if trio.current_time() - since >= policy.give_up_after_s:
                return failure
            log.info("%s", failure)

    def _pause(self, policy: Reconnect, delay: float) -> float:
        return delay * (1 - policy.jitter * self._dialling.jitter())

    async def _try_each(self) -> AmqpError | None:
        """Try every URL once; None if one was connected to, and its connection has ended."""
        failures: list[AmqpError] = []
        untried = len(self._urls)
        while untried or self._redirected is not None:
            url, self._redirected = self._redirected or self._urls[0], None
            if url is self._urls[0]:
                untried -= 1
            try:
                await self._connect(url)
            except AmqpError as error:
                failures.append(error)
                if url is self._urls[0]:
                    self._urls.rotate(-1)
            else:
                if self.connection.stood:
                    return None
        kinds = {type(each) for each in failures}
        kind = AuthenticationFailed if kinds == {AuthenticationFailed} else ConnectFailed
        # Report a passing error if there is one: another attempt is useful if it may succeed with
        # any of the URLs.
        told = next((each for each in reversed(failures) if not _is_final(each)), failures[-1])
        return kind(
            "; ".join(each.description for each in failures),
            condition=told.condition,
            info=told.info,
        )

    async def _connect(self, url: Url) -> None:
        """Make one connection to *url*, and run it until its end.

        A redirect of the peer is left in ``_redirected``.

        Raises:
            ConnectFailed: The peer's open did not arrive.
        """
        connection = self.connection
        dialling = self._dialling
        with trio.move_on_after(dialling.within) as timeout:
            dialled = await dial(
                url,
                network=self._container.network,
                tls=dialling.tls,
                upgrade=dialling.tls_upgrade,
                limits=dialling.limits,
                transport=dialling.transport,
                proxy=dialling.proxy,
            )
        if timeout.cancelled_caught:
            raise ConnectFailed(f"cannot connect to {url}: no answer within {dialling.within:g} s")
        try:
            mechanisms = self._mechanisms(url, secure=dialled.secure, local=dialled.local)
            for mechanism in mechanisms:
                prepare = getattr(mechanism, "prepare", None)
                if prepare is not None:
                    # Loading a secret from elsewhere may take a while.
                    with trio.move_on_at(timeout.deadline) as late:
                        await prepare()
                    if late.cancelled_caught:
                        raise ConnectFailed(f"cannot connect to {url}: {mechanism} was not ready")
        except BaseException:
            await trio.aclose_forcefully(dialled.stream)
            raise
        hostname = dialling.virtual_host or url.virtual_host or url.host or None
        began = self._began = trio.current_time()
        options = client_options(
            self._container,
            dialling.limits,
            handshake_s=max(0.001, timeout.deadline - began),
            hostname=hostname,
            mechanisms=mechanisms,
            properties=dialling.properties,
            desired_capabilities=dialling.desired_capabilities,
            pipelined=dialling.pipelined,
        )
        engine = client(options, began)
        engine.peer.address = str(url)
        engine.peer.secure = dialled.secure
        engine.peer.virtual_host = hostname or ""
        self._at = url
        if self._tokens is not None:
            scheme = "amqps" if url.tls else "amqp"
            self._tokens.base = f"{scheme}://{hostname or 'localhost'}/"
        connection.recovers = dialling.reconnect is not None and not connection.closing
        connection.start(engine, dialled.trust)
        if connection.closing:
            engine.close()
        self._carrying = True
        kept = trace(self._container.traces, engine, client=True, clock=TRIO_CLOCK)
        try:
            await run_connection(
                dialled.stream,
                engine if kept is None else kept,
                connection.handle,
                limits=dialling.limits,
                reactor=self._container.reactor,
            )
        finally:
            self._carrying = False
            if kept is not None:
                kept.stop()
        self._handle_end(url, connection)

    def _handle_end(self, url: Url, connection: Connection) -> None:
        """Evaluate the end of a connection to *url*, and store its redirect.

        Raises:
            ConnectFailed: The connection ended before it was open.
        """
        error = connection.ended_with
        if error is not None and error.condition == "amqp:connection:redirect":
            self._redirects += 1
            if self._redirects > REDIRECTS_MAX:
                self._redirects = 0
                raise ConnectFailed(f"{url} redirects us without end", condition=error.condition)
            self._redirected = redirected(url, error)
            return
        self._redirects = 0
        if connection.stood:
            silent = error is not None and error.condition == "amqp:resource-limit-exceeded"
            if silent and url is self._urls[0]:
                # A peer whose process or machine has stopped may still accept connections, and answers none of them:
                # the other URLs come first. A peer that has closed for this condition takes no more of this client.
                self._urls.rotate(-1)
            return
        if error is None and connection.closing:
            raise ConnectFailed(f"the connection to {url} was closed before it was open")
        if error is None:
            raise ConnectFailed(f"{url} closed the connection at once")
        condition = str(error.condition)
        why = error.description or condition
        if url.scheme == "amqp" and why in _SPEAKS_TLS:
            why += "; if the port is for TLS, write amqps://"
        kind = AuthenticationFailed if condition == "amqp:unauthorized-access" else ConnectFailed
        raise kind(
            f"cannot connect to {url}: {why}",
            condition=condition,
            info=error.info,
        )

    def _mechanisms(self, url: Url, *, secure: bool, local: bool) -> tuple[ClientMechanism, ...]:
        dialling = self._dialling
        chosen = dialling.mechanisms
        if chosen is None:
            chosen = mechanisms_for(
                url, dialling.tls, secure=secure, local=local, allowed=dialling.plain_in_clear
            )
        refuse_in_clear(url, chosen, secure=secure, local=local, allowed=dialling.plain_in_clear)
        return chosen

    # --- detached links, ended sessions --------------------------------------------------

    def _return_link(self, session: Session, link: Member, error: AmqpError, ended: bool) -> bool:
        """Attach *link* again after a pause; return whether that is tried."""
        policy = self._dialling.reconnect
        if policy is None or self.connection.closing:
            return False
        pause = CLOSING_S if ended else self._pause_of(link, policy)
        if pause is None:
            return False
        if not ended:
            log.warning(
                "link %r detached: %s; attaching it again in %.1f s", link.name, error, pause
            )
        self._after_pause(
            pause, partial(session.end_pause, link, session.core, error if ended else None)
        )
        return True

    def _return_session(self, session: Session, error: SessionEnded) -> bool:
        """Begin *session* again after a pause; return whether that is tried."""
        policy = self._dialling.reconnect
        if policy is None or self.connection.closing:
            return False
        pause = self._pause_of(session, policy)
        if pause is None:
            return False
        log.warning("%s; beginning it again in %.1f s", error, pause)
        self._after_pause(pause, partial(session.restart, session.core))
        return True

    def _pause_of(self, ended: Member | Session, policy: Reconnect) -> float | None:
        """Return the pause in seconds before *ended* is tried again; None to give it up."""
        now = trio.current_time()
        pauses = self._pauses.get(ended)
        if pauses is None or now - pauses.until >= policy.delay_max_s:
            pauses = self._pauses[ended] = _Pauses(now, now, policy.first_delay_s)
        elif now - pauses.since >= policy.give_up_after_s:
            return None
        pause = self._pause(policy, pauses.delay)
        pauses.delay = min(pauses.delay * policy.factor, policy.delay_max_s)
        pauses.until = now + pause
        return pause

    def _after_pause(self, seconds: float, resume: Callable[[], None]) -> None:
        """Call *resume* in *seconds*, or when the connection has ended permanently."""
        self._moving += 1
        self._container.start_connection(partial(self._pause_and, seconds, resume))

    async def _pause_and(self, seconds: float, resume: Callable[[], None]) -> None:
        try:
            with trio.move_on_after(seconds):
                await self.stopped.wait()
            resume()
        finally:
            self._moving -= 1
            self._moved.unpark_all()

    # --- redirected links ----------------------------------------------------------------

    def _redirect_link(self, link: LinkHandle, error: Error) -> bool:
        """Move *link* to the place of the peer's redirect; return whether that is tried."""
        if self._at is None or self.connection.closing:
            return False
        self._moving += 1
        self._container.start_connection(partial(self._move, link, error))
        return True

    async def _move(self, link: LinkHandle, error: Error) -> None:
        try:
            await self._move_to(*self._place(error), link)
        except AmqpError as failure:
            link.lost(
                LinkDetached(
                    f"the peer has redirected us, but {failure.description}",
                    condition=str(error.condition),
                    info=error.info,
                )
            )
        finally:
            self._moving -= 1
            self._moved.unpark_all()

    def _place(self, error: Error) -> tuple[Dialler, str | None]:
        """Return the connection that a redirect points to, and the address there."""
        assert self._at is not None
        url = redirected(self._at, error)
        address = _info(error).get("address")
        dialler = self._elsewhere.get(url)
        if url == self._at:
            dialler = self
        elif dialler is None or dialler.connection.state == "closed":
            if len(self._elsewhere) >= REDIRECT_CONNECTIONS_MAX:
                raise ConnectFailed("the peer redirects links to too many places")
            # A link redirected to a port without a listener fails at once.
            dialler = Dialler(self._container, [url], self._dialling, patient=False)
            self._elsewhere[url] = dialler
            self._container.start_connection(partial(self._run_elsewhere, url, dialler))
        return dialler, address if isinstance(address, str) else None

    async def _move_to(self, dialler: Dialler, address: str | None, link: LinkHandle) -> None:
        await dialler.first()
        if not link.closed:
            link.move(dialler.connection.default_session, address)

    async def _run_elsewhere(self, url: Url, dialler: Dialler) -> None:
        try:
            await dialler.run()
        finally:
            if self._elsewhere.get(url) is dialler:
                del self._elsewhere[url]


def mechanisms_for(
    url: Url,
    tls: ClientTls | ssl.SSLContext | None,
    *,
    secure: bool,
    local: bool,
    allowed: bool = False,
) -> tuple[ClientMechanism, ...]:
    """Return the mechanisms to log in with at *url* where none are given, the preferred one first.

    A password that may not be sent in clear is proved by SCRAM, if that supports its characters.

    Args:
        url: The URL of the peer, which may have user and password.
        tls: Our certificate, if there is one.
        secure: Whether the connection is encrypted.
        local: Whether the peer is on this machine.
        allowed: Whether a password may be sent in clear all the same.
    """
    if url.user is not None:
        found = _by_password(url.user, url.password or "")
        if may_send_in_clear(secure=secure, local=local, allowed=allowed):
            return found
        return tuple(each for each in found if not reveals(each)) or found
    if secure and isinstance(tls, ClientTls) and tls.has_certificate:
        return (External(), Anonymous())
    return (Anonymous(),)


def refuse_in_clear(
    url: Url,
    mechanisms: Sequence[ClientMechanism],
    *,
    secure: bool,
    local: bool,
    allowed: bool = False,
) -> None:
    """Check that none of *mechanisms* would reveal a password on a connection to *url* that is not encrypted.

    Args:
        url: The URL of the peer.
        mechanisms: What we would log in with.
        secure: Whether the connection is encrypted.
        local: Whether the peer is on this machine.
        allowed: Whether that is permitted all the same.

    Raises:
        ConnectFailed: One would.
    """
    if any(map(reveals, mechanisms)) and not may_send_in_clear(
        secure=secure, local=local, allowed=allowed
    ):
        raise ConnectFailed(
            f"cannot connect to {url}: the password would cross the network in clear; "
            "use TLS, or allow it with plain_in_clear=True",
            condition="amqp:not-allowed",
        )


def _by_password(user: str, password: str) -> tuple[ClientMechanism, ...]:
    """Return the mechanisms for a password; those that do not reveal it come first."""
    found: list[ClientMechanism] = []
    try:
        found += [Scram(user, password, each) for each in ("SHA-512", "SHA-256")]
    except AuthenticationFailed:
        pass  # The password has characters that SCRAM does not support.
    return (*found, Plain(user, password))


def redirected(url: Url, error: Error) -> Url:
    """Return the URL that a redirect of a peer at *url* points to (Part 2 §2.8.16, §2.8.18).

    ``network-host`` and ``port`` are the address to dial, ``hostname`` the virtual host to request
    there. Scheme and user remain the same.
    """
    info = _info(error)
    host, hostname, port = info.get("network-host"), info.get("hostname"), info.get("port")
    return replace(
        url,
        host=str(host or hostname or url.host),
        port=port if isinstance(port, int) and 0 < port < 65536 else url.port,
        virtual_host=str(hostname) if hostname else url.virtual_host,
    )


def _is_final(failure: AmqpError) -> bool:
    """Whether the next attempt would fail in the same way."""
    return isinstance(failure, AuthenticationFailed) or failure.condition in FINAL_CONDITIONS


def _info(error: Error) -> dict[str, Any]:
    return {str(key): value for key, value in (error.info or {}).items()}


def _as_lost(error: AmqpError) -> ConnectionLost:
    return ConnectionLost(error.description, condition=error.condition, info=error.info)
