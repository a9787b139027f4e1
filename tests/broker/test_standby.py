"""Brokers on a store that several may be started on: a standby waits, and a broker that loses the store sends no outcomes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing
from brokers import client_of
from stalls import Stalls, beside

from amqp_rt import Broker, Container
from amqp_rt.broker import Queue
from amqp_rt.broker import broker as broker_module
from amqp_rt.broker.broker import store_of
from amqp_rt.container import running
from amqp_rt.errors import AmqpError, ConnectionLost
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.stores.base import (
    ChangeSet,
    OpenResult,
    SharedStore,
    StoreBusy,
    StoreFailed,
    StoreLost,
)
from amqp_rt.stores.memory import MemoryStore


class Shared(MemoryStore):
    """Store that two brokers share; it may be taken from the one that uses it."""

    on_disconnected: Callable[[], None] | None = None
    taken = False

    def commit(self, batch: ChangeSet) -> None:
        self.rejoin()
        super().commit(batch)

    def rejoin(self) -> None:
        if self.taken:
            raise StoreLost("the other broker uses the store")

    def take(self) -> None:
        self.taken = True
        self.abandon()


@pytest.mark.req("B26", "A19")
async def test_a_standby_waits_until_the_store_is_free(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = Shared()
    network = MemoryNetwork()
    second = Broker("second", store=store, executor=Stalls(), network=network)
    began = trio.current_time()

    async def start() -> None:
        async with second:
            took.append(trio.current_time() - began)
            assert second.has("q")
            assert second.standby == ""

    took: list[float] = []
    first = Broker("first", store=store, executor=Stalls(), network=network)
    async with trio.open_nursery() as nursery, first:
        await first.declare(Queue("q"))
        nursery.start_soon(start)
        await trio.sleep(60)
        assert second.standby == "the store is open already"
        health = second.container.health()
        assert not health.ready
        assert "standby: the store is open already" in health.reasons
        assert took == []
    assert 60 <= took[0] < 61


@pytest.mark.req("B26")
async def test_a_store_of_one_broker_is_not_waited_for() -> None:
    store = MemoryStore()
    assert not isinstance(store, SharedStore)
    async with Broker("first", store=store, executor=Stalls()):
        second = Broker("second", store=store, executor=Stalls())
        with pytest.raises(StoreBusy):
            await second.__aenter__()


class Busy(Shared):
    """Store that another broker always uses."""

    closed = False

    def open(self) -> OpenResult:
        raise StoreBusy("another broker uses the store")

    def close(self) -> None:
        self.closed = True


@pytest.mark.req("A10", "B26")
async def test_a_standby_is_stopped(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def signalled(
        stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        task_status.started()
        await trio.sleep(5)
        stop()

    monkeypatch.setattr(running, "stop_on_signals", signalled)
    store = Busy()
    broker = Broker("second", store=store, executor=Stalls(), network=MemoryNetwork())
    with trio.fail_after(10):
        await broker.run_async(listen="memory://second")
    assert store.closed


@pytest.mark.req("B7", "B26", "X25")
async def test_who_loses_the_store_answers_nobody_and_lets_clients_go(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The message whose commit fails is not answered, and goes to the other broker."""
    old, new = Shared(), Shared()
    network = MemoryNetwork()
    calls = Stalls()
    async with (
        Broker("new", store=new, executor=Stalls(), network=network) as second,
        trio.open_nursery() as nursery,
        Container("client", network=network) as client,
    ):
        await second.declare(Queue("q"))
        await second.listen("memory://new")
        ended: list[Exception] = []

        async def serve(*, task_status: trio.TaskStatus[Broker]) -> None:
            async with Broker("old", store=old, executor=calls, network=network) as first:
                await first.declare(Queue("q"))
                await first.listen("memory://old")
                task_status.started(first)
                try:
                    await first.serve()
                except StoreLost as error:
                    ended.append(error)

        first = await nursery.start(serve)
        async with (
            client.connect(["memory://old", "memory://new"]) as peer,
            peer.sender("q", in_doubt="resend") as out,
        ):
            await out.send("one", durable=True)
            stall = calls.at("commit")
            async with trio.open_nursery() as sending:
                answer = beside(sending, partial(out.send, "two", durable=True))
                async with stall:
                    old.take()
                await answer.get()
            assert len(ended) == 1
            health = first.container.health()
            assert "the store has failed: the other broker uses the store" in health.reasons
        # The first message is with the old broker, whose store another one would read.
        assert second.stats("q").available == 1


