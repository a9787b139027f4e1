"""Our client and our broker over lost connections and restarts of the broker: each message once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import pytest
import trio
import trio.testing
from far_end import FarEnd

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.recovery import Reconnect
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.values import Described, Symbol

Clock = trio.testing.MockClock

STEADY = Reconnect(first_delay_s=1, factor=2, delay_max_s=5, jitter=0, give_up_after_s=1000)
#: Frames of 512 octets: the larger message takes several.
SMALL = Limits(frame_size_max=512, session_window=16)
BODIES: list[Any] = [n if n % 3 else b"%d" % n * 1500 for n in range(6)]
BODIES_SORTED = sorted(BODIES, key=repr)
#: Frames between a cut and another one.
AGAIN = (8, 10, 12)
FIRST: Any = {
    Symbol("rabbitmq:stream-offset-spec"): Described(Symbol("rabbitmq:stream-offset-spec"), "first")
}


async def at_once(call: Callable[..., Any], *args: Any) -> Any:
    """A disk without a thread."""
    await trio.lowlevel.checkpoint()
    return call(*args)


class Place:
    """Where a broker runs, with or without a store, and is killed with each connection or not."""

    def __init__(self, *, store: MemoryStore | None = None) -> None:
        self.store = store
        self.host: Any = None
        self.started = 0
        self.far = FarEnd(on_attach=self.attach, limits=SMALL)
        self._scope = trio.CancelScope()
        self._nursery: Any = None

    def attach(self, link: Any) -> None:
        if not self.host.attach(link):
            link.refuse(Error("amqp:not-found"))

    async def start(self) -> None:
        journal = None if self.store is None else Journal(self.store, at_once)
        self.host = BrokerHost(journal=journal, limits=SMALL)
        await self.host.restore()
        self.host.space().declare(Queue("q"))
        self.host.space().declare(Topic("t"))
        self.host.space().declare(Log("g", partitions=2))
        self._scope = trio.CancelScope()
        self.started += 1
        self._nursery.start_soon(self._run, self.host, self._scope)
        await self.host.wait_kept()

    async def _run(self, host: BrokerHost, scope: trio.CancelScope) -> None:
        with scope:
            await host.run()

    async def kill_with_connections(self) -> None:
        """Whenever a connection has been cut, the process goes too, and another finds what is on the
        disk."""
        seen = 0
        while True:
            await trio.sleep(0.01)
            if len(self.far.engines) <= seen or not self.far.engines[seen].finished:
                continue
            seen += 1
            assert self.store is not None
            disk = deepcopy(self.store)
            self._scope.cancel()
            disk.abandon()
            self.store = disk
            await self.start()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Connection]:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self.start()
            await nursery.start(self.far.listen, "far")
            if self.store is not None:
                nursery.start_soon(self.kill_with_connections)
            async with (
                Container("us", network=self.far.network, limits=SMALL) as us,
                us.connect("memory://far", reconnect=STEADY) as peer,
            ):
                yield peer
            nursery.cancel_scope.cancel()

    async def bodies(self, address: str, peer: Connection) -> list[Any]:
        if address == "q":
            return [
                Message.decode(each).body for each in await self.host.space().find("q").peek(100)
            ]
        async with peer.receiver(address, filter=FIRST) as source:
            found = [(await source.receive()).message.body for _ in BODIES]
            await trio.sleep(1)
            assert source.receive_nowait() is None
        return found


def cut(place: Place, cuts: tuple[int, ...]) -> None:
    if cuts:
        place.far.cut(cuts[0])
        place.far.cuts += cuts[1:]


async def send(cuts: tuple[int, ...], *, durable: int, second: bool, address: str = "q") -> int:
    place = Place(store=MemoryStore() if durable else None)
    async with place.client() as peer:
        out = peer.sender(
            address, rcv_settle_mode=int(second), settled=False, timeout=60, durable=durable
        )
        await out.wait_attached()
        before = place.far.frames
        cut(place, cuts)
        receipts = [out.send_nowait(body, durable=bool(durable)) for body in BODIES]
        for receipt in receipts:
            assert await receipt.outcome() == ACCEPTED
        frames = place.far.frames - before
        # Nothing but the order of what was sent again can be another.
        assert sorted(await place.bodies(address, peer), key=repr) == BODIES_SORTED, cuts
        assert not durable or place.started >= len(place.far.dialled)
    return frames


def places(frames: int, *, brief: bool, long: bool) -> Iterator[tuple[int, ...]]:
    """Yield after which frames to cut: after every one, and then again while the links are resumed.

    The second cut is at one of three distances, and in long runs at all of them: a resumed link continues in the
    same way wherever the first cut was. Brief runs take every third place.
    """
    for at in range(1, frames, 3 if brief else 1):
        yield (at,)
        distances = AGAIN if long else (AGAIN[at // 3 % 3 if brief else at % 3],)
        for again in distances:
            yield (at, again)


def test_usual_runs_cut_again_at_each_distance() -> None:
    assert {cuts[1:] for cuts in places(11, brief=False, long=False)} == {(), (8,), (10,), (12,)}
    assert {cuts[1:] for cuts in places(11, brief=True, long=False)} == {(), (8,), (10,), (12,)}
    assert [cuts for cuts in places(3, brief=False, long=True) if cuts[0] == 2] == [
        *((2,), (2, 8), (2, 10), (2, 12))
    ]


@pytest.mark.slow
@pytest.mark.req("X24", "X25", "B13", "M38")
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("durable", [0, 2], ids=["cut", "killed"])
async def test_what_is_sent_is_there_once(
    durable: int, second: bool, brief_run: bool, long_run: bool, autojump_clock: Clock
) -> None:
    """After every frame, and again while that is resumed."""
    frames = await send((), durable=durable, second=second)
    assert frames > 10
    for cuts in places(frames, brief=brief_run, long=long_run):
        await send(cuts, durable=durable, second=second)


@pytest.mark.slow
@pytest.mark.req("X24", "B13", "B27", "M38")
@pytest.mark.parametrize("address", ["g", "g/partitions/1"])
@pytest.mark.parametrize("durable", [0, 2], ids=["cut", "killed"])
async def test_what_is_sent_to_a_log_is_there_once(
    durable: int, address: str, autojump_clock: Clock
) -> None:
    frames = await send((), durable=durable, second=False, address=address)
    for at in range(1, frames):
        await send((at,), durable=durable, second=False, address=address)


async def receive(cuts: tuple[int, ...], *, durable: int, address: str) -> int:
    place = Place(store=MemoryStore() if durable else None)
    found: list[Any] = []
    async with place.client() as peer:
        inbox = peer.receiver(
            address,
            name="inbox",
            rcv_settle_mode=1,
            snd_settle_mode=0,
            timeout=60,
            durable=durable,
            credit=4,
        )
        await inbox.wait_attached()
        for body in BODIES:
            place.host.space().publish(address, Message(body, durable=bool(durable)).encode())
        before = place.far.frames
        cut(place, cuts)
        for _ in BODIES:
            delivery = await inbox.receive()
            found.append(delivery.body)
            delivery.accept()
            await delivery.settled()
        frames = place.far.frames - before
        await trio.sleep(5)
        assert inbox.receive_nowait() is None
        stats = place.host.space().get(address).stats()
        assert (stats.available, stats.acquired, stats.bytes) == (0, 0, 0), cuts
    assert sorted(found, key=repr) == BODIES_SORTED, cuts
    assert not durable or place.started >= len(place.far.dialled)
    return frames


@pytest.mark.slow
@pytest.mark.req("X24", "X25", "M38", "B19")
@pytest.mark.parametrize("address", ["q", "t"], ids=["queue", "topic"])
@pytest.mark.parametrize("durable", [0, 2], ids=["cut", "killed"])
async def test_what_is_received_comes_once(
    durable: int, address: str, brief_run: bool, long_run: bool, autojump_clock: Clock
) -> None:
    frames = await receive((), durable=durable, address=address)
    assert frames > 10
    for cuts in places(frames, brief=brief_run, long=long_run):
        await receive(cuts, durable=durable, address=address)
