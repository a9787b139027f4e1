"""Declarations: queues, topics, subscriptions, rules and event hubs, with the options and defaults of the service.

Options have the names that the administration clients of Azure's SDKs use. Times are seconds, a
``timedelta`` or an ISO 8601 text when given, and seconds once declared; ``inf`` stands for no limit.
Bounds that only the service has, such as a lock of at most five minutes, are in :mod:`.quotas`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import force_setattr

from .timespans import Timespan, seconds_of

#: Directions in which an entity works: both, none, or one.
Status: TypeAlias = Literal["Active", "Disabled", "SendDisabled", "ReceiveDisabled"]
Right: TypeAlias = Literal["Send", "Listen", "Manage"]
#: Rights of a shared access policy.
RIGHTS: Final[tuple[Right, ...]] = ("Send", "Listen", "Manage")

#: Names of options that hold times.
TIMES: Final = (
    "lock_duration",
    "default_message_time_to_live",
    "duplicate_detection_history_time_window",
    "auto_delete_on_idle",
    "retention",
)
#: Name of the rule that a subscription has unless others are given.
DEFAULT_RULE: Final = "$Default"
#: Name of the consumer group that each hub has.
DEFAULT_GROUP: Final = "$Default"

_PATH: Final = re.compile(r"[\w.\-~]+(?:/[\w.\-~]+)*", re.ASCII)
_NAME: Final = re.compile(r"[\w.\-~]+", re.ASCII)
_RESERVED: Final = {"subscriptions", "rules", "consumergroups", "partitions", "publishers"}
_PATH_MAX: Final = 260
_NAME_MAX: Final = 50
_USER_METADATA_MAX: Final = 1_024
_PARTITIONS_MAX: Final = 1_024


def check_path(kind: str, path: str) -> None:
    """Check the name of a queue, topic or hub.

    Raises:
        ValueError: It is too long, has other characters than the service allows, or is reserved.
    """
    if len(path) > _PATH_MAX or _PATH.fullmatch(path) is None:
        raise ValueError(
            f"{kind} {path!r:.80}: a name has at most {_PATH_MAX} letters, digits and ./-_~, and neither"
            " begins nor ends with a slash"
        )
    if _RESERVED.intersection(path.lower().split("/")):
        raise ValueError(f"{kind} {path!r:.80}: the name contains a reserved part of addresses")


def check_name(kind: str, name: str) -> None:
    """Check the name of a subscription, rule or consumer group.

    Raises:
        ValueError: It is too long, or has other characters than the service allows.
    """
    if len(name) > _NAME_MAX or (name != DEFAULT_RULE and _NAME.fullmatch(name) is None):
        raise ValueError(
            f"{kind} {name!r:.80}: a name has at most {_NAME_MAX} letters, digits and .-_~"
        )


class SasKey(Struct, frozen=True, forbid_unknown_fields=True):
    """Key of a shared access policy, with the rights that its tokens give."""

    key: str
    rights: tuple[Right, ...] = ("Send", "Listen", "Manage")
    #: Second key that is accepted too, for a change of keys without interruption.
    secondary: str = ""

    def __post_init__(self) -> None:
        for key in (self.key, self.secondary):
            if ";" in key:
                raise ValueError(
                    "a key contains a semicolon, which would end it in connection strings"
                )
        if not self.key:
            raise ValueError("a key is empty")
        for right in self.rights:
            if right not in RIGHTS:
                raise ValueError(f"the right {right!r:.80} is none of {', '.join(RIGHTS)}")


def check_policies(policies: Mapping[str, SasKey]) -> None:
    """Check shared access policies by name.

    Raises:
        TypeError: One has no :class:`SasKey`.
        ValueError: A name cannot be in a connection string.
    """
    for name, key in policies.items():
        if not name or ";" in name:
            raise ValueError(f"policy {name!r:.80}: a name is not empty and has no semicolon")
        if not isinstance(key, SasKey):
            raise TypeError(f"the key of policy {name!r:.80} is no SasKey")


class Sql(Struct, frozen=True):
    """Filter for the messages for which an SQL condition is true; see :mod:`.sql`."""

    expression: str
    #: Values of the names that begin with ``@``.
    parameters: dict[str, Any] = {}


class Correlation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter for the messages of which all given fields are equal, text by case."""

    correlation_id: str | None = None
    message_id: str | None = None
    to: str | None = None
    reply_to: str | None = None
    label: str | None = None
    session_id: str | None = None
    reply_to_session_id: str | None = None
    content_type: str | None = None
    #: Application properties and their values.
    properties: dict[str, Any] = {}


