"""The host under test: connections to it, and queues for the checks."""

from __future__ import annotations

import socket
import ssl
from secrets import token_hex
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from amqp_rt.net.traces.octets import HEADER, SASL_HEADER, composite

from .links import QUIET_S
from .peers import Peer
from .verdicts import Departs, NotOffered, require

#: Messages removed at most when a queue is emptied before a check.
_LEFT_MAX: Final = 10_000


class Unreachable(Exception):
    """No check can run: the host is not reachable or refuses the login. The text has the remedy."""


class Options(Struct, frozen=True):
    """Address of the host, and credentials."""

    url: str
    user: str | None = None
    password: str | None = None
    #: Address of an existing queue; ``{}`` in it is replaced by a new name for each check.
    address: str | None = None
    #: Seconds that the host may take for an answer.
    patience_s: float = 5.0


class Host:
    """An AMQP host, for one run of the kit.

    Raises:
        Unreachable: The URL is not an AMQP URL.
    """

    def __init__(self, options: Options) -> None:
        parts = urlsplit(options.url)
        if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
            raise Unreachable(
                f"{options.url!r} is not the URL of an AMQP host: pass amqp://HOST:PORT or "
                "amqps://HOST:PORT"
            )
        try:
            port = parts.port
        except ValueError:
            raise Unreachable(f"{options.url!r} has a port that is none") from None
        self.tls = parts.scheme == "amqps"
        self.name = parts.hostname
        self.port = port or (5671 if self.tls else 5672)
        #: URL without the password.
        self.url = f"{parts.scheme}://{self.name}:{self.port}"
        self.user = options.user if options.user is not None else _unquoted(parts.username)
        password = options.password if options.password is not None else _unquoted(parts.password)
        self.password = password or ""
        self.patience_s = options.patience_s
        #: Address of the queue used by checks, with ``{}`` for a queue per check; None if each
        #: check creates a dynamic node.
        self.queues = options.address
        #: Fields of the host's open on the first connection.
        self.greeting: dict[str, Any] = {}
        self._peers: list[Peer] = []
        self._cleared = False

    # --- --- connecting ------------------------------------------------------------------------

    def greet(self) -> None:
        """Connect once, and find out how checks get their queues.

        Raises:
            Unreachable: The host is not reachable, refuses the login, or has no queue for us.
        """
        try:
            peer = self.connect()
            self.greeting = dict(peer.greeting)
            peer.begin()
            if self.queues is None:
                self._find_queues(peer)
            elif (
                error := self._refusal(peer, address := self.queues.replace("{}", token_hex(6)))
            ) is not None:
                raise Unreachable(
                    f"{self.url} has no queue {address!r} for us: {error}. Name one that "
                    "exists with --amqp-address."
                )
        except Departs as departure:
            raise Unreachable(
                f"{self.url} does not get as far as to a session, so that nothing else can be "
                f"checked: {departure.seen}"
            ) from None
        finally:
            self.hang_up()

    def _find_queues(self, peer: Peer) -> None:
        name = f"amqp-rt-conformance-{token_hex(4)}"
        error = self._refusal(peer, name)
        if error is None:
            self.queues = name
            return
        self.hang_up()
        peer = self.connect()
        peer.begin()
        try:
            peer.receiver(composite("source", dynamic=True)).close()
        except (Departs, NotOffered) as refused:
            raise Unreachable(
                f"{self.url} creates no queue {name!r} ({error}) and offers no "
                f"dynamic nodes ({refused}). Name a queue that exists with --amqp-address; "
                "its messages are deleted."
            ) from None

    def _refusal(self, peer: Peer, address: str) -> str | None:
        """Return why the host refuses links to queue *address*, None if it accepts them."""
        try:
            peer.sender(address)
            peer.receiver(address)
        except NotOffered as refused:
            return str(refused)
        except Departs as departure:
            return departure.seen
        return None

    def dial(self) -> Peer:
        """Open a connection without sending anything.

        Raises:
            Unreachable: The TCP or TLS connection fails.
        """
        try:
            wire = socket.create_connection((self.name, self.port), self.patience_s)
        except OSError as error:
            raise Unreachable(
                f"no connection to {self.name}:{self.port}: {error.strerror or error}. Does "
                "the host run, and is this its port for AMQP?"
            ) from None
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls:
            try:
                wire = ssl.create_default_context().wrap_socket(wire, server_hostname=self.name)
            except OSError as error:
                wire.close()
                raise Unreachable(
                    f"no TLS with {self.name}:{self.port}: {error}. SSL_CERT_FILE names the "
                    "authorities to trust."
                ) from None
        peer = Peer(self, wire)
        self._peers.append(peer)
        return peer

    def log_in(self) -> Peer:
        """Open a connection and complete the SASL layer, if the host has one.

        Raises:
            Unreachable: The host refuses the login.
        """
        peer = self.dial()
        peer.raw(SASL_HEADER)
        answer = peer.hear("header")
        if answer.payload == HEADER:
            # The host has no SASL layer, and has closed this stream.
            if self.user is not None:
                raise Unreachable(f"{self.url} has no SASL, so leave the user name out")
            return self.dial()
        require(answer.payload == SASL_HEADER, f"the header of SASL is answered by {answer!r}")
        offered = _several(peer.hear("sasl_mechanisms").fields.get("sasl_server_mechanisms"))
        mechanism = "ANONYMOUS" if self.user is None else "PLAIN"
        if mechanism not in offered:
            raise Unreachable(
                f"{self.url} offers the SASL mechanisms {', '.join(offered) or 'none'}, and "
                f"{mechanism} is needed "
                + (
                    "without a user: pass --amqp-user and --amqp-password"
                    if self.user is None
                    else "for a user and a password; some hosts offer it over TLS only"
                )
            )
        peer.send("sasl_init", mechanism=mechanism, initial_response=self.response(), hostname=self.name)  # fmt: skip
        outcome = peer.hear("sasl_outcome")
        if outcome.fields.get("code") != 0:
            who = f"the user {self.user!r}" if self.user is not None else "anonymous clients"
            raise Unreachable(f"{self.url} does not let {who} in (SASL code {outcome.fields.get('code')})")  # fmt: skip
        return peer

    def response(self) -> bytes:
        """Return the initial response of our mechanism."""
        if self.user is None:
            return b"conformance"
        return f"\0{self.user}\0{self.password}".encode()

    def connect(self, **fields: Any) -> Peer:
        """Open a connection and exchange open frames; *fields* go into ours."""
        peer = self.log_in()
        peer.raw(HEADER)
        peer.open(**fields)
        answer = peer.hear("header")
        require(answer.payload == HEADER, f"our header is answered by {answer.payload!r}")
        peer.greeting = peer.hear("open").fields
        return peer

    def session(self, **fields: Any) -> Peer:
        """Open a connection with a session on channel 0; *fields* go into our begin."""
        peer = self.connect()
        peer.begin(**fields)
        return peer

    # --- queues --------------------------------------------------------------------------------

    def queue(self, peer: Peer) -> str:
        """Return the address of an empty queue for this check, which exists as long as *peer*.

        *peer* needs a session on channel 0.
        """
        if self.queues is not None and "{}" in self.queues:
            return self.queues.replace("{}", token_hex(6))
        if self.queues is None:
            # This link never gets credit; it keeps the node alive.
            return peer.receiver(composite("source", dynamic=True), handle=7).address
        if not self._cleared:
            self._cleared = True
            self._clear(self.queues)
        return self.queues

    def _clear(self, address: str) -> None:
        cleaner = self.session()
        source = cleaner.receiver(address)
        source.flow(_LEFT_MAX, drain=True)
        # Do not wait for the flow that ends a drain: some hosts send it before the messages.
        number = 0
        while (frame := cleaner.next(QUIET_S)) is not None:
            if frame.name == "transfer":
                number = frame.fields.get("delivery_id", number)
                if not frame.fields.get("more"):
                    cleaner.send("disposition", role="receiver", first=number, settled=True, state="accepted")  # fmt: skip
        cleaner.close()

    # --- --- end of a check --------------------------------------------------------------------

    def hang_up(self) -> None:
        """Close all connections of the finished check."""
        self._cleared = False
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()


def _unquoted(text: str | None) -> str | None:
    return None if text is None else unquote(text)


def _several(value: Any) -> list[Any]:
    """Return the values of a field that may have several (Part 1 §1.4)."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
