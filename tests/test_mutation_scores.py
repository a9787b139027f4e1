"""The list of mutated modules is complete, and each surviving mutant has its reason."""

from __future__ import annotations

import json
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TOOL = runpy.run_path(str(ROOT / "docs" / "_tools" / "mutation_scores.py"))
CONFIG: dict[str, Any] = tomllib.loads(TOOL["CONFIG"].read_text("utf-8"))
RESULTS: dict[str, Any] = json.loads(TOOL["RESULTS"].read_text("utf-8"))


@pytest.mark.parametrize("name", CONFIG["module"])
def test_modules_and_their_tests_are_there(name: str) -> None:
    module = CONFIG["module"][name]
    path = Path(module["path"])
    assert (ROOT / path).is_file() or (ROOT / "plugins" / "amqp091" / path).is_file()
    assert module["tests"]
    for test in module["tests"]:
        assert (ROOT / test.partition("::")[0]).is_file(), test


def test_what_survived_has_a_reason() -> None:
    assert RESULTS.keys() <= CONFIG["module"].keys()
    assert TOOL["unexplained"](CONFIG, RESULTS) == []


def test_a_reason_is_for_one_change_or_for_a_pattern_of_them() -> None:
    config = {
        "harmless": [{"pattern": "log → ", "reason": "words"}],
        "survivor": [{"module": "m", "function": "f", "change": "a → b", "reason": "why"}],
    }
    results = {
        "m": {
            "survivors": [
                {"function": "f", "change": "a → b"},
                {"function": "g", "change": "log → x"},
                {"function": "g", "change": "a → b"},
            ]
        },
        "n": {"survivors": [{"function": "f", "change": "a → b"}]},
    }
    assert TOOL["unexplained"](config, results) == ["m: g: a → b", "n: f: a → b"]


def test_a_change_is_told_in_one_line() -> None:
    assert TOOL["change"]("x\na(\n    b\n)\ny", "x\na(None)\ny") == "a( b ) → a(None)"
    assert TOOL["function"]("amqp_rt.m.x__f__mutmut_12") == "_f"
    assert TOOL["function"]("amqp_rt.m.xǁKindǁ_f__mutmut_1") == "Kind._f"


def test_the_page_shows_scores_and_survivors() -> None:
    config = {
        "module": {"m": {}, "not run": {}},
        "survivor": [{"module": "m", "function": "f", "change": "a | b → c", "reason": "why"}],
    }
    survivors = [{"function": "f", "change": "a | b → c"}, {"function": "g", "change": "1 → 2"}]
    results = {"m": {"mutants": 300, "drawn": 40, "types": 20, "survivors": survivors}}
    page = TOOL["page"](config, results)
    assert "| `m` | 300 | 40 | 20 | 18 | 2 | 95 % |\n" in page
    assert "| `m` | `f` | `a \\| b → c` | why |\n" in page
    assert "| `m` | `g` | `1 → 2` | *open* |\n" in page
    assert "not run yet: `not run`.\n" in page
