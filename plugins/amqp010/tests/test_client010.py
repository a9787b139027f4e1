"""The project's own client of 0-10: what it notices of a broker, replays, cuts, and does with a server of others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from client010 import Attached, Client, connected
from octets010 import HEADER, Assembler, FrameReader, Operation, Struct, frame, plain
from protocol010 import (
    CREDIT,
    NONE,
    NOT_ACQUIRED,
    Connection,
    Cut,
    Failed,
    Login,
    Session,
    Violation,
    xid,
)


class Broker:
    """The other end of a connection, of which each octet is written by the test."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._reader = FrameReader()
        self._assemblers: dict[tuple[int, int], Assembler] = {}

    def says(self, name: str, channel: int = 0, /, **words: Any) -> None:
        """Send a control or a command to the client. Words that are no fields are those of Operation."""
        own = {key: words.pop(key) for key in ("sync", "headers", "body") if key in words}
        fields = {key.rstrip("_").replace("_", "-"): each for key, each in words.items()}
        operation = Operation(name, fields, **own)
        for each in self.connection.frames_of(operation, channel):
            self.connection.receive(each)

    def hears(self) -> list[Operation]:
        """Return what the client has sent since the last call."""
        found = []
        for octets in self.connection.take():
            if octets == HEADER:
                continue
            self._reader.feed(octets)
            for each in self._reader:
                assembler = self._assemblers.setdefault((each.channel, each.track), Assembler())
                if (operation := assembler.add(each)) is not None:
                    found.append(operation)
        return found

    def opens(self, *, max_frame_size: int = 4096) -> None:
        self.connection.start()
        self.connection.receive(HEADER)
        self.says("connection.start", mechanisms=["ANONYMOUS"], locales=["en_US"])
        self.says("connection.tune", channel_max=3, max_frame_size=max_frame_size)
        self.says("connection.open-ok")
        self.hears()

    def attaches(self, session: Session) -> None:
        session.attach()
        self.says("session.attached", session.channel, name=session.name)
        self.says("session.command-point", session.channel, command_id=0, command_offset=0)
        self.hears()


@pytest.fixture
def broker() -> Broker:
    """Return the other end of an open connection."""
    found = Broker(Connection())
    found.opens()
    return found


@pytest.fixture
def session(broker: Broker) -> Session:
    """Return an attached session of that connection."""
    found = broker.connection.session(b"s")
    broker.attaches(found)
    return found


def test_login_takes_what_the_broker_permits() -> None:
    connection = Connection(Login.plain("guest", "secret"), virtual_host="v", heartbeat_s=5)
    broker = Broker(connection)
    connection.start()
    assert connection.take() == [HEADER]
    connection.receive(HEADER)
    broker.says("connection.start", mechanisms=["PLAIN"], locales=["en_US"])
    (start_ok,) = broker.hears()
    assert (start_ok.mechanism, start_ok.response) == ("PLAIN", b"\0guest\0secret")
    broker.says("connection.tune", channel_max=7, max_frame_size=5000)
    tune_ok, opening = broker.hears()
    assert (tune_ok.channel_max, tune_ok.max_frame_size, tune_ok.heartbeat) == (7, 5000, 5)
    assert opening.virtual_host == "v"
    broker.says("connection.open-ok")
    assert connection.opened


@pytest.mark.parametrize(
    ("login", "response"),
    [(Login.anonymous(), None), (Login.external(), b""), (Login.external(b"me"), b"me")],
)
def test_an_absent_response_is_not_an_empty_one(login: Login, response: bytes | None) -> None:
    broker = Broker(Connection(login))
    broker.connection.start()
    broker.connection.receive(HEADER)
    broker.says("connection.start", mechanisms=[], locales=[])
    assert broker.hears()[0].response == response


def _commands_without_point(broker: Broker, session: Session) -> None:
    other = broker.connection.session(b"other")
    broker.says("session.attached", other.channel, name=b"other")
    broker.says("execution.sync", other.channel)


def _commands_before_attached(broker: Broker, session: Session) -> None:
    other = broker.connection.session(b"other")
    broker.says("session.command-point", other.channel, command_id=0, command_offset=0)
    broker.says("execution.sync", other.channel)


def _commands_without_session(broker: Broker, session: Session) -> None:
    broker.says("execution.sync", 3)


def _another_name(broker: Broker, session: Session) -> None:
    broker.says("session.attached", session.channel, name=b"other")


