"""Rules of the published 0-10 that no other test checks: messages, queues with subscribers.

``specification/rules.toml`` says which rule each of these tests checks.
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from protocol010 import CREDIT, EXPLICIT, NONE, Failed
from served010 import serving
from subscribers010 import Attached, World

pytestmark = pytest.mark.req("D19")


def attached(world: World, name: bytes = b"s") -> Attached:
    return world.client().attach(name)


def publish(session: Attached, *bodies: bytes, queue: str = "q", **words: object) -> None:
    for body in bodies:
        session.state.transfer("", body, key=queue, accept_mode=None, **words)  # type: ignore[arg-type]
    session.call("execution.sync")


def refused(session: Attached, name: str, /, **fields: object) -> int | None:
    """Send a command that fails; return the error-code."""
    with pytest.raises(Failed) as caught:
        session.call(name, **fields)
    return caught.value.code


# --- messages ----------------------------------------------------------------------------------------


async def test_durable_messages_outlive_the_broker(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with serving(store=store) as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q", durable=True)
        for mode in (1, 2):
            session.transfer("", b"%d" % mode, key="q", delivery={"delivery-mode": mode})
        await session.sync()
    async with serving(store=store) as served, served.client() as client:
        session = await client.session(b"s")
        await session.subscribe("q", "d", flow_mode=CREDIT, messages=5)
        message = await session.message()
        assert message.body == b"2"
        assert message.header("delivery-properties").delivery_mode == 2
        await session.call("message.flush", destination="d")
        assert len(session.state.messages) == 1


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (2, "5678901234"),
        (3, "5678940123"),
        (10, "9876543210"),
    ],
)
def test_priorities_of_a_queue_are_levels(levels: int, expected: str) -> None:
    world = World()
    session = attached(world)
    session.call("queue.declare", queue="q", arguments={"qpid.priorities": levels})
    for priority in range(10):
        publish(session, b"%d" % priority, delivery={"priority": priority})
    session.subscribe("q")
    assert b"".join(session.bodies()).decode() == expected


def test_persistence_does_not_change_the_order() -> None:
    world = World("q")
    session = attached(world)
    for number in range(10):
        publish(session, b"%d" % number, delivery={"delivery-mode": 1 + number % 2})
    session.subscribe("q")
    assert b"".join(session.bodies()) == b"0123456789"


def test_a_message_id_stays_as_it_is() -> None:
    world = World("a", "b")
    session = attached(world)
    for queue in "ab":
        session.call("exchange.bind", queue=queue, exchange="amq.fanout")
    made = UUID(int=42)
    session.state.transfer("amq.fanout", b"x", accept_mode=None, properties={"message-id": made})
    for queue in "ab":
        session.subscribe(queue, queue, flow_mode=CREDIT, messages=1)
        (message,) = session.messages()
        assert message.header("message-properties").message_id == made
        session.release(message.id)
        session.flow(1, queue)
        (again,) = session.messages()
        assert again.header("message-properties").message_id == made


def test_resume_takes_a_destination_that_exists() -> None:
    session = attached(World())
    assert refused(session, "message.resume", destination="nowhere", resume_id="r") == 404


@pytest.mark.parametrize("select_first", [False, True])
@pytest.mark.parametrize(("accept_mode", "code"), [(EXPLICIT, None), (NONE, 530), (None, None)])
def test_transactions_take_explicit_subscriptions(
    select_first: bool, accept_mode: int | None, code: int | None
) -> None:
    """An absent accept-mode is explicit."""
    world = World("q")
    session = attached(world)
    words = {"queue": "q", "destination": "d", "accept_mode": accept_mode}
    steps: list[tuple[str, dict[str, object]]] = [("message.subscribe", words), ("tx.select", {})]
    (first, fields), (last, more) = steps[::-1] if select_first else steps
    session.call(first, **fields)
    if code is None:
        session.call(last, **more)
    else:
        assert refused(session, last, **more) == code


# --- queues with subscribers -------------------------------------------------------------------------


def test_a_queue_has_many_subscriptions() -> None:
    world = World("q")
    sessions = [attached(world, b"%d" % number) for number in range(4)]
    for session in sessions:
        for number in range(8):
            session.subscribe("q", f"d{number}", flow_mode=CREDIT, messages=1)
    publish(sessions[0], *[b"x"] * 40)
    assert [len(each.messages()) for each in sessions] == [8] * 4


def test_an_exclusive_queue_has_no_strangers_as_subscribers() -> None:
    world = World()
    owner, stranger = attached(world), attached(world, b"t")
    owner.call("queue.declare", queue="q", exclusive=True)
    owner.subscribe("q")
    assert refused(stranger, "message.subscribe", queue="q", destination="d") == 405


def test_a_queue_with_subscribers_is_not_unused() -> None:
    world = World("q")
    subscriber, other = attached(world), attached(world, b"t")
    subscriber.subscribe("q")
    assert refused(other, "queue.delete", queue="q", if_unused=True) == 406
    subscriber.call("message.cancel", destination="d")
    attached(world, b"u").call("queue.delete", queue="q", if_unused=True)
    assert not world.host.space().has("q")


def test_a_purge_leaves_what_clients_have() -> None:
    world = World("q")
    session = attached(world)
    publish(session, b"1", b"2", b"3")
    session.subscribe("q", flow_mode=CREDIT, messages=1)
    (first,) = session.messages()
    session.call("queue.purge", queue="q")
    assert (world.stats("q").available, world.stats("q").acquired) == (0, 1)
    session.release(first.id)
    session.flow(1)
    assert session.bodies() == [b"1"]
