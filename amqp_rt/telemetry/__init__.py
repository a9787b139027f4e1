"""Tracing and metrics of containers and brokers, for the tools of others."""
