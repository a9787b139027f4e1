"""The gateway of the shop where node or rhea is missing: what gateway.js does, in Python.

python gateway.py HOST PORT COUNT
"""

from __future__ import annotations

import sys

import msgspec
import trio
from members import Order, Sale

from amqp_rt import Container

SKUS = ("teapot", "cup", "kettle", "strainer")


async def main(host: str, port: str, count: str) -> None:
    async with (
        Container("gateway") as box,
        box.connect(f"amqp://{host}:{port}") as peer,
        trio.open_nursery() as nursery,
    ):

        async def place(order: Order) -> None:
            sale = await peer.call("order", order, reply=Sale, within=20)
            print(msgspec.json.encode(sale).decode(), flush=True)

        for number in range(1, int(count) + 1):
            nursery.start_soon(place, Order(number, SKUS[number % len(SKUS)], 1 + number % 3))
            await trio.sleep(0.1)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
