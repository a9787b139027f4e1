"""Any value there and back, any bytes to a value or a ``DecodeError``, in bounded memory."""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed_values import same, values

from amqp_rt.codec.composites import read_described_as, read_known, registry_of
from amqp_rt.codec.primitives import Reader, decode, encode
from amqp_rt.errors import DecodeError
from amqp_rt.limits import DEFAULT_LIMITS

#: Every composite type that a peer can send on a connection.
REGISTRY = registry_of(
    *{
        value
        for module in ("core.performatives", "core.sasl_frames", "transactions")
        for value in vars(import_module(f"amqp_rt.{module}")).values()
        if isinstance(value, type) and "__composite__" in vars(value)
    },
)
CODES = [code for code in REGISTRY if isinstance(code, int)]


def survive(data: bytes) -> None:
    """Read *data* in every way there is; nothing but ``DecodeError`` may come out."""
    for read in (
        Reader.read_value,
        Reader.skip_value,
        lambda reader: read_known(reader, REGISTRY),
        lambda reader: read_described_as(reader, REGISTRY),
    ):
        reader = Reader(data)
        try:
            while reader.at < reader.end:
                read(reader)
                assert reader.at <= reader.end
        except DecodeError:
            pass


@pytest.mark.slow
@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6")
@given(values)
def test_every_value_comes_back_as_it_was(value: object) -> None:
    data = encode(value)
    found = decode(data)
    # A map with keys that a dict cannot tell apart comes back as a Map, which equals it.
    assert same(found, value) or encode(found) == data
    reader = Reader(data)
    reader.skip_value()
    assert reader.at == len(data)


@pytest.mark.req("T9")
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_decode_error(data: bytes) -> None:
    survive(data)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An encoded value with a few octets changed, taken out or put in."""
    data = bytearray(encode(draw(values)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["change", "remove", "insert", "cut"]))
        if what == "change" and data:
            data[at] = draw(st.integers(0, 255))
        elif what == "remove":
            del data[at : at + 1]
        elif what == "insert":
            data.insert(at, draw(st.integers(0, 255)))
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.slow
@pytest.mark.req("T9")
@given(damaged())
def test_damaged_values_are_a_value_or_a_decode_error(data: bytes) -> None:
    survive(data)


@pytest.mark.slow
@pytest.mark.req("T9")
@given(damaged())
def test_what_can_be_read_can_be_skipped_and_sent_again(data: bytes) -> None:
    reader = Reader(data)
    try:
        value = reader.read_value()
    except DecodeError:
        return
    skipper = Reader(data)
    skipper.skip_value()
    assert skipper.at == reader.at
    again = decode(encode(value))
    assert same(again, value) or encode(again) == encode(value)


@pytest.mark.slow
@pytest.mark.req("T7", "T9")
@given(st.sampled_from(CODES), st.lists(values, max_size=16), st.data())
def test_composites_of_wrong_fields_are_decode_errors(
    code: int, items: list[object], data: st.DataObject
) -> None:
    wire = bytearray(b"\x00\x53" + bytes((code,)) + encode(items))
    survive(bytes(wire))
    at = data.draw(st.integers(3, len(wire) - 1))
    wire[at] = data.draw(st.integers(0, 255))
    survive(bytes(wire))


HUGE = struct.pack(">I", 0xFFFF_FFFF)
LIES = [
    *(bytes((code, 0xFF)) for code in (0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0)),
    *(bytes((code,)) + HUGE for code in (0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0)),
    *(bytes((code,)) + HUGE + HUGE for code in (0xD0, 0xD1, 0xF0)),
    *(bytes((code,)) + HUGE + HUGE + b"\x40" * 9 for code in (0xD0, 0xD1, 0xF0)),
    *(bytes((code, 0, 0, 0, 9)) + HUGE + b"\x40" * 5 for code in (0xD0, 0xD1)),
    *(b"\xf0\0\0\0\5" + HUGE + bytes((zero,)) for zero in (0x40, 0x41, 0x42, 0x43, 0x44, 0x45)),
    b"\xf0\0\0\0\x09" + HUGE + b"\0\x44\0\x44\x44",
]


@pytest.mark.req("T9")
@pytest.mark.parametrize("lie", LIES, ids=bytes.hex)
def test_sizes_and_counts_that_lie_cost_no_memory(lie: bytes) -> None:
    inside = [lie, b"\x00\x53\x14" + lie, b"\x00\x53\x14\xc0\xff\x05\x43" + lie]
    for data in inside:
        survive(data)  # whatever is made once only
        tracemalloc.start()
        try:
            survive(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16_384


@pytest.mark.req("T9")
@pytest.mark.parametrize("zero", [0x40, 0x41, 0x43, 0x44, 0x45], ids=hex)
def test_the_largest_array_of_nothing_stays_within_the_budget(zero: int) -> None:
    count = DEFAULT_LIMITS.elements_max
    data = b"\xf0\0\0\0\5" + struct.pack(">I", count) + bytes((zero,))
    tracemalloc.start()
    try:
        items = decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(items) == count  # type: ignore[arg-type]
    assert peak < count * 100
    with pytest.raises(DecodeError, match="elements_max"):
        decode(b"\xf0\0\0\0\5" + struct.pack(">I", count + 1) + bytes((zero,)))


@pytest.mark.slow
@pytest.mark.req("T9")
@pytest.mark.parametrize("file", ["go-amqp-fuzz.jsonl", "proton-fuzz.jsonl"])
def test_the_fuzz_inputs_of_others(shared: Path, file: str) -> None:
    targets = set()
    for line in (shared / "spec" / "vectors" / file).read_text().splitlines():
        entry = json.loads(line)
        targets.add(entry["target"])
        data = base64.b64decode(entry["b64"])
        survive(data)
        for start in range(1, min(len(data), 64)):
            survive(data[start:])
    assert targets & {"marshal", "message-decode"}
