"""Write ``vectors/conversations.json``: the output of our engines, to compare with that of later versions.

Run it by hand when a scenario is added, and check the difference: existing scenarios must keep their
meaning. ``python tests/core/record_conversations.py`` from the root of the repository.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from wire import frame, transfer

from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
)
from amqp_rt.core.sasl_frames import SaslInit, SaslResponse
from amqp_rt.events import AttachRequested, Event, LoginRequested
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import Limits
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Modified,
    Received,
    rejected,
)
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.transactions import Declared, TransactionalState

FILE = Path(__file__).parent / "vectors" / "conversations.json"
Q = Target(address="q")
SMALL = Limits(frame_size_max=512, idle_timeout_s=0)
SCENARIOS: dict[str, Callable[[Tape], None]] = {}


class Tape:
    """Two engines, or an engine and hand-made frames, with a record of all octets between them."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, str]] = []
        self.limits = Limits(idle_timeout_s=0)
        self.mechanisms: tuple[str, ...] = ()
        self.client_mechanisms: tuple[Any, ...] = ()
        self.links: list[Any] = []
        self.logins: list[LoginRequested] = []
        self._client: Engine | None = None
        self._server: Engine | None = None

    @property
    def client(self) -> Engine:
        if self._client is None:
            options = amqp10.ClientOptions(
                container_id="client",
                hostname="host",
                limits=self.limits,
                mechanisms=self.client_mechanisms,
            )
            self._client = amqp10.client(options, 0.0)
        return self._client

    @property
    def server(self) -> Engine:
        if self._server is None:
            options = ServerOptions(
                container_id="server",
                limits=self.limits,
                mechanisms=self.mechanisms,
                sasl_required=bool(self.mechanisms),
            )
            self._server = amqp10.Front().server(options, 0.0)
        return self._server

    def note(self, side: str, data: bytes) -> None:
        if data:
            self.chunks.append({"from": side, "hex": data.hex()})

    def pump(self) -> Tape:
        """Carry octets from one side at a time, until neither has output."""
        while True:
            up = b"".join(self.client.take())
            self.note("client", up)
            self.handle(self.server.receive(up, 0.0) if up else [])
            down = b"".join(self.server.take())
            self.note("server", down)
            self.handle(self.client.receive(down, 0.0) if down else [])
            if not up and not down:
                return self

    def by_hand(self, *octets: bytes) -> Tape:
        """Send octets in place of the client's engine."""
        data = b"".join(octets)
        self.note("client", data)
        self.handle(self.server.receive(data, 0.0))
        return self.answer()

    def answer(self) -> Tape:
        """Record the server's output, while there is no client engine."""
        while data := self.server.take():
            self.note("server", b"".join(data))
        return self

    def handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AttachRequested):
                self.links.append(event.link)
            elif isinstance(event, LoginRequested):
                self.logins.append(event)

    def close(self) -> None:
        self.client.close()
        self.pump()

    # --- beginnings of most scenarios ----------------------------------------------------

    def sender(self, session: Any, name: str = "l", credit: int = 10, **modes: Any) -> Any:
        """Attach a link from the client to the server, which grants *credit*: (ours, theirs)."""
        link = session.attach_sender(name, Recorder(), source=Source(), target=Q, **modes)
        self.pump()
        self.links[-1].accept(Recorder(credit=credit))
        self.pump()
        return link, self.links[-1]

    def receiver(self, session: Any, name: str = "l", credit: int = 10, **modes: Any) -> Any:
        """Attach a link from the server to the client, which grants *credit*: (ours, theirs)."""
        endpoint = Recorder(credit=credit)
        link = session.attach_receiver(
            name, endpoint, source=Source(address="q"), target=Target(), **modes
        )
        self.pump()
        self.links[-1].accept(Recorder())
        self.pump()
        return link, self.links[-1]


def scenario(play: Callable[[Tape], None]) -> Callable[[Tape], None]:
    SCENARIOS[play.__name__] = play
    return play


@scenario
def everything_in_one_chunk(tape: Tape) -> None:
    tape.by_hand(
        AMQP_HEADER,
        frame(Open(container_id="client")),
        frame(Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)),
        frame(Attach(name="l", handle=0, role=True, source=Source(address="q"))),
        frame(Detach(0, True)),
        frame(End()),
        frame(Close()),
    )


