"""Browsing of a queue: copies of messages that stay in it (§3.5.7 *copy*). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...errors import LocalProtocolError
from ..entries import NEVER, Entry, encode_outgoing, exceeds_link
from .shelf import PASSED, PLACE
from .subscriptions import Browser

if TYPE_CHECKING:
    from .queue import MessageQueue


class Browsing:
    """Service of the browsers of a queue.

    Args:
        queue: The queue.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue

    def serve_all(self) -> None:
        """Serve browsers as far as the work of this turn allows, the rest in the next one."""
        queue = self._queue
        memory = queue.memory
        served: list[Browser] = []
        for browser in list(queue.browsers.values()):
            if memory.work <= 0:
                # The others come first in the next turn.
                for each in served:
                    if queue.browsers.pop(each.identity, None) is not None:
                        queue.browsers[each.identity] = each
                queue.resume_later()
                return
            memory.work -= 1
            served.append(browser)
            self.serve(browser)

    def serve(self, browser: Browser) -> None:
        """Send copies to *browser* as far as its credit and the work of this turn allow."""
        queue = self._queue
        shelf = queue.shelf
        link = browser.link
        if queue.deleted:
            return
        memory = queue.memory
        browser.searching = False
        while link.credit > 0 and link.writable and not browser.feeding:
            sequence = self._unseen(browser)
            if memory.work <= 0 and (sequence >= 0 or queue.paging.count):
                browser.searching = True
                queue.resume_later()
                return
            late = bool(browser.backlog) and sequence == browser.backlog[-1]
            if late and queue.paging.count and sequence >= queue.paging.first:
                # It became available out of turn, and the store may hold some that are before it.
                entry = queue.paging.ahead_of(browser, sequence)
                if entry is not None:
                    sequence = entry.sequence
                    late = False
                elif queue.paging.has_reached(browser, sequence):
                    entry = shelf.available_at(sequence)
                else:
                    return
            elif sequence >= 0:
                entry = shelf.available_at(sequence & PLACE) if late else shelf.fresh(sequence)
                if entry is None and not late:
                    if not sequence % PASSED:
                        memory.work -= 1
                    browser.cursor = shelf.after_empty(sequence, shelf.next)
                    continue
            else:
                entry = queue.paging.next_ahead(browser) if queue.paging.count else None
                if entry is None:
                    return
                sequence = entry.sequence
            if entry is not None and browser.selective and not queue.turns.examine(browser, entry):
                entry = None
            else:
                memory.work -= 1
            if entry is not None and (entry.expires_at == NEVER or entry.expires_at > queue.wall()):
                payload = encode_outgoing(entry, queue.wall()) if entry.altered else entry.payload
                try:
                    if entry.pieces:
                        queue.large.begin_copy(browser, payload, entry)
                    else:
                        link.send(
                            payload,
                            entry.sequence,
                            settled=browser.settled,
                            message_format=entry.message_format,
                        )
                except LocalProtocolError as error:
                    if not exceeds_link(link, error):
                        return
            if late:
                browser.backlog.pop()
            else:
                browser.cursor = sequence + 1

    def acquire(self, browser: Browser, copies: Iterable[Any]) -> list[Any]:
        """Acquire the messages of which *browser* has been sent *copies*; return the copies of those.

        Left out are messages that are not AVAILABLE in memory, and those that no consumer like the
        browser would get: another consumer is exclusive, or owns the message group.
        """
        queue = self._queue
        shelf = queue.shelf
        if queue.deleted or queue.locked(False) or (queue.single_active and queue.consumers):
            return []
        groups = queue.turns.groups
        acquired: list[Any] = []
        entries: list[Entry] = []
        for copy in copies:
            sequence = copy.context
            if not isinstance(sequence, int):
                continue
            entry = shelf.available_at(sequence)
            if (
                entry is None
                or (entry.expires_at != NEVER and entry.expires_at <= queue.wall())
                or (groups is not None and not groups.allows(entry, browser.identity))
            ):
                continue
            copy.context = entry
            acquired.append(copy)
            entries.append(entry)
            entry.attempts += 1
        if not entries:
            return acquired
        queue.memory.work -= shelf.remove_all(entries)
        queue.acquired += len(entries)
        for copy in acquired:
            copy.settled = copy.remote_settled = False
            if queue.timing.locks is not None:
                queue.timing.start_lock(browser, copy)
        queue.notify_room()
        return acquired

    def _unseen(self, browser: Browser) -> int:
        """Return the rank or sequence number that *browser* is to see next, -1 for none.

        It is either the last of its backlog or its cursor.
        """
        queue = self._queue
        shelf = queue.shelf
        cursor = browser.cursor = max(browser.cursor, shelf.head)
        if browser.backlog:
            sequence = browser.backlog[-1]
            if not queue.paging.count or sequence < queue.paging.first or cursor >= shelf.next:
                return sequence
        return cursor if cursor < shelf.next else -1