def _complete_before_sent(broker: Broker, session: Session) -> None:
    broker.says("session.completed", commands=[(0, 0)])


def _complete_in_part(broker: Broker, session: Session) -> None:
    for _ in range(3):
        session.send("execution.sync")
    broker.says("session.completed", commands=[(0, 1)])
    broker.says("session.completed", commands=[(2, 2)])


def _complete_without_result(broker: Broker, session: Session) -> None:
    session.send("queue.query", queue="q")
    broker.says("session.completed", commands=[(0, 0)])


def _result_of_nothing(broker: Broker, session: Session) -> None:
    session.send("execution.sync")
    broker.says("execution.result", command_id=0)


def _result_twice(broker: Broker, session: Session) -> None:
    session.send("queue.query", queue="q")
    for _ in range(2):
        broker.says("execution.result", command_id=0, value=Struct("queue-query-result"))


def _complete_and_failed(broker: Broker, session: Session) -> None:
    session.send("execution.sync")
    broker.says("execution.exception", error_code=541, command_id=0)
    broker.says("session.completed", commands=[(0, 0)])


def _accept_of_nothing(broker: Broker, session: Session) -> None:
    broker.says("message.accept", transfers=[(0, 0)])


def _a_point_ahead(broker: Broker, session: Session) -> None:
    broker.says("session.command-point", command_id=4, command_offset=0)


def _knows_what_was_not_told(broker: Broker, session: Session) -> None:
    broker.says("session.known-completed", commands=[(0, 0)])


def _a_large_frame(broker: Broker, session: Session) -> None:
    broker.connection.receive(frame(bytes(4096 - 11)))


def _a_high_channel(broker: Broker, session: Session) -> None:
    broker.says("session.attached", 4, name=b"s")


def _a_control_for_servers(broker: Broker, session: Session) -> None:
    broker.says("connection.open")


def _a_command_for_servers(broker: Broker, session: Session) -> None:
    broker.says("queue.declare", queue="q")


def _speech_after_the_end(broker: Broker, session: Session) -> None:
    broker.says("connection.close", reply_code=200)
    broker.says("connection.heartbeat")


@pytest.mark.parametrize(
    "step",
    [
        _commands_without_point,
        _commands_before_attached,
        _commands_without_session,
        _another_name,
        _complete_before_sent,
        _complete_in_part,
        _complete_without_result,
        _result_of_nothing,
        _result_twice,
        _complete_and_failed,
        _accept_of_nothing,
        _a_point_ahead,
        _knows_what_was_not_told,
        _a_large_frame,
        _a_high_channel,
        _a_control_for_servers,
        _a_command_for_servers,
        _speech_after_the_end,
    ],
)
def test_broken_rules_are_noticed(
    broker: Broker, session: Session, step: Callable[[Broker, Session], None]
) -> None:
    with pytest.raises(Violation):
        step(broker, session)


def test_a_wrong_header_is_noticed() -> None:
    connection = Connection()
    connection.start()
    with pytest.raises(Violation):
        connection.receive(b"AMQP\x00\x00\x09\x01")


def test_known_completed_lets_the_broker_forget(broker: Broker, session: Session) -> None:
    for _ in range(4):
        session.send("execution.sync")
    broker.hears()
    broker.says("session.completed", commands=[(0, 1)], timely_reply=True)
    (known,) = broker.hears()
    assert (known.name, known.commands) == ("session.known-completed", [(0, 1)])
    broker.says("session.completed", commands=[(2, 2)])
    assert session.incomplete == {3}
    session.know(2)
    broker.says("session.completed", commands=[(3, 3)])
    assert not session.incomplete


