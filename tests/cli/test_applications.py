"""``amqp-rt run`` and ``amqp-rt asyncapi`` as processes: targets, workers, reloads, and reports to a service manager."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import trio
from certificates import certificates
from click.testing import CliRunner
from commands import COMMAND, Served, amqp_rt, ok
from trio.testing import MockClock

from amqp_rt.cli import main
from amqp_rt.cli.notifying import ServiceManager

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there are no signals to processes")

APPLICATION = '''
import os, sys, time
from amqp_rt import Broker, Container

container = Container("shop", drain_s=5)
word = "old"

@container.node("work")
async def work(body: str) -> None:
    """Do the work."""
    print(container.name, word, body, flush=True)
    if body == "exit":
        os._exit(7)

@container.rpc("add/{left}")
async def add(left: int, right: int) -> int:
    """Add <b>two</b> numbers."""
    return left + right

def make():
    return container

def fail():
    raise LookupError("my own mistake")

broker = Broker("hub")

class Order:
    pass
'''


class Running:
    """A running ``amqp-rt run``."""

    def __init__(self, cwd: Path, *arguments: str, **environ: str) -> None:
        self._errors = cwd / "errors"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "run", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=cwd,
                env={**os.environ, **environ},
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def ready(self) -> dict[str, Any]:
        line = self.line()
        assert line.startswith("ready "), line + self._errors.read_text()
        found: dict[str, Any] = json.loads(line.removeprefix("ready "))
        return found

    def told(self) -> str:
        return self._errors.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            output, _ = self.process.communicate(timeout=20)
        finally:
            self.process.kill()
        return self.process.returncode, output


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Folder with the package ``app``, whose module ``main`` has the application."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    (tmp_path / "app" / "main.py").write_text(APPLICATION)
    return tmp_path


@pytest.fixture
def loadable(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process load the application, from its folder."""
    monkeypatch.chdir(shop)
    monkeypatch.setattr("sys.path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {"app", "app.main", "main"} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def broker() -> Iterator[Served]:
    served = Served("--dev")
    yield served
    served.stop()


def until(true: Callable[[], object], within: float = 15) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        not Path(f"/proc/{pid}/stat").exists() or ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    )


@pytest.mark.slow
def test_an_application_listens_until_a_signal(shop: Path) -> None:
    running = Running(shop, "app.main:container", "--listen", "amqp://127.0.0.1:0")
    ready = running.ready()
    assert ready["pid"] == running.process.pid
    assert ok("request", "add/1", "2", url=ready["listeners"][0]) == "3\n"
    assert running.stop() == (0, "")


@pytest.mark.slow
def test_workers_share_a_queue_and_come_back(shop: Path, broker: Served) -> None:
    running = Running(
        shop, "app/main.py:make", "--factory", "--url", broker.url, "--workers", "2", "--name", "w"
    )
    ready = running.ready()
    assert set(ready["workers"]) == {"w-1", "w-2"}
    assert ready["pid"] == running.process.pid
    ok("send", "work", "exit", url=broker.url)
    first = running.line().split()
    assert first[1:] == ["old", "exit"]
    # Its message is delivered again, and ends the other one too, or the same again: without a limit of deliveries it is never dead-lettered.
    ok("node", "purge", "work", "--yes", url=broker.url)
    until(
        lambda: (
            f"worker '{first[0]}' ended with status 7; starting it again in 1 s" in running.told()
        )
    )
    until(lambda: running.told().count(f"worker '{first[0]}' serves: ") >= 2)
    code, _ = running.stop(signal.SIGINT)
    assert code == 0
    until(lambda: not any(alive(pid) for pid in ready["workers"].values()))


@pytest.mark.slow
def test_workers_end_with_their_supervisor(shop: Path, broker: Served) -> None:
    running = Running(shop, "app.main:container", "--url", broker.url, "--workers", "2")
    workers = running.ready()["workers"]
    assert set(workers) == {"shop-1", "shop-2"}
    running.process.kill()
    until(lambda: not any(alive(pid) for pid in workers.values()))
    running.stop()
    assert "the supervisor has ended; stopping" in running.told()


