"""TLS on a port of its own and within the AMQP port, and invalid certificates."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from certificates import Certificates, certificates
from wire import frame

from amqp_rt.addresses import parse_url
from amqp_rt.broker import Broker
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node
from amqp_rt.core.frames import AMQP_HEADER, SASL_FRAME, SASL_HEADER, performative_frame
from amqp_rt.core.performatives import Open
from amqp_rt.core.sasl_frames import SaslInit
from amqp_rt.errors import AuthenticationFailed, ConnectFailed
from amqp_rt.events import Peer
from amqp_rt.limits import Limits
from amqp_rt.net.channels import ANSWERS_MAX, LayeredChannel
from amqp_rt.net.dial import dial
from amqp_rt.net.layers import LayeredStream
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.preamble import TLS_HEADER
from amqp_rt.net.tls import ClientTls, ServerTls, TlsError, TlsLayer, client_layer, encrypt
from amqp_rt.security.mechanisms import External, ExternalServer
from amqp_rt.values import Symbol

KNOWN = certificates()
SEEN: list[Peer] = []


@node("seen")
async def see(body: Any, peer: Peer) -> None:
    SEEN.append(peer)


@pytest.fixture
def known() -> Certificates:
    return KNOWN


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[Peer]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


@asynccontextmanager
async def serving(
    tls: ServerTls | None, scheme: str = "amqps", **options: Any
) -> AsyncIterator[str]:
    """Run a container with TLS; give its URL with a host name."""
    options.setdefault("limits", Limits(failed_login_delay_s=0.01))
    async with Container("server", nodes=[see], tls=tls, **options) as container:
        (url,) = await container.listen(f"{scheme}://127.0.0.1:0")
        yield url.replace("127.0.0.1", "localhost")


@asynccontextmanager
async def reaching(url: str, tls: Any, **options: Any) -> AsyncIterator[Any]:
    async with (
        Container("client") as client,
        client.connect(url, tls=tls, reconnect=None, **options) as peer,
    ):
        yield peer


async def say(url: str, tls: Any, size: int = 10, **options: Any) -> None:
    """Send one message to the server, and wait for its outcome."""
    async with reaching(url, tls, **options) as peer, peer.sender("seen") as sender:
        await sender.send(b"x" * size)


# --- a port of its own -----------------------------------------------------------------------------


@pytest.mark.req("SE7", "L1")
@pytest.mark.parametrize("version", ["1.2", "1.3"])
@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_a_message_over_tls(
    known: Certificates, seen: list[Peer], version: Any, size: int
) -> None:
    server = ServerTls(known.server, minimum=version)
    context = ssl.create_default_context(cafile=str(known.ca))
    context.maximum_version = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}[
        version
    ]
    async with serving(server) as url:
        await say(url, context, size)
    (peer,) = seen
    assert (peer.secure, peer.certificate) == (True, None)


@pytest.mark.req("SE7")
def test_amqps_has_its_port() -> None:
    assert parse_url("amqps://host").port == 5671


@pytest.mark.req("SE7")
async def test_versions_that_are_too_old_are_refused(known: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(known.ca))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(ServerTls(known.server, minimum="1.3")) as url:
        with pytest.raises(ConnectFailed, match="the peer refuses our versions of TLS"):
            await say(url, context)
    assert ServerTls(known.server)._context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert ClientTls(known.ca).context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.req("SE7")
async def test_the_peers_certificate_is_verified(known: Certificates) -> None:
    async with serving(ServerTls(known.stranger)) as url:
        with pytest.raises(ConnectFailed, match="certificate is not believed: unable to get local"):
            await say(url, ClientTls(known.ca))
        # Without a configured authority the certificate is not trusted either.
        with pytest.raises(ConnectFailed, match="certificate is not believed"):
            await say(url, None)


@pytest.mark.req("SE7")
async def test_the_peers_name_is_verified(known: Certificates, seen: list[Peer]) -> None:
    elsewhere = known.issue("elsewhere.example.org")
    async with serving(ServerTls(elsewhere)) as url:
        with pytest.raises(ConnectFailed, match="Hostname mismatch"):
            await say(url, ClientTls(known.ca))
        await say(url, ClientTls(known.ca, server_name="elsewhere.example.org"))
        await say(url, ClientTls(known.ca, verify_name=False))
    assert len(seen) == 2


@pytest.mark.req("SE7")
async def test_an_address_is_a_name_too(known: Certificates, seen: list[Peer]) -> None:
    async with serving(ServerTls(known.server)) as url:
        await say(url.replace("localhost", "127.0.0.1"), ClientTls(known.ca))
    assert len(seen) == 1


@pytest.mark.req("SE7")
async def test_the_certificate_depends_on_the_name_that_is_asked_for(known: Certificates) -> None:
    one, other = known.issue("one.example.org"), known.issue("*.two.example.org")
    tls = ServerTls(
        known.server,
        names={"one.example.org": (one, None), "*.two.example.org": (other, None)},
    )
    async with serving(tls) as url:
        for name in ("localhost", "one.example.org", "a.two.example.org"):
            await say(url, ClientTls(known.ca, server_name=name))
        with pytest.raises(ConnectFailed, match="Hostname mismatch"):
            await say(url, ClientTls(known.ca, server_name="two.example.org"))


@pytest.mark.req("SE7", "B25", "X4")
@pytest.mark.parametrize("upgrade", [False, True])
@pytest.mark.parametrize(
    ("asked", "login", "opened", "expected"),
    [
        ("berlin.example.org", None, None, "berlin.example.org"),
        ("BERLIN.example.org", None, None, "berlin.example.org"),
        ("berlin.example.org", "paris.example.org", None, "paris.example.org"),
        ("berlin.example.org", None, "paris.example.org", "paris.example.org"),
        ("berlin.example.org", "berlin.example.org", "paris.example.org", "paris.example.org"),
        ("berlin.example.org", None, "elsewhere.example.org", ""),
        ("elsewhere.example.org", None, None, ""),
        (None, None, None, ""),
    ],
)
async def test_the_name_that_is_asked_for_may_name_the_virtual_host(
    known: Certificates,
    asked: str | None,
    login: str | None,
    opened: str | None,
    expected: str,
    upgrade: bool,
) -> None:
    """The open's host name has priority, then that of SASL, then TLS (Part 2 §2.7.1, §5.3.3.2)."""
    hosts = ["", "berlin.example.org", "paris.example.org"]
    context = ssl.create_default_context(cafile=known.ca)
    context.check_hostname = False
    async with Broker(tls=ServerTls(known.server), virtual_hosts=hosts) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        stream: Any = await trio.open_tcp_stream("127.0.0.1", parse_url(url).port)
        if upgrade:
            await stream.send_all(TLS_HEADER)
            assert await stream.receive_some(8) == TLS_HEADER
        layer = TlsLayer(context, server_hostname=asked)
        async with await encrypt(stream, layer, within=5) as tls:
            await tls.send_all(
                SASL_HEADER
                + performative_frame(0, SaslInit(Symbol("ANONYMOUS"), None, login), SASL_FRAME)
                + AMQP_HEADER
                + frame(Open(container_id="c", hostname=opened))
            )
            said = b""
            with trio.fail_after(5):
                while b"\0\x53\x10" not in said:  # its open
                    said += await tls.receive_some()
            (there,) = broker.container.connections
            peer = there.peer
            assert peer.virtual_host == expected
            assert peer.server_name == (asked or "").lower()


