"""Hashes of partition keys, and the annotations that an add-on gives to the messages of a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
from brokers import Receiving, World

from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.log.annotations import with_delivery_annotations
from amqp_rt.broker.log.key_hashes import KEY_HASHES, LOOKUP3_KEY_MAX, lookup3
from amqp_rt.broker.nodes import Log, Queue
from amqp_rt.errors import AmqpError
from amqp_rt.message import Message
from amqp_rt.values import Symbol

KEY = "x-opt-partition-key"


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        # Computed with the client of Event Hubs for Python.
        (b"", 0),
        (b"a", 16_220),
        (b"order-1", 26_663),
        (b"partition", 29_682),
        (b"exactly12byt", 4_129),
        (b"0123456789abc", 4_167),
        (b"x" * 24, 20_573),
        (b"x" * 25, 26_933),
    ],
)
def test_lookup3_is_the_hash_of_event_hubs(key: bytes, hashed: int) -> None:
    assert lookup3(key) == hashed


def test_long_keys_are_hashed_by_their_checksum() -> None:
    at_bound, above = b"k" * LOOKUP3_KEY_MAX, b"k" * (LOOKUP3_KEY_MAX + 1)
    assert lookup3(above) == lookup3(b"%d" % crc32(above))
    assert lookup3(at_bound) != lookup3(b"%d" % crc32(at_bound))


@pytest.mark.parametrize("hashed", KEY_HASHES.values())
def test_hashes_are_not_negative(hashed: Callable[[bytes], int]) -> None:
    assert min(hashed(b"%d" % number) for number in range(1_000)) >= 0


def partitions_of(receiving: Receiving) -> dict[str, str]:
    return {
        str(each.body): str(each.message_annotations["x-opt-partition-id"])
        for each in receiving.messages
    }


def test_a_log_uses_the_hash_that_it_declares() -> None:
    keys = [f"key-{number}" for number in range(20)]
    world = World(Log("plain", partitions=4), Log("hub", partitions=4, key_hash="lookup3"))
    for name, hashed in (("plain", crc32), ("hub", lookup3)):
        sender = world.client().sender(name)
        for key in keys:
            sender.send(key, message_annotations={KEY: key})
        found = world.client().receiver(
            name, credit=100, filter={Symbol("rabbitmq:stream-offset-spec"): "first"}
        )
        assert partitions_of(found) == {key: str(hashed(key.encode()) % 4) for key in keys}


def test_an_unknown_hash_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="log 'hub': key_hash is one of crc32, lookup3, not 'md5'"):
        Log("hub", key_hash="md5")


def test_the_hash_of_a_log_stays() -> None:
    world = World(Log("hub", partitions=4, key_hash="lookup3"))
    space = world.host.space()
    with pytest.raises(AmqpError) as caught:
        space.declare(Log("hub", partitions=4))
    assert caught.value.condition in ("amqp:precondition-failed", "amqp:not-allowed")
    space.update(Log("hub", partitions=4, key_hash="lookup3", max_bytes=1_000_000))
    with pytest.raises(AmqpError) as caught:
        space.update(Log("hub", partitions=4, max_bytes=1_000_000))
    assert caught.value.condition == "amqp:precondition-failed"


# --- Delivery annotations of a reader ---------------------------------------------------------


def attach_reader(host: BrokerHost, link: Any) -> None:
    """Read the log at its end, with the number of its last record in each message."""
    log = host.log("log")
    reader = log.subscribe([0], None)

    def annotations(partition: Any, offset: int) -> dict[Symbol, object]:
        return {Symbol("x-opt-last"): partition.next - 1, Symbol("x-opt-here"): offset}

    reader.delivery_annotations = annotations
    link.accept(reader)


@pytest.mark.parametrize("size", [10, 200_000])
@pytest.mark.parametrize("header", [{}, {"durable": False, "priority": 7}])
@pytest.mark.parametrize("annotated", [{}, {"x-opt-mine": 1}])
def test_an_addon_adds_delivery_annotations_for_one_reader(
    size: int, header: dict[str, Any], annotated: dict[str, Any]
) -> None:
    world = World(Log("log"))
    client = world.client()
    client._attach = lambda link: attach_reader(world.host, link)  # type: ignore[method-assign]
    special = client.receiver("anything", credit=10)
    plain = world.client().receiver("log", credit=10)
    body = "x" * size
    world.client().sender("log").send(body, message_annotations=annotated, **header)
    ((one,), (other,)) = special.messages, plain.messages
    assert one.delivery_annotations == {"x-opt-last": 0, "x-opt-here": 0}
    assert other.delivery_annotations == {}
    assert one.message_annotations == other.message_annotations
    assert one.message_annotations.items() >= annotated.items()
    assert (one.body, one.header) == (body, other.header)


def test_no_annotations_leave_the_message_as_it_is() -> None:
    payload = Message("x", message_annotations={"x-opt-a": 1}).encode()
    assert with_delivery_annotations(payload, {}) == payload
    assert with_delivery_annotations([payload], {}) == [payload]


def test_a_log_is_found_by_its_name() -> None:
    world = World(Log("log"), Queue("q"))
    assert world.host.log("log").address == "log"
    with pytest.raises(AmqpError, match="'q' is not a log"):
        world.host.log("q")
    with pytest.raises(AmqpError, match="nowhere"):
        world.host.log("nowhere")
