"""What ``spark-submit`` is given: the jobs, where Spark has been told already on which master they run."""

from __future__ import annotations

import sys

from amqp_rt_spark.jobs.cli import pipeline

if __name__ == "__main__":
    pipeline([*sys.argv[1:], "--master="], prog_name="amqp-rt pipeline")
