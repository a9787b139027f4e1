"""Distribution of an entity's ready messages to its receivers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final, cast

from amqp_rt.broker.building import Subscription, exceeds_link
from amqp_rt.errors import LocalProtocolError
from amqp_rt.fronts.base import SendingLink
from amqp_rt.outcomes import Error

from .conditions import TOO_LARGE
from .deadlines import EARLY_S
from .messages import delivered
from .sessions import Session
from .shelf import place_of
from .stored import Stored
from .turns import Turns

if TYPE_CHECKING:
    from .entity import Entity

#: Work of a delivery, and of a session that is given to a receiver, in the unit of ``Memory.work``.
_WORK_OF_A_DELIVERY: Final = 10


class Distribution:
    """Delivery of the messages of one entity.

    Args:
        entity: The entity.
    """

    def __init__(self, entity: Entity) -> None:
        self.entity = entity
        self.turns = Turns()
        #: Sessions whose receivers may have messages to get.
        self.stirred: dict[str, None] = {}
        #: Whether work is left for :meth:`resume`.
        self.unfinished = False
        self._delivering = False

    def give_back(self, link: Any) -> None:
        """Return the credit of a draining *link*, unless more messages follow for it in a later turn."""
        if (
            link.attached
            and link.draining
            and not self.unfinished
            and (link.credit <= 0 or link.writable)
        ):
            link.drained()

    def deliver(self) -> None:
        """Deliver ready messages to receivers with credit, as many as one turn allows."""
        if self._delivering or self.entity.deleted:
            return
        sessions = self.entity.sessions
        if not self.stirred and self.entity.shelf.ready.first is None and not sessions.waiting:
            return
        memory = self.entity.memory
        self._delivering = True
        most = left = -(-max(0, memory.work) // _WORK_OF_A_DELIVERY)
        try:
            now = self.entity.clock.wall()
            left = sessions.serve_waiting(left)
            while self.stirred and left > 0:
                session_id = next(iter(self.stirred))
                session = sessions.find(session_id)
                left = self._deliver_session(session, now, left) if session is not None else left
                if left > 0:
                    self.stirred.pop(session_id, None)
            ready = self.entity.shelf.ready
            while left > 0 and (place := ready.first) is not None:
                subscription = self.turns.first()
                if subscription is None:
                    break
                left -= 1
                if self._send(subscription, self.entity.shelf.at(place), now):
                    self.turns.use()
        finally:
            self._delivering = False
            memory.work -= _WORK_OF_A_DELIVERY * (most - left)
        if left <= 0 and self._has_more():
            self.resume_later()

    def _has_more(self) -> bool:
        """Return whether a message is ready for a receiver with credit, or a session for one that waits."""
        sessions = self.entity.sessions
        return bool(
            self.stirred
            or (sessions.waiting and sessions.first_free() is not None)
            or (self.entity.shelf.ready.first is not None and self.turns.first() is not None)
        )

    def run_backlog(self) -> None:
        """Continue with the backlog of the entity as far as this turn allows."""
        if not self.entity.backlog.run() and not self.entity.backlog.running:
            self.resume_later()

    def _deliver_session(self, session: Session, now: float, left: int) -> int:
        """Deliver messages of *session* to its receiver; return how many may follow in this turn."""
        subscription = session.holder
        while left > 0 and subscription is not None and (place := session.ready.first) is not None:
            link: Any = subscription.link
            if link is None or not link.attached or link.credit <= 0 or not link.writable:
                break
            left -= 1
            self._send(subscription, self.entity.shelf.at(place), now)
        return left

    def _send(self, subscription: Subscription, stored: Stored, now: float) -> bool:
        """Send a ready message; return whether that has used credit."""
        place = place_of(stored.number)
        session = self.entity.session_for(stored)
        if stored.expires_at <= now + EARLY_S:
            self.entity.outcomes.expire(stored)
            return False
        # Deliveries are not recorded in a store, so that the link is the peer's.
        link = cast("SendingLink", subscription.link)
        if (fault := self.entity.fault("receive")) is not None:
            link.detach(fault)
            return False
        token = self.entity.new_id()
        settled = subscription.settled
        until = inf if session is not None else now + self.entity.options.lock_s
        payload = delivered(stored) if settled else delivered(stored, token=token, until=until)
        try:
            delivery = link.send(
                payload, None if settled else stored, settled=settled, tag=token.bytes_le
            )
        except LocalProtocolError as error:
            # Without a link that takes no message of this size, others get the message.
            if exceeds_link(link, error):
                link.detach(Error(TOO_LARGE, error.description))
            return False
        stored.attempts += 1
        self.entity.counts.delivered += 1
        if settled:
            self.entity.counts.accepted += 1
            self.entity.remove(stored)
            return True
        self.entity.shelf.ready.discard(place)
        if session is not None:
            session.ready.discard(place)
            self.entity.sessions.refresh(session)
        self.entity.lock(stored, token, now, delivery)
        return True

    def resume_later(self) -> None:
        """Ask for a call of :meth:`resume`, unless one is to come."""
        if not self.unfinished:
            self.unfinished = True
            self.entity.on_unfinished()

    def resume(self) -> None:
        """Continue with work that was too much for a turn."""
        self.unfinished = False
        memory = self.entity.memory
        # Half of the turn is for times and deliveries, which would wait as long as requests follow each other.
        kept = max(0, memory.work) // 2
        memory.work -= kept
        self.run_backlog()
        memory.work += kept
        if self.entity.deleted:
            return
        if not self.entity.timing.run_due(self.entity.clock.wall()):
            self.resume_later()
        self.entity.finish()
        if not self.unfinished:
            for subscription in list(self.entity.consumers.values()):
                self.give_back(subscription.link)
