"""Benchmarks of amqp_rt and all installed peers in one run: ``python -m benchmarks --help``."""
