"""Batches of messages for one handler: when they are full, outcomes, failures, cancellation and draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from amqp_rt import (
    Batch,
    Connection,
    Container,
    Deadline,
    Delivery,
    Depends,
    Message,
    Peer,
    PerMessage,
    Reject,
    Release,
    Retry,
    aio,
    node,
    rpc,
    sync,
)
from amqp_rt.errors import DeliveryRejected
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Accepted, Modified, Rejected

pytestmark = pytest.mark.req("A1", "A11")


class Row(msgspec.Struct):
    number: int


class Transaction:
    """Resource of a batch."""


class Table:
    """Handler that records its batches with their times, and waits where the test wants it to."""

    def __init__(self, result: Callable[[list[Row]], Any] | None = None) -> None:
        self.start = trio.current_time()
        self.batches: list[list[int]] = []
        self.times: list[float] = []
        self.result = result
        self.gate = trio.Event()
        self.gate.set()
        self.running = 0
        self.most = 0

    def declared(self, batch: Batch, **options: Any) -> Any:
        @node("rows", batch=batch, **options)
        async def insert(rows: list[Row]) -> Any:
            self.batches.append([row.number for row in rows])
            self.times.append(round(trio.current_time() - self.start, 3))
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.gate.wait()
                return None if self.result is None else self.result(rows)
            finally:
                self.running -= 1

        return insert


@asynccontextmanager
async def served(insert: Any, **options: Any) -> AsyncIterator[tuple[Container, Connection]]:
    async with Container("c", nodes=[insert], **options) as container, container.local() as peer:
        yield container, peer


async def test_a_batch_is_handled_when_it_is_full_or_its_time_has_passed(
    autojump_clock: MockClock,
) -> None:
    table = Table()
    async with (
        served(table.declared(Batch(messages=3, within_s=0.5))) as (_, peer),
        peer.sender("rows") as out,
    ):
        receipts = [out.send_nowait(Row(number)) for number in range(5)]
        await wait_all_tasks_blocked()
        assert table.batches == [[0, 1, 2]]
        await trio.sleep(0.4)
        receipts.append(out.send_nowait(Row(5)))
        await wait_all_tasks_blocked()
        assert table.batches == [[0, 1, 2], [3, 4, 5]]
        receipts.append(out.send_nowait(Row(6)))
        for each in receipts:
            await each.accepted()
        assert table.batches[2:] == [[6]]
        assert table.times == [0, 0.4, 0.9]


class Bad:
    """Type whose codec fails on some messages in a way that no codec should."""


class BadCodec:
    def claims(self, kind: Any) -> bool:
        return kind is Bad

    def decoder(self, kind: Any, media_type: str) -> Callable[[bytes], Any] | None:
        def decode(octets: bytes) -> Bad:
            if octets == b"bad":
                raise LookupError("no such field")
            return Bad()

        return decode

    def encode(self, value: Bad, media_type: str | None) -> tuple[str, bytes]:
        return "a/bad", b"good"

    def schema(self, kind: Any, references: str) -> dict[str, Any] | None:
        return None


@pytest.mark.parametrize("first", [True, False])
async def test_a_codec_that_fails_takes_neither_room_nor_slot(
    first: bool, autojump_clock: MockClock
) -> None:
    batches: list[int] = []

    @node("rows", batch=Batch(messages=3, within_s=0.5))
    async def insert(rows: list[Bad]) -> None:
        batches.append(len(rows))

    bodies = [b"bad", b"good"] if first else [b"good", b"bad"]
    async with (
        served(insert, codecs=[BadCodec()]) as (container, peer),
        peer.sender("rows") as out,
    ):
        for _ in range(2):
            receipts = [
                out.send_nowait(Message(body, content_type="a/bad"))
                for body in [*bodies, b"good", b"good"]
            ]
            outcomes = [await each.outcome() for each in receipts]
            assert outcomes.count(ACCEPTED) == 3
            assert outcomes[bodies.index(b"bad")] == MODIFIED_FAILED
        assert batches == [3, 3]
        assert [each.load for each in container.nodes.workers] == [0]


async def test_a_batch_collects_the_messages_of_all_links(autojump_clock: MockClock) -> None:
    table = Table()
    async with (
        served(table.declared(Batch(messages=4, within_s=5))) as (container, peer),
        container.local() as other,
        peer.sender("rows") as first,
        other.sender("rows") as second,
    ):
        receipts = []
        for number in range(4):
            receipts.append((second if number % 2 else first).send_nowait(Row(number)))
            await wait_all_tasks_blocked()
        for each in receipts:
            await each.accepted()
    assert table.batches == [[0, 1, 2, 3]]
    assert table.times == [0]


async def test_octets_bound_a_batch_and_a_large_message_is_one_of_its_own(
    autojump_clock: MockClock,
) -> None:
    sizes: list[list[int]] = []

    @node("rows", batch=Batch(messages=10, bytes=1000, within_s=1))
    async def insert(rows: list[bytes]) -> None:
        sizes.append([len(row) for row in rows])

    async with served(insert) as (_, peer), peer.sender("rows") as out:
        assert await out.send_many([bytes(size) for size in (300, 300, 300, 300, 5000, 10)]) == 6
    assert sizes == [[300, 300, 300], [300], [5000], [10]]


@pytest.mark.parametrize("prefetch", [0, 100])
async def test_slots_count_batches(autojump_clock: MockClock, prefetch: int) -> None:
    table = Table()
    table.gate = trio.Event()
    insert = table.declared(Batch(messages=5, within_s=0.1), slots=2, prefetch=prefetch)
    async with served(insert) as (container, peer), peer.sender("rows") as out:
        receipts = [out.send_nowait(Row(number)) for number in range(23)]
        await trio.sleep(1)
        assert table.batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        if not prefetch:
            assert container.stats()["rows"]["received"] == 10
        table.gate.set()
        for each in receipts:
            await each.accepted()
    assert sorted(number for batch in table.batches for number in batch) == list(range(23))
    assert table.most == 2
    assert [len(each) for each in table.batches] == [5, 5, 5, 5, 3]


async def test_malformed_messages_are_rejected_singly_and_take_no_place(
    autojump_clock: MockClock,
) -> None:
    table = Table()
    insert = table.declared(Batch(messages=3, within_s=60), prefetch=0)
    async with served(insert) as (container, peer), peer.sender("rows") as out:
        bad = [out.send_nowait({"number": "x"}) for _ in range(10)]
        for each in bad:
            with pytest.raises(DeliveryRejected) as caught:
                await each.accepted()
            assert caught.value.condition == "amqp:decode-error"
            assert caught.value.info["errors"][0]["path"] == "$.number"  # type: ignore[index]
        good = [out.send_nowait(Row(number)) for number in range(2)]
        good.append(out.send_nowait({"number": 2}))
        for each in good:
            await each.accepted()
        stats = container.stats()["rows"]
    assert table.batches == [[0, 1, 2]]
    assert (stats["rejected"], stats["accepted"], stats["failed"]) == (10, 3, 0)


async def test_a_batch_in_which_nothing_can_be_decoded_calls_no_handler(
    autojump_clock: MockClock,
) -> None:
    table = Table()
    async with (
        served(table.declared(Batch(within_s=0.5))) as (_, peer),
        peer.sender("rows") as out,
    ):
        with pytest.raises(DeliveryRejected):
            await out.send("text")
        await trio.sleep(1)
        assert table.batches == []
        await out.send(Row(1))
    assert table.batches == [[1]]


@pytest.mark.parametrize(
    ("result", "outcomes"),
    [
        (lambda rows: None, [ACCEPTED] * 3),
        (lambda rows: RELEASED, [RELEASED] * 3),
        (lambda rows: [None, RELEASED, ACCEPTED], [ACCEPTED, RELEASED, ACCEPTED]),
        (lambda rows: [None] * 2, [MODIFIED_FAILED] * 3),
        (lambda rows: 5, [MODIFIED_FAILED] * 3),
    ],
)
async def test_a_handler_returns_one_outcome_or_one_each(
    autojump_clock: MockClock, result: Any, outcomes: list[Any]
) -> None:
    table = Table(result)
    async with (
        served(table.declared(Batch(messages=3))) as (_, peer),
        peer.sender("rows") as out,
    ):
        receipts = [out.send_nowait(Row(number)) for number in range(3)]
        assert [await each.outcome() for each in receipts] == outcomes


async def test_reject_may_be_returned_for_one_and_raised_for_all(
    autojump_clock: MockClock,
) -> None:
    def result(rows: list[Row]) -> Any:
        if rows[0].number:
            raise Release
        return [Reject("it is 0"), None]

    table = Table(result)
    async with (
        served(table.declared(Batch(messages=2))) as (_, peer),
        peer.sender("rows") as out,
    ):
        first, second, *others = [out.send_nowait(Row(number)) for number in range(4)]
        outcome = await first.outcome()
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.description == "it is 0"
        assert await second.outcome() == ACCEPTED
        assert [await each.outcome() for each in others] == [RELEASED] * 2


async def test_a_failed_handler_fails_all_each_by_its_own_attempts(
    autojump_clock: MockClock,
) -> None:
    def fail(rows: list[Row]) -> Any:
        raise RuntimeError("the table is locked")

    table = Table(fail)
    policy = Retry(3, first_s=10, factor=3, most_s=100, jitter=0)
    async with (
        served(table.declared(Batch(messages=3), retry=policy)) as (container, peer),
        peer.sender("rows") as out,
    ):
        receipts = [
            out.send_nowait(Message(msgspec.json.encode(Row(number)), delivery_count=number))
            for number in range(3)
        ]
        first, second, third = [await each.outcome() for each in receipts]
        stats = container.stats()["rows"]
    # They were held for their pauses, since the sender keeps none.
    assert first == second == Modified(delivery_failed=True)
    assert isinstance(third, Rejected)
    assert round(trio.current_time() - table.start) == 30
    assert (stats["failed"], stats["modified"], stats["rejected"]) == (1, 2, 1)


async def test_draining_handles_at_once_what_has_been_collected(autojump_clock: MockClock) -> None:
    table = Table()
    insert = table.declared(Batch(messages=3, within_s=60))
    async with served(insert) as (container, peer), peer.sender("rows") as out:
        receipts = [out.send_nowait(Row(number)) for number in range(2)]
        await wait_all_tasks_blocked()
        assert table.batches == []
        container.remove(insert)
        assert [await each.outcome() for each in receipts] == [ACCEPTED] * 2
    assert table.batches == [[0, 1]]
    assert table.times == [0]


async def test_draining_waits_for_running_batches_and_releases_the_rest(
    autojump_clock: MockClock,
) -> None:
    table = Table()
    table.gate = trio.Event()
    insert = table.declared(Batch(messages=3, within_s=60))
    async with (
        served(insert) as (container, peer),
        peer.sender("rows") as out,
        peer.sender("rows", settled=True) as settled,
    ):
        receipts = [out.send_nowait(Row(number)) for number in range(5)]
        await wait_all_tasks_blocked()
        # Settled messages exist only here: they are handled all the same.
        settled.send_nowait(Row(5))
        await wait_all_tasks_blocked()
        container.remove(insert)
        assert [await each.outcome() for each in receipts[3:]] == [RELEASED] * 2
        assert not any(each.done for each in receipts[:3])
        table.gate.set()
        assert [await each.outcome() for each in receipts[:3]] == [ACCEPTED] * 3
        await wait_all_tasks_blocked()
    assert table.batches == [[0, 1, 2], [5]]
    assert table.times == [0, 0]


async def test_a_cancelled_batch_releases_all_of_its_messages(autojump_clock: MockClock) -> None:
    table = Table()
    table.gate = trio.Event()
    insert = table.declared(Batch(messages=2, within_s=60), slots=2)
    container = Container("c", nodes=[insert], drain_s=1)
    receipts: list[Any] = []
    async with Container("client", network=container.network) as client, container:
        await container.listen("memory://c")
        async with trio.open_nursery() as nursery:
            peer = await nursery.start(_connected, client)
            out = peer.sender("rows")
            await out.__aenter__()
            # One batch is handled, another is being collected.
            receipts += [out.send_nowait(Row(number)) for number in range(3)]
            await wait_all_tasks_blocked()
            assert table.batches == [[0, 1]]
            container.stop()
            nursery.start_soon(_outcomes_of, receipts, nursery)
            container.nodes.workers[0].stop()
            await wait_all_tasks_blocked()
            assert table.batches == [[0, 1], [2]]
            for workers in container.nodes.workers:
                assert workers.running == 2
            container._nurseries.handlers.cancel_scope.cancel()  # type: ignore[union-attr]
    assert [each._outcome for each in receipts] == [RELEASED] * 3


async def _connected(client: Container, *, task_status: Any) -> None:
    async with client.connect("memory://c", reconnect=None) as peer:
        task_status.started(peer)
        await trio.sleep_forever()


async def _outcomes_of(receipts: list[Any], nursery: trio.Nursery) -> None:
    for each in receipts:
        await each.outcome()
    nursery.cancel_scope.cancel()


async def test_messages_of_a_link_that_ends_meanwhile_are_not_handled(
    autojump_clock: MockClock,
) -> None:
    table = Table()
    async with (
        served(table.declared(Batch(messages=10, within_s=5), prefetch=0)) as (container, peer),
        container.local() as other,
        peer.sender("rows") as out,
    ):
        async with other.sender("rows", settled=True) as settled:
            await settled.send(Row(1))
        gone = other.sender("rows")
        await gone.__aenter__()
        lost = gone.send_nowait(Row(2))
        await wait_all_tasks_blocked()
        gone.abandon()
        kept = out.send_nowait(Row(3))
        await kept.accepted()
        assert lost.done
        # Its room is free again.
        await out.send_many([Row(number) for number in range(10)])
    assert table.batches == [[1, 3], list(range(10))]


async def test_resources_of_a_batch_are_made_once_and_threads_handle_it(
    autojump_clock: MockClock,
) -> None:
    made: list[str] = []
    threads: set[int] = set()

    @asynccontextmanager
    async def session() -> AsyncIterator[Transaction]:
        made.append("begin")
        yield Transaction()
        made.append("commit")

    @node("rows", batch=Batch(messages=3))
    async def insert(rows: list[Delivery], session: Transaction) -> None:
        made.append(str([row.decode(Row).number for row in rows]))
        rows[0].release()

    @node("messages", batch=Batch(messages=2), thread=True)
    def block(messages: list[Message]) -> None:
        threads.add(threading.get_ident())
        assert [each.subject for each in messages] == ["a", "b"]

    async with (
        Container("c", nodes=[insert, block], resources=[PerMessage(session)]) as container,
        container.local() as peer,
        peer.sender("rows") as out,
        peer.sender("messages") as messages,
    ):
        receipts = [out.send_nowait(Row(number)) for number in range(3)]
        outcomes = [await each.outcome() for each in receipts]
        both = [messages.send_nowait(1, subject=subject) for subject in "ab"]
        for each in both:
            await each.accepted()
    assert outcomes == [RELEASED, ACCEPTED, ACCEPTED]
    assert made == ["begin", "[0, 1, 2]", "commit"]
    assert threading.get_ident() not in threads


def test_what_belongs_to_one_message_is_refused_in_the_signature_of_a_batch() -> None:
    def user(message: Message) -> str:
        return ""

    async def single(row: Row) -> None: ...
    async def untyped(rows: Any) -> None: ...
    async def peers(rows: list[Row], peer: Peer) -> None: ...
    async def deadlines(rows: list[Row], deadline: Deadline) -> None: ...
    async def depending(rows: list[Row], who: Annotated[str, Depends(user)]) -> None: ...
    async def captured(rows: list[Row], region: str) -> None: ...

    for function in (single, untyped):
        with pytest.raises(TypeError, match=r"the payload is a list: rows: list\[Row\]"):
            Container("c", nodes=[node("rows", batch=Batch())(function)])
    for function in (peers, deadlines, depending):
        with pytest.raises(TypeError, match=r"no value for|needs message: "):
            Container("c", nodes=[node("rows", batch=Batch())(function)])
    with pytest.raises(TypeError, match="its address has no captures"):
        Container("c", nodes=[node("rows/{region}", batch=Batch())(captured)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"messages": 0}, "messages of a batch must be at least 1, not 0"),
        ({"bytes": 0}, "bytes of a batch must be at least 1, not 0"),
        ({"within_s": -1}, "within_s must be 0"),
    ],
)
def test_bounds_of_a_batch_are_checked(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Batch(**options)


def test_a_batch_is_of_a_node_that_does_not_stream() -> None:
    with pytest.raises(ValueError, match="give batch or streaming, not both"):
        node("rows", batch=Batch(), streaming=True)
    with pytest.raises(TypeError, match="batch= takes Batch"):
        node("rows", batch=100)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rpc("rows", batch=Batch())  # type: ignore[call-arg]


def test_the_schema_describes_each_message_of_a_batch() -> None:
    @node("rows", batch=Batch())
    async def insert(rows: list[Row]) -> None: ...

    document = Container("c", nodes=[insert]).asyncapi()
    assert document["components"]["messages"]["node.rows"]["payload"] == {
        "$ref": "#/components/schemas/Row"
    }


# --- Other event loops ---


def test_asyncio_handles_batches_and_sends_compressed() -> None:
    taken: list[int] = []

    @node("rows", batch=Batch(messages=3, within_s=5))
    async def insert(rows: list[Row]) -> Any:
        await asyncio.sleep(0)
        taken.extend(row.number for row in rows)
        return [None, Reject("not this one"), None]

    async def main() -> None:
        async with (
            aio.Container("c", nodes=[insert]) as container,
            container.local() as peer,
            peer.sender("rows") as out,
        ):
            receipts = [out.send_nowait(Row(each), compress="gzip") for each in range(3)]
            outcomes = [await each.outcome() for each in receipts]
        assert [type(each) for each in outcomes] == [Accepted, Rejected, Accepted]

    asyncio.run(main())
    assert taken == [0, 1, 2]


def test_threads_handle_batches_of_deliveries() -> None:
    taken: list[int] = []

    @node("rows", batch=Batch(messages=2, within_s=5))
    def insert(rows: list[Delivery]) -> None:
        taken.extend(row.decode(Row).number for row in rows)
        rows[0].release()

    with (
        sync.Container("c", nodes=[insert]) as container,
        container.local() as peer,
        peer.sender("rows") as out,
    ):
        receipts = [out.send_nowait(Row(each)) for each in range(2)]
        assert [each.outcome() for each in receipts] == [RELEASED, ACCEPTED]
    assert taken == [0, 1]
