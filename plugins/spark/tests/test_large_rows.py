"""Rows that are large: what a worker takes in memory is bounded by bytes, not by the number of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

ROWS = 64
SIZE = 9 * 1_048_576 // 4

#: Work of a worker of Spark on one partition: its rows, its batches, and its peak of memory.
WORKER = """
import json, resource, sys
from amqp_rt_spark.source import AmqpDataSource
from pyspark.sql.types import BinaryType, LongType, StructType

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

source = AmqpDataSource({"url": sys.argv[1], "address": "one", "body": "binary", "columns": "offset,body"})
reader = source.reader(StructType().add("offset", LongType()).add("body", BinaryType()))
(partition,) = reader.partitions()
before, offsets, largest, sizes = peak(), [], 0, set()
for batch in reader.read(partition):
    offsets += batch.column("offset").to_pylist()
    sizes |= {len(body.as_buffer()) for body in batch.column("body")}
    largest = max(largest, batch.nbytes)
print(json.dumps([offsets, sorted(sizes), largest, peak() - before]))
"""


@pytest.mark.slow
@pytest.mark.req("K2")
def test_a_worker_holds_few_rows_that_are_large(served: Any) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("resource")
    served.send("one", *(bytes(SIZE) for _ in range(ROWS)))
    done = subprocess.run(
        [sys.executable, "-c", WORKER, served.url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    offsets, sizes, largest, grown = json.loads(done.stdout)
    assert (offsets, sizes) == (list(range(ROWS)), [SIZE])
    assert largest < 16 * 1_048_576
    # All rows together, which the first batch was before it was bounded by bytes.
    assert grown < ROWS * SIZE
