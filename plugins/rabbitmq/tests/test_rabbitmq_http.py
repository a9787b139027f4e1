"""Requests of Flower and of KEDA's scaler for RabbitMQ, at the HTTP door."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import trio
from amqp_rt_rabbitmq.http_api import Rates
from amqp_rt_rabbitmq.name_patterns import PATTERN_MAX, NamePattern

from amqp_rt import Access, Broker, Limits, Rights, Rule
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.errors import AmqpError

pytestmark = [pytest.mark.req("G4"), pytest.mark.req("G6")]

FLOWER = Path(__file__).parent / "flower_queues.py"
USERS = {"root": "r-pw", "ops": "o-pw", "shop": "s-pw"}
ACCESS = Access(
    [
        Rule("*", Rights.MANAGE | Rights.SEND, users=("root",)),
        Rule("team/*", Rights.MANAGE, users=("ops",)),
        Rule("team/q", Rights.SEND, users=("shop",)),
    ]
)


@asynccontextmanager
async def door(**options: Any) -> AsyncIterator[tuple[Broker, Any]]:
    """Run a broker with two virtual hosts and its door; yield it, and a function that makes clients."""
    httpx2 = pytest.importorskip("httpx2")
    console = pytest.importorskip("amqp_rt_console")
    limits = Limits(failed_login_delay_s=0.01, failed_login_delay_max_s=0.01)
    given = {"users": USERS, "access": ACCESS, "limits": limits, "virtual_hosts": ["", "berlin"]}
    async with Broker("b", volatile=True, **{**given, **options}) as broker:
        await broker.declare(Queue("team/q"), Queue("other"), Log("team/s"), Topic("team/t"))
        await broker.declare(Queue("local"), virtual_host="berlin")
        async with console.HttpDoor(broker, "http://127.0.0.1:0").open() as url:

            def client(user: str, **more: Any) -> Any:
                auth = (user, USERS[user])
                return httpx2.AsyncClient(base_url=url, auth=auth, timeout=20, **more)

            yield broker, client


async def fill(broker: Broker, address: str, count: int, virtual_host: str = "") -> None:
    async with broker.local(virtual_host) as peer, peer.sender(address) as out:
        for number in range(count):
            await out.send(number)


# --- KEDA ------------------------------------------------------------------------------------------


def keda(virtual_host: str, name: str) -> str:
    """Return the path that KEDA's scaler requests for one queue."""
    return f"/api/queues/{quote_plus(virtual_host)}/{quote_plus(name)}"


def keda_by_pattern(virtual_host: str, pattern: str) -> str:
    """Return the path that KEDA's scaler requests with ``useRegex``."""
    return (
        f"/api/queues/{quote_plus(virtual_host)}?page=1&use_regex=true&pagination=false"
        f"&name={quote_plus(pattern)}&page_size=100"
    )


async def test_keda_reads_the_length_of_a_queue() -> None:
    async with door() as (broker, client), client("root") as keda_client:
        await fill(broker, "team/q", 3)
        async with broker.local() as peer, peer.receiver("team/q", credit=1) as inbox:
            delivery = await inbox.receive()
            answer = await keda_client.get(keda("/", "team/q"))
            assert answer.status_code == 200, answer.text
            info = answer.json()
            # The fields that the scaler decodes.
            assert (info["name"], info["messages"], info["messages_unacknowledged"]) == (
                *("team/q", 3),
                1,
            )
            assert isinstance(info["message_stats"]["publish_details"]["rate"], float)
            assert (info["messages_ready"], info["consumers"], info["vhost"]) == (2, 1, "/")
            delivery.release()
        assert (await keda_client.get(keda("/", "team/s"))).json()["type"] == "stream"
        for path in (
            keda("/", "none"),
            keda("/", "team/t"),
            keda("paris", "q"),
            "/api/queues/a/b/c",
        ):
            assert (await keda_client.get(path)).status_code == 404, path


async def test_keda_reads_queues_by_a_pattern() -> None:
    async with door() as (broker, client), client("root") as keda_client:
        await fill(broker, "team/q", 2)
        for pattern, names in (
            ("^team/.*$", ["team/q", "team/s"]),
            ("o", ["other"]),
            ("q$", ["team/q"]),
            (".*", ["other", "team/q", "team/s"]),
            ("^none", []),
        ):
            answer = (await keda_client.get(keda_by_pattern("/", pattern))).json()
            assert [each["name"] for each in answer["items"]] == names, pattern
            assert answer["filtered_count"] == len(names)
        for pattern in ("(a|b)", "a{2}", "[", "*", "x" * 1_000):
            answer = await keda_client.get(keda_by_pattern("/", pattern))
            assert answer.status_code == 400, pattern
        for query in ("page=0", "page=x", "page=1&page_size=1000000"):
            assert (await keda_client.get(f"/api/queues/%2F?{query}")).status_code == 400


async def test_the_rate_of_publishing_is_that_since_an_earlier_request(autojump_clock: Any) -> None:
    rates = Rates()
    place = ("", "q")

    def rate(count: int) -> float:
        return rates.of(place, {"publish": count}, trio.current_time())["publish"]

    assert rate(10) == 0.0
    await trio.sleep(30)
    assert rate(70) == 2.0
    await trio.sleep(0.1)
    # Two monitors that ask at about the same time get about the same.
    assert rate(70) == pytest.approx(2.0, rel=0.01)
    await trio.sleep(29.9)
    assert rate(100) == pytest.approx(1.0, rel=0.01)
    await trio.sleep(30)
    # It was declared again.
    assert rate(0) == 0.0
    await trio.sleep(1_000)
    assert rate(5) == 0.0
    for number in range(2_000):
        rates.of(("", str(number)), {"publish": 1}, trio.current_time())
    assert len(rates._known) == 1_000


