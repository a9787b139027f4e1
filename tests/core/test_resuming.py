"""Links that are suspended and resumed: the table of Part 3 §3.4.6, in both roles, and cut conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import Inbox, Outbox, Store, frames_of
from wire import begun, detached_with, frame, kinds, said, transfer

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import Fault
from amqp_rt.core.performatives import Attach, Detach, Disposition, Flow, Transfer
from amqp_rt.core.resume import (
    ROWS,
    Action,
    action_for,
    fitting,
    offset_of,
    position_after,
    read_unsettled,
    whole,
)
from amqp_rt.errors import LocalProtocolError
from amqp_rt.events import AttachRequested
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error, Received, rejected
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState
from amqp_rt.unsettled import Unsettled, UnsettledMap
from amqp_rt.values import Described, Symbol, ULong

Q = Target(address="q")

#: Three data sections of 100 octets and their headers of 5, so that positions are easy to recognize.
SECTION = 105
PAYLOAD = b"".join(b"\x00\x53\x75\xa0\x64" + bytes([65 + n]) * 100 for n in range(3))


def tag(number: int) -> bytes:
    return number.to_bytes(4, "big")


# --- the table -----------------------------------------------------------------------------------

#: The standard's example: tag → the sender's state, the receiver's state (absent: ...).
EXAMPLE: dict[int, tuple[Any, Any]] = {
    1: (None, ...),
    2: (None, Received(3, 0)),
    3: (None, ACCEPTED),
    4: (None, None),
    5: (Received(0, 200), ...),
    6: (Received(1, 150), Received(2, 0)),
    7: (Received(0, 500), Received(0, 100)),
    8: (Received(3, 5), ACCEPTED),
    9: (Received(2, 0), None),
    10: (ACCEPTED, ...),
    11: (ACCEPTED, Received(1, 2000)),
    12: (ACCEPTED, ACCEPTED),
    13: (ACCEPTED, RELEASED),
    14: (ACCEPTED, None),
}


@pytest.mark.req("M26")
def test_the_table_has_each_row_of_the_standard() -> None:
    assert [row[0] for row in ROWS] == list(range(1, 15))
    for number, _, _, _, action in ROWS:
        local, remote = EXAMPLE[number]
        known = remote is not ...
        assert action_for(local, remote if known else None, known=known) is action
    # Every pair of states has an action.
    for local in (None, Received(1, 0), ACCEPTED):
        for remote in (..., None, Received(0, 5), Received(1, 0), RELEASED):
            known = remote is not ...
            assert action_for(local, remote if known else None, known=known) in Action


#: Tag → our state as the sender, the receiver's state, the transfer that we send
#: (its state, settled, aborted and payload), and whether the message counts as unknown there.
AS_SENDER: dict[int, tuple[Any, Any, tuple[Any, bool, bool, bytes] | None, bool]] = {
    1: (None, ..., None, True),
    2: (None, Received(2, 10), (Received(2, 10), False, False, PAYLOAD[220:]), False),
    3: (None, RELEASED, (RELEASED, True, False, b""), False),
    4: (None, None, (None, False, False, PAYLOAD), False),
    5: (Received(0, 20), ..., None, True),
    6: (Received(1, 15), Received(2, 0), (Received(2, 0), False, False, PAYLOAD[210:]), False),
    7: (Received(0, 50), Received(0, 10), (None, True, True, b""), True),
    8: (Received(3, 0), ACCEPTED, (ACCEPTED, True, False, b""), False),
    9: (Received(2, 0), None, (None, True, True, b""), True),
    10: (ACCEPTED, ..., None, False),
    11: (ACCEPTED, Received(1, 20), (None, True, True, b""), False),
    12: (ACCEPTED, ACCEPTED, (None, True, False, b""), False),
    13: (ACCEPTED, RELEASED, (ACCEPTED, False, False, b""), False),
    14: (ACCEPTED, None, (None, True, True, b""), False),
}


def asked(engine: Engine, *, sends: bool, **fields: Any) -> Any:
    """Return the link that the peer requests, on which it *sends* or receives."""
    attach = Attach(
        name="l",
        handle=0,
        role=not sends,
        source=Source(address="q"),
        target=Q,
        initial_delivery_count=0 if sends else None,
        **fields,
    )
    (event,) = engine.receive(frame(attach), 0.0)
    assert isinstance(event, AttachRequested)
    return event.link


def wire_map(states: dict[int, Any]) -> dict[bytes, Any]:
    return {tag(number): state for number, state in states.items() if state is not ...}


def flow(credit: int, count: int = 0) -> bytes:
    return frame(
        Flow(
            next_incoming_id=0,
            incoming_window=1000,
            next_outgoing_id=0,
            outgoing_window=1000,
            handle=0,
            delivery_count=count,
            link_credit=credit,
        )
    )


class Settling(Recorder):
    """Endpoint that applies the receiver's outcomes, and settles on receiving them."""

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        super().on_outcomes(link, deliveries)
        for each in deliveries:
            if not isinstance(each.state, Received):
                each.settle()


def transfers(engine: Engine) -> list[Any]:
    return [p for _, p in said(engine) if isinstance(p, Transfer)]  # type: ignore[misc]


