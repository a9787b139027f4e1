"""What a store is: the checks of ``amqp_rt.testing.checks``, and batches against a small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from store_model import check_model

from amqp_rt.stores.base import SHARED_MIN, ChangeSet, OpenResult, Store, StoreFull
from amqp_rt.stores.errors import StoreBusy
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.stores.sqlite_files import backup, check
from amqp_rt.testing.checks import STORE_CHECKS, check_store

pytestmark = pytest.mark.req("B26")

MAKERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda path: MemoryStore(),
    "sqlite": SQLiteStore,
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MAKERS[request.param](tmp_path / "store")


@pytest.mark.slow
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_store(store: Store, check: Callable[[Store], None]) -> None:
    assert store.open() == OpenResult(clean=True)
    check(store)
    store.close()


def test_the_whole_suite_runs_from_plain_code() -> None:
    check_store(MemoryStore)


def test_a_store_that_loses_something_is_found_out() -> None:
    class Forgetful(MemoryStore):
        def facts(self, kind: str) -> list[tuple[bytes, bytes]]:
            return super().facts(kind)[:5]

    with pytest.raises(AssertionError):
        check_store(Forgetful)


def test_a_memory_store_that_is_full_still_gives_back() -> None:
    store = MemoryStore(size_max=100)
    store.open()
    batch = ChangeSet()
    batch.put(1, 1, b"head", bytes(90))
    store.commit(batch)
    more = ChangeSet()
    more.put(1, 2, b"", bytes(10))
    with pytest.raises(StoreFull):
        store.commit(more)
    assert store.summary(1) == (1, 90, 1, 1)
    less = ChangeSet()
    less.remove(1, 1)
    store.commit(less)
    store.commit(more)
    assert store.summary(1) == (1, 10, 2, 2)


def test_a_memory_store_counts_a_shared_payload_once() -> None:
    store = MemoryStore(size_max=3_000)
    store.open()
    payload = bytes(2_000)
    batch = ChangeSet()
    for node in range(10):
        batch.put(node, 1, b"h", payload)
    store.commit(batch)
    assert store.size == 2_010
    for left in range(10, 0, -1):
        batch = ChangeSet()
        batch.remove(left - 1, 1)
        store.commit(batch)
        assert store.size == (2_000 + left - 1 if left > 1 else 0)


def test_a_batch_counts_what_is_left_in_it() -> None:
    batch = ChangeSet()
    one, other = bytes(2_000), bytes(3_000)
    for payload in (one, other):
        batch.put(1, len(payload), b"h", payload)
        batch.remove(1, len(payload))
        assert (batch.size, batch.shares) == (0, False)
    batch.put(1, 1, b"h", one)
    assert (batch.size, batch.shares) == (2_001, False)
    batch.put(2, 1, b"h", one)
    batch.put(3, 1, b"h", one[: SHARED_MIN - 1])
    assert (batch.size, batch.shares) == (2_002 + SHARED_MIN, True)
    batch.remove(1, 1)
    assert batch.size == 2_001 + SHARED_MIN


def test_a_memory_store_that_was_abandoned_is_not_clean() -> None:
    store = MemoryStore()
    store.open()
    batch = ChangeSet()
    batch.put(1, 1, b"", b"kept")
    batch.put(1, 2, b"", b"spilled", spilled=True)
    store.commit(batch)
    store.abandon()
    assert store.open() == OpenResult(clean=False)
    assert [message.payload for message in store.messages(1, 0, 9, 99)] == [b"kept"]
    assert store.size == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_random_batches(name: str, tmp_path: Path, long_run: bool) -> None:
    made: list[Path] = []

    def make() -> Store:
        made.append(tmp_path / str(len(made)))
        return MAKERS[name](made[-1])

    check_model(make, max_examples=300 if long_run else 25)


def test_a_batch_takes_few_statements_and_pages(tmp_path: Path) -> None:
    """Count statements and pages, which do not depend on the machine: they grow by pages, not by messages."""
    store = SQLiteStore(tmp_path / "store")
    store.open()
    file = store._file
    statements: list[str] = []
    count = 500
    for round_ in range(4):
        batch = ChangeSet()
        for sequence in range(round_ * count, (round_ + 1) * count):
            batch.put(1, sequence, b"h" * 20, b"p" * 110)
            if round_:
                batch.remove(1, sequence - count)
        before = file._files.frames
        file.connection.exec_trace = lambda _cursor, sql, _values: bool(statements.append(sql) or 1)
        statements.clear()
        store.commit(batch)
    assert len(statements) <= 20
    assert file._files.frames - before <= 24
    assert store.summary(1) == (count, count * 110, 3 * count, 4 * count - 1)
    store.close()


def test_removals_of_all_kinds_of_runs(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store")
    store.open()
    places = [(node, sequence) for node in (0, 1, 2) for sequence in range(300)]
    gone = {place for at, place in enumerate(places) if at % 7 in {0, 1, 4} or 250 <= at < 320}
    batch = ChangeSet()
    for place in places:
        batch.put(*place, b"head", b"payload")
    store.commit(batch)
    batch = ChangeSet()
    for place in sorted(gone, key=lambda place: place[1] * 31 % 97):
        batch.remove(*place)
    batch.put(2, 300, b"head", b"payload")
    store.commit(batch)
    kept = {(node, each.sequence) for node in (0, 1, 2) for each in store.heads(node)}
    assert kept == {*places, (2, 300)} - gone
    store.close()


def test_links_lead_to_one_store(tmp_path: Path) -> None:
    """The folder of a service with DynamicUser= is a link, as is /var of macOS."""
    (tmp_path / "private").mkdir()
    (tmp_path / "folder").symlink_to("private")
    (tmp_path / "file.db").symlink_to("folder/broker.db")
    for path in ("folder/broker.db", "file.db", "private/broker.db"):
        store, again = SQLiteStore(tmp_path / path), SQLiteStore(tmp_path / "private/broker.db")
        store.open()
        batch = ChangeSet()
        batch.put(1, store.summary(1)[0] + 1, b"head", b"payload")
        store.commit(batch)
        with pytest.raises(StoreBusy, match="is in use"):
            again.open()
        store.close()
    assert check(tmp_path / "file.db").messages == 3
    backup(tmp_path / "file.db", tmp_path / "folder/copy.db")
    assert check(tmp_path / "private/copy.db").messages == 3
