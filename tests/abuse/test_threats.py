"""Attacks, surface by surface, on a running server that serves another client meanwhile.

The limits are in ``test_doors.py``. Here each row is an attack: by a stranger who has reached the port,
or by eve, who may log in and may use the node ``eve`` only. It gets the answer in the row, and
:func:`served` checks after each that it leaves nothing behind: no connection, task, link or memory, and no
secret in the log; and that another client was served throughout. Faults of the disk, such as a store
that is damaged or full, are in ``tests/stores``.
"""

from __future__ import annotations

import base64
import gc
import hmac
import json
import logging
import os
import struct
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
from certificates import certificates
from msgspec import Struct
from wire import OPEN, Octets, frame
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Request

from amqp_rt import COMPILED
from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import SaslInit, SaslMechanisms, SaslOutcome, SaslResponse
from amqp_rt.errors import CallFailed, DeliveryRejected, LinkRefused
from amqp_rt.events import Peer
from amqp_rt.limits import DEFAULT_LIMITS, KIB, MIB, Limits
from amqp_rt.mesh import Mesh
from amqp_rt.mesh.records import Links, encode_record
from amqp_rt.message import Message
from amqp_rt.net.tls import ClientTls, ServerTls, client_layer, encrypt
from amqp_rt.net.websocket import request_websocket
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.mechanisms import Plain
from amqp_rt.security.tokens import Cbs
from amqp_rt.termini import Source, Target
from amqp_rt.values import Described, Symbol

pytestmark = pytest.mark.attack

KNOWN = certificates()
SCHEMES = {"tcp": "amqp", "tls": "amqps", "ws": "ws", "wss": "wss"}
#: The compiled modules get the same octets over each transport: only long runs repeat all of them there.
DOORS = [
    "tcp",
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in ("tls", "ws")
        if not COMPILED or os.environ.get("AMQP_RT_LONG") == "1"
    ),
]
SECRET = b"a secret of at least 32 octets, for HS256"
USERS = {"good": "horse-battery", "eve": "correct-staple"}
LIMITS = Limits(
    # The attacker waits for its answer, and so does the test.
    failed_login_delay_s=0.01,
    failed_login_delay_max_s=0.01,
    connections_unauthenticated_per_address_max=20,
    message_size_max=MIB,
    mesh_legs_max=20,
    websocket_stranger_max=2 * KIB,
)
#: Log lines allowed for two attacks, each on a few connections.
CAUSES = 50
#: Bytes that the second attack may leave: the other client is served meanwhile.
KEPT = 128 * KIB
FRAMING = "amqp:connection:framing-error"
DECODE = "amqp:decode-error"
FORBIDDEN = "amqp:unauthorized-access"


# --- the server, and the client served -------------------------------------------------------------


class Server:
    """Broker with one transport, which is attacked, and a good client that uses it."""

    def __init__(self, broker: Broker, door: str, url: str) -> None:
        self.broker = broker
        self.door = door
        self.url = url
        self.port = int(url.rpartition(":")[2].strip("/"))
        #: Round trips of the good client.
        self.rounds = 0
        #: Set when the next round trip has ended.
        self.round = trio.Event()
        #: A dynamic node of the good client.
        self.dynamic = ""
        #: Connections of the good client, and of the mesh with its own container.
        self.kept = 1

    async def reach(self) -> trio.SocketStream:
        """Connect to the port only."""
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def reach_inside(self) -> trio.abc.Stream:
        """Connect, with TLS if the transport has it."""
        stream = await self.reach()
        if self.door not in ("tls", "wss"):
            return stream
        return await encrypt(stream, client_layer(ClientTls(KNOWN.ca), "localhost"), within=60)

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[Octets]:
        """Connect a client up to the WebSocket or TLS layer, without any AMQP yet."""
        stream = await self.reach_inside()
        async with trio.open_nursery() as nursery:
            if self.door == "ws":
                stream = await request_websocket(stream, host="x", path="/", limits=DEFAULT_LIMITS)
            try:
                with trio.fail_after(30):
                    yield Octets(stream)
            finally:
                await trio.aclose_forcefully(stream)
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def eve(
        self, by: bytes, container: str = "eve", **properties: Any
    ) -> AsyncIterator[Octets]:
        """Connect eve with the login *by*, an open connection and a session, frame by frame."""
        async with self.stranger() as peer:
            await peer.say(SASL_HEADER, by)
            assert (await peer.hear(SaslOutcome)).code == 0
            opening = frame(Open(container_id=container, properties=properties))
            await peer.say(AMQP_HEADER, opening, SESSION)
            await peer.hear(Begin)
            yield peer

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Connection]:
        """Connect a client of ours as eve, or with the login in *options*."""
        options.setdefault("auth", Plain("eve", USERS["eve"]))
        async with (
            Container("client") as container,
            container.connect(self.url, reconnect=None, tls=ClientTls(KNOWN.ca), **options) as peer,
        ):
            yield peer


