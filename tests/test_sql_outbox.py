"""Outbox and inbox on databases of SQLAlchemy: rows and messages happen together, with interruptions at any statement."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio
from far_end import FarEnd, connected
from sql_shop import Shop, declare, engine_of, nodes_of, url_of
from sqlalchemy import Engine, MetaData, event, func, insert, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from amqp_rt import Broker, Container, Message, Modify, PerMessage, Release, node, sync
from amqp_rt.broker import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.errors import DeliveryNotAccepted, DeliveryRejected, LocalProtocolError
from amqp_rt.outbox import SqlInbox, SqlOutbox
from amqp_rt.outbox.sql import relays as relays_module
from amqp_rt.outbox.sql.schema import NAME_MAX
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error, Rejected

pytestmark = [pytest.mark.req("R14"), pytest.mark.slow]

WORKER = Path(__file__).with_name("sql_outbox_worker.py")
PROJECT = Path(__file__).parent.parent / "pyproject.toml"


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = engine_of(url_of(request.param, request, tmp_path))
    yield made
    made.dispose()


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = engine_of(url_of("postgresql", request, tmp_path), pool_pre_ping=True)
    yield made
    made.dispose()


@asynccontextmanager
async def relaying(shop: Shop, peer: Connection) -> AsyncIterator[trio.CancelScope]:
    """Relay for the time of the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.relay, shop.outbox)
        yield nursery.cancel_scope
        nursery.cancel_scope.cancel()


def send(shop: Shop, *bodies: object, address: str = "q", **properties: Any) -> None:
    """Commit messages to the outbox, in one transaction."""
    with shop.sessions.begin() as session:
        for body in bodies:
            shop.outbox.send(session, address, body, **properties)


def bodies(far: FarEnd) -> list[Any]:
    heard = [each for recorder in far.recorders for each in recorder.deliveries]
    return [Message.decode(each.payload).body for each in heard]


def in_table(shop: Shop) -> int:
    with shop.sessions() as session:
        return shop.outbox._rows.pending(session)


async def until(true: Any) -> None:
    with trio.fail_after(20):
        while not true():  # noqa: ASYNC110 (nothing tells of it)
            await trio.sleep(0.01)


async def drained(peer: Connection, address: str) -> list[Any]:
    """Consume the messages at *address*, and return their bodies."""
    found = []
    async with peer.receiver(address) as waiting:
        while (delivery := await waiting.get(within=0.2)) is not None:
            found.append(delivery.body)
            delivery.accept()
    return found


# --- the outbox ---


async def test_messages_are_sent_after_the_commit_and_never_without_it(engine: Engine) -> None:
    shop = declare(engine)
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with relaying(shop, peer):
            with shop.sessions() as session:
                shop.outbox.send(session, "q", "never")
                session.flush()
                session.rollback()
            with shop.sessions() as session:
                message_id = shop.outbox.send(session, "q", {"order": 1}, subject="s")
                session.flush()
                await trio.sleep(0.1)
                assert broker.stats("q").available == 0
                with session.begin_nested() as part:
                    shop.outbox.send(session, "q", "never either")
                    part.rollback()
                mine = shop.outbox.send(session, "q", Message(b"whole", message_id="mine"))
                session.commit()
                # The session goes on, and so do its later transactions.
                shop.outbox.send(session, "q", "another")
                session.commit()
            await shop.outbox.flush()
        async with peer.receiver("q") as waiting:
            first, second, third = [await waiting.receive() for _ in range(3)]
        assert first.decode(dict) == {"order": 1}
        assert (first.message.message_id, first.message.durable) == (message_id, True)
        assert first.message.subject == "s"
        assert (second.body, second.message.message_id, mine) == (b"whole", "mine", "mine")
        assert third.body == "another"
    assert await shop.outbox.pending() == 0


async def test_a_commit_wakes_the_relay_of_its_process(engine: Engine) -> None:
    shop = declare(engine, poll_s=1000)
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, relaying(shop, peer):
        await trio.sleep(0.2)
        send(shop, "a")
        await until(lambda: bodies(far) == ["a"])
        thread = threading.Thread(target=send, args=(shop, "b"))
        thread.start()
        await until(lambda: bodies(far) == ["a", "b"])
        thread.join()


async def test_a_commit_of_another_process_wakes_the_relay(
    postgres: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "NOTIFIED_S", 1000)
    shop = declare(postgres, poll_s=1000)
    other = declare(engine_of(postgres.url), poll_s=1000)
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, relaying(shop, peer):
        send(other, "a")
        await until(lambda: bodies(far) == ["a"])
        await trio.sleep(0.1)
        send(other, "b")
        await until(lambda: bodies(far) == ["a", "b"])
    other.sessions.kw["bind"].dispose()


