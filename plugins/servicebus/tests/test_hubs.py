"""Event hubs at a broker: links of any client, addresses, owner levels, batches, operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Hub
from amqp_rt_servicebus.hub_operations import HUB_TYPE, PARTITION_TYPE
from amqp_rt_servicebus.hub_positions import SELECTOR
from amqp_rt_servicebus.hubs import EVENT_SIZE_MAX, NEVER_MS, HubHost
from amqp_rt_servicebus.messages import BATCH_FORMAT
from amqp_rt_servicebus.namespace import Namespace
from amqp_rt_servicebus.stored import PARTITION_KEY
from trio.testing import wait_all_tasks_blocked

from amqp_rt import Message
from amqp_rt.batches import write_messages
from amqp_rt.broker import Broker, Queue
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import (
    ACCEPTED,
    Error,
    Peer,
    Rejected,
    Source,
    Target,
    TransactionalState,
)
from amqp_rt.fronts.base import SND_SETTLED, SND_UNSETTLED
from amqp_rt.limits import Limits
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.values import Described, Int, Short, Symbol

pytestmark = pytest.mark.req("Z20")

CLICKS = Hub("Clicks", partitions=4, consumer_groups=["audit"])
GROUP = "clicks/ConsumerGroups/$Default/Partitions"


class Bench:
    """A broker with hubs, and clients that are joined to them by two engines in memory."""

    def __init__(self, broker: Broker, hubs: HubHost) -> None:
        self.broker = broker
        self.hubs = hubs
        self.joined = Joined(on_attach=self._attach)
        self.joined.pump()
        self.session = self.joined.client.begin()
        self.untaken: list[Any] = []
        self._count = 0

    def _attach(self, link: Any) -> None:
        if link.asked is None:
            terminus = link.source if hasattr(link, "send") else link.target
            link.asked = terminus.address
        if not self.hubs.attach(link):
            self.untaken.append(link)
            link.refuse(Error("amqp:not-found", "no host takes it"))

    @property
    def hub(self) -> Any:
        return self.hubs.find("clicks")

    def sender(self, address: str = "clicks", **options: Any) -> Sending:
        return Sending(self, address, **options)

    def receiver(self, address: str = f"{GROUP}/0", **options: Any) -> Receiving:
        return Receiving(self, address, **options)

    def name(self) -> str:
        self._count += 1
        return f"link-{self._count}"

    def bodies(self) -> list[list[Any]]:
        return [[each.body for each in part] for part in self.events()]

    def events(self) -> list[list[Message]]:
        return [
            [Message.decode(record.payload) for block in part.blocks for record in block.records]
            for part in self.hub.log.partitions
        ]


class Client:
    endpoint: Recorder
    link: Any

    @property
    def error(self) -> str | None:
        """Condition with which the link was refused or detached."""
        if not self.endpoint.detached:
            return None
        error = self.endpoint.detached[0][0]
        return None if error is None else str(error.condition)

    @property
    def description(self) -> str:
        error = self.endpoint.detached[0][0]
        assert error is not None
        return error.description or ""


class Sending(Client):
    """Client's end of a link that sends to a hub."""

    def __init__(
        self,
        bench: Bench,
        address: str,
        *,
        idempotent: bool = False,
        settle_mode: int = SND_UNSETTLED,
        **properties: Any,
    ) -> None:
        self.bench = bench
        self.endpoint = Recorder()
        self.link = bench.session.attach_sender(
            bench.name(),
            self.endpoint,
            source=Source(address="c"),
            target=Target(address=address),
            snd_settle_mode=settle_mode,
            properties={Symbol(f"com.microsoft:producer-{n}"): v for n, v in properties.items()},
            desired_capabilities=("com.microsoft:idempotent-producer",) if idempotent else (),
        )
        bench.joined.pump()

    def send(self, payload: Any, message_format: int = 0, **options: Any) -> Any:
        """Send an encoded message; return its outcome."""
        if not isinstance(payload, bytes):
            payload = bytes(Message(payload).encode())
        before = len(self.endpoint.outcomes)
        self.link.send(payload, message_format=message_format, **options)
        self.bench.joined.pump()
        if self.link.snd_settle_mode == SND_SETTLED:
            return None
        assert len(self.endpoint.outcomes) == before + 1
        return self.endpoint.outcomes[-1].state

    def batch(self, *messages: bytes, key: object = None) -> Any:
        return self.send(batch(*messages, key=key), BATCH_FORMAT)


