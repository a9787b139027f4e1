"""The command line as scripts rely on it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificates
from commands import COMMAND, Served, amqp_rt, ok

from amqp_rt import COMPILED, __version__
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER


@pytest.fixture(scope="module")
def broker() -> Iterator[Served]:
    served = Served(
        *("--anonymous", "--volatile", "--node", "queue:work", "--node", "topic:news"),
        *("--auto-create", "queue:orders-*", "--auto-create", "topic:orders-live-*"),
    )
    yield served
    code, _ = served.stop()
    assert code == 0


@pytest.mark.parametrize("module", ["amqp_rt", "amqp_rt.cli"])
def test_the_version_tells_whether_it_is_compiled(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    form = "compiled" if COMPILED else "plain Python"
    ours, *plugins = done.stdout.splitlines()
    assert ours.startswith(f"amqp-rt, version {__version__} ({form}"), done.stdout
    [plugin] = [line for line in plugins if line.startswith("amqp-rt-amqp091, version ")]
    assert f" ({form}" in plugin, done.stdout
    # A plug-in that brings a command has a line, too; its decoder is compiled for editable installs as well.
    assert [line for line in plugins if line.startswith("amqp-rt-spark, version ")], done.stdout


@pytest.mark.slow
def test_the_ready_line_tells_where_and_who(broker: Served) -> None:
    assert set(broker.ready) == {"listeners", "pid"}
    assert broker.ready["pid"] == broker.process.pid
    assert broker.url.startswith("amqp://127.0.0.1:")
    assert not broker.url.endswith(":0")


@pytest.mark.slow
def test_send_and_receive(broker: Served) -> None:
    ok("send", "work", '{"sku": "A-1"}', url=broker.url)
    ok("send", "--url", broker.url, "work", "-", stdin="from standard input")
    told = ok("receive", "work", "--count", "2", url=broker.url)
    assert told.splitlines() == ['{"sku": "A-1"}', "from standard input"]


@pytest.mark.slow
def test_for_trying_things_one_option_is_enough() -> None:
    served = Served("--dev")
    try:
        ok("send", "any/address", "hello", "--durable", url=served.url)
        assert ok("receive", "any/address", "--count", "1", url=served.url) == "hello\n"
        # The plug-in that is installed speaks too.
        host, port = served.url.removeprefix("amqp://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            assert connection.recv(1) == b"\x01", "a method frame: connection.start"
    finally:
        code, told = served.stop()
    assert code == 0
    assert "connection opened: from 127.0.0.1:" in told
    assert "node made: queue 'any/address', on its first use" in told


@pytest.mark.slow
def test_quiet_shows_no_more_than_warnings() -> None:
    served = Served("--dev", "-q")
    try:
        ok("send", "x", "hello", url=served.url)
    finally:
        assert served.stop() == (0, "")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(broker: Served) -> None:
    ok("send", "work", "hello", url=broker.url)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "receive", "work", "--url", broker.url],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
    # Output that could not be shown is there again.
    assert ok("receive", "work", "--count", "1", url=broker.url) == "hello\n"


@pytest.mark.slow
def test_whole_messages_as_json(broker: Served) -> None:
    ok(
        *("send", "work", "hello", "--subject", "greeting", "--property", "lang=en"),
        *("--priority", "7", "--ttl", "60", "--message-id", "m1", "--durable"),
        url=broker.url,
    )
    (line,) = ok("receive", "work", "--count", "1", "--json", url=broker.url).splitlines()
    message = json.loads(line)
    assert message["body"] == "hello"
    assert message["application_properties"] == {"lang": "en"}
    assert message["properties"]["subject"] == "greeting"
    assert message["properties"]["message_id"] == "m1"
    assert message["header"]["priority"] == 7
    assert message["header"]["durable"] is True


@pytest.mark.slow
def test_octets_are_received_unchanged_if_wanted(broker: Served) -> None:
    octets = b"\x00\xff\r\n\xfe"

    def call(*arguments: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(
            [*COMMAND, *arguments, "--url", broker.url],
            input=stdin,
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout

    for _ in range(3):
        call("send", "work", stdin=octets)
    assert call("receive", "work", "--count", "1") == b"\x00\\xff\r\n\\xfe\n"
    assert call("receive", "work", "--count", "2", "--raw") == 2 * octets
    # A text, and a value that has no octets of its own.
    call("send", "work", "gr\u00fc\u00df dich")
    call("send", "work", '{"sku": "A-1"}')
    assert call("receive", "work", "--count", "2", "--raw").decode() == (
        'gr\u00fc\u00df dich{"sku": "A-1"}'
    )
    for command in ("receive", "request"):
        done = amqp_rt(command, "work", "--raw", "--json", url=broker.url)
        assert (done.returncode, "give one of them" in done.stderr) == (2, True)


@pytest.mark.slow
def test_octets_of_a_reply_are_written_unchanged_if_wanted(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from amqp_rt import Container, rpc\n"
        '@rpc("echo")\n'
        "async def echo(octets: bytes) -> bytes:\n"
        "    return octets[::-1]\n"
        'app = Container("app", nodes=[echo])\n'
    )
    served = Served(f"{tmp_path / 'app.py'}:app")
    call = [*COMMAND, "request", "echo", "-", "--url", served.url]
    try:
        octets = b"\x00\xff\r\n\xfe"
        for options, written in ((["--raw"], octets[::-1]), ([], b"\\xfe\n\r\\xff\x00\n")):
            done = subprocess.run(
                [*call, *options], input=octets, capture_output=True, timeout=60, check=True
            )
            assert done.stdout == written
    finally:
        served.stop()


@pytest.mark.slow
def test_durable_messages_need_a_store_or_leave_to_be_lost() -> None:
    served = Served("--node", "queue:work")
    try:
        done = amqp_rt("send", "work", "hello", "--durable", url=served.url)
        assert done.returncode == 1
        assert "the broker has no store" in done.stderr
        assert "amqp:precondition-failed" in done.stderr
    finally:
        served.stop()


@pytest.mark.slow
def test_browsing_takes_nothing(broker: Served) -> None:
    ok("send", "orders-browse", "stays", url=broker.url)
    for _ in range(2):
        told = ok("receive", "orders-browse", "--browse", "--count", "1", url=broker.url)
        assert told == "stays\n"
    assert ok("receive", "orders-browse", "--count", "1", url=broker.url) == "stays\n"


@pytest.mark.slow
def test_the_most_specific_pattern_makes_the_node(broker: Served) -> None:
    ok("send", "orders-eu", "x", url=broker.url)
    ok("send", "orders-live-eu", "x", url=broker.url)
    # The queue in which the answer comes is one too.
    assert "dynamic/" in ok("node", "list", "--all", url=broker.url)
    rows = [line.split() for line in ok("node", "list", url=broker.url).splitlines()]
    assert not [row for row in rows if row[0].startswith("dynamic/")]
    kinds = {row[0]: row[1] for row in rows}
    assert kinds["orders-eu"] == "queue"
    assert kinds["orders-live-eu"] == "topic"
    assert kinds["news"] == "topic"


@pytest.mark.slow
def test_too_few_messages_in_time_is_exit_code_1(broker: Served) -> None:
    done = amqp_rt("receive", "orders-empty", "--count", "1", "--timeout", "0.2", url=broker.url)
    assert done.returncode == 1
    assert done.stderr == "Error: 0 of 1 messages came within 0.2 s each\n"


@pytest.mark.slow
def test_nodes_are_looked_at_and_tidied_up(broker: Served) -> None:
    ok("send", "orders-tidy", "job", "--count", "5", url=broker.url)
    assert ok("node", "peek", "orders-tidy", "--count", "2", url=broker.url) == "job\njob\n"
    shown = dict(
        line.split(maxsplit=1)
        for line in ok("node", "show", "orders-tidy", url=broker.url).splitlines()
    )
    assert shown["available"] == "5"
    ok("send", "orders-other", "x", url=broker.url)
    moved = ok("node", "move", "orders-tidy", "orders-other", "--count", "2", url=broker.url)
    assert moved == "2 messages moved\n"
    assert ok("node", "purge", "orders-tidy", "--yes", url=broker.url) == "3 messages dropped\n"
    told = ok("receive", "orders-other", "--count", "3", url=broker.url)
    assert told.splitlines() == ["x", "job", "job"]


@pytest.mark.slow
def test_logs_and_durable_queues_too(tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(
        "[queues.work]\n[logs.clicks]\npartitions = 2\n[virtual_hosts.berlin.queues.work]\n",
        "utf-8",
    )
    arguments = ["--anonymous", "--nodes", "nodes.toml", "--store", "sqlite:broker.db", "--journal"]
    served = Served(*arguments, cwd=tmp_path)
    try:
        url = served.url
        ok("send", "work", "job", "--count", "3", "--durable", url=url)
        ok("send", "clicks", "click", "--count", "4", url=url)
        rows = {
            line.split()[0]: line.split()[1:3] for line in ok("node", "list", url=url).splitlines()
        }
        assert rows["work"] == ["queue", "3"]
        assert rows["clicks"] == ["log", "4"]
        assert rows["$journal"][0] == "log"
        assert ok("node", "peek", "work", "--count", "2", url=url) == "job\njob\n"
        assert ok("node", "peek", "clicks", "--count", "3", url=url) == "click\n" * 3
        assert "incarnation" in ok("node", "show", "clicks", url=url)
        assert ok("node", "move", "work", "clicks", "--count", "1", url=url) == "1 messages moved\n"
        assert ok("node", "peek", "clicks", url=url).count("\n") == 5
        assert ok("node", "purge", "clicks", "--yes", url=url) == "5 messages dropped\n"
        assert ok("node", "peek", "clicks", url=url) == ""
        assert ok("node", "purge", "work", "--yes", url=url) == "2 messages dropped\n"
        assert [line.split() for line in ok("node", "hosts", url=url).splitlines()[1:]] == [
            ["(default)", "4"],
            ["berlin", "2"],
        ]
        assert "berlin" not in ok("node", "list", url=f"{url}/berlin")
    finally:
        served.stop()
    served = Served(*arguments, cwd=tmp_path)
    try:
        ok("send", "clicks", "later", url=served.url)
        assert ok("node", "peek", "clicks", url=served.url) == "later\n"
        assert ok("node", "peek", "work", url=served.url) == ""
    finally:
        served.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["send", "nowhere", "x"], "has no node 'nowhere'"),
        (["receive", "nowhere", "--count", "1"], "has no node 'nowhere'"),
        (["request", "nowhere", "x"], "has no node 'nowhere'"),
        (["node", "show", "nowhere"], "no node 'nowhere'"),
        (["node", "move", "work", "nowhere"], "no node 'nowhere'"),
        (["node", "peek", "news"], "'news' is not a queue"),
        (["node", "purge", "nowhere"], "no node 'nowhere'"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    broker: Served, arguments: list[str], sentence: str
) -> None:
    done = amqp_rt(*arguments, url=broker.url)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["send", "--url", "http://x", "a", "b"], "there is no such scheme"),
        (["send", "--url", "amqp://127.0.0.1:1", "a", "b"], "cannot connect to amqp://127.0.0.1:1"),
        (["send", "--url", "amqp://h:99999", "a", "b"], "port"),
        (["send", "a", "b", "--property", "x"], "'x' is not NAME=VALUE"),
        (["serve", "--node", "orders"], "'orders' is not KIND:NAME"),
        (["serve", "--nodes", "none.toml"], "none.toml cannot be read: No such file"),
        (["serve", "--auto-create", "stack:x"], "'stack:x' is not KIND:NAME"),
        (["serve", "--node", "queue:x?prioritys=5"], "is 'priorities' meant?"),
        (["serve", "--auto-create", "queue:*?lock_s=long"], "lock_s"),
        (["serve", "--store", "leveldb:x"], "'leveldb:x' is no store: it is memory:"),
        (["serve", "--front", "amqp092"], "no plug-in has a protocol 'amqp092'"),
        (["serve", "--dev", "--front", "amqp092"], "no plug-in has a protocol 'amqp092'"),
        (["serve", "--listen", "amqps://127.0.0.1:0"], "give --tls-cert FILE"),
        (["serve", "--tls-cert", "/no/such/file"], "cannot read the certificate from /no/such"),
        (["serve", "--tls-key", "x"], "go with --tls-cert"),
        (["send", "a", "b", "--ca", "/no/such/file"], "cannot read the authorities from /no/such"),
        (["send", "a", "b", "--key", "x"], "--key goes with --cert"),
        (["serve", "--listen", "amqp://0.0.0.0:0"], "who may connect?"),
        (["serve", "--listen", "amqp://0.0.0.0:0", "--sasl", "off"], "who may connect?"),
        (
            ["serve", "--listen", "amqp://0.0.0.0:0", "--sasl", "optional", "--user", "a:b"],
            "--sasl optional accepts connections without credentials",
        ),
        (["serve", "--sasl", "off", "--user", "a:b"], "--sasl off disables logins"),
        (["serve", "--access", "no-such.toml"], "cannot read no-such.toml"),
        (["serve", "--user", "ada"], "AMQP_RT_PASSWORD_ADA"),
        (["serve", "--user", "ada:@/no/such/file"], "/no/such/file"),
        (["serve", "--listen", "http://127.0.0.1:0"], "there is no such scheme"),
        (["serve", "--listen", "0.0.0.0:99999"], "the port is no number up to 65535"),
        (["serve", "--trace", __file__], "cannot be a folder of traces: File exists"),
        (["serve", "--anonymous", "--store", "sqlite:no/such/x.db"], "there is no folder"),
        (["serve", "--trace", "no/such/folder"], "cannot be a folder of traces: No such file"),
        (["serve", "--listen", ""], "it has no host; 127.0.0.1 is this machine only"),
        (
            ["serve", "--dev", "--listen", "amqp://0.0.0.0:0"],
            "other machines can reach amqp://0.0.0.0:0",
        ),
        (
            ["serve", "--dev", "--listen", "amqp://:0"],
            "--dev accepts connections without credentials, and other",
        ),
        (["serve", "--dev", "--user", "a:b"], "leave --dev or --user out"),
        (["serve", "--dev", "--store", "sqlite:x.db"], "leave --dev or --store out"),
        (["serve", "--dev", "nofile.py:container"], "leave --dev or [FILE.py:container] out"),
        (["serve", "-v", "-q"], "give one of them"),
        (["user", "add", "ada:secret", "users"], "FILE comes before NAME"),
        (["send", "a", "b", "--ttl", "-1"], "'-1' is not a time such as 30s, 500ms, 5m or 2h"),
        (["send", "a", "b", "--ttl", "60d"], "is not between 0 and 49 days"),
        (["receive", "a", "--timeout", "nan"], "'nan' is not a time such as"),
        (["user", "remove", ".", "ada"], "cannot read users from .: Is a directory"),
        (["serve", "nofile.py:container"], "there is no file nofile.py"),
        (["serve", "nofile"], "is not MODULE:NAME or FILE.py:NAME"),
    ],
)
def test_a_users_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    done = amqp_rt(*arguments)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--node queue:a --node topic:a", "--node: 'a' exists as Queue(name='a')"),
        ("--node queue:a?dead_letter=b --node log:b", "--node: 'b' exists as Queue(name='b')"),
        ("--node queue:a --nodes nodes.toml", "--nodes: 'a' exists as Queue(name='a')"),
        ("--node queue:$management", "--node: no node can be called so: '$management'"),
        ("--node queue:a --node queue:b --limit nodes_max=1", "--node: the broker has 1 nodes"),
        ("--listen amqp://127.0.0.1:0?profile=no", "--listen: no plug-in has a profile 'no'"),
        (
            "--listen amqp+unix:///s?proxy_protocol=required&trusted=::1",
            "--listen: cannot listen on amqp+unix:///s: the PROXY protocol is for TCP",
        ),
        ("--store sqlite:nodes.toml", "nodes.toml is no store: give another path"),
        ("--name=", "--name: a container-id has at least one character"),
        ("--origin example.org", "--origin: 'example.org' is no origin of pages"),
        ("--origin https://a.example/x", "--origin: 'https://a.example/x' is no origin of pages"),
        ("--http-origin https://a.example", "--http-origin goes with --http URL"),
        ("--http-host a.example", "--http-host goes with --http URL"),
        ("--http-read-only", "--http-read-only goes with --http URL"),
        (
            "--http http://127.0.0.1:0 --http-origin amqp://a.example",
            "--http-origin: 'amqp://a.example' is no origin of pages",
        ),
        (
            "--http http://127.0.0.1:0 --http-host a.example:8080",
            "--http-host: 'a.example:8080' is no name of a host",
        ),
        ("--trace nodes.toml", "--trace: nodes.toml cannot be a folder of traces: File exists"),
        ("--trace none/x", "--trace: none/x cannot be a folder of traces: No such file"),
    ],
)
def test_a_wrong_option_of_a_broker_is_exit_code_2(
    tmp_path: Path, arguments: str, sentence: str
) -> None:
    """Service managers do not start it again, whether the option is found wrong early or late."""
    (tmp_path / "nodes.toml").write_text("[topics.a]\n", "utf-8")
    done = subprocess.run(
        [*COMMAND, "serve", "-q", "--listen", "amqp://127.0.0.1:0", *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error: ")]) == 1


@pytest.mark.slow
def test_help_teaches() -> None:
    for arguments in (
        [],
        ["serve"],
        ["send"],
        ["receive"],
        ["request"],
        ["node"],
        ["node", "move"],
    ):
        assert "Usage:" in ok(*arguments, "--help")
    # Lines that are not wrapped stand as they were written.
    assert "\n  In another one:    amqp-rt send orders" in ok("--help")


APPLICATION = """
from amqp_rt import Container, rpc, node, Reject

