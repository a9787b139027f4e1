"""Entities that forward: copies, hops, dead letters, and destinations that take nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from amqp_rt_servicebus.entity import HOPS_MAX, Entity, Failure
from amqp_rt_servicebus.messages import arrived, copied
from amqp_rt_servicebus.options import Options
from amqp_rt_servicebus.stored import Stored
from entities import NOW, Bench, ids, stored_of

from amqp_rt import Message
from amqp_rt.fronts import Rejected
from amqp_rt.values import Symbol, Timestamp

pytestmark = pytest.mark.req("Z14")


def joined(bench: Bench, path: str = "target", **options: object) -> Entity:
    """Return another entity of the same namespace."""
    entity = Entity(path, Options(**options), bench.memory, bench.time, new_id=ids())  # type: ignore[arg-type]
    for part in entity.parts:
        bench.wire(part)
    return entity


def into(entity: Entity) -> Callable[[Stored], Failure | None]:
    def forward(stored: Stored) -> Failure | None:
        entity.receive(stored)
        return None

    return forward


def test_a_forwarded_message_has_a_new_number_and_keeps_the_first() -> None:
    bench = Bench()
    target = joined(bench)
    for _ in range(2):
        bench.send("before", to=target)
    bench.entity.forward = into(target)
    assert bench.send("m") == 1
    assert bench.bodies() == []
    message = bench.peeked(target)[-1]
    annotations = message.message_annotations
    assert annotations["x-opt-sequence-number"] == 3
    assert annotations["x-opt-enqueue-sequence-number"] == 1
    assert message.delivery_count == 0
    assert bench.memory.held == target.bytes


def test_each_entity_applies_its_own_time_to_live_to_the_own_one() -> None:
    bench = Bench(ttl_s=5)
    target = joined(bench, ttl_s=50)
    bench.entity.forward = into(target)
    bench.send("m", ttl_s=20)
    assert [each.ttl_ms for each in bench.peeked(target)] == [20_000]


def test_a_scheduled_message_is_forwarded_when_it_is_due() -> None:
    bench = Bench()
    target = joined(bench)
    bench.entity.forward = into(target)
    due = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(round((NOW + 10) * 1000))}
    bench.send("m", message_annotations=due)
    assert bench.bodies(target) == []
    bench.advance(10)
    assert bench.bodies(target) == ["m"]


def test_at_the_hop_after_the_last_one_a_message_is_dead_lettered() -> None:
    bench = Bench()
    chain = [bench.entity, *(joined(bench, f"q{index}") for index in range(1, HOPS_MAX + 2))]
    for entity, following in pairwise(chain):
        entity.forward = into(following)
    bench.send("m")
    last = chain[HOPS_MAX]
    assert last.dead_letters is not None
    assert bench.bodies(chain[-1]) == []
    (letter,) = bench.peeked(last.dead_letters)
    assert letter.application_properties["DeadLetterReason"] == "MaxTransferHopCountExceeded"
    assert letter.message_annotations["x-opt-deadletter-source"] == f"q{HOPS_MAX}"


def test_copies_of_a_topic_are_no_hop() -> None:
    bench = Bench()
    subscriptions = [joined(bench, f"s{index}") for index in range(2)]

    def copy_to_all(stored: Stored) -> None:
        for each in subscriptions:
            each.receive(copied(stored))

    bench.entity.forward = copy_to_all
    bench.entity.forward_counts = False
    stored = arrived(Message("m").encode())
    stored.hops = HOPS_MAX
    bench.entity.accept(stored)
    for each in subscriptions:
        (number,) = each.shelf.numbers
        assert stored_of(bench, number, each).hops == HOPS_MAX
    first, second = (stored_of(bench, 1, each) for each in subscriptions)
    assert first.payload is second.payload


def test_a_message_goes_round_in_a_circle_a_bounded_number_of_times() -> None:
    bench = Bench()
    bench.entity.forward = into(bench.entity)
    bench.send("m")
    assert bench.bodies(bench.dead) == ["m"]


def test_what_cannot_be_forwarded_goes_to_the_transfer_queue() -> None:
    bench = Bench()
    bench.entity.forward = lambda stored: ("Gone", "the target does not exist")
    bench.send("m")
    assert bench.bodies() == []
    (letter,) = bench.peeked(bench.transfers)
    assert dict(letter.application_properties) == {
        "DeadLetterReason": "Gone",
        "DeadLetterErrorDescription": "the target does not exist",
    }
    assert bench.entity.sizes().transfer_dead_letters == 1


def test_dead_letters_are_forwarded_with_their_source() -> None:
    bench = Bench()
    target = joined(bench)
    bench.dead.forward = into(target)
    bench.send("m")
    bench.receiver(credit=1).update(Rejected())
    assert bench.bodies(bench.dead) == []
    (letter,) = bench.peeked(target)
    assert letter.message_annotations["x-opt-deadletter-source"] == "q"
    assert letter.message_annotations["x-opt-enqueue-sequence-number"] == 1


@pytest.mark.parametrize("target_is_there", [False, True])
def test_dead_letters_that_cannot_be_forwarded_are_kept(target_is_there: bool) -> None:
    bench = Bench()
    failure = None if target_is_there else ("Gone", "no target")
    bench.dead.forward = lambda stored: failure
    bench.send("m")
    bench.receiver(credit=1).update(Rejected())
    assert bench.bodies(bench.transfers) == ([] if target_is_there else ["m"])


def test_a_duplicate_is_forwarded_once() -> None:
    bench = Bench()
    target = joined(bench, duplicates_s=60)
    bench.entity.forward = into(target)
    for _ in range(2):
        bench.entity.accept(arrived(Message("m", message_id="x").encode()))
    assert bench.bodies(target) == ["m"]
