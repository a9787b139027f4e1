"""``metrics``: what a journal says by address and window, against a direct count of its records."""

from __future__ import annotations

import datetime as dt
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.jobs.lake import read_table
from amqp_rt_spark.jobs.metrics import Metrics, metrics, report_of

from amqp_rt import Message, sync
from amqp_rt.broker import LifeCycles, Log, Queue
from amqp_rt.broker.lifecycles import INTERVAL_S
from amqp_rt.limits import Limits
from amqp_rt.values import Timestamp, UInt

EVENTS = ("published", "delivered", "accepted", "released", "modified", "rejected", "expired")
EVENTS += ("dead-lettered", "dropped", "moved")


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Any]:
    """A broker with a journal."""
    journal = LifeCycles(per_second=100_000)
    limits = Limits(close_grace_s=0.2)
    with sync.Broker(limits=limits, volatile=True, journal=journal) as broker:
        (url,) = broker.listen("amqp://127.0.0.1:0")
        yield SimpleNamespace(broker=broker, url=url)
        connections.forget(Endpoint(url))


def records(url: str, address: str) -> list[dict[str, Any]]:
    """All that the log has, as whoever reads it without Spark sees it."""
    endpoint = Endpoint(url, timeout_s=30)
    parts = connections.call(endpoint, address, "READ")["partitions"]
    return [
        dict(message.application_properties)
        for number, part in enumerate(parts)
        for _, message in connections.wire(endpoint).read(address, number, 0, int(part["next"]))
    ]


def quantile(values: list[int], share: float) -> float | None:
    if not values:
        return None
    values = sorted(values)
    at = share * (len(values) - 1)
    low, high = values[math.floor(at)], values[math.ceil(at)]
    return (low + (high - low) * (at - math.floor(at))) / 1000


