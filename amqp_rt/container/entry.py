"""Accepting connections: listeners, logins, tokens, and the limits for peers that open connections."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import trio
from msgspec import Struct

from ..addresses import Url, host_in, network_of, parse_url
from ..errors import AmqpError, ConnectFailed, printable
from ..events import Certificate, LoginRequested, Peer
from ..fronts.base import Front, LinkConnection, ProtocolEngine, ServerOptions, Topology
from ..limits import Limits
from ..loglimit import error_text
from ..message import Message
from ..net.driver import TRIO_CLOCK, run_connection
from ..net.edges import Edges
from ..net.endpoints import is_loopback
from ..net.entrance import ListenerPolicy, enter
from ..net.listeners import (
    Admission,
    ConnectionLimiter,
    Crowd,
    ProxiedArrivals,
    accept_sockets,
    bound_address,
    open_tcp,
    open_unix,
    serve_memory,
    serve_socket,
)
from ..net.proxy_headers import ProxyProtocol
from ..net.tls import ServerTls
from ..net.traces.recording import Traced, trace
from ..net.transports import TransportPlugin, open_plugin, peer_of, transport_for
from ..outcomes import Accepted, Error
from ..security.backoff import Backoff
from ..security.bearer import VerifyToken
from ..security.identities import Users
from ..security.mechanisms import (
    AnonymousServer,
    Challenge,
    Failure,
    ServerMechanism,
    Success,
    Verifier,
    offered,
)
from ..security.tokens import CBS_CAPABILITY, Cbs
from ..tallies import OTHER
from ..termini import ANONYMOUS_RELAY
from ..transactions import TransactionBranches
from ..values import Symbol
from .arrivals import Arrivals
from .cbs import TokenWatch, answer_cbs
from .connections import Connection, ConnectionHome
from .doors import Door, ServeDoor
from .front_timers import FrontTimers, TimerHome
from .home import NetworkHome
from .logins import mechanisms_of, with_token_passwords
from .namesakes import SOLE_CONNECTION, Namesakes
from .profiles import Profile
from .replies import LINK_PAIR_CAPABILITY

log = logging.getLogger("amqp_rt.container")

#: Whether clients have to log in; see :class:`~amqp_rt.container.container.Container`.
SaslPolicy: TypeAlias = Literal["required", "optional", "off"]
SASL_POLICIES: Final = ("required", "optional", "off")

#: Greatest channel number (Part 2 §2.7.1).
_CHANNEL_MAX: Final = 65_535
#: Characters of the reason of a failed login that are logged, and of the user name that the backoff
#: remembers.
_WHY_MAX: Final = 200


class EntryHome(ConnectionHome, NetworkHome, TimerHome, Protocol):
    """Container, as the tasks that accept its connections use it."""


class _Logins(Struct, frozen=True):
    """How the clients of a listener log in, and the limits of their connections."""

    cbs: Cbs | None
    mechanisms: Mapping[str, ServerMechanism]
    #: Whether clients have to log in.
    required: bool
    limits: Limits
    #: Capabilities that we offer in our open, beside those of hosts.
    capabilities: tuple[Symbol, ...]
    #: Names of the mechanisms to offer, by whether a connection is secure, local and has a certificate.
    offers: dict[tuple[bool, bool, bool], tuple[str, ...]]


class ConnectionEntry:
    """Connections that peers open: accepted, authenticated, counted and closed here.

    Args:
        home: The container.
        fronts: Protocols that listeners speak.
        sasl: Mechanisms to offer; see :class:`~amqp_rt.container.container.Container`, also for the
            others.
        sasl_policy: Whether clients have to log in.
        users: Users that may log in with passwords.
        tokens: Verifier of OAuth 2.0 tokens.
        cbs: Policy for tokens put at ``$cbs``.
        plain_in_clear: Offer mechanisms that send passwords in clear on connections without TLS.
        tls: Certificates of listeners.
        tls_required: Refuse connections without TLS.
        origins: Web pages that may connect.
    """

    def __init__(
        self,
        home: EntryHome,
        *,
        fronts: Sequence[Front],
        sasl: Collection[str | ServerMechanism] | None,
        sasl_policy: SaslPolicy | None,
        users: Users | Verifier | None,
        tokens: VerifyToken | None,
        cbs: Cbs | None,
        plain_in_clear: bool,
        tls: ServerTls | None,
        tls_required: bool,
        origins: Collection[str],
    ) -> None:
        if sasl_policy == "off":
            if sasl or users is not None or tokens is not None:
                raise ValueError(
                    "sasl_policy='off' disables logins: leave sasl, users and tokens out"
                )
            sasl = ()
        self._home = home
        self.fronts = [*fronts]
        self.limits = home.limits
        #: Profile of the listeners that have none of their own.
        self.profile: Profile | None = None
        self._mechanisms_of = partial(mechanisms_of, users=users, tokens=tokens, limits=home.limits)
        mechanisms = self._mechanisms_of(sasl, cbs=cbs)
        self._plain_in_clear = plain_in_clear
        if tls_required and tls is None:
            raise ValueError("tls_required needs certificates: pass tls=ServerTls(…)")
        self._tls = tls
        self._tls_required = tls_required
        self._origins = origins
        if sasl_policy not in (None, *SASL_POLICIES):
            raise ValueError(
                f"sasl_policy is one of {', '.join(SASL_POLICIES)}, not {sasl_policy!r}"
            )
        self._sasl_policy = sasl_policy
        self._logins_of: dict[Profile | None, _Logins] = {
            None: self._logins_with(cbs, mechanisms, home.limits)
        }
        #: Factory of the topology in which peers declare, for protocols with declarations; None if
        #: peers may not declare.
        self.topology: Callable[[Peer, LinkConnection], Topology] | None = None
        #: Factory of the branches of distributed transactions, likewise.
        self.branches: Callable[[Peer, LinkConnection], TransactionBranches] | None = None
        #: Properties of our open on all connections that peers open, besides those of their profile.
        self.open_properties: dict[object, object] = {}
        #: Returns the highest channel number for a peer that has opened, after its login; None for that of the limits.
        self.channel_max_for: Callable[[Peer], int | None] | None = None
        #: Processes that carry TLS and WebSocket of connections; None if this one does.
        self.edges: Edges | None = None
        #: URLs at which we listen, with the addresses that were bound.
        self.urls: list[str] = []
        #: Called with each connection that a peer has opened, after its login and before its first link.
        self.on_opened: Callable[[Connection], None] | None = None
        #: Connections by engine.
        self._accepted: dict[object, Connection] = {}
        #: Those that were counted as opened, and will be as closed.
        self._counted: set[Connection] = set()
        #: Called when the peer of an engine is authenticated, which makes it count as known.
        self._strangers: dict[object, Callable[[], None]] = {}
        self._namesakes = Namesakes(home.limits)
        self._crowd = Crowd(self._is_blocked)
        #: Mechanisms of the logins that have begun, by engine.
        self._logins: dict[object, ServerMechanism] = {}
        #: Cancel scopes of the logins that are being checked, by engine.
        self._judging: dict[object, trio.CancelScope] = {}
        self._backoff = Backoff(home.limits)
        self._watches: dict[Connection, TokenWatch] = {}
        #: Timers of the fronts, which run until the container begins to stop.
        self.timers = FrontTimers(home)

    def _requires(self, mechanisms: Mapping[str, ServerMechanism]) -> bool:
        """Return whether clients to which *mechanisms* are offered have to log in."""
        if self._sasl_policy is None:
            # Clients that may be anonymous may also leave out SASL.
            return "ANONYMOUS" not in mechanisms
        return self._sasl_policy == "required"

    def add_front(self, front: Front) -> None:
        """Accept a further protocol at all listeners, those that exist already included."""
        self.fronts.append(front)

    def add_profile(self, profile: Profile) -> None:
        """Make *profile* known, before a listener has it.

        Raises:
            ValueError: It names a mechanism that is not known, or that needs an option which the
                container does not have, or logins are off.
        """
        if profile in self._logins_of:
            return
        plain = self._logins_of[None]
        mechanisms, cbs = plain.mechanisms, profile.cbs or plain.cbs
        if profile.sasl is not None or profile.cbs is not None:
            if self._sasl_policy == "off":
                raise ValueError(
                    f"profile {profile.name!r}: sasl_policy='off' disables logins: leave it out, or sasl "
                    "and cbs of the profile"
                )
            mechanisms = self._mechanisms_of(profile.sasl, cbs=cbs)
        if profile.token_passwords and cbs is not None and self._sasl_policy != "off":
            mechanisms = with_token_passwords(mechanisms, cbs, self._home.limits)
        limits = self._home.limits
        for name in ("frame_size_max", "channel_max"):
            if (value := getattr(profile, name)) is not None:
                limits = msgspec.structs.replace(limits, **{name: value})
        self._logins_of[profile] = self._logins_with(cbs, mechanisms, limits)

    def _logins_with(
        self, cbs: Cbs | None, mechanisms: Mapping[str, ServerMechanism], limits: Limits
    ) -> _Logins:
        required = self._requires(mechanisms)
        return _Logins(cbs, mechanisms, required, limits, _capabilities(cbs), {})

    def _offers(
        self, logins: _Logins, address: str, secure: bool, certified: bool
    ) -> tuple[str, ...]:
        """Return the names of the mechanisms to offer to a peer at *address*."""
        key = (secure, _is_local(address), certified)
        names = logins.offers.get(key)
        if names is None:
            names = logins.offers[key] = offered(
                logins.mechanisms.values(),
                secure=secure,
                local=key[1],
                plain_in_clear=self._plain_in_clear,
                certificate=certified,
            )
        return names

    @property
    def connections(self) -> list[Connection]:
        """Connections that are open or being opened."""
        return list(self._accepted.values())

    def close_all(self, error: Error) -> None:
        """Close the connections with *error*, without waiting.

        No link is detached first: a client takes a detach as the end of the link, and a close
        without an error as the regular end of the connection.
        """
        for connection in list(self._accepted.values()):
            connection.close(error)

    # --- listening -----------------------------------------------------------------------

    async def listen(
        self,
        url: str,
        profile: Profile | None = None,
        proxy_protocol: ProxyProtocol | None = None,
    ) -> str:
        """Listen at *url*, and return it with the address that was bound.

        Connections have *profile*, which :meth:`add_profile` knows, or else the profile of all listeners.

        Raises:
            ConnectFailed: The URL cannot be listened on; the error names it and the cause.
        """
        connections = self._home.connection_nursery
        listeners = self._home.listener_nursery
        where = parse_url(url, listening=True)
        if where.profile is not None and profile is None:
            raise ConnectFailed(
                f"cannot listen on {where}: profiles of plug-ins are for brokers; pass profile=…",
                condition="amqp:invalid-field",
            )
        if where.trusted_proxies is not None:
            proxy_protocol = ProxyProtocol(where.trusted_proxies)
        plugin = transport_for(where)
        if proxy_protocol is not None and (
            plugin is not None or where.scheme in ("memory", "amqp+unix")
        ):
            raise ConnectFailed(
                f"cannot listen on {where}: the PROXY protocol is for TCP",
                condition="amqp:invalid-field",
            )
        limiter = ConnectionLimiter(self._home.limits, self._crowd)
        if where.scheme == "memory":
            try:
                await listeners.start(
                    partial(serve_memory, nursery=connections),
                    self._home.network,
                    where.host,
                    limiter,
                    partial(self.accept, scheme=where.scheme, profile=profile),
                )
            except OSError as error:
                raise ConnectFailed(f"cannot listen on {where}: {error}") from error
        elif where.scheme == "amqp+unix":
            listener = await open_unix(where.path)
            accepting = self._accepting(listener, limiter, where, profile, None)
            listeners.start_soon(_remove_after, accepting, where.path)
        elif plugin is not None:
            where = await self._listen_plugin(plugin, where, limiter, profile)
        else:
            if where.scheme == "sb":
                raise ConnectFailed(
                    f"cannot listen on {where}: that is a scheme of clients; use amqps://",
                    condition="amqp:invalid-field",
                )
            if where.tls and self._tls is None:
                raise ConnectFailed(
                    f"cannot listen on {where}: there is no certificate; pass tls=ServerTls(…)",
                    condition="amqp:invalid-field",
                )
            if where.scheme == "ws" and self._tls_required:
                raise ConnectFailed(
                    f"cannot listen on {where}: TLS is required, and ws:// has none; use wss://",
                    condition="amqp:invalid-field",
                )
            if where.scheme in ("ws", "wss"):
                # The first client would wait for this, and all others with it. Other listeners start faster without.
                from ..net import websocket as _websocket  # noqa: F401
            sockets = await open_tcp(where.host, where.port)
            proxied = None
            if proxy_protocol is not None:
                proxied = ProxiedArrivals(proxy_protocol, limiter)
            for each in sockets:
                listeners.start_soon(self._accepting(each, limiter, where, profile, proxied))
            host, port = bound_address(sockets[0])
            where = msgspec.structs.replace(where, host=where.host or host, port=port)
        self.urls.append(str(where))
        return str(where)

    async def _listen_plugin(
        self,
        transport: TransportPlugin,
        where: Url,
        limiter: ConnectionLimiter,
        profile: Profile | None,
    ) -> Url:
        """Listen at *where* with the *transport* of a plug-in; return the URL at which it is reached.

        Raises:
            ConnectFailed: It is not possible.
        """
        if self._tls_required and not transport.secure:
            raise ConnectFailed(
                f"cannot listen on {where}: TLS is required, and {where.scheme}:// is not encrypted",
                condition="amqp:invalid-field",
            )
        listener, where = await open_plugin(transport, where)
        self._home.listener_nursery.start_soon(
            partial(
                serve_socket,
                listener,
                limiter,
                partial(self.accept, secure=transport.secure, profile=profile),
                nursery=self._home.connection_nursery,
                peer_of=partial(peer_of, transport, where.scheme),
            )
        )
        return where

    async def open_door(
        self, host: str, port: int, serve: ServeDoor, *, tls: bool, nursery: trio.Nursery
    ) -> int:
        """Accept TCP connections of another protocol; see :meth:`Container.open_door`."""
        if tls and self._tls is None:
            raise ConnectFailed(
                f"cannot listen on {host or '*'}:{port}: there is no certificate; pass tls=ServerTls(…)",
                condition="amqp:invalid-field",
            )
        if self._tls_required and not tls:
            raise ConnectFailed(
                f"cannot listen on {host or '*'}:{port}: TLS is required, and this door has none",
                condition="amqp:invalid-field",
            )
        sockets = await open_tcp(host, port)
        limits = self._home.limits
        limiter = ConnectionLimiter(limits, self._crowd)
        door = Door(serve, self._tls if tls else None, limits.tls_handshake_s)
        for each in sockets:
            nursery.start_soon(partial(serve_socket, each, limiter, door.accept, nursery=nursery))
        return bound_address(sockets[0])[1]

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names of the mechanisms with which peers may log in at listeners without a profile."""
        return tuple(self._logins_of[None].mechanisms)

    @property
    def takes_tokens(self) -> bool:
        """Whether peers of listeners without a profile may put tokens, which give them their rights."""
        return self._logins_of[None].cbs is not None

    @property
    def takes_passwords_in_clear(self) -> bool:
        """Whether passwords may cross networks unencrypted."""
        return self._plain_in_clear

    def _accepting(
        self,
        listener: trio.SocketListener,
        limiter: ConnectionLimiter,
        where: Url,
        profile: Profile | None,
        proxied: ProxiedArrivals | None,
    ) -> Callable[[], Awaitable[None]]:
        """Return the task that accepts the connections of *listener* at *where*."""
        reactor = self._home.reactor
        plain = where.scheme == "amqp+unix" or (where.scheme == "amqp" and self._tls is None)
        if reactor is not None and proxied is None and plain:
            # Nothing but the peer's octets has to be waited for.
            arrivals = Arrivals(self, reactor, limiter, profile)
            return partial(accept_sockets, listener, arrivals.arrive)
        return partial(
            serve_socket,
            listener,
            limiter,
            partial(self.accept, scheme=where.scheme, path=where.path or "/", profile=profile),
            nursery=self._home.connection_nursery,
            proxied=proxied,
        )

    async def accept(
        self,
        stream: trio.abc.Stream,
        address: str = "",
        logged_in: Callable[[], None] = lambda: None,
        *,
        scheme: str = "amqp",
        path: str = "/",
        trusted: bool = False,
        profile: Profile | None = None,
        server_name: str = "",
        secure: bool = False,
        certificate: Certificate | None = None,
    ) -> None:
        """Run one connection that a peer opened, until it ends; then close *stream*.

        Faults of the peer or the network raise no exception.

        Args:
            stream: Any trio stream.
            address: The peer's address, for logs and for the limits by network.
            logged_in: Called once the peer is authenticated, or if that is not required.
            scheme: The expected outermost protocol: ``amqp``, ``amqps``, ``ws`` or ``wss``.
            path: Path of a WebSocket.
            trusted: The peer need not log in, and has no profile.
            profile: Profile of the connection; None for that of all listeners.
            server_name: Host name that a proxy says the client requested; that of TLS with us wins.
            secure: The stream is encrypted already: the peer stands for a user of another protocol, which runs over
                TLS, or a transport of a plug-in does it.
            certificate: The certificate that this user has presented there.
        """
        since = trio.current_time()
        entrance = ListenerPolicy(
            fronts=self.fronts,
            scheme=scheme,
            tls=self._tls,
            tls_required=self._tls_required and not trusted and not secure,
            path=path,
            origins=self._origins,
            limits=self._home.limits,
            edges=self.edges,
        )
        entered = await enter(stream, entrance, address=address or "a peer")
        if entered is None:
            return
        if self._home.stopping:
            entered.left()
            await trio.aclose_forcefully(entered.stream)
            return
        connection = self._connection(
            entered.front,
            address,
            since,
            secure=entered.secure or secure,
            certificate=entered.certificate or certificate,
            server_name=entered.server_name or server_name,
            trusted=trusted,
            profile=None if trusted else profile or self.profile,
        )
        engine = connection.engine
        self._accepted[engine] = connection

        def known() -> None:
            entered.trust()
            logged_in()

        self._strangers[engine] = known
        traces: list[Traced] = []
        try:
            await run_connection(
                entered.stream,
                self.traced(engine, traces),
                connection.handle,
                limits=self._home.limits,
                initial=entered.received,
                reactor=self._home.reactor,
            )
        except Exception:
            # A fault of ours: it must not end the other connections.
            log.exception("the connection from %s broke", address or "a peer")
        finally:
            for each in traces:
                each.stop()
            entered.left()
            self.ended(connection)

    def begin(
        self,
        front: Front,
        address: str,
        since: float,
        profile: Profile | None,
        admission: Admission,
    ) -> Connection | None:
        """Begin a connection that the reactor carries; see :class:`~.arrivals.ArrivalHome`."""
        if self._home.stopping:
            return None
        connection = self._connection(front, address, since, profile=profile or self.profile)
        engine = connection.engine
        self._accepted[engine] = connection
        self._strangers[engine] = admission.log_in
        return connection

    def traced(self, engine: ProtocolEngine, traces: list[Traced]) -> ProtocolEngine:
        """Return *engine* with its traces, if there are any, which are appended to *traces*."""
        home = self._home
        if home.traces is None and not home.frame_watches:
            return engine
        for source in (home.traces, home.frame_watches):
            found = trace(source, engine, client=False, clock=TRIO_CLOCK)
            if found is not None:
                traces.append(found)
                engine = found
        return engine

    def _connection(
        self,
        front: Front,
        address: str,
        since: float,
        *,
        secure: bool = False,
        certificate: Certificate | None = None,
        server_name: str = "",
        trusted: bool = False,
        profile: Profile | None,
    ) -> Connection:
        """Create the connection of a stream on which a front's header has arrived.

        The time for the handshake counts from *since*, the peer's dialling.
        """
        logins = self._logins_of[profile]
        limits = logins.limits
        if trusted:
            # The other end is ours, and keeps within its limits.
            limits = msgspec.structs.replace(limits, channel_max=_CHANNEL_MAX)
        self.timers.watch(front)
        capabilities = logins.capabilities
        for host in self._home.hosts:
            if host.capabilities:
                capabilities = (*capabilities, *map(Symbol, host.capabilities))
        properties = dict(self.open_properties)
        if profile is not None:
            properties.update(profile.properties)
        engine = front.server(
            ServerOptions(
                container_id=self._home.name,
                limits=limits,
                mechanisms=self._offers(logins, address, secure, certificate is not None),
                sasl_required=not trusted and logins.required,
                address=address,
                channel_max_for=self._channel_max_for
                if self.channel_max_for and not trusted
                else None,
                offered_capabilities=capabilities,
                topology=self.topology,
                branches=self.branches,
                properties=properties,
                echo_addresses=profile is not None and profile.echo_addresses,
                whole_errors=profile is not None and profile.whole_errors,
                whole_frames=profile is not None and profile.whole_frames,
            ),
            since,
        )
        peer = engine.peer
        peer.secure = secure
        peer.certificate = certificate
        # The host name of TLS applies if neither login nor open names one (Part 2 §2.7.1).
        peer.virtual_host = peer.server_name = server_name
        peer.trusted = trusted
        peer.profile = profile
        return Connection(self._home, engine, dialled=False)

    def ended(self, connection: Connection) -> None:
        """Remove all state of *connection*, which has ended."""
        engine = connection.engine
        if connection.stood:
            error = connection.ended_with
            self._log_connection(
                "connection closed",
                connection,
                "" if error is None else f": {error_text(error)}",
            )
        if connection in self._counted:
            self._counted.remove(connection)
            self._home.tallies.closed.add(connection.peer.protocol)
        self._accepted.pop(engine, None)
        self._strangers.pop(engine, None)
        self._namesakes.leave(connection)
        self._logins.pop(engine, None)
        if (judging := self._judging.pop(engine, None)) is not None:
            judging.cancel()
        if (watch := self._watches.pop(connection, None)) is not None:
            watch.stop()
        self._home.attaching.connection_ended(engine)

    def opened(self, connection: Connection) -> bool:
        """Handle the peer's open, which follows its login.

        The peer counts as known from here, unless it has to put a token first.

        Returns:
            False if the connection was closed: its virtual host does not exist, it has no right there
                although its protocol asks for one, it conflicts with another one over being the only one
                of its container, or its user has too many.
        """
        peer = connection.peer
        asked = peer.virtual_host
        found = self._virtual_host_of(peer)
        if found is None:
            connection.engine.close(_unknown_host(asked))
            return False
        # Use the virtual host's own name from now on, not an alias that the peer used.
        peer.virtual_host = found
        watch = self._watch_of(connection)
        if peer.enters_by_right and self._home.permissions.decide_anywhere(peer) is not None:
            self._log_connection("connection refused", connection, ": no right in its virtual host")
            # The answer is that for an unknown virtual host, so that strangers cannot probe for them.
            connection.engine.close(_unknown_host(asked))
            return False
        owes = watch is not None and not self._home.permissions.has_any(peer)
        # An unauthenticated peer without rights must not lock out a container by using its name.
        if not (owes and peer.user is None) and not self._enter(connection):
            return False
        if watch is not None:
            # Tokens that came with the login may expire like any other.
            by_login = self._home.permissions.has_any_by_login(peer)
            self._home.start_connection(partial(watch.run, owes=not by_login, known=not owes))
        if not owes:
            self._mark_authenticated(connection)
        self._log_connection("connection opened", connection, "")
        self._counted.add(connection)
        self._home.tallies.opened.add(peer.protocol)
        if self.on_opened is not None:
            self.on_opened(connection)
        return True

    def _virtual_host_of(self, peer: Peer) -> str | None:
        """Return the own name of the virtual host that *peer* asks for; None if there is none."""
        name = peer.virtual_host
        for host in self._home.hosts:
            found = host.virtual_host(name)
            if found is None and not peer.trusted:
                return None
            name = found or ""
        return name

    def _channel_max_for(self, peer: Peer) -> int:
        """Return the highest channel number for *peer*, whose open has arrived and was not handled yet."""
        asked, found = peer.virtual_host, self._virtual_host_of(peer)
        most = None
        if found is not None and self.channel_max_for is not None:
            # Rights are those in the virtual host, by its own name.
            peer.virtual_host = found
            most = self.channel_max_for(peer)
            peer.virtual_host = asked
        return self._logins_of[peer.profile].limits.channel_max if most is None else most

    def _log_connection(self, event: str, connection: Connection, why: str) -> None:
        """Log *event* of a connection that a peer opened, limited for each network."""
        if not log.isEnabledFor(logging.INFO):
            return
        peer = connection.peer
        key = (event, network_of(host_in(peer.address)))
        left_out = self._home.log_limiter.admit(key, trio.current_time())
        if left_out is not None:
            log.info(
                "%s: from %s, container %.100r, user %.100r%s%s",
                event,
                peer.address or "this process",
                peer.container_id,
                peer.user,
                why,
                left_out,
            )

    def _admit_by_token(self, connection: Connection) -> bool:
        """Admit a peer that had no rights before its first token; return False if it was closed."""
        if connection.peer.user is None and not self._enter(connection):
            return False
        self._mark_authenticated(connection)
        return True

    def _enter(self, connection: Connection) -> bool:
        """Count *connection* for its container and user; close it and return False if refused."""
        peer = connection.peer
        if peer.trusted or (error := self._namesakes.enter(connection, peer)) is None:
            return True
        connection.engine.close(error)
        return False

    def _watch_of(self, connection: Connection) -> TokenWatch | None:
        """Return the token watch of *connection*, creating it; None if it takes no tokens."""
        peer = connection.peer
        cbs = self._logins_of[peer.profile].cbs
        if cbs is None or peer.trusted:
            return None
        watch = self._watches.get(connection)
        if watch is None:
            watch = self._watches[connection] = TokenWatch(connection, cbs, self._admit_by_token)
            peer.tokens = watch.tokens
        return watch

    def _keep_tokens(self, connection: Connection, login: Success) -> Success | Failure:
        """Keep the tokens of *login* for *connection*, as if put (CBS draft §4.2.2)."""
        if not login.tokens or connection.engine not in self._accepted:
            return login
        watch = self._watch_of(connection)
        if watch is None:
            return Failure("the login has tokens, and none are taken here: pass cbs=Cbs(…)")
        try:
            for token in login.tokens:
                watch.keep(token)
        except AmqpError as error:
            return Failure(f"a token was refused: {error.description}")
        return login

    def _mark_authenticated(self, connection: Connection) -> None:
        """Stop counting the peer as a stranger: it is authenticated."""
        logged_in = self._strangers.pop(connection.engine, None)
        if logged_in is not None:
            logged_in()

    async def answer_cbs(self, message: Message, connection: Connection) -> Message | Accepted:
        """Answer a request to ``$cbs``.

        Raises:
            AmqpError: The connection takes no tokens.
            RaisedOutcome: A ``set-token`` is refused.
        """
        watch = self._watches.get(connection)
        if watch is None:
            raise AmqpError("this connection needs no tokens", condition="amqp:not-allowed")
        return await answer_cbs(message, watch)

    async def renew_token(self, carrier: object, text: str) -> None:
        """Replace all tokens of a connection by the one in *text*, whose rights it has from then on.

        Args:
            carrier: What links of the connection have as their ``connection``.
            text: The token. Its subject is the user of the login, if that had one.

        Raises:
            TokenRefused: The token is not accepted. The connection keeps those that it has.
            AmqpError: The connection takes no tokens.
        """
        connection = self._accepted.get(carrier)
        watch = None if connection is None else self._watches.get(connection)
        if watch is None:
            raise AmqpError("this connection needs no tokens", condition="amqp:not-allowed")
        await watch.renew(text)

    def start_login(self, connection: Connection, event: LoginRequested) -> None:
        """Check a client's login: at once if all are admitted, else in a task of its connection."""
        logins = self._logins_of[connection.engine.peer.profile]
        mechanism = logins.mechanisms.get(event.mechanism)
        # A subclass may admit only some.
        if type(mechanism) is AnonymousServer and not event.exchange.refused:
            self._admit_login(connection, event, Success(None))
        else:
            self._home.start_connection(partial(self._login_while_there, connection, event))

    def _admit_login(self, connection: Connection, event: LoginRequested, step: Success) -> None:
        if self._logins_of[connection.engine.peer.profile].cbs is None:
            self._mark_authenticated(connection)
        connection.handle(event.exchange.succeed(step.user, step.identity, step.data))

    async def _login_while_there(self, connection: Connection, event: LoginRequested) -> None:
        """Check a login until it is answered or the connection ends.

        Otherwise a peer that reconnects repeatedly leaves a running check behind each time, which
        delays the checks of other peers.
        """
        engine = connection.engine
        if engine not in self._accepted:
            return
        with trio.CancelScope() as scope:
            self._judging[engine] = scope
            await self._login(connection, event)
        if self._judging.get(engine) is scope:
            del self._judging[engine]

    async def _login(self, connection: Connection, event: LoginRequested) -> None:
        """Check one step of a client's login (Part 5 §5.3).

        Every failure gets the same answer after the same delay, so that neither reveals the cause.
        """
        engine = connection.engine
        logins = self._logins_of[engine.peer.profile]
        began = trio.current_time()
        step: Challenge | Success | Failure
        if event.exchange.refused:
            step = Failure(event.exchange.refused)
        else:
            mechanism = self._logins.get(engine)
            if mechanism is None:
                mechanism = logins.mechanisms[event.mechanism]
                begin = getattr(mechanism, "begin", None)
                mechanism = self._logins[engine] = mechanism if begin is None else begin()
            try:
                step = await mechanism.respond(event.response, engine.peer)
            except Exception:
                log.exception("%s failed on a login", event.mechanism)
                step = Failure("the mechanism failed")
            if isinstance(step, Success):
                step = self._keep_tokens(connection, step)
        if isinstance(step, Challenge):
            connection.handle(event.exchange.challenge(step.data))
        elif isinstance(step, Success):
            self._admit_login(connection, event, step)
        else:
            address = engine.peer.address
            # A name of the peer's own choice would take the place of one that is offered.
            offered = event.mechanism in logins.mechanisms
            self._home.tallies.logins_failed.add(event.mechanism if offered else OTHER)
            log.warning("login from %s failed: %s", address, printable(step.why, _WHY_MAX))
            who = [
                f"address {network_of(host_in(address))}",
                *([f"user {step.user:.{_WHY_MAX}}"] if step.user else []),
            ]
            delay = self._backoff.failed(who, began)
            # The answer does not depend on the time that the check took.
            await trio.sleep_until(began + delay)
            event.exchange.fail()

    def _is_blocked(self, network: str) -> bool:
        return bool(self._backoff) and self._backoff.blocks(
            f"address {network}", trio.current_time()
        )


async def _remove_after(task: Callable[[], Awaitable[None]], path: str) -> None:
    """Run *task*, and remove the file at *path* at its end."""
    try:
        await task()
    finally:
        with suppress(OSError):
            os.unlink(path)


def _unknown_host(name: str) -> Error:
    """Return the error for an open of the virtual host *name*, which is not there for the peer."""
    return Error("amqp:not-found", f"there is no virtual host {name!r:.100}")


def _capabilities(cbs: Cbs | None) -> tuple[Symbol, ...]:
    """Return the capabilities that we offer in our open."""
    names = [ANONYMOUS_RELAY, LINK_PAIR_CAPABILITY, SOLE_CONNECTION]
    if cbs is not None:
        names.append(CBS_CAPABILITY)
    return tuple(Symbol(name) for name in names)


def _is_local(address: str) -> bool:
    """Whether a peer with *address* is on this machine."""
    if address == "unix" or address.startswith("memory://"):
        return True
    try:
        return is_loopback(host_in(address))
    except ValueError:
        return False
