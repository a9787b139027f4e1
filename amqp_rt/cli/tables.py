"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import printable


def cell(value: object) -> str:
    """Return *value* escaped for a terminal, since peers choose the names of nodes."""
    return printable(str(value))


def table(
    rows: Sequence[Sequence[object]], heads: Sequence[str], *, left: Collection[int] = (0, 1)
) -> str:
    """Return *rows* below *heads* in columns, of which those with the numbers *left* begin at their left edge."""
    cells = [[str(head) for head in heads], *[[cell(each) for each in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = []
    for row in cells:
        padded = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
