"""Sections before the body of requests and replies, which are encoded once where only a key differs."""

from __future__ import annotations

from typing import Any, Final, Literal

from ..message import JOIN_MAX, BodyKind, Message, write_data
from .composing import value_section

#: Fronts that are kept: those of so many addresses and content-types.
_KNOWN_MAX: Final = 1_024
#: Characters of an address, and of a content-type, with which fronts are kept.
_NAME_MAX: Final = 256
#: Characters of a key; longer ones have another encoding.
_KEY_MAX: Final = 255


class Envelopes:
    """Encoder of messages with a key, an address, a content-type, and no other properties.

    Args:
        key: Property that holds the key.
        address: Property that holds the address.
    """

    def __init__(
        self, key: Literal["message_id", "correlation_id"], address: Literal["to", "reply_to"]
    ) -> None:
        self._key = key
        self._address = address
        #: Octets before and after the key, by address, content-type, and length of the key.
        self._known: dict[tuple[str | None, str | None, int], tuple[bytes, bytes]] = {}

    def buffers(
        self,
        key: object,
        address: str | None,
        content_type: str | None,
        body: Any,
        kind: BodyKind | None,
    ) -> list[bytes]:
        """Return the encoded message as buffers, of which a large body is one.

        Raises:
            EncodeError: The body has no encoding.
        """
        if type(key) is str and kind != "sequence":
            known = self._known.get((address, content_type, len(key)))
            if known is None and len(key) <= _KEY_MAX:
                known = self._remembered(address, content_type, len(key))
            if known is not None and key.isascii():
                front = known[0] + key.encode() + known[1]
                if kind != "data":
                    return [front + value_section(body)]
                out = bytearray(front)
                write_data(out, len(body))
                if len(body) >= JOIN_MAX:
                    return [bytes(out), body]
                out += body
                return [bytes(out)]
        named: dict[str, Any] = {self._key: key, self._address: address}
        return Message(body, body_kind=kind, content_type=content_type, **named).buffers()

    def _remembered(
        self, address: str | None, content_type: str | None, size: int
    ) -> tuple[bytes, bytes] | None:
        """Encode the front for keys of *size* characters; None if it is not kept."""
        if not size or max(len(address or ""), len(content_type or "")) > _NAME_MAX:
            return None
        one, other = (
            Message(
                b"",
                content_type=content_type,
                **{self._key: each * size, self._address: address},  # type: ignore[arg-type]
            ).encode_front()
            for each in "ab"
        )
        at = next(index for index, octet in enumerate(one) if octet != other[index])
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        found = self._known[address, content_type, size] = (one[:at], one[at + size :])
        return found
