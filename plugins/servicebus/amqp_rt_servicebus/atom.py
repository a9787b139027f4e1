"""Atom documents of the administration: entries and feeds of entities, and errors (RFC 4287).

Elements are written in the order of the Python SDK's models, which is that of the service; they are
read in any order, and unknown ones are ignored. Names of entities are read twice by clients: Python takes the
``title`` of an entry, JavaScript the path of its ``id``, with ``/Subscriptions/`` and ``/Rules/`` spelled so.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from .declarations import DEFAULT_RULE, Queue, Right, Rule, SasKey, Subscription, Topic
from .rule_documents import CONNECT, moment_text, read_bool, read_int, read_rule, write_rule
from .timespans import iso_of, seconds_of
from .xml_trees import XSI, DocumentRefused, Element, parse, tag, text_of

ATOM: Final = "http://www.w3.org/2005/Atom"
#: Media types of answers.
ENTRY_TYPE: Final = "application/atom+xml;type=entry;charset=utf-8"
FEED_TYPE: Final = "application/atom+xml;type=feed;charset=utf-8"
ERROR_TYPE: Final = "application/xml;charset=utf-8"

#: Maximum number of shared access policies of one entity, a limit of the service.
POLICIES_MAX: Final = 12
#: Maximum number of characters of a policy's name and keys.
_POLICY_TEXT_MAX: Final = 256

_COUNTS: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
#: Time of .NET that the service writes for one that has not come yet.
_NEVER: Final = "0001-01-01T00:00:00Z"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HEADING: Final = '<?xml version="1.0" encoding="utf-8"?>'
_STATUSES: Final = ("Active", "Disabled", "SendDisabled", "ReceiveDisabled")
_RIGHTS: Final = ("Manage", "Send", "Listen")
_INT32_MAX: Final = (1 << 31) - 1

#: Path of an entity: of a queue or topic, a subscription, or a rule.
EntityPath: TypeAlias = tuple[str] | tuple[str, str] | tuple[str, str, str]
Declared: TypeAlias = Queue | Topic | Subscription | Rule


class MessageCounts(Struct, frozen=True, kw_only=True):
    """Numbers of messages of an entity and its sub-queues."""

    #: Messages that can be received, with those that are locked or deferred.
    active: int = 0
    dead_letter: int = 0
    scheduled: int = 0
    #: On their way to the entity that this one forwards to.
    transfer: int = 0
    transfer_dead_letter: int = 0

    @property
    def total(self) -> int:
        """Number of all messages."""
        return (
            self.active
            + self.dead_letter
            + self.scheduled
            + self.transfer
            + self.transfer_dead_letter
        )


class RuntimeFacts(Struct, frozen=True, kw_only=True):
    """State of an entity beside its options. Times are seconds since 1970."""

    created_at: float
    updated_at: float
    #: None for never.
    accessed_at: float | None = None
    #: Encoded messages in all states, those of sub-queues too.
    size_in_bytes: int = 0
    counts: MessageCounts = MessageCounts()
    #: Of a topic.
    subscription_count: int = 0


class Described(Struct, frozen=True):
    """An entity as the administration shows it."""

    declared: Declared
    facts: RuntimeFacts


class NamespaceFacts(Struct, frozen=True, kw_only=True):
    """Properties of a namespace. Times are seconds since 1970."""

    name: str
    created_at: float
    modified_at: float
    sku: Literal["Basic", "Standard", "Premium"] = "Standard"
    #: Messaging units of a premium namespace.
    units: int | None = None
    alias: str | None = None


class Description(Struct, frozen=True):
    """Options of an entity as a client sent them, without its name, which is in the request's path."""

    kind: type[Queue | Topic | Subscription | Rule]
    options: dict[str, Any]

    def declare(self, name: str, previous: Declared | None = None) -> Any:
        """Return the entity *name* with these options.

        An update replaces all options, except that those which cannot change are kept if they are absent.
        Subscriptions of a topic and rules of a subscription have operations of their own, and are kept.

        Args:
            name: Name of a new entity.
            previous: The entity that is updated.

        Raises:
            ValueError: An option has no valid value, or would change and cannot.
        """
        options = dict(self.options)
        if previous is not None:
            name = previous.name
            label = f"{type(previous).__name__.lower()} {name!r:.80}"
            if not isinstance(previous, self.kind):
                raise ValueError(f"{label} cannot become a {self.kind.__name__.lower()}")
            for option, element in _FIXED.items():
                before = getattr(previous, option, None)
                if before is not None and options.setdefault(option, before) != before:
                    value = str(before).lower()
                    raise ValueError(f"{label}: {element} is {value} and cannot be changed")
            for kept in ("subscriptions", "rules"):
                if hasattr(previous, kept):
                    options[kept] = getattr(previous, kept)
        options["name"] = name
        return self.kind(**options)


