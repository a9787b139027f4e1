"""What the benchmarks have started ends with them, whichever signal ends them: real processes and brokers."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import foreign_brokers
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are told by pidfd")

ROOT = Path(__file__).parent.parent.parent
PATIENCE_MS = 60_000
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL)

#: A child that does not end when it is asked to, and one of its own. Both ids are printed.
STUBBORN = """
import signal, subprocess, sys
from benchmarks.processes import exit_on_signals, start
exit_on_signals()
below = '''
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
last = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(last.pid, flush=True)
signal.pause()
'''
child = start([sys.executable, "-c", below], stdout=subprocess.PIPE)
print([child.pid, int(child.stdout.readline())], flush=True)
signal.pause()
"""

#: A broker of *name* that has started; its processes are printed, and the folder of scratch files.
BROKER = """
import json, signal, sys, tempfile
from pathlib import Path
from benchmarks.contestants import PEERS, ours
from benchmarks.processes import descendants, exit_on_signals
exit_on_signals()
name = sys.argv[1]
contestant = ours(name, Path(sys.executable)) if name in ("pure", "compiled") else PEERS[name]()
if isinstance(contestant, str):
    print(json.dumps(contestant), flush=True)
    sys.exit()
with (contestant.durable_broker or contestant.broker)() as running:
    print(json.dumps([each for pid in running.pids for each in descendants(pid)]), flush=True)
    signal.pause()
"""


@contextmanager
def started(program: str, *arguments: str, scratch: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def watch(pids: list[int]) -> list[int]:
    """Open what says when each of *pids* has ended."""
    return [os.pidfd_open(pid) for pid in pids]


def all_ended(watched: list[int]) -> bool:
    ended = []
    for each in watched:
        poll = select.poll()
        poll.register(each, select.POLLIN)
        ended.append(bool(poll.poll(PATIENCE_MS)))
        os.close(each)
    return all(ended)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_process_group_ends_with_the_process_that_started_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    with started(STUBBORN, scratch=tmp_path) as process:
        assert process.stdout is not None
        watched = watch(json.loads(process.stdout.readline()))
        process.send_signal(number)
        assert all_ended(watched)


def mode() -> str:
    import amqp_rt

    return "compiled" if amqp_rt.COMPILED else "pure"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize(
    "name",
    [
        "own",
        pytest.param("proton", marks=pytest.mark.foreign),
        pytest.param("proton-c", marks=[pytest.mark.foreign, pytest.mark.smoke]),
        pytest.param("rabbitmq", marks=pytest.mark.foreign),
    ],
)
def test_no_broker_is_left_behind(name: str, number: signal.Signals, tmp_path: Path) -> None:
    with started(BROKER, mode() if name == "own" else name, scratch=tmp_path) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        if isinstance(found, str):
            foreign_brokers.absent(found)
        watched = watch(found)
        process.send_signal(number)
        assert all_ended(watched)
        process.wait()
    if number is signal.SIGTERM:
        assert process.returncode == 128 + number
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_terminated_ends_its_roles(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "benchmarks", "broker", "--peers", "none", "--mode", mode()),
        *("--compiled-python", sys.executable, "--sizes", "100", "--seconds", "60"),
    ]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE) as process:
        try:
            foreign_brokers.benchmarks()
            from benchmarks.processes import descendants

            assert process.stderr is not None
            assert process.stderr.readline().startswith(b"[0/")
            # The guard, a broker and two clients.
            while len(descendants(process.pid)) < 5:
                with suppress(subprocess.TimeoutExpired):
                    pytest.fail(f"it ended with {process.wait(0.05)}")
            watched = watch(descendants(process.pid)[1:])
            process.terminate()
            assert all_ended(watched)
            assert process.wait() == 128 + signal.SIGTERM
        finally:
            process.kill()


#: A thread that works and ends, between two lines of input and output.
BUSY = """
import sys, threading, time
print(flush=True)
sys.stdin.readline()
def work():
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(flush=True)
sys.stdin.readline()
"""


def test_processor_time_has_the_time_of_threads_that_have_ended() -> None:
    foreign_brokers.benchmarks()
    from benchmarks.processes import cpu_s

    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        before = cpu_s([child.pid])
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert cpu_s([child.pid]) - before >= 0.3
        child.stdin.close()
