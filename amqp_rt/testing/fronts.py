"""Checks of a protocol front that run anywhere: in pytest, in a script, in a plug-in's tests.

A front is tested from both sides: by a client of its protocol, which its author provides
(:class:`FrontClient`), and by the links that it makes for a real broker. There is no stream, no
task and no clock: octets are carried by hand, and time is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final, Protocol

from ..broker.host import BrokerHost
from ..broker.kinds.queues import QueueNode
from ..broker.nodes import Queue
from ..broker.queue.queue import MessageQueue
from ..events import AttachRequested, Event, LoginRequested, Opened
from ..fronts.base import Front, ProtocolEngine, ServerOptions
from ..limits import Limits
from ..message import Message
from ..outcomes import ACCEPTED, Error, rejected
from .pairs import Recorder

__all__ = ["FRONT_CHECKS", "FrontClient", "FrontWorld", "check_front"]

#: Bodies of several sizes; the last takes several frames.
_BODIES: Final = (b"", b"x", b"y" * 300, bytes(range(251)) * 400)
#: Variations of recorded octets to try.
_GARBLINGS: Final = 300
#: Exchanges of octets after which a conversation counts as endless.
_TURNS_MAX: Final = 10_000
#: Octets of output allowed in answer to garbage.
_OUTPUT_MAX: Final = 100_000
_GONE: Final = Error("amqp:connection:forced", "the server goes away")


class FrontClient(Protocol):
    """A client of the front's protocol without its stream.

    Calls may follow each other before any octet is carried; calls before :attr:`opened` take effect
    after it.
    """

    @property
    def opened(self) -> bool:
        """Whether the login was accepted."""

    @property
    def closed(self) -> bool:
        """Whether the server has closed the connection, in the way of the protocol."""

    @property
    def failed(self) -> bool:
        """Whether the server has refused an address; it may have closed the connection for it."""

    @property
    def accepted(self) -> list[int]:
        """Numbers of the messages that the server has accepted, in the order of its answers."""

    @property
    def refused(self) -> list[int]:
        """Numbers of the messages that the server has rejected."""

    @property
    def received(self) -> list[tuple[Any, bytes]]:
        """Messages of subscriptions, in order: a key to settle the message, and its body."""

    def open(self, user: str, password: str) -> None:
        """Start the connection; log in as *user* if asked to."""

    def send(self, address: str, number: int, body: bytes) -> None:
        """Send a message of binary data, with an acknowledgement requested."""

    def subscribe(self, address: str, window: int) -> None:
        """Receive from *address*, with at most *window* unsettled messages."""

    def accept(self, key: Any) -> None:
        """Accept a message."""

    def release(self, key: Any) -> None:
        """Release a message, so that any consumer may receive it."""

    def close(self) -> None:
        """Close the connection, in the way of the protocol."""

    def receive(self, data: bytes) -> None:
        """Handle octets from the server."""

    def take(self) -> bytes:
        """Return the octets for the server."""


class FrontConnection:
    """A connection between a client and an engine of the front.

    Attributes:
        engine: The front's engine.
        client: The client.
        said: All octets that the client has sent.
        woken: Number of calls of the engine's ``on_output``.
        links: Links that the engine requested.
        logins: Login requests without an answer.
        opened: Number of ``Opened`` events.
    """

    def __init__(self, world: FrontWorld, engine: ProtocolEngine, client: FrontClient) -> None:
        self.engine = engine
        self.client = client
        self.said = bytearray()
        self.woken = 0
        self.links: list[Any] = []
        self.logins: list[LoginRequested] = []
        self.opened = 0
        self._world = world
        engine.on_output = self._wake

    def _wake(self) -> None:
        self.woken += 1

    def pump(self, cut: int = 0) -> None:
        """Carry octets both ways until both sides are silent, in pieces of *cut* unless it is 0."""
        for _ in range(_TURNS_MAX):
            data = self.client.take()
            self._catch_up()
            answer = self.take()
            if not data and not answer:
                return
            self.said += data
            self.feed(data, cut)
            for piece in _pieces(answer, cut):
                self.client.receive(piece)
        raise AssertionError("front and client never stop talking")

    def _catch_up(self) -> None:
        """Call the engine as far as it asks for that."""
        engine, now = self.engine, self._world.now
        if engine.unread and not engine.finished:
            self.handle(engine.receive(b"", now))
        if engine.deadline <= now:
            self.handle(engine.tick(now))

    def feed(self, data: bytes, cut: int = 0) -> None:
        """Pass *data* to the engine."""
        for piece in _pieces(data, cut):
            self.handle(self.engine.receive(piece, self._world.now))

    def take(self) -> bytes:
        """Take the output of the engine."""
        size = self.engine.output_size
        data = b"".join(self.engine.take())
        # Output gathered only by ``take`` is not in ``output_size``.
        assert size <= len(data), f"output_size says {size}, and {len(data)} octets are taken"
        assert self.engine.output_size == 0, "output that was taken is still counted"
        return data

    def lose(self) -> None:
        """End the stream."""
        self.handle(self.engine.receive_eof(self._world.now))

    def handle(self, events: list[Event]) -> None:
        """Handle events as a container does."""
        for event in events:
            if isinstance(event, AttachRequested):
                self.links.append(event.link)
                self._world.on_attach(event.link)
            elif isinstance(event, LoginRequested):
                self.logins.append(event)
            elif isinstance(event, Opened):
                self.opened += 1


class FrontWorld:
    """A broker with the queue ``work``, for testing a front.

    Args:
        front: The front to test.
        client: Creates a client of its protocol.
    """

    def __init__(self, front: Front, client: Callable[[], FrontClient]) -> None:
        self.front = front
        self.now = 1_000.0
        self.limits = Limits()
        self.host = BrokerHost(limits=self.limits, clock=self)
        self.host.space().declare(Queue("work"))
        #: The queue itself; without a store it is in memory, so that no call has to be awaited.
        self.queue: MessageQueue = self.host.space().find_kind("work", QueueNode).held
        self.on_attach: Callable[[Any], None] = self._attach
        self._client = client

    def monotonic(self) -> float:
        """Return the time of the broker's clock."""
        return self.now

    def wall(self) -> float:
        """Return the time of the broker's clock."""
        return self.now

    def _attach(self, link: Any) -> None:
        if not self.host.attach(link):
            link.refuse(Error("amqp:not-found", "there is no such node"))

    def join(self, *, logins: bool = False) -> FrontConnection:
        """Create a connection without any octets sent; with *logins* a login is required."""
        options = ServerOptions(
            container_id="judge",
            limits=self.limits,
            mechanisms=("PLAIN",) if logins else ("ANONYMOUS",),
            sasl_required=logins,
            address="127.0.0.1:9",
        )
        return FrontConnection(self, self.front.server(options, self.now), self._client())

    def connect(self, cut: int = 0) -> FrontConnection:
        """Create a connection and open it."""
        joined = self.join()
        joined.client.open("", "")
        joined.pump(cut)
        while joined.logins:
            joined.handle(joined.logins.pop().exchange.succeed("", None))
            joined.pump(cut)
        assert joined.client.opened, "the client was not let in"
        assert joined.opened == 1, "an engine reports once that its connection is open"
        return joined

    def publish(self, *bodies: bytes) -> None:
        """Put messages into the queue."""
        for body in bodies:
            self.host.space().publish("work", bytes(Message(body).encode()))

    def bodies(self) -> list[object]:
        """Return the bodies of the messages in the queue."""
        waiting = self.queue.peek(self.queue.available)
        return [Message.decode(entry.payload).body for entry in waiting]

    def check_left(self) -> None:
        """Check that no link and no acquired message is left."""
        stats = self.host.space().get("work").stats()
        assert stats.consumers == 0, "a consumer is left behind"
        assert stats.producers == 0, "a producer is left behind"
        assert stats.acquired == 0, "messages are left in the hands of one who is gone"


