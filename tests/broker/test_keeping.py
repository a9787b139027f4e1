"""State that survives the broker: nodes, durable messages, and their settlement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from paged import Gate, in_line

from amqp_rt import Broker, Message
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.errors import AmqpError, DeliveryRejected, LinkDetached, LocalProtocolError
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.stores.base import ChangeSet, Damage, OpenResult, Store, StoreFailed, StoreFull
from amqp_rt.stores.memory import MemoryStore


class Troubled(MemoryStore):
    """A disk that can be full, or fail, or be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.fails = 0
        self.commits = 0
        self.opened = 0

    def open(self) -> OpenResult:
        self.opened += 1
        return super().open()

    def commit(self, batch: ChangeSet) -> None:
        if self.full and (batch.puts or batch.appends):
            raise StoreFull("the disk is full")
        if self.fails:
            self.fails -= 1
            raise StoreFailed("the disk failed")
        super().commit(batch)
        self.commits += 1


async def bodies(broker: Broker, address: str) -> list[Any]:
    """Everything that is available there, in order; it is left there."""
    await broker.host.wait_kept()
    found = [Message.decode(each) for each in await broker.peek(address, 1_000)]
    return [each.body for each in found]


@pytest.mark.req("B7", "M5", "B26")
async def test_durable_messages_and_nodes_outlive_the_broker(
    kept: Callable[[], Store],
) -> None:
    async with Broker(store=kept(), auto_create=["queue:auto-*"]) as broker:
        await broker.declare(Queue("work", max_deliveries=3, dead_letter="dead"), Topic("news"))
        async with broker.local() as peer, peer.sender("work") as out:
            await out.send("kept", durable=True)
            await out.send("lost")
            await out.send("kept too", durable=True, priority=7, ttl_s=3600)
            async with peer.sender("auto-1") as other:
                await other.send("there", durable=True)
    async with Broker(store=kept()) as broker:
        names = {each.name: each for each in broker.nodes()}
        assert set(names) == {"work", "dead", "news", "auto-1"}
        assert names["work"] == Queue("work", max_deliveries=3, dead_letter="dead")
        assert await bodies(broker, "work") == ["kept", "kept too"]
        async with broker.local() as peer, peer.receiver("work") as messages:
            first = await messages.receive()
            second = await messages.receive()
            assert (second.message.priority, second.message.durable) == (7, True)
            assert 3590 < second.message.ttl_s <= 3600
            first.accept()
            second.accept()
    async with Broker(store=kept()) as broker:
        assert await bodies(broker, "work") == []
        assert await bodies(broker, "auto-1") == ["there"]


@pytest.mark.req("B7")
async def test_nothing_is_settled_or_delivered_before_it_is_kept() -> None:
    gate = Gate()
    async with Broker(store=MemoryStore(), executor=gate) as broker:
        await broker.declare(Queue("work"))
        async with broker.local() as peer, peer.sender("work") as out:
            gate.opened = trio.Event()
            receipt = out.send_nowait("m", durable=True)
            behind = out.send_nowait("not durable, behind it")
            with trio.move_on_after(0.05):
                await behind.outcome()
            assert not receipt.done
            assert not behind.done
            assert broker.stats("work").available == 0
            gate.opened.set()
            await receipt.accepted()
            await behind.accepted()
            assert await bodies(broker, "work") == ["m", "not durable, behind it"]


@pytest.mark.req("B7", "M23", "B16")
async def test_what_became_of_messages_is_kept(
    kept: Callable[[], Store],
) -> None:
    async with Broker(store=kept()) as broker:
        await broker.declare(Queue("work", dead_letter="dead"), Queue("other"))
        async with broker.local() as peer, peer.sender("work") as out:
            for name in ("accepted", "modified", "rejected", "moved", "released"):
                await out.send(name, durable=True)
            async with peer.receiver("work", credit=5) as messages:
                held = {}
                for _ in range(5):
                    delivery = await messages.receive()
                    held[delivery.message.body] = delivery
                held["accepted"].accept()
                held["rejected"].reject("why not")
                held["modified"].modify(annotations={"x-opt-note": "tried"})
                held["moved"].release()
                held["released"].release()
        assert await bodies(broker, "work") == ["modified", "moved", "released"]
        assert await broker.move("work", "other", 1) == 1
    async with Broker(store=kept()) as broker:
        assert await bodies(broker, "work") == ["moved", "released"]
        (moved,) = [Message.decode(each) for each in await broker.peek("other", 9)]
        assert moved.body == "modified"
        assert moved.delivery_count == 1
        assert moved.message_annotations == {"x-opt-note": "tried"}
        (dead,) = [Message.decode(each) for each in await broker.peek("dead", 9)]
        assert dead.body == "rejected"
        assert dead.message_annotations["x-opt-dead-letter-reason"] == "rejected"
        assert await broker.purge("work") == 2
        await broker.delete("other")
    async with Broker(store=kept()) as broker:
        assert {each.name for each in broker.nodes()} == {"work", "dead"}
        assert await bodies(broker, "work") == []
        assert await bodies(broker, "dead") == ["rejected"]


