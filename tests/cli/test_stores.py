"""``amqp-rt store``, as scripts rely on it: real processes, their output and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import committer
import pytest

from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.stores.sqlite_files import VERSION

pytestmark = pytest.mark.req("B26")


def store(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "amqp_rt.cli", "store", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kept = SQLiteStore(tmp_path / "broker.db")
    kept.open()
    for sequence in range(100):
        batch = ChangeSet()
        batch.put(sequence % 2, sequence, b"head", bytes(1000))
        batch.put_fact("fact", b"%d" % sequence, b"")
        kept.commit(batch)
    kept.close()
    return kept.path


def test_check_says_what_is_there(path: Path) -> None:
    done = store("check", f"sqlite:{path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"schema version {VERSION}" in done.stdout
    assert "messages: 100 in 2 nodes" in done.stdout
    assert "facts:    100" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="files that are open cannot be deleted")
def test_check_leaves_no_files_of_its_own(path: Path) -> None:
    copy = path.with_name("copy.db")
    store("backup", path, copy)
    before = {each.name: each.read_bytes() for each in path.parent.iterdir()}
    assert store("check", copy).returncode == 0
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == before
    # Those of a broker stay.
    assert path.with_name("broker.db.lock").exists()
    assert store("check", path).returncode == 0
    assert path.with_name("broker.db.lock").exists()


@pytest.mark.parametrize("url", ["postgresql://ada:secret@host/orders", "memory:"])
def test_only_stores_in_files_are_checked(url: str) -> None:
    done = store("check", url)
    kind = url.partition(":")[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{kind}: is no file of SQLite, and only those are checked" in " ".join(
        done.stderr.split()
    )
    assert "secret" not in done.stderr


@pytest.mark.slow
def test_check_names_every_damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for page in range(20, 23):
        data[page * 4096 + 1000] ^= 1
    path.write_bytes(data)
    done = store("check", path)
    assert (done.returncode, done.stderr) == (1, "")
    damaged = [line for line in done.stdout.splitlines() if line.startswith("damaged: ")]
    assert len(damaged) >= 3
    assert all("is damaged" in line for line in damaged)
    assert path.read_bytes() == data
    kept = SQLiteStore(path)
    opened = kept.open()
    assert len(opened.damage) == len(damaged)
    kept.close()
    assert store("check", path).returncode == 0


@pytest.mark.slow
def test_backup_while_a_store_is_in_use(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, committer.__file__, tmp_path / "store"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        child.stdout.readline()
        in_use = store("check", tmp_path / "store")
        assert in_use.returncode == 1
        assert in_use.stderr.startswith("Error: ")
        assert f"in use by process {child.pid}" in in_use.stderr
        assert f"in use by process {child.pid}" in store("upgrade", tmp_path / "store").stderr
        done = store("backup", tmp_path / "store", tmp_path / "copy")
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        child.kill()
        child.communicate()
    assert store("check", tmp_path / "copy").returncode == 0


def test_upgrade_of_what_is_up_to_date(path: Path) -> None:
    done = store("upgrade", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"up to date: schema version {VERSION}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "backup", "upgrade"])
def test_a_users_mistake_is_one_sentence(tmp_path: Path, command: str) -> None:
    letter = tmp_path / "letter"
    letter.write_text("Dear Sir or Madam")
    more = [tmp_path / "copy"] if command == "backup" else []
    for wrong, sentence in [
        (tmp_path / "nothing", "there is no store"),
        (tmp_path / "no folder" / "nothing", "there is no store"),
        (letter, "is no store"),
    ]:
        done = store(command, wrong, *more)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("Error: ")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
    assert store(command).returncode == 2
