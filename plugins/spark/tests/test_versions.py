"""Older versions of Spark, each in a process of its own: what their interfaces let us do, and what is said of the rest.

Each version is half a gigabyte: ``make .build/pyspark-4.0`` installs one, and long runs install all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from amqp_rt.values import Symbol

BUILD = Path(__file__).parents[3] / ".build"
#: Version, whether readers are given conditions, and whether sources bound their micro-batches.
VERSIONS = [("4.0", False, False), ("4.1", True, False), ("4.2", True, True)]

COUNT = 40

PROGRAM = """
import json, sys, time
from collections import Counter
import pyspark
from amqp_rt_spark.java import session
from amqp_rt_spark.listening import MetricsListener

url, folder, conf, bounded = sys.argv[1:]
spark = session("local[2,2]", conf=json.loads(conf))
facts = {"version": pyspark.__version__}

def there(it, address, **more):
    return it.format("amqp").options(url=url, **({"address": address} if address else {}), **more)

log = there(spark.read, "log").load()
facts["count"] = log.count()
facts["kinds"] = dict(Counter(row[0] for row in log.select("body_kind").collect()))
facts["typed"] = there(spark.read, "log", columns="body_variant").load().selectExpr(
    "variant_get(body_variant, '$.n', 'int') n").where("n is not null").count()
chosen = there(spark.read, "log").schema("key string, body binary").load()
facts["keys"] = sorted({row.key for row in chosen.collect()}, key=str)

def why(call):
    try:
        call()
    except Exception as error:
        return str(error)

filtered = there(spark.read, "log", filterPushdown="true")
facts["filters"] = why(lambda: filtered.load().where("partition = 1").collect())
facts["kafka"] = why(lambda: spark.read.format("amqp").options(subscribe="log").load().schema)
facts["gone"] = why(lambda: there(spark.read, "nowhere").load().collect())

listener = MetricsListener()
spark.streams.addListener(listener)

def stream(source, to, checkpoint, enough):
    rows = source.load().selectExpr("message", f"'{to}' to" if to else "'x' subject")
    query = (
        there(rows.writeStream, "", producer=checkpoint)
        .option("checkpointLocation", folder + "/" + checkpoint)
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and query.isActive and not enough():
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()
    assert query.exception() is None, query.exception()
    return query

def waiting(queue):
    return there(spark.read, queue, mode="browse", columns="body").load().count()

# Micro-batches of at most seven, over two starts of the query.
source = there(spark.readStream, "log", raw="true", columns="offset", maxMessagesPerTrigger="7")
first = stream(source, "out", "log", lambda: waiting("out") >= 14)
facts["most"] = max(int(each["numInputRows"]) for each in first.recentProgress)
stream(source, "out", "log", lambda: waiting("out") >= facts["count"])
leases = there(spark.readStream, "in", raw="true", columns="offset", mode="lease", group="g",
               maxMessagesPerTrigger="7")
stream(leases, "out", "lease", lambda: waiting("in") == 0)
facts["behind"] = [each.behind is not None for each in listener.last.values()]
print(json.dumps(facts))
spark.stop()
"""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.req("K1", "K2", "K3", "K5")
@pytest.mark.parametrize(("version", "filters", "bounds"), VERSIONS)
def test_each_version_of_spark_as_far_as_it_goes(
    served: Any,
    spark_conf: dict[str, str],
    tmp_path: Path,
    version: str,
    filters: bool,
    bounds: bool,
) -> None:
    """The ledger: each message of a log and of a queue is written once, over two starts of the query."""
    spark = BUILD / f"pyspark-{version}"
    if not spark.is_dir():
        assert os.environ.get("CI") != "true"
        pytest.skip(f"pyspark {version} is not installed (make .build/{spark.name})")
    served.send("log", *({"n": number} for number in range(COUNT // 2)))
    for number in range(COUNT // 2, COUNT):
        served.send("log", str(number), message_annotations={Symbol("x-opt-partition-key"): "k"})
    served.send("in", *(f"queue {number}" for number in range(COUNT)))
    done = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM, served.url, str(tmp_path)),
            *(json.dumps({**spark_conf, "spark.local.dir": str(tmp_path)}), str(bounds)),
        ],
        env={**os.environ, "PYTHONPATH": str(spark)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["version"].startswith(f"{version}.")
    assert (facts["count"], facts["typed"]) == (COUNT, COUNT // 2)
    assert facts["keys"] == [None, "k"]
    assert facts["most"] <= 7
    if filters:
        assert facts["filters"] is None
    else:
        assert "filterPushdown=true takes pyspark 4.1 or later" in facts["filters"]
    assert set(facts["behind"]) == {bounds}
    for name, sentence in (("kafka", "no option 'subscribe'"), ("gone", "'nowhere'")):
        text = facts[name]
        assert sentence in text
        assert text.index(sentence) < text.index("Traceback"), text
    found = Counter(str(body) for body in served.bodies("out"))
    # JSON, octet for octet.
    expected = [str(b'{"n":%d}' % number) for number in range(COUNT // 2)]
    expected += [str(number) for number in range(COUNT // 2, COUNT)]
    expected += [f"queue {number}" for number in range(COUNT)]
    assert found == Counter(expected)
