"""Tables and JSON for terminals."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

from ..errors import printable
from ..values import Array, Map


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


def plain(value: Any) -> Any:
    """Return *value*, received from a peer, with types of JSON only; octets that are no text as base64."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # JSON has no infinity.
        return float(value) if isfinite(value) else str(float(value))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping | Map):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | Array):
        return [plain(each) for each in value]
    return str(value)
