"""The host under test, and connections to it on which the check controls every octet.

A connection waits only for frames that the check expects. It uses the second codec of the package
(``..octets``) and tracks the few numbers that the standard requires of a peer; checks may break any
rule.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from secrets import token_hex
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct, field

from amqp_rt.net.traces.octets import (
    HEADER,
    SASL_HEADER,
    CompositeValue,
    Frame,
    Malformed,
    Splitter,
    composite,
    decode,
    encode,
    encode_frame,
)

from .verdicts import Departs, NotOffered, require

__all__ = [
    "Delivery",
    "Gone",
    "Host",
    "Incoming",
    "Options",
    "Outgoing",
    "Peer",
    "Unreachable",
    "body_of",
    "message",
    "section",
    "sections_of",
]

#: Seconds to wait where the host must not send anything.
QUIET_S: Final = 0.2
_READ: Final = 65_536
#: Our incoming-window, in transfers; no check receives as many.
_WINDOW: Final = 100_000
#: Messages removed at most when a queue is emptied before a check.
_LEFT_MAX: Final = 10_000
#: Frames to skip while another one is expected.
_IN_PASSING: Final = frozenset({"empty", "flow"})


class Unreachable(Exception):
    """No check can run: the host is not reachable or refuses the login. The text has the remedy."""


class Gone(Departs):
    """The host has ended the stream."""


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


class Channel(Struct):
    """State of a session (Part 2 §2.5.6)."""

    #: Transfer-id of our next transfer.
    next_outgoing_id: int = 0
    #: Transfer-id of the host's next transfer.
    next_incoming_id: int = 0
    next_delivery_id: int = 0
    #: Fields of the host's begin.
    begin: dict[str, Any] = {}
    senders: dict[int, Outgoing] = field(default_factory=dict)
    #: The host's dispositions of our deliveries, by delivery-id.
    outcomes: dict[int, Frame] = field(default_factory=dict)


class Peer:
    """Our end of one connection."""

    def __init__(self, host: Host, wire: socket.socket) -> None:
        self.host = host
        self.patience_s = host.patience_s
        #: Fields of the host's open.
        self.greeting: dict[str, Any] = {}
        #: Our channel → session.
        self.channels: dict[int, Channel] = {}
        #: The host's channel → ours.
        self._ours: dict[int, int] = {}
        self._wire = wire
        self._splitter = Splitter()
        self._frames: list[Frame] = []
        #: Frames that arrived while another one was expected.
        self._aside: list[Frame] = []
        self._over = False

    # --- --- sending ---------------------------------------------------------------------------

    def raw(self, octets: bytes) -> None:
        """Send octets as they are."""
        try:
            self._wire.settimeout(self.patience_s)
            self._wire.sendall(octets)
        except OSError:
            # The reason has arrived before, or the next read reports the end of the stream.
            pass

    def send(self, name: str, /, *, channel: int = 0, payload: bytes = b"", **fields: Any) -> None:
        """Send a performative with exactly these fields."""
        self.raw(encode_frame(composite(name, **fields), channel=channel, payload=payload))

    def open(self, **fields: Any) -> None:
        """Send open; fields that are None are left out."""
        self.send("open", **{"container_id": f"kit-{token_hex(4)}", "hostname": self.host.name, **fields})  # fmt: skip

    def begin(self, channel: int = 0, **fields: Any) -> Frame:
        """Begin a session and return the host's begin.

        Raises:
            Departs: The answer is missing, or for another channel.
        """
        whole = {
            "next_outgoing_id": 0,
            "incoming_window": _WINDOW,
            "outgoing_window": _WINDOW,
            **fields,
        }
        self.expect_channel(channel, whole["next_outgoing_id"])
        self.send("begin", channel=channel, **whole)
        answer = self.hear("begin")
        require(
            answer.fields.get("remote_channel") == channel,
            f"our begin on channel {channel} is answered by {answer!r}",
        )
        return answer

    def expect_channel(self, channel: int, next_outgoing_id: int = 0) -> None:
        """Track the numbers of a session that we begin on *channel*."""
        self.channels[channel] = Channel(next_outgoing_id, next_delivery_id=next_outgoing_id)

    def flow(self, channel: int = 0, **fields: Any) -> None:
        """Send flow with the current numbers of the session."""
        known = self.channels[channel]
        self.send(
            "flow",
            channel=channel,
            **{
                "next_incoming_id": known.next_incoming_id,
                "incoming_window": _WINDOW,
                "next_outgoing_id": known.next_outgoing_id,
                "outgoing_window": _WINDOW,
                **fields,
            },
        )

    # --- links ---------------------------------------------------------------------------------

    def attach(self, role: str, *, channel: int = 0, handle: int = 0, **fields: Any) -> Frame:
        """Send attach and return the host's attach.

        Raises:
            NotOffered: The host refuses the link (Part 2 §2.6.3), or ends the session for it.
        """
        sends = role == "sender"
        name = fields.setdefault("name", f"link-{token_hex(4)}")
        if sends:
            fields.setdefault("initial_delivery_count", 0)
        self.send("attach", channel=channel, handle=handle, role=role, **fields)
        answer = self.hear("attach", "end", "close", passing={*_IN_PASSING, "disposition"})
        if answer.name != "attach":
            raise NotOffered(f"the host answers attach with {error_of(answer)}")
        require(answer.fields.get("name") == name, f"attach of {name!r} is answered by {answer!r}")
        require(
            bool(answer.fields.get("role")) is sends,
            f"attach of a {role} is answered by one in the same role",
        )
        if answer.fields.get("target" if sends else "source") is None:
            refusal = self.hear("detach", "end", "close", passing={*_IN_PASSING, "disposition"})
            raise NotOffered(error_of(refusal))
        return answer

    def sender(self, target: Any, *, channel: int = 0, handle: int = 0, **fields: Any) -> Outgoing:
        """Attach a link that we send on.

        Raises:
            NotOffered: The host refuses it; the text is its error.
        """
        fields = {"source": composite("source"), "target": target, **fields}
        count = fields.setdefault("initial_delivery_count", 0)
        # Credit may arrive together with the attach.
        link = Outgoing(self, channel, handle, {}, count)
        waiting = self.channels[channel].senders
        waiting[-1 - handle] = link
        try:
            link.answer = self.attach("sender", channel=channel, handle=handle, **fields).fields
        finally:
            waiting.pop(-1 - handle, None)
        waiting[int(link.answer["handle"])] = link
        return link

    def receiver(
        self, source: Any, *, channel: int = 0, handle: int = 1, **fields: Any
    ) -> Incoming:
        """Attach a link that we receive on, without credit.

        Raises:
            NotOffered: The host refuses it; the text is its error.
        """
        fields = {"source": source, "target": composite("target"), **fields}
        answer = self.attach("receiver", channel=channel, handle=handle, **fields).fields
        return Incoming(self, channel, handle, answer, answer.get("initial_delivery_count", 0))

    # --- --- receiving -------------------------------------------------------------------------

    def next(self, within: float | None = None) -> Frame | None:
        """Return the next frame, None if none arrives in time.

        Raises:
            Gone: The host has ended the stream.
            Departs: The octets are not AMQP.
        """
        if self._aside:
            return self._aside.pop(0)
        until = time.monotonic() + (self.patience_s if within is None else within)
        while not self._frames:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._read(left)
        frame = self._frames.pop(0)
        if frame.fault:
            raise Departs(f"the host writes {frame!r}")
        self._note(frame)
        return frame

    def _read(self, within: float) -> None:
        if self._over:
            raise Gone("the host has ended the stream")
        self._wire.settimeout(within)
        try:
            data = self._wire.recv(_READ)
        except (TimeoutError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if not data:
            self._over = True
        self._frames += self._splitter.feed(data)

    def _note(self, frame: Frame) -> None:
        fields = frame.fields
        if frame.name == "begin" and "remote_channel" in fields:
            ours = fields["remote_channel"]
            self._ours[frame.channel] = ours
            if (begun := self.channels.get(ours)) is not None:
                begun.begin = fields
                begun.next_incoming_id = fields.get("next_outgoing_id", 0)
            return
        channel = self.channels.get(self._ours.get(frame.channel, -1))
        if channel is None:
            return
        if frame.name == "transfer":
            channel.next_incoming_id = (channel.next_incoming_id + 1) % 2**32
        elif frame.name == "flow" and fields.get("handle") in channel.senders:
            channel.senders[fields["handle"]].granted(fields)
        elif frame.name == "disposition" and fields.get("role") is True:
            first = fields.get("first", 0)
            count = (fields.get("last", first) - first) % 2**32 + 1
            for step in range(min(count, _WINDOW)):
                channel.outcomes[(first + step) % 2**32] = frame

    def hear(
        self,
        *names: str,
        within: float | None = None,
        passing: frozenset[str] | set[str] = _IN_PASSING,
    ) -> Frame:
        """Return the next frame of *names*, skipping those of *passing*.

        Raises:
            Departs: Another frame arrives, or none in time.
        """
        wanted = " or ".join(names)
        patience = self.patience_s if within is None else within
        until = time.monotonic() + patience
        while True:
            try:
                frame = self.next(until - time.monotonic())
            except Gone:
                raise Gone(f"{wanted} is expected, and the host ends the stream") from None
            if frame is None:
                raise Departs(f"{wanted} is expected, and nothing arrives in {patience:g} s")
            if frame.name in names:
                return frame
            if frame.name not in passing:
                raise Departs(f"{wanted} is expected, and {shown(frame)} arrives")

    def put_aside(self, frames: list[Frame]) -> None:
        """Queue *frames*, which arrived too early, before all others."""
        self._aside = frames + self._aside

    def silence(self, seconds: float = QUIET_S, *, passing: frozenset[str] = _IN_PASSING) -> None:
        """Check that only frames of *passing* arrive for *seconds*.

        Raises:
            Departs: Another frame arrives.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            frame = self.next(left)
            if frame is not None and frame.name not in passing:
                raise Departs(f"nothing is expected, and this arrives: {shown(frame)}")

    def gone(self) -> None:
        """Check that the host ends the stream; frames before the end are ignored.

        Raises:
            Departs: It does not, in time.
        """
        until = time.monotonic() + self.patience_s
        try:
            while (left := until - time.monotonic()) > 0:
                self.next(left)
        except Gone:
            return
        raise Departs(f"the host does not end the stream in {self.patience_s:g} s")

    def fault(self, *names: str, conditions: tuple[str, ...] = ()) -> Frame:
        """Return the frame of *names* by which the host reports an error.

        Args:
            names: ``detach``, ``end`` or ``close``: the scopes that the error may have.
            conditions: Conditions that the standard allows; none means any.

        Raises:
            Departs: No error arrives, or one of another scope or condition.
        """
        over = {*_IN_PASSING, "attach", "begin", "open", "disposition"} - set(names)
        wanted = " or ".join(names)
        try:
            frame = self.hear(*names, *({"detach", "end", "close"} - set(names)), passing=over)
        except Gone:
            raise Departs(f"the host ends the stream without {wanted}") from None
        require(frame.name in names, f"{wanted} is expected, and {shown(frame)} arrives")
        error = frame.fields.get("error")
        require(error is not None, f"the host sends {frame.name} without an error")
        condition = error.fields.get("condition") if isinstance(error, CompositeValue) else error
        require(
            not conditions or condition in conditions,
            f"the host sends {frame.name} with {condition}, expected {' or '.join(conditions)}",
        )
        return frame

    def echo(self, channel: int = 0) -> Frame:
        """Request an echo for the session, without a link, and return the answer.

        Raises:
            Departs: No answer arrives.
        """
        self.flow(channel, echo=True)
        return self.hear("flow", passing={"empty", "disposition"})

    def alive(self, channel: int = 0) -> None:
        """Check that the session still works: it can be ended without an error.

        Raises:
            Departs: The host ended it with an error, or does not answer.
        """
        self.send("end", channel=channel)
        frame = self.hear("end", passing=_IN_PASSING | {"disposition", "transfer", "detach"})
        require(frame.fields.get("error") is None, f"the session goes on, but for {shown(frame)}")

    def close(self) -> None:
        """Close the connection, and wait up to a second for the host's close."""
        if not self._over:
            self.send("close")
        until = time.monotonic() + 1
        while not self._over and (left := until - time.monotonic()) > 0:
            self._frames.clear()
            try:
                self._read(left)
            except Departs:
                break
            if any(frame.name == "close" for frame in self._frames):
                break
        self._wire.close()
        self._over = True

    def cut(self) -> None:
        """Close the stream without closing the connection first."""
        self._wire.close()
        self._over = True


