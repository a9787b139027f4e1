"""Subscribers that consume, browse, acquire and settle against lists: each message is in one place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from octets010 import Operation
from protocol010 import CREDIT, NOT_ACQUIRED, UNLIMITED
from subscribers010 import Attached, World

from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.queue.invariants import broken_invariants

DESTINATIONS = ("taking", "looking")


class Subscribers(RuleBasedStateMachine):
    """Two sessions, each with a consumer and a browser of one queue, and what they must have."""

    @initialize(priorities=st.sampled_from([1, 3]))
    def begin(self, priorities: int) -> None:
        self.world = World(Queue("q", priorities=priorities))
        self.sent = 0
        self.waiting: set[bytes] = set()
        #: Messages that each session holds: command-id → body.
        self.held: list[dict[int, bytes]] = [{}, {}]
        #: Copies that each session may acquire.
        self.copies: list[dict[int, bytes]] = [{}, {}]
        #: Credit that is left to each consumer.
        self.credit = [0, 0]
        self.times: dict[bytes, int] = {}
        self.sessions: list[Attached] = []
        for name in (b"one", b"two"):
            self._connect(name)

    def _connect(self, name: bytes) -> None:
        session = self.world.client().attach(name, timeout=60)
        session.subscribe("q", "taking", flow_mode=CREDIT, messages=0)
        session.subscribe("q", "looking", acquire_mode=NOT_ACQUIRED)
        self.sessions.append(session)

    def _receive(self) -> None:
        for which, session in enumerate(self.sessions):
            for message in session.messages():
                self._on_message(which, message)

    def _on_message(self, which: int, message: Operation) -> None:
        body = message.body or b""
        assert message.id is not None
        if message.destination == "looking":
            self.copies[which][message.id] = body
            return
        assert body in self.waiting
        self.waiting.remove(body)
        self.held[which][message.id] = body
        self.credit[which] -= 1
        assert self.credit[which] >= 0
        marked = bool(message.header("delivery-properties").redelivered)
        assert marked == (self.times.get(body, 0) > 0)

    @rule(priority=st.integers(0, 9), count=st.integers(1, 4))
    def publish(self, priority: int, count: int) -> None:
        bodies = [b"%d" % (self.sent + number) for number in range(count)]
        self.sent += count
        self.waiting.update(bodies)
        self.world.publish("q", *bodies, priority=priority)
        self._receive()

    @rule(which=st.integers(0, 1), count=st.integers(1, 5))
    def grant(self, which: int, count: int) -> None:
        self.credit[which] += count
        self.sessions[which].flow(count, "taking")
        self._receive()

    @rule(which=st.integers(0, 1), data=st.data())
    def acquire(self, which: int, data: Any) -> None:
        copies = self.copies[which]
        chosen = (
            data.draw(st.lists(st.sampled_from(sorted(copies)), max_size=4, unique=True))
            if copies
            else []
        )
        ids = [(number, number) for number in sorted(chosen)]
        result = self.sessions[which].call("message.acquire", transfers=ids)
        assert result is not None
        acquired = {
            number for first, last in result.transfers or [] for number in range(first, last + 1)
        }
        # One message may have two copies, after it was released: the first of them gets it.
        expected: set[int] = set()
        for number in sorted(chosen):
            if copies[number] in self.waiting:
                self.waiting.remove(copies[number])
                expected.add(number)
        assert acquired == expected
        for number in acquired:
            self.held[which][number] = copies.pop(number)
        self._receive()

    @rule(
        which=st.integers(0, 1),
        how=st.sampled_from(["accept", "reject", "release", "redeliver"]),
        held_only=st.booleans(),
        data=st.data(),
    )
    def settle(self, which: int, how: str, held_only: bool, data: Any) -> None:
        held, copies = self.held[which], self.copies[which]
        known = sorted(held) if held and held_only else sorted([*held, *copies])
        if not known:
            return
        chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
        fields: dict[str, Any] = {}
        if how == "redeliver":
            fields = {"set_redelivered": True}
        for number in chosen:
            copies.pop(number, None)
            body = held.pop(number, None)
            if body is not None and how in ("release", "redeliver"):
                self.waiting.add(body)
                self.times[body] = self.times.get(body, 0) + (how == "redeliver")
        name = "release" if how == "redeliver" else how
        ids = [(number, number) for number in sorted(chosen)]
        self.sessions[which].call(f"message.{name}", transfers=ids, **fields)
        self._receive()

    @rule(which=st.integers(0, 1))
    def stop(self, which: int) -> None:
        self.credit[which] = 0
        self.sessions[which].call("message.stop", destination="taking")
        self.sessions[which].flow(UNLIMITED, "taking", unit=1)
        self._receive()

    @rule(which=st.integers(0, 1))
    def flush(self, which: int) -> None:
        self.sessions[which].call("message.flush", destination="taking")
        self._receive()
        self.credit[which] = 0
        self.sessions[which].flow(UNLIMITED, "taking", unit=1)

    @rule(which=st.integers(0, 1))
    def reattach(self, which: int) -> None:
        session = self.sessions[which]
        session.client.cut()
        taken = session._taken
        session = self.sessions[which] = self.world.client().go_on(session.state)
        session._taken = taken
        self.credit[which] = 0
        for destination in DESTINATIONS:
            session.flow(UNLIMITED, destination, unit=1)
        session.flow(UNLIMITED, "looking")
        self._receive()

    @rule(which=st.integers(0, 1))
    def end(self, which: int) -> None:
        session = self.sessions[which]
        for body in self.held[which].values():
            self.waiting.add(body)
            self.times[body] = self.times.get(body, 0) + 1
        self.held[which].clear()
        self.copies[which].clear()
        self.credit[which] = 0
        session.state.ask_timeout(0)
        session.state.detach()
        self.world.pump()
        other = self.sessions.pop()
        name = session.state.name + b"'"
        if which == 1:
            self._connect(name)
        else:
            self.sessions.pop()
            self._connect(name)
            self.sessions.append(other)
        self._receive()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "world"):
            return
        queue = self.world.host.space().find("q").held
        held = sum(len(each) for each in self.held)
        assert (queue.available, queue.acquired) == (len(self.waiting), held)
        assert not broken_invariants(queue)
        # A message waits for a consumer that has credit only if there is none.
        assert not self.waiting or self.credit == [0, 0]


Subscribers.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSubscribers = pytest.mark.slow(pytest.mark.req("D2", "D7", "D10")(Subscribers.TestCase))
