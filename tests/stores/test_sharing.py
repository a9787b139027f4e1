"""The cost of messages that share a payload in the durable store, and when the payload is freed."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from known_store import count_lost, flip, known_store

from amqp_rt.errors import AmqpError
from amqp_rt.stores.base import SHARED_MIN, ChangeSet, Chunk, StoreDamaged, StoreRefused
from amqp_rt.stores.pages import PAGE
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.stores.sqlite_files import VERSION, backup, check, roots, upgrade

pytestmark = pytest.mark.req("B26")

MIB = 1024 * 1024
#: A store that the release with version 1 of the schema has written: ``known_store(path, 5)``.
VERSION_1 = Path(__file__).with_name("version-1.db.gz")


@pytest.fixture
def store(tmp_path: Path) -> SQLiteStore:
    made = SQLiteStore(tmp_path / "store")
    made.open()
    return made


def commit(store: SQLiteStore, fill: Callable[[ChangeSet], None]) -> None:
    batch = ChangeSet()
    fill(batch)
    store.commit(batch)


def share(store: SQLiteStore, payload: bytes, nodes: range, *, spilled: bool = False) -> None:
    def fill(batch: ChangeSet) -> None:
        for node in nodes:
            batch.put(node, 1, b"h", payload, spilled=spilled)

    commit(store, fill)


def clear(*nodes: int) -> Callable[[ChangeSet], None]:
    def fill(batch: ChangeSet) -> None:
        for node in nodes:
            batch.clear(node)

    return fill


def on_disk(store: SQLiteStore) -> int:
    folder = store.path.parent
    return sum(each.stat().st_size for each in folder.iterdir() if ".reserve" not in each.name)


def count(store: SQLiteStore, table: str) -> int:
    return int(str(store._file.connection.execute(f"SELECT count(*) FROM {table}").get))


@pytest.mark.parametrize("spilled", [False, True])
def test_a_payload_for_a_hundred_queues_is_written_once(store: SQLiteStore, spilled: bool) -> None:
    payload = bytes(range(256)) * (MIB // 256)
    share(store, payload, range(100), spilled=spilled)
    assert on_disk(store) < 3 * MIB  # the log, and what has been copied into the database
    for node in (0, 57, 99):
        assert store.messages(node, 0, 9, 2**40)[0].payload == payload
    store.close()
    assert on_disk(store) < 1.5 * MIB
    store.open()
    for node in (0, 57, 99):
        found = store.messages(node, 0, 9, 2**40)
        assert [message.payload for message in found] == ([] if spilled else [payload])
    assert count(store, "pieces") == (0 if spilled else 1)
    store.close()


def test_a_payload_is_written_once_although_it_takes_several_batches(store: SQLiteStore) -> None:
    payload = bytes(MIB)
    share(store, payload, range(2))
    commit(store, lambda batch: batch.put_fact("kind", b"between", b""))
    for node in range(2, 20):
        share(store, payload, range(node, node + 1))
    assert (count(store, "pieces"), count(store, "bodies")) == (1, 20)
    assert store.read(19, [1])[0].body == store.read(0, [1])[0].body > 0
    store.close()


def test_a_payload_that_comes_again_after_its_last_message_is_written_again(
    store: SQLiteStore,
) -> None:
    payload = bytes(5000)
    share(store, payload, range(2))
    commit(store, clear(0, 1))
    assert count(store, "pieces") == 0
    share(store, payload, range(5, 6))
    assert store.read(5, [1])[0].payload == payload
    store.close()


@pytest.mark.parametrize("size", [SHARED_MIN - 1, SHARED_MIN])
def test_what_is_small_or_not_shared_is_a_row_as_before(store: SQLiteStore, size: int) -> None:
    payload = bytes(size)
    share(store, payload, range(1))
    assert count(store, "bodies") == 0
    # Equal octets are not looked for: only an object that several messages have.
    share(store, bytes(bytearray(size)), range(1, 2))
    assert count(store, "bodies") == 0
    store.tidy()
    share(store, payload, range(2, 4))
    assert count(store, "bodies") == (2 if size >= SHARED_MIN else 0)
    store.close()


#: How a message leaves its place, which is 1 of that node.
ENDS: dict[str, Callable[[ChangeSet, int], object]] = {
    "remove": lambda batch, node: batch.remove(node, 1),
    "clear": lambda batch, node: batch.clear(node),
    "drop": lambda batch, node: batch.drop(node, 0, 5),
    "put again": lambda batch, node: batch.put(node, 1, b"", b"its own"),
    "put again, empty": lambda batch, node: batch.put(node, 1, b"", b""),
    "put again, larger": lambda batch, node: batch.put(node, 1, b"", bytes(5000)),
    "spilled again": lambda batch, node: batch.put(node, 1, b"", b"its own", spilled=True),
}


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_body_goes_with_its_last_message(store: SQLiteStore, end: str, spilled: bool) -> None:
    payload = bytes(MIB)
    share(store, payload, range(3), spilled=spilled)
    for node in range(3):
        assert count(store, "pieces") == 1
        commit(store, lambda batch, node=node: ENDS[end](batch, node))  # type: ignore[misc]
        for other in range(node + 1, 3):
            assert store.read(other, [1])[0].payload == payload
    assert (count(store, "pieces"), count(store, "bodies"), count(store, "dead")) == (0, 0, 0)
    while store.tidy():
        pass
    store.close()
    assert on_disk(store) < 2 * MIB


def test_a_moved_message_takes_its_share_along(store: SQLiteStore) -> None:
    payload = bytes(5000)
    share(store, payload, range(3))
    commit(store, lambda batch: batch.move(0, 1, 9, 7, b"moved"))
    commit(store, clear(0, 1, 2))
    assert store.read(9, [7])[0].payload == payload
    # Onto a place where another body is.
    share(store, bytes(6000), range(1, 3))
    commit(store, lambda batch: batch.move(9, 7, 1, 1, b"moved again"))
    assert store.read(1, [1])[0].payload == payload
    commit(store, lambda batch: batch.remove(1, 1))
    assert [len(each.payload) for each in store.read(2, [1])] == [6000]
    assert (count(store, "pieces"), count(store, "bodies")) == (1, 1)
    store.close()


def test_what_is_cleared_in_steps_frees_its_bodies(store: SQLiteStore) -> None:
    payloads = [bytes([n % 256]) * 5000 for n in range(1500)]

    def fill(batch: ChangeSet) -> None:
        for sequence, payload in enumerate(payloads):
            batch.put(1, sequence, b"h", payload)
            batch.put(2, sequence, b"h", payload)

    commit(store, fill)
    commit(store, lambda batch: batch.clear(1))
    assert store.read(2, [1499])[0].payload == payloads[1499]
    commit(store, lambda batch: batch.drop(2, 0, 1400))
    while store.tidy():
        pass
    assert count(store, "pieces") == count(store, "bodies") == 99
    assert [each.payload for each in store.messages(2, 0, 10**6, 2**40)] == payloads[1401:]
    store.close()


def test_a_large_body_in_pieces_goes_in_steps_as_before(store: SQLiteStore) -> None:
    def fill(batch: ChangeSet) -> None:
        for index in range(9):
            batch.piece(1, 1, index, bytes(MIB))
        batch.put(1, 1, b"", b"")

    commit(store, fill)
    commit(store, lambda batch: batch.remove(1, 1))
    assert count(store, "pieces") == 8
    while store.tidy():
        pass
    assert (count(store, "pieces"), count(store, "dead")) == (0, 0)
    store.close()


def test_a_refused_batch_leaves_nothing_of_what_it_shares(store: SQLiteStore) -> None:
    payload = bytes(5000)
    commit(store, lambda batch: batch.append(9, Chunk(0, 1, 0, 0, b"c")))

    def fill(batch: ChangeSet) -> None:
        batch.put(1, 1, b"h", payload)
        batch.put(2, 1, b"h", payload)
        batch.append(9, Chunk(5, 1, 0, 0, b"behind a gap"))

    with pytest.raises(StoreRefused):
        commit(store, fill)
    assert (count(store, "pieces"), count(store, "bodies")) == (0, 0)
    share(store, payload, range(3, 5))
    assert [store.read(node, [1])[0].payload for node in (3, 4)] == [payload] * 2
    store.close()


def test_a_payload_that_is_lost_is_named_for_each_message_that_had_it(
    tmp_path: Path, store: SQLiteStore
) -> None:
    share(store, bytes(5000), range(2))
    share(store, bytes(6000), range(2, 4))
    store._file.connection.execute("DELETE FROM pieces WHERE length(data) = 5000")
    with pytest.raises(StoreDamaged, match="message 1 of node 0 has lost its payload"):
        store.read(0, [1])
    store.close()
    opened = store.open()
    assert [(each.what, each.node, each.first) for each in opened.damage] == [
        ("message", 0, 1),
        ("message", 1, 1),
    ]
    assert store.summary(0)[0] == store.summary(1)[0] == 0
    assert [store.read(node, [1])[0].payload for node in (2, 3)] == [bytes(6000)] * 2
    store.close()


def test_a_copy_of_a_store_has_what_is_shared(tmp_path: Path, store: SQLiteStore) -> None:
    share(store, bytes(MIB), range(30))
    backup(store.path, tmp_path / "copy")
    store.close()
    copy = SQLiteStore(tmp_path / "copy")
    assert copy.open().clean
    assert copy.path.stat().st_size < 2 * MIB
    assert {copy.read(node, [1])[0].payload for node in range(30)} == {bytes(MIB)}
    copy.close()
    assert check(copy.path).messages == 30


# -- stores of the version before -----------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    path.write_bytes(gzip.decompress(VERSION_1.read_bytes()))
    return path


def test_a_store_of_version_1_is_upgraded_when_it_is_opened(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = old.read_bytes()
    assert check(old).version == 1
    assert old.read_bytes() == before
    store = SQLiteStore(old)
    opened = store.open()
    assert opened.clean
    assert count_lost(store, opened, 5, shared=False) == 0
    assert f"version 1 of its schema is now {VERSION}" in caplog.text
    tables = "SELECT name, rootpage FROM sqlite_schema WHERE type = 'table'"
    rows = store._file.connection.execute(tables).fetchall()
    assert dict(rows) == roots()  # type: ignore[arg-type]
    payload = bytes(MIB)
    share(store, payload, range(50, 60))
    commit(store, lambda batch: batch.remove(5, 4))
    while store.tidy():
        pass
    assert store.read(50, [1])[0].payload == payload
    assert on_disk(store) < 4 * MIB
    store.close()
    caplog.clear()
    again = SQLiteStore(old)
    assert again.open().clean
    assert not caplog.records
    again.close()
    assert check(old).version == VERSION


def test_a_store_of_version_1_is_upgraded_by_command(old: Path) -> None:
    assert upgrade(old) == (1, VERSION)
    store = SQLiteStore(old)
    assert count_lost(store, store.open(), 5, shared=False) == 0
    store.close()


def test_an_upgraded_store_that_was_killed_is_whole(old: Path, tmp_path: Path) -> None:
    store = SQLiteStore(old)
    store.open()
    share(store, bytes(5000), range(50, 60))
    left = tmp_path / "left.db"
    for suffix in ("", "-wal"):
        shutil.copyfile(str(old) + suffix, str(left) + suffix)
    store.close()
    # The first page of the file still has version 1; that in the log does not.
    assert check(left).version == VERSION
    again = SQLiteStore(left)
    opened = again.open()
    assert not opened.damage
    assert count_lost(again, opened, 5, shared=False) == 0
    assert again.read(59, [1])[0].payload == bytes(5000)
    again.close()


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_damaged_store_of_version_1_is_saved(old: Path, upgraded: bool) -> None:
    if upgraded:
        upgrade(old)
    for page in range(15, old.stat().st_size // PAGE, 7):
        flip(old, page * PAGE + 500)
    store = SQLiteStore(old)
    opened = store.open()
    assert opened.damage
    assert 0 < count_lost(store, opened, 5, shared=False) < 125
    share(store, bytes(5000), range(50, 60))
    store.close()
    assert check(old).damage == ()


def test_a_store_without_a_version_is_refused(tmp_path: Path) -> None:
    store = known_store(tmp_path / "store", 1)
    store._file.connection.pragma("user_version", 0)
    store.close()
    with pytest.raises(AmqpError, match="version 0 of its schema"):
        store.open()