class Outgoing(Struct):
    """A link on which we send."""

    peer: Peer
    channel: int
    handle: int
    #: Fields of the host's attach.
    answer: dict[str, Any]
    #: Our delivery-count.
    count: int
    #: Deliveries that we may still send.
    credit: int = 0

    @property
    def address(self) -> str:
        """Address of the target, from the host's attach."""
        return _address(self.answer, "target")

    def granted(self, flow: dict[str, Any]) -> None:
        """Apply the credit of the host's flow (Part 2 §2.6.7)."""
        seen = flow.get("delivery_count")
        limit = (self.count if seen is None else seen) + flow.get("link_credit", 0)
        self.credit = (limit - self.count) % 2**32

    def wait(self) -> None:
        """Wait until the host grants credit.

        Raises:
            Departs: It does not, in time.
        """
        while not self.credit:
            frame = self.peer.hear(
                "flow", "detach", "end", "close", passing={"empty", "disposition"}
            )
            require(
                frame.name == "flow",
                f"a link that may send is expected, and {shown(frame)} arrives",
            )

    def begin(self, tag: bytes | None = None, payload: bytes = b"", **fields: Any) -> int:
        """Send the first transfer of a delivery and return its delivery-id.

        With ``more=True`` other transfers follow.
        """
        self.wait()
        known = self.peer.channels[self.channel]
        number = known.next_delivery_id
        known.next_delivery_id = (number + 1) % 2**32
        self.count = (self.count + 1) % 2**32
        self.credit -= 1
        fields = {
            "delivery_id": number,
            "delivery_tag": token_hex(4).encode() if tag is None else tag,
            "message_format": 0,
            **fields,
        }
        self.go_on(payload, **fields)
        return number

    def go_on(self, payload: bytes = b"", **fields: Any) -> None:
        """Send another transfer of the delivery."""
        known = self.peer.channels[self.channel]
        known.next_outgoing_id = (known.next_outgoing_id + 1) % 2**32
        self.peer.send("transfer", channel=self.channel, payload=payload, handle=self.handle, **fields)  # fmt: skip

    def send(self, payload: bytes, **fields: Any) -> int:
        """Send a delivery of one transfer and return its delivery-id."""
        return self.begin(payload=payload, **fields)

    def outcome(self, number: int) -> Frame:
        """Return the host's disposition of a delivery.

        Raises:
            Departs: None arrives in time.
        """
        outcomes = self.peer.channels[self.channel].outcomes
        # The message itself may be forwarded to us before its disposition.
        early = []
        while number not in outcomes:
            frame = self.peer.hear("disposition", "transfer")
            if frame.name == "transfer":
                early.append(frame)
        self.peer.put_aside(early)
        return outcomes[number]

    def accepted(self, number: int) -> None:
        """Check that the host accepts and settles a delivery.

        Raises:
            Departs: It does not.
        """
        frame = self.outcome(number)
        state = frame.fields.get("state")
        require(
            isinstance(state, CompositeValue) and state.name == "accepted",
            f"a message is not accepted: {shown(frame)}",
        )
        require(
            frame.fields.get("settled"), f"rcv-settle-mode first, but not settled: {shown(frame)}"
        )

    def put(self, *bodies: str) -> None:
        """Send messages, and check that each is accepted."""
        for number in [self.send(message(body)) for body in bodies]:
            self.accepted(number)

    def close(self) -> None:
        """Close the link."""
        self.peer.send("detach", channel=self.channel, handle=self.handle, closed=True)
        self.peer.hear("detach", passing={*_IN_PASSING, "disposition"})


