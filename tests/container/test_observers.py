"""Observers of operations on messages: what they hear, and that others do not pay for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import trio
from call_counts import Calls, plain_only

from amqp_rt import Container, Delivery, Message, Reject, Retry, node, rpc
from amqp_rt.broker.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.callers import CALLER
from amqp_rt.container.composing import make_message
from amqp_rt.container.observed import ObservedReceipt
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.sending import Sender
from amqp_rt.errors import (
    DeliveryRejected,
    EncodeError,
    LinkDetached,
    LocalProtocolError,
    WouldBlock,
)
from amqp_rt.limits import Limits
from amqp_rt.observers import LinkObserver, ObservedLink, ObservedOperation
from amqp_rt.outcomes import Released

pytestmark = pytest.mark.req("O2")

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Noted:
    """Operation that notes in a list what becomes of it."""

    def __init__(self, log: list[tuple[str, ...]], name: str, trace: Mapping[str, str]) -> None:
        self.log = log
        self.name = name
        self.trace = trace
        self.ids: tuple[object, object] | None = None
        self.inside = False

    def identify(self, message_id: object, conversation_id: object) -> None:
        self.ids = (message_id, conversation_id)

    def add(self, message: Message | None) -> None:
        self.name += "+"

    def enter(self) -> None:
        self.inside = True

    def leave(self) -> None:
        assert self.inside
        self.inside = False

    def end(self, error: str | None = None) -> None:
        assert not self.inside
        self.log.append((self.name, error or "ok"))


class Notes:
    """Observer that notes the ends of all operations of some kinds."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.links: list[ObservedLink] = []
        self.ended: list[tuple[str, ...]] = []
        self.trace: dict[str, str] = {"traceparent": TRACEPARENT}

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        if self.kinds and link.kind not in self.kinds:
            return None
        self.links.append(link)
        return _NotesOfLink(self, link)


class _NotesOfLink:
    def __init__(self, notes: Notes, link: ObservedLink) -> None:
        self.notes = notes
        self.link = link

    def begin(self, message: Message | None) -> ObservedOperation | None:
        name = f"{self.link.kind} {self.link.address}"
        return Noted(self.notes.ended, name, self.notes.trace)


class Application:
    def __init__(self) -> None:
        self.traces: list[object] = []

    @node("orders/{customer}")
    async def place(self, message: Message) -> None:
        self.traces.append(message.application_properties.get("traceparent"))
        if message.body == b"bad":
            raise Reject("no such article")
        if message.body == b"broken":
            raise KeyError("article")

    @rpc("double")
    async def double(self, number: int) -> int:
        return 2 * number

    @rpc("count")
    async def count(self, most: int) -> AsyncIterator[int]:
        for each in range(most):
            yield each


async def test_each_operation_is_told_once_with_its_end() -> None:
    here, there = Notes(), Notes()
    application = Application()
    async with Container("server", nodes=[application], observe=[there]) as server:
        await server.listen("memory://b")
        async with (
            Container("client", network=server.network, observe=[here]) as client,
            client.connect("memory://b") as peer,
            peer.sender("orders/ada") as sender,
        ):
            await sender.send(b"good")
            await sender.send_nowait(b"good").accepted()
            assert await sender.send_many([b"good", b"good"]) == 2
            async with sender.stream() as body:
                await body.write(b"good")
            await sender.send_payload(Message(b"good").encode())
            with pytest.raises(DeliveryRejected):
                await sender.send(b"bad")
            own = TRACEPARENT.replace("b7ad", "c0de")
            await sender.send(b"good", application_properties={"traceparent": own})
            assert await peer.call("double", 4) == 8
            assert await peer.calling(Retry()).call("double", 4) == 8
            assert [each async for each in peer.stream("count", 2)] == [0, 1]
    assert here.ended == [
        *[("send orders/ada", "ok")] * 6,
        ("send orders/ada", "amqp:precondition-failed"),
        ("send orders/ada", "ok"),
        *[("call double", "ok")] * 2,
        ("call count", "ok"),
    ]
    assert there.ended == [
        *[("process orders/ada", "ok")] * 6,
        ("process orders/ada", "amqp:precondition-failed"),
        ("process orders/ada", "ok"),
        *[("serve double", "ok")] * 2,
        ("serve count", "ok"),
    ]
    # A payload is sent as it is, and a trace context that a message has stays.
    assert application.traces == [*[TRACEPARENT] * 5, None, TRACEPARENT, own]
    (orders,) = [each for each in there.links if each.kind == "process"]
    assert (orders.address, orders.template, orders.dialled) == (
        "orders/ada",
        "orders/{customer}",
        False,
    )
    assert orders.peer is not None
    assert orders.peer.container_id == "client"
    assert {(each.kind, each.dialled) for each in here.links} == {("send", True), ("call", True)}


