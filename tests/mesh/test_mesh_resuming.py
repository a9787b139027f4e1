"""Links of clients with a broker's queue over a mesh, resumed after a node or a connection of the path is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from amqp_rt import Broker, Connection, Container, Reconnect
from amqp_rt.broker import Queue
from amqp_rt.limits import KIB, Limits
from amqp_rt.mesh import Mesh, MeshRule
from amqp_rt.outcomes import Accepted
from amqp_rt.testing.simulation import Scenario, SimulatedHost, Simulation, simulate

pytestmark = [pytest.mark.slow, pytest.mark.req("P3", "P5")]

#: Frames of 1 KiB, so that some messages take several.
LIMITS = Limits(frame_size_max=KIB, idle_timeout_s=3)
SIZES = (10, 3_000, 10, 10, 2_000, 10)
BODIES = [bytes([number] * size) for number, size in enumerate(SIZES)]
RULES = [MeshRule("orders", route="link")]
SOON = Reconnect(first_delay_s=0.05, delay_max_s=0.5)
#: Every so manieth frame in CI.
STEP = 24


#: What the client does.
Talk = Callable[["Run", Connection, Connection], Awaitable[None]]


class Run:
    """Kill of one node at one frame, with the observations of the client and the final state of the broker."""

    def __init__(self, victim: str = "", kill_at: int = 0, *, silent: bool = False) -> None:
        self.victim = victim
        self.kill_at = kill_at
        self.silent = silent
        #: Frames that the network has carried; and before the first one of a message, and in the end.
        self.frames: Callable[[], int] = lambda: 0
        self.begin = self.end = 0
        self.outcomes: list[Any] = []
        self.received: list[bytes] = []
        self.left: list[bytes] = []
        self.unsettled = 0


def world(run: Run, talk: Talk) -> Scenario:
    """Return a scenario: a client at A, or else at D, with a broker at C, which both reach over B, and D directly."""

    async def scenario(net: Simulation) -> None:
        count = net.network.count

        def counted() -> bool:
            if net.network.frames + 1 == run.kill_at:
                net.kill(run.victim, silent=run.silent)
            return count()

        net.network.count = counted  # type: ignore[method-assign]
        brokers: list[Broker] = []

        def member(*seeds: str) -> Any:
            async def main(host: SimulatedHost) -> None:
                box = Container(host.name, network=host.network, limits=LIMITS)
                urls = [f"memory://{each}" for each in seeds]
                mesh = Mesh(box, urls, role="interior", urls=(), rules=RULES, clock=host.clock)
                if host.name != "C":
                    async with box:
                        await box.listen(f"memory://{host.name}")
                        async with mesh:
                            await box.serve()
                async with Broker(container=box, volatile=True) as broker:
                    await broker.declare(Queue("orders"))
                    brokers.append(broker)
                    await box.listen(f"memory://{host.name}")
                    async with mesh:
                        await box.serve()

            return main

        for name, *seeds in (("A",), ("B", "A"), ("D", "A"), ("C", "B", "D")):
            net.start(name, member(*seeds))
        await trio.sleep(1)
        (broker,) = brokers
        with trio.fail_after(60):
            async with (
                net.connect(
                    "client", ["memory://A", "memory://D"], reconnect=SOON, limits=LIMITS
                ) as peer,
                broker.local() as near,
            ):
                run.frames = lambda: net.network.frames
                await talk(run, peer, near)
                run.end = run.frames()
        stats = broker.stats("orders")
        run.unsettled = stats.acquired
        with trio.fail_after(60):
            async with broker.local() as near, near.receiver("orders") as rest:
                for _ in range(stats.available):
                    delivery = await rest.receive()
                    run.left.append(delivery.body)
                    delivery.accept()

    return scenario


async def send_all(run: Run, peer: Connection, near: Connection) -> None:
    """Send all messages from the client; all are accepted, once."""
    async with peer.sender("orders", timeout=30, rcv_settle_mode=1) as out:
        assert out.target.timeout == 30
        run.begin = run.frames()
        receipts = [out.send_nowait(body) for body in BODIES]
        run.outcomes = [await receipt.outcome() for receipt in receipts]


async def receive_all(run: Run, peer: Connection, near: Connection) -> None:
    """Receive all messages at the client, which holds two of them at a time."""
    async with near.sender("orders") as out:
        for body in BODIES:
            await out.send(body)
    async with peer.receiver("orders", timeout=30, rcv_settle_mode=1, credit=3) as orders:
        run.begin = run.frames()
        held: list[Any] = []
        for _ in BODIES:
            delivery = await orders.receive()
            run.received.append(delivery.body)
            held.append(delivery)
            if len(held) == 2:
                for each in held:
                    each.accept()
                    await each.settled()
                held.clear()


@pytest.mark.parametrize("talk", [send_all, receive_all])
@pytest.mark.parametrize("victim", ["A", "B"], ids=["ingress", "middle"])
def test_nothing_is_lost_or_doubled_at_whichever_frame_a_node_dies(
    talk: Talk, victim: str, long_run: bool
) -> None:
    whole = Run()
    simulate(world(whole, talk), seed=5)
    check(whole, talk)
    assert whole.end - whole.begin > 30
    for at in range(whole.begin + 1, whole.end, 1 if long_run else STEP):
        for silent in (False, True):
            run = Run(victim, at, silent=silent)
            try:
                simulate(world(run, talk), seed=5, within=200)
                check(run, talk)
            except BaseException as error:
                error.add_note(f"{victim} was killed at frame {at}, {silent=}")
                raise


def check(run: Run, talk: Talk) -> None:
    """Check that each message was processed once, and that nothing is left of it."""
    if talk is send_all:
        assert [type(each) for each in run.outcomes] == [Accepted] * len(BODIES)
        assert Counter(run.left) == Counter(BODIES)
    else:
        assert Counter(run.received) == Counter(BODIES)
        assert run.left == []
    assert run.unsettled == 0
