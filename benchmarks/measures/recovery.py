"""Brokers with many stored messages: time of a restart after ``kill -9``, and costs afterwards.

Each contestant fills a store once, using clients, and is killed; the measured time is from the
start of the next process until it accepts a durable message of a client. It is killed again, so
that every start follows a crash. *peak* is the ratio of its highest memory until then to its memory
afterwards.

For amqp_rt alone, the cost of a durable message for the broker is measured with a few and with a
million messages waiting before it, and so is the memory of those that wait.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import trio

from amqp_rt import Container, Message

from ..contestants import CREDIT, Contestant, Running
from ..processes import cpu_s, kill, peak_bytes
from ..rounds import Case, Sample
from . import Plan
from .memory import settled

SIZE = 256
QUEUE = "kept"
#: Titles by number of messages.
COUNTS = {
    0: "an empty store",
    60_000: "60,000 messages of 256 B",
    1_000_000: "1,000,000 messages of 256 B",
}
QUICK_MAX = 60_000
#: Other brokers take minutes to fill more messages than these.
OTHERS_MAX = 60_000
DEPTH = "durable depth 10 → 1M, enqueue and dequeue"
MEMORY = "durable messages queued 60k → 1M, memory"
#: Number of messages that fill the memory allowed for a queue.
FULL = 60_000
#: Messages sent through a queue to measure the broker's CPU.
THROUGH = 20_000
_PATIENCE_S = 120.0


class Stores:
    """Stores that each contestant has filled before it was killed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folders: dict[tuple[str, int], Path] = {}

    def folder(self, one: Contestant, count: int) -> Path:
        """Return the store of *one* with *count* messages in its queue."""
        found = self._folders.get((one.key, count))
        if found is None:
            made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            found = Path(self._plan.stack.enter_context(made))
            assert one.kept_broker
            with one.kept_broker(found) as running:
                self._fill(running, count)
                kill(running.pids)
            self._folders[one.key, count] = found
        return found

    def _fill(self, running: Running, count: int) -> None:
        present = self._plan.field.present
        client = present.get("compiled") or present["pure"]
        if count:
            send(client, running, count)
        else:
            trio.run(_send_one, running)


def cases(plan: Plan) -> list[Case]:
    present = plan.field.present
    if "compiled" not in present and "pure" not in present:
        return []
    stores = Stores(plan)
    able = [one for one in present.values() if one.kept_broker]
    own = [one for one in able if "hop" in one.roles]
    found = []
    for count, title in COUNTS.items():
        if plan.settings.quick and count > QUICK_MAX:
            continue
        runs = {
            one.key: partial(start, stores, one, count)
            for one in able
            if one in own or count <= OTHERS_MAX
        }
        found.append(Case("recovery", title, runs))
    found += [
        Case("recovery", DEPTH, {one.key: partial(depth, plan, stores, one) for one in own}),
        Case("recovery", MEMORY, {one.key: partial(memory, plan, stores, one) for one in own}),
    ]
    return found


def start(stores: Stores, one: Contestant, count: int) -> Sample:
    folder = stores.folder(one, count)
    assert one.kept_broker
    began = time.perf_counter()
    with one.kept_broker(folder) as running:
        trio.run(_send_one, running)
        taken = time.perf_counter() - began
        peak = peak_bytes(running.pids)
        stays = settled(running)
        kill(running.pids)
    return {"accepted_s": taken, "peak": peak / stays}


async def _send_one(running: Running) -> None:
    with trio.fail_after(_PATIENCE_S):
        async with (
            Container("recovery") as us,
            us.connect(f"amqp://127.0.0.1:{running.port}") as peer,
            peer.sender(running.address(QUEUE), durable=running.terminus_durability) as sender,
        ):
            await sender.send(Message(b"there again", durable=True))


def send(client: Contestant, running: Running, count: int, queue: str = QUEUE) -> None:
    """Send *count* durable messages with *client*."""
    with client.role(
        "source",
        port=running.port,
        address=running.address(queue),
        size=SIZE,
        settled=False,
        seconds=600,
        count=count,
        sasl=True,
        durable=True,
        terminus_durability=running.terminus_durability,
    ) as producer:
        producer.result(600)


def most(plan: Plan) -> int:
    return QUICK_MAX if plan.settings.quick else max(COUNTS)


def depth(plan: Plan, stores: Stores, one: Contestant) -> Sample:
    """Compare the broker's CPU for a message in and out, with a million waiting and with ten."""
    few = through(plan, stores, one, 10)
    return {"slope": through(plan, stores, one, most(plan)) / few}


def through(plan: Plan, stores: Stores, one: Contestant, count: int) -> float:
    """Return the broker's seconds for a message in and one out of a queue with *count*."""
    folder = stores.folder(one, count)
    client = plan.field.present.get("compiled") or plan.field.present["pure"]
    assert one.kept_broker
    with one.kept_broker(folder) as running:
        before = cpu_s(running.pids)
        with client.role(
            "consume",
            port=running.port,
            address=QUEUE,
            credit=CREDIT,
            sasl=True,
        ) as consumer:
            consumer.expect(THROUGH)
            send(client, running, THROUGH)
            consumer.result(120)
        spent = cpu_s(running.pids) - before
    return spent / THROUGH


def memory(plan: Plan, stores: Stores, one: Contestant) -> Sample:
    """Compare the memory with a million messages to that with as many as fill a queue's memory."""
    found = []
    for count in (FULL, most(plan)):
        assert one.kept_broker
        with one.kept_broker(stores.folder(one, count)) as running:
            found.append(settled(running))
            kill(running.pids)
    return {"slope": found[1] / found[0]}