async def test_the_exception_of_a_handler_is_named_and_receivers_are_observed() -> None:
    notes = Notes("process", "receive", "settle")
    async with Broker("broker", nodes=[Application()], observe=[notes]) as broker:
        await broker.declare(Queue("q"))
        async with broker.local() as peer:
            async with peer.sender("orders/ada") as sender:
                await sender.send_nowait(b"broken").outcome()
            async with peer.sender("q") as sender, peer.receiver("q") as receiver:
                await sender.send(b"one")
                delivery = await receiver.receive()
                delivery.accept()
    assert notes.ended == [
        ("process orders/ada", "KeyError"),
        ("receive q", "ok"),
        ("settle q", "ok"),
    ]


async def test_a_cancelled_send_ends_as_cancelled(autojump_clock: Any) -> None:
    notes = Notes("send")
    async with Broker("broker", observe=[notes]) as broker:
        await broker.declare(Queue("q", length_max=1))
        async with broker.local() as peer, peer.sender("q", max_pending=1) as sender:
            await sender.send(b"fills the queue")
            for _ in range(2):
                with trio.move_on_after(1) as scope:
                    await sender.send(b"waits")
                assert scope.cancelled_caught
            sender.abandon()
    assert [error for _, error in notes.ended] == ["ok", "cancelled", "cancelled"]


async def test_messages_that_are_not_sent_end_their_operations() -> None:
    notes = Notes("send")
    limits = Limits(message_size_max=100)
    async with (
        Container("all", nodes=[Application()], observe=[notes], limits=limits) as all_,
        all_.local() as peer,
        peer.sender("orders/ada", max_pending=3) as sender,
    ):
        with pytest.raises(LocalProtocolError):
            # All of one run: those behind the one that is too large are encoded, and not sent.
            await sender.send_many([b"good", b"x" * 200, b"later"])
        await sender.flush()
        errors = sorted(error for _, error in notes.ended)
        assert errors == ["amqp:link:message-size-exceeded", "cancelled", "ok"]
        notes.ended.clear()
        for _ in range(3):
            sender.send_nowait(b"good")
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"one too many")
        assert notes.ended == [("send orders/ada", WouldBlock.default_condition)]
        await sender.flush()
        notes.ended.clear()
        # It has an operation of its own, not the one that has ended.
        await sender.send_payload(Message(b"good").encode())
        assert notes.ended == [("send orders/ada", "ok")]
        notes.ended.clear()
        sender.abandon()
        with pytest.raises(LinkDetached):
            sender.send_nowait(b"late")
        with pytest.raises(LinkDetached):
            await sender.send(b"late")
        with pytest.raises(LinkDetached):
            await sender.send_many([b"late", b"later"])
    assert [error for _, error in notes.ended] == ["amqp:illegal-state"] * 4


async def test_an_observer_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Notes):
        def observe(self, link: ObservedLink) -> LinkObserver | None:
            if link.kind == "call":
                raise RuntimeError("no calls")
            return super().observe(link)

    class BrokenLater(Notes):
        def observe(self, link: ObservedLink) -> LinkObserver | None:
            return self  # type: ignore[return-value]

        def begin(self, message: Message | None) -> ObservedOperation | None:
            raise RuntimeError("no messages")

    notes = Notes("send", "call")
    async with Container("all", nodes=[Application()], observe=[Broken(), BrokenLater()]) as all_:
        all_.observe(notes)
        async with all_.local() as peer, peer.sender("orders/ada") as sender:
            await sender.send(b"good")
            await sender.send(b"good")
            assert await peer.call("double", 1) == 2
    assert notes.ended == [*[("send orders/ada", "ok")] * 2, ("call double", "ok")]
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    # Once for each link: the sender, the calls (twice), and the two links to nodes.
    assert len(lines) == 5, lines


