"""``amqp-rt ping``, ``health`` and ``doctor``: what they find, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from certificates import certificates
from click.testing import CliRunner, Result
from commands import Served

from amqp_rt.broker.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.cli import doctor as doctor_module
from amqp_rt.cli import main
from amqp_rt.stores.base import StoreFailed
from amqp_rt.stores.memory import MemoryStore


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module")
def broker() -> Iterator[Served]:
    served = Served(
        *("--user", "ada:secret", "--node", "queue:work", "--listen", "ws://127.0.0.1:0/amqp"),
        *("--tls-cert", str(certificates().server), "--listen", "amqps://127.0.0.1:0"),
    )
    yield served
    assert served.stop()[0] == 0


def url_of(broker: Served, scheme: str, login: str = "ada:secret@") -> str:
    found = next(each for each in broker.ready["listeners"] if each.startswith(f"{scheme}://"))
    return str(found).replace("://", f"://{login}")


@pytest.mark.slow
@pytest.mark.req("G6")
@pytest.mark.parametrize(
    ("scheme", "steps"),
    [
        ("amqp", {"connect", "sasl", "open", "echo"}),
        ("amqps", {"connect", "tls", "sasl", "open", "echo"}),
        ("ws", {"connect", "tls", "sasl", "open", "echo"}),
    ],
)
def test_each_step_of_a_connection_is_measured(
    broker: Served, scheme: str, steps: set[str]
) -> None:
    ca = ["--ca", str(certificates().ca)] if scheme == "amqps" else []
    done = run("ping", url_of(broker, scheme), "--json", *ca)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert "secret" not in done.stdout
    assert list(found) == [
        *("url", "connect_ms", "tls_ms", "sasl_ms", "open_ms", "echo_ms"),
        "container_id",
    ]
    taken = {key.removesuffix("_ms"): found[key] for key in found if key.endswith("_ms")}
    assert {step for step, ms in taken.items() if ms is not None} == steps
    # A login hashes the password, which takes its time on any machine.
    assert taken["sasl"] > 2
    assert found["container_id"] == "broker"
    shown = run("ping", url_of(broker, scheme), "--count", "2", *ca).stdout
    assert [line.split()[0] for line in shown.splitlines()[:-1]] == [
        step for step in ("connect", "tls", "sasl", "open", "echo") if step in steps
    ]


@pytest.mark.slow
@pytest.mark.req("G6")
def test_a_failed_step_is_named(broker: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = run("ping", f"amqp://127.0.0.1:{port}", "--timeout", "300ms")
        assert "the login took longer than 0.3 s" in done.stderr
        # The proxy is what does not answer, and its password is not shown.
        proxy = f"http://ada:secret@127.0.0.1:{port}"
        far = ("ping", "amqp://broker.example", "--proxy", proxy, "--timeout", "300ms")
        said = f"the connection through http://ada@127.0.0.1:{port} took longer than 0.3 s"
        done = run(*far)
        assert said in done.stderr
        assert "secret" not in done.stderr
        done = run("health", "--url", f"amqp://ada:secret@127.0.0.1:{port}", "--timeout", "300ms")
        assert "no answer within 0.3 s" in done.stderr
        assert "secret" not in done.stderr
    for url, ca, sentence in (
        (f"amqp://127.0.0.1:{port}", "", "nothing listens there"),
        (url_of(broker, "amqp", "ada:wrong@"), "", "the login failed"),
        (url_of(broker, "amqps"), "", "certificate"),
        (url_of(broker, "amqp").replace("amqp:", "amqps:"), "", "certificate"),
        ("http://x", "", "no such scheme"),
    ):
        done = run("ping", url, *(["--ca", ca] if ca else []))
        assert done.exit_code in (1, 2), url
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) <= 4


@pytest.mark.slow
@pytest.mark.req("A19")
def test_health_by_exit_code(broker: Served, tmp_path: Path) -> None:
    done = run("health", "--ready", "--url", url_of(broker, "amqp"))
    assert (done.exit_code, done.stdout.split(";")[0]) == (0, "broker: ready")
    found = json.loads(run("health", "--json", "--url", url_of(broker, "amqp")).stdout)
    assert list(found) == [
        *("live", "ready", "reasons", "name", "connections", "nodes", "bytes", "stuck")
    ]
    assert (found["live"], found["ready"], found["reasons"]) == (True, True, [])
    assert run("health", "--url", url_of(broker, "amqp", "ada:wrong@")).exit_code == 1
    assert run("health", "--url", "amqp://127.0.0.1:1").exit_code == 1


@pytest.mark.req("A19")
async def test_a_broker_without_its_store_is_live_and_not_ready() -> None:
    class Failing(MemoryStore):
        broken = False

        def commit(self, batch: Any) -> None:
            if self.broken:
                raise StoreFailed("the disk is gone")
            super().commit(batch)

    store = Failing()
    async with Broker("eu-1", store=store) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0")
        store.broken = True
        await broker.declare(Queue("q"))
        with trio.fail_after(10):
            while broker.container.health().ready:  # noqa: ASYNC110  # the store has no event for it
                await trio.sleep(0.01)

        def asked() -> tuple[Result, Result]:
            return run("health", "--ready", "--url", url), run("health", "--url", url)

        ready, live = await trio.to_thread.run_sync(asked)
    assert (ready.exit_code, live.exit_code) == (3, 0), ready.output
    assert ready.stdout.startswith("eu-1: live, not ready: the store has failed: ")


def findings(*arguments: str) -> dict[str, list[tuple[str, str, str]]]:
    done = run("doctor", "--json", *arguments)
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in done.stdout.splitlines():
        each = json.loads(line)
        assert list(each) == ["check", "state", "found", "advice"]
        assert each["advice"] or each["state"] == "ok"
        found.setdefault(each["check"], []).append((each["state"], each["found"], each["advice"]))
    wrong = any(state == "wrong" for rows in found.values() for state, _, _ in rows)
    assert done.exit_code == (1 if wrong else 0), done.output
    return found


@pytest.mark.req("G6")
def test_a_machine_is_examined(tmp_path: Path) -> None:
    found = findings("--store", f"sqlite:{tmp_path / 'x.db'}")
    assert set(found) == {"compiled", "clock", "descriptors", "fsync", "options"}
    [(_, commit, _)] = found["fsync"]
    assert f"a commit in {tmp_path} takes " in commit
    [(state, text, _)] = findings("--store", f"sqlite:{tmp_path}/no/x.db")["fsync"]
    assert (state, "cannot be written" in text) == ("wrong", True)


@pytest.mark.req("G6")
@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_files_of_a_broker_are_examined_as_its_config_names_them(tmp_path: Path) -> None:
    users = tmp_path / "users"
    assert run("user", "add", str(users), "ada:secret").exit_code == 0
    users.chmod(0o644)
    (tmp_path / "access.toml").write_text(
        '[[rule]]\naddress = "*"\nrights = ["manage"]\nanonymous = true\n'
        '[[rule]]\naddress = "*"\nrights = ["manage"]\nusers = ["*"]\n'
        '[[rule]]\naddress = "*"\nrights = ["send"]\nanonymous = true\n'
        '[[rule]]\naddress = "orders"\nrights = ["send"]\nusers = ["ada"]\n'
    )
    config = tmp_path / "serve.toml"
    config.write_text(
        f'users = "{users}"\naccess = "{tmp_path / "access.toml"}"\n'
        f'tls_cert = "{certificates().server}"\nlisten = ["amqp://127.0.0.1:5672"]\n'
        "[limits]\nconnections_max = 1000000000\n"
    )
    found = findings("--config", str(config))
    assert [state for state, _, _ in found["rights"]] == ["wrong", "warning", "warning"]
    assert (
        "wrong",
        f"others can use {users} (users): its mode is 644",
        f"run chmod 600 {users}",
    ) in (found["modes"])
    [(state, text, _)] = found["descriptors"]
    assert (state, "connections_max 1000000000" in text) == ("warning", True)
    [(_, only_users, _)] = findings("--users", str(users))["rights"]
    assert only_users == "without access rules every user may do everything"


NOT_STARTED = "correct that option or file: the broker would not start"


@pytest.mark.req("G6")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('\nlisen = ["a"]', "line 2: there is no 'lisen' here; did you mean 'listen'?"),
        ("listen = 5", "line 1: expected `array | null`, got `int`"),
        ("[limits]\nfoo = 3", "line 2: there is no 'foo' here"),
        ('dev = "maybe"', "line 1: expected `bool | null`, got `str`"),
        ('\nstore = "foo"', "line 2: 'foo' is no store: it is memory:"),
        ('store = "sqlite:serve.toml"', "line 1: {folder}/serve.toml is no store: give another"),
        ('users = "serve.toml"', "line 1: serve.toml, line 1: expected NAME:scrypt"),
        ('users = "none"', "line 1: cannot read users from none: No such file"),
        ('node = ["queue:a", "topic:a"]', "line 1: 'a' exists as Queue(name='a')"),
        ('listen = ["amqp://:0?profile=no"]\nanonymous = true', "line 1: no plug-in has a profile"),
        ('probe = "http://127.0.0.1:9000"', "line 1: a probe needs prometheus-client"),
        ("otel = true", "there is no exporter 'none-such' for traces"),
        ('listen = ["amqp://0.0.0.0:0"]', "who may connect? Give --user"),
        ('name = ""', "line 1: a container-id has at least one character"),
        ('origin = ["a.example"]', "line 1: 'a.example' is no origin of pages"),
        ('http_origin = "https://a.example"', "--http-origin goes with --http URL"),
        ('trace = "serve.toml"', "line 1: serve.toml cannot be a folder of traces: File exists"),
        ('trace = "none/x"', "line 1: none/x cannot be a folder of traces: No such file"),
        ('edges = 1\nlisten = ["ws://127.0.0.1:0"]', "line 1: edge processes need Linux"),
        ("listen = [", "line 1: "),
    ],
)
def test_what_a_broker_would_refuse_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    """The sentence is that of ``serve``, which checks its options by the same code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "amqp_rt.telemetry.metrics", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none-such")
    monkeypatch.delattr(socket, "SOCK_SEQPACKET")
    Path("serve.toml").write_text(text)
    [(state, found, advice)] = findings("--config", "serve.toml")["options"]
    assert (state, advice) == ("wrong", NOT_STARTED)
    assert sentence.format(folder=tmp_path) in found
    # The advice follows as a sentence of its own.
    assert not found.endswith(".")
    done = run("serve", "--config", "serve.toml")
    assert done.exit_code == 2
    assert found in done.stderr


