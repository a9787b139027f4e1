"""Links over three nodes, which join them: the peers see one link."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from chains import Chain

from amqp_rt.events import ConnectionFailed
from amqp_rt.limits import DEFAULT_LIMITS, KIB, Limits
from amqp_rt.mesh.hops import LOW, STREAMS
from amqp_rt.mesh.loads import LOAD
from amqp_rt.mesh.neighbours import Neighbour
from amqp_rt.mesh.passing import SURGE, Room
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Modified,
    Rejected,
    rejected,
)
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState

pytestmark = pytest.mark.req("P3")

OUTCOMES = [
    ACCEPTED,
    RELEASED,
    Modified(delivery_failed=True, message_annotations={"k": 1}),
    rejected("amqp:not-allowed", "no"),
]
SMALL = Limits(frame_size_max=1024, splice_bytes_max=4 * KIB)


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("second", [False, True])
def test_outcomes_of_the_server_reach_the_client(outcome: Any, second: bool) -> None:
    chain = Chain()
    link, mine = chain.sender(rcv_settle_mode=int(second))
    sending = link.send(b"\x00Ssome octets", tag=b"a longer tag", message_format=7)
    chain.pump()
    (delivery,) = chain.served.deliveries
    assert delivery.payload == b"\x00Ssome octets"
    assert (delivery.tag, delivery.message_format) == (b"a longer tag", 7)
    assert delivery.second == second
    assert not mine.outcomes

    delivery.settle(outcome)
    chain.pump()

    assert mine.outcomes == [sending]
    assert sending.state == outcome
    assert sending.settled == (not second)
    assert not chain.served.settled
    if second:
        sending.settle()
        chain.pump()
        assert chain.served.settled == [delivery]
    link.detach()
    chain.pump()
    chain.check_empty()


def test_a_client_receives_through_the_nodes() -> None:
    chain = Chain(served=Recorder())
    link, mine = chain.receiver()
    (served,) = chain.links
    assert served.credit == 0
    link.grant(3)
    chain.pump()
    assert served.credit == 3
    sendings = [served.send(b"m%d" % at) for at in range(3)]
    chain.pump()
    assert [each.payload for each in mine.deliveries] == [b"m0", b"m1", b"m2"]
    assert link.credit == served.credit == 0
    mine.deliveries[1].settle(RELEASED)
    chain.pump()
    assert [each.state for each in sendings] == [None, RELEASED, None]
    link.detach()
    chain.pump()
    chain.check_empty()


def test_a_settled_message_leaves_nothing_behind() -> None:
    chain = Chain()
    link, mine = chain.sender(snd_settle_mode=1)
    link.send(b"x")
    chain.pump()
    assert [each.settled for each in chain.served.deliveries] == [True]
    assert not mine.outcomes
    for joint in chain.joints:
        for engine in (joint.client, joint.server):
            assert not any(each._outgoing or each.incoming for each in engine.sessions.values())


def test_the_sender_may_settle_before_the_outcome() -> None:
    chain = Chain()
    link, mine = chain.sender()
    sending = link.send(b"x")
    chain.pump()
    sending.settle()
    chain.pump()
    (delivery,) = chain.served.deliveries
    assert chain.served.settled == [delivery]
    delivery.settle(ACCEPTED)
    chain.pump()
    assert not mine.outcomes
    link.detach()
    chain.pump()
    chain.check_empty()


def test_a_receiver_may_settle_without_a_state() -> None:
    chain = Chain()
    link, mine = chain.sender()
    sending = link.send(b"x")
    chain.pump()
    chain.served.deliveries[0].settle(None)
    chain.pump()
    assert mine.outcomes == [sending]
    assert sending.settled
    assert sending.state is None


def test_transactional_states_pass_unchanged() -> None:
    chain = Chain()
    link, mine = chain.sender()
    posted = TransactionalState(b"txn-1", None)
    sending = link.send(b"x", state=posted)
    chain.pump()
    (delivery,) = chain.served.deliveries
    assert delivery.state == posted
    done = TransactionalState(b"txn-1", ACCEPTED)
    delivery.update(done)
    chain.pump()
    assert sending.state == done
    assert not sending.settled
    delivery.settle(ACCEPTED)
    chain.pump()
    assert sending.state == ACCEPTED
    assert sending.settled
    assert mine.outcomes[-1] is sending


def test_the_answer_is_that_of_the_server() -> None:
    chain = Chain()
    chain.accept_options = {
        "max_message_size": 5_000,
        "offered_capabilities": ("queue",),
        "properties": {"load": 3},
        "rcv_settle_mode": 0,
    }
    link, _ = chain.sender(rcv_settle_mode=1)
    assert link.attached
    assert link.max_message_size == 5_000
    assert link.rcv_settle_mode == 0
    assert link.offered_capabilities == ("queue",)
    assert link.properties == {"load": 3}


def test_a_refusal_of_the_server_refuses_the_client() -> None:
    chain = Chain()
    error = Error("amqp:unauthorized-access", "not for you")
    chain.serve = lambda link: link.refuse(error)  # type: ignore[method-assign]
    for joint in chain.joints[-1:]:
        joint.on_attach = chain.serve
    _, mine = chain.sender()
    assert mine.detached == [(error, True)]
    assert not mine.attached
    chain.check_empty()


@pytest.mark.parametrize("credit", [1, 7, 1_000_000])
def test_credit_of_the_server_reaches_the_client(credit: int) -> None:
    chain = Chain(served=Recorder())
    link, _ = chain.sender()
    assert link.credit == 0
    (served,) = chain.links
    served.grant(credit)
    chain.pump()
    # A frame of each message has to fit the 8 MiB of a node.
    assert link.credit == min(credit, 128)
    served.grant(0)
    chain.pump()
    assert link.credit == 0


def test_a_drain_takes_back_the_credit_of_the_client() -> None:
    chain = Chain(served=Recorder())
    link, mine = chain.sender()
    (served,) = chain.links
    served.grant(10)
    chain.pump()
    served.drain()
    chain.pump()
    assert link.draining
    assert served.credit == 10
    assert chain.served.flows == 0
    link.send(b"last")
    link.drained()
    chain.pump()
    assert len(chain.served.deliveries) == 1
    assert served.credit == link.credit == 0
    assert chain.served.flows == 1
    assert not mine.detached


def test_a_drain_of_more_credit_than_a_node_passes_on_empties_the_client() -> None:
    chain = Chain(served=Recorder(), limits=SMALL)
    link, _ = chain.sender()
    (served,) = chain.links
    served.grant(11)
    served.drain()
    left = 9
    for _ in range(10):
        chain.pump()
        assert link.credit <= 4
        while left and link.credit:
            link.send(b"x", settled=True)
            left -= 1
        if not left:
            link.drained()
    assert len(chain.served.deliveries) == 9
    assert served.credit == 0
    assert link.credit == 0


def test_a_drain_is_answered_behind_messages_that_a_node_could_not_send() -> None:
    limits = Limits(frame_size_max=512, output_max=1)
    chain = Chain(1, served=Recorder(), limits=limits)
    link, _ = chain.sender()
    (served,) = chain.links
    served.grant(5)
    served.drain()
    chain.pump()
    link.send(bytes(400), settled=True)
    link.drained()
    # The node gets message and answer, and nothing leaves it.
    for _ in range(5):
        chain.step(0)
    (splice,) = chain.splices
    assert splice.outlet._queue
    assert splice.outlet.credit == 4
    assert splice.inlet.credit == 0
    chain.pump()
    assert len(chain.served.deliveries) == 1
    assert chain.served.flows == 1
    assert served.credit == link.credit == 0


def test_a_drain_without_credit_is_answered_although_messages_wait() -> None:
    chain = Chain(1, served=Recorder())
    link, _ = chain.sender()
    (served,) = chain.links
    served.grant(2)
    chain.pump()
    link.send(b"1")
    # Taken back while the message is on its way.
    served.grant(0)
    served.drain()
    chain.step(1)
    chain.pump()
    assert not chain.served.deliveries
    assert chain.splices[0].held == 1
    assert chain.served.flows == 1
    served.grant(1)
    chain.pump()
    assert len(chain.served.deliveries) == 1


def test_a_drain_without_credit_is_answered_at_once() -> None:
    chain = Chain(served=Recorder())
    chain.sender()
    chain.links[0].drain()
    chain.pump()
    assert chain.served.flows == 1


def test_an_echo_is_answered() -> None:
    chain = Chain(served=Recorder())
    chain.sender()
    chain.links[0].grant(0, echo=True)
    chain.pump()
    assert chain.served.flows == 1


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("error", [None, Error("amqp:resource-deleted", "the queue is gone")])
def test_a_detach_passes_both_ways(side: str, closed: bool, error: Error | None) -> None:
    chain = Chain()
    link, mine = chain.sender()
    detaching, other = (link, chain.served) if side == "client" else (chain.links[0], mine)
    detaching.detach(error, closed=closed)
    chain.pump()
    assert other.detached == [(error, closed)]
    assert len(mine.detached) == len(chain.served.detached) == 1
    chain.check_empty()


def test_messages_sent_just_before_the_detach_arrive() -> None:
    chain = Chain()
    link, _ = chain.sender()
    for number in range(50):
        link.send(bytes(100), settled=number % 2 == 0)
    link.detach()
    chain.pump()
    assert len(chain.served.deliveries) == 50
    chain.check_empty()


@pytest.mark.parametrize("settled", [False, True])
def test_a_large_message_passes_frame_by_frame(settled: bool) -> None:
    chain = Chain(served=Recorder(credit=1), limits=Limits(frame_size_max=4096))
    chain.accept_options = {"streaming": True}
    link, _ = chain.sender()
    body = bytes(range(256)) * 200
    sending = link.send(body[:20_000], more=True, settled=settled)
    chain.pump()
    (delivery,) = chain.served.deliveries
    got = b"".join(delivery.read_chunks())
    # What has been written has arrived, although the message is incomplete.
    assert got == body[:20_000]
    sending.write(body[20_000:], more=False)
    chain.pump()
    assert got + b"".join(delivery.read_chunks()) == body
    assert delivery.complete
    assert delivery.settled == settled
    if not settled:
        delivery.settle(ACCEPTED)
        chain.pump()
        assert sending.state == ACCEPTED
    link.detach()
    chain.pump()
    chain.check_empty()


def test_an_abort_passes() -> None:
    chain = Chain(served=Recorder(credit=5), limits=Limits(frame_size_max=4096))
    chain.accept_options = {"streaming": True}
    link, _ = chain.sender()
    sending = link.send(bytes(9_000), more=True)
    chain.pump()
    sending.abort()
    link.send(b"next")
    chain.pump()
    first, second = chain.served.deliveries
    assert first.aborted
    assert b"".join(second.read_chunks()) == b"next"


@pytest.mark.parametrize("joint", [0, 1, 2])
def test_a_lost_client_aborts_an_incomplete_message(joint: int) -> None:
    chain = Chain(served=Recorder(credit=5), limits=Limits(frame_size_max=4096))
    chain.accept_options = {"streaming": True}
    link, _ = chain.sender()
    link.send(bytes(9_000), more=True)
    chain.pump()
    chain.cut(joint)
    chain.pump()
    assert chain.served.deliveries[0].aborted
    assert len(chain.served.detached) == 1
    chain.check_empty()


@pytest.mark.parametrize("joint", [1, 2, 3])
def test_a_lost_node_leaves_a_true_outcome(joint: int) -> None:
    """Messages that had left are *modified*; the link is detached, and can be attached anew."""
    chain = Chain()
    link, mine = chain.sender()
    sending = link.send(b"x")
    chain.pump()
    chain.cut(joint)
    chain.pump()
    assert sending.state == MODIFIED_FAILED
    assert sending.settled
    ((error, closed),) = mine.detached
    assert error is not None
    assert error.condition == "amqp:link:detach-forced"
    assert not closed
    chain.check_empty()


def test_messages_that_waited_at_the_lost_node_are_released() -> None:
    chain = Chain(served=Recorder())
    link, mine = chain.sender()
    (served,) = chain.links
    served.grant(2)
    chain.pump()
    first, second = link.send(b"1"), link.send(b"2")
    # The server takes its credit back before the messages reach the last node.
    chain.step(0)
    chain.step(1)
    served.grant(0)
    chain.step(3)
    chain.pump()
    assert not chain.served.deliveries
    assert sum(each.held for each in chain.splices) == 2
    chain.cut(3)
    chain.pump()
    assert [first.state, second.state] == [RELEASED, RELEASED]
    assert len(mine.detached) == 1
    chain.check_empty()


def test_a_break_ends_both_halves_of_a_settlement_in_two_steps() -> None:
    chain = Chain()
    link, mine = chain.sender(rcv_settle_mode=1)
    sending = link.send(b"x")
    chain.pump()
    chain.served.deliveries[0].settle(ACCEPTED)
    chain.pump()
    chain.cut(2)
    sending.settle()
    chain.pump()
    assert sending.state == ACCEPTED
    assert len(mine.detached) == len(chain.served.detached) == 1
    chain.check_empty()


def test_an_outcome_too_large_for_the_frames_of_the_client_is_shortened() -> None:
    chain = Chain(1)
    small = Limits(frame_size_max=512)
    joint = type(chain.joints[0])(limits=small, on_attach=chain.joints[0].on_attach)
    joint.pump()
    chain.joints[0] = joint
    chain.sessions[0] = joint.client.begin()
    chain.pump()
    link, _ = chain.sender()
    sending = link.send(b"x")
    chain.pump()
    chain.served.deliveries[0].settle(rejected("amqp:not-allowed", "n" * 2_000))
    chain.pump()
    assert sending.state == Rejected(Error("amqp:not-allowed", "n" * 64))
    assert not any(isinstance(each, ConnectionFailed) for each in joint.server_events)


def test_splice_bytes_max() -> None:
    """A server that reads nothing stops the client; a node holds no more than its bound."""
    window = Limits(frame_size_max=1024, splice_bytes_max=8 * KIB, output_max=1)
    chain = Chain(served=Recorder(), limits=window)
    link, _ = chain.sender()
    chain.links[0].grant(1_000)
    chain.pump()
    assert link.credit == 8
    sent = 0
    # The last connection carries nothing, so that its node cannot send.
    for _ in range(200):
        while link.credit and link.writable:
            link.send(bytes(900), settled=True)
            sent += 1
        for at in range(3):
            chain.step(at)
        for splice in chain.splices:
            assert splice.held <= window.splice_bytes_max
    assert sent < 40
    assert max(each.held for each in chain.splices) > 5 * KIB
    chain.pump()
    assert len(chain.served.deliveries) == sent


def test_a_message_as_large_as_the_bound_passes_alone() -> None:
    chain = Chain(limits=Limits(frame_size_max=4096, splice_bytes_max=512))
    link, _ = chain.sender()
    assert link.credit == 1
    for _ in range(3):
        link.send(bytes(3_000))
        chain.pump()
    assert [len(each.payload) for each in chain.served.deliveries] == [3_000] * 3


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("second", [False, True])
def test_every_connection_may_be_lost_after_every_few_octets(lost: int, second: bool) -> None:
    """Wherever the loss falls, outcomes are true, and no node keeps anything."""
    for after in range(0, 60, 2):
        chain = Chain()
        link, mine = chain.sender(rcv_settle_mode=int(second))
        sendings: dict[bytes, Any] = {}
        for at in range(60):
            if at == after:
                chain.cut(lost)
            if link.attached and link.credit and at % 4 == 0:
                body = b"%03d" % at + bytes(100)
                sendings[body] = link.send(body, settled=at % 3 == 0)
            for joint in range(4):
                chain.step(joint, 61)
            for delivery in chain.served.deliveries:
                if delivery.link.attached and not delivery.settled and not delivery.local_state:
                    delivery.settle(RELEASED if delivery.payload[2] % 2 else ACCEPTED)
            for sending in sendings.values():
                if sending.state is not None and not sending.settled and link.attached:
                    sending.settle()
        chain.pump()
        handled = {each.payload: each.local_state for each in chain.served.deliveries}
        assert len(handled) == len(chain.served.deliveries), "a message arrived twice"
        for body, sending in sendings.items():
            if sending.state == ACCEPTED:
                assert handled[body] == ACCEPTED
            elif sending.state == RELEASED:
                assert body not in handled or handled[body] == RELEASED
        assert len(mine.detached) == 1
        chain.check_empty()


@pytest.mark.req("P6")
def test_the_load_of_nodes_stays_in_the_mesh() -> None:
    for outer in (False, True):
        chain = Chain(1, served=Recorder(), outer=outer)
        link, _ = chain.receiver()
        (served,) = chain.links
        for credit, load in ((3, [3, 4]), (5, [1, 4])):
            link.grant(credit, properties={LOAD: load})
            chain.pump()
            assert served.credit == credit
            assert served.flow_properties == (None if outer else {LOAD: load})


@pytest.mark.req("P6")
@pytest.mark.parametrize("outer", [False, True])
def test_what_waits_when_the_broker_outside_is_lost_comes_again(outer: bool) -> None:
    """Unsettled messages are not sent on, since the broker sends them again; settled ones would be lost."""
    limits = Limits(session_window_bytes=4 * KIB, frame_size_max=KIB)
    chain = Chain(1, served=Recorder(), limits=limits, outer=outer)
    link, mine = chain.receiver()
    (served,) = chain.links
    link.grant(40)
    chain.pump()
    # The client does not read, so that some of them wait at the node.
    for at in range(20):
        served.send(bytes([at]) * 400, settled=at % 2 == 1)
    while chain.step(1):
        pass
    (splice,) = chain.splices
    waiting = [each.payload[0] for each in splice._passing.waiting]
    assert len({at % 2 for at in waiting}) == 2
    chain.cut(1)
    chain.pump()
    kept = [at for at in waiting if at % 2 or not outer]
    assert [each.payload[0] for each in mine.deliveries] == [*range(waiting[0]), *kept]
    assert not link.attached
    chain.check_empty()


@pytest.mark.req("P6")
@pytest.mark.parametrize("known", [False, True])
def test_a_broker_outside_gets_outcomes_that_it_knows(known: bool) -> None:
    """RabbitMQ 3 lists its outcomes, and ends the session at another one."""
    chain = Chain(1, served=Recorder(), outer=True)
    listed = ("amqp:accepted:list", "amqp:rejected:list", "amqp:released:list")
    source = Source(address="q", outcomes=(*listed, "amqp:modified:list") if known else listed)
    chain.accept_options = {"source": source}
    link, mine = chain.receiver()
    (served,) = chain.links
    link.grant(5)
    chain.pump()
    sendings = [served.send(b"m%d" % at) for at in range(5)]
    chain.pump()
    for delivery, outcome in zip(mine.deliveries, OUTCOMES, strict=False):
        delivery.settle(outcome)
    chain.pump()
    # The receiver is lost with the last one in hand.
    chain.cut(0)
    chain.pump()
    expected = [*OUTCOMES, MODIFIED_FAILED]
    if not known:
        expected = [RELEASED if type(each) is Modified else each for each in expected]
    assert [each.state for each in sendings] == expected


def test_room_follows_the_size_of_recent_messages() -> None:
    room = Room(Limits(frame_size_max=1024, splice_bytes_max=64 * KIB))
    assert room.further(0, 0) == 64, "whatever their sizes"
    for _ in range(100):
        room.took(10, 1_000)
    assert room.further(0, 0) == 64 * SURGE
    assert room.further(200, 20_000) == 64 * SURGE - 200
    room.took(1, 1024)
    assert room.further(0, 0) == 64, "a large message counts at once"
    assert room.further(32, 32 * KIB) == 32
    assert room.further(64, 64 * KIB) == 0


def test_a_sender_that_turns_to_large_messages_gets_less_credit() -> None:
    window = Limits(frame_size_max=1024, splice_bytes_max=8 * KIB, output_max=1)
    chain = Chain(served=Recorder(), limits=window)
    link, _ = chain.sender()
    chain.links[0].grant(1_000)
    chain.pump()
    for _ in range(100):
        while link.credit and link.writable:
            link.send(b"x", settled=True)
        chain.pump()
    sent = len(chain.served.deliveries)
    assert 8 * SURGE / 2 <= link.credit <= 8 * SURGE
    # The last connection carries nothing from here on, so that its node cannot send.
    for _ in range(200):
        while link.credit and link.writable:
            link.send(bytes(900), settled=True)
            sent += 1
        for at in range(3):
            chain.step(at)
        for splice in chain.splices:
            assert splice.held <= SURGE * window.splice_bytes_max
    assert not link.credit
    chain.pump()
    assert len(chain.served.deliveries) == sent
    assert 4 <= link.credit <= 8


def test_a_session_of_legs_has_most_of_the_window() -> None:
    """The first session of a connection, which carries records, would else have all of it."""
    neighbour = Neighbour("b", 1, Mock(), limits=DEFAULT_LIMITS)

    def attach(link: Any) -> None:
        if link.name == "records":
            neighbour.receive_from(link, Mock())
        else:
            neighbour.narrow(link, STREAMS if link.name == "stream" else LOW)
            link.accept(Recorder())

    joined = Joined(on_attach=attach)
    joined.pump()
    records = joined.client.begin(window=1)
    records.attach_sender("records", Recorder(), target=Target(address="$mesh"))
    joined.pump()
    assert records.remote_incoming_window == 64
    legs = joined.client.begin(window=1)
    legs.attach_sender("leg", Recorder(), target=Target(address="q"))
    joined.pump()
    assert legs.remote_incoming_window == 512
    # What is sent ahead of a stream is in front of all other messages on the connection.
    streams = joined.client.begin(window=1)
    streams.attach_sender("stream", Recorder(), target=Target(address="q"))
    joined.pump()
    assert streams.remote_incoming_window == 16