@node("octets")
async def take_octets(body: bytes) -> object:
    """Do what *body* names; with a trace context, only if the handler's caller has it."""
    caller = CALLER.get()
    if body == b"traced":
        return None if caller is not None and caller.trace["traceparent"] == TRACEPARENT else Reject
    assert caller is None
    if body == b"bad":
        raise Reject("no such article")
    if body == b"broken":
        raise KeyError("article")
    return Released() if body == b"not now" else None


@pytest.mark.parametrize("observe", [[], [Notes("process")]])
async def test_handlers_of_octets_have_the_same_outcomes_with_observers(
    observe: list[Notes],
) -> None:
    outcomes: list[str] = []
    plain = {each: Message(each) for each in (b"good", b"bad", b"broken", b"not now")}
    traced = Message(b"traced", application_properties={"traceparent": TRACEPARENT})
    payloads = [each.encode() for each in (plain[b"good"], traced, *plain.values())]
    payloads += [b"no message", b"\x00\x53\x74\xc1\xff"]
    async with (
        Container("all", nodes=[take_octets], observe=observe) as all_,
        all_.local() as peer,
        peer.sender("octets") as sender,
    ):
        for payload in payloads:
            receipt = sender.send_payload_nowait(payload)
            outcomes.append(type(await receipt.outcome()).__name__)
    assert outcomes == [
        *["Accepted"] * 3,
        "Rejected",
        "Modified",
        "Released",
        *["Rejected"] * 2,
    ]
    for notes in observe:
        assert [error for _, error in notes.ended] == [
            *["ok"] * 3,
            "amqp:precondition-failed",
            "KeyError",
            "released",
            *["amqp:decode-error"] * 2,
        ]


@pytest.mark.parametrize("address", ["octets", "orders/ada"])
async def test_an_operation_that_raises_at_its_end_does_not_fail_the_message(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Noted):
        def end(self, error: str | None = None) -> None:
            raise RuntimeError("no end")

    class Direct(Notes):
        """Observer that says that it raises nothing, so that it is called directly."""

        guards_itself = True

        def observe(self, link: ObservedLink) -> LinkObserver | None:
            return self if link.kind == "process" else None  # type: ignore[return-value]

        def begin_unread(self, message: object) -> ObservedOperation | None:
            return Raising(self.ended, "process", {})

    async with (
        Container("all", nodes=[Application(), take_octets], observe=[Direct()]) as all_,
        all_.local() as peer,
        peer.sender(address) as sender,
    ):
        await sender.send(b"good")
    counts = all_.stats()["octets" if address == "octets" else "orders/{customer}"]
    assert (counts["accepted"], counts["modified"]) == (1, 0)
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert line.startswith("observer failed: end of ")