class _Field(Struct, frozen=True):
    """Element of a description: how it is read and written."""

    element: str
    #: Return the value that is written, None for none.
    get: Callable[[Described], Any]
    write: Callable[[Any, str], str]
    #: Option that is read from it, empty if it is ignored.
    option: str = ""
    read: Callable[[Element, str], Any] | None = None


#: Options that cannot change once an entity is created.
_FIXED: Final = {
    "requires_session": "RequiresSession",
    "requires_duplicate_detection": "RequiresDuplicateDetection",
    "enable_partitioning": "EnablePartitioning",
}


# -- values ------------------------------------------------------------------------------------


def _read_count(element: Element, authority: str) -> int:
    value = read_int(element.text)
    if not 0 <= value <= _INT32_MAX:
        raise ValueError(f"{value} is not between 0 and {_INT32_MAX}")
    return value


def _read_status(element: Element, authority: str) -> str:
    value = element.text.strip()
    if value not in _STATUSES:
        raise ValueError(f"{value!r:.80} is not {', '.join(_STATUSES[:-1])} or {_STATUSES[-1]}")
    return value


def _read_target(element: Element, authority: str) -> str | None:
    """Return the entity that an address names: SDKs send ``sb://host/entity`` for ``entity``."""
    text = element.text.strip()
    try:
        parts = urlsplit(text)
        host, ours = parts.hostname, urlsplit(f"//{authority}").hostname
    except ValueError:
        raise ValueError(f"{text!r:.80} is not an address") from None
    if parts.scheme and host and host != ours:
        raise ValueError(f"{text!r:.200} is in another namespace than {authority!r:.80}")
    return unquote(parts.path).strip("/") or None


def _read_default_rule(element: Element, authority: str) -> list[Rule]:
    return [Rule(**read_rule(element, DEFAULT_RULE))]


def _read_policies(element: Element, authority: str) -> dict[str, SasKey]:
    found: dict[str, SasKey] = {}
    for each in element.each(CONNECT, "AuthorizationRule"):
        name = _policy_text(each, "KeyName")
        if not name:
            raise ValueError("a policy has no KeyName")
        if name in found:
            raise ValueError(f"there are two policies {name!r:.80}")
        if len(found) >= POLICIES_MAX:
            raise ValueError(f"there are more than {POLICIES_MAX} policies")
        wrapper = each.find(CONNECT, "Rights")
        words = (
            [] if wrapper is None else [word.text for word in wrapper.each(CONNECT, "AccessRights")]
        )
        if unknown := set(words).difference(_RIGHTS):
            raise ValueError(
                f"policy {name!r:.80}: right {min(unknown)!r:.80} is not one of {', '.join(_RIGHTS)}"
            )
        # The service makes keys where none are given.
        found[name] = SasKey(
            _policy_text(each, "PrimaryKey") or _new_key(),
            rights=_rights(words),
            secondary=_policy_text(each, "SecondaryKey") or _new_key(),
        )
    return found


def _rights(words: Iterable[str]) -> tuple[Right, ...]:
    given = set(words)
    rights: tuple[Right, ...] = ("Send", "Listen", "Manage")
    return tuple(each for each in rights if each in given)


def _policy_text(policy: Element, name: str) -> str:
    element = policy.find(CONNECT, name)
    text = "" if element is None else element.text
    if len(text) > _POLICY_TEXT_MAX:
        raise ValueError(f"{name} of a policy has more than {_POLICY_TEXT_MAX} characters")
    return text


def _new_key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def _write_policies(described: Described, authority: str) -> str:
    written_at = _time_text(described.facts.created_at)
    keys: Mapping[str, SasKey] = getattr(described.declared, "keys", {})
    return "".join(
        tag(
            "AuthorizationRule",
            (
                tag("ClaimType", "SharedAccessKey"),
                tag("ClaimValue", "None"),
                tag("Rights", (tag("AccessRights", right) for right in key.rights)),
                tag("CreatedTime", written_at),
                tag("ModifiedTime", written_at),
                tag("KeyName", text_of(name)),
                tag("PrimaryKey", text_of(key.key)),
                tag("SecondaryKey", text_of(key.secondary)),
            ),
            i__type="SharedAccessAuthorizationRule",
        )
        for name, key in keys.items()
    )


