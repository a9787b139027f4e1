"""Declarations of nodes, and the terms of links that attach to them (Part 3 §3.5).

:func:`answer` is the only place that decides about an attach, and its answer describes exactly the
behaviour of the node. Requested features that are not provided are omitted from the answer or
changed in it, so that the peer can see it and decide; where the standard requires it, the link is
refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
from msgspec import Struct

from ..addresses import EXCHANGES, LEAVING
from ..codec.composites import from_described
from ..errors import DecodeError
from ..fronts.base import RCV_SECOND, SND_SETTLED, SND_UNSETTLED, Link, LinkConnection
from ..limits import DEFAULT_LIMITS, Limits, check_seconds
from ..outcomes import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Outcome,
    Rejected,
    Released,
)
from ..security.access import Passage, Rights
from ..termini import (
    COPY,
    DURABLE_UNSETTLED,
    MOVE,
    STANDARD_OUTCOMES,
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoLinksOrMessages,
    DeleteOnNoMessages,
    Source,
    Target,
    outlives_connection,
)
from ..values import Array, Described, Symbol
from .expiry import DELETED, MAX_DELIVERIES, REASONS
from .filtering.filters import FilterSet, compile_filter_set
from .filtering.positions import Position
from .filtering.selectors import InvalidFilter, compile_selector
from .log.key_hashes import KEY_HASHES
from .queue.accounts import BLOCK, DROP_HEAD, REJECT
from .queue.keyed import MessageField

#: Longest name of a node, in characters.
NAME_MAX: Final = DEFAULT_LIMITS.name_max

#: Largest number of message groups in a queue.
GROUPS_MAX: Final = 65_536

#: Failed deliveries after which a message is dead-lettered, unless the queue declares another
#: number.
DELIVERIES_MAX: Final = 10

#: Number of priorities, since a priority is one octet.
PRIORITIES_MAX: Final = 256

QUEUE: Final = "queue"
TOPIC: Final = "topic"
LOG: Final = "log"

#: Outcome types by the symbols in which a source lists them.
_OUTCOMES: Final[dict[str, type]] = dict(
    zip(STANDARD_OUTCOMES, (Accepted, Rejected, Released, Modified), strict=True)
)

#: Link properties for the priority of a consumer, in the spelling of Artemis and of RabbitMQ, and
#: for an exclusive consumer.
PRIORITIES: Final = (Symbol("priority"), Symbol("rabbitmq:priority"))
EXCLUSIVE: Final = Symbol("exclusive")

#: Capabilities that name the kind of node a client expects at the address.
_KINDS: Final = {
    "queue": QUEUE,
    "temporary-queue": QUEUE,
    "topic": TOPIC,
    "temporary-topic": TOPIC,
    "log": LOG,
}


#: Events that start the timer of a terminus; with ``never`` it does not start (§3.5.6).
LINK_DETACH: Final = "link-detach"
SESSION_END: Final = "session-end"
CONNECTION_CLOSE: Final = "connection-close"
NEVER: Final = "never"
_POLICIES: Final = (LINK_DETACH, SESSION_END, CONNECTION_CLOSE, NEVER)

#: Link properties for the delivery guarantee (S3 2.3.6): the required one, and the preferred one.
DELIVERY_MODE: Final = Symbol("delivery-mode")
OPT_DELIVERY_MODE: Final = Symbol("opt-delivery-mode")
AT_MOST_ONCE: Final = "at-most-once"
AT_LEAST_ONCE: Final = "at-least-once"
EXACTLY_ONCE: Final = "exactly-once"
_DELIVERY_MODES: Final = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)

#: Capabilities of a subscription shared by several links, and by several containers.
SHARED: Final = "shared"
GLOBAL: Final = "global"

#: Lifetime policies of a dynamic node (§3.5.9).
Lifetime: TypeAlias = (
    DeleteOnClose | DeleteOnNoLinks | DeleteOnNoMessages | DeleteOnNoLinksOrMessages
)
_LIFETIMES: Final = (
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoMessages,
    DeleteOnNoLinksOrMessages,
)
_LIFETIME: Final = Symbol("lifetime-policy")
_DIST_MODES: Final = Symbol("supported-dist-modes")


class Declaration(Struct, frozen=True, repr_omit_defaults=True):
    """Declaration of a node. Two declarations of one name must be equal."""

    name: str

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= NAME_MAX:
            raise ValueError(f"a node's name has 1 to {NAME_MAX} characters, not {self.name!r:.50}")

    @property
    def kind(self) -> str:
        """Kind of the node: ``"queue"``, ``"topic"`` or ``"log"``."""
        raise NotImplementedError

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other addresses of the node."""
        return ()

    @property
    def dead_letter(self) -> str | None:
        """Address for messages that are given up; None if they are dropped."""
        return None


