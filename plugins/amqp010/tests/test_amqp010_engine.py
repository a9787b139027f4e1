"""The engine by its octets: login, stages, frames, heartbeats, closes, order."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from amqp_rt_amqp010.layouts import CONTROLS
from amqp_rt_amqp010.lifecycle import TRANSITIONS, Stage
from amqp_rt_amqp010.limits import CHANNELS_MAX, HEARTBEAT_MAX
from hypothesis import given
from hypothesis import strategies as st
from octets010 import HEADER, Operation, frame, frames
from protocol010 import Login, Session
from worlds010 import Client, World

from amqp_rt.events import Closed, ConnectionFailed, Opened
from amqp_rt.fronts import Error, Limits


def octets_of(name: str, channel: int = 0, /, **fields: Any) -> bytes:
    dashed = {key.replace("_", "-"): value for key, value in fields.items()}
    return b"".join(frames(Operation(name, dashed).segments(), channel, 4000))


def closed_with(client: Client, code: int) -> None:
    """The connection was closed with *code*, and the peer's answer ends it."""
    close = client.wire.close_of_broker
    assert close is not None
    assert close.reply_code == code, close.reply_text
    # After a fault of framing not even the answer is read.
    if not client.engine.finished:
        assert client.engine.stage is Stage.CLOSING
        client.lose()
    assert client.engine.finished


def at_stage(stage: Stage) -> Client:
    """A connection that waits for the input of *stage*."""
    world = World()
    if stage in (Stage.RUNNING, Stage.CLOSING):
        client = world.connect()
        if stage is Stage.CLOSING:
            client.reads = False
            client.engine.close()
            client.pump()
        assert client.engine.stage is stage
        return client
    by_hand = {
        Stage.HEADER: [],
        Stage.START: ["connection.start"],
        Stage.LOGIN: [],
        Stage.SECURE: ["connection.secure"],
        Stage.TUNE: ["connection.tune"],
        Stage.OPEN: ["connection.tune"],
    }[stage]
    client = world.connect(opened=False, wire={"by_hand": by_hand})
    client.lets_in = stage not in (Stage.LOGIN, Stage.SECURE)
    if stage is not Stage.HEADER:
        client.wire.start()
        client.pump()
    if stage is Stage.SECURE:
        client.logins[0].exchange.challenge(b"more")
        client.pump()
    if stage is Stage.OPEN:
        client.say("connection.tune-ok", channel_max=10, max_frame_size=65535)
    assert client.engine.stage is stage
    return client


# --- header and login -----------------------------------------------------------------------------


@pytest.mark.req("D1")
@pytest.mark.parametrize("header", [b"AMQP\x00\x00\x09\x01", b"AMQP\x01\x01\x00\x09", b"GET / HT"])
def test_another_header_is_answered_with_ours(header: bytes) -> None:
    client = World().connect(opened=False)
    client.reads = False
    client.feed(header)
    assert b"".join(client.output) == HEADER
    assert client.engine.finished
    assert isinstance(client.events[-1], ConnectionFailed)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_login_in_pieces_of_every_size(size: int) -> None:
    client = World().connect(
        opened=False, wire={"by_hand": ["connection.start", "connection.tune"]}
    )
    said = [
        HEADER + octets_of("connection.start-ok", mechanism="ANONYMOUS", locale="en_US"),
        octets_of("connection.tune-ok", channel_max=5, max_frame_size=4096)
        + octets_of("connection.open", virtual_host="/")
        + octets_of("session.attach", 4, name=b"s")
        + octets_of("session.command-point", 4, command_id=0, command_offset=0),
    ]
    client.wire.channel_max = 5
    for part in said:
        for at in range(0, len(part), size):
            client.feed(part[at : at + size])
    assert client.wire.opened
    assert [type(event) for event in client.events[1:]] == [Opened]
    (attached,) = client.received("session.attached")
    assert attached.channel == 4


def test_the_answer_begins_with_our_header() -> None:
    client = World().connect()
    assert client.wire.server_header == HEADER
    (start,) = client.received("connection.start")
    assert start.locales.items == ["en_US"]
    assert start.mechanisms.items == ["ANONYMOUS", "PLAIN"]


