"""Sessions and links: windows, credit, deliveries, settlement, detaching."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from wire import begun, detached_with, ended_with, frame, kinds, opened, said, transfer

from amqp_rt.core.engine import Engine
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Detach,
    Disposition,
    End,
    Flow,
    Transfer,
)
from amqp_rt.errors import LocalProtocolError
from amqp_rt.events import AttachRequested
from amqp_rt.limits import Limits
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Outcome,
    Received,
    Rejected,
    Released,
    rejected,
)
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState

Q = Target(address="q")


def sending(
    joined: Joined, endpoint: Recorder | None = None, **options: Any
) -> tuple[Any, Any, Recorder]:
    """A link on which the client sends: its end, the server's end, the client's endpoint."""
    joined.pump()
    session = options.pop("session", None) or joined.client.begin()
    ours = endpoint or Recorder()
    link = session.attach_sender(options.pop("name", "l"), ours, target=Q, **options)
    joined.pump()
    return link, joined.links[-1], ours


def receiving(engine: Engine, *, credit: int = 10, **options: Any) -> tuple[Any, Recorder]:
    """An engine whose peer has attached a sender: our end of it."""
    attach = Attach(
        name="l", handle=0, role=False, source=Source(), target=Q, initial_delivery_count=0
    )
    (event,) = engine.receive(frame(attach), 0.0)
    assert isinstance(event, AttachRequested)
    endpoint = Recorder()
    event.link.accept(endpoint, **options)
    event.link.grant(credit)
    engine.take()
    return event.link, endpoint


# --- attaching -----------------------------------------------------------------------------


@pytest.mark.req("X12")
def test_termini_and_modes_are_answered_as_accepted() -> None:
    def accept(link: Any) -> None:
        assert (link.snd_settle_mode, link.rcv_settle_mode) == (0, 1)
        link.accept(
            Recorder(),
            target=Target(address="q", capabilities=("queue",)),
            rcv_settle_mode=0,
            properties={"x": 1},
            offered_capabilities=("SHARED",),
        )

    joined = Joined(on_attach=accept)
    link, _, endpoint = sending(joined, snd_settle_mode=0, rcv_settle_mode=1)
    assert endpoint.attached == [link]
    assert link.target.capabilities == ("queue",)
    assert link.rcv_settle_mode == 0
    assert link.properties == {"x": 1}
    assert link.offered_capabilities == ("SHARED",)
    assert link.max_message_size == Limits().message_size_max


@pytest.mark.req("X14", "X26")
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_refused_link_is_heard_as_detached_only(role: str) -> None:
    joined = Joined(on_attach=lambda link: link.refuse(Error("amqp:not-found", "no such node")))
    joined.pump()
    session = joined.client.begin()
    endpoint = Recorder(credit=5)
    if role == "sender":
        link: Any = session.attach_sender("l", endpoint, target=Q)
    else:
        link = session.attach_receiver("l", endpoint, source=Source(address="q"))
    joined.pump()
    assert endpoint.attached == []
    ((error, closed),) = endpoint.detached
    assert error is not None
    assert error.condition == "amqp:not-found"
    assert closed
    assert link.ended
    again = session.attach_sender("l", Recorder(), target=Q)
    assert again.handle == link.handle


@pytest.mark.req("X14")
def test_the_refusal_on_the_wire_is_an_attach_without_termini_then_a_detach() -> None:
    engine = begun()
    (event,) = engine.receive(
        frame(Attach(name="l", handle=3, role=True, source=Source(address="q"))), 0.0
    )
    assert isinstance(event, AttachRequested)
    event.link.refuse(Error("amqp:not-found"))
    (_, attach), (_, detach) = said(engine)  # type: ignore[misc]
    assert (attach.source, attach.target) == (None, None)
    assert detach.closed
    assert detach.error.condition == "amqp:not-found"


@pytest.mark.req("X13")
def test_the_same_name_again_steals_the_link() -> None:
    joined = Joined()
    first, _, endpoint = sending(joined, name="l")
    first.session._names.clear()
    second, _, _ = sending(joined, session=first.session, name="l")
    ((error, _),) = endpoint.detached
    assert error is not None
    assert error.condition == "amqp:link:stolen"
    assert second.attached
    assert not first.attached


@pytest.mark.req("X9", "X12")
def test_both_sides_attach_and_one_name_serves_both_directions() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder()))
    joined.pump()
    session = joined.client.begin()
    session.attach_sender("l", Recorder(), target=Q)
    session.attach_receiver("l", Recorder(), source=Source(address="q"))
    joined.pump()
    theirs = joined.server.begin()
    ours = Recorder(settle=ACCEPTED, credit=10)
    requested: list[Any] = []

    def on_client(event: Any) -> None:
        event.link.accept(ours)
        requested.append(event.link)

    link = theirs.attach_sender("server-made", Recorder(), target=Target(address="client-node"))
    for data in joined.server.take():
        for event in joined.client.receive(data, 0.0):
            if isinstance(event, AttachRequested):
                on_client(event)
    joined.pump()
    link.send(b"to the client")
    joined.pump()
    assert [d.payload for d in ours.deliveries] == [b"to the client"]
    assert link.unsettled == []


def test_attach_and_detach_may_cross_the_acceptance() -> None:
    engine = begun()
    attach = frame(Attach(name="l", handle=0, role=True, source=Source(address="q")))
    (event,) = engine.receive(attach + frame(Detach(0, True)), 0.0)
    assert isinstance(event, AttachRequested)
    endpoint = Recorder()
    event.link.accept(endpoint)
    assert endpoint.detached == [(None, True)]
    assert kinds(engine) == ["Attach", "Detach"]
    assert engine.receive(attach, 0.0)


@pytest.mark.req("X26")
def test_a_handle_in_use_ends_the_session() -> None:
    engine = begun()
    attach = frame(Attach(name="a", handle=0, role=True))
    engine.receive(attach + frame(Attach(name="b", handle=0, role=True)), 0.0)
    assert ended_with(engine) == "amqp:session:handle-in-use"


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    "octets",
    [
        transfer(0),
        frame(Flow(incoming_window=1, next_outgoing_id=0, outgoing_window=1, handle=7)),
        frame(Detach(7)),
    ],
)
def test_an_unattached_handle_ends_the_session(octets: bytes) -> None:
    engine = begun()
    engine.receive(octets, 0.0)
    assert ended_with(engine) == "amqp:session:unattached-handle"
    assert engine.receive(octets, 0.0) == []
    engine.receive(frame(End()), 0.0)
    assert not engine.sessions


@pytest.mark.req("X26")
def test_a_transfer_on_a_link_that_we_send_on_is_errant() -> None:
    engine = begun()
    (event,) = engine.receive(
        frame(Attach(name="l", handle=0, role=True, source=Source(address="q"))), 0.0
    )
    assert isinstance(event, AttachRequested)
    event.link.accept(Recorder())
    engine.take()
    engine.receive(transfer(0), 0.0)
    assert ended_with(engine) == "amqp:session:errant-link"


# --- windows -------------------------------------------------------------------------------


@pytest.mark.req("X10")
def test_a_transfer_into_a_closed_window_is_a_violation() -> None:
    engine = begun(limits=Limits(session_window=2))
    _, endpoint = receiving(engine)
    engine.receive(transfer(0, more=True) + transfer(None) + transfer(1), 0.0)
    assert ended_with(engine) == "amqp:session:window-violation"
    assert endpoint.detached[0][0].condition == "amqp:session:window-violation"  # type: ignore[union-attr]


@pytest.mark.req("X10", "X5")
@pytest.mark.parametrize("start", [0, 0x7FFFFFFE, 0xFFFFFFFC, 0xFFFFFFFF])
def test_ids_wrap(start: int) -> None:
    joined = Joined(limits=Limits(session_window=4))
    joined.pump()
    session = joined.client.begin()
    session.next_outgoing_id = start
    session._delivery_id = start
    session.ours.stage = type(session.ours.stage).UNMAPPED
    joined.client.output.clear()
    session.send_begin()
    link, _far, endpoint = sending(joined, session=session)
    for number in range(20):
        link.send(b"%d" % number)
        joined.pump()
    assert [d.payload for d in joined.endpoint.deliveries] == [b"%d" % n for n in range(20)]
    assert len(endpoint.outcomes) == 20
    assert all(sending.state == ACCEPTED for sending in endpoint.outcomes)


@pytest.mark.req("X10")
def test_what_the_window_does_not_admit_waits_in_order() -> None:
    joined = Joined(limits=Limits(session_window=3))
    link, _far, endpoint = sending(joined)
    for number in range(50):
        link.send(b"%d" % number)
    assert not link.writable
    joined.pump()
    assert [d.payload for d in joined.endpoint.deliveries] == [b"%d" % n for n in range(50)]
    assert len(endpoint.outcomes) == 50
    assert link.writable


@pytest.mark.req("X11")
def test_the_window_is_what_the_bytes_allow() -> None:
    engine = begun(limits=Limits(session_window_bytes=10 * 65536, message_size_max=65536))
    session = next(iter(engine.sessions.values()))
    assert session.incoming_window == 10


@pytest.mark.req("X11")
def test_the_sessions_of_a_connection_share_the_bytes() -> None:
    joined = Joined(limits=Limits(session_window_bytes=100 * 65536))
    joined.pump()
    for _ in range(20):
        joined.client.begin()
    joined.pump()
    promised = sum(session.incoming_window for session in joined.server.sessions.values())
    assert promised <= 100 + 20 * 8


@pytest.mark.req("X11")
def test_a_narrow_session_leaves_the_bytes_to_the_others() -> None:
    joined = Joined(limits=Limits(session_window_bytes=100 * 65536))
    joined.pump()
    link, far, endpoint = sending(joined)
    joined.pump()
    narrow = far.session
    assert narrow.incoming_window == 100
    narrow.narrow(10)
    assert narrow.incoming_window == 100, "what the peer was promised stays promised"
    for _ in range(95):
        link.send(b"")
    joined.pump()
    assert narrow.incoming_window <= 10
    second = joined.client.begin()
    joined.pump()
    assert second.remote_incoming_window >= 90
    for _ in range(50):
        link.send(b"")
        joined.pump()
    assert len(endpoint.outcomes) == 145


@pytest.mark.req("X11")
def test_a_session_without_attached_links_is_narrow_at_once() -> None:
    joined = Joined(limits=Limits(session_window_bytes=100 * 65536))
    joined.pump()
    first = joined.client.begin()
    joined.pump()
    (far,) = joined.server.sessions.values()
    far.narrow(3)
    far.narrow(200)
    joined.pump()
    assert first.remote_incoming_window == far.incoming_window == 3
    link, _, endpoint = sending(joined, session=first)
    for _ in range(20):
        link.send(b"")
    joined.pump()
    assert len(endpoint.outcomes) == 20
    second = joined.client.begin()
    joined.pump()
    assert second.remote_incoming_window >= 97


@pytest.mark.req("X10", "X17")
def test_a_session_echo_is_answered_once() -> None:
    engine = begun()
    echo = Flow(incoming_window=5, next_outgoing_id=0, outgoing_window=1, echo=True)
    engine.receive(frame(echo), 0.0)
    ((_, answer),) = said(engine)  # type: ignore[misc]
    assert isinstance(answer, Flow)
    assert answer.handle is None
    assert not answer.echo


# --- credit --------------------------------------------------------------------------------


@pytest.mark.req("X15")
def test_credit_is_reckoned_from_the_receivers_count() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder()))
    link, far, endpoint = sending(joined)
    assert link.credit == 0
    with pytest.raises(LocalProtocolError, match="no credit"):
        link.send(b"x")
    far.grant(3)
    joined.pump()
    assert endpoint.credits == [3]
    link.send(b"1")
    link.send(b"2")
    far.grant(5)
    joined.pump()
    # Two were under way when the five were granted: not granted twice.
    assert link.credit == 5 - 2
    assert far.credit == 5 - 2


@pytest.mark.req("X15")
@pytest.mark.parametrize("start", [0, 5, 0xFFFFFFFE])
def test_the_initial_delivery_count_may_be_anything(start: int) -> None:
    engine = begun()
    attach = Attach(
        name="l", handle=0, role=False, source=Source(), target=Q, initial_delivery_count=start
    )
    (event,) = engine.receive(frame(attach), 0.0)
    assert isinstance(event, AttachRequested)
    event.link.accept(Recorder())
    event.link.grant(3)
    _, (_, flow) = said(engine)  # type: ignore[misc]
    assert (flow.delivery_count, flow.link_credit) == (start, 3)
    engine.receive(transfer(0) + transfer(1), 0.0)
    event.link.grant(3)
    ((_, flow),) = said(engine)  # type: ignore[misc]
    assert (flow.delivery_count, flow.link_credit) == ((start + 2) & 0xFFFFFFFF, 3)


@pytest.mark.req("X15", "X26")
def test_a_senders_attach_without_its_count_is_refused() -> None:
    engine = begun()
    engine.receive(frame(Attach(name="l", handle=0, role=False, source=Source(), target=Q)), 0.0)
    assert detached_with(engine) == "amqp:invalid-field"


@pytest.mark.req("X15", "X26")
def test_a_transfer_without_credit_detaches_the_link_alone() -> None:
    engine = begun()
    _, endpoint = receiving(engine, credit=1)
    engine.receive(transfer(0) + transfer(1), 0.0)
    assert len(endpoint.deliveries) == 1
    assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
    engine.receive(transfer(2), 0.0)
    engine.receive(frame(Detach(0, True)), 0.0)
    # The peer's answer has no reason of its own: ours is heard.
    ((error, closed),) = endpoint.detached
    assert error is not None
    assert error.condition == "amqp:link:transfer-limit-exceeded"
    assert closed
    assert engine.sessions


@pytest.mark.req("X16")
def test_drain_gives_back_what_is_not_used() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder()))
    link, far, _endpoint = sending(joined)
    far.grant(10)
    far.drain()
    joined.pump()
    assert link.draining
    link.send(b"the only one")
    link.drained()
    joined.pump()
    assert link.credit == 0
    assert far.credit == 0
    assert far.endpoint.flows >= 1
    assert far.delivery_count == 10
    far.grant(1)
    joined.pump()
    assert link.credit == 1
    assert not link.draining


@pytest.mark.req("X16")
def test_a_drain_without_credit_is_answered_too() -> None:
    engine = begun()
    (event,) = engine.receive(
        frame(Attach(name="l", handle=0, role=True, source=Source(address="q"))), 0.0
    )
    assert isinstance(event, AttachRequested)
    endpoint = Recorder()
    event.link.accept(endpoint)
    engine.take()
    flow = Flow(
        incoming_window=9,
        next_outgoing_id=0,
        outgoing_window=9,
        handle=0,
        delivery_count=0,
        link_credit=0,
        drain=True,
    )
    engine.receive(frame(flow), 0.0)
    assert endpoint.credits == [0]
    event.link.drained()
    event.link.drained()
    ((_, answer),) = said(engine)  # type: ignore[misc]
    assert (answer.link_credit, answer.drain) == (0, True)


@pytest.mark.req("X16")
def test_a_drain_waits_for_what_the_window_holds_back() -> None:
    joined = Joined(limits=Limits(session_window=2), on_attach=lambda k: k.accept(Recorder()))
    link, far, _ = sending(joined)
    far.grant(10)
    joined.pump()
    for _ in range(6):
        link.send(b"x")
    far.drain()
    joined.pump()
    link.drained()
    joined.pump()
    assert len(far.endpoint.deliveries) == 6
    assert (link.credit, far.credit) == (0, 0)


@pytest.mark.req("X17")
def test_a_link_echo_is_answered() -> None:
    engine = begun()
    link, _endpoint = receiving(engine)
    flow = Flow(
        incoming_window=9,
        next_outgoing_id=0,
        outgoing_window=9,
        handle=0,
        delivery_count=0,
        link_credit=10,
        available=7,
        echo=True,
    )
    engine.receive(frame(flow), 0.0)
    ((_, answer),) = said(engine)  # type: ignore[misc]
    assert (answer.handle, answer.link_credit, answer.echo) == (0, 10, False)
    assert link.available == 7


# --- deliveries ----------------------------------------------------------------------------


@pytest.mark.req("X18")
@pytest.mark.parametrize("size", [0, 1, 500, 16_384, 65_400, 65_536, 300_000])
def test_messages_of_any_size_arrive_whole(size: int) -> None:
    joined = Joined()
    link, _, endpoint = sending(joined)
    body = bytes(range(256)) * (size // 256 + 1)
    link.send(body[:size])
    link.send([b"in", b"", b"pieces"])
    joined.pump(cut=1000)
    assert [d.payload for d in joined.endpoint.deliveries] == [body[:size], b"inpieces"]
    assert [s.state for s in endpoint.outcomes] == [ACCEPTED, ACCEPTED]


@pytest.mark.req("X18", "X28")
def test_frames_of_large_messages_take_turns() -> None:
    joined = Joined(limits=Limits(frame_size_max=512, session_window=4))
    first, _, _ = sending(joined, name="a")
    second, _, _ = sending(joined, name="b", session=first.session)
    first.send(b"A" * 50_000)
    second.send(b"b")
    order: list[bytes] = []
    original = joined.endpoint.deliver

    def deliver(link: Any, deliveries: list[Any]) -> None:
        order.extend(d.payload[:1] for d in deliveries)
        original(link, deliveries)

    joined.endpoint.deliver = deliver  # type: ignore[method-assign]
    joined.pump()
    assert order == [b"b", b"A"]


@pytest.mark.req("X28")
def test_control_frames_go_before_what_waits() -> None:
    joined = Joined(limits=Limits(output_max=4096))
    link, _, _ = sending(joined)
    link.send(b"x" * 500_000)
    other = link.session.attach_receiver("r", Recorder(), source=Source(address="q"))
    other.grant(5)
    data = b"".join(joined.client.take())
    assert len(data) < 200_000
    position = data.find(b"\x00\x53\x12")
    assert 0 <= position < 140_000


@pytest.mark.req("X21")
def test_adjacent_outcomes_leave_as_one_range() -> None:
    engine = begun()
    _, endpoint = receiving(engine)
    engine.receive(b"".join(transfer(n) for n in range(6)), 0.0)
    assert endpoint.batches == [6]
    for delivery in endpoint.deliveries[:4]:
        delivery.settle(ACCEPTED)
    endpoint.deliveries[4].settle(RELEASED)
    endpoint.deliveries[5].settle(RELEASED)
    ranges = [(f.first, f.last, f.state) for _, f in said(engine) if isinstance(f, Disposition)]  # type: ignore[misc]
    assert ranges == [(0, 3, ACCEPTED), (4, 5, RELEASED)]


@pytest.mark.req("X21", "M20", "M21", "M22", "M23")
@pytest.mark.parametrize(
    "outcome", [ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("amqp:not-found", "gone")]
)
def test_every_outcome_reaches_the_sender(outcome: Outcome) -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(settle=outcome, credit=5)))
    link, _, _endpoint = sending(joined)
    sent = link.send(b"x", "my context")
    joined.pump()
    assert sent.state == outcome
    assert sent.settled
    assert sent.remote_settled
    assert sent.context == "my context"


@pytest.mark.req("X21", "X26")
def test_an_error_larger_than_the_peers_frames_is_shortened() -> None:
    long = Rejected(Error("amqp:decode-error", "y" * 100, {"errors": ["x" * 600]}))
    joined = Joined(
        limits=Limits(frame_size_max=512),
        on_attach=lambda link: link.accept(Recorder(settle=long, credit=5)),
    )
    link, _, _ = sending(joined)
    sent = [link.send(b"x") for _ in range(3)]
    joined.pump()
    assert all(each.settled for each in sent)
    assert [each.state for each in sent] == [Rejected(Error("amqp:decode-error", "y" * 64))] * 3


@pytest.mark.req("X21")
def test_settled_deliveries_are_heard_of_no_more() -> None:
    joined = Joined()
    link, _, endpoint = sending(joined, snd_settle_mode=1)
    sent = link.send(b"x")
    joined.pump()
    assert sent.settled
    assert joined.endpoint.deliveries[0].settled
    assert endpoint.outcomes == []
    with pytest.raises(LocalProtocolError, match="settled deliveries only"):
        link.send(b"x", settled=False)


@pytest.mark.req("X21")
def test_the_receiver_settles_second() -> None:
    receiver = Recorder(settle=ACCEPTED, credit=5)
    joined = Joined(on_attach=lambda link: link.accept(receiver))
    link, far, _endpoint = sending(joined, rcv_settle_mode=1)
    sent = link.send(b"x")
    joined.pump()
    assert sent.state == ACCEPTED
    assert not sent.settled
    assert receiver.settled == []
    sent.settle()
    joined.pump()
    assert receiver.settled == receiver.deliveries
    assert far.session.incoming == {}
    assert link.session._outgoing == {}


@pytest.mark.req("X21", "B11")
def test_a_second_different_outcome_is_refused_here() -> None:
    engine = begun()
    _, endpoint = receiving(engine)
    engine.receive(transfer(0), 0.0)
    (delivery,) = endpoint.deliveries
    delivery.settle(ACCEPTED)
    delivery.settle(ACCEPTED)
    with pytest.raises(LocalProtocolError, match="has the outcome"):
        delivery.settle(RELEASED)
    assert kinds(engine) == ["Disposition"]


def test_a_state_that_is_no_outcome_leaves_it_unsettled() -> None:
    engine = begun()
    _, endpoint = receiving(engine)
    engine.receive(transfer(0), 0.0)
    endpoint.deliveries[0].update(Received(0, 5))
    ((_, disposition),) = said(engine)  # type: ignore[misc]
    assert (disposition.settled, disposition.state) == (False, Received(0, 5))
    endpoint.deliveries[0].settle(ACCEPTED)
    assert len(said(engine)) == 1


def test_a_link_counts_as_a_consumer_whether_it_has_credit_or_not() -> None:
    joined = Joined()
    joined.pump()
    joined.client.begin().attach_receiver("l", Recorder(), source=Source(address="q"))
    joined.pump()
    assert joined.links[-1].idle is False


@pytest.mark.req("X19", "X21")
def test_a_link_is_writable_while_the_window_and_the_unsettled_allow() -> None:
    engine = begun(limits=Limits(unsettled_max=2))
    attach = Attach(name="l", handle=0, role=True, target=Q)
    (event,) = engine.receive(frame(attach), 0.0)
    assert isinstance(event, AttachRequested)
    link = event.link
    link.accept(Recorder())
    window = {"next_incoming_id": 0, "next_outgoing_id": 0, "outgoing_window": 9}
    engine.receive(
        frame(Flow(incoming_window=0, handle=0, delivery_count=0, link_credit=9, **window)), 0.0
    )
    assert not link.writable
    engine.receive(frame(Flow(incoming_window=9, **window)), 0.0)
    assert link.writable
    for _ in range(2):
        link.send(b"x")
    assert not link.writable


@pytest.mark.req("X21", "R3")
def test_nothing_is_said_of_a_delivery_whose_link_has_gone() -> None:
    engine = begun()
    _, endpoint = receiving(engine)
    engine.receive(transfer(0), 0.0)
    (delivery,) = endpoint.deliveries
    engine.receive(frame(Detach(0, True)), 0.0)
    assert delivery.local_settled
    with pytest.raises(LocalProtocolError, match="is settled"):
        delivery.update(Received(0, 5))


@pytest.mark.req("X21", "R3")
def test_a_state_follows_an_outcome_only_within_a_transaction() -> None:
    engine = begun()
    attach = Attach(name="l", handle=0, role=False, rcv_settle_mode=1, initial_delivery_count=0)
    (event,) = engine.receive(frame(attach), 0.0)
    assert isinstance(event, AttachRequested)
    endpoint = Recorder()
    event.link.accept(endpoint)
    event.link.grant(2)
    engine.receive(transfer(0) + transfer(1), 0.0)
    engine.take()
    first, other = endpoint.deliveries
    first.settle(ACCEPTED)
    with pytest.raises(LocalProtocolError, match="has an outcome"):
        first.update(Received(0, 5))
    other.settle(TransactionalState(b"t", ACCEPTED))
    other.update(TransactionalState(b"t", RELEASED))
    states = [p.state for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert states == [
        ACCEPTED,
        TransactionalState(b"t", ACCEPTED),
        TransactionalState(b"t", RELEASED),
    ]


@pytest.mark.req("X21", "X10")
@pytest.mark.parametrize(
    ("first", "last", "hit"),
    [
        (0, 0xFFFFFFFF, 0),
        (0, 0x7FFFFFFF, 5),
        (1, 3, 3),
        (3, 2, 0),
        (4, 900, 1),
        (0xFFFFFFF0, 2, 3),
        (900, 0x7FFFFFFF, 0),
        (2, None, 1),
    ],
)
def test_a_disposition_range_costs_what_is_unsettled(
    first: int, last: int | None, hit: int
) -> None:
    engine = begun()
    (event,) = engine.receive(
        frame(Attach(name="l", handle=0, role=True, source=Source(address="q")))
        + frame(
            Flow(
                incoming_window=99,
                next_outgoing_id=0,
                outgoing_window=9,
                handle=0,
                delivery_count=0,
                link_credit=10,
            )
        ),
        0.0,
    )
    assert isinstance(event, AttachRequested)
    endpoint = Recorder()
    event.link.accept(endpoint)
    for _ in range(5):
        event.link.send(b"x")
    engine.receive(frame(Disposition(True, first, last, True, ACCEPTED)), 0.0)
    assert len(endpoint.outcomes) == hit
    assert [s.delivery_id for s in endpoint.outcomes] == sorted(
        s.delivery_id for s in endpoint.outcomes
    )


@pytest.mark.req("X20")
def test_an_aborted_delivery_leaves_nothing() -> None:
    joined = Joined()
    link, far, _endpoint = sending(joined)
    unfinished = link.send(b"begin", more=True)
    joined.pump()
    unfinished.abort()
    link.send(b"next")
    joined.pump()
    assert [d.payload for d in joined.endpoint.deliveries] == [b"next"]
    assert far.session.engine.assembling == 0
    assert link.session._outgoing == {}
    assert far.delivery_count == link.delivery_count == 2
    with pytest.raises(LocalProtocolError, match="complete"):
        unfinished.write(b"more")


@pytest.mark.req("X20", "X28")
def test_an_abort_before_the_first_frame_left_still_counts() -> None:
    joined = Joined(limits=Limits(session_window=1))
    link, far, _ = sending(joined)
    link.send(b"fills the window")
    unfinished = link.send(b"never leaves", more=True)
    unfinished.abort()
    joined.pump()
    assert [d.payload for d in joined.endpoint.deliveries] == [b"fills the window"]
    assert far.delivery_count == link.delivery_count


@pytest.mark.req("X22", "X26")
def test_max_message_size_is_enforced_while_it_accumulates() -> None:
    engine = begun(limits=Limits(message_size_max=10))
    _, endpoint = receiving(engine)
    engine.receive(transfer(0, b"x" * 10), 0.0)
    assert len(endpoint.deliveries) == 1
    engine.receive(transfer(1, b"x" * 6, more=True), 0.0)
    engine.receive(transfer(None, b"x" * 5, more=True), 0.0)
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    assert engine.assembling == 0


@pytest.mark.req("X22")
def test_a_message_too_large_for_the_peer_is_not_sent() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(credit=5), max_message_size=10))
    link, _, _ = sending(joined)
    with pytest.raises(LocalProtocolError, match="message-size-exceeded"):
        link.send(b"x" * 11)
    link.send(b"x" * 10)


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    "octets",
    [
        transfer(None),
        transfer(0, tag=b"t" * 33),
        frame(Transfer(0, 0, None, 0), payload=b"x"),
        transfer(0, more=True) + transfer(1),
        transfer(0, more=True) + transfer(None, tag=b"else"),
    ],
)
def test_a_malformed_transfer_detaches_its_link(octets: bytes) -> None:
    engine = begun()
    _, _endpoint = receiving(engine)
    engine.receive(octets, 0.0)
    assert detached_with(engine) == "amqp:invalid-field"


@pytest.mark.req("X26")
def test_a_delivery_id_in_use_ends_the_session() -> None:
    engine = begun()
    receiving(engine)
    engine.receive(transfer(0) + transfer(0), 0.0)
    assert ended_with(engine) == "amqp:invalid-field"


def test_unfinished_messages_of_a_connection_are_bounded_together() -> None:
    # Each piece is counted with what it costs to keep it.
    limits = Limits(session_window_bytes=1000, message_size_max=900, frame_size_max=512)
    engine = begun(limits=limits)
    links = []
    for handle in range(3):
        attach = Attach(
            name=f"l{handle}",
            handle=handle,
            role=False,
            source=Source(),
            target=Q,
            initial_delivery_count=0,
        )
        (event,) = engine.receive(frame(attach), 0.0)
        assert isinstance(event, AttachRequested)
        event.link.accept(Recorder())
        event.link.grant(5)
        links.append(event.link)
    engine.take()
    next(iter(engine.sessions.values())).incoming_window = 100
    for handle in range(3):
        engine.receive(transfer(handle, b"x" * 400, more=True, handle=handle), 0.0)
    assert detached_with(engine) == "amqp:resource-limit-exceeded"
    assert [link.attached for link in links] == [True, True, False]
    assert engine.assembling == 2 * (400 + 64)


# --- streaming -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("X19", "X11")
def test_a_message_of_a_gibibyte_passes_in_bounded_memory() -> None:
    received = 0

    class Reader(Recorder):
        def deliver(self, link: Any, deliveries: list[Any]) -> None:
            self.deliveries += deliveries
            self.on_data(link, deliveries)

        def on_data(self, link: Any, deliveries: list[Any]) -> None:
            nonlocal received
            for delivery in deliveries:
                for chunk in delivery.read_chunks():
                    received += len(chunk)
                if delivery.complete:
                    delivery.settle(ACCEPTED)

    joined = Joined(on_attach=lambda link: link.accept(Reader(credit=1), streaming=True))
    link, _, endpoint = sending(joined)
    piece = bytes(1024 * 1024)
    tracemalloc.start()
    body = link.send(b"", more=True)
    for number in range(1024):
        body.write(piece, more=number < 1023)
        joined.pump()
        endpoint.credits.clear()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received == 1024 * 1024 * 1024
    assert body.state == ACCEPTED
    assert peak < 64 * 1024 * 1024


@pytest.mark.req("X19", "X11")
def test_unread_streams_close_the_window_and_reading_opens_it() -> None:
    limits = Limits(frame_size_max=1024, session_window_bytes=16 * 1024)
    receiver = Recorder(credit=1)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(receiver, streaming=True))
    link, _far, _ = sending(joined)
    body = link.send(b"", more=True)
    for _ in range(100):
        body.write(b"y" * 800)
    joined.pump()
    assert not link.writable
    (delivery,) = receiver.deliveries
    held = delivery.size
    assert held <= 16 * 1024
    total = 0
    while delivery.size < 80_000 or delivery._chunks:
        total += sum(len(chunk) for chunk in delivery.read_chunks())
        joined.pump()
    assert total == 80_000
    assert link.writable
    # Nothing that was read is still counted, and nothing was given back twice.
    assert joined.server.held == 0


@pytest.mark.req("X19", "X20")
def test_a_stream_cut_off_is_heard_as_aborted() -> None:
    receiver = Recorder(credit=1)
    joined = Joined(on_attach=lambda link: link.accept(receiver, streaming=True))
    link, _, _ = sending(joined)
    body = link.send(b"some", more=True)
    joined.pump()
    body.abort()
    joined.pump()
    assert receiver.progress == receiver.deliveries
    assert receiver.deliveries[0].aborted
    assert not receiver.deliveries[0].complete


# --- ends ----------------------------------------------------------------------------------


@pytest.mark.req("X23")
@pytest.mark.parametrize("closed", [True, False])
def test_a_detach_is_answered_and_leaves_its_unsettled(closed: bool) -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(credit=5)))
    link, far, endpoint = sending(joined)
    theirs = far.endpoint
    sent = link.send(b"x")
    joined.pump()
    link.detach(closed=closed)
    joined.pump()
    assert endpoint.detached == [(None, closed)]
    assert theirs.detached == [(None, closed)]
    # Each refers to the other as long as the link is there, and not any more.
    assert link.endpoint is far.endpoint is None
    assert link.unsettled == [sent]
    assert [d.payload for d in far.unsettled] == [b"x"]
    assert link.session._outgoing == {}
    theirs.deliveries[0].settle(Released())
    joined.pump()
    assert sent.state is None


def test_messages_before_a_detach_are_delivered_before_it_is_heard() -> None:
    engine = begun()
    _, endpoint = receiving(engine)
    order: list[str] = []
    endpoint.deliver = lambda link, deliveries: order.append("deliver")  # type: ignore[method-assign]
    endpoint.on_detached = lambda link, error, closed: order.append("detached")  # type: ignore[method-assign]
    engine.receive(transfer(0) + frame(Detach(0, True)), 0.0)
    assert order == ["deliver", "detached"]


@pytest.mark.req("X26")
@pytest.mark.parametrize("how", ["end", "lost", "close", "close by peer"])
def test_every_endpoint_hears_once_that_its_link_is_over(how: str) -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(credit=5)))
    link, far, endpoint = sending(joined)
    theirs = far.endpoint
    link.send(b"x")
    joined.pump()
    if how == "end":
        link.session.end()
    elif how == "lost":
        joined.client.receive_eof(0.0)
        joined.server.receive_eof(0.0)
    elif how == "close":
        joined.client.close(Error("amqp:connection:forced"))
    else:
        joined.server.close()
    joined.pump()
    assert len(endpoint.detached) == 1
    assert len(theirs.detached) == 1
    assert not endpoint.detached[0][1]
    assert len(link.unsettled) == 1
    assert link.ended
    with pytest.raises(LocalProtocolError):
        link.send(b"x")
    link.detach()
    far.grant(5)


def test_a_session_that_the_peer_ends_frees_its_channel() -> None:
    joined = Joined()
    joined.pump()
    ended: list[Error | None] = []
    session = joined.client.begin()
    session.on_ended = ended.append
    joined.pump()
    (theirs,) = joined.server.sessions.values()
    theirs.end(Error("amqp:not-allowed", "enough"))
    joined.pump()
    assert [error.condition for error in ended if error] == ["amqp:not-allowed"]
    assert session.ended
    assert not joined.client.sessions
    assert joined.client.begin().channel == 0


def test_states_have_the_names_of_the_standard() -> None:
    joined = Joined(on_attach=lambda link: None)
    session = joined.client.begin()
    assert joined.client.state == "OPEN_PIPE"
    assert session.state == "BEGIN_SENT"
    joined.pump()
    link = session.attach_sender("l", Recorder(), target=Q)
    assert link.state == "ATTACH_SENT"
    joined.pump()
    assert joined.links[0].state == "ATTACH_RCVD"
    assert (joined.client.state, session.state) == ("OPENED", "MAPPED")
    assert "attach" in repr(link).lower()


def test_output_is_announced_once_per_take() -> None:
    joined = Joined()
    link, _, _ = sending(joined)
    calls: list[int] = []
    joined.client.on_output = lambda: calls.append(1)
    for _ in range(10):
        link.send(b"x")
    assert calls == [1]
    joined.client.take()
    link.send(b"x")
    assert calls == [1, 1]


def test_the_engine_says_when_it_is_finished_with_nothing_to_send() -> None:
    joined = Joined()
    joined.pump()
    calls: list[bool] = []
    joined.client.on_output = lambda: calls.append(joined.client.finished)
    joined.client.close()
    joined.pump()
    assert calls[-1] is True


@pytest.mark.req("X8", "X21")
def test_everything_is_said_on_our_own_channel_and_not_on_the_peers() -> None:
    engine = opened()
    begin = Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100)
    engine.receive(frame(begin, channel=7), 0.0)
    ((channel, answer),) = said(engine)  # type: ignore[misc]
    assert (channel, answer.remote_channel) == (0, 7)
    inbox, outbox = Recorder(credit=10), Recorder()
    for number, role in enumerate((False, True)):
        attach = Attach(
            name=f"link-{number}",
            handle=number,
            role=role,
            source=Source(),
            target=Target(),
            initial_delivery_count=None if role else 0,
        )
        (event,) = engine.receive(frame(attach, channel=7), 0.0)
        assert isinstance(event, AttachRequested)
        event.link.accept(outbox if role else inbox)
    credit = Flow(
        next_incoming_id=0,
        incoming_window=100,
        next_outgoing_id=0,
        outgoing_window=100,
        handle=1,
        delivery_count=0,
        link_credit=5,
        echo=True,
    )
    engine.receive(frame(credit, channel=7), 0.0)
    octets = frame(Transfer(0, 0, b"t", 0), channel=7, payload=b"x")
    engine.receive(octets + frame(Transfer(0, 1, b"u", 0), channel=7, payload=b"x"), 0.0)
    first, second = inbox.deliveries
    first.update(Received(0, 1))
    second.settle(ACCEPTED)
    sent = event.link.send(b"y")
    heard = said(engine)
    sent.settle(ACCEPTED)
    event.link.detach()
    event.link.session.end()
    heard += said(engine)
    names = [type(performative).__name__ for _, performative in heard]  # type: ignore[misc]
    assert {"Attach", "Flow", "Disposition", "Transfer", "Detach", "End"} == set(names)
    assert names.count("Disposition") >= 2
    assert {channel for channel, _ in heard} == {0}  # type: ignore[misc]