class Receiving(Client):
    """Client's end of a link that receives from a partition."""

    def __init__(
        self,
        bench: Bench,
        address: str,
        *,
        position: object = None,
        level: object = None,
        metrics: bool = False,
        credit: int = 100,
        settle_mode: int = SND_SETTLED,
        max_message_size: int = 0,
    ) -> None:
        self.bench = bench
        self.endpoint = Recorder()
        filters: dict[object, object] | None = None
        if position is not None:
            filters = {SELECTOR: Described(SELECTOR, f"amqp.annotation.{position}")}
        self.link = bench.session.attach_receiver(
            bench.name(),
            self.endpoint,
            source=Source(address=address, filter=filters),
            target=Target(address="c"),
            snd_settle_mode=settle_mode,
            properties={} if level is None else {Symbol("com.microsoft:epoch"): level},
            desired_capabilities=(
                ("com.microsoft:enable-receiver-runtime-metric",) if metrics else ()
            ),
            **({"max_message_size": max_message_size} if max_message_size else {}),
        )
        bench.joined.pump()
        if not self.endpoint.detached and credit:
            self.link.grant(credit)
            bench.joined.pump()

    @property
    def messages(self) -> list[Message]:
        return [Message.decode(each.payload) for each in self.endpoint.deliveries]

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.messages]


def event(body: object, key: object = None, **annotations: Any) -> bytes:
    found: dict[Any, Any] = {} if key is None else {PARTITION_KEY: key}
    found |= {
        Symbol(f"com.microsoft:producer-{name}"): value for name, value in annotations.items()
    }
    return bytes(Message(body, message_annotations=found).encode())


def batch(*messages: bytes, key: object = None) -> bytes:
    envelope = b"" if key is None else event(b"", key)[:-5]
    return envelope + write_messages(messages)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    addon = Namespace(CLICKS)
    async with Broker(addons=[addon]) as broker:
        yield Bench(broker, addon.hubs)


# --- Sending ---------------------------------------------------------------------------------


async def test_events_without_a_key_go_to_the_partitions_in_turn(bench: Bench) -> None:
    first, second = bench.sender(), bench.sender("CLICKS")
    for number in range(3):
        assert first.send(f"a{number}") == ACCEPTED
        assert second.send(f"b{number}") == ACCEPTED
    assert bench.bodies() == [["a0", "a2"], ["b0", "b2"], ["a1"], ["b1"]]


async def test_an_event_with_a_key_goes_to_the_partition_of_the_key(bench: Bench) -> None:
    sender = bench.sender()
    for number in range(20):
        key = f"key-{number % 5}"
        assert sender.send(event(number, key)) == ACCEPTED
        there = [each.body for each in bench.events()[bench.hub.choose(key.encode())]]
        assert there[-1] == number


async def test_a_link_to_a_partition_sends_there_whatever_the_key(bench: Bench) -> None:
    sender = bench.sender("clicks/Partitions/2")
    for number in range(5):
        sender.send(event(number, f"key-{number}"))
    assert bench.bodies() == [[], [], [0, 1, 2, 3, 4], []]


async def test_events_of_a_publisher_are_in_one_partition_and_carry_its_name(bench: Bench) -> None:
    sender = bench.sender("clicks/Publishers/Door")
    assert sender.send("a") == ACCEPTED
    assert sender.batch(event("b"), event("c")) == ACCEPTED
    (found,) = [part for part in bench.events() if part]
    assert [each.body for each in found] == ["a", "b", "c"]
    assert {str(each.message_annotations[Symbol("x-opt-publisher")]) for each in found} == {"Door"}
    refused = sender.send(event("d", "gate"))
    assert refused.error.condition == "com.microsoft:argument-error"


