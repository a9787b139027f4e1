"""Handlers that block, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import trio

from amqp_rt import Container, Message, node, rpc
from amqp_rt.errors import DeadlineExceeded
from amqp_rt.outcomes import Modified


class Gate:
    """Gate that blocks handlers until the test opens it, and counts those inside."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def block(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.opened.wait(20)
        with self._lock:
            self.inside -= 1

    async def wait_entered(self) -> None:
        await trio.to_thread.run_sync(self.entered.acquire)


@pytest.mark.req("A1", "A11")
async def test_a_blocking_handler_holds_up_nobody_else_and_keeps_to_its_slots() -> None:
    gate = Gate()
    threads: set[int] = set()

    @node("jobs", slots=2, thread=True)
    def work(job: str, message: Message) -> None:
        threads.add(threading.get_ident())
        assert message.body == job
        gate.block()

    @rpc("ping")
    async def ping() -> str:
        return "pong"

    async with (
        Container("c", nodes=[work, ping]) as container,
        container.local() as peer,
        peer.sender("jobs") as out,
    ):
        receipts = [out.send_nowait(str(number)) for number in range(5)]
        await gate.wait_entered()
        await gate.wait_entered()
        assert await peer.call("ping", reply=str) == "pong"
        assert not any(each.done for each in receipts)
        gate.opened.set()
        for each in receipts:
            await each.accepted()
    assert gate.most == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("kind", [bytes, str])
async def test_what_a_handler_in_a_thread_raises_is_its_outcome(kind: Callable[..., Any]) -> None:
    def work(job: Any) -> None:
        raise RuntimeError("it does not work")

    work.__annotations__["job"] = kind
    container = Container("c", nodes=[node("jobs", thread=True)(work)])
    async with container, container.local() as peer, peer.sender("jobs") as out:
        receipt = out.send_nowait(kind(b"x") if kind is bytes else "x")
        assert await receipt.outcome() == Modified(delivery_failed=True)


async def test_a_thread_sees_the_context_of_its_handler_and_replies() -> None:
    name: ContextVar[str] = ContextVar("name", default="none")

    async def with_name(call_next: Any, context: Any) -> Any:
        name.set("shop")
        return await call_next(context)

    @rpc("name", thread=True, middleware=[with_name])
    def read() -> str:
        return name.get()

    async with Container("c", nodes=[read]) as container, container.local() as peer:
        assert await peer.call("name", reply=str) == "shop"
        assert container.nodes.routes[-1].name.endswith("read")


async def test_a_caller_that_gives_up_leaves_the_thread_its_slot() -> None:
    gate = Gate()

    @rpc("slow", slots=1, thread=True)
    def slow() -> str:
        gate.block()
        return "done"

    async with Container("c", nodes=[slow]) as container, container.local() as peer:
        with pytest.raises(DeadlineExceeded):
            await peer.call("slow", reply=str, within=0.05)
        await gate.wait_entered()
        gate.opened.set()
        assert await peer.call("slow", reply=str, within=20) == "done"
    assert gate.most == 1


def test_only_a_plain_function_runs_in_a_thread() -> None:
    @node("a", thread=True)
    async def coroutine(body: str) -> None: ...

    with pytest.raises(TypeError, match="thread=True is for a `def`"):
        Container("c", nodes=[coroutine])
