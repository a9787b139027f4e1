"""Times of an entity: ends of locks, expiries, due times and idleness, with one alarm for all."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from amqp_rt.outcomes import Error

from .conditions import session_lock_lost
from .deadlines import EARLY_S, Deadlines
from .sessions import Session
from .shelf import place_of
from .stored import State, Stored

if TYPE_CHECKING:
    from .entity import Entity

#: Work of an event, in the unit of ``Memory.work``.
WORK_OF_AN_EVENT: Final = 4
#: An alarm is never set for less than this from now, in seconds.
_ALARM_MIN_S: Final = 0.001


class Timing:
    """Times of one entity, by the wall clock. The alarm is of the monotonic clock.

    Args:
        entity: The entity.
    """

    def __init__(self, entity: Entity) -> None:
        self.entity = entity
        #: Ends of message locks, expiries and due times, by place.
        self.locks: Deadlines[int] = Deadlines()
        self.expiries: Deadlines[int] = Deadlines()
        self.due: Deadlines[int] = Deadlines()
        self.used_at = entity.clock.wall()
        self.idle_check = self.used_at + entity.options.idle_s

    def clear(self) -> None:
        """Forget all times."""
        self.locks, self.expiries, self.due = Deadlines(), Deadlines(), Deadlines()
        self.idle_check = inf

    def touch(self) -> None:
        """Note that the entity is used: it is not idle for a while."""
        self.used_at = self.entity.clock.wall()
        if self.idle_check == inf:
            self.idle_check = self.used_at + self.entity.options.idle_s
        self.arm()

    def begin(self) -> float:
        """Handle due events before a request is served, as far as this turn allows; return the wall-clock time."""
        now = self.used_at = self.entity.clock.wall()
        if self.next_event() <= now + EARLY_S and not self.run_due(now):
            self.entity.distribution.resume_later()
        return now

    def next_event(self) -> float:
        """Return the time of the next event, ``inf`` if there is none."""
        return min(
            self.locks.next, self.expiries.next, self.due.next, self.entity.sessions.locks.next
        )

    def run_due(self, now: float) -> bool:
        """Handle due events in the order of their times, as this turn allows; return whether these were all."""
        memory = self.entity.memory
        while True:
            at = self.next_event()
            if at > now + EARLY_S:
                return True
            if memory.work <= 0:
                return False
            memory.work -= WORK_OF_AN_EVENT
            if self.due.next == at:
                place = self.due.pop(now)
                if place is not None:
                    self._activate(self.entity.shelf.at(place), at)
            elif self.locks.next == at:
                place = self.locks.pop(now)
                if place is not None:
                    self.lapse(self.entity.shelf.at(place), at)
            elif self.expiries.next == at:
                place = self.expiries.pop(now)
                if place is not None:
                    stored = self.entity.shelf.at(place)
                    # A locked message expires at the end of its lock, a deferred one when it is asked for.
                    if stored.token is None and stored.state == State.ACTIVE:
                        self.entity.outcomes.expire(stored)
            else:
                session_id = self.entity.sessions.locks.pop(now)
                session = None if session_id is None else self.entity.sessions.find(session_id)
                if session is not None:
                    self._lapse_session(session, at)

    def _activate(self, stored: Stored, at: float) -> None:
        """Enqueue a scheduled message, which is due: with a new number, at the end."""
        self.entity.remove(stored)
        stored.number = 0
        self.entity.enqueue(stored, at)

    def lapse(self, stored: Stored, at: float) -> None:
        """End a lock whose time is over, which counts as a failed delivery."""
        if self.entity.enlisted(stored) is not None:
            # A transaction has a time limit of its own.
            stored.until = at + self.entity.options.lock_s
            self.locks.set(place_of(stored.number), stored.until)
            return
        self.entity.unlock(stored)
        self.entity.outcomes.fail(stored, at)

    def _lapse_session(self, session: Session, at: float) -> None:
        """End the lock of a session: messages in hand count as failed, and the link is detached."""
        holder = session.holder
        self.entity.empty_hands(session, lambda stored: self.entity.outcomes.fail(stored, at))
        if holder is not None and holder.link.attached:
            holder.link.detach(Error.of(session_lock_lost(session.id)))

    def lapse_all(self, now: float) -> None:
        """End all locks of messages and sessions but those about which a transaction decides."""
        for session in self.entity.sessions.locked():
            self._lapse_session(session, now)
        for stored in list(self.entity.shelf.tokens.values()):
            if self.entity.enlisted(stored) is None:
                self.lapse(stored, now)

    def tick(self, now: float | None = None) -> None:
        """Handle events due by *now*, a wall-clock time, or by the clock; some in later turns."""
        self.entity.alarm = inf
        if self.entity.deleted:
            return
        at = self.entity.clock.wall() if now is None else now
        if not self.run_due(at):
            self.entity.distribution.resume_later()
        if self.idle_check <= at + EARLY_S:
            self._check_idle(at)
        if not self.entity.deleted:
            self.entity.finish()

    def _check_idle(self, now: float) -> None:
        idle_s = self.entity.options.idle_s
        busy = self.entity.is_used() or any(
            each.consumers or each.shelf.counts[State.SCHEDULED] for each in self.entity.parts
        )
        used_at = now if busy else max(each.timing.used_at for each in self.entity.parts)
        self.idle_check = used_at + idle_s
        if not busy and self.idle_check <= now + EARLY_S:
            self.idle_check = inf
            self.entity.on_idle()

    def arm(self) -> None:
        """Set the alarm for the next event, if it is earlier than the one that is set."""
        at = min(self.next_event(), self.idle_check)
        if at == inf or self.entity.deleted:
            return
        due = self.entity.clock.monotonic() + max(_ALARM_MIN_S, at - self.entity.clock.wall())
        if due < self.entity.alarm:
            self.entity.alarm = due
            self.entity.on_alarm(due)
