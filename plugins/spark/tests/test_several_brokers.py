"""Several brokers for one table: the logs of one address at each, with the partitions that each has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.batch import Batch
from amqp_rt_spark.data_loss import DataLost
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import read_options
from amqp_rt_spark.schema import columns_of

from amqp_rt import sync
from amqp_rt.broker import Log, Queue
from amqp_rt.limits import Limits

pytestmark = pytest.mark.req("K1", "K2")

ALL = Counter(f"{name} {number}" for name in ("one", "two") for number in range(10))


class Pair:
    """Two brokers, each with its own records in a log of the same name."""

    def __init__(self, one: Any, two: Any) -> None:
        self.brokers = one, two
        self.urls = [broker.listen("amqp://127.0.0.1:0")[0] for broker in self.brokers]
        for broker in self.brokers:
            broker.declare(Log("flights", partitions=2), Queue("waits"))
        self.send("flights", range(10))

    def send(self, address: str, numbers: range) -> None:
        for name, broker in zip(("one", "two"), self.brokers, strict=True):
            with broker.local() as peer, peer.sender(address) as out:
                for number in numbers:
                    out.send(f"{name} {number}")

    def options(self, **given: str) -> Any:
        said = {"url": ", ".join(f"{url}/" for url in self.urls), "address": "flights"}
        return read_options({**said, "body": "text", **given}, "source")


@pytest.fixture
def pair() -> Iterator[Pair]:
    # Workers of Spark are not there to answer a close.
    def broker() -> Any:
        return sync.Broker(limits=Limits(close_grace_s=0.2), volatile=True)

    with broker() as one, broker() as two:
        found = Pair(one, two)
        yield found
        for url in found.urls:
            connections.forget(Endpoint(url))


def rows(reader: Any, spans: list[Any], *columns: str) -> list[tuple[Any, ...]]:
    names = columns_of(reader.options)
    at = [names.index(name) for name in columns]
    return [tuple(row[each] for each in at) for span in spans for row in reader.read(span)]


def bodies(reader: Any, spans: list[Any]) -> Counter[str]:
    return Counter(body for (body,) in rows(reader, spans, "body"))


def through_text(offset: Any) -> Any:
    return json.loads(json.dumps(offset))


def test_a_batch_reads_all_of_them(pair: Pair) -> None:
    batch = Batch(pair.options())
    spans = batch.partitions()
    assert len(spans) == 4
    found = rows(batch, spans, "broker", "address", "partition", "offset", "body")
    assert Counter(row[-1] for row in found) == ALL
    # A row is known by where it was.
    assert len({row[:-1] for row in found}) == 20
    assert {row[0]: row[-1][:3] for row in found} == dict(
        zip(pair.urls, ("one", "two"), strict=True)
    )
    assert {row[1] for row in found} == {"flights"}
    batch.bounds.addresses = {"flights"}
    assert len(batch.partitions()) == 4
    assert "broker" not in columns_of(read_options({"url": "amqp://h", "address": "a"}, "source"))


def test_queues_are_browsed(pair: Pair) -> None:
    pair.send("waits", range(10))
    batch = Batch(pair.options(address="waits"))
    assert bodies(batch, batch.partitions()) == ALL


@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_a_stream_goes_on_at_each_of_them(pair: Pair, starting: str) -> None:
    options = pair.options(group="g", startingOffsets=starting)
    stream = LogStream(options)
    start = through_text(stream.initialOffset())
    pair.send("flights", range(10, 15))
    end = through_text(stream.latestOffset(start, None))
    first = bodies(stream, stream.partitions(start, end))
    pair.send("flights", range(15, 20))
    again = LogStream(options)
    assert bodies(again, again.partitions(start, end)) == first
    last = through_text(again.latestOffset(end, None))
    found = first + bodies(again, again.partitions(end, last))
    numbers = range(20) if starting == "earliest" else range(10, 20)
    assert found == Counter(f"{name} {number}" for name in ("one", "two") for number in numbers)
    again.commit(last)
    for url in pair.urls:
        cursor = connections.call(Endpoint(url), "flights", "CURSOR", group="g")
        assert sum(cursor.values()) == 20


def test_a_broker_comes_and_goes(pair: Pair) -> None:
    """A checkpoint of one broker goes on with two, and the reverse: logs are known by what they are."""
    one, two = pair.urls
    stream = LogStream(pair.options(url=one))
    start = through_text(stream.initialOffset())
    end = through_text(stream.latestOffset(start, None))
    found = bodies(stream, stream.partitions(start, end))
    assert found == Counter(f"one {number}" for number in range(10))
    both = LogStream(pair.options())
    # A batch that was planned before is done again, and then the new broker is read from its start.
    assert bodies(both, both.partitions(start, end)) == found
    last = through_text(both.latestOffset(end, None))
    assert found + bodies(both, both.partitions(end, last)) == ALL
    pair.send("flights", range(10, 12))
    alone = LogStream(pair.options(url=two))
    after = through_text(alone.latestOffset(last, None))
    assert bodies(alone, alone.partitions(last, after)) == Counter(["two 10", "two 11"])
    # Without what makes it the same log, a name says nothing.
    moved = json.loads(json.dumps(last).replace(f"{two}/flights", "amqp://gone/flights"))
    for log in moved["logs"].values():
        log["id"] = "other"
    with pytest.raises(DataLost, match="'amqp://gone/flights', which the checkpoint is about"):
        both.partitions(moved, moved)


def test_the_lag_is_that_of_each_of_them(pair: Pair) -> None:
    from amqp_rt_spark.jobs.checkpoints import Checkpoint
    from amqp_rt_spark.jobs.lag import settle_all, standings_of

    stream = LogStream(pair.options())
    end = through_text(stream.latestOffset(stream.initialOffset(), None))
    pair.send("flights", range(10, 12))
    checkpoint = Checkpoint("q", 0, 0, (end,), (end,))
    endpoint = Endpoint(pair.urls[0])
    standings = standings_of(checkpoint, endpoint, "g")
    assert Counter(each.address for each in standings) == dict.fromkeys(end["logs"], 2)
    assert sum(each.behind or 0 for each in standings) == 4
    assert not any(each.trouble for each in standings)
    assert sum(settle_all(standings, endpoint, "g")) == 20
    for url in pair.urls:
        there = Endpoint(url)
        assert sum(connections.call(there, "flights", "CURSOR", group="g").values()) == 10
        connections.forget(there)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mode": "lease", "group": "g"}, "mode=lease has one url"),
        ({"mode": "spool", "spoolDir": "/x"}, "mode=spool has one url"),
        ({"address": "", "addressPattern": "f*"}, "it is empty"),
    ],
)
def test_what_takes_one_broker(pair: Pair, given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pair.options(**given)
    with pytest.raises(ValueError, match="a sink has one url"):
        read_options({"url": "amqp://a,amqp://b", "address": "x"}, "sink")
    with pytest.raises(ValueError, match="addressPattern has one url"):
        read_options({"url": "amqp://a,amqp://b", "addressPattern": "x*"}, "source")


def test_offsets_name_the_broker(pair: Pair) -> None:
    one, two = pair.urls
    offsets = json.dumps({f"{one}/flights": {"0": 5, "1": 5}})
    batch = Batch(pair.options(startingOffsets=offsets))
    assert sum(bodies(batch, batch.partitions()).values()) == 10
    for option in ("startingOffsets", "endingOffsets"):
        wrong = Batch(pair.options(**{option: json.dumps({"flights": {"0": 5}})}))
        with pytest.raises(
            ValueError, match=f"{option} names the log 'flights', which is not read"
        ):
            wrong.partitions()
    assert two


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_reads_them_as_one_table_and_says_how_far_it_is(
    spark: Any, pair: Pair, tmp_path: Path
) -> None:
    """Both on one query, since a query of Spark's costs seconds."""
    from amqp_rt_spark.listening import MetricsListener

    listener = MetricsListener()
    spark.streams.addListener(listener)
    try:
        given = {"url": ",".join(pair.urls), "address": "flights", "body": "text"}
        source = spark.readStream.format("amqp").options(maxMessagesPerTrigger="12", **given)
        query = (
            source.load()
            .select("broker", "partition", "offset", "body")
            .writeStream.format("memory")
            .queryName("flown")
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(200)
        assert query.exception() is None
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        found = spark.table("flown").collect()
    finally:
        spark.streams.removeListener(listener)
    assert Counter(row.body for row in found) == ALL
    assert len({row[:3] for row in found}) == 20
    assert {row.broker for row in found} == set(pair.urls)
    told = listener.last[str(query.id)]
    assert (told.name, told.behind, told.behind_bytes) == ("flown", 0, 0)
    assert {(each.address, each.partition, each.offset) for each in told.partitions} == {
        (f"{url}/flights", number, 5) for url in pair.urls for number in range(2)
    }
    assert 0 < sum(each.messages for each in told.partitions) < 20
    assert told.bytes
    assert "amqp_rt_spark_messages_behind{" in listener.openmetrics()
