"""Transactions of a client: what is sent and said in a block happens at its end, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from paged import Gate

from amqp_rt import Broker, Connection, Container, Message, Modify, Reconnect, connect, node
from amqp_rt.broker import Queue, Topic
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.errors import (
    AmqpError,
    ConnectionLost,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
    LocalProtocolError,
    TransactionRolledBack,
)
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.stores.base import ChangeSet, StoreFull
from amqp_rt.stores.memory import MemoryStore


@asynccontextmanager
async def a_broker(
    *declared: Queue | Topic, over: str = "local", **options: Any
) -> AsyncIterator[tuple[Broker, Connection]]:
    """A broker with the queues *q* and *out*, and a connection to it."""
    async with Broker(**options) as broker:
        await broker.declare(*(declared or (Queue("q"), Queue("out"))))
        if over == "local":
            async with broker.local() as peer:
                yield broker, peer
        else:
            (url,) = await broker.listen("amqp://127.0.0.1:0")
            async with connect(url) as peer:
                yield broker, peer


async def bodies(broker: Broker, address: str = "q") -> list[Any]:
    await broker.host.wait_kept()
    return [Message.decode(each).body for each in await broker.peek(address, 1_000)]


class Failure(Exception):
    pass


@pytest.mark.req("R3", "R4", "R11")
@pytest.mark.parametrize("over", ["local", "socket"])
async def test_a_block_moves_a_message_from_one_queue_to_another(over: str) -> None:
    async with (
        a_broker(over=over) as (broker, peer),
        peer.sender("out") as out,
        peer.sender("q") as first,
        peer.receiver("q") as messages,
    ):
        await first.send(1)
        delivery = await messages.receive()
        async with peer.transaction() as txn:
            assert await out.send("moved", transaction=txn) == ACCEPTED
            receipt = out.send_nowait("too", transaction=txn)
            delivery.accept(transaction=txn)
            assert delivery.outcome == ACCEPTED
            with trio.move_on_after(0.02):
                await receipt.outcome()
            assert await bodies(broker, "out") == []
            assert broker.stats("q").acquired == 1
        assert receipt.done
        assert await bodies(broker, "out") == ["moved", "too"]
        stats = broker.stats("q")
        assert (stats.acquired, stats.available, stats.accepted) == (0, 0, 1)
        # The discharge is final: the delivery is settled, and nothing takes part any more.
        assert delivery.presettled
        with pytest.raises(LocalProtocolError, match="not open"):
            await out.send("late", transaction=txn)
        with pytest.raises(LocalProtocolError, match="one block"):
            async with txn:
                pass


@pytest.mark.req("R7", "R11")
@pytest.mark.parametrize("over", ["local", "socket"])
async def test_an_exception_rolls_back_and_goes_on(over: str) -> None:
    async with (
        a_broker(over=over) as (broker, peer),
        peer.sender("out") as out,
        peer.sender("q") as first,
        peer.receiver("q") as messages,
    ):
        await first.send(1)
        delivery = await messages.receive()
        with pytest.raises(Failure):  # noqa: PT012
            async with peer.transaction() as txn:
                await out.send("never", transaction=txn)
                delivery.accept(transaction=txn)
                raise Failure
        # The delivery is ours as before.
        assert delivery.outcome is None
        assert broker.stats("q").acquired == 1
        async with peer.transaction() as txn:
            await out.send("now", transaction=txn)
            delivery.modify(transaction=txn)
        assert await bodies(broker, "out") == ["now"]
        again = await messages.receive()
        assert again.message.delivery_count == 1
        again.accept()


@pytest.mark.req("R4", "R11")
async def test_the_block_of_a_delivery_leaves_its_end_to_the_transaction() -> None:
    async with (
        a_broker() as (broker, peer),
        peer.sender("q") as first,
        peer.receiver("q", credit=1) as messages,
    ):
        for number in range(3):
            await first.send(number)
        async with await messages.receive() as delivery, peer.transaction() as txn:
            delivery.reject("no", transaction=txn)
        async with peer.transaction() as txn, await messages.receive() as delivery:
            delivery.accept(transaction=txn)
        with pytest.raises(Failure):  # noqa: PT012
            async with await messages.receive() as delivery, peer.transaction() as txn:
                delivery.accept(transaction=txn)
                raise Failure
        # Rolled back, the block of the delivery says what it says of failures.
        async with await messages.receive() as delivery:
            assert (delivery.body, delivery.message.delivery_count) == (2, 1)
            raise Modify(failed=False)
        stats = broker.stats("q")
        assert (stats.accepted, stats.dropped) == (1, 1)


@pytest.mark.req("R11")
async def test_cancellation_rolls_back() -> None:
    async with (
        a_broker() as (broker, peer),
        peer.sender("out") as out,
        peer.sender("q") as first,
        peer.receiver("q") as messages,
    ):
        await first.send(1)
        delivery = await messages.receive()
        with trio.CancelScope() as scope:
            async with peer.transaction() as txn:
                await out.send("never", transaction=txn)
                delivery.accept(transaction=txn)
                scope.cancel()
                await trio.sleep_forever()
        delivery.release()
        await out.send("after")
        assert await bodies(broker, "out") == ["after"]
        assert broker.stats("q").accepted == 0


@pytest.mark.req("R11")
async def test_what_waits_for_credit_holds_up_the_commit_and_not_the_rollback() -> None:
    async with (
        a_broker(Queue("q"), Queue("out", length_max=2)) as (broker, peer),
        peer.sender("out") as out,
        peer.receiver("out", credit=0) as drain,
    ):
        with trio.CancelScope() as scope:
            async with peer.transaction() as txn:
                for number in range(5):
                    out.send_nowait(number, transaction=txn)
                scope.deadline = trio.current_time() + 0.05
        assert scope.cancelled_caught
        assert out.pending == 0
        await out.send("after")
        delivery = await drain.get(within=1)
        assert delivery is not None
        assert delivery.body == "after"
        delivery.accept()
        assert broker.stats("out").enqueued == 1


@pytest.mark.req("R11")
async def test_cancelled_while_it_is_declared_there_is_none() -> None:
    async with a_broker() as (broker, peer):
        async with peer.transaction():
            assert len(broker.host.transactions) == 1
        with trio.CancelScope() as scope:
            scope.cancel()
            async with peer.transaction():
                raise AssertionError("it was entered")
        async with peer.transaction():
            pass
        assert len(broker.host.transactions) == 0


@pytest.mark.req("R6", "R11")
async def test_a_refused_message_fails_the_transaction_even_if_that_was_caught() -> None:
    async with a_broker() as (broker, peer), peer.sender("out") as out:
        with pytest.raises(TransactionRolledBack, match="not accepted") as failed:  # noqa: PT012
            async with peer.transaction() as txn:
                await out.send("a", transaction=txn)
                with pytest.raises(DeliveryRejected):
                    await out.send("there is no store", durable=True, transaction=txn)
        assert isinstance(failed.value.__cause__, DeliveryRejected)
        with pytest.raises(TransactionRolledBack):
            async with peer.transaction() as txn:
                out.send_nowait("there is no store", durable=True, transaction=txn)
        assert await bodies(broker, "out") == []


@pytest.mark.req("R8", "R11")
async def test_the_end_of_the_block_says_that_the_peer_gave_it_up() -> None:
    async with (
        a_broker(limits=Limits(transaction_s=0.0)) as (broker, peer),
        peer.sender("out") as out,
    ):
        with pytest.raises(TransactionRolledBack) as failed:  # noqa: PT012
            async with peer.transaction() as txn:
                await out.send("a", transaction=txn)
                broker.host.sweep()
        assert failed.value.condition == "amqp:transaction:timeout"
        assert await bodies(broker, "out") == []


@pytest.mark.req("R8", "R11")
async def test_a_transaction_goes_with_its_control_link() -> None:
    async with a_broker() as (broker, peer), peer.sender("out") as out:
        with pytest.raises(TransactionRolledBack, match="control link"):  # noqa: PT012
            async with peer.transaction() as txn:
                await out.send("a", transaction=txn)
                (found,) = broker.host.transactions._open.values()
                found.control.link.detach()
                with trio.fail_after(5):
                    while found.control.link.state != "DETACHED" and txn._error is None:
                        await trio.lowlevel.checkpoint()
                with pytest.raises(TransactionRolledBack):
                    await out.send("b", transaction=txn)
        async with peer.transaction() as txn:
            await out.send("c", transaction=txn)
        assert await bodies(broker, "out") == ["c"]


@pytest.mark.req("R8", "R11")
async def test_a_lost_connection_rolls_back_and_nothing_is_sent_again() -> None:
    async with Broker() as broker:
        await broker.declare(Queue("out"), Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with (
            connect(url, reconnect=Reconnect()) as peer,
            peer.sender("out", in_doubt="resend") as out,
            peer.sender("q") as first,
            peer.receiver("q") as messages,
        ):
            await first.send(1)
            delivery = await messages.receive()
            with pytest.raises(TransactionRolledBack):  # noqa: PT012
                async with peer.transaction() as txn:
                    await out.send("never", transaction=txn)
                    delivery.accept(transaction=txn)
                    for connection in list(broker.container.connections):
                        connection.close()
                    with trio.fail_after(10):
                        while txn._error is None:
                            await trio.lowlevel.checkpoint()
                    await out.wait_attached()
                    with pytest.raises((TransactionRolledBack, LinkDetached)):
                        await out.send("nor this", transaction=txn)
            again = await messages.receive()
            async with peer.transaction() as txn:
                # The old delivery is nobody's any more: it cannot be said of it that it counts.
                with pytest.raises(LinkDetached):
                    delivery.accept(transaction=txn)
                again.accept(transaction=txn)
                await out.send("now", transaction=txn)
            assert await bodies(broker, "out") == ["now"]
            assert broker.stats("q").accepted == 1


async def test_a_connection_lost_with_the_discharge_leaves_it_in_doubt() -> None:
    async with Broker(store=MemoryStore()) as broker:
        await broker.declare(Queue("out"))
        assert broker.host.journal is not None
        broker.host.journal.call = gate = Gate()
        gate.opened = trio.Event()
        async with broker.local() as peer, peer.sender("out") as out:

            async def lose() -> None:
                while len(broker.host.transactions):
                    await trio.lowlevel.checkpoint()
                peer.close()

            async with trio.open_nursery() as nursery:
                with pytest.raises(ConnectionLost):  # noqa: PT012
                    async with peer.transaction() as txn:
                        await out.send("a", durable=True, transaction=txn)
                        nursery.start_soon(lose)
        gate.opened.set()
        # Here it was committed all the same.
        assert await bodies(broker, "out") == ["a"]


@pytest.mark.req("R11")
async def test_a_peer_without_transactions_refuses() -> None:
    async with Container("plain") as container, container.local() as peer:
        for _ in range(2):
            with pytest.raises(LinkRefused) as refused:
                async with peer.transaction():
                    raise AssertionError("it was entered")
            assert refused.value.condition == "amqp:not-implemented"


@pytest.mark.req("R11", "R8")
async def test_too_many_transactions_are_refused() -> None:
    async with a_broker(limits=Limits(transactions_max=1)) as (_, peer), peer.transaction():
        with pytest.raises(AmqpError) as refused:
            async with peer.transaction():
                raise AssertionError("it was entered")
        assert refused.value.condition == "amqp:resource-limit-exceeded"
        async with peer.session() as session, session.transaction():
            pass


@pytest.mark.req("R9", "R11")
async def test_links_of_other_connections_cannot_take_part() -> None:
    async with (
        a_broker() as (broker, peer),
        broker.local() as other,
        other.sender("out") as out,
        peer.transaction() as txn,
    ):
        with pytest.raises(LocalProtocolError, match="another connection"):
            await out.send("a", transaction=txn)


@pytest.mark.req("R3")
async def test_a_node_of_an_application_takes_nothing_in_a_transaction() -> None:
    called: list[Any] = []

    @node("app")
    async def app(message: str) -> None:
        called.append(message)

    async with Broker(nodes=[app]) as broker, broker.local() as peer:
        sender = await peer.sender("app").__aenter__()
        with pytest.raises(TransactionRolledBack):  # noqa: PT012
            async with peer.transaction() as txn:
                with pytest.raises(LinkDetached) as refused:
                    await sender.send("m", transaction=txn)
                assert refused.value.condition == "amqp:not-implemented"
        assert called == []


# --- Kept ---------------------------------------------------------------------------------------


class Troubled(MemoryStore):
    """A disk that can be full, and remembers what was written together."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.batches: list[tuple[int, int]] = []

    def commit(self, batch: ChangeSet) -> None:
        if self.full and batch.puts:
            raise StoreFull("the disk is full")
        self.batches.append((len(batch.puts), len(batch.removes)))
        super().commit(batch)


