"""Local transactions (0-10 §tx): what belongs to them, and when it has its effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from amqp_rt_amqp010.layouts import (
    Command,
    ErrorCode,
    MessageAccept,
    MessageReject,
    SessionAttach,
    SessionCommandPoint,
    SessionCompleted,
    SessionExpected,
    TxCommit,
    TxRollback,
    TxSelect,
)
from amqp_rt_amqp010.transactions import CurrentTransaction, TransactionMode, conclude
from amqp_rt_amqp091 import methods as m
from broker010 import Publishing, World, transfer
from scenes010 import NAME, assembly, ranges

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.fronts import ACCEPTED, Error, QueueDeclaration, TransactionalState
from amqp_rt.stores.memory import MemoryStore

EXPLICIT = 0


def completed(last: int) -> SessionCompleted:
    return SessionCompleted(commands=ranges((0, last)))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def session(world: World) -> Publishing:
    return selected(world)


def selected(world: World, **options: Any) -> Publishing:
    """Return a session with transactions and a queue; its first command was ``tx.select``."""
    made = world.publisher(**options)
    made.context.topology.declare_queue(QueueDeclaration(name="q"))
    assert made.command(TxSelect()) == [completed(0)]
    return made


@pytest.mark.req("R12")
def test_transfers_have_their_effect_with_the_commit(world: World, session: Publishing) -> None:
    sent = session.send(key="q", accept=EXPLICIT)
    assert sent == [MessageAccept(transfers=ranges((1, 1))), completed(1)]
    assert world.available("q") == 0
    assert session.command(TxCommit()) == [completed(2)]
    assert world.available("q") == 1
    session.send(key="q")
    assert session.command(TxCommit()) == [completed(4)]
    assert world.available("q") == 2


@pytest.mark.req("R12")
def test_a_rollback_drops_transfers(world: World, session: Publishing) -> None:
    session.send(key="q")
    assert session.command(TxRollback()) == [completed(2)]
    assert session.command(TxCommit()) == [completed(3)]
    assert world.available("q") == 0


@pytest.mark.req("R12")
def test_transfers_of_one_chunk_belong_to_the_transaction_before_the_commit(
    world: World, session: Publishing
) -> None:
    session.feed(transfer(key="q"), assembly(TxCommit()), transfer(key="q"), assembly(TxRollback()))
    assert session.channel.taken() == [completed(4)]
    assert world.available("q") == 1


@pytest.mark.req("R12")
@pytest.mark.parametrize("command", [TxCommit(), TxRollback()], ids=["commit", "rollback"])
def test_select_is_required(world: World, command: Command) -> None:
    session = world.publisher()
    session.feed(assembly(command))
    failure = session.channel.failure()
    assert failure.error_code == ErrorCode.ILLEGAL_STATE
    assert failure.class_code == 5


@pytest.mark.req("R12")
@pytest.mark.parametrize("mode", [TransactionMode.LOCAL, TransactionMode.DISTRIBUTED])
def test_transactions_are_selected_once(world: World, mode: TransactionMode) -> None:
    session = world.publisher()
    session.handler.current.select(mode)
    session.feed(assembly(TxSelect()))
    assert session.channel.failure().error_code == ErrorCode.ILLEGAL_STATE


@pytest.mark.req("R12")
def test_the_end_of_the_session_rolls_back(world: World, session: Publishing) -> None:
    session.send(key="q")
    session.channel.attachment.lose(world.now)
    assert session.session.ended
    assert world.available("q") == 0


@pytest.mark.req("R12")
def test_a_detached_session_keeps_its_transaction(world: World) -> None:
    session = selected(world, timeout=60)
    session.send(key="q")
    session.channel.attachment.lose(world.now)
    again = world.channel()
    again.control(
        SessionAttach(name=NAME),
        SessionExpected(commands=ranges((0, 0))),
        SessionCommandPoint(command_id=2, command_offset=0),
    )
    again.command(TxCommit())
    assert again.taken()[-1] == completed(2)
    assert world.available("q") == 1


@pytest.mark.req("R12")
def test_an_unroutable_message_leaves_the_transaction(world: World, session: Publishing) -> None:
    session.send(key="q")
    sent = session.send(key="nowhere", accept=EXPLICIT)
    assert isinstance(sent[0], MessageReject)
    session.command(TxCommit())
    assert world.available("q") == 1


@pytest.mark.req("R12")
def test_a_message_without_room_ends_the_session_and_rolls_back(
    world: World, session: Publishing
) -> None:
    session.context.topology.declare_queue(
        QueueDeclaration(name="one", options={"length_max": 1, "overflow": "reject"})
    )
    session.send(key="q")
    session.send(key="one")
    session.feed(transfer(key="one"))
    assert session.channel.failure().error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    assert world.available("q") == world.available("one") == 0


@pytest.mark.req("R12")
def test_a_commit_that_is_impossible_ends_the_session(world: World, session: Publishing) -> None:
    session.send(key="q")
    session.context.topology.delete_queue("q")
    session.feed(assembly(TxCommit()))
    failure = session.channel.failure()
    assert failure.error_code == ErrorCode.PRECONDITION_FAILED
    assert failure.command_id == 2


@pytest.mark.req("R12")
def test_a_commit_waits_for_transfers_whose_right_is_being_asked_for() -> None:
    world = World(asks=True)
    session = selected(world)
    session.connection.holds = holds = []
    session.feed(transfer(key="q"), assembly(TxCommit()))
    assert session.channel.taken() == []
    session.connection.place(holds[0])
    assert session.turn() == [completed(2)]
    assert world.available("q") == 1


@pytest.mark.req("R12")
def test_a_commit_completes_its_transfers_though_memory_is_scarce(
    world: World, session: Publishing
) -> None:
    memory = world.host.memory
    memory.held = memory.limit * 7 // 8 + 1
    assert session.send(key="q") == []
    assert session.command(TxCommit()) == [completed(2)]


@pytest.mark.req("R12")
def test_the_right_to_transactions_is_that_of_the_coordinator(world: World) -> None:
    session = world.publisher()
    session.connection.holds = holds = []
    session.feed(assembly(TxSelect()))
    holds[0].refuse(Error("amqp:unauthorized-access", "no"))
    assert session.channel.failure().error_code == ErrorCode.UNAUTHORIZED_ACCESS


@pytest.mark.req("R12")
def test_a_coordinator_that_ends_its_link_ends_the_session(
    world: World, session: Publishing
) -> None:
    for link in list(session.context.anchor.links):
        link.detach(Error("amqp:internal-error", "out of service"))
    assert session.channel.failure().error_code == ErrorCode.INTERNAL_ERROR


@pytest.mark.req("R12", "N17")
async def test_a_commit_completes_when_it_is_durable() -> None:
    is_open = trio.Event()

    async def slow(call: Callable[..., Any], *args: Any) -> Any:
        if getattr(call, "__name__", "") == "commit":
            await is_open.wait()
        await trio.lowlevel.checkpoint()
        return call(*args)

    world = World(volatile=False, journal=Journal(MemoryStore(), slow))
    async with trio.open_nursery() as nursery:
        await world.host.restore()
        nursery.start_soon(world.host.run)
        is_open.set()
        session = world.publisher()
        session.context.topology.declare_queue(QueueDeclaration(name="q", durable=True))
        await world.host.wait_kept()
        is_open = trio.Event()
        session.feed(assembly(TxSelect()), transfer(key="q", durable=True), assembly(TxCommit()))
        assert session.channel.taken() == [completed(1)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert session.turn() == []
        is_open.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert session.turn() == [completed(2)]
        assert world.available("q") == 1
        nursery.cancel_scope.cancel()


@pytest.mark.req("R12")
def test_a_consumer_of_another_protocol_sees_what_is_committed(
    world: World, session: Publishing
) -> None:
    reader = world.consumer("q")
    session.send(b"kept", key="q")
    assert reader.contents() == []
    session.command(TxCommit())
    session.send(b"dropped", key="q")
    session.command(TxRollback())
    assert [each.body for each in reader.contents()] == [b"kept"]
    reader.say(1, m.BasicAck(delivery_tag=1))
    assert world.stats("q").available == 0


# --- accepts -----------------------------------------------------------------------------------------


class RecordedEndpoint:
    """Endpoint of a link that notes outcomes, and may end the link."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []
        self.ends_link = False

    def on_outcomes(self, link: Link, deliveries: list[Delivery]) -> None:
        self.outcomes += [each.state for each in deliveries]
        link.attached = not self.ends_link


