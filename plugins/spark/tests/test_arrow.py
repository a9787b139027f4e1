"""Rows as batches of Arrow."""

from __future__ import annotations

from typing import Any

import column_twins
import pytest
from amqp_rt_spark.options import Options
from amqp_rt_spark.rows import Records, RowMaker
from amqp_rt_spark.schema import COLUMNS, columns_of

from amqp_rt import Message
from amqp_rt.broker.log.annotations import annotate_record
from amqp_rt.broker.log.records import Record
from amqp_rt.values import Char, Symbol

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (make .venv/spark)")

from amqp_rt_spark.arrow import batch_of  # noqa: E402 - it takes pyarrow

pytestmark = pytest.mark.req("K1")


def variant(*names: str) -> Any:
    return pa.struct([pa.field(name, pa.binary(), nullable=False) for name in names])


@pytest.mark.slow
def test_rows_become_columns() -> None:
    schema = pa.schema(
        [
            pa.field("n", pa.int64()),
            pa.field("pair", pa.struct([pa.field("a", pa.string()), pa.field("b", pa.int32())])),
            pa.field("typed", variant("value", "metadata")),
            pa.field("turned", variant("metadata", "value")),
            pa.field("nothing", variant("value", "metadata")),
        ]
    )

    def row(number: int) -> tuple[Any, ...]:
        pair = None if number % 3 == 0 else (f"a{number}" if number % 2 else None, number)
        octets = None if number % 5 == 0 else (b"v%d" % number, b"m")
        return number, pair, octets, octets, None

    found = batch_of([row(number) for number in range(37)], schema)
    found.validate(full=True)
    assert (found.num_rows, found.schema) == (37, schema)
    for number, each in enumerate(found.to_pylist()):
        _, pair, octets, _, _ = row(number)
        typed = octets and dict(zip(("value", "metadata"), octets, strict=True))
        assert each == {
            "n": number,
            "pair": pair and dict(zip(("a", "b"), pair, strict=True)),
            "typed": typed,
            "turned": typed,
            "nothing": None,
        }


USUAL = [
    Message(
        f"{number}" * 50,
        subject="s",
        ttl_ms=number or None,
        application_properties={"n": number, "é": "x"} if number % 3 else None,
    ).encode()
    for number in range(60)
]
#: Messages that the compiled decoder leaves to the other one.
ODD = Message(Char("x")).encode()
BROKEN = b"\x00\x53\x75\xa0\x05ab"


#: Columns that the compiled decoder does not have.
NAMED = {"key": pa.string(), "timestamp": pa.timestamp("us", tz="UTC"), "broker": pa.string()}


def schema_of(options: Options) -> Any:
    """As Spark says it, but for the names of fields."""
    from amqp_rt_spark.columnar import _TYPES

    fields = []
    for name in columns_of(options):
        if name in NAMED:
            fields.append(pa.field(name, NAMED[name]))
            continue
        types = _TYPES[name]
        kind = types[0]
        if name == "body" and options.body == "text":
            kind = pa.string()
        if len(types) == 2:
            # Both orders are known to Spark.
            kind = variant(*("metadata", "value") if "app" in name else ("value", "metadata"))
        elif len(types) > 2:
            kind = pa.struct([pa.field(f"f{at}", each) for at, each in enumerate(types)])
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


