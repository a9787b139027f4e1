"""The scripted peer, and the codec that it writes with, beside the package's own."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from wire import server

from amqp_rt import Container
from amqp_rt.codec.composites import read_composite
from amqp_rt.codec.primitives import Reader
from amqp_rt.core.performatives import PERFORMATIVES
from amqp_rt.errors import AmqpError, LinkRefused
from amqp_rt.events import AttachRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.traces.octets import (
    HEADER,
    Malformed,
    Raw,
    Splitter,
    composite,
    decode,
    encode,
    encode_frame,
)
from amqp_rt.testing.pairs import Recorder
from amqp_rt.testing.script import Script, ScriptFailed

# --- against engines -----------------------------------------------------------------------------


def test_a_conversation_with_an_engine() -> None:
    script = Script(ignore=["empty", "flow"])
    script.send.header().open(container_id="p").begin().attach(role="sender", target="q")
    script.expect.header().open(container_id="server").begin(remote_channel=0)
    engine = server()
    opened, requested = script.play(engine)
    assert isinstance(opened, Opened)
    assert isinstance(requested, AttachRequested)
    endpoint = Recorder(credit=1)
    requested.link.accept(endpoint)
    script.expect.attach(role="receiver", target="q", name=lambda name: name == "link")
    script.expect.flow(credit=lambda credit: credit >= 1)
    script.send.transfer(payload=b"\x00\x53\x77\xa1\x01x", settled=True)
    script.play(engine)
    assert [delivery.payload for delivery in endpoint.deliveries] == [b"\x00\x53\x77\xa1\x01x"]
    script.send.detach(error=("amqp:internal-error", "broken")).end().close()
    script.expect.detach(closed=True).end().close(error=None).end_of_stream()
    script.play(engine)
    assert script.last("close").channel == 0


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        (lambda expect: expect.begin(), r"begin is expected, with that name; header\("),
        (lambda expect: expect.header(b"AMQP\0\0\x09\1"), "the header .* is expected"),
        (lambda expect: expect.header().open(container_id="x"), "with container_id='x'; open"),
        (lambda expect: expect.header().open(channel=1), "with channel=1"),
        (lambda expect: expect.header().open(payload=b"x"), "with payload=b'x'"),
        (lambda expect: expect.header().open().begin(), r"begin\(\) is expected, and nothing"),
        (lambda expect: expect.nothing(), "nothing is expected, and header"),
        (lambda expect: expect.header().open().end_of_stream(), "the engine goes on"),
        (lambda expect: expect.empty(), "an empty frame is expected, and header"),
    ],
)
def test_what_is_not_as_expected_is_said(expect: Callable[[Any], Any], says: str) -> None:
    script = Script()
    script.send.header().open()
    expect(script.expect)
    with pytest.raises(ScriptFailed, match=says):
        script.play(server())


def test_mistakes_in_a_script() -> None:
    script = Script()
    with pytest.raises(TypeError, match="flow has no field 'link_kredit'; is 'link_credit' meant"):
        script.send.flow(link_kredit=1)
    with pytest.raises(TypeError, match="end has no field 'x'"):
        script.expect.end(x=1)
    with pytest.raises(AttributeError, match="no performative 'atach'"):
        script.send.atach()
    with pytest.raises(AttributeError, match="no performative 'atach'"):
        script.expect.atach()
    with pytest.raises(TypeError, match="no frame 'flows'"):
        Script(ignore=["flows"])
    with pytest.raises(TypeError, match="AMQP has no type 'origin'"):
        composite("origin")
    with pytest.raises(ScriptFailed, match="no begin has been heard"):
        script.last("begin")
    assert repr(script) == "<Script: 0 steps to go, 0 frames heard>"


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    "send",
    [
        lambda send: send.attach(handle=encode("string", "0"), role="sender"),
        lambda send: send.attach(name=None, role="sender"),
        lambda send: send.attach(role=Raw(b"\x99")),
        lambda send: send.raw(encode_frame(composite("attach"), doff=1)),
    ],
)
def test_a_peer_that_is_wrong_on_purpose(send: Callable[[Any], Any]) -> None:
    script = Script()
    script.send.header().open().begin()
    script.expect.header().open().begin()
    send(script.send)
    script.expect.close(error=lambda error: error is not None)
    script.play(server())


# --- over streams --------------------------------------------------------------------------------


async def test_over_a_stream(autojump_clock: object) -> None:
    ours, theirs = memory_stream_pair()
    script = Script()
    script.expect.header()
    script.send.header().open().end_of_stream()
    script.expect.nothing(quiet_s=3).open(container_id="us").end_of_stream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(script.run, theirs)
        await ours.send_all(HEADER[:3])
        await trio.sleep(1)
        await ours.send_all(HEADER[3:])
        heard = b"".join([data async for data in ours])
        assert heard == HEADER + encode_frame(composite("open", container_id="script"))
        await trio.sleep(4)
        await ours.send_all(encode_frame(b"") + encode_frame(composite("open", container_id="us")))
        await ours.aclose()


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (lambda script: script.expect.open(), "nothing came within 5 s"),
        (lambda script: script.expect.end_of_stream(), "nothing came within 5 s"),
    ],
)
async def test_the_other_side_is_too_late(
    steps: Callable[[Script], Any], says: str, autojump_clock: object
) -> None:
    _ours, theirs = memory_stream_pair()
    script = Script()
    steps(script)
    with pytest.raises(ScriptFailed, match=says):
        await script.run(theirs)


async def test_the_other_side_has_gone(autojump_clock: object) -> None:
    ours, theirs = memory_stream_pair()
    await ours.aclose()
    script = Script()
    script.expect.open()
    with pytest.raises(ScriptFailed, match="the other side has gone"):
        await script.run(theirs)
    script.send.header()
    with pytest.raises(ScriptFailed, match="has gone before octets"):
        await script.run(theirs)


# --- at a port -----------------------------------------------------------------------------------


@pytest.mark.req("A21")
async def test_a_client_meets_a_script() -> None:
    script = Script(ignore=["empty", "flow"])
    script.expect.sasl_header()
    script.send.sasl_header().sasl_mechanisms(mechanisms=["ANONYMOUS"])
    script.expect.sasl_init(mechanism="ANONYMOUS")
    script.send.sasl_outcome()
    script.expect.header()
    script.send.header()
    script.expect.open(container_id="client")
    script.send.open(container_id="elsewhere")
    script.expect.begin()
    script.send.begin()
    script.expect.attach(role="sender", target="orders")
    script.send.attach(target=None).detach(error=("amqp:not-found", "no orders here"))
    script.expect.detach(closed=True)
    script.expect.close()
    script.send.close()
    with script.serve() as url:
        async with Container("client") as us, us.connect(url, reconnect=None) as peer:
            with pytest.raises(LinkRefused, match="no orders here"):
                async with peer.sender("orders"):
                    pass


def test_it_is_a_fixture(amqp_script: Script) -> None:
    amqp_script.send.header().open()
    amqp_script.expect.header().open()
    amqp_script.play(server())


def test_nobody_comes() -> None:
    script = Script(timeout_s=0.05)
    with pytest.raises(ScriptFailed, match="no client has connected"), script.serve():
        pass


@pytest.mark.req("A21")
async def test_a_client_that_does_something_else() -> None:
    script = Script(timeout_s=1)
    script.expect.open()

    async def meet() -> None:
        with script.serve() as url:
            async with Container("client") as us:
                with pytest.raises(AmqpError):
                    async with us.connect(url, reconnect=None):
                        pass

    with pytest.raises(ScriptFailed, match="open is expected, with that name; header"):
        await meet()


@pytest.mark.req("A21")
def test_what_the_script_has_seen_is_said_when_the_client_raises() -> None:
    script = Script(timeout_s=1)
    script.expect.open()

    def meet() -> None:
        with script.serve() as url:
            host, port = url.removeprefix("amqp://").split(":")
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(b"AMQP\x00\x01\x00\x00")
                # The scripted peer hangs up, as the frame is not the expected one.
                while connection.recv(1_000):
                    pass
            raise ConnectionError("the peer has gone")

    with pytest.raises(ScriptFailed, match="open is expected") as caught:
        meet()
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_client_that_raises_before_it_connects_is_to_blame_itself() -> None:
    script = Script(timeout_s=0.05)
    with pytest.raises(ValueError, match="never got there"), script.serve():
        raise ValueError("never got there")


# --- the codec -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("open", {"container_id": "c", "hostname": "h", "max_frame_size": 512, "channel_max": 3, "idle_time_out": 9, "offered_capabilities": ["a", "b"], "desired_capabilities": "c", "properties": {"k": 1}}),
        ("begin", {"remote_channel": 1, "next_outgoing_id": 2**32 - 1, "incoming_window": 0, "outgoing_window": 1, "handle_max": 7}),
        ("attach", {"name": "l", "handle": 0, "role": "receiver", "snd_settle_mode": 2, "rcv_settle_mode": 1, "source": composite("source", address="q", durable=2, outcomes=["amqp:accepted:list"]), "target": "t", "max_message_size": 2**63}),
        ("flow", {"incoming_window": 1, "next_outgoing_id": 2, "outgoing_window": 3, "link_credit": 4, "handle": 0, "drain": True}),
        ("transfer", {"handle": 0, "delivery_id": 1, "delivery_tag": b"\0\1", "message_format": 0, "settled": False, "more": True}),
        ("disposition", {"role": True, "first": 1, "last": 2, "settled": True, "state": composite("rejected", error=("a:b", "why"))}),
        ("detach", {"handle": 1, "closed": True, "error": "amqp:not-found"}),
        ("end", {}),
        ("close", {"error": ("amqp:internal-error", "x" * 300)}),
    ],
)  # fmt: skip
def test_both_codecs_understand_each_other(name: str, fields: dict[str, Any]) -> None:
    octets = encode_frame(composite(name, **fields), channel=3, payload=b"tail")
    reader = Reader(octets, 8, len(octets))
    theirs = read_composite(reader, *PERFORMATIVES)
    assert type(theirs).__name__.lower() == name
    assert octets[reader.at :] == b"tail"
    (ours,) = Splitter().feed(octets)
    assert (ours.name, ours.channel, ours.payload, ours.fault) == (name, 3, b"tail", "")
    again = encode_frame(composite(name, **ours.fields), channel=3, payload=b"tail")
    (twice,) = Splitter().feed(again)
    assert twice == ours


def test_what_an_engine_writes_is_read() -> None:
    splitter = Splitter()
    client = amqp10.client(amqp10.ClientOptions(container_id="c"), 0.0)
    session = client.begin()
    session.attach_sender("l", Recorder())
    frames = [frame for data in client.take() for frame in splitter.feed(bytes(data))]
    assert frames[0].name == "header"
    assert not [frame.fault for frame in frames if frame.fault]


@given(st.binary(max_size=64))
def test_rubbish_is_malformed_and_nothing_else(data: bytes) -> None:
    try:
        decode(data)
    except Malformed:
        pass
    for frame in Splitter().feed(struct.pack(">IBBH", len(data) + 8, 2, 0, 0) + data):
        assert repr(frame)


@given(st.binary(max_size=200), st.integers(1, 20))
def test_frames_are_the_same_however_they_are_cut(data: bytes, step: int) -> None:
    data = HEADER + encode_frame(composite("end")) + data
    cut = Splitter()
    pieces = [f for at in range(0, len(data), step) for f in cut.feed(data[at : at + step])]
    whole = Splitter().feed(data)
    # Octets that are no frame are reported as far as they have arrived.
    assert [f.name for f in pieces][: len(whole)] == [f.name for f in whole]
    assert pieces[:2] == whole[:2]


@pytest.mark.parametrize("depth", [10, 100_000])
def test_values_inside_each_other(depth: int) -> None:
    with pytest.raises(Malformed):
        decode(b"\x00" * depth)


def test_an_array_of_nothing_is_short() -> None:
    value, _ = decode(struct.pack(">BIIB", 0xF0, 5, 2**31, 0x40))
    assert value == []


def test_values_that_python_has_no_type_for() -> None:
    assert encode("uint", 5) == b"\x70\0\0\0\5"
    assert encode("any", [1, "a", None, {"k": 1.5}])[0] == 0xD0
    with pytest.raises(TypeError, match="has no AMQP type"):
        encode("any", object())