def test_completions_can_be_withheld(broker: Broker, session: Session) -> None:
    session.completes = False
    broker.says("message.transfer", destination="d", body=b"", sync=True)
    assert broker.hears() == []
    session.complete(0)
    (completed,) = broker.hears()
    assert completed.commands == [(0, 0)]
    session.completes = True
    broker.says("message.transfer", destination="d", body=b"", sync=True)
    (completed,) = broker.hears()
    assert completed.commands == [(0, 1)]
    broker.says("session.known-completed", commands=[(0, 0)])
    session.complete()
    assert broker.hears()[0].commands == [(1, 1)]


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_commands_are_replayed_from_where_they_are_expected(broker: Broker, first: int) -> None:
    session = broker.connection.adopt(Session(b"s", first_id=first))
    broker.attaches(session)
    ids = [session.send("queue.declare", queue=f"q{number}") for number in range(5)]
    broker.says("session.completed", commands=[(ids[0], ids[0])])
    broker.connection.lost()

    again = Broker(Connection())
    again.opens()
    again.connection.adopt(session, 2)
    session.attach(point=False)
    again.says("session.attached", 2, name=b"s")
    again.says("session.flush", 2, expected=True, confirmed=True, completed=True)
    session.flush()
    sent = again.hears()
    assert [each.name.partition(".")[2] for each in sent] == [
        "attach",
        "expected",
        "confirmed",
        "completed",
        "flush",
    ]
    assert sent[1].commands == [(0, 0)]
    # The broker lacks the second, and has seen the third and fourth.
    again.says("session.expected", 2, commands=[(ids[1], ids[1]), (ids[4], ids[4])])

    assert session.replay() == [ids[1], ids[4]]

    sent = again.hears()
    assert [(each.name, each.command_id) for each in sent[::2]] == [
        ("session.command-point", ids[1]),
        ("session.command-point", ids[4]),
    ]
    assert [each.queue for each in sent[1::2]] == ["q1", "q4"]
    again.says("session.completed", 2, commands=[(ids[0], ids[4])])
    assert not session.incomplete


def test_what_follows_a_replay_has_its_own_id(broker: Broker, session: Session) -> None:
    for number in range(3):
        session.send("queue.declare", queue=f"q{number}")
    broker.hears()
    broker.says("session.expected", commands=[(0, 0), (3, 3)])
    assert session.replay() == [0]
    session.send("execution.sync")
    names = [
        (each.name, each.command_id if "point" in each.name else None) for each in broker.hears()
    ]
    assert names == [
        ("session.command-point", 0),
        ("queue.declare", None),
        ("session.command-point", 3),
        ("execution.sync", None),
    ]


def test_a_message_that_comes_again_is_told_apart(broker: Broker, session: Session) -> None:
    broker.says("message.transfer", destination="d", body=b"1")
    broker.says("session.command-point", command_id=0, command_offset=0)
    broker.says("message.transfer", destination="d", body=b"1")
    broker.says("message.transfer", destination="d", body=b"2")
    assert [each.body for each in session.messages] == [b"1", b"2"]
    assert [each.id for each in session.repeated] == [0]


def test_answers_and_credit_of_the_broker_are_kept(broker: Broker, session: Session) -> None:
    number = session.transfer("", b"", key="nowhere")
    broker.says("message.reject", transfers=[(number, number)], code=1)
    broker.says("message.flow", destination="", unit=0, value=5)
    assert [each.code for each in session.answers_of_broker] == [1]
    assert [each.value for each in session.others] == [5]


def test_connections_are_cut_between_any_frames(broker: Broker, session: Session) -> None:
    connection = broker.connection
    session.transfer("", bytes(10_000), key="q")
    connection.cut_out = 3
    assert len(connection.take()) == 3
    assert connection.is_cut
    assert connection.take() == []

    other = Broker(Connection())
    other.connection.start()
    other.connection.receive(HEADER)
    other.connection.cut_in = 2
    other.says("connection.start", mechanisms=[], locales=[])
    with pytest.raises(Cut):
        other.says("connection.tune", channel_max=3)


# ---- on streams ----------------------------------------------------------------------------------


async def serve(stream: trio.abc.Stream) -> list[Operation]:
    """Be a broker that opens connections, closes them, and says nothing else; return what it has heard."""
    broker, heard = Broker(Connection()), []
    answers: dict[str, tuple[str, dict[str, Any]]] = {
        "connection.start-ok": ("connection.tune", {"channel_max": 3, "max_frame_size": 4096}),
        "connection.open": ("connection.open-ok", {}),
        "connection.close": ("connection.close-ok", {}),
    }
    # The Connection of this broker only lends its buffers: what is put into it are the answers.
    await stream.send_all(HEADER)
    broker.connection.control("connection.start", mechanisms=["ANONYMOUS"], locales=["en_US"])
    await stream.send_all(b"".join(broker.connection.take()))
    reader, assembler = FrameReader(), Assembler()
    async for octets in stream:
        reader.feed(octets.removeprefix(HEADER))
        for each in reader:
            operation = assembler.add(each)
            if operation is None:
                continue
            heard.append(operation)
            if operation.name in answers:
                name, fields = answers[operation.name]
                broker.connection.control(name, **fields)
                await stream.send_all(b"".join(broker.connection.take()))
    return heard