async def test_a_batch_goes_to_one_partition(bench: Bench) -> None:
    sender = bench.sender()
    assert sender.batch(*(event(number) for number in range(50))) == ACCEPTED
    assert sender.batch(event("x"), event("y"), key="k") == ACCEPTED
    assert bench.bodies()[0][:50] == list(range(50))
    assert bench.bodies()[bench.hub.choose(b"k")][-2:] == ["x", "y"]


async def test_a_batch_is_stored_as_a_whole_or_not_at_all(bench: Bench) -> None:
    refused = bench.sender().batch(event("a"), b"\x00\x53\x72", event("b"))
    assert refused.error.condition == "amqp:decode-error"
    assert bench.bodies() == [[], [], [], []]


async def test_a_large_batch_is_taken_in_turns_and_what_follows_waits(bench: Bench) -> None:
    sender = bench.sender("clicks/Partitions/0")
    many = batch(*(event(number) for number in range(1_000)))
    bench.broker.host.memory.work = 40
    sender.link.send(many, message_format=BATCH_FORMAT)
    sender.link.send(event("behind"))
    bench.joined.pump()
    assert bench.bodies()[0] == []
    assert not sender.endpoint.outcomes
    await wait_all_tasks_blocked()
    bench.joined.pump()
    assert bench.bodies()[0] == [*range(1_000), "behind"]
    assert [each.state for each in sender.endpoint.outcomes] == [ACCEPTED, ACCEPTED]


async def test_a_hub_that_is_deleted_between_turns_rejects_the_batch(bench: Bench) -> None:
    sender = bench.sender("clicks/Partitions/0")
    bench.broker.host.memory.work = 40
    sender.link.send(
        batch(*(event(number) for number in range(1_000))), message_format=BATCH_FORMAT
    )
    bench.joined.pump()
    bench.hubs.delete("clicks")
    await wait_all_tasks_blocked()
    bench.joined.pump()
    assert sender.error == "amqp:resource-deleted"


async def test_a_message_of_an_unknown_format_is_rejected(bench: Bench) -> None:
    refused = bench.sender().send("a", 0x1234)
    assert "0x00001234 is neither" in refused.error.description


async def test_an_event_in_a_transaction_is_rejected(bench: Bench) -> None:
    refused = bench.sender().send("a", state=TransactionalState(b"t"))
    assert refused.error.condition == "amqp:not-implemented"
    assert bench.bodies() == [[], [], [], []]


async def test_settled_events_that_are_refused_are_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    sender = bench.sender(settle_mode=SND_SETTLED)
    sender.send("kept")
    sender.send("lost", 7)
    assert bench.bodies()[0] == ["kept"]
    assert "message dropped: refused at" in caplog.text


async def test_durable_events_are_taken_into_memory(bench: Bench) -> None:
    assert bench.sender().send(bytes(Message("d", durable=True).encode())) == ACCEPTED


async def test_credit_continues_beyond_the_first_grant(bench: Bench) -> None:
    sender = bench.sender()
    for number in range(2_500):
        assert sender.send(number) == ACCEPTED
    assert sum(map(len, bench.bodies())) == 2_500


async def test_events_beyond_the_memory_of_the_broker_are_rejected() -> None:
    addon = Namespace(Hub("clicks"))
    async with Broker(addons=[addon], limits=Limits(broker_bytes_max=64 * 1024)) as broker:
        bench = Bench(broker, addon.hubs)
        sender = bench.sender()
        refused = sender.batch(*(event("x" * 1_000) for _ in range(70)))
        assert refused.error.condition == "amqp:resource-limit-exceeded"
        assert bench.bodies() == [[]]
        assert sender.batch(event("small")) == ACCEPTED


async def test_the_largest_batch_is_that_of_the_service(bench: Bench) -> None:
    assert bench.sender().link.max_message_size == EVENT_SIZE_MAX


@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("clicks/Partitions/4", "amqp:not-found"),
        ("clicks/Partitions/x", "amqp:not-found"),
        (f"{GROUP}/0", "amqp:not-allowed"),
    ],
)
async def test_senders_at_other_addresses_are_refused(
    bench: Bench, address: str, condition: str
) -> None:
    assert bench.sender(address).error == condition


# --- Idempotent producers --------------------------------------------------------------------


