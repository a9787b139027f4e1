"""Rows as batches of Arrow."""

from __future__ import annotations

from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (make .venv/spark)")

pytestmark = pytest.mark.req("K1")


def variant(*names: str) -> Any:
    return pa.struct([pa.field(name, pa.binary(), nullable=False) for name in names])


def test_rows_become_columns() -> None:
    from amqp_rt_spark.arrow import ROWS, batches

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

    count = 2 * ROWS + 7
    found = list(batches(map(row, range(count)), schema))
    assert [each.num_rows for each in found] == [ROWS, ROWS, 7]
    for each in found:
        each.validate(full=True)
        assert each.schema == schema
    rows = [each for batch in found for each in batch.to_pylist()]
    for number, each in enumerate(rows):
        _, pair, octets, _, _ = row(number)
        typed = octets and dict(zip(("value", "metadata"), octets, strict=True))
        assert each == {
            "n": number,
            "pair": pair and dict(zip(("a", "b"), pair, strict=True)),
            "typed": typed,
            "turned": typed,
            "nothing": None,
        }
    assert list(batches([], schema)) == []