@scenario
def login_with_challenges(tape: Tape) -> None:
    class Echo:
        name = "ECHO"

        def initial(self) -> bytes:
            return b"first"

        def respond(self, challenge: bytes) -> bytes:
            return challenge[::-1]

    tape.mechanisms = ("STRONG", "ECHO")
    tape.client_mechanisms = (Echo(),)
    tape.pump()
    tape.logins[-1].exchange.challenge(b"abc")
    tape.pump()
    tape.logins[-1].exchange.challenge(b"")
    tape.pump()
    tape.handle(tape.logins[-1].exchange.succeed("user"))
    tape.pump().close()


@scenario
def failed_login(tape: Tape) -> None:
    tape.mechanisms = ("PLAIN",)
    tape.by_hand(SASL_HEADER, frame(SaslInit("PLAIN", b"\0u\0p", "host"), kind=1))
    tape.logins[-1].exchange.fail()
    tape.answer()


@scenario
def response_without_init(tape: Tape) -> None:
    tape.mechanisms = ("PLAIN",)
    tape.by_hand(SASL_HEADER, frame(SaslResponse(b"x"), kind=1))


@scenario
def messages_over_frames_of_512(tape: Tape) -> None:
    tape.limits = SMALL
    tape.pump()
    session = tape.client.begin()
    first, far = tape.sender(session, "a")
    second, _ = tape.sender(session, "b")
    first.send(b"A" * 2_000)
    second.send(b"b")
    tape.pump()
    for delivery in [*far.endpoint.deliveries, *tape.links[-1].endpoint.deliveries]:
        delivery.settle(ACCEPTED)
    tape.pump().close()


@scenario
def a_stream_and_one_that_is_given_up(tape: Tape) -> None:
    tape.pump()
    link, far = tape.sender(tape.client.begin())
    body = link.send(b"one ", more=True)
    tape.pump()
    body.write(b"two ")
    tape.pump()
    body.write(b"three", more=False)
    tape.pump()
    given_up = link.send(b"never", more=True)
    tape.pump()
    given_up.abort()
    tape.pump()
    link.send(b"after it")
    tape.pump()
    for delivery in far.endpoint.deliveries:
        delivery.settle(ACCEPTED)
    tape.pump().close()


@scenario
def suspended_and_attached_again(tape: Tape) -> None:
    tape.pump()
    session = tape.client.begin()
    link, _ = tape.sender(session)
    link.send(b"unsettled")
    tape.pump()
    link.detach(closed=False)
    tape.pump()
    again, far = tape.sender(session)
    again.send(b"settled")
    tape.pump()
    far.endpoint.deliveries[0].settle(ACCEPTED)
    tape.pump()
    again.detach()
    tape.pump().close()


@scenario
def every_outcome(tape: Tape) -> None:
    tape.pump()
    link, far = tape.receiver(tape.client.begin())
    outcomes = (
        ACCEPTED,
        ACCEPTED,
        RELEASED,
        MODIFIED_FAILED,
        Modified(undeliverable_here=True, message_annotations={"x-opt-why": "because"}),
        rejected("amqp:not-implemented", "cannot"),
        ACCEPTED,
    )
    for number in range(len(outcomes)):
        far.send(b"%d" % number)
    tape.pump()
    for delivery, outcome in zip(link.endpoint.deliveries, outcomes, strict=True):
        delivery.settle(outcome)
    tape.pump().close()


@scenario
def settled_second(tape: Tape) -> None:
    tape.pump()
    link, far = tape.receiver(tape.client.begin(), rcv_settle_mode=1)
    sent = [far.send(b"1"), far.send(b"2")]
    tape.pump()
    link.endpoint.deliveries[0].update(Received(0, 1))
    tape.pump()
    link.endpoint.deliveries[0].settle(ACCEPTED)
    link.endpoint.deliveries[1].settle(RELEASED)
    tape.pump()
    for one in sent:
        one.settle(one.state)
    tape.pump().close()


@scenario
def drained_and_stopped(tape: Tape) -> None:
    tape.pump()
    link, far = tape.receiver(tape.client.begin(), credit=5)
    far.send(b"the only one")
    tape.pump()
    link.drain()
    tape.pump()
    far.drained()
    tape.pump()
    link.grant(7)
    tape.pump()
    link.grant(0)
    tape.pump().close()


