"""Frames that connections have in common."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.core import repeated
from amqp_rt.core.frames import SASL_FRAME, performative_frame
from amqp_rt.core.performatives import Attach, Begin, Close, Detach, End, Flow, Open
from amqp_rt.core.repeated import read_performative, repeated_frame
from amqp_rt.core.sasl_frames import OK, SaslMechanisms, SaslOutcome
from amqp_rt.errors import DecodeError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import Error
from amqp_rt.values import Symbol

BEGIN = Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)
PERFORMATIVES: list[Any] = [
    Open(container_id="c"),
    Open(container_id="c", offered_capabilities=(Symbol("a"), Symbol("b"))),
    Open(container_id="c", properties={Symbol("product"): "x"}),
    BEGIN,
    Begin(remote_channel=0, next_outgoing_id=0, incoming_window=9, outgoing_window=9),
    Detach(0, True),
    Detach(1, True),
    Detach(1, False),
    Detach(1, True, Error("amqp:not-found", "gone")),
    End(),
    End(Error("amqp:not-found")),
    Close(),
    Close(Error("amqp:not-found", "gone", {Symbol("a"): [1, True]})),
]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    repeated._RECENT.encoded.clear()
    repeated._RECENT.decoded.clear()


def test_a_frame_is_the_same_whether_it_was_encoded_before_or_not() -> None:
    for _ in range(3):
        for channel in (0, 1, 300):
            for each in PERFORMATIVES:
                assert repeated_frame(channel, each) == performative_frame(channel, each)
        for said in (SaslMechanisms((Symbol("PLAIN"),)), SaslOutcome(OK)):
            frame = repeated_frame(0, said, SASL_FRAME)
            assert frame == performative_frame(0, said, SASL_FRAME)
    # Equal fields of another class.
    assert repeated_frame(0, End()) != repeated_frame(0, Close())


def test_a_performative_is_the_same_whether_it_was_decoded_before_or_not() -> None:
    found = []
    for _ in range(2):
        for each in PERFORMATIVES:
            frame = b"xyz" + performative_frame(1, each)
            read, elements = read_performative(frame, 11, len(frame), DEFAULT_LIMITS)
            assert read == each
            found.append(elements)
    half = len(PERFORMATIVES)
    assert found[:half] == found[half:]
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    "said",
    [
        Open(container_id="c", properties={Symbol("a"): 1}),
        Close(Error("amqp:not-found")),
        Attach(name="l", handle=0, role=False),
        Flow(incoming_window=1, next_outgoing_id=0, outgoing_window=1),
    ],
)
def test_performatives_that_may_be_changed_are_not_shared(said: Any) -> None:
    frame = performative_frame(0, said)
    first, _ = read_performative(frame, 8, len(frame), DEFAULT_LIMITS)
    second, _ = read_performative(frame, 8, len(frame), DEFAULT_LIMITS)
    assert first == second
    assert first is not second


def test_octets_within_the_limits_of_one_listener_may_exceed_those_of_another() -> None:
    many = tuple(Symbol(f"c{number}") for number in range(20))
    frame = performative_frame(0, Open(container_id="c", desired_capabilities=many))
    for _ in range(2):
        said, _ = read_performative(frame, 8, len(frame), DEFAULT_LIMITS)
        assert said.desired_capabilities == many
        with pytest.raises(DecodeError, match="element"):
            read_performative(frame, 8, len(frame), Limits(elements_max=10))


def test_what_is_kept_is_bounded_in_number_and_size() -> None:
    for number in range(1_000):
        said = Open(container_id=f"c{number}")
        frame = repeated_frame(0, said)
        assert read_performative(frame, 8, len(frame), DEFAULT_LIMITS)[0] == said
    assert 0 < len(repeated._RECENT.encoded) <= 256
    assert 0 < len(repeated._RECENT.decoded) <= 256
    repeated._RECENT.encoded.clear()
    repeated._RECENT.decoded.clear()
    frame = repeated_frame(0, Open(container_id="c" * 300))
    read_performative(frame, 8, len(frame), DEFAULT_LIMITS)
    assert not repeated._RECENT.encoded
    assert not repeated._RECENT.decoded
