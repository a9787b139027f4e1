"""Two brokers as processes on one database, whose active one, network or database fails while clients send."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import trio
from amqp_rt_postgres import PostgreSQLStore
from commands import COMMAND
from foreign_brokers import absent
from postgresql import Cluster, running_cluster
from wires import Wire

from amqp_rt import Container
from amqp_rt.errors import AmqpError

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.req("B26", "X25", "B7")]

LONG = os.environ.get("AMQP_RT_LONG") == "1"
#: Failovers in a row, and messages that are on their way at a time.
ROUNDS = 10 if LONG else 1
SENDERS = 8
#: Waits of brokers and databases in these tests; the defaults are 6 and 10.
QUICK = "silent_s=1&rejoin_s=2"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Member:
    """``amqp-rt serve`` at a port of its own, active or standby."""

    def __init__(self, store: str, port: int, *options: str, **environ: str) -> None:
        self.port = port
        self.url = f"amqp://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--listen", self.url, "--anonymous", "--node", "queue:q", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "AMQP_RT_SERVE_STORE": store, **environ},
        )
        self.log: list[str] = []
        self._ready: Queue[float] = Queue()
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_ready, self._read_log)
        ]
        for each in self._readers:
            each.start()

    def _read_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready "):
                self._ready.put(time.monotonic())

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def wait_active(self, within: float = 30) -> float:
        """Wait until it listens; return the time at which it began."""
        try:
            return self._ready.get(timeout=within)
        except Empty:
            raise AssertionError("".join(self.log)) from None

    @property
    def is_active(self) -> bool:
        return not self._ready.empty()

    def says(self, text: str, within: float = 30) -> None:
        """Wait until its log has *text*."""
        until = time.monotonic() + within
        while text not in "".join(self.log):
            assert time.monotonic() < until, "".join(self.log)
            time.sleep(0.02)

    def is_listening(self) -> bool:
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for each in self._readers:
            each.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def members(*stores: str) -> Iterator[list[Member]]:
    """Run a broker for each of *stores*, the first one active."""
    found: list[Member] = []
    try:
        for store in stores:
            found.append(Member(store, free_port()))
            if len(found) == 1:
                found[0].wait_active()
            else:
                found[-1].says("standby: ")
        yield found
    finally:
        for each in found:
            each.end()
    for each, store in zip(found, stores, strict=False):
        password = urlsplit(store).password
        assert password
        assert password not in "".join(each.log)


class Traffic:
    """Durable messages to ``q``, sent by several tasks on one link, with the addresses of all brokers."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        #: Numbers of messages that were accepted, and when.
        self.accepted: dict[int, float] = {}
        self.stopped = False
        self._next = 0

    async def run(self) -> None:
        async with (
            Container("client") as container,
            container.connect(self.urls) as peer,
            peer.sender("q", in_doubt="resend") as out,
            trio.open_nursery() as nursery,
        ):
            for _ in range(SENDERS):
                nursery.start_soon(self._send, out)

    async def _send(self, out: Any) -> None:
        while not self.stopped:
            number = self._next
            self._next += 1
            await out.send(number, durable=True)
            self.accepted[number] = time.monotonic()
            await trio.sleep(0.002)

    async def wait_accepted(self, count: int, within: float = 60) -> None:
        """Wait until *count* more messages are accepted."""
        until = len(self.accepted) + count
        with trio.fail_after(within):
            while len(self.accepted) < until:  # noqa: ASYNC110 (real time)
                await trio.sleep(0.01)

    def gap_after(self, at: float) -> float:
        """Return the seconds from *at* until the first message of the next broker was accepted."""
        times = sorted(self.accepted.values())
        following = [each for each in times if each > at]
        pauses = [b - a for a, b in pairwise(following)]
        # A message may have been accepted a moment after *at* by the broker that ended then.
        return max([following[0] - at, *pauses[:SENDERS]])

    async def check(self, url: str, failovers: int) -> None:
        """Check that the queue has each accepted message, and copies only of those that were in doubt."""
        seen: Counter[int] = Counter()
        async with (
            Container("checker") as container,
            container.connect(url) as peer,
            peer.receiver("q", credit=500) as messages,
        ):
            while (message := await messages.get(within=1)) is not None:
                async with message:
                    seen[message.body] += 1
        assert not self.accepted.keys() - seen.keys()
        copies = sum(seen.values()) - len(seen)
        assert copies <= SENDERS * failovers, copies