async def test_a_batch_of_an_idempotent_producer_is_stored_once(bench: Bench) -> None:
    sender = bench.sender("clicks/Partitions/1", idempotent=True)
    id_ = sender.link.properties[Symbol("com.microsoft:producer-id")]
    assert "com.microsoft:idempotent-producer" in sender.link.offered_capabilities

    def numbered(*numbers: int) -> list[bytes]:
        return [
            event(number, **{"id": id_, "epoch": Short(0), "sequence-number": Int(number)})
            for number in numbers
        ]

    assert sender.batch(*numbered(1, 2)) == ACCEPTED
    assert sender.batch(*numbered(1, 2)) == ACCEPTED
    gap = sender.batch(*numbered(4))
    assert gap.error.condition == "com.microsoft:out-of-order-sequence"
    assert sender.batch(*numbered(3)) == ACCEPTED
    assert bench.bodies() == [[], [1, 2, 3], [], []]
    assert all(not each.message_annotations for each in bench.events()[1])


async def test_a_batch_without_room_does_not_count_as_stored() -> None:
    addon = Namespace(Hub("clicks"))
    async with Broker(addons=[addon], limits=Limits(broker_bytes_max=64 * 1024)) as broker:
        bench = Bench(broker, addon.hubs)
        sender = bench.sender("clicks/Partitions/0", idempotent=True, id=5, epoch=Short(0))
        marks = {"id": 5, "epoch": Short(0), "sequence-number": Int(1)}
        full = sender.batch(event("x" * 70_000, **marks))
        assert full.error.condition == "amqp:resource-limit-exceeded"
        assert sender.batch(event("small", **marks)) == ACCEPTED
        assert bench.bodies() == [["small"]]


async def test_producers_of_different_partitions_are_independent(bench: Bench) -> None:
    for partition in range(2):
        sender = bench.sender(f"clicks/Partitions/{partition}", idempotent=True, id=5)
        marks = {"id": 5, "epoch": Short(0), "sequence-number": Int(1)}
        assert sender.batch(event(partition, **marks)) == ACCEPTED
    assert bench.bodies()[:2] == [[0], [1]]


async def test_an_idempotent_producer_without_a_partition_is_refused(bench: Bench) -> None:
    assert bench.sender(idempotent=True).error == "amqp:not-allowed"


async def test_an_old_epoch_is_refused(bench: Bench) -> None:
    bench.sender("clicks/Partitions/0", idempotent=True, id=5, epoch=Short(2))
    old = bench.sender("clicks/Partitions/0", idempotent=True, id=5, epoch=Short(1))
    assert old.error == "com.microsoft:producer-epoch-stolen"


# --- Receiving -------------------------------------------------------------------------------


async def test_events_carry_the_annotations_of_the_service_and_no_others(bench: Bench) -> None:
    bench.sender("clicks/Partitions/0").send(event("a", "k"))
    bench.sender("clicks/Partitions/0").send("b")
    first, second = bench.receiver().messages
    time_ms = bench.hub.log.partitions[0].blocks[0].records[0].time_ms
    assert dict(first.message_annotations) == {
        "x-opt-partition-key": "k",
        "x-opt-sequence-number": 0,
        "x-opt-offset": "0",
        "x-opt-enqueued-time": time_ms,
    }
    assert set(second.message_annotations) == {
        "x-opt-sequence-number",
        "x-opt-offset",
        "x-opt-enqueued-time",
    }
    assert not first.delivery_annotations


@pytest.mark.parametrize(
    ("position", "bodies"),
    [
        (None, [0, 1, 2, 3]),
        ("x-opt-offset > '-1'", [0, 1, 2, 3]),
        ("x-opt-offset > '@latest'", []),
        ("x-opt-offset >= '@latest'", [3]),
        ("x-opt-offset > '1'", [2, 3]),
        ("x-opt-offset >= '1'", [1, 2, 3]),
        ("x-opt-sequence-number > '2'", [3]),
        ("x-opt-sequence-number > '3'", []),
        ("x-opt-sequence-number >= '4'", []),
        ("x-opt-sequence-number > '-1'", [0, 1, 2, 3]),
        ("x-opt-enqueued-time > '0'", [0, 1, 2, 3]),
        ("x-opt-enqueued-time > '99999999999999'", []),
    ],
)
async def test_readers_begin_at_their_position_and_continue_with_new_events(
    bench: Bench, position: str | None, bodies: list[int]
) -> None:
    sender = bench.sender("clicks/Partitions/0")
    for number in range(4):
        sender.send(number)
    reader = bench.receiver(position=position)
    assert reader.bodies == bodies
    sender.send(4)
    later = "99999" in (position or "")
    assert reader.bodies == ([] if later else [*bodies, 4])


