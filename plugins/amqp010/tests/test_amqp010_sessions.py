"""Sessions: attachment, numbers and sets of commands, resumption. One test for each rule."""

from __future__ import annotations

import pytest
from amqp_rt_amqp010.attachments import AttachmentStage
from amqp_rt_amqp010.codec import write_command
from amqp_rt_amqp010.faults import CommandFault, ConnectionFault
from amqp_rt_amqp010.layouts import (
    DetachCode,
    ErrorCode,
    ExecutionException,
    ExecutionResult,
    ExecutionSync,
    QueueDeclare,
    QueueDelete,
    QueuePurge,
    QueueQuery,
    QueueQueryResult,
    SessionAttach,
    SessionAttached,
    SessionCommandPoint,
    SessionCompleted,
    SessionConfirmed,
    SessionDetach,
    SessionDetached,
    SessionExpected,
    SessionFlush,
    SessionGap,
    SessionKnownCompleted,
    SessionRequestTimeout,
    SessionTimeout,
)
from amqp_rt_amqp010.limits import TIMELY_RANGES, TIMEOUT_MAX
from scenes010 import NAME, Channel, Scene, point, ranges
from scenes010 import assembly as assembly_of

MASK = 0xFFFF_FFFF
ALL = SessionFlush(expected=True, confirmed=True, completed=True)
NOW = QueueDeclare(queue="q")
LATER = QueueDelete(queue="q")
QUERY = QueueQuery(queue="q")
FAILS = QueuePurge(queue="q")
RESULT = QueueQueryResult(queue="q")


@pytest.fixture
def scene() -> Scene:
    return Scene()


def declare(name: str) -> QueueDeclare:
    return QueueDeclare(queue=name)


def octets(name: str) -> bytes:
    return write_command(declare(name))


def reattached(scene: Scene, expected: SessionExpected | None = None) -> Channel:
    """Attach the session again, and answer its flush."""
    made = scene.channel()
    made.control(SessionAttach(name=NAME))
    assert made.taken() == [SessionAttached(name=NAME), ALL]
    if expected is not None:
        made.control(expected)
    return made


# --- attachment --------------------------------------------------------------------------------------


@pytest.mark.req("D10", "D11")
def test_a_new_session_begins_with_command_0(scene: Scene) -> None:
    channel = scene.channel()
    channel.control(SessionAttach(name=NAME))
    assert channel.taken() == [SessionAttached(name=NAME), point(0)]