@pytest.mark.req("SE7")
async def test_what_is_spoken_inside_is_agreed_on(known: Certificates) -> None:
    async def agreed(asked: tuple[str, ...], **options: Any) -> str | None:
        ours, theirs = memory_stream_pair()
        server = ServerTls(known.server, **options).layer()
        client = client_layer(ClientTls(known.ca, alpn=asked), "localhost")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shake, ours, server)
            nursery.start_soon(shake, theirs, client)
        assert server.alpn == client.alpn
        return client.alpn

    assert await agreed(("amqp",)) == "amqp"
    assert await agreed(()) is None
    assert await agreed(("h2", "mine"), alpn=["mine"]) == "mine"
    assert await agreed(("h2",)) is None


async def shake(stream: trio.abc.Stream, layer: TlsLayer) -> None:
    await encrypt(stream, layer, within=5)


# --- certificates of clients -----------------------------------------------------------------------


@pytest.mark.req("SE7", "SE2")
async def test_a_client_is_whom_its_certificate_names(
    known: Certificates, seen: list[Peer]
) -> None:
    tls = ServerTls(known.server, client_ca=known.ca)
    async with serving(tls, sasl=["EXTERNAL"]) as url:
        await say(url, ClientTls(known.ca, certificate=known.client), auth=External())
        await say(url, ClientTls(known.ca, certificate=known.client), auth=External("ada"))
        with pytest.raises(AuthenticationFailed):
            await say(url, ClientTls(known.ca, certificate=known.client), auth=External("bob"))
    assert [(peer.user, peer.mechanism) for peer in seen] == [("ada", "EXTERNAL")] * 2
    certificate = seen[0].certificate
    assert certificate is not None
    assert certificate.subject["commonName"] == "ada"
    assert certificate.dns_names == ("client.example.org",)
    assert certificate.serial_number
    assert seen[0].identity == certificate