async def verify(user: str, password: str, peer: Peer) -> str | None:
    """Check a password at no cost: attacks on its cost are in test_identities.py."""
    await trio.lowlevel.checkpoint()
    return user if USERS.get(user) == password else None


@asynccontextmanager
async def served(door: str, *, meshed: bool = False) -> AsyncIterator[Server]:
    """Run a server over *door*, attacked within the block; check the conditions common to all attacks."""
    with logged() as (lines, loud):
        async with attackable(door) as server, AsyncExitStack() as stack:
            if meshed:
                mesh = Mesh(server.broker.container, role="interior", urls=())
                await stack.enter_async_context(mesh)
                server.kept += 1
            yield server
    text = "\n".join(lines)
    for secret in (*USERS.values(), SECRET.decode(), "eyJ"):
        assert secret not in text
    # Each cause has a line, however often it occurs; and no attacker adds others.
    assert len(loud) <= CAUSES
    assert not [each for each in loud if "\n" in each]


@contextmanager
def logged() -> Iterator[tuple[list[str], list[str]]]:
    """Collect log lines, all and those from INFO on; as text, since records would keep objects alive."""
    lines: list[str] = []
    loud: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))
            if record.levelno >= logging.INFO:
                loud.append(record.getMessage())

    log = logging.getLogger("amqp_rt")
    handler, level = Kept(), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield lines, loud
    finally:
        log.propagate = True
        log.setLevel(level)
        log.removeHandler(handler)


@asynccontextmanager
async def attackable(door: str) -> AsyncIterator[Server]:
    """Run the server with a client that is served before, within and after the block."""
    async with Broker(
        "b",
        limits=LIMITS,
        users=verify,
        sasl=["PLAIN", "MSSBCBS"],
        access=Access(
            [
                Rule("*", Rights.MANAGE, users=("good",)),
                Rule("eve", Rights.MANAGE, users=("eve",)),
                Rule("$mesh", Rights.MANAGE, users=("eve",)),
            ]
        ),
        cbs=Cbs([Jwt(audience="shop", secret=SECRET)]),
        tls=ServerTls(KNOWN.server),
    ) as broker:
        await broker.declare(Queue("good"), Queue("eve"))
        (url,) = await broker.listen(f"{SCHEMES[door]}://127.0.0.1:0")
        server = Server(broker, door, url)
        async with (
            Container("good") as container,
            container.connect(
                url,
                reconnect=None,
                tls=ClientTls(KNOWN.ca),
                auth=Plain("good", USERS["good"]),
            ) as peer,
            peer.sender("good", name="out") as out,
            peer.receiver("good", name="in") as incoming,
            peer.receiver(dynamic=True) as replies,
            trio.open_nursery() as nursery,
        ):
            assert replies.address
            # The worker of a node stays after its first call.
            for node in ("$management", "$cbs"):
                with suppress(CallFailed):
                    asked = {"operation": "put-token", "type": "jwt", "name": "good"}
                    await peer.call(node, Message("", application_properties=asked), reply=Message)
            server.dynamic = replies.address

            async def go_on() -> None:
                while True:
                    await out.send(b"x" * 100)
                    async with await incoming.receive() as delivery:
                        assert delivery.body == b"x" * 100
                    server.rounds += 1
                    server.round.set()
                    server.round = trio.Event()
                    await trio.sleep(0.005)

            nursery.start_soon(go_on)
            yield server
            with trio.fail_after(30):
                for _ in range(2):
                    await server.round.wait()
            assert broker.stats("good").consumers == 1
            nursery.cancel_scope.cancel()


async def attacked(server: Server, attack: Callable[[Server], Awaitable[None]]) -> None:
    """Attack *server* twice; both leave nothing behind, and the second no memory either."""
    tasks = tasks_of()
    tracemalloc.start()
    try:
        await attack(server)
        await over(server, tasks)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await attack(server)
        _, peak = tracemalloc.get_traced_memory()
        await over(server, tasks)
        for _ in range(100):
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            if after - before < KEPT:
                break
            await server.round.wait()
    finally:
        tracemalloc.stop()
    with trio.fail_after(30):
        # An attack may be over within one round; the next shows that the client is still served.
        await server.round.wait()
    assert after - before < KEPT
    assert peak - before < 16 * MIB


