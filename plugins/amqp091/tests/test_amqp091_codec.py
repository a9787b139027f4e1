"""Methods, tables and frames against the specification's own data, and against what peers invent."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_amqp091.codec import (
    ELEMENTS_MAX,
    FIELDS,
    NESTING_MAX,
    PROPERTIES,
    NotImplementedFault,
    Reader,
    SyntaxFault,
    read_header,
    read_method,
    write_header,
    write_longstr,
    write_method,
    write_shortstr,
    write_table,
)
from amqp_rt_amqp091.frames import (
    BODY,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_FRAME,
    METHOD,
    PROTOCOL_HEADER,
    BrokenFrame,
    Frame,
    FrameReader,
    OversizeFrame,
    content_frames,
    frame,
    method_frame,
)
from amqp_rt_amqp091.methods import METHODS, BasicDeliver, BasicProperties, QueueDeclare
from amqp_rt_amqp091.values import ContentHeader, Decimal, Seconds
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.fronts import Byte, Float32, Int, Short, UByte, UInt, ULong, UShort


@pytest.fixture
def spec(shared: Path) -> ET.Element:
    return ET.parse(shared / "spec/amqp-0-9-1/amqp0-9-1.stripped.extended.xml").getroot()


@pytest.fixture
def frames(shared: Path) -> Any:
    return json.loads((shared / "spec/vectors/amqp091/frames.json").read_text("utf-8"))


def read_table(data: bytes) -> dict[str, object]:
    reader = Reader(data)
    found = reader.table()
    assert reader.at_end()
    return found


def wire_fields(element: ET.Element, domains: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            field.attrib["name"].replace("-", "_").replace("global", "global_"),
            domains.get(field.get("domain", ""), "") or field.attrib["type"],
        )
        for field in element.findall("field")
    )


@pytest.mark.req("N4")
def test_the_declared_methods_are_those_of_the_specification(spec: ET.Element) -> None:
    domains = {each.attrib["name"]: each.attrib["type"] for each in spec.iter("domain")}
    found = {}
    for group in spec.iter("class"):
        for method in group.findall("method"):
            code = int(group.attrib["index"]) << 16 | int(method.attrib["index"])
            declared = METHODS[code]
            assert declared.name == f"{group.attrib['name']}.{method.attrib['name']}"
            assert declared.content == (method.get("content") == "1")
            assert declared.answers == tuple(
                f"{group.attrib['name']}.{answer.attrib['name']}"
                for answer in method.findall("response")
            )
            found[code] = wire_fields(method, domains)
    assert found == FIELDS
    basic = next(each for each in spec.iter("class") if each.attrib["name"] == "basic")
    assert wire_fields(basic, domains) == PROPERTIES


def plain(value: object) -> object:
    """*value* as the vectors spell it."""
    if isinstance(value, Seconds):
        return {"timestamp": value.value}
    if isinstance(value, Decimal):
        return {"decimal": f"{value.value / 10**value.scale:.{value.scale}f}"}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


@pytest.mark.req("N2", "N4")
def test_method_frames_of_another_codec(frames: Any) -> None:
    for case in frames["methods"]:
        data = bytes.fromhex(case["frame"])
        [read] = FrameReader(1 << 17).feed(data)
        assert (read.type, read.channel) == (METHOD, case["channel"])
        method = read_method(read.payload)
        assert method.code == case["class_id"] << 16 | case["method_id"]
        for name, kind in FIELDS[method.code]:
            expected = case["args"].get(name)
            if expected is not None and kind in {"bit", "octet", "short", "long", "shortstr"}:
                assert getattr(method, name) == expected, (method.name, name)
        assert read_method(write_method(method)) == method
        if b"L" not in data and b"U" not in data:
            assert method_frame(read.channel, method) == data


@pytest.mark.req("N5")
def test_content_headers_of_another_codec(frames: Any) -> None:
    for case in frames["content_headers"]:
        data = bytes.fromhex(case["frame"])
        [read] = FrameReader(1 << 17).feed(data)
        assert read.type == HEADER
        header = read_header(read.payload)
        assert (header.class_id, header.body_size) == (60, case["body_size"])
        assert read_header(write_header(header)) == header
        for name, value in case["properties"].items():
            # The generator counts an empty cluster-id, which is deprecated, as none.
            name = {"message_type": "type", "cluster_id": "reserved"}.get(name, name)
            found = plain(getattr(header.properties, name))
            if name == "timestamp":
                value = value["timestamp"]
            assert ("" if found is None else found) == value, name


@pytest.mark.req("N4")
def test_field_tables_of_another_client(shared: Path) -> None:
    cases = json.loads((shared / "spec/vectors/amqp091/field-table.json").read_text("utf-8"))
    for case in cases["cases"]:
        data = bytes.fromhex(case["table_hex"])
        table = read_table(data)
        assert list(table) == [case["key"]]
        assert read_table(write_table(table)) == table
        if case["type_code"] not in {"L", "U"}:
            assert write_table(table) == data, case["label"]


@pytest.mark.req("N4")
@pytest.mark.parametrize(
    "value",
    [
        *(True, False, None, "", "text", "é", b"", b"\xff\0", 1.5, float("inf"), 0, -1, 2**63 - 1),
        *(Byte(-128), UByte(255), Short(-32768), UShort(65535), Int(-(2**31)), UInt(2**32 - 1)),
        *(Float32(0.5), Seconds(2**64 - 1), Decimal(2, -314), -(2**63)),
        *([], [1, "x", [None]], {}, {"deep": {"deeper": [{"deepest": True}]}}),
    ],
)
def test_every_field_type_keeps_value_and_type(value: object) -> None:
    found = read_table(write_table({"k": value}))["k"]
    assert found == value
    assert type(found) is type(value)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.integers(0, 255).map(UByte)
    | st.integers(-32768, 32767).map(Short)
    | st.builds(Seconds, st.integers(0, 2**64 - 1)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.req("N4")
@given(st.dictionaries(st.text(min_size=1, max_size=30), VALUES, max_size=5))
def test_tables_come_back_as_they_went(table: dict[str, object]) -> None:
    assert read_table(write_table(table)) == table


@pytest.mark.req("N4")
@given(st.binary(max_size=200))
def test_no_octets_do_more_than_a_fault(data: bytes) -> None:
    for read in (read_method, read_header, lambda octets: Reader(octets).table()):
        try:
            read(data)
        except (SyntaxFault, NotImplementedFault):
            pass


def test_a_number_without_a_sign_is_written_where_it_fits() -> None:
    assert read_table(write_table({"k": ULong(5)})) == {"k": 5}
    for value in (ULong(1 << 63), 1 << 63, object()):
        with pytest.raises(ValueError, match=r"bits|cannot carry"):
            write_table({"k": value})
    with pytest.raises(ValueError, match="at most 255 octets, not 256"):
        write_shortstr("x" * 256)


@pytest.mark.req("N4")
@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (b"\1aV\1aV", "'a' twice"),
        (b"\0V", "without a name"),
        (b"\1az", "no field type"),
        (b"\1aS\0\0\1\0x", "are there"),
        (b"\1aF\0\0\0\x09", "are there"),
        (b"\5a", "are there"),
    ],
)
def test_ill_tables(table: bytes, complaint: str) -> None:
    with pytest.raises(SyntaxFault, match=complaint):
        Reader(write_longstr(table)).table()


@pytest.mark.req("N4")
def test_tables_are_bounded_in_depth_and_number() -> None:
    def nested(depth: int) -> bytes:
        data = b""
        for _ in range(depth):
            data = b"A" + write_longstr(data)
        return write_longstr(b"\1a" + data)

    Reader(nested(NESTING_MAX)).table()
    with pytest.raises(SyntaxFault, match="deep"):
        Reader(nested(NESTING_MAX + 1)).table()
    for count, fits in ((ELEMENTS_MAX - 1, True), (ELEMENTS_MAX, False)):
        data = write_longstr(b"\1aA" + write_longstr(b"V" * count))
        if fits:
            Reader(data).table()
        else:
            with pytest.raises(SyntaxFault, match=f"more than {ELEMENTS_MAX} fields"):
                Reader(data).table()


@pytest.mark.req("N4")
def test_bits_share_octets_low_bit_first() -> None:
    method = QueueDeclare(queue="q", durable=True, auto_delete=True)
    data = write_method(method)
    assert data == bytes.fromhex("0032000a0000") + b"\1q" + b"\x0a" + b"\0\0\0\0"
    assert read_method(data) == method


def test_a_method_that_there_is_not() -> None:
    with pytest.raises(NotImplementedFault, match="no method 99 in class 60"):
        read_method(bytes.fromhex("003c0063"))
    with pytest.raises(SyntaxFault, match="after its last field"):
        read_method(write_method(QueueDeclare()) + b"\0")


@pytest.mark.req("N5")
@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        ("003c0001" + "00" * 8 + "0000", "weight"),
        ("003c0000" + "00" * 8 + "00010002", "has not"),
        ("003c0000" + "00" * 8 + "0002", "fifteenth"),
        ("003c0000" + "00" * 8 + "000000", "after its last"),
        ("003c0000" + "00" * 7, "are there"),
    ],
)
def test_ill_content_headers(payload: str, complaint: str) -> None:
    with pytest.raises(SyntaxFault, match=complaint):
        read_header(bytes.fromhex(payload))


@pytest.mark.req("N5")
def test_property_flags_may_go_on() -> None:
    payload = bytes.fromhex("003c0000" + "00" * 8 + "000100010000")
    assert read_header(payload) == ContentHeader(60, 0, BasicProperties())


@pytest.mark.req("N5")
@pytest.mark.parametrize("size", [0, 1, 4088, 4089, 10_000])
def test_content_in_frames(size: int) -> None:
    body = bytes(index & 0xFF for index in range(size))
    sent = content_frames(3, BasicDeliver(consumer_tag="c"), BasicProperties(), body, 4096)
    assert all(len(each) <= 4096 for each in sent)
    method, header, *rest = FrameReader(4096).feed(b"".join(sent))
    assert (method.type, header.type) == (METHOD, HEADER)
    assert read_header(header.payload).body_size == size
    assert [each.type for each in rest] == [BODY] * (-(-size // 4088))
    assert b"".join(each.payload for each in rest) == body


@pytest.mark.req("N5")
def test_properties_that_do_not_fit_a_frame() -> None:
    with pytest.raises(ValueError, match="do not fit a frame of 4096"):
        content_frames(1, BasicDeliver(), BasicProperties(headers={"k": "x" * 5000}), b"", 4096)


@pytest.mark.req("N2")
def test_fixed_octets(frames: Any) -> None:
    assert bytes.fromhex(frames["protocol_header"]) == PROTOCOL_HEADER
    assert bytes.fromhex(frames["heartbeat_frame"]) == HEARTBEAT_FRAME == frame(HEARTBEAT, 0, b"")


@pytest.mark.slow
@pytest.mark.req("N2")
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(0, 9), st.binary())), st.data()
)
def test_frames_come_out_however_they_are_cut(
    sent: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    octets = b"".join(frame(*each) for each in sent)
    reader = FrameReader(4096)
    found: list[Frame] = []
    while octets:
        cut = data.draw(st.integers(1, len(octets)))
        found += reader.feed(octets[:cut])
        octets = octets[cut:]
    assert found == [Frame(*each) for each in sent]


def test_frames_that_were_not_taken_come_with_the_next_call() -> None:
    reader = FrameReader(4096)
    first, second, third = (frame(BODY, number, b"x") for number in (1, 2, 3))
    for found in reader.feed(first + second + third[:4]):
        assert found.channel == 1
        break
    assert [each.channel for each in reader.feed(third[4:])] == [2, 3]


@pytest.mark.req("N2")
def test_a_bad_type_or_end_is_no_frame() -> None:
    for octets, complaint in ((b"\4", "type 4"), (b"G", "type 71")):
        with pytest.raises(BrokenFrame, match=complaint):
            list(FrameReader(4096).feed(octets))
    # The end is looked at before the payload is: this one is no method.
    with pytest.raises(BrokenFrame, match="ends with 0xcd"):
        list(FrameReader(4096).feed(frame(METHOD, 1, b"?")[:-1] + b"\xcd"))


@pytest.mark.req("N3")
def test_the_size_is_held_against_what_was_agreed() -> None:
    [whole] = FrameReader(4096).feed(frame(BODY, 1, b"x" * 4088))
    assert len(whole.payload) == 4088
    with pytest.raises(OversizeFrame, match="4097 octets; at most 4096"):
        list(FrameReader(4096).feed(frame(BODY, 1, b"x" * 4089)[:7]))


def test_frame_max_may_change_between_frames() -> None:
    reader = FrameReader(4096)
    found = reader.feed(frame(METHOD, 0, b"") + frame(BODY, 1, b"x" * 5000))
    next(found)
    reader.frame_max = 8192
    assert len(next(found).payload) == 5000
