"""The command ``amqp-rt servicebus``: its options, what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from amqp_rt_servicebus.cli import servicebus
from click.testing import CliRunner, Result
from root_logging import restored_logging

#: As the quick start of the emulator has it, with one queue.
EMULATOR = {
    "UserConfig": {
        "Namespaces": [{"Name": "sbemulatorns", "Queues": [{"Name": "orders"}], "Topics": []}],
        "Logging": {"Type": "File"},
    }
}
ANY_PORTS = ("--port", "0", "--admin-port", "0")


def invoke(*arguments: str) -> Result:
    with restored_logging():
        return CliRunner().invoke(servicebus, list(arguments))


@contextmanager
def running(*arguments: str) -> Iterator[dict[str, Any]]:
    """Run the command within the block, which gets its ``ready`` line; end it as an operator would."""
    program = "from amqp_rt_servicebus.cli import servicebus; servicebus()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        word, _, text = process.stdout.readline().partition(" ")
        assert word == "ready"
        yield json.loads(text)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def ask_health(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return b"".join(iter(lambda: client.recv(4096), b""))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.slow
def test_both_ports_answer_and_the_well_known_key_is_shown() -> None:
    with running(*ANY_PORTS) as ready:
        assert len(ready["listeners"]) == 2
        for url in ready["listeners"]:
            assert b" 200 " in ask_health(port_of(url)).splitlines()[0]
        first = ready["listeners"][0].removeprefix("amqp://")
        assert ready["connection_string"].startswith(f"Endpoint=sb://{first};")
        assert "SharedAccessKey=SAS_KEY_VALUE;" in ready["connection_string"]


@pytest.mark.slow
def test_limits_of_the_namespace_and_of_the_broker_are_set(tmp_path: Path) -> None:
    file = tmp_path / "namespace.toml"
    file.write_text("[queues.q]\n[queues.r]\n")
    given = ("--config", str(file), "--limit", "entities_max=1", "--limit", "idle_timeout_s=9")
    result = invoke(*ANY_PORTS, *given)
    assert result.exit_code == 1
    assert "the namespace has 1 entities already" in result.output


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("rules_max", "'rules_max' is not NAME=VALUE"),
        ("rules_max=0", "rules_max has to be at least 1, got 0"),
        ("rules_max=x", "rules_max is a whole number, not 'x'"),
        ("nothing=1", "there is no limit 'nothing'"),
    ],
)
def test_a_wrong_limit_is_a_sentence(limit: str, said: str) -> None:
    result = invoke("--limit", limit)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.slow
def test_a_key_from_a_file_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("top-secret\n")
    with running(*ANY_PORTS, "--key", f"app=@{tmp_path / 'key'}") as ready:
        assert "top-secret" not in json.dumps(ready)
        assert "SharedAccessKeyName=app;SharedAccessKey=KEY;" in ready["connection_string"]


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.usefixtures("azure_python")
def test_the_file_of_the_emulator_is_served_to_the_sdk(tmp_path: Path) -> None:
    from azure.servicebus import ServiceBusClient, ServiceBusMessage

    file = tmp_path / "Config.json"
    file.write_text(json.dumps(EMULATOR))
    with running(*ANY_PORTS, "--config", str(file)) as ready:
        client = ServiceBusClient.from_connection_string(ready["connection_string"])
        with client, client.get_queue_sender("orders") as sender:
            sender.send_messages(ServiceBusMessage("a"))
        client = ServiceBusClient.from_connection_string(ready["connection_string"])
        with client, client.get_queue_receiver("orders", max_wait_time=5) as receiver:
            (message,) = receiver.receive_messages()
            assert str(message) == "a"


def test_other_machines_need_another_key(tmp_path: Path) -> None:
    result = invoke("--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "SAS_KEY_VALUE is known to everyone" in result.output

    file = tmp_path / "namespace.toml"
    file.write_text('[keys.app]\nkey = "other"\nsecondary = "SAS_KEY_VALUE"\n')
    assert "known to everyone" in invoke("--host", "0.0.0.0", "--config", str(file)).output


def test_other_machines_need_tls() -> None:
    result = invoke("--host", "0.0.0.0", "--key", "app=secret")
    assert result.exit_code == 2
    assert "--tls-cert" in result.output


@pytest.mark.slow
def test_other_machines_get_nothing_in_clear(tmp_path: Path) -> None:
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "server.pem"
    )
    arguments = ("--host", "0.0.0.0", "--key", "app=secret", "--tls-cert", f"{tmp_path}/server.pem")
    with running(*ANY_PORTS, *arguments) as ready:
        assert all(url.startswith("amqps://") for url in ready["listeners"])
        assert b"200" not in ask_health(port_of(ready["listeners"][0]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--key", "app"), "'app' is not NAME=KEY"),
        (("--key", "app="), "a secret is empty"),
        (("--key", "app=a;b"), "a key contains a semicolon"),
        (("--key", "a;b=key"), "policy 'a;b': a name is not empty and has no semicolon"),
        (("--key", "app=@/nowhere"), "cannot read a secret from /nowhere"),
        (("--tls-key", "key.pem"), "--tls-key goes with --tls-cert"),
        (("--tls-cert", "/nowhere.pem"), "/nowhere.pem"),
        (("--config", "/nowhere.toml"), "cannot read /nowhere.toml"),
        (("--port", "70000"), "0<=x<=65535"),
        (("-v", "-q"), "give one of them"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], expected: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert "Traceback" not in result.output


def test_mistakes_of_a_file_have_their_line(tmp_path: Path) -> None:
    file = tmp_path / "namespace.toml"
    file.write_text('[queues.orders]\nlock_duration = "30 s"\n')
    result = invoke("--config", str(file))
    assert result.exit_code == 2
    assert "namespace.toml, line 2: " in result.output


def test_entities_that_cannot_be_are_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "namespace.toml"
    file.write_text('[queues.orders]\nforward_to = "nowhere"\n')
    result = invoke(*ANY_PORTS, "--config", str(file))
    assert result.exit_code == 1
    said = "'orders': forward_to is 'nowhere', which does not exist"
    assert result.output == f"Error: {file}: {said}\n"


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = invoke("--port", str(taken.getsockname()[1]), "--admin-port", "0")
    assert result.exit_code == 1
    assert "the address is already in use" in result.output
    assert result.output.count("\n") == 1
