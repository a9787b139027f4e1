"""Watches of frames: which connections they follow, what they keep, and what they never show."""

from __future__ import annotations

import trio
import trio.testing

from amqp_rt import Broker, Container, Limits, Message, Plain
from amqp_rt.broker import Queue
from amqp_rt.net.traces.watching import FrameWatch, FrameWatches

SECRET = "correct horse battery"


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


def opened(watches: FrameWatches) -> FrameWatch:
    watch = watches.open_watch()
    assert watch is not None
    return watch


async def test_a_watch_shows_frames_but_neither_passwords_nor_bodies() -> None:
    async with Broker(users={"ann": SECRET}) as broker:
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with broker.connect(url, auth=Plain("ann", SECRET)) as before:
            watch = opened(broker.container.frame_watches)
            async with (
                broker.connect(url, auth=Plain("ann", SECRET)) as peer,
                peer.sender("q") as out,
            ):
                await out.send(Message("a body"))
            with trio.fail_after(5):
                while "the connection is over" not in [each.text for each in watch.since(0)]:
                    await trio.testing.wait_all_tasks_blocked()
            # The connection that was there before is not followed.
            async with before.sender("q") as out:
                await out.send(Message("another one"))
            rungs = watch.since(0)
            broker.container.frame_watches.close_watch(watch)
    texts = [each.text for each in rungs]
    assert {each.connection for each in rungs} == {1}
    assert [each for each in texts if "sasl-init" in each and "ann" in each]
    assert [each for each in texts if " transfer " in each and "+ " in each]
    whole = "\n".join(texts)
    assert SECRET not in whole
    assert "a body" not in whole
    assert {each.client for each in rungs} == {True, False, None}
    assert watch.since(watch.count - 1) == rungs[-1:]


def test_a_closed_watch_gets_nothing() -> None:
    watches = FrameWatches()
    watch = opened(watches)
    frames = watches.open(client=False, address="them", clock=Time())
    assert frames is not None
    count = watch.count
    watches.close_watch(watch)
    watches.close_watch(watch)
    frames.received(b"AMQP\x00\x01\x00\x00")
    later = opened(watches)
    # Octets that were not followed leave a gap, behind which nothing can be masked.
    frames.received(b"AMQP\x00\x01\x00\x00")
    frames.sent(b"AMQP\x00\x01\x00\x00")
    frames.received_eof()
    frames.close()
    assert watch.count == count
    assert later.count == 0


def test_octets_of_unknown_protocols_are_counted_only() -> None:
    watches = FrameWatches()
    watch = opened(watches)
    frames = watches.open(client=False, address="", clock=Time())
    assert frames is not None
    frames.received(SECRET.encode())
    assert [each.text for each in watch.since(0)] == [
        "a connection with a peer",
        f"{len(SECRET)} bytes of another protocol, not kept",
    ]


def test_the_number_of_watches_is_bounded() -> None:
    watches = FrameWatches(Limits(frame_watches_max=2))
    assert watches.open(client=False, address="them", clock=Time()) is None
    first, _ = opened(watches), opened(watches)
    assert watches.open_watch() is None
    watches.close_watch(first)
    assert opened(watches).is_open


def test_a_watch_follows_some_connections_and_keeps_the_latest_rungs() -> None:
    watches = FrameWatches(Limits(frame_watch_connections_max=2, frame_watch_rungs_max=3))
    watch = opened(watches)
    found = [watches.open(client=False, address=f"{n}", clock=Time()) for n in range(3)]
    assert [each is None for each in found] == [False, False, True]
    assert watch.connections == 3
    for each in found[:2]:
        assert each is not None
        each.close()
    assert watch.count == 4
    assert [(each.connection, each.text) for each in watch.since(0)] == [
        (2, "a connection with 1"),
        (1, "the connection is over"),
        (2, "the connection is over"),
    ]
    assert watch.since(3) == watch.since(0)[-1:]
    assert watch.since(9) == []


def test_without_a_watch_a_container_follows_nothing() -> None:
    container = Container("c")
    assert container.frame_watches.open(client=False, address="them", clock=Time()) is None
