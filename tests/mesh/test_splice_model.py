"""A client and a server over three nodes, under any use: octets travel in pieces on each connection, and any of them may end.

A settled message is handled at most once. An unsettled one has a true outcome: *accepted* if the server handled it,
*released* if it did not. Nodes keep no more than their bounds, and nothing of links that have ended.
"""

from __future__ import annotations

from typing import Any

import pytest
from chains import SOURCE, TARGET, Chain
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from amqp_rt.limits import KIB, MIB, Limits
from amqp_rt.mesh.passing import SURGE
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, rejected
from amqp_rt.testing.pairs import Recorder

OUTCOMES = [ACCEPTED, ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("amqp:not-allowed", "no")]
picks = st.integers(0, 10_000)


class End(Recorder):
    """Endpoint that puts the bodies of streamed messages together, while it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[Any, bytes] = {}
        self.reads = True

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


class Pipe:
    """Link over the chain, with its messages."""

    def __init__(self, name: str, *, sends: bool, second: bool) -> None:
        self.name = name
        #: Whether the client sends.
        self.sends = sends
        self.second = second
        self.ends = {"client": End(), "server": End()}
        self.links: dict[str, Any] = {}
        #: Delivery, body in full (None if aborted), and whether it was sent settled.
        self.sent: list[list[Any]] = []
        self.disturbed = False

    @property
    def source(self) -> Any:
        return self.links.get("client" if self.sends else "server")

    @property
    def sink(self) -> Any:
        return self.links.get("server" if self.sends else "client")

    @property
    def arrived(self) -> End:
        return self.ends["server" if self.sends else "client"]


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pipes: dict[str, Pipe] = {}

    @initialize(
        window=st.sampled_from([1, 2, 7, 2_048]), window_bytes=st.sampled_from([2 * KIB, 64 * MIB])
    )
    def build(self, window: int, window_bytes: int) -> None:
        limits = Limits(
            frame_size_max=512,
            splice_bytes_max=2 * KIB,
            output_max=2 * KIB,
            session_window=window,
            session_window_bytes=window_bytes,
        )
        self.chain = Chain(limits=limits)
        self.chain.joints[-1].on_attach = self.serve
        self.lost: set[int] = set()
        self.attach(sends=True, second=False, settled=2)
        self.attach(sends=False, second=True, settled=2)
        self.chain.pump()

    def serve(self, link: Any) -> None:
        pipe = self.pipes[link.name]
        pipe.links["server"] = link
        options: dict[str, Any] = {"streaming": True} if pipe.sends else {}
        link.accept(pipe.ends["server"], **options)

    @precondition(lambda self: len(self.pipes) < 5 and not self.lost)
    @rule(sends=st.booleans(), second=st.booleans(), settled=st.sampled_from([0, 1, 2]))
    def attach(self, *, sends: bool, second: bool, settled: int) -> None:
        pipe = Pipe(f"l{len(self.pipes)}", sends=sends, second=second)
        self.pipes[pipe.name] = pipe
        modes = {"snd_settle_mode": settled, "rcv_settle_mode": int(second)}
        session = self.chain.sessions[0]
        if sends:
            link = session.attach_sender(pipe.name, pipe.ends["client"], target=TARGET, **modes)
        else:
            link = session.attach_receiver(
                pipe.name, pipe.ends["client"], source=SOURCE, streaming=True, **modes
            )
        pipe.links["client"] = link

    def pick(self, pick: int, side: str) -> Pipe | None:
        fitting = [
            each
            for each in self.pipes.values()
            if (link := getattr(each, side)) is not None and link.attached
        ]
        return fitting[pick % len(fitting)] if fitting else None

    @rule(at=st.integers(0, 3), size=st.sampled_from([1, 13, 60, 300, 5_000]))
    def travel(self, at: int, size: int) -> None:
        self.chain.step(at, size)

    @rule()
    def settle_down(self) -> None:
        self.chain.pump()

    @rule(pick=picks, credit=st.sampled_from([0, 1, 2, 5, 30]), drain=st.booleans())
    def grant(self, pick: int, credit: int, *, drain: bool) -> None:
        pipe = self.pick(pick, "sink")
        if pipe is not None:
            pipe.sink.grant(credit)
            if drain:
                pipe.sink.drain()

    @rule(
        pick=picks,
        number=st.integers(1, 8),
        size=st.sampled_from([0, 10, 400, 600, 3_000]),
        settled=st.booleans(),
        more=st.sampled_from([False, False, True]),
    )
    def send(self, pick: int, number: int, size: int, *, settled: bool, more: bool) -> None:
        pipe = self.pick(pick, "source")
        if pipe is None:
            return
        link = pipe.source
        if link.snd_settle_mode != 2:
            settled = link.snd_settle_mode == 1
        for _ in range(number):
            if not link.credit or link._current is not None:
                return
            body = b"%s/%d/" % (pipe.name.encode(), len(pipe.sent)) + bytes(size)
            sending = link.send(body, settled=settled, more=more)
            pipe.sent.append([sending, body, settled])

    @rule(pick=picks, size=st.sampled_from([0, 700]), how=st.sampled_from(["more", "end", "abort"]))
    def go_on(self, pick: int, size: int, how: str) -> None:
        pipe = self.pick(pick, "source")
        if pipe is None or pipe.source._current is None:
            return
        entry = pipe.sent[-1]
        if how == "abort":
            entry[0].abort()
            entry[1] = None
        else:
            entry[0].write(bytes(size), more=how == "more")
            entry[1] += bytes(size)

    @rule(pick=picks, on=st.booleans())
    def read(self, pick: int, *, on: bool) -> None:
        pipe = self.pick(pick, "sink")
        if pipe is not None:
            pipe.arrived.read(on=on)

    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        pipe = self.pick(pick, "source")
        if pipe is not None and pipe.source._current is None:
            pipe.source.drained()

    @rule(pick=picks, outcome=st.sampled_from(OUTCOMES))
    def decide(self, pick: int, outcome: Any) -> None:
        pipe = self.pick(pick, "sink")
        if pipe is None:
            return
        for delivery in pipe.arrived.deliveries:
            if delivery.complete and not delivery.settled and delivery.local_state is None:
                delivery.settle(outcome)
                return

    @rule(pick=picks, every=st.booleans())
    def settle_at_source(self, pick: int, *, every: bool) -> None:
        pipe = self.pick(pick, "source")
        if pipe is None:
            return
        for sending, _, _ in pipe.sent:
            if not sending.settled and sending.complete and (every or sending.state is not None):
                sending.settle()

    @precondition(lambda self: len(self.pipes) > 2)
    @rule(pick=picks, side=st.sampled_from(["source", "sink"]), closed=st.booleans())
    def detach(self, pick: int, side: str, *, closed: bool) -> None:
        pipe = self.pick(pick, side)
        if pipe is not None:
            pipe.disturbed = True
            getattr(pipe, side).detach(Error("amqp:resource-deleted", "gone"), closed=closed)

    @precondition(lambda self: len(self.pipes) > 3)
    @rule(at=st.integers(0, 3))
    def cut(self, at: int) -> None:
        if at not in self.lost:
            self.lost.add(at)
            for pipe in self.pipes.values():
                pipe.disturbed = True
            self.chain.cut(at)

    @invariant()
    def bounded(self) -> None:
        for splice in self.chain.splices:
            assert splice.held <= SURGE * self.chain.limits.splice_bytes_max

    def teardown(self) -> None:
        if not self.pipes:
            # The example had no data, not even for its limits.
            return
        for pipe in self.pipes.values():
            pipe.arrived.read(on=True)
        self.chain.pump()
        for pipe in self.pipes.values():
            if (
                pipe.source is not None
                and pipe.source.attached
                and pipe.source._current is not None
            ):
                pipe.sent[-1][0].write(b"", more=False)
            if pipe.sink is not None and pipe.sink.attached:
                pipe.sink.grant(500)
        self.chain.pump()
        for pipe in self.pipes.values():
            self.check_messages(pipe)
        for pipe in self.pipes.values():
            for link in pipe.links.values():
                link.detach()
        self.chain.pump()
        self.chain.check_empty()
        for pipe in self.pipes.values():
            for end in pipe.ends.values():
                assert len(end.detached) <= 1

    def check_messages(self, pipe: Pipe) -> None:
        handled = {}
        for delivery in pipe.arrived.deliveries:
            if delivery.complete and not delivery.aborted:
                body = pipe.arrived.bodies[delivery]
                number = int(body.split(b"/")[1])
                assert number not in handled, "a message arrived twice"
                handled[number] = delivery
                assert body == pipe.sent[number][1]
        assert list(handled) == sorted(handled), "messages overtook each other"
        for number, (sending, body, settled) in enumerate(pipe.sent):
            delivery = handled.get(number)
            if not pipe.disturbed and body is not None:
                assert delivery is not None, "a message was lost"
            if settled or sending.state is None:
                continue
            done = None if delivery is None else delivery.local_state
            if sending.state == MODIFIED_FAILED:
                # The server said so, or nobody knows.
                assert done == MODIFIED_FAILED or pipe.disturbed
            elif sending.state == RELEASED and done is None:
                assert delivery is None
            else:
                assert sending.state == done


Conversation.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.req("P3")
class TestConversation(Conversation.TestCase):  # type: ignore[misc]
    """The machine, as a test."""


@pytest.mark.req("P3")
def test_a_message_that_waits_when_its_link_ends_leaves_the_window_of_the_session() -> None:
    state = Conversation()
    state.build(2_048, 64 * MIB)
    state.grant(credit=2, drain=False, pick=1)
    state.settle_down()
    state.attach(second=False, sends=False, settled=0)
    state.send(more=False, number=2, pick=1, settled=False, size=400)
    state.settle_at_source(every=True, pick=1)
    state.attach(second=False, sends=False, settled=0)
    state.cut(at=0)
    state.travel(at=3, size=5_000)
    state.teardown()
