"""Rules as maps and described lists, in the operations at ``$management`` (Service Bus facts, rules)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from amqp_rt.errors import AmqpError
from amqp_rt.values import Described, Int, Map, Timestamp, ULong

from .conditions import ARGUMENT_ERROR
from .declarations import Correlation, Everything, Filter, Nothing, Rule, Sql
from .rules import ActiveRule

#: Descriptors. Those of filters have a digit fewer than the others, at the service too.
RULE: Final = ULong(0x137_0000_0004)
EMPTY_ACTION: Final = ULong(0x137_0000_0005)
SQL_ACTION: Final = ULong(0x137_0000_0006)
SQL_FILTER: Final = ULong(0x13_7000_0006)
TRUE_FILTER: Final = ULong(0x13_7000_0007)
FALSE_FILTER: Final = ULong(0x13_7000_0008)
CORRELATION_FILTER: Final = ULong(0x13_7000_0009)

#: Version of the language of conditions.
_LEVEL: Final = Int(20)
#: Fields of a correlation filter: key in a request → attribute, in the order of the described list.
_CORRELATED: Final[Mapping[str, str]] = {
    "correlation-id": "correlation_id",
    "message-id": "message_id",
    "to": "to",
    "reply-to": "reply_to",
    "label": "label",
    "session-id": "session_id",
    "reply-to-session-id": "reply_to_session_id",
    "content-type": "content_type",
}
_FILTERS: Final = ("sql-filter", "correlation-filter", "true-filter", "false-filter")


def read_rule(name: str, description: object) -> Rule:
    """Return the rule that a request describes.

    Raises:
        AmqpError: The description is malformed.
        ValueError: The name is not allowed.
    """
    given = _map("rule-description", description)
    action = given.get("sql-rule-action")
    return Rule(
        name,
        _read_filter(given),
        None if action is None else _expression("sql-rule-action", action),
    )


def _read_filter(given: Mapping[Any, Any]) -> Filter:
    kinds = [each for each in _FILTERS if given.get(each) is not None]
    if len(kinds) > 1:
        raise _wrong(f"rule-description has both {kinds[0]} and {kinds[1]}")
    match kinds:
        case []:
            return Everything()
        case ["sql-filter"]:
            return Sql(_expression("sql-filter", given["sql-filter"]))
        case ["correlation-filter"]:
            return _read_correlation(_map("correlation-filter", given["correlation-filter"]))
        case ["true-filter"]:
            return Everything()
    return Nothing()


def _read_correlation(given: Mapping[Any, Any]) -> Correlation:
    fields: dict[str, Any] = {}
    for key, attribute in _CORRELATED.items():
        value = given.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise _wrong(f"correlation-filter: {key} is {value!r:.80}, not a text")
            fields[attribute] = str(value)
    properties = given.get("properties")
    if properties is not None:
        found = _map("properties", properties)
        for key in found:
            if not isinstance(key, str):
                raise _wrong(f"correlation-filter: the key {key!r:.80} in properties is no text")
        fields["properties"] = {str(key): value for key, value in found.items()}
    return Correlation(**fields)


def _expression(name: str, value: object) -> str:
    text = _map(name, value).get("expression")
    if not isinstance(text, str):
        raise _wrong(f"{name}: expression is {text!r:.80}, not a text")
    return str(text)


def _map(name: str, value: object) -> Mapping[Any, Any]:
    if isinstance(value, Map):
        return dict(value.pairs)
    if not isinstance(value, Mapping):
        raise _wrong(f"{name} is {value!r:.80}, not a map")
    return value


def _wrong(text: str) -> AmqpError:
    return AmqpError(text, condition=ARGUMENT_ERROR)


def write_rule(rule: ActiveRule) -> Described:
    """Return the description of a rule. Its action is never null, on which JavaScript fails."""
    declared = rule.declaration
    if declared.action is None:
        action = Described(EMPTY_ACTION, [])
    else:
        action = Described(SQL_ACTION, [declared.action, _LEVEL])
    return Described(
        RULE,
        [_write_filter(declared.filter), action, declared.name, Timestamp(rule.created_ms)],
    )


def _write_filter(condition: Filter | str) -> Described:
    match condition:
        case Sql():
            return Described(SQL_FILTER, [condition.expression, _LEVEL])
        case str():
            return Described(SQL_FILTER, [condition, _LEVEL])
        case Everything():
            return Described(TRUE_FILTER, [])
        case Nothing():
            return Described(FALSE_FILTER, [])
        case Correlation():
            fields = [getattr(condition, attribute) for attribute in _CORRELATED.values()]
            return Described(CORRELATION_FILTER, [*fields, dict(condition.properties)])
