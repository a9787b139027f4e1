"""What only the reactor does: many sockets, one task, and turns for everybody else."""

from __future__ import annotations

import itertools
import select
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, closing
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
import trio
import trio.testing
from carriers import Echo

from amqp_rt.events import Closed
from amqp_rt.limits import Limits
from amqp_rt.net.carrier import READ_SIZE, READS_IN_A_ROW, Carrier
from amqp_rt.net.driver import TRIO_CLOCK, run_connection
from amqp_rt.net.reactor import Reactor, open_reactor
from amqp_rt.net.trio_epoll import trio_epoll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the reactor needs epoll")


Pair: TypeAlias = Callable[[], tuple[trio.SocketStream, trio.SocketStream]]


@pytest.fixture(autouse=True, params=["in trio's set", "a task waits"])
def _waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test also as where trio's set is not known."""
    if request.param == "a task waits":
        monkeypatch.setattr("amqp_rt.net.reactor.trio_epoll", lambda: None)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Makes a stream for the driver and the peer's end of it, which the test may leave open."""
    with ExitStack() as owned:

        def make() -> tuple[trio.SocketStream, trio.SocketStream]:
            ours, theirs = trio.socket.socketpair()
            owned.callback(theirs.close)
            return trio.SocketStream(ours), trio.SocketStream(theirs)

        yield make


class Passes(trio.abc.Instrument):
    """Counts the passes of the scheduler."""

    count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def run(
    reactor: Reactor | None, stream: trio.SocketStream, engine: Any, **options: Any
) -> None:
    await run_connection(stream, engine, lambda events: None, reactor=reactor, **options)


@pytest.mark.req("L1", "L3")
async def test_more_sockets_are_served_than_fit_one_pass(pair: Pair) -> None:
    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        pairs = [pair() for _ in range(200)]
        for ours, _ in pairs:
            nursery.start_soon(run, reactor, ours, Echo())
        await trio.testing.wait_all_tasks_blocked()
        for number, (_, theirs) in enumerate(pairs):
            await theirs.send_all(b"%d" % number)
        for number, (_, theirs) in enumerate(pairs):
            assert await theirs.receive_some() == b"%d" % number
            await theirs.aclose()


@pytest.mark.req("L1", "L3")
async def test_greedy_peers_do_not_starve_the_others_nor_the_program(pair: Pair) -> None:
    """More peers than a pass has room for send without end; a quiet one is answered."""
    greedy = READS_IN_A_ROW * 3
    engines = [Deaf() for _ in range(greedy)]
    heard = [0]

    async def flood(stream: trio.SocketStream) -> None:
        while True:
            await stream.send_all(bytes(READ_SIZE))

    async def look() -> None:
        while True:
            heard.append(sum(engine.heard for engine in engines))
            await trio.lowlevel.checkpoint()

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        for engine in engines:
            ours, theirs = pair()
            nursery.start_soon(run, reactor, ours, engine)
            nursery.start_soon(flood, theirs)
        nursery.start_soon(look)
        ours, theirs = pair()
        nursery.start_soon(run, reactor, ours, Echo())
        for _ in range(20):
            await theirs.send_all(b"hello")
            assert await theirs.receive_some() == b"hello"
        while min(engine.heard for engine in engines) < 10 * READ_SIZE:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    # The last chunk of a pass may begin with one octet of room left; two passes may lie
    # between two looks.
    most = 2 * (READS_IN_A_ROW + 1) * READ_SIZE
    assert max(after - before for before, after in itertools.pairwise(heard)) <= most


class Deaf(Echo):
    def say(self, *buffers: bytes) -> None:
        pass


async def test_what_one_connection_causes_on_another_leaves_in_the_same_pass(pair: Pair) -> None:
    """As in a broker: input here is output there."""
    target, there = pair()
    output = Echo()

    class Forwarding(Echo):
        def say(self, *buffers: bytes) -> None:
            output.say(*buffers)

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        nursery.start_soon(run, reactor, target, output)
        sources = [pair() for _ in range(10)]
        for ours, _ in sources:
            nursery.start_soon(run, reactor, ours, Forwarding())
        await trio.testing.wait_all_tasks_blocked()
        for _, theirs in sources:
            await theirs.send_all(b"x")
        data = b""
        while len(data) < 10:
            data += await there.receive_some()
        assert data == b"x" * 10
        nursery.cancel_scope.cancel()


