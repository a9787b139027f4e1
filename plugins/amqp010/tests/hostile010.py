"""Clients of 0-10 that send any octets to a real broker, and one beside them that must not notice."""

from __future__ import annotations

from functools import partial
from typing import Any

from octets010 import HEADER, Assembler, FrameReader, Operation, Struct, frames
from protocol010 import CREDIT, NONE, NOT_ACQUIRED, WINDOW, xid
from subscribers010 import Client, World

from amqp_rt.broker.branches.peers import PeerBranches
from amqp_rt.fronts import Error, Peer
from amqp_rt.security.access import Rights

#: Names of the sessions of a hostile client: one a channel.
SESSIONS = (b"s0", b"s1")
#: Longer than any session is kept.
FOR_EVER_S = 10_000.0


class AnyRights:
    """Rights of a client that may do all."""

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        return None

    def decide_anywhere(self, peer: Peer) -> Error | None:
        return None


class Hostile:
    """A connection to which octets are fed as they are. What the broker answers is read by the test's own codec.

    Args:
        world: The broker.
        opened: Whether login and opening are done for it.
    """

    def __init__(self, world: World, *, opened: bool = True) -> None:
        self.world = world
        branches = partial(PeerBranches, world.host.services.branches, rights=AnyRights())
        self.client = Client(world, branches=branches)
        if opened:
            self.client.wire.start()
            self.client.pump()
            assert self.client.wire.opened
        self.engine = self.client.engine
        self.answers: list[Operation] = []
        self._reader = FrameReader()
        self._begun = opened
        self._assemblers: dict[tuple[int, int], Assembler] = {}

    def feed(self, data: bytes) -> list[Operation]:
        """Give octets to the engine, let the broker work, and return the operations that come back."""
        before = len(self.answers)
        if not self.engine.finished:
            self.client._call(data)
        for _ in range(1_000):
            self.world.pump()
            output = b"".join(self.engine.take())
            self._read(output)
            if self.engine.finished or not (output or self.engine.unread):
                return self.answers[before:]
            if self.engine.unread:
                self.client._call(b"")
        raise AssertionError("the engine never stops talking")

    def _read(self, output: bytes) -> None:
        self._reader.feed(output)
        if not self._begun and output:
            assert self._reader.take_header() == HEADER
            self._begun = True
        for each in self._reader:
            assembler = self._assemblers.setdefault((each.channel, each.track), Assembler())
            if (operation := assembler.add(each)) is not None:
                operation.channel = each.channel
                self.answers.append(operation)

    def say(self, *operations: Operation) -> list[Operation]:
        """Send operations, each on its channel."""
        return self.feed(octets_of(*operations))

    def attach(self, channel: int) -> None:
        """Attach the session of *channel*."""
        self.say(
            Operation("session.attach", {"name": SESSIONS[channel]}, channel=channel),
            Operation(
                "session.command-point",
                {"command-id": 0, "command-offset": 0},
                channel=channel,
            ),
        )

    def end(self) -> None:
        """Lose the connection, and let the time of its sessions pass."""
        if not self.engine.finished:
            self.client.lose()
        self.world.pump()
        self.world.now += FOR_EVER_S
        while self.world.front.deadline <= self.world.now:
            self.world.front.tick(self.world.now)
        self.world.pump()


class Bystander:
    """A client that publishes to an exclusive queue of its own, and consumes from it."""

    def __init__(self, world: World) -> None:
        self.session = world.client().attach(b"bystander")
        self.session.call("queue.declare", queue="theirs", exclusive=True)
        self.session.subscribe("theirs", "mine")
        self._count = 0

    def check(self) -> None:
        """Send a message there and back."""
        self._count += 1
        body = b"%d" % self._count
        self.session.state.transfer("", body, key="theirs", accept_mode=None)
        (message,) = self.session.messages()
        assert message.body == body
        assert message.id is not None
        self.session.accept(message.id)


def octets_of(*operations: Operation) -> bytes:
    """Return the frames of operations, each on its channel."""
    return b"".join(
        part for each in operations for part in frames(each.segments(), each.channel, 4_000)
    )


def message(body: bytes, **more: Any) -> Operation:
    """Return a transfer to queue ``q``."""
    delivery = Struct("delivery-properties", **{"routing-key": "q"}, **more)
    properties = Struct("message-properties", **{"application-headers": {"a": 1, "b": [b"x"]}})
    return Operation(
        "message.transfer",
        {"destination": "", "accept-mode": 0},
        headers=[delivery, properties],
        body=body,
    )


