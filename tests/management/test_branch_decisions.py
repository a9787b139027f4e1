"""Branches in doubt at ``$management``: who sees them, and what an operator may decide."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from branching import XaSession, xid_of
from brokers import client_of

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.errors import CallFailed
from amqp_rt.message import Message
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.mechanisms import Plain
from amqp_rt.transactions import XaStatus

XID = xid_of(1)
NAME = str(XID)
TYPE = "amqp_rt.branch"
ACCESS = Access(
    [
        Rule("*", Rights.MANAGE, users=("root",)),
        Rule("to/*", Rights.MANAGE | Rights.SEND, users=("shop",)),
    ]
)


@asynccontextmanager
async def prepared() -> AsyncIterator[tuple[Broker, XaSession]]:
    """Run a broker with a prepared branch, and one that is not."""
    users = {"root": "r", "shop": "s"}
    async with Broker(users=users, access=ACCESS, plain_in_clear=True, volatile=True) as broker:
        await broker.declare(Queue("to"), Queue("from"))
        await broker.listen("memory://b")
        session = XaSession(broker.host)
        session.work(XID, "new")
        assert session.now("prepare", XID) is XaStatus.OK
        session.work(xid_of(2), "other")
        yield broker, session


@asynccontextmanager
async def as_user(broker: Broker, name: str) -> AsyncIterator[Connection]:
    async with client_of(broker, name, auth=Plain(name, name[0])) as peer:
        yield peer


async def ask(peer: Connection, operation: str, **given: Any) -> tuple[int, Any]:
    message = Message(
        None, body_kind="value", application_properties={"operation": operation, **given}
    )
    try:
        reply = await peer.call("$management", message, reply=Message, within=5)
    except CallFailed as error:
        return int(str(error.info["statusCode"])), {}
    return reply.application_properties["statusCode"], reply.body


@pytest.mark.req("R13")
async def test_branches_in_doubt_are_listed() -> None:
    async with prepared() as (broker, _), as_user(broker, "root") as peer:
        _, found = await ask(peer, "QUERY", entityType=TYPE)
        rows = [dict(zip(found["attributeNames"], row, strict=True)) for row in found["results"]]
        assert [(row["name"], row["state"], row["user"]) for row in rows] == [
            (NAME, "prepared", "user")
        ]
        status, row = await ask(peer, "READ", type=TYPE, name=NAME)
        assert status == 200
        assert (row["format"], row["global_id"], row["branch_id"]) == (7, b"global-1".hex(), "62")
        assert row["prepared_at"] > 0
        assert (await ask(peer, "READ", type=TYPE, name=str(xid_of(2))))[0] == 404


@pytest.mark.req("R13")
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_an_operator_decides_and_the_coordinator_learns_of_it(outcome: str) -> None:
    async with prepared() as (broker, session), as_user(broker, "root") as peer:
        given = {"type": TYPE, "name": NAME}
        # One that is prepared cannot be forgotten.
        assert (await ask(peer, "DELETE", **given))[0] == 409
        status, row = await ask(peer, "RESOLVE-BRANCH", outcome=outcome, **given)
        assert (status, row["state"]) == (200, f"heuristic {outcome}")
        assert broker.stats("to").available == (outcome == "commit")
        expected = XaStatus.HEURISTIC_COMMIT if outcome == "commit" else XaStatus.HEURISTIC_ROLLBACK
        assert session.now("commit", XID) is expected
        assert (await ask(peer, "RESOLVE-BRANCH", outcome=outcome, **given))[0] == 409
        assert (await ask(peer, "DELETE", **given))[0] == 204
        assert session.now("commit", XID) == "amqp:not-found"
        assert (await ask(peer, "RESOLVE-BRANCH", outcome=outcome, **given))[0] == 404


@pytest.mark.req("R13")
@pytest.mark.parametrize(
    ("operation", "given", "status"),
    [
        ("RESOLVE-BRANCH", {"outcome": "both"}, 400),
        ("RESOLVE-BRANCH", {}, 400),
        ("CREATE", {}, 501),
        ("UPDATE", {}, 501),
        ("PURGE", {}, 400),
    ],
    ids=["wrong outcome", "no outcome", "create", "update", "purge"],
)
async def test_other_requests_are_refused(
    operation: str, given: dict[str, str], status: int
) -> None:
    async with prepared() as (broker, session), as_user(broker, "root") as peer:
        assert (await ask(peer, operation, type=TYPE, name=NAME, **given))[0] == status
        assert session.recovered() == [XID]


@pytest.mark.req("R13")
async def test_decisions_take_the_right_to_manage() -> None:
    async with prepared() as (broker, session), as_user(broker, "shop") as peer:
        # The right to manage some nodes lets a peer attach.
        for operation in ("RESOLVE-BRANCH", "READ", "DELETE"):
            given = {"type": TYPE, "name": NAME, "outcome": "commit"}
            assert (await ask(peer, operation, **given))[0] == 403
        assert session.recovered() == [XID]
