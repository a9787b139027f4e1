"""A container as its peers see it, over every transport, and its life from start to drain."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import trio
from transports import Reach

from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import Router, node, rpc, source
from amqp_rt.container.deliveries import Delivery
from amqp_rt.container.raising import Modify, Reject, Release
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.routes import CallNext, Context, Deadline
from amqp_rt.container.sending import Sender
from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.events import Peer
from amqp_rt.fronts.base import SENDER
from amqp_rt.fronts.hosts import BareHost
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Modified, Rejected, rejected
from amqp_rt.security.mechanisms import Plain


class Order(msgspec.Struct):
    sku: str
    quantity: int = 1


class Shop:
    """A node of every kind, and a note of what they saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @node("orders")
    async def place(self, order: Order) -> None:
        self.seen.append(order)

    @node("orders/{region}/{number}")
    def placed_in(self, order: Order, number: int, region: str, message: Message) -> None:
        self.seen.append((region, number, order.sku, message.subject))

    @rpc("price")
    async def price(self, sku: str, *, deadline: Deadline, peer: Peer) -> Decimal:
        self.seen.append((sku, deadline.remaining_s < 60, peer.container_id != ""))
        return Decimal("9.50")

    @rpc("add")
    def add(self, a: int, b: int) -> int:
        return a + b

    @rpc("ping")
    async def ping(self) -> str:
        return "pong"

    @rpc("count")
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    @source("events")
    async def events(self) -> AsyncIterator[Order]:
        for quantity in range(3):
            yield Order("A-1", quantity)

    @node.link("raw/{region}")
    async def raw(self, link: Receiver | Sender, region: str) -> None:
        if isinstance(link, Sender):
            await link.send(f"hello from {region}")
            return
        async for delivery in link:
            self.seen.append((region, delivery.body))
            delivery.accept()


@pytest.fixture
async def shop() -> AsyncIterator[tuple[Container, Shop]]:
    nodes = Shop()
    async with Container("shop", nodes=[nodes]) as container:
        yield container, nodes


Served = tuple[Container, Shop]


# --- the same over every transport ---------------------------------------------------------


@pytest.mark.req("A1", "A2", "A3", "A12")
async def test_a_message_reaches_its_handler(shop: Served, reach: Reach) -> None:
    container, nodes = shop
    async with reach(container) as peer, peer.sender("orders") as out:
        assert await out.send(Order("A-1", 3)) == ACCEPTED
    assert nodes.seen == [Order("A-1", 3)]


@pytest.mark.req("A3", "A12")
@pytest.mark.parametrize(
    ("body", "options"),
    [
        (b'{"sku":"A-1"}', {"content_type": "application/json"}),
        (b"\x81\xa3sku\xa3A-1", {"content_type": "application/msgpack"}),
        ({"sku": "A-1"}, {"body_kind": "value"}),
        (b'{"sku":"A-1"}', {}),
    ],
)
async def test_the_payload_is_decoded_by_its_content_type(
    shop: Served, reach: Reach, body: Any, options: Any
) -> None:
    container, nodes = shop
    async with reach(container) as peer, peer.sender("orders") as out:
        await out.send(Message(body, **options))
    assert nodes.seen == [Order("A-1")]


@pytest.mark.req("A3", "A12")
async def test_what_cannot_be_decoded_is_rejected_before_the_handler(
    shop: Served, reach: Reach
) -> None:
    container, nodes = shop
    async with reach(container) as peer, peer.sender("orders") as out:
        with pytest.raises(DeliveryRejected, match="sku") as caught:
            await out.send({"quantity": 1})
        assert caught.value.condition == "amqp:decode-error"
        with pytest.raises(DeliveryRejected) as caught:
            await out.send_payload(b"\x00\x53\x99\x45")
        assert caught.value.condition == "amqp:decode-error"
    assert nodes.seen == []
    assert container.stats()["orders"]["rejected"] == 2


