"""The guide to testing: what it says of clients of 0-9-1 is what works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "testing.md"


@pytest.mark.slow
@pytest.mark.parametrize("client", ["pika", "celery"])
def test_the_guide_runs_under_pytest(client: str, tmp_path: Path) -> None:
    pytest.importorskip(client)
    texts = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    (text,) = [each for each in texts if f"def test_with_{client}(" in each]
    (tmp_path / "test_guide.py").write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
