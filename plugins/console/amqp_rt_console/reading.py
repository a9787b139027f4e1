"""Messages of queues and records of logs, read for a session and left where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from amqp_rt.values import Described, Symbol

from .messages import Shown, shown
from .problems import Problem
from .sessions import WebSession

#: Messages in one answer.
COUNT_MAX: Final = 100
#: Seconds for the records of one answer.
_WITHIN_S: Final = 10.0
JOURNAL: Final = "$journal"


async def peek(
    session: WebSession, node: str, count: int, show: Callable[[dict[str, Any]], Shown]
) -> list[Shown]:
    """Return what *show* makes of the first messages of the queue *node*, or of the first records of a log.

    Raises:
        AmqpError: The peer may not, or there is no such node.
    """
    found = await session.management.read("amqp_rt.node", node)
    if found.get("kind") == "log":
        first = min((int(each["first"]) for each in found["partitions"]), default=0)
        return await _records(session, node, first, min(count, _left(found, first)), show)
    reply = await session.management.request("PEEK", type="amqp_rt.node", name=node, count=count)
    return [await shown(bytes(each), show) for each in reply.body]


async def records(
    session: WebSession,
    node: str,
    after: int | None,
    count: int,
    show: Callable[[dict[str, Any]], Shown],
) -> tuple[list[Shown], int | None]:
    """Return what *show* makes of records of the log *node*, which has one partition, and the offset to go on with.

    Args:
        session: The session.
        node: Name of the log.
        after: Offset of the first record; None for the first that there is.
        count: How many records at most.
        show: Is called with each as the JSON API has it, maybe in a thread.

    Raises:
        AmqpError: The peer may not, or there is no such log.
        Problem: The node is no log with one partition.
    """
    found = await session.management.read("amqp_rt.node", node)
    partitions = found.get("partitions")
    if partitions is None or len(partitions) != 1:
        raise Problem(409, f"{node!r:.100} is no log with one partition", "amqp:not-allowed")
    first = max(int(partitions[0]["first"]), after or 0)
    left = _left(found, first)
    rows = await _records(session, node, first, min(count, left), show)
    return rows, first + len(rows) if left > len(rows) else None


def _left(log: Mapping[str, Any], first: int) -> int:
    """Return the number of records of *log* from the offset *first* on, in all partitions."""
    return sum(
        max(0, int(each["next"]) - max(first, int(each["first"]))) for each in log["partitions"]
    )


async def _records(
    session: WebSession,
    node: str,
    first: int,
    count: int,
    show: Callable[[dict[str, Any]], Shown],
) -> list[Shown]:
    if count <= 0:
        return []
    begin: dict[object, object] = {
        Symbol("begin"): Described(Symbol("rabbitmq:stream-offset-spec"), first)
    }
    rows: list[Shown] = []
    with trio.move_on_after(_WITHIN_S):
        async with session.connection.receiver(node, filter=begin, credit=count) as records_:
            while len(rows) < count:
                rows.append(await shown((await records_.receive()).payload, show))
    return rows
