"""Batches of messages in a stage: one entry while they are staged, single messages when published."""

from __future__ import annotations

from typing import Final

from ...batches import read_messages
from ...codec.sections import walk_head
from ...limits import Limits
from ...stores.base import Stored
from ..entries import Entry, entry_of, restored

#: Format of an entry that holds a batch of messages; not that of the wire, which any message may carry.
BATCH: Final = -1


def payloads_of(entry: Entry) -> list[bytes]:
    """Return the messages stored in *entry*, which may be a batch."""
    if entry.message_format != BATCH:
        return [entry.payload]
    # Batches above the limit were refused on arrival, when the limit may have been another one.
    return read_messages(entry.payload, len(entry.payload))


def entries_of(number: int, stored: Stored, limits: Limits, *, headers: bool) -> list[Entry]:
    """Return the entries to publish for a message that stage *number* has *stored*, or for each message
    of a batch; with the fields of their *headers*, if their node uses these.

    Raises:
        DecodeError: A message was admitted under other limits.
    """
    entry = restored(number, stored.sequence, stored.head, stored.payload)
    if entry.message_format != BATCH:
        return [entry.copy_for_node()]
    publisher = entry.publisher
    payloads = payloads_of(entry)
    if not headers:
        return [Entry(payload, publisher=publisher) for payload in payloads]
    return [
        entry_of(payload, walk_head(payload, limits), publisher=publisher) for payload in payloads
    ]
