"""Entry point of ``python -m amqp_rt``, which is the same as ``amqp-rt``."""

from __future__ import annotations

from .cli import main

main(prog_name="amqp-rt")
