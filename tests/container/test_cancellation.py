"""What cancelling each wait of the client leaves behind.

Every ``async`` method that an application may call has a test here, and a docstring that says the
same; the first test sees to both.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from far_end import FarEnd, connected

from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.container import connections, local, recovery
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc, source
from amqp_rt.container.deliveries import Delivery
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.requests import ReplyStream
from amqp_rt.container.sending import Receipt, Sender
from amqp_rt.container.tokens import Sas
from amqp_rt.container.writing import StreamedMessage
from amqp_rt.errors import (
    AmqpError,
    ConnectFailed,
    DeadlineExceeded,
    DeliveryRejected,
    LinkDetached,
    LocalProtocolError,
)
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outbox import SqliteOutbox
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error, rejected
from amqp_rt.security.tokens import Cbs, SasKeys
from amqp_rt.transactions import TransactionalState
from amqp_rt.values import Int

CLASSES = (
    connections.Connection,
    Sender,
    Receipt,
    StreamedMessage,
    Receiver,
    Delivery,
    ReplyStream,
)
#: Functions that the tests below cancel, by their qualified names.
COVERED: set[str] = set()


def leaves(*names: str) -> Callable[[Any], Any]:
    """The decorated test is about these waits."""
    COVERED.update(names)
    return pytest.mark.req("A13")


def waits() -> dict[str, Any]:
    """Every wait that the client offers."""
    found: dict[str, Any] = {"connect": recovery.connect, "local": local.local}
    for kind in CLASSES:
        for name, method in inspect.getmembers(kind, inspect.isroutine):
            function = inspect.unwrap(method)
            public = not name.startswith("_") or name in ("__aenter__", "__aexit__", "__anext__")
            if public and (
                inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
            ):
                found[f"{kind.__name__}.{name}"] = function
    return found


def test_every_wait_says_what_cancelling_it_leaves_and_has_a_test() -> None:
    silent = [
        name
        for name, function in waits().items()
        if not any(
            word in (inspect.getdoc(function) or "")
            for word in ("ancell", "checkpoint", "otherwise like :meth:", "As :meth:")
        )
    ]
    # Ending a block says so in the class, or does nothing that could be cancelled.
    assert [name for name in silent if not name.endswith("__aexit__")] == []
    unproved = set(waits()) - COVERED
    assert not unproved, f"no test says what cancelling leaves: {sorted(unproved)}"
    assert not COVERED - set(waits()), "a test is about something that does not exist"


async def cancel(call: Callable[[], Awaitable[Any]]) -> None:
    """Await *call* until it waits for something, and cancel it there."""
    ended: list[Any] = []

    async def run() -> None:
        ended.append(await call())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert nursery.child_tasks, f"it did not wait, and gave {ended}"
        nursery.cancel_scope.cancel()
    assert not ended


async def block(manager: Any) -> None:
    async with manager:
        await trio.sleep_forever()


def encoded(body: Any) -> bytes:
    return Message(body).encode()


# --- links -----------------------------------------------------------------------------------


@leaves(
    "Sender.wait_attached", "Receiver.wait_attached", "Sender.__aenter__", "Receiver.__aenter__"
)
@pytest.mark.parametrize("kind", ["sender", "receiver"])
@pytest.mark.parametrize("answered", [True, False])
async def test_waiting_to_be_attached(kind: str, answered: bool) -> None:
    far = FarEnd(on_attach=lambda link: None)
    async with connected(far) as peer:
        link = getattr(peer, kind)("q", name="mine")
        await cancel(link.wait_attached)
        # The attach stays requested.
        far.accept(far.link)
        await link.wait_attached()
        await link.close()

        # In a block, it is withdrawn.
        await cancel(lambda: block(getattr(peer, kind)("q", name="mine")))
        withdrawn = far.link
        if answered:
            far.accept(withdrawn)
            await far.until(lambda: far.heard.detached)
        else:
            await far.until(lambda: withdrawn.state != "ATTACH_RCVD")
        far.on_attach = far.accept
        async with getattr(peer, kind)("q"):
            pass


@leaves("Sender.close", "Sender.__aexit__", "Sender.flush")
async def test_closing_a_sender() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        out = peer.sender("q")
        await out.wait_attached()
        far.link.grant(1)
        await far.until(lambda: out.credit)
        sent, waiting = out.send_nowait(1), out.send_nowait(2)
        await cancel(out.flush)
        assert out.pending == 2
        await cancel(out.close)
        assert out.closed
        for receipt in (sent, waiting):
            with pytest.raises(LinkDetached):
                await receipt.outcome()
        await far.until(lambda: far.heard.detached)
        assert len(far.heard.deliveries) == 1

        async def leave() -> None:
            async with peer.sender("q") as out:
                out.send_nowait(3)

        await cancel(leave)
        await far.until(lambda: far.heard.detached)
        assert far.heard.deliveries == []


@leaves("Receiver.close", "Receiver.suspend", "Receiver.__aexit__")
@pytest.mark.parametrize(("how", "closed"), [("close", True), ("suspend", False), ("leave", True)])
async def test_closing_a_receiver(how: str, closed: bool) -> None:
    far = FarEnd()
    async with connected(far) as peer:
        messages = peer.receiver("q")
        await messages.wait_attached()
        await far.until(lambda: far.link.credit)
        sending = far.link.send(encoded("x"))
        await far.until(lambda: messages.waiting)

        async def leave() -> None:
            async with messages:
                scope.cancel()

        with trio.CancelScope() as scope:
            if how == "leave":
                await leave()
            else:
                scope.cancel()
                await getattr(messages, how)()
        await far.until(lambda: far.heard.detached)
        assert far.heard.detached == [(None, closed)]
        assert sending.state == RELEASED


# --- sending ---------------------------------------------------------------------------------


@leaves("Sender.send", "Sender.send_payload")
@pytest.mark.parametrize("way", ["send", "send_payload"])
async def test_sending(way: str) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.sender("q") as out:

        async def send(body: str) -> None:
            if way == "send":
                await out.send(body)
            else:
                await out.send_payload(encoded(body))

        # Before it left: taken back.
        await cancel(lambda: send("never"))
        assert out.pending == 0
        far.link.grant(10)
        await far.until(lambda: out.credit)
        # After it left: sent, and its outcome is not heard.
        await cancel(lambda: send("left"))
        assert [Message.decode(each.payload).body for each in far.heard.deliveries] == ["left"]
        assert out.pending == 1
        far.heard.deliveries[0].settle(ACCEPTED)
        await far.until(lambda: not out.pending)
        assert out.credit == 9


@leaves("Sender.wait_for_room")
async def test_waiting_for_room() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.sender("q", max_pending=1) as out:
        receipt = out.send_nowait(1)
        await cancel(out.wait_for_room)
        await cancel(lambda: out.send(2))
        assert out.pending == 1
        receipt.withdraw()
        await out.wait_for_room()


@leaves("Sender.send_many")
async def test_sending_many() -> None:
    far = FarEnd()
    taken: list[int] = []

    def numbers() -> Any:
        for number in range(100):
            taken.append(number)
            yield number

    async with connected(far) as peer, peer.sender("q", max_pending=6) as out:
        far.link.grant(3)
        await far.until(lambda: out.credit)
        await cancel(lambda: out.send_many(numbers()))
        assert (len(far.heard.deliveries), out.pending, len(taken)) == (3, 3, 6)
        far.heard.settle = ACCEPTED
        for each in list(far.heard.deliveries):
            each.settle(ACCEPTED)
        far.link.grant(10)
        await out.send("after")
    assert [Message.decode(each.payload).body for each in far.heard.deliveries] == [
        0,
        1,
        2,
        "after",
    ]


@leaves("Receipt.outcome", "Receipt.accepted")
@pytest.mark.parametrize("way", ["outcome", "accepted"])
async def test_waiting_for_an_outcome(way: str) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.sender("q") as out:
        receipt = out.send_nowait("x")
        await cancel(getattr(receipt, way))
        # Still in line, and still sent.
        far.link.grant(1)
        await far.until(lambda: far.heard.deliveries)
        await cancel(getattr(receipt, way))
        far.heard.deliveries[0].settle(ACCEPTED)
        assert await getattr(receipt, way)() == ACCEPTED


@leaves("StreamedMessage.__aenter__")
async def test_beginning_a_stream() -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        await cancel(lambda: block(out.stream()))
        assert out.pending == 0
        far.link.grant(10)
        await out.send("after")
    assert len(far.heard.deliveries) == 1


@leaves("StreamedMessage.write")
async def test_writing_to_a_stream() -> None:
    limits = Limits(frame_size_max=4096, session_window=8, session_window_bytes=64 * 1024)
    far = FarEnd(credit=10, limits=limits)
    far.on_attach = lambda link: far.accept(link, streaming=True) and None
    async with connected(far) as peer, peer.sender("q") as out:

        async def write() -> None:
            async with out.stream() as body:
                await body.write(bytes(1_000_000))

        await cancel(write)
        # The message is aborted, and the link goes on.
        (delivery,) = far.heard.deliveries
        while not delivery.aborted:
            delivery.read_chunks()
            await trio.sleep(0.001)
        assert out.pending == 0
        receipt = out.send_nowait("after")
        await far.until(lambda: len(far.heard.deliveries) == 2)
        far.heard.deliveries[1].settle(ACCEPTED)
        await receipt.accepted()


@leaves("StreamedMessage.__aexit__")
async def test_waiting_for_the_outcome_of_a_stream() -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer, peer.sender("q") as out:

        async def write() -> None:
            async with out.stream() as body:
                await body.write(b"x")

        await cancel(write)
        # The message is complete, and stays sent.
        (delivery,) = far.heard.deliveries
        assert delivery.complete
        assert not delivery.aborted
        assert out.pending == 1
        delivery.settle(ACCEPTED)
        await far.until(lambda: not out.pending)


# --- receiving -------------------------------------------------------------------------------


@leaves("Receiver.receive", "Receiver.receive_batch", "Receiver.__anext__")
@pytest.mark.parametrize("way", ["receive", "receive_batch", "__anext__"])
async def test_receiving(way: str) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        await cancel(getattr(messages, way))
        for number in range(3):
            far.link.send(encoded(number))
        await far.until(lambda: messages.waiting == 3)
        # Cancelled when something is there: it is taken, or it stays.
        taken: list[Delivery] = []
        with trio.CancelScope() as scope:
            scope.cancel()
            taken = await messages.receive_batch(1)
        assert len(taken) + messages.waiting == 3
        assert [each.body for each in taken + await messages.receive_batch()] == [0, 1, 2]


async def test_cancelled_in_the_pass_that_brings_a_delivery_nothing_is_lost() -> None:
    far = FarEnd()
    taken: list[Any] = []
    async with connected(far) as peer, peer.receiver("q", credit=1000) as messages:
        await far.until(lambda: far.link.credit)
        for number in range(200):

            async def take() -> None:
                taken.append(await messages.receive())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(take)
                await trio.lowlevel.checkpoint()
                far.link.send(encoded(number))
                for _ in range(number % 7):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        await far.until(lambda: len(taken) + messages.waiting == 200)
        bodies = [each.body for each in taken + await messages.receive_batch(200)]
        assert sorted(bodies) == list(range(200))


@leaves("Receiver.get", "Receiver.drain")
async def test_asking_for_one() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", credit=0) as messages:
        await cancel(lambda: messages.get(within=60))
        await far.until(lambda: far.link.credit == 1)
        # The credit may still bring one: the next call returns it.
        far.link.send(encoded("x"))
        await far.until(lambda: messages.waiting)
        found = await messages.get()
        assert found is not None
        assert found.body == "x"
        await cancel(messages.get)
        await far.until(lambda: far.link.draining)
        far.link.drained()
        await far.until(lambda: messages.credit == 0)
        messages.start(5)
        await far.until(lambda: far.link.credit == 5)
        await cancel(messages.drain)
        # The drain continues, and no credit is granted meanwhile.
        far.link.drained()
        await far.until(lambda: messages.credit == 0)
        await messages.drain()


@leaves("Delivery.settled", "Receiver.wait_settled")
async def test_waiting_until_the_sender_has_settled() -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", rcv_settle_mode=RCV_SECOND) as messages,
    ):
        await far.until(lambda: far.link.credit)
        sending = far.link.send(encoded("x"))
        delivery = await messages.receive()
        delivery.accept()
        await cancel(delivery.settled)
        assert delivery.outcome == ACCEPTED
        await far.until(lambda: sending.state == ACCEPTED)
        sending.settle()
        await delivery.settled()


@leaves("Delivery.__aenter__", "Delivery.__aexit__", "Delivery.head")
async def test_reading_a_streamed_message() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", streaming=True) as messages:
        await far.until(lambda: far.link.credit)
        sending = far.link.send(b"\x00\x53\x73", more=True)
        delivery = await messages.receive()
        await cancel(delivery.head)
        sending.write(Message(b"x", subject="s").encode()[3:])
        assert (await delivery.head()).subject == "s"
        chunks = delivery.chunks()
        assert await anext(chunks) == b"x"
        await cancel(chunks.__anext__)
        sending.write(encoded(b"y"))
        assert await anext(chunks) == b"y"

        # As a block, a cancelled one releases: saying so does not wait.
        async def hold() -> None:
            async with delivery:
                await anext(chunks)

        await cancel(hold)
        assert delivery.outcome == RELEASED


# --- calls -----------------------------------------------------------------------------------


@leaves("Connection.call", "ReplyStream.__anext__", "ReplyStream.aclose")
@pytest.mark.parametrize("at", ["attach", "credit", "reply"])
@pytest.mark.parametrize("way", ["call", "stream"])
async def test_calling(at: str, way: str) -> None:
    far = FarEnd(credit=10 if at == "reply" else 0)
    if at == "attach":
        far.on_attach = lambda link: None
    async with connected(far) as peer:
        stream = peer.stream("q")
        await cancel(lambda: peer.call("q") if way == "call" else anext(stream))
        # A part of a stream may be asked for again; being done with it does not wait.
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.aclose()
        far.on_attach = far.accept
        for link in far.links:
            if not link.attached:
                far.accept(link)
        requests = next(link for link in far.links if hasattr(link, "grant"))
        recorder = next(each for each in far.recorders if requests in each.attached)
        requests.grant(5)
        if at == "reply":
            await far.until(lambda: recorder.settled)
            assert recorder.settled == recorder.deliveries
        else:
            async with peer.sender("other"):
                pass
            assert recorder.deliveries == []


@leaves("ReplyStream.__aenter__", "ReplyStream.__aexit__")
async def test_a_block_around_a_stream() -> None:
    far = FarEnd(credit=10)

    async def read(peer: Any) -> None:
        async with peer.stream("q") as stream:
            await anext(stream)

    async with connected(far) as peer:
        await cancel(lambda: read(peer))
        recorder = next(each for each in far.recorders if each.deliveries)
        await far.until(lambda: recorder.settled)


# --- connections -----------------------------------------------------------------------------


@leaves("Connection.wait_open", "Connection.wait_closed", "Connection.wait_changed")
async def test_waiting_for_a_connection() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        await cancel(peer.wait_closed)
        await cancel(peer.wait_changed)
        assert peer.state == "open"
        async with Container("c") as c:
            other = connections.Connection(c)
            await cancel(other.wait_open)
            assert other.state == "opening"


@leaves("Connection.aclose")
async def test_closing_a_connection() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        with trio.CancelScope() as scope:
            scope.cancel()
            await peer.aclose()
        await far.until(lambda: far.engine.finished)
        await peer.wait_closed()


@leaves("Connection.authorize")
async def test_waiting_for_a_token() -> None:
    there = trio.Event()
    asked: list[str] = []

    async def provider(audience: str) -> Any:
        asked.append(audience)
        await there.wait()
        return Sas("app", "key")(audience)

    cbs = Cbs([SasKeys({"app": "key"})])
    async with Container("far", cbs=cbs) as far, Container("us", network=far.network) as us:
        await far.listen("memory://far")
        async with us.connect("memory://far", token=provider) as peer:
            await cancel(lambda: peer.authorize("q"))
            there.set()
            await peer.authorize("q")
            assert asked == ["amqp://far/q"]
            (accepted,) = far.connections
            assert len(accepted.peer.tokens) == 1


@leaves("connect")
async def test_connecting() -> None:
    async with Container("us") as us:
        streams = us.network.listen("mute")
        await cancel(lambda: block(us.connect("memory://mute", reconnect=None)))
        stream = streams.receive_nowait()
        # Nothing is left but what was sent: the other end of the stream is closed.
        with trio.fail_after(5):
            while await stream.receive_some():
                pass
        assert us._started().connections.child_tasks == {us._started().listeners.parent_task}
        streams.close()
        with pytest.raises(ConnectFailed):
            async with us.connect("memory://mute", reconnect=None):
                pytest.fail("connected")


@leaves("connect", "local")
@pytest.mark.parametrize("way", ["connect", "local"])
async def test_the_block_of_a_connection(way: str) -> None:
    far = FarEnd()
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with Container("us", network=far.network) as us:
            opened: list[Any] = []

            async def hold() -> None:
                manager = us.local() if way == "local" else us.connect("memory://far")
                async with manager as peer:
                    opened.append(peer)
                    await trio.sleep_forever()

            await cancel(hold)
            assert opened[0].state == "closed"
            if way == "connect":
                assert far.engine.finished
                assert far.failures == []
        nursery.cancel_scope.cancel()


@leaves("Connection.session")
async def test_the_block_of_a_session() -> None:
    far = FarEnd()
    async with connected(far) as peer:

        async def hold() -> None:
            async with peer.session() as session, session.sender("q"):
                await trio.sleep_forever()

        await cancel(hold)
        await far.until(lambda: far.link.session.ended)
        assert peer.state == "open"


@leaves("Connection.serve")
async def test_serving_at_a_peer() -> None:
    taken = []

    @node("q")
    async def take(body: str) -> None:
        taken.append(body)

    far = FarEnd(on_attach=lambda link: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with (
            Container("us", network=far.network, nodes=[take]) as us,
            us.connect("memory://far", reconnect=None) as peer,
        ):
            await cancel(lambda: peer.serve(take))
            # The node is served all the same.
            far.accept(far.link)
            await far.until(lambda: far.link.credit)
            far.link.send(encoded("x"))
            await far.until(lambda: taken)
        nursery.cancel_scope.cancel()
    assert taken == ["x"]


# --- anywhere --------------------------------------------------------------------------------


class Everything:
    """A node of each kind."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @node("take")
    async def take(self, number: int) -> None:
        await trio.lowlevel.checkpoint()
        self.taken.append(number)

    @rpc("double")
    async def double(self, number: int) -> int:
        await trio.lowlevel.checkpoint()
        return 2 * number

    @rpc("count")
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    @source("numbers", mode="move")
    async def numbers(self) -> AsyncIterator[int]:
        for number in range(1000):
            yield number


