"""Attacks on a namespace of Service Bus by clients with all rights, and the namespace that they attack."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import struct
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from attacks import (
    ACCEPTED,
    FLOW,
    U32,
    Attack,
    Talk,
    begin_on,
    composite,
    credit,
    frame,
    login,
    receiver,
    sender,
    transfer,
)

from amqp_rt import Message
from amqp_rt.net.traces.octets import Raw, encode
from amqp_rt.values import Symbol

#: Number of messages, sessions, rules and locks that an attack finds or makes.
SESSION_MESSAGES = 100_000
SESSIONS = 10_000
RULES = 10_000
WIDE = 5_000
BATCH = 4_500
NAMED = 2_000

_TRANSFER = b"\x00\x53\x14"
_BATCH_FORMAT = 0x8001_3700
_KEY = "SAS_KEY_VALUE"
_TEXT = "a" * 4_000


def namespace() -> Any:
    """Return the namespace that is attacked."""
    from amqp_rt_servicebus.declarations import Queue, Rule, Sql, Subscription, Topic
    from amqp_rt_servicebus.namespace import Namespace

    bomb = " OR ".join(f"text LIKE '%a_{number}%'" for number in range(120))
    return Namespace(
        Queue("plain"),
        Queue("locks", lock_duration=0.5, max_delivery_count=1_000_000),
        Queue("deferred", max_delivery_count=1_000_000),
        Queue("numbered", lock_duration=0.2, max_delivery_count=1_000_000),
        Queue("sessions", requires_session=True),
        Queue("full", requires_session=True, lock_duration=0.5),
        Topic("bombed", [Subscription("s", [Rule(f"r{each}", Sql(bomb)) for each in range(100)])]),
        Topic(
            "ruled",
            [
                Subscription(
                    f"s{each}", [Rule(f"r{n}", Sql(f"n = {n}")) for n in range(RULES // 10)]
                )
                for each in range(10)
            ],
        ),
        Topic("wide", [Subscription(f"s{each}") for each in range(2_000)]),
        Queue("gone", auto_delete_on_idle=1e9),
    )


def fill(found: Any) -> None:
    """Put the messages into a namespace that attacks find there."""
    from amqp_rt_servicebus.messages import arrived
    from amqp_rt_servicebus.requests import Requests

    entity = found.node(("full",)).entity
    for number in range(SESSION_MESSAGES):
        body = Message(b"", group_id=f"s{number % SESSIONS}", message_id=str(number)).encode()
        entity.accept(arrived(bytes(body)))
    for name in ("locks", "deferred", "numbered"):
        entity = found.node((name,)).entity
        for number in range(4 * WIDE):
            entity.accept(arrived(bytes(Message(b"", message_id=str(number)).encode())))
    _defer(entity, Requests(entity))


def _defer(entity: Any, requests: Any) -> None:
    """Let *entity* hold as many deferred messages as a request names."""
    from amqp_rt_servicebus.steps import at_once

    for number in range(1, NAMED + 1):
        stored = entity.shelf.find(number)
        entity.shelf.ready.discard(number)
        entity.lock(stored, entity.new_id(), entity.clock.wall())
        at_once(requests.defer([stored.token]))


def token() -> str:
    """Return a shared access signature for the whole namespace."""
    resource, ends = quote("sb://127.0.0.1/", safe=""), str(int(time.time()) + 3_600)
    signed = hmac.digest(_KEY.encode(), f"{resource}\n{ends}".encode(), hashlib.sha256)
    signature = quote(base64.b64encode(signed), safe="")
    return f"SharedAccessSignature sr={resource}&sig={signature}&se={ends}&skn=RootManageSharedAccessKey"


def _joined() -> Talk:
    """Log in, begin a session, and put a token; return what the server has said last."""
    heard = yield login("ANONYMOUS", b"") + frame(
        "open", container_id="mallory", hostname="127.0.0.1"
    )
    heard = yield begin_on(0) + sender("$cbs", 200, "cbs")
    while FLOW not in heard:
        heard += yield b""
    put = Message(
        token(),
        application_properties={
            "operation": "put-token",
            "type": "servicebus.windows.net:sastoken",
            "name": "sb://127.0.0.1/",
        },
    )
    heard = yield transfer(U32 - 1, put.encode(), handle=200)
    while ACCEPTED not in heard:
        heard += yield b""
    return heard


def _talk(begin: bytes, messages: Callable[[int], bytes], *, count: int = 200) -> Attack:
    """Send on the link that *begin* attaches: *count* times *messages* of a number, whenever there is credit."""

    def talk() -> Talk:
        yield from _joined()
        heard = yield begin
        numbers = itertools.count()
        while True:
            while FLOW not in heard:
                heard += yield b""
            heard = yield b"".join(
                transfer(number, messages(number), settled=True)
                for number in itertools.islice(numbers, count)
            )

    return Attack(b"", talk=talk)


def _batch(count: int, **fields: Any) -> bytes:
    one = bytes(Message(b"x" * 100, **fields).encode())
    return (b"\x00\x53\x75\xb0" + struct.pack(">I", len(one)) + one) * count


def _batches() -> Attack:
    # As many messages as a batch may have, which expire soon.
    body = _batch(BATCH, message_id="m", ttl_s=0.2)

    def talk() -> Talk:
        yield from _joined()
        heard = yield sender("plain")
        for number in itertools.count():
            while FLOW not in heard:
                heard += yield b""
            heard = yield b"".join(
                transfer(number, piece, message_format=_BATCH_FORMAT, more=more)
                for piece, more in _pieces(body)
            )
            while ACCEPTED not in heard:
                heard += yield b""
            heard = FLOW

    return Attack(b"", talk=talk)


def _pieces(body: bytes, size: int = 60_000) -> list[tuple[bytes, bool]]:
    return [(body[at : at + size], at + size < len(body)) for at in range(0, len(body), size)]


def _new_sessions() -> Attack:
    # Each message begins a session, of which a receiver locks the next one.
    messages = [
        bytes(Message(b"", group_id=f"n{number}", message_id=str(number)).encode())
        for number in range(SESSIONS)
    ]
    next_session = Raw(bytes(encode("map", {Symbol("com.microsoft:session-filter"): None})))

    def talk() -> Talk:
        yield from _joined()
        heard = yield sender("sessions")
        numbers = itertools.count()
        while True:
            while FLOW not in heard:
                heard += yield b""
            links = b"".join(
                receiver("sessions", handle, f"in-{handle}", filter=next_session)
                + credit(10, handle=handle)
                for handle in range(1, 50)
            )
            heard = (
                yield links
                + b"".join(
                    transfer(number, messages[number % SESSIONS], settled=True)
                    for number in itertools.islice(numbers, 100)
                )
                + b"".join(frame("detach", handle=handle, closed=True) for handle in range(1, 50))
            )

    return Attack(b"", talk=talk)


def _full_sessions() -> Attack:
    # Of a hundred thousand messages in sessions, receivers lock the next session, and leave.
    next_session = Raw(bytes(encode("map", {Symbol("com.microsoft:session-filter"): None})))
    links = b"".join(
        receiver("full", handle, f"in-{handle}", filter=next_session) + credit(1_000, handle=handle)
        for handle in range(100)
    ) + b"".join(frame("detach", handle=handle, closed=True) for handle in range(100))

    def talk() -> Talk:
        heard = yield from _joined()
        while True:
            heard = yield links
            while b"\x00\x53\x16" not in heard:
                heard += yield b""

    return Attack(b"", talk=talk)


def _locks() -> Attack:
    # Thousands of locks begin at about the same time, and end so.
    links = b"".join(
        receiver("locks", handle, f"in-{handle}") + credit(WIDE // 4, handle=handle)
        for handle in range(4)
    )

    def talk() -> Talk:
        yield from _joined()
        yield links
        while True:
            yield b""

    return Attack(b"", talk=talk)


def _outcomes(state: Any) -> Attack:
    # One disposition for thousands of deliveries, again and again.
    everything = frame(
        "disposition", role=True, first=0, last=U32 // 2, settled=True, state=state
    ) + frame("detach", handle=0, closed=True)

    def talk() -> Talk:
        yield from _joined()
        for number in itertools.count():
            count = 0
            heard = yield receiver("deferred", 0, f"in-{number}") + credit(WIDE)
            while (count := count + heard.count(_TRANSFER)) < WIDE // 2:
                heard = yield b""
            yield everything

    return Attack(b"", talk=talk)


def _asked(address: str, operation: str, body: dict[str, Any]) -> Attack:
    """Ask for *operation* at ``$management``, as often as there is credit."""
    request = bytes(
        Message(
            body,
            message_id="1",
            reply_to="answers",
            application_properties={"operation": f"com.microsoft:{operation}"},
        ).encode()
    )

    def talk() -> Talk:
        yield from _joined()
        heard = yield sender(f"{address}/$management")
        numbers = itertools.count()
        while True:
            while FLOW not in heard:
                heard += yield b""
            heard = yield b"".join(
                transfer(number, piece, settled=True, more=more)
                for number in itertools.islice(numbers, 5)
                for piece, more in _pieces(request)
            )

    return Attack(b"", talk=talk)


def _numbers() -> Attack:
    return _asked("numbered", "receive-by-sequence-number", {
        "sequence-numbers": list(range(1, NAMED + 1)), "receiver-settle-mode": 1,
    })  # fmt: skip


def _schedules() -> Attack:
    one = bytes(Message(b"x", message_annotations={
        Symbol("x-opt-scheduled-enqueue-time"): 4_000_000_000_000}).encode())  # fmt: skip
    messages = [{"message-id": str(n), "message": one} for n in range(NAMED)]
    return _asked("gone", "schedule-message", {"messages": messages})


def _peeks() -> Attack:
    return _asked("full", "peek-message", {"from-sequence-number": 1, "message-count": 1_000})


def _listings() -> Attack:
    from amqp_rt.values import Timestamp

    return _asked("full", "get-message-sessions", {
        "last-updated-time": Timestamp(253_402_300_800_000), "skip": SESSIONS - 10, "top": 100,
    })  # fmt: skip


def _names() -> Attack:
    # Addresses of entities that are not there, or whose names are not what they seem.
    hostile = [
        "x" * 1_000, "/" * 500, "a/b/" * 200 + "$management", "full/$deadletterqueue" * 40,
        "\x00\x01\n", "full/../plain", "%66%75%6c%6c", "ruled/subscriptions/" * 40, "$management" * 50,
        "sb://127.0.0.1:99999/full", "amqps://[::1", "FULL/SUBSCRIPTIONS//", "\u202e\U0001f4a5" * 300,
    ]  # fmt: skip
    rounds = b"".join(
        sender(name, 0, "a") + receiver(name, 1, "b")
        + frame("detach", handle=0, closed=True) + frame("detach", handle=1, closed=True)
        for name in hostile
    )  # fmt: skip

    def talk() -> Talk:
        yield from _joined()
        return rounds

    return Attack(b"", rounds, talk=talk)


def _http(body: bytes, target: str = "/hostile") -> bytes:
    return (
        f"PUT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {token()}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def _documents() -> Attack:
    # As many elements as a document may have, as deep as they may be; and as many parameters of a rule.
    atom = b'<entry xmlns="http://www.w3.org/2005/Atom"><content>'
    deep = atom + (b"<a>" * 28 + b"</a>" * 28) * 700 + b"</content></entry>"
    connect = b"http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
    queue = (
        atom + b'<QueueDescription xmlns="' + connect + b'">' + b"<LockDuration>PT1M</LockDuration>"
    )
    many = queue + b"<MaxDeliveryCount>3</MaxDeliveryCount>" * 18_000
    many += b"</QueueDescription></content></entry>"
    rule = (
        atom
        + b'<RuleDescription xmlns="'
        + connect
        + b'" xmlns:i="http://www.w3.org/2001/XMLSchema-instance">'
    )
    rule += b'<Filter i:type="SqlFilter"><SqlExpression>' + b" OR ".join([b"a=1"] * 2_000)
    rule += b"</SqlExpression></Filter></RuleDescription></content></entry>"
    rounds = _http(deep) + _http(many) + _http(rule, "/ruled/subscriptions/s0/rules/hostile")
    return Attack(rounds, rounds)


def _rules() -> Attack:
    said = [
        bytes(Message(b"", application_properties={"n": number}).encode())
        for number in range(0, RULES, 97)
    ]
    return _talk(sender("ruled"), lambda number: said[number % len(said)])


def _bombs() -> Attack:
    said = bytes(Message(b"", application_properties={"text": _TEXT}).encode())
    return _talk(sender("bombed"), lambda number: said, count=20)


def _wide() -> Attack:
    said = bytes(Message(b"", ttl_s=0.1).encode())
    return _talk(sender("wide"), lambda number: said, count=20)


def _messages() -> Attack:
    said = bytes(Message(b"", message_id="m", ttl_s=0.2).encode())
    return _talk(sender("plain"), lambda number: said, count=500)


ATTACKS: dict[str, Callable[[], Attack]] = {
    "bus_messages": _messages,
    "bus_bombs": _bombs,
    "bus_rules": _rules,
    "bus_wide": _wide,
    "bus_batches": _batches,
    "bus_new_sessions": _new_sessions,
    "bus_full_sessions": _full_sessions,
    "bus_locks": _locks,
    "bus_abandons": lambda: _outcomes(composite("modified", delivery_failed=True)),
    "bus_numbers": _numbers,
    "bus_schedules": _schedules,
    "bus_peeks": _peeks,
    "bus_listings": _listings,
    "bus_names": _names,
    "bus_documents": _documents,
}
