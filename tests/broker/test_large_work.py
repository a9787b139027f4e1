"""Messages in pieces and transactions, dead letters, moves; and where they cannot go."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from brokers import Controller
from paged import PagedWorld, large, world_of

from amqp_rt import Broker, Container
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, Rejected
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.transactions import Discharge, TransactionalState

SMALL = Limits(message_size_max=20_000, frame_size_max=4_096)
CLIENT = Limits(message_size_max=10_000_000, frame_size_max=4_096)
pytestmark = pytest.mark.usefixtures("small_pieces")

TOO_LARGE = "amqp:link:message-size-exceeded"


async def discharge(world: PagedWorld, control: Controller, txn_id: bytes, fail: bool) -> str:
    delivery = control.link.send(Message(Discharge(txn_id, fail)).encode())
    await world.settle()
    state = delivery.state
    return (
        str(state.error.condition) if isinstance(state, Rejected) else type(state).__name__.lower()
    )


async def read(world: PagedWorld, address: str = "q") -> list[Any]:
    receiver = world.client(limits=CLIENT).receiver(address, credit=10)
    await world.settle()
    receiver.settle(ACCEPTED)
    await world.settle()
    return receiver.bodies


async def put(world: PagedWorld, *payloads: bytes) -> None:
    sender = world.client(limits=CLIENT).sender("q")
    for payload in payloads:
        sender.link.send(payload)
        await world.settle()
    assert sender.outcomes == [ACCEPTED] * len(payloads)


def is_empty(world: PagedWorld, *addresses: str) -> bool:
    for address in addresses:
        stats = world.stats(address)
        number = world.host.space().find(address).number
        assert (stats.available, stats.acquired, stats.bytes) == (0, 0, 0)
        assert world.store.summary(number)[0] == 0
        assert not any(world.store.piece(number, place, 0) for place in range(20))
    assert world.host.memory.held == 0
    return True


# --- Posting ---


@pytest.mark.req("R3", "R4", "B7")
@pytest.mark.parametrize("fail", [False, True])
async def test_a_large_message_is_posted_with_others_or_not_at_all(
    kept: Callable[[], Any], fail: bool
) -> None:
    body, payload = large()
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        sender = client.sender("q")
        sender.post(txn_id, "before", durable=True)
        sender.link.send(payload, state=TransactionalState(txn_id))
        await world.settle()
        sender.post(txn_id, "after", durable=True)
        await world.settle()
        assert sender.outcomes == [TransactionalState(txn_id, ACCEPTED)] * 3
        assert (world.stats("q").available, world.store.summary(1)[0]) == (0, 0)
        assert world.store.piece(1, 0, 0)
        assert world.host.memory.held < 2_000
        assert await discharge(world, control, txn_id, fail) == "accepted"
        assert world.stats("q").available == (0 if fail else 3)
        if fail:
            assert is_empty(world, "q")
    async with world_of(kept(), limits=SMALL) as world:
        found = await read(world)
        assert sorted(map(len, found)) == ([] if fail else [5, 6, len(body)])
        assert body in found or fail
        assert is_empty(world, "q")


@pytest.mark.req("R4", "R9")
@pytest.mark.parametrize("how", ["link", "connection", "process", "deleted"])
async def test_what_was_posted_and_never_discharged_leaves_nothing(
    kept: Callable[[], Any], how: str
) -> None:
    _, payload = large()
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        client.sender("q").link.send(payload, state=TransactionalState(txn_id))
        await world.settle()
        assert world.store.piece(1, 0, 0)
        if how == "link":
            control.link.detach(closed=True)
        elif how == "connection":
            client.cut()
        elif how == "deleted":
            world.host.space().delete("q")
            rollback = "amqp:transaction:rollback"
            assert await discharge(world, control, txn_id, False) == rollback
            world.host.space().declare(Queue("q"))
        await world.settle()
        if how != "process":
            assert is_empty(world, "q")
    async with world_of(kept(), limits=SMALL) as world:
        assert is_empty(world, "q")


@pytest.mark.req("R3")
async def test_a_transaction_that_is_over_before_all_has_come() -> None:
    _, payload = large()
    async with world_of(MemoryStore(), Queue("q"), limits=SMALL) as world:
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        sender = client.sender("q")
        state = TransactionalState(txn_id)
        delivery = sender.link.send(payload[:50_000], state=state, more=True)
        await world.settle()
        assert await discharge(world, control, txn_id, False) == "accepted"
        delivery.write(payload[50_000:], more=False)
        await world.settle()
        assert sender.error == "amqp:transaction:unknown-id"
        assert is_empty(world, "q")
        # An unknown transaction is reported at once.
        sender = client.sender("q")
        sender.link.send(payload[:50_000], state=state, more=True)
        await world.settle()
        assert sender.error == "amqp:transaction:unknown-id"
        assert is_empty(world, "q")


@pytest.mark.req("R3", "B26")
@pytest.mark.parametrize("when", ["pieces", "commit"])
async def test_a_full_disk_refuses_it_or_the_discharge(when: str) -> None:
    store = MemoryStore(size_max=150_000)
    _, payload = large(300_000 if when == "pieces" else 120_000)
    async with world_of(store, Queue("q"), limits=SMALL) as world:
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        sender = client.sender("q")
        sender.link.send(payload, state=TransactionalState(txn_id))
        await world.settle()
        (said,) = sender.outcomes
        if when == "pieces":
            assert isinstance(said.outcome, Rejected)
            assert said.outcome.error is not None
            assert said.outcome.error.condition == "amqp:resource-limit-exceeded"
            assert await discharge(world, control, txn_id, False) == "accepted"
        else:
            sender.post(txn_id, bytes(15_000), bytes(15_000), durable=True)
            await world.settle()
            rollback = "amqp:transaction:rollback"
            assert await discharge(world, control, txn_id, False) == rollback
        await world.settle()
        assert is_empty(world, "q")


# --- Consuming ---


@pytest.mark.req("R6", "R7", "B7")
@pytest.mark.parametrize("fail", [False, True])
async def test_a_large_delivery_is_retired_in_a_transaction(
    kept: Callable[[], Any], fail: bool
) -> None:
    body, payload = large()
    async with world_of(kept(), Queue("q"), Queue("to"), limits=SMALL) as world:
        await put(world, payload)
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        receiver = client.receiver("q", credit=1)
        await world.settle()
        # The message is passed on to another queue, as by a consumer that forwards.
        client.sender("to").link.send(payload, state=TransactionalState(txn_id))
        await world.settle()
        receiver.endpoint.deliveries[0].update(TransactionalState(txn_id, ACCEPTED))
        await world.settle()
        assert world.stats("q").acquired == 1
        assert await discharge(world, control, txn_id, fail) == "accepted"
        receiver.detach()
        await world.settle()
        assert world.stats("q").available == (1 if fail else 0)
        assert world.stats("to").available == (0 if fail else 1)
    async with world_of(kept(), limits=SMALL) as world:
        assert await read(world, "q" if fail else "to") == [body]
        assert is_empty(world, "q", "to")


@pytest.mark.req("R5", "R8", "B7")
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("fail", [False, True])
async def test_a_large_message_is_acquired_in_a_transaction(
    kept: Callable[[], Any], fail: bool, settled: bool
) -> None:
    body, payload = large()
    async with world_of(kept(), Queue("q"), limits=SMALL) as world:
        await put(world, payload)
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        receiver = client.receiver("q", **({"snd_settle_mode": 1} if settled else {}))
        receiver.link.grant(1, properties={"txn-id": txn_id})
        await world.settle()
        assert receiver.bodies == [body]
        delivery = receiver.endpoint.deliveries[0]
        assert delivery.state.txn_id == txn_id
        if not settled:
            delivery.update(TransactionalState(txn_id, ACCEPTED))
            await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.acquired) == (0, 1)
        assert await discharge(world, control, txn_id, fail) == "accepted"
        receiver.detach()
        await world.settle()
        assert world.stats("q").available == (1 if fail else 0)
        if fail:
            assert await read(world) == [body]
        assert is_empty(world, "q")


@pytest.mark.req("R5", "R9")
@pytest.mark.parametrize("how", ["roll back", "commit", "cut"])
async def test_a_transaction_that_ends_while_it_sends(how: str) -> None:
    body, payload = large(1_000_000)
    limits = Limits(message_size_max=20_000, output_max=30_000)
    async with world_of(MemoryStore(), Queue("q"), limits=limits) as world:
        await put(world, payload)
        client = world.client(limits=Limits(message_size_max=10_000_000, session_window=8))
        control = Controller(client)
        txn_id = control.declare()
        receiver = client.receiver("q")
        client.joined.client.take()
        receiver.link.grant(1, properties={"txn-id": txn_id})
        for _ in range(2):
            client.pump()
            await trio.testing.wait_all_tasks_blocked()
        stats = world.stats("q")
        assert (stats.available, stats.acquired) == (0, 1)
        if how == "cut":
            client.cut()
        else:
            assert await discharge(world, control, txn_id, how == "roll back") == "accepted"
        await world.settle()
        stats = world.stats("q")
        if how == "commit":
            # Nothing was said of it: it stays with who has it (Part 4 §4.4.4).
            assert (stats.available, stats.acquired, receiver.bodies) == (0, 1, [body])
            receiver.settle(ACCEPTED)
            await world.settle()
        else:
            assert (stats.available, stats.acquired) == (1, 0)
            assert await read(world) == [body]
        assert is_empty(world, "q")


async def test_one_that_cannot_be_read_whole_fails_its_transaction(autojump_clock: Any) -> None:
    _, payload = large()

    class Damaged(MemoryStore):
        def piece(self, node: int, sequence: int, index: int) -> bytes:
            return b"" if index == 5 else super().piece(node, sequence, index)

    async with world_of(Damaged(), Queue("q", dead_letter="dead"), limits=SMALL) as world:
        await put(world, payload)
        client = world.client(limits=CLIENT)
        control = Controller(client)
        txn_id = control.declare()
        receiver = client.receiver("q")
        receiver.link.grant(1, properties={"txn-id": txn_id})
        await world.settle()
        receiver.link.grant(0)
        await world.settle()
        rollback = "amqp:transaction:rollback"
        assert await discharge(world, control, txn_id, False) == rollback
        receiver.detach()
        await world.settle()
        stats = world.stats("q")
        assert (stats.available, stats.acquired) == (1, 0)


@pytest.mark.req("B26")
async def test_the_end_of_it_is_on_the_disk_before_it_is_a_message() -> None:
    _, payload = large()
    # There is room for its head, and not for all of its pieces.
    async with world_of(MemoryStore(size_max=97_000), Queue("q"), limits=SMALL) as world:
        sender = world.client(limits=CLIENT).sender("q")
        sender.link.send(payload)
        await world.settle()
        (outcome,) = sender.outcomes
        assert isinstance(outcome, Rejected)
        assert is_empty(world, "q")


# --- Passing on ---


@pytest.mark.req("B16", "B7")
async def test_it_is_moved_and_given_up_from_queue_to_queue(kept: Callable[[], Any]) -> None:
    body, payload = large()
    nodes = Queue("q", dead_letter="dead"), Queue("to", max_deliveries=1, dead_letter="q")
    async with world_of(kept(), *nodes, limits=SMALL) as world:
        await put(world, payload)
        assert await world.host.space().find("q").move(world.host.space().find("to"), 5) == 1
        await world.settle()
        assert (world.stats("q").bytes, world.store.piece(1, 0, 0)) == (0, b"")
        receiver = world.client(limits=CLIENT).receiver("to", credit=1)
        await world.settle()
        receiver.settle(Modified(delivery_failed=True))
        await world.settle()
        receiver = world.client(limits=CLIENT).receiver("q", credit=1)
        await world.settle()
        receiver.settle(Rejected())
        await world.settle()
        assert world.host.memory.held < 1_000
    async with world_of(kept(), limits=SMALL) as world:
        assert await read(world, "dead") == [body]
        assert is_empty(world, "q", "to", "dead")


@pytest.mark.req("B15", "B16")
async def test_who_sent_it_gets_it_back_if_it_can() -> None:
    body, payload = large(reply_to="back")
    nodes = Queue("q", dead_letter="dead", return_to_sender=True), Topic("back")
    async with world_of(MemoryStore(), *nodes, limits=SMALL) as world:
        await put(world, payload)
        receiver = world.client(limits=CLIENT).receiver("q", credit=1)
        await world.settle()
        receiver.settle(Rejected())
        await world.settle()
        assert await read(world, "dead") == [body]


@pytest.mark.req("B7")
@pytest.mark.parametrize("target", [Topic("to"), Log("to")])
async def test_there_is_no_way_from_a_queue_to_a_topic_or_a_log(target: Any) -> None:
    body, payload = large()
    nodes = target, Queue("q", dead_letter="to")
    async with world_of(MemoryStore(), *nodes, limits=SMALL) as world:
        await put(world, payload)
        with pytest.raises(AmqpError) as error:
            await world.host.space().find("q").move(world.host.space().find("to"), 1)
        assert error.value.condition == TOO_LARGE
        assert "too large for 'to'" in str(error.value)
        receiver = world.client(limits=CLIENT).receiver("q", credit=1)
        await world.settle()
        receiver.settle(RELEASED)
        await world.settle()
        receiver.grant(1)
        await world.settle()
        assert receiver.bodies == [body, body]
        # As if there were no dead-letter address for it.
        receiver.settle(Rejected(), 1)
        await world.settle()
        stats = world.stats("q")
        assert (stats.dropped, stats.dead_lettered, stats.bytes) == (1, 0, 0)
        assert world.stats("to").enqueued == 0


# --- Where they cannot go ---


@pytest.mark.req("B7", "M41")
@pytest.mark.parametrize("address", ["topic", "log", "log/partitions/0"])
async def test_what_is_no_queue_in_the_store_says_how_much_it_takes(address: str) -> None:
    _, payload = large()
    async with world_of(MemoryStore(), Topic("topic"), Log("log"), limits=SMALL) as world:
        sender = world.client(limits=CLIENT).sender(address)
        assert sender.link.max_message_size == SMALL.message_size_max
        # A sender that exceeds the size is refused.
        sender.link.max_message_size = 0
        sender.link.send(payload)
        await world.settle()
        assert sender.error == TOO_LARGE
        assert world.stats(address.partition("/")[0]).enqueued == 0
        assert world.host.memory.held == 0


@pytest.mark.req("M41")
async def test_neither_do_the_anonymous_terminus_and_dynamic_nodes() -> None:
    _, payload = large(to="q")
    async with (
        Broker(store=MemoryStore(), limits=SMALL) as broker,
        Container("client", limits=CLIENT) as us,
    ):
        await broker.declare(Queue("q"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with us.connect(url) as peer:
            for options in ({"address": None}, {"address": None, "dynamic": True}):
                async with peer.sender(**options) as out:
                    with pytest.raises(AmqpError) as error:
                        await out.send(Message.decode(payload))
                    assert error.value.condition == TOO_LARGE
        assert broker.stats("q").available == 0


# --- All of it together ---


@pytest.mark.slow
@pytest.mark.req("R4", "R7", "B7", "B24")
@pytest.mark.parametrize("seed", range(10))
async def test_whatever_transactions_do_each_message_ends_once(seed: int) -> None:
    """Large and small messages of a paged queue, in and out of transactions that are committed or not."""
    chance = random.Random(seed)
    limits = Limits(
        message_size_max=20_000,
        frame_size_max=4_096,
        queue_memory_bytes_max=2_000,
        queue_memory_messages_max=10,
    )
    # The number of each message is in its properties.
    committed: set[int] = set()
    ended: list[int] = []
    count = 0

    async with world_of(MemoryStore(), Queue("q"), limits=limits) as world:
        client = world.client(limits=CLIENT)
        control = Controller(client)
        sender = client.sender("q")
        receivers = [client.receiver("q") for _ in range(2)]
        txn_id = control.declare()
        posted: set[int] = set()
        retired: dict[int, list[int]] = {}

        def number(delivery: Any) -> int:
            return int(str(Message.decode(delivery.payload).subject))

        def unsettled(receiver: Any) -> list[Any]:
            return [each for each in receiver.endpoint.deliveries if each.local_state is None]

        for _ in range(120):
            step = chance.random()
            receiver = chance.choice(receivers)
            if step < 0.4:
                for _ in range(chance.randrange(1, 6)):
                    size = chance.choice((10, 10, 10, 30_000))
                    _, payload = large(size, subject=str(count))
                    if chance.random() < 0.5:
                        sender.link.send(payload, state=TransactionalState(txn_id))
                        posted.add(count)
                    else:
                        sender.link.send(payload)
                        committed.add(count)
                    count += 1
            elif step < 0.6:
                receiver.link.grant(
                    chance.randrange(1, 8), properties={"txn-id": chance.choice((txn_id, None))}
                )
            elif step < 0.85:
                for delivery in unsettled(receiver):
                    # Deliveries acquired in a transaction have no other outcome (Part 4 §4.4.4).
                    inside = type(delivery.state) is TransactionalState or chance.random() < 0.4
                    if chance.random() < 0.5:
                        continue
                    if inside:
                        retired.setdefault(id(delivery), []).append(number(delivery))
                        delivery.update(TransactionalState(txn_id, ACCEPTED))
                    elif chance.random() < 0.3:
                        delivery.settle(RELEASED)
                    else:
                        ended.append(number(delivery))
                        delivery.settle(ACCEPTED)
            else:
                await world.settle()
                fail = chance.random() < 0.5
                assert await discharge(world, control, txn_id, fail) == "accepted"
                if not fail:
                    committed |= posted
                    ended += [each[0] for each in retired.values()]
                posted.clear()
                retired.clear()
                txn_id = control.declare()
                # Deliveries that the transaction left are not followed: others get the messages.
                for each in receivers:
                    each.detach()
                await world.settle()
                receivers = [client.receiver("q") for _ in range(2)]
            if chance.random() < 0.7:
                await world.settle()
        await world.settle()
        assert await discharge(world, control, txn_id, True) == "accepted"
        for each in receivers:
            each.detach()
        await world.settle()
        waiting = [
            int(str(Message.decode(each).subject))
            for each in await world.host.space().find("q").peek(1_000)
        ]
        assert sorted([*ended, *waiting]) == sorted(committed)
        rest = client.receiver("q")
        while world.stats("q").available:
            rest.grant(20)
            await world.settle()
            for delivery in unsettled(rest):
                ended.append(number(delivery))
                delivery.settle(ACCEPTED)
            await world.settle()
        assert sorted(ended) == sorted(committed)
        assert is_empty(world, "q")
