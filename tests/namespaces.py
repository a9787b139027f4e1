"""Machines of a network that is real, as network namespaces of Linux: processes, addresses, and lines that fail.

Each machine has an interface on one switch. It takes root and Debian's iproute2; :func:`missing` says
what there is not. Delays take the kernel module *sch_netem* in addition (:func:`delays_missing`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import Any, Final

#: Numbers of networks, for their names.
_counter: Final = count(1)
#: Network of the machines; the number of a machine is its last octet.
_NETWORK: Final = "10.91.7"


@cache
def missing() -> str | None:
    """Return why there can be no namespaces here; None if there can be."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"probe{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()[-200:]}"
    try:
        _ip("-n", name, "link", "add", "name", "one", "type", "veth", "peer", "name", "two")
    except subprocess.CalledProcessError as error:
        return f"no virtual interfaces: {error.stderr.strip()[-200:]}"
    finally:
        _ip("netns", "del", name)
    return None


@cache
def delays_missing() -> str | None:
    """Return why lines cannot be slowed down here; None if they can."""
    if why := missing():
        return why
    with switched(["a"]) as machines:
        try:
            machines["a"].delay(1)
        except subprocess.CalledProcessError as error:
            return f"no delays: {error.stderr.strip()[-200:]}"
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Machine:
    """A network namespace with one address.

    Args:
        name: Its name, for the test.
        space: Name of the namespace.
        number: Last octet of its address.
    """

    def __init__(self, name: str, space: str, number: int) -> None:
        self.name = name
        self.space = space
        self.address = f"{_NETWORK}.{number}"
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process in the namespace; it is killed with the machine at the latest."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], within: float = 30) -> str:
        """Run a process in the namespace; return what it prints."""
        return subprocess.run(
            ["ip", "netns", "exec", self.space, *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=within,
        ).stdout

    def unplug(self) -> None:
        """Take the machine off the network: nobody is told."""
        _ip("-n", self.space, "link", "set", "eth", "down")

    def plug(self) -> None:
        """Put the machine back on the network."""
        _ip("-n", self.space, "link", "set", "eth", "up")

    def mute(self, other: Machine) -> None:
        """Drop what this machine sends to *other*; it still gets what the other one sends."""
        _ip("-n", self.space, "route", "add", "blackhole", f"{other.address}/32")

    def unmute(self, other: Machine) -> None:
        """End :meth:`mute`."""
        _ip("-n", self.space, "route", "del", "blackhole", f"{other.address}/32")

    def delay(self, milliseconds: int, *, loss_percent: float = 0) -> None:
        """Send later from now on, and lose some of it.

        Raises:
            CalledProcessError: The kernel has no *netem*.
        """
        command = ["tc", "qdisc", "replace", "dev", "eth", "root", "netem"]
        command += ["delay", f"{milliseconds}ms", "loss", f"{loss_percent}%"]
        self.run(command)

    def kill(self) -> None:
        """Kill all processes of the machine with SIGKILL."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()


@contextmanager
def switched(names: Sequence[str]) -> Iterator[dict[str, Machine]]:
    """Make machines called *names* on one switch; they are gone after the block.

    Raises:
        CalledProcessError: It takes root and iproute2; see :func:`missing`.
    """
    prefix = f"amqp{os.getpid()}x{next(_counter)}"
    switch = f"{prefix}s"
    spaces = {name: f"{prefix}n{number}" for number, name in enumerate(names, 1)}
    machines: dict[str, Machine] = {}
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, (name, space) in enumerate(spaces.items(), 1):
            _ip("netns", "add", space)
            port = f"p{number}"
            ends = ("eth", "netns", space), (port, "netns", switch)
            _ip("link", "add", "name", *ends[0], "type", "veth", "peer", "name", *ends[1])
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            machine = machines[name] = Machine(name, space, number)
            _ip("-n", space, "addr", "add", f"{machine.address}/24", "dev", "eth")
            _ip("-n", space, "link", "set", "lo", "up")
            machine.plug()
        yield machines
    finally:
        for machine in machines.values():
            machine.kill()
        for space in (*spaces.values(), switch):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)
