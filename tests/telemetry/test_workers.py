"""One probe for several workers: all have to be healthy, and each has its metrics."""

from __future__ import annotations

import json

import pytest

from amqp_rt import Broker, Container
from amqp_rt.broker import Queue
from amqp_rt.telemetry.metrics import Metrics
from amqp_rt.telemetry.probe import PATTERN_MAX, Probe
from amqp_rt.telemetry.probe_http import ProbeRequest
from amqp_rt.telemetry.workers import WorkerAnswer, WorkersProbe

pytestmark = pytest.mark.req("O3")


async def asked(path: str, *answers: WorkerAnswer) -> tuple[int, dict[str, object]]:
    async def ask(path: str, node: str | None) -> list[WorkerAnswer]:
        return list(answers)

    response = await WorkersProbe(ask).respond(ProbeRequest(path, {}, ""))
    return response.status, json.loads(response.body)


GOOD = WorkerAnswer("w-1", status=200, body='{"ready":true}')
SILENT = WorkerAnswer("w-2")
STARTING = WorkerAnswer("w-3", absent="it is starting")
LOST = WorkerAnswer("w-4", status=503, body='{"ready":false,"reasons":["no peer","no store"]}')
ENDED = WorkerAnswer("w-5", status=503, body='{"live":false}')
BROKEN = WorkerAnswer("w-6", status=500)


@pytest.mark.parametrize(
    ("answers", "reasons"),
    [
        ([GOOD], []),
        ([GOOD, STARTING], []),
        ([GOOD, SILENT], ["w-2: it does not answer"]),
        ([ENDED, BROKEN], ["w-5: it answers 503", "w-6: it answers 500"]),
    ],
)
async def test_all_are_live_that_run(answers: list[WorkerAnswer], reasons: list[str]) -> None:
    status, content = await asked("/healthz", *answers)
    assert (status, content["live"]) == (503 if reasons else 200, not reasons)
    assert content.get("reasons", []) == reasons


@pytest.mark.parametrize(
    ("answers", "reasons"),
    [
        ([GOOD], []),
        ([GOOD, STARTING], ["w-3: it is starting"]),
        ([LOST, SILENT], ["w-4: no peer", "w-4: no store", "w-2: it does not answer"]),
    ],
)
async def test_they_are_ready_together(answers: list[WorkerAnswer], reasons: list[str]) -> None:
    status, content = await asked("/readyz", *answers)
    assert (status, content) == (
        503 if reasons else 200,
        {"ready": not reasons, "reasons": reasons},
    )


async def test_the_metrics_of_each_have_its_name() -> None:
    async with Broker("a") as one, Container("b") as other:
        await one.declare(Queue("orders"), Queue("other"))
        probes = {"w-1": Probe(one.container), "w-2": Probe(other)}

        async def ask(path: str, node: str | None) -> list[WorkerAnswer]:
            found = []
            for name, probe in probes.items():
                status, body = await probe.answer(path, node)
                found.append(WorkerAnswer(name, status=status, body=body))
            return [*found, SILENT]

        probe = WorkersProbe(ask)
        whole = await probe.respond(ProbeRequest("/metrics", {}, ""))
        text = whole.body.decode()
        # Each family is there once, with all workers, and as the workers alone would write it.
        alone = (await Metrics(other).render())[0].decode()
        for line in alone.splitlines():
            if line.startswith("#"):
                assert text.count(line + "\n") == 1
        for name in probes:
            assert f',worker="{name}"}} 1.0\n' in text
        assert "w-2: " not in text
        detailed = ProbeRequest(
            "/metrics/detailed", {"node": "ord*"}, "application/openmetrics-text"
        )
        answer = await probe.respond(detailed)
        assert answer.content_type.startswith("application/openmetrics-text")
        (line,) = [
            each
            for each in answer.body.splitlines()
            if b'node="orders"' in each and b"available" in each
        ]
        assert b'worker="w-1"' in line
        assert b'node="other"' not in answer.body
        assert answer.body.endswith(b"# EOF\n")


async def test_other_requests_are_refused_before_workers_are_asked() -> None:
    async def ask(path: str, node: str | None) -> list[WorkerAnswer]:
        raise AssertionError(path)

    probe = WorkersProbe(ask)
    assert (await probe.respond(ProbeRequest("/elsewhere", {}, ""))).status == 404
    long = {"node": "x" * (PATTERN_MAX + 1)}
    assert (await probe.respond(ProbeRequest("/metrics/detailed", long, ""))).status == 400
