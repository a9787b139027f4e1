"""Exceptions of the package, by the side at fault.

Every exception of the package derives from :class:`AmqpError`. Each carries ``condition``,
``description`` and ``info``, the fields of the ``error`` type of Part 2 §2.8.14, so an error
received from a peer, an error sent to a peer and an exception have the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

#: Characters of an error's text that are shown; a peer's text can be as long as a frame.
_SHOWN_MAX: Final = 1_000


def printable(text: str, most: int | None = None, *, keep: str = "") -> str:
    """Return *text* with invisible characters escaped, for a terminal or a log.

    Text from peers may contain escape sequences, which a terminal would follow, and line feeds,
    which would forge lines of a log.

    Args:
        text: The text, from a peer for example.
        most: Maximum number of characters kept. The middle is left out, since errors have the place
            at the beginning and the cause at the end.
        keep: Invisible characters to leave as they are.
    """
    if most is not None and len(text) > most:
        tail = most // 2
        text = f"{text[: most - tail]}…{text[len(text) - tail :]}"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )


class AmqpError(Exception):
    """Base of every error of this package (Part 2 §2.8.14 ``error``).

    Args:
        description: A sentence for people.
        condition: The symbol for programs, for example ``amqp:not-found``.
        info: Further data from the side that raised the error.
    """

    default_condition: ClassVar[str] = "amqp:internal-error"

    def __init__(
        self,
        description: str = "",
        *,
        condition: str | None = None,
        info: Mapping[object, object] | None = None,
    ) -> None:
        self.condition = self.default_condition if condition is None else condition
        self.description = description
        self.info: dict[object, object] = dict(info or {})
        super().__init__(description)

    def __str__(self) -> str:
        # Both may come from a peer; the attributes keep them unescaped.
        condition = printable(self.condition, _SHOWN_MAX)
        if self.description:
            return f"{printable(self.description, _SHOWN_MAX)} [{condition}]"
        return condition


class EncodeError(AmqpError):
    """A Python value that has no AMQP encoding, or none of the requested type."""

    default_condition = "amqp:invalid-field"


class DecodeError(AmqpError):
    """Malformed bytes (``amqp:decode-error``, Part 2 §2.8.15)."""

    default_condition = "amqp:decode-error"


class UnreadableReply(DecodeError):
    """A reply that is not of the type which its call expects.

    In a handler it is a failure like any other: the message that is being handled can be decoded.
    """


class ProtocolError(AmqpError):
    """Violation of the protocol's rules."""

    default_condition = "amqp:illegal-state"


class LocalProtocolError(ProtocolError):
    """Operation by this side that AMQP forbids. Nothing was sent."""


class CreditTooSmall(LocalProtocolError):
    """Message that exceeds the credit of its link in bytes. Nothing was sent; later credit may suffice."""


class RemoteProtocolError(ProtocolError):
    """Violation of the protocol by the peer.

    The link, session or connection at fault is closed with ``condition``.
    """


class ConnectFailed(AmqpError):
    """No connection could be made: the look-up, dialling, a handshake or the login failed."""

    default_condition = "amqp:connection:forced"


class AuthenticationFailed(ConnectFailed):
    """The peer did not accept our identity, or offers no mechanism that we may use."""

    default_condition = "amqp:unauthorized-access"


class ConnectionLost(AmqpError):
    """The connection ended while an operation still needed it.

    ``condition`` comes from the peer's Close, if there was one with an error.
    Unsettled deliveries of a lost connection are in doubt: the peer may or may
    not have received them.
    """

    default_condition = "amqp:connection:forced"


class SessionEnded(AmqpError):
    """The session ended while an operation still needed it (Part 2 §2.5.6)."""

    default_condition = "amqp:illegal-state"


class LinkDetached(AmqpError):
    """The link is detached: by the peer, or because its session ended (Part 2 §2.6.5)."""

    default_condition = "amqp:link:detach-forced"


class LinkEnded(LinkDetached):
    """The peer closed the link without an error, as a source does at its end."""


class LinkRefused(LinkDetached):
    """The peer refused to attach the link (Part 2 §2.6.3)."""

    default_condition = "amqp:not-found"


class DeliveryRejected(AmqpError):
    """The receiver rejected the message as invalid (Part 3 §3.4.3)."""

    default_condition = "amqp:internal-error"


class DeliveryNotAccepted(AmqpError):
    """The receiver returned the message: released or modified (Part 3 §3.4.4, §3.4.5)."""

    default_condition = "amqp:precondition-failed"


class TransactionRolledBack(AmqpError):
    """The transaction had no effect (Part 4 §4.3); the text has the cause of the rollback."""

    default_condition = "amqp:transaction:rollback"


class WouldBlock(AmqpError):
    """A ``_nowait`` call would have to wait: no credit, or too much is pending."""

    default_condition = "amqp:resource-limit-exceeded"


class DeadlineExceeded(AmqpError):
    """A call was not answered in time. Its handler was asked to stop."""

    default_condition = "amqp:timeout"


class CallFailed(AmqpError):
    """A request was answered with an error, whose symbol is in ``condition``."""


class CircuitOpen(AmqpError):
    """A call was not sent, because too many calls to its address failed; see ``policies.Breaker``.

    ``info["retry_after_s"]`` has the seconds until the next trial.
    """

    default_condition = "amqp_rt:circuit-open"


class Overloaded(AmqpError):
    """A call was not sent, because too many run at the same time; see ``policies.Bulkhead``."""

    default_condition = "amqp:resource-limit-exceeded"
