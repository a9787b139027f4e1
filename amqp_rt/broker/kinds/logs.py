"""Nodes that are logs, and those for one partition of a log."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Self

import msgspec
import trio

from ...batches import RECORD_BATCHES
from ...errors import AmqpError
from ...fronts.base import LinkConnection, SendingLink
from ...limits import Limits
from ...outcomes import Error
from ...stores.base import SEQUENCE_MAX
from ...values import Symbol
from ..durable import facts
from ..durable.facts import FactKind
from ..durable.journal import Journal
from ..durable.units import Unit
from ..log.appending import Entrance
from ..log.key_hashes import KEY_HASHES
from ..log.log import MessageLog
from ..log.reading import LogReader
from ..nodes import LOG, NAME_MAX, Declaration, Log
from ..producers import Intake, IntakeLedger, Place
from ..statistics import EraStats, LogStats, PartitionStats
from ..terms import Terms
from .base import Node, Space

_INCARNATION: Final = Symbol("x-opt-incarnation")
_WHOLE_LOG: Final = Error(
    "amqp:not-implemented", "epochs are published to a log, not to one of its partitions"
)


class LogNode(Node):
    """Node that keeps messages in the order of arrival, for any number of readers."""

    kind = LOG
    declaration = Log
    uses_headers = False
    capabilities = ()
    fact_kinds = (facts.INCARNATIONS, facts.CURSORS, facts.HOLDS, facts.ERAS)
    declared: Log
    held: MessageLog

    @classmethod
    def make(
        cls,
        space: Space,
        declared: Log,
        *,
        number: int,
        owner: LinkConnection | None,
        transient: bool,
        new: bool,
    ) -> Self:
        services = space.services
        log = MessageLog(
            services.memory,
            services.clock.wall,
            str(uuid.uuid4()),
            [number + index if number else 0 for index in range(declared.partitions)],
            services.log_storage if number else None,
            max_age_s=declared.max_age_s,
            max_bytes=declared.max_bytes,
            key_hash=KEY_HASHES[declared.key_hash],
            limits=services.limits,
        )
        log.address = declared.name
        log.on_unfinished = partial(services.turns.resume_later, log)
        place, ledger = _entrance(log)
        node = cls(
            space,
            declared,
            log,
            Intake(log),
            place,
            ledger,
            number=number,
            owner=owner,
            volatile=services.volatile or transient,
        )
        services.logs[log] = node
        if new and services.journal is not None:
            facts.INCARNATIONS.put(services.journal.loose, facts.key_of(number), log.incarnation)
            node._begin_era()
        return node

    @classmethod
    def check(cls, declared: Log, limits: Limits) -> None:
        if declared.partitions > limits.log_partitions_max:
            raise AmqpError(
                f"a log has at most {limits.log_partitions_max} partitions",
                condition="amqp:resource-limit-exceeded",
            )

    @classmethod
    def numbers(cls, declared: Log) -> int:
        return declared.partitions

    def can_redeclare(self, declared: Declaration) -> bool:
        """Return whether the partitions of all keys stay, since records are in them already."""
        return (
            isinstance(declared, Log)
            and self.declared.partitions == declared.partitions
            and self.declared.key_hash == declared.key_hash
        )

    def redeclare(self, declared: Log) -> None:
        super().redeclare(declared)
        self.held.keep(declared.max_age_s, declared.max_bytes)

    def seal(self) -> None:
        self.held.sealed = True

    # --- Restoring ---

    async def restore(self, journal: Journal) -> None:
        await self.held.restore()

    def restore_fact(self, kind: FactKind[Any], key: bytes, value: Any) -> None:
        log = self.held
        if kind is facts.INCARNATIONS:
            log.incarnation = value
        elif kind is facts.CURSORS:
            log.cursors[facts.name_of(key)] = value
        elif kind is facts.ERAS:
            log.eras = value
        else:
            log.holds[facts.name_of(key)] = value

    def restored(self) -> None:
        self._begin_era()

    def _begin_era(self) -> None:
        """Begin an era, and store it before the first record of the era."""
        log, journal = self.held, self.services.journal
        if self.number and log.storage is not None and journal is not None:
            log.begin_era(self.services.era)
            facts.ERAS.put(journal.loose, facts.key_of(self.number), log.eras)

    # --- State ---

    @property
    def is_sealed(self) -> bool:
        return self.held.sealed

    def part(self, address: str, number: int) -> Node:
        return PartitionNode(self, address, number)

    # --- Attaching ---

    def properties(self, terms: Terms) -> dict[object, object]:
        return {_INCARNATION: self.held.incarnation}

    def sends_batches(self, link: SendingLink) -> bool:
        return RECORD_BATCHES in link.desired_capabilities

    def open_intake(self) -> tuple[Place, IntakeLedger | None]:
        return _entrance(self.held)

    def consume(self, terms: Terms, *, batches: bool = False) -> LogReader:
        return self.held.subscribe(
            self._partitions(),
            terms.position,
            settled=terms.settled,
            filters=terms.filters,
            batches=batches,
        )

    def _partitions(self) -> range:
        """Return the partitions that links of this node read."""
        return range(len(self.held.partitions))

    # --- The end ---

    def delete_stored(self, unit: Unit) -> None:
        log, number = self.held, self.number
        for kind in (facts.NODES, facts.INCARNATIONS, facts.ERAS):
            kind.remove(unit, facts.key_of(number))
        for name in log.cursors:
            facts.CURSORS.remove(unit, facts.name_key(number, name))
        for name in log.holds:
            facts.HOLDS.remove(unit, facts.name_key(number, name))
        for partition in log.partitions:
            unit.clear(partition.number)

    def close(self, name: str) -> bool:
        del self.services.logs[self.held]
        return super().close(name)

    def stop(self, failure: AmqpError) -> None:
        super().stop(failure)
        self.held.failed = True

    def sweep(self) -> None:
        """Apply the retention of a log in memory, and remove expired holds."""
        log, journal = self.held, self.services.journal
        log.sweep()
        for holder in log.holds.expire(log.wall()):
            if self.number and journal is not None:
                facts.HOLDS.remove(journal.loose, facts.name_key(self.number, holder))

    # --- Operators ---

    async def purge(self) -> int:
        """Drop the records without a hold, in whole chunks; return how many there were.

        Later records continue the offsets. Cancellation may leave the records dropped or not.

        Raises:
            AmqpError: The store refuses the change.
        """
        return await self.held.purge()

    def kind_stats(self, *, alone: bool = False) -> LogStats | None:
        return self.log_stats() if alone else None

    def log_stats(self) -> LogStats:
        """Return the statistics of the log."""
        log = self.held
        return LogStats(
            name=self.declared.name,
            incarnation=log.incarnation,
            partitions=[
                PartitionStats(
                    partition=partition.index,
                    first=partition.first,
                    next=partition.next,
                    bytes=partition.bytes,
                    last_enqueued_ms=None if partition.last_ms < 0 else partition.last_ms,
                )
                for partition in log.partitions
            ],
            groups=sorted(log.cursors),
            eras=[EraStats(id=era.id, starts=era.starts) for era in log.eras],
        )

    def cursor(self, group: str) -> dict[int, int]:
        """Return the cursor of *group*: an offset for each partition that it has set."""
        return dict(self.held.cursors.get(group, {}))

    async def set_cursor(
        self, group: str, offsets: Mapping[int, int], *, incarnation: str | None = None
    ) -> None:
        """Set the cursor of *group* in the partitions of *offsets*; without any, delete it.

        With a store, the cursor is stored when this returns.

        Args:
            group: Name of the group.
            offsets: Partition → offset of the next record to read.
            incarnation: Expected incarnation of the log; None for any.

        Raises:
            AmqpError: There is no such partition, the log has another incarnation or was deleted in the
                meantime, it has too many groups, or the store refuses the change.
        """
        log = self.held
        async with log.noting:
            self._check_incarnation(incarnation)
            if group not in log.cursors and len(log.cursors) >= self.services.limits.log_groups_max:
                raise AmqpError(
                    f"{self.declared.name!r} has {len(log.cursors)} groups already",
                    condition="amqp:resource-limit-exceeded",
                )
            kept = self._checked(offsets)
            if kept:
                kept = {**log.cursors.get(group, {}), **kept}
            note = partial(log.cursors.put, group, kept)
            await self._store_fact(facts.CURSORS, group, kept or None, note)
            self._check_incarnation(incarnation)

    async def hold(
        self,
        holder: str,
        offsets: Mapping[int, int],
        for_s: float,
        *,
        incarnation: str | None = None,
    ) -> None:
        """Exempt the records from *offsets* on from retention for *for_s* seconds.

        The hold replaces an earlier one of *holder*; without offsets it is removed.

        Args:
            holder: Name of the holder.
            offsets: Partition → offset of the first record to hold.
            for_s: Duration in seconds.
            incarnation: Expected incarnation of the log; None for any.

        Raises:
            AmqpError: As for :meth:`set_cursor`, or the duration is too long, or there are too many
                holders.
        """
        log, limits = self.held, self.services.limits
        if not 0 <= for_s <= limits.log_hold_max_s:
            raise AmqpError(
                f"records are held for 0 to {limits.log_hold_max_s:g} seconds",
                condition="amqp:not-allowed",
            )
        _check_name(holder)
        async with log.noting:
            self._check_incarnation(incarnation)
            if holder not in log.holds and len(log.holds) >= limits.log_holds_max:
                raise AmqpError(
                    f"{self.declared.name!r} is held by {len(log.holds)} already",
                    condition="amqp:resource-limit-exceeded",
                )
            held = self._checked(offsets), self.services.clock.wall() + for_s
            before = log.holds.get(holder)
            # Set before it is stored, because a sweep could run in between.
            log.holds.put(holder, held)
            note = partial(log.holds.put, holder, held)
            try:
                await self._store_fact(facts.HOLDS, holder, held if held[0] else None, note)
            except AmqpError:
                log.holds.put(holder, before)
                raise
            self._check_incarnation(incarnation)

    def _check_incarnation(self, incarnation: str | None) -> None:
        """Check that the log has not been deleted in the meantime, and has the expected incarnation.

        Raises:
            AmqpError: It was deleted, or has another incarnation.
        """
        log, name = self.held, self.declared.name
        if log not in self.services.logs:
            raise AmqpError(f"{name!r} was deleted meanwhile", condition="amqp:resource-deleted")
        if incarnation is not None and incarnation != log.incarnation:
            raise AmqpError(
                f"{name!r} is another log now, {log.incarnation}",
                condition="amqp:precondition-failed",
            )

    def _checked(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """Return *offsets* with plain integers.

        Raises:
            AmqpError: A partition does not exist, or an offset is out of range.
        """
        for partition, offset in offsets.items():
            if not 0 <= partition < len(self.held.partitions) or not 0 <= offset <= SEQUENCE_MAX:
                raise AmqpError(
                    f"{self.declared.name!r} has no offset {offset} in a partition {partition}",
                    condition="amqp:invalid-field",
                )
        return {int(partition): int(offset) for partition, offset in offsets.items()}

    async def _store_fact(
        self, kind: FactKind[Any], name: str, value: Any, note: Callable[[], None]
    ) -> None:
        """Store the fact *name*, or delete it without a *value*, and call *note* then.

        *note* is not left to the caller, which may be cancelled while the fact is being written.
        """
        _check_name(name)
        journal, logs, log = self.services.journal, self.services.logs, self.held
        if journal is None or log.storage is None:
            await trio.lowlevel.checkpoint()
            note()
            return
        key = facts.name_key(self.number, name)

        def kept() -> None:
            if log in logs:
                note()
            elif value is not None:
                # The log was deleted in the meantime, when it did not have this fact yet.
                kind.remove(journal.loose, key)

        def fill(unit: Unit) -> None:
            if value is None:
                kind.remove(unit, key)
            else:
                kind.put(unit, key, value)
            unit.then(kept)

        await journal.write(fill)


class PartitionNode(LogNode):
    """One partition of a log, for links that attach to it.

    Args:
        log: The log.
        address: Address of the partition.
        partition: Number of the partition.

    Raises:
        AmqpError: There is no such partition.
    """

    def __init__(self, log: LogNode, address: str, partition: int) -> None:
        if partition >= len(log.held.partitions):
            raise AmqpError(
                f"{log.declared.name!r} has the partitions 0 to {len(log.held.partitions) - 1}",
                condition="amqp:not-found",
            )
        self.partition = partition
        place, ledger = _entrance(log.held, partition)
        super().__init__(
            log.space,
            msgspec.structs.replace(log.declared, name=address),
            log.held,
            log.intake,
            place,
            ledger,
            number=log.number,
            owner=log.owner,
            volatile=log.inlet.volatile,
        )
        # The log and its partitions share their termini.
        self.termini = log.termini

    @property
    def epochs_error(self) -> Error:
        return _WHOLE_LOG

    def open_intake(self) -> tuple[Place, IntakeLedger | None]:
        return _entrance(self.held, self.partition)

    def _partitions(self) -> range:
        return range(self.partition, self.partition + 1)


def _entrance(log: MessageLog, partition: int | None = None) -> tuple[Entrance, Entrance | None]:
    """Return the place for messages of one link, and the ledger, which is the same object."""
    entrance = Entrance(log, partition)
    return entrance, None if log.storage is None else entrance


def _check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_MAX:
        raise AmqpError(f"a name has 1 to {NAME_MAX} characters", condition="amqp:not-allowed")
