"""Streamed requests: many items for one handler, held back by its credit, ended from either side."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from amqp_rt import (
    Connection,
    Container,
    Deadline,
    Message,
    Receiver,
    Retry,
    aio,
    node,
    rpc,
    stream,
    sync,
)
from amqp_rt.container.item_streams import StreamInbox
from amqp_rt.errors import (
    AmqpError,
    CallFailed,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryNotAccepted,
    DeliveryRejected,
    EncodeError,
    LinkRefused,
)
from amqp_rt.limits import MIB
from amqp_rt.outcomes import ACCEPTED, RELEASED, Rejected

pytestmark = pytest.mark.req("A1", "A4")


class Row(msgspec.Struct):
    number: int


class Adder:
    """Handler that adds numbers, and waits for the test before each."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()
        self.taken: list[int] = []
        self.ended: list[str] = []

    def declared(self, **options: Any) -> Any:
        @rpc("sum", **options)
        async def add(rows: AsyncIterator[Row]) -> int:
            how = "cancelled"
            total = 0
            try:
                await self.gate.wait()
                async for row in rows:
                    self.taken.append(row.number)
                    total += row.number
                    await self.gate.wait()
                how = "returned"
            except Exception as error:
                how = type(error).__name__
                raise
            finally:
                self.ended.append(how)
            return total

        return add


class Source:
    """Async generator of rows that records how far it went, and its end."""

    def __init__(self, size: int = 1_000_000, error_at: int = -1) -> None:
        self.size = size
        self.error_at = error_at
        self.made = 0
        self.closed = False

    async def __call__(self) -> AsyncIterator[Row]:
        try:
            for number in range(self.size):
                if number == self.error_at:
                    await trio.sleep(1)
                    raise KeyError("no such row")
                self.made += 1
                yield Row(number)
        finally:
            self.closed = True


@asynccontextmanager
async def served(*nodes: Any, **options: Any) -> AsyncIterator[tuple[Container, Connection]]:
    async with Container("c", nodes=nodes, **options) as container, container.local() as peer:
        yield container, peer
        # Nothing is held for streams that have ended.
        await wait_all_tasks_blocked()
        for workers in container.nodes.workers:
            assert workers.load == 0
            for inbox in workers.inboxes:
                assert isinstance(inbox, StreamInbox)
                assert not inbox._by_key
                assert not inbox._by_request
                assert inbox._window is not None
                assert inbox._window.held == inbox._window.held_bytes == 0


async def test_items_of_all_kinds_of_iterables_arrive_in_order() -> None:
    adder = Adder()
    async with served(adder.declared(prefetch=10)) as (_, peer):
        source = Source(500)
        assert await peer.call("sum", stream(source()), reply=int) == sum(range(500))
        assert adder.taken == list(range(500))
        assert source.closed
        assert await peer.call("sum", stream(Row(each) for each in (1, 2)), reply=int) == 3
        assert await peer.call("sum", stream([Row(7)]), reply=int, within=5) == 7
        assert await peer.call("sum", stream([]), reply=int) == 0
        given = [Message(b'{"number":1}', content_type="application/json", subject="a")]
        assert await peer.call("sum", stream(given), reply=int, compress="gzip") == 1


async def test_the_credit_of_the_handler_holds_the_caller_back(autojump_clock: MockClock) -> None:
    adder = Adder()
    adder.gate = trio.Event()
    source = Source(100)
    add = adder.declared(prefetch=7, slots=1)
    async with served(add) as (container, peer), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            assert await peer.call("sum", stream(source()), reply=int) == sum(range(100))

        await trio.sleep(1)
        assert container.stats()["sum"]["received"] == 8
        assert adder.taken == []
        adder.gate.set()
    assert adder.taken == list(range(100))


async def test_more_items_than_may_be_pending_wait_in_the_iterator(
    autojump_clock: MockClock,
) -> None:
    adder = Adder()
    adder.gate = trio.Event()
    source = Source(1_000)
    async with served(adder.declared()) as (_, peer), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            assert await peer.call("sum", stream(source()), reply=int) == sum(range(1_000))

        await trio.sleep(1)
        assert 100 < source.made <= 201
        adder.gate.set()


