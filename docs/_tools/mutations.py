"""Write docs/mutations.md: the promise that each mistake of tests/mutations.py breaks, and how tests notice."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "mutations.md"

HEAD = """\
# Mistakes that tests notice

A test that cannot fail proves nothing. So each promise of the broker is broken on purpose, one at a time,
by the list in `tests/mutations.py`: a method is replaced by what a mistake would have made of it, and the
worlds of `tests/worlds.py` and `tests/markets.py` run under one seed after another, with the faults that
the seed draws. Each mistake has to be noticed, under a seed under which nothing is wrong without it.
`make mutations` writes this page; the test suite hunts all of them in every run.

| mistake | promise that it breaks | world | seed | faults | what was said |
| --- | --- | --- | ---: | ---: | --- |
"""


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from mutations import MUTATIONS, hunt

    rows = []
    for mutation in MUTATIONS:
        caught = hunt(mutation)
        if caught is None:
            print(f"no simulation notices that {mutation.name}", file=sys.stderr)
            return 1
        print(f"{mutation.name}: seed {caught.seed}")
        said = caught.complaint if len(caught.complaint) <= 120 else f"{caught.complaint[:119]}…"
        said = said.replace("|", "\\|").replace("`", "'")
        world = mutation.scenario.__name__
        rows.append(
            f"| {mutation.name} | {mutation.promise} | {world} | {caught.seed} | {caught.faults} "
            f"| `{said}` |"
        )
    # Keep the part after the mark, which docs/_tools/mutation_scores.py writes.
    _, mark, scores = PAGE.read_text("utf-8").partition("<!-- scores")
    PAGE.write_text(HEAD + "\n".join(rows) + "\n\n" + mark + scores, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