@pytest.mark.req("D10")
def test_attaching_again_to_the_same_channel_changes_nothing(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(NOW)
    channel.taken()
    channel.control(SessionAttach(name=NAME), SessionAttach(name=NAME, force=True))
    assert channel.taken() == [SessionAttached(name=NAME)] * 2
    channel.command(NOW)
    assert [number for number, _ in channel.actor.executed] == [0, 1]


@pytest.mark.req("D10")
@pytest.mark.parametrize("force", [False, True])
def test_a_channel_carries_one_session(scene: Scene, force: bool) -> None:
    channel = scene.attached()
    channel.control(SessionAttach(name=b"other", force=force))
    assert channel.refused(name=b"other") == DetachCode.TRANSPORT_BUSY
    channel.command(NOW)
    assert len(channel.actor.executed) == 1


@pytest.mark.req("D10")
def test_a_session_has_one_channel(scene: Scene) -> None:
    first, second = scene.attached(), scene.channel()
    second.control(SessionAttach(name=NAME))
    assert second.refused(name=NAME) == DetachCode.SESSION_BUSY
    assert second.attachment.stage is AttachmentStage.FREE
    first.command(NOW)
    assert len(first.actor.executed) == 1


@pytest.mark.req("D10")
def test_force_takes_a_session_from_its_channel(scene: Scene) -> None:
    first, second = scene.attached(timeout=10), scene.channel()
    first.command(NOW)
    first.taken()
    second.control(SessionAttach(name=NAME, force=True))
    assert first.refused(name=NAME) == DetachCode.SESSION_BUSY
    assert first.attachment.stage is AttachmentStage.FREE
    assert second.taken() == [SessionAttached(name=NAME), ALL]
    assert [actor.events for actor in scene.actors] == [["suspended"]]
    # The other one has the same right.
    first.control(SessionAttach(name=NAME, force=True))
    assert second.refused(name=NAME) == DetachCode.SESSION_BUSY


@pytest.mark.req("D10")
def test_force_on_a_session_without_timeout_begins_it_anew(scene: Scene) -> None:
    first, second = scene.attached(), scene.channel()
    second.control(SessionAttach(name=NAME, force=True))
    assert first.refused(name=NAME) == DetachCode.SESSION_BUSY
    assert second.taken() == [SessionAttached(name=NAME), point(0)]
    assert [actor.events for actor in scene.actors] == [["ended"], []]


@pytest.mark.req("D10")
def test_names_are_scoped_to_a_principal(scene: Scene) -> None:
    others = [scene.channel(user="v"), scene.channel(host="i"), scene.channel(user=None)]
    scene.attached()
    for channel in others:
        channel.control(SessionAttach(name=NAME))
        assert channel.taken() == [SessionAttached(name=NAME), point(0)]
    # Anonymous users are one principal.
    another = scene.channel(user=None)
    another.control(SessionAttach(name=NAME))
    assert another.refused() == DetachCode.SESSION_BUSY


@pytest.mark.req("D10")
def test_names_are_octets(scene: Scene) -> None:
    scene.attached(name=b"s")
    scene.attached(name=b"S")
    scene.attached(name=b"\xff")


@pytest.mark.req("D10")
@pytest.mark.parametrize(
    "control",
    [
        *(SessionFlush(completed=True), point(), SessionCompleted(), SessionRequestTimeout()),
        *(SessionGap(), SessionExpected(), SessionDetach(name=NAME)),
    ],
)
def test_a_free_channel_takes_attach_only(
    scene: Scene, control: SessionFlush | SessionCommandPoint
) -> None:
    channel = scene.channel()
    channel.control(control)
    assert channel.refused() == DetachCode.NOT_ATTACHED
    channel.control(SessionAttach(name=NAME))
    assert channel.taken() == [SessionAttached(name=NAME), point()]


@pytest.mark.req("D10")
def test_detached_is_never_answered(scene: Scene) -> None:
    channel = scene.channel()
    channel.control(SessionDetached(name=NAME, code=3), SessionDetached())
    assert channel.taken() == []


@pytest.mark.req("D10")
def test_commands_on_a_free_channel_are_refused_once_a_turn(scene: Scene) -> None:
    channel = scene.channel()
    channel.command(NOW, NOW, NOW)
    assert channel.refused() == DetachCode.NOT_ATTACHED
    channel.command(NOW)
    assert channel.refused() == DetachCode.NOT_ATTACHED


@pytest.mark.req("D10", "D11")
def test_commands_before_a_command_point_detach_the_session(scene: Scene) -> None:
    channel = scene.channel()
    channel.control(SessionAttach(name=NAME), SessionRequestTimeout(timeout=9))
    channel.taken()
    channel.command(NOW)
    assert channel.refused(name=NAME) == DetachCode.UNKNOWN_IDS
    assert channel.attachment.stage is AttachmentStage.FREE
    # Without any command-point there is no state to be kept.
    assert scene.actors[0].events == ["ended"]
    assert scene.actors[0].executed == []


@pytest.mark.req("D10", "D11")
def test_each_attachment_takes_a_command_point(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(NOW)
    channel.attachment.lose(scene.now)
    channel = reattached(scene, SessionExpected(commands=ranges((0, 0))))
    channel.taken()
    channel.command(NOW)
    assert channel.refused(name=NAME) == DetachCode.UNKNOWN_IDS


@pytest.mark.req("D10")
def test_detach_is_confirmed_after_what_is_complete(scene: Scene) -> None:
    channel = scene.attached()
    channel.attachment.receive_command(assembly_of(NOW), scene.now)
    channel.control(SessionDetach(name=NAME))
    assert channel.taken() == [
        SessionCompleted(commands=ranges((0, 0))),
        SessionDetached(name=NAME, code=DetachCode.NORMAL),
    ]
    assert scene.actors[0].events == ["ended"]


@pytest.mark.req("D10")
def test_detach_names_the_session_of_its_channel(scene: Scene) -> None:
    channel = scene.attached()
    channel.control(SessionDetach(name=b"other"))
    assert channel.refused(name=b"other") == DetachCode.NOT_ATTACHED
    assert channel.actor.events == []
    channel.control(SessionDetach())
    assert channel.refused(name=NAME) == DetachCode.NORMAL


@pytest.mark.req("D10")
def test_detached_of_the_peer_detaches(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.control(SessionDetached(name=b"other"))
    assert channel.attachment.session is not None
    channel.control(SessionDetached(name=NAME))
    assert channel.attachment.stage is AttachmentStage.FREE
    assert channel.taken() == []
    assert scene.actors[0].events == ["suspended"]


@pytest.mark.req("D10")
def test_a_partial_command_is_dropped_at_detach(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(NOW)
    channel.transport.has_begun = True
    channel.control(SessionDetach(name=NAME))
    assert not channel.transport.has_begun
    channel = reattached(scene)
    channel.control(ALL)
    assert channel.taken() == [SessionExpected(commands=ranges((1, 1)))]


# --- timeouts ----------------------------------------------------------------------------------------


@pytest.mark.req("D10")
@pytest.mark.parametrize(
    ("asked", "granted"),
    [(0, 0), (1, 1), (TIMEOUT_MAX, TIMEOUT_MAX), (MASK, TIMEOUT_MAX), (None, TIMEOUT_MAX)],
)
def test_a_timeout_is_granted_up_to_the_limit(
    scene: Scene, asked: int | None, granted: int
) -> None:
    channel = scene.attached()
    channel.control(SessionRequestTimeout(timeout=asked))
    assert channel.taken() == [SessionTimeout(timeout=granted)]
    channel.attachment.lose(scene.now)
    assert scene.registry.deadline == (scene.now + granted if granted else None)


@pytest.mark.req("D10")
def test_the_state_ends_when_its_time_is_up(scene: Scene) -> None:
    channel = scene.attached(timeout=10)
    channel.attachment.lose(scene.now)
    scene.pass_time(9.9)
    assert scene.actors[0].events == ["suspended"]
    scene.pass_time(0.1)
    assert scene.actors[0].events == ["suspended", "ended"]
    assert scene.registry.deadline is None
    scene.attached()


@pytest.mark.req("D10")
def test_the_time_begins_at_each_detachment(scene: Scene) -> None:
    channel = scene.attached(timeout=10)
    channel.command(NOW)
    channel.attachment.lose(scene.now)
    scene.pass_time(9)
    channel = reattached(scene)
    assert scene.registry.deadline is None
    scene.pass_time(100)
    channel.attachment.lose(scene.now)
    scene.pass_time(9)
    assert scene.actors[0].events == ["suspended", "suspended"]


@pytest.mark.req("D10")
def test_the_state_of_a_session_without_timeout_ends_with_its_channel(scene: Scene) -> None:
    scene.attached().attachment.lose(scene.now)
    assert scene.actors[0].events == ["ended"]
    scene.attached()


@pytest.mark.req("D10")
def test_closing_ends_all_states(scene: Scene) -> None:
    scene.attached(timeout=9).attachment.lose(scene.now)
    channel = scene.attached(name=b"t")
    scene.registry.close()
    assert [actor.events[-1] for actor in scene.actors] == ["ended", "ended"]
    assert scene.registry.deadline is None
    # What a handler still asks of an ended session does nothing.
    session = scene.actors[1].session
    session.complete(0)
    session.fail(CommandFault("late"))
    assert session.send(octets("q")) == -1
    assert not session.can_send
    # Nor does what still comes on the channel.
    channel.command(NOW)
    channel.control(point(5), ALL)
    channel.attachment.fail(CommandFault("too large"), scene.now)
    channel.attachment.lose(scene.now)
    assert channel.taken() == []
    assert scene.actors[1].executed == []
    assert scene.actors[1].events == ["ended"]
    assert scene.registry.detached == 0


# --- numbers and sets --------------------------------------------------------------------------------


@pytest.mark.req("D11", "D12")
@pytest.mark.parametrize("first", [0, 1, 2**31 - 1, 2**32 - 3])
def test_commands_are_numbered_from_the_command_point(scene: Scene, first: int) -> None:
    channel = scene.attached(at=first)
    channel.command(NOW, NOW, NOW, NOW, NOW)
    numbers = [number for number, _ in channel.actor.executed]
    assert numbers == [(first + step) & MASK for step in range(5)]
    assert channel.taken() == [SessionCompleted(commands=ranges((first, numbers[-1])))]


@pytest.mark.req("D11")
def test_a_command_point_may_change_until_the_first_command(scene: Scene) -> None:
    channel = scene.attached(at=7)
    channel.control(point(9), point(3))
    channel.command(NOW)
    channel.control(point(5))
    exception = channel.failure()
    assert exception.error_code == ErrorCode.INVALID_ARGUMENT
    assert exception.command_id is None


@pytest.mark.req("D12")
def test_completed_is_the_whole_set_once_a_chunk(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(NOW, LATER, NOW)
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 0), (2, 2)))]
    channel.command(NOW)
    # Not only what is new: the peer has not said that it knows the others.
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 0), (2, 3)))]
    channel.control(SessionKnownCompleted(commands=ranges((0, 0), (2, 2))))
    assert channel.taken() == []
    channel.command(NOW)
    assert channel.taken() == [SessionCompleted(commands=ranges((3, 4)))]


