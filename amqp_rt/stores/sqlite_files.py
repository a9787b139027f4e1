"""File of a SQLite store: its schema, and how it is created, verified, rescued, copied and upgraded.

:class:`StoreFile` is that file with everything beside it: the lock, the write-ahead log (WAL), the room
reserved on the disk, and the file for spilled messages. :mod:`.sqlite` reads and writes the rows.
:func:`check`, :func:`backup` and :func:`upgrade` are for the command line.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from ..config_files import sync_folder
from ..errors import AmqpError
from . import salvage
from .base import (
    PIECE_MAX,
    SEQUENCE_MAX,
    Damage,
    OpenResult,
    StoreBusy,
    StoreDamaged,
    StoreFailed,
)
from .locks import FileLock
from .pages import LOG_HEADER, PAGE, PENDING_PAGE, RESERVED, USABLE, Files, PageDamaged

__all__ = [
    "MIGRATIONS",
    "VERSION",
    "Contents",
    "StoreFile",
    "backup",
    "check",
    "described",
    "upgrade",
]

_log = logging.getLogger("amqp_rt.store")

#: ``AMQP``: identifies a store among SQLite files, also to the command ``file``.
APPLICATION_ID: Final = 0x414D5150
#: Bits of a sequence number and of the index of a piece.
_BITS: Final = SEQUENCE_MAX.bit_length()
_PIECE_BITS: Final = PIECE_MAX.bit_length()

#: Several messages may share one body. With the last of them the body's first piece is deleted at once,
#: like the payload of any message; a body of more pieces is large, and the rest is deleted in steps.
_SHARED_BODIES: Final = f"""
CREATE INDEX bodies_by_body ON bodies (body);
CREATE TRIGGER body_freed AFTER DELETE ON bodies
WHEN NOT EXISTS (SELECT 1 FROM bodies WHERE body = OLD.body)
BEGIN
    DELETE FROM pieces WHERE id = OLD.body << {_PIECE_BITS};
    INSERT OR REPLACE INTO dead
        SELECT OLD.body << {_PIECE_BITS}, OLD.body << {_PIECE_BITS} | {PIECE_MAX} WHERE EXISTS (
            SELECT 1 FROM pieces WHERE id
            BETWEEN OLD.body << {_PIECE_BITS} AND OLD.body << {_PIECE_BITS} | {PIECE_MAX}
        );
END;
"""  # noqa: S608
#: Scripts that upgrade a store from version n, counted from 1, to n + 1, in order. New tables come after
#: all others, so that the existing ones begin at the same pages as in a new store (:func:`roots`).
MIGRATIONS: Final[tuple[str, ...]] = (_SHARED_BODIES,)
VERSION: Final = 1 + len(MIGRATIONS)

#: Tables have plain rowids, so that their pages can be interpreted one by one during salvage.
SCHEMA: Final = (
    """
