"""A broker with clients, each joined to it by two real engines in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from amqp_rt import Broker, Connection, Container
from amqp_rt.broker.durable.facts import Identity
from amqp_rt.broker.entries import Entry
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.kinds.logs import LogNode
from amqp_rt.broker.kinds.queues import QueueNode
from amqp_rt.broker.nodes import Declaration
from amqp_rt.broker.queue.invariants import broken_invariants
from amqp_rt.broker.queue.queue import MessageQueue
from amqp_rt.broker.queue.subscriptions import Enlisted
from amqp_rt.broker.staging.attempts import Part
from amqp_rt.broker.statistics import LogStats, NodeStats
from amqp_rt.broker.topics import MessageTopic
from amqp_rt.events import AttachRequested
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import RCV_FIRST, SND_MIXED
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import Error, Outcome, Rejected
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import Declare, Declared, Discharge, TransactionalState


@asynccontextmanager
async def client_of(
    broker: Broker, name: str = "c", *, url: str = "memory://b", **options: Any
) -> AsyncIterator[Connection]:
    """Connect a container called *name* to a running broker, in memory."""
    async with (
        Container(name, network=broker.container.network) as container,
        container.connect(url, reconnect=None, **options) as peer,
    ):
        yield peer


class Time:
    """Both clocks, which stand still until a test moves them."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def acquired_entries(queue: MessageQueue) -> list[Entry] | None:
    """Return the entries held by deliveries of *queue*, None if some are not found at an attached link."""
    found: list[Entry] = []
    for consumer in queue.consumers.values():
        session = getattr(consumer.link, "session", None)
        # Links of a front have no such table.
        for sending in getattr(session, "_outgoing", {}).values():
            held = sending.context
            if sending.link is consumer.link and isinstance(held, Entry | Enlisted):
                found.append(held.entry if isinstance(held, Enlisted) else held)
    return found if len(found) == queue.acquired else None


def check_queues(host: BrokerHost) -> None:
    """Check the invariants of all queues of *host*, those of subscriptions included."""
    held = 0
    for node in host.spaces.nodes():
        queues: list[Any] = [node.held]
        if isinstance(node.held, MessageTopic):
            queues = list(node.held.queues)
        for queue in queues:
            if isinstance(queue, MessageQueue):
                broken = broken_invariants(queue, acquired_entries(queue))
                assert not broken, (node.declared.name, broken)
                held += queue.bytes_in_memory
    assert held <= host.memory.held


async def commit_epoch(
    host: BrokerHost,
    address: str,
    producer: str,
    run: str,
    epoch: int,
    parts: Sequence[tuple[int, int, int, int]],
    *,
    skip_different: bool = False,
    **identity: str,
) -> bool:
    """Publish the messages staged at *address*, as management does."""
    return await host.staging.commits.commit(
        host.space().find(address),
        producer,
        run,
        epoch,
        [Part(*part) for part in parts],
        Identity(**identity),
        skip_different=skip_different,
    )


def committed_epoch(host: BrokerHost, address: str, producer: str) -> int:
    """Return the epoch that *producer* committed last at *address*, -1 if none."""
    return host.staging.producers.committed(host.space().find(address), producer)


#: Worlds that the running test has made; ``conftest.py`` checks their queues after the test.
made: list[World] = []


