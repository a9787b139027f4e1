"""Event hubs of a namespace in this process, read and written as those of Azure are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Hub
from amqp_rt_servicebus.testing import ServiceBus
from amqp_rt_spark.batch import Batch
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import read_options

from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits

pytestmark = pytest.mark.req("K4", "Z20")

LIMIT = SimpleNamespace()


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    # Spark's workers keep their connections and do not answer a close.
    limits = Limits(close_grace_s=0.2)
    with ServiceBus(
        Hub("clicks", partitions=2, consumer_groups=["crew"]),
        Hub("copies", partitions=2),
        limits=limits,
    ) as bus:
        yield bus


@pytest.fixture
def hub_options(bus: ServiceBus, tmp_path: Path) -> dict[str, str]:
    credentials = tmp_path / "credentials"
    credentials.write_text("RootManageSharedAccessKey:SAS_KEY_VALUE")
    return {
        "url": bus.broker.url,
        "logs": "eventhubs",
        "credentialsFile": str(credentials),
    }


def test_a_stream_reads_each_event_of_a_hub_once(
    bus: ServiceBus, hub_options: dict[str, str]
) -> None:
    said = {**hub_options, "address": "clicks", "group": "crew", "columns": "partition,offset,body"}
    stream = LogStream(read_options(said, "source"))
    at = stream.initialOffset()
    for round_ in range(2):
        for number in range(10):
            bus.hub("clicks").send(f"{round_}-{number}".encode())
        end = json.loads(json.dumps(stream.latestOffset(at, LIMIT)))
        rows = [row for span in stream.partitions(at, end) for row in stream.read(span)]
        assert sorted(row[2] for row in rows) == [f"{round_}-{n}".encode() for n in range(10)]
        assert {row[:2] for row in rows} == {
            (each.partition, each.sequence_number)
            for each in bus.hub("clicks").events
            if each.body.startswith(f"{round_}-".encode())
        }
        at = end
    assert stream.latestOffset(at, LIMIT) == at


def bodies_of(hub_options: dict[str, str], **given: str) -> list[Any]:
    """Return the bodies that a batch reads."""
    said = {**hub_options, "address": "clicks", "columns": "body", **given}
    batch = Batch(read_options(said, "source"))
    return sorted(row[0] for span in batch.partitions() for row in batch.read(span))


def test_a_batch_begins_at_a_time(bus: ServiceBus, hub_options: dict[str, str]) -> None:
    bus.hub("clicks").send(b"old")
    bus.advance(3600)
    bus.hub("clicks").send(b"new")
    half = (bus.now.timestamp() - 1800) * 1000
    assert bodies_of(hub_options) == [b"new", b"old"]
    assert bodies_of(hub_options, startingTimestamp=str(int(half))) == [b"new"]


@pytest.mark.parametrize("given", [{"address": "none"}, {"group": "none"}])
def test_what_is_missing_is_one_sentence(
    bus: ServiceBus, hub_options: dict[str, str], given: dict[str, str]
) -> None:
    bus.hub("clicks").send("a")
    with pytest.raises(AmqpError, match="'none'") as caught:
        bodies_of(hub_options, **given)
    assert caught.value.condition == "amqp:not-found"


def text_of(body: object) -> str:
    """Return the text of a body, which clients of Azure send as data and Spark as a value."""
    return body.decode() if isinstance(body, bytes) else str(body)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_copies_a_hub_to_another(
    spark: Any, bus: ServiceBus, hub_options: dict[str, str], tmp_path: Path
) -> None:
    for number in range(20):
        bus.hub("clicks").send(f"text {number}", key=f"user-{number % 3}")
    source = (
        spark.readStream.format("amqp")
        .options(**hub_options, address="clicks", columns="body,key")
        .load()
    )
    rows = source.selectExpr("cast(body as string) body", "key")
    sink = {name: value for name, value in hub_options.items() if name != "logs"}
    query = (
        rows.writeStream.format("amqp")
        .options(**sink, address="copies", delivery="at-least-once")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    before, after = (
        {(str(each.partition_key), text_of(each.body)) for each in bus.hub(name).events}
        for name in ("clicks", "copies")
    )
    assert len(bus.hub("copies").events) == 20
    assert before == after
    found = spark.read.format("amqp").options(**hub_options, address="copies").load()
    assert found.where("body is not null").count() == 20