@scenario
def two_sessions_and_an_error(tape: Tape) -> None:
    tape.pump()
    first, second = tape.client.begin(), tape.client.begin()
    tape.pump()
    a, far_a = tape.sender(first, "a")
    b, far_b = tape.receiver(second, "b")
    a.send(b"up")
    far_b.send(b"down")
    tape.pump()
    far_a.endpoint.deliveries[0].settle(ACCEPTED)
    b.endpoint.deliveries[0].settle(ACCEPTED)
    tape.pump()
    tape.server.sessions[0].end(Error("amqp:not-allowed", "enough", {"why": "so"}))
    tape.pump()
    second.end()
    tape.pump().close()


@scenario
def the_server_attaches_too(tape: Tape) -> None:
    tape.pump()
    session = tape.server.begin()
    tape.pump()
    link = session.attach_sender("news", Recorder(), source=Source(address="n"), target=Q)
    tape.pump()
    tape.links[-1].accept(Recorder(credit=3))
    tape.pump()
    link.send(b"hello client", settled=True)
    tape.pump()
    tape.server.close(Error("amqp:connection:redirect", "there", {"port": 5673}))
    tape.pump()


@scenario
def transactional_states(tape: Tape) -> None:
    tape.pump()
    session = tape.client.begin()
    control = session.attach_sender(
        "control",
        Recorder(),
        source=Source(),
        target=Coordinator(capabilities=("amqp:local-transactions",)),
    )
    tape.pump()
    tape.links[-1].accept(Recorder(credit=5))
    tape.pump()
    control.send(b"declare")
    tape.pump()
    tape.links[-1].endpoint.deliveries[0].settle(Declared(b"tx"))
    tape.pump()
    work, far = tape.sender(session, "work")
    work.send(b"in it", state=TransactionalState(b"tx"))
    tape.pump()
    far.endpoint.deliveries[0].settle(TransactionalState(b"tx", ACCEPTED))
    tape.pump().close()


@scenario
def refused(tape: Tape) -> None:
    tape.pump()
    session = tape.client.begin()
    session.attach_sender("s", Recorder(), source=Source(), target=Q)
    session.attach_receiver("r", Recorder(), source=Source(address="q"), target=Target())
    tape.pump()
    for link in tape.links:
        link.refuse(Error("amqp:not-found", "no such node"))
    tape.pump().close()


@scenario
def stolen(tape: Tape) -> None:
    attach = Attach(name="l", handle=0, role=True, source=Source(address="q"), target=Target())
    tape.by_hand(
        AMQP_HEADER,
        frame(Open(container_id="client")),
        frame(Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)),
        frame(attach),
    )
    tape.links[-1].accept(Recorder())
    tape.answer()
    attach.handle = 1
    tape.by_hand(frame(attach))
    tape.links[-1].accept(Recorder())
    tape.answer()
    tape.by_hand(frame(Detach(0, True)), frame(Detach(1, True)), frame(End()), frame(Close()))


@scenario
def faults_of_every_scope(tape: Tape) -> None:
    def attach(name: str, handle: int) -> bytes:
        return frame(
            Attach(
                name=name,
                handle=handle,
                role=False,
                source=Source(),
                target=Q,
                initial_delivery_count=0xFFFFFFFF,
            ),
            channel=3,
        )

    tape.by_hand(
        AMQP_HEADER,
        frame(Open(container_id="client")),
        frame(Begin(next_outgoing_id=0xFFFFFFFE, incoming_window=9, outgoing_window=9), 3),
        attach("l", 5),
    )
    tape.links[-1].accept(Recorder(credit=1))
    tape.answer()
    tape.by_hand(
        frame(Flow(incoming_window=9, next_outgoing_id=0xFFFFFFFE, outgoing_window=9, echo=True), 3)
    )
    one = transfer(0, handle=5)
    too_many = transfer(1, handle=5)
    tape.by_hand(_on(3, one), _on(3, too_many))
    tape.by_hand(frame(Detach(5, True), 3))
    tape.by_hand(frame(Disposition(True, 0, 9, True), 3), frame(Detach(5, True), 3))
    tape.by_hand(frame(End(), 3))
    tape.by_hand(frame(End(), 3), frame(Close()))


def _on(channel: int, octets: bytes) -> bytes:
    return octets[:6] + struct.pack(">H", channel) + octets[8:]


def main() -> None:
    scenarios = []
    for name, play in SCENARIOS.items():
        tape = Tape()
        play(tape)
        scenarios.append({"scenario": name, "by_hand": tape._client is None, "chunks": tape.chunks})
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in scenarios)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
