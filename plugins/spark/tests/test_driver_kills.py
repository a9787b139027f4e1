"""The driver of a query is killed without notice, and the query is started again."""

from __future__ import annotations

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

MESSAGES = 400

DRIVER = """
import json, sys
from amqp_rt_spark.java import session

url, checkpoint, mode, conf, once, slots = sys.argv[1:]
spark = session("local[2,2]", conf=json.loads(conf))
source = (
    spark.readStream.format("amqp")
    .option("url", url)
    .option("raw", "true")
    .option("columns", "body")
    .option("maxMessagesPerTrigger", "20")
    .option("minPartitions", slots)
)
if mode == "lease":
    source = source.option("address", "in").option("mode", "lease").option("group", "g")
elif mode == "spool":
    source = source.option("address", "in").option("mode", "spool")
    source = source.option("spoolDir", checkpoint + "-spool")
else:
    source = source.option("address", "log")
rows = source.load().repartition(int(slots))
writer = rows.writeStream.format("amqp").option("url", url).option("address", "out")
writer = writer.option("checkpointLocation", checkpoint)
trigger = {"availableNow": True} if once == "once" else {"processingTime": "0 seconds"}
query = writer.trigger(**trigger).start()
query.awaitTermination()
"""


def start(served: Any, conf: dict[str, str], folder: Path, *said: str) -> subprocess.Popen[bytes]:
    """The driver, in a group of processes of its own; its workers are in another one."""
    # Spark tidies up when it ends by itself only.
    conf = {**conf, "spark.local.dir": str(folder / "scratch")}
    arguments = [served.url, str(folder / "checkpoint"), said[0], json.dumps(conf), *said[1:]]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
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
    served: Any,
    spark_conf: dict[str, str],
    tmp_path: Path,
    long_run_here: bool,
    mode: str,
) -> None:
    address = "log" if mode == "log" else "in"
    bodies = [str(number) for number in range(MESSAGES)]
    served.send(address, *(Message(body, message_id=body, durable=True) for body in bodies))
    kills = 3 if long_run_here else 1
    for kill in range(kills):
        driver = start(served, spark_conf, tmp_path, mode, "on", str(2 + kill))
        try:
            # In the middle: some batches are out, and others are not.
            wanted = MESSAGES * (kill + 1) // (kills + 2)
            while len(served.bodies("out")) < wanted:
                assert driver.poll() is None, "the driver has ended by itself"
                try:
                    driver.wait(0.05)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    last = start(served, spark_conf, tmp_path, mode, "once", "5")
    assert last.wait(300) == 0
    assert Counter(served.bodies("out")) == Counter(bodies)
