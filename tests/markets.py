"""Topics, times to live, priorities, and transactions over nodes of every kind, in simulations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from random import Random
from typing import Any

import trio
from worlds import FROM_THE_FIRST, KEPT, LOST, SMALL, URL, Client, Copies, note_damage, serving

from amqp_rt import Delivery
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.container.connections import Connection
from amqp_rt.errors import TransactionRolledBack
from amqp_rt.testing.faults import Jump
from amqp_rt.testing.ledger import Broken, DeliveryLedger
from amqp_rt.testing.simulation import Simulation

#: Seconds to live of messages in ``late``.
TTL_S = 8.0
#: A subscription that resumes its unsettled deliveries, and one that does not.
RESUMED: dict[str, Any] = {"name": "news", **KEPT}
DURABLE: dict[str, Any] = {"name": "news", "durable": 1}


def ranked(luck: Random) -> tuple[str, dict[str, Any]]:
    priority = luck.choice([0, 4, 9])
    return f"-{priority}", {"priority": priority}


async def pay(client: Client, ledger: Copies, count: int) -> None:
    """Send each message to a queue, a log and a topic, in one transaction."""
    left = count

    async def work(peer: Connection) -> None:
        nonlocal left
        async with (
            peer.sender("bill", settled=False) as bill,
            peer.sender("book", settled=False) as book,
            peer.sender("news", settled=False) as news,
        ):
            while left:
                left -= 1
                body = ledger.body(client.host, client.luck.choice([0, 300]))
                try:
                    async with peer.transaction() as txn:
                        for out in (bill, book, news):
                            out.send_nowait(body, durable=True, transaction=txn)
                except TransactionRolledBack:
                    ledger.was_refused(body)
                    continue
                ledger.was_acknowledged(body)
                await client.pause(0.5)

    await client.until(lambda: not left, work)


async def follow(client: Client, ledger: DeliveryLedger, finished: trio.Event) -> list[Any]:
    """Read the log from its first record on, each record once, over as many connections as needed.

    A link that recovers by itself starts again at its original position, so the reader must keep its
    own position.
    """
    seen: list[Any] = []

    async def work(peer: Connection) -> None:
        start: dict[object, object] = {"rabbitmq:stream-offset-spec": len(seen)}
        async with peer.receiver("book", credit=4, filter=start) as inbox:
            while (delivery := await inbox.get(within=5)) is not None or not finished.is_set():
                if delivery is None:
                    continue
                offset = delivery.message.message_annotations["x-opt-sequence-number"]
                if offset != len(seen):
                    raise Broken(f"log: offset {offset} came where {len(seen)} was to come")
                seen.append(ledger.was_delivered(delivery.body))
                delivery.accept()

    while True:
        try:
            async with client.net.connect(client.host, URL, limits=SMALL, reconnect=None) as peer:
                await work(peer)
                return seen
        except LOST:
            await client.pause()


class Mortal:
    """Times at which messages were sent, and checks that they expire in time."""

    def __init__(self, net: Simulation) -> None:
        self.net = net
        #: False if the wall clock jumps: times to live cannot be checked then.
        self.steady = not any(isinstance(each, Jump) for each in net.faults)
        self.sent: dict[object, float] = {}

    def check_delivered(self, delivery: Delivery) -> None:
        """Check a message delivered from its queue: it is in time, unless there are faults."""
        age = trio.current_time() - self.sent[delivery.body]
        if not self.net.faults and age > TTL_S + 3:
            raise Broken(f"late: it was delivered at the age of {age:g} s")

    def check_dead_letter(self, delivery: Delivery) -> None:
        """Check a message that was dead-lettered: it is old enough."""
        age = trio.current_time() - self.sent[delivery.body]
        if self.steady and age < TTL_S:
            raise Broken(f"late: it was given up at the age of {age:g} s")


class MortalLedger(DeliveryLedger):
    """Ledger that also notes when messages were made."""

    def __init__(self, mortal: Mortal) -> None:
        super().__init__("late", ordered=False)
        self._mortal = mortal

    def body(self, sender: str, size: int = 0) -> bytes:
        body = super().body(sender, size)
        self._mortal.sent[body] = trio.current_time()
        return body


async def market(net: Simulation) -> None:
    """Run all clients at once; in the end each of their ledgers must agree with the nodes."""
    resumed = DeliveryLedger("resumed subscription", duplicates="never")
    durable = DeliveryLedger("durable subscription")
    bill, book = DeliveryLedger("bill"), DeliveryLedger("book")
    mortal = Mortal(net)
    late, rank = MortalLedger(mortal), DeliveryLedger("ranked")
    everyone = [resumed, durable, bill, book, late, rank]
    subscribers = [("resumed", resumed, RESUMED), ("durable", durable, DURABLE)]
    net.start(
        "broker",
        serving(
            net,
            Topic("news"),
            Queue("bill"),
            Log("book"),
            Queue("late", ttl_s=TTL_S, dead_letter="dead"),
            Queue("dead"),
            Queue("ranked", priorities=10),
        ),
    )
    sent = trio.Event()
    async with trio.open_nursery() as everybody:
        for host, ledger, options in subscribers:
            attached = trio.Event()
            everybody.start_soon(
                partial(
                    Client(net, host).consume,
                    ledger,
                    "news",
                    sent,
                    attached=attached,
                    stays=True,
                    **options,
                )
            )
            await attached.wait()
        followed: list[Any] = []

        async def read_along() -> None:
            followed.extend(await follow(Client(net, "follower"), book, sent))

        everybody.start_soon(read_along)
        stop = trio.Event()
        for host, address, look in (
            ("hurried", "late", mortal.check_delivered),
            ("undertaker", "dead", mortal.check_dead_letter),
        ):
            everybody.start_soon(partial(Client(net, host).consume, late, address, stop, look=look))
        async with trio.open_nursery() as producers:
            for work in (
                partial(Client(net, "agency").produce, Copies(resumed, durable), "news", 6),
                partial(pay, Client(net, "payer"), Copies(bill, book, resumed, durable), 6),
                partial(Client(net, "doomed").produce, late, "late", 8),
                partial(Client(net, "ranker").produce, rank, "ranked", 8, dress=ranked),
            ):
                producers.start_soon(work)
            await trio.sleep(5)
            # From here on messages are left to expire.
            stop.set()
            await trio.sleep(15)
            net.calm()
        sent.set()
    await trio.sleep(3 * TTL_S)
    note_damage(net, *everyone)
    auditor = Client(net, "auditor")
    bills = await auditor.read("bill")
    bill.check(bills)
    for host, ledger, options in subscribers:
        left = await Client(net, host).read("news", **options)
        ledger.check(left)
        _compare(bill, bills, (set(left) | set(ledger.delivered)) & set(bill.sent))
    records = await auditor.read("book", filter=FROM_THE_FIRST)
    book.check(records)
    if records[: len(followed)] != followed:
        raise Broken("log: who followed it has read something else than is there")
    _compare(bill, bills, records)
    alive = await auditor.read("late")
    if alive and mortal.steady:
        raise Broken(f"late: {len(alive)} messages do not expire")
    late.check([*alive, *await auditor.read("dead")])
    await _check_ranks(auditor, rank)


def _compare(ledger: DeliveryLedger, one: Iterable[Any], other: Iterable[Any]) -> None:
    """Check that messages sent in one transaction are in both sets, or in neither."""
    if alone := (set(one) ^ set(other)) - ledger.damaged:
        raise Broken(f"transactions: {len(alone)} of their messages are not everywhere")


async def _check_ranks(auditor: Client, ledger: DeliveryLedger) -> None:
    """Check that the remaining messages come by priority, and within one priority in order."""
    found = await auditor.read("ranked")
    ledger.check(found)
    ranks = [int(ledger.sent[body][0].rpartition("-")[2]) for body in found]
    if ranks != sorted(ranks, reverse=True):
        raise Broken(f"ranked: priorities came as {ranks}")