def _write_counts(facts: RuntimeFacts, authority: str) -> str:
    """Return the elements within ``CountDetails``, which JavaScript finds by their prefix."""
    counts = facts.counts
    return "".join(
        tag(f"d2p1:{name}", str(value))
        for name, value in (
            ("ActiveMessageCount", counts.active),
            ("DeadLetterMessageCount", counts.dead_letter),
            ("ScheduledMessageCount", counts.scheduled),
            ("TransferDeadLetterMessageCount", counts.transfer_dead_letter),
            ("TransferMessageCount", counts.transfer),
        )
    )


def _time_text(at: float | None) -> str:
    if at is None:
        return _NEVER
    try:
        return moment_text(_EPOCH + timedelta(seconds=at))
    except (OverflowError, ValueError):
        return _NEVER


# -- fields ------------------------------------------------------------------------------------


def _of(option: str) -> Callable[[Described], Any]:
    return lambda described: getattr(described.declared, option)


def _span(element: str, option: str) -> _Field:
    return _Field(
        element,
        _of(option),
        lambda value, _: iso_of(value),
        option,
        lambda found, _: seconds_of(found.text),
    )


def _number(element: str, option: str) -> _Field:
    return _Field(element, _of(option), lambda value, _: str(value), option, _read_count)


def _flag(element: str, option: str) -> _Field:
    return _Field(
        element,
        _of(option),
        lambda value, _: str(value).lower(),
        option,
        lambda found, _: read_bool(found.text),
    )


def _text(element: str, option: str) -> _Field:
    return _Field(
        element, _of(option), lambda value, _: text_of(value), option, lambda found, _: found.text
    )


def _target(element: str, option: str) -> _Field:
    return _Field(
        element,
        _of(option),
        lambda value, authority: text_of(f"sb://{authority}/{value}"),
        option,
        _read_target,
    )


def _fact(element: str, get: Callable[[RuntimeFacts], int]) -> _Field:
    return _Field(element, lambda described: get(described.facts), lambda value, _: str(value))


def _time(element: str, get: Callable[[RuntimeFacts], float | None]) -> _Field:
    return _Field(
        element, lambda described: _time_text(get(described.facts)), lambda value, _: str(value)
    )


def _constant(element: str, value: str) -> _Field:
    return _Field(element, lambda _: value, lambda value, _: str(value))


_STATUS: Final = _Field(
    "Status", _of("status"), lambda value, _: text_of(value), "status", _read_status
)
_KEYS: Final = _Field(
    "AuthorizationRules", lambda described: described, _write_policies, "keys", _read_policies
)
_COUNT_DETAILS: Final = _Field("CountDetails", lambda described: described.facts, _write_counts)
_AVAILABLE: Final = _constant("EntityAvailabilityStatus", "Available")
_TIMES: Final = (
    _time("CreatedAt", lambda facts: facts.created_at),
    _time("UpdatedAt", lambda facts: facts.updated_at),
    _time("AccessedAt", lambda facts: facts.accessed_at),
)
_MESSAGE_COUNT: Final = _fact("MessageCount", lambda facts: facts.counts.total)
_SIZE: Final = _fact("SizeInBytes", lambda facts: facts.size_in_bytes)
_DUPLICATES: Final = "DuplicateDetectionHistoryTimeWindow"

