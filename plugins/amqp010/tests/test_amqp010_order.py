"""Commands that take steps: those after them wait, in order and within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio.testing
from amqp_rt_amqp010 import handling
from amqp_rt_amqp010.assembling import Assembly
from amqp_rt_amqp010.contexts import WAIT, Context, Steps
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.handlers import Answer
from amqp_rt_amqp010.layouts import (
    Command,
    ErrorCode,
    ExchangeQuery,
    ExchangeQueryResult,
    MessageTransfer,
    QueueDelete,
    QueuePurge,
    QueueQuery,
    QueueQueryResult,
)
from amqp_rt_amqp010.limits import HELD_MAX, HELD_OCTETS_MAX
from amqp_rt_amqp010.serials import RangeSet
from protocol010 import Session
from served010 import serving
from worlds010 import Client, World


class Stepwise:
    """Parts of a session of which a purge takes the steps that a test gives."""

    made: list[Stepwise]

    def __init__(self, context: Context) -> None:
        self.context = context
        self.subscriptions = ()
        self.log: list[object] = []
        #: Makes the steps of each purge.
        self.steps: Callable[[], Steps] = self.waiting
        self.methods = {
            QueuePurge: self.purge,
            QueueQuery: self.query,
            ExchangeQuery: self.purge,
            QueueDelete: self.delete,
            MessageTransfer: self.transfer,
        }
        self.made.append(self)

    @property
    def is_congested(self) -> bool:
        return self.context.order.is_congested  # type: ignore[attr-defined, no-any-return]

    def on_completed(self, commands: RangeSet) -> None: ...

    def on_ready(self) -> None: ...

    def on_suspended(self) -> None: ...

    def on_resumed(self) -> None: ...

    def on_ended(self) -> None: ...

    def purge(self, number: int, command: Command, assembly: Assembly) -> Answer:
        return self.context.run(number, command, self.steps())

    def query(self, number: int, command: QueueQuery, assembly: Assembly) -> Answer:
        self.log.append(command.queue)
        return QueueQueryResult(queue=command.queue)

    def delete(self, number: int, command: QueueDelete, assembly: Assembly) -> Answer:
        raise CommandFault("no", ErrorCode.NOT_FOUND)

    def transfer(self, number: int, command: MessageTransfer, assembly: Assembly) -> Answer:
        self.log.append(b"".join(assembly.body or ()))
        return None

    def waiting(self) -> Steps:
        """Wait once."""
        self.log.append("begin")
        try:
            yield WAIT
            self.log.append("end")
        finally:
            self.log.append("closed")
        return None


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stepwise]]:
    Stepwise.made = []
    monkeypatch.setattr(handling, "Parts", Stepwise)
    yield Stepwise.made
    Stepwise.made = []


@pytest.fixture
def client() -> Client:
    return World().connect()


@pytest.fixture
def session(client: Client) -> Session:
    return client.session(timeout=60)


@pytest.fixture
def parts(session: Session, made: list[Stepwise]) -> Stepwise:
    return made[0]


def ask(session: Session, client: Client, *names: str) -> list[int]:
    """Query in one chunk, after a purge, and return the ids."""
    numbers = [session.send("queue.purge", queue="q")]
    numbers += [session.send("queue.query", queue=name) for name in names]
    client.pump()
    return numbers


def test_commands_wait_for_the_steps_of_one_before(
    client: Client, session: Session, parts: Stepwise
) -> None:
    numbers = ask(session, client, "a", "b")
    assert parts.log == ["begin"]
    assert not any(session.is_complete(number) for number in numbers)
    parts.context.wake()
    client.pump()
    assert parts.log == ["begin", "end", "closed", "a", "b"]
    assert all(session.is_complete(number) for number in numbers)
    assert session.results[numbers[2]].queue == "b"


def test_other_sessions_do_not_wait(client: Client, session: Session, parts: Stepwise) -> None:
    ask(session, client, "a")
    other = client.session(b"other")
    assert client.run(other, "queue.query", queue="b").queue == "b"
    assert parts.log == ["begin"]


def test_the_result_of_steps_is_that_of_the_command(
    client: Client, session: Session, parts: Stepwise
) -> None:
    def steps() -> Steps:
        yield 1
        return ExchangeQueryResult(type="made")

    parts.steps = steps
    assert client.run(session, "exchange.query", name="e").type == "made"


def test_steps_woken_before_they_wait_do_not_wait(
    client: Client, session: Session, parts: Stepwise
) -> None:
    def steps() -> Steps:
        parts.context.wake()
        yield WAIT
        parts.log.append("end")
        return None

    parts.steps = steps
    (number,) = ask(session, client)
    assert parts.log == ["end"]
    assert session.is_complete(number)


def test_much_work_takes_many_turns(client: Client, session: Session, parts: Stepwise) -> None:
    def steps() -> Steps:
        for _ in range(10):
            yield 100
        parts.log.append("end")
        return None

    parts.steps = steps
    client.engine.work_max = 1_000
    session.send("queue.purge", queue="q")
    session.send("queue.query", queue="a")
    turns = 0
    data = b"".join(client.wire.take())
    while data or client.engine.unread:
        assert parts.log == []
        client._call(data)
        data = b""
        turns += 1
    assert turns == 6
    assert parts.log == ["end", "a"]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a wait"])
def test_a_fault_in_steps_ends_the_session(
    client: Client, session: Session, parts: Stepwise, late: bool
) -> None:
    def steps() -> Steps:
        if late:
            yield WAIT
        raise CommandFault("in use", ErrorCode.PRECONDITION_FAILED)

    parts.steps = steps
    numbers = ask(session, client, "a")
    parts.context.wake()
    client.pump()
    assert session.exception is not None
    assert session.exception.error_code == 406
    assert session.exception.command_id == numbers[0]
    assert (session.exception.class_code, session.exception.command_code) == (8, 3)
    assert parts.log == []
    assert session.detached is not None


def test_a_held_command_that_fails_ends_the_session(
    client: Client, session: Session, parts: Stepwise
) -> None:
    session.send("queue.purge", queue="q")
    number = session.send("queue.delete", queue="q")
    session.send("queue.query", queue="a")
    client.pump()
    parts.context.wake()
    client.pump()
    assert session.exception is not None
    assert session.exception.command_id == number
    assert parts.log == ["begin", "end", "closed"]


def test_steps_are_closed_with_the_session(
    client: Client, session: Session, parts: Stepwise
) -> None:
    ask(session, client, "a")
    session.ask_timeout(0)
    session.detach()
    client.pump()
    assert parts.log == ["begin", "closed"]


def test_steps_may_end_their_session(client: Client, session: Session, parts: Stepwise) -> None:
    def steps() -> Steps:
        try:
            parts.context.session.fail(CommandFault("gone", ErrorCode.RESOURCE_DELETED))
            yield 1
            parts.log.append("went on")
        finally:
            parts.log.append("closed")
        return None

    parts.steps = steps
    ask(session, client, "a")
    assert session.exception is not None
    assert parts.log == ["closed"]


def test_nothing_goes_on_while_the_session_is_detached(
    client: Client, session: Session, parts: Stepwise
) -> None:
    numbers = ask(session, client, "a")
    client.lose()
    parts.context.wake()
    assert parts.log == ["begin"]
    again = client.world.connect()
    again.resume(session)
    assert parts.log == ["begin", "end", "closed", "a"]
    assert all(session.is_complete(number) for number in numbers)
    assert again.moved == [parts.context.anchor]


def test_events_of_a_detached_session_come_after_its_move(
    client: Client, session: Session, parts: Stepwise
) -> None:
    client.lose()
    event: Any = object()
    parts.context.report(event)
    again = client.world.connect()
    again.resume(session)
    assert again.events.index(event) == len(again.events) - 1
    assert len(again.moved) == 1


@pytest.mark.parametrize("octets", [0, 300_000])
def test_a_connection_is_not_read_while_too_many_commands_wait(
    client: Client, session: Session, parts: Stepwise, octets: int
) -> None:
    session.send("queue.purge", queue="q")
    sent = 0
    while not client.engine.congested:
        session.transfer("", bytes(octets))
        client.pump()
        sent += 1
    assert sent == HELD_MAX if octets == 0 else sent <= HELD_OCTETS_MAX // octets + 1
    # A command that came with the same chunk waits in the engine.
    session.transfer("", b"late")
    client.pump()
    assert not client.engine.unread
    assert parts.log == ["begin"]
    parts.context.wake()
    client.pump()
    assert not client.engine.congested
    assert len(parts.log) == 3 + sent + 1
    assert parts.log[-1] == b"late"


def test_a_congested_connection_takes_no_silence_for_an_end() -> None:
    world = World()
    client = world.connect(wire={"heartbeat_s": 10})
    session = client.session()
    session.send("queue.purge", queue="q")
    for _ in range(HELD_MAX):
        session.send("queue.query", queue="q")
    client.pump()
    assert client.engine.congested
    for _ in range(10):
        world.pass_time(10, client)
    assert not client.engine.finished
    Stepwise.made[0].context.wake()
    client.pump()
    world.pass_time(19, client)
    assert not client.engine.finished
    world.pass_time(1, client)
    assert client.engine.finished


async def test_a_client_waits_until_its_broker_reads_on(made: list[Stepwise]) -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        session.send("queue.purge", queue="q")
        for _ in range(2 * HELD_MAX):
            session.transfer("", bytes(10_000))
        await trio.testing.wait_all_tasks_blocked(0.1)
        # What the client has sent beyond waits in the buffers of the sockets, and in its own.
        order = made[0].context.order  # type: ignore[attr-defined]
        assert order.is_congested
        assert len(order._held) < HELD_MAX
        made[0].context.wake()
        await session.sync()
        assert len(made[0].log) == 3 + 2 * HELD_MAX
