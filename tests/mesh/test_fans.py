"""Messages of several senders, distributed between links to several destinations."""

from __future__ import annotations

from typing import Any

import pytest
from call_counts import Calls, plain_only

from amqp_rt.fronts.base import RECEIVER
from amqp_rt.limits import DEFAULT_LIMITS, KIB, Limits
from amqp_rt.mesh.balance import FAILURES_MAX, Standing
from amqp_rt.mesh.fans import STREAM_ABOVE, Fan
from amqp_rt.mesh.legs import HIGH, LOW, STREAMS
from amqp_rt.mesh.records import Offer
from amqp_rt.mesh.routed import RoutedAddress
from amqp_rt.mesh.routing import MeshRoute
from amqp_rt.mesh.rules import MeshRule
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, rejected
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Joined, Recorder

pytestmark = pytest.mark.req("P2")
Q = Target(address="q")
#: Each message may take a frame and what is assembled.
SMALL = Limits(frame_size_max=KIB, splice_bytes_max=8 * (KIB + STREAM_ABOVE))


class World:
    """Senders and destinations, each with a connection of its own to the node of one fan."""

    def __init__(self, *, limits: Limits = DEFAULT_LIMITS, **options: Any) -> None:
        self.now = 100.0
        self.limits = limits
        self.draws = 0
        self.fan = Fan(now=lambda: self.now, limits=limits, random=self.draw, **options)
        self.joints: list[Joined] = []
        self.wait = False

    def draw(self) -> float:
        """Return numbers that go through all pairs of legs."""
        self.draws += 1
        return (self.draws * 0.381966) % 1

    def joined(self, on_attach: Any) -> Any:
        joint = Joined(limits=self.limits, on_attach=on_attach)
        joint.pump()
        self.joints.append(joint)
        return joint.client.begin()

    def pump(self) -> None:
        for _ in range(200):
            if not sum(self.carry(joint) for joint in list(self.joints)):
                break
        else:
            raise AssertionError("the engines never stop talking")
        receivers = list(self.fan.slots._granted)
        assert sum(each.credit for each in receivers) <= sum(
            each.link.credit for each in self.fan.legs if each.link.attached
        )
        assert self.fan.slots.held >= 0

    def carry(self, joint: Joined) -> bool:
        """Carry what a connection has in both directions; return whether there was anything."""
        moved = False
        for ours, other in ((joint.client, joint.server), (joint.server, joint.client)):
            data = b"".join(ours.take())
            if data:
                moved = True
                joint._handle(other.receive(data, 0.0), [])
        return moved

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.fan.tick(self.now)
        self.pump()

    def leg(self, *, credit: int = 10, kind: str = LOW, **standing: Any) -> Destination:
        served = Destination(self, credit)
        session = self.joined(served.serve)
        served.joint = self.joints[-1]
        served.leg = self.fan.add(
            session, "leg", Standing(**standing), kind=kind, target=Target(address="q")
        )
        self.pump()
        return served

    def sender(self, **options: Any) -> tuple[Any, Recorder]:
        session = self.joined(lambda link: self.fan.join(link, wait=self.wait))
        mine = Recorder()
        link = session.attach_sender("s", mine, target=Target(address="q"), **options)
        self.pump()
        return link, mine

    def cut(self, joint: Joined) -> None:
        joint.client.take()
        joint.server.take()
        joint.client.receive_eof(0.0)
        joint.server.receive_eof(0.0)
        self.joints.remove(joint)


class Destination(Recorder):
    """Server at the end of a leg; it grants credit once."""

    def __init__(self, world: World, credit: int) -> None:
        super().__init__()
        self.world = world
        self.grants = credit
        self.link: Any = None
        self.joint: Any = None
        self.leg: Any = None
        self.options: dict[str, Any] = {}

    def serve(self, link: Any) -> None:
        self.link = link
        link.accept(self, **self.options)

    def on_attached(self, link: Any) -> None:
        super().on_attached(link)
        if self.grants and link.role == RECEIVER:
            link.grant(self.grants)

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.deliveries]

    def decide(self, outcome: Any) -> None:
        for each in self.deliveries:
            if not each.settled and each.local_state is None:
                each.settle(outcome)
        self.world.pump()


def test_the_credit_of_the_legs_is_shared_by_the_senders() -> None:
    world = World()
    one, two = world.leg(credit=10), world.leg(credit=6)
    first, _ = world.sender()
    assert first.credit == 16
    second, _ = world.sender()
    assert first.credit + second.credit == 16
    # The first sender does not use its credit, and is asked to return it.
    world.fan.rotate()
    world.pump()
    first.drained()
    world.pump()
    assert second.credit > 0
    one.link.grant(0)
    world.pump()
    assert first.credit + second.credit == 6
    two.link.grant(0)
    world.pump()
    assert first.credit + second.credit == 0


