"""Messages whose properties are compared with those of an earlier one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from amqp_rt import Message
from amqp_rt.codec.plain_messages import PlainMessage, PlainReader
from amqp_rt.errors import DecodeError
from amqp_rt.message import Sequence
from amqp_rt.values import Symbol

REQUEST: dict[str, Any] = {"message_id": "key-1", "reply_to": "replies/1"}
REPLY: dict[str, Any] = {"correlation_id": "key-1", "to": "replies/1", "group_id": "g"}


def body_of(message: Message | PlainMessage) -> object:
    """Return the body, or the error that it raises."""
    try:
        return message.body
    except DecodeError as error:
        return error.description


def check(reader: PlainReader, wire: bytes) -> bool:
    """Check that *wire* is read as a message is; return whether it is plain."""
    plain = reader.read(wire)
    if plain is None:
        return False
    whole = Message.decode(wire)
    assert plain.key == (whole.correlation_id or whole.message_id)
    assert plain.body_kind == whole.body_kind
    assert body_of(plain) == body_of(whole)
    ids = {"message_id": whole.message_id, "correlation_id": whole.correlation_id}
    assert replace(plain.properties, **ids) == whole.properties
    assert not whole.application_properties
    assert not whole.message_annotations
    assert not whole.footer
    assert whole.header.ttl is None
    return True


@pytest.mark.parametrize("properties", [REQUEST, REPLY])
@pytest.mark.parametrize(
    "body", [b"", b"x" * 255, b"x" * 256, "text", None, 7, [1, "two"], {"a": 1}]
)
def test_messages_of_one_link_differ_in_their_keys(properties: dict[str, Any], body: Any) -> None:
    reader = PlainReader()
    for key in ("key-1", "key-2", "ä234"):
        name = "message_id" if "message_id" in properties else "correlation_id"
        wire = Message(body, **{**properties, name: key}).encode()
        assert check(reader, wire)
        plain = reader.read(wire)
        assert plain is not None
        assert plain.key == key
        assert plain.payload is wire


@pytest.mark.parametrize(
    "message",
    [
        Message(b"x"),
        Message(b"x", **REQUEST, durable=True),
        Message(b"x", **REQUEST, ttl_ms=5),
        Message(b"x", **REQUEST, delivery_annotations={Symbol("a"): 1}),
        Message(b"x", **REQUEST, message_annotations={Symbol("a"): 1}),
        Message(b"x", **REQUEST, application_properties={"statusCode": 500}),
        Message(b"x", **REQUEST, footer={Symbol("a"): 1}),
        Message(b"x", **REQUEST, correlation_id="both"),
        Message(b"x", message_id=7),
        Message(b"x", message_id=b"octets"),
        Message(b"x", message_id="k" * 256),
        Message(b"x", correlation_id=7, to="replies/1"),
        Message([b"x", b"y"], body_kind="data", **REQUEST),
        Message(Sequence([1]), **REQUEST),
    ],
    ids=repr,
)
@pytest.mark.parametrize("learned", [False, True])
def test_other_messages_are_decoded(message: Message, learned: bool) -> None:
    reader = PlainReader()
    if learned:
        assert check(reader, Message(b"x", **REQUEST).encode())
    wire = message.encode()
    assert reader.read(wire) is None
    assert reader.read(wire) is None


@pytest.mark.parametrize(
    "wire",
    [Message(b"body", **REQUEST).encode(), Message("body", **REPLY).encode()],
    ids=["data", "value"],
)
def test_damaged_messages_are_read_as_messages_are(wire: bytes) -> None:
    for cut in range(len(wire)):
        for reader in (PlainReader(), PlainReader()):
            reader.read(wire)
            check(reader, wire[:cut])
            check(reader, wire + wire[:cut] if cut else wire)
    for at in range(len(wire)):
        for value in (
            0,
            1,
            0x40,
            0x45,
            0x53,
            0x73,
            0x77,
            0xA0,
            0xA1,
            0xB0,
            0xC0,
            0xFF,
            wire[at] ^ 1,
        ):
            damaged = wire[:at] + bytes((value,)) + wire[at + 1 :]
            fresh, learned = PlainReader(), PlainReader()
            learned.read(wire)
            check(fresh, damaged)
            check(learned, damaged)
            assert check(learned, wire)


def test_a_reader_gives_up_on_messages_that_always_differ() -> None:
    reader = PlainReader()
    wires = [
        Message(b"x", message_id="key", creation_time=number).encode() for number in range(1, 100)
    ]
    found = [check(reader, wire) for wire in wires]
    assert found[0]
    assert not any(found[50:])


def test_a_reader_does_not_give_up_while_messages_are_alike() -> None:
    reader = PlainReader()
    for number in range(200):
        # Two at each of several addresses in turn.
        wire = Message(b"x", message_id="key", reply_to=f"{number // 2 % 3}").encode()
        assert check(reader, wire)
