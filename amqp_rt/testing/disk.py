"""Simulated disk that survives its process, and the faults of disks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Final, TypeVar

import trio

from ..stores.base import (
    ChangeSet,
    Chunk,
    Damage,
    OpenResult,
    Stored,
    StoredHead,
    StoreFailed,
    StoreFull,
)
from ..stores.memory import MemoryStore
from .faults import Damaged, Fails, Full, InjectedFault, Kill
from .network import SimulationTrace

__all__ = ["SimulatedDisk", "SimulatedStore", "run_inline"]

R = TypeVar("R")

#: Longest duration of a call of a store, in seconds.
_CALL_S: Final = 0.004


class SimulatedDisk:
    """The disk of *host*, for all of its lives.

    Args:
        host: Name of the host.
        faults: Faults to inject; commits are counted over all restarts.
        luck: Decides which message is damaged.
        trace: Records commits.
        kill: Called with ``Kill.silent`` when the process dies at a commit.
    """

    def __init__(
        self,
        host: str,
        faults: Sequence[InjectedFault],
        luck: Random,
        trace: SimulationTrace,
        kill: Callable[[bool], None],
    ) -> None:
        self.kept = MemoryStore()
        #: Number of commits tried.
        self.commits = 0
        #: Payloads of damaged messages, each reported when the store was opened.
        self.damaged: list[bytes] = []
        self._host = host
        self._faults = [fault for fault in faults if getattr(fault, "host", None) == host]
        self._luck = luck
        self._trace = trace
        self._kill = kill
        self._kills = 0

    def open(self) -> OpenResult:
        """Open the disk for a new process."""
        opened = self.kept.open()
        if any(isinstance(each, Damaged) and each.kill == self._kills for each in self._faults):
            self._faults = [each for each in self._faults if not isinstance(each, Damaged)]
            return self._damage(opened)
        return opened

    def _damage(self, opened: OpenResult) -> OpenResult:
        places = [(node, head) for node in range(64) for head in self.kept.heads(node)]
        if not places:
            return opened
        node, head = self._luck.choice(places)
        (stored,) = self.kept.read(node, [head.sequence])
        self.damaged.append(stored.payload)
        batch = ChangeSet()
        batch.remove(node, head.sequence)
        self.kept.commit(batch)
        self._trace.add(f"{self._host}: message {head.sequence} of node {node} is damaged")
        damage = Damage("message", node, head.sequence, head.sequence, "a torn page")
        return OpenResult(False, (damage,), "aside")

    def commit(self, batch: ChangeSet) -> None:
        """Commit *batch*, or inject the fault for this commit.

        Raises:
            StoreFull: The disk is full.
            StoreFailed: The commit fails; the batch may be on the disk.
        """
        number = self.commits
        self.commits += 1
        brings = bool(batch.puts or batch.pieces or batch.appends)
        for fault in self._faults:
            if isinstance(fault, Full):
                if brings and 0 <= number - fault.commit < fault.count:
                    self._trace.add(f"{self._host}: commit {number} finds no room")
                    raise StoreFull("the disk is full")
            elif isinstance(fault, Fails) and fault.commit == number:
                self._trace.add(f"{self._host}: commit {number} fails")
                if fault.kept:
                    self.kept.commit(batch)
                raise StoreFailed("the disk failed")
            elif isinstance(fault, Kill) and fault.commit == number:
                if fault.kept:
                    self.kept.commit(batch)
                self._trace.add(f"{self._host}: killed at commit {number}")
                self._kill(fault.silent)
                return
        self.kept.commit(batch)
        self._trace.add(f"{self._host}: commit {number}, {batch.size} octets")

    def calm(self) -> None:
        """End all faults."""
        self._faults = []

    def left_by_death(self) -> None:
        """Note that the process using the disk has died."""
        self._kills += 1
        self.kept.abandon()


class SimulatedStore:
    """A :class:`~amqp_rt.stores.base.Store` on a simulated disk, for one life of a process.

    After the death of the process no call reaches the disk.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self.dead = False
        #: Whether a commit failed: the store refuses batches until it is opened again.
        self._failed = False
        self._disk = disk

    def _there(self) -> MemoryStore:
        if self.dead:
            raise StoreFailed("the process is dead")
        return self._disk.kept

    def open(self) -> OpenResult:
        self._there()
        self._failed = False
        return self._disk.open()

    def commit(self, batch: ChangeSet) -> None:
        if self.dead:
            return
        if self._failed:
            raise StoreFailed("the disk failed before")
        try:
            self._disk.commit(batch)
        except StoreFailed:
            self._failed = True
            raise

    def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
        return self._there().facts(kind)

    def messages(self, node: int, first: int, count: int, size_max: int) -> list[Stored]:
        return self._there().messages(node, first, count, size_max)

    def read(self, node: int, sequences: Iterable[int]) -> list[Stored]:
        return self._there().read(node, sequences)

    def heads(self, node: int) -> Iterator[StoredHead]:
        return self._there().heads(node)

    def summary(self, node: int) -> tuple[int, int, int, int]:
        return self._there().summary(node)

    def piece(self, node: int, sequence: int, index: int) -> bytes:
        return self._there().piece(node, sequence, index)

    def chunks(self, log: int, offset: int, size_max: int) -> list[Chunk]:
        return self._there().chunks(log, offset, size_max)

    def chunk_at(self, log: int, time_ms: int) -> Chunk | None:
        return self._there().chunk_at(log, time_ms)

    def extent(self, log: int) -> tuple[int, int, int]:
        return self._there().extent(log)

    def tidy(self) -> bool:
        return False

    def close(self) -> None:
        if not self.dead:
            self._disk.kept.close()


def run_inline(luck: Random) -> Any:
    """Return an executor without threads: calls take a short virtual time, drawn from *luck*."""

    async def call(function: Callable[..., R], *args: Any) -> R:
        with trio.CancelScope(shield=True):
            await trio.sleep(luck.uniform(0, _CALL_S))
        return function(*args)

    return call
