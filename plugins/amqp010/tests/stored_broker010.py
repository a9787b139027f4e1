"""A broker with a store, which speaks 0-10: ``python stored_broker010.py STORE QUEUE ...``.

It prints its port when it is ready, and serves until it is killed.
"""

from __future__ import annotations

import sys

import trio
from amqp_rt_amqp010 import Front

from amqp_rt import Broker
from amqp_rt.broker import Queue


async def serve(store: str, queues: list[str]) -> None:
    async with Broker(store=f"sqlite:{store}", fronts=[Front()]) as broker:
        await broker.declare(*(Queue(name) for name in queues))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        print(url.rpartition(":")[2].rstrip("/"), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(serve, sys.argv[1], sys.argv[2:])