async def send_one(peer: connections.Connection, out: Sender) -> None:
    await out.send(1)


async def send_some(peer: connections.Connection, out: Sender) -> None:
    await out.send_many(range(20))


async def attach_and_send(peer: connections.Connection, out: Sender) -> None:
    async with peer.sender("take", name="mine") as mine:
        await mine.send_many(range(3))


async def write_stream(peer: connections.Connection, out: Sender) -> None:
    async with out.stream() as body:
        for _ in range(3):
            await body.write(b"1")


async def take_some(peer: connections.Connection, out: Sender) -> None:
    async with peer.receiver("numbers", credit=3) as messages:
        for _ in range(5):
            async with await messages.receive():
                pass


async def get_one(peer: connections.Connection, out: Sender) -> None:
    async with peer.receiver("numbers", credit=0) as messages:
        await messages.get(within=1)


async def call_some(peer: connections.Connection, out: Sender) -> None:
    for number in range(3):
        assert await peer.call("double", number, reply=int, within=10) == 2 * number


async def read_stream(peer: connections.Connection, out: Sender) -> None:
    assert [part async for part in peer.stream("count", 5, credit=2)] == [0, 1, 2, 3, 4]


async def use_session(peer: connections.Connection, out: Sender) -> None:
    async with peer.session() as session, session.sender("take") as mine:
        await mine.send(1)


