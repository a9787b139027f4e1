"""Logs in memory: offsets, positions, partitions, retention, and readers that do not wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Receiving, World

from amqp_rt.broker.kinds.logs import LogNode
from amqp_rt.broker.log.annotations import annotate_record
from amqp_rt.broker.log.records import Record
from amqp_rt.broker.nodes import Log, Queue
from amqp_rt.errors import AmqpError
from amqp_rt.fronts.base import SND_SETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, rejected
from amqp_rt.values import Described, Symbol, Timestamp, ULong

SELECTOR = Symbol("apache.org:selector-filter:string")
SPEC = Symbol("rabbitmq:stream-offset-spec")


def eh(text: str) -> dict[Symbol, Any]:
    """A start position as clients of Event Hubs say it."""
    return {SELECTOR: Described(SELECTOR, "amqp.annotation." + text)}


def rabbit(value: Any) -> dict[Symbol, Any]:
    """A start position as clients of RabbitMQ say it."""
    return {SPEC: Described(SPEC, value)}


FIRST = rabbit("first")


def reader(world: World, address: str = "log", credit: int = 1_000, **options: Any) -> Receiving:
    options.setdefault("filter", FIRST)
    return world.client().receiver(address, credit=credit, **options)


def offsets(receiving: Receiving) -> list[int]:
    return [int(message.message_annotations["x-opt-offset"]) for message in receiving.messages]


@pytest.mark.req("B27", "K4", "M30")
def test_every_reader_gets_everything_in_order_whatever_it_says() -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    sender.send(*range(5))
    one, two = reader(world), reader(world, credit=2)
    for index, outcome in enumerate((ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("x"))):
        one.settle(outcome, index)
    sender.send(5)
    two.grant(10)
    late = reader(world, snd_settle_mode=SND_SETTLED)
    assert one.bodies == two.bodies == late.bodies == list(range(6))
    assert offsets(one) == offsets(two) == list(range(6))
    assert sender.outcomes == [ACCEPTED] * 6
    stats = world.stats("log")
    assert (stats.kind, stats.available, stats.acquired) == ("log", 6, 0)
    assert (stats.consumers, stats.producers) == (3, 1)
    assert (stats.enqueued, stats.delivered) == (6, 18)
    assert one.link.source.distribution_mode == "copy"


@pytest.mark.req("K4")
def test_a_delivery_says_where_its_record_is() -> None:
    world = World(Log("log", partitions=2))
    world.time.now = 1_234.5
    world.client().sender("log/partitions/1").send(
        "a", message_annotations={"x-opt-mine": "kept", "x-opt-offset": "forged"}, durable=False
    )
    world.client().sender("log/Partitions/1").send("b")
    found = reader(world)
    first, second = found.messages
    assert first.message_annotations == {
        "x-opt-mine": "kept",
        "x-opt-offset": "0",
        "x-opt-sequence-number": 0,
        "x-opt-enqueued-time": Timestamp(1_234_500),
        "x-stream-offset": ULong(0),
        "x-opt-partition-id": "1",
    }
    assert type(first.message_annotations["x-stream-offset"]) is ULong
    assert second.message_annotations["x-opt-sequence-number"] == 1
    incarnation = world.log_stats("log").incarnation
    assert found.link.properties[Symbol("x-opt-incarnation")] == incarnation
    world.host.space().delete("log")
    world.host.space().declare(Log("log"))
    assert world.log_stats("log").incarnation != incarnation


@pytest.mark.req("K4")
@pytest.mark.parametrize("offset", [0, 127, 128, 2**40, 2**63 - 1])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"durable": True, "ttl_ms": 5},
        {"delivery_annotations": {Symbol("x-hop"): 1}, "priority": 9},
        {"body": bytes(40_000), "message_id": 1},
    ],
)
def test_the_place_of_a_record_is_written_as_a_map_of_annotations_is(
    offset: int, said: dict[str, Any]
) -> None:
    """Records with annotations of their own, which are the long way, and those without."""
    own = {Symbol("x-opt-mine"): "kept"}
    plain, marked = (
        Message(**said, message_annotations=annotations).encode() for annotations in (None, own)
    )

    def sent(payload: bytes) -> Message:
        pieces = annotate_record(1_023, offset, Record(1_700_000_000_123, payload))
        return Message.decode(pieces if isinstance(pieces, bytes) else b"".join(pieces))

    short, long = sent(plain), sent(marked)
    assert own | dict(short.message_annotations) == dict(long.message_annotations)
    for key, value in short.message_annotations.items():
        assert type(value) is type(long.message_annotations[key])
    assert (short.bare, short.header) == (long.bare, long.header)
    assert short.bare == Message.decode(plain).bare


#: A second passes between two of the ten records, which are enqueued from 1,000,000 s on.
POSITIONS: list[tuple[dict[Symbol, Any] | None, int]] = [
    (None, 10),
    (rabbit("first"), 0),
    (rabbit("last"), 9),
    (rabbit("next"), 10),
    (rabbit(ULong(4)), 4),
    (rabbit(0), 0),
    (rabbit(10), 10),
    (rabbit(Timestamp(1_000_004_000)), 4),
    (rabbit(Timestamp(1_000_003_001)), 4),
    (rabbit(Timestamp(0)), 0),
    (rabbit("3s"), 7),
    (rabbit("1Y"), 0),
    (eh("x-opt-offset > '-1'"), 0),
    (eh("x-opt-offset > '@latest'"), 10),
    (eh("x-opt-offset >= '@latest'"), 9),
    (eh("x-opt-offset > '4'"), 5),
    (eh("x-opt-offset >= '4'"), 4),
    (eh("x-opt-sequence-number > '4'"), 5),
    (eh("x-opt-sequence-number >= 4"), 4),
    (eh("x-opt-sequence-number > -1"), 0),
    (eh("x-opt-enqueued-time > '1000004000'"), 5),
    (eh("x-opt-enqueued-time >= 1000004000"), 4),
    (eh("x-opt-enqueuedtimeutc > 1000003999"), 4),
]


@pytest.mark.req("B27", "K4", "M29")
@pytest.mark.parametrize(("asked", "first"), POSITIONS, ids=str)
def test_a_reader_begins_where_it_says(asked: dict[Symbol, Any] | None, first: int) -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    for number in range(10):
        sender.send(number)
        world.time.now += 1
    found = reader(world, filter=asked)
    assert found.bodies == list(range(first, 10))
    assert found.link.source.filter == asked
    sender.send(10)
    assert found.bodies == list(range(first, 11))


@pytest.mark.req("K4")
def test_a_position_that_is_still_to_come_is_waited_for() -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    sender.send(0)
    by_offset = reader(world, filter=rabbit(2))
    by_time = reader(world, filter=rabbit(Timestamp(1_000_010_000)))
    sender.send(1, 2)
    world.time.now += 10
    sender.send(3)
    assert by_offset.bodies == [2, 3]
    assert by_time.bodies == [3]


@pytest.mark.req("K4", "M28")
@pytest.mark.parametrize(
    "asked",
    [
        rabbit("sometime"),
        rabbit(True),
        eh("x-opt-offset > 'abc'"),
        eh("x-opt-offset > '-5'"),
        {**eh("x-opt-offset > '1'"), **rabbit("first")},
    ],
    ids=str,
)
def test_what_is_no_position_is_refused(asked: dict[Symbol, Any]) -> None:
    world = World(Log("log"))
    assert world.client().receiver("log", filter=asked).error == "amqp:invalid-field"


@pytest.mark.req("B27", "M27")
def test_other_filters_apply_beside_the_position() -> None:
    world = World(Log("log"))
    sender = world.client("me").sender("log")
    for number in range(6):
        sender.send(number, priority=number, application_properties={"n": number})
    selector = {
        **rabbit(2),
        Symbol("s"): Described(SELECTOR, "n <> 3 AND JMSPriority < 5"),
    }
    found = reader(world, filter=selector)
    assert found.bodies == [2, 4]
    assert offsets(found) == [2, 4]
    found.drain()
    assert found.link.credit == 0
    by_place = {
        **FIRST,
        Symbol("a"): Described(
            Symbol("amqp:message-annotations-filter"), {Symbol("x-opt-offset"): "3"}
        ),
    }
    assert reader(world, filter=by_place).bodies == [3]
    mine = {**FIRST, Symbol("no-local"): Described(Symbol("apache.org:no-local-filter:list"), [])}
    assert world.client("me").receiver("log", credit=9, filter=mine).bodies == []


def test_a_drained_reader_is_at_the_end() -> None:
    world = World(Log("log"))
    world.client().sender("log").send(*range(3))
    found = reader(world, credit=10)
    found.drain()
    assert (found.bodies, found.link.credit) == ([0, 1, 2], 0)


@pytest.mark.req("K4")
def test_partitions() -> None:
    world = World(Log("log", partitions=3))
    one, two = (world.client().sender("log") for _ in range(2))
    one.send(*range(6))
    two.send("a")
    for key in ("x", "y", "z", b"x"):
        for number in range(3):
            one.send((key, number), message_annotations={"x-opt-partition-key": key})
    parts = [reader(world, f"log/ConsumerGroups/$Default/Partitions/{n}") for n in range(3)]
    whole = reader(world)
    # Without a key each in turn, of every link on its own.
    assert [part.bodies[:2] for part in parts] == [[0, 3], [1, 4], [2, 5]]
    assert parts[0].bodies[2] == "a"
    places: dict[Any, set[int]] = {}
    for number, part in enumerate(parts):
        assert offsets(part) == list(range(len(part.bodies)))
        for body in part.bodies:
            if isinstance(body, list):
                places.setdefault(body[0], set()).add(number)
    # A key has one partition, always the same: CRC-32 of its UTF-8, modulo their number.
    assert places == {"x": {0}, "y": {1}, "z": {2}, b"x": {0}}
    assert sorted(map(str, whole.bodies)) == sorted(
        str(body) for part in parts for body in part.bodies
    )
    assert world.client().receiver("log/partitions/3").error == "amqp:not-found"
    assert world.client().sender("log/partitions/9").error == "amqp:not-found"
    assert parts[1].link.source.address == "log/ConsumerGroups/$Default/Partitions/1"
    # The links of its partitions are links of the log.
    assert world.stats("log").consumers == 4
    world.host.space().delete("log")
    world.pump()
    assert parts[2].error == whole.error == "amqp:resource-deleted"


@pytest.mark.req("K4")
def test_retention_by_age_drops_whole_blocks() -> None:
    world = World(Log("log", max_age_s=80))
    sender = world.client().sender("log")
    old = reader(world, credit=1)
    for number in range(20):
        sender.send(number)
        world.time.now += 10
    world.host.sweep()
    (partition,) = world.log_stats("log").partitions
    assert (partition.first, partition.next) == (12, 20)
    # A reader that was further behind continues with the first record that is left, and sees its offset.
    old.grant(100)
    assert offsets(old) == [0, *range(12, 20)]
    assert offsets(reader(world, filter=rabbit(3))) == list(range(12, 20))
    world.time.now += 1_000
    world.host.sweep()
    (partition,) = world.log_stats("log").partitions
    assert (partition.first, partition.next, partition.bytes) == (20, 20, 0)
    assert world.host.memory.held == 0
    sender.send("new")
    assert offsets(reader(world)) == [20]


@pytest.mark.req("K4")
def test_retention_by_bytes() -> None:
    world = World(Log("log", max_bytes=8_000))
    sender = world.client().sender("log")
    for number in range(200):
        sender.send(bytes(100), subject=str(number))
    (partition,) = world.log_stats("log").partitions
    assert partition.next == 200
    assert 7_000 - 200 < partition.bytes <= 8_000
    assert world.host.memory.held == partition.bytes
    assert offsets(reader(world)) == list(range(partition.first, 200))


@pytest.mark.req("K4")
def test_retention_by_bytes_drops_a_block_as_soon_as_it_has_to_and_no_sooner() -> None:
    bound = 8_000
    world = World(Log("log", max_bytes=bound))
    sender = world.client().sender("log")
    first = size = dropped = 0
    for number in range(200):
        sender.send(bytes(100))
        (partition,) = world.log_stats("log").partitions
        size = size or partition.bytes
        assert partition.bytes == (number + 1 - partition.first) * size <= bound
        if partition.first > first:
            assert partition.bytes + (partition.first - first) * size > bound
            dropped += 1
        first = partition.first
    assert dropped > 5


@pytest.mark.req("K4")
def test_time_never_goes_back() -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    sender.send(0)
    world.time.now -= 100
    sender.send(1)
    world.time.now += 200
    sender.send(2)
    times = [
        int(message.message_annotations["x-opt-enqueued-time"])
        for message in reader(world).messages
    ]
    assert times == [1_000_000_000, 1_000_000_000, 1_000_100_000]
    assert reader(world, filter=rabbit(Timestamp(1_000_000_001))).bodies == [2]


@pytest.mark.req("M5")
def test_without_a_store_a_durable_record_is_refused() -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    sender.send(0, durable=True)
    assert sender.outcomes[0].error.condition == "amqp:precondition-failed"
    sender.send(1, durable=False)
    assert reader(world).bodies == [1]
    volatile = World(Log("log"), volatile=True)
    volatile.client().sender("log").send(0, durable=True)
    assert reader(volatile).bodies == [0]


@pytest.mark.slow
@pytest.mark.req("K4")
def test_a_slow_reader_delays_no_other() -> None:
    world = World(Log("log", max_bytes=100_000))
    asleep = reader(world, credit=0)
    awake = reader(world, credit=0)
    sender = world.client().sender("log")
    for number in range(3_000):
        sender.send(number)
        awake.grant(1)
    assert awake.bodies == list(range(3_000))
    assert sender.outcomes == [ACCEPTED] * 3_000
    assert world.host.memory.held <= 100_000
    asleep.grant(1)
    first = world.log_stats("log").partitions[0].first
    assert offsets(asleep) == [first]
    assert first > 0


def test_a_reader_far_behind_takes_turns_with_the_rest() -> None:
    world = World(Log("log"))
    sender = world.client().sender("log")
    for start in range(0, 3_000, 500):
        sender.send(*range(start, start + 500))
    found = reader(world, credit=5_000, filter={**FIRST, Symbol("s"): Described(SELECTOR, "n = 1")})
    # The reader has examined some records, and continues in a later turn.
    ((log, _),) = world.host.turns.unfinished
    assert log.readers
    assert found.bodies == []
    for _ in range(4):
        world.host.turns.run_pending()
    assert not world.host.turns.unfinished
    sender.send("it", application_properties={"n": 1})
    assert found.bodies == ["it"]


def test_a_message_of_another_format_goes_as_it_is() -> None:
    world = World(Log("log", partitions=2))
    world.client().sender("log").send_raw(b"\xff\x00anything", message_format=0x80013700)
    found = reader(world)
    (delivery,) = found.endpoint.deliveries
    assert (delivery.payload, delivery.message_format) == (b"\xff\x00anything", 0x80013700)


def test_a_record_that_is_too_large_for_a_link_ends_it() -> None:
    world = World(Log("log"))
    world.client().sender("log").send(bytes(5_000), 1)
    small = world.client(limits=Limits(message_size_max=1_000)).receiver(
        "log", credit=5, filter=FIRST
    )
    # To leave it out would look as if it had never been there.
    assert small.error == "amqp:link:message-size-exceeded"
    assert small.bodies == []


@pytest.mark.req("K4")
async def test_cursors_and_holds() -> None:
    world = World(Log("log", partitions=2, max_age_s=80))
    host = world.host
    assert host.space().find("log").cursor("g") == {}
    await host.space().find("log").set_cursor("g", {0: 5})
    await (
        host.space()
        .find("log")
        .set_cursor("g", {1: 7}, incarnation=host.space().find("log").log_stats().incarnation)
    )
    assert host.space().find("log").cursor("g") == {0: 5, 1: 7}
    assert host.space().find("log").log_stats().groups == ["g"]
    await host.space().find("log").set_cursor("g", {})
    assert host.space().find("log").log_stats().groups == []
    for offsets_, condition in (({2: 0}, "invalid-field"), ({0: -1}, "invalid-field")):
        with pytest.raises(AmqpError) as failed:
            await host.space().find("log").set_cursor("g", offsets_)
        assert failed.value.condition == f"amqp:{condition}"
    with pytest.raises(AmqpError, match="another log now"):
        await host.space().find("log").hold("h", {0: 0}, 1, incarnation="other")
    with pytest.raises(AmqpError, match="no node"):
        host.space().find("nothing").cursor("g")
    host.space().declare(Queue("q"))
    with pytest.raises(AmqpError, match="'q' is not a log"):
        host.space().find_kind("q", LogNode).cursor("g")

    sender = world.client().sender("log/partitions/0")
    for number in range(20):
        sender.send(number)
        world.time.now += 10
    # The hold was made when no record was too old; then time passes.
    await host.space().find("log").hold("h", {0: 14}, 150)
    world.time.now += 100
    host.sweep()
    assert host.space().find("log").log_stats().partitions[0].first == 14
    world.time.now += 60
    host.sweep()
    assert host.space().find("log").log_stats().partitions[0].first == 20


@pytest.mark.req("K4")
def test_the_partitions_of_a_log_are_bounded() -> None:
    world = World(limits=Limits(log_partitions_max=3))
    world.host.space().declare(Log("log", partitions=3))
    with pytest.raises(AmqpError, match="at most 3 partitions") as failed:
        world.host.space().declare(Log("more", partitions=4))
    assert failed.value.condition == "amqp:resource-limit-exceeded"


@pytest.mark.req("K4")
def test_a_log_in_memory_is_bounded_unless_it_says_otherwise() -> None:
    world = World(Log("log"), Log("large", max_bytes=50_000), limits=Limits(log_bytes_max=8_000))
    for address in ("log", "large"):
        sender = world.client().sender(address)
        for _ in range(200):
            sender.send(bytes(100))
    (bounded,) = world.log_stats("log").partitions
    assert 7_000 - 200 < bounded.bytes <= 8_000
    assert bounded.first > 0
    (large,) = world.log_stats("large").partitions
    assert large.bytes > 8_000
    assert large.first == 0


@pytest.mark.req("K4")
async def test_the_groups_of_a_log_are_bounded() -> None:
    host = World(Log("log"), limits=Limits(log_groups_max=2)).host
    for group in ("a", "b"):
        await host.space().find("log").set_cursor(group, {0: 1})
    with pytest.raises(AmqpError, match="has 2 groups already") as failed:
        await host.space().find("log").set_cursor("c", {0: 1})
    assert failed.value.condition == "amqp:resource-limit-exceeded"
    await host.space().find("log").set_cursor("a", {0: 2})
    await host.space().find("log").set_cursor("b", {})
    await host.space().find("log").set_cursor("c", {0: 1})
    assert host.space().find("log").log_stats().groups == ["a", "c"]


@pytest.mark.req("K4")
async def test_the_holds_on_a_log_are_bounded_in_number_and_time() -> None:
    host = World(Log("log"), limits=Limits(log_holds_max=2, log_hold_max_s=60)).host
    for holder in ("a", "b"):
        await host.space().find("log").hold(holder, {0: 0}, 60)
    with pytest.raises(AmqpError, match="is held by 2 already") as failed:
        await host.space().find("log").hold("c", {0: 0}, 60)
    assert failed.value.condition == "amqp:resource-limit-exceeded"
    with pytest.raises(AmqpError, match="0 to 60 seconds") as failed:
        await host.space().find("log").hold("a", {0: 0}, 60.1)
    assert failed.value.condition == "amqp:not-allowed"
    await host.space().find("log").hold("b", {}, 0)
    await host.space().find("log").hold("c", {0: 0}, 60)


@pytest.mark.req("K4")
async def test_purging_drops_records_without_a_hold() -> None:
    world = World(Log("l", max_bytes=1_000_000))
    sender = world.client().sender("l")
    for _ in range(6):
        sender.send(*range(500))
    await world.host.space().find("l").hold("me", {0: 2_500}, 60)
    dropped = await world.host.space().find("l").purge()
    (partition,) = world.log_stats("l").partitions
    assert 0 < dropped == partition.first <= 2_500
    world.time.now += 61
    assert await world.host.space().find("l").purge() == 3_000 - dropped
    (partition,) = world.log_stats("l").partitions
    assert (partition.first, partition.next, partition.bytes) == (3_000, 3_000, 0)
    sender.send("next")
    assert world.stats("l").available == 1
    assert world.stats("l").dropped == 3_000
