"""Outcomes that handlers raise instead of returning them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ..errors import AmqpError
from ..outcomes import RELEASED, Error, Modified, Outcome, Rejected

#: Outcome of a message whose handler raised, or a function from the exception to it.
OnError: TypeAlias = Outcome | Callable[[Exception], Outcome]


class RaisedOutcome(AmqpError):
    """Outcome that a handler raises instead of returning it (Part 3 §3.4)."""

    @property
    def outcome(self) -> Outcome:
        """Outcome that the sender gets."""
        raise NotImplementedError


class Reject(RaisedOutcome):
    """Outcome of an invalid message, which will never be processed (Part 3 §3.4.3). Raise it."""

    default_condition = "amqp:precondition-failed"

    @property
    def outcome(self) -> Outcome:
        return Rejected(Error.of(self))


class Release(RaisedOutcome):
    """Outcome of a message not processed and not changed (Part 3 §3.4.4).

    Raise it from a handler if another attempt may succeed.
    """

    default_condition = "amqp:not-allowed"

    @property
    def outcome(self) -> Outcome:
        return RELEASED


class Modify(RaisedOutcome):
    """Outcome of a message not processed, with changes for its next delivery (Part 3 §3.4.5).

    Raise it from a handler.

    Args:
        description: Used in the log only, since the outcome has no field for it.
        failed: The attempt counts: ``delivery-count`` is increased.
        undeliverable_here: The message is not to be sent to this link again.
        annotations: Entries to merge into the message annotations.
    """

    default_condition = "amqp:not-allowed"

    def __init__(
        self,
        description: str = "",
        *,
        failed: bool = True,
        undeliverable_here: bool = False,
        annotations: Mapping[object, object] | None = None,
    ) -> None:
        super().__init__(description)
        self.failed = failed
        self.undeliverable_here = undeliverable_here
        self.annotations = annotations

    @property
    def outcome(self) -> Outcome:
        return Modified(self.failed, self.undeliverable_here, self.annotations)