class World:
    """A broker and the connections to it."""

    def __init__(self, *declared: Declaration, limits: Limits = DEFAULT_LIMITS, **options: Any):
        self.time = Time()
        self.limits = limits
        self.host = BrokerHost(limits=limits, clock=self.time, **options)
        for declaration in declared:
            self.host.space().declare(declaration)
        self.clients: list[Client] = []
        self._made = 0
        made.append(self)

    def queue_node(self, name: str) -> QueueNode:
        return self.host.space().find_kind(name, QueueNode)

    def stats(self, name: str) -> NodeStats:
        return self.host.space().get(name).stats()

    def log_stats(self, name: str) -> LogStats:
        return self.host.space().find_kind(name, LogNode).log_stats()

    def check(self) -> None:
        """Check the invariants of all queues."""
        check_queues(self.host)

    def client(self, name: str = "", *, limits: Limits | None = None) -> Client:
        # Clients that were cut have left the list: a reused number would steal their links.
        client = Client(self, name or f"client-{self._made}", limits or self.limits)
        self._made += 1
        self.clients.append(client)
        self.pump()
        return client

    def pump(self) -> None:
        """Carry bytes until no connection has output."""
        for _ in range(10_000):
            if not any(client.pump() for client in self.clients):
                return
        raise AssertionError("the engines never stop talking")

    # For tests without an event loop.

    def peek(self, address: str, count: int = 1) -> list[bytes]:
        return trio.run(self.queue_node(address).peek, count)

    def purge(self, address: str) -> int:
        return trio.run(self.queue_node(address).purge)

    def move(self, address: str, to: str, count: int) -> int:
        return trio.run(self.queue_node(address).move, self.host.space().find(to), count)


class Client:
    """Connection with one session."""

    def __init__(self, world: World, name: str, limits: Limits) -> None:
        self.world = world
        self.joined = Joined(
            client=amqp10.client(amqp10.ClientOptions(container_id=name, limits=limits), 0.0),
            limits=limits,
            on_attach=self._attach,
        )
        self.joined.pump()
        self.session = self.joined.client.begin()
        self.links = 0

    def _attach(self, link: Any) -> None:
        if (
            isinstance(link.target, Target)
            and link.target.address is None
            and not (link.target.dynamic or hasattr(link, "send"))
        ):
            link.accept(Relay(self.world.host))
        elif not self.world.host.attach(link):
            link.refuse(Error("amqp:not-found", "no such node"))

    def pump(self) -> bool:
        """Carry bytes once in each direction; return whether there were any."""
        joined = self.joined
        to_server = b"".join(joined.client.take())
        to_client = b"".join(joined.server.take())
        for event in joined.server.receive(to_server, joined.now) if to_server else ():
            if isinstance(event, AttachRequested):
                self._attach(event.link)
        if to_client:
            joined.client_events += joined.client.receive(to_client, joined.now)
        return bool(to_server or to_client)

    def sender(self, address: str | None, **options: Any) -> Sending:
        """Attach a link that sends to *address*; the broker may refuse it."""
        target = options.pop("target", None) or Target(address=address)
        self.links += 1
        name = options.pop("name", f"s{self.links}")
        endpoint = Recorder()
        link = self.session.attach_sender(name, endpoint, target=target, **options)
        self.world.pump()
        return Sending(self.world, link, endpoint)

    def receiver(
        self,
        address: str | None,
        *,
        credit: int = 0,
        settle: Outcome | None = None,
        snd_settle_mode: int = SND_MIXED,
        rcv_settle_mode: int = RCV_FIRST,
        source: Source | None = None,
        name: str = "",
        properties: dict[object, object] | None = None,
        desired_capabilities: tuple[str, ...] = (),
        **options: Any,
    ) -> Receiving:
        """Attach a link that receives from *address*, and grant *credit* once."""
        self.links += 1
        endpoint = Recorder(settle=settle)
        link = self.session.attach_receiver(
            name or f"r{self.links}",
            endpoint,
            source=source or Source(address=address, **options),
            snd_settle_mode=snd_settle_mode,
            rcv_settle_mode=rcv_settle_mode,
            properties=properties,
            desired_capabilities=desired_capabilities,
        )
        self.world.pump()
        receiving = Receiving(self.world, link, endpoint)
        if credit and link.attached:
            receiving.grant(credit)
        return receiving

    def cut(self) -> None:
        """Lose the connection, without a close or a detach."""
        self.joined.server.receive_eof(0.0)
        self.world.clients.remove(self)
        self.world.pump()


