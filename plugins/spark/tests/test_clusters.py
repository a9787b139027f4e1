"""Executors in processes of their own, and Spark Connect; and what is said where something is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from amqp_rt_spark.cluster import NotReady, _sentence, check
from amqp_rt_spark.java import java_home
from amqp_rt_spark.jobs.submitting import package

import amqp_rt

COUNT = 40

#: Names for the programs below, which have *spark* and *url* by then.
THERE = """
def there(it, address, **more):
    return it.format("amqp").options(url=url, address=address, **more)
"""

BATCH = """
log = there(spark.read, "log", body="text").load()
assert log.where("partition < 2").count() == 40, log.count()
rows = log.selectExpr("concat('batch ', body) body")
for _ in range(2):
    there(rows.write, "out", producer="batch").mode("append").save()
"""

STREAM = """
source = there(spark.readStream, "log", body="text", minPartitions="3").load()
query = (
    there(source.selectExpr("concat('stream ', body) body").writeStream, "out")
    .option("checkpointLocation", folder + "/checkpoint")
    .trigger(availableNow=True)
    .start()
)
assert query.awaitTermination(240)
assert query.exception() is None, query.exception()
"""

#: A job; by *table_format* its batches are written by tasks (parquet), or by the driver (delta).
INGEST = """
from amqp_rt_spark.jobs.ingest import Ingest, ingest
from amqp_rt_spark.jobs.lake import read_table

job = Ingest(url=url, address="log", table=folder + "/lake", table_format=table_format, once=True)
facts = ingest(spark, job).facts
bodies = sorted(bytes(row.body).decode() for row in read_table(spark, job.table).collect())
ingested = [facts["rows"], facts["quarantined"], bodies]
"""

CLUSTER = f"""
import json, sys
from amqp_rt_spark.cluster import NotReady, check
from amqp_rt_spark.java import session
from amqp_rt_spark.source import AmqpDataSource

url, folder, copies, conf, archive = sys.argv[1:]
conf = json.loads(conf)
spark = session(conf.pop("spark.master"), conf=conf)
said = []
for wanted in (None, {{"url": "amqp://127.0.0.1:1"}}):
    try:
        check(spark, wanted)
    except NotReady as error:
        said.append(str(error))
    # Archives sent along are there from now on.
    spark.sparkContext.addPyFile(archive)
found = check(spark, {{"url": url}})
# A format has the archives that were there when it was registered.
spark.dataSource.register(AmqpDataSource)
{THERE}
exec(copies)
table_format = "parquet"
{INGEST}
rows = spark.sparkContext.parallelize(range(2), 2)
loaded = rows.map(lambda _: sorted({{"trio", "amqp_rt_spark"}} & set(__import__("sys").modules))).collect()
print(json.dumps([said, len(found), loaded, ingested]))
"""

CONNECT = f"""
import json, sys
from pyspark.sql import SparkSession
from amqp_rt_spark.cluster import check

url, folder, copies, server = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
found = check(spark, {{"url": url}})
{THERE}
exec(copies)
table_format = "delta"
{INGEST}
print(json.dumps([type(spark).__module__, len(found), ingested]))
"""


def run(program: str, environ: dict[str, str], *said: str) -> Any:
    """What *program* prints, run by a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *said],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_copies(served: Any, copies: str) -> None:
    ways = [name for name, copy in (("batch", BATCH), ("stream", STREAM)) if copy in copies]
    assert Counter(str(body) for body in served.bodies("out")) == Counter(
        f"{way} {number}" for way in ways for number in range(COUNT)
    )


#: Rows, rows in quarantine, and bodies in the table.
INGESTED = [COUNT, 0, sorted(str(number) for number in range(COUNT))]


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.req("K1")
def test_executors_are_asked_before_a_query_starts(
    spark: Any, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(spark, {"url": served.url})
    assert len(found) == 2
    assert {each.versions["amqp_rt"] for each in found} == {amqp_rt.__version__}
    for options, why in (
        ({"url": "amqp://127.0.0.1:1"}, "2 of 2 tasks ran: cannot connect to amqp://127.0.0.1:1: "),
        (
            {"url": served.url, "credentialsFile": str(tmp_path / "none")},
            f"ran: credentialsFile {str(tmp_path / 'none')!r} cannot be read: ",
        ),
    ):
        with pytest.raises(NotReady) as caught:
            check(spark, options)
        assert why in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="did you mean credentialsFile"):
        check(spark, {"url": served.url, "credentialFile": "x"})
    monkeypatch.setattr(amqp_rt, "__version__", "99.0")
    with pytest.raises(NotReady, match=r"has amqp-rt .*, and the driver has 99\.0: make them the"):
        check(spark, tasks=1)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            'Task 0 failed 4 times: java.io.IOException: Cannot run program "/x/python3": error=2\n\tat a.b',
            "the executors have no Python '/x/python3': set PYSPARK_PYTHON to one that they have",
        ),
        (
            "Python in worker has different version: 3.9 than that in driver: 3.11, PySpark cannot …",
            "the executors run Python 3.9, and the driver 3.11: set PYSPARK_PYTHON to the same version",
        ),
        (
            "Traceback …\nModuleNotFoundError: No module named 'py4j.protocol'\n",
            "the executors' Python has no module 'py4j.protocol': install it there",
        ),
        ("\n what\x1b[1m is it?\n more", "the executors cannot run Python: what\\u001b[1m is it?"),
        ("", "the executors cannot run Python"),
    ],
)
def test_what_spark_says_of_executors_is_one_sentence(said: str, sentence: str) -> None:
    assert _sentence(said) == sentence