@pytest.mark.req("A13")
@pytest.mark.parametrize(
    "use",
    [
        send_one,
        send_some,
        attach_and_send,
        write_stream,
        take_some,
        get_one,
        call_some,
        read_stream,
        use_session,
    ],
)
async def test_cancelled_anywhere_the_connection_goes_on(
    use: Callable[[connections.Connection, Sender], Awaitable[None]],
) -> None:
    """After every number of passes of the scheduler, until the whole of it is done."""
    async with (
        Container("c", nodes=[Everything()]) as container,
        container.local() as peer,
        peer.sender("take") as out,
    ):
        for passes in range(500):
            done = False

            async def run() -> None:
                nonlocal done
                await use(peer, out)
                done = True

            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            if done:
                break
            assert peer.state == "open"
            with trio.fail_after(5):
                await out.send(2)
                assert await peer.call("double", 4, reply=int) == 8
                assert [part async for part in peer.stream("count", 2)] == [0, 1]
        assert done
        with trio.fail_after(5):
            await out.flush()
        assert peer._calls()._replies is not None
        assert not peer._calls()._replies.calls


# --- in the very pass that brings what was waited for ------------------------------------------


def before(endpoint: Any, name: str, first: Callable[[], object]) -> None:
    """Call *first* whenever the engine is about to call method *name* of *endpoint*."""
    method = getattr(endpoint, name)

    def call(*args: Any) -> Any:
        first()
        return method(*args)

    setattr(endpoint, name, call)


