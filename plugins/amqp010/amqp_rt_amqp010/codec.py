"""Segments, to and from octets: controls, commands and the structs of headers.

Faults of a control are faults of its connection, those of a command end its session.
"""

from __future__ import annotations

from collections.abc import Iterable

from .faults import CommandFault, ConnectionFault
from .layouts import COMMANDS, CONTROLS, Command, Composite, Control, ErrorCode
from .limits import ELEMENTS_MAX
from .reading import DecodeFault, Reader
from .type_codes import STRUCT32, U16
from .values import UnknownStruct
from .writing import put_fields, put_struct, put_typed, put_value

# --- controls, commands and entries ------------------------------------------------------------------


def read_control(octets: bytes) -> Control:
    """Decode a control segment.

    Raises:
        ConnectionFault: It is malformed, or there is no such control.
    """
    reader = Reader(octets)
    try:
        code = reader.uint16()
        known = CONTROLS.get(code)
        if known is None:
            raise DecodeFault(f"there is no control {code & 0xFF} in class {code >> 8}")
        found = reader.fields(known)
        if reader.at != reader.end:
            raise DecodeFault(f"{known.NAME} has octets after its last field")
    except DecodeFault as fault:
        raise ConnectionFault(fault.text) from None
    assert isinstance(found, Control)
    return found


def read_command(octets: bytes) -> tuple[Command, bool]:
    """Decode a command segment; return the command, and whether its ``sync`` flag is set.

    Raises:
        CommandFault: It is malformed (503), too deep or too large (506), or there is no such command
            (540).
    """
    reader = Reader(octets)
    code = -1
    try:
        code = reader.uint16()
        known = COMMANDS.get(code)
        if known is None:
            raise DecodeFault(
                f"there is no command {code & 0xFF} in class {code >> 8}", ErrorCode.NOT_IMPLEMENTED
            )
        header = reader.sized(1)
        if len(header) != 1 or header[0] & 0xFE:
            raise DecodeFault(f"{known.NAME} has a malformed session header: {header[:8]!r}")
        found = reader.fields(known, outermost=True)
        if reader.at != reader.end:
            raise DecodeFault(f"{known.NAME} has octets after its last field")
    except DecodeFault as fault:
        raise CommandFault(
            fault.text,
            fault.code,
            class_code=code >> 8 if code >= 0 else None,
            command_code=code & 0xFF if code >= 0 else None,
            field_index=reader.field_index if reader.field_index >= 0 else None,
        ) from None
    assert isinstance(found, Command)
    return found, header[0] == 1


def split_entries(octets: bytes, command: int) -> list[tuple[int, bytes]]:
    """Split a header segment into the codes of its structs and their octets, with size and code.

    Args:
        octets: The segment.
        command: Class and command code of the command whose header it is, for faults.

    Raises:
        CommandFault: It is malformed, or has a struct twice.
    """
    reader = Reader(octets)
    found: list[tuple[int, bytes]] = []
    known: set[int] = set()
    try:
        while reader.at < reader.end:
            start = reader.at
            inner = reader.sized(4)
            if len(inner) < 2:
                raise DecodeFault("an entry of a header has no code")
            code = inner[0] << 8 | inner[1]
            if code in known:
                raise DecodeFault(f"a header has struct {code:#06x} twice")
            if len(known) == ELEMENTS_MAX:
                raise DecodeFault(
                    f"a header has more than {ELEMENTS_MAX} structs",
                    ErrorCode.RESOURCE_LIMIT_EXCEEDED,
                )
            known.add(code)
            found.append((code, octets[start : reader.at]))
    except DecodeFault as fault:
        raise _entry_fault(fault, command) from None
    return found


def read_entries(octets: bytes, command: int) -> list[Composite | UnknownStruct]:
    """Decode the structs of a header segment; unknown ones are kept as octets, to be passed on.

    Raises:
        CommandFault: As of :func:`split_entries`.
    """
    reader = Reader(octets)
    try:
        return [reader.struct32() for _ in split_entries(octets, command)]
    except DecodeFault as fault:
        raise _entry_fault(fault, command) from None


def _entry_fault(fault: DecodeFault, command: int) -> CommandFault:
    return CommandFault(
        fault.text, fault.code, class_code=command >> 8, command_code=command & 0xFF
    )


def write_control(control: Control) -> bytes:
    """Encode the segment of *control*.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    out = bytearray(U16.pack(control.CODE))
    put_fields(out, control)
    return bytes(out)


def write_command(command: Command, *, sync: bool = False) -> bytes:
    """Encode the segment of *command*; *sync* asks for its completion at once.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    out = bytearray(U16.pack(command.CODE))
    out += b"\x01\x01" if sync else b"\x01\x00"
    put_fields(out, command)
    return bytes(out)


def write_entries(entries: Iterable[Composite | UnknownStruct]) -> bytes:
    """Encode the structs of a header segment.

    Raises:
        ValueError: A field does not fit its wire type, or a struct is no struct32.
    """
    out = bytearray()
    for each in entries:
        put_typed(out, STRUCT32, each)
    return bytes(out)


# --- values ------------------------------------------------------------------------------------------


def read_value(octets: bytes) -> object:
    """Decode one value after its type code.

    Raises:
        DecodeFault: It is malformed, or octets follow it.
    """
    reader = Reader(octets)
    found = reader.value()
    if reader.at != reader.end:
        raise DecodeFault(f"{reader.end - reader.at} octets follow a value")
    return found


def write_value(value: object) -> bytes:
    """Encode *value* after its type code.

    Raises:
        ValueError: No type fits.
    """
    out = bytearray()
    put_value(out, value)
    return bytes(out)


def read_struct(octets: bytes, of: type[Composite]) -> Composite:
    """Decode a struct of type *of*, with its size and code as far as it has these.

    Raises:
        DecodeFault: It is malformed, or octets follow it.
    """
    reader = Reader(octets)
    found = reader.composite(of)
    if reader.at != reader.end:
        raise DecodeFault(f"{reader.end - reader.at} octets follow {of.NAME}")
    return found


def write_struct(value: Composite) -> bytes:
    """Encode *value* with its size and code, as far as it has these.

    Raises:
        ValueError: A field does not fit its wire type.
    """
    out = bytearray()
    put_struct(out, value)
    return bytes(out)