#: Elements of descriptions, in the order of the service.
_QUEUE_FIELDS: Final = (
    _span("LockDuration", "lock_duration"),
    _number("MaxSizeInMegabytes", "max_size_in_megabytes"),
    _flag("RequiresDuplicateDetection", "requires_duplicate_detection"),
    _flag("RequiresSession", "requires_session"),
    _span("DefaultMessageTimeToLive", "default_message_time_to_live"),
    _flag("DeadLetteringOnMessageExpiration", "dead_lettering_on_message_expiration"),
    _span(_DUPLICATES, "duplicate_detection_history_time_window"),
    _number("MaxDeliveryCount", "max_delivery_count"),
    _flag("EnableBatchedOperations", "enable_batched_operations"),
    _SIZE,
    _MESSAGE_COUNT,
    _constant("IsAnonymousAccessible", "false"),
    _KEYS,
    _STATUS,
    *_TIMES,
    _constant("SupportOrdering", "true"),
    _COUNT_DETAILS,
    _span("AutoDeleteOnIdle", "auto_delete_on_idle"),
    _flag("EnablePartitioning", "enable_partitioning"),
    _AVAILABLE,
    _flag("EnableExpress", "enable_express"),
    _target("ForwardTo", "forward_to"),
    _text("UserMetadata", "user_metadata"),
    _target("ForwardDeadLetteredMessagesTo", "forward_dead_lettered_messages_to"),
    _number("MaxMessageSizeInKilobytes", "max_message_size_in_kilobytes"),
)
_TOPIC_FIELDS: Final = (
    _span("DefaultMessageTimeToLive", "default_message_time_to_live"),
    _number("MaxSizeInMegabytes", "max_size_in_megabytes"),
    _flag("RequiresDuplicateDetection", "requires_duplicate_detection"),
    _span(_DUPLICATES, "duplicate_detection_history_time_window"),
    _flag("EnableBatchedOperations", "enable_batched_operations"),
    _SIZE,
    _flag("FilteringMessagesBeforePublishing", "filtering_messages_before_publishing"),
    _constant("IsAnonymousAccessible", "false"),
    _KEYS,
    _STATUS,
    *_TIMES,
    _flag("SupportOrdering", "support_ordering"),
    _COUNT_DETAILS,
    _fact("SubscriptionCount", lambda facts: facts.subscription_count),
    _span("AutoDeleteOnIdle", "auto_delete_on_idle"),
    _flag("EnablePartitioning", "enable_partitioning"),
    _AVAILABLE,
    _constant("EnableSubscriptionPartitioning", "false"),
    _flag("EnableExpress", "enable_express"),
    _text("UserMetadata", "user_metadata"),
    _number("MaxMessageSizeInKilobytes", "max_message_size_in_kilobytes"),
)
_SUBSCRIPTION_FIELDS: Final = (
    _span("LockDuration", "lock_duration"),
    _flag("RequiresSession", "requires_session"),
    _span("DefaultMessageTimeToLive", "default_message_time_to_live"),
    _flag("DeadLetteringOnMessageExpiration", "dead_lettering_on_message_expiration"),
    _flag(
        "DeadLetteringOnFilterEvaluationExceptions",
        "dead_lettering_on_filter_evaluation_exceptions",
    ),
    _MESSAGE_COUNT,
    _number("MaxDeliveryCount", "max_delivery_count"),
    _flag("EnableBatchedOperations", "enable_batched_operations"),
    _STATUS,
    _target("ForwardTo", "forward_to"),
    *_TIMES,
    _COUNT_DETAILS,
    _target("ForwardDeadLetteredMessagesTo", "forward_dead_lettered_messages_to"),
    _span("AutoDeleteOnIdle", "auto_delete_on_idle"),
    _AVAILABLE,
    _text("UserMetadata", "user_metadata"),
    # Read only: the rule that a new subscription begins with.
    _Field("DefaultRuleDescription", lambda _: None, lambda *_: "", "rules", _read_default_rule),
)
_DESCRIPTIONS: Final[Mapping[str, tuple[type[Declared], tuple[_Field, ...]]]] = {
    "QueueDescription": (Queue, _QUEUE_FIELDS),
    "TopicDescription": (Topic, _TOPIC_FIELDS),
    "SubscriptionDescription": (Subscription, _SUBSCRIPTION_FIELDS),
    "RuleDescription": (Rule, ()),
}
_ELEMENTS: Final[Mapping[type, str]] = {kind: name for name, (kind, _) in _DESCRIPTIONS.items()}


# -- reading -----------------------------------------------------------------------------------


def read_entry(
    document: bytes, authority: str, *, expected: Iterable[type[Declared]]
) -> Description:
    """Return the description in an entry.

    Args:
        document: Body of the request.
        authority: Host and port that the client used; addresses of other hosts are refused.
        expected: Types of entities that are possible at the request's path.

    Raises:
        ValueError: The document is no entry with such a description, or a value in it is not valid.
    """
    root = parse(document)
    if (root.namespace, root.name) != (ATOM, "entry"):
        raise DocumentRefused(f"the document is not an Atom entry, but {root.name!r:.80}")
    content = root.find(ATOM, "content")
    wanted = [_ELEMENTS[each] for each in expected]
    found = [
        each
        for each in (content.children if content is not None else ())
        if each.namespace == CONNECT and each.name.endswith("Description")
    ]
    if len(found) != 1 or found[0].name not in wanted:
        names = ", ".join(f"{each.name:.80}" for each in found[:3]) or "no description"
        raise DocumentRefused(f"the content of the entry is {names}, not one {' or '.join(wanted)}")
    description = found[0]
    kind, fields = _DESCRIPTIONS[description.name]
    if kind is Rule:
        options = read_rule(description)
        del options["name"]  # The path has it.
        return Description(Rule, options)
    return Description(kind, _read_options(description, fields, authority))


