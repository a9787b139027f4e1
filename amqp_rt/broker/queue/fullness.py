"""Reasons for which nodes have no room for a message, for the errors that its sender gets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .accounts import DROP_HEAD, Memory

if TYPE_CHECKING:
    from .queue import MessageQueue


def full_text(kind: str, name: str, *reasons: str) -> str:
    """Return the description of the error for a full node.

    Args:
        kind: The kind of node.
        name: Its name; may be empty.
        reasons: Reasons that apply, of which the first counts; an empty one does not apply. Without
            any there is room that is promised to links with credit.
    """
    for why in reasons:
        if why:
            break
    else:
        why = "its room is promised to senders that have credit"
    return f"{kind} {name!r:.200} is full: {why}" if name else f"the {kind} is full: {why}"


def why_memory(memory: Memory, size: int) -> str:
    """Return why *memory* has no room for *size* bytes; empty if it has."""
    if memory.held + size > memory.limit:
        return f"{size} bytes would exceed the memory of the broker (broker_bytes_max)"
    return ""


def why_bytes(limit: str, held: int, size: int, most: int) -> str:
    """Return why *size* bytes beside those *held* exceed *limit*, which is *most*; empty if they do not."""
    return f"{size} bytes would exceed {limit} {most}" if held + size > most else ""


def why_queue(queue: MessageQueue, size: int) -> str:
    """Return why *queue* has no room for *size* bytes by its own limits; empty if it has."""
    if queue.overflow == DROP_HEAD:
        return "messages that exceed its limits are still being dropped"
    held = queue.available + queue.acquired + queue.delayed + queue.pending + queue.held
    if queue.length_max and held >= queue.length_max:
        return f"length_max {queue.length_max} is reached"
    return why_bytes("bytes_max", queue.bytes, size, queue.bytes_max)
