"""The driver of a query is killed without notice, and the query is started again."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from amqp_rt import Message

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def writer(spark: Any, url: str, folder: str, mode: str, slots: int) -> Any:
    """The query, before it starts, in micro-batches of 20 messages and *slots* tasks."""
    options = {"url": url, "raw": "true", "columns": "body", "maxMessagesPerTrigger": "20"}
    options["address"] = "log" if mode == "log" else "in"
    if mode == "lease":
        options |= {"mode": mode, "group": "g"}
    elif mode == "spool":
        options |= {"mode": mode, "spoolDir": folder + "/spool"}
    source = spark.readStream.format("amqp").options(minPartitions=str(slots), **options)
    sink = source.load().repartition(slots).writeStream.format("amqp")
    return sink.options(url=url, address="out", checkpointLocation=folder + "/checkpoint")


DRIVER = f"""
import json, sys
from typing import Any
from amqp_rt_spark.java import session

{inspect.getsource(writer)}

conf, url, folder, mode, slots = sys.argv[1:]
spark = session("local[2,2]", conf=json.loads(conf))
query = writer(spark, url, folder, mode, int(slots)).trigger(processingTime="0 seconds").start()
query.awaitTermination()
"""


def start(
    served: Any, conf: dict[str, str], folder: Path, mode: str, slots: int
) -> subprocess.Popen[bytes]:
    """The driver, in a group of processes of its own; its workers are in another one."""
    # Spark tidies up when it ends by itself only.
    conf = {**conf, "spark.local.dir": str(folder / "scratch")}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(conf), served.url, str(folder), mode, str(slots)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("log", marks=pytest.mark.req("K2", "K3")),
        pytest.param("lease", marks=[pytest.mark.req("K5"), pytest.mark.long]),
        pytest.param("spool", marks=[pytest.mark.req("K6"), pytest.mark.long]),
    ],
)
def test_nothing_is_lost_and_nothing_doubled(
    spark: Any,
    served: Any,
    spark_conf: dict[str, str],
    tmp_path: Path,
    long_run_here: bool,
    mode: str,
) -> None:
    kills, count = (3, 400) if long_run_here else (1, 120)
    bodies = [str(number) for number in range(count)]
    address = "log" if mode == "log" else "in"
    served.send(address, *(Message(body, message_id=body, durable=True) for body in bodies))
    for kill in range(kills):
        driver = start(served, spark_conf, tmp_path, mode, 2 + kill)
        try:
            # In the middle: some batches are out, and others are not.
            wanted = count * (kill + 1) // (kills + 2)
            while len(served.bodies("out")) < wanted:
                assert driver.poll() is None, "the driver has ended by itself"
                try:
                    driver.wait(0.05)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert len(served.bodies("out")) < count
    # The one that goes on has a Java that runs already.
    last = writer(spark, served.url, str(tmp_path), mode, 5).trigger(availableNow=True).start()
    assert last.awaitTermination(300)
    assert last.exception() is None
    assert Counter(served.bodies("out")) == Counter(bodies)
