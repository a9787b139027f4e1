"""Durable messages that are larger than memory should be: in pieces to the store and to consumers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from brokers import Controller
from paged import PagedWorld, large, world_of

from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, Rejected
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.termini import COPY
from amqp_rt.transactions import Discharge, TransactionalState
from amqp_rt.values import Symbol

pytestmark = pytest.mark.usefixtures("small_pieces")

#: Messages that are larger than this arrive in pieces.
SMALL = Limits(message_size_max=20_000, frame_size_max=4_096)
#: Limits of the clients in these tests.
CLIENT = Limits(message_size_max=10_000_000, frame_size_max=4_096)


async def send(world: PagedWorld, *payloads: bytes, **options: Any) -> Any:
    sender = world.client(limits=CLIENT).sender("q", **options)
    for payload in payloads:
        sender.send_raw(payload)
        await world.settle()
    return sender


async def take(world: PagedWorld, credit: int = 10, **options: Any) -> Any:
    receiver = world.client(limits=CLIENT).receiver("q", credit=credit, **options)
    await world.settle()
    return receiver


@pytest.mark.req("B7", "B24")
async def test_a_large_message_goes_through_the_store(kept: Callable[[], Any]) -> None:
    body, payload = large(subject="big", application_properties={"n": 1})
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        sender = await send(world, payload, bytes(Message("after", durable=True).encode()))
        assert sender.outcomes == [ACCEPTED, ACCEPTED]
        stats = world.stats("q")
        assert stats.available == 2
        assert stats.bytes > 100_000 > 1_000 > world.host.memory.held
    async with world_of(kept(), limits=SMALL) as world:
        assert world.stats("q").bytes == stats.bytes
        receiver = await take(world)
        assert [receiver.bodies[0] == body, receiver.bodies[1]] == [True, "after"]
        assert receiver.messages[0].subject == "big"
        receiver.settle(ACCEPTED)
        await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.acquired, stats.bytes) == (0, 0, 0)
        assert world.host.memory.held == 0
        assert world.store.summary(1)[0] == 0
        assert world.store.piece(1, 0, 0) == b""


@pytest.mark.req("B7")
async def test_it_can_be_released_browsed_and_given_up(kept: Callable[[], Any]) -> None:
    body, payload = large()
    declared = Queue("q", max_deliveries=2, dead_letter="dead"), Queue("dead")
    async with world_of(kept(), *declared, limits=SMALL) as world:
        await send(world, payload)
        browser = await take(world, distribution_mode=COPY)
        assert browser.bodies == [body]
        receiver = await take(world, credit=1)
        receiver.settle(RELEASED)
        await world.settle()
        receiver.grant(1)
        await world.settle()
        assert receiver.bodies == [body, body]
        receiver.settle(Modified(delivery_failed=True), 1)
        await world.settle()
        receiver.grant(1)
        await world.settle()
        assert receiver.messages[2].delivery_count == 1
        receiver.settle(Modified(delivery_failed=True), 2)
        await world.settle()
        assert (world.stats("q").bytes, world.stats("dead").available) == (0, 1)
    async with world_of(kept(), limits=SMALL) as world:
        receiver = world.client(limits=CLIENT).receiver("dead", credit=1)
        await world.settle()
        assert receiver.bodies == [body]
        receiver.settle(ACCEPTED)
        await world.settle()
        assert world.host.memory.held == 0


@pytest.mark.req("B7")
@pytest.mark.parametrize("how", ["aborted", "cut", "detached"])
async def test_what_does_not_come_whole_leaves_nothing(kept: Callable[[], Any], how: str) -> None:
    _, payload = large()
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        client = world.client(limits=CLIENT)
        sender = client.sender("q")
        delivery = sender.link.send(payload[:60_000], more=True)
        await world.settle()
        assert world.store.piece(1, 0, 0)
        if how == "aborted":
            delivery.abort()
        elif how == "cut":
            client.cut()
        else:
            sender.link.detach()
        await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.bytes, world.host.memory.held) == (0, 0, 0)
        assert world.store.piece(1, 0, 0) == b""
        await send(world, payload)
        assert world.stats("q").available == 1


async def test_a_process_that_ends_before_all_has_come_leaves_nothing(
    kept: Callable[[], Any],
) -> None:
    _, payload = large()
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        world.client(limits=CLIENT).sender("q").link.send(payload[:60_000], more=True)
        await world.settle()
        assert world.store.piece(1, 0, 0)
    async with world_of(kept(), limits=SMALL) as world:
        assert world.stats("q").available == 0
        assert world.store.piece(1, 0, 0) == b""


async def test_a_consumer_that_goes_in_the_middle_leaves_it_to_others() -> None:
    body, payload = large(1_000_000)
    limits = Limits(message_size_max=20_000, output_max=30_000)
    async with world_of(MemoryStore(), Queue("q"), limits=limits) as world:
        await send(world, payload)
        client = world.client(limits=Limits(message_size_max=10_000_000, session_window=8))
        receiver = client.receiver("q")
        client.joined.client.take()
        receiver.link.grant(1)
        # The consumer grants credit, reads a few bytes and leaves.
        client.pump()
        await trio.testing.wait_all_tasks_blocked()
        client.cut()
        await world.settle()
        assert world.stats("q").available == 1
        other = await take(world)
        assert other.bodies == [body]


@pytest.mark.req("M5")
async def test_only_what_is_durable_and_plain_may_be_that_large() -> None:
    async with world_of(MemoryStore(), Queue("q"), limits=SMALL) as world:
        late = {Symbol("x-opt-delivery-delay"): 1_000}
        for fields in ({"durable": False}, {"durable": True, "message_annotations": late}):
            payload = bytes(Message(bytes(100_000), **fields).encode())
            sender = await send(world, payload)
            assert sender.error == "amqp:link:message-size-exceeded"
        assert (world.stats("q").available, world.host.memory.held) == (0, 0)


@pytest.mark.req("B26")
async def test_a_full_disk_refuses_it_and_keeps_nothing() -> None:
    store = MemoryStore(size_max=150_000)
    _, payload = large(300_000)
    async with world_of(store, Queue("q"), limits=SMALL) as world:
        sender = world.client(limits=CLIENT).sender("q")
        delivery = sender.link.send(payload[:100_000], more=True)
        await world.settle()
        assert store.piece(1, 0, 0)
        delivery.write(payload[100_000:200_000])
        await world.settle()
        assert store.piece(1, 0, 0) == b""
        delivery.write(payload[200_000:], more=False)
        await world.settle()
        (outcome,) = sender.outcomes
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == "amqp:resource-limit-exceeded"
        stats = world.stats("q")
        assert (stats.available, stats.bytes, world.host.memory.held) == (0, 0, 0)


async def test_a_large_message_that_is_not_settled_in_time_comes_back(
    kept: Callable[[], Any],
) -> None:
    body, payload = large()
    async with world_of(kept(), Queue("q", lock_s=30), limits=SMALL) as world:
        await send(world, payload)
        first = await take(world)
        assert first.bodies == [body]
        world.time.now += 31
        world.host.turns.tick()
        await world.settle()
        assert world.stats("q").requeued == 1
        other = await take(world)
        await world.settle()
        assert first.bodies + other.bodies == [body, body]


async def test_a_large_message_that_is_sent_settled_is_gone_when_it_was_read(
    kept: Callable[[], Any],
) -> None:
    body, payload = large()
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        await send(world, payload)
        receiver = await take(world, snd_settle_mode=1)
        assert receiver.bodies == [body]
        stats = world.stats("q")
        assert (stats.available, stats.acquired, stats.accepted, stats.bytes) == (0, 0, 1, 0)
        assert world.store.summary(1)[0] == 0


async def test_purging_leaves_a_large_message_that_is_acquired(kept: Callable[[], Any]) -> None:
    body, payload = large()
    limits = Limits(message_size_max=20_000, queue_memory_bytes_max=1_000)
    async with world_of(kept(), Queue("q"), limits=limits) as world:
        await world.put(*range(100))
        await send(world, payload)
        await world.put(*range(100))
        receiver = await take(world, 101)
        assert receiver.bodies[:100] == list(range(100))
        assert receiver.bodies[100] == body
        await world.host.space().find("q").purge()
        receiver.settle(ACCEPTED, *range(100))
        receiver.settle(RELEASED, 100)
        await world.settle()
        assert world.stats("q").available == 1
    async with world_of(kept(), limits=limits) as world:
        assert (await take(world)).bodies == [body]


PROGRAM = """
import resource, sys, trio
from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.limits import Limits

