"""Refusals over HTTP: problem details (RFC 9457) with the condition of AMQP, and their status codes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from msgspec import json
from starlette.responses import Response

from amqp_rt.errors import AmqpError, AuthenticationFailed, ConnectionLost, DeadlineExceeded

MEDIA_TYPE: Final = "application/problem+json"

#: Condition of AMQP → status code. Others are mistakes of the request.
_STATUS: Final = {
    "amqp:internal-error": 500,
    "amqp:not-found": 404,
    # While the request ran; one that came later would have found no node.
    "amqp:resource-deleted": 404,
    "amqp:not-allowed": 409,
    "amqp:precondition-failed": 409,
    "amqp:resource-locked": 409,
    "amqp:resource-limit-exceeded": 429,
    "amqp:unauthorized-access": 403,
    "amqp:not-implemented": 501,
    "amqp:timeout": 504,
    "amqp:connection:forced": 503,
    "amqp:link:message-size-exceeded": 413,
}


class Problem(Exception):
    """Refusal of a request: status code, one sentence, and a condition of AMQP."""

    def __init__(
        self,
        status: int,
        detail: str,
        condition: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.condition = condition
        self.headers = dict(headers or {})

    @property
    def title(self) -> str:
        """Phrase of the status code."""
        return HTTPStatus(self.status).phrase

    def response(self) -> Response:
        """Return the answer in JSON."""
        content: dict[str, object] = {
            "type": "about:blank",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.condition is not None:
            content["condition"] = self.condition
        return Response(json.encode(content), self.status, self.headers, MEDIA_TYPE)


def problem_of(error: AmqpError) -> Problem:
    """Return the refusal for an operation that ended with *error*."""
    condition = str(error.condition)
    if isinstance(error, AuthenticationFailed):
        return Problem(401, "the login failed", condition)
    if isinstance(error, ConnectionLost):
        return Problem(503, f"the session has ended: {error.description}", condition)
    if isinstance(error, DeadlineExceeded):
        return Problem(504, error.description, condition)
    status = error.info.get("statusCode")
    if not isinstance(status, int) or not 400 <= status < 600:
        status = _STATUS.get(condition, 400)
    return Problem(int(status), error.description or condition, condition)
