"""The use case of the June 2007 draft, section 2.2.7.2: a message is consumed, a table updated, a message produced.

One transaction manager has two resource managers, a database and the broker. The application's session does the work
of the branch (demarcation); another session of another connection prepares and commits it (coordination).
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from client010 import Attached, Client
from protocol010 import Failed, xid
from served010 import Served, serving

pytestmark = pytest.mark.req("D8", "R13")

T1 = xid(b"T1")


class Table:
    """The database, whose work is in a transaction until the transaction manager decides."""

    def __init__(self, path: Path) -> None:
        self._work = sqlite3.connect(path)
        self._work.execute("create table orders (text)")
        self._other = sqlite3.connect(path)

    def insert(self, text: str) -> None:
        self._work.execute("insert into orders values (?)", (text,))

    def end(self, *, commit: bool) -> None:
        if commit:
            self._work.commit()
        else:
            self._work.rollback()

    @property
    def rows(self) -> list[str]:
        """What others see."""
        return [text for (text,) in self._other.execute("select text from orders")]

    def close(self) -> None:
        self._work.close()
        self._other.close()


class UseCase:
    """The parties: an application with its transactional session, and a coordinator."""

    def __init__(
        self,
        served: Served,
        application: Client,
        transactional: Attached,
        coordinating: Attached,
        table: Table,
    ) -> None:
        self.served = served
        self.application = application
        self.transactional = transactional
        self.coordinating = coordinating
        self.table = table

    async def work(self) -> None:
        """Consume from Q1, insert into the table, and produce to Q2, all for T1."""
        session = self.transactional
        await session.call("dtx.select")
        assert (await self.status(session, "start")) == 0
        await session.subscribe("Q1", "d")
        message = await session.message()
        # Otherwise it comes again when the branch is rolled back.
        await session.call("message.cancel", destination="d")
        await session.done(session.accept(message.id))
        self.table.insert(message.body.decode())
        await session.done(session.transfer("", b"done: " + message.body, key="Q2"))
        assert (await self.status(session, "end")) == 0

    async def status(self, session: Attached, command: str, **fields: Any) -> int:
        """Call a command about T1; return its XA status."""
        found = await session.call(f"dtx.{command}", xid=T1, **fields)
        assert found is not None
        return found.status or 0

    def state(self) -> tuple[int, int, int, list[str]]:
        """Return the available and acquired messages of Q1, those of Q2, and the rows."""
        nodes = self.served.broker.host.space()
        first, second = nodes.get("Q1").stats(), nodes.get("Q2").stats()
        return first.available, first.acquired, second.available, self.table.rows


@asynccontextmanager
async def use_case(folder: Path) -> AsyncIterator[UseCase]:
    table = Table(folder / "table.db")
    try:
        async with serving() as served, served.client() as coordinator:
            coordinating = await coordinator.session(b"coordination")
            for queue in ("Q1", "Q2"):
                await coordinating.call("queue.declare", queue=queue)
            await coordinating.done(coordinating.transfer("", b"order 1", key="Q1"))
            async with served.client() as application:
                session = await application.session(b"transactional")
                yield UseCase(served, application, session, coordinating, table)
    finally:
        table.close()


async def test_a_transaction_of_two_resources_commits(tmp_path: Path) -> None:
    async with use_case(tmp_path) as case:
        await case.work()
        assert case.state() == (0, 1, 0, [])
        assert await case.status(case.coordinating, "prepare") == 0
        assert case.state() == (0, 1, 0, [])
        case.table.end(commit=True)
        assert await case.status(case.coordinating, "commit", one_phase=False) == 0
        assert case.state() == (0, 0, 1, ["order 1"])


async def test_a_transaction_of_two_resources_rolls_back(tmp_path: Path) -> None:
    """Before and after it is prepared, everything is as if nothing had been done."""
    for prepared in (False, True):
        folder = tmp_path / str(prepared)
        folder.mkdir()
        async with use_case(folder) as case:
            await case.work()
            if prepared:
                assert await case.status(case.coordinating, "prepare") == 0
            case.table.end(commit=False)
            assert await case.status(case.coordinating, "rollback") == 0
            assert case.state() == (1, 0, 0, [])


async def test_the_coordinator_finishes_for_an_application_that_is_gone(tmp_path: Path) -> None:
    """Its connection is lost after it was prepared: the branch is in the list to recover until it is decided."""
    async with use_case(tmp_path) as case:
        await case.work()
        assert await case.status(case.coordinating, "prepare") == 0
        await case.application.cut()
        found = await case.coordinating.call("dtx.recover")
        assert found is not None
        assert [each.global_id for each in found.in_doubt.items] == [b"T1"]
        case.table.end(commit=True)
        assert await case.status(case.coordinating, "commit", one_phase=False) == 0
        assert case.state() == (0, 0, 1, ["order 1"])
        found = await case.coordinating.call("dtx.recover")
        assert found is None or not found.in_doubt or not found.in_doubt.items


async def test_a_branch_with_work_in_hand_is_not_prepared(tmp_path: Path) -> None:
    """The demarcation ends first: 409, and the session of the work goes on."""
    async with use_case(tmp_path) as case:
        session = case.transactional
        await session.call("dtx.select")
        await case.status(session, "start")
        await session.done(session.transfer("", b"x", key="Q2"))
        with pytest.raises(Failed) as caught:
            await case.status(case.coordinating, "prepare")
        assert caught.value.code == 409
        assert await case.status(session, "end") == 0
        assert await case.status(session, "commit", one_phase=True) == 0
        assert case.state()[2] == 1