@pytest.mark.req("A1", "A12")
async def test_captures_go_by_name_converted(shop: Served, reach: Reach) -> None:
    container, nodes = shop
    async with reach(container) as peer:
        async with peer.sender("orders/eu/17") as out:
            await out.send(Order("A-1"), subject="new")
        with pytest.raises(LinkRefused, match="number in 'orders/eu/x': Expected `int`"):
            async with peer.sender("orders/eu/x"):
                pass
    assert nodes.seen == [("eu", 17, "A-1", "new")]


@pytest.mark.req("A2", "A6", "A12")
async def test_requests_are_answered(shop: Served, reach: Reach) -> None:
    container, nodes = shop
    async with reach(container) as peer:
        assert await peer.call("price", "A-1", reply=Decimal, within=30) == Decimal("9.50")
        assert await peer.call("add", 2, 3, reply=int) == 5
        assert await peer.call("ping") == "pong"
    assert nodes.seen == [("A-1", True, True)]


@pytest.mark.req("A7", "A12")
async def test_replies_are_streamed(shop: Served, reach: Reach) -> None:
    container, _ = shop
    async with reach(container) as peer:
        assert [item async for item in peer.stream("count", 250, reply=int)] == list(range(250))
        assert [item async for item in peer.stream("count", 0, reply=int)] == []


@pytest.mark.req("A2", "A12")
async def test_a_source_feeds_each_receiver_and_ends_with_its_generator(
    shop: Served, reach: Reach
) -> None:
    container, _ = shop
    async with reach(container) as peer:
        for _ in range(2):
            receiver = peer.receiver("events", credit=2)
            async with receiver:
                got: list[int] = []
                while len(got) < 3:
                    async with await receiver.receive() as delivery:
                        got.append(delivery.decode(Order).quantity)
                with pytest.raises(LinkDetached):
                    await receiver.receive()
            assert got == [0, 1, 2]
            assert receiver.closed


@pytest.mark.req("A2", "A12")
async def test_a_link_handler_has_the_whole_link(shop: Served, reach: Reach) -> None:
    container, nodes = shop
    async with reach(container) as peer:
        async with peer.sender("raw/eu") as out:
            assert await out.send("one") == ACCEPTED
            assert await out.send("two") == ACCEPTED
        async with peer.receiver("raw/us") as inward, await inward.receive() as delivery:
            assert delivery.body == "hello from us"
    assert nodes.seen == [("eu", "one"), ("eu", "two")]


@pytest.mark.req("X14", "A12")
@pytest.mark.parametrize(
    ("address", "sends", "condition"),
    [
        ("nowhere", True, "amqp:not-found"),
        ("nowhere", False, "amqp:not-found"),
        ("events", True, "amqp:not-found"),
        ("orders", False, "amqp:not-found"),
    ],
)
async def test_an_unknown_address_is_refused(
    shop: Served, reach: Reach, address: str, sends: bool, condition: str
) -> None:
    container, _ = shop
    async with reach(container) as peer:
        with pytest.raises(LinkRefused, match=address) as caught:
            async with peer.sender(address) if sends else peer.receiver(address):
                pass
        assert caught.value.condition == condition


@pytest.mark.req("A18", "A12")
async def test_both_sides_send_and_receive_over_one_connection(tmp_path: Any) -> None:
    async def greet(name: str, connection: Connection) -> str:
        asked: str = await connection.call("who", reply=str)
        return f"{name} from {asked}"

    @rpc("who")
    async def who() -> str:
        return "the other side"

    network = MemoryNetwork()
    async with (
        Container("a", network=network) as a,
        Container("b", nodes=[who], network=network) as b,
    ):
        a.rpc("greet")(greet)
        await a.listen("memory://a")
        async with b.connect("memory://a") as peer:
            assert await peer.call("greet", "hello", reply=str) == "hello from the other side"
            [connection] = a.connections
            async with connection.sender(None) as out:
                with pytest.raises(DeliveryRejected):
                    await out.send(1, to="nowhere")


# --- outcomes ------------------------------------------------------------------------------


