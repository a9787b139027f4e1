"""Our client over lost connections, to a peer that keeps its side of the links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from far_end import FarEnd
from kept import KeepingHost, Store

from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.links import ROUNDS_MAX
from amqp_rt.container.recovery import Reconnect
from amqp_rt.errors import ConnectionLost, LinkDetached
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.termini import Source, Target
from amqp_rt.unsettled import Unsettled

Clock = trio.testing.MockClock

STEADY = Reconnect(first_delay_s=1, factor=2, delay_max_s=5, jitter=0, give_up_after_s=1000)
#: Frames of 512 octets: the larger message takes several.
SMALL = Limits(frame_size_max=512, session_window=16)
BODIES: list[Any] = [n if n % 3 else b"%d" % n * 1500 for n in range(6)]


@asynccontextmanager
async def client(far: FarEnd) -> AsyncIterator[Connection]:
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with (
            Container("us", network=far.network, limits=SMALL) as us,
            us.connect("memory://far", reconnect=STEADY) as peer,
        ):
            yield peer
        nursery.cancel_scope.cancel()


def bodies(payloads: list[bytes]) -> list[Any]:
    return sorted((Message.decode(each).body for each in payloads), key=repr)


# --- cut after every frame -------------------------------------------------------------------------


async def send(cuts: tuple[int, ...], *, lazy: bool) -> int:
    """Send BODIES over connections that are cut; the frames that the first one took."""
    store = Store([], lazy=lazy)
    far = FarEnd(on_attach=KeepingHost(store).accept, limits=SMALL)
    async with client(far) as peer:
        out = peer.sender("q", rcv_settle_mode=1, settled=False, timeout=60)
        await out.wait_attached()
        before = far.frames
        if cuts:
            far.cut(cuts[0])
            far.cuts += cuts[1:]
        receipts = [out.send_nowait(body) for body in BODIES]
        if lazy:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process, store, len(BODIES))
                for receipt in receipts:
                    assert await receipt.outcome() == ACCEPTED
        for receipt in receipts:
            assert await receipt.outcome() == ACCEPTED
        frames = far.frames - before
        await out.close()
    assert bodies(store.processed) == sorted(BODIES, key=repr), cuts
    return frames


async def process(store: Store, count: int) -> None:
    """A receiver that takes a second for each message."""
    while len(store.processed) < count:
        await trio.sleep(0.4)
        if store.in_hand:
            delivery = store.in_hand.pop(0)
            store.processed.append(delivery.payload)
            delivery.settle(ACCEPTED)


@pytest.mark.slow
@pytest.mark.req("X24", "X25", "M26")
@pytest.mark.parametrize("lazy", [False, True], ids=["prompt", "lazy"])
async def test_what_is_sent_over_a_line_that_is_cut_arrives_once(
    lazy: bool, autojump_clock: Clock
) -> None:
    """After every frame of the sending, and again while that is resumed."""
    frames = await send((), lazy=lazy)
    assert frames > 15
    for cut in range(1, frames):
        for again in (0, 8, 9, 10, 11, 12, 14):
            await send((cut, again) if again else (cut,), lazy=lazy)


async def receive(cuts: tuple[int, ...], *, slow: bool) -> int:
    """Receive BODIES over connections that are cut."""
    store = Store([Message(body).encode() for body in BODIES], lazy=False)
    far = FarEnd(on_attach=KeepingHost(store).accept, limits=SMALL)
    found: list[Any] = []
    async with client(far) as peer:
        inbox = peer.receiver("q", rcv_settle_mode=1, snd_settle_mode=0, timeout=60, credit=4)
        await inbox.wait_attached()
        before = far.frames
        if cuts:
            far.cut(cuts[0])
            far.cuts += cuts[1:]
        for _ in BODIES:
            delivery = await inbox.receive()
            found.append(delivery.body)
            if slow:
                # The connection may be gone when the outcome is said, or back again.
                await trio.sleep(0.6)
            delivery.accept()
            await delivery.settled()
        frames = far.frames - before
        await trio.sleep(100)
        assert inbox.receive_nowait() is None
    assert sorted(found, key=repr) == sorted(BODIES, key=repr), cuts
    assert len(store.settled) == len(BODIES), cuts
    return frames


@pytest.mark.slow
@pytest.mark.req("X24", "X25", "M26")
@pytest.mark.parametrize("slow", [False, True], ids=["prompt", "slow"])
async def test_what_is_received_over_a_line_that_is_cut_comes_once(
    slow: bool, autojump_clock: Clock
) -> None:
    frames = await receive((), slow=slow)
    assert frames > 15
    for cut in range(1, frames):
        for again in (0, 8, 9, 10, 11, 12, 14):
            await receive((cut, again) if again else (cut,), slow=slow)


# --- peers that do not remember --------------------------------------------------------------------


def forgetful(far: FarEnd, *, timeout: int) -> None:
    """The peer says that it keeps its termini for *timeout* seconds, and remembers nothing."""

    def accept(link: Any) -> None:
        if link.role:
            far.accept(link, target=Target(address="q", timeout=timeout))
        else:
            far.accept(link, source=Source(address="q", timeout=timeout))

    far.on_attach = accept


@pytest.mark.req("X24", "X25")
@pytest.mark.parametrize("in_doubt", ["raise", "resend"])
@pytest.mark.parametrize("case", ["forgotten", "another", "not kept"])
async def test_what_had_left_is_in_doubt_where_the_peer_does_not_remember(
    case: str, in_doubt: Any, autojump_clock: Clock
) -> None:
    far = FarEnd()
    forgetful(far, timeout=0 if case == "not kept" else 60)
    async with client(far) as peer, peer.sender("q", in_doubt=in_doubt) as out:
        far.link.grant(2)
        receipts = [out.send_nowait(number) for number in range(4)]
        await far.until(lambda: len(far.heard.deliveries) == 2)
        far.credit, far.settle = 100, ACCEPTED
        if case == "another":
            far.container_id = "somebody else"
        far.drop()
        for receipt in receipts[:2]:
            if in_doubt == "raise":
                with pytest.raises(ConnectionLost, match="taken or not"):
                    await receipt.accepted()
            else:
                await receipt.accepted()
        for receipt in receipts[2:]:
            await receipt.accepted()
    sent = [Message.decode(each.payload).body for each in far.heard.deliveries]
    assert sent == ([2, 3] if in_doubt == "raise" else [0, 1, 2, 3])


@pytest.mark.req("X24")
@pytest.mark.parametrize("timeout", [0, 60])
async def test_a_map_is_only_sent_to_a_peer_that_keeps_its_side(
    timeout: int, autojump_clock: Clock
) -> None:
    """Some brokers end the session when they get one."""
    far = FarEnd()
    seen: list[Any] = []
    forgetful(far, timeout=timeout)
    accept = far.on_attach

    def look(link: Any) -> None:
        seen.append(link.remote_unsettled)
        accept(link)

    far.on_attach = look
    async with client(far) as peer, peer.sender("q", in_doubt="resend") as out:
        far.link.grant(1)
        receipt = out.send_nowait(b"x")
        await far.until(lambda: far.heard.deliveries)
        tag = far.heard.deliveries[0].tag
        far.credit, far.settle = 100, ACCEPTED
        far.drop()
        await receipt.accepted()
    assert seen == [None, {tag: None} if timeout else None]


@pytest.mark.req("X24", "X25")
async def test_what_was_received_comes_again_where_the_peer_does_not_remember(
    autojump_clock: Clock,
) -> None:
    far = FarEnd()
    forgetful(far, timeout=60)
    async with client(far) as peer, peer.receiver("q", rcv_settle_mode=1, credit=5) as inbox:
        await far.until(lambda: far.link.credit)
        for number in range(3):
            far.link.send(Message(number).encode())
        taken = await inbox.receive()
        taken.accept()
        far.drop()
        with pytest.raises(ConnectionLost, match="in doubt"):
            await taken.settled()
        await peer.wait_open()
        await far.until(lambda: far.link.credit == 5)
        assert inbox.waiting == 0
        far.link.send(Message(7).encode())
        assert (await inbox.receive()).body == 7


# --- what goes on ----------------------------------------------------------------------------------


@pytest.mark.req("X24", "X25")
async def test_deliveries_in_hand_are_settled_later(autojump_clock: Clock) -> None:
    store = Store([Message(body).encode() for body in range(6)], lazy=False)
    far = FarEnd(on_attach=KeepingHost(store).accept)
    async with client(far) as peer, peer.receiver("q", timeout=60, credit=4) as inbox:
        first = await inbox.receive()
        second = await inbox.receive()
        far.drop()
        while inbox.attached:
            await inbox.changes.park()
        # Said while there is no connection; nothing can be taken meanwhile.
        first.accept()
        assert inbox.receive_nowait() is None
        await inbox.wait_attached()
        second.accept()
        bodies_found = [first.body, second.body]
        async for delivery in inbox:
            bodies_found.append(delivery.body)
            delivery.accept()
            if len(bodies_found) == 6:
                break
        await far.until(lambda: len(store.settled) == 6)
    assert bodies_found == list(range(6))
    assert [Message.decode(each).body for each in store.settled] == list(range(6))


@pytest.mark.req("X24", "X25")
async def test_a_sender_that_gives_up_while_suspended_forgets(autojump_clock: Clock) -> None:
    store = Store([], lazy=True)
    far = FarEnd(on_attach=KeepingHost(store).accept)
    async with client(far) as peer, peer.sender("q", timeout=60) as out:
        receipts = [out.send_nowait(body) for body in range(2)]
        await far.until(lambda: len(store.in_hand) == 2)
        far.drop()
        while out.attached:
            await out.changes.park()
        receipts[0].give_up()
        await out.wait_attached()
        given_up, kept = store.in_hand
        await far.until(lambda: kept.link.attached)
        assert given_up.settled
        kept.settle(RELEASED)
        assert await receipts[1].outcome() == RELEASED
        # Streamed messages whose beginning is gone cannot be resumed.

        async def interrupted() -> None:
            async with out.stream() as stream:
                await stream.write(b"x" * 100)
                await far.until(lambda: far.link._current is not None)
                far.drop()
                while True:
                    await stream.write(b"x")

        with pytest.raises(ConnectionLost, match="taken or not"):
            await interrupted()


@pytest.mark.req("X24", "X25")
async def test_maps_that_do_not_fit_a_frame_take_several_rounds(autojump_clock: Clock) -> None:
    store = Store([], lazy=True, credit=120)
    far = FarEnd(on_attach=KeepingHost(store).accept, limits=SMALL)
    async with client(far) as peer:
        out = peer.sender("q", rcv_settle_mode=1, timeout=60)
        await out.wait_attached()
        receipts = [out.send_nowait(body) for body in range(100)]
        await far.until(lambda: len(store.in_hand) == 100)
        far.drop()
        links = len(far.links)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process, store, 101)
            for receipt in receipts:
                assert await receipt.outcome() == ACCEPTED
            assert len(far.links) > links + 2
            assert await out.send("more") == ACCEPTED
        await out.close()
    assert bodies(store.processed[:100]) == sorted(range(100), key=repr)


@pytest.mark.req("X24", "X25")
async def test_a_receiver_takes_several_rounds_too(autojump_clock: Clock) -> None:
    store = Store([Message(body).encode() for body in range(100)], lazy=False)
    host = KeepingHost(store)
    far = FarEnd(on_attach=host.accept, limits=SMALL)
    async with client(far) as peer:
        inbox = peer.receiver("q", rcv_settle_mode=1, timeout=60, credit=100)
        deliveries = [await inbox.receive() for _ in range(100)]
        far.drop()
        while inbox.attached:
            await inbox.changes.park()
        for delivery in deliveries[:50]:
            delivery.accept()
        links = len(far.links)
        for delivery in deliveries[50:]:
            await trio.sleep(1)
            delivery.accept()
        for delivery in deliveries:
            await delivery.settled()
        assert len(far.links) > links + 2
        # The link has not ended in between.
        store.todo.append(Message("more").encode())
        host.out.on_credit(far.link)
        async for delivery in inbox:
            assert delivery.body == "more"
            break
    assert bodies(store.settled) == sorted(range(100), key=repr)


@pytest.mark.req("X24", "X26")
async def test_a_peer_that_is_never_done_with_its_map_is_given_up(autojump_clock: Clock) -> None:
    far = FarEnd()
    forgetful(far, timeout=60)
    async with client(far) as peer:
        out = peer.sender("q", timeout=60)
        await out.wait_attached()
        far.link.grant(1)
        receipt = out.send_nowait(b"x")
        await far.until(lambda: far.heard.deliveries)

        def endless(link: Any) -> None:
            """More than its frames hold, and never the same."""
            memory = {
                bytes([len(far.links), n]): Unsettled(tag=bytes([len(far.links), n]), payload=b"x")
                for n in range(100)
            }
            link.session.engine.frame_size_out = 512
            far.accept(link, target=Target(address="q", timeout=60), unsettled=memory)

        far.on_attach = endless
        far.drop()
        with pytest.raises(LinkDetached):
            await receipt.outcome()
        assert len(far.links) == 2 + ROUNDS_MAX
        with pytest.raises(LinkDetached):
            out.send_nowait(b"y")