@pytest.mark.req("X24", "M25", "M26")
@pytest.mark.parametrize("number", AS_SENDER)
def test_each_row_as_the_sender(number: int) -> None:
    local, remote, expected, unknown = AS_SENDER[number]
    engine = begun()
    endpoint = Settling()
    link = asked(engine, sends=False, unsettled=wire_map({number: remote}))
    memory = {tag(number): Unsettled(tag=tag(number), state=local, payload=PAYLOAD, context=number)}
    link.accept(endpoint, unsettled=memory)
    (attach,) = [p for _, p in said(engine) if isinstance(p, Attach)]  # type: ignore[misc]
    assert list(attach.unsettled) == [tag(number)]
    assert not attach.incomplete_unsettled
    assert link.resumed
    assert [entry.context for entry in link.unknown] == ([number] if unknown else [])

    engine.receive(flow(10), 0.0)
    data = b"".join(engine.take())
    if expected is None:
        assert data == b""
    else:
        state, settled, aborted, payload = expected
        sent = read_transfer_of(data)
        assert sent[0].resume
        assert sent[0].delivery_tag == tag(number)
        assert (sent[0].state, bool(sent[0].settled), sent[0].aborted) == (state, settled, aborted)
        assert sent[1] == payload
        assert link.credit == 9
        engine.receive(frame(Disposition(True, 0, 0, True, ACCEPTED)), 0.0)
    heard = {each.context: each.state for each in endpoint.outcomes}
    outcome = (
        local if isinstance(local, type(ACCEPTED)) else remote if number in (3, 8) else ACCEPTED
    )
    assert heard == ({} if unknown else {number: outcome})
    assert all(each.settled for each in endpoint.outcomes)
    link.detach(closed=False)
    engine.receive(frame(Detach(0, False)), 0.0)
    assert link.remember() == {}


def read_transfer_of(data: bytes) -> tuple[Any, bytes]:
    """Return the only transfer in *data*, and its payload."""
    from amqp_rt.core.frames import read_transfer

    assert int.from_bytes(data[:4], "big") == len(data)
    found, at = read_transfer(data, 8, len(data), DEFAULT_LIMITS)
    return found, data[at:]


#: Tag → our state as the receiver (None, a part of the payload, or an outcome), the frame
#: of the sender, then our state in the map, and the result for the delivery.
HALF = PAYLOAD[:150]
REST = PAYLOAD[150:]


def target_entry(number: int, state: Any, payload: bytes, *, complete: bool) -> UnsettledMap:
    return {
        tag(number): Unsettled(tag=tag(number), state=state, payload=payload, complete=complete)
    }


def receiving(
    number: int, state: Any, payload: bytes, *, theirs: Any, complete: bool = False
) -> Any:
    engine = begun()
    endpoint = Recorder()
    link = asked(engine, sends=True, unsettled=wire_map({number: theirs}), rcv_settle_mode=1)
    link.accept(endpoint, unsettled=target_entry(number, state, payload, complete=complete))
    written = said(engine)
    return engine, endpoint, link, written


