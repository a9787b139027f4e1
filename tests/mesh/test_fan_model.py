"""A fan under any use: senders and destinations come, go, and give and take credit.

An unsettled message has a true outcome: *accepted* if a destination handled it, *released* if none did. A settled one is
handled at most once. Senders have no more credit than the legs, and nothing stays behind.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sanity import check, check_quiet

from amqp_rt.limits import KIB, MIB, Limits
from amqp_rt.mesh.balance import Standing
from amqp_rt.mesh.fans import Fan
from amqp_rt.mesh.legs import LOW, STREAMS, Leg
from amqp_rt.mesh.passing import SURGE
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, rejected
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Joined, Recorder

picks = st.integers(0, 10_000)
TARGET = Target(address="q")
OUTCOMES = [ACCEPTED, ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("amqp:not-allowed")]


class End(Recorder):
    """Destination; it puts the bodies of its messages together."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[Any, bytes] = {}
        self.link: Any = None
        self.leg: Leg | None = None
        self.joint: Any = None
        self.reads = True

    def serve(self, link: Any) -> None:
        self.link = link
        link.accept(self, streaming=True)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        super().deliver(link, deliveries)
        self.on_data(link, deliveries)

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        for each in deliveries if self.reads else ():
            self.bodies[each] = self.bodies.get(each, b"") + b"".join(each.read_chunks())

    def read(self, *, on: bool) -> None:
        """Read what has arrived, and what will; or stop reading."""
        self.reads = on
        self.on_data(None, self.deliveries)


class Sender:
    """Link of a sender, with its messages: delivery, body (None if aborted), and whether it was sent settled."""

    def __init__(self, joint: Any, link: Any) -> None:
        self.joint = joint
        self.link = link
        self.sent: list[list[Any]] = []


