"""A journal that is stopped while it waits for its store."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from stalls import Stalls

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.durable.units import Unit
from amqp_rt.outcomes import Error
from amqp_rt.stores.base import ChangeSet, StoreFull
from amqp_rt.stores.memory import MemoryStore


class Filling(MemoryStore):
    """A disk that has room when a test says so."""

    full = True

    def commit(self, batch: ChangeSet) -> None:
        if self.full:
            raise StoreFull("the disk is full")
        super().commit(batch)


@pytest.mark.req("B7", "A13")
@pytest.mark.parametrize("room", [False, True])
async def test_what_waits_for_room_at_the_end_is_in_the_last_commit(
    autojump_clock: trio.testing.MockClock, room: bool
) -> None:
    store = Filling()
    journal = Journal(store, Stalls())
    await journal.open()
    ended: list[str] = []

    def refused(error: Error) -> None:
        ended.append("refused")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        # The first makes room and cannot be refused; the second comes behind it.
        for name, refusal in (("first", None), ("second", refused)):
            unit = Unit(refusal)
            unit.put_fact("kind", name.encode(), b"")
            unit.then(lambda name=name: ended.append(name))  # type: ignore[misc]
            journal.add(unit)
        await trio.sleep(0.5)
        assert ended == []
        store.full = not room
        nursery.cancel_scope.cancel()
    if room:
        assert ended == ["first", "second"]
        assert {key for key, _ in store.facts("kind")} == {b"first", b"second"}
    else:
        # No commit follows, so a caller waiting for the second unit would wait for ever.
        assert ended == ["refused"]