def check_front(front: Front, client: Callable[[], FrontClient]) -> None:
    """Check that *front* keeps the contract of a front.

    Args:
        front: Creates the engines; see :mod:`amqp_rt.fronts.base`.
        client: Creates a client of the protocol that has not sent anything.

    Raises:
        AssertionError: A check failed; its name is in the traceback. Any other exception is a
            failure of that check too.
    """
    for check in FRONT_CHECKS:
        check(FrontWorld(front, client))


def _pieces(data: bytes, cut: int) -> list[bytes]:
    if not data:
        return []
    step = cut or len(data)
    return [data[at : at + step] for at in range(0, len(data), step)]


def it_says_what_it_speaks(world: FrontWorld) -> None:
    front = world.front
    assert front.name
    assert front.headers
    assert all(len(header) == 8 for header in front.headers), "a header has eight octets"
    assert front.preferred_header in front.headers
    engine = world.connect().engine
    assert engine.peer.protocol == front.name, "the peer does not know its protocol"
    assert engine.peer.address == "127.0.0.1:9"


def what_is_sent_is_there(world: FrontWorld) -> None:
    for cut in (0, 1, 7):
        joined = world.connect(cut)
        for number, body in enumerate(_BODIES):
            joined.client.send("work", number, body)
        joined.pump(cut)
        assert world.bodies() == list(_BODIES), f"in pieces of {cut or 'any'} octets"
        assert sorted(joined.client.accepted) == [0, 1, 2, 3], "not all is acknowledged"
        assert joined.client.refused == [], "an accepted message is refused"
        world.queue.purge()
        joined.lose()