@pytest.mark.req("A9", "M21", "M22", "M23")
@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (None, ACCEPTED),
        (ACCEPTED, ACCEPTED),
        (RELEASED, RELEASED),
        (rejected("shop:closed", "on Sundays"), rejected("shop:closed", "on Sundays")),
        (Reject("no such sku"), rejected("amqp:precondition-failed", "no such sku")),
        (Release("later"), RELEASED),
        (Modify(undeliverable_here=True), Modified(True, True)),
        (ValueError("oops"), MODIFIED_FAILED),
        (ExceptionGroup("two", [ValueError("a"), ValueError("b")]), MODIFIED_FAILED),
        ("anything else", ACCEPTED),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_how_a_handler_ends_is_the_outcome(end: Any, outcome: Any, is_async: bool) -> None:
    def handle() -> Any:
        if isinstance(end, Exception):
            raise end
        return end

    async def handle_async() -> Any:
        await trio.lowlevel.checkpoint()
        return handle()

    container = Container("c")
    container.node("x")(handle_async if is_async else handle)
    async with container, container.local() as peer, peer.sender("x") as out:
        receipt = out.send_nowait(b"")
        assert await receipt.outcome() == outcome


@pytest.mark.req("A9")
async def test_a_handler_that_raises_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @node("x")
    async def broken() -> None:
        raise ValueError("what happened")

    async with Container("c", nodes=[broken]) as c, c.local() as peer, peer.sender("x") as out:
        with pytest.raises(DeliveryNotAccepted):
            await out.send(b"")
        [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert record.exc_info is not None
        # The reader's own code comes first.
        assert record.exc_info[2] is not None
        assert record.exc_info[2].tb_frame.f_code.co_name == "broken"
        assert "broken on a message to 'x'" in record.getMessage()
        # The container and the link go on.
        with pytest.raises(DeliveryNotAccepted):
            await out.send(b"")
    assert c.stats()["x"]["failed"] == 2


@pytest.mark.req("A9")
@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        (RELEASED, RELEASED),
        (rejected("shop:broken"), rejected("shop:broken")),
        (lambda error: rejected("shop:broken", str(error)), rejected("shop:broken", "oops")),
    ],
)
@pytest.mark.parametrize("of_node", [True, False])
async def test_the_outcome_of_a_failure_is_a_choice(
    policy: Any, outcome: Any, of_node: bool
) -> None:
    async def broken() -> None:
        raise ValueError("oops")

    c = Container("c", on_error=MODIFIED_FAILED if of_node else policy)
    c.node("x", on_error=policy if of_node else None)(broken)
    async with c, c.local() as peer, peer.sender("x") as out:
        assert await out.send_nowait(b"").outcome() == outcome


@pytest.mark.req("A9")
async def test_a_handler_may_settle_by_hand() -> None:
    @node("x")
    async def by_hand(delivery: Delivery) -> None:
        delivery.reject("not today")

    async with Container("c", nodes=[by_hand]) as c, c.local() as peer, peer.sender("x") as out:
        outcome = await out.send_nowait(b"").outcome()
    assert isinstance(outcome, Rejected)


@pytest.mark.req("A9")
async def test_cancelled_is_not_failed(autojump_clock: trio.testing.MockClock) -> None:
    entered = trio.Event()
    cleaned = trio.Event()

    @node("x")
    async def slow() -> None:
        entered.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
        finally:
            cleaned.set()

    network = MemoryNetwork()
    async with Container("client", network=network) as client:
        async with Container("c", nodes=[slow], drain_s=3, network=network) as c:
            await c.listen("memory://c")
            connecting = client.connect("memory://c", reconnect=None)
            peer = await connecting.__aenter__()
            out = peer.sender("x")
            await out.wait_attached()
            receipt = out.send_nowait(b"")
            await entered.wait()
            before = trio.current_time()
        assert cleaned.is_set()
        assert trio.current_time() - before == pytest.approx(3)
        assert await receipt.outcome() == RELEASED
        assert c.stats()["x"]["failed"] == 0
        await connecting.__aexit__(None, None, None)


# --- slots, prefetch, turns ----------------------------------------------------------------


