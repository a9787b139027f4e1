"""Statistics of nodes, as operators and management read them."""

from __future__ import annotations

from msgspec import Struct


class NodeStats(Struct, frozen=True, kw_only=True):
    """Statistics of a node; of a topic, all but ``enqueued`` are summed over its subscribers."""

    name: str
    kind: str
    dynamic: bool
    #: Messages that wait, and those delivered and not settled; ``bytes`` has the payloads of both.
    available: int
    acquired: int
    #: Messages not due yet; ``bytes`` includes them.
    delayed: int
    #: Sum of the three: all messages that the node has.
    messages: int
    bytes: int
    consumers: int
    producers: int
    #: Counts since the node was created, or restored when the broker started.
    enqueued: int
    delivered: int
    accepted: int
    requeued: int
    dead_lettered: int
    expired: int
    dropped: int
    #: Why the node is out of service until the broker is restarted; None if it is in service.
    failure: str | None = None


class SubscriptionStats(Struct, frozen=True, kw_only=True):
    """Statistics of a topic's subscription."""

    #: Container-id of the subscriber, and the name of its link; of a shared subscription, the
    #: common part of the names of its links.
    container: str
    name: str
    #: Whether the subscription remains when its links are detached.
    kept: bool
    #: Messages that wait, and those delivered and not settled; ``bytes`` has the payloads of both.
    available: int
    acquired: int
    #: Messages not due yet; ``bytes`` includes them.
    delayed: int
    bytes: int
    #: Number of attached links.
    consumers: int


class PartitionStats(Struct, frozen=True, kw_only=True):
    """Statistics of a partition of a log."""

    partition: int
    #: Offset of the first record, and the offset that the next record gets.
    first: int
    next: int
    bytes: int
    #: Time of the last append in milliseconds since 1970; None if there was none.
    last_enqueued_ms: int | None


class EraStats(Struct, frozen=True, kw_only=True):
    """A start of the broker, with the offset of each partition's next record at that time."""

    id: str
    starts: list[int]


class LogStats(Struct, frozen=True, kw_only=True):
    """Statistics of a log."""

    name: str
    #: Id of this log. A later log of the same name has another one: its offsets mean other records.
    incarnation: str
    partitions: list[PartitionStats]
    #: Groups with a cursor.
    groups: list[str]
    #: Known starts of the broker after which records were appended, with their first offsets; none
    #: without a store. After a restore from a backup two records may have had the same offset, in
    #: different eras.
    eras: list[EraStats] = []


class ScheduleStats(Struct, frozen=True, kw_only=True):
    """Statistics of a schedule. Times are seconds since 1970-01-01 UTC."""

    name: str
    #: Messages sent since the broker started.
    sent: int
    #: When the next message is due; None if none will be.
    next_at: float | None
    #: When the last one was due; None before the first.
    last_at: float | None
    #: Why the destination took no message at the last attempt; None if it did.
    error: str | None = None