class Link:
    """Link of an accepted message."""

    def __init__(self) -> None:
        self.attached = True
        self.endpoint = RecordedEndpoint()


class Delivery:
    """Message that has been accepted."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.enlisted = False
        self.state: Any = None
        self.settled = False
        self.outcome_on_rollback: Any = None
        self.remote_settled = False
        self.waiter: Any = None

    def settle(self, state: Any = None) -> None:
        self.settled = True


@pytest.mark.req("R12")
@pytest.mark.parametrize("committed", [True, False])
def test_accepts_are_settled_by_a_commit_and_held_after_a_rollback(committed: bool) -> None:
    current = CurrentTransaction(10)
    current.begin(b"1")
    delivery = Delivery(Link())
    current.enlist([delivery])
    state = TransactionalState(b"1", ACCEPTED)
    assert delivery.link.endpoint.outcomes == [state]
    assert delivery.enlisted
    enlisted = current.leave()
    assert current.state is None
    context: Any = None
    assert list(conclude(context, enlisted, committed=committed)) == []
    assert delivery.settled is committed
    assert not delivery.enlisted
    assert delivery.state == (state if committed else None)


@pytest.mark.req("R12")
def test_accepts_of_a_link_that_has_ended_are_dropped() -> None:
    current = CurrentTransaction(10)
    current.begin(b"1")
    link = Link()
    link.endpoint.ends_link = True
    first, second = Delivery(link), Delivery(Link())
    current.enlist([first, second])
    third = Delivery(link)
    current.enlist([third])
    assert third.settled
    assert current.leave() == [first, second]