@pytest.mark.req("B7")
async def test_what_is_declared_now_counts_and_not_what_was_before(
    kept: Callable[[], Store],
) -> None:
    async with Broker(store=kept()) as broker:
        await broker.declare(Queue("work", max_deliveries=3))
    async with Broker(store=kept()) as broker:
        await broker.declare(Queue("work", max_deliveries=5))
        with pytest.raises(AmqpError, match="exists as"):
            await broker.declare(Queue("work", max_deliveries=7))
        with pytest.raises(AmqpError, match="exists as"):
            await broker.declare(Topic("work"))
    async with Broker(store=kept()) as broker:
        assert broker.nodes() == [Queue("work", max_deliveries=5)]


@pytest.mark.req("B7", "M6")
async def test_priorities_are_kept_and_so_is_the_order(kept: Callable[[], Store]) -> None:
    async with Broker(store=kept()) as broker:
        await broker.declare(Queue("work", priorities=5))
        async with broker.local() as peer, peer.sender("work") as out:
            for number, priority in enumerate([4, 0, 9, 4, 9]):
                await out.send(number, durable=True, priority=priority)
    async with Broker(store=kept()) as broker:
        assert await bodies(broker, "work") == [2, 4, 0, 3, 1]
        # Messages are in that order already: a queue cannot become another kind of queue.
        with pytest.raises(AmqpError, match="exists as"):
            await broker.declare(Queue("work"))


@pytest.mark.req("B7", "B24")
async def test_a_full_disk_is_said_to_who_brings_more_and_passes() -> None:
    store = Troubled()
    async with Broker(store=store) as broker:
        await broker.declare(Queue("work"))
        async with broker.local() as peer, peer.sender("work") as out:
            await out.send("before", durable=True)
            store.full = True
            with pytest.raises(DeliveryRejected) as refused:
                await out.send("too much", durable=True)
            assert refused.value.condition == "amqp:resource-limit-exceeded"
            # Messages that are not durable, and consumers, are not affected.
            await out.send("in memory")
            async with peer.receiver("work") as messages:
                for expected in ("before", "in memory"):
                    delivery = await messages.receive()
                    assert delivery.message.body == expected
                    delivery.accept()
            store.full = False
            await out.send("after", durable=True)
    async with Broker(store=store) as broker:
        assert await bodies(broker, "work") == ["after"]


@pytest.mark.req("B7")
async def test_after_a_failure_the_store_is_opened_anew_and_nothing_is_lost() -> None:
    store = Troubled()
    async with Broker(store=store) as broker:
        await broker.declare(Queue("work"))
        async with broker.local() as peer, peer.sender("work") as out:
            await out.send("one", durable=True)
            opened = store.opened
            store.fails = 1
            await out.send("two", durable=True)
            assert store.opened == opened + 1
            # If it fails again at once it is given up, and says so.
            store.fails = 2
            with pytest.raises(LinkDetached) as in_doubt:
                await out.send("three", durable=True)
            assert in_doubt.value.condition == "amqp:internal-error"
        async with broker.local() as peer, peer.sender("work") as out:
            with pytest.raises(DeliveryRejected) as refused:
                await out.send("four", durable=True)
            assert refused.value.condition == "amqp:internal-error"
            await out.send("in memory")
    async with Broker(store=store) as broker:
        assert await bodies(broker, "work") == ["one", "two"]