async def test_a_commit_after_a_savepoint_wakes_the_relay(engine: Engine) -> None:
    shop = declare(engine, poll_s=1000)
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, relaying(shop, peer):
        await trio.sleep(0.2)
        with shop.sessions.begin() as session:
            # The driver of SQLite begins a transaction at this statement, not at a savepoint.
            session.execute(insert(shop.orders).values(body="a"))
            with session.begin_nested():
                shop.outbox.send(session, "q", "a")
            await trio.sleep(0.2)
        await until(lambda: bodies(far) == ["a"])


async def test_other_processes_are_found_without_notices(tmp_path: Path) -> None:
    made = [engine_of(f"sqlite:///{tmp_path / 'shop.db'}") for _ in range(2)]
    shop, other = [declare(each, poll_s=0.02) for each in made]
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, relaying(shop, peer):
        send(other, "a")
        await until(lambda: bodies(far) == ["a"])
        await shop.outbox.flush()
    for each in made:
        each.dispose()


async def test_messages_that_are_not_accepted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amqp_rt.outbox.sql.relays.RETRY_S", 0.05)
    monkeypatch.setattr("amqp_rt.outbox.sql.rows.RETRY_S", 0.05)
    shop = declare(engine, poll_s=0.02)
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with relaying(shop, peer):
            # A broker without a store rejects durable messages.
            send(shop, "durable")
            send(shop, "not", durable=False)
            send(shop, "to nowhere yet", address="later", durable=False)
            await until(lambda: broker.stats("q").available == 1)
            await until(lambda: len(refused_in(shop)) == 1)
            (refused,) = await shop.outbox.refused()
            assert (refused.address, await shop.outbox.pending()) == ("q", 1)
            assert "no store" in refused.reason
            assert Message.decode(refused.payload).body == "durable"
            await shop.outbox.retry(refused.id)
            await until(lambda: refused_in(shop) == [refused.id])
            await shop.outbox.drop(refused.id)
            assert await shop.outbox.refused() == []
            await broker.declare(Queue("later"))
            await shop.outbox.flush()
        assert await drained(peer, "q") == ["not"]
        assert await drained(peer, "later") == ["to nowhere yet"]


def refused_in(shop: Shop) -> list[int]:
    table = shop.outbox.metadata.tables["amqp_outbox"]
    with shop.sessions() as session:
        return list(session.scalars(select(table.c.id).where(table.c.state == 1)))


async def test_a_message_that_is_released_holds_up_those_that_follow(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amqp_rt.outbox.sql.rows.RETRY_S", 0.3)
    monkeypatch.setattr(relays_module, "NOTIFIED_S", 0.1)
    shop = declare(engine, poll_s=0.02)
    far = FarEnd(credit=1, settle=RELEASED)
    async with connected(far) as peer, relaying(shop, peer):
        send(shop, "a")
        await until(lambda: bodies(far) == ["a"])
        send(shop, "b")
        await trio.sleep(0.1)
        assert bodies(far) == ["a"]
        far.heard.settle = ACCEPTED
        far.link.grant(100)
        await until(lambda: bodies(far) == ["a", "a", "b"])
        await shop.outbox.flush()


@pytest.mark.parametrize(
    ("order", "first", "then"),
    [
        # One relay has all messages to an address, or all of a group.
        ("address", ["a1", "a2", "b1", "x"], []),
        ("group", ["a1", "a2"], ["b1", "x"]),
    ],
)
async def test_relays_share_messages_and_keep_their_order(
    postgres: Engine, order: str, first: list[str], then: list[str]
) -> None:
    shop = declare(postgres, order=order, poll_s=1000)
    other = declare(engine_of(postgres.url), order=order, poll_s=0.02)
    slow, fast = FarEnd(credit=4), FarEnd(credit=100, settle=ACCEPTED)
    with shop.sessions.begin() as session:
        for each in ("a1", "a2"):
            shop.outbox.send(session, "q", each, group_id="a")
    async with connected(slow) as peer, connected(fast) as another:
        if order == "address":
            send(shop, "b1", group_id="b")
            send(shop, "x")
        async with relaying(shop, peer) as slow_relay:
            # It has sent these, and has no outcome yet.
            await until(lambda: bodies(slow) == first)
            if order == "group":
                send(shop, "b1", group_id="b")
                send(shop, "x")
            async with relaying(other, another):
                await until(lambda: bodies(fast) == then)
                send(shop, "a3", group_id="a")
                await trio.sleep(0.2)
                assert bodies(fast) == then
                # The first relay is killed: all it held is sent by the other one.
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(relays_module, "GRACE_S", 0.0)
                    slow_relay.cancel()
                    await until(lambda: len(bodies(fast)) == 5)
                assert bodies(fast) == [*then, *first, "a3"]
                await other.outbox.flush()
    other.sessions.kw["bind"].dispose()


async def test_receivers_that_take_their_time_hold_up_no_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "BATCHES_MAX", 1)
    monkeypatch.setattr(relays_module, "SLOT_S", 0.1)
    shop = declare(engine)
    heard = []
    done = trio.Event()

    @node("slow/{number}", slots=3)
    async def slow(number: int, body: str) -> None:
        heard.append(f"slow {number}")
        await done.wait()

    @node("good")
    async def good(body: str) -> None:
        heard.append(body)

    async with (
        Container("c", nodes=[slow, good]) as container,
        container.local() as peer,
        relaying(shop, peer),
    ):
        for number in range(3):
            send(shop, "x", address=f"slow/{number}")
        await until(lambda: len(heard) == 3)
        send(shop, "a", address="good")
        await until(lambda: "a" in heard)
        await until(lambda: in_table(shop) == 3)
        done.set()
        with trio.fail_after(20):
            await shop.outbox.flush()
    assert sorted(heard) == ["a", "slow 0", "slow 1", "slow 2"]


