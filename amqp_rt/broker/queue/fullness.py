"""Reasons for which nodes have no room for a message, for the errors that its sender gets. Pure."""

from __future__ import annotations

from typing import Protocol

from .accounts import DROP_HEAD, Memory


class BoundedQueue(Protocol):
    """Limits of a queue and what it holds, as :func:`why_full` reads them."""

    memory: Memory
    overflow: str
    length_max: int
    bytes_max: int
    bytes: int
    available: int
    acquired: int
    delayed: int
    pending: int
    held: int


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


def why_full(queue: BoundedQueue, name: str, size: int) -> str:
    """Return why *queue*, whose name is *name*, has no room for a message of *size* bytes."""
    why = why_bytes("bytes_max", queue.bytes, size, queue.bytes_max)
    held = queue.available + queue.acquired + queue.delayed + queue.pending + queue.held
    if queue.overflow == DROP_HEAD:
        why = "messages that exceed its limits are still being dropped"
    elif queue.length_max and held >= queue.length_max:
        why = f"length_max {queue.length_max} is reached"
    return full_text("queue", name, why_memory(queue.memory, size), why)
