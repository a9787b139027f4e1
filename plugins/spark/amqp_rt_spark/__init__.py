"""AMQP nodes as tables and streams of Apache Spark.

With this installed, ``spark.read.format("amqp")`` works, and ``readStream``, ``write`` and
``writeStream`` with it; :func:`~amqp_rt_spark.java.session` makes a session where there is none.
"""

from __future__ import annotations

__version__ = "0.1.0"
