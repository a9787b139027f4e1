"""The project's own client of AMQP 0-10 on any stream of trio; ``protocol010`` has its rules.

::

    async with connected(stream, login=Login.plain("guest", "guest")) as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        session.transfer("", b"text", key="q")
        await session.subscribe("q", "d")
        message = await session.message()
        await session.done(session.accept(message.id))

Nothing here waits for real time, so that tests with a mock clock can use it over memory streams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from octets010 import Operation, Struct
from protocol010 import (
    BYTES,
    EXPLICIT,
    MESSAGES,
    PRE_ACQUIRED,
    UNLIMITED,
    Connection,
    Cut,
    Failed,
    Session,
    Violation,
)

#: How long an answer may take. Busy machines need seconds; this only turns a hang into an error.
PATIENCE_S = 20.0


class Client:
    """A connection on a stream; ``connected`` makes one.

    Args:
        stream: To the broker.
        connection: Its protocol.
    """

    def __init__(self, stream: trio.abc.Stream, connection: Connection) -> None:
        self.connection = connection
        #: Whether heartbeats go out.
        self.beats = True
        #: Whether octets of the broker are read.
        self.reads = trio.Event()
        self.reads.set()
        self.gone = False
        self.error: Exception | None = None
        self._stream = stream
        self._news = trio.Event()
        self._output = trio.Event()
        self._written = trio.Event()
        self._heard_at = trio.current_time()

    # ---- tasks

    async def read(self) -> None:
        """Handle what comes, until the stream ends."""
        try:
            while not self.gone:
                await self.reads.wait()
                octets = await self._stream.receive_some(65536)
                if not octets:
                    break
                self._heard_at = trio.current_time()
                self.connection.receive(bytes(octets))
                self._output.set()
                self._notify()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Cut:
            await self.cut()
        except Exception as error:
            self.error = error
        self._lost()

    async def write(self) -> None:
        """Send what there is, until the stream ends."""
        try:
            while not self.gone:
                self._output = trio.Event()
                found = self.connection.take()
                if found:
                    await self._stream.send_all(b"".join(found))
                if self.connection.is_cut:
                    await self.cut()
                if not found:
                    self._written.set()
                    await self._output.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lost()

    async def beat(self) -> None:
        """Send heartbeats, and note a broker that is silent for two intervals."""
        await self.until(lambda: self.connection.opened, float("inf"))
        while interval_s := self.connection.heartbeat_s:
            await trio.sleep(interval_s / 2)
            if self.gone:
                return
            if self.beats:
                self.connection.control("connection.heartbeat")
                self._output.set()
            silent_s = trio.current_time() - self._heard_at
            if silent_s > 2 * interval_s:
                self.error = Violation(f"no octet for {silent_s} s, the interval is {interval_s} s")
                self._notify()
                return

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _lost(self) -> None:
        self.gone = True
        self.connection.lost()
        self._output.set()
        self._written.set()
        self._notify()

    # ---- calls

    def wake(self) -> None:
        """Have the writer send what there is."""
        self._output.set()

    async def flush(self) -> None:
        """Wait until all that is to be sent has been given to the stream."""
        self._written = trio.Event()
        self._output.set()
        if not self.gone:
            await self._written.wait()

    async def until(self, ready: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Wait until *ready*, which is asked after each piece that has come.

        Raises:
            Violation: The broker has broken a rule.
            Failed: The connection is gone; with the code of the broker's connection.close, where there was one.
            trio.TooSlowError: *within_s* seconds have passed.
        """
        self._output.set()
        with trio.fail_after(within_s):
            while not ready():
                if self.error is not None:
                    raise self.error
                close = self.connection.close_of_broker
                if close is not None:
                    raise Failed(close.reply_code, close.reply_text or "", close)
                if self.gone:
                    raise Failed(None, "the connection is gone")
                await self._news.wait()

    async def session(self, name: bytes, *, channel: int | None = None, **how: bool) -> Attached:
        """Attach a new session, and return it."""
        attached = Attached(self, self.connection.session(name, channel))
        attached.state.attach(**how)
        await attached.until(lambda: attached.state.attached)
        return attached

    async def resume(
        self, session: Session, *, channel: int | None = None, **how: bool
    ) -> Attached:
        """Attach a session of an earlier connection, and replay what the broker has not got.

        ``session.expected`` is empty where the broker holds no state of it: nothing is replayed then.

        Raises:
            Failed: The broker does not attach it.
        """
        attached = Attached(self, self.connection.adopt(session, channel))
        session.attach(point=False, **how)
        await attached.until(lambda: session.attached)
        session.flush()
        await attached.until(lambda: session.expected is not None)
        if session.expected:
            session.replay()
        return attached

    async def close(self) -> None:
        """Close the connection, and wait for the broker's answer."""
        if not self.gone and not self.connection.closed:
            self.connection.control("connection.close", reply_code=200)
            await self.until(lambda: self.connection.closed or self.gone)
        await self.flush()

    async def cut(self) -> None:
        """End the stream without a word."""
        self.gone = True
        await trio.aclose_forcefully(self._stream)
        self._lost()


