"""The way in: credit that is never more than the room, and the entries made of messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from brokers import Sending, World
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt import Broker
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.errors import DecodeError, WouldBlock
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Rejected
from amqp_rt.values import Timestamp

OUTLINE = bytes(Message("m").encode())


def conditions(sender: Sending) -> list[str | None]:
    return [
        str(state.error.condition) if isinstance(state, Rejected) and state.error else None
        for state in sender.outcomes
    ]


# --- credit --------------------------------------------------------------------------------


def test_credit_is_a_wide_window_topped_up_at_half() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    assert sender.link.credit == 1_000
    flows = []
    for _ in range(10):
        sender.send(*range(100))
        flows.append(sender.link.credit)
    assert flows == [900, 800, 700, 600, 1_000, 900, 800, 700, 600, 1_000]


@pytest.mark.req("B17")
@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_a_bounded_queue_fills_to_its_bound_and_no_further(length: int) -> None:
    world = World(Queue("q", length_max=length))
    sender = world.client().sender("q")
    sent = 0
    while sender.link.credit:
        sender.send(sent)
        sent += 1
    assert sent == length
    receiver = world.client().receiver("q", credit=1)
    # Unsettled deliveries still take room.
    assert sender.link.credit == 0
    receiver.settle(ACCEPTED)
    assert sender.link.credit == 1


@pytest.mark.slow
@pytest.mark.req("B17")
@given(
    length=st.integers(1, 40),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=30),
)
def test_promises_together_are_never_more_than_the_room(
    length: int, steps: list[tuple[int, int]]
) -> None:
    world = World(Queue("q", length_max=length))
    client = world.client()
    senders = [client.sender("q") for _ in range(2)]
    receiver = client.receiver("q")
    settled = 0
    for action, count in steps:
        if action == 0:
            senders.append(client.sender("q"))
        elif action == 1 and len(senders) > 1:
            senders.pop(count % len(senders)).detach()
        elif action == 2:
            receiver.grant(count)
            deliveries = receiver.endpoint.deliveries
            for delivery in deliveries[settled:]:
                delivery.settle(ACCEPTED)
            settled = len(deliveries)
            world.pump()
        else:
            sender = senders[count % len(senders)]
            sender.send(*range(min(count, sender.link.credit)))
        stats = world.stats("q")
        held = stats.available + stats.acquired
        promised = sum(sender.link.credit for sender in senders)
        assert held + promised <= length
        assert stats.producers == len(senders)
        # Attached senders can send as long as there is any room.
        assert promised > 0 or held == length
        assert sender_outcomes_are_accepted(senders)


def sender_outcomes_are_accepted(senders: list[Sending]) -> bool:
    return all(state == ACCEPTED for sender in senders for state in sender.outcomes)


@pytest.mark.req("B17")
def test_who_waits_is_served_in_turn_when_room_comes() -> None:
    world = World(Queue("q", length_max=2))
    client = world.client()
    first, second = client.sender("q"), client.sender("q")
    assert (first.link.credit, second.link.credit) == (1, 1)
    third = client.sender("q")
    assert third.link.credit == 0
    first.detach()
    assert third.link.credit == 1
    second.send("a")
    third.send("b")
    assert (second.link.credit, third.link.credit) == (0, 0)
    receiver = client.receiver("q", credit=1)
    receiver.settle(ACCEPTED, 0)
    assert (second.link.credit, third.link.credit) == (1, 0)
    receiver.grant(1)
    receiver.settle(ACCEPTED, 1)
    assert (second.link.credit, third.link.credit) == (1, 1)


@pytest.mark.req("B17")
def test_bytes_bound_the_credit_too() -> None:
    world = World(Queue("q", bytes_max=100_000))
    sender = world.client().sender("q")
    sent = 0
    while sender.link.credit:
        sender.send(b"x" * 10_000)
        sent += 1
        assert sent < 100
    assert conditions(sender).count(None) == 9
    assert set(conditions(sender)) <= {None, "amqp:resource-limit-exceeded"}
    stats = world.stats("q")
    assert stats.bytes <= 100_000
    receiver = world.client().receiver("q", credit=100)
    assert sender.link.credit == 0
    receiver.settle(ACCEPTED)
    assert sender.link.credit > 0


@pytest.mark.req("B17")
def test_all_nodes_share_the_memory_of_the_broker() -> None:
    limits = Limits(broker_bytes_max=100_000)
    world = World(Queue("a"), Queue("b"), Topic("t"), limits=limits)
    client = world.client()
    filler = client.sender("a")
    while filler.link.credit:
        filler.send(b"x" * 990)
    other, third = client.sender("b"), client.sender("t")
    assert (other.link.credit, third.link.credit) == (0, 0)
    with pytest.raises(WouldBlock):
        world.host.space().publish("b", OUTLINE + b"x" * 900)
    assert world.host.memory.held <= 100_000
    receiver = client.receiver("a", credit=50)
    assert other.link.credit == 0
    receiver.settle(ACCEPTED)
    assert other.link.credit > 0
    assert third.link.credit > 0
    assert not world.host.memory.waiting


def test_links_that_come_and_go_while_there_is_no_room_are_forgotten() -> None:
    world = World(Queue("q", length_max=1))
    client = world.client()
    first = client.sender("q")
    first.send("m")
    for _ in range(100):
        client.sender("q").detach()
    last = client.sender("q")
    assert last.link.credit == 0
    intake = world.host.space().nodes["q"].intake
    # None of those that have ended is kept.
    assert len(intake.producers) == 2
    assert intake.producers.issuperset(intake._waiting)
    client.receiver("q", credit=1).settle(ACCEPTED)
    assert first.link.credit == 1
    first.detach()
    assert last.link.credit == 1


def test_credit_used_by_aborted_messages_comes_back() -> None:
    world = World(Queue("q", length_max=1))
    sender = world.client().sender("q")
    for _ in range(3):
        delivery = sender.link.send(b"\x00\x53\x75", more=True)
        world.pump()
        delivery.abort()
        world.pump()
        assert sender.link.credit == 1
    assert world.stats("q").enqueued == 0


# --- settlement ----------------------------------------------------------------------------


@pytest.mark.req("M5", "B7")
def test_durable_messages_are_refused_by_who_cannot_keep_them() -> None:
    world = World(Queue("q"), Topic("t"))
    client = world.client()
    sender = client.sender("q")
    sender.send(1, durable=True)
    (outcome,) = sender.outcomes
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:precondition-failed"
    assert world.stats("q").available == 0
    # A topic keeps nothing for anybody who is not there.
    to_topic = client.sender("t")
    to_topic.send(1, durable=True)
    assert to_topic.outcomes == [ACCEPTED]


@pytest.mark.req("M5")
def test_who_wants_it_may_risk_durable_messages_in_memory() -> None:
    world = World(Queue("q"), volatile=True)
    sender = world.client().sender("q")
    sender.send(1, durable=True)
    assert sender.outcomes == [ACCEPTED]


def test_settled_messages_are_taken_too() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    sender.send(1, 2, settled=True)
    assert world.stats("q").available == 2
    assert sender.outcomes == []


# --- the entry factory ---------------------------------------------------------------------

#: payload, condition
MALFORMED = [
    (b"\x00\x53\x70\xc0", "amqp:decode-error"),
    (b"\x00\x53\x70\xc0\x09\x01\x41", "amqp:decode-error"),
    (bytes.fromhex("005370c002014f") + OUTLINE, "amqp:decode-error"),
    (bytes.fromhex("005370a00100") + OUTLINE, "amqp:decode-error"),
    (bytes.fromhex("005372c10501a30161") + OUTLINE, "amqp:decode-error"),
    (bytes.fromhex("005372c1060254017101") + OUTLINE, "amqp:decode-error"),
    (bytes.fromhex("005372d1000000ff00000002") + OUTLINE, "amqp:decode-error"),
    (bytes.fromhex("00537045005370450053754000"), "amqp:decode-error"),
    (b"\xff", "amqp:decode-error"),
]


@pytest.mark.req("B21")
@pytest.mark.parametrize(("payload", "condition"), MALFORMED)
def test_a_malformed_message_is_rejected_and_stops_nothing(payload: bytes, condition: str) -> None:
    world = World(Queue("q"), Topic("t"))
    client = world.client()
    for address in ("q", "t"):
        receiver = client.receiver(address, credit=5)
        sender = client.sender(address)
        sender.link.send(OUTLINE)
        sender.link.send(payload)
        sender.link.send(OUTLINE)
        world.pump()
        assert conditions(sender) == [None, condition, None]
        assert receiver.bodies == ["m", "m"]
    with pytest.raises(DecodeError):
        world.host.space().publish("q", payload)


#: annotations of the message, by policy: whether it is relayed
ANNOTATED = [
    ({"x-opt-a": 1}, {"default": True, "strict": True, "lenient": True}),
    ({"x-a": 1}, {"default": True, "strict": False, "lenient": True}),
    ({"reserved": 1}, {"default": False, "strict": False, "lenient": True}),
]


@pytest.mark.req("M10", "M11")
@pytest.mark.parametrize("policy", ["default", "strict", "lenient"])
@pytest.mark.parametrize(("annotations", "relayed"), ANNOTATED, ids=str)
def test_annotation_keys_by_policy(
    annotations: dict[str, int], relayed: dict[str, bool], policy: str
) -> None:
    world = World(Queue("q"), annotations=policy)
    client = world.client()
    sender = client.sender("q")
    sender.send("first")
    sender.link.send(bytes(Message("a", message_annotations=annotations).encode()))
    sender.link.send(OUTLINE)
    world.pump()
    receiver = client.receiver("q", credit=5)
    if relayed[policy]:
        assert receiver.bodies == ["first", "a", "m"]
        assert receiver.messages[1].message_annotations == annotations
        assert sender.error is None
    else:
        assert receiver.bodies == ["first"]
        assert sender.error == "amqp:not-implemented"
        assert sender.outcomes == [ACCEPTED]


@pytest.mark.req("M9", "M2", "M10")
def test_delivery_annotations_were_for_us_and_do_not_go_on() -> None:
    world = World(Queue("q"), volatile=True)
    client = world.client()
    message = Message(
        "m",
        subject="s",
        durable=True,
        delivery_annotations={"x-opt-hop": 1},
        message_annotations={"x-opt-way": 2},
    )
    client.sender("q").send_raw(bytes(message.encode()))
    receiver = client.receiver("q", credit=1)
    without = Message("m", subject="s", durable=True, message_annotations={"x-opt-way": 2})
    assert receiver.endpoint.deliveries[0].payload == bytes(without.encode())


@pytest.mark.req("M18")
def test_another_message_format_is_relayed_unseen() -> None:
    world = World(Queue("q", max_deliveries=2, dead_letter="dead", ttl_s=9))
    client = world.client()
    client.sender("q").send_raw(b"\xffanything", message_format=0x80013700)
    receiver = client.receiver("q", credit=1)
    (delivery,) = receiver.endpoint.deliveries
    assert (delivery.payload, delivery.message_format) == (b"\xffanything", 0x80013700)
    receiver.settle(Rejected())
    dead = client.receiver("dead", credit=1)
    (delivery,) = dead.endpoint.deliveries
    assert (delivery.payload, delivery.message_format) == (b"\xffanything", 0x80013700)


def test_a_state_that_only_a_transaction_has_detaches() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    sender.send_raw(OUTLINE, state=ACCEPTED)
    assert sender.error == "amqp:transaction:unknown-id"
    assert world.stats("q").available == 0


@pytest.mark.req("M14")
@pytest.mark.parametrize("which", ["check_user_id", "absolute_expiry"])
def test_each_claim_is_checked_by_itself(which: str) -> None:
    world = World(Queue("q", **{which: True}))
    out = world.client().sender("q")
    now = int(world.time.now * 1000)
    out.send("ada's", user_id=b"ada")
    out.send("short", absolute_expiry_time=Timestamp(now + 1_000))
    refused = "amqp:unauthorized-access" if which == "check_user_id" else None
    assert conditions(out) == [refused, None]
    world.time.now += 1
    receiver = world.client().receiver("q", credit=9)
    assert receiver.bodies == (["short"] if refused else ["ada's"])


@pytest.mark.req("M14")
async def test_a_queue_that_was_stored_with_one_option_for_both_has_both(tmp_path: Any) -> None:
    path = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=path) as broker:
        await broker.declare(Queue("q"))
        journal = broker.host.journal
        assert journal is not None
        fields = {"name": "q", "check_properties": True}
        value = msgspec.msgpack.encode(["", "queue", fields])
        ((key, _),) = await journal.call(journal.store.facts, "node")
        await journal.write(lambda unit: unit.put_fact("node", key, value))
    async with Broker(store=path) as broker:
        (queue,) = broker.nodes()
        assert isinstance(queue, Queue)
        assert (queue.check_user_id, queue.absolute_expiry) == (True, True)


@pytest.mark.req("M14")
def test_what_properties_claim_is_checked_where_that_is_wished() -> None:
    world = World(
        Queue("q", check_user_id=True, absolute_expiry=True, dead_letter="dead"), Queue("plain")
    )
    client = world.client()
    out = client.sender("q")
    out.send("nobody may claim that", user_id=b"ada")
    server: Any = client.joined.server
    server.peer.user = "ada"
    now = int(world.time.now * 1000)
    out.send("her own", user_id=b"ada", creation_time=Timestamp(now + 9_999_999))
    out.send("somebody else's", user_id=b"bob")
    out.send("short", absolute_expiry_time=Timestamp(now + 1_000))
    out.send("shorter", absolute_expiry_time=Timestamp(now + 5_000), ttl_ms=500)
    out.send_raw(b"\x00\x53\x73\xc0\x03\x01\x71\x00\x00\x53\x75\xa0\x01x")
    plain = client.sender("plain")
    plain.send("not looked at", user_id=b"bob", absolute_expiry_time=Timestamp(1))
    assert conditions(out) == [
        "amqp:unauthorized-access",
        None,
        "amqp:unauthorized-access",
        None,
        None,
        "amqp:decode-error",
    ]
    assert conditions(plain) == [None]
    receiver = client.receiver("q", credit=1)
    world.time.now += 0.5
    world.host.sweep()
    world.time.now += 0.5
    receiver.grant(9)
    (message,) = receiver.messages
    # The message is forwarded as it arrived.
    assert (message.user_id, message.creation_time) == (b"ada", Timestamp(now + 9_999_999))
    assert [m.body for m in client.receiver("dead", credit=9).messages] == ["short", "shorter"]
    assert client.receiver("plain", credit=1).bodies == ["not looked at"]