@pytest.mark.req("D12", "D13")
def test_a_command_that_completes_later_asks_for_a_turn(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(LATER, sync=True)
    assert channel.actor.synced == [0]
    assert channel.taken() == []
    turns = channel.transport.turns
    channel.session.complete(0)
    assert channel.transport.turns > turns
    channel.turn()
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 0)))]
    # It completes once.
    channel.session.complete(0)
    channel.turn()
    assert channel.taken() == []


@pytest.mark.req("D13")
def test_sync_completes_after_all_before_it(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(LATER, LATER, ExecutionSync(), NOW, LATER, ExecutionSync(), ExecutionSync())
    assert channel.taken() == [SessionCompleted(commands=ranges((3, 3)))]
    for number, done in [
        (4, [(3, 4)]),
        (1, [(1, 1), (3, 4)]),
        (0, [(0, 6)]),
    ]:
        channel.session.complete(number)
        channel.turn()
        assert channel.taken() == [SessionCompleted(commands=ranges(*done))]
    channel.command(ExecutionSync(), sync=True)
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 7)))]


@pytest.mark.req("D14")
def test_flush_is_answered_whatever_there_is(scene: Scene) -> None:
    channel = scene.attached(at=5)
    channel.control(SessionFlush(completed=True))
    assert channel.taken() == [SessionCompleted(commands=ranges())]
    channel.command(NOW, LATER)
    channel.taken()
    channel.control(ALL)
    done = ranges((5, 5))
    assert channel.taken() == [
        SessionExpected(commands=ranges((7, 7))),
        SessionConfirmed(commands=done),
        SessionCompleted(commands=done),
    ]
    channel.control(SessionFlush(confirmed=True))
    assert channel.taken() == [SessionConfirmed(commands=done)]


