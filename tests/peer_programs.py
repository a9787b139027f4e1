"""Run the programs of tests/peers, and convert values to and from their notation.

``tests/peers/README.md`` is the contract. A program is a process that prints lines of JSON, which tests
``await`` here.
"""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import trio

from amqp_rt import values
from amqp_rt.message import Message
from amqp_rt.values import Array, Char, Described, Float32, Map, Symbol

PROGRAMS = Path(__file__).parent / "peers"

#: Longer than the time limit of the programs themselves.
PATIENCE_S = 40.0

Typed = list[Any]


class Program:
    """A running program of a peer."""

    def __init__(self, process: trio.Process, name: str) -> None:
        self.process = process
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self.errors = b""
        self._more = trio.Event()
        self._over = False

    async def read(self) -> None:
        """Collect the lines of its output, until it ends."""
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            self.lines += [json.loads(line) for line in lines]
            self._note()
        self._over = True
        self._note()

    async def read_errors(self) -> None:
        assert self.process.stderr is not None
        async for data in self.process.stderr:
            self.errors += data

    def _note(self) -> None:
        self._more.set()
        self._more = trio.Event()

    async def said(self, key: str) -> dict[str, Any]:
        """Wait for the line that has *key*."""
        seen = 0
        while True:
            for line in self.lines[seen:]:
                if key in line:
                    return line
            seen = len(self.lines)
            if self._over:
                raise AssertionError(f"{self.name} ended without {key!r}: {self._story()}")
            await self._more.wait()

    async def result(self) -> dict[str, Any]:
        """Wait until the program has ended; return its last line, the result."""
        while not self._over:
            await self._more.wait()
        assert await self.process.wait() == 0, self._story()
        assert len(self.lines) > 1, self._story()
        result = self.lines[-1]
        assert "timeout" not in result, f"{self.name} gave up: {self._story()}"
        return result

    def _story(self) -> str:
        return f"{self.lines}\n{self.errors.decode(errors='replace')}"


