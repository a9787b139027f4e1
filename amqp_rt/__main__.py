"""``python -m amqp_rt`` is ``amqp-rt``."""

from __future__ import annotations

from .cli import main

main(prog_name="amqp-rt")
