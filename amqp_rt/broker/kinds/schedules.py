"""Schedules: nodes that send a message to another node at certain times.

The time of the next message is stored in the unit that stores a message: after a crash both have happened or
neither. A timetable (``cron``) follows the wall clock, and the time of the next message only grows: no time is due twice if
the clock is put back. An interval (``every_s``) follows the monotonic clock, and the wall clock over restarts only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from typing import Any, Final, Self

from ...errors import AmqpError
from ...fronts.base import LinkConnection
from ...limits import Limits
from ...message import Message
from ...outcomes import Error
from ...timetables import Cron
from ...values import Symbol, Timestamp
from ..durable import facts
from ..durable.facts import FactKind, ScheduleFact
from ..durable.units import Unit
from ..entries import Entry
from ..nodes import SCHEDULE, Declaration, Schedule
from ..producers import Intake
from ..queue.accounts import Counts, Memory
from ..statistics import ScheduleStats
from ..terms import Terms
from .base import SEALED, Node, Space

_log: Final = logging.getLogger("amqp_rt.broker")

#: Seconds between checks of the wall clock, which may be set, while a timetable is waited for.
_LOOK_S: Final = 10.0
#: Seconds until another attempt after the destination took no message.
_RETRY_S: Final = 10.0
#: Seconds by which a message may be late without being one to catch up.
_LATE_S: Final = 60.0

#: Annotations of the messages: the name of the schedule, and the time at which the message was due.
_BY: Final = Symbol("x-opt-schedule")
_DUE: Final = Symbol("x-opt-schedule-time")


class _Timer:
    """Holder of a node that has no messages, and its alarm."""

    gathering = None

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.awaited = False
        self.on_room: Callable[[], None] = lambda: None
        #: ``enqueued`` counts messages that were sent, ``dropped`` those that came from other nodes.
        self.counts = Counts()
        self.deleted = False
        self.available = self.acquired = self.bytes = 0
        self.consumers: list[Any] = []
        #: Next alarm, by the monotonic clock, and the function that it calls.
        self.alarm = inf
        self.on_alarm: Callable[[], None] = lambda: None

    def room(self) -> int:
        return 0

    def fits(self, size: int) -> bool:
        return False

    def why_full(self, name: str, size: int) -> str:
        return f"{name!r} is a schedule, which takes no messages"

    def put(self, entry: Entry) -> None:
        """Drop *entry*, a dead letter of a queue that names the schedule as its dead-letter address."""
        self.counts.dropped += 1
        _log.warning("message dropped: it was to go to a schedule, which takes none")

    def reserve_room(self, entry: Entry) -> None:
        """Reserve nothing."""

    def release_room(self, entry: Entry) -> None:
        """Release nothing."""

    def notify_waiting(self) -> None:
        """Notify nothing."""

    def tick(self) -> None:
        self.on_alarm()

    def delete(self) -> None:
        self.deleted = True


class ScheduleNode(Node):
    """Schedule: sends a message when its time has come."""

    kind = SCHEDULE
    declaration = Schedule
    fact_kinds = (facts.SCHEDULES,)
    declared: Schedule
    held: _Timer

    def __init__(self, space: Space, declared: Schedule, number: int) -> None:
        held = _Timer(space.services.memory)
        super().__init__(space, declared, held, Intake(held), held, number=number, volatile=True)
        held.on_alarm = self._look
        self._cron = _cron_of(declared)
        self._progress = ScheduleFact(inf)
        #: The same for an interval by the monotonic clock.
        self._due_at = inf
        #: Why the destination took no message at the last attempt.
        self._error: str | None = None

    @classmethod
    def make(
        cls,
        space: Space,
        declared: Schedule,
        *,
        number: int,
        owner: LinkConnection | None,
        transient: bool,
        new: bool,
    ) -> Self:
        node = cls(space, declared, number)
        if new or not number:
            node._begin()
        return node

    @classmethod
    def check(cls, declared: Schedule, limits: Limits) -> None:
        least = limits.schedule_every_min_s
        if declared.every_s is not None and declared.every_s < least:
            raise AmqpError(
                f"schedule {declared.name!r}: every_s is at least {least:g}, not {declared.every_s:g}",
                condition="amqp:invalid-field",
            )
        size = len(Message(declared.payload).encode())
        if size > limits.message_size_max:
            raise AmqpError(
                f"schedule {declared.name!r}: payload has {size} bytes, more than message_size_max",
                condition="amqp:link:message-size-exceeded",
            )

    def can_redeclare(self, declared: Declaration) -> bool:
        return isinstance(declared, Schedule)

    def redeclare(self, declared: Schedule) -> None:
        self.check(declared, self.services.limits)
        same = declared.same_times(self.declared)
        super().redeclare(declared)
        if not same:
            self._cron = _cron_of(declared)
            self._begin()

    # --- Restoring ---

    def restore_fact(self, kind: FactKind[Any], key: bytes, value: ScheduleFact) -> None:
        self._progress = value

    def restored(self) -> None:
        every = self.declared.every_s
        if self._progress.due == inf:
            self._begin()
        elif every is not None:
            clock = self.services.clock
            # At most one interval from now, even if the wall clock was put back.
            left = min(self._progress.due - clock.wall(), every)
            self._due_at = clock.monotonic() + left
            self._set_alarm(self._due_at)
        else:
            self._wait()

    # --- Links ---

    @property
    def is_sealed(self) -> bool:
        return True

    @property
    def epochs_error(self) -> Error | None:
        return SEALED

    def refuse_consumer(self, terms: Terms) -> Error | None:
        return Error(
            "amqp:not-allowed", f"{self.name!r} is a schedule: receive from {self.declared.to!r}"
        )

    # --- Time ---

    def _begin(self) -> None:
        """Wait for the first time from now on."""
        clock = self.services.clock
        now = clock.wall()
        if self._cron is not None:
            self._progress.due = self._cron.after(now)
            self._wait()
        else:
            every = self.declared.every_s or inf
            self._progress.due = now + every
            self._due_at = clock.monotonic() + every
            self._set_alarm(self._due_at)
        self._store()

    def _set_alarm(self, at: float) -> None:
        self.held.alarm = at
        if at < inf:
            self.services.turns.set_alarm(self.held, at)

    def _wait(self) -> None:
        """Set the alarm for the next time of the timetable, or for the next look at the clock."""
        clock = self.services.clock
        left = self._progress.due - clock.wall()
        if left < inf:
            self._set_alarm(clock.monotonic() + min(max(left, 0.0), _LOOK_S))

    def _look(self) -> None:
        """Send what is due, and wait for the next time."""
        clock = self.services.clock
        now, elapsed = clock.wall(), clock.monotonic()
        late = now - self._progress.due if self._cron is not None else elapsed - self._due_at
        if late < 0:
            self._wait()
            return
        for due in self._times_due(now, late):
            if not self._send(due, now):
                self._postpone(due, now, elapsed)
                return
            self._progress.last = due
        self._error = None
        if self._cron is not None:
            self._progress.due = self._cron.after(now)
            self._wait()
        else:
            every = self.declared.every_s or inf
            left = every - late % every
            self._progress.due = now + left
            self._due_at = elapsed + left
            self._set_alarm(self._due_at)
        self._store()

    def _times_due(self, now: float, late: float) -> list[float]:
        """Return the times for which a message is sent now, earliest first."""
        every = self.declared.every_s
        latest = now - late % every if every else self._latest(now)
        if self.declared.catch_up == "none" and now - latest > min(_LATE_S, every or inf):
            return []
        if self.declared.catch_up != "all":
            return [latest]
        found = [latest]
        first = now - late
        while len(found) < self.services.limits.schedule_catch_up_max:
            before = found[-1] - every if every else self._latest(found[-1] - 1)
            # Half a second for the rounding of intervals.
            if before < first - 0.5:
                break
            found.append(before)
        return found[::-1]

    def _latest(self, now: float) -> float:
        assert self._cron is not None
        return self._cron.latest(now)

    def _postpone(self, due: float, now: float, elapsed: float) -> None:
        """Try again later to send the message that was due at *due*."""
        if self.declared.catch_up == "all":
            # Those before it were sent.
            self._progress.due = due
            self._due_at = elapsed - (now - due)
            self._store()
        self._set_alarm(elapsed + _RETRY_S)

    def _send(self, due: float, now: float) -> bool:
        """Send the message that was due at *due*; return False if the destination takes none."""
        declared = self.declared
        inlet = self.space.inlet(declared.to)
        payload = self._message(due, now).encode()
        if inlet is None:
            return self._refused("there is no such node")
        if isinstance(inlet, Error):
            return self._refused(inlet.description or str(inlet.condition))
        if inlet.is_gone:
            return self._refused("it is out of service")
        if not inlet.admits(len(payload)):
            return self._refused(inlet.node.why_full(declared.to, len(payload)))
        try:
            entry = inlet.entry_factory.make_entry(payload, 0, now, inlet.ttl_s)
        except AmqpError as error:
            return self._refused(error.description)
        inlet.take(entry)
        self.held.counts.enqueued += 1
        return True

    def _message(self, due: float, now: float) -> Message:
        declared = self.declared
        at = datetime.fromtimestamp(due, UTC).isoformat(timespec="seconds")
        return Message(
            declared.payload,
            durable=declared.durable and self.services.journal is not None,
            message_annotations={_BY: declared.name, _DUE: Timestamp(int(due * 1000))},
            message_id=f"{declared.name}@{at}",
            creation_time=Timestamp(int(now * 1000)),
        )

    def _refused(self, why: str) -> bool:
        if self._error != why:
            _log.warning(
                "schedule %.200r: no message was sent to %.200r: %s; trying again",
                self.name,
                self.declared.to,
                why,
            )
        self._error = why
        return False

    # --- Store, operators ---

    def _store(self) -> None:
        """Store the progress, together with the messages that were sent in this step."""
        journal = self.services.journal
        if self.number and journal is not None:
            facts.SCHEDULES.put(journal.loose, facts.key_of(self.number), self._progress)

    def delete_stored(self, unit: Unit) -> None:
        super().delete_stored(unit)
        facts.SCHEDULES.remove(unit, facts.key_of(self.number))

    def kind_stats(self, *, alone: bool = False) -> ScheduleStats:
        """Return the statistics of the schedule."""
        progress = self._progress
        return ScheduleStats(
            name=self.name,
            sent=self.held.counts.enqueued,
            next_at=None if progress.due == inf else progress.due,
            last_at=progress.last or None,
            error=self._error,
        )


def _cron_of(declared: Schedule) -> Cron | None:
    return None if declared.cron is None else Cron(declared.cron, declared.tz)