def what_is_there_is_received(world: FrontWorld) -> None:
    for cut in (0, 1, 7):
        joined = world.connect(cut)
        joined.client.subscribe("work", 10)
        joined.pump(cut)
        woken = joined.woken
        world.publish(*_BODIES)
        assert joined.woken > woken, "on_output was not called"
        joined.pump(cut)
        found = [body for _, body in joined.client.received]
        assert found == list(_BODIES), f"in pieces of {cut or 'any'} octets"
        for key, _ in joined.client.received:
            joined.client.accept(key)
        joined.pump(cut)
        joined.lose()
        world.check_left()
        assert world.bodies() == [], "an accepted message is available again"


def nothing_is_acknowledged_before_it_is_settled(world: FrontWorld) -> None:
    heard = Recorder(credit=10)
    world.on_attach = lambda link: link.accept(heard)
    joined = world.connect()
    for number in range(3):
        joined.client.send("work", number, b"x")
    joined.pump()
    assert len(heard.deliveries) == 3, "messages do not arrive"
    assert joined.client.accepted == [], "a message was acknowledged before it was settled"
    heard.deliveries[0].settle(ACCEPTED)
    joined.pump()
    assert joined.client.accepted == [0], "a settled message is not acknowledged"
    heard.deliveries[1].settle(rejected("amqp:precondition-failed"))
    heard.deliveries[2].settle(ACCEPTED)
    joined.pump()
    assert (joined.client.accepted, joined.client.refused) == ([0, 2], [1]), (
        f"of 0, 1 and 2 the second was rejected; the client heard {joined.client.accepted} as accepted "
        f"and {joined.client.refused} as refused"
    )


def no_more_is_in_hand_than_is_wanted(world: FrontWorld) -> None:
    world.publish(*(b"%d" % number for number in range(10)))
    joined = world.connect()
    joined.client.subscribe("work", 3)
    joined.pump()
    received = joined.client.received
    assert [body for _, body in received] == [b"0", b"1", b"2"], "the window is another one"
    assert world.host.space().get("work").stats().acquired == 3
    joined.client.accept(received[0][0])
    joined.pump()
    found = [body for _, body in received]
    assert found == [b"0", b"1", b"2", b"3"], "an accepted message makes no room for another"
    joined.lose()
    world.check_left()
    assert world.bodies() == [b"%d" % number for number in range(1, 10)], "not all are there again"


def what_is_given_back_comes_again(world: FrontWorld) -> None:
    world.publish(b"a", b"b")
    joined = world.connect()
    joined.client.subscribe("work", 1)
    joined.pump()
    joined.client.release(joined.client.received[0][0])
    joined.pump()
    found = [body for _, body in joined.client.received]
    assert found == [b"a", b"a"], "a returned message is not delivered again"
    joined.client.accept(joined.client.received[1][0])
    joined.pump()
    found = [body for _, body in joined.client.received]
    assert found == [b"a", b"a", b"b"], "the next message is not delivered"


def who_closes_leaves_nothing(world: FrontWorld) -> None:
    world.publish(b"a")
    joined = world.connect()
    joined.client.subscribe("work", 5)
    joined.client.send("work", 0, b"b")
    joined.pump()
    joined.client.close()
    joined.pump()
    assert joined.client.closed, "a close is not answered"
    assert joined.engine.finished, "it is closed, and not finished"
    world.check_left()
    assert world.bodies() == [b"a", b"b"], "who closes takes something along"


def a_server_that_goes_says_so(world: FrontWorld) -> None:
    joined = world.connect()
    joined.client.subscribe("work", 5)
    joined.pump()
    woken = joined.woken
    joined.engine.close(_GONE)
    assert joined.woken > woken, "on_output was not called"
    joined.pump()
    assert joined.client.closed, "the client is not notified"
    joined.lose()
    assert joined.engine.finished, "it is closed, and not finished"
    world.check_left()
    joined.engine.close(_GONE)
    assert joined.take() == b"", "there is output after the end"


def what_is_not_there_is_refused(world: FrontWorld) -> None:
    for ask in ("send", "subscribe"):
        joined = world.connect()
        if ask == "send":
            joined.client.send("nowhere", 0, b"x")
        else:
            joined.client.subscribe("nowhere", 1)
        joined.pump()
        heard = joined.client.failed or joined.client.closed or joined.client.refused
        assert heard, f"to {ask} where there is nothing is not refused"
        assert joined.client.accepted == [], "a message to no node is acknowledged"
    assert [node.name for node in world.host.space().declarations()] == ["work"], "a node was made"
    other = world.connect()
    other.client.send("work", 0, b"x")
    other.pump()
    assert other.client.accepted == [0], "others suffer for it"


