"""Ways of messages from one entity to others: forwarding, dead letters, copies for subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from amqp_rt.limits import DEFAULT_LIMITS, Limits

from .backlog import WORK_OF_A_CALL
from .bounds import DEFAULT_BOUNDS
from .entity import Failure
from .fan_out import FanOut, Travel
from .nodes import AnyNode, QueueNode, TopicNode
from .stored import Stored

#: Why a message was not forwarded: reasons of transfer dead letters.
NOT_FOUND: Final = "MessagingEntityNotFoundException"
DISABLED: Final = "MessagingEntityDisabledException"
FULL: Final = "QuotaExceededException"
TOO_MANY_COPIES: Final = "MaxTransferCopiesExceeded"


class Router:
    """Ways between the entities of one namespace.

    Args:
        find: Returns the queue or topic of a name, None if there is none.
        limits: Bounds of the codec.
        copies_max: Copies of one message that may result on all its ways together; a topic that it reaches after
            that does not get it. Subscriptions that forward to their own topic would multiply it otherwise.
    """

    def __init__(
        self,
        find: Callable[[str], QueueNode | TopicNode | None],
        limits: Limits = DEFAULT_LIMITS,
        *,
        copies_max: int = DEFAULT_BOUNDS.copies_max,
    ) -> None:
        self._find = find
        self._limits = limits
        self._copies_max = copies_max
        #: Ways of the message that is being put into an entity, None if it comes from a client.
        self._travel: Travel | None = None

    def wire(self, node: AnyNode) -> None:
        """Let the messages of *node* go where its declaration says, from now on."""
        entity = node.entity
        if isinstance(node, TopicNode):
            if entity.forward is None:
                # Its messages may be waiting for a turn when its declaration changes.
                fan_out = FanOut(node, self._enter, self._limits)
                entity.forward = lambda stored: self._fan_out(fan_out, stored)
                entity.forward_counts = False
            return
        entity.forward = self._way_to(node.declared.forward_to)
        dead_letters = entity.dead_letters
        if dead_letters is not None:
            dead_letters.forward = self._way_to(node.declared.forward_dead_lettered_messages_to)

    def _way_to(self, target: str | None) -> Callable[[Stored], Failure | None] | None:
        if target is None:
            return None
        return lambda stored: self._forward(target, stored)

    def _forward(self, target: str, stored: Stored) -> Failure | None:
        """Put *stored* into the entity *target*; return why that is impossible."""
        # The target is looked up for each message: it may be deleted and declared again.
        node = self._find(target)
        if node is None:
            return NOT_FOUND, f"the messaging entity {target!r} could not be found"
        if node.declared.status in ("Disabled", "SendDisabled"):
            return DISABLED, f"the messaging entity {target!r} is disabled for sending"
        if not node.entity.fits(stored.size):
            return FULL, f"the messaging entity {target!r} has no room"
        travel = self._travel or Travel()
        if isinstance(node, TopicNode) and travel.copies + travel.expected >= self._copies_max:
            return (
                TOO_MANY_COPIES,
                f"the message has {self._copies_max} copies already, and topic {target!r} would make more",
            )
        node.entity.memory.work -= WORK_OF_A_CALL
        self._enter(travel, lambda: node.entity.receive(stored))
        return None

    def _enter(self, travel: Travel, call: Callable[[], object]) -> None:
        """Call *call*, which puts a message on its way; what it forwards is on the same way."""
        outer, self._travel = self._travel, travel
        try:
            call()
        finally:
            self._travel = outer

    def _fan_out(self, fan_out: FanOut, stored: Stored) -> Failure | None:
        """Put *stored* before the rules of a topic. That never fails as a whole."""
        fan_out.put(stored, self._travel or Travel())
        return None