@pytest.mark.req("SE7", "SE2")
async def test_which_user_a_certificate_stands_for_is_up_to_the_program(
    known: Certificates, seen: list[Peer]
) -> None:
    tls = ServerTls(known.server, client_ca=known.ca)
    by_host = ExternalServer(lambda certificate: certificate.dns_names[0].partition(".")[0])
    reject = ExternalServer(lambda certificate: None)
    async with serving(tls, sasl=[by_host]) as url:
        await say(url, ClientTls(known.ca, certificate=known.client), auth=External())
    assert seen[0].user == "client"
    async with serving(tls, sasl=[reject]) as url:
        with pytest.raises(AuthenticationFailed):
            await say(url, ClientTls(known.ca, certificate=known.client), auth=External())


@pytest.mark.req("SE7")
@pytest.mark.parametrize("version", ["1.2", "1.3"])
async def test_who_must_show_a_certificate_and_does_not_is_turned_away(
    known: Certificates, version: str
) -> None:
    context = ssl.create_default_context(cafile=str(known.ca))
    context.maximum_version = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}[
        version
    ]
    async with serving(ServerTls(known.server, client_ca=known.ca)) as url:
        with pytest.raises(ConnectFailed, match=r"certificate of ours|refused the TLS handshake"):
            await say(url, context)
        stranger = ClientTls(known.ca, certificate=known.stranger)
        with pytest.raises(ConnectFailed, match="does not believe who signed our certificate"):
            await say(url, stranger)


@pytest.mark.req("SE7", "SE2")
async def test_external_is_offered_to_those_with_a_certificate_only(
    known: Certificates, seen: list[Peer]
) -> None:
    tls = ServerTls(known.server, client_ca=known.ca, client_certificate="optional")
    async with serving(tls, sasl=["EXTERNAL", "PLAIN"], users={"bob": "s3cret"}) as url:
        with pytest.raises(AuthenticationFailed, match="only these SASL mechanisms: PLAIN"):
            await say(url, ClientTls(known.ca), auth=External())
        await say(url.replace("://", "://bob:s3cret@"), ClientTls(known.ca))
    assert seen[0].user == "bob"


# --- within the AMQP port --------------------------------------------------------------------------


@pytest.mark.req("SE8", "X2")
async def test_one_port_for_all_who_come(known: Certificates, seen: list[Peer]) -> None:
    async with serving(ServerTls(known.server), "amqp") as url:
        await say(url, None)
        await say(url, ClientTls(known.ca), tls_upgrade=True)
        await say(url.replace("amqp://", "amqps://"), ClientTls(known.ca))
    assert [peer.secure for peer in seen] == [False, True, True]


@pytest.mark.req("SE8", "SE9")
async def test_tls_may_be_a_must(known: Certificates, seen: list[Peer]) -> None:
    async with serving(ServerTls(known.server), "amqp", tls_required=True) as url:
        with pytest.raises(ConnectFailed, match="the peer requires TLS"):
            await say(url, None)
        with pytest.raises(ConnectFailed, match="the peer requires TLS"):
            await say(url, None, sasl=False)
        await say(url, ClientTls(known.ca), tls_upgrade=True)
        await say(url.replace("amqp://", "amqps://"), ClientTls(known.ca))
    assert [peer.secure for peer in seen] == [True, True]
    with pytest.raises(ValueError, match="tls_required needs certificates"):
        Container("server", tls_required=True)


@pytest.mark.req("SE8", "SE9")
async def test_where_tls_is_a_must_there_are_no_websockets_in_clear(known: Certificates) -> None:
    tls = ServerTls(known.server)
    async with Container("server", tls=tls, tls_required=True) as server:
        with pytest.raises(ConnectFailed, match="TLS is required, and ws:// has none; use wss://"):
            await server.listen("ws://127.0.0.1:0/")
        await server.listen("wss://127.0.0.1:0/")
        # A stream that the program passes in is closed as well.
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(server.accept, ours, "192.0.2.1:5", scheme="ws"))
            assert await theirs.receive_some() == b""


