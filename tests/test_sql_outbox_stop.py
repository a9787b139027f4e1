"""The relay of a SQL outbox ends within a bound, although its database no longer answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from far_end import FarEnd, connected
from sql_shop import declare
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session, sessionmaker
from test_sql_outbox import bodies, in_table, relaying, send, until, url_of

from amqp_rt.outbox.sql import relays, working
from amqp_rt.outcomes import ACCEPTED

pytestmark = pytest.mark.req("R14", "A10")

#: Seconds within which a relay has to end here, with the short times of ``hurried``.
BOUND_S = 4.0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times for which the end of a relay waits."""
    monkeypatch.setattr(relays, "GRACE_S", 0.2)
    monkeypatch.setattr(working, "STOP_S", 0.2)


class Gate:
    """Engine on a SQLite database whose statements wait while it is shut."""

    def __init__(self, folder: Path) -> None:
        self.engine = create_engine(f"sqlite:///{folder / 'shop.db'}")
        self.open = threading.Event()
        self.open.set()
        #: Set when a statement has had to wait.
        self.waited = threading.Event()
        event.listen(self.engine, "before_cursor_execute", self._wait)
        event.listen(self.engine, "commit", self._wait)

    def _wait(self, *_: Any) -> None:
        if not self.open.is_set():
            self.waited.set()
            self.open.wait(30)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.open.set()
    made.engine.dispose()


async def test_a_relay_that_looks_for_messages_ends(gate: Gate) -> None:
    shop = declare(gate.engine, poll_s=0.01)
    far = FarEnd(credit=100, settle=ACCEPTED)
    async with connected(far) as peer:
        async with relaying(shop, peer):
            gate.open.clear()
            await until(gate.waited.is_set)
            began = trio.current_time()
        assert trio.current_time() - began < BOUND_S
        gate.open.set()
        send(shop, "a")
        async with relaying(shop, peer):
            await until(lambda: not in_table(shop))
    assert bodies(far) == ["a"]


async def test_an_outcome_that_cannot_be_recorded_is_recorded_later(gate: Gate) -> None:
    shop = declare(gate.engine, poll_s=0.01)
    far = FarEnd(credit=100)
    async with connected(far) as peer:
        async with relaying(shop, peer):
            send(shop, "a")
            await until(lambda: bodies(far) == ["a"])
            gate.open.clear()
            far.heard.deliveries[0].settle(ACCEPTED)
            await until(gate.waited.is_set)
            await trio.sleep(0.05)
            began = trio.current_time()
        assert trio.current_time() - began < BOUND_S
        gate.open.set()
        # The thread that was left records it.
        await until(lambda: not in_table(shop))
    assert bodies(far) == ["a"]


async def test_a_caller_that_is_cancelled_in_time_gets_the_result(gate: Gate) -> None:
    """The thread ends while its caller waits: nothing is left to it."""
    shop = declare(gate.engine)
    send(shop, "a")
    gate.open.clear()
    counts: list[int] = []

    async def count() -> None:
        counts.append(await shop.outbox.pending())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await until(gate.waited.is_set)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.05)
        gate.open.set()
    assert counts == [1]


async def test_a_call_that_never_began_makes_none(gate: Gate) -> None:
    shop = declare(gate.engine)
    gate.open.clear()
    with trio.CancelScope() as scope:
        scope.cancel()
        await shop.outbox.pending()
    assert scope.cancelled_caught
    assert not gate.waited.is_set()


async def test_a_session_that_was_left_is_closed_by_its_thread(gate: Gate) -> None:
    shop = declare(gate.engine)
    gate.open.clear()
    pool: Any = gate.engine.pool
    with trio.move_on_after(0.05) as scope:
        await shop.outbox.pending()
    assert scope.cancelled_caught
    assert pool.checkedout() == 1
    gate.open.set()
    await until(lambda: pool.checkedout() == 0)


async def test_a_session_is_closed_although_no_thread_is_free(gate: Gate) -> None:
    """A session that stays open would hold the lock of SQLite, and nothing could be written."""
    pool: Any = gate.engine.pool
    open_now: list[int] = []
    threads = trio.to_thread.current_default_thread_limiter()
    async with AsyncExitStack() as taken, working.opened(sessionmaker(gate.engine)) as session:
        await working.call_or_leave(session, Session.connection)
        assert pool.checkedout() == 1
        for _ in range(int(threads.available_tokens)):
            holder = object()
            await threads.acquire_on_behalf_of(holder)
            taken.callback(threads.release_on_behalf_of, holder)
        # Asked while the threads are taken still.
        taken.callback(lambda: open_now.append(pool.checkedout()))
    assert open_now == [0]


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize("at", ["idle", "sent", "accepted"])
async def test_a_relay_ends_while_postgresql_is_silent(
    request: pytest.FixtureRequest, postgresql: Any, tmp_path: Path, at: str
) -> None:
    engine = create_engine(url_of("postgresql", request, tmp_path))
    shop = declare(engine, poll_s=0.05)
    far = FarEnd(credit=100)
    async with connected(far) as peer:
        try:
            async with relaying(shop, peer):
                await trio.sleep(0.3)
                if at != "idle":
                    send(shop, "a")
                    await until(lambda: bodies(far) == ["a"])
                postgresql.pause()
                if at == "accepted":
                    far.heard.deliveries[0].settle(ACCEPTED)
                await trio.sleep(0.3)
                began = trio.current_time()
            assert trio.current_time() - began < BOUND_S
        finally:
            postgresql.resume()
        far.settle = ACCEPTED
        if at != "idle":
            far.heard.settle = ACCEPTED
        if at == "accepted":
            # Not sent again: the thread that was left has recorded the outcome.
            await until(lambda: not in_table(shop))
        async with relaying(shop, peer):
            send(shop, "b")
            await until(lambda: not in_table(shop))
    expected = {"idle": ["b"], "sent": ["a", "a", "b"], "accepted": ["a", "b"]}
    assert bodies(far) == expected[at]
    engine.dispose()
