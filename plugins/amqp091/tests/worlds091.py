"""A broker with 0-9-1 connections, without streams, tasks or clocks: tests carry the octets."""

from __future__ import annotations

from typing import Any, TypeVar

from amqp_rt_amqp091 import Front
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.codec import read_header, read_method
from amqp_rt_amqp091.frames import (
    BODY,
    FRAME_MIN_SIZE,
    HEADER,
    METHOD,
    PROTOCOL_HEADER,
    Frame,
    FrameReader,
    content_frames,
    method_frame,
)

from amqp_rt import Container
from amqp_rt.broker.durable.journal import Journal
from amqp_rt.broker.host import BrokerHost
from amqp_rt.broker.statistics import NodeStats
from amqp_rt.broker.topology.topologies import Topologies
from amqp_rt.container.relaying import Forward
from amqp_rt.events import AttachRequested, Event, LoginRequested, Opened
from amqp_rt.fronts import DEFAULT_LIMITS, SENDER, Error, Limits, Peer, ServerOptions
from amqp_rt.security.access import Rights

T = TypeVar("T", bound=m.Method)


class World:
    """An empty broker."""

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        volatile: bool = True,
        journal: Journal | None = None,
    ) -> None:
        self.now = 1_000.0
        self.limits = limits
        self.host = BrokerHost(limits=limits, clock=self, volatile=volatile, journal=journal)
        self.denied: set[tuple[Rights, str]] = set()
        self.topologies = Topologies(self.host, self._decide)
        self.front = Front()
        self.container = Container("server", limits=limits)

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
        client = Client(self, **options)
        if opened:
            client.open()
        return client


class Content:
    """A method of the server with its content."""

    def __init__(self, method: Any, properties: m.BasicProperties, body: bytes) -> None:
        self.method = method
        self.properties = properties
        self.body = body


class Client:
    """Connection whose methods are encoded and fed to the engine, and whose output is decoded."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.engine = world.front.server(
            ServerOptions(
                container_id="server",
                limits=world.limits,
                **{
                    "mechanisms": ("ANONYMOUS",),
                    "sasl_required": False,
                    "topology": world.topologies.of,
                    **options,
                },
            ),
            world.now,
        )
        self.events: list[Event] = []
        self.logins: list[LoginRequested] = []
        self.wire = b""
        self.heard: list[tuple[int, Any]] = []
        #: If a list, attach requests are appended to it, for the test to answer.
        self.holds: list[Any] | None = None
        self._reader: FrameReader | None = None
        self._content: dict[int, list[Any]] = {}

    # --- octets ---

    def feed(self, data: bytes) -> None:
        self.handle(self.engine.receive(data, self.world.now))
        while self.engine.unread and not self.engine.finished:
            self.handle(self.engine.receive(b"", self.world.now))

    def handle(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, AttachRequested):
                if self.holds is not None:
                    self.holds.append(event.link)
                else:
                    self.place(event.link)
            elif isinstance(event, LoginRequested):
                self.logins.append(event)
            elif isinstance(event, Opened):
                event.peer.virtual_host = ""
        self._hear()
        if self.engine.deadline <= self.world.now:
            self.tick()

    def place(self, link: Any) -> None:
        """Accept or refuse *link*: direct replies are at the container, all else is at the broker."""
        container = self.world.container
        terminus = link.source if link.role == SENDER else link.target
        made = container.replies.dynamic.get(getattr(terminus, "address", None) or "")
        if getattr(terminus, "dynamic", False):
            container.replies.attach_direct(link)
        elif made is not None:
            link.accept(Forward(container, made, link))
        elif not self.world.host.attach(link):
            link.refuse(Error("amqp:not-found", "there is no such node"))

    def tick(self) -> None:
        self.handle(self.engine.tick(self.world.now))

    def _hear(self) -> None:
        data = b"".join(self.engine.take())
        self.wire += data
        if self._reader is None:
            if data.startswith(b"AMQP"):
                return
            self._reader = FrameReader(1 << 20)
        for frame in self._reader.feed(data):
            self._on_frame(frame)

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == METHOD:
            method = read_method(frame.payload)
            if method.content:
                self._content[frame.channel] = [method]
            else:
                self.heard.append((frame.channel, method))
        elif frame.type == HEADER:
            header = read_header(frame.payload)
            self._content[frame.channel] += [header, b""]
        elif frame.type == BODY:
            self._content[frame.channel][2] += frame.payload
        found = self._content.get(frame.channel)
        if found is not None and len(found) == 3 and len(found[2]) == found[1].body_size:
            del self._content[frame.channel]
            self.heard.append((frame.channel, Content(found[0], found[1].properties, found[2])))

    # --- requests ---

    def say(self, channel: int, *methods: m.Method) -> None:
        self.feed(b"".join(method_frame(channel, each) for each in methods))

    def publish(
        self,
        channel: int,
        key: str,
        body: bytes = b"",
        *,
        exchange: str = "",
        mandatory: bool = False,
        properties: m.BasicProperties | None = None,
    ) -> None:
        self.feed(published(channel, key, body, exchange, mandatory, properties))

    def open(self, channels: int = 1) -> None:
        self.feed(PROTOCOL_HEADER)
        self.say(
            0,
            m.ConnectionStartOk(
                mechanism="PLAIN",
                response=b"\0guest\0guest",
                locale="en_US",
                client_properties={
                    "capabilities": {
                        "consumer_cancel_notify": True,
                        "authentication_failure_close": True,
                    }
                },
            ),
        )
        for login in self.logins:
            self.handle(login.exchange.succeed(None))
        self.logins.clear()
        self.say(0, m.ConnectionTuneOk(channel_max=100, frame_max=FRAME_MIN_SIZE, heartbeat=10))
        self.say(0, m.ConnectionOpen(virtual_host="/"))
        for number in range(1, channels + 1):
            self.say(number, m.ChannelOpen())
        self.heard.clear()

    # --- responses ---

    def take(self) -> list[tuple[int, Any]]:
        """Return all methods received since the last call."""
        self._hear()
        heard, self.heard = self.heard, []
        return heard

    def answer(self, kind: type[T]) -> T:
        """Return the only method received since the last call."""
        ((_, method),) = self.take()
        assert isinstance(method, kind), method
        return method

    def contents(self) -> list[Any]:
        """Return the received methods that have content."""
        return [each for _, each in self.take() if isinstance(each, Content)]


def published(
    channel: int,
    key: str,
    body: bytes,
    exchange: str = "",
    mandatory: bool = False,
    properties: m.BasicProperties | None = None,
) -> bytes:
    """Return the octets of one message."""
    return b"".join(
        content_frames(
            channel,
            m.BasicPublish(exchange=exchange, routing_key=key, mandatory=mandatory),
            properties or m.BasicProperties(),
            body,
            FRAME_MIN_SIZE,
        )
    )
