"""Entry point for ``spark-submit``: the jobs, with the master left to Spark's own settings."""

from __future__ import annotations

import sys

from amqp_rt_spark.jobs.cli import pipeline

if __name__ == "__main__":
    pipeline([*sys.argv[1:], "--master="], prog_name="amqp-rt pipeline")
