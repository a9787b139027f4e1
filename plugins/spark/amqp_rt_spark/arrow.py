"""Rows as Arrow record batches, which Spark accepts without conversion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

#: Rows of one batch: larger batches take longer to build, which delays their first row.
ROWS: Final = 4_000
#: Octets of messages after which a batch is closed, however few rows it has.
BATCH_OCTETS: Final = 8 * 1024 * 1024


def batch_of(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return *rows*, at least one, as a record batch with the columns of *schema*."""
    columns = [
        _array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build a column. Structs, which are tuples here, are built field by field, which saves one object a value."""
    if not pa.types.is_struct(kind):
        return pa.array(values, type=kind)
    missing = [value is None for value in values]
    if all(missing):
        return pa.nulls(len(values), type=kind)
    fields = [kind.field(each) for each in range(kind.num_fields)]
    filler: Any = (None,) * len(fields)
    order = list(range(len(fields)))
    if {field.name for field in fields} == {"value", "metadata"}:
        # A VARIANT: its parts are never null, and Spark defines their order.
        filler = b"", b""
        order = [("value", "metadata").index(field.name) for field in fields]
    parts = list(zip(*(filler if value is None else value for value in values), strict=True))
    return pa.StructArray.from_arrays(
        [_array(parts[at], field.type) for at, field in zip(order, fields, strict=True)],
        fields=fields,
        mask=pa.array(missing) if any(missing) else None,
    )