@pytest.mark.req("G6")
def test_options_that_a_broker_would_refuse_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").write_text("something else\n")
    Path("other").chmod(0o600)
    for arguments, sentence in (
        (["--store", "foo"], "Invalid value for --store: 'foo' is no store: it is memory:"),
        (["--store", "sqlite:other"], f"{tmp_path / 'other'} is no store: give another path"),
        (["--users", "other"], "Invalid value for --users: other, line 1: expected NAME:scrypt"),
        (["--tls-key", "other"], "--tls-key and --tls-client-ca go with --tls-cert"),
        (["--config", "none.toml"], "cannot read none.toml: No such file or directory"),
    ):
        [(state, found, advice)] = findings(*arguments)["options"]
        assert (state, advice) == ("wrong", NOT_STARTED)
        assert sentence in found
    # One mistake is one finding: the checks of these files have given it.
    for option, check in (("--access", "rights"), ("--tls-cert", "certificate")):
        found_by = findings(option, "other")
        assert [state for state, _, _ in found_by[check]] == ["wrong"]
        assert "options" not in found_by


@pytest.mark.req("G6")
def test_a_broker_that_would_start_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is created or set up, no password is waited for, and variables of ``serve`` count."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "serve.toml"
    config.write_text(
        'listen = ["amqp://0.0.0.0:5672"]\nstore = "sqlite:broker.db"\nuser = ["ada:-"]\n'
        'node = ["queue:a", "log:b"]\ntrace = "traces"\nprobe = "http://127.0.0.1:9000"\n'
    )
    found = findings("--config", str(config))
    assert [state for state, _, _ in found["options"]] == ["ok"]
    assert f"a commit in {tmp_path} takes " in found["fsync"][0][1]
    assert [*tmp_path.iterdir()] == [config]
    monkeypatch.setenv("AMQP_RT_SERVE_CONFIG", str(config))
    assert f"a commit in {tmp_path} takes " in findings()["fsync"][0][1]
    monkeypatch.setenv("AMQP_RT_SERVE_LITSEN", "x")
    [(state, text, _)] = findings()["options"]
    assert (state, "did you mean AMQP_RT_SERVE_LISTEN?" in text) == ("wrong", True)