class Addressed(Declaration, frozen=True, kw_only=True):
    """Declaration of a node that may have other addresses beside its name.

    Args:
        aliases: Other addresses of this node. A link that uses one is answered with it (S3 2.1),
            and the rights are those of the node. At most ``Limits.aliases_max``.
    """

    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for alias in self.aliases:
            if not 0 < len(alias) <= NAME_MAX or alias == self.name:
                raise ValueError(
                    f"an alias is another address of 1 to {NAME_MAX} characters, not {alias!r:.50}"
                )


def origin_of(name: str) -> str:
    """Return the name that the queue *name* had before it was deleted; otherwise *name*."""
    return name.removeprefix(LEAVING).partition("/")[2] if name.startswith(LEAVING) else name


#: Largest number in a declaration: stores and peers use 64 bits.
NUMBER_MAX: Final = 2**63 - 1


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, not {value}")
    if name.endswith("_s"):
        check_seconds(name, value, least=least)
    elif value > NUMBER_MAX:
        raise ValueError(f"{name} is at most {NUMBER_MAX}, not {value}")


class Queue(Addressed, frozen=True, kw_only=True):
    """Node that gives each message to one consumer (*move*); it can be browsed (*copy*).

    Args:
        name: Its address.
        max_deliveries: Failed deliveries after which a message is given up. Counted as
            ``delivery-count``: rejected and modified(delivery-failed) count, released does not. By
            default 10 if ``dead_letter`` is declared, also for that reason, otherwise unlimited; 0
            for unlimited.
        max_attempts: Deliveries, with any outcome, after which a requeued message is given up.
        dead_letter: Address for messages that are given up, rejected or expired. A queue of that
            name is created if no such node exists. Without an address such messages are dropped.
        dead_letter_for: Reasons for which messages go there, of ``"rejected"``, ``"expired"``,
            ``"max-deliveries"``, ``"max-attempts"`` and ``"overflow"``; by default all of these. Messages
            given up for other reasons are dropped. With ``"deleted"`` the messages of the queue go there
            when it is deleted.
        ttl_s: Time to live of messages without a ttl, and upper bound for those with one.
        length_max: Maximum number of messages, including delivered ones that are unsettled.
        bytes_max: Maximum size in bytes; by default ``Limits.queue_bytes_max``.
        overflow: Treatment of messages beyond these two limits: ``"block"`` limits the credit of
            senders to the room left; ``"reject"`` rejects messages with
            ``amqp:resource-limit-exceeded``; ``"drop-head"`` gives up the first available messages,
            of the lowest priority if ``priorities`` is declared, to the dead-letter address if there is one,
            which makes the queue a ring.
        priorities: Number of priorities that are distinguished (Part 3 §3.2.1). Messages of equal
            priority stay in order. By default priorities are ignored.
        sort_key: Field by which messages are sorted, lowest first: ``properties.NAME``,
            ``message-annotations.NAME`` or ``application-properties.NAME``; a bare name is an
            application property. Numbers come before times, times before strings, strings before
            other values; messages without the field come last. Equal ones stay in order.
        last_value_key: Field, named likewise: of messages with equal values only the last is kept.
            A message acquired by a consumer is not replaced, but dropped if it is requeued after a
            later one arrived. Messages without the field are all kept.
        groups: Number of message groups that are distinguished, by their ``group-id``. The messages
            of a group go to one consumer, in order, until it leaves. By default there are none.
        group_key: Field whose value is a message's group, named as a ``sort_key``; by default
            ``properties.group-id``.
        lock_s: Seconds after which an unsettled delivery is released for other consumers
            (Part 3 §3.4.4). By default there is no time limit.
        single_active: Whether one consumer gets all messages. Others stand by; when it leaves, the
            one with the highest priority takes over, of equal ones the first that attached.
        exclusive: Whether a second consumer is refused.
        return_to_sender: Whether a message that is given up goes to the node of its ``reply-to``,
            if that is another node of this broker to which its sender may send; otherwise to
            ``dead_letter``.
        check_user_id: Whether to reject a message whose ``user-id`` is not the name of the
            authenticated user (§3.2.4).
        absolute_expiry: Whether a message expires at its ``absolute-expiry-time`` (§3.2.4).
        duplicate_window_s: Seconds for which the ``message-id`` of messages is remembered: another
            message with the same id is accepted and not stored. At most ``Limits.duplicates_max``
            are remembered; those of durable messages outlive a restart. By default none are.
        browse_only: Whether receivers get copies, and the messages stay until they expire, overflow or
            are purged.
        selector: Selector of JMS: messages that it does not match are accepted and dropped on arrival.
        redelivery_delay_s: Seconds between the first failure of a message and its next delivery, for
            consumers that request no pause of their own; 0 for none. By default the first failure is retried
            at once, and pauses begin with ``Limits.retry_pause_s`` at the second one.
        redelivery_delay_max_s: Longest such pause in seconds; by default ``Limits.retry_pause_max_s``.
        redelivery_growth: ``"exponential"`` doubles the pause with each failure; ``"linear"`` adds the first
            pause to it.
    """

    max_deliveries: int | None = None
    max_attempts: int | None = None
    dead_letter: str | None = None
    ttl_s: float | None = None
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: Literal["block", "reject", "drop-head"] = "block"
    priorities: int = 1
    sort_key: str | None = None
    last_value_key: str | None = None
    groups: int = 0
    lock_s: float | None = None
    single_active: bool = False
    exclusive: bool = False
    return_to_sender: bool = False
    check_user_id: bool = False
    absolute_expiry: bool = False
    duplicate_window_s: float | None = None
    dead_letter_for: tuple[str, ...] | None = None
    browse_only: bool = False
    group_key: str | None = None
    selector: str | None = None
    redelivery_delay_s: float | None = None
    redelivery_delay_max_s: float | None = None
    redelivery_growth: Literal["exponential", "linear"] = "exponential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redelivery_growth not in ("exponential", "linear"):
            raise ValueError(
                f"redelivery_growth is exponential or linear, not {self.redelivery_growth!r:.50}"
            )
        _at_least("redelivery_delay_s", self.redelivery_delay_s, 0)
        _at_least(
            "redelivery_delay_max_s", self.redelivery_delay_max_s, self.redelivery_delay_s or 0
        )
        if self.overflow not in (BLOCK, REJECT, DROP_HEAD):
            raise ValueError(f"overflow is block, reject or drop-head, not {self.overflow!r}")
        if not 1 <= self.priorities <= PRIORITIES_MAX:
            raise ValueError(f"priorities is 1 to {PRIORITIES_MAX}, not {self.priorities}")
        if self.group_key is not None and not self.groups:
            raise ValueError("group_key needs groups")
        for key in (self.sort_key, self.last_value_key, self.group_key):
            if key is not None:
                MessageField(key)
        if self.selector is not None:
            try:
                compile_selector(self.selector)
            except InvalidFilter as error:
                raise ValueError(f"selector: {error.description}") from error
        if self.sort_key is not None and self.priorities > 1:
            raise ValueError(
                "a queue is in the order of its sort_key or of priorities, not of both"
            )
        if not 0 <= self.groups <= GROUPS_MAX:
            raise ValueError(f"groups is 0 to {GROUPS_MAX}, not {self.groups}")
        _at_least("lock_s", self.lock_s, 0.001)
        _at_least("duplicate_window_s", self.duplicate_window_s, 0.001)
        _at_least("max_deliveries", self.max_deliveries, 0)
        _at_least("max_attempts", self.max_attempts, 1)
        _at_least("ttl_s", self.ttl_s, 0)
        _at_least("length_max", self.length_max, 1)
        _at_least("bytes_max", self.bytes_max, 1)
        if self.dead_letter is not None:
            if not self.dead_letter:
                raise ValueError("dead_letter is an address, not an empty string")
            if self.dead_letter == self.name:
                raise ValueError(f"queue {self.name!r} cannot be its own dead-letter address")
        if self.dead_letter_for is not None:
            if self.dead_letter is None:
                raise ValueError("dead_letter_for needs a dead_letter")
            for reason in self.dead_letter_for:
                if reason not in REASONS:
                    raise ValueError(
                        f"dead_letter_for has reasons of {', '.join(REASONS)}, not {reason!r:.50}"
                    )

    @property
    def has_alternate(self) -> bool:
        """Whether ``dead_letter`` is an alternate, as in 0-10, from which no other alternate is followed.

        Such an address is only for some reasons, whereas a dead-letter exchange of 0-9-1 gets all.
        """
        return self.dead_letter is not None and self.dead_letter_for is not None

    def dead_letters(self, reason: str) -> bool:
        """Return whether a message that is given up for *reason* goes to the dead-letter address."""
        if self.dead_letter is None:
            return False
        if self.dead_letter_for is None:
            return reason != DELETED
        return reason in self.dead_letter_for

    @property
    def deliveries_max(self) -> int:
        """Failed deliveries after which a message is given up, 0 for any number."""
        if self.max_deliveries is not None:
            return self.max_deliveries
        # Without a dead-letter address such a message would be dropped.
        return DELIVERIES_MAX if self.dead_letters(MAX_DELIVERIES) else 0

    @property
    def kind(self) -> str:
        return QUEUE


