"""Configuration files of Microsoft's emulators of Service Bus and Event Hubs: JSON, read as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from amqp_rt.config_files import SettingsError, Where, explain

from .declarations import (
    Correlation,
    Declaration,
    Everything,
    Filter,
    Hub,
    Queue,
    Rule,
    Sql,
    Subscription,
    Topic,
)
from .tables import OPTIONS, given, option_of, table

T = TypeVar("T")

_SPACE: Final = re.compile(r"[ \t\r\n]*")


class _Text(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    sql_expression: str


class _CorrelationObject(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    content_type: str | None = None
    correlation_id: str | None = None
    label: str | None = None
    message_id: str | None = None
    reply_to: str | None = None
    reply_to_session_id: str | None = None
    session_id: str | None = None
    to: str | None = None
    properties: dict[str, Any] = {}


class _RuleProperties(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    filter_type: str | None = None
    sql_filter: _Text | None = None
    correlation_filter: _CorrelationObject | None = None
    action: _Text | None = None


class _RuleObject(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    name: str
    properties: _RuleProperties = _RuleProperties()


def _properties_of(kind: type[Struct]) -> Any:
    options = [each for each in OPTIONS[kind] if each[0] != "keys"]
    return table(f"{kind.__name__}Properties", options, rename="pascal")


_Properties: Final[dict[type[Struct], Any]] = {
    kind: _properties_of(kind) for kind in (Queue, Topic, Subscription)
}


def _object(kind: type[Struct], *more: tuple[str, Any, Any]) -> Any:
    properties = _Properties[kind]
    options = [("name", str), ("properties", properties, properties()), *more]
    return table(f"{kind.__name__}Object", options, rename="pascal")  # type: ignore[arg-type]


_SubscriptionObject: Any = _object(Subscription, ("rules", list[_RuleObject] | None, None))
_TopicObject: Any = _object(Topic, ("subscriptions", list[_SubscriptionObject] | None, None))
_QueueObject: Any = _object(Queue)
_Namespace: Any = table(
    "Namespace",
    [
        ("name", str | None, None),
        ("queues", list[_QueueObject] | None, None),
        ("topics", list[_TopicObject] | None, None),
    ],
    rename="pascal",
)


class _Group(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    name: str


class _HubObject(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    name: str
    partition_count: int | str = 1
    consumer_groups: list[_Group] | None = None


class _HubNamespace(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    type: str | None = None
    name: str | None = None
    entities: list[_HubObject] | None = None


_UserConfig: Any = table(
    "UserConfig",
    [
        ("namespaces", list[_Namespace] | None, None),
        ("namespace_config", list[_HubNamespace] | None, None),
        ("logging", Any, None),
        ("logging_config", Any, None),
    ],
    rename="pascal",
)


class _EmulatorFile(Struct, rename="pascal", frozen=True, forbid_unknown_fields=True):
    user_config: _UserConfig


def parse_emulator(text: str, name: str = "the configuration") -> list[Declaration]:
    """Parse the JSON file of the Service Bus emulator, or of the Event Hubs emulator.

    Entities of all its namespaces are in one. The section about logging has no effect.

    Args:
        text: Contents of the file.
        name: Name of the file, for errors.

    Raises:
        SettingsError: The text has a mistake.
    """

    def wrong(where: Where, said: str) -> SettingsError:
        return SettingsError(f"{name}, line {json_line_of(text, where)}: {said}")

    try:
        found = msgspec.convert(json.loads(text), _EmulatorFile).user_config
    except json.JSONDecodeError as error:
        said = error.msg[:1].lower() + error.msg[1:]
        raise SettingsError(f"{name}, line {error.lineno}: {said}") from None
    except RecursionError:
        raise SettingsError(f"{name}: its values are nested too deeply") from None
    except msgspec.ValidationError as error:
        raise wrong(*explain(error, _EmulatorFile)) from None

    def declare(kind: Callable[..., T], each: Any, where: Where, *given: Any, **options: Any) -> T:
        try:
            return kind(each.name, *given, **options)
        except ValueError as error:
            option = option_of(error)
            place = ("Properties", *map(_pascal, option)) if option else ("Name",)
            raise wrong((*where, *place), str(error)) from None

    declared: list[Declaration] = []
    for number, namespace in enumerate(found.namespaces or ()):
        here: Where = ("UserConfig", "Namespaces", number)
        for at, queue in enumerate(namespace.queues or ()):
            where = (*here, "Queues", at)
            declared.append(declare(Queue, queue, where, **given(queue.properties)))
        for at, topic in enumerate(namespace.topics or ()):
            where = (*here, "Topics", at)
            below: list[Subscription] = []
            for place, subscription in enumerate(topic.subscriptions or ()):
                inside = (*where, "Subscriptions", place)
                rules: list[Rule] = []
                for index, each in enumerate(subscription.rules or ()):
                    there = (*inside, "Rules", index)
                    found_filter = _filter_of(each, (*there, "Properties", "FilterType"), wrong)
                    rules.append(declare(Rule, each, there, *found_filter))
                options = given(subscription.properties)
                below.append(declare(Subscription, subscription, inside, rules or None, **options))
            declared.append(declare(Topic, topic, where, below, **given(topic.properties)))
    for number, hubs in enumerate(found.namespace_config or ()):
        for at, hub in enumerate(hubs.entities or ()):
            where = ("UserConfig", "NamespaceConfig", number, "Entities", at)
            try:
                count = int(hub.partition_count)
            except ValueError:
                raise wrong((*where, "PartitionCount"), "PartitionCount is no number") from None
            groups = [each.name for each in hub.consumer_groups or ()]
            declared.append(declare(Hub, hub, where, partitions=count, consumer_groups=groups))
    return declared


def _filter_of(
    rule: _RuleObject, where: Where, wrong: Callable[[Where, str], SettingsError]
) -> tuple[Filter, str | None]:
    """Return the filter and the action of a rule."""
    found = rule.properties
    action = found.action.sql_expression if found.action is not None else None
    kind = (found.filter_type or "").lower()
    if kind not in ("", "sql", "correlation"):
        raise wrong(where, f"rule {rule.name!r:.80}: FilterType is {found.filter_type!r:.40}, not Sql or Correlation")  # fmt: skip
    if found.correlation_filter is not None and kind != "sql":
        return Correlation(**asdict(found.correlation_filter)), action or None
    if found.sql_filter is not None and kind != "correlation":
        return Sql(found.sql_filter.sql_expression), action or None
    if kind:
        raise wrong(where, f"rule {rule.name!r:.80}: FilterType is {found.filter_type}, and there is no such filter")  # fmt: skip
    return Everything(), action or None


def _pascal(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def json_line_of(text: str, where: Where) -> int:
    """Return the line of *text*, a JSON document, with the value at *where*, or its nearest parent."""
    decoder = json.JSONDecoder()

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        return at if found is None else found.end()

    at = skip(0)
    for wanted in where:
        inside = _member(decoder, text, skip, at, wanted)
        if inside is None:
            break
        at = inside
    return text.count("\n", 0, at) + 1


def _member(
    decoder: json.JSONDecoder,
    text: str,
    skip: Callable[[int], int],
    at: int,
    wanted: str | int | None,
) -> int | None:
    """Return where the member *wanted* of the object or array at *at* begins; None if it has none."""
    is_object = text[at] == "{"
    number = 0
    at = skip(at + 1)
    while text[at] not in "]}":
        key: str | int = number
        begin = at
        if is_object:
            key, at = decoder.raw_decode(text, at)
            at = skip(skip(at) + 1)
        if key == wanted:
            return begin if is_object and text[at] not in "{[" else at
        _, at = decoder.raw_decode(text, at)
        at = skip(at)
        if text[at] == ",":
            at = skip(at + 1)
        number += 1
    return None
