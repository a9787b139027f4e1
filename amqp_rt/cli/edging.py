"""Edge processes of ``amqp-rt serve --edges``: their start, restarts after failures, and their end.

An edge inherits one end of a socket pair (:mod:`amqp_rt.net.edges`), whose end tells it that the broker has ended, even by
``kill -9``.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from typing import Final

import click
import trio

from ..errors import AmqpError
from ..net.edges import EdgeProcess, Edges, EdgeSettings, control_pair

log = logging.getLogger("amqp_rt.cli")

#: Most edge processes: more than any machine can use beside one broker.
EDGES_MAX: Final = 64
#: Shortest and longest pause in seconds before an edge that has ended is replaced. One that has lived for the longest
#: begins with the shortest again.
_PAUSE_MIN_S: Final = 0.2
_PAUSE_MAX_S: Final = 30.0
#: Seconds that an edge has to start, and to end after the broker.
_START_S: Final = 30.0
_END_S: Final = 5.0


def check_edges() -> None:
    """Check that this system can have edge processes.

    Raises:
        click.BadParameter: It cannot.
    """
    for each in _pair():
        each.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return the control sockets of the hub and of a new edge."""
    try:
        return control_pair()
    except AmqpError as error:
        raise click.BadParameter(error.description, param_hint="--edges") from None


class EdgeProcesses:
    """Edge processes of a broker.

    Args:
        count: How many.
        settings: What they need for handshakes.
        edges: Has those that can take connections.
    """

    def __init__(self, count: int, settings: EdgeSettings, edges: Edges) -> None:
        self._count = count
        self._settings = settings
        self._edges = edges

    async def run(
        self, *, task_status: trio.TaskStatus[list[int]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the processes until cancelled; ``nursery.start`` returns their process ids once all can take connections.

        Raises:
            click.ClickException: One could not be started.
        """
        async with trio.open_nursery() as nursery:
            pids: list[int] = [await nursery.start(self._keep) for _ in range(self._count)]
            task_status.started(pids)

    async def _keep(self, *, task_status: trio.TaskStatus[int]) -> None:
        """Run one edge after the other."""
        pause = _PAUSE_MIN_S
        served = False
        while True:
            began = trio.current_time()
            process, edge = await self._start()
            try:
                ready = await self._is_ready(edge)
                if ready and not served:
                    served = True
                    task_status.started(edge.pid)
                if ready:
                    self._edges.living.append(edge)
                    await edge.run()
            finally:
                if edge in self._edges.living:
                    self._edges.living.remove(edge)
                edge.close()
                await _end(process)
            if not served:
                # What fails at its first start would fail at the second one: the user has to change something.
                raise click.ClickException(
                    f"an edge process ended with status {process.returncode} before it could take connections"
                )
            if trio.current_time() - began >= _PAUSE_MAX_S:
                pause = _PAUSE_MIN_S
            log.warning(
                "edge process %d ended with status %s, and its connections with it; starting another one in %g s",
                *(edge.pid, process.returncode, pause),
            )
            await trio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX_S)

    async def _start(self) -> tuple[trio.Process, EdgeProcess]:
        """Start a process; it has its settings, and is not ready yet."""
        ours, theirs = _pair()
        with theirs:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "amqp_rt.cli.edge_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # The terminal's Ctrl-C is for the broker, which closes connections in the protocol first.
                start_new_session=True,
            )
        return process, EdgeProcess(ours, process.pid)

    async def _is_ready(self, edge: EdgeProcess) -> bool:
        """Return whether *edge* can take connections; False if it has ended, or does not answer."""
        with trio.move_on_after(_START_S):
            try:
                await edge.send(self._settings)
                await edge.wait_ready()
            except OSError:
                return False
            return True
        return False


async def _end(process: trio.Process) -> None:
    """Wait for the end of *process*, which has noticed that its control socket is closed."""
    with trio.move_on_after(_END_S, shield=True):
        await process.wait()
    if process.returncode is None:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
