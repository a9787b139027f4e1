"""Sections that the service writes on arrival and on delivery, batches, and changed properties."""

from __future__ import annotations

from math import inf
from typing import Any
from uuid import UUID

import pytest
from amqp_rt_servicebus.arrivals import StoredFactory
from amqp_rt_servicebus.messages import (
    APPLICATION_PROPERTIES_MAX,
    BATCH_FORMAT,
    BATCH_MESSAGES_MAX,
    PARTITION_SHIFT,
    PARTITIONS,
    application_properties,
    arrived,
    change_properties,
    copied,
    delivered,
    encoded,
    enqueued,
    mark_dead,
    partition_of,
    split_batch,
)
from entities import NOW, Bench

from amqp_rt import Message
from amqp_rt.codec.primitives import write_map, write_value
from amqp_rt.errors import DecodeError
from amqp_rt.limits import Limits
from amqp_rt.message import walk
from amqp_rt.values import Described, Int, Short, Symbol, Timestamp, ULong

pytestmark = pytest.mark.req("Z16")

TOKEN = UUID("01020304-0506-0708-090a-0b0c0d0e0f10")


def sent(message: Message, **options: Any) -> Message:
    """Return *message* as it is delivered after it was enqueued."""
    stored = arrived(message.encode())
    enqueued(stored, NOW, inf)
    stored.number = 7
    payload = delivered(stored, **options)
    return Message.decode(payload if isinstance(payload, bytes) else b"".join(payload))


def test_annotations_of_the_service_are_written_and_never_believed() -> None:
    lies = {
        Symbol(key): value
        for key, value in {
            "x-opt-enqueued-time": Timestamp(1),
            "x-opt-sequence-number": 1,
            "x-opt-enqueue-sequence-number": 1,
            "x-opt-locked-until": Timestamp(1),
            "x-opt-lock-token": TOKEN,
            "x-opt-message-state": Int(1),
            "x-opt-partition-id": Short(3),
            "x-opt-deadletter-source": "lie",
            "x-opt-partition-key": "k",
            "x-opt-own": "kept",
        }.items()
    }
    message = sent(Message("m", message_annotations=lies, delivery_annotations={"x-opt-x": 1}))
    assert dict(message.message_annotations) == {
        "x-opt-partition-key": "k",
        "x-opt-own": "kept",
        "x-opt-enqueued-time": NOW * 1000,
        "x-opt-sequence-number": 7,
        "x-opt-message-state": 0,
    }
    assert not message.delivery_annotations


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("x-opt-enqueued-time", Timestamp),
        ("x-opt-locked-until", Timestamp),
        ("x-opt-sequence-number", int),
        ("x-opt-message-state", Int),
    ],
)
def test_annotations_have_the_types_of_the_service(key: str, kind: type) -> None:
    message = sent(Message("m"), token=TOKEN, until=NOW + 30)
    assert type(message.message_annotations[key]) is kind
    assert message.delivery_annotations["x-opt-lock-token"] == TOKEN


def test_the_delivery_count_is_there_even_if_it_is_zero() -> None:
    payload = encoded(arrived(Message("m").encode()))
    # A header of five fields: durable, priority, no ttl, first-acquirer, and delivery-count 0.
    assert payload[:12].hex() == "005370c00705425004404143"


def test_durable_and_priority_pass_and_the_entry_is_not_durable() -> None:
    stored = arrived(Message("m", durable=True, priority=9).encode())
    assert not stored.durable
    message = Message.decode(encoded(stored))
    assert (message.durable, message.priority) == (True, 9)


def test_a_message_without_an_id_gets_one() -> None:
    message = Message.decode(encoded(arrived(Message("m").encode(), new_id=lambda: TOKEN)))
    assert message.message_id == str(TOKEN)
    kept = Message.decode(encoded(arrived(Message("m", message_id=TOKEN).encode())))
    assert kept.message_id == TOKEN


