"""Publishing without an engine: real sessions and a real broker, whose output is recorded.

The connection delivers what is posted when it is flushed, as the engine does at the end of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast

import worlds091
from amqp_rt_amqp010.assembling import Assembly
from amqp_rt_amqp010.codec import write_command, write_entries
from amqp_rt_amqp010.contexts import WAIT, Conclude
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.fragments import Fragments
from amqp_rt_amqp010.frames import COMMAND
from amqp_rt_amqp010.handlers import LATER, Answer, Later
from amqp_rt_amqp010.layouts import (
    Command,
    DeliveryProperties,
    ExecutionException,
    FragmentProperties,
    MessageProperties,
    MessageTransfer,
    TxSelect,
)
from amqp_rt_amqp010.order import fault_of
from amqp_rt_amqp010.partial_messages import PartialMessages
from amqp_rt_amqp010.publishing import Publisher
from amqp_rt_amqp010.recent import Recents
from amqp_rt_amqp010.serials import RangeSet
from amqp_rt_amqp010.sessions import Session
from amqp_rt_amqp010.staged_files import StagedFiles, StagingLimits
from amqp_rt_amqp010.transactions import CurrentTransaction, Transactions
from amqp_rt_amqp091 import Front as Front091
from amqp_rt_amqp091 import methods as m
from scenes010 import NAME, Channel, Scene

from amqp_rt import Container
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.statistics import NodeStats
from amqp_rt.broker.topology.topologies import Topologies
from amqp_rt.events import AttachRequested, Event, LinksMoved, Peer
from amqp_rt.fronts import DEFAULT_LIMITS, AmqpError, Error, Limits
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.links import FrontReceivingLink
from amqp_rt.security.access import Rights


class World(Scene):
    """An empty broker with sessions."""

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        volatile: bool = True,
        journal: Journal | None = None,
        asks: bool = False,
    ) -> None:
        super().__init__()
        self.limits = limits
        self.host = BrokerHost(limits=limits, clock=self, volatile=volatile, journal=journal)
        self.denied: set[tuple[Rights, str]] = set()
        self.topologies = Topologies(self.host, self._decide, asks=lambda: asks)
        self.handlers: list[PublishingHandler] = []
        self.partials = PartialMessages()
        #: For clients of 0-9-1.
        self.front = Front091()
        self.container = Container("server", limits=limits)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def stats(self, name: str) -> NodeStats:
        return self.host.space().get(name).stats()

    def available(self, name: str) -> int:
        return self.stats(name).available

    def _decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        if (wanted, address) in self.denied:
            return Error("amqp:unauthorized-access", f"{address!r} is not for you")
        return None

    def _open(self, session: Session) -> Any:
        made = PublishingHandler(self, session)
        self.handlers.append(made)
        return made

    def consumer(self, name: str, *, prefetch: int = 0, acks: bool = True) -> worlds091.Client:
        """Return a client of 0-9-1 that consumes from queue *name*."""
        made = worlds091.Client(cast("Any", self))
        made.open()
        made.say(1, m.BasicQos(prefetch_count=prefetch))
        made.say(1, m.BasicConsume(queue=name, no_ack=not acks))
        return made

    def publisher(self, *, timeout: int = 0, name: bytes = NAME) -> Publishing:
        """Return a channel with a new session, whose first output has been taken."""
        return Publishing(self, self.attached(timeout=timeout, name=name))


class FakeConnection:
    """Connection whose turns the test decides."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world = world
        self.peer = peer
        self.limits = world.limits
        self.output_size = 0
        self.thirsty: dict[Any, None] = {}
        self.given = 0
        self.ways: dict[tuple[object, ...], Any] = {}
        self.posts: list[tuple[Any, FrontReceivingLink, FrontDelivery]] = []
        self.events: list[Event] = []
        self.spent = 0
        self.recents = Recents()
        self.partials = world.partials
        self.staged = StagedFiles(StagingLimits())
        #: If a list, attach requests are appended to it, for the test to answer.
        self.holds: list[Any] | None = None

    def count_subscriptions(self) -> int:
        """Return none: each session has its own connection, and its own bound is lower."""
        return 0

    def report(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LinksMoved):
            return
        assert isinstance(event, AttachRequested)
        if self.holds is not None:
            self.holds.append(event.link)
        else:
            self.place(event.link)

    def place(self, link: Any) -> None:
        if not self.world.host.attach(link):
            link.refuse(Error("amqp:not-found", "there is no such node"))

    def post(self, way: Any, link: FrontReceivingLink, delivery: FrontDelivery) -> None:
        self.posts.append((way, link, delivery))

    def answer(self, conclude: Conclude, link: Any, delivery: Any) -> None:
        conclude(link, [delivery])

    def flush(self) -> None:
        self.ways.clear()
        posts, self.posts = self.posts, []
        for way, link, delivery in posts:
            if way is None:
                link.put([delivery])
            else:
                way.deliver(link, [delivery])

    def work_later(self, step: Callable[[], None]) -> None:
        raise AssertionError("steps run in turns of the test")

    def spend(self, work: int) -> None:
        self.spent += work