def tasks_of() -> Counter[str]:
    """Count the tasks by name."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, waiting = Counter[str](), [root]
    while waiting:
        task = waiting.pop()
        found[task.name] += 1
        for nursery in task.child_nurseries:
            waiting += nursery.child_tasks
    return found


async def over(server: Server, tasks: Counter[str]) -> None:
    """Wait until the attacker's connections and tasks have ended."""
    for _ in range(1_000):
        if len(server.broker.container.connections) == server.kept and tasks_of() <= tasks:
            break
        await server.round.wait()
    else:
        pytest.fail(f"left: {tasks_of() - tasks}, {server.broker.container.connections}")
    stats = server.broker.stats("eve")
    assert (stats.consumers, stats.producers, stats.acquired) == (0, 0, 0)
    # Messages that were rightly accepted are no leak.
    await server.broker.purge("eve")
    # The task of the good client may be anywhere in its round trip.
    gc.collect()


# --- input in frames -------------------------------------------------------------------------------

SESSION = frame(Begin(next_outgoing_id=0, incoming_window=2_048, outgoing_window=2_048))


def login(user: str, password: str | None = None, *, mechanism: str = "PLAIN") -> bytes:
    shown = USERS.get(user) if password is None else password
    return frame(SaslInit(mechanism, f"\0{user}\0{shown}".encode()), kind=1)


def attach(*, to: str | None = "eve", handle: int = 0, name: str = "l", **fields: Any) -> bytes:
    """Return the attach of a link on which eve sends."""
    given = {"source": Source(), "target": Target(address=to), "initial_delivery_count": 0}
    return frame(Attach(name=name, handle=handle, role=False, **(given | fields)))


def attach_receiver(of: str, *, handle: int = 0, name: str = "r", **fields: Any) -> bytes:
    source = Source(address=of, **fields)
    return frame(
        Attach(name=name, handle=handle, role=True, source=source, target=Target(address="x"))
    )


def selecting(text: str) -> bytes:
    name = Symbol("apache.org:selector-filter:string")
    return attach_receiver("eve", filter={name: Described(Symbol(name), text)})


def flow(**fields: Any) -> bytes:
    given = {
        "next_incoming_id": 0,
        "incoming_window": 2_048,
        "next_outgoing_id": 0,
        "outgoing_window": 2_048,
    }
    return frame(Flow(**(given | fields)))


def transfer(number: int | None, payload: bytes, *, more: bool = False) -> bytes:
    tag = None if number is None else struct.pack(">I", number)
    return frame(Transfer(0, number, tag, 0, more=more), payload=payload)


def in_begin(value: bytes) -> bytes:
    """Return a begin with the octets of *value* among its properties."""
    pairs = b"\xa3\x01p" + value
    fields = b"\x40\x43\x52\x09\x52\x09\x40\x40\x40"
    fields += b"\xd1" + struct.pack(">II", 4 + len(pairs), 2) + pairs
    body = b"\x00\x53\x11\xd0" + struct.pack(">II", 4 + len(fields), 8) + fields
    return struct.pack(">IBBH", len(body) + 8, 2, 0, 1) + body


def message(*pieces: bytes, ends: bool = True) -> bytes:
    """Return one delivery in as many transfers as there are *pieces*."""
    last = len(pieces) - 1
    return b"".join(
        transfer(None if at else 0, piece, more=at < last or not ends)
        for at, piece in enumerate(pieces)
    )


def cut(payload: bytes) -> list[bytes]:
    return [payload[at : at + 60_000] for at in range(0, len(payload), 60_000)]


NESTED = b"\x40"
for _ in range(40):
    NESTED = b"\xd0" + struct.pack(">II", 4 + len(NESTED), 1) + NESTED
NULLS = b"\xf0" + struct.pack(">II", 5, 60_000) + b"\x40"
MANY = Message(b"", application_properties={f"k{number}": number for number in range(100_000)})
EXTREME = 2**63 - 1


class Said(Struct, frozen=True, kw_only=True):
    """Input of an attacker, and the condition in the answer."""

    octets: bytes
    #: Condition of a close, an end, a detach, a rejection or a login; empty if there is none.
    gets: str
    #: Octets that eve sends before, and the frame that she waits for.
    first: bytes = b""
    until: type | None = None
    #: Her login; None for a stranger, who receives no open in any case.
    by: bytes | None = login("eve")


def out_of(octets: bytes, gets: str, **more: Any) -> Said:
    """Return input on a sending link that has credit."""
    return Said(first=attach(**more), until=Flow, octets=octets, gets=gets)


def nobody(octets: bytes, gets: str = "") -> Said:
    return Said(octets=octets, gets=gets, by=None)


