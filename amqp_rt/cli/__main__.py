"""Entry point of ``python -m amqp_rt.cli``, which is the same as ``amqp-rt``."""

from __future__ import annotations

from . import main

main(prog_name="amqp-rt")