@pytest.mark.req("X24", "M25", "M26")
@pytest.mark.parametrize("number", [1, 5, 10])
def test_rows_where_we_as_the_receiver_know_nothing(number: int) -> None:
    """A new delivery is received, and one that claims to be resumed is ignored."""
    engine = begun()
    endpoint = Recorder()
    link = asked(engine, sends=True, unsettled=wire_map({number: EXAMPLE[number][0]}))
    link.accept(endpoint, unsettled={})
    link.grant(10)
    (attach,) = [p for _, p in said(engine) if isinstance(p, Attach)]  # type: ignore[misc]
    assert read_unsettled(attach.unsettled, DEFAULT_LIMITS) == {}
    engine.receive(transfer(0, tag=tag(number), resume=True, more=True), 0.0)
    engine.receive(frame(Transfer(0), payload=b"y"), 0.0)
    engine.receive(transfer(1, PAYLOAD, tag=tag(number)), 0.0)
    assert [each.payload for each in endpoint.deliveries] == [PAYLOAD]
    assert link.credit == 8
    assert link.delivery_count == 2
    endpoint.deliveries[0].settle(ACCEPTED)
    (disposition,) = [p for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert (disposition.first, disposition.state) == (1, ACCEPTED)


@pytest.mark.req("X24", "M25", "M26")
@pytest.mark.parametrize(
    ("number", "start", "payload"),
    [
        (2, None, PAYLOAD),
        (2, Received(0, 7), PAYLOAD[7:]),
        (2, Received(1, 0), PAYLOAD[SECTION:]),
        (2, Received(1, 45), REST),
        (6, Received(1, 20), PAYLOAD[SECTION + 20 :]),
        (4, None, PAYLOAD),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_rows_where_the_sender_goes_on(
    number: int, start: Any, payload: bytes, pieces: int
) -> None:
    have = b"" if number == 4 else HALF
    engine, endpoint, link, written = receiving(number, None, have, theirs=EXAMPLE[number][0])
    (attach,) = [p for _, p in written if isinstance(p, Attach)]
    assert read_unsettled(attach.unsettled, DEFAULT_LIMITS) == {
        tag(number): Received(1, 45) if have else None
    }
    # Credit for resumed deliveries is granted without a call of the endpoint.
    (given,) = [p for _, p in written if isinstance(p, Flow)]
    assert given.link_credit == 1
    assert link.credit == 0
    step = -(-len(payload) // pieces)
    parts = [payload[at : at + step] for at in range(0, len(payload), step)]
    for index, part in enumerate(parts):
        more = index + 1 < len(parts)
        if index == 0:
            engine.receive(
                transfer(0, part, tag=tag(number), resume=True, state=start, more=more), 0.0
            )
        else:
            engine.receive(frame(Transfer(0, more=more), payload=part), 0.0)
    assert [each.payload for each in endpoint.deliveries] == [PAYLOAD]
    assert engine.assembling == 0
    endpoint.deliveries[0].settle(ACCEPTED)
    (disposition,) = [p for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert (disposition.state, disposition.settled) == (ACCEPTED, False)
    engine.receive(frame(Disposition(False, 0, 0, True)), 0.0)
    assert endpoint.settled == endpoint.deliveries


@pytest.mark.req("X24", "M26")
@pytest.mark.parametrize("number", [3, 8, 12])
def test_rows_where_our_outcome_stands(number: int) -> None:
    engine, endpoint, _, written = receiving(
        number, ACCEPTED, PAYLOAD, theirs=EXAMPLE[number][0], complete=True
    )
    (attach,) = [p for _, p in written if isinstance(p, Attach)]
    assert read_unsettled(attach.unsettled, DEFAULT_LIMITS) == {tag(number): ACCEPTED}
    state = None if number == 12 else ACCEPTED
    engine.receive(transfer(0, b"", tag=tag(number), resume=True, state=state, settled=True), 0.0)
    assert endpoint.deliveries == []
    (delivery,) = endpoint.settled
    assert delivery.settled
    assert delivery.local_state == ACCEPTED
    assert said(engine) == []


@pytest.mark.req("M26")
def test_the_row_where_the_outcomes_differ() -> None:
    """The sender's outcome is definitive: it is returned, settled (§3.4.6, row 13)."""
    engine, endpoint, _, _ = receiving(13, RELEASED, PAYLOAD, theirs=ACCEPTED, complete=True)
    engine.receive(transfer(0, b"", tag=tag(13), resume=True, state=ACCEPTED), 0.0)
    (delivery,) = endpoint.settled
    assert delivery.settled
    assert (delivery.state, delivery.local_state) == (ACCEPTED, ACCEPTED)
    (disposition,) = [p for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert (disposition.state, disposition.settled) == (ACCEPTED, True)


@pytest.mark.req("M26")
@pytest.mark.parametrize("number", [7, 9, 11, 14])
@pytest.mark.parametrize("live", [False, True])
def test_rows_where_the_sender_gives_up(number: int, live: bool) -> None:
    engine, endpoint, link, _ = receiving(
        number, None, HALF if number in (7, 11) else b"", theirs=EXAMPLE[number][0]
    )
    engine.receive(transfer(0, b"", tag=tag(number), resume=True, aborted=True), 0.0)
    assert endpoint.deliveries == []
    link.grant(5)
    # The tag may be used again.
    engine.receive(transfer(1, PAYLOAD, tag=tag(number)), 0.0)
    assert [each.payload for each in endpoint.deliveries] == [PAYLOAD]


# --- deliveries that only one side remembers ------------------------------------------------------


@pytest.mark.req("X24")
@pytest.mark.parametrize("theirs", [None, {}])
def test_what_the_sender_does_not_remember_is_settled(theirs: Any) -> None:
    engine = begun()
    endpoint = Recorder()
    link = asked(engine, sends=True, unsettled=theirs)
    link.accept(endpoint, unsettled=target_entry(1, None, PAYLOAD, complete=True))
    assert link.resumed == (theirs is not None)
    assert [entry.tag for entry in link.unknown] == [tag(1)]
    assert link.remember() == {}


@pytest.mark.req("X24")
def test_what_the_receiver_remembers_alone_is_passed_over() -> None:
    engine = begun()
    link = asked(engine, sends=False, unsettled={tag(9): ACCEPTED, b"": None})
    link.accept(Recorder(), unsettled={})
    engine.receive(flow(5), 0.0)
    assert transfers(engine) == []
    assert (link.resumed, link.unknown, link.credit) == (True, [], 5)


@pytest.mark.req("X24")
def test_without_a_memory_the_map_is_null() -> None:
    engine = begun()
    link = asked(engine, sends=False, unsettled={tag(9): ACCEPTED})
    assert link.remote_unsettled == {tag(9): ACCEPTED}
    link.accept(Recorder())
    (attach,) = [p for _, p in said(engine) if isinstance(p, Attach)]  # type: ignore[misc]
    assert attach.unsettled is None
    assert not link.resumed


@pytest.mark.req("X24")
def test_tags_go_on_behind_those_that_are_unsettled() -> None:
    engine = begun()
    link = asked(engine, sends=False, unsettled={tag(7): None})
    link.accept(
        Recorder(),
        unsettled={tag(7): Unsettled(tag=tag(7), payload=b"old"), b"x": Unsettled(tag=b"x")},
    )
    engine.receive(flow(5), 0.0)
    link.send(b"new")
    assert [each.delivery_tag for each in transfers(engine)] == [tag(7), tag(8)]


# --- outcomes that arrive late, or differ -----------------------------------------------------------


@pytest.mark.req("X24")
@pytest.mark.parametrize("second", [False, True])
def test_an_outcome_that_was_said_while_suspended_is_said_again(second: bool) -> None:
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=True, rcv_settle_mode=int(second))
    link.accept(endpoint, unsettled={})
    link.grant(5)
    engine.receive(transfer(0, PAYLOAD, tag=tag(1)) + transfer(1, PAYLOAD, tag=tag(2)), 0.0)
    engine.receive_eof(0.0)
    first, other = endpoint.deliveries
    first.settle(RELEASED)
    memory = link.remember()
    assert [entry.state for entry in memory.values()] == [RELEASED, None]

    engine = begun()
    link = asked(
        engine, sends=True, unsettled={tag(1): None, tag(2): None}, rcv_settle_mode=int(second)
    )
    link.accept(endpoint, unsettled=memory)
    # Another outcome is sent after the map.
    other.settle(ACCEPTED)
    (attach,) = [p for _, p in said(engine) if isinstance(p, Attach)]  # type: ignore[misc]
    assert read_unsettled(attach.unsettled, DEFAULT_LIMITS) == {
        tag(1): RELEASED,
        tag(2): Received(3, 0),
    }
    engine.receive(
        transfer(5, b"", tag=tag(1), resume=True)
        + transfer(6, b"", tag=tag(2), resume=True, state=Received(3, 0)),
        0.0,
    )
    found = [p for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert [(each.first, each.state, each.settled) for each in found] == [
        (5, RELEASED, not second),
        (6, ACCEPTED, not second),
    ]
    assert len(endpoint.deliveries) == 2
    # In settle mode first they are settled; in mode second the sender has to settle.
    assert [first.local_settled, other.local_settled] == [not second, not second]
    assert first.state is None


@pytest.mark.req("M26")
def test_what_is_given_up_is_settled_for_its_owner() -> None:
    local, remote, _, _ = AS_SENDER[11]
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=False, unsettled={tag(11): remote})
    link.accept(endpoint, unsettled={tag(11): Unsettled(tag=tag(11), state=local, payload=PAYLOAD)})
    engine.receive(flow(1), 0.0)
    assert [(each.state, each.settled) for each in endpoint.outcomes] == [(ACCEPTED, True)]


@pytest.mark.req("M26")
def test_a_resumed_transfer_may_ask_to_be_settled_first() -> None:
    engine = begun()
    link = asked(engine, sends=True, unsettled={tag(1): None}, rcv_settle_mode=1)
    memory = {tag(1): Unsettled(tag=tag(1), state=ACCEPTED, payload=PAYLOAD)}
    link.accept(Recorder(), unsettled=memory)
    engine.take()
    engine.receive(transfer(0, b"", tag=tag(1), resume=True, rcv_settle_mode=0), 0.0)
    (said_again,) = [p for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert (said_again.state, said_again.settled) == (ACCEPTED, True)


@pytest.mark.req("M26")
def test_a_resumed_message_is_complete_and_fills_the_frames_of_the_peer() -> None:
    engine = begun()
    link = asked(engine, sends=False, unsettled={})
    link.accept(Recorder())
    engine.receive(flow(1), 0.0)
    sending = link.send(b"x", state=TransactionalState(b"t"))
    engine.take()
    engine.receive_eof(0.0)
    memory = link.remember()
    assert list(memory) == [sending.tag]

    engine = begun()
    link = asked(engine, sends=False, unsettled={sending.tag: None})
    memory[sending.tag].payload = bytes(link.session.payload_max)
    link.accept(Recorder(), unsettled=memory)
    engine.take()
    engine.receive(flow(1), 0.0)
    (sent,) = transfers(engine)
    assert (sent.delivery_tag, sent.resume, sent.more, sent.state) == (
        sending.tag,
        True,
        False,
        None,
    )
    with pytest.raises(LocalProtocolError, match="is complete"):
        sending.write(b"more")


@pytest.mark.req("M26")
def test_another_outcome_than_the_receivers_can_be_applied() -> None:
    class Stubborn(Recorder):
        def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
            super().on_outcomes(link, deliveries)
            for each in deliveries:
                each.settle(RELEASED)

    engine, endpoint = begun(), Stubborn()
    link = asked(engine, sends=False, unsettled={tag(1): ACCEPTED})
    link.accept(endpoint, unsettled={tag(1): Unsettled(tag=tag(1), payload=PAYLOAD)})
    engine.receive(flow(1), 0.0)
    (sent,) = transfers(engine)
    assert (sent.state, bool(sent.settled), sent.resume) == (RELEASED, False, True)
    (sending,) = endpoint.outcomes
    assert not sending.settled
    engine.receive(frame(Disposition(True, 0, 0, True, RELEASED)), 0.0)
    assert sending.settled
    assert link.attached


@pytest.mark.req("M25")
def test_a_sender_does_not_say_received() -> None:
    engine = begun()
    link = asked(engine, sends=False)
    link.accept(Recorder())
    engine.receive(flow(2), 0.0)
    with pytest.raises(LocalProtocolError, match="received"):
        link.send(b"x", state=Received(0, 0))
    sending = link.send(b"x")
    with pytest.raises(LocalProtocolError, match="received"):
        sending.settle(Received(0, 0))
    assert not sending.settled


@pytest.mark.req("M25")
@pytest.mark.parametrize(
    "frames",
    [
        transfer(0, state=Received(0, 1)),
        transfer(0, more=True) + frame(Transfer(0, state=Received(0, 1))),
        transfer(0) + frame(Disposition(False, 0, 0, False, Received(0, 1))),
    ],
)
def test_a_sender_that_says_received_is_detached(frames: bytes) -> None:
    engine = begun()
    link = asked(engine, sends=True)
    link.accept(Recorder())
    link.grant(5)
    engine.take()
    engine.receive(frames, 0.0)
    assert detached_with(engine) == "amqp:invalid-field"


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.req("X19", "X24")
def test_what_was_streamed_whole_stays_in_hand_and_what_was_not_comes_again() -> None:
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=True, rcv_settle_mode=1)
    link.accept(endpoint, unsettled={}, streaming=True)
    link.grant(5)
    engine.receive(transfer(0, PAYLOAD, tag=tag(1)) + transfer(1, HALF, tag=tag(2), more=True), 0.0)
    engine.receive_eof(0.0)
    whole, part = endpoint.deliveries
    assert part.aborted
    memory = link.remember()
    assert list(memory) == [tag(1)]

    engine = begun()
    link = asked(engine, sends=True, unsettled={tag(1): None, tag(2): None}, rcv_settle_mode=1)
    link.accept(endpoint, unsettled=memory, streaming=True)
    (attach,) = [p for _, p in said(engine) if isinstance(p, Attach)]  # type: ignore[misc]
    # The octets have been delivered and released, so that no position can be given.
    assert attach.unsettled == {tag(1): None}
    link.grant(5)
    engine.receive(transfer(0, HALF, tag=tag(1), resume=True, more=True), 0.0)
    engine.receive(frame(Transfer(0), payload=REST), 0.0)
    engine.receive(transfer(1, PAYLOAD, tag=tag(2)), 0.0)
    assert endpoint.deliveries[:2] == [whole, part]
    assert b"".join(endpoint.deliveries[2].read_chunks()) == PAYLOAD
    assert b"".join(whole.read_chunks()) == PAYLOAD
    whole.settle(ACCEPTED)
    engine.take()
    engine.receive(frame(Disposition(False, 0, 0, True)), 0.0)
    assert endpoint.settled == [whole]
    endpoint.deliveries[2].settle(ACCEPTED)
    assert engine.held == 0


@pytest.mark.req("X19", "X24")
@pytest.mark.parametrize("complete", [False, True])
def test_a_stream_goes_on_from_what_a_store_has_of_it(complete: bool) -> None:
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=True, unsettled={tag(1): None})
    have = PAYLOAD if complete else HALF
    link.accept(endpoint, unsettled=target_entry(1, None, have, complete=complete), streaming=True)
    position = Received(3, 0) if complete else Received(1, 45)
    engine.take()
    engine.receive(transfer(0, PAYLOAD[len(have) :], tag=tag(1), resume=True, state=position), 0.0)
    (delivery,) = endpoint.deliveries
    assert delivery.complete
    assert engine.held > len(PAYLOAD)
    assert b"".join(delivery.read_chunks()) == PAYLOAD
    assert engine.held == 0
    delivery.settle(ACCEPTED)
    assert kinds(engine)[-1] == "Disposition"


@pytest.mark.req("X24", "X28")
def test_what_has_become_too_large_for_the_peer_is_aborted() -> None:
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=False, unsettled={tag(1): None}, max_message_size=314)
    link.accept(
        endpoint, unsettled={tag(1): Unsettled(tag=tag(1), payload=[PAYLOAD[:9], PAYLOAD[9:]])}
    )
    engine.receive(flow(1), 0.0)
    (sent,) = transfers(engine)
    assert (sent.aborted, sent.resume) == (True, True)
    assert [entry.tag for entry in link.unknown] == [tag(1)]


# --- positions -----------------------------------------------------------------------------------

MESSAGES = [
    PAYLOAD,
    Message({"a": [1, 2]}, subject="s", durable=True).encode(),
    Message(b"x" * 300, application_properties={"k": 1}).encode(),
    b"\x00\x53\x77\x00\x80\x00\x00\x00\x00\x00\x00\x00\x01\x45",
    b"no sections at all",
]


@pytest.mark.req("M25")
@pytest.mark.parametrize("payload", MESSAGES)
def test_positions_tell_where_a_beginning_ends(payload: bytes) -> None:
    seen = []
    for size in range(len(payload) + 1):
        position = position_after(payload[:size], DEFAULT_LIMITS)
        assert position is not None
        assert offset_of(payload, position, DEFAULT_LIMITS) == size
        seen.append((position.section_number, position.section_offset))
    assert seen == sorted(set(seen))
    assert offset_of(payload, Received(0, len(payload) + 1), DEFAULT_LIMITS) == -1
    assert offset_of(payload, Received(2**32 - 1, 0), DEFAULT_LIMITS) == -1


@pytest.mark.req("M25")
def test_sections_are_counted_as_far_as_they_may_be() -> None:
    assert position_after(PAYLOAD, Limits(resume_sections_max=3)) == Received(3, 0)
    assert position_after(PAYLOAD, Limits(resume_sections_max=2)) is None
    limits = Limits(sections_max=2)
    assert offset_of(PAYLOAD, Received(2, SECTION), limits) == len(PAYLOAD)
    assert offset_of(PAYLOAD, Received(3, 0), limits) == -1


def test_a_section_that_is_nested_too_deep_is_not_counted() -> None:
    nested = Message([[[1]]], body_kind="value").encode()
    assert position_after(nested, Limits(nesting_max=8)) == Received(1, 0)
    assert position_after(nested, Limits(nesting_max=2)) == Received(0, len(nested))


def test_a_payload_is_joined_from_its_pieces() -> None:
    assert [whole(each) for each in (None, b"ab", [b"a", b"b"])] == [b"", b"ab", b"ab"]


@pytest.mark.req("X24")
def test_a_map_has_as_many_states_as_there_is_room_for() -> None:
    # Each entry takes its tag, the two octets before it, and a null.
    states = [(tag(number), None) for number in range(3)]
    assert fitting(states, 3 * (4 + 2 + 1), 3) == (dict(states), True)
    assert fitting(states, 3 * (4 + 2 + 1) - 1, 3) == (dict(states[:2]), False)
    assert fitting(states, 1_000, 2) == (dict(states[:2]), False)


@pytest.mark.req("X24")
def test_a_map_has_at_most_as_many_entries_as_deliveries_may_be_unsettled() -> None:
    raw = {tag(number): None for number in range(3)}
    assert read_unsettled(raw, Limits(unsettled_max=3)) == raw
    with pytest.raises(Fault, match="has 3 entries, and 2 are allowed"):
        read_unsettled(raw, Limits(unsettled_max=2))


# --- hostile maps --------------------------------------------------------------------------------


@pytest.mark.req("X24", "X26")
@pytest.mark.parametrize(
    ("unsettled", "condition"),
    [
        ({"text": None}, "amqp:invalid-field"),
        ({ULong(1): None}, "amqp:invalid-field"),
        ({None: None}, "amqp:invalid-field"),
        ({b"x" * 33: None}, "amqp:invalid-field"),
        ({b"x": 5}, "amqp:invalid-field"),
        ({b"x": Described(ULong(0x23), [])}, "amqp:invalid-field"),
        ({b"x": Described(ULong(0x23), [-1, 0])}, "amqp:invalid-field"),
        ({tag(n): None for n in range(6)}, "amqp:resource-limit-exceeded"),
    ],
)
@pytest.mark.parametrize("sends", [False, True])
def test_a_map_that_is_none_detaches_the_link(unsettled: Any, condition: str, sends: bool) -> None:
    engine = begun(limits=Limits(unsettled_max=5))
    attach = Attach(
        name="l",
        handle=0,
        role=not sends,
        source=Source(address="q"),
        target=Q,
        unsettled=unsettled,
        initial_delivery_count=0 if sends else None,
    )
    assert engine.receive(frame(attach), 0.0) == []
    written = said(engine)
    assert [type(each[1]).__name__ for each in written if isinstance(each, tuple)] == [
        "Attach",
        "Detach",
    ]
    assert written[1][1].error.condition == condition  # type: ignore[index]
    # The session continues.
    engine.receive(frame(Detach(0, True)), 0.0)
    link = asked(engine, sends=sends, unsettled={b"x" * 32: None, b"": None})
    link.accept(Recorder())
    assert link.attached


@pytest.mark.req("X24", "X26")
def test_a_map_that_is_none_detaches_a_link_of_ours() -> None:
    engine = begun()
    endpoint = Recorder()
    (session,) = engine.sessions.values()
    session.attach_sender("mine", endpoint, target=Q, unsettled={})
    engine.take()
    engine.receive(
        frame(
            Attach(name="mine", handle=3, role=True, source=Source(), target=Q, unsettled={"x": 1})
        ),
        0.0,
    )
    assert detached_with(engine) == "amqp:invalid-field"
    engine.receive(frame(Detach(3, True)), 0.0)
    assert endpoint.attached == []
    assert len(endpoint.detached) == 1


@pytest.mark.req("X24", "X26")
def test_unknown_states_say_as_much_as_null() -> None:
    engine = begun()
    link = asked(engine, sends=False, unsettled={tag(1): Described(Symbol("x:state:list"), [1])})
    link.accept(Recorder(), unsettled={tag(1): Unsettled(tag=tag(1), payload=PAYLOAD)})
    engine.receive(flow(1), 0.0)
    (sent,) = transfers(engine)
    assert sent.resume
    assert sent.state is None


@pytest.mark.req("X24", "X26")
def test_a_receiver_that_has_more_than_there_is_is_detached() -> None:
    engine = begun()
    endpoint = Recorder()
    link = asked(engine, sends=False, unsettled={tag(1): Received(0, 10_000)})
    link.accept(endpoint, unsettled={tag(1): Unsettled(tag=tag(1), payload=PAYLOAD)})
    assert detached_with(engine) == "amqp:invalid-field"
    engine.receive(frame(Detach(0, True)), 0.0)
    assert endpoint.attached == []
    assert list(link.remember()) == [tag(1)]


@pytest.mark.req("X24", "X26")
@pytest.mark.parametrize(
    ("frames", "condition"),
    [
        # A gap; the same if we have no octets at all.
        (transfer(0, b"x", tag=tag(1), resume=True, state=Received(2, 0)), "amqp:invalid-field"),
        # A new delivery under the tag of an unsettled one.
        (transfer(0, b"x", tag=tag(1)), "amqp:invalid-field"),
        # More than the maximum message size.
        (
            transfer(0, b"x" * 200, tag=tag(1), resume=True, state=Received(1, 45)),
            "amqp:link:message-size-exceeded",
        ),
        # Neither reserved nor other credit.
        (
            transfer(0, b"", tag=tag(9), resume=True) + transfer(1, b"", tag=tag(1), resume=True),
            "amqp:link:transfer-limit-exceeded",
        ),
    ],
)
def test_resuming_what_cannot_be_is_a_fault_of_the_link(frames: bytes, condition: str) -> None:
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=True, unsettled={tag(1): None})
    link.accept(
        endpoint, unsettled=target_entry(1, None, HALF, complete=False), max_message_size=320
    )
    engine.take()
    engine.receive(frames, 0.0)
    assert detached_with(engine) == condition
    assert endpoint.deliveries == []
    engine.receive(frame(Detach(0, True)), 0.0)
    assert engine.assembling == 0
    if condition != "amqp:link:message-size-exceeded":
        assert link.remember()[tag(1)].payload == HALF


# --- two engines, cut ----------------------------------------------------------------------------


class Conversation:
    """Connection of a conversation, frame by frame; the client is the sender or the receiver."""

    def __init__(self, store: Store, limits: Limits, *, client_sends: bool) -> None:
        self.store = store
        self.client_sends = client_sends
        self.out = Outbox(store)
        self.box = Inbox(store)
        self.joined = Joined(limits=limits, on_attach=self.accept)
        #: Number of times that the link was attached again on this connection.
        self.rounds = 0
        self.begun = False

    def accept(self, link: Any) -> None:
        if self.client_sends:
            link.accept(self.box, unsettled=self.store.target)
        else:
            link.accept(self.out, unsettled=self.store.source)

    def attach(self) -> None:
        session = self.session
        if self.client_sends:
            session.attach_sender(
                "l", self.out, target=Q, rcv_settle_mode=1, unsettled=self.store.source
            )
        else:
            session.attach_receiver(
                "l",
                self.box,
                source=Source(address="q"),
                rcv_settle_mode=1,
                unsettled=self.store.target,
            )

    def keep(self) -> None:
        """Keep the unsettled deliveries of the links."""
        if self.out.over is not None:
            self.store.keep_source(self.out.over)
            self.out.over = None
        if self.box.over is not None:
            self.store.keep_target(self.box.over)
            self.box.over = None

    def run(self, most: int, restart: Callable[[Store], None]) -> int:
        """Carry up to *most* frames, then cut; return the number carried."""
        client, server = self.joined.client, self.joined.server
        queues: tuple[list[bytes], list[bytes]] = ([], [])
        carried = 0
        while True:
            if not self.begun and client.open_received:
                self.begun = True
                self.session = client.begin()
                self.attach()
            queues[0].extend(frames_of(b"".join(client.take())))
            queues[1].extend(frames_of(b"".join(server.take())))
            for queue, engine in ((queues[0], server), (queues[1], client)):
                if queue and carried < most:
                    self.joined._handle(engine.receive(queue.pop(0), 0.0), [])
                    carried += 1
            if self.out.over is not None and self.box.over is not None:
                # Suspended because a map was incomplete: attach again.
                self.rounds += 1
                self.keep()
                self.attach()
            elif not queues[0] and not queues[1] and not client.output_size:
                if self.store.in_hand and carried < most:
                    self.box.process()
                elif not self.pending():
                    break
            if carried >= most:
                break
        client.receive_eof(0.0)
        server.receive_eof(0.0)
        self.keep()
        restart(self.store)
        return carried

    def pending(self) -> bool:
        return not self.begun or any(
            engine._dirty or engine._queued or engine.output
            for engine in (self.joined.client, self.joined.server)
        )


def live(store: Store) -> None:
    """Keep both processes running; only the connection was lost."""


def restarted(store: Store) -> None:
    """Restart both processes, which keep only the content of their stores."""
    store.in_hand.clear()
    for entry in (store.target or {}).values():
        if entry.delivery is not None:
            # The outcome was set while there was no link.
            entry.state = entry.delivery.local_state
    for kept in (store.source, store.target):
        for entry in (kept or {}).values():
            entry.delivery = None


#: Frames of 512 octets: the larger message takes four, and a map of more than ten entries does not fit.
SMALL = Limits(frame_size_max=512, session_window=16)
BODIES = [
    b"\x00\x53\x75\xa0\x01" + bytes([n])
    if n % 3
    else b"\x00\x53\x75\xb0\x00\x00\x05\xdc" + bytes([n]) * 1500
    for n in range(6)
]


@pytest.mark.slow
@pytest.mark.req("X24", "X25", "M25", "M26")
@pytest.mark.parametrize("client_sends", [True, False], ids=["client sends", "server sends"])
@pytest.mark.parametrize("lazy", [False, True], ids=["prompt", "lazy"])
@pytest.mark.parametrize("restart", [live, restarted])
def test_cut_after_every_frame_each_message_is_processed_once(
    client_sends: bool, lazy: bool, restart: Callable[[Store], None]
) -> None:
    """Cut, and cut again during the resumption, after each number of frames."""
    whole = Conversation(Store(BODIES, lazy=lazy), SMALL, client_sends=client_sends)
    frames = whole.run(10_000, restart)
    assert whole.store.done
    assert frames > 30
    for cut in range(frames):
        for again in range(3, 24, 2):
            store = Store(BODIES, lazy=lazy)
            for most in (cut, again, 10_000):
                Conversation(store, SMALL, client_sends=client_sends).run(most, restart)
            assert sorted(store.processed) == sorted(BODIES), (cut, again)
            assert sorted(store.settled) == sorted(BODIES), (cut, again)
            assert store.done, (cut, again)


MANY = [b"\x00\x53\x75\xa0\x01" + bytes([n]) for n in range(150)]


@pytest.mark.slow
@pytest.mark.req("X24", "X25")
@pytest.mark.parametrize("client_sends", [True, False], ids=["client sends", "server sends"])
@pytest.mark.parametrize("restart", [live, restarted])
def test_maps_that_do_not_fit_a_frame_are_made_shorter_first(
    client_sends: bool, restart: Callable[[Store], None]
) -> None:
    """Incomplete maps: the named deliveries are resumed, until the rest can be named (§2.6.13)."""
    rounds = 0
    for cut in range(20, 230, 15):
        store = Store(MANY, lazy=True, credit=150)
        Conversation(store, SMALL, client_sends=client_sends).run(cut, restart)
        for most in (30, 40, 10_000):
            conversation = Conversation(store, SMALL, client_sends=client_sends)
            conversation.run(most, restart)
            rounds += conversation.rounds
        assert sorted(store.processed) == MANY, cut
        assert sorted(store.settled) == MANY, cut
        assert store.done, cut
    assert rounds > 10


@pytest.mark.req("X24")
def test_each_unsettled_delivery_gets_its_turn_in_a_map_that_cannot_name_all() -> None:
    memory = {
        tag(n): Unsettled(tag=tag(n), state=ACCEPTED, payload=b"", complete=True)
        for n in range(100)
    }
    engine = begun()
    engine.frame_size_out = 512
    link = asked(engine, sends=True, unsettled={tag(7): None}, incomplete_unsettled=True)
    link.accept(Recorder(), unsettled=memory)
    named = list(link.sent_unsettled)
    assert link.incomplete
    assert named == [tag(n) for n in range(len(named))]
    assert 20 < len(named) < 100
    link.grant(5)
    engine.take()
    # No new deliveries are allowed (§2.7.3).
    engine.receive(transfer(0, b"", tag=tag(7), resume=True, settled=True), 0.0)
    assert said(engine) == []
    engine.receive(transfer(1, b"x", tag=tag(200)), 0.0)
    assert detached_with(engine) == "amqp:not-allowed"
    engine.receive(frame(Detach(0, False)), 0.0)
    left = list(link.remember())
    named.remove(tag(7))
    assert left == [*(tag(n) for n in range(len(named) + 1, 100)), *named]


@pytest.mark.req("X24")
def test_nothing_new_is_sent_after_an_incomplete_map() -> None:
    engine, endpoint = begun(), Recorder()
    link = asked(engine, sends=False, unsettled={tag(1): None}, incomplete_unsettled=True)
    link.accept(
        endpoint,
        unsettled={tag(n): Unsettled(tag=tag(n), payload=PAYLOAD, context=n) for n in (1, 2)},
    )
    engine.receive(flow(10), 0.0)
    assert [each.delivery_tag for each in transfers(engine)] == [tag(1)]
    assert not link.writable
    assert link.unknown == []
    with pytest.raises(LocalProtocolError, match="incomplete"):
        link.send(b"x")
    # Once the deliveries known to both sides are settled, the link is suspended.
    engine.receive(frame(Disposition(True, 0, 0, True, ACCEPTED)), 0.0)
    (detach,) = [p for _, p in said(engine) if isinstance(p, Detach)]  # type: ignore[misc]
    assert (detach.closed, detach.error) == (False, None)
    engine.receive(frame(Detach(0, False)), 0.0)
    assert endpoint.detached == [(None, False)]
    assert list(link.remember()) == [tag(2)]


@pytest.mark.req("X24")
def test_states_that_are_too_large_for_a_map_are_said_later() -> None:
    large = rejected("x:large", "x" * 300)
    engine = begun()
    engine.frame_size_out = 512
    link = asked(engine, sends=True, unsettled={tag(1): None}, rcv_settle_mode=1)
    link.accept(
        Recorder(),
        unsettled={tag(1): Unsettled(tag=tag(1), state=large, payload=PAYLOAD, complete=True)},
    )
    assert link.sent_unsettled == {tag(1): None}
    assert not link.incomplete
    engine.take()
    engine.receive(transfer(0, PAYLOAD, tag=tag(1), resume=True), 0.0)
    (disposition,) = [p for _, p in said(engine) if isinstance(p, Disposition)]  # type: ignore[misc]
    assert (disposition.state, disposition.settled) == (large, False)


@pytest.mark.req("X13", "X24")
def test_a_link_that_is_taken_over_ends_at_once() -> None:
    """The old peer may never answer, and another connection has to continue its deliveries."""
    old, endpoint = begun(), Recorder()
    stale = asked(old, sends=False)
    stale.accept(endpoint, unsettled={})
    old.receive(flow(2), 0.0)
    sending = stale.send(PAYLOAD, "context")
    stolen = Error("amqp:link:stolen")
    stale.detach(stolen)
    stale.end(stolen, False)
    assert endpoint.detached == [(stolen, False)]
    memory = stale.remember()
    memory[sending.tag].payload = PAYLOAD

    new = begun()
    link = asked(new, sends=False, unsettled={sending.tag: ACCEPTED})
    again = Settling()
    link.accept(again, unsettled=memory)
    assert again.outcomes == [sending]
    assert sending.link is link
    # Frames still arriving on the old connection are too late.
    old.receive(frame(Disposition(True, 0, 0, True, RELEASED)) + frame(Detach(0, True)), 0.0)
    assert (sending.state, sending.settled) == (ACCEPTED, True)
    assert len(endpoint.detached) == 1
    assert not old.finished


@pytest.mark.slow
@pytest.mark.req("X24", "X25")
@given(
    cuts=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=6),
    sizes=st.lists(st.sampled_from([0, 1, 400, 480, 900, 2_000]), min_size=1, max_size=12),
    credit=st.integers(1, 12),
    window=st.sampled_from([1, 2, 7, 100]),
    lazy=st.booleans(),
    client_sends=st.booleans(),
    known=st.booleans(),
)
@settings(deadline=None)
def test_whatever_is_cut_each_message_is_processed_once(
    cuts: list[tuple[int, bool]],
    sizes: list[int],
    credit: int,
    window: int,
    lazy: bool,
    client_sends: bool,
    known: bool,
) -> None:
    """Cut repeatedly; each time the processes continue or restart. Formats known and unknown."""
    limits = Limits(frame_size_max=512, session_window=window)
    head = b"\x00\x53\x75\xb0" if known else b"anything"
    payloads = sorted(
        head + size.to_bytes(4, "big") + bytes([index]) * size + b"\x00\x53\x75\xa0\x01%d" % index
        for index, size in enumerate(sizes)
    )
    store = Store(payloads, lazy=lazy, credit=credit)
    for most, again in [*cuts, (100_000, False)]:
        Conversation(store, limits, client_sends=client_sends).run(
            most, restarted if again else live
        )
    assert sorted(store.processed) == payloads
    assert sorted(store.settled) == payloads
    assert store.done
