"""How connections run and end, over memory in virtual time and over sockets."""

from __future__ import annotations

import itertools
import socket
import struct
from typing import Any

import pytest
import trio
import trio.testing
from carriers import Carried, Echo
from wire import BEGIN, OPEN, frame, said

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER, EMPTY_FRAME
from amqp_rt.core.performatives import Attach, Begin, Close, Flow, Open
from amqp_rt.events import AttachRequested, Closed, ConnectionFailed, Event, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import MIB, Limits
from amqp_rt.net.carrier import READ_SIZE, READS_IN_A_ROW
from amqp_rt.net.driver import TrioClock
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

CLOSE = frame(Close())


def engine_now(**options: Any) -> Engine:
    """A server engine whose time begins now."""
    wanted = {"container_id": "server", "sasl_required": False} | options
    return amqp10.Front().server(ServerOptions(**wanted), trio.current_time())


def client_now(**options: Any) -> Engine:
    return amqp10.client(
        amqp10.ClientOptions(container_id="client", **options), trio.current_time()
    )


class TheirSide:
    """A scripted peer: sends bytes, and understands what it gets by the codec of the tests."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.data = b""

    async def hear(self, *wanted: type) -> list[Any]:
        """Read until performatives of these types have come, in this order; returns them."""
        while True:
            found = self._performatives()
            if [type(each) for each in found] == list(wanted):
                self.data = b""
                return found
            piece = await self.stream.receive_some(READ_SIZE)
            assert piece, f"the stream ended after {found}"
            self.data += piece

    def _performatives(self) -> list[Any]:
        sizes = self.data[8:] if self.data[:4] == b"AMQP" else self.data
        while sizes:
            if len(sizes) < 4:
                return []
            (size,) = struct.unpack_from(">I", sizes)
            if len(sizes) < size:
                return []
            sizes = sizes[size:]
        return [each[1] for each in said(Said(self.data)) if isinstance(each, tuple)]

    async def read_to_the_end(self) -> bytes:
        data = bytearray()
        while piece := await self.stream.receive_some(READ_SIZE):
            data += piece
        return bytes(data)


class Said:
    """Bytes in the place of an engine, for ``wire.said``."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self) -> list[bytes]:
        return [self.data]


@pytest.mark.req("L1", "L3", "L4")
async def test_the_peer_closes_first(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN)
        await peer.hear(Open)
        await theirs.send_all(CLOSE)
        await peer.hear(Close)
        assert await peer.read_to_the_end() == b""
        await theirs.aclose()

    assert [type(event) for event in events] == [Opened, Closed]
    if carried.virtual:
        assert trio.current_time() == 0


@pytest.mark.req("L1", "L3", "L4")
async def test_we_stop_and_the_peer_answers(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events, stopping = TheirSide(theirs), [], trio.Event()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_until, carried, ours, engine_now(), events, stopping, 5)
        await theirs.send_all(AMQP_HEADER + OPEN)
        await peer.hear(Open)
        stopping.set()
        await peer.hear(Close)
        await theirs.send_all(CLOSE)
        assert await peer.read_to_the_end() == b""
        await theirs.aclose()

    assert [type(event) for event in events] == [Opened, Closed]
    if carried.virtual:
        # The engine finishes with nothing left to say, and that ends the connection at once.
        assert trio.current_time() == 0


async def _run_until(
    carried: Carried,
    stream: trio.abc.Stream,
    engine: Engine,
    events: list[Event],
    stopping: trio.Event,
    grace_s: float,
) -> None:
    await carried.run(stream, engine, events, stopping=stopping, grace_s=grace_s)


