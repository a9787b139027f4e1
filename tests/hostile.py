"""An engine with a hostile peer, and a program around it that behaves as typical programs do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conversations import Mechanism, frames
from sanity import check

from amqp_rt.core.engine import Engine
from amqp_rt.core.sasl_frames import SaslInit
from amqp_rt.errors import LocalProtocolError
from amqp_rt.events import AttachRequested, Closed, ConnectionFailed, Event, LoginRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import KIB, Limits
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, rejected
from amqp_rt.termini import Source, Target

#: Small limits, so that a peer reaches them.
LIMITS = Limits(
    frame_size_max=4 * KIB,
    message_size_max=8 * KIB,
    session_window=20,
    session_window_bytes=128 * KIB,
    unsettled_max=20,
    handle_max=7,
    channel_max=3,
    output_max=8 * KIB,
)
OUTCOMES = (ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("amqp:not-found", "gone"))


class Busy:
    """Endpoint that reacts to each callback by settling, sending or granting, differently each time."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.heard: list[str] = []

    def on_attached(self, link: Any) -> None:
        self.heard.append("attached")
        if hasattr(link, "grant"):
            link.grant(3 + self.kind)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.heard += ["deliver"] * len(deliveries)
        for delivery in deliveries:
            self.kind += 1
            if self.kind % 5:
                delivery.settle(OUTCOMES[self.kind % 4])
            delivery.read_chunks()
        if self.kind % 7 == 0:
            link.detach(closed=False)
        else:
            link.grant(self.kind % 11)

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        self.heard.append("data")
        for delivery in deliveries:
            delivery.read_chunks()

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        self.heard.append("settled")
        for delivery in deliveries:
            if delivery.local_state is None:
                delivery.settle(ACCEPTED)

    def on_flow(self, link: Any) -> None:
        self.heard.append("flow")
        if link.credit == 0:
            link.grant(2)

    def on_credit(self, link: Any) -> None:
        self.heard.append("credit")
        while link.credit and link.writable and len(self.heard) < 200:
            self.kind += 1
            self.heard.append("send")
            if self.kind % 3 == 0:
                body = link.send(b"begin", more=True)
                if self.kind % 2:
                    body.write(b"x" * 9_000, more=False)
                else:
                    body.abort()
            else:
                link.send(b"x" * (self.kind * 37 % 6_000))
        if link.draining:
            link.drained()

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        self.heard.append("outcomes")
        for delivery in deliveries:
            delivery.settle(delivery.state)

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        self.heard.append("detached")
        assert self.heard.count("detached") == 1


class Program:
    """Drives *engine* as a driver and a container would, and asserts after each step."""

    def __init__(self, engine: Engine, *, answers: bool = True) -> None:
        self.engine = engine
        #: Whether attach requests are answered at once.
        self.answers = answers
        #: Whether this side attaches links itself.
        self.works = True
        self.events: list[Event] = []
        self.endpoints: list[Busy] = []
        self.pending: list[Any] = []
        self.said = bytearray()
        self.now = 0.0
        self.woken = 0
        engine.on_output = self._wake

    def _wake(self) -> None:
        self.woken += 1

    def hear(self, data: bytes) -> None:
        self._handle(self.engine.receive(data, self.now))
        self.take()

    def take(self) -> None:
        # A peer's input causes a bounded amount of output: the loop must end.
        for _ in range(1_000):
            data = b"".join(self.engine.take())
            if not data:
                break
            self.said += data
            for item in frames(data):
                assert item.performative is not None or item.payload
        else:
            raise AssertionError("the engine never stops talking")
        check(self.engine)

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, AttachRequested):
                self.pending.append(event.link)
                if self.answers:
                    self.answer()
            elif isinstance(event, LoginRequested):
                if event.response == b"wrong":
                    event.exchange.fail()
                elif event.response == b"more":
                    self._handle(event.exchange.challenge(b"and?"))
                else:
                    self._handle(event.exchange.succeed("user"))
            elif isinstance(event, Opened) and self.works:
                self.work()

    def answer(self) -> None:
        """Answer the oldest attach request."""
        if not self.pending:
            return
        link = self.pending.pop(0)
        endpoint = Busy(len(self.endpoints))
        self.endpoints.append(endpoint)
        if endpoint.kind % 4 == 3:
            link.refuse(Error("amqp:not-found", "no such node"))
        elif hasattr(link, "grant"):
            link.accept(endpoint, streaming=endpoint.kind % 4 == 2)
        else:
            link.accept(endpoint)

    def work(self) -> None:
        """Begin a session and attach links of our own, if the engine permits that."""
        self.attempt(lambda: self._attach(self.engine.begin()))

    def _attach(self, session: Any) -> None:
        for name in ("l", "ours"):
            for make in (session.attach_sender, session.attach_receiver):
                endpoint = Busy(len(self.endpoints))
                self.endpoints.append(endpoint)
                make(name, endpoint, source=Source(address="q"), target=Target(address="q"))

    @staticmethod
    def attempt(call: Callable[[], object]) -> None:
        """Run *call*, which may be refused; a refusal must change nothing."""
        try:
            call()
        except LocalProtocolError:
            pass

    def end(self) -> None:
        """Advance the time until the connection has ended, then end the stream."""
        while self.pending:
            self.answer()
        for _ in range(3):
            self.now = min(self.engine.deadline, self.now + 1_000)
            self._handle(self.engine.tick(self.now))
            self.take()
        self._handle(self.engine.receive_eof(self.now))
        self.take()
        assert self.engine.finished
        assert self.engine.receive(b"more", self.now) == []
        assert self.engine.tick(self.now + 1) == []
        assert self.engine.take() == []
        ends = [event for event in self.events if isinstance(event, Closed | ConnectionFailed)]
        assert len(ends) == 1
        for endpoint in self.endpoints:
            assert endpoint.heard.count("detached") <= 1
            if "attached" in endpoint.heard:
                assert endpoint.heard[-1] == "detached"


def server(*, sasl: bool = False, answers: bool = True) -> Program:
    options = ServerOptions(
        container_id="server",
        limits=LIMITS,
        mechanisms=("PLAIN", "ANONYMOUS") if sasl else (),
        sasl_required=sasl,
    )
    return Program(amqp10.Front().server(options, 0.0), answers=answers)


def client(*, sasl: bool = False, pipelined: bool = True, answers: bool = True) -> Program:
    mechanisms = (Mechanism(SaslInit("ANONYMOUS", b""), [b"x"] * 50),) if sasl else ()
    options = amqp10.ClientOptions(
        container_id="client", limits=LIMITS, mechanisms=mechanisms, pipelined=pipelined
    )
    return Program(amqp10.client(options, 0.0), answers=answers)


def passive(program: Program) -> Program:
    """Return *program*, which now neither answers nor attaches links: only its engine acts."""
    program.answers = False
    program.works = False
    return program


#: Every kind of engine that a peer can meet.
PROGRAMS: dict[str, Callable[[], Program]] = {
    "server": server,
    "server with sasl": lambda: server(sasl=True),
    "client": client,
    "client with sasl": lambda: client(sasl=True),
    "patient client": lambda: client(pipelined=False),
}
