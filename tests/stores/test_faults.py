"""A durable store under killed processes, failing disks and flipped bits: real files, real faults."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import committer
import pytest
from committer import BATCHES, COUNT, payload
from disks import PowerCut, Renames, disk
from known_store import KNOWN, count_lost, flip, known_batch, known_store

from amqp_rt.errors import AmqpError
from amqp_rt.stores import sqlite_files
from amqp_rt.stores.base import (
    ChangeSet,
    Chunk,
    OpenResult,
    StoreBusy,
    StoreDamaged,
    StoreFailed,
    StoreFull,
)
from amqp_rt.stores.locks import FileLock
from amqp_rt.stores.pages import PAGE
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.stores.sqlite_files import MIGRATIONS, VERSION, StoreFile, backup, check, upgrade

pytestmark = [
    pytest.mark.req("B7", "B26"),
    pytest.mark.skipif(sys.platform == "win32", reason="kills, limits and copies of open files"),
]

COMMITTER = Path(committer.__file__)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("amqp_rt.store").setLevel(logging.CRITICAL + 1)
    yield
    logging.getLogger("amqp_rt.store").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "store"
    known_store(path).close()
    return path


def fresh(folder: Path, base: Path, *suffixes: str) -> Path:
    """Copy a store to *folder*, replacing the previous copy."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for suffix in ("", *suffixes):
        shutil.copy(f"{base}{suffix}", folder / f"store{suffix}")
    return folder / "store"