async def test_rows_are_lent_while_a_receiver_decides(
    postgres: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "SLOT_S", 0.1)
    monkeypatch.setattr(relays_module, "LEASE_S", 0.6)
    monkeypatch.setattr(relays_module, "GRACE_S", 0.1)
    shop = declare(postgres, poll_s=0.02)
    other = declare(engine_of(postgres.url), poll_s=0.02)
    slow, fast = FarEnd(credit=4), FarEnd(credit=100, settle=ACCEPTED)
    send(shop, "a", "b", "c")
    async with (
        connected(slow) as peer,
        connected(fast) as another,
        relaying(shop, peer) as slow_relay,
    ):
        await until(lambda: len(bodies(slow)) == 3)
        slow.heard.deliveries[0].settle(ACCEPTED)
        # What is known is recorded when the transaction ends.
        await until(lambda: in_table(shop) == 2)
        async with relaying(other, another):
            await trio.sleep(1.2)
            assert bodies(fast) == []
            slow.heard.deliveries[1].settle(ACCEPTED)
            await trio.sleep(0.1)
            slow_relay.cancel()
            # Given back at its end.
            with trio.fail_after(relays_module.NOTIFIED_S / 2):
                await until(lambda: bodies(fast) == ["c"])
            await other.outbox.flush()
    other.sessions.kw["bind"].dispose()


async def test_large_backlogs_and_large_messages_leave_in_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amqp_rt.outbox.sql.rows.BATCH_OCTETS", 2_000)
    shop = declare(engine)
    sizes = [1_000 if not each % 7 else 3_000 if not each % 50 else 10 for each in range(120)]
    wanted = [f"{number}:{'x' * size}" for number, size in enumerate(sizes)]
    send(shop, *wanted)
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with relaying(shop, peer):
            await shop.outbox.flush()
        assert await drained(peer, "q") == wanted


@pytest.mark.parametrize("order", ["address", "group"])
def test_a_backlog_is_not_read_for_each_batch(postgres: Engine, order: Any) -> None:
    outbox = declare(postgres, order=order).outbox
    rows = (
        "INSERT INTO amqp_outbox (address, stream, payload)"
        " SELECT 'a', '', '\\x00' FROM generate_series(1, 30000)"
    )
    with postgres.begin() as connection:
        connection.execute(text(rows))
        connection.execute(text("INSERT INTO amqp_outbox (address, payload) VALUES ('b', '\\x00')"))
        connection.execute(text("ANALYZE amqp_outbox"))
    with Session(postgres) as session:
        # Comparing each row with each other one takes minutes.
        session.execute(text("SET statement_timeout = '2s'"))
        assert [each.id for each in outbox._rows.take(session, "a", 100)] == [*range(1, 101)]
        assert outbox._rows.addresses(session, "") == ["a", "b"]
        assert outbox._rows.addresses(session, "a") == ["b"]
        assert outbox._rows.addresses(session, "", "a") == ["a"]
        plan = session.scalars(
            text("EXPLAIN SELECT min(address) FROM amqp_outbox WHERE state = 0 AND address > 'a'")
        )
        assert "amqp_outbox_by_" in "".join(plan)


async def test_groups_that_wait_hold_up_no_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amqp_rt.outbox.sql.rows.PAGE", 4)
    shop = declare(engine, order="group")
    send(shop, *range(10), group_id="waits")
    send(shop, *range(10), group_id="waits too")
    send(shop, "c1", "c2", group_id="c")
    send(shop, "alone")
    table = shop.outbox.metadata.tables["amqp_outbox"]
    with shop.sessions.begin() as session:
        # The first one of a group was released.
        session.execute(update(table).where(table.c.id.in_([1, 11])).values(due=2e9 * 10))
    with shop.sessions() as session:
        taken = shop.outbox._rows.take(session, "q", 100)
        assert [Message.decode(each.payload).body for each in taken] == ["c1", "c2", "alone"]
        assert [each.id for each in shop.outbox._rows.take(session, "q", 1)] == [21]


