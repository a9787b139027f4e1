"""Probe of the workers of one application, which are processes of their own: healthy if all of them are.

Needs prometheus-client (``pip install amqp-rt[metrics]``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
import trio
from msgspec import Struct

from .metrics import join_pages
from .probe import NOT_FOUND, PATTERN_MAX, PATTERN_TOO_LONG, node_of, of_health, serve_probe
from .probe_http import ProbeRequest, ProbeResponse


class WorkerAnswer(Struct, frozen=True):
    """Answer of a worker to a request of a probe."""

    worker: str
    #: Why there is no answer, if the worker does not serve: it starts, or is started again after a pause.
    absent: str = ""
    #: None if there was no answer in time.
    status: int | None = None
    body: str = ""


#: Passes the path of a request, and its pattern of nodes, on to all workers, and returns their answers.
Asking: TypeAlias = Callable[[str, str | None], Awaitable[list[WorkerAnswer]]]


class WorkersProbe:
    """Answers to probes of all workers, as :class:`~amqp_rt.telemetry.probe.Probe` answers to those of a container.

    * ``/healthz``: 200 while the workers answer that they live. One that starts, or has failed and is started again, is the
      business of its supervisor, and does no harm here.
    * ``/readyz``: 200 while all workers take work, else 503 with the reasons.
    * ``/metrics``, ``/metrics/detailed``: the metrics of all workers, with the label ``worker``.
    """

    def __init__(self, ask: Asking) -> None:
        self._ask = ask
        #: One page at a time: merging takes a thread for a while.
        self._rendering = trio.CapacityLimiter(1)

    async def respond(self, request: ProbeRequest) -> ProbeResponse:
        """Return the response to *request*."""
        match request.path:
            case "/healthz":
                answers = await self._ask("/healthz", None)
                reasons = [
                    reason for each in answers if not each.absent for reason in _against(each)
                ]
                live = not reasons
                content = {"live": live, **({"reasons": reasons} if reasons else {})}
                return of_health(content, good=live)
            case "/readyz":
                answers = await self._ask("/readyz", None)
                reasons = [reason for each in answers for reason in _against(each)]
                return of_health({"ready": not reasons, "reasons": reasons}, good=not reasons)
            case "/metrics" | "/metrics/detailed":
                return await self._page(request)
        return NOT_FOUND

    async def _page(self, request: ProbeRequest) -> ProbeResponse:
        node = node_of(request)
        if node is not None and len(node) > PATTERN_MAX:
            return PATTERN_TOO_LONG
        answers = await self._ask(request.path, node)
        pages = [(each.worker, each.body) for each in answers if each.status == 200]
        async with self._rendering:
            call = partial(join_pages, pages, request.accept)
            return ProbeResponse(200, *await trio.to_thread.run_sync(call))

    async def serve(
        self, url: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer at *url* until cancelled, as :meth:`Probe.serve <amqp_rt.telemetry.probe.Probe.serve>`.

        Raises:
            AmqpError: *url* is no URL of a probe.
            ConnectFailed: *url* cannot be listened on.
        """
        await serve_probe(url, self.respond, task_status=task_status)


def _against(answer: WorkerAnswer) -> list[str]:
    """Return the reasons for which a worker is not healthy."""
    if answer.absent:
        return [f"{answer.worker}: {answer.absent}"]
    if answer.status is None:
        return [f"{answer.worker}: it does not answer"]
    if answer.status == 200:
        return []
    try:
        found = msgspec.json.decode(answer.body, type=dict[str, object]).get("reasons")
    except msgspec.DecodeError:
        found = None
    reasons = found if isinstance(found, list) and found else [f"it answers {answer.status}"]
    return [f"{answer.worker}: {each}" for each in reasons]
