"""Traces of connections: what is in them, what is not, and how they end."""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt import Broker, Cbs, Container, Limits, Rights, Sas, SasKey, SasKeys
from amqp_rt.broker import Queue
from amqp_rt.core.frames import performative_frame
from amqp_rt.core.performatives import Attach, Transfer
from amqp_rt.errors import AmqpError, AuthenticationFailed
from amqp_rt.message import Message
from amqp_rt.net.traces.masks import FrameMask
from amqp_rt.net.traces.octets import (
    HEADER,
    SASL_HEADER,
    Splitter,
    composite,
    encode,
    encode_frame,
)
from amqp_rt.net.traces.recording import MAGIC, Kind, Trace, TraceWriter, read_trace
from amqp_rt.termini import Target

SECRET = "correct horse battery"


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


class File(io.BytesIO):
    """A file whose octets are there after it was closed."""

    octets = b""

    def close(self) -> None:
        if not self.closed:
            self.octets = self.getvalue()
        super().close()


def written(tmp_path: Path, *received: bytes, **options: object) -> Trace:
    file = File()
    writer = TraceWriter(file, client=False, address="them", clock=Time(), **options)  # type: ignore[arg-type]
    for data in received:
        writer.received(data)
    writer.close()
    path = tmp_path / "one"
    path.write_bytes(file.octets)
    return read_trace(path)


def init(mechanism: str, response: bytes | None) -> bytes:
    return encode_frame(composite("sasl_init", mechanism=mechanism, initial_response=response))


# --- what is in them -----------------------------------------------------------------------------


@pytest.mark.req("O5")
async def test_every_connection_leaves_a_trace(tmp_path: Path, autojump_clock: object) -> None:
    folder = tmp_path / "traces"
    async with Broker(trace=folder, volatile=True) as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://b")
        us = Container("us", network=broker.container.network, trace=folder)
        async with us, us.connect("memory://b") as peer, peer.sender("work") as sender:
            await trio.sleep(5)
            await sender.send("hello")
    ours, theirs = sorted(map(read_trace, folder.iterdir()), key=lambda each: not each.client)
    assert (ours.client, theirs.client) == (True, False)
    for client in (True, False):
        # Octets written by one side were read by the other.
        sides = [b"".join(data for _, data in each.chunks(client=client)) for each in (ours, theirs)]  # fmt: skip
        assert sides[0] == sides[1]
        names = [frame.name for frame in Splitter().feed(sides[0])]
        assert {"open", "begin", "attach", "close"} <= set(names)
    (sent,) = [at for at, data in ours.chunks(client=True) if b"hello" in data]
    assert sent == pytest.approx(5, abs=0.1)
    assert ours.records[-1].kind is Kind.END
    assert ours.address == "memory://b"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.req("O5")
async def test_a_connection_without_a_trace_is_as_ever(tmp_path: Path) -> None:
    async with Broker() as broker:
        assert broker.container.traces is None


# --- what is not ---------------------------------------------------------------------------------


