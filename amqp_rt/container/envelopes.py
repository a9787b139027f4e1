"""Sections before the body of requests and replies, which are encoded once where only a key differs.

mypyc compiles this module: each request passes through it at both ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from ..codec.whole_messages import data_opening, value_section
from ..message import BodyKind, Message
from .payloads import AS_THEY_ARE, encode_payload

if TYPE_CHECKING:
    from .codecs import Codecs

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

    __slots__ = ("_address", "_key", "_known")

    def __init__(
        self, key: Literal["message_id", "correlation_id"], address: Literal["to", "reply_to"]
    ) -> None:
        self._key = key
        self._address = address
        #: Octets before and after the key, by address, content-type, and length of the key.
        self._known: dict[tuple[str | None, str | None, int], tuple[bytes, bytes]] = {}

    def encode(
        self, key: object, address: str | None, payload: object, codecs: Codecs | None
    ) -> bytes:
        """Return the encoded message of *payload*, whose type determines body and content-type.

        Raises:
            EncodeError: The payload has no encoding.
        """
        content_type: str | None = None
        body: Any = payload
        kind: BodyKind | None
        # As encode_body() does, without another call for each request and reply.
        if codecs is None and type(payload) is bytes:
            kind = "data"
        elif codecs is None and type(payload) in AS_THEY_ARE:
            kind = "value"
        else:
            content_type, body, kind = encode_payload(payload, None, codecs)
        if type(key) is str and kind != "sequence":
            known = self._known.get((address, content_type, len(key)))
            if known is None and len(key) <= _KEY_MAX:
                known = self._remembered(address, content_type, len(key))
            if known is not None and key.isascii():
                if kind != "data":
                    return b"".join((known[0], key.encode(), known[1], value_section(body)))
                # One copy of the body, however large it is.
                return b"".join((known[0], key.encode(), known[1], data_opening(len(body)), body))
        named: dict[str, Any] = {self._key: key, self._address: address}
        return Message(body, body_kind=kind, content_type=content_type, **named).encode()

    def _remembered(
        self, address: str | None, content_type: str | None, size: int
    ) -> tuple[bytes, bytes] | None:
        """Encode the front for keys of *size* characters; None if it is not kept."""
        if not size or max(len(address or ""), len(content_type or "")) > _NAME_MAX:
            return None
        one = self._front("a" * size, address, content_type)
        other = self._front("b" * size, address, content_type)
        at = 0
        while one[at] == other[at]:
            at += 1
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        found = (one[:at], one[at + size :])
        self._known[address, content_type, size] = found
        return found

    def _front(self, key: str, address: str | None, content_type: str | None) -> bytes:
        named: dict[str, Any] = {self._key: key, self._address: address}
        return Message(b"", content_type=content_type, **named).encode_front()
