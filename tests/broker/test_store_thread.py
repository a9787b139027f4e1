"""The thread in which a broker calls its store."""

from __future__ import annotations

import gc
import threading

import pytest
import trio

from amqp_rt.broker.durable import opening
from amqp_rt.broker.durable.opening import Threaded


async def test_calls_are_made_one_at_a_time_in_order() -> None:
    call = Threaded()
    made: list[tuple[int, int]] = []

    async def one(number: int) -> None:
        await call(lambda: made.append((number, threading.get_ident())))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            await trio.lowlevel.checkpoint()
            nursery.start_soon(one, number)
            await trio.lowlevel.checkpoint()
    assert [number for number, _ in made] == list(range(50))
    (thread,) = {thread for _, thread in made}
    assert thread != threading.get_ident()


async def test_a_result_an_error_and_no_cycle() -> None:
    call = Threaded()
    assert await call(divmod, 7, 2) == (3, 1)
    raised = False
    gc.collect()
    gc.disable()
    try:
        try:
            await call(divmod, 7, 0)
        except ZeroDivisionError:
            raised = True
        assert raised
        assert gc.collect() == 0
    finally:
        gc.enable()


async def test_a_call_is_finished_although_its_caller_is_cancelled() -> None:
    call = Threaded()
    begun, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        begun.set()
        may_end.wait(5)
        ended.append(True)

    async def wait() -> None:
        await call(work)
        assert ended == [True]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        assert await trio.to_thread.run_sync(begun.wait, 5)
        nursery.cancel_scope.cancel()
        may_end.set()
    assert ended == [True]


async def test_the_thread_ends_when_idle_and_another_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "IDLE_THREAD_S", 0.01)
    call = Threaded()
    first: threading.Thread = await call(threading.current_thread)
    assert first.daemon
    await trio.to_thread.run_sync(first.join, 5)
    assert not first.is_alive()
    second = await call(threading.current_thread)
    assert second is not first
