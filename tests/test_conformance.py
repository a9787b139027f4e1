"""The conformance page agrees with the marks of the tests, and its list of requirements is complete."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TOOL = runpy.run_path(str(ROOT / "docs" / "_tools" / "conformance.py"))

REQUIREMENTS = {
    "Types": {"T1": {"level": "M", "text": "all"}, "T2": {"level": "f", "text": "more"}}
}


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ({"t.py::test_a": {"passed": 3}}, "proved"),
        ({"t.py::test_a": {"passed": 3}, "t.py::test_b": {"skipped": 1}}, "proved"),
        ({"t.py::test_a": {"passed": 2, "failed": 1}}, "open"),
        ({"t.py::test_a": {"passed": 3}, "t.py::test_b": {"failed": 1}}, "open"),
        ({"t.py::test_a": {"skipped": 1}}, "open"),
        ({}, "open"),
    ],
)
def test_proved_means_that_all_that_ran_passed(
    outcomes: dict[str, dict[str, int]], state: str
) -> None:
    page = TOOL["page"](REQUIREMENTS, {"T1": outcomes})

    assert f"- **T1** · must · *{state}* · all\n" in page
    assert "- **T2** · feature · *open* · more\n" in page


@pytest.mark.parametrize(
    ("remark", "outcomes", "state"),
    [
        ({"missing": "two"}, {"t.py::test_a": {"passed": 1}}, "*partly* (missing: two)"),
        ({"missing": "two"}, {"t.py::test_a": {"failed": 1}}, "*open*"),
        ({"missing": "two"}, {}, "*open*"),
        (
            {"decided": 1},
            {"t.py::test_a": {"passed": 1}},
            "*decided* ([note 1](decisions/0001-engines-without-io.md))",
        ),
        ({"decided": 1}, {}, "*decided* ([note 1](decisions/0001-engines-without-io.md))"),
    ],
)
def test_what_is_missing_or_decided_is_said_and_counted(
    remark: dict[str, Any], outcomes: dict[str, dict[str, int]], state: str
) -> None:
    rows = {"T1": {"level": "M", "text": "one, two", **remark}}

    page = TOOL["page"]({"Types": rows}, {"T1": outcomes})

    assert f"- **T1** · must · {state} · one, two\n" in page
    counts = ["1" if state.startswith(f"*{name}*") else "0" for name in TOOL["STATES"]]
    assert f"| Types | {' | '.join(counts)} | 1 |\n" in page


def test_a_written_page_must_not_call_proved_what_lacks_something() -> None:
    proofs = {"T1": {"a.py::test_a": {"passed": 1}}, "T2": {"a.py::test_a": {"passed": 1}}}
    written = TOOL["page"](REQUIREMENTS, proofs)
    now = {"Types": {**REQUIREMENTS["Types"], "T2": {"level": "f", "text": "x", "missing": "more"}}}

    assert TOOL["exaggerated"](REQUIREMENTS, written) == []
    assert TOOL["exaggerated"](now, written) == ["T2"]
    assert TOOL["exaggerated"](now, TOOL["page"](now, proofs)) == []


def test_remarks_in_the_list_can_be_understood() -> None:
    with (ROOT / "tests" / "requirements.toml").open("rb") as file:
        rows = {name: row for part in tomllib.load(file).values() for name, row in part.items()}
    for name, row in rows.items():
        assert row.keys() <= {"level", "text", "missing", "decided"}, name
        assert not {"missing", "decided"} <= row.keys(), name
        assert row.get("missing", "something"), name
        if "decided" in row:
            TOOL["note"](row["decided"])


def test_a_page_can_be_read_back() -> None:
    proofs = {"T1": {"a.py::test_a": {"passed": 1}, "a.py::TestB::test_c": {"passed": 1}}}

    assert TOOL["claims"](TOOL["page"](REQUIREMENTS, proofs)) == {"T1": set(proofs["T1"])}


def requirements_of(marks: list[ast.expr]) -> set[str]:
    """Return the requirements that ``pytest.mark.req`` names anywhere in *marks*."""
    return {
        argument.value
        for mark in marks
        for call in ast.walk(mark)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.req"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield the name and decorators of each function in *body* and its classes."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + each.name, each.decorator_list
        elif isinstance(each, ast.ClassDef):
            yield from functions(each.body, f"{prefix}{each.name}::")


@pytest.mark.slow
def test_marks_and_claims_name_tests() -> None:
    found: set[str] = set()
    for folder in (ROOT / "tests", *ROOT.glob("plugins/*/tests")):
        for path in folder.rglob("test_*.py"):
            file = path.relative_to(ROOT).as_posix()
            for name, decorators in functions(ast.parse(path.read_text("utf-8")).body):
                found.add(f"{file}::{name}")
                marks = requirements_of(decorators)
                # A helper put between a mark and its test takes the mark away from it.
                assert name.rpartition("::")[2].startswith("test_") or not marks, f"{file}::{name}"
    claimed = set().union(*TOOL["claims"](TOOL["PAGE"].read_text("utf-8")).values())

    # Hypothesis makes the method runTest of state machines.
    assert {test for test in claimed - found if not test.endswith("::runTest")} == set()


def test_our_copy_of_the_list_is_whole(shared: Path) -> None:
    text = (shared / "requirements.md").read_text("utf-8")
    theirs = re.findall(r"^\| ([A-Z]+\d+) \|.*\| ([MSf]) \|$", text, re.MULTILINE)
    with (ROOT / "tests" / "requirements.toml").open("rb") as file:
        ours = [
            (name, row["level"])
            for rows in tomllib.load(file).values()
            for name, row in rows.items()
        ]
    assert ours == theirs
