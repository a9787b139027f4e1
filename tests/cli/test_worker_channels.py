"""The socket pair between supervisor and worker: reports, questions, and processes that do not answer."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from amqp_rt.cli.worker_channels import (
    ANSWER_S,
    QUESTIONS_MAX,
    Answer,
    ProcessChannel,
    Report,
    WorkerChannel,
)

pytestmark = [
    pytest.mark.req("O3"),
    pytest.mark.skipif(os.name == "nt", reason="there are no descriptors to pass on"),
]


class Answering:
    """Probe of a worker whose answers a test holds back."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.asked = 0

    async def answer(self, path: str, node: str | None) -> tuple[int, str]:
        self.asked += 1
        if path == "/fails":
            raise LookupError(path)
        if path == "/slow":
            await self.gate.wait()
        return 200, f"{path} {node}\n" + "x" * (300_000 if path == "/large" else 0)


class Joined:
    """A supervisor's and a worker's end, which run."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.ours = ours
        self.reports: list[Report] = []
        self.process = ProcessChannel(ours, self.reports.append)
        self.worker = WorkerChannel(f"3:{theirs.detach()}")
        self.probe = Answering()
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@asynccontextmanager
async def joined() -> AsyncIterator[Joined]:
    both = Joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(both.process.run)
        probe: Any = both.probe
        nursery.start_soon(both.worker.run, both.stop, probe)
        yield both
        nursery.cancel_scope.cancel()
    both.ours.close()
    both.worker._socket.close()


async def test_reports_and_questions_share_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with joined() as both:
        assert both.worker.number == 3
        answers: dict[str, Answer | None] = {}

        async def ask(path: str, node: str | None = None) -> None:
            answers[path] = await both.process.ask(path, node)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "/large", 'a "b"\n')
            nursery.start_soon(ask, "/metrics")
            nursery.start_soon(ask, "/fails")
            await both.worker.report("shop-3", ["amqp://x"])
        assert both.reports == [Report("shop-3", ["amqp://x"], os.getpid())]
        large, small, failed = answers["/large"], answers["/metrics"], answers["/fails"]
        assert large is not None
        assert large.body == '/large a "b"\n\n' + "x" * 300_000
        assert small is not None
        assert (small.status, small.body) == (200, "/metrics None\n")
        assert failed is not None
        assert failed.status == 500
        assert "a request of a probe failed" in caplog.text


async def test_an_answer_that_comes_late_is_not_that_of_another_question(
    autojump_clock: MockClock,
) -> None:
    async with joined() as both:
        autojump_clock.autojump_threshold = 0.01
        start = trio.current_time()
        assert await both.process.ask("/slow") is None
        assert trio.current_time() - start == pytest.approx(ANSWER_S)
        both.probe.gate.set()
        answer = await both.process.ask("/metrics")
        assert answer is not None
        assert answer.body == "/metrics None\n"


async def test_a_worker_that_does_not_answer_is_not_asked_without_end(
    autojump_clock: MockClock,
) -> None:
    async with joined() as both:
        autojump_clock.autojump_threshold = 0.01
        for _ in range(QUESTIONS_MAX + 3):
            assert await both.process.ask("/slow") is None
        assert both.probe.asked == QUESTIONS_MAX
        both.probe.gate.set()
        await trio.sleep(1)
        assert await both.process.ask("/metrics") is not None


async def test_the_end_of_either_process_is_noticed() -> None:
    async with joined() as both:
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            answers: list[Answer | None] = []

            async def ask() -> None:
                answers.append(await both.process.ask("/slow"))

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            both.worker._socket.shutdown(socket.SHUT_RDWR)
        assert answers == [None]
        with trio.fail_after(5):
            while not both.stopped:  # noqa: ASYNC110 (it is called by a task that nothing waits for)
                await trio.sleep(0.01)
        # What is written now is lost, and raises nothing.
        await both.worker.report("shop-3", [])
