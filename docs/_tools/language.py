"""Check the language of docstrings, comments, errors and pages: ``make lint`` runs it.

Readers are broker engineers and Python developers, most of them not native speakers. The check keeps out what
once made these texts hard to read: pronouns without a noun, and things named by what somebody says of them. It
prints each place that breaks a rule, and exits with 1 if there is any:

* a docstring does not begin with a pronoun;
* no text has one of the words of ``NEVER``;
* the words of ``SELDOM`` stay below a number for 10,000 words of a room.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: Folders of Python files, and Markdown pages. Decisions are kept as they were written.
ROOMS: dict[str, list[Path]] = {
    "amqp_rt": sorted((ROOT / "amqp_rt").rglob("*.py")),
    **{
        path.name: sorted(path.rglob("*.py"))
        for path in sorted(ROOT.glob("plugins/*/amqp_rt_*"))
        if path.is_dir() and not path.name.endswith(".egg-info")
    },
    "docs": [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "guides").glob("*.md"),
        *(ROOT / "docs" / "tutorial").glob("*.md"),
        *(ROOT / "docs" / "reference").glob("*.md"),
    ],
}
#: Pages that are written from other texts, or list results.
GENERATED = {"benchmarks.md", "conformance.md", "mutations.md", "security-matrix.md"}

PRONOUN = re.compile(
    r"(It|They|This|That|These|Those|He|She|Its|Their|What|Who|Whoever|Whatever|Nobody|Somebody)\b"
)
NEVER = re.compile(r"\b(nobody|somebody|anybody|whoever|in vain)\b", re.IGNORECASE)
#: Words → most for 10,000 words.
SELDOM = {
    re.compile(r"\bwhat\b", re.IGNORECASE): 20,
    re.compile(r"\b(says?|said)\b", re.IGNORECASE): 5,
}

#: Line → text.
Texts = Iterator[tuple[int, str]]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, ast.expr]]:
    """Yield each docstring with its line and its node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                first = node.body[0]
                assert isinstance(first, ast.Expr)
                yield first.lineno, text, first.value


def prose(source: str) -> Texts:
    """Yield docstrings, comments and strings with several words of a Python file."""
    tree = ast.parse(source)
    documented = set()
    for line, text, node in docstrings(tree):
        documented.add(id(node))
        yield line, text
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documented:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def paragraphs(page: str) -> Texts:
    """Yield the lines of a Markdown page outside of its code blocks."""
    inside = False
    for number, line in enumerate(page.splitlines(), 1):
        if re.match(r"\s*(`{3,}|~{3,})", line):
            inside = not inside
        elif not inside:
            yield number, re.sub(r"`[^`]*`", "", line)


def faults() -> Iterator[str]:
    """Yield a line for each place that breaks a rule."""
    for room, files in ROOMS.items():
        words = 0
        places: dict[re.Pattern[str], list[str]] = {pattern: [] for pattern in SELDOM}
        for path in files:
            if path.name in GENERATED:
                continue
            where = path.relative_to(ROOT)
            source = path.read_text("utf-8")
            if path.suffix == ".py":
                for line, text, _ in docstrings(ast.parse(source)):
                    if found := PRONOUN.match(text):
                        yield f"{where}:{line}: a docstring begins with {found[0]!r}"
            for line, text in prose(source) if path.suffix == ".py" else paragraphs(source):
                words += len(re.findall(r"[A-Za-z']+", text))
                if found := NEVER.search(text):
                    yield f"{where}:{line}: {found[0]!r}: name the thing, or use the passive"
                for pattern, kept in places.items():
                    kept += [f"{where}:{line}" for _ in pattern.findall(text)]
        for pattern, kept in places.items():
            if len(kept) * 10_000 > SELDOM[pattern] * words:
                yield (
                    f"{room}: {pattern.pattern} occurs {len(kept)} times in {words:,} words, "
                    f"{SELDOM[pattern]} for 10,000 are permitted:"
                )
                yield from (f"  {place}" for place in kept)


def main() -> int:
    found = list(faults())
    print("\n".join(found) or "plain English")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
