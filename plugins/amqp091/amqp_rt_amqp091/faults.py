"""Reply codes, and faults as exceptions (0-9-1 §1.2)."""

from __future__ import annotations

from typing import Final

from amqp_rt.fronts import AmqpError, Error

SUCCESS: Final = 200
CONTENT_TOO_LARGE: Final = 311
NO_ROUTE: Final = 312
NO_CONSUMERS: Final = 313
CONNECTION_FORCED: Final = 320
INVALID_PATH: Final = 402
ACCESS_REFUSED: Final = 403
NOT_FOUND: Final = 404
RESOURCE_LOCKED: Final = 405
PRECONDITION_FAILED: Final = 406
FRAME_ERROR: Final = 501
SYNTAX_ERROR: Final = 502
COMMAND_INVALID: Final = 503
CHANNEL_ERROR: Final = 504
UNEXPECTED_FRAME: Final = 505
RESOURCE_ERROR: Final = 506
NOT_ALLOWED: Final = 530
NOT_IMPLEMENTED: Final = 540
INTERNAL_ERROR: Final = 541

#: Codes that end a channel; the others end the connection (§4.8).
SOFT: Final = frozenset(
    {
        *(CONTENT_TOO_LARGE, NO_CONSUMERS, ACCESS_REFUSED, NOT_FOUND),
        *(RESOURCE_LOCKED, PRECONDITION_FAILED),
    }
)

NAMES: Final[dict[int, str]] = {
    SUCCESS: "REPLY_SUCCESS",
    CONTENT_TOO_LARGE: "CONTENT_TOO_LARGE",
    NO_ROUTE: "NO_ROUTE",
    NO_CONSUMERS: "NO_CONSUMERS",
    CONNECTION_FORCED: "CONNECTION_FORCED",
    INVALID_PATH: "INVALID_PATH",
    ACCESS_REFUSED: "ACCESS_REFUSED",
    NOT_FOUND: "NOT_FOUND",
    RESOURCE_LOCKED: "RESOURCE_LOCKED",
    PRECONDITION_FAILED: "PRECONDITION_FAILED",
    FRAME_ERROR: "FRAME_ERROR",
    SYNTAX_ERROR: "SYNTAX_ERROR",
    COMMAND_INVALID: "COMMAND_INVALID",
    CHANNEL_ERROR: "CHANNEL_ERROR",
    UNEXPECTED_FRAME: "UNEXPECTED_FRAME",
    RESOURCE_ERROR: "RESOURCE_ERROR",
    NOT_ALLOWED: "NOT_ALLOWED",
    NOT_IMPLEMENTED: "NOT_IMPLEMENTED",
    INTERNAL_ERROR: "INTERNAL_ERROR",
}

#: Conditions of AMQP 1.0, which the broker uses → reply codes.
_CODES: Final[dict[str, int]] = {
    "amqp:not-found": NOT_FOUND,
    "amqp:resource-deleted": NOT_FOUND,
    "amqp:unauthorized-access": ACCESS_REFUSED,
    "amqp:resource-locked": RESOURCE_LOCKED,
    "amqp:precondition-failed": PRECONDITION_FAILED,
    "amqp:invalid-field": PRECONDITION_FAILED,
    "amqp:illegal-state": PRECONDITION_FAILED,
    "amqp:link:message-size-exceeded": CONTENT_TOO_LARGE,
    "amqp:decode-error": SYNTAX_ERROR,
    "amqp:resource-limit-exceeded": RESOURCE_ERROR,
    "amqp:not-allowed": NOT_ALLOWED,
    "amqp:not-implemented": NOT_IMPLEMENTED,
    "amqp:connection:forced": CONNECTION_FORCED,
    "amqp:connection:framing-error": FRAME_ERROR,
}
#: Reply codes received from a peer → conditions of AMQP 1.0.
_CONDITIONS: Final[dict[int, str]] = {
    CONTENT_TOO_LARGE: "amqp:link:message-size-exceeded",
    CONNECTION_FORCED: "amqp:connection:forced",
    INVALID_PATH: "amqp:not-found",
    ACCESS_REFUSED: "amqp:unauthorized-access",
    NOT_FOUND: "amqp:not-found",
    RESOURCE_LOCKED: "amqp:resource-locked",
    PRECONDITION_FAILED: "amqp:precondition-failed",
    FRAME_ERROR: "amqp:connection:framing-error",
    SYNTAX_ERROR: "amqp:decode-error",
    RESOURCE_ERROR: "amqp:resource-limit-exceeded",
    NOT_ALLOWED: "amqp:not-allowed",
    NOT_IMPLEMENTED: "amqp:not-implemented",
}
_TEXT_MAX: Final = 255


class Fault(Exception):
    """A fault of the peer, or an error of the broker; closes the channel or connection."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @classmethod
    def of(cls, error: AmqpError | Error) -> Fault:
        """Convert an error of the broker to a fault of this protocol."""
        return cls(code_of(str(error.condition)), error.description or str(error.condition))


def code_of(condition: str) -> int:
    """Return the reply code for a condition of AMQP 1.0."""
    return _CODES.get(condition, INTERNAL_ERROR)


def condition_of(code: int) -> str:
    """Return the condition of AMQP 1.0 for a reply code."""
    return _CONDITIONS.get(code, "amqp:internal-error")


def reply_text(code: int, text: str) -> str:
    """Return the text for ``reply-text``, cut to the size of a short string."""
    said = f"{NAMES[code]} - {text}" if text else NAMES[code]
    octets = said.encode("utf-8", "surrogateescape")
    return said if len(octets) <= _TEXT_MAX else octets[:_TEXT_MAX].decode("utf-8", "ignore")
