"""Processes of Spark in which tasks run."""

from __future__ import annotations

import gc
from functools import cache

from pyspark import TaskContext


@cache
def exempt_modules() -> None:
    """Exempt what a worker has loaded from garbage collection, when its first task begins.

    Spark's worker makes a full collection after each task. For the modules of Spark, Arrow and this package that takes
    30 to 45 ms of processor time, which is more than all else that a task with few rows does.
    """
    if TaskContext.get() is not None:
        gc.freeze()