class Conversation(RuleBasedStateMachine):
    resend = 0
    ordered = False

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[End] = []

    @initialize(
        window=st.sampled_from([1, 2, 7, 2_048]), window_bytes=st.sampled_from([4 * KIB, 64 * MIB])
    )
    def build(self, window: int, window_bytes: int) -> None:
        self.now = 100.0
        self.draws = 0
        self.limits = Limits(
            frame_size_max=512,
            splice_bytes_max=400 * KIB,
            output_max=1,
            session_window=window,
            session_window_bytes=window_bytes,
        )
        self.fan = Fan(
            now=lambda: self.now,
            limits=self.limits,
            resend=self.resend,
            ordered=self.ordered,
            random=self.draw,
        )
        self.joints: list[Joined] = []
        self.under_way: dict[Joined, tuple[bytearray, bytearray]] = {}
        self.senders: list[Sender] = []
        self.count = 0
        self.cut_once = False
        self.add_leg(kind=LOW)
        self.add_leg(kind=LOW)
        self.add_sender()
        self.pump()
        for end in self.ends:
            end.link.grant(4)
        self.pump()

    def draw(self) -> float:
        self.draws += 1
        return (self.draws * 0.381966) % 1

    def joined(self, on_attach: Any) -> Joined:
        joint = Joined(limits=self.limits, on_attach=on_attach)
        joint.pump()
        self.joints.append(joint)
        self.under_way[joint] = bytearray(), bytearray()
        return joint

    def step(self, joint: Joined, size: int = 1 << 30) -> bool:
        moved = False
        to_server, to_client = self.under_way[joint]
        for octets, ours, other in (
            (to_server, joint.client, joint.server),
            (to_client, joint.server, joint.client),
        ):
            octets += b"".join(ours.take())
            data = bytes(octets[:size])
            del octets[:size]
            if data:
                moved = True
                joint._handle(other.receive(data, 0.0), [])
        return moved

    def pump(self) -> None:
        for _ in range(5_000):
            if not sum(self.step(each) for each in self.joints):
                break
        else:
            raise AssertionError("the engines never stop talking")
        for joint in self.joints:
            check(joint.client)
            check(joint.server)
        granted = sum(each.credit for each in self.fan.slots._granted)
        assert granted <= sum(each.link.credit for each in self.fan.legs)
        assert self.fan.slots.held >= 0
        assert self.fan._held <= SURGE * self.limits.splice_bytes_max
        for leg in self.fan.legs:
            assert leg.standing.outstanding >= 0
        # The fan has done what it can: another look finds nothing to do.
        for joint in self.joints:
            check_quiet(joint.client, joint.server)
        self.fan.pump()
        assert not any(each.client.take() or each.server.take() for each in self.joints)

    @precondition(lambda self: len(self.ends) < 6)
    @rule(kind=st.sampled_from([LOW, LOW, STREAMS]))
    def add_leg(self, kind: str) -> None:
        end = End()
        end.joint = self.joined(end.serve)
        end.leg = self.fan.add(
            end.joint.client.begin(), "leg", Standing(), kind=kind, target=TARGET
        )
        self.ends.append(end)

    @precondition(lambda self: len(self.senders) < 4)
    @rule()
    def add_sender(self) -> None:
        joint = self.joined(lambda link: self.fan.join(link, wait=True))
        link = joint.client.begin().attach_sender("s", Recorder(), target=TARGET)
        self.senders.append(Sender(joint, link))

    @precondition(lambda self: self.joints)
    @rule(pick=picks, size=st.sampled_from([1, 40, 300, 5_000]))
    def travel(self, pick: int, size: int) -> None:
        self.step(self.joints[pick % len(self.joints)], size)

    @rule()
    def settle_down(self) -> None:
        self.pump()

    def sender(self, pick: int) -> Sender | None:
        fitting = [each for each in self.senders if each.link.attached]
        return fitting[pick % len(fitting)] if fitting else None

    def end(self, pick: int) -> End | None:
        fitting = [each for each in self.ends if each.link is not None and each.link.attached]
        return fitting[pick % len(fitting)] if fitting else None

    @rule(pick=picks, credit=st.sampled_from([0, 1, 3, 10]), drain=st.booleans())
    def grant(self, pick: int, credit: int, *, drain: bool) -> None:
        end = self.end(pick)
        if end is not None:
            end.link.grant(credit)
            if drain:
                end.link.drain()

    @rule(
        pick=picks,
        number=st.integers(1, 6),
        size=st.sampled_from([0, 10, 300, 900]),
        settled=st.booleans(),
        more=st.sampled_from([False, False, True]),
    )
    def send(self, pick: int, number: int, size: int, *, settled: bool, more: bool) -> None:
        sender = self.sender(pick)
        if sender is None:
            return
        for _ in range(number):
            if not sender.link.credit or sender.link._current is not None:
                return
            body = b"%d/" % self.count + bytes(size)
            self.count += 1
            sender.sent.append([sender.link.send(body, settled=settled, more=more), body, settled])

    @rule(pick=picks, how=st.sampled_from(["more", "large", "end", "abort"]))
    def go_on(self, pick: int, how: str) -> None:
        sender = self.sender(pick)
        if sender is None or sender.link._current is None:
            return
        entry = sender.sent[-1]
        if how == "abort":
            entry[0].abort()
            entry[1] = None
        else:
            piece = bytes(30_000 if how == "large" else 200)
            entry[0].write(piece, more=how != "end")
            entry[1] += piece

    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        sender = self.sender(pick)
        if sender is not None and sender.link._current is None:
            sender.link.drained()

    @rule(pick=picks, on=st.booleans())
    def read(self, pick: int, *, on: bool) -> None:
        end = self.end(pick)
        if end is not None:
            end.read(on=on)

    @rule()
    def rotate(self) -> None:
        self.fan.rotate()

    @rule(pick=picks, outcome=st.sampled_from(OUTCOMES), every=st.booleans())
    def decide(self, pick: int, outcome: Any, *, every: bool) -> None:
        end = self.end(pick)
        for delivery in end.deliveries if end is not None else ():
            if delivery.complete and not delivery.settled and delivery.local_state is None:
                delivery.settle(outcome)
                if not every:
                    return

    @rule(pick=picks)
    def settle_at_sender(self, pick: int) -> None:
        sender = self.sender(pick)
        for entry in sender.sent if sender is not None else ():
            if not entry[0].settled and entry[0].complete:
                entry[0].settle()
                return

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fan.tick(self.now)

    @rule(pick=picks)
    def retire(self, pick: int) -> None:
        if len(self.fan.legs) > 1:
            self.fan.retire(self.fan.legs[pick % len(self.fan.legs)])

    @precondition(lambda self: len(self.ends) + len(self.senders) > 3)
    @rule(pick=picks, detach=st.booleans())
    def lose(self, pick: int, *, detach: bool) -> None:
        each: Any = [*self.ends, *self.senders][pick % (len(self.ends) + len(self.senders))]
        self.cut_once = True
        if detach:
            if each.link is not None:
                each.link.detach()
        elif each.joint in self.joints:
            self.joints.remove(each.joint)
            each.joint.client.take()
            each.joint.server.take()
            each.joint.client.receive_eof(0.0)
            each.joint.server.receive_eof(0.0)

    def teardown(self) -> None:
        if not self.ends:
            # The example had no data, not even for its limits.
            return
        for end in self.ends:
            end.read(on=True)
        self.pump()
        for sender in self.senders:
            if sender.link.attached and sender.link._current is not None:
                sender.sent[-1][0].write(b"", more=False)
        for _ in range(3):
            for end in self.ends:
                if end.link is not None and end.link.attached:
                    end.link.grant(500)
            self.pump()
        self.now += 100
        self.fan.tick(self.now)
        self.pump()
        # An ordered fan takes the next leg when one is empty.
        for _ in range(6 + self.resend):
            for end in self.ends:
                for delivery in end.deliveries:
                    if delivery.link.attached and delivery.complete and not delivery.local_state:
                        delivery.settle(ACCEPTED)
            self.pump()
        for sender in self.senders:
            for sending, body, settled in sender.sent:
                if sender.link.attached and body is not None and not settled:
                    assert sending.settled or sending.delivery_id < 0, "a message has no outcome"
        self.check_messages()
        for each in [*self.ends, *self.senders]:
            if each.link is not None:
                each.link.detach()
        self.pump()
        self.now += 100
        self.fan.tick(self.now)
        self.pump()
        assert not self.fan.legs
        assert self.fan.waiting == 0
        assert self.fan._held == 0
        assert self.fan.slots.held == 0
        assert self.fan.deadline == float("inf")
        for joint in self.joints:
            for engine in (joint.client, joint.server):
                assert engine.held == 0
                for session in engine.sessions.values():
                    assert not session.links
                    assert not session._outgoing
                    assert not session.incoming

    def check_messages(self) -> None:
        handled: dict[int, list[Any]] = {}
        for end in self.ends:
            for delivery in end.deliveries:
                if delivery.complete and not delivery.aborted:
                    body = end.bodies[delivery]
                    handled.setdefault(int(body.split(b"/")[0]), []).append((delivery, body))
        for sender in self.senders:
            for sending, body, settled in sender.sent:
                number = None if body is None else int(body.split(b"/")[0])
                found = handled.get(number, []) if number is not None else []
                assert all(each == body for _, each in found)
                states = [each.local_state for each, _ in found]
                # Only what a destination released goes to another one.
                assert len([each for each in states if each != RELEASED]) <= 1
                assert len(states) <= 1 + self.resend
                if settled:
                    assert len(states) <= 1
                elif sending.state in (ACCEPTED, OUTCOMES[-1]):
                    assert states[-1:] == [sending.state] or sending.state in states
                elif sending.state == RELEASED:
                    assert all(each == RELEASED for each in states)
                elif sending.state == MODIFIED_FAILED:
                    assert MODIFIED_FAILED in states or self.cut_once


class Resending(Conversation):
    resend = 2


class Ordered(Conversation):
    ordered = True


SETTINGS = settings(
    max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
for machine in (Conversation, Resending, Ordered):
    machine.TestCase.settings = SETTINGS


@pytest.mark.req("P2", "P3")
class TestConversation(Conversation.TestCase):  # type: ignore[misc]
    """The machine, as a test."""


class TestResending(Resending.TestCase):  # type: ignore[misc]
    """The same with released messages that go to others."""


class TestOrdered(Ordered.TestCase):  # type: ignore[misc]
    """The same with one leg at a time."""