CREATE TABLE state (id INTEGER PRIMARY KEY, clean INTEGER NOT NULL) STRICT;
CREATE TABLE messages (
    place INTEGER PRIMARY KEY, pieces INTEGER NOT NULL, size INTEGER NOT NULL,
    head BLOB NOT NULL, payload BLOB NOT NULL
) STRICT;
CREATE TABLE bodies (place INTEGER PRIMARY KEY, body INTEGER NOT NULL) STRICT;
CREATE TABLE pieces (id INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE chunks (
    place INTEGER PRIMARY KEY, count INTEGER NOT NULL, first_ms INTEGER NOT NULL,
    last_ms INTEGER NOT NULL, latest_ms INTEGER NOT NULL, size INTEGER NOT NULL,
    before INTEGER NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE TABLE logs (
    log INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL,
    latest_ms INTEGER NOT NULL, written INTEGER NOT NULL, dropped INTEGER NOT NULL
) STRICT;
CREATE TABLE facts (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL
) STRICT;
CREATE TABLE cleared (
    id INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL
) STRICT;
CREATE TABLE dead (first INTEGER PRIMARY KEY, last INTEGER NOT NULL) STRICT;
CREATE UNIQUE INDEX facts_by_key ON facts (kind, key);
INSERT INTO state VALUES (1, 1);
"""
    + _SHARED_BODIES
)

#: Table for messages that need not last, with the columns of messages, in a file deleted on close.
_SPILL_SCHEMA: Final = """
CREATE TABLE spill.spilled (
    place INTEGER PRIMARY KEY, pieces INTEGER NOT NULL, size INTEGER NOT NULL,
    head BLOB NOT NULL, payload BLOB NOT NULL
) STRICT;
"""

#: Files beside the store that stay there.
_BESIDE: Final = ("-wal", ".lock", ".copying")
#: Frames in the WAL before they are checkpointed, that is, copied into the database.
CHECKPOINT_FRAMES: Final = 1000
#: Bytes of the WAL file that stay allocated after a checkpoint.
_LOG_BYTES: Final = 16 * 1024 * 1024
#: Bytes reserved on the disk. They are released when it is full, so that consumed messages can still
#: be deleted.
_RESERVE_BYTES: Final = 8 * 1024 * 1024
#: Bytes of the page cache.
_CACHE_BYTES: Final = 16 * 1024 * 1024
#: A store that was closed cleanly is verified too if it is no larger than this.
_VERIFIED_ANYWAY_BYTES: Final = 64 * 1024 * 1024
#: Seconds that a backup waits for another backup or a checkpoint, and seconds between two attempts.
_COPY_PATIENCE_S: Final = 30.0
_LOCK_POLL_S: Final = 0.002
#: Bytes copied at a time.
_COPY_BYTES: Final = 1024 * 1024


class StoreFile:
    """File of a store, with the lock, the WAL, the reserve and other files beside it, and the connection
    to its database.

    Args:
        path: Path of the file.
        vfs: SQLite's name of the underlying VFS, for tests of failures.
    """

    def __init__(self, path: str | os.PathLike[str], vfs: str = "") -> None:
        self.path = _real(path)
        #: Whether the disk was full and the reserve has been released.
        self.full = False
        self._vfs = vfs
        self._lock = FileLock(_beside(self.path, ".lock"))
        self._files: Files | None = None
        self._db: apsw.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether the database is connected."""
        return self._db is not None

    @property
    def connection(self) -> apsw.Connection:
        """The connection to the database.

        Raises:
            StoreFailed: The store is not open.
        """
        db = self._db
        if db is None:
            raise StoreFailed(f"{self.path} is not open")
        return db

    # -- opening and closing -----------------------------------------------------------------------

    def acquire(self) -> None:
        """Lock the store until :meth:`release`.

        Raises:
            StoreBusy: Another process or another object has it open.
            StoreFailed: The lock file cannot be made.
        """
        _refuse_folder(self.path, f"{self.path} cannot be opened")
        try:
            free = self._lock.acquire()
        except OSError as error:
            reason = reason_of(error, self.path)
            raise StoreFailed(f"{self.path} cannot be opened: {reason}") from error
        if not free:
            raise StoreBusy(f"{self.path} is in use by {self._lock.holder()}")

    def open(self) -> OpenResult:
        """Connect to the verified store and mark it as in use; create, recover or upgrade it before if
        necessary. The lock must be held."""
        finish_salvage(self.path)
        _beside(self.path, ".spill").unlink(missing_ok=True)
        if not self.path.exists():
            create(self.path, self._vfs)
        refuse_foreign(self.path)
        with _CopyLock(self.path):
            opened = self._verified()
        db = self.connection
        version = self._migrate(db, MIGRATIONS)
        if version < VERSION:
            _log.warning(
                "store upgraded: %s: version %d of its schema is now %d, which earlier releases"
                " cannot open",
                *(self.path, version, VERSION),
            )
        db.execute("UPDATE state SET clean = 0")
        self.reserve()
        if self.full:
            _log.warning(
                "%s: %s; until there is room, durable messages are refused",
                *(self.path, self.shortage()),
            )
        return opened

    def _verified(self) -> OpenResult:
        """Connect to a verified store: this one, or a new one with the data salvaged from it."""
        clean, reason, tail = self._examine()
        if not reason:
            return OpenResult(clean, tail.damage)
        _log.error("%s is damaged: %s", self.path, reason)
        self._disconnect(checkpoint=False)
        _refuse_version(self.path, salvage.version(self.path))
        found, aside = save(self.path, salvage.Pages(self.path, tail), self._vfs)
        self._connect()
        damage = (*tail.damage, *found) or (_harmless(reason),)
        return OpenResult(False, damage, aside)

    def _examine(self) -> tuple[bool, str, salvage.Tail]:
        """Connect and verify the store.

        Returns whether it was closed cleanly, the damage (empty if there is none), and the part of its
        WAL that SQLite skipped.
        """
        log = _beside(self.path, "-wal")
        if self.path.stat().st_size < PAGE:
            # SQLite would treat the file as new, and its WAL as obsolete.
            return False, "the file is empty", salvage.read_tail(log, 0, everything=True)
        try:
            self._connect()
            db = self.connection
            frames = max(db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)[0], 0)
            tail = salvage.read_tail(log, frames)
            if tail.pages or tail.lost:
                return False, tail.damage[0].reason, tail
            clean = bool(db.execute("SELECT clean FROM state").get) and not tail.damage
            size = self.path.stat().st_size
            if clean and size > _VERIFIED_ANYWAY_BYTES:
                return clean, "", tail
            if not clean:
                _log.warning("%s was not closed in good order: reading %d bytes", self.path, size)
            return clean, _verify(db, self.path), tail
        except (PageDamaged, apsw.CorruptError, apsw.NotADBError) as error:
            # Applying frames that SQLite has already checkpointed once more is harmless.
            return False, str(error), salvage.read_tail(log, 0, everything=True)

    def _connect(self) -> None:
        self._files = Files(f"amqp-rt-{id(self):x}", str(self.path), self._vfs)
        self._db = connect(self._files, self.path)

    def close(self) -> None:
        """Mark the store as closed cleanly, and disconnect. The lock is still held."""
        self.connection.execute("UPDATE state SET clean = 1")
        lock = FileLock(_beside(self.path, ".copying"))
        free = lock.acquire()
        try:
            self._disconnect(checkpoint=free)
        finally:
            lock.release()

    def _disconnect(self, *, checkpoint: bool) -> None:
        db, self._db = self._db, None
        files, self._files = self._files, None
        try:
            if db is not None:
                disconnect(db, checkpoint=checkpoint)
        finally:
            if files is not None:
                files.unregister()

    def release(self, *, made: Collection[str] = ()) -> None:
        """Release all resources without writing to the database, and delete the files of *made* that are of no use."""
        try:
            self._disconnect(checkpoint=False)
        except apsw.Error as error:
            _log.error("%s: %s", self.path, error)
        for suffix in (".spill", ".reserve"):
            _beside(self.path, suffix).unlink(missing_ok=True)
        log = _beside(self.path, "-wal")
        if "-wal" in made and log.exists() and not log.stat().st_size:
            log.unlink()
        self._lock.release(remove=".lock" in made)

    # -- operations of the command line ------------------------------------------------------------

    def inspect(self) -> Contents:
        """Do the work of :func:`check`."""
        _refuse_missing(self.path)
        refuse_foreign(self.path)
        made = [each for each in _BESIDE if not _beside(self.path, each).exists()]
        self.acquire()
        try:
            with _CopyLock(self.path, remove=".copying" in made):
                clean, reason, tail = self._examine()
                damage = list(tail.damage)
                _refuse_version(self.path, salvage.version(self.path))
                if reason:
                    pages = salvage.Pages(self.path, tail)
                    try:
                        damage += salvage.copy(pages, roots(), None)
                    finally:
                        pages.close()
                    damage = damage or [_harmless(reason)]
                size = self.path.stat().st_size
                if damage:
                    version = salvage.version(self.path) or VERSION
                    return Contents(version, False, size, -1, -1, -1, -1, tuple(damage))
                db = self.connection
                version = db.pragma("user_version")
                _refuse_version(self.path, version)
                counts: list[Any] = db.execute(
                    "SELECT (SELECT count(*) FROM messages),"
                    " (SELECT count(DISTINCT place >> ?) FROM messages),"
                    " (SELECT count(*) FROM facts), (SELECT count(*) FROM logs)",
                    (_BITS,),
                ).fetchall()
                messages, nodes, facts, logs = counts[0]
                return Contents(version, clean, size, messages, nodes, facts, logs, ())
        except (apsw.Error, OSError) as error:
            reason = reason_of(error, self.path)
            raise StoreFailed(f"{self.path} cannot be read: {reason}") from error
        finally:
            self.release(made=made)

    def migrate(self, migrations: tuple[str, ...] = MIGRATIONS) -> tuple[int, int]:
        """Do the work of :func:`upgrade` with *migrations*."""
        _refuse_missing(self.path)
        refuse_foreign(self.path)
        self.acquire()
        try:
            with _CopyLock(self.path):
                self._connect()
                version = self._migrate(self.connection, migrations)
                self._disconnect(checkpoint=True)
                return version, 1 + len(migrations)
        except (apsw.Error, OSError) as error:
            reason = reason_of(error, self.path)
            raise StoreFailed(f"{self.path} cannot be upgraded: {reason}") from error
        finally:
            self.release()

    def _migrate(self, db: apsw.Connection, migrations: tuple[str, ...]) -> int:
        """Apply the remaining *migrations* in one transaction, and return the previous version.

        Raises:
            AmqpError: The store was written by a later release.
        """
        version: int = db.pragma("user_version")
        _refuse_version(self.path, version, 1 + len(migrations))
        if version <= len(migrations):
            with db:
                for step in migrations[version - 1 :]:
                    db.execute(step)
                db.pragma("user_version", 1 + len(migrations))
        return version

    # -- room --------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserve room on the disk, and set ``full`` to whether there was too little."""
        path = _beside(self.path, ".reserve")
        try:
            with path.open("wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
                else:
                    file.write(bytes(_RESERVE_BYTES))
            self.full = False
        except OSError:
            path.unlink(missing_ok=True)
            self.full = True

    def shortage(self) -> str:
        """Return how much room there is, and how much is needed, of a store that is full."""
        needed = f"{_RESERVE_BYTES >> 20} MiB are needed as a reserve, beside the messages"
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError:
            return needed
        return f"{free / 2**20:.1f} MiB are free in {self.path.parent}, and {needed}"

    def has_room(self, size: int) -> bool:
        """Return whether the file has enough free pages to take *size* bytes without growing."""
        free = self.connection.pragma("freelist_count")
        return bool(free * USABLE >= size + _RESERVE_BYTES)

    def release_reserve(self) -> None:
        """Release the reserve and checkpoint, so that the WAL starts anew: batches that only delete need
        no more room than the WAL has then."""
        self.full = True
        _beside(self.path, ".reserve").unlink(missing_ok=True)
        self.checkpoint()

    def checkpoint_if_due(self) -> None:
        """Checkpoint the WAL if it has ``CHECKPOINT_FRAMES`` frames."""
        files = self._files
        if files is not None and files.frames >= CHECKPOINT_FRAMES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Checkpoint the WAL, unless a backup or another process is copying the database."""
        lock = FileLock(_beside(self.path, ".copying"))
        try:
            if not lock.acquire():
                return
            self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.FullError:
            _log.warning("%s: no room to copy the log into the database; it grows", self.path)
        except OSError as error:
            _log.warning("%s: the log cannot be copied into the database now: %s", self.path, error)
        finally:
            lock.release()

    def attach_spill(self) -> None:
        """Attach a file for messages that need not last, which is never synchronized."""
        db = self.connection
        path = _beside(self.path, ".spill")
        _make(path)
        db.execute("ATTACH ? AS spill", (str(path),))
        # A journal in memory, so that a batch is rolled back as a whole.
        db.execute("PRAGMA spill.journal_mode = MEMORY; PRAGMA spill.synchronous = OFF")
        db.execute(_SPILL_SCHEMA)


def _real(path: str | os.PathLike[str]) -> Path:
    """Return *path* without symbolic links.

    SQLite resolves links itself and passes the VFS the path of the file, which the VFS compares with this one. A
    service of systemd with ``DynamicUser=`` has a link as its folder. A store has one lock by whatever path it is opened.
    """
    return Path(os.path.realpath(path))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class _CopyLock:
    """Lock that prevents backups and checkpoints while it is held.

    Args:
        path: Path of the store.
        patience_s: Seconds to wait for the current holder.
        remove: Delete the file of the lock at the end.
    """

    def __init__(self, path: Path, patience_s: float = 0.0, *, remove: bool = False) -> None:
        self._path = path
        self._patience_s = patience_s
        self._remove = remove
        self._lock = FileLock(_beside(path, ".copying"))

    def __enter__(self) -> None:
        until = time.monotonic() + self._patience_s
        while not self._lock.acquire():
            if time.monotonic() >= until:
                raise StoreBusy(f"{self._path} is being copied by {self._lock.holder()}")
            time.sleep(_LOCK_POLL_S)

    def __exit__(self, *_: object) -> None:
        self._lock.release(remove=self._remove)


def _refuse_folder(path: Path, what: str) -> None:
    """Check that *path* can be that of a file. Its folder is not created, since the path may be mistyped.

    Raises:
        StoreFailed: The folder does not exist, or *path* is one itself; the text begins with *what*.
    """
    try:
        there, is_folder = path.parent.is_dir(), path.is_dir()
    except OSError as error:
        raise StoreFailed(f"{what}: {reason_of(error, path)}") from error
    if not there:
        raise StoreFailed(
            f"{what}: there is no folder {path.parent}; make it, or give another path"
        )
    if is_folder:
        raise StoreFailed(
            f"{what}: it is a folder; give the path of a file, such as {path / 'x.db'}"
        )


def _refuse_missing(path: Path) -> None:
    """Check that *path* is a file.

    Raises:
        StoreFailed: It is not.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read: {reason_of(error, path)}") from error
    if is_folder:
        raise StoreFailed(f"{path} is a folder; give the path of a file")
    if not is_file:
        raise StoreFailed(f"there is no store {path}")


def reason_of(error: Exception, path: Path) -> str:
    """Return why the store at *path* cannot be used, and what to do, for an error of SQLite or of the operating system.

    The files that the latter names are mostly those beside the store, which users do not know.
    """
    number = error.errno if isinstance(error, OSError) else None
    folder = path.parent
    if number == errno.EROFS:
        return f"{folder} is on a read-only file system; give a path on another one"
    if number in (errno.EACCES, errno.EPERM) and not _may_write(folder):
        return f"this user may not read and write in {folder}; permit that, or give another path"
    denied = number in (errno.EACCES, errno.EPERM) or isinstance(
        error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.IOError
    )
    if denied:
        for each in (path, *(_beside(path, suffix) for suffix in _BESIDE)):
            if os.path.exists(each) and not _may_write(each):
                return f"this user may not read and write {each}; permit that, or give another path"
    return str(error)


def _may_write(path: Path) -> bool:
    """Return whether this process may read and write the file *path*, or read and change the folder."""
    wanted = os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0)
    return os.access(path, wanted, effective_ids=os.access in os.supports_effective_ids)


def connect(files: Files, path: Path) -> apsw.Connection:
    """Connect to the existing database at *path* through *files*."""
    db = apsw.Connection(str(path), vfs=files.name, flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        db.pragma("locking_mode", "EXCLUSIVE")
        db.pragma("synchronous", "FULL")
        db.pragma("journal_size_limit", _LOG_BYTES)
        db.pragma("cache_size", -_CACHE_BYTES // 1024)
        # Makes a replaced row of bodies fire the trigger that a deleted one does.
        db.pragma("recursive_triggers", True)
        db.wal_autocheckpoint(0)
        # macOS: without these, syncs do not wait for the disk itself.
        db.pragma("fullfsync", True)
        db.pragma("checkpoint_fullfsync", True)
        db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        disconnect(db, checkpoint=False)
        raise
    return db


def disconnect(db: apsw.Connection, *, checkpoint: bool) -> None:
    """Close *db*, with or without a checkpoint first."""
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0 if checkpoint else 1)
    db.close(True)


def create(path: Path, vfs: str = "") -> None:
    """Create an empty store atomically."""
    made = _beside(path, ".new")
    build(made, vfs)
    os.replace(made, path)
    sync_folder(path)


def build(path: Path, vfs: str = "") -> None:
    """Create an empty store at *path*, replacing the remains of an earlier attempt."""
    for suffix in ("", "-wal", "-journal"):
        _beside(path, suffix).unlink(missing_ok=True)
    _make(path)
    files = Files(f"amqp-rt-new-{id(path):x}", str(path), vfs)
    try:
        db = apsw.Connection(str(path), vfs=files.name)
        try:
            db.reserve_bytes("main", RESERVED)
            prepare(db)
            db.pragma("locking_mode", "EXCLUSIVE")
            db.pragma("journal_mode", "wal")
            db.pragma("synchronous", "FULL")
            with db:
                db.execute(SCHEMA)
                db.pragma("user_version", VERSION)
        finally:
            db.close(True)
    finally:
        files.unregister()


def _make(path: Path) -> None:
    """Create an empty file that only its owner can read; SQLite gives its WAL the same mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def prepare(db: apsw.Connection) -> None:
    """Set the options that are stored in the file."""
    db.pragma("page_size", PAGE)
    db.pragma("auto_vacuum", "INCREMENTAL")
    db.pragma("application_id", APPLICATION_ID)


def refuse_foreign(path: Path) -> None:
    """Check that *path* is a store.

    Raises:
        StoreFailed: It is another kind of file, and is left unchanged, or it cannot be read.
    """
    try:
        known = salvage.is_store(path, APPLICATION_ID)
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read: {reason_of(error, path)}") from error
    if not known:
        raise StoreFailed(f"{path} is no store: give another path, or move that file away")


def _refuse_version(path: Path, version: int | None, latest: int = VERSION) -> None:
    """Check that this release can read a store of schema *version*, None if it is unknown.

    Raises:
        AmqpError: It cannot.
    """
    if version is not None and version < 1:
        raise AmqpError(
            f"{path} has version {version} of its schema, which no release has written",
            condition="amqp:not-allowed",
        )
    if version is not None and version > latest:
        raise AmqpError(
            f"{path} was written by a later release: version {version} of its schema, and this release"
            f" knows {latest}",
            condition="amqp:not-allowed",
        )


def _verify(db: apsw.Connection, path: Path) -> str:
    """Read everything; return the damage, "" if there is none."""
    pages = db.pragma("page_count")
    if path.stat().st_size < pages * PAGE:
        return f"the file is shorter than its {pages} pages"
    told = db.execute("PRAGMA integrity_check(1)").get
    if told != "ok":
        return str(told).replace("\n", "; ")
    broken = db.execute(
        "SELECT count(*) FROM messages WHERE pieces <> 0 AND NOT EXISTS"
        " (SELECT 1 FROM bodies JOIN pieces ON id = body << ? WHERE bodies.place = messages.place)",
        (_PIECE_BITS,),
    ).get
    return f"{broken} messages have lost their pieces" if broken else ""


def _harmless(reason: str) -> Damage:
    return Damage("page", -1, -1, -1, f"{reason}; nothing that is kept was on it")


# -- damage ------------------------------------------------------------------------------------------


def described(damage: Damage) -> str:
    """Return a sentence that describes *damage*."""
    where = "" if damage.node < 0 else f" of node {damage.node}"
    if damage.first < 0:
        return f"{damage.what}{where}: {damage.reason}"
    span = str(damage.first) if damage.first == damage.last else f"{damage.first} to {damage.last}"
    return f"{damage.what} {span}{where}: {damage.reason}"


def save(path: Path, pages: salvage.Pages, vfs: str) -> tuple[list[Damage], str]:
    """Put the store at *path* aside and a new one with its readable data in its place.

    Returns:
        The losses, and the new path of the old file.
    """
    fresh = _beside(path, ".new")
    build(fresh, vfs)
    files = Files(f"amqp-rt-save-{id(path):x}", str(fresh), vfs)
    try:
        db = connect(files, fresh)
        done = False
        try:
            damage = salvage.copy(pages, roots(), db)
            done = True
        finally:
            disconnect(db, checkpoint=done)
    finally:
        files.unregister()
        pages.close()
    aside = salvage.free_name(path)
    os.replace(fresh, _beside(path, ".saved"))
    sync_folder(path)
    os.replace(path, aside)
    finish_salvage(path, aside)
    return damage, str(aside)


def finish_salvage(path: Path, aside: Path | None = None) -> None:
    """Finish a :func:`save` that was interrupted in its last steps.

    While the damaged file is in its place, it has to be read again; afterwards the saved file is the
    store, and the WAL of the damaged file must not be applied to it.
    """
    saved = _beside(path, ".saved")
    if not saved.exists():
        return
    if path.exists():
        saved.unlink()
        return
    log = _beside(path, "-wal")
    if log.exists():
        os.replace(log, _beside(aside or salvage.free_name(path), "-wal"))
    os.replace(saved, path)
    sync_folder(path)


def roots() -> dict[str, int]:
    """Return the root pages of the tables, which are the same in every store of this version."""
    db = apsw.Connection(":memory:")
    try:
        db.reserve_bytes("main", RESERVED)
        prepare(db)
        db.execute(SCHEMA)
        sql = "SELECT name, rootpage FROM sqlite_schema WHERE type = 'table'"
        rows: list[Any] = db.execute(sql).fetchall()
        return dict(rows)
    finally:
        db.close()


# -- operations of the command line ------------------------------------------------------------------


class Contents(NamedTuple):
    """Counts of a store's contents, and its damage."""

    version: int
    clean: bool
    size: int
    messages: int
    nodes: int
    facts: int
    logs: int
    damage: tuple[Damage, ...]


def check(path: str | os.PathLike[str]) -> Contents:
    """Read everything in the store at *path*, which must not be open, and change nothing.

    Raises:
        StoreBusy: The store is open.
        StoreFailed: *path* is not a store, or cannot be read.
    """
    return StoreFile(path).inspect()


def backup(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Copy the store at *path* into the new file *to*, consistent as of one batch.

    A broker may be running on the store: meanwhile it does not checkpoint, and its WAL grows.

    Raises:
        StoreBusy: Another process is copying the store.
        StoreDamaged: The copied data is damaged.
        StoreFailed: *path* is not a store or cannot be read, or *to* exists or cannot be written.
    """
    source, target = _real(path), _real(to)
    _refuse_missing(source)
    refuse_foreign(source)
    if target.exists():
        raise StoreFailed(f"{target} is there already")
    _refuse_folder(target, f"{source} could not be copied to {target}")
    made = _beside(target, ".new")
    try:
        with _CopyLock(source, _COPY_PATIENCE_S):
            _copy_file(source, made)
            _copy_log(_beside(source, "-wal"), _beside(made, "-wal"))
        files = Files(f"amqp-rt-copy-{id(made):x}", str(made))
        try:
            db = connect(files, made)
            whole = False
            try:
                db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                wrong = _verify(db, made)
                if wrong:
                    raise StoreDamaged(f"{source} is damaged: {wrong}; nothing was copied")
                db.execute("UPDATE state SET clean = 1")
                whole = True
            finally:
                disconnect(db, checkpoint=whole)
        finally:
            files.unregister()
        os.replace(made, target)
        sync_folder(target)
    except (PageDamaged, apsw.CorruptError, apsw.NotADBError) as error:
        raise StoreDamaged(f"{source} is damaged: {error}; nothing was copied") from error
    except (apsw.Error, OSError) as error:
        reason = reason_of(error, target)
        raise StoreFailed(f"{source} could not be copied to {target}: {reason}") from error
    finally:
        for suffix in ("", "-wal"):
            _beside(made, suffix).unlink(missing_ok=True)


def _copy_file(source: Path, target: Path) -> None:
    locked = (PENDING_PAGE - 1) * PAGE
    with source.open("rb") as old, target.open("wb") as new:
        while data := old.read(
            min(_COPY_BYTES, locked - old.tell()) if old.tell() < locked else _COPY_BYTES
        ):
            new.write(data)
            if old.tell() == locked:
                # The page of SQLite's locks: it holds no data, and cannot be read on Windows.
                old.seek(PAGE, os.SEEK_CUR)
                new.seek(PAGE, os.SEEK_CUR)


def _copy_log(source: Path, target: Path) -> None:
    """Copy a WAL to which frames are being added, and which may restart once."""
    while True:
        try:
            with source.open("rb") as old, target.open("wb") as new:
                header = old.read(LOG_HEADER)
                new.write(header)
                while data := old.read(_COPY_BYTES):
                    new.write(data)
                old.seek(0)
                if old.read(LOG_HEADER) == header:
                    return
        except FileNotFoundError:
            return


def upgrade(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Upgrade the store at *path* to the schema of this release, in one transaction.

    Returns:
        The previous version and the current one.

    Raises:
        StoreBusy: The store is open.
        StoreFailed: *path* is not a store, or cannot be read or written.
        AmqpError: The store was written by a later release.
    """
    return StoreFile(path).migrate()