def conversation() -> list[Operation]:
    """Return what a client says that does a little of everything, after the connection is open."""
    branch = xid(b"global", b"branch", 1)
    ids = [(0, 3)]
    said: list[tuple[str, dict[str, Any]]] = [
        ("session.attach", {"name": SESSIONS[0]}),
        ("session.request-timeout", {"timeout": 30}),
        ("session.command-point", {"command-id": 0, "command-offset": 0}),
        ("queue.declare", {"queue": "q", "arguments": {"qpid.max_count": 100}}),
        ("exchange.declare", {"exchange": "e", "type": "topic"}),
        ("exchange.bind", {"queue": "q", "exchange": "e", "binding-key": "a.*"}),
        ("exchange.bound", {"queue": "q", "exchange": "e"}),
        ("queue.query", {"queue": "q"}),
        ("message.subscribe", {"queue": "q", "destination": "d"}),
        ("message.set-flow-mode", {"destination": "d", "flow-mode": CREDIT}),
        ("message.flow", {"destination": "d", "unit": 0, "value": 5}),
        ("message.flow", {"destination": "d", "unit": 1, "value": 0xFFFFFFFF}),
        ("message.subscribe", {"queue": "q", "destination": "b", "acquire-mode": NOT_ACQUIRED}),
        ("message.set-flow-mode", {"destination": "b", "flow-mode": WINDOW}),
        ("message.flow", {"destination": "b", "unit": 0}),
        ("message.flow", {"destination": "b", "unit": 1}),
        ("message", {}),
        ("message", {}),
        ("message", {}),
        ("message", {}),
        ("session.completed", {"commands": ids, "timely-reply": True}),
        ("message.acquire", {"transfers": [(4, 9)]}),
        ("message.accept", {"transfers": [(0, 0)]}),
        ("message.release", {"transfers": [(1, 1)], "set-redelivered": True}),
        ("message.reject", {"transfers": [(2, 2)], "code": 0}),
        ("message.flush", {"destination": "d"}),
        ("message.stop", {"destination": "b"}),
        ("message.cancel", {"destination": "d"}),
        ("execution.sync", {}),
        ("session.flush", {"expected": True, "confirmed": True, "completed": True}),
        ("session.gap", {"commands": [(60, 62)]}),
        ("dtx.select", {}),
        ("dtx.start", {"xid": branch}),
        ("message", {}),
        ("dtx.end", {"xid": branch}),
        ("dtx.prepare", {"xid": branch}),
        ("dtx.rollback", {"xid": branch}),
        ("session.known-completed", {"commands": [(0, 10)]}),
        ("session.detach", {"name": SESSIONS[0]}),
        ("session.attach", {"name": SESSIONS[0]}),
        ("session.flush", {"expected": True}),
        ("session.expected", {"commands": ids}),
        ("session.command-point", {"command-id": None, "command-offset": 0}),
        ("queue.purge", {"queue": "q"}),
        ("exchange.unbind", {"queue": "q", "exchange": "e", "binding-key": "a.*"}),
        ("queue.delete", {"queue": "q"}),
        ("connection.heartbeat", {}),
        ("session.attach", {"name": SESSIONS[1]}),
        ("session.command-point", {"command-id": 0, "command-offset": 0}),
        ("tx.select", {}),
        ("message", {}),
        ("tx.rollback", {}),
        ("message.subscribe", {"queue": "q", "destination": "n", "accept-mode": NONE}),
    ]
    made = []
    last = max(place for place, each in enumerate(said) if each[0] == "session.attach")
    commands = 0
    for place, (name, fields) in enumerate(said):
        if fields.get("command-id", 0) is None:
            # The client goes on where it was.
            fields["command-id"] = commands
        operation = message(b"body") if name == "message" else Operation(name, fields)
        operation.sync = not place % 3
        operation.channel = int(place >= last)
        made.append(operation)
        commands += operation.layout.kind == "command"
    return made


#: Octets with which a client logs in and, once it has been let in, opens its connection.
OPENING = (
    HEADER
    + octets_of(
        Operation("connection.start-ok", {"mechanism": "ANONYMOUS", "locale": "en_US"}),
    ),
    octets_of(
        Operation("connection.tune-ok", {"channel-max": 5, "max-frame-size": 4096}),
        Operation("connection.open", {"virtual-host": "/"}),
    ),
)
