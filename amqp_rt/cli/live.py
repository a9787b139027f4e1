"""``amqp-rt trace URL``: relay connections between clients and a server, and draw their frames live."""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

import click
import trio
from msgspec import Struct

from ..addresses import Url
from ..clock import SystemClock
from ..container.running import stop_on_signals
from ..errors import ConnectFailed, printable
from ..limits import DEFAULT_LIMITS
from ..net.carrier import READ_SIZE
from ..net.dial import dial
from ..net.listeners import ConnectionLimiter, bound_address, open_tcp, open_unix, serve_socket
from ..net.tls import ClientTls
from ..net.traces.drawing import Climber, Rung, draw_rung
from ..net.traces.octets import CompositeValue
from ..net.traces.recording import Kind, Mask, TraceRecord, TraceWriter

__all__ = ["Drawing", "trace_live"]

#: Seconds in which the server must accept a connection.
_DIAL_S: Final = 30.0
#: Performatives that carry an error, if there was one.
_ENDS: Final = ("close", "end", "detach")
#: Maximum number of distinct errors in the summary.
_NAMED_MAX: Final = 20
#: Characters shown of each of them.
_ERROR_MAX: Final = 200


class Drawing(Struct, kw_only=True, frozen=True):
    """Options of the drawing."""

    width: int
    #: Use ASCII only.
    plain: bool
    #: Maximum number of rungs drawn, for all connections together; None for all.
    frames: int | None = None


class _Side:
    """Totals of one side of all connections."""

    def __init__(self) -> None:
        self.frames = 0
        self.transfers = 0
        self.octets = 0

    def __str__(self) -> str:
        return f"{self.frames} frames, {self.transfers} of them transfers, {self.octets} bytes"


class _Live:
    """Relay of all connections.

    Args:
        url: URL of the server.
        tls: Trusted authorities and our certificate for connections to it.
        drawing: Options of the drawing.
        kept: File for the trace of the first connection, None for none.
    """

    def __init__(
        self, url: Url, tls: ClientTls | None, drawing: Drawing, kept: Path | None
    ) -> None:
        self.url = url
        self.connections = 0
        self.sides = {True: _Side(), False: _Side()}
        self.errors: Counter[str] = Counter()
        self._tls = tls
        self._drawing = drawing
        self._kept = kept
        self._drawn = 0

    async def serve(self, client: trio.abc.Stream, address: str, logged_in: object) -> None:
        """Relay one connection until both of its sides have ended."""
        self.connections += 1
        heard = _Heard(self, self.connections, address)
        try:
            try:
                with trio.fail_after(_DIAL_S):
                    dialled = await dial(self.url, tls=self._tls)
            except ConnectFailed as error:
                heard.note(error.description, bad=True)
                return
            except trio.TooSlowError:
                heard.note(f"cannot connect to {self.url}: it does not answer", bad=True)
                return
            async with client, dialled.stream:
                await _pass_on(client, dialled.stream, heard)
        finally:
            heard.close()

    def writer(self, number: int, address: str) -> TraceWriter | None:
        """Return the writer for the trace of connection *number*, None without a file.

        The first connection is written to the given file, others to files beside it.

        Raises:
            OSError: The file cannot be written.
        """
        if self._kept is None:
            return None
        path = self._kept
        if number > 1:
            path = path.with_name(f"{path.stem}-{number}{path.suffix}")
        # The trace contains messages, so only the owner may read it.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 0)
        return TraceWriter(file, client=False, address=address, clock=SystemClock())

    def draw(self, number: int, rung: Rung) -> None:
        """Draw and count one more rung of connection *number*."""
        frame = rung.frame
        if rung.client is not None and frame is not None:
            side = self.sides[rung.client]
            side.frames += 1
            side.transfers += frame.name == "transfer"
            error = frame.fields.get("error") if frame.name in _ENDS else None
            if isinstance(error, CompositeValue):
                self._count(str(error.fields.get("condition")))
        if rung.bad:
            self._count(rung.text if frame is None else frame.fault)
        self._drawn += 1
        drawing = self._drawing
        if drawing.frames is None or self._drawn <= drawing.frames:
            mark = f"#{number:<3} "
            width = drawing.width - len(mark)
            click.echo(mark + draw_rung(rung, width=width, plain=drawing.plain))

    def _count(self, error: str) -> None:
        if len(self.errors) < _NAMED_MAX or error in self.errors:
            self.errors[error] += 1

    def summary(self) -> str:
        """Return the totals of all connections and their errors."""
        lines = [
            f"connections: {self.connections}",
            f"from clients: {self.sides[True]}",
            f"from the server: {self.sides[False]}",
        ]
        lines += [
            f"{printable(error, _ERROR_MAX)}: {times}" for error, times in self.errors.most_common()
        ]
        left = self._drawn - (self._drawing.frames or self._drawn)
        if left > 0:
            lines.append(f"{left} frames were not drawn: raise --frames to draw more")
        return "\n".join(lines)