async def test_a_caller_that_is_cancelled_ends_the_handler_and_the_iterator(
    autojump_clock: MockClock,
) -> None:
    adder = Adder()
    adder.gate = trio.Event()
    source = Source()
    async with served(adder.declared()) as (container, peer):
        with trio.move_on_after(1) as scope:
            await peer.call("sum", stream(source()), reply=int)
        assert scope.cancelled_caught
        assert source.closed
        await wait_all_tasks_blocked()
        assert adder.ended == ["cancelled"]
        assert container.stats()["sum"]["cancelled"] == 1


async def test_the_deadline_ends_a_stream(autojump_clock: MockClock) -> None:
    seen: list[float] = []

    @rpc("sum")
    async def add(rows: AsyncIterator[Row], deadline: Deadline) -> int:
        seen.append(round(deadline.remaining_s, 1))
        return len([row async for row in rows])

    async def endless() -> AsyncIterator[Row]:
        while True:
            yield Row(1)
            await trio.sleep(0.1)

    async with served(add) as (_, peer):
        with pytest.raises(DeadlineExceeded):
            await peer.call("sum", stream(endless()), within=2)
    assert seen == [2.0]


async def test_an_iterator_that_fails_ends_the_call_with_its_error(
    autojump_clock: MockClock,
) -> None:
    adder = Adder()
    async with served(adder.declared()) as (_, peer):
        for error_at in (0, 3):
            with pytest.raises(KeyError, match="no such row"):
                await peer.call("sum", stream(Source(error_at=error_at)()))
        with pytest.raises(EncodeError):
            await peer.call("sum", stream([Row(1), object()]))
        await wait_all_tasks_blocked()
    # The call that failed before its first item was never sent.
    assert adder.ended[0] == "cancelled"
    assert set(adder.ended) == {"cancelled"}
    assert len(adder.ended) <= 2


@pytest.mark.parametrize("fails", [False, True])
async def test_a_handler_that_ends_early_ends_the_iterator(
    autojump_clock: MockClock, fails: bool
) -> None:
    @rpc("first", prefetch=5)
    async def first(rows: AsyncIterator[Row]) -> int:
        async for row in rows:
            if row.number == 20:
                break
        if fails:
            raise RuntimeError("enough")
        return 20

    source = Source()
    async with served(first) as (_, peer):
        if fails:
            with pytest.raises(CallFailed, match="'first' failed"):
                await peer.call("first", stream(source()))
        else:
            assert await peer.call("first", stream(source()), reply=int) == 20
        assert source.closed
        assert source.made < 500


async def test_a_malformed_item_is_a_decode_error_that_names_it() -> None:
    adder = Adder()
    async with served(adder.declared()) as (_, peer):
        for at in (0, 2):
            items = [Row(1), Row(2), Row(3)]
            items[at] = {"number": "x"}  # type: ignore[call-overload]
            with pytest.raises(CallFailed, match=f"item {at}: Expected `int`, got `str`") as caught:
                await peer.call("sum", stream(items))
            assert caught.value.condition == "amqp:decode-error"
            (fault,) = caught.value.info["errors"]  # type: ignore[misc,attr-defined]
            assert fault["path"] == "$.number"
    assert adder.ended == ["DecodeError"] * 2


async def test_a_lost_connection_ends_both(autojump_clock: MockClock) -> None:
    adder = Adder()
    adder.gate = trio.Event()
    source = Source()
    async with Container("c", nodes=[adder.declared()]) as container:
        await container.listen("memory://c")
        async with (
            Container("client", network=container.network) as client,
            client.connect("memory://c", reconnect=None) as peer,
            trio.open_nursery() as nursery,
        ):

            @nursery.start_soon
            async def cut() -> None:
                await trio.sleep(1)
                container.connections[0].close()

            with pytest.raises(ConnectionLost):
                await peer.call("sum", stream(source()))
            assert source.closed
        await wait_all_tasks_blocked()
    assert adder.ended == ["cancelled"]


