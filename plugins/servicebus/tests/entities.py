"""An entity, its clock, and receivers that are joined to it by two real engines in memory."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from uuid import UUID

from amqp_rt_servicebus.entity import Entity
from amqp_rt_servicebus.in_turns import InTurns
from amqp_rt_servicebus.messages import arrived
from amqp_rt_servicebus.options import Options
from amqp_rt_servicebus.requests import Requests
from amqp_rt_servicebus.steps import at_once
from amqp_rt_servicebus.stored import Stored

from amqp_rt import Message
from amqp_rt.broker.building import Memory, Subscription
from amqp_rt.fronts import AmqpError, Error, Source, Target
from amqp_rt.fronts.base import RCV_FIRST, SND_MIXED
from amqp_rt.testing.pairs import Joined, Recorder

NOW = 1_700_000_000.0


class Time:
    """Both clocks, which stand still until a test moves them."""

    def __init__(self) -> None:
        self.now = NOW

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - NOW


def ids() -> Any:
    """Return a maker of ids that counts."""
    count = 0

    def next_id() -> UUID:
        nonlocal count
        count += 1
        return UUID(int=0x1234_5678_9ABC_DEF0 << 64 | count)

    return next_id


class Whole:
    """Requests of which all steps are done at once."""

    def __init__(self, entity: Entity) -> None:
        self._requests = Requests(entity)

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._requests, name)

        def call(*arguments: Any, **named: Any) -> Any:
            found = request(*arguments, **named)
            return at_once(found) if isinstance(found, Generator) else found

        return call


class Divided:
    """Requests of which each turn of the event loop does one step."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def __getattr__(self, name: str) -> Any:
        bench = self._bench
        request = getattr(bench.entity_requests, name)

        def call(*arguments: Any, **named: Any) -> Any:
            bench.memory.work = 1
            waiting = InTurns(bench.entity, request(*arguments, **named))
            while not waiting.is_done:
                bench.turn(1)
            bench.memory.work = 1 << 40
            bench.run()
            return waiting.result()

        return call


class Bench:
    """An entity with everything that a host gives it."""

    def __init__(self, **options: Any) -> None:
        self.time = Time()
        self.memory = Memory(100 * 1024 * 1024)
        # One turn has time for all, unless a test sets this.
        self.memory.work = 1 << 40
        self.entity = Entity("q", Options(**options), self.memory, self.time, new_id=ids())
        self.entity_requests = Requests(self.entity)
        self.requests = Whole(self.entity)
        self.wired: list[Entity] = []
        self.alarms: list[float] = []
        self.unfinished: list[Entity] = []
        for part in self.entity.parts:
            self.wire(part)
        self.receivers: list[Receiving] = []

    def wire(self, entity: Entity) -> None:
        self.wired.append(entity)
        entity.on_alarm = self.alarms.append
        entity.on_unfinished = lambda: self.unfinished.append(entity)

    @property
    def dead(self) -> Entity:
        assert self.entity.dead_letters is not None
        return self.entity.dead_letters

    @property
    def transfers(self) -> Entity:
        assert self.entity.transfers is not None
        return self.entity.transfers

    def send(self, body: object = "m", to: Entity | None = None, **fields: Any) -> int:
        """Put a message as a client sends it; return its number."""
        return (to or self.entity).accept(arrived(Message(body, **fields).encode(), new_id=ids()))

    def advance(self, seconds: float) -> None:
        """Move the clock, and call what the host would call."""
        self.time.now += seconds
        for _ in range(1_000):
            due = [each for each in self.wired if each.alarm <= self.time.monotonic()]
            if not due:
                break
            for each in due:
                each.tick()
        self.run()

    def turn(self, work: int) -> None:
        """Continue unfinished work as the host does in one turn, which has time for *work*."""
        self.memory.work = work
        unfinished, self.unfinished[:] = self.unfinished[:], []
        for each in unfinished:
            each.resume()

    def run(self) -> None:
        """Continue unfinished work, and carry bytes."""
        while True:
            # What one receiver sends may make the entity send to one that was before it.
            for each in [*self.receivers, *self.receivers]:
                each.joined.pump()
            if not self.unfinished:
                return
            self.unfinished.pop().resume()

    def receiver(
        self,
        *,
        of: Entity | None = None,
        credit: int = 0,
        settled: bool = False,
        session: str | None = None,
        subscription: Subscription | None = None,
        **options: Any,
    ) -> Receiving:
        entity = of or self.entity
        if subscription is None:
            if session is not None:
                subscription = entity.consume_session(session, settled=settled)
                assert subscription is not None
            else:
                subscription = entity.consume(settled=settled)
        found = Receiving(self, subscription, **options)
        self.receivers.append(found)
        if credit:
            found.grant(credit)
        return found

    def requests_of(self, entity: Entity) -> Whole:
        return Whole(entity)

    def bodies(self, entity: Entity | None = None) -> list[Any]:
        """Return the bodies of all messages, in the order of their numbers."""
        shown = Whole(entity or self.entity).peek(0, 1_000)
        return [Message.decode(each).body for each in shown]

    def peeked(self, entity: Entity | None = None) -> list[Message]:
        return [Message.decode(each) for each in Whole(entity or self.entity).peek(0, 1_000)]


class Receiving:
    """Client's end of a link that receives from an entity."""

    def __init__(
        self,
        bench: Bench,
        subscription: Subscription,
        *,
        settle_mode: int = RCV_FIRST,
        max_message_size: int = 0,
    ) -> None:
        self.bench = bench
        self.subscription = subscription
        self.endpoint = Recorder()
        self.joined = Joined(on_attach=lambda link: link.accept(subscription))
        self.joined.pump()
        session = self.joined.client.begin()
        self.link = session.attach_receiver(
            "r",
            self.endpoint,
            source=Source(address="q"),
            target=Target(address="c"),
            snd_settle_mode=SND_MIXED,
            rcv_settle_mode=settle_mode,
            **({"max_message_size": max_message_size} if max_message_size else {}),
        )
        self.joined.pump()

    def grant(self, credit: int) -> None:
        self.link.grant(credit)
        self.bench.run()

    def drain(self, credit: int) -> None:
        self.link.grant(credit)
        self.link.drain()
        self.bench.run()

    @property
    def deliveries(self) -> list[Any]:
        return self.endpoint.deliveries

    @property
    def messages(self) -> list[Message]:
        return [Message.decode(each.payload) for each in self.deliveries]

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.messages]

    def token(self, index: int = -1) -> UUID:
        return UUID(bytes_le=self.deliveries[index].tag)

    def update(self, outcome: Any, index: int = -1) -> Any:
        """Send an outcome and wait for its answer, as the SDKs do; return the answer."""
        delivery = self.deliveries[index]
        delivery.update(outcome)
        self.bench.run()
        assert delivery in self.endpoint.settled, "the entity has not answered"
        return delivery.state

    @property
    def error(self) -> str | None:
        """Condition with which the link was detached."""
        if not self.endpoint.detached or self.endpoint.detached[0][0] is None:
            return None
        return str(self.endpoint.detached[0][0].condition)

    def detach(self) -> None:
        self.link.detach()
        self.bench.run()

    def cut(self) -> None:
        """Lose the connection."""
        self.joined.server.receive_eof(0.0)
        self.bench.receivers.remove(self)
        self.bench.run()


def condition(error: AmqpError | Error | None) -> str:
    assert error is not None
    return str(error.condition)


def stored_of(bench: Bench, number: int, entity: Entity | None = None) -> Stored:
    found = (entity or bench.entity).shelf.find(number)
    assert found is not None
    return found
