"""An engine processes a bounded amount for each call, and continues at the next."""

from __future__ import annotations

from typing import Any

import pytest
from wire import BEGIN, OPEN, frame, server

from amqp_rt.codec.primitives import Reader
from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import Attach, Close, Detach, Disposition, Flow, Transfer
from amqp_rt.events import Closed
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.outcomes import ACCEPTED, Received
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

ECHO = frame(Flow(incoming_window=9, next_outgoing_id=0, outgoing_window=9, echo=True))


def turns(engine: Engine, data: bytes) -> tuple[int, bytes, list[Any]]:
    """Calls until all of *data* is handled, what was said, and the events."""
    events = list(engine.receive(data, 0.0))
    said = b"".join(engine.take())
    count = 1
    while engine.unread:
        events += engine.receive(b"", 0.0)
        said += b"".join(engine.take())
        count += 1
        assert count < 10_000
    return count, said, events


@pytest.mark.req("L6")
def test_what_is_said_in_many_turns_is_what_is_said_in_one() -> None:
    data = AMQP_HEADER + OPEN + BEGIN + ECHO * 500 + frame(Close())
    whole, parts = server(), server()
    assert not parts.unread
    parts.work_max = 50
    once, said_once, heard_once = turns(whole, data)
    often, said_often, heard_often = turns(parts, data)
    assert once == 1
    assert often > 10
    # An echo is said once a turn.
    assert said_often.count(b"\x00\x53\x13") == often > said_once.count(b"\x00\x53\x13") == 1
    assert said_often.endswith(said_once[-12:])
    assert [type(event) for event in heard_often] == [type(event) for event in heard_once]
    assert type(heard_often[-1]) is Closed


def test_what_makes_more_work_takes_more_turns() -> None:
    bomb = b"\xf0" + (5).to_bytes(4, "big") + (60_000).to_bytes(4, "big") + b"\x40"
    plain = frame(Flow(incoming_window=9, next_outgoing_id=0, outgoing_window=9, properties={}))
    empty = b"\xc1\x01\x00"
    assert plain.endswith(empty)
    properties = b"\xc1" + bytes((len(bomb) + 4, 2)) + b"\xa3\x01b" + bomb
    body = bytearray(plain[8 : -len(empty)] + properties)
    # The list of the flow is that much longer; it has the 8-bit width.
    assert body[3] == 0xC0
    body[4] += len(properties) - len(empty)
    armed = (len(body) + 8).to_bytes(4, "big") + plain[4:8] + bytes(body)
    engine = server()
    engine.receive(AMQP_HEADER + OPEN + BEGIN, 0.0)
    engine.work_max = 1_000
    assert turns(engine, plain * 20)[0] == 1
    assert turns(engine, armed * 20)[0] == 21
    assert not engine.finished


def test_dispositions_of_many_deliveries_take_more_turns() -> None:
    engine = server()
    (event,) = engine.receive(
        AMQP_HEADER
        + OPEN
        + BEGIN
        + frame(Attach(name="l", handle=0, role=True, source=Source(address="q"), target=Target())),
        0.0,
    )[-1:]
    link: Any = event.link  # type: ignore[union-attr]
    endpoint = Recorder()
    link.accept(endpoint)
    engine.receive(
        frame(
            Flow(
                next_incoming_id=0, incoming_window=5_000, next_outgoing_id=0, outgoing_window=9,
                handle=0, delivery_count=0, link_credit=400,
            )
        ),
        0.0,
    )  # fmt: skip
    for _ in range(400):
        link.send(b"\x00\x53\x75\xa0\x00")
    engine.take()
    engine.work_max = 1_000
    state = Received(section_number=0, section_offset=0)
    nothing = frame(Disposition(role=True, first=0, last=2**31 - 2, state=state))
    assert turns(engine, nothing * 50)[0] > 4
    settled = frame(Disposition(role=True, first=0, last=399, settled=True, state=ACCEPTED))
    assert turns(engine, settled + frame(Detach(handle=0, closed=True)))[0] == 1
    assert len(endpoint.outcomes) == 2 * 400
    assert all(each.remote_settled for each in endpoint.outcomes)


def test_an_endpoint_that_does_much_for_a_message_takes_more_turns() -> None:
    engine = server()
    target = Target(address="q")
    attach = Attach(
        name="l", handle=0, role=False, source=Source(), target=target, initial_delivery_count=0
    )
    (event,) = engine.receive(AMQP_HEADER + OPEN + BEGIN + frame(attach), 0.0)[-1:]
    link: Any = event.link  # type: ignore[union-attr]
    endpoint = Recorder()
    link.accept(endpoint)
    link.grant(100)
    engine.work_max = 100

    def messages(first: int) -> bytes:
        return b"".join(
            frame(
                Transfer(handle=0, delivery_id=number, delivery_tag=b"t", settled=True),
                payload=b"\x00\x53\x75\xa0\x00",
            )
            for number in range(first, first + 50)
        )

    assert turns(engine, messages(0))[0] == 1
    link.delivery_work = 24
    # 25 for each: four of them, and one more that began with room left.
    engine.receive(messages(50), 0.0)
    assert len(endpoint.deliveries) == 50 + 4
    assert turns(engine, b"")[0] == 12
    assert len(endpoint.deliveries) == 100


def test_a_long_array_of_nothing_is_read_at_once() -> None:
    data = b"\xf0" + (5).to_bytes(4, "big") + (60_000).to_bytes(4, "big") + b"\x43"
    found: Any = Reader(data, 0, len(data), DEFAULT_LIMITS).read_value()
    assert len(found) == 60_000
    assert found[0] == found[59_999] == 0
