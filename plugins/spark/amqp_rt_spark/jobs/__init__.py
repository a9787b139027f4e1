"""Ready-made jobs over queues, logs and dead letters: ``amqp-rt pipeline``.

Each job is a function of a session and a Struct (:mod:`.conf`), which the command line, ``spark-submit`` and
notebooks share: ``from amqp_rt_spark.jobs.ingest import Ingest, ingest``.
"""
