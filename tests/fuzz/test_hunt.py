"""Every target, hunted by atheris for a minute: in long runs only (``make test-long``)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fuzz_targets import TARGETS

import amqp_rt

HUNT = Path(__file__).parent / "hunt.py"
SECONDS = 60


@pytest.mark.long
@pytest.mark.req("SE18", "T9")
@pytest.mark.timeout(SECONDS * 5)
@pytest.mark.skipif(amqp_rt.COMPILED, reason="compiled modules cannot be instrumented")
@pytest.mark.parametrize("target", TARGETS)
def test_a_hunt_finds_nothing(target: str) -> None:
    if find_spec("atheris") is None:
        why = "atheris is not installed (pip install --editable '.[fuzz]')"
        if os.environ.get("CI") == "true":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    command = [sys.executable, str(HUNT), target, f"-max_total_time={SECONDS}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    # The input that failed is named there, to be kept in the corpus.
    assert run.returncode == 0, run.stderr[-10_000:]
