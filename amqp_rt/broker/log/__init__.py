"""Logs: partitions of records that are appended, read by offset, and removed by retention."""
