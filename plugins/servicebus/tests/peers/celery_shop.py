"""A Celery application whose broker is a namespace of Service Bus; its test runs it as worker and as client.

kombu's transport adds ``.servicebus.windows.net`` to the name of each namespace. Giving it the connection
string is the one method that has to be replaced.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from kombu.transport import azureservicebus


def _take_connection_string(channel: Any) -> None:
    channel._connection_string = os.environ["SERVICEBUS_CONNECTION_STRING"]


azureservicebus.Channel._try_parse_connection_string = _take_connection_string

app = Celery(
    "shop",
    broker="azureservicebus://policy:key@namespace",
    backend=os.environ["CELERY_RESULTS"],
)
app.conf.update(
    broker_transport_options={"wait_time_seconds": 1, "queue_name_prefix": "shop-"},
    worker_enable_remote_control=False,
    task_acks_late=True,
    broker_connection_retry_on_startup=False,
)


@app.task
def double(number: int) -> int:
    return 2 * number


@app.task(bind=True, max_retries=2, default_retry_delay=0.1)
def fails_once(task: Any) -> int:
    if task.request.retries == 0:
        raise task.retry()
    return int(task.request.retries)


@app.task
def always_fails() -> None:
    raise ValueError("no such article")
