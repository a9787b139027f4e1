"""A broker with 0-10 connections, without streams, tasks or clocks: tests carry the octets."""

from __future__ import annotations

from typing import Any

from amqp_rt_amqp010 import Front
from octets010 import HEADER, Operation
from protocol010 import Connection, Session

from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.statistics import NodeStats
from amqp_rt.broker.topology.topologies import Topologies
from amqp_rt.events import AttachRequested, Event, LinksMoved, LoginRequested, Opened
from amqp_rt.fronts import DEFAULT_LIMITS, Error, Limits, Peer, ServerOptions
from amqp_rt.security.access import Rights


class World:
    """An empty broker."""

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        volatile: bool = True,
        journal: Journal | None = None,
        front: Front | None = None,
    ) -> None:
        self.now = 1_000.0
        self.limits = limits
        self.host = BrokerHost(limits=limits, clock=self, volatile=volatile, journal=journal)
        self.denied: set[tuple[Rights, str]] = set()
        self.topologies = Topologies(self.host, self._decide)
        self.front = front or Front()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def stats(self, name: str) -> NodeStats:
        return self.host.space().get(name).stats()

    def _decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        if (wanted, address) in self.denied:
            return Error("amqp:unauthorized-access", f"{address!r} is not for you")
        return None

    def connect(self, *, opened: bool = True, **options: Any) -> Client:
        """Return a client, which has opened its connection unless *opened* is False."""
        client = Client(self, **options)
        if opened:
            client.wire.start()
            client.pump()
            assert client.wire.opened
        return client

    def pass_time(self, seconds: float, *clients: Client) -> None:
        """Let time pass, in which nothing is due but at its end."""
        self.now += seconds
        if self.front.deadline <= self.now:
            self.front.tick(self.now)
        for client in clients:
            client.pump()


class Client:
    """A connection: the client's half, and the engine of the broker's.

    Args:
        world: The broker.
        wire: Options of the client's half, ``protocol010.Connection``.
        options: Those of the listener.
    """

    def __init__(self, world: World, wire: dict[str, Any] | None = None, **options: Any) -> None:
        self.world = world
        self.wire = Connection(**(wire or {}))
        self.engine = world.front.server(
            ServerOptions(
                container_id="server",
                limits=world.limits,
                **{
                    "mechanisms": ("ANONYMOUS",),
                    "topology": world.topologies.of,
                    **options,
                },
            ),
            world.now,
        )
        self.events: list[Event] = []
        self.logins: list[LoginRequested] = []
        #: Whether logins succeed; otherwise they are left in ``logins``.
        self.lets_in = True
        #: Whether the client's half reads what the engine writes; otherwise it is in ``output``.
        self.reads = True
        self.output: list[bytes] = []
        #: If a list, attach requests are appended to it, for the test to answer.
        self.holds: list[Any] | None = None
        self.moved: list[Any] = []

    # --- octets ---

    def feed(self, data: bytes) -> None:
        """Give octets to the engine, and the client's half what comes back."""
        self._call(data)
        self.pump()

    def say(self, name: str, channel: int = 0, /, **fields: Any) -> None:
        """Send a control in the place of the client's half."""
        self.wire.control(name, channel, **fields)
        self.pump()

    def pump(self) -> None:
        """Carry octets in both directions until there are no more."""
        while True:
            engine = self.engine
            data = b"".join(self.wire.take())
            if data and not engine.finished:
                self._call(data)
            elif engine.unread and not engine.finished:
                self._call(b"")
            elif output := self._take():
                self.output += output
                if self.reads:
                    self._read()
            elif engine.deadline <= self.world.now:
                self._handle(engine.tick(self.world.now))
            else:
                return

    def _take(self) -> list[bytes]:
        """Return output of the engine; check that nothing is left to do unless ``notifies`` was True."""
        engine, now = self.engine, self.world.now
        notifies = engine.notifies
        busy = engine.unread or engine.deadline <= now
        output = engine.take()
        if not (notifies or busy):
            assert not engine.output_size
            assert not engine.unread
            assert engine.deadline > now
        return output

    def read(self) -> None:
        """Read what was left, and read on from now."""
        self.reads = True
        self._read()
        self.pump()

    def _read(self) -> None:
        output, self.output = self.output, []
        self.wire.receive(b"".join(output))

    def _call(self, data: bytes) -> None:
        self._handle(self.engine.receive(data, self.world.now))

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, AttachRequested):
                if self.holds is not None:
                    self.holds.append(event.link)
                else:
                    self.place(event.link)
            elif isinstance(event, LoginRequested):
                self.logins.append(event)
                if self.lets_in:
                    event.exchange.succeed(None)
            elif isinstance(event, LinksMoved):
                self.moved.append(event.anchor)
            elif isinstance(event, Opened):
                event.peer.virtual_host = ""

    def place(self, link: Any) -> None:
        if not self.world.host.attach(link):
            link.refuse(Error("amqp:not-found", "there is no such node"))

    # --- sessions ---

    def session(
        self, name: bytes = b"s", *, timeout: int = 0, channel: int | None = None
    ) -> Session:
        """Attach a new session."""
        session = self.wire.session(name, channel)
        session.attach()
        if timeout:
            session.ask_timeout(timeout)
        self.pump()
        assert session.attached
        return session

    def resume(self, session: Session, *, force: bool = False) -> None:
        """Attach a session of an earlier connection, and replay what the broker has not got."""
        self.wire.adopt(session)
        session.attach(point=False, force=force)
        self.pump()
        session.flush()
        self.pump()
        assert session.expected is not None
        if session.expected:
            session.replay()
            self.pump()

    def run(self, session: Session, name: str, /, **words: Any) -> Any:
        """Send a command, and return its result once it is complete."""
        number = session.send(name, sync=True, **words)
        self.pump()
        assert session.exception is None, session.exception
        assert session.is_complete(number), name
        return session.result(number)

    def fails(self, session: Session, name: str, /, **words: Any) -> int:
        """Send a command that fails, and return the code."""
        session.send(name, sync=True, **words)
        self.pump()
        assert session.exception is not None
        assert session.detached is not None
        code = session.exception.error_code
        assert isinstance(code, int)
        return code

    def lose(self) -> None:
        """End the stream."""
        self._handle(self.engine.receive_eof(self.world.now))
        self.wire.lost()

    def received(self, name: str) -> list[Operation]:
        """Return the operations *name* that have come."""
        return [each for each in self.wire.received if each.name == name]


__all__ = ["HEADER", "Client", "World"]
