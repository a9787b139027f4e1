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
    Hedge,
    Limits,
    Message,
    Retry,
    aio,
    node,
    rpc,
    sync,
)
from amqp_rt.container.callers import CALLER, caller_of
from amqp_rt.errors import CallFailed, CircuitOpen, DeadlineExceeded, Overloaded
from amqp_rt.limits import KIB
from amqp_rt.trace_context import trace_of
from amqp_rt.values import Symbol

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


async def test_a_streamed_message_passes_the_trace_on() -> None:
    inner = Inner()
    peers: list[Any] = []
    seen: list[bytes] = []
    done = trio.Event()

    @node("uploads", streaming=True)
    async def uploads(body: AsyncIterator[bytes]) -> None:
        await peers[0].call("inner")
        seen.extend([bytes(part) async for part in body])
        done.set()

    async with Container("server", nodes=[inner, uploads]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network) as client,
            client.connect("memory://b") as peer,
            peer.sender("uploads") as out,
        ):
            peers.append(peer)
            for trace in (TRACE, {}):
                done = trio.Event()
                async with out.stream(application_properties=trace) as body:
                    await body.write(b"x")
                await done.wait()
    assert inner.traces == [TRACE, {}]
    assert b"".join(seen) == b"xx"


@pytest.mark.parametrize("kind", ["node", "rpc"])
async def test_the_ttl_of_a_message_is_no_deadline_and_that_of_a_request_is(
    autojump_clock: MockClock, kind: str
) -> None:
    """A message may outlive its ttl in a handler (Part 3 §3.2.1): nested calls have no deadline."""
    inner = Inner()
    peers: list[Any] = []
    done = trio.Event()

    async def work() -> None:
        await trio.sleep(1)
        await peers[0].call("inner")
        done.set()

    made = node("work")(work) if kind == "node" else rpc("work")(work)
    async with Container("server", nodes=[inner, made]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network) as client,
            client.connect("memory://b") as peer,
            peer.sender("work") as out,
        ):
            peers.append(peer)
            if kind == "node":
                await out.send(b"", ttl_s=5, application_properties=TRACE)
            else:
                await peer.call("work", within=5, application_properties=TRACE)
            await done.wait()
    assert inner.left == [inf if kind == "node" else pytest.approx(4, abs=0.01)]
    assert inner.traces == [TRACE]


@pytest.mark.parametrize("address", ["octets", "decoded", "answer"])
@pytest.mark.parametrize("over", [0, 1])
async def test_a_trace_is_found_near_the_start_of_a_message_only(address: str, over: int) -> None:
    """The name of the trace context ends at the bound, or one octet after it."""
    inner = Inner()
    peers: list[Any] = []
    ends: list[int] = []
    done = trio.Event()

    def note(message: Message) -> None:
        ends.append(message.encode().find(b"traceparent") + len(b"traceparent"))

    @node("decoded")
    async def decoded(message: Message) -> None:
        note(message)
        await peers[0].call("inner")
        done.set()

    @rpc("answer")
    async def answer(message: Message) -> None:
        note(message)
        await peers[0].call("inner")

    @node("octets")
    async def octets(body: bytes) -> None:
        await peers[0].call("inner")
        done.set()

    nodes: list[Any] = [octets, decoded, answer, inner]
    # The first round finds the place of the name, which the second one sets as the bound.
    for place in ("decoded" if address == "octets" else address, address):
        done = trio.Event()
        within = ends[0] - over if ends else 16_384
        async with Container(
            "server", nodes=nodes, limits=Limits(trace_context_within=within)
        ) as server:
            await server.listen("memory://b")
            async with (
                Container("client", network=server.network) as client,
                client.connect("memory://b") as peer,
            ):
                peers[:] = [peer]
                if place == "answer":
                    await peer.call(place, application_properties=TRACE)
                else:
                    async with peer.sender(place) as out:
                        await out.send(b"", application_properties=TRACE)
                        await done.wait()
    assert inner.traces == [TRACE, {} if over else TRACE]


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


async def test_the_slower_handler_of_a_hedge_is_cancelled_over_tcp() -> None:
    """The first of two requests is slow: the second is answered, and the handler of the first cancelled."""
    started = 0
    ended: list[str] = []
    slow = False
    gone = trio.Event()

    @rpc("q", slots=2)
    async def answer(number: int) -> int:
        nonlocal started, slow
        started += 1
        if slow:
            slow = False
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                ended.append("cancelled")
                gone.set()
                raise
        ended.append("answered")
        return number

    async with Container("server", nodes=[answer]) as server:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        async with Container("client") as client, client.connect(url) as peer:
            # The floor is far above what a busy machine needs for a reply.
            hedge = Hedge(least_s=0.5)
            calls = peer.calling(hedge, idempotent=True)
            for number in range(20):
                assert await calls.call("q", number, reply=int, within=30) == number
            slow = True
            ended.clear()
            with trio.fail_after(30):
                assert await calls.call("q", 7, reply=int) == 7
                await gone.wait()
            assert started == 22
            assert sorted(ended) == ["answered", "cancelled"]
            assert hedge.state_of("q").budget.spent(trio.current_time()) == 1


def test_a_trace_in_its_usual_encoding_is_found_without_decoding_and_means_the_same() -> None:
    other = TRACEPARENT.replace("b7ad", "c0de")
    usual = {"traceparent": TRACEPARENT}
    for given, properties, expected in (
        ({}, {}, {}),
        ({}, usual, usual),
        ({}, {"a": 1, **usual, "z": "traceparent"}, usual),
        ({Symbol("traceparent"): other}, usual, {"traceparent": other}),
        ({Symbol("x-opt-a"): 1, Symbol("traceparent"): other}, {}, {"traceparent": other}),
        # Of another length, malformed, or with a state: the section is decoded.
        ({}, {**usual, "tracestate": "a=1"}, {**usual, "tracestate": "a=1"}),
        ({}, {"traceparent": TRACEPARENT + "-more"}, {}),
        ({}, {"traceparent": TRACEPARENT.replace("00-", "01-", 1) + "-more"}, None),
        ({}, {"traceparent": TRACEPARENT.upper()}, {}),
        ({}, {"traceparent": 7}, {}),
        ({Symbol("traceparent"): "bad"}, usual, usual),
        # The name occurs in a value only, and in one as the octets of an entry, which are no text.
        ({}, {"a": "traceparent"}, {}),
        ({}, {"a": b"\xa1\x0btraceparent\xa1\x36" + TRACEPARENT.encode()}, {}),
    ):
        built = Message(b"x", message_annotations=given, application_properties=properties)
        octets = built.encode()
        found = trace_of(Message.decode(octets))
        if expected is None:
            expected = {"traceparent": properties["traceparent"]}
        assert found == trace_of(built) == expected
        assert caller_of(octets).trace == found
        large = Message.decode(octets).replace(body=bytes(70 * KIB)).encode()
        assert caller_of(large).trace == found
    # What is cut or malformed has no trace, and what is malformed is for the handler to hear of.
    octets = Message(b"x", application_properties=usual).encode()
    for front in (octets[:30], b"", b"traceparent", b"traceparent" * 10_000):
        assert caller_of(front).trace == {}
