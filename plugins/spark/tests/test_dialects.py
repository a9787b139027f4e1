"""Logs as other brokers spell them, read from our broker, which understands these spellings, too.

Their brokers are not here: what is proved is what goes over the wire, and that a query needs nothing else.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.batch import Batch
from amqp_rt_spark.dialects import EventHubs, RabbitStreams
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.offsets import positions_of
from amqp_rt_spark.options import read_options
from amqp_rt_spark.wire import Wire

from amqp_rt import Message
from amqp_rt.broker.kinds.logs import LogNode
from amqp_rt.errors import AmqpError
from amqp_rt.management.answering import attributes, reply_of
from amqp_rt.management.node import Management
from amqp_rt.values import Int, Symbol, Timestamp

pytestmark = pytest.mark.req("K2", "K4")

EVERYTHING = SimpleNamespace()
BORN = 1_700_000_000_000


@pytest.fixture(autouse=True)
def nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Our management is not there; that of Event Hubs is. The filters that were asked for."""
    asked: list[dict[str, Any]] = []
    receive = Wire.receive

    def receiving(it: Wire, what: str, inbox: Any, source: Any, *more: Any, **said: Any) -> Any:
        asked.append({str(value.descriptor): value.value for value in source.filter.values()})
        return receive(it, what, inbox, source, *more, **said)

    async def answering(it: Management, message: Message, peer: Any, entity: str = "") -> Message:
        said = message.application_properties
        assert not entity, "an operation of ours was asked for"
        assert said["operation"] == "READ"
        assert message.reply_to
        node = attributes(it._space(peer.virtual_host).find_kind(said["name"], LogNode).log_stats())
        if said["type"] == "com.microsoft:eventhub":
            ids = [str(part["partition"]) for part in node["partitions"]]
            body = {"name": said["name"], "created_at": Timestamp(BORN), "partition_ids": ids}
        else:
            assert said["type"] == "com.microsoft:partition"
            part = node["partitions"][int(said["partition"])]
            body = {
                "begin_sequence_number": part["first"],
                "last_enqueued_sequence_number": part["next"] - 1,
                "is_partition_empty": part["first"] == part["next"],
            }
        reply = reply_of(200, body)
        # As they spell it.
        reply.application_properties = {"status-code": Int(200), "status-description": "OK"}
        return reply

    monkeypatch.setattr(Wire, "receive", receiving)
    monkeypatch.setattr(Management, "answer", answering)
    return asked


def options(served: Any, logs: str, **given: str) -> Any:
    address = "one/partitions/0" if logs == "rabbitmq" else "log"
    said = {"url": served.url, "address": address, "logs": logs, "columns": "partition,offset,body"}
    return read_options({**said, **given}, "source")


def drained(it: LogStream, at: Any) -> tuple[list[Any], Any]:
    found = []
    while (end := json.loads(json.dumps(it.latestOffset(at, EVERYTHING)))) != at:
        rows = [row for span in it.partitions(at, end) for row in it.read(span)]
        assert rows == [row for span in it.partitions(at, end) for row in it.read(span)]
        found += rows
        at = end
    return found, at


@pytest.mark.parametrize("logs", ["rabbitmq", "eventhubs"])
def test_a_stream_of_somebody_elses_log(
    served: Any, logs: str, nothing_of_ours: list[dict[str, Any]]
) -> None:
    log = "one" if logs == "rabbitmq" else "log"
    it = LogStream(options(served, logs, group="$Default", minPartitions="3"))
    start = it.initialOffset()
    assert it.latestOffset(start, EVERYTHING) == start
    served.send(log, *(str(number) for number in range(30)))
    found, at = drained(it, start)
    parts = 1 if logs == "rabbitmq" else 2
    assert sorted(row[:2] for row in found) == [
        (part, offset) for part in range(parts) for offset in range(30 // parts)
    ]
    assert {row[2] for row in found} == {str(number).encode() for number in range(30)}
    served.send(log, "more")
    found, at = drained(it, at)
    assert [row[2] for row in found] == [b"more"]
    it.commit(at)
    ((_, (incarnation, _)),) = positions_of(at).items()
    assert incarnation == ("" if logs == "rabbitmq" else str(BORN))
    spelled = {
        "rabbitmq": "rabbitmq:stream-offset-spec",
        "eventhubs": "apache.org:selector-filter:string",
    }[logs]
    assert {name for each in nothing_of_ours for name in each} == {spelled}
    if logs == "eventhubs":
        assert all(
            each[spelled].startswith("amqp.annotation.x-opt-sequence-number >= '")
            for each in nothing_of_ours
        )


@pytest.mark.parametrize("logs", ["rabbitmq", "eventhubs"])
def test_a_batch_of_somebody_elses_log(served: Any, logs: str) -> None:
    log = "one" if logs == "rabbitmq" else "log"
    served.send(log, *(str(number) for number in range(10)))

    def count(**given: str) -> int:
        batch = Batch(options(served, logs, **given))
        return len([row for span in batch.partitions() for row in batch.read(span)])

    assert count() == 10
    assert count(startingTimestamp="1970-01-01T00:00:01Z") == 10
    assert count(startingTimestamp="2100-01-01T00:00:01Z") == 0
    assert count(startingOffsets="latest") == 0
    assert count(endingTimestamp="2100-01-01T00:00:01Z") == 10


def test_addresses_and_filters() -> None:
    rabbit, hubs = RabbitStreams(), EventHubs("crew")
    assert rabbit.node("/queues/s", 0) == "/queues/s"
    (spec,) = rabbit.begin(7).values()
    assert (spec.descriptor, spec.value) == (Symbol("rabbitmq:stream-offset-spec"), 7)
    assert hubs.node("hub", 3) == "hub/ConsumerGroups/crew/Partitions/3"
    for position, text in (
        (7, "amqp.annotation.x-opt-sequence-number >= '7'"),
        (Timestamp(5_000), "amqp.annotation.x-opt-enqueued-time >= '5000'"),
    ):
        (spec,) = hubs.begin(position).values()
        assert spec.value == text


def test_a_start_at_a_time_needs_no_group(served: Any) -> None:
    served.send("one", *range(5))
    for _ in range(2):
        it = LogStream(options(served, "rabbitmq", startingTimestamp="1"))
        assert positions_of(it.initialOffset())["one/partitions/0"] == ("", {0: 0})
    with pytest.raises(ValueError, match="does not start at latest"):
        LogStream(options(served, "rabbitmq", startingOffsets="latest", group="g"))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"selector": "a = 1"}, "selector"),
        ({"maxBytesPerTrigger": "10"}, "maxBytesPerTrigger"),
        ({"startingOffsets": "committed", "group": "g"}, "startingOffsets=committed"),
        ({"mode": "lease", "group": "g"}, "mode=lease"),
    ],
)
def test_what_takes_our_own_broker(served: Any, given: dict[str, str], what: str) -> None:
    with pytest.raises(ValueError, match=f"{what} does not go with logs=rabbitmq"):
        options(served, "rabbitmq", **given)


def test_a_hub_that_is_not_there(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(it: Management, message: Message, peer: Any, entity: str = "") -> Message:
        reply = reply_of(404, {})
        reply.application_properties = {"status-code": 404, "status-description": "no such hub"}
        return reply

    monkeypatch.setattr(Management, "answer", missing)
    with pytest.raises(AmqpError, match="no such hub") as caught:
        LogStream(options(served, "eventhubs")).initialOffset()
    assert caught.value.condition == "amqp:not-found"
    with pytest.raises(AmqpError, match="cannot be asked"):
        connections.wire(served.endpoint).ask("nowhere", {"operation": "READ"})
