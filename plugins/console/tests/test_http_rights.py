"""Rows of the security matrix for the HTTP door: what a user may do with a right at the queue ``q``."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import security_matrix as matrix
from browsing import QUICK, site

from amqp_rt import Access, Rights, Rule
from amqp_rt.broker import Queue

pytestmark = [pytest.mark.req("G6"), pytest.mark.slow]

PASSWORD = "a-password"
#: Name of a user → rules.
GIVEN = {
    "nothing": (),
    "elsewhere": (Rule("elsewhere", Rights.MANAGE, users=("elsewhere",)),),
    "send": (Rule("q", Rights.SEND, users=("send",)),),
    "listen": (Rule("q", Rights.LISTEN, users=("listen",)),),
    "manage": (Rule("q", Rights.MANAGE, users=("manage",)),),
}
#: Operation → method, path and body.
OPERATIONS: dict[str, tuple[str, str, Any]] = {
    "GET /session": ("GET", "session", None),
    "GET /nodes": ("GET", "nodes", None),
    "GET /nodes/q": ("GET", "nodes/q", None),
    "GET /nodes/other": ("GET", "nodes/other", None),
    "GET /nodes/q/peek": ("GET", "nodes/q/peek", None),
    "GET /messages of other": ("GET", "messages?node=other", None),
    "POST /nodes/q/publish": ("POST", "nodes/q/publish", {"body": "x"}),
    "POST /nodes/other/publish": ("POST", "nodes/other/publish", {"body": "x"}),
    "POST /nodes/q/move to other": ("POST", "nodes/q/move", {"to": "other"}),
    "POST /nodes/q/purge": ("POST", "nodes/q/purge", None),
    "PATCH /nodes/q": ("PATCH", "nodes/q", {"max_deliveries": 3}),
    "PATCH /nodes/q with dead letters to other": ("PATCH", "nodes/q", {"dead_letter": "other"}),
    "PUT /nodes/another": ("PUT", "nodes/another", {"kind": "queue"}),
    "DELETE /nodes/q": ("DELETE", "nodes/q", None),
    "GET /connections": ("GET", "connections", None),
    "DELETE /connections/1": ("DELETE", "connections/1", None),
    "PUT /users/new": ("PUT", "users/new", {"password": "n-password"}),
    "GET /rules": ("GET", "rules", None),
    "GET /termini": ("GET", "termini", None),
    "GET /journal": ("GET", "journal", None),
    "GET /access": ("GET", "access?right=send&address=q", None),
}


async def outcome(client: httpx2.AsyncClient, name: str) -> str:
    method, path, body = OPERATIONS[name]
    answer = await client.request(method, f"/api/v1/{path}", json=body)
    return matrix.ALLOWED if answer.status_code < 300 else f"{answer.status_code}"


@pytest.mark.parametrize("right", matrix.RIGHTS)
async def test_the_matrix_holds(right: str) -> None:
    assert {*OPERATIONS} == {*matrix.RIGHTS_OVER_HTTP}
    users = dict.fromkeys(matrix.RIGHTS, PASSWORD)
    access = Access([rule for rules in GIVEN.values() for rule in rules])
    async with (
        site(users=users, access=access, limits=QUICK, journal=True) as web,
        web.client(auth=(right, PASSWORD)) as client,
    ):
        found = {}
        for name in OPERATIONS:
            if not web.broker.has("q"):
                await web.broker.declare(Queue("q"))
            found[name] = await outcome(client, name)
        assert found == {name: row[right] for name, row in matrix.RIGHTS_OVER_HTTP.items()}
