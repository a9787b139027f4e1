"""Links come and go: names, handles, answers that nobody waits for, words that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conversations import frames
from sanity import check
from wire import (
    BEGIN,
    begun,
    detached_with,
    ended_with,
    frame,
    kinds,
    opened,
    said,
    server,
    transfer,
)

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import Attach, Begin, Detach, End, Flow, Open
from amqp_rt.errors import EncodeError, LocalProtocolError
from amqp_rt.events import AttachRequested
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, Error, Modified
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState
from amqp_rt.values import Described, Symbol, ULong

Q = Target(address="q")
FROM_Q = Source(address="q")


def attach(name: str = "l", handle: int = 0, *, sender: bool = False, **fields: Any) -> bytes:
    """The peer attaches: as the receiver, unless told otherwise."""
    if sender:
        fields = {"source": Source(), "target": Q, "initial_delivery_count": 0} | fields
    else:
        fields = {"source": FROM_Q, "target": Target()} | fields
    return frame(Attach(name=name, handle=handle, role=not sender, **fields))


def requested(engine: Engine, octets: bytes) -> Any:
    (event,) = engine.receive(octets, 0.0)
    assert isinstance(event, AttachRequested)
    return event.link


def performatives(engine: Engine, kind: type) -> list[Any]:
    return [f[1] for f in said(engine) if isinstance(f, tuple) and isinstance(f[1], kind)]


def joined_session(**options: Any) -> tuple[Joined, Any]:
    joined = Joined(**options)
    joined.pump()
    return joined, joined.client.begin()


# --- handles -----------------------------------------------------------------------------------


@pytest.mark.req("X12")
def test_the_lowest_handle_that_is_free_is_used() -> None:
    joined, session = joined_session()
    links = [session.attach_sender(f"l{n}", Recorder(), target=Q) for n in range(5)]
    joined.pump()
    assert [link.handle for link in links] == [0, 1, 2, 3, 4]
    for number in (3, 0, 1):
        links[number].detach()
    joined.pump()
    again = [session.attach_sender(f"m{n}", Recorder(), target=Q) for n in range(4)]
    assert [link.handle for link in again] == [0, 1, 3, 5]
    joined.pump()
    check(joined.client)
    check(joined.server)


@pytest.mark.req("X12")
def test_a_handle_is_given_once_even_if_an_endpoint_attaches_while_another_goes() -> None:
    engine = begun()
    session = engine.sessions[0]
    made: list[Any] = []

    class Replacing(Recorder):
        def deliver(self, link: Any, deliveries: list[Any]) -> None:
            link.detach()
            made.append(session.attach_receiver("new", Recorder(), source=FROM_Q))

    link = requested(engine, attach(sender=True))
    link.accept(Replacing())
    link.grant(1)
    engine.receive(transfer(0) + frame(Detach(0, True)), 0.0)
    assert session.links[made[0].handle] is made[0]
    another = session.attach_receiver("third", Recorder(), source=FROM_Q)
    assert another.handle != made[0].handle
    check(engine)


@pytest.mark.req("X8")
def test_a_peer_must_leave_a_handle_to_answer_with() -> None:
    engine = opened()
    begin = Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9, handle_max=1)
    engine.receive(frame(begin), 0.0)
    first = requested(engine, attach("a", 0))
    second = requested(engine, attach("b", 1))
    # Modes requested by the peer come before our own.
    with pytest.raises(LocalProtocolError, match="allows 2 links"):
        engine.sessions[0].attach_sender("ours", Recorder(), target=Q)
    for link in (first, second):
        link.accept(Recorder())
    engine.take()
    assert engine.receive(attach("c", 2), 0.0) == []
    assert ended_with(engine) == "amqp:resource-limit-exceeded"


@pytest.mark.req("X8")
def test_links_that_nobody_has_answered_are_bounded() -> None:
    engine = begun(limits=Limits(handle_max=3))
    requests = []
    for number in range(4):
        (event,) = engine.receive(attach(f"l{number}", 0), 0.0)
        assert isinstance(event, AttachRequested)
        requests.append(event.link)
        engine.receive(frame(Detach(0, True)), 0.0)
    check(engine)
    # Each has been given up by its peer, and still waits for its owner.
    requests[0].accept(Recorder())
    engine.receive(attach("l4", 0), 0.0)
    engine.receive(frame(Detach(0, True)), 0.0)
    engine.take()
    engine.receive(attach("l5", 0), 0.0)
    assert ended_with(engine) == "amqp:resource-limit-exceeded"
    late = Recorder()
    requests[1].accept(late)
    assert [closed for _, closed in late.detached] == [False]
    check(engine)


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.req("X13")
def test_a_name_that_is_asked_for_again_before_its_answer_is_stolen() -> None:
    engine = begun()
    first = requested(engine, attach("l", 0))
    second = requested(engine, attach("l", 1))
    (_, refusal), (_, detach) = said(engine)  # type: ignore[misc]
    assert (refusal.source, refusal.target) == (None, None)
    assert detach.error.condition == "amqp:link:stolen"
    late = Recorder()
    first.accept(late)
    first.refuse(Error("amqp:not-found"))
    ((error, closed),) = late.detached
    assert error is not None
    assert (error.condition, closed) == ("amqp:link:stolen", True)
    second.accept(Recorder())
    assert kinds(engine) == ["Attach"]
    assert second.attached
    engine.receive(frame(Detach(0, True)), 0.0)
    assert second.attached
    check(engine)


@pytest.mark.req("X5", "X12")
def test_a_name_that_came_went_and_came_is_answered_in_order() -> None:
    engine = begun()
    first = requested(engine, attach("l", 0) + frame(Detach(0, True)))
    second = requested(engine, attach("l", 0))
    second.accept(Recorder())
    first.accept(Recorder())
    assert kinds(engine) == ["Attach", "Detach", "Attach"]
    assert second.attached
    check(engine)


@pytest.mark.req("X15", "X26")
def test_transfers_before_the_answer_refuse_the_link() -> None:
    engine = begun()
    link = requested(engine, attach(sender=True) + transfer(0))
    (_, refusal), (_, detach) = said(engine)  # type: ignore[misc]
    assert refusal.target is None
    assert detach.error.condition == "amqp:link:transfer-limit-exceeded"
    late = Recorder()
    link.accept(late)
    ((error, closed),) = late.detached
    assert error is not None
    assert (error.condition, closed) == ("amqp:link:transfer-limit-exceeded", True)
    assert kinds(engine) == []
    engine.receive(frame(Detach(0, True)), 0.0)
    assert len(late.detached) == 1
    check(engine)


@pytest.mark.req("X26")
@pytest.mark.parametrize("how", ["end", "their end", "close", "lost"])
def test_a_link_accepted_too_late_is_heard_as_over(how: str) -> None:
    engine = begun()
    link = requested(engine, attach())
    engine.take()
    if how == "end":
        engine.sessions[0].end()
    elif how == "their end":
        engine.receive(frame(End(Error("amqp:not-allowed"))), 0.0)
    elif how == "close":
        engine.close()
    else:
        engine.receive_eof(0.0)
    engine.take()
    late = Recorder()
    link.accept(late)
    assert late.attached == []
    assert [closed for _, closed in late.detached] == [False]
    link.refuse(Error("amqp:not-found"))
    assert engine.take() == []


@pytest.mark.req("X12", "X26")
@pytest.mark.parametrize("modes", [{"snd_settle_mode": 3}, {"rcv_settle_mode": 2}])
@pytest.mark.parametrize("sender", [True, False])
def test_a_settle_mode_that_does_not_exist_is_refused(modes: dict[str, int], sender: bool) -> None:
    engine = begun()
    assert engine.receive(attach(sender=sender, **modes), 0.0) == []
    (_, refusal), (_, detach) = said(engine)  # type: ignore[misc]
    assert (refusal.source, refusal.target) == (None, None)
    assert detach.error.condition == "amqp:invalid-field"
    engine.receive(frame(Detach(0, True)), 0.0)
    check(engine)


@pytest.mark.req("X12", "X26")
@pytest.mark.parametrize(
    "terminus", [Described(ULong(0x99), []), Described(Symbol("x"), 1), "q", 7]
)
@pytest.mark.parametrize("end", ["source", "target"])
@pytest.mark.parametrize("sender", [True, False])
def test_a_terminus_of_an_unknown_type_is_refused(terminus: Any, end: str, sender: bool) -> None:
    engine = begun()
    assert engine.receive(attach(sender=sender, **{end: terminus}), 0.0) == []
    (_, refusal), (_, detach) = said(engine)  # type: ignore[misc]
    assert (refusal.source, refusal.target) == (None, None)
    assert detach.error.condition == "amqp:not-implemented"
    assert end in detach.error.description
    engine.receive(frame(Detach(0, True)), 0.0)
    check(engine)
    endpoint = Recorder()
    engine.sessions[0].attach_receiver("l", endpoint, source=FROM_Q)
    engine.take()
    engine.receive(attach("l", sender=True, **{"source": FROM_Q, end: terminus}), 0.0)
    assert detached_with(engine) == "amqp:not-implemented"


@pytest.mark.req("X26")
def test_an_answer_that_cannot_be_is_detached_with_the_reason() -> None:
    engine = begun()
    endpoint = Recorder()
    engine.sessions[0].attach_receiver("l", endpoint, source=FROM_Q)
    engine.take()
    # A sender's attach must say where it counts from.
    engine.receive(attach(sender=True, initial_delivery_count=None), 0.0)
    assert detached_with(engine) == "amqp:invalid-field"
    engine.receive(frame(Detach(0, True)), 0.0)
    assert endpoint.attached == []
    assert [error.condition for error, _ in endpoint.detached if error] == ["amqp:invalid-field"]


@pytest.mark.req("X12", "B4")
def test_each_side_speaks_for_its_own_terminus_and_mode() -> None:
    engine = begun()
    session = engine.sessions[0]
    ours = Source(address="mine", capabilities=("x",))
    sender = session.attach_sender("s", Recorder(), source=ours, target=Q, snd_settle_mode=0)
    receiver = session.attach_receiver("r", Recorder(), source=FROM_Q, target=Q, rcv_settle_mode=1)
    engine.receive(
        attach("s", 0, source=None, target=Target(address="other"), rcv_settle_mode=1), 0.0
    )
    engine.receive(
        attach(
            "r",
            1,
            sender=True,
            source=Source(address="other"),
            target=None,
            snd_settle_mode=1,
            rcv_settle_mode=0,
        ),
        0.0,
    )
    assert sender.attached
    assert receiver.attached
    # The sender's source and the receiver's target are as we said.
    assert (sender.source, sender.target) == (ours, Target(address="other"))
    assert (receiver.source, receiver.target) == (Source(address="other"), Q)
    # The peer's default of mixed is a wish: our sender is bound by its own word.
    assert (sender.snd_settle_mode, sender.rcv_settle_mode) == (0, 1)
    assert (receiver.snd_settle_mode, receiver.rcv_settle_mode) == (1, 1)


@pytest.mark.req("X14")
def test_credit_and_transfers_between_a_refusal_and_its_detach_are_passed_over() -> None:
    engine = begun()
    endpoint = Recorder(credit=5)
    engine.sessions[0].attach_receiver("l", endpoint, source=FROM_Q)
    engine.take()
    engine.receive(attach(sender=True, source=None) + transfer(0), 0.0)
    assert engine.take() == []
    error = Error("amqp:not-found", "no such node")
    engine.receive(frame(Detach(0, True, error)), 0.0)
    assert endpoint.detached == [(error, True)]
    assert endpoint.deliveries == []
    check(engine)


@pytest.mark.req("X21", "X26")
@pytest.mark.parametrize(
    ("link_mode", "mode", "settled", "fine"),
    [
        (0, None, False, True),
        (0, 0, False, True),
        (0, 1, False, False),
        (0, 1, True, True),
        (1, 0, False, True),
        (1, 1, False, True),
        (1, None, False, True),
    ],
)
def test_a_transfer_may_lower_the_receivers_mode_and_not_raise_it(
    link_mode: int, mode: int | None, settled: bool, fine: bool
) -> None:
    engine = begun()
    link = requested(engine, attach(sender=True, rcv_settle_mode=link_mode))
    endpoint = Recorder()
    link.accept(endpoint)
    link.grant(5)
    engine.take()
    engine.receive(transfer(0, settled=settled, rcv_settle_mode=mode), 0.0)
    if fine:
        (delivery,) = endpoint.deliveries
        assert delivery.second == bool(link_mode if mode is None else mode)
    else:
        assert detached_with(engine) == "amqp:invalid-field"


@pytest.mark.req("X22", "X20")
def test_the_octets_of_an_aborted_transfer_count_for_nothing() -> None:
    engine = begun()
    link = requested(engine, attach(sender=True))
    link.accept(Recorder(), max_message_size=10)
    link.grant(5)
    engine.receive(transfer(0, b"x" * 20, aborted=True), 0.0)
    engine.receive(transfer(1, b"x" * 9, more=True), 0.0)
    engine.receive(transfer(None, b"x" * 20, aborted=True), 0.0)
    assert link.attached
    assert link.delivery_count == 2
    check(engine)


@pytest.mark.req("X22")
def test_a_first_frame_that_is_too_large_leaves_no_delivery() -> None:
    engine = begun()
    link = requested(engine, attach(sender=True))
    endpoint = Recorder()
    link.accept(endpoint, max_message_size=10)
    link.grant(5)
    engine.take()
    engine.receive(transfer(0, b"x" * 11), 0.0)
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    engine.receive(frame(Detach(0, True)), 0.0)
    assert link.unsettled == []
    assert endpoint.deliveries == []


@pytest.mark.req("X19", "X22")
def test_a_stream_that_grows_too_large_for_the_peer_is_stopped_here() -> None:
    joined, session = joined_session(
        on_attach=lambda link: link.accept(Recorder(credit=5), max_message_size=10)
    )
    link = session.attach_sender("l", Recorder(), target=Q)
    joined.pump()
    body = link.send(b"12345", more=True)
    body.write(b"678")
    with pytest.raises(LocalProtocolError, match="message-size-exceeded"):
        body.write(b"9ab")
    body.write(b"90", more=False)
    joined.pump()
    assert [d.payload for d in joined.links[0].endpoint.deliveries] == [b"1234567890"]


# --- words that cannot be said -------------------------------------------------------------------

BAD = Error("amqp:internal-error", "words", {"key": object()})


def small_pair() -> tuple[Joined, Any]:
    """A client of a server that takes frames of 512 bytes."""
    return joined_session(limits=Limits(frame_size_max=512), on_attach=lambda link: None)


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"properties": {"key": object()}}, EncodeError),
        ({"properties": {"key": "v" * 600}}, LocalProtocolError),
        ({"source": Source(address="q", filter={"f": "x" * 600})}, LocalProtocolError),
        ({"snd_settle_mode": 300}, EncodeError),
    ],
)
def test_an_attach_that_cannot_be_said_leaves_nothing_behind(
    options: dict[str, Any], kind: type[Exception]
) -> None:
    joined, session = small_pair()
    joined.pump()
    endpoint = Recorder()
    with pytest.raises(kind) as raised:
        session.attach_receiver("l", endpoint, **options)
    if kind is LocalProtocolError:
        assert raised.value.condition == "amqp:frame-size-too-small"  # type: ignore[attr-defined]
    assert session.links == {}
    assert session._names == {}
    assert joined.client.take() == []
    link = session.attach_receiver("l", endpoint, source=FROM_Q)
    assert link.handle == 0
    check(joined.client)


@pytest.mark.req("X26")
def test_an_answer_that_does_not_fit_the_askers_frames_refuses_the_link() -> None:
    joined, session = small_pair()
    endpoint = Recorder()
    session.attach_receiver("l", endpoint, source=FROM_Q)
    joined.pump()
    late = Recorder()
    (link,) = joined.links
    link.accept(late, properties={"key": "v" * 600})
    assert [error.condition for error, _ in late.detached if error] == ["amqp:frame-size-too-small"]
    joined.pump()
    assert [e.condition for e, _ in endpoint.detached if e] == ["amqp:frame-size-too-small"]
    assert endpoint.attached == []
    assert len(late.detached) == 1
    check(joined.client)
    check(joined.server)


@pytest.mark.req("X26")
def test_an_unencodable_answer_is_the_owners_fault_and_can_be_mended() -> None:
    engine = begun()
    link = requested(engine, attach())
    endpoint = Recorder()
    with pytest.raises(EncodeError):
        link.accept(endpoint, properties={"key": object()})
    with pytest.raises(EncodeError):
        link.refuse(BAD)
    assert engine.take() == []
    assert endpoint.attached == []
    link.accept(endpoint)
    assert endpoint.attached == [link]
    assert kinds(engine) == ["Attach"]


def begun_with_small_frames() -> Engine:
    engine = server()
    small = frame(Open(container_id="peer", max_frame_size=512))
    engine.receive(AMQP_HEADER + small + BEGIN, 0.0)
    engine.take()
    return engine


@pytest.mark.req("X26")
@pytest.mark.parametrize("answer", ["accept", "refuse"])
def test_a_name_that_does_not_fit_its_owners_frames_ends_the_session(answer: str) -> None:
    engine = begun_with_small_frames()
    link = requested(engine, attach("n" * 600))
    late = Recorder()
    if answer == "accept":
        link.accept(late)
        assert late.attached == []
        assert [e.condition for e, _ in late.detached if e] == ["amqp:frame-size-too-small"]
    else:
        link.refuse(Error("amqp:not-found"))
    assert ended_with(engine) == "amqp:frame-size-too-small"
    check(engine)


@pytest.mark.req("X4", "X26")
def test_long_reasons_are_cut_to_the_peers_frames() -> None:
    long = Error("amqp:internal-error", "because " * 200, {"key": "value"})
    engine = begun_with_small_frames()
    links = [requested(engine, attach(f"l{n}", n)) for n in range(2)]
    links[0].refuse(long)
    links[1].accept(Recorder())
    links[1].detach(long)
    engine.sessions[0].end(long)
    engine.close(long)
    found = performatives_in_small_frames(engine)
    assert [type(p).__name__ for p in found] == [
        "Attach",
        "Detach",
        "Attach",
        "Detach",
        "End",
        "Close",
    ]
    for word in found:
        if not isinstance(word, Attach):
            assert word.error.condition == long.condition
            assert long.description is not None
            assert long.description.startswith(word.error.description)


def performatives_in_small_frames(engine: Engine) -> list[Any]:
    found = []
    for data in engine.take():
        assert len(data) <= 512
        found += [item.performative for item in frames(data)]
    return found


@pytest.mark.req("X26")
@pytest.mark.parametrize("what", ["detach", "end", "close", "begin"])
def test_last_words_that_cannot_be_said_change_nothing(what: str) -> None:
    joined, session = small_pair()
    link = session.attach_sender("l", Recorder(), target=Q)
    joined.pump()
    joined.links[0].accept(Recorder(credit=5))
    joined.pump()
    say: dict[str, Callable[[], object]] = {
        "detach": lambda: link.detach(BAD),
        "end": lambda: session.end(BAD),
        "close": lambda: joined.client.close(BAD),
        "begin": lambda: joined.client.begin(properties={"key": object()}),
    }
    with pytest.raises(EncodeError):
        say[what]()
    assert joined.client.take() == []
    assert len(joined.client.sessions) == 1
    link.send(b"still there")
    joined.pump()
    assert len(joined.links[0].endpoint.deliveries) == 1
    with pytest.raises(LocalProtocolError, match="frames of 512"):
        joined.client.begin(properties={"key": "v" * 600})
    assert joined.client.begin().channel == 1
    check(joined.client)


@pytest.mark.req("X21", "X26")
@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Modified(message_annotations={"x-opt-key": object()}), EncodeError),
        (Modified(message_annotations={"x-opt-key": "v" * 600}), LocalProtocolError),
    ],
)
def test_an_outcome_that_cannot_be_said_leaves_the_delivery_as_it_was(
    outcome: Any, kind: type[Exception]
) -> None:
    engine = begun_with_small_frames()
    link = requested(engine, attach(sender=True))
    endpoint = Recorder()
    link.accept(endpoint)
    link.grant(5)
    engine.receive(transfer(0), 0.0)
    engine.take()
    (delivery,) = endpoint.deliveries
    with pytest.raises(kind):
        delivery.settle(outcome)
    with pytest.raises(kind):
        delivery.update(outcome)
    assert delivery.local_state is None
    assert engine.take() == []
    delivery.settle(ACCEPTED)
    assert kinds(engine) == ["Disposition"]
    check(engine)


@pytest.mark.req("X4", "X18", "R3")
def test_a_state_leaves_room_for_the_message_in_the_peers_frames() -> None:
    engine = begun_with_small_frames()
    link = requested(
        engine,
        attach()
        + frame(
            Flow(
                next_incoming_id=0,
                incoming_window=99,
                next_outgoing_id=0,
                outgoing_window=9,
                handle=0,
                delivery_count=0,
                link_credit=9,
            )
        ),
    )
    link.accept(Recorder())
    engine.take()
    state = TransactionalState(b"t" * 300)
    body = bytes(range(256)) * 4
    link.send(body, tag=b"g" * 32, state=state, message_format=0xFFFFFFFF)
    sent = b""
    for data in engine.take():
        assert len(data) <= 512
        for item in frames(data):
            sent += item.payload
            if item.performative.delivery_id is not None:
                assert item.performative.state == state
    assert sent == body
    for bad in (TransactionalState(b"t" * 600), TransactionalState(object())):
        with pytest.raises((LocalProtocolError, EncodeError)):
            link.send(b"x", state=bad)
    with pytest.raises(LocalProtocolError, match="message-format"):
        link.send(b"x", message_format=-1)
    assert link.credit == 8
    assert engine.take() == []
    check(engine)


# --- suspending ----------------------------------------------------------------------------------


@pytest.mark.req("X23")
@pytest.mark.parametrize(
    ("ours", "theirs", "heard"),
    [(False, False, False), (True, True, True), (True, False, True), (False, True, True)],
)
def test_closed_is_what_either_side_said(ours: bool, theirs: bool, heard: bool) -> None:
    engine = begun()
    endpoint = Recorder()
    link = requested(engine, attach())
    link.accept(endpoint)
    link.detach(closed=ours)
    engine.receive(frame(Detach(0, theirs)), 0.0)
    assert endpoint.detached == [(None, heard)]
    check(engine)


@pytest.mark.req("X23")
def test_a_suspended_link_keeps_what_is_unsettled_and_its_name_is_free() -> None:
    joined, session = joined_session(on_attach=lambda link: link.accept(Recorder(credit=9)))
    endpoint = Recorder()
    link = session.attach_sender("l", endpoint, target=Q)
    joined.pump()
    kept = [link.send(b"1"), link.send(b"2")]
    unfinished = link.send(b"3", more=True)
    joined.pump()
    unfinished.write(b"never leaves")
    link.detach(closed=False)
    joined.pump()
    assert endpoint.detached == [(None, False)]
    assert link.unsettled == [*kept, unfinished]
    (far,) = joined.links
    # The receiver has nothing of a message that it did not get whole.
    assert [d.payload for d in far.unsettled] == [b"1", b"2"]
    again = session.attach_sender("l", Recorder(), target=Q)
    joined.pump()
    again.send(b"4")
    joined.pump()
    assert [d.payload for d in joined.links[1].endpoint.deliveries] == [b"4"]
    check(joined.client)
    check(joined.server)
