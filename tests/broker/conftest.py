"""Fixtures for tests of the broker; tests with ``kept`` run over every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import brokers
import pytest

from amqp_rt.broker.durable import pieces
from amqp_rt.stores.base import Store
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore


@pytest.fixture(autouse=True)
def _sound_queues() -> Iterator[None]:
    """Check the invariants of the queues of every world that the test has made."""
    brokers.made.clear()
    yield
    worlds = list(brokers.made)
    brokers.made.clear()
    for world in worlds:
        world.check()


@pytest.fixture(params=["memory", "sqlite"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Function that returns the same store again, in its state after a restart."""
    if request.param == "memory":
        store = MemoryStore()
        return lambda: store
    return lambda: SQLiteStore(tmp_path / "broker.db")


@pytest.fixture(params=["nowhere", "memory", "sqlite"])
def kept_or_not(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store | None]:
    """Function that returns the same store again, in its state after a restart, or None."""
    if request.param == "nowhere":
        return lambda: None
    if request.param == "memory":
        store = MemoryStore()
        return lambda: store
    return lambda: SQLiteStore(tmp_path / "broker.db")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the size of pieces, so that messages of some ten thousand octets have several."""
    monkeypatch.setattr(pieces, "PIECE", 7_000)
    monkeypatch.setattr(pieces, "_AHEAD", 20_000)
