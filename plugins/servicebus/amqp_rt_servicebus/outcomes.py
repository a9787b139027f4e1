"""Outcomes of deliveries and their effects on messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from amqp_rt.outcomes import Error

from .conditions import DEAD_LETTER
from .deadlines import EARLY_S
from .messages import DESCRIPTION, REASON, change_properties, mark_dead
from .stored import State, Stored

if TYPE_CHECKING:
    from .entity import Entity

#: Work of making a dead letter, in the unit of ``Memory.work``.
WORK_OF_A_LETTER: Final = 12
#: Reasons that the service gives for dead letters.
EXCEEDED: Final = "MaxDeliveryCountExceeded"
EXPIRED: Final = "TTLExpiredException"
NO_SESSION: Final = "Session id is null."
TOO_MANY_HOPS: Final = "MaxTransferHopCountExceeded"


class Outcomes:
    """Effects of outcomes on the messages of one entity. ``finish`` of the entity follows.

    Args:
        entity: The entity.
    """

    def __init__(self, entity: Entity) -> None:
        self.entity = entity

    def complete(self, stored: Stored) -> None:
        """Remove a locked message, which was processed."""
        self.entity.counts.accepted += 1
        self.entity.remove(stored)

    def release(self, stored: Stored) -> None:
        """Unlock a message as if it had not been delivered; clients so empty their buffers."""
        self.entity.unlock(stored)
        self.entity.counts.requeued += 1
        self.requeue(stored, self.entity.clock.wall())

    def abandon(self, stored: Stored, changes: Mapping[Any, object]) -> None:
        """Unlock a message whose processing has failed; count that, and change its properties."""
        self._change(stored, changes)
        self.entity.unlock(stored)
        self.fail(stored, self.entity.clock.wall())

    def defer(self, stored: Stored, changes: Mapping[Any, object]) -> None:
        """Put a locked message aside, to be received by its number. The count stays as it was."""
        self._change(stored, changes)
        self.entity.unlock(stored)
        self.entity.shelf.change_state(stored, State.DEFERRED)
        self.requeue(stored, self.entity.clock.wall())

    def dead_letter(
        self,
        stored: Stored,
        reason: str | None,
        description: str | None,
        changes: Mapping[Any, object] | None = None,
    ) -> None:
        """Dead-letter a message for a receiver. One that is a dead letter stays in its sub-queue."""
        if self.entity.dead_letters is None:
            known = {REASON: reason, DESCRIPTION: description}
            self.abandon(
                stored,
                {
                    **(changes or {}),
                    **{key: each for key, each in known.items() if each is not None},
                },
            )
            return
        self._change(stored, changes or {})
        self.entity.remove(stored)
        self.bury(stored, reason, description)

    def reject(self, stored: Stored, error: Error | None) -> None:
        """Dead-letter a message for the reason in the error of a *rejected*, as the SDKs put it there."""
        info = {} if error is None or error.info is None else dict(error.info.items())
        reason = info.pop(REASON, None)
        description = info.pop(DESCRIPTION, None)
        if error is not None:
            if reason is None and error.condition != DEAD_LETTER:
                # A client that knows no Service Bus has only the condition to give a reason.
                reason = str(error.condition)
            description = error.description if description is None else description
        self.dead_letter(
            stored,
            reason if isinstance(reason, str) else None,
            description if isinstance(description, str) else None,
            info,
        )

    def _change(self, stored: Stored, changes: Mapping[Any, object]) -> None:
        size = stored.size
        if changes and change_properties(stored, changes, limits=self.entity.limits):
            self.entity.shelf.grow(stored.size - size)

    def fail(self, stored: Stored, now: float) -> None:
        """Count a failed delivery of a message that is not locked any more, and requeue it."""
        stored.delivery_count += 1
        self.entity.counts.requeued += 1
        self.requeue(stored, now)

    def requeue(self, stored: Stored, now: float) -> None:
        """Give a message whose lock has ended its place again, or give it up."""
        most = self.entity.options.deliveries_max
        if most and stored.delivery_count >= most and self.entity.dead_letters is not None:
            self.entity.remove(stored)
            self.bury(
                stored,
                EXCEEDED,
                f"the message could not be consumed after {most} delivery attempts",
            )
        elif stored.state == State.DEFERRED:
            # A deferred message does not expire before it is asked for.
            pass
        elif stored.expires_at <= now + EARLY_S:
            self.expire(stored)
        else:
            self.entity.make_ready(stored)

    def expire(self, stored: Stored) -> None:
        """Give up a message that has expired and is not locked."""
        self.entity.counts.expired += 1
        self.entity.remove(stored)
        if self.entity.options.dead_letters_expired and self.entity.dead_letters is not None:
            self.bury(stored, EXPIRED, "the message expired and was dead lettered")
        else:
            self.entity.counts.dropped += 1

    def expire_deferred(self, stored: Stored, now: float) -> bool:
        """Give up a deferred message that has expired; return whether it has."""
        if stored.expires_at > now + EARLY_S:
            return False
        self.expire(stored)
        return True

    def bury(self, stored: Stored, reason: str | None, description: str | None) -> None:
        """Move a message that is not kept here to the dead letters."""
        if self.entity.dead_letters is None:
            self.entity.counts.dropped += 1
            return
        self.entity.counts.dead_lettered += 1
        # Its properties are written again, and it is put into another entity.
        self.entity.memory.work -= WORK_OF_A_LETTER
        mark_dead(stored, self.entity.path, reason, description)
        self.entity.dead_letters.take_dead(stored)
