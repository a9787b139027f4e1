"""Limits on every transport: plain TCP, TLS, WebSocket and WebSocket over TLS.

Effects of limits on an engine are in ``test_limits.py``. Here a peer that only sends octets connects
over each transport, as our client and as a server that we connect to: at the bound all works,
above it the connection ends with the condition that the standard names.
"""

from __future__ import annotations

import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from certificates import certificates
from msgspec import Struct
from wire import BEGIN, OPEN, Octets, frame

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.container import Container
from amqp_rt.container.recovery import connect
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Close,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import SaslInit, SaslOutcome
from amqp_rt.errors import AmqpError, AuthenticationFailed, ConnectFailed, ConnectionLost
from amqp_rt.events import Peer
from amqp_rt.limits import DEFAULT_LIMITS, KIB, MIB, Limits
from amqp_rt.mesh import Mesh
from amqp_rt.mesh.peers import MeshMember, open_properties
from amqp_rt.message import Message
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.tls import ClientTls, ServerTls, client_layer, encrypt
from amqp_rt.net.websocket import accept_websocket, request_websocket
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.mechanisms import Plain
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.transactions import Declare
from amqp_rt.values import Described, Symbol

pytestmark = pytest.mark.attack

KNOWN = certificates()
DOORS = {"tcp": "amqp", "tls": "amqps", "ws": "ws", "wss": "wss"}
ELSEWHERE = "192.0.2.1:50000"


@asynccontextmanager
async def visitor(container: Container, door: str) -> AsyncIterator[Octets]:
    """Connect a client from another address over *door* of *container*."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(container.accept, ours, address=ELSEWHERE, scheme=DOORS[door]))
        stream: trio.abc.Stream = theirs
        if door in ("tls", "wss"):
            layer = client_layer(ClientTls(KNOWN.ca), "localhost")
            stream = await encrypt(stream, layer, within=60)
        if door in ("ws", "wss"):
            stream = await request_websocket(stream, host="x", path="/", limits=DEFAULT_LIMITS)
        yield Octets(stream)
        nursery.cancel_scope.cancel()


async def sink(body: Any) -> None:
    """Accept everything, as a node."""


@asynccontextmanager
async def as_client(door: str, limits: Limits) -> AsyncIterator[Octets]:
    """Run a hostile client of our broker, which has sent its header."""
    async with Broker("b", limits=limits, tls=ServerTls(KNOWN.server)) as broker:
        await broker.declare(Queue("q"))
        async with visitor(broker.container, door) as peer:
            await peer.say(AMQP_HEADER)
            yield peer


@asynccontextmanager
async def as_server(door: str, limits: Limits) -> AsyncIterator[Octets]:
    """Run a hostile server that our container connects to, and which has sent its header."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]

    async def dial() -> None:
        async with Container("c", limits=limits) as container:
            container.node("q")(sink)
            url = f"{DOORS[door]}://127.0.0.1:{port}"
            with suppress(AmqpError):
                async with container.connect(
                    url, sasl=False, reconnect=None, tls=ClientTls(KNOWN.ca)
                ) as peer:
                    await peer.wait_closed()

    async with trio.open_nursery() as nursery, listener:
        nursery.start_soon(dial)
        stream: trio.abc.Stream = await listener.accept()
        if door in ("tls", "wss"):
            stream = await encrypt(stream, ServerTls(KNOWN.server).layer(), within=5)
        if door in ("ws", "wss"):
            stream = await accept_websocket(
                stream, path="/", origins=(), limits=DEFAULT_LIMITS, within=5
            )
        peer = Octets(stream)
        await peer.say(AMQP_HEADER)
        yield peer
        nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(stream)


ROLES = {"client": as_client, "server": as_server}


# --- input of the peer -----------------------------------------------------------------------------


def sized(size: int) -> bytes:
    """Return an open of *size* octets."""
    pad = size - len(frame(Open(container_id="c", properties={"pad": "x" * 300}))) + 300
    octets = frame(Open(container_id="c", properties={"pad": "x" * pad}))
    assert len(octets) == size
    return octets


