"""Dialling, and dialling again: failover lists, back-off, redirects (X25, X27).

The first connection is made while the caller waits: every URL is tried once, and if none works
the caller hears why. A connection that is lost later is dialled again in the background, with
growing pauses; senders and receivers attach again by themselves.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import TYPE_CHECKING, Final

import trio
from msgspec import Struct
from msgspec.structs import replace

from ..addresses import Url, parse_urls
from ..errors import AmqpError, AuthenticationFailed, ConnectFailed, ConnectionLost
from ..fronts.amqp10 import ClientMechanism, ClientOptions, client
from ..limits import Limits
from ..net.dial import Dialled, dial
from ..net.driver import run_connection
from ..net.memory import memory_stream_pair
from ..outcomes import Error
from ..security.mechanisms import Anonymous, Plain, may_send_in_clear
from ..termini import ANONYMOUS_RELAY
from ..values import Symbol
from .connections import Connection

if TYPE_CHECKING:
    from .container import Container

log = logging.getLogger("amqp_rt.connections")

DEFAULT_URL: Final = "amqp://127.0.0.1:5672"
#: Redirects followed in a row, so that two peers cannot send us round in circles.
REDIRECTS_MAX: Final = 5


class Reconnect(Struct, frozen=True, kw_only=True):
    """How a lost connection is dialled again."""

    #: Seconds before the first attempt, and the most between two.
    first_delay_s: float = 0.1
    delay_max_s: float = 10.0
    #: Each pause is this much longer than the one before.
    factor: float = 2.0
    #: Each pause is shortened by up to this part of it, at random, so that the clients of a
    #: broker that restarts do not all come at once.
    jitter: float = 0.5
    #: Seconds without a connection after which it is given up.
    give_up_after_s: float = inf


class Plan(Struct, kw_only=True):
    """Everything that dialling needs to know, besides where."""

    mechanisms: tuple[ClientMechanism, ...] | None
    hostname: str | None
    virtual_host: str | None
    limits: Limits
    properties: Mapping[object, object]
    pipelined: bool
    within: float
    plain_in_clear: bool
    reconnect: Reconnect | None
    jitter: Callable[[], float]


@asynccontextmanager
async def connect(
    container: Container,
    urls: str | Sequence[str] | None = None,
    *,
    auth: ClientMechanism | Sequence[ClientMechanism] | None = None,
    sasl: bool = True,
    virtual_host: str | None = None,
    hostname: str | None = None,
    limits: Limits | None = None,
    idle_timeout_s: float | None = None,
    properties: Mapping[object, object] | None = None,
    pipelined: bool = True,
    within: float = 10.0,
    plain_in_clear: bool = False,
    reconnect: Reconnect | None = Reconnect(),  # noqa: B008  # frozen
    jitter: Callable[[], float] = random.random,
) -> AsyncIterator[Connection]:
    """Connect to a peer; the block's end closes.

    Args:
        container: Whose container-id and nodes the peer sees.
        urls: Where to: one URL, several as a failover list, or None for ``$AMQP_URL``, else
            ``amqp://127.0.0.1:5672``.
        auth: Mechanisms, best first. By default PLAIN with the URL's user and password if it has
            them, else ANONYMOUS.
        sasl: False leaves the SASL layer out.
        virtual_host: ``hostname`` of our open; by default the URL's path, else its host.
        hostname: The same, for peers that want the host's name there.
        limits: Bounds, by default the container's.
        idle_timeout_s: Seconds of silence that we announce; 0 for none.
        properties: Of our open.
        pipelined: False waits for the peer's header before open, which rhea's server needs.
        within: Seconds for one attempt, from the first packet to the peer's open.
        plain_in_clear: Let a password cross a network unencrypted.
        reconnect: How a lost connection is dialled again; None never does.
        jitter: Numbers from 0 to 1 for the pauses between attempts.

    Cancelled while connecting, nothing is left behind.

    Raises:
        ConnectFailed: No URL could be connected to; the sentence says where and why.
        AuthenticationFailed: The peer does not let us in.
    """
    given = limits or container.limits
    if idle_timeout_s is not None:
        given = replace(given, idle_timeout_s=idle_timeout_s)
    mechanisms: tuple[ClientMechanism, ...] | None = None
    if not sasl:
        mechanisms = ()
    elif auth is not None:
        mechanisms = tuple(auth) if isinstance(auth, Sequence) else (auth,)
    plan = Plan(
        mechanisms=mechanisms,
        hostname=hostname,
        virtual_host=virtual_host,
        limits=given,
        properties=dict(properties or {}),
        pipelined=pipelined,
        within=within,
        plain_in_clear=plain_in_clear,
        reconnect=reconnect,
        jitter=jitter,
    )
    where = parse_urls(urls if urls is not None else os.environ.get("AMQP_URL") or DEFAULT_URL)
    connection = Connection(container, dialled=True)
    dialler = _Dialler(container, connection, where, plan)
    container.start_connection(dialler.run)
    try:
        await dialler.first()
        yield connection
    finally:
        connection.close()
        dialler.stop()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await connection.wait_closed()
            await dialler.stopped.wait()


@asynccontextmanager
async def local(container: Container) -> AsyncIterator[Connection]:
    """A connection to *container* itself, without a socket; the block's end closes.

    The same engines, states, credit and errors as over a network.
    """
    ours, theirs = memory_stream_pair()
    connection = Connection(container, dialled=True)
    engine = client(_client_options(container, None, container.limits, ()), trio.current_time())
    connection.start(engine)
    stopped = trio.Event()

    async def run() -> None:
        try:
            await run_connection(ours, engine, connection.handle, limits=container.limits)
        finally:
            connection.lose(connection.lost_error())
            stopped.set()

    async def accept() -> None:
        await container.accept(theirs, address="local", trusted=True)

    container.start_connection(accept)
    container.start_connection(run)
    try:
        await connection.wait_open()
        yield connection
    finally:
        connection.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await stopped.wait()


def _client_options(
    container: Container,
    hostname: str | None,
    limits: Limits,
    mechanisms: tuple[ClientMechanism, ...],
    *,
    properties: Mapping[object, object] | None = None,
    pipelined: bool = True,
) -> ClientOptions:
    return ClientOptions(
        container_id=container.name,
        hostname=hostname,
        limits=limits,
        mechanisms=mechanisms,
        offered_capabilities=(Symbol(ANONYMOUS_RELAY),),
        properties=properties or {},
        pipelined=pipelined,
    )


class _Dialler:
    """Keeps one connection connected."""

    def __init__(
        self, container: Container, connection: Connection, urls: Sequence[Url], plan: Plan
    ) -> None:
        self._container = container
        self._connection = connection
        self._urls = deque(urls)
        self._plan = plan
        self._scope = trio.CancelScope()
        self._first = trio.Event()
        self._failure: AmqpError | None = None
        self.stopped = trio.Event()

    async def first(self) -> None:
        """Wait for the first connection, or for the last failure to make one."""
        await self._first.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Dial no more. A connection that stands goes on until it has closed."""
        if self._connection.state != "open" and not self._closing_now():
            self._scope.cancel()

    def _closing_now(self) -> bool:
        engine = self._connection.engine
        return engine is not None and not engine.finished

    async def run(self) -> None:
        """Connect, and connect again, until there is nothing to connect for."""
        connection = self._connection
        try:
            with self._scope:
                failure = await self._try_each()
                if failure is not None:
                    self._failure = failure
                    return
                while connection.recovers and not connection.closing:
                    failure = await self._come_back()
                    if failure is not None:
                        connection.lose(_as_lost(failure))
                        return
        finally:
            if self._failure is None and not self._first.is_set():
                self._failure = ConnectFailed("connecting was given up")
            connection.lose(connection.lost_error())
            self._first.set()
            self.stopped.set()

    async def _try_each(self) -> AmqpError | None:
        """Try every URL once; None if one connected and its connection is over by now."""
        reasons: list[str] = []
        failure: AmqpError | None = None
        redirects = 0
        for _ in range(len(self._urls) + REDIRECTS_MAX):
            if len(reasons) >= len(self._urls):
                break
            url = self._urls[0]
            try:
                await self._connect(url)
            except _Redirected as redirect:
                redirects += 1
                if redirects > REDIRECTS_MAX:
                    failure = ConnectFailed(f"{url} redirects without end")
                    reasons.append(str(failure))
                    continue
                self._urls.appendleft(redirect.url)
            except AmqpError as error:
                failure = error
                reasons.append(str(error))
                self._urls.rotate(-1)
                if isinstance(error, AuthenticationFailed) and len(self._urls) == 1:
                    break
            else:
                return None
        if failure is not None and len(reasons) > 1:
            return type(failure)("; ".join(reasons), condition=failure.condition)
        return failure

    async def _come_back(self) -> AmqpError | None:
        """Dial again with growing pauses; None once a connection stood and is over."""
        policy = self._plan.reconnect
        assert policy is not None
        delay = policy.first_delay_s
        since = trio.current_time()
        while True:
            await trio.sleep(delay * (1 - policy.jitter * self._plan.jitter()))
            failure = await self._try_each()
            if failure is None or isinstance(failure, AuthenticationFailed):
                return failure
            if trio.current_time() - since > policy.give_up_after_s:
                return failure
            log.info("not connected: %s", failure)
            delay = min(delay * policy.factor, policy.delay_max_s)

    async def _connect(self, url: Url) -> None:
        """One connection to *url*, from dialling to its end.

        Raises:
            ConnectFailed: It did not get as far as the peer's open.
        """
        connection = self._connection
        plan = self._plan
        with trio.move_on_after(plan.within) as timeout:
            dialled = await dial(url, network=self._container.network)
        if timeout.cancelled_caught:
            raise ConnectFailed(f"{url} did not answer within {plan.within:g} s")
        mechanisms = self._mechanisms(url, dialled)
        limits = replace(
            plan.limits, handshake_s=max(0.001, timeout.deadline - trio.current_time())
        )
        engine = client(
            _client_options(
                self._container,
                self._hostname(url),
                limits,
                mechanisms,
                properties=plan.properties,
                pipelined=plan.pipelined,
            ),
            trio.current_time(),
        )
        engine.peer.address = str(url)
        engine.peer.virtual_host = self._hostname(url) or ""
        was = connection.recovers
        connection.recovers = plan.reconnect is not None and not connection.closing
        connection.start(engine)
        if connection.closing:
            engine.close()

        async def watch() -> None:
            await connection.opened()
            # A peer that has no place for us says open and close in one breath.
            await trio.lowlevel.checkpoint()
            if not engine.over:
                self._first.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await run_connection(dialled.stream, engine, connection.handle, limits=limits)
            nursery.cancel_scope.cancel()
        error = connection.ended_with
        if error is not None and str(error.condition) == "amqp:connection:redirect":
            raise _Redirected(_redirect(url, error))
        if not self._first.is_set() or (error is not None and not engine.open_received):
            connection.recovers = was
            raise _failed(url, error)

    def _mechanisms(self, url: Url, dialled: Dialled) -> tuple[ClientMechanism, ...]:
        plan = self._plan
        chosen = plan.mechanisms
        if chosen is None:
            if url.user is not None:
                chosen = (Plain(url.user, url.password or ""),)
            else:
                chosen = (Anonymous(),)
        if any(mechanism.name == "PLAIN" for mechanism in chosen) and not may_send_in_clear(
            secure=dialled.secure, local=dialled.local, allowed=plan.plain_in_clear
        ):
            raise ConnectFailed(
                f"{url}: the password would cross the network in clear; "
                "use TLS, or allow it with plain_in_clear=True",
                condition="amqp:not-allowed",
            )
        return chosen

    def _hostname(self, url: Url) -> str | None:
        plan = self._plan
        return plan.virtual_host or plan.hostname or url.virtual_host or url.host or None


class _Redirected(Exception):
    """The peer names another one."""

    def __init__(self, url: Url) -> None:
        super().__init__(str(url))
        self.url = url


def _redirect(url: Url, error: Error) -> Url:
    """Where a redirect points (Part 2 §2.8.16)."""
    info = {str(key): value for key, value in (error.info or {}).items()}
    host = info.get("network-host") or info.get("hostname")
    port = info.get("port")
    return replace(
        url,
        host=str(host) if host else url.host,
        port=int(port) if isinstance(port, int) else url.port,
    )


def _failed(url: Url, error: Error | None) -> AmqpError:
    if error is None:
        return ConnectFailed(f"{url} closed the connection at once")
    condition = str(error.condition)
    kind = AuthenticationFailed if condition == "amqp:unauthorized-access" else ConnectFailed
    return kind(f"{url}: {error.description or condition}", condition=condition, info=error.info)


def _as_lost(error: AmqpError) -> ConnectionLost:
    return ConnectionLost(error.description, condition=error.condition, info=error.info)
