"""The jobs ``replay`` and ``audit``, over tables that ``ingest`` has made (K7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections

from amqp_rt import Message
from amqp_rt.errors import AmqpError
from amqp_rt.values import Symbol, UInt

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.req("K7")]


def fill(served: Any, begin: int, end: int) -> None:
    """Messages of four groups, two in each partition."""
    for number in range(begin, end):
        served.send(
            f"log/partitions/{number % 2}",
            Message(
                {Symbol("n"): UInt(number)},
                message_id=UInt(number) if number % 4 else str(number),
                application_properties={"kind": Symbol("s")},
                group_id=f"group {number % 4}",
            ),
        )


def ingest(spark: Any, served: Any, table: Path, **given: Any) -> None:
    from amqp_rt_spark.jobs.ingest import Ingest, ingest

    given = {"address": ("log",), "table": str(table), "once": True, **given}
    ingest(spark, Ingest(url=served.url, **given))


def replay(spark: Any, served: Any, lake: Path, **given: Any) -> Any:
    from amqp_rt_spark.jobs.replay import Replay, replay

    given = {"table": str(lake), "to": "out", "replay_id": "r", **given}
    return replay(spark, Replay(url=served.url, **given))


def audit(spark: Any, served: Any, table: Path, **given: Any) -> Any:
    from amqp_rt_spark.jobs.audit import Audit, audit

    given = {"address": ("log",), "table": str(table), "range_size": 4, **given}
    return audit(spark, Audit(url=served.url, **given))


def differences(report: Any) -> list[list[Any]]:
    (table,) = (each for each in report.sections if getattr(each, "name", "") == "Differences")
    return [[*row[:5], row[5].partition(":")[0]] for row in table.rows]


@pytest.mark.slow
def test_a_table_is_sent_once_more_and_once_only(spark: Any, served: Any, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    fill(served, 0, 24)
    ingest(spark, served, lake)
    dry = replay(spark, served, lake, dry_run=True)
    assert dry.facts["messages"] == 24
    assert served.messages("out") == []
    assert replay(spark, served, lake).facts == {"id": "r", "sent": 24, "sent_before": 0}
    found = served.messages("out")
    it = connections.wire(served.endpoint)
    records = [message.bare for part in range(2) for _, message in it.read("log", part, 0, 12)]
    assert sorted(message.bare for message in found) == sorted(records)
    for group in range(4):
        mine = [each.body["n"] for each in found if each.group_id == f"group {group}"]
        assert mine == sorted(mine)
    # Later messages are sent under the same id; under another one, all that are selected.
    fill(served, 24, 27)
    ingest(spark, served, lake)
    assert replay(spark, served, lake).facts == {"id": "r", "sent": 3, "sent_before": 24}
    chosen = replay(
        spark,
        served,
        lake,
        replay_id="two",
        to="in",
        where="properties.group_id = 'group 1'",
        since="2020-01-01T00:00:00Z",
        rate="1000/s",
        set_property=("again=yes", "kind=new"),
    )
    assert chosen.facts["sent"] == 7
    properties = [dict(each.application_properties) for each in served.messages("in")]
    assert properties == 7 * [{"kind": "new", "again": "yes"}]


@pytest.mark.slow
def test_a_replay_says_what_is_wrong(spark: Any, served: Any, tmp_path: Path) -> None:
    fill(served, 0, 2)
    ingest(spark, served, tmp_path / "lake", raw=False)
    for given, kind, why in (
        ({}, ValueError, "has no column message"),
        ({"table": str(tmp_path / "nothing")}, ValueError, "no table"),
        ({"set_property": ("x",)}, ValueError, "NAME=VALUE"),
        ({"since": "yesterday"}, ValueError, "since: "),
    ):
        with pytest.raises(kind, match=why):
            replay(spark, served, tmp_path / "lake", **given)
    ingest(spark, served, tmp_path / "raw")
    with pytest.raises(AmqpError, match="nowhere"):
        replay(spark, served, tmp_path / "raw", to="nowhere")


@pytest.mark.slow
def test_an_audit_names_what_differs(spark: Any, served: Any, tmp_path: Path) -> None:
    table = tmp_path / "lake"
    fill(served, 0, 40)
    ingest(spark, served, table)
    report = audit(spark, served, table)
    assert report.exit_code == 0
    assert report.facts["records"] == report.facts["rows"] == 40
    # Records that ingest has not reached are missing, unless the audit ends where it is.
    fill(served, 40, 44)
    report = audit(spark, served, table)
    assert (report.exit_code, report.facts["missing"]) == (3, 4)
    assert audit(spark, served, table, group="ingest").facts["missing"] == 0

    from amqp_rt_spark.jobs.lake import read_table

    rows = read_table(spark, str(table))
    spoilt = (
        rows.where("not (partition = 0 and offset in (3, 4, 5, 9))")
        .unionAll(rows.where("partition = 1 and offset = 2"))
        .unionAll(
            rows.where("partition = 1 and offset = 3").selectExpr(
                *("offset + 1000 as offset" if name == "offset" else name for name in rows.columns)
            )
        )
        .selectExpr(
            *(
                "if(partition = 1 and offset = 7, X'00', message) as message"
                if name == "message"
                else name
                for name in rows.columns
            )
        )
    )
    spoilt.write.parquet(str(tmp_path / "spoilt" / "query_id=x"))
    report = audit(spark, served, tmp_path / "spoilt", group="ingest")
    assert report.exit_code == 3
    assert differences(report) == [
        ["log", 0, 3, 5, 3, "missing"],
        ["log", 0, 9, 9, 1, "missing"],
        ["log", 1, 2, 2, 1, "doubled"],
        ["log", 1, 7, 7, 1, "differing"],
        ["log", 1, 1003, 1003, 1, "extra"],
    ]
    assert {what: report.facts[what] for what in ("missing", "extra", "differing", "doubled")} == {
        "missing": 4,
        "extra": 1,
        "differing": 1,
        "doubled": 1,
    }
    with pytest.raises(ValueError, match="is a queue, not a log"):
        audit(spark, served, table, address=("in",))


@pytest.mark.slow
def test_what_is_in_quarantine_is_not_missing(spark: Any, served: Any, tmp_path: Path) -> None:
    for number in range(6):
        served.send("one", Message(b"\xff" if number == 2 else b"text", body_kind="data"))
    ingest(spark, served, tmp_path / "lake", address=("one",), body="text")
    report = audit(spark, served, tmp_path / "lake", address=("one",))
    assert (report.exit_code, report.facts["records"]) == (0, 6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_addresses_are_text_whatever_they_look_like(spark: Any, tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    from amqp_rt_spark.jobs.lake import append_delta, read_table, write_parquet

    for names in (["007"], ["a/b c", "x%2Fy", "ü:ж", "007"]):
        table = str(tmp_path / names[0].replace("/", "-"))
        rows = pa.table({"address": names, "offset": list(range(len(names)))})
        if form == "delta":
            append_delta(table, rows, ["address"], query="q", batch=0)
        else:
            frame = spark.createDataFrame(rows.to_pylist(), "address string, offset bigint")
            write_parquet(table, frame, ["address"], query="q", batch=0)
        found = read_table(spark, table).orderBy("offset").collect()
        assert [row.address for row in found] == names
