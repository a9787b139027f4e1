"""Number of function calls for each message and each connection, in the broker and in a container.

The bounds are measured numbers, rounded up. A change that needs more calls on these paths fails here, although
no machine is quiet enough to show it in a benchmark.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import trio
from brokers import Client, Receiving, Sending, World, commit_epoch
from call_counts import Calls, plain_only
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from paged import world_of

from amqp_rt import Anonymous, Breaker, Broker, Container, Retry, node, rpc
from amqp_rt.batches import MESSAGE_BATCH, MESSAGE_BATCHES, write_messages
from amqp_rt.broker.nodes import Declaration, Log, Queue, Topic
from amqp_rt.broker.staging.attempts import ATTEMPT, EPOCH, PART, PRODUCER, RUN
from amqp_rt.container import feeding, handling, receiving, replies, sending, serving
from amqp_rt.fronts import amqp10
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.telemetry.handler_times import HandlerTimes
from amqp_rt.telemetry.otel import Otel
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

pytestmark = plain_only

MESSAGES = 64
WARM = 32


@pytest.fixture(autouse=True)
def _turns_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """End turns by their messages alone: how many messages pass in a millisecond depends on the machine."""
    for module in (feeding, handling, replies, sending, serving):
        monkeypatch.setattr(module, "TURN_S", math.inf)
    monkeypatch.setattr(receiving, "_TURN_S", math.inf)


class Counted:
    """Server's side of a connection in memory: only its calls are counted."""

    def __init__(self, client: Client, calls: Calls) -> None:
        self.client = client
        self.calls = calls

    def pump(self) -> bool:
        """Carry bytes both ways once; return whether there were any."""
        joined = self.client.joined
        data = b"".join(joined.client.take())
        with self.calls:
            if data:
                joined.server.receive(data, joined.now)
            pieces = joined.server.take()
        answer = b"".join(pieces)
        if answer:
            joined.client_events += joined.client.receive(answer, joined.now)
        return bool(data or answer)


def pump(ends: list[Counted]) -> bool:
    """Carry bytes of all *ends* once; return whether there were any."""
    moved = [end.pump() for end in ends]
    return any(moved)


async def carry(world: World, ends: list[Counted], calls: Calls) -> None:
    """Carry bytes until no end has more to send; with a store, write to it in between."""
    while True:
        while pump(ends):
            pass
        if world.host.journal is None:
            return
        await trio.testing.wait_all_tasks_blocked()
        with calls:
            hurried = world.host.journal.commit_soon()
        if not hurried and not pump(ends):
            return


async def through_broker(
    world: World, address: str, *, durable: bool = False
) -> tuple[Calls, Calls]:
    """Count calls for messages that arrive one by one, and for their whole lifetimes."""
    coming, living = Calls(), Calls()
    producer, consumer = world.client(), world.client()
    receiving: Receiving | None = None
    if address != "q":
        receiving = consumer.receiver(address, settle=ACCEPTED)
    sending: Sending = producer.sender(address)
    for counted in (WARM, MESSAGES):
        coming.counts.clear()
        living.counts.clear()
        ends = [Counted(producer, coming)]
        for number in range(counted):
            sending.link.send(Message(b"x" * 100, durable=durable).encode(), number)
            await carry(world, ends, coming)
        living.counts.update(coming.counts)
        if receiving is None:
            receiving = consumer.receiver(address, settle=ACCEPTED)
        ends = [Counted(producer, living), Counted(consumer, living)]
        before = len(receiving.endpoint.deliveries)
        for _ in range(counted):
            receiving.link.grant(1)
            await carry(world, ends, living)
        assert len(receiving.endpoint.deliveries) == before + counted
    assert len(sending.outcomes) == WARM + MESSAGES
    return coming, living


@pytest.mark.parametrize(
    ("address", "coming", "living"), [("q", 52, 155), ("t", 55, 158), ("log", 65, 165)]
)
async def test_messages_in_memory(address: str, coming: int, living: int) -> None:
    world = World(Queue("q"), Topic("t"), Log("log"))
    came, lived = await through_broker(world, address)
    came.check(MESSAGES, coming)
    lived.check(MESSAGES, living)


async def test_messages_in_memory_that_come_and_go_in_batches() -> None:
    world = World(Queue("q"))
    calls = Calls()
    producer, consumer = world.client(), world.client()
    sending = producer.sender("q")
    receiving = consumer.receiver("q", settle=ACCEPTED)
    ends = [Counted(producer, calls), Counted(consumer, calls)]
    for counted in (WARM, MESSAGES):
        calls.counts.clear()
        for number in range(counted):
            sending.link.send(Message(b"x" * 100).encode(), number)
        await carry(world, ends, calls)
        receiving.link.grant(counted)
        await carry(world, ends, calls)
    assert len(sending.outcomes) == len(receiving.bodies) == WARM + MESSAGES
    calls.check(MESSAGES, 40)


