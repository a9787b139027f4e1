"""Two engines that keep the rules under any use by their programs, checked against a small model.

Octets travel in pieces, so that all frames may cross each other. Nothing is lost, nothing is
invented, the order is kept, and neither engine ever reports an error of the other.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runs import machine_settings
from sanity import check

from amqp_rt.core.engine import Engine
from amqp_rt.core.lifecycle import Stage
from amqp_rt.events import AttachRequested, Closed, ConnectionFailed, Event
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, rejected
from amqp_rt.termini import Source, Target

OUTCOMES = [ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("amqp:not-found", "gone")]
REFUSAL = Error("amqp:not-found", "refused")
picks = st.integers(0, 10_000)


class Message:
    """State of one message in the model."""

    def __init__(self, sending: Any, body: bytes, *, whole: bool) -> None:
        self.sending = sending
        self.body = body
        self.whole = whole
        #: Whether it was given up, so that it must not arrive.
        self.aborted = False
        #: Latest state that the receiver has sent.
        self.outcome: Any = None


class Pipe:
    """Link with the messages of its sender, and the events at both ends."""

    def __init__(self, second: bool, streaming: bool) -> None:
        self.second = second
        self.streaming = streaming
        self.sender: Any = None
        self.receiver: Any = None
        self.sent: list[Message] = []
        self.arrived: list[Any] = []
        self.bodies: dict[Any, bytes] = {}
        self.detached = {"sender": 0, "receiver": 0}
        self.lost = False
        self.refused = False

    @property
    def attached(self) -> bool:
        return bool(
            self.sender is not None
            and self.receiver is not None
            and self.sender.attached
            and self.receiver.attached
        )

    @property
    def unfinished(self) -> Message | None:
        last = self.sent[-1] if self.sent else None
        return last if last is not None and not last.whole and not last.aborted else None


class Ear:
    """Endpoint of a pipe, for either end."""

    def __init__(self, pipe: Pipe, side: str) -> None:
        self.pipe = pipe
        self.side = side

    def on_attached(self, link: Any) -> None:
        assert self.pipe.detached[self.side] == 0

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        for delivery in deliveries:
            self.pipe.arrived.append(delivery)
            self.pipe.bodies[delivery] = delivery.payload
        if self.pipe.streaming:
            self.on_data(link, deliveries)

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        # Some messages are read at once, the others by a rule of the test.
        for delivery in deliveries:
            if len(self.pipe.arrived) % 2:
                self.pipe.bodies[delivery] += b"".join(delivery.read_chunks())

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        for delivery in deliveries:
            assert delivery.settled

    def on_flow(self, link: Any) -> None: ...

    def on_credit(self, link: Any) -> None: ...

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        assert len(set(map(id, deliveries))) == len(deliveries)

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        self.pipe.detached[self.side] += 1
        assert self.pipe.detached[self.side] == 1
        # Both keep the rules: a link ends only by a refusal, or with the network.
        assert error is None or error == REFUSAL or self.pipe.lost, error


class JoinedEngines(RuleBasedStateMachine):
    """Two engines, the octets under way between them, and the model of each link."""

    @initialize(
        window=st.sampled_from([1, 2, 5, 2_048]),
        output_max=st.sampled_from([1, 2_000, 1_000_000]),
        unsettled_max=st.sampled_from([3, 5_000]),
        window_bytes=st.sampled_from([2_048, 64 * 1_024 * 1_024]),
    )
    def join(self, window: int, output_max: int, unsettled_max: int, window_bytes: int) -> None:
        limits = Limits(
            frame_size_max=512,
            session_window=window,
            session_window_bytes=64 * 1_024 * 1_024,
            output_max=output_max,
            unsettled_max=unsettled_max,
            handle_max=7,
            idle_timeout_s=0,
        )
        self.limits = limits
        self.window_bytes = window_bytes
        self.engines: list[Engine] = [
            amqp10.client(amqp10.ClientOptions(container_id="c", limits=limits), 0.0),
            amqp10.Front().server(
                ServerOptions(container_id="s", limits=limits, sasl_required=False), 0.0
            ),
        ]
        self.under_way = [bytearray(), bytearray()]
        self.events: list[list[Event]] = [[], []]
        self.asked: list[tuple[int, Any]] = []
        self.pipes: dict[str, Pipe] = {}
        self.sessions: list[tuple[int, Any]] = []
        self.count = 0
        self.over = False
        self.settle_down()
        self.begin(0)
        # Begin with a link in each direction, with some credit.
        for number in range(2):
            self.attach(0, number == 0, second=number == 1, streaming=number == 0, settles=2)
        self.settle_down()
        self.answer(True)
        self.settle_down()
        for number in range(2):
            self.grant(number, 9)
        self.settle_down()

    # --- octets ------------------------------------------------------------------------------

    def carry(self, side: int, size: int) -> bool:
        """Carry some octets of *side* to the other; return whether there were any."""
        pipe = self.under_way[side]
        pipe += b"".join(self.engines[side].take())
        data = bytes(pipe[:size])
        del pipe[:size]
        if data:
            self.hear(1 - side, self.engines[1 - side].receive(data, 0.0))
        return bool(data)

    def hear(self, side: int, events: list[Event]) -> None:
        for event in events:
            self.events[side].append(event)
            assert not isinstance(event, ConnectionFailed), event
            if isinstance(event, AttachRequested):
                self.asked.append((side, event.link))

    def settle_down(self) -> None:
        """Carry octets until neither side has any."""
        for _ in range(100_000):
            if not (self.carry(0, 1 << 20) | self.carry(1, 1 << 20)):
                return
        raise AssertionError("the engines never stop talking")

    @rule(side=st.integers(0, 1), size=st.sampled_from([1, 7, 30, 100, 700, 100_000]))
    def travel(self, side: int, size: int) -> None:
        self.carry(side, size)

    # --- sessions and links --------------------------------------------------------------------

    def begin(self, side: int) -> None:
        session = self.engines[side].begin(window_bytes=self.window_bytes)
        self.sessions.append((side, session))

    @precondition(lambda self: not self.over and len(self.sessions) < 3)
    @rule(side=st.integers(0, 1))
    def begin_another(self, side: int) -> None:
        self.begin(side)

    @precondition(lambda self: not self.over and self.live_sessions() and len(self.pipes) < 12)
    @rule(
        pick=picks,
        sends=st.booleans(),
        second=st.booleans(),
        streaming=st.booleans(),
        settles=st.sampled_from([0, 1, 2, 2]),
    )
    def attach(
        self, pick: int, sends: bool, *, second: bool, streaming: bool, settles: int
    ) -> None:
        _, session = self.choose(self.live_sessions(), pick)
        if len(session.links) > 5:
            return
        name = f"link {len(self.pipes)}"
        pipe = self.pipes[name] = Pipe(second, streaming)
        modes = {"snd_settle_mode": settles, "rcv_settle_mode": int(second)}
        termini = {"source": Source(address="a"), "target": Target(address="b")}
        if sends:
            pipe.sender = session.attach_sender(name, Ear(pipe, "sender"), **termini, **modes)
        else:
            pipe.receiver = session.attach_receiver(
                name, Ear(pipe, "receiver"), streaming=streaming, **termini, **modes
            )

    @precondition(lambda self: self.asked)
    @rule(accepts=st.sampled_from([True, True, True, False]))
    def answer(self, accepts: bool) -> None:
        while self.asked:
            _, link = self.asked.pop(0)
            pipe = self.pipes[link.name]
            if not accepts:
                pipe.refused = True
                link.refuse(REFUSAL)
            elif pipe.sender is None:
                pipe.sender = link
                link.accept(Ear(pipe, "sender"))
            else:
                pipe.receiver = link
                link.accept(Ear(pipe, "receiver"), streaming=pipe.streaming)

    @precondition(lambda self: self.engines[0].open_received)
    @rule(what=st.integers(0, 24), pick=picks, closed=st.booleans())
    def disturb(self, what: int, pick: int, closed: bool) -> None:
        """End something now and then; otherwise carry all octets in flight."""
        ends = self.ends()
        if what < 4 and ends:
            self.choose(ends, pick).detach(closed=closed)
        elif what == 4 and self.live_sessions():
            self.choose(self.live_sessions(), pick)[1].end()
        elif what == 5 and not self.over:
            self.over = True
            self.engines[pick % 2].close()
        elif what == 6 and not self.over:
            self.cut()
        else:
            self.settle_down()

    def cut(self) -> None:
        """Cut the network, with all octets in flight."""
        self.over = True
        for pipe in self.pipes.values():
            pipe.lost = True
        for engine, octets in zip(self.engines, self.under_way, strict=True):
            octets.clear()
            (event,) = engine.receive_eof(0.0)
            assert isinstance(event, ConnectionFailed)

    # --- messages --------------------------------------------------------------------------------

    @precondition(lambda self: self.receivers())
    @rule(pick=picks, credit=st.sampled_from([0, 1, 2, 5, 9, 12, 30]))
    def grant(self, pick: int, credit: int) -> None:
        self.choose(self.receivers(), pick).receiver.grant(credit)

    @precondition(lambda self: self.receivers())
    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        self.choose(self.receivers(), pick).receiver.drain()

    @precondition(lambda self: self.senders())
    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        self.choose(self.senders(), pick).sender.drained()

    @precondition(lambda self: self.senders(credit=True))
    @rule(
        pick=picks,
        size=st.sampled_from([0, 1, 300, 384, 385, 1_500]),
        number=st.integers(1, 6),
        settled=st.booleans(),
        more=st.sampled_from([False, False, True]),
    )
    def send(self, pick: int, size: int, number: int, settled: bool, more: bool) -> None:
        pipe = self.choose(self.senders(credit=True), pick)
        link = pipe.sender
        for _ in range(number):
            if not link.credit or pipe.unfinished:
                return
            self.count += 1
            body = b"%d:" % self.count + bytes(size)
            wanted = {0: False, 1: True, 2: settled}[link.snd_settle_mode]
            sending = link.send(body, settled=wanted, more=more)
            pipe.sent.append(Message(sending, body, whole=not more))

    @precondition(lambda self: self.open_messages())
    @rule(pick=picks, size=st.sampled_from([0, 5, 900]), what=st.sampled_from("wweea"))
    def go_on(self, pick: int, size: int, what: str) -> None:
        message = self.choose(self.open_messages(), pick)
        if what == "a":
            message.aborted = True
            message.sending.abort()
            return
        message.body += bytes(size)
        message.whole = what == "e"
        message.sending.write(bytes(size), more=what == "w")

    @precondition(lambda self: self.deliveries())
    @rule(pick=picks, outcome=st.sampled_from(OUTCOMES), number=st.integers(1, 5))
    def settle(self, pick: int, outcome: Any, number: int) -> None:
        for _ in range(number):
            waiting = self.deliveries()
            if not waiting:
                return
            pipe, delivery = self.choose(waiting, pick)
            delivery.settle(outcome)
            message = self.message_of(pipe, delivery)
            if not delivery.settled and pipe.receiver.attached:
                message.outcome = outcome

    @precondition(lambda self: self.unsettled())
    @rule(pick=picks)
    def sender_settles(self, pick: int) -> None:
        self.choose(self.unsettled(), pick).sending.settle()

    @precondition(lambda self: any(pipe.streaming and pipe.arrived for pipe in self.pipes.values()))
    @rule(pick=picks)
    def read(self, pick: int) -> None:
        pipes = [pipe for pipe in self.pipes.values() if pipe.streaming and pipe.arrived]
        self.read_all(self.choose(pipes, pick))

    def read_all(self, pipe: Pipe) -> None:
        for delivery in pipe.arrived:
            pipe.bodies[delivery] += b"".join(delivery.read_chunks())

    # --- possible actions ------------------------------------------------------------------------

    @staticmethod
    def choose(items: list[Any], pick: int) -> Any:
        return items[pick % len(items)]

    def live_sessions(self) -> list[tuple[int, Any]]:
        if self.over:
            return []
        return [(side, session) for side, session in self.sessions if not session.ended]

    def ends(self) -> list[Any]:
        links = [end for pipe in self.pipes.values() for end in (pipe.sender, pipe.receiver)]
        return [link for link in links if link is not None and link.ours.stage is Stage.ATTACHED]

    def receivers(self) -> list[Pipe]:
        return [p for p in self.pipes.values() if p.receiver is not None and p.receiver.attached]

    def senders(self, *, credit: bool = False) -> list[Pipe]:
        return [
            pipe
            for pipe in self.pipes.values()
            if pipe.sender is not None
            and pipe.sender.attached
            and (not credit or (pipe.sender.credit and not pipe.unfinished))
        ]

    def open_messages(self) -> list[Message]:
        return [pipe.unfinished for pipe in self.senders() if pipe.unfinished is not None]

    def deliveries(self) -> list[tuple[Pipe, Any]]:
        return [
            (pipe, delivery)
            for pipe in self.pipes.values()
            for delivery in pipe.arrived
            if delivery.local_state is None and not delivery.aborted
        ]

    def unsettled(self) -> list[Message]:
        return [
            m for pipe in self.senders() for m in pipe.sent if not m.sending.settled and m.whole
        ]

    @staticmethod
    def message_of(pipe: Pipe, delivery: Any) -> Message:
        return next(
            m
            for m in pipe.sent
            if m.sending.tag == delivery.tag and m.sending.delivery_id == delivery.delivery_id
        )

    # --- invariants --------------------------------------------------------------------------------

    @invariant()
    def engines_are_sane(self) -> None:
        for engine in getattr(self, "engines", []):
            check(engine)

    @invariant()
    def check_order(self) -> None:
        for pipe in getattr(self, "pipes", {}).values():
            at = 0
            for delivery in pipe.arrived:
                while pipe.sent[at].sending.tag != delivery.tag:
                    # Only messages that were given up may be missing in between.
                    assert pipe.sent[at].aborted
                    at += 1
                message = pipe.sent[at]
                at += 1
                body = pipe.bodies[delivery]
                if pipe.streaming:
                    assert message.body.startswith(body)
                else:
                    assert delivery.complete
                    assert message.whole
                    assert body == message.body

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        # Both sides do all that is due, until nothing is left to do.
        self.settle_down()
        self.answer(True)
        for message in self.open_messages():
            message.whole = True
            message.sending.write(b"", more=False)
        before = -1
        while before != (read := sum(map(len, self.all_bodies()))):
            before = read
            self.settle_down()
            for pipe in self.pipes.values():
                if pipe.streaming:
                    self.read_all(pipe)
        for pipe in self.pipes.values():
            self.at_rest(pipe)
        for engine in self.engines:
            check(engine)
            if not self.over:
                assert engine.state == "OPENED"
        self.bye()

    def all_bodies(self) -> list[bytes]:
        return [body for pipe in self.pipes.values() for body in pipe.bodies.values()]

    def at_rest(self, pipe: Pipe) -> None:
        if not pipe.attached:
            return
        sender, receiver = pipe.sender, pipe.receiver
        held_back = sender._unsent
        if held_back or sender._queue:
            # Only the peer's window or its credit may hold frames back.
            assert sender._uncredited or sender.session.remote_incoming_window <= 0
        else:
            due = [message for message in pipe.sent if not message.aborted]
            arrived = [delivery for delivery in pipe.arrived if not delivery.aborted]
            assert len(arrived) == len(due)
            for delivery, message in zip(arrived, due, strict=True):
                assert delivery.complete
                assert pipe.bodies[delivery] == message.body
        assert sender.credit + held_back - sender._uncredited == receiver.credit
        assert (sender.delivery_count - held_back) & 0xFFFFFFFF == receiver.delivery_count
        for message in pipe.sent:
            if message.outcome is not None and not message.aborted:
                assert message.sending.state in (message.outcome, None)
                assert message.sending.settled or pipe.second
                if message.sending.state is None:
                    # The sender settled before it received the outcome.
                    assert message.sending.settled

    def bye(self) -> None:
        """Check after the end that every message is accounted for once."""
        if not self.over:
            self.engines[0].close()
            self.settle_down()
        for engine, events in zip(self.engines, self.events, strict=True):
            assert engine.finished
            assert sum(isinstance(event, Closed) for event in events) <= 1
        for pipe in self.pipes.values():
            for side, link in (("sender", pipe.sender), ("receiver", pipe.receiver)):
                if link is not None and not (pipe.refused and pipe.detached[side] == 0):
                    assert pipe.detached[side] == 1, side
            if pipe.sender is None:
                continue
            left = list(map(id, pipe.sender.unsettled))
            assert len(left) == len(set(left))
            for message in pipe.sent:
                settled = message.sending.settled or message.aborted
                assert (id(message.sending) in left) is not settled
                if message.sending.remote_settled:
                    assert settled


@pytest.mark.slow
@pytest.mark.req("X5", "X9", "X10", "X11", "X15", "X16", "X18", "X19", "X20", "X21", "X23", "X28")
class TestJoinedEngines(JoinedEngines.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        machine_settings(),
        stateful_step_count=60,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
