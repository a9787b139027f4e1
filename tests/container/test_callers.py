"""Deadline and trace context of a caller, in the calls that its handler makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from amqp_rt import (
    Breaker,
    Bulkhead,
    Connection,
    Container,
    Deadline,
    Message,
    Retry,
    aio,
    node,
    rpc,
    sync,
)
from amqp_rt.container.callers import CALLER, caller_of
from amqp_rt.errors import CallFailed, CircuitOpen, DeadlineExceeded, Overloaded

pytestmark = pytest.mark.req("A20")

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = {"traceparent": TRACEPARENT, "tracestate": "a=1"}


class Inner:
    """The last node of a chain, which notes what arrives."""

    def __init__(self) -> None:
        self.left: list[float] = []
        self.traces: list[dict[str, Any]] = []

    @rpc("inner")
    async def inner(self, message: Message, deadline: Deadline) -> int:
        self.left.append(deadline.remaining_s)
        self.traces.append(dict(message.application_properties))
        return len(self.left)


def outer(peer_of: list[Any]) -> list[Any]:
    """Return nodes that pass a request on, each in a way of its own."""

    @rpc("plain")
    async def plain() -> int:
        await trio.sleep(1)
        found: int = await peer_of[0].call("inner", reply=int)
        return found

    @rpc("shorter")
    async def shorter() -> int:
        found: int = await peer_of[0].call("inner", reply=int, within=2)
        return found

    @rpc("detached")
    async def detached() -> int:
        found: int = await peer_of[0].call("inner", reply=int, within=inf)
        return found

    @rpc("policies")
    async def policies() -> int:
        await trio.sleep(1)
        calls = peer_of[0].calling(Retry(), Breaker())
        found: int = await calls.call("inner", reply=int)
        return found

    @rpc("streamed")
    async def streamed() -> AsyncIterator[int]:
        await trio.sleep(1)
        async for each in peer_of[0].stream("inner", reply=int):
            yield each

    @rpc("own trace")
    async def own_trace() -> int:
        mine = TRACEPARENT.replace("b7ad", "c0de")
        properties = {"traceparent": mine, "other": 1}
        found: int = await peer_of[0].call("inner", application_properties=properties)
        return found

    return [plain, shorter, detached, policies, streamed, own_trace]


@pytest.mark.parametrize(
    ("address", "left"),
    [("plain", 4), ("shorter", 2), ("detached", inf), ("policies", 4), ("streamed", 4)],
)
async def test_a_nested_call_has_the_callers_remaining_time_and_trace(
    autojump_clock: MockClock, address: str, left: float
) -> None:
    inner = Inner()
    peers: list[Any] = []
    async with Container("server", nodes=[inner, *outer(peers)]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network) as client,
            client.connect("memory://b") as peer,
        ):
            peers.append(peer)
            await peer.call(address, within=5, application_properties=TRACE)
            assert inner.left == [pytest.approx(left, abs=0.01)]
            assert inner.traces == [TRACE]
            # The next request of the same worker has neither.
            await peer.call(address)
            assert inner.left[1] == (2 if address == "shorter" else inf)
            assert inner.traces[1] == {}


async def test_a_trace_that_a_request_has_is_kept() -> None:
    inner = Inner()
    peers: list[Any] = []
    async with Container("server", nodes=[inner, *outer(peers)]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network) as client,
            client.connect("memory://b") as peer,
        ):
            peers.append(peer)
            await peer.call("own trace", application_properties=TRACE)
    assert inner.traces == [{"traceparent": TRACEPARENT.replace("b7ad", "c0de"), "other": 1}]


async def test_a_handler_of_messages_passes_the_trace_on() -> None:
    inner = Inner()
    peers: list[Any] = []
    done = trio.Event()

    @node("messages")
    async def messages(body: bytes) -> None:
        await peers[0].call("inner")
        done.set()

    async with Container("server", nodes=[inner, messages]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network) as client,
            client.connect("memory://b") as peer,
            peer.sender("messages") as out,
        ):
            peers.append(peer)
            await out.send(b"1", application_properties=TRACE)
            await done.wait()
            await out.send(b"2")
    assert inner.traces == [TRACE, {}]


async def test_a_call_without_time_left_sends_nothing(autojump_clock: MockClock) -> None:
    inner = Inner()
    peers: list[Any] = []
    errors: list[Exception] = []

    @rpc("late")
    async def late() -> int:
        with trio.CancelScope(shield=True):
            await trio.sleep(2)
            try:
                await peers[0].call("inner")
            except DeadlineExceeded as error:
                errors.append(error)
        return 0

    async with Container("server", nodes=[inner, late]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network) as client,
            client.connect("memory://b") as peer,
        ):
            peers.append(peer)
            with pytest.raises(DeadlineExceeded):
                await peer.call("late", within=1)
            await trio.sleep(3)
    assert "within=inf" in str(errors[0])
    assert inner.left == []


@pytest.mark.parametrize(
    "trace",
    [
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"},
        {"traceparent": "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"},
        {"traceparent": TRACEPARENT + "\r\n"},
        {"traceparent": 1},
        {"tracestate": "a=1"},
    ],
)
def test_a_malformed_trace_is_left_out(trace: dict[str, Any]) -> None:
    assert caller_of(Message(None, application_properties=trace)).trace == {}


def test_annotations_are_preferred_and_long_states_left_out() -> None:
    annotated = TRACEPARENT.replace("b7ad", "c0de")
    for octets, kept in ((512, True), (513, False)):
        message = Message(
            None,
            application_properties=TRACE,
            message_annotations={"traceparent": annotated, "tracestate": "x" * octets},
        )
        trace = caller_of(message).trace
        assert trace["traceparent"] == annotated
        assert ("tracestate" in trace) is kept


def test_under_asyncio_nested_calls_and_policies_work_alike() -> None:
    inner = Inner()

    @rpc("outer")
    async def outer(peer: Connection) -> int:
        await asyncio.sleep(0)
        found: int = await peers[0].calling(Retry(), Breaker()).call("inner", reply=int)
        return found

    peers: list[Any] = []

    async def main() -> None:
        async with aio.Container("server", nodes=[outer]) as server:
            server.add(inner)
            (url,) = await server.listen("amqp://127.0.0.1:0")
            async with server.connect(url) as peer:
                peers.append(peer)
                calls = peer.calling(Retry(3), Breaker())
                options: Any = {"within": 5, "application_properties": TRACE}
                assert await calls.call("outer", reply=int, **options) == 1

    asyncio.run(main())
    assert inner.traces == [TRACE]
    assert 4 < inner.left[0] <= 5


def test_in_threads_nested_calls_and_policies_work_alike() -> None:
    inner = Inner()
    peers: list[Any] = []

    @rpc("outer")
    def outer() -> int:
        found: int = peers[0].calling(Retry(), Breaker()).call("inner", reply=int)
        return found

    with sync.Container("server", nodes=[outer, inner]) as server:
        (url,) = server.listen("amqp://127.0.0.1:0")
        with server.connect(url) as peer:
            peers.append(peer)
            calls = peer.calling(Retry(3), Breaker())
            assert calls.call("outer", reply=int, within=5, application_properties=TRACE) == 1
            with pytest.raises(CallFailed):
                calls.call("outer", "an argument too many", within=5)
    assert inner.traces == [TRACE]
    assert 4 < inner.left[0] <= 5
    assert CALLER.get() is None


async def test_a_failing_and_an_overloaded_node_over_loopback() -> None:
    """Two containers over TCP: the breaker spares a node that fails, the bulkhead one that is full."""
    failing = True
    started = 0
    release = trio.Event()

    @rpc("fails")
    async def fails() -> int:
        nonlocal started
        started += 1
        if failing:
            raise RuntimeError("the database is away")
        return started

    @rpc("slow")
    async def slow() -> int:
        await release.wait()
        return 1

    async with Container("server", nodes=[fails, slow]) as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        async with Container("client") as client, client.connect(url) as peer:
            calls = peer.calling(Bulkhead(8), Breaker(open_s=0.1, open_most_s=0.1))
            for _ in range(20):
                with pytest.raises(CallFailed):
                    await calls.call("fails", within=5)
            with pytest.raises(CircuitOpen):
                await calls.call("fails", within=5)
            assert started == 20
            # Another node of the same peer has a circuit and places of its own.
            found: list[int] = []
            refused = 0
            all_refused = trio.Event()

            async def ask() -> None:
                nonlocal refused
                try:
                    found.append(await calls.call("slow", reply=int, within=20))
                except Overloaded:
                    refused += 1
                    if refused == 22:
                        all_refused.set()

            async with trio.open_nursery() as nursery:
                for _ in range(30):
                    nursery.start_soon(ask)
                with trio.fail_after(5):
                    await all_refused.wait()
                release.set()
            assert found == [1] * 8
            failing = False
            await trio.sleep(0.15)
            assert await calls.call("fails", reply=int, within=5) == 21