SAID: dict[str, Said] = {
    "framing: a size of 4 GiB": Said(octets=b"\xff\xff\xff\xff\x02\0\0\0", gets=FRAMING),
    "framing: a size of 7": Said(octets=b"\0\0\0\x07\x02\0\0\0", gets=FRAMING),
    "framing: a doff of 1": Said(octets=b"\0\0\0\x08\x01\0\0\0", gets=FRAMING),
    "framing: a doff beyond": Said(octets=b"\0\0\0\x08\x03\0\0\0", gets=FRAMING),
    "framing: an unknown type": Said(octets=b"\0\0\0\x08\x02\x07\0\0", gets=FRAMING),
    "framing: above what was agreed on": Said(octets=b"\0\x01\0\x01\x02\0\0\0", gets=FRAMING),
    "framing: 4 GiB from a stranger": nobody(SASL_HEADER + b"\xff\xff\xff\xff\x02\x01\0\0"),
    "framing: another protocol": nobody(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "decoder: lists in lists": Said(octets=in_begin(NESTED), gets=DECODE),
    "decoder: descriptors of descriptors": Said(octets=in_begin(b"\0" * 50_000), gets=DECODE),
    "decoder: described in described": Said(
        octets=in_begin(b"\0\x53\x01" * 10_000 + b"\x40"), gets=DECODE
    ),
    "decoder: a count of 4 GiB": Said(
        octets=in_begin(b"\xd0\0\0\0\x04\xff\xff\xff\xff"), gets=DECODE
    ),
    "decoder: 4 GiB of nulls": Said(
        octets=in_begin(b"\xf0\0\0\0\x05\xff\xff\xff\xff\x40"), gets=DECODE
    ),
    "decoder: nulls again and again": Said(
        octets=in_begin(b"\xd0" + struct.pack(">II", 4 + 100 * len(NULLS), 100) + NULLS * 100),
        gets=DECODE,
    ),
    "decoder: a size beyond the frame": Said(octets=in_begin(b"\xb1\0\0\xff\xff"), gets=DECODE),
    "decoder: an odd map": Said(octets=in_begin(b"\xc1\x04\x03\x40\x40\x40"), gets=DECODE),
    "decoder: what is no UTF-8": Said(octets=in_begin(b"\xa1\x02\xc3\x28"), gets=DECODE),
    "decoder: a symbol above ASCII": Said(octets=in_begin(b"\xa3\x01\xff"), gets=DECODE),
    "sasl: an open among its frames": nobody(SASL_HEADER + frame(Open(container_id="x"), kind=1)),
    "sasl: frames before the outcome": nobody(SASL_HEADER + OPEN + SESSION),
    "sasl: none at all": nobody(AMQP_HEADER + OPEN + SESSION + attach(to="$cbs")),
    "sasl: AMQP's header without init": nobody(SASL_HEADER + AMQP_HEADER + OPEN),
    "sasl: the client's outcome": nobody(
        SASL_HEADER + frame(SaslOutcome(0), kind=1) + AMQP_HEADER + OPEN
    ),
    "sasl: the client's mechanisms": nobody(
        SASL_HEADER + frame(SaslMechanisms([Symbol("PLAIN")]), kind=1)
    ),
    "sasl: a response to nothing": nobody(SASL_HEADER + frame(SaslResponse(b"x"), kind=1)),
    "sasl: a second init": nobody(
        SASL_HEADER + login("eve", "guess") + login("eve") + AMQP_HEADER + OPEN, "sasl 1"
    ),
    "sasl: a mechanism that is not offered": nobody(
        SASL_HEADER + login("eve", mechanism="SCRAM-SHA-256"), "sasl 1"
    ),
    "sasl: PLAIN of one part": nobody(
        SASL_HEADER + frame(SaslInit("PLAIN", b"eve"), kind=1), "sasl 1"
    ),
    "sasl: PLAIN for another user": nobody(
        SASL_HEADER + frame(SaslInit("PLAIN", b"good\0eve\0correct-staple"), kind=1), "sasl 1"
    ),
    "sasl: PLAIN that is no UTF-8": nobody(
        SASL_HEADER + frame(SaslInit("PLAIN", b"\0\xff\0\xff"), kind=1), "sasl 1"
    ),
    "credentials: ANONYMOUS, which is off": nobody(
        SASL_HEADER + frame(SaslInit("ANONYMOUS", b"x"), kind=1), "sasl 1"
    ),
    "credentials: EXTERNAL without a certificate": nobody(
        SASL_HEADER + frame(SaslInit("EXTERNAL", b"good"), kind=1), "sasl 1"
    ),
    "credentials: guest": nobody(SASL_HEADER + login("guest", "guest"), "sasl 1"),
    "logs: lines of one's own": nobody(SASL_HEADER + login("x\nroot logged in", "y"), "sasl 1"),
    "addresses: to send elsewhere": Said(octets=attach(to="good"), gets=FORBIDDEN),
    "addresses: to receive from elsewhere": Said(octets=attach_receiver("good"), gets=FORBIDDEN),
    "addresses: a pattern": Said(octets=attach_receiver("*"), gets=FORBIDDEN),
    "addresses: a path": Said(octets=attach(to="eve/../good"), gets=FORBIDDEN),
    "addresses: past the anonymous terminus": out_of(
        transfer(0, Message(b"x", to="good").encode()), FORBIDDEN, to=None
    ),
    "addresses: another one at the second attach": Said(
        first=attach() + frame(Detach(handle=0)),
        until=Detach,
        octets=attach(to="good"),
        gets=FORBIDDEN,
    ),
    "cbs: before the first token": Said(
        by=frame(SaslInit("MSSBCBS", b""), kind=1), octets=attach(), gets=FORBIDDEN
    ),
    "management: before the first token": Said(
        by=frame(SaslInit("MSSBCBS", b""), kind=1),
        octets=attach(to="$management"),
        gets=FORBIDDEN,
    ),
    "links: the unsettled of others": Said(
        first=attach(unsettled={b"\0\0\0\0": ACCEPTED}), until=Flow, octets=b"", gets=""
    ),
    "flow: before there is credit": Said(
        octets=attach() + b"".join(transfer(number, b"\0Ss\x45") for number in range(1_000)),
        gets="amqp:link:transfer-limit-exceeded",
    ),
    "flow: drains and echoes": Said(
        first=attach_receiver("eve"),
        until=Attach,
        octets=flow(handle=0, delivery_count=0, link_credit=2**32 - 1, drain=True, echo=True)
        * 1_000,
        gets="",
    ),
    "flow: dispositions of everything": out_of(
        b"".join(
            frame(Disposition(role, 0, 2**31 - 1, True, ACCEPTED))
            for _ in range(500)
            for role in (True, False)
        ),
        "",
    ),
    "messages: one that never ends": out_of(
        message(*[b"\0Su\xb0\0\0\xea\x60" + b"\0" * 60_000] * 10, b"", ends=False), ""
    ),
    "messages: a durable one, and no store": out_of(
        transfer(0, Message(b"x", durable=True).encode()), "amqp:precondition-failed"
    ),
    "messages: one that is too large": out_of(
        message(*cut(Message(b"x" * (MIB + 1)).encode())), "amqp:link:message-size-exceeded"
    ),
    "messages: what is none": out_of(transfer(0, b"\xff" * 1_000), DECODE),
    "messages: 100,000 properties": out_of(
        message(*cut(MANY.encode())), "amqp:link:message-size-exceeded"
    ),
    "messages: extreme times": out_of(
        transfer(
            0,
            b"\0Ss\xc0\x15\x0a"
            + b"\x40" * 8
            + b"\x83"
            + struct.pack(">q", -EXTREME)
            + b"\x40\0Sw\x40",
        ),
        "",
    ),
    "selectors: deep": Said(
        octets=selecting("(" * 200 + "a = 1" + ")" * 200), gets="amqp:invalid-field"
    ),
    "selectors: wildcards": Said(
        octets=selecting(f"a LIKE '{'%a' * 65}'"), gets="amqp:invalid-field"
    ),
    "event loop: much to decode": Said(
        octets=frame(
            Flow(
                next_incoming_id=0,
                incoming_window=9,
                next_outgoing_id=0,
                outgoing_window=9,
                properties={Symbol(f"k{number}"): [True] * 100 for number in range(500)},
            )
        )
        * 5,
        gets="",
    ),
}


@pytest.mark.slow
@pytest.mark.req("SE18", "L6", "X3", "T9")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", SAID)
async def test_what_is_said(name: str, door: str) -> None:
    row = SAID[name]

    async def attack(server: Server) -> None:
        async with server.stranger() if row.by is None else server.eve(row.by) as peer:
            if row.first:
                await peer.say(row.first)
            if row.until is not None:
                await peer.hear(row.until)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.end)
                await peer.say(row.octets)
                if row.by is not None:
                    # Nodes answer in tasks of their own.
                    await trio.sleep(0.02)
                    await peer.say(frame(Close()))
            assert peer.condition == row.gets
            if row.by is None:
                assert not [each for each in peer.heard if isinstance(each, Open | Begin | Attach)]

    async with served(door) as server:
        await attacked(server, attack)


