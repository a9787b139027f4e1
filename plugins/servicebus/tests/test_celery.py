"""kombu's transport for Service Bus, by itself and below Celery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_servicebus.testing import ServiceBus

pytestmark = [
    pytest.mark.req("Z21"),
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.usefixtures("azure_python"),
]

PEERS = Path(__file__).parent / "peers"
WORKER = ["worker", "--pool=solo", "--loglevel=warning", "--without-gossip", "--without-mingle"]

#: Sends tasks and prints their results.
CLIENT = """
import json
from celery_shop import always_fails, double, fails_once

doubled = [double.delay(number) for number in range(10)]
retried, failed = fails_once.delay(), always_fails.delay()
print(json.dumps([
    [each.get(timeout=60) for each in doubled],
    retried.get(timeout=60),
    repr(failed.get(timeout=60, propagate=False)),
]))
"""

#: Uses a queue of kombu, and prints what it saw.
QUEUE = """
import json, queue
from kombu import Connection
import celery_shop

with Connection("azureservicebus://policy:key@namespace", transport_options={"wait_time_seconds": 1}) as connection:
    simple = connection.SimpleQueue("simple")
    for text in ("a", "b", "c"):
        simple.put({"text": text})
    seen = [simple.qsize()]
    first = simple.get(timeout=10)
    first.ack()
    second = simple.get(timeout=10)
    second.ack()
    seen += [first.payload["text"], second.payload["text"], simple.qsize()]
    simple.clear()
    seen.append(simple.qsize())
    try:
        simple.get(timeout=1)
    except queue.Empty:
        seen.append("empty")
    simple.close()
print(json.dumps(seen))
"""


@pytest.fixture
def environment(servicebus: ServiceBus, tmp_path: Path) -> dict[str, str]:
    results = tmp_path / "results"
    results.mkdir()
    return {
        **os.environ,
        "SERVICEBUS_CONNECTION_STRING": servicebus.connection_string,
        "CELERY_RESULTS": f"file://{results}",
        # The client of the administration speaks HTTPS, whatever the connection string says.
        "REQUESTS_CA_BUNDLE": str(servicebus.ca_file),
        "PYTHONPATH": str(PEERS),
    }


def run_python(program: str, environment: dict[str, str]) -> Any:
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_queue_of_kombu(servicebus: ServiceBus, environment: dict[str, str]) -> None:
    assert run_python(QUEUE, environment) == [3, "a", "b", 1, 0, "empty"]
    assert servicebus.queue("simple").stats.active == 0


def test_tasks_of_celery(
    servicebus: ServiceBus, environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    with log.open("w") as file:
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_shop", *WORKER],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            doubled, retried, failed = run_python(CLIENT, environment)
        finally:
            worker.terminate()
            worker.wait(30)

    assert doubled == [2 * number for number in range(10)], log.read_text()
    assert retried == 1
    assert failed == "ValueError('no such article')"
    # Tasks are settled when they are done, and those that fail, too.
    assert servicebus.queue("shop-celery").stats.active == 0
