"""Requests about many messages take several turns, and still happen as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import trio
from amqp_rt_servicebus.conditions import (
    ENTITY_DISABLED,
    MESSAGE_LOCK_LOST,
    MESSAGE_NOT_FOUND,
    NO_ROOM,
    NOT_ALLOWED,
    SESSION_LOCK_LOST,
    TOO_LARGE,
)
from amqp_rt_servicebus.in_turns import InTurns
from amqp_rt_servicebus.messages import SCHEDULED_ENQUEUE_TIME, arrived
from amqp_rt_servicebus.options import Options
from amqp_rt_servicebus.requests import Requests
from amqp_rt_servicebus.stored import State, Stored
from entities import NOW, Bench, condition, ids
from linked import Connection
from msgspec.structs import replace

from amqp_rt import Message
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import ACCEPTED, TransactionalState
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.values import Timestamp

pytestmark = pytest.mark.req("Z13", "Z9")

WORK = 100
COUNT = 200


class Asking:
    """A request, and what has come of it."""

    def __init__(self, bench: Bench, steps: Generator[int, None, Any]) -> None:
        self.bench = bench
        bench.memory.work = WORK
        self.request = InTurns(bench.entity, steps)

    @property
    def done(self) -> bool:
        return self.request.is_done

    def turn(self) -> None:
        self.bench.turn(WORK)

    def turns_until(self, true: Callable[[], bool]) -> None:
        for _ in range(1_000):
            if true():
                return
            self.turn()
        raise AssertionError("it has not come to that")

    def result(self) -> Any:
        """Do the rest, a turn at a time; return the result or raise the error."""
        self.turns_until(lambda: self.done)
        return self.request.result()

    def error(self) -> str:
        with pytest.raises(AmqpError) as caught:
            self.result()
        return condition(caught.value)


def messages(count: int = COUNT, *, due_s: float = 60, **fields: Any) -> list[Stored]:
    due = {SCHEDULED_ENQUEUE_TIME: Timestamp(round((NOW + due_s) * 1000))}
    new_id = ids()
    return [
        arrived(Message(str(n), message_annotations=due, **fields).encode(), new_id=new_id)
        for n in range(count)
    ]


def locked(bench: Bench, count: int = COUNT, **fields: Any) -> list[Any]:
    """Let a receiver lock *count* messages; return their tokens."""
    for body in range(count):
        bench.send(body, **fields)
    bench.memory.work = 1 << 40
    receiver = bench.receiver(credit=count, session=fields.get("group_id"))
    return [receiver.token(index) for index in range(count)]


def deferred(bench: Bench, count: int = COUNT, **fields: Any) -> list[int]:
    """Defer *count* messages; return their numbers."""
    bench.requests.defer(locked(bench, count, **fields))
    return list(bench.entity.shelf.numbers)


def reconfigure(bench: Bench, **changes: Any) -> None:
    options: Options = replace(bench.entity.options, **changes)
    bench.entity.reconfigure(options)


def no_room_is_reserved(bench: Bench) -> bool:
    return bench.entity.shelf.reserved == 0 and bench.memory.held == sum(
        part.shelf.bytes for part in bench.entity.parts
    )


# --- Scheduling ------------------------------------------------------------------------------------


def test_messages_are_scheduled_in_turns_and_get_all_numbers() -> None:
    bench = Bench()
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))
    assert not asking.done
    assert asking.result() == list(range(1, COUNT + 1))
    assert len(bench.entity.shelf) == COUNT
    assert no_room_is_reserved(bench)


def test_nothing_is_scheduled_before_all_messages_are_checked() -> None:
    bench = Bench(sessions=True)
    refused = [*messages(group_id="s"), *messages(1)]
    asking = Asking(bench, bench.entity_requests.schedule(iter(refused)))
    while not asking.done:
        assert len(bench.entity.shelf) == 0
        asking.turn()
    assert asking.error() == NOT_ALLOWED
    assert no_room_is_reserved(bench)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"status": "Disabled"}, ENTITY_DISABLED), ({"message_bytes_max": 10}, TOO_LARGE)],
)
def test_a_change_before_all_are_checked_refuses_all(
    changes: dict[str, Any], expected: str
) -> None:
    bench = Bench()
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))
    asking.turn()
    assert len(bench.entity.shelf) == 0
    reconfigure(bench, **changes)
    assert asking.error() == expected
    assert len(bench.entity.shelf) == 0
    assert no_room_is_reserved(bench)


def test_a_change_after_that_refuses_none() -> None:
    bench = Bench()
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))
    asking.turns_until(lambda: len(bench.entity.shelf) > 0)
    assert not asking.done
    reconfigure(bench, status="Disabled")
    assert len(asking.result()) == COUNT


def test_the_room_of_a_request_is_kept_for_it() -> None:
    size = sum(each.size for each in messages())
    bench = Bench(bytes_max=size + 200)
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))
    asking.turns_until(lambda: len(bench.entity.shelf) > 0)
    assert not asking.done
    assert not bench.entity.fits(201)
    assert len(asking.result()) == COUNT
    assert no_room_is_reserved(bench)


def test_a_request_without_room_takes_none() -> None:
    bench = Bench(bytes_max=sum(each.size for each in messages()) - 1)
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))
    assert asking.error() == NO_ROOM
    assert len(bench.entity.shelf) == 0
    assert no_room_is_reserved(bench)


@pytest.mark.parametrize("turns", [0, 1, 14])
def test_an_entity_that_is_deleted_ends_its_requests(turns: int) -> None:
    bench = Bench()
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))
    behind = Asking(bench, bench.entity_requests.peek(0, 1))
    for _ in range(turns):
        asking.turn()
    assert not asking.done
    bench.entity.delete()
    assert (asking.error(), behind.error()) == ("amqp:not-found", "amqp:not-found")
    while bench.unfinished:
        bench.turn(WORK)
    assert bench.memory.held == 0


def test_a_request_is_done_though_its_client_has_left() -> None:
    bench = Bench()
    asking = Asking(bench, bench.entity_requests.schedule(iter(messages())))

    async def leave() -> None:
        with trio.move_on_after(0):
            await asking.request.wait()

    trio.run(leave)
    assert not asking.done
    assert len(asking.result()) == COUNT


def test_duplicates_in_a_request_get_no_number() -> None:
    bench = Bench(duplicates_s=60)
    twice = [*messages(message_id="same"), *messages(1, message_id="other")]
    asking = Asking(bench, bench.entity_requests.schedule(iter(twice)))
    assert asking.result() == [1, *[0] * (COUNT - 1), 2]
    assert no_room_is_reserved(bench)


# --- Locks -----------------------------------------------------------------------------------------


def test_locks_that_are_named_do_not_end_before_their_request() -> None:
    bench = Bench(lock_s=30)
    tokens = locked(bench)
    asking = Asking(bench, bench.entity_requests.complete(iter(tokens)))
    asking.turns_until(lambda: len(bench.entity.timing.locks) == 0)
    assert len(bench.entity.shelf) == COUNT
    bench.time.now += 31
    bench.entity.tick()
    asking.result()
    assert len(bench.entity.shelf) == 0


def test_a_lost_lock_leaves_all_others_as_they_were() -> None:
    bench = Bench(lock_s=30)
    tokens = locked(bench)
    bench.requests.complete([tokens[-1]])
    asking = Asking(bench, bench.entity_requests.complete(iter(tokens)))
    assert asking.error() == MESSAGE_LOCK_LOST
    assert len(bench.entity.shelf.tokens) == COUNT - 1
    # Each of them ends when it would have.
    bench.memory.work = 1 << 40
    bench.advance(29)
    assert len(bench.entity.shelf.tokens) == COUNT - 1
    bench.advance(1)
    assert len(bench.entity.shelf.tokens) == 0
    assert {each.delivery_count for each in bench.peeked()} == {1}


def test_a_lock_that_ends_before_it_is_found_is_lost() -> None:
    bench = Bench(lock_s=30)
    tokens = locked(bench)
    asking = Asking(bench, bench.entity_requests.renew(iter(tokens)))
    bench.time.now += 31
    assert asking.error() == MESSAGE_LOCK_LOST
    bench.memory.work = 1 << 40
    bench.entity.tick()
    bench.run()
    assert len(bench.entity.shelf.tokens) == 0


def test_the_second_of_two_requests_finds_what_the_first_has_left() -> None:
    bench = Bench()
    tokens = locked(bench)
    first = Asking(bench, bench.entity_requests.complete(iter(tokens)))
    second = Asking(bench, bench.entity_requests.abandon(iter(tokens)))
    first.result()
    assert second.error() == MESSAGE_LOCK_LOST
    assert len(bench.entity.shelf) == 0


def test_an_outcome_on_a_link_waits_for_the_request_before_it() -> None:
    bench = Bench()
    tokens = locked(bench)
    (receiver,) = bench.receivers
    asking = Asking(bench, bench.entity_requests.defer(iter(tokens)))
    receiver.deliveries[0].update(ACCEPTED)
    receiver.joined.pump()
    asking.result()
    bench.run()
    assert bench.entity.shelf.counts[State.DEFERRED] == COUNT
    assert type(receiver.deliveries[0].state).__name__ == "Rejected"


def test_a_message_that_a_transaction_settles_in_between_is_left_to_it() -> None:
    connection = Connection()
    bench = connection.bench
    for body in range(COUNT):
        bench.send(body)
    deliveries = connection.receiver(COUNT).deliveries
    control = connection.controller()
    txn_id = connection.declare(control)
    tokens = list(bench.entity.shelf.tokens)
    asking = Asking(bench, bench.entity_requests.abandon(iter(tokens)))
    asking.turns_until(lambda: len(bench.entity.timing.locks) == 0)
    connection.update(deliveries[-1], TransactionalState(txn_id, ACCEPTED))
    connection.discharge(control, txn_id, fail=False)
    asking.result()
    assert bench.bodies() == list(range(COUNT - 1))


@pytest.mark.parametrize("operation", ["complete", "abandon", "defer", "dead_letter"])
def test_what_is_done_to_many_messages_is_done_to_each(operation: str) -> None:
    bench = Bench()
    tokens = locked(bench)
    steps = getattr(bench.entity_requests, operation)(iter(tokens))
    asking = Asking(bench, steps)
    assert not asking.done
    asking.result()
    sizes = bench.entity.sizes()
    assert (sizes.active, sizes.deferred, sizes.dead_letters) == {
        "complete": (0, 0, 0),
        "abandon": (COUNT, 0, 0),
        "defer": (0, COUNT, 0),
        "dead_letter": (0, 0, COUNT),
    }[operation]
    assert len(bench.entity.shelf.tokens) == 0
    assert no_room_is_reserved(bench)


def test_all_locks_of_a_request_end_at_the_same_time() -> None:
    bench = Bench(lock_s=30)
    tokens = locked(bench)
    bench.time.now += 10
    asking = Asking(bench, bench.entity_requests.renew(iter(tokens)))
    assert asking.result() == (NOW + 40, COUNT)
    bench.memory.work = 1 << 40
    bench.advance(29)
    assert len(bench.entity.shelf.tokens) == COUNT
    bench.advance(1)
    assert len(bench.entity.shelf.tokens) == 0


# --- Sequence numbers ------------------------------------------------------------------------------


def test_deferred_messages_are_taken_in_turns() -> None:
    bench = Bench()
    numbers = deferred(bench)
    asking = Asking(bench, bench.entity_requests.receive_deferred(iter(numbers), settled=False))
    taken = asking.result()
    assert len({token for _, token in taken}) == COUNT
    assert len(bench.entity.shelf.tokens) == COUNT


def test_none_is_taken_if_one_is_not_deferred() -> None:
    bench = Bench()
    numbers = [*deferred(bench), 1_000]
    asking = Asking(bench, bench.entity_requests.receive_deferred(iter(numbers), settled=True))
    assert asking.error() == MESSAGE_NOT_FOUND
    assert len(bench.entity.shelf) == COUNT
    assert len(bench.entity.shelf.tokens) == 0


def test_an_answer_is_no_larger_than_a_message_may_be() -> None:
    bench = Bench()
    numbers = deferred(bench)
    size = 1024 * COUNT
    for most, fails in ((size, False), (size - 1, True)):
        bench.entity.limits = replace(DEFAULT_LIMITS, message_size_max=most)
        asking = Asking(bench, bench.entity_requests.receive_deferred(numbers * 2, settled=False))
        if fails:
            assert asking.error() == "com.microsoft:argument-out-of-range"
        else:
            bench.requests.defer([token for _, token in asking.result()])
    assert len(bench.entity.shelf.tokens) == 0


def test_messages_that_were_purged_in_between_are_left_out() -> None:
    bench = Bench()
    numbers = deferred(bench)
    asking = Asking(bench, bench.entity_requests.receive_deferred(iter(numbers), settled=False))
    asking.turns_until(lambda: len(bench.entity.shelf.tokens) > 0)
    bench.entity.purge()
    assert 0 < len(asking.result()) < COUNT


def test_messages_of_a_session_whose_receiver_leaves_in_between_go_back() -> None:
    bench = Bench(sessions=True)
    numbers = deferred(bench, group_id="s")
    (receiver,) = bench.receivers
    asking = Asking(
        bench,
        bench.entity_requests.receive_deferred(
            iter(numbers), settled=False, session_id="s", holder=receiver.subscription
        ),
    )
    asking.turns_until(lambda: len(bench.entity.shelf.tokens) > 0)
    receiver.link.detach()
    receiver.joined.pump()
    assert len(asking.result()) == COUNT
    while bench.unfinished:
        bench.turn(WORK)
    assert len(bench.entity.shelf.tokens) == 0
    session = bench.entity.sessions.find("s")
    assert session is not None
    assert session.holder is None
    assert not session.in_hand


def test_a_request_behind_the_end_of_its_session_fails() -> None:
    bench = Bench(sessions=True)
    tokens = locked(bench, group_id="s")
    (receiver,) = bench.receivers
    bench.memory.work = WORK
    receiver.link.detach()
    receiver.joined.pump()
    asking = Asking(bench, bench.entity_requests.complete(iter(tokens), session_id="s"))
    assert asking.error() == SESSION_LOCK_LOST
    assert len(bench.entity.shelf) == COUNT


def test_messages_that_are_being_cancelled_do_not_become_due() -> None:
    bench = Bench()
    numbers = bench.requests.schedule(messages())
    asking = Asking(bench, bench.entity_requests.cancel_scheduled(iter(numbers)))
    asking.turns_until(lambda: len(bench.entity.timing.due) == 0)
    assert len(bench.entity.shelf) == COUNT
    bench.time.now += 61
    bench.entity.tick()
    asking.result()
    assert len(bench.entity.shelf) == 0


def test_messages_whose_cancellation_fails_become_due() -> None:
    bench = Bench()
    numbers = [*bench.requests.schedule(messages()), 1_000]
    asking = Asking(bench, bench.entity_requests.cancel_scheduled(iter(numbers)))
    assert asking.error() == MESSAGE_NOT_FOUND
    bench.memory.work = 1 << 40
    bench.advance(60)
    assert bench.entity.shelf.counts[State.ACTIVE] == COUNT


def test_a_peek_leaves_out_what_goes_in_between() -> None:
    bench = Bench()
    for body in range(COUNT):
        bench.send(body)
    asking = Asking(bench, bench.entity_requests.peek(0, COUNT))
    bench.entity.purge()
    shown = asking.result()
    assert 0 < len(shown) < COUNT


def test_messages_are_deleted_in_turns_while_others_are_delivered() -> None:
    bench = Bench()
    for body in range(COUNT):
        bench.send(body)
    asking = Asking(bench, bench.entity_requests.delete_batch(COUNT, NOW + 1))
    asking.turn()
    bench.memory.work = WORK
    receiver = bench.receiver()
    receiver.link.grant(10)
    receiver.joined.pump()
    deleted = asking.result()
    bench.run()
    assert deleted == COUNT - 10
    assert len(receiver.deliveries) == 10
    assert len(bench.entity.shelf) == 10


def test_messages_are_delivered_while_requests_follow_each_other() -> None:
    bench = Bench()
    bench.send("m")
    asked = [Asking(bench, bench.entity_requests.schedule(iter(messages()))) for _ in range(20)]
    receiver = bench.receiver()
    receiver.link.grant(1)
    receiver.joined.pump()
    for _ in range(2):
        asked[0].turn()
    receiver.joined.pump()
    assert receiver.bodies == ["m"]
    assert not asked[-1].done


def test_all_steps_of_a_request_count_as_work() -> None:
    bench = Bench()
    numbers = bench.requests.schedule(messages())
    for steps in (
        Requests(bench.entity).peek(0, 10),
        Requests(bench.entity).cancel_scheduled(numbers[:10]),
        Requests(bench.entity).delete_batch(1, NOW + 100),
    ):
        bench.memory.work = 1_000
        InTurns(bench.entity, steps)
        assert bench.memory.work < 1_000
        bench.send("m")