@pytest.mark.parametrize(
    ("mechanisms", "required", "login", "asked"),
    [
        (("ANONYMOUS",), True, Login.anonymous(), ("ANONYMOUS", None)),
        (("ANONYMOUS",), True, Login.anonymous(b""), ("ANONYMOUS", b"")),
        (("ANONYMOUS",), True, Login.plain("a", "b"), ("ANONYMOUS", b"")),
        (("PLAIN",), True, Login.plain("a", "b"), ("PLAIN", b"\0a\0b")),
        (("PLAIN",), True, Login("PLAIN"), ("PLAIN", None)),
        (("EXTERNAL",), True, Login.external(b""), ("EXTERNAL", b"")),
    ],
    ids=["anonymous", "trace", "plain for anonymous", "plain", "absent", "external"],
)
def test_logins_are_passed_on_as_they_are(
    mechanisms: tuple[str, ...], required: bool, login: Login, asked: tuple[str, bytes | None]
) -> None:
    client = World().connect(wire={"login": login}, mechanisms=mechanisms, sasl_required=required)
    assert [(each.mechanism, each.response) for each in client.logins] == [asked]


def test_plain_without_any_mechanism_needs_no_login() -> None:
    login = Login.plain("a", "b")
    client = World().connect(wire={"login": login}, mechanisms=(), sasl_required=False)
    assert client.logins == []
    assert client.engine.peer.user is None


def test_a_mechanism_may_ask_for_more() -> None:
    login = Login("SCRAM-SHA-256", b"first", lambda challenge: b"to " + challenge)
    client = World().connect(opened=False, wire={"login": login}, mechanisms=("SCRAM-SHA-256",))
    client.lets_in = False
    client.wire.start()
    client.pump()
    client.logins[0].exchange.challenge(b"more")
    client.pump()
    assert [each.response for each in client.logins] == [b"first", b"to more"]
    client.logins[1].exchange.succeed("ada")
    client.pump()
    assert client.wire.opened
    assert client.engine.peer.user == "ada"


@pytest.mark.parametrize("mechanism", ["ANONYMOUS", "", "x" * 255])
def test_a_mechanism_that_is_not_offered_can_only_fail(mechanism: str) -> None:
    login = Login(mechanism, b"response")
    client = World().connect(opened=False, wire={"login": login}, mechanisms=("PLAIN",))
    client.wire.start()
    client.pump()
    assert client.logins[0].exchange.refused
    assert client.engine.finished
    assert client.wire.close_of_broker is None
    assert client.engine.error is not None
    assert client.engine.error.condition == "amqp:unauthorized-access"


def test_a_response_that_is_too_large_can_only_fail() -> None:
    limits = Limits(sasl_response_max=10)
    login = Login("PLAIN", bytes(11))
    client = World(limits).connect(opened=False, wire={"login": login}, mechanisms=("PLAIN",))
    client.wire.start()
    client.pump()
    assert client.logins[0].response is None
    closed_with(client, 320)


def test_a_failed_login_closes_the_connection() -> None:
    client = World().connect(opened=False)
    client.lets_in = False
    client.wire.start()
    client.pump()
    client.logins[0].exchange.fail()
    client.pump()
    closed_with(client, 320)
    assert isinstance(client.events[-1], ConnectionFailed)


# --- tune and open --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"channel-max": CHANNELS_MAX},
        {"heartbeat": HEARTBEAT_MAX + 1},
    ],
    ids=["channel-max", "heartbeat"],
)
def test_more_than_was_offered_ends_without_a_handshake(fields: dict[str, int]) -> None:
    # The frame size offered is the greatest that the field can have.
    limits = Limits(channel_max=10)
    client = World(limits).connect(opened=False, wire={"tune_ok": fields})
    client.wire.start()
    client.pump()
    assert client.engine.finished
    assert client.wire.close_of_broker is None


def test_a_larger_frame_than_was_offered_ends_without_a_handshake() -> None:
    client = World(Limits(frame_size_max=8192)).connect(
        opened=False, wire={"tune_ok": {"max-frame-size": 8193}}
    )
    client.wire.start()
    client.pump()
    assert client.engine.finished
    assert client.wire.close_of_broker is None


