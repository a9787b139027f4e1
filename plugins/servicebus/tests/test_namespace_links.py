"""Links to the entities of a namespace, by a client in memory: where they attach, what the answers hold, why they are refused."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from amqp_rt_servicebus.conditions import (
    ENTITY_DISABLED,
    NOT_ALLOWED,
    SESSION_CANNOT_BE_LOCKED,
    TIMEOUT,
)
from amqp_rt_servicebus.declarations import Queue, Subscription, Topic
from amqp_rt_servicebus.entity import Entity
from amqp_rt_servicebus.host import (
    ATTACH_TIMEOUT,
    BATCH_SIZE,
    LOCKED_UNTIL,
    SESSION_FILTER,
    SESSION_WAIT_S,
    VIA_DESTINATION,
)
from amqp_rt_servicebus.messages import BATCH_FORMAT
from amqp_rt_servicebus.namespace import Namespace
from trio.testing import MockClock

from amqp_rt import Broker, Connection, Message
from amqp_rt.errors import AmqpError, DeliveryRejected
from amqp_rt.values import Described, Symbol, Timestamp, UInt

TICKS_AT_1970 = 621_355_968_000_000_000


class Bus:
    """A namespace, and a client of the process itself."""

    def __init__(self, broker: Broker, namespace: Namespace, peer: Connection) -> None:
        self.broker = broker
        self.namespace = namespace
        self.peer = peer

    async def refused(self, role: str, address: str | None, **options: Any) -> str:
        """Attach a link that is refused; return the condition."""
        link = self.peer.sender if role == "sender" else self.peer.receiver
        with pytest.raises(AmqpError) as caught:
            async with link(address, **options):
                pass
        return caught.value.condition

    async def send(self, address: str, body: str, **fields: Any) -> None:
        async with self.peer.sender(address) as sender:
            await sender.send(Message(body, **fields))

    def active(self, *path: str) -> int:
        return self.namespace.existing(path).entity.sizes().active


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    namespace = Namespace(
        Queue("q"),
        Queue("s", requires_session=True, lock_duration=30),
        Queue("from", forward_to="q"),
        Queue("off", status="Disabled"),
        Queue("in", status="ReceiveDisabled"),
        Topic("t", [Subscription("x")]),
    )
    async with (
        Broker(addons=[namespace], volatile=True) as broker,
        broker.local() as peer,
    ):
        yield Bus(broker, namespace, peer)


def session(wanted: object, *, described: bool = True) -> dict[object, object]:
    """Return a filter for a session."""
    value = Described(Symbol(SESSION_FILTER), wanted) if described else wanted
    return {Symbol(SESSION_FILTER): value}


# --- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "address", "options", "condition"),
    [
        ("receiver", "nowhere", {}, "amqp:not-found"),
        ("sender", "nowhere", {}, "amqp:not-found"),
        ("receiver", "t/subscriptions/nowhere", {}, "amqp:not-found"),
        ("receiver", "t/$deadletterqueue", {}, "amqp:not-found"),
        ("receiver", "t", {}, NOT_ALLOWED),
        ("receiver", "from", {}, NOT_ALLOWED),
        ("receiver", "s", {}, NOT_ALLOWED),
        ("receiver", "q", {"filter": session("a")}, NOT_ALLOWED),
        ("receiver", "s/$deadletterqueue", {"filter": session("a")}, NOT_ALLOWED),
        ("receiver", "s", {"filter": session(1)}, "amqp:invalid-field"),
        ("receiver", "s", {"filter": session(b"a", described=False)}, "amqp:invalid-field"),
        ("sender", "t/subscriptions/x", {}, NOT_ALLOWED),
        ("sender", "q/$deadletterqueue", {}, NOT_ALLOWED),
        ("sender", "q/$transfer/$deadletterqueue", {}, NOT_ALLOWED),
        ("sender", "off", {}, ENTITY_DISABLED),
        ("receiver", "off", {}, ENTITY_DISABLED),
        ("receiver", "in", {}, ENTITY_DISABLED),
        ("sender", "q", {"properties": {Symbol(VIA_DESTINATION): 1}}, "amqp:invalid-field"),
        ("sender", "q", {"properties": {Symbol(VIA_DESTINATION): "nowhere"}}, "amqp:not-found"),
        (
            "sender",
            "q",
            {"properties": {Symbol(VIA_DESTINATION): "t/subscriptions/x"}},
            NOT_ALLOWED,
        ),
    ],
)
async def test_a_link_is_refused_with_its_condition(
    bus: Bus,
    autojump_clock: MockClock,
    role: str,
    address: str,
    options: dict[str, Any],
    condition: str,
) -> None:
    assert await bus.refused(role, address, **options) == condition


async def test_an_unknown_entity_is_named_as_the_sdk_for_javascript_expects_it(
    bus: Bus, autojump_clock: MockClock
) -> None:
    with pytest.raises(AmqpError, match=r"The messaging entity .Nowhere. could not be found\."):
        async with bus.peer.receiver("Nowhere"):
            pass


# --- Sessions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("wanted", ["a", ""])
async def test_the_answer_names_the_session_and_the_end_of_its_lock(
    bus: Bus, autojump_clock: MockClock, wanted: str, described: bool
) -> None:
    async with bus.peer.receiver("s", filter=session(wanted, described=described)) as receiver:
        assert dict(receiver.link.source.filter or {}) == {SESSION_FILTER: wanted}
        until = receiver.link.properties[LOCKED_UNTIL]
        assert type(until) is int
        wall = bus.broker.host.clock.wall()
        assert until == pytest.approx((wall + 30) * 10_000_000 + TICKS_AT_1970, abs=10_000_000)
        assert await bus.refused("receiver", "s", filter=session(wanted)) == (
            SESSION_CANNOT_BE_LOCKED
        )


@pytest.mark.parametrize(
    ("properties", "waits_s"),
    [
        ({}, SESSION_WAIT_S),
        ({Symbol(ATTACH_TIMEOUT): UInt(2_000)}, 2),
        ({Symbol(ATTACH_TIMEOUT): 2_500.0}, 2.5),
        ({Symbol(ATTACH_TIMEOUT): "soon"}, SESSION_WAIT_S),
        ({Symbol(ATTACH_TIMEOUT): -1}, SESSION_WAIT_S),
    ],
)
async def test_an_attach_waits_for_any_session_as_long_as_it_says(
    bus: Bus, autojump_clock: MockClock, properties: dict[Any, Any], waits_s: float
) -> None:
    begun = trio.current_time()
    refused = await bus.refused("receiver", "s", filter=session(None), properties=properties)
    assert refused == TIMEOUT
    assert trio.current_time() - begun == pytest.approx(waits_s, abs=0.5)


async def test_an_attach_that_waits_gets_the_session_of_the_first_message(
    bus: Bus, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def later() -> None:
            await trio.sleep(3)
            await bus.send("s", "hello", group_id="b")

        async with bus.peer.receiver("s", filter=session(None)) as receiver:
            assert dict(receiver.link.source.filter or {}) == {SESSION_FILTER: "b"}
            assert (await receiver.receive()).body == "hello"


async def test_an_attach_whose_session_has_ended_does_not_wait(
    bus: Bus, autojump_clock: MockClock
) -> None:
    waiting: Any = bus.namespace.existing(("s",)).waiting

    async def wait(ours: Any) -> None:
        with pytest.raises(AmqpError):
            async with ours.receiver("s", filter=session(None)):
                pass

    async with trio.open_nursery() as nursery, bus.peer.session() as ours:
        nursery.start_soon(wait, ours)
        await trio.sleep(1)
        (attach,) = waiting
    await trio.sleep(1)
    assert waiting == {}
    # The question of rights to it was answered after the end of the session.
    attach._host.attach(attach._link)
    assert waiting == {}


async def test_attaches_that_wait_end_with_their_entity(
    bus: Bus, autojump_clock: MockClock
) -> None:
    refused: list[str] = []

    async def wait() -> None:
        refused.append(await bus.refused("receiver", "s", filter=session(None)))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(wait)
        await trio.sleep(1)
        assert len(bus.namespace.existing(("s",)).waiting) == 2
        bus.namespace.delete(("s",))
    assert refused == ["amqp:not-found"] * 2


# --- Senders -----------------------------------------------------------------------------------


async def test_a_sender_hears_how_large_batches_may_be(bus: Bus, autojump_clock: MockClock) -> None:
    bus.namespace.declare(("small",), Queue("small", max_message_size_in_kilobytes=2))
    async with bus.peer.sender("small") as sender:
        assert sender.link.properties[BATCH_SIZE] == 2048
        assert sender.link.max_message_size == 2048
        await sender.send(b"x" * 2000)
        with pytest.raises(AmqpError, match="more than the 2048 that the peer takes"):
            await sender.send(b"x" * 2100)
    assert bus.active("small") == 1


async def test_no_way_to_an_entity_goes_round_its_size_of_messages(
    bus: Bus, autojump_clock: MockClock
) -> None:
    bus.namespace.declare(("small",), Queue("small", max_message_size_in_kilobytes=2))
    large = Message(b"x" * 2100)
    async with bus.peer.sender() as sender:
        await sender.send(b"x" * 2000, to="small")
        with pytest.raises(AmqpError, match="'small' takes 2048 at most"):
            await sender.send(large.body, to="small")
    request = {"messages": [{"message-id": "1", "message": bytes(large.encode())}]}
    async with bus.peer.management("small") as management:
        with pytest.raises(AmqpError, match="'small' takes 2048 at most"):
            await management.request("com.microsoft:schedule-message", request)
    assert bus.active("small") == 1


async def test_messages_to_an_anonymous_terminus_go_where_they_say(
    bus: Bus, autojump_clock: MockClock
) -> None:
    async with bus.peer.sender() as sender:
        await sender.send("a", to="q")
        await sender.send("b", to="t")
        for address in ("t/subscriptions/x", "q/$deadletterqueue", "nowhere", "s"):
            with pytest.raises(AmqpError):
                await sender.send("c", to=address)
    assert (bus.active("q"), bus.active("t", "x"), bus.active("s")) == (1, 1, 0)


async def test_a_batch_to_an_anonymous_terminus_is_refused(
    bus: Bus, autojump_clock: MockClock
) -> None:
    # A batch may hold messages for several entities, and the octets around them name none.
    one = bytes(Message("a", to="q").encode())
    properties = bytes(Message(b"", to="q").encode())
    payload = properties[: properties.index(b"\x00\x53\x75")]
    payload += b"\x00\x53\x75\xa0" + bytes((len(one),)) + one
    async with bus.peer.sender() as sender:
        with pytest.raises(DeliveryRejected, match="amqp:not-implemented"):
            await sender.send_payload(payload, message_format=BATCH_FORMAT)
    assert bus.active("q") == 0


async def test_a_request_in_a_transaction_is_refused(bus: Bus, autojump_clock: MockClock) -> None:
    # It must not happen outside of the transaction instead.
    due = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(4_000_000_000_000)}
    body = {"messages": [{"message": bytes(Message("m", message_annotations=due).encode())}]}
    named = {"operation": "com.microsoft:schedule-message"}
    request = Message(body, message_id="1", reply_to="answers", application_properties=named)
    with pytest.raises(AmqpError, match="nodes take part in no transactions"):
        async with bus.peer.sender("q/$management") as sender, bus.peer.transaction() as work:
            await sender.send(request, transaction=work)
    assert bus.namespace.existing(("q",)).entity.sizes().scheduled == 0


async def test_credit_that_is_drained_comes_back(bus: Bus, autojump_clock: MockClock) -> None:
    await bus.send("q", "a")
    async with bus.peer.receiver("q", credit=0) as receiver:
        delivery = await receiver.get(within=5)
        assert delivery is not None
        delivery.accept()
        # Without a message the credit is drained and returned, so that a later message is not taken.
        assert await receiver.get(within=5) is None
        await bus.send("q", "b")
        assert bus.active("q") == 1


# --- Memory ------------------------------------------------------------------------------------


def _entities() -> int:
    # Compiled ones have no weak references.
    gc.collect()
    return sum(isinstance(each, Entity) for each in gc.get_objects())


async def _lock_a_message(*, cancelled: bool) -> None:
    before = _entities()
    namespace = Namespace(Queue("q"))
    with trio.CancelScope() as scope:
        async with Broker(addons=[namespace], volatile=True) as broker, broker.local() as peer:
            async with peer.sender("q") as sender:
                await sender.send(Message("one"))
            async with peer.receiver("q") as receiver:
                await receiver.receive()
                assert _entities() > before
                if cancelled:
                    scope.cancel()
                    await trio.sleep_forever()


@pytest.mark.parametrize("cancelled", [False, True], ids=["ended", "cancelled"])
async def test_a_namespace_with_a_locked_message_is_freed(cancelled: bool) -> None:
    before = _entities()
    await _lock_a_message(cancelled=cancelled)
    await trio.testing.wait_all_tasks_blocked()
    assert _entities() == before