@pytest.mark.req("O5", "O1")
async def test_passwords_are_not_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    limits = Limits(failed_login_delay_s=0.01)
    options: dict[str, Any] = {"users": {"anne": SECRET}, "sasl": ["PLAIN"], "limits": limits}
    async with Broker(trace=folder, **options) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with Container("us", trace=folder) as us:
            words = SECRET.replace(" ", "%20")
            async with us.connect(url.replace("//", f"//anne:{words}@")):
                pass
            with pytest.raises(AuthenticationFailed):
                async with us.connect(url.replace("//", "//anne:wrong%20horse@"), reconnect=None):
                    pass
    traces = [path.read_bytes() for path in folder.iterdir()]
    assert len(traces) == 4
    for octets in traces:
        assert b"horse" not in octets
        assert b"\0anne\0****" in octets


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (init("PLAIN", b"as\0me\0secret"), init("PLAIN", b"as\0me\0******")),
        (init("PLAIN", b"\0me\0se\0cret"), init("PLAIN", b"\0me\0*******")),
        (init("PLAIN", b"secret"), init("PLAIN", b"******")),
        (init("PLAIN", None), init("PLAIN", None)),
        (init("XOAUTH2", b"secret"), init("XOAUTH2", b"******")),
        (init("PLAIN", b"\0u\0" + b"s" * 300), init("PLAIN", b"\0u\0" + b"*" * 300)),
        (init("ANONYMOUS", b"me@example"), init("ANONYMOUS", b"me@example")),
        (
            encode_frame(composite("sasl_response", response=b"secret")),
            encode_frame(composite("sasl_response", response=b"******")),
        ),
        (
            encode_frame(composite("sasl_mechanisms", sasl_server_mechanisms=["PLAIN"])),
            encode_frame(composite("sasl_mechanisms", sasl_server_mechanisms=["PLAIN"])),
        ),
    ],
)
def test_responses_are_masked(tmp_path: Path, said: bytes, shown: bytes, step: int) -> None:
    octets = SASL_HEADER + said + HEADER + b"secret"
    pieces = [octets[at : at + step] for at in range(0, len(octets), step)]
    trace = written(tmp_path, *pieces)
    heard = b"".join(data for _, data in trace.chunks(client=True))
    assert heard == SASL_HEADER + shown + HEADER + b"secret"


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x80\0\0\0\0\0\0\0\x41" + encode("list", ["PLAIN", b"\0u\0secret"]),
        b"\x00" + encode("symbol", "amqp:sasl-init:list") + encode("list", ["PLAIN", b"secret"]),
        b"\x00\x53\x41\xc0\x0c\x02\xa1\x05PLAIN\xa0\x06secret",
        b"\x00\x53\x41\xc0\x0c\x02\xa3\x05PLAIN\xa0\x60secret",
        b"\x00\x53\x41secret",
        b"\x00\x53\x41\xc0",
        b"secret",
    ],
)
def test_what_is_not_understood_is_masked_altogether(tmp_path: Path, frame: bytes) -> None:
    trace = written(tmp_path, SASL_HEADER + encode_frame(frame, kind=1))
    heard = b"".join(data for _, data in trace.chunks(client=True))
    assert len(heard) == 16 + len(frame)
    assert heard[16:] == b"*" * len(frame)


@given(st.binary(max_size=80))
def test_nothing_makes_the_mask_fail(body: bytes) -> None:
    file = File()
    writer = TraceWriter(file, client=False, address="", clock=Time())
    writer.received(SASL_HEADER + encode_frame(body, kind=1))
    writer.received(body)
    writer.close()


def test_another_protocol_leaves_its_sizes(tmp_path: Path) -> None:
    trace = written(tmp_path, b"AMQP\1\1\x09\1", b"login secret")
    assert [(r.kind, r.data) for r in trace.records[:-1]] == [
        (Kind.OMITTED_RECEIVED, (8).to_bytes(8, "big")),
        (Kind.OMITTED_RECEIVED, (12).to_bytes(8, "big")),
    ]


# --- how they end --------------------------------------------------------------------------------


@pytest.mark.req("O5")
def test_a_trace_is_bounded(tmp_path: Path) -> None:
    said = [
        size.to_bytes(4, "big") + b"\2\0\0\0\0\x53\x10" + bytes(size - 11) for size in (100, 10_000)
    ]
    trace = written(tmp_path, HEADER, *said, b"z", bytes_max=300)
    assert [record.kind for record in trace.records] == [Kind.RECEIVED, Kind.RECEIVED, Kind.CUT]
    assert (tmp_path / "one").stat().st_size <= 300


@pytest.mark.req("O5")
def test_a_folder_of_traces_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        limits = Limits(trace_total_bytes_max=2_000)
        async with Container("us", trace=tmp_path, limits=limits) as us:
            for _ in range(20):
                async with us.local():
                    pass

    trio.run(main)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    # The last one says what it is, and that it was cut.
    assert sum(sizes) <= 2_000 + 100
    assert "has 2000 bytes of them" in caplog.text
    kinds = [read_trace(path).records[-1].kind for path in sorted(tmp_path.iterdir())]
    assert (kinds[0], kinds[-1]) == (Kind.END, Kind.CUT)
    assert len(kinds) < 20


