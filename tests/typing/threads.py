"""The asyncio and threads APIs as type checkers see them."""

from __future__ import annotations

from typing import assert_type

from amqp_rt import Breaker, Connection, Retry, aio, sync
from amqp_rt.outcomes import Outcome


def in_a_thread() -> None:
    with sync.Container("a", nodes=[]) as container:
        (url,) = container.listen("amqp://127.0.0.1:0")
        with sync.connect(url) as peer, peer.sender("q") as out, peer.receiver("q") as messages:
            assert_type(out.send("x", subject="s"), Outcome)
            assert_type(peer.call("f", 1, reply=int, within=2), int)
            calls = peer.calling(Retry(3), Breaker())
            assert_type(calls.call("f", 1, reply=int, within=2), int)
            calls.call("f", timeout=2)  # type: ignore[call-overload]
            for delivery in messages:
                with delivery:
                    assert_type(delivery.decode(str), str)
            out.send("x", subject=1)  # type: ignore[arg-type]
            peer.no_such_method()  # type: ignore[attr-defined]


async def in_asyncio() -> None:
    async with aio.connect() as peer:
        assert_type(peer, Connection)
        assert_type(await peer.calling(Retry()).call("f", reply=str), str)
        assert_type(await peer.call("f", reply=str), str)