@pytest.mark.req("L1", "L3", "L4")
async def test_we_stop_and_the_peer_stays_silent(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events, stopping = TheirSide(theirs), [], trio.Event()
    grace_s = carried.seconds(3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_until, carried, ours, engine_now(), events, stopping, grace_s)
        await theirs.send_all(AMQP_HEADER + OPEN)
        await peer.hear(Open)
        stopping.set()
        await peer.hear(Close)

    assert [type(event) for event in events] == [Opened, Closed]
    if carried.virtual:
        assert trio.current_time() == pytest.approx(3)


@pytest.mark.req("L1", "L3", "L4")
async def test_the_peer_vanishes(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN)
        await peer.hear(Open)
        await theirs.aclose()

    assert [type(event) for event in events] == [Opened, ConnectionFailed]
    if carried.virtual:
        assert trio.current_time() == 0


@pytest.mark.req("L1")
@pytest.mark.parametrize("kind", ["tcp", "tcp-reactor"], indirect=True)
async def test_the_peer_resets_the_connection(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN)
        await peer.hear(Open)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await theirs.aclose()

    assert [type(event) for event in events] == [Opened, ConnectionFailed]
    assert events[1].error.description == "Connection reset by peer"


@pytest.mark.req("L1", "L3", "L4", "X26")
async def test_a_bad_frame_is_answered_before_the_end(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN + b"\0\0\0\x04\0\0\0\0")
        _, close = await peer.hear(Open, Close)
        await theirs.aclose()

    assert close.error.condition == "amqp:connection:framing-error"
    assert [type(event) for event in events] == [Opened, ConnectionFailed]
    if carried.virtual:
        assert trio.current_time() == 0


@pytest.mark.req("L1", "L3", "L4")
async def test_the_last_words_arrive_though_more_input_follows(
    carried: Carried, clock: Any
) -> None:
    """Closing with unread input would reset a TCP connection, and lose our Close."""
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN + b"\0\0\0\x04\0\0\0\0" + bytes(500_000))
        await peer.hear(Open, Close)
        await theirs.send_eof()

    assert [type(event) for event in events] == [Opened, ConnectionFailed]


@pytest.mark.req("L1", "L3", "L4")
async def test_a_peer_that_never_leaves_is_left(carried: Carried, clock: Any) -> None:
    """All is said, the peer keeps its half open: it gets a moment, not for ever."""
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN + b"\0\0\0\x04\0\0\0\0")
        await peer.hear(Open, Close)

    assert [type(event) for event in events] == [Opened, ConnectionFailed]
    if carried.virtual:
        # A WebSocket answers a close by itself: then both have left.
        assert trio.current_time() == pytest.approx(0 if carried.kind == "ws" else 1)


@pytest.mark.req("L1", "L3", "L4")
async def test_who_has_said_close_is_not_waited_for(carried: Carried, clock: Any) -> None:
    """Nothing may follow a close (Part 2 §2.4.3): there is nothing that hanging up could lose."""
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN + CLOSE)
        await peer.hear(Open, Close)
        await peer.read_to_the_end()

    assert [type(event) for event in events] == [Opened, Closed]
    if carried.kind == "memory":
        assert trio.current_time() == 0


@pytest.mark.req("L1", "L3", "L4")
async def test_we_are_cancelled(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events, endpoint = TheirSide(theirs), [], Recorder()

    def handle(happened: list[Event]) -> None:
        events.extend(happened)
        for event in happened:
            if isinstance(event, AttachRequested):
                event.link.accept(endpoint)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_handled, carried, ours, engine_now(), handle)
        attach = Attach(
            name="l",
            handle=0,
            role=False,
            source=Source(),
            target=Target(address="q"),
            initial_delivery_count=0,
        )
        await theirs.send_all(AMQP_HEADER + OPEN + BEGIN + frame(attach))
        await peer.hear(Open, Begin, Attach)
        nursery.cancel_scope.cancel()

    assert [type(event) for event in events] == [Opened, AttachRequested, ConnectionFailed]
    assert [closed for _, closed in endpoint.detached] == [False]
    try:
        await peer.read_to_the_end()
    except trio.BrokenResourceError:
        assert not carried.virtual


async def _run_handled(
    carried: Carried, stream: trio.abc.Stream, engine: Engine, handle: Any
) -> None:
    await carried.run(stream, engine, [], handle=handle)


@pytest.mark.req("L1", "L3", "L4")
async def test_an_engine_that_finishes_in_silence_ends_the_connection(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    peer, engine = TheirSide(theirs), engine_now()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine, [])
        await trio.testing.wait_all_tasks_blocked()
        engine.close()  # before any header: there is nothing to say
        assert await peer.read_to_the_end() == b""
        await theirs.aclose()

    if carried.virtual:
        assert trio.current_time() == 0


@pytest.mark.req("L1", "L3", "L4")
async def test_what_was_read_before_is_read_first(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            _run_initial, carried, ours, engine_now(), events, AMQP_HEADER + OPEN[:5]
        )
        await theirs.send_all(OPEN[5:] + CLOSE)
        await peer.hear(Open, Close)
        await theirs.aclose()

    assert [type(event) for event in events] == [Opened, Closed]