async def test_durable_messages(autojump_clock: Any) -> None:
    async with world_of(MemoryStore(), Queue("q")) as world:
        came, lived = await through_broker(world, "q", durable=True)
    came.check(MESSAGES, 60)
    lived.check(MESSAGES, 174)


@pytest.mark.parametrize(("out", "at_most"), [(Queue("out"), 11), (Log("out", partitions=2), 5)])
async def test_messages_of_an_epoch_that_are_published(
    autojump_clock: Any, out: Declaration, at_most: int
) -> None:
    """They were staged in batches."""
    claim: dict[Any, Any] = {PRODUCER: "job", RUN: "one", EPOCH: 0, PART: 0, ATTEMPT: 0}
    calls = Calls()
    async with world_of(MemoryStore(), out, limits=Limits()) as world:
        sending = world.client().sender(
            "out", properties=claim, desired_capabilities=(MESSAGE_BATCHES,)
        )
        batch = [Message(b"x" * 100).encode()] * 500
        for _ in range(6):
            sending.send_raw(write_messages(batch), message_format=MESSAGE_BATCH)
            await world.settle()
        crc = zlib.crc32(b"".join(batch * 6))
        with calls:
            assert await commit_epoch(world.host, "out", "job", "one", 0, [(0, 0, 3_000, crc)])
    calls.check(3_000, at_most)


@node("bench")
async def take(body: bytes) -> None:
    """Accept each message."""


@rpc("double")
async def double(number: int) -> int:
    return 2 * number


async def through_container(how: str, url: str = "memory://b") -> Calls:
    """Count calls at both ends for messages to a node, or requests and their replies."""
    calls = Calls()
    async with Container("server", nodes=[take, double]) as server:
        (listening,) = await server.listen(url)
        async with (
            Container("client", network=server.network) as container,
            container.connect(listening, reconnect=None) as peer,
            peer.sender("bench") as sender,
        ):
            await peer.call("double", 1, reply=int)
            calling = peer if how == "rpc" else peer.calling(Retry(), Breaker())
            for counted in (WARM, MESSAGES):
                calls.counts.clear()
                with calls:
                    if how == "pipelined":
                        await sender.send_many([b"x" * 100] * counted)
                    elif how == "rpc together":
                        async with trio.open_nursery() as nursery:
                            for number in range(counted):
                                nursery.start_soon(peer.call, "double", number)
                        continue
                    for number in range(counted if how != "pipelined" else 0):
                        if how == "awaited":
                            await sender.send(b"x" * 100)
                        else:
                            assert await calling.call("double", number, reply=int) == 2 * number
    return calls


@pytest.mark.parametrize(
    ("how", "at_most"),
    [
        ("pipelined", 12),
        ("awaited", 152),
        ("rpc", 210),
        ("rpc together", 78),
        ("policies", 234),
    ],
)
async def test_messages_through_a_container(how: str, at_most: int) -> None:
    for _ in range(5):
        # The order in which trio runs tasks is random, which changes the number of wake-ups a little.
        calls = await through_container(how)
        if calls.counts.total() <= at_most * MESSAGES:
            return
    calls.check(MESSAGES, at_most)


async def observed(observer: Any) -> Calls:
    """Count calls of both ends for messages to a node, where *observer* is told of them."""
    calls = Calls()
    async with (
        Container("all", nodes=[take], observe=[observer]) as all_,
        all_.local() as peer,
        peer.sender("bench") as sender,
    ):
        for counted in (WARM, MESSAGES):
            calls.counts.clear()
            with calls:
                await sender.send_many([b"x" * 100] * counted)
    return calls


@pytest.mark.parametrize(
    ("how", "at_most"), [("times", 27), ("api", 29), ("unsampled", 37), ("sampled", 43)]
)
async def test_messages_through_a_container_with_observers(how: str, at_most: int) -> None:
    """Those of the SDK are not counted. A message has two spans."""
    for _ in range(5):
        observer: Any
        if how == "times":
            observer = HandlerTimes(10)
        elif how == "api":
            observer = Otel(tracer_provider=trace.NoOpTracerProvider())
        else:
            sampler = ALWAYS_ON if how == "sampled" else ALWAYS_OFF
            observer = Otel(tracer_provider=TracerProvider(sampler=sampler))
        calls = await observed(observer)
        if calls.counts.total() <= at_most * MESSAGES:
            return
    calls.check(MESSAGES, at_most)


async def set_up(connections: int) -> Calls:
    """Count calls at both ends for connections with a session and a link, over TCP, one after the other."""
    calls = Calls("amqp_rt", "trio")
    async with Container("server", nodes=[take]) as server, Container("client") as container:
        (url,) = await server.listen("amqp://127.0.0.1:0")
        for counted in (WARM, connections):
            calls.counts.clear()
            with calls:
                for _ in range(counted):
                    async with container.connect(url, sasl=False) as peer, peer.sender("bench"):
                        pass
    return calls


@pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")
async def test_connections_that_are_set_up() -> None:
    for _ in range(5):
        # How many sockets are ready in one pass depends on the system.
        calls = await set_up(MESSAGES)
        if calls.counts.total() <= 1_350 * MESSAGES:
            return
    calls.check(MESSAGES, 1_350)


@pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")
@pytest.mark.parametrize(("how", "at_most"), [("awaited", 132), ("rpc", 190)])
async def test_messages_through_a_container_over_tcp(how: str, at_most: int) -> None:
    for _ in range(5):
        calls = await through_container(how, "amqp://127.0.0.1:0")
        if calls.counts.total() <= at_most * MESSAGES:
            return
    calls.check(MESSAGES, at_most)


class Conversation:
    """Octets of a client that connects with SASL, begins a session, attaches a sender and closes.

    They are recorded once from an engine, so that a broker's calls can be counted without those of a client.
    """

    def __init__(self) -> None:
        #: Octets to send, and the number of octets that answer them.
        self.turns: list[tuple[bytes, int]] = []
        self.engine = amqp10.client(
            amqp10.ClientOptions(container_id="client", mechanisms=(Anonymous(),)), 0.0
        )

    async def record(self, port: int) -> None:
        """Record the turns with the broker at *port*."""
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            while not self.engine.open_received:
                await self._turn(stream)
            session = self.engine.begin()
            session.attach_sender("s", Recorder(), source=Source(), target=Target(address="q"))
            await self._turn(stream)
            session.end()
            self.engine.close()
            await self._turn(stream)
        assert self.engine.finished

    async def _turn(self, stream: trio.SocketStream) -> None:
        sent = b"".join(self.engine.take())
        await stream.send_all(sent)
        answer = await stream.receive_some(65_536)
        self.turns.append((sent, len(answer)))
        self.engine.receive(answer, 0.0)

    async def repeat(self, port: int) -> None:
        """Repeat the turns on a new connection to the broker at *port*."""
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for sent, answer in self.turns:
                await stream.send_all(sent)
                while answer > 0:
                    got = await stream.receive_some(answer)
                    assert got
                    answer -= len(got)


@pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")
async def test_connections_to_a_broker_that_are_set_up() -> None:
    """The calls are those of the broker alone, without trio's."""
    calls, conversation = Calls(), Conversation()
    async with Broker() as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = int(url.rpartition(":")[2])
        await conversation.record(port)
        for _ in range(5):
            # The passes of the scheduler, in which the reactor is called, depend on the system.
            calls.counts.clear()
            with calls:
                for _ in range(MESSAGES):
                    await conversation.repeat(port)
            if calls.counts.total() <= 655 * MESSAGES:
                return
    calls.check(MESSAGES, 655)


class SystemCalls:
    """Counts of the calls of C functions by their names, in this thread while the context is entered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> SystemCalls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and type(getattr(arg, "__self__", None)).__name__ in (
            "socket",
            "epoll",
        ):
            self.counts[arg.__name__] += 1


@pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")
async def test_concurrent_requests_leave_in_one_write_and_a_request_alone_takes_few_system_calls() -> (
    None
):
    async with Container("server", nodes=[double]) as server:
        (listening,) = await server.listen("amqp://127.0.0.1:0")
        async with (
            Container("client") as container,
            container.connect(listening, reconnect=None) as peer,
        ):
            await peer.call("double", 1, reply=int)
            many, alone = SystemCalls(), SystemCalls()
            with many:
                async with trio.open_nursery() as nursery:
                    for number in range(MESSAGES):
                        nursery.start_soon(peer.call, "double", number)
            with alone:
                for number in range(MESSAGES):
                    await peer.call("double", number, reply=int)
    # The requests, and the replies of handlers that run one after the other: those of a worker in one write.
    assert many.counts["send"] + many.counts["sendmsg"] <= 8
    assert alone.counts["send"] == alone.counts["recv"] == 2 * MESSAGES
    assert alone.counts["poll"] <= 7 * MESSAGES


@pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")
async def test_requests_in_flight_stay_together() -> None:
    """Callers that call again and again: many requests, and many replies, in each read and each write."""
    calls = 8 * MESSAGES

    async def caller() -> None:
        for _ in range(calls // MESSAGES):
            await peer.call("double", 1)

    async with Container("server", nodes=[double]) as server:
        (listening,) = await server.listen("amqp://127.0.0.1:0")
        async with (
            Container("client") as container,
            container.connect(listening, reconnect=None) as peer,
        ):
            await peer.call("double", 1, reply=int)
            system = SystemCalls()
            with system:
                async with trio.open_nursery() as nursery:
                    for _ in range(MESSAGES):
                        nursery.start_soon(caller)
    # At both ends. A worker that was busy for a millisecond sends what it has, and that is four replies or more.
    assert system.counts["send"] + system.counts["sendmsg"] <= 2 * calls / 4, system.counts
    assert system.counts["recv"] <= 2 * calls / 4, system.counts
