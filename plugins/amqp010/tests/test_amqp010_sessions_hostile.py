"""Sessions under hostile input: limits, floods, and sets of numbers that make no sense."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from amqp_rt_amqp010 import limits
from amqp_rt_amqp010.attachments import AttachmentStage
from amqp_rt_amqp010.codec import write_command
from amqp_rt_amqp010.faults import CommandFault, ConnectionFault
from amqp_rt_amqp010.layouts import (
    Command,
    Control,
    DetachCode,
    ErrorCode,
    ExecutionException,
    ExecutionResult,
    ExecutionSync,
    QueueDeclare,
    QueueDelete,
    QueuePurge,
    QueueQuery,
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
from amqp_rt_amqp010.receiving import CommandReceiver
from amqp_rt_amqp010.sending import CommandSender
from amqp_rt_amqp010.serials import RangeSet, precedes
from hypothesis import given
from hypothesis import strategies as st
from scenes010 import NAME, Channel, RecordedTransport, Scene, assembly, point, ranges

MASK = 0xFFFF_FFFF
HALF = 1 << 31
NOW = QueueDeclare(queue="q")
LATER = QueueDelete(queue="q")
QUERY = QueueQuery(queue="q")
OCTETS = write_command(NOW)
EVERYTHING = [(0, MASK)]
ALL = SessionFlush(expected=True, confirmed=True, completed=True)


class SilentTransport(RecordedTransport):
    """A channel that keeps nothing of what is sent."""

    def _add(self, item: Control | Command) -> None:
        pass

    def send_command(
        self, octets: bytes, header: bytes | None, body: Sequence[bytes] | None
    ) -> None:
        pass


@pytest.fixture
def scene() -> Scene:
    return Scene()


def resumed(scene: Scene, channel: Channel) -> Channel:
    """Detach the session of *channel*, and attach it to another, which has not answered the flush."""
    channel.attachment.lose(scene.now)
    again = scene.channel()
    again.control(SessionAttach(name=NAME))
    assert again.taken() == [SessionAttached(name=NAME), ALL]
    return again


# --- sets of numbers ---------------------------------------------------------------------------------


@pytest.mark.req("D11", "D12")
@pytest.mark.parametrize(
    "control",
    [
        *(kind(commands=ranges(*pairs)) for kind in (SessionCompleted, SessionConfirmed)
          for pairs in ([(3, 3)], EVERYTHING, [(0, 3)], [(0, 0), (9, 9)], [(3 + HALF, 3 + HALF)])),
        # Two commands have come.
        *(SessionKnownCompleted(commands=ranges(*pairs))
          for pairs in ([(2, 2)], EVERYTHING, [(0, 2)], [(2 + HALF, 2 + HALF)])),
        *(SessionGap(commands=ranges(*pairs))
          for pairs in (EVERYTHING, [(2, HALF)], [(2 + HALF, 2 + HALF)], [(HALF // 2 + 2, HALF)])),
        *(point(number) for number in (3, 1000, HALF, 2 + HALF)),
        SessionCommandPoint(command_id=2, command_offset=1),
        SessionCommandPoint(command_id=0, command_offset=2**63),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_that_cannot_be_end_the_session(scene: Scene, control: Control) -> None:
    channel = scene.attached()
    channel.command(NOW, NOW)
    for _ in range(3):
        channel.session.send(OCTETS)
    channel.taken()
    channel.control(control)
    exception = channel.failure()
    assert exception.error_code == ErrorCode.INVALID_ARGUMENT
    assert exception.command_id is None
    assert scene.actors[0].events == ["ended"]
    assert channel.attachment.stage is AttachmentStage.DETACHING


@pytest.mark.req("D10", "D11")
@pytest.mark.parametrize("pairs", [[(4, 4)], EVERYTHING, [(0, 0), (4, 9)], [(HALF + 4, HALF + 4)]])
def test_a_peer_that_expects_what_was_never_sent(
    scene: Scene, pairs: list[tuple[int, int]]
) -> None:
    channel = scene.attached(timeout=9)
    for _ in range(3):
        channel.session.send(OCTETS)
    channel = resumed(scene, channel)
    channel.control(SessionExpected(commands=ranges(*pairs)))
    assert channel.failure().error_code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.req("D11")
def test_a_gap_before_any_command_point(scene: Scene) -> None:
    channel = scene.channel()
    channel.control(SessionAttach(name=NAME), SessionGap(commands=ranges((0, 5))))
    assert channel.failure().error_code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.req("D10")
def test_a_session_that_expects_all_that_is_lost_gets_one_gap(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    session = channel.session
    session.sender.next = 1 << 30
    channel = resumed(scene, channel)
    channel.control(SessionExpected(commands=ranges((5, 5))))
    assert channel.taken() == [SessionGap(commands=ranges((5, (1 << 30) - 1))), point(1 << 30)]


@pytest.mark.req("D12")
def test_more_ranges_than_a_control_can_state_end_the_session(scene: Scene) -> None:
    channel = scene.attached()
    most = limits.RANGES_MAX
    # A gap of every second command; the last range grows past the limit with the next gap.
    channel.control(
        SessionGap(commands=RangeSet([(2 * step, 2 * step) for step in range(1, most + 1)]))
    )
    (answer,) = channel.taken()
    assert isinstance(answer, SessionCompleted)
    assert answer.commands is not None
    assert answer.commands.range_count == most
    channel.control(SessionGap(commands=ranges((5 * most, 5 * most))))
    assert channel.failure().error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.req("D12")
def test_gaps_ahead_are_bounded_though_the_peer_knows_them(scene: Scene) -> None:
    channel = scene.attached()
    most = limits.RANGES_MAX
    gap = RangeSet([(2 * step, 2 * step) for step in range(1, most + 1)])
    channel.control(SessionGap(commands=gap), SessionKnownCompleted(commands=gap))
    channel.taken()
    channel.control(SessionGap(commands=ranges((5 * most, 5 * most))))
    assert channel.failure().error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.slow
@pytest.mark.req("D12")
def test_a_peer_that_completes_every_second_command() -> None:
    transport = SilentTransport()
    sender = CommandSender()
    sender.start(transport)
    most = limits.OUTSTANDING_RANGES_MAX
    for _ in range(2 * most + 3):
        sender.send(transport, OCTETS, None, None, urgent=False)
    for first in range(0, most - 1, 8_000):
        odd = [(2 * step + 1, 2 * step + 1) for step in range(first, min(first + 8_000, most - 1))]
        assert len(sender.complete(RangeSet(odd))) == len(odd)
    assert sender.outstanding.range_count == most
    with pytest.raises(CommandFault) as caught:
        sender.complete(ranges((2 * most, 2 * most)))
    assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.req("D11", "D12")
def test_a_peer_that_never_says_known_completed_goes_round_the_circle() -> None:
    quarter = 1 << 30
    receiver = CommandReceiver()
    receiver.set_point(0)
    for step in range(1, 9):
        end = step * quarter & MASK
        # Commands by the thousand million, as a gap.
        receiver.skip(RangeSet([(receiver.received, (end - 2) & MASK)]))
        for _ in range(2):
            receiver.begin(number := receiver.arrive())
            receiver.finish(number)
        (first, last), *rest = receiver.completed.ranges()
        assert not rest
        assert last == end
        # All that is reported precedes what comes next.
        assert precedes(first, receiver.next)
        assert len(receiver.completed) <= 2 * quarter + 2


# --- bounds of what is held --------------------------------------------------------------------------


@pytest.mark.req("D10")
def test_detached_sessions_of_a_user_are_bounded(scene: Scene) -> None:
    most = limits.DETACHED_USER_MAX
    channels = [scene.attached(timeout=9, name=b"%d" % number) for number in range(most + 1)]
    for channel in channels:
        channel.attachment.lose(scene.now)
    assert scene.registry.detached == most
    # The last one was not kept; those before it were, as was granted.
    assert [actor.events for actor in scene.actors] == [["suspended"]] * most + [["ended"]]
    # While it is so, none is granted.
    channel = scene.attached(name=b"new")
    channel.control(SessionRequestTimeout(timeout=5))
    assert channel.taken() == [SessionTimeout(timeout=0)]
    # Users do not take places of others.
    other = scene.channel(user="v")
    other.control(SessionAttach(name=NAME), SessionRequestTimeout(timeout=5))
    assert other.taken()[-1] == SessionTimeout(timeout=5)
    scene.pass_time(9)
    channel.control(SessionRequestTimeout(timeout=5))
    assert channel.taken() == [SessionTimeout(timeout=5)]


@pytest.mark.slow
@pytest.mark.req("D10")
def test_detached_sessions_are_bounded_in_all(scene: Scene) -> None:
    for number in range(limits.DETACHED_MAX + 5):
        channel = scene.channel(user=f"u{number}")
        channel.control(SessionAttach(name=NAME), point(), SessionRequestTimeout(timeout=9))
        channel.attachment.lose(scene.now)
    assert scene.registry.detached == limits.DETACHED_MAX
    scene.pass_time(9)
    assert scene.registry.detached == 0
    assert all(actor.events[-1] == "ended" for actor in scene.actors)


@pytest.mark.req("D10")
def test_what_detached_sessions_hold_is_bounded(scene: Scene) -> None:
    body = [bytes(limits.REPLAY_OCTETS_MAX)]
    fit = limits.DETACHED_OCTETS_MAX // (limits.REPLAY_OCTETS_MAX + 2 * limits.SESSION_COST)
    for number in range(fit + 2):
        channel = scene.attached(timeout=9, name=b"%d" % number)
        channel.session.send(OCTETS, b"", body)
        channel.attachment.lose(scene.now)
    assert scene.registry.detached == fit
    scene.pass_time(9)
    channel = scene.attached(timeout=9)
    channel.attachment.lose(scene.now)
    assert scene.registry.detached == 1


@pytest.mark.req("D10")
@pytest.mark.parametrize(
    ("body", "count"),
    [(None, limits.REPLAY_MAX), ([bytes(1 << 20)], 4)],
    ids=["commands", "octets"],
)
def test_a_peer_that_never_completes_gets_no_more_transfers(
    scene: Scene, body: list[bytes] | None, count: int
) -> None:
    channel = scene.attached(timeout=9)
    session = channel.session
    for _ in range(count):
        assert session.can_send
        session.send(OCTETS, None, body)
    assert not session.can_send
    sent = channel.taken()
    assert len(sent) == count + 1
    assert sent[-1] == SessionFlush(confirmed=True, completed=True)
    # Results still have room.
    channel.command(QUERY)
    assert channel.taken() == [
        ExecutionResult(
            command_id=0, value=scene.actors[0].execute(9, QUERY, assembly(QUERY), sync=False)
        ),
        SessionCompleted(commands=ranges((0, 0))),
    ]
    channel.control(SessionConfirmed(commands=ranges((0, 0))))
    assert channel.actor.events == ["ready"]
    assert session.can_send


@pytest.mark.req("D10", "D15")
def test_results_that_the_peer_never_completes_end_the_session(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel.command(*[QUERY] * limits.URGENT_MAX)
    assert channel.attachment.session is not None
    channel.taken()
    channel.command(QUERY)
    exception = channel.failure()
    assert exception.error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    # Without a timeout nothing is kept, and there is no bound.
    channel = scene.attached(name=b"t")
    channel.command(*[QUERY] * (limits.URGENT_MAX + 1))
    assert len(channel.taken()) == limits.URGENT_MAX + 2


@pytest.mark.req("D10")
def test_large_results_are_bounded_by_their_octets(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    body = [bytes(limits.URGENT_OCTETS_MAX)]
    assert channel.session.send(OCTETS, None, body, urgent=True) == 0
    assert channel.session.can_send
    assert channel.session.send(OCTETS, urgent=True) == -1
    assert channel.failure().error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED


@pytest.mark.req("D11")
def test_commands_that_are_never_completed_stay_within_the_circle() -> None:
    sender = CommandSender()
    sender._outstanding_count = limits.OUTSTANDING_MAX - 1
    assert not sender.is_full
    sender.send(None, OCTETS, None, None, urgent=False)
    assert sender.is_full


@pytest.mark.req("D10")
def test_commands_before_expected_are_bounded(scene: Scene) -> None:
    channel = resumed(scene, scene.attached(timeout=9))
    large = assembly(NOW)
    large.body, large.body_size = [], 1 << 20
    channel.control(point(0))
    for _ in range(15):
        channel.attachment.receive_command(large, scene.now)
    channel.turn()
    assert channel.taken() == []
    channel.attachment.receive_command(large, scene.now)
    exception = channel.failure()
    assert exception.error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    assert channel.attachment.stage is AttachmentStage.DETACHING
    assert scene.actors[0].executed == []


@pytest.mark.req("D10")
@pytest.mark.parametrize("control", [point(1), SessionGap(commands=ranges((0, 0)))], ids=repr)
def test_a_command_is_not_cut_before_expected(scene: Scene, control: Control) -> None:
    channel = resumed(scene, scene.attached(timeout=9))
    channel.control(point(0))
    channel.transport.has_begun = True
    if isinstance(control, SessionCommandPoint):
        with pytest.raises(ConnectionFault):
            channel.control(control)
    else:
        channel.control(control)
        assert channel.failure().error_code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.req("D10")
def test_a_command_too_large_before_expected_ends_the_session(scene: Scene) -> None:
    channel = resumed(scene, scene.attached(timeout=9))
    channel.control(point(0))
    channel.command(NOW)
    fault = CommandFault("too large", ErrorCode.RESOURCE_LIMIT_EXCEEDED)
    channel.attachment.fail(fault, scene.now)
    exception = channel.failure()
    # Its number depends on what the peer expects.
    assert (exception.error_code, exception.command_id) == (fault.code, None)


@pytest.mark.parametrize("timeout", [0, 9])
def test_a_command_too_large_before_a_command_point(scene: Scene, timeout: int) -> None:
    channel = scene.channel()
    channel.attachment.fail(CommandFault("too large"), scene.now)
    assert channel.refused() == DetachCode.NOT_ATTACHED
    channel.control(SessionAttach(name=NAME), SessionRequestTimeout(timeout=timeout))
    channel.taken()
    channel.attachment.fail(CommandFault("too large"), scene.now)
    assert channel.refused() == DetachCode.UNKNOWN_IDS


def test_commands_that_waited_are_executed_in_turns(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    channel = resumed(scene, channel)
    count = limits.WAITING_TURN + 5
    channel.control(point(0))
    channel.command(*[NOW] * count)
    assert not channel.attachment.is_congested
    turns = channel.transport.turns
    channel.control(SessionExpected(commands=ranges((0, 0))))
    # The command-point waited as well.
    assert len(channel.actor.executed) == limits.WAITING_TURN - 1
    assert channel.transport.turns > turns
    # More of it can wait in its stream.
    assert channel.attachment.is_congested
    channel.command(NOW)
    assert len(channel.actor.executed) == count + 1
    assert not channel.attachment.is_congested


def test_a_command_that_waited_without_a_command_point(scene: Scene) -> None:
    channel = resumed(scene, scene.attached(timeout=9))
    channel.command(NOW)
    channel.control(SessionExpected(commands=ranges((0, 0))))
    assert channel.taken()[-1] == SessionDetached(name=NAME, code=DetachCode.UNKNOWN_IDS)


@pytest.mark.slow
def test_commands_that_never_complete_make_input_wait(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(*[LATER] * (limits.EXECUTING_MAX - 1))
    assert not channel.attachment.is_congested
    channel.command(LATER)
    assert channel.attachment.is_congested
    channel.session.complete(0)
    assert not channel.attachment.is_congested


def test_order_behind_a_command_that_never_completes_takes_no_room() -> None:
    receiver = CommandReceiver()
    receiver.set_point(0)
    receiver.begin(receiver.arrive())
    for _ in range(10_000):
        receiver.begin(number := receiver.arrive())
        receiver.finish(number)
    assert receiver.executing == 1
    assert len(receiver._order) < 100


# --- floods ------------------------------------------------------------------------------------------


@pytest.mark.req("D14")
def test_a_flood_of_flush_is_answered_once_a_chunk(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(*[LATER, NOW] * 50)
    channel.taken()
    channel.control(*[ALL] * 1_000)
    assert len(channel.taken()) == 3


@pytest.mark.req("D13")
def test_a_flood_of_sync_is_answered_once_a_chunk(scene: Scene) -> None:
    channel = scene.attached()
    channel.command(*[ExecutionSync()] * 1_000, sync=True)
    assert channel.taken() == [SessionCompleted(commands=ranges((0, 999)))]


@pytest.mark.req("D10")
@pytest.mark.parametrize("timeout", [0, 9])
def test_a_flood_of_force_leaves_one_session(scene: Scene, timeout: int) -> None:
    channels = [scene.attached(timeout=timeout), scene.channel()]
    for turn in range(1, 201):
        channels[turn % 2].control(SessionAttach(name=NAME, force=True))
        assert channels[(turn + 1) % 2].refused() == DetachCode.SESSION_BUSY
        assert len(channels[turn % 2].taken()) == 2
    assert scene.registry.detached == 0
    assert len(scene.registry._sessions) == 1
    alive = [actor for actor in scene.actors if "ended" not in actor.events]
    assert len(alive) == 1


@pytest.mark.req("D10")
def test_a_flood_of_attach_and_detach_leaves_nothing(scene: Scene) -> None:
    channel = scene.channel()
    for number in range(500):
        name = b"%d" % number
        channel.control(
            SessionAttach(name=name), SessionAttach(name=name), SessionDetach(name=name)
        )
        assert len(channel.taken()) == 4
    assert not scene.registry._sessions


@pytest.mark.req("D10")
def test_a_flood_of_resumptions_replays_as_far_as_there_is_room(scene: Scene) -> None:
    channel = scene.attached(timeout=9)
    for _ in range(100):
        channel.session.send(OCTETS)
    channel.taken()
    channel.transport.room_for = 50
    again: list[Control] = [
        SessionDetach(name=NAME),
        SessionAttach(name=NAME),
        SessionExpected(commands=ranges((0, 0))),
    ]
    channel.control(*again * 20)
    commands = [sent for sent in channel.taken() if isinstance(sent, Command)]
    assert len(commands) < 50


@pytest.mark.req("D10")
def test_a_loser_in_full_flow_is_told_once_a_turn(scene: Scene) -> None:
    first, second = scene.attached(), scene.channel()
    second.control(SessionAttach(name=NAME, force=True))
    first.taken()
    first.command(*[NOW] * 1_000)
    assert first.refused() == DetachCode.NOT_ATTACHED


# --- anything ----------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(0, 12),
    st.integers(MASK - 6, MASK),
    st.sampled_from([HALF - 1, HALF, HALF + 1, HALF // 2]),
)
SETS = st.one_of(
    st.none(),
    st.lists(st.tuples(NUMBERS, st.integers(0, 6)), max_size=4).map(
        lambda found: RangeSet([(first, (first + span) & MASK) for first, span in found])
    ),
    st.just(RangeSet(EVERYTHING)),
)
NAMES = st.sampled_from([None, b"s", b"t"])
BITS = st.booleans()
CONTROLS = st.one_of(
    st.builds(SessionAttach, name=NAMES, force=BITS),
    st.builds(SessionAttached, name=NAMES),
    st.builds(SessionDetach, name=NAMES),
    st.builds(SessionDetached, name=NAMES, code=st.integers(0, 9)),
    st.builds(SessionRequestTimeout, timeout=st.sampled_from([None, 0, 5])),
    st.builds(SessionTimeout, timeout=st.sampled_from([None, 0, 5])),
    st.builds(
        SessionCommandPoint,
        command_id=st.one_of(st.none(), NUMBERS),
        command_offset=st.sampled_from([None, 0, 0, 0, 7]),
    ),
    *(
        st.builds(kind, commands=SETS)
        for kind in (SessionExpected, SessionConfirmed, SessionKnownCompleted, SessionGap)
    ),
    st.builds(SessionCompleted, commands=SETS, timely_reply=BITS),
    st.builds(SessionFlush, expected=BITS, confirmed=BITS, completed=BITS),
)
COMMANDS = st.one_of(
    *(st.just(kind(queue="q")) for kind in (QueueDeclare, QueueDelete, QueueQuery, QueuePurge)),
    st.builds(ExecutionSync),
    st.builds(ExecutionResult, command_id=st.one_of(st.none(), NUMBERS)),
    st.builds(
        ExecutionException, error_code=st.just(404), command_id=st.one_of(st.none(), NUMBERS)
    ),
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(CONTROLS, COMMANDS, st.sampled_from(["send", "lose", "tick", "complete"])),
    ),
    max_size=25,
)


@pytest.mark.slow
@pytest.mark.req("D10", "D11", "D15")
@given(STEPS)
def test_any_input_is_answered(steps: list[tuple[int, Control | Command | str]]) -> None:
    scene = Scene()
    channels = [scene.channel(), scene.channel()]
    for which, step in steps:
        channel = channels[which]
        session = channel.attachment.session
        if isinstance(step, Control):
            channel.control(step)
        elif isinstance(step, Command):
            channel.command(step)
        elif step == "lose":
            channel.attachment.lose(scene.now)
        elif step == "tick":
            scene.pass_time(3)
        elif session is not None and step == "send":
            session.send(OCTETS, urgent=True)
        elif session is not None:
            for number in list(session.receiver._executing):
                session.complete(number)
        check(scene, channels)
    scene.registry.close()
    assert all(actor.events.count("ended") == 1 for actor in scene.actors)


def check(scene: Scene, channels: list[Channel]) -> None:
    carried = [channel.attachment.session for channel in channels]
    known = list(scene.registry._sessions.values())
    for channel, session in zip(channels, carried, strict=True):
        assert (session is not None) == (channel.attachment.stage is AttachmentStage.ATTACHED)
        if session is not None:
            assert session in known
            assert session.carrier is channel.attachment
    assert len({id(each) for each in carried if each is not None}) == sum(
        each is not None for each in carried
    )
    # Whatever is neither attached nor detached has ended.
    assert len(known) == scene.registry.detached + sum(each is not None for each in carried)
    for actor in scene.actors:
        assert ("ended" in actor.events) == (actor.session not in known)
        numbers = [number for number, _ in actor.executed]
        assert len(numbers) == len(set(numbers))
        sender = actor.session.sender
        assert sender.octets == sum(sent.size for sent in sender._kept.values())
        assert len(sender.outstanding) == sender._outstanding_count
        assert all(number in sender.outstanding for number in sender._kept)