class Delivery(Struct):
    """A delivery received on a link, in one or several transfers."""

    number: int
    tag: bytes
    payload: bytes
    settled: bool
    #: Sizes of its frames.
    sizes: list[int]
    first: dict[str, Any]

    @property
    def body(self) -> Any:
        """Body of a message made by :func:`message`."""
        return body_of(self.payload)


class Incoming(Struct):
    """A link on which we receive."""

    peer: Peer
    channel: int
    handle: int
    #: Fields of the host's attach.
    answer: dict[str, Any]
    #: The host's delivery-count, as far as known.
    count: int

    @property
    def address(self) -> str:
        """Address of the source, from the host's attach."""
        return _address(self.answer, "source")

    def flow(self, credit: int, **fields: Any) -> None:
        """Grant credit."""
        self.peer.flow(
            self.channel,
            handle=self.handle,
            delivery_count=self.count,
            link_credit=credit,
            **fields,
        )

    def get(self, within: float | None = None) -> Delivery | None:
        """Return the next delivery, None if none arrives in time."""
        patience = self.peer.patience_s if within is None else within
        until = time.monotonic() + patience
        found: Delivery | None = None
        while True:
            frame = self.peer.next(until - time.monotonic())
            if frame is None:
                return None
            if frame.name in ("empty", "flow", "disposition"):
                continue
            require(
                frame.name == "transfer", f"transfer is expected, and this arrives: {shown(frame)}"
            )
            fields = frame.fields
            if found is None:
                require(
                    "delivery_id" in fields and "delivery_tag" in fields,
                    f"the first transfer of a delivery has no id or no tag (§2.7.5): {shown(frame)}",
                )
                found = Delivery(
                    fields["delivery_id"], fields["delivery_tag"], b"", False, [], fields
                )
            found.payload += frame.payload
            found.sizes.append(frame.size)
            found.settled = found.settled or bool(fields.get("settled"))
            if fields.get("aborted"):
                found = None
            elif not fields.get("more"):
                self.count = (self.count + 1) % 2**32
                return found

    def take(self) -> Delivery:
        """Return the next delivery.

        Raises:
            Departs: None arrives in time.
        """
        found = self.get()
        if found is None:
            raise Departs(f"a message is expected, and none arrives in {self.peer.patience_s:g} s")
        return found

    def read(self, *bodies: str) -> list[Delivery]:
        """Receive messages with these bodies in any order; return them in the order of arrival.

        Raises:
            Departs: Other messages arrive, or too few.
        """
        found = [self.take() for _ in bodies]
        came = [delivery.body for delivery in found]
        require(
            sorted(map(str, came)) == sorted(bodies), f"{list(bodies)} are due, and {came} come"
        )
        return found

    def nothing(self, within: float = QUIET_S) -> None:
        """Check that no message arrives.

        Raises:
            Departs: One does.
        """
        found = self.get(within)
        if found is not None:
            raise Departs(f"no message is expected, and {found.body!r} arrives")

    def settle(
        self,
        first: Delivery,
        last: Delivery | None = None,
        *,
        state: Any = "accepted",
        settled: bool = True,
    ) -> None:
        """Send an outcome for a delivery or a range, unless *first* was sent settled."""
        if first.settled:
            return
        self.peer.send(
            "disposition",
            channel=self.channel,
            role="receiver",
            first=first.number,
            last=None if last is None else last.number,
            settled=settled,
            state=state,
        )

    def detach(self, *, closed: bool, **fields: Any) -> Frame:
        """Detach, and return the host's detach."""
        self.peer.send("detach", channel=self.channel, handle=self.handle, closed=closed, **fields)
        return self.peer.hear("detach", passing={*_IN_PASSING, "disposition", "transfer"})

    def close(self) -> None:
        """Close the link."""
        self.detach(closed=True)