def test_messages_go_to_all_legs_and_outcomes_come_back() -> None:
    world = World()
    one, two = world.leg(), world.leg()
    link, mine = world.sender()
    sendings = [link.send(b"%d" % at) for at in range(20)]
    world.pump()
    assert len(one.deliveries) == len(two.deliveries) == 10
    assert sorted(map(int, one.payloads + two.payloads)) == list(range(20))
    one.decide(ACCEPTED)
    two.decide(RELEASED)
    assert len(mine.outcomes) == 20
    assert {each.state for each in sendings} == {ACCEPTED, RELEASED}
    assert all(each.settled for each in sendings)
    assert one.leg.standing.outstanding == two.leg.standing.outstanding == 0


def test_settlement_in_two_steps() -> None:
    world = World()
    served = Destination(world, 5)
    session = world.joined(served.serve)
    world.fan.add(session, "leg", Standing(), target=Target(address="q"), rcv_settle_mode=1)
    world.pump()
    link, _ = world.sender(rcv_settle_mode=1)
    sending = link.send(b"x")
    world.pump()
    served.deliveries[0].settle(ACCEPTED)
    world.pump()
    assert sending.state == ACCEPTED
    assert not sending.settled
    assert not served.settled
    sending.settle()
    world.pump()
    assert served.settled == served.deliveries


def test_closest_uses_the_legs_of_least_cost() -> None:
    world = World(closest=True)
    near, far = world.leg(credit=4, cost=1), world.leg(credit=50, cost=2)
    link, _ = world.sender()
    assert link.credit == 4
    for _ in range(4):
        link.send(b"x")
    world.pump()
    assert len(near.deliveries) == 4
    assert not far.deliveries
    world.cut(near.joint)
    world.pump()
    assert link.credit == 50


def test_a_refused_or_absent_destination_refuses_the_sender_after_two_seconds() -> None:
    world = World()
    _, mine = world.sender()
    assert world.fan.deadline == world.now + 2
    world.later(1.9)
    assert not mine.detached
    world.later(0.1)
    ((error, closed),) = mine.detached
    assert error is not None
    assert (error.condition, closed) == ("amqp:not-found", True)


def test_a_destination_within_two_seconds_accepts_the_sender() -> None:
    world = World()
    link, mine = world.sender()
    world.later(1.0)
    world.leg(credit=3)
    assert mine.attached == [link]
    assert link.credit == 3
    world.later(10)
    assert not mine.detached


def test_a_sender_may_wait_without_credit() -> None:
    world = World()
    world.wait = True
    link, mine = world.sender()
    world.later(60)
    assert mine.attached == [link]
    assert link.credit == 0
    world.leg(credit=3)
    assert link.credit == 3


@pytest.mark.parametrize("settled", [False, True])
def test_a_message_of_which_nothing_has_left_takes_another_leg(settled: bool) -> None:
    world = World(limits=Limits(output_max=1))
    one = world.leg(credit=5)
    link, mine = world.sender()
    sendings = [link.send(b"%d" % at, settled=settled) for at in range(3)]
    # The connection of the leg takes nothing.
    stuck = one.joint
    world.joints.remove(stuck)
    world.pump()
    assert not one.deliveries
    two = world.leg(credit=5)
    world.joints.append(stuck)
    world.cut(stuck)
    world.pump()
    left = [each for each in sendings if each.state == MODIFIED_FAILED]
    # The first one may have left the link.
    assert len(left) == (0 if settled else 1)
    assert two.payloads == [b"1", b"2"]
    assert world.fan.dropped == 0
    assert not mine.detached
    assert world.fan.waiting == 0


def test_a_leg_that_dies_later_leaves_modified() -> None:
    world = World()
    one = world.leg()
    link, mine = world.sender()
    sending = link.send(b"x")
    world.pump()
    assert one.deliveries
    world.cut(one.joint)
    world.pump()
    assert sending.state == MODIFIED_FAILED
    assert link.credit == 0
    assert not mine.detached


@pytest.mark.parametrize("settled", [False, True])
def test_the_last_destination_leaves_a_second_for_another(settled: bool) -> None:
    world = World()
    one = world.leg(credit=2)
    link, _ = world.sender()
    # Credit is taken back while the messages are on their way.
    sendings = [link.send(b"%d" % at, settled=settled) for at in range(2)]
    world.cut(one.joint)
    world.pump()
    assert world.fan.waiting == 2
    assert world.fan.deadline == world.now + 1
    world.later(0.9)
    assert world.fan.waiting == 2
    world.later(0.1)
    assert world.fan.waiting == 0
    if settled:
        assert world.fan.dropped == 2
    else:
        assert [each.state for each in sendings] == [RELEASED] * 2


