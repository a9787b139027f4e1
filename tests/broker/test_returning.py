"""Messages that are given up for any reason return to their sender, and only where it may send to."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import World

from amqp_rt import Access, Broker, Message, Peer, Rights, Rule
from amqp_rt.broker.nodes import Queue
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified, Rejected, rejected
from amqp_rt.stores.memory import MemoryStore

BACK = Queue("q", return_to_sender=True, dead_letter="dead", max_deliveries=2, max_attempts=3)


def reasons(world: World, address: str) -> list[tuple[Any, Any]]:
    found = [Message.decode(each) for each in world.peek(address, 100)]
    return [(each.body, each.message_annotations["x-opt-dead-letter-reason"]) for each in found]


@pytest.mark.req("B15", "M21", "M22", "M23")
@pytest.mark.parametrize(
    ("outcome", "times", "reason"),
    [
        (rejected("amqp:decode-error"), 1, "rejected"),
        (Modified(delivery_failed=True), 2, "max-deliveries"),
        (RELEASED, 3, "max-attempts"),
        (Modified(), 3, "max-attempts"),
        (ACCEPTED, 1, None),
    ],
)
def test_the_outcome_says_when_a_message_goes_back(
    outcome: Any, times: int, reason: str | None
) -> None:
    world = World(BACK, Queue("replies"))
    client = world.client()
    client.sender("q").send("m", reply_to="replies")
    receiver = client.receiver("q")
    for n in range(times):
        assert reasons(world, "replies") == []
        receiver.grant(1)
        receiver.settle(outcome, n)
    assert len(receiver.bodies) == times
    assert reasons(world, "replies") == ([] if reason is None else [("m", reason)])
    assert reasons(world, "dead") == []
    assert world.stats("q").available == 0


@pytest.mark.req("B15", "B14")
def test_the_default_outcome_of_a_lost_link_does_too() -> None:
    world = World(BACK, Queue("replies"))
    world.client().sender("q").send("m", reply_to="replies")
    client = world.client()
    client.receiver("q", credit=1, default_outcome=Rejected())
    client.cut()
    assert reasons(world, "replies") == [("m", "rejected")]


@pytest.mark.req("B15")
def test_so_do_time_and_room() -> None:
    world = World(
        Queue("q", return_to_sender=True, length_max=1, overflow="drop-head"), Queue("replies")
    )
    out = world.client().sender("q")
    out.send("pushed out", "late", reply_to="replies", ttl_s=10)
    world.time.now += 11
    world.host.sweep()
    assert reasons(world, "replies") == [("pushed out", "overflow"), ("late", "expired")]


# --- Rights ---

RULES = Access(
    [
        Rule("q", Rights.SEND | Rights.LISTEN, anonymous=True),
        Rule("plain", Rights.SEND | Rights.LISTEN, anonymous=True),
        Rule("open", Rights.SEND, anonymous=True),
    ]
)


async def given_up(broker: Broker, *addresses: str) -> dict[str, list[Any]]:
    await broker.host.wait_kept()
    return {
        address: [Message.decode(each).body for each in await broker.peek(address, 100)]
        for address in addresses
    }


async def reject_all(broker: Broker, address: str, count: int) -> None:
    async with broker.local() as peer, peer.receiver(address) as messages:
        for _ in range(count):
            delivery = await messages.receive()
            delivery.reject("no")


@pytest.mark.req("B15", "SE17", "SE11")
async def test_a_message_goes_nowhere_its_sender_may_not_send_to() -> None:
    store = MemoryStore()
    nodes = [
        Queue("q", return_to_sender=True, dead_letter="dead"),
        Queue("plain", dead_letter="later"),
        Queue("later", return_to_sender=True, dead_letter="dead"),
        Queue("open"),
        Queue("secret"),
    ]
    async with Broker(store=store, access=RULES) as broker:
        await broker.declare(*nodes)
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with broker.connect(url) as peer, broker.local() as trusted:
            async with peer.sender("q") as out, trusted.sender("q") as ours:
                for durable in (False, True):
                    await out.send(
                        "open durable" if durable else "open", reply_to="open", durable=durable
                    )
                    await out.send(
                        "secret durable" if durable else "secret",
                        reply_to="secret",
                        durable=durable,
                    )
                    await ours.send(
                        "ours durable" if durable else "ours", reply_to="secret", durable=durable
                    )
                broker.publish("q", Message("within", reply_to="secret").encode())
                async with peer.transaction() as txn:
                    await out.send("in a txn", reply_to="secret", transaction=txn)
                    await out.send("in a txn", reply_to="open", transaction=txn)
            async with peer.sender(None) as relay:
                await relay.send("relayed", to="q", reply_to="secret")
            async with peer.sender("plain") as plain:
                # The message arrives by a detour on which rights were not checked.
                await plain.send("detour", reply_to="secret")
        await reject_all(broker, "q", 10)
        await reject_all(broker, "plain", 1)
        await reject_all(broker, "later", 1)
        found = await given_up(broker, "open", "secret", "dead")
        assert found["open"] == ["open", "open durable", "in a txn"]
        assert found["secret"] == ["ours", "ours durable", "within"]
        assert found["dead"] == [
            "secret",
            "secret durable",
            "in a txn",
            "relayed",
            "detour",
        ]


@pytest.mark.req("B15", "B7")
async def test_what_its_sender_might_is_known_after_a_restart() -> None:
    store = MemoryStore()
    nodes = [Queue("q", return_to_sender=True, dead_letter="dead"), Queue("open"), Queue("secret")]
    async with Broker(store=store, access=RULES) as broker:
        await broker.declare(*nodes)
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        async with broker.connect(url) as peer, peer.sender("q") as out:
            await out.send("open", reply_to="open", durable=True)
            await out.send("secret", reply_to="secret", durable=True)
    async with Broker(store=store, access=RULES) as broker:
        await reject_all(broker, "q", 2)
        assert await given_up(broker, "open", "secret", "dead") == {
            "open": ["open"],
            "secret": [],
            "dead": ["secret"],
        }


@pytest.mark.req("B15", "SE17")
async def test_what_cannot_be_asked_at_once_is_not_granted() -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        return True

    async with Broker(authorize=authorize) as broker, broker.local() as peer:
        await broker.declare(Queue("q", return_to_sender=True, dead_letter="dead"), Queue("open"))
        async with peer.sender("q") as out:
            await out.send("m", reply_to="open")
        await reject_all(broker, "q", 1)
        assert await given_up(broker, "open", "dead") == {"open": [], "dead": ["m"]}
