"""Arriving messages become entries, and the memory of one message changes nothing for the next."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.broker.entries import LATER, EntryFactory, UnacceptableMessage
from amqp_rt.errors import DecodeError
from amqp_rt.message import Message
from amqp_rt.values import Symbol, UInt

PLAIN = {Symbol("x-exchange"): "e", Symbol("x-routing-key"): "k"}
LATE = {Symbol("x-opt-delivery-delay"): UInt(5000)}
WRONG = {Symbol("unknown"): 1}
NONE: dict[Any, Any] = {}


@pytest.mark.req("M11")
def test_annotations_are_judged_whatever_came_before() -> None:
    factory = EntryFactory()
    for told in (PLAIN, PLAIN, NONE, PLAIN, LATE, LATE, PLAIN, WRONG, PLAIN, WRONG, NONE):
        payload = Message(b"x", message_annotations=told).encode()
        if told is WRONG:
            with pytest.raises(UnacceptableMessage):
                factory.make_entry(payload, 0, 1000.0)
            continue
        entry = factory.make_entry(payload, 0, 1000.0)
        assert entry.payload == payload
        assert (entry.sequence == LATER) is (told is LATE)


@pytest.mark.req("M11")
def test_equal_delays_count_from_the_arrival_of_each_message() -> None:
    factory = EntryFactory()
    payload = Message(b"x", message_annotations=LATE).encode()
    due = [factory.make_entry(payload, 0, now).due for now in (1000.0, 1001.0, 3000.0)]
    assert [each and each.at for each in due] == [1005.0, 1006.0, 3005.0]


@pytest.mark.req("M11")
def test_a_delay_of_a_wrong_type_is_refused_each_time() -> None:
    factory = EntryFactory()
    payload = Message(b"x", message_annotations={Symbol("x-opt-delivery-delay"): "1 s"}).encode()
    for _ in range(2):
        with pytest.raises(DecodeError, match="x-opt-delivery-delay is a number of milliseconds"):
            factory.make_entry(payload, 0, 1000.0)


@pytest.mark.req("M11")
def test_delivery_annotations_are_judged_beside_annotations_that_came_before() -> None:
    factory = EntryFactory()
    factory.make_entry(Message(b"x", message_annotations=PLAIN).encode(), 0, 1000.0)
    message = Message(b"x", message_annotations=PLAIN, delivery_annotations=WRONG)
    with pytest.raises(UnacceptableMessage, match="unknown"):
        factory.make_entry(message.encode(), 0, 1000.0)