def section(size: int) -> bytes:
    """Return a data section of *size* octets."""
    return b"\x00\x53\x75\xb0" + struct.pack(">I", size - 8) + b"x" * (size - 8)


def transfer(number: int | None, payload: bytes, *, more: bool = False) -> bytes:
    tag = None if number is None else struct.pack(">I", number)
    return frame(Transfer(0, number, tag, 0, more=more), payload=payload)


def attach(handle: int = 0, **fields: Any) -> bytes:
    given = {"source": Source(), "target": Target(address="q"), "initial_delivery_count": 0}
    return frame(Attach(name=f"l{handle}", handle=handle, role=False, **(given | fields)))


def nested(depth: int) -> bytes:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return frame(Open(container_id="c", properties={"p": value}))


def crowded(count: int) -> bytes:
    """Return an open with an array of *count* elements of no width."""
    pairs = b"\xa3\x01p" + b"\xf0" + struct.pack(">II", 5, count) + b"\x41"
    properties = b"\xd1" + struct.pack(">II", 4 + len(pairs), 2) + pairs
    fields = b"\xa1\x01c" + b"\x40" * 8 + properties
    body = b"\x00\x53\x10\xd0" + struct.pack(">II", 4 + len(fields), 10) + fields
    return struct.pack(">IBBH", len(body) + 8, 2, 0, 0) + body


def selecting(size: int) -> bytes:
    """Return the attach of a receiving link with a selector of *size* octets."""
    text = "a = 1".ljust(size)
    name = Symbol("apache.org:selector-filter:string")
    source = Source(address="q", filter={name: Described(Symbol(name), text)})
    return frame(Attach(name="r", handle=0, role=True, source=source, target=Target(address="x")))


class Row(Struct, kw_only=True, frozen=True):
    """Limit with input that reaches it."""

    limits: Limits
    #: Octets to send first, and the frame to wait for afterwards.
    first: bytes = b""
    until: type | None = None
    #: Makes octets for a size or number: called with the bound, and with one more.
    make: Callable[[int], bytes]
    bound: int
    condition: str
    roles: tuple[str, ...] = ("client", "server")


ATTACHED = OPEN + BEGIN + attach()
FRAMING = "amqp:connection:framing-error"
ROWS: dict[str, Row] = {
    "LIM1 frames before open": Row(
        limits=Limits(frame_size_before_open=2_000),
        make=sized,
        bound=2_000,
        condition=FRAMING,
    ),
    "LIM5 frames": Row(
        limits=Limits(frame_size_max=2_000),
        first=ATTACHED,
        until=Flow,
        make=lambda size: transfer(0, section(size - len(transfer(0, b"")))),
        bound=2_000,
        condition=FRAMING,
    ),
    "LIM6 messages": Row(
        limits=Limits(message_size_max=1_000),
        first=ATTACHED,
        until=Flow,
        # The size is checked as the octets arrive, not at the end.
        make=lambda size: (
            transfer(0, section(size)[:900], more=True)
            + transfer(None, section(size)[900:], more=size > 1_000)
        ),
        bound=1_000,
        condition="amqp:link:message-size-exceeded",
    ),
    "LIM7 sessions": Row(
        limits=Limits(channel_max=2),
        first=OPEN,
        make=lambda channel: frame(
            Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9), channel
        ),
        bound=2,
        condition=FRAMING,
    ),
    "LIM7 links": Row(
        limits=Limits(handle_max=2),
        first=OPEN + BEGIN,
        make=attach,
        bound=2,
        condition=FRAMING,
    ),
    "LIM8 nesting": Row(
        limits=Limits(nesting_max=10),
        make=nested,
        # The open and its map count too.
        bound=8,
        condition="amqp:decode-error",
    ),
    "LIM9 elements of no width": Row(
        limits=Limits(elements_max=100),
        make=crowded,
        bound=88,
        condition="amqp:decode-error",
    ),
    "LIM11 selectors": Row(
        limits=Limits(filter_text_max=200),
        first=OPEN + BEGIN,
        make=selecting,
        bound=200,
        condition="amqp:invalid-field",
        roles=("client",),
    ),
    "LIM12 the window of a session": Row(
        limits=Limits(session_window=5),
        first=ATTACHED,
        until=Flow,
        make=lambda count: b"".join(transfer(n, section(20)) for n in range(count)),
        bound=5,
        condition="amqp:session:window-violation",
    ),
    "LIM15 transactions": Row(
        limits=Limits(transactions_max=3),
        first=OPEN + BEGIN + attach(target=Coordinator()),
        until=Flow,
        make=lambda count: b"".join(
            transfer(n, Message(Declare(), body_kind="value").encode()) for n in range(count)
        ),
        bound=3,
        condition="amqp:resource-limit-exceeded",
        roles=("client",),
    ),
}


