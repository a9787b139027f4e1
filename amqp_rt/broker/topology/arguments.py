"""Arguments of queues and exchanges in AMQP 0-9-1, and the declarations of nodes that they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ...codec.primitives import write_value
from ...errors import AmqpError
from ...fronts.base import QueueDeclaration
from ...limits import SECONDS_MAX, Limits
from ..expiry import DELETED, REJECTED
from ..nodes import NAME_MAX, Declaration, Log, Queue
from .exchange_addresses import exchange_address

#: Function from a queue's declaration to the node to create, which has the same name. It raises
#: ``AmqpError`` with ``amqp:precondition-failed`` for a wrong argument.
QueueType: TypeAlias = Callable[[QueueDeclaration], Declaration]

#: Supported values of ``x-queue-type``, and of ``x-overflow`` with the overflow policies they mean.
_QUEUE_TYPES: Final = ("classic", "quorum", "stream")
_OVERFLOWS: Final = {
    "drop-head": "drop-head",
    "reject-publish": "reject",
    "reject-publish-dlx": "reject",
}
#: Largest number of 0-9-1, and longest time that a node can have.
_NUMBER_MAX: Final = 2**63 - 1
_MILLISECONDS_MAX: Final = int(SECONDS_MAX) * 1000
_UNITS: Final = {"Y": 31_536_000, "M": 2_592_000, "D": 86_400, "h": 3_600, "m": 60, "s": 1}


def check_texts(name: str, arguments: Mapping[str, object], limits: Limits) -> None:
    """Check, before anything is changed, that a name and arguments can be encoded in AMQP 1.0.

    Otherwise they could neither be stored nor sent to a peer.

    Raises:
        EncodeError: They cannot be encoded, such as octets that are not UTF-8.
        AmqpError: The arguments have more than ``arguments_bytes_max`` bytes.
    """
    out = bytearray()
    write_value(out, [name, dict(arguments)])
    if len(out) > len(name) + limits.arguments_bytes_max:
        raise wrong(
            f"the arguments of {name!r:.50} have {len(out)} bytes, and {limits.arguments_bytes_max} at"
            " most are allowed"
        )


def node_of(name: str, wanted: QueueDeclaration) -> Declaration:
    """Return the declaration of the node for a queue with these arguments.

    Raises:
        AmqpError: An argument is wrong (``amqp:precondition-failed``).
    """
    given = dict(wanted.arguments)
    kind = given.pop("x-queue-type", None)
    if kind is not None and kind not in _QUEUE_TYPES:
        raise wrong(f"x-queue-type is one of {', '.join(_QUEUE_TYPES)}, not {kind!r:.50}")
    if len(name) > NAME_MAX:
        raise wrong(f"the name of a queue has at most {NAME_MAX} characters")
    if kind == "stream":
        size = _number(given, "x-max-length-bytes")
        age = given.get("x-max-age")
        return Log(name, max_bytes=size, max_age_s=None if age is None else _age(age))
    options: dict[str, Any] = {}
    ttl = _number(given, "x-message-ttl", most=_MILLISECONDS_MAX)
    if ttl is not None:
        options["ttl_s"] = ttl / 1000
    options["length_max"] = _number(given, "x-max-length", least=0) or None
    options["bytes_max"] = _number(given, "x-max-length-bytes", least=0) or None
    overflow = given.get("x-overflow", "drop-head")
    if not isinstance(overflow, str) or overflow not in _OVERFLOWS:
        raise wrong(f"x-overflow is one of {', '.join(_OVERFLOWS)}, not {overflow!r:.50}")
    if options["length_max"] or options["bytes_max"]:
        options["overflow"] = _OVERFLOWS[overflow]
    else:
        options["overflow"] = "reject"
    most = _number(given, "x-max-priority", least=0)
    if most:
        if most > 255:
            raise wrong(f"x-max-priority is at most 255, not {most}")
        # With ten or more priorities, each value is its own priority; with fewer, values are grouped
        # around the middle one (Part 3 §3.2.1).
        options["priorities"] = max(most + 1, 10)
    returns = _number(given, "x-delivery-limit", least=0, most=_NUMBER_MAX - 1)
    # Clients of 0-9-1 requeue messages that did not fail: only the limit that they set applies.
    options["max_deliveries"] = 0 if returns is None else returns + 1
    options.update(_retries(given))
    single = given.get("x-single-active-consumer", False)
    if not isinstance(single, bool):
        raise wrong(f"x-single-active-consumer is true or false, not {single!r:.50}")
    options["single_active"] = single
    exchange = given.get("x-dead-letter-exchange")
    key = given.get("x-dead-letter-routing-key")
    for argument in (exchange, key):
        if argument is not None and not isinstance(argument, str):
            raise wrong(f"a dead-letter exchange and its key are texts, not {argument!r:.50}")
    if key is not None and exchange is None:
        raise wrong("x-dead-letter-routing-key needs an x-dead-letter-exchange")
    if exchange == "" and key and key != name:
        options["dead_letter"] = key
    elif exchange is not None:
        options["dead_letter"] = exchange_address(str(exchange), str(key or ""))
    _number(given, "x-expires", most=_MILLISECONDS_MAX)
    if wanted.alternate:
        # Messages that expire or overflow are dropped: an alternate exchange is for those that no consumer
        # wants, and those of a deleted queue (0-10 §queue.declare alternate-exchange).
        options["dead_letter"] = exchange_address(wanted.alternate)
        options["dead_letter_for"] = (REJECTED, DELETED)
    return Queue(name, **{**options, **wanted.options})


def _retries(given: Mapping[str, object]) -> dict[str, Any]:
    """Return the options for ``x-delayed-retry-type`` of RabbitMQ 4.3: pauses that grow linearly."""
    kind = given.get("x-delayed-retry-type", "disabled")
    if kind in ("all", "returned"):
        raise wrong(
            f"x-delayed-retry-type {kind!r}: messages that are returned without having failed are redelivered"
            " at once; use 'failed'"
        )
    if kind not in ("disabled", "failed"):
        raise wrong(f"x-delayed-retry-type is disabled or failed, not {kind!r:.50}")
    least = _number(given, "x-delayed-retry-min", most=_MILLISECONDS_MAX)
    longest = _number(given, "x-delayed-retry-max", most=_MILLISECONDS_MAX)
    if kind == "disabled":
        return {}
    if least is None:
        raise wrong("x-delayed-retry-type needs an x-delayed-retry-min")
    return {
        "redelivery_delay_s": least / 1000,
        "redelivery_delay_max_s": (least if longest is None else longest) / 1000,
        "redelivery_growth": "linear",
    }


def _number(
    given: Mapping[str, object], name: str, least: int = 0, most: int = _NUMBER_MAX
) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise wrong(f"{name} is a whole number from {least} to {most}, not {value!r:.50}")
    return int(value)


def _age(value: object) -> float:
    """Convert ``x-max-age`` of a stream, such as ``7D``, to seconds."""
    # No permitted time has more than nineteen digits.
    if isinstance(value, str) and re.fullmatch("[0-9]{1,19}[YMDhms]", value):
        age = int(value[:-1]) * _UNITS[value[-1]]
        if age <= SECONDS_MAX:
            return max(0.001, age)
    raise wrong(
        "x-max-age is a number with Y, M, D, h, m or s behind it, and at most"
        f" {SECONDS_MAX:.0f}s, not {value!r:.50}"
    )


def wrong(why: str) -> AmqpError:
    """Return the error for a wrong argument of a declaration."""
    return AmqpError(why, condition="amqp:precondition-failed")
