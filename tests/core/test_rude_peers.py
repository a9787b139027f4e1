"""Peers that break rules or exhaust patience: the answer, its scope, and what it costs us."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sanity import check
from wire import (
    BEGIN,
    OPEN,
    begun,
    closed_with,
    detached_with,
    frame,
    kinds,
    opened,
    server,
    transfer,
)

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
)
from amqp_rt.core.sasl_frames import SaslInit, SaslResponse
from amqp_rt.events import Closed, ConnectionFailed, Event, LoginRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.limits import KIB, Limits
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error, Received, rejected
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder

Q = Target(address="q")


def attach(name: str = "l", handle: int = 0, *, sender: bool = True) -> bytes:
    return frame(
        Attach(
            name=name,
            handle=handle,
            role=not sender,
            source=Source(address="q"),
            target=Q,
            initial_delivery_count=0 if sender else None,
        )
    )


def receiving(engine: Engine, endpoint: Recorder | None = None, **options: Any) -> Any:
    (event,) = engine.receive(attach(), 0.0)
    event.link.accept(endpoint or Recorder(), **options)  # type: ignore[union-attr]
    event.link.grant(100)  # type: ignore[union-attr]
    engine.take()
    return event.link  # type: ignore[union-attr]


def sending(engine: Engine, endpoint: Recorder, count: int) -> list[Any]:
    """Deliveries that we have sent and the peer has not settled."""
    flow = Flow(
        next_incoming_id=0,
        incoming_window=10_000,
        next_outgoing_id=0,
        outgoing_window=9,
        handle=0,
        delivery_count=0,
        link_credit=count,
    )
    (event,) = engine.receive(attach(sender=False) + frame(flow), 0.0)
    event.link.accept(endpoint)  # type: ignore[union-attr]
    found = [event.link.send(b"x") for _ in range(count)]  # type: ignore[union-attr]
    engine.take()
    return found


@contextmanager
def growth(bound: int) -> Iterator[None]:
    """Memory may grow by *bound* bytes at most, at any moment of the block."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < bound


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("X18", "T9")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_delivery_of_empty_frames_costs_nothing(streaming: bool) -> None:
    engine = begun()
    link = receiving(engine, streaming=streaming)
    engine.receive(transfer(0, b"", more=True), 0.0)
    chunk = transfer(None, b"", more=True) * 1_000
    with growth(64 * KIB):
        for _ in range(10):
            engine.receive(chunk, 0.0)
            engine.take()
    assert link.attached
    check(engine)


@pytest.mark.slow
@pytest.mark.req("X18", "X22", "T9")
def test_a_message_in_pieces_of_two_octets_is_counted_as_what_it_costs() -> None:
    engine = begun(limits=Limits(session_window_bytes=256 * KIB))
    receiving(engine)
    engine.receive(transfer(0, b"", more=True), 0.0)
    chunk = transfer(None, b"ab", more=True) * 1_000
    with growth(512 * KIB):
        for _ in range(6):
            # The window does not matter here: the bytes do.
            engine.sessions[0].incoming_window = 2_000
            engine.receive(chunk, 0.0)
    assert detached_with(engine) == "amqp:resource-limit-exceeded"
    check(engine)


@pytest.mark.req("X11", "X19")
def test_a_stream_in_pieces_of_two_octets_closes_the_window() -> None:
    limits = Limits(frame_size_max=1_024, session_window=64, session_window_bytes=64 * KIB)
    engine = begun(limits=limits)
    endpoint = Recorder()
    receiving(engine, endpoint, streaming=True)
    session = engine.sessions[0]
    engine.receive(transfer(0, b"ab", more=True), 0.0)
    frames = 1
    while session.incoming_window:
        engine.receive(transfer(None, b"ab", more=True), 0.0)
        engine.take()
        frames += 1
        assert frames < 2_000
    assert frames * 2 < 4_096
    (delivery,) = endpoint.deliveries
    assert b"".join(delivery.read_chunks()) == b"ab" * frames
    engine.take()
    assert session.incoming_window == 64
    check(engine)


