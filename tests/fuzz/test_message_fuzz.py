"""Any bytes are a message or a ``DecodeError``, for every reader of messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed_values import SCALARS, ascii_text, moments, same, text, values

from amqp_rt.annotations import check_annotations, check_application_properties, merge_annotations
from amqp_rt.bodies import BodyReader
from amqp_rt.codec.primitives import encode
from amqp_rt.codec.sections import SECTION_NAMES
from amqp_rt.errors import DecodeError, EncodeError, LocalProtocolError
from amqp_rt.message import (
    Head,
    Message,
    reencode,
    walk,
    walk_head,
)
from amqp_rt.signatures import sign, verify
from amqp_rt.values import Symbol, ULong

optional_text = st.none() | text
message_ids = (
    st.none() | text | st.uuids() | st.binary(max_size=300) | st.integers(0, (1 << 64) - 1)
)
uints = st.integers(0, (1 << 32) - 1)
annotations = st.dictionaries(
    ascii_text.map(Symbol) | st.integers(0, (1 << 64) - 1).map(ULong), values, max_size=3
)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "durable": st.booleans(),
    "priority": st.integers(0, 255),
    "ttl_ms": st.none() | uints,
    "first_acquirer": st.booleans(),
    "delivery_count": uints,
    "message_annotations": annotations,
    "message_id": message_ids,
    "user_id": st.none() | st.binary(max_size=300),
    "to": optional_text,
    "subject": optional_text,
    "reply_to": optional_text,
    "correlation_id": message_ids,
    "absolute_expiry_time": st.none() | moments,
    "creation_time": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    "group_id": optional_text,
    "group_sequence": st.none() | uints,
    "reply_to_group_id": optional_text,
    "application_properties": st.dictionaries(text, st.one_of(*SCALARS.values()), max_size=3),
    "footer": annotations,
}
fields = st.fixed_dictionaries({}, optional=FIELDS)
bodies = st.one_of(
    st.tuples(st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.just("data")),
    st.tuples(st.lists(values, max_size=3), st.just("sequence")),
    st.tuples(values, st.just("value")),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Sections in any order and number, some of them broken."""
    sections = []
    for code in draw(st.lists(st.sampled_from(sorted(SECTION_NAMES)), max_size=6)):
        descriptor = draw(
            st.sampled_from([bytes((0x53, code)), bytes((0x80, *[0] * 7, code)), bytes((0x43,))])
        )
        content = draw(values.map(encode) | st.binary(max_size=20))
        sections.append(b"\x00" + descriptor + content)
    whole = bytearray(b"".join(sections))
    if whole and draw(st.booleans()):
        at = draw(st.integers(0, len(whole) - 1))
        whole[at] = draw(st.integers(0, 255))
    return bytes(whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole)


def everything(payload: bytes) -> None:
    """Read all there is to read, and pass it on."""
    message = Message.decode(payload)
    assert message.encode() is payload
    repr(message)
    for name in (
        "header",
        "delivery_annotations",
        "message_annotations",
        "properties",
        "application_properties",
        "body",
        "data",
        "footer",
        "bare",
    ):
        try:
            getattr(message, name)
        except DecodeError:
            pass
    check_annotations(message)
    check_application_properties(message)
    verify(payload, b"key")


def pass_on(payload: bytes) -> None:
    head = walk_head(payload)
    assert head.header + head.delivery_annotations + head.message_annotations + head.rest == payload
    assert isinstance(head, Head)
    repr(head)
    passed_on = b"".join(
        reencode(head, ttl_ms=5, first_acquirer=True, delivery_count=head.delivery_count)
    )
    again = walk_head(passed_on)
    assert (again.ttl_ms, again.first_acquirer) == (5, True)
    assert (again.durable, again.priority) == (head.durable, head.priority)
    assert again.rest == head.rest
    check_annotations(head)
    merge_annotations(head.message_annotations, {"x-opt-a": 1})


def stream(payload: bytes) -> None:
    for size in (1, 3, 64):
        reader = BodyReader()
        for at in range(0, len(payload), size):
            reader.feed(payload[at : at + size])
        reader.finish()


@pytest.mark.slow
@pytest.mark.req("T9", "M1")
@given(st.binary(max_size=80) | messages())
def test_any_bytes_are_a_message_or_a_decode_error(payload: bytes) -> None:
    for read in (everything, pass_on, stream):
        try:
            read(payload)
        except DecodeError as error:
            assert 0 < len(error.description) < 300  # noqa: PT017


@pytest.mark.slow
@pytest.mark.req("M1", "M2", "M12")
@given(fields, bodies)
def test_any_message_comes_back_from_the_wire(
    fields: dict[str, Any], body: tuple[Any, Any]
) -> None:
    message = Message(body[0], body_kind=body[1], **fields)
    payload = message.encode()
    decoded = Message.decode(payload)

    assert b"".join(message.buffers()) == payload
    assert decoded.header == message.header
    assert same(decoded.body if body[1] != "sequence" else list(decoded.body), whole(body))
    for name in ("message_id", "correlation_id"):
        assert getattr(decoded, name) == getattr(message, name)
    for name in ("subject", "to", "user_id", "group_id", "group_sequence", "creation_time"):
        assert getattr(decoded, name) == getattr(message, name)
    for name in ("message_annotations", "application_properties", "footer"):
        assert same(dict(getattr(decoded, name)), dict(getattr(message, name)))
    where = walk(payload)
    assert decoded.bare == message.bare == payload[where.properties : where.footer]
    sign(decoded, b"key")
    assert verify(decoded.encode(), b"key")
    everything(payload)
    pass_on(payload)


def whole(body: tuple[Any, Any]) -> Any:
    return b"".join(body[0]) if body[1] == "data" else body[0]


@pytest.mark.slow
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), fields, st.integers(1, 100))
def test_any_message_of_data_streams(
    chunks: list[bytes], fields: dict[str, Any], size: int
) -> None:
    payload = Message(chunks, body_kind="data", **fields).encode()
    reader = BodyReader()
    pieces = []
    for at in range(0, len(payload), size):
        pieces += reader.feed(payload[at : at + size])
    assert b"".join(pieces) == b"".join(chunks)
    assert reader.finish().properties == Message.decode(payload).properties


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), values, max_size=4), values)
def test_whatever_is_said_is_sent_or_refused(fields: dict[str, Any], body: Any) -> None:
    try:
        message = Message(body, **fields)
        repr(message)
        payload = message.encode()
    except (EncodeError, LocalProtocolError):
        return
    everything(payload)