def _read_options(description: Element, fields: Iterable[_Field], authority: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for field in fields:
        element = description.find(CONNECT, field.element) if field.read is not None else None
        if field.read is not None and element is not None and not element.nil:
            try:
                options[field.option] = field.read(element, authority)
            except ValueError as error:
                raise DocumentRefused(f"{field.element}: {error}") from None
    return options


# -- writing -----------------------------------------------------------------------------------


def id_of(path: EntityPath, authority: str) -> str:
    """Return the ``id`` of an entity, an address with the words that JavaScript looks for."""
    words = ("", "/Subscriptions/", "/Rules/")
    steps = "".join(
        f"{word}{quote(each, safe='/$')}" for word, each in zip(words, path, strict=False)
    )
    return f"https://{authority}/{steps}"


def write_entry(path: EntityPath, described: Described, authority: str, namespace: str) -> bytes:
    """Return the entry of an entity as a document.

    Args:
        path: Names of the entity and of those that it belongs to.
        described: The entity.
        authority: Host and port that the client used.
        namespace: Name of the namespace, the author of the entry.
    """
    return _document(_entry(path, described, authority, namespace))


def write_feed(
    title: str,
    entries: Iterable[tuple[EntityPath, Described]],
    *,
    authority: str,
    namespace: str,
    this: str,
    following: str | None,
) -> bytes:
    """Return a page of entities as a document.

    Args:
        title: What the list is of.
        entries: The entities of this page.
        authority: Host and port that the client used.
        namespace: Name of the namespace, the author of the entries.
        this: Address of this page.
        following: Address of the next page; None on the last one. Python takes the second of two links.
    """
    pages = list(entries)
    updated = max((described.facts.updated_at for _, described in pages), default=None)
    return _document(
        tag(
            "feed",
            (
                tag("title", text_of(title), type="text"),
                tag("id", text_of(this)),
                tag("updated", _time_text(updated)),
                tag("link", rel="self", href=this),
                "" if following is None else tag("link", rel="next", href=following),
                *(_entry(path, each, authority, namespace) for path, each in pages),
            ),
            xmlns=ATOM,
        )
    )


def write_namespace(facts: NamespaceFacts, authority: str) -> bytes:
    """Return the entry of the namespace itself as a document."""
    address = f"https://{authority}/$namespaceinfo"
    options = (
        ("Alias", facts.alias),
        ("CreatedTime", _time_text(facts.created_at)),
        ("MessagingSKU", facts.sku),
        ("MessagingUnits", None if facts.units is None else str(facts.units)),
        ("ModifiedTime", _time_text(facts.modified_at)),
        ("Name", facts.name),
        ("NamespaceType", "Messaging"),
    )
    info = tag(
        "NamespaceInfo",
        (tag(name, text_of(value)) for name, value in options if value is not None),
        xmlns=CONNECT,
        xmlns__i=XSI,
    )
    return _document(
        tag(
            "entry",
            (
                tag("id", text_of(address)),
                tag("title", text_of(facts.name), type="text"),
                tag("updated", _time_text(facts.modified_at)),
                tag("author", tag("name", text_of(facts.name))),
                tag("link", rel="self", href=address),
                tag("content", info, type="application/xml"),
            ),
            xmlns=ATOM,
        )
    )


def write_error(status: int, detail: str) -> bytes:
    """Return the document of an error; *detail* begins with ``SubCode=…``, which JavaScript reads."""
    return _document(tag("Error", (tag("Code", str(status)), tag("Detail", text_of(detail)))))


def _entry(path: EntityPath, described: Described, authority: str, namespace: str) -> str:
    facts = described.facts
    address = id_of(path, authority)
    return tag(
        "entry",
        (
            tag("id", text_of(address)),
            tag("title", text_of(path[-1]), type="text"),
            tag("published", _time_text(facts.created_at)),
            tag("updated", _time_text(facts.updated_at)),
            tag("author", tag("name", text_of(namespace))),
            tag("link", rel="self", href=address),
            tag("content", _description(described, authority), type="application/xml"),
        ),
        xmlns=ATOM,
    )


def _description(described: Described, authority: str) -> str:
    declared = described.declared
    if isinstance(declared, Rule):
        return write_rule(declared, _time_text(described.facts.created_at))
    name = _ELEMENTS[type(declared)]
    _, fields = _DESCRIPTIONS[name]
    written = []
    for field in fields:
        value = field.get(described)
        if value is not None:
            # JavaScript takes the prefix of the counts from the only attribute of this element.
            names = {"xmlns__d2p1": _COUNTS} if field is _COUNT_DETAILS else {}
            written.append(tag(field.element, field.write(value, authority), **names))
    return tag(name, written, xmlns=CONNECT, xmlns__i=XSI)


def _document(root: str) -> bytes:
    return f"{_HEADING}{root}".encode()