@pytest.mark.req("SE8")
@pytest.mark.parametrize("header", [b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00", b"GET / HT"])
async def test_who_speaks_in_clear_hears_that_tls_is_a_must(
    known: Certificates, header: bytes
) -> None:
    async with serving(ServerTls(known.server), "amqp", tls_required=True) as url:
        stream = await trio.open_tcp_stream("127.0.0.1", parse_url(url).port)
        async with stream:
            await stream.send_all(header)
            answer = b""
            while piece := await stream.receive_some():
                answer += piece
    assert answer == TLS_HEADER


@pytest.mark.req("SE8")
async def test_the_client_does_not_go_on_without(known: Certificates) -> None:
    async with serving(None, "amqp") as url:
        with pytest.raises(ConnectFailed, match="does not offer TLS within its AMQP port"):
            await say(url, ClientTls(known.ca), tls_upgrade=True)
        with pytest.raises(
            ConnectFailed, match=r"the peer does not speak TLS there|during the TLS"
        ):
            await say(url.replace("amqp://", "amqps://"), ClientTls(known.ca))
    with pytest.raises(ConnectFailed, match="the upgrade to TLS is for amqp://"):
        await say("amqps://localhost", None, tls_upgrade=True)


@pytest.mark.req("SE8")
async def test_hello_may_follow_the_header_at_once(known: Certificates) -> None:
    """Octets after the header in the same segment are the beginning of TLS."""
    async with serving(ServerTls(known.server), "amqp") as url:
        stream = await trio.open_tcp_stream("127.0.0.1", parse_url(url).port)
        layer = client_layer(ClientTls(known.ca), "localhost")
        assert not layer.handshake(None)
        await stream.send_all(TLS_HEADER + b"".join(layer.outgoing()))
        answer = b""
        while len(answer) < 8:
            answer += await stream.receive_some(8 - len(answer))
        assert answer == TLS_HEADER
        secure = await encrypt(stream, layer, within=5)
        await secure.send_all(b"AMQP\x00\x01\x00\x00")
        assert await secure.receive_some() == b"AMQP\x00\x01\x00\x00"
        await secure.aclose()


@pytest.mark.req("SE9")
async def test_no_password_is_asked_for_in_clear(known: Certificates) -> None:
    from amqp_rt.security.mechanisms import PlainServer, offered

    async def reject(user: str, password: str, peer: Peer) -> None:
        return None

    def names(**where: bool) -> tuple[str, ...]:
        return offered([PlainServer(reject)], **{"plain_in_clear": False, **where})

    assert names(secure=False, local=False) == ()
    assert names(secure=False, local=False, plain_in_clear=True) == ("PLAIN",)
    assert names(secure=True, local=False) == ("PLAIN",)
    assert names(secure=False, local=True) == ("PLAIN",)


# --- new certificates ------------------------------------------------------------------------------


@pytest.mark.req("L7")
async def test_certificates_are_exchanged_under_running_connections(
    known: Certificates, tmp_path: Path, seen: list[Peer]
) -> None:
    path = tmp_path / "server.pem"
    path.write_bytes(known.issue("localhost", common_name="old").read_bytes())
    tls = ServerTls(path)
    async with (
        serving(tls) as url,
        reaching(url, ClientTls(known.ca)) as peer,
        peer.sender("seen") as sender,
    ):
        await sender.send(b"before")
        path.write_bytes(known.stranger.read_bytes())
        tls.reload()
        # New connections get the new certificate; existing ones stay.
        with pytest.raises(ConnectFailed, match="not believed"):
            await say(url, ClientTls(known.ca))
        await say(url, ClientTls(known.other_ca))
        await sender.send(b"after")
        path.write_bytes(b"half a file")
        with pytest.raises(TlsError, match=r"server.pem is no PEM file with"):
            tls.reload()
        await say(url, ClientTls(known.other_ca))
    assert len(seen) == 4


# --- mistakes --------------------------------------------------------------------------------------


def _mistakes() -> dict[str, tuple[Any, str]]:
    folder = KNOWN.folder
    (folder / "words.pem").write_text("words")
    (folder / "key.pem").write_bytes(KNOWN.client.read_bytes())
    return {
        "no certificate": (lambda: ServerTls("gone.pem"), "cannot read the certificate from gone"),
        "no key": (
            lambda: ServerTls(KNOWN.server, "gone.pem"),
            "cannot read its key from gone.pem",
        ),
        "words": (lambda: ServerTls(folder / "words.pem"), "words.pem is no PEM file with a"),
        "words as key": (
            lambda: ServerTls(KNOWN.server, folder / "words.pem"),
            "are no PEM files of a certificate and its key, or the key's password is wrong",
        ),
        "another's key": (
            lambda: ServerTls(KNOWN.server, folder / "key.pem"),
            "key.pem does not belong to the certificate",
        ),
        "no authorities": (
            lambda: ServerTls(KNOWN.server, client_ca="gone.pem"),
            "cannot read the authorities from gone.pem: No such file or directory",
        ),
        "words as authorities": (
            lambda: ClientTls(folder / "words.pem"),
            "words.pem is no PEM file of certificates",
        ),
        "version": (
            lambda: ClientTls(minimum="1.0"),
            "the lowest version of TLS is '1.2' or '1.3'",
        ),  # type: ignore[arg-type]
        "certificates": (
            lambda: ServerTls(KNOWN.server, client_certificate="maybe"),  # type: ignore[arg-type]
            "client_certificate is 'optional' or 'required', not 'maybe'",
        ),
    }


MISTAKES = _mistakes()


@pytest.mark.req("SE7")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name: str) -> None:
    make, sentence = MISTAKES[name]
    with pytest.raises(TlsError) as it:
        make()
    assert sentence in it.value.description
    assert "BEGIN" not in it.value.description


@pytest.mark.req("SE7")
async def test_amqps_needs_a_certificate() -> None:
    async with Container("server") as container:
        with pytest.raises(ConnectFailed, match="there is no certificate; pass tls=ServerTls"):
            await container.listen("amqps://127.0.0.1:0")


# --- misbehaving peers -----------------------------------------------------------------------------


@pytest.mark.req("SE18", "X7")
@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"])
async def test_a_handshake_that_does_not_go_on_ends(
    known: Certificates, hello: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    if hello:
        await theirs.send_all(hello)
    with pytest.raises(ConnectFailed, match="took longer than 5 s"):
        await encrypt(ours, ServerTls(known.server).layer(), within=5)
    assert trio.current_time() == pytest.approx(5)
    assert await theirs.receive_some() == b""


@pytest.mark.req("SE18", "SE7")
@pytest.mark.parametrize(
    "hello", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(500), b"A" * 9]
)
async def test_what_is_no_hello_is_refused(known: Certificates, hello: bytes) -> None:
    ours, theirs = memory_stream_pair()
    await theirs.send_all(hello)
    with pytest.raises(ConnectFailed):
        await encrypt(ours, ServerTls(known.server).layer(), within=5)


@pytest.mark.req("SE7")
async def test_octets_however_they_are_cut(known: Certificates) -> None:
    """The handshake and records arrive one octet at a time."""
    ours, theirs = memory_stream_pair()
    ends: dict[str, LayeredStream] = {}

    class Slow(trio.abc.Stream):
        def __init__(self, stream: trio.abc.Stream) -> None:
            self.stream = stream

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            return bytes(await self.stream.receive_some(1))

        async def send_all(self, data: Any) -> None:
            await self.stream.send_all(data)

        async def wait_send_all_might_not_block(self) -> None:
            await self.stream.wait_send_all_might_not_block()

        async def aclose(self) -> None:
            await self.stream.aclose()

    async def end(name: str, stream: trio.abc.Stream, layer: TlsLayer) -> None:
        ends[name] = await encrypt(Slow(stream), layer, within=60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end, "server", ours, ServerTls(known.server).layer())
        nursery.start_soon(end, "client", theirs, client_layer(ClientTls(known.ca), "localhost"))
    await ends["client"].send_all(b"x" * 5_000)
    await ends["client"].send_eof()
    got = b""
    while piece := await ends["server"].receive_some():
        got += piece
    assert got == b"x" * 5_000


class Narrow:
    """Channel that accepts a set number of octets at a time, and returns its given input."""

    def __init__(self) -> None:
        self.room = 0
        self.sent = b""
        self.arrived: list[bytes] = []

    def recv(self, size: int, /) -> bytes:
        if not self.arrived:
            raise BlockingIOError
        return self.arrived.pop(0)

    def send(self, data: Any, /) -> int:
        if not self.room:
            raise BlockingIOError
        size = min(self.room, len(data))
        self.room -= size
        self.sent += bytes(data[:size])
        return size

    def sendmsg(self, buffers: Any, /) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, how: int, /) -> None:
        self.sent += b"|"

    def close(self) -> None:
        self.room = 0