@pytest.mark.req("B7")
async def test_a_store_that_was_damaged_by_its_failure_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the next start finds out what the store has lost; until then nothing may be added to it."""

    class Torn(Troubled):
        def open(self) -> OpenResult:
            opened = super().open()
            if self.opened == 1:
                return opened
            return OpenResult(False, (Damage("message", 1, 1, 1, "a torn page"),), "aside")

    store = Torn()
    async with Broker(store=store) as broker:
        await broker.declare(Queue("work"))
        async with broker.local() as peer, peer.sender("work") as out:
            await out.send("one", durable=True)
            store.fails = 1
            with pytest.raises(LinkDetached, match="whether it was kept is not known"):
                await out.send("two", durable=True)
            assert store.fails == 0
        async with broker.local() as peer, peer.sender("work") as out:
            with pytest.raises(DeliveryRejected, match="1 things are damaged"):
                await out.send("three", durable=True)
    assert "the store is given up" in caplog.text
    async with Broker(store=store) as broker:
        assert await bodies(broker, "work") == ["one"]


@pytest.mark.req("B7")
async def test_no_peer_waits_for_an_outcome_of_a_store_that_is_given_up() -> None:
    store = Troubled()
    async with Broker(store=store) as broker:
        await broker.declare(Queue("work"), Queue("idle"))
        async with broker.local() as peer, peer.sender("work") as out:
            for n in range(3):
                await out.send(n, durable=True)
            second = {"credit": 1, "rcv_settle_mode": RCV_SECOND}
            async with (
                peer.receiver("work", **second) as messages,
                peer.receiver("idle", **second) as idle,
            ):
                delivery = await messages.receive()
                store.fails = 2
                delivery.accept()
                with pytest.raises(LinkDetached, match="store of the broker was given up"):
                    await delivery.settled()
                with pytest.raises(LinkDetached) as detached:
                    await idle.receive()
                assert detached.value.condition == "amqp:internal-error"
            # So it is for those who come afterwards.
            async with peer.receiver("work", **second) as messages:
                delivery = await messages.receive()
                assert delivery.message.body == 1
                delivery.accept()
                with pytest.raises(LinkDetached, match="start"):
                    await delivery.settled()
    async with Broker(store=store) as broker:
        assert await bodies(broker, "work") == [0, 1, 2]


@pytest.mark.req("B7", "B27", "R1")
async def test_what_a_store_kept_as_it_was_given_up_is_said_to_be_in_doubt() -> None:
    """Neither accepted nor rejected: it may be there when the broker is started again."""

    class Kept(Troubled):
        def commit(self, batch: ChangeSet) -> None:
            if self.fails == 1:
                MemoryStore.commit(self, batch)
            super().commit(batch)

    nodes = (Queue("work"), Topic("news"), Log("log"), Queue("paid"))
    stores = {node.name: Kept() for node in nodes}
    for node in nodes:
        store = stores[node.name]
        async with Broker(store=store) as broker:
            await broker.declare(*nodes)
            async with broker.local() as peer, peer.sender(node.name) as out:
                if node.name == "paid":
                    transaction = peer.transaction()
                    await transaction.__aenter__()
                    await out.send("m", durable=True, transaction=transaction)
                    store.fails = 2
                    with pytest.raises(LinkDetached, match="whether it was kept is not known"):
                        await transaction.__aexit__(None, None, None)
                    continue
                await out.wait_attached()
                async with peer.receiver("news", name="mine", durable=2) as news:
                    await news.wait_attached()
                    await news.suspend()
                # Nothing else is to be written when the disk fails.
                await broker.host.wait_kept()
                store.fails = 2
                with pytest.raises(LinkDetached, match="whether it was kept is not known"):
                    await out.send("m", durable=True)
                async with peer.sender(node.name) as again:
                    with pytest.raises(DeliveryRejected, match="disk failed"):
                        await again.send("n", durable=True)
    for name, store in stores.items():
        async with Broker(store=store) as broker, broker.local() as peer:
            first = {"rabbitmq:stream-offset-spec": "first"}
            options: dict[str, Any] = {
                "log": {"filter": first},
                "news": {"name": "mine", "durable": 2},
            }
            async with peer.receiver(name, **options.get(name, {})) as inbox:
                assert (await inbox.receive(within=5)).body == "m"
                assert await inbox.get(within=0.1) is None


@pytest.mark.req("B7")
async def test_many_messages_share_a_commit() -> None:
    store = Troubled()
    async with Broker(store=store) as broker:
        await broker.declare(Queue("work"))
        async with broker.local() as peer, peer.sender("work") as out:
            before = store.commits
            receipts = [out.send_nowait(number, durable=True) for number in range(500)]
            for receipt in receipts:
                await receipt.accepted()
            assert store.commits - before < 100
    async with Broker(store=store) as broker:
        assert await bodies(broker, "work") == list(range(500))


async def test_a_settlement_is_written_with_the_next_message(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = Troubled()
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        async with peer.sender("work") as out, peer.receiver("work") as messages:
            await out.send(0, durable=True)
            before = store.commits
            for number in range(1, 21):
                (await messages.receive()).accept()
                # The acceptance reaches the broker first, and its commit is not awaited.
                await trio.sleep(0.001)
                await out.send(number, durable=True)
            assert store.commits - before == 20
            # Where nothing follows, it is written all the same.
            (await messages.receive()).accept()
            await trio.sleep(0.1)
            assert store.commits - before == 21
    async with Broker(store=store, executor=in_line) as broker:
        assert await bodies(broker, "work") == []


@pytest.mark.req("B7", "A9")
async def test_a_handler_that_fails_is_counted_over_a_restart(
    kept: Callable[[], Store],
) -> None:
    async with Broker(store=kept()) as broker:
        await broker.declare(Queue("work", max_deliveries=2, dead_letter="dead"))
        async with broker.local() as peer, peer.sender("work") as out:
            await out.send("m", durable=True)
            async with peer.receiver("work", credit=1) as messages:
                delivery = await messages.receive()
                delivery.modify()
    async with Broker(store=kept()) as broker, broker.local() as peer:
        async with peer.receiver("work", credit=1) as messages:
            delivery = await messages.receive()
            assert delivery.message.delivery_count == 1
            delivery.modify()
        assert await bodies(broker, "dead") == ["m"]


@pytest.mark.req("B26")
async def test_a_store_tidies_itself_up_when_nothing_is_written(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Untidy(MemoryStore):
        steps = 3

        def tidy(self) -> bool:
            self.steps -= 1
            return self.steps > 0

    class Plain:
        async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return call(*args)

    store = Untidy()
    async with Broker(store=store, executor=Plain()) as broker:
        await broker.declare(Queue("work"))
        await trio.sleep(0.5)
        assert store.steps == 3
        await trio.sleep(1)
        assert store.steps == 0
        await trio.sleep(10)
        assert store.steps == 0
        await broker.declare(Queue("more"))
        await trio.sleep(2)
        assert store.steps < 0


@pytest.mark.req("B7")
async def test_nodes_are_declared_when_the_store_is_open() -> None:
    broker = Broker(store=MemoryStore())
    with pytest.raises(LocalProtocolError, match="enter the broker first"):
        await broker.declare(Queue("work"))


def test_a_store_is_named_by_its_kind(tmp_path: Path) -> None:
    with pytest.raises(AmqpError, match="memory:, sqlite:PATH"):
        Broker(store="file:x")


async def test_what_was_kept_and_what_is_made_on_use_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "amqp_rt.broker")
    url = f"sqlite:{tmp_path / 'store'}"
    for _ in range(2):
        async with (
            Broker(store=url, auto_create=["queue:jobs-*"]) as broker,
            broker.local() as peer,
            peer.sender("jobs-1") as out,
        ):
            await out.send("m", durable=True)
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [
        "node made: queue 'jobs-1', on its first use",
        "store read: 1 nodes, 1 messages in queues",
    ]


async def test_nodes_that_are_declared_and_deleted_are_logged_a_few_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "amqp_rt.broker")
    async with Broker(limits=Limits(log_lines_max=2)) as broker, broker.local() as peer:
        manager = peer.management()
        await manager.create(Queue("jobs", dead_letter="dead"))
        await manager.create(Queue("jobs", dead_letter="dead"))
        await manager.delete(Queue, "jobs")
        async with peer.receiver(dynamic=True):
            pass
        await broker.declare(Topic("t"), virtual_host="v")
        for _ in range(3):
            await broker.declare(Topic("t"))
            await broker.delete("t")
    assert [each.getMessage() for each in caplog.records] == [
        "node declared: queue 'jobs'",
        "node made: queue 'dead', for the dead letters of 'jobs'",
        "node deleted: queue 'jobs'",
        "node declared: topic 't' of virtual host 'v'",
        "node declared: topic 't'",
        "node deleted: topic 't'",
    ]


@pytest.mark.parametrize("node", [Queue("n"), Topic("n"), Log("n")])
async def test_refusals_of_the_store_log_a_few_lines(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    most = DEFAULT_LIMITS.log_lines_max
    store = Troubled()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(node)
        if isinstance(node, Topic):
            await peer.receiver("n", name="s", durable=1).wait_attached()
        async with peer.sender("n") as out:
            await out.send("x", durable=True)
            store.full = True
            for _ in range(most + 5):
                with pytest.raises(DeliveryRejected):
                    await out.send("x", durable=True)
            store.full = False
    lines = [each.getMessage() for each in caplog.records]
    refused = [line for line in lines if line.startswith("messages refused")]
    assert len(refused) == most
    assert refused[0].startswith("messages refused: 1 for 'n': amqp:resource-limit-exceeded")
