"""Writes docs/conformance.md from the marks on the tests and what became of them.

``pytest --conformance=.conformance.json`` notes which test proved which requirement;
``python docs/_tools/conformance.py`` writes the page from that note, and with ``--check`` only says
whether a claim of the page no longer holds.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements.toml"
NOTE = ROOT / ".conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
LEVELS = {"M": "must", "S": "should", "f": "feature"}

#: requirement → test → outcome → how often (a test with parameters runs more than once)
Proofs = dict[str, dict[str, dict[str, int]]]

HEAD = """\
# Conformance

Each requirement, and the tests that prove it. A test claims a requirement with
`@pytest.mark.req("X13")`; `make conformance` runs the suite and writes this page. *Proved* means that
every test that claims it and ran has passed, *open* that there is no such test yet.

A section names where its requirements come from: the parts of the OASIS standard AMQP 1.0, or one of
five older texts. S1 is the AMQP 0-10 working draft of June 2007, S2 Part 3 of AMQP 1.0 (messaging), S3
a draft of 2010 on the behaviour of 1.0 brokers, S4 the AMQP 0-9-1 specification, S5 Microsoft's AMQP
guide for Azure Service Bus.
"""


def passing(tests: dict[str, dict[str, int]]) -> list[str]:
    """The tests that prove a requirement; none of them, if one that claims it has failed."""
    if any("failed" in outcomes for outcomes in tests.values()):
        return []
    return sorted(test for test, outcomes in tests.items() if "passed" in outcomes)


def page(requirements: dict[str, dict[str, dict[str, str]]], proofs: Proofs) -> str:
    summary = ["| | proved | of |", "| --- | ---: | ---: |"]
    lines: list[str] = []
    for section, rows in requirements.items():
        proved = 0
        lines += ["", f"## {section}", ""]
        for name, row in rows.items():
            tests = passing(proofs.get(name, {}))
            proved += bool(tests)
            state = "proved" if tests else "open"
            lines.append(f"- **{name}** · {LEVELS[row['level']]} · *{state}* · {row['text']}")
            files: dict[str, list[str]] = {}
            for test in tests:
                file, _, function = test.partition("::")
                files.setdefault(file, []).append(f"`{function}`")
            lines += [f"  - `{file}`: {', '.join(names)}" for file, names in files.items()]
        summary.append(f"| {section} | {proved} | {len(rows)} |")
    return "\n".join([HEAD, *summary, *lines]) + "\n"


def claims(text: str) -> dict[str, set[str]]:
    """What a written page claims: requirement → tests."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if entry := re.match(r"- \*\*(\w+)\*\*", line):
            name = entry[1]
        elif proof := re.match(r"  - `([^`]+)`: (.*)", line):
            names = re.findall(r"`([^`]+)`", proof[2])
            found.setdefault(name, set()).update(f"{proof[1]}::{test}" for test in names)
    return found


def check(proofs: Proofs) -> int:
    """Complain of claims that do not hold; mention proofs that the page does not know yet.

    A test that was skipped, for want of a peer perhaps, says nothing against its claim.
    """
    claimed = claims(PAGE.read_text("utf-8")) if PAGE.exists() else {}
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
    if broken or news:
        print(f"`make conformance` would bring the page up to date ({len(news)} newly proved)")
    return 1 if broken else 0


def main() -> int:
    proofs: Proofs = json.loads(NOTE.read_text("utf-8"))
    if "--check" in sys.argv[1:]:
        return check(proofs)
    with REQUIREMENTS.open("rb") as file:
        PAGE.write_text(page(tomllib.load(file), proofs), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
