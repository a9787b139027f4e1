"""Rights at the door: links, the anonymous terminus, replies, dynamic nodes, transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
from brokers import client_of

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.errors import AmqpError, DeliveryRejected, LinkRefused
from amqp_rt.events import Peer
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.mechanisms import Plain

SEND, LISTEN, MANAGE = Rights.SEND, Rights.LISTEN, Rights.MANAGE
USERS = {"shop": "s", "eve": "e", "root": "r", "nobody": "n"}

ACCESS = Access(
    [
        Rule("orders", SEND, users=("shop", "eve")),
        Rule("echo", SEND, users=("shop", "eve")),
        Rule("replies", SEND | LISTEN, users=("shop",)),
        Rule("inbox", SEND, users=("shop", "eve")),
        Rule("*", MANAGE, users=("root",)),
    ]
)


@asynccontextmanager
async def broker_with(access: Access = ACCESS, **options: Any) -> AsyncIterator[Broker]:
    broker = Broker("b", users=USERS, access=access, plain_in_clear=True, **options)
    broker.container.node("inbox")(lambda body: None)
    broker.container.rpc("echo")(lambda body: body)
    async with broker:
        await broker.declare(Queue("orders"), Queue("secret"), Queue("replies"))
        await broker.listen("memory://b")
        yield broker


def as_user(broker: Broker, user: str) -> AbstractAsyncContextManager[Connection]:
    return client_of(broker, user, auth=Plain(user, USERS[user]))


async def refused(link: Any) -> str:
    with pytest.raises(LinkRefused) as caught:
        await link.wait_attached()
    return caught.value.condition


UNAUTHORIZED = "amqp:unauthorized-access"


@pytest.mark.req("SE11", "SE17")
async def test_links_get_what_the_rules_give() -> None:
    async with broker_with() as broker, as_user(broker, "shop") as peer:
        async with peer.sender("orders") as out:
            await out.send("x")
        async with peer.sender("inbox") as out:
            await out.send("x")
        async with peer.receiver("replies"):
            pass
        assert await refused(peer.receiver("orders")) == UNAUTHORIZED
        assert await refused(peer.receiver("orders", mode="copy")) == UNAUTHORIZED
        assert await refused(peer.sender("secret")) == UNAUTHORIZED
        # Whether there is such a node is nobody's business who has no right there.
        assert await refused(peer.sender("nowhere")) == UNAUTHORIZED
        assert await refused(peer.sender("$management")) == UNAUTHORIZED
        async with as_user(broker, "root") as root:
            async with root.sender("secret"), root.receiver("secret"):
                pass
            assert await refused(root.sender("nowhere")) == "amqp:not-found"


@pytest.mark.req("SE17")
@pytest.mark.parametrize(
    "address", ["amqp://b/secret", "amqps://other:1/secret?x=1", "sb://b/secret/"]
)
async def test_another_name_of_a_node_is_the_same_node(address: str) -> None:
    access = Access([Rule("amqp*", MANAGE, users=("shop",)), Rule("sb*", MANAGE, users=("shop",))])
    async with broker_with(access) as broker, as_user(broker, "shop") as peer:
        assert await refused(peer.sender(address)) == UNAUTHORIZED
        assert await refused(peer.receiver(address)) == UNAUTHORIZED
        async with peer.sender(None) as relay:
            with pytest.raises(DeliveryRejected):
                await relay.send("x", to=address)


@pytest.mark.req("SE11", "M41")
async def test_the_anonymous_terminus_asks_for_each_address() -> None:
    async with (
        broker_with() as broker,
        as_user(broker, "eve") as peer,
        peer.sender(None) as relay,
    ):
        assert await relay.send("x", to="orders") == ACCEPTED
        assert await relay.send("x", to="inbox") == ACCEPTED
        for address in ("secret", "replies", "nowhere"):
            with pytest.raises(DeliveryRejected) as caught:
                await relay.send("x", to=address)
            assert caught.value.condition == UNAUTHORIZED
        assert await relay.send("x", to="orders") == ACCEPTED
        assert broker.stats("secret").enqueued == 0


@pytest.mark.req("SE11", "R3")
async def test_a_transaction_is_no_way_around() -> None:
    async with broker_with() as broker, as_user(broker, "eve") as peer:
        async with peer.sender(None) as relay:
            with pytest.raises(AmqpError):
                async with peer.transaction() as txn:
                    await relay.send("x", to="secret", transaction=txn)
            async with peer.transaction() as txn:
                await relay.send("x", to="orders", transaction=txn)
        assert broker.stats("secret").enqueued == 0
        assert broker.stats("orders").available == 1
    async with broker_with() as broker, as_user(broker, "nobody") as peer:
        with pytest.raises(AmqpError) as caught:
            async with peer.transaction():
                pass
        assert caught.value.condition == UNAUTHORIZED


@pytest.mark.req("SE11", "R3", "M41")
async def test_a_transaction_of_the_relay_is_discharged_at_once() -> None:
    async with (
        broker_with() as broker,
        as_user(broker, "eve") as peer,
        peer.sender(None) as relay,
    ):
        txn = await peer.transaction().__aenter__()
        sent = relay.send_nowait("x", to="orders", transaction=txn)
        # The discharge is in the same chunk as the message.
        discharged = txn._control.discharge(txn._id, {})
        assert await discharged.outcome() == ACCEPTED
        await sent.outcome()
        assert broker.stats("orders").available == 1


@pytest.mark.req("SE11")
async def test_who_has_no_rights_gets_no_dynamic_node_and_no_relay() -> None:
    async with broker_with() as broker, as_user(broker, "nobody") as peer:
        assert await refused(peer.receiver(dynamic=True)) == UNAUTHORIZED
        assert await refused(peer.sender(None)) == UNAUTHORIZED


@pytest.mark.req("SE11")
@pytest.mark.parametrize("asks", [True, False])
async def test_a_reply_goes_nowhere_that_its_caller_may_not_send_to(asks: bool) -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    options: Any = {"authorize": authorize} if asks else {}
    async with (
        broker_with(**options) as broker,
        as_user(broker, "eve") as eve,
        as_user(broker, "shop") as shop,
    ):
        for peer, address in ((eve, "secret"), (eve, "replies"), (shop, "replies")):
            async with peer.sender("echo") as out:
                await out.send(Message("x", reply_to=address, message_id="1"))
        assert broker.stats("secret").enqueued == 0
        assert broker.stats("replies").enqueued == 1
        # An address that was made for a link is for whoever was given it.
        assert await eve.call("echo", "y") == "y"
        async with shop.receiver(dynamic=True) as replies, eve.sender("echo") as out:
            await out.send(Message("z", reply_to=replies.address, message_id="2"))
            async with await replies.receive() as delivery:
                assert delivery.body == "z"
        async with shop.receiver(dynamic=True) as replies:
            assert await refused(eve.receiver(replies.address)) == UNAUTHORIZED
            async with eve.sender(replies.address) as out:
                await out.send("direct")


@pytest.mark.req("SE17")
async def test_the_application_has_a_say_besides_the_rules() -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        return address != "orders"

    async with broker_with(authorize=authorize) as broker, as_user(broker, "shop") as peer:
        assert await refused(peer.sender("orders")) == UNAUTHORIZED
        assert await refused(peer.sender("secret")) == UNAUTHORIZED
        async with peer.sender("inbox"):
            pass


async def test_the_process_itself_may_do_everything() -> None:
    async with broker_with() as broker, broker.local() as peer, peer.sender("secret") as out:
        await out.send("x")