async def test_a_connection_replaced_before_the_first_item_has_the_reply(
    autojump_clock: MockClock,
) -> None:
    adder = Adder()

    async def late() -> AsyncIterator[Row]:
        await trio.sleep(10)
        yield Row(1)
        yield Row(2)

    async with Container("c", nodes=[adder.declared()]) as container:
        await container.listen("memory://c")
        async with (
            Container("client", network=container.network) as client,
            client.connect("memory://c") as peer,
            trio.open_nursery() as nursery,
        ):

            @nursery.start_soon
            async def cut() -> None:
                await trio.sleep(1)
                container.connections[0].close()

            with trio.fail_after(60):
                assert await peer.call("sum", stream(late()), reply=int) == 3
            assert not peer._requests._replies.calls  # type: ignore[union-attr]


async def test_items_that_are_left_by_an_answer_end_no_call(autojump_clock: MockClock) -> None:
    others: list[Connection] = []
    kinds: list[str | None] = []

    @node.link("first")
    async def first(link: Receiver) -> None:
        async for delivery in link:
            kinds.append(delivery.message.content_type)
            if delivery.message.reply_to is None:
                delivery.release()
                continue
            delivery.accept()
            request = delivery.message
            nursery.start_soon(answer, request.reply_to, request.correlation_id)

    async def answer(address: str, key: Any) -> None:
        # A large reply comes on its own link, long after the outcomes of the items.
        await trio.sleep(5)
        async with others[0].sender(address) as out:
            await out.send(20, correlation_id=key)

    source = Source()
    async with (
        Container("c", nodes=[first]) as container,
        container.local() as peer,
        container.local() as other,
        trio.open_nursery() as nursery,
    ):
        others.append(other)
        found = await peer.call(
            "first", stream(source()), reply=int, content_type="application/msgpack"
        )
        assert found == 20
        assert source.closed
        assert 1 < source.made < 500
        assert set(kinds) == {"application/msgpack"}


async def test_draining_lets_running_streams_end_and_takes_no_more(
    autojump_clock: MockClock,
) -> None:
    adder = Adder()
    add = adder.declared(slots=1, prefetch=3)
    resumed = trio.Event()

    async def slow() -> AsyncIterator[Row]:
        for number in range(50):
            yield Row(number)
            if number == 5:
                await resumed.wait()

    async with Container("c", nodes=[add]) as container, container.local() as peer:
        results: list[Any] = []

        async def call(items: Any) -> None:
            try:
                results.append(await peer.call("sum", stream(items), reply=int))
            except DeliveryNotAccepted:
                results.append("released")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, slow())
            await wait_all_tasks_blocked()
            nursery.start_soon(call, [Row(1)] * 20)  # waits for the slot
            await wait_all_tasks_blocked()
            container.remove(add)
            await wait_all_tasks_blocked()
            assert results == ["released"]
            resumed.set()
        assert results == ["released", sum(range(50))]
        (workers,) = container.nodes.workers or [None]
        assert workers is None or workers.load == 0


async def test_streams_wait_for_a_slot_within_their_window(autojump_clock: MockClock) -> None:
    adder = Adder()
    adder.gate = trio.Event()
    sources = [Source(300) for _ in range(3)]
    add = adder.declared(slots=1, prefetch=20)
    async with served(add) as (container, peer), trio.open_nursery() as nursery:
        for source in sources:
            nursery.start_soon(peer.call, "sum", stream(source()))
        await trio.sleep(1)
        assert container.stats()["sum"]["received"] == 3 * 21
        assert container.stats()["sum"]["running"] == 1
        adder.gate.set()
    assert adder.taken == list(range(300)) * 3


async def test_large_items_need_no_room_beside_the_first() -> None:
    @rpc("size")
    async def size(parts: AsyncIterator[bytes]) -> int:
        return sum([len(part) async for part in parts])

    async with served(size) as (_, peer):
        parts = [bytes(6 * MIB)] * 3
        assert await peer.call("size", stream(parts), reply=int) == 18 * MIB


# --- Messages of other clients ---