async def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    return await trio.to_thread.run_sync(call, *args)


@pytest.mark.smoke
async def test_a_standby_takes_over_from_a_killed_broker(database: str) -> None:
    with members(database, database) as started:
        active, standby = started
        traffic = Traffic(active.url, standby.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            for _ in range(ROUNDS):
                await traffic.wait_accepted(100)
                assert not standby.is_listening()
                began = time.monotonic()
                active.process.kill()
                took = await in_thread(standby.wait_active) - began
                print(f"active after {took:.2f} s")
                await traffic.wait_accepted(100)
                print(f"next message accepted after {traffic.gap_after(began):.2f} s")
                active.end()
                active, standby = standby, Member(database, active.port)
                started.append(standby)
                await in_thread(standby.says, "standby: ")
            traffic.stopped = True
        await traffic.check(active.url, ROUNDS)


async def test_a_stopped_broker_is_fenced(database: str) -> None:
    """Its process is stopped, and continues when another one is active."""
    store = f"{database}?{QUICK}"
    with members(store, store) as (first, second):
        traffic = Traffic(first.url, second.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            await traffic.wait_accepted(50)
            first.process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            took = await in_thread(second.wait_active) - began
            print(f"active after {took:.2f} s")
            second.says("disconnecting the active broker")
            first.process.send_signal(signal.SIGCONT)
            # It accepts nothing any more, and lets its clients go.
            await traffic.wait_accepted(50)
            assert await in_thread(first.process.wait, 30) == 1
            traffic.stopped = True
        first.says("now: this broker must not go on")
        assert "Traceback" not in "".join(first.log)
        await traffic.check(second.url, 1)


async def test_a_broker_that_is_cut_off_from_the_database_lets_its_clients_go(
    postgresql: Cluster, database: str
) -> None:
    name = database.rpartition("/")[2]
    with (
        Wire(postgresql.port) as wire,
        members(f"{postgresql.url(name, port=wire.port)}?{QUICK}", f"{database}?{QUICK}") as (
            first,
            second,
        ),
    ):
        traffic = Traffic(first.url, second.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            await traffic.wait_accepted(50)
            wire.swallow()
            began = time.monotonic()
            await in_thread(second.wait_active)
            print(f"active after {time.monotonic() - began:.2f} s")
            await traffic.wait_accepted(50)
            assert await in_thread(first.process.wait, 30) == 1
            print(f"next message accepted after {traffic.gap_after(began):.2f} s")
            traffic.stopped = True
        assert "Traceback" not in "".join(first.log)
        await traffic.check(second.url, 1)


@pytest.fixture(scope="module")
def mortal() -> Iterator[Cluster]:
    """Return a server that tests crash; they start it again."""
    with running_cluster() as cluster:
        yield cluster


async def test_a_broker_outlives_a_crash_of_its_database(mortal: Cluster) -> None:
    name = mortal.create_database()
    with members(f"{mortal.url(name)}?rejoin_s=30") as (broker,):
        traffic = Traffic(broker.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            for _ in range(ROUNDS):
                await traffic.wait_accepted(100)
                mortal.crash()
                await trio.sleep(0.2)
                # Here, since the server ends with the thread that starts it.
                mortal.start()
                await traffic.wait_accepted(100)
            traffic.stopped = True
        assert broker.process.poll() is None
        # No client was cut off, so nothing was sent twice.
        await traffic.check(broker.url, 0)


async def test_a_broker_ends_when_its_database_stays_away(mortal: Cluster) -> None:
    name = mortal.create_database()
    store = f"{mortal.url(name)}?{QUICK}"
    with members(store, store) as (first, second):
        traffic = Traffic(first.url, second.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.run)
            await traffic.wait_accepted(50)
            mortal.crash()
            assert await in_thread(first.process.wait, 30) == 1
            first.says("cannot be reached again")
            # The standby waits for the database.
            assert second.process.poll() is None
            # Here, since the server ends with the thread that starts it.
            mortal.start()
            await in_thread(second.wait_active)
            await traffic.wait_accepted(50)
            traffic.stopped = True
        await traffic.check(second.url, 1)


class Notified:
    """The socket of a service manager."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(20)

    def close(self) -> None:
        self._socket.close()

    def received(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())


@pytest.mark.req("A10", "A19")
def test_a_standby_is_live_and_not_ready(database: str, tmp_path: Path) -> None:
    manager = Notified(tmp_path / "notify")
    with members(database) as (first,):
        probe = f"http://127.0.0.1:{free_port()}"
        second = Member(database, free_port(), "--probe", probe, NOTIFY_SOCKET=manager.path)
        try:
            told = manager.received()
            assert told["STATUS"].startswith("standby: postgresql://")
            assert told["EXTEND_TIMEOUT_USEC"] == "30000000"
            assert json.load(urllib.request.urlopen(f"{probe}/healthz")) == {"live": True}
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{probe}/readyz")
            reasons = json.load(caught.value)["reasons"]
            caught.value.close()
            assert any(each.startswith("standby: ") for each in reasons)
            secret = tmp_path / "store"
            secret.write_text(database)
            secret.chmod(0o600)
            third = Member("", free_port(), AMQP_RT_SERVE_STORE_FILE=str(secret))
            try:
                third.says("standby: ")
                third.process.send_signal(signal.SIGTERM)
                assert third.process.wait(30) == 0
            finally:
                third.end()
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(30) == 0
            second.wait_active()
            while "READY" not in told:
                told = manager.received()
            assert json.load(urllib.request.urlopen(f"{probe}/readyz"))["ready"]
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(30) == 0
        finally:
            second.end()
            manager.close()


def test_a_pooler_is_refused(postgresql: Cluster, database: str, tmp_path: Path) -> None:
    if (pooler := shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")) is None:
        absent("pgbouncer is not installed: apt-get install pgbouncer")
    name, port = database.rpartition("/")[2], free_port()
    folder = postgresql.folder / f"pooler-{port}"
    folder.mkdir()
    (folder / "users").write_text(f'"amqp" "{postgresql.password}"\n')
    (folder / "ini").write_text(
        f"[databases]\n{name} = host=127.0.0.1 port={postgresql.port} user=amqp password={postgresql.password}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = plain\n"
        f"auth_file = {folder}/users\npool_mode = transaction\nunix_socket_dir =\n"
        "ignore_startup_parameters = extra_float_digits,options\n"
    )
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        folder.chmod(0o755)
        postgresql.folder.chmod(0o755)
    process = subprocess.Popen([pooler, str(folder / "ini")], stderr=subprocess.PIPE, **who)
    try:
        until = time.monotonic() + 10
        store = PostgreSQLStore(postgresql.url(name, port=port))
        last = ""
        while True:
            try:
                store.open()
            except AmqpError as error:
                if "is a connection pooler" in error.description:
                    break
                last = error.description
            assert time.monotonic() < until, last
            time.sleep(0.05)
        with psycopg.connect(postgresql.url(name, port=port), autocommit=True) as other:
            # The session of the server, which the store was about to change, is given to others.
            assert other.execute("SHOW enable_seqscan").fetchone() == ("on",)
    finally:
        process.terminate()
        process.communicate(timeout=10)
