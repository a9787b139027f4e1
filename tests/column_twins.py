"""Compare the compiled decoder of columns with its definition, ``rows.py``, message by message.

The decoder is the installed one, or is compiled from its source (``c_modules.py``).
"""

from __future__ import annotations

import json
import struct
from functools import cache
from typing import Any, Final

from amqp_rt_spark import variant
from amqp_rt_spark.options import Options
from amqp_rt_spark.rows import PLACE, Records, RowMaker
from amqp_rt_spark.schema import columns_of
from c_modules import ROOT, SANITIZE, compiled_here

from amqp_rt.errors import DecodeError

SOURCE: Final = ROOT / "plugins" / "spark" / "amqp_rt_spark" / "_columnar.c"
ADDRESS: Final = "söme/node"
PARTITION: Final = 3
OFFSET: Final = 2**40
TIME_MS: Final = 1_700_000_000_123
#: Fields of the columns that are structs; VARIANT has two, which are octets.
FIELDS: Final = {
    "header": "bilbl",
    "properties": "ssosssssssllsls",
    "body_variant": "oo",
    "application_properties": "oo",
    "message_annotations": "oo",
}
SCALARS: Final = {
    "address": "s",
    "partition": "i",
    "offset": "l",
    "enqueued_time": "l",
    "body": "o",
    "body_kind": "s",
    "message": "o",
}

#: Options that change how a message is decoded, and each column alone: others must be left undecoded then.
CHOICES: Final = (
    Options(),
    Options(raw=True),
    Options(body="text"),
    Options(body="json"),
    Options(body="binary"),
    *(Options(columns=(name,)) for name in (*SCALARS, *FIELDS)),
    Options(body="text", columns=("body",)),
    Options(body="json", columns=("body_variant",)),
)
#: Options whose result depends on whether the time of a record is given beside it.
TIMED: Final = (
    Options(),
    *(Options(columns=(name,)) for name in ("enqueued_time", "message_annotations")),
)


@cache
def module() -> Any:
    """Return the compiled module; None if it is not installed and there is no compiler."""
    if not SANITIZE:
        try:
            from amqp_rt_spark import _columnar
        except ImportError:
            pass
        else:
            return _columnar
    return compiled_here(SOURCE)


def table(options: Options, rows: int = 100, octets: int = 1 << 30) -> Any:
    """Return a table of the columns that *options* request."""
    return module().Table(
        columns_of(options),
        rows=rows,
        octets=octets,
        text=options.body == "text",
        all_json=options.body == "json",
        parse=parsed if options.body == "json" else parsed_if_json,
        hidden=[name.encode() for name in sorted(PLACE)],
    )


def parsed(octets: bytes) -> tuple[bytes, bytes]:
    return variant.encode(json.loads(octets))


def parsed_if_json(octets: bytes) -> tuple[bytes, bytes] | None:
    try:
        return parsed(octets)
    except ValueError:
        return None


@cache
def kept_table(options: Options) -> Any:
    """Return a table for repeated use, which would show remains of earlier rows."""
    return table(options)


def check(payload: bytes) -> set[Options]:
    """Decode *payload* in both ways and compare; return the options with which the compiled decoder did it."""
    taken = set()
    for options, offsets, times in (
        (Options(), None, None),
        *((each, [OFFSET], None) for each in CHOICES),
        *((each, [OFFSET], [TIME_MS]) for each in TIMED),
    ):
        kept = kept_table(options)
        done = kept.fill([payload], 0, 1, offsets, ADDRESS, PARTITION, times)
        count, columns = kept.take()
        assert count == done
        if not done:
            continue
        if offsets and not times:
            taken.add(options)
        (found,) = rows_of(columns, count, options)
        try:
            (expected,) = RowMaker(options).rows(
                [Records(ADDRESS, [payload], PARTITION, offsets, times=times)]
            )
        except DecodeError as error:
            raise AssertionError(f"{options.columns} of {payload!r} is {found}") from error
        assert found == plain(expected), (columns_of(options), payload)
    return taken


def plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return *row* with texts as octets, as the compiled decoder has them."""
    return tuple(
        plain(each) if type(each) is tuple else each.encode() if isinstance(each, str) else each
        for each in row
    )


def rows_of(columns: list[Any], count: int, options: Options) -> list[tuple[Any, ...]]:
    """Return the rows in the Arrow buffers of *columns*."""
    found = []
    for name, parts in zip(columns_of(options), columns, strict=True):
        fields = FIELDS.get(name)
        if fields is None:
            found.append(leaf_of(parts, count, SCALARS[name]))
            continue
        nulls, bits, leaves = parts
        valid = validity_of(nulls, bits, count)
        values = zip(
            *(leaf_of(*each) for each in zip(leaves, [count] * len(leaves), fields, strict=True)),
            strict=True,
        )
        found.append([value if each else None for each, value in zip(valid, values, strict=True)])
    return list(zip(*found, strict=True))


def validity_of(nulls: int, bits: bytes | None, count: int) -> list[bool]:
    if bits is None:
        assert nulls == 0
        return [True] * count
    valid = [bool(bits[each >> 3] >> (each & 7) & 1) for each in range(count)]
    assert valid.count(False) == nulls
    return valid


def leaf_of(parts: tuple[Any, ...], count: int, kind: str) -> list[Any]:
    nulls, bits, values, *octets = parts
    valid = validity_of(nulls, bits, count)
    made: list[Any]
    if octets:
        (data,) = octets
        ends = struct.unpack(f"={count + 1}i", values)
        assert ends[0] == 0
        assert ends[-1] == len(data)
        assert list(ends) == sorted(ends)
        made = [data[ends[each] : ends[each + 1]] for each in range(count)]
    elif kind == "b":
        made = [bool(values[each >> 3] >> (each & 7) & 1) for each in range(count)]
    else:
        made = list(struct.unpack(f"={count}{'i' if kind == 'i' else 'q'}", values))
    return [value if each else None for each, value in zip(valid, made, strict=True)]
