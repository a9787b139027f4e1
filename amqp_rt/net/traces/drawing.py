"""Traces drawn as ladders: the client on the left, the server on the right, a rung for each frame.

Text from a peer is escaped: neither a terminal nor a browser receives control characters or mark-up
of its making.
"""

from __future__ import annotations

import datetime as dt
import html
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from ...errors import printable
from ...fronts.tracing import TRACINGS, TracedFrame, TraceReader
from .octets import CompositeValue, Frame, Splitter
from .recording import Kind, Trace, TraceRecord

__all__ = ["Climber", "Rung", "draw_html", "draw_rung", "draw_svg", "draw_text", "rungs"]

#: Longest text of one value, and of one rung, in characters.
_VALUE_MAX: Final = 80
_TEXT_MAX: Final = 400


class Rung(Struct):
    """A frame, or another event of a trace."""

    at_s: float
    #: Whether the client caused it, else the server; None for the recorder.
    client: bool | None
    text: str
    #: Whether it is malformed or unexpected.
    bad: bool = False
    #: The frame, if it is one.
    frame: Frame | None = None


class Climber:
    """Converts trace records to rungs as they are recorded.

    Args:
        client: Whether the side that dialled recorded them.
    """

    def __init__(self, *, client: bool) -> None:
        self._client = client
        self._splitters: dict[bool, Splitter | TraceReader] = {True: Splitter(), False: Splitter()}
        #: Whether the client's first octets have arrived, which determine the protocol.
        self._begun = False
        self._at_s = 0.0

    def climb(self, record: TraceRecord) -> list[Rung]:
        """Return rungs for the frames that *record* completes, or for another event."""
        kind = record.kind
        self._at_s = record.at_s
        sent = kind in (Kind.SENT, Kind.OMITTED_SENT)
        client = sent == self._client
        if kind in (Kind.SENT, Kind.RECEIVED):
            return self._frames(client, record.data)
        if kind is Kind.RECEIVED_EOF:
            return [Rung(record.at_s, client, "end of stream")]
        if kind is Kind.END:
            return [Rung(record.at_s, None, "the connection is over")]
        if kind is Kind.CUT:
            return [Rung(record.at_s, None, "more came, for which the trace has no room", bad=True)]
        if kind in (Kind.OMITTED_SENT, Kind.OMITTED_RECEIVED):
            size = int.from_bytes(record.data, "big")
            return [Rung(record.at_s, client, f"{size} bytes of another protocol, not kept")]
        return []

    def _frames(self, client: bool, data: bytes) -> list[Rung]:
        found: list[Rung] = []
        if client and not self._begun:
            self._begun = True
            tracing = TRACINGS.get(data[:8])
            if tracing is not None:
                header = Splitter().feed(data[:8])[0]
                found.append(Rung(self._at_s, client, _line(header), frame=header))
                self._splitters = {True: tracing.reader(), False: tracing.reader()}
                data = data[8:]
        for frame in self._splitters[client].feed(data):
            if isinstance(frame, TracedFrame):
                frame = Frame(frame.name, frame.channel, {}, bytes(frame.size), frame.fault)
            found.append(Rung(self._at_s, client, _line(frame), bool(frame.fault), frame))
        return found

    def top(self) -> list[Rung]:
        """Return rungs for frames still incomplete at the end of the trace."""
        return [
            Rung(
                self._at_s,
                client,
                f"{len(splitter.held)} bytes of a frame that did not become whole",
                bad=True,
            )
            for client, splitter in self._splitters.items()
            if splitter.held
        ]


def rungs(trace: Trace) -> list[Rung]:
    """Return rungs for the frames of *trace*, in the order in which they were completed."""
    climber = Climber(client=trace.client)
    found = [rung for record in trace.records for rung in climber.climb(record)]
    found += climber.top()
    if trace.damage:
        last = trace.records[-1].at_s if trace.records else 0.0
        found.append(Rung(last, None, _plain(trace.damage, _TEXT_MAX), bad=True))
    return found


def _line(frame: Frame) -> str:
    if frame.name == "header":
        octets = frame.payload
        protocol = {0: "AMQP", 2: "TLS", 3: "SASL"}.get(octets[4], f"protocol {octets[4]}")
        return f"header {protocol} {octets[5]}.{octets[6]}.{octets[7]}"
    parts = [str(frame.channel), frame.name.replace("_", "-")]
    parts += [f"{name.replace('_', '-')}={_shown(name, value)}" for name, value in frame.fields.items()]  # fmt: skip
    if frame.payload:
        parts.append(f"+ {len(frame.payload)} bytes")
    if frame.fault:
        parts.append(f"({frame.fault})")
    return _plain(" ".join(parts), _TEXT_MAX)