async def test_a_stream_is_messages_with_one_correlation_id_and_an_end() -> None:
    adder = Adder()
    end = {"x-opt-stream-end": True}
    async with (
        served(adder.declared()) as (_, peer),
        peer.receiver(dynamic=True) as replies,
        peer.sender("sum") as out,
    ):
        # Two streams on one link, and the items of a third without its beginning.
        stray = out.send_nowait(Row(1000), correlation_id="c")
        assert await stray.outcome() == RELEASED
        first = {"reply_to": replies.address}
        receipts = [
            out.send_nowait(Row(1), correlation_id="a", **first),
            out.send_nowait(Row(10), correlation_id=5, **first),
            out.send_nowait(Row(2), correlation_id="a"),
            out.send_nowait(Row(20), correlation_id=5),
            out.send_nowait(b"", correlation_id="a", message_annotations=end),
            out.send_nowait(b"", correlation_id=5, message_annotations=end),
        ]
        for each in receipts:
            assert await each.outcome() == ACCEPTED
        found = {}
        for _ in range(2):
            async with await replies.receive() as delivery:
                found[delivery.message.correlation_id] = delivery.decode(int)
        assert found == {"a": 3, 5: 30}


async def test_a_request_of_one_message_is_refused_instead_of_waiting_for_its_end() -> None:
    adder = Adder()
    async with served(adder.declared()) as (_, peer):
        with pytest.raises(
            CallFailed, match=r"takes a stream of items: call it with stream\("
        ) as failed:
            await peer.call("sum", Row(1), reply=int)
        assert failed.value.condition == "amqp:decode-error"
        assert adder.taken == []
        # Its room is free, and a stream beside it is not disturbed.
        assert await peer.call("sum", stream([Row(3)]), reply=int) == 3


async def test_a_message_that_is_none_fails_the_open_streams() -> None:
    adder = Adder()
    async with (
        served(adder.declared()) as (_, peer),
        peer.receiver(dynamic=True) as replies,
        peer.sender("sum") as out,
    ):
        refused = out.send_nowait(Row(1))
        assert await refused.outcome() == RELEASED
        request = out.send_nowait(Row(1), correlation_id="a", reply_to=replies.address)
        with pytest.raises(DeliveryRejected, match="message-format 0x5 is not known"):
            await out.send_payload(b"", message_format=5)
        assert isinstance(await request.outcome(), Rejected)
        async with await replies.receive() as delivery:
            properties = delivery.message.application_properties
            assert properties is not None
            assert properties["errorCondition"] == "amqp:decode-error"
    assert adder.ended == ["DecodeError"]


async def test_a_stream_crosses_a_socket() -> None:
    adder = Adder()
    async with (
        Container("c", nodes=[adder.declared(prefetch=20)]) as container,
        Container("client") as client,
    ):
        (url,) = await container.listen("amqp://127.0.0.1:0")
        async with client.connect(url) as peer:
            items = Source(2_000)()
            found = await peer.call("sum", stream(items), reply=int, compress="gzip")
    assert found == sum(range(2_000))


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_a_peer_sends_its_room_comes_back(
    seed: int, autojump_clock: MockClock
) -> None:
    chance = random.Random(seed)
    limits: list[int] = []

    @rpc("sum", slots=2, prefetch=8)
    async def add(rows: AsyncIterator[Row]) -> int:
        most = chance.choice([0, 1, 3, 100])
        limits.append(most)
        count = 0
        async for _ in rows:
            count += 1
            if count >= most:
                break
            if chance.random() < 0.2:
                raise RuntimeError("it fails")
        return count

    async with served(add) as (container, peer), peer.receiver(dynamic=True) as replies:
        (workers,) = container.nodes.workers
        for _ in range(3):
            async with peer.sender("sum") as out:
                for _ in range(20):
                    await _send_something(chance, out, replies.address)
                    if chance.random() < 0.3:
                        await trio.sleep(0.1)
                await trio.sleep(1)
                (inbox,) = workers.inboxes
                assert isinstance(inbox, StreamInbox)
                assert inbox._window is not None
                unread = sum(len(each._waiting) for _, each in inbox._by_request.values())
                assert inbox._window.held == workers.load == unread
                out.abandon()
            await trio.sleep(1)


