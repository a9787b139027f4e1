"""Our broker does what it says, and a peer that does not is found out."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from amqp_rt import Broker, Container
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.broker.termini import KeptSource, Terminus
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.testing.honesty import assert_honest

Clock = trio.testing.MockClock


class TrioClock:
    """Both clocks are that of the tests."""

    def wall(self) -> float:
        return trio.current_time() + 1e9

    def monotonic(self) -> float:
        return trio.current_time()


async def judge() -> None:
    async with Broker(network=MemoryNetwork(), clock=TrioClock()) as broker:
        await broker.declare(Queue("q"), Topic("t"))
        await broker.listen("memory://broker")
        async with (
            Container("judge", network=broker.container.network) as us,
            us.connect("memory://broker", reconnect=None) as peer,
        ):
            await assert_honest(peer, queue="q", topic="t")
        assert broker.host.stats("q").available == 0


@pytest.mark.req("B4", "B8", "M31", "M32", "M38", "M39", "M28")
async def test_our_broker_is_honest(autojump_clock: Clock) -> None:
    await judge()


def forgets(self: Any, link: Any, closed: bool) -> bool:
    return False


def dawdles(self: Any) -> None:
    """Never expires."""


@pytest.mark.req("B4")
@pytest.mark.parametrize(
    ("kind", "name", "lie", "found"),
    [
        (KeptSource, "keeps", forgets, "it expires too early"),
        (Terminus, "count_down", dawdles, "does not expire"),
    ],
)
async def test_a_lie_is_found_out(
    kind: type,
    name: str,
    lie: Any,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: Clock,
) -> None:
    monkeypatch.setattr(kind, name, lie, raising=True)
    with pytest.raises(AssertionError, match=found):
        await judge()
