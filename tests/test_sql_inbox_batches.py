"""Inbox of a node with batches: processed messages are left out, the others recorded in the transaction of the batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from sql_shop import Shop, declare, engine_of, url_of
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from amqp_rt import Batch, Container, Delivery, Modify, Reject, Release, Retry, aio, node
from amqp_rt.container.sending import Sender
from amqp_rt.errors import DeliveryNotAccepted
from amqp_rt.outbox import SqlInbox
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Outcome, Rejected

pytestmark = pytest.mark.req("R14")


#: For tests whose statements PostgreSQL could take in another way than SQLite.
BOTH = pytest.mark.parametrize(
    "shop", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    engine = engine_of(url_of(getattr(request, "param", "sqlite"), request, tmp_path))
    yield declare(engine)
    engine.dispose()


class Orders:
    """Node with batches that writes a row for each message, and gives the results that a test wants."""

    def __init__(self, shop: Shop, *results: Any, **options: Any) -> None:
        self.batches: list[list[str]] = []
        self.results = list(results)

        @node("orders", inbox=shop.inbox, batch=Batch(messages=3, within_s=0.02), **options)
        async def place(orders: list[str], session: Session) -> Any:
            self.batches.append(orders)
            for order in orders:
                session.execute(insert(shop.orders).values(body=order))
                shop.outbox.send(session, "invoices", order)
            result = self.results.pop(0) if self.results else None
            if isinstance(result, Exception):
                raise result
            return result(session) if callable(result) else result

        self.handler = place


@asynccontextmanager
async def sending(orders: Orders, **options: Any) -> AsyncIterator[Sender]:
    async with (
        Container("c", nodes=[orders.handler], **options) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        yield out


async def outcomes(out: Sender, *messages: tuple[str, Any]) -> list[Outcome]:
    """Send messages, each a body and a message-id, together; return their outcomes."""
    receipts = [out.send_nowait(body, message_id=message_id) for body, message_id in messages]
    return [await each.outcome() for each in receipts]


def recorded(shop: Shop) -> list[str]:
    with shop.sessions() as session:
        return sorted(session.scalars(select(shop.inbox.metadata.tables["amqp_inbox"].c.message)))


@BOTH
async def test_the_handler_gets_the_messages_that_were_not_processed(shop: Shop) -> None:
    orders = Orders(shop)
    async with sending(orders) as out:
        assert await outcomes(out, ("a", "1"), ("b", 2)) == [ACCEPTED] * 2
        # Types of message-ids are distinguished.
        assert await outcomes(out, ("a", "1"), ("c", "2"), ("b", 2)) == [ACCEPTED] * 3
        # Nothing is left to do.
        assert await outcomes(out, ("a", "1"), ("b", 2)) == [ACCEPTED] * 2
    assert orders.batches == [["a", "b"], ["c"]]
    assert (shop.rows(), await shop.outbox.pending()) == (["a", "b", "c"], 3)


async def test_a_batch_and_single_messages_have_the_same_record(shop: Shop) -> None:
    with shop.sessions.begin() as session:
        assert shop.inbox.record_now(session, "orders", "1")
        assert shop.inbox.record_now(session, "elsewhere", "2")
    orders = Orders(shop)
    async with sending(orders) as out:
        assert await outcomes(out, ("a", "1"), ("b", "2")) == [ACCEPTED] * 2
    assert orders.batches == [["b"]]
    with shop.sessions.begin() as session:
        assert not shop.inbox.record_now(session, "orders", "2")


@BOTH
@pytest.mark.parametrize(("result", "outcome"), [(None, ACCEPTED), ([RELEASED, None], RELEASED)])
async def test_a_message_that_a_batch_has_twice_is_passed_once(
    shop: Shop, result: Any, outcome: Outcome
) -> None:
    orders = Orders(shop, result)
    async with sending(orders) as out:
        assert await outcomes(out, ("a", "1"), ("b", "2"), ("a", "1")) == [
            outcome,
            ACCEPTED,
            outcome,
        ]
    assert orders.batches == [["a", "b"]]
    assert recorded(shop) == (["str:'2'"] if result else ["str:'1'", "str:'2'"])


async def test_a_message_without_id_is_rejected_and_takes_no_place(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    orders = Orders(shop)
    async with sending(orders) as out:
        first, *others = await outcomes(out, ("x", None), ("a", "1"), ("b", "2"), ("c", "3"))
    assert isinstance(first, Rejected)
    assert "'orders' takes messages with a message-id only" in str(first.error)
    assert others == [ACCEPTED] * 3
    assert orders.batches == [["a", "b", "c"]]
    assert "message rejected: to 'orders', message-id None: not taken by" in caplog.text


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (ZeroDivisionError(), MODIFIED_FAILED),
        (Modify("not yet"), Modify("not yet").outcome),
        (Release("later"), RELEASED),
        (RELEASED, RELEASED),
        (lambda _: Release("returned"), RELEASED),
    ],
)
async def test_a_batch_that_was_not_processed_is_rolled_back_as_a_whole(
    shop: Shop, result: Any, outcome: Outcome
) -> None:
    orders = Orders(shop, None, result)
    async with sending(orders) as out:
        assert await outcomes(out, ("a", "1")) == [ACCEPTED]
        # What was processed before stays so: its attempts do not count, and it is not dead-lettered.
        assert await outcomes(out, ("a", "1"), ("b", "2"), ("c", "3")) == [
            ACCEPTED,
            outcome,
            outcome,
        ]
        assert (shop.rows(), recorded(shop)) == (["a"], ["str:'1'"])
        assert await outcomes(out, ("b", "2"), ("c", "3")) == [ACCEPTED] * 2
    assert (shop.rows(), await shop.outbox.pending()) == (["a", "b", "c"], 3)


async def test_the_last_attempt_at_a_batch_rejects_only_what_was_not_processed(shop: Shop) -> None:
    orders = Orders(shop, None, ZeroDivisionError(), retry=Retry(1))
    async with sending(orders) as out:
        await outcomes(out, ("a", "1"))
        first, second = await outcomes(out, ("a", "1"), ("b", "2"))
    assert first == ACCEPTED
    assert isinstance(second, Rejected)


@BOTH
async def test_an_outcome_of_its_own_takes_the_record_of_a_message_back(shop: Shop) -> None:
    orders = Orders(shop, [None, Reject("no"), RELEASED])
    async with sending(orders) as out:
        first, second, third = await outcomes(out, ("a", "1"), ("b", "2"), ("c", "3"))
        assert (first, type(second), third) == (ACCEPTED, Rejected, RELEASED)
        assert recorded(shop) == ["str:'1'"]
        assert await outcomes(out, ("a", "1"), ("b", "2"), ("c", "3")) == [ACCEPTED] * 3
    assert orders.batches == [["a", "b", "c"], ["b", "c"]]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Session.commit, "the handler of a batch to 'orders' commits its session"),
        (Session.rollback, "a batch to 'orders' has ended the transaction of its session"),
        (lambda _: [None], "a batch of 2 messages needs as many outcomes, got 1"),
    ],
)
async def test_a_handler_that_breaks_the_rules_of_the_batch_fails(
    shop: Shop, caplog: pytest.LogCaptureFixture, result: Callable[[Session], Any], said: str
) -> None:
    orders = Orders(shop, result)
    async with sending(orders) as out:
        assert await outcomes(out, ("a", "1"), ("b", "2")) == [MODIFIED_FAILED] * 2
    assert said in caplog.text
    assert (shop.rows(), recorded(shop)) == ([], [])


async def test_middleware_sees_the_whole_batch(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[Any, Any]] = []

    async def twice(call_next: Any, context: Any) -> Any:
        try:
            result = await call_next(context)
        except ZeroDivisionError:
            result = await call_next(context)
        seen.append((list(context.payload), result))
        if "drop" in context.payload:
            context.payload = context.payload[1:]
            return await call_next(context)
        return result

    orders = Orders(shop, None, ZeroDivisionError(), [RELEASED], middleware=[twice])
    async with sending(orders) as out:
        await outcomes(out, ("a", "1"))
        assert await outcomes(out, ("a", "1"), ("b", "2")) == [ACCEPTED, RELEASED]
        assert await outcomes(out, ("drop", "3"), ("c", "4")) == [MODIFIED_FAILED] * 2
    assert seen[:2] == [(["a"], [ACCEPTED]), (["a", "b"], [ACCEPTED, RELEASED])]
    assert "a batch with an inbox keeps its messages: middleware has made 1 of 2" in caplog.text


async def test_a_batch_of_deliveries_in_threads(shop: Shop) -> None:
    found: list[list[Any]] = []

    @node("orders", inbox=shop.inbox, batch=Batch(within_s=0.02), thread=True)
    def place(orders: list[Delivery], session: Session) -> None:
        found.append([each.message.message_id for each in orders])
        session.execute(insert(shop.orders), [{"body": each.body} for each in orders])

    async with (
        Container("c", nodes=[place]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        await outcomes(out, ("a", "1"))
        await outcomes(out, ("a", "1"), ("b", "2"))
    assert found == [["1"], ["2"]]
    assert shop.rows() == ["a", "b"]


@pytest.mark.slow
async def test_batches_at_once_wait_for_each_other_and_do_not_block_each_other(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engine = engine_of(url_of("postgresql", request, tmp_path))
    shop = declare(engine)
    with engine.begin() as connection:
        # Two records in opposite orders would meet in the middle, which the server ends as a deadlock.
        connection.execute(
            text(
                "CREATE FUNCTION slow() RETURNS trigger AS"
                " $$ BEGIN PERFORM pg_sleep(0.1); RETURN NEW; END $$ LANGUAGE plpgsql"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER slow BEFORE INSERT ON amqp_inbox FOR EACH ROW EXECUTE FUNCTION slow()"
            )
        )
    found: list[list[bool]] = []
    begun = threading.Barrier(2)

    def record(*ids: str) -> None:
        with shop.sessions.begin() as session:
            session.connection()
            begun.wait(20)
            found.append(shop.inbox.record_many_now(session, [("orders", each) for each in ids]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, record, "a", "b")
        nursery.start_soon(trio.to_thread.run_sync, record, "b", "a")
    assert sorted(found) == [[False, False], [True, True]]
    engine.dispose()


@pytest.mark.req("A15")
def test_sessions_of_asyncio_have_batches_too(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    sessions = async_sessionmaker(engine)
    inbox = SqlInbox(sessions)
    batches: list[list[str]] = []

    @node("orders", inbox=inbox, batch=Batch(messages=2, within_s=0.02))
    async def place(orders: list[str], session: AsyncSession) -> Any:
        batches.append(orders)
        return [RELEASED if order == "later" else None for order in orders]

    async def main() -> None:
        await inbox.create_tables()
        async with (
            aio.Container("c", nodes=[place]) as container,
            container.local() as peer,
            peer.sender("orders") as out,
        ):
            for _ in range(2):
                sends = [out.send(body, message_id=body) for body in ("a", "later")]
                first, second = await asyncio.gather(*sends, return_exceptions=True)
                assert first == ACCEPTED
                assert isinstance(second, DeliveryNotAccepted)
        await engine.dispose()

    asyncio.run(main())
    # The first two were sent by tasks of their own.
    assert [sorted(each) for each in batches] == [["a", "later"], ["later"]]
