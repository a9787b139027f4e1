"""``amqp-rt serve --edges`` as processes: logins and rights, killed edges, signals, and mistakes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from certificates import certificates
from click.testing import CliRunner
from commands import Served, ok

from amqp_rt import ClientTls, connect
from amqp_rt.cli import main
from amqp_rt.errors import AmqpError, AuthenticationFailed, ConnectionLost, LinkRefused

pytestmark = [
    pytest.mark.req("L5"),
    pytest.mark.skipif(sys.platform != "linux", reason="edge processes need Linux"),
]

KNOWN = certificates()
TLS = ClientTls(KNOWN.ca)
RIGHTS = """
[[rule]]
users = ["ada"]
rights = ["send", "listen", "manage"]
address = "*"

[[rule]]
users = ["bob"]
rights = ["send"]
address = "out"
"""


@contextmanager
def served(folder: Path, *arguments: str, edges: int = 2) -> Iterator[Served]:
    """A broker with edges and the listeners amqps, wss and amqp."""
    (folder / "access.toml").write_text(RIGHTS)
    found = Served(
        *("--listen", "wss://127.0.0.1:0/", "--listen", "amqp://127.0.0.1:0"),
        *("--tls-cert", str(KNOWN.server), "--edges", str(edges), "--auto-create", "queue:*"),
        *("--user", "ada:pw", "--user", "bob:pw", "--access", str(folder / "access.toml")),
        *arguments,
        listen="amqps://127.0.0.1:0",
    )
    try:
        yield found
    finally:
        found.stop(signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether the process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(pids: list[int]) -> None:
    """Wait until the processes have ended."""
    until = time.monotonic() + 15
    while any(map(is_alive, pids)):
        assert time.monotonic() < until
        time.sleep(0.02)


def with_login(url: str, user: str = "ada", password: str = "pw") -> str:
    return url.replace("://", f"://{user}:{password}@").replace("127.0.0.1", "localhost")


async def test_logins_rights_and_management_pass_edges(tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        amqps, wss, amqp = broker.ready["listeners"]
        for url in (amqps, wss):
            async with connect(with_login(url, "bob"), tls=TLS, reconnect=None) as peer:
                async with peer.sender("out") as out:
                    await out.send(bytes(200_000))
                with pytest.raises(LinkRefused, match="takes the right to listen"):
                    async with peer.receiver("out"):
                        pass
            with pytest.raises(AuthenticationFailed):
                async with connect(with_login(url, "bob", "guess"), tls=TLS, reconnect=None):
                    pass
        async with (
            connect(with_login(amqps), tls=TLS, reconnect=None) as peer,
            peer.receiver("out") as into,
        ):
            for _ in range(2):
                with await into.receive() as delivery:
                    assert len(delivery.body) == 200_000
            listed = await trio.to_thread.run_sync(
                lambda: ok("connections", "list", url=with_login(amqp))
            )
            # The client's own address, not one of an edge.
            assert listed.count("127.0.0.1:") == 2, listed
        assert broker.stop()[0] == 0


async def test_what_was_acknowledged_outlives_a_killed_edge(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    with served(tmp_path) as broker:
        edges: list[int] = broker.ready["edges"]
        lost = trio.Event()
        async with (
            connect(with_login(broker.url), tls=TLS) as peer,
            connect(with_login(broker.url), tls=TLS) as other,
            trio.open_nursery() as nursery,
        ):

            async def send(into: str, first: int) -> None:
                async with (peer if first else other).sender(into) as out:
                    number = first
                    while not lost.is_set() or number < first + 300:
                        try:
                            await out.send(number)
                        except (ConnectionLost, AmqpError):
                            # In doubt: it may be there or not.
                            lost.set()
                        else:
                            acknowledged.append(number)
                        number += 1

            # One connection at each edge, of which one is killed.
            nursery.start_soon(send, "kept", 0)
            nursery.start_soon(send, "kept", 1_000_000)
            while len(acknowledged) < 50:  # noqa: ASYNC110  # only this test waits for it
                await trio.sleep(0.005)
            os.kill(edges[0], signal.SIGKILL)
            await trio.sleep(0.5)
            lost.set()
        found: set[int] = set()
        async with (
            connect(with_login(broker.url), tls=TLS, reconnect=None) as peer,
            peer.receiver("kept", credit=1_000) as into,
        ):
            with trio.fail_after(20):
                while not found >= set(acknowledged):
                    with await into.receive() as delivery:
                        found.add(delivery.body)
        # Another one takes its place.
        code, errors = broker.stop()
    assert code == 0
    assert f"edge process {edges[0]} ended with status -9" in errors
    wait_for(edges)


async def test_a_stop_closes_connections_in_the_protocol(tmp_path: Path) -> None:
    with served(tmp_path, edges=1) as broker:
        edges = broker.ready["edges"]
        # A service manager, or a terminal, may signal all processes.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(edges[0], number)
        async with (
            connect(with_login(broker.url), tls=TLS, reconnect=None) as peer,
            peer.receiver("idle") as into,
        ):
            broker.process.send_signal(signal.SIGINT)
            with pytest.raises(ConnectionLost, match="is stopping"):
                await into.receive()
        assert broker.process.wait(30) == 0
        wait_for(edges)


async def test_edges_end_with_their_broker(tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        edges = broker.ready["edges"]
        async with connect(with_login(broker.url), tls=TLS, reconnect=None) as peer:
            broker.process.kill()
            with trio.fail_after(10):
                await peer.wait_closed()
        wait_for(edges)


def test_certificates_are_read_again_at_sighup_and_no_socket_has_a_name(tmp_path: Path) -> None:
    chosen = tmp_path / "server.pem"
    chosen.write_bytes(KNOWN.server.read_bytes())
    with served(tmp_path, "--tls-cert", str(chosen), edges=1) as broker:
        port = int(broker.url.rpartition(":")[2])
        chosen.write_bytes(KNOWN.issue("localhost", common_name="renewed").read_bytes())
        broker.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 10
        while common_name(port) != "renewed":
            assert time.monotonic() < until
            time.sleep(0.02)
        # Nothing to which another process, of any user, could connect.
        named = {
            f"socket:[{line.split()[6]}]"
            for line in Path("/proc/net/unix").read_text().splitlines()[1:]
            if len(line.split()) > 7
        }
        for pid in (broker.process.pid, *broker.ready["edges"]):
            found = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
            assert any(each.startswith("socket:") for each in found)
            assert not found & named


def common_name(port: int) -> str | None:
    """Return the common name of the certificate at *port*."""
    with (
        socket.create_connection(("127.0.0.1", port), 5) as sock,
        TLS.context.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        shown = tls.getpeercert()
        assert shown is not None
        parts = shown["subject"]
        return {name: value for part in parts for name, value in part}.get("commonName")  # type: ignore[misc]


@pytest.mark.parametrize("number", ["0", "-1", "65", "many"])
def test_a_wrong_number_is_a_mistake(number: str) -> None:
    done = CliRunner().invoke(main, ["serve", "--tls-cert", str(KNOWN.server), "--edges", number])
    assert done.exit_code == 2
    assert "'--edges'" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--edges", "2"], "no listener has any: give --tls-cert FILE, or listen on ws://"),
        (["shop.py:c", "--listen", "ws://127.0.0.1:0", "--edges", "2"], "do not apply to the container of"),
    ],
)  # fmt: skip
def test_edges_without_work_are_a_mistake(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(main, ["serve", *arguments])
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())


def test_a_system_without_such_sockets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SOCK_SEQPACKET")
    arguments = ["serve", "--listen", "ws://127.0.0.1:0", "--edges", "2"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code != 0
    assert "edge processes need Linux" in done.output


def test_an_edge_that_cannot_start_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    done = CliRunner().invoke(main, ["serve", "--listen", "ws://127.0.0.1:0", "--edges", "2"])
    assert done.exit_code == 1
    assert "ended with status 1 before it could take connections" in done.output