@pytest.mark.req("D10")
def test_expected_is_empty_only_without_state(scene: Scene) -> None:
    channel = scene.channel()
    channel.control(SessionAttach(name=NAME), SessionFlush(expected=True))
    assert channel.taken()[-1] == SessionExpected(commands=ranges())
    channel.control(point(3), SessionFlush(expected=True))
    assert channel.taken() == [SessionExpected(commands=ranges((3, 3)))]


@pytest.mark.req("D15")
def test_a_result_comes_before_the_completion(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(NOW, QUERY, LATER)
    assert channel.taken() == [
        ExecutionResult(command_id=1, value=RESULT),
        SessionCompleted(commands=ranges((0, 1))),
    ]
    channel.session.complete(2, RESULT)
    channel.session.complete(2, RESULT)
    channel.turn()
    assert channel.taken() == [
        ExecutionResult(command_id=2, value=RESULT),
        SessionCompleted(commands=ranges((0, 2))),
    ]


@pytest.mark.req("D15")
def test_an_exception_ends_the_session_and_its_command_never_completes(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(NOW, LATER, FAILS, NOW)
    assert channel.taken() == [
        SessionCompleted(commands=ranges((0, 0))),
        ExecutionException(
            error_code=ErrorCode.NOT_FOUND,
            command_id=2,
            class_code=FAILS.CODE >> 8,
            command_code=FAILS.CODE & 0xFF,
            field_index=0,
            description="no such queue",
        ),
        SessionDetach(name=NAME),
    ]
    actor = scene.actors[0]
    assert [number for number, _ in actor.executed] == [0, 1, 2]
    assert actor.events == ["ended"]
    # Dropped until the peer has confirmed.
    channel.command(NOW)
    channel.control(SessionFlush(completed=True), SessionRequestTimeout(timeout=5))
    actor.session.complete(1)
    channel.turn()
    assert channel.taken() == []
    channel.control(SessionAttach(name=b"t"))
    assert channel.refused() == DetachCode.TRANSPORT_BUSY
    channel.control(SessionDetached(name=NAME, code=0))
    channel.control(SessionAttach(name=NAME))
    assert channel.taken() == [SessionAttached(name=NAME), point()]
    assert len(scene.actors) == 2


@pytest.mark.req("D15")
def test_a_detach_that_crosses_ours_confirms_it(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(FAILS)
    channel.taken()
    channel.control(SessionDetach(name=NAME))
    assert channel.refused(name=NAME) == DetachCode.NORMAL
    channel.control(SessionDetached(name=NAME), SessionAttach(name=NAME))
    assert channel.taken() == [SessionAttached(name=NAME), point()]


@pytest.mark.req("D15")
def test_a_malformed_command_is_an_exception_with_its_number(scene: Scene) -> None:
    channel = scene.attached(at=8)
    made = assembly_of(NOW)
    made.content = made.content[:4] + b"\xff\xff"
    channel.attachment.receive_command(made, scene.now)
    exception = channel.failure()
    assert exception.error_code == ErrorCode.COMMAND_INVALID
    assert exception.command_id == 8
    channel = scene.attached(name=b"t", at=8)
    channel.attachment.fail(CommandFault("too large", class_code=4, command_code=1), scene.now)
    exception = channel.failure()
    assert (exception.command_id, exception.class_code, exception.command_code) == (8, 4, 1)


@pytest.mark.req("D15")
def test_an_exception_of_the_peer_ends_the_state_with_its_detach(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    number = channel.session.send(octets("q"))
    channel.command(ExecutionException(error_code=404, command_id=number))
    channel.taken()
    channel.control(SessionDetach(name=NAME))
    assert channel.refused() == DetachCode.NORMAL
    assert scene.actors[0].events == [("exception", 0), "ended"]


@pytest.mark.req("D15")
def test_results_of_the_peer_are_for_commands_that_were_sent(scene: Scene) -> None:
    channel = scene.attached()
    channel.session.send(octets("q"))
    channel.command(ExecutionResult(command_id=0, value=RESULT))
    assert channel.actor.events == [("result", 0, RESULT)]
    channel.command(ExecutionResult(command_id=1, value=RESULT))
    assert channel.failure().error_code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.req("D12")
def test_completions_of_the_peer_are_told_once_and_echoed_on_request(scene: Scene) -> None:
    channel = scene.attached()
    for name in "abc":
        channel.session.send(octets(name))
    assert channel.taken() == [declare(name) for name in "abc"]
    channel.control(
        SessionCompleted(commands=ranges((1, 1))), SessionCompleted(commands=ranges((0, 1)))
    )
    # qpid.messaging fails on a known-completed, for which it never asks.
    assert channel.taken() == []
    channel.control(SessionCompleted(commands=ranges((0, 2)), timely_reply=True))
    assert channel.taken() == [SessionKnownCompleted(commands=ranges((0, 2)))]
    assert channel.actor.events == [
        ("completed", [(1, 1)]),
        ("completed", [(0, 0)]),
        ("completed", [(2, 2)]),
    ]


@pytest.mark.req("D12")
def test_many_ranges_ask_for_a_timely_reply(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(*[LATER, NOW] * TIMELY_RANGES)
    (control,) = channel.taken()
    assert isinstance(control, SessionCompleted)
    assert control.timely_reply
    channel.control(SessionKnownCompleted(commands=ranges((1, 1))))
    channel.command(ExecutionSync())
    channel.control(SessionFlush(completed=True))
    (control,) = channel.taken()
    assert isinstance(control, SessionCompleted)
    assert not control.timely_reply


# --- gaps --------------------------------------------------------------------------------------------


@pytest.mark.req("D12")
def test_a_gap_completes_commands_that_never_come(scene: Scene) -> None:
    channel = scene.attached(at=2**32 - 1)
    channel.command(NOW)
    channel.taken()
    channel.control(SessionGap(commands=ranges((0, 4))))
    assert channel.taken() == [SessionCompleted(commands=ranges((MASK, 4)))]
    channel.command(NOW)
    assert [number for number, _ in channel.actor.executed] == [MASK, 5]


@pytest.mark.req("D12")
def test_a_gap_further_on_is_passed_when_it_is_reached(scene: Scene) -> None:
    channel = scene.attached()
    channel.control(SessionGap(commands=ranges((1, 2), (4, 4))))
    assert channel.taken() == [SessionCompleted(commands=ranges((1, 2), (4, 4)))]
    channel.control(SessionKnownCompleted(commands=ranges((1, 2), (4, 4))))
    channel.command(NOW, NOW, NOW)
    assert [number for number, _ in channel.actor.executed] == [0, 3, 5]
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 0), (3, 3), (5, 5)))]


@pytest.mark.req("D15")
def test_a_gap_over_a_command_in_execution_leaves_it_to_end(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(LATER)
    channel.control(SessionGap(commands=ranges((0, 1))))
    assert channel.taken() == [SessionCompleted(commands=ranges((1, 1)))]
    channel.session.complete(0)
    channel.turn()
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 1)))]