@pytest.mark.req("B26")
async def test_who_loses_the_store_while_nothing_is_written_lets_clients_go(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = Shared()
    async with Broker("old", store=store, executor=Stalls(), network=MemoryNetwork()) as broker:
        await broker.listen("memory://b")
        async with client_of(broker) as peer:
            await trio.sleep(5)
            assert store.on_disconnected is not None
            store.on_disconnected()
            # It was a matter of the network.
            await trio.sleep(5)
            assert broker.container.health().ready
            store.take()
            store.on_disconnected()
            with trio.fail_after(5):
                await peer.wait_closed()
            with pytest.raises(ConnectionLost, match="has lost its store"):
                peer.refuse_if_closed()
        with pytest.raises(StoreLost):
            await broker.serve()


class Failing(Shared):
    """Shared store whose commits fail, before and after it is opened again."""

    fails = False

    def commit(self, batch: ChangeSet) -> None:
        if self.fails:
            raise StoreFailed("the table is damaged")
        super().commit(batch)


@pytest.mark.req("B26")
async def test_a_broker_that_cannot_write_its_shared_store_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A standby would wait in vain for a broker that refuses everything."""
    store = Failing()
    async with Broker("old", store=store, executor=Stalls(), network=MemoryNetwork()) as broker:
        await broker.declare(Queue("q"))
        await broker.listen("memory://b")
        async with client_of(broker) as peer, peer.sender("q") as out:
            await out.send("one", durable=True)
            store.fails = True
            with trio.fail_after(5), pytest.raises(ConnectionLost, match="has lost its store"):
                await out.send("two", durable=True)
        with pytest.raises(StoreFailed, match="damaged"):
            await broker.serve()


@pytest.mark.req("R8", "R10", "B26")
async def test_a_transaction_whose_store_is_lost_is_in_doubt(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, calls = Shared(), Stalls()
    async with Broker("old", store=store, executor=calls, network=MemoryNetwork()) as broker:
        await broker.declare(Queue("q"))
        await broker.listen("memory://b")
        ended: list[Exception] = []

        async def post() -> None:
            try:
                async with (
                    client_of(broker) as peer,
                    peer.sender("q") as out,
                    peer.transaction() as transaction,
                ):
                    await out.send("one", durable=True, transaction=transaction)
                    posted.set()
            except* AmqpError as group:
                ended.extend(group.exceptions)  # type: ignore[arg-type]

        posted = trio.Event()
        async with trio.open_nursery() as nursery:
            stall = calls.at("commit")
            nursery.start_soon(post)
            await posted.wait()
            async with stall:
                store.take()
        assert ended
        assert broker.stats("q").available == 0
    assert [each.levelname for each in caplog.records if each.name == "amqp_rt.store"] == [
        "CRITICAL"
    ]
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.req("U1")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("postgresql:", "pip install amqp-rt-postgres"),
        ("postgrex://u:secret@h/db", "'postgrex:…' is no store"),
        ("memory:x", "'memory:x' is no store: it is memory:, sqlite:PATH"),
        ("sqlite", "'sqlite' is no store"),
    ],
)
def test_what_is_no_store_is_named_without_its_password(
    text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "entry_points", lambda **_: ())
    with pytest.raises(AmqpError, match=why):
        store_of(text)


@pytest.mark.req("U1")
def test_a_plug_in_provides_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Loaded:
        def load(self) -> Callable[[str], Shared]:
            return lambda url: seen.append(url) or Shared()

    monkeypatch.setattr(
        broker_module,
        "entry_points",
        lambda group, name: [Loaded()] if (group, name) == ("amqp_rt.stores", "shared") else [],
    )
    assert isinstance(store_of("shared://somewhere"), Shared)
    assert seen == ["shared://somewhere"]
