"""Octets of AMQP 0-10 for the project's own test client: values, structs, segments and frames.

No line is shared with the codec of the plug-in. Values of Python are encoded in the types that clients use for
them; ``Typed`` names another one. Decoding returns plain values for those types, and ``Typed`` for all else, so that
what is decoded is encoded to the same octets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tables010 import BY_CODE, OPERATIONS, STRUCTS, TYPE_NAMES, TYPES, Layout

HEADER = b"AMQP\x01\x01\x00\x0a"
FRAME_HEADER = struct.Struct("!BBHBBHI")
FIRST_SEGMENT, LAST_SEGMENT, FIRST_FRAME, LAST_FRAME = 8, 4, 2, 1
#: Types of segments. Controls go on track 0, all else on track 1.
CONTROL, COMMAND, HEADERS, BODY = range(4)
MASK = 0xFFFF_FFFF


class Malformed(Exception):
    """Octets that are no AMQP 0-10."""


@dataclass(frozen=True)
class Typed:
    """A value of a type that is not the usual one for it; unknown types have their code for a name."""

    type: str | int
    value: Any


@dataclass
class Array:
    """Values of one type."""

    of: str
    items: list[Any]


class Struct:
    """A struct: its name and the fields that are present."""

    def __init__(self, name: str, /, **fields: Any) -> None:
        self.name = name
        self.fields = {key.replace("_", "-"): value for key, value in fields.items()}

    def __getattr__(self, name: str) -> Any:
        """Return a field; None where it is absent, False for a bit."""
        if name in ("name", "fields") or name.startswith("__"):
            raise AttributeError(name)
        key = name.replace("_", "-")
        for known, kind in STRUCTS[self.name].fields:
            if known == key:
                return self.fields.get(key, False if kind == "bit" else None)
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and (self.name, self.fields) == (other.name, other.fields)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.fields.items())})"


# ---- ids and sets of them ------------------------------------------------------------------------

#: Inclusive pairs of ids.
Ranges = list[tuple[int, int]]


def before(one: int, other: int) -> bool:
    """Return whether the id *one* comes before *other* (RFC 1982)."""
    return 0 < (other - one) & MASK < 0x8000_0000


def holds(ranges: Sequence[tuple[int, int]], number: int) -> bool:
    return any((number - low) & MASK <= (high - low) & MASK for low, high in ranges)


def within(ranges: Sequence[tuple[int, int]], low: int, high: int) -> bool:
    """Return whether one of *ranges* holds all ids from *low* to *high*."""
    return any(
        (low - each[0]) & MASK <= (high - each[0]) & MASK <= (each[1] - each[0]) & MASK
        for each in ranges
    )


def ranges_of(numbers: Sequence[int]) -> Ranges:
    """Return the ranges of ids, which are in the order of their serial numbers."""
    found: Ranges = []
    for number in numbers:
        if found and (found[-1][1] + 1) & MASK == number:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


# ---- values --------------------------------------------------------------------------------------

_PACKED = {
    "int8": "!b",
    "uint8": "!B",
    "int16": "!h",
    "uint16": "!H",
    "int32": "!i",
    "uint32": "!I",
    "sequence-no": "!I",
    "float": "!f",
    "char-utf32": "!I",
    "int64": "!q",
    "uint64": "!Q",
    "double": "!d",
    "datetime": "!Q",
}
_TEXTS = {
    "str8-latin": (1, "iso-8859-15"),
    "str8": (1, "utf-8"),
    "str8-utf16": (1, "utf-16-be"),
    "str16-latin": (2, "iso-8859-15"),
    "str16": (2, "utf-8"),
    "str16-utf16": (2, "utf-16-be"),
}
_BINARIES = {"vbin8": 1, "vbin16": 2, "vbin32": 4}
#: Class of a code's width → octets of the value, or of its size.
_FIXED = {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 5: 32, 6: 64, 7: 128, 0xC: 5, 0xD: 9, 0xF: 0}
_VARIABLE = {8: 1, 9: 2, 0xA: 4}


def usual(value: Any) -> str:
    """Return the type in which a value of Python is sent."""
    match value:
        case None:
            return "void"
        case bool():
            return "boolean"
        case int():
            return "int64"
        case float():
            return "double"
        case str():
            return "str16"
        case bytes():
            return "vbin16" if len(value) < 65536 else "vbin32"
        case UUID():
            return "uuid"
        case dict():
            return "map"
        case list():
            return "list"
        case Array():
            return "array"
        case Struct():
            return "struct32"
    raise TypeError(f"no type of 0-10 for {value!r}")


def plain(value: Any) -> Any:
    """Return *value* without the names of its types."""
    match value:
        case Typed():
            return plain(value.value)
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case list():
            return [plain(each) for each in value]
        case Array():
            return [plain(each) for each in value.items]
    return value


def _sized(width: int, octets: bytes) -> bytes:
    if len(octets) >= 1 << 8 * width:
        raise ValueError(f"{len(octets)} octets do not fit a size of {width}")
    return len(octets).to_bytes(width, "big") + octets


def encode(kind: str | int, value: Any) -> bytes:
    """Return the octets of a value of the type *kind*, without the type's code."""
    if isinstance(value, Typed):
        kind, value = value.type, value.value
    match kind:
        case "void" | "bit":
            return b""
        case "boolean":
            return b"\x01" if value else b"\x00"
        case "uuid":
            return bytes(value.bytes)
        case "map":
            pairs = [encode("str8", key) + _coded(each) for key, each in value.items()]
            return _sized(4, struct.pack("!I", len(pairs)) + b"".join(pairs))
        case "list":
            items = [_coded(each) for each in value]
            return _sized(4, struct.pack("!I", len(items)) + b"".join(items))
        case "array":
            if isinstance(value, list):
                value = Array(usual(value[0]) if value else "void", value)
            items = [encode(value.of, each) for each in value.items]
            octets = struct.pack("!BI", TYPES[value.of], len(items)) + b"".join(items)
            return _sized(4, octets)
        case "sequence-set":
            return _sized(2, b"".join(struct.pack("!II", *each) for each in value))
        case "byte-ranges":
            return _sized(2, b"".join(struct.pack("!QQ", *each) for each in value))
        case "struct32":
            return encode_struct(value, size=4)
    if kind in _PACKED:
        return struct.pack(_PACKED[kind], value)
    if kind in _TEXTS:
        width, charset = _TEXTS[kind]
        return _sized(width, value if isinstance(value, bytes) else value.encode(charset))
    if kind in _BINARIES:
        return _sized(_BINARIES[kind], value.encode() if isinstance(value, str) else value)
    if kind in STRUCTS:
        return encode_struct(value)
    # Bits as they are: bin8 to bin1024, dec32, dec64, and unknown types.
    return bytes(value)