async def _run_initial(
    carried: Carried,
    stream: trio.abc.Stream,
    engine: Engine,
    events: list[Event],
    initial: bytes,
) -> None:
    await carried.run(stream, engine, events, initial=initial)


@pytest.mark.req("L1", "L3", "L4")
async def test_output_may_come_from_any_task(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    engine = Echo()

    async def talk(word: bytes) -> None:
        for _ in range(50):
            engine.say(word)
            engine.say(word)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine, [])
        async with trio.open_nursery() as talkers:
            for letter in b"abcdefgh":
                talkers.start_soon(talk, bytes([letter]))
        engine.close()
        heard = await TheirSide(theirs).read_to_the_end()
        await theirs.aclose()

    assert sorted(heard) == sorted(b"abcdefgh" * 100)


@pytest.mark.req("L1", "L3", "L4")
@pytest.mark.parametrize("first", [1, 70_000])
async def test_bytes_stay_in_order_however_they_are_cut(
    carried: Carried, clock: Any, first: int
) -> None:
    """Many small buffers, large ones between them, and a peer that takes them in odd pieces."""
    ours, theirs = await carried.pair()
    engine = Echo()
    sizes = [first, 3, 20_000, 5, 5, 100_000, *([7] * 1500), 65_536, 16_384, 16_383, 1_000_000]
    buffers = [bytes([at % 251]) * size for at, size in enumerate(sizes)]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine, [])
        await trio.testing.wait_all_tasks_blocked()
        engine.say(*buffers)
        engine.say(b"the end")
        engine.close()
        heard = bytearray()
        for size in itertools.cycle([1, 1000, 50_001]):
            piece = await theirs.receive_some(size)
            if not piece:
                break
            heard += piece
        await theirs.aclose()

    assert heard == b"".join(buffers) + b"the end"


@pytest.mark.req("SE18")
async def test_a_peer_that_does_not_read_is_dropped(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    engine, events = engine_now(), []
    limits = Limits(write_stall_s=carried.seconds(30))
    engine_bytes = [b"x" * 60_000] * 200

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_limited, carried, ours, engine, events, limits)
        await theirs.send_all(AMQP_HEADER + OPEN)
        await TheirSide(theirs).hear(Open)
        for data in engine_bytes:
            engine.write_bytes(data)

    assert [type(event) for event in events] == [Opened, ConnectionFailed]
    assert "has not read for" in events[1].error.description
    if carried.virtual:
        assert trio.current_time() == pytest.approx(30)


async def _run_limited(
    carried: Carried, stream: trio.abc.Stream, engine: Any, events: list[Event], limits: Limits
) -> None:
    await carried.run(stream, engine, events, limits=limits)


