"""Declarations of nodes: their options, and the passages of messages that these permit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from ..addresses import EXCHANGES, LEAVING
from ..annotations import number_annotation
from ..limits import DEFAULT_LIMITS, check_seconds
from ..security.access import Passage, Rights
from ..timetables import Cron
from .expiry import DELETED, MAX_DELIVERIES, REASONS
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
SCHEDULE: Final = "schedule"


class Declaration(Struct, frozen=True, repr_omit_defaults=True):
    """Declaration of a node. Two declarations of one name must be equal."""

    name: str

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= NAME_MAX:
            raise ValueError(f"a node's name has 1 to {NAME_MAX} characters, not {self.name!r:.50}")

    @property
    def kind(self) -> str:
        """Kind of the node: ``"queue"``, ``"topic"``, ``"log"`` or ``"schedule"``."""
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
        number_header: Name under which each message has its number in the queue, counted from 1 in the order of
            arrival: clients of 0-9-1 and 0-10 get a header of that name, those of 1.0 the annotation
            ``x-opt-queue-number-NAME``. A queue in the store counts on after a restart.
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
    number_header: str | None = None

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
        if self.number_header is not None:
            number_annotation(self.number_header)
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


class Schedule(Declaration, frozen=True, kw_only=True):
    """Node that sends a message to another node at certain times, once for the broker.

    With a store, the time of the next message is stored together with each message: none is sent twice, even
    after ``kill -9`` or if the clock is put back. Peers neither send to it nor receive from it.

    Args:
        name: Its name.
        to: Address of the node that gets the messages. Who declares the schedule at ``$management`` needs the right
            to send there.
        cron: Times, as five fields of cron, such as ``"30 2 * * *"``; needs ``pip install 'amqp-rt[cron]'``. Times that
            daylight saving time skips are due when it begins, and those that it repeats are due once, by the rules of
            Debian's cron.
        tz: Time zone of ``cron``, such as ``"Europe/Berlin"``.
        every_s: Seconds between messages, in place of ``cron``. The first one is due after that time.
        payload: Body of the messages: a text, a number, a bool, None, octets, or lists and maps of these.
        catch_up: Treatment of times at which the broker did not run, or ``to`` took no message: ``"one"`` sends one message
            for all of them, ``"all"`` one for each, at most ``Limits.schedule_catch_up_max``, and ``"none"`` leaves out those that
            are more than a minute late.
        durable: Whether the messages are durable, where there is a store.
    """

    to: str
    cron: str | None = None
    tz: str = "UTC"
    every_s: float | None = None
    payload: Any = None
    catch_up: Literal["one", "none", "all"] = "one"
    durable: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.to) <= NAME_MAX or self.to == self.name:
            raise ValueError(f"to is the address of another node, not {self.to!r:.50}")
        if (self.cron is None) == (self.every_s is None):
            raise ValueError("a schedule has either cron or every_s")
        if self.cron is not None:
            Cron(self.cron, self.tz)
        _at_least("every_s", self.every_s, 0.001)
        if self.catch_up not in ("one", "none", "all"):
            raise ValueError(f"catch_up is one, none or all, not {self.catch_up!r:.50}")
        _check_payload(self.payload)

    @property
    def kind(self) -> str:
        return SCHEDULE

    def same_times(self, other: Schedule) -> bool:
        """Return whether *other* is due at the same times."""
        return (self.cron, self.tz, self.every_s) == (other.cron, other.tz, other.every_s)


def _check_payload(value: object, depth: int = 0) -> None:
    """Check that a store and a message keep *value*, a payload or a part of one.

    Raises:
        ValueError: They do not.
    """
    parts: Iterable[object] = ()
    if type(value) is list and depth < _PAYLOAD_DEPTH_MAX:
        parts = value
    elif type(value) is dict and depth < _PAYLOAD_DEPTH_MAX:
        parts = (*value, *value.values())
    elif type(value) not in (str, int, float, bool, bytes, type(None)):
        raise ValueError(
            "payload is made of texts, numbers, octets, lists and maps, at most "
            f"{_PAYLOAD_DEPTH_MAX} deep; not of {value!r:.50}"
        )
    elif type(value) is int and not -NUMBER_MAX <= value <= NUMBER_MAX:
        raise ValueError(f"payload: {value} has more than 64 bits")
    for each in parts:
        _check_payload(each, depth + 1)


#: Depth of lists and maps in the payload of a schedule.
_PAYLOAD_DEPTH_MAX: Final = 16

#: Declarations by kind.
KINDS: Final[dict[str, type[Declaration]]] = {
    QUEUE: Queue,
    TOPIC: Topic,
    LOG: Log,
    SCHEDULE: Schedule,
}

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
        ValueError: *kind* is unknown, or needs options.
    """
    if kind not in KINDS or kind == SCHEDULE:
        raise ValueError(f"a node without options is a queue, a topic or a log, not {kind!r:.50}")
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
    if isinstance(declared, Schedule) and declared != before:
        # With another payload or other times it would send what its declarer may not.
        found.append(Passage(declared.name, declared.to, Rights.MANAGE))
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
        raise ValueError(f"a node is a queue, a topic, a log or a schedule, not {kind!r:.50}")
    known = KINDS[kind].__struct_fields__
    for key in options:
        if key not in known:
            raise ValueError(f"a {kind} has no option {key!r:.50}{similar(key, known)}")
    try:
        return msgspec.convert(options, KINDS[kind], strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