@pytest.mark.req("X11", "X19")
def test_unread_streams_of_all_sessions_share_the_bytes() -> None:
    limits = Limits(frame_size_max=1_024, session_window=64, session_window_bytes=64 * KIB)
    receiver = Recorder(credit=1)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(receiver, streaming=True))
    joined.pump()
    for number in range(8):
        session = joined.client.begin()
        link = session.attach_sender(f"l{number}", Recorder(), target=Q)
        joined.pump()
        body = link.send(b"", more=True)
        for _ in range(100):
            body.write(b"y" * 800)
        joined.pump()
    # Besides, every session may send a few frames, so that none is starved.
    assert joined.server.held <= 64 * KIB + 8 * 9 * 1_024
    check(joined.server)
    read = 0
    while read < 8 * 80_000:
        chunks = [chunk for delivery in receiver.deliveries for chunk in delivery.read_chunks()]
        assert chunks
        read += sum(map(len, chunks))
        joined.pump()
    assert len(receiver.deliveries) == 8
    assert joined.server.held == 0


@pytest.mark.req("X19", "X11")
@pytest.mark.parametrize("how", ["detach", "end", "abort"])
def test_a_stream_that_nobody_reads_is_let_go_with_its_link(how: str) -> None:
    engine = begun()
    endpoint = Recorder()
    receiving(engine, endpoint, streaming=True)
    engine.receive(transfer(0, b"x" * 900) + transfer(1, b"y" * 900, more=True), 0.0)
    assert engine.held > 1_800
    if how == "abort":
        engine.receive(transfer(None, b"", aborted=True), 0.0)
        engine.receive(frame(Detach(0, True)), 0.0)
    elif how == "detach":
        engine.receive(frame(Detach(0, True)), 0.0)
    else:
        engine.receive(frame(End()), 0.0)
    assert engine.held == 0
    # Input that has arrived can still be read.
    assert endpoint.deliveries[0].read_chunks() == [b"x" * 900]
    assert engine.held == 0
    check(engine)


@pytest.mark.slow
@pytest.mark.req("X8", "X12")
def test_links_and_sessions_that_come_and_go_leave_nothing() -> None:
    engine = opened()

    def visit() -> None:
        engine.receive(BEGIN, 0.0)
        for event in engine.receive(attach("a", 0) + attach("b", 1, sender=False), 0.0):
            event.link.accept(Recorder())  # type: ignore[union-attr]
        for event in engine.receive(attach("c", 2), 0.0):
            event.link.refuse(Error("amqp:not-found"))  # type: ignore[union-attr]
        engine.receive(frame(Detach(0, True)) + frame(Detach(2, True)), 0.0)
        engine.receive(frame(End()), 0.0)
        engine.take()

    visit()
    # Objects left by a visit are for the collector, which runs now and then.
    with growth(512 * KIB):
        for _ in range(500):
            visit()
    assert not engine.sessions
    assert not engine._remote
    assert not engine._touched
    assert not engine._dirty
    assert not engine._waiting
    check(engine)


@pytest.mark.slow
@pytest.mark.req("X12")
def test_names_and_handles_that_come_and_go_leave_nothing() -> None:
    engine = begun()
    with growth(256 * KIB):
        for number in range(1_000):
            (event,) = engine.receive(attach(f"link {number}", number % 256), 0.0)
            event.link.accept(Recorder())  # type: ignore[union-attr]
            engine.receive(frame(Detach(number % 256, True)), 0.0)
            engine.take()
    session = engine.sessions[0]
    assert not session.links
    assert not session._names
    assert session._free_handles == [0]
    check(engine)


@pytest.mark.req("X21")
def test_the_same_word_a_thousand_times_is_heard_once() -> None:
    engine = begun()
    endpoint = Recorder()
    deliveries = sending(engine, endpoint, 500)
    said = frame(Disposition(True, 0, 499, False, Received(0, 1)))
    engine.receive(said * 200, 0.0)
    assert endpoint.outcomes == deliveries
    # And however many different ones there are, once for each chunk.
    endpoint.outcomes.clear()
    many = b"".join(
        frame(Disposition(True, 0, 499, False, Received(0, number))) for number in range(2, 50)
    )
    engine.receive(many + frame(Disposition(True, 0, 499, True, ACCEPTED)), 0.0)
    assert endpoint.outcomes == deliveries
    assert all(d.settled and d.state == ACCEPTED for d in deliveries)
    engine.receive(said, 0.0)
    assert len(endpoint.outcomes) == 500
    check(engine)


