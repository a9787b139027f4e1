"""Metrics for Prometheus at ``/metrics``, for users who may manage ``$management``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from amqp_rt import Broker

from .problems import Problem
from .sessions import WebSession

if TYPE_CHECKING:
    from amqp_rt.telemetry.metrics import Metrics


class MetricsPage:
    """Answers to requests for metrics of *broker*: its totals, or those of single nodes with ``?node=PATTERN``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._metrics: Metrics | None = None
        #: One page at a time: a page of many nodes takes a thread for a while.
        self._rendering = trio.CapacityLimiter(1)

    def routes(self) -> list[BaseRoute]:
        """Return the route of the page."""
        return [Route("/metrics", self._answer, methods=["GET"])]

    async def _answer(self, request: Request) -> Response:
        session: WebSession = request.state.session
        if session.virtual_host:
            raise Problem(
                403,
                "metrics are those of all virtual hosts: log in at the default one",
                "amqp:not-allowed",
            )
        # Who may not list these may not know their numbers.
        await session.management.page("amqp_rt.container", count=1)
        node = request.query_params.get("node")
        if node is not None and len(node) > 256:
            raise Problem(400, "node= has more than 256 characters")
        async with self._rendering:
            body, kind = await self._made().render(request.headers.get("accept", ""), node=node)
        return Response(body, headers={"content-type": kind})

    def _made(self) -> Metrics:
        if self._metrics is None:
            try:
                from amqp_rt.telemetry.metrics import Metrics
            except ImportError:
                raise Problem(
                    501,
                    "metrics need prometheus-client: pip install 'amqp-rt[metrics]'",
                    "amqp:not-implemented",
                ) from None
            self._metrics = Metrics(self._broker.container)
        return self._metrics