# --- actions ---------------------------------------------------------------------------------------


async def ended(stream: trio.abc.ReceiveStream) -> bytes:
    """Return the octets received on *stream* until its end."""
    found = b""
    try:
        while data := await stream.receive_some(65_536):
            found += data
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    return found


async def flood(server: Server) -> None:
    """Open more connections without a login than an address may have: the excess is closed at once."""
    most = LIMITS.connections_unauthenticated_per_address_max
    over_most = trio.Semaphore(0)

    async def wait(stream: trio.abc.Stream) -> None:
        await ended(stream)
        over_most.release()

    async with trio.open_nursery() as nursery:
        streams = [await server.reach() for _ in range(most + 15)]
        for each in streams:
            nursery.start_soon(wait, each)
        for _ in range(15):
            await over_most.acquire()
        await trio.sleep(0.05)
        assert over_most.value == 0
        nursery.cancel_scope.cancel()
    for each in streams:
        await trio.aclose_forcefully(each)


def greeting(door: str) -> bytes:
    """Return the first octets of a good client."""
    if door == "tls":
        layer = client_layer(ClientTls(KNOWN.ca), "localhost")
        layer.handshake(b"")
        return b"".join(layer.outgoing())
    if door == "ws":
        return asking()
    return SASL_HEADER + login("eve", "cut")