@contextmanager
def standalone(folder: Path, environ: dict[str, str], options: str) -> Iterator[str]:
    """A cluster of Spark's own: a master and one worker with two cores, in processes of their own."""
    import pyspark

    home = Path(str(pyspark.__file__)).parent
    env = {
        **os.environ,
        **environ,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(java_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": options,
    }

    def start(name: str, *said: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = folder / f"{name}.log"
        program = f"org.apache.spark.deploy.{name.lower()}.{name}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), program, *said],
                env=env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return process, log

    def wait_for(pattern: str, process: subprocess.Popen[bytes], log: Path) -> str:
        while not (found := re.search(pattern, log.read_text("utf-8", "replace"))):
            assert process.poll() is None, log.read_text("utf-8", "replace")[-3_000:]
            time.sleep(0.1)
        return found[1]

    here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    started = []
    try:
        started.append(master := start("Master", *here))
        url = wait_for(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)", *master)
        size = ("--cores", "2", "--memory", "1g", "--work-dir", str(folder / "work"))
        started.append(worker := start("Worker", *here, *size, url))
        wait_for(r"(Successfully registered with master)", *worker)
        yield url
    finally:
        for process, _ in reversed(started):
            process.terminate()
            process.wait()


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.req("K1", "K2", "K3", "K7")
def test_a_cluster_that_gets_our_python_sent_along(
    served: Any, spark_conf: dict[str, str], tmp_path: Path, long_run_here: bool
) -> None:
    """Executors of ``spark://`` have msgspec and pyarrow, and no trio: the rest comes as an archive."""
    import pyarrow

    served.send("log", *(str(number) for number in range(COUNT)))
    copies = BATCH + STREAM if long_run_here else STREAM
    archive, there = tmp_path / "ours.zip", tmp_path / "there"
    package(str(archive))
    there.mkdir()
    for module in (msgspec, pyarrow):
        folder = Path(str(module.__file__)).parent
        (there / folder.name).symlink_to(folder)
    environ = {
        "PYSPARK_PYTHON": getattr(sys, "_base_executable", sys.executable),
        "PYTHONPATH": str(there),
    }
    with standalone(tmp_path, environ, spark_conf["spark.driver.defaultJavaOptions"]) as master:
        conf = {
            **spark_conf,
            "spark.master": master,
            "spark.local.dir": str(tmp_path),
            "spark.executor.memory": "512m",
        }
        # Streams are planned by a Python of the driver, which Spark sends nothing.
        environ["PYTHONPATH"] += f"{os.pathsep}{archive}"
        said, tasks, loaded, ingested = run(
            *(CLUSTER, environ, served.url, str(tmp_path), copies),
            *(json.dumps(conf), str(archive)),
        )
    missing, unreached = said
    assert "2 of 2 tasks ran has no amqp-rt and amqp-rt-spark for its Python" in missing
    assert unreached.endswith(": cannot connect to amqp://127.0.0.1:1: nothing listens there")
    assert tasks == 2
    check_copies(served, copies)
    assert ingested == INGESTED
    assert "trio" not in {each for modules in loaded for each in modules}


@pytest.fixture(scope="session")
def connect_server(spark: Any) -> Iterator[str]:
    """A server of Spark Connect, in the Java that the tests have already."""
    package = spark._jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    service.start(spark._jsc.sc())
    yield f"sc://127.0.0.1:{service.localPort()}"
    nothing = spark._jvm.scala.Option.empty()
    service.stop(nothing, nothing)


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.req("K1", "K2", "K3", "K7")
def test_spark_connect(
    connect_server: str, served: Any, tmp_path: Path, long_run_here: bool
) -> None:
    """The client is a process of its own, which has no Java."""
    missing = [each for each in ("grpc", "pandas", "zstandard") if find_spec(each) is None]
    if missing and os.environ.get("CI") != "true":
        pytest.skip(f"{missing[0]} is not installed (make .venv/spark)")
    served.send("log", *(str(number) for number in range(COUNT)))
    copies = BATCH + STREAM if long_run_here else BATCH
    module, tasks, ingested = run(CONNECT, {}, served.url, str(tmp_path), copies, connect_server)
    assert ".connect." in module
    assert tasks == 2
    assert ingested == INGESTED
    check_copies(served, copies)
