"""``amqp-rt trace URL``: between a real broker and clients of several makes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import certificates
from commands import COMMAND, Served, amqp_rt, ok

from amqp_rt.net.traces.drawing import rungs
from amqp_rt.net.traces.recording import Kind, read_trace

PEERS = Path(__file__).parent.parent / "peers"


def foreign(command: list[str], program: str, role: str, **options: Any) -> dict[str, Any]:
    """What a program of tests/peers says at its end."""
    run = subprocess.run(
        [*command, str(PEERS / program), role, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    last: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return last


class Traced:
    """A running ``amqp-rt trace``; its last words and what it has drawn come from :meth:`stop`."""

    def __init__(self, url: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "trace", "--listen", "127.0.0.1:0", "--width", "140", *options, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.match(r"listening on (amqp://127\.0\.0\.1:(\d+)), passing on to (\S+): ", line)
        assert found, line
        self.url, self.port, self.passed_on = found[1], int(found[2]), found[3]

    def stop(self) -> tuple[str, str]:
        """What it has drawn, and its summary."""
        self.process.send_signal(signal.SIGINT)
        drawn, summary = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, summary
        return drawn, summary


@pytest.fixture
def tracing() -> Iterator[Callable[..., Traced]]:
    """Begins traces that end with the test."""
    begun: list[Traced] = []

    def begin(url: str, *options: str) -> Traced:
        begun.append(Traced(url, *options))
        return begun[-1]

    yield begin
    for traced in begun:
        traced.process.kill()
        traced.process.communicate()


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served("--auto-create", "queue:q")
    yield running
    assert running.stop()[0] == 0


@pytest.mark.slow
@pytest.mark.req("O1", "O5")
def test_what_passes_is_drawn_and_kept(
    served: Served, tracing: Callable[..., Traced], tmp_path: Path
) -> None:
    file = tmp_path / "kept.amqptrace"
    traced = tracing(served.url, "--write", str(file))
    assert traced.passed_on == served.url
    for body in ("one", "two"):
        ok("send", "q", body, url=traced.url)
    assert ok("receive", "q", "--count", "2", url=traced.url).split() == ["one", "two"]
    refused = amqp_rt("receive", "nowhere", url=traced.url)
    assert "nowhere" in refused.stderr
    drawn, summary = traced.stop()
    lines = drawn.splitlines()
    assert re.fullmatch(r"#1 +0\.\d{6}  │ +a connection from 127\.0\.0\.1:\d+ +│", lines[0])
    assert re.fullmatch(r"#1 +0\.\d{6}  │── header SASL 1\.0\.0 ─+▶│", lines[1])
    assert sum(" transfer " in line for line in lines) == 4
    assert sum("the connection is over" in line for line in lines) == 4
    assert "connections: 4\n" in summary
    assert re.search(
        r"^from clients: \d+ frames, 2 of them transfers, \d+ bytes$", summary, re.MULTILINE
    )
    assert re.search(
        r"^from the server: \d+ frames, 2 of them transfers, \d+ ", summary, re.MULTILINE
    )
    assert re.search(r"^amqp:not-found: 1$", summary, re.MULTILINE)

    kept = read_trace(file)
    assert not kept.damage
    assert kept.records[-1].kind is Kind.END
    assert sum("transfer" in rung.text for rung in rungs(kept)) == 1
    assert not file.stat().st_mode & 0o077
    assert {path.name for path in tmp_path.iterdir()} == {
        f"kept{number}.amqptrace" for number in ("", "-2", "-3", "-4")
    }
    assert "transfer" in ok("trace", str(tmp_path / "kept-2.amqptrace"))


@pytest.mark.req("O1")
@pytest.mark.parametrize(
    "peer",
    [
        pytest.param("proton", marks=pytest.mark.peer("proton")),
        pytest.param("rhea", marks=pytest.mark.peer("rhea")),
    ],
)
def test_a_foreign_client_passes(
    peer: str, served: Served, tracing: Callable[..., Traced], request: pytest.FixtureRequest
) -> None:
    command = request.getfixturevalue(peer)
    program = {"proton": "proton_peer.py", "rhea": "rhea_peer.js"}[peer]
    traced = tracing(served.url)
    foreign(command, program, "send", port=traced.port, address="q", count=1)
    found = foreign(command, program, "receive", port=traced.port, address="q", count=1)
    assert found["received"] == 1
    drawn, summary = traced.stop()
    assert len(re.findall(" transfer ", drawn)) == 2
    assert "connections: 2\n" in summary
    assert "!" not in drawn


@pytest.mark.slow
@pytest.mark.req("O1")
def test_a_password_is_neither_drawn_nor_kept(
    tmp_path: Path, tracing: Callable[..., Traced]
) -> None:
    users = tmp_path / "users"
    ok("user", "add", str(users), "ada:s3cret-Phrase")
    served = Served("--users", str(users), "--auto-create", "queue:*")
    try:
        traced = tracing(served.url, "--write", str(tmp_path / "kept"))
        ok("send", "q", "x", url=traced.url.replace("//", "//ada:s3cret-Phrase@"))
        drawn, _ = traced.stop()
    finally:
        assert served.stop()[0] == 0
    assert "sasl-init" in drawn
    assert "s3cret" not in drawn
    assert b"s3cret" not in (tmp_path / "kept").read_bytes()


@pytest.mark.slow
@pytest.mark.req("O1", "L1")
def test_what_is_encrypted_behind_it_is_seen(tracing: Callable[..., Traced]) -> None:
    made = certificates()
    served = Served(
        *("--listen", "amqps://127.0.0.1:0", "--tls-cert", str(made.server)),
        *("--anonymous", "--auto-create", "queue:*"),
    )
    try:
        url = next(each for each in served.ready["listeners"] if each.startswith("amqps"))
        traced = tracing(url.replace("127.0.0.1", "localhost"), "--ca", str(made.ca))
        ok("send", "q", "x", url=traced.url)
        drawn, _ = traced.stop()
    finally:
        assert served.stop()[0] == 0
    assert " transfer " in drawn


@pytest.mark.slow
def test_a_server_that_is_not_there_and_clients_that_speak_something_else(
    served: Served, tracing: Callable[..., Traced]
) -> None:
    traced = tracing("amqp://127.0.0.1:1")
    assert amqp_rt("send", "q", "x", url=traced.url).returncode == 1
    drawn, summary = traced.stop()
    assert "! cannot connect to amqp://127.0.0.1:1: nothing listens there" in drawn
    assert "nothing listens there: 1\n" in summary

    traced = tracing(served.url)
    with socket.create_connection(("127.0.0.1", traced.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while client.recv(100):
            pass
    drawn, _ = traced.stop()
    assert "18 bytes of another protocol, not kept" in drawn
    assert "GET" not in drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["amqp://a:b@h"], "the client logs in by itself: leave the user out of the URL"),
        (["mqtt://h"], "there is no such scheme"),
        (["memory://x"], "within one process"),
        (["amqp://h", "--html", "x"], "keep the trace with --write first"),
        (["amqp://h", "--listen", "wss://:1"], "it listens on amqp or amqp+unix, not on wss"),
        (["file", "--listen", ":1"], "--listen and --write go with a URL"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    done = amqp_rt("trace", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_is_said(served: Served) -> None:
    done = amqp_rt("trace", "--listen", served.url.rpartition(":")[2], "amqp://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.endswith("the address is already in use\n")
