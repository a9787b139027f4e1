"""``python -m amqp_rt.cli`` is ``amqp-rt``."""

from __future__ import annotations

from . import main

main(prog_name="amqp-rt")
