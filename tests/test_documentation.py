"""Pages that list what is in the tree list all of it, and decisions have the parts that readers look for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def test_the_page_of_protocols_describes_each_module_of_fronts() -> None:
    described = re.findall(
        r"automodule:: amqp_rt\.fronts\.(\w+)", (ROOT / "docs/reference/fronts.md").read_text()
    )
    modules = {path.stem for path in (ROOT / "amqp_rt" / "fronts").glob("[!_]*.py")}
    # The front of 1.0 is what the page is about, and not for plug-ins to build on.
    assert set(described) == modules - {"amqp10"}
    assert len(described) == len(set(described))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_number_a_date_and_its_parts(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    assert lines[0].startswith(f"# {page.stem[:4]}: ")
    assert re.match(r"\*(Accepted|Replaced by \d{4}), \d{4}-\d\d-\d\d", lines[2])
    # Further parts, such as measurements, may stand between these.
    asked = ["Context", "Choice", "What it costs", "What would change our mind"]
    parts = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert [part for part in parts if part in asked] == asked
