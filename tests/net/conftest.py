"""Fixtures for tests of the network; tests with ``carried`` run over every kind of stream."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing
from carriers import REAL, VIRTUAL, Carried

from amqp_rt.net.reactor import open_reactor


@pytest.fixture(params=[*VIRTUAL, *REAL])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of stream in turn."""
    return str(request.param)


@pytest.fixture
def clock(kind: str) -> trio.testing.MockClock | None:
    """Virtual time for streams in memory. Tests must request this fixture to run under it."""
    return trio.testing.MockClock(autojump_threshold=0) if kind in VIRTUAL else None


@pytest.fixture
async def carried(
    kind: str,
    clock: trio.testing.MockClock | None,
    nursery: trio.Nursery,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Carried]:
    if kind in REAL:
        request.getfixturevalue("short_linger")
    async with AsyncExitStack() as owned:
        if kind.endswith("reactor"):
            if sys.platform != "linux":
                pytest.skip("no reactor on this system")
            async with open_reactor() as reactor:
                yield Carried(kind, reactor, owned, nursery)
        else:
            yield Carried(kind, None, owned, nursery)
