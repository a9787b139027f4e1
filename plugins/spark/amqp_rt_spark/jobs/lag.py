"""``lag`` and ``settle``: compare a checkpoint with the broker's records.

The broker learns of a batch when the query requests the next one. If the query ended before that, the broker
still keeps messages that are written; ``settle`` reports them in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from amqp_rt.errors import AmqpError

from .. import connections
from ..endpoints import Endpoint
from ..leasing import leased_places
from ..offsets import positions_of
from .checkpoints import Checkpoint, read_checkpoint
from .conf import JobConf
from .report import Report, Table, Text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Lag(JobConf, frozen=True, kw_only=True):
    """Settings of the job ``lag``."""

    checkpoint: Annotated[str, Meta(description="The folder of the query's checkpoint.")]
    group: Annotated[
        str, Meta(description="Group of the query, whose cursor at the broker is shown too.")
    ] = ""
    max_lag: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="End with 3 if the query is more messages behind than this: for alarms."),
    ] = None


class Settle(JobConf, frozen=True, kw_only=True):
    """Settings of the job ``settle``."""

    checkpoint: Annotated[str, Meta(description="The folder of the query's checkpoint.")]
    group: Annotated[str, Meta(description="The query's group at the broker.")]
    dry_run: Annotated[bool, Meta(description="Show the messages to settle, and settle none.")] = (
        False
    )


class Standing(Struct, frozen=True):
    """Progress at a node, or a partition of one, by checkpoint and broker; None if unknown.

    Attributes:
        done: First offset that is not written.
        begun: End of the batch that was planned last.
        settled: First offset that is not settled at the broker.
        end: Offset that the next message gets.
        trouble: Mismatch between the checkpoint and the broker; empty if there is none.
        incarnation: Incarnation of the log, or id of the lease.
    """

    address: str
    partition: int | None
    done: int
    begun: int
    settled: int | None
    end: int | None
    trouble: str = ""
    incarnation: str = ""

    @property
    def behind(self) -> int | None:
        """Messages that exist and are not written."""
        return None if self.end is None else max(self.end - self.done, 0)


def lag(spark: SparkSession | None, conf: Lag) -> Report:
    """Report how far a query is behind, by its checkpoint and by the broker.

    A checkpoint on this machine is read without *spark*.

    Raises:
        ValueError: There is no checkpoint, or it is one of another source.
        AmqpError: The broker cannot be queried.
    """
    checkpoint = read_checkpoint(conf.checkpoint, spark)
    standings = standings_of(checkpoint, conf.endpoint, conf.group)
    behind = sum(each.behind or 0 for each in standings)
    troubles = [each.trouble for each in standings if each.trouble]
    late = conf.max_lag is not None and behind > conf.max_lag
    table = Table(
        "position",
        ["address", "partition", "written", "begun", "settled", "end", "behind"],
        [
            [
                *(each.address, each.partition, each.done, each.begun),
                *(each.settled, each.end, each.behind),
            ]
            for each in standings
        ],
        note=f"{checkpoint_said(checkpoint)}. Offsets are the first ones that are not.",
    )
    return Report(
        title=f"lag: {behind} behind" if standings else "lag: nothing has been begun",
        sections=[table, *(Text(each) for each in dict.fromkeys(troubles))],
        exit_code=3 if late or troubles else 0,
        facts={
            "query": checkpoint.query,
            "batch": checkpoint.committed,
            "behind": behind,
            "unsettled": sum(
                max(each.done - each.settled, 0) for each in standings if each.settled is not None
            ),
        },
    )


def settle(spark: SparkSession | None, conf: Settle) -> Report:
    """Settle the messages that a query has written: advance its cursors, accept its leased messages.

    Positions never go back, and a running query is not disturbed. A checkpoint on this machine is read
    without *spark*.

    Raises:
        ValueError: There is no checkpoint, or it is one of another source.
        AmqpError: The broker cannot be queried.
    """
    checkpoint = read_checkpoint(conf.checkpoint, spark)
    standings = standings_of(checkpoint, conf.endpoint, conf.group)
    settled = settle_all(standings, conf.endpoint, conf.group, dry_run=conf.dry_run)
    troubles = [each.trouble for each in standings if each.trouble]
    rows: list[list[Any]] = [
        [each.address, each.partition, each.settled, each.done, count]
        for each, count in zip(standings, settled, strict=True)
    ]
    verb = "would be settled" if conf.dry_run else "settled"
    table = Table(
        verb,
        ["address", "partition", "from", "to", "messages"],
        rows,
        note=f"{checkpoint_said(checkpoint)}.",
    )
    return Report(
        title=f"settle: {sum(settled)} {verb}",
        sections=[table, *(Text(each) for each in dict.fromkeys(troubles))],
        exit_code=3 if troubles else 0,
        facts={"query": checkpoint.query, "batch": checkpoint.committed, "settled": sum(settled)},
    )


def checkpoint_said(checkpoint: Checkpoint) -> str:
    """Return the progress of *checkpoint* as a sentence."""
    if checkpoint.planned is None:
        return f"Query {checkpoint.query}: no batch has been begun"
    if checkpoint.committed is None:
        return f"Query {checkpoint.query}: batch {checkpoint.planned} has been begun, none is done"
    if checkpoint.planned > checkpoint.committed:
        return (
            f"Query {checkpoint.query}: batch {checkpoint.committed} is done, and "
            f"{checkpoint.planned} has been begun"
        )
    return f"Query {checkpoint.query}: batch {checkpoint.committed} is done"


def standings_of(checkpoint: Checkpoint, endpoint: Endpoint, group: str) -> list[Standing]:
    """Return the progress of a query at each of its nodes, in order.

    Raises:
        ValueError: The query reads no source of this package.
        AmqpError: The broker cannot be queried.
    """
    found: list[Standing] = []
    try:
        for number, begun in enumerate(checkpoint.begun):
            done = checkpoint.done[number] if number < len(checkpoint.done) else {}
            if "leases" in begun:
                found += _leased(begun, done, endpoint, group)
            elif begun:
                found += _logged(begun, done, endpoint, group)
    finally:
        # The caller continues without serving these connections, so the broker's heartbeats would go unanswered.
        _forget(endpoint, found)
    if checkpoint.begun and not found:
        raise ValueError(
            "the checkpoint is one of a query that reads nothing from a broker of ours"
        )
    return sorted(found, key=lambda each: (each.address, each.partition or 0))


def _logged(
    begun: dict[str, Any], done: dict[str, Any], endpoint: Endpoint, group: str
) -> list[Standing]:
    found = []
    written = positions_of(done) if done else {}
    for address, (incarnation, parts) in positions_of(begun).items():
        state = _asked(endpoint, address, "READ")
        trouble = ""
        if state is None:
            trouble = f"{address!r} is not there any more"
        elif state.get("kind") != "log" or str(state.get("incarnation")) != incarnation:
            trouble = f"{address!r} was deleted and made again since the checkpoint was begun"
        ends, cursor = {}, {}
        if not trouble and state is not None:
            ends = {int(part["partition"]): int(part["next"]) for part in state["partitions"]}
            if group:
                there, name = _place(endpoint, address)
                given = connections.call(there, name, "CURSOR", group=group)
                cursor = {int(part): int(offset) for part, offset in given.items()}
        before = written.get(address, (incarnation, {}))[1]
        for part, end in sorted(parts.items()):
            found.append(
                Standing(
                    *(address, part, before.get(part, 0), end),
                    *(cursor.get(part), ends.get(part), trouble, incarnation),
                )
            )
    return found


def _leased(
    begun: dict[str, Any], done: dict[str, Any], endpoint: Endpoint, group: str
) -> list[Standing]:
    found = []
    written = leased_places(done) if done else {}
    for address, (id_, end) in leased_places(begun).items():
        known, before = written.get(address, (id_, 0))
        if not group:
            trouble = f"{address!r} is leased: name the group to ask the broker for it"
            found.append(Standing(address, None, before, end, None, None, trouble))
            continue
        state = _asked(endpoint, address, "LEASE-STATE", group=group)
        if state is None:
            trouble = f"{address!r} has no lease of the group {group!r}"
            found.append(Standing(address, None, before, end, None, None, trouble))
            continue
        first, last = int(state["first"]), int(state["next"])
        trouble = ""
        if str(state["id"]) != id_:
            trouble = (
                f"{address!r}: the lease of {group!r} is another one than that of the checkpoint: it is not "
                "that query's group, or the lease was released or has ended"
            )
        elif known != id_:
            # The committed batch belongs to an earlier lease.
            before = 0
        total = last + int(state["available"])
        found.append(Standing(address, None, max(before, 0), end, first, total, trouble, id_))
    return found


def _place(endpoint: Endpoint, address: str) -> tuple[Endpoint, str]:
    """Return endpoint and name of a node; a query of several brokers names it by its URL."""
    scheme, colon, rest = address.partition("://")
    host, _, name = rest.partition("/")
    return (replace(endpoint, url=f"{scheme}://{host}"), name) if colon else (endpoint, address)


def _forget(endpoint: Endpoint, standings: list[Standing]) -> None:
    """Drop the connections to the brokers of *standings*."""
    for there in {endpoint, *(_place(endpoint, each.address)[0] for each in standings)}:
        connections.forget(there)


def _asked(endpoint: Endpoint, address: str, operation: str, **given: Any) -> dict[str, Any] | None:
    """Call the broker and return its answer, None if the node or the group is unknown."""
    there, name = _place(endpoint, address)
    try:
        answer: dict[str, Any] = connections.call(there, name, operation, **given)
        return answer
    except AmqpError as error:
        if error.condition != "amqp:not-found":
            raise
        return None


def settle_all(
    standings: list[Standing], endpoint: Endpoint, group: str, *, dry_run: bool = False
) -> list[int]:
    """Settle the written messages of *standings* at the broker; return how many were unsettled for each.

    Raises:
        AmqpError: The broker refuses.
    """
    counts = [
        0
        if each.trouble or (each.partition is None and each.settled is None)
        else max(each.done - (each.settled or 0), 0)
        for each in standings
    ]
    if dry_run:
        return counts
    cursors: dict[tuple[str, str], dict[int, int]] = {}
    try:
        for each, count in zip(standings, counts, strict=True):
            if not count:
                continue
            if each.partition is not None:
                key = each.address, each.incarnation
                cursors.setdefault(key, {})[each.partition] = each.done
                continue
            # Use the current generation: opening the lease would fence off a running query.
            given = {"group": group, "id": each.incarnation}
            state = connections.call(endpoint, each.address, "LEASE-STATE", **given)
            connections.call(
                endpoint,
                each.address,
                "ACCEPT-LEASE",
                **given,
                generation=int(state["generation"]),
                to=each.done,
            )
        for (address, incarnation), offsets in cursors.items():
            given = {"group": group, "incarnation": incarnation}
            there, name = _place(endpoint, address)
            connections.call(there, name, "SET-CURSOR", offsets, **given)
    finally:
        _forget(endpoint, standings)
    return counts