class Everything(Struct, frozen=True):
    """Filter for all messages."""


class Nothing(Struct, frozen=True):
    """Filter for no message."""


Filter: TypeAlias = Sql | Correlation | Everything | Nothing


class Rule(Struct, frozen=True):
    """Rule of a subscription: which messages it selects, and how it changes their copies.

    A text as *filter* is an SQL condition.
    """

    name: str
    filter: Filter | str = Everything()
    #: Changes of the copy, ``SET name = expression`` and ``REMOVE name``; None for none.
    action: str | None = None
    action_parameters: dict[str, Any] = {}

    def __post_init__(self) -> None:
        check_name("rule", self.name)
        if isinstance(self.filter, str):
            force_setattr(self, "filter", Sql(self.filter))


class _Entity(Struct, frozen=True):
    name: str

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        options = {each: getattr(self, each) for each in self.__struct_fields__}
        for option in TIMES:
            if options.get(option) is not None:
                try:
                    force_setattr(self, option, seconds_of(options[option]))
                except ValueError as error:
                    raise ValueError(f"{kind} {self.name!r:.80}: {option}: {error}") from None
        for option in ("forward_to", "forward_dead_lettered_messages_to"):
            if options.get(option) == "":
                force_setattr(self, option, None)
        if options.get("max_delivery_count", 1) < 1:
            raise ValueError(f"{kind} {self.name!r:.80}: max_delivery_count is less than 1")
        if options.get("lock_duration", 1) == 0:
            raise ValueError(f"{kind} {self.name!r:.80}: lock_duration is 0")
        if len(options.get("user_metadata") or "") > _USER_METADATA_MAX:
            raise ValueError(
                f"{kind} {self.name!r:.80}: user_metadata is longer than {_USER_METADATA_MAX}"
            )
        if options.get("requires_session") and options.get("forward_to"):
            raise ValueError(
                f"{kind} {self.name!r:.80}: an entity that requires sessions cannot forward its messages"
            )


class Queue(_Entity, frozen=True, kw_only=True):
    """Queue of a namespace."""

    lock_duration: Timespan = 60.0
    max_delivery_count: int = 10
    requires_session: bool = False
    requires_duplicate_detection: bool = False
    duplicate_detection_history_time_window: Timespan = 600.0
    default_message_time_to_live: Timespan = inf
    dead_lettering_on_message_expiration: bool = False
    forward_to: str | None = None
    forward_dead_lettered_messages_to: str | None = None
    auto_delete_on_idle: Timespan = inf
    max_size_in_megabytes: int = 1_024
    #: None for the limit of the broker.
    max_message_size_in_kilobytes: int | None = None
    enable_batched_operations: bool = True
    enable_partitioning: bool = False
    enable_express: bool = False
    status: Status = "Active"
    user_metadata: str | None = None
    #: Shared access policies of this queue only, beside those of the namespace.
    keys: Mapping[str, SasKey] = {}

    def __post_init__(self) -> None:
        check_path("queue", self.name)
        check_policies(self.keys)
        super().__post_init__()


class _WithRules(_Entity, frozen=True):
    #: None for one rule, ``$Default``, that selects all messages.
    rules: tuple[Rule, ...] | list[Rule] | None = None


