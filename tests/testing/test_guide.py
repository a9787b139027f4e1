"""The guide to testing is a module of tests: they pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guides" / "testing.md"


@pytest.mark.slow
@pytest.mark.req("A21", "A22", "P7")
def test_the_tests_of_the_guide_pass(pytester: pytest.Pytester) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)  # fmt: skip
    program = "\n\n".join(blocks)
    pytester.makepyfile(program)
    result = pytester.runpytest_subprocess("-W", "ignore:Unknown config", timeout=100)
    result.assert_outcomes(passed=len(re.findall(r"^(?:async )?def test_", program, re.MULTILINE)))
