"""Write the store that later builds must read: ``python tests/golden_store.py`` makes it and its facts.

Run it under a new name when the schema or the content of facts changes: the files of earlier builds stay,
since stores that these wrote exist, too.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import trio

from amqp_rt import Broker, Connection, Receiver
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.broker.staging.attempts import ATTEMPT, EPOCH, PART, PRODUCER, RUN
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.events import Peer
from amqp_rt.fronts import Exchange, QueueDeclaration, UInt
from amqp_rt.message import Message
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.values import Described, Symbol, ULong

NAME = "golden-0.1.0"
QUEUES = (
    Queue("dead"),
    Queue("plain", max_deliveries=3, max_attempts=9, dead_letter="dead", aliases=("other",)),
    Queue("ranked", priorities=10, ttl_s=1e9),
    Queue("sorted", sort_key="number"),
    Queue("latest", last_value_key="key"),
    Queue("grouped", groups=100, lock_s=60.0, single_active=True),
    Queue("bounded", length_max=100, bytes_max=10_000_000, overflow="reject"),
    Queue("known", duplicate_window_s=1e9),
    Queue("leased"),
    Queue("once"),
    Queue("waiting"),
)


#: Filter that starts at the first record of a log.
FIRST = {
    Symbol("rabbitmq:stream-offset-spec"): Described(Symbol("rabbitmq:stream-offset-spec"), "first")
}
#: Link properties for staging the messages of an epoch.
STAGES = {PRODUCER: "job", RUN: "one", EPOCH: 1, PART: 0, ATTEMPT: 0}


async def write(path: Path) -> None:
    """Write a store with each kind of node, of message and of stored progress to *path*."""
    async with Broker(store=SQLiteStore(path), virtual_hosts=["", "berlin"]) as broker:
        await broker.declare(*QUEUES, Topic("topic"), Log("log", partitions=2))
        await broker.declare(Queue("plain", max_deliveries=7), virtual_host="berlin")
        async with broker.local() as peer:
            kept = peer.receiver("topic", name="kept", durable=1)
            await kept.wait_attached()
            await kept.suspend()
            for node in (*(each.name for each in QUEUES), "topic", "log"):
                async with peer.sender(node) as sender:
                    for number in range(6):
                        await sender.send(_message(node, number))
            async with peer.sender("plain") as sender:
                await sender.send(Message(b"large" * 200_000, durable=True))
            async with peer.receiver("plain", credit=1) as receiver:
                (await receiver.receive()).reject()
            left = peer.receiver("waiting", credit=3, name="left", durable=2)
            deliveries = [await left.receive() for _ in range(3)]
            deliveries[0].accept()
            await deliveries[0].settled()
            deliveries[1].release()
            await deliveries[1].settled()
            await left.suspend()
            async with peer.sender("plain") as sender, peer.transaction() as transaction:
                await sender.send(Message("posted", durable=True), transaction=transaction)
            for number in range(2):
                async with peer.sender("once", properties={**STAGES, EPOCH: number}) as sender:
                    await sender.send(Message(f"epoch {number}", durable=True, message_id=number))
            crc = zlib.crc32(Message("epoch 0", durable=True, message_id=0).encode())
            parts: Any = [[0, 0, 1, crc]]
            body = {"producer": "job", "run": "one", "epoch": 0, "parts": parts, "query": "q"}
            await _ask(peer, "once", "COMMIT-EPOCH", body)
            lease = await _ask(peer, "leased", "OPEN-LEASE", group="g")
            given = {"group": "g", "generation": lease["generation"], "id": lease["id"]}
            await _ask(peer, "leased", "LEASE", count=4, **given)
            await _ask(peer, "leased", "ACCEPT-LEASE", to=1, **given)
            await broker.set_cursor("log", "readers", {0: 2, 1: 1})
        _declare_topology(broker.topologies.of(Peer(), object()))
        await broker.host.wait_kept()


def _declare_topology(topology: Topology) -> None:
    """Make the declarations of 0-9-1 peers."""
    for name, arguments in (("unrouted", {}), ("routed", {"alternate-exchange": "unrouted"})):
        topology.declare_exchange(
            Exchange(name=name, type="topic", durable=True, arguments=arguments)
        )
    arguments = {"x-max-length": UInt(5), "x-dead-letter-exchange": "routed"}
    topology.declare_queue(QueueDeclaration(name="bound", durable=True, arguments=arguments))
    topology.bind_queue("bound", "routed", "a.#", {"n": 1})
    topology.bind_queue("bound", "amq.headers", "", {"x-match": "any", "n": 1})
    topology.bind_exchange("routed", "amq.direct", "key", {})


def _message(node: str, number: int) -> Message:
    delay = {Symbol("x-opt-delivery-delay"): ULong(10**12)}
    return Message(
        f"{node} {number}",
        durable=True,
        priority=number,
        # Every second message is a duplicate, for queues that detect those.
        message_id=f"{node} {number // 2}",
        group_id=f"g{number % 2}",
        application_properties={"number": -number, "key": f"k{number % 2}"},
        message_annotations=delay if number == 5 and node not in ("leased", "waiting") else None,
    )


async def _ask(peer: Connection, node: str, operation: str, body: Any = None, **given: Any) -> Any:
    properties = {"operation": operation, **given}
    asked = Message(body, body_kind="value", application_properties=properties)
    return (await peer.call(f"{node}/$management", asked, reply=Message, within=60)).body


async def facts(path: Path) -> dict[str, Any]:
    """Return the content of the store at *path* as users of a broker see it."""
    found: dict[str, Any] = {}
    async with (
        Broker(store=SQLiteStore(path), virtual_hosts=["", "berlin"]) as broker,
        broker.local() as peer,
    ):
        async with peer.management() as management:
            for kind in ("queue", "topic", "log"):
                async for node in management.query(f"amqp_rt.{kind}"):
                    name = str(node["name"])
                    if node["dynamic"]:
                        # The queue of our own replies.
                        continue
                    found[name] = {str(key): str(value) for key, value in sorted(node.items())}
        found["berlin"] = str(broker.stats("plain", virtual_host="berlin"))
        for each in QUEUES:
            async with peer.receiver(each.name, mode="copy", credit=0) as receiver:
                found[f"messages of {each.name}"] = await _bodies(receiver)
        for partition in range(2):
            node = f"log/partitions/{partition}"
            async with peer.receiver(node, credit=0, filter=FIRST) as receiver:
                found[f"records of {node}"] = await _bodies(receiver)
        kept = await broker.peek_subscription("topic", "kept", 100)
        found["messages of the subscription"] = [str(Message.decode(each).body) for each in kept]
        found["waiting"] = str(broker.stats("waiting"))
        found["cursor"] = str(broker.cursor("log", "readers"))
        found["epoch"] = str(await _ask(peer, "once", "EPOCH", producer="job"))
        staged = {"producer": "job", "run": "one", "epoch": 1, "part": 0, "attempt": 0}
        found["staged"] = str(await _ask(peer, "once", "STAGE", staged))
        found["lease"] = str(await _ask(peer, "leased", "LEASE-STATE", group="g"))
        async with peer.sender("known") as sender:
            await sender.send(Message("again", durable=True, message_id="known 1"))
        topology = broker.topologies.of(Peer(), object())
        found["exchange"] = str(topology.exchange("routed"))
        found["routes"] = [
            topology.route("routed", "a.b", {}),
            topology.route("routed", "b", {}),
            topology.route("amq.headers", "", {"n": 1}),
            topology.route("amq.direct", "key", {}),
        ]
        found["duplicates"] = broker.stats("known").available
    return found


async def _bodies(receiver: Receiver) -> list[str]:
    """Return the beginnings of all bodies in the queue, and release the messages."""
    found = []
    while (delivery := await receiver.get()) is not None:
        found.append(delivery)
    for delivery in found:
        delivery.release()
    return [str(delivery.body)[:100] for delivery in found]


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
