"""Writes the store that later builds must read: ``python tests/golden_store.py`` makes it and its facts.

Run it when the schema or what is kept in facts changes, under a new name: the files of earlier builds stay, since
stores that they wrote stay too.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio

from amqp_rt import Broker
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.message import Message
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.values import Symbol, ULong

NAME = "golden-0.1.0"
QUEUES = (
    Queue("dead"),
    Queue("plain", max_deliveries=3, max_attempts=9, dead_letter="dead", aliases=("other",)),
    Queue("ranked", priorities=10, ttl_s=1e9),
    Queue("sorted", sort_key="number"),
    Queue("latest", last_value_key="key"),
    Queue("grouped", groups=100, lock_s=60.0, single_active=True),
    Queue("bounded", length_max=100, bytes_max=10_000_000, overflow="reject"),
)


async def write(path: Path) -> None:
    """Write a store with each kind of node and message to *path*."""
    async with Broker(store=SQLiteStore(path)) as broker:
        await broker.declare(*QUEUES, Topic("topic"), Log("log", partitions=2))
        async with broker.local() as peer:
            async with peer.receiver("topic", name="kept", durable=1):
                pass
            for node in (*(each.name for each in QUEUES), "topic", "log"):
                async with peer.sender(node) as sender:
                    for number in range(6):
                        delay = {Symbol("x-opt-delivery-delay"): ULong(10**12)}
                        await sender.send(
                            Message(
                                f"{node} {number}",
                                durable=True,
                                priority=number,
                                group_id=f"g{number % 2}",
                                application_properties={"number": -number, "key": f"k{number % 2}"},
                                message_annotations=delay if number == 5 else None,
                            )
                        )
            async with peer.sender("plain") as sender:
                await sender.send(Message(b"large" * 200_000, durable=True))
            async with peer.receiver("plain", credit=1) as receiver:
                (await receiver.receive()).reject()


async def facts(path: Path) -> dict[str, Any]:
    """What a broker that opens the store at *path* has, by management and by browsing."""
    found: dict[str, Any] = {}
    async with Broker(store=SQLiteStore(path)) as broker, broker.local() as peer:
        async with peer.management() as management:
            for kind in ("queue", "topic", "log"):
                async for node in management.query(f"amqp_rt.{kind}"):
                    name = str(node["name"])
                    if node["dynamic"]:
                        # The queue of our own replies.
                        continue
                    found[name] = {str(key): str(value) for key, value in sorted(node.items())}
        for each in QUEUES:
            async with peer.receiver(each.name, mode="copy") as receiver:
                bodies = []
                with trio.move_on_after(0.5):
                    while True:
                        bodies.append((await receiver.receive()).body)
            found[f"messages of {each.name}"] = [str(body)[:100] for body in bodies]
    return found


def main() -> None:
    folder = Path(__file__).parent / "stores"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "store"
        trio.run(write, path)
        data = path.read_bytes()
        (folder / f"{NAME}.db.gz").write_bytes(gzip.compress(data, 9, mtime=0))
        text = json.dumps(trio.run(facts, path), indent=1, sort_keys=True)
        (folder / f"{NAME}.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
