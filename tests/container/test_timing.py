"""Functions that run at certain times: their times, failures, resources and end."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio

from amqp_rt import Container, PerMessage, Router, aio, cron, every
from amqp_rt.container.timing import RunTimes
from amqp_rt.timetables import Cron

MockClock = trio.testing.MockClock


async def test_a_function_runs_in_equal_intervals(autojump_clock: MockClock) -> None:
    seen: list[float] = []
    app = Container("app")
    began = trio.current_time()

    @app.every(5)
    async def tick() -> None:
        seen.append(trio.current_time() - began)

    async with app:
        await trio.sleep(17)
    await trio.sleep(20)
    assert seen == [5, 10, 15]


async def test_runs_that_overlap_are_left_out_unless_asked_for(autojump_clock: MockClock) -> None:
    seen: dict[str, list[float]] = {"alone": [], "together": []}
    began = trio.current_time()

    @every(5)
    async def alone() -> None:
        seen["alone"].append(trio.current_time() - began)
        await trio.sleep(7)

    @every(5, overlap=True)
    async def together() -> None:
        seen["together"].append(trio.current_time() - began)
        await trio.sleep(7)

    async with Container("app", nodes=[alone, together]):
        await trio.sleep(26)
    assert seen == {"alone": [5, 15, 25], "together": [5, 10, 15, 20, 25]}


async def test_a_failed_run_is_logged_and_the_next_takes_place(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    app = Container("app")

    @app.every(5)
    def fail() -> None:
        raise LookupError("nothing there")

    async with app:
        await trio.sleep(11)
    (timed,) = app.timed
    assert (timed.runs, timed.failures) == (2, 2)
    assert len(caplog.records) == 2
    assert all("@every(5)" in each and "next run takes place" in each for each in caplog.messages)
    assert "LookupError: nothing there" in caplog.text


async def test_a_run_that_fails_when_it_is_cancelled_is_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    app = Container("app", drain_s=1)

    async def fail_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise LookupError("nothing to clean up")

    @app.every(5)
    async def work() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_at_the_end)
            await trio.sleep_forever()

    async with app:
        await trio.sleep(6)
    assert [timed.failures for timed in app.timed] == [1]
    assert "failed when it was cancelled" in caplog.text
    assert "LookupError: nothing to clean up" in caplog.text


async def test_a_run_in_progress_ends_with_the_container(autojump_clock: MockClock) -> None:
    ended: list[str] = []

    async def work(name: str, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
            ended.append(name)
        except trio.Cancelled:
            ended.append(f"{name} cancelled")
            raise

    app = Container("app", drain_s=10)

    @app.every(5)
    async def short() -> None:
        await work("short", 4)

    @app.every(5, overlap=True)
    async def long() -> None:
        await work("long", 100)

    async with app:
        await trio.sleep(6)
        began = trio.current_time()
    assert ended == ["short", "long cancelled"]
    assert trio.current_time() - began == pytest.approx(10)


async def test_a_timetable_is_followed(autojump_clock: MockClock) -> None:
    runs: list[float] = []

    @cron("*/10 * * * *", tz="Europe/Berlin")
    async def work() -> None:
        runs.append(trio.current_time())

    async with Container("app", nodes=[work]):
        await trio.sleep(3600)
    assert len(runs) == 6
    assert [round(b - a) for a, b in pairwise(runs)] == [600] * 5


async def test_a_clock_put_back_runs_nothing_twice(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = [1_780_000_000.0]
    monkeypatch.setattr(
        "amqp_rt.container.timing._wall_clock", lambda: lambda: trio.current_time() + ahead[0]
    )
    runs: list[float] = []

    @cron("0 * * * *")
    async def work() -> None:
        runs.append(trio.current_time() + ahead[0])

    async with Container("app", nodes=[work]):
        await trio.sleep(2 * 3600)
        assert len(runs) == 2
        ahead[0] -= 3600
        await trio.sleep(3600)
        assert len(runs) == 2
        await trio.sleep(3600)
        assert len(runs) == 3
        ahead[0] += 86_400
        await trio.sleep(11)
        assert len(runs) == 4, "one run for all times that were passed over"


class Session:
    """Resource that lives for one run."""


class Database:
    def __init__(self) -> None:
        self.open = 0


async def test_a_function_gets_resources(autojump_clock: MockClock) -> None:
    database = Database()
    seen: list[Any] = []

    @asynccontextmanager
    async def session(database: Database) -> AsyncIterator[Session]:
        database.open += 1
        yield Session()
        database.open -= 1

    class Jobs:
        @every(5)
        async def sweep(self, database: Database, session: Session, again: bool = True) -> None:
            seen.append((database.open, type(session), again))

        @every(7, thread=True)
        def block(self) -> None:
            seen.append(threading.current_thread() is threading.main_thread())

    resources = [database, PerMessage(session, as_type=Session)]
    async with Container("app", resources=resources, nodes=[Jobs()]):
        await trio.sleep(5.5)
        await trio.sleep(2)
    assert seen == [(1, Session, True), False]
    assert database.open == 0


def test_what_cannot_be_provided_is_said() -> None:
    @every(5)
    async def sweep(database: Database) -> None: ...

    with pytest.raises(TypeError, match="there is none for the parameter database: Database"):
        Container("app", nodes=[sweep])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: every(0), "every must be"),
        (lambda: every(-1), "every must be"),
        (lambda: every(float("nan")), "every must be"),
        (lambda: cron("x"), "is no timetable"),
        (lambda: cron("* * * * *", tz="Nowhere"), "there is no time zone 'Nowhere'"),
    ],
)
def test_wrong_times_are_refused_where_they_are_written(wrong: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong()


async def test_functions_of_routers_and_of_running_containers(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    router = Router()

    @router.every(5)
    async def routed() -> None:
        seen.append("routed")

    async def later() -> None:
        seen.append("later")

    async with Container("app", nodes=[Router(nodes=[router])]) as app:
        await trio.sleep(1)
        app.every(3)(later)
        await trio.sleep(5)
        assert seen == ["later", "routed"]
        app.stop()
        await app.serve()


async def test_a_program_of_timed_functions_needs_no_peer(autojump_clock: MockClock) -> None:
    app = Container("app")

    @app.every(5)
    async def stop() -> None:
        app.stop()

    await app.run_async(signals=False)
    assert trio.current_time() >= 5


def test_functions_of_asyncio() -> None:
    import asyncio

    seen: list[str] = []

    async def main() -> None:
        twice = asyncio.Event()

        @every(0.01)
        async def tick() -> None:
            await asyncio.sleep(0)
            seen.append("tick")
            if len(seen) == 2:
                twice.set()

        async with aio.Container("app", nodes=[tick]):
            await twice.wait()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_times_in_logs() -> None:
    assert str(RunTimes(every_s=1.5)) == "@every(1.5)"
    assert str(RunTimes(cron=Cron("1 2 * * *"))) == "@cron('1 2 * * *')"
