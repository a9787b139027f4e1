"""Write docs/reference/amqp010-conformance.md from the list of rules in the tests of the plug-in for AMQP 0-10.

``python docs/_tools/amqp010_conformance.py`` writes the page; a test fails if it is not up to date.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = ROOT / "docs" / "reference" / "amqp010-conformance.md"
TESTS: Final = ROOT / "plugins" / "amqp010" / "tests"
RULES: Final = TESTS / "specification" / "rules.toml"
STATES: Final = ("checked", "open", "no test")

#: One rule: what it asks, perhaps its error-code, and tests, what is open, or the reason for no test.
Row = dict[str, Any]
#: class, control, command or struct → field/rule or rule → row
Rules = dict[str, dict[str, Row]]

HEAD: Final = """\
# Conformance to AMQP 0-10

All rules (146) and exceptions (78) of the published AMQP 0-10, by their names in its XML, and the tests of
`amqp_rt_amqp010` that check them. A rule asks what the middle column says, in words of this project; an exception has
the error-code with which the broker answers. Tests are functions of `plugins/amqp010/tests/test_amqp010_….py`.

| state | meaning |
| --- | --- |
| test names | the rule holds; these tests check it |
| *open* | the rule does not hold yet, or only as far as the tests after it check |
| *no test* | a duty of the client, a permission, or part of a class that is not offered |

`python docs/_tools/amqp010_conformance.py` writes this page from `plugins/amqp010/tests/specification/rules.toml`.
"""


def rules() -> Rules:
    """Return the list of rules."""
    with RULES.open("rb") as file:
        return tomllib.load(file)


def state(row: Row) -> str:
    """Return one of ``STATES``."""
    if "open" in row:
        return "open"
    return "no test" if "none" in row else "checked"


def file_of(test: str) -> str:
    """Return the path of the module that *test* names, from the root of the repository."""
    module = test.partition("::")[0]
    return module if "/" in module else f"plugins/amqp010/tests/test_amqp010_{module}.py"


def check(row: Row) -> str:
    """Return the last column of *row*."""
    tests = ", ".join(f"`{test}`" for test in row.get("tests", ()))
    if "open" in row:
        return f"*open*: {row['open']}" + (f"; {tests}" if tests else "")
    return f"*no test*: {row['none']}" if "none" in row else tests


def page(found: Rules) -> str:
    """Return the text of the page."""
    classes: dict[str, list[tuple[str, str, Row]]] = {}
    for place, rows in found.items():
        classes.setdefault(place.partition(".")[0], []).extend(
            (place, name, row) for name, row in rows.items()
        )
    summary = [f"| class | {' | '.join(STATES)} | of |", "| --- |" + " ---: |" * 4]
    lines: list[str] = []
    for name, items in classes.items():
        counts = dict.fromkeys(STATES, 0)
        lines += ["", f"## Class {name}", "", "| rule | asks | check |", "| --- | --- | --- |"]
        for place, rule, row in items:
            counts[state(row)] += 1
            field, _, short = rule.rpartition("/")
            where = f"`{place}`" + (f", {field}" if field else "")
            code = f" (`{row['code']}`)" if "code" in row else ""
            lines.append(f"| {where}: **{short}** | {row['asks']}{code} | {check(row)} |")
        numbers = " | ".join(str(count) for count in counts.values())
        summary.append(f"| {name} | {numbers} | {len(items)} |")
    return "\n".join([HEAD, *summary, *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(rules()), "utf-8")