def test_the_expiry_of_the_sender_is_ignored_and_that_of_the_entity_is_written() -> None:
    claimed = Message("m", absolute_expiry_time=5, ttl_ms=1_500)
    assert sent(claimed).absolute_expiry_time == round(NOW * 1000) + 1_500
    assert sent(Message("m", absolute_expiry_time=5)).absolute_expiry_time is None


def test_a_longer_time_to_live_than_a_header_has_is_cut_there() -> None:
    stored = arrived(Message("m").encode())
    enqueued(stored, NOW, 100 * 86_400)
    message = Message.decode(encoded(stored))
    assert message.ttl_ms == 0xFFFF_FFFF
    assert message.absolute_expiry_time == round((NOW + 100 * 86_400) * 1000)


@pytest.mark.parametrize(
    "message",
    [
        Message(b"data"),
        Message([b"a", b"b"], body_kind="data"),
        Message([1, 2], body_kind="sequence"),
        Message({"a": 1}, footer={Symbol("x-opt-f"): 1}),
        Message(bytes(100_000), subject="large", application_properties={"a": 1}),
    ],
)
def test_the_rest_of_a_message_stays_octet_for_octet(message: Message) -> None:
    payload = message.encode()
    sections = walk(payload)
    shown = delivered(arrived(payload))
    after = shown if isinstance(shown, bytes) else b"".join(shown)
    assert after.endswith(payload[sections.application_properties :])
    assert Message.decode(after).subject == message.subject


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"nonsense",
        b"\x00\x53\x77",
        Message("m", application_properties={"a": 1}).encode()[:-3],
        # The key of an application property is a number.
        b"\x00\x53\x74\xc1\x05\x02\x54\x01\x54\x02" + Message("m").encode(),
    ],
)
def test_malformed_messages_are_refused_on_arrival(payload: bytes) -> None:
    if payload:
        with pytest.raises(DecodeError):
            arrived(payload)
    else:
        # Some peers send messages without a body.
        assert Message.decode(encoded(arrived(payload))).body is None


def test_the_factory_of_entries_refuses_other_formats() -> None:
    factory = StoredFactory()
    payload = Message("m").encode()
    assert factory.make_entry(payload, 0, NOW).size == len(payload)
    with pytest.raises(DecodeError, match="format 0 expected, not 0x80013700"):
        factory.make_entry(payload, BATCH_FORMAT, NOW)


# --- Batches ----------------------------------------------------------------------------------


def batch(*messages: bytes, **envelope: Any) -> bytes:
    return Message(list(messages), body_kind="data", **envelope).encode()


def test_a_batch_is_split_into_its_messages() -> None:
    parts = [Message("a").encode(), Message(bytes(1_000)).encode()]
    assert split_batch(batch(*parts)) == parts
    annotations = {Symbol("x-opt-partition-key"): "k"}
    envelope = batch(*parts, message_id="1", group_id="s", message_annotations=annotations)
    assert split_batch(envelope) == parts


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (Message("value").encode(), "begins no data section"),
        (Message([b""], body_kind="sequence").encode(), "begins no data section"),
        (b"", "no message"),
        (batch(b"x")[:-1] + b"", "missing|end|truncated|octets"),
        (b"\x00\x53\x75\xa1\x01x", "no binary content"),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes, match: str) -> None:
    with pytest.raises(DecodeError, match=match):
        split_batch(payload)


def test_a_batch_has_a_bounded_number_of_messages() -> None:
    assert len(split_batch(batch(*[b"x"] * BATCH_MESSAGES_MAX))) == BATCH_MESSAGES_MAX
    with pytest.raises(DecodeError, match=f"more than {BATCH_MESSAGES_MAX} messages"):
        split_batch(batch(*[b"x"] * (BATCH_MESSAGES_MAX + 1)))


# --- Application properties -------------------------------------------------------------------


def described_properties() -> bytes:
    """Return a message with the described values that .NET clients send in properties."""
    out = bytearray(b"\x00\x53\x74")
    moment = Described(Symbol("com.microsoft:datetime-offset"), 637_000_000_000_000_000)
    write_map(out, {"when": moment, "plain": 1})
    out += b"\x00\x53\x77"
    write_value(out, "body")
    return bytes(out)


