"""What can go wrong, and whose fault it was.

Every exception of the package derives from :class:`AmqpError`. Each carries an
:class:`ErrorInfo`-like triple (``condition``, ``description``, ``info``) in the
terms of Part 2 §2.8.14, so that an error heard from a peer, an error told to a
peer and an exception in between are one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

#: Characters of an error's text that are shown; a peer may say as many as fit into a frame.
_SHOWN_MAX: Final = 1_000


def printable(text: str, most: int | None = None, *, keep: str = "") -> str:
    """Return *text* for a terminal or a log: what is no visible character is written out.

    What peers say may have escape sequences in it, which a terminal would follow, and line feeds,
    which would forge lines of a log.

    Args:
        text: Words of a peer, for example.
        most: Characters that stay of it. The middle is left out, since errors have the place at the
            beginning and the cause at the end.
        keep: Characters that stay although they are not visible.
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
        info: Whatever else the side that raised it wanted to say.
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
        # Both may be a peer's words; ``description`` and ``condition`` have them as they are.
        condition = printable(self.condition, _SHOWN_MAX)
        if self.description:
            return f"{printable(self.description, _SHOWN_MAX)} [{condition}]"
        return condition


class EncodeError(AmqpError):
    """A Python value has no AMQP encoding, or not the one asked for."""

    default_condition = "amqp:invalid-field"


class DecodeError(AmqpError):
    """Bytes are not what they should be (``amqp:decode-error``, Part 2 §2.8.15)."""

    default_condition = "amqp:decode-error"


class ProtocolError(AmqpError):
    """The rules of the protocol were broken."""

    default_condition = "amqp:illegal-state"


class LocalProtocolError(ProtocolError):
    """You asked for something AMQP forbids. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules. What closes, closes with ``condition``."""


class ConnectFailed(AmqpError):
    """No connection could be made: name look-up, refused, handshake, login."""

    default_condition = "amqp:connection:forced"


class AuthenticationFailed(ConnectFailed):
    """The peer did not accept our identity, or offers no mechanism that we may use."""

    default_condition = "amqp:unauthorized-access"


class ConnectionLost(AmqpError):
    """The connection ended while something still needed it.

    ``condition`` is what the peer said in its Close, if it said anything.
    Unsettled deliveries of a lost connection are in doubt: the peer may or may
    not have seen them.
    """

    default_condition = "amqp:connection:forced"


class SessionEnded(AmqpError):
    """The session ended while something still needed it (Part 2 §2.5.6)."""

    default_condition = "amqp:illegal-state"


class LinkDetached(AmqpError):
    """The link is gone: the peer detached it, or its session ended (Part 2 §2.6.5)."""

    default_condition = "amqp:link:detach-forced"


class LinkEnded(LinkDetached):
    """The peer closed the link without an error, as a source does that has come to its end."""


class LinkRefused(LinkDetached):
    """The peer would not attach the link (Part 2 §2.6.3)."""

    default_condition = "amqp:not-found"


class DeliveryRejected(AmqpError):
    """The receiver rejected the message as invalid (Part 3 §3.4.3)."""

    default_condition = "amqp:internal-error"


class DeliveryNotAccepted(AmqpError):
    """The receiver gave the message back: released or modified (Part 3 §3.4.4, §3.4.5)."""

    default_condition = "amqp:precondition-failed"


class TransactionRolledBack(AmqpError):
    """Nothing of a transaction has happened (Part 4 §4.3): who gave it up, and why, is in the text."""

    default_condition = "amqp:transaction:rollback"


class WouldBlock(AmqpError):
    """A ``_nowait`` call would have to wait: no credit, or too much is pending."""

    default_condition = "amqp:resource-limit-exceeded"


class DeadlineExceeded(AmqpError):
    """A call was not answered in time. Its handler was told to stop."""

    default_condition = "amqp:timeout"


class CallFailed(AmqpError):
    """A request was answered with an error; ``condition`` says which."""
