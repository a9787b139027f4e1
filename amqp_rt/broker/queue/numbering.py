"""Queues that number their messages (``number_header``). Pure.

The number is a message annotation, so that each protocol shows it in its own way, and a store keeps it with the
message. Separate classes, so that other queues do not even check whether they number theirs.
"""

from __future__ import annotations

from ...annotations import merge_annotations, number_annotation
from ...codec.sections import walk_head
from ...errors import DecodeError
from ...message import MESSAGE_FORMAT
from ...values import ULong
from ..entries import Entry
from .observed import ObservedQueue
from .queue import MessageQueue


class Numbering:
    """Numbers of the messages of one queue.

    Args:
        queue: The queue.
        header: Name of the header that has the number.
    """

    def __init__(self, queue: MessageQueue, header: str) -> None:
        self._queue = queue
        self._key = number_annotation(header)
        queue.large.before_place = self.annotate

    def annotate(self, entry: Entry) -> None:
        """Annotate *entry*, which is about to get its sequence number, with its number.

        Numbers count from 1. An earlier number of that name is replaced. The annotations may exceed
        ``annotations_max`` by this one: unlike those of consumers it does not add up.
        """
        if entry.message_format != MESSAGE_FORMAT:
            return
        head = walk_head(entry.payload)
        try:
            section = merge_annotations(
                head.message_annotations, {self._key: ULong(self._queue.place_next + 1)}
            )
        except DecodeError:
            # The receiver will detect the malformed section.
            return
        entry.payload = head.header + section + head.rest


class NumberingQueue(MessageQueue):
    """Queue that numbers its messages; set ``numbering`` before the first one arrives."""

    numbering: Numbering

    def reserve(self, entry: Entry) -> None:
        self.numbering.annotate(entry)
        super().reserve(entry)

    def put(self, entry: Entry) -> None:
        if entry.sequence < 0:
            self.numbering.annotate(entry)
        super().put(entry)


class NumberingObservedQueue(ObservedQueue):
    """The same for a queue whose life-cycle events are recorded."""

    numbering: Numbering

    def reserve(self, entry: Entry) -> None:
        self.numbering.annotate(entry)
        super().reserve(entry)

    def put(self, entry: Entry) -> None:
        if entry.sequence < 0:
            self.numbering.annotate(entry)
        super().put(entry)