def test_another_destination_within_a_second_gets_what_waits() -> None:
    world = World()
    one = world.leg(credit=2)
    link, _ = world.sender()
    sendings = [link.send(b"%d" % at) for at in range(2)]
    world.cut(one.joint)
    world.pump()
    world.later(0.9)
    two = world.leg()
    assert two.payloads == [b"0", b"1"]
    two.decide(ACCEPTED)
    assert [each.state for each in sendings] == [ACCEPTED] * 2


@pytest.mark.parametrize("resend", [0, 1, 2])
def test_released_messages_go_to_other_destinations(resend: int) -> None:
    world = World(resend=resend)
    served = [world.leg() for _ in range(3)]
    link, mine = world.sender()
    sending = link.send(b"kept octets")
    world.pump()
    for attempt in range(resend + 1):
        holders = [each for each in served if each.deliveries]
        assert len(holders) == attempt + 1
        assert not mine.outcomes
        for each in holders:
            each.decide(RELEASED)
    assert [each.payload for at in served for each in at.deliveries] == [b"kept octets"] * (
        resend + 1
    )
    assert sending.state == RELEASED
    assert all(each.leg.standing.outstanding == 0 for each in served)


def test_a_released_message_without_another_destination_is_released() -> None:
    world = World(resend=3)
    one = world.leg()
    link, _ = world.sender()
    sending = link.send(b"x")
    world.pump()
    one.decide(RELEASED)
    assert sending.state == RELEASED
    assert len(one.deliveries) == 1


def pairs_of_legs(world: World, kind: str) -> tuple[Destination, Destination]:
    """Return legs of *kind* to two destinations, each of which has a ``LOW`` one as well."""
    found = world.leg(kind=kind), world.leg(kind=kind)
    for each in found:
        each.leg.answers = world.leg().leg.answers
    return found


def test_a_body_of_64_kib_takes_the_usual_leg() -> None:
    kinds: list[str] = []
    world = World(on_kind=kinds.append)
    low, streams = world.leg(), world.leg(kind=STREAMS)
    link, _ = world.sender(max_message_size=0)
    for number in range(3):
        link.send(Message(bytes(64 * KIB), message_id=number, subject="s").encode())
        world.pump()
    assert len(low.deliveries) == 3
    assert not streams.deliveries
    assert not kinds
    link.send(Message(bytes(69 * KIB)).encode())
    world.pump()
    assert len(streams.deliveries) == 1


def test_a_released_stream_waits_for_a_busy_destination() -> None:
    world = World(resend=1)
    legs = pairs_of_legs(world, STREAMS)
    link, _ = world.sender(max_message_size=0)
    for letter in (b"a", b"b"):
        link.send(Message(letter * (STREAM_ABOVE + 1)).encode())
        world.pump()
    one, two = legs
    assert (len(one.deliveries), len(two.deliveries)) == (1, 1)
    released = two.deliveries[0]
    released.settle(RELEASED)
    world.pump()
    assert world.fan.waiting == 1
    assert len(one.deliveries) == 1, "it is busy"
    one.decide(ACCEPTED)
    assert one.payloads[1] == released.payload
    one.decide(ACCEPTED)
    assert not world.fan.waiting


def test_a_released_message_that_waits_is_not_sent_twice_when_its_leg_ends() -> None:
    world = World(resend=1)
    one, two = world.leg(), world.leg(credit=0)
    link, _ = world.sender()
    sending = link.send(b"x")
    world.pump()
    one.decide(RELEASED)
    assert world.fan.waiting == 1
    world.cut(one.joint)
    world.pump()
    two.link.grant(5)
    world.pump()
    assert two.payloads == [b"x"]
    two.decide(ACCEPTED)
    assert sending.state == ACCEPTED


def test_a_released_message_takes_the_other_destinations_usual_leg() -> None:
    world = World(resend=1)
    low, other = world.leg(), world.leg()
    high = world.leg(kind=HIGH)
    high.leg.answers = low.leg.answers
    link, _ = world.sender()
    sending = link.send(Message(b"x", priority=9).encode())
    world.pump()
    high.decide(RELEASED)
    assert not low.deliveries, "its destination has released it"
    other.decide(ACCEPTED)
    assert sending.state == ACCEPTED


def test_several_legs_to_a_destination_are_one_try() -> None:
    world = World(resend=2)
    one, two = pairs_of_legs(world, STREAMS)
    again = world.leg(kind=STREAMS, credit=0)
    again.leg.answers = one.leg.answers
    link, _ = world.sender(max_message_size=0)
    sending = link.send(Message(bytes(STREAM_ABOVE + 1)).encode())
    world.pump()
    again.link.grant(5)
    world.pump()
    for _ in range(2):
        for each in (one, two):
            each.decide(RELEASED)
    assert sending.state == RELEASED
    assert (len(one.deliveries), len(two.deliveries), len(again.deliveries)) == (1, 1, 0)


