"""Messages that are staged in batches: staged as alone, or refused together."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from brokers import Sending, World

from amqp_rt.batches import MESSAGE_BATCH, MESSAGE_BATCHES, write_messages
from amqp_rt.broker import Log, Queue
from amqp_rt.broker.staging import ATTEMPT, EPOCH, EPOCH_PUBLISH, PART, PRODUCER, RUN, Stage
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Rejected
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


def staged(world: World) -> dict[int, Stage]:
    """The stage of each part."""
    return {stage.claim.part: stage for stage in world.host.staging._stages}


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
    assert world.host.stats("out").available == 1


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