@pytest.mark.req("X21")
def test_a_sender_that_repeats_itself_is_heard_once() -> None:
    engine = begun()
    endpoint = Recorder()
    receiving(engine, endpoint)
    engine.receive(transfer(0) + transfer(1), 0.0)
    states = b"".join(
        frame(Disposition(False, 0, 1, False, rejected("x:y", str(number // 2))))
        for number in range(50)
    )
    engine.receive(states, 0.0)
    assert endpoint.settled == endpoint.deliveries
    engine.receive(frame(Disposition(False, 0, 1, False, rejected("x:y", "24"))), 0.0)
    assert len(endpoint.settled) == 2
    engine.receive(frame(Disposition(False, 0, 1, True)) * 3, 0.0)
    assert len(endpoint.settled) == 4
    assert all(delivery.settled for delivery in endpoint.deliveries)


@pytest.mark.req("X17")
def test_a_flood_of_echoes_and_drains_is_answered_once_a_chunk() -> None:
    engine = begun()
    endpoint = Recorder()
    sending(engine, endpoint, 1)
    endpoint.credits.clear()
    fields = {"next_incoming_id": 1, "incoming_window": 9, "next_outgoing_id": 0}
    flow = Flow(
        **fields,  # type: ignore[arg-type]
        outgoing_window=9,
        handle=0,
        delivery_count=1,
        link_credit=5,
        drain=True,
        echo=True,
    )
    session = Flow(**fields, outgoing_window=9, echo=True)  # type: ignore[arg-type]
    engine.receive((frame(flow) + frame(session)) * 500, 0.0)
    assert kinds(engine) == ["Flow"]
    assert endpoint.credits == [5]


# --- the scope of a fault ------------------------------------------------------------------------


@pytest.mark.req("X26", "X5")
@pytest.mark.parametrize("pieces", ["whole", "octets"])
def test_a_close_behind_the_fault_is_heard_however_it_comes(pieces: str) -> None:
    engine = begun()
    script = frame(Open(container_id="again")) + BEGIN + attach() + frame(Close())
    size = len(script) if pieces == "whole" else 1
    events: list[Event] = []
    for at in range(0, len(script), size):
        events += engine.receive(script[at : at + size], 0.0)
    assert [type(event) for event in events] == [ConnectionFailed]
    assert closed_with(engine) == "amqp:not-allowed"
    assert engine.finished


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    "close",
    [
        frame(Close()),
        frame(Close(Error("amqp:not-found", "reason")), channel=17),
        struct.pack(">IBBH", 19, 2, 0, 0) + b"\0\x80" + bytes(7) + b"\x18\x45",
        struct.pack(">IBBH", 27, 2, 0, 0) + b"\0\xa3\x0famqp:close:list\x45",
        struct.pack(">IBBH", 13, 2, 0, 0) + b"\0\x53\x18\xff\xff",
    ],
    ids=["plain", "with error", "wide descriptor", "symbolic descriptor", "broken"],
)
def test_however_a_close_is_written_it_is_the_end(close: bytes) -> None:
    engine = begun()
    engine.close()
    events = engine.receive(BEGIN + transfer(0) + close, 0.0)
    assert [type(event) for event in events] == [Closed]
    assert engine.finished


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    "octets",
    [b"\0\x80" + bytes(7) + b"\x14\x45", b"nonsense", b"\0\x53\x18"[:2], b"\0", b"\0\x53\x99\x45"],
)
def test_after_our_close_nothing_else_counts(octets: bytes) -> None:
    engine = begun()
    engine.close()
    engine.take()
    assert engine.receive(struct.pack(">IBBH", len(octets) + 8, 2, 0, 0) + octets, 0.0) == []
    assert not engine.finished
    assert engine.take() == []


@pytest.mark.req("X8", "X26")
@pytest.mark.parametrize(
    ("performative", "channel"),
    [
        (Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1), 64),
        (End(), 64),
        (Disposition(True, 0), 64),
        (Flow(incoming_window=1, next_outgoing_id=0, outgoing_window=1), 65_535),
        (Detach(0), 64),
    ],
)
def test_a_channel_above_the_highest_is_a_framing_error(performative: object, channel: int) -> None:
    engine = begun()
    engine.receive(frame(performative, channel), 0.0)
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X8")
def test_a_transfer_above_the_highest_channel_is_a_framing_error() -> None:
    engine = begun()
    octets = transfer(0)
    engine.receive(octets[:6] + struct.pack(">H", 64) + octets[8:], 0.0)
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X4", "X26")
def test_open_belongs_on_channel_0() -> None:
    engine = server()
    events = engine.receive(AMQP_HEADER + frame(Open(container_id="p"), channel=1), 0.0)
    assert [type(event) for event in events] == [ConnectionFailed]
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X8")
def test_a_begin_that_we_could_not_answer_closes() -> None:
    engine = server()
    engine.receive(AMQP_HEADER + frame(Open(container_id="p", channel_max=0)), 0.0)
    second = Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1)
    engine.receive(BEGIN + frame(second, channel=1), 0.0)
    assert closed_with(engine) == "amqp:resource-limit-exceeded"
    check(engine)


