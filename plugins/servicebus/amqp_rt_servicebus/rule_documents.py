"""Rules in the documents of the administration: filters, actions and typed values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import inf, isinf, isnan
from typing import Any, Final

import msgspec

from amqp_rt.values import Timestamp

from .declarations import Correlation, Everything, Filter, Nothing, Rule, Sql
from .timespans import iso_of
from .xml_trees import XSI, DocumentRefused, Element, tag, text_of

#: Namespace of all descriptions.
CONNECT: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"

#: Version of the language of conditions that the SDKs name.
_COMPATIBILITY_LEVEL: Final = "20"
#: Conditions of the filters that are types of their own, for readers that know conditions only.
_TRUE, _FALSE = "1=1", "1=0"

_XSD: Final = "http://www.w3.org/2001/XMLSchema"
_VALUE: Final = "KeyValueOfstringanyType"
_INT32: Final = range(-(1 << 31), 1 << 31)
_INT64: Final = range(-(1 << 63), 1 << 63)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_MOMENT: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})?"
)
#: Elements of a correlation filter, in the order of the service.
_CORRELATED: Final = (
    ("CorrelationId", "correlation_id"),
    ("MessageId", "message_id"),
    ("To", "to"),
    ("ReplyTo", "reply_to"),
    ("Label", "label"),
    ("SessionId", "session_id"),
    ("ReplyToSessionId", "reply_to_session_id"),
    ("ContentType", "content_type"),
)
_FILTERS: Final = "SqlFilter, TrueFilter, FalseFilter or CorrelationFilter"


def read_bool(text: str) -> bool:
    """Return the value of an ``xsd:boolean``, in either case.

    Raises:
        ValueError: It is none.
    """
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())
    if value is None:
        raise ValueError(f"{text!r:.80} is not true or false")
    return value


def read_int(text: str) -> int:
    """Return the value of an integer of 64 bits.

    Raises:
        ValueError: It is none.
    """
    text = text.strip()
    if _INTEGER.fullmatch(text) is None or int(text) not in _INT64:
        raise ValueError(f"{text!r:.80} is not an integer of 64 bits")
    return int(text)


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r:.80} is not a number") from None


def _read_moment(text: str) -> datetime:
    """Return a time; one without a zone is in UTC, as the service takes it."""
    try:
        if _MOMENT.fullmatch(text.strip()) is None:
            raise ValueError
        value = datetime.fromisoformat(text.strip())
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r:.80} is not a time such as 2020-01-31T12:00:00Z") from None


def _read_duration(text: str) -> timedelta:
    try:
        return msgspec.convert(text.strip(), timedelta)
    except msgspec.ValidationError:
        raise ValueError(f"{text!r:.80} is not an ISO 8601 duration such as PT30S") from None


#: Type of XML Schema → reader of its text.
_READERS: Final[Mapping[str, Any]] = {
    "string": str,
    "boolean": read_bool,
    **dict.fromkeys(("int", "long", "short", "byte"), read_int),
    **dict.fromkeys(("double", "float"), _read_float),
    "dateTime": _read_moment,
    "duration": _read_duration,
}


def read_rule(description: Element, default: str = "") -> dict[str, Any]:
    """Return the arguments of a :class:`.declarations.Rule`; *default* is its name if none is given.

    Raises:
        ValueError: An element has no valid value.
    """
    name = description.find(CONNECT, "Name")
    options: dict[str, Any] = {"name": name.text if name is not None and name.text else default}
    condition = description.find(CONNECT, "Filter")
    if condition is not None and not condition.nil:
        options["filter"] = _read_filter(condition)
    action = description.find(CONNECT, "Action")
    if action is not None and not action.nil:
        options.update(_read_action(action))
    return options


def _read_filter(element: Element) -> Filter:
    kind = element.type
    if kind == "TrueFilter":
        return Everything()
    if kind == "FalseFilter":
        return Nothing()
    if kind == "SqlFilter":
        return Sql(_expression(element), parameters=_read_values(element, "Parameters"))
    if kind != "CorrelationFilter":
        raise DocumentRefused(f"Filter has the type {kind!r:.80}, not {_FILTERS}")
    fields: dict[str, Any] = {}
    for tag_name, field in _CORRELATED:
        given = element.find(CONNECT, tag_name)
        if given is not None and not given.nil:
            fields[field] = given.text
    return Correlation(**fields, properties=_read_values(element, "Properties"))


def _read_action(element: Element) -> dict[str, Any]:
    kind = element.type
    if kind == "EmptyRuleAction":
        return {}
    if kind != "SqlRuleAction":
        raise DocumentRefused(
            f"Action has the type {kind!r:.80}, not SqlRuleAction or EmptyRuleAction"
        )
    return {
        "action": _expression(element),
        "action_parameters": _read_values(element, "Parameters"),
    }


def _expression(element: Element) -> str:
    expression = element.find(CONNECT, "SqlExpression")
    if expression is None or not expression.text.strip():
        raise DocumentRefused(f"{element.name} of the type {element.type} has no SqlExpression")
    return expression.text


def _read_values(element: Element, name: str) -> dict[str, Any]:
    """Return typed values by name."""
    values: dict[str, Any] = {}
    parent = element.find(CONNECT, name)
    for each in parent.each(CONNECT, _VALUE) if parent is not None else ():
        key, value = each.find(CONNECT, "Key"), each.find(CONNECT, "Value")
        if key is None or not key.text or value is None:
            raise DocumentRefused(f"a value in {name} has no Key or no Value")
        if key.text in values:
            raise DocumentRefused(f"{name} has two values {key.text!r:.80}")
        reader = _READERS.get(value.type)
        if reader is None:
            kinds = ", ".join(_READERS)
            raise DocumentRefused(
                f"{name}: the value {key.text!r:.80} has the type {value.type!r:.80}, not one of {kinds}"
            )
        try:
            values[key.text] = reader(value.text)
        except ValueError as error:
            raise DocumentRefused(f"{name}: the value {key.text!r:.80}: {error}") from None
    return values


def write_rule(rule: Rule, created_at: str) -> str:
    """Return the description of *rule*, created at the time *created_at*.

    An action is always there, because the SDKs of JavaScript and Python read one from each rule.
    """
    if rule.action is None:
        action = tag("Action", i__type="EmptyRuleAction")
    else:
        action = tag(
            "Action", _write_sql(rule.action, rule.action_parameters), i__type="SqlRuleAction"
        )
    return tag(
        "RuleDescription",
        (
            _write_filter(rule.filter),
            action,
            tag("CreatedAt", created_at),
            tag("Name", text_of(rule.name)),
        ),
        xmlns=CONNECT,
        xmlns__i=XSI,
    )


def _write_filter(condition: Filter | str) -> str:
    match condition:
        case Correlation():
            given = ((name, getattr(condition, field)) for name, field in _CORRELATED)
            texts = "".join(tag(name, text_of(text)) for name, text in given if text is not None)
            values = _write_values("Properties", condition.properties)
            return tag("Filter", texts + values, i__type="CorrelationFilter")
        case Everything():
            return tag("Filter", _write_sql(_TRUE, {}), i__type="TrueFilter")
        case Nothing():
            return tag("Filter", _write_sql(_FALSE, {}), i__type="FalseFilter")
        case Sql():
            sql = _write_sql(condition.expression, condition.parameters)
        case str():
            sql = _write_sql(condition, {})
    return tag("Filter", sql, i__type="SqlFilter")


def _write_sql(expression: str, parameters: Mapping[str, Any]) -> str:
    return "".join(
        (
            tag("SqlExpression", text_of(expression)),
            tag("CompatibilityLevel", _COMPATIBILITY_LEVEL),
            _write_values("Parameters", parameters),
            tag("RequiresPreprocessing", "true"),
        )
    )


def _write_values(name: str, values: Mapping[str, Any]) -> str:
    """Return typed values, or nothing: JavaScript fails on an empty list.

    JavaScript drops the first five characters of the type, and takes them for ``d6p1:``.
    """
    if not values:
        return ""
    written = []
    for key, value in values.items():
        kind, text = _typed(value)
        typed = tag("Value", text_of(text), i__type=f"d6p1:{kind}", xmlns__d6p1=_XSD)
        written.append(tag(_VALUE, (tag("Key", text_of(key)), typed)))
    return tag(name, written)


def _typed(value: Any) -> tuple[str, str]:
    """Return the type of XML Schema of *value*, and its text."""
    match value:
        case bool():
            return "boolean", str(value).lower()
        case Timestamp():
            try:
                return "dateTime", moment_text(value.datetime)
            except OverflowError:
                return "long", str(int(value))
        case int():
            return ("int" if value in _INT32 else "long"), str(value)
        case float():
            if isnan(value):
                return "double", "NaN"
            if isinf(value):
                return "double", "INF" if value == inf else "-INF"
            return "double", repr(float(value))
        case datetime():
            return "dateTime", moment_text(value)
        case timedelta():
            below = value < timedelta()
            return "duration", ("-" if below else "") + iso_of(abs(value).total_seconds())
        case _:
            return "string", str(value)


def moment_text(value: datetime) -> str:
    """Return *value* in UTC as the service writes times, ``2020-01-31T12:00:00.5Z``."""
    value = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    text = value.replace(tzinfo=None).isoformat()
    return f"{text.rstrip('0') if value.microsecond else text}Z"
