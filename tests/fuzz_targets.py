"""Parsers of foreign input, each as a function of octets that returns or raises.

A target raises only the errors that its parser declares; any other is a finding. ``fuzz/test_corpus.py``
runs ``fuzz/corpus/TARGET/*`` and mutations of these through them: a few in quick runs, for a minute each in
long ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import amqp010_targets
import servicebus_targets
import trio
import trio.testing
from amqp_rt_console import HttpDoor
from amqp_rt_rabbitmq.operations import WAITS, Operations
from amqp_rt_rabbitmq.requests import HttpResponse, encode_response, read_request
from hostile import PROGRAMS

from amqp_rt.addresses import parse_url
from amqp_rt.bodies import BodyReader
from amqp_rt.broker import Broker, Queue
from amqp_rt.broker.entries import EntryFactory
from amqp_rt.broker.filtering.selectors import FILTEX, JMS, QPID, InvalidFilter, compile_selector
from amqp_rt.broker.filtering.views import Exhausted, MessageView
from amqp_rt.codec.primitives import Reader
from amqp_rt.container.compression import decompressed
from amqp_rt.container.doors import DoorArrival
from amqp_rt.core.frames import SASL_HEADER
from amqp_rt.errors import AmqpError, AuthenticationFailed, ConnectFailed, DecodeError
from amqp_rt.events import Peer
from amqp_rt.fronts import QueueDeclaration
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.limits import DEFAULT_LIMITS, KIB, Limits
from amqp_rt.mesh.records import decode_record, encode_record
from amqp_rt.message import Message, walk
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.proxy_headers import octets_missing, parse_header
from amqp_rt.net.traces.recording import read_trace
from amqp_rt.net.websocket import accept_websocket, request_websocket
from amqp_rt.security.bearer import BearerServer, CbsLoginServer, Login
from amqp_rt.security.identities import Users
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.mechanisms import PlainServer
from amqp_rt.security.scram import Scram, ScramServer
from amqp_rt.security.tokens import Cbs, SasKeys, Swt, TokenRefused
from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.sqlite import SQLiteStore

SECRET: Final = b"a secret of at least 32 octets, for HS256"
LIMITS: Final = Limits(websocket_message_max=4_096)


def finish(call: Awaitable[Any]) -> Any:
    """Return the result of *call*, which must not wait."""
    steps = call.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


# --- targets ---------------------------------------------------------------------------------------


def types(data: bytes) -> None:
    """Read one value of any type, described or not."""
    try:
        Reader(data).read_value()
    except DecodeError:
        pass


def frames(data: bytes) -> None:
    """Feed a whole conversation to each kind of engine."""
    for make in PROGRAMS.values():
        program = make()
        program.hear(data)
        program.end()


def message(data: bytes) -> None:
    """Read the sections of a message by decoding, relaying and streaming."""
    for read in (Message.decode, walk, _stream):
        try:
            read(data)
        except DecodeError:
            pass


def mesh_records(data: bytes) -> None:
    """Read a message of a mesh; an accepted one is encoded and read again without a difference."""
    try:
        record = decode_record(data)
    except DecodeError:
        return
    if record is not None:
        assert decode_record(encode_record(record)) == record


def proxy_headers(data: bytes) -> None:
    """Read a header of the PROXY protocol as it arrives, and never an octet after it."""
    begun = b""
    try:
        while missing := octets_missing(begun, DEFAULT_LIMITS.proxy_header_max):
            piece = data[len(begun) : len(begun) + missing]
            if not piece:
                return
            begun += piece
        found = parse_header(begun)
    except DecodeError:
        return
    assert len(begun) <= 2 * KIB
    assert len(found.authority) <= 255


def requests(data: bytes) -> None:
    """Read a request of RabbitMQ's management, carry it out, and encode the answer."""
    try:
        asked = read_request(data, LIMITS)
    except DecodeError:
        return
    work = _management().carry_out(asked, lambda: None)
    try:
        while next(work) != WAITS:
            pass
    except StopIteration as done:
        answer: HttpResponse = done.value
    except AmqpError as error:
        answer = HttpResponse.of(error)
    else:
        return
    try:
        encode_response(asked, answer)
    except AmqpError:
        # Such as arguments that only have an encoding in another protocol.
        encode_response(asked, HttpResponse(500))


