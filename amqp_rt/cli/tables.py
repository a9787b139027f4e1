"""Tables and JSON for terminals."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from math import inf, isfinite
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


class JsonRoom:
    """Characters that values may take in JSON. What has no room is left out, and *left* is negative then."""

    __slots__ = ("left",)

    def __init__(self, characters: float = inf) -> None:
        self.left = characters

    def cut(self, text: str) -> str:
        """Return *text*, or its beginning if there is no room for all of it."""
        if len(text) > self.left:
            text = text[: max(0, int(self.left)) + 1]
        self.left -= len(text) + 2
        return text


def beginning(octets: bytes, most: float) -> str:
    """Return *octets* as text, after *most* octets cut between two characters.

    Raises:
        UnicodeDecodeError: They are no text.
    """
    if len(octets) <= most:
        return octets.decode()
    octets = octets[: int(most)]
    for end in range(len(octets), len(octets) - 4, -1):
        try:
            return octets[:end].decode()
        except UnicodeDecodeError:
            if end <= len(octets) - 3:
                raise
    return ""


def plain(value: Any, room: JsonRoom | None = None) -> Any:
    """Return *value*, received from a peer, with types of JSON only; octets that are no text as base64.

    With *room*, the JSON begins as that of the whole value does, as far as there is room, and the time is bounded.
    """
    if room is None:
        room = JsonRoom()
    if value is None or isinstance(value, bool):
        room.left -= 4
        return value
    if isinstance(value, int):
        room.left -= 1
        return int(value)
    if isinstance(value, float):
        room.left -= 1
        # JSON has no infinity.
        return float(value) if isfinite(value) else str(float(value))
    if isinstance(value, str):
        return room.cut(str(value))
    if isinstance(value, bytes):
        most = max(0, room.left) + 4
        room.left -= len(value)
        try:
            return beginning(value, most)
        except UnicodeDecodeError:
            octets = value if len(value) <= most else value[: int(most)]
            return {"base64": base64.b64encode(octets).decode()}
    if isinstance(value, Mapping | Map):
        found = {}
        for key, each in value.items():
            if room.left < 0:
                break
            name = room.cut(str(key))
            found[name] = plain(each, room)
        return found
    if isinstance(value, list | tuple | Array):
        elements = []
        for each in value:
            if room.left < 0:
                break
            room.left -= 1
            elements.append(plain(each, room))
        return elements
    return room.cut(str(value))
