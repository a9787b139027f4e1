"""Reports of a service's state to the service manager that has started it, such as systemd.

The protocol of ``sd_notify``: datagrams of lines ``NAME=VALUE`` to the Unix socket that ``NOTIFY_SOCKET`` names. Without
that variable nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

import trio

log = logging.getLogger("amqp_rt.cli")

#: Seconds for which a service manager is asked to wait for a standby, again and again.
STANDBY_MORE_S: Final = 30


class ServiceManager:
    """Service manager of this process, told of its state.

    Args:
        environ: The environment; ``NOTIFY_SOCKET`` is the path of a socket, or ``@`` and an abstract name;
            ``WATCHDOG_USEC`` the microseconds after which a service without a sign of life is restarted, for the
            process ``WATCHDOG_PID`` if that is given.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = ""
        if hasattr(socket, "AF_UNIX") and path[:1] in ("/", "@"):
            self._address = f"\0{path[1:]}" if path[0] == "@" else path
        watchdog = environ.get("WATCHDOG_USEC", "")
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: Seconds between signs of life: half of what the manager allows; None if it expects none.
        self.watchdog_s = (
            int(watchdog) / 2e6 if watchdog.isdecimal() and int(watchdog) and ours else None
        )
        #: Whether the service serves: it has started, and does not stop.
        self._serves = False

    @property
    def is_there(self) -> bool:
        """Whether a service manager has started this process."""
        return bool(self._address)

    def ready(self, status: str = "serving") -> None:
        """Report that the service has started, or has loaded its configuration again."""
        self._serves = True
        self._send(READY="1", STATUS=status)

    def reloading(self) -> None:
        """Report that the service loads its configuration again; :meth:`reloaded` ends that."""
        if not self._serves:
            return
        # The time shows the manager that this follows its own request (Type=notify-reload).
        self._send(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))

    def reloaded(self) -> None:
        """Report the end of :meth:`reloading`.

        Nothing is sent for a service that still starts, or is on standby: loading does not make it ready.
        """
        if self._serves:
            self.ready()

    def stopping(self) -> None:
        """Report that the service has begun to stop."""
        self._serves = False
        self._send(STOPPING="1", STATUS="stopping")

    async def show_standby(self, reason: Callable[[], str]) -> None:
        """Ask for more time while the start waits for another program, because of *reason*; it never returns."""
        sent, due = "", 0.0
        while self._address:
            why, now = reason(), trio.current_time()
            # The kernel holds few datagrams, ten on Linux, for a manager that is busy. A message each second would
            # fill its queue, and READY, which is sent once, would be lost.
            if why and (why != sent or now >= due):
                self._send(
                    STATUS=f"standby: {why}", EXTEND_TIMEOUT_USEC=str(STANDBY_MORE_S * 1_000_000)
                )
                sent, due = why, now + STANDBY_MORE_S / 3
            await trio.sleep(1)

    async def show_life(self) -> None:
        """Send signs of life, as long as the event loop runs; return at once if none are expected."""
        if self.watchdog_s is None or not self._address:
            return
        while True:
            self._send(WATCHDOG="1")
            await trio.sleep(self.watchdog_s)

    def _send(self, **fields: str) -> None:
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", text.partition("\n")[0], error)
