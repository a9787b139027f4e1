"""Rights at a listener for RabbitMQ's clients: each row of the security matrix, by rules and by tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import jwt
import pytest
import security_matrix as matrix
import trio
from amqp_rt_rabbitmq.bindings import hash_of
from brokers import client_of
from rabbit_requests import managing

from amqp_rt import Broker, Connection, Message, Plain, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError
from amqp_rt.events import Peer
from amqp_rt.fronts import Exchange
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.security.access import Access
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.tokens import Cbs

pytestmark = [pytest.mark.req("G4", "SE9", "SE18"), pytest.mark.slow]

SECRET = b"a secret of at least 32 octets, for HS256"
URL = "memory://rabbit"
HELD = {
    "elsewhere": ("elsewhere", Rights.SEND | Rights.LISTEN | Rights.MANAGE),
    "send": ("q", Rights.SEND),
    "listen": ("q", Rights.LISTEN),
    "manage": ("q", Rights.MANAGE),
}
WORDS = {Rights.SEND: "send", Rights.LISTEN: "listen", Rights.MANAGE: "manage"}
HASH = hash_of({"x": 1})

Operation = Callable[[Connection], Awaitable[Any]]


class Refused(Exception):
    """Answer with an error status."""


def asks(method: str, path: str, body: object = None) -> Operation:
    async def ask(peer: Connection) -> None:
        async with managing(peer) as manage:
            status, _ = await manage(method, path, body)
        if status[0] != "2":
            raise Refused(status)

    return ask


def attaches(make: Callable[[Connection], Any]) -> Operation:
    async def attach(peer: Connection) -> None:
        async with make(peer) as link:
            await link.wait_attached()

    return attach


async def relayed(peer: Connection) -> None:
    async with peer.sender(None) as out:
        await out.send(Message("x", to="/queues/q"))


async def managed(peer: Connection) -> None:
    async with managing(peer):
        pass


BINDING = {"source": "others", "destination_queue": "q", "binding_key": ""}
OPERATIONS: dict[str, Operation] = {
    "attach the links to /management": managed,
    "PUT /queues/q": asks("PUT", "/queues/q", {}),
    "PUT /queues/another": asks("PUT", "/queues/another", {}),
    "GET /queues/q": asks("GET", "/queues/q"),
    "GET /queues/not-there": asks("GET", "/queues/not-there"),
    "DELETE /queues/q": asks("DELETE", "/queues/q"),
    "DELETE /queues/not-there": asks("DELETE", "/queues/not-there"),
    "DELETE /queues/q/messages": asks("DELETE", "/queues/q/messages"),
    "PUT /exchanges/another": asks("PUT", "/exchanges/another", {}),
    "DELETE /exchanges/others": asks("DELETE", "/exchanges/others"),
    "DELETE /exchanges/not-there": asks("DELETE", "/exchanges/not-there"),
    "POST /bindings of q to an exchange of others": asks("POST", "/bindings", BINDING),
    "GET /bindings of q to an exchange of others": asks("GET", "/bindings?src=others&dstq=q&key="),
    "DELETE /bindings/… of q to an exchange of others": asks(
        "DELETE", "/bindings/src=others;dstq=q;key=;args="
    ),
    "DELETE /bindings/… with arguments, of q to an exchange of others": asks(
        "DELETE", f"/bindings/src=others;dstq=q;key=;args={HASH}"
    ),
    "attach a publisher to /queues/q": attaches(lambda peer: peer.sender("/queues/q")),
    "attach a publisher to /exchanges/others": attaches(
        lambda peer: peer.sender("/exchanges/others")
    ),
    "attach a consumer to /queues/q": attaches(lambda peer: peer.receiver("/queues/q")),
    "attach a consumer for replies": attaches(
        lambda peer: peer.receiver(dynamic=True, capabilities=("rabbitmq:volatile-queue",))
    ),
    "publish to q by its address in the message": relayed,
}


async def verified(user: str, password: str, peer: Peer) -> str | None:
    """Verify a login without the time that hashes of passwords take."""
    return user if password == "pw" else None


@asynccontextmanager
async def holder(right: str, source: str) -> AsyncIterator[Connection]:
    """Run a broker, and connect a client to it that holds *right* by *source*."""
    rules = [Rule(where, rights, users=(name,)) for name, (where, rights) in HELD.items()]
    by_rule = source == "rule"
    async with Broker(
        "shop",
        volatile=True,
        users=verified,
        access=Access(rules if by_rule else ()),
        cbs=None if by_rule else Cbs([Jwt(audience="shop", secret=SECRET)]),
        limits=Limits(token_deadline_s=60),
    ) as shop:
        await shop.declare(Queue("q"))
        peer = Peer(trusted=True)
        topology = shop.topologies.of(peer, Anchor(DEFAULT_LIMITS, peer, "s"))
        topology.declare_exchange(Exchange(name="others"))
        topology.bind_queue("q", "others", "", {"x": 1})
        await shop.listen(f"{URL}?profile=rabbitmq")
        password = "pw"
        if not by_rule and right != "nothing":
            where, rights = HELD[right]
            words = [f"{word}:{where}" for each, word in WORDS.items() if each in rights]
            said = {"aud": "shop", "sub": right, "exp": 4_000_000_000, "scope": " ".join(words)}
            password = jwt.encode(said, SECRET, "HS256")
        async with client_of(shop, url=URL, auth=Plain(right, password)) as client:
            yield client


@pytest.mark.parametrize("source", matrix.SOURCES)
async def test_who_may_do_what_with_a_client_of_rabbitmq(source: str) -> None:
    rows = matrix.RIGHTS_AT_RABBITMQ
    assert set(OPERATIONS) == set(rows)
    wrong = []
    for right in matrix.RIGHTS:
        for name, operation in OPERATIONS.items():
            async with holder(right, source) as peer:
                try:
                    with trio.fail_after(5):
                        await operation(peer)
                    found = matrix.ALLOWED
                except Refused as refused:
                    found = str(refused)
                except AmqpError as error:
                    found = error.condition
                if found != rows[name][right]:
                    wrong.append((name, right, found, rows[name][right]))
    assert wrong == [], "\n".join(map(str, wrong))