@pytest.mark.req("A13")
async def test_get_cancelled_at_any_checkpoint_leaves_the_receiver_its_credit() -> None:
    async with Broker() as broker, broker.local() as peer, broker.local() as other:
        await broker.declare(Queue("q"))
        cancelled = 0
        for passes in range(100):
            async with peer.receiver("q", credit=10) as messages, other.sender("q") as out:
                done = False

                async def ask(messages: Receiver = messages) -> None:
                    nonlocal done
                    await messages.get()
                    done = True

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask)
                    for _ in range(passes):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                await out.send(b"x")
                with trio.fail_after(5):
                    async with await messages.receive():
                        pass
            if done:
                break
            cancelled += 1
        assert done
        assert cancelled > 3


@pytest.mark.req("A13")
async def test_a_stream_that_gets_credit_as_it_is_cancelled_is_aborted() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.sender("q") as out:
        with trio.CancelScope() as scope:
            before(out, "on_credit", scope.cancel)
            far.link.grant(10)
            await block(out.stream())
        assert scope.cancelled_caught
        assert out.pending == 0
        receipt = out.send_nowait("after")
        await far.until(lambda: any(each.complete for each in far.heard.deliveries))
        *begun, whole = far.heard.deliveries
        assert all(each.aborted for each in begun)
        whole.settle(ACCEPTED)
        await receipt.accepted()


