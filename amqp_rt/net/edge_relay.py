"""Work of an edge process: the handshakes of connections that its hub passes on, and their octets from then on.

The hub is in :mod:`.edges`. Each connection is two carriers, one on the client's stream and one on the pair to the
hub, whose engines give each other what they receive.
"""

from __future__ import annotations

import array
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Final

import msgspec
import trio

from ..errors import AmqpError, ConnectFailed
from ..events import Event, Peer
from ..limits import SECONDS_MAX, Limits
from ..outcomes import Error
from .carrier import nothing
from .driver import run_connection
from .edges import (
    CONTROL_MAX,
    DESCRIPTORS_MAX,
    LENGTH_SIZE,
    EdgeReady,
    EdgeSettings,
    Passed,
    Reload,
    ToEdge,
    Trust,
    Unwrapped,
    facts_of,
)
from .reactor import Reactor, open_reactor
from .tls import ServerTls, TlsLayer, encrypt

log = logging.getLogger("amqp_rt.net")

#: Octets on their way to one side, from which on the other side is not read.
_WAITING_MAX: Final = 262_144
#: Seconds that connections have to end after the hub has.
_LAST_WAIT_S: Final = 3.0


class RelayEnd:
    """Engine at one side of a relayed connection: what it receives is the output of its ``other``.

    Args:
        limits: Those of the carriers.
        end_output: Ends the direction to this side, and leaves the other one; without it the end of the other side ends
            this side as a whole, after all output.
    """

    def __init__(self, end_output: Callable[[], None] | None = None) -> None:
        self.on_output: Callable[[], None] = nothing
        self.work_max = 0
        self.unread = False
        self.deadline = inf
        self.peer = Peer()
        self.output_size = 0
        self.other = self
        self._end_output = end_output
        self._output: list[bytes] = []
        #: The other side has ended.
        self._ending = False
        #: Our side has ended, or all has been sent after the end of the other.
        self._ended = False

    @property
    def congested(self) -> bool:
        """Whether the other side does not read fast enough."""
        return self.other.output_size >= _WAITING_MAX

    @property
    def notifies(self) -> bool:
        """Whether the next :meth:`take` lets the other side be read again, or has to be followed by one that ends this one."""
        return self._ending or self.output_size >= _WAITING_MAX

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to send."""
        return self._ended

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Pass *data* to the other side."""
        self.other.put(data)
        return []

    def put(self, data: bytes) -> None:
        """Send *data* to this side."""
        if self._ended or self._ending:
            return
        self._output.append(data)
        self.output_size += len(data)
        self.on_output()

    def receive_eof(self, now: float) -> list[Event]:
        """End the other side, since this one has ended."""
        if self._end_output is None:
            self.other.end()
        else:
            # The hub reads no more: what is still to be sent there is discarded.
            self._ended = True
            self.other.end()
        return []

    def end(self) -> None:
        """End this side after what is still to be sent."""
        self._ending = True
        if not self._output and self._end_output is None:
            self._ended = True
        self.on_output()

    def take(self) -> list[bytes]:
        """Take the output. The carrier has sent all before when it asks."""
        output, self._output = self._output, []
        if output:
            congested = self.output_size >= _WAITING_MAX
            self.output_size = 0
            if congested:
                self.other.on_output()
        elif self._ending and not self._ended:
            if self._end_output is None:
                self._ended = True
            else:
                end_output, self._end_output = self._end_output, nothing
                end_output()
        return output

    def discard(self) -> None:
        """Drop what is still to be sent to this side, which is gone, so that it does not hold up the other one."""
        self._ended = True
        self._output.clear()
        self.output_size = 0
        self.other.on_output()

    def tick(self, now: float) -> list[Event]:
        """Do nothing: nothing is due."""
        return []

    def close(self, error: Error | None = None) -> None:
        """End this side."""
        self.end()


