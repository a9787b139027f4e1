"""Session of Spark that runs jobs given as lines of JSON (see processes.py).

It serves two contestants: our format ``amqp``, in whose workers this Python has amqp_rt installed,
and Spark by itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

Options = dict[str, Any]

BODY = (bytes(range(251)) * 2)[:256]
CONF = {
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
}
#: Columns of the rows of all sinks.
ROWS = (
    "cast(repeat('x', 256) as binary) body",
    "'departed' subject",
    "map('delay', id % 200) application_properties",
)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def version(options: Options) -> None:
    """Print the versions, or which requirement is missing."""
    try:
        import pyarrow
        import pyspark
        from amqp_rt_spark.java import NoJava, java_home, java_version
    except ImportError as error:
        say(absent=f"{error.name} is not installed (make .venv/spark)")
        return
    try:
        java = java_version(str(java_home() / "bin" / "java"))
    except NoJava as error:
        say(absent=str(error))
        return
    packages = [Path(each.__file__).parent for each in (pyspark, pyarrow)]
    say(
        spark=pyspark.__version__,
        arrow=pyarrow.__version__,
        java=java,
        packages=[str(each) for each in (*packages, packages[0].parent / "py4j")],
    )


class Jobs:
    """Jobs of a session. Each returns numbers."""

    def __init__(self, options: Options, folder: Path) -> None:
        from amqp_rt_spark.java import session

        where = {"spark.sql.warehouse.dir": str(folder), "spark.local.dir": str(folder)}
        self.spark = session("local[2]", conf={**CONF, **where})
        self.folder = folder
        self.url = f"amqp://127.0.0.1:{options['port']}" if options.get("port") else ""
        self._numbers = count()
        self._ready: dict[str, type] = {}

    # --- ours ---

    def _options(self, address: str, **more: str) -> dict[str, str]:
        return {"url": self.url, "address": address, **more}

    def fill(self, address: str, rows: int) -> Options:
        """Put *rows* messages into the node at *address*."""
        from amqp_rt_spark import connections
        from amqp_rt_spark.options import SINK, read_options
        from amqp_rt_spark.outlets import Outlet

        from amqp_rt import Message

        endpoint = read_options(self._options(address), SINK).endpoint
        out = Outlet(connections.wire(endpoint), address, timeout_s=60)
        for number in range(rows):
            out.send(Message(BODY, **said(number)).encode())
        out.finish()
        return {"n": out.count}

    def direct_read(self, address: str, options: dict[str, str]) -> Options:
        """Make the rows of a log as Arrow batches, in one process, without using them."""
        from amqp_rt_spark.batch import Batch
        from amqp_rt_spark.columnar import batches
        from amqp_rt_spark.options import SOURCE, read_options
        from pyspark.sql.pandas.types import to_arrow_schema

        given = self._options(address, **options)
        schema = self.spark.read.format("amqp").options(**given).load().schema
        arrow = to_arrow_schema(schema, timezone="UTC")
        batch = Batch(read_options(given, SOURCE))
        rows, started, cpu = 0, time.perf_counter(), time.process_time()
        for part in batch.partitions():
            for each in batches(batch.records(part), batch.options, arrow):
                rows += each.num_rows
        return timed(rows, started, cpu)

    def read(self, address: str, rows: int, options: dict[str, str], times: int = 1) -> Options:
        """Read the same *rows* as a Spark batch, *times* times."""
        given = self._options(address, **options)
        found = self.spark.read.format("amqp").options(**given).load()
        return self._batch(reduce(type(found).union, [found] * times), rows * times)

    def stream(self, address: str, options: dict[str, str]) -> Options:
        """Read the same as one micro-batch, which removes the messages of a queue."""
        given = self._options(address, minPartitions="2", **options)
        return self._stream(self.spark.readStream.format("amqp").options(**given).load())

    def ticks(self, address: str, batches: int) -> Options:
        """Run micro-batches of two messages each, one from each partition, read by one task."""
        given = self._options(address, maxMessagesPerTrigger="2", minMessagesPerPartition="2")
        return self._ticks(self.spark.readStream.format("amqp").options(**given).load(), batches)

    def direct_write(self, address: str, rows: int) -> Options:
        """Send rows as messages, in one process."""
        from amqp_rt_spark import connections
        from amqp_rt_spark.options import SINK, read_options
        from amqp_rt_spark.outlets import Outlet
        from amqp_rt_spark.rows import payload_of

        options = read_options(self._options(address, durable="false"), SINK)
        given = [
            {"body": BODY, "subject": "departed", "application_properties": {"delay": number % 200}}
            for number in range(rows)
        ]
        started, cpu = time.perf_counter(), time.process_time()
        out = Outlet(connections.wire(options.endpoint), address, timeout_s=60)
        for row in given:
            out.send(payload_of(row, options))
        out.finish()
        return timed(out.count, started, cpu)

    def write(self, address: str, rows: int, staged: bool) -> Options:
        """Write the same as a Spark batch, directly or published in one step."""
        given = self._options(address, durable="false")
        if staged:
            given["producer"] = f"bench-{next(self._numbers)}"
        made = self.spark.range(0, rows, 1, 2).selectExpr(*ROWS)
        started, cpu = time.perf_counter(), time.process_time()
        made.write.format("amqp").options(**given).mode("append").save()
        return timed(rows, started, cpu)

    # --- Spark by itself ---

    def own_python(self, rows: int, columns: str = "offset,body") -> Options:
        """Read a Python data source with prepared batches; of *columns*, or of all."""
        if columns not in self._ready:
            self._ready[columns] = ready_made(columns)
        self.spark.dataSource.register(self._ready[columns])
        found = self.spark.read.format("ready").option("rows", str(rows)).load()
        return self._batch(found, rows)

    def own_rate(self, rows: int) -> Options:
        """Read the rate source, in one micro-batch."""
        return self._stream(self._rate(rows))

    def own_ticks(self, batches: int) -> Options:
        """Read the rate source, with two rows in each micro-batch."""
        return self._ticks(self._rate(2), batches)

    def own_python_ticks(self, batches: int) -> Options:
        """Read a Python source with two prepared rows in each micro-batch, made by one task."""
        if "ticks" not in self._ready:
            self._ready["ticks"] = ready_ticks("offset,body")
        self.spark.dataSource.register(self._ready["ticks"])
        return self._ticks(self.spark.readStream.format("ready-ticks").load(), batches)

    def _rate(self, rows: int) -> Any:
        rate = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", str(rows))
        found = rate.option("numPartitions", "2").load()
        return found.selectExpr("value offset", "cast(repeat('x', 256) as binary) body")

    # --- both ---

    def _batch(self, found: Any, rows: int) -> Options:
        started, cpu = time.perf_counter(), time.process_time()
        found.write.format("noop").mode("overwrite").save()
        return timed(rows, started, cpu)

    def _query(self, found: Any, **trigger: Any) -> Any:
        checkpoint = tempfile.mkdtemp(dir=self.folder)
        writer = found.writeStream.format("noop").option("checkpointLocation", checkpoint)
        return writer.trigger(**trigger).start()

    def _stream(self, found: Any) -> Options:
        query = self._query(found, availableNow=True)
        query.awaitTermination()
        took = [each for each in query.recentProgress if each["numInputRows"]]
        rows = sum(each["numInputRows"] for each in took)
        seconds = sum(each["durationMs"]["triggerExecution"] for each in took) / 1000
        return {"n": rows, "elapsed": seconds}

    def _ticks(self, found: Any, batches: int) -> Options:
        query = self._query(found, processingTime="0 seconds")
        try:
            while len(query.recentProgress) < batches + WARM and query.isActive:
                time.sleep(0.05)
            took = [
                each["durationMs"]["triggerExecution"]
                for each in query.recentProgress
                if each["numInputRows"]
            ]
        finally:
            query.stop()
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))
        return {"n": len(took) - WARM, "median_ms": median(took[WARM:])}


#: Micro-batches at the start that are not counted.
WARM = 3


def timed(rows: int, started: float, cpu: float) -> Options:
    return {
        "n": rows,
        "elapsed": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
    }


def said(number: int) -> dict[str, Any]:
    """Return the properties of a log's message with *number*."""
    return {
        "message_id": number,
        "subject": "departed",
        "content_type": "application/octet-stream",
        "application_properties": {"carrier": "UA", "delay": number % 200, "late": True},
    }