@pytest.mark.req("D12")
def test_a_gap_aborts_a_partial_command(scene: Scene) -> None:
    channel = scene.attached()
    channel.transport.has_begun = True
    channel.control(SessionGap(commands=ranges((1, 1))))
    assert channel.transport.has_begun
    channel.control(SessionGap(commands=ranges((0, 0))))
    assert not channel.transport.has_begun
    channel.control(point(2))
    channel.command(NOW)
    assert [number for number, _ in channel.actor.executed] == [2]


def test_a_command_point_within_a_command_is_a_fault_of_framing(scene: Scene) -> None:
    channel = scene.attached()
    channel.transport.has_begun = True
    with pytest.raises(ConnectionFault):
        channel.control(point(0))


# --- resumption --------------------------------------------------------------------------------------


@pytest.mark.req("D10")
def test_a_command_that_came_before_is_not_executed_again(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(declare("a"), QUERY, LATER)
    channel.attachment.lose(scene.now)
    channel = reattached(scene, SessionExpected(commands=ranges((0, 0))))
    assert channel.taken() == [
        point(0),
        ExecutionResult(command_id=1, value=RESULT),
        SessionCompleted(commands=ranges((0, 1))),
    ]
    channel.control(SessionKnownCompleted(commands=ranges((0, 1))))
    # It repeats all: what is complete is told again, since it does not seem to know.
    channel.control(point(0))
    channel.command(declare("a"), QUERY, LATER, declare("b"))
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 1), (3, 3)))]
    assert [number for number, _ in channel.actor.executed] == [0, 1, 2, 3]