class Attached:
    """A session on a connection. Its ``state`` outlives both."""

    def __init__(self, client: Client, state: Session) -> None:
        self.client = client
        self.state = state
        self._taken = 0

    async def until(self, ready: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Wait until *ready*.

        Raises:
            Failed: The session has failed or is detached.
        """
        await self.client.until(lambda: ready() or self._ended(), within_s)
        if not ready():
            exception, detached = self.state.exception, self.state.detached
            if exception is not None:
                raise Failed(exception.error_code, exception.description or "", exception)
            assert detached is not None
            raise Failed(detached.code, "detached", detached)

    def _ended(self) -> bool:
        return self.state.detached is not None

    def send(self, name: str, /, **words: Any) -> int:
        """Send a command without waiting, and return its id."""
        number = self.state.send(name, **words)
        self.client.wake()
        return number

    def transfer(self, destination: str, body: bytes | None = b"", **words: Any) -> int:
        number = self.state.transfer(destination, body, **words)
        self.client.wake()
        return number

    def accept(self, *numbers: int) -> int:
        number = self.state.accept(*numbers, sync=True)
        self.client.wake()
        return number

    def complete(self, *numbers: int) -> None:
        """Tell the broker which of its commands are complete, which moves windows."""
        self.state.complete(*numbers)
        self.client.wake()

    async def done(self, number: int, within_s: float = PATIENCE_S) -> Struct | None:
        """Wait until a command is complete, and return its result.

        Raises:
            Failed: It is not going to be.
        """
        await self.until(lambda: self.state.is_complete(number), within_s)
        return self.state.result(number)

    async def call(self, name: str, /, **fields: Any) -> Struct | None:
        """Send a command, and return its result once it is complete."""
        return await self.done(self.send(name, sync=True, **fields))

    async def sync(self) -> None:
        """Wait until all commands so far are complete."""
        await self.call("execution.sync")
        await self.until(lambda: not self.state.incomplete)

    async def subscribe(
        self,
        queue: str,
        destination: str,
        *,
        accept_mode: int | None = EXPLICIT,
        acquire_mode: int | None = PRE_ACQUIRED,
        flow_mode: int | None = None,
        messages: int | None = UNLIMITED,
        octets: int | None = UNLIMITED,
        **fields: Any,
    ) -> None:
        """Subscribe, choose the flow mode where one is given, and grant credit; 0 grants none."""
        await self.call(
            "message.subscribe",
            queue=queue,
            destination=destination,
            accept_mode=accept_mode,
            acquire_mode=acquire_mode,
            **fields,
        )
        if flow_mode is not None:
            await self.call("message.set-flow-mode", destination=destination, flow_mode=flow_mode)
        for unit, value in ((BYTES, octets), (MESSAGES, messages)):
            if value != 0:
                await self.call("message.flow", destination=destination, unit=unit, value=value)

    async def message(self, within_s: float = PATIENCE_S) -> Operation:
        """Return the next message that has not been returned."""
        await self.until(lambda: len(self.state.messages) > self._taken, within_s)
        self._taken += 1
        return self.state.messages[self._taken - 1]

    async def detach(self) -> None:
        self.state.detach()
        await self.client.until(lambda: self.state.detached is not None)


@asynccontextmanager
async def connected(
    stream: trio.abc.Stream, *, opens: bool = True, **options: Any
) -> AsyncIterator[Client]:
    """Open a connection on *stream*, and close it in the end.

    Args:
        stream: To the broker.
        opens: Whether to wait for ``connection.open-ok``.
        **options: Those of ``protocol010.Connection``.
    """
    client = Client(stream, Connection(**options))
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        client.connection.start()
        nursery.start_soon(client.read)
        nursery.start_soon(client.write)
        nursery.start_soon(_beat, client)
        # Caught here so that it leaves as it is, not in the nursery's group.
        try:
            if opens:
                await client.until(lambda: client.connection.opened)
            yield client
            if client.error is None:
                await client.close()
        except Exception as error:
            failure = error
        client.gone = True
        await trio.aclose_forcefully(stream)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if client.error is not None:
        raise client.error


async def _beat(client: Client) -> None:
    try:
        await client.beat()
    except (Failed, Violation):
        pass
