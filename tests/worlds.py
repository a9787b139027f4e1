"""Clients of a broker in simulations, and the ledgers that check its deliveries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeAlias

import trio

from amqp_rt import Delivery, Message, Receiver
from amqp_rt.broker import Log, Queue
from amqp_rt.container.connections import Connection
from amqp_rt.container.recovery import Reconnect
from amqp_rt.errors import AmqpError, ConnectionLost, DeliveryRejected, LinkDetached
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import Limits
from amqp_rt.testing.ledger import Broken, DeliveryLedger
from amqp_rt.testing.simulation import SimulatedHost, Simulation

#: Frames of 512 octets, so that some messages take several.
SMALL = Limits(frame_size_max=512, session_window=32)
PATIENT = Reconnect(first_delay_s=0.2, delay_max_s=2, give_up_after_s=100_000)
#: A link that both sides resume, durable on a disk where there is one.
KEPT: dict[str, Any] = {"timeout": 3600, "durable": 2}
#: A source with a name, which is kept until its receiver closes it.
NAMED: dict[str, Any] = {"name": "mine", **KEPT}
URL = "memory://broker"
#: Filter for the start of a log.
FROM_THE_FIRST = {"rabbitmq:stream-offset-spec": "first"}
#: Errors after the loss of a connection.
LOST = (ConnectionLost, LinkDetached)
#: Conditions of a broker whose disk is full or has failed.
NO_ROOM = {"amqp:resource-limit-exceeded", "amqp:internal-error", "amqp:transaction:rollback"}


def serving(net: Simulation, *nodes: Any) -> Callable[[SimulatedHost], Awaitable[None]]:
    """Return a program that serves a broker with *nodes*, and restarts it after a failure of its store."""

    async def main(host: SimulatedHost) -> None:
        async with host.broker(limits=SMALL) as broker:
            await broker.declare(*nodes)
            await broker.listen(URL)
            journal = broker.host.journal
            while journal is None or journal.failure is None:  # noqa: ASYNC110  # a supervisor looks
                await trio.sleep(10)  # as a supervisor does
            net.kill(host.name)
            await trio.sleep_forever()

    return main


class Copies:
    """Ledgers of all receivers that get a copy of each message."""

    def __init__(self, *ledgers: DeliveryLedger) -> None:
        self.ledgers = ledgers

    def body(self, sender: str, size: int = 0) -> bytes:
        (body,) = {ledger.body(sender, size) for ledger in self.ledgers}
        return body

    def was_acknowledged(self, body: bytes) -> None:
        for ledger in self.ledgers:
            ledger.was_acknowledged(body)

    def was_refused(self, body: bytes) -> None:
        for ledger in self.ledgers:
            ledger.was_refused(body)


#: Draws properties of a message: a suffix of its sender's name, and fields.
Dress: TypeAlias = Callable[[Random], tuple[str, dict[str, Any]]]


def _plain(luck: Random) -> tuple[str, dict[str, Any]]:
    return "", {}


def _overlook(delivery: Delivery) -> None:
    """Ignore the delivery."""


def _refuse_to_resume(error: AmqpError) -> None:
    """Raise, unless the end of a kept link is due to a failure of the store."""
    if error.condition != "amqp:internal-error":
        raise Broken("a link that is kept was not resumed") from error


@asynccontextmanager
async def _left(inbox: Receiver) -> AsyncIterator[None]:
    """Suspend *inbox* at the end, which leaves its deliveries to the next link of its name."""
    try:
        yield
    finally:
        await inbox.suspend()


class Client:
    """Client on a host of its own, which sends or receives until done."""

    def __init__(self, net: Simulation, host: str) -> None:
        self.net = net
        self.host = host
        self.luck: Random = net.luck(host)

    async def pause(self, seconds: float = 1.0) -> None:
        await trio.sleep(self.luck.uniform(0, seconds))

    def connect(self) -> Any:
        return self.net.connect(self.host, URL, limits=SMALL, reconnect=PATIENT)

    async def until(
        self, done: Callable[[], bool], work: Callable[[Connection], Awaitable[None]]
    ) -> None:
        """Do *work* until *done*, over as many links as that takes."""
        async with self.connect() as peer:
            while not done():
                try:
                    await work(peer)
                except LOST:
                    await self.pause()
                except AmqpError as error:
                    if error.condition not in NO_ROOM:
                        raise
                    await self.pause()

    async def produce(
        self,
        ledger: DeliveryLedger | Copies,
        address: str,
        count: int,
        *,
        together: int = 3,
        dress: Dress = _plain,
        **options: Any,
    ) -> None:
        """Send *count* messages, a few at a time.

        The suffix that *dress* draws is added to our name in the ledger, and its fields to the message:
        messages with equal suffixes keep their order.
        """
        left = count

        async def work(peer: Connection) -> None:
            nonlocal left
            async with peer.sender(address, settled=False, **options) as out:
                while left:
                    receipts = []
                    for _ in range(min(left, self.luck.randint(1, together))):
                        lane, fields = dress(self.luck)
                        size = self.luck.choice([0, 30, 300, 2000])
                        body = ledger.body(self.host + lane, size)
                        receipts.append((body, out.send_nowait(body, durable=True, **fields)))
                        left -= 1
                    for body, receipt in receipts:
                        try:
                            await receipt.accepted()
                            ledger.was_acknowledged(body)
                        except DeliveryRejected:
                            ledger.was_refused(body)
                        except LOST as error:
                            # The message may have arrived or not, and is not sent again.
                            if options.get("timeout"):
                                _refuse_to_resume(error)
                    await self.pause()

        await self.until(lambda: not left, work)

    async def consume(
        self,
        ledger: DeliveryLedger,
        address: str,
        finished: trio.Event,
        *,
        attached: trio.Event | None = None,
        look: Callable[[Delivery], None] = _overlook,
        stays: bool = False,
        **options: Any,
    ) -> None:
        """Receive until *finished* is set and no more messages come.

        Args:
            ledger: Ledger of this receiver.
            address: The node.
            finished: Set when all messages are sent.
            attached: Set when the link is attached for the first time.
            look: Called with each delivery.
            stays: Whether the link is suspended in the end, as for a subscription.
            options: Options of the link.
        """
        empty = False

        async def work(peer: Connection) -> None:
            nonlocal empty
            inbox = peer.receiver(address, credit=4, rcv_settle_mode=RCV_SECOND, **options)
            async with _left(inbox) if stays else inbox:
                await inbox.wait_attached()
                if attached is not None:
                    attached.set()
                while not empty:
                    delivery = await inbox.get(within=5)
                    if delivery is None:
                        empty = finished.is_set()
                        continue
                    body = ledger.was_delivered(delivery.body)
                    look(delivery)
                    await self.pause(0.3)
                    if self.luck.random() < 0.1:
                        ledger.was_returned(body)
                        delivery.release()
                        continue
                    ledger.was_accepted(body)
                    try:
                        delivery.accept()
                        await delivery.settled()
                        ledger.was_settled(body)
                    except LOST as error:
                        if not options.get("timeout"):
                            continue
                        # The next link of this name does not know the deliveries of this one.
                        _refuse_to_resume(error)
                        for each in set(ledger.delivered) - ledger.settled:
                            ledger.was_returned(each)

        await self.until(lambda: empty, work)

    async def move(self, origin: str, target: str, finished: trio.Event) -> None:
        """Take messages from one queue to another, in transactions, until *finished*."""

        async def work(peer: Connection) -> None:
            async with (
                peer.receiver(origin, credit=3) as inbox,
                peer.sender(target, settled=False) as out,
            ):
                while not finished.is_set():
                    delivery = await inbox.get(within=5)
                    if delivery is None:
                        continue
                    async with peer.transaction() as txn:
                        delivery.accept(transaction=txn)
                        await out.send(delivery.body, durable=True, transaction=txn)
                    await self.pause(0.3)

        await self.until(finished.is_set, work)

    async def read(self, address: str, **options: Any) -> list[Any]:
        """Read and return all messages of a node."""
        found: list[Any] = []
        async with self.connect() as peer, peer.receiver(address, credit=50, **options) as inbox:
            while (delivery := await inbox.get(within=30)) is not None:
                found.append(delivery.body)
                delivery.accept()
        return found


def note_damage(net: Simulation, *ledgers: DeliveryLedger) -> None:
    """Note in each of *ledgers* the damaged messages that the disk has reported."""
    for payload in net.disk("broker").damaged:
        for ledger in ledgers:
            ledger.was_damaged(Message.decode(payload).body)


async def trade(net: Simulation, *, noise: bool = False) -> None:
    """Run queues, transactions and logs, each with senders and receivers; *noise* adds a client on the
    first connection, which may be garbled."""
    books = {
        "plain": DeliveryLedger("plain"),
        "resumed": DeliveryLedger("resumed", duplicates="never"),
        "moved": DeliveryLedger("moved", ordered=False),
        "log": DeliveryLedger("log"),
    }
    noisy = DeliveryLedger("noise", duplicates="allowed", ordered=False)
    net.start(
        "broker",
        serving(net, *map(Queue, ("plain", "resumed", "from", "to", "noise")), Log("log")),
    )
    sent = trio.Event()
    async with trio.open_nursery() as everybody:
        if noise:
            everybody.start_soon(_babble, net, noisy)
        await trio.sleep(0.5 if noise else 0.1)
        for name, options in (("plain", {}), ("resumed", NAMED)):
            everybody.start_soon(
                _call,
                Client(net, f"{name}-consumer").consume,
                (books[name], name, sent),
                options,
            )
        everybody.start_soon(Client(net, "mover").move, "from", "to", sent)
        async with trio.open_nursery() as producers:
            for host, book, address, options in (
                ("one", "plain", "plain", {}),
                ("two", "plain", "plain", {}),
                ("three", "resumed", "resumed", KEPT),
                ("four", "moved", "from", {}),
                ("five", "log", "log", {}),
            ):
                producers.start_soon(
                    _call, Client(net, host).produce, (books[book], address, 8), options
                )
            await trio.sleep(20)
            net.calm()
        sent.set()
    # A consumer that was cut off could not detach, and its deliveries in flight are kept for it.
    async with (
        Client(net, "resumed-consumer").connect() as peer,
        peer.receiver("resumed", credit=0, **NAMED),
    ):
        pass
    note_damage(net, *books.values())
    auditor = Client(net, "auditor")
    for name in ("plain", "resumed"):
        books[name].check(await auditor.read(name))
    books["moved"].check([*await auditor.read("from"), *await auditor.read("to")])
    books["log"].check(await auditor.read("log", filter=FROM_THE_FIRST))


async def _call(
    function: Callable[..., Awaitable[None]], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    await function(*args, **options)


async def _babble(net: Simulation, ledger: DeliveryLedger) -> None:
    """Send over a connection that may garble everything, and ignore the results."""
    client = Client(net, "noise")
    with trio.move_on_after(60):
        try:
            async with client.connect() as peer, peer.sender("noise") as out:
                for _ in range(20):
                    with trio.move_on_after(5):
                        await out.send(ledger.body("noise", 300))
                    await client.pause()
        except AmqpError:
            pass
