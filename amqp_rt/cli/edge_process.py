"""Program of an edge process: ``python -m amqp_rt.cli.edge_process DESCRIPTOR``, started by ``amqp-rt serve --edges``."""

from __future__ import annotations

import gc
import logging
import socket
import sys

import trio

from ..errors import AmqpError
from ..net.edge_relay import EdgeWork, ignore_signals, receive_settings
from .running import set_up_logs

log = logging.getLogger("amqp_rt.cli")


def main(descriptor: str) -> int:
    """Relay connections for the broker at the other end of *descriptor* until it ends; return the exit status."""
    ignore_signals()
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    settings = receive_settings(control)
    if settings is None:
        return 0
    set_up_logs(settings.log_level, settings.log_format)
    try:
        work = EdgeWork(control, settings)
    except AmqpError as error:
        log.error("%s", error.description)
        return 1
    gc.freeze()
    trio.run(work.run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
