"""``amqp-rt bench`` and ``top``: what they measure of real brokers, and how latencies are counted."""

from __future__ import annotations

import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from commands import COMMAND, Served
from trio.testing import MockClock

from amqp_rt import connect
from amqp_rt.cli import bench as bench_module
from amqp_rt.cli import main
from amqp_rt.cli import top as top_module
from amqp_rt.cli.bench import _Pace
from amqp_rt.cli.latencies import Latencies

APPLICATION = """
from amqp_rt import Container, rpc

@rpc("echo")
async def echo(body: bytes) -> bytes:
    return body

container = Container("app", nodes=[echo])
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("broker")
    (folder / "app.py").write_text(APPLICATION, "utf-8")
    served = Served(
        *("app.py:container", "--volatile", "--node", "queue:work", "--node", "queue:other"),
        *("--node", "queue:small?length_max=2&overflow=block"),
        cwd=folder,
    )
    yield served
    assert served.stop()[0] == 0


@pytest.mark.req("G6")
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_percentiles_are_at_most_a_little_too_large(spread: float) -> None:
    drawn = random.Random(7)
    values = sorted(drawn.lognormvariate(-7, spread) for _ in range(2_000))
    seen = Latencies()
    for value in values:
        seen.add(value)
    assert (seen.count, seen.least_s, seen.most_s) == (2_000, values[0], values[-1])
    for percent in (0.1, 50, 90, 99, 99.9, 100):
        exact = values[max(1, -(-2_000 * int(percent * 10) // 1_000)) - 1]
        assert exact <= seen.percentile(percent) <= exact * 1.012, percent
    assert Latencies().percentile(99) == 0.0


@pytest.mark.req("G6")
async def test_a_pause_of_the_peer_delays_what_was_due_meanwhile(autojump_clock: MockClock) -> None:
    """One message of 20 meets a pause of one second, and ten more were due in it."""
    seen = Latencies()
    pace = _Pace(10, 2)
    pauses = iter([1.0])
    while (due := await pace.due()) is not None:
        await trio.sleep(next(pauses, 0.0))
        seen.add(trio.current_time() - due)
    assert (seen.count, pace.missed) == (20, 0)
    # 1.0, 0.9, ... 0.1 and then nothing; without the correction all but one would be 0.
    assert seen.total_s == pytest.approx(5.5)
    assert seen.percentile(75) == pytest.approx(0.5, rel=0.02)


@pytest.mark.req("G6")
async def test_what_could_not_be_begun_is_counted(autojump_clock: MockClock) -> None:
    pace = _Pace(10, 2)
    done = 0
    while await pace.due() is not None:
        await trio.sleep(0.5)
        done += 1
    assert (done, pace.missed) == (4, 16)


KEYS = [
    *("what", "address", "clients", "pending", "size", "target_rate", "seconds", "messages"),
    *("bytes", "rate", "missed", "unfinished", "corrected"),
    *("p50_ms", "p90_ms", "p99_ms", "p999_ms", "min_ms", "mean_ms", "max_ms"),
]


def bench(broker: Served, *arguments: str) -> dict[str, Any]:
    done = run("bench", *arguments, "--json", "--url", broker.url)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found) == KEYS
    return found


@pytest.mark.slow
@pytest.mark.req("G6")
def test_benchmarks_of_a_broker(broker: Served) -> None:
    sent = bench(
        broker,
        "send",
        "work",
        "--seconds",
        "0.3",
        "--clients",
        "2",
        "--pending",
        "5",
        "--size",
        "64",
    )
    assert sent["messages"] > 20
    assert sent["bytes"] == 64 * sent["messages"]
    assert (sent["corrected"], sent["missed"]) == (False, 0)
    shown = json.loads(run("node", "show", "work", "--json", "--url", broker.url).stdout)
    assert shown["available"] == sent["messages"]
    received = bench(broker, "receive", "work", "--seconds", "0.5")
    assert 0 < received["messages"] <= sent["messages"]
    assert received["p50_ms"] > 0
    called = bench(broker, "call", "echo", "--seconds", "0.5", "--rate", "40")
    assert called["corrected"] is True
    assert called["messages"] + called["missed"] == 20
    assert called["min_ms"] <= called["p50_ms"] <= called["p999_ms"] <= called["max_ms"]
    text = run("bench", "call", "echo", "--seconds", "0.2", "--url", broker.url).stdout
    assert "latency in ms, since begun: min " in text
    run("node", "purge", "work", "--yes", "--url", broker.url)


@pytest.mark.slow
@pytest.mark.req("G6")
def test_a_benchmark_of_a_full_queue_ends(broker: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "_GRACE_S", 0.2)
    done = run("bench", "send", "small", "--pending", "3", "--seconds", "0.3", "--url", broker.url)
    assert done.exit_code == 0, done.stderr
    assert "3 messages had no outcome 0.2 s after the end" in done.stderr


@pytest.mark.slow
@pytest.mark.req("G6")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("call silent --seconds 0.2", "no latencies: nothing was answered"),
        ("send silent --seconds 0", "no latencies: nothing was sent"),
        ("receive silent --seconds 0.2", "no latencies: nothing was received"),
        ("send full --seconds 0.2", "no latencies: nothing was accepted"),
    ],
)
def test_a_benchmark_without_latencies_gives_the_reason(
    broker: Served, monkeypatch: pytest.MonkeyPatch, arguments: str, sentence: str
) -> None:
    monkeypatch.setattr(bench_module, "_GRACE_S", 0.2)
    for name in ("silent", "full?length_max=1&overflow=block"):
        run("node", "create", f"queue:{name}", "--url", broker.url)
    run("send", "full", "x", "--url", broker.url)
    done = run("bench", *arguments.split(), "--url", broker.url)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[1] == sentence
    if "call" in arguments:
        assert "1 requests had no reply 0.2 s after the end: there may be no service" in done.stderr
    for name in ("silent", "full"):
        run("node", "delete", name, "--yes", "--url", broker.url)


@pytest.mark.slow
@pytest.mark.req("G6")
@pytest.mark.parametrize("due", [math.inf, -1e305, math.nan])
def test_a_time_that_is_none_is_ignored(broker: Served, due: float) -> None:
    async def send() -> None:
        async with connect(broker.url) as peer, peer.sender("other") as sender:
            await sender.send(b"", application_properties={bench_module._DUE: due})

    trio.run(send)
    found = bench(broker, "receive", "other", "--seconds", "0.2")
    assert (found["messages"], found["p50_ms"]) == (1, None)


@pytest.mark.slow
@pytest.mark.req("G6")
def test_the_busiest_nodes(broker: Served) -> None:
    for name, count in (("other", "7"), ("work", "3")):
        assert run("send", name, "x", "--count", count, "--url", broker.url).exit_code == 0
    for order, first in (("depth", "other"), ("name", "other"), ("rate", "other")):
        done = run("top", "--every", "100ms", "--sort", order, "--url", broker.url)
        assert done.exit_code == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith("app: ")
        assert lines[2].split()[:4] == ["name", "kind", "in/s", "out/s"]
        assert lines[3].split() == [first, "queue", "0.0", "0.0", "7", "0", "0", "0"]
    assert run("top", "--every", "0.01", "--url", broker.url).exit_code == 2
    done = run("top", "--every", "100ms", "--json", "--count", "1", "--url", broker.url)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {
        "name": "other",
        "kind": "queue",
        "in_per_s": 0.0,
        "out_per_s": 0.0,
        "available": 7,
        "acquired": 0,
        "consumers": 0,
        "producers": 0,
    }


@pytest.mark.req("G6")
@pytest.mark.parametrize("width", [80, 20])
def test_lines_of_a_screen_do_not_wrap(width: int) -> None:
    """One long name, such as that of a stranger, would move the other nodes off the screen."""
    node = {"kind": "queue", "dynamic": False, "enqueued": 0, "delivered": 0, "available": 12_345}
    node |= {"acquired": 0, "consumers": 1, "producers": 0}
    nodes = [{**node, "name": name} for name in ("short", "\x1b" * 1024)]
    container = {"name": "b" * 200, "connections": 1, "nodes": 2, "bytes": 0}
    look = top_module._Look(container, nodes, 0.0)
    text = top_module._screen(look, look, "name", everything=False, most=9, width=width)
    widest = max(map(len, text.splitlines()))
    # A terminal that has no room for the counts has some for the beginnings of names.
    assert widest == 80 if width == 80 else widest < 80
    assert text.splitlines()[-1].startswith("short  ")
    assert text.splitlines()[-2].startswith("\\x1b\\x1b")
    assert "…" in text


@pytest.mark.slow
@pytest.mark.req("G6")
@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_keys_of_a_terminal(broker: Served, end: str) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "top", "--every", "200ms", "--url", broker.url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        give_up = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < give_up, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 65_536)

    try:
        until(b"by rate; s sorts, q ends")
        os.write(ours, b"s")
        until(b"by depth; s sorts, q ends")
        if end == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT)
        # The cursor is shown again, and the other screen left.
        until(b"\x1b[?25h\x1b[?1049l")
        assert process.wait(timeout=30) == (0 if end == "q" else 130)
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)
