"""Trace context of encoded messages, which is read without decoding them where that is possible."""

from __future__ import annotations

from typing import Any

import pytest
from call_counts import plain_only

from amqp_rt import Message
from amqp_rt.codec.sections import walk_front, write_application_properties
from amqp_rt.trace_context import trace_in, trace_of, trace_section
from amqp_rt.unread import UnreadMessage
from amqp_rt.values import Symbol

pytestmark = pytest.mark.req("O2")

ONE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-00"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {}),
        ({"application_properties": {"traceparent": ONE}}, {"traceparent": ONE}),
        ({"application_properties": {"a": 1, "traceparent": ONE, "b": 2}}, {"traceparent": ONE}),
        (
            {"application_properties": {"traceparent": ONE, "tracestate": "a=1"}},
            {"traceparent": ONE, "tracestate": "a=1"},
        ),
        (
            {"content_type": "a/b", "application_properties": {"traceparent": ONE}},
            {"traceparent": ONE},
        ),
        (
            {"subject": "s" * 300, "application_properties": {"traceparent": ONE}},
            {"traceparent": ONE},
        ),
        ({"durable": True, "application_properties": {"traceparent": ONE}}, {"traceparent": ONE}),
        (
            {"application_properties": {"traceparent": "01" + ONE[2:]}},
            {"traceparent": "01" + ONE[2:]},
        ),
        ({"application_properties": {"traceparent": "ff" + ONE[2:]}}, {}),
        ({"application_properties": {"traceparent": ONE.upper()}}, {}),
        ({"application_properties": {"traceparent": "00-" + "0" * 32 + ONE[35:]}}, {}),
        ({"application_properties": {"traceparent": "malformed"}}, {}),
        ({"application_properties": {"other": "traceparent"}}, {}),
        (
            {
                "message_annotations": {Symbol("traceparent"): OTHER},
                "application_properties": {"traceparent": ONE},
            },
            {"traceparent": OTHER},
        ),
        (
            {
                "message_annotations": {Symbol("x-opt-a"): 1},
                "application_properties": {"traceparent": ONE},
            },
            {"traceparent": ONE},
        ),
        ({"message_id": "m-1", "subject": "traceparent"}, {}),
        ({"durable": True, "delivery_annotations": {Symbol("traceparent"): ONE}}, {}),
    ],
)
def test_the_trace_context_is_that_of_the_decoded_message(
    fields: dict[str, Any], found: dict[str, str]
) -> None:
    message = Message(b"traceparent " + ONE.encode(), **fields)
    payload = message.encode()
    assert trace_in(payload) == trace_of(Message.decode(payload)) == trace_of(message) == found
    unread = UnreadMessage(payload)
    assert unread.trace() == found
    assert unread.ids() == (message.message_id, message.correlation_id)
    assert unread.message is None
    read = unread.read()
    assert read is not None
    assert unread.read() is read
    assert unread.trace() == found
    assert unread.ids() == (message.message_id, message.correlation_id)


#: A section with a trace context alone.
SECTION = Message(b"", application_properties={"traceparent": ONE}).encode_front()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\x00\x53\x73\xc0",
        b"\x00\x53\x74\xc1\xff",
        b"no message",
        SECTION[:-1],
        SECTION + b"no body",
        SECTION + SECTION,
        b"\x00\x53\x73\xc0\xff" + SECTION,
    ],
)
def test_what_is_no_message_has_no_trace_context(payload: bytes) -> None:
    unread = UnreadMessage(payload)
    assert trace_in(payload) == unread.trace() == {}
    assert unread.ids() == (None, None)


@plain_only
@pytest.mark.parametrize("body", [b"x", "text", [1], b"x" * 5_000])
@pytest.mark.parametrize("trace", [{"traceparent": ONE}, {}])
def test_the_usual_messages_are_read_without_finding_their_sections(
    body: Any, trace: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bytes] = []

    def noted(payload: bytes) -> tuple[int, int, int, int, int]:
        found.append(payload)
        return walk_front(payload)

    monkeypatch.setattr("amqp_rt.trace_context.walk_front", noted)
    shapes: list[dict[str, Any]] = [{}, {"message_id": "m-1", "subject": "s"}]
    for fields in shapes:
        message = Message(body, application_properties=trace, **fields)
        assert trace_in(message.encode()) == trace
    # Of larger messages the front alone is searched.
    assert len(found) == (2 if not trace and len(body) > 4_096 else 0)


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"traceparent": ONE},
        {"traceparent": ONE, "tracestate": "a=1"},
        {"tracestate": ONE},
        {"traceparent": "short"},
        {"traceparent": "é" * 55},
    ],
)
def test_a_trace_context_is_written_like_other_properties(trace: dict[str, str]) -> None:
    expected = bytearray()
    write_application_properties(expected, trace)
    assert trace_section(trace) == expected


def test_properties_that_cannot_be_decoded_have_no_ids() -> None:
    # A list of one element, which is cut off.
    payload = b"\x00\x53\x73\xc0\x02\x01\xa1" + Message(b"x").encode()
    unread = UnreadMessage(payload)
    assert unread.ids() == (None, None)
    unread.read()
    assert unread.ids() == (None, None)


def test_a_message_that_is_not_there_is_none() -> None:
    unread = UnreadMessage(None)
    assert unread.read() is None
    assert unread.trace() == {}
    assert unread.ids() == (None, None)
