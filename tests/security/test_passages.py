"""Where messages may be let go: what eve tries, who manages ``eve/*`` and has no right elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from brokers import client_of

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import (
    KINDS,
    LOG,
    QUEUE,
    SCHEDULE,
    TOPIC,
    Log,
    Queue,
    Schedule,
    Topic,
    passages_of,
)
from amqp_rt.container.connections import Connection
from amqp_rt.errors import AmqpError, CallFailed, DeliveryRejected, LinkRefused
from amqp_rt.events import Peer
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.security.access import Access, Passage, Rights, Rule, decide_passages, reserved
from amqp_rt.security.mechanisms import Plain
from amqp_rt.security.tokens import Cbs, SasKey, SasKeys, Tokens

UNAUTHORIZED = "amqp:unauthorized-access"
SEND, LISTEN, MANAGE = Rights.SEND, Rights.LISTEN, Rights.MANAGE
ACCESS = Access(
    [
        Rule("eve/*", MANAGE, users=("eve",)),
        # Patterns that match more than they are meant for.
        Rule("*/eve", MANAGE, users=("eve",)),
        Rule("payments", SEND, users=("bob",)),
        Rule("payments", LISTEN, users=("till",)),
        Rule("old-payments", SEND | LISTEN, users=("late",)),
        Rule("*", MANAGE, users=("root",)),
    ]
)
USERS = {"eve": "e", "bob": "b", "till": "t", "late": "l", "root": "r"}


@asynccontextmanager
async def bank(**options: Any) -> AsyncIterator[Broker]:
    options = {"access": ACCESS, "plain_in_clear": True, "users": USERS, **options}
    broker = Broker("b", **options)
    broker.container.rpc("eve/echo")(lambda body: body)
    async with broker:
        await broker.declare(
            Queue("payments", aliases=("old-payments",)),
            Queue("eve/mine"),
            Log("eve/log"),
            Schedule("eve/tick", to="eve/mine", every_s=3600),
        )
        await broker.listen("memory://b")
        yield broker


def as_user(broker: Broker, user: str) -> Any:
    return client_of(broker, user, auth=Plain(user, USERS[user]))


async def ask(peer: Connection, operation: str, body: Any = None, **given: Any) -> str:
    """The status of an operation at $management."""
    asked = Message(
        body, body_kind="value", application_properties={"operation": operation, **given}
    )
    try:
        reply = await peer.call("$management", asked, reply=Message, within=5)
    except CallFailed as error:
        return str(error.info.get("statusCode") or error.condition)
    return str(reply.application_properties["statusCode"])


async def refused(link: Any) -> str:
    with pytest.raises(LinkRefused) as caught:
        await link.wait_attached()
    return caught.value.condition


# --- by management ---------------------------------------------------------------------------

#: Attributes that name another address, and what eve tries with each.
ATTEMPTS: dict[str, list[Any]] = {
    "dead_letter": [
        "payments",
        "old-payments",
        "nowhere",
        "/exchanges/amq.fanout",
        "/exchanges/amq%2Efanout/eve",
        "/exchanges/amq.fanout/eve",
        "/exchanges/",
        "/exchanges//",
        "/exchanges//payments",
        "/exchanges//old-payments",
        "/queues/payments",
        "amqp://b/payments",
        "amqp://b/eve",
        "$cbs",
        "$management",
        "$journal",
        "eve/$management",
        "payments/$management",
        "eve/log/partitions/0",
    ],
    "to": [
        "payments",
        "nowhere",
        "old-payments",
        "/exchanges/amq.fanout",
        "/exchanges/amq.fanout/eve",
        "/queues/payments",
        "amqp://b/payments",
        "amqp://b/eve",
        "$cbs",
        "$management",
        "$journal",
        "eve/$management",
        "payments/$management",
        "eve/log/partitions/0",
    ],
    "aliases": [
        ["payments"],
        ["nowhere"],
        ["eve/fine", "payments"],
        ["old-payments"],
        ["/exchanges/amq.fanout"],
        ["/exchanges/amq.fanout/eve"],
        ["/queues/payments"],
        ["/queues/eve"],
        ["amqp://b/payments"],
        ["amqp://b/eve"],
        ["$cbs"],
        ["$management"],
        ["$journal"],
        ["eve/$management"],
        ["payments/$management"],
        ["eve/log/partitions/0"],
        ["eve/log/ConsumerGroups/eve/Partitions/0"],
    ],
}
#: Kinds of nodes that have aliases.
ALIASED = [QUEUE, TOPIC, LOG]
#: Attributes that name nothing. A new one has to be put here or above.
OTHERS = {
    "name",
    *("max_deliveries", "max_attempts", "ttl_s", "length_max", "bytes_max", "overflow"),
    *("priorities", "sort_key", "last_value_key", "groups", "group_key", "lock_s", "single_active"),
    *("exclusive", "check_user_id", "absolute_expiry", "duplicate_window_s", "browse_only"),
    *("redelivery_delay_s", "redelivery_delay_max_s", "redelivery_growth", "number_header"),
    # Which messages stay in the queue.
    "selector",
    # For which reasons messages go to the dead-letter address.
    "dead_letter_for",
    # The queue returns only messages that their sender could have sent there.
    "return_to_sender",
    # When a schedule sends what; who changes either needs the right to send to its destination.
    *("cron", "tz", "every_s", "payload", "catch_up", "durable"),
    *("backlog_max", "backlog_bytes_max", "partitions", "max_age_s", "max_bytes", "key_hash"),
}


def test_every_attribute_has_its_attempts() -> None:
    known = {field for kind in KINDS.values() for field in kind.__struct_fields__}
    assert known == set(ATTEMPTS) | OTHERS


@pytest.mark.req("SE11", "SE17", "G2", "B3")
@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
@pytest.mark.parametrize("attribute", ATTEMPTS)
async def test_no_attribute_leads_where_its_declarer_may_not(
    attribute: str, operation: str
) -> None:
    async with bank() as broker, as_user(broker, "eve") as eve:
        before = {each.name: each for each in broker.nodes()}
        name = "eve/new" if operation == "CREATE" else "eve/mine"
        kinds = ["queue"] if attribute == "dead_letter" or operation == "UPDATE" else ALIASED
        given: dict[str, Any] = {}
        if attribute == "to":
            name, kinds, given = "eve/tick", [SCHEDULE], {"every_s": 60}
        for value in ATTEMPTS[attribute]:
            for kind in kinds:
                body = {"kind": kind, attribute: value, **given}
                status = await ask(eve, operation, body, name=name)
                assert status == "403", (kind, value)
        after = {each.name: each for each in broker.nodes() if "dynamic" not in each.name}
        assert after == before


@pytest.mark.req("SE11", "SE17")
@pytest.mark.parametrize(
    "name", ["$cbs", "$management", "eve/$management", "/exchanges/eve", "/queues/eve", "a://b/eve"]
)
@pytest.mark.parametrize("user", ["eve", "root"])
async def test_no_node_is_called_like_what_is_the_brokers(name: str, user: str) -> None:
    name = name.replace("a://", "amqp://")
    async with bank() as broker, as_user(broker, user) as peer:
        assert await ask(peer, "CREATE", {}, name=name) == "403"
        assert await ask(peer, "CREATE", {"aliases": [name]}, name="eve/new") == "403"
        for declared in (Queue(name), Queue("x", aliases=(name,)), Topic("x", aliases=(name,))):
            with pytest.raises(AmqpError, match="no node can be called so"):
                await broker.declare(declared)


async def test_who_brings_tokens_does_not_manage_where_they_are_put() -> None:
    keys = SasKeys({"all": SasKey(("k",), MANAGE)})
    async with Broker("b", cbs=Cbs([keys])) as broker:
        peer, decide = Peer(), broker.container.permissions.decide
        peer.tokens = Tokens(DEFAULT_LIMITS)
        assert decide(peer, SEND, "$cbs") is None
        assert decide(peer, LISTEN, "$cbs") is None
        assert decide(peer, MANAGE, "$cbs") is not None


@pytest.mark.req("SE13")
async def test_a_broker_that_takes_no_tokens_makes_no_queue_for_them() -> None:
    async with Broker("b", auto_create=["queue:*"]) as broker:
        await broker.listen("memory://b")
        async with client_of(broker) as peer:
            for address in ("$cbs", "amqp://b/$cbs", "/exchanges/none"):
                assert await refused(peer.receiver(address)) == "amqp:not-found"
            async with peer.sender("q"):
                assert broker.has("q")


@pytest.mark.req("SE11")
async def test_what_was_declared_by_others_stays_as_it_is() -> None:
    async with bank() as broker, as_user(broker, "eve") as eve, as_user(broker, "root") as root:
        wanted = {"dead_letter": "payments", "aliases": ["front"]}
        assert await ask(root, "UPDATE", wanted, name="eve/mine") == "200"
        # An owner changes her own fields, and need not know of the rest.
        assert await ask(eve, "UPDATE", {"ttl_s": 1.0}, name="eve/mine") == "200"
        assert await ask(eve, "UPDATE", wanted, name="eve/mine") == "200"
        assert await ask(eve, "CREATE", {**wanted, "ttl_s": 1.0}, name="eve/mine") == "201"
        declared = broker.declaration("eve/mine")
        assert declared == Queue("eve/mine", dead_letter="payments", aliases=("front",), ttl_s=1.0)
        # Fields that she removes she cannot restore.
        assert await ask(eve, "UPDATE", {"dead_letter": None}, name="eve/mine") == "200"
        assert await ask(eve, "UPDATE", wanted, name="eve/mine") == "403"


# --- by an alias -----------------------------------------------------------------------------


@pytest.mark.req("SE11", "SE17", "B3")
async def test_an_alias_takes_the_rights_of_its_node() -> None:
    async with bank() as broker:
        async with as_user(broker, "bob") as bob, bob.sender(None) as relay:
            async with bob.sender("old-payments") as out:
                assert await out.send("x") == ACCEPTED
            assert await relay.send("x", to="old-payments") == ACCEPTED
            assert await refused(bob.receiver("old-payments")) == UNAUTHORIZED
        # A right at the alias alone is none.
        async with as_user(broker, "late") as late:
            assert await refused(late.sender("old-payments")) == UNAUTHORIZED
            with pytest.raises(LinkRefused) as caught:
                await late.receiver("amqp://b/old-payments").wait_attached()
            assert "'payments'" not in str(caught.value)
            async with late.sender(None) as relay:
                with pytest.raises(DeliveryRejected):
                    await relay.send("x", to="old-payments")
        async with as_user(broker, "eve") as eve:
            async with eve.sender("eve/echo") as echo:
                await echo.send(Message("x", reply_to="old-payments", message_id="1"))
            assert broker.stats("payments").enqueued == 2


@pytest.mark.req("SE17", "B3")
async def test_the_application_is_told_the_nodes_own_name() -> None:
    asked: list[tuple[str, str]] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        asked.append((address, role))
        return address != "secret"

    async with Broker("b", authorize=authorize) as broker:
        await broker.declare(Queue("secret", aliases=("open",)))
        await broker.listen("memory://b")
        async with client_of(broker) as peer, peer.sender(None) as relay:
            for address in ("secret", "open", "/queues/secret", "amqp://b/secret"):
                assert await refused(peer.sender(address)) == UNAUTHORIZED
                with pytest.raises(DeliveryRejected):
                    await relay.send("x", to=address)
    assert set(asked) == {("secret", "sender")}


@pytest.mark.req("SE17")
async def test_the_application_is_asked_about_what_management_declares() -> None:
    async def authorize(peer: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        if address == "away":
            broker.host.space().delete("away")
        return address not in ("payments", "dynamic") or role == "receiver"

    async with bank(authorize=authorize, access=None) as broker, as_user(broker, "eve") as eve:
        await broker.declare(Queue("away"))
        assert await ask(eve, "CREATE", {"dead_letter": "payments"}, name="x") == "403"
        assert await ask(eve, "UPDATE", {"dead_letter": "payments"}, name="eve/mine") == "403"
        assert await ask(eve, "CREATE", {"dead_letter": "eve/mine"}, name="x") == "201"
        # The node that was checked does not exist any more.
        assert await ask(eve, "CREATE", {"dead_letter": "away"}, name="y") == "409"
        assert not broker.has("y")


@pytest.mark.req("SE11", "M41")
async def test_a_reply_goes_to_the_address_that_was_judged() -> None:
    async with bank(auto_create=["queue:*"]) as broker, as_user(broker, "eve") as eve:
        async with eve.sender("eve/echo") as echo:
            for address in ("amqp://b/eve/mine", "/queues/eve/mine"):
                await echo.send(Message("x", reply_to=address, message_id="1"))
        assert broker.stats("eve/mine").enqueued == 2
        assert not any("amqp:" in each.name for each in broker.nodes())


@pytest.mark.req("SE11")
async def test_a_sender_to_an_exchange_takes_the_right_to_that_exchange() -> None:
    access = Access(
        [
            Rule("*/eve", SEND, users=("eve",)),
            Rule("/exchanges/amq.topic", SEND, users=("bob",)),
        ]
    )
    async with bank(access=access) as broker:
        async with as_user(broker, "eve") as eve:
            assert await refused(eve.sender("/exchanges/amq.topic/eve")) == UNAUTHORIZED
            assert await refused(eve.sender("/exchanges/amq.topic/x/eve")) == UNAUTHORIZED
        async with as_user(broker, "bob") as bob:
            for address in ("/exchanges/amq.topic/any.key", "/exchanges/amq%2Etopic/any.key"):
                async with bob.sender(address):
                    pass


# --- the one function ------------------------------------------------------------------------


def test_a_passage_takes_both_of_its_rights() -> None:
    def decide(peer: Peer, wanted: Rights, address: str) -> Error | None:
        return None if (wanted, address) in given else Error(UNAUTHORIZED, f"not {address}")

    passage = Passage("a", "b", LISTEN, SEND)
    given: set[tuple[Rights, str]] = set()
    for right, expected in (((LISTEN, "a"), "not b"), ((SEND, "b"), None)):
        given.add(right)
        error = decide_passages(decide, Peer(), [passage])
        if expected is None:
            assert error is None
        else:
            assert error is not None
            assert error.description == f"messages of 'a' would go to 'b', and {expected}"
    assert decide_passages(decide, Peer(), [passage, Passage("b", "c")]) is not None
    assert decide_passages(decide, Peer(), []) is None


def test_the_passages_of_a_declaration_are_those_that_are_new() -> None:
    declared = Queue("q", dead_letter="d", aliases=("a", "b"))
    dead = Passage("q", "d", MANAGE, SEND)
    one, other = Passage("a", "q", MANAGE, MANAGE), Passage("b", "q", MANAGE, MANAGE)
    made = Passage("q", "d", MANAGE, MANAGE)
    there, missing = {"d"}.__contains__, set[str]().__contains__
    assert passages_of(declared, None, there) == [one, other, dead]
    assert passages_of(declared, None, missing) == [one, other, dead, made]
    assert passages_of(declared, Queue("q", aliases=("b",)), there) == [one, dead]
    assert passages_of(declared, declared, missing) == []
    exchange = Queue("q", dead_letter="/exchanges/e")
    assert passages_of(exchange, declared, missing) == [Passage("q", "/exchanges/e", MANAGE, SEND)]
    assert passages_of(Topic("q"), Topic("q", aliases=("a",)), there) == []


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("q", False),
        ("$journal", False),
        ("cbs", False),
        ("$cbs", True),
        ("$management", True),
        ("q/$management", True),
        ("/exchanges/", True),
        ("/queues/q", True),
        ("amqps://host/q", True),
        ("http://host/q", False),
        ("q/$cbs", False),
    ],
)
def test_addresses_that_are_not_given(address: str, taken: bool) -> None:
    assert bool(reserved(address)) == taken


async def test_the_name_by_which_rights_are_given() -> None:
    async with bank() as broker:
        container, peer = broker.container, Peer()
        for address, name in {
            "payments": "payments",
            "old-payments": "payments",
            "/queues/old-payments": "payments",
            "amqp://b/old-payments": "payments",
            "nowhere": "nowhere",
            "/exchanges/a%2Eb/key": "/exchanges/a.b",
            "/exchanges//q": "q",
            "/exchanges/": "*",
            "eve/log/partitions/0": "eve/log/partitions/0",
        }.items():
            assert container.permissions.own_name(peer, address) == name
