"""Measured roles on amqp_rt, written as a user would write them (see processes.py).

Only ``idle``, which holds an unusual number of connections, uses the engine and plain sockets.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import platform
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import trio

import amqp_rt
from amqp_rt import Anonymous, Broker, ClientTls, Container, Message, Sas, Sender, node, rpc
from amqp_rt.broker import Queue, Topic
from amqp_rt.core.frames import (
    FrameBuffer,
    disposition_frame,
    first_transfer,
    read_disposition,
    read_transfer,
)
from amqp_rt.fronts import amqp10
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import Source, Target

Options = dict[str, Any]


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def filler(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


class Tally:
    """Counter of messages, which times those after the warm-up."""

    def __init__(self, options: Options) -> None:
        self.warmup = options["warmup"]
        self.result: dict[str, float] = {"n": 0, "measured": 0}
        self.came: float | None = None
        self.warm = False
        self.cpu = time.process_time()

    def count(self) -> None:
        result = self.result
        now = time.monotonic()
        result["n"] += 1
        if self.warm:
            result["measured"] += 1
            result["last"] = now
        else:
            self.came = self.came or now
            if now - self.came >= self.warmup:
                self.warm = True
                result["first"] = now
                self.cpu = time.process_time()

    def end(self) -> None:
        """Stop counting. Reading the processor time costs more than a message does."""
        self.result["cpu"] = time.process_time() - self.cpu


def url(options: Options) -> str:
    return str(options.get("url") or f"amqp://127.0.0.1:{options['port']}")


def door(options: Options) -> dict[str, Any]:
    """Return the options of a client for logging in and for TLS."""
    ca = options.get("ca")
    found = {"sasl": options.get("sasl", False), **({"tls": ClientTls(ca)} if ca else {})}
    if key := options.get("sas"):
        found |= {
            "sasl": ["ANONYMOUS"],
            "token": Sas("RootManageSharedAccessKey", key),
            "set_token": False,
        }
    return found


async def served(container: Container, tally: Tally) -> None:
    """Serve until standard input ends."""
    (listening,) = await container.listen("amqp://127.0.0.1:0")
    say(ready=1, port=int(listening.rpartition(":")[2]))
    await trio.to_thread.run_sync(sys.stdin.read)
    tally.end()


async def sink(options: Options) -> None:
    """Run a server that accepts all messages."""
    tally = Tally(options)

    @node("bench", prefetch=options["credit"])
    async def take(body: bytes) -> None:
        tally.count()

    async with Container("sink", nodes=[take]) as container:
        await served(container, tally)
    say(**tally.result)


async def source(options: Options) -> None:
    """Run a client that sends for a while, or a number of messages, as fast as credit allows."""
    body = filler(options["size"])
    seconds, warmup, wanted = options["seconds"], options["warmup"], options.get("count", 0)
    durable = options.get("durable", False)
    warm, cpu, since = 0, time.process_time(), time.monotonic()

    def messages() -> Iterator[Message]:
        nonlocal warm, cpu, since
        started = time.monotonic()
        number = 0
        while wanted == 0 or number < wanted:
            yield Message(body, message_id=number, durable=durable)
            number += 1
            if number % 32 == 0:
                spent = time.monotonic() - started
                if not warm and spent >= warmup:
                    warm, cpu, since = number, time.process_time(), time.monotonic()
                if spent >= warmup + seconds:
                    return

    address = options.get("address", "bench")
    settled = True if options["settled"] else None
    async with (
        Container("source") as container,
        container.connect(url(options), **door(options)) as peer,
        peer.sender(
            address,
            settled=settled,
            max_pending=2_000,
            durable=options.get("terminus_durability", 0),
        ) as out,
    ):
        say(ready=1)
        sent = await send_all(out, messages(), options.get("rate", 0))
        used, elapsed = time.process_time() - cpu, time.monotonic() - since
    say(n=sent, measured=sent - warm, cpu=used, elapsed=elapsed)


async def send_all(out: Sender, messages: Iterator[Message], rate: float) -> int:
    if not rate:
        return await out.send_many(messages)
    started, sent = trio.current_time(), 0
    async with trio.open_nursery() as nursery:
        for message in messages:
            await trio.sleep_until(started + sent / rate)
            nursery.start_soon(out.send, message)
            sent += 1
    return sent


async def consume(options: Options) -> None:
    """Run a client that receives as many messages as a line of its input gives."""
    tally = Tally(options)
    expected: list[int] = []
    async with (
        Container("consume") as container,
        container.connect(url(options), **door(options)) as peer,
        peer.receiver(options["address"], credit=options["credit"]) as messages,
        trio.open_nursery() as nursery,
    ):
        say(ready=1)

        async def read() -> None:
            expected.append(int(await trio.to_thread.run_sync(sys.stdin.readline) or 0))
            if tally.result["n"] >= expected[0]:
                tally.end()
                nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        async for delivery in messages:
            delivery.body  # noqa: B018  # decoded, as an application would
            delivery.accept()
            tally.count()
            if expected and tally.result["n"] >= expected[0]:
                break
        tally.end()
        nursery.cancel_scope.cancel()
    say(**tally.result)


async def echo(options: Options) -> None:
    """Run a server that returns requests as replies."""
    tally = Tally(options)

    @rpc("echo", prefetch=options["credit"])
    async def reply(body: bytes) -> bytes:
        tally.count()
        return body

    async with Container("echo", nodes=[reply]) as container:
        await served(container, tally)
    say(**tally.result)


async def call(options: Options) -> None:
    """Run a client with a number of requests in flight."""
    body = filler(options["size"])
    latencies: list[float] = []
    started = warm = cpu = 0.0

    async def caller() -> None:
        nonlocal warm, cpu
        while True:
            before = time.monotonic()
            if before >= started + options["warmup"] + options["seconds"]:
                return
            await peer.call("echo", body, reply=bytes)
            now = time.monotonic()
            if warm:
                latencies.append(now - before)
            elif now - started >= options["warmup"]:
                warm, cpu = now, time.process_time()

    async with Container("call") as container, container.connect(url(options), sasl=False) as peer:
        await peer.call("echo", body, reply=bytes)  # The links are attached now
        say(ready=1)
        started = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(options["in_flight"]):
                nursery.start_soon(caller)
        elapsed, used = time.monotonic() - warm, time.process_time() - cpu
    latencies.sort()
    say(
        n=len(latencies),
        elapsed=elapsed,
        cpu=used,
        p50_ms=latencies[len(latencies) // 2] * 1000,
        p99_ms=latencies[len(latencies) * 99 // 100] * 1000,
    )


async def dial(options: Options) -> None:
    """Run a client that repeatedly connects, attaches a sender and closes."""
    count = 0
    async with Container("dial") as container:
        say(ready=1)
        started, cpu = time.monotonic(), time.process_time()
        while (elapsed := time.monotonic() - started) < options["seconds"]:
            async with (
                container.connect(url(options), **door(options)) as peer,
                peer.sender(options.get("address", "bench")),
            ):
                count += 1
        say(n=count, elapsed=elapsed, cpu=time.process_time() - cpu)


# ---- without the API ---------------------------------------------------------------------------


class Wire:
    """Client engine on a blocking socket, with one session and one link."""

    def __init__(self, options: Options, *, sending: bool = False) -> None:
        self.engine = amqp10.client(
            amqp10.ClientOptions(container_id=f"idle-{id(self)}", mechanisms=(Anonymous(),)), 0.0
        )
        self.credit = 0
        self.deliveries: list[Any] = []
        self.attached = False
        self.socket = socket.create_connection(("127.0.0.1", options["port"]))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not self.engine.open_received:
            self.turn()
        session = self.engine.begin()
        address = options["address"]
        self.link: Any
        if sending:
            self.link = session.attach_sender(
                "s", self, source=Source(), target=Target(address=address)
            )
        else:
            self.link = session.attach_receiver(
                "r", self, source=Source(address=address), target=Target()
            )
        while not self.attached:
            self.turn()

    def turn(self) -> None:
        """Send pending output, and process input."""
        self.flush()
        data = self.socket.recv(65_536)
        if not data:
            raise SystemExit("the broker hung up")
        self.engine.receive(data, 0.0)

    def flush(self) -> None:
        self.socket.sendall(b"".join(self.engine.take()))

    def on_attached(self, link: Any) -> None:
        self.attached = True
        if hasattr(link, "grant"):
            link.grant(100)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.deliveries += deliveries

    def on_data(self, link: Any, deliveries: list[Any]) -> None: ...
    def on_settled(self, link: Any, deliveries: list[Any]) -> None: ...
    def on_flow(self, link: Any) -> None: ...
    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None: ...

    def on_credit(self, link: Any) -> None:
        self.credit = link.credit

    def on_detached(self, link: Any, error: Any, closed: bool) -> None:
        raise SystemExit(f"detached: {error}")


def idle(options: Options) -> None:
    """Hold idle connections, and optionally some that send and receive."""
    held = [Wire(options) for _ in range(options["connections"])]
    for wire in held:
        wire.flush()
    active = options.get("active", 0)
    pairs = []
    for number in range(active):
        own = options | {"address": f"{options['address']}-{number}"}
        receiver = Wire(own)
        receiver.flush()
        pairs.append((Wire(own, sending=True), receiver))
    say(ready=1)
    if pairs:
        say(**mill(pairs, options["seconds"]))
    sys.stdin.read()
    if not pairs:
        say(n=len(held))


def mill(pairs: list[tuple[Wire, Wire]], seconds: float) -> dict[str, float]:
    """Send one message at a time through each pair, in turn."""
    payload = Message(bytes(100)).encode()
    count, longest = 0, 0.0
    now = time.monotonic()
    until = now + seconds
    while now < until:
        for sender, _ in pairs:
            while not sender.link.credit:
                sender.turn()
            sender.link.send(payload)
            sender.flush()
        for _, receiver in pairs:
            while not receiver.deliveries:
                receiver.turn()
            for delivery in receiver.deliveries:
                delivery.settle(ACCEPTED)
            receiver.deliveries.clear()
            receiver.link.grant(100)
            receiver.flush()
            count += 1
        before, now = now, time.monotonic()
        longest = max(longest, now - before)
    return {"n": count, "longest_ms": longest * 1000}


def codec(options: Options) -> None:
    """Measure nanoseconds for the message and the frames that all contestants encode and decode."""
    body = filler(100)
    named = {"region": "eu", "attempt": 3, "urgent": True}

    def encode() -> bytes:
        return Message(
            body,
            message_id=17,
            user_id=b"guest",
            to="orders",
            subject="new",
            content_type="application/octet-stream",
            application_properties=named,
        ).encode()

    encoded = encode()
    frame = first_transfer(0, 1, 1_000, b"0001", False, False, len(encoded)) + encoded
    outcome = disposition_frame(0, True, 1_000, 1_049, True, ACCEPTED)
    limits = DEFAULT_LIMITS
    buffer = FrameBuffer(65_536)

    def decode() -> object:
        message = Message.decode(encoded)
        properties = message.properties
        return properties.message_id, properties.to, message.application_properties, message.body

    def decode_body() -> object:
        return Message.decode(encoded).body

    def encode_transfer() -> bytes:
        return first_transfer(0, 1, 1_000, b"0001", False, False, len(encoded)) + encoded

    def decode_transfer() -> object:
        buffer.feed(frame)
        buffer.next_frame()
        return read_transfer(buffer.data, buffer.body, buffer.end, limits)

    def encode_disposition() -> bytes:
        return disposition_frame(0, True, 1_000, 1_049, True, ACCEPTED)

    def decode_disposition() -> object:
        buffer.feed(outcome)
        buffer.next_frame()
        return read_disposition(buffer.data, buffer.body, buffer.end, limits)

    say(ready=1)
    seconds = options["seconds"]
    say(
        message_encode=nanoseconds(encode, seconds),
        message_decode=nanoseconds(decode, seconds),
        body_decode=nanoseconds(decode_body, seconds),
        transfer_encode=nanoseconds(encode_transfer, seconds),
        transfer_decode=nanoseconds(decode_transfer, seconds),
        disposition_encode=nanoseconds(encode_disposition, seconds),
        disposition_decode=nanoseconds(decode_disposition, seconds),
    )


def nanoseconds(operation: Any, seconds: float) -> float:
    """Return the nanoseconds of one call, measured over about *seconds*."""
    for _ in range(1_000):
        operation()
    done, started = 0, time.process_time()
    while (elapsed := time.process_time() - started) < seconds:
        for _ in range(500):
            operation()
        done += 500
    return elapsed / done * 1e9


class Watch(trio.abc.Instrument):
    """Instrument that times every step of the event loop, until other tasks can run."""

    def __init__(self) -> None:
        self.forget()
        self._cpu = self._wall = 0

    def forget(self) -> None:
        #: Nanoseconds of the longest step, in processor time of the thread and in elapsed time.
        self.cpu = self.wall = 0
        self.where = ""

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._cpu, self._wall = time.thread_time_ns(), time.perf_counter_ns()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.wall = max(self.wall, time.perf_counter_ns() - self._wall)
        spent = time.thread_time_ns() - self._cpu
        if spent > self.cpu:
            self.cpu, self.where = spent, task.name


async def guarded(options: Options) -> None:
    """Run a broker with default limits and a watched event loop.

    For each line of input it prints a line of results.
    """
    watch = Watch()
    trio.lowlevel.add_instrument(watch)
    logins: dict[str, Any] = {
        "users": {"bench": "correct horse"},
        "sasl": ["PLAIN", "SCRAM-SHA-256", "ANONYMOUS"],
    }
    namespace: Any = None
    if options.get("namespace"):
        import bus_attacks
        from amqp_rt_servicebus.namespace import Namespaces

        namespace = bus_attacks.namespace()
        # Its clients log in with tokens.
        logins = {"addons": [Namespaces(namespace)]}
    async with (
        Broker(
            "guarded",
            auto_create=["queue:*"],
            **logins,
            fronts=["amqp091"] if importlib.util.find_spec("amqp_rt_amqp091") else [],
            store=options.get("store"),
        ) as broker,
    ):
        await broker.declare(Topic("spread"))
        # For queries of all of them. A few more may be created on first use.
        await broker.declare(*(Queue(f"node-{number}") for number in range(options["nodes"])))
        plain, web = await broker.listen("amqp://127.0.0.1:0", "ws://127.0.0.1:0/")
        bus = plain
        if namespace is not None:
            bus_attacks.fill(namespace)
            (bus,) = await broker.listen("amqp://127.0.0.1:0", profile=namespace.profile)
        # As ``amqp-rt serve`` does.
        gc.collect()
        gc.freeze()
        say(
            ready=1,
            port=int(plain.rpartition(":")[2]),
            web_port=int(web.rstrip("/").rpartition(":")[2]),
            bus_port=int(bus.rpartition(":")[2]),
        )
        while await trio.to_thread.run_sync(sys.stdin.readline):
            say(step_ms=watch.cpu / 1e6, step_wall_ms=watch.wall / 1e6, where=watch.where)
            watch.forget()
    say(n=0)


async def bus(options: Options) -> None:
    """Run a broker with plain queues, and a namespace of Service Bus beside them."""
    from amqp_rt_servicebus.declarations import Queue as BusQueue
    from amqp_rt_servicebus.namespace import Namespace, Namespaces

    namespace = Namespace(BusQueue("driven"), BusQueue("hop"))
    addons = [Namespaces(namespace)]
    async with Broker("bus", auto_create=["queue:*"], addons=addons) as broker:
        (plain,) = await broker.listen("amqp://127.0.0.1:0")
        (own,) = await broker.listen("amqp://127.0.0.1:0", profile=namespace.profile)
        gc.collect()
        gc.freeze()
        say(
            ready=1,
            port=int(plain.rpartition(":")[2]),
            bus_port=int(own.rpartition(":")[2]),
            connection_string=namespace.connection_string(own),
        )
        await trio.to_thread.run_sync(sys.stdin.read)
    say(n=0)


def bus_growth(options: Options) -> None:
    import bus_engines

    say(ready=1)
    say(**bus_engines.growth(options["what"], options["quick"]))


def attack(options: Options) -> None:
    import attacks

    say(ready=1)
    say(**attacks.attack(options["what"], options["port"], options["seconds"]))


def seeds(options: Options) -> None:
    """Run the simulated worlds of the tests, one seed after the other."""
    sys.path.insert(0, options["tests"])
    from worlds import trade

    from amqp_rt.testing.simulation import check_seeds

    say(ready=1)
    count, started = 0, time.process_time()
    while (elapsed := time.process_time() - started) < options["seconds"]:
        check_seeds(trade, range(count, count + 5))
        count += 5
    say(n=count, elapsed=elapsed)


async def mesh_member(options: Options) -> None:
    import mesh_members

    await mesh_members.member(options, say)


async def mesh_stream(options: Options) -> None:
    import mesh_members

    await mesh_members.stream(options, say)


async def mesh_shares(options: Options) -> None:
    import mesh_members

    await mesh_members.shares(options, say)


def mesh_growth(options: Options) -> None:
    import mesh_members

    say(ready=1)
    found = mesh_members.spf(options["nodes"])
    if options["converge"]:
        found |= mesh_members.converge(options["nodes"], options["tests"])
    say(**found)


async def observed(options: Options) -> None:
    import observing

    await observing.observed(options, say)


def store(options: Options) -> None:
    import storing

    storing.store(options, say)


def hop(options: Options) -> None:
    import engines

    say(ready=1)
    say(**engines.hop(options["acks"], options["seconds"]))


def growth(options: Options) -> None:
    import engines

    say(ready=1)
    say(**engines.growth(options["what"], options["quick"]))


def version(options: Options) -> None:
    say(
        version=amqp_rt.__version__,
        compiled=amqp_rt.COMPILED,
        python=platform.python_version(),
        driver="socket",
    )


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    found = {
        each.__name__: each
        for each in (
            sink, source, consume, echo, call, dial, guarded,
            idle, codec, hop, growth, attack, seeds, version, bus, bus_growth,
            mesh_member, mesh_stream, mesh_shares, mesh_growth, observed, store,
        )
    }[role]  # fmt: skip
    if inspect.iscoroutinefunction(found):
        trio.run(found, options)
    else:
        found(options)


main()