def nobody_gets_in_without_a_login(world: FrontWorld) -> None:
    for lets_in in (True, False):
        joined = world.join(logins=True)
        joined.client.open("ada", "s3cret")
        joined.client.subscribe("work", 1)
        joined.pump()
        assert len(joined.logins) == 1, "it does not ask who that is"
        assert not joined.client.opened, "it lets a stranger in"
        assert not joined.links, "a stranger gets a link"
        login = joined.logins.pop()
        exchange = login.exchange
        assert b"s3cret" in (login.response or b""), "the password does not arrive"
        if lets_in:
            joined.handle(exchange.succeed("ada", None))
        else:
            exchange.fail()
        joined.pump()
        assert joined.client.opened is lets_in, "the verdict on a login is not followed"
        assert len(joined.links) == lets_in, (
            "requests from before the login are not processed after it"
        )
        if lets_in:
            assert joined.engine.peer.user == "ada", "the peer does not know its user"
        joined.lose()
        assert joined.engine.finished, "its stream ended, and it goes on"
        world.check_left()


def who_says_nothing_is_not_waited_for(world: FrontWorld) -> None:
    joined = world.join()
    joined.feed(world.front.preferred_header)
    joined.take()
    latest = world.now + world.limits.handshake_s
    for _ in range(100):
        if joined.engine.finished:
            break
        assert joined.engine.deadline <= latest + 1, "a stranger may stay for ever"
        world.now = max(world.now, joined.engine.deadline)
        joined.handle(joined.engine.tick(world.now))
        joined.take()
        if world.now > latest:
            joined.lose()
    assert joined.engine.finished, "time passes, and it does not notice"


def _session(world: FrontWorld) -> bytes:
    """Return all octets that a client sends in a short session."""
    world.publish(b"a", b"b")
    joined = world.connect()
    joined.client.subscribe("work", 5)
    joined.client.send("work", 0, b"c")
    joined.client.send("work", 1, b"d" * 300)
    joined.pump()
    joined.client.accept(joined.client.received[0][0])
    joined.pump()
    joined.client.close()
    joined.pump()
    world.queue.purge()
    return bytes(joined.said)


def the_end_may_come_after_any_octet(world: FrontWorld) -> None:
    said = _session(world)
    for end in range(len(said)):
        world.publish(b"a", b"b")
        joined = world.join()
        joined.feed(said[:end])
        joined.take()
        joined.lose()
        joined.take()
        assert joined.engine.finished, f"the stream ended after {end} octets, and it goes on"
        world.check_left()
        world.queue.purge()


def garbage_harms_nobody(world: FrontWorld) -> None:
    said = _session(world)
    luck = Random(1)  # noqa: S311  # must be reproducible
    for _ in range(_GARBLINGS):
        garbled = bytearray(said)
        for _ in range(luck.choice([1, 1, 2, 8])):
            garbled[luck.randrange(8, len(garbled))] = luck.randrange(256)
        at = luck.randrange(8, len(garbled))
        if luck.random() < 0.3:
            garbled[at:at] = luck.randbytes(luck.choice([1, 5, 100]))
        world.publish(b"a", b"b")
        joined = world.join()
        joined.feed(bytes(garbled), luck.choice([0, 0, 13]))
        assert joined.engine.output_size < _OUTPUT_MAX, "garbage is answered without end"
        joined.take()
        joined.lose()
        joined.take()
        assert joined.engine.finished, "its stream ended, and it goes on"
        world.check_left()
        world.queue.purge()
    other = world.connect()
    other.client.send("work", 0, b"x")
    other.pump()
    assert other.client.accepted == [0], "others suffer for it"


#: Each check takes a world of its own.
FRONT_CHECKS: Final[tuple[Callable[[FrontWorld], None], ...]] = (
    it_says_what_it_speaks,
    what_is_sent_is_there,
    what_is_there_is_received,
    nothing_is_acknowledged_before_it_is_settled,
    no_more_is_in_hand_than_is_wanted,
    what_is_given_back_comes_again,
    who_closes_leaves_nothing,
    a_server_that_goes_says_so,
    what_is_not_there_is_refused,
    nobody_gets_in_without_a_login,
    who_says_nothing_is_not_waited_for,
    the_end_may_come_after_any_octet,
    garbage_harms_nobody,
)