class _NoTokens:
    """Stands for the tokens of a connection that takes none."""

    def begin(self, token: bytes, on_done: Callable[[], None]) -> Any:
        raise AmqpError("no tokens are taken", condition="amqp:not-allowed")


@cache
def _management() -> Operations:
    """Return the operations of a client of a broker with a few queues and exchanges."""
    limits = Limits(nodes_max=50, exchanges_max=50, bindings_max=100)
    broker = Broker("b", volatile=True, limits=limits)
    peer = Peer(trusted=True)
    topology = broker.topologies.of(peer, Anchor(limits, peer, "s"))
    topology.declare_queue(QueueDeclaration(name="q"))
    topology.bind_queue("q", "amq.headers", "k", {"x-match": "any", "n": 1})
    return Operations(topology, peer, _NoTokens())  # type: ignore[arg-type]


def columns(data: bytes) -> None:
    """Decode a message in C, which must agree with plain Python or decline it."""
    import column_twins

    if column_twins.module() is not None:
        column_twins.check(data)


def _stream(data: bytes) -> None:
    reader = BodyReader()
    for at in range(0, len(data), 7):
        reader.feed(data[at : at + 7])
    reader.finish()


def sasl(data: bytes) -> None:
    """Read frames of the SASL layer, and the data of mechanisms in them."""
    for name in ("server with sasl", "client with sasl"):
        program = PROGRAMS[name]()
        program.hear(SASL_HEADER + data)
        program.end()

    async def verify(*_: object) -> Any:
        return Login("ada")

    async def reject(*_: object) -> None:
        return None

    cbs = Cbs([SasKeys({"k": "key"})])
    mechanisms = [
        PlainServer(verify),
        *(BearerServer(name, verify) for name in ("OAUTHBEARER", "XOAUTH2")),
        CbsLoginServer(cbs, DEFAULT_LIMITS),
        ScramServer("SHA-256", reject),
    ]
    for mechanism in mechanisms:
        exchange = mechanism.begin() if hasattr(mechanism, "begin") else mechanism
        first, _, second = data.partition(b"\xff\xfe")
        finish(exchange.respond(first, Peer()))
        finish(exchange.respond(second, Peer()))
    client = Scram("ada", "pw", iterations_max=4_096)
    client.initial()
    try:
        client.respond(data)
        client.finish(data)
    except AuthenticationFailed:
        pass


def websocket(data: bytes) -> None:
    """Read a client's handshake and frames, then a server's."""
    trio.run(_websocket, data, clock=trio.testing.MockClock(autojump_threshold=0))


_HELLO: Final = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: amqp\r\n\r\n"
)


async def _websocket(data: bytes) -> None:
    for begins in (b"", _HELLO):
        ours, theirs = memory_stream_pair()
        await theirs.send_all(begins + data)
        await theirs.send_eof()
        async with trio.open_nursery() as nursery:
            try:
                stream = await accept_websocket(ours, path="/", origins=(), limits=LIMITS, within=5)
                while await stream.receive_some():
                    pass
            except (ConnectFailed, trio.BrokenResourceError):
                pass
            nursery.cancel_scope.cancel()
    ours, theirs = memory_stream_pair()
    await theirs.send_all(data)
    await theirs.send_eof()
    async with trio.open_nursery() as nursery:
        try:
            await request_websocket(ours, host="x", path="/", limits=LIMITS)
        except (ConnectFailed, trio.BrokenResourceError):
            pass
        nursery.cancel_scope.cancel()


def http(data: bytes) -> None:
    """Answer requests at the HTTP door, with a login in their headers or without."""
    trio.run(_http, data, clock=trio.testing.MockClock(autojump_threshold=0))


async def _verify(user: str, password: str, peer: Peer) -> str | None:
    return user if password == "x" else None


async def _http(data: bytes) -> None:
    async with Broker("b", users=_verify, sasl=["PLAIN"]) as broker:
        await broker.declare(Queue("q"))
        door = HttpDoor(broker, "http://127.0.0.1:0")
        async with door.open():
            ours, theirs = memory_stream_pair()
            await theirs.send_all(data)
            await theirs.send_eof()
            await door.accept(ours, DoorArrival(address="127.0.0.1:1", logged_in=lambda: None))
            await trio.aclose_forcefully(ours)
            answer = bytes(await theirs.receive_some(65_536))
            # A fault of ours, which the log has.
            assert not answer.startswith(b"HTTP/1.1 500 "), answer


