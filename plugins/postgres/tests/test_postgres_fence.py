"""One broker at a time uses a store: its lock, its epoch, batches in doubt, and connections that are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from amqp_rt_postgres import PostgreSQLStore
from amqp_rt_postgres.sessions import Session
from postgresql import Cluster, running_cluster
from wires import Wire

from amqp_rt.errors import AmqpError
from amqp_rt.stores.base import (
    ChangeSet,
    OpenResult,
    Store,
    StoreBusy,
    StoreFailed,
    StoreFull,
    StoreLost,
)

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.req("B26")]


def put(store: Store, *sequences: int) -> None:
    batch = ChangeSet()
    for sequence in sequences:
        batch.put(1, sequence, b"head", b"payload")
    store.commit(batch)


def there(store: Store) -> list[int]:
    return [head.sequence for head in store.heads(1)]


def open_soon(store: Store) -> OpenResult:
    """Open *store* as soon as the server has noticed that another broker has closed it."""
    until = time.monotonic() + 20
    while True:
        try:
            return store.open()
        except StoreBusy:
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.fixture
def active(database: str) -> Iterator[PostgreSQLStore]:
    store = PostgreSQLStore(f"{database}?silent_s=1&rejoin_s=2")
    assert store.open() == OpenResult(clean=True)
    yield store
    store.close()


@pytest.fixture
def admin(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True, options="-c search_path=amqp_rt") as connection:
        yield connection


def end_sessions(admin: psycopg.Connection) -> None:
    """End the sessions of stores, as a network that forgets its connections does."""
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'amqp-rt%'"
    )


def state(admin: psycopg.Connection) -> tuple[int, int]:
    """Return epoch and number of the last batch."""
    row = admin.execute("SELECT epoch, batch FROM state").fetchone()
    assert row is not None
    return row


def test_a_second_broker_waits(database: str, active: PostgreSQLStore) -> None:
    put(active, 1)
    second = PostgreSQLStore(database)
    for _ in range(2):
        with pytest.raises(StoreBusy, match=r"is in use by amqp-rt .* at 127.0.0.1"):
            second.open()
    active.close()
    assert open_soon(second) == OpenResult(clean=True)
    assert there(second) == [1]
    second.close()


def test_a_lost_connection_is_replaced(active: PostgreSQLStore, admin: psycopg.Connection) -> None:
    put(active, 1)
    before = state(admin)
    end_sessions(admin)
    put(active, 2)
    end_sessions(admin)
    assert there(active) == [1, 2]
    assert state(admin) == (before[0], before[1] + 1)


def test_an_idle_broker_notices_that_its_connection_is_lost(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    noticed = threading.Event()
    active.on_disconnected = noticed.set
    end_sessions(admin)
    assert noticed.wait(5)
    active.rejoin()
    assert there(active) == []


def test_the_old_broker_is_fenced(
    database: str, active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    """Its connection is lost, and another broker is faster."""
    put(active, 1)
    second = PostgreSQLStore(database)
    with pytest.raises(StoreBusy):
        second.open()
    end = threading.Event()

    def wait() -> None:
        while not end.is_set():
            try:
                second.open()
            except StoreBusy:
                time.sleep(0.01)
            else:
                return

    told = threading.Event()
    active.on_disconnected = told.set
    active.lock.acquire()  # So that its watch does not reconnect.
    waiting = threading.Thread(target=wait)
    waiting.start()
    session = active.session
    assert session is not None
    admin.execute("SELECT pg_terminate_backend(%s)", (session.pid,))
    waiting.join(10)
    active.lock.release()
    put(second, 2)
    told.clear()
    with pytest.raises(StoreLost):
        there(active)
    assert told.is_set()
    for _ in range(2):
        with pytest.raises(
            StoreLost, match=r"is in use by amqp-rt .* now: this broker must not go on"
        ):
            put(active, 3)
    # What its broker has in memory is out of date: it must be started again.
    active.close()
    with pytest.raises(StoreLost):
        active.open()
    assert there(second) == [1, 2]
    second.close()


def test_a_batch_of_a_former_epoch_fails(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    """Even with its connection and its lock: the epoch decides."""
    put(active, 1)
    admin.execute("UPDATE state SET epoch = epoch + 1")
    with pytest.raises(StoreLost, match="this one must not go on"):
        put(active, 2)
    assert admin.execute("SELECT sequence FROM message").fetchall() == [(1,)]


@pytest.mark.parametrize("ends", [False, True], ids=["batch", "rejoin"])
def test_the_same_epoch_of_another_term_fails(
    active: PostgreSQLStore, admin: psycopg.Connection, ends: bool
) -> None:
    """A replica that took over without the last epoch has given its number to another broker."""
    put(active, 1)
    admin.execute("UPDATE state SET token = token + 1")
    with active.lock:
        if ends:
            end_sessions(admin)
        with pytest.raises(StoreLost, match="must not go on"):
            put(active, 2)
    assert admin.execute("SELECT sequence FROM message").fetchall() == [(1,)]


def test_a_broker_that_slept_for_an_hour_does_not_rejoin(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    with active.lock:
        active.answered -= 3_600
        end_sessions(admin)
        with pytest.raises(StoreLost, match=r"has not answered for 36.. s"):
            put(active, 1)


def test_the_winner_waits_for_a_batch_that_is_being_committed(
    database: str, active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    epoch, number = state(admin)
    row = admin.execute("SELECT token FROM state").fetchone()
    assert row is not None
    token = row[0]
    with psycopg.connect(database, options="-c search_path=amqp_rt") as old:
        old.execute("SELECT begin_batch(%s, %s, %s)", (epoch, token, number + 1))
        admin.execute("SET lock_timeout = 200")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            admin.execute("UPDATE state SET epoch = epoch + 1")
        old.commit()
        admin.execute("UPDATE state SET epoch = epoch + 1")
        assert state(admin) == (epoch + 1, number + 1)
        with pytest.raises(psycopg.DatabaseError, match="epoch 1 is over"):
            old.execute("SELECT begin_batch(%s, %s, %s)", (epoch, token, number + 2))


@pytest.fixture
def primary() -> Iterator[Cluster]:
    """A server whose synchronous replica can be missed."""
    with running_cluster() as cluster:
        yield cluster


def expect_replica(primary: Cluster, name: str) -> None:
    primary.run(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    primary.run("SELECT pg_reload_conf()")


def wait_for_replica(primary: Cluster, but: str = "0") -> str:
    """Return the id of the server's process that waits for a replica, not *but*."""
    query = f"SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid <> {but}"
    until = time.monotonic() + 10
    while not (pid := primary.run(query)):
        assert time.monotonic() < until
    return pid


