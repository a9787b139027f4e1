"""Attacks by hostile clients, which ignore the answers (surfaces: tests/abuse/test_threats.py).

Each attack consists of octets that are sent once at the start of each connection, and of those of a
round, repeated as long as the server accepts them. A connection that the server ends is replaced at
once.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from amqp_rt import Message
from amqp_rt.net.traces.octets import Raw, composite, encode, encode_frame
from amqp_rt.transactions import Declare, Discharge
from amqp_rt.values import Symbol

U32 = 2**32 - 1
#: Connections that attack at the same time.
_CONNECTIONS = 4
#: Octets of rounds that are sent at once.
_BATCH = 65_536

#: Yields what is said next, and is sent what the server has said since. May return the last of it.
Talk: TypeAlias = Generator[bytes, bytes, bytes]


class Attack(Struct):
    """Octets sent on each connection, and how the client treats the answers."""

    begin: bytes
    #: Repeated after the start, without waiting for the server to end the connection.
    round: bytes = b""
    #: Whether the client reads no answers.
    deaf: bool = False
    #: Whether the attack uses a WebSocket.
    web: bool = False
    #: Received octets after which the client closes the socket without a close; 0 for never.
    hears_max: int = 0
    #: Parts sent before the start, each after an answer to the previous one.
    handshake: tuple[bytes, ...] = ()
    #: Says the beginning, and what follows, as an answer to what the server has said. ``round`` is
    #: repeated when it has ended.
    talk: Callable[[], Talk] | None = None


def frame(name: str, /, payload: bytes = b"", *, channel: int = 0, **fields: Any) -> bytes:
    return encode_frame(composite(name, **fields), channel=channel, payload=payload)


def login(mechanism: str = "ANONYMOUS", response: bytes = b"mallory") -> bytes:
    said = frame("sasl_init", mechanism=mechanism, initial_response=response)
    return b"AMQP\x03\x01\x00\x00" + said + b"AMQP\x00\x01\x00\x00"


def opened() -> bytes:
    return login() + frame("open", container_id=f"mallory-{os.getpid()}")


def begin_on(channel: int) -> bytes:
    """Return a begin on *channel*, with windows as wide as they can be."""
    return frame(
        "begin", channel=channel, next_outgoing_id=0, incoming_window=U32, outgoing_window=U32,
        handle_max=U32,
    )  # fmt: skip


def begun() -> bytes:
    return opened() + begin_on(0)


def sender(address: str, handle: int = 0, name: str = "out") -> bytes:
    return frame(
        "attach", name=name, handle=handle, role=False,
        source=composite("source"), target=composite("target", address=address),
        initial_delivery_count=0,
    )  # fmt: skip


def receiver(
    address: str, handle: int = 0, name: str = "in", *, channel: int = 0, **source: Any
) -> bytes:
    return frame(
        "attach", channel=channel, name=name, handle=handle, role=True,
        source=composite("source", address=address, **source), target=composite("target"),
    )  # fmt: skip


def flow(**fields: Any) -> bytes:
    said: dict[str, Any] = {"incoming_window": U32, "next_outgoing_id": 0, "outgoing_window": U32}
    return frame("flow", **{**said, "next_incoming_id": 0, **fields})


def credit(count: int, **fields: Any) -> bytes:
    return flow(**{"handle": 0, "delivery_count": 0, "link_credit": count, **fields})


def nested(depth: int) -> Raw:
    """Encode nested lists."""
    found = b"\x45"
    for _ in range(depth):
        found = b"\xd0" + struct.pack(">II", len(found) + 4, 1) + found
    return Raw(found)


def nothings(count: int) -> Raw:
    """Encode an array of many nulls, which have no octets."""
    return Raw(b"\xf0" + struct.pack(">II", 5, count) + b"\x40")


def with_properties(value: Raw) -> bytes:
    return flow(properties=Raw(bytes(encode("map", {"bomb": value}))))


def transfer(number: int, message: bytes, **fields: Any) -> bytes:
    said = {"handle": 0, "delivery_id": number, "delivery_tag": struct.pack(">I", number)}
    return frame("transfer", message, **{**said, "message_format": 0, **fields})


def selected(selector: str) -> Any:
    described = b"\x00" + encode("ulong", 0x0000468C00000004) + encode("string", selector)
    return Raw(bytes(encode("map", {"s": Raw(described)})))


def masked(code: int, payload: bytes, *, last: bool = True) -> bytes:
    """Encode a WebSocket frame of a client, with a mask of zeros."""
    head = bytes((code | (0x80 if last else 0),))
    size = len(payload)
    said = bytes((0x80 | size,)) if size < 126 else b"\xfe" + struct.pack(">H", size)
    return head + said + bytes(4) + payload


def _unsettled() -> Attack:
    # Each disposition covers all unsettled deliveries, and settles none of them.
    everything = frame(
        "disposition", role=True, first=0, last=U32 // 2, settled=False,
        state=composite("received", section_number=0, section_offset=0),
    )  # fmt: skip
    return Attack(begun() + receiver("full") + credit(U32 // 2), everything)


def _churn() -> Attack:
    rounds = [
        sender("churn", 0, "a") + receiver("churn", 1, "b")
        + frame("detach", handle=0, closed=True) + frame("detach", handle=1, closed=True)
    ]  # fmt: skip
    return Attack(begun(), b"".join(rounds))


def _sessions() -> Attack:
    begin = composite("begin", next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    one = encode_frame(begin, channel=1) + encode_frame(composite("end"), channel=1)
    return Attack(opened(), one)


def _partings() -> Attack:
    # As many deliveries as a session may have unsettled, requeued by a detach.
    rounds = receiver("many", 0, "p") + credit(5_000) + frame("detach", handle=0, closed=True)
    return Attack(begun(), rounds)


def in_sessions(count: int, each: Callable[[int], bytes]) -> bytes:
    """Encode *count* sessions, each with the frames that *each* returns for its channel."""
    return b"".join(begin_on(channel) + each(channel) for channel in range(count))


def _losses() -> Attack:
    # The same in each of 64 sessions, requeued by the end of the connection.
    def each(channel: int) -> bytes:
        link = receiver("many", name=f"in-{channel}", channel=channel)
        return link + credit(5_000, channel=channel)

    return Attack(opened() + in_sessions(64, each), hears_max=1_000_000)


def _links() -> Attack:
    # As many links as a connection may have, all of which end with it.
    def each(channel: int) -> bytes:
        return b"".join(
            receiver("linked", handle, f"in-{channel}-{handle}", channel=channel)
            for handle in range(256)
        )

    return Attack(opened() + in_sessions(16, each), hears_max=300_000)


def _subscribers() -> Attack:
    # Each message goes to all subscribers of a topic, of which each connection has as many as links.
    def each(channel: int) -> bytes:
        return b"".join(
            receiver("spread", handle, f"in-{channel}-{handle}", channel=channel)
            + credit(1_000, channel=channel, handle=handle)
            for handle in range(256 - (channel == 0))
        )

    message = Message(b"").encode()

    def talk() -> Talk:
        # Not as much may come before the answer to the login.
        heard = yield opened()
        while _OPEN not in heard:
            heard += yield b""
        heard = yield in_sessions(2, each) + sender("spread", 255)
        for start in itertools.count(0, _POSTS_OF_A_LINK):
            while FLOW not in heard:
                heard += yield b""
            heard = yield b"".join(
                transfer(number, message, handle=255, settled=True)
                for number in range(start, start + _POSTS_OF_A_LINK)
            )

    return Attack(b"", talk=talk)


#: Posts of a transaction that is as large as it may be, and of one link: half of its credit, which the
#: server then tops up.
_POSTS = 10_000
_POSTS_OF_A_LINK = 500
_DECLARED = re.compile(rb"\x00\x53\x33(?:\xc0..|\xd0.{8})\xa0(.)", re.DOTALL)
_OPEN = b"\x00\x53\x10"
FLOW = b"\x00\x53\x13"
_DETACH = b"\x00\x53\x16"
ACCEPTED = b"\x00\x53\x24"


def _commits(address: str, *, durable: bool = False) -> Attack:
    """Transactions as large as they may be, one after the other."""
    control = frame(
        "attach", name="control", handle=0, role=False, source=composite("source"),
        target=composite("coordinator"), initial_delivery_count=0,
    )  # fmt: skip
    message = Message(b"", durable=durable).encode()
    handles = range(1, 1 + _POSTS // _POSTS_OF_A_LINK)
    links = b"".join(sender(address, handle, f"out-{handle}") for handle in handles)

    def talk() -> Talk:
        # Nothing may be sent before there is credit for it.
        heard = yield begun() + control + links
        while heard.count(FLOW) <= len(handles):
            heard += yield b""
        numbers = itertools.count(1)
        while True:
            heard = yield transfer(next(numbers), Message(Declare()).encode())
            while (found := _DECLARED.search(heard)) is None:
                heard += yield b""
            txn_id = heard[found.end() : found.end() + found[1][0]]
            state = composite("transactional_state", txn_id=txn_id)
            for handle in handles:
                # The codec is in no hurry: one transfer is the template of the others.
                post = transfer(U32, message, handle=handle, settled=True, state=state)
                heard = yield b"".join(
                    post.replace(struct.pack(">I", U32), struct.pack(">I", number))
                    for number in itertools.islice(numbers, _POSTS_OF_A_LINK)
                )
                while FLOW not in heard:
                    heard += yield b""
            heard = yield transfer(next(numbers), Message(Discharge(txn_id)).encode())
            while ACCEPTED not in heard:
                heard += yield b""

    return Attack(b"", talk=talk)


def _posted(link: bytes, *messages: bytes, count: int = _POSTS_OF_A_LINK) -> Attack:
    """Send *messages* in turn over *link*, each time *count* of them, when there is credit."""

    def talk() -> Talk:
        heard = yield begun() + link
        numbers = itertools.count()
        while True:
            while FLOW not in heard:
                heard += yield b""
            heard = yield b"".join(
                transfer(number, messages[number % len(messages)], settled=True)
                for number in itertools.islice(numbers, count)
            )

    return Attack(b"", talk=talk)


def _delays() -> Attack:
    # All messages become due, and expire, at about the same time; none has the annotations of the
    # one before.
    delayed = [
        Message(
            b"", ttl_s=1.0, message_annotations={Symbol("x-opt-delivery-delay"): delay}
        ).encode()
        for delay in (500, 501)
    ]
    return _posted(sender("delayed"), *delayed)


def _poison() -> Attack:
    properties = {f"p{number}": number for number in range(500)}
    return _posted(sender("poison"), Message(b"", application_properties=properties).encode())


def _pieces() -> Attack:
    def talk() -> Talk:
        heard = yield begun() + sender("pieces")
        while FLOW not in heard:
            heard += yield b""
        return transfer(0, b"", more=True)

    return Attack(b"", frame("transfer", b"x", handle=0, more=True), talk=talk)


#: Within the bounds of a selector, and costly for texts that begin to match at each place.
_PATTERNS = " OR ".join(f"text LIKE '%a_{number}%'" for number in range(21))


#: Message whose text almost matches.
_TEXT = Message(b"", application_properties={"text": "a" * 4_000}).encode()


def _selectors() -> Attack:
    taken = receiver("texts", 1, "s", filter=selected(_PATTERNS)) + credit(1000, handle=1)

    def talk() -> Talk:
        heard = yield begun() + sender("texts")
        while FLOW not in heard:
            heard += yield b""
        said = b"".join(transfer(number, _TEXT, settled=True) for number in range(200))
        while True:
            heard = yield said + taken + frame("detach", handle=1, closed=True)
            said = b""
            while _DETACH not in heard:
                heard += yield b""

    return Attack(b"", talk=talk)


def _selective_subscribers() -> Attack:
    subscribers = b"".join(
        receiver("spread", number, f"s{number}", filter=selected(_PATTERNS))
        for number in range(1, 21)
    )
    return _posted(subscribers + sender("spread"), _TEXT)


def _fragments() -> Attack:
    # Each message has two octets of a frame, and is followed by a ping and an empty message.
    said = b"".join(
        masked(2, begun()[at : at + 2]) + masked(9, b"") + masked(2, b"")
        for at in range(0, len(begun()), 2)
    )
    return Attack(said, masked(2, flow(echo=True)[:4], last=False) + masked(0, flow(echo=True)[4:]), web=True)  # fmt: skip


def _queries() -> Attack:
    # There is no topic: each query visits every node, and returns few or no rows.
    asked = Message(
        b"",
        reply_to="answers",
        application_properties={"operation": "QUERY", "entityType": "amqp_rt.topic"},
    ).encode()
    rows = Message(b"", reply_to="answers", application_properties={"operation": "QUERY"}).encode()
    return _posted(sender("$management"), asked, rows)


# --- AMQP 0-9-1 ---


def _on_0_9_1(declared: list[Any], rounds: bytes, queues: int = 0) -> Attack:
    """Create an attack over 0-9-1, whose start declares *declared*."""
    from amqp_rt_amqp091 import methods as m
    from amqp_rt_amqp091.frames import PROTOCOL_HEADER, method_frame

    named = [
        m.QueueDeclare(
            queue=f"hit-{number}", auto_delete=True, no_wait=True,
            arguments={"x-max-length": 1, "x-expires": 600_000},
        )
        for number in range(queues)
    ]  # fmt: skip
    login = method_frame(0, m.ConnectionStartOk(mechanism="ANONYMOUS", locale="en_US"))
    tuned = m.ConnectionTuneOk(channel_max=10, frame_max=131_072)
    begin = [method_frame(0, tuned), method_frame(0, m.ConnectionOpen(virtual_host="/"))]
    begin += [method_frame(1, each) for each in (m.ChannelOpen(), *named, *declared)]
    return Attack(b"".join(begin), rounds, handshake=(PROTOCOL_HEADER, login))


def _published(exchange: str, key: str, headers: dict[str, object] | None = None) -> bytes:
    from amqp_rt_amqp091 import methods as m
    from amqp_rt_amqp091.frames import content_frames

    said = m.BasicPublish(exchange=exchange, routing_key=key)
    properties = m.BasicProperties(headers=headers)
    return b"".join(content_frames(1, said, properties, b"x", 131_072))


def _topics() -> Attack:
    # At each position a word of the key matches in two ways, so that the last word is reached on
    # all paths, for each of a hundred keys.
    from amqp_rt_amqp091 import methods as m

    patterns = [
        ".".join("*" if number >> bit & 1 else "a" for bit in range(11)) for number in range(2**11)
    ]
    bindings = [
        m.QueueBind(queue="hit-0", exchange="amq.topic", routing_key=pattern + ".#.x", no_wait=True)
        for pattern in patterns
    ]
    keys = [".".join(["a"] * 11 + [f"{number}"]) for number in range(99)]
    return _on_0_9_1(bindings, _published("amq.topic", keys[0], {"CC": keys[1:]}), 1)


def _headers() -> Attack:
    # All bindings compare the same long header, and none of them matches.
    from amqp_rt_amqp091 import methods as m

    bindings = [
        m.QueueBind(
            queue="hit-0", exchange="amq.headers", no_wait=True,
            arguments={"x-match": "all", "a": [number]},
        )
        for number in range(5_000)
    ]  # fmt: skip
    return _on_0_9_1(bindings, _published("amq.headers", "", {"a": [None] * 4_000}), 1)


def _fan_out() -> Attack:
    from amqp_rt_amqp091 import methods as m

    bindings = [
        m.QueueBind(queue=f"hit-{number}", exchange="amq.fanout", no_wait=True)
        for number in range(900)
    ]
    return _on_0_9_1(bindings, _published("amq.fanout", ""), 900)


def _nacks() -> Attack:
    from amqp_rt_amqp091 import methods as m
    from amqp_rt_amqp091.frames import method_frame

    consumer = m.BasicConsume(queue="full", no_wait=True)
    return _on_0_9_1([consumer], method_frame(1, m.BasicNack(multiple=True, requeue=True)))


def _tables() -> Attack:
    headers: dict[str, object] = {"a": [None] * 4_000}
    return _on_0_9_1([], b"".join(_published("", "tables", {**headers, "n": n}) for n in range(9)))


def _unacked() -> Attack:
    from amqp_rt_amqp091 import methods as m

    return msgspec.structs.replace(
        _on_0_9_1([m.BasicConsume(queue="many", no_wait=True)], b""), hears_max=1_000_000
    )


def _letters(arguments: dict[str, object], rounds: bytes) -> Attack:
    """Dead letters of a queue, each of which goes to as many queues as it may."""
    from amqp_rt_amqp091 import methods as m

    exchange: dict[str, object] = {"x-dead-letter-exchange": "amq.fanout"}
    bindings = [
        m.QueueBind(queue=f"hit-{number}", exchange="amq.fanout", no_wait=True)
        for number in range(900)
    ]
    source = m.QueueDeclare(queue="letters", no_wait=True, arguments=exchange | arguments)
    consume = [] if arguments else [m.BasicConsume(queue="letters", no_wait=True)]
    return _on_0_9_1([*bindings, source, *consume], _published("", "letters") * 1_000 + rounds, 900)


def _rejected() -> Attack:
    from amqp_rt_amqp091 import methods as m
    from amqp_rt_amqp091.frames import method_frame

    return _letters({}, method_frame(1, m.BasicNack(multiple=True, requeue=False)))


def _taken_away(method: Any) -> Attack:
    """Create an attack that fills a queue and then removes all its messages by *method*."""
    from amqp_rt_amqp091 import methods as m
    from amqp_rt_amqp091.frames import method_frame

    declared = method_frame(1, m.QueueDeclare(queue="gone", no_wait=True))
    rounds = declared + _published("", "gone") * 20_000 + method_frame(1, method)
    return _on_0_9_1([], rounds)


def _deletions() -> Attack:
    from amqp_rt_amqp091 import methods as m

    return _taken_away(m.QueueDelete(queue="gone", no_wait=True))


def _purges() -> Attack:
    from amqp_rt_amqp091 import methods as m

    return _taken_away(m.QueuePurge(queue="gone", no_wait=True))


ATTACKS: dict[str, Callable[[], Attack]] = {
    "logins": lambda: Attack(login("PLAIN", b"\0bench\0wrong"), b""),
    "greetings": lambda: Attack(b"AMQP\x00\x01\x00\x00" + bytes(64)),
    "bombs": lambda: Attack(begun(), with_properties(nothings(60_000))),
    "bombs_nested": lambda: Attack(begun(), with_properties(nested(28)) * 50),
    "bombs_deep": lambda: Attack(begun() + with_properties(nested(2_000))),
    "dispositions": _unsettled,
    "drains": lambda: Attack(
        begun() + receiver("empty"), credit(100, drain=True, echo=True) + credit(0, echo=True)
    ),
    "echoes": lambda: Attack(begun(), flow(echo=True)),
    "echoes_unread": lambda: Attack(begun(), flow(echo=True), deaf=True),
    "unread": lambda: Attack(begun() + receiver("full") + credit(U32 // 2), deaf=True),
    "churn": _churn,
    "sessions": _sessions,
    "partings": _partings,
    "losses": _losses,
    "links": _links,
    "delays": _delays,
    "unacked": _unacked,
    "deletions": _deletions,
    "purges": _purges,
    "selectors": _selectors,
    "selective_subscribers": _selective_subscribers,
    "pieces": _pieces,
    "poison": _poison,
    "subscribers": _subscribers,
    "commits": lambda: _commits("committed"),
    "commits_kept": lambda: _commits("committed", durable=True),
    "queries": _queries,
    "topics": _topics,
    "headers": _headers,
    "fan_out": _fan_out,
    "nacks": _nacks,
    "tables": _tables,
    "rejected": _rejected,
    "expired": lambda: _letters({"x-message-ttl": 100}, b""),
    "overflown": lambda: _letters({"x-max-length": 1}, b""),
    "pings": lambda: Attack(masked(2, begun()), masked(9, b"x" * 100), web=True),
    "fragments": _fragments,
}  # fmt: skip


class _Connection:
    def __init__(self, attack: Attack, port: int, found: selectors.BaseSelector) -> None:
        self.attack = attack
        self.heard = self.said = 0
        self.round = attack.round * max(1, _BATCH // max(1, len(attack.round)))
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.talk = None if attack.talk is None else attack.talk()
        begin = attack.begin if self.talk is None else next(self.talk)
        if attack.web:
            self._upgrade(port)
        for part in attack.handshake:
            self.socket.settimeout(5)
            self.socket.sendall(part)
            self.socket.recv(4096)
        self.socket.setblocking(False)
        self.rest = memoryview(begin)
        found.register(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def _upgrade(self, port: int) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Protocol: amqp\r\n\r\n".encode()
        )
        self.socket.settimeout(5)
        self.socket.recv(4096)

    def turn(self, events: int) -> bool:
        """Read and send further octets; return whether the server is still connected."""
        try:
            if events & selectors.EVENT_READ and not self.attack.deaf:
                data = self.socket.recv(262_144)
                self.heard += len(data)
                if not data or 0 < self.attack.hears_max < self.heard:
                    return False
                if self.talk is not None:
                    self._answer(data)
            if events & selectors.EVENT_WRITE:
                if not self.rest and self.talk is None:
                    self.rest = memoryview(self.round)
                if self.rest:
                    sent = self.socket.send(self.rest)
                    self.said += sent
                    self.rest = self.rest[sent:]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _answer(self, data: bytes) -> None:
        assert self.talk is not None
        try:
            self.rest = memoryview(bytes(self.rest) + self.talk.send(data))
        except StopIteration as ended:
            self.talk = None
            self.rest = memoryview(bytes(self.rest) + ended.value)


def attack(what: str, port: int, seconds: float) -> dict[str, float]:
    """Attack for some seconds."""
    if what.startswith("bus_"):
        import bus_attacks

        chosen = bus_attacks.ATTACKS[what]()
    else:
        chosen = ATTACKS[what]()
    made = said = 0
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as found:
        held: list[_Connection] = []
        while time.monotonic() < until:
            while len(held) < _CONNECTIONS:
                try:
                    held.append(_Connection(chosen, port, found))
                    made += 1
                except OSError:
                    time.sleep(0.01)  # Not accepted at the moment
                    break
            for key, events in found.select(0.05):
                one: _Connection = key.data
                if not one.turn(events):
                    found.unregister(one.socket)
                    one.socket.close()
                    held.remove(one)
                    said += one.said
        for one in held:
            said += one.said
            found.unregister(one.socket)
            one.socket.close()
    return {"n": made, "octets": said}