async def test_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    async with Container("us", trace=tmp_path / "file") as us:
        for _ in range(2):
            async with us.local():
                pass
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "connections are not traced any more"
    ]


def test_a_disk_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Full(File):
        def write(self, data: object, /) -> int:
            if self.tell() > 100:
                raise OSError(28, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    writer = TraceWriter(Full(), client=True, address="", clock=Time())
    for _ in range(5):
        writer.received(HEADER * 10)
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "a trace breaks off: No space left on device"
    ]


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        (b"", "is empty"),
        (b"#!/bin/sh\n", "is no trace"),
        (MAGIC[:5], "ends after 5 bytes"),
        (MAGIC, "damaged trace: the record of the connection is missing"),
        (MAGIC[:-1] + b"\x07rest", "of version 7; this release reads 1"),
        (MAGIC + bytes(13), "the record of the connection is missing"),
        (MAGIC + b"\x09" + bytes(12), "no kind of record 9, at byte 8"),
        (MAGIC + b"\x00" + bytes(8) + b"\0\0\0\x02[]", "the record of the connection is missing"),
        (MAGIC + b"\x00" + bytes(8) + b"\xff\xff\xff\xff", "ends within a record, at byte 21"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, octets: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(octets)
    with pytest.raises(AmqpError, match=says):
        read_trace(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AmqpError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nothing")


@pytest.mark.slow
@pytest.mark.req("O5")
def test_what_comes_before_the_damage_is_read(tmp_path: Path) -> None:
    whole = written(tmp_path, HEADER, encode_frame(composite("open", container_id="x")))
    octets = (tmp_path / "one").read_bytes()
    path = tmp_path / "cut"
    seen = set()
    for size in range(len(octets)):
        path.write_bytes(octets[:size])
        try:
            trace = read_trace(path)
        except AmqpError:
            continue
        assert trace.records == whole.records[: len(trace.records)]
        seen.add(len(trace.records))
        assert bool(trace.damage) == (size not in _ends(octets))
    assert seen == set(range(len(whole.records)))


def _ends(octets: bytes) -> set[int]:
    at = len(MAGIC)
    found = set()
    while at < len(octets):
        at += 13 + int.from_bytes(octets[at + 9 : at + 13], "big")
        found.add(at)
    return found


@given(st.binary(max_size=100))
def test_rubbish_after_the_beginning(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "rubbish"
    path.write_bytes(MAGIC + tail)
    try:
        read_trace(path)
    except AmqpError:
        pass


# --- secrets in messages -------------------------------------------------------------------------

TOKEN = "SharedAccessSignature sr=q&sig=s3cret&se=4000000000&skn=app"


def frame(performative: object, payload: bytes = b"") -> bytes:
    alone = performative_frame(3, performative)
    return (len(alone) + len(payload)).to_bytes(4, "big") + alone[4:] + payload


def attach(handle: int, address: str | None, *, role: bool = False) -> bytes:
    return frame(Attach(name="l", handle=handle, role=role, target=Target(address=address)))


def transfer(handle: int, payload: bytes, *, more: bool = False, first: bool = True) -> bytes:
    if not first:
        return frame(Transfer(handle=handle, more=more), payload)
    given = Transfer(handle=handle, delivery_id=0, delivery_tag=b"t", message_format=0, more=more)
    return frame(given, payload)


def starred(whole: bytes, payload: bytes) -> bytes:
    assert whole.endswith(payload)
    return whole[: -len(payload)] + b"*" * len(payload)


PUT = Message(TOKEN, application_properties={"operation": "put-token"}).encode()
CREATE = Message({"password": "s3cret"}, application_properties={"operation": "CREATE"}).encode()
RENEW = Message(TOKEN.encode(), to="/auth/tokens", subject="PUT", body_kind="value").encode()
READ = Message({}, application_properties={"operation": "READ"}).encode()


@pytest.mark.req("O1", "O5")
@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(
    ("address", "payload", "hidden"),
    [
        ("$cbs", PUT, True),
        ("$cbs", READ, True),
        ("amqps://host:5671/$cbs", PUT, True),
        ("$management", CREATE, True),
        ("$management", READ, False),
        ("q/$management", CREATE, True),
        ("/management", RENEW, True),
        ("/management", READ, False),
        (None, RENEW, True),
        (None, PUT, True),
        (None, READ, False),
        ("q", CREATE, False),
    ],
)
def test_tokens_and_passwords_of_messages_are_masked(
    tmp_path: Path, address: str | None, payload: bytes, hidden: bool, step: int
) -> None:
    for handle in (0, 200, 300):
        said = [
            attach(handle, address),
            attach(7, "q"),
            transfer(7, b"s3cret"),
            bytes([0, 0, 0, 8, 2, 0, 0, 0]),
        ]
        secret = transfer(handle, payload)
        octets = HEADER + b"".join(said) + secret + transfer(7, READ)
        shown = starred(secret, payload) if hidden else secret
        pieces = [octets[at : at + step] for at in range(0, len(octets), step)]
        trace = written(tmp_path, *pieces)
        heard = b"".join(data for _, data in trace.chunks(client=True))
        assert heard == HEADER + b"".join(said) + shown + transfer(7, READ)


def test_a_secret_in_several_frames(tmp_path: Path) -> None:
    first, last = PUT[:40], PUT[40:]
    frames = [transfer(0, first, more=True), transfer(0, last, first=False)]
    octets = HEADER + attach(0, None) + b"".join(frames) + transfer(0, READ)
    heard = b"".join(data for _, data in written(tmp_path, octets).chunks(client=True))
    assert heard == (
        HEADER
        + attach(0, None)
        + starred(frames[0], first)
        + starred(frames[1], last)
        + transfer(0, READ)
    )


def test_a_large_secret_and_one_that_breaks_off(tmp_path: Path) -> None:
    large = transfer(0, bytes(range(97, 123)) * 4_000)
    octets = HEADER + attach(0, "$cbs") + large + transfer(0, PUT)[:-1]
    trace = written(tmp_path, octets[:5_000], octets[5_000:])
    heard = b"".join(data for _, data in trace.chunks(client=True))
    assert len(heard) == len(octets)
    assert heard.endswith(b"***")
    assert b"abc" not in heard
    assert b"s3cret" not in heard


def test_a_link_that_is_attached_anew_is_another(tmp_path: Path) -> None:
    octets = HEADER + attach(0, "$cbs") + attach(0, "q") + transfer(0, PUT)
    heard = b"".join(data for _, data in written(tmp_path, octets).chunks(client=True))
    assert heard == octets


@given(st.binary(max_size=200))
def test_nothing_makes_the_mask_of_frames_fail(body: bytes) -> None:
    mask = FrameMask()
    shown = mask.feed(attach(0, "$cbs"))
    for kind in (b"\x00\x53\x14", b"\x00\x53\x12", b"\x00\x80", b""):
        whole = encode_frame(kind + body)
        shown += mask.feed(whole)
    assert len(shown) + len(mask.rest()) >= len(attach(0, "$cbs"))


@pytest.mark.req("O1", "O5", "SE10")
async def test_tokens_are_not_in_traces_of_either_side(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    keys = SasKeys({"app": SasKey(("k",), Rights.MANAGE)})
    async with Broker(
        cbs=Cbs([keys]), users={"root": "r"}, sasl=["ANONYMOUS"], trace=folder
    ) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with Container("us", trace=folder) as us:
            for set_token in (True, False):
                async with (
                    us.connect(url, token=Sas("app", "k"), set_token=set_token) as peer,
                    peer.sender("q") as out,
                ):
                    await out.send("to be seen")
                    await peer.authorize("")
                    asked = {"operation": "CREATE", "type": "amqp_rt.user", "name": f"u{set_token}"}
                    message = Message({"password": SECRET}, application_properties=asked)
                    reply = await peer.call("$management", message, reply=Message, within=5)
                    assert reply.application_properties["statusCode"] == 201
    traces = [path.read_bytes() for path in folder.iterdir()]
    assert len(traces) == 4
    for octets in traces:
        assert b"to be seen" in octets
        assert b"SharedAccessSignature" not in octets
        assert b"horse" not in octets
