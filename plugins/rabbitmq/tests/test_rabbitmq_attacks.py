"""Attacks on a listener for RabbitMQ's clients, by a client with few rights, while another one is served."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from brokers import client_of
from rabbit_requests import managing, request

from amqp_rt import Broker, Connection, Message, Plain, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError
from amqp_rt.events import Peer
from amqp_rt.limits import KIB, Limits
from amqp_rt.security.access import Access
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.tokens import Cbs
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

pytestmark = [pytest.mark.req("G4", "SE18"), pytest.mark.slow]

SECRET = b"a secret of at least 32 octets, for HS256"
URL = "memory://rabbit"
#: Bytes that the second attack may leave: the other client is served meanwhile.
KEPT = 128 * KIB
#: Log lines of two attacks.
LINES_MAX = 50
PAIRED: dict[str, Any] = {"properties": {"paired": True}}


async def verify(user: str, password: str, peer: Peer) -> str | None:
    """Check a password at no cost."""
    return user if password == "pw" else None


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Broker, list[int]]]:
    """Run a broker whose client ``good`` declares, lists and deletes; yield it, and the number of rounds."""
    access = Access(
        [
            Rule("*", Rights.MANAGE, users=("good",)),
            Rule("eve", Rights.MANAGE, users=("eve",)),
        ]
    )
    async with Broker(
        "b",
        volatile=True,
        access=access,
        users=verify,
        cbs=Cbs([Jwt(audience="shop", secret=SECRET)]),
        limits=Limits(bindings_listed_max=10, management_bytes_max=64 * KIB, nodes_max=1_000),
    ) as broker:
        await broker.declare(Queue("theirs"), Queue("eve"))
        await broker.listen(f"{URL}?profile=rabbitmq")
        rounds = [0]

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            async with (
                client_of(broker, "good", url=URL, auth=Plain("good", "pw")) as peer,
                managing(peer) as manage,
            ):
                task_status.started()
                while True:
                    with trio.fail_after(5):
                        assert (await manage("PUT", "/queues/own", {}))[0] == "201"
                        assert (await manage("GET", "/queues/own"))[0] == "200"
                        assert (await manage("DELETE", "/queues/own"))[0] == "200"
                    rounds[0] += 1
                    await trio.sleep(0.005)

        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            yield broker, rounds
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def eve(broker: Broker) -> AsyncIterator[Connection]:
    async with client_of(broker, "eve", url=URL, auth=Plain("eve", "pw")) as peer:
        yield peer


def attach_raw(session: Any, name: str, half: Recorder) -> Any:
    return session.attach_sender(
        name, half, source=Source(), target=Target(address="/management"), **PAIRED
    )


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110  # engines notify no task
            await trio.sleep(0.002)


# --- attacks ---------------------------------------------------------------------------------------


async def take(broker: Broker) -> None:
    """Ask for what belongs to others."""
    async with eve(broker) as peer, managing(peer) as manage:
        for method, path, body in (
            ("PUT", "/queues/theirs", {}),
            ("DELETE", "/queues/theirs", None),
            ("DELETE", "/queues/theirs/messages", None),
            ("PUT", "/exchanges/any", {}),
            ("DELETE", "/exchanges/amq.direct", None),
            (
                "POST",
                "/bindings",
                {"source": "amq.fanout", "destination_queue": "eve", "binding_key": ""},
            ),
            ("GET", "/bindings?src=amq.fanout&dstq=theirs&key=", None),
            ("DELETE", "/bindings/src=amq.fanout;dstq=theirs;key=;args=", None),
            # By dead letters, whose queue she would not be allowed to fill.
            (
                "PUT",
                "/queues/eve-2",
                {
                    "arguments": {
                        "x-dead-letter-exchange": "",
                        "x-dead-letter-routing-key": "theirs",
                    }
                },
            ),
        ):
            status, why = await manage(method, path, body)
            assert status == "403", (method, path, why)


async def forge(broker: Broker) -> None:
    """Put invalid tokens, again and again."""
    async with eve(broker) as peer, managing(peer) as manage:
        for number in range(60):
            token = f"a{number}.b.c".encode() if number % 2 else b"x" * 10_000
            assert (await manage("PUT", "/auth/tokens", token))[0] == "403"
        assert (await manage("GET", "/queues/theirs"))[0] == "403"


async def malformed(broker: Broker) -> None:
    """Send what is no request: its link ends, and no other."""
    async with eve(broker) as peer:
        session: Any = peer.engine
        session = session.begin()
        payload = request("GET", "/queues/eve").encode()
        octets = [
            b"",
            b"\x00\x53\x75\xb0\xff\xff\xff\xff",
            b"\x00\x53\x77" + b"\xc0\x00" * 2_000,
            b"\x00\x53\x77" + b"\xd0\x00\x00\x00\x08\xff\xff\xff\xff\x40\x40\x40\x40",
            payload[:20],
            payload + b"\x00",
            Message("no request").encode(),
            request("GET", "/queues/eve", reply_to="elsewhere").encode(),
        ]
        for number, each in enumerate(octets):
            half = Recorder()
            link = attach_raw(session, f"half-{number}", half)
            await until(lambda link=link: link.credit)
            link.send(each, settled=True)
            await until(lambda half=half: half.detached)
        async with managing(peer) as manage:
            assert (await manage("GET", "/queues/eve"))[0] == "200"


async def nest(broker: Broker) -> None:
    """Send bodies that are deep, wide, or have wrong types."""
    deep: Any = 1
    for _ in range(30):
        deep = {"arguments": deep}
    async with eve(broker) as peer, managing(peer) as manage:
        for body in (
            deep,
            {"arguments": {f"x-{number}": number for number in range(2_000)}},
            {"arguments": {"x": "y" * 20_000}},
            {"arguments": [1]},
            {"arguments": {1: 2}},
            {"durable": 1},
            ["durable"],
            {"arguments": {"x-queue-type": "stream", "x-max-age": "9" * 1_000 + "D"}},
        ):
            status, _ = await manage("PUT", "/queues/eve-3", body)
            assert status in ("400", "403", "409"), body
        for path in ("/queues/" + "a" * 2_000, "/" * 500, "/queues/%", "/bindings?" + "&" * 500):
            assert (await manage("PUT", path, {}))[0][0] == "4"


async def pile_up(broker: Broker) -> None:
    """Send requests without reading the answers, on as many pairs as there can be."""
    async with eve(broker) as peer:
        engine: Any = peer.engine
        session = engine.begin()
        halves = [Recorder() for _ in range(30)]
        links = [attach_raw(session, f"half-{n}", half) for n, half in enumerate(halves)]
        await until(
            lambda: all(
                link.credit or half.detached for link, half in zip(links, halves, strict=True)
            )
        )
        # 16 pairs, and the others are refused.
        assert sum(bool(half.detached) for half in halves) == 14
        padding = "x" * 3_000
        for _ in range(60):
            for link in links:
                if link.attached and link.credit > 0:
                    link.send(request("GET", f"/queues/{padding}").encode(), settled=True)
            await trio.sleep(0.001)
        await until(lambda: all(half.detached for half in halves))


async def guess(broker: Broker) -> None:
    """Send to guessed addresses of replies, and to the queues of others."""
    async with eve(broker) as peer:
        for address in (
            "/queues/dynamic%2Fgood%2Fx%2Fguess",
            "/queues/amq.rabbitmq.reply-to.guess",
            "/queues/theirs",
            "/exchanges/amq.direct/theirs",
        ):
            with pytest.raises(AmqpError):
                async with peer.sender(address) as out:
                    await out.wait_attached()


ATTACKS: list[Callable[[Broker], Awaitable[None]]] = [
    *(take, forge, malformed, nest),
    *(pile_up, guess),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)
async def test_what_is_done_to_a_listener(
    attack: Callable[[Broker], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "amqp_rt"):
        async with served() as (broker, rounds):
            await attack(broker)
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            done = rounds[0]
            await attack(broker)
            await until(lambda: rounds[0] > done + 1)
            await until(lambda: len(broker.container.connections) == 1)
            gc.collect()
            left = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert left < KEPT
            assert broker.stats("theirs").available == 0
            lines = [each.getMessage() for each in caplog.records]
        assert len(lines) < LINES_MAX, lines[-20:]
        assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
