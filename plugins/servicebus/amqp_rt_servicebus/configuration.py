"""Configuration files of a namespace: our TOML here, the JSON of Microsoft's emulators in :mod:`.emulators`.

Options that are missing have the defaults of the service. A mistake is one sentence with the file and
the line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import UNSET, Struct, UnsetType

from amqp_rt.config_files import SettingsError, Where, mistake, parse_settings

from .declarations import (
    Correlation,
    Declaration,
    Everything,
    Filter,
    Hub,
    Queue,
    Rule,
    SasKey,
    Sql,
    Subscription,
    Topic,
)
from .emulators import parse_emulator
from .tables import OPTIONS, given, option_of, table

T = TypeVar("T")

#: Largest file that is read, in bytes.
SIZE_MAX: Final = 4 * 1024 * 1024


class Configuration(Struct, frozen=True):
    """Contents of a configuration file."""

    declarations: tuple[Declaration, ...]
    #: Shared access policies of the namespace by name; empty if the file has none.
    keys: dict[str, SasKey] = {}


def read_configuration(path: str | Path) -> Configuration:
    """Read the file at *path*: JSON of an emulator if its name ends in ``.json``, else TOML.

    Raises:
        SettingsError: The file cannot be read, or has a mistake.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_MAX + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"cannot read {path}: it is not UTF-8") from None
    if len(data) > SIZE_MAX:
        raise SettingsError(f"cannot read {path}: it has more than {SIZE_MAX} bytes")
    if path.suffix.lower() == ".json":
        return Configuration(tuple(parse_emulator(text, str(path))))
    return parse_toml(text, str(path))


# --- TOML ----------------------------------------------------------------------------------------


class _RuleTable(Struct, forbid_unknown_fields=True):
    sql: str | None = None
    parameters: dict[str, Any] = {}
    correlation: Correlation | None = None
    action: str | None = None
    action_parameters: dict[str, Any] = {}


_QueueTable: Any = table("QueueTable", OPTIONS[Queue])
_HubTable: Any = table("HubTable", OPTIONS[Hub])
_SubscriptionTable: Any = table(
    "SubscriptionTable",
    [*OPTIONS[Subscription], ("rules", dict[str, _RuleTable] | UnsetType, UNSET)],
)
_TopicTable: Any = table(
    "TopicTable", [*OPTIONS[Topic], ("subscriptions", dict[str, _SubscriptionTable], {})]
)
_File: Any = table(
    "File",
    [
        ("queues", dict[str, _QueueTable], {}),
        ("topics", dict[str, _TopicTable], {}),
        ("hubs", dict[str, _HubTable], {}),
        ("keys", dict[str, SasKey], {}),
    ],
)


def parse_toml(text: str, name: str = "the configuration") -> Configuration:
    """Parse our TOML: tables ``[queues.NAME]``, ``[topics.NAME]``, ``[hubs.NAME]`` and ``[keys.NAME]``.

    Subscriptions are ``[topics.NAME.subscriptions.NAME]``, their rules
    ``[topics.NAME.subscriptions.NAME.rules.NAME]`` with ``sql`` or ``correlation``, and ``action``.

    Args:
        text: Contents of the file.
        name: Name of the file, for errors.

    Raises:
        SettingsError: The text has a mistake.
    """
    file = parse_settings(text, _File, name)

    def declare(kind: Callable[..., T], where: Where, *given: Any, **options: Any) -> T:
        try:
            return kind(str(where[-1]), *given, **options)
        except ValueError as error:
            raise mistake(name, text, (*where, *option_of(error)), str(error)) from None

    def rule(where: Where, found: _RuleTable) -> Rule:
        if found.sql is not None and found.correlation is not None:
            raise mistake(name, text, where, "a rule has sql or correlation, not both")
        condition: Filter = found.correlation or Everything()
        if found.sql is not None:
            condition = Sql(found.sql, found.parameters)
        changes = {"action": found.action, "action_parameters": found.action_parameters}
        return declare(Rule, where, condition, **changes)

    def subscription(where: Where, found: Any) -> Subscription:
        options = given(found)
        rules = options.pop("rules", None)
        if rules is not None:
            rules = [rule((*where, "rules", each), value) for each, value in rules.items()]
        return declare(Subscription, where, rules, **options)

    def topic(where: Where, found: Any) -> Topic:
        options = given(found)
        below = options.pop("subscriptions")
        subscriptions = [
            subscription((*where, "subscriptions", each), value) for each, value in below.items()
        ]
        return declare(Topic, where, subscriptions, **options)

    declared: list[Declaration] = [
        declare(Queue, ("queues", each), **given(found)) for each, found in file.queues.items()
    ]
    declared += [topic(("topics", each), found) for each, found in file.topics.items()]
    declared += [declare(Hub, ("hubs", each), **given(found)) for each, found in file.hubs.items()]
    return Configuration(tuple(declared), file.keys)