# --- frames and messages -------------------------------------------------------------------------


def shown(frame: Frame) -> str:
    """Format a frame for a report: its error if it has one, else the frame, cut if it is long."""
    if frame.fields.get("error") is not None:
        return f"{frame.name} with {error_of(frame)}"
    text = repr(frame)
    return text if len(text) < 300 else f"{text[:300]}…"


def error_of(frame: Frame) -> str:
    """Format the error of a detach, end or close."""
    error = frame.fields.get("error")
    if not isinstance(error, CompositeValue):
        return f"{frame.name} without an error"
    told = error.fields.get("description")
    condition = str(error.fields.get("condition"))
    return f"{condition} ({told})" if told else condition


def _address(answer: dict[str, Any], terminus: str) -> str:
    found = answer.get(terminus)
    address = found.fields.get("address") if isinstance(found, CompositeValue) else None
    require(isinstance(address, str), f"the {terminus} is answered without an address")
    return str(address)


#: Descriptor codes of the sections (Part 3 §3.2).
HEADER_SECTION: Final = 0x70
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
SEQUENCE: Final = 0x76
VALUE: Final = 0x77
FOOTER: Final = 0x78


def section(code: int, content: bytes) -> bytes:
    """Encode a section of a message; *content* is an encoded value."""
    return b"\x00\x53" + bytes((code,)) + content


