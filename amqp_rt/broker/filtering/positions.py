"""Start positions of readers in a log: the filters of Event Hubs and of RabbitMQ's streams.

Both express the position as a filter of the source. This module only parses it; the log finds the
record.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from msgspec import Struct

from ...values import Timestamp
from .selectors import InvalidFilter

__all__ = ["Position", "event_hubs_position", "stream_position"]


class Position(Struct, frozen=True):
    """Position of the first record for a reader.

    * ``first``, ``last``: the oldest record, or the newest.
    * ``next``: the first record that arrives after the attach.
    * ``offset``, ``sequence-number``: the record at *value*, or the one after it.
    * ``timestamp``: the first enqueued at *value*, in milliseconds since 1970, or later.
    * ``age``: the first enqueued within the last *value* milliseconds.
    """

    kind: Literal["first", "last", "next", "offset", "sequence-number", "timestamp", "age"]
    value: int = 0
    #: Whether the record at *value* is included; otherwise the next one is the first.
    inclusive: bool = True


_BOUND: Final = re.compile(
    r"\s*amqp\.annotation\.(?P<name>x-opt-offset|x-opt-sequence-number"
    r"|x-opt-enqueued-time|x-opt-enqueuedtimeutc)"
    r"\s*(?P<sign>>=?)\s*(?:'(?P<quoted>[^']*)'|(?P<bare>-?[0-9]+))\s*"
)
_KINDS: Final[dict[str, Literal["offset", "sequence-number", "timestamp"]]] = {
    "x-opt-offset": "offset",
    "x-opt-sequence-number": "sequence-number",
    "x-opt-enqueued-time": "timestamp",
    "x-opt-enqueuedtimeutc": "timestamp",
}
_WHOLE: Final = re.compile("-?[0-9]{1,19}")


def event_hubs_position(selector: str) -> Position | None:
    """Parse a selector such as ``amqp.annotation.x-opt-offset > '100'``.

    Returns None for any other selector, which then filters records.

    Raises:
        InvalidFilter: The value is not an offset, sequence number or time.
    """
    found = _BOUND.fullmatch(selector)
    if found is None:
        return None
    kind = _KINDS[found["name"]]
    inclusive = found["sign"] == ">="
    text = found["bare"] if found["quoted"] is None else found["quoted"]
    if kind == "offset":
        if text == "-1":
            return Position("first")
        if text == "@latest":
            return Position("last" if inclusive else "next")
    if not _WHOLE.fullmatch(text) or (kind == "offset" and text.startswith("-")):
        at = found.end("sign")
        raise InvalidFilter(
            f"the start position: at character {at}: a number expected as {kind}, not {text[:24]!r}",
            position=at,
            expected=("a number",),
        )
    return Position(kind, int(text), inclusive)


_NAMED: Final[dict[str, Position]] = {
    "first": Position("first"),
    "last": Position("last"),
    "next": Position("next"),
}
_INTERVAL: Final = re.compile("([0-9]{1,9})([YMDhms])")
_SECONDS: Final = {
    "Y": 365 * 86_400,
    "M": 30 * 86_400,
    "D": 86_400,
    "h": 3_600,
    "m": 60,
    "s": 1,
}


def stream_position(value: object) -> Position:
    """Parse the value of ``rabbitmq:stream-offset-spec``.

    It is ``first``, ``last`` or ``next``, an offset, a timestamp, or an interval such as ``1h``.

    Raises:
        InvalidFilter: The value has another form.
    """
    if isinstance(value, str):
        if value in _NAMED:
            return _NAMED[value]
        found = _INTERVAL.fullmatch(value)
        if found is not None:
            return Position("age", int(found[1]) * _SECONDS[found[2]] * 1_000)
    elif isinstance(value, Timestamp):
        return Position("timestamp", int(value))
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Position("offset", int(value))
    raise InvalidFilter(
        "rabbitmq:stream-offset-spec: first, last, next, an offset, a timestamp or an interval "
        "such as 1h expected",
        expected=("first", "last", "next", "an offset", "a timestamp", "an interval"),
    )
