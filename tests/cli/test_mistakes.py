"""Every command that connects, with every usual mistake: one sentence, an exit code, and never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import click
import pytest
from certificates import certificates
from click.testing import CliRunner, Result
from commands import COMMAND, Served

from amqp_rt.cli import OURS, main

pytestmark = pytest.mark.slow

#: Arguments of each command that connects to --url.
COMMANDS: dict[str, list[str]] = {
    "send": ["work", "x"],
    "receive": ["work", "--count", "1", "--timeout", "1"],
    "request": ["work", "x", "--timeout", "1"],
    "node list": [],
    "node hosts": [],
    "node show": ["work"],
    "node create": ["queue:made"],
    "node update": ["work", "max_deliveries=3"],
    "node delete": ["work", "--yes"],
    "node peek": ["work"],
    "node purge": ["work", "--yes"],
    "node move": ["work", "other"],
    "connections list": [],
    "connections show": ["999"],
    "connections close": ["999"],
    "sessions list": [],
    "sessions show": ["999/0"],
    "sessions close": ["999/0"],
    "links list": [],
    "links show": ["999/0/0"],
    "links close": ["999/0/0"],
    "subscriptions list": [],
    "subscriptions show": ["999/0/0"],
    "subscriptions close": ["999/0/0"],
    "schedules list": [],
    "schedules show": ["none"],
    "schedules close": ["none"],
    "transactions list": [],
    "transactions show": ["none"],
    "transactions resolve": ["none", "commit", "--yes"],
    "transactions close": ["none"],
    "transactions open": [],
    "transactions rollback": ["999", "--yes"],
    "termini list": [],
    "termini show": ["none"],
    "termini close": ["none"],
    "user list": [],
    "user add": ["bob:secret"],
    "user remove": ["bob"],
    "access explain": ["ada", "send", "work"],
    "ping": [],
    "health": [],
    "bench send": ["work", "--seconds", "0.2"],
    "bench receive": ["work", "--seconds", "0.2"],
    "bench call": ["work", "--seconds", "0.2"],
    "top": ["--every", "100ms"],
    "mesh show": [],
    "mesh drain": [],
    "mesh health": [],
}
#: Commands that need no right: they use no address.
WITHOUT_RIGHTS = {"ping"}

#: Commands that connect in ways of their own; the others share the ways of these.
ALL_MISTAKES = {"send", "receive", "request", "node list", "node peek", "ping", "bench send", "top"}

RULES = '[[rule]]\naddress = "*"\nrights = ["manage"]\nusers = ["root"]\n'


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Name → URL: a broker that gives clients without login no rights, and one that wants a login and has TLS."""
    folder = tmp_path_factory.mktemp("brokers")
    (folder / "access.toml").write_text(RULES, "utf-8")
    nodes = ("--node", "queue:work", "--node", "queue:other", "--volatile")
    poor = Served(
        *nodes, "--anonymous", "--user", "root:secret", "--access", "access.toml", cwd=folder
    )
    strict = Served(
        *(*nodes, "--user", "root:secret", "--tls-cert", str(certificates().server)),
        listen="amqps://127.0.0.1:0",
    )
    with socket.create_server(("127.0.0.1", 0)) as unused:
        silent = unused.getsockname()[1]
    yield {
        "no rights": poor.url,
        "rights": poor.url.replace("://", "://root:secret@"),
        "refused": strict.url,
        "not trusted": strict.url,
        "in clear": strict.url.replace("amqps:", "amqp:"),
        "no TLS": poor.url.replace("amqp:", "amqps:"),
        "nothing": f"amqp://ada:secret@127.0.0.1:{silent}",
    }
    assert poor.stop()[0] == 0
    assert strict.stop()[0] == 0


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def check(done: Result, *sentences: str) -> None:
    """Assert that a command ended with one of *sentences*."""
    # Any other exception would have been a traceback.
    assert isinstance(done.exception, SystemExit), (done.exception, done.output)
    assert done.exit_code in (1, 2), done.output
    assert [each for each in sentences if each in done.stderr], done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, done.stderr
    assert "secret" not in done.output


def leaves(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, member in command.commands.items():
            yield from leaves(f"{path} {name}", member)
    else:
        yield path, command


@pytest.mark.req("G6")
def test_the_table_has_every_command_that_connects() -> None:
    context = click.Context(main)
    found = set()
    for name in OURS:
        command = main.get_command(context, name)
        assert command is not None
        for path, leaf in leaves(name, command):
            options = {option for each in leaf.params for option in each.opts}
            if "--url" in options and path not in ("run", "trace"):
                found.add(path)
    assert found == set(COMMANDS)


@pytest.mark.req("G6")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_one_sentence(brokers: dict[str, str], command: str) -> None:
    def mistaken(url: str, *more: str) -> Result:
        return run(*command.split(), *COMMANDS[command], "--url", url, *more)

    check(mistaken(brokers["nothing"]), "nothing listens there")
    if command in ALL_MISTAKES or os.environ.get("AMQP_RT_LONG"):
        check(mistaken(brokers["not trusted"]), "certificate")
        check(mistaken("http://127.0.0.1"), "there is no such scheme")
        check(mistaken("amqp://127.0.0.1:99999"), "port")
        check(
            mistaken(brokers["refused"], "--ca", str(certificates().ca)),
            *("login", "credentials", "mechanism", "ANONYMOUS"),
        )
        check(mistaken(brokers["in clear"]), "TLS", "amqps", "closed", "ended")
        check(mistaken(brokers["no TLS"]), "the peer does not speak TLS there")
    if command not in WITHOUT_RIGHTS:
        check(mistaken(brokers["no rights"]), "is not for you", "nothing here is for you")


@pytest.mark.req("G6")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("node show none", "no node 'none'"),
        ("node update none max_deliveries=1", "no node 'none'"),
        ("node delete none --yes", "no node 'none'"),
        ("node delete none", "no node 'none'"),
        ("bench send none", "no node 'none'"),
        ("bench receive none", "no node 'none'"),
        ("bench call none", "no node 'none'"),
        ("bench receive work --rate 5", "--rate is for bench send and call"),
        ("connections show 999", "there is no connection '999'"),
        ("connections close 999", "there is no connection '999'"),
        ("sessions close 1/2/3", "there is no session '1/2/3'"),
        ("links show x", "there is no link 'x'"),
        ("transactions show x", "there is no branch 'x'"),
        ("user remove bob", "there is no user 'bob'"),
        ("mesh show", "is no member of a mesh"),
    ],
)
def test_what_is_not_there(brokers: dict[str, str], arguments: str, sentence: str) -> None:
    check(run(*arguments.split(), "--url", brokers["rights"]), sentence)


@pytest.mark.req("G6")
@pytest.mark.parametrize(
    "arguments", ["node list", "links list --json", "top --every 100ms", "ping"]
)
def test_a_reader_that_has_gone_ends_it_without_a_word(
    brokers: dict[str, str], arguments: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *arguments.split()],
        env={**os.environ, "AMQP_URL": brokers["rights"]},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.req("G6")
@pytest.mark.parametrize(
    "arguments", ["node list --json --watch 100ms", "bench send work --seconds 60 --json"]
)
def test_ctrl_c_ends_it_without_a_traceback(brokers: dict[str, str], arguments: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, *arguments.split(), "--url", brokers["rights"]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Its connection, and the one that looks, are there once it runs.
    give_up = time.monotonic() + 30
    look = ("connections", "list", "--json", "--url", brokers["rights"])
    while len(run(*look).stdout.splitlines()) < 2:
        assert time.monotonic() < give_up
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "")