@pytest.mark.parametrize("options", [{"closest": True}, {"ordered": True}])
def test_a_released_message_waits_for_no_leg_that_is_not_used(options: Any) -> None:
    world = World(resend=3, **options)
    near, far = world.leg(cost=1), world.leg(cost=2)
    link, _ = world.sender()
    sendings = [link.send(b"%d" % at) for at in range(3)]
    world.pump()
    near.decide(RELEASED)
    assert {each.state for each in sendings} == {RELEASED}
    assert not far.deliveries


def test_a_leg_that_fails_fast_is_ejected() -> None:
    world = World()
    bad, good = world.leg(credit=50), world.leg(credit=50)
    link, _ = world.sender()
    for _ in range(4 * FAILURES_MAX):
        link.send(b"x")
    world.pump()
    failed = len(bad.deliveries)
    assert failed >= FAILURES_MAX
    bad.decide(rejected("amqp:internal-error"))
    for _ in range(20):
        link.send(b"y")
    world.pump()
    assert len(bad.deliveries) == failed
    good.decide(ACCEPTED)
    # The credit of an ejected leg is no credit.
    assert link.credit <= good.link.credit
    world.later(5.0)
    assert link.credit > good.link.credit


def test_ordered_messages_take_one_leg_until_it_is_empty() -> None:
    world = World(ordered=True)
    one, two = world.leg(credit=3), world.leg(credit=100)
    link, _ = world.sender()
    assert link.credit == 3
    for at in range(3):
        link.send(b"%d" % at)
    world.pump()
    assert link.credit == 0
    assert one.payloads == [b"0", b"1", b"2"]
    assert not two.deliveries
    one.decide(ACCEPTED)
    assert link.credit > 0
    link.send(b"3")
    world.pump()
    assert two.payloads == [b"3"]


def one_that_waits(world: World, leg: Destination) -> None:
    """Let a message wait after *leg*, which had credit for two, has got one."""
    link, _ = world.sender()
    for at in range(2):
        link.send(b"%d" % at)
    leg.link.grant(1)
    world.pump()
    assert leg.payloads == [b"0"]
    assert world.fan.waiting == 1


def test_an_ordered_message_that_waits_takes_the_next_leg_after_the_last_outcome() -> None:
    world = World(ordered=True)
    one, two = world.leg(credit=2), world.leg(credit=100)
    one_that_waits(world, one)
    assert not two.deliveries
    one.decide(ACCEPTED)
    assert two.payloads == [b"1"]


def test_ordered_senders_get_the_credit_of_the_next_leg_when_the_last_message_has_left() -> None:
    """A settled message waits at its link for the window of the session, and no outcome follows."""
    world = World(
        ordered=True,
        limits=Limits(frame_size_max=512, session_window=1, session_window_bytes=4 * KIB),
    )
    one, two = world.leg(credit=2), world.leg(credit=7)
    link, _ = world.sender(snd_settle_mode=1)
    for _ in range(2):
        link.send(bytes(900))
    world.pump()
    assert [len(each) for each in one.payloads] == [900, 900]
    assert not two.deliveries
    assert link.credit == 7


def test_ordered_senders_get_the_credit_of_the_next_leg_when_they_settle() -> None:
    world = World(ordered=True)
    one, _ = world.leg(credit=1), world.leg(credit=7)
    link, _ = world.sender()
    sending = link.send(b"x")
    world.pump()
    assert one.payloads == [b"x"]
    assert link.credit == 0
    sending.settle()
    world.pump()
    assert link.credit == 7


def test_a_message_that_waits_for_the_nearest_goes_on_when_that_is_retired() -> None:
    world = World(closest=True)
    near, far = world.leg(credit=2, cost=1), world.leg(credit=100, cost=2)
    one_that_waits(world, near)
    assert not far.deliveries
    world.fan.retire(near.leg)
    world.pump()
    assert far.payloads == [b"1"]
    assert not near.detached, "its message has no outcome"


def test_a_stream_that_waits_takes_a_leg_that_is_free_again() -> None:
    world = World()
    world.leg()
    busy, starved = world.leg(kind=STREAMS), world.leg(kind=STREAMS, credit=0)
    link, _ = world.sender(max_message_size=0)
    for letter in (b"a", b"b"):
        link.send(Message(letter * (STREAM_ABOVE + 1)).encode())
        world.pump()
    assert (len(busy.deliveries), len(starved.deliveries)) == (1, 0)
    assert world.fan.waiting == 1
    busy.decide(ACCEPTED)
    assert len(busy.deliveries) == 2


def message(priority: int, body: str) -> bytes:
    return Message(body, priority=priority).encode()


