"""``$journal``: what becomes of messages, what that may cost, and who may write there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from brokers import Controller, World

from amqp_rt import Broker
from amqp_rt.broker import LifeCycles, Log, Queue, Topic
from amqp_rt.broker.filtering.positions import Position
from amqp_rt.broker.lifecycles import JOURNAL, life_cycles_by
from amqp_rt.broker.queue.observed import ObservedQueue
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error, Modified, Rejected
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.values import Described, Symbol


def observed(*declared: Any, **options: Any) -> World:
    return World(*declared, life_cycles=LifeCycles(**options))


def events(world: World, *keys: str) -> list[Any]:
    """Return the events of the journal, as the values of *keys*; all values without keys."""
    assert world.host.services.journals is not None
    world.host.services.journals.flush()
    reader = world.client().receiver(
        JOURNAL,
        credit=10_000,
        filter={
            Symbol("s"): Described(Symbol("rabbitmq:stream-offset-spec"), "first"),
        },
    )
    assert reader.error is None
    found = [dict(message.application_properties) for message in reader.messages]
    if not keys:
        return found
    return [tuple(each.get(key) for key in keys) for each in found]


@pytest.mark.req("K8")
def test_the_life_of_messages() -> None:
    world = observed(Queue("q", dead_letter="dead", max_deliveries=2), Queue("none"))
    sender = world.client("maker").sender("q", name="in")
    sender.send("a", "b", "c", "d", "e", message_id="m")
    taker = world.client("taker").receiver("q", credit=4, name="out")
    taker.settle(ACCEPTED, 0)
    taker.settle(RELEASED, 1)
    taker.settle(Modified(delivery_failed=True), 2)
    taker.settle(Rejected(Error("amqp:decode-error", "why")), 3)
    assert events(world, "event", "address", "sequence", "container", "link", "reason") == [
        *(("published", "q", place, "maker", None, None) for place in range(5)),
        *(("delivered", "q", place, "taker", "out", None) for place in range(4)),
        ("accepted", "q", 0, "taker", "out", None),
        ("released", "q", 1, "taker", "out", None),
        ("modified", "q", 2, "taker", "out", None),
        ("rejected", "q", 3, "taker", "out", "amqp:decode-error"),
        ("published", "dead", 0, None, None, None),
        ("dead-lettered", "q", 3, "maker", None, None),
    ]
    whole = events(world)
    assert {each["message-id"] for each in whole} == {"m"}
    assert all(each["size"] > 0 and each["time"] == 1_000_000_000 for each in whole)


@pytest.mark.req("K8")
def test_what_ends_by_itself() -> None:
    world = observed(
        Queue("ring", length_max=1, overflow="drop-head"),
        Queue("latest", last_value_key="properties.subject"),
        Queue("short", ttl_s=1, dead_letter="dead"),
        Queue("plain"),
        Queue("other"),
    )
    client = world.client()
    client.sender("ring").send(1, 2)
    client.sender("latest").send(1, 2, subject="k")
    client.sender("short").send(1)
    client.sender("plain").send(1, 2, 3)
    world.time.now += 2
    world.host.sweep()
    world.move("plain", "other", 1)
    world.purge("plain")
    client.receiver("other", credit=1, snd_settle_mode=1)
    ends = [
        each
        for each in events(world, "event", "address", "sequence", "reason")
        if each[0] != "published"
    ]
    assert ends == [
        ("dropped", "ring", 0, "overflow"),
        ("dropped", "latest", 0, "replaced"),
        ("expired", "short", 0, None),
        ("dead-lettered", "short", 0, "expired"),
        ("moved", "plain", 0, None),
        ("dropped", "plain", 1, "purged"),
        ("dropped", "plain", 2, "purged"),
        ("delivered", "other", 0, None),
        ("accepted", "other", 0, None),
    ]


@pytest.mark.req("K8")
def test_what_a_message_waited_and_for_how_long_it_was_held() -> None:
    world = observed(Queue("q", ttl_s=10, dead_letter="dead"))
    world.client().sender("q").send("a", "b")
    world.time.now += 2
    taker = world.client().receiver("q", credit=1)
    world.time.now += 0.25
    taker.settle(RELEASED, 0)
    world.time.now += 1
    taker.grant(1)
    world.time.now += 0.5
    taker.settle(ACCEPTED, 1)
    world.time.now += 20
    world.host.sweep()
    assert events(world, "event", "sequence", "attempt", "waited-us", "held-us") == [
        ("published", 0, None, None, None),
        ("published", 1, None, None, None),
        ("delivered", 0, 1, 2_000_000, None),
        ("released", 0, 1, None, 250_000),
        ("delivered", 0, 2, 1_000_000, None),
        ("accepted", 0, 2, None, 500_000),
        ("expired", 1, None, 23_750_000, None),
        ("published", 0, None, None, None),
        ("dead-lettered", 1, None, None, None),
    ]


@pytest.mark.req("K8")
def test_an_event_after_a_lost_link_names_that_link() -> None:
    world = observed(Queue("q"))
    client = world.client("taker")
    assert client.receiver("q", name="out", credit=1, timeout=30).error is None
    world.client("maker").sender("q", name="in").send("a")
    client.cut()
    world.time.now += 31
    world.host.sweep()
    assert world.stats("q").failure is None
    assert events(world, "event", "container", "link") == [
        ("published", "maker", None),
        ("delivered", "taker", "out"),
        ("released", "taker", "out"),
    ]


@pytest.mark.req("K8")
async def test_deliveries_of_a_durable_terminus_are_recorded() -> None:
    async with Broker(store=MemoryStore(), journal=True) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with (
            peer.sender("q") as sender,
            peer.receiver("q", name="out", durable=2) as receiver,
        ):
            await sender.send("a", durable=True)
            delivery = await receiver.receive()
            assert delivery.body == "a"
            delivery.accept()
        stats = broker.stats("q")
        assert (stats.failure, stats.delivered, stats.accepted) == (None, 1, 1)


@pytest.mark.req("K8")
def test_as_many_messages_are_timed_as_may_be_and_no_more() -> None:
    world = World(Queue("q"), life_cycles=LifeCycles(), limits=Limits(journal_timed_max=2))
    world.client().sender("q").send(*range(4))
    taker = world.client().receiver("q", credit=4, settle=ACCEPTED)
    assert taker.error is None
    timed = [
        each for each in events(world, "event", "sequence", "waited-us") if each[2] is not None
    ]
    assert timed == [("delivered", 0, 0), ("delivered", 1, 0)]
    # Messages that have left make room for others.
    world.client().sender("q").send(5)
    taker.grant(1)
    assert events(world, "event", "sequence", "waited-us")[-2:] == [
        ("delivered", 4, 0),
        ("accepted", 4, None),
    ]


@pytest.mark.req("K8")
def test_topics_have_the_life_of_each_copy() -> None:
    world = observed(Topic("t"))
    readers = [world.client(name).receiver("t", credit=1) for name in ("a", "b")]
    world.client("maker").sender("t").send(1)
    readers[0].settle(ACCEPTED)
    assert sorted(events(world, "event", "container")) == [
        ("accepted", "a"),
        ("delivered", "a"),
        ("delivered", "b"),
        ("published", "maker"),
        ("published", "maker"),
    ]


@pytest.mark.req("K8")
def test_what_is_in_a_transaction_shows_when_it_is_committed() -> None:
    world = observed(Queue("q"))
    client = world.client()
    controller = Controller(client)
    sender = client.sender("q")
    for fail in (True, False):
        txn_id = controller.declare()
        sender.post(txn_id, "x")
        assert events(world) == []
        controller.discharge(txn_id, fail=fail)
    assert events(world, "event") == [("published",)]


@pytest.mark.req("K8")
def test_off_it_is_not_there() -> None:
    world = World(Queue("q"), Topic("t"))
    assert world.host.services.journals is None
    assert type(world.host.space().nodes["q"].held) is MessageQueue
    assert [each.name for each in world.host.space().declarations()] == ["q", "t"]
    assert world.client().receiver(JOURNAL).error == "amqp:not-found"


@pytest.mark.req("K8")
def test_only_some_addresses_and_messages() -> None:
    world = observed(
        Queue("orders-1"), Queue("orders-2"), Queue("other"), addresses=("orders-*",), every=3
    )
    for address in ("orders-1", "other"):
        world.client().sender(address).send(*range(7))
        world.client().receiver(address, credit=10, settle=ACCEPTED)
    assert type(world.host.space().nodes["other"].held) is MessageQueue
    assert type(world.host.space().nodes["orders-2"].held) is ObservedQueue
    assert {each[0] for each in events(world, "address")} == {"orders-1"}
    assert {each[0] for each in events(world, "sequence")} == {0, 3, 6}
    assert len(events(world)) == 9


@pytest.mark.req("K8")
def test_there_is_a_bound_and_what_was_lost_is_counted() -> None:
    world = observed(Queue("q"), per_second=10)
    sender = world.client().sender("q")
    sender.send(*range(25))
    assert events(world, "event", "count") == [*[("published", None)] * 10, ("lost", 15)]
    world.time.now += 0.5
    sender.send(*range(25))
    assert events(world, "event", "count")[11:] == [*[("published", None)] * 5, ("lost", 20)]
    world.time.now += 3_600
    sender.send(*range(25))
    assert events(world, "event", "count")[17:] == [*[("published", None)] * 10, ("lost", 15)]


@pytest.mark.req("K8")
def test_it_keeps_no_more_than_it_may() -> None:
    world = observed(Queue("q"), max_bytes=10_000, max_age_s=60, per_second=100_000)
    sender = world.client().sender("q")
    for _ in range(20):
        sender.send(*range(50))
        assert world.host.services.journals is not None
        world.host.services.journals.flush()
    stats = world.log_stats(JOURNAL).partitions[0]
    assert stats.next == 1_000
    assert stats.first > 800
    assert stats.bytes < 20_000
    world.time.now += 100
    world.host.sweep()
    assert world.log_stats(JOURNAL).partitions[0].first == 1_000


@pytest.mark.req("K8")
def test_only_the_broker_writes_to_the_journal() -> None:
    world = observed(Queue("q"), Queue("back", return_to_sender=True, max_deliveries=1))
    client = world.client()
    for address in (JOURNAL, f"{JOURNAL}/partitions/0"):
        assert client.sender(address).error == "amqp:not-allowed"
        relayed = client.sender(None)
        relayed.send("x", to=address)
        assert relayed.outcomes[0].error.condition == "amqp:not-allowed"
    client.sender("q").send("x")
    with pytest.raises(AmqpError, match="only the broker itself writes"):
        world.move("q", JOURNAL, 1)
    client.sender("back").send("x", reply_to=JOURNAL)
    client.receiver("back", credit=1, settle=Rejected())
    assert "x" not in [each.get("body") for each in events(world)]
    assert events(world, "event", "reason")[-1] == ("dropped", None)


@pytest.mark.req("K8")
@pytest.mark.req("B25")
def test_each_virtual_host_has_its_own() -> None:
    world = observed(Queue("q"))
    world.host.spaces.open("b").declare(Queue("q"))
    world.host.space("b").publish("q", b"\x00\x53\x77\xa1\x01x")
    assert events(world) == []
    assert world.host.services.journals is not None
    assert world.host.space("b").find(JOURNAL).log_stats().partitions[0].next == 1


@pytest.mark.req("K8")
async def test_a_store_keeps_it(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    first = {"s": Described(Symbol("rabbitmq:stream-offset-spec"), "first")}
    async with Broker(store=store, journal=True) as broker:
        await broker.declare(Queue("q"))
        async with broker.local() as peer, peer.sender("q") as out:
            await out.send("x", durable=True)
            # The event is visible once it is in the log, whenever that may be.
            async with peer.receiver(JOURNAL, filter=first) as reader:
                await reader.receive()
            await broker.host.wait_kept()
    for journal in (True, False):
        async with Broker(store=store, journal=journal) as broker, broker.local() as peer:
            async with peer.receiver(JOURNAL, filter=first) as reader:
                record = await reader.receive()
                assert record.message.application_properties["event"] == "published"
            held = broker.host.space().nodes[JOURNAL]
            assert held.is_sealed is journal


@pytest.mark.req("K8")
def test_the_name_is_taken() -> None:
    with pytest.raises(AmqpError, match="exists and is no log"):
        observed(Queue(JOURNAL), Queue("q"))
    # A log of that name is taken, with its own retention.
    world = observed(Log(JOURNAL, max_age_s=5), Queue("q"))
    world.client().sender("q").send("x")
    assert len(events(world)) == 1


OPTIONS: list[tuple[str, Any]] = [
    ("", LifeCycles()),
    (
        "every=10&addresses=a-*&addresses=b&max_age_s=1.5",
        LifeCycles(every=10, addresses=("a-*", "b"), max_age_s=1.5),
    ),
    ("evry=1", "there is no option 'evry'; is 'every' meant?"),
    ("every=0", "every is at least 1, not 0"),
    ("max_age_s=0", "max_age_s is more than 0"),
    ("per_second=many", "Expected `int`"),
    ("every", "bad query field"),
]


@pytest.mark.parametrize(("text", "expected"), OPTIONS)
def test_options_in_one_line(text: str, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(AmqpError, match=re.escape(expected)):
            life_cycles_by(text)
    else:
        assert life_cycles_by(text) == expected


def test_positions_are_those_of_any_log() -> None:
    world = observed(Queue("q"))
    world.client().sender("q").send(*range(5))
    assert len(events(world)) == 5
    held: Any = world.host.space().nodes[JOURNAL].held
    assert held.subscribe([0], Position("offset", 3)).behind == 2
