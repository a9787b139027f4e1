"""Checkpoints that do not fit, in Spark itself: nothing is lost without a word. Each test has a ledger."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from amqp_rt.broker import Log

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def query(
    spark: Any, served: Any, checkpoint: Path, source: dict[str, str], sink: dict[str, str]
) -> str:
    """Copy a log to the queue ``out``; an empty text, or why the query has ended before its end."""
    from pyspark.errors import StreamingQueryException

    given = {"url": served.url, "address": "one", "raw": "true", "columns": "message", **source}
    rows = spark.readStream.format("amqp").options(**given).load()
    written = {"url": served.url, "address": "out", "checkpointLocation": str(checkpoint), **sink}
    running = rows.writeStream.format("amqp").options(**written).trigger(availableNow=True).start()
    try:
        assert running.awaitTermination(120)
    except StreamingQueryException as error:
        return str(error)
    return ""


def send(served: Any, begin: int, end: int) -> None:
    served.send("one", *(str(number) for number in range(begin, end)))


def ledger(served: Any, begin: int, end: int) -> bool:
    """Whether the numbers are in the queue, each once, and nothing else."""
    return Counter(served.bodies("out")) == Counter(map(str, range(begin, end)))


@pytest.mark.req("K3")
def test_a_checkpoint_from_a_backup(spark: Any, served: Any, tmp_path: Path) -> None:
    checkpoint, backup = tmp_path / "checkpoint", tmp_path / "backup"
    send(served, 0, 40)
    assert query(spark, served, checkpoint, {}, {}) == ""
    shutil.copytree(checkpoint, backup)
    send(served, 40, 140)
    assert query(spark, served, checkpoint, {}, {}) == ""
    # After a crash Spark repeats the plan, and has noted nothing as done.
    for note in (checkpoint / "commits").glob("*1*"):
        note.unlink()
    assert query(spark, served, checkpoint, {}, {}) == ""
    assert ledger(served, 0, 140)
    send(served, 140, 340)
    why = query(spark, served, backup, {}, {})
    assert "is committed with something else: 100 messages" in why
    assert '"p": {"0": 140}' in why
    assert "startingOffsets where the published ones end" in why
    assert ledger(served, 0, 140)
    there = {"startingOffsets": '{"one": {"0": 140}}'}
    assert query(spark, served, tmp_path / "new", there, {"producer": "new"}) == ""
    assert ledger(served, 0, 340)


@pytest.mark.req("K3")
def test_a_producer_without_its_checkpoint(spark: Any, served: Any, tmp_path: Path) -> None:
    send(served, 0, 20)
    assert query(spark, served, tmp_path / "one", {}, {"producer": "job"}) == ""
    send(served, 20, 50)
    why = query(spark, served, tmp_path / "two", {}, {"producer": "job"})
    assert "epoch 0 of 'job' is committed with something else: 20 messages" in why
    assert ledger(served, 0, 20)


@pytest.mark.req("K3")
def test_two_writes_in_one_micro_batch(spark: Any, served: Any, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    send(served, 0, 500)
    source = {"url": served.url, "address": "one", "body": "text", "columns": "body"}
    sink = {"url": served.url, "address": "out", "producer": "job"}
    fails = [True]

    def twice(rows: Any, number: int) -> None:
        rows.write.format("amqp").options(**sink).mode("append").save()
        if fails.pop():
            raise RuntimeError("between the two")
        more = rows.selectExpr("string(int(body) + 500) body")
        more.write.format("amqp").options(**sink).mode("append").save()

    for failure in (True, False):
        fails[:] = [failure]
        rows = spark.readStream.format("amqp").options(**source).load()
        writer = rows.writeStream.foreachBatch(twice)
        running = (
            writer.option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .start()
        )
        if failure:
            with pytest.raises(StreamingQueryException, match="between the two"):
                running.awaitTermination(120)
            assert ledger(served, 0, 500)
        else:
            assert running.awaitTermination(120)
    assert ledger(served, 0, 1000)


@pytest.mark.req("K3")
def test_a_name_that_another_batch_had(spark: Any, served: Any) -> None:
    def write(end: int, name: str, begin: int = 0) -> None:
        rows = spark.range(begin, end).selectExpr("string(id) body")
        given = {"url": served.url, "address": "out", "producer": name}
        rows.write.format("amqp").options(**given).mode("append").save()

    write(20, "report")
    write(20, "report")
    with pytest.raises(Exception, match="this name was given to another batch"):
        write(30, "report")
    assert ledger(served, 0, 20)
    write(30, "another report", 20)
    assert ledger(served, 0, 30)


@pytest.mark.req("K2")
def test_a_log_that_was_made_again(spark: Any, served: Any, tmp_path: Path) -> None:
    send(served, 0, 20)
    group = {"group": "g"}
    assert query(spark, served, tmp_path, group, {}) == ""
    served.broker.delete("one")
    served.broker.declare(Log("one", partitions=1))
    send(served, 20, 30)
    assert "was deleted and made again" in query(spark, served, tmp_path, group, {})
    assert ledger(served, 0, 20)
    assert query(spark, served, tmp_path, {**group, "failOnDataLoss": "false"}, {}) == ""
    assert ledger(served, 0, 30)
    # Nothing is kept from retention by a query that has ended.
    send(served, 30, 40)
    assert query(spark, served, tmp_path, group, {}) == ""
    assert ledger(served, 0, 40)
