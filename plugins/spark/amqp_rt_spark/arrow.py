"""Rows as batches of Arrow, which Spark takes as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

#: Rows of one batch: larger ones are slower to make, and their first row comes later.
ROWS: Final = 4_000
#: Octets of messages after which a batch is closed, however few rows it has.
BATCH_OCTETS: Final = 8 * 1024 * 1024


def batch_of(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return *rows*, of which there is at least one, by the columns of *schema*."""
    columns = [
        _array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column; of structs, which are tuples here, field by field: one object less for each."""
    if not pa.types.is_struct(kind):
        return pa.array(values, type=kind)
    missing = [value is None for value in values]
    if all(missing):
        return pa.nulls(len(values), type=kind)
    fields = [kind.field(each) for each in range(kind.num_fields)]
    filler: Any = (None,) * len(fields)
    order = list(range(len(fields)))
    if {field.name for field in fields} == {"value", "metadata"}:
        # A VARIANT, whose parts are never null, and are in Spark's order.
        filler = b"", b""
        order = [("value", "metadata").index(field.name) for field in fields]
    parts = list(zip(*(filler if value is None else value for value in values), strict=True))
    return pa.StructArray.from_arrays(
        [_array(parts[at], field.type) for at, field in zip(order, fields, strict=True)],
        fields=fields,
        mask=pa.array(missing) if any(missing) else None,
    )