# -- damage --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_flipped_bit_costs_what_was_on_its_page(
    base: Path, tmp_path: Path, long_run: bool
) -> None:
    size = base.stat().st_size
    chance = random.Random(1)
    offsets = (
        list(range(0, size, 509))  # eight of each page, which fall on every place of one
        if long_run
        else [page * PAGE + chance.randrange(PAGE) for page in range(size // PAGE)]
    )
    for offset in offsets:
        path = fresh(tmp_path / "x", base)
        flip(path, offset, chance.randrange(8))
        store = SQLiteStore(path)
        opened = store.open()
        assert opened.damage, offset
        assert opened.aside is not None
        assert Path(opened.aside).is_file()
        assert count_lost(store, opened) <= 25, (offset, opened)
        store.commit(known_batch(KNOWN))
        store.close()
        assert store.open() == OpenResult(clean=True)
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["zeros", "swapped", "garbage"])
def test_pages_that_are_whole_but_wrong_are_found(base: Path, tmp_path: Path, what: str) -> None:
    chance = random.Random(2)
    for _ in range(12):
        path = fresh(tmp_path / "x", base)
        data = bytearray(path.read_bytes())
        one, two = (PAGE * n for n in sorted(chance.sample(range(len(data) // PAGE), 2)))
        first, second = data[one : one + PAGE], data[two : two + PAGE]
        if what == "swapped":
            data[one : one + PAGE], data[two : two + PAGE] = second, first
        else:
            data[one : one + PAGE] = bytes(PAGE) if what == "zeros" else chance.randbytes(PAGE)
        path.write_bytes(data)
        store = SQLiteStore(path)
        opened = store.open()
        assert opened.damage
        count_lost(store, opened)
        store.close()


def test_what_is_left_of_a_truncated_store_is_saved(base: Path, tmp_path: Path) -> None:
    size = base.stat().st_size
    for length in [0, 1, 100, PAGE, PAGE + 1, size // 3, size // 2, size - PAGE, size - 1]:
        path = fresh(tmp_path / "x", base)
        os.truncate(path, length)
        store = SQLiteStore(path)
        if 0 < length < PAGE:
            # Too little is left to identify the file: an operator has to decide.
            try:
                opened = store.open()
            except StoreFailed:
                continue
        else:
            opened = store.open()
        assert opened.damage, length
        count_lost(store, opened)
        store.close()


def test_many_damaged_pages(base: Path, tmp_path: Path) -> None:
    size = base.stat().st_size
    for seed in range(8):
        chance = random.Random(seed)
        path = fresh(tmp_path / "x", base)
        for _ in range(10):
            flip(path, chance.randrange(size))
        store = SQLiteStore(path)
        count_lost(store, store.open())
        store.close()


def test_damage_that_comes_while_it_is_open_is_never_served(tmp_path: Path) -> None:
    path = tmp_path / "store"
    known_store(path, 40).close()
    store = SQLiteStore(path)
    store.open()
    for page in range(1, path.stat().st_size // PAGE):
        flip(path, page * PAGE + 2000)
    for node in (1, 2, 3):
        with pytest.raises(StoreDamaged, match=r"page \d+ is damaged"):
            store.messages(node, 0, 10**6, 2**40)
    store.close()
    opened = store.open()
    assert not opened.clean
    assert opened.damage
    store.close()


def test_a_log_that_is_damaged_while_it_is_open_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = known_store(path)
    log = Path(f"{path}-wal")
    for offset in range(3000, log.stat().st_size, PAGE):
        flip(log, offset)
    with pytest.raises(apsw.IOError, match=r"frame \d+ of the log is damaged"):
        store._file.checkpoint()
    store.close()


# -- the log ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unclean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store in its state after a kill, with everything in the log."""
    folder = tmp_path_factory.mktemp("unclean")
    store = known_store(folder / "open", 6)
    for suffix in ("", "-wal"):
        shutil.copy(f"{store.path}{suffix}", folder / f"store{suffix}")
    store.close()
    return folder / "store"


def test_what_a_kill_leaves_is_whole(unclean: Path, tmp_path: Path) -> None:
    store = SQLiteStore(fresh(tmp_path / "x", unclean, "-wal"))
    opened = store.open()
    assert opened == OpenResult(clean=False)
    assert count_lost(store, opened, 6) == 0
    store.close()
    assert store.open() == OpenResult(clean=True)
    store.close()


@pytest.mark.parametrize("what", ["garbage", "zeros", "copy", "half a frame"])
def test_a_torn_end_of_the_log_is_no_damage(unclean: Path, tmp_path: Path, what: str) -> None:
    for frames in (1, 3):
        path = fresh(tmp_path / "x", unclean, "-wal")
        log = Path(f"{path}-wal")
        data = log.read_bytes()
        length = (PAGE + 24) * frames
        tail = {
            "garbage": random.Random(frames).randbytes(length),
            "zeros": bytes(length),
            "copy": data[-length:],
            "half a frame": data[-length : -length // 2],
        }[what]
        log.write_bytes(data + tail)
        store = SQLiteStore(path)
        opened = store.open()
        assert opened == OpenResult(clean=False)
        assert count_lost(store, opened, 6) == 0
        store.close()


def test_a_log_cut_anywhere_loses_whole_batches_from_its_end(unclean: Path, tmp_path: Path) -> None:
    size = Path(f"{unclean}-wal").stat().st_size
    chance = random.Random(3)
    for length in sorted(chance.randrange(size) for _ in range(12)):
        path = fresh(tmp_path / "x", unclean, "-wal")
        os.truncate(f"{path}-wal", length)
        store = SQLiteStore(path)
        opened = store.open()
        assert not opened.damage, length
        count = len(store.facts("kind"))
        assert count_lost(store, opened, count) == 0
        store.close()


@pytest.mark.slow
def test_damage_in_what_was_committed_is_told_from_a_torn_end(
    unclean: Path, tmp_path: Path, brief_run: bool, long_run: bool
) -> None:
    size = Path(f"{unclean}-wal").stat().st_size
    frame = PAGE + 24
    count = (size - 32) // frame
    chance = random.Random(4)
    offsets = [32 + n * frame + chance.randrange(frame) for n in range(count)]
    # Every field of a frame's header, and of the log's.
    offsets += [32 + (count // 2) * frame + at for at in range(24)] + list(range(32))
    if long_run:
        offsets = list(range(0, size, 509))
    for offset in offsets[:: 3 if brief_run else 1]:
        path = fresh(tmp_path / "x", unclean, "-wal")
        flip(Path(f"{path}-wal"), offset, chance.randrange(8))
        store = SQLiteStore(path)
        opened = store.open()
        if (offset - 32) // frame == count - 1 and not opened.damage:
            # The very last frame: indistinguishable from a torn write.
            assert count_lost(store, opened, len(store.facts("kind"))) == 0
        else:
            count_lost(store, opened, 6)
        store.close()


# -- disks that fail -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_write_that_fails_stops_the_store_until_it_is_opened_again(
    tmp_path: Path, long_run: bool
) -> None:
    """The n-th call of the disk fails, for every n, with the errors of fsync and write."""
    number = 0
    done = False
    while not done:
        number += 1 if long_run else 1 + number // 8
        path = tmp_path / str(number)
        known_store(path, 2).close()

        def before(what: str, calls: int, fatal: int = number) -> None:
            if calls >= fatal:
                raise apsw.IOError(f"{what} {calls} fails")

        with disk(before) as bad:
            store = SQLiteStore(path, vfs=bad.name)
            kept = 2
            try:
                store.open()
                for n in range(2, 6):
                    store.commit(known_batch(n))
                    kept = n + 1
                done = True
            except StoreFailed:
                with pytest.raises(StoreFailed):
                    store.commit(known_batch(kept))
            store.close()
        store = SQLiteStore(path)
        opened = store.open()
        assert not opened.damage
        count = len(store.facts("kind"))
        assert count in (kept, kept + 1)
        assert count_lost(store, opened, count) == 0
        store.close()


def test_a_full_disk_refuses_a_batch_as_a_whole_and_goes_on(tmp_path: Path) -> None:
    room = [True]

    def before(what: str, calls: int) -> None:
        if what == "write" and not room[0]:
            raise apsw.FullError("no room")

    with disk(before) as bad:
        store = SQLiteStore(tmp_path / "store", vfs=bad.name)
        store.open()
        for n in range(4):
            store.commit(known_batch(n))
        room[0] = False
        for _ in range(3):
            with pytest.raises(StoreFull):
                store.commit(known_batch(4))
            assert count_lost(store, OpenResult(True), 4) == 0
        room[0] = True
        store.commit(known_batch(4))
        assert count_lost(store, OpenResult(True), 5) == 0
        store.close()
        assert store.open() == OpenResult(clean=True)
        assert count_lost(store, OpenResult(True), 5) == 0
        store.close()


def test_a_small_disk_is_named_with_what_is_free_and_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reserve is kept so that consumed messages can be deleted: without room for it, no message is taken."""

    def allocate(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level(logging.WARNING, "amqp_rt.store")
    monkeypatch.setattr(os, "posix_fallocate", allocate, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=6 << 20))
    store = SQLiteStore(tmp_path / "store")
    store.open()
    said = f"6.0 MiB are free in {tmp_path}, and 8 MiB are needed as a reserve, beside the messages"
    assert [each.getMessage() for each in caplog.records] == [
        f"{store.path}: {said}; until there is room, durable messages are refused"
    ]
    with pytest.raises(StoreFull, match=f"there is no room for {store.path}: {said}"):
        store.commit(known_batch(0))
    monkeypatch.undo()
    store.commit(known_batch(0))
    store.close()


def test_a_limit_of_the_operating_system_is_a_full_disk(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "from amqp_rt.stores.base import ChangeSet, StoreFull\n"
        "from amqp_rt.stores.sqlite import SQLiteStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = SQLiteStore(sys.argv[1]); store.open()\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))\n"
        "kept = 0\n"
        "try:\n"
        "    while True:\n"
        "        batch = ChangeSet(); batch.put(1, kept, b'', bytes(50_000)); store.commit(batch); kept += 1\n"
        "except StoreFull: pass\n"
        "assert store.summary(1)[0] == kept, kept\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "batch = ChangeSet(); batch.put(1, kept, b'', bytes(50_000)); store.commit(batch)\n"
        "assert store.summary(1)[0] == kept + 1\n"
        "store.close(); assert store.open().clean; store.close()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr.decode()


def test_what_was_consumed_is_taken_away_from_a_full_disk(tmp_path: Path) -> None:
    size = 32 * 1024 * 1024
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    store = SQLiteStore(tmp_path / "store")
    try:
        store.open()
        kept = 0
        while True:
            batch = ChangeSet()
            for sequence in range(kept, kept + 50):
                batch.put(1, sequence, b"head", bytes(1000))
            try:
                store.commit(batch)
            except StoreFull:
                break
            kept += 50
        assert store.summary(1) == (kept, kept * 1000, 0, kept - 1)
        ballast = tmp_path / "of somebody else"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(StoreFull):
            store.commit(batch)
        for first in range(0, kept - 50, 50):
            gone = ChangeSet()
            for sequence in range(first, first + 50):
                gone.remove(1, sequence)
            store.commit(gone)
        assert store.summary(1)[:3] == (50, 50_000, kept - 50)
        ballast.unlink()
        store.commit(batch)
        assert store.summary(1)[0] == 100
        store.close()
        assert store.open() == OpenResult(clean=True)
    finally:
        store.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


# -- deaths ----------------------------------------------------------------------------------------------


def check_committed(path: Path, told: int) -> None:
    """Check that all reported batches are present, and none in part."""
    store = SQLiteStore(path)
    opened = store.open()
    assert not opened.damage
    facts = dict(store.facts("last"))
    last = int(facts.get(b"batch", b"-1"))
    assert last in (told, told + 1)
    expected = range(max(last - 2, 0) * COUNT, (last + 1) * COUNT)
    found = store.messages(1, 0, 10**6, 2**40)
    assert [message.sequence for message in found] == list(expected)
    assert all(message.payload == payload(message.sequence) for message in found)
    moved = [n * COUNT + at for n in range(max(last - 2, 0)) for at in (COUNT - 2, COUNT - 1)]
    assert [head.sequence for head in store.heads(2)] == moved
    for node, kept in ((3, 1), (4, 2), (5, 2)):
        shared = store.messages(node, 0, 10**6, 2**40)
        assert [message.sequence for message in shared] == list(range(last + 1))[-kept:]
        assert all(each.payload == payload(each.sequence * COUNT + 9) for each in shared)
    bodies = store._file.connection.execute("SELECT count(*) FROM pieces").get
    assert bodies == min(last + 1, 2)
    store.close()


def last_of(lines: bytes) -> int:
    numbers = [int(line) for line in lines.splitlines() if line.isdigit()]
    return numbers[-1] if numbers else -1


@pytest.mark.slow
def test_nothing_reported_is_lost_by_a_kill_at_any_time(tmp_path: Path, long_run: bool) -> None:
    chance = random.Random(5)
    told = -1
    for _ in range(100 if long_run else 5):
        child = subprocess.Popen(
            [sys.executable, COMMITTER, tmp_path / "store"], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        lines = b"".join(child.stdout.readline() for _ in range(chance.randrange(1, 60)))
        child.send_signal(signal.SIGKILL)
        lines += child.communicate()[0]
        # A torn last line was reported as well; the rest after it is not a line.
        told = max(told, last_of(lines))
        check_committed(tmp_path / "store", told)


@pytest.mark.slow
def test_nothing_reported_is_lost_by_a_kill_at_any_call_of_the_disk(
    tmp_path: Path, brief_run: bool, long_run: bool
) -> None:
    whole = subprocess.run(
        [sys.executable, COMMITTER, tmp_path / "count", "0"], capture_output=True, check=True
    )
    calls = int(whole.stdout.split()[-1])
    assert last_of(whole.stdout) == BATCHES - 1
    step = 1 if long_run else calls // (4 if brief_run else 12)

    def kill_at(fatal: int) -> None:
        path = tmp_path / str(fatal)
        run = subprocess.run(
            [sys.executable, COMMITTER, path, str(fatal)], capture_output=True, check=False
        )
        assert run.returncode == -signal.SIGKILL
        check_committed(path, last_of(run.stdout))

    with ThreadPoolExecutor(os.cpu_count()) as several:
        for _ in several.map(kill_at, range(1, calls + 1, step)):
            pass  # or an assertion that failed


@pytest.mark.slow
def test_nothing_is_lost_when_the_power_goes(
    tmp_path: Path, long_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that were not synchronized are present in part, in any order and by sectors."""
    # So that it is cut in the midst of a checkpoint too.
    monkeypatch.setattr(sqlite_files, "CHECKPOINT_FRAMES", 40)
    at, done = 0, False
    while not done:
        at += 1 if long_run else 1 + at // 12
        for seed in range(5 if long_run else 1):
            path = tmp_path / f"{at}-{seed}"
            known_store(path, 2).close()
            cut = PowerCut(at)
            store = SQLiteStore(path, vfs=cut.name)
            kept = 2
            try:
                store.open()
                for n in range(2, 8):
                    store.commit(known_batch(n))
                    kept = n + 1
                    store.tidy()
                done = True
            except StoreFailed:
                pass
            store.close()
            cut.unregister()
            cut.leave(random.Random(at * 10 + seed))
            store = SQLiteStore(path)
            opened = store.open()
            count = len(store.facts("kind"))
            assert count in (kept, kept + 1)
            assert count_lost(store, opened, count) == 0
            # A torn last batch cannot be distinguished from a damaged one.
            assert all(damage.what == "batch" for damage in opened.damage), opened
            store.close()


def test_a_commit_is_synchronized_before_it_returns(tmp_path: Path) -> None:
    calls: list[str] = []
    with disk(lambda what, _: calls.append(what)) as made:
        store = SQLiteStore(tmp_path / "store", vfs=made.name)
        store.open()
        for n in range(20):
            calls.clear()
            store.commit(known_batch(n))
            assert calls[-1] == "sync"
            assert "write" in calls
        store.close()


# -- opening: locks and foreign files --------------------------------------------------------------------


def test_a_second_opening_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store")
    store.open()
    with pytest.raises(StoreBusy, match=f"in use by process {os.getpid()}"):
        SQLiteStore(tmp_path / "store").open()
    program = f"from amqp_rt.stores.sqlite import *; SQLiteStore({str(store.path)!r}).open()"
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "StoreBusy" in other.stderr
    assert f"process {os.getpid()}" in other.stderr
    store.close()
    again = SQLiteStore(tmp_path / "store")
    again.open()
    again.close()


def test_the_lock_of_a_file_that_its_holder_deletes_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have opened the file before that, and lock it afterwards."""
    first, second, third = (FileLock(tmp_path / "lock") for _ in range(3))
    assert first.acquire()
    opens = os.open

    def open_late(*arguments: Any) -> int:
        file = opens(*arguments)
        first.release(remove=True)
        return file

    monkeypatch.setattr(os, "open", open_late)
    assert second.acquire()
    assert (tmp_path / "lock").exists()
    monkeypatch.undo()
    assert not third.acquire(), "two processes would hold the lock"
    second.release()
    assert third.acquire()
    third.release(remove=True)
    assert not (tmp_path / "lock").exists()


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("Dear Sir or Madam, " * 1000)
    foreign = tmp_path / "foreign.db"
    other = apsw.Connection(str(foreign))
    other.execute("CREATE TABLE other (x)")
    other.close()
    for path in (letter, foreign):
        before = path.read_bytes()
        with pytest.raises(StoreFailed, match="is no store"):
            SQLiteStore(path).open()
        assert path.read_bytes() == before


def test_a_path_without_its_folder_is_refused_and_makes_none(tmp_path: Path) -> None:
    store = known_store(tmp_path / "store", 1)
    store.close()
    for mistyped in (tmp_path / "no" / "such", tmp_path / "store"):
        sentence = f"there is no folder {mistyped}; make it, or give another path"
        with pytest.raises(StoreFailed, match=f"store cannot be opened: {sentence}"):
            SQLiteStore(mistyped / "store").open()
        with pytest.raises(StoreFailed, match=f"could not be copied to .*copy: {sentence}"):
            backup(store.path, mistyped / "copy")
    assert not (tmp_path / "no").exists()


def test_a_folder_is_no_path_of_a_store(tmp_path: Path) -> None:
    sentence = f"{tmp_path} cannot be opened: it is a folder; give the path of a file"
    with pytest.raises(StoreFailed, match=sentence):
        SQLiteStore(tmp_path).open()
    for call in (check, upgrade, partial(backup, to=tmp_path / "copy")):
        with pytest.raises(StoreFailed, match=f"{tmp_path} is a folder"):
            call(tmp_path)
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*")), "no lock is made beside it"


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.EACCES, "this user may not read and write in {folder}; permit that, or give"),
        (errno.EROFS, "{folder} is on a read-only file system; give a path on another one"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(
    number: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, for whom no folder is closed."""

    def refuse(path: Path, *options: object) -> int:
        raise OSError(number, os.strerror(number), str(path))

    known_store(tmp_path / "old", 1).close()
    monkeypatch.setattr(os, "access", lambda path, *options, **more: path != tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    for name in ("old", "new"):
        with pytest.raises(StoreFailed) as refused:
            SQLiteStore(tmp_path / name).open()
        said = sentence.format(folder=tmp_path)
        assert refused.value.description.startswith(f"{tmp_path / name} cannot be opened: {said}")
    with pytest.raises(StoreFailed, match=r"old could not be copied to .*new: "):
        backup(tmp_path / "old", tmp_path / "new")


def test_a_file_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    known_store(path, 1).close()
    closed = tmp_path / "store.lock"

    def refuse(file: Path, *options: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr(os, "access", lambda path, *options, **more: path != closed)
    monkeypatch.setattr(os, "open", refuse)
    said = f"this user may not read and write {closed}; permit that, or give another path"
    with pytest.raises(StoreFailed, match=f"{path} cannot be opened: {said}"):
        SQLiteStore(path).open()


def set_version(path: Path, version: int) -> None:
    file = StoreFile(path)
    file._connect()
    file.connection.pragma("user_version", version)
    file._disconnect(checkpoint=True)


def test_a_store_of_a_later_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    known_store(path, 1).close()
    set_version(path, VERSION + 1)
    with pytest.raises(AmqpError, match="written by a later release: version"):
        SQLiteStore(path).open()
    with pytest.raises(AmqpError, match="written by a later release: version"):
        upgrade(path)


def test_migrations_run_in_order_and_as_one(tmp_path: Path) -> None:
    path = tmp_path / "store"
    known_store(path, 1).close()
    steps = (
        *MIGRATIONS,
        "CREATE TABLE later (x INTEGER) STRICT",
        "INSERT INTO later VALUES (7)",
    )
    with pytest.raises(StoreFailed, match="no such table"):
        StoreFile(path).migrate((*steps, "INSERT INTO nowhere VALUES (1)"))
    assert upgrade(path) == (VERSION, VERSION)
    assert StoreFile(path).migrate(steps) == (VERSION, VERSION + 2)
    with pytest.raises(AmqpError, match="later release"):
        SQLiteStore(path).open()


def test_an_interrupted_rescue_is_finished(base: Path, tmp_path: Path) -> None:
    """Between the last steps of a rescue there is no store, but a saved one and the log of the old one."""
    path = fresh(tmp_path / "x", base)
    path.rename(f"{path}.saved")
    Path(f"{path}-wal").write_bytes(b"of the damaged file")
    store = SQLiteStore(path)
    assert store.open() == OpenResult(clean=True)
    assert count_lost(store, OpenResult(True)) == 0
    store.close()
    assert len(list(path.parent.glob("*.damaged-*-wal"))) == 1
    shutil.copy(path, f"{path}.saved")  # Not needed any more.
    assert store.open() == OpenResult(clean=True)
    store.close()
    assert not Path(f"{path}.saved").exists()


def test_a_log_is_trimmed_up_to_a_hole(tmp_path: Path) -> None:
    """Lost chunks leave a hole; trimming within it drops all chunks before it."""
    store = SQLiteStore(tmp_path / "store")
    store.open()
    batch = ChangeSet()
    for offset in range(0, 50, 10):
        batch.append(6, Chunk(offset, 10, 0, 0, bytes(100)))
    store.commit(batch)
    store._file.connection.execute("DELETE FROM chunks WHERE place % 256 = 20")
    assert [chunk.offset for chunk in store.chunks(6, 0, 1_000)] == [0, 10, 30, 40]
    for offset, left in [(19, [10, 30, 40]), (20, [30, 40]), (29, [30, 40]), (30, [30, 40])]:
        batch = ChangeSet()
        batch.trim(6, offset)
        store.commit(batch)
        first = store.extent(6)[0]
        assert [chunk.offset for chunk in store.chunks(6, first, 1_000)] == left, offset
    store.close()


# -- names -----------------------------------------------------------------------------------------------


def test_a_new_store_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames = Renames(monkeypatch)
    store = SQLiteStore(tmp_path / "store")
    store.open()
    assert renames.names == ["store"]
    assert not renames.unsafe
    store.close()


def test_a_copy_has_its_name_on_the_disk(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames = Renames(monkeypatch)
    backup(base, tmp_path / "copy")
    assert renames.names == ["copy"]
    assert not renames.unsafe


def test_each_step_of_a_rescue_is_on_the_disk_before_what_relies_on_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved file has its name before the damaged file loses its own."""
    path = fresh(tmp_path / "x", base)
    flip(path, 5 * PAGE, 3)
    renames = Renames(monkeypatch)
    store = SQLiteStore(path)
    opened = store.open()
    assert opened.aside is not None
    aside = Path(opened.aside).name
    assert [name for name in renames.names if "-wal" not in name] == [
        f"{path.name}.saved",
        aside,
        path.name,
    ]
    assert aside not in renames.early
    assert not renames.unsafe
    store.close()


# -- copies ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_backup_is_taken_while_a_store_is_written(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, COMMITTER, tmp_path / "store"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        for n in range(5):
            told = int(child.stdout.readline())
            for _ in range(40):
                told = int(child.stdout.readline())
            backup(tmp_path / "store", tmp_path / f"copy{n}")
            copy = SQLiteStore(tmp_path / f"copy{n}")
            assert copy.open() == OpenResult(clean=True)
            last = int(dict(copy.facts("last"))[b"batch"])
            copy.close()
            assert last >= told
            check_committed(tmp_path / f"copy{n}", last)
        with pytest.raises(StoreFailed, match="there already"):
            backup(tmp_path / "store", tmp_path / "copy0")
        with pytest.raises(StoreBusy):
            check(tmp_path / "store")
    finally:
        child.kill()
        child.communicate()


def test_a_damaged_store_is_not_backed_up(base: Path, tmp_path: Path) -> None:
    path = fresh(tmp_path / "x", base)
    flip(path, path.stat().st_size - 2000)
    with pytest.raises(StoreDamaged, match="nothing was copied"):
        backup(path, tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))


def test_check_names_damage_and_changes_nothing(base: Path, tmp_path: Path) -> None:
    path = fresh(tmp_path / "x", base)
    found = check(path)
    assert (found.clean, found.damage, found.messages) == (True, (), 27 * KNOWN + 3)
    flip(path, 20 * PAGE + 7)
    before = path.read_bytes()
    assert check(path).damage
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.damaged*"))


# -- large numbers of changes ----------------------------------------------------------------------------


@pytest.mark.slow
def test_space_is_given_back_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = SQLiteStore(path)
    store.open()
    for n in range(40):
        batch = ChangeSet()
        for sequence in range(n * 500, n * 500 + 500):
            batch.put(1, sequence, b"", bytes(1000))
        store.commit(batch)
    batch = ChangeSet()
    for index in range(100):
        batch.piece(2, 1, index, bytes(100_000))
    batch.put(2, 1, b"", b"")
    store.commit(batch)
    store.close()
    full = path.stat().st_size
    assert full > 29_000_000
    store.open()
    batch = ChangeSet()
    batch.clear(1)
    batch.remove(2, 1)
    store.commit(batch)
    assert store.summary(1)[0] == store.summary(2)[0] == 0
    steps = 0
    while store.tidy():
        steps += 1
    assert steps > 20
    store.close()
    assert path.stat().st_size < full // 3
    assert store.open() == OpenResult(clean=True)
    store.close()