def counted(found: list[dict[str, Any]], width_ms: int) -> dict[tuple[int, str], dict[str, Any]]:
    """The same numbers as the job's, counted directly."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for each in found:
        start = int(each["time"]) // width_ms * width_ms
        groups[start, each.get("address", "")].append(each)
    rows = {}
    for key, events in groups.items():
        by = {name: [each for each in events if each["event"] == name] for name in EVENTS}
        row: dict[str, Any] = {name.replace("-", "_"): len(by[name]) for name in EVENTS}
        row["redelivered"] = sum(each["attempt"] > 1 for each in by["delivered"])
        row["bytes"] = sum(int(each["size"]) for each in by["published"])
        row["lost"] = sum(int(each["count"]) for each in events if each["event"] == "lost")
        for name in ("published", "bytes", "delivered"):
            row[f"{name}_per_s"] = row[name] / (width_ms / 1000)
        outcomes = sum(row[name] for name in ("accepted", "released", "modified", "rejected"))
        row["redelivery_ratio"] = (
            row["redelivered"] / row["delivered"] if row["delivered"] else None
        )
        row["reject_ratio"] = row["rejected"] / outcomes if outcomes else None
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            waited = [each["waited-us"] for each in by["delivered"] if "waited-us" in each]
            row[f"in_queue_{name}_ms"] = quantile(waited, share)
            held = [each["held-us"] for each in events if "held-us" in each]
            row[f"settle_{name}_ms"] = quantile(held, share)
        rows[key] = row
    return rows


def compare(rows: list[dict[str, Any]], expected: dict[tuple[int, str], dict[str, Any]]) -> None:
    found = {}
    for row in rows:
        row = dict(row)
        start = row.pop("window_start")
        if isinstance(start, str):
            start = dt.datetime.fromisoformat(start)
        row.pop("window_end")
        found[round(start.timestamp() * 1000), row.pop("address")] = row
    assert set(found) == set(expected)
    for key, row in expected.items():
        assert found[key] == pytest.approx(row), key


def traffic(broker: Any) -> None:
    """Messages that meet every kind of end."""
    broker.declare(
        Queue("orders", dead_letter="dead", max_deliveries=3), Queue("short", ttl_s=0.01)
    )
    broker.declare(Queue("dead"))
    with broker.local() as peer, peer.sender("orders") as orders, peer.sender("short") as short:
        for round_ in range(4):
            orders.send_many([f"{round_} {number}" * (1 + number % 7) for number in range(100)])
            short.send_many(["x"] * 10)
            time.sleep(0.05)
            with peer.receiver("orders", credit=20) as source:
                for number in range(95):
                    delivery = source.receive()
                    match number % 10:
                        case 7:
                            delivery.release()
                        case 8:
                            delivery.modify(failed=True)
                        case 9:
                            delivery.reject("no sense in it", condition="amqp:decode-error")
                        case _:
                            delivery.accept()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.req("K7", "K8")
def test_the_numbers_are_those_of_a_direct_count(spark: Any, followed: Any) -> None:
    traffic(followed.broker)
    # Expired messages are noticed some time later, and every event is recorded some time
    # after it happened: the journal is whole when nothing has been added to it for a while.
    direct: list[dict[str, Any]] = []
    while True:
        before, direct = direct, records(followed.url, "$journal")
        expired = sum(each["event"] == "expired" for each in direct)
        if expired == 40 and len(direct) == len(before):
            break
        time.sleep(10 * INTERVAL_S)
    report = metrics(spark, Metrics(url=followed.url, once=True, window="250ms"))
    expected = counted(direct, 250)
    assert len(expected) > 4
    totals = report.facts["addresses"]
    for address in ("orders", "dead", "short"):
        rows = [row for (_, each), row in expected.items() if each == address]
        for name, value in totals[address].items():
            assert value == sum(row[name] for row in rows), (address, name)
    assert totals["orders"]["published"] == 400
    assert min(totals["orders"][name] for name in ("released", "modified", "rejected")) > 20
    assert totals["orders"]["redelivered"] > 40
    compare(report.facts["windows"], expected)
    assert "orders" in report.console(width=200)
    assert report.html().count("<svg") == 4


def event(at: str, name: str, **more: Any) -> Message:
    moment = dt.datetime.fromisoformat(f"2026-03-01T{at}+00:00")
    said = {"event": name, "time": Timestamp.from_datetime(moment), **more}
    if name != "lost":
        said = {"address": "q", "size": 10, "sequence": 1, **said}
    return Message(None, application_properties=said)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.req("K7")
def test_late_events_count_into_the_window_in_which_they_happened(
    spark: Any, followed: Any, tmp_path: Path
) -> None:
    followed.broker.declare(Log("events", partitions=1), Queue("alerts"))
    conf = Metrics(
        url=followed.url,
        address="events",
        once=True,
        checkpoint=str(tmp_path / "checkpoint"),
        table=str(tmp_path / "table"),
        to="alerts",
        max_messages=3,
    )
    batches = [
        [
            event("10:00:10", "published"),
            event("10:00:50", "published"),
            event("10:01:30", "moved"),
        ],
        # The first of these is late, and counts: the watermark is at 10:00:30.
        [
            event("10:00:55", "delivered", attempt=UInt(2), **{"waited-us": 1_500}),
            event("10:01:59.999", "lost", count=7),
            event("10:03:00", "published"),
        ],
        # A watermark is for the batches after the next one.
        [event(f"10:04:0{second}", "published") for second in range(3)],
        # The window of the first one is over by now.
        [event("10:00:20", "published"), event("10:10:00", "published")],
    ]
    everything = [dict(message.application_properties) for sent in batches for message in sent]
    with followed.broker.local() as peer, peer.sender("events") as out:
        out.send_many([message for sent in batches for message in sent])
    report = metrics(spark, conf)
    expected = counted([each for each in everything if each is not everything[-2]], 60_000)
    # The last one waits for the watermark.
    expected = {key: row for key, row in expected.items() if key[0] < 1772359800000}
    assert len(expected) == 5
    compare(report.facts["windows"], expected)
    assert (report.facts["lost"], report.facts["late"]) == (7, 1)
    assert "came later than 1m and are left out" in report.console(width=200)

    # A driver that ends before Spark has noted the last micro-batch does it again, which changes nothing.
    noted = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda p: int(p.name))
    # The batch is one without events, which has moved the watermark and so ended windows.
    noted[-1].unlink()
    noted[-1].with_name(f".{noted[-1].name}.crc").unlink()
    again = metrics(spark, conf).facts["windows"]
    assert [row["window_start"].minute for row in again][-1] == 4
    form = "\"yyyy-MM-dd'T'HH:mm:ssXXX\""
    compare(
        [
            row.asDict()
            for row in read_table(spark, conf.table)
            .selectExpr(
                "* except (window_start)", f"date_format(window_start, {form}) window_start"
            )
            .collect()
        ],
        expected,
    )
    endpoint = Endpoint(followed.url)
    alerts = [json.loads(m.body) for m in connections.wire(endpoint).browse("alerts")]
    compare(alerts, expected)


def row(**more: Any) -> dict[str, Any]:
    start = dt.datetime(2026, 3, 1, 10, tzinfo=dt.UTC)
    found = dict.fromkeys(
        (*(name.replace("-", "_") for name in EVENTS), "redelivered", "bytes", "lost"), 0
    )
    times = (f"{what}_{q}_ms" for what in ("in_queue", "settle") for q in ("p50", "p95", "p99"))
    ratios = ("redelivery_ratio", "reject_ratio")
    rates = ("published_per_s", "bytes_per_s", "delivered_per_s")
    return {
        "window_start": start,
        "window_end": start + dt.timedelta(minutes=1),
        "address": "q",
        **found,
        **dict.fromkeys((*times, *ratios, *rates)),
        **more,
    }


@pytest.mark.req("K7")
def test_a_report_says_what_the_journal_left_out() -> None:
    report = report_of([row(address="", lost=3), row(published=2)], Metrics(once=True))
    said = json.loads(report.json())
    assert "did not record 3 events" in said["sections"][1]["text"]
    assert [each["rows"][0][0] for each in said["sections"][2:3]] == ["q"]
    assert len(report.facts["windows"]) == 2


def test_an_empty_journal_is_a_report() -> None:
    said = json.loads(report_of([], Metrics(once=True)).json())
    assert said["sections"] == [{"type": "text", "text": "The journal is empty."}]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"table": "x"}, "name a folder"),
        ({"to": "x"}, "name a folder"),
        ({"window": "0s"}, "window is at least 1ms"),
        ({"late": "soon"}, "late: 'soon' is not a time"),
        ({"table_format": "csv"}, "table_format is 'csv'"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Metrics(**given)
