"""Listener for probes: ``/healthz``, ``/readyz`` and ``/metrics`` over HTTP, without a login.

Needs hypercorn, starlette and prometheus-client (``pip install amqp-rt[http,metrics]``).
"""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import trio

from ..container.container import Container
from ..errors import AmqpError, ConnectFailed

#: Host and port of a URL that names none. There is no login: by default only this machine reaches the probe.
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 9_000
#: Seconds for the head of a request, and between two requests of a connection.
_PATIENCE_S: Final = 5
#: Bytes of the head of a request.
_HEAD_MAX: Final = 8_192


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


class Probe:
    """Answers to probes of *container*.

    * ``/healthz``: 200 while the container runs, else 503.
    * ``/readyz``: 200 while it takes work, else 503 with the reasons.
    * ``/metrics``: metrics for Prometheus; ``/metrics/detailed?node=orders-*`` has those of single nodes, too.

    Raises:
        AmqpError: A library is missing; the text says what to install.
    """

    def __init__(self, container: Container) -> None:
        try:
            from starlette.applications import Starlette
            from starlette.routing import Route

            from .metrics import Metrics
        except ImportError:
            raise _missing() from None
        self._container = container
        self._metrics = Metrics(container)
        #: One page at a time: a page of many nodes takes a thread for a while.
        self._rendering = trio.CapacityLimiter(1)
        #: The application, to be mounted in a server of your own that runs under trio.
        self.app: Any = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._sums),
                Route("/metrics/detailed", self._detailed),
            ]
        )

    async def _healthz(self, request: Any) -> Any:
        health = self._container.health()
        return _answer({"live": health.live}, good=health.live)

    async def _readyz(self, request: Any) -> Any:
        health = self._container.health()
        return _answer({"ready": health.ready, "reasons": health.reasons}, good=health.ready)

    async def _sums(self, request: Any) -> Any:
        return await self._page(request, None)

    async def _detailed(self, request: Any) -> Any:
        return await self._page(request, request.query_params.get("node", "*"))

    async def _page(self, request: Any, node: str | None) -> Any:
        from starlette.responses import Response

        async with self._rendering:
            page, content_type = await self._metrics.render(
                request.headers.get("accept", ""), node=node
            )
        return Response(page, headers={"content-type": content_type, "cache-control": "no-store"})

    async def serve(
        self, url: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer at *url* until cancelled; the value of *task_status* is the URL that was bound.

        Raises:
            AmqpError: *url* is no URL of a probe, or hypercorn is missing.
            ConnectFailed: *url* cannot be listened on.
        """
        host, port = parse_probe_url(url)
        try:
            from hypercorn.config import Config
            from hypercorn.trio import serve
        except ImportError:
            raise _missing() from None
        config = Config()
        # hypercorn would leave a socket open that cannot be bound.
        config.bind = [f"fd://{(await _bind(url, host, port)).detach()}"]
        config.errorlog = logging.getLogger("amqp_rt.probe")
        config.errorlog.setLevel(logging.WARNING)
        config.include_server_header = False
        config.graceful_timeout = 1
        config.keep_alive_timeout = config.read_timeout = _PATIENCE_S
        config.h11_max_incomplete_size = _HEAD_MAX
        async with trio.open_nursery() as nursery:
            bound: list[str] = await nursery.start(partial(serve, self.app, config, mode="asgi"))
            task_status.started(bound[0])


async def _bind(url: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return await trio.to_thread.run_sync(
            partial(socket.create_server, (host, port), family=family)
        )
    except OSError as error:
        raise ConnectFailed(f"cannot listen on {url}: {error.strerror or error}") from None


def _missing() -> AmqpError:
    return AmqpError(
        "a probe needs hypercorn, starlette and prometheus-client: pip install 'amqp-rt[http,metrics]'",
        condition="amqp:not-implemented",
    )


def _answer(content: dict[str, object], *, good: bool) -> Any:
    from starlette.responses import Response

    return Response(
        msgspec.json.encode(content) + b"\n",
        200 if good else 503,
        headers={"content-type": "application/json", "cache-control": "no-store"},
    )
