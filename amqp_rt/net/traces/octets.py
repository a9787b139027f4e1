"""A second, small codec of AMQP 1.0, which can produce wrong octets on purpose.

The scripted peer and the conformance kit write and read with it; drawings and replays of traces read with
it. It shares no code with the codec of the package, so that an error in one is not hidden by the same error
in the other: it imports nothing of the package. Types and fields have their names in the standard, with
underscores; no rules of the protocol are checked, and the code is not optimised.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

__all__ = [
    "FRAMES",
    "HEADER",
    "SASL_HEADER",
    "TYPES",
    "CompositeValue",
    "Frame",
    "Malformed",
    "Raw",
    "Splitter",
    "composite",
    "decode",
    "encode",
    "encode_frame",
]

#: Protocol headers (Part 2 §2.2, Part 5 §5.3.1).
HEADER: Final = b"AMQP\x00\x01\x00\x00"
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"

#: Largest frame that is read; larger sizes are taken for garbage. At most this much input is held.
_FRAME_MAX: Final = 64 * 1024 * 1024
#: Deepest nesting of values that is read.
_DEPTH_MAX: Final = 64

_CAPABILITIES: Final = "offered-capabilities:symbol* desired-capabilities:symbol* properties:map"
_TERMINUS: Final = (
    "address:any durable:uint expiry-policy:symbol timeout:uint dynamic:boolean "
    "dynamic-node-properties:map"
)


def _fields(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name.replace("-", "_"), kind)
        for name, _, kind in (field.partition(":") for field in text.split())
    )


#: Composite types: name → descriptor and fields, each with its type (Parts 2 to 5). ``symbol*`` is
#: one symbol or several.
TYPES: Final[Mapping[str, tuple[int, tuple[tuple[str, str], ...]]]] = {
    name: (code, _fields(fields))
    for name, code, fields in (
        (
            "open",
            0x10,
            "container-id:string hostname:string max-frame-size:uint channel-max:ushort "
            "idle-time-out:uint outgoing-locales:symbol* incoming-locales:symbol* " + _CAPABILITIES,
        ),
        (
            "begin",
            0x11,
            "remote-channel:ushort next-outgoing-id:uint incoming-window:uint "
            "outgoing-window:uint handle-max:uint " + _CAPABILITIES,
        ),
        (
            "attach",
            0x12,
            "name:string handle:uint role:role snd-settle-mode:ubyte rcv-settle-mode:ubyte "
            "source:source target:target unsettled:map incomplete-unsettled:boolean "
            "initial-delivery-count:uint max-message-size:ulong " + _CAPABILITIES,
        ),
        (
            "flow",
            0x13,
            (
                "next-incoming-id:uint incoming-window:uint next-outgoing-id:uint "
                "outgoing-window:uint handle:uint delivery-count:uint link-credit:uint "
                "available:uint drain:boolean echo:boolean properties:map"
            ),
        ),
        (
            "transfer",
            0x14,
            (
                "handle:uint delivery-id:uint delivery-tag:binary message-format:uint "
                "settled:boolean more:boolean rcv-settle-mode:ubyte state:state resume:boolean "
                "aborted:boolean batchable:boolean"
            ),
        ),
        (
            "disposition",
            0x15,
            "role:role first:uint last:uint settled:boolean state:state batchable:boolean",
        ),
        ("detach", 0x16, "handle:uint closed:boolean error:error"),
        ("end", 0x17, "error:error"),
        ("close", 0x18, "error:error"),
        ("sasl_mechanisms", 0x40, "sasl-server-mechanisms:symbol*"),
        ("sasl_init", 0x41, "mechanism:symbol initial-response:binary hostname:string"),
        ("sasl_challenge", 0x42, "challenge:binary"),
        ("sasl_response", 0x43, "response:binary"),
        ("sasl_outcome", 0x44, "code:ubyte additional-data:binary"),
        ("error", 0x1D, "condition:symbol description:string info:map"),
        ("received", 0x23, "section-number:uint section-offset:ulong"),
        ("accepted", 0x24, ""),
        ("rejected", 0x25, "error:error"),
        ("released", 0x26, ""),
        (
            "modified",
            0x27,
            "delivery-failed:boolean undeliverable-here:boolean message-annotations:map",
        ),
        (
            "source",
            0x28,
            (
                f"{_TERMINUS} distribution-mode:symbol filter:map default-outcome:state "
                "outcomes:symbol* capabilities:symbol*"
            ),
        ),
        ("target", 0x29, f"{_TERMINUS} capabilities:symbol*"),
        ("coordinator", 0x30, "capabilities:symbol*"),
        ("declare", 0x31, "global-id:any"),
        ("discharge", 0x32, "txn-id:binary fail:boolean"),
        ("declared", 0x33, "txn-id:binary"),
        ("transactional_state", 0x34, "txn-id:binary outcome:state"),
    )
}
_NAMES: Final = {code: name for name, (code, _) in TYPES.items()}
#: Types that frames carry; the others are nested in them.
FRAMES: Final = tuple(name for name, (code, _) in TYPES.items() if code < 0x19 or code >= 0x40)


class Malformed(ValueError):
    """Octets that are not AMQP 1.0."""


class Raw(bytes):
    """Octets to write unchanged where a value is expected."""

    __slots__ = ()


class CompositeValue(Struct):
    """A composite value: its name as in ``TYPES``, and the fields present."""

    name: str
    fields: dict[str, Any]


class Frame(Struct):
    """A frame, a protocol header, or octets that are neither."""

    #: One of ``FRAMES``; ``"header"`` for a protocol header, ``"empty"`` for a frame without a body, and
    #: ``"octets"`` for input in which no frame can be found, or no performative in a frame.
    name: str
    channel: int = 0
    fields: dict[str, Any] = {}
    #: Octets after the performative; those of a header; or the octets that cannot be read.
    payload: bytes = b""
    #: Description of the fault, empty if there is none.
    fault: str = ""
    #: Octets of the input, with the header of the frame.
    size: int = 0

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        tail = f" and {len(self.payload)} bytes" if self.payload else ""
        wrong = f" (malformed: {self.fault})" if self.fault else ""
        return f"{self.name}({fields}) on channel {self.channel}{tail}{wrong}"


def composite(name: str, /, **fields: Any) -> CompositeValue:
    """Create a composite value, such as ``composite("target", address="q", durable=2)``.

    Raises:
        TypeError: There is no such type, or it has no such field.
    """
    if name not in TYPES:
        raise TypeError(f"AMQP has no type {name!r}{_hint(name, list(TYPES))}")
    known = [field for field, _ in TYPES[name][1]]
    for field in fields:
        if field not in known:
            raise TypeError(f"{name} has no field {field!r}{_hint(field, known)}")
    return CompositeValue(name, fields)


def _hint(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, 1)
    return f"; is {close[0]!r} meant?" if close else f": there are {', '.join(known)}"


# --- writing ------------------------------------------------------------------------------------

#: Types of fixed width: constructor code and format of :mod:`struct`.
_FIXED: Final = {
    "ubyte": (0x50, ">B"),
    "ushort": (0x60, ">H"),
    "uint": (0x70, ">I"),
    "ulong": (0x80, ">Q"),
    "byte": (0x51, ">b"),
    "short": (0x61, ">h"),
    "int": (0x71, ">i"),
    "long": (0x81, ">q"),
    "float": (0x72, ">f"),
    "double": (0x82, ">d"),
    "timestamp": (0x83, ">q"),
}
#: Types of variable width: constructor codes for a size of one octet and of four.
_TEXTS: Final = {"binary": (0xA0, 0xB0), "string": (0xA1, 0xB1), "symbol": (0xA3, 0xB3)}


def encode(kind: str, value: Any) -> Raw:
    """Encode *value* as an AMQP value of type *kind*.

    Elements of lists and values of maps, and values of a *kind* that has no encoding here, such as
    ``"any"``, are encoded by their Python types: an int becomes a long, a str a string. Keys of maps become
    symbols. Put a :class:`Raw` where another type is wanted, right or wrong: ``encode("string", "7")``
    can stand where a uint belongs.

    Raises:
        TypeError: A value has a Python type that stands for no AMQP type.
        struct.error: A number is out of the range of *kind*.
    """
    if isinstance(value, Raw):
        return value
    if value is None:
        return Raw(b"\x40")
    if isinstance(value, CompositeValue):
        return _composite(value)
    if kind in _ABBREVIATIONS:
        return encode("any", _ABBREVIATIONS[kind](value))
    if kind == "boolean":
        return Raw(b"\x41" if value else b"\x42")
    if kind in _FIXED:
        code, form = _FIXED[kind]
        return Raw(bytes((code,)) + struct.pack(form, value))
    if kind in _TEXTS:
        data = value.encode() if isinstance(value, str) else bytes(value)
        small, large = _TEXTS[kind]
        if len(data) < 256:
            return Raw(bytes((small, len(data))) + data)
        return Raw(struct.pack(">BI", large, len(data)) + data)
    if kind == "symbol*":
        if isinstance(value, str):
            return encode("symbol", value)
        items = b"".join(struct.pack(">I", len(each)) + each.encode() for each in value)
        return Raw(struct.pack(">BIIB", 0xF0, len(items) + 5, len(value), 0xB3) + items)
    if kind == "list":
        return _compound(0xD0, [encode("any", each) for each in value], len(value))
    if kind == "map":
        pairs = [encode("any" if at else "symbol", each) for pair in value.items() for at, each in enumerate(pair)]  # fmt: skip
        return _compound(0xD1, pairs, len(pairs))
    return encode(_kind_of(value), value)


def _kind_of(value: Any) -> str:
    for types, kind in _PYTHON:
        if isinstance(value, types):
            return kind
    raise TypeError(f"{value!r} has no AMQP type: call encode(kind, value)")


#: Python type → AMQP type; the first that matches counts, since a bool is an int, and text a sequence.
_PYTHON: Final[tuple[tuple[Any, str], ...]] = (
    (bool, "boolean"),
    (int, "long"),
    (float, "double"),
    (bytes, "binary"),
    (str, "string"),
    (Mapping, "map"),
    (Sequence, "list"),
)


def _compound(code: int, items: Sequence[bytes], count: int) -> Raw:
    content = b"".join(items)
    return Raw(struct.pack(">BII", code, len(content) + 4, count) + content)


def _composite(value: CompositeValue) -> Raw:
    code, fields = TYPES[value.name]
    items = [encode(kind, value.fields.get(name)) for name, kind in fields]
    while items and items[-1] == b"\x40":
        items.pop()
    return Raw(b"\x00\x53" + bytes((code,)) + _compound(0xD0, items, len(items)))


def _role(value: Any) -> Any:
    if isinstance(value, str):
        return {"sender": False, "receiver": True}[value]
    return value


def _terminus(name: str) -> Callable[[Any], Any]:
    def terminus(value: Any) -> Any:
        return composite(name, address=value) if isinstance(value, str) else value

    return terminus


def _error(value: Any) -> Any:
    if isinstance(value, str):
        return composite("error", condition=value)
    if isinstance(value, tuple):
        return composite("error", condition=value[0], description=value[1])
    return value


def _state(value: Any) -> Any:
    return composite(value) if isinstance(value, str) else value


#: Abbreviated values: ``role="sender"``, ``source="q"``, ``error="amqp:not-found"``,
#: ``state="accepted"``.
_ABBREVIATIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "role": _role,
    "source": _terminus("source"),
    "target": _terminus("target"),
    "error": _error,
    "state": _state,
}


def encode_frame(
    frame: CompositeValue | bytes,
    *,
    channel: int = 0,
    payload: bytes = b"",
    kind: int | None = None,
    size: int | None = None,
    doff: int = 2,
) -> bytes:
    """Encode a frame, whose header may be wrong on purpose (Part 2 §2.3.1).

    Args:
        frame: The body; octets are written unchanged.
        channel: The channel; unused in SASL frames.
        payload: Octets after the body.
        kind: The type of the frame, by default that of the body.
        size: The size in its header, by default the correct one.
        doff: The data offset in its header; beyond 2 the extended header is zeros.
    """
    body = frame if isinstance(frame, bytes) else bytes(_composite(frame))
    if kind is None:
        kind = int(isinstance(frame, CompositeValue) and frame.name.startswith("sasl_"))
    content = bytes(max(0, doff - 2) * 4) + body + payload
    said = len(content) + 8 if size is None else size
    return struct.pack(">IBBH", said, doff, kind, channel) + content


# --- reading ------------------------------------------------------------------------------------


def decode(data: bytes, at: int = 0) -> tuple[Any, int]:
    """Decode the value at offset *at* of *data*; return the value, and the offset behind it.

    Symbols become ``str``, arrays lists. Described values become :class:`CompositeValue`: one with a name
    of ``TYPES`` has its fields, any other has its descriptor as name and one field, ``value``.

    Raises:
        Malformed: The octets are not an AMQP value.
    """
    return _value(data, at, len(data), 0)


def _value(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    if at >= end:
        raise Malformed(f"a value is missing at octet {at}")
    if depth > _DEPTH_MAX:
        raise Malformed("values lie too deep inside each other")
    code = data[at]
    at += 1
    if code == 0:
        descriptor, at = _value(data, at, end, depth + 1)
        value, at = _value(data, at, end, depth + 1)
        return _described(descriptor, value), at
    return _constructed(code, data, at, end, depth)


def _described(descriptor: Any, value: Any) -> Any:
    name = _NAMES.get(descriptor) if isinstance(descriptor, int) else None
    if name is None and isinstance(descriptor, str):
        name = descriptor.removeprefix("amqp:").rpartition(":")[0].replace("-", "_")
    if name is not None and name in TYPES and isinstance(value, list):
        fields = {field: each for (field, _), each in zip(TYPES[name][1], value, strict=False)}
        return CompositeValue(
            name, {field: each for field, each in fields.items() if each is not None}
        )
    return CompositeValue(str(descriptor), {"value": value})


def _constructed(code: int, data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    if code in _EMPTY:
        made = _EMPTY[code]
        return (list(made) if isinstance(made, list) else made), at
    width = {0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}.get(code >> 4)
    if width is not None:
        piece = _piece(data, at, end, width)
        if code not in _READ:
            raise Malformed(f"there is no constructor 0x{code:02x} (octet {at - 1})")
        return _READ[code](piece), at + width
    if code >> 4 not in (0xA, 0xB, 0xC, 0xD, 0xE, 0xF):
        raise Malformed(f"there is no constructor 0x{code:02x} (octet {at - 1})")
    prefix = 1 if code >> 4 in (0xA, 0xC, 0xE) else 4
    size = int.from_bytes(_piece(data, at, end, prefix), "big")
    at += prefix
    content = _piece(data, at, end, size)
    end = at + size
    if code in (0xA0, 0xB0):
        return content, end
    if code in (0xA1, 0xB1, 0xA3, 0xB3):
        try:
            return content.decode("ascii" if code in (0xA3, 0xB3) else "utf-8"), end
        except UnicodeDecodeError as error:
            raise Malformed(f"text that cannot be read at octet {at}: {error.reason}") from None
    if code not in (0xC0, 0xD0, 0xC1, 0xD1, 0xE0, 0xF0):
        raise Malformed(f"there is no constructor 0x{code:02x}")
    count = int.from_bytes(_piece(data, at, end, prefix), "big")
    at += prefix
    if code in (0xE0, 0xF0):
        return _array(data, at, end, count, depth), end
    values = []
    for _ in range(min(count, size)):
        value, at = _value(data, at, end, depth + 1)
        values.append(value)
    if at != end or len(values) != count:
        raise Malformed(f"a list or map of {count} does not end at its size")
    if code in (0xC0, 0xD0):
        return values, end
    return {_key(key): value for key, value in zip(values[::2], values[1::2], strict=False)}, end


def _array(data: bytes, at: int, end: int, count: int, depth: int) -> list[Any]:
    descriptor = None
    if at >= end:
        raise Malformed("an array without a constructor")
    code = data[at]
    at += 1
    if code == 0:
        descriptor, at = _value(data, at, end, depth + 1)
        code = _piece(data, at, end, 1)[0]
        at += 1
    values = []
    # An array may claim any number of items without octets (null, true). The number is limited to the
    # octets present, so such an array comes out shorter.
    for _ in range(min(count, end - at)):
        value, at = _constructed(code, data, at, end, depth + 1)
        values.append(value if descriptor is None else _described(descriptor, value))
    return values


def _key(value: Any) -> Any:
    return value if isinstance(value, str | int | bytes | float | bool) else repr(value)


def _piece(data: bytes, at: int, end: int, size: int) -> bytes:
    if at + size > end:
        raise Malformed(f"{size} octets are wanted at octet {at}, {end - at} are there")
    return data[at : at + size]


def _unpacker(form: str) -> Callable[[bytes], Any]:
    return lambda piece: struct.unpack(form, piece)[0]


_EMPTY: Final[Mapping[int, Any]] = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0, 0x45: []}
_READ: Final[Mapping[int, Callable[[bytes], Any]]] = {
    **{code: _unpacker(form) for code, form in _FIXED.values()},
    0x52: _unpacker(">B"),
    0x53: _unpacker(">B"),
    0x54: _unpacker(">b"),
    0x55: _unpacker(">b"),
    0x56: lambda piece: piece != b"\0",
    0x73: lambda piece: piece.decode("utf-32-be", "replace"),
    0x74: bytes,
    0x84: bytes,
    0x94: bytes,
    0x98: lambda piece: UUID(bytes=piece),
}


class Splitter:
    """Splitter of input into headers and frames; the last one may be incomplete."""

    def __init__(self) -> None:
        #: The beginning of an incomplete header or frame.
        self.held = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the headers and frames that *data* completes. Malformed ones have a ``fault``.

        After an impossible size the next frame cannot be found, so all octets at hand become one
        ``"octets"``.
        """
        held = self.held + data
        found: list[Frame] = []
        at = 0
        while len(held) - at >= 8:
            if held[at : at + 4] == b"AMQP":
                found.append(Frame("header", payload=held[at : at + 8], size=8))
                at += 8
                continue
            size = int.from_bytes(held[at : at + 4], "big")
            if not 8 <= size <= _FRAME_MAX:
                fault = f"a frame has 8 octets or more, not {size}"
                if size >= 8:
                    fault = f"a frame of {size} octets"
                found.append(Frame("octets", payload=held[at:], fault=fault, size=len(held) - at))
                at = len(held)
                break
            if len(held) - at < size:
                break
            found.append(_frame(held[at : at + size]))
            at += size
        self.held = held[at:]
        return found


def _frame(data: bytes) -> Frame:
    doff, kind, channel = struct.unpack_from(">BBH", data, 4)
    begin = doff * 4
    if doff < 2 or begin > len(data):
        return Frame("octets", channel, {}, data[8:], f"a data offset of {doff}", len(data))
    if begin == len(data):
        return Frame("empty", channel, size=len(data))
    try:
        value, end = decode(data, begin)
    except Malformed as error:
        return Frame("octets", channel, {}, data[begin:], str(error), len(data))
    if not isinstance(value, CompositeValue) or value.name not in FRAMES:
        return Frame("octets", channel, {}, data[begin:], "it carries no performative", len(data))
    fault = "" if kind == value.name.startswith("sasl_") else f"in a frame of type {kind}"
    return Frame(value.name, channel, value.fields, data[end:], fault, len(data))
