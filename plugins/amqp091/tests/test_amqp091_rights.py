"""What eve tries over 0-9-1, who manages ``eve*`` and has no right elsewhere."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from amqp_rt_amqp091 import Front, connect
from amqp_rt_amqp091.methods import BasicProperties

from amqp_rt import Access, Broker, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.broker.nodes import Declaration
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Peer, QueueDeclaration

UNAUTHORIZED = "amqp:unauthorized-access"
ACCESS = Access(
    [
        Rule("eve*", Rights.MANAGE, users=("eve",)),
        Rule("/exchanges/eve*", Rights.MANAGE, users=("eve",)),
        Rule("*/eve", Rights.MANAGE, users=("eve",)),
        Rule("*", Rights.MANAGE, users=("root",)),
    ]
)


def leading(wanted: QueueDeclaration) -> Declaration:
    """A queue type of the application, which makes what its arguments say."""
    given: dict[str, Any] = {
        name: value for name, value in wanted.arguments.items() if name != "x-queue-type"
    }
    return Queue(wanted.name, **given)


@asynccontextmanager
async def bank(**options: Any) -> AsyncIterator[tuple[Broker, Any, Any]]:
    """A broker, and what root and eve have opened there."""
    options = {"access": ACCESS, "queue_types": {"x-leading": leading}, **options}
    async with Broker(
        fronts=[Front()],
        users={"eve": "e", "root": "r"},
        plain_in_clear=True,
        volatile=True,
        **options,
    ) as broker:
        await broker.declare(Queue("payments", aliases=("old-payments",)), Queue("secret"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        with trio.fail_after(60):
            async with (
                connect(url.replace("//", "//root:r@")) as root,
                connect(url.replace("//", "//eve:e@")) as eve,
            ):
                async with root.channel() as channel:
                    await channel.declare_exchange("vault", "fanout")
                    await channel.bind_queue("secret", "vault")
                    await channel.declare_exchange("services", "system")
                async with eve.channel() as channel:
                    await channel.declare_queue("eve")
                    await channel.declare_exchange("eve", "fanout")
                    await channel.bind_queue("eve", "eve")
                yield broker, root, eve


Attempt = Callable[[Any], Awaitable[Any]]


def queue(name: str = "eve-new", **arguments: Any) -> Attempt:
    given = {key.replace("_", "-"): value for key, value in arguments.items()}
    return lambda channel: channel.declare_queue(name, arguments=given)


def dead_letters(exchange: str, key: str | None = None, **options: Any) -> Attempt:
    arguments: dict[str, Any] = {"x-dead-letter-exchange": exchange, "x-message-ttl": 1}
    if key is not None:
        arguments["x-dead-letter-routing-key"] = key
    return lambda channel: channel.declare_queue("eve-new", arguments=arguments, **options)


def made_by_type(**fields: Any) -> Attempt:
    arguments = {"x-queue-type": "x-leading", **fields}
    return lambda channel: channel.declare_queue("eve-new", arguments=arguments)


def exchange(**arguments: Any) -> Attempt:
    given = {"-".join(key.split("_")): value for key, value in arguments.items()}
    return lambda channel: channel.declare_exchange("eve-new", "direct", arguments=given)


def published(exchange: str, key: str, **headers: Any) -> Attempt:
    properties = BasicProperties(headers=headers)
    return lambda channel: channel.publish(b"x", exchange=exchange, key=key, properties=properties)


#: Attempts that are refused for lack of a right.
ATTEMPTS: dict[str, Attempt] = {
    "dead letters to a queue": dead_letters("", "payments"),
    "of a transient queue": dead_letters("", "payments", exclusive=True),
    "of a queue that goes by itself": dead_letters("", "payments", auto_delete=True),
    "of a durable queue": dead_letters("", "payments", durable=True),
    "of a queue that the broker names": lambda channel: channel.declare_queue(
        arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "payments"}
    ),
    "of a quorum queue": queue(
        x_queue_type="quorum", x_dead_letter_exchange="", x_dead_letter_routing_key="payments"
    ),
    "dead letters to an alias": dead_letters("", "old-payments"),
    "dead letters to what is not there": dead_letters("", "nowhere"),
    "dead letters to where their keys say": dead_letters(""),
    "dead letters to an exchange": dead_letters("vault"),
    "dead letters to an exchange with a key": dead_letters("vault", "eve"),
    "dead letters to an exchange that is not there": dead_letters("nowhere"),
    "dead letters to tokens": dead_letters("", "$cbs"),
    "dead letters to management": dead_letters("", "$management"),
    "dead letters to a management node": dead_letters("", "eve/$management"),
    "dead letters to an address of an exchange": dead_letters("", "/exchanges/vault"),
    "dead letters to an address of an exchange by its key": dead_letters(
        "", "/exchanges/vault/eve"
    ),
    "dead letters to an address of a queue": dead_letters("", "/queues/payments"),
    "dead letters to an address of a queue that fits": dead_letters("", "/queues/eve"),
    "a type of queue with dead letters": made_by_type(dead_letter="payments"),
    "a type of queue with an alias": made_by_type(aliases=["payments-2"]),
    "an alternate exchange": exchange(alternate_exchange="vault"),
    "an alternate exchange that is not there": exchange(alternate_exchange="nowhere"),
    "an alternate exchange in the older spelling": lambda channel: channel.declare_exchange(
        "eve-new", "direct", arguments={"alternate_exchange": "vault"}
    ),
    "a binding that reads": lambda channel: channel.bind_queue("eve", "vault"),
    "a binding that fills": lambda channel: channel.bind_queue("payments", "eve"),
    "a binding by an alias": lambda channel: channel.bind_queue("old-payments", "eve"),
    "a binding of exchanges that reads": lambda channel: channel.bind_exchange("eve", "vault"),
    "a binding of exchanges that fills": lambda channel: channel.bind_exchange("vault", "eve"),
    "no binding any more": lambda channel: channel.unbind_queue("secret", "vault"),
    "purging": lambda channel: channel.purge_queue("payments"),
    "purging by an alias": lambda channel: channel.purge_queue("old-payments"),
    "deleting": lambda channel: channel.delete_queue("payments"),
    "deleting by an alias": lambda channel: channel.delete_queue("old-payments"),
    "deleting an exchange": lambda channel: channel.delete_exchange("vault"),
    "looking": lambda channel: channel.declare_queue("payments", passive=True),
    "looking by an alias": lambda channel: channel.declare_queue("old-payments", passive=True),
    "declaring by an alias": lambda channel: channel.declare_queue("old-payments"),
    "the name of the node for tokens": queue("$cbs"),
    "the name of management": queue("$management"),
    "the name of a management node": queue("eve/$management"),
    "the name of an address of an exchange": queue("/exchanges/eve"),
    "the name of an address of a queue": queue("/queues/eve"),
    "getting": lambda channel: channel.get("payments"),
    "getting by an alias": lambda channel: channel.get("old-payments"),
    "publishing": published("", "payments"),
    "publishing by an alias": published("", "old-payments"),
    "publishing a copy": published("", "eve", CC=["payments"]),
    "publishing a blind copy": published("", "eve", BCC=["payments"]),
    "publishing to an exchange": published("vault", ""),
    "publishing to a service": published("services", "payments"),
}


@pytest.mark.req("SE11", "SE17", "N11", "N12")
async def test_no_declaration_leads_where_its_declarer_may_not() -> None:
    async with bank() as (broker, _root, eve):
        before = {each.name for each in broker.nodes()}
        exchanges = len(broker.topologies.space("").exchanges)
        wrong = []
        for name, attempt in ATTEMPTS.items():
            try:
                async with eve.channel() as channel:
                    await attempt(channel)
            except AmqpError as error:
                if error.condition == UNAUTHORIZED:
                    continue
                wrong.append((name, str(error)))
            else:
                wrong.append((name, "allowed"))
        assert wrong == []
        assert {each.name for each in broker.nodes()} == before
        assert len(broker.topologies.space("").exchanges) == exchanges
        for each in ("payments", "secret"):
            assert broker.stats(each).enqueued == 0


@pytest.mark.req("N11")
async def test_what_is_ones_own_may_lead_to_what_is_ones_own() -> None:
    async with bank() as (broker, root, eve):
        async with eve.channel() as channel:
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "eve-dead"}
            await channel.declare_queue("eve-1", arguments=arguments)
            assert broker.has("eve-dead")
            await channel.declare_queue("eve-2", arguments={"x-dead-letter-exchange": "eve"})
            await channel.declare_exchange("eve-x", arguments={"alternate-exchange": "eve"})
            await channel.publish(b"x", exchange="eve-x", key="k")
            assert (await channel.declare_queue("eve", passive=True)).messages == 1
            # A system exchange of one's own takes neither dead letters nor what comes by an alternate.
            await channel.declare_exchange("eve-s", "system")
            await channel.declare_exchange("eve-a", arguments={"alternate-exchange": "eve-s"})
            await channel.publish(b"x", exchange="eve-a", key="payments")
        assert broker.stats("payments").enqueued == 0
        # An existing queue stays usable for a user with the right to declare it again.
        arguments = {"x-dead-letter-exchange": "vault"}
        async with root.channel() as channel:
            await channel.declare_queue("eve-3", arguments=arguments)
            await channel.declare_exchange("eve-r", arguments={"alternate-exchange": "vault"})
        async with eve.channel() as channel:
            await channel.declare_queue("eve-3", arguments=arguments)
            await channel.declare_exchange("eve-r", arguments={"alternate-exchange": "vault"})


@pytest.mark.req("SE17")
async def test_where_the_application_is_asked_no_dead_letter_is_declared() -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    async with bank(authorize=authorize) as (broker, _root, eve):
        with pytest.raises(AmqpError, match="authorize= cannot be asked here") as caught:
            async with eve.channel() as channel:
                await channel.declare_queue("eve-1", arguments={"x-dead-letter-exchange": "eve"})
        assert caught.value.condition == UNAUTHORIZED
        await broker.declare(Queue("eve-2", dead_letter="/exchanges/eve"))
        async with eve.channel() as channel:
            await channel.declare_queue("eve-2")
            await channel.bind_queue("eve-2", "eve")


@pytest.mark.parametrize(
    ("attempt", "right"),
    [
        (lambda channel: channel.get("payments"), "the right to listen$"),
        (lambda channel: channel.get("nothing"), "the right to listen$"),
        (
            lambda channel: channel.declare_queue("payments", passive=True),
            "the right to listen, to send or to manage",
        ),
    ],
)
@pytest.mark.req("SE17")
async def test_a_refused_look_names_the_right_that_it_takes(attempt: Attempt, right: str) -> None:
    async with bank() as (_, _, eve), eve.channel() as channel:
        with pytest.raises(AmqpError) as caught:
            await attempt(channel)
        assert caught.value.condition == UNAUTHORIZED
        assert re.search(right, str(caught.value.description))
