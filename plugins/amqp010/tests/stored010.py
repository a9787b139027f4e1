"""Broker with 0-10 and a store, in a process of its own: ``python stored010.py STORE``."""

from __future__ import annotations

import sys

import trio
from amqp_rt_amqp010 import Front

from amqp_rt import Broker


async def main(path: str) -> None:
    async with Broker(fronts=[Front()], store=f"sqlite:{path}") as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        print(url, flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
