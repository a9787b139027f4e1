"""A TCP proxy whose lines can be cut, or swallow what they get without a word, as broken networks do."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self


class Wire:
    """Proxy on a free port of this machine, in a thread.

    Args:
        port: Port of this machine to which connections lead.
        bytes_per_s: How much passes in a second; None for no limit. The buffers are small then.
    """

    def __init__(self, port: int, bytes_per_s: int | None = None) -> None:
        self._target = port
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        if bytes_per_s is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.port: int = self._listener.getsockname()[1]
        #: Whether data of clients, and answers to them, are swallowed.
        self.swallows_data = False
        self.swallows_answers = False
        #: Octets that were swallowed.
        self.swallowed = 0
        #: client → server
        self._lines: dict[socket.socket, socket.socket] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._thread.join(10)
        self._listener.close()
        for client in list(self._lines):
            self._cut(client)

    def swallow(self) -> None:
        """Swallow everything in both directions from now on, on new connections too."""
        self.swallows_data = self.swallows_answers = True

    def mend(self) -> None:
        """Cut the lines there are, some of which have lost data, and let new ones work."""
        for client in list(self._lines):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self.swallows_data = self.swallows_answers = False

    def _cut(self, client: socket.socket) -> None:
        for each in (client, self._lines.pop(client)):
            # At once, so that the server hears of it as well.
            with suppress(OSError):
                each.close()

    def _run(self) -> None:
        while not self._stopped:
            servers = {server: client for client, server in self._lines.items()}
            readable, _, _ = select.select([self._listener, *self._lines, *servers], [], [], 0.05)
            for each in readable:
                if each is self._listener:
                    client, _ = self._listener.accept()
                    with suppress(OSError):
                        self._lines[client] = socket.create_connection(("127.0.0.1", self._target))
                        continue
                    client.close()
                elif each in self._lines:
                    self._pass(each, each, self._lines[each], swallows=self.swallows_data)
                elif servers[each] in self._lines:
                    self._pass(servers[each], each, servers[each], swallows=self.swallows_answers)

    def _pass(
        self, client: socket.socket, source: socket.socket, target: socket.socket, *, swallows: bool
    ) -> None:
        try:
            data = source.recv(1 << 16)
            if data and swallows:
                self.swallowed += len(data)
            elif data:
                target.sendall(data)
                if self._bytes_per_s is not None:
                    time.sleep(len(data) / self._bytes_per_s)
        except OSError:
            data = b""
        if not data:
            self._cut(client)