def test_the_least_frame_size_is_that_of_the_standard() -> None:
    client = World().connect(wire={"tune_ok": {"max-frame-size": 4096}})
    assert client.engine.frame_max_out == 4096
    client = World().connect(opened=False, wire={"tune_ok": {"max-frame-size": 4095}})
    client.wire.start()
    client.pump()
    closed_with(client, 501)


def test_absent_values_are_the_offered_ones() -> None:
    client = at_stage(Stage.TUNE)
    client.say("connection.tune-ok")
    client.say("connection.open")
    assert client.wire.opened
    assert client.engine.frame_max_out == 65535


@pytest.mark.parametrize(
    ("opened", "size", "fits"),
    [(False, 8192, True), (False, 8193, False), (True, 10_000, True), (True, 10_001, False)],
)
def test_frames_grow_with_the_stages(opened: bool, size: int, fits: bool) -> None:
    client = at_stage(Stage.TUNE)
    client.say("connection.tune-ok", channel_max=1, max_frame_size=10_000)
    if opened:
        client.say("connection.open")
        assert client.wire.opened
    client.feed(frame(bytes(size - 12), flags=0x0A)[:12])
    assert client.engine.stage is (
        (Stage.RUNNING if opened else Stage.OPEN) if fits else Stage.CLOSING
    )


@pytest.mark.parametrize("host", [None, "", "/"])
def test_the_default_virtual_host_has_many_names(host: str | None) -> None:
    client = World().connect(wire={"virtual_host": host})
    opened = next(event for event in client.events if isinstance(event, Opened))
    assert opened.peer.virtual_host == ""


def test_an_unknown_virtual_host_is_an_invalid_path() -> None:
    client = at_stage(Stage.OPEN)
    client.engine.receive(octets_of("connection.open", virtual_host="nowhere"), client.world.now)
    assert client.engine.peer.virtual_host == "vhost:nowhere"
    client.engine.close(Error("amqp:not-found", "there is no such host"))
    client.pump()
    assert not client.wire.opened
    closed_with(client, 402)


def test_no_frame_is_handled_before_the_container_has_accepted() -> None:
    client = at_stage(Stage.OPEN)
    client.engine.receive(
        octets_of("connection.open") + octets_of("session.attach", 0, name=b"s"), client.world.now
    )
    client.engine.close(Error("amqp:unauthorized-access", "not for you"))
    client.pump()
    assert client.received("session.attached") == []
    closed_with(client, 320)


# --- stages ---------------------------------------------------------------------------------------

_STAGES = [stage for stage in Stage if stage not in (Stage.CLOSED, Stage.HEADER)]


@pytest.mark.parametrize("stage", _STAGES, ids=lambda stage: str(stage.name))
@pytest.mark.parametrize("name", sorted(each.NAME for each in CONTROLS.values()))
def test_stages_crossed_with_controls(stage: Stage, name: str) -> None:
    client = at_stage(stage)
    allowed = {each.NAME for each in TRANSITIONS[stage]}
    if name in allowed or (name.startswith("session.") and stage is Stage.RUNNING):
        return
    client.feed(octets_of(name))
    if stage is Stage.CLOSING:
        assert client.engine.stage is Stage.CLOSING
    else:
        closed_with(client, 501)


@pytest.mark.parametrize("name", ["connection.heartbeat", "connection.close", "connection.open"])
def test_controls_of_connections_come_on_channel_0(name: str) -> None:
    client = World().connect()
    client.feed(octets_of(name, 1))
    closed_with(client, 501)


@pytest.mark.parametrize("stage", [Stage.START, Stage.TUNE, Stage.OPEN], ids=lambda s: str(s.name))
def test_commands_come_when_the_connection_is_open(stage: Stage) -> None:
    client = at_stage(stage)
    client.feed(octets_of("execution.sync", 0))
    closed_with(client, 501)


@pytest.mark.parametrize("stage", [Stage.START, Stage.TUNE, Stage.OPEN], ids=lambda s: str(s.name))
@pytest.mark.parametrize("name", ["message.transfer", "session.attach"])
def test_nothing_of_a_stranger_is_held(stage: Stage, name: str) -> None:
    client = at_stage(stage)
    client.feed(frame(b"", kind=int(name == "message.transfer"), channel=1, flags=0x0A))
    assert client.engine.assembler.held == 0
    closed_with(client, 501)