@pytest.mark.parametrize("name", ["x-opt-offset", "x-opt-sequence-number"])
async def test_a_position_behind_the_end_is_refused(bench: Bench, name: str) -> None:
    bench.sender("clicks/Partitions/0").send("a")
    reader = bench.receiver(position=f"{name} > '5'")
    assert reader.error == "com.microsoft:argument-error"
    assert "the last sequence number of the partition is 0" in reader.description


@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("clicks/ConsumerGroups/none/Partitions/0", "amqp:not-found"),
        ("clicks/ConsumerGroups/audit/Partitions/4", "amqp:not-found"),
        ("clicks", "amqp:not-allowed"),
        ("clicks/Partitions/0", "amqp:not-allowed"),
        ("clicks/Publishers/p", "amqp:not-allowed"),
    ],
)
async def test_readers_at_other_addresses_are_refused(
    bench: Bench, address: str, condition: str
) -> None:
    assert bench.receiver(address).error == condition


async def test_other_filters_are_refused_and_no_reader_is_left(bench: Bench) -> None:
    reader = bench.receiver(position="x-opt-color > '5'")
    assert reader.error == "com.microsoft:argument-error"
    assert not bench.hub.log.readers


async def test_each_reader_of_each_group_gets_all_events(bench: Bench) -> None:
    readers = [
        bench.receiver(f"CLICKS/consumergroups/{group}/partitions/0")
        for group in ("$default", "$Default", "audit", "AUDIT")
    ]
    bench.hub.publish(event("a"), 0)
    bench.joined.pump()
    assert [each.bodies for each in readers] == [["a"]] * 4


async def test_outcomes_of_readers_change_nothing(bench: Bench) -> None:
    bench.hub.publish(event("a"), 0)
    reader = bench.receiver(settle_mode=SND_UNSETTLED)
    (delivery,) = reader.endpoint.deliveries
    assert not delivery.settled
    delivery.settle(Rejected(Error("amqp:internal-error")))
    bench.joined.pump()
    assert bench.receiver().bodies == ["a"]


async def test_an_event_that_is_too_large_for_a_reader_detaches_it(bench: Bench) -> None:
    bench.hub.publish(event("x" * 2_000), 0)
    reader = bench.receiver(max_message_size=1_000)
    assert reader.error == "amqp:link:message-size-exceeded"


async def test_readers_that_ask_get_the_state_of_the_partition_with_each_event(
    bench: Bench,
) -> None:
    for body in "ab":
        bench.hub.publish(event(body), 0)
    reader = bench.receiver(metrics=True)
    assert "com.microsoft:enable-receiver-runtime-metric" in reader.link.offered_capabilities
    found = [dict(each.delivery_annotations) for each in reader.messages]
    last_ms = bench.hub.log.partitions[0].last_ms
    assert [
        (
            each["last_enqueued_sequence_number"],
            each["last_enqueued_offset"],
            each["last_enqueued_time_utc"],
        )
        for each in found
    ] == [(1, "1", last_ms)] * 2
    assert all(each["runtime_info_retrieval_time_utc"] >= last_ms for each in found)
    assert not bench.receiver().messages[0].delivery_annotations


# --- Owner levels ----------------------------------------------------------------------------


