"""Machines in network namespaces: partitions that nobody is told of, seen through real sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from namespaces import Machine, delays_missing, missing, switched

pytestmark = [pytest.mark.slow, pytest.mark.namespaces]

#: A container whose node answers, until it is killed.
SERVER = """
import sys, trio
from amqp_rt import Container
async def main():
    async with Container("far") as box:
        @box.rpc("name")
        async def name(question: str) -> str:
            return f"{question} far"
        print(*await box.listen(f"amqp://{sys.argv[1]}:5672"), flush=True)
        await trio.sleep_forever()
trio.run(main)
"""

#: A client that calls again and again, and prints what came of each call.
CLIENT = """
import sys, trio
from amqp_rt import Container, Limits, Reconnect
from amqp_rt.errors import AmqpError
async def main():
    async with Container("near", limits=Limits(idle_timeout_s=1)) as box:
        again = Reconnect(first_delay_s=0.1, delay_max_s=0.3)
        async with box.connect(f"amqp://{sys.argv[1]}:5672", reconnect=again) as peer:
            number = 0
            while True:
                number += 1
                try:
                    print(await peer.call("name", str(number), reply=str, within=0.5), flush=True)
                except (AmqpError, TimeoutError) as error:
                    print("failed", type(error).__name__, flush=True)
                await trio.sleep(0.05)
trio.run(main)
"""


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    if why := missing():
        pytest.skip(why)
    with switched(["near", "far"]) as machines:
        yield machines["near"], machines["far"]


def served(far: Machine) -> subprocess.Popen[str]:
    """Start a server on machine *far*."""
    server = far.start([sys.executable, "-c", SERVER, far.address])
    assert server.stdout is not None
    assert server.stdout.readline().startswith("amqp://")
    return server


def calling(near: Machine, far: Machine) -> Iterator[str]:
    """Start a client on machine *near*; yield what comes of its calls."""
    client = near.start([sys.executable, "-c", CLIENT, far.address])
    assert client.stdout is not None
    for line in client.stdout:
        yield line.strip()
    pytest.fail("the client has ended")


def wait_for(calls: Iterator[str], *, failed: bool) -> None:
    """Read the results of calls up to the third in a row that *failed*, or did not."""
    row = 0
    for count, line in enumerate(calls):
        row = row + 1 if line.startswith("failed") is failed else 0
        if row == 3:
            return
        assert count < 200, line


@pytest.mark.req("A22")
def test_calls_go_on_after_a_partition_of_which_nobody_was_told(
    pair: tuple[Machine, Machine],
) -> None:
    near, far = pair
    served(far)
    calls = calling(near, far)
    wait_for(calls, failed=False)
    far.unplug()
    wait_for(calls, failed=True)
    far.plug()
    wait_for(calls, failed=False)


@pytest.mark.req("A22")
@pytest.mark.parametrize("muted", ["near", "far"])
def test_a_line_that_carries_one_way_only_is_given_up_and_opened_again(
    pair: tuple[Machine, Machine], muted: str
) -> None:
    near, far = pair
    served(far)
    calls = calling(near, far)
    wait_for(calls, failed=False)
    sender, receiver = (near, far) if muted == "near" else (far, near)
    sender.mute(receiver)
    wait_for(calls, failed=True)
    sender.unmute(receiver)
    wait_for(calls, failed=False)


@pytest.mark.req("A22")
def test_calls_go_on_when_a_killed_server_is_back(pair: tuple[Machine, Machine]) -> None:
    near, far = pair
    served(far)
    calls = calling(near, far)
    wait_for(calls, failed=False)
    far.kill()
    wait_for(calls, failed=True)
    served(far)
    wait_for(calls, failed=False)


@pytest.mark.req("A22")
def test_a_slow_line_that_loses_packets_loses_no_call(pair: tuple[Machine, Machine]) -> None:
    near, far = pair
    if why := delays_missing():
        pytest.skip(why)
    near.delay(30, loss_percent=5)
    served(far)
    calls = calling(near, far)
    wait_for(calls, failed=False)