def _shown(name: str, value: Any) -> str:
    if name == "role":
        return "receiver" if value else "sender"
    if isinstance(value, CompositeValue):
        inside = ", ".join(f"{key}={_shown(key, each)}" for key, each in value.fields.items())
        if name in ("source", "target") and value.name == name:
            return _cut(repr(value.fields.get("address")), _VALUE_MAX)
        return _cut(f"{value.name.replace('_', '-')}({inside})", _VALUE_MAX)
    return _cut(str(value) if isinstance(value, bool | int) else repr(value), _VALUE_MAX)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _plain(text: str, size: int) -> str:
    """Return *text* on one line, with invisible characters escaped."""
    return _cut(printable(text), size)


def _title(trace: Trace) -> str:
    began = dt.datetime.fromtimestamp(trace.began, dt.UTC)
    side = "client" if trace.client else "server"
    return _plain(f"{began:%Y-%m-%d %H:%M:%S} UTC, {side}'s side, with {trace.address or 'a peer'}", _TEXT_MAX)  # fmt: skip


# --- drawing ------------------------------------------------------------------------------------


def draw_text(trace: Trace, found: Iterable[Rung], *, width: int = 100, plain: bool = False) -> str:
    """Draw the ladder for a terminal of *width* characters; *plain* restricts it to ASCII."""
    inner = max(30, width - 14)
    lines = [_title(trace), f"{'':10}  {'client':<{inner - 4}}server"]
    lines += [draw_rung(rung, width=width, plain=plain) for rung in found]
    text = "\n".join(lines)
    return text.encode("ascii", "backslashreplace").decode() if plain else text


def draw_rung(rung: Rung, *, width: int = 100, plain: bool = False) -> str:
    """Draw one line of the ladder for a terminal; see :func:`draw_text`."""
    rail, dash, left, right = "|-<>" if plain else "│─◀▶"
    inner = max(30, width - 14)
    mark = "! " if rung.bad else ""
    text = _plain(mark + rung.text, inner - 6)
    if rung.client is None:
        drawn = f" {text:^{inner - 2}} "
    elif rung.client:
        drawn = f"{dash * 2} {text} ".ljust(inner - 1, dash) + right
    else:
        drawn = left + f" {text} {dash * 2}".rjust(inner - 1, dash)
    line = f"{rung.at_s:10.6f}  {rail}{drawn}{rail}"
    return line.encode("ascii", "backslashreplace").decode() if plain else line


_ROW: Final = 26
_LEFT: Final = 110
_RIGHT: Final = 1090
_WIDTH: Final = 1120


def draw_svg(trace: Trace, found: Iterable[Rung]) -> str:
    """Draw the ladder as SVG."""
    rows = []
    y = 60
    for rung in found:
        y += _ROW
        text = html.escape(_plain(rung.text, 150))
        colour = "#b00020" if rung.bad else "#222"
        rows.append(f'<text x="100" y="{y}" text-anchor="end" fill="#777">{rung.at_s:.6f}</text>')
        if rung.client is None:
            rows.append(f'<text x="600" y="{y}" text-anchor="middle" fill="{colour}">{text}</text>')
            continue
        begin, end = (_LEFT, _RIGHT) if rung.client else (_RIGHT, _LEFT)
        anchor, at = ("start", _LEFT + 12) if rung.client else ("end", _RIGHT - 12)
        tip = end - 7 if rung.client else end + 7
        rows.append(
            f'<path d="M{begin} {y + 4}H{end}M{tip} {y}L{end} {y + 4}L{tip} {y + 8}" '
            f'stroke="{colour}" fill="none"/>'
            f'<text x="{at}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
        )
    height = y + _ROW
    rails = "".join(
        f'<path d="M{x} 48V{height - 8}" stroke="#999"/><text x="{x}" y="40" '
        f'text-anchor="middle" font-weight="bold">{name}</text>'
        for x, name in ((_LEFT, "client"), (_RIGHT, "server"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 40}" height="{height}" '
        f'viewBox="0 0 {_WIDTH + 40} {height}" font-family="monospace" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="20" y="20">{html.escape(_title(trace))}</text>{rails}{"".join(rows)}</svg>\n'
    )


def draw_html(trace: Trace, found: Iterable[Rung]) -> str:
    """Draw the ladder as an HTML page without scripts and external resources."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(_title(trace))}</title></head><body>\n"
        f"{draw_svg(trace, found)}</body></html>\n"
    )