@pytest.mark.req("X5", "X8")
def test_a_channel_may_be_used_again_as_soon_as_its_session_has_ended() -> None:
    engine = opened()
    again = (BEGIN + frame(End())) * 3 + BEGIN
    engine.receive(again, 0.0)
    assert kinds(engine) == ["Begin", "End"] * 3 + ["Begin"]
    # Ended by us: what was under way is passed over until the peer's end.
    engine.sessions[0].end()
    engine.receive(attach() + transfer(0) + frame(Disposition(True, 0)) + frame(Detach(0)), 0.0)
    assert kinds(engine) == ["End"]
    engine.receive(frame(End()) + BEGIN, 0.0)
    assert kinds(engine) == ["Begin"]
    check(engine)


@pytest.mark.req("X21")
def test_dispositions_for_links_that_are_gone_are_passed_over() -> None:
    engine = begun()
    endpoint = Recorder()
    deliveries = sending(engine, endpoint, 3)
    link = deliveries[0].link
    link.detach()
    # Until the peer has detached too, its word counts.
    engine.receive(frame(Disposition(True, 0, None, True, ACCEPTED)), 0.0)
    assert deliveries[0].state == ACCEPTED
    engine.receive(frame(Detach(0, True)), 0.0)
    engine.receive(frame(Disposition(True, 0, 2, True, RELEASED)), 0.0)
    assert [d.state for d in deliveries] == [ACCEPTED, None, None]
    assert link.unsettled == deliveries[1:]
    engine.take()
    deliveries[1].settle(ACCEPTED)
    assert engine.take() == []
    check(engine)


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.req("X7")
def test_a_handshake_that_takes_too_long_is_over_at_once() -> None:
    engine = server(limits=Limits(handshake_s=10))
    engine.receive(AMQP_HEADER, 9.0)
    engine.tick(10)
    # There is no second wait for the answer of a peer that never came to open.
    assert engine.finished
    assert closed_with(engine) == "amqp:connection:forced"


@pytest.mark.req("X6")
@pytest.mark.parametrize(
    ("milliseconds", "fine"), [(100, True), (99, False), (0, True), (None, True)]
)
def test_idle_timeouts_at_the_bound(milliseconds: int | None, fine: bool) -> None:
    engine = server(limits=Limits(idle_timeout_min_s=0.1))
    events = engine.receive(
        AMQP_HEADER + frame(Open(container_id="p", idle_time_out=milliseconds)), 0.0
    )
    assert isinstance(events[0], ConnectionFailed) is not fine


# --- SASL ----------------------------------------------------------------------------------------


@pytest.mark.req("SE1", "X1")
def test_sasl_that_we_do_not_speak_is_answered_with_what_we_do() -> None:
    engine = server(mechanisms=())
    events = engine.receive(SASL_HEADER, 0.0)
    assert [type(event) for event in events] == [ConnectionFailed]
    assert engine.take() == [AMQP_HEADER]
    assert engine.finished


@pytest.mark.req("SE1")
def test_a_login_is_answered_once() -> None:
    engine = server(mechanisms=("PLAIN",), sasl_required=True)
    init = frame(SaslInit("PLAIN", b"x"), kind=1)
    (event,) = engine.receive(SASL_HEADER + init + AMQP_HEADER + OPEN, 0.0)
    assert isinstance(event, LoginRequested)
    assert len(event.exchange.succeed("u")) == 1
    assert event.exchange.succeed("other") == []
    event.exchange.fail()
    event.exchange.challenge(b"x")
    assert engine.peer.user == "u"
    assert not engine.finished
    assert kinds(engine) == ["SaslMechanisms", "SaslOutcome", "Open"]