class Topic(Addressed, frozen=True, kw_only=True):
    """Node that gives each message to every current subscriber (*copy*).

    Args:
        name: Its address.
        backlog_max: Messages waiting for one subscriber before its link is detached; by default
            ``Limits.backlog_max``.
        backlog_bytes_max: Bytes of those; by default ``Limits.backlog_bytes_max``.
        ttl_s: As for a queue.
    """

    backlog_max: int | None = None
    backlog_bytes_max: int | None = None
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("backlog_max", self.backlog_max, 1)
        _at_least("backlog_bytes_max", self.backlog_bytes_max, 1)
        _at_least("ttl_s", self.ttl_s, 0)

    @property
    def kind(self) -> str:
        return TOPIC


class Log(Addressed, frozen=True, kw_only=True):
    """Node that keeps messages in the order of arrival, for any number of readers (*copy*).

    A reader begins at the first or the last record, at an offset, at a time, or with the next
    record to arrive. Its outcomes have no effect.

    Args:
        name: Its address. ``name/partitions/N`` is one partition, and so is
            ``name/ConsumerGroups/GROUP/Partitions/N``.
        partitions: Number of partitions, each with its own offsets. A message goes to the partition
            of its ``x-opt-partition-key``, or to each in turn. The number cannot be changed later.
        max_age_s: Seconds after which records are deleted, in whole chunks; by default they stay.
        max_bytes: Bytes that each partition keeps, in whole chunks. By default there is no bound in a
            store, and ``Limits.log_bytes_max`` in memory.
        key_hash: Hash by which keys get their partitions: ``"crc32"``, or ``"lookup3"`` as in Event Hubs, for
            clients that compute partitions themselves. It cannot be changed later.
    """

    partitions: int = 1
    max_age_s: float | None = None
    max_bytes: int | None = None
    key_hash: str = "crc32"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("partitions", self.partitions, 1)
        _at_least("max_age_s", self.max_age_s, 0.001)
        _at_least("max_bytes", self.max_bytes, 1)
        if self.key_hash not in KEY_HASHES:
            raise ValueError(
                f"log {self.name!r:.100}: key_hash is one of {', '.join(KEY_HASHES)}, not {self.key_hash!r:.50}"
            )

    @property
    def kind(self) -> str:
        return LOG


