"""Rights in a namespace: each row of the security matrix, for keys of the namespace and of the entity."""

from __future__ import annotations

import http.client
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
import security_matrix as matrix
import trio
from amqp_rt_servicebus.declarations import Queue, Right, SasKey, Subscription, Topic
from amqp_rt_servicebus.namespace import Namespace
from amqp_rt_servicebus.operations import OPERATIONS as NAMES
from amqp_rt_servicebus.rule_values import RULE

from amqp_rt import Connection, Container, Message
from amqp_rt.broker import Broker
from amqp_rt.errors import AmqpError, CallFailed
from amqp_rt.security.tokens import SAS_TYPE, sas_token
from amqp_rt.values import Array, Described, Int, Symbol, Timestamp

pytestmark = [pytest.mark.req("Z16"), pytest.mark.slow]

Operation = Callable[[Connection, int, str], Awaitable[Any]]
RIGHTS: dict[str, tuple[Right, ...]] = {
    "send": ("Send",),
    "listen": ("Listen",),
    "manage": ("Send", "Listen", "Manage"),
}
KEYS = {right: SasKey(right, rights=rights) for right, rights in RIGHTS.items()}


def sends(address: str) -> Operation:
    async def attach(peer: Connection, port: int, token: str) -> None:
        async with peer.sender(address) as link:
            await link.wait_attached()

    return attach


def receives(address: str) -> Operation:
    async def attach(peer: Connection, port: int, token: str) -> None:
        async with peer.receiver(address) as link:
            await link.wait_attached()

    return attach


def asks(operation: str, body: dict[str, Any], address: str = "q") -> Operation:
    async def ask(peer: Connection, port: int, token: str) -> None:
        asked = Message(
            body,
            body_kind="value",
            application_properties={"operation": f"com.microsoft:{operation}"},
        )
        try:
            await peer.call(f"{address}/$management", asked, reply=Message, within=5)
        except CallFailed as error:
            # Whatever else is wrong with the request is not about rights.
            if error.info.get("statusCode") in (400, 404, 410):
                return
            raise

    return ask


def requests(method: str, path: str) -> Operation:
    async def request(peer: Connection, port: int, token: str) -> None:
        def send() -> int:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            client.request(method, path, headers={"Authorization": token} if token else {})
            try:
                return client.getresponse().status
            finally:
                client.close()

        status = await trio.to_thread.run_sync(send)
        if status in (401, 403):
            raise AmqpError("refused", condition=str(status))

    return request


ONE = bytes(Message("x").encode())
LATER = Timestamp(4_000_000_000_000)
OPERATIONS: dict[str, Operation] = {
    "attach a link that sends to q": sends("q"),
    "attach a link that receives from q": receives("q"),
    "attach a link that receives dead letters of q": receives("q/$DeadLetterQueue"),
    "peek-message": asks("peek-message", {"from-sequence-number": 0, "message-count": Int(1)}),
    "batch-delete-messages": asks(
        "batch-delete-messages", {"message-count": Int(1), "enqueued-time-utc": Timestamp(0)}
    ),
    "receive-by-sequence-number": asks(
        "receive-by-sequence-number", {"sequence-numbers": Array([9], of=int)}
    ),
    "renew-lock": asks("renew-lock", {"lock-tokens": Array([uuid4()], of=UUID)}),
    "update-disposition": asks(
        "update-disposition",
        {"lock-tokens": Array([uuid4()], of=UUID), "disposition-status": "completed"},
    ),
    "schedule-message": asks(
        "schedule-message",
        {"messages": [{"message-id": "1", "message": ONE}]},
    ),
    "cancel-scheduled-message": asks(
        "cancel-scheduled-message", {"sequence-numbers": Array([9], of=int)}
    ),
    "renew-session-lock": asks("renew-session-lock", {"session-id": "s"}),
    "get-session-state": asks("get-session-state", {"session-id": "s"}),
    "set-session-state": asks("set-session-state", {"session-id": "s", "session-state": None}),
    "get-message-sessions": asks(
        "get-message-sessions", {"last-updated-time": LATER, "skip": Int(0), "top": Int(9)}
    ),
    "add-rule": asks(
        "add-rule",
        {"rule-name": "r", "rule-description": Described(Symbol(RULE), [])},
        "q/subscriptions/s",
    ),
    "remove-rule": asks("remove-rule", {"rule-name": "r"}, "q/subscriptions/s"),
    "enumerate-rules": asks(
        "enumerate-rules", {"skip": Int(0), "top": Int(9)}, "q/subscriptions/s"
    ),
    "GET q over HTTP": requests("GET", "/q"),
    "PUT q over HTTP": requests("PUT", "/q"),
    "DELETE q over HTTP": requests("DELETE", "/q"),
    "list the queues over HTTP": requests("GET", "/$Resources/queues"),
}


@asynccontextmanager
async def holder(url: str, right: str, place: str) -> AsyncIterator[tuple[Connection, str]]:
    """Connect a client with a token of the key *right*; for nothing, without a token."""
    token = ""
    if right != "nothing":
        key = "manage" if right == "elsewhere" else right
        resource = f"sb://127.0.0.1/{'others' if right == 'elsewhere' else place}"
        token = sas_token(resource, key, key, 4_000_000_000)
    async with (
        Container("client") as client,
        client.connect(url, sasl=["ANONYMOUS"], reconnect=None) as peer,
    ):
        await peer.wait_open()
        if token:
            put = Message(
                token,
                application_properties={
                    "operation": "put-token",
                    "type": SAS_TYPE,
                    "name": token.partition("&")[0],
                },
            )
            async with peer.sender("$cbs") as cbs:
                await cbs.send(put)
        yield peer, token


@pytest.mark.parametrize("keys", ["namespace", "entity"])
async def test_who_may_do_what_in_a_namespace(keys: str) -> None:
    rows = matrix.RIGHTS_IN_NAMESPACES
    assert set(OPERATIONS) == set(rows)
    wrong = []
    own = KEYS if keys == "entity" else {}
    for right in matrix.RIGHTS:
        for name, operation in OPERATIONS.items():
            # A queue, or for rules a topic of the same name.
            entity: Any = Queue("q", keys=own)
            if "rule" in name:
                entity = Topic("q", [Subscription("s")], keys=own)
            namespace = Namespace(
                entity,
                Queue("others", keys={"manage": KEYS["manage"]}),
                keys=KEYS if keys == "namespace" else {"root": SasKey("root")},
            )
            async with Broker("shop", addons=[namespace]) as broker:
                (url,) = await broker.listen("amqp://127.0.0.1:0")
                place = "" if keys == "namespace" else "q"
                async with holder(url, right, place) as (peer, token):
                    expected = rows[name][right]
                    if keys == "entity" and name == "list the queues over HTTP":
                        # The key of an entity gives no right at the namespace.
                        expected = "401"
                    try:
                        with trio.fail_after(5):
                            await operation(peer, int(url.rpartition(":")[2]), token)
                        found = matrix.ALLOWED
                    except CallFailed as error:
                        found = str(error.info.get("statusCode") or error.condition)
                    except AmqpError as error:
                        found = error.condition
                    if found != expected:
                        wrong.append((name, right, found, expected))
    assert wrong == [], "\n".join(map(str, wrong))


def test_every_operation_of_a_namespace_has_a_row() -> None:
    names = {name.partition(":")[2] for name in NAMES}
    assert names <= set(matrix.RIGHTS_IN_NAMESPACES)