@pytest.mark.req("SE1", "X5")
def test_what_a_client_sent_before_its_challenge_is_read_after_it() -> None:
    engine = server(mechanisms=("PLAIN",), sasl_required=True)
    script = frame(SaslInit("PLAIN", b"x"), kind=1) + frame(SaslResponse(b"y"), kind=1)
    (event,) = engine.receive(SASL_HEADER + script + AMQP_HEADER + OPEN, 0.0)
    assert isinstance(event, LoginRequested)
    (again,) = event.exchange.challenge(b"c")
    assert isinstance(again, LoginRequested)
    assert again.response == b"y"
    assert [type(e) for e in again.exchange.succeed("u")] == [Opened]


@pytest.mark.req("SE1")
@pytest.mark.parametrize("answer", ["succeed", "fail", "challenge"])
def test_an_answer_to_a_client_that_has_gone_is_in_vain(answer: str) -> None:
    engine = server(mechanisms=("PLAIN",), sasl_required=True)
    (event,) = engine.receive(SASL_HEADER + frame(SaslInit("PLAIN", b"x"), kind=1), 0.0)
    assert isinstance(event, LoginRequested)
    engine.receive_eof(1.0)
    engine.take()
    answers: dict[str, Callable[[], object]] = {
        "succeed": lambda: event.exchange.succeed("u"),
        "fail": event.exchange.fail,
        "challenge": lambda: event.exchange.challenge(b"c"),
    }
    assert not answers[answer]()
    assert engine.take() == []
    assert engine.peer.user is None


# --- a hostile server ------------------------------------------------------------------------------


def client(**limits: Any) -> Engine:
    engine = amqp10.client(amqp10.ClientOptions(container_id="c", limits=Limits(**limits)), 0.0)
    engine.take()
    return engine


@pytest.mark.req("X3", "X9", "T9")
@pytest.mark.parametrize(
    ("octets", "condition"),
    [
        (struct.pack(">IBBH", 8 * 1_024 + 1, 2, 0, 0), "amqp:connection:framing-error"),
        (frame(Open(container_id="s", max_frame_size=511)), "amqp:invalid-field"),
        (frame(Open(container_id="s" * 1_025)), "amqp:invalid-field"),
        (OPEN + OPEN, "amqp:not-allowed"),
        (OPEN + frame(Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1), 64), None),
        (OPEN + transfer(0), "amqp:not-allowed"),
        (
            OPEN
            + frame(
                Begin(remote_channel=0, next_outgoing_id=0, incoming_window=1, outgoing_window=1)
            ),
            "amqp:not-allowed",
        ),
        (OPEN + struct.pack(">IBBH", 65_537, 2, 0, 0), "amqp:connection:framing-error"),
        (frame(Open(container_id="s", idle_time_out=1)), "amqp:not-allowed"),
    ],
)
def test_a_server_is_held_to_the_same_limits(octets: bytes, condition: str | None) -> None:
    engine = client()
    events = engine.receive(AMQP_HEADER + octets, 0.0)
    assert isinstance(events[-1], ConnectionFailed)
    assert closed_with(engine) == (condition or "amqp:connection:framing-error")


@pytest.mark.req("X9", "X22")
def test_a_server_that_sends_too_much_is_detached() -> None:
    engine = client(message_size_max=100)
    engine.receive(AMQP_HEADER + OPEN, 0.0)
    session = engine.begin()
    link = session.attach_receiver("l", Recorder(credit=5), source=Source(address="q"))
    answer = Begin(remote_channel=0, next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    engine.receive(frame(answer) + attach(), 0.0)
    assert link.attached
    engine.take()
    engine.receive(transfer(0, b"x" * 101), 0.0)
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    check(engine)


@pytest.mark.req("X9", "SE1")
def test_a_server_may_not_skip_the_login() -> None:
    class Plain:
        name = "PLAIN"

        def initial(self) -> bytes:
            return b"\0u\0p"

        def respond(self, challenge: bytes) -> bytes:
            return b""

    options = amqp10.ClientOptions(container_id="c", mechanisms=(Plain(),))
    engine = amqp10.client(options, 0.0)
    engine.take()
    events = engine.receive(AMQP_HEADER + OPEN, 0.0)
    assert [type(event) for event in events] == [ConnectionFailed]
    # Nothing of the login, nor of open, was told to it.
    assert engine.take() == []
