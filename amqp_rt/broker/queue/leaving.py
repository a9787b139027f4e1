"""Queues that give up all of their messages, before they are deleted. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .accounts import DROP_HEAD

if TYPE_CHECKING:
    from .queue import MessageQueue


def leave(queue: MessageQueue, on_left: Callable[[], None]) -> None:
    """Give up the messages of *queue* in turns, and deliver none any more.

    Those that consumers hold stay theirs until they are settled, and delayed ones until they are due.
    *on_left* is called when some have left.
    """
    queue.on_left = on_left
    queue.leaving = True
    # As a ring of no length.
    queue.overflow = DROP_HEAD
    queue.turns.clear()
    queue.resume_later()


def is_drained(queue: MessageQueue) -> bool:
    """Return whether *queue* has no messages, nor any that are being stored."""
    return not (queue.available or queue.acquired or queue.delayed or queue.pending)
