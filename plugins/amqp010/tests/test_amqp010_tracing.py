"""Traces of 0-10: controls and commands by name, and no secrets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from octets010 import HEADER, Operation, Struct, frames
from protocol010 import Login
from served010 import serving

from amqp_rt.clock import SystemClock
from amqp_rt.net.traces.drawing import rungs
from amqp_rt.net.traces.recording import Trace, TraceWriter, read_trace

pytestmark = pytest.mark.req("O5")

SECRET = b"correct horse"


class File(io.BytesIO):
    """A file whose octets are there after it was closed."""

    octets = b""

    def close(self) -> None:
        if not self.closed:
            self.octets = self.getvalue()
        super().close()


def traced(path: Path, octets: bytes, piece: int = 1 << 20) -> tuple[bytes, Trace]:
    """What a trace keeps of what a client says, *piece* octets at a time."""
    file = File()
    writer = TraceWriter(file, client=False, address="them", clock=SystemClock(), bytes_max=1 << 24)
    for at in range(0, len(octets), piece):
        writer.received(octets[at : at + piece])
    writer.close()
    path.write_bytes(file.octets)
    trace = read_trace(path)
    return b"".join(data for _, data in trace.chunks(client=True)), trace


def said(name: str, fields: dict[str, object], size: int = 4000) -> bytes:
    return b"".join(frames(Operation(name, fields).segments(), 0, size))


def published(key: str, body: bytes, size: int = 4000, **headers: object) -> bytes:
    operation = Operation("message.transfer", {"destination": ""})
    operation.headers = [
        Struct("delivery-properties", routing_key=key),
        Struct("message-properties", application_headers=headers),
    ]
    operation.body = body
    return b"".join(frames(operation.segments(), 0, size))


START_OK = said("connection.start-ok", {"mechanism": "PLAIN", "response": b"\0bench\0" + SECRET})


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("octets", "drawn"),
    [
        (START_OK, "connection.start-ok"),
        (said("connection.start-ok", {"response": SECRET}, 5), "control"),
        (START_OK[:-1], "bytes of a frame that did not become whole"),
        (b"\x41" + START_OK, "no frame of 0-10"),
        (said("connection.secure-ok", {"response": SECRET}), "connection.secure-ok"),
        (published("$cbs", SECRET), "body"),
        (published("$cbs", SECRET, 20), "body"),
        (published("$management", b"", password=SECRET.decode()), "header"),
        (published("$management", bytes(9_000) + SECRET), "body"),
    ],
    ids=["plain", "pieces", "cut", "garbage", "secure", "cbs", "cbs cut", "properties", "body"],
)
def test_secrets_are_masked(tmp_path: Path, octets: bytes, drawn: str, piece: int) -> None:
    kept, trace = traced(tmp_path / "one", HEADER + octets, piece)
    assert SECRET not in kept
    assert SECRET[-6:] not in kept
    assert len(kept) == len(HEADER + octets)
    assert drawn in "\n".join(rung.text for rung in rungs(trace))


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_what_is_not_secret_is_kept_as_it_is(tmp_path: Path, piece: int) -> None:
    hidden = published("$cbs", b"hidden")
    after = published("q", bytes(20_000), a="b") + said("queue.declare", {"queue": "q"})
    kept, trace = traced(tmp_path / "one", HEADER + hidden + after, piece)
    assert kept.endswith(after)
    assert b"hidden" not in kept
    texts = [rung.text for rung in rungs(trace)]
    assert "queue.declare" in texts[-2]
    assert not any(rung.bad for rung in rungs(trace))


def drawn(folder: Path) -> str:
    """Return the drawing of the only trace in *folder*, in which no secret is."""
    (path,) = folder.iterdir()
    assert SECRET not in path.read_bytes()
    return "\n".join(rung.text for rung in rungs(read_trace(path)))


async def test_a_conversation_is_drawn_without_its_password(tmp_path: Path) -> None:
    async with (
        serving(users={"bench": SECRET.decode()}, trace=tmp_path) as served,
        served.client(login=Login.plain("bench", SECRET.decode())) as client,
    ):
        await (await client.session(b"s")).sync()
    texts = drawn(tmp_path)
    for name in ("connection.tune", "session.attached", "execution.sync", "connection.close-ok"):
        assert name in texts
