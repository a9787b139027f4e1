"""Values of a broker as texts for people. Peers choose names and bodies: all of it is text, never markup."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Container, Mapping
from itertools import islice
from typing import Any, Final

from amqp_rt.cli.tables import JsonRoom, plain
from amqp_rt.errors import printable

#: Characters of one value in a table, and of a body.
CELL_MAX: Final = 200
BODY_MAX: Final = 16_384
#: Properties or annotations of one message.
PAIRS_MAX: Final = 100
#: Properties and annotations that are times: milliseconds since 1970 (Part 1 §1.6.17), which JSON has as numbers.
TIMES: Final = frozenset(
    (
        *("absolute_expiry_time", "creation_time"),
        *("x-opt-enqueued-time", "x-opt-delivery-time", "x-opt-scheduled-enqueue-time", "x-opt-locked-until"),
    )
)  # fmt: skip
_INDENTED: Final = json.JSONEncoder(indent=2, ensure_ascii=False)


def shown(value: object, key: str = "") -> str:
    """Return *value* of the attribute *key* on one line, without invisible characters, cut after ``CELL_MAX``."""
    # Cut before, too: to escape a long text takes long.
    return cut(printable(_text(value, key)[: CELL_MAX + 1]), CELL_MAX)


def _text(value: object, key: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return moment(value) if key.endswith("_at") else f"{value:,.6g}"
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple) and all(
        isinstance(each, str | int) for each in value[: CELL_MAX + 1]
    ):
        return ", ".join(str(each)[: CELL_MAX + 1] for each in value[: CELL_MAX + 1])
    return json.dumps(plain(value, JsonRoom(CELL_MAX)), ensure_ascii=False)


def moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as date and time in UTC."""
    try:
        return f"{dt.datetime.fromtimestamp(seconds, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def size(octets: float) -> str:
    """Return a number of octets with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if octets < 1024:
            return f"{octets:,.0f} B" if unit == "B" else f"{octets:,.1f} {unit}"
        octets /= 1024
    return f"{octets:,.1f} TiB"


def cut(text: str, most: int) -> str:
    """Return *text*, shortened to *most* characters with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def body_text(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the body of a message, as the JSON API has it, as text of at most ``BODY_MAX`` characters, and a remark."""
    remark = ""
    if "error" in row:
        return "", f"{row['octets']:,} bytes that are no message: {shown(row['error'])}"
    if "base64" in row:
        text, remark = row["base64"], "The body is no text: it is shown in base64."
    elif isinstance(row.get("body"), str):
        text = row["body"]
    elif row.get("body") is None:
        return "", "The message has no body."
    else:
        text = _indented(row["body"])
    whole = len(text) <= BODY_MAX and not row.get("truncated")
    text = printable(text[:BODY_MAX], keep="\n\t")
    if len(text) > BODY_MAX or not whole:
        remark = f"{remark} Only its beginning is shown.".strip()
    return text[:BODY_MAX], remark


def _indented(value: object) -> str:
    """Return *value* as JSON on lines, or somewhat more than ``BODY_MAX`` characters of it."""
    pieces = []
    size = 0
    for piece in _INDENTED.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > BODY_MAX:
            break
    return "".join(pieces)


def pairs(values: Mapping[Any, Any] | None, *, times: Container[str] = ()) -> list[tuple[str, str]]:
    """Return names and values of properties or annotations as texts, of ``PAIRS_MAX`` at most.

    Args:
        values: The values by their names.
        times: Names of those that are milliseconds since 1970.
    """
    given = values or {}
    found = [
        (shown(str(name)), _time_or_text(given[name]) if name in times else shown(given[name]))
        for name in islice(given, PAIRS_MAX)
    ]
    if len(given) > PAIRS_MAX:
        found.append(("…", f"{len(given) - PAIRS_MAX:,} more are not shown"))
    return found


def _time_or_text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return moment(value / 1000)
    return shown(value)
