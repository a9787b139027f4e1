"""Logs that send batches of records to readers that want them."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Receiving, World

from amqp_rt.batches import RECORD_BATCH, RECORD_BATCHES, RECORD_HEAD, read_records
from amqp_rt.broker.log.annotations import OFFSET
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.fronts.base import SND_SETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import RELEASED
from amqp_rt.termini import PAUSES
from amqp_rt.values import Described, Symbol, Timestamp

pytestmark = pytest.mark.req("K4")

SELECTOR = Symbol("apache.org:selector-filter:string")
SPEC = Symbol("rabbitmq:stream-offset-spec")


def begin(position: Any) -> dict[Symbol, Any]:
    return {SPEC: Described(SPEC, position)}


def reader(world: World, address: str = "log", credit: int = 1_000, **options: Any) -> Receiving:
    options.setdefault("filter", begin("first"))
    client = world.client(limits=options.pop("limits", None))
    return client.receiver(
        address, credit=credit, desired_capabilities=(RECORD_BATCHES,), **options
    )


def batches(receiving: Receiving) -> list[list[tuple[int, Any]]]:
    """Offsets and bodies of each batch."""
    found = []
    for delivery in receiving.endpoint.deliveries:
        assert delivery.message_format == RECORD_BATCH
        offsets, _, payloads = read_records(delivery.payload)
        bodies = [Message.decode(payload).body for payload in payloads]
        found.append(list(zip(offsets, bodies, strict=True)))
    return found


def records(receiving: Receiving) -> list[tuple[int, Any]]:
    return [each for batch in batches(receiving) for each in batch]


def test_records_are_sent_as_they_are_kept_and_many_at_a_time() -> None:
    world = World(Log("log"))
    world.time.now = 1_234.5
    sender = world.client().sender("log")
    sender.send(*range(100), message_annotations={OFFSET: "forged"}, durable=False)
    found = reader(world)
    assert found.link.offered_capabilities == (RECORD_BATCHES,)
    assert batches(found) == [[(number, number) for number in range(100)]]
    (delivery,) = found.endpoint.deliveries
    _, times, payloads = read_records(delivery.payload)
    assert times == [1_234_500] * 100
    # The annotations are the sender's only: the broker's offset is in the head of the record.
    assert Message.decode(payloads[7]).message_annotations == {OFFSET: "forged"}
    assert world.stats("log").delivered == 100
    # Later records arrive at once, and once only, whatever the outcome.
    found.settle(RELEASED)
    sender.send(100)
    assert records(found)[100:] == [(100, 100)]


def test_one_credit_is_one_batch_of_bounded_size() -> None:
    world = World(Log("log"), limits=Limits(log_batch_bytes_max=1_000))
    world.client().sender("log").send(*(bytes(400) for _ in range(10)), bytes(5_000), bytes(400))
    found = reader(world, credit=2, snd_settle_mode=SND_SETTLED)
    assert [len(batch) for batch in batches(found)] == [2, 2]
    assert found.link.credit == 0
    found.grant(100)
    # A record that is larger than a batch may be has a batch of its own.
    assert [len(batch) for batch in batches(found)] == [2, 2, 2, 2, 2, 1, 1]
    sizes = [len(delivery.payload) for delivery in found.endpoint.deliveries]
    assert all(size <= 1_000 for size in sizes[:5])
    assert [offset for offset, _ in records(found)] == list(range(12))
    assert found.link.credit == 95
    found.drain()
    assert found.link.credit == 0


def test_a_batch_is_no_larger_than_its_reader_takes() -> None:
    world = World(Log("log"))
    world.client().sender("log").send(*(bytes(400) for _ in range(5)), bytes(2_000))
    found = reader(world, limits=Limits(message_size_max=1_000))
    assert [len(batch) for batch in batches(found)] == [2, 2, 1]
    # The last one would look as if it had never been there.
    assert found.error == "amqp:link:message-size-exceeded"


@pytest.mark.parametrize("position", [4, Timestamp(1_000_004_000)])
def test_a_reader_begins_where_it_says_and_gets_what_it_wants(position: Any) -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    for number in range(10):
        sender.send(number, application_properties={"n": number % 3})
        world.time.now += 1
    wanted = {SELECTOR: Described(SELECTOR, "n = 1")}
    found = reader(world, filter={**begin(position), **wanted})
    assert records(found) == [(4, 4), (7, 7)]
    found.drain()
    assert found.link.credit == 0
    nothing = reader(world, filter={**begin(8), **wanted})
    assert records(nothing) == []
    sender.send(10, application_properties={"n": 1})
    assert records(nothing) == [(10, 10)]


def test_a_batch_has_records_of_one_partition() -> None:
    world = World(Log("log", partitions=2))
    for partition in (0, 1):
        world.client().sender(f"log/partitions/{partition}").send("a", "b", "c")
    assert batches(reader(world)) == [[(0, "a"), (1, "b"), (2, "c")]] * 2
    assert records(reader(world, "log/partitions/1", filter=begin(1))) == [(1, "b"), (2, "c")]


def test_what_retention_has_dropped_is_missing() -> None:
    world = World(Log("log"), limits=Limits(log_bytes_max=8_000))
    world.client().sender("log").send(*(bytes(500) for _ in range(50)))
    (partition,) = world.log_stats("log").partitions
    assert partition.first > 0
    offsets = [offset for offset, _ in records(reader(world, filter=begin(0)))]
    assert offsets == list(range(partition.first, 50))


def test_a_record_of_another_format_is_not_looked_into() -> None:
    """Not even one that says it is a batch: only links that have asked get batches."""
    world = World(Log("log"))
    inner = RECORD_HEAD.pack(99, 0, 0, 0)
    sender = world.client().sender("log")
    sender.link.send(inner, message_format=RECORD_BATCH)
    world.pump()
    (delivery,) = reader(world).endpoint.deliveries
    assert read_records(delivery.payload)[::2] == ([0], [inner])
    assert RECORD_HEAD.unpack_from(delivery.payload)[2] == RECORD_BATCH
    single = world.client().receiver("log", credit=10, filter=begin("first"))
    assert [each.payload for each in single.endpoint.deliveries] == [inner]


@pytest.mark.parametrize("declared", [Queue("node"), Topic("node")], ids=repr)
def test_other_nodes_offer_no_batches(declared: Any) -> None:
    world = World(declared)
    found = reader(world, "node", filter=None)
    assert found.link.offered_capabilities == (PAUSES,)
    world.client().sender("node").send("a")
    assert found.bodies == ["a"]
