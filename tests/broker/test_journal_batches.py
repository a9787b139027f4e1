"""Batches of a journal are bounded."""

from __future__ import annotations

import pytest
import trio

from amqp_rt.broker.durable import journal as journals
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.durable.units import Unit
from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.memory import MemoryStore


class Counting(MemoryStore):
    """Records the number of facts of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def commit(self, batch: ChangeSet) -> None:
        self.batches.append(len(batch.facts))
        super().commit(batch)


@pytest.mark.req("B7")
async def test_many_small_changes_make_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's thread may keep the interpreter's lock while it goes through a batch."""
    monkeypatch.setattr(journals, "BATCH_CHANGES_MAX", 10)
    store = Counting()
    journal = Journal(store)
    await journal.open()
    async with trio.open_nursery() as nursery:
        for number in range(50):
            unit = Unit()
            unit.put_fact("kind", b"%d" % number, b"")
            unit.put_fact("kind", b"%d again" % number, b"")
            journal.add(unit)
        nursery.start_soon(journal.run)
        await journal.wait_kept()
        nursery.cancel_scope.cancel()
    assert store.batches == [10] * 10
    assert len(store.facts("kind")) == 100
