"""The connection: headers, open, SASL, channels, errors, time."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from wire import BEGIN, OPEN, begun, closed_with, frame, opened, said, server

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import (
    AMQP_HEADER,
    EMPTY_FRAME,
    SASL_HEADER,
    TLS_HEADER,
    performative_frame,
)
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    End,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import (
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from amqp_rt.errors import LocalProtocolError
from amqp_rt.events import AttachRequested, Closed, ConnectionFailed, Event, LoginRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.limits import Limits
from amqp_rt.net.traces.octets import composite, encode_frame
from amqp_rt.outcomes import Error
from amqp_rt.security.mechanisms import Anonymous
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.testing.script import Script
from amqp_rt.values import Symbol

# --- headers -----------------------------------------------------------------------------


@pytest.mark.req("X1")
def test_header_and_open_are_answered_in_kind() -> None:
    engine = server()
    events = engine.receive(AMQP_HEADER + OPEN, 0.0)
    assert [type(e) for e in events] == [Opened]
    header, (channel, answer) = said(engine)  # type: ignore[misc]
    assert header == AMQP_HEADER
    assert channel == 0
    assert answer.container_id == "server"
    assert engine.state == "OPENED"


@pytest.mark.req("X1", "X2")
@pytest.mark.parametrize(
    "header",
    [
        b"AMQP\x00\x00\x09\x01",
        b"AMQP\x01\x01\x00\x0a",
        b"AMQP\x01\x01\x08\x00",
        b"AMQP\x00\x01\x00\x01",
        TLS_HEADER,
        b"GET / HT",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"\x00" * 8,
    ],
)
def test_a_foreign_header_is_answered_with_ours_and_the_end(header: bytes) -> None:
    engine = server()
    events = engine.receive(header, 0.0)
    assert [type(e) for e in events] == [ConnectionFailed]
    assert engine.take() == [AMQP_HEADER]
    assert engine.finished
    assert engine.receive(b"more", 0.0) == []


@pytest.mark.req("X1", "SE1")
def test_a_plain_header_where_sasl_is_required_is_told_of_sasl() -> None:
    engine = server(sasl_required=True)
    engine.receive(AMQP_HEADER, 0.0)
    assert engine.take() == [SASL_HEADER]
    assert engine.finished


@pytest.mark.req("X1", "X5")
def test_everything_may_come_in_one_chunk_or_octet_by_octet() -> None:
    attach = frame(Attach(name="l", handle=0, role=True, source=Source(address="q")))
    script = AMQP_HEADER + OPEN + BEGIN + attach + frame(Detach(0, True)) + frame(End())
    script += frame(Close())
    whole = server()
    events = whole.receive(script, 0.0)
    assert [type(e) for e in events] == [Opened, AttachRequested, Closed]
    in_pieces = server()
    seen: list[Event] = []
    for octet in script:
        seen += in_pieces.receive(bytes([octet]), 0.0)
    assert [type(e) for e in seen] == [Opened, AttachRequested, Closed]
    assert said(whole) == said(in_pieces)
    assert whole.finished
    assert in_pieces.finished


# --- frames ------------------------------------------------------------------------------


@pytest.mark.req("X3", "X26")
@pytest.mark.parametrize(
    "octets",
    [
        struct.pack(">IBBH", 7, 2, 0, 0),
        struct.pack(">IBBH", 16, 1, 0, 0) + bytes(8),
        struct.pack(">IBBH", 16, 5, 0, 0) + bytes(8),
        struct.pack(">IBBH", 8, 3, 0, 0),
        struct.pack(">IBBH", 0xFFFFFFFF, 2, 0, 0),
        struct.pack(">IBBH", 8 * 1024 + 1, 2, 0, 0),
        struct.pack(">IBBH", 12, 2, 1, 0) + bytes(4),
        struct.pack(">IBBH", 12, 2, 7, 0) + bytes(4),
    ],
)
def test_a_malformed_frame_header_is_a_framing_error(octets: bytes) -> None:
    engine = server()
    engine.receive(AMQP_HEADER, 0.0)
    events = engine.receive(octets, 0.0)
    assert isinstance(events[0], ConnectionFailed)
    assert events[0].error.condition == "amqp:connection:framing-error"
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X3")
def test_the_frame_limit_of_open_holds_after_it_and_the_earlier_one_before() -> None:
    limits = Limits(frame_size_before_open=600, frame_size_max=1000)
    engine = server(limits=limits)
    engine.receive(AMQP_HEADER, 0.0)
    wide = Open(container_id="c", properties={"x": "y" * 560})
    assert len(frame(wide)) > 600
    assert isinstance(engine.receive(frame(wide), 0.0)[0], ConnectionFailed)
    engine = server(limits=limits)
    assert isinstance(engine.receive(AMQP_HEADER + OPEN, 0.0)[0], Opened)
    exact = 300 + 1000 - len(frame(End(Error("a", "d" * 300))))
    engine.receive(BEGIN, 0.0)
    end = frame(End(Error("a", "d" * exact)))
    assert len(end) == 1000
    assert engine.receive(end, 0.0) == []
    assert not engine.finished
    events = engine.receive(struct.pack(">IBBH", 1001, 2, 0, 0), 0.0)
    assert isinstance(events[0], ConnectionFailed)


@pytest.mark.req("X3")
def test_an_extended_header_is_passed_over() -> None:
    script = Script()
    wide = encode_frame(composite("open", container_id="peer"), doff=5)
    script.send.header().raw(wide)
    script.expect.header().open(container_id="server")
    assert [type(e) for e in script.play(server())] == [Opened]


@pytest.mark.req("X26", "T7")
@pytest.mark.parametrize(
    "body",
    [b"\x00", b"\x40", b"\x00\x53\x10\x45", b"\x00\x53\x99\x45", b"\x00\x53\x10\xc0\xff\x01"],
)
def test_a_body_that_does_not_decode_closes_with_the_reason(body: bytes) -> None:
    engine = server()
    octets = AMQP_HEADER + struct.pack(">IBBH", len(body) + 8, 2, 0, 0) + body
    events = engine.receive(octets, 0.0)
    assert isinstance(events[0], ConnectionFailed)
    assert closed_with(engine) == "amqp:decode-error"


# --- open --------------------------------------------------------------------------------


@pytest.mark.req("X4")
def test_open_carries_what_was_asked_for() -> None:
    client = amqp10.client(
        amqp10.ClientOptions(
            container_id="c1", hostname="vhost", offered_capabilities=("A",), properties={"p": 1}
        ),
        0.0,
    )
    joined = Joined(client=client)
    joined.pump()
    peer = joined.server.peer
    assert (peer.container_id, peer.virtual_host) == ("c1", "vhost")
    assert peer.offered_capabilities == ("A",)
    assert peer.properties == {"p": 1}
    assert joined.client.peer.container_id == "server"


@pytest.mark.req("X4")
def test_a_max_frame_size_below_512_is_refused() -> None:
    script = Script()
    script.send.header().open(max_frame_size=511)
    script.expect.header().open().close(error="amqp:invalid-field")
    script.play(server())


@pytest.mark.req("X4", "X18")
@pytest.mark.parametrize("size", [512, 700, 65_536])
def test_frames_never_exceed_what_the_peer_allows(size: int) -> None:
    client = amqp10.client(
        amqp10.ClientOptions(container_id="c", limits=Limits(frame_size_max=size)), 0.0
    )
    joined = Joined(client=client, on_attach=lambda link: link.accept(Recorder()))
    joined.pump()
    session = joined.client.begin()
    receiver = Recorder(credit=10)
    session.attach_receiver("r", receiver, source=Source(address="q"))
    joined.pump()
    joined.links[0].send(b"z" * 5000)
    while data := joined.server.take():
        for piece in data:
            assert len(piece) <= size
        joined.client.receive(b"".join(data), 0.0)
        joined.pump()
    assert receiver.deliveries[0].payload == b"z" * 5000


@pytest.mark.req("X8")
def test_channel_max_holds_both_ways() -> None:
    joined = Joined(limits=Limits(channel_max=1))
    joined.pump()
    joined.client.begin()
    joined.client.begin()
    with pytest.raises(LocalProtocolError, match="at most 2 sessions"):
        joined.client.begin()
    joined.pump()
    assert len(joined.server.sessions) == 2
    engine = opened(limits=Limits(channel_max=1))
    engine.receive(
        frame(Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1), channel=2), 0.0
    )
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X8")
def test_handle_max_holds_both_ways() -> None:
    joined = Joined(limits=Limits(handle_max=1))
    joined.pump()
    session = joined.client.begin()
    joined.pump()
    for name in "ab":
        session.attach_sender(name, Recorder(), target=Target(address="q"))
    with pytest.raises(LocalProtocolError, match="allows 2 links"):
        session.attach_sender("c", Recorder(), target=Target(address="q"))
    joined.pump()
    assert len(joined.links) == 2
    engine = begun(limits=Limits(handle_max=1))
    engine.receive(frame(Attach(name="x", handle=2, role=True)), 0.0)
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    ("performative", "channel", "fields"),
    [
        ("open", 0, {}),
        ("begin", 5, {"remote_channel": 9}),
        ("begin", 0, {"remote_channel": None}),
        ("transfer", 3, {}),
        ("flow", 3, {}),
        ("disposition", 3, {}),
        ("attach", 3, {}),
        ("detach", 3, {}),
        ("end", 3, {}),
    ],
)
def test_what_has_no_place_closes_with_not_allowed(
    performative: str, channel: int, fields: dict[str, Any]
) -> None:
    script = Script()
    script.send.header().open().begin()
    script.expect.header().open().begin(remote_channel=0)
    getattr(script.send, performative)(channel=channel, **fields)
    script.expect.close(error="amqp:not-allowed")
    engine = server()
    script.play(engine)
    assert not engine.finished
    script.send.close()
    script.expect.end_of_stream()
    script.play(engine)


@pytest.mark.req("X26")
@pytest.mark.parametrize("performative", ["begin", "close", "transfer", "end"])
def test_anything_before_open_is_answered_with_open_and_close(performative: str) -> None:
    script = Script()
    getattr(script.send.header(), performative)()
    script.expect.header().open().close().nothing()
    script.play(server())


@pytest.mark.req("X26")
def test_after_our_close_only_the_peers_close_counts() -> None:
    engine = begun()
    engine.close(Error("amqp:connection:forced", "bye"))
    assert closed_with(engine) == "amqp:connection:forced"
    engine.receive(BEGIN + frame(Attach(name="x", handle=0, role=True)) + bytes(8), 0.0)
    assert engine.take() == []


def test_close_crossing_close_ends_cleanly() -> None:
    joined = Joined()
    joined.pump()
    joined.client.close()
    joined.server.close()
    joined.pump()
    assert joined.client.finished
    assert joined.server.finished
    assert [type(e) for e in joined.client_events] == [Opened, Closed]


@pytest.mark.req("X27")
def test_a_redirect_arrives_with_its_info() -> None:
    joined = Joined()
    joined.pump()
    where: dict[object, object] = {"hostname": "b", "network-host": "b.example", "port": 5673}
    joined.server.close(Error("amqp:connection:redirect", "go there", where))
    joined.pump()
    closed = joined.client_events[-1]
    assert isinstance(closed, Closed)
    assert closed.error is not None
    assert closed.error.info == where


# --- time --------------------------------------------------------------------------------


@pytest.mark.req("X6")
def test_a_silent_peer_is_closed_at_twice_the_announced_timeout() -> None:
    engine = opened(limits=Limits(idle_timeout_s=10))
    assert engine.deadline == 20
    assert engine.tick(19.9) == []
    events = engine.tick(20)
    assert isinstance(events[0], ConnectionFailed)
    assert closed_with(engine) == "amqp:resource-limit-exceeded"


@pytest.mark.req("X6")
def test_any_octets_feed_the_idle_timer() -> None:
    engine = opened(limits=Limits(idle_timeout_s=10))
    engine.receive(struct.pack(">IBBH", 8, 2, 0, 0), 15)
    assert engine.tick(34.9) == []
    assert isinstance(engine.tick(35)[0], ConnectionFailed)


@pytest.mark.req("X6")
def test_the_peer_hears_from_us_within_half_its_timeout() -> None:
    engine = server()
    engine.receive(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=8000)), 0.0)
    engine.take()
    heard = 0.0
    now = 0.0
    while now < 40:
        now = engine.deadline
        engine.receive(struct.pack(">IBBH", 8, 2, 0, 0), now)
        engine.tick(now)
        if engine.take():
            assert now - heard <= 4
            heard = now
    assert heard >= 36


@pytest.mark.req("X6")
def test_a_timeout_too_small_to_keep_is_refused() -> None:
    engine = server()
    engine.receive(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=1)), 0.0)
    assert closed_with(engine) == "amqp:not-allowed"


@pytest.mark.req("X7")
@pytest.mark.parametrize("sent", [b"", b"AMQP", AMQP_HEADER, SASL_HEADER])
def test_the_handshake_has_an_absolute_deadline(sent: bytes) -> None:
    engine = server(mechanisms=("PLAIN",), limits=Limits(handshake_s=10))
    if sent:
        engine.receive(sent, 9.0)
    assert engine.deadline == 10
    events = engine.tick(10)
    assert isinstance(events[0], ConnectionFailed)
    if sent == AMQP_HEADER:
        assert closed_with(engine) == "amqp:connection:forced"
        engine.tick(15)
    assert engine.finished


def test_a_peer_that_never_answers_close_is_given_up() -> None:
    engine = opened()
    engine.close()
    # Nothing has been heard for a minute: that counts for nothing, the grace begins now.
    assert engine.deadline <= 60
    assert engine.tick(60) == []
    assert engine.deadline == 65
    assert not engine.finished
    assert [type(e) for e in engine.tick(65)] == [Closed]
    assert engine.finished


def test_a_stream_that_ends_without_close_is_a_failure() -> None:
    engine = begun()
    events = engine.receive_eof(1.0)
    assert [type(e) for e in events] == [ConnectionFailed]
    assert engine.finished


# --- SASL --------------------------------------------------------------------------------


class PlainClient:
    name = "PLAIN"

    def initial(self) -> bytes:
        return b"\x00u\x00p"

    def respond(self, challenge: bytes) -> bytes:
        return challenge[::-1]


def sasl_client() -> Engine:
    return amqp10.client(amqp10.ClientOptions(container_id="c", mechanisms=(PlainClient(),)), 0.0)


@pytest.mark.req("SE1", "SE2")
def test_a_login_goes_through_the_application() -> None:
    def on_login(event: LoginRequested) -> list[Event]:
        assert (event.mechanism, event.response) == ("PLAIN", b"\x00u\x00p")
        events: list[Event] = event.exchange.succeed("u", {"rights": "all"})
        return events

    joined = Joined(
        client=sasl_client(),
        server=server(mechanisms=("PLAIN",), sasl_required=True),
        on_login=on_login,
    )
    joined.pump()
    assert joined.server.peer.user == "u"
    assert joined.server.peer.identity == {"rights": "all"}
    assert joined.client.state == "OPENED"


@pytest.mark.req("SE1")
def test_challenges_go_back_and_forth() -> None:
    responses = []

    def on_login(event: LoginRequested) -> list[Event]:
        responses.append(event.response)
        exchange = event.exchange
        events: list[Event]
        events = exchange.challenge(b"abc") if len(responses) < 3 else exchange.succeed("u")
        return events

    joined = Joined(
        client=sasl_client(),
        server=server(mechanisms=("PLAIN",), sasl_required=True),
        on_login=on_login,
    )
    joined.pump(cut=1)
    assert responses == [b"\x00u\x00p", b"cba", b"cba"]
    assert joined.client.state == "OPENED"


@pytest.mark.req("SE1")
def test_a_failed_login_is_told_and_ends_both_sides() -> None:
    def on_login(event: LoginRequested) -> list[Event]:
        event.exchange.fail()
        return []

    joined = Joined(
        client=sasl_client(),
        server=server(mechanisms=("PLAIN",), sasl_required=True),
        on_login=on_login,
    )
    joined.pump()
    failed = joined.client_events[-1]
    assert isinstance(failed, ConnectionFailed)
    assert failed.error.condition == "amqp:unauthorized-access"
    assert joined.client.finished
    assert joined.server.finished


@pytest.mark.req("SE1")
def test_a_client_may_pipeline_everything_behind_its_init() -> None:
    engine = server(mechanisms=("ANONYMOUS",), sasl_required=True)
    attach = frame(Attach(name="l", handle=0, role=True, source=Source(address="q")))
    init = frame(SaslInit("ANONYMOUS", b""), kind=1)
    events = engine.receive(SASL_HEADER + init + AMQP_HEADER + OPEN + BEGIN + attach, 0.0)
    assert [type(e) for e in events] == [LoginRequested]
    assert isinstance(events[0], LoginRequested)
    after = events[0].exchange.succeed(None)
    assert [type(e) for e in after] == [Opened, AttachRequested]


@pytest.mark.req("SE1")
@pytest.mark.parametrize(
    "octets",
    [
        frame(SaslResponse(b"x"), kind=1),
        frame(SaslOutcome(0), kind=1),
        frame(SaslMechanisms(("PLAIN",)), kind=1),
        frame(Open(container_id="c")),
        frame(Open(container_id="c"), kind=1),
        struct.pack(">IBBH", 8, 2, 1, 0),
        frame(SaslInit("PLAIN"), kind=1) * 2,
    ],
)
def test_what_has_no_place_in_the_sasl_layer_ends_the_connection(octets: bytes) -> None:
    engine = server(mechanisms=("PLAIN",), sasl_required=True)
    engine.receive(SASL_HEADER, 0.0)
    events = engine.receive(octets, 0.0)
    for event in events:
        if isinstance(event, LoginRequested):
            events = event.exchange.succeed("u")
    assert engine.finished
    assert any(isinstance(event, ConnectionFailed) for event in events)


@pytest.mark.req("SE1", "SE2")
@pytest.mark.parametrize(
    ("init", "why"),
    [
        (SaslInit("CRAM-MD5"), "'CRAM-MD5' is not offered"),
        (SaslInit("PLAIN", b"x" * 101), "a response of more than 100 octets"),
    ],
)
@pytest.mark.parametrize(
    ("answer", "said_with"), [("fail", ()), ("succeed", ("somebody",)), ("challenge", (b"x",))]
)
def test_what_can_only_fail_is_asked_all_the_same(
    init: SaslInit, why: str, answer: str, said_with: tuple[Any, ...]
) -> None:
    """So that it takes as long as a wrong password; but nobody can let it in."""
    limits = Limits(sasl_response_max=100)
    engine = server(limits=limits, mechanisms=("PLAIN",), sasl_required=True)
    (event,) = engine.receive(SASL_HEADER + frame(init, kind=1), 0.0)
    assert isinstance(event, LoginRequested)
    assert event.exchange.refused == why
    events = getattr(event.exchange, answer)(*said_with)
    assert events == [] or answer == "fail"
    assert engine.finished
    assert engine.peer.user is None
    assert [each[1] for each in said(engine) if isinstance(each, tuple)][-1] == SaslOutcome(1)


@pytest.mark.req("SE1")
def test_what_waits_behind_a_login_is_bounded() -> None:
    engine = server(mechanisms=("PLAIN",), sasl_required=True)
    engine.receive(SASL_HEADER + frame(SaslInit("PLAIN", b"x"), kind=1), 0.0)
    for _ in range(16):
        engine.receive(bytes(4096), 0.0)
    assert not engine.finished
    engine.receive(bytes(4096), 0.0)
    assert engine.finished


def test_a_client_without_a_common_mechanism_says_what_was_offered() -> None:
    joined = Joined(client=sasl_client(), server=server(mechanisms=("EXTERNAL",)))
    joined.pump()
    failed = joined.client_events[-1]
    assert isinstance(failed, ConnectionFailed)
    assert "EXTERNAL" in (failed.error.description or "")


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (("SCRAM-SHA-256", "PLAIN"), "the peer requires a login: give a user name and a password"),
        # No password helps there.
        (("EXTERNAL",), "the peer offers only these SASL mechanisms: EXTERNAL"),
    ],
)
def test_a_client_without_credentials_says_how_to_give_them(
    offered: tuple[str, ...], said: str
) -> None:
    options = amqp10.ClientOptions(container_id="c", mechanisms=(Anonymous(),))
    joined = Joined(client=amqp10.client(options, 0.0), server=server(mechanisms=offered))
    joined.pump()
    failed = joined.client_events[-1]
    assert isinstance(failed, ConnectionFailed)
    assert failed.error.condition == "amqp:unauthorized-access"
    description = failed.error.description or ""
    assert description.startswith(said)
    assert ("as in amqp://USER:PASSWORD@HOST" in description) == ("PLAIN" in offered)


@pytest.mark.req("X5")
def test_a_dial_option_waits_for_the_peers_header() -> None:
    client = amqp10.client(amqp10.ClientOptions(container_id="c", pipelined=False), 0.0)
    assert client.take() == [AMQP_HEADER]
    client.receive(AMQP_HEADER, 0.0)
    assert [type(f[1]) for f in said(client) if isinstance(f, tuple)] == [Open]
    eager = amqp10.client(amqp10.ClientOptions(container_id="c"), 0.0)
    assert len(said(eager)) == 2
    assert performative_frame(0, Close()) == frame(Close())


# --- What single octets and moments decide ---


def attach(**fields: Any) -> Attach:
    """The attach of a peer that sends."""
    return Attach(
        name="l",
        handle=0,
        role=False,
        source=Source(),
        target=Target(address="q"),
        initial_delivery_count=0,
        **fields,
    )


@pytest.mark.req("X5")
def test_a_close_is_answered_on_channel_0() -> None:
    engine = begun()
    engine.receive(frame(Close()), 0.0)
    assert said(engine) == [(0, Close())]


@pytest.mark.req("X6")
def test_an_empty_frame_is_sent_only_when_nothing_else_was() -> None:
    engine = server()
    engine.receive(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=8000)) + BEGIN, 0.0)
    engine.take()
    engine.tick(engine.deadline)
    engine.sessions[0].end()
    engine.take()
    quiet = []
    for _ in range(2):
        engine.tick(engine.deadline)
        quiet.append(b"".join(engine.take()))
    assert quiet == [b"", EMPTY_FRAME]


def test_output_is_announced_before_anything_has_come() -> None:
    engine = amqp10.client(amqp10.ClientOptions(container_id="c"), 0.0)
    engine.take()
    told: list[bool] = []
    engine.on_output = lambda: told.append(True)
    engine.begin()
    assert told == [True]


@pytest.mark.req("X3", "T7")
def test_a_transfer_whose_descriptor_is_written_at_length_is_taken() -> None:
    engine = begun()
    (event,) = engine.receive(frame(attach()), 0.0)
    assert isinstance(event, AttachRequested)
    endpoint = Recorder()
    event.link.accept(endpoint)
    event.link.grant(1)
    octets = frame(Transfer(0, 0, b"tag", 0, True), payload=b"x")
    long = octets[8:].replace(b"\x00\x53\x14", b"\x00\x80" + bytes(7) + b"\x14", 1)
    engine.receive(struct.pack(">IBBH", len(long) + 8, 2, 0, 0) + long, 0.0)
    assert [each.payload for each in endpoint.deliveries] == [b"x"]


@pytest.mark.req("X26")
def test_an_attach_counts_alike_wherever_it_lies_in_what_has_come() -> None:
    kept = []
    for before in (0, 50):
        engine = begun()
        flow = Flow(next_incoming_id=0, incoming_window=9, next_outgoing_id=0, outgoing_window=9)
        properties = {Symbol(f"key-{n}"): "x" * 200 for n in range(20)}
        engine.receive(frame(flow) * before + frame(attach(properties=properties)), 0.0)
        kept.append(engine.kept)
    assert kept[0] == kept[1] > 0
