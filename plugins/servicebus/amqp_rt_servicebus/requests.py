"""Requests about single messages and sessions, as the operations at ``$management`` make them.

Pure: arguments are decoded, and results are not encoded yet. A request that cannot be done as a whole raises an
error with a condition of Service Bus, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final
from uuid import UUID

from amqp_rt.broker.building import Subscription
from amqp_rt.errors import AmqpError

from .conditions import (
    NO_ROOM,
    message_lock_lost,
    message_not_found,
    not_allowed,
    out_of_range,
    session_lock_lost,
)
from .entity import Entity
from .messages import State, Stored, encoded
from .sessions import Session
from .shelf import place_of

#: Octets of an answer to a peek after which no more messages are added to it.
PEEKED_BYTES_MAX: Final = 1024 * 1024
#: Messages that one request deletes.
DELETED_MAX: Final = 4_000
#: Sessions in one answer.
LISTED_MAX: Final = 1_000


class Requests:
    """Requests to one entity.

    Args:
        entity: The entity.
    """

    def __init__(self, entity: Entity) -> None:
        self.entity = entity

    # --- By lock token ---

    def complete(self, tokens: Iterable[UUID], *, session_id: str | None = None) -> None:
        """Remove locked messages.

        Raises:
            AmqpError: A lock is lost (``com.microsoft:message-lock-lost``); none was removed then.
        """
        for stored in self._locked(tokens, session_id):
            self.entity.outcomes.complete(stored)
        self.entity.finish()

    def abandon(
        self,
        tokens: Iterable[UUID],
        changes: Mapping[Any, object] | None = None,
        *,
        session_id: str | None = None,
    ) -> None:
        """Unlock messages, count a failed delivery, and set the application properties *changes*.

        Raises:
            AmqpError: As for :meth:`complete`.
        """
        for stored in self._locked(tokens, session_id):
            self.entity.outcomes.abandon(stored, changes or {})
        self.entity.finish()

    def defer(
        self,
        tokens: Iterable[UUID],
        changes: Mapping[Any, object] | None = None,
        *,
        session_id: str | None = None,
    ) -> None:
        """Put locked messages aside, to be received by their sequence numbers.

        Raises:
            AmqpError: As for :meth:`complete`.
        """
        for stored in self._locked(tokens, session_id):
            self.entity.outcomes.defer(stored, changes or {})
        self.entity.finish()

    def dead_letter(
        self,
        tokens: Iterable[UUID],
        reason: str | None = None,
        description: str | None = None,
        changes: Mapping[Any, object] | None = None,
        *,
        session_id: str | None = None,
    ) -> None:
        """Dead-letter locked messages.

        Raises:
            AmqpError: As for :meth:`complete`.
        """
        for stored in self._locked(tokens, session_id):
            self.entity.outcomes.dead_letter(stored, reason, description, changes)
        self.entity.finish()

    def renew(self, tokens: Iterable[UUID]) -> list[float]:
        """Let locks begin anew; return their ends, by the wall clock.

        Raises:
            AmqpError: As for :meth:`complete`; or the messages belong to a session, whose lock it is.
        """
        entity = self.entity
        if entity.options.sessions:
            raise not_allowed("messages of a session have no locks of their own: renew the session")
        locked = self._locked(tokens, None)
        until = entity.clock.wall() + entity.options.lock_s
        for stored in locked:
            stored.until = until
            entity.timing.locks.set(place_of(stored.number), until)
        entity.timing.arm()
        return [until] * len(locked)

    def _locked(self, tokens: Iterable[UUID], session_id: str | None) -> list[Stored]:
        """Return the messages that are locked with *tokens*.

        Raises:
            AmqpError: One is not, or its session is not that of the request or no longer locked.
        """
        entity = self.entity
        now = entity.timing.begin()
        if session_id is not None and entity.options.sessions:
            # The lock of a message ends with that of its session, which is what clients have to accept again.
            self._held(session_id, None)
        found: dict[UUID, Stored] = {}
        for token in self._few(tokens):
            stored = entity.shelf.tokens.get(token)
            if stored is None or not entity.is_locked(stored, now):
                raise message_lock_lost()
            if session_id is not None and stored.session != session_id:
                raise session_lock_lost(session_id)
            found[token] = stored
        return list(found.values())

    # --- By sequence number ---

    def receive_deferred(
        self,
        numbers: Iterable[int],
        *,
        settled: bool,
        session_id: str | None = None,
        holder: Subscription | None = None,
    ) -> list[tuple[bytes, UUID | None]]:
        """Take deferred messages: each encoded, with its lock token.

        Args:
            numbers: Sequence numbers.
            settled: Whether the messages are removed at once; they have no token then.
            session_id: Session of the messages, for an entity with sessions.
            holder: The receiver that has locked the session, if the request names one.

        Raises:
            AmqpError: One is not deferred, or is locked (``com.microsoft:message-not-found``), or the session
                is not locked; none was taken then.
        """
        entity = self.entity
        now = entity.timing.begin()
        session = self._held(session_id, holder) if entity.options.sessions else None
        found: dict[int, Stored] = {}
        missing: int | None = None
        for number in self._few(numbers):
            stored = entity.shelf.find(number)
            if (
                stored is None
                or stored.state != State.DEFERRED
                or stored.token is not None
                or (session is not None and stored.session != session.id)
                or entity.outcomes.expire_deferred(stored, now)
            ):
                missing = number
                break
            found[number] = stored
        if missing is not None:
            entity.finish()
            raise message_not_found(missing)
        taken: list[tuple[bytes, UUID | None]] = []
        for stored in found.values():
            stored.attempts += 1
            entity.counts.delivered += 1
            token = None if settled else entity.new_id()
            if token is None:
                taken.append((encoded(stored), None))
                entity.counts.accepted += 1
                entity.remove(stored)
            else:
                entity.lock(stored, token, now)
                taken.append((encoded(stored, until=stored.until), token))
        entity.finish()
        return taken

    def peek(
        self,
        first: int,
        count: int,
        *,
        session_id: str | None = None,
        bodies: bool = True,
        bytes_max: int = PEEKED_BYTES_MAX,
    ) -> list[bytes]:
        """Return messages in any state, in the order of their numbers, without locking them.

        Args:
            first: Lowest sequence number.
            count: How many at most; there are at most ``peeked_max`` of the bounds in any case.
            session_id: Session of the messages, for an entity with sessions; None for all.
            bodies: Whether the bodies are included.
            bytes_max: Octets after which no more messages are added.
        """
        entity = self.entity
        entity.timing.begin()
        entity.finish()
        numbers = entity.shelf.numbers
        if session_id is not None and entity.options.sessions:
            session = entity.sessions.find(session_id)
            if session is None:
                return []
            numbers = session.numbers
        found: list[bytes] = []
        left = bytes_max
        for number in islice(
            numbers.since(max(0, first)), max(0, min(count, entity.bounds.peeked_max))
        ):
            stored = entity.shelf.find(number)
            if stored is None:
                continue
            if found and left < (stored.size if bodies else stored.body_at):
                break
            payload = encoded(stored, body=bodies)
            left -= len(payload)
            found.append(payload)
        return found

    def cancel_scheduled(self, numbers: Iterable[int]) -> None:
        """Remove messages that are not due yet.

        Raises:
            AmqpError: One is not scheduled, or was due; none was removed then.
        """
        entity = self.entity
        entity.timing.begin()
        found: dict[int, Stored] = {}
        for number in self._few(numbers):
            stored = entity.shelf.find(number)
            if stored is None or stored.state != State.SCHEDULED:
                entity.finish()
                raise message_not_found(number)
            found[number] = stored
        for stored in found.values():
            entity.remove(stored)
        entity.finish()

    def schedule(self, messages: list[Stored]) -> list[int]:
        """Take messages, for the times in their annotations; return their sequence numbers, 0 for a duplicate.

        Raises:
            AmqpError: One is refused, or there is no room; none was taken then.
        """
        entity = self.entity
        self._few(messages)
        for stored in messages:
            refused = entity.check(stored)
            if refused is not None and refused.error is not None:
                raise refused.error.raised_as(AmqpError)
        if not entity.fits(sum(each.size for each in messages)):
            raise AmqpError(f"there is no room in {entity.path!r}", condition=NO_ROOM)
        return [entity.accept(each) if entity.remember(each) else 0 for each in messages]

    def delete_batch(self, count: int, before: float, *, session_id: str | None = None) -> int:
        """Delete active messages that are not locked, the oldest first; return how many there were.

        Args:
            count: How many at most, up to :data:`DELETED_MAX`.
            before: Wall-clock time before which they were enqueued.
            session_id: Session of the messages, for an entity with sessions.

        Raises:
            AmqpError: *count* is out of its range.
        """
        if not 1 <= count <= DELETED_MAX:
            raise out_of_range(f"message-count is {count}, not 1 to {DELETED_MAX}")
        entity = self.entity
        entity.timing.begin()
        ready = entity.shelf.ready
        if entity.options.sessions:
            session = None if session_id is None else entity.sessions.find(session_id)
            if session is None:
                entity.finish()
                return 0
            ready = session.ready
        deleted = 0
        while deleted < count and (place := ready.first) is not None:
            stored = entity.shelf.at(place)
            if stored.enqueued_at >= before:
                break
            entity.remove(stored)
            entity.counts.dropped += 1
            deleted += 1
        entity.finish()
        return deleted

    # --- Sessions ---

    def renew_session(self, session_id: str, holder: Subscription | None = None) -> float:
        """Let the lock of a session begin anew; return its end, by the wall clock.

        Raises:
            AmqpError: It is not locked, or by another receiver (``com.microsoft:session-lock-lost``).
        """
        entity = self.entity
        now = entity.timing.begin()
        session = self._held(session_id, holder)
        entity.sessions.renew(session, now + entity.options.lock_s)
        entity.timing.arm()
        return session.until

    def session_state(self, session_id: str, holder: Subscription | None = None) -> bytes | None:
        """Return the state of a session, None if it has none.

        Raises:
            AmqpError: As for :meth:`renew_session`.
        """
        self.entity.timing.begin()
        return self._held(session_id, holder).state

    def set_session_state(
        self, session_id: str, state: bytes | None, holder: Subscription | None = None
    ) -> None:
        """Set the state of a session, which is kept without messages and without a lock; None removes it.

        Raises:
            AmqpError: As for :meth:`renew_session`; or the state is too large.
        """
        entity = self.entity
        now = entity.timing.begin()
        session = self._held(session_id, holder)
        most = entity.bounds.session_state_max
        if state is not None and len(state) > most:
            raise out_of_range(f"a session's state of {len(state)} bytes: at most {most}")
        size = len(state or b"") - len(session.state or b"")
        if size > 0 and not entity.fits(size):
            raise AmqpError(f"there is no room in {entity.path!r}", condition=NO_ROOM)
        entity.shelf.grow(size)
        entity.sessions.set_state(session, state, now)

    def sessions(self, since: float | None = None, skip: int = 0, top: int = 100) -> list[str]:
        """Return ids of sessions: those with messages or a state, or with a state set *since*."""
        self.entity.timing.begin()
        self.entity.finish()
        return self.entity.sessions.list_ids(since, max(0, skip), max(0, min(top, LISTED_MAX)))

    def _held(self, session_id: str | None, holder: Subscription | None) -> Session:
        if not self.entity.options.sessions:
            raise not_allowed(f"{self.entity.path!r} has no sessions")
        session = None if session_id is None else self.entity.sessions.find(session_id)
        if (
            session is None
            or session.holder is None
            or (holder is not None and session.holder is not holder)
        ):
            raise session_lock_lost(session_id or "")
        return session

    def _few(self, named: Iterable[Any]) -> list[Any]:
        """Return *named* as a list.

        Raises:
            AmqpError: There are more than ``named_max`` of the bounds.
        """
        most = self.entity.bounds.named_max
        found = list(islice(named, most + 1))
        if len(found) > most:
            raise out_of_range(f"a request names at most {most} messages: send several")
        return found