@pytest.mark.slow
@pytest.mark.req("SE18", "L6", "X3", "T9")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for name, row in ROWS.items() for role in row.roles]
)
async def test_at_the_bound_and_above(name: str, role: str, door: str) -> None:
    row = ROWS[name]
    for above in (0, 1):
        async with ROLES[role](door, row.limits) as peer:
            with trio.fail_after(10):
                if row.first:
                    await peer.say(row.first)
                if row.until is not None:
                    await peer.hear(row.until)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(peer.end)
                    await peer.say(row.make(row.bound + above))
                    # Requests to nodes are answered in tasks of their own.
                    await trio.testing.wait_all_tasks_blocked(0.01)
                    await peer.say(frame(Close()))
            assert peer.condition == (row.condition if above else "")
            opens = [each for each in peer.heard if isinstance(each, Open)]
            if opens:
                # Limits with a field in the open are advertised, even after invalid input.
                (ours,) = opens
                assert ours.max_frame_size == row.limits.frame_size_max
                assert ours.channel_max == row.limits.channel_max
            for each in peer.heard:
                if isinstance(each, Begin):
                    assert each.handle_max == row.limits.handle_max
                    assert each.incoming_window <= row.limits.session_window
                elif isinstance(each, Attach) and type(each.target) is Target and each.role:
                    assert each.max_message_size == row.limits.message_size_max


# --- bounds other than octets ----------------------------------------------------------------------


