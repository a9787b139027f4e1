"""Answers that are written in pieces, so that a large one does not hold up the event loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: Octets that are written in one step; a piece that is larger is written as it is.
_STEP: Final = 64 * 1024


class InPieces(Response):
    """Answer with the body *pieces*, of which each is written in one step at most."""

    def __init__(
        self, pieces: Iterable[bytes], status: int = 200, *, media_type: str | None = None
    ) -> None:
        self._steps: list[bytes] = []
        step: list[bytes] = []
        size = 0
        for piece in pieces:
            if step and size + len(piece) > _STEP:
                self._steps.append(b"".join(step))
                step, size = [], 0
            step.append(piece)
            size += len(piece)
        self._steps.append(b"".join(step))
        length = str(sum(map(len, self._steps)))
        super().__init__(None, status, {"content-length": length}, media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer (ASGI)."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        *steps, last = self._steps
        for step in steps:
            await send({"type": "http.response.body", "body": step, "more_body": True})
        await send({"type": "http.response.body", "body": last})