class PeerPrograms:
    """Programs written on one peer."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        suffix = {"proton": "proton_peer.py", "rhea": "rhea_peer.js", "azure": "azure_peer.py"}[
            name
        ]
        self.command = [*command, str(PROGRAMS / suffix)]

    @asynccontextmanager
    async def start(self, role: str, **options: Any) -> AsyncIterator[Program]:
        """Run *role* beside the block; it is ended with the block at the latest."""
        try:
            async with self._start(role, options) as program:
                yield program
        except BaseExceptionGroup as group:
            # Raise the test's own error rather than a group with only that.
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None

    @asynccontextmanager
    async def _start(self, role: str, options: dict[str, Any]) -> AsyncIterator[Program]:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                process = await trio.lowlevel.open_process(
                    [*self.command, role, json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                program = Program(process, f"{self.name} {role}")
                nursery.start_soon(program.read)
                nursery.start_soon(program.read_errors)
                try:
                    await program.said("ready")
                    yield program
                finally:
                    if process.returncode is None:
                        process.kill()
                    with trio.CancelScope(shield=True):
                        await process.wait()
                        for stream in (process.stdin, process.stdout, process.stderr):
                            if stream is not None:
                                await stream.aclose()
                    nursery.cancel_scope.cancel()

    async def run(self, role: str, **options: Any) -> dict[str, Any]:
        """Run the client *role* to its end; return its result."""
        async with self.start(role, **options) as program:
            return await program.result()

    @asynccontextmanager
    async def serve(self, **options: Any) -> AsyncIterator[PeerServer]:
        """Run the server; :meth:`PeerServer.stop` returns the messages that its sinks received."""
        async with self.start("serve", **options) as program:
            yield PeerServer(program, secure="tls" in options)

    def __repr__(self) -> str:
        return self.name


class PeerServer:
    """A server written on a peer."""

    def __init__(self, program: Program, *, secure: bool = False) -> None:
        self.program = program
        self.port = int(program.lines[0]["port"])
        where = "amqps://localhost" if secure else "amqp://127.0.0.1"
        self.url = f"{where}:{self.port}"

    async def stop(self) -> dict[str, Any]:
        """End the server; return the messages that its sinks received."""
        assert self.program.process.stdin is not None
        await self.program.process.stdin.aclose()
        sinks: dict[str, Any] = (await self.program.result())["sinks"]
        return sinks


# --- Typed values ------------------------------------------------------------------------------

_INTEGERS: dict[str, Any] = {
    "ubyte": values.UByte,
    "ushort": values.UShort,
    "uint": values.UInt,
    "ulong": values.ULong,
    "byte": values.Byte,
    "short": values.Short,
    "int": values.Int,
    "long": int,
    "timestamp": values.Timestamp,
}
_IN_DIGITS = {"ulong", "long", "timestamp"}
_DECIMALS: dict[str, Any] = {
    "decimal32": values.Decimal32,
    "decimal64": values.Decimal64,
    "decimal128": values.Decimal128,
}
_ELEMENTS: dict[str, type] = {
    **_INTEGERS,
    **_DECIMALS,
    "boolean": bool,
    "float": Float32,
    "double": float,
    "char": Char,
    "uuid": UUID,
    "binary": bytes,
    "string": str,
    "symbol": Symbol,
}
_NAMES = {kind: name for name, kind in _ELEMENTS.items()}


def native(typed: Typed) -> Any:
    """Return *typed* as a Python value."""
    kind, value = typed
    if kind in _INTEGERS:
        return _INTEGERS[kind](int(value))
    if kind in _DECIMALS:
        return _DECIMALS[kind](bytes.fromhex(value))
    if kind in ("null", "boolean", "string"):
        return value
    if kind == "symbol":
        return Symbol(value)
    if kind == "char":
        return Char(chr(value))
    if kind == "float":
        return Float32.from_bits(int(value, 16))
    if kind == "double":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "uuid":
        return UUID(value)
    if kind == "binary":
        return bytes.fromhex(value)
    if kind == "list":
        return [native(item) for item in value]
    if kind == "map":
        return Map((native(key), native(item)) for key, item in value)
    if kind == "described":
        return Described(native(value[0]), native(value[1]))
    if kind == "array":
        of, items, descriptor = value
        return Array(
            [native([of, item]) for item in items],
            of=_ELEMENTS[of],
            descriptors=(native(descriptor),) if descriptor else (),
        )
    raise ValueError(f"no such type: {kind}")


def typed(value: Any) -> Typed:
    """Return the notation from which :func:`native` makes *value*."""
    kind = type(value)
    if value is None:
        return ["null", None]
    if kind is float:
        return ["double", struct.pack(">d", value).hex()]
    if kind is Float32:
        return ["float", f"{value.bits:08x}"]
    if kind is Char:
        return ["char", ord(value)]
    if kind is UUID:
        return ["uuid", value.hex]
    if kind is bytes:
        return ["binary", value.hex()]
    if kind in _DECIMALS.values():
        return [_NAMES[kind], value.octets.hex()]
    if kind in _NAMES:
        name = _NAMES[kind]
        if name in _IN_DIGITS:
            return [name, str(int(value))]
        return [name, int(value) if name in _INTEGERS else value + "" if kind is Symbol else value]
    if kind is list:
        return ["list", [typed(item) for item in value]]
    if kind in (dict, Map):
        return ["map", [[typed(key), typed(item)] for key, item in value.items()]]
    if kind is Described:
        return ["described", [typed(value.descriptor), typed(value.value)]]
    if kind is Array:
        descriptor = typed(value.descriptors[0]) if value.descriptors else None
        return ["array", [_NAMES[value.of], [typed(item)[1] for item in value], descriptor]]
    raise ValueError(f"{value!r} has no type")


#: Every type of Part 1, at the limits of its range.
VALUES: dict[str, Typed] = {
    "null": ["null", None],
    "true": ["boolean", True],
    "false": ["boolean", False],
    "ubyte": ["ubyte", 255],
    "ushort": ["ushort", 65_535],
    "uint-0": ["uint", 0],
    "uint-small": ["uint", 255],
    "uint": ["uint", 4_294_967_295],
    "ulong-0": ["ulong", "0"],
    "ulong-small": ["ulong", "255"],
    "ulong": ["ulong", "18446744073709551615"],
    "byte": ["byte", -128],
    "short": ["short", -32_768],
    "int-small": ["int", -128],
    "int": ["int", -2_147_483_648],
    "long-small": ["long", "127"],
    "long-least": ["long", "-9223372036854775808"],
    "long-most": ["long", "9223372036854775807"],
    "float": ["float", "3fc00000"],
    "double": ["double", "400921fb54442d18"],
    "double-infinite": ["double", "fff0000000000000"],
    "double-nan": ["double", "7ff8000000000000"],
    "decimal32": ["decimal32", "22500001"],
    "decimal64": ["decimal64", "2238000000000001"],
    "decimal128": ["decimal128", "22080000000000000000000000000001"],
    "char": ["char", 0x1F600],
    "timestamp": ["timestamp", "1700000000123"],
    "timestamp-past": ["timestamp", "-1"],
    "uuid": ["uuid", "00112233445566778899aabbccddeeff"],
    "binary-empty": ["binary", ""],
    "binary": ["binary", "00ff10"],
    "binary-long": ["binary", "ab" * 300],
    "string-empty": ["string", ""],
    "string": ["string", "Grüße, 世界 \U0001f600"],
    "string-long": ["string", "x" * 300],
    "symbol": ["symbol", "a:symbol"],
    "list-empty": ["list", []],
    "list": ["list", [["int", 1], ["list", [["null", None], ["string", "deep"]]]]],
    "map": ["map", [[["string", "k"], ["uint", 1]], [["symbol", "s"], ["list", []]]]],
    "map-empty": ["map", []],
    "array": ["array", ["uint", [1, 70_000], None]],
    "array-of-strings": ["array", ["string", ["a", "ü"], None]],
    "array-described": ["array", ["symbol", ["a", "b"], ["ulong", "5"]]],
    "described": ["described", [["symbol", "x:y"], ["string", "z"]]],
    "described-by-number": ["described", [["ulong", "4886718345"], ["list", [["int", 1]]]]],
}

#: Values that application-properties may hold (Part 3 §3.2.5).
SIMPLE = {
    name: value
    for name, value in VALUES.items()
    if value[0] not in ("list", "map", "array", "described")
}


def filler(size: int) -> bytes:
    """Return the bytes that programs send for a given size."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def digest(data: bytes) -> list[Any]:
    """Return the notation of programs for data of more than 64 bytes."""
    return ["data", len(data), hashlib.sha256(data).hexdigest()]


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    """Return the bodies of messages that programs send by count."""
    return [int(message["body"][1][1]) for message in messages]


def with_values() -> Message:
    """Return a message with all of :data:`VALUES`, as the programs make it."""
    return Message(
        [native(value) for value in VALUES.values()],
        application_properties={name: native(value) for name, value in SIMPLE.items()},
    )


def end_program(process: subprocess.Popen[str]) -> None:
    """Close the input of *process*, at whose end it leaves; kill it if it stays longer than 30 seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
