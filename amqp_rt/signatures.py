"""Signatures of messages in their footers (Part 3 §3.2.9)."""

from __future__ import annotations

import hmac
from typing import Final, Literal, TypeAlias

from .limits import DEFAULT_LIMITS, Limits
from .message import Message
from .values import Symbol

#: Hashes for :func:`sign` and :func:`verify`. The caller chooses one; the message must not.
Algorithm: TypeAlias = Literal["sha256", "sha384", "sha512"]
_ALGORITHMS: Final = ("sha256", "sha384", "sha512")


def sign(message: Message, key: bytes, *, algorithm: Algorithm = "sha256") -> None:
    """Put an HMAC of the bare message into the footer, under ``x-opt-hmac-<algorithm>`` (§3.2.9).

    The signature covers the bare message as it is now: sign last.
    """
    entry = _hmac_entry(key, algorithm)
    digest = hmac.digest(key, message.bare, algorithm)
    message.footer = {**message.footer, entry: digest}


def verify(
    message: Message | bytes,
    key: bytes,
    *,
    algorithm: Algorithm = "sha256",
    limits: Limits = DEFAULT_LIMITS,
) -> bool:
    """Return whether the footer holds the HMAC of the bare message under *key* (:func:`sign`).

    Raises:
        DecodeError: *message* is malformed.
    """
    entry = _hmac_entry(key, algorithm)
    if not isinstance(message, Message):
        message = Message.decode(message, limits)
    digest = message.footer.get(entry)
    if not isinstance(digest, bytes):
        return False
    return hmac.compare_digest(digest, hmac.digest(key, message.bare, algorithm))


def _hmac_entry(key: bytes, algorithm: str) -> Symbol:
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"sign with one of {', '.join(_ALGORITHMS)}, not {algorithm!r}")
    if not key:
        raise ValueError("an empty key signs nothing")
    return Symbol(f"x-opt-hmac-{algorithm}")