class Controller:
    """Client's end of a control link."""

    def __init__(self, client: Client, **options: Any) -> None:
        self.world = client.world
        self.endpoint = Recorder()
        self.link = client.session.attach_sender(
            f"control{client.links}",
            self.endpoint,
            source=Source(outcomes=options.pop("outcomes", ())),
            target=options.pop("target", Coordinator()),
            **options,
        )
        client.links += 1
        self.world.pump()

    def say(self, body: Any, **options: Any) -> Any:
        """Send *body*; return the delivery's state, None if there is none yet."""
        payload = Message(body).encode()
        sending = self.link.send(payload, **options)
        self.world.pump()
        return sending.state

    def declare(self) -> bytes:
        state = self.say(Declare())
        assert isinstance(state, Declared)
        return state.txn_id

    def discharge(self, txn_id: bytes, *, fail: bool = False) -> str:
        """Commit or roll back; return ``"accepted"``, or the condition with which that was rejected."""
        state = self.say(Discharge(txn_id, fail))
        return (
            state.error.condition if isinstance(state, Rejected) else type(state).__name__.lower()
        )

    @property
    def error(self) -> str | None:
        """Condition with which the link was detached."""
        if not self.endpoint.detached or self.endpoint.detached[0][0] is None:
            return None
        return str(self.endpoint.detached[0][0].condition)


class Relay(Recorder):
    """Simplest form of the anonymous terminus, which caches resolved addresses."""

    def __init__(self, host: BrokerHost) -> None:
        super().__init__(credit=100)
        self.host = host
        self.resolved: dict[str, Any] = {}

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        for delivery in deliveries:
            to = str(Message.decode(delivery.payload).to)
            if to not in self.resolved:
                self.resolved[to] = self.host.relay(to, link)
            found = self.resolved[to]
            if found is None or isinstance(found, Error):
                delivery.settle(Rejected(found or Error("amqp:not-found")))
            else:
                found.deliver(link, [delivery])
        link.grant(self.credit)


class _End:
    def __init__(self, world: World, link: Any, endpoint: Recorder) -> None:
        self.world = world
        self.link = link
        self.endpoint = endpoint

    @property
    def error(self) -> str | None:
        """Condition with which the link was refused or detached."""
        if not self.endpoint.detached:
            return None
        error, _ = self.endpoint.detached[0]
        return None if error is None else str(error.condition)

    def detach(self, **options: Any) -> None:
        self.link.detach(**options)
        self.world.pump()


class Sending(_End):
    """Client's end of a link to the broker."""

    def send(self, *bodies: Any, settled: bool | None = None, **fields: Any) -> None:
        """Send one message for each body."""
        for body in bodies:
            self.link.send(Message(body, **fields).encode(), body, settled=settled)
        self.world.pump()

    def post(self, txn_id: bytes, *bodies: Any, settled: bool | None = None, **fields: Any) -> None:
        """Send one message for each body, within a transaction."""
        for body in bodies:
            state = TransactionalState(txn_id)
            self.link.send(Message(body, **fields).encode(), settled=settled, state=state)
        self.world.pump()

    def send_raw(self, payload: bytes, **options: Any) -> None:
        self.link.send(payload, **options)
        self.world.pump()

    @property
    def outcomes(self) -> list[Any]:
        """States of the settled deliveries, in the order of the broker's dispositions."""
        return [delivery.state for delivery in self.endpoint.outcomes]


class Receiving(_End):
    """Client's end of a link from the broker."""

    def grant(self, credit: int) -> None:
        self.link.grant(credit)
        self.world.pump()

    def drain(self) -> None:
        self.link.drain()
        self.world.pump()

    @property
    def messages(self) -> list[Message]:
        return [Message.decode(delivery.payload) for delivery in self.endpoint.deliveries]

    @property
    def bodies(self) -> list[Any]:
        return [message.body for message in self.messages]

    def settle(self, outcome: Outcome | None, *indexes: int) -> None:
        """Settle the deliveries with these indexes, or all of them, with *outcome*."""
        deliveries = self.endpoint.deliveries
        chosen = [deliveries[index] for index in indexes] if indexes else deliveries
        for delivery in chosen:
            delivery.settle(outcome)
        self.world.pump()
