"""Compiled or plain, the same octets mean the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "digest.py"
CASES = 5_000 if os.environ.get("AMQP_RT_LONG") == "1" else 300


@cache
def digests(python: str, hash_seed: str, cases: int = CASES) -> dict[str, Any]:
    """What the installation of *python* makes of the corpus."""
    arguments = [python, str(SCRIPT), str(cases)]
    vectors = ROOT.parent / "shared" / "spec" / "vectors"
    if (vectors / "proton-fuzz.jsonl").is_file():
        arguments.append(str(vectors))
    done = subprocess.run(
        arguments,
        # Not the tree: whatever is installed. And sets may not decide the order of anything.
        cwd=SCRIPT.parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one["cases"].keys() == other["cases"].keys()
    return [name for name, value in one["cases"].items() if other["cases"][name] != value]


def other_installation() -> str:
    """The Python of the other form, plain or compiled, of these very sources."""
    ours = digests(sys.executable, "1")
    reasons = ["no other installation; make compiled makes one"]
    for folder in (".venv-compiled", ".venv"):
        python = ROOT / folder / "bin" / "python"
        if not python.exists() or ROOT / folder == Path(sys.prefix):
            continue
        about = digests(str(python), "1", 0)
        if about["compiled"] == ours["compiled"]:
            reasons.append(f"{folder} is {'compiled' if about['compiled'] else 'plain'} too")
        elif about["sources"] != ours["sources"]:
            reasons.append(f"{folder} has other sources than this; make compiled builds it anew")
        else:
            return str(python)
    pytest.skip(reasons[-1])


@pytest.mark.slow
@pytest.mark.req("X5", "T1")
def test_a_run_depends_on_nothing_but_the_octets() -> None:
    assert differences(digests(sys.executable, "1"), digests(sys.executable, "2")) == []


@pytest.mark.slow
@pytest.mark.req("X5", "T1")
def test_compiled_and_plain_make_the_same_of_the_same_octets() -> None:
    other = other_installation()
    assert differences(digests(sys.executable, "1"), digests(other, "1")) == []