SIZE, PATH, WINDOW = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
LIMITS = Limits(session_window_bytes=WINDOW, message_size_max=WINDOW // 4)
CHUNK = bytes(range(256)) * 256


async def main():
    async with Broker(store=f"sqlite:{PATH}", limits=LIMITS) as broker:
        await broker.declare(Queue("q"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with broker.local() as peer:
            async with peer.sender("q") as out:
                async with out.stream(durable=True) as message:
                    for _ in range(SIZE // len(CHUNK)):
                        await message.write(CHUNK)
            stats = broker.stats("q")
            assert stats.available == 1 and stats.bytes >= SIZE, stats
            async with peer.receiver("q", streaming=True, credit=1) as messages:
                async with await messages.receive() as delivery:
                    seen = 0
                    async for chunk in delivery.chunks():
                        seen += len(chunk)
                    assert seen == SIZE, seen
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print((after - before) // 1024)


trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.req("B7")
def test_memory_is_bounded_however_large_a_message_is(tmp_path: Path, long_run: bool) -> None:
    size, window, bound = (1024, 64, 400) if long_run else (96, 4, 64)
    found = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM),
            *(str(size * 2**20), str(tmp_path / "large.db"), str(window * 2**20)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < bound, f"{found.stdout.strip()} MiB more for {size} MiB"


@pytest.mark.req("B7", "B24", "B22")
async def test_browsers_that_are_past_its_place_see_it_too(kept: Callable[[], Any]) -> None:
    body, payload = large()
    few = Limits(
        message_size_max=20_000,
        frame_size_max=4_096,
        queue_memory_bytes_max=1_000,
        queue_memory_messages_max=20,
    )
    async with world_of(kept(), Queue("q"), limits=few) as world:
        await world.put(*range(60))
        delivery = world.client(limits=CLIENT).sender("q").link.send(payload[:60_000], more=True)
        await world.settle()
        await world.put(*range(60, 120))
        past = await take(world, credit=1_000, distribution_mode=COPY)
        behind = await take(world, credit=30, distribution_mode=COPY)
        assert (past.bodies, behind.bodies) == ([*range(120)], [*range(30)])
        delivery.write(payload[60_000:], more=False)
        await world.settle()
        assert world.queue().paging.count
        assert past.bodies == [*range(120), body]
        behind.grant(1_000)
        await world.settle()
        in_turn = [*range(60), body, *range(60, 120)]
        assert behind.bodies == in_turn
        receiver = await take(world, credit=1_000)
        assert receiver.bodies == in_turn
        receiver.settle(ACCEPTED)
        await world.settle()
        assert (world.stats("q").bytes, world.host.memory.held) == (0, 0)
        assert world.store.summary(1)[0] == 0


@pytest.mark.req("R5", "R7")
async def test_a_large_message_that_a_transaction_acquired_is_available_after_a_rollback() -> None:
    body, payload = large()
    async with world_of(MemoryStore(), Queue("q"), limits=SMALL) as world:
        await send(world, payload)
        client = world.client(limits=CLIENT)
        control = Controller(client)
        receiver = client.receiver("q")
        txn_id = control.declare()
        receiver.link.grant(1, properties={"txn-id": txn_id})
        await world.settle()
        assert receiver.bodies == [body]
        assert world.stats("q").acquired == 1
        assert control.discharge(txn_id, fail=True) == "accepted"
        await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.acquired) == (1, 0)
        assert receiver.endpoint.deliveries[0].settled


@pytest.mark.req("R3", "R4")
@pytest.mark.parametrize("fail", [False, True])
async def test_a_discharge_waits_for_a_large_post_that_is_being_written(fail: bool) -> None:
    body, payload = large()
    async with world_of(MemoryStore(), Queue("q"), limits=SMALL) as world:
        client = world.client(limits=CLIENT)
        control = Controller(client)
        sender = client.sender("q")
        txn_id = control.declare()
        # All of it has come, and the store has not kept it yet.
        sender.send_raw(payload, state=TransactionalState(txn_id))
        waiting = control.link.send(Message(Discharge(txn_id, fail)).encode())
        world.pump()
        assert waiting.state is None
        await world.settle()
        assert waiting.state == ACCEPTED
        assert sender.endpoint.outcomes[0].state.outcome == ACCEPTED
        assert sender.endpoint.detached == []
        assert world.stats("q").available == (0 if fail else 1)
        if not fail:
            assert (await take(world)).bodies == [body]
