"""Transactions of the broker: no effect before the discharge, then all effects or none."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Client, Controller, Receiving, World

from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.fronts.base import RCV_SECOND, SND_SETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import (
    ACCEPTED,
    RELEASED,
    Modified,
    Outcome,
    Rejected,
    rejected,
)
from amqp_rt.termini import Coordinator
from amqp_rt.transactions import Declare, Declared, Discharge, TransactionalState

ROLLBACK = "amqp:transaction:rollback"
UNKNOWN = "amqp:transaction:unknown-id"


def a_world(*declared: Any, **options: Any) -> tuple[World, Client, Controller]:
    world = World(*(declared or (Queue("q"),)), **options)
    client = world.client()
    return world, client, Controller(client)


def filled(client: Client, count: int = 1, address: str = "q") -> None:
    client.sender(address).send(*range(count))


def available(world: World, address: str = "q") -> list[Any]:
    return [Message.decode(each).body for each in world.peek(address, 100)]


def update(receiving: Receiving, state: Any, *indexes: int) -> None:
    """Send *state* for deliveries without settling them."""
    for index in indexes or range(len(receiving.endpoint.deliveries)):
        receiving.endpoint.deliveries[index].update(state)
    receiving.world.pump()


def acquire(receiving: Receiving, txn_id: bytes | None, credit: int) -> None:
    receiving.link.grant(credit, properties={"txn-id": txn_id})
    receiving.world.pump()


# --- The control link ---------------------------------------------------------------------------


@pytest.mark.req("R1")
def test_a_coordinator_says_what_it_can_do_whatever_was_asked_for() -> None:
    _, client, _ = a_world()
    asked = Coordinator(capabilities=("amqp:local-transactions", "amqp:distributed-transactions"))
    control = Controller(client, target=asked)
    assert control.link.attached
    assert control.link.target.capabilities == (
        "amqp:local-transactions",
        "amqp:multi-txns-per-ssn",
        "amqp:multi-ssns-per-txn",
    )
    assert control.link.credit > 0
    # Messages to a coordinator are short: longer ones are refused.
    assert 0 < control.link.max_message_size <= 16_384


@pytest.mark.req("R2")
def test_declaring_gives_an_id_of_its_own_each_time() -> None:
    world, _, control = a_world()
    ids = {control.declare() for _ in range(50)}
    assert len(ids) == 50
    assert all(0 < len(txn_id) <= 32 for txn_id in ids)
    assert control.link.credit > 0
    for txn_id in ids:
        assert control.discharge(txn_id, fail=txn_id[-1] % 2 == 0) == "accepted"
    assert len(world.host.transactions) == 0


@pytest.mark.req("R2")
@pytest.mark.parametrize("fail", [False, True])
def test_what_was_never_declared_cannot_be_discharged(fail: bool) -> None:
    _, client, control = a_world()
    assert control.discharge(b"no", fail=fail) == UNKNOWN
    assert control.discharge("a string", fail=fail) == UNKNOWN  # type: ignore[arg-type]
    txn_id = control.declare()
    assert control.discharge(txn_id, fail=fail) == "accepted"
    assert control.discharge(txn_id, fail=fail) == UNKNOWN
    # A control link has no access to transactions of another one.
    other = Controller(client)
    assert other.discharge(control.declare(), fail=fail) == UNKNOWN


@pytest.mark.req("R2")
@pytest.mark.parametrize(
    ("body", "condition"),
    [
        (Declare("a global id"), "amqp:not-implemented"),
        ("nonsense", "amqp:decode-error"),
        (ACCEPTED, "amqp:decode-error"),
        (b"bytes", "amqp:decode-error"),
    ],
)
def test_what_a_coordinator_does_not_understand_is_rejected(body: Any, condition: str) -> None:
    _, _, control = a_world()
    state = control.say(body)
    assert isinstance(state, Rejected)
    assert state.error is not None
    assert state.error.condition == condition
    assert control.declare()


@pytest.mark.req("R2")
def test_a_source_without_rejected_hears_of_failure_by_a_detach() -> None:
    world, client, _ = a_world()
    control = Controller(client, outcomes=("amqp:accepted:list", "amqp:declared:list"))
    txn_id = control.declare()
    client.sender("q").post(txn_id, "m")
    control.say(Discharge(b"no"))
    assert control.error == UNKNOWN
    assert world.stats("q").bytes == 0
    assert len(world.host.transactions) == 0


@pytest.mark.req("R2")
def test_nothing_is_said_settled_or_done_in_a_transaction_on_a_control_link() -> None:
    world, client, control = a_world()
    txn_id = control.declare()
    client.sender("q").post(txn_id, "m")
    control.say(Discharge(txn_id), settled=True)
    assert control.error == "amqp:not-allowed"
    assert available(world) == []
    other = Controller(client)
    other.say(Declare(), state=TransactionalState(other.declare()))
    assert other.error == "amqp:not-allowed"
    assert len(world.host.transactions) == 0


# --- Posting ------------------------------------------------------------------------------------


@pytest.mark.req("R3", "R6")
@pytest.mark.parametrize("settled", [False, True])
def test_posts_are_visible_only_after_the_discharge(settled: bool) -> None:
    world, client, control = a_world()
    receiver = client.receiver("q", credit=10)
    browser = client.receiver("q", credit=10, distribution_mode="copy")
    sender = client.sender("q")
    txn_id = control.declare()
    sender.post(txn_id, "a", "b", settled=settled)
    if not settled:
        # The outcome that it will have, settled: that has no effect.
        assert sender.outcomes == [TransactionalState(txn_id, ACCEPTED)] * 2
        assert all(each.remote_settled for each in sender.endpoint.outcomes)
    sender.send("outside")
    assert receiver.bodies == browser.bodies == ["outside"]
    assert world.stats("q").enqueued == 1
    assert control.discharge(txn_id) == "accepted"
    assert receiver.bodies == browser.bodies == ["outside", "a", "b"]


@pytest.mark.req("R3", "R7")
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("end", ["discharge", "control", "closed", "session", "connection"])
def test_what_is_rolled_back_was_never_there(end: str, settled: bool) -> None:
    world, client, control = a_world(Queue("q", length_max=100))
    watcher = world.client("watcher").receiver("q", credit=10)
    sender = client.sender("q")
    credit = sender.link.credit
    txn_id = control.declare()
    sender.post(txn_id, *range(10), settled=settled)
    assert world.stats("q").bytes > 0
    assert sender.link.credit == credit - 10
    if end == "discharge":
        assert control.discharge(txn_id, fail=True) == "accepted"
        # Credit that was used stays used.
        assert sender.link.credit == credit - 10
        sender.send("after")
        assert watcher.bodies == ["after"]
    elif end == "control":
        control.link.detach()
    elif end == "closed":
        client.joined.client.close()
    elif end == "session":
        client.session.end()
    else:
        client.cut()
    world.pump()
    stats = world.stats("q")
    assert (stats.available, stats.enqueued) == (0, int(end == "discharge"))
    assert world.host.memory.held == stats.bytes
    assert len(world.host.transactions) == 0


@pytest.mark.req("R3", "M21")
def test_what_is_posted_takes_room_until_it_is_rolled_back() -> None:
    world, client, control = a_world(Queue("q", length_max=4))
    first = client.sender("q")
    txn_id = control.declare()
    first.post(txn_id, *range(first.link.credit))
    other = client.sender("q")
    while other.link.credit:
        other.post(txn_id, "x")
    while first.link.credit:
        first.post(txn_id, "x")
    assert world.stats("q").available == 0
    assert (first.link.credit, other.link.credit) == (0, 0)
    control.discharge(txn_id, fail=True)
    while first.link.credit or other.link.credit:
        (first if first.link.credit else other).send("y")
    assert world.stats("q").available == 4


@pytest.mark.req("R3")
def test_messages_come_in_the_order_of_the_discharges() -> None:
    world, client, control = a_world()
    sender = client.sender("q")
    one, two = control.declare(), control.declare()
    sender.post(one, "one-a")
    sender.post(two, "two-a")
    sender.post(one, "one-b")
    sender.send("outside")
    control.discharge(two)
    control.discharge(one)
    assert available(world) == ["outside", "two-a", "one-a", "one-b"]


@pytest.mark.req("R3", "B19")
def test_a_topic_gets_what_was_posted_at_the_discharge() -> None:
    world, client, control = a_world(Topic("t"))
    subscriber = client.receiver("t", credit=9)
    txn_id = control.declare()
    client.sender("t").post(txn_id, "a")
    assert subscriber.bodies == []
    late = client.receiver("t", credit=9)
    assert world.host.memory.held > 0
    control.discharge(txn_id)
    assert subscriber.bodies == late.bodies == ["a"]
    subscriber.settle(ACCEPTED)
    late.settle(ACCEPTED)
    txn_id = control.declare()
    client.sender("t").post(txn_id, "b")
    control.discharge(txn_id, fail=True)
    assert world.host.memory.held == 0
    txn_id = control.declare()
    client.sender("t").post(txn_id, "c")
    world.host.space().delete("t")
    assert world.host.memory.held == 0
    world.pump()
    assert control.discharge(txn_id) == ROLLBACK
    assert world.host.memory.held == 0


@pytest.mark.req("R3")
def test_the_anonymous_terminus_posts_in_a_transaction_too() -> None:
    world, client, control = a_world(Queue("q"), Queue("other"))
    txn_id = control.declare()
    relay = client.sender(None)
    relay.post(txn_id, "a", to="q")
    relay.post(txn_id, "b", to="other")
    assert available(world) == available(world, "other") == []
    control.discharge(txn_id)
    assert available(world) == ["a"]
    assert available(world, "other") == ["b"]


@pytest.mark.req("R6")
def test_a_post_that_is_refused_says_so_and_the_rest_can_be_committed() -> None:
    world, client, control = a_world(Queue("q", bytes_max=10_000))
    sender = client.sender("q")
    txn_id = control.declare()
    sender.post(txn_id, "a")
    sender.post(txn_id, b"x" * 20_000)
    sender.post(txn_id, "kept", durable=True)
    first, second, third = (state.outcome for state in sender.outcomes)
    assert first == ACCEPTED
    assert second.error.condition == "amqp:resource-limit-exceeded"
    # There is no store.
    assert third.error.condition == "amqp:precondition-failed"
    assert control.discharge(txn_id) == "accepted"
    assert available(world) == ["a"]


@pytest.mark.req("R6")
@pytest.mark.parametrize("payload", [b"x" * 20_000, b"\x00"])
def test_a_settled_post_that_is_refused_fails_the_discharge(payload: bytes) -> None:
    world, client, control = a_world(Queue("q", bytes_max=10_000))
    sender = client.sender("q")
    txn_id = control.declare()
    sender.post(txn_id, "a", settled=True)
    sender.send_raw(payload, settled=True, state=TransactionalState(txn_id))
    assert world.stats("q").bytes == 0
    # Messages of the failed transaction are rejected from now on.
    sender.post(txn_id, "b")
    (state,) = sender.outcomes
    assert state.outcome.error.condition == ROLLBACK
    # The first reason is kept, even if the transaction expires later.
    world.time.now += 60
    world.host.sweep()
    assert control.discharge(txn_id) == ROLLBACK
    assert available(world) == []


@pytest.mark.req("R6")
def test_a_message_whose_link_is_detached_for_it_fails_the_discharge() -> None:
    world, client, control = a_world(annotations="refuse")
    sender = client.sender("q")
    txn_id = control.declare()
    sender.post(txn_id, "a")
    sender.post(txn_id, "b", message_annotations={"unknown": 1})
    assert sender.error == "amqp:not-implemented"
    assert control.discharge(txn_id) == ROLLBACK
    assert available(world) == []


@pytest.mark.req("R6")
def test_a_node_that_is_deleted_in_between_fails_the_discharge() -> None:
    world, client, control = a_world(Queue("q"), Queue("other"))
    filled(client, 1, "other")
    receiver = client.receiver("other", credit=1)
    txn_id = control.declare()
    client.sender("q").post(txn_id, "a")
    receiver.settle(TransactionalState(txn_id, ACCEPTED))
    world.host.space().delete("q")
    world.pump()
    assert control.discharge(txn_id) == ROLLBACK
    assert available(world, "other") == [0]
    assert world.host.memory.held == world.stats("other").bytes


@pytest.mark.req("R3")
def test_a_sender_that_settles_last_hears_the_outcome_again_after_the_discharge() -> None:
    _, client, control = a_world()
    sender = client.sender("q", rcv_settle_mode=RCV_SECOND)
    txn_id = control.declare()
    sender.post(txn_id, "a")
    (sending,) = sender.endpoint.outcomes
    assert (sending.state, sending.remote_settled) == (TransactionalState(txn_id, ACCEPTED), False)
    assert control.discharge(txn_id) == "accepted"
    assert sending.state == ACCEPTED
    sending.settle()
    client.world.pump()


@pytest.mark.req("R2", "R3")
def test_posting_to_a_transaction_that_is_not_there_detaches() -> None:
    world, client, control = a_world()
    sender = client.sender("q")
    sender.post(b"no", "a")
    assert sender.error == UNKNOWN
    txn_id = control.declare()
    control.discharge(txn_id)
    sender = client.sender("q")
    sender.post(txn_id, "a")
    assert sender.error == UNKNOWN
    assert available(world) == []


@pytest.mark.req("R2")
def test_another_connection_cannot_use_a_transaction_nor_end_it() -> None:
    world, client, control = a_world()
    filled(client)
    txn_id = control.declare()
    stranger = world.client("stranger")
    sender = stranger.sender("q")
    sender.post(txn_id, "a")
    assert sender.error == UNKNOWN
    receiver = stranger.receiver("q", credit=1)
    receiver.settle(TransactionalState(txn_id, ACCEPTED))
    assert receiver.error == UNKNOWN
    receiver = stranger.receiver("q")
    acquire(receiver, txn_id, 1)
    assert receiver.error == UNKNOWN
    assert Controller(stranger).discharge(txn_id) == UNKNOWN
    assert control.discharge(txn_id) == "accepted"
    assert available(world) == [0]


@pytest.mark.req("R9")
def test_another_session_of_the_connection_can_use_it() -> None:
    world, client, control = a_world()
    txn_id = control.declare()
    client.session = client.joined.client.begin()
    client.sender("q").post(txn_id, "a")
    assert control.discharge(txn_id) == "accepted"
    assert available(world) == ["a"]


@pytest.mark.req("R2", "R9")
def test_what_comes_in_one_piece_is_taken_in_its_order() -> None:
    """The control link is served after earlier input of other links, despite the order of serving."""
    world, client, control = a_world()
    one, two = control.declare(), control.declare()
    sender = client.sender("q")
    said = []
    for txn_id, body in ((one, "a"), (two, "b")):
        sender.link.send(Message(body).encode(), state=TransactionalState(txn_id))
        said.append(control.link.send(Message(Discharge(txn_id)).encode()))
    world.pump()
    assert [each.state for each in said] == [ACCEPTED, ACCEPTED]
    assert available(world) == ["a", "b"]


# --- Retiring -----------------------------------------------------------------------------------

OUTCOMES = [
    (ACCEPTED, {"accepted": 1}),
    (RELEASED, {"requeued": 1}),
    (Modified(delivery_failed=True), {"requeued": 1}),
    (rejected("amqp:not-allowed"), {"dead_lettered": 1}),
]


@pytest.mark.req("R4", "R6")
@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize(("outcome", "counts"), OUTCOMES)
def test_any_outcome_takes_effect_with_the_discharge(
    outcome: Outcome, counts: dict[str, int], settles: bool
) -> None:
    world, client, control = a_world(Queue("q", dead_letter="dead"))
    filled(client)
    receiver = client.receiver("q", credit=1)
    txn_id = control.declare()
    state = TransactionalState(txn_id, outcome)
    if settles:
        receiver.settle(state)
    else:
        update(receiver, state)
    stats = world.stats("q")
    assert (stats.acquired, stats.available, stats.accepted) == (1, 0, 0)
    assert control.discharge(txn_id) == "accepted"
    stats = world.stats("q")
    assert stats.acquired == 0
    assert {name: getattr(stats, name) for name in counts} == counts
    (delivery,) = receiver.endpoint.deliveries
    if not settles:
        # Then we settle.
        assert (delivery.settled, delivery.state) == (True, outcome)
    assert world.stats("dead").available == counts.get("dead_lettered", 0)


@pytest.mark.req("R4", "R7")
@pytest.mark.parametrize(("outcome", "counts"), OUTCOMES)
def test_a_rolled_back_outcome_leaves_the_delivery_with_its_consumer(
    outcome: Outcome, counts: dict[str, int]
) -> None:
    world, client, control = a_world(Queue("q", dead_letter="dead"))
    filled(client)
    receiver = client.receiver("q", credit=1)
    other = client.receiver("q", credit=1)
    txn_id = control.declare()
    update(receiver, TransactionalState(txn_id, outcome))
    assert control.discharge(txn_id, fail=True) == "accepted"
    assert (world.stats("q").acquired, other.bodies) == (1, [])
    assert receiver.link.credit == 0
    # Another outcome is allowed: in another transaction, and afterwards outside of any.
    txn_id = control.declare()
    update(receiver, TransactionalState(txn_id, RELEASED))
    assert control.discharge(txn_id, fail=True) == "accepted"
    receiver.settle(ACCEPTED)
    stats = world.stats("q")
    assert (stats.acquired, stats.available, stats.accepted, other.bodies) == (0, 0, 1, [])


@pytest.mark.req("R4", "R7")
@pytest.mark.parametrize("end", ["settled", "detached"])
def test_what_its_consumer_has_let_go_of_is_available_again_at_its_place(end: str) -> None:
    world, client, control = a_world()
    filled(client, 3)
    receiver = client.receiver("q", credit=1)
    txn_id = control.declare()
    if end == "settled":
        receiver.settle(TransactionalState(txn_id, ACCEPTED))
    else:
        update(receiver, TransactionalState(txn_id, ACCEPTED))
        receiver.detach()
    assert available(world) == [1, 2]
    control.discharge(txn_id, fail=True)
    assert available(world) == [0, 1, 2]
    fresh = client.receiver("q", credit=1)
    assert fresh.messages[0].delivery_count == 0


@pytest.mark.req("R4")
def test_an_outcome_outlives_the_link_on_which_it_was_said() -> None:
    world, client, control = a_world()
    filled(client, 2)
    receiver = client.receiver("q", credit=2)
    txn_id = control.declare()
    update(receiver, TransactionalState(txn_id, ACCEPTED), 0)
    receiver.detach()
    assert available(world) == [1]
    assert control.discharge(txn_id) == "accepted"
    assert available(world) == [1]
    assert world.stats("q").accepted == 1


@pytest.mark.req("R4", "M35")
def test_the_default_outcome_holds_where_the_consumer_had_settled() -> None:
    world, client, control = a_world()
    filled(client)
    receiver = client.receiver("q", credit=1, default_outcome=Modified(delivery_failed=True))
    txn_id = control.declare()
    receiver.settle(TransactionalState(txn_id, ACCEPTED))
    control.discharge(txn_id, fail=True)
    (message,) = (Message.decode(each) for each in world.peek("q", 1))
    assert message.delivery_count == 1


@pytest.mark.req("R4", "R6")
@pytest.mark.parametrize(
    ("state", "settles"), [(RELEASED, False), (RELEASED, True), (None, False), (None, True)]
)
def test_an_outcome_that_the_link_has_not_fails_the_discharge(
    state: Outcome | None, settles: bool
) -> None:
    world, client, control = a_world()
    filled(client)
    receiver = client.receiver(
        "q", credit=1, outcomes=("amqp:accepted:list",), default_outcome=ACCEPTED
    )
    txn_id = control.declare()
    client.sender("q").post(txn_id, "a")
    said = TransactionalState(txn_id, state)
    if settles:
        receiver.settle(said)
    else:
        update(receiver, said)
    assert control.discharge(txn_id) == ROLLBACK
    assert available(world) == []
    stats = world.stats("q")
    assert (stats.acquired, stats.accepted) == ((0, 1) if settles else (1, 0))


@pytest.mark.req("R4")
def test_a_provisional_outcome_may_be_changed_within_its_transaction() -> None:
    world, client, control = a_world()
    filled(client)
    receiver = client.receiver("q", credit=1)
    txn_id = control.declare()
    update(receiver, TransactionalState(txn_id, ACCEPTED))
    update(receiver, TransactionalState(txn_id, RELEASED))
    receiver.endpoint.deliveries[0].link.session.queue_disposition(True, 0, True, None)
    world.pump()
    control.discharge(txn_id)
    assert available(world) == [0]


@pytest.mark.req("R4", "R7")
def test_a_word_outside_the_transaction_ends_its_control_link() -> None:
    world, client, control = a_world()
    filled(client, 2)
    receiver = client.receiver("q", credit=2)
    one = control.declare()
    client.sender("q").post(one, "a")
    update(receiver, TransactionalState(one, ACCEPTED), 0, 1)
    # Outside of any transaction: it is applied. In another one: that ended with its control link.
    receiver.settle(RELEASED, 0)
    assert control.error == ROLLBACK
    assert available(world) == [0]
    assert world.stats("q").acquired == 1
    second = Controller(client)
    two, three = second.declare(), second.declare()
    update(receiver, TransactionalState(two, ACCEPTED), 1)
    update(receiver, TransactionalState(three, ACCEPTED), 1)
    assert second.error == ROLLBACK
    assert receiver.error == UNKNOWN
    assert available(world) == [0, 1]


@pytest.mark.req("R2", "R4")
@pytest.mark.parametrize("settles", [False, True])
def test_retiring_in_a_transaction_that_is_not_there_detaches(settles: bool) -> None:
    world, client, _ = a_world()
    filled(client)
    receiver = client.receiver("q", credit=1)
    state = TransactionalState(b"no", ACCEPTED)
    if settles:
        receiver.settle(state)
    else:
        update(receiver, state)
    assert receiver.error == UNKNOWN
    assert available(world) == [0]


@pytest.mark.req("R4")
def test_a_browser_has_nothing_to_retire() -> None:
    world, client, control = a_world()
    filled(client)
    browser = client.receiver("q", credit=1, distribution_mode="copy")
    txn_id = control.declare()
    update(browser, TransactionalState(txn_id, ACCEPTED))
    assert browser.endpoint.deliveries[0].settled
    control.discharge(txn_id)
    assert available(world) == [0]


# --- Acquiring ----------------------------------------------------------------------------------


@pytest.mark.req("R5")
def test_what_is_acquired_says_its_transaction_and_is_kept_when_it_is_committed() -> None:
    world, client, control = a_world()
    filled(client, 4)
    receiver = client.receiver("q")
    txn_id = control.declare()
    acquire(receiver, txn_id, 2)
    first, second = receiver.endpoint.deliveries
    assert first.state == second.state == TransactionalState(txn_id)
    update(receiver, TransactionalState(txn_id, ACCEPTED), 0)
    assert world.stats("q").acquired == 2
    assert control.discharge(txn_id) == "accepted"
    stats = world.stats("q")
    assert (stats.accepted, stats.acquired) == (1, 1)
    # The link no longer acquires in a transaction.
    receiver.grant(1)
    assert receiver.endpoint.deliveries[2].state is None
    receiver.settle(ACCEPTED, 1, 2)
    assert world.stats("q").accepted == 3


@pytest.mark.req("R5", "R7")
@pytest.mark.parametrize("end", ["discharge", "control", "receiver"])
@pytest.mark.parametrize("said", [None, ACCEPTED])
def test_what_was_acquired_is_available_again_after_a_rollback(
    said: Outcome | None, end: str
) -> None:
    world, client, control = a_world()
    filled(client, 3)
    receiver = client.receiver("q")
    txn_id = control.declare()
    acquire(receiver, txn_id, 2)
    if said is not None:
        update(receiver, TransactionalState(txn_id, said), 0)
    if end == "receiver":
        receiver.detach()
        # A sent outcome waits for the discharge; the other messages were requeued with the link.
        assert available(world) == ([0, 1, 2] if said is None else [1, 2])
    if end == "control":
        control.link.detach()
        world.pump()
    else:
        assert control.discharge(txn_id, fail=True) == "accepted"
    assert available(world) == [0, 1, 2]
    assert world.stats("q").acquired == 0
    if end != "receiver":
        assert [each.settled for each in receiver.endpoint.deliveries] == [True, True]
        assert receiver.link.credit == 0
    fresh = client.receiver("q", credit=1)
    assert fresh.messages[0].delivery_count == 0


@pytest.mark.req("R5", "R7")
@pytest.mark.parametrize("fail", [False, True])
def test_settled_messages_are_gone_only_with_the_commit(fail: bool) -> None:
    world, client, control = a_world()
    filled(client, 2)
    receiver = client.receiver("q", snd_settle_mode=SND_SETTLED)
    txn_id = control.declare()
    acquire(receiver, txn_id, 2)
    assert receiver.bodies == [0, 1]
    assert world.stats("q").acquired == 2
    control.discharge(txn_id, fail=fail)
    assert available(world) == ([0, 1] if fail else [])
    assert world.stats("q").acquired == 0


@pytest.mark.req("R5")
def test_credit_stays_when_a_transaction_ends_and_what_uses_it_is_outside() -> None:
    _, client, control = a_world()
    receiver = client.receiver("q")
    txn_id = control.declare()
    acquire(receiver, txn_id, 3)
    filled(client, 1)
    control.discharge(txn_id, fail=True)
    # The message was available at once, and the link had credit.
    assert [each.state for each in receiver.endpoint.deliveries[1:]] == [None]
    assert receiver.link.credit == 1


@pytest.mark.req("R5")
def test_a_flow_without_a_transaction_does_not_leave_it_and_one_with_null_does() -> None:
    _, client, control = a_world()
    filled(client, 4)
    receiver = client.receiver("q")
    txn_id = control.declare()
    acquire(receiver, txn_id, 1)
    receiver.grant(1)
    acquire(receiver, None, 1)
    states = [each.state for each in receiver.endpoint.deliveries]
    assert states == [TransactionalState(txn_id)] * 2 + [None]
    control.discharge(txn_id)


@pytest.mark.req("R5")
def test_what_cannot_acquire_in_a_transaction_is_detached() -> None:
    _, client, control = a_world()
    filled(client)
    browser = client.receiver("q", distribution_mode="copy")
    acquire(browser, control.declare(), 1)
    assert browser.error == "amqp:not-implemented"
    receiver = client.receiver("q")
    acquire(receiver, b"no", 1)
    assert receiver.error == UNKNOWN
    assert receiver.bodies == []


@pytest.mark.req("R5")
def test_an_outcome_outside_rolls_back_what_was_acquired_inside() -> None:
    world, client, control = a_world()
    filled(client)
    receiver = client.receiver("q")
    acquire(receiver, control.declare(), 1)
    receiver.settle(ACCEPTED)
    assert control.error == ROLLBACK
    assert available(world) == [0]


@pytest.mark.req("R5")
def test_an_acquired_message_that_is_settled_without_a_word_gets_the_default_outcome() -> None:
    world, client, control = a_world()
    filled(client)
    receiver = client.receiver("q", default_outcome=ACCEPTED)
    txn_id = control.declare()
    acquire(receiver, txn_id, 1)
    receiver.settle(None)
    assert world.stats("q").acquired == 1
    control.discharge(txn_id)
    assert world.stats("q").accepted == 1


# --- Bounds -------------------------------------------------------------------------------------


@pytest.mark.req("R8")
def test_transactions_of_a_session_are_bounded() -> None:
    world, client, control = a_world(limits=Limits(transactions_max=3))
    ids = [control.declare() for _ in range(3)]
    state = control.say(Declare())
    assert state.error.condition == "amqp:resource-limit-exceeded"
    other = Controller(client)
    assert other.say(Declare()).error.condition == "amqp:resource-limit-exceeded"
    client.session = client.joined.client.begin()
    assert Controller(client).declare()
    control.discharge(ids[0])
    assert other.declare()
    assert other.say(Declare()).error.condition == "amqp:resource-limit-exceeded"
    client.cut()
    assert len(world.host.transactions) == 0


@pytest.mark.req("R8")
def test_the_work_of_a_transaction_is_bounded() -> None:
    limits = Limits(transaction_work_max=3)
    world, client, control = a_world(limits=limits)
    sender = client.sender("q")
    txn_id = control.declare()
    sender.post(txn_id, *range(4))
    conditions = [getattr(state.outcome, "error", None) for state in sender.outcomes]
    assert conditions[:3] == [None] * 3
    assert conditions[3].condition == "amqp:resource-limit-exceeded"
    assert control.discharge(txn_id) == "accepted"
    assert available(world) == [0, 1, 2]
    # A settled message or an outcome too many cannot be refused alone: the transaction fails.
    txn_id = control.declare()
    sender.post(txn_id, *range(4), settled=True)
    assert control.discharge(txn_id) == ROLLBACK
    sender.send(3)
    receiver = client.receiver("q", credit=4)
    txn_id = control.declare()
    update(receiver, TransactionalState(txn_id, ACCEPTED))
    assert control.discharge(txn_id) == ROLLBACK
    assert world.stats("q").acquired == 4
    txn_id = control.declare()
    update(receiver, TransactionalState(txn_id, RELEASED), 0, 1, 2)
    assert control.discharge(txn_id) == "accepted"


@pytest.mark.req("R8")
def test_what_is_acquired_is_bounded_too() -> None:
    world, client, control = a_world(limits=Limits(transaction_work_max=3))
    filled(client, 5)
    receiver = client.receiver("q", snd_settle_mode=SND_SETTLED)
    txn_id = control.declare()
    acquire(receiver, txn_id, 5)
    assert receiver.error == "amqp:resource-limit-exceeded"
    assert receiver.bodies == [0, 1, 2]
    assert control.discharge(txn_id) == "accepted"
    assert available(world) == [3, 4]


@pytest.mark.req("R8")
def test_a_fault_in_the_roll_back_of_one_transaction_keeps_no_other_and_ends_no_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, client, control = a_world()
    sender = client.sender("q")
    posted = [control.declare() for _ in range(2)]
    for txn_id in posted:
        sender.post(txn_id, "a")

    def bug() -> None:
        raise ZeroDivisionError("a bug")

    first = next(iter(world.host.transactions._open.values()))
    first.roll_back = bug  # type: ignore[method-assign]
    world.time.now += 60
    world.host.sweep()
    world.host.sweep()
    assert caplog.text.count("ZeroDivisionError: a bug") == 1
    assert [control.discharge(each) for each in posted] == ["amqp:transaction:timeout"] * 2
    assert [world.stats(node.name).failure for node in world.host.space().declarations()] == [None]
    assert available(world) == []


@pytest.mark.req("R8")
def test_a_transaction_that_takes_too_long_is_rolled_back() -> None:
    world, client, control = a_world()
    filled(client)
    receiver = client.receiver("q", credit=1)
    txn_id = control.declare()
    client.sender("q").post(txn_id, "a")
    update(receiver, TransactionalState(txn_id, ACCEPTED))
    world.time.now += 59.9
    world.host.sweep()
    assert world.host.transactions.find(receiver.link, txn_id) is None
    later = control.declare()
    world.time.now += 0.1
    world.host.sweep()
    assert world.host.memory.held == world.stats("q").bytes
    receiver.settle(RELEASED)
    assert available(world) == [0]
    # Links that continue to use it get the error, and so does the attempt to commit it.
    late = client.receiver("q")
    acquire(late, txn_id, 1)
    assert late.error == "amqp:transaction:timeout"
    assert control.discharge(txn_id) == "amqp:transaction:timeout"
    assert control.discharge(later) == "accepted"
    txn_id = control.declare()
    world.time.now += 60
    world.host.sweep()
    assert control.discharge(txn_id, fail=True) == "accepted"


@pytest.mark.req("R1")
def test_a_control_link_may_go_while_it_speaks() -> None:
    world, client, control = a_world()
    control.link.send(Message(Declare()).encode(), settled=True)
    control.link.send(Message(Declare()).encode())
    world.pump()
    assert control.error == "amqp:not-allowed"
    assert len(world.host.transactions) == 0
    assert isinstance(Controller(client).say(Declare()), Declared)
