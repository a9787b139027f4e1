"""Hand-made frames, for tests in the role of the peer."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import trio

from amqp_rt.codec.composites import encode_composite, read_composite
from amqp_rt.codec.primitives import Reader
from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import (
    PERFORMATIVES,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import (
    SaslChallenge,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.outcomes import Rejected

SASL = (SaslMechanisms, SaslInit, SaslChallenge, SaslResponse, SaslOutcome)


def server(**options: object) -> Engine:
    wanted = {"container_id": "server", "sasl_required": False} | options
    return amqp10.Front().server(ServerOptions(**wanted), 0.0)  # type: ignore[arg-type]


def said(engine: Engine) -> list[object]:
    """Return the engine's output: header bytes and (channel, performative)."""
    data = b"".join(engine.take())
    found: list[object] = []
    at = 0
    while at < len(data):
        if data[at : at + 4] == b"AMQP":
            found.append(data[at : at + 8])
            at += 8
            continue
        size, doff, kind, channel = struct.unpack_from(">IBBH", data, at)
        if size > doff * 4:
            reader = Reader(data, at + doff * 4, at + size)
            found.append((channel, read_composite(reader, *(SASL if kind else PERFORMATIVES))))
        else:
            found.append((channel, None))
        at += size
    return found


def frame(performative: object, channel: int = 0, payload: bytes = b"", kind: int = 0) -> bytes:
    body = encode_composite(performative) + payload
    return struct.pack(">IBBH", len(body) + 8, 2, kind, channel) + body


OPEN = frame(Open(container_id="peer"))
BEGIN = frame(Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100))


def opened(**options: object) -> Engine:
    engine = server(**options)
    engine.receive(AMQP_HEADER + OPEN, 0.0)
    engine.take()
    return engine


def begun(**options: object) -> Engine:
    engine = opened(**options)
    engine.receive(BEGIN, 0.0)
    engine.take()
    return engine


def closed_with(engine: Engine) -> str:
    """Return the condition of the close in the engine's output."""
    closes = [p for _, p in [f for f in said(engine) if isinstance(f, tuple)] if type(p) is Close]
    assert len(closes) == 1
    assert closes[0].error is not None
    return str(closes[0].error.condition)


def kinds(engine: Engine) -> list[str]:
    return [type(f[1]).__name__ for f in said(engine) if isinstance(f, tuple)]


def ended_with(engine: Engine) -> str:
    ends = [f[1] for f in said(engine) if isinstance(f, tuple) and isinstance(f[1], End)]
    assert len(ends) == 1
    assert ends[0].error is not None
    return str(ends[0].error.condition)


def detached_with(engine: Engine) -> str:
    found = [f[1] for f in said(engine) if isinstance(f, tuple) and isinstance(f[1], Detach)]
    assert len(found) == 1
    assert found[0].error is not None
    return str(found[0].error.condition)


def transfer(delivery_id: int | None, payload: bytes = b"x", **fields: Any) -> bytes:
    tag = fields.pop("tag", None if delivery_id is None else struct.pack(">I", delivery_id))
    handle = fields.pop("handle", 0)
    return frame(Transfer(handle, delivery_id, tag, 0, **fields), payload=payload)


class Octets:
    """Hand-made peer: sends octets, and collects the frames that it receives."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.heard: list[Any] = []
        self.over = False
        self._data = b""

    async def say(self, *octets: bytes) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stream.send_all(b"".join(octets))

    async def hear(self, kind: type, count: int = 1) -> Any:
        """Return the *count*-th frame of *kind*; None if the stream ends before."""
        while True:
            found = [each for each in self.heard if type(each) is kind]
            if len(found) >= count or self.over:
                return found[count - 1] if len(found) >= count else None
            try:
                data = await self.stream.receive_some(65_536)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            self.over = not data
            self._data += data
            self._cut()

    async def end(self) -> None:
        """Receive until the stream ends."""
        await self.hear(type(None), 1_000_000)

    @property
    def condition(self) -> str:
        """Condition of the first error received; empty if there was none."""
        for each in self.heard:
            error = None
            if isinstance(each, Close | End | Detach):
                error = each.error
            elif isinstance(each, Disposition) and isinstance(each.state, Rejected):
                error = each.state.error
            elif isinstance(each, SaslOutcome) and each.code:
                return f"sasl {each.code}"
            if error is not None:
                return str(error.condition)
        return ""

    def _cut(self) -> None:
        data = self._data
        at = 0
        while len(data) - at >= 8:
            if data[at : at + 4] == b"AMQP":
                at += 8
                continue
            size, doff, kind, _ = struct.unpack_from(">IBBH", data, at)
            if len(data) - at < size:
                break
            if size > doff * 4:
                reader = Reader(data, at + doff * 4, at + size)
                self.heard.append(read_composite(reader, *(SASL if kind else PERFORMATIVES)))
            at += size
        self._data = data[at:]
