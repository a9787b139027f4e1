"""Typical Celery tasks; ``BROKER`` and ``RESULTS`` are the URLs of the broker and the result backend."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("tasks", broker=os.environ["BROKER"], backend=os.environ["RESULTS"])
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_cancel_long_running_tasks_on_connection_loss = False


@app.task
def add(one, other):
    return one + other


@app.task(bind=True, max_retries=3)
def flaky(self):
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return self.request.retries


@app.task
def total(numbers):
    return sum(numbers)