def message(body: str, *before: bytes) -> bytes:
    """Encode a message with a string as its body, and sections *before* it."""
    return b"".join(before) + section(VALUE, encode("string", body))


def header(**fields: Any) -> bytes:
    """Encode a header section.

    Fields are ``durable``, ``priority``, ``ttl``, ``first_acquirer`` and ``delivery_count``.
    """
    kinds = ("durable:boolean", "priority:ubyte", "ttl:uint", "first_acquirer:boolean", "delivery_count:uint")  # fmt: skip
    items = [encode(kind, fields.get(name)) for name, _, kind in (each.partition(":") for each in kinds)]  # fmt: skip
    return section(HEADER_SECTION, encode("list", items))


class Sections(Struct):
    """A message split into its sections."""

    #: Descriptor code → value.
    values: dict[int, Any]
    #: Descriptor codes and octets, in order.
    octets: list[tuple[int, bytes]]

    def bare(self) -> bytes:
        """Return the octets of the bare message (Part 3 §3.2)."""
        return b"".join(octets for code, octets in self.octets if PROPERTIES <= code <= VALUE)

    def body(self) -> bytes:
        """Return the octets of the body."""
        return b"".join(octets for code, octets in self.octets if DATA <= code <= VALUE)

    def header(self, index: int, default: Any) -> Any:
        """Return a field of the header, or *default*."""
        items = self.values.get(HEADER_SECTION) or []
        value = items[index] if index < len(items) else None
        return default if value is None else value