_PROPERTIES: Final = {"a": "x" * 4_096, "b1": 5, "c": True}
_ENTRY: Final = EntryFactory("fuzz").make_entry(
    Message("body", subject="s" * 100, application_properties=_PROPERTIES).encode(), 0, 0.0
)


def selector(data: bytes) -> None:
    """Compile the text of a selector, and apply it to a message."""
    text = data.decode("utf-8", "replace")
    for dialect in (JMS, QPID, FILTEX):
        try:
            compile_selector(text, dialect)(MessageView(_ENTRY, DEFAULT_LIMITS))
        except (InvalidFilter, Exhausted):
            pass


def token(data: bytes) -> None:
    """Validate a JSON web token, a simple web token, a shared access signature."""
    text = data.decode("utf-8", "replace")
    for validator in (
        Jwt(audience="shop", secret=SECRET),
        Swt(SECRET),
        SasKeys({"k": "key"}),
    ):
        try:
            finish(validator.validate(text, time.time()))
        except TokenRefused:
            pass


def compression(data: bytes) -> None:
    """Decode a compressed body; the first octet chooses the encoding."""
    limits = Limits(decompressed_max=KIB, decompressed_ratio_max=10)
    try:
        found = decompressed(data[1:], ("gzip", "zstd")[data[:1] > b"\x7f"], limits)
    except DecodeError as error:
        assert str(error)  # noqa: PT017
    else:
        assert len(found) <= KIB


def url(data: bytes) -> None:
    """Parse a URL, for connecting and for listening."""
    text = data.decode("utf-8", "replace")
    for listening in (False, True):
        try:
            parse_url(text, listening=listening)
        except AmqpError:
            pass


def users(data: bytes) -> None:
    """Read the file of users."""
    _in_file(data, lambda path: Users().load(path))


def trace(data: bytes) -> None:
    """Read the trace of a connection."""
    _in_file(data, read_trace)


def store(data: bytes) -> None:
    """Read a store with octets changed, in the database and in its log: each five of *data* give the
    position and the value. Readable messages must be as written; damage must be reported."""
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, octets in _kept().items():
            files[name] = bytearray(octets)
        for at in range(0, len(data) - 4, 5):
            octets = files[sorted(files)[data[at] % len(files)]]
            octets[int.from_bytes(data[at + 1 : at + 4], "big") % len(octets)] = data[at + 4]
        for name, octets in files.items():
            (Path(folder) / name).write_bytes(octets)
        found = SQLiteStore(Path(folder) / "s.db")
        try:
            found.open()
        except AmqpError as error:
            assert str(error)  # noqa: PT017
            return
        try:
            rows = list(found.messages(1, 0, 1_000, 1 << 30))
        except AmqpError as error:
            assert str(error)  # noqa: PT017
            rows = []
        finally:
            found.close()
    for row in rows:
        assert row.payload[:1] * len(row.payload) == row.payload


@cache
def _kept() -> dict[str, bytes]:
    """Return the files of a store whose process was killed."""
    with tempfile.TemporaryDirectory() as folder:
        made = SQLiteStore(Path(folder) / "s.db")
        made.open()
        for number in range(1, 9):
            batch = ChangeSet()
            payload = bytes([number]) * 3_000
            batch.put(1, number, b"head", payload)
            batch.put(2, number, b"head", payload)
            made.commit(batch)
        found = {each.name: each.read_bytes() for each in Path(folder).iterdir()}
        made.close()
    return {name: octets for name, octets in found.items() if octets}


def _in_file(data: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        try:
            read(path)
        except (AmqpError, ValueError) as error:
            assert str(error)  # noqa: PT017


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    each.__name__: each
    for each in (
        *(types, frames, message, columns, sasl, websocket, selector, token, url, users, trace),
        *(store, mesh_records, compression, proxy_headers, requests, http),
        *servicebus_targets.TARGETS,
        *amqp010_targets.TARGETS,
    )
}