def test_a_client_without_channels_has_channel_0() -> None:
    """Controls of connections need it, and a session may share it."""
    for number in (0, 1):
        client = World().connect(wire={"tune_ok": {"channel-max": 0}})
        assert client.wire.opened
        client.feed(octets_of("session.attach", number, name=b"s"))
        if number:
            closed_with(client, 501)
        else:
            (attached,) = client.received("session.attached")
            assert attached.channel == 0


def test_channels_have_numbers_below_the_agreed_one() -> None:
    for number, code in ((4, None), (5, 501)):
        client = World().connect(wire={"tune_ok": {"channel-max": 5}})
        client.feed(octets_of("session.attach", number, name=b"s"))
        close = client.wire.close_of_broker
        assert (None if close is None else close.reply_code) == code


@pytest.mark.parametrize(
    "octets",
    [
        b"\x1f" + bytes(11),
        b"\x0f\x04\x00\x0c" + bytes(8),
        b"\x0f\x00\x00\x0b" + bytes(8),
        b"\x0f\x00\x00\x0c\x00\x02" + bytes(6),
        b"\x0f\x00\x00\x0c\x01\x00" + bytes(6),
        b"\x0f\x00\x00\x0c\x00\x00\x00\x00\x00\x00\x00\x01",
        b"\x0f\x00\x00\x0c" + bytes(8),
        b"\x0f\x00\x00\x0e" + bytes(8) + b"\x01\x7f",
        b"\x05\x00\x00\x0e" + bytes(8) + b"\x01\x0a",
        b"\x0f\x01\x00\x0e" + bytes(8) + b"\x01\x0a",
    ],
    ids=["flags", "type", "size", "track", "reserved", "last", "empty", "unknown", "first", "kind"],
)
def test_faults_of_frames_close_the_connection(octets: bytes) -> None:
    client = World().connect()
    client.feed(octets)
    closed_with(client, 501)


def test_data_without_a_session_is_refused_once() -> None:
    client = World().connect()
    client.feed(octets_of("execution.sync", 3) * 5)
    (detached,) = client.received("session.detached")
    assert (detached.channel, detached.code) == (3, 3)
    assert client.engine.sessions == {}


@given(data=st.binary(max_size=200))
def test_no_octets_break_the_engine(data: bytes) -> None:
    client = World().connect()
    client.session()
    client.feed(data)
    assert client.engine.stage in (Stage.RUNNING, Stage.CLOSING, Stage.CLOSED)


# --- time -----------------------------------------------------------------------------------------


def test_a_silent_client_is_left_after_two_intervals() -> None:
    world = World()
    client = world.connect(wire={"heartbeat_s": 10})
    world.pass_time(19, client)
    assert not client.engine.finished
    client.say("connection.heartbeat")
    world.pass_time(19.5, client)
    assert not client.engine.finished
    world.pass_time(0.5, client)
    assert client.engine.finished
    assert client.wire.close_of_broker is None


def test_heartbeats_go_out_when_nothing_else_does() -> None:
    world = World()
    client = world.connect(wire={"heartbeat_s": 10})
    for _ in range(20):
        world.pass_time(2.5, client)
        client.say("connection.heartbeat")
    assert len(client.received("connection.heartbeat")) == 10


@pytest.mark.parametrize("asked", [None, 0])
def test_without_heartbeats_silence_is_no_fault(asked: int | None) -> None:
    world = World()
    client = world.connect(wire={"heartbeat_s": asked})
    assert client.engine.deadline == inf
    world.pass_time(100_000, client)
    assert not client.engine.finished


def test_a_connection_that_is_not_opened_in_time_ends() -> None:
    client = at_stage(Stage.TUNE)
    client.world.pass_time(client.world.limits.handshake_s, client)
    assert client.engine.finished


# --- closes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 200),
        (Error("amqp:connection:forced", "restart"), 320),
        (Error("amqp:connection:framing-error", "x"), 501),
        (Error("amqp:not-found", "a node"), 320),
        (Error("amqp:internal-error", "é" * 300), 320),
    ],
    ids=["none", "forced", "framing", "not-found", "long"],
)
def test_we_close_with_a_code_for_the_condition(error: Error | None, code: int) -> None:
    client = World().connect()
    client.session()
    client.engine.close(error)
    client.pump()
    closed_with(client, code)
    assert client.engine.sessions == {}