async def test_a_higher_or_equal_owner_level_detaches_the_others(bench: Bench) -> None:
    plain = bench.receiver()
    elsewhere = [
        bench.receiver("clicks/ConsumerGroups/audit/Partitions/0"),
        bench.receiver(f"{GROUP}/1"),
    ]
    first = bench.receiver(level=1)
    assert plain.error == "amqp:link:stolen"
    second = bench.receiver(level=1)
    assert first.error == "amqp:link:stolen"
    third = bench.receiver(level=5)
    assert second.error == "amqp:link:stolen"
    bench.hub.publish(event("a"), 0)
    bench.joined.pump()
    assert (third.bodies, second.bodies, plain.bodies) == (["a"], [], [])
    assert [each.error for each in elsewhere] == [None, None]


@pytest.mark.parametrize("level", [None, 4, 0, -1])
async def test_a_lower_owner_level_is_refused(bench: Bench, level: int | None) -> None:
    owner = bench.receiver(level=5)
    refused = bench.receiver(level=level)
    assert refused.error == "amqp:link:stolen"
    assert "owner level 5" in refused.description
    assert owner.error is None


async def test_an_owner_level_ends_with_its_link(bench: Bench) -> None:
    owner = bench.receiver(level=5)
    owner.link.detach()
    bench.joined.pump()
    assert bench.receiver().error is None


@pytest.mark.parametrize("level", ["5", 1.5, True])
async def test_an_owner_level_is_a_number(bench: Bench, level: object) -> None:
    assert bench.receiver(level=level).error == "com.microsoft:argument-out-of-range"


async def test_five_readers_without_owner_level_are_enough_if_realistic() -> None:
    addon = Namespace(CLICKS, realistic=True)
    async with Broker(addons=[addon]) as broker:
        bench = Bench(broker, addon.hubs)
        readers = [bench.receiver() for _ in range(6)]
        assert [each.error for each in readers[:5]] == [None] * 5
        assert readers[5].error == "amqp:resource-limit-exceeded"
        readers[0].link.detach()
        bench.joined.pump()
        assert bench.receiver().error is None


# --- Hubs ------------------------------------------------------------------------------------


async def test_addresses_of_no_hub_are_left_to_other_hosts(bench: Bench) -> None:
    bench.sender("orders")
    bench.receiver("orders/ConsumerGroups/g/Partitions/0")
    bench.sender("clicks/$management")
    assert len(bench.untaken) == 3


async def test_hubs_are_declared_changed_and_deleted_while_clients_are_attached(
    bench: Bench,
) -> None:
    bench.hubs.declare(Hub("later"))
    assert bench.sender("later").send("a") == ACCEPTED
    bench.hubs.declare(Hub("clicks", partitions=4, consumer_groups=["new"]))
    assert bench.receiver("clicks/ConsumerGroups/new/Partitions/0").error is None
    assert bench.receiver("clicks/ConsumerGroups/audit/Partitions/0").error == "amqp:not-found"
    with pytest.raises(ValueError, match="partitions is 4, and cannot become 5"):
        bench.hubs.declare(Hub("CLICKS", partitions=5))
    assert [each.name for each in bench.hubs] == ["clicks", "later"]
    reader, sender = bench.receiver(), bench.sender()
    bench.hubs.delete("Clicks")
    assert "clicks" not in bench.hubs
    await wait_all_tasks_blocked()
    bench.joined.pump()
    assert {reader.error, sender.error} == {"amqp:resource-deleted"}
    with pytest.raises(AmqpError, match="'clicks' could not be found"):
        bench.hubs.delete("clicks")
    bench.hubs.declare(Hub("clicks", partitions=5))
    assert len(bench.bodies()) == 5


async def test_a_hub_cannot_have_the_name_of_a_queue(bench: Bench) -> None:
    await bench.broker.declare(Queue("orders"))
    with pytest.raises(AmqpError, match="'orders' is there already"):
        bench.hubs.declare(Hub("orders"))
    assert "orders" not in bench.hubs


async def test_hubs_that_are_deleted_before_the_start_are_not_created() -> None:
    namespace = Namespace(Hub("a"), Hub("b"))
    broker = Broker(addons=[namespace])
    assert "A" in namespace.hubs
    namespace.delete_hub("A")
    with pytest.raises(ValueError, match="partitions is 1, and"):
        namespace.declare_all(Hub("b", partitions=2))
    async with broker:
        assert [each.name for each in namespace.hubs] == ["b"]


