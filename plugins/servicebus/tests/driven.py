"""Clients of Azure's SDKs behind plain calls: for Python, with threads and with asyncio, and for JavaScript."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from peer_programs import end_program

PEERS = Path(__file__).parent / "peers"


def require(missing: str) -> None:
    """Skip the test for the reason *missing*; in CI that is an error."""
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


class Driven:
    """An object of the SDK whose calls return when they are done; lists are collected.

    Args:
        target: The object.
        run: Awaits a coroutine.
    """

    def __init__(self, target: Any, run: Callable[[Any], Any]) -> None:
        self.target = target
        self._run = run

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        if not callable(value):
            return Driven(value, self._run) if name == "session" and value is not None else value

        def call(*args: Any, **options: Any) -> Any:
            result = value(*args, **options)
            if inspect.isawaitable(result):
                result = self._run(result)
            wraps = name.startswith("get_") and hasattr(result, "close")
            return Driven(result, self._run) if wraps else result

        return call

    def __enter__(self) -> Self:
        if hasattr(self.target, "__aenter__"):
            self._run(self.target.__aenter__())
        else:
            self.target.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # What keeps its connection alive sleeps for a second at a time, ends by itself, and would be waited for.
        handler = getattr(self.target, "_handler", None)
        if handler is not None:
            handler._keep_alive_thread = None
        if hasattr(self.target, "__aexit__"):
            self._run(self.target.__aexit__(*error))
        else:
            self.target.__exit__(*error)


class Dialler:
    """Makes clients of one kind, and closes them in the end.

    Args:
        kind: ``threads`` or ``asyncio``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._runner = asyncio.Runner()
        self._clients: list[Driven] = []

    def client(self, connection_string: str, **options: Any) -> Driven:
        """Return a client that repeats nothing."""
        if self._kind == "asyncio":
            from azure.servicebus.aio import ServiceBusClient
        else:
            from azure.servicebus import ServiceBusClient
        options.setdefault("retry_total", 0)
        client = Driven(
            ServiceBusClient.from_connection_string(connection_string, **options),
            self._runner.run,
        )
        self._clients.append(client.__enter__())
        return client

    def close(self) -> None:
        for each in reversed(self._clients):
            each.__exit__(None, None, None)
        self._runner.close()


class Refused(Exception):
    """Error of the SDK; its code is the first argument."""


def performed(
    node: str, program: str, *arguments: str, steps: Sequence[Any], ca_file: str | None = None
) -> list[Any]:
    """Have a program of the SDK for JavaScript perform *steps*, and return its results and errors.

    Args:
        node: Path of Node.
        program: File name of the program, among the peers.
        arguments: What it connects to.
        steps: Names of methods with their arguments.
        ca_file: Authority to trust.
    """
    done = subprocess.run(
        [node, str(PEERS / program), *arguments],
        input=json.dumps(steps),
        env=_trusting(ca_file),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout)
    return [each.get("value", each.get("error")) for each in results]


def _trusting(ca_file: str | None) -> dict[str, str]:
    return {**os.environ} if ca_file is None else {**os.environ, "NODE_EXTRA_CA_CERTS": ca_file}


class Javascript:
    """A client of the SDK for JavaScript in Node, to which steps are sent.

    Args:
        node: The program.
        arguments: The connection string, and ``websocket`` for that transport.
        ca_file: Authority to trust.
    """

    def __init__(self, node: str, *arguments: str, ca_file: str | None = None) -> None:
        # Node 20 has its own WebSocket behind this option only; later versions accept the option.
        command = [node, "--experimental-websocket"] if "websocket" in arguments else [node]
        self._process = subprocess.Popen(
            [*command, str(PEERS / "messaging.js"), *arguments],
            env=_trusting(ca_file),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *step: Any) -> Any:
        """Perform a step, and return its result.

        Raises:
            Refused: The SDK has thrown.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(step) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            error = answer["error"]
            raise Refused(error.get("code") or error["name"], error["message"])
        return answer["value"]

    def close(self) -> None:
        end_program(self._process)
