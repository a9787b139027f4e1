"""Options of entities as their state machines need them, and their sizes for operators."""

from __future__ import annotations

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from .declarations import Queue, Status, Subscription, Topic
from .timespans import seconds_of


class Options(Struct, frozen=True, kw_only=True):
    """Options of an entity, in seconds and bytes; ``inf`` and 0 deliveries stand for no limit."""

    lock_s: float = 60.0
    deliveries_max: int = 10
    ttl_s: float = inf
    dead_letters_expired: bool = False
    sessions: bool = False
    partitioned: bool = False
    bytes_max: float = 1024 * 1024 * 1024
    idle_s: float = inf
    #: Time for which message-ids are remembered, 0 to detect no duplicates.
    duplicates_s: float = 0.0
    status: Status = "Active"
    #: Bytes of one message, None for the limit of the namespace.
    message_bytes_max: int | None = None

    @classmethod
    def of(cls, declared: Queue | Topic | Subscription) -> Options:
        """Return the options of a queue, topic or subscription."""
        own = cls(
            ttl_s=seconds_of(declared.default_message_time_to_live),
            idle_s=seconds_of(declared.auto_delete_on_idle),
            status=declared.status,
        )
        if not isinstance(declared, Subscription):
            window_s = seconds_of(declared.duplicate_detection_history_time_window)
            kilobytes = declared.max_message_size_in_kilobytes
            own = replace(
                own,
                message_bytes_max=None if kilobytes is None else kilobytes * 1024,
                partitioned=declared.enable_partitioning,
                bytes_max=declared.max_size_in_megabytes * 1024 * 1024,
                duplicates_s=window_s if declared.requires_duplicate_detection else 0.0,
            )
        if isinstance(declared, Topic):
            return own
        return replace(
            own,
            lock_s=seconds_of(declared.lock_duration),
            deliveries_max=declared.max_delivery_count,
            dead_letters_expired=declared.dead_lettering_on_message_expiration,
            sessions=declared.requires_session,
        )

    def for_sub_queue(self) -> Options:
        """Return the options of a sub-queue: no time to live, no limit of deliveries, no sessions."""
        return Options(lock_s=self.lock_s, bytes_max=inf, status=self.status)


class Sizes(Struct, frozen=True, kw_only=True):
    """Numbers of messages by state, locked ones included, and the bytes of all with those of the sub-queues."""

    active: int
    deferred: int
    scheduled: int
    dead_letters: int
    transfer_dead_letters: int
    bytes: int
