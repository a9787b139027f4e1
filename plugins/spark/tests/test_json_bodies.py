"""Structs, maps and arrays become JSON as ``to_json`` makes it."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pytest
from amqp_rt_spark.json_bodies import encode

#: Expressions of Spark SQL, each a field of the struct that is written.
FIELDS = {
    "flag": "true",
    "count": "cast(9223372036854775807 as bigint)",
    "half": "cast(0.5 as double)",
    "tenth": "cast(0.1 as float)",
    "third": "cast(1 as float) / cast(3 as float)",
    "price": "cast(12.30 as decimal(10, 2))",
    "text": "'a \"quoted\" ü'",
    "octets": "cast(unhex('00ff80') as binary)",
    "day": "date'2026-03-01'",
    "at": "timestamp'2026-03-01 12:30:15.123456'",
    "even": "timestamp'2026-03-01 12:30:15'",
    "local": "timestamp_ntz'2026-03-01 12:30:15.5'",
    "missing": "cast(null as string)",
    "list": "array(1, null, 3)",
    "names": "map('a', 1, 'b', null)",
    "inner": "named_struct('x', 1, 'y', cast(null as int))",
    "nan": "cast('NaN' as double)",
    "endless": "cast('-Infinity' as float)",
    "took": "interval '1 02:03:04.5' day to second",
    "back": "interval '-0 00:00:01' day to second",
}


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.req("K2")
def test_a_struct_is_written_as_spark_writes_it(spark: Any) -> None:
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        pairs = ", ".join(f"'{name}', {text}" for name, text in FIELDS.items())
        frame = spark.sql(f"select named_struct({pairs}) as body")
        said = frame.selectExpr("to_json(body) as text").head().text
        found = encode(frame.head().body, frame.schema["body"].dataType).decode()
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    wanted = json.loads(said, parse_float=Decimal)
    got = json.loads(found, parse_float=Decimal)
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert got[name] == value, name


def test_without_types() -> None:
    assert encode({7: b"\x00", True: None}) == b'{"7":"AA==","true":null}'
    assert encode([dt.datetime(2026, 3, 1, tzinfo=dt.UTC)]) == b'["2026-03-01T00:00:00.000Z"]'


def test_what_json_has_no_form_for() -> None:
    with pytest.raises(ValueError, match="a value of type complex cannot be written as JSON"):
        encode([1j])