@pytest.mark.req("A11")
@pytest.mark.parametrize(
    ("options", "credit"),
    [({}, 501), ({"slots": 8}, 508), ({"slots": 3, "prefetch": 0}, 3), ({"prefetch": 10}, 11)],
)
async def test_credit_is_slots_and_prefetch(options: Any, credit: int) -> None:
    c = Container("c")
    c.node("x", **options)(lambda body: None)
    async with c, c.local() as peer, peer.sender("x") as out:
        await trio.testing.wait_all_tasks_blocked()
        assert out.credit == credit


@pytest.mark.req("A11")
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 2, 100])
async def test_at_most_slots_run_at_once(slots: int, prefetch: int) -> None:
    running = 0
    most = 0
    order = []

    async def handle(body: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.lowlevel.checkpoint()
        order.append(body)
        running -= 1

    c = Container("c")
    c.node("x", slots=slots, prefetch=prefetch)(handle)
    async with (
        c,
        c.local() as peer,
        peer.sender("x") as one,
        peer.sender("x") as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(one.send_many, range(100))
        nursery.start_soon(other.send_many, range(100, 200))
    # Without prefetch a slot is free while its credit travels.
    assert most == slots if prefetch else 1 <= most <= slots
    assert sorted(order) == list(range(200))
    if slots == 1:
        assert [each for each in order if each < 100] == list(range(100))
        assert [each for each in order if each >= 100] == list(range(100, 200))


@pytest.mark.req("A11")
async def test_links_get_their_turn(autojump_clock: trio.testing.MockClock) -> None:
    order = []

    async def handle(body: str) -> None:
        order.append(body)
        await trio.sleep(1)

    c = Container("c")
    c.node("x")(handle)
    async with c, c.local() as peer, peer.sender("x") as one, peer.sender("x") as other:
        first = [one.send_nowait("a") for _ in range(5)]
        await trio.testing.wait_all_tasks_blocked()
        second = [other.send_nowait("b") for _ in range(5)]
        for receipt in first + second:
            await receipt.outcome()
    assert order == ["a", "a", "b", "a", "b", "a", "b", "a", "b", "b"] or order == [
        "a", "b", "a", "b", "a", "b", "a", "b", "a", "b",
    ]  # fmt: skip


@pytest.mark.req("A11")
async def test_without_prefetch_no_link_starves_beside_an_idle_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    c = Container("c")
    c.node("x", prefetch=0)(lambda body: None)
    async with c, c.local() as peer, peer.sender("x") as one, peer.sender("x") as other:
        await trio.testing.wait_all_tasks_blocked()
        assert one.credit + other.credit == 1
        for sender in (other, one, other, other, one):
            await sender.send(b"")
    assert c.stats()["x"]["accepted"] == 5


@pytest.mark.req("A11")
async def test_a_link_gets_the_slot_that_a_long_message_frees_to_an_idle_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def handle(body: bytes) -> None:
        # Longer than any pause between two looks for unused credit, which end while no link has credit.
        await trio.sleep(60)

    c = Container("c")
    c.node("x", prefetch=0)(handle)
    async with c, c.local() as peer, peer.sender("x") as busy, peer.sender("x"):
        with trio.fail_after(300):
            for _ in range(3):
                await busy.send(b"")
    assert c.stats()["x"]["accepted"] == 3


@pytest.mark.req("A11", "A14")
async def test_a_handler_that_never_waits_does_not_starve_others() -> None:
    turns = 0
    seen = 0

    def handle(body: bytes) -> None:
        nonlocal seen
        seen += 1

    async def bystander() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    c = Container("c")
    c.node("x", prefetch=5000)(handle)
    async with c, c.local() as peer, peer.sender("x", max_pending=5000) as out:
        receipts = [out.send_nowait(b"") for _ in range(2000)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bystander)
            await receipts[-1].outcome()
            nursery.cancel_scope.cancel()
    assert seen == 2000
    assert turns >= 2000 / 64


# --- asking for things ---------------------------------------------------------------------


class Database:
    def __init__(self) -> None:
        self.open = True


@pytest.mark.req("A4", "A13")
async def test_resources_live_as_long_as_the_container() -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def database() -> AsyncIterator[Database]:
        steps.append("open")
        async with trio.open_nursery():
            made = Database()
            yield made
            made.open = False
            steps.append("closed")

    @rpc("open")
    async def is_open(db: Database) -> bool:
        return db.open

    c = Container("c", resources=[database], nodes=[is_open])
    c.on_startup(lambda: steps.append("started"))

    @c.on_shutdown
    async def last() -> None:
        await trio.lowlevel.checkpoint()
        steps.append("stopping")

    assert not c.ready
    async with c:
        assert c.ready
        await c.wait_ready()
        async with c.local() as peer:
            assert await peer.call("open", reply=bool)
    assert not c.ready
    assert steps == ["open", "started", "stopping", "closed"]


@pytest.mark.req("A5")
async def test_middleware_wraps_handlers_of_every_kind() -> None:
    steps: list[Any] = []

    def noting(name: str) -> Any:
        async def middleware(call_next: CallNext, context: Context) -> Any:
            steps.append((name, context.address, context.payload is not None))
            result = await call_next(context)
            steps.append(name)
            return result

        return middleware

    async def deaf(call_next: CallNext, context: Context) -> Any:
        raise Reject("not for you")

    async def doubling(call_next: CallNext, context: Context) -> Any:
        context.payload *= 2
        return await call_next(context)

    router = Router("in/", middleware=[noting("router")])

    @router.node("x", middleware=[noting("own")])
    def x(body: int) -> None:
        steps.append(body)

    @router.rpc("double", middleware=[doubling])
    async def double(body: int) -> int:
        return body

    @router.rpc("count")
    async def counting(to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    @router.node("deaf", middleware=[deaf])
    def never(body: int) -> None:
        raise AssertionError

    c = Container("c", nodes=[router], middleware=[noting("container")])
    async with c, c.local() as peer:
        async with peer.sender("in/x") as out:
            await out.send(7)
        assert steps == [
            ("container", "in/x", True),
            ("router", "in/x", True),
            ("own", "in/x", True),
            7,
            "own",
            "router",
            "container",
        ]
        assert await peer.call("in/double", 4, reply=int) == 8
        assert [each async for each in peer.stream("in/count", 3, reply=int)] == [0, 1, 2]
        async with peer.sender("in/deaf") as out:
            with pytest.raises(DeliveryRejected, match="not for you"):
                await out.send(1)


# --- life ----------------------------------------------------------------------------------


@pytest.mark.req("A10")
async def test_leaving_finishes_what_runs_and_gives_back_what_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    @node("x", prefetch=10)
    async def slow(body: int) -> None:
        await trio.sleep(2)

    network = MemoryNetwork()
    async with Container("client", network=network) as client:
        async with Container("c", nodes=[slow], network=network) as c:
            await c.listen("memory://c")
            connecting = client.connect("memory://c", reconnect=None)
            peer = await connecting.__aenter__()
            out = peer.sender("x")
            await out.wait_attached()
            receipts = [out.send_nowait(number) for number in range(4)]
            await trio.sleep(1)
            assert out.credit == 7
        assert trio.current_time() == pytest.approx(2, abs=0.1)
        assert [await each.outcome() for each in receipts] == [ACCEPTED, *[RELEASED] * 3]
        with pytest.raises(ConnectionLost, match="'c' is stopping"):
            await out.send(1)
        await peer.wait_closed()
        with pytest.raises(ConnectFailed, match="memory://c"):
            async with client.connect("memory://c", reconnect=None):
                pass
        await connecting.__aexit__(None, None, None)


@pytest.mark.req("A13")
async def test_an_exception_in_the_block_comes_out_as_it_is() -> None:
    entered = trio.Event()

    @node("x")
    async def forever() -> None:
        entered.set()
        await trio.sleep_forever()

    async def run() -> None:
        c = Container("c", nodes=[forever])
        async with c, c.local() as peer, peer.sender("x") as out:
            out.send_nowait(b"")
            await entered.wait()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run()


@pytest.mark.req("A13")
async def test_a_cancelled_block_ends_at_once() -> None:
    entered = trio.Event()

    @node("x")
    async def forever() -> None:
        entered.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            c = Container("c", nodes=[forever])
            async with c, c.local() as peer, peer.sender("x") as out:
                out.send_nowait(b"")
                await c.serve()

        nursery.start_soon(run)
        await entered.wait()
        nursery.cancel_scope.cancel()


async def test_serving_ends_with_stop() -> None:
    async with Container("c") as c:
        c.stop()
        await c.serve()


async def test_a_container_runs_once_and_only_in_its_block() -> None:
    c = Container("c")
    with pytest.raises(RuntimeError, match="does not run: use it in `async with`"):
        await c.listen("memory://c")
    async with c:
        with pytest.raises(RuntimeError, match="has been entered before"):
            await c.__aenter__()


async def test_a_hook_that_fails_is_what_is_raised() -> None:
    c = Container("c")

    @c.on_startup
    def fail() -> None:
        raise ValueError("no database")

    with pytest.raises(ValueError, match="no database"):
        async with c:
            raise AssertionError


@pytest.mark.req("A17")
async def test_nodes_come_and_go_at_run_time(autojump_clock: trio.testing.MockClock) -> None:
    @node("x")
    async def x(body: int) -> None:
        await trio.sleep(1)

    async with Container("c") as c, c.local() as peer:
        with pytest.raises(LinkRefused):
            await peer.sender("x").wait_attached()
        c.add(x)
        out = peer.sender("x")
        await out.wait_attached()
        receipt = out.send_nowait(1)
        waiting = out.send_nowait(2)
        await trio.sleep(0.5)
        c.remove(x)
        with pytest.raises(LinkRefused):
            await peer.sender("x").wait_attached()
        assert await receipt.outcome() == ACCEPTED  # it had been started
        assert await waiting.outcome() == RELEASED
        await trio.sleep(0.1)
        with pytest.raises(LinkDetached) as caught:
            await out.send(3)
        assert caught.value.condition == "amqp:resource-deleted"
        c.add(x)
        async with peer.sender("x") as again:
            await again.send(4)


# --- links ---------------------------------------------------------------------------------


@pytest.mark.req("X13")
async def test_the_same_link_attached_again_takes_it_over() -> None:
    c = Container("c")
    c.node("x")(lambda body: None)
    network = c.network
    async with (
        c,
        Container("twin", network=network) as one,
        Container("twin", network=network) as two,
    ):
        await c.listen("memory://c")
        async with one.connect("memory://c") as first, two.connect("memory://c") as second:
            old = first.sender("x", name="the-link")
            await old.wait_attached()
            new = second.sender("x", name="the-link")
            await new.wait_attached()
            with pytest.raises(LinkDetached) as caught:
                await old.send(1)
            assert caught.value.condition == "amqp:link:stolen"
            await new.send(2)


@pytest.mark.req("SE2", "SE6")
async def test_users_log_in_and_links_are_theirs_to_take_over() -> None:
    seen: list[Any] = []

    async def verify(user: str, password: str, peer: Peer) -> Any:
        return {"name": user} if password == user[::-1] else None

    @node("x")
    def x(body: int, peer: Peer) -> None:
        seen.append((peer.user, peer.identity))

    limits = Limits(failed_login_delay_s=0.01)
    c = Container("c", nodes=[x], users=verify, limits=limits)
    network = c.network
    async with c, Container("twin", network=network) as client:
        await c.listen("memory://c")
        async with (
            client.connect("memory://c", auth=Plain("ann", "nna")) as ann,
            client.connect("memory://c", auth=Plain("bob", "bob")) as bob,
            ann.sender("x", name="same") as one,
            bob.sender("x", name="same") as two,
        ):
            await two.send(1)
            await one.send(2)
        for options in ({"auth": Plain("ann", "wrong")}, {}, {"sasl": False}):
            with pytest.raises((AuthenticationFailed, ConnectFailed)):
                async with client.connect("memory://c", reconnect=None, **options):
                    pass
    assert seen == [("bob", {"name": "bob"}), ("ann", {"name": "ann"})]


@pytest.mark.req("SE18")
async def test_every_failed_login_is_answered_alike_and_late(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def verify(user: str, password: str, peer: Peer) -> Any:
        if user == "broken":
            raise ValueError("the database is down")
        return user if (user, password) == ("ann", "right") else None

    answers = []
    c = Container("c", users=verify, limits=Limits(failed_login_delay_max_s=1))
    async with c, Container("client", network=c.network) as client:
        await c.listen("memory://c")
        for auth in (Plain("ann", "wrong"), Plain("nobody", "x"), Plain("broken", "x")):
            start = trio.current_time()
            with pytest.raises(AuthenticationFailed) as caught:
                async with client.connect("memory://c", auth=auth, reconnect=None):
                    pass
            answers.append((trio.current_time() - start, str(caught.value)))
        async with client.connect("memory://c", auth=Plain("ann", "right"), reconnect=None):
            pass
    assert answers[0][0] == pytest.approx(DEFAULT_LIMITS.failed_login_delay_s, abs=0.01)
    assert len({text for _, text in answers}) == 1
    assert len({round(seconds, 2) for seconds, _ in answers}) == 1


@pytest.mark.req("X7")
async def test_a_peer_that_says_nothing_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Container("c") as c:
        await c.listen("memory://c")
        stream = await c.network.dial("c")
        start = trio.current_time()
        assert await stream.receive_some() == b""
        assert trio.current_time() - start == pytest.approx(DEFAULT_LIMITS.handshake_s)


@pytest.mark.req("X1")
@pytest.mark.usefixtures("short_linger")
async def test_a_foreign_protocol_is_told_ours() -> None:
    async with Container("c") as c:
        await c.listen("memory://c")
        stream = await c.network.dial("c")
        await stream.send_all(b"HTTP/1.1")
        assert await stream.receive_some() == b"AMQP\x00\x01\x00\x00"
        assert await stream.receive_some() == b""


@pytest.mark.req("A13")
async def test_a_bug_in_an_endpoint_ends_its_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(BareHost):
        """A host whose endpoint fails."""

        def attach(self, link: Any) -> bool:
            if link.target is None or link.target.address != "broken":
                return False
            raise ValueError("a bug")

    c = Container("c", nodes=[Shop()])
    c.add_host(Broken())
    async with c, Container("client", network=c.network) as client:
        await c.listen("memory://c")
        async with client.connect("memory://c", reconnect=None) as other:
            async with client.connect("memory://c", reconnect=None) as peer:
                with pytest.raises(AmqpError):
                    await peer.sender("broken").wait_attached()
            assert await other.call("ping") == "pong"
    assert any("broke" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("first", [False, True])
async def test_a_host_may_be_asked_before_the_nodes(first: bool) -> None:
    class Inbox(BareHost):
        """A host that takes what is sent to ``x``."""

        def __init__(self) -> None:
            self.got: list[bytes] = []

        def attach(self, link: Any) -> bool:
            if link.role == SENDER or link.target.address != "x":
                return False
            link.accept(self, target=link.target)
            return True

        def relay(self, address: str, link: Any) -> Any:
            return self if address == "x" else None

        def on_attached(self, link: Any) -> None:
            link.grant(1)

        def deliver(self, link: Any, deliveries: list[Any]) -> None:
            for each in deliveries:
                self.got.append(Message.decode(each.payload).body)
                each.settle(ACCEPTED)

        def on_flow(self, link: Any) -> None: ...

        def on_detached(self, link: Any, error: Any, closed: bool) -> None: ...

    handled: list[bytes] = []
    c = Container("c")

    @c.node("x")
    def x(body: bytes) -> None:
        handled.append(body)

    host = Inbox()
    c.add_host(host, first=first)
    async with c, c.local() as peer:
        async with peer.sender("x") as sender:
            await sender.send(b"attached")
        async with peer.sender() as sender:
            await sender.send(b"relayed", to="x")
    both = [b"attached", b"relayed"]
    assert (host.got, handled) == ((both, []) if first else ([], both))


@pytest.mark.req("SE17")
async def test_each_attach_may_be_authorised() -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        if address == "broken":
            raise ValueError
        return (address, role) in {("x", "sender"), ("events", "receiver")}

    shop = Shop()
    c = Container("c", nodes=[shop], authorize=authorize)
    c.node("x")(lambda body: None)
    async with c, c.local() as peer:
        async with peer.sender("x") as out:
            await out.send(1)
        async with peer.receiver("events") as events:
            (await events.receive()).accept()
        for address in ("orders", "broken"):
            with pytest.raises(LinkRefused) as caught:
                await peer.sender(address).wait_attached()
            assert caught.value.condition == "amqp:unauthorized-access"
        async with peer.sender(None) as relay:
            assert await relay.send(2, to="x") == ACCEPTED
            with pytest.raises(DeliveryRejected) as refused:
                await relay.send(2, to="orders")
            assert refused.value.condition == "amqp:unauthorized-access"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("amqps://127.0.0.1:0", "there is no certificate; pass tls=ServerTls"),
        ("wss://127.0.0.1:0/amqp", "there is no certificate; pass tls=ServerTls"),
        ("sb://127.0.0.1:0", "that is a scheme of clients; use amqps://"),
        ("http://x", "http"),
        ("amqp://127.0.0.1:70000", "port"),
        ("amqp+unix:///nowhere/at/all", "/nowhere/at/all"),
        ("memory://taken", "memory://taken"),
    ],
)
async def test_what_cannot_be_listened_on_gets_a_sentence(url: str, sentence: str) -> None:
    async with Container("c") as c:
        await c.listen("memory://taken")
        with pytest.raises(ConnectFailed) as caught:
            await c.listen(url)
        assert sentence in str(caught.value)


@pytest.mark.req("L1", "L3", "L4")
async def test_listening_tells_where(tmp_path: Any) -> None:
    async with Container("c") as c:
        path = f"{tmp_path}/s"
        bound = await c.listen("amqp://127.0.0.1:0", f"amqp+unix://{path}", "memory://m")
        assert bound[0].startswith("amqp://127.0.0.1:")
        assert not bound[0].endswith(":0")
        assert bound[1:] == [f"amqp+unix://{path}", "memory://m"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.req("A19")
async def test_statistics_count_what_became_of_messages(shop: Served) -> None:
    container, _ = shop
    async with container.local() as peer, peer.sender("orders") as out:
        await out.send(Order("A-1"))
        with pytest.raises(DeliveryRejected):
            await out.send(1)
        stats = container.stats()["orders"]
    assert {name: value for name, value in stats.items() if value} == {
        "links": 1,
        "received": 2,
        "accepted": 1,
        "rejected": 1,
    }


@pytest.mark.req("A19")
def test_two_nodes_at_one_address_are_counted_apart() -> None:
    c = Container("c", nodes=[Shop()])
    c.node("events")(lambda body: None)
    assert {"events", "node events"} < c.stats().keys()


@pytest.mark.req("M18")
async def test_a_message_format_nobody_knows_is_rejected(shop: Served) -> None:
    container, nodes = shop
    async with container.local() as peer, peer.sender("orders") as out:
        with pytest.raises(DeliveryRejected) as caught:
            await out.send_payload(b"anything", message_format=7)
        assert caught.value.condition == "amqp:not-implemented"
    assert nodes.seen == []


def test_a_container_says_what_it_is() -> None:
    assert repr(Container("shop", nodes=[Shop()])) == "<Container 'shop', 8 nodes, not started>"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sasl": {"PLAIN"}}, "sasl has PLAIN, but there are no users"),
        ({"sasl": {"MAGIC"}}, "the mechanism 'MAGIC' is not known"),
    ],
)
def test_impossible_security_is_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Container("c", **options)


def test_a_container_has_a_name() -> None:
    with pytest.raises(ValueError, match="a container needs a name"):
        Container("")