@pytest.mark.slow
def test_a_change_of_the_code_and_sighup_start_it_again(shop: Path, broker: Served) -> None:
    file = shop / "app" / "main.py"
    running = Running(shop, "app.main:container", "--url", broker.url, "--reload")
    running.ready()
    ok("send", "work", "one", url=broker.url)
    assert running.line() == "shop old one"
    # A mistake does not end it: the next change mends it.
    file.write_text(APPLICATION.replace("word = ", "word := "))
    until(lambda: "it starts again after a change" in running.told())
    assert "SyntaxError" in running.told()
    file.write_text(APPLICATION.replace('"old"', '"newer"'))
    ok("send", "work", "two", url=broker.url)
    assert running.line() == "shop newer two"
    served = running.told().count("worker 'shop' serves")
    running.process.send_signal(signal.SIGHUP)
    until(lambda: running.told().count("worker 'shop' serves") > served)
    code, _ = running.stop()
    assert code == 0


def probed(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.slow
def test_the_supervisor_answers_probes_of_all_workers(shop: Path, broker: Served) -> None:
    options = ("--url", broker.url, "--workers", "2", "--probe", "http://127.0.0.1:0")
    running = Running(shop, "app.main:container", *options)
    ready = running.ready()
    probe, workers = ready["probe"], ready["workers"]
    assert probed(f"{probe}/healthz") == (200, b'{"live":true}\n')
    until(lambda: probed(f"{probe}/readyz") == (200, b'{"ready":true,"reasons":[]}\n'))
    ok("send", "work", "one", url=broker.url)
    first = running.line().split()[0]
    _, page = probed(f"{probe}/metrics")
    count = (
        f'amqp_rt_handler_outcomes_total{{outcome="accepted",route="work",worker="{first}"}} 1.0'
    )
    assert count in page.decode()
    assert all(f',worker="{name}"}} 1.0' in page.decode() for name in workers)
    # One whose event loop does not run is not live, and is so again.
    os.kill(workers["shop-1"], signal.SIGSTOP)
    reasons = '"reasons":["shop-1: it does not answer"]'
    assert probed(f"{probe}/healthz") == (503, f'{{"live":false,{reasons}}}\n'.encode())
    assert probed(f"{probe}/readyz") == (503, f'{{"ready":false,{reasons}}}\n'.encode())
    os.kill(workers["shop-1"], signal.SIGCONT)
    until(lambda: probed(f"{probe}/readyz")[0] == 200)
    # One that has ended is the business of its supervisor.
    os.kill(workers["shop-2"], signal.SIGKILL)
    until(lambda: b"shop-2: it is " in probed(f"{probe}/readyz")[1])
    assert probed(f"{probe}/healthz")[0] == 200
    until(lambda: probed(f"{probe}/readyz")[0] == 200)
    assert running.stop()[0] == 0


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_command(shop: Path) -> None:
    done = run_to_end(shop, "app.main:contains", "--url", "amqp://127.0.0.1:1", "--workers", "2")
    assert done.returncode == 2
    assert "app.main has no 'contains'; did you mean app.main:container" in done.stderr
    assert "ended with status 2 before it served" in done.stderr


@pytest.mark.slow
def test_a_supervisor_ends_at_the_second_signal(shop: Path, broker: Served) -> None:
    text = APPLICATION.replace("drain_s=5", "drain_s=60").replace(
        "    print(", "    import trio; await trio.sleep(0)\n    print("
    )
    text = text.replace("    if body ==", "    await trio.sleep(60)\n    if body ==")
    (shop / "app" / "main.py").write_text(text)
    running = Running(shop, "app.main:container", "--url", broker.url, "--workers", "2")
    workers = running.ready()["workers"]
    ok("send", "work", "one", url=broker.url)
    assert running.line().endswith("old one")
    running.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    code, _ = running.stop()
    assert code == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in workers.values())


