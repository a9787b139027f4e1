"""Encoded messages as Arrow record batches, by the compiled decoder where available.

``_columnar`` (C) decodes well-formed, usual messages directly into the buffers of columns. All others, and all
without the compiled decoder, become rows first (:mod:`.rows`) and columns afterwards (:mod:`.arrow`): these
define the columns, and a differential test holds the compiled decoder to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

from . import variant
from .arrow import BATCH_OCTETS, ROWS, batch_of
from .malformed import decoded
from .options import Options
from .rows import PLACE, Records, RowMaker
from .schema import columns_of

try:
    from ._columnar import Table
except ImportError:
    Table = None  # type: ignore[assignment, misc]

#: Whether the decoder in C is available.
COMPILED: Final = Table is not None


def batches(
    found: Iterable[Records], options: Options, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield *found* with the columns of *schema*, in batches of at most ``ROWS`` messages, closed earlier when
    their messages have ``BATCH_OCTETS``.

    Raises:
        DecodeError: A message is malformed, and ``onUndecodable`` is not ``row``.
    """
    compiled = Table is not None and _is_ours(schema, options)
    batch = (_Compiled if compiled else _Plain)(options, schema)
    for records in found:
        at = 0
        while (at := batch.add(records, at)) < len(records.payloads):
            yield batch.take()
    if batch.count:
        yield batch.take()


class _Plain:
    """A batch made of rows."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self._maker = RowMaker(options)
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._octets = 0

    @property
    def count(self) -> int:
        return len(self._rows)

    def add(self, records: Records, at: int) -> int:
        """Add messages from the index *at* on; return the index of the first one without room."""
        payloads = records.payloads
        while at < len(payloads) and self.count < ROWS and self._octets < BATCH_OCTETS:
            self._rows.append(self._maker.row(decoded(payloads[at]), records.place(at)))
            self._octets += len(payloads[at])
            at += 1
        return at

    def take(self) -> pa.RecordBatch:
        """Return the batch, and begin another one."""
        rows, self._rows, self._octets = self._rows, [], 0
        return batch_of(rows, self._schema)


class _Compiled:
    """A batch made by the compiled decoder, except for unusual messages, which become rows."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        all_json = options.body == "json"
        self._table = Table(
            columns_of(options),
            rows=ROWS,
            octets=BATCH_OCTETS,
            text=options.body == "text",
            all_json=all_json,
            parse=_parsed if all_json else _parsed_if_json,
            hidden=[name.encode() for name in sorted(PLACE)],
        )
        self._schema = schema
        self._odd = _Plain(options, schema)
        #: Indexes of the unusual messages in the batch.
        self._places: list[int] = []

    @property
    def count(self) -> int:
        return self._table.rows + self._odd.count

    def add(self, records: Records, at: int) -> int:
        """Add messages from the index *at* on; return the index of the first one without room."""
        payloads, table = records.payloads, self._table
        address, partition = records.address, records.partition
        while at < len(payloads) and self.count < ROWS:
            stop = min(len(payloads), at + ROWS - self.count)
            at = table.fill(payloads, at, stop, records.offsets, address, partition, records.times)
            if at == stop or table.full:
                break
            place = self.count
            offsets = None if records.offsets is None else records.offsets[at : at + 1]
            times = None if records.times is None else records.times[at : at + 1]
            one = Records(address, payloads[at : at + 1], partition, offsets, times=times)
            if not self._odd.add(one, 0):
                break
            self._places.append(place)
            at += 1
        return at

    def take(self) -> pa.RecordBatch:
        """Return the batch, and begin another one."""
        count, columns = self._table.take()
        batch = pa.RecordBatch.from_arrays(
            [
                _array(parts, count, field.type)
                for parts, field in zip(columns, self._schema, strict=True)
            ],
            schema=self._schema,
        )
        if not self._places:
            return batch
        places, self._places = self._places, []
        return _merged(batch, self._odd.take(), places)


_MOMENT: Final = pa.timestamp("us", tz="UTC")
#: Types of the columns, and of the fields of struct columns, as the compiled decoder makes them.
_TYPES: Final[dict[str, tuple[pa.DataType, ...]]] = {
    "address": (pa.string(),),
    "partition": (pa.int32(),),
    "offset": (pa.int64(),),
    "enqueued_time": (_MOMENT,),
    "body": (pa.binary(),),
    "body_kind": (pa.string(),),
    "body_variant": (pa.binary(), pa.binary()),
    "header": (pa.bool_(), pa.int32(), pa.int64(), pa.bool_(), pa.int64()),
    "properties": (
        *(pa.string(), pa.string(), pa.binary(), *[pa.string()] * 7),
        *(_MOMENT, _MOMENT, pa.string(), pa.int64(), pa.string()),
    ),
    "application_properties": (pa.binary(), pa.binary()),
    "message_annotations": (pa.binary(), pa.binary()),
    "message": (pa.binary(),),
}


def _is_ours(schema: pa.Schema, options: Options) -> bool:
    """Return whether the compiled decoder has all columns of *schema*, with the types that it makes: buffers are
    interpreted by the type of the schema."""
    names = columns_of(options)
    if len(names) != len(schema):
        return False
    for name, field in zip(names, schema, strict=True):
        kind, types = field.type, _TYPES.get(name)
        if name == "body" and options.body == "text":
            types = (pa.string(),)
        found = (kind,)
        if pa.types.is_struct(kind):
            found = tuple(kind.field(each).type for each in range(kind.num_fields))
        if found != types or pa.types.is_struct(kind) != (len(types) > 1):
            return False
    return True


def _merged(usual: pa.RecordBatch, odd: pa.RecordBatch, places: list[int]) -> pa.RecordBatch:
    """Return the rows of both, those of *odd* at *places*."""
    order = list(range(len(usual)))
    for number, place in enumerate(places):
        order.insert(place, len(usual) + number)
    (merged,) = pa.Table.from_batches([usual, odd]).take(order).combine_chunks().to_batches()
    return merged


def _array(parts: tuple[Any, ...], count: int, kind: pa.DataType) -> pa.Array:
    """Return the array of buffers from the compiled decoder."""
    nulls, valid, *values = parts
    bits = None if valid is None else pa.py_buffer(valid)
    if not pa.types.is_struct(kind):
        buffers = [bits, *map(pa.py_buffer, values)]
        return pa.Array.from_buffers(kind, count, buffers, null_count=nulls)
    fields = [kind.field(each) for each in range(kind.num_fields)]
    (children,) = values
    if [field.name for field in fields] == ["metadata", "value"]:
        children = children[::-1]
    arrays = [
        _array(child, count, field.type) for child, field in zip(children, fields, strict=True)
    ]
    return pa.Array.from_buffers(kind, count, [bits], null_count=nulls, children=arrays)


def _parsed(octets: bytes) -> tuple[bytes, bytes]:
    """Parse a body of JSON.

    Raises:
        ValueError: The body is not JSON.
    """
    return variant.encode(json.loads(octets))


def _parsed_if_json(octets: bytes) -> tuple[bytes, bytes] | None:
    """Parse a body whose content-type is JSON; return None if it is something else."""
    try:
        return _parsed(octets)
    except ValueError:
        return None
