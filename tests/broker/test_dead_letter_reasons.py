"""Queues that dead-letter for some reasons only, as alternate exchanges of 0-10 want it."""

from __future__ import annotations

import pytest
from brokers import Receiving, World

from amqp_rt.broker.nodes import DELIVERIES_MAX, Queue
from amqp_rt.outcomes import MODIFIED_FAILED, RELEASED, Outcome, rejected

REJECTED = rejected("x")


def give_up(world: World, reason: str) -> None:
    """Make the queue ``q`` give up a message for *reason*."""
    sender = world.client().sender("q")
    sender.send("lost", ttl_ms=10 if reason == "expired" else None)
    if reason == "expired":
        world.time.now += 1
        world.queue_node("q").sweep()
    elif reason == "overflow":
        sender.send("newer")
    else:
        outcome: Outcome = {"rejected": REJECTED, "max-attempts": RELEASED}.get(
            reason, MODIFIED_FAILED
        )
        found: Receiving = world.client().receiver("q", credit=1)
        found.settle(outcome)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("rejected", {}),
        ("expired", {}),
        ("max-deliveries", {"max_deliveries": 1}),
        ("max-attempts", {"max_attempts": 1}),
        ("overflow", {"overflow": "drop-head", "length_max": 1}),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_only_messages_of_the_listed_reasons_are_dead_lettered(
    reason: str, options: dict[str, object], listed: bool
) -> None:
    others = {"rejected", "expired", "max-deliveries", "max-attempts", "overflow"} - {reason}
    reasons = (reason,) if listed else tuple(sorted(others))
    world = World(Queue("q", dead_letter="dead", dead_letter_for=reasons, **options))  # type: ignore[arg-type]
    give_up(world, reason)
    stats = world.stats("q")
    assert world.stats("dead").available == int(listed)
    assert (stats.dead_lettered, stats.dropped) == (int(listed), int(not listed))
    world.check()


def test_without_a_dead_letter_for_failures_they_are_not_limited() -> None:
    assert Queue("q", dead_letter="d").deliveries_max == DELIVERIES_MAX
    assert Queue("q", dead_letter="d", dead_letter_for=("rejected",)).deliveries_max == 0
    own = Queue("q", dead_letter="d", dead_letter_for=("rejected",), max_deliveries=3)
    assert own.deliveries_max == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dead_letter_for": ("rejected",)}, "dead_letter_for needs a dead_letter"),
        ({"dead_letter": "d", "dead_letter_for": ("tired",)}, "not 'tired'"),
    ],
)
def test_reasons_are_checked(options: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Queue("q", **options)  # type: ignore[arg-type]


def test_an_empty_list_dead_letters_nothing() -> None:
    world = World(Queue("q", dead_letter="dead", dead_letter_for=()))
    give_up(world, "rejected")
    assert (world.stats("dead").available, world.stats("q").dropped) == (0, 1)