def run_to_end(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "run", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_failure_of_the_users_code_has_its_traceback(shop: Path) -> None:
    done = run_to_end(shop, "app.main:fail", "--factory", "--listen", "amqp://127.0.0.1:0")
    assert done.returncode == 1
    head, first, *_, last = done.stderr.splitlines()
    assert head == "Traceback (most recent call last):"
    assert first.endswith('app/main.py", line 24, in fail')
    assert last == "LookupError: my own mistake"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("app.main", "'app.main' is not MODULE:NAME or FILE.py:NAME, such as app.main:container"),
        ("apq.main:container", "there is no module 'apq'; did you mean 'app'?"),
        ("app.mainly:container", "app has no module 'mainly'; did you mean 'main'?"),
        ("app.main.deep:container", "app.main has no module 'deep'"),
        (
            "app.main:shop",
            "app.main has no 'shop'; did you mean app.main:container or app.main:broker?",
        ),
        (
            "app.main:make",
            "a function, not a Container or Broker: if it returns one, amqp-rt run --factory calls it; did you",
        ),
        ("app.main:Order", "app.main:Order is a class, not a Container or Broker; did you mean"),
        ("app.main:word", "app.main:word is a str, not a Container or Broker; did you mean"),
        ("app/mainly.py:container", "there is no file app/mainly.py; did you mean 'app/main.py'?"),
        ("app..main:x", "app has no module ''"),
    ],
)
def test_a_wrong_target_is_one_sentence(loadable: None, target: str, sentence: str) -> None:
    done = CliRunner().invoke(main, ["run", target, "--listen", "amqp://127.0.0.1:0"])
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_wrong_target_is_not_suggested_again(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("class Order:\n    pass\n")
    done = CliRunner().invoke(main, ["serve", f"{tmp_path}/shop.py:Order"])
    assert done.exit_code == 2
    assert done.stderr.endswith(
        "shop.py:Order is a class, not a Container or Broker; define one: app = Container('app')\n"
    )


def test_a_container_of_asyncio_is_not_run_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from amqp_rt import aio\n\n\ndef make():\n    return aio.Container('shop')\n\n\napp = make()\n"
    )
    for name, more in (("app", []), ("make", ["--factory"])):
        target = f"{tmp_path}/shop.py:{name}"
        done = CliRunner().invoke(main, ["run", target, *more, "--url", "amqp://127.0.0.1"])
        assert done.exit_code == 2, done.output
        said = " ".join(done.output.split())
        assert f"{name} is an amqp_rt.aio.Container, which a program of its own enters" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "http://x"], "there is no such scheme"),
        (["--listen", "amqp://127.0.0.1:99999"], "the port is no number up to 65535"),
        (["--url", "amqp://x", "--probe", "ftp://x"], "is no URL of a probe"),
        (
            ["--listen", "amqp://127.0.0.1:0", "--workers", "2"],
            "share the queues of a peer, but no port",
        ),
        (["--url", "amqp://x", "--workers", "0"], "0 is not in the range"),
    ],
)
def test_wrong_options_are_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AMQP_URL", raising=False)
    done = CliRunner().invoke(main, ["run", "app.main:container", *arguments])
    assert done.exit_code == 2
    assert sentence in done.output


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("app.main:broker", "--listen: no plug-in has a profile 'no'; installed are: "),
        ("app.main:container", "profiles of plug-ins are for brokers"),
    ],
)
def test_a_listener_with_a_profile_that_is_not_there(
    loadable: None, target: str, sentence: str
) -> None:
    done = CliRunner().invoke(main, ["run", target, "--listen", "amqp://127.0.0.1:0?profile=no"])
    assert done.exit_code == 2, done.output
    assert sentence in done.output


