"""Logs as their brokers describe them, and holds on their records."""

from __future__ import annotations

import logging

from msgspec import Struct

from amqp_rt.errors import AmqpError

from . import connections
from .dialects import dialect_of
from .endpoints import Endpoint
from .options import Options

_log = logging.getLogger("amqp_rt_spark")


class Part(Struct, frozen=True):
    """Bounds of a partition: its oldest offset, the next one, and the bytes in between."""

    first: int
    next: int
    bytes: int

    @property
    def mean(self) -> int:
        """Mean bytes of a record."""
        return self.bytes // max(self.next - self.first, 1)


class LogState(Struct, frozen=True):
    """Description of a log by its broker."""

    incarnation: str
    parts: dict[int, Part]
    #: Id of each era, and its first offset in each partition; the latest era last.
    eras: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def era(self, number: int, offset: int) -> str:
        """Return the era of the record before *offset* in partition *number*; empty if unknown."""
        for id_, starts in reversed(self.eras):
            if starts[number] < offset:
                return id_
        return ""


def log_state(options: Options, address: str) -> LogState:
    """Query the state of the log *address*.

    Raises:
        AmqpError: The node does not exist.
        ValueError: The node is not a log.
    """
    dialect = dialect_of(options)
    node, (endpoint, address) = address, options.place(address)
    if dialect is not None:
        incarnation, ends = connections.retried(
            endpoint, lambda there: dialect.state(there, address)
        )
        parts = {number: Part(first, after, 0) for number, (first, after) in ends.items()}
        return LogState(incarnation, parts)
    found = connections.call(endpoint, address, "READ")
    if found["kind"] != "log":
        raise ValueError(
            f"{node!r} is a {found['kind']}, not a log: stream a queue with mode=lease or mode=spool, or read its "
            "waiting messages with a batch"
        )
    return LogState(
        str(found["incarnation"]),
        {
            int(part["partition"]): Part(int(part["first"]), int(part["next"]), int(part["bytes"]))
            for part in found["partitions"]
        },
        tuple(
            (str(era["id"]), tuple(int(start) for start in era["starts"]))
            for era in found.get("eras", ())
        ),
    )


def release_hold(endpoint: Endpoint, address: str, holder: str) -> None:
    """Release the hold of *holder* on the log *address* for retention, if there is one."""
    try:
        connections.call(endpoint, address, "HOLD", {}, holder=holder, seconds=0)
    except AmqpError as error:
        # The hold also ends after its time.
        _log.warning("the hold of %r on %s is not released: %s", holder, address, error)
