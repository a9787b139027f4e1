"""Messages as octets: their sections, encoded and split."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from amqp_rt.net.traces.octets import CompositeValue, Malformed, decode, encode

from .verdicts import Departs, require

#: Descriptor codes of the sections (Part 3 §3.2).
HEADER_SECTION: Final = 0x70
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
SEQUENCE: Final = 0x76
VALUE: Final = 0x77
FOOTER: Final = 0x78


def section(code: int, content: bytes) -> bytes:
    """Encode a section of a message; *content* is an encoded value."""
    return b"\x00\x53" + bytes((code,)) + content


def message(body: str, *before: bytes) -> bytes:
    """Encode a message with a string as its body, and sections *before* it."""
    return b"".join(before) + section(VALUE, encode("string", body))


def header(**fields: Any) -> bytes:
    """Encode a header section.

    Fields are ``durable``, ``priority``, ``ttl``, ``first_acquirer`` and ``delivery_count``.
    """
    kinds = ("durable:boolean", "priority:ubyte", "ttl:uint", "first_acquirer:boolean", "delivery_count:uint")  # fmt: skip
    items = [encode(kind, fields.get(name)) for name, _, kind in (each.partition(":") for each in kinds)]  # fmt: skip
    return section(HEADER_SECTION, encode("list", items))


class Sections(Struct):
    """A message split into its sections."""

    #: Descriptor code → value.
    values: dict[int, Any]
    #: Descriptor codes and octets, in order.
    octets: list[tuple[int, bytes]]

    def bare(self) -> bytes:
        """Return the octets of the bare message (Part 3 §3.2)."""
        return b"".join(octets for code, octets in self.octets if PROPERTIES <= code <= VALUE)

    def body(self) -> bytes:
        """Return the octets of the body."""
        return b"".join(octets for code, octets in self.octets if DATA <= code <= VALUE)

    def header(self, index: int, default: Any) -> Any:
        """Return a field of the header, or *default*."""
        items = self.values.get(HEADER_SECTION) or []
        value = items[index] if index < len(items) else None
        return default if value is None else value


def sections_of(payload: bytes) -> Sections:
    """Split a message into its sections.

    Raises:
        Departs: It is malformed.
    """
    found = Sections({}, [])
    at = 0
    while at < len(payload):
        try:
            value, end = decode(payload, at)
        except Malformed as error:
            raise Departs(f"a message comes that cannot be read: {error}") from None
        code = _code(value)
        require(HEADER_SECTION <= code <= FOOTER, f"a message comes with no section at octet {at}")
        found.values[code] = (
            value.fields.get("value") if isinstance(value, CompositeValue) else None
        )
        found.octets.append((code, payload[at:end]))
        at = end
    return found


_SYMBOLS: Final = {
    "amqp:header:list": HEADER_SECTION,
    "amqp:delivery-annotations:map": 0x71,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}


def _code(value: Any) -> int:
    if not isinstance(value, CompositeValue):
        return 0
    return int(value.name) if value.name.isdigit() else _SYMBOLS.get(value.name, 0)


def body_of(payload: bytes) -> Any:
    """Return the body of a message made by :func:`message`."""
    return sections_of(payload).values.get(VALUE)
