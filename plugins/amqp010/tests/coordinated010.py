"""A coordinator of X/Open XA that moves messages from one broker to another, and may be interrupted anywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import stored_broker010
import trio
from client010 import Attached, Client, connected
from octets010 import Struct, plain
from protocol010 import Failed, xid

#: Formats of its xids.
FORMAT = 0x0A10
#: Results of operations on branches.
OK = 0
PERSISTENT = 2
NOT_FOUND = 404


class Crash(Exception):
    """The coordinator ends here."""


#: Called between the steps of a round with the name of each, and again while the step is being carried out.
Interrupt: TypeAlias = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    """Connect to the broker at *port*; leave without a word if the coordinator crashes."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with connected(stream) as client:
        try:
            yield client
        except Crash:
            await client.cut()
            raise


class BrokerProcess:
    """A broker with a store, which is killed and started again."""

    def __init__(self, folder: Path, name: str) -> None:
        self._command = [
            *(sys.executable, stored_broker010.__file__),
            *(str(folder / f"{name}.db"), "from", "to"),
        ]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    async def kill_and_start(self) -> None:
        await trio.to_thread.run_sync(self.kill)
        await trio.to_thread.run_sync(self.start)

    async def fill(self, *bodies: bytes) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with connected(stream) as client:
            session = await client.session(b"fill")
            for body in bodies:
                session.transfer("", body, key="from", delivery={"delivery_mode": PERSISTENT})
            await session.sync()


class Coordinator:
    """Moves one message in each round, from ``from`` of one broker to ``to`` of another.

    Args:
        source: Returns the port of the first broker, which may be started again.
        target: Returns that of the second.
        interrupt: Interrupts the rounds.
    """

    def __init__(
        self, source: Callable[[], int], target: Callable[[], int], interrupt: Interrupt
    ) -> None:
        self._ports = source, target
        self._interrupt = interrupt
        #: Its durable log: global ids of the transactions that it has decided to commit.
        self.committed: set[bytes] = set()
        #: Global ids of all that it has begun.
        self.begun: set[bytes] = set()

    # --- Rounds ---

    async def move(self, name: str) -> None:
        """Move a message in the transaction *name*.

        Raises:
            Crash: The coordinator was interrupted; ``recover`` follows.
            Failed, OSError: A broker was; likewise.
        """
        source, target = (port() for port in self._ports)
        key = name.encode()
        branches = xid(key, b"source", FORMAT), xid(key, b"target", FORMAT)
        self.begun.add(key)
        async with client_of(source) as one, client_of(target) as other:
            sessions = await one.session(b"move"), await other.session(b"move")
            for session, branch in zip(sessions, branches, strict=True):
                await session.call("dtx.select")
                await self._status(session, "dtx.start", branch)
            await self._take(sessions[0])
            await self._put(sessions[1])
            for session, branch in zip(sessions, branches, strict=True):
                await self._status(session, "dtx.end", branch)
            for command in ("prepare", "commit"):
                if command == "commit":
                    await self._interrupt("decide")
                    self.committed.add(key)
                for session, branch, side in zip(
                    sessions, branches, ("source", "target"), strict=True
                ):
                    await self._end(session, command, branch, side)

    async def _take(self, session: Attached) -> None:
        await session.subscribe("from", "d", messages=1)
        self._message = await session.message()
        await self._interrupt("take")
        await session.done(session.accept(self._message.id or 0))

    async def _put(self, session: Attached) -> None:
        sent = session.transfer(
            "",
            self._message.body,
            key="to",
            delivery={"delivery_mode": PERSISTENT},
            accept_mode=1,
            sync=True,
        )
        await session.done(sent)
        await self._interrupt("put")

    async def _end(self, session: Attached, command: str, branch: Struct, side: str) -> None:
        await self._interrupt(f"before {command} {side}")
        number = session.send(f"dtx.{command}", sync=True, xid=branch)
        await session.client.flush()
        await self._interrupt(f"in {command} {side}")
        result = await session.done(number)
        assert result is not None
        assert result.status == OK, (command, side, result)
        await self._interrupt(f"after {command} {side}")

    async def _status(self, session: Attached, command: str, branch: Struct) -> None:
        result = await session.call(command, xid=branch)
        assert result is not None
        assert result.status == OK, (command, result)

    # --- Recovery ---

    async def recover(self) -> None:
        """Commit branches in doubt of transactions that are decided, and roll back all others."""
        for port, side in zip(self._ports, (b"source", b"target"), strict=True):
            async with client_of(port()) as client:
                session = await client.session(b"recover")
                result = await session.call("dtx.recover")
                assert result is not None
                for branch in plain(result.in_doubt):
                    decided = branch.global_id in self.committed
                    command = "dtx.commit" if decided else "dtx.rollback"
                    await self._status(session, command, branch)
                for number, key in enumerate(sorted(self.begun - self.committed)):
                    await self._forget(client, number, xid(key, side, FORMAT))
        self.begun.clear()

    async def _forget(self, client: Client, number: int, branch: Struct) -> None:
        """Roll back a branch that is not prepared, if it is known; otherwise its session fails."""
        session = await client.session(b"forget-%d" % number)
        try:
            await session.call("dtx.rollback", xid=branch)
        except Failed as failure:
            if failure.code != NOT_FOUND:
                raise


async def bodies_of(port: int, queue: str) -> list[bytes]:
    """Return the messages that are available in *queue*, which stay there."""
    async with client_of(port) as client:
        session = await client.session(b"look")
        state = await session.call("queue.query", queue=queue)
        assert state is not None
        await session.subscribe(queue, "look", acquire_mode=1, accept_mode=1)
        count = state.message_count or 0
        return [(await session.message()).body or b"" for _ in range(count)]