class Subscription(_WithRules, frozen=True, kw_only=True):
    """Subscription of a topic, which keeps a copy of each message that one of its *rules* selects."""

    lock_duration: Timespan = 60.0
    max_delivery_count: int = 10
    requires_session: bool = False
    default_message_time_to_live: Timespan = inf
    dead_lettering_on_message_expiration: bool = False
    dead_lettering_on_filter_evaluation_exceptions: bool = True
    forward_to: str | None = None
    forward_dead_lettered_messages_to: str | None = None
    auto_delete_on_idle: Timespan = inf
    enable_batched_operations: bool = True
    status: Status = "Active"
    user_metadata: str | None = None

    def __post_init__(self) -> None:
        check_name("subscription", self.name)
        rules = (Rule(DEFAULT_RULE),) if self.rules is None else tuple(self.rules)
        _check_types(f"subscription {self.name!r}", "rules", rules, Rule)
        _check_unique(f"subscription {self.name!r}", "rule", [each.name for each in rules])
        force_setattr(self, "rules", rules)
        super().__post_init__()


class _WithSubscriptions(_Entity, frozen=True):
    subscriptions: tuple[Subscription, ...] | list[Subscription] = ()


class Topic(_WithSubscriptions, frozen=True, kw_only=True):
    """Topic of a namespace: each of its subscriptions gets a copy of a message that its rules select."""

    requires_duplicate_detection: bool = False
    duplicate_detection_history_time_window: Timespan = 600.0
    default_message_time_to_live: Timespan = inf
    auto_delete_on_idle: Timespan = inf
    max_size_in_megabytes: int = 1_024
    #: None for the limit of the broker.
    max_message_size_in_kilobytes: int | None = None
    enable_batched_operations: bool = True
    enable_partitioning: bool = False
    enable_express: bool = False
    support_ordering: bool = False
    filtering_messages_before_publishing: bool = False
    status: Status = "Active"
    user_metadata: str | None = None
    #: Shared access policies of this topic and its subscriptions only, beside those of the namespace.
    keys: Mapping[str, SasKey] = {}

    def __post_init__(self) -> None:
        check_path("topic", self.name)
        check_policies(self.keys)
        _check_types(f"topic {self.name!r}", "subscriptions", self.subscriptions, Subscription)
        names = [each.name for each in self.subscriptions]
        _check_unique(f"topic {self.name!r}", "subscription", names)
        force_setattr(self, "subscriptions", tuple(self.subscriptions))
        super().__post_init__()


class Hub(_Entity, frozen=True, kw_only=True):
    """Event hub: a log of partitions that consumer groups read independently."""

    partitions: int = 1
    #: Consumer groups beside ``$Default``, which each hub has.
    consumer_groups: tuple[str, ...] | list[str] = ()
    #: Time after which events are dropped, by eighths of it; None to keep them until their partition is full.
    retention: Timespan | None = None
    #: Shared access policies of this hub only, beside those of the namespace.
    keys: Mapping[str, SasKey] = {}

    def __post_init__(self) -> None:
        check_path("hub", self.name)
        check_policies(self.keys)
        if not 1 <= self.partitions <= _PARTITIONS_MAX:
            raise ValueError(
                f"hub {self.name!r:.80}: partitions is {self.partitions}, not 1 to {_PARTITIONS_MAX}"
            )
        if self.retention == 0:
            raise ValueError(f"hub {self.name!r:.80}: retention is 0")
        groups = [each for each in self.consumer_groups if each.lower() != DEFAULT_GROUP.lower()]
        for group in groups:
            check_name("consumer group", group)
        _check_unique(f"hub {self.name!r}", "consumer group", groups)
        force_setattr(self, "consumer_groups", tuple(groups))
        super().__post_init__()


Declaration: TypeAlias = Queue | Topic | Hub


def _check_types(owner: str, option: str, given: Iterable[object], kind: type) -> None:
    for each in given:
        if not isinstance(each, kind):
            raise TypeError(f"{owner:.100}: {option} has {each!r:.80}, which is no {kind.__name__}")


def _check_unique(owner: str, kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise ValueError(
                f"{owner:.100} has two {kind}s {name!r:.80}: upper and lower case are the same in names"
            )
        seen.add(name.lower())
