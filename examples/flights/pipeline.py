"""Second part of the example: the flights through a log of the broker into Spark, as a stream.

main.py calls this if Spark and Java are installed.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from station import Delays

#: Packages that ``./plugins/spark[pyspark,jobs]`` installs.
NEEDED = ("amqp_rt_spark", "pyspark", "pyarrow", "rich", "jinja2", "matplotlib")
#: Settings for one machine; Spark's defaults are for clusters.
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    # A third of Java's processor time went into compiling code that runs for some seconds only.
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
}

#: Delays by carrier and by scheduled hour of departure.
Grouped = dict[tuple[str, int], Delays]


def missing() -> str:
    """Return a sentence on missing packages or Java; an empty text if nothing is missing."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        return (
            f"{', '.join(absent)} cannot be imported; "
            "pip install --editable './plugins/spark[pyspark,jobs,java]' brings all that it takes"
        )
    from amqp_rt_spark.java import NoJava, java_home

    try:
        java_home()
    except NoJava as error:
        return str(error)
    return ""


def delays(url: str, address: str, total: int) -> Grouped:
    """Return the delays that Spark computes from the *total* flights in the log at *address*, as a stream."""
    from amqp_rt_spark.jobs.launching import start
    from pyspark.sql.functions import coalesce, count, lit
    from pyspark.sql.functions import sum as sum_

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # no other machines
    spark = start("local[*,4]", CONF, name="flights")
    try:
        flights = (
            spark.readStream.format("amqp")
            .options(url=url, address=address, body="text", columns="body")
            .option("maxMessagesPerTrigger", 200_000)
            .load()
            .selectExpr(
                "inline(array(from_json(body, "
                "'carrier string, hour int, dep_delay double, arr_delay double')))"
            )
        )
        grouped = flights.groupBy("carrier", "hour").agg(
            count("*").alias("flights"),
            # Counts known delays only: cancelled flights have none.
            count("dep_delay").alias("departed"),
            count("arr_delay").alias("arrived"),
            coalesce(sum_("dep_delay"), lit(0.0)).alias("dep_delay"),
            coalesce(sum_("arr_delay"), lit(0.0)).alias("arr_delay"),
        )
        query = (
            grouped.writeStream.format("memory")
            .queryName("delays")
            .outputMode("complete")
            .trigger(availableNow=True)
            .start()
        )
        with click.progressbar(length=total, label="Spark reads them", file=sys.stderr) as bar:
            while not query.awaitTermination(1):
                bar.update(sum(each["numInputRows"] for each in query.recentProgress) - bar.pos)
            bar.update(total - bar.pos)
        return {
            (row.carrier, row.hour): Delays(
                row.flights, row.departed, row.arrived, row.dep_delay, row.arr_delay
            )
            for row in spark.table("delays").collect()
        }
    finally:
        spark.stop()


def by(grouped: Grouped, key: int) -> dict[Any, Delays]:
    """Return *grouped* by the carrier (0) or the hour (1) alone."""
    found: dict[Any, Delays] = {}
    for group, part in grouped.items():
        found.setdefault(group[key], Delays()).add(part)
    return found


def show(grouped: Grouped, report: Path) -> None:
    """Print Spark's results as tables, and write *report*, which has the plots, too."""
    from amqp_rt_spark.jobs.report import Plot, Report, Table

    sections: list[Any] = []
    carriers = sorted(by(grouped, 0).items(), key=lambda item: -item[1].flights)
    hours = [(f"{hour}:00", each) for hour, each in sorted(by(grouped, 1).items())]
    for name, kind, found in (("carrier", "bar", carriers), ("hour", "line", hours)):
        columns = [name, "flights", "not departed", "departure delay, min", "arrival delay, min"]
        rows = [
            [
                group,
                each.flights,
                each.flights - each.departed,
                mean(each.dep_delay, each.departed),
                mean(each.arr_delay, each.arrived),
            ]
            for group, each in found
        ]
        delayed = {"departure": [row[3] for row in rows], "arrival": [row[4] for row in rows]}
        sections += (
            Table(f"By {name}", columns, rows),
            Plot(f"Mean delay by {name}", kind, [row[0] for row in rows], delayed, "minutes"),
        )
    made = Report(title="Delays of the flights that left New York in 2013", sections=sections)
    click.echo(f"\n{made.console()}")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(made.html(), encoding="utf-8")


def mean(total: float, count: int) -> float | None:
    return round(total / count, 1) if count else None