@pytest.mark.parametrize("code", [None, 200, 320, 501, 999])
def test_the_client_closes(code: int | None) -> None:
    client = World().connect()
    client.session()
    client.say("connection.close", reply_code=code, reply_text="bye")
    assert client.wire.closed
    assert client.engine.finished
    closed = client.events[-1]
    assert isinstance(closed, Closed)
    assert (closed.error is None) == (code in (None, 200))


def test_a_client_that_does_not_answer_our_close_is_left() -> None:
    client = at_stage(Stage.CLOSING)
    client.feed(octets_of("session.attach", 0, name=b"s"))
    client.world.pass_time(client.world.limits.close_grace_s, client)
    assert client.engine.finished


def test_both_close_at_the_same_time() -> None:
    client = at_stage(Stage.CLOSING)
    client.feed(octets_of("connection.close", reply_code=200))
    assert client.engine.finished


# --- sessions and time ----------------------------------------------------------------------------


@pytest.mark.req("D10")
def test_a_session_is_kept_for_its_timeout_after_the_connection_is_gone() -> None:
    world = World()
    client = world.connect()
    session = client.session(timeout=30)
    client.run(session, "execution.sync")
    client.lose()
    assert world.front.deadline == world.now + 30
    world.pass_time(29)
    again = world.connect()
    again.resume(session)
    assert session.expected == [(1, 1)]
    assert world.front.deadline == inf
    again.lose()
    world.pass_time(30)
    assert world.front.deadline == inf
    another = world.connect()
    new = another.session()
    new.flush()
    another.pump()
    assert new.expected == [(0, 0)]


@pytest.mark.req("D14")
def test_a_flush_is_answered_within_a_command() -> None:
    """Between two frames of a transfer, while a command before it waits for memory and has not completed."""
    world = World()
    client = world.connect()
    session = client.session()
    client.run(session, "queue.declare", queue="q")
    memory = world.host.memory
    memory.held = memory.limit * 7 // 8 + 1
    waiting = session.transfer("", b"1", key="q")
    client.pump()
    large = session.command("message.transfer", destination="", body=b"x" * 20_000)
    begin, *rest = frames(large.segments(), session.channel, 4_000)
    client.wire.raw(begin)
    client.pump()
    for number in range(2):
        session.flush()
        client.wire.raw(rest[number])
        client.pump()
        # The commands to come begin with the one that has not come whole.
        assert session.expected == [(large.id, large.id)]
        assert session.confirmed == [(0, 0)]
        assert not session.is_complete(waiting)
    client.wire.raw(b"".join(rest[2:]))
    memory.held = 0
    memory.notify_waiting()
    client.pump()
    session.flush()
    client.pump()
    assert session.expected == [(3, 3)]
    assert session.confirmed == [(0, 2)]


@pytest.mark.req("D12", "D13")
def test_a_completion_leaves_with_the_command_that_carries_it() -> None:
    """The mark is in the same octets as the result; where no command goes out, in a control of its own."""
    client = World().connect()
    session = client.session()
    for name, carriers in (("queue.query", ["execution.result"]), ("execution.sync", [])):
        fields = {"queue": "q"} if carriers else {}
        session.send(name, sync=True, **fields)
        client.engine.receive(b"".join(client.wire.take()), client.world.now)
        before = len(client.wire.received)
        client.wire.receive(b"".join(client.engine.take()))
        found = [each.name for each in client.wire.received[before:]]
        assert found == [*carriers, "session.completed"]


def test_the_time_of_a_session_begins_when_its_connection_closes() -> None:
    world = World()
    client = world.connect()
    client.session(timeout=30)
    # A connection in which nothing happens: the engine's own time is old.
    world.now += 1_000
    client.engine.close()
    client.pump()
    assert world.front.deadline == world.now + 30


def test_the_front_is_told_when_its_deadline_comes_nearer() -> None:
    world = World()
    calls: list[float] = []
    world.front.on_deadline = lambda: calls.append(world.front.deadline)
    client = world.connect()
    client.session(b"long", timeout=30)
    client.session(b"short", timeout=10)
    client.lose()
    assert min(calls) == world.now + 10