class Doubling:
    """Layer that sends everything twice, and answers ``?`` with ``!``."""

    appetite = 1_000
    half_closes = True

    def __init__(self) -> None:
        self.ended = False
        self.out = b""

    def receive(self, data: bytes) -> bytes:
        self.out += b"!" * data.count(b"?")
        if data.endswith(b"."):
            self.ended = True
        return data.strip(b".?")

    def send(self, data: bytes | memoryview) -> None:
        self.out += bytes(data) * 2

    def outgoing(self) -> list[bytes | memoryview]:
        out, self.out = self.out, b""
        return [out] if out else []

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.out += b"."


@pytest.mark.slow
@pytest.mark.req("L1")
@pytest.mark.parametrize("width", [1, 2, 3, 7, 1_000, 1_000_000])
def test_what_has_not_left_is_not_counted_as_sent(width: int) -> None:
    """The carrier offers the same bytes again until all of them have been passed down."""
    below = Narrow()
    channel = LayeredChannel(below, Doubling())
    whole = bytes(range(256)) * 900
    buffers = [memoryview(whole)[:7], memoryview(whole)[7:100_000], memoryview(whole)[100_000:]]
    if width < 7:
        buffers = [memoryview(whole)[:40], memoryview(whole)[40:50]]
    expected = b"".join(bytes(each) for each in buffers)
    rounds = 0
    while buffers:
        below.room = width
        rounds += 1
        try:
            sent = channel.sendmsg(buffers)
        except BlockingIOError:
            continue
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = buffers[0][sent:]
    assert sorted(below.sent) == sorted(expected * 2)
    assert len(below.sent) == 2 * len(expected)
    below.room = 0
    with pytest.raises(BlockingIOError):
        channel.shutdown(1)
    below.room = 1
    channel.shutdown(1)
    assert below.sent.endswith(b".|")