# --- others ----------------------------------------------------------------------------------------


async def test_lists_and_totals_are_those_that_the_user_manages() -> None:
    async with door() as (broker, client):
        await fill(broker, "team/q", 2)
        await fill(broker, "other", 1)
        async with client("root") as root, client("ops") as ops, client("shop") as shop:
            found = (await root.get("/api/queues")).json()
            assert {each["name"]: each["messages"] for each in found} == {
                "other": 1,
                "team/q": 2,
                "team/s": 0,
            }
            assert (await root.get("/api/overview")).json()["queue_totals"] == {
                "messages": 3,
                "messages_ready": 3,
                "messages_unacknowledged": 0,
            }
            assert [each["name"] for each in (await ops.get("/api/queues/%2F")).json()] == [
                "team/q",
                "team/s",
            ]
            totals = (await ops.get("/api/overview")).json()
            assert totals["object_totals"]["queues"] == 2
            assert totals["rabbitmq_version"].startswith("4.")
            assert (await ops.get(keda("/", "other"))).status_code in (403, 404)
            for path in ("/api/overview", "/api/queues", keda("/", "team/q")):
                assert (await shop.get(path)).status_code == 403, path
            # A pattern of names without an expression, in any case, as in RabbitMQ.
            some = (await root.get("/api/queues?name=TEAM")).json()
            assert [each["name"] for each in some] == ["team/q", "team/s"]


async def test_a_virtual_host_is_that_of_the_path() -> None:
    async with door() as (broker, client), client("root") as root:
        await fill(broker, "local", 1, "berlin")
        [found] = (await root.get("/api/queues/berlin")).json()
        assert (found["name"], found["vhost"], found["messages"]) == ("local", "berlin", 1)
        assert (await root.get(keda("berlin", "local"))).json()["messages"] == 1
        assert (await root.get(keda("berlin", "team/q"))).status_code == 404
        assert (await root.get("/api/queues/paris")).status_code == 404


async def test_nothing_can_be_changed_and_a_login_is_needed() -> None:
    async with door() as (_, client), client("root") as root:
        for method in ("PUT", "POST", "DELETE", "PATCH"):
            answer = await root.request(method, keda("/", "team/q"))
            assert answer.status_code == 405, method
        for path in ("/api/overview", "/api/queues", keda("/", "team/q")):
            assert (await root.get(path, auth=("root", "wrong"))).status_code == 401
            assert (await root.get(path, auth=None)).status_code == 401
        assert (await root.get("/api/queues/%FF")).status_code == 400


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.smoke
async def test_flower_reads_its_queues() -> None:
    if importlib.util.find_spec("flower") is None:
        pytest.skip("flower is not installed (make peers)")
    async with door() as (broker, client):
        await fill(broker, "team/q", 2)
        await fill(broker, "local", 1, "berlin")
        async with client("root") as root:
            api = f"{str(root.base_url).rstrip('/')}/api/".replace("://", "://root:r-pw@")
        for virtual_host, expected in (
            ("", [("team/q", 2)]),
            ("/berlin", [("local", 1)]),
            ("//", [("team/q", 2)]),
        ):
            command = [sys.executable, "-W", "ignore", str(FLOWER)]
            done = await trio.to_thread.run_sync(
                partial(
                    subprocess.run,
                    [*command, f"amqp://127.0.0.1{virtual_host}", api, "team/q", "local"],
                    capture_output=True,
                    text=True,
                    timeout=25,
                )
            )
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert [(each["name"], each["messages"]) for each in found] == expected, done.stderr


# --- patterns --------------------------------------------------------------------------------------


def test_patterns_match_as_regular_expressions_do() -> None:
    chance = random.Random(1)
    pieces = ["a", "b", ".", "a*", "b+", "a?", ".*", "[ab]", "[^a]*", "\\.", ".?", ".+", "[]a]"]
    for _ in range(5_000):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(5)))
        text = chance.choice(["", "^"]) + text + chance.choice(["", "$"])
        name = "".join(chance.choice("ab.]") for _ in range(chance.randrange(6)))
        assert NamePattern(text).matches(name) == bool(re.search(text, name, re.DOTALL)), (
            text,
            name,
        )


@pytest.mark.parametrize(
    "text", ["(a)", "a|b", "a{3}", "*", "a**", "[", "a\\", "\\", "(?i)a", "[z-a]", "\\b", "\\1"]
)
def test_other_patterns_are_refused(text: str) -> None:
    try:
        pattern = NamePattern(text)
    except AmqpError as error:
        assert str(error)  # noqa: PT017
    else:
        # What stands for no character matches none.
        assert not pattern.matches("ab")


def test_a_pattern_takes_no_more_than_one_pass() -> None:
    pattern = NamePattern("^" + ".*a" * 80 + "$")
    name = "a" * 79 + "b" * 900
    assert pattern.work(name) < 200_000
    assert not pattern.matches(name)
    with pytest.raises(AmqpError, match="at most"):
        NamePattern("a" * (PATTERN_MAX + 1))
