"""Start positions of readers of event hubs: selectors that compare one annotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from amqp_rt.broker.building import Position, event_hubs_position
from amqp_rt.errors import AmqpError
from amqp_rt.values import Described, Symbol

from .conditions import ARGUMENT_ERROR

#: Symbol and code of the descriptor of a selector. The SDK for JavaScript writes the code, that for Python the
#: symbol.
SELECTOR: Final = Symbol("apache.org:selector-filter:string")
SELECTOR_CODE: Final = 0x0000_468C_0000_0004

_SELECTOR_MAX: Final = 512


def start_position(filters: Mapping[Any, Any] | None) -> Position:
    """Return the start position in the filters of a source, by default the first event.

    Raises:
        AmqpError: There is another filter than one position, or the position is malformed.
    """
    if not filters:
        return Position("first")
    if len(filters) > 1:
        raise _wrong("the source has more than one filter, and a start position is one")
    ((name, value),) = filters.items()
    text = value
    if isinstance(value, Described):
        if value.descriptor not in (SELECTOR, SELECTOR_CODE):
            raise _wrong(f"the filter {str(name)!r:.80} is not supported by event hubs")
        text = value.value
    elif name != SELECTOR:
        raise _wrong(f"the filter {str(name)!r:.80} is not supported by event hubs")
    if not isinstance(text, str):
        raise _wrong(f"the filter {str(name)!r:.80} is not a text")
    return _parsed(text)


def _parsed(text: str) -> Position:
    found = None
    if len(text) <= _SELECTOR_MAX:
        try:
            found = event_hubs_position(text)
        except AmqpError as error:
            # Clients repeat an attach after other conditions.
            raise _wrong(f"the selector {text!r:.80}: {error.description}") from None
    if found is None:
        raise _wrong(
            f"the selector {text!r:.80} is no start position: amqp.annotation.x-opt-offset,"
            " x-opt-sequence-number or x-opt-enqueued-time, then > or >=, and a quoted value"
        )
    return found


def _wrong(description: str) -> AmqpError:
    return AmqpError(description, condition=ARGUMENT_ERROR)
