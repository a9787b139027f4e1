"""Limits that only the service has, for a namespace that is as strict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Any, Final

from msgspec import Struct

from .atom import POLICIES_MAX
from .declarations import Hub


class Quotas(Struct, frozen=True, kw_only=True):
    """Limits of a namespace; ``inf`` and None stand for none."""

    #: Octets of a message or batch where the entity sets no limit; None for the limit of the broker.
    message_bytes: int | None = None
    #: Partitions of an event hub, and its consumer groups besides ``$Default``.
    partitions: float = inf
    consumer_groups: float = inf
    #: Open connections of AMQP to the namespace.
    connections: int | None = None
    #: Links that receive from one queue, or from all subscriptions of a topic together, their sub-queues included.
    receivers: float = inf
    #: Shared access policies of one entity, and of the namespace.
    keys: float = inf
    #: Shortest and longest time of each option, in seconds.
    times: dict[str, tuple[float, float]] = {}

    def check(self, declared: Any) -> None:
        """Check the options of a declaration.

        Raises:
            ValueError: One is out of its range.
        """
        if isinstance(declared, Hub):
            for option, count, bound in (
                ("partitions", declared.partitions, self.partitions),
                ("consumer_groups", len(declared.consumer_groups), self.consumer_groups),
            ):
                if count > bound:
                    raise ValueError(
                        f"hub {declared.name!r:.80}: there are {count} {option}, at most {bound:g}"
                    )
        self.check_keys(
            f"{type(declared).__name__.lower()} {getattr(declared, 'name', '')!r:.80}",
            getattr(declared, "keys", {}),
        )
        for option, (least, most) in self.times.items():
            value = getattr(declared, option, None)
            if value is not None and not least <= value <= most:
                raise ValueError(
                    f"{type(declared).__name__.lower()} {declared.name!r:.80}: {option} is {value:g} s,"
                    f" not {least:g} to {most:g}"
                )

    def check_keys(self, owner: str, keys: Collection[str]) -> None:
        """Check the number of shared access policies of *owner*.

        Raises:
            ValueError: There are too many.
        """
        if len(keys) > self.keys:
            raise ValueError(
                f"{owner} has {len(keys)} shared access policies, at most {self.keys:g}"
            )


UNLIMITED: Final = Quotas()
#: Quotas of the standard tier.
QUOTAS: Final = Quotas(
    message_bytes=256 * 1024,
    connections=5_000,
    receivers=5_000,
    keys=POLICIES_MAX,
    partitions=32,
    consumer_groups=20,
    times={
        "lock_duration": (5, 300),
        "duplicate_detection_history_time_window": (20, 7 * 86_400),
        "auto_delete_on_idle": (300, inf),
        "default_message_time_to_live": (1, inf),
        "retention": (3_600, 7 * 86_400),
    },
)
#: Limits of the broker as the service has them: messages and outcomes of a transaction, and its seconds.
SERVICE_LIMITS: Final[Mapping[str, Any]] = {"transaction_work_max": 100, "transaction_s": 120.0}
