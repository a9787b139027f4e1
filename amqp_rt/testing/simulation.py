"""Brokers, containers and clients in virtual time, over a network and disks that fail, from one seed.

::

    async def scenario(net: Simulation) -> None:
        async def serve(host: Host) -> None:
            async with host.broker() as broker:
                await broker.declare(Queue("work"))
                await broker.listen("memory://broker")
                await broker.serve()

        net.start("broker", serve)
        async with net.connect("client", "memory://broker") as peer:
            ...

    simulate(scenario, seed=7, faults=[Cut(frames=12)])

The same seed and the same faults give the same :class:`Trace`, line by line. No thread runs, nothing
waits for the real clock, and an hour costs nothing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final, TypeAlias

import trio
import trio.testing

from ..container.connections import Connection
from ..container.container import Container
from ..errors import ConnectFailed
from ..net.memory import MemoryNetwork
from ..runtime import Broker
from .determinism import deterministic
from .disk import SimulatedDisk, SimulatedStore, run_inline
from .faults import Cut, Fault, Jump, Kill, Partition, draw_faults
from .network import SimulatedNetwork, Trace

__all__ = [
    "Host",
    "Scenario",
    "Simulation",
    "SimulationFailed",
    "amqp_faults",
    "check_seeds",
    "simulate",
]

#: What :func:`simulate` runs.
Scenario: TypeAlias = Callable[["Simulation"], Awaitable[None]]

#: When a simulation begins, by its wall clock.
_EPOCH_S: Final = 1_700_000_000.0
#: Seconds until a killed process runs again.
_RESTART_S: Final = 1.0
#: Runs that making a list of faults shorter may take.
_SHRINKING_MAX: Final = 200
#: Lines of a trace that a failure prints.
_LINES_MAX: Final = 200

_log = logging.getLogger("amqp_rt.simulation")


class SimulatedClock:
    """Trio's virtual time, and a wall clock that jumps when a fault says so."""

    def __init__(self) -> None:
        #: Seconds by which the wall clock was put forward so far.
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        """Virtual seconds since the simulation began."""
        return trio.current_time()

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC, in the simulation's world."""
        return _EPOCH_S + trio.current_time() + self.ahead_s


class SimulationFailed(AssertionError):
    """A seed under which a scenario fails, with the fewest faults that were found to do it.

    The text has all that is needed to see it again.
    """

    def __init__(
        self, seed: int, faults: Sequence[Fault], trace: Trace, reason: BaseException
    ) -> None:
        lines = trace.lines[-_LINES_MAX:]
        listed = "".join(f"\n    {fault}," for fault in faults)
        super().__init__(
            f"seed {seed}: {type(reason).__name__}: {reason}\n"
            f"simulate(scenario, seed={seed}, faults=[{listed}\n])\n"
            f"the last {len(lines)} of {len(trace.lines)} lines of its trace:\n" + "\n".join(lines)
        )
        self.seed = seed
        self.faults = faults
        self.trace = trace


class Host:
    """A process on a machine of its own: one life of it.

    Attributes:
        name: As faults call it.
        life: 0 at first; 1 after it was killed once.
        network: What it dials and listens with.
        store: Its disk, which keeps what earlier lives have written.
        clock: The time, as it sees it.
    """

    def __init__(self, simulation: Simulation, name: str, life: int, disk: SimulatedDisk) -> None:
        self.name = name
        self.life = life
        self.network: MemoryNetwork = simulation.network.door(name)
        self.store = SimulatedStore(disk)
        self.clock = simulation.clock
        self._simulation = simulation

    def broker(self, name: str | None = None, **options: Any) -> Broker:
        """A broker that runs here, with this host's disk; *options* are those of :class:`Broker`."""
        options.setdefault("store", self.store)
        return Broker(
            name or self.name,
            network=self.network,
            clock=self.clock,
            executor=run_inline(self._simulation.luck(f"{self.name} {self.life}")),
            **options,
        )

    def container(self, name: str | None = None, **options: Any) -> Container:
        """A container that runs here; *options* are those of :class:`Container`."""
        return Container(name or self.name, network=self.network, **options)


