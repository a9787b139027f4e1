"""A broker process is stopped by SIGTERM and started again: every client comes back, nothing is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from commands import Served
from peer_programs import PeerPrograms

from amqp_rt import Container, Reconnect, node

Restart = Callable[[], Any]


@asynccontextmanager
async def restarted(tmp_path: Path) -> AsyncIterator[tuple[int, Restart]]:
    """A broker with a queue ``q`` and a store; its port, and what stops it and starts it again."""
    # Proton for Python notices the end of a connection that was closed with amqp:connection:forced only
    # when it writes: at its next message, or at its next heartbeat, half of the idle timeout later.
    options = (
        *("--store", f"sqlite:{tmp_path / 'store.db'}", "--node", "queue:q"),
        *("--limit", "idle_timeout_s=1"),
    )
    running = await trio.to_thread.run_sync(lambda: Served(*options))
    url = running.url

    async def restart() -> None:
        nonlocal running
        code, errors = await trio.to_thread.run_sync(running.stop)
        assert code == 0, errors
        running = await trio.to_thread.run_sync(lambda: Served(*options, listen=url))

    try:
        yield int(url.rpartition(":")[2].rstrip("/")), restart
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(running.stop)


@pytest.mark.slow
@pytest.mark.req("X25", "A10")
async def test_a_peer_survives_a_planned_restart(peer: PeerPrograms, tmp_path: Path) -> None:
    async with (
        restarted(tmp_path) as (port, restart),
        peer.start("survive", port=port, address="q", count=20, timeout_s=35) as program,
    ):
        await program.said("halfway")
        await restart()
        result = await program.result()
    assert sorted(result["received"]) == list(range(20))
    assert result["connections"] == 2


@pytest.mark.slow
@pytest.mark.req("X25", "A10")
async def test_our_client_survives_a_planned_restart(tmp_path: Path) -> None:
    worked: set[int] = set()

    @node("q")
    async def work(number: int) -> None:
        worked.add(number)

    soon = Reconnect(first_delay_s=0.05, delay_max_s=0.5)
    with trio.fail_after(60):
        async with restarted(tmp_path) as (port, restart):
            url = f"amqp://127.0.0.1:{port}"
            async with (
                Container("worker", nodes=[work]) as worker,
                worker.connect(url, reconnect=soon) as served,
                worker.connect(url, reconnect=soon) as peer,
                trio.open_nursery() as nursery,
            ):
                await served.serve()
                nursery.start_soon(worker.serve)
                out = peer.sender("q", in_doubt="resend")
                for number in range(20):
                    if number == 10:
                        await restart()
                    await out.send(number, durable=True)
                while len(worked) < 20:  # noqa: ASYNC110  # what comes is counted elsewhere
                    await trio.sleep(0.01)
                async with peer.receiver("q", credit=0) as rest:
                    assert await rest.get() is None
                worker.stop()
    assert worked == set(range(20))