def test_there_is_a_place_to_run_at(loadable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMQP_URL", raising=False)
    done = CliRunner().invoke(main, ["run", "app.main:container"])
    assert done.exit_code == 2
    assert "where does it run? Give --url URL, --listen URL, or both." in done.output


def test_reload_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    done = CliRunner().invoke(main, ["run", "a:b", "--listen", "amqp://127.0.0.1:0", "--reload"])
    assert done.exit_code == 2
    assert "pip install 'amqp-rt[reload]'" in done.output


# --- the service manager ---------------------------------------------------------------------


class Manager:
    """Socket of a service manager."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(20)
        self.socket.bind(f"\0{path[1:]}" if path.startswith("@") else path)

    def received(self) -> dict[str, str]:
        lines = self.socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def until(self, name: str) -> dict[str, str]:
        while name not in (found := self.received()):
            pass
        return found


@pytest.mark.slow
@pytest.mark.parametrize("tls", [True, False])
def test_a_broker_reports_its_state(tmp_path: Path, tls: bool) -> None:
    path = str(tmp_path / "notify")
    with Manager(path) as manager:
        served = Served(
            *("--dev", *(("--tls-cert", str(certificates().server)) if tls else ())),
            NOTIFY_SOCKET=path,
            WATCHDOG_USEC="400000",
        )
        assert manager.received() == {"READY": "1", "STATUS": "serving"}
        began = time.monotonic()
        for _ in range(3):
            assert manager.received() == {"WATCHDOG": "1"}
        assert time.monotonic() - began < 2
        served.process.send_signal(signal.SIGHUP)
        reloading = manager.until("RELOADING")
        assert int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        manager.until("READY")
        served.process.send_signal(signal.SIGTERM)
        manager.until("STOPPING")
        assert served.process.wait(20) == 0
        served.stop()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_application_reports_its_state(shop: Path, broker: Served, workers: str) -> None:
    path = f"@amqp-rt-test-{os.getpid()}-{workers}"
    with Manager(path) as manager:
        running = Running(
            *(shop, "app.main:container", "--url", broker.url, "--workers", workers),
            NOTIFY_SOCKET=path,
            WATCHDOG_USEC="10000000",
            WATCHDOG_PID="1",
        )
        assert manager.received()["READY"] == "1"
        running.process.send_signal(signal.SIGTERM)
        # No signs of life are expected of this process, and its workers have no manager.
        assert manager.received() == {"STOPPING": "1", "STATUS": "stopping"}
        assert running.process.wait(20) == 0
        running.stop()


@pytest.mark.parametrize("path", ["", "relative", "/no/such/socket"])
def test_a_manager_that_cannot_be_told_does_no_harm(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    ServiceManager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "x"}).ready()
    assert caplog.messages == (
        ["the service manager was not told READY=1: [Errno 2] No such file or directory"]
        if path.startswith("/")
        else []
    )


def test_a_reload_does_not_make_a_standby_ready(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with Manager(path) as manager:
        service = ServiceManager({"NOTIFY_SOCKET": path})
        service.reloading()
        service.reloaded()
        service.ready("first")
        assert manager.received() == {"READY": "1", "STATUS": "first"}
        service.reloading()
        service.reloaded()
        assert "RELOADING" in manager.received()
        assert manager.received() == {"READY": "1", "STATUS": "serving"}


async def test_a_standby_leaves_room_for_ready_in_the_queue_of_its_manager(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Send to a manager that does not read, for which Linux keeps ten datagrams."""
    path = str(tmp_path / "notify")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as received:
        received.bind(path)
        received.setblocking(False)
        manager = ServiceManager({"NOTIFY_SOCKET": path})
        reason = "in use by one"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.show_standby, lambda: reason)
            await trio.sleep(15.5)
            reason = "in use by two"
            await trio.sleep(45)
            nursery.cancel_scope.cancel()
        manager.ready()
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(received.recv(4096).decode())
    # A new reason is sent at once, and the request for 30 more seconds is renewed in time.
    assert [each.partition("\n")[0] for each in found] == [
        *["STATUS=standby: in use by one"] * 2,
        *["STATUS=standby: in use by two"] * 5,
        "READY=1",
    ]
    assert all("EXTEND_TIMEOUT_USEC=30000000" in each for each in found[:-1])


# --- AsyncAPI --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_document_of_an_application(shop: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "asyncapi", "app.main:container", "--api-version", "2.1"],
        capture_output=True,
        text=True,
        cwd=shop,
        timeout=60,
        check=True,
    )
    document = json.loads(done.stdout)
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "shop", "version": "2.1"}
    assert document["operations"]["rpc.add_left"]["summary"] == "Add <b>two</b> numbers."


def test_the_page_of_an_application(shop: Path, loadable: None) -> None:
    target = f"{shop}/app/main.py:make"
    done = CliRunner().invoke(
        main, ["asyncapi", target, "--factory", "--html", "--output", str(shop / "api.html")]
    )
    assert (done.exit_code, done.output) == (0, "")
    page = (shop / "api.html").read_text()
    assert "<h2><code>add/{left}</code></h2>\n<p>Add &lt;b&gt;two&lt;/b&gt; numbers.</p>" in page
    assert "The application answers requests at this address." in page
    assert (
        "<dt>Reply</dt>\n<dd><pre>{\n  &quot;type&quot;: &quot;integer&quot;\n}</pre></dd>" in page
    )
    failed = CliRunner().invoke(main, ["asyncapi", target, "--factory", "--output", f"{shop}/no/x"])
    assert failed.exit_code == 1
    assert "cannot write" in failed.output


def test_help_names_the_commands() -> None:
    assert "Run an application" in CliRunner().invoke(main, ["--help"]).output
    assert amqp_rt("run", "--help").returncode == 0
