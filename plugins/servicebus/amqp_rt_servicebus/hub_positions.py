"""Start positions of readers of event hubs: selectors that compare one annotation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from amqp_rt.errors import AmqpError
from amqp_rt.values import Described, Symbol

from .conditions import ARGUMENT_ERROR

#: Symbol and code of the descriptor of a selector. The SDK for JavaScript writes the code, that for Python the
#: symbol.
SELECTOR: Final = Symbol("apache.org:selector-filter:string")
SELECTOR_CODE: Final = 0x0000_468C_0000_0004

_SELECTOR_MAX: Final = 512
_BOUND: Final = re.compile(
    r"\s*amqp\.annotation\.(?P<name>x-opt-[a-z-]{1,24})\s*(?P<sign>>=?)\s*"
    r"(?:'(?P<quoted>[^']{0,64})'|(?P<bare>-?[0-9]{1,20}))\s*"
)
_WHOLE: Final = re.compile("-?[0-9]{1,18}")
_KINDS: Final[Mapping[str, Literal["offset", "sequence-number", "timestamp"]]] = {
    "x-opt-offset": "offset",
    "x-opt-sequence-number": "sequence-number",
    "x-opt-enqueued-time": "timestamp",
    # Older clients.
    "x-opt-enqueuedtimeutc": "timestamp",
}


class StartPosition(Struct, frozen=True):
    """Position of the first event for a reader, in the terms in which a log reads positions."""

    kind: Literal["first", "last", "next", "offset", "sequence-number", "timestamp"]
    #: Offset, sequence number, or milliseconds since 1970.
    value: int = 0
    #: Whether the event at *value* is included; otherwise the next one is the first.
    inclusive: bool = True


def start_position(filters: Mapping[Any, Any] | None) -> StartPosition:
    """Return the start position in the filters of a source, by default the first event.

    Raises:
        AmqpError: There is another filter than one position, or the position is malformed.
    """
    if not filters:
        return StartPosition("first")
    found: StartPosition | None = None
    for name, value in filters.items():
        text = value
        if isinstance(value, Described):
            if value.descriptor not in (SELECTOR, SELECTOR_CODE):
                raise _wrong(f"the filter {str(name)!r:.80} is not supported by event hubs")
            text = value.value
        elif name != SELECTOR:
            raise _wrong(f"the filter {str(name)!r:.80} is not supported by event hubs")
        if not isinstance(text, str):
            raise _wrong(f"the filter {str(name)!r:.80} is not a text")
        if found is not None:
            raise _wrong("the source has two start positions")
        found = _parsed(text)
    assert found is not None
    return found


def _parsed(text: str) -> StartPosition:
    found = _BOUND.fullmatch(text) if len(text) <= _SELECTOR_MAX else None
    kind = None if found is None else _KINDS.get(found["name"])
    if found is None or kind is None:
        raise _wrong(
            f"the selector {text!r:.80} is no start position: amqp.annotation.x-opt-offset,"
            " x-opt-sequence-number or x-opt-enqueued-time, then > or >=, and a quoted value"
        )
    inclusive = found["sign"] == ">="
    value = found["bare"] if found["quoted"] is None else found["quoted"]
    if kind == "offset" and value == "-1":
        return StartPosition("first")
    if kind == "offset" and value == "@latest":
        return StartPosition("last" if inclusive else "next")
    if _WHOLE.fullmatch(value) is None:
        raise _wrong(f"the start position {text!r:.80}: {value!r:.30} is no {kind}")
    return StartPosition(kind, int(value), inclusive)


def _wrong(description: str) -> AmqpError:
    return AmqpError(description, condition=ARGUMENT_ERROR)
