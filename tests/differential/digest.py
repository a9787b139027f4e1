"""Digests of one installation's behaviour on a corpus of octets, which those of another one must equal.

``python digest.py CASES [FOLDER]`` prints JSON: whether the installation is compiled, a digest of its
sources, and a digest for each case. The corpus consists of recorded conversations, damaged in ways that
depend only on a seed, and of the fuzz inputs in FOLDER if it is given. It is plain octets: no code under
test takes part in making it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from conversations import written  # noqa: E402  # found by the path above
from hostile import PROGRAMS, Program, passive  # noqa: E402

import amqp_rt  # noqa: E402
from amqp_rt.codec.primitives import Reader, encode  # noqa: E402
from amqp_rt.core.frames import read_disposition, read_transfer  # noqa: E402
from amqp_rt.errors import AmqpError  # noqa: E402
from amqp_rt.limits import DEFAULT_LIMITS  # noqa: E402
from amqp_rt.message import Message  # noqa: E402

HEADER = b"AMQP\x00\x01\x00\x00"
INTERESTING = (
    0,
    1,
    2,
    0x40,
    0x41,
    0x43,
    0x45,
    0x52,
    0x53,
    0x70,
    0x7F,
    0x80,
    0xA0,
    0xC0,
    0xD0,
    0xF0,
    0xFF,
)


def sources() -> str:
    """Return a digest of the sources whose two forms are compared; both installations contain them."""
    package = Path(amqp_rt.__file__).parent
    total = hashlib.sha256()
    for folder in ("codec", "core", "broker", "."):
        for path in sorted((package / folder).glob("*.py")):
            if path.name != "__init__.py":
                total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


# --- corpus --------------------------------------------------------------------------------------


def conversations() -> list[tuple[str, str, bytes]]:
    path = TESTS / "core" / "vectors" / "conversations.json"
    return [
        (f"{conversation['scenario']}/{side}", side, written(conversation, side))
        for conversation in json.loads(path.read_text("utf-8"))
        for side in ("client", "server")
    ]


def frames_of(data: bytes) -> list[bytes]:
    """Cut *data* into its frames."""
    found = []
    at = 0
    while at + 8 <= len(data):
        size = 8 if data[at : at + 4] == b"AMQP" else struct.unpack_from(">I", data, at)[0]
        found.append(data[at : at + max(8, size)])
        at += max(8, size)
    return found or [data]


def damaged(data: bytes, luck: random.Random) -> bytes:
    pieces = frames_of(data)
    for _ in range(luck.randrange(3)):
        what = luck.randrange(3)
        at = luck.randrange(len(pieces))
        if what == 0:
            pieces.insert(at, luck.choice(pieces))
        elif what == 1 and len(pieces) > 2:
            del pieces[at]
        else:
            other = luck.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], pieces[at]
    octets = bytearray(b"".join(pieces))
    for _ in range(luck.randrange(4)):
        at = luck.randrange(len(octets))
        what = luck.randrange(4)
        if what < 2:
            octets[at] = luck.choice((*INTERESTING, octets[at] ^ 1))
        elif what == 2:
            octets[at:at] = bytes(luck.choice(INTERESTING) for _ in range(luck.randrange(1, 4)))
        else:
            del octets[at : at + luck.randrange(1, 4)]
    return bytes(octets)


def corpus(cases: int, folder: Path | None) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, sending side, octets)."""
    recorded = conversations()
    yield from recorded
    for seed in range(cases):
        luck = random.Random(seed)
        name, side, data = luck.choice(recorded)
        yield f"{seed} of {name}", side, damaged(data, luck)
    if folder is None:
        return
    for file in ("proton-fuzz.jsonl", "go-amqp-fuzz.jsonl"):
        with (folder / file).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                entry = json.loads(line)
                if cases >= 1_000 or number % 5 == 0:
                    name = f"{entry['target']} {entry['sha256'][:12]}"
                    yield name, "client", base64.b64decode(entry["b64"])


# --- behaviour -----------------------------------------------------------------------------------


def played(program: Program, data: bytes, size: int) -> list[object]:
    """Return all observable results of an engine that receives *data*."""
    seen: list[object] = []
    for at in range(0, len(data), size):
        program.hear(data[at : at + size])
        engine = program.engine
        seen.append((engine.state, engine.finished, engine.deadline, engine.assembling))
    program.end()
    seen.append(bytes(program.said).hex())
    seen += [_event(event) for event in program.events]
    seen += [endpoint.heard for endpoint in program.endpoints]
    return seen


def _event(event: Any) -> tuple[str, str]:
    shown = getattr(event, "error", None) or getattr(event, "link", None)
    if hasattr(event, "response"):
        shown = (event.mechanism, event.response, event.hostname)
    elif hasattr(event, "peer"):
        shown = event.peer
    return type(event).__name__, repr(shown)


def read(data: bytes) -> list[object]:
    """Decode *data* as values, as a message, and as the two performatives that have fast paths."""
    seen: list[object] = []
    reader = Reader(data)
    try:
        while reader.at < reader.end:
            value = reader.read_value()
            seen.append((repr(value), encode(value).hex()))
    except AmqpError as error:
        seen.append((reader.at, str(error)))
    for fast in (
        lambda: read_transfer(data, 0, len(data), DEFAULT_LIMITS),
        lambda: read_disposition(data, 0, len(data), DEFAULT_LIMITS),
        lambda: Message.decode(data).encode().hex(),
        lambda: repr(Message.decode(data).body),
    ):
        try:
            seen.append(repr(fast()))
        except AmqpError as error:
            seen.append(str(error))
    return seen


def digest(name: str, side: str, data: bytes) -> str:
    seen: list[object] = []
    for role, make in PROGRAMS.items():
        if side in role:
            continue  # the same side: its input comes from the other one
        seen.append(played(make(), data, len(data) or 1))
        seen.append(played(passive(make()), data, 13))
    for piece in [data, *frames_of(data)]:
        seen.append(read(piece))
        seen.append(read(piece[8:]))
        seen.append(read(piece[11:]))
    return hashlib.sha256(repr((name, seen)).encode("utf-8", "surrogatepass")).hexdigest()


def main() -> None:
    cases = int(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    found = {name: digest(name, side, data) for name, side, data in corpus(cases, folder)}
    print(json.dumps({"compiled": amqp_rt.COMPILED, "sources": sources(), "cases": found}))


if __name__ == "__main__":
    main()