#: Declarations by kind.
KINDS: Final[dict[str, type[Declaration]]] = {QUEUE: Queue, TOPIC: Topic, LOG: Log}

#: Address of one partition of a log; that of Event Hubs contains the reader's consumer group.
_PARTITION: Final = re.compile(
    r"(?P<name>.+?)(?:/consumergroups/[^/]+)?/partitions/(?P<partition>[0-9]{1,9})", re.IGNORECASE
)


def split_partition(address: str) -> tuple[str, int] | None:
    """Return the log and the partition named by *address*; None if it is not a partition's."""
    found = _PARTITION.fullmatch(address)
    return None if found is None else (found["name"], int(found["partition"]))


def declaration(kind: str, name: str) -> Declaration:
    """Return a declaration of *kind* without options, as the command line and auto-create use it.

    Raises:
        ValueError: *kind* is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"a node is a queue, a topic or a log, not {kind!r}")
    return KINDS[kind](name)


def passages_of(
    declared: Declaration, before: Declaration | None, exists: Callable[[str], bool]
) -> list[Passage]:
    """Return the paths of messages that *declared* adds to those of *before*.

    Args:
        declared: The new declaration of a node.
        before: Its present declaration, None if it does not exist.
        exists: Whether a node exists at an address: a missing queue for dead letters is created,
            which takes the right to manage it.
    """
    known = () if before is None else before.aliases
    found = [
        Passage(alias, declared.name, Rights.MANAGE, Rights.MANAGE)
        for alias in declared.aliases
        if alias not in known
    ]
    dead = declared.dead_letter
    if dead is not None and not (before is not None and before.dead_letter == dead):
        found.append(Passage(declared.name, dead, Rights.MANAGE))
        if not dead.startswith(EXCHANGES) and not exists(dead):
            found.append(Passage(declared.name, dead, Rights.MANAGE, Rights.MANAGE))
    return found


def similar(key: str, known: Collection[str]) -> str:
    """Return the end of an error text: the name in *known* closest to *key*, or all names."""
    close = get_close_matches(key, known, 1)
    return f"; is {close[0]!r} meant?" if close else f": it has {', '.join(known)}"


def declaration_of(fields: Mapping[str, object], *, strict: bool = True) -> Declaration:
    """Return the declaration in *fields*: ``name``, ``kind`` (by default a queue), and options.

    Unless *strict*, strings are converted to the type of the option, such as ``"5"`` to a number.

    Raises:
        ValueError: A field is unknown or invalid; the text names it, and similar names.
    """
    options = dict(fields)
    kind = options.pop("kind", QUEUE)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"a node is a queue, a topic or a log, not {kind!r:.50}")
    known = KINDS[kind].__struct_fields__
    for key in options:
        if key not in known:
            raise ValueError(f"a {kind} has no option {key!r:.50}{similar(key, known)}")
    try:
        return msgspec.convert(options, KINDS[kind], strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


class Terms(Struct, frozen=True, kw_only=True):
    """Terms of a link: the termini to answer with, and the behaviour of its endpoint."""

    source: Source | None
    target: Target | None
    snd_settle_mode: int
    #: Whether messages are copied and not moved; this and the next fields are for receiving links.
    copies: bool = False
    default_outcome: Outcome = RELEASED
    #: The only outcomes allowed, None for all.
    outcomes: tuple[type, ...] | None = None
    #: Filters that messages have to pass, None for none.
    filters: FilterSet | None = None
    #: Start position in a log, None if none was requested.
    position: Position | None = None
    #: Whether the terminus is kept when the link is detached without being closed.
    keeps: bool = False
    #: Whether the link is one of several of a shared subscription.
    shared: bool = False
    #: Link properties for our attach.
    properties: dict[object, object] | None = None
    #: Consumer priority; higher ones are served first.
    priority: int = 0
    #: Whether other consumers are excluded.
    exclusive: bool = False

    @property
    def settled(self) -> bool:
        """Whether messages are sent settled."""
        return self.snd_settle_mode == SND_SETTLED


class Means(Struct, frozen=True, kw_only=True):
    """Capabilities of the broker for the termini of links at a node."""

    #: Whether one more terminus can be kept.
    room: bool = True
    #: Whether the state of the node and of its links is in a store.
    stored: bool = False
    #: Whether a request for a durable terminus is granted without a store, for the life of the
    #: process.
    volatile: bool = False


_PLAIN: Final = Means()


def answer(
    link: Link,
    declared: Declaration,
    *,
    sending: bool,
    lifetime: Lifetime | None = None,
    owner: LinkConnection | None = None,
    means: Means = _PLAIN,
    address: str | None = None,
    now: float = 0.0,
    limits: Limits = DEFAULT_LIMITS,
) -> Terms | Error:
    """Return the terms of *link* at the node *declared*, or the error to refuse it with.

    Args:
        link: The peer's request.
        declared: The node.
        sending: Whether we send on the link, so that the peer is a consumer.
        lifetime: Lifetime of a dynamic node that was created for this link.
        owner: The only connection that may receive from the node, None for any.
        means: Capabilities of the broker for the terminus.
        address: Address by which the link named the node, if not its name.
        now: Wall-clock time, which a filter may use.
        limits: Bounds of filters and of the time for which a terminus is kept.
    """
    terminus: Any = link.source if sending else link.target
    for capability in terminus.capabilities:
        wanted = _KINDS.get(capability)
        if wanted is not None and wanted != declared.kind:
            return Error(
                "amqp:precondition-failed",
                f"{declared.name!r} is a {declared.kind}, not a {wanted}",
            )
    if sending:
        if owner is not None and owner is not link.connection:
            return Error(
                "amqp:unauthorized-access",
                "only the connection that made a dynamic node may receive from it",
            )
        return _consumer(link, declared, lifetime, means, address or declared.name, now, limits)
    kept = _kept(terminus, True, means, limits)
    if isinstance(kept, Error):
        return kept
    durable, policy, timeout = kept
    target = Target(
        address=address or declared.name,
        durable=durable,
        expiry_policy=policy,
        timeout=timeout,
        dynamic=lifetime is not None,
        dynamic_node_properties=_made(declared, lifetime),
        capabilities=(declared.kind,),
    )
    # Settled messages arrive at most once by nature, unsettled ones at least once.
    modes = [AT_MOST_ONCE] if link.snd_settle_mode == SND_SETTLED else [AT_LEAST_ONCE]
    if outlives_connection(target) and link.snd_settle_mode != SND_SETTLED:
        # After the link is resumed, a delivery is recognised by its tag.
        modes.append(EXACTLY_ONCE)
    delivery_mode = _delivery_mode(link, modes)
    if isinstance(delivery_mode, Error):
        return delivery_mode
    return Terms(
        source=link.source,
        target=target,
        snd_settle_mode=link.snd_settle_mode,
        keeps=policy != LINK_DETACH or timeout > 0,
        properties=delivery_mode,
    )


def _kept(
    asked: Source | Target, possible: bool, means: Means, limits: Limits
) -> tuple[int, Symbol, int] | Error:
    """Return the durability, the expiry-policy and the timeout in seconds of a terminus.

    A terminus that is to outlive its connection is granted or refused, so that the client knows at
    once. One that is only to outlive its link, as by default, is silently answered without that.
    """
    policy = asked.expiry_policy
    if policy not in _POLICIES:
        return Error("amqp:invalid-field", f"there is no expiry-policy {policy!r:.50}")
    if asked.durable > DURABLE_UNSETTLED:
        return Error("amqp:invalid-field", f"there is no terminus-durability {asked.durable}")
    lasting = outlives_connection(asked)
    if not possible:
        if asked.durable:
            return Error("amqp:not-implemented", "nothing is kept of a link like this")
        return 0, Symbol(LINK_DETACH), 0
    if not means.room:
        if lasting:
            return Error("amqp:resource-limit-exceeded", "too many termini are kept already")
        return 0, Symbol(LINK_DETACH), 0
    durable = 0
    if asked.durable and lasting:
        if means.stored:
            durable = asked.durable
        elif not means.volatile:
            return Error(
                "amqp:precondition-failed",
                "a durable terminus was requested, but the broker has no store",
            )
    timeout = 0 if policy == NEVER else min(asked.timeout, limits.terminus_timeout_max_s)
    return durable, Symbol(policy), timeout


def _delivery_mode(link: Link, possible: list[str]) -> dict[object, object] | Error | None:
    """Return the link properties for the delivery guarantee, if the peer requested one (S3 2.3.6).

    The first of *possible* applies unless the peer requests another of them.
    """
    needed = link.properties.get(DELIVERY_MODE)
    wished = link.properties.get(OPT_DELIVERY_MODE)
    for mode in (needed, wished):
        if mode is not None and mode not in _DELIVERY_MODES:
            return Error("amqp:invalid-field", f"there is no delivery-mode {mode!r:.50}")
    if needed is not None and needed not in possible:
        return Error(
            "amqp:not-implemented",
            f"the delivery-mode here is {' or '.join(possible)}, not {needed}: settle modes, "
            "expiry-policy and timeout decide that",
        )
    chosen = needed or (wished if wished in possible else possible[0])
    found: dict[object, object] = {}
    if needed is not None:
        found[DELIVERY_MODE] = Symbol(str(chosen))
    if wished is not None:
        found[OPT_DELIVERY_MODE] = Symbol(str(chosen))
    return found or None


def _guarantee(
    link: Link, source: Source, *, shared: bool
) -> tuple[int, dict[object, object] | None] | Error:
    """Return the settle mode of *link*, which sends from *source*, and its properties for the delivery guarantee."""
    settle_mode = SND_SETTLED if link.snd_settle_mode == SND_SETTLED else SND_UNSETTLED
    delivery_modes = [AT_LEAST_ONCE]
    if settle_mode == SND_SETTLED:
        delivery_modes = [AT_MOST_ONCE]
    else:
        if link.snd_settle_mode != SND_UNSETTLED:
            # The peer left the settle mode to us.
            delivery_modes.append(AT_MOST_ONCE)
        if outlives_connection(source) and not shared and link.rcv_settle_mode == RCV_SECOND:
            delivery_modes.append(EXACTLY_ONCE)
    properties = _delivery_mode(link, delivery_modes)
    if isinstance(properties, Error):
        return properties
    if properties is not None and AT_MOST_ONCE in properties.values():
        settle_mode = SND_SETTLED
    return settle_mode, properties


def _consumer(
    link: Link,
    declared: Declaration,
    lifetime: Lifetime | None,
    means: Means,
    address: str,
    now: float,
    limits: Limits,
) -> Terms | Error:
    asked = link.source
    assert asked is not None
    # A client that relies on an unsupported distribution-mode is refused (S3 2.3.11).
    mode = asked.distribution_mode
    modes = _modes(declared)
    if mode is None:
        mode = modes[0]
    elif mode not in modes:
        return Error(
            "amqp:not-implemented",
            f"the {declared.kind} {declared.name!r} has no distribution-mode {mode!r}",
        )
    copies = mode == COPY
    shared = SHARED in asked.capabilities
    if shared and declared.kind != TOPIC:
        return Error("amqp:not-implemented", f"a {declared.kind} has no shared subscriptions")
    # A browser acquires nothing that had to be kept, and a reader of a log knows its own offset.
    kept = _kept(
        asked, declared.kind == TOPIC or not (copies or declared.kind == LOG), means, limits
    )
    if isinstance(kept, Error):
        return kept
    durable, policy, timeout = kept
    keeps = policy != LINK_DETACH or timeout > 0
    default = asked.default_outcome
    if default is None:
        # With a terminus that the peer can resume, the messages must not be lost with the link.
        lasting = timeout > 0 or policy == NEVER or shared
        default = ACCEPTED if copies and not lasting else RELEASED
    elif not isinstance(default, Outcome):
        return Error("amqp:invalid-field", "the default-outcome is not an outcome")
    unknown = [outcome for outcome in asked.outcomes if outcome not in _OUTCOMES]
    if unknown:
        return Error("amqp:not-implemented", f"there is no outcome {unknown[0]!r}")
    try:
        filters = compile_filter_set(
            asked.filter,
            receiver=link.peer.container_id,
            log=declared.kind == LOG,
            now_ms=int(now * 1000),
            limits=limits,
        )
    except InvalidFilter as error:
        return Error.of(error)
    priority = _priority(link)
    if isinstance(priority, Error):
        return priority
    outcomes = tuple(asked.outcomes) or STANDARD_OUTCOMES
    capabilities = [declared.kind]
    if shared:
        capabilities += [SHARED, *([GLOBAL] if GLOBAL in asked.capabilities else [])]
    source = Source(
        address=address,
        durable=durable,
        expiry_policy=policy,
        timeout=timeout,
        dynamic=lifetime is not None,
        dynamic_node_properties=_made(declared, lifetime),
        distribution_mode=Symbol(mode),
        # Only the filters in place. Unknown ones are absent from the answer, so that the receiver
        # sees that it has to filter itself (§3.5.3).
        filter=filters.in_place or None,
        default_outcome=default,
        outcomes=outcomes,
        capabilities=tuple(capabilities),
    )
    guarantee = _guarantee(link, source, shared=shared)
    if isinstance(guarantee, Error):
        return guarantee
    settle_mode, properties = guarantee
    return Terms(
        source=source,
        target=link.target if isinstance(link.target, Target) else None,
        snd_settle_mode=settle_mode,
        copies=copies,
        default_outcome=default,
        outcomes=_allowed(outcomes),
        filters=filters if filters.selective else None,
        position=filters.position,
        keeps=keeps,
        shared=shared,
        properties=properties,
        priority=priority,
        exclusive=link.properties.get(EXCLUSIVE) is True,
    )


def restored_terms(
    source: Source,
    snd_settle_mode: int,
    container_id: str,
    *,
    priority: int,
    exclusive: bool,
    now: float,
    limits: Limits,
) -> Terms:
    """Return the terms of a restored link whose attach was answered with *source*.

    Raises:
        InvalidFilter: A filter is no longer supported.
    """
    filters = compile_filter_set(
        source.filter, receiver=container_id, now_ms=int(now * 1000), limits=limits
    )
    return Terms(
        source=source,
        target=None,
        snd_settle_mode=snd_settle_mode,
        copies=source.distribution_mode == COPY,
        # As it was answered, with an outcome.
        default_outcome=cast("Outcome", source.default_outcome),
        outcomes=_allowed(source.outcomes),
        filters=filters if filters.selective else None,
        keeps=True,
        shared=SHARED in source.capabilities,
        priority=priority,
        exclusive=exclusive,
    )


def _allowed(outcomes: tuple[str, ...]) -> tuple[type, ...] | None:
    """Return the types of *outcomes*, None for all."""
    if len(set(outcomes)) >= len(_OUTCOMES):
        return None
    return tuple(_OUTCOMES[outcome] for outcome in outcomes)


def _priority(link: Link) -> int | Error:
    found = 0
    for name in PRIORITIES:
        value = link.properties.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
            return Error(
                "amqp:invalid-field",
                f"the link property {name} is a number of 32 bits, not {value!r:.50}",
            )
        found = int(value)
    return found


def _modes(declared: Declaration) -> tuple[str, ...]:
    if declared.kind != QUEUE or (isinstance(declared, Queue) and declared.browse_only):
        return (COPY,)
    return (MOVE, COPY)


def _made(declared: Declaration, lifetime: Lifetime | None) -> dict[object, object] | None:
    """Return the actual properties of a dynamic node (§3.5.9), None for other nodes."""
    if lifetime is None:
        return None
    modes = Array([Symbol(mode) for mode in _modes(declared)], Symbol)
    return {_LIFETIME: lifetime, _DIST_MODES: modes}


_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def dynamic_declaration(
    link: Link, terminus: Source | Target
) -> tuple[Declaration, Lifetime] | Error:
    """Return the dynamic node to create for *terminus*, and its lifetime (§3.5.3, §3.5.4).

    The address contains the container-id and the name of the link, and ends in 128 random bits, so
    that others cannot guess it.
    """
    if terminus.address is not None:
        return Error("amqp:invalid-field", "a dynamic terminus brings no address")
    asked = terminus.dynamic_node_properties or {}
    lifetime = asked.get(_LIFETIME, DeleteOnClose())
    if isinstance(lifetime, Described):
        try:
            lifetime = from_described(lifetime, *_LIFETIMES)
        except DecodeError:
            lifetime = None
    if not isinstance(lifetime, _LIFETIMES):
        return Error("amqp:not-implemented", "there is no such lifetime-policy")
    parts = (_UNSAFE.sub("-", text)[:64] or "-" for text in (link.peer.container_id, link.name))
    name = "/".join(("dynamic", *parts, secrets.token_urlsafe(16)))
    wanted = {_KINDS[capability] for capability in terminus.capabilities if capability in _KINDS}
    if len(wanted) > 1:
        return Error("amqp:invalid-field", "a node is of one kind only")
    modes = asked.get(_DIST_MODES, ())
    needed = {
        str(mode) for mode in (modes if isinstance(modes, Array | list | tuple) else (modes,))
    }
    kind = wanted.pop() if wanted else TOPIC if needed == {COPY} else QUEUE
    declared = declaration(kind, name)
    if not needed.issubset(_modes(declared)):
        return Error(
            "amqp:not-implemented",
            f"a {kind} has no distribution-modes beside {', '.join(_modes(declared))}",
        )
    return declared, lifetime
