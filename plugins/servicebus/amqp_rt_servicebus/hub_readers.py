"""Readers of the partitions of a hub, and owner levels, by which one reader takes the place of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self

from msgspec import Struct

from amqp_rt.broker.building import LogReader, Position
from amqp_rt.errors import AmqpError, LocalProtocolError
from amqp_rt.fronts.base import SendingLink
from amqp_rt.message import MESSAGE_FORMAT
from amqp_rt.outcomes import Error
from amqp_rt.values import Symbol

from .conditions import ARGUMENT_ERROR, ARGUMENT_OUT_OF_RANGE, NO_ROOM
from .hub_events import delivered_event

#: Link property of a reader's owner level, a long.
OWNER_LEVEL: Final = Symbol("com.microsoft:epoch")
#: Condition with which a reader is refused or detached because of another one with a higher level.
STOLEN: Final = "amqp:link:stolen"


class HubReader(LogReader):
    """Reader of one partition of a hub: the endpoint of a link that receives from it.

    ``delivery_annotations`` may be set, as for every reader of a log.
    """

    _fault: Callable[[str], Error | None]

    @classmethod
    def at(
        cls,
        log: Any,
        index: int,
        position: Position,
        *,
        settled: bool,
        fault: Callable[[str], Error | None],
    ) -> Self:
        """Return a new reader of partition *index* of *log*, from *position*.

        Raises:
            AmqpError: There will be no event with that number before others have come.
        """
        following = log.partitions[index].next
        if position.kind in ("offset", "sequence-number") and position.value > following:
            raise AmqpError(
                f"the start position {position.value} is invalid: the last sequence number of the"
                f" partition is {following - 1}; a checkpoint of another hub perhaps",
                condition=ARGUMENT_ERROR,
            )
        reader = cls(log, settled=settled)
        reader._fault = fault
        log.add_reader(reader, [index], position)
        return reader

    def give(self, link: SendingLink, partition: Any, offset: int, record: Any) -> bool:
        """Send *record* on *link*, with the annotations of the service and no others.

        Return False if the link cannot continue.
        """
        fault = self._fault("receive")
        if fault is not None:
            link.detach(fault)
            return False
        if record.message_format != MESSAGE_FORMAT:
            return super().give(link, partition, offset, record)
        annotations = self.delivery_annotations
        payload = delivered_event(
            record.payload,
            offset,
            record.time_ms,
            None if annotations is None else annotations(partition, offset),
        )
        try:
            link.send(payload, None, settled=self.settled)
        except LocalProtocolError as error:
            self._not_sent(link, error)
            return False
        self.log.counts.delivered += 1
        return True


class _Attached(Struct, frozen=True, eq=False):
    link: SendingLink
    #: Owner level; None without one.
    level: int | None


class ReaderGroup:
    """Readers of one partition in one consumer group.

    Args:
        readers_max: Readers without an owner level at the same time; None for no limit.
    """

    def __init__(self, readers_max: int | None = None) -> None:
        self.readers_max = readers_max
        self._readers: dict[HubReader, _Attached] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def check(self, level: int | None) -> None:
        """Check that a reader with the owner level *level*, None for none, may attach.

        Raises:
            AmqpError: A reader with a higher level is there, or too many without a level.
        """
        levels = [each.level for each in self._readers.values()]
        highest = max((each for each in levels if each is not None), default=None)
        if highest is not None and (level is None or level < highest):
            own = "no owner level" if level is None else f"the lower owner level {level}"
            raise AmqpError(
                f"a reader with the owner level {highest} is attached, this one has {own}",
                condition=STOLEN,
            )
        if level is None and self.readers_max is not None and len(levels) >= self.readers_max:
            raise AmqpError(
                f"the consumer group has {self.readers_max} readers of this partition already",
                condition=NO_ROOM,
            )

    def enter(self, reader: HubReader, link: SendingLink, level: int | None) -> None:
        """Add *reader*, whose link was checked; with a level, detach all others."""
        if level is not None:
            stolen = Error(
                STOLEN, f"a reader with the owner level {level} has taken over the partition"
            )
            for other, attached in list(self._readers.items()):
                self._leave(other)
                # The client may be slow to answer, and must not get events that the new reader gets.
                other.log.leave(other)
                attached.link.detach(stolen)
        self._readers[reader] = _Attached(link, level)
        reader.on_end.append(partial(self._leave, reader))

    def _leave(self, reader: HubReader) -> None:
        self._readers.pop(reader, None)


def owner_level(link: SendingLink) -> int | None:
    """Return the owner level that *link* asks for; None if it asks for none.

    Raises:
        AmqpError: It is not a whole number.
    """
    level = link.properties.get(OWNER_LEVEL)
    if level is None:
        return None
    if isinstance(level, bool) or not isinstance(level, int):
        raise AmqpError(
            f"{OWNER_LEVEL}: a long expected, not {level!r:.50}", condition=ARGUMENT_OUT_OF_RANGE
        )
    return int(level)