@pytest.mark.req("D10", "D15")
def test_the_sets_of_a_resumed_session_wait_for_the_replay_of_results(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(QUERY)
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.control(ALL)
    # At once what the peer waits for; no completion before the result.
    assert channel.taken() == [SessionExpected(commands=ranges((1, 1)))]
    channel.control(SessionExpected(commands=ranges((0, 0))))
    done = ranges((0, 0))
    assert channel.taken() == [
        point(0),
        ExecutionResult(command_id=0, value=RESULT),
        SessionConfirmed(commands=done),
        SessionCompleted(commands=done),
    ]
    assert channel.actor.events == ["suspended", "resumed"]


@pytest.mark.req("D10")
@pytest.mark.parametrize(
    ("expected", "replayed"),
    [
        ([(5, 5)], [point(5)]),
        ([(3, 3)], [point(3), declare("d"), declare("e")]),
        ([(0, 0)], [point(0), *(declare(name) for name in "abcde")]),
        ([(0, 0), (2, 2), (5, 5)], [point(0), declare("a"), point(2), declare("c"), point(5)]),
        ([(1, 2), (4, 5)], [point(1), declare("b"), declare("c"), point(4), declare("e")]),
    ],
)
def test_commands_that_the_peer_expects_are_repeated(
    scene: Scene, expected: list[tuple[int, int]], replayed: list[object]
) -> None:
    channel = scene.attached(timeout=9)
    for name in "abcde":
        channel.session.send(octets(name))
    channel.attachment.lose(scene.now)
    channel = reattached(scene, SessionExpected(commands=ranges(*expected)))
    assert channel.taken() == replayed
    channel.session.send(octets("f"))
    assert channel.taken() == [declare("f")]


@pytest.mark.req("D10")
def test_what_is_not_kept_is_covered_by_a_gap(scene: Scene) -> None:
    channel = scene.attached()
    for name in "abcdef":
        if name == "c":
            channel.control(SessionRequestTimeout(timeout=9))
        channel.session.send(octets(name))
    channel.control(SessionConfirmed(commands=ranges((3, 4))))
    channel.attachment.lose(scene.now)
    channel = reattached(scene, SessionExpected(commands=ranges((1, 1))))
    assert channel.taken() == [
        SessionGap(commands=ranges((1, 1), (3, 4))),
        point(2),
        declare("c"),
        point(5),
        declare("f"),
    ]


@pytest.mark.req("D10")
def test_what_is_complete_or_confirmed_is_not_kept(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    for name in "abcd":
        channel.session.send(octets(name))
    channel.control(SessionCompleted(commands=ranges((0, 0), (2, 2))))
    channel.control(SessionConfirmed(commands=ranges((1, 1))))
    assert channel.session.sender.kept_count == 1
    # Without a timeout, nothing is.
    channel.control(SessionRequestTimeout(timeout=0))
    assert channel.session.sender.kept_count == 0
    assert channel.session.sender.octets == 0


@pytest.mark.req("D10")
def test_commands_sent_while_detached_follow_in_order(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(LATER)
    session = channel.session
    session.send(octets("a"))
    channel.attachment.lose(scene.now)
    assert not session.can_send
    session.complete(0, RESULT)
    channel = reattached(scene)
    session.send(octets("b"), urgent=True)
    assert channel.taken() == []
    channel.control(SessionExpected(commands=ranges((1, 1))))
    assert channel.taken() == [
        point(1),
        ExecutionResult(command_id=0, value=RESULT),
        declare("b"),
        SessionCompleted(commands=ranges((0, 0))),
    ]


@pytest.mark.req("D10")
def test_a_body_that_changes_is_repeated_as_it_was_sent(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    body = [b"bo", b"dy"]
    channel.session.send(octets("a"), b"", body)
    body[:] = [b"gone"]
    channel.attachment.lose(scene.now)
    channel = reattached(scene, SessionExpected(commands=ranges((0, 0))))
    assert channel.transport.bodies == [b"body"]


@pytest.mark.req("D10")
def test_a_peer_without_state_begins_anew(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(declare("old"), LATER)
    channel.session.send(octets("a"))
    channel.attachment.lose(scene.now)
    # Commands of the new session come before its answer, with numbers that the old one has seen.
    channel = reattached(scene)
    channel.control(point(0))
    channel.command(declare("new"), QUERY)
    channel.control(SessionFlush(completed=True))
    assert channel.taken() == []
    channel.control(SessionExpected(commands=ranges()))
    old, new = scene.actors
    assert old.events == ["suspended", "ended"]
    assert [command for _, command in new.executed] == [declare("new"), QUERY]
    assert channel.taken() == [
        point(0),
        ExecutionResult(command_id=1, value=RESULT),
        SessionCompleted(commands=ranges((0, 1))),
    ]
    # Completions of the old one are not those of the new one.
    old.session.complete(1)
    channel.turn()
    assert channel.taken() == []
    assert channel.session.timeout_s == 9


@pytest.mark.req("D10")
def test_commands_that_came_before_expected_are_executed_after_it(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(declare("a"))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.control(point(0))
    channel.command(declare("a"), declare("b"))
    assert len(channel.actor.executed) == 1
    channel.control(SessionGap(commands=ranges((2, 3))))
    channel.command(declare("e"))
    channel.control(SessionExpected(commands=ranges((0, 0))))
    assert [number for number, _ in channel.actor.executed] == [0, 1, 4]
    assert channel.taken() == [point(0), SessionCompleted(commands=ranges((0, 4)))]


@pytest.mark.req("D10", "D15")
def test_completions_before_expected_are_those_of_the_state_that_is_kept(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    for name in "abc":
        channel.session.send(octets(name))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    # The replies to our flush may come in any order.
    channel.control(SessionCompleted(commands=ranges((0, 1)), timely_reply=True))
    assert channel.taken() == [SessionKnownCompleted(commands=ranges((0, 1)))]
    assert channel.actor.events == ["suspended", ("completed", [(0, 1)])]
    # Complete commands are not repeated, even if they are expected.
    channel.control(SessionExpected(commands=ranges((1, 3))))
    assert channel.taken() == [SessionGap(commands=ranges((1, 1))), point(2), declare("c")]


@pytest.mark.req("D15")
def test_a_completion_before_expected_follows_the_result_that_waits(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.session.send(octets("a"))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.control(point(0))
    channel.command(ExecutionResult(command_id=0, value=RESULT))
    channel.control(SessionCompleted(commands=ranges((0, 0)), timely_reply=True))
    # The reply does not wait with it.
    assert channel.taken() == [SessionKnownCompleted(commands=ranges((0, 0)))]
    assert channel.actor.events == ["suspended"]
    channel.control(SessionExpected(commands=ranges((1, 1))))
    assert channel.actor.events == [
        "suspended",
        ("result", 0, RESULT),
        ("completed", [(0, 0)]),
        "resumed",
    ]
    assert channel.taken() == [point(1), SessionCompleted(commands=ranges((0, 0)))]


@pytest.mark.req("D10")
def test_a_new_peer_that_completes_nothing_before_expected(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.session.send(octets("old"))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.control(point(0))
    channel.command(declare("new"))
    channel.control(SessionCompleted(commands=ranges()), SessionExpected(commands=ranges()))
    old, new = scene.actors
    assert old.events == ["suspended", "ended"]
    assert new.executed == [(0, declare("new"))]
    assert channel.taken() == [point(0), SessionCompleted(commands=ranges((0, 0)))]


@pytest.mark.req("D10", "D15")
@pytest.mark.parametrize("new", [True, False])
def test_completions_before_expected_of_what_was_not_sent(scene: Scene, new: bool) -> None:
    channel = scene.attached(timeout=9)
    channel.session.send(octets("old"))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.control(point(0))
    if new:
        channel.command(declare("new"))
    number = 0 if new else 1
    channel.control(SessionCompleted(commands=ranges((number, number))))
    # It is not known yet which session is meant; a new one has sent nothing.
    assert channel.taken() == []
    channel.control(SessionExpected(commands=ranges() if new else ranges((1, 1))))
    assert channel.failure().error_code == ErrorCode.INVALID_ARGUMENT
    assert scene.actors[-1].events[-1] == "ended"


@pytest.mark.req("D15")
def test_a_failure_of_a_detached_session_is_told_when_it_resumes(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(LATER, QUERY)
    session = channel.session
    channel.attachment.lose(scene.now)
    session.fail(CommandFault("gone", ErrorCode.RESOURCE_DELETED), 0)
    session.fail(CommandFault("again"), 0)
    channel = reattached(scene)
    channel.command(NOW)
    channel.control(SessionExpected(commands=ranges((0, 0))))
    sent = channel.taken()
    assert sent[:3] == [
        point(0),
        ExecutionResult(command_id=1, value=RESULT),
        SessionCompleted(commands=ranges((1, 1))),
    ]
    assert isinstance(sent[3], ExecutionException)
    assert (sent[3].error_code, sent[3].command_id) == (ErrorCode.RESOURCE_DELETED, 0)
    assert sent[4:] == [SessionDetach(name=NAME)]
    assert scene.actors[0].events == ["suspended", "resumed", "ended"]
    assert len(scene.actors[0].executed) == 2


@pytest.mark.req("D15")
def test_a_failure_of_a_session_that_the_peer_forgot_is_not_told(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(LATER)
    session = channel.session
    channel.attachment.lose(scene.now)
    session.fail(CommandFault("gone"), 0)
    channel = reattached(scene)
    channel.control(point(0))
    channel.command(NOW)
    channel.control(SessionExpected())
    assert channel.taken() == [point(0), SessionCompleted(commands=ranges((0, 0)))]


@pytest.mark.req("D12", "D15")
def test_a_failed_session_is_told_of_no_completion_whose_result_it_dropped(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.session.send(write_command(QUERY))
    channel.session.send(octets("a"))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    # The exception waits for the replay, and that for room.
    channel.transport.room_for, channel.transport.has_room = 0, False
    channel.control(SessionExpected(commands=ranges((0, 0))))
    channel.session.fail(CommandFault("gone"))
    channel.control(point(0))
    channel.command(ExecutionResult(command_id=0, value=RESULT))
    channel.control(SessionCompleted(commands=ranges((0, 0))))
    assert channel.actor.events == ["suspended"]
    channel.taken()
    channel.transport.room_for, channel.transport.has_room = None, True
    channel.turn()
    sent = channel.taken()
    assert sent[:2] == [point(1), declare("a")]
    assert isinstance(sent[2], ExecutionException)
    assert sent[3:] == [SessionDetach(name=NAME)]
    assert scene.actors[0].events == ["suspended", "resumed", "ended"]


@pytest.mark.req("D10")
def test_replay_goes_on_as_there_is_room(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    for name in "abcde":
        channel.session.send(octets(name))
    channel.command(NOW)
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.transport.room_for = 3
    channel.control(SessionExpected(commands=ranges((0, 0))))
    assert channel.taken() == [point(0), declare("a"), declare("b")]
    assert not channel.session.can_send
    # In its place, behind those that wait.
    channel.session.send(octets("f"))
    # Completed meanwhile, and not repeated.
    channel.control(SessionCompleted(commands=ranges((3, 3))))
    assert channel.taken() == []
    channel.transport.room_for, channel.transport.has_room = None, True
    channel.turn()
    assert channel.taken() == [
        declare("c"),
        point(4),
        declare("e"),
        declare("f"),
        SessionCompleted(commands=ranges((0, 0))),
    ]
    assert channel.session.can_send
    assert channel.actor.events[-1] == "resumed"


@pytest.mark.req("D10")
def test_a_timeout_of_0_during_replay_drops_nothing_that_is_due(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    for name in "abc":
        channel.session.send(octets(name))
    channel.attachment.lose(scene.now)
    channel = reattached(scene)
    channel.control(SessionRequestTimeout(timeout=0), SessionExpected(commands=ranges((1, 1))))
    assert channel.taken() == [
        SessionTimeout(timeout=0),
        point(1),
        declare("b"),
        declare("c"),
    ]
    assert channel.session.sender.kept_count == 0
