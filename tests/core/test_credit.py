"""Credit taken back, drains that cross, echoes; the session's window where numbers are odd."""

from __future__ import annotations

from typing import Any

import pytest
from sanity import check
from wire import BEGIN, begun, detached_with, frame, said, server, transfer

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Detach,
    Disposition,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.errors import LocalProtocolError
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.values import Symbol

RECEIVES = Attach(name="l", handle=0, role=True, source=Source(address="q"), target=Target())


def sends(count: int = 0, name: str = "l", handle: int = 0) -> bytes:
    return frame(
        Attach(
            name=name,
            handle=handle,
            role=False,
            source=Source(),
            target=Target(address="q"),
            initial_delivery_count=count,
        )
    )


def requested(engine: Engine, attach: bytes) -> Any:
    """Our end of a link that the peer asks for with *attach*."""
    (event,) = engine.receive(attach, 0.0)
    return event.link  # type: ignore[union-attr]


def flow(**fields: Any) -> bytes:
    plain = {"incoming_window": 100, "next_outgoing_id": 0, "outgoing_window": 100}
    return frame(Flow(**(plain | fields)))


def link_flow(credit: int, count: int | None = 0, **fields: Any) -> bytes:
    return flow(next_incoming_id=0, handle=0, delivery_count=count, link_credit=credit, **fields)


def performatives(engine: Engine, kind: type) -> list[Any]:
    return [f[1] for f in said(engine) if isinstance(f, tuple) and isinstance(f[1], kind)]


# --- as the receiver -------------------------------------------------------------------------


@pytest.mark.req("X15")
@pytest.mark.parametrize(
    ("grants", "allowed"),
    [
        ([5], 5),
        ([5, 0], 5),
        ([5, 2], 5),
        ([5, 0, 5], 5),
        ([5, 0, 7], 7),
        ([0, 3, 0, 1], 3),
        ([4, 0xFFFFFFFF, 6], None),
    ],
)
def test_transfers_that_crossed_a_lower_credit_are_taken(
    grants: list[int], allowed: int | None
) -> None:
    engine = begun(limits=Limits(session_window=50))
    link = requested(engine, sends())
    endpoint = Recorder()
    link.accept(endpoint)
    for credit in grants:
        link.grant(credit)
    engine.receive(b"".join(transfer(n, settled=True) for n in range(allowed or 20)), 0.0)
    assert link.attached
    assert len(endpoint.deliveries) == (allowed or 20)
    assert link.delivery_count == (allowed or 20)
    if allowed is not None:
        assert link.credit == 0
        engine.take()
        engine.receive(transfer(allowed, settled=True), 0.0)
        assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
    check(engine)


@pytest.mark.req("X15")
@pytest.mark.parametrize(
    ("product", "version", "tolerated"),
    [("RabbitMQ", "3.10.8", 5), ("RabbitMQ", "4.0.1", 0), ("another", "3.10.8", 0)],
)
def test_who_counts_topped_up_credit_twice_is_borne_within_one_window(
    product: str, version: str, tolerated: int
) -> None:
    engine = server()
    known = {Symbol("product"): product, Symbol("version"): version}
    engine.receive(AMQP_HEADER + frame(Open(container_id="peer", properties=known)) + BEGIN, 0.0)
    engine.take()
    link = requested(engine, sends())
    endpoint = Recorder()
    link.accept(endpoint)
    link.grant(10)
    engine.receive(b"".join(transfer(n, settled=True) for n in range(5)), 0.0)
    # Five are on their way when this reaches the peer, which takes it for ten more after those.
    link.grant(10)
    engine.take()
    engine.receive(b"".join(transfer(5 + n, settled=True) for n in range(10 + tolerated)), 0.0)
    assert len(endpoint.deliveries) == 15 + tolerated
    assert link.attached
    engine.receive(transfer(15 + tolerated, settled=True), 0.0)
    assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
    check(engine)