class EdgeWork:
    """Connections of an edge process.

    Args:
        control: Control socket to the hub.
        settings: What the hub has said about handshakes.

    Raises:
        TlsError: A certificate cannot be used.
    """

    def __init__(self, control: socket.socket, settings: EdgeSettings) -> None:
        self._control = trio.socket.from_stdlib_socket(control)
        self._settings = settings
        self._limits = settings.limits
        #: For the hub, which may take its time: it drops clients that do not read, and its end is noticed.
        self._patient = msgspec.structs.replace(settings.limits, write_stall_s=SECONDS_MAX)
        self._tls: ServerTls | None = None
        if settings.certificate:
            self._tls = ServerTls(
                settings.certificate, settings.key or None, client_ca=settings.client_ca or None
            )
        self._reactor: Reactor | None = None
        #: What to call once the client of a number has logged in.
        self._trust_of: dict[int, Callable[[], None]] = {}

    async def run(self) -> None:
        """Take connections until the hub ends; then let them end with those of the hub."""
        async with open_reactor() as self._reactor, trio.open_nursery() as nursery:
            await self._control.send(msgspec.msgpack.encode(EdgeReady()))
            async for message, descriptors in self._messages():
                if isinstance(message, Passed):
                    nursery.start_soon(self._serve, message, descriptors)
                elif isinstance(message, Trust):
                    for number in message.numbers:
                        self._trust_of.pop(number, nothing)()
                elif isinstance(message, Reload):
                    self._reload()
            nursery.cancel_scope.deadline = trio.current_time() + _LAST_WAIT_S

    async def _messages(self) -> AsyncIterator[tuple[ToEdge, list[int]]]:
        """Receive control messages with the descriptors that came along, which the caller owns."""
        room = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
        decoder = msgspec.msgpack.Decoder(ToEdge)
        while True:
            try:
                data, ancillary, _, _ = await self._control.recvmsg(CONTROL_MAX, room)
            except OSError:
                return
            if not data:
                return
            descriptors = array.array("i")
            for level, kind, octets in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(octets[: len(octets) // descriptors.itemsize * descriptors.itemsize])  # fmt: skip
            yield decoder.decode(data), list(descriptors)

    def _reload(self) -> None:
        if self._tls is None:
            return
        try:
            self._tls.reload()
        except AmqpError as error:
            log.error("an edge keeps the certificates as they were: %s", error.description)

    async def _serve(self, handover: Passed, descriptors: list[int]) -> None:
        """Run one connection until it has ended at both sides."""
        if len(descriptors) != DESCRIPTORS_MAX:
            # The process has too many open files: the system has closed what did not fit.
            for each in descriptors:
                os.close(each)
            log.error("connection from %s refused: too many open files", handover.address)
            return
        client, pair = (
            trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=each)))
            for each in descriptors
        )
        try:
            stream = await self._handshake(client, pair, handover)
            if stream is not None:
                await self._relay(stream, pair)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception:
            # A fault of ours: it must not end the other connections.
            log.exception("the connection from %s broke", handover.address)
        finally:
            self._trust_of.pop(handover.number, None)
            with trio.CancelScope(shield=True):
                for side in (client, pair):
                    if side.socket.fileno() >= 0:
                        await trio.aclose_forcefully(side)

    async def _handshake(
        self,
        client: trio.SocketStream,
        pair: trio.SocketStream,
        handover: Passed,
    ) -> trio.abc.Stream | None:
        """Do the handshakes, and say on *pair* what they revealed; None if they failed."""
        stream: trio.abc.Stream | None = None
        deadline = trio.current_time() + handover.within
        async with trio.open_nursery() as home:
            home.start_soon(_cancel_when_readable, pair, home.cancel_scope)
            try:
                stream, arrival = await self._unwrap(client, handover, deadline)
            except ConnectFailed as error:
                log.info("connection from %s refused: %s", handover.address, error.description)
            home.cancel_scope.cancel()
        if stream is None:
            return None
        data = msgspec.msgpack.encode(arrival)
        await pair.send_all(len(data).to_bytes(LENGTH_SIZE, "big") + data)
        return stream

    async def _unwrap(
        self,
        stream: trio.abc.Stream,
        handover: Passed,
        deadline: float,
    ) -> tuple[trio.abc.Stream, Unwrapped]:
        """Return the stream of AMQP within *stream*.

        Raises:
            ConnectFailed: A handshake failed.
        """
        layer: TlsLayer | None = None
        limits = self._limits
        if handover.scheme != "ws":
            if self._tls is None:
                raise ConnectFailed("there is no certificate")
            layer = self._tls.layer()
            within = min(limits.tls_handshake_s, handover.within)
            stream = await encrypt(stream, layer, received=handover.received, within=within)
        if handover.scheme != "amqps":
            from .websocket import accept_websocket

            websocket = await accept_websocket(
                stream,
                path=handover.path,
                origins=self._settings.origins,
                limits=limits,
                within=deadline - trio.current_time(),
            )
            self._trust_of[handover.number] = websocket.trust
            stream = websocket
        return stream, facts_of(layer)

    async def _relay(self, stream: trio.abc.Stream, pair: trio.SocketStream) -> None:
        """Relay octets until both sides have ended."""
        descriptor = pair.socket.fileno()

        def end_output() -> None:
            # The carrier owns the socket, and calls this while it has it.
            sock = socket.socket(fileno=descriptor)
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # The hub has closed it.
            finally:
                sock.detach()

        at_client, at_hub = RelayEnd(), RelayEnd(end_output)
        at_client.other, at_hub.other = at_hub, at_client
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, pair, at_hub, self._patient)
            await self._carry(stream, at_client, self._limits)
            # The hub reads what is on its way, and then the end.
            nursery.cancel_scope.deadline = trio.current_time() + self._limits.write_stall_s

    async def _carry(self, stream: trio.abc.Stream, end: RelayEnd, limits: Limits) -> None:
        await run_connection(stream, end, _ignore, limits=limits, reactor=self._reactor)
        end.discard()


def _ignore(events: list[Event]) -> None:
    """Ignore *events*: engines of a relay have none."""


async def _cancel_when_readable(pair: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancel *scope* when the hub has dropped the connection: it says nothing before an :class:`Unwrapped`."""
    await trio.lowlevel.wait_readable(pair.socket)
    scope.cancel()


def receive_settings(control: socket.socket) -> EdgeSettings | None:
    """Receive the first message of the hub; None if it has ended."""
    data = control.recv(CONTROL_MAX)
    return msgspec.msgpack.decode(data, type=EdgeSettings) if data else None


def ignore_signals() -> None:
    """Leave the end of this process to its hub: a service manager sends signals to all processes of a service."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
