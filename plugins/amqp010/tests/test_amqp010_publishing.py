"""Transfers from the client: routes, outcomes, completion, accept and reject. One test for each rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from amqp_rt_amqp010.layouts import (
    ErrorCode,
    FragmentProperties,
    MessageAccept,
    MessageReject,
    RejectCode,
    SessionAttach,
    SessionAttached,
    SessionCompleted,
    SessionDetach,
    SessionExpected,
    SessionFlush,
)
from amqp_rt_amqp010.limits import PUBLISHING_LINKS_MAX, UNREPORTED_MAX
from broker010 import Publishing, World, transfer
from scenes010 import NAME, point, ranges

from amqp_rt.broker import Queue
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.fronts import DEFAULT_LIMITS, Error, Exchange, QueueDeclaration
from amqp_rt.security.access import Rights
from amqp_rt.stores.memory import MemoryStore

EXPLICIT = 0
NONE = 1


def declare(publisher: Publishing, *names: str, **options: Any) -> None:
    for name in names:
        publisher.context.topology.declare_queue(QueueDeclaration(name=name, **options))


def bind(publisher: Publishing, name: str, exchange: str, key: str = "", **arguments: Any) -> None:
    publisher.context.topology.bind_queue(name, exchange, key, arguments)


def completed(*numbers: int) -> SessionCompleted:
    return SessionCompleted(commands=ranges(*[(number, number) for number in numbers]))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def publisher(world: World) -> Publishing:
    made = world.publisher()
    declare(made, "q")
    return made


# --- routes ------------------------------------------------------------------------------------------


@pytest.mark.req("D2")
@pytest.mark.parametrize("destination", [None, ""])
def test_a_blank_destination_is_the_default_exchange(
    world: World, publisher: Publishing, destination: str | None
) -> None:
    assert publisher.send(to=destination, key="q") == [completed(0)]
    assert world.available("q") == 1


@pytest.mark.req("D2")
def test_an_exchange_routes_to_its_queues(world: World, publisher: Publishing) -> None:
    declare(publisher, "r", "s")
    bind(publisher, "q", "amq.topic", "a.*")
    bind(publisher, "r", "amq.topic", "#")
    bind(publisher, "s", "amq.topic", "b")
    assert publisher.send(to="amq.topic", key="a.b") == [completed(0)]
    assert [world.available(name) for name in "qrs"] == [1, 1, 0]


@pytest.mark.req("D2")
def test_headers_route_too(world: World, publisher: Publishing) -> None:
    bind(publisher, "q", "amq.headers", "", **{"x-match": "all", "a": 1})
    publisher.send(to="amq.headers", headers={"a": 1})
    publisher.send(to="amq.headers", headers={"a": 2})
    assert world.available("q") == 1


@pytest.mark.req("D2")
def test_an_unknown_exchange_is_not_found(publisher: Publishing) -> None:
    publisher.feed(transfer(to="nowhere", key="q"))
    failure = publisher.channel.failure()
    assert failure.error_code == ErrorCode.NOT_FOUND
    assert (failure.command_id, failure.class_code, failure.command_code) == (0, 4, 1)
    assert failure.field_index == 0


@pytest.mark.req("D12", "D15")
def test_a_fault_leaves_the_transfers_before_it(world: World, publisher: Publishing) -> None:
    publisher.feed(transfer(key="q"), transfer(to="nowhere"), transfer(key="q"))
    sent = publisher.channel.taken()
    assert sent[0] == completed(0)
    assert sent[1].command_id == 1
    assert world.available("q") == 1


@pytest.mark.parametrize("field", ["accept", "acquire"])
def test_modes_are_those_of_the_specification(publisher: Publishing, field: str) -> None:
    publisher.feed(transfer(key="q", **{field: 2}))
    assert publisher.channel.failure().error_code == ErrorCode.INVALID_ARGUMENT


@pytest.mark.req("D2")
def test_a_transfer_without_header_has_no_key(publisher: Publishing) -> None:
    made = transfer(accept=EXPLICIT)
    made.header = None
    publisher.feed(made)
    assert isinstance(publisher.channel.taken()[0], MessageReject)


# --- completion --------------------------------------------------------------------------------------


@pytest.mark.req("D2", "D12")
@pytest.mark.parametrize("accept", [None, NONE])
def test_unless_explicit_is_stated_completion_is_all(
    publisher: Publishing, accept: int | None
) -> None:
    assert publisher.send(key="q", accept=accept) == [completed(0)]
    assert publisher.send(key="nowhere", accept=accept) == [
        SessionCompleted(commands=ranges((0, 1)))
    ]


@pytest.mark.req("D12", "D15")
def test_explicit_transfers_of_a_chunk_are_accepted_together(publisher: Publishing) -> None:
    some = [
        transfer(b"0", key="q", accept=EXPLICIT),
        transfer(b"1", key="q", accept=EXPLICIT),
        transfer(b"2", key="q"),
        transfer(b"3", key="nowhere", accept=EXPLICIT),
        transfer(b"4", key="q", accept=EXPLICIT),
    ]
    publisher.feed(*some)
    accepted, rejected, done = publisher.channel.taken()
    assert accepted == MessageAccept(transfers=ranges((0, 1), (4, 4)))
    assert isinstance(rejected, MessageReject)
    assert rejected.transfers == ranges((3, 3))
    assert rejected.code == RejectCode.UNROUTABLE
    assert rejected.text
    assert done == SessionCompleted(commands=ranges((0, 4)))


@pytest.mark.req("D10", "D12")
def test_an_accept_comes_even_if_a_duplicate_is_asked_for_again(
    world: World, publisher: Publishing
) -> None:
    publisher = world.publisher(timeout=60, name=b"kept")
    publisher.send(key="q", accept=EXPLICIT)
    publisher.channel.attachment.lose(world.now)
    again = world.channel()
    again.control(SessionAttach(name=b"kept"), point(0))
    assert again.taken()[0] == SessionAttached(name=b"kept")
    again.attachment.receive_command(transfer(key="q", accept=EXPLICIT), world.now)
    again.turn()
    assert again.taken() == []
    again.control(SessionExpected(commands=ranges((0, 0))))
    assert again.taken() == [point(0), MessageAccept(transfers=ranges((0, 0))), completed(0)]
    assert world.available("q") == 1


# --- unroutable --------------------------------------------------------------------------------------


def alternate(publisher: Publishing) -> None:
    declare(publisher, "spare")
    topology = publisher.context.topology
    topology.declare_exchange(Exchange(name="spares", type="fanout"))
    topology.declare_exchange(
        Exchange(name="main", type="direct", arguments={"alternate-exchange": "spares"})
    )
    bind(publisher, "spare", "spares")


@pytest.mark.req("D2", "D15")
@pytest.mark.parametrize(
    ("accept", "discard", "kept", "rejected"),
    [
        (None, False, 1, False),
        (NONE, False, 1, False),
        (EXPLICIT, False, 0, True),
        (None, True, 0, False),
        (EXPLICIT, True, 0, False),
    ],
)
def test_an_unroutable_message(
    world: World,
    publisher: Publishing,
    accept: int | None,
    discard: bool,
    kept: int,
    rejected: bool,
) -> None:
    alternate(publisher)
    sent = publisher.send(to="main", key="k", accept=accept, discard=discard)
    assert world.available("spare") == kept
    assert sent[-1] == completed(0)
    assert [type(each) for each in sent[:-1]] == [MessageReject] * rejected


@pytest.mark.req("D2")
def test_alternates_in_a_ring_end(world: World, publisher: Publishing) -> None:
    topology = publisher.context.topology
    for name, other in (("a", "b"), ("b", "a")):
        topology.declare_exchange(
            Exchange(name=name, type="direct", arguments={"alternate-exchange": other})
        )
    assert publisher.send(to="a", key="k") == [completed(0)]


@pytest.mark.req("D2")
def test_immediate_takes_a_subscriber_for_every_queue(world: World, publisher: Publishing) -> None:
    declare(publisher, "r")
    bind(publisher, "q", "amq.fanout")
    bind(publisher, "r", "amq.fanout")
    reader = world.consumer("q", prefetch=1)
    sent = publisher.send(to="amq.fanout", immediate=True, accept=EXPLICIT)
    assert sent[0].code == RejectCode.IMMEDIATE
    assert reader.contents() == []
    world.consumer("r", prefetch=5)
    sent = publisher.send(to="amq.fanout", immediate=True, accept=EXPLICIT)
    assert isinstance(sent[0], MessageAccept)
    assert len(reader.contents()) == 1


@pytest.mark.req("D2")
def test_immediate_counts_the_credit_that_earlier_messages_use(
    world: World, publisher: Publishing
) -> None:
    world.consumer("q", prefetch=2)
    some = [transfer(key="q", immediate=True, accept=EXPLICIT) for _ in range(3)]
    publisher.feed(*some)
    accepted, rejected, _ = publisher.channel.taken()
    assert accepted.transfers == ranges((0, 1))
    assert rejected.transfers == ranges((2, 2))


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.req("D2")
def test_a_queue_without_room_is_resource_limit_exceeded(
    world: World, publisher: Publishing
) -> None:
    declare(publisher, "one", options={"length_max": 1, "overflow": "reject"})
    assert publisher.send(key="one") == [completed(0)]
    publisher.feed(transfer(key="one"))
    failure = publisher.channel.failure()
    assert failure.error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    assert failure.command_id == 1


@pytest.mark.req("D2")
def test_durable_messages_take_a_store() -> None:
    world = World(volatile=False)
    world.host.space().declare(Queue("q"))
    publisher = world.publisher()
    publisher.feed(transfer(key="q", durable=True))
    assert publisher.channel.failure().error_code == ErrorCode.PRECONDITION_FAILED


@pytest.mark.req("D2")
@pytest.mark.parametrize(
    ("right", "options"),
    [
        ((Rights.SEND, "q"), {"key": "q"}),
        ((Rights.SEND, "/exchanges/amq.fanout"), {"to": "amq.fanout"}),
    ],
    ids=["queue", "exchange"],
)
def test_a_right_that_is_missing_ends_the_session(
    world: World, publisher: Publishing, right: tuple[Rights, str], options: dict[str, str]
) -> None:
    world.denied.add(right)
    publisher.feed(transfer(**options))
    assert publisher.channel.failure().error_code == ErrorCode.UNAUTHORIZED_ACCESS
    assert world.available("q") == 0


@pytest.mark.parametrize(("user_id", "fails"), [(b"u", False), (b"v", True), (b"", True)])
def test_user_id_is_that_of_the_connection(
    publisher: Publishing, user_id: bytes, fails: bool
) -> None:
    publisher.feed(transfer(key="q", user_id=user_id))
    if fails:
        assert publisher.channel.failure().error_code == ErrorCode.UNAUTHORIZED_ACCESS
    else:
        assert publisher.channel.taken() == [completed(0)]


@pytest.mark.req("D12", "D15")
def test_a_failed_transfer_never_completes(world: World, publisher: Publishing) -> None:
    """One queue takes the message and another has no room, in both orders."""
    declare(publisher, "one", options={"length_max": 1, "overflow": "reject"})
    publisher.send(key="one")
    bind(publisher, "one", "amq.fanout")
    bind(publisher, "q", "amq.fanout")
    publisher.feed(transfer(to="amq.fanout", accept=EXPLICIT))
    sent = publisher.channel.taken()
    assert isinstance(sent[-1], SessionDetach)
    assert not any(isinstance(each, MessageAccept) for each in sent)
    assert not any(
        isinstance(each, SessionCompleted) and 1 in (each.commands or ()) for each in sent
    )


# --- links to nodes without an inlet -----------------------------------------------------------------


def test_a_transfer_waits_for_the_right_to_send() -> None:
    world = World(asks=True)
    publisher = world.publisher()
    declare(publisher, "q")
    publisher.connection.holds = holds = []
    assert publisher.send(key="q", accept=EXPLICIT) == []
    (link,) = holds
    publisher.connection.place(link)
    assert publisher.turn() == [MessageAccept(transfers=ranges((0, 0))), completed(0)]
    assert world.available("q") == 1


def test_a_right_that_is_refused_later_ends_the_session() -> None:
    world = World(asks=True)
    publisher = world.publisher()
    declare(publisher, "q")
    publisher.connection.holds = holds = []
    publisher.send(key="q")
    holds[0].refuse(Error("amqp:unauthorized-access", "no"))
    assert publisher.channel.failure().error_code == ErrorCode.UNAUTHORIZED_ACCESS


def test_links_are_bounded_and_those_with_messages_stay() -> None:
    world = World(asks=True)
    publisher = world.publisher()
    publisher.connection.holds = holds = []
    publisher.feed(*(transfer(key=f"n{at}") for at in range(PUBLISHING_LINKS_MAX)))
    assert len(holds) == PUBLISHING_LINKS_MAX
    publisher.connection.place(holds[0])
    assert publisher.turn() == [completed(0)]
    publisher.feed(transfer(key="more"))
    assert publisher.channel.taken() == []
    publisher.feed(transfer(key="still more"))
    assert publisher.channel.failure().error_code == ErrorCode.RESOURCE_LIMIT_EXCEEDED


# --- many queues -------------------------------------------------------------------------------------


@pytest.mark.req("D2")
def test_a_message_to_many_queues_goes_out_in_steps(world: World, publisher: Publishing) -> None:
    names = [f"n{at}" for at in range(55)]
    declare(publisher, *names)
    for name in names:
        bind(publisher, name, "amq.fanout")
    publisher.context.in_turns = True
    assert publisher.send(to="amq.fanout", accept=EXPLICIT) == []
    while publisher.context.steps is not None:
        assert publisher.turn() == []
        publisher.context.go_on()
    assert publisher.turn() == [MessageAccept(transfers=ranges((0, 0))), completed(0)]
    assert all(world.available(name) == 1 for name in names)
    assert publisher.context.work >= 50


@pytest.mark.req("D2")
@pytest.mark.parametrize("again", [False, True])
def test_a_queue_deleted_between_two_steps_gets_nothing(
    world: World, publisher: Publishing, again: bool
) -> None:
    names = [f"n{at:02}" for at in range(30)]
    declare(publisher, *names)
    for name in names:
        bind(publisher, name, "amq.fanout")
    publisher.context.in_turns = True
    publisher.feed(transfer(to="amq.fanout", accept=EXPLICIT))
    topology = publisher.context.topology
    topology.delete_queue("n29")
    if again:
        declare(publisher, "n29")
    while publisher.context.steps is not None:
        publisher.context.go_on()
    assert publisher.turn() == [MessageAccept(transfers=ranges((0, 0))), completed(0)]
    assert world.available("n00") == 1
    if again:
        assert world.available("n29") == 0


@pytest.mark.req("D2")
def test_a_queue_deleted_before_its_messages_arrive_leaves_them_unroutable(
    world: World, publisher: Publishing
) -> None:
    publisher.channel.attachment.receive_command(
        transfer(key="q", accept=EXPLICIT), publisher.world.now
    )
    publisher.context.topology.delete_queue("q")
    sent = publisher.turn()
    assert sent[0].code == RejectCode.UNROUTABLE
    assert sent[1] == completed(0)


@pytest.mark.req("D2")
@pytest.mark.slow
def test_a_hundred_thousand_bindings_are_examined_in_steps(world: World) -> None:
    limits = DEFAULT_LIMITS
    world = World(limits)
    publisher = world.publisher()
    declare(publisher, "q")
    count = min(100_000, limits.bindings_max - 10)
    for at in range(count):
        bind(publisher, "q", "amq.headers", str(at), **{"x-match": "all", "a": at})
    publisher.context.in_turns = True
    publisher.feed(transfer(to="amq.headers", headers={"a": 1}))
    steps = 0
    while publisher.context.steps is not None:
        publisher.context.go_on()
        steps += 1
    publisher.turn()
    assert steps > 10
    assert world.available("q") == 1


def test_routes_are_found_once_a_chunk(world: World, publisher: Publishing) -> None:
    bind(publisher, "q", "amq.direct", "k")
    looked: list[object] = []
    topology = publisher.context.topology
    inlet = topology.inlet

    def counting(*args: Any, **options: Any) -> Any:
        looked.append(args)
        return inlet(*args, **options)

    topology.inlet = counting  # type: ignore[method-assign]
    publisher.feed(*(transfer(to="amq.direct", key="k") for _ in range(20)))
    publisher.feed(*(transfer(key="q") for _ in range(20)))
    assert len(looked) == 2
    assert world.available("q") == 40
    list(publisher.context.topology.unbind_key("q", "amq.direct", "k"))
    publisher.feed(transfer(to="amq.direct", key="k"))
    assert world.available("q") == 40


# --- scarce memory -----------------------------------------------------------------------------------


@pytest.mark.req("D7", "D12")
def test_completions_wait_while_memory_is_scarce(world: World, publisher: Publishing) -> None:
    memory = world.host.memory
    memory.held = memory.limit * 7 // 8 + 1
    publisher.feed(*(transfer(key="q", accept=EXPLICIT) for _ in range(3)))
    assert publisher.channel.taken() == []
    assert world.available("q") == 3
    publisher.feed(transfer(key="q"))
    assert publisher.channel.taken() == []
    memory.held = 0
    memory.notify_waiting()
    assert publisher.turn() == [
        MessageAccept(transfers=ranges((0, 2))),
        SessionCompleted(commands=ranges((0, 3))),
    ]


@pytest.mark.req("D7", "D12")
def test_reading_stops_when_too_many_completions_wait(world: World, publisher: Publishing) -> None:
    memory = world.host.memory
    memory.held = memory.limit * 7 // 8 + 1
    attachment = publisher.channel.attachment
    publisher.feed(*(transfer(key="q") for _ in range(UNREPORTED_MAX - 1)))
    assert not attachment.is_congested
    publisher.feed(transfer(key="q"))
    assert attachment.is_congested
    memory.held = 0
    memory.notify_waiting()
    publisher.turn()
    assert not attachment.is_congested


# --- durable messages --------------------------------------------------------------------------------


@pytest.mark.req("D12", "N17")
async def test_a_durable_transfer_completes_when_it_is_on_disk() -> None:
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
        publisher = world.publisher()
        declare(publisher, "q", durable=True)
        await world.host.wait_kept()
        is_open = trio.Event()
        publisher.feed(
            transfer(b"0", key="q", durable=True, accept=EXPLICIT),
            transfer(b"1", key="nowhere", accept=EXPLICIT),
            transfer(b"2", key="q", durable=True, accept=EXPLICIT),
        )
        (rejected, done) = publisher.channel.taken()
        assert rejected.transfers == ranges((1, 1))
        assert done == completed(1)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert publisher.turn() == []
        is_open.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert publisher.turn() == [
            MessageAccept(transfers=ranges((0, 0), (2, 2))),
            SessionCompleted(commands=ranges((0, 2))),
        ]
        assert world.available("q") == 2
        nursery.cancel_scope.cancel()


# --- sessions that move ------------------------------------------------------------------------------


@pytest.mark.req("D10")
def test_outcomes_that_come_while_detached_are_told_later() -> None:
    world = World(asks=True)
    publisher = world.publisher(timeout=60)
    declare(publisher, "q")
    publisher.connection.holds = holds = []
    assert publisher.send(key="q") == []
    publisher.channel.attachment.lose(world.now)
    publisher.connection.place(holds[0])
    again = world.channel()
    again.control(SessionAttach(name=NAME), SessionFlush(completed=True))
    again.control(SessionExpected(commands=ranges((0, 0))))
    assert completed(0) in again.taken()
    assert world.available("q") == 1


def test_fragments_alone_are_whole_messages(world: World, publisher: Publishing) -> None:
    whole = FragmentProperties(first=True, last=True)
    assert publisher.send(key="q", fragment=whole) == [completed(0)]
    assert world.available("q") == 1
