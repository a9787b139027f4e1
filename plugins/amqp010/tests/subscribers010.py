"""Subscribers of 0-10 at a broker with queues: each call carries octets until nothing is left to do."""

from __future__ import annotations

from typing import Any

import worlds010
from amqp_rt_amqp010.subscriptions import Subscriptions
from octets010 import Operation, Struct
from protocol010 import BYTES, EXPLICIT, MESSAGES, PRE_ACQUIRED, UNLIMITED, Failed, Session

from amqp_rt.broker.nodes import Queue
from amqp_rt.fronts import Message


class World(worlds010.World):
    """A broker with the given queues."""

    def __init__(self, *queues: str | Queue, **options: Any) -> None:
        super().__init__(**options)
        for queue in queues:
            self.host.space().declare(Queue(queue) if isinstance(queue, str) else queue)
        self.clients: list[Client] = []

    def publish(self, queue: str, *bodies: bytes, **fields: Any) -> None:
        for body in bodies:
            self.host.space().publish(queue, Message(body, **fields).encode())
        self.pump()

    def client(self, **options: Any) -> Client:
        """Connect a client; *options* are those of the listener."""
        client = Client(self, **options)
        client.wire.start()
        self.clients.append(client)
        self.pump()
        return client

    def pump(self) -> None:
        """Carry octets of all clients, and let the broker work, until nothing is left to do."""
        turns = self.host.turns
        for _ in range(10_000):
            busy = bool(turns.unfinished)
            if busy:
                turns.run_pending()
            for client in self.clients:
                busy |= client.step()
            if not busy:
                return
        raise AssertionError("the engines never stop talking")


class Client(worlds010.Client):
    """A connection and its sessions."""

    world: World

    def step(self) -> bool:
        """Carry octets once in each direction; return whether there were any, or work was left."""
        engine = self.engine
        if engine.finished:
            return False
        data = b"".join(self.wire.take())
        busy = bool(data) or engine.unread
        if busy:
            self._call(data)
        if engine.deadline <= self.world.now:
            busy = True
            self._handle(engine.tick(self.world.now))
        output = b"".join(engine.take())
        if output:
            self.wire.receive(output)
        return busy or bool(output)

    def attach(self, name: bytes = b"s", *, timeout: int = 0) -> Attached:
        """Attach a new session."""
        return Attached(self, self.session(name, timeout=timeout))

    def subscriptions(self) -> Subscriptions:
        """Return the subscriptions of the only session, as the broker has them."""
        (channel,) = self.engine.sessions.values()
        parts = channel._handler._parts  # type: ignore[union-attr]
        assert parts is not None
        return parts.subscriptions

    def go_on(self, session: Session) -> Attached:
        """Attach a session of an earlier connection, and replay what the broker has not got."""
        self.resume(session)
        self.world.pump()
        return Attached(self, session)

    def cut(self) -> None:
        """Lose the connection; what is on its way to the client is lost."""
        self.lose()
        self._handle(self.engine.tick(self.world.now))
        self.world.clients.remove(self)
        self.world.pump()


class Attached:
    """A session on a connection."""

    def __init__(self, client: Client, state: Session) -> None:
        self.client = client
        self.state = state
        self._taken = 0

    def send(self, name: str, /, **words: Any) -> int:
        """Send a command, and carry octets until nothing is left to do."""
        number = self.state.send(name, **words)
        self.client.world.pump()
        return number

    def call(self, name: str, /, **fields: Any) -> Struct | None:
        """Send a command, and return its result.

        Raises:
            Failed: The session has failed.
        """
        return self.done(self.send(name, sync=True, **fields))

    def done(self, number: int) -> Struct | None:
        """Return the result of a command, which is complete.

        Raises:
            Failed: The session has failed.
        """
        self.client.world.pump()
        if not self.state.is_complete(number):
            exception = self.state.exception
            assert exception is not None, f"command {number} is not complete"
            raise Failed(exception.error_code, exception.description or "", exception)
        return self.state.result(number)

    def subscribe(
        self,
        queue: str,
        destination: str = "d",
        *,
        accept_mode: int | None = EXPLICIT,
        acquire_mode: int | None = PRE_ACQUIRED,
        flow_mode: int | None = None,
        messages: int | None = UNLIMITED,
        octets: int | None = UNLIMITED,
        **fields: Any,
    ) -> None:
        """Subscribe, choose the flow mode where one is given, and grant credit; 0 grants none."""
        self.call(
            "message.subscribe",
            queue=queue,
            destination=destination,
            accept_mode=accept_mode,
            acquire_mode=acquire_mode,
            **fields,
        )
        if flow_mode is not None:
            self.call("message.set-flow-mode", destination=destination, flow_mode=flow_mode)
        for unit, value in ((BYTES, octets), (MESSAGES, messages)):
            if value != 0:
                self.flow(value, destination, unit=unit)

    def flow(self, value: int | None, destination: str = "d", *, unit: int = MESSAGES) -> None:
        self.call("message.flow", destination=destination, unit=unit, value=value)

    def messages(self) -> list[Operation]:
        """Return the messages that have come since the last call."""
        self.client.world.pump()
        found = self.state.messages[self._taken :]
        self._taken = len(self.state.messages)
        return found

    def bodies(self) -> list[bytes]:
        return [each.body or b"" for each in self.messages()]

    def accept(self, *numbers: int) -> None:
        self.done(self.state.accept(*numbers, sync=True))

    def release(self, *numbers: int, redelivered: bool = False) -> None:
        self.done(self.state.release(*numbers, redelivered=redelivered))

    def reject(self, *numbers: int, code: int | None = 0, text: str | None = None) -> None:
        self.done(self.state.reject(*numbers, code=code, text=text))

    def complete(self, *numbers: int) -> None:
        """Tell the broker which of its commands are complete."""
        self.state.complete(*numbers)
        self.client.world.pump()
