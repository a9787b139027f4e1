"""Worker processes of Spark: what a task leaves to their garbage collection."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

_TASK = """
import gc
from pyspark import TaskContext
from amqp_rt_spark.workers import exempt_modules

if {task}:
    TaskContext._setTaskContext(TaskContext())
exempt_modules()
first = gc.get_freeze_count()
made = [[] for _ in range(1_000)]
exempt_modules()
print(first > 10_000, gc.get_freeze_count() == first)
"""


@pytest.mark.parametrize(("task", "said"), [(True, "True True"), (False, "False True")])
def test_a_worker_collects_what_tasks_leave_and_not_its_modules(task: bool, said: str) -> None:
    """The driver, and processes that plan, are left as they are."""
    ran = subprocess.run(
        [sys.executable, "-c", _TASK.format(task=task)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == said
