"""Sources, streamed messages and whole links; and what happens at the edges of serving."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from transports import Reach

from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc, source
from amqp_rt.container.feeding import SourceLink
from amqp_rt.container.raising import Reject
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.sending import Sender
from amqp_rt.errors import ConnectionLost, DeliveryRejected, LinkDetached, LinkRefused
from amqp_rt.events import Peer
from amqp_rt.fronts.base import RCV_SECOND, SND_SETTLED, SND_UNSETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, Outcome
from amqp_rt.values import Described, Symbol

# --- sources -------------------------------------------------------------------------------


@pytest.mark.req("A2", "A11", "A12")
async def test_a_source_runs_no_faster_than_credit(reach: Reach) -> None:
    made = 0

    @source("numbers")
    async def numbers() -> AsyncIterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    async with Container("c", nodes=[numbers]) as c, reach(c) as peer:
        async with peer.receiver("numbers", credit=0) as receiver:
            receiver.link.grant(3)
            got = [(await receiver.receive()).body for _ in range(3)]
            await trio.testing.wait_all_tasks_blocked()
            assert (got, made) == ([1, 2, 3], 4)
        with trio.fail_after(10):
            while c.stats()["numbers"]["links"]:
                await trio.lowlevel.checkpoint()


@pytest.mark.req("A8")
async def test_the_generator_is_closed_with_its_link() -> None:
    closed = trio.Event()

    @source("forever")
    async def forever(link: SourceLink) -> AsyncIterator[int]:
        try:
            yield 1
            await trio.sleep_forever()
        finally:
            closed.set()

    async with Container("c", nodes=[forever]) as c, c.local() as peer:
        async with peer.receiver("forever") as receiver:
            await receiver.receive()
        await closed.wait()


@pytest.mark.req("X16", "A2")
async def test_a_drain_is_answered_when_there_is_nothing_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    more = trio.Event()

    @source("some")
    async def some() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await more.wait()
        yield 3

    async with (
        Container("c", nodes=[some]) as c,
        c.local() as peer,
        peer.receiver("some", credit=10) as receiver,
    ):
        await receiver.drain()
        assert receiver.credit == 0
        assert [(await receiver.receive()).body for _ in range(3)] == [0, 1, 2]
        more.set()
        await trio.sleep(1)
        assert receiver.receive_nowait() is None
        receiver.start()
        assert (await receiver.receive()).body == 3


@pytest.mark.req("M30", "M31")
async def test_a_moving_source_hears_each_outcome() -> None:
    heard: list[Outcome] = []

    @source("jobs", mode="move")
    async def jobs() -> AsyncIterator[int]:
        for number in range(3):
            outcome: Any = yield number
            heard.append(outcome)

    async with (
        Container("c", nodes=[jobs]) as c,
        c.local() as peer,
        peer.receiver("jobs") as receiver,
    ):
        assert receiver.source.distribution_mode == "move"
        (await receiver.receive()).accept()
        (await receiver.receive()).release()
        last = await receiver.receive()
        assert receiver.waiting == 0
        last.modify(failed=True)
        with pytest.raises(LinkDetached):
            await receiver.receive()
    assert heard == [ACCEPTED, RELEASED, MODIFIED_FAILED]


@pytest.mark.req("X21", "M31")
@pytest.mark.parametrize(
    ("mode", "asked", "settled"),
    [
        ("copy", 2, True),
        ("copy", SND_UNSETTLED, False),
        ("copy", SND_SETTLED, True),
        ("move", 2, False),
        ("move", SND_SETTLED, True),
    ],
)
async def test_a_source_settles_as_it_was_asked(mode: Any, asked: int, settled: bool) -> None:
    c = Container("c")

    @c.source("one", mode=mode)
    async def one() -> AsyncIterator[int]:
        yield 1

    async with c, c.local() as peer, peer.receiver("one", snd_settle_mode=asked) as receiver:
        delivery = await receiver.receive()
        assert delivery.presettled is settled
        delivery.accept()
        with pytest.raises(LinkDetached):
            await receiver.receive()


@pytest.mark.req("X21")
async def test_a_source_settles_first_for_a_receiver_that_settles_second() -> None:
    c = Container("c")

    @c.source("one", mode="move")
    async def one() -> AsyncIterator[int]:
        yield 1

    async with (
        c,
        c.local() as peer,
        peer.receiver("one", rcv_settle_mode=RCV_SECOND) as receiver,
    ):
        delivery = await receiver.receive()
        delivery.accept()
        await delivery.settled()


@pytest.mark.req("M28")
async def test_filters_are_seen_and_only_applied_ones_are_answered() -> None:
    seen: list[Any] = []
    selector = Described(Symbol("apache.org:selector-filter:string"), "sku = 'A'")

    @source("events", filters=["selector"])
    async def events(link: SourceLink) -> AsyncIterator[int]:
        seen.append((dict(link.filter), link.address, link.peer.container_id, link.properties))
        yield 1

    async with Container("c", nodes=[events]) as c, c.local() as peer:
        asked: dict[object, object] = {Symbol("selector"): selector, Symbol("other"): selector}
        async with peer.receiver("events", filter=asked, properties={Symbol("a"): 1}) as receiver:
            assert receiver.source.filter == {"selector": selector}
            await receiver.receive()
    assert seen == [(asked, "events", "c", {Symbol("a"): 1})]


@pytest.mark.req("A9")
@pytest.mark.parametrize(
    ("failure", "error", "logged"),
    [
        (Reject("no such table"), Error("amqp:precondition-failed", "no such table"), False),
        (ValueError("secret"), Error("amqp:internal-error", "its handler failed"), True),
    ],
)
async def test_a_source_that_fails_detaches_with_the_reason(
    failure: Exception, error: Error, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @source("events")
    async def events() -> AsyncIterator[int]:
        yield 1
        raise failure

    async with (
        Container("c", nodes=[events]) as c,
        c.local() as peer,
        peer.receiver("events") as receiver,
    ):
        await receiver.receive()
        with pytest.raises(LinkDetached) as caught:
            await receiver.receive()
    assert caught.value.condition == error.condition
    assert caught.value.description.endswith(error.description or "")
    assert bool([each for each in caplog.records if each.levelno >= logging.ERROR]) is logged


@pytest.mark.req("A10")
async def test_sources_end_with_the_container() -> None:
    closed = trio.Event()
    c = Container("c")

    @c.source("forever")
    async def forever() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await trio.lowlevel.checkpoint()
        finally:
            closed.set()

    async with c:
        connecting = c.local()
        peer = await connecting.__aenter__()
        receiver = peer.receiver("forever")
        await receiver.wait_attached()
        await receiver.receive()
        await connecting.__aexit__(None, None, None)
    assert closed.is_set()


# --- streamed messages ---------------------------------------------------------------------


class Sink:
    def __init__(self) -> None:
        self.size = 0
        self.subjects: list[Any] = []
        self.go = trio.Event()

    @node("big", streaming=True)
    async def take(self, body: AsyncIterator[bytes], message: Message) -> None:
        self.subjects.append(message.subject)
        if message.subject == "refused":
            raise Reject("too big")
        await self.go.wait()
        async for piece in body:
            self.size += len(piece)


@pytest.mark.req("X19", "A7", "A12")
async def test_a_streamed_body_is_read_as_it_arrives(reach: Reach) -> None:
    sink = Sink()
    sink.go.set()
    chunk = bytes(100_000)
    async with Container("c", nodes=[sink]) as c, reach(c) as peer, peer.sender("big") as out:
        for subject in ("one", "two"):
            async with out.stream(subject=subject) as body:
                for _ in range(50):
                    await body.write(chunk)
    assert sink.subjects == ["one", "two"]
    assert sink.size == 2 * 50 * len(chunk)
    assert c.stats()["big"]["accepted"] == 2


@pytest.mark.req("X19", "X11")
async def test_a_body_that_nobody_reads_holds_back_its_sender() -> None:
    sink = Sink()
    written = 0
    window = 1024 * 1024
    limits = Limits(session_window_bytes=window, frame_size_max=16 * 1024)
    async with Container("c", nodes=[sink], limits=limits) as c, c.local() as peer:
        async with peer.sender("big") as out, out.stream() as body, trio.open_nursery() as nursery:

            async def write() -> None:
                nonlocal written
                for _ in range(400):
                    await body.write(bytes(16_000))
                    written += 16_000

            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked(0.01)
            # The window here, and what the sender may have in hand there.
            assert written < window + limits.output_max + 200_000
            sink.go.set()
        assert sink.size == written == 400 * 16_000


@pytest.mark.req("X20")
async def test_an_aborted_body_ends_the_handler_and_nothing_else() -> None:
    sink = Sink()
    sink.go.set()
    async with Container("c", nodes=[sink]) as c, c.local() as peer, peer.sender("big") as out:
        with suppress(ValueError):
            async with out.stream(subject="aborted") as body:
                await body.write(bytes(100))
                raise ValueError("changed my mind")
        async with out.stream(subject="next") as body:
            await body.write(bytes(7))
    assert sink.size in (7, 107)  # what was aborted may not even have left
    stats = c.stats()["big"]
    assert (stats["accepted"], stats["running"]) == (1, 0)


@pytest.mark.req("X19", "M20")
async def test_a_body_may_be_left_unread() -> None:
    sink = Sink()
    sink.go.set()
    limits = Limits(session_window_bytes=64 * 1024, frame_size_max=16 * 1024)

    async def send_much(out: Sender) -> None:
        async with out.stream(subject="refused") as body:
            for _ in range(100):
                await body.write(bytes(16_000))

    async with (
        Container("c", nodes=[sink], limits=limits) as c,
        c.local() as peer,
        peer.sender("big") as out,
    ):
        with pytest.raises(DeliveryRejected, match="too big"):
            await send_much(out)
        async with out.stream() as body:
            await body.write(bytes(7))
    assert sink.size == 7


@pytest.mark.req("M1")
@pytest.mark.parametrize(
    "payload",
    [b"\x00\x53\x77\xa1\x01a", b"\x00\x53\x99\x45", b"\x00\x53\x75\xb0\x00\x00\x00\x09x", b"\xff"],
)
async def test_what_is_no_stream_of_data_is_rejected(payload: bytes) -> None:
    sink = Sink()
    sink.go.set()
    async with Container("c", nodes=[sink]) as c, c.local() as peer, peer.sender("big") as out:
        with pytest.raises(DeliveryRejected) as caught:
            await out.send_payload(payload)
        assert caught.value.condition == "amqp:decode-error"
        await out.send(b"1234")
    assert sink.size in (4, 5)


# --- whole links -----------------------------------------------------------------------------


async def test_a_handler_of_a_link_gets_more_messages_than_one_window_of_credit() -> None:
    handled = 0

    @node.link("raw", prefetch=4)
    async def raw(link: Receiver) -> None:
        nonlocal handled
        async for delivery in link:
            async with delivery:
                handled += 1

    async with Container("c", nodes=[raw]) as c, c.local() as peer, peer.sender("raw") as sender:
        with trio.fail_after(10):
            await sender.send_many(f"{number}" for number in range(10))
    assert handled == 10


@pytest.mark.req("A2", "A9")
@pytest.mark.parametrize(
    ("failure", "condition"),
    [(None, None), (Reject("enough", condition="shop:enough"), "shop:enough"), (ValueError(), "amqp:internal-error")],
)  # fmt: skip
async def test_a_link_ends_with_its_handler(failure: Any, condition: str | None) -> None:
    c = Container("c")

    @c.node.link("raw")
    async def raw(link: Receiver, peer: Peer, connection: Connection) -> None:
        assert connection.peer is peer
        await link.receive()
        if failure is not None:
            raise failure

    async with c, c.local() as peer, peer.sender("raw") as out:
        receipt = out.send_nowait(1)
        with pytest.raises(LinkDetached) as caught:
            await receipt.outcome()
        if condition is not None:
            assert caught.value.condition == condition


@pytest.mark.req("A10")
async def test_a_link_handler_comes_to_its_end_when_the_container_does() -> None:
    seen: list[Any] = []
    c = Container("c")

    @c.node.link("raw")
    async def raw(link: Receiver) -> None:
        async for delivery in link:
            seen.append(delivery.body)
            delivery.accept()
        seen.append("end")

    async with c:
        connecting = c.local()
        peer = await connecting.__aenter__()
        out = peer.sender("raw")
        await out.wait_attached()
        await out.send(1)
        # Leaving with the link still attached.
    with pytest.raises(ConnectionLost, match="'c' is stopping"):
        await out.send(2)
    await connecting.__aexit__(None, None, None)
    assert seen == [1, "end"]


@pytest.mark.req("A2", "M31")
async def test_a_link_handler_may_send() -> None:
    c = Container("c")

    @c.node.link("feed/{name}")
    async def feed(link: Sender, name: str) -> None:
        await link.send({"hello": name}, subject="greeting")
        async with link.stream() as body:
            await body.write(b"piece by piece")

    async with c, c.local() as peer, peer.receiver("feed/ann") as receiver:
        async with await receiver.receive() as first:
            assert first.decode(dict) == {"hello": "ann"}
            assert first.message.subject == "greeting"
        async with await receiver.receive() as second:
            assert second.body == b"piece by piece"


# --- edges -----------------------------------------------------------------------------------


@pytest.mark.req("A9", "A13")
async def test_a_handler_that_fails_while_it_is_cancelled_ends_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered = trio.Event()

    @rpc("wait")
    async def wait() -> None:
        async def fail() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("on the way out")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)
            entered.set()

    @rpc("ping")
    def ping() -> str:
        return "pong"

    async with Container("c", nodes=[wait, ping]) as c, c.local() as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.call, "wait")
            await entered.wait()
            nursery.cancel_scope.cancel()
        assert await peer.call("ping") == "pong"
        await trio.testing.wait_all_tasks_blocked()
    assert any("wait when it was cancelled" in each.getMessage() for each in caplog.records)


@pytest.mark.req("A13", "M1")
async def test_no_message_whatever_ends_more_than_itself() -> None:
    whole = Message(
        {"a": [1, 2]},
        body_kind="value",
        message_id="m",
        reply_to="nowhere",
        to="node",
        ttl_ms=5,
        message_annotations={Symbol("x-opt-a"): 1},
        application_properties={"b": 2},
    ).encode()
    chance = random.Random(7)
    payloads = [whole[:end] for end in range(len(whole))]
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        payloads.append(bytes(damaged))

    @node("node")
    def take(body: int, message: Message) -> None:
        _ = message.application_properties, message.message_annotations, message.footer

    @rpc("rpc")
    def ask(body: dict[str, Any], message: Message) -> Any:
        return message

    @node("streamed", streaming=True)
    async def read(body: AsyncIterator[bytes]) -> None:
        async for _ in body:
            pass

    async with Container("c", nodes=[take, ask, read]) as c, c.local() as peer:
        for address in ("node", "rpc", "streamed", None):
            async with peer.sender(address) as out:
                receipts = [out.send_payload_nowait(payload) for payload in payloads]
                for receipt in receipts:
                    await receipt.outcome()
        assert await peer.call("rpc", {"still": "here"}, reply=dict) == {"still": "here"}


@pytest.mark.req("A11")
async def test_workers_are_started_when_they_are_needed() -> None:
    go = trio.Event()
    c = Container("c")

    @c.node("x", slots=50)
    async def wait(body: int) -> None:
        await go.wait()

    async with c, c.local() as peer, peer.sender("x") as out:
        [workers] = c.nodes.workers
        assert workers.running == 0
        receipts = [out.send_nowait(1) for _ in range(20)]
        await trio.testing.wait_all_tasks_blocked()
        assert workers.running == 20
        go.set()
        for receipt in receipts:
            await receipt.outcome()
        assert workers.running == 0


@pytest.mark.req("A11")
async def test_handlers_that_do_not_wait_need_one_worker() -> None:
    c = Container("c")

    @c.rpc("x", slots=50)
    async def echo(body: bytes) -> bytes:
        return body

    async with c, c.local() as peer:
        [workers] = c.nodes.workers
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(peer.call, "x", b"1")
        assert len(workers.tasks) == 1


@pytest.mark.req("A9")
async def test_a_link_that_goes_lets_its_message_be_finished() -> None:
    entered, go, done = trio.Event(), trio.Event(), trio.Event()
    seen: list[int] = []
    c = Container("c")

    @c.node("x")
    async def slow(body: int) -> None:
        entered.set()
        seen.append(body)
        await go.wait()
        done.set()

    async with c, c.local() as peer:
        out = peer.sender("x")
        await out.wait_attached()
        out.send_nowait(1)
        out.send_nowait(2)
        await entered.wait()
        out.link.detach()
        await trio.testing.wait_all_tasks_blocked()
        go.set()
        await done.wait()
        async with peer.sender("x") as again:
            await again.send(3)
    # Requests that had not been started are sent again by the sender.
    assert seen == [1, 3]


@pytest.mark.req("A11")
async def test_what_a_lost_link_leaves_waiting_holds_no_slot() -> None:
    go = trio.Event()
    c = Container("c")

    @c.node("x", slots=2, prefetch=0)
    async def wait(body: int) -> None:
        await go.wait()

    async with c, c.local() as peer:
        [workers] = c.nodes.workers
        out = peer.sender("x")
        await out.wait_attached()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            out.send_nowait(1)
        await trio.testing.wait_all_tasks_blocked()
        assert workers.running == 2
        out.link.detach()
        await trio.testing.wait_all_tasks_blocked()
        go.set()
        await trio.testing.wait_all_tasks_blocked()
        async with peer.sender("x") as again:
            await trio.testing.wait_all_tasks_blocked()
            assert again.credit == 2


@pytest.mark.req("A18", "A2")
async def test_a_source_may_feed_an_address_of_a_peer() -> None:
    seen: list[int] = []
    done = trio.Event()

    @source("numbers", mode="move")
    async def numbers() -> AsyncIterator[int]:
        for number in range(5):
            outcome: Any = yield number
            assert outcome == ACCEPTED
        done.set()

    @node("numbers")
    def take(number: int) -> None:
        seen.append(number)

    async with (
        Container("there", nodes=[take]) as there,
        Container("here", network=there.network) as here,
    ):
        await there.listen("memory://there")
        async with here.connect("memory://there") as peer:
            await peer.serve(numbers)
            await done.wait()
    assert seen == list(range(5))


@pytest.mark.req("X14", "X26")
async def test_what_cannot_be_attached_is_refused_with_the_reason() -> None:
    c = Container("c")
    async with c, c.local() as peer:
        with pytest.raises(LinkRefused) as caught:
            await peer.sender(dynamic=True).wait_attached()
        assert caught.value.condition == "amqp:not-implemented"


@pytest.mark.req("M40")
@pytest.mark.parametrize(
    "address", ["amqp://host:5672/orders", "sb://ns.example/orders/", "amqps://h/orders"]
)
async def test_addresses_may_be_whole_uris(address: str) -> None:
    c = Container("c")
    c.node("orders")(lambda body: None)
    async with c, c.local() as peer, peer.sender(address) as out:
        await out.send(1)


@pytest.mark.req("M30")
async def test_a_terminus_is_answered_as_it_is() -> None:
    c = Container("c")
    c.node("orders")(lambda body: None)
    async with (
        c,
        c.local() as peer,
        peer.sender("orders", durable=2, capabilities=["queue"]) as out,
    ):
        assert (out.target.durable, out.target.capabilities) == (0, ())


@pytest.mark.req("A9")
async def test_handlers_that_always_fail_log_a_few_lines(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    @node("x")
    async def broken(body: str) -> None:
        raise RuntimeError(body)

    broken.__qualname__ = "broken"
    limits = Limits(log_lines_max=2, log_period_s=10)
    async with (
        Container("c", nodes=[broken], limits=limits) as container,
        container.local() as peer,
        peer.sender("x") as out,
    ):
        for _ in range(50):
            await out.send_nowait("m").outcome()
        await trio.sleep(11)
        await out.send_nowait("m").outcome()
    lines = [each.getMessage() for each in caplog.records if each.name == "amqp_rt.handlers"]
    assert lines == [
        "handler failed: broken on a message to 'x'",
        "handler failed: broken on a message to 'x'",
        "handler failed: broken on a message to 'x' (48 more like this were not logged)",
    ]


async def test_what_no_handler_could_process_leaves_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @node("numbers")
    async def add(number: int) -> None:
        raise Reject("too small")

    add.__qualname__ = "add"
    async with (
        Container("c", nodes=[add]) as container,
        container.local() as peer,
        peer.sender("numbers", settled=True) as settled,
        peer.sender("numbers") as out,
    ):
        for number, body in enumerate(["one", 1]):
            await out.send_nowait(body, message_id=f"id-{number}").outcome()
        # The sender of a settled message does not learn that it was rejected.
        await settled.send(1, message_id="settled")
        await trio.testing.wait_all_tasks_blocked()
    undecodable, lost = (
        each.getMessage() for each in caplog.records if each.levelname == "WARNING"
    )
    assert undecodable.startswith(
        "message rejected: to 'numbers', message-id 'id-0': it cannot be decoded for add: "
        "amqp:decode-error: "
    )
    assert "message-id 'settled': rejected by add, and settled by its sender" in lost
    assert "too small" in lost


class _Model:
    """A class that no payload can become."""


@pytest.mark.parametrize("declare", [node, rpc])
def test_a_payload_type_that_cannot_be_decoded_is_refused_at_declaration(declare: Any) -> None:
    @declare("x")
    async def handle(order: _Model) -> None: ...

    handle.__qualname__ = "handle"
    with pytest.raises(TypeError) as caught:
        Container("c", nodes=[handle])
    assert str(caught.value) == (
        "handle: _Model cannot be decoded from a message: use a msgspec.Struct, a dataclass, a "
        "TypedDict, a pydantic model, a codec that claims it (codecs=), or take the value (Any) or the "
        "octets (bytes); a resource of that type is not provided"
    )
    Container("c", nodes=[handle], resources=[_Model()])


@pytest.mark.parametrize("kind", [_Model, list[_Model]])
async def test_a_reply_type_that_cannot_be_decoded_is_refused_when_called(kind: Any) -> None:
    asked: list[Any] = []

    @rpc("ask")
    async def ask(body: Any) -> None:
        asked.append(body)

    async with Container("c", nodes=[ask]) as container, container.local() as peer:
        for _ in range(2):
            with pytest.raises(
                TypeError, match=r"reply=: _Model.* cannot be decoded from a message"
            ):
                await peer.call("ask", 1, reply=kind)
            with pytest.raises(
                TypeError, match=r"reply=: _Model.* cannot be decoded from a message"
            ):
                peer.stream("ask", 1, reply=kind)
    assert asked == []


async def test_connections_and_refused_links_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "amqp_rt")
    limits = Limits(log_lines_max=2)
    async with Container("c", limits=limits) as container:
        (url,) = await container.listen("amqp://127.0.0.1:0")
        async with Container("caller") as caller, caller.connect(url) as peer:
            for _ in range(3):
                with pytest.raises(LinkRefused):
                    async with peer.sender("no\nsuch", name="s"):
                        pass
    lines = [each.getMessage() for each in caplog.records if each.name == "amqp_rt.container"]
    opened, *refused, closed = lines
    assert opened.startswith("connection opened: from 127.0.0.1:")
    assert opened.endswith(", container 'caller', user None")
    assert len(refused) == 2
    for line in refused:
        assert line.startswith(
            "link refused: 's' of 'caller', to send to 'no\\nsuch': amqp:not-found: "
        )
    assert closed.startswith("connection closed: from 127.0.0.1:")


async def test_other_container_ids_bring_no_more_lines_of_refused_links(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "amqp_rt")
    async with Container("c", limits=Limits(log_lines_max=2)) as container:
        (url,) = await container.listen("amqp://127.0.0.1:0")
        for number in range(4):
            async with Container(f"caller {number}") as caller, caller.connect(url) as peer:
                with pytest.raises(LinkRefused):
                    async with peer.sender("no such"):
                        pass
    assert caplog.text.count("link refused: ") == 2