@pytest.fixture(params=["plain", "compiled"])
def columnar(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with the decoder in C and without."""
    from amqp_rt_spark import columnar

    if request.param == "compiled" and column_twins.module() is None:
        pytest.skip("there is no C compiler, and nothing installed")
    found = column_twins.module().Table if request.param == "compiled" else None
    monkeypatch.setattr(columnar, "Table", found)
    return columnar


def records(payloads: list[bytes], size: int) -> Any:
    for at in range(0, len(payloads), size):
        some = payloads[at : at + size]
        yield Records("n", some, 1, list(range(at, at + len(some))))


@pytest.mark.parametrize(
    "options",
    [
        Options(raw=True, on_undecodable="row"),
        Options(body="text", on_undecodable="row"),
        Options(columns=("body", "offset"), on_undecodable="row"),
        Options(columns=("message_annotations", "application_properties"), on_undecodable="row"),
    ],
)
@pytest.mark.parametrize("odd", [0, 1, 2, 7, 60])
def test_odd_messages_keep_their_places(
    columnar: Any, monkeypatch: pytest.MonkeyPatch, options: Options, odd: int
) -> None:
    monkeypatch.setattr(columnar, "ROWS", 25)
    payloads = list(USUAL)
    for number in range(odd):
        payloads[number * 60 // odd] = BROKEN if number % 2 else ODD
    schema = schema_of(options)
    maker = RowMaker(options)
    expected = batch_of(list(maker.rows(records(payloads, 60))), schema)
    for size in (1, 24, 25, 26, 60):
        found = list(columnar.batches(records(payloads, size), options, schema))
        assert [each.num_rows for each in found] == [25, 25, 10]
        for each in found:
            each.validate(full=True)
        (together,) = pa.Table.from_batches(found).combine_chunks().to_batches()
        assert together.equals(expected, check_metadata=True)


@pytest.mark.parametrize("payload", [USUAL[0], ODD])
def test_a_batch_is_closed_by_its_octets(
    columnar: Any, monkeypatch: pytest.MonkeyPatch, payload: bytes
) -> None:
    monkeypatch.setattr(columnar, "BATCH_OCTETS", 3 * len(payload))
    options = Options(columns=("offset",))
    found = columnar.batches(records([payload] * 10, 5), options, schema_of(options))
    assert [each.num_rows for each in found] == [3, 3, 3, 1]
    assert list(columnar.batches([], options, schema_of(options))) == []


def test_another_schema_is_not_filled_with_octets_of_ours(columnar: Any) -> None:
    """Spark takes the schema of the user's: buffers would be taken for what its types say."""
    options = Options(columns=("offset", "body"))
    given = pa.schema([pa.field("offset", pa.int32()), pa.field("body", pa.string())])
    (found,) = columnar.batches(records([Message(b"x").encode()] * 2, 2), options, given)
    assert found.to_pylist() == [{"offset": 0, "body": "x"}, {"offset": 1, "body": "x"}]
    short = pa.schema([pa.field("offset", pa.int64())])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        list(columnar.batches(records([Message(b"x").encode()], 1), options, short))


KEYS = ["k", b"octets", b"\xff", Symbol("s"), "", 7, None]


@pytest.mark.parametrize("named", [*[(name,) for name in NAMED], tuple(NAMED)], ids="-".join)
def test_columns_that_only_rows_have_change_no_other_one(
    columnar: Any, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    """A table with one of them is made of rows. The others are what the compiled decoder makes without it."""
    payloads = [*USUAL, ODD, BROKEN]
    for number, key in enumerate(KEYS * 3):
        said: dict[Any, Any] = {} if key is None else {Symbol("x-opt-partition-key"): key}
        if number % 2:
            said[Symbol("x-opt-a")] = number
        message = Message(f"{number}", message_annotations=said or None)
        found = annotate_record(1, number, Record(1_700_000_000_000 + number, message.encode()))
        payloads.append(b"".join(found) if isinstance(found, list) else found)
    some = Records("n", payloads, 1, list(range(len(payloads))), "amqp://one:5672")
    others = tuple(name for name in COLUMNS if name not in NAMED)

    def made(columns: tuple[str, ...]) -> Any:
        options = Options(columns=columns, on_undecodable="row")
        found = list(columnar.batches([some], options, schema_of(options)))
        return pa.Table.from_batches(found).combine_chunks()

    alone = made(others)
    # First and last: what a column means does not depend on those before it.
    for columns in (others + named, named + others):
        both = made(columns)
        both.validate(full=True)
        assert both.select(others).equals(alone, check_metadata=True)
    # And without a decoder in C they are the same.
    with monkeypatch.context() as plain:
        plain.setattr(columnar, "Table", None)
        assert made(named + others).equals(both, check_metadata=True)
    expected = {
        "key": [None] * 62 + ["k", "octets", "\\xff", "s", "", "7", None] * 3,
        "timestamp": alone["enqueued_time"].to_pylist(),
        "broker": ["amqp://one:5672"] * len(payloads),
    }
    assert both.select(named).to_pydict() == {name: expected[name] for name in named}
