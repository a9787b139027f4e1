"""Faults of the peer on the wire, with the codes that answer them."""

from __future__ import annotations

from .layouts.codes import CloseCode, ErrorCode


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
    ) -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.class_code = class_code
        self.command_code = command_code
        self.field_index = field_index
        self.channel = channel
