"""What arrives becomes entries: what is remembered of one message changes nothing for the next."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.broker.entries import LATER, Door, Unwelcome
from amqp_rt.message import Message
from amqp_rt.values import Symbol, UInt

PLAIN = {Symbol("x-exchange"): "e", Symbol("x-routing-key"): "k"}
LATE = {Symbol("x-opt-delivery-delay"): UInt(5000)}
WRONG = {Symbol("unknown"): 1}
NONE: dict[Any, Any] = {}


@pytest.mark.req("M11")
def test_annotations_are_judged_whatever_came_before() -> None:
    door = Door()
    for told in (PLAIN, PLAIN, NONE, PLAIN, LATE, LATE, PLAIN, WRONG, PLAIN, WRONG, NONE):
        payload = Message(b"x", message_annotations=told).encode()
        if told is WRONG:
            with pytest.raises(Unwelcome):
                door.admit(payload, 0, 1000.0)
            continue
        entry = door.admit(payload, 0, 1000.0)
        assert entry.payload == payload
        assert (entry.sequence == LATER) is (told is LATE)
