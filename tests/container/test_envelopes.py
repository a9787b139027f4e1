"""Requests and replies whose sections before the body are encoded once."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt import Message
from amqp_rt.container.composing import make_message
from amqp_rt.container.encoding import encode_plain, encode_traced
from amqp_rt.container.envelopes import Envelopes
from amqp_rt.container.payloads import Encoded
from amqp_rt.errors import EncodeError
from amqp_rt.message import JOIN_MAX, Sequence

KEYS: list[Any] = [
    "a",
    "b",
    "aa",
    "0" * 36,
    "k" * 255,
    "k" * 256,
    "ä" * 36,
    "",
    b"0" * 16,
    7,
    None,
]


class Claiming:
    """Codecs that encode every payload in the same way."""

    def __init__(self, encoded: Encoded) -> None:
        self._encoded = encoded

    def encode(self, value: object, content_type: str | None) -> Encoded:
        return self._encoded


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("address", ["replies/1", "aaaa", "ü", "r" * 300, "", None])
@pytest.mark.parametrize("content_type", [None, "application/json"])
def test_an_envelope_is_encoded_as_the_message_is(
    key: Any, address: str | None, content_type: str | None
) -> None:
    envelopes = Envelopes("correlation_id", "to")
    for size in (0, 1, 255, 256, JOIN_MAX):
        body = b"x" * size
        message = Message(body, correlation_id=key, to=address, content_type=content_type)
        codecs: Any = Claiming((content_type, body, "data"))
        assert envelopes.encode(key, address, body, codecs) == message.encode()
        if content_type is None:
            assert envelopes.encode(key, address, body, None) == message.encode()


def test_keys_of_one_length_share_an_envelope() -> None:
    envelopes = Envelopes("message_id", "reply_to")
    for key in ("one-key", "another", "ä" * 7):
        for value in (1, "text", None):
            message = Message(value, body_kind="value", message_id=key, reply_to="r")
            assert envelopes.encode(key, "r", value, None) == message.encode()
    assert len(envelopes._known) == 1
    items = Sequence([1, 2])
    whole = Message(items, message_id="one-key", reply_to="r").encode()
    assert envelopes.encode("one-key", "r", items, None) == whole


def test_many_addresses_do_not_pile_up() -> None:
    envelopes = Envelopes("message_id", "reply_to")
    for number in range(3_000):
        envelopes.encode("key", f"r{number}", b"", None)
    assert len(envelopes._known) <= 1_024


@pytest.mark.parametrize(
    "payload",
    [b"", b"x" * 300, "text", 7, 1.5, True, None, {"a": 1}, [1, 2], Sequence([1]), bytearray(b"x")],
)
def test_a_plain_payload_is_encoded_as_the_message_is(payload: Any) -> None:
    assert encode_plain(payload) == make_message(payload, {}).encode()
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for written in (trace, {**trace, "tracestate": "a=1"}):
        assert (
            encode_traced(payload, written)
            == make_message(payload, {"application_properties": written}).encode()
        )


def test_a_plain_payload_without_an_encoding_is_refused_as_that_of_a_message() -> None:
    with pytest.raises(EncodeError) as plain:
        encode_plain(2**70)
    with pytest.raises(EncodeError) as whole:
        make_message(2**70, {}).encode()
    assert str(plain.value) == str(whole.value)
