"""Messages that are staged in batches: staged as alone, or refused together."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import trio
import trio.testing
from brokers import Sending, World, commit_epoch
from paged import PagedWorld, world_of

from amqp_rt.batches import MESSAGE_BATCH, MESSAGE_BATCHES, write_messages
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.broker.log.log import MessageLog
from amqp_rt.broker.nodes import Declaration
from amqp_rt.broker.staging.attempts import ATTEMPT, EPOCH, EPOCH_PUBLISH, PART, PRODUCER, RUN
from amqp_rt.broker.staging.stages import MessageStage
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Rejected
from amqp_rt.stores.base import Stored
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.transactions import TransactionalState
from amqp_rt.values import Symbol

pytestmark = pytest.mark.req("K3")


def staging(world: World, *, part: int = 0, wants: bool = True) -> Sending:
    claim: dict[Any, Any] = {PRODUCER: "job", RUN: "one", EPOCH: 0, PART: part, ATTEMPT: 0}
    return world.client().sender(
        "out", properties=claim, desired_capabilities=(MESSAGE_BATCHES,) if wants else ()
    )


def batch(*bodies: Any, **said: Any) -> bytes:
    return write_messages(Message(body, **said).encode() for body in bodies)


def staged(world: World) -> dict[int, MessageStage]:
    """The stage of each part."""
    return {stage.claim.part: stage for stage in world.host.staging.producers.stages}


@pytest.mark.parametrize("kind", [Queue, Log])
def test_a_batch_is_staged_as_its_messages_are(kind: Any) -> None:
    world = World(kind("out"))
    together, alone = staging(world), staging(world, part=1)
    assert together.link.offered_capabilities == (EPOCH_PUBLISH, MESSAGE_BATCHES)
    together.send("a")
    together.send_raw(batch("b", "c", ttl_ms=5_000), message_format=MESSAGE_BATCH)
    together.send_raw(batch("d"), message_format=MESSAGE_BATCH)
    alone.send("a")
    alone.send("b", "c", ttl_ms=5_000)
    alone.send("d")
    assert together.outcomes == [ACCEPTED] * 3
    stages = staged(world)
    one, other = stages[0], stages[1]
    assert (one.count, one.crc, one.bytes) == (other.count, other.crc, other.bytes)
    assert one.count == 4
    assert [entry.payload for entry in one.entries] == [entry.payload for entry in other.entries]
    expiry = [entry.expires_at for entry in one.entries]
    assert expiry == [entry.expires_at for entry in other.entries]
    assert expiry[0] > expiry[1]


def test_who_does_not_ask_sends_no_batches() -> None:
    """Without the capability, a batch is a message of an unknown format, as on any other link."""
    world = World(Queue("out"))
    single = staging(world, wants=False)
    assert single.link.offered_capabilities == (EPOCH_PUBLISH,)
    single.send_raw(batch("a", "b"), message_format=MESSAGE_BATCH)
    (stage,) = staged(world).values()
    assert (stage.count, stage.crc) == (1, zlib.crc32(batch("a", "b")))
    plain = world.client().sender("out", desired_capabilities=(MESSAGE_BATCHES,))
    assert plain.link.offered_capabilities == ()
    plain.send_raw(batch("a", "b"), message_format=MESSAGE_BATCH)
    assert world.stats("out").available == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has none"),
        (batch("a")[:-1], "the message there"),
        (batch("a") + batch(*"abc"), "has more than 3"),
        (batch("a") + write_messages([b"\x00\x53\x72\xc1\xff"]), ""),
        (write_messages([Message("a").encode(), b"\x00"]), ""),
    ],
)
def test_a_batch_with_something_malformed_is_refused_as_a_whole(
    content: bytes, sentence: str
) -> None:
    world = World(Queue("out"), limits=Limits(batch_messages_max=3))
    out = staging(world)
    out.send_raw(content, message_format=MESSAGE_BATCH)
    (outcome,) = out.outcomes
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert sentence in str(outcome.error.description)
    out.send_raw(batch(*"abc"), message_format=MESSAGE_BATCH)
    assert out.outcomes[1:] == [ACCEPTED]
    (stage,) = staged(world).values()
    assert stage.count == 3


def test_a_batch_in_a_batch_is_a_message_that_is_none() -> None:
    world = World(Queue("out"))
    out = staging(world)
    out.send_raw(write_messages([batch("a", "b")]), message_format=MESSAGE_BATCH)
    (stage,) = staged(world).values()
    assert (stage.count, stage.crc) == (1, zlib.crc32(batch("a", "b")))


def test_a_batch_takes_no_more_room_than_there_is() -> None:
    world = World(Queue("out"), limits=Limits(staged_bytes_max=10_000))
    out = staging(world)
    out.send_raw(batch(*[bytes(1_000)] * 11), message_format=MESSAGE_BATCH)
    (outcome,) = out.outcomes
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:resource-limit-exceeded"
    (stage,) = staged(world).values()
    assert (stage.count, stage.bytes) == (0, 0)


def test_a_batch_that_is_not_welcome_ends_the_link() -> None:
    world = World(Queue("out"))
    out = staging(world)
    payload = batch("a", message_annotations={Symbol("must-know"): 1})
    out.link.send(payload, message_format=MESSAGE_BATCH)
    out.link.send(batch("b"), message_format=MESSAGE_BATCH)
    world.pump()
    assert out.error is not None
    assert {stage.count for stage in staged(world).values()} <= {0}
    other = staging(world, part=1)
    other.link.send(batch("a"), message_format=MESSAGE_BATCH, state=TransactionalState(b"none"))
    world.pump()
    assert other.error == "amqp:transaction:unknown-id"


async def test_a_stored_topic_takes_no_batches(autojump_clock: Any) -> None:
    """Publishing one would write a copy of each message for each subscription in one step."""
    async with world_of(MemoryStore(), Topic("out")) as world:
        assert staging(world).link.offered_capabilities == (EPOCH_PUBLISH,)


# --- Publishing ------------------------------------------------------------------------------


class Reads(MemoryStore):
    """Store that counts how often each of its messages is read."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        found = super().messages(node, first, count, size_max)
        self.counts.update((node, each.sequence) for each in found)
        return found