@pytest.mark.req("A13")
async def test_a_writer_hears_of_a_rejection_although_other_messages_have_no_outcome() -> None:
    limits = Limits(frame_size_max=4096, session_window=8, session_window_bytes=64 * 1024)
    far = FarEnd(credit=10, limits=limits)
    far.on_attach = lambda link: far.accept(link, streaming=True) and None
    heard: list[type[BaseException]] = []
    async with connected(far) as peer:
        out = peer.sender("q")
        await out.wait_attached()
        out.send_nowait("no outcome")

        async def write() -> None:
            try:
                async with out.stream() as body:
                    await body.write(bytes(1_000_000))
            except DeliveryRejected as error:
                heard.append(type(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await far.until(lambda: len(far.heard.deliveries) == 2)
            await trio.testing.wait_all_tasks_blocked(0.01)
            # The outcome alone: no window, which would wake the writer as well.
            (receipt,) = [each for each in out._unsettled if each.unfinished]
            receipt.finish(rejected("amqp:decode-error", "enough"))
            with trio.fail_after(5):
                while nursery.child_tasks:
                    await trio.lowlevel.checkpoint()
        assert heard == [DeliveryRejected]
        out.abandon()


@pytest.mark.req("A13")
async def test_room_that_is_not_used_is_passed_on() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.sender("q", max_pending=1) as out:
        first = out.send_nowait("first")
        looked: list[str] = []

        async def watch() -> None:
            await out.wait_for_room()
            looked.append("room")  # and sends nothing

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(out.send, "second")
            await trio.testing.wait_all_tasks_blocked()
            first.withdraw()
            with trio.fail_after(5):
                while not out.pending:
                    await trio.lowlevel.checkpoint()
            assert looked == ["room"]
            nursery.cancel_scope.cancel()


@pytest.mark.req("A13")
async def test_room_for_a_message_of_a_lost_transaction_is_passed_on() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        async with peer.sender("q", max_pending=1) as out:
            lost = peer.transaction()
            refused: list[AmqpError] = []

            async def send() -> None:
                try:
                    await out.send("in it", transaction=lost)
                except AmqpError as error:
                    refused.append(error)

            held = Receipt(out, b"")
            out._unsettled[held] = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(out.send, "after it")
                await trio.testing.wait_all_tasks_blocked()
                with trio.fail_after(5):
                    held.withdraw()
                    held.fail(LinkDetached())
                    while nursery.child_tasks:
                        await trio.lowlevel.checkpoint()
            assert [type(each) for each in refused] == [LocalProtocolError]


@pytest.mark.req("A13", "R11")
async def test_a_transaction_declared_as_its_block_is_cancelled_is_rolled_back() -> None:
    async with Broker() as broker, broker.local() as peer:
        async with peer.transaction():
            pass  # the control link is attached
        control = peer.default_session._control
        assert control is not None
        with trio.CancelScope() as scope:
            before(control, "on_outcomes", scope.cancel)
            async with peer.transaction():
                pytest.fail("declared")
        assert scope.cancelled_caught
        # The broker's answer to what was said of it is the last word.
        with trio.fail_after(5):
            while control.pending:
                await trio.lowlevel.checkpoint()
        assert len(broker.host.transactions) == 0


@pytest.mark.req("A13", "R11")
async def test_a_commit_cancelled_at_any_checkpoint_leaves_no_delivery_in_it() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("q"), Queue("out"))
        async with (
            peer.sender("q") as first,
            peer.sender("out") as out,
            peer.receiver("q", credit=2) as messages,
        ):
            for passes in range(100):
                await first.send(passes)
                delivery = await messages.receive()
                done = False

                async def move(delivery: Delivery = delivery) -> None:
                    nonlocal done
                    async with peer.transaction() as txn:
                        delivery.accept(transaction=txn)
                        await out.send("moved", transaction=txn)
                    done = True

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(move)
                    for _ in range(passes):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                control = peer.default_session._control
                assert control is not None
                with trio.fail_after(5):
                    while control.pending:
                        await trio.lowlevel.checkpoint()
                # The transaction was committed, or the delivery is still ours.
                assert type(delivery.raw.local_state) is not TransactionalState
                if delivery.outcome is None:
                    delivery.accept()
                if done:
                    break
            assert done
            with trio.fail_after(5):
                await first.send("last")
                async with await messages.receive() as delivery:
                    assert delivery.body == "last"


@pytest.mark.req("A13")
async def test_a_call_cancelled_as_its_reply_comes_does_not_stay_pending() -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer:
        with trio.CancelScope() as scope:

            async def answer() -> None:
                await far.until(lambda: any(each.deliveries for each in far.recorders))
                recorder = next(each for each in far.recorders if each.deliveries)
                request = Message.decode(recorder.deliveries[0].payload)
                replies = peer._calls()._replies
                assert replies is not None
                before(replies, "deliver", scope.cancel)
                back = next(link for link in far.links if hasattr(link, "send"))
                back.send(Message(b"", correlation_id=request.message_id).encode(), settled=True)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                await peer.call("q")
        assert scope.cancelled_caught
        calls = peer._calls()
        (sender,) = calls._senders.values()
        # The node may never settle it: then we do, after so many others.
        assert list(calls._answered) == list(sender._unsettled)


@pytest.mark.req("SE14", "X25")
async def test_a_token_that_was_being_put_when_the_connection_went_is_put_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    asked = trio.Event()

    @rpc("$cbs")
    async def take(message: Message) -> Message:
        if not asked.is_set():
            asked.set()
            await trio.sleep_forever()
        return Message(None, application_properties={"status-code": Int(200)})

    @node("q")
    async def work(body: str) -> None:
        pass

    async with (
        Container("far", nodes=[take, work]) as far,
        Container("us", network=far.network) as us,
    ):
        await far.listen("memory://far")
        async with us.connect("memory://far", token=Sas("app", "key")) as peer:
            out = peer.sender("q")
            await asked.wait()
            far.connections[0].close(Error("amqp:connection:forced", "restart"))
            await out.wait_attached()
            await out.send("x")


# --- a caller that has gone --------------------------------------------------------------------


@pytest.mark.req("A8")
@pytest.mark.parametrize("via", ["its link", "the anonymous terminus"])
async def test_a_caller_that_gives_up_while_its_right_is_looked_up_stops_the_handler(
    via: str, autojump_clock: trio.testing.MockClock
) -> None:
    log: list[str] = []

    @rpc("slow")
    async def slow(n: int) -> int:
        log.append("started")
        await trio.sleep(2)
        log.append("ended")
        return n

    async def authorize(peer: Any, address: str, role: str) -> bool:
        if role == "sender" and (address != "slow" or via != "its link"):
            await trio.sleep(1)
        return True

    network = MemoryNetwork()
    async with (
        Container("s", nodes=[slow], network=network, authorize=authorize) as s,
        Container("c", network=network) as c,
    ):
        await s.listen("memory://s")
        async with c.connect("memory://s") as peer:
            if via == "its link":
                with trio.move_on_after(0.3) as late:
                    await peer.call("slow", 1, reply=int)
                assert late.cancelled_caught
            else:
                async with peer.sender() as out:
                    receipt = out.send_nowait(
                        Message(b"1", content_type="application/json"), to="slow"
                    )
                    await trio.sleep(0.3)
                    receipt.give_up()
                    await trio.sleep(5)
            await trio.sleep(5)
            assert s.stats()["slow"]["running"] == 0
    assert log == []


@pytest.mark.req("A8")
async def test_a_deadline_counts_while_the_right_to_answer_is_looked_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    log: list[str] = []

    @rpc("slow")
    async def slow() -> int:
        log.append("started")
        return 1

    async def authorize(peer: Any, address: str, role: str) -> bool:
        if role == "sender" and address != "slow":
            await trio.sleep(60)
        return True

    network = MemoryNetwork()
    async with (
        Container("s", nodes=[slow], network=network, authorize=authorize) as s,
        Container("c", network=network) as c,
    ):
        await s.listen("memory://s")
        async with c.connect("memory://s") as peer:
            with pytest.raises(DeadlineExceeded):
                await peer.call("slow", within=1)
            await trio.sleep(1)
            assert s.stats()["slow"]["running"] == 0
            assert s.stats()["slow"]["cancelled"] == 1
    assert log == []


@pytest.mark.req("A10")
async def test_all_who_wait_for_handlers_to_end_hear_of_it() -> None:
    go = trio.Event()
    over: list[int] = []

    @node("q")
    async def busy(body: bytes) -> None:
        await go.wait()

    async with Container("c", nodes=[busy]) as c, c.local() as peer, peer.sender("q") as out:
        out.send_nowait(b"x")
        (workers,) = c.nodes.workers
        await trio.testing.wait_all_tasks_blocked()
        assert workers.running == 1

        async def wait(number: int) -> None:
            await workers.wait_idle()
            over.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, 1)
            nursery.start_soon(wait, 2)
            await trio.testing.wait_all_tasks_blocked()
            go.set()
    assert sorted(over) == [1, 2]


# --- outbox ----------------------------------------------------------------------------------------


@leaves("Connection.relay")
async def test_a_cancelled_relay_leaves_what_it_has_not_sent_in_the_outbox(
    sqlite_database: sqlite3.Connection,
) -> None:
    outbox = SqliteOutbox(sqlite_database, "shop")
    async with Broker(volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))
        await cancel(lambda: peer.relay(outbox))
        async with outbox.transaction() as work:
            work.send("q", "kept")
        assert broker.stats("q").available == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.relay, outbox)
            await outbox.flush()
            assert broker.stats("q").available == 1
            nursery.cancel_scope.cancel()