@pytest.mark.req("X15", "X16")
def test_a_stopped_link_takes_what_is_under_way_and_goes_on_later() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(settle=ACCEPTED)))
    joined.pump()
    link = joined.client.begin().attach_sender("l", Recorder(), target=Target(address="q"))
    joined.pump()
    (far,) = joined.links
    far.grant(5)
    joined.pump()
    for _ in range(3):
        link.send(b"x")
    far.grant(0)
    joined.pump()
    assert len(far.endpoint.deliveries) == 3
    assert (link.credit, far.credit) == (0, 0)
    far.grant(2)
    joined.pump()
    assert link.credit == 2


@pytest.mark.req("X16")
def test_an_answer_to_a_drain_counts_even_if_the_credit_has_changed_since() -> None:
    engine = begun()
    link = requested(engine, sends())
    link.accept(Recorder())
    link.grant(10)
    link.drain()
    engine.take()
    link.grant(3)
    engine.receive(flow(handle=0, delivery_count=10, link_credit=0, drain=True), 0.0)
    assert (link.delivery_count, link.credit) == (10, 0)
    engine.take()
    link.grant(3)
    (answer,) = performatives(engine, Flow)
    assert (answer.delivery_count, answer.link_credit, answer.drain) == (10, 3, False)
    check(engine)


@pytest.mark.req("X15")
def test_a_sender_that_counts_backwards_is_not_believed() -> None:
    engine = begun()
    link = requested(engine, sends(count=100))
    link.accept(Recorder())
    link.grant(10)
    engine.receive(transfer(0) + flow(handle=0, delivery_count=0, link_credit=50), 0.0)
    assert (link.delivery_count, link.credit) == (101, 9)


@pytest.mark.req("X15")
def test_before_the_peers_attach_its_count_is_not_known() -> None:
    engine = begun()
    session = engine.sessions[0]
    link = session.attach_receiver("l", Recorder(), source=Source(address="q"))
    link.grant(5)
    (early,) = performatives(engine, Flow)
    assert (early.delivery_count, early.link_credit) == (None, 5)
    engine.receive(sends(count=77), 0.0)
    link.grant(6)
    (later,) = performatives(engine, Flow)
    assert (later.delivery_count, later.link_credit) == (77, 6)


@pytest.mark.req("X17")
def test_an_echo_is_asked_for_once() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder()))
    joined.pump()
    joined.client.begin().attach_sender("l", Recorder(), target=Target(address="q"))
    joined.pump()
    (far,) = joined.links
    far.grant(4)
    joined.pump()
    heard = far.endpoint.flows
    far.grant(0, echo=True)
    joined.pump()
    # The sender has answered: nothing more is under way.
    assert far.endpoint.flows == heard + 1
    far.grant(1)
    joined.pump()
    assert far.endpoint.flows == heard + 1


@pytest.mark.parametrize("credit", [-1, 0x1_0000_0000])
def test_credit_has_32_bits(credit: int) -> None:
    engine = begun()
    link = requested(engine, sends())
    link.accept(Recorder())
    with pytest.raises(LocalProtocolError, match="credit"):
        link.grant(credit)
    link.grant(0xFFFFFFFF)
    assert link.credit == 0xFFFFFFFF


# --- as the sender ---------------------------------------------------------------------------


def wire_transfers(engine: Engine) -> list[Transfer]:
    return performatives(engine, Transfer)


@pytest.mark.req("X15")
def test_what_waits_for_the_window_waits_for_credit_that_was_taken_back() -> None:
    engine = begun()
    link = requested(engine, frame(RECEIVES) + link_flow(10, incoming_window=2))
    endpoint = Recorder()
    link.accept(endpoint)
    for number in range(8):
        link.send(b"%d" % number)
    assert [t.delivery_id for t in wire_transfers(engine)] == [0, 1]
    # The window opens, but the credit ends after five.
    engine.receive(link_flow(5, 0), 0.0)
    check(engine)
    assert [t.delivery_id for t in wire_transfers(engine)] == [2, 3, 4]
    assert link.credit == 0
    engine.receive(link_flow(1, 5, echo=True), 0.0)
    frames = said(engine)
    # The reported state of the link is the one that the peer has seen.
    (answer,) = [f[1] for f in frames if isinstance(f[1], Flow)]  # type: ignore[index]
    assert (answer.delivery_count, answer.link_credit) == (5, 1)
    assert [f[1].delivery_id for f in frames if isinstance(f[1], Transfer)] == [5]  # type: ignore[index]
    engine.receive(link_flow(20, 6, incoming_window=100), 0.0)
    assert [t.delivery_id for t in wire_transfers(engine)] == [6, 7]
    assert link.credit == 20 - 2
    check(engine)