def test_high_priorities_have_legs_of_their_own() -> None:
    world = World()
    low, high = world.leg(credit=5), world.leg(credit=3, kind=HIGH)
    link, _ = world.sender()
    # The sender may use all of its credit for either, and what exceeds that of the kind waits.
    assert link.credit == 5
    for priority in (4, 5, 9):
        link.send(message(priority, "x"))
    world.pump()
    assert (len(low.deliveries), len(high.deliveries)) == (1, 2)
    world.cut(high.joint)
    world.pump()
    link.send(message(9, "y"))
    world.pump()
    assert len(low.deliveries) == 2


def test_high_priority_passes_a_queue_of_low() -> None:
    world = World()
    low, high = world.leg(credit=2), world.leg(credit=8, kind=HIGH)
    link, _ = world.sender()
    other, _ = world.sender()
    for number in range(5):
        link.send(message(4, f"{number}"))
    world.pump()
    assert (len(low.deliveries), world.fan.waiting) == (2, 3)
    other.send(message(5, "urgent"))
    world.pump()
    assert (len(high.deliveries), world.fan.waiting) == (1, 3)
    low.link.grant(10)
    world.pump()
    assert low.payloads == [message(4, f"{number}") for number in range(5)]


def test_legs_of_a_kind_are_asked_for_when_a_message_needs_one() -> None:
    asked: list[str] = []
    world = World(on_kind=asked.append)
    low = world.leg()
    link, _ = world.sender()
    link.send(message(4, "low"))
    world.pump()
    assert not asked
    link.send(message(5, "high"))
    link.send(bytes(STREAM_ABOVE + 1))
    world.pump()
    assert asked == [HIGH, STREAMS]
    assert len(low.deliveries) == 3, "without any, the others are used"


def test_messages_wait_for_a_leg_of_their_kind_that_is_being_opened() -> None:
    world = World()
    low = world.leg()
    link, _ = world.sender()
    asked: list[Any] = []
    leg = world.fan.add(world.joined(asked.append), "leg", Standing(), kind=HIGH, target=Q)
    world.pump()
    assert leg is not None
    link.send(message(9, "first"))
    link.send(message(4, "low"))
    world.pump()
    assert low.payloads == [message(4, "low")]
    asked[0].refuse(Error("amqp:not-allowed"))
    world.pump()
    assert low.payloads == [message(4, "low"), message(9, "first")]
    assert world.fan.refusal is None, "senders are not refused with it"


def test_a_slow_stream_does_not_hold_up_others() -> None:
    world = World(limits=Limits(frame_size_max=4096))
    low, streams = world.leg(), world.leg(kind=STREAMS)
    streams.link.streaming = True
    slow, _ = world.sender()
    other, _ = world.sender()
    assert slow.credit + other.credit == 10
    world.fan.rotate()
    sending = slow.send(bytes(100_000), more=True)
    world.pump()
    (delivery,) = streams.deliveries
    slow.drained()
    world.pump()
    other.send(b"small")
    world.pump()
    assert low.payloads == [b"small"]
    got = b"".join(delivery.read_chunks())
    assert len(got) == 100_000
    sending.write(b"end", more=False)
    world.pump()
    assert b"".join(delivery.read_chunks()) == b"end"
    assert delivery.complete
    streams.decide(ACCEPTED)
    assert sending.state == ACCEPTED


def test_the_rest_of_a_stream_that_lost_its_leg_is_discarded() -> None:
    world = World(limits=Limits(frame_size_max=4096))
    streams = world.leg(kind=STREAMS)
    world.leg()
    streams.link.streaming = True
    link, _ = world.sender()
    sending = link.send(bytes(100_000), more=True)
    world.pump()
    assert streams.deliveries
    world.cut(streams.joint)
    sending.write(bytes(50_000), more=True)
    world.pump()
    assert sending.state == MODIFIED_FAILED
    assert all(joint.server.held == 0 for joint in world.joints)
    sending.write(bytes(50_000), more=False)
    link.send(b"next")
    world.pump()
    assert all(joint.server.held == 0 for joint in world.joints)


def test_a_lost_sender_aborts_its_stream_only() -> None:
    world = World(limits=Limits(frame_size_max=4096))
    streams = world.leg(kind=STREAMS)
    world.leg()
    streams.link.streaming = True
    link, _ = world.sender()
    joint = world.joints[-1]
    link.send(bytes(100_000), more=True)
    world.pump()
    world.cut(joint)
    world.pump()
    assert streams.deliveries[0].aborted
    assert not streams.detached
    assert streams.leg.open is None


def test_a_replaced_leg_ends_when_its_messages_are_settled() -> None:
    world = World()
    one = world.leg()
    link, _ = world.sender()
    sending = link.send(b"1")
    world.pump()
    two = world.leg()
    world.fan.retire(one.leg)
    world.pump()
    assert not one.detached
    link.send(b"2")
    world.pump()
    assert two.payloads == [b"2"]
    one.decide(ACCEPTED)
    assert sending.state == ACCEPTED
    assert one.detached == [(None, True)]
    assert world.fan.legs == [two.leg]


