"""Run every example as a user would: as a program of its own, from another folder."""

from __future__ import annotations

import os
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
#: wheel, which is tested without Spark.
ARGUMENTS = {
    "flights": ["--for-spark", "0" if os.environ.get("AMQP_RT_EXPECT") == "compiled" else "20000"],
}


def example_case(path: Path) -> Any:
    """Return the parameter of the example at *path*, with the mark of those that start Spark."""
    marks = [pytest.mark.foreign] if path.parent.name in ARGUMENTS else []
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
