"""Entry point for Spark, which imports every top-level module named ``pyspark_*`` and registers its DefaultSource.

An error here would break every Python data source of the session, so errors become warnings.
"""

from __future__ import annotations

try:
    from amqp_rt_spark.source import AmqpDataSource as DefaultSource
except Exception as _error:  # of any kind: other data sources must keep working
    import warnings

    warnings.warn(
        f"the format amqp is not there: {_error!r}", category=RuntimeWarning, stacklevel=1
    )
else:
    __all__ = ["DefaultSource"]
