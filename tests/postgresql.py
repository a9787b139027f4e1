"""A private PostgreSQL server, as Debian installs it, with databases for tests. It keeps what it has acknowledged: fsync is on.

The server refuses to run as root, and then runs as the user ``postgres`` or ``nobody``.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from foreign_brokers import absent

#: Users that may run a server if the tests run as root.
_USERS = ("postgres", "nobody")
#: User of the databases.
USER = "amqp"

_numbers = count(1)


@cache
def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, the latest version's; None if it is not installed."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: int(path.parent.name))
    initdb = shutil.which("initdb")
    return None if initdb is None else Path(initdb).resolve().parent


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _runs(pid: int) -> bool:
    """Return whether a process has not ended, reaped by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Cluster:
    """A server with its data in a temporary folder; it is created, and has to be started.

    Args:
        settings: Further settings of the server, such as ``"wal_level=replica"``.
        copy_of: A running server of which it is a replica, by streaming; None for one of its own.
    """

    def __init__(self, *settings: str, copy_of: Cluster | None = None) -> None:
        folder = programs()
        if folder is None:
            absent("PostgreSQL is not installed: apt-get install postgresql")
        self._programs: Path = folder
        # Directly in the folder of temporary files: paths of sockets are short, and pytest's folders are root's own.
        self.folder = Path(tempfile.mkdtemp(prefix="amqp-rt-postgresql-"))
        self._user = self._owner()
        self.port = _free_port()
        self.password = secrets.token_hex(8)
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = (*settings, f"port={self.port}")
        try:
            if copy_of is None:
                secret = self.folder / "password"
                secret.write_text(self.password + "\n")
                self._give_away()
                self._run(
                    "initdb",
                    *(
                        f"--pgdata={self.data}",
                        f"--username={USER}",
                        "--encoding=UTF8",
                        "--no-sync",
                    ),
                    *("--locale=C", f"--pwfile={secret}", "--auth-local=trust"),
                    "--auth-host=scram-sha-256",
                )
            else:
                self.password = copy_of.password
                self._run(
                    "pg_basebackup",
                    *(
                        f"--pgdata={self.data}",
                        f"--host={copy_of.folder}",
                        f"--port={copy_of.port}",
                    ),
                    *(
                        f"--username={USER}",
                        "--write-recovery-conf",
                        "--checkpoint=fast",
                        "--no-sync",
                    ),
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def _owner(self) -> pwd.struct_passwd | None:
        """Return the user that runs the server, None for our own; the folder becomes theirs."""
        if os.geteuid() != 0:
            return None
        known = {user.pw_name: user for user in pwd.getpwall()}
        user = next((known[name] for name in _USERS if name in known), None)
        if user is None:
            absent("PostgreSQL does not run as root, and there is no user postgres or nobody")
        os.chown(self.folder, user.pw_uid, user.pw_gid)
        return user

    def _give_away(self) -> None:
        """Give the files in the folder to the user who runs the server."""
        if self._user is not None:
            for path in self.folder.iterdir():
                os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _command(self, program: str, *arguments: str) -> list[str]:
        who: Sequence[str] = ()
        if self._user is not None:
            who = (f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups")
        # A server does not outlive the tests, even if they are killed.
        return ["setpriv", *who, "--pdeathsig=INT", str(self._programs / program), *arguments]

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            self._command(program, *arguments),
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # -- the server --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, which recovers from a crash first; return when it takes connections."""
        assert self.process is None
        settings = (
            *("listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"),
            *("shared_buffers=16MB", "max_connections=50", "logging_collector=off"),
            *self._settings,
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(
                    "postgres", "-D", str(self.data), *(f"--{each}" for each in settings)
                ),
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        until = time.monotonic() + 60
        while not self.is_ready():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether the server takes connections."""
        asked = self._command("pg_isready", f"--host={self.folder}", f"--port={self.port}", "-q")
        return subprocess.run(asked, check=False).returncode == 0

    def log(self) -> str:
        """Return what the server has logged."""
        return (self.folder / "log").read_text("utf-8", "replace")

    def _processes(self) -> list[int]:
        """Return the ids of the server's processes, the first one's last."""
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [*map(int, children), pid]

    def crash(self) -> None:
        """Kill all processes of the server at once, as the end of its machine does."""
        assert self.process is not None
        for number in (signal.SIGSTOP, signal.SIGKILL):
            killed = self._processes()
            for pid in killed:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait(30)
        self.process = None
        # Its shared memory is in use, so that no server starts in its folder, until the last of them has ended.
        until = time.monotonic() + 30
        while any(map(_runs, killed)) and time.monotonic() < until:
            time.sleep(0.01)

    def pause(self) -> None:
        """Stop all processes of the server, whose sockets stay open: it is silent from now on."""
        for pid in self._processes():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """End :meth:`pause`."""
        for pid in self._processes():
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Shut the server down, ending its connections."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)
            self.process = None

    def promote(self) -> None:
        """Make a replica the primary server."""
        self._run("pg_ctl", "promote", f"--pgdata={self.data}", "--wait")

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- databases ---------------------------------------------------------------------------------

    def run(self, sql: str, database: str = "postgres") -> str:
        """Run *sql* with psql, each statement by itself; return the rows as it prints them, unaligned."""
        return self._run(
            "psql",
            *(f"--host={self.folder}", f"--port={self.port}", f"--username={USER}", "--no-psqlrc"),
            *("--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"),
            *(f"--dbname={database}", f"--command={sql}"),
        ).strip()

    def create_database(self) -> str:
        """Create an empty database; return its name."""
        name = f"db{next(_numbers)}"
        self.run(f"CREATE DATABASE {name}")
        return name

    def drop_database(self, name: str) -> None:
        """Delete a database, ending its connections."""
        self.run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def url(self, database: str, *, port: int | None = None) -> str:
        """Return the URL of *database* over TCP, with the password; *port* is that of a proxy."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{port or self.port}/{database}"


@contextmanager
def running_cluster(*settings: str, copy_of: Cluster | None = None) -> Iterator[Cluster]:
    """Run a server of its own for a test that crashes it."""
    cluster = Cluster(*settings, copy_of=copy_of)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@cache
def _shared_cluster() -> Cluster:
    cluster = Cluster()
    try:
        cluster.start()
    except BaseException:
        cluster.remove()
        raise
    return cluster


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Cluster]:
    """A running server, which all tests of the process share: none may stop it."""
    # Both conftest modules have this fixture; there is one server nevertheless.
    cluster = _shared_cluster()
    yield cluster
    cluster.remove()


@pytest.fixture
def database(postgresql: Cluster) -> Iterator[str]:
    """The URL of an empty database, ``postgresql://USER:PASSWORD@127.0.0.1:PORT/NAME``."""
    name = postgresql.create_database()
    yield postgresql.url(name)
    postgresql.drop_database(name)


@pytest.fixture(scope="session")
def _cleared_database(postgresql: Cluster) -> str:
    # It ends with the server, which the fixture of the other conftest module may remove first.
    return postgresql.url(postgresql.create_database())


@pytest.fixture
def cleared_database(_cleared_database: str) -> str:
    """The URL of a database without tables, which is created once: for tests that need many, and do not stop the server.

    Its commits survive the end of a program, as it needs no flush of a disk, but not that of the server.
    """
    import psycopg

    with psycopg.connect(_cleared_database, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return f"{_cleared_database}?options=-csynchronous_commit%3Doff"