async def cut_off(server: Server) -> None:
    """Send a greeting that is cut anywhere, with the stream closed properly or not."""
    said = greeting(server.door)
    for at in range(0, len(said) - 1, len(said) // 8):
        stream = await server.reach()
        await stream.send_all(said[:at])
        if at % 2:
            await stream.send_eof()
            await ended(stream)
        await trio.aclose_forcefully(stream)


async def noise(server: Server) -> None:
    """Send octets of no protocol."""
    for octet in (b"\0", b"\x16", b"\xa5", b"\xff"):
        stream = await server.reach()
        await stream.send_all(octet * 1_000)
        await stream.send_eof()
        await ended(stream)
        await trio.aclose_forcefully(stream)


async def guess(server: Server) -> None:
    """Try a wrong password and an unknown user, which get the same answer."""
    answers = []
    for user in ("good", "nobody", "GOOD", "good "):
        async with server.stranger() as peer:
            await peer.say(SASL_HEADER, login(user, "guess"))
            await peer.end()
            answers.append(peer.heard)
    assert [type(each) for each in answers[0]] == [SaslMechanisms, SaslOutcome]
    assert all(each == answers[0] for each in answers)


async def post(server: Server) -> None:
    """Try to send without the right in a transaction."""
    async with server.client() as peer, peer.sender(None) as relay:
        with pytest.raises(DeliveryRejected) as caught:
            async with peer.transaction() as transaction:
                await relay.send(Message(b"x", to="good"), transaction=transaction)
        assert caught.value.condition == FORBIDDEN


async def steal(server: Server) -> None:
    """Attach with the good client's link names and container-id: for another user they are other links."""
    async with server.eve(login("eve"), container="good") as peer:
        await peer.say(attach(name="out"), attach_receiver("eve", name="in", handle=1))
        await peer.hear(Attach, 2)
        await peer.say(frame(Close()))
        await peer.end()
        assert peer.condition == ""


async def eavesdrop(server: Server) -> None:
    """Try to use a dynamic node of another client."""
    async with server.eve(login("eve")) as peer:
        await peer.say(attach_receiver(server.dynamic))
        await peer.hear(Detach)
        assert peer.condition == FORBIDDEN
    # The name of one does not reveal that of the next.
    assert len(server.dynamic) > 20


async def manage(server: Server) -> None:
    """Send all management requests without the right: each gets 403."""
    async with server.client() as peer:
        for operation in ("READ", "UPDATE", "DELETE", "PURGE", "PEEK"):
            asked = {"operation": operation, "name": "good", "type": "amqp_rt.queue"}
            with pytest.raises(CallFailed) as caught:
                await peer.call(
                    "$management",
                    Message({}, body_kind="value", application_properties=asked),
                    reply=Message,
                )
            assert str(caught.value.info["statusCode"]) == "403"


CLAIMS = {"sub": "eve", "aud": "shop", "exp": 4_000_000_000, "scope": "send:good"}


def token(header: Any, *, key: bytes = SECRET, **changes: Any) -> str:
    """Return a hand-made token with an HMAC by *key*."""
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    parts = [json.dumps(each).encode() for each in (header, claims)]
    text = ".".join(base64.urlsafe_b64encode(each).rstrip(b"=").decode() for each in parts)
    digest = hmac.digest(key, text.encode(), "sha256")
    return f"{text}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


HS256 = {"alg": "HS256"}
TOKENS = {
    "alg none": token({"alg": "none"}).rpartition(".")[0] + ".",
    "alg nOnE": token({"alg": "nOnE"}),
    "another key": token(HS256, key=b"x" * 40),
    "an empty key": token(HS256, key=b""),
    "a key id that is a path": token({"alg": "RS256", "kid": "../../dev/zero"}),
    "expired": token(HS256, exp=1),
    "without expiry": token(HS256, exp=None),
    "expiry as text": token(HS256, exp="4000000000"),
    "not yet": token(HS256, nbf=3_999_999_999),
    "for others": token(HS256, aud="bank"),
    "deep": token({"alg": [[[[[[[[[["HS256"]]]]]]]]]]}),
    "large": token(HS256, pad="x" * 9_000),
    "nothing": "",
}


async def forge(server: Server) -> None:
    """Send invalid tokens, which give no rights."""
    async with server.client() as peer:
        for name, text in TOKENS.items():
            asked = {"operation": "put-token", "type": "jwt", "name": "good"}
            reply = await peer.call(
                "$cbs", Message(text, application_properties=asked), reply=Message
            )
            status = reply.application_properties["status-code"]
            assert status == {"large": 403, "nothing": 400}.get(name, 401), name
        with pytest.raises(LinkRefused) as refused:
            await peer.sender("good").wait_attached()
        assert refused.value.condition == FORBIDDEN


DONE = [flood, cut_off, noise, guess, post, steal, eavesdrop, manage, forge]


@pytest.mark.req("SE18", "L6", "SE15", "SE16")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("attack", DONE, ids=lambda each: each.__name__)
async def test_what_is_done(attack: Callable[[Server], Awaitable[None]], door: str) -> None:
    async with served(door) as server:
        await attacked(server, attack)


# --- attacks on a mesh -----------------------------------------------------------------------------


def member(role: str) -> dict[str, Any]:
    """Return the properties of an open of eve as a member of the mesh."""
    return {
        "x-opt-mesh": {
            "versions": [1],
            "mesh": "mesh",
            "node": "eve",
            "incarnation": 7,
            "role": role,
            "zone": "",
            "cost": 1,
        }
    }


def routed(*route: Any, handle: int = 0) -> bytes:
    """Return the attach of a link that came along a route."""
    name = f"leg-{handle}"
    return attach(name=name, handle=handle, properties={Symbol("x-opt-mesh-route"): list(route)})


def records(*payloads: bytes, settled: bool = True) -> tuple[bytes, bytes]:
    """Return the attach of a link of records, and messages for it."""
    given = attach(to="$mesh", name="records", snd_settle_mode=1 if settled else 2)
    transfers = [
        frame(Transfer(0, number, struct.pack(">I", number), 0, settled=settled), payload=payload)
        for number, payload in enumerate(payloads)
    ]
    return given, b"".join(transfers)


#: A record whose origin is another node.
FORGED = b"\x00\x53\x77" + encode_record(Links("b", 2**61, 9, 1, "", False, (), {"eve": 1}))
FORCED = "amqp:connection:forced"
NOT_ALLOWED = "amqp:not-allowed"

#: Role of eve in the mesh, empty for none; what she sends before she waits for credit; what she sends then; what she gets.
MESHED: dict[str, tuple[str, bytes, bytes, str]] = {
    "a route, from no member": ("", b"", routed("b"), NOT_ALLOWED),
    "records, from no member": ("", b"", attach(to="$mesh"), NOT_ALLOWED),
    "a route, from an edge": ("edge", b"", routed("b"), NOT_ALLOWED),
    "records asked for": ("interior", b"", attach_receiver("$mesh"), NOT_ALLOWED),
    "a route that is none": ("interior", b"", routed("b", 5), "amqp:invalid-field"),
    "a route that loops": ("interior", b"", routed("b", "eve", "b"), "amqp:invalid-field"),
    "a route that is too long": (
        *("interior", b"", routed("b", *(f"n{number}" for number in range(16)))),
        "amqp:invalid-field",
    ),
    "a route of others": ("interior", b"", routed("x", "eve"), "amqp:not-found"),
    "a route to an unknown node": ("interior", b"", routed("b", "x"), "amqp:not-found"),
    "a flood of legs": (
        *("interior", b"", b"".join(routed("b", handle=handle) for handle in range(21))),
        "amqp:resource-limit-exceeded",
    ),
    "records twice": (
        *("interior", records()[0], attach(to="$mesh", name="2", handle=1)),
        NOT_ALLOWED,
    ),
    "records that are not settled": ("edge", *records(FORGED, settled=False), FORCED),
    "records with sections": ("edge", *records(Message(b"x").encode()), FORCED),
    "a record that is too large": (
        *("edge", records(settled=False)[0], message(*cut(bytes(131_072)))),
        "amqp:link:message-size-exceeded",
    ),
    "forged records of an edge": ("edge", *records(*(FORGED,) * 60), ""),
    "records that are malformed": ("interior", *records(*(b"\x00\x53\x77\xc0\xff\xff",) * 60), ""),
}


@pytest.mark.slow
@pytest.mark.req("SE18", "L6", "P3")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", MESHED)
async def test_what_is_done_to_a_mesh(name: str, door: str) -> None:
    role, first, octets, gets = MESHED[name]

    async def attack(server: Server) -> None:
        async with server.eve(login("eve"), **(member(role) if role else {})) as peer:
            if first:
                await peer.say(first)
                await peer.hear(Flow)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.end)
                await peer.say(octets)
                # Nodes answer in tasks of their own.
                await trio.sleep(0.02)
                await peer.say(frame(Close()))
            assert peer.condition == gets

    async with served(door, meshed=True) as server:
        await attacked(server, attack)


