"""Requests about single messages and sessions, as the operations at `$management` make them.

Pure: arguments are decoded, and results are not encoded yet. A request that cannot be done as a whole raises an
error with a condition of Service Bus, and changes nothing.

Requests about many messages are done in steps (:mod:`.steps`), first those that can fail. An entity does one such request
after the other, and outcomes of links behind it; but time passes in between, so that the messages that were found are held:
their locks and schedules do not end before the request does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final
from uuid import UUID

from amqp_rt.broker.building import Subscription
from amqp_rt.errors import AmqpError

from .backlog import WORK_OF_A_CALL
from .conditions import (
    NO_ROOM,
    message_lock_lost,
    message_not_found,
    not_allowed,
    out_of_range,
    session_lock_lost,
)
from .entity import Entity
from .messages import encoded
from .reservations import Reservation
from .sessions import Session
from .shelf import place_of
from .steps import WORK_OF_ENCODING, WORK_OF_FINDING, WORK_OF_READING, Steps
from .stored import State, Stored

#: Octets of an answer to a peek after which no more messages are added to it.
PEEKED_BYTES_MAX: Final = 1024 * 1024
#: Messages that one request deletes.
DELETED_MAX: Final = 4_000
#: Sessions in one answer.
LISTED_MAX: Final = 1_000
#: Octets for which a message counts at least in the size of an answer: encoding it takes as long as copying these.
_ANSWERED_MIN: Final = 1024
#: Work of a message that is put aside or becomes a dead letter, whose properties may be written again.
_WORK_OF_A_CHANGE: Final = 12


class Requests:
    """Requests to one entity.

    Args:
        entity: The entity.
    """

    def __init__(self, entity: Entity) -> None:
        self.entity = entity

    # --- By lock token ---

    def complete(self, tokens: Iterable[UUID], *, session_id: str | None = None) -> Steps[None]:
        """Remove locked messages.

        Raises:
            AmqpError: A lock is lost (``com.microsoft:message-lock-lost``); none was removed then.
        """
        yield from self._settle(tokens, session_id, self.entity.outcomes.complete, WORK_OF_A_CALL)

    def abandon(
        self,
        tokens: Iterable[UUID],
        changes: Mapping[Any, object] | None = None,
        *,
        session_id: str | None = None,
    ) -> Steps[None]:
        """Unlock messages, count a failed delivery, and set the application properties *changes*.

        Raises:
            AmqpError: As for :meth:`complete`.
        """

        def abandon(stored: Stored) -> None:
            self.entity.outcomes.abandon(stored, changes or {})

        yield from self._settle(tokens, session_id, abandon, _WORK_OF_A_CHANGE)

    def defer(
        self,
        tokens: Iterable[UUID],
        changes: Mapping[Any, object] | None = None,
        *,
        session_id: str | None = None,
    ) -> Steps[None]:
        """Put locked messages aside, to be received by their sequence numbers.

        Raises:
            AmqpError: As for :meth:`complete`.
        """

        def defer(stored: Stored) -> None:
            self.entity.outcomes.defer(stored, changes or {})

        yield from self._settle(tokens, session_id, defer, _WORK_OF_A_CHANGE)

    def dead_letter(
        self,
        tokens: Iterable[UUID],
        reason: str | None = None,
        description: str | None = None,
        changes: Mapping[Any, object] | None = None,
        *,
        session_id: str | None = None,
    ) -> Steps[None]:
        """Dead-letter locked messages.

        Raises:
            AmqpError: As for :meth:`complete`.
        """

        def dead_letter(stored: Stored) -> None:
            self.entity.outcomes.dead_letter(stored, reason, description, changes)

        yield from self._settle(tokens, session_id, dead_letter, _WORK_OF_A_CHANGE)

    def _settle(
        self,
        tokens: Iterable[UUID],
        session_id: str | None,
        settle: Callable[[Stored], object],
        work: int,
    ) -> Steps[None]:
        """Call *settle* for each of the messages that are locked with *tokens*."""
        held = yield from self._hold(tokens, session_id)
        for token, stored in held.items():
            if self._has(token, stored):
                settle(stored)
                yield work
        self.entity.finish()

    def renew(self, tokens: Iterable[UUID]) -> Steps[tuple[float, int]]:
        """Let locks begin anew; return the end of all, by the wall clock, and their number.

        Raises:
            AmqpError: As for :meth:`complete`; or the messages belong to a session, whose lock it is.
        """
        entity = self.entity
        if entity.options.sessions:
            raise not_allowed("messages of a session have no locks of their own: renew the session")
        held = yield from self._hold(tokens, None)
        until = entity.clock.wall() + entity.options.lock_s
        for token, stored in held.items():
            if self._has(token, stored):
                stored.until = until
                entity.timing.locks.set(place_of(stored.number), until)
                yield WORK_OF_FINDING
        entity.timing.arm()
        return until, len(held)

    def _hold(self, tokens: Iterable[UUID], session_id: str | None) -> Steps[dict[UUID, Stored]]:
        """Find the messages that are locked with *tokens*, and keep their locks from ending.

        Raises:
            AmqpError: One is not, or its session is not that of the request or no longer locked; all locks then end as
                they would have.
        """
        entity = self.entity
        entity.timing.begin()
        if session_id is not None and entity.options.sessions:
            # The lock of a message ends with that of its session, which is what clients have to accept again.
            self._held(session_id, None)
        found: dict[UUID, Stored] = {}
        try:
            for token in tokens:
                stored = entity.shelf.tokens.get(token)
                if stored is None or not entity.is_locked(stored, entity.clock.wall()):
                    raise message_lock_lost()
                if session_id is not None and stored.session != session_id:
                    raise session_lock_lost(session_id)
                entity.timing.locks.discard(place_of(stored.number))
                found[token] = stored
                yield WORK_OF_FINDING
        except AmqpError as error:
            failure = error
        else:
            return found
        for token, stored in found.items():
            if self._has(token, stored):
                entity.timing.locks.set(place_of(stored.number), stored.until)
                yield WORK_OF_FINDING
        entity.finish()
        raise failure

    def _has(self, token: UUID, stored: Stored) -> bool:
        """Return whether *stored* is still locked with *token*: the discharge of a transaction may have settled it."""
        return self.entity.shelf.tokens.get(token) is stored

    # --- By sequence number ---

    def receive_deferred(
        self,
        numbers: Iterable[int],
        *,
        settled: bool,
        session_id: str | None = None,
        holder: Subscription | None = None,
    ) -> Steps[list[tuple[bytes, UUID | None]]]:
        """Take deferred messages: each encoded, with its lock token.

        Args:
            numbers: Sequence numbers.
            settled: Whether the messages are removed at once; they have no token then.
            session_id: Session of the messages, for an entity with sessions.
            holder: The receiver that has locked the session, if the request names one.

        Raises:
            AmqpError: One is not deferred, or is locked (``com.microsoft:message-not-found``), or the session
                is not locked, or an answer with all messages would be too large; none was taken then.
        """
        entity = self.entity
        now = entity.timing.begin()
        session = self._held(session_id, holder) if entity.options.sessions else None
        found: dict[int, Stored] = {}
        left = entity.limits.message_size_max
        failure: AmqpError | None = None
        for number in numbers:
            stored = entity.shelf.find(number)
            if (
                stored is None
                or stored.state != State.DEFERRED
                or stored.token is not None
                or (session is not None and stored.session != session.id)
                or entity.outcomes.expire_deferred(stored, now)
            ):
                failure = message_not_found(number)
                break
            if number not in found:
                left -= max(stored.size, _ANSWERED_MIN)
            if left < 0:
                failure = out_of_range(
                    f"an answer has at most {entity.limits.message_size_max} octets, and a message counts for"
                    f" {_ANSWERED_MIN} at least: ask for fewer"
                )
                break
            found[number] = stored
            yield WORK_OF_FINDING
        if failure is not None:
            entity.finish()
            raise failure
        taken: list[tuple[bytes, UUID | None]] = []
        for number, stored in found.items():
            if entity.shelf.find(number) is not stored:
                # It was purged in between.
                continue
            stored.attempts += 1
            entity.counts.delivered += 1
            token = None if settled else entity.new_id()
            if token is None:
                taken.append((encoded(stored), None))
                entity.counts.accepted += 1
                entity.remove(stored)
            else:
                entity.lock(stored, token, entity.clock.wall())
                taken.append((encoded(stored, until=stored.until), token))
            yield WORK_OF_ENCODING
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
    ) -> Steps[list[bytes]]:
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
        most = max(0, min(count, entity.bounds.peeked_max))
        found: list[bytes] = []
        left = bytes_max
        # A list, since messages come and go between the steps.
        for number in list(islice(numbers.since(max(0, first)), most)):
            stored = entity.shelf.find(number)
            if stored is None:
                continue
            if found and left < (stored.size if bodies else stored.body_at):
                break
            payload = encoded(stored, body=bodies)
            left -= len(payload)
            found.append(payload)
            yield WORK_OF_ENCODING
        return found

    def cancel_scheduled(self, numbers: Iterable[int]) -> Steps[None]:
        """Remove messages that are not due yet.

        Raises:
            AmqpError: One is not scheduled, or was due; none was removed then.
        """
        entity = self.entity
        entity.timing.begin()
        found: dict[int, Stored] = {}
        missing: int | None = None
        for number in numbers:
            stored = entity.shelf.find(number)
            if stored is None or stored.state != State.SCHEDULED:
                missing = number
                break
            entity.timing.due.discard(place_of(number))
            found[number] = stored
            yield WORK_OF_FINDING
        for number, stored in found.items():
            if entity.shelf.find(number) is not stored:
                # It was purged in between.
                continue
            if missing is None:
                entity.remove(stored)
                yield WORK_OF_A_CALL
            else:
                entity.timing.due.set(place_of(number), stored.due_at)
                yield WORK_OF_FINDING
        entity.finish()
        if missing is not None:
            raise message_not_found(missing)

    def schedule(self, messages: Iterable[Stored]) -> Steps[list[int]]:
        """Take messages, for the times in their annotations; return their sequence numbers, 0 for a duplicate.

        Raises:
            AmqpError: One is refused, or there is no room; none was taken then.
        """
        entity = self.entity
        room = Reservation(entity)
        try:
            taken: list[Stored] = []
            options = entity.options
            for stored in messages:
                self._check(stored)
                if not room.take(stored.size):
                    raise AmqpError(f"there is no room in {entity.path!r}", condition=NO_ROOM)
                taken.append(stored)
                yield WORK_OF_READING
            while options is not entity.options:
                # The entity may have been disabled in between, or take smaller messages only.
                options = entity.options
                for stored in taken:
                    self._check(stored)
                    yield WORK_OF_FINDING
            numbers: list[int] = []
            for stored in taken:
                room.release(stored.size)
                numbers.append(entity.accept(stored) if entity.remember(stored) else 0)
                yield WORK_OF_A_CALL
            return numbers
        finally:
            room.end()

    def _check(self, stored: Stored) -> None:
        """Check a message as one that is sent on a link.

        Raises:
            AmqpError: It is refused.
        """
        refused = self.entity.check(stored)
        if refused is not None and refused.error is not None:
            raise refused.error.raised_as(AmqpError)

    def delete_batch(
        self, count: int, before: float, *, session_id: str | None = None
    ) -> Steps[int]:
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
            yield WORK_OF_A_CALL
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
