"""Edges of a broker as tasks of this process, for tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import trio
from certificates import certificates

from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.net.edge_relay import EdgeWork
from amqp_rt.net.edges import EdgeProcess, Edges, EdgeSettings, control_pair
from amqp_rt.net.tls import ServerTls

KNOWN = certificates()


@asynccontextmanager
async def an_edge(
    edges: Edges,
    limits: Limits = DEFAULT_LIMITS,
    life: trio.CancelScope | None = None,
    *,
    tls: ServerTls | None = None,
    **more: Any,
) -> AsyncIterator[EdgeProcess]:
    """An edge in this process, until the end of the block, or that of *life*."""
    ours, theirs = control_pair()
    edge = EdgeProcess(ours, os.getpid())
    settings = EdgeSettings(limits=limits, **{"certificate": str(KNOWN.server), **more})

    async def live() -> None:
        with theirs, life or trio.CancelScope():
            work = EdgeWork(theirs, settings)
            # For options that the command does not have.
            work._tls = tls or work._tls
            await work.run()

    with closing(edge):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            await edge.wait_ready()
            nursery.start_soon(edge.run)
            edges.living.append(edge)
            try:
                yield edge
            finally:
                if edge in edges.living:
                    edges.living.remove(edge)
                nursery.cancel_scope.cancel()
