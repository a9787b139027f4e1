"""Values of a broker as texts for people. Peers choose names and bodies: all of it is text, never markup."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any, Final

from amqp_rt.cli.tables import plain
from amqp_rt.errors import printable

#: Characters of one value in a table, and of a body.
CELL_MAX: Final = 200
BODY_MAX: Final = 16_384


def shown(value: object, key: str = "") -> str:
    """Return *value* of the attribute *key* on one line, without invisible characters, cut after ``CELL_MAX``."""
    return cut(printable(_text(value, key)), CELL_MAX)


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
    if isinstance(value, list | tuple) and all(isinstance(each, str | int) for each in value):
        return ", ".join(map(str, value))
    return json.dumps(plain(value), ensure_ascii=False)


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
        text = json.dumps(row["body"], indent=2, ensure_ascii=False)
    if len(text) > BODY_MAX or row.get("truncated"):
        remark = f"{remark} Only its beginning is shown.".strip()
    return printable(text[:BODY_MAX], keep="\n\t"), remark


def pairs(values: Mapping[Any, Any] | None) -> list[tuple[str, str]]:
    """Return names and values of properties or annotations as texts."""
    return [(shown(str(name)), shown(value)) for name, value in (values or {}).items()]
