"""Simulation of brokers, containers and clients in virtual time: network, disks, faults, one seed.

::

    async def scenario(net: Simulation) -> None:
        async def serve(host: SimulatedHost) -> None:
            async with host.broker() as broker:
                await broker.declare(Queue("work"))
                await broker.listen("memory://broker")
                await broker.serve()

        net.start("broker", serve)
        async with net.connect("client", "memory://broker") as peer:
            ...

    simulate(scenario, seed=7, faults=[Cut(frames=12)])

Equal seeds and faults give equal traces (:class:`SimulationTrace`), line by line. There are no threads and no
waits for the real clock, so that hours pass at once.
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

from ..broker.broker import Broker
from ..container.connections import Connection
from ..container.container import Container
from ..errors import ConnectFailed
from ..net.memory import MemoryNetwork
from .determinism import deterministic
from .disk import SimulatedDisk, SimulatedStore, run_inline
from .faults import (
    Cut,
    Flap,
    InjectedFault,
    Jump,
    Kill,
    NetworkPartition,
    OneWay,
    draw_faults,
)
from .network import SimulatedNetwork, SimulationTrace

__all__ = [
    "Scenario",
    "SimulatedHost",
    "Simulation",
    "SimulationFailed",
    "amqp_faults",
    "check_seeds",
    "simulate",
]

#: Function that :func:`simulate` runs.
Scenario: TypeAlias = Callable[["Simulation"], Awaitable[None]]

#: Wall-clock time at which a simulation begins.
_EPOCH_S: Final = 1_700_000_000.0
#: Seconds until a killed process is restarted.
_RESTART_S: Final = 1.0
#: Largest number of runs spent on shortening a list of faults.
_SHRINKING_MAX: Final = 200
#: Lines of the trace that a failure prints.
_LINES_MAX: Final = 200

_log = logging.getLogger("amqp_rt.simulation")


class SimulatedClock:
    """Virtual time of trio, and a wall clock that faults can move."""

    def __init__(self) -> None:
        #: Sum of the jumps of the wall clock, in seconds.
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        """Return virtual seconds since the start of the simulation."""
        return trio.current_time()

    def wall(self) -> float:
        """Return seconds since 1970-01-01 UTC, in the simulation."""
        return _EPOCH_S + trio.current_time() + self.ahead_s


class SimulationFailed(AssertionError):
    """A seed with which a scenario fails, and the shortest list of faults found to cause it.

    The text contains everything needed to reproduce the failure.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[InjectedFault],
        trace: SimulationTrace,
        reason: BaseException,
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


class SimulatedHost:
    """A process on a machine of its own, for one of its lives.

    Attributes:
        name: Name of the host, to which faults refer.
        life: 0 at first; 1 after it was killed once.
        network: Network to dial and listen on.
        store: Its disk, with the data of earlier lives.
        clock: Its clock.
    """

    def __init__(self, simulation: Simulation, name: str, life: int, disk: SimulatedDisk) -> None:
        self.name = name
        self.life = life
        self.network: MemoryNetwork = simulation.network.door(name)
        self.store = SimulatedStore(disk)
        self.clock = simulation.clock
        self._simulation = simulation

    def broker(self, name: str | None = None, **options: Any) -> Broker:
        """Create a broker on this host, with its disk; *options* are those of :class:`Broker`."""
        options.setdefault("store", self.store)
        return Broker(
            name or self.name,
            network=self.network,
            clock=self.clock,
            executor=run_inline(self._simulation.luck(f"{self.name} {self.life}")),
            **options,
        )

    def container(self, name: str | None = None, **options: Any) -> Container:
        """Create a container on this host; *options* are those of :class:`Container`."""
        return Container(name or self.name, network=self.network, **options)


