"""Requests, batches, time and receivers in any order, a few steps in each turn: nothing is half done, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.in_turns import InTurns
from amqp_rt_servicebus.messages import SCHEDULED_ENQUEUE_TIME, arrived
from amqp_rt_servicebus.stored import State
from entities import NOW, Bench, ids
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt import Message
from amqp_rt.errors import AmqpError
from amqp_rt.values import Timestamp

pytestmark = pytest.mark.req("Z13", "Z9")

LOCK_S = 30
COUNT = 12

STEP = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(["complete", "abandon", "defer", "dead_letter"])),
    st.tuples(st.just("ask"), st.sampled_from(["renew", "cancel", "take", "schedule", "delete"])),
    st.tuples(st.just("turn"), st.integers(1, 30)),
    st.tuples(st.just("advance"), st.sampled_from([1, LOCK_S + 1])),
    st.tuples(st.just("receive"), st.integers(1, 4)),
    st.tuples(st.just("send"), st.integers(1, 4)),
)


class World:
    """An entity with locked, deferred and scheduled messages, and the requests to it."""

    def __init__(self) -> None:
        self.bench = Bench(lock_s=LOCK_S, deliveries_max=0)
        self.entity = self.bench.entity
        self.new_id = ids()
        #: Requests with their names, and how many messages they name.
        self.asked: list[tuple[str, InTurns[Any], int]] = []
        self.sent = self.deleted = 0
        self.send(COUNT)
        self.receive(COUNT // 2)
        tokens = list(self.entity.shelf.tokens)
        self.bench.requests.defer(tokens[: COUNT // 4])
        self.ask("schedule")
        self.finish()

    def send(self, count: int) -> None:
        for _ in range(count):
            self.bench.send("m")
            self.sent += 1

    def receive(self, count: int) -> None:
        receiver = self.bench.receiver()
        receiver.link.grant(count)
        receiver.joined.pump()

    def ask(self, what: str) -> None:
        requests = self.bench.entity_requests
        shelf = self.entity.shelf
        numbers = {state: [] for state in State}  # type: dict[State, list[int]]
        for number in shelf.numbers:
            stored = shelf.find(number)
            assert stored is not None
            numbers[stored.state].append(number)
        tokens = list(shelf.tokens)[:6]
        named = len(tokens)
        if what == "schedule":
            due = {SCHEDULED_ENQUEUE_TIME: Timestamp(round((self.bench.time.now + 10) * 1000))}
            payload = Message("s", message_annotations=due).encode()
            named = 5
            steps: Any = requests.schedule(arrived(payload, new_id=self.new_id) for _ in range(5))
        elif what == "cancel":
            named = len(numbers[State.SCHEDULED][:5])
            steps = requests.cancel_scheduled(iter(numbers[State.SCHEDULED][:5]))
        elif what == "take":
            named = len(numbers[State.DEFERRED][:5])
            steps = requests.receive_deferred(iter(numbers[State.DEFERRED][:5]), settled=True)
        elif what == "delete":
            steps = requests.delete_batch(3, NOW + 1_000_000)
        else:
            steps = getattr(requests, what)(iter(tokens))
        self.asked.append((what, InTurns(self.entity, steps), named))

    def turn(self, work: int) -> None:
        self.bench.turn(work)

    def advance(self, seconds: float) -> None:
        self.bench.time.now += seconds
        self.entity.tick()

    def finish(self) -> None:
        self.bench.memory.work = 1 << 40
        self.bench.run()

    def gone(self) -> int:
        """Return how many messages the requests that succeeded have removed from all parts, less what they added."""
        count = 0
        for what, request, named in self.asked:
            try:
                result = request.result()
            except AmqpError:
                continue
            if what == "schedule":
                count -= len(result)
            elif what == "take":
                count += len(result)
            elif what == "delete":
                count += result
            elif what in ("complete", "cancel"):
                count += named
        return count


@given(st.lists(st.tuples(STEP, st.integers(1, 9)), max_size=40))
def test_requests_happen_as_a_whole_or_not_at_all(
    steps: list[tuple[tuple[str, Any], int]],
) -> None:
    world = World()
    entity = world.entity
    for (what, argument), work in steps:
        world.bench.memory.work = work
        getattr(world, what)(argument)
        assert len(entity.shelf.tokens) <= len(entity.shelf)
        assert world.bench.memory.held == entity.shelf.reserved + sum(
            part.shelf.bytes for part in entity.parts
        )
    world.finish()
    assert all(request.is_done for _, request, _ in world.asked)
    assert entity.shelf.reserved == 0
    assert sum(len(part.shelf) for part in entity.parts) == world.sent - world.gone()
    # Whatever was held by a request has its time again.
    locked = {stored.number for stored in entity.shelf.tokens.values()}
    world.advance(10_000)
    world.finish()
    assert not locked & {
        stored.number
        for stored in entity.shelf.tokens.values()
        if stored.until <= world.bench.time.now
    }
    assert entity.shelf.counts[State.SCHEDULED] == 0