@pytest.mark.req("X16")
def test_a_drain_is_answered_when_what_waits_has_lost_its_credit() -> None:
    engine = begun()
    link = requested(engine, frame(RECEIVES) + link_flow(10, incoming_window=1))
    link.accept(Recorder())
    for number in range(5):
        link.send(b"%d" % number)
    engine.take()
    engine.receive(link_flow(2, 0, drain=True, incoming_window=1), 0.0)
    link.drained()
    assert performatives(engine, Flow) == []
    # Another message leaves; the others may not.
    engine.receive(link_flow(2, 0, drain=True), 0.0)
    frames = said(engine)
    assert [f[1].delivery_id for f in frames if isinstance(f[1], Transfer)] == [1]  # type: ignore[index]
    # The answer leaves behind the message, with the same take: no other one may follow for long.
    flows = [f[1] for f in frames if isinstance(f[1], Flow)]  # type: ignore[index]
    assert (flows[-1].delivery_count, flows[-1].link_credit, flows[-1].drain) == (2, 0, True)
    check(engine)


@pytest.mark.req("X15")
@pytest.mark.parametrize(
    ("sent", "count", "credit", "left"),
    [
        (0, None, 5, 5),
        (0, 0, 0, 0),
        (3, None, 5, 2),
        (3, 0, 5, 2),
        (3, 3, 5, 5),
        (3, 0, 2, 0),
        (3, 9, 5, 5),
        (3, 0, 0xFFFFFFFF, 0xFFFFFFFC),
    ],
)
def test_credit_is_reckoned_from_where_the_receiver_counts(
    sent: int, count: int | None, credit: int, left: int
) -> None:
    engine = begun()
    link = requested(engine, frame(RECEIVES) + link_flow(sent))
    link.accept(Recorder())
    for _ in range(sent):
        link.send(b"x")
    engine.receive(link_flow(credit, count), 0.0)
    assert link.credit == left
    check(engine)


@pytest.mark.req("X5", "X15")
def test_a_flow_ahead_of_the_acceptance_is_heard_at_once() -> None:
    engine = begun()
    link = requested(engine, frame(RECEIVES) + link_flow(3, None, drain=True, echo=True))
    endpoint = Recorder()
    link.accept(endpoint)
    assert endpoint.credits == [3]
    assert link.draining
    # The echo is answered when there is something to answer from.
    assert [type(f[1]) for f in said(engine)] == [Attach, Flow]  # type: ignore[index]


@pytest.mark.req("X17")
def test_an_echo_that_cannot_be_answered_does_not_silence_the_link() -> None:
    engine = begun()
    link = requested(engine, sends() + flow(handle=0, delivery_count=0, echo=True))
    engine.take()
    link.accept(Recorder())
    link.grant(7)
    (answer,) = performatives(engine, Flow)
    assert answer.link_credit == 7


# --- the session's window --------------------------------------------------------------------


@pytest.mark.req("X10")
@pytest.mark.parametrize("start", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFC, 0xFFFFFFFF])
@pytest.mark.parametrize(
    ("sent", "seen", "window", "left"),
    [
        (0, 0, 5, 5),
        (3, 0, 5, 2),
        (3, 3, 5, 5),
        (3, 1, 2, 0),
        (3, 0, 0, -3),
        (3, None, 5, 2),
        (3, None, 0xFFFFFFFF, 0xFFFFFFFC),
        (0, None, 7, 7),
    ],
)
def test_the_peers_window_is_what_it_said_less_what_is_under_way(
    start: int, sent: int, seen: int | None, window: int, left: int
) -> None:
    engine = begun()
    session = engine.sessions[0]
    session.next_outgoing_id = session.initial_outgoing_id = start
    link = requested(engine, frame(RECEIVES))
    engine.receive(flow(next_incoming_id=start, handle=0, delivery_count=0, link_credit=100), 0.0)
    link.accept(Recorder())
    for _ in range(sent):
        link.send(b"x")
    engine.take()
    seen_id = None if seen is None else (start + seen) & 0xFFFFFFFF
    engine.receive(flow(next_incoming_id=seen_id, incoming_window=window), 0.0)
    assert session.remote_incoming_window == left


