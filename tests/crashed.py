"""Stores in memory in their state after a crash."""

from __future__ import annotations

import copy

from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.memory import MemoryStore


class Photographed(MemoryStore):
    """A disk with a copy for each commit, in its state after a crash at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[MemoryStore] = []

    def commit(self, batch: ChangeSet) -> None:
        super().commit(batch)
        copies, self.copies = self.copies, []
        found = MemoryStore()
        found.__dict__.update(copy.deepcopy(self.__dict__))
        del found.__dict__["copies"]
        found.abandon()
        self.copies = [*copies, found]