@pytest.mark.req("R10", "B7")
async def test_all_of_a_transaction_is_one_record_of_the_store() -> None:
    store = Troubled()
    declared = (
        Queue("q", dead_letter="dead"),
        Queue("out"),
        Topic("news"),
        Queue("bin", dead_letter="news"),
    )
    async with (
        a_broker(*declared, store=store) as (broker, peer),
        peer.sender("q") as first,
        peer.sender("bin") as into_bin,
        peer.sender("out") as out,
        peer.receiver("q") as messages,
        peer.receiver("bin") as thrown,
        peer.receiver("news") as news,
    ):
        for name in ("accepted", "rejected", "modified", "released"):
            await first.send(name, durable=True)
        await first.send("in memory")
        await into_bin.send("thrown", durable=True)
        held = {each.body: each for each in [await messages.receive() for _ in range(5)]}
        rubbish = await thrown.receive()
        await broker.host.wait_kept()
        store.batches.clear()
        async with peer.transaction() as txn:
            await out.send("posted", durable=True, transaction=txn)
            await out.send("posted in memory", transaction=txn)
            held["accepted"].accept(transaction=txn)
            held["rejected"].reject("no", transaction=txn)
            held["modified"].modify(annotations={"x-opt-n": 1}, transaction=txn)
            held["released"].release(transaction=txn)
            held["in memory"].accept(transaction=txn)
            rubbish.reject("no", transaction=txn)
            assert store.batches == []
        # Two posts and copies, one rewritten; three are gone.
        assert store.batches == [(3, 3)]
        assert await bodies(broker, "out") == ["posted", "posted in memory"]
        assert await bodies(broker, "dead") == ["rejected"]
        assert (await news.receive()).body == "thrown"
        messages.finish()
        stats = broker.stats("q")
        assert (stats.accepted, stats.dead_lettered, stats.requeued) == (2, 1, 2)
    async with Broker(store=store) as broker:
        assert await bodies(broker, "out") == ["posted"]
        assert await bodies(broker, "dead") == ["rejected"]
        assert await bodies(broker, "bin") == []
        (modified, released) = (Message.decode(each) for each in await broker.peek("q", 9))
        assert (modified.body, modified.delivery_count) == ("modified", 1)
        assert modified.message_annotations == {"x-opt-n": 1}
        assert (released.body, released.delivery_count) == ("released", 0)