def test_a_drain_of_a_destination_is_answered() -> None:
    world = World()
    one = world.leg(credit=8)
    link, _ = world.sender()
    one.link.drain()
    world.pump()
    assert one.flows == 1
    assert one.link.credit == link.credit == 0


def test_a_relayed_message_waits_a_second_for_credit() -> None:
    world = World()
    one = world.leg(credit=1)
    endpoint = world.fan.relay()

    class Anonymous(Recorder):
        def deliver(self, link: Any, deliveries: list[Any]) -> None:
            endpoint.deliver(link, deliveries)

    anonymous = Anonymous(credit=10)
    session = world.joined(lambda link: link.accept(anonymous))
    link = session.attach_sender("s", Recorder(), target=Target())
    world.pump()
    sendings = [link.send(b"%d" % at) for at in range(3)]
    world.pump()
    assert one.payloads == [b"0"]
    assert world.fan.deadline == world.now + 1
    world.later(0.5)
    one.link.grant(1)
    world.pump()
    assert one.payloads == [b"0", b"1"]
    world.later(0.5)
    assert sendings[2].state == RELEASED
    assert world.fan.waiting == 0


def test_a_relayed_message_may_wait_for_another_destination_as_well() -> None:
    """The time at which the fan has to be called again is always to come, or the node would turn without end."""
    world = World()
    one = world.leg(credit=0)
    endpoint = world.fan.relay()

    class Anonymous(Recorder):
        def deliver(self, link: Any, deliveries: list[Any]) -> None:
            endpoint.deliver(link, deliveries)

    session = world.joined(lambda link: link.accept(Anonymous(credit=10)))
    link = session.attach_sender("s", Recorder(), target=Target())
    world.pump()
    sending = link.send(b"x")
    world.pump()
    world.later(0.5)
    world.cut(one.joint)
    world.later(0.5)
    assert world.fan.deadline == world.now + 0.5
    world.later(0.5)
    assert sending.state == RELEASED


def test_the_sender_may_settle_before_the_outcome() -> None:
    world = World()
    one = world.leg()
    link, mine = world.sender()
    sending = link.send(b"x")
    world.pump()
    sending.settle()
    world.pump()
    assert one.settled == one.deliveries
    assert one.leg.standing.outstanding == 0
    assert not mine.outcomes


def test_the_answer_has_the_least_size_of_the_destinations() -> None:
    world = World()
    for size in (5_000, 3_000):
        served = Destination(world, 1)
        served.options = {"max_message_size": size}
        world.fan.add(world.joined(served.serve), "leg", Standing(), target=Target(address="q"))
    world.pump()
    link, _ = world.sender()
    assert link.max_message_size == 3_000


def test_legs_for_streams_alone_are_no_destination() -> None:
    world = World()
    low = world.leg(credit=2)
    world.leg(kind=STREAMS)
    link, _ = world.sender()
    sendings = [link.send(b"x") for _ in range(2)]
    world.cut(low.joint)
    world.pump()
    assert not world.fan.reachable
    world.later(1)
    assert [each.state for each in sendings] == [RELEASED] * 2


def test_fan_legs_max() -> None:
    world = World(limits=Limits(fan_legs_max=2))
    one = world.leg()
    world.leg()
    assert world.leg().leg is None
    assert world.leg(kind=STREAMS).leg is not None
    world.fan.retire(one.leg)
    assert world.leg().leg is not None


def test_what_waits_is_bounded() -> None:
    world = World(limits=SMALL)
    world.leg(credit=1_000)
    link, _ = world.sender()
    assert link.credit == 8


def test_a_detach_of_the_destination_leaves_the_sender_attached() -> None:
    world = World()
    one = world.leg()
    link, mine = world.sender()
    one.link.detach(Error("amqp:resource-deleted", "gone"))
    world.pump()
    assert not mine.detached
    assert link.credit == 0
    assert not world.fan.legs


# --- one routed address --------------------------------------------------------------------------


class Place:
    """A destination, as the ways see its neighbour: each leg has the credit of its kind."""

    def __init__(self, world: World, credit: dict[str, int]) -> None:
        self.world = world
        self.credit = credit
        self.served: dict[str, list[Destination]] = {kind: [] for kind in (LOW, HIGH, STREAMS)}

    def opener(self, *, of: object = None, band: str = LOW) -> Any:
        served = Destination(self.world, self.credit[band])
        self.served[band].append(served)
        return self.world.joined(served.serve)

    def took(self, opener: object) -> None:
        """Do nothing: there is no count."""

    def released(self, opener: object) -> None:
        """Do nothing: there is no count."""

    @property
    def got(self) -> dict[str, int]:
        """Numbers of messages by the kinds of their legs."""
        return {
            kind: sum(len(each.deliveries) for each in served)
            for kind, served in self.served.items()
        }