def test_other_properties_stay_octet_for_octet() -> None:
    stored = arrived(described_properties())
    before = application_properties(stored)
    assert change_properties(stored, {"plain": 2, Symbol("new"): "x"})
    after = application_properties(stored)
    assert after == {"when": before["when"], "plain": 2, "new": "x"}
    assert Message.decode(encoded(stored)).body == "body"
    assert stored.size == len(described_properties()) + len(stored.payload) - len(
        arrived(described_properties()).payload
    )


def test_properties_are_removed() -> None:
    stored = arrived(Message("m", application_properties={"a": 1, "b": 2}).encode())
    assert change_properties(stored, {}, removed=frozenset({"a", "missing"}))
    assert application_properties(stored) == {"b": 2}
    assert change_properties(stored, {}, removed=frozenset({"b"}))
    assert application_properties(stored) == {}
    assert Message.decode(encoded(stored)).body == "m"


def test_changes_without_an_encoding_are_left_out() -> None:
    stored = arrived(Message("m").encode())
    assert not change_properties(stored, {"x": object(), ULong(1): 1})
    assert change_properties(stored, {"x": object(), "y": 1})
    assert application_properties(stored) == {"y": 1}


def test_properties_do_not_grow_beyond_their_bound() -> None:
    stored = arrived(Message("m").encode())
    assert change_properties(stored, {"x": "y" * (APPLICATION_PROPERTIES_MAX - 100)})
    assert not change_properties(stored, {"z": "y" * 100})
    assert change_properties(stored, {"x": "small"})


def test_a_copy_shares_the_payload_but_no_later_change() -> None:
    stored = arrived(Message("m", application_properties={"a": 1}).encode())
    stored.number = 5
    first, second = copied(stored), copied(stored, hops=1)
    assert first.payload is second.payload is stored.payload
    change_properties(first, {"a": 2})
    assert application_properties(second) == {"a": 1}
    assert (second.number, second.enqueued_number, second.hops) == (0, 5, 1)
    assert copied(second).enqueued_number == 5


def test_a_dead_letter_has_two_properties_and_its_source() -> None:
    stored = arrived(Message("m").encode())
    mark_dead(stored, "q", "r", None)
    assert application_properties(stored) == {"DeadLetterReason": "r"}
    assert Message.decode(encoded(stored)).message_annotations["x-opt-deadletter-source"] == "q"


# --- Partitions -------------------------------------------------------------------------------


def test_the_partition_is_in_the_number_and_in_an_annotation() -> None:
    bench = Bench(partitioned=True)
    numbers = [bench.send(index, group_id=f"s{index % 3}") for index in range(12)]
    assert len({number >> PARTITION_SHIFT for number in numbers}) > 1
    assert len(set(numbers)) == 12
    for message in bench.peeked():
        annotations = message.message_annotations
        number = annotations["x-opt-sequence-number"]
        assert annotations["x-opt-partition-id"] == number >> PARTITION_SHIFT
        assert type(annotations["x-opt-partition-id"]) is Short
    assert bench.receiver(credit=12).bodies == list(range(12))


def test_the_session_comes_before_the_key_and_the_key_before_the_id() -> None:
    key = {Symbol("x-opt-partition-key"): "k"}
    by_session = arrived(Message("m", group_id="k", message_id="1").encode())
    by_key = arrived(Message("m", message_id="2", message_annotations=key).encode())
    by_id = arrived(Message("m", message_id="k").encode())
    assert partition_of(by_session) == partition_of(by_key) == partition_of(by_id)
    assert 0 <= partition_of(by_id) < PARTITIONS


def test_annotations_of_the_sender_are_read_again_whatever_limits_let_them_in() -> None:
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    sent = {Symbol("x-deep"): deep, Symbol("x-wide"): list(range(70_000)), ULong(7): "seven"}
    wide = Limits(nesting_max=200, elements_max=1 << 20)
    found = arrived(bytes(Message(b"", message_annotations=sent).encode()), limits=wide)
    assert found.annotations == sent
    assert list(map(type, found.annotations)) == [Symbol, Symbol, ULong]