class _Heard:
    """Traffic of one connection: its trace and its drawing."""

    def __init__(self, live: _Live, number: int, address: str) -> None:
        self._live = live
        self._number = number
        self._writer: TraceWriter | None = None
        self._began = trio.current_time()
        heard, said = Mask.pair(client=False)
        self._masks = {True: heard, False: said}
        self._climber = Climber(client=False)
        self.note(f"a connection from {address}")
        try:
            self._writer = live.writer(number, address)
        except OSError as error:
            self.note(f"the trace is not kept: {error.filename}: {error.strerror}", bad=True)

    def heard(self, data: bytes, *, client: bool) -> None:
        """Process *data* from the client or the server; empty for the end of its stream."""
        self._live.sides[client].octets += len(data)
        if self._writer is not None:
            if not data:
                if client:
                    self._writer.received_eof()
            elif client:
                self._writer.received(data)
            else:
                self._writer.sent(data)
        if not data:
            self._draw(Rung(self._at_s, client, "end of stream"))
            return
        mask = self._masks[client]
        shown = mask.feed(data)
        kind = Kind.RECEIVED if client else Kind.SENT
        if mask.unknown:
            kind = Kind.OMITTED_RECEIVED if client else Kind.OMITTED_SENT
            shown = len(data).to_bytes(8, "big")
        for rung in self._climber.climb(TraceRecord(kind, self._at_s, shown)):
            self._draw(rung)

    def note(self, text: str, *, bad: bool = False) -> None:
        """Draw an event that is not a frame."""
        self._draw(Rung(self._at_s, None, text, bad))

    def close(self) -> None:
        """Draw the rest, and close the trace."""
        for rung in self._climber.top():
            self._draw(rung)
        self.note("the connection is over")
        if self._writer is not None:
            self._writer.close()

    @property
    def _at_s(self) -> float:
        return trio.current_time() - self._began

    def _draw(self, rung: Rung) -> None:
        self._live.draw(self._number, rung)


async def _pass_on(client: trio.abc.Stream, server: trio.abc.Stream, heard: _Heard) -> None:
    """Relay octets in both directions until both streams end; half-close where a stream supports it."""

    async def carry(source: trio.abc.Stream, sink: trio.abc.Stream, is_client: bool) -> None:
        try:
            while data := bytes(await source.receive_some(READ_SIZE)):
                heard.heard(data, client=is_client)
                await sink.send_all(data)
            heard.heard(b"", client=is_client)
            if isinstance(sink, trio.abc.HalfCloseableStream):
                await sink.send_eof()
            else:
                both.cancel_scope.cancel()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            heard.note(
                "the " + ("client's" if is_client else "server's") + " stream broke", bad=True
            )
            both.cancel_scope.cancel()

    async with trio.open_nursery() as both:
        both.start_soon(carry, client, server, True)
        both.start_soon(carry, server, client, False)


async def trace_live(
    url: Url, listen: Url, *, tls: ClientTls | None, drawing: Drawing, kept: Path | None
) -> None:
    """Listen at *listen*, relay connections to *url*, and draw them, until the first signal.

    Raises:
        ConnectFailed: *listen* cannot be listened on.
    """
    live = _Live(url, tls, drawing, kept)
    limiter = ConnectionLimiter(DEFAULT_LIMITS)
    async with trio.open_nursery() as nursery:
        if listen.scheme == "amqp+unix":
            listeners = [await open_unix(listen.path)]
            where = listen
        else:
            listeners = await open_tcp(listen.host, listen.port)
            where = Url(host=listen.host, port=bound_address(listeners[0])[1])
        await nursery.start(stop_on_signals, nursery.cancel_scope.cancel)
        for listener in listeners:
            nursery.start_soon(
                partial(serve_socket, listener, limiter, live.serve, nursery=nursery)
            )
        click.echo(
            f"listening on {where}, passing on to {url}: connect there; Ctrl-C ends it", err=True
        )
    sys.stdout.flush()
    click.echo(live.summary(), err=True)
