"""Write docs/conformance.md from the marks of the tests and their outcomes.

``pytest --conformance=.conformance.json`` records which test proved which requirement; if a suite runs in
several parts, each has a record whose name begins so. ``python docs/_tools/conformance.py`` writes the page
from these records, and with ``--check`` only checks that all claims of the page still hold.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements.toml"
NOTES = ".conformance*.json"
PAGE = ROOT / "docs" / "conformance.md"
DECISIONS = ROOT / "docs" / "decisions"
LEVELS = {"M": "must", "S": "should", "f": "feature"}
STATES = ("proved", "partly", "decided", "open")

#: One requirement of tests/requirements.toml: its level, its text, and perhaps ``missing`` or ``decided``.
Row = dict[str, Any]
#: section → requirement → row
Requirements = dict[str, dict[str, Row]]
#: requirement → test → outcome → how often (a test with parameters runs more than once)
Proofs = dict[str, dict[str, dict[str, int]]]

HEAD = """\
# Conformance

Each requirement, and the tests that prove it. A test claims a requirement with
`@pytest.mark.req("X13")`; `make conformance` runs the suite and writes this page.

| state | meaning |
| --- | --- |
| *proved* | there is a test for each part of the text, and every test that claims it and ran has passed |
| *partly (missing: …)* | the same, except for the part that is named |
| *decided (note N)* | one part is not built, for the reason in that decision; the tests prove the rest |
| *open* | there is no test yet, or one has failed |

`tests/requirements.toml` keeps what is missing or decided beside the requirement. Tests cannot tell
whether they cover a text, so review does: who adds a test for the last missing part removes the remark.

A section names where its requirements come from: the parts of the OASIS standard AMQP 1.0, or one of
five older texts. S1 is the AMQP 0-10 working draft of June 2007, S2 Part 3 of AMQP 1.0 (messaging), S3
a draft of 2010 on the behaviour of 1.0 brokers, S4 the AMQP 0-9-1 specification, S5 Microsoft's AMQP
guide for Azure Service Bus.
"""


def passing(tests: dict[str, dict[str, int]]) -> list[str]:
    """Return the tests that prove a requirement; none if a test marked with it has failed."""
    if any("failed" in outcomes for outcomes in tests.values()):
        return []
    return sorted(test for test, outcomes in tests.items() if "passed" in outcomes)


def state(row: Row, tests: list[str]) -> str:
    """Return one of ``STATES`` for *row*, which *tests* prove.

    A decision not to build a part needs no test.
    """
    if "decided" in row:
        return "decided"
    if not tests:
        return "open"
    return "partly" if "missing" in row else "proved"


def remark(row: Row, state: str) -> str:
    """Return the page's addition to *state*: the part that is missing, or a link to the decision."""
    if state == "partly":
        return f" (missing: {row['missing']})"
    if state == "decided":
        return f" ([note {row['decided']}](decisions/{note(row['decided']).name}))"
    return ""


def note(number: int) -> Path:
    """Return the decision with *number*.

    Raises:
        LookupError: There is none.
    """
    for path in DECISIONS.glob(f"{number:04}-*.md"):
        return path
    raise LookupError(f"tests/requirements.toml: docs/decisions has no note {number}")


def page(requirements: Requirements, proofs: Proofs) -> str:
    """Return the text of docs/conformance.md."""
    summary = [f"| | {' | '.join(STATES)} | of |", "| --- |" + " ---: |" * (len(STATES) + 1)]
    lines: list[str] = []
    for section, rows in requirements.items():
        counts = dict.fromkeys(STATES, 0)
        lines += ["", f"## {section}", ""]
        for name, row in rows.items():
            tests = passing(proofs.get(name, {}))
            found = state(row, tests)
            counts[found] += 1
            level = LEVELS[row["level"]]
            lines.append(f"- **{name}** · {level} · *{found}*{remark(row, found)} · {row['text']}")
            files: dict[str, list[str]] = {}
            for test in tests:
                file, _, function = test.partition("::")
                files.setdefault(file, []).append(f"`{function}`")
            lines += [f"  - `{file}`: {', '.join(names)}" for file, names in files.items()]
        numbers = " | ".join(str(count) for count in counts.values())
        summary.append(f"| {section} | {numbers} | {len(rows)} |")
    return "\n".join([HEAD, *summary, *lines]) + "\n"


def claims(text: str) -> dict[str, set[str]]:
    """Return the claims of a written page: requirement → tests."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if entry := re.match(r"- \*\*(\w+)\*\*", line):
            name = entry[1]
        elif proof := re.match(r"  - `([^`]+)`: (.*)", line):
            names = re.findall(r"`([^`]+)`", proof[2])
            found.setdefault(name, set()).update(f"{proof[1]}::{test}" for test in names)
    return found


def states(text: str) -> dict[str, str]:
    """Return the state of each requirement on a written page."""
    return dict(re.findall(r"^- \*\*(\w+)\*\* · \w+ · \*(\w+)\*", text, re.MULTILINE))


def exaggerated(requirements: Requirements, text: str) -> list[str]:
    """Return the requirements that a written page calls proved although something is missing."""
    written = states(text)
    return [
        name
        for rows in requirements.values()
        for name, row in rows.items()
        if written.get(name) == "proved" and ("missing" in row or "decided" in row)
    ]


def check(requirements: Requirements, proofs: Proofs) -> int:
    """Report claims that do not hold, and count new proofs that are not on the page yet.

    A skipped test, such as one whose peer is not installed, does not refute its claim.
    """
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    claimed = claims(text)
    too_much = exaggerated(requirements, text)
    broken = [
        f"{name}: {test}"
        for name, tests in sorted(claimed.items())
        for test in sorted(tests)
        if "failed" in proofs.get(name, {}).get(test, {"failed": 1})
    ]
    news = [
        name for name, tests in proofs.items() if passing(tests) and not claimed.get(name, set())
    ]
    for line in broken:
        print(f"docs/conformance.md claims a proof that is gone: {line}")
    for name in too_much:
        print(f"docs/conformance.md calls {name} proved; tests/requirements.toml says otherwise")
    if broken or too_much or news:
        print(f"`make conformance` would bring the page up to date ({len(news)} newly proved)")
    return 1 if broken or too_much else 0


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    proofs: Proofs = {}
    for each in sorted(ROOT.glob(NOTES)):
        for name, tests in json.loads(each.read_text("utf-8")).items():
            proofs.setdefault(name, {}).update(tests)
    with REQUIREMENTS.open("rb") as file:
        requirements: Requirements = tomllib.load(file)
    if "--check" in sys.argv[1:]:
        return check(requirements, proofs)
    PAGE.write_text(page(requirements, proofs), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
