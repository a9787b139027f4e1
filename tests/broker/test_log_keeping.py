"""Logs in a store: what outlives the broker, readers far behind, retention, and a disk in trouble."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from amqp_rt import Broker, Message
from amqp_rt.broker import Log, Queue
from amqp_rt.broker.log.records import block_of
from amqp_rt.container.connections import Connection
from amqp_rt.errors import AmqpError, DeliveryRejected
from amqp_rt.limits import Limits
from amqp_rt.stores.base import ChangeSet, Store, StoreFailed, StoreFull
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.values import Described, Symbol, Timestamp

SPEC = Symbol("rabbitmq:stream-offset-spec")


def at(value: Any) -> dict[Symbol, Any]:
    return {SPEC: Described(SPEC, value)}


class Wall:
    """A wall clock that a test moves; the other one goes on by itself."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return trio.current_time()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "kept.db")


async def read(
    peer: Connection, count: int, start: Any = "first", address: str = "log", **options: Any
) -> list[Message]:
    """The next *count* records from *start* on."""
    async with peer.receiver(address, filter=at(start), **options) as source:
        with trio.fail_after(10):
            return [(await source.receive()).message for _ in range(count)]


async def bodies(peer: Connection, count: int, start: Any = "first", **options: Any) -> list[Any]:
    return [message.body for message in await read(peer, count, start, **options)]


@pytest.mark.req("B7", "B27", "K4")
async def test_a_log_outlives_its_broker(store: Store) -> None:
    wall = Wall()
    async with Broker(store=store, clock=wall) as broker, broker.local() as peer:
        await broker.declare(Log("log", partitions=2, max_age_s=1e6), Queue("after"))
        async with peer.sender("log") as out:
            for number in range(10):
                await out.send(number, durable=bool(number % 3))
        before = broker.log_stats("log")
        await broker.set_cursor("log", "g", {0: 3, 1: 4})
        await broker.hold("log", "h", {0: 1}, 100)
    wall.now -= 50
    async with Broker(store=store, clock=wall) as broker, broker.local() as peer:
        # The partitions have their own places in the store: nothing of the queue is theirs.
        assert {each.name for each in broker.nodes()} == {"log", "after"}
        assert broker.log_stats("log").incarnation == before.incarnation
        assert broker.log_stats("log").partitions == before.partitions
        assert broker.cursor("log", "g") == {0: 3, 1: 4}
        assert await bodies(peer, 5, address="log/partitions/0") == [0, 2, 4, 6, 8]
        async with peer.sender("log/partitions/0") as out:
            await out.send("new")
        (new,) = await read(peer, 1, "last", address="log/partitions/0")
        assert new.body == "new"
        assert new.message_annotations["x-opt-sequence-number"] == 5
        # The clock was set back; the records know nothing of it.
        assert new.message_annotations["x-opt-enqueued-time"] == Timestamp(1_000_000_000)
        with pytest.raises(AmqpError, match="exists as"):
            await broker.declare(Log("log", partitions=3))
        await broker.declare(Log("log", partitions=2, max_age_s=7))
        await broker.delete("log")
        await broker.declare(Log("log", partitions=2))
    async with Broker(store=store) as broker:
        other = broker.log_stats("log")
        assert other.incarnation != before.incarnation
        assert [partition.next for partition in other.partitions] == [0, 0]
        assert broker.cursor("log", "g") == {}


@pytest.mark.slow
@pytest.mark.req("K4")
async def test_each_start_of_the_broker_begins_an_era(store: Store) -> None:
    limits = Limits(log_eras_max=3)
    ids: list[str] = []

    async def run(*bodies: str) -> list[list[int]]:
        """The first offsets of the eras, after a broker that has had *bodies*."""
        async with Broker(store=store, limits=limits) as broker, broker.local() as peer:
            await broker.declare(Log("log", partitions=2))
            async with peer.sender("log/partitions/0") as out:
                for body in bodies:
                    await out.send(body)
            eras = broker.log_stats("log").eras
            assert len({era.id for era in eras}) == len(eras)
            ids.append(eras[-1].id)
            return [era.starts for era in eras]

    assert await run() == [[0, 0]]
    # Nothing was appended in the first, which is forgotten.
    assert await run("a", "b") == [[0, 0]]
    assert await run() == [[0, 0], [2, 0]]
    assert await run("c") == [[0, 0], [2, 0]]
    assert await run("d") == [[0, 0], [2, 0], [3, 0]]
    # There is a bound to how many are known.
    assert await run("e") == [[2, 0], [3, 0], [4, 0]]
    assert len(set(ids)) == len(ids)
    async with Broker(store=store) as broker:
        await broker.delete("log")
        await broker.declare(Log("log"))
        assert [era.starts for era in broker.log_stats("log").eras] == [[0]]


