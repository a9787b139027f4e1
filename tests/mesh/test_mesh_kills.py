"""A node on the way of messages is killed at each frame that it carries, so that its peers see it, or do not."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from amqp_rt import Container
from amqp_rt.errors import AmqpError
from amqp_rt.limits import KIB, Limits
from amqp_rt.mesh import Mesh
from amqp_rt.outcomes import Accepted, Modified, Released
from amqp_rt.testing.simulation import Scenario, SimulatedHost, Simulation, simulate

pytestmark = [pytest.mark.slow, pytest.mark.req("P3")]

#: Frames of 1 KiB, so that the second and the last message take several.
LIMITS = Limits(frame_size_max=KIB, idle_timeout_s=3)
SIZES = (10, 5_000, 10, 10, 3_000)
#: Every so manieth frame in CI.
STEP = 6


class Exchange:
    """Record of one run: outcomes by the number of the message, messages handled, frames before and after."""

    def __init__(self, kill_at: int = 0, *, silent: bool = False) -> None:
        self.kill_at = kill_at
        self.silent = silent
        self.outcomes: dict[int, Any] = {}
        self.handled: list[int] = []
        self.begin = self.end = 0


def ring(run: Exchange) -> Scenario:
    """Return a scenario: a client at A sends to C, which A reaches over B, and over D."""
    outcomes, handled = run.outcomes, run.handled

    async def scenario(net: Simulation) -> None:
        count = net.network.count

        def counted() -> bool:
            if net.network.frames + 1 == run.kill_at:
                net.kill("B", silent=run.silent)
            return count()

        net.network.count = counted  # type: ignore[method-assign]

        def member(*seeds: str) -> Any:
            async def main(host: SimulatedHost) -> None:
                async with Container(host.name, network=host.network, limits=LIMITS) as box:
                    if host.name == "C":

                        @box.node("orders", slots=2)
                        async def orders(body: bytes) -> None:
                            await trio.sleep(0.002)
                            handled.append(body[0])

                    await box.listen(f"memory://{host.name}")
                    urls = [f"memory://{each}" for each in seeds]
                    async with Mesh(box, urls, role="interior", urls=(), clock=host.clock):
                        await box.serve()

            return main

        for name, *seeds in (("A",), ("B", "A"), ("D", "A"), ("C", "B", "D")):
            net.start(name, member(*seeds))
        await trio.sleep(1)
        with trio.fail_after(60):
            async with (
                net.connect("client", "memory://A", reconnect=None) as peer,
                peer.sender("orders", settled=False) as out,
            ):
                run.begin = net.network.frames
                receipts = [
                    out.send_nowait(bytes([number] * size)) for number, size in enumerate(SIZES)
                ]
                for number, receipt in enumerate(receipts):
                    try:
                        outcomes[number] = await receipt.outcome()
                    except AmqpError as error:
                        outcomes[number] = error
                run.end = net.network.frames
                # Another way is found in time, whatever happened to the first.
                await trio.sleep(2)
                outcomes[99] = await out.send(b"\x63")

    return scenario


def test_every_outcome_is_true_at_whichever_frame_a_node_dies(long_run: bool) -> None:
    whole = Exchange()
    simulate(ring(whole), seed=5)
    assert whole.end - whole.begin > 40
    hurt = 0
    for at in range(whole.begin + 1, whole.end, 1 if long_run else STEP):
        for silent in (False, True):
            run = Exchange(at, silent=silent)
            simulate(ring(run), seed=5, within=200)
            assert len(run.handled) == len(set(run.handled)), at
            assert 99 in run.handled, at
            for number in range(len(SIZES)):
                outcome = run.outcomes[number]
                # The client's link stands: each message has an outcome.
                assert isinstance(outcome, Accepted | Released | Modified), (at, silent, outcome)
                if type(outcome) is Accepted:
                    assert number in run.handled, (at, silent)
                elif type(outcome) is Released:
                    assert number not in run.handled, (at, silent)
                hurt += type(outcome) is not Accepted
    assert hurt