@rpc("double")
async def double(number: int) -> int:
    return 2 * number

@node("picky")
async def picky(number: int) -> None:
    raise Reject("not today")

container = Container("app", nodes=[double, picky])
other = 5
"""


@pytest.mark.slow
def test_an_applications_nodes_and_a_brokers_queues_at_one_listener(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    served = Served("app.py:container", "--node", "queue:work", cwd=tmp_path)
    try:
        assert ok("request", "double", "21", url=served.url) == "42\n"
        ok("send", "work", "x", url=served.url)
        rejected = amqp_rt("send", "picky", "1", url=served.url)
        assert (rejected.returncode, "not today" in rejected.stderr) == (1, True)
        malformed = amqp_rt("request", "double", '"x"', url=served.url)
        assert malformed.returncode == 1
        assert "Expected `int`" in malformed.stderr
    finally:
        code, _ = served.stop(signal.SIGINT)
    assert code == 0
    done = amqp_rt("serve", f"{tmp_path}/app.py:other")
    assert "app.py:other is a int, not a Container or Broker; did you mean" in done.stderr
    assert f"{tmp_path}/app.py:container?" in done.stderr


@pytest.mark.slow
@pytest.mark.req("SE2")
def test_users_log_in_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("fr om file\n")
    served = Served(
        *("--user", "ada:pw", "--user", f"ben:@{tmp_path}/secret", "--user", "cy"),
        *("--node", "queue:work"),
        AMQP_RT_PASSWORD_CY="from-env",
    )
    try:
        address = served.url.removeprefix("amqp://")
        for login in ("ada:pw", "ben:fr%20om%20file", "cy:from-env"):
            ok("send", "--url", f"amqp://{login}@{address}", "work", "x")
        for login in ("ada:wrong@", "nobody:pw@", ""):
            done = amqp_rt("send", "--url", f"amqp://{login}{address}", "work", "x")
            assert done.returncode == 1
            assert len(done.stderr.splitlines()) == 1
            assert "wrong" not in done.stderr
    finally:
        code, errors = served.stop()
    assert code == 0
    assert "pw" not in errors
    assert "from-env" not in errors


@pytest.mark.slow
def test_the_password_may_come_from_standard_input() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--listen", "amqp://127.0.0.1:0", "--user", "ada:-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("typed\n")
    process.stdin.flush()
    (url,) = json.loads(process.stdout.readline().removeprefix("ready "))["listeners"]
    done = amqp_rt("node", "list", "--url", url.replace("amqp://", "amqp://ada:typed@"))
    process.terminate()
    process.communicate(timeout=30)
    assert done.returncode == 0, done.stderr
    assert process.returncode == 0


@pytest.mark.slow
def test_logs_go_to_standard_error_as_json_if_wanted() -> None:
    served = Served("--user", "ada:pw", "--log-format", "json", "--log-level", "debug")
    amqp_rt("send", "--url", served.url.replace("amqp://", "amqp://ada:bad@"), "x", "y")
    code, errors = served.stop()
    assert code == 0
    entries = [json.loads(line) for line in errors.splitlines()]
    assert any("ada" in entry["message"] for entry in entries)
    assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)


@pytest.mark.slow
@pytest.mark.req("A10")
def test_sigterm_lets_running_work_finish(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import trio\n"
        "from amqp_rt import Container, rpc\n"
        "@rpc('slow')\n"
        "async def slow() -> str:\n"
        "    print('started', flush=True)\n"
        "    await trio.sleep(1)\n"
        "    return 'finished'\n"
        "container = Container('app', nodes=[slow])\n"
    )
    served = Served("app.py:container", cwd=tmp_path)
    caller = subprocess.Popen(
        [*COMMAND, "request", "--url", served.url, "slow"], stdout=subprocess.PIPE, text=True
    )
    assert served.process.stdout is not None
    assert served.process.stdout.readline() == "started\n"
    served.process.terminate()
    told, _ = caller.communicate(timeout=30)
    assert told == "finished\n"
    served.process.communicate(timeout=30)
    assert served.process.returncode == 0


@pytest.mark.slow
def test_a_second_signal_stops_the_waiting(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import trio\n"
        "from amqp_rt import Container, rpc\n"
        "@rpc('stuck')\n"
        "async def stuck() -> str:\n"
        "    print('started', flush=True)\n"
        "    try:\n"
        "        await trio.sleep(60)\n"
        "    finally:\n"
        "        print('over', flush=True)\n"
        "    return 'finished'\n"
        "container = Container('app', nodes=[stuck], drain_s=60)\n"
    )
    served = Served("app.py:container", "--log-level", "error", cwd=tmp_path)
    caller = subprocess.Popen(
        [*COMMAND, "request", "--url", served.url, "stuck", "--timeout", "60"],
        stderr=subprocess.DEVNULL,
    )
    assert served.process.stdout is not None
    assert served.process.stdout.readline() == "started\n"
    served.process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        served.process.wait(timeout=1)
    code, errors = served.stop()
    caller.communicate(timeout=30)
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.req("SE7", "SE8", "L7")
def test_tls_from_the_command_line(tmp_path: Path) -> None:
    known = certificates()
    path = tmp_path / "server.pem"
    path.write_bytes(known.server.read_bytes())
    served = Served(
        *("--listen", "amqps://127.0.0.1:0", "--tls-cert", str(path)),
        *("--anonymous", "--auto-create", "queue:*"),
    )
    try:
        plain, secure = served.ready["listeners"]
        for url in (secure, plain.replace("amqp://", "amqps://")):
            url = url.replace("127.0.0.1", "localhost")
            ok("send", "q", "hello", "--ca", str(known.ca), url=url)
        assert ok("receive", "q", "--count", "2", url=plain) == "hello\nhello\n"
        path.write_bytes(known.stranger.read_bytes())
        served.process.send_signal(signal.SIGHUP)
        refused = "is not believed"
        for _ in range(100):
            done = amqp_rt("send", "q", "x", "--ca", str(known.ca), url=secure)
            if done.returncode:
                break
        assert (done.returncode, refused in done.stderr) == (1, True), done.stderr
    finally:
        code, errors = served.stop()
    assert code == 0
    assert "the certificates were read again" in errors


@pytest.mark.slow
@pytest.mark.req("SE7", "SE2")
def test_mutual_tls_from_the_command_line() -> None:
    known = certificates()
    served = Served(
        *("--listen", "amqps://127.0.0.1:0", "--tls-cert", str(known.server)),
        *("--tls-client-ca", str(known.ca), "--tls-required", "--auto-create", "queue:*"),
    )
    try:
        url = served.ready["listeners"][1].replace("127.0.0.1", "localhost")
        ok("send", "q", "hello", "--ca", str(known.ca), "--cert", str(known.client), url=url)
        refused = amqp_rt("send", "q", "hello", "--ca", str(known.ca), url=url)
        assert refused.returncode == 1
        assert "requires a certificate of ours" in refused.stderr
        in_clear = amqp_rt("send", "q", "hello", url=served.url)
        assert "the peer requires TLS" in in_clear.stderr
    finally:
        assert served.stop()[0] == 0


@pytest.mark.slow
@pytest.mark.req("SE2", "SE3")
def test_users_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "users"
    ok("user", "add", str(path), "ada", "--scram", "sha-256", stdin="s3cret\n")
    ok("user", "add", str(path), "bob:-", "--scram", "sha-256", stdin="old\n")
    ok("user", "add", str(path), "bob", "--scram", "sha-256", stdin="builder\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "s3cret" not in path.read_text("utf-8")
    assert ok("user", "list", str(path)) == (
        "ada  PLAIN  SCRAM-SHA-256\nbob  PLAIN  SCRAM-SHA-256\n"
    )
    served = Served("--users", str(path), "--auto-create", "queue:*")
    try:
        for who, code in (("ada:s3cret", 0), ("bob:builder", 0), ("bob:old", 1)):
            url = served.url.replace("://", f"://{who}@")
            assert amqp_rt("send", "q", "x", url=url).returncode == code
    finally:
        assert served.stop()[0] == 0
    ok("user", "remove", str(path), "bob")
    assert ok("user", "list", str(path)) == "ada  PLAIN  SCRAM-SHA-256\n"
    for arguments, sentence in (
        (["user", "remove", str(path), "bob"], "there is no user 'bob'"),
        (["user", "add", str(path), "a b:"], "the password of 'a b' is empty"),
        (["serve", "--users", "/no/such/file"], "cannot read users from /no/such/file"),
    ):
        done = amqp_rt(*arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
    other = "ada:s3cret\nbob\n"
    path.write_text(other, "utf-8")
    for arguments in (
        ["list", str(path)],
        ["remove", str(path), "bob"],
        ["add", str(path), "cy:x"],
    ):
        done = amqp_rt("user", *arguments)
        assert done.returncode == 2
        assert "line 1: expected NAME:scrypt" in done.stderr
        assert path.read_text("utf-8") == other


@pytest.mark.slow
@pytest.mark.req("O5")
def test_connections_leave_traces(tmp_path: Path) -> None:
    served = Served("--trace", str(tmp_path / "traces"), "--auto-create", "queue:*")
    try:
        ok("send", "q", "x", url=served.url)
    finally:
        assert served.stop()[0] == 0
    (path,) = (tmp_path / "traces").iterdir()
    drawn = ok("trace", str(path))
    assert "transfer" in drawn
    assert "disposition" in drawn


# --- a file of options -------------------------------------------------------------------------


def greeting(url: str, header: bytes) -> bytes:
    """What a listener says first to somebody who begins with *header*."""
    host, _, port = url.removeprefix("amqp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(header)
        said = b""
        while len(said) < 8 and (piece := sock.recv(8 - len(said))):
            said += piece
        return said


@pytest.mark.slow
@pytest.mark.req("SE6")
def test_options_of_a_file(tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text(
        """
        user = ["ada:s3cret"]
        sasl = "optional"
        node = ["queue:work"]
        log_level = "warning"
        plain_in_clear = false
        """
    )
    served = Served("--config", str(config))
    try:
        known = served.url.replace("://", "://ada:s3cret@")
        ok("send", "work", "hello", url=known)
        assert greeting(served.url, AMQP_HEADER) == AMQP_HEADER
        assert greeting(served.url, SASL_HEADER) == SASL_HEADER
    finally:
        _, errors = served.stop()
    assert "s3cret" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('node = ["queue:work"]\nsasl = "perhaps"', "line 2: 'perhaps' is not known here"),
        ("\nsasll = 'off'", "line 2: there is no 'sasll' here; did you mean 'sasl'?"),
        ("tls_required = 'yes'", "line 1: expected `bool | null`, got `str`"),
        ('\n\nnode = ["basket:work"]', "line 3: 'basket:work' is not KIND:NAME"),
        ('\nnode = ["queue:a", "topic:a"]', "line 2: 'a' exists as Queue(name='a')"),
        ('user = ["ada"]', "line 1: no password for 'ada'"),
        ('users = "nowhere"', "line 1: cannot read users from nowhere: No such file"),
        ("node = [", "line 1: "),
        ("config = 'other'", "line 1: there is no 'config' here"),
    ],
)
def test_a_mistake_in_a_file_of_options_has_its_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    config = tmp_path / "broker.toml"
    config.write_text(text)
    done = amqp_rt("serve", "--config", str(config))
    assert done.returncode == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert f"{config}, {sentence}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", ["0", '"0"'])
def test_numbers_in_a_file_of_options_need_no_quotes(tmp_path: Path, number: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f"workers = {number}\n")
    done = amqp_rt("run", "app.py:app", "--config", str(config))
    assert done.returncode == 2
    assert "0 is not in the range 1<=x<=256" in done.stderr


@pytest.mark.slow
@pytest.mark.req("SE6")
def test_a_broker_without_sasl() -> None:
    served = Served("--sasl", "off", "--node", "queue:work")
    try:
        assert greeting(served.url, AMQP_HEADER) == AMQP_HEADER
        assert greeting(served.url, SASL_HEADER) == AMQP_HEADER
    finally:
        served.stop()
    served = Served("--sasl", "required", "--node", "queue:work")
    try:
        assert greeting(served.url, AMQP_HEADER) == SASL_HEADER
        ok("send", "work", "hello", url=served.url)
    finally:
        served.stop()


@pytest.mark.slow
def test_help_names_every_command_and_imports_none() -> None:
    told = ok("--help")
    for name in ("serve", "send", "receive", "request", "node", "store", "user", "trace"):
        assert f"\n  {name} " in told
        assert ok(name, "--help").startswith("Usage:")
    seen = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "click" in seen.stderr
    assert " trio" not in seen.stderr


def test_a_broker_starts_without_what_it_was_not_asked_for() -> None:
    program = (
        "import sys, gc, amqp_rt.cli as c\n"
        "assert c._Commands().load_command('serve') and gc.isenabled()\n"
        "print(*({'amqp_rt.mesh', 'trio_websocket', 'asyncio', 'anyio'} & {*sys.modules}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


def test_what_was_meant_by_a_misspelt_command() -> None:
    done = amqp_rt("snd")
    assert done.returncode == 2
    assert done.stderr.endswith("Error: No such command 'snd'; did you mean 'send'?\n")


@pytest.mark.slow
def test_a_plugin_adds_a_command(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import click\n"
        "@click.command()\n"
        "def orders():\n"
        '    """Show orders."""\n'
        "    click.echo('no orders')\n"
    )
    about = tmp_path / "shop-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[amqp_rt.commands]\norders = shop:orders\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = [
        subprocess.run(
            [*COMMAND, argument], capture_output=True, text=True, env=environ, check=True
        ).stdout
        for argument in ("orders", "--help")
    ]
    assert told[0] == "no orders\n"
    assert re.search(r"\n  orders +Comes with shop\.\n", told[1])
