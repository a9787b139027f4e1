"""The codec of the project's own client of 0-10 agrees with the specification and with Qpid's octets.

It judges the broker of the plug-in, so it is checked against what others have made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID
from xml.etree import ElementTree

import pytest
from octets010 import (
    BODY,
    COMMAND,
    HEADERS,
    Array,
    Assembler,
    FrameReader,
    Malformed,
    Operation,
    Reader,
    Struct,
    Typed,
    before,
    encode,
    frame,
    frames,
    holds,
    plain,
    ranges_of,
)
from tables010 import LAYOUTS, TYPES, Layout

HERE = Path(__file__).parent
NAMESPACE = "{http://www.amqp.org/schema/amqp.xsd}"


def published(path: Path) -> tuple[list[Layout], dict[str, int]]:
    """Return the layouts and the type codes of a specification in XML."""
    root = ElementTree.parse(path).getroot()
    domains = {each.get("name"): each.get("type") for each in root.findall(NAMESPACE + "domain")}
    for group in root.findall(NAMESPACE + "class"):
        for each in group.findall(NAMESPACE + "domain"):
            domains[f"{group.get('name')}.{each.get('name')}"] = each.get("type")
    found = []
    for group in root.findall(NAMESPACE + "class"):
        name, high = group.get("name"), int(group.get("code", ""), 0) << 8

        def resolved(kind: str | None, name: str | None = name) -> str:
            while (known := domains.get(f"{name}.{kind}") or domains.get(kind)) is not None:
                kind = known
            assert kind is not None
            return kind

        for each in group.iter():
            kind = each.tag.removeprefix(NAMESPACE)
            if kind not in ("control", "command", "struct"):
                continue
            own, code = each.get("name") or "", each.get("code")
            fields = tuple(
                (field.get("name") or "", resolved(field.get("type")))
                for field in each.findall(NAMESPACE + "field")
            )
            full = None if code is None else high | int(code, 0)
            if kind == "struct":
                size, pack = int(each.get("size", "0")), int(each.get("pack", "0"))
                found.append(Layout(kind, own, full, fields, None, size, pack))
                continue
            result = each.find(NAMESPACE + "result")
            struct = None if result is None else result.find(NAMESPACE + "struct")
            last = struct.get("name") if struct is not None else None
            if result is not None and last is None:
                last = result.get("type")
            found.append(Layout(kind, f"{name}.{own}", full, fields, last))
    types = {
        each.get("name") or "": int(each.get("code", ""), 0)
        for each in root.findall(NAMESPACE + "type")
        if each.get("code")
    }
    return found, types


def by_name(layouts: list[Layout]) -> dict[tuple[str, str], Layout]:
    return {(each.kind, each.name): each for each in layouts}


def test_tables_are_those_of_the_specification() -> None:
    layouts, types = published(HERE / "specification" / "amqp.0-10-qpid-errata.stripped.xml")
    assert by_name(LAYOUTS) == by_name(layouts)
    assert types == TYPES


def meant(value: Any) -> Any:
    """Return what a value of the vectors stands for."""
    match value:
        case {"hex": str(text)}:
            return bytes.fromhex(text)
        case {"map": dict(items)}:
            return {key: meant(each) for key, each in items.items()}
        case {"ranges": list(pairs)}:
            return [tuple(pair) for pair in pairs]
        case {"uuid": str(text)}:
            return UUID(text)
        case {"datetime": int(seconds)}:
            return seconds
        case {"struct": str(name), **fields}:
            found = Struct(name.replace("_", "-"))
            found.fields = {key.replace("_", "-"): meant(each) for key, each in fields.items()}
            return found
        case list():
            return [meant(each) for each in value]
    return value


def test_values_have_the_octets_of_qpid() -> None:
    cases = json.loads((HERE / "vectors" / "primitives.json").read_text())["cases"]
    assert cases
    for case in cases:
        kind, value, octets = case["type"], meant(case["value"]), bytes.fromhex(case["hex"])
        assert encode(kind, value) == octets, case
        reader = Reader(octets)
        assert plain(reader.value(kind)) == value, case
        assert not reader


def decoded(octets: bytes) -> list[Operation]:
    reader, assemblers, found = FrameReader(), {}, []
    reader.feed(octets)
    for each in reader:
        assembler = assemblers.setdefault((each.channel, each.track), Assembler())
        if (operation := assembler.add(each)) is not None:
            found.append(operation)
    return found


def simple(value: Any) -> Any:
    """Return *value* as the vectors tell it: without types, and structs without fields of 0."""
    if not isinstance(value, Struct):
        return plain(value)
    found = Struct(value.name)
    fields = {key: simple(each) for key, each in value.fields.items()}
    found.fields = {key: each for key, each in fields.items() if type(each) is bool or each != 0}
    return found


def test_operations_have_the_frames_of_qpid() -> None:
    cases = json.loads((HERE / "vectors" / "ops.json").read_text())["cases"]
    assert cases
    for case in cases:
        octets = bytes.fromhex(case["frames"])
        (operation,) = decoded(octets)
        # Vectors are cut into frames of several sizes.
        reader = FrameReader()
        reader.feed(octets)
        most = max(len(each.payload) for each in reader)
        assert b"".join(frames(operation.segments(), case["channel"], most or 1)) == octets, case

        args = {key: meant(each) for key, each in case["args"].items()}
        headers = [meant(each) for each in case["headers"]] if "headers" in case else None
        body = bytes.fromhex(case["body"]) if "body" in case else None
        assert operation.sync == case.get("sync", False), case
        assert operation.body == body, case
        assert {key: simple(each) for key, each in operation.fields.items()} == {
            key: simple(each) for key, each in args.items() if each is not False
        }, case
        assert (
            None if headers is None else [simple(each) for each in operation.headers or []]
        ) == (None if headers is None else [simple(each) for each in headers]), case


@pytest.mark.parametrize(
    ("value", "octets"),
    [
        (Typed("uint8", 5), "02 05"),
        (Typed("uint64", 2**63), "32 8000000000000000"),
        (Typed("str8", "ü"), "85 02 c3bc"),
        (Typed("str16-latin", "ü"), "94 0001 fc"),
        (Typed("vbin32", b"\x01"), "a0 00000001 01"),
        (Typed("dec32", b"\x02\x00\x00\x00\x07"), "c8 0200000007"),
        (Typed("bin128", bytes(16)), "40" + "00" * 16),
        (Typed("datetime", 1), "38 0000000000000001"),
        (Typed("char-utf32", 0x1F600), "27 0001f600"),
        (Typed(0x8F, b"\x02\xff\xff"), "8f 02 ffff"),
        (Typed(0xFF, b""), "ff"),
        (Typed("struct32", Typed(0x04FF, b"\x00\x00")), "ab 00000004 04ff 0000"),
    ],
)
def test_other_types_are_kept(value: Typed, octets: str) -> None:
    wire = bytes.fromhex(octets)
    entry = b"\x01k" + wire
    whole = len(entry + b"\0\0\0\1").to_bytes(4, "big") + b"\0\0\0\1" + entry
    assert encode("map", {"k": value}) == whole
    assert Reader(whole).value("map") == {"k": value}


def test_an_array_names_the_type_of_its_elements() -> None:
    xids = Array("struct32", [Struct("xid", format=1, global_id=b"g", branch_id=b"")])
    octets = encode("array", xids)
    assert (
        octets.hex() == "00000014ab" + "00000001" + "0000000b" + "06040700" + "00000001" + "016700"
    )
    assert Reader(octets).value("array") == xids


def test_unknown_structs_of_a_message_are_kept() -> None:
    structs = [Typed(0x04FF, b"\x00\x00"), Struct("delivery-properties", priority=1)]
    sent = Operation("message.transfer", headers=structs, body=b"")
    (found,) = decoded(b"".join(frames(sent.segments(), 0)))
    assert found.headers == structs
    assert found.header("delivery-properties").priority == 1


@pytest.mark.parametrize(("size", "count"), [(0, ""), (4, "00000000")])
def test_both_forms_of_an_empty_map_are_read(size: int, count: str) -> None:
    assert Reader(size.to_bytes(4, "big") + bytes.fromhex(count)).value("map") == {}


def test_ids_are_compared_around_the_end() -> None:
    last = 2**32 - 1
    assert before(last, 0)
    assert not before(0, last)
    assert holds([(last - 1, 2)], 0)
    assert not holds([(last - 1, 2)], 3)
    assert ranges_of([last - 1, last, 0, 2]) == [(last - 1, 0), (2, 2)]


@pytest.mark.parametrize(
    "octets",
    [
        pytest.param(frame(b"", size=11), id="size below the header"),
        pytest.param(frame(b"", flags=0x1F), id="version of the flags"),
        pytest.param(frame(b"", reserved=(1, 0)), id="reserved octet"),
        pytest.param(frame(b"", reserved=(0, 1)), id="reserved word"),
        pytest.param(frame(b"", track=0x10), id="reserved bits of the track"),
        pytest.param(frame(b"", kind=4), id="type"),
        pytest.param(frame(b"", kind=COMMAND, track=0), id="track of a command"),
        pytest.param(frame(b"\x01\x0a\x00\x00", flags=7), id="not the first segment"),
        pytest.param(frame(b"\x01\x0a\x00\x00", flags=13), id="not the first frame"),
        pytest.param(frame(b"\x01\x0a\x00\x00\x00"), id="octets after the fields"),
        pytest.param(frame(b"\x01\x0a\x01\x00"), id="bit of an unknown field"),
        pytest.param(frame(b"\x01\xff\x00\x00"), id="code"),
        pytest.param(frame(b"\x04\x01\x01\x00\x00", kind=COMMAND), id="fields cut short"),
        pytest.param(frame(b"\x00", kind=BODY), id="begins with a body"),
        pytest.param(
            frame(b"\x04\x01\x01\x00\x00\x00", kind=COMMAND, flags=10)
            + frame(b"", kind=BODY, flags=7),
            id="a body within the command",
        ),
        pytest.param(
            frame(b"\x04\x01\x01\x00\x00\x00", kind=COMMAND, flags=11)
            + frame(b"", kind=BODY, flags=5),
            id="a body without its first frame",
        ),
        pytest.param(
            b"".join(
                frames([(COMMAND, b"\x04\x01\x01\x00\x00\x00"), (BODY, b""), (HEADERS, b"")], 0)
            ),
            id="header after the body",
        ),
    ],
)
def test_malformed_frames_are_noticed(octets: bytes) -> None:
    with pytest.raises(Malformed):
        decoded(octets)