def _coded(value: Any) -> bytes:
    kind = value.type if isinstance(value, Typed) else usual(value)
    return bytes((TYPES[kind] if isinstance(kind, str) else kind,)) + encode(kind, value)


def encode_fields(layout: Layout, fields: dict[str, Any]) -> bytes:
    """Return packing flags and fields. A field that is None is absent, as is a bit that is not set."""
    unknown = set(fields) - {name for name, _ in layout.fields}
    if unknown:
        raise TypeError(f"{layout.name} has no {', '.join(sorted(unknown))}")
    flags, octets = 0, b""
    for place, (name, kind) in enumerate(layout.fields):
        value = fields.get(name)
        if value is None or (kind == "bit" and not value):
            continue
        flags |= 1 << place
        octets += encode(kind, value)
    return flags.to_bytes(layout.pack, "little") + octets


def encode_struct(value: Struct | Typed, *, size: int | None = None) -> bytes:
    """Return a struct with its size and code, where it has them."""
    if isinstance(value, Typed):
        assert isinstance(value.type, int)
        return _sized(4, value.type.to_bytes(2, "big") + value.value)
    layout = STRUCTS[value.name]
    octets = encode_fields(layout, value.fields)
    if layout.code is not None:
        octets = layout.code.to_bytes(2, "big") + octets
    return _sized(layout.size if size is None else size, octets)