@pytest.fixture
async def streams() -> AsyncIterator[tuple[trio.abc.Stream, list[Operation]]]:
    """Return a stream to such a broker, and what that has heard once the stream has ended."""
    ours, theirs = trio.testing.memory_stream_pair()
    heard: list[Operation] = []

    async def run() -> None:
        heard.extend(await serve(theirs))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield ours, heard
        await ours.aclose()


async def test_heartbeats_go_out_twice_an_interval(streams: Any, autojump_clock: Any) -> None:
    stream, heard = streams
    async with connected(stream, heartbeat_s=10):
        await trio.sleep(19)
    await trio.testing.wait_all_tasks_blocked()
    names = [each.name for each in heard]
    assert names.count("connection.heartbeat") == 3
    assert names[-1] == "connection.close"


async def test_a_silent_broker_is_noticed(streams: Any, autojump_clock: Any) -> None:
    stream, _ = streams
    with pytest.raises(Violation, match="no octet for"):
        async with connected(stream, heartbeat_s=10):
            await trio.sleep(60)


async def test_a_cut_connection_fails_who_waits(streams: Any, autojump_clock: Any) -> None:
    stream, heard = streams
    async with connected(stream) as client:
        client.connection.cut_out = 1
        with pytest.raises(Failed):
            await client.session(b"s")
    await trio.testing.wait_all_tasks_blocked()
    assert heard[-1].name == "session.attach"


async def test_a_close_of_the_broker_tells_its_code(autojump_clock: Any) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    close = Operation("connection.close", {"reply-code": 501, "reply-text": "no"})
    await theirs.send_all(HEADER + frame(close.segments()[0][1]))
    with pytest.raises(Failed) as caught:
        async with connected(ours):
            pass
    assert (caught.value.code, caught.value.text) == (501, "no")


async def test_an_answer_that_does_not_come_ends_the_wait(
    streams: Any, autojump_clock: Any
) -> None:
    stream, _ = streams
    async with connected(stream) as client:
        with pytest.raises(trio.TooSlowError):
            await client.until(lambda: False, within_s=5)


# ---- with the server's half of qpid-python -------------------------------------------------------


