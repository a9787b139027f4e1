"""Clients of qpid-python in programs of Python 2.7, driven by steps.

``make peers`` installs the library below ``.build/qpid-python``. Few machines have Python 2.7: tests that need it are
passed over without it, in CI as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio
from peer_programs import end_program

PEERS = Path(__file__).parent / "peers"
LIBRARY = Path(__file__).parent.parent.parent.parent / ".build" / "qpid-python"

#: Longer than any timeout of the steps; this only turns a hang into an error.
PATIENCE_S = 60.0


class Refused(Exception):
    """The library has raised an error.

    Args:
        kind: Name of its class.
        code: Code of execution.exception or connection.close, where there is one.
        text: Its message.
    """

    def __init__(self, kind: str, code: int | None, text: str) -> None:
        super().__init__(kind, code, text)
        self.kind = kind
        self.code = code
        self.text = text


def written(value: Any) -> Any:
    """Return *value* in the notation of the programs."""
    match value:
        case bytes():
            return {"hex": value.hex()}
        case UUID():
            return {"uuid": str(value)}
        case dict():
            return {key: written(each) for key, each in value.items()}
        case list() | tuple():
            return [written(each) for each in value]
    return value


def read(value: Any) -> Any:
    """Return what a value in the notation of the programs stands for."""
    match value:
        case {"hex": str(text)}:
            return bytes.fromhex(text)
        case {"uuid": str(text)}:
            return UUID(text)
        case {"ranges": list(pairs)}:
            return [tuple(pair) for pair in pairs]
        case {"struct": str(), "fields": dict(fields)}:
            return read(fields)
        case dict():
            return {key: read(each) for key, each in value.items()}
        case list():
            return [read(each) for each in value]
    return value


def struct(name: str, /, **fields: Any) -> dict[str, Any]:
    """Return a struct of 0-10 as an argument of a step."""
    dashed = {key.replace("_", "-"): each for key, each in fields.items()}
    return {"struct": name, "fields": dashed}


class Driven:
    """A running program, to which steps are sent.

    Args:
        python: Python 2.7.
        program: File name, among the peers.
    """

    def __init__(self, python: str, program: str) -> None:
        self._process = subprocess.Popen(
            [python, str(PEERS / program)],
            env={**os.environ, "PYTHONPATH": str(LIBRARY), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *step: Any) -> Any:
        """Perform a step, and return its result.

        Raises:
            Refused: The library has raised an error.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(written(step)) + "\n")
        self._process.stdin.flush()
        answer = self.line()
        if "error" in answer:
            error = answer["error"]
            raise Refused(error["name"], error["code"], error["message"])
        return read(answer["value"])

    async def step(self, *step: Any) -> Any:
        """Perform a step in a thread, as calls of the library block."""
        return await trio.to_thread.run_sync(partial(self, *step))

    def line(self) -> Any:
        """Return the next line of the program's output."""
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self._process.kill)
        timer.start()
        try:
            text = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert text, f"the program has ended with {self._process.wait()}"
        return json.loads(text)

    def close(self) -> None:
        end_program(self._process)


@pytest.fixture(scope="session")
def qpid_python() -> str:
    """Return the path of a Python 2.7 for which qpid-python is installed."""
    ready = LIBRARY / "ready"
    python = ready.read_text().strip() if ready.exists() else ""
    if not python or not Path(python).exists():
        pytest.skip("no Python 2.7 with qpid-python (make peers, PYTHON27=)")
    return python


def running(python: str, program: str) -> Iterator[Driven]:
    """Start a program, and end it afterwards."""
    driven = Driven(python, program)
    try:
        yield driven
    finally:
        driven.close()


@pytest.fixture
def messaging(qpid_python: str) -> Iterator[Driven]:
    """Start ``qpid.messaging``, the high-level API."""
    yield from running(qpid_python, "messaging.py")


@pytest.fixture
def commands(qpid_python: str) -> Iterator[Driven]:
    """Start ``qpid.connection`` and ``qpid.session``, the low-level API."""
    yield from running(qpid_python, "commands.py")


@pytest.fixture
def qpid_server(qpid_python: str) -> Iterator[int]:
    """Start the server's half of qpid-python, and return its port."""
    for driven in running(qpid_python, "server.py"):
        yield driven.line()["port"]
