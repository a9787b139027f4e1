"""Faults of the peer on the wire, with the codes that answer them."""

from __future__ import annotations

from typing import Final

from amqp_rt.fronts import AmqpError, Error

from .layouts.codes import CloseCode, ErrorCode

#: Conditions of AMQP 1.0 → error codes. All others are internal errors.
_CODES: Final[dict[str, ErrorCode]] = {
    "amqp:not-found": ErrorCode.NOT_FOUND,
    "amqp:resource-deleted": ErrorCode.RESOURCE_DELETED,
    "amqp:unauthorized-access": ErrorCode.UNAUTHORIZED_ACCESS,
    "amqp:resource-locked": ErrorCode.RESOURCE_LOCKED,
    "amqp:precondition-failed": ErrorCode.PRECONDITION_FAILED,
    "amqp:invalid-field": ErrorCode.INVALID_ARGUMENT,
    "amqp:illegal-state": ErrorCode.ILLEGAL_STATE,
    "amqp:link:message-size-exceeded": ErrorCode.RESOURCE_LIMIT_EXCEEDED,
    "amqp:decode-error": ErrorCode.COMMAND_INVALID,
    "amqp:resource-limit-exceeded": ErrorCode.RESOURCE_LIMIT_EXCEEDED,
    "amqp:not-allowed": ErrorCode.NOT_ALLOWED,
    "amqp:not-implemented": ErrorCode.NOT_IMPLEMENTED,
}


class ConnectionFault(Exception):
    """Fault of framing or of a control: answer ``connection.close`` with *code*.

    Args:
        text: Explanation for ``reply-text``.
        code: The close code.
    """

    def __init__(self, text: str, code: CloseCode = CloseCode.FRAMING_ERROR) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class CommandFault(Exception):
    """Fault of one command: answer ``execution.exception`` with *code*, then ``session.detach``.

    Args:
        text: Explanation for ``description``.
        code: The error code.
        class_code: Class of the command; None if its octets do not tell.
        command_code: Code of the command within its class; None likewise.
        field_index: Zero-based position of the faulty field; None if there is no single one.
        channel: Channel of the command, where the fault was found in its frames.
        field: Name of the faulty field, instead of its position; empty if there is no single one.
    """

    def __init__(
        self,
        text: str,
        code: ErrorCode = ErrorCode.COMMAND_INVALID,
        *,
        class_code: int | None = None,
        command_code: int | None = None,
        field_index: int | None = None,
        channel: int | None = None,
        field: str = "",
    ) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.class_code = class_code
        self.command_code = command_code
        self.field_index = field_index
        self.channel = channel
        self.field = field

    @classmethod
    def of(cls, error: AmqpError | Error, *, field: str = "") -> CommandFault:
        """Convert an error of the broker to a fault of a command, or of its *field*."""
        condition = str(error.condition)
        code = _CODES.get(condition, ErrorCode.INTERNAL_ERROR)
        return cls(error.description or condition, code, field=field)


#: Close codes → conditions of AMQP 1.0.
_CLOSE_CONDITIONS: Final[dict[int, str]] = {
    CloseCode.CONNECTION_FORCED: "amqp:connection:forced",
    CloseCode.INVALID_PATH: "amqp:not-found",
    CloseCode.FRAMING_ERROR: "amqp:connection:framing-error",
}
#: Octets of a str8.
_REPLY_TEXT_MAX: Final = 255


def condition_of(code: int | None) -> str:
    """Return the condition of AMQP 1.0 for a close code."""
    return _CLOSE_CONDITIONS.get(code or 0, "amqp:internal-error")


def close_code_of(error: Error) -> CloseCode:
    """Return the close code for *error*, which ends a connection."""
    for code, condition in _CLOSE_CONDITIONS.items():
        if condition == str(error.condition):
            return CloseCode(code)
    return CloseCode.CONNECTION_FORCED


def reply_text(text: str) -> str:
    """Return *text* cut to the size of ``reply-text``."""
    octets = text.encode("utf-8", "replace")
    return octets[:_REPLY_TEXT_MAX].decode("utf-8", "ignore")
