"""Our broker does what it says, and a peer that does not is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from amqp_rt import Broker, Connection, Container
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.broker.termini import KeptSource, KeptTarget, Termini, Terminus
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.testing.honesty import assert_honest

Clock = trio.testing.MockClock


class TrioClock:
    """Both clocks are that of the tests."""

    def wall(self) -> float:
        return trio.current_time() + 1e9

    def monotonic(self) -> float:
        return trio.current_time()


class Plain:
    """Executor without threads, whose time a mock clock could not skip."""

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*args)


async def check_promises(*, kept: bool = False) -> None:
    """Judge a broker; if its store is *kept*, over a restart as well."""
    network = MemoryNetwork()
    store = MemoryStore() if kept else None
    stops: list[tuple[trio.Event, trio.Event]] = []

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        stop, stopped = trio.Event(), trio.Event()
        async with Broker(
            network=network, clock=TrioClock(), store=store, executor=Plain()
        ) as broker:
            await broker.declare(Queue("q"), Topic("t"))
            await broker.listen("memory://broker")
            stops.append((stop, stopped))
            task_status.started()
            await stop.wait()
            assert broker.stats("q").available == 0 or kept
        stopped.set()

    async with trio.open_nursery() as nursery, Container("judge", network=network) as us:

        async def connection(task_status: trio.TaskStatus[Connection]) -> None:
            async with us.connect("memory://broker", reconnect=None) as peer:
                task_status.started(peer)
                await trio.sleep_forever()

        async def restart() -> Connection:
            stop, stopped = stops[-1]
            stop.set()
            await stopped.wait()
            await nursery.start(serve)
            again: Connection = await nursery.start(connection)
            return again

        await nursery.start(serve)
        peer = await nursery.start(connection)
        await assert_honest(peer, queue="q", topic="t", restart=restart if kept else None)
        stops[-1][0].set()
        await stops[-1][1].wait()
        nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.req("B4", "B8", "M31", "M32", "M39", "M28")
async def test_our_broker_is_honest(autojump_clock: Clock) -> None:
    await check_promises()


@pytest.mark.slow
@pytest.mark.req("B4", "M38")
async def test_our_broker_is_honest_over_a_restart(autojump_clock: Clock) -> None:
    await check_promises(kept=True)


def never_resume(self: Any, link: Any, closed: bool) -> bool:
    return False


def never_expire(self: Any) -> None:
    """Never expires."""


def restore_nothing(self: Any, *args: Any) -> bool:
    return False


def store_nothing(self: Any, *args: Any) -> None:
    return None


@pytest.mark.slow
@pytest.mark.req("B4")
@pytest.mark.parametrize(
    ("kind", "name", "fault", "found"),
    [
        (KeptSource, "may_resume", never_resume, "it expires too early"),
        (Terminus, "start_countdown", never_expire, "does not expire"),
        (KeptSource, "restore_delivery", restore_nothing, "is delivered to another consumer"),
        (KeptTarget, "restore_tags", restore_nothing, "its outcome is forgotten"),
        (Termini, "keep", store_nothing, "its outcome is forgotten"),
    ],
)
async def test_a_lie_is_found_out(
    kind: type,
    name: str,
    fault: Any,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: Clock,
) -> None:
    monkeypatch.setattr(kind, name, fault, raising=True)
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match=found)):
        await check_promises(kept=kind is not Terminus and name != "may_resume")