class _Process:
    """What of a host is there over its lives."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.scope = trio.CancelScope()
        self.host: Host | None = None


class Simulation:
    """A world: hosts, a network, disks and clocks.

    Attributes:
        seed: All that is drawn is drawn from it.
        faults: What goes wrong.
        trace: What happened.
        network: Connects the hosts.
        clock: The time.
    """

    def __init__(
        self, seed: int, faults: Sequence[Fault], trace: Trace, nursery: trio.Nursery
    ) -> None:
        self.seed = seed
        self.faults = faults
        self.trace = trace
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(faults, self.luck, trace, nursery)
        self._nursery = nursery
        self._processes: dict[str, _Process] = {}
        self._calm = trio.Event()
        for fault in faults:
            if isinstance(fault, Partition | Jump) or (
                isinstance(fault, Kill) and fault.at is not None
            ):
                nursery.start_soon(self._make, fault)

    def luck(self, name: str) -> Random:
        """A generator for what is called *name*, which nobody else's draws disturb."""
        return Random(f"{self.seed}/{name}")  # noqa: S311  # it is to be foreseen

    def disk(self, host: str) -> SimulatedDisk:
        """The disk of *host*."""
        return self._process(host).disk

    def _process(self, name: str) -> _Process:
        found = self._processes.get(name)
        if found is None:
            disk = SimulatedDisk(
                name,
                self.faults,
                self.luck(f"disk {name}"),
                self.trace,
                lambda silent: self.kill(name, silent=silent),
            )
            found = self._processes[name] = _Process(disk)
        return found

    # --- hosts -------------------------------------------------------------------------------

    def start(self, name: str, main: Callable[[Host], Awaitable[None]]) -> None:
        """Run *main* as the process of the host *name*; when it is killed it begins again.

        What *main* raises ends the simulation, unless it was killed before.
        """
        self._nursery.start_soon(self._live, name, main)

    async def _live(self, name: str, main: Callable[[Host], Awaitable[None]]) -> None:
        process = self._process(name)
        life = 0
        while True:
            host = process.host = Host(self, name, life, process.disk)
            with trio.CancelScope() as process.scope:
                try:
                    await main(host)
                except Exception as error:
                    if not host.store.dead:
                        raise
                    # What it does after its death concerns nobody.
                    _log.debug("%s, dead: %s", name, error)
            if not host.store.dead:
                return
            life += 1
            await trio.sleep(_RESTART_S)
            self.trace.add(f"{name} is started again")

    def kill(self, name: str, *, silent: bool = False) -> None:
        """Let the process of *name* die as of ``kill -9``: not a word leaves it, nothing is written.

        Args:
            name: The host.
            silent: Its connections just fall silent, as if the machine had lost its power.
        """
        process = self._process(name)
        host = process.host
        if host is None or host.store.dead:
            return
        self.trace.add(f"{name} is killed")
        host.store.dead = True
        process.disk.left_by_death()
        self.network.drop(name, silent=silent)
        process.scope.cancel()

    @asynccontextmanager
    async def connect(
        self, host: str, url: str, *, container: str | None = None, **options: Any
    ) -> AsyncIterator[Connection]:
        """A client's connection from *host* to *url*; the first attempt is repeated until it works.

        Args:
            host: Where it comes from, as faults call it.
            url: ``memory://…``.
            container: The container-id; by default the name of the host.
            options: See :func:`amqp_rt.connect`.
        """
        async with Container(container or host, network=self.network.door(host)) as client:
            while True:
                connecting = client.connect(url, **options)
                try:
                    peer = await connecting.__aenter__()
                    break
                except ConnectFailed:
                    await trio.sleep(0.1)
            try:
                yield peer
            except BaseException as error:
                if not await connecting.__aexit__(type(error), error, error.__traceback__):
                    raise
            else:
                await connecting.__aexit__(None, None, None)

    # --- faults ------------------------------------------------------------------------------

    async def _make(self, fault: Fault) -> None:
        assert isinstance(fault, Partition | Jump | Kill)
        with trio.move_on_after(fault.at or 0):
            await self._calm.wait()
            return
        if isinstance(fault, Jump):
            self.trace.add(f"the wall clock jumps by {fault.seconds:g} s")
            self.clock.ahead_s += fault.seconds
        elif isinstance(fault, Kill):
            self.kill(fault.host, silent=fault.silent)
        else:
            with self.network.apart(fault.host):
                await self.network.stalled(fault.seconds)

    def calm(self) -> None:
        """Let no fault last, and none begin: from here on the world is to recover, and can be judged.

        Who is slow stays slow, and a store that was given up stays so until it is opened anew.
        """
        self.trace.add("calm")
        for process in self._processes.values():
            process.disk.calm()
        self._calm.set()
        self.network.calm()


def simulate(
    scenario: Scenario,
    *,
    seed: int,
    faults: Sequence[Fault] = (),
    within: float = 100_000.0,
    trace: Trace | None = None,
) -> Trace:
    """Run *scenario* in a world of its own; returns what happened.

    For tests that are not async themselves: it runs trio, on a virtual clock.

    Args:
        scenario: Gets the :class:`Simulation`. When it returns, its hosts are cancelled.
        seed: The same one gives the same trace.
        faults: What goes wrong.
        within: Virtual seconds after which it is said to hang.
        trace: Filled as it happens, for those who want it after a failure too.

    Raises:
        AssertionError: It hangs; and whatever *scenario* or a host raises.
    """
    seen = Trace() if trace is None else trace

    async def run() -> None:
        with trio.move_on_after(within) as limit:
            async with trio.open_nursery() as nursery:
                await scenario(Simulation(seed, faults, seen, nursery))
                nursery.cancel_scope.cancel()
        if limit.cancelled_caught:
            raise AssertionError(f"it has not ended after {within:g} virtual seconds")

    with deterministic(seed):
        try:
            trio.run(
                run,
                clock=trio.testing.MockClock(autojump_threshold=0),
                strict_exception_groups=True,
            )
        except BaseExceptionGroup as group:
            raise _innermost(group) from group
    return seen