@pytest.mark.req("R10", "R7")
async def test_what_the_store_refuses_is_rolled_back_whole() -> None:
    store = Troubled()
    declared = (Queue("q", dead_letter="dead"), Queue("out"))
    async with (
        a_broker(*declared, store=store) as (broker, peer),
        peer.sender("q") as first,
        peer.sender("out") as out,
        peer.receiver("q") as messages,
    ):
        for name in ("accepted", "rejected", "modified"):
            await first.send(name, durable=True)
        held = {each.body: each for each in [await messages.receive() for _ in range(3)]}
        held_bytes = broker.host.memory.held
        store.full = True
        with pytest.raises(TransactionRolledBack, match="disk is full"):  # noqa: PT012
            async with peer.transaction() as txn:
                await out.send("in memory", transaction=txn)
                await out.send("posted", durable=True, transaction=txn)
                held["accepted"].accept(transaction=txn)
                held["rejected"].reject("no", transaction=txn)
                held["modified"].modify(annotations={"x-opt-n": 1}, transaction=txn)
        assert await bodies(broker, "out") == await bodies(broker, "dead") == []
        stats = broker.stats("q")
        assert (stats.acquired, stats.available) == (3, 0)
        assert broker.host.memory.held == held_bytes
        store.full = False
        async with peer.transaction() as txn:
            await out.send("posted", durable=True, transaction=txn)
            held["accepted"].accept(transaction=txn)
            held["rejected"].reject("no", transaction=txn)
        held["modified"].release()
    async with Broker(store=store) as broker:
        assert await bodies(broker, "out") == ["posted"]
        assert await bodies(broker, "dead") == ["rejected"]
        (modified,) = (Message.decode(each) for each in await broker.peek("q", 9))
        assert (modified.body, modified.delivery_count) == ("modified", 0)
        assert not modified.message_annotations


@pytest.mark.req("R10", "R8")
async def test_nothing_is_seen_or_answered_before_it_is_kept() -> None:
    store = MemoryStore()
    async with Broker(store=store) as broker:
        await broker.declare(Queue("q"), Queue("out"))
        assert isinstance(broker.host.journal, Journal)
        broker.host.journal.call = gate = Gate()
        async with (
            broker.local() as peer,
            peer.sender("out") as out,
            peer.sender("q") as first,
            peer.receiver("q") as messages,
        ):
            await first.send(1, durable=True)
            delivery = await messages.receive()
            gate.opened = trio.Event()
            over: list[bool] = []

            async def work() -> None:
                async with peer.transaction() as txn:
                    await out.send("a", durable=True, transaction=txn)
                    await out.send("b", transaction=txn)
                    delivery.accept(transaction=txn)
                over.append(True)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                with trio.fail_after(5):
                    while len(broker.host.transactions) or not broker.host.transactions._last:
                        await trio.lowlevel.checkpoint()
                await trio.sleep(0.02)
                assert over == []
                assert broker.stats("out").available == 0
                assert broker.stats("q").acquired == 1
                gate.opened.set()
            assert await bodies(broker, "out") == ["a", "b"]
            assert broker.stats("q").accepted == 1
