"""Rows and messages that are committed together, with interruptions at any point."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
from far_end import FarEnd, connected

from amqp_rt import Broker, Container, Delivery, Message
from amqp_rt.broker import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.errors import LocalProtocolError
from amqp_rt.outbox import SqliteOutbox
from amqp_rt.outbox.sqlite import RETRY_S
from amqp_rt.outcomes import ACCEPTED, Error

WORKER = Path(__file__).with_name("outbox_worker.py")


@pytest.fixture(params=["sqlite3", "sqlite3, autocommit", "apsw"])
def database(request: pytest.FixtureRequest) -> Iterator[Any]:
    found: Any
    if request.param == "apsw":
        found = apsw.Connection(":memory:")
    else:
        found = sqlite3.connect(
            ":memory:", isolation_level="" if request.param == "sqlite3" else None
        )
    yield found
    found.close()


async def drained(peer: Connection, address: str) -> list[Any]:
    """Consume the messages at *address*, and return their bodies."""
    found = []
    async with peer.receiver(address) as waiting:
        while (delivery := await waiting.get(within=0.2)) is not None:
            found.append(delivery.body)
            delivery.accept()
    return found


@pytest.mark.req("R14", "A13")
async def test_a_link_that_ends_while_the_application_has_the_database(
    autojump_clock: trio.testing.MockClock, sqlite_database: sqlite3.Connection
) -> None:
    outbox = SqliteOutbox(sqlite_database, "shop")
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(outbox.run, peer)
        async with outbox.transaction() as work:
            work.send("q", "first")
        await outbox.flush()
        async with outbox.transaction() as work:
            work.send("q", "second")
            # The outbox has found the row, and waits until it may write.
            outbox._work.set()
            await trio.testing.wait_all_tasks_blocked()
            far.link.detach(Error("amqp:resource-deleted", "gone"))
            await trio.sleep(1)
        await outbox.flush()
        assert [Message.decode(each.payload).body for each in far.heard.deliveries] == ["second"]
        nursery.cancel_scope.cancel()


@pytest.mark.req("R14")
async def test_rows_and_messages_happen_together(database: Any) -> None:
    database.execute("CREATE TABLE orders (body TEXT)")
    outbox = SqliteOutbox(database, "shop")
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("orders"), Queue("invoices"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.run, peer)
            async with peer.sender("orders") as out, peer.receiver("orders") as orders:
                await out.send("a", message_id="1")
                delivery = await orders.receive()
                with pytest.raises(ZeroDivisionError):
                    await fail(outbox, delivery)
                assert delivery.outcome is None
                assert await outbox.pending() == 0
                for expected in (True, False):
                    async with outbox.transaction() as work:
                        new = work.accept(delivery)
                        assert new is expected
                        if new:
                            database.execute("INSERT INTO orders VALUES ('a')")
                            work.send("invoices", "for a", subject="s")
                            work.send("invoices", Message(b"whole", message_id="mine"))
                assert delivery.outcome is not None
                # The same message again, as after a crash before it was accepted.
                await out.send("a", message_id="1")
                async with outbox.transaction() as work:
                    assert not work.accept(await orders.receive())
                await out.send("a", message_id=1)
                async with outbox.transaction() as work:
                    assert work.accept(await orders.receive())
            await outbox.flush()
            async with peer.receiver("invoices") as invoices:
                first, second = await invoices.receive(), await invoices.receive()
                assert (first.body, second.body) == ("for a", b"whole")
                assert first.message.durable
                assert (first.message.subject, second.message.message_id) == ("s", "mine")
                assert first.message.message_id is not None
                first.accept()
                second.accept()
            nursery.cancel_scope.cancel()
        assert database.execute("SELECT body FROM orders").fetchall() == [("a",)]
        assert broker.stats("orders").available == 0


async def fail(outbox: SqliteOutbox, delivery: Delivery) -> None:
    async with outbox.transaction() as work:
        assert work.accept(delivery)
        work.send("invoices", "never")
        outbox.database.execute("INSERT INTO orders VALUES ('never')")
        raise ZeroDivisionError


@pytest.mark.req("R14")
async def test_what_cannot_be_known_again_is_refused(database: Any) -> None:
    outbox = SqliteOutbox(database, "shop")
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("orders"))
        async with peer.sender("orders") as out, peer.receiver("orders") as orders:
            await out.send("a")
            delivery = await orders.receive()
            with pytest.raises(LocalProtocolError, match="without message-id"):
                async with outbox.transaction() as work:
                    work.accept(delivery)
    database.execute("BEGIN")
    with pytest.raises(LocalProtocolError, match="commit it first"):
        SqliteOutbox(database, "other")
    with pytest.raises(LocalProtocolError, match="commit it first"):
        async with outbox.transaction():
            pass


@pytest.mark.req("R14")
async def test_what_is_not_accepted(
    autojump_clock: trio.testing.MockClock, sqlite_database: sqlite3.Connection
) -> None:
    sqlite_database.isolation_level = ""
    outbox = SqliteOutbox(sqlite_database, "shop")
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.run, peer)
            async with outbox.transaction() as work:
                # A broker without a store rejects durable messages.
                work.send("q", "durable")
                work.send("q", "not", durable=False)
                work.send("later", "to nowhere yet", durable=False)
            await trio.sleep(RETRY_S / 2)
            assert await outbox.pending() == 1
            (refused,) = await outbox.refused()
            assert (refused.id, refused.address) == (1, "q")
            assert "no store" in refused.reason
            assert Message.decode(refused.payload).body == "durable"
            await outbox.retry(1)
            await trio.sleep(1)
            assert [each.id for each in await outbox.refused()] == [1]
            await outbox.drop(1)
            assert await outbox.refused() == []
            await broker.declare(Queue("later"))
            await trio.sleep(2 * RETRY_S)
            await outbox.flush()
            nursery.cancel_scope.cancel()
        assert await drained(peer, "q") == ["not"]
        assert await drained(peer, "later") == ["to nowhere yet"]


@pytest.mark.slow
@pytest.mark.req("R14")
async def test_many_messages_and_a_connection_that_is_lost_again_and_again(
    tmp_path: Path, sqlite_database: sqlite3.Connection
) -> None:
    sqlite_database.isolation_level = ""
    outbox = SqliteOutbox(sqlite_database, "shop")
    async with (
        Broker(store=f"sqlite:{tmp_path / 'broker.db'}") as broker,
        Container("shop") as shop,
    ):
        await broker.declare(Queue("q"), Queue("r"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with shop.connect(url) as peer, trio.open_nursery() as nursery:
            nursery.start_soon(outbox.run, peer)
            for batch in range(10):
                async with outbox.transaction() as work:
                    for number in range(30):
                        work.send("q", 30 * batch + number)
                    work.send("r", batch)
                await trio.sleep(0.02)
                for stream in list(broker.container.entry._accepted):
                    stream.close()
            await outbox.flush()
            nursery.cancel_scope.cancel()
        async with broker.local() as peer:
            assert await drained(peer, "q") == list(range(300))
            assert await drained(peer, "r") == list(range(10))


async def work(url: str, database: Path, step: int = -1) -> tuple[int, str]:
    command = [sys.executable, str(WORKER), url, str(database), str(step)]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=False, timeout=60)
    done = await trio.to_thread.run_sync(run)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.req("R14")
@pytest.mark.timeout(3600)  # every step, if it is a long run
@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by signals here")
async def test_killed_at_every_step(tmp_path: Path, brief_run: bool, long_run: bool) -> None:
    async with Broker(store=f"sqlite:{tmp_path / 'broker.db'}") as broker, broker.local() as peer:
        await broker.declare(Queue("orders"), Queue("invoices"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        wanted = ["a", "b", "c"]

        async def order(bodies: list[str]) -> None:
            async with peer.sender("orders") as out:
                for body in bodies:
                    await out.send(body, durable=True, message_id=f"order {body}")

        async def settle(database: Path) -> None:
            """Check that every step happened once, in order."""
            rows = sqlite3.connect(database)
            assert rows.execute("SELECT body FROM orders").fetchall() == [(b,) for b in wanted]
            assert rows.execute("SELECT count(*) FROM amqp_outbox").fetchall() == [(0,)]
            rows.close()
            assert await drained(peer, "invoices") == [f"invoice for {body}" for body in wanted]
            assert await drained(peer, "orders") == []

        await order(wanted)
        code, said = await work(url, tmp_path / "whole.db")
        assert code == 0
        await settle(tmp_path / "whole.db")
        steps = range(0, 3 * int(said), 1 if long_run else 57 if brief_run else 19)
        for step in steps:
            database = tmp_path / f"{step}.db"
            await order(wanted)
            code, _ = await work(url, database, step)
            if code:
                await work(url, database)
            await settle(database)


@pytest.mark.slow
@pytest.mark.req("R14")
async def test_objects_of_sqlalchemy_and_messages_happen_together() -> None:
    orm = pytest.importorskip("sqlalchemy.orm")
    alchemy = pytest.importorskip("sqlalchemy")
    registry = orm.registry()
    table = alchemy.Table(
        "orders", registry.metadata, alchemy.Column("body", alchemy.String, primary_key=True)
    )

    class Order:
        def __init__(self, body: str) -> None:
            self.body = body

    registry.map_imperatively(Order, table)
    # The outbox begins and commits the transactions: the driver must not begin any by itself.
    engine = alchemy.create_engine("sqlite://", connect_args={"isolation_level": None})
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("orders"), Queue("invoices"))
        with engine.connect() as connection, orm.Session(connection) as session:
            registry.metadata.create_all(connection)
            connection.commit()
            outbox = SqliteOutbox(connection.connection.driver_connection, "shop")

            async def process(delivery: Delivery, amount: float, divisor: float) -> None:
                async with outbox.transaction() as work:
                    assert work.accept(delivery)
                    session.add(Order(str(delivery.body)))
                    session.flush()
                    work.send("invoices", f"{amount / divisor:g} for {delivery.body}")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(outbox.run, peer)
                async with peer.sender("orders") as out, peer.receiver("orders") as orders:
                    await out.send("a", message_id="1")
                    delivery = await orders.receive()
                    with pytest.raises(ZeroDivisionError):
                        await process(delivery, 1, 0)
                    session.rollback()
                    assert session.query(Order).count() == 0
                    session.rollback()
                    await process(delivery, 1, 1)
                    session.commit()
                await outbox.flush()
                nursery.cancel_scope.cancel()
            assert [order.body for order in session.query(Order)] == ["a"]
            assert await drained(peer, "invoices") == ["1 for a"]
            assert await drained(peer, "orders") == []
    engine.dispose()
