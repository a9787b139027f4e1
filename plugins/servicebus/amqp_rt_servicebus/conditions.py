"""Error conditions of Service Bus, and the errors that entities raise with them.

The SDKs choose the class of an exception by the condition; the status codes of answers at
``$management`` are in :mod:`.operations`.
"""

from __future__ import annotations

from typing import Final

from amqp_rt.errors import AmqpError

TIMEOUT: Final = "com.microsoft:timeout"
SERVER_BUSY: Final = "com.microsoft:server-busy"
ARGUMENT_ERROR: Final = "com.microsoft:argument-error"
ARGUMENT_OUT_OF_RANGE: Final = "com.microsoft:argument-out-of-range"
ENTITY_DISABLED: Final = "com.microsoft:entity-disabled"
MESSAGE_LOCK_LOST: Final = "com.microsoft:message-lock-lost"
MESSAGE_NOT_FOUND: Final = "com.microsoft:message-not-found"
SESSION_LOCK_LOST: Final = "com.microsoft:session-lock-lost"
SESSION_CANNOT_BE_LOCKED: Final = "com.microsoft:session-cannot-be-locked"
#: Condition with which the SDKs reject a message that they dead-letter.
DEAD_LETTER: Final = "com.microsoft:dead-letter"

NOT_ALLOWED: Final = "amqp:not-allowed"
TOO_LARGE: Final = "amqp:link:message-size-exceeded"
NO_ROOM: Final = "amqp:resource-limit-exceeded"


def message_lock_lost() -> AmqpError:
    """Return the error for a message whose lock has ended."""
    return AmqpError(
        "the message is no longer locked by this receiver: its lock has expired, or it was settled"
        " already; receive it again",
        condition=MESSAGE_LOCK_LOST,
    )


def session_lock_lost(session_id: str) -> AmqpError:
    """Return the error for a session whose lock has ended."""
    return AmqpError(
        f"the session {session_id!r:.200} is not locked by this receiver any more: accept it again",
        condition=SESSION_LOCK_LOST,
    )


def session_cannot_be_locked(session_id: str) -> AmqpError:
    """Return the error for a session that another receiver holds."""
    return AmqpError(
        f"the session {session_id!r:.200} is locked by another receiver",
        condition=SESSION_CANNOT_BE_LOCKED,
    )


def message_not_found(number: int) -> AmqpError:
    """Return the error for a sequence number at which there is no message of the state asked for."""
    return AmqpError(
        f"there is no such message with the sequence number {number}, or it is locked",
        condition=MESSAGE_NOT_FOUND,
    )


def not_allowed(description: str) -> AmqpError:
    """Return the error for a request that the entity does not allow."""
    return AmqpError(description, condition=NOT_ALLOWED)


def out_of_range(description: str) -> AmqpError:
    """Return the error for an argument that is out of its range."""
    return AmqpError(description, condition=ARGUMENT_OUT_OF_RANGE)