async def test_a_peer_that_reads_slowly_is_kept(carried: Carried, clock: Any) -> None:
    """Progress is what counts, not how long the whole takes."""
    ours, theirs = await carried.pair()
    engine = Echo()
    stall_s = 60 if carried.virtual else 5
    total = 2 * MIB

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_limited, carried, ours, engine, [], Limits(write_stall_s=stall_s))
        await trio.testing.wait_all_tasks_blocked()
        engine.say(*[b"x" * 50_000] * (total // 50_000 + 1))
        engine.close()
        heard = 0
        while piece := await theirs.receive_some(100_000):
            heard += len(piece)
            await trio.sleep(20 if carried.virtual else 0)
        await theirs.aclose()

    assert heard >= total
    if carried.virtual:
        assert trio.current_time() > 300


@pytest.mark.slow
@pytest.mark.req("SE18")
async def test_a_peer_that_talks_and_does_not_read_is_not_listened_to(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    engine = Echo(repeat=10)
    limits = Limits(output_max=100_000)
    # A WebSocket has no half that can be closed: who closes it hears nothing more.
    websocket = "ws" in carried.kind
    sent = 0

    async def flood() -> None:
        nonlocal sent
        for _ in range(2_000):
            await theirs.send_all(b"y" * 1_000)
            sent += 1_000
        if not websocket:
            await theirs.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_limited, carried, ours, engine, [], limits)
        nursery.start_soon(flood)
        # Neither side makes progress now: input is bounded by the output that could leave.
        while sent < 2_000_000 and engine.heard < 1_500_000:
            before = (sent, engine.heard)
            await trio.testing.wait_all_tasks_blocked(0.0 if carried.virtual else 0.05)
            if before == (sent, engine.heard):
                break
        assert engine.output_size <= 3 * limits.output_max + 10 * READ_SIZE
        assert engine.heard < 2_000_000
        heard = 0
        while not (websocket and heard == 20_000_000) and (piece := await theirs.receive_some()):
            heard += len(piece)
        await theirs.aclose()

    assert heard == 10 * engine.heard == 20_000_000


@pytest.mark.req("L1", "L3", "L4", "X7")
async def test_a_silent_client_is_dropped_after_the_handshakes_time(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    events: list[Event] = []
    engine = engine_now(limits=Limits(handshake_s=carried.seconds(10)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine, events)
        await TheirSide(theirs).read_to_the_end()
        if carried.virtual:
            assert trio.current_time() == pytest.approx(10)
        await theirs.aclose()

    assert [type(event) for event in events] == [ConnectionFailed]


@pytest.mark.req("L1", "L3", "L4", "X7")
async def test_one_octet_at_a_time_does_not_stretch_the_handshake(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    engine = engine_now(limits=Limits(handshake_s=carried.seconds(10)))
    octets = iter(AMQP_HEADER + OPEN * 100)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine, [])
        while not engine.finished:
            await theirs.send_all(bytes([next(octets)]))
            await trio.sleep(carried.seconds(10) / 5)
        await theirs.aclose()

    if carried.virtual:
        assert trio.current_time() <= 12


@pytest.mark.parametrize("kind", ["memory", "stream"], indirect=True)
@pytest.mark.req("X6")
async def test_heartbeats_leave_in_time_though_nothing_else_does(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    peer = TheirSide(theirs)
    beats = []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), [])
        await theirs.send_all(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=10_000)))
        await peer.hear(Open)
        while len(beats) < 5:
            assert await theirs.receive_some() == EMPTY_FRAME
            beats.append(trio.current_time())
        nursery.cancel_scope.cancel()

    assert all(0 < after - before <= 10 for before, after in itertools.pairwise([0, *beats]))


@pytest.mark.parametrize("kind", ["memory", "stream"], indirect=True)
async def test_a_deadline_may_come_nearer(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    engine = Echo()
    engine.deadline = 100.0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine, [])
        await trio.testing.wait_all_tasks_blocked()
        engine.deadline = 7.0
        engine.say(b"something")
        await theirs.receive_some()
        await trio.sleep(50)
        nursery.cancel_scope.cancel()

    assert engine.ticks == [pytest.approx(7)]


async def test_a_fault_of_the_program_is_raised_as_it_is(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    engine = engine_now()

    def handle(events: list[Event]) -> None:
        if any(isinstance(event, Opened) for event in events):
            raise ZeroDivisionError("a bug")

    await theirs.send_all(AMQP_HEADER + OPEN)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await carried.run(ours, engine, [], handle=handle)
    assert engine.finished


async def test_a_fault_of_the_program_stops_one_connection_only(
    carried: Carried, clock: Any
) -> None:
    broken, their_broken = await carried.pair()
    sound, their_sound = await carried.pair()

    def handle(events: list[Event]) -> None:
        raise ZeroDivisionError

    async def run_broken() -> None:
        with pytest.raises(ZeroDivisionError):
            await carried.run(broken, engine_now(), [], handle=handle)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_broken)
        nursery.start_soon(carried.run, sound, Echo(), [])
        await their_broken.send_all(AMQP_HEADER + OPEN)
        await their_sound.send_all(b"hello")
        assert await their_sound.receive_some() == b"hello"
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_two_that_send_all_they_can_do_not_block_each_other(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    count, size = 150, 100_000
    inboxes = [Recorder(), Recorder()]
    limits = Limits(session_window_bytes=64 * MIB)

    def handle_server(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AttachRequested):
                link = event.link
                if hasattr(link, "grant"):
                    link.accept(inboxes[0])
                    link.grant(count)
                else:
                    link.accept(Flooding(count, size))

    client = client_now(limits=limits)
    session = client.begin()
    session.attach_sender("out", Flooding(count, size), target=Target(address="q"))
    incoming = session.attach_receiver("in", inboxes[1], source=Source(address="q"))
    incoming.grant(count)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_handled, carried, ours, engine_now(limits=limits), handle_server)
        nursery.start_soon(_run_handled, carried, theirs, client, lambda events: None)
        with trio.fail_after(60):
            while any(len(inbox.deliveries) < count for inbox in inboxes):  # noqa: ASYNC110
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


class Flooding(Recorder):
    """Sends everything as soon as it may, and heeds nothing."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.left = count
        self.payload = b"\0Su\xb0" + struct.pack(">I", size) + bytes(size)

    def on_credit(self, link: Any) -> None:
        while self.left and link.credit:
            self.left -= 1
            link.send(self.payload, settled=True)


@pytest.mark.parametrize("kind", ["memory", "tcp", "tcp-reactor"], indirect=True)
async def test_a_busy_connection_leaves_others_their_turn(carried: Carried, clock: Any) -> None:
    """Between two passes of the scheduler only so many bytes are read."""
    ours, theirs = await carried.pair()
    engine = Silent()
    passes = [0]

    async def count_passes() -> None:
        while True:
            passes.append(engine.heard)
            await trio.lowlevel.checkpoint()

    async def flood() -> None:
        for _ in range(40):
            await theirs.send_all(bytes(READ_SIZE * READS_IN_A_ROW))
        await theirs.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_passes)
        async with trio.open_nursery() as busy:
            busy.start_soon(flood)
            await carried.run(ours, engine, [])
        nursery.cancel_scope.cancel()

    steps = [after - before for before, after in itertools.pairwise(passes)]
    assert sum(steps) == 40 * READ_SIZE * READS_IN_A_ROW
    # The order within a pass is random: up to two turns may lie between two looks.
    assert max(steps) <= 2 * READ_SIZE * READS_IN_A_ROW


class Silent(Echo):
    def say(self, *buffers: bytes) -> None:
        pass


async def test_the_clock_may_be_any(carried: Carried, clock: Any) -> None:
    """Deadlines are in the engine's clock, wherever that begins."""

    class Shifted(TrioClock):
        def monotonic(self) -> float:
            return super().monotonic() - 1e6

    ours, _theirs = await carried.pair()
    engine = Echo()
    engine.deadline = Shifted().monotonic() + carried.seconds(9)
    due = engine.deadline

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_clocked, carried, ours, engine, Shifted())
        while not engine.ticks:  # noqa: ASYNC110
            await trio.sleep(carried.seconds(1))
        nursery.cancel_scope.cancel()

    assert engine.ticks[0] >= due
    if carried.virtual:
        assert trio.current_time() == pytest.approx(9, abs=1)