class HeldWorld(World):
    """Clients and a broker without a store."""

    async def settle(self) -> None:
        """Carry bytes and run tasks until nothing more happens."""
        self.pump()
        await trio.testing.wait_all_tasks_blocked()
        self.pump()


@asynccontextmanager
async def held(*declared: Declaration) -> AsyncIterator[HeldWorld]:
    world = HeldWorld(*declared)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.host.run)
        yield world
        nursery.cancel_scope.cancel()


Worlds: TypeAlias = PagedWorld | HeldWorld


async def publish(world: Worlds, watch: Callable[[], None] = lambda: None) -> None:
    """Commit all that is staged; call *watch* in each turn of the event loop until that is done."""
    stages = staged(world)
    parts = [(part, 0, stages[part].count, stages[part].crc) for part in sorted(stages)]
    done = False

    async def watching() -> None:
        while not done:
            watch()
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watching)
        assert await commit_epoch(world.host, "out", "job", "one", 0, parts)
        done = True


async def stage_batches(world: Worlds, batches: int, each: int, **said: Any) -> list[int]:
    """Stage *batches* with *each* numbers as messages; return the numbers."""
    out = staging(world)
    numbers = list(range(batches * each))
    for at in range(0, len(numbers), each):
        out.send_raw(batch(*numbers[at : at + each], **said), message_format=MESSAGE_BATCH)
        await world.settle()
    return numbers


def log_of(world: PagedWorld) -> MessageLog:
    return world.host.space().find("out").held


async def test_batches_are_read_once_and_published_in_order(autojump_clock: Any) -> None:
    store = Reads()
    async with world_of(store, Log("out", partitions=2), limits=Limits()) as world:
        numbers = await stage_batches(world, 12, 250)
        await publish(world)
        found = [
            [Message.decode(each.payload).body for block in part.blocks for each in block.records]
            for part in log_of(world).partitions
        ]
    assert found == [numbers[::2], numbers[1::2]]
    assert set(store.counts.values()) == {1}


async def test_messages_with_a_partition_key_are_published_to_its_partition(
    autojump_clock: Any,
) -> None:
    """In batches, too, and however large they are."""
    key = {Symbol("x-opt-partition-key"): "Bremen"}
    async with world_of(MemoryStore(), Log("out", partitions=3), limits=Limits()) as world:
        out = staging(world)
        for body in (b"a", bytes(10_000)):
            out.send_raw(batch(body, message_annotations=key), message_format=MESSAGE_BATCH)
            out.send(body, message_annotations=key)
            await world.settle()
        await publish(world)
        sizes = [part.next for part in log_of(world).partitions]
    assert sizes[zlib.crc32(b"Bremen") % 3] == sum(sizes) == 4


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("credit", [0, 5_000])
async def test_an_epoch_is_published_in_turns(
    autojump_clock: Any, stored: bool, credit: int
) -> None:
    """Other tasks run before all messages are put, at the latest after two steps of 1,000 messages."""
    made = world_of(MemoryStore(), Queue("out"), limits=Limits()) if stored else held(Queue("out"))
    async with made as world:
        numbers = await stage_batches(world, 6, 500)
        receiving = world.client().receiver("out", credit=credit)
        await world.settle()
        counts = world.host.space().find("out").held.counts
        put, delivered = [0], [0]

        def watch() -> None:
            put.append(counts.enqueued)
            delivered.append(counts.delivered)

        await publish(world, watch)
        watch()
        await world.settle()
    for seen in (put, delivered):
        assert max(later - before for before, later in pairwise(seen)) <= 2_000
    assert receiving.bodies == (numbers if credit else [])
