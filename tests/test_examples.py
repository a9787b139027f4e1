"""Run every example as a user would: as a program of its own, from another folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
#: Examples of a single file; one of several files is a folder with a main.py.
EXAMPLES = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*/main.py")])
TIME_LIMIT_S = 280
#: Flights for the Spark part of the main example, enough to show that it works; none for the compiled
#: wheel, which is tested without Spark. One member of the mesh is killed: the example fails if an order gets lost.
ARGUMENTS = {
    "flights": ["--for-spark", "0" if os.environ.get("AMQP_RT_EXPECT") == "compiled" else "20000"],
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