class Reader:
    """Takes values off octets."""

    def __init__(self, octets: bytes) -> None:
        self._octets = octets
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._octets)

    def take(self, count: int) -> bytes:
        if count > len(self._octets) - self._at:
            raise Malformed(f"{count} octets wanted, {len(self._octets) - self._at} are there")
        self._at += count
        return self._octets[self._at - count : self._at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def value(self, kind: str) -> Any:
        """Take a value of the type *kind*."""
        match kind:
            case "void":
                return None
            case "bit":
                return True
            case "boolean":
                return self.number(1) != 0
            case "uuid":
                return UUID(bytes=self.take(16))
            case "map":
                return self._map()
            case "list":
                inner = Reader(self.take(self.number(4)))
                count = inner.number(4) if inner else 0
                found = [inner._coded() for _ in range(count)]
                inner.end(kind)
                return found
            case "array":
                return self._array()
            case "sequence-set" | "byte-ranges":
                inner, width = Reader(self.take(self.number(2))), 4 if kind == "sequence-set" else 8
                pairs = []
                while inner:
                    pairs.append((inner.number(width), inner.number(width)))
                return pairs
            case "struct32":
                return self.struct32()
        if kind in _PACKED:
            (value,) = struct.unpack(_PACKED[kind], self.take(struct.calcsize(_PACKED[kind])))
            return value
        if kind in _TEXTS:
            width, charset = _TEXTS[kind]
            return self.take(self.number(width)).decode(charset)
        if kind in _BINARIES:
            return self.take(self.number(_BINARIES[kind]))
        if kind in STRUCTS:
            return self._struct(STRUCTS[kind])
        return self._bits(TYPES[kind])

    def _bits(self, code: int) -> bytes:
        if code >> 4 in _FIXED:
            return self.take(_FIXED[code >> 4])
        if code >> 4 in _VARIABLE:
            size = self.take(_VARIABLE[code >> 4])
            return size + self.take(int.from_bytes(size, "big"))
        raise Malformed(f"no width for the type code {code:#x}")

    def _coded(self) -> Any:
        code = self.number(1)
        kind = TYPE_NAMES.get(code)
        if kind is None:
            return Typed(code, self._bits(code))
        value = self.value(kind)
        # An unknown struct is a Typed already.
        if isinstance(value, Typed) or usual(value) != kind:
            return Typed(kind, value)
        return value

    def _map(self) -> dict[str, Any]:
        inner = Reader(self.take(self.number(4)))
        # Qpid sends an empty map as a size of 0 without a count.
        count = inner.number(4) if inner else 0
        found = {}
        for _ in range(count):
            key = inner.value("str8")
            if key in found:
                raise Malformed(f"the key {key!r} occurs twice")
            found[key] = inner._coded()
        inner.end("map")
        return found

    def _array(self) -> Array:
        inner = Reader(self.take(self.number(4)))
        if not inner:
            return Array("void", [])
        code, count = inner.number(1), inner.number(4)
        kind = TYPE_NAMES[code]
        found = Array(kind, [inner.value(kind) for _ in range(count)])
        inner.end("array")
        return found

    def _struct(self, layout: Layout) -> Struct:
        inner = Reader(self.take(self.number(layout.size))) if layout.size else self
        if layout.code is not None and inner.number(2) != layout.code:
            raise Malformed(f"no code of {layout.name}")
        found = Struct(layout.name)
        found.fields = inner.fields(layout)
        if layout.size:
            inner.end(layout.name)
        return found

    def struct32(self) -> Struct | Typed:
        """Take a struct with its size and code; one that is not in the tables as its code and octets."""
        inner = Reader(self.take(self.number(4)))
        code = inner.number(2)
        layout = BY_CODE.get(("struct", code))
        if layout is None:
            return Typed(code, inner.rest())
        found = Struct(layout.name)
        found.fields = inner.fields(layout)
        inner.end(layout.name)
        return found

    def rest(self) -> bytes:
        """Take all that is left."""
        return self.take(len(self._octets) - self._at)

    def fields(self, layout: Layout) -> dict[str, Any]:
        flags = int.from_bytes(self.take(layout.pack), "little")
        if flags >> len(layout.fields):
            raise Malformed(f"{layout.name}: bits of unknown fields in {flags:#x}")
        return {
            name: self.value(kind)
            for place, (name, kind) in enumerate(layout.fields)
            if flags >> place & 1
        }

    def end(self, name: str) -> None:
        if self:
            raise Malformed(f"{name}: {len(self._octets) - self._at} octets too many")


# ---- controls and commands -----------------------------------------------------------------------


@dataclass
class Operation:
    """A control or a command, with what belongs to it.

    Args:
        name: Class and name, ``message.transfer``.
        fields: Fields that are present.
        sync: The sync bit of a command.
        headers: Structs of the header segment, unknown ones as ``Typed(code, octets)``; None without such a segment.
        body: Octets of the body segment; None without such a segment.
        channel: Where it came from.
        id: Id of a command.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    sync: bool = False
    headers: list[Struct | Typed] | None = None
    body: bytes | None = None
    channel: int = 0
    id: int | None = None

    @property
    def layout(self) -> Layout:
        return OPERATIONS[self.name]

    def __getattr__(self, name: str) -> Any:
        """Return a field; None where it is absent, False for a bit. The field ``name`` is ``name_``."""
        if name.startswith("__"):
            raise AttributeError(name)
        key = name.rstrip("_").replace("_", "-")
        for known, kind in OPERATIONS[self.name].fields:
            if known == key:
                return self.fields.get(key, False if kind == "bit" else None)
        raise AttributeError(name)

    def header(self, name: str) -> Struct:
        """Return a struct of the header segment; an empty one where it is absent."""
        found = [each for each in self.headers or () if isinstance(each, Struct)]
        return next((each for each in found if each.name == name), Struct(name))

    def segments(self) -> list[tuple[int, bytes]]:
        """Return types and octets of its segments."""
        layout = self.layout
        assert layout.code is not None
        octets = layout.code.to_bytes(2, "big")
        if layout.kind == "command":
            octets += b"\x01\x01" if self.sync else b"\x01\x00"
        octets += encode_fields(layout, self.fields)
        found = [(COMMAND if layout.kind == "command" else CONTROL, octets)]
        if self.headers is not None:
            found.append((HEADERS, b"".join(encode_struct(each) for each in self.headers)))
        if self.body is not None:
            found.append((BODY, self.body))
        return found


def frame(
    payload: bytes,
    *,
    kind: int = CONTROL,
    channel: int = 0,
    track: int | None = None,
    flags: int = 15,
    size: int | None = None,
    reserved: tuple[int, int] = (0, 0),
) -> bytes:
    """Return a frame, of which each part can be wrong.

    Args:
        payload: All after the header.
        kind: Type of its segment.
        channel: The channel.
        track: Of the type where not given.
        flags: Positions of the segment and the frame.
        size: The size field; the true size where not given.
        reserved: The reserved octet and the reserved word.
    """
    track = int(kind != CONTROL) if track is None else track
    size = FRAME_HEADER.size + len(payload) if size is None else size
    return FRAME_HEADER.pack(flags, kind, size, reserved[0], track, channel, reserved[1]) + payload


def frames(
    segments: Sequence[tuple[int, bytes]], channel: int, max_payload: int = 65535 - 12
) -> list[bytes]:
    """Return the frames of an assembly."""
    found = []
    for place, (kind, octets) in enumerate(segments):
        position = FIRST_SEGMENT * (place == 0) | LAST_SEGMENT * (place == len(segments) - 1)
        starts = range(0, len(octets) or 1, max_payload)
        for start in starts:
            flags = position | FIRST_FRAME * (start == 0) | LAST_FRAME * (start == starts[-1])
            track = int(kind != CONTROL)
            found.append(
                frame(
                    octets[start : start + max_payload],
                    kind=kind,
                    channel=channel,
                    track=track,
                    flags=flags,
                )
            )
    return found


@dataclass
class Frame:
    flags: int
    kind: int
    track: int
    channel: int
    payload: bytes
    size: int


class FrameReader:
    """Cuts octets into frames, and judges their headers."""

    def __init__(self) -> None:
        self._octets = bytearray()

    def feed(self, octets: bytes) -> None:
        self._octets += octets

    def take_header(self) -> bytes | None:
        """Take the eight octets before the first frame, once they are there."""
        if len(self._octets) < 8:
            return None
        found = bytes(self._octets[:8])
        del self._octets[:8]
        return found

    def __iter__(self) -> Iterator[Frame]:
        while len(self._octets) >= FRAME_HEADER.size:
            flags, kind, size, one, track, channel, two = FRAME_HEADER.unpack_from(self._octets)
            if size < FRAME_HEADER.size:
                raise Malformed(f"a frame of {size} octets")
            if flags >> 4 or kind > BODY or one or two or track > 1:
                octets = self._octets[: FRAME_HEADER.size].hex()
                raise Malformed(f"reserved bits, or no such type or track: {octets}")
            if track != int(kind != CONTROL):
                raise Malformed(f"a segment of type {kind} on track {track}")
            if len(self._octets) < size:
                return
            payload = bytes(self._octets[FRAME_HEADER.size : size])
            del self._octets[:size]
            yield Frame(flags, kind, track, channel, payload, size)


class Assembler:
    """Joins the frames of one channel and track."""

    def __init__(self) -> None:
        self._segments: list[tuple[int, bytearray]] = []
        self._open = False

    def add(self, piece: Frame) -> Operation | None:
        """Add a frame, and return the operation that it completes."""
        first_segment, first_frame = piece.flags & FIRST_SEGMENT, piece.flags & FIRST_FRAME
        if bool(first_segment and first_frame) != (not self._segments):
            raise Malformed(f"flags {piece.flags:04b} after {len(self._segments)} segments")
        if bool(first_frame) == self._open:
            raise Malformed("a segment begins within another, or goes on after its end")
        if first_frame:
            self._segments.append((piece.kind, bytearray()))
        kind, octets = self._segments[-1]
        if kind != piece.kind or bool(first_segment) != (len(self._segments) == 1):
            raise Malformed("the frames of a segment differ in type or place")
        octets += piece.payload
        self._open = not piece.flags & LAST_FRAME
        if self._open or not piece.flags & LAST_SEGMENT:
            return None
        segments, self._segments = self._segments, []
        return _operation(segments, piece.channel)


def _operation(segments: list[tuple[int, bytearray]], channel: int) -> Operation:
    kind = segments[0][0]
    rest = [each for each, _ in segments[1:]]
    if kind not in (CONTROL, COMMAND) or rest not in ([], [HEADERS], [BODY], [HEADERS, BODY]):
        raise Malformed(f"segments of the types {[kind, *rest]}")
    reader = Reader(bytes(segments[0][1]))
    code = reader.number(2)
    layout = BY_CODE.get(("control" if kind == CONTROL else "command", code))
    if layout is None:
        raise Malformed(f"no control or command has the code {code:#x}")
    found = Operation(layout.name, channel=channel)
    if kind == COMMAND:
        size = reader.number(1)
        bits = reader.take(size)
        found.sync = bool(bits and bits[0] & 1)
    found.fields = reader.fields(layout)
    reader.end(layout.name)
    for each, octets in segments[1:]:
        if each == BODY:
            found.body = bytes(octets)
        else:
            headers = Reader(bytes(octets))
            found.headers = []
            while headers:
                found.headers.append(headers.struct32())
    return found