async def test_the_end_of_the_reactor_drops_what_is_left(pair: Pair) -> None:
    engine = Echo()
    ours, theirs = pair()
    async with trio.open_nursery() as nursery:
        async with open_reactor() as reactor:
            nursery.start_soon(run, reactor, ours, engine)
            await theirs.send_all(b"hello")
            assert await theirs.receive_some() == b"hello"
        assert await theirs.receive_some() == b""
    assert engine.finished


async def test_the_end_of_an_adopted_connection_is_reported_in_another_step(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []

    async with open_reactor() as reactor:
        assert reactor is not None
        for number in range(2):
            ours, theirs = pair()
            sock = socket.socket(fileno=ours.socket.detach())

            def ended(sock: socket.socket = sock, number: int = number) -> None:
                steps.append(f"ended {number}")
                sock.close()
                if number == 0:
                    raise ZeroDivisionError

            carrier = carrier_of(sock, Echo())
            reactor.adopt(carrier, sock, ended)
            await theirs.send_all(b"hello")
            assert await theirs.receive_some() == b"hello"
            carrier.drop("enough")
            steps.append(f"dropped {number}")
            with trio.fail_after(5):
                await reactor.wait_adopted()
    assert steps == ["dropped 0", "ended 0", "dropped 1", "ended 1"]
    assert "the end of a connection failed" in caplog.text


@pytest.mark.parametrize("how", ["drop_adopted", "close"])
async def test_adopted_connections_that_are_left_are_dropped(pair: Pair, how: str) -> None:
    ends: list[Echo] = []
    async with open_reactor() as reactor:
        assert reactor is not None
        for _ in range(3):
            ours, theirs = pair()
            sock = socket.socket(fileno=ours.socket.detach())
            engine = Echo()

            def ended(sock: socket.socket = sock, engine: Echo = engine) -> None:
                assert engine.finished
                ends.append(engine)
                sock.close()

            reactor.adopt(carrier_of(sock, engine), sock, ended)
        if how == "drop_adopted":
            reactor.drop_adopted()
            assert len(ends) == 3
    assert len(ends) == 3
    assert await theirs.receive_some() == b""


def carrier_of(sock: socket.socket, engine: Any) -> Carrier:
    return Carrier(sock, engine, lambda events: None, limits=Limits(), clock=TRIO_CLOCK)


async def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with open_reactor():
            raise KeyError


async def test_cancelling_one_connection_leaves_the_others(pair: Pair) -> None:
    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        first, their_first = pair()
        second, their_second = pair()
        nursery.start_soon(run, reactor, second, Echo())
        async with trio.open_nursery() as one:
            one.start_soon(run, reactor, first, Echo())
            await trio.testing.wait_all_tasks_blocked()
            one.cancel_scope.cancel()
        assert await their_first.receive_some() == b""
        await their_second.send_all(b"hello")
        assert await their_second.receive_some() == b"hello"
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_alarms_ring_in_order_and_those_of_the_dead_do_not_pile_up(pair: Pair) -> None:
    rung: list[int] = []

    class Ticking(Echo):
        def __init__(self, number: int, deadline: float) -> None:
            super().__init__()
            self.number = number
            self.deadline = deadline

        def tick(self, now: float) -> list[Any]:
            rung.append(self.number)
            self.deadline = inf
            return []

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        assert reactor is not None
        now = trio.current_time()
        for number in (3, 1, 2):
            nursery.start_soon(run, reactor, pair()[0], Ticking(number, now + number / 100))
        while len(rung) < 3:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert rung == [1, 2, 3]
        for _ in range(3_000):
            ours, theirs = pair()
            theirs.socket.close()
            await run(reactor, ours, Ticking(0, trio.current_time() + 1_000), limits=Limits())
        assert len(reactor._alarms) < 2_000
        nursery.cancel_scope.cancel()


async def test_alarms_of_ended_connections_are_removed_with_the_first_that_is_due(
    pair: Pair,
) -> None:
    class Waiting(Echo):
        def __init__(self, deadline: float) -> None:
            super().__init__()
            self.deadline = deadline

        def tick(self, now: float) -> list[Any]:
            assert now >= self.deadline
            self.deadline = inf
            ticked.set()
            return []

    ticked = trio.Event()
    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        assert reactor is not None
        now = trio.current_time()
        for number in range(20):
            ours, theirs = pair()
            theirs.socket.close()
            await run(reactor, ours, Waiting(now + 0.4 + number / 1_000))
        nursery.start_soon(run, reactor, pair()[0], Waiting(now + 0.6))
        nursery.start_soon(run, reactor, pair()[0], Waiting(now + 1_000))
        await trio.testing.wait_all_tasks_blocked()
        assert len(reactor._alarms) == 22
        while len(reactor._alarms) == 22:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert len(reactor._alarms) == 2
        with trio.fail_after(5):
            await ticked.wait()
        nursery.cancel_scope.cancel()


async def test_alarms_are_rung_in_several_steps_if_one_takes_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    rung: list[list[int]] = [[]]

    class Step(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            rung.append([])

    class Slow(Echo):
        def __init__(self, number: int, deadline: float) -> None:
            super().__init__()
            self.number = number
            self.deadline = deadline

        def tick(self, now: float) -> list[Any]:
            nonlocal seconds
            seconds += 1
            rung[-1].append(self.number)
            self.deadline = inf
            return []

    monkeypatch.setattr("amqp_rt.net.reactor.perf_counter", lambda: seconds)
    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        at = trio.current_time() + 0.05
        for number in range(3):
            nursery.start_soon(run, reactor, pair()[0], Slow(number, at))
        await trio.testing.wait_all_tasks_blocked()
        instrument = Step()
        trio.lowlevel.add_instrument(instrument)
        while seconds < 3:  # noqa: ASYNC110
            await trio.sleep(0.01)
        trio.lowlevel.remove_instrument(instrument)
        nursery.cancel_scope.cancel()
    assert sorted(each for each in rung if each) == [[0], [1], [2]]


async def test_the_set_of_this_version_of_trio_is_known() -> None:
    assert trio_epoll() is not None


async def test_a_version_of_trio_that_waits_in_another_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loop_with(manager: object) -> ModuleType:
        module = ModuleType("trio._core._run")
        runner = SimpleNamespace(io_manager=manager)
        module.GLOBAL_RUN_CONTEXT = SimpleNamespace(runner=runner)  # type: ignore[attr-defined]
        return module

    with closing(select.epoll()) as epoll:
        for module in (
            ModuleType("trio._core._run"),
            loop_with(SimpleNamespace(_registered=defaultdict(list))),
            loop_with(SimpleNamespace(_epoll=epoll, _registered={})),
        ):
            monkeypatch.setitem(sys.modules, "trio._core._run", module)
            assert trio_epoll() is None
        monkeypatch.undo()


async def test_output_that_waits_ends_no_waits_of_the_loop(pair: Pair) -> None:
    """The connection is not read meanwhile, although octets of the peer are there."""

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        ours, theirs = pair()
        engine = Echo()
        nursery.start_soon(run, reactor, ours, engine)
        await trio.testing.wait_all_tasks_blocked()
        # More than the system takes, so that it waits until the peer reads.
        engine.say(bytes(8_000_000))
        with trio.move_on_after(0.2):
            while True:
                await theirs.send_all(bytes(READ_SIZE))
        passes = Passes()
        trio.lowlevel.add_instrument(passes)
        await trio.sleep(0.1)
        trio.lowlevel.remove_instrument(passes)
        nursery.cancel_scope.cancel()
    assert passes.count <= 5


async def test_a_message_and_its_echo_take_a_pass_of_the_scheduler_each(pair: Pair) -> None:
    class Asking(Echo):
        def receive(self, data: bytes, now: float) -> list[Any]:
            answers.append(data)
            waiting.unpark_all()
            return []

    answers: list[bytes] = []
    waiting = trio.lowlevel.ParkingLot()
    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        ours, theirs = pair()
        asking, echo = Asking(), Echo()
        asking.notifies = echo.notifies = False
        nursery.start_soon(run, reactor, ours, asking)
        nursery.start_soon(run, reactor, theirs, echo)
        await trio.testing.wait_all_tasks_blocked()
        passes = Passes()
        trio.lowlevel.add_instrument(passes)
        for number in range(100):
            asking.say(b"%d" % number)
            await waiting.park()
        trio.lowlevel.remove_instrument(passes)
        nursery.cancel_scope.cancel()
    assert answers == [b"%d" % number for number in range(100)]
    assert passes.count <= 210


@pytest.mark.parametrize("notifies", [False, True])
async def test_output_that_changes_an_alarm_cuts_the_wait_for_io_short(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, notifies: bool
) -> None:
    """The scheduler has decided by then how long it waits."""
    monkeypatch.setattr("amqp_rt.net.carrier._LINGER_S", 0.05)
    engine = Echo()
    engine.notifies = notifies
    ended = trio.Event()

    async def carry(stream: trio.SocketStream) -> None:
        await run(reactor, stream, engine)
        ended.set()

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        nursery.start_soon(carry, pair()[0])
        await trio.testing.wait_all_tasks_blocked()
        engine.close()
        with trio.fail_after(5):
            await ended.wait()


async def test_a_task_that_output_wakes_runs_at_once(pair: Pair) -> None:
    """The scheduler does not know of it when it decides how long it waits."""

    class Notifying(Echo):
        notifies = False

        def take(self) -> list[bytes]:
            # As an engine that cannot foresee it.
            found = super().take()
            if found:
                self.deadline = trio.current_time()
            return found

        def tick(self, now: float) -> list[Any]:
            woken.set()
            return [Closed()] if not super().tick(now) else []

    woken = trio.Event()
    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        engine = Notifying()
        nursery.start_soon(run, reactor, pair()[0], engine)
        await trio.testing.wait_all_tasks_blocked()
        said_at = trio.current_time()
        engine.say(b"hello")
        with trio.move_on_after(5):
            await woken.wait()
        assert trio.current_time() - said_at < 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("step", ["_flush_now", "_step"])
async def test_connections_go_on_after_trio_has_removed_the_reactor(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """As it does with an instrument that raises an exception."""

    def fail_once() -> None:
        monkeypatch.undo()
        raise RuntimeError("a fault of ours")

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        ours, theirs = pair()
        engine = Echo()
        engine.notifies = False
        nursery.start_soon(run, reactor, ours, engine)
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(reactor, step, fail_once)
        with trio.fail_after(5):
            engine.say(b"hello")
            assert await theirs.receive_some() == b"hello"
            engine.say(b", world")
            assert await theirs.receive_some() == b", world"
            await theirs.send_all(b"back")
            assert await theirs.receive_some() == b"back"
        nursery.cancel_scope.cancel()
    assert "a fault of ours" in caplog.text


@pytest.mark.parametrize("_waits", ["in trio's set"], indirect=True)
async def test_a_poll_that_fails_leaves_the_sockets_to_the_task(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        """A set of which one poll raises an exception."""

        def __init__(self, right: Any) -> None:
            self._right = right

        def poll(self, *_args: Any) -> Any:
            assert reactor is not None
            reactor._epoll = self._right
            raise MemoryError("no memory for what is ready")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._right, name)

    async with open_reactor() as reactor, trio.open_nursery() as nursery:
        assert reactor is not None
        ours, theirs = pair()
        nursery.start_soon(run, reactor, ours, Echo())
        await trio.testing.wait_all_tasks_blocked()
        reactor._epoll = Failing(reactor._epoll)  # type: ignore[assignment]  # in its place
        with trio.fail_after(5):
            for octets in (b"one", b"two"):
                await theirs.send_all(octets)
                assert await theirs.receive_some() == octets
        nursery.cancel_scope.cancel()
    assert "no memory for what is ready" in caplog.text


async def test_a_reactor_that_is_used_while_the_program_stops_leaves_nothing_behind(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler of the shutdown, which cancelling does not reach, opens the first connection."""
    reactor = Reactor()
    async with trio.open_nursery() as nursery:
        reactor.start(nursery)
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, reactor, pair()[0], Echo())
        await trio.testing.wait_all_tasks_blocked()
        reactor.close()
    for _ in range(3):
        await trio.lowlevel.checkpoint()
    assert not caplog.text
