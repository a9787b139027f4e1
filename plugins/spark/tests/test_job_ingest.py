"""``ingest``, ``lag`` and ``settle`` in Spark itself, and one whole command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.jobs.ingest import Ingest, ingest
from amqp_rt_spark.jobs.lag import Lag, Settle, lag, settle
from amqp_rt_spark.jobs.lake import format_of, read_table
from amqp_rt_spark.jobs.launching import sentence_of
from amqp_rt_spark.jobs.report import Table

from amqp_rt import Message

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.req("K7")]


def bodies(spark: Any, table: Path) -> Counter[str]:
    """What is in *table*, as Spark sees it."""
    rows = read_table(spark, str(table)).select("body").collect()
    return Counter(bytes(row.body).decode() for row in rows)


def job(served: Any, table: Path, address: str, **further: Any) -> Ingest:
    given: dict[str, Any] = {"once": True, "max_messages": 20, **further}
    return Ingest(url=served.url, address=address, table=str(table), **given)


@pytest.mark.slow
@pytest.mark.parametrize("table_format", ["delta", pytest.param("parquet", marks=pytest.mark.long)])
def test_each_record_is_in_the_table_once_whenever_the_job_ends(
    spark: Any, served: Any, tmp_path: Path, table_format: str
) -> None:
    table, quarantine = tmp_path / "t", tmp_path / "q"
    conf = job(
        served,
        table,
        "log",
        body="json",
        table_format=table_format,
        quarantine=str(quarantine),
    )
    served.send("log", *(json.dumps(number).encode() for number in range(30)))
    served.send("log", b"{ not json")
    # The second table cannot be written when the first one has been.
    quarantine.write_text("in the way")
    with pytest.raises(Exception, match="FOREACH_BATCH") as failed:
        ingest(spark, conf)
    assert "Traceback" not in sentence_of(failed.value)
    quarantine.unlink()
    found = ingest(spark, conf)
    assert found.facts["quarantined"] == 1
    expected = Counter(map(str, range(30)))
    assert bodies(spark, table) == expected
    (bad,) = read_table(spark, str(quarantine)).collect()
    assert b"{ not json" in bytes(bad.body)

    # The tables have the batch, and the checkpoint does not say so yet.
    for commit in (table / "_checkpoint" / "commits").iterdir():
        if commit.name.lstrip(".").partition(".")[0] == str(found.facts["last_batch"]):
            commit.unlink()
    served.send("log", *(json.dumps(number).encode() for number in range(30, 50)))
    ingest(spark, conf)
    expected = Counter(map(str, range(50)))
    assert bodies(spark, table) == expected
    assert read_table(spark, str(quarantine)).count() == 1
    assert format_of(str(table)) == table_format

    # A new checkpoint is a new query, which counts its batches from 0, too: it adds to what there is.
    again = job(served, table, "log", body="json", checkpoint=str(tmp_path / "c"), group="other")
    ingest(spark, again)
    assert bodies(spark, table) == expected + expected


@pytest.mark.slow
def test_each_message_of_a_queue_is_in_the_table_once(
    spark: Any, served: Any, tmp_path: Path
) -> None:
    table, quarantine = tmp_path / "t", tmp_path / "q"
    conf = job(served, table, "in", body="json", quarantine=str(quarantine))
    served.send("in", b"{ not json", *(str(number).encode() for number in range(30)), durable=True)
    quarantine.write_text("in the way")
    with pytest.raises(Exception, match="FOREACH_BATCH"):
        ingest(spark, conf)
    quarantine.unlink()
    found = ingest(spark, conf)
    assert bodies(spark, table) == Counter(map(str, range(30)))
    assert (found.facts["rows"], found.facts["quarantined"]) == (31, 1)
    state = connections.call(served.endpoint, "in", "READ")
    assert (state["available"], state["acquired"]) == (0, 0)


@pytest.mark.slow
def test_what_a_row_says_of_a_message(spark: Any, served: Any, tmp_path: Path) -> None:
    message = Message(
        {"a": [1, None]}, subject="s", application_properties={"n": 3}, message_id="m"
    )
    served.send("one", message, "text")
    conf = job(served, tmp_path / "t", "one", partition_by="address")
    report = ingest(spark, conf)
    (table, *plots) = report.sections
    assert isinstance(table, Table)
    assert table.rows == [["one", 0, 0, 2, 2]]
    assert [plot.name for plot in plots] == ["rate", "lag"]
    assert "ingest into" in report.html()
    assert (tmp_path / "t" / "address=one").is_dir()
    found = read_table(spark, str(tmp_path / "t")).orderBy("offset")
    first, second = found.collect()
    assert (first.address, first.partition, first.offset, first.properties.subject) == (
        "one",
        0,
        0,
        "s",
    )
    assert (json.loads(first.body_json), first.body_kind) == ({"a": [1, None]}, "value")
    assert json.loads(first.application_properties) == {"n": 3}
    assert first.date == first.enqueued_time.date()
    # As it came: it is sent again octet for octet.
    assert Message.decode(bytes(first.message)).body == {"a": [1, None]}
    assert (second.body_json, bytes(second.body)) == ('"text"', b"text")


def test_what_cannot_be_read_is_said(spark: Any, served: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'log' is a log, 'in' is a queue"):
        ingest(spark, job(served, tmp_path / "t", ["log", "in"]))
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)
    with pytest.raises(ValueError, match="is there already, as delta"):
        ingest(spark, job(served, tmp_path / "t", "log", table_format="parquet"))
    with pytest.raises(ValueError, match="is no table"):
        read_table(spark, str(tmp_path / "t"))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["log", "in"])
def test_what_a_query_has_not_said_is_settled(
    spark: Any, served: Any, tmp_path: Path, address: str
) -> None:
    """A query that has ended before it asked for more: the broker does not know of its last batch."""
    served.send(address, *(str(number) for number in range(10)))
    source = spark.readStream.format("amqp").options(url=served.url, address=address, group="g")
    if address == "in":
        source = source.option("mode", "lease")
    writer = source.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    query = writer.trigger(processingTime="1 hour").start()
    while not (tmp_path / "commits" / "0").exists():
        assert query.exception() is None
        time.sleep(0.05)
    query.stop()
    ask = Lag(url=served.url, checkpoint=str(tmp_path), group="g")
    facts = lag(spark, ask).facts
    assert (facts["behind"], facts["batch"]) == (0, 0)
    assert facts["unsettled"] == 10
    found = settle(spark, Settle(url=served.url, checkpoint=str(tmp_path), group="g"))
    assert found.facts["settled"] == 10
    if address == "in":
        state = connections.call(served.endpoint, "in", "READ")
        assert (state["available"], state["acquired"]) == (0, 0)
    else:
        assert connections.call(served.endpoint, "log", "CURSOR", group="g") == {0: 5, 1: 5}
    assert (
        settle(spark, Settle(url=served.url, checkpoint=str(tmp_path), group="g")).facts["settled"]
        == 0
    )


@pytest.mark.slow
def test_a_command_goes_on_until_it_is_asked_to_stop(
    spark: Any, served: Any, spark_conf: dict[str, str], tmp_path: Path
) -> None:
    """The whole command, in a process of its own: it says what it does, and ends after its batch."""
    served.send("log", *(str(number) for number in range(40)))
    config = tmp_path / "job.toml"
    settings = [f"{name}={value}" for name, value in spark_conf.items()]
    config.write_text(
        f'address = ["log"]\ntable = "t"\nevery = "1s"\nmax_messages = 24\nconf = {json.dumps(settings)}\n'
    )
    words = ["ingest", "--config", str(config), "--url", served.url, "--master", "local[2,2]"]
    words += ["--format", "json", "--report", "report.html"]
    command = subprocess.Popen(
        [sys.executable, "-m", "amqp_rt.cli", "pipeline", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert command.stderr is not None
        told = [command.stderr.readline() for _ in range(2)]
        command.send_signal(signal.SIGTERM)
        out, rest = command.communicate(timeout=120)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 0, rest
    assert told[0].startswith("batch 0: 24 rows in ")
    assert told[0].endswith(", 16 behind\n")
    assert told[1].startswith("batch 1: 16 rows in ")
    assert rest == "stopping after this batch; again to stop now\n"
    report = json.loads(out)
    assert (report["facts"]["rows"], report["facts"]["batches"]) == (40, 2)
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!")
    # Of the last batch, too.
    assert connections.call(served.endpoint, "log", "CURSOR", group="ingest") == {0: 20, 1: 20}
    assert bodies(spark, tmp_path / "t") == Counter(map(str, range(40)))


@pytest.mark.long
def test_a_submitted_job_brings_its_python_along(
    spark: Any, served: Any, spark_conf: dict[str, str], tmp_path: Path
) -> None:
    """Where neither the runtime nor the plug-in is installed, the archive is all that it takes."""
    served.send("log", *(str(number) for number in range(10)))
    home = tmp_path / "lean"
    home.mkdir()
    site = Path(sysconfig.get_path("platlib"))
    ours = ("amqp_rt", "amqp-rt", "__editable__", "pyspark_amqp_rt", "click")
    for each in site.iterdir():
        if not each.name.startswith(ours) and each.suffix != ".pth":
            (home / each.name).symlink_to(each)
    words = ["--package", "jobs.zip", "ingest", "--address=log", "--table=t", "--once"]
    words += ["--master=local[2,2]", f"--url={served.url}", "--format=json"]
    words += [f"--conf={name}={value}" for name, value in spark_conf.items()]
    printed = subprocess.run(
        [sys.executable, "-m", "amqp_rt.cli", "pipeline", "submit", "--print", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    line = shlex.split(printed.stdout)
    (application,) = (word for word in line if word.endswith("submitted.py"))
    (tmp_path / "application.py").write_text(Path(application).read_text("utf-8"), "utf-8")
    line[line.index(application)] = "application.py"
    line[0] = str(home / "pyspark" / "bin" / line[0])
    python = str(Path(sys.executable).resolve())
    environment = {**os.environ, "PYTHONPATH": str(home), "PYSPARK_PYTHON": python}
    ran = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    # The launcher writes the standard error of an application to standard output.
    progress, _, report = ran.stdout.partition("\n")
    assert progress.startswith("batch 0: 10 rows in ")
    assert json.loads(report)["facts"]["rows"] == 10
    assert bodies(spark, tmp_path / "t") == Counter(map(str, range(10)))