@pytest.mark.req("SE18")
def test_answers_that_nobody_reads_are_bounded() -> None:
    below = Narrow()
    channel = LayeredChannel(below, Doubling())
    below.arrived = [b"?" * ANSWERS_MAX, b"?"]
    with pytest.raises(BlockingIOError):
        channel.recv(10)
    with pytest.raises(ConnectionError, match="provokes answers and does not read them"):
        channel.recv(10)


@pytest.mark.req("L1")
def test_the_end_is_said_once_and_after_the_data() -> None:
    below = Narrow()
    channel = LayeredChannel(below, Doubling())
    below.arrived = [b"last.", b"more"]
    assert channel.recv(10) == b"last"
    assert channel.recv(10) == b""


@pytest.mark.req("L1", "SE7")
async def test_dialling_in_vain_leaves_nothing_open(known: Certificates) -> None:
    async with serving(ServerTls(known.server)) as url:
        for tls in (ClientTls(known.other_ca), ClientTls(known.ca, server_name="x.org")):
            with pytest.raises(ConnectFailed):
                await dial(parse_url(url), tls=tls, limits=Limits())
        with trio.move_on_after(0) as scope:
            await dial(parse_url(url), tls=ClientTls(known.ca))
        assert scope.cancelled_caught


@pytest.mark.req("SE18", "X7")
async def test_a_listener_does_not_wait_for_a_handshake(known: Certificates) -> None:
    async with serving(ServerTls(known.server), limits=Limits(tls_handshake_s=0.05)) as url:
        stream = await trio.open_tcp_stream("127.0.0.1", parse_url(url).port)
        async with stream:
            assert await stream.receive_some() == b""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"amqps://127.0.0.1:{listener.socket.getsockname()[1]}"
    async with listener:
        with pytest.raises(ConnectFailed, match=r"took longer than 0.05 s"):
            await dial(parse_url(url), limits=Limits(tls_handshake_s=0.05))


async def test_both_sides_hear_who_of_them_speaks_tls(
    known: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "amqp_rt.net")
    async with serving(None, "amqp") as url:
        with pytest.raises(ConnectFailed, match="without TLS the scheme is amqp://"):
            await say(url.replace("amqp://", "amqps://"), ClientTls(known.ca))
    async with serving(ServerTls(known.server), "amqps") as url:
        with pytest.raises(ConnectFailed, match="if the port is for TLS, write amqps://"):
            await say(url.replace("amqps://", "amqp://"), None)
    lines = [each.getMessage() for each in caplog.records if each.name == "amqp_rt.net"]
    assert len(lines) == 2
    assert lines[0].endswith(
        "refused: it began TLS, and the listener has no certificate: amqp:// and ws:// are without"
    )
    assert lines[1].endswith("refused: the peer does not speak TLS there")
