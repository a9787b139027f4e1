"""Measured roles of 0-10 and 0-9-1 on blocking sockets, with octets that are encoded once (see processes.py).

The clients of both protocols do the same: a producer writes messages by the batch, and has up to ``credit`` of
them unconfirmed; a consumer has a window of that size, and acknowledges by the batch.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Options = dict[str, Any]

#: Messages written, or acknowledged, at a time.
BATCH = 50
PATIENCE_S = 30.0


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def filler(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def short(text: str) -> bytes:
    octets = text.encode()
    return bytes((len(octets),)) + octets


class Connection:
    """Stream to the broker, whose frames have a size in their header."""

    #: Octets of the header of a frame, and its size in them.
    HEAD = struct.Struct("")
    #: Octets that the size does not count.
    MORE = 0

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def send(self, *octets: bytes) -> None:
        self.socket.sendall(b"".join(octets))

    def is_readable(self, timeout_s: float) -> bool:
        return bool(select.select([self.socket], [], [], timeout_s)[0])

    def receive(self) -> Iterator[tuple[Any, ...]]:
        """Wait for octets, and yield the frames that are whole: the fields of the header, and the payload."""
        got = self.socket.recv(1 << 18)
        if not got:
            raise SystemExit("the broker closed the connection")
        data = self._held + got if self._held else got
        at, end, width = 0, len(data), self.HEAD.size
        while end - at >= width:
            head = self.HEAD.unpack_from(data, at)
            after = at + head[2] + self.MORE
            if after > end:
                break
            yield (*head, data[at + width : after])
            at = after
        self._held = data[at:]

    def wait_for(self, wanted: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, ...]:
        """Return the first frame for which *wanted* is true, without those before it."""
        while True:
            for frame in list(self.receive()):
                self.look(frame)
                if wanted(frame):
                    return frame

    def look(self, frame: tuple[Any, ...]) -> None:
        """Note what *frame* confirms, and end if the broker reports a fault."""

    def close(self) -> None:
        self.socket.close()


# ---- 0-10 --------------------------------------------------------------------------------------------

CONTROL, COMMAND, HEADER, BODY = range(4)
WHOLE = 0x0F


def frame010(kind: int, payload: bytes, flags: int = WHOLE, channel: int = 0) -> bytes:
    return struct.pack(
        ">BBHBBHI", flags, kind, len(payload) + 12, 0, min(kind, 1), channel, 0
    ) + payload  # fmt: skip


def control(code: int, flags: int = 0, fields: bytes = b"") -> bytes:
    return frame010(CONTROL, struct.pack(">H", code) + flags.to_bytes(2, "little") + fields)


def command(code: int, flags: int = 0, fields: bytes = b"", *, sync: bool = False) -> bytes:
    head = struct.pack(">HBB", code, 1, sync) + flags.to_bytes(2, "little")
    return frame010(COMMAND, head + fields)


def numbers(first: int, last: int) -> bytes:
    return struct.pack(">HII", 8, first, last)


def transfer(key: str, body: bytes, *, durable: bool, sync: bool = False) -> bytes:
    """Return the frames of a ``message.transfer`` to the default exchange."""
    # priority, delivery-mode and routing-key of the delivery-properties; the content-length.
    mode = struct.pack(">HHBB", 0x0401, 0x1802, 4, 2 if durable else 1) + short(key)
    length = struct.pack(">HHQ", 0x0403, 0x0100, len(body))
    header = b"".join(struct.pack(">I", len(each)) + each for each in (mode, length))
    # To no destination, accept-mode none.
    start = struct.pack(">HBBH", 0x0401, 1, sync, 0x0300) + short("") + b"\1"
    return b"".join(
        (
            frame010(COMMAND, start, 0x0B),
            frame010(HEADER, header, 0x03),
            frame010(BODY, body, 0x07),
        )
    )


class Connection010(Connection):
    """Connection of AMQP 0-10 with one session, on channel 0."""

    HEAD = struct.Struct(">BBHBBHI")

    def __init__(
        self, port: int, name: bytes, *, timeout_s: int = 0, resumes: bool = False
    ) -> None:
        super().__init__(port)
        #: Commands of ours that are complete: all below.
        self.done = 0
        self.send(b"AMQP\1\1\0\x0a")
        assert self.socket.recv(8, socket.MSG_WAITALL) == b"AMQP\1\1\0\x0a"
        self.wait_for_control(0x0101)
        self.send(control(0x0102, 7, struct.pack(">II", 4, 0) + short("ANONYMOUS") + bytes(4)))
        self.wait_for_control(0x0105)
        self.send(
            control(0x0106, 7, struct.pack(">HHH", 1, 65535, 0)), control(0x0107, 1, short(""))
        )
        self.wait_for_control(0x0108)
        self.send(control(0x0201, 1, struct.pack(">H", len(name)) + name))
        self.wait_for_control(0x0202)
        if timeout_s:
            self.send(control(0x0205, 1, struct.pack(">I", timeout_s)))
        if not resumes:
            self.send(control(0x0207, 3, struct.pack(">IQ", 0, 0)))

    def wait_for_control(self, code: int) -> bytes:
        wanted = struct.pack(">H", code)
        found = self.wait_for(lambda frame: frame[1] == CONTROL and frame[7][:2] == wanted)
        return bytes(found[7])

    def look(self, frame: tuple[Any, ...]) -> None:
        kind, payload = frame[1], frame[7]
        if kind == CONTROL and payload[:2] == b"\x02\x0a":
            if payload[2] & 1 and payload[4:6] != b"\0\0":
                self.done = struct.unpack_from(">I", payload, len(payload) - 4)[0] + 1
                # known-completed, so that the broker forgets them.
                self.send(control(0x020B, 1, payload[4:]))
        elif (kind == CONTROL and payload[:2] in (b"\x01\x0b", b"\x02\x04")) or (
            kind == COMMAND and payload[:2] == b"\3\3"
        ):
            raise SystemExit(f"the broker reports a fault: {payload[:300]!r}")

    def wait_until_done(self, count: int) -> None:
        while self.done < count:
            for frame in self.receive():
                self.look(frame)

    def subscribe(self, queue: str, credit: int) -> None:
        """Subscribe with explicit accepts, in window mode."""
        self.send(
            command(0x0407, 0x0F, short(queue) + short("d") + b"\0\0"),
            command(0x0409, 3, short("d") + b"\1"),
            command(0x040A, 7, short("d") + struct.pack(">BI", 1, 0xFFFF_FFFF)),
            command(0x040A, 7, short("d") + struct.pack(">BI", 0, credit), sync=True),
        )

    def declare(self, queue: str, *, durable: bool) -> None:
        self.send(command(0x0801, 1 | (8 if durable else 0), short(queue), sync=True))


def source010(options: Options) -> None:
    """Publish for a while; completions confirm."""
    connection = Connection010(options["port"], b"source")
    body = filler(options["size"])
    key, durable = options["address"], bool(options.get("durable"))
    one = transfer(key, body, durable=durable)
    batch = one * (BATCH - 1) + transfer(key, body, durable=durable, sync=True)
    say(**_publish(connection, batch, options, lambda: connection.done))


def consume010(options: Options) -> None:
    """Declare a queue, and consume the number of messages given by a line of input."""
    connection = Connection010(options["port"], b"sink")
    connection.declare(options["address"], durable=bool(options.get("durable")))
    connection.subscribe(options["address"], options["credit"])
    connection.wait_until_done(5)

    def acknowledge(count: int, fresh: int) -> bytes:
        # Commands of the broker begin with 0, and are transfers.
        accepted = numbers(count - fresh, count - 1)
        return command(0x0402, 1, accepted) + control(0x020A, 1, numbers(0, count - 1))

    _consume(connection, options, lambda frame: frame[1] == BODY, acknowledge)


def sync010(options: Options) -> None:
    """Publish messages one at a time, each when the one before is complete; report the median time."""
    connection = Connection010(options["port"], b"sync")
    connection.declare(options["address"], durable=False)
    connection.wait_until_done(1)
    one = transfer(options["address"], filler(options["size"]), durable=False, sync=True)
    say(ready=1)
    times: list[float] = []
    until = time.perf_counter() + options["warmup"] + options["seconds"]
    while (started := time.perf_counter()) < until:
        connection.send(one)
        connection.wait_until_done(len(times) + 2)
        times.append(time.perf_counter() - started)
    times.sort()
    say(n=len(times), p50_ms=times[len(times) // 2] * 1000)


def resume010(options: Options) -> None:
    """Lose a session with *count* messages that are not complete, and measure how soon they come again."""
    count, name = options["count"], options["address"].encode()
    connection = Connection010(options["port"], name, timeout_s=60)
    connection.declare(options["address"], durable=False)
    one = transfer(options["address"], filler(options["size"]), durable=False)
    for _ in range(count):
        connection.send(one)
    connection.subscribe(options["address"], 0xFFFF_FFFF)
    _count_bodies(connection, count)
    connection.close()
    say(ready=1)
    started = time.perf_counter()
    connection = Connection010(options["port"], name, timeout_s=60, resumes=True)
    # We expect all from the first command on; none is confirmed or complete.
    connection.send(
        control(0x0208, 1, numbers(0, 0)),
        control(0x0209, 1, b"\0\0"),
        control(0x020A, 1, b"\0\0"),
    )
    _count_bodies(connection, count)
    say(n=count, resumed_s=time.perf_counter() - started)


def prepare_branches(port: int, queue: str, *, count: int, messages: int, size: int) -> None:
    """Publish *messages* to a durable queue in each of *count* branches, and prepare them."""
    connection = Connection010(port, b"prepare")
    connection.declare(queue, durable=True)
    connection.send(command(0x0601))
    one = transfer(queue, filler(size), durable=True)
    for number in range(count):
        xid = _xid(number)
        connection.send(
            command(0x0602, 1, xid),
            one * messages,
            command(0x0603, 1, xid),
            command(0x0607, 1, xid, sync=True),
        )
    # One result for each command that names a branch.
    _check_statuses(_results(connection, 3 * count))
    connection.close()


def commit_branches(port: int, *, count: int) -> None:
    """List the *count* branches that are in doubt, and commit them."""
    connection = Connection010(port, b"recover")
    connection.send(command(0x0601), command(0x0608, sync=True))
    (found,) = _results(connection, 1)
    # The size and code of the struct and its flags come before the size, type and count of the array.
    (listed,) = struct.unpack_from(">I", found, 13)
    if listed != count:
        raise SystemExit(f"{listed} of {count} branches are in doubt")
    for number in range(count):
        connection.send(command(0x0604, 1, _xid(number), sync=True))
    _check_statuses(_results(connection, count))
    connection.close()


def _xid(number: int) -> bytes:
    fields = struct.pack(">I", 7) + short(f"global-{number}") + short("b")
    octets = b"\x06\x04" + (7).to_bytes(2, "little") + fields
    return struct.pack(">I", len(octets)) + octets


def _results(connection: Connection010, count: int) -> list[bytes]:
    """Wait for *count* results, and return their values: structs with their sizes."""
    found: list[bytes] = []
    while len(found) < count:
        for frame in connection.receive():
            connection.look(frame)
            if frame[1] == COMMAND and frame[7][:2] == b"\3\2":
                # After the code, the header of the session, flags, and the command-id.
                found.append(frame[7][10:])
    return found


def _check_statuses(results: list[bytes]) -> None:
    """End unless all *results* are ``xa-ok``."""
    for each in results:
        if each[8:10] != b"\0\0":
            raise SystemExit(f"the status of a branch is {each[8:10].hex()}")


def _count_bodies(connection: Connection010, count: int) -> None:
    seen = 0
    while seen < count:
        for frame in connection.receive():
            if frame[1] == BODY:
                seen += 1
            else:
                connection.look(frame)


# ---- 0-9-1 -------------------------------------------------------------------------------------------


def frame091(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(class_id: int, number: int, fields: bytes = b"", channel: int = 1) -> bytes:
    return frame091(1, struct.pack(">HH", class_id, number) + fields, channel)


class Connection091(Connection):
    """Connection of AMQP 0-9-1 with one channel."""

    HEAD = struct.Struct(">BHI")
    #: The header, and the end octet.
    MORE = 8

    def __init__(self, port: int) -> None:
        super().__init__(port)
        #: Messages of ours that are confirmed.
        self.done = 0
        self.send(b"AMQP\0\0\x09\1")
        self.wait_for_method(10, 10)
        login = bytes(4) + short("PLAIN") + struct.pack(">I", 12) + b"\0guest\0guest"
        self.send(method(10, 11, login + short("en_US"), 0))
        self.wait_for_method(10, 30)
        self.send(
            method(10, 31, struct.pack(">HIH", 1, 131_072, 0), 0),
            method(10, 40, short("/") + short("") + b"\0", 0),
        )
        self.wait_for_method(10, 41)
        self.send(method(20, 10, short("")))
        self.wait_for_method(20, 11)

    def wait_for_method(self, class_id: int, number: int) -> None:
        wanted = struct.pack(">HH", class_id, number)
        self.wait_for(lambda frame: frame[0] == 1 and frame[3][:4] == wanted)

    def look(self, frame: tuple[Any, ...]) -> None:
        payload = frame[3]
        if frame[0] != 1:
            return
        code = struct.unpack_from(">HH", payload)
        if code == (60, 80):
            self.done = struct.unpack_from(">Q", payload, 4)[0]
        elif code in ((10, 50), (20, 40), (60, 120)):
            raise SystemExit(f"the broker reports a fault: {payload[:300]!r}")


def source091(options: Options) -> None:
    """Publish for a while."""
    connection = Connection091(options["port"])
    confirmed = bool(options.get("confirmed"))
    if confirmed:
        connection.send(method(85, 10, b"\0"))
        connection.wait_for_method(85, 11)
    body = filler(options["size"])
    mode = 2 if options.get("durable") else 1
    one = b"".join(
        (
            method(60, 40, b"\0\0" + short("") + short(options["address"]) + b"\0"),
            frame091(2, struct.pack(">HHQHBB", 60, 0, len(body), 0x1800, mode, 4)),
            frame091(3, body),
        )
    )
    sent = _publish(
        connection, one * BATCH, options, (lambda: connection.done) if confirmed else None
    )
    if not confirmed:
        # The answer comes when the messages before have been published.
        connection.send(method(20, 40, b"\0\xc8" + short("") + bytes(4)))
        connection.wait_for_method(20, 41)
    say(**sent)


def consume091(options: Options) -> None:
    """Declare a queue, and consume the number of messages given by a line of input."""
    connection = Connection091(options["port"])
    name = short(options["address"])
    durable = bytes((2 if options.get("durable") else 0,))
    connection.send(method(50, 10, b"\0\0" + name + durable + bytes(4)))
    connection.wait_for_method(50, 11)
    connection.send(
        method(60, 10, struct.pack(">IHB", 0, options["credit"], 0)),
        method(60, 20, b"\0\0" + name + short("d") + b"\0" + bytes(4)),
    )
    connection.wait_for_method(60, 21)

    def acknowledge(count: int, fresh: int) -> bytes:
        return method(60, 80, struct.pack(">QB", count, 1))

    _consume(connection, options, lambda frame: frame[0] == 3, acknowledge)


# ---- both --------------------------------------------------------------------------------------------


def _publish(
    connection: Connection, batch: bytes, options: Options, done: Callable[[], int] | None
) -> dict[str, float]:
    credit = options["credit"]
    say(ready=1)
    started = time.perf_counter()
    until = started + options["warmup"] + options["seconds"]
    sent = warm = 0
    cpu = 0.0

    def hear(timeout_s: float) -> None:
        if connection.is_readable(timeout_s):
            for frame in connection.receive():
                connection.look(frame)

    while (now := time.perf_counter()) < until:
        while done is not None and sent - done() > credit - BATCH:
            hear(PATIENCE_S)
        connection.send(batch)
        sent += BATCH
        hear(0)
        if not warm and now - started >= options["warmup"]:
            warm, cpu = sent, time.process_time()
    spent = time.process_time() - cpu
    while done is not None and done() < sent:
        hear(PATIENCE_S)
    return {"n": sent, "measured": sent - warm, "cpu": spent}


def _consume(
    connection: Connection,
    options: Options,
    is_body: Callable[[tuple[Any, ...]], bool],
    acknowledge: Callable[[int, int], bytes],
) -> None:
    result: dict[str, float] = {"n": 0, "measured": 0}
    expected = float("inf")
    came = cpu = 0.0
    count = fresh = 0

    def wait() -> None:
        nonlocal expected
        expected = int(sys.stdin.readline() or 0)

    threading.Thread(target=wait, daemon=True).start()
    say(ready=1)
    while count < expected:
        if connection.is_readable(0.05):
            for frame in connection.receive():
                if not is_body(frame):
                    connection.look(frame)
                    continue
                count += 1
                fresh += 1
                if fresh == BATCH:
                    connection.send(acknowledge(count, fresh))
                    fresh = 0
                now = time.perf_counter()
                if "first" in result:
                    result["measured"] += 1
                    result["last"] = now
                else:
                    came = came or now
                    if now - came >= options["warmup"]:
                        result["first"] = now
                        cpu = time.process_time()
        elif fresh:
            connection.send(acknowledge(count, fresh))
            fresh = 0
    if fresh:
        connection.send(acknowledge(count, fresh))
    result["n"] = count
    say(**result, cpu=time.process_time() - cpu)
    connection.close()


ROLES = {
    "source010": source010,
    "consume010": consume010,
    "sync010": sync010,
    "resume010": resume010,
    "source091": source091,
    "consume091": consume091,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