async def test_records_of_old_events_are_dropped_beyond_the_bound_of_a_log() -> None:
    addon = Namespace(Hub("clicks"))
    async with Broker(addons=[addon], limits=Limits(log_bytes_max=16 * 1024)) as broker:
        bench = Bench(broker, addon.hubs)
        for number in range(200):
            bench.hub.publish(event(f"{number:01000}"), 0)
        facts = bench.hub.facts(0)
        assert facts.last == 199
        assert 150 < facts.begin < 199
        assert not facts.is_empty
        assert bench.receiver().messages[0].message_annotations[Symbol("x-opt-sequence-number")] == facts.begin  # fmt: skip


# --- The anonymous terminus, and operations --------------------------------------------------


async def test_events_are_relayed_from_the_anonymous_terminus(bench: Bench) -> None:
    async with bench.broker.local() as peer, peer.sender(None) as sender:
        await sender.send(Message("a", to="clicks/Partitions/3"))
        await sender.send(Message("b", to="CLICKS/Partitions/3"))
        for address, condition in (
            (f"{GROUP}/0", "amqp:not-allowed"),
            ("clicks/Partitions/9", "amqp:not-found"),
        ):
            with pytest.raises(AmqpError) as refused:
                await sender.send(Message("c", to=address))
            assert refused.value.condition == condition
    assert bench.bodies()[3] == ["a", "b"]


async def asked(bench: Bench, type_: str, name: str, **properties: Any) -> Message:
    assert bench.broker.management is not None
    said = {"operation": "READ", "type": type_, "name": name, "security_token": "t"}
    request = Message(None, application_properties={**said, **properties})
    # As encoded and decoded again, so that values have the types of the wire.
    reply = await bench.broker.management.answer(request, Peer(trusted=True))
    return Message.decode(bytes(reply.encode()))


async def test_management_describes_hubs_with_both_spellings_of_the_status(bench: Bench) -> None:
    reply = await asked(bench, HUB_TYPE, "clicks")
    assert reply.application_properties == {
        "status-code": 200,
        "status-description": "OK",
        "statusCode": 200,
        "statusDescription": "OK",
    }
    created = int(bench.hub.created_at * 1000)
    assert {**reply.body, "partition_ids": list(reply.body["partition_ids"])} == {
        "name": "Clicks",
        "type": HUB_TYPE,
        "created_at": created,
        "partition_count": 4,
        "partition_ids": ["0", "1", "2", "3"],
        "georeplication_factor": 1,
    }


async def test_management_describes_partitions(bench: Bench) -> None:
    empty = await asked(bench, PARTITION_TYPE, "CLICKS", partition="1")
    assert empty.body == {
        "name": "Clicks",
        "type": PARTITION_TYPE,
        "partition": "1",
        "begin_sequence_number": 0,
        "last_enqueued_sequence_number": -1,
        "last_enqueued_offset": "-1",
        "last_enqueued_time_utc": NEVER_MS,
        "is_partition_empty": True,
    }
    bench.hub.publish(event("a"), 1)
    bench.hub.publish(event("b"), 1)
    full = await asked(bench, PARTITION_TYPE, "clicks", partition=1)
    assert full.body == {
        **empty.body,
        "last_enqueued_sequence_number": 1,
        "last_enqueued_offset": "1",
        "last_enqueued_time_utc": bench.hub.log.partitions[1].last_ms,
        "is_partition_empty": False,
    }


@pytest.mark.parametrize(
    ("type_", "name", "properties", "status"),
    [
        (HUB_TYPE, "none", {}, 404),
        (PARTITION_TYPE, "none", {"partition": "0"}, 404),
        (PARTITION_TYPE, "clicks", {"partition": "4"}, 404),
        (PARTITION_TYPE, "clicks", {}, 400),
        (PARTITION_TYPE, "clicks", {"partition": True}, 400),
        (HUB_TYPE, "", {}, 400),
    ],
)
async def test_management_says_what_is_missing(
    bench: Bench, type_: str, name: str, properties: dict[str, Any], status: int
) -> None:
    reply = await asked(bench, type_, name, **properties)
    said = reply.application_properties
    assert (said["status-code"], said["statusCode"]) == (status, status)
