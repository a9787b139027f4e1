"""Content of classes file and stream that is published, until every queue has returned an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from amqp_rt.fronts import Error

from .codec import write_command
from .layouts import (
    FilePublish,
    FileReturn,
    RejectCode,
    ReturnCode,
    StreamPublish,
    StreamReturn,
)
from .publishing import Publisher, Transfer

_TOO_LARGE: Final = "amqp:link:message-size-exceeded"
_NO_ROOM: Final = "amqp:resource-limit-exceeded"
#: Reasons for which content is returned → code and text.
_RETURNS: Final = {
    RejectCode.UNSPECIFIED: (ReturnCode.CONTENT_TOO_LARGE, "the content is too large for a queue"),
    RejectCode.UNROUTABLE: (ReturnCode.NO_ROUTE, "no queue takes the content"),
    RejectCode.IMMEDIATE: (
        ReturnCode.NO_CONSUMERS,
        "a queue of the content has no consumer that is ready",
    ),
}


class ContentTransfer(Transfer):
    """Published content.

    Args:
        publisher: The publisher of its session.
        number: Id of the command.
        command: The command.
        header: Header segment of the content.
        body: Its body, in pieces.
    """

    __slots__ = ("body", "command", "header", "too_large")

    def __init__(
        self,
        publisher: Publisher,
        number: int,
        command: FilePublish | StreamPublish,
        header: bytes | None,
        body: Sequence[bytes],
    ) -> None:
        super().__init__(
            publisher, number, explicit=False, discard=False, awaited=0, code=command.CODE
        )
        self.command = command
        self.header = header
        self.body = body
        self.too_large = False

    def on_refused(self, error: Error | None) -> None:
        """Drop what may be lost or is returned: content too large for a queue, packets without room; else fail."""
        condition = "" if error is None else str(error.condition)
        is_file = isinstance(self.command, FilePublish)
        if condition == _TOO_LARGE and (self._is_returned or not is_file):
            self.too_large = True
        elif condition != _NO_ROOM or is_file:
            super().on_refused(error)

    @property
    def _is_returned(self) -> bool:
        return self.command.mandatory or self.command.immediate

    def on_dropped(self, code: RejectCode) -> None:
        """Return the content, if it was published as mandatory or immediate."""
        command = self.command
        if not self._is_returned:
            return
        reply_code, text = _RETURNS[RejectCode.UNSPECIFIED if self.too_large else code]
        kind = FileReturn if isinstance(command, FilePublish) else StreamReturn
        returned = kind(
            reply_code=reply_code,
            reply_text=text,
            exchange=command.exchange,
            routing_key=command.routing_key,
        )
        self.publisher.give_back((write_command(returned), self.header, self.body))
