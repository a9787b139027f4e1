"""Found by Spark: it imports every top-level module named ``pyspark_*``, and takes its DefaultSource.

An import that fails here would take every Python data source of the session with it, so nothing does.
"""

from __future__ import annotations

try:
    from amqp_rt_spark.source import AmqpDataSource as DefaultSource
except Exception as _error:  # whatever it is, others must not suffer
    import warnings

    warnings.warn(
        f"the format amqp is not there: {_error!r}", category=RuntimeWarning, stacklevel=1
    )
else:
    __all__ = ["DefaultSource"]
