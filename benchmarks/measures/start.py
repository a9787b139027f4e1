"""Start of a broker for one test, until the first message has passed through it.

Our broker runs in the process of the test, on its own thread; the others are started as processes.
The client is the same for all of them, in a process that is running already.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import trio

from amqp_rt import Container
from amqp_rt.testing import LoopbackBroker

from ..contestants import Contestant, Running
from ..rounds import Case, Sample
from . import Plan

#: Starts of our broker in one sample; a single start of another broker takes long enough.
_STARTS = 20
_PATIENCE_S = 60.0


def cases(plan: Plan) -> list[Case]:
    runs: dict[str, Callable[[], Sample]] = {}
    for one in plan.field.brokers():
        assert one.broker
        # Start it once before, so that nothing is built or first read from disk during the sample.
        runs[one.key] = partial(warm_sample, plan, one)
    # The fixture runs in this interpreter, so it has no sample in the other mode.
    if "pure" in plan.field.present:
        runs["pure"] = partial(sample, loopback, _STARTS)
    return [Case("start", "a broker, and one message through it", runs)]


@contextlib.contextmanager
def loopback() -> Iterator[Running]:
    """Run the broker of the fixture ``amqp_broker``."""
    with LoopbackBroker(auto_create=["queue:*"]) as broker:
        yield Running(broker.port, ())


def warm_sample(plan: Plan, one: Contestant) -> Sample:
    plan.broker(one)
    assert one.broker
    return sample(one.broker, 1)


def sample(start: Callable[[], contextlib.AbstractContextManager[Running]], count: int) -> Sample:
    up = []
    through = []
    down = []
    for _ in range(count):
        began = time.perf_counter()
        with start() as running:
            up.append(time.perf_counter() - began)
            trio.run(_round_trip, running)
            through.append(time.perf_counter() - began)
            ending = time.perf_counter()
        down.append(time.perf_counter() - ending)
    return {
        "start_ms": statistics.median(up) * 1e3,
        "first_message_ms": statistics.median(through) * 1e3,
        "stop_ms": statistics.median(down) * 1e3,
    }


async def _round_trip(running: Running) -> None:
    address = running.address("start")
    with trio.fail_after(_PATIENCE_S):
        async with (
            Container("start") as us,
            us.connect(f"amqp://127.0.0.1:{running.port}") as peer,
            peer.sender(address) as sender,
            peer.receiver(address, credit=1) as receiver,
        ):
            await sender.send(b"there and back")
            async with await receiver.receive():
                pass
