"""The page of conformance: its list of rules is that of the specification, and its tests are there."""

from __future__ import annotations

import ast
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TOOL_FILE = ROOT / "docs" / "_tools" / "amqp010_conformance.py"
NAMESPACE = "{http://www.amqp.org/schema/amqp.xsd}"

if not TOOL_FILE.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)
TOOL = runpy.run_path(str(TOOL_FILE))
RULES: dict[str, dict[str, dict[str, Any]]] = TOOL["rules"]()


def specified(path: Path) -> list[tuple[str, str, str | None]]:
    """Return place, name and error-code of each rule and exception in a text of the specification."""
    found: list[tuple[str, str, str | None]] = []

    def walk(element: ElementTree.Element, place: str, field: str) -> None:
        for each in element:
            tag = each.tag.removeprefix(NAMESPACE)
            name = each.get("name", "")
            if tag in ("rule", "exception"):
                found.append((place, field + name, each.get("error-code")))
            elif tag == "class":
                walk(each, name, "")
            elif tag in ("control", "command", "struct"):
                walk(each, f"{place}.{name}", "")
            elif tag == "field":
                walk(each, place, f"{name}/")
            else:
                walk(each, place, field)

    # A file of the repository, or of the folder beside it.
    walk(ElementTree.parse(path).getroot(), "", "")
    return found


def listed() -> list[tuple[str, str, str | None]]:
    return [
        (place, name, row.get("code"))
        for place, rows in RULES.items()
        for name, row in rows.items()
    ]


@pytest.mark.req("D19")
def test_the_list_is_that_of_the_specification() -> None:
    found = specified(HERE / "specification" / "amqp.0-10-qpid-errata.stripped.xml")
    assert listed() == found
    assert sum(code is None for *_, code in found) == 146
    assert sum(code is not None for *_, code in found) == 78


@pytest.mark.req("D19")
def test_the_list_is_that_of_the_published_text(shared: Path) -> None:
    assert listed() == specified(shared / "spec" / "amqp-0-10" / "amqp.0-10-qpid-errata.xml")


@pytest.mark.req("D19")
def test_each_row_has_a_check_or_a_reason() -> None:
    for place, rows in RULES.items():
        for name, row in rows.items():
            where = f"{place} {name}"
            assert row.keys() <= {"asks", "code", "tests", "none", "open"}, where
            assert row["asks"], where
            assert {"tests", "none", "open"} & row.keys(), where
            assert "none" not in row or not {"tests", "open"} & row.keys(), where


@pytest.mark.req("D19")
def test_the_tests_of_the_list_are_there() -> None:
    named = {
        test for rows in RULES.values() for row in rows.values() for test in row.get("tests", ())
    }
    files = {TOOL["file_of"](test) for test in named}
    there = {
        f"{file}::{each.name}"
        for file in files
        if (ROOT / file).exists()
        for each in ast.walk(ast.parse((ROOT / file).read_text("utf-8")))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    missing = {
        test for test in named if f"{TOOL['file_of'](test)}::{test.partition('::')[2]}" not in there
    }
    assert missing == set()


@pytest.mark.req("D19")
def test_the_page_shows_the_list() -> None:
    assert TOOL["PAGE"].read_text("utf-8") == TOOL["page"](RULES), (
        "run python docs/_tools/amqp010_conformance.py"
    )