class PublishingContext:
    """Context of one session, whose steps run at once or when the test runs them."""

    def __init__(self, world: World, session: Session) -> None:
        peer = Peer(address="test", protocol="amqp0-10")
        peer.user = session.key.user
        peer.virtual_host = ""
        peer.container_id = "client"
        self.session = session
        self.limits = world.limits
        self.anchor = Anchor(world.limits, peer, "session")
        self.topology = world.topologies.of(peer, self.anchor)
        self.carried = FakeConnection(world, peer)
        #: Steps of the present command; and those that run only when the test runs them.
        self.steps: tuple[int, Generator[int, None, Answer]] | None = None
        self.command: Command = TxSelect()
        self.in_turns = False
        self.waits = self.woken = self.running = False
        #: Work of steps so far.
        self.work = 0

    @property
    def connection(self) -> FakeConnection | None:
        return None if self.session.carrier is None else self.carried

    def report(self, event: Event) -> None:
        self.carried.report(event)

    def run(self, number: int, command: Command, steps: Generator[int, None, Answer]) -> Later:
        assert self.steps is None
        self.steps = (number, steps)
        self.command = command
        self.go_on()
        return LATER

    def wake(self) -> None:
        if self.running or not self.waits:
            self.woken = True
        else:
            self.waits = False
            self.go_on()

    def go_on(self) -> None:
        """Run one step, or all that is left; a step may end the session."""
        self.running = True
        try:
            self._go_on()
        finally:
            self.running = False

    def _go_on(self) -> None:
        while self.steps is not None and not self.waits:
            number, steps = self.steps
            try:
                work = next(steps)
            except StopIteration as stop:
                self.steps = None
                if not isinstance(stop.value, Later):
                    self.session.complete(number, stop.value)
                return
            except (CommandFault, AmqpError) as error:
                self.steps = None
                self.session.fail(fault_of(error, self.command), number)
                return
            if work == WAIT:
                self.waits = not self.woken
                self.woken = False
            else:
                self.work += work
            if self.in_turns:
                return


class PublishingHandler:
    """Layer above a session: publishing and transactions."""

    def __init__(self, world: World, session: Session) -> None:
        self.context = PublishingContext(world, session)
        self.current = CurrentTransaction(world.limits.transaction_work_max)
        self.fragments = Fragments(self.context)
        self.publisher = Publisher(self.context, self.current, self.fragments)
        self.transactions = Transactions(self.context, self.current, self.publisher.report)
        self.methods = {
            **self.fragments.methods(),
            **self.publisher.methods(),
            **self.transactions.methods(),
        }

    def execute(self, number: int, command: Command, assembly: Assembly, *, sync: bool) -> Answer:
        if not isinstance(command, MessageTransfer):
            self.context.carried.flush()
        try:
            answer: Answer = self.methods[type(command)](number, command, assembly)
        except AmqpError as error:
            raise fault_of(error, command) from error
        return answer

    @property
    def is_congested(self) -> bool:
        return self.publisher.is_congested

    def on_result(self, number: int, value: object) -> None: ...

    def on_exception(self, exception: ExecutionException) -> None: ...

    def on_completed(self, commands: RangeSet) -> None: ...

    def on_ready(self) -> None: ...

    def on_suspended(self) -> None: ...

    def on_resumed(self) -> None: ...

    def on_ended(self) -> None:
        self.transactions.on_ended()
        self.publisher.on_ended()
        self.fragments.on_ended()
        self.context.anchor.end()
        self.context.topology.close()


class Publishing:
    """A channel whose client publishes; each call is a chunk of input."""

    def __init__(self, world: World, channel: Channel) -> None:
        self.world = world
        self.channel = channel
        self.session = channel.session
        handler = channel.session.handler
        assert isinstance(handler, PublishingHandler)
        self.handler = handler
        self.context = handler.context
        self.connection = handler.context.carried

    def feed(self, *assemblies: Assembly) -> None:
        """Receive *assemblies* and end the chunk."""
        for each in assemblies:
            self.channel.attachment.receive_command(each, self.world.now)
        self.connection.flush()
        self.channel.turn()

    def send(self, body: bytes = b"x", **options: Any) -> list[Any]:
        """Publish one message; return the output."""
        self.feed(transfer(body, **options))
        return self.channel.taken()

    def command(self, *commands: Command) -> list[Any]:
        """Receive *commands*; return the output."""
        made = []
        for each in commands:
            assembly = Assembly(1, COMMAND)
            assembly.content = write_command(each)
            made.append(assembly)
        self.feed(*made)
        return self.channel.taken()

    def turn(self) -> list[Any]:
        """Return the output of another turn."""
        self.connection.flush()
        self.channel.turn()
        return self.channel.taken()


def transfer(
    body: bytes = b"x",
    *,
    to: str | None = None,
    key: str | None = None,
    accept: int | None = None,
    acquire: int | None = None,
    discard: bool = False,
    immediate: bool = False,
    durable: bool = False,
    user_id: bytes | None = None,
    headers: dict[str, object] | None = None,
    fragment: FragmentProperties | None = None,
    resume_id: str | None = None,
    resume_ttl: int | None = None,
) -> Assembly:
    """Return a transfer as it arrives."""
    made = Assembly(1, COMMAND)
    made.content = write_command(
        MessageTransfer(destination=to, accept_mode=accept, acquire_mode=acquire)
    )
    entries: list[Any] = [
        DeliveryProperties(
            routing_key=key,
            discard_unroutable=discard,
            immediate=immediate,
            delivery_mode=2 if durable else None,
            resume_id=resume_id,
            resume_ttl=resume_ttl,
        )
    ]
    if fragment is not None:
        entries.append(fragment)
    if user_id is not None or headers is not None:
        entries.append(MessageProperties(user_id=user_id, application_headers=headers))
    made.header = write_entries(entries)
    made.body = [body]
    made.body_size = len(body)
    return made