async def _send_something(chance: random.Random, out: Any, address: str | None) -> None:
    if chance.random() < 0.1:
        out.send_nowait(Row(1))  # without a key
        return
    properties: dict[str, Any] = {"correlation_id": chance.choice(["a", "b", 1])}
    if chance.random() < 0.4:
        properties["reply_to"] = address
    if chance.random() < 0.2:
        properties["message_annotations"] = {"x-opt-stream-end": True}
    body: Any = {"number": "x"} if chance.random() < 0.1 else Row(1)
    with trio.move_on_after(0.5):
        if chance.random() < 0.1:
            with pytest.raises(AmqpError):
                await out.send_payload(b"", message_format=5)
        else:
            out.send_nowait(body, **properties)


# --- What cannot be ---


async def test_a_stream_is_the_only_argument_and_is_sent_once() -> None:
    adder = Adder()
    async with served(adder.declared()) as (_, peer):
        with pytest.raises(TypeError, match="a stream is the only argument of its call"):
            await peer.call("sum", stream([]), 5)
        with pytest.raises(TypeError, match="call it without policies"):
            await peer.calling(Retry(3)).call("sum", stream([]))
        with pytest.raises(ValueError, match="is how a call finds its reply"):
            await peer.call("sum", stream([]), message_id="1")
        with pytest.raises(LinkRefused):
            await peer.call("nowhere", stream([]))
        async with peer.sender() as anonymous:
            with pytest.raises(AmqpError, match="has to be attached to"):
                await anonymous.send(Row(1), to="sum")
    for wrong in (5, "text", b"octets"):
        with pytest.raises(TypeError, match="takes what can be iterated over"):
            stream(wrong)  # type: ignore[arg-type]


def test_signatures_of_streamed_requests_are_checked() -> None:
    async def two(rows: AsyncIterator[Row], more: int) -> None: ...
    async def roomless(rows: AsyncIterator[Row]) -> None: ...
    async def stored(rows: AsyncIterator[Row]) -> None: ...
    async def added(rows: AsyncIterator[Row]) -> None: ...

    with pytest.raises(TypeError, match="a stream is the only argument of a request"):
        Container("c", nodes=[rpc("two")(two)])
    with pytest.raises(TypeError, match="a stream needs room for an item"):
        Container("c", nodes=[rpc("rows", prefetch=0)(roomless)])
    with pytest.raises(TypeError, match=r"AsyncIterator .*cannot be decoded"):
        Container("c", nodes=[node("rows")(stored)])
    document = Container("c", nodes=[rpc("rows")(added)]).asyncapi()
    assert document["operations"]["rpc.rows"]["x-streamed"] is True


async def test_a_queue_has_no_links_for_streams() -> None:
    adder = Adder()
    add = adder.declared()
    async with Container("c", nodes=[add]) as container, container.local() as peer:
        with pytest.raises(TypeError, match="a streamed request needs a link of its caller"):
            await container.consume(peer, [add])
        assert container.nodes.for_peer([]) == []


# --- Other event loops ---


def test_asyncio_sends_and_handles_streams() -> None:
    @rpc("sum")
    async def add(rows: AsyncIterator[Row]) -> int:
        total = 0
        async for row in rows:
            await asyncio.sleep(0)
            total += row.number
        return total

    closed: list[bool] = []

    async def produce() -> AsyncIterator[Row]:
        try:
            for number in range(20):
                await asyncio.sleep(0)
                yield Row(number)
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def main() -> None:
        async with aio.Container("c", nodes=[add]) as container, container.local() as peer:
            assert await peer.call("sum", stream(produce()), reply=int) == sum(range(20))
            assert await peer.call("sum", stream([Row(1)]), reply=int) == 1

            async def endless() -> AsyncIterator[Row]:
                try:
                    while True:
                        yield Row(1)
                        await asyncio.sleep(0.01)
                finally:
                    closed.append(True)

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await peer.call("sum", stream(endless()))

    asyncio.run(main())
    assert closed == [True, True]


def test_threads_send_and_handle_streams() -> None:
    @rpc("sum")
    def add(rows: AsyncIterator[dict[str, int]]) -> int:
        # A handler in a thread gets them from an iterator.
        return sum(row["number"] for row in cast("Iterator[dict[str, int]]", rows))

    with sync.Container("c", nodes=[add]) as container, container.local() as peer:
        assert peer.call("sum", stream(Row(each) for each in range(10)), reply=int) == 45
        assert peer.call("sum", stream([]), reply=int) == 0
