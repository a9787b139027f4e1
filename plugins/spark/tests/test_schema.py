"""Columns are chosen by the names of a schema, and a type that a column does not have is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from amqp_rt_spark.options import Options
from amqp_rt_spark.schema import COLUMNS, columns_of, with_schema

types = pytest.importorskip("pyspark.sql.types")

_TYPES = {
    "string": types.StringType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "binary": types.BinaryType(),
    "timestamp": types.TimestampType(),
}


def schema(**columns: str) -> Any:
    return types.StructType(
        [types.StructField(name, _TYPES[kind]) for name, kind in columns.items()]
    )


@pytest.mark.req("K1")
def test_columns_are_chosen_by_name() -> None:
    asked = schema(body="binary", offset="bigint", address="string")
    chosen = with_schema(Options(columns=("offset",), raw=True), asked)
    assert columns_of(chosen) == ("body", "offset", "address")
    assert columns_of(with_schema(Options(), schema(message="binary"))) == ("message",)
    text = with_schema(Options(body="text"), schema(body="string"))
    assert columns_of(text) == ("body",)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"bodi": "binary"}, "no column 'bodi': did you mean 'body'"),
        ({"x": "binary"}, f"there are {', '.join(COLUMNS)}"),
        ({"value": "binary"}, "no column .value., which is Kafka.s: did you mean body"),
        ({"offset": "int"}, "'offset' is bigint, not int: cast it after reading"),
        ({"body": "string"}, "'body' is binary, not string; set the option body=text"),
        ({"header": "string"}, "'header' is struct<durable: boolean"),
    ],
)
def test_what_a_message_does_not_have(columns: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=f"^schema: .*{why}"):
        with_schema(Options(), schema(**columns))


_ASKED = """
import sys
import pyspark.sql.datasource
# Older versions of Spark import some of them.
before = set(sys.modules)
from pyspark_amqp_rt import DefaultSource
source = DefaultSource({"url": "amqp://h", "address": "a"})
assert source.name() == "amqp" and "body_variant" in source.schema()
found = (sys.modules.keys() - before) & {"pyarrow", "numpy", "amqp_rt.core.engine", "amqp_rt_spark.wire"}
assert not found, found
"""


@pytest.mark.req("K1")
def test_name_and_columns_are_found_without_arrow_and_the_engine() -> None:
    """Spark asks for both in new processes at each ``load``, where importing these would cost most of the time."""
    subprocess.run([sys.executable, "-c", _ASKED], check=True)