@pytest.mark.req("X10")
def test_frames_leave_exactly_as_far_as_the_window_goes() -> None:
    engine = begun()
    link = requested(engine, frame(RECEIVES) + link_flow(100, incoming_window=0))
    link.accept(Recorder())
    for _ in range(10):
        link.send(b"x")
    total = 0
    for window in (0, 1, 0, 3, 2, 4):
        engine.receive(flow(next_incoming_id=total, incoming_window=window), 0.0)
        total += window
        assert len(wire_transfers(engine)) == window
        assert engine.sessions[0].remote_incoming_window == 0
    check(engine)


@pytest.mark.req("X10")
def test_our_count_of_frames_follows_the_peers() -> None:
    engine = begun()
    engine.receive(flow(next_outgoing_id=0xFFFFFFFE, echo=True), 0.0)
    (answer,) = performatives(engine, Flow)
    assert answer.next_incoming_id == 0xFFFFFFFE


@pytest.mark.req("X10")
def test_a_begin_of_ours_that_is_not_answered_leaves_the_id_out() -> None:
    joined = Joined()
    session = joined.client.begin()
    link = session.attach_receiver("l", Recorder(), source=Source(address="q"))
    link.grant(1)
    (answer,) = performatives(joined.client, Flow)
    assert answer.next_incoming_id is None


@pytest.mark.req("X10", "X11")
def test_what_a_link_leaves_unsettled_does_not_keep_the_window_shut() -> None:
    engine = begun(limits=Limits(unsettled_max=4, session_window=8))
    hoarder = requested(engine, sends())
    other = requested(engine, sends(name="m", handle=1))
    for link in (hoarder, other):
        link.accept(Recorder())
        link.grant(100)
    engine.take()
    session = engine.sessions[0]
    engine.receive(b"".join(transfer(n) for n in range(8)), 0.0)
    engine.take()
    assert session.incoming_window == 0
    engine.receive(frame(Detach(0, True)), 0.0)
    assert [f.incoming_window for f in performatives(engine, Flow)] == [8]
    check(engine)


@pytest.mark.req("X10", "X21")
def test_settling_opens_a_window_that_the_unsettled_had_shut() -> None:
    engine = begun(limits=Limits(unsettled_max=4, session_window=8))
    link = requested(engine, sends())
    endpoint = Recorder()
    link.accept(endpoint)
    link.grant(100)
    engine.take()
    engine.receive(b"".join(transfer(n) for n in range(8)), 0.0)
    assert performatives(engine, Flow) == []
    for delivery in endpoint.deliveries[:4]:
        delivery.settle(ACCEPTED)
    assert performatives(engine, Flow) == []
    # The sender itself may settle the next one.
    engine.receive(frame(Disposition(False, 4, None, True)), 0.0)
    assert [f.incoming_window for f in performatives(engine, Flow)] == [8]


@pytest.mark.req("X21")
def test_a_delivery_that_is_settled_half_way_counts_as_settled() -> None:
    engine = begun()
    link = requested(engine, sends())
    endpoint = Recorder()
    link.accept(endpoint)
    link.grant(10)
    engine.receive(transfer(0, more=True) + transfer(None, settled=True), 0.0)
    assert endpoint.deliveries[0].settled
    assert engine.sessions[0].incoming == {}


@pytest.mark.req("X8", "X10")
def test_a_begin_wherever_numbers_start() -> None:
    for start in (0, 0x7FFFFFFF, 0xFFFFFFFF):
        engine = begun()
        begin = Begin(next_outgoing_id=start, incoming_window=0, outgoing_window=0)
        engine.receive(frame(begin, channel=9), 0.0)
        session = engine.sessions[1]
        assert (session.next_incoming_id, session.remote_incoming_window) == (start, 0)