def _innermost(error: BaseException) -> BaseException:
    """The first of a group that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def check_seeds(
    scenario: Scenario,
    seeds: Iterable[int],
    *,
    draw: Callable[[Random], Sequence[Fault]] = draw_faults,
    within: float = 100_000.0,
) -> int:
    """Run *scenario* under every seed, with faults that are drawn from it; how many there were.

    Raises:
        SimulationFailed: With the seed, the fewest faults that still make it fail, and the trace.
    """
    count = 0
    for seed in seeds:
        count += 1
        faults = draw(Random(f"{seed}/faults"))  # noqa: S311  # it is to be foreseen
        try:
            simulate(scenario, seed=seed, faults=faults, within=within)
        except Exception:
            failed = _shrunk(scenario, seed, faults, within)
            raise failed from failed.__cause__
    return count


def _shrunk(
    scenario: Scenario, seed: int, faults: Sequence[Fault], within: float
) -> SimulationFailed:
    """Leave faults out as long as it still fails."""

    def run(tried: Sequence[Fault]) -> SimulationFailed | None:
        trace = Trace()
        try:
            simulate(scenario, seed=seed, faults=tried, within=within, trace=trace)
        except Exception as reason:
            failed = SimulationFailed(seed, tried, trace, reason)
            failed.__cause__ = reason
            return failed
        return None

    found = run(faults)
    if found is None:
        raise AssertionError(f"seed {seed} fails only now and then: something is not deterministic")
    runs = 0
    part = len(faults)
    while part and runs < _SHRINKING_MAX:
        at = 0
        while at < len(found.faults) and runs < _SHRINKING_MAX:
            runs += 1
            fewer = run([*found.faults[:at], *found.faults[at + part :]])
            if fewer is not None:
                found = fewer
            else:
                at += part
        part //= 2
    return found


def amqp_faults(
    *,
    cut_after_frames: Iterable[int] = (),
    kill_at_commits: Iterable[int] = (),
    host: str = "broker",
    seed: int = 0,
    faults: Sequence[Fault] = (),
    within: float = 100_000.0,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run an exchange once without a crash, and once for each place where it may crash.

    ::

        @amqp_faults(cut_after_frames=range(1, 200))
        async def test_exactly_once(net: Simulation) -> None: ...

    The function becomes an ordinary one, which pytest runs; what it asks for besides its first
    argument are fixtures. Places that the exchange never reaches end it: a range may be generous.

    Args:
        cut_after_frames: The connection that carries this frame, counted over all connections from
            1, is cut after it.
        kill_at_commits: At this commit of *host*, from 0, it is killed: before it, and after it.
        host: Whose commits.
        seed: Of each of the runs.
        faults: What goes wrong besides.
        within: Virtual seconds after which a run is said to hang.

    Raises:
        SimulationFailed: Which crash it does not survive.
    """

    def decorate(exchange: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            def once(crash: Sequence[Fault]) -> bool:
                """Whether it came to the crash."""
                worlds: list[Simulation] = []
                trace = Trace()

                async def scenario(net: Simulation) -> None:
                    worlds.append(net)
                    await exchange(net, **fixtures)

                try:
                    simulate(
                        scenario, seed=seed, faults=[*faults, *crash], within=within, trace=trace
                    )
                except Exception as reason:
                    raise SimulationFailed(seed, [*faults, *crash], trace, reason) from reason
                (world,) = worlds
                return all(
                    world.network.was_cut
                    if isinstance(each, Cut)
                    else world.disk(host).commits > (each.commit or 0)
                    for each in crash
                    if isinstance(each, Cut | Kill)
                )

            once(())
            for frames in cut_after_frames:
                if not once([Cut(frames=frames)]):
                    break
            for commit in kill_at_commits:
                if not all(once([Kill(host=host, commit=commit, kept=k)]) for k in (False, True)):
                    break

        run.__name__ = exchange.__name__
        run.__qualname__ = exchange.__qualname__
        run.__doc__ = exchange.__doc__
        run.__module__ = exchange.__module__
        signature = inspect.signature(exchange)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:], return_annotation=None
        )
        return run

    return decorate