class _Process:
    """State of a host across its lives."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.scope = trio.CancelScope()
        self.host: SimulatedHost | None = None


class Simulation:
    """A simulated world: hosts, a network, disks and clocks.

    Attributes:
        seed: Seed of all randomness.
        faults: Faults to inject.
        trace: Record of the events.
        network: Network between the hosts.
        clock: The time.
    """

    def __init__(
        self,
        seed: int,
        faults: Sequence[InjectedFault],
        trace: SimulationTrace,
        nursery: trio.Nursery,
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
            if isinstance(fault, NetworkPartition | OneWay | Flap | Jump) or (
                isinstance(fault, Kill) and fault.at is not None
            ):
                nursery.start_soon(self._make, fault)

    def luck(self, name: str) -> Random:
        """Return a random generator for *name*, independent of those for other names."""
        return Random(f"{self.seed}/{name}")  # noqa: S311  # must be reproducible

    def disk(self, host: str) -> SimulatedDisk:
        """Return the disk of *host*."""
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

    def start(self, name: str, main: Callable[[SimulatedHost], Awaitable[None]]) -> None:
        """Run *main* as the process of host *name*, and again after each kill.

        Exceptions of *main* end the simulation, unless the process was killed before.
        """
        self._nursery.start_soon(self._live, name, main)

    async def _live(self, name: str, main: Callable[[SimulatedHost], Awaitable[None]]) -> None:
        process = self._process(name)
        life = 0
        while True:
            host = process.host = SimulatedHost(self, name, life, process.disk)
            with trio.CancelScope() as process.scope:
                try:
                    await main(host)
                except Exception as error:
                    if not host.store.dead:
                        raise
                    # Exceptions after the kill have no meaning.
                    _log.debug("%s, dead: %s", name, error)
            if not host.store.dead:
                return
            life += 1
            await trio.sleep(_RESTART_S)
            self.trace.add(f"{name} is started again")

    def kill(self, name: str, *, silent: bool = False) -> None:
        """Kill the process of *name* as by ``kill -9``: it sends and writes nothing more.

        Args:
            name: The host.
            silent: Hide the end of its connections from its peers, as if the machine had lost
                power.
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
        """Connect as a client from *host* to *url*; repeat the first attempt until it succeeds.

        Args:
            host: Name of the client's host, to which faults refer.
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

    async def _make(self, fault: InjectedFault) -> None:
        assert isinstance(fault, NetworkPartition | OneWay | Flap | Jump | Kill)
        with trio.move_on_after(fault.at or 0):
            await self._calm.wait()
            return
        if isinstance(fault, Jump):
            self.trace.add(f"the wall clock jumps by {fault.seconds:g} s")
            self.clock.ahead_s += fault.seconds
        elif isinstance(fault, Kill):
            self.kill(fault.host, silent=fault.silent)
        elif isinstance(fault, OneWay):
            with self.network.mute(fault.host, fault.to):
                await self.network.stalled(fault.seconds)
        elif isinstance(fault, Flap):
            await self._flap(fault)
        else:
            with self.network.apart(fault.host):
                await self.network.stalled(fault.seconds)

    async def _flap(self, fault: Flap) -> None:
        for _ in range(fault.times):
            if self.network.is_calm:
                break
            self.network.cut(fault.host)
            with self.network.apart(fault.host):
                await self.network.stalled(fault.seconds)
            await self.network.stalled(fault.seconds)

    def calm(self) -> None:
        """End all faults, and begin no others, so that the world recovers and can be checked.

        Slow connections stay slow, and a store that has failed stays so until it is opened again.
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
    faults: Sequence[InjectedFault] = (),
    within: float = 100_000.0,
    trace: SimulationTrace | None = None,
) -> SimulationTrace:
    """Run *scenario* in a world of its own; return its trace.

    For tests that are not async: this function runs trio, with a virtual clock.

    Args:
        scenario: Called with the :class:`Simulation`. When it returns, its hosts are cancelled.
        seed: Equal seeds give equal traces.
        faults: Faults to inject.
        within: Virtual seconds after which the run counts as hanging.
        trace: Filled during the run, for callers that need it after a failure too.

    Raises:
        AssertionError: The run hangs. Exceptions of *scenario* and of hosts are raised as well.
    """
    seen = SimulationTrace() if trace is None else trace

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
    """Return the first exception of a group that is not a group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def check_seeds(
    scenario: Scenario,
    seeds: Iterable[int],
    *,
    draw: Callable[[Random], Sequence[InjectedFault]] = draw_faults,
    within: float = 100_000.0,
) -> int:
    """Run *scenario* with every seed, and faults drawn from it; return the number of seeds.

    Raises:
        SimulationFailed: A run failed; the error has the seed, the shortest list of faults found,
            and the trace.
    """
    count = 0
    for seed in seeds:
        count += 1
        faults = draw(Random(f"{seed}/faults"))  # noqa: S311  # must be reproducible
        try:
            simulate(scenario, seed=seed, faults=faults, within=within)
        except Exception as reason:
            failed = _shrunk(scenario, seed, faults, within)
            if failed is None:
                raise AssertionError(
                    f"seed {seed} fails only now and then: something is not deterministic"
                ) from reason
            raise failed from failed.__cause__
    return count


def _shrunk(
    scenario: Scenario, seed: int, faults: Sequence[InjectedFault], within: float
) -> SimulationFailed | None:
    """Remove faults as long as the scenario still fails; return None if it passes with all of them."""

    def run(tried: Sequence[InjectedFault]) -> SimulationFailed | None:
        trace = SimulationTrace()
        try:
            simulate(scenario, seed=seed, faults=tried, within=within, trace=trace)
        except Exception as reason:
            failed = SimulationFailed(seed, tried, trace, reason)
            failed.__cause__ = reason
            return failed
        return None

    found = run(faults)
    if found is None:
        return None
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
    faults: Sequence[InjectedFault] = (),
    within: float = 100_000.0,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run an exchange once without a crash, and once for each place of a crash.

    ::

        @amqp_faults(cut_after_frames=range(1, 200))
        async def test_exactly_once(net: Simulation) -> None: ...

    The function becomes a plain one, for pytest to run; its arguments after the first are fixtures.
    A range ends at the first place that the exchange does not reach, so it may be generous.

    Args:
        cut_after_frames: Numbers of frames, counted over all connections from 1; the connection
            that carries the frame is cut after it.
        kill_at_commits: Numbers of commits of *host*, from 0, before and after which it is killed.
        host: The host whose commits count.
        seed: Seed of every run.
        faults: Other faults of every run.
        within: Virtual seconds after which a run counts as hanging.

    Raises:
        SimulationFailed: The exchange does not survive the crash named in the error.
    """

    def decorate(exchange: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            def once(crash: Sequence[InjectedFault]) -> bool:
                """Run with *crash*; return whether the crash happened."""
                worlds: list[Simulation] = []
                trace = SimulationTrace()

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