# --- attacks on WebSockets --------------------------------------------------------------------------


def asking(path: str = "/", *, protocols: tuple[str, ...] = ("amqp",), **headers: str) -> bytes:
    """Return the handshake of a client."""
    extra = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = Request(host="x", target=path, subprotocols=list(protocols), extra_headers=extra)
    return WSConnection(ConnectionType.CLIENT).send(request)


def masked(first: int, payload: bytes = b"", *, length: bytes | None = None) -> bytes:
    """Return a client's frame with any content; its mask is zero."""
    if length is None:
        length = bytes([len(payload)])
        if len(payload) > 125:
            length = struct.pack("!BH", 126, len(payload))
    return bytes([first, length[0] | 0x80]) + length[1:] + bytes(4) + payload


#: Handshake request, and the HTTP status in the answer.
ASKED = {
    "a foreign page": (asking(Origin="https://evil.example"), 403),
    "no page": (asking(Origin="null"), 403),
    "no subprotocol": (asking(protocols=()), 400),
    "another subprotocol": (asking(protocols=("mqtt",)), 400),
    "another path": (asking("/admin"), 404),
    "a huge header": (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, 400),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3_000, 400),
    "no WebSocket": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "another method": (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
}
#: Content of frames, and the code of the close.
FRAMED = {
    "text": (masked(0x81, b"text"), 1003),
    "not masked": (b"\x82\x04abcd", 1002),
    "compressed": (masked(0xC2, b"abcd"), 1002),
    "a reserved bit": (masked(0x92, b"abcd"), 1002),
    "a reserved opcode": (masked(0x83, b"abcd"), 1002),
    "a reserved control": (masked(0x8B), 1002),
    "a continuation of nothing": (masked(0x80, b"abcd"), 1002),
    "a ping in pieces": (masked(0x09, b"a"), 1002),
    "a length of 2**62": (masked(0x82, length=b"\x7f\x40" + b"\0" * 7) + b"x" * 20_000, 1009),
    "a length of 2**64": (masked(0x82, length=b"\x7f" + b"\xff" * 8), 1002),
    "fragments without end": (masked(0x02) + masked(0x00) * 500, 1009),
    "pings without end": (masked(0x89) * 500, 1009),
}


@pytest.mark.req("SE18", "L2")
@pytest.mark.parametrize("door", ["ws", pytest.param("wss", marks=pytest.mark.slow)])
@pytest.mark.slow
@pytest.mark.parametrize("name", [*ASKED, *FRAMED])
async def test_what_is_done_to_websockets(name: str, door: str) -> None:
    octets, expected = ASKED.get(name) or FRAMED[name]

    async def attack(server: Server) -> None:
        stream = await server.reach_inside()
        side = WSConnection(ConnectionType.CLIENT)
        if name in FRAMED:
            await stream.send_all(side.send(Request(host="x", target="/", subprotocols=["amqp"])))
            side.receive_data(await stream.receive_some())
            assert [type(each) for each in side.events()] == [AcceptConnection]
        found = b""

        async def listen() -> None:
            nonlocal found
            found = await ended(stream)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                await Octets(stream).say(octets)
        if name in FRAMED:
            side.receive_data(found)
            codes = [each.code for each in side.events() if isinstance(each, CloseConnection)]
            assert codes == [expected]
        else:
            assert found.startswith(f"HTTP/1.1 {expected} ".encode())
        await trio.aclose_forcefully(stream)

    async with served(door) as server:
        await attacked(server, attack)