async def test_addresses_without_credit_give_their_place_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "LINKS_MAX", 2)
    monkeypatch.setattr(relays_module, "CREDIT_S", 0.2)
    shop = declare(engine_of(url_of("sqlite", None, tmp_path)), poll_s=0.05)  # type: ignore[arg-type]
    full = [f"full {number}" for number in range(5)]
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(*(Queue(name, length_max=1) for name in full), Queue("good"))
        for name in full:
            async with peer.sender(name) as out:
                await out.send("first")
            send(shop, "second", address=name)
        async with relaying(shop, peer):
            await trio.sleep(0.1)
            send(shop, "a", address="good")
            await until(lambda: broker.stats("good").available == 1)
            # Those that gave it away get it again.
            async with peer.receiver(full[0]) as waiting:
                for body in ("first", "second"):
                    with trio.fail_after(20):
                        delivery = await waiting.receive()
                    assert delivery.body == body
                    delivery.accept()


async def test_refused_addresses_hold_up_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays_module, "LINKS_MAX", 2)
    monkeypatch.setattr(relays_module, "ADDRESSES_MAX", 3)
    monkeypatch.setattr("amqp_rt.outbox.sql.rows.ADDRESSES_MAX", 3)
    shop = declare(engine_of(url_of("sqlite", None, tmp_path)), poll_s=1000)  # type: ignore[arg-type]
    for number in range(20):
        send(shop, "x", address=f"gone {number}")
    send(shop, "a", address="z")
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("z"))
        async with relaying(shop, peer):
            with trio.fail_after(relays_module.RETRY_S):
                await until(lambda: broker.stats("z").available == 1)
            (relay,) = shop.outbox._relays
            refused = "gone 0"
            assert relay._longer(refused) == 2 * relays_module.RETRY_S
            relay._paused[refused] = relay._paused[refused]._replace(seconds=50)
            assert relay._longer(refused) == relays_module.REFUSED_S
            assert relay._longer("z") == relays_module.RETRY_S
    lines = [each for each in caplog.records if "wait" in each.getMessage()]
    assert 0 < len(lines) <= broker.container.limits.log_lines_max


async def test_a_database_that_goes_away_is_waited_for(
    postgres: Engine, postgresql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "RETRY_S", 0.05)
    shop = declare(postgres, poll_s=0.05)
    far = FarEnd(credit=100)
    async with connected(far) as peer, relaying(shop, peer):
        send(shop, "a")
        await until(lambda: bodies(far) == ["a"])
        name = postgres.url.database
        await trio.to_thread.run_sync(
            postgresql.run,
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
        )
        # The outcome arrives, and the transaction that held the row is gone.
        far.heard.settle = ACCEPTED
        far.heard.deliveries[0].settle(ACCEPTED)
        with trio.fail_after(20):
            await flush_when_there(shop)
        send(shop, "b")
        await until(lambda: bodies(far) == ["a", "b"])
        await shop.outbox.flush()


async def flush_when_there(shop: Shop) -> None:
    """Wait for the end of all messages, with a database that comes back."""
    while True:
        try:
            return await shop.outbox.flush()
        except OperationalError:
            await trio.sleep(0.05)


async def test_outboxes_of_the_same_name_in_several_schemas(postgres: Engine) -> None:
    sessions = sessionmaker(postgres)
    made = []
    for schema in ("shop", "a:b"):
        with postgres.begin() as connection:
            connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
        outbox = SqlOutbox(sessions, metadata=MetaData(schema=schema), poll_s=1000)
        await outbox.create_tables()
        made.append(outbox)
    # As in another process: it is woken by notices only.
    relaying_one = SqlOutbox(sessions, metadata=MetaData(schema="a:b"), poll_s=1000)
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer, trio.open_nursery() as nursery:
        nursery.start_soon(relaying_one.run, peer)
        await trio.sleep(0.3)
        with sessions.begin() as session:
            for outbox in made:
                outbox.send(session, "q", outbox._rows.name)
        with trio.fail_after(relays_module.NOTIFIED_S / 2):
            await made[1].flush()
        nursery.cancel_scope.cancel()
    assert bodies(far) == ["a:b.amqp_outbox"]
    assert await made[0].pending() == 1
    assert SqlOutbox(sessions, table="é" * 60)._rows.channel.startswith("amqp_outbox_")


async def test_texts_with_a_nul_are_stored_without_it(engine: Engine) -> None:
    shop = declare(engine, order="group")
    far = FarEnd(credit=100, settle=Rejected(Error("amqp:not-allowed", "no \0")))
    with pytest.raises(ValueError, match="an address has no NUL"):
        send(shop, "a", address="a\0b")
    send(shop, "a", group_id="a\0b")
    with shop.sessions.begin() as session:
        assert shop.inbox.record_now(session, "a\0b", "id")
        assert not shop.inbox.record_now(session, "a\0b", "id")
    async with connected(far) as peer, relaying(shop, peer):
        with trio.fail_after(20):
            await shop.outbox.flush()
    (refused,) = await shop.outbox.refused()
    assert refused.reason == r"no \x00 [amqp:not-allowed]"


