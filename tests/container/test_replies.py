"""Requests and their answers on the wire: routing, failures, deadlines, giving up, the relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
import trio
from brokers import client_of
from transports import Reach

from amqp_rt.addresses import REPLY_TO
from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc
from amqp_rt.container.deliveries import Delivery
from amqp_rt.container.raising import Modify, Reject, Release
from amqp_rt.container.routes import Batch, Deadline
from amqp_rt.errors import (
    AmqpError,
    CallFailed,
    DeadlineExceeded,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
    UnreadableReply,
)
from amqp_rt.events import Peer
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, Outcome, Rejected
from amqp_rt.values import Symbol, ULong


class Item(msgspec.Struct):
    number: int


@rpc("echo")
async def echo(message: Message) -> Any:
    return message.body


async def ask(peer: Connection, address: str, request: Message) -> tuple[Outcome, Message]:
    """Send *request* by hand, and take the reply as it comes."""
    async with peer.receiver(dynamic=True) as replies, peer.sender(address) as out:
        receipt = out.send_nowait(request.replace(reply_to=replies.address))
        delivery = await replies.receive()
        return await receipt.outcome(), delivery.message


# --- replies -------------------------------------------------------------------------------


@pytest.mark.req("G1", "M12")
@pytest.mark.parametrize(
    "key", ["text", b"\x00\xff", ULong(7), UUID("12345678-1234-5678-1234-567812345678")]
)
@pytest.mark.parametrize("field", ["message_id", "correlation_id"])
async def test_a_reply_carries_the_key_of_its_request_and_its_type(key: Any, field: str) -> None:
    async with Container("c", nodes=[echo]) as c, c.local() as peer:
        keys = {"message_id": "other", field: key}
        outcome, reply = await ask(peer, "echo", Message("x", **keys))
    assert outcome == ACCEPTED
    assert reply.correlation_id == key
    assert type(reply.correlation_id) is type(key)
    assert reply.body == "x"
    assert not reply.application_properties


@pytest.mark.req("M33", "B2")
async def test_reply_addresses_are_hard_to_guess_and_the_owners() -> None:
    async with Container("c") as c, c.local() as peer:
        receivers = [peer.receiver(dynamic=True, name=f"r{n}") for n in range(3)]
        for each in receivers:
            await each.wait_attached()
        addresses = {str(each.address) for each in receivers}
        assert len(addresses) == 3
        for each in receivers:
            # Container-id and link name, and 128 bits of chance (Part 3 §3.5.3).
            identity, name, chance = str(each.address).split("/")
            assert (identity, name, len(chance)) == ("c", each.name, 22)
            assert each.source.dynamic
            with pytest.raises(LinkRefused):
                await peer.receiver(each.address).wait_attached()
        # Anybody who knows the address may send there.
        async with peer.sender(receivers[0].address) as out:
            receipt = out.send_nowait("hello")
            delivery = await receivers[0].receive()
            assert delivery.body == "hello"
            delivery.reject("no, thank you")
            outcome = await receipt.outcome()
            assert isinstance(outcome, Rejected)
            assert outcome.error is not None
            assert outcome.error.description == "no, thank you"
        address = receivers[0].address
        await receivers[0].close()
        with pytest.raises(LinkRefused):
            await peer.sender(address).wait_attached()


async def test_direct_replies_have_addresses_of_the_container_also_beside_a_broker() -> None:
    """The address that fronts ask for, whose form clients of RabbitMQ know: nothing else can be there."""
    async with Broker(auto_create=["queue:*"]) as broker:
        await broker.listen("memory://b")
        broker.container.rpc("echo")(echo)
        async with client_of(broker) as peer, client_of(broker, "other") as other:
            direct = peer.receiver(dynamic=True, capabilities=(Symbol(REPLY_TO),))
            await direct.wait_attached()
            address = str(direct.address)
            assert address.startswith(f"{REPLY_TO}.")
            assert direct.source.dynamic
            async with peer.sender("echo") as out:
                await out.send(Message("a", reply_to=address, message_id="1"))
            assert (await direct.receive()).body == "a"
            # Messages of 1.0 wait for the credit of the receiver.
            async with other.sender(address) as out, other.sender() as relay:
                for number in range(20):
                    out.send_nowait(number)
                relay.send_nowait(Message("b", to=address))
                bodies = []
                for _ in range(21):
                    delivery = await direct.receive()
                    bodies.append(delivery.body)
                    delivery.accept()
            assert set(bodies) == {*range(20), "b"}
            await direct.close()
            for attach in (other.sender, other.receiver):
                for each in (address, REPLY_TO):
                    with pytest.raises(LinkRefused, match="not-found"):
                        await attach(each).wait_attached()
            async with other.sender() as relay:
                with pytest.raises(DeliveryRejected, match="not-found"):
                    await relay.send(Message("c", to=address))
            with pytest.raises(AmqpError, match="is for replies to requests"):
                await broker.declare(Queue(address))
            assert [each.name for each in broker.nodes()] == []


@pytest.mark.req("G1")
async def test_without_reply_to_the_link_from_the_node_gets_the_reply() -> None:
    """As the clients of management and CBS want it."""
    async with (
        Container("c", nodes=[echo]) as c,
        c.local() as peer,
        peer.session() as session,
        session.receiver("echo") as mine,
        peer.receiver("echo") as another_session,
        session.sender("echo") as out,
    ):
        await out.send(Message(b"x", message_id=1))
        reply = await mine.receive()
        assert reply.message.correlation_id == 1
        assert another_session.waiting == 0


@pytest.mark.req("G1")
async def test_a_reply_goes_to_a_link_of_the_connection_by_either_address() -> None:
    async with (
        Container("c", nodes=[echo]) as c,
        c.local() as peer,
        peer.receiver("echo", target="mine") as mine,
        peer.sender("echo") as out,
    ):
        await out.send(Message(b"x", message_id=1, reply_to="mine"))
        assert (await mine.receive()).message.to == "mine"
        await out.send(Message(b"y", message_id=2, reply_to="echo"))
        assert (await mine.receive()).message.correlation_id == 2


async def test_a_reply_goes_to_a_link_of_the_connection_by_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        Container("c", nodes=[echo]) as c,
        c.local() as peer,
        c.local() as other,
        peer.receiver("echo", name="mine") as mine,
        other.receiver("echo", name="theirs"),
        peer.sender("echo") as out,
    ):
        await out.send(Message("a", reply_to="mine"))
        assert (await mine.receive()).body == "a"
        await out.send(Message("b", reply_to="theirs"))
    assert "unknown reply-to 'theirs'" in caplog.text


async def test_an_address_comes_before_the_name_of_a_link() -> None:
    async with (
        Container("c", nodes=[echo]) as c,
        c.local() as peer,
        peer.receiver("echo", name="x") as by_name,
        peer.receiver("echo", target="x", name="y") as by_address,
        peer.sender("echo") as out,
    ):
        await out.send(Message("a", reply_to="x"))
        assert (await by_address.receive()).body == "a"
        await by_address.close()
        await out.send(Message("b", reply_to="x"))
        assert (await by_name.receive()).body == "b"


async def test_the_name_of_a_link_that_has_ended_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Container("c", nodes=[echo]) as c, c.local() as peer:
        async with peer.receiver("echo", name="mine"):
            pass
        async with peer.sender("echo") as out:
            await out.send(Message("a", reply_to="mine"))
        assert not c.replies._by_name
    assert "unknown reply-to 'mine'" in caplog.text


async def test_a_reply_that_nobody_can_get_is_dropped_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Container("c", nodes=[echo]) as c, c.local() as peer, peer.sender("echo") as out:
        assert await out.send(Message(b"x", reply_to="nowhere")) == ACCEPTED
        assert await out.send(Message(b"x")) == ACCEPTED
    notes = [each.getMessage() for each in caplog.records]
    assert any("the unknown reply-to 'nowhere': its reply is dropped" in note for note in notes)
    assert any("has no reply-to: its reply is dropped" in note for note in notes)


@pytest.mark.req("A7", "A11")
async def test_the_credit_of_the_reply_link_holds_back_the_stream() -> None:
    made = 0

    @rpc("count")
    async def counting() -> AsyncIterator[int]:
        nonlocal made
        for number in range(100):
            made += 1
            yield number

    async with Container("c", nodes=[counting]) as c, c.local() as peer:
        items = peer.stream("count", credit=4, reply=int)
        assert await anext(items) == 0
        await trio.testing.wait_all_tasks_blocked()
        assert made <= 8
        assert [each async for each in items] == list(range(1, 100))


@pytest.mark.req("A7")
async def test_a_streamed_reply_on_the_wire() -> None:
    @rpc("items")
    async def items(count: int) -> AsyncIterator[Item]:
        for number in range(count):
            yield Item(number)

    key = uuid4()
    async with (
        Container("c", nodes=[items]) as c,
        c.local() as peer,
        peer.receiver(dynamic=True) as replies,
        peer.sender("items") as out,
    ):
        await out.send(Message(2, body_kind="value", message_id=key, reply_to=replies.address))
        got = [(await replies.receive()).message for _ in range(3)]
    assert [each.body for each in got] == [b'{"number":0}', b'{"number":1}', b""]
    assert [each.group_sequence for each in got] == [0, 1, 2]
    assert {each.group_id for each in got} == {str(key)}
    assert {each.correlation_id for each in got} == {key}
    assert [dict(each.message_annotations) for each in got] == [
        {},
        {},
        {Symbol("x-opt-stream-end"): True},
    ]


# --- failures ------------------------------------------------------------------------------


@pytest.mark.req("A9", "G1")
@pytest.mark.parametrize(
    ("raised", "status", "condition", "description"),
    [
        (Reject("no such sku"), 400, "amqp:precondition-failed", "no such sku"),
        (Reject("gone", condition="amqp:not-found"), 404, "amqp:not-found", "gone"),
        (AmqpError("no", condition="amqp:unauthorized-access"), 403, "amqp:unauthorized-access", "no"),
        (DeadlineExceeded("too slow"), 408, "amqp:timeout", "too slow"),
        (AmqpError("odd", condition="shop:odd"), 500, "shop:odd", "odd"),
        (ValueError("a secret"), 500, "amqp:internal-error", "'fail' failed"),
    ],
)  # fmt: skip
async def test_a_failure_is_told_to_the_caller(
    raised: Exception, status: int, condition: str, description: str
) -> None:
    @rpc("fail")
    async def fail() -> None:
        raise raised

    async with Container("c", nodes=[fail]) as c, c.local() as peer:
        outcome, reply = await ask(peer, "fail", Message(b""))
        assert outcome == ACCEPTED
        assert reply.application_properties == {
            "statusCode": status,
            "statusDescription": description,
            "errorCondition": condition,
        }
        expected = DeadlineExceeded if status == 408 else CallFailed
        with pytest.raises(expected) as caught:
            await peer.call("fail")
        assert caught.value.description == description
    assert c.stats()["fail"]["failed"] == (2 if isinstance(raised, ValueError) else 0)


@pytest.mark.req("A3")
async def test_a_request_that_cannot_be_decoded_is_rejected_and_told_so() -> None:
    @rpc("price")
    async def price(item: Item) -> Decimal:
        raise AssertionError

    async with Container("c", nodes=[price]) as c, c.local() as peer:
        outcome, reply = await ask(
            peer, "price", Message(b'{"number":"x"}', content_type="application/json")
        )
        assert isinstance(outcome, Rejected)
        assert reply.application_properties["statusCode"] == 400
        async with peer.sender("price") as out:
            with pytest.raises(DeliveryRejected) as caught:
                await out.send_payload(b"\x00\x53\x73\xc0\x00")
            assert caught.value.condition == "amqp:decode-error"


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [(Release(), RELEASED), (Modify(undeliverable_here=True), Modified(True, True))],
)
async def test_a_request_that_is_given_back_has_no_reply(raised: Any, outcome: Any) -> None:
    @rpc("busy")
    async def busy() -> None:
        raise raised

    async with Container("c", nodes=[busy]) as c, c.local() as peer:
        async with peer.sender("busy") as out:
            assert await out.send_nowait(Message(b"")).outcome() == outcome
        with pytest.raises(DeliveryNotAccepted):
            await peer.call("busy")


@pytest.mark.req("A7", "A9")
async def test_a_stream_that_fails_ends_with_the_failure() -> None:
    closed = trio.Event()

    @rpc("items")
    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
            raise Reject("no more", condition="shop:closed")
        finally:
            closed.set()

    async with Container("c", nodes=[items]) as c, c.local() as peer:
        stream = peer.stream("items", reply=int)
        got = [await anext(stream), await anext(stream)]
        with pytest.raises(CallFailed, match="no more") as caught:
            await anext(stream)
        assert caught.value.condition == "shop:closed"
    assert got == [1, 2]
    assert closed.is_set()


async def test_a_reply_that_cannot_be_encoded_is_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @rpc("odd")
    async def odd() -> object:
        return object()

    async with Container("c", nodes=[odd]) as c, c.local() as peer:
        with pytest.raises(CallFailed):
            await peer.call("odd")


# --- deadlines and giving up -----------------------------------------------------------------


class Waiting:
    """A handler that waits, and notes how it went."""

    def __init__(self) -> None:
        self.entered = trio.Event()
        self.ended = trio.Event()
        self.deadlines: list[float] = []

    @rpc("wait", slots=1)
    async def wait(self, *, deadline: Deadline) -> None:
        self.deadlines.append(deadline.remaining_s)
        self.entered.set()
        try:
            await trio.sleep_forever()
        finally:
            self.ended.set()

    @rpc("stream")
    async def stream(self) -> AsyncIterator[int]:
        try:
            number = 0
            while True:
                yield number
                number += 1
                self.entered.set()
        finally:
            self.ended.set()


@pytest.mark.req("A6", "A8")
async def test_the_deadline_travels_and_cancels_the_handler(
    autojump_clock: trio.testing.MockClock,
) -> None:
    waiting = Waiting()
    async with Container("c", nodes=[waiting]) as c, c.local() as peer:
        start = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await peer.call("wait", within=5)
        assert trio.current_time() - start == pytest.approx(5)
        await waiting.ended.wait()
        assert waiting.deadlines == [pytest.approx(5, abs=0.01)]
        assert c.stats()["wait"]["cancelled"] == 1


@pytest.mark.req("A6")
async def test_a_passed_deadline_is_answered_with_408(
    autojump_clock: trio.testing.MockClock,
) -> None:
    waiting = Waiting()
    async with Container("c", nodes=[waiting]) as c, c.local() as peer:
        outcome, reply = await ask(peer, "wait", Message(b"", ttl_ms=2000))
    assert outcome == ACCEPTED
    assert reply.application_properties["statusCode"] == 408
    assert reply.application_properties["errorCondition"] == "amqp:timeout"


@pytest.mark.req("A6")
async def test_a_request_whose_deadline_passed_while_it_waited_is_not_started(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started = []

    @rpc("slow", slots=1)
    async def slow(number: int) -> int:
        started.append(number)
        await trio.sleep(3)
        return number

    async with (
        Container("c", nodes=[slow]) as c,
        c.local() as peer,
        peer.receiver(dynamic=True) as replies,
        peer.sender("slow") as out,
    ):
        for number in range(2):
            out.send_nowait(
                Message(number, message_id=number, ttl_ms=2000, reply_to=replies.address)
            )
        first = await replies.receive()
        second = await replies.receive()
    assert [each.message.application_properties["statusCode"] for each in (first, second)] == [
        408,
        408,
    ]
    assert started == [0, 1] or started == [0]


@pytest.mark.req("A8", "A12")
@pytest.mark.parametrize("way", ["cancel", "leave"])
async def test_a_caller_that_gives_up_cancels_the_handler(reach: Reach, way: str) -> None:
    waiting = Waiting()
    async with Container("c", nodes=[waiting]) as c, reach(c) as peer:
        async with trio.open_nursery() as nursery:
            if way == "cancel":
                nursery.start_soon(peer.call, "wait")
                await waiting.entered.wait()
                nursery.cancel_scope.cancel()
            else:
                async with aclosing(peer.stream("stream", credit=2)) as items:
                    await anext(items)
        with trio.fail_after(10):
            await waiting.ended.wait()
        while not sum(each["cancelled"] for each in c.stats().values()):
            await trio.lowlevel.checkpoint()


@pytest.mark.req("A8")
@pytest.mark.parametrize("what", ["link", "connection"])
async def test_a_caller_that_goes_away_cancels_the_handler(what: str) -> None:
    waiting = Waiting()
    async with Container("c", nodes=[waiting]) as c:
        async with c.local() as peer:
            out = peer.sender("wait")
            await out.wait_attached()
            out.send_nowait(Message(b""))
            await waiting.entered.wait()
            if what == "link":
                out.link.detach()
                await waiting.ended.wait()
        await waiting.ended.wait()


@pytest.mark.req("A8")
async def test_a_request_given_up_before_it_was_started_never_is() -> None:
    waiting = Waiting()
    async with (
        Container("c", nodes=[waiting]) as c,
        c.local() as peer,
        peer.sender("wait") as out,
    ):
        first = out.send_nowait(Message(b""))
        second = out.send_nowait(Message(b""))
        await waiting.entered.wait()
        await trio.testing.wait_all_tasks_blocked()
        second.give_up()
        first.give_up()
        await waiting.ended.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert len(waiting.deadlines) == 1


@pytest.mark.req("A8")
async def test_one_that_is_given_up_leaves_the_worker_for_others() -> None:
    waiting = Waiting()

    async with Container("c", nodes=[waiting, echo]) as c, c.local() as peer:
        for _ in range(3):
            with trio.move_on_after(0.01):
                await peer.call("wait")
        async with trio.open_nursery() as nursery:
            for number in range(100):

                async def call(number: int = number) -> None:
                    assert await peer.call("echo", number) == number

                nursery.start_soon(call)
    assert c.stats()["wait"]["running"] == 0


@pytest.mark.req("A8", "X21")
async def test_settling_an_answered_request_cancels_nothing() -> None:
    """A caller whose link settles second settles after the outcome: nobody is given up."""
    second, go = trio.Event(), trio.Event()
    seen: list[int] = []

    @rpc("work", slots=1)
    async def work(number: int) -> int:
        if number == 1:
            second.set()
            await go.wait()
        seen.append(number)
        return number

    async with (
        Container("c", nodes=[work]) as c,
        c.local() as peer,
        peer.sender("work", rcv_settle_mode=RCV_SECOND) as out,
    ):
        receipts = [out.send_nowait(number) for number in range(3)]
        await second.wait()
        await trio.testing.wait_all_tasks_blocked()
        go.set()
        for receipt in receipts:
            assert await receipt.outcome() == ACCEPTED
    assert seen == [0, 1, 2]
    assert c.stats()["work"]["cancelled"] == 0


async def test_the_requests_of_a_connection_are_bounded() -> None:
    waiting = Waiting()
    c = Container("c", nodes=[waiting, echo], limits=Limits(requests_running_max=1))
    async with c, c.local() as peer, c.local() as other, trio.open_nursery() as nursery:
        nursery.start_soon(peer.call, "wait")
        await waiting.entered.wait()
        with pytest.raises(CallFailed) as caught:
            await peer.call("echo", 1)
        assert caught.value.condition == "amqp:resource-limit-exceeded"
        assert await other.call("echo", 1) == 1
        nursery.cancel_scope.cancel()


# --- the anonymous terminus --------------------------------------------------------------------


@pytest.mark.req("M41", "M43", "A12")
async def test_the_relay_sends_each_message_where_its_to_says(reach: Reach) -> None:
    seen: list[Any] = []

    @node("in/{name}")
    def take(body: int, name: str) -> None:
        seen.append((name, body))
        if body < 0:
            raise Reject("negative")

    async with Container("c", nodes=[take, echo]) as c, reach(c) as peer:
        assert "ANONYMOUS-RELAY" in peer.peer.offered_capabilities
        async with peer.receiver(dynamic=True) as replies, peer.sender(None) as out:
            for number in range(4):
                await out.send(number, to=f"in/{number % 2}")
            with pytest.raises(DeliveryRejected, match="negative"):
                await out.send(-1, to="in/0")
            await out.send("ask", to="echo", reply_to=replies.address)
            assert (await replies.receive()).body == "ask"
            receipt = out.send_nowait("direct", to=replies.address)
            direct = await replies.receive()
            direct.accept()
            assert direct.body == "direct"
            assert await receipt.outcome() == ACCEPTED
    assert sorted(seen) == [("0", -1), ("0", 0), ("0", 2), ("1", 1), ("1", 3)]


@pytest.mark.req("M41")
@pytest.mark.parametrize(
    ("to", "condition"),
    [
        ("nowhere", "amqp:not-found"),
        ("raw", "amqp:not-allowed"),
        ("", "amqp:precondition-failed"),
    ],
)
async def test_what_cannot_be_routed_is_rejected_with_the_reason(to: str, condition: str) -> None:
    c = Container("c")

    @c.node.link("raw")
    async def raw(link: Any) -> None: ...

    async with c, c.local() as peer, peer.sender(None) as out:
        receipt = out.send_nowait(1, to=to)
        outcome = await receipt.outcome()
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == condition
        assert receipt.raw is not None
        assert outcome.error.info == {"delivery-tag": receipt.raw.tag}
        assert await peer.sender(None).wait_attached() is None


@pytest.mark.req("M41")
async def test_a_sender_that_could_not_hear_of_it_loses_the_link() -> None:
    async with Container("c") as c, c.local() as peer:
        out = peer.sender(None, settled=True)
        await out.wait_attached()
        out.send_nowait(1, to="nowhere")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(LinkDetached) as caught:
            await out.send(1, to="nowhere")
        assert caught.value.condition == "amqp:not-found"
        assert "delivery-tag" in {str(key) for key in caught.value.info}


@pytest.mark.req("M41")
async def test_the_relay_keeps_a_bounded_number_of_targets() -> None:
    seen: list[str] = []
    c = Container("c", limits=Limits(relay_targets_max=2))

    @c.node("in/{name}")
    def take(name: str) -> None:
        seen.append(name)

    async with c, c.local() as peer, peer.sender(None) as out:
        for name in "abcabc":
            await out.send(b"", to=f"in/{name}")
        assert c.stats()["in/{name}"]["links"] == 2
    assert seen == list("abcabc")


@pytest.mark.req("M41", "A17")
@pytest.mark.parametrize("asks", [True, False])
async def test_the_relay_notices_that_a_node_has_come(asks: bool) -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    c = Container("c", authorize=authorize if asks else None)
    async with c, c.local() as peer, peer.sender(None) as out:
        with pytest.raises(DeliveryRejected):
            await out.send(1, to="x")
        c.node("x")(lambda body: None)
        assert await out.send(1, to="x") == ACCEPTED


@pytest.mark.req("M41", "SE17")
async def test_the_relay_keeps_the_order_of_what_waits_for_permission() -> None:
    go = trio.Event()
    seen: list[int] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await go.wait()
        return address != "y"

    c = Container("c", authorize=authorize)
    c.node("x")(seen.append)
    c.node("y")(seen.append)
    async with c, c.local() as peer, peer.sender(None) as out:
        receipts = [out.send_nowait(number, to="xy"[number % 2]) for number in range(6)]
        await trio.testing.wait_all_tasks_blocked()
        go.set()
        outcomes = [await receipt.outcome() for receipt in receipts]
    assert seen == [0, 2, 4]
    assert [each == ACCEPTED for each in outcomes] == [True, False] * 3


class Asked:
    """An application that is asked for each right of a sender, and answers when the test says so."""

    def __init__(self) -> None:
        self._answers: dict[str, trio.Event] = {}

    def answer(self, address: str) -> trio.Event:
        return self._answers.setdefault(address, trio.Event())

    async def __call__(self, peer: Peer, address: str, role: str) -> bool:
        await self.answer(address).wait()
        return True


@pytest.mark.req("M41", "SE17")
@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("end", ["link", "connection"])
async def test_the_relay_ends_while_messages_wait_for_permission(settled: bool, end: str) -> None:
    seen: list[bytes] = []
    asked = Asked()
    c = Container("c", authorize=asked)
    c.node("x")(seen.append)
    async with c:
        async with c.local() as peer:
            out = peer.sender(None, settled=settled)
            await out.wait_attached()
            out.send_nowait(b"1", to="x")
            await trio.testing.wait_all_tasks_blocked()
            if end == "link":
                out.abandon()
                await trio.testing.wait_all_tasks_blocked()
        asked.answer("x").set()
        await trio.testing.wait_all_tasks_blocked()
        # Settled messages are nowhere else; the peer delivers the rest again.
        assert seen == ([b"1"] if settled else [])
        assert c.stats()["x"]["links"] == 0
        assert not c.attaching.relays


@pytest.mark.req("M41", "SE17")
async def test_addresses_that_wait_for_permission_are_not_forgotten() -> None:
    seen: list[str] = []
    asked = Asked()
    c = Container("c", limits=Limits(relay_targets_max=2), authorize=asked)

    @c.node("in/{name}")
    def take(name: str, body: str) -> None:
        seen.append(f"{name}{body}")

    async with c, c.local() as peer, peer.sender(None) as out:
        receipts = [out.send_nowait("1", to=f"in/{name}") for name in "abcd"]
        await trio.testing.wait_all_tasks_blocked()
        # The right would be requested again, and its answer could come first.
        receipts.append(out.send_nowait("2", to="in/a"))
        await trio.testing.wait_all_tasks_blocked()
        for name in "abcd":
            asked.answer(f"in/{name}").set()
        for each in receipts:
            assert await each.outcome() == ACCEPTED
        assert seen.index("a1") < seen.index("a2")
        assert sorted(seen) == ["a1", "a2", "b1", "c1", "d1"]
        assert c.stats()["in/{name}"]["links"] == 2


@pytest.mark.req("SE17", "A10")
async def test_a_link_that_is_allowed_while_the_container_stops_is_left_unanswered() -> None:
    asked, go, taken = Asked(), trio.Event(), trio.Event()
    c = Container("c", authorize=asked, network=MemoryNetwork())

    @c.node("busy")
    async def busy(body: bytes) -> None:
        taken.set()
        await go.wait()

    c.node("x")(lambda body: None)
    asked.answer("busy").set()
    async with Container("client", network=c.network) as client, c:
        await c.listen("memory://c")
        stack = client.connect("memory://c", reconnect=None)
        peer = await stack.__aenter__()
        async with peer.sender("busy") as out:
            out.send_nowait(b"")
            await taken.wait()
            late = peer.sender("x")
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await c.drain(10)

                nursery.start_soon(stop)
                await trio.testing.wait_all_tasks_blocked()
                asked.answer("x").set()
                await trio.testing.wait_all_tasks_blocked()
                assert not late.attached
                assert not late.closed
                assert c.stats()["x"]["links"] == 0
                go.set()
        await stack.__aexit__(None, None, None)


@pytest.mark.req("M41", "A17")
async def test_the_relay_notices_that_a_node_has_gone() -> None:
    c = Container("c")
    c.node("x")(lambda body: None)
    async with c, c.local() as peer, peer.sender(None) as out:
        await out.send(1, to="x")
        c.remove("x")
        with pytest.raises(DeliveryRejected) as caught:
            await out.send(1, to="x")
        assert caught.value.condition == "amqp:not-found"


@pytest.mark.req("A11", "M41")
async def test_the_credit_of_the_relay_follows_what_is_held() -> None:
    go = trio.Event()
    c = Container("c")

    @c.node("slow")
    async def slow(body: int) -> None:
        await go.wait()

    async with c, c.local() as peer, peer.sender(None) as out:
        await trio.testing.wait_all_tasks_blocked()
        credit = out.credit
        receipts = [out.send_nowait(1, to="slow") for _ in range(300)]
        await trio.testing.wait_all_tasks_blocked()
        assert out.credit == credit - 300
        go.set()
        for receipt in receipts:
            assert await receipt.outcome() == ACCEPTED
        await trio.testing.wait_all_tasks_blocked()
        assert out.credit > credit - 300


# --- beside a broker ---------------------------------------------------------------------------


@pytest.mark.req("B1", "M41")
async def test_a_reply_may_go_to_a_queue() -> None:
    async with Broker(nodes=[echo]) as broker, broker.local() as peer:
        await broker.declare(Queue("answers"))
        async with peer.sender("echo") as out, peer.receiver("answers") as answers:
            await out.send(Message(b"x", message_id=1, reply_to="answers"))
            async with await answers.receive() as answer:
                assert (answer.body, answer.message.correlation_id) == (b"x", 1)
            # A reply that the broker will not have is not the request's fault.
            reserved = Message(b"y", reply_to="answers", message_annotations={"x-odd": 1})
            await out.send(reserved)
            await out.send(Message(b"z", reply_to="answers"))
        assert await peer.call("echo", b"dynamic", reply=bytes) == b"dynamic"


@pytest.mark.req("A18", "A9")
async def test_nodes_serve_the_queues_of_a_broker() -> None:
    seen: list[int] = []

    @node("jobs", slots=2)
    async def job(number: int) -> None:
        seen.append(number)
        if number == 3 and seen.count(3) == 1:
            raise Release

    @rpc("double")
    async def double(number: int) -> int:
        return 2 * number

    network = MemoryNetwork()
    async with (
        Broker(network=network) as broker,
        Container("workers", nodes=[job, double], network=network) as c,
    ):
        await broker.declare(Queue("jobs"), Queue("double"))
        await broker.listen("memory://broker")
        async with c.connect("memory://broker") as peer, broker.local() as client:
            await peer.serve()
            async with client.sender("jobs") as out:
                await out.send_many(range(10))
            assert await client.call("double", 21, reply=int) == 42
            while len(seen) < 11:
                await trio.lowlevel.checkpoint()
    assert sorted(seen) == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9]


# --- our nodes as consumers of a peer ----------------------------------------------------------


@pytest.mark.req("A18")
async def test_nodes_serve_the_addresses_of_a_peer() -> None:
    """The peer plays a broker with a hand-made queue."""
    seen: list[Any] = []
    fed = trio.Event()

    class Workers:
        @node("jobs")
        async def job(self, item: Item, delivery: Delivery) -> None:
            seen.append(item.number)
            if item.number == 1:
                raise Reject("unlucky")

        @rpc("double")
        async def double(self, number: int) -> int:
            return 2 * number

    outcomes: list[Outcome] = []
    answers: list[Message] = []
    broker = Container("broker", drain_s=0)

    @broker.node.link("jobs")
    async def jobs(link: Any) -> None:
        for number in range(3):
            receipt = link.send_nowait(Item(number))
            outcomes.append(await receipt.outcome())
        fed.set()
        await trio.sleep_forever()

    @broker.node.link("double")
    async def double(link: Any) -> None:
        await link.send(Message(21, body_kind="value", message_id=5, reply_to="answers"))
        await trio.sleep_forever()

    @broker.node("answers")
    def answer(message: Message) -> None:
        answers.append(message)

    workers = Workers()
    network = broker.network
    async with (
        broker,
        Container("workers", network=network) as c,
        Container("other", nodes=[workers], network=network),
    ):
        await broker.listen("memory://broker")
        async with c.connect("memory://broker", reconnect=None) as peer:
            await peer.serve(workers.job, workers.double)
            await fed.wait()
            with pytest.raises(LinkRefused):
                await peer.serve(echo)
            while not answers:
                await trio.lowlevel.checkpoint()
    assert seen == [0, 1, 2]
    assert [type(each).__name__ for each in outcomes] == ["Accepted", "Rejected", "Accepted"]
    assert (answers[0].body, answers[0].correlation_id, answers[0].to) == (42, 5, "answers")


@pytest.mark.req("M41", "A12")
async def test_a_reply_to_an_unknown_address_holds_up_no_others() -> None:
    async with Broker("b", volatile=True) as broker:
        await broker.declare(Queue("echo"))
        await broker.listen("memory://b")
        async with (
            Container("worker", network=broker.container.network) as worker,
            worker.connect("memory://b", reconnect=None) as served,
            client_of(broker) as peer,
            peer.sender("echo") as out,
        ):
            await worker.consume(served, [echo])
            for number in range(3):
                await out.send(number, reply_to="nowhere", correlation_id=number)
                assert await peer.call("echo", number, within=5) == number
            assert broker.stats("echo").accepted == 6


class _Unsendable(msgspec.Struct):
    value: object


@rpc("price")
async def price(sku: str) -> Any:
    return "two euros"


@pytest.mark.parametrize("value", [object(), _Unsendable(object()), 1 << 70])
async def test_a_reply_without_an_encoding_is_a_failure_of_its_handler(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @rpc("answer")
    async def answer() -> Any:
        return value

    @rpc("answers")
    async def answers() -> AsyncIterator[Any]:
        yield 1
        yield value

    container = Container("c", nodes=[answer, answers])
    async with container, container.local() as peer:
        with pytest.raises(CallFailed, match="'answer' failed") as failed:
            await peer.call("answer")
        assert failed.value.condition == "amqp:internal-error"
        assert failed.value.info["statusCode"] == 500
        with pytest.raises(CallFailed, match="'answers' failed"):
            [each async for each in peer.stream("answers")]
    assert container.stats()["answer"]["failed"] == container.stats()["answers"]["failed"] == 1
    assert "handler failed: " in caplog.text
    assert "EncodeError" in caplog.text


async def test_a_reply_that_a_handler_cannot_decode_is_no_mistake_of_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @rpc("total")
    async def total(sku: str, peer: Peer) -> int:
        async with container.local() as local:
            return await local.call("price", sku, reply=int)

    container = Container("c", nodes=[price, total])
    async with container, container.local() as peer:
        with pytest.raises(CallFailed, match="'total' failed") as failed:
            await peer.call("total", "A-1", reply=int)
    assert failed.value.info["statusCode"] == 500
    assert container.stats()["total"]["failed"] == 1
    assert "UnreadableReply" in caplog.text


@pytest.mark.parametrize("batched", [False, True])
async def test_a_message_whose_handler_cannot_decode_a_reply_has_failed_and_stays(
    batched: bool,
) -> None:
    @node("orders")
    async def place(sku: str) -> None:
        async with container.local() as peer:
            await peer.call("price", sku, reply=int)

    @node("orders", batch=Batch(messages=2, within_s=0.01))
    async def place_all(skus: list[str]) -> None:
        async with container.local() as peer:
            _ = [each async for each in peer.stream("price", skus[0], reply=int)]

    container = Container("c", nodes=[price, place_all if batched else place])
    async with container, container.local() as peer, peer.sender("orders") as out:
        receipts = [out.send_nowait("A-1") for _ in range(2)]
        outcomes = [await receipt.outcome() for receipt in receipts]
    assert outcomes == [Modified(delivery_failed=True)] * 2, "neither is rejected and dropped"


async def test_a_block_of_a_delivery_that_cannot_decode_a_reply_gives_it_back() -> None:
    async with Broker("b", nodes=[price], volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("orders"))
        async with peer.sender("orders") as out, peer.receiver("orders") as orders:
            await out.send("A-1")
            with pytest.raises(UnreadableReply):
                async with await orders.receive() as order:
                    await peer.call("price", order.body, reply=int)
            async with await orders.receive() as again:
                assert again.message.header.delivery_count == 1