foreign = [pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
async def client(qpid_server: int) -> AsyncIterator[Client]:
    async with connected(await trio.open_tcp_stream("127.0.0.1", qpid_server)) as found:
        yield found


@pytest.fixture
async def attached(client: Client) -> Attached:
    """Return a session with a queue ``q``."""
    found = await client.session(b"s")
    await found.call("queue.declare", queue="q")
    return found


class TestWithQpid:
    pytestmark = foreign

    @pytest.mark.parametrize(
        ("login", "response"),
        [
            (Login.anonymous(), None),
            (Login.plain("guest", "secret"), "\0guest\0secret"),
            (Login.external(b"me"), "me"),
            (Login("TWO-STEPS", None, lambda challenge: b"not " + challenge), "not who"),
        ],
    )
    async def test_each_mechanism_logs_in(
        self, qpid_server: int, login: Login, response: str | None
    ) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", qpid_server)
        async with connected(stream, login=login, virtual_host="v") as client:
            session = await client.session(b"s")
            result = await session.call("exchange.query", name="login")
            assert result is not None
            seen = plain(result.arguments)
            assert seen["mechanism"] == login.mechanism
            assert seen.get("response") == response
            assert seen["virtual_host"] == "v"

    @pytest.mark.parametrize("size", [0, 1, 4096 - 12, 4096 - 11, 50_000])
    async def test_a_body_goes_there_and_back(self, attached: Attached, size: int) -> None:
        body = bytes(number % 251 for number in range(size))
        attached.transfer("", body, key="q", properties={"correlation_id": b"\xff"})
        await attached.subscribe("q", "d", flow_mode=CREDIT)
        message = await attached.message()
        assert (message.body or b"") == body
        assert message.destination == "d"
        assert message.header("message-properties").correlation_id == b"\xff"
        assert message.header("delivery-properties").routing_key == "q"
        await attached.done(attached.accept(message.id))
        attached.complete(message.id)

    async def test_browsers_acquire(self, attached: Attached) -> None:
        attached.transfer("", b"text", key="q")
        await attached.subscribe("q", "d", acquire_mode=NOT_ACQUIRED, messages=1)
        message = await attached.message()
        result = await attached.call("message.acquire", transfers=[(message.id, message.id)])
        assert result == Struct("acquired", transfers=[(message.id, message.id)])

    async def test_released_messages_come_again(self, attached: Attached) -> None:
        for number in range(3):
            attached.transfer("", b"%d" % number, key="q", accept_mode=NONE)
        await attached.subscribe("q", "d", messages=3)
        first = [await attached.message() for _ in range(3)]
        attached.state.release(*(each.id for each in first))
        await attached.sync()
        await attached.call("message.flow", destination="d", unit=0, value=3)
        assert [(await attached.message()).body for _ in range(3)] == [b"0", b"1", b"2"]

    async def test_transactions_and_branches(self, attached: Attached) -> None:
        await attached.call("tx.select")
        await attached.call("tx.commit")
        branch = xid(b"global", b"branch", 7)
        started = await attached.call("dtx.start", xid=branch)
        assert started == Struct("xa-result", status=0)
        recovered = await attached.call("dtx.recover")
        assert recovered is not None
        assert plain(recovered.in_doubt) == [branch]

    async def test_a_failure_names_its_command(self, client: Client, attached: Attached) -> None:
        with pytest.raises(Failed) as caught:
            await attached.call("queue.delete", queue="nowhere")
        assert caught.value.code == 404
        assert attached.state.exception is not None
        assert attached.state.exception.command_id == 1
        # The session is gone, its channel is free, and the connection lives.
        other = await client.session(b"other", channel=attached.state.channel)
        assert await other.call("queue.query", queue="q") is not None

    async def test_sessions_share_a_connection(self, client: Client) -> None:
        sessions = [await client.session(b"s%d" % number) for number in range(5)]
        assert [each.state.channel for each in sessions] == [0, 1, 2, 3, 4]
        for number, each in enumerate(sessions):
            await each.call("queue.declare", queue=f"q{number}")
        await sessions[2].detach()
        again = await client.session(b"again")
        assert again.state.channel == 2

    async def test_a_timeout_is_asked_for(self, attached: Attached) -> None:
        attached.state.ask_timeout(90)
        await attached.until(lambda: attached.state.timeout_s == 90)

    async def test_a_flush_is_answered(self, attached: Attached) -> None:
        attached.send("queue.declare", queue="other")
        attached.state.flush()
        state = attached.state
        await attached.until(lambda: state.expected is not None and not state.incomplete)
        assert (state.expected, state.confirmed) == ([(2, 2)], [(0, 1)])
        state.know(0, 1)
        await attached.call("queue.query", queue="q")
        assert attached.client.connection.received[-1].commands == [(2, 2)]

    async def test_a_gap_is_complete(self, attached: Attached) -> None:
        attached.state.command("queue.declare", queue="never")
        attached.state.gap(1)
        attached.state.point(2)
        await attached.call("execution.sync")
        assert not attached.state.incomplete
        result = await attached.call("queue.query", queue="never")
        assert result == Struct("queue-query-result")

    async def test_raw_octets_are_sent_as_they_are(self, attached: Attached) -> None:
        operation = attached.state.command("execution.sync", sync=True)
        (octets,) = attached.client.connection.frames_of(operation, attached.state.channel)
        for each in octets:
            attached.client.connection.raw(bytes((each,)))
        assert operation.id is not None
        await attached.done(operation.id)

    @pytest.mark.parametrize("place", range(1, 19))
    async def test_a_session_resumes_after_each_frame(self, qpid_server: int, place: int) -> None:
        session = Session(b"s")
        stream = await trio.open_tcp_stream("127.0.0.1", qpid_server)
        async with connected(stream) as client:
            client.connection.cut_out = place
            client.connection.adopt(session)
            session.attach()
            session.send("queue.declare", queue="q")
            for number in range(5):
                # Three frames each: command, header and body.
                session.transfer("", b"%d" % number, key="q")
            with pytest.raises(Failed):
                await client.until(lambda: False)

        stream = await trio.open_tcp_stream("127.0.0.1", qpid_server)
        async with connected(stream) as client:
            attached = await client.resume(session, force=True)
            if not session.expected:
                session.replay()
            await attached.sync()
            result = await attached.call("queue.query", queue="q")
            assert result is not None
            assert result.message_count == 5