async def _run_clocked(
    carried: Carried, stream: trio.abc.Stream, engine: Any, clock: TrioClock
) -> None:
    await carried.run(stream, engine, [], clock=clock)


class OneWay(trio.abc.Stream):
    """A stream whose directions end together, such as TLS or WebSocket."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self.stream.receive_some(max_bytes)  # type: ignore[attr-defined,no-any-return]

    async def aclose(self) -> None:
        await self.stream.aclose()


@pytest.mark.parametrize("kind", ["memory"], indirect=True)
async def test_a_stream_whose_directions_end_together_is_closed(
    carried: Carried, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, OneWay(ours), engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN + CLOSE)
        await peer.hear(Open, Close)
        assert await peer.read_to_the_end() == b""

    assert [type(event) for event in events] == [Opened, Closed]
    assert trio.current_time() == 0


@pytest.mark.req("L6")
async def test_much_work_takes_many_turns_and_is_done(carried: Carried, clock: Any) -> None:
    ours, theirs = await carried.pair()
    peer, events = TheirSide(theirs), []
    echo = frame(Flow(incoming_window=9, next_outgoing_id=0, outgoing_window=9, echo=True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(carried.run, ours, engine_now(), events)
        await theirs.send_all(AMQP_HEADER + OPEN + BEGIN)
        await peer.hear(Open, Begin)
        nursery.start_soon(theirs.send_all, echo * 2_000 + CLOSE)
        said_back = await peer.read_to_the_end()
        await theirs.aclose()
    # Each turn is answered once, and nothing after them was forgotten.
    assert said_back.endswith(frame(Close()))
    assert said_back.count(b"\x00\x53\x13") > 3

    assert [type(event) for event in events] == [Opened, Closed]
