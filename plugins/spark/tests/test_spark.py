"""The format ``amqp`` in Spark itself: one session, small data."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections

from amqp_rt import Message
from amqp_rt.broker import Log
from amqp_rt.values import Short, Symbol, Timestamp

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def at(reader: Any, served: Any, address: str, **options: str) -> Any:
    found = reader.format("amqp").option("url", served.url).option("address", address)
    for name, value in options.items():
        found = found.option(name, value)
    return found


def copy(spark: Any, served: Any, checkpoint: Path, to: str, **options: str) -> Any:
    """A query that copies the log to a node, and ends when it has read everything."""
    source = at(spark.readStream, served, "log", raw="true", **options).load()
    rows = source.drop("address")
    sink = at(rows.writeStream, served, to).option("checkpointLocation", str(checkpoint))
    query = sink.trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert query.exception() is None
    return query


@pytest.mark.req("K1")
@pytest.mark.smoke
def test_a_log_is_a_table(spark: Any, served: Any) -> None:
    served.send("log", *(f"text {number}" for number in range(20)), subject="s")
    served.send(
        "log",
        Message(
            {"a": [1, {"b": True}]},
            message_id=uuid.UUID(int=7),
            creation_time=Timestamp(1_700_000_000_123),
            application_properties={
                "n": Short(3),
                "when": Timestamp(1_000),
                "id": uuid.UUID(int=9),
            },
        ),
    )
    found = at(spark.read, served, "log").load()
    assert found.count() == 21
    texts = found.where("properties.subject = 's'").select("partition", "offset", "body").collect()
    assert {bytes(row.body).decode() for row in texts} == {f"text {each}" for each in range(20)}
    assert len({(row.partition, row.offset) for row in texts}) == 20
    (row,) = (
        found.where("properties.message_id is not null")
        .selectExpr(
            "properties.message_id id",
            "properties.message_id_type kind",
            "unix_millis(properties.creation_time) made",
            "to_json(body_variant) body",
            "variant_get(application_properties, '$.n', 'int') n",
            "schema_of_variant(application_properties) types",
            "variant_get(application_properties, '$.id', 'string') other",
            "body_kind",
        )
        .collect()
    )
    assert row.asDict() == {
        "id": str(uuid.UUID(int=7)),
        "kind": "uuid",
        "made": 1_700_000_000_123,
        "body": '{"a":[1,{"b":true}]}',
        "n": 3,
        "types": "OBJECT<id: UUID, n: BIGINT, when: TIMESTAMP>",
        "other": str(uuid.UUID(int=9)),
        "body_kind": "value",
    }


@pytest.mark.req("K1")
def test_what_filters_leave_out_is_not_read(spark: Any, served: Any) -> None:
    served.send("log", *(str(number) for number in range(60)))
    plain = at(spark.read, served, "log", columns="partition,offset,enqueued_time,body")
    pushed = at(
        spark.read,
        served,
        "log",
        columns="partition,offset,enqueued_time,body",
        filterPushdown="true",
    )
    middle = plain.load().where("partition = 0 and offset = 15").first().enqueued_time
    for condition in (
        "offset >= 10 and offset < 20 and partition = 1",
        "partition in (0, 1) and offset = 29",
        "offset > 28 or partition = 0",
        "offset <= 3 and body is not null",
        f"enqueued_time >= '{middle}'",
        f"enqueued_time < '{middle}' and partition = 0",
        "offset is not null and partition <> 1",
    ):
        expected = sorted(plain.load().where(condition).collect())
        assert sorted(pushed.load().where(condition).collect()) == expected, condition
    plan = pushed.load().where("offset >= 10 and partition = 1")
    text = plan._jdf.queryExecution().executedPlan().toString()
    assert "Filter " not in text


@pytest.mark.req("K1")
def test_a_queue_is_browsed_and_stays(spark: Any, served: Any) -> None:
    served.send("in", *range(30))
    found = at(spark.read, served, "in").load().selectExpr("cast(body_variant as int) n", "offset")
    for _ in range(2):
        assert sorted(row.n for row in found.collect()) == list(range(30))
    assert len(served.messages("in")) == 30


@pytest.mark.req("K1", "K2", "K3")
def test_a_stream_goes_on_where_it_was(spark: Any, served: Any, tmp_path: Path) -> None:
    for round_ in range(2):
        served.send("log", *(f"{round_} {number}" for number in range(40)))
        query = copy(spark, served, tmp_path, "out", group="g", maxMessagesPerTrigger="15")
        batches = [each for each in query.recentProgress if each["numInputRows"]]
        assert sum(each["numInputRows"] for each in batches) == 40
        assert max(each["numInputRows"] for each in batches) <= 15
        last = batches[-1]["sources"][0]
        latest, end = (
            json.loads(last[each])["logs"]["log"] for each in ("latestOffset", "endOffset")
        )
        assert (latest["id"], latest["p"]) == (end["id"], end["p"])
    # Of the last batch, too, of which Spark itself says nothing.
    assert connections.call(served.endpoint, "log", "CURSOR", group="g") == {0: 40, 1: 40}
    expected = Counter(f"{round_} {number}" for round_ in range(2) for number in range(40))
    assert Counter(served.bodies("out")) == expected


@pytest.mark.req("K5")
def test_a_queue_is_consumed_once(spark: Any, served: Any, tmp_path: Path) -> None:
    for round_ in range(2):
        served.send("in", *(f"{round_} {number}" for number in range(30)), durable=True)
        source = at(spark.readStream, served, "in", mode="lease", group="g", minPartitions="3")
        rows = source.option("maxMessagesPerTrigger", "20").load().selectExpr("body", "body_kind")
        sink = at(rows.writeStream, served, "out").option("checkpointLocation", str(tmp_path))
        query = sink.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert query.exception() is None
        state = connections.call(served.endpoint, "in", "READ")
        assert (state["available"], state["acquired"]) == (0, 0)
    assert len(served.bodies("out")) == 60
    assert set(served.bodies("out")) == {
        f"{round_} {number}".encode() for round_ in range(2) for number in range(30)
    }


@pytest.mark.req("K6")
def test_a_queue_is_streamed_by_files(spark: Any, served: Any, tmp_path: Path) -> None:
    for round_ in range(2):
        served.send("in", *(f"{round_} {number}" for number in range(30)), durable=True)
        spool = str(tmp_path / "spool")
        source = at(spark.readStream, served, "in", mode="spool", spoolDir=spool, minPartitions="3")
        rows = source.option("maxMessagesPerTrigger", "20").load().selectExpr("body", "body_kind")
        place = str(tmp_path / "checkpoint")
        sink = at(rows.writeStream, served, "out").option("checkpointLocation", place)
        query = sink.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert query.exception() is None
        state = connections.call(served.endpoint, "in", "READ")
        assert (state["available"], state["acquired"]) == (0, 0)
    assert Counter(served.bodies("out")) == Counter(
        f"{round_} {number}".encode() for round_ in range(2) for number in range(30)
    )


@pytest.mark.req("K1")
def test_octet_for_octet(spark: Any, served: Any, tmp_path: Path) -> None:
    served.broker.declare(Log("copy", partitions=1))
    served.send(
        "log",
        Message([b"two", b"parts"], body_kind="data", content_type="text/plain", user_id=b"\xff"),
        Message({Symbol("a"): Short(1)}, application_properties={"s": Symbol("x")}, to="there"),
        Message(None, group_id="g", group_sequence=2**32 - 1),
    )
    copy(spark, served, tmp_path, "copy")

    def bare(address: str, partitions: int) -> Counter[bytes]:
        it = connections.wire(served.endpoint)
        state = it.call(address, "READ")["partitions"]
        return Counter(
            message.bare
            for part in range(partitions)
            for _, message in it.read(address, part, 0, state[part]["next"])
        )

    assert bare("copy", 1) == bare("log", 2)


@pytest.mark.req("K1", "K3")
def test_rows_are_written(spark: Any, served: Any) -> None:
    rows = spark.range(10).selectExpr(
        "concat('row ', id) body", "'s' subject", "map('k', id) application_properties"
    )
    at(rows.write, served, "out").mode("append").save()
    found = served.messages("out")
    assert sorted(each.body for each in found) == [f"row {number}" for number in range(10)]
    assert {each.subject for each in found} == {"s"}
    assert sorted(each.application_properties["k"] for each in found) == list(range(10))
    # By a name a batch is published once, however often it is written.
    for _ in range(2):
        at(rows.write, served, "in", producer="the tenth").mode("append").save()
    assert sorted(served.bodies("in")) == [f"row {number}" for number in range(10)]
    shaped = spark.sql(
        "select named_struct('a', 1, 'b', array(1.5D)) body, parse_json('[1]') extra"
    )
    at(shaped.drop("extra").write, served, "in").mode("append").save()
    assert json.loads(served.bodies("in")[-1]) == {"a": 1, "b": [1.5]}


@pytest.mark.req("K3")
def test_tasks_that_fail_leave_nothing(spark: Any, served: Any, tmp_path: Path) -> None:
    from pyspark import TaskContext
    from pyspark.sql.functions import udf

    @udf(returnType="binary", useArrow=False)
    def fragile(message: bytes, body: bytes) -> bytes:
        """Fails in the middle of the first attempt at each task."""
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0 and int(body) >= 20:
            raise OSError("the task fails")
        return message

    served.send("log", *(str(number) for number in range(40)))
    source = at(spark.readStream, served, "log", raw="true").load()
    rows = source.select(fragile("message", "body").alias("message"))
    query = (
        at(rows.writeStream, served, "out")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert Counter(served.bodies("out")) == Counter(map(str, range(40)))


@pytest.mark.req("K1")
def test_a_mistake_is_one_sentence(spark: Any, served: Any) -> None:
    from pyspark.errors import PySparkException

    rows = spark.range(1).selectExpr("'x' body")
    wrong = [
        (lambda: at(spark.read, served, "log", startingOffset="x").load(), "startingOffsets?"),
        (lambda: at(spark.read, served, "nowhere").load().collect(), "nowhere"),
        (
            lambda: (
                at(rows.selectExpr("body", "1 sujbect").write, served, "out").mode("append").save()
            ),
            "nothing becomes of the column 'sujbect'",
        ),
        (
            lambda: at(rows.write, served, "out").mode("overwrite").save(),
            "a node is never overwritten",
        ),
    ]
    for mistake, why in wrong:
        with pytest.raises(PySparkException) as caught:
            mistake()
        assert why in str(caught.value)


@pytest.mark.req("K1")
def test_in_sql(spark: Any, served: Any) -> None:
    served.send("log", "a", "b")
    spark.sql(
        f"create temporary view records using amqp options (url '{served.url}', address 'log', "
        "body 'text')"
    )
    try:
        found = spark.sql("select body from records order by body").collect()
        assert [row.body for row in found] == ["a", "b"]
    finally:
        spark.sql("drop view records")


@pytest.mark.req("K2")
def test_a_log_that_was_made_again_is_noticed(spark: Any, served: Any, tmp_path: Path) -> None:
    served.send("log", *(str(number) for number in range(10)))
    copy(spark, served, tmp_path, "out")
    served.broker.delete("log")
    served.broker.declare(Log("log", partitions=2))
    served.send("log", *(str(number) for number in range(30)))
    source = at(spark.readStream, served, "log", raw="true").load()
    sink = at(source.writeStream, served, "out").option("checkpointLocation", str(tmp_path))
    query = sink.trigger(availableNow=True).start()
    with pytest.raises(Exception, match="deleted and made again"):
        query.awaitTermination(120)
    assert len(served.bodies("out")) == 10