def test_a_cancelled_wait_for_a_replica_acknowledges_nothing(primary: Cluster) -> None:
    store = PostgreSQLStore(primary.url("postgres"))
    store.open()
    put(store, 1)
    expect_replica(primary, "gone")
    committing = threading.Thread(target=put, args=(store, 2))
    committing.start()
    cancelled = wait_for_replica(primary)
    primary.run(f"SELECT pg_cancel_backend({cancelled})")
    # On another connection it waits again, although the server has the batch.
    wait_for_replica(primary, cancelled)
    assert committing.is_alive()
    expect_replica(primary, "")
    committing.join(10)
    assert not committing.is_alive()
    assert there(store) == [1, 2]
    store.close()


def test_a_server_without_free_connections_is_not_silent(
    primary: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose answer takes long, so that the broker would ask on another connection."""
    primary.run("CREATE ROLE amqp2 LOGIN PASSWORD 'geheim' CONNECTION LIMIT 1")
    primary.run("CREATE DATABASE two OWNER amqp2")
    store = PostgreSQLStore(
        f"postgresql://amqp2:geheim@127.0.0.1:{primary.port}/two?silent_s=1&rejoin_s=1"
    )
    store.open()
    expect_replica(primary, "gone")
    committing = threading.Thread(target=put, args=(store, 1))
    committing.start()
    wait_for_replica(primary)
    committing.join(4)
    assert committing.is_alive()
    assert "no answer" not in caplog.text
    expect_replica(primary, "")
    committing.join(10)
    assert there(store) == [1]
    store.close()


def test_a_store_closes_without_its_replica_or_its_database(primary: Cluster) -> None:
    for pauses in (False, True):
        store = PostgreSQLStore(primary.url("postgres"))
        assert store.open() == OpenResult(clean=True)
        if pauses:
            primary.pause()
        else:
            expect_replica(primary, "gone")
            session = store.session
            assert session is not None
            until = time.monotonic() + 10
            with store.lock:
                while session.safety().standbys != "gone":
                    assert time.monotonic() < until
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        if pauses:
            primary.resume()
        else:
            expect_replica(primary, "")


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_a_batch_in_doubt_is_stored_once(
    postgresql: Cluster, database: str, admin: psycopg.Connection, kept: bool
) -> None:
    name = database.rpartition("/")[2]
    with Wire(postgresql.port) as wire:
        store = PostgreSQLStore(f"{postgresql.url(name, port=wire.port)}?silent_s=2&rejoin_s=10")
        store.open()
        admin.execute("SET search_path TO amqp_rt")
        put(store, 1)
        _, before = state(admin)
        wire.swallows_answers = kept
        wire.swallows_data = not kept

        def mend() -> None:
            until = time.monotonic() + 10
            while time.monotonic() < until:
                done = state(admin)[1] == before + 1
                if wire.swallowed and done == kept:
                    break
                time.sleep(0.01)
            wire.mend()

        mending = threading.Thread(target=mend)
        mending.start()
        # Appending twice would be refused, or leave a gap.
        batch = ChangeSet()
        batch.put(1, 2, b"head", b"payload")
        store.commit(batch)
        mending.join()
        assert there(store) == [1, 2]
        assert state(admin)[1] == before + 1
        store.close()


def test_a_silent_database_is_noticed(postgresql: Cluster, database: str) -> None:
    name = database.rpartition("/")[2]
    with Wire(postgresql.port) as wire:
        store = PostgreSQLStore(f"{postgresql.url(name, port=wire.port)}?silent_s=1&rejoin_s=1.5")
        store.open()
        wire.swallow()
        began = time.monotonic()
        with pytest.raises(StoreLost, match="cannot be reached again"):
            put(store, 1)
        assert time.monotonic() - began < 20
        store.close()


def test_a_database_that_is_silent_after_the_login_is_noticed(
    postgresql: Cluster, database: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = database.rpartition("/")[2]
    with Wire(postgresql.port) as wire:
        store = PostgreSQLStore(f"{postgresql.url(name, port=wire.port)}?silent_s=1&rejoin_s=1.5")
        store.open()
        set_up = Session.set_up

        def silent(session: Session) -> None:
            wire.swallow()
            set_up(session)

        monkeypatch.setattr(Session, "set_up", silent)
        with store.lock:
            end_sessions(admin)
            began = time.monotonic()
            with pytest.raises(StoreLost, match="cannot be reached again"):
                put(store, 1)
        assert time.monotonic() - began < 20
        store.close()


def test_a_standby_notices_that_its_connection_is_silent(
    postgresql: Cluster, database: str, active: PostgreSQLStore
) -> None:
    name = database.rpartition("/")[2]
    with Wire(postgresql.port) as wire:
        standby = PostgreSQLStore(f"{postgresql.url(name, port=wire.port)}?silent_s=1")
        with pytest.raises(StoreBusy, match="is in use by"):
            standby.open()
        wire.swallow()
        with pytest.raises(StoreBusy, match="was lost"):
            standby.open()
        wire.mend()
        active.close()
        open_soon(standby)
        standby.close()


def test_a_slow_network_is_no_silence(
    postgresql: Cluster, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = database.rpartition("/")[2]
    with Wire(postgresql.port, bytes_per_s=1_500_000) as wire:
        store = PostgreSQLStore(f"{postgresql.url(name, port=wire.port)}?silent_s=2&rejoin_s=2")
        store.open()
        batch = ChangeSet()
        batch.put(1, 1, b"head", bytes(6_000_000))
        committing = threading.Thread(target=store.commit, args=(batch,))
        began = time.monotonic()
        committing.start()
        standby = PostgreSQLStore(f"{database}?silent_s=2")
        while committing.is_alive():
            with pytest.raises(StoreBusy):
                standby.open()
            time.sleep(0.1)
        assert time.monotonic() - began > 2
        assert "no answer" not in caplog.text
        assert "has been silent" not in caplog.text
        assert there(store) == [1]
        standby.close()
        store.close()


def test_a_batch_that_always_loses_its_connection_is_not_sent_for_ever(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    admin.execute(
        "CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$"
    )
    admin.execute("CREATE TRIGGER leaves BEFORE INSERT ON message EXECUTE FUNCTION leave()")
    with pytest.raises(StoreLost, match="was lost 5 times by the same batch"):
        put(active, 1)


def test_a_pipeline_that_cannot_be_left_is_a_lost_connection(
    active: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the server's last message has been read, and the end of the stream has not."""
    session = active.session
    assert session is not None
    connection = session.connection

    def stay() -> None:
        connection.pgconn.enter_pipeline_mode()
        raise psycopg.OperationalError("cannot exit pipeline mode while busy")

    monkeypatch.setattr(connection, "pipeline", stay)
    put(active, 1)
    assert there(active) == [1]
    assert active.session is not session


def test_a_message_that_ends_the_connection_is_a_lost_connection(
    active: PostgreSQLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = active.session
    assert session is not None

    class Last(psycopg.errors.AdminShutdown):
        @property
        def diag(self) -> Any:
            return SimpleNamespace(severity_nonlocalized="FATAL")

    def end(*_args: object, **_options: object) -> None:
        raise Last("terminating connection due to administrator command")

    monkeypatch.setattr(session.connection, "execute", end)
    assert there(active) == []
    put(active, 1)
    assert active.session is not session


def test_a_connection_that_is_lost_while_loading_is_replaced(
    database: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgreSQLStore(database)
    load = store._load

    def lose(session: Session) -> None:
        admin.execute("SELECT pg_terminate_backend(%s)", (session.pid,))
        monkeypatch.undo()
        load(session)

    monkeypatch.setattr(store, "_load", lose)
    with pytest.raises(StoreBusy, match="was lost"):
        store.open()
    assert open_soon(store) == OpenResult(clean=False)
    store.close()


def test_a_connection_that_is_lost_while_reopening_is_replaced(
    active: PostgreSQLStore, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(active, 1)
    # A store that has failed is closed and opened again within its term.
    admin.execute("ALTER TABLE message RENAME TO elsewhere")
    with pytest.raises(StoreFailed, match="cannot be written"):
        put(active, 2)
    active.close()
    admin.execute("ALTER TABLE elsewhere RENAME TO message")
    load = active._load

    def lose(session: Session) -> None:
        admin.execute("SELECT pg_terminate_backend(%s)", (session.pid,))
        monkeypatch.undo()
        load(session)

    monkeypatch.setattr(active, "_load", lose)
    assert active.open() == OpenResult(clean=False)
    put(active, 2)
    assert there(active) == [1, 2]


def test_a_store_that_cannot_be_reopened_frees_its_lock(
    database: str, active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    put(active, 1)
    admin.execute("ALTER TABLE message RENAME TO elsewhere")
    with pytest.raises(StoreFailed, match="cannot be written"):
        put(active, 2)
    active.close()
    admin.execute("ALTER TABLE elsewhere RENAME TO message")
    admin.execute("ALTER TABLE extent RENAME COLUMN dropped TO elsewhere")
    for _ in range(2):
        with pytest.raises(StoreLost, match="cannot be used again"):
            active.open()
    admin.execute("ALTER TABLE extent RENAME COLUMN elsewhere TO dropped")
    second = PostgreSQLStore(database)
    open_soon(second)
    assert there(second) == [1]
    second.close()


def test_a_silent_broker_is_disconnected(postgresql: Cluster, database: str) -> None:
    name = database.rpartition("/")[2]
    with Wire(postgresql.port) as wire:
        store = PostgreSQLStore(f"{postgresql.url(name, port=wire.port)}?silent_s=2&rejoin_s=1")
        store.open()
        second = PostgreSQLStore(f"{database}?silent_s=2")
        began = time.monotonic()
        while time.monotonic() - began < 3:
            # It is idle, but shows its life.
            with pytest.raises(StoreBusy):
                second.open()
            time.sleep(0.1)
        wire.swallow()
        open_soon(second)
        wire.mend()
        with pytest.raises(StoreLost):
            put(store, 1)
        assert there(second) == []
        store.close()
        second.close()


def test_lost_batches_of_the_database_are_noticed(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    """As after a failover to a replica that had not got all."""
    put(active, 1)
    put(active, 2)
    with active.lock:
        admin.execute("DELETE FROM message WHERE sequence = 2")
        admin.execute("UPDATE state SET batch = batch - 1")
        end_sessions(admin)
        with pytest.raises(StoreLost, match="has lost the last 1 batches, which were acknowledged"):
            put(active, 3)


def test_a_full_disk_refuses_a_batch(active: PostgreSQLStore, admin: psycopg.Connection) -> None:
    put(active, 1)
    admin.execute(
        "CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'no space left' USING ERRCODE = 'disk_full'; END $$"
    )
    admin.execute("CREATE TRIGGER full_disk BEFORE INSERT ON message EXECUTE FUNCTION fill()")
    for _ in range(2):
        with pytest.raises(StoreFull, match="no room"):
            put(active, 2)
    batch = ChangeSet()
    batch.remove(1, 1)
    active.commit(batch)
    admin.execute("DROP TRIGGER full_disk ON message")
    put(active, 2)
    assert there(active) == [2]


def test_a_full_disk_ends_no_store_that_is_read(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    """A server that has to write pages before it can read others may have no room for them."""
    put(active, 1)
    admin.execute("ALTER TABLE message RENAME TO kept")
    admin.execute(
        "CREATE FUNCTION fill() RETURNS boolean LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'no space left' USING ERRCODE = 'disk_full'; END $$"
    )
    admin.execute("CREATE VIEW message AS SELECT * FROM kept WHERE fill()")
    for _ in range(2):
        with pytest.raises(StoreFull, match="no room"):
            there(active)
    admin.execute("DROP VIEW message")
    admin.execute("ALTER TABLE kept RENAME TO message")
    assert there(active) == [1]
    put(active, 2)
    assert there(active) == [1, 2]


def test_a_batch_that_the_database_refuses_ends_with_the_connection(
    active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    put(active, 1)
    epoch, _ = state(admin)
    admin.execute("ALTER TABLE message RENAME TO elsewhere")
    for _ in range(2):
        with pytest.raises(StoreFailed, match="cannot be written"):
            put(active, 2)
    admin.execute("ALTER TABLE elsewhere RENAME TO message")
    # The journal closes the store and opens it again; no other broker has had it meanwhile.
    active.close()
    assert active.open() == OpenResult(clean=False)
    put(active, 2)
    assert there(active) == [1, 2]
    assert state(admin)[0] == epoch


def test_a_database_that_is_no_place_for_a_store(postgresql: Cluster, database: str) -> None:
    postgresql.run("DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN PASSWORD 'geheim'")
    name = database.rpartition("/")[2]
    for url, text in [
        (
            f"postgresql://reader:geheim@127.0.0.1:{postgresql.port}/{name}",
            "right to create a schema",
        ),
        (f"postgresql://reader:wrong@127.0.0.1:{postgresql.port}/{name}", "authentication failed"),
        (f"postgresql://reader:geheim@127.0.0.1:1/{name}", "refused"),
        (f"postgresql://reader:geheim@127.0.0.1:{postgresql.port}/nothing", "does not exist"),
    ]:
        with pytest.raises(StoreFailed, match=text) as caught:
            PostgreSQLStore(url).open()
        assert "geheim" not in str(caught.value)
        assert "wrong" not in str(caught.value)


def test_a_user_without_rights_is_refused(
    postgresql: Cluster, database: str, active: PostgreSQLStore, admin: psycopg.Connection
) -> None:
    """Not made to wait, while another broker is active and after it."""
    admin.execute("DROP ROLE IF EXISTS looker")
    admin.execute("CREATE ROLE looker LOGIN PASSWORD 'geheim'")
    admin.execute("GRANT USAGE ON SCHEMA amqp_rt TO looker")
    admin.execute("GRANT SELECT, INSERT, DELETE ON ALL TABLES IN SCHEMA amqp_rt TO looker")
    name = database.rpartition("/")[2]
    store = PostgreSQLStore(f"postgresql://looker:geheim@127.0.0.1:{postgresql.port}/{name}")
    for ends in (False, True):
        if ends:
            active.close()
        with pytest.raises(StoreFailed, match=r"'looker' needs SELECT, .* has no UPDATE on"):
            store.open()


def test_tables_of_another_release_are_refused(
    active: PostgreSQLStore, database: str, admin: psycopg.Connection
) -> None:
    active.close()
    admin.execute("UPDATE state SET version = 99")
    with pytest.raises(AmqpError, match="version 99 of its tables"):
        PostgreSQLStore(database).open()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("DROP TABLE piece CASCADE", "has a table 'body', and none 'piece'"),
        ("DELETE FROM state", "has an empty table 'state'"),
    ],
)
def test_a_schema_of_something_else_is_refused(
    active: PostgreSQLStore, database: str, admin: psycopg.Connection, change: str, text: str
) -> None:
    active.close()
    admin.execute(change.encode())
    with pytest.raises(AmqpError, match=rf"the schema 'amqp_rt' {text}, .* \?schema=NAME"):
        PostgreSQLStore(database).open()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("postgresql://u:se/cret@h/db", "written as %2F"),
        ("postgresql://u:secret@h/db?sslmodus=1", "options of libpq"),
        ("postgresql://u:secret@h/db?schema=A-B", "small letters"),
        ("postgresql://u:secret@h/db?silent_s=soon", "number of seconds from 1 to 3600"),
        ("postgresql://u:secret@h/db?rejoin_s=-1", "number of seconds from 0 to 3600"),
    ],
)
@pytest.mark.req("SE18")
def test_mistakes_in_urls_show_no_password(url: str, text: str) -> None:
    with pytest.raises(AmqpError, match=text) as caught:
        PostgreSQLStore(url)
    assert "secret" not in str(caught.value)
    assert "cret" not in str(caught.value)


def test_a_database_in_another_encoding(
    postgresql: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """In SQL_ASCII, which a server without a locale has, text would come as octets."""
    postgresql.run("DROP DATABASE IF EXISTS octets WITH (FORCE)")
    postgresql.run("CREATE DATABASE octets TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'")
    store = PostgreSQLStore(postgresql.url("octets"))
    store.open()
    assert "fsync" not in caplog.text
    second = PostgreSQLStore(postgresql.url("octets"))
    with pytest.raises(StoreBusy, match=r"is in use by amqp-rt .* at 127.0.0.1"):
        second.open()
    second.close()
    put(store, 1)
    assert there(store) == [1]
    store.close()


def test_a_weaker_setting_does_not_reach_a_running_broker(primary: Cluster) -> None:
    store = PostgreSQLStore(primary.url("postgres"))
    store.open()
    session = store.session
    assert session is not None
    primary.run("ALTER SYSTEM SET synchronous_commit = off")
    primary.run("ALTER SYSTEM SET work_mem = '5MB'")
    primary.run("SELECT pg_reload_conf()")
    until = time.monotonic() + 10
    with store.lock:
        # Once the session has read the files again.
        while session.rows("SHOW work_mem") != [("5MB",)]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert session.safety().synchronous_commit == "on"
    store.close()


def test_a_store_shows_no_password() -> None:
    store = PostgreSQLStore("postgresql://u:secret@h1:5,h2/db?password=hidden&schema=orders")
    assert store.path == "postgresql://u@h1:5,h2/db?schema=orders"
    assert repr(store) == "<PostgreSQLStore postgresql://u@h1:5,h2/db?schema=orders>"


def test_a_password_comes_from_the_file_of_libpq(
    postgresql: Cluster, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = database.rpartition("/")[2]
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:{postgresql.port}:{name}:amqp:{postgresql.password}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    store = PostgreSQLStore(f"postgresql://amqp@127.0.0.1:{postgresql.port}/{name}")
    store.open()
    put(store, 1)
    store.close()


def test_a_replica_is_refused_and_takes_over_once_promoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "amqp_rt.store")
    with running_cluster("synchronous_standby_names=*") as primary:
        # Without a replica, changes would wait for one.
        primary.run("ALTER SYSTEM SET synchronous_commit = local")
        with running_cluster(copy_of=primary) as replica:
            both = (
                f"postgresql://amqp:{primary.password}@127.0.0.1:{primary.port},127.0.0.1:{replica.port}/postgres"
                "?rejoin_s=30&silent_s=1"
            )
            with pytest.raises(StoreFailed, match="read-only"):
                PostgreSQLStore(replica.url("postgres")).open()
            store = PostgreSQLStore(both)
            store.open()
            assert "replicates synchronously to *" in caplog.text
            for number in range(20):
                put(store, number)
            # A batch that waits for the replica is no sign of a silent server, or a silent broker.
            replica.pause()
            waiting = threading.Thread(target=put, args=(store, 20))
            waiting.start()
            second = PostgreSQLStore(both)
            began = time.monotonic()
            while time.monotonic() - began < 3:
                with pytest.raises(StoreBusy):
                    second.open()
                time.sleep(0.1)
            second.close()
            assert waiting.is_alive()
            replica.resume()
            waiting.join(20)
            assert "was lost" not in caplog.text
            primary.crash()
            replica.promote()
            put(store, 21)
            assert there(store) == list(range(22))
            store.close()