@pytest.mark.req("G6")
@pytest.mark.parametrize(
    ("days", "state", "sentence"),
    [(-1, "wrong", "it has expired"), (10, "warning", " days are left"), (300, "ok", "is valid")],
)
def test_dates_of_certificates(tmp_path: Path, days: int, state: str, sentence: str) -> None:
    pem = tmp_path / "server.pem"
    issued = trustme.CA().issue_cert(
        "localhost", not_after=datetime.now(UTC) + timedelta(days=days)
    )
    issued.private_key_and_cert_chain_pem.write_to_path(pem)
    [found] = findings("--tls-cert", str(pem))["certificate"]
    assert (found[0], sentence in found[1]) == (state, True), found
    # The key of another certificate does not fit.
    [found] = findings("--tls-cert", str(pem), "--tls-key", str(certificates().client))[
        "certificate"
    ]
    assert found[0] == "wrong"


@pytest.mark.req("G6")
def test_a_clock_that_nothing_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("the kernel of Linux tells")
    for answer, state, text in (
        (5, "warning", "nothing synchronizes the clock"),
        (0, "ok", "the clock is synchronized"),
        (-1, "ok", "does not tell"),
    ):
        monkeypatch.setattr(doctor_module, "_clock_state", lambda answer=answer: answer)
        [found] = findings()["clock"]
        assert (found[0], text in found[1]) == (state, True)
