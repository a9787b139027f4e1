"""Broker and connections without sockets, of which only the broker's work is timed.

Clients are engines too while connections are set up; afterwards their frames are made in advance
and their input is discarded, so that only the broker runs during the measured time.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.nodes import Queue
from amqp_rt.core.frames import disposition_frame, first_transfer
from amqp_rt.events import AttachRequested
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import MIB, Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.termini import Source, Target

WINDOW = 2**31 - 1
LIMITS = Limits(
    handle_max=20_000,
    session_window=WINDOW,
    session_window_bytes=WINDOW,
    unsettled_max=2_000_000,
    nodes_max=200_000,
    broker_bytes_max=4096 * MIB,
    queue_bytes_max=4096 * MIB,
    idle_timeout_s=0,
    handshake_s=1e9,
    output_max=64 * MIB,
)
CHUNK = 50
PAYLOAD = Message(bytes(100), message_id=17).encode()

clock = time.thread_time_ns


class Mute:
    """Endpoint of a client that ignores events."""

    def __init__(self, credit: int = 0) -> None:
        self.credit = credit

    def on_attached(self, link: Any) -> None:
        if self.credit:
            link.grant(self.credit)

    def deliver(self, link: Any, deliveries: list[Any]) -> None: ...
    def on_data(self, link: Any, deliveries: list[Any]) -> None: ...
    def on_settled(self, link: Any, deliveries: list[Any]) -> None: ...
    def on_flow(self, link: Any) -> None: ...
    def on_credit(self, link: Any) -> None: ...
    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None: ...
    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        raise SystemExit(f"link {link.name} was detached: {error}")


class Connection:
    """Connection of a client to the broker."""

    def __init__(self, broker: Broker, limits: Limits = LIMITS) -> None:
        self.broker = broker
        options = amqp10.ClientOptions(container_id="client", limits=LIMITS)
        self.client = amqp10.client(options, 0.0)
        self.server = amqp10.Front().server(
            ServerOptions(container_id="server", limits=limits, sasl_required=False), 0.0
        )
        broker.servers.append(self.server)
        self.pump()
        self.session = self.client.begin(window=WINDOW, window_bytes=WINDOW)
        #: Deliveries that the client has sent, and those sent to it that it has settled.
        self.sent = 0
        self.settled = 0

    def pump(self) -> None:
        """Transfer bytes in both directions until neither side has output."""
        while True:
            up, down = b"".join(self.client.take()), b"".join(self.server.take())
            if not up and not down:
                return
            for event in self.server.receive(up, 0.0) if up else ():
                if isinstance(event, AttachRequested) and not self.broker.host.attach(event.link):
                    raise SystemExit(f"nobody took {event.link}")
            if down:
                self.client.receive(down, 0.0)

    def sender(self, address: str) -> Any:
        link = self.session.attach_sender(
            f"to-{address}", Mute(), source=Source(), target=Target(address=address)
        )
        self.pump()
        return link

    def receiver(self, address: str, credit: int = WINDOW, name: str = "") -> Any:
        link = self.session.attach_receiver(
            name or f"from-{address}",
            Mute(credit),
            source=Source(address=address),
            target=Target(),
        )
        self.pump()
        return link

    def transfers(self, count: int, payload: bytes = PAYLOAD, handle: int = 0) -> bytes:
        """Return frames of *count* messages on the link with *handle*."""
        first = self.sent
        self.sent += count
        size = len(payload)
        return b"".join(
            first_transfer(0, handle, number, number.to_bytes(4, "big"), False, False, size)
            + payload
            for number in range(first, first + count)
        )

    def outcomes(self, count: int, each: int) -> bytes:
        """Return frames that accept the next *count* deliveries, *each* of them at a time."""
        first = self.settled
        self.settled += count
        return b"".join(
            disposition_frame(
                0, True, number, min(number + each, first + count) - 1, True, ACCEPTED
            )
            for number in range(first, first + count, each)
        )


class Broker:
    """Broker that is measured."""

    def __init__(self) -> None:
        self.host = BrokerHost(limits=LIMITS, auto_create=Queue)
        self.servers: list[Any] = []
        #: Nanoseconds of the broker's work.
        self.spent = 0

    def take(self, connection: Connection, data: bytes, *others: Connection) -> None:
        """Pass *data* to the broker and take its output, and count the time."""
        connections = (connection, *others)
        before = clock()
        connection.server.receive(data, 0.0)
        for one in connections:
            one.server.take()
        self.spent += clock() - before


def pair(broker: Broker, address: str = "q", credit: int = WINDOW) -> tuple[Connection, Connection]:
    """Create a producer and a consumer of one queue."""
    producer, consumer = Connection(broker), Connection(broker)
    producer.sender(address)
    consumer.receiver(address, credit)
    return producer, consumer


def flow(
    broker: Broker,
    producer: Connection,
    consumer: Connection,
    count: int,
    *,
    payload: bytes = PAYLOAD,
    acks: int = CHUNK,
) -> float:
    """Return the broker's nanoseconds for a message, over *count* messages."""
    broker.spent = 0
    for _ in range(count // CHUNK):
        broker.take(producer, producer.transfers(CHUNK, payload), consumer)
        broker.take(consumer, consumer.outcomes(CHUNK, acks), producer)
    return broker.spent / count


def steady(measure: Callable[[], float], times: int = 5) -> float:
    """Return the lowest of a few measurements, which is the least disturbed."""
    measure()
    return min(measure() for _ in range(times))


def hop(acks: int, seconds: float) -> dict[str, float]:
    """Measure a message through the broker: nanoseconds, and memory of a queued message."""
    broker = Broker()
    producer, consumer = pair(broker)
    flow(broker, producer, consumer, 2_000, acks=acks)
    samples: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(samples) < 3:
        samples.append(flow(broker, producer, consumer, 5_000, acks=acks))
    ns = sorted(samples)[len(samples) // 2]
    return {"ns": ns, "loops": ns / loop_ns(), "allocations": kept()}


def loop_ns() -> float:
    """Return the nanoseconds of one iteration of the calibration loop."""
    best = float("inf")
    for _ in range(5):
        before = clock()
        total = 0
        for number in range(100_000):
            total += number & 7
        best = min(best, (clock() - before) / 100_000)
    return best


def kept() -> float:
    """Return the bytes that a queued message takes, its payload included."""
    broker = Broker()
    producer = Connection(broker)
    producer.sender("q")
    chunks = [producer.transfers(CHUNK) for _ in range(100)]
    producer.server.receive(chunks.pop(), 0.0)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    count = 0
    while chunks:
        chunk = chunks.pop(0)
        producer.server.receive(chunk, 0.0)
        producer.server.take()
        count += CHUNK
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / count


# ---- growth ------------------------------------------------------------------------------------


def depth(messages: int) -> float:
    """Measure enqueueing and dequeueing with *messages* waiting."""
    broker = Broker()
    producer, consumer = Connection(broker), Connection(broker)
    producer.sender("q")
    fill(producer, messages)
    link = consumer.receiver("q", credit=0)
    granted = 0

    def measure() -> float:
        nonlocal granted
        broker.spent = 0
        for _ in range(100):
            granted += CHUNK
            link.grant(granted)
            credit = b"".join(consumer.client.take())
            broker.take(producer, producer.transfers(CHUNK), consumer)
            broker.take(consumer, credit, producer)
            broker.take(consumer, consumer.outcomes(CHUNK, CHUNK), producer)
        return broker.spent

    return steady(measure)


def fill(producer: Connection, messages: int) -> None:
    """Put *messages* into the producer's queue."""
    while messages > 0:
        count = min(messages, CHUNK)
        producer.server.receive(producer.transfers(count), 0.0)
        producer.server.take()
        messages -= count


def links(count: int) -> float:
    """Measure a message, with *count* links on either connection of which one is active."""
    broker = Broker()
    producer, consumer = pair(broker)
    for number in range(1, count):
        producer.session.attach_sender(
            f"to-{number}", Mute(), source=Source(), target=Target(address=f"q{number}")
        )
        consumer.session.attach_receiver(
            f"from-{number}", Mute(10), source=Source(address=f"q{number}"), target=Target()
        )
        if number % 100 == 0:
            producer.pump()
            consumer.pump()
    producer.pump()
    consumer.pump()
    return steady(lambda: flow(broker, producer, consumer, 5_000))


def consumers(count: int) -> float:
    """Measure a message, with *count* consumers that all have credit."""
    broker = Broker()
    producer, consumer = pair(broker)
    for number in range(1, count):
        consumer.receiver("q", name=f"consumer-{number}")
    return steady(lambda: flow(broker, producer, consumer, 5_000))


def slow(count: int) -> float:
    """Measure a message, beside *count* - 1 consumers that keep a hundred messages each."""
    broker = Broker()
    producer, consumer = pair(broker)
    lazy = Connection(broker)
    for number in range(1, count):
        lazy.receiver("q", 100, name=f"lazy-{number}")

    def measure() -> float:
        broker.spent = 0
        for _ in range(100):
            broker.take(producer, producer.transfers(CHUNK), consumer, lazy)
            # The delivery-ids show how many of them were sent to the fast consumer.
            sent = consumer.server.sessions[0].next_outgoing_id
            broker.take(consumer, consumer.outcomes(sent - consumer.settled, CHUNK), producer)
        return broker.spent

    return steady(measure)


def unsettled(count: int, which: str) -> float:
    """Measure an outcome for one of *count* unsettled deliveries."""
    broker = Broker()
    producer, consumer = pair(broker)
    fill(producer, count)
    consumer.server.take()
    open_ids = list(range(count))
    chance = random.Random(7)

    def measure() -> float:
        broker.spent = 0
        for _ in range(1_000):
            if which == "random":
                at = chance.randrange(len(open_ids))
                open_ids[at], open_ids[-1] = open_ids[-1], open_ids[at]
                number = open_ids.pop()
            else:
                number = oldest() if which == "oldest" else open_ids.pop()
            broker.take(consumer, disposition_frame(0, True, number, number, True, ACCEPTED))
            open_ids.append(producer.sent)
            producer.server.receive(producer.transfers(1), 0.0)
            producer.server.take()
            consumer.server.take()
        return broker.spent

    first = 0

    def oldest() -> int:
        nonlocal first
        first += 1
        return first - 1

    return steady(measure, 3)


def addresses(count: int) -> float:
    """Measure finding a node among *count*."""
    broker = Broker()
    for number in range(count):
        broker.host.space().declare(Queue(f"region/{number % 7}/orders/{number}"))
    link: Any = Connection(broker).sender("elsewhere")
    chance = random.Random(7)
    asked = [
        f"region/{number % 7}/orders/{number}" for number in chance.sample(range(count), 10)
    ] * 500

    def measure() -> float:
        before = clock()
        for address in asked:
            broker.host.relay(address, link)
        return clock() - before

    return steady(measure)


def wide_range(last: int) -> float:
    """Measure one outcome for 1000 deliveries, whose range extends to *last* behind them."""
    broker = Broker()
    producer, consumer = pair(broker)

    def measure() -> float:
        broker.spent = 0
        for _ in range(10):
            first = producer.sent
            fill(producer, 1_000)
            consumer.server.take()
            frame = disposition_frame(0, True, first, first + last, True, ACCEPTED)
            broker.take(consumer, frame, producer)
        return broker.spent

    return steady(measure)


def properties(count: int) -> float:
    """Measure a message with *count* application-properties, which the broker need not read."""
    broker = Broker()
    producer, consumer = pair(broker)
    named = {f"property-{number:03}": number for number in range(count)}
    payload = Message(bytes(4_000 - 20 * count), application_properties=named).encode()
    return steady(lambda: flow(broker, producer, consumer, 5_000, payload=payload))


def frames(size: int) -> float:
    """Measure a byte of a message of *size* bytes that arrives in frames of 512."""
    limits = Limits(
        frame_size_max=512,
        message_size_max=64 * MIB,
        session_window=WINDOW,
        session_window_bytes=WINDOW,
        idle_timeout_s=0,
        handshake_s=1e9,
    )
    broker = Broker()
    producer = Connection(broker, limits)
    link = producer.sender("q")

    def measure() -> float:
        link.send(Message(bytes(size)).encode())
        pieces: list[bytes] = []
        while taken := producer.client.take():
            pieces += taken
        octets = b"".join(pieces)
        broker.spent = 0
        for at in range(0, len(octets), 65_536):
            broker.take(producer, octets[at : at + 65_536])
        producer.pump()
        return broker.spent / size

    return steady(measure, 3)


def collection(messages: int) -> float:
    """Measure the milliseconds that *messages* waiting messages add to a full collection."""

    def collect() -> float:
        def once() -> float:
            before = clock()
            gc.collect()
            return clock() - before

        return steady(once, 3)

    broker = Broker()
    producer = Connection(broker)
    producer.sender("q")
    empty = collect()
    fill(producer, messages)
    return max(0.0, collect() - empty) / 1e6


def slope(measure: Callable[[int], float], sizes: Iterable[int]) -> dict[str, float]:
    small, large = sizes
    return {"slope": measure(large) / measure(small)}


#: Function, small and large sizes, and the large size of quick runs, by name.
GROWTH: dict[str, tuple[Callable[[int], float], int, int, int]] = {
    "depth": (depth, 10, 1_000_000, 100_000),
    "links": (links, 1, 10_000, 1_000),
    "consumers": (consumers, 1, 1_000, 200),
    "slow": (slow, 1, 11, 11),
    "unsettled_oldest": (lambda count: unsettled(count, "oldest"), 1, 100_000, 20_000),
    "unsettled_newest": (lambda count: unsettled(count, "newest"), 1, 100_000, 20_000),
    "unsettled_random": (lambda count: unsettled(count, "random"), 1, 100_000, 20_000),
    "addresses": (addresses, 10, 100_000, 20_000),
    "range": (wide_range, 999, 2**31 - 2, 2**31 - 2),
    "properties": (properties, 1, 100, 100),
    "frames": (frames, MIB, 10 * MIB, 4 * MIB),
}


def growth(what: str, quick: bool) -> dict[str, float]:
    """Return the quotient of the large and the small cost of the measurement *what*."""
    if what == "pause":
        return {"pause_ms": collection(100_000 if quick else 1_000_000)}
    measure, small, large, quick_large = GROWTH[what]
    return slope(measure, (small, quick_large if quick else large))