class Reads(Notes):
    """Observer that keeps the messages that it gets; of others it only notes the ends."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(*kinds)
        self.messages: list[Message | None] = []

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        if super().observe(link) is None:
            return None
        return _ReadsOfLink(self, link)


class _ReadsOfLink(_NotesOfLink):
    notes: Reads

    def begin(self, message: Message | None) -> ObservedOperation | None:
        self.notes.messages.append(message)
        return super().begin(message)


async def test_the_message_that_an_observer_has_decoded_is_that_of_the_handler() -> None:
    handled: list[Message] = []

    @node("whole")
    async def whole(message: Message) -> None:
        handled.append(message)

    @node("delivered")
    async def delivered(delivery: Delivery) -> None:
        handled.append(delivery.message)

    @rpc("asked")
    async def asked(message: Message) -> None:
        handled.append(message)

    read = Reads("process", "serve")
    async with (
        Container("all", nodes=[whole, delivered, asked], observe=[read]) as all_,
        all_.local() as peer,
    ):
        for address in ("whole", "delivered"):
            async with peer.sender(address) as sender:
                await sender.send(b"x")
        await peer.call("asked", b"x")
    assert len(handled) == 3
    assert [id(each) for each in read.messages] == [id(each) for each in handled]


async def test_the_message_that_the_observer_of_a_receiver_has_decoded_is_that_of_the_delivery() -> (
    None
):
    read = Reads("receive", "settle")
    async with Broker("broker", observe=[read]) as broker:
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as sender,
            peer.receiver("q") as receiver,
        ):
            await sender.send(b"one")
            delivery = await receiver.receive()
            message = delivery.message
            delivery.accept()
    assert read.messages[0] is read.messages[1] is message


@pytest.mark.parametrize("content", [b"octets", "text", {"a": 1}, [1, 2], None])
async def test_observers_of_a_sender_get_its_payloads_as_messages(content: object) -> None:
    read = Reads("send")
    async with (
        Container("all", nodes=[Application()], observe=[read]) as all_,
        all_.local() as peer,
        peer.sender("orders/ada") as sender,
    ):
        await sender.send(content)
    (message,) = read.messages
    assert message is not None
    assert message.encode() == make_message(content, {}).encode()
    assert read.ended == [("send orders/ada", "ok")]


@pytest.mark.parametrize(("content", "made"), [(2**70, True), ({"a": object()}, False)])
async def test_a_payload_without_an_encoding_ends_its_operation_and_keeps_the_observer(
    content: object, made: bool
) -> None:
    read = Reads("send")
    async with (
        Container("all", nodes=[Application()], observe=[read]) as all_,
        all_.local() as peer,
        peer.sender("orders/ada") as sender,
    ):
        with pytest.raises(EncodeError):
            await sender.send(content)
        await sender.send(b"good")
    assert [each is not None for each in read.messages] == [made, True]
    assert read.ended == [
        ("send orders/ada", EncodeError.default_condition),
        ("send orders/ada", "ok"),
    ]


async def test_a_receipt_does_not_keep_the_operation_that_has_ended() -> None:
    notes = Notes("send")
    async with (
        Container("all", nodes=[Application()], observe=[notes]) as all_,
        all_.local() as peer,
        peer.sender("orders/ada") as sender,
    ):
        receipt = sender.send_nowait(b"good")
        assert isinstance(receipt, ObservedReceipt)
        assert receipt.operation is not None
        await receipt.accepted()
        assert receipt.operation is None
    assert notes.ended == [("send orders/ada", "ok")]


async def test_each_message_is_begun_once_where_no_operation_follows() -> None:
    class Silent(Notes):
        begun = 0

        def observe(self, link: ObservedLink) -> LinkObserver | None:
            return self if link.kind == "send" else None  # type: ignore[return-value]

        def begin(self, message: Message | None) -> ObservedOperation | None:
            self.begun += 1
            return None

    silent = Silent()
    async with (
        Container("all", nodes=[Application()], observe=[silent]) as all_,
        all_.local() as peer,
        peer.sender("orders/ada") as sender,
    ):
        await sender.send(b"good")
        await sender.send(Message(b"good", message_id="m"))
        await sender.send_payload(Message(b"good").encode())
    assert silent.begun == 3


async def test_an_observer_added_later_hears_of_later_links() -> None:
    notes = Notes()
    async with (
        Container("all", nodes=[Application()]) as all_,
        all_.local() as peer,
        peer.sender("orders/ada") as before,
    ):
        all_.observe(notes)
        await before.send(b"good")
        assert notes.ended == []
        async with peer.sender("orders/ada") as after:
            await after.send(b"good")
    assert notes.ended == [("process orders/ada", "ok"), ("send orders/ada", "ok")]


@plain_only
async def test_without_observers_the_classes_and_calls_are_the_plain_ones() -> None:
    """``tests/test_call_counts.py`` bounds the calls for a message; none of them is one of observers."""
    calls = Calls()
    async with (
        Container("all", nodes=[Application()]) as all_,
        all_.local() as peer,
        peer.sender("orders/ada") as sender,
        peer.receiver("count") as receiver,
    ):
        assert (type(sender), type(receiver)) == (Sender, Receiver)
        await peer.call("double", 1)
        with calls:
            await sender.send(b"good")
            assert await peer.call("double", 1) == 2
    named = [name for name in calls.counts if "bserve" in name or "trace" in name]
    assert calls.counts
    assert named == []