async def test_a_log_without_a_store_has_no_eras() -> None:
    async with Broker() as broker:
        await broker.declare(Log("log"))
        assert broker.log_stats("log").eras == []


@pytest.mark.slow
@pytest.mark.req("K4")
async def test_who_is_far_behind_is_served_from_the_store(store: Store) -> None:
    limits = Limits(log_tail_bytes_max=2_000, log_read_bytes_max=1_000, log_cache_bytes_max=5_000)
    wall = Wall()
    async with Broker(store=store, limits=limits, clock=wall) as broker, broker.local() as peer:
        await broker.declare(Log("log"))
        async with peer.sender("log") as out:
            for number in range(100):
                wall.now += 1
                await out.send(number, application_properties={"n": bytes(100)})
        (log,) = broker.host.services.logs
        (partition,) = log.partitions
        assert partition.base > 80
        assert broker.host.memory.held <= 2_000
        everything = list(range(100))
        assert await bodies(peer, 100) == everything
        assert await bodies(peer, 60, 40) == everything[40:]
        assert await bodies(peer, 10, Timestamp(1_000_031_000)) == everything[30:40]
        assert await bodies(peer, 100, "1Y") == everything
        assert await bodies(peer, 5, Timestamp(1_000_096_000)) == everything[95:]
        async with peer.receiver("log", filter=at(Timestamp(2_000_000_000))) as source:
            with trio.move_on_after(0.05) as waited:
                await source.receive()
            assert waited.cancelled_caught

        # Many readers at once; those without credit delay no other.
        async with peer.receiver("log", filter=at("first"), credit=0):
            found: list[list[Any]] = []

            async def one(start: int) -> None:
                found.append(await bodies(peer, 100 - start, start))

            async with trio.open_nursery() as nursery:
                for start in range(0, 100, 5):
                    nursery.start_soon(one, start)
            assert sorted(found, key=len) == [everything[-n:] for n in range(5, 101, 5)]
            storage = broker.host.services.log_storage
            assert storage is not None
            assert storage.held <= 5_000
    assert storage.held == 0


@pytest.mark.req("K4")
async def test_one_batch_is_one_chunk_of_each_partition() -> None:
    store = MemoryStore()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Log("log", partitions=2))
        async with peer.sender("log") as one, peer.sender("log") as two:
            receipts = [out.send_nowait(number) for number in range(100) for out in (one, two)]
            for receipt in receipts:
                await receipt.outcome()
        numbers = [
            partition.number for log in broker.host.services.logs for partition in log.partitions
        ]
        chunks = [store.chunks(number, 0, 1 << 30) for number in numbers]
        assert [sum(chunk.count for chunk in each) for each in chunks] == [100, 100]
        assert max(len(each) for each in chunks) < 20
        records = [record for chunk in chunks[0] for record in block_of(chunk).records]
        assert Message.decode(records[0].payload).body == 0


@pytest.mark.slow
@pytest.mark.req("K4")
async def test_retention_in_the_store(store: Store) -> None:
    wall = Wall()
    async with Broker(store=store, clock=wall) as broker, broker.local() as peer:
        await broker.declare(Log("aged", max_age_s=50), Log("sized", max_bytes=5_000))
        # Retention runs beside this, now and then.
        await broker.hold("aged", "h", {0: 20}, 1_000)
        for address in ("aged", "sized"):
            async with peer.sender(address) as out:
                for number in range(100):
                    wall.now += 1
                    await out.send(number, application_properties={"n": bytes(100)})
        aged, sized = broker.host.services.logs
        await aged.retain()
        (partition,) = broker.log_stats("aged").partitions
        assert partition.first == 20
        assert await bodies(peer, 80, address="aged") == list(range(20, 100))
        await broker.hold("aged", "h", {}, 0)
        await sized.retain()
        (partition,) = broker.log_stats("sized").partitions
        first = partition.first
        size = partition.bytes // (100 - first)  # of a chunk, which has one record
        assert partition.bytes <= 5_000 < partition.bytes + size
        # Dropped records are not kept in memory either.
        (tail,) = sized.partitions
        assert tail.blocks
        assert all(block.end > first for block in tail.blocks)
        # A bound that is met exactly costs nothing more.
        sized.keep(None, partition.bytes - size)
        await sized.retain()
        (partition,) = broker.log_stats("sized").partitions
        assert (partition.first, partition.bytes) == (first + 1, size * (99 - first))
        first += 1
        found = await read(peer, 100 - first, 0, address="sized")
        assert [int(each.message_annotations["x-opt-offset"]) for each in found] == list(
            range(first, 100)
        )
        await aged.retain()
        (partition,) = broker.log_stats("aged").partitions
        assert (partition.first, partition.next, partition.bytes) == (100, 100, 0)
        async with peer.sender("aged") as out:
            await out.send("new")
        assert [
            each.message_annotations["x-opt-offset"] for each in await read(peer, 1, 7, "aged")
        ] == ["100"]
    async with Broker(store=store, clock=wall) as broker:
        assert broker.log_stats("aged").partitions[0].next == 101
        assert broker.log_stats("sized").partitions[0].first == first


