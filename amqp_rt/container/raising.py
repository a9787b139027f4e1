"""Outcomes that handlers raise instead of returning them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, TypeGuard

from ..errors import AmqpError, DecodeError, UnreadableReply
from ..limits import SECONDS_MAX
from ..outcomes import RELEASED, Error, Modified, Outcome, Rejected
from ..values import Symbol

#: Outcome of a message whose handler raised, or a function from the exception to it.
OnError: TypeAlias = Outcome | Callable[[Exception], Outcome]


#: Message annotation of an outcome that requests a pause before the next delivery, in milliseconds.
PAUSE: Final = Symbol("x-opt-delivery-delay")


def with_pause(
    annotations: Mapping[object, object] | None, delay_s: float | None, *, failed: bool
) -> Mapping[object, object] | None:
    """Return *annotations* of an outcome with the request for a pause of *delay_s* seconds.

    Raises:
        ValueError: *delay_s* is negative or too long, or *failed* is False.
    """
    if delay_s is None:
        return annotations
    if not 0 <= delay_s <= SECONDS_MAX:
        raise ValueError(f"delay_s is a number of seconds, 0 to {SECONDS_MAX:g}, not {delay_s!r}")
    if not failed:
        raise ValueError("delay_s is for failed messages: released ones are available at once")
    return {**(annotations or {}), PAUSE: round(delay_s * 1000)}


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
        delay_s: Seconds before the message is delivered again. A queue of this broker keeps it for that time, over
            restarts; for other peers the container holds it, for at most ``Limits.retry_held_max_s``.

    Raises:
        ValueError: *delay_s* is negative or too long, or *failed* is False: only failed messages wait.
    """

    default_condition = "amqp:not-allowed"

    def __init__(
        self,
        description: str = "",
        *,
        failed: bool = True,
        undeliverable_here: bool = False,
        annotations: Mapping[object, object] | None = None,
        delay_s: float | None = None,
    ) -> None:
        super().__init__(description)
        self.failed = failed
        self.undeliverable_here = undeliverable_here
        self.annotations = with_pause(annotations, delay_s, failed=failed)

    @property
    def outcome(self) -> Outcome:
        return Modified(self.failed, self.undeliverable_here, self.annotations)


def is_undecodable(error: BaseException | None) -> TypeGuard[DecodeError]:
    """Return whether *error* says that the message itself cannot be decoded, now or later.

    A reply to the handler's own call that cannot be decoded says nothing about the message.
    """
    return isinstance(error, DecodeError) and not isinstance(error, UnreadableReply)