async def test_mistakes_are_told_in_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(f"sqlite:///{tmp_path / 'empty.db'}")
    sessions = sessionmaker(engine)
    with pytest.raises(TypeError, match="a session_factory is a sessionmaker"):
        SqlOutbox(engine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a session_factory is a sessionmaker"):
        SqlInbox(scoped_session(sessions))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order is 'address' or 'group', not 'fifo'"):
        SqlOutbox(sessions, order="fifo")  # type: ignore[arg-type]
    outbox = SqlOutbox(sessions, table="letters")
    with pytest.raises(ValueError, match="an address has 1 to 255 characters, not 256"):
        outbox.send(sessions(), "a" * (NAME_MAX + 1), "x")
    with pytest.raises(TypeError, match="a message is sent with a session of SQLAlchemy"):
        outbox.send(engine, "a", "x")  # type: ignore[arg-type]
    async with connected(FarEnd(credit=1)) as peer:
        with pytest.raises(LocalProtocolError, match=r"no table 'letters': create it with create_"):
            await outbox.run(peer)
        await outbox.create_tables()
        with monkeypatch.context() as patch:
            patch.setattr("amqp_rt.outbox.sql.schema.DIALECTS", {"postgresql"})
            with pytest.raises(LocalProtocolError, match="in PostgreSQL and SQLite, not in 'sql"):
                await outbox.run(peer)
    with pytest.raises(LocalProtocolError, match="not in 'mysql'"):
        outbox.schema("mysql")
    outbox.send(scoped_session(sessions), "a" * NAME_MAX, "x")
    engine.dispose()


def test_the_schema_is_sql_for_migrations(postgres: Engine) -> None:
    sessions = sessionmaker(postgres)
    outbox, inbox = SqlOutbox(sessions, table="o"), SqlInbox(sessions, table="i")
    with postgres.begin() as connection:
        for statement in outbox.schema("postgresql") + inbox.schema("postgresql"):
            connection.execute(text(statement))
    with sessions.begin() as session:
        outbox.send(session, "q", "x")
        assert inbox.record_now(session, "q", "id")
    assert any("AUTOINCREMENT" in each for each in outbox.schema("sqlite"))


IMPORTING_PROGRAM = """
import sys
from amqp_rt import outbox

for missing in sys.argv[1:]:
    for name in ("SqlOutbox", "SqlInbox"):
        sys.modules[missing] = None
        try:
            getattr(outbox, name)
        except ImportError as error:
            print(missing, name, error)
        # The next import begins anew.
        for each in [*sys.modules]:
            if each.startswith(("amqp_rt.outbox.sql", "sqlalchemy", missing)):
                del sys.modules[each]
"""


def test_without_sqlalchemy_the_import_tells_what_to_install() -> None:
    # 2.0 imports greenlet later.
    missing = ["sqlalchemy", *(() if version("sqlalchemy").startswith("2.0.") else ("greenlet",))]
    command = [sys.executable, "-c", IMPORTING_PROGRAM, *missing]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    what = "SqlOutbox and SqlInbox need SQLAlchemy 2: pip install 'amqp-rt[sqlalchemy]'"
    said = [f"{each} {name} {what}" for each in missing for name in ("SqlOutbox", "SqlInbox")]
    assert run.returncode == 0, run.stderr
    assert [line.partition(", and")[0] for line in run.stdout.splitlines()] == said


def test_the_extra_has_all_that_the_import_takes() -> None:
    """The development extra names greenlet as well: only an empty environment shows that it is missing."""
    given = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert [each for each in given["sqlalchemy"] if each.startswith("sqlalchemy[asyncio]")]


# --- the inbox ---


async def test_a_node_skips_messages_that_were_processed(engine: Engine) -> None:
    shop = declare(engine)
    async with (
        Broker(volatile=True, nodes=nodes_of(shop)) as broker,
        broker.local() as peer,
        peer.sender("orders") as out,
    ):
        await out.send("a", message_id="1")
        await out.send("a", message_id="1")
        # Types of message-ids are distinguished, and long ones are recognized.
        await out.send("b", message_id=1)
        for _ in range(2):
            await out.send("c", message_id="x" * 5_000)
        with pytest.raises(DeliveryRejected, match="'orders' takes messages with a message-id"):
            await out.send("d")
        assert broker.container.stats()["orders"]["rejected"] == 1
    assert shop.rows() == ["a", "b", "c"]
    assert await shop.outbox.pending() == 3


async def test_a_message_that_an_inbox_cannot_recognize_is_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    shop = declare(engine)
    async with (
        Broker(volatile=True) as broker,
        Container("shop", nodes=nodes_of(shop)) as container,
        container.connect((await broker.listen("amqp://127.0.0.1:0"))[0]) as peer,
    ):
        await broker.declare(Queue("orders", dead_letter="dead"))
        await peer.serve()
        async with peer.sender("orders") as out:
            await out.send("a", durable=True)
        await until(lambda: broker.stats("dead").available == 1)
    (line,) = [each.getMessage() for each in caplog.records if each.name == "amqp_rt.handlers"]
    assert "message rejected: to 'orders', message-id None: not taken by" in line
    assert "'orders' takes messages with a message-id only" in line


async def test_a_message_that_was_not_processed_is_not_recorded(engine: Engine) -> None:
    shop = declare(engine)
    endings: list[Any] = [ZeroDivisionError(), Modify("not yet"), None]
    returned: list[Any] = [Release("later"), RELEASED]

    @node("orders", inbox=shop.inbox, thread=True)
    def place(order: str, session: Session) -> Any:
        session.execute(insert(shop.orders).values(body=order))
        shop.outbox.send(session, "invoices", order)
        if returned:
            return returned.pop()
        if (ending := endings.pop(0)) is not None:
            raise ending
        return None

    async with (
        Container("c", nodes=[place]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        for _ in range(4):
            with pytest.raises(DeliveryNotAccepted):
                await out.send("a", message_id="1")
            assert shop.rows() == []
        for _ in range(2):
            await out.send("a", message_id="1")
    assert (shop.rows(), await shop.outbox.pending()) == (["a"], 1)


@pytest.mark.parametrize("own_session", [False, True])
async def test_a_handler_that_ends_its_transaction_fails(
    engine: Engine, caplog: pytest.LogCaptureFixture, own_session: bool
) -> None:
    shop = declare(engine)

    def end(session: Session) -> None:
        order = session.info.pop("order")
        session.execute(insert(shop.orders).values(body=order))
        if order == "commits, and fails":
            session.commit()
        elif order == "goes on after a rollback":
            session.rollback()
            session.execute(insert(shop.orders).values(body=order))
        elif order == "closes":
            session.close()
        elif order == "commits the connection":
            session.connection().get_transaction().commit()  # type: ignore[union-attr]
        else:
            with session.begin_nested():
                session.execute(insert(shop.orders).values(body=order))
            with session.begin_nested() as part:
                session.execute(insert(shop.orders).values(body="never"))
                part.rollback()

    @node("orders", inbox=shop.inbox, thread=True)
    def place(order: str, session: Session) -> None:
        session.info["order"] = order
        end(session)

    @asynccontextmanager
    async def session() -> AsyncIterator[Session]:
        with shop.sessions.begin() as session:
            yield session

    resources = [PerMessage(session)] if own_session else []
    async with (
        Container("c", nodes=[place], resources=resources) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        for each in ("commits, and fails", "goes on after a rollback", "closes"):
            for _ in range(2):
                with pytest.raises(DeliveryNotAccepted):
                    await out.send(each, message_id=each)
        assert shop.rows() == []
        assert "the handler of a message to 'orders' commits its session" in caplog.text
        assert "'orders' has ended the transaction of its session" in caplog.text
        assert "use session.begin_nested() for parts that may fail" in caplog.text
        with pytest.raises(DeliveryNotAccepted):
            await out.send("commits the connection", message_id=1)
        await out.send("parts", message_id=2)
        await out.send("parts", message_id=2)
    assert shop.rows() == ["commits the connection", "parts", "parts"]


async def test_the_session_of_the_container_has_the_record(engine: Engine) -> None:
    shop = declare(engine)
    opened: list[str] = []

    @asynccontextmanager
    async def session() -> AsyncIterator[Session]:
        with shop.sessions.begin() as session:
            opened.append("session")
            yield session

    @node("orders", inbox=shop.inbox)
    async def place(order: str, session: Session) -> None:
        session.execute(insert(shop.orders).values(body=order))

    @node("whole", inbox=shop.inbox)
    async def count(order: str) -> None:
        opened.append(order)

    async with (
        Container("c", nodes=[place, count], resources=[PerMessage(session)]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
        peer.sender("whole") as whole,
    ):
        for _ in range(2):
            await out.send("a", message_id="1")
            # Another node, which has its own record.
            await whole.send("b", message_id="1")
    assert shop.rows() == ["a"]
    assert opened == ["session", "session", "b", "session", "session"]


async def test_two_deliveries_at_once_are_processed_once(postgres: Engine) -> None:
    shop = declare(postgres)
    go = threading.Event()

    @node("orders", inbox=shop.inbox, thread=True, slots=4)
    def place(order: str, session: Session) -> None:
        session.execute(insert(shop.orders).values(body=order))
        go.wait(20)

    async with (
        Container("c", nodes=[place]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
        trio.open_nursery() as nursery,
    ):
        for _ in range(4):
            nursery.start_soon(partial(out.send, "a", message_id="1"))
        await until(lambda: container.stats()["orders"]["running"] == 4)
        # One has the record, and the others wait for its transaction.
        await trio.sleep(0.2)
        go.set()
    assert shop.rows() == ["a"]


async def test_old_message_ids_are_deleted_in_portions(engine: Engine) -> None:
    shop = declare(engine)
    table = shop.inbox.metadata.tables["amqp_inbox"]

    def age(seconds: float) -> None:
        with shop.sessions.begin() as session:
            session.execute(update(table).values(at=table.c.at - seconds))

    with shop.sessions.begin() as session:
        for number in range(7):
            assert shop.inbox.record_now(session, "q", number)
        assert not shop.inbox.record_now(session, "q", 3)
    age(6 * 86_400)
    with shop.sessions.begin() as session:
        assert shop.inbox.prune(session) == 0
        assert shop.inbox.record_now(session, "q", "young")
    age(2 * 86_400)
    with shop.sessions.begin() as session:
        assert shop.inbox.prune(session, 5) == 5
        assert shop.inbox.prune(session, 5) == 2
        assert session.scalar(select(func.count()).select_from(table)) == 1
    age(6 * 86_400)
    # The first message that a node processes is followed by others' deletion.
    async with (
        Container("c", nodes=nodes_of(shop)) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        await out.send("a", message_id="1")
    with shop.sessions() as session:
        assert list(session.scalars(select(table.c.message))) == ["str:'1'"]


# --- interruptions at any statement ---


class Crash(Exception):
    """End of the process, as far as its database and its connections notice."""


class CrashingEngine:
    """Engine on a database whose statements fail, and lose their connection, from a given one on.

    A statement that is not sent is lost as one is whose answer does not arrive: either way the transaction is rolled back.
    """

    def __init__(self, url: Any, statement: int) -> None:
        self.engine = engine_of(url)
        self.count = 0
        #: The first statement that fails.
        self.statement = statement
        self.crashed = threading.Event()

    def arm(self) -> None:
        """Count statements from now on."""
        event.listen(self.engine, "before_cursor_execute", self._before)
        # Statements that other threads have sent meanwhile.
        event.listen(self.engine, "after_cursor_execute", self._fail)
        # The commit is a statement too; SQLAlchemy tells of it before it is sent.
        event.listen(self.engine, "commit", self._before)

    def _before(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.statement:
            self.crashed.set()
        self._fail()

    def _fail(self, *_: Any) -> None:
        if self.crashed.is_set():
            raise Crash


ORDERS = ["a", "b"]


async def place_orders(broker: Broker) -> None:
    async with broker.local() as peer, peer.sender("orders") as out:
        for body in ORDERS:
            await out.send(body, durable=True, message_id=f"order {body}")


async def work(
    broker: Broker,
    url: str,
    shop: Shop,
    crash: CrashingEngine | None = None,
    seen: Shop | None = None,
) -> None:
    """Run the application until its work is done, as *seen* by another program, or until it crashes."""
    seen = shop if seen is None else seen
    with trio.fail_after(30):
        async with (
            Container("shop", nodes=nodes_of(shop), outbox=shop.outbox) as container,
            container.connect(url, reconnect=None) as peer,
        ):
            await peer.serve()
            while crash is None or not crash.crashed.is_set():
                orders = broker.stats("orders")
                left = orders.available + orders.acquired + orders.delayed
                if left == 0 and not await seen.outbox.pending():
                    return
                await trio.sleep(0.01)
            # The process is gone: no more outcomes, no more frames.
            peer.close()
            raise Crash


async def check_once(broker: Broker, receiver: Shop, shop: Shop) -> None:
    """Check that each order has one row, and one invoice at a receiver with an inbox."""
    assert shop.rows() == ORDERS
    assert await shop.outbox.pending() == 0
    seen: list[str] = []
    ids: set[Any] = set()
    async with broker.local() as peer, peer.receiver("invoices") as invoices:
        while broker.stats("invoices").messages:
            delivery = await invoices.get(within=0.01)
            if delivery is None:
                continue
            message_id = delivery.message.message_id
            assert message_id is not None
            with receiver.sessions.begin() as session:
                if receiver.inbox.record_now(session, "invoices", message_id):
                    seen.append(delivery.body)
            ids.add(message_id)
            delivery.accept()
    # An order whose handler has failed waits, and may be overtaken.
    assert sorted(seen) == [f"invoice for {body}" for body in ORDERS]
    assert len(ids) == len(ORDERS)
    assert broker.stats("orders").available == 0


async def test_a_crash_at_any_statement_loses_and_repeats_nothing(
    engine: Engine,
    tmp_path: Path,
    brief_run: bool,
    long_run: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relays_module, "GRACE_S", 0.0)
    statement, done = 0, False
    first = declare(engine)
    receiver = declare(engine_of("sqlite://"))
    async with Broker(volatile=True) as broker:
        await broker.declare(Queue("orders"), Queue("invoices"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        while not done:
            first.clear()
            crash = CrashingEngine(engine.url, statement + 1)
            # Only its own commits wake it, so that its statements are always about the same.
            shop = declare(crash.engine, create=False, poll_s=1_000)
            await place_orders(broker)
            crash.arm()
            try:
                await work(broker, url, shop, crash, first)
                done = True
            except* Crash:
                pass
            crash.engine.dispose()
            fresh = declare(engine, create=False, poll_s=0.02)
            await work(broker, url, fresh)
            await check_once(broker, receiver, fresh)
            statement += 1 if long_run else 7 if brief_run else 4
    receiver.sessions.kw["bind"].dispose()
    assert statement > 10


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The program that forks the processes to kill: it loads its libraries once."""
    errors = tmp_path_factory.mktemp("worker") / "errors"
    with errors.open("w") as into:
        process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=into,
            text=True,
        )
    with process:
        yield process
        process.kill()
    assert errors.read_text() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by signals here")
@pytest.mark.timeout(1800)
async def test_a_process_that_is_killed_loses_and_repeats_nothing(
    engine: Engine,
    worker: subprocess.Popen[str],
    tmp_path: Path,
    brief_run: bool,
    long_run: bool,
) -> None:
    shop = declare(engine, poll_s=0.02)
    receiver = declare(engine_of("sqlite://"))

    def run(url: str, statement: int) -> int:
        assert worker.stdin is not None
        assert worker.stdout is not None
        database = engine.url.render_as_string(hide_password=False)
        print(json.dumps([url, database, statement]), file=worker.stdin, flush=True)
        return int(worker.stdout.readline())

    async with Broker(store=f"sqlite:{tmp_path / 'broker.db'}") as broker:
        await broker.declare(Queue("orders"), Queue("invoices"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        statements = [*range(1, 30), *range(-30, 0)] if long_run else [9] if brief_run else [5, -14]
        for statement in statements:
            shop.clear()
            await place_orders(broker)
            with trio.fail_after(60):
                code = await trio.to_thread.run_sync(run, url, statement, abandon_on_cancel=True)
            assert code in (0, -9)
            # What another process has left is done by this one.
            await work(broker, url, shop)
            await check_once(broker, receiver, shop)
    receiver.sessions.kw["bind"].dispose()


# --- asyncio, and threads ---

ASYNC_PROGRAM = """
import asyncio, sys
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from amqp_rt import aio, node
from amqp_rt.broker import Queue
from amqp_rt.errors import DeliveryNotAccepted
from amqp_rt.outbox import SqlInbox, SqlOutbox

async def main(url):
    engine = create_async_engine(url)
    sessions = async_sessionmaker(engine)
    outbox = SqlOutbox(sessions, poll_s=1000)
    inbox = SqlInbox(sessions)
    failing = True

    @node("orders", inbox=inbox)
    async def place(order: str, session: AsyncSession) -> None:
        nonlocal failing
        assert type(session) is AsyncSession
        await session.execute(text("INSERT INTO orders VALUES (:body)"), {"body": order})
        outbox.send(session, "invoices", f"invoice for {order}")
        if failing:
            failing = False
            raise ZeroDivisionError

    await outbox.create_tables()
    await inbox.create_tables()
    async with sessions.begin() as session:
        await session.execute(text("CREATE TABLE orders (body TEXT)"))
    async with aio.Broker("b", volatile=True) as broker:
        await broker.declare(Queue("orders"), Queue("invoices"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with aio.Container("shop", nodes=[place], outbox=outbox) as shop, shop.connect(url) as peer:
            await peer.serve()
            async with peer.sender("orders") as out:
                for _ in range(2):
                    await out.send("a", message_id="1", durable=True)
            async with peer.receiver("invoices") as invoices:
                async with await invoices.receive() as delivery:
                    print(delivery.body)
                # A session of the application itself, in its own task.
                async with sessions.begin() as session:
                    outbox.send(session, "invoices", "by hand")
                async with await invoices.receive() as delivery:
                    print(delivery.body)
                await outbox.flush()
                print(await outbox.pending(), await outbox.refused())
    async with sessions() as session:
        print((await session.execute(text("SELECT body FROM orders"))).all())
    await engine.dispose()

for url in sys.argv[1:]:
    asyncio.run(main(url), debug=True)
"""


@pytest.mark.req("A15")
def test_sessions_of_asyncio_work_in_its_event_loop(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    urls = [url_of(kind, request, tmp_path) for kind in ("sqlite", "postgresql")]
    urls[0] = urls[0].replace("sqlite://", "sqlite+aiosqlite://")
    command = [sys.executable, "-W", "error", "-c", ASYNC_PROGRAM, *urls]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    wanted = ["invoice for a", "by hand", "0 []", "[('a',)]"]
    assert run.stdout.splitlines() == wanted * 2, run.stderr


@pytest.mark.req("A15")
async def test_sessions_of_asyncio_need_it(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    outbox = SqlOutbox(async_sessionmaker(engine))
    with pytest.raises(RuntimeError, match="need asyncio: use a container of amqp_rt"):
        await outbox.create_tables()


@pytest.mark.req("A15")
def test_threads_have_an_outbox_too(engine: Engine) -> None:
    shop = declare(engine)
    with sync.Broker("b", volatile=True) as broker:
        broker.declare(Queue("orders"), Queue("invoices"))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        with (
            sync.Container("shop", nodes=nodes_of(shop), outbox=shop.outbox) as container,
            container.connect(url) as peer,
        ):
            peer.serve()
            with peer.sender("orders") as out:
                out.send("a", message_id="1", durable=True)
            with peer.receiver("invoices") as invoices, invoices.receive() as delivery:
                assert delivery.body == "invoice for a"
    assert shop.rows() == ["a"]
