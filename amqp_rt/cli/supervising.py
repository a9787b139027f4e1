"""Worker processes of ``amqp-rt run``: their start, restarts after failures and changes, and their end.

A worker is the same command with the variable :data:`~amqp_rt.cli.worker_channels.WORKER`, which has its number and the
descriptor of its end of a socket pair. Over it the worker reports that it serves, and answers requests of probes. When the
supervisor ends, even by ``kill -9``, the worker reads the end of that stream and stops.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio
from msgspec import Struct

from .notifying import ServiceManager
from .running import report_ready
from .worker_channels import WORKER, ProcessChannel, Report

if TYPE_CHECKING:
    from ..telemetry.workers import WorkerAnswer

log = logging.getLogger("amqp_rt.cli")

#: Shortest and longest pause in seconds before a failed worker is started again. One that has lived for the
#: longest pause begins with the shortest again.
PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
#: Seconds between the second signal and the kill of workers.
_LAST_WAIT_S: Final = 2.0
#: Seconds for the last lines of a process that has ended. A process that it has started may keep the stream open.
_LAST_LINES_S: Final = 1.0


class _Worker(Struct, eq=False):
    """One of the processes, and those that replace it."""

    number: int
    name: str = ""
    process: trio.Process | None = None
    #: Channel to the process, while it serves.
    channel: ProcessChannel | None = None
    #: Whether any of its processes has served.
    served: bool = False
    #: Whether it is being replaced: its end is no failure.
    replaced: bool = False
    listeners: list[str] = []

    def __str__(self) -> str:
        return f"worker {self.name!r}" if self.name else f"worker {self.number}"


class Supervisor:
    """Supervisor of the workers of one application.

    Args:
        command: The command of a worker.
        count: Number of workers.
        manager: The service manager to report to.
        watched: Folders in which a change of a Python file replaces the workers; empty for none.
        probe: URL at which to answer probes of all workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        manager: ServiceManager,
        watched: Sequence[Path],
        probe: str | None = None,
    ) -> None:
        self._command = list(command)
        self._workers = [_Worker(number) for number in range(1, count + 1)]
        self._manager = manager
        self._watched = watched
        self._probe = probe
        self._stopping = False
        self._status = 0
        self._reported = False
        self._changed = trio.Event()

    async def run(self) -> int:
        """Run the workers until a signal, or until all have ended by themselves.

        Returns:
            The exit status: 0, or that of a worker that failed before it served.
        """
        async with trio.open_nursery() as watching:
            await watching.start(self._pass_signals_on)
            watching.start_soon(self._manager.show_life)
            if self._watched:
                await watching.start(self._watch)
            if self._probe is not None:
                from ..telemetry.workers import WorkersProbe

                self._probe = await watching.start(WorkersProbe(self.ask).serve, self._probe)
            async with trio.open_nursery() as nursery:
                for worker in self._workers:
                    nursery.start_soon(self._keep, worker)
            watching.cancel_scope.cancel()
        return self._status

    async def _keep(self, worker: _Worker) -> None:
        """Run the processes of *worker*, one after the other."""
        pause = PAUSE_MIN_S
        while not self._stopping:
            began = trio.current_time()
            status = await self._run_once(worker)
            if self._stopping:
                return
            if worker.replaced:
                worker.replaced = False
                continue
            if status == 0:
                log.info("%s ended by itself", worker)
                return
            if self._watched:
                log.warning(
                    "%s ended with status %d; it starts again after a change", worker, status
                )
                await self._changed.wait()
                worker.replaced = False
                continue
            if not worker.served:
                # What fails at its first start would fail at the second one: the user has to change something.
                log.error("%s ended with status %d before it served", worker, status)
                self._status = status if status > 0 else 128 - status
                self._stop(signal.SIGTERM)
                return
            if trio.current_time() - began >= PAUSE_MAX_S:
                pause = PAUSE_MIN_S
            log.warning("%s ended with status %d; starting it again in %g s", worker, status, pause)
            with trio.move_on_after(pause):
                await self._changed.wait()
            pause = min(2 * pause, PAUSE_MAX_S)

    async def _run_once(self, worker: _Worker) -> int:
        """Run one process to its end; return its exit status."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # Its own session: the terminal's Ctrl-C reaches only us, and each worker gets one signal.
            environ = {**os.environ, WORKER: f"{worker.number}:{theirs.fileno()}"}
            # Only this process is known to the service manager.
            for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
                environ.pop(name, None)
            process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environ,
                start_new_session=True,
            )
            theirs.close()
            worker.process = process
            try:
                if self._stopping:
                    process.send_signal(signal.SIGTERM)
                async with trio.open_nursery() as nursery:
                    channel = ProcessChannel(
                        ours, lambda report: self._served(worker, channel, report)
                    )
                    nursery.start_soon(channel.run)
                    status = await process.wait()
                    nursery.cancel_scope.deadline = trio.current_time() + _LAST_LINES_S
                return status
            finally:
                worker.process = worker.channel = None

    def _served(self, worker: _Worker, channel: ProcessChannel, report: Report) -> None:
        worker.name, worker.listeners = report.name, report.listeners
        worker.served = True
        worker.channel = channel
        log.info("%s serves: process %d", worker, report.pid)
        running = [each for each in self._workers if each.served]
        if len(running) == len(self._workers) and not self._stopping:
            if not self._reported:
                self._reported = True
                report_ready(
                    [url for each in running for url in each.listeners],
                    **({} if self._probe is None else {"probe": self._probe}),
                    workers={each.name: each.process.pid for each in running if each.process},
                )
            self._manager.ready(f"{len(running)} workers")

    async def ask(self, path: str, node: str | None) -> list[WorkerAnswer]:
        """Pass a request of a probe on to all workers, and return their answers."""
        answers: dict[int, WorkerAnswer] = {}

        async def ask(worker: _Worker) -> None:
            answers[worker.number] = await self._ask(worker, path, node)

        async with trio.open_nursery() as nursery:
            for each in self._workers:
                nursery.start_soon(ask, each)
        return [answers[each.number] for each in self._workers]

    async def _ask(self, worker: _Worker, path: str, node: str | None) -> WorkerAnswer:
        from ..telemetry.workers import WorkerAnswer

        name = worker.name or f"worker {worker.number}"
        channel = worker.channel
        if channel is not None:
            answer = await channel.ask(path, node)
            if answer is not None and (answer.status == 200 or not worker.replaced):
                return WorkerAnswer(name, status=answer.status, body=answer.body)
            if worker.channel is channel and not worker.replaced:
                return WorkerAnswer(name)
        if worker.replaced:
            return WorkerAnswer(name, absent="it is being replaced")
        return WorkerAnswer(
            name, absent="it is not running" if worker.process is None else "it is starting"
        )

    # --- signals and changes -------------------------------------------------------------

    async def _pass_signals_on(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Pass signals on to the workers; SIGHUP replaces them in turn."""
        with trio.open_signal_receiver(
            signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
        ) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self._replace()
                elif number in (signal.SIGUSR1, signal.SIGUSR2):
                    self._send(number)
                elif not self._stopping:
                    self._stop(number)
                else:
                    self._send(number)
                    with trio.move_on_after(_LAST_WAIT_S):
                        for worker in self._workers:
                            if worker.process is not None:
                                await worker.process.wait()
                    self._send(signal.SIGKILL)
                    raise SystemExit(128 + number)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self._manager.stopping()
        self._send(number)
        self._wake()

    def _send(self, number: int) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.send_signal(number)

    def _wake(self) -> None:
        """Start workers that wait for a change or for the end of a pause."""
        self._changed.set()
        self._changed = trio.Event()

    def _replace(self) -> None:
        """Stop the processes of all workers, which are then started again."""
        self._manager.reloading()
        for worker in self._workers:
            if worker.process is not None:
                worker.replaced = True
                worker.process.send_signal(signal.SIGTERM)
        self._wake()

    async def _watch(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        changes = watch_files(self._watched)
        task_status.started()
        async for files in changes:
            if not self._stopping:
                log.info("changed: %s", ", ".join(sorted(files)[:5]))
                self._replace()


def watch_files(folders: Sequence[Path]) -> AsyncIterator[set[str]]:
    """Return an iterator of the Python files below *folders* that have changed.

    Raises:
        click.UsageError: The library that watches files is not installed.
    """
    try:
        from watchfiles import PythonFilter, awatch
    except ImportError:
        raise click.UsageError(
            "--reload needs a library that watches files: pip install 'amqp-rt[reload]'"
        ) from None

    async def changes() -> AsyncIterator[set[str]]:
        async for found in awatch(*folders, watch_filter=PythonFilter(), debounce=200):
            yield {path for _, path in found}

    return changes()


def own_command() -> list[str]:
    """Return the command of this process, for its workers."""
    return [sys.executable, "-m", "amqp_rt.cli", *sys.argv[1:]]
