"""Messages in fragments, and their resumption. One test for each rule."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from amqp_rt_amqp010 import Front
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.layouts import (
    ErrorCode,
    ExecutionResult,
    FragmentProperties,
    MessageAccept,
    MessageReject,
    MessageResume,
    MessageResumeResult,
    SessionCompleted,
)
from amqp_rt_amqp010.limits import (
    CHUNK_COST,
    FRAGMENTED_MAX,
    FRAGMENTED_OCTETS_MAX,
    FRAGMENTED_USER_MAX,
    FRAGMENTED_USER_OCTETS_MAX,
    RESUME_TTL_MAX,
)
from amqp_rt_amqp010.partial_messages import PartialMessage, PartialMessages
from broker010 import Publishing, World, transfer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scenes010 import ranges

from amqp_rt.fronts import DEFAULT_LIMITS, QueueDeclaration

EXPLICIT = 0
FIRST = FragmentProperties(first=True, last=False)
MIDDLE = FragmentProperties(first=False, last=False)
LAST = FragmentProperties(first=False, last=True)


def completed(last: int) -> SessionCompleted:
    return SessionCompleted(commands=ranges((0, last)))


@pytest.fixture
def world() -> World:
    return World()


def opened(world: World, name: bytes = b"s", **options: Any) -> Publishing:
    made = world.publisher(name=name, **options)
    made.context.topology.declare_queue(QueueDeclaration(name="q"))
    return made


@pytest.fixture
def session(world: World) -> Publishing:
    return opened(world)


def bodies(world: World) -> list[bytes]:
    return [bytes(each.body) for each in world.consumer("q").contents()]


def offset_of(session: Publishing, resume_id: str | None, destination: str | None = None) -> int:
    """Return the result of ``message.resume``."""
    result, _ = session.command(MessageResume(destination=destination, resume_id=resume_id))
    assert isinstance(result, ExecutionResult)
    assert isinstance(result.value, MessageResumeResult)
    assert result.value.offset is not None
    return result.value.offset


def test_fragments_are_one_message(world: World, session: Publishing) -> None:
    assert session.send(b"one", key="q", fragment=FIRST) == [completed(0)]
    assert session.send(b"-two", fragment=MIDDLE) == [completed(1)]
    assert world.available("q") == 0
    assert session.send(b"-three", fragment=LAST) == [completed(2)]
    assert bodies(world) == [b"one-two-three"]
    assert len(world.partials) == world.partials.octets == 0


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_message_is_the_same_however_it_is_cut(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)))
    ends = list(zip([0, *cuts], [*cuts, len(body)], strict=True))
    world = World()
    session = opened(world)
    for at, (start, end) in enumerate(ends):
        fragment = FragmentProperties(first=at == 0, last=at == len(ends) - 1)
        key = "q" if at == 0 else None
        session.send(body[start:end], key=key, fragment=fragment)
    assert bodies(world) == [body]


def test_all_fragments_are_accepted_with_the_last(world: World, session: Publishing) -> None:
    session.send(b"1", key="q", fragment=FIRST, accept=EXPLICIT)
    session.send(b"whole", key="q", to="amq.fanout")
    sent = session.send(b"2", fragment=LAST, accept=EXPLICIT)
    assert sent == [MessageAccept(transfers=ranges((0, 0), (2, 2))), completed(2)]


def test_all_fragments_of_an_unroutable_message_are_rejected(session: Publishing) -> None:
    session.send(b"1", key="nowhere", fragment=FIRST, accept=EXPLICIT)
    sent = session.send(b"2", fragment=LAST, accept=EXPLICIT)
    assert isinstance(sent[0], MessageReject)
    assert sent[0].transfers == ranges((0, 1))


def test_messages_to_several_destinations_may_alternate(world: World, session: Publishing) -> None:
    session.context.topology.bind_queue("q", "amq.fanout", "", {})
    session.send(b"a1", key="q", fragment=FIRST)
    session.send(b"b1", to="amq.fanout", fragment=FIRST)
    session.send(b"a2", fragment=LAST)
    session.send(b"b2", to="amq.fanout", fragment=LAST)
    assert bodies(world) == [b"a1a2", b"b1b2"]


@pytest.mark.parametrize(
    ("fragments", "code"),
    [
        ([MIDDLE], ErrorCode.ILLEGAL_STATE),
        ([LAST], ErrorCode.ILLEGAL_STATE),
        ([FIRST, FIRST], ErrorCode.ILLEGAL_STATE),
        ([FragmentProperties(first=True, last=False, fragment_size=2)], ErrorCode.INVALID_ARGUMENT),
    ],
    ids=["middle", "last", "first-again", "size"],
)
def test_fragments_have_their_order_and_size(
    world: World, session: Publishing, fragments: list[FragmentProperties], code: ErrorCode
) -> None:
    session.feed(*(transfer(b"x", key="q", fragment=each) for each in fragments))
    assert session.channel.failure().error_code == code
    assert len(world.partials) == 0


def test_a_message_in_fragments_is_no_larger_than_others() -> None:
    world = World(replace(DEFAULT_LIMITS, message_size_max=10))
    session = opened(world)
    session.send(bytes(10), key="q", fragment=FIRST)
    session.feed(transfer(b"x", fragment=LAST))
    assert session.channel.failure().error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    assert len(world.partials) == 0


# --- resumption --------------------------------------------------------------------------------------


def test_another_session_resumes_a_message(world: World, session: Publishing) -> None:
    session.send(b"one", key="q", fragment=FIRST, resume_id="r", accept=EXPLICIT)
    session.channel.attachment.lose(world.now)
    assert session.session.ended
    again = opened(world, b"t")
    assert offset_of(again, "r") == 3
    sent = again.send(b"-two", fragment=LAST, accept=EXPLICIT)
    assert sent == [MessageAccept(transfers=ranges((1, 1))), completed(1)]
    assert bodies(world) == [b"one-two"]


@pytest.mark.parametrize("resume_id", ["other", None])
def test_an_unknown_message_is_resumed_from_its_beginning(
    world: World, session: Publishing, resume_id: str | None
) -> None:
    session.send(b"one", key="q", fragment=FIRST, resume_id="r")
    session.channel.attachment.lose(world.now)
    again = opened(world, b"t")
    assert offset_of(again, resume_id) == 0
    again.feed(transfer(fragment=LAST))
    assert again.channel.failure().error_code == ErrorCode.ILLEGAL_STATE


def test_a_message_without_a_name_ends_with_its_session(world: World, session: Publishing) -> None:
    session.send(b"one", key="q", fragment=FIRST)
    session.channel.attachment.lose(world.now)
    assert len(world.partials) == world.partials.octets == 0


def test_names_are_those_of_a_user(world: World, session: Publishing) -> None:
    session.send(b"one", key="q", fragment=FIRST, resume_id="r")
    (message,) = world.partials._named.values()
    assert world.partials.find(("h", "u"), "r") is message
    assert world.partials.find(("h", "v"), "r") is None
    assert world.partials.find(("i", "u"), "r") is None


def test_a_session_loses_a_message_that_another_one_resumes(
    world: World, session: Publishing
) -> None:
    session.send(b"one", key="q", fragment=FIRST, resume_id="r")
    again = opened(world, b"t")
    assert offset_of(again, "r") == 3
    session.feed(transfer(b"-lost", fragment=LAST))
    assert session.channel.failure().error_code == ErrorCode.ILLEGAL_STATE
    again.send(b"-two", fragment=LAST)
    assert bodies(world) == [b"one-two"]


def test_a_message_begins_anew_with_its_name(world: World, session: Publishing) -> None:
    session.send(b"one", key="q", fragment=FIRST, resume_id="r")
    session.channel.attachment.lose(world.now)
    again = opened(world, b"t")
    again.send(b"new", key="q", fragment=FIRST, resume_id="r")
    again.send(b"-end", fragment=LAST)
    assert bodies(world) == [b"new-end"]
    assert len(world.partials) == world.partials.octets == 0


def test_a_message_may_move_to_another_destination(world: World, session: Publishing) -> None:
    session.context.topology.bind_queue("q", "amq.fanout", "", {})
    session.send(b"one", key="nowhere", fragment=FIRST, resume_id="r")
    assert offset_of(session, "r", "amq.fanout") == 3
    session.send(b"-two", to="amq.fanout", fragment=LAST)
    assert bodies(world) == [b"one-two"]


def test_resume_takes_a_destination(session: Publishing) -> None:
    session.command(MessageResume(destination="nowhere", resume_id="r"))
    assert session.session.ended


def test_resume_does_not_replace_an_incomplete_message(world: World, session: Publishing) -> None:
    session.context.topology.bind_queue("q", "amq.fanout", "", {})
    session.send(b"1", key="q", fragment=FIRST, resume_id="r")
    session.send(b"2", to="amq.fanout", fragment=FIRST)
    session.command(MessageResume(destination="amq.fanout", resume_id="r"))
    assert session.session.ended


# --- time and room -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl_ms", "kept_s"),
    [(None, RESUME_TTL_MAX), (5_000, 5), (2**63, RESUME_TTL_MAX), (0, 0)],
)
def test_a_message_is_kept_for_its_time(world: World, ttl_ms: int | None, kept_s: float) -> None:
    told: list[float] = []
    partials = world.partials
    partials.on_deadline = lambda: told.append(partials.deadline)
    session = opened(world)
    session.send(b"one", key="q", fragment=FIRST, resume_id="r", resume_ttl=ttl_ms)
    assert partials.deadline == inf
    session.channel.attachment.lose(world.now)
    assert len(partials) == bool(kept_s)
    if kept_s:
        assert told == [-inf]
        partials.tick(100.0)
        assert partials.deadline == 100 + kept_s
        partials.tick(100 + kept_s - 0.1)
        assert len(partials) == 1
        partials.tick(100.0 + kept_s)
    assert len(partials) == partials.octets == 0
    assert partials.deadline == inf


def test_a_message_that_is_sent_on_has_no_time(world: World, session: Publishing) -> None:
    session.send(b"one", key="q", fragment=FIRST, resume_id="r")
    session.channel.attachment.lose(world.now)
    world.partials.tick(0.0)
    again = opened(world, b"t")
    assert offset_of(again, "r") == 3
    world.partials.tick(2.0 * RESUME_TTL_MAX)
    assert world.partials.deadline == inf
    again.send(b"-two", fragment=LAST)
    assert bodies(world) == [b"one-two"]


def begun(partials: PartialMessages, user: str, name: str | None = None) -> PartialMessage:
    made = PartialMessage(("", user), name, 60, b"")
    partials.begin(made)
    return made


def test_messages_of_one_user_are_bounded_and_of_all() -> None:
    partials = PartialMessages()
    for _ in range(FRAGMENTED_USER_MAX):
        begun(partials, "u0")
    with pytest.raises(CommandFault) as caught:
        begun(partials, "u0")
    assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    user = 0
    while len(partials) < FRAGMENTED_MAX:
        if len(partials) % FRAGMENTED_USER_MAX == 0:
            user += 1
        begun(partials, f"u{user}")
    with pytest.raises(CommandFault):
        begun(partials, "another")


def test_octets_of_one_user_are_bounded_and_of_all() -> None:
    partials = PartialMessages()
    piece = bytes(16 * 1024 * 1024 - CHUNK_COST)
    users = FRAGMENTED_OCTETS_MAX // FRAGMENTED_USER_OCTETS_MAX
    for user in range(users):
        message = begun(partials, f"u{user}")
        for _ in range(FRAGMENTED_USER_OCTETS_MAX // (len(piece) + CHUNK_COST)):
            partials.add(message, [piece])
        other = begun(partials, f"u{user}")
        with pytest.raises(CommandFault) as caught:
            partials.add(other, [b""])
        assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
        assert other.is_dropped
    assert partials.octets == FRAGMENTED_OCTETS_MAX
    with pytest.raises(CommandFault):
        partials.add(begun(partials, "another"), [b""])
    assert len(partials) == users


def test_a_front_keeps_them_until_it_closes() -> None:
    front = Front()
    partials = front._partials
    told: list[int] = []
    front.on_deadline = lambda: told.append(1)
    partials.leave(begun(partials, "u", "r"))
    assert told == [1]
    assert front.deadline == -inf
    front.tick(10.0)
    assert front.deadline == 70
    front.close()
    assert len(partials) == 0
    assert front.deadline == inf