def test_many_sessions_end_in_several_turns() -> None:
    world = World()
    client = world.connect()
    for number in range(12):
        client.session(b"%d" % number, timeout=5)
    client.lose()
    world.now += 5
    turns = 0
    while world.front.deadline <= world.now:
        world.front.tick(world.now)
        turns += 1
    assert turns == 3


def test_closing_the_front_ends_what_waits() -> None:
    world = World()
    client = world.connect()
    client.session(timeout=5)
    client.lose()
    world.front.close()
    assert world.front.deadline == inf


def test_management_sees_and_ends_sessions() -> None:
    client = World().connect()
    client.session(b"a", channel=3)
    session = client.session(b"b", channel=7)
    assert {number: each.channel for number, each in client.engine.sessions.items()} == {3: 3, 7: 7}
    assert client.engine.sessions[7].links == {}
    client.engine.sessions[7].end(Error("amqp:resource-deleted", "by an operator"))
    client.pump()
    assert session.exception is not None
    assert session.exception.error_code == 408
    assert list(client.engine.sessions) == [3]


def test_output_notifies_endpoints_only_if_something_waits_for_it() -> None:
    world = World(Limits(output_max=10_000))
    client = world.connect()
    session = client.session()
    client.run(session, "queue.declare", queue="q")
    for _ in range(20):
        session.transfer("", bytes(1_000), key="q")
    client.run(session, "execution.sync")
    engine = client.engine
    assert not engine.notifies
    session.send("message.subscribe", queue="q", destination="c")
    for unit in (0, 1):
        session.send("message.flow", destination="c", unit=unit, value=0xFFFFFFFF)
    client._call(b"".join(client.wire.take()))
    # The flow goes on once the subscription is attached.
    assert engine.notifies
    client._call(b"")
    # There will be room for the consumer.
    assert engine.output_size >= 10_000
    assert engine.notifies
    client.pump()
    assert len(client.received("message.transfer")) == 20
    assert not engine.notifies


def consuming(world: World) -> tuple[Client, Session]:
    """A client with an empty queue *q*, a subscription to it, and all credit."""
    client = world.connect()
    session = client.session(b"consumer")
    client.run(session, "queue.declare", queue="q")
    session.send("message.subscribe", queue="q", destination="c")
    for unit in (0, 1):
        session.send("message.flow", destination="c", unit=unit, value=0xFFFFFFFF)
    client.pump()
    return client, session


@pytest.mark.parametrize(("size", "count"), [(20_000, 1), (5_000, 2), (1_000, 10), (1_000, 11)])
def test_messages_of_others_that_fill_the_output_arrive(size: int, count: int) -> None:
    """The check of each output is in ``Client``."""
    world = World(Limits(output_max=10_000))
    client, _ = consuming(world)
    publisher = world.connect()
    session = publisher.session(b"publisher")
    for _ in range(count):
        session.transfer("", bytes(size), key="q")
    publisher.pump()
    client.pump()
    assert len(client.received("message.transfer")) == count


def test_a_connection_that_ends_with_its_output_full_is_not_due_until_its_time() -> None:
    world = World(Limits(output_max=10_000))
    client, session = consuming(world)
    engine = client.engine
    for _ in range(5):
        session.transfer("", bytes(9_000), key="q")
    client._call(b"".join(client.wire.take()))
    assert engine.output_size >= 10_000
    # No frame.
    client._call(b"\xff" * 12)
    engine.take()
    assert engine.stage is Stage.CLOSING
    assert engine.deadline == world.now + world.limits.close_grace_s


def test_a_connection_that_is_closed_before_a_queue_sends_is_not_due_until_its_time() -> None:
    world = World()
    client, _ = consuming(world)
    publisher = world.connect()
    session = publisher.session(b"publisher")
    engine = client.engine
    engine.close()
    for _ in range(300):
        session.transfer("", b"x", key="q")
    publisher.pump()
    engine.take()
    client._handle(engine.tick(world.now))
    engine.take()
    assert engine.deadline == world.now + world.limits.close_grace_s
