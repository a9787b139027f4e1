"""Run every example as a user would: as a program of its own, from another folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from amqp_rt import sync

ROOT = Path(__file__).parent.parent
#: Examples of a single file; one of several files is a folder with a main.py.
EXAMPLES = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*/main.py")])
TIME_LIMIT_S = 280
#: Fewer flights than `make run` sends, and a part of them for Spark, without which the compiled wheel is tested. One
#: member of the mesh is killed: the example fails if an order gets lost.
ARGUMENTS = {
    "flights": [
        *("--flights", "40000"),
        *("--for-spark", "0" if os.environ.get("AMQP_RT_EXPECT") == "compiled" else "5000"),
    ],
    "mesh": ["--kill"],
}


def example_case(path: Path) -> Any:
    """Return the parameter of the example at *path*, with the mark of those that start Spark."""
    marks = [pytest.mark.foreign] if path.parent.name == "flights" else []
    return pytest.param(path, marks=marks, id=str(path.relative_to(ROOT)))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", [example_case(path) for path in EXAMPLES])
def test_example(example: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "AMQP_URL"}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(example), *ARGUMENTS.get(example.parent.name, ())],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.req("P1")
def test_without_node_the_shop_of_the_mesh_has_a_gateway_in_python(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples/mesh/main.py"), "--orders", "12"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "a Python client, since node is not installed" in run.stdout
    assert "12 of 12 orders sold, 0 failed" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.req("P1")
@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent there")
def test_the_shop_of_the_mesh_closes_at_an_interrupt() -> None:
    with subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "examples/mesh/main.py"), "--orders", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shop:
        assert shop.stdout is not None
        for line in shop.stdout:
            if line.lstrip().startswith("order "):
                break
        shop.send_signal(signal.SIGINT)
        output, errors = shop.communicate(timeout=60)
    assert (shop.returncode, errors) == (130, "")
    assert output.endswith("The shop is closed.\n")


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_without_spark_the_main_job_says_what_to_install(ci: str, code: int) -> None:
    program = (
        "import pathlib, sys, trio; sys.modules['pyspark'] = None; import main;"
        "sys.exit(not trio.run(main.in_spark, None, '', 1, pathlib.Path('unused')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "examples" / "flights",
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    # Further missing packages depend on this installation.
    assert "pyspark" in run.stderr
    assert " cannot be imported; pip install" in run.stderr


# --- the shop, whose page is the program ---

SHOP = ROOT / "examples" / "shop"
#: A stand-in for curl where it is not installed.
CURL = "curl() { python -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())' \"$2\"; }\n"


def shell_blocks(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of each block for a shell, with the lines that their output has."""
    found = re.findall(r"```sh\n(.*?)```(?:\n\n```text\n(.*?)```)?", page, re.DOTALL)
    return [(commands, shown.splitlines()) for commands, shown in found]


class Terminals:
    """Terminals of a user: programs that run until they are stopped, and commands that end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path}
        self.environment.pop("AMQP_URL", None)

    def start(self, command: str) -> dict[str, Any]:
        """Start a program, and wait until it is ready; return its line."""
        program = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(program)
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line.startswith("ready "), line + program.communicate(timeout=30)[1]
        found: dict[str, Any] = json.loads(line.removeprefix("ready "))
        return found

    def run(self, commands: str) -> str:
        """Run commands of a block one after the other; return their output."""
        if shutil.which("curl") is None:
            commands = CURL + commands
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, commands + done.stdout + done.stderr
        return done.stdout

    def stop(self, program: subprocess.Popen[str]) -> str:
        """Stop a program by SIGTERM, check its exit status, and return its standard error."""
        program.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=60)
        self.running.remove(program)
        assert program.returncode == 0, errors
        return errors


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.req("A3", "A10", "A20", "A21", "O3", "R14")
@pytest.mark.skipif(sys.platform == "win32", reason="its commands are for a shell of Unix")
def test_the_shop_does_what_its_page_shows(tmp_path: Path) -> None:
    made = shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.db*")
    folder = shutil.copytree(SHOP, tmp_path / "shop", ignore=made)
    page = (folder / "README.md").read_text("utf-8")
    terminals = Terminals(folder)
    # The page has the usual ports.
    with ExitStack() as ports:
        for port in ("9000", "9001", "15672", "5672"):
            free = ports.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            page = page.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
    url = terminals.environment["AMQP_URL"] = f"amqp://127.0.0.1:{free}"
    terminals.environment["AMQP_RT_SERVE_LISTEN"] = url
    try:
        ran = 0
        for commands, shown in shell_blocks(page):
            if commands.startswith("pip install"):
                continue
            if commands.startswith(("amqp-rt serve", "amqp-rt run")):
                terminals.start(commands)
                continue
            output = terminals.run(commands)
            ran += len(shown)
            for line in shown:
                assert line in output, commands + output
        assert ran >= 6
        broker, shop = terminals.running
        # The shop is stopped in the middle of its work, and started again: each order is paid once.
        with sync.connect(url) as peer:
            with peer.sender("orders") as orders:
                for number in range(100, 130):
                    order = {"number": number, "sku": "A-1", "quantity": 1, "card": "4711"}
                    orders.send(order, message_id=f"order-{number}", durable=True)
            terminals.stop(shop)
            terminals.start(f"amqp-rt run shop.main:container --url {url}")
            until = time.monotonic() + 60
            while states(folder) != {"paid": 32, "placed": 1}:
                assert time.monotonic() < until, states(folder)
                time.sleep(0.1)
        terminals.stop(terminals.running[-1])
        terminals.stop(broker)
    finally:
        for program in terminals.running:
            program.kill()
            program.communicate()


def states(folder: Path) -> dict[str, int]:
    """Return the states of the shop's orders, and how many have them."""
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        return dict(database.execute("SELECT state, count(*) FROM orders GROUP BY state"))