class PlacesAsWays:
    """Ways to places that are neighbours."""

    node = "here"
    limits = DEFAULT_LIMITS

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.names = 0

    def destinations(self, address: str, *, gives: bool = False) -> list[MeshRoute]:
        return [MeshRoute(node, Offer(), 1, (node,), "") for node in self.places]

    def stands(self, path: tuple[str, ...], *, back: bool = False) -> bool:
        return True

    def next(self, route: list[str], *, back: bool = False) -> Place:
        return self.places[route[0]]

    def new_name(self) -> str:
        self.names += 1
        return f"leg-{self.names}"

    def properties(self, route: object, use: object) -> dict[object, Any]:
        return {}


class OneAddress(World):
    """Senders to one routed address, and places that serve it."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: Any = PlacesAsWays()
        self.routed = RoutedAddress(
            *("q", "", MeshRule("q")),
            closest=False,
            ways=self.ways,
            now=lambda: self.now,
            zone="",
            on_wait=lambda: None,
        )
        self.fan = self.routed.fan

    def place(self, name: str, **credit: int) -> Place:
        """Let a destination come."""
        made = self.ways.places[name] = Place(self, credit)
        self.routed.update()
        self.pump()
        return made

    def ticks(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.routed.tick(self.now)
            self.pump()


def test_messages_that_wait_take_a_destination_that_comes_later() -> None:
    world = OneAddress()
    first = world.place("first", low=5, high=0, streams=0)
    link, _ = world.sender()
    link.send(Message(bytes(70 * KIB)).encode())
    link.send(Message(b"high", priority=9).encode())
    world.pump()
    assert world.fan.waiting == 2
    world.ticks(3)
    assert [len(each) for each in first.served.values()] == [1, 1, 1], "legs without end"
    second = world.place("second", low=5, high=5, streams=5)
    world.ticks(2)
    assert not world.fan.waiting
    assert second.got == {LOW: 0, HIGH: 1, STREAMS: 1}


def test_a_stream_has_another_leg_while_none_takes_it() -> None:
    """The leg of one destination is idle, but without credit: the other one gets a leg beside its busy one."""
    world = OneAddress()
    full = world.place("full", low=5, high=0, streams=0)
    free = world.place("free", low=5, high=5, streams=5)
    link, _ = world.sender()
    for count in (1, 2):
        link.send(Message(bytes(70 * KIB)).encode())
        world.pump()
        world.ticks(2)
        assert free.got[STREAMS] == len(free.served[STREAMS]) == count
    assert len(full.served[STREAMS]) == 1


@plain_only
@pytest.mark.parametrize("size", [100, 64 * KIB])
def test_a_message_takes_few_calls_of_the_mesh(size: int) -> None:
    """Messages come and are accepted one by one, so that nothing is done for several of them at once."""
    world = World()
    destination = world.leg(credit=1_000)
    link, _ = world.sender(max_message_size=0)
    payload = Message(bytes(size)).encode()
    calls = Calls("amqp_rt.mesh")
    for counted in (8, 64):
        calls.counts.clear()
        with calls:
            for _ in range(counted):
                link.send(payload)
                world.pump()
                destination.decide(ACCEPTED)
    assert len(destination.deliveries) == 72
    calls.check(64, 33)


def test_messages_that_are_sent_one_by_one_keep_their_place_in_a_run() -> None:
    world = World()
    destination = world.leg(credit=40)
    link, mine = world.sender()
    bodies = [b"%d" % at for at in range(12)]
    bodies[4] *= 20_000
    unsettled = []
    for at, body in enumerate(bodies):
        sending = link.send(body, settled=at in {7, 8}, message_format=at == 2)
        if not sending.settled:
            unsettled.append(sending)
    world.pump()
    assert destination.payloads == bodies
    assert [each.message_format for each in destination.deliveries] == [at == 2 for at in range(12)]
    assert [each.settled for each in destination.deliveries] == [at in {7, 8} for at in range(12)]
    assert destination.leg.standing.outstanding == len(unsettled) == 10
    destination.decide(ACCEPTED)
    assert len(mine.outcomes) == 10
    assert all(each.settled and each.state == ACCEPTED for each in unsettled)
    assert destination.leg.standing.outstanding == len(destination.leg.pending) == 0


def test_a_run_ends_with_the_credit_of_the_leg() -> None:
    world = World()
    other, destination = world.leg(credit=7), world.leg(credit=5)
    link, _ = world.sender()
    for at in range(12):
        link.send(b"%d" % at)
    world.cut(other.joint)
    world.pump()
    assert destination.payloads == [b"%d" % at for at in range(5)]
    assert world.fan.waiting == 7
    destination.link.grant(4)
    world.pump()
    assert len(destination.deliveries) == 9
    destination.link.grant(40)
    world.pump()
    assert destination.payloads == [b"%d" % at for at in range(12)]
    assert world.fan.waiting == world.fan._held == 0


def test_a_run_of_messages_of_several_senders_is_accepted_for_each_of_them() -> None:
    world = World()
    world.wait = True
    senders = [world.sender() for _ in range(3)]
    destination = world.leg(credit=20)
    sendings = [link.send(b"x") for _ in range(3) for link, _ in senders]
    world.pump()
    destination.decide(ACCEPTED)
    assert all(each.settled and each.state == ACCEPTED for each in sendings)
    assert [len(mine.outcomes) for _, mine in senders] == [3, 3, 3]
    assert destination.leg.answers.outcomes == {"accepted": 9}


def test_failures_in_a_row_are_counted_within_a_run_of_outcomes() -> None:
    """One message that was accepted between them is none of the row, wherever it stands."""
    world = World()
    destination = world.leg(credit=20)
    link, _ = world.sender()
    for accepted_at, ejected in ((FAILURES_MAX - 1, False), (0, True)):
        for _ in range(FAILURES_MAX + 1):
            link.send(b"x")
        world.pump()
        for at, each in enumerate(destination.deliveries[-FAILURES_MAX - 1 :]):
            each.settle(ACCEPTED if at == accepted_at else MODIFIED_FAILED)
        world.pump()
        assert (destination.leg.standing.ejected_until > world.now) is ejected


def test_a_leg_that_takes_settled_messages_only_accepts_a_run_at_once() -> None:
    world = World()
    served = Destination(world, 9)
    session = world.joined(served.serve)
    world.fan.add(session, "leg", Standing(), target=Target(address="q"), snd_settle_mode=1)
    world.pump()
    link, _ = world.sender()
    sendings = [link.send(b"%d" % at) for at in range(9)]
    world.pump()
    assert [each.settled for each in served.deliveries] == [True] * 9
    assert all(each.settled and each.state == ACCEPTED for each in sendings)
    assert not world.fan.legs[0].busy


@plain_only
def test_a_message_of_a_run_takes_one_call_of_the_mesh() -> None:
    world = World()
    destination = world.leg(credit=1_000)
    link, _ = world.sender()
    payload = Message(bytes(100)).encode()
    calls = Calls("amqp_rt.mesh")
    # A sender gets credit for more messages once these are known to be small.
    for count in [16] * 32 + [64]:
        calls.counts.clear()
        with calls:
            for _ in range(count):
                link.send(payload)
            world.pump()
            destination.decide(ACCEPTED)
    assert len(destination.deliveries) == 576
    calls.check(64, 1)


def test_messages_of_links_of_one_session_are_accepted_in_one_disposition() -> None:
    world = World()
    world.wait = True
    session = world.joined(lambda link: world.fan.join(link, wait=True))
    links = [session.attach_sender(f"s{at}", Recorder(), target=Q) for at in range(4)]
    world.pump()
    destination = world.leg(credit=40)
    for _ in range(5):
        for link in links:
            link.send(b"x")
            world.pump()
    joint = world.joints[0]
    for each in destination.deliveries:
        each.settle(ACCEPTED)
    world.carry(world.joints[1])
    assert len(b"".join(joint.server.take())) < 100


def test_a_message_that_becomes_too_large_for_a_later_destination_is_rejected_alone() -> None:
    world = World()
    first = world.leg(credit=5)
    link, _ = world.sender()
    later = Destination(world, 5)
    later.options = {"max_message_size": 80_000}
    world.fan.add(world.joined(later.serve), "leg", Standing(), target=Q)
    world.pump()
    world.fan.retire(first.leg)
    world.pump()
    sending = link.send(bytes(70_000), more=True)
    world.pump()
    sending.write(bytes(20_000), more=False)
    world.pump()
    assert sending.state.error.condition == "amqp:link:message-size-exceeded"
    assert world.fan.legs[0].standing.outstanding == len(world.fan.legs[0].pending) == 0
    following = link.send(b"x")
    world.pump()
    assert [each.payload for each in later.deliveries if not each.aborted] == [b"x"]
    later.decide(ACCEPTED)
    assert following.state == ACCEPTED


def test_a_message_whose_sender_knows_of_its_release_goes_nowhere_else() -> None:
    world = World(resend=2)
    first = Destination(world, 5)
    session = world.joined(first.serve)
    world.fan.add(session, "leg", Standing(), target=Q, rcv_settle_mode=1)
    world.pump()
    link, _ = world.sender(rcv_settle_mode=1)
    sending = link.send(b"x")
    world.pump()
    first.deliveries[0].settle(RELEASED)
    world.pump()
    assert (sending.state, sending.settled) == (RELEASED, False)
    other = world.leg()
    # A receiver may settle before the sender does.
    number = first.deliveries[0].delivery_id
    first.link.session.queue_disposition(RECEIVER, number, True, RELEASED)
    world.pump()
    assert not other.deliveries
    assert world.fan.waiting == 0