@asynccontextmanager
async def knocking(door: str, stage: str, limits: Limits) -> AsyncIterator[tuple[Any, bytes]]:
    """Connect a client up to *stage* of *door*; give its stream, and the octets that would follow."""

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        await trio.lowlevel.checkpoint()
        return user if password == "pw" else None

    ours, theirs = memory_stream_pair()
    async with (
        Container(
            "c", limits=limits, tls=ServerTls(KNOWN.server), users=verify, plain_in_clear=True
        ) as container,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(partial(container.accept, ours, address=ELSEWHERE, scheme=DOORS[door]))
        stream: trio.abc.Stream = theirs
        if door in ("tls", "wss") and stage != "hello":
            layer = client_layer(ClientTls(KNOWN.ca), "localhost")
            stream = await encrypt(stream, layer, within=60)
        if door in ("ws", "wss") and stage not in ("hello", "request"):
            stream = await request_websocket(stream, host="x", path="/", limits=DEFAULT_LIMITS)
        peer = Octets(stream)
        init = frame(SaslInit("PLAIN", b"\0ada\0pw"), kind=1)
        rest = {
            "hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"x" * 100,
            "request": b"GET / HTTP/1.1\r\nX: " + b"y" * 1_000,
            "header": SASL_HEADER,
            "init": init,
            "open": AMQP_HEADER + frame(Open(container_id="x" * 100)),
        }
        if stage in ("init", "open"):
            await peer.say(SASL_HEADER)
        if stage == "open":
            await peer.say(init)
            assert (await peer.hear(SaslOutcome)).code == 0
        yield peer, rest[stage]
        nursery.cancel_scope.cancel()


STAGES = [
    *((door, "hello") for door in ("tls", "wss")),
    *((door, "request") for door in ("ws", "wss")),
    *((door, stage) for door in DOORS for stage in ("header", "init", "open")),
]


@pytest.mark.req("SE18", "L6", "X26")
@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize(("door", "stage"), STAGES)
async def test_the_deadline_is_absolute(
    door: str, stage: str, drips: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """A single deadline holds from accept to open, through TLS, WebSocket and SASL, at any pace of octets."""
    limits = Limits(handshake_s=9, tls_handshake_s=4)
    began = trio.current_time()
    async with knocking(door, stage, limits) as (peer, rest), trio.open_nursery() as nursery:
        # Part of the time has passed before this stage.
        await trio.sleep(2)

        async def drip() -> None:
            for at in range(100 if drips else 0):
                await peer.say(rest[at : at + 1])
                await trio.sleep(0.3)
                if at == len(rest) - 2:
                    break

        nursery.start_soon(drip)
        with trio.fail_after(60):
            await peer.end()
        ended = trio.current_time() - began
        # On a WebSocket the peer has a moment longer to receive the reason.
        assert (4 if stage == "hello" else 9) <= ended <= (4 if stage == "hello" else 9) + 2
        nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.req("SE18", "L6")
async def test_strangers_are_counted_at_all_doors_together() -> None:
    """Connections without a login count towards one limit, at every stage and listener."""
    limits = Limits(connections_unauthenticated_max=5, handshake_s=60)
    async with Container("c", limits=limits, tls=ServerTls(KNOWN.server)) as container:
        urls = await container.listen(*(f"{scheme}://127.0.0.1:0" for scheme in DOORS.values()))
        ports = [int(url.rpartition(":")[2].strip("/")) for url in urls]

        async def open_connection(port: int) -> trio.SocketStream:
            return await trio.open_tcp_stream("127.0.0.1", port)

        async def is_admitted(stream: trio.SocketStream) -> bool:
            with trio.move_on_after(0.3):
                try:
                    return bool(await stream.receive_some(1))
                except trio.BrokenResourceError:
                    return False
            return True

        strangers = [await open_connection(port) for port in [*ports, ports[0]]]
        assert [await is_admitted(each) for each in strangers] == [True] * 5
        # A client with a login is not dropped; of the others the oldest makes room, on any transport.
        await strangers[0].send_all(AMQP_HEADER + OPEN)
        await Octets(strangers[0]).hear(Open)
        strangers.append(await open_connection(ports[3]))
        assert [await is_admitted(each) for each in strangers[1:]] == [True] * 5
        for port in ports:
            newest = await open_connection(port)
            assert await is_admitted(newest)
            oldest = strangers.pop(1)
            assert not await is_admitted(oldest)
            await trio.aclose_forcefully(oldest)
            strangers.append(newest)
        # The client with a login is served throughout.
        assert await is_admitted(strangers[0])
        for each in strangers:
            await trio.aclose_forcefully(each)


@pytest.mark.req("SE18", "L6")
@pytest.mark.parametrize("door", DOORS)
async def test_a_failed_login_is_the_last(
    door: str, autojump_clock: trio.testing.MockClock
) -> None:
    """A connection has one attempt; the answer is delayed, longer each time, and the close follows."""
    limits = Limits(failed_login_delay_s=1, failed_login_delay_max_s=3)
    calls = 0

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        nonlocal calls
        calls += 1
        await trio.lowlevel.checkpoint()
        return None

    async with Container(
        "c", limits=limits, users=verify, plain_in_clear=True, tls=ServerTls(KNOWN.server)
    ) as container:
        for attempt, seconds in enumerate((1, 2, 3, 3), 1):
            async with visitor(container, door) as peer:
                began = trio.current_time()
                init = frame(SaslInit("PLAIN", b"\0ada\0guess"), kind=1)
                # A second guess sent along with the first is ignored.
                await peer.say(SASL_HEADER, init, init)
                await peer.hear(SaslOutcome)
                assert trio.current_time() - began == pytest.approx(seconds)
                assert peer.condition == "sasl 1"
                await peer.say(SASL_HEADER, init)
                await peer.end()
                assert len([each for each in peer.heard if type(each) is SaslOutcome]) == 1
            assert calls == attempt


@pytest.mark.slow
@pytest.mark.req("SE18", "L6")
async def test_who_fails_too_often_is_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """An address is refused for a while at every listener; other addresses are not."""
    limits = Limits(failed_logins_max=3, failed_login_delay_s=0, failed_login_memory_s=1)

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        await trio.lowlevel.checkpoint()
        return user if password == "right" else None

    async with Container("c", limits=limits, users=verify, plain_in_clear=True) as container:
        here, there = await container.listen("amqp://127.0.0.1:0", "amqp://127.0.0.1:0")

        async def login(url: str, password: str) -> None:
            auth = Plain("ada", password)
            async with connect(url, auth=auth, reconnect=None):
                pass

        for _ in range(limits.failed_logins_max):
            with pytest.raises(AuthenticationFailed):
                await login(here, "guess")
        for url in (here, there):
            with pytest.raises((ConnectFailed, ConnectionLost)):
                await login(url, "right")
        assert "refused: too many failed logins" in caplog.text
        await trio.sleep(limits.failed_login_memory_s)
        await login(there, "right")


@pytest.mark.req("SE18")
@pytest.mark.parametrize("door", DOORS)
async def test_a_stranger_costs_little_memory(
    door: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Send all that is allowed before a login, and never complete it."""
    async with visitor_of_users(door) as peer:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            # The largest frame without its last octet; then more than may be sent ahead.
            header = struct.pack(">IBBH", 8 * KIB, 2, 1, 0)
            await peer.say(SASL_HEADER, header, b"x" * (8 * KIB - 9))
            await trio.testing.wait_all_tasks_blocked()
            held, _ = tracemalloc.get_traced_memory()
            # Includes the memory of the test harness.
            assert held - before < 256 * KIB
            for _ in range(50):
                await peer.say(b"y" * 10_000)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 2 * MIB
        finally:
            tracemalloc.stop()
        await peer.end()


@asynccontextmanager
async def visitor_of_users(door: str) -> AsyncIterator[Octets]:
    async def verify(user: str, password: str, peer: Peer) -> str | None:
        await trio.lowlevel.checkpoint()
        return None

    async with (
        Container("c", users=verify, plain_in_clear=True, tls=ServerTls(KNOWN.server)) as container,
        visitor(container, door) as peer,
    ):
        yield peer


@pytest.mark.req("SE18", "L6")
@pytest.mark.parametrize("door", DOORS)
async def test_who_does_not_read_costs_little_and_has_to_go(
    door: str, autojump_clock: trio.testing.MockClock
) -> None:
    """A peer that does not read has 24 MiB to receive; after 30 seconds it is disconnected."""
    limits = Limits(output_max=MIB, write_stall_s=30)
    async with Broker("b", limits=limits, tls=ServerTls(KNOWN.server)) as broker:
        await broker.declare(Queue("q"))
        body = Message(b"x" * 60_000).encode()
        for _ in range(400):
            broker.publish("q", body)
        async with visitor(broker.container, door) as peer:
            flow = Flow(
                next_incoming_id=0,
                incoming_window=2**31,
                next_outgoing_id=0,
                outgoing_window=2**31,
                handle=0,
                delivery_count=0,
                link_credit=1_000,
            )
            receiving = Attach(
                name="r", handle=0, role=True, source=Source(address="q"), target=Target()
            )
            await peer.say(AMQP_HEADER, OPEN, BEGIN, frame(receiving))
            await peer.hear(Attach)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                began = trio.current_time()
                await peer.say(frame(flow))
                await trio.sleep(1)
                held, _ = tracemalloc.get_traced_memory()
                (there,) = broker.container.connections
                assert there.engine.output_size < 2 * limits.output_max
                assert held - before < 4 * MIB
                while broker.container.connections:  # noqa: ASYNC110
                    await trio.sleep(1)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < 5 * MIB
            finally:
                tracemalloc.stop()
            assert 30 <= trio.current_time() - began <= 33
        # No message is lost.
        assert broker.stats("q").available == 400


@pytest.mark.req("SE7", "SE18")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_of_tls_is_used_again(version: ssl.TLSVersion) -> None:
    """Each connection needs a full handshake with a certificate; compression is off."""
    listener = ServerTls(KNOWN.server, client_ca=KNOWN.ca)
    context = ssl.create_default_context(cafile=KNOWN.ca)
    context.load_cert_chain(KNOWN.client)
    context.minimum_version = context.maximum_version = version
    session = None
    for _ in range(2):
        ours = listener.layer()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        theirs = context.wrap_bio(incoming, outgoing, server_hostname="localhost", session=session)
        done = False
        for _ in range(5):
            with suppress(ssl.SSLWantReadError):
                theirs.do_handshake()
            data = outgoing.read()
            done = done or ours.handshake(data)
            incoming.write(b"".join(ours.outgoing()))
        assert done
        # Session tickets would arrive with the first data.
        ours.send(b"data")
        incoming.write(b"".join(ours.outgoing()))
        assert theirs.read(4) == b"data"
        assert ours.certificate is not None
        assert theirs.compression() is None
        assert not theirs.session_reused
        session = theirs.session
        assert session is None or not session.has_ticket
    assert listener._context.options & ssl.OP_NO_RENEGOTIATION


# --- members of a mesh -----------------------------------------------------------------------------

#: Initial response of PLAIN, the member's id and role, and why it is no member where the connection is encrypted; empty if it
#: is one, None if its login fails.
MEMBERS: dict[str, tuple[bytes, str, str, str | None]] = {
    "a member": (b"\0eve\0pw", "eve", "interior", ""),
    "an edge": (b"\0dot\0pw", "dot", "edge", ""),
    "an edge that would be a member": (b"\0dot\0pw", "dot", "interior", "it may not join"),
    "a user without a right": (b"\0ann\0pw", "ann", "edge", "it may not join"),
    "another name": (
        *(b"\0eve\0pw", "bob", "interior"),
        "it has logged in under another name than its id",
    ),
    "no login": (b"", "eve", "interior", "it has not logged in"),
    "a wrong password": (b"\0eve\0guess", "eve", "interior", None),
}


@pytest.mark.req("SE18", "L6", "P3")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", MEMBERS)
async def test_who_joins_a_mesh(
    name: str, door: str, autojump_clock: trio.testing.MockClock
) -> None:
    """From another machine only who has logged in over TLS; others are ordinary clients, with the limits of these."""

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        await trio.lowlevel.checkpoint()
        return user if password == "pw" else None

    login, node, role, why = MEMBERS[name]
    access = Access(
        [
            Rule("$mesh", Rights.MANAGE, users=("eve",)),
            Rule("$mesh", Rights.SEND, users=("dot",)),
            Rule("here", Rights.SEND, users=("ann",)),
        ]
    )
    async with Container(
        "b",
        users=verify,
        sasl=["PLAIN", "ANONYMOUS"],
        access=access,
        plain_in_clear=True,
        tls=ServerTls(KNOWN.server),
    ) as container:
        container.node("here")(sink)
        async with (
            Mesh(container, role="interior", urls=()) as mesh,
            visitor(container, door) as peer,
        ):
            mechanism = "PLAIN" if login else "ANONYMOUS"
            await peer.say(SASL_HEADER, frame(SaslInit(mechanism, login), kind=1))
            outcome = await peer.hear(SaslOutcome)
            assert (outcome.code != 0) is (why is None)
            if why is None:
                await peer.end()
                assert mesh.stats().members_refused == {}
                return
            if door in ("tcp", "ws"):
                why = "the connection is not encrypted"
            member = open_properties(MeshMember("mesh", node, 7, role, "", 1))
            opening = frame(Open(container_id=node, properties=member))
            route = attach(
                9, target=Target(address="here"), properties={Symbol("x-opt-mesh-route"): ["b"]}
            )
            await peer.say(AMQP_HEADER, opening, BEGIN, route)
            await peer.hear(Attach)
            opened = await peer.hear(Open)
            await trio.sleep(0.1)
            await peer.say(frame(Close()))
            await peer.end()
            stats = mesh.stats()
            assert stats.members_refused == ({why: 1} if why else {})
            assert opened.channel_max == (63 if why else 1_023)
            # Links with a route are judged by no node.
            assert stats.links_refused == (0 if role == "interior" and not why else 1)
