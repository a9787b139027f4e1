"""Listener for probes: ``/healthz``, ``/readyz`` and ``/metrics`` over HTTP, without a login.

Needs prometheus-client (``pip install amqp-rt[metrics]``).
"""

from __future__ import annotations

import socket
from functools import partial
from importlib import import_module
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio

from ..container.container import Container
from ..errors import AmqpError, ConnectFailed
from .probe_http import HttpResponder, ProbeRequest, ProbeResponse, Responding

#: Host and port of a URL that names none. There is no login: by default only this machine reaches the probe.
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 9_000
#: Characters of a pattern of nodes: it is compiled for each request, and kept by nothing.
PATTERN_MAX: Final = 256

NOT_FOUND: Final = ProbeResponse(
    404, b"there are /healthz, /readyz, /metrics and /metrics/detailed\n"
)
PATTERN_TOO_LONG: Final = ProbeResponse(400, b"node= has more than %d characters\n" % PATTERN_MAX)


def parse_probe_url(text: str) -> tuple[str, int]:
    """Return host and port of ``http://HOST:PORT``; without a host it is this machine only.

    Raises:
        AmqpError: It is no such URL.
    """
    try:
        url = urlsplit(text)
        port = DEFAULT_PORT if url.port is None else url.port
    except ValueError:
        url, port = urlsplit(""), 0
    if url.scheme != "http" or url.path.strip("/") or url.query or url.username is not None:
        raise AmqpError(
            f"{text!r:.200} is no URL of a probe: it is http://HOST:PORT, such as http://127.0.0.1:9000",
            condition="amqp:invalid-field",
        )
    return url.hostname or DEFAULT_HOST, port


def require_library() -> None:
    """Raise ``AmqpError`` if the library that writes metrics is not installed; the text says what to install."""
    try:
        import_module(".metrics", __package__)
    except ImportError:
        raise AmqpError(
            "a probe needs prometheus-client: pip install 'amqp-rt[metrics]'",
            condition="amqp:not-implemented",
        ) from None


def node_of(request: ProbeRequest) -> str | None:
    """Return the pattern of nodes whose own metrics *request* wants; None if it wants the sums."""
    return request.query.get("node", "*") if request.path == "/metrics/detailed" else None


class Probe:
    """Answers to probes of *container*.

    * ``/healthz``: 200 until the container has ended, even before it has started: a restart would not help it. Then 503.
    * ``/readyz``: 200 while it takes work, else 503 with the reasons.
    * ``/metrics``: metrics for Prometheus; ``/metrics/detailed?node=orders-*`` has those of single nodes, too.

    Raises:
        AmqpError: A library is missing; the text says what to install.
    """

    def __init__(self, container: Container) -> None:
        require_library()
        from .metrics import Metrics

        self._container = container
        self._metrics = Metrics(container)
        #: One page at a time: a page of many nodes takes a thread for a while.
        self._rendering = trio.CapacityLimiter(1)
        self._was_live = container.health().live

    async def _respond(self, request: ProbeRequest) -> ProbeResponse:
        health = self._container.health()
        self._was_live |= health.live
        match request.path:
            case "/healthz":
                live = health.live or not self._was_live
                return of_health({"live": live}, good=live)
            case "/readyz":
                content = {"ready": health.ready, "reasons": health.reasons}
                return of_health(content, good=health.ready)
            case "/metrics" | "/metrics/detailed":
                return await self._page(request)
        return NOT_FOUND

    async def answer(self, path: str, node: str | None) -> tuple[int, str]:
        """Return status and text of the response to a request that another process has received."""
        query = {} if node is None else {"node": node}
        response = await self._respond(ProbeRequest(path, query, ""))
        return response.status, response.body.decode()

    async def _page(self, request: ProbeRequest) -> ProbeResponse:
        node = node_of(request)
        if node is not None and len(node) > PATTERN_MAX:
            return PATTERN_TOO_LONG
        async with self._rendering:
            return ProbeResponse(200, *await self._metrics.render(request.accept, node=node))

    async def serve(
        self, url: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer at *url* until cancelled; the value of *task_status* is the URL that was bound.

        Each connection is for one request, at most 32 of them at a time.

        Raises:
            AmqpError: *url* is no URL of a probe.
            ConnectFailed: *url* cannot be listened on.
        """
        await serve_probe(url, self._respond, task_status=task_status)


async def serve_probe(
    url: str, respond: Responding, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests at *url* by *respond*, as :meth:`Probe.serve` does.

    Raises:
        AmqpError: *url* is no URL of a probe.
        ConnectFailed: *url* cannot be listened on.
    """
    bound = await _bind(url, *parse_probe_url(url))
    host, port = bound.getsockname()[:2]
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
    task_status.started(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    await trio.serve_listeners(HttpResponder(respond).handle, [listener])


async def _bind(url: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return await trio.to_thread.run_sync(
            partial(socket.create_server, (host, port), family=family)
        )
    except OSError as error:
        raise ConnectFailed(f"cannot listen on {url}: {error.strerror or error}") from None


def of_health(content: dict[str, object], *, good: bool) -> ProbeResponse:
    """Return the response of 200 or 503 with *content* as JSON."""
    body = msgspec.json.encode(content) + b"\n"
    return ProbeResponse(200 if good else 503, body, "application/json")
