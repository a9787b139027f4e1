"""Broker with little memory for messages, in a process of its own: ``python paged_broker.py STORE``.

Its queue ``work`` keeps some twenty messages in memory, and stores large ones in pieces.
"""

from __future__ import annotations

import json
import signal
import sys

import trio

from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.limits import Limits

LIMITS = Limits(message_size_max=20_000, queue_memory_bytes_max=4_000, queue_memory_messages_max=20)


async def main(path: str) -> None:
    async with Broker(store=f"sqlite:{path}", limits=LIMITS) as broker:
        await broker.declare(Queue("work"))
        listeners = await broker.listen("amqp://127.0.0.1:0")
        print("ready", json.dumps({"listeners": listeners}), flush=True)
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                return


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