def sections_of(payload: bytes) -> Sections:
    """Split a message into its sections.

    Raises:
        Departs: It is malformed.
    """
    found = Sections({}, [])
    at = 0
    while at < len(payload):
        try:
            value, end = decode(payload, at)
        except Malformed as error:
            raise Departs(f"a message comes that cannot be read: {error}") from None
        code = _code(value)
        require(HEADER_SECTION <= code <= FOOTER, f"a message comes with no section at octet {at}")
        found.values[code] = (
            value.fields.get("value") if isinstance(value, CompositeValue) else None
        )
        found.octets.append((code, payload[at:end]))
        at = end
    return found


_SYMBOLS: Final = {
    "amqp:header:list": HEADER_SECTION,
    "amqp:delivery-annotations:map": 0x71,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}


def _code(value: Any) -> int:
    if not isinstance(value, CompositeValue):
        return 0
    return int(value.name) if value.name.isdigit() else _SYMBOLS.get(value.name, 0)


def body_of(payload: bytes) -> Any:
    """Return the body of a message made by :func:`message`."""
    return sections_of(payload).values.get(VALUE)


def open_frame(*items: bytes, code: bytes = b"\x53\x10", channel: int = 0) -> bytes:
    """Encode an open frame, or another composite, of encoded *items* in a list of 32-bit size."""
    content = b"".join(items)
    return encode_frame(
        b"\x00" + code + struct.pack(">BII", 0xD0, len(content) + 4, len(items)) + content,
        channel=channel,
    )