def ready_batch(columns: str) -> tuple[str, bytes]:
    """Return the columns as DDL and one encoded batch, prepared here so that no task has to."""
    import pyarrow
    from amqp_rt_spark.arrow import ROWS
    from amqp_rt_spark.columnar import batches
    from amqp_rt_spark.options import Options
    from amqp_rt_spark.rows import Records
    from amqp_rt_spark.schema import ddl_of
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    from amqp_rt import Message
    from amqp_rt.values import Symbol, Timestamp

    options = Options(columns=tuple(columns.split(",")) if columns else ())
    numbers = list(range(ROWS))
    payloads = [
        Message(
            BODY,
            message_annotations={
                Symbol("x-opt-offset"): str(number),
                Symbol("x-opt-sequence-number"): number,
                Symbol("x-opt-enqueued-time"): Timestamp(1_700_000_000_000 + number),
            },
            **said(number),
        ).encode()
        for number in numbers
    ]
    schema = to_arrow_schema(StructType.fromDDL(ddl_of(options)), timezone="UTC")
    (made,) = batches([Records("ready", payloads, 0, numbers)], options, schema)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(made)
    return ddl_of(options), sink.getvalue().to_pybytes()


def ready_made(columns: str) -> type:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    ddl, encoded = ready_batch(columns)

    class Reader(DataSourceReader):
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(self.rows // 2), InputPartition(self.rows - self.rows // 2)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow

            with pyarrow.ipc.open_stream(encoded) as stream:
                (whole,) = stream
            left = partition.value
            while left > 0:
                yield whole.slice(0, left)
                left -= len(whole)

    class Ready(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ready"

        def schema(self) -> str:
            return ddl

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader(int(self.options["rows"]))

    return Ready


def ready_ticks(columns: str) -> type:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    ddl, encoded = ready_batch(columns)

    class Reader(DataSourceStreamReader):
        def __init__(self) -> None:
            self.offset = 0

        def initialOffset(self) -> Options:  # noqa: N802 - Spark's name
            return {"offset": 0}

        def latestOffset(self) -> Options:  # noqa: N802 - Spark's name
            self.offset += 2
            return {"offset": self.offset}

        def partitions(self, start: Options, end: Options) -> list[InputPartition]:
            return [InputPartition(end["offset"] - start["offset"])]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow

            with pyarrow.ipc.open_stream(encoded) as stream:
                (whole,) = stream
            yield whole.slice(0, partition.value)

        def commit(self, end: Options) -> None:
            """Keep nothing: there is nothing to forget."""

    class Ready(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ready-ticks"

        def schema(self) -> str:
            return ddl

        def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
            return Reader()

    return Ready


def forms_here(_: object) -> list[bool]:
    """Return whether the codec and the decoder of columns are compiled in this process."""
    from amqp_rt_spark import columnar

    import amqp_rt

    return [amqp_rt.COMPILED, columnar.COMPILED]


def session(options: Options) -> None:
    """Serve until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(options, Path(folder))
        try:
            # The modules that its workers import, which may differ from those of this process.
            forms = jobs.spark.sparkContext.parallelize([0], 1).map(forms_here).collect()
            say(ready=1, compiled=forms[0])
            for line in sys.stdin:
                told = json.loads(line)
                job: Callable[..., Options] = getattr(jobs, told.pop("job"))
                try:
                    done = job(**told)
                except Exception as error:
                    done = {"failed": f"{type(error).__name__}: {error}"[:500]}
                say(**done)
        finally:
            jobs.spark.stop()


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    {"version": version, "session": session}[role](options)


if __name__ == "__main__":
    main()