class Troubled(MemoryStore):
    """A disk that can be full, or fail before or after it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.fails: list[str] = []

    def commit(self, batch: ChangeSet) -> None:
        if self.full and batch.appends:
            raise StoreFull("the disk is full")
        fails = self.fails.pop(0) if self.fails and batch.appends else ""
        if fails == "before":
            raise StoreFailed("the disk failed")
        super().commit(batch)
        if fails == "after":
            raise StoreFailed("the disk failed")


@pytest.mark.req("K4", "B7")
async def test_a_full_disk_refuses_records_and_leaves_no_gap() -> None:
    store = Troubled()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Log("log"))
        async with peer.sender("log") as out:
            await out.send(0)
            store.full = True
            with pytest.raises(DeliveryRejected, match="full"):
                await out.send("refused")
            store.full = False
            await out.send(1)
        assert await bodies(peer, 2) == [0, 1]
        assert broker.log_stats("log").partitions[0].next == 2
        (log,) = broker.host.services.logs
        assert log.pending == 0
        assert broker.host.memory.held == log.partitions[0].held


@pytest.mark.req("K4", "B7")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_disk_that_fails_leaves_each_record_once(when: str) -> None:
    store = Troubled()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Log("log", partitions=2))
        async with peer.sender("log") as out:
            await out.send(0)
            store.fails = [when]
            receipts = [out.send_nowait(number) for number in range(1, 7)]
            for receipt in receipts:
                await receipt.outcome()
            await out.send(7)
        assert await bodies(peer, 4, address="log/partitions/0") == [0, 2, 4, 6]
        assert await bodies(peer, 4, address="log/partitions/1") == [1, 3, 5, 7]
    async with Broker(store=store) as broker:
        assert [each.next for each in broker.log_stats("log").partitions] == [4, 4]


@pytest.mark.req("K4")
async def test_records_are_delivered_only_when_they_are_stored() -> None:
    gate = trio.Event()

    async def late(call: Callable[..., Any], *args: Any) -> Any:
        if getattr(call, "__name__", "") == "commit" and args[0].appends:
            await gate.wait()
        await trio.lowlevel.checkpoint()
        return call(*args)

    broker = Broker(store=MemoryStore())
    assert broker.host.journal is not None
    broker.host.journal.call = late
    async with broker, broker.local() as peer:
        await broker.declare(Log("log"))
        async with peer.sender("log") as out, peer.receiver("log", filter=at("first")) as source:
            receipt = out.send_nowait("m")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert broker.log_stats("log").partitions[0].next == 0
            (log,) = broker.host.services.logs
            assert log.pending > 0
            with trio.move_on_after(0.01) as early:
                await receipt.outcome()
            assert early.cancelled_caught
            gate.set()
            await receipt.outcome()
            assert (await source.receive()).body == "m"


@pytest.mark.req("K4")
async def test_dead_letters_may_go_to_a_log(store: Store) -> None:
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Log("dead"), Queue("q", max_deliveries=1, dead_letter="dead"))
        async with peer.sender("q") as out, peer.receiver("q") as source:
            await out.send("m", durable=True)
            (await source.receive()).reject("no use")
            (dead,) = await read(peer, 1, address="dead")
        assert dead.message_annotations["x-opt-deadletter-source"] == "q"
    async with Broker(store=store) as broker:
        assert broker.log_stats("dead").partitions[0].next == 1
        assert broker.stats("q").available == 0


@pytest.mark.req("K4", "R3")
async def test_a_transaction_posts_to_logs_all_or_nothing() -> None:
    store = Troubled()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Log("log"), Queue("q"))
        async with peer.sender("log") as out, peer.sender("q") as other:
            await out.send(0)
            async with peer.transaction() as work:
                await out.send(1, transaction=work)
                await other.send("m", durable=True, transaction=work)
                await out.send(2, transaction=work)
                assert broker.log_stats("log").partitions[0].next == 1
            await out.send(3)
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 (the block is what is tested)
                async with peer.transaction() as work:
                    await out.send("never", transaction=work)
                    raise ZeroDivisionError
            store.full = True
            with pytest.raises(AmqpError):
                async with peer.transaction() as work:
                    await out.send("never", transaction=work)
            store.full = False
            await out.send(4)
        assert await bodies(peer, 5) == [0, 1, 2, 3, 4]
        (log,) = broker.host.services.logs
        assert log.pending == 0
    async with Broker(store=store) as broker:
        assert broker.log_stats("log").partitions[0].next == 5
        assert broker.stats("q").available == 1
