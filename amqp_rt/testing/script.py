"""A peer that follows a script: what it expects to hear and what it says, in order.

::

    script = Script()
    script.expect.attach(role="receiver", source="q")
    script.send.attach().flow(credit=1)

The script is played against an engine (:meth:`Script.play`), over a trio stream (:meth:`Script.run`),
or at a loopback port against whatever program connects (:meth:`Script.serve`). It writes with a codec
of its own and may break every rule there is.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio
from msgspec import Struct

from .octets import (
    FRAMES,
    HEADER,
    SASL_HEADER,
    TYPES,
    Composite,
    Frame,
    Splitter,
    composite,
    encode_frame,
)

if TYPE_CHECKING:
    from ..events import Event
    from ..fronts.base import ProtocolEngine

__all__ = ["Script", "ScriptFailed"]

#: Seconds that the other side may take for what is expected, unless a script says otherwise.
PATIENCE_S: Final = 5.0
_READ: Final = 65_536
#: Shorter names of fields.
_SHORT: Final = {"credit": "link_credit", "tag": "delivery_tag", "mechanisms": "sasl_server_mechanisms"}  # fmt: skip
_WINDOW: Final = 2_048


class ScriptFailed(AssertionError):
    """The other side did something else than the script expects."""


class _Step(Struct):
    """One line of a script."""

    #: ``send``: returns the octets; ``expect``: judges a frame; ``end``, ``ended``, ``nothing``.
    kind: str
    text: str
    name: str = ""
    octets: Callable[[], bytes] | None = None
    judge: Callable[[Frame], None] | None = None
    quiet_s: float = 0.0


class Script:
    """What a peer expects and says.

    ``expect.NAME(**fields)`` wants the next frame to be that performative, with these values: a
    value, or a function that is called with the frame's one and returns whether it will do.
    ``send.NAME(**fields)`` says one; what it needs and is not given follows from what was heard, and
    None leaves a field out. Names are those of the standard with underscores: ``open``, ``begin``,
    ``attach``, ``flow``, ``transfer``, ``disposition``, ``detach``, ``end``, ``close``, and
    ``sasl_init`` and its like. ``role="sender"``, ``source="q"``, ``error="amqp:not-found"``,
    ``state="accepted"`` and ``credit=5`` are short for what they say. Both return themselves, so
    that calls are chained.

    Args:
        ignore: Frames that are passed over where something else is expected; empty frames are
            what keeps a connection alive.
        timeout_s: Seconds that the other side may take for what is expected.
    """

    def __init__(
        self, *, ignore: Collection[str] = ("empty",), timeout_s: float = PATIENCE_S
    ) -> None:
        for name in ignore:
            if name not in (*FRAMES, "empty"):
                raise TypeError(f"there is no frame {name!r} to ignore")
        self.ignore = frozenset(ignore)
        self.timeout_s = timeout_s
        #: Every frame that came, those passed over included.
        self.heard: list[Frame] = []
        self.send = Saying(self)
        self.expect = Expecting(self)
        self._connected = False
        self._steps: deque[_Step] = deque()
        self._frames: deque[Frame] = deque()
        self._splitter = Splitter()
        self._deliveries = 0

    # --- what has been heard ---------------------------------------------------------------

    def last(self, name: str) -> Frame:
        """The latest frame of that name.

        Raises:
            ScriptFailed: There was none.
        """
        for frame in reversed(self.heard):
            if frame.name == name:
                return frame
        raise ScriptFailed(f"no {name} has been heard")

    def hear(self, data: bytes) -> None:
        """Take octets of the other side."""
        frames = self._splitter.feed(data)
        self.heard += frames
        self._frames += frames

    # --- playing -----------------------------------------------------------------------------

    def play(self, engine: ProtocolEngine, now: float = 0.0) -> list[Event]:
        """Play the steps so far against *engine*; what it reported.

        More steps may be added then, and played.

        Raises:
            ScriptFailed: It wrote something else.
        """
        events: list[Event] = []
        while self._steps:
            step = self._steps.popleft()
            for data in engine.take():
                self.hear(bytes(data))
            if step.kind == "send":
                assert step.octets is not None
                events += engine.receive(step.octets(), now)
            elif step.kind == "end":
                events += engine.receive_eof(now)
            elif step.kind == "ended":
                if not engine.finished:
                    raise ScriptFailed("the engine goes on, and its end is expected")
            elif step.kind == "nothing":
                self._nothing()
            elif not self._judge(step):
                raise ScriptFailed(f"{step.text} is expected, and nothing comes")
        for data in engine.take():
            self.hear(bytes(data))
        return events

    async def run(self, stream: trio.abc.Stream) -> None:
        """Play the steps so far over *stream*, which stays open.

        Raises:
            ScriptFailed: Something else came, or nothing in time.
        """
        while self._steps:
            step = self._steps.popleft()
            if step.kind == "send":
                assert step.octets is not None
                try:
                    await stream.send_all(step.octets())
                except trio.BrokenResourceError:
                    raise ScriptFailed(f"the other side has gone before {step.text}") from None
            elif step.kind == "end":
                if isinstance(stream, trio.abc.HalfCloseableStream):
                    await stream.send_eof()
                else:
                    await stream.aclose()
            elif step.kind == "nothing":
                with trio.move_on_after(step.quiet_s):
                    await self._read(stream, lambda: bool(self._frames), step)
                self._nothing()
            else:
                with trio.move_on_after(self.timeout_s) as scope:
                    await self._read(stream, lambda: self._judge(step), step)  # noqa: B023
                if scope.cancelled_caught:
                    raise ScriptFailed(self._late(step))

    async def _read(self, stream: trio.abc.Stream, enough: Callable[[], bool], step: _Step) -> None:
        while not enough():
            try:
                data = await stream.receive_some(_READ)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                self._gone(step)
                return
            self.hear(bytes(data))

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Play the script to whoever connects to the URL that this yields, once.

        The end of the block waits until the script is through. Connections after the first are
        refused.

        Raises:
            ScriptFailed: At the end of the block, also of one that raises, which is its cause then:
            something else came, nothing in time, or no client connected.
        """
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()[:2]
            failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
            left = threading.Event()
            thread = threading.Thread(
                target=self._serve,
                args=(listener, left, failures),
                name="amqp_rt script",
                daemon=True,
            )
            thread.start()
            try:
                yield f"amqp://{host}:{port}"
            except Exception as error:
                left.set()
                thread.join()
                # What the client raises may well follow from what the script has seen.
                if self._connected and not failures.empty():
                    raise failures.get() from error
                raise
            finally:
                left.set()
                thread.join()
            if not failures.empty():
                raise failures.get()

    def _serve(
        self,
        listener: socket.socket,
        left: threading.Event,
        failures: queue.SimpleQueue[BaseException],
    ) -> None:
        try:
            listener.settimeout(self.timeout_s)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise ScriptFailed("nobody has connected") from None
            self._connected = True
            listener.close()
            with connection:
                self._over(connection)
                # What the other side does after the script is its own affair; it is read, so that
                # it is not reset.
                connection.settimeout(0.05)
                while not left.is_set():
                    try:
                        if not connection.recv(_READ):
                            break
                    except TimeoutError:
                        continue
        except (ScriptFailed, OSError) as error:
            failures.put(error)

    def _over(self, connection: socket.socket) -> None:
        while self._steps:
            step = self._steps.popleft()
            if step.kind == "send":
                assert step.octets is not None
                connection.sendall(step.octets())
            elif step.kind == "end":
                connection.shutdown(socket.SHUT_WR)
            elif step.kind == "nothing":
                connection.settimeout(step.quiet_s)
                self._receive(connection, lambda: bool(self._frames), step)
                self._nothing()
            else:
                connection.settimeout(self.timeout_s)
                if not self._receive(connection, lambda: self._judge(step), step):  # noqa: B023
                    raise ScriptFailed(self._late(step))

    def _receive(self, connection: socket.socket, enough: Callable[[], bool], step: _Step) -> bool:
        """Read until *enough*; False if nothing comes any more for now."""
        while not enough():
            try:
                data = connection.recv(_READ)
            except TimeoutError:
                return False
            except ConnectionError:
                data = b""
            if not data:
                self._gone(step)
                return True
            self.hear(data)
        return True

    # --- judging -----------------------------------------------------------------------------

    def _judge(self, step: _Step) -> bool:
        """Whether what *step* expects is there; raises if something else is."""
        while self._frames:
            frame = self._frames.popleft()
            if frame.name != step.name and frame.name in self.ignore:
                continue
            if step.judge is None:
                raise ScriptFailed(f"{step.text} is expected, and {frame!r} came")
            step.judge(frame)
            return True
        return False

    def _gone(self, step: _Step) -> None:
        if step.kind == "expect":
            raise ScriptFailed(f"{step.text} is expected, and the other side has gone")

    def _nothing(self) -> None:
        while self._frames:
            frame = self._frames.popleft()
            if frame.name not in self.ignore:
                raise ScriptFailed(f"nothing is expected, and {frame!r} came")

    def _late(self, step: _Step) -> str:
        return f"{step.text} is expected, and nothing came within {self.timeout_s:g} s"

    def add(self, step: _Step) -> None:
        """Add a line."""
        self._steps.append(step)

    # --- what is said unless the script says otherwise ----------------------------------------

    def usual(self, name: str) -> dict[str, Any]:
        """The fields that a *name* needs, as they follow from what was heard."""
        heard = {frame.name: frame.fields for frame in self.heard}
        if name == "open":
            return {"container_id": "script"}
        if name == "begin":
            begun = [frame for frame in self.heard if frame.name == "begin"]
            return {
                "remote_channel": begun[-1].channel if begun else None,
                "next_outgoing_id": 0,
                "incoming_window": _WINDOW,
                "outgoing_window": _WINDOW,
            }
        if name == "attach":
            theirs = heard.get("attach", {})
            # Who answers a receiver is the sender.
            sends = bool(theirs.get("role", False))
            return {
                "name": theirs.get("name", "link"),
                "handle": 0,
                "role": not sends,
                "source": theirs.get("source"),
                "target": theirs.get("target"),
                "initial_delivery_count": 0 if sends else None,
            }
        if name == "flow":
            return {
                "next_incoming_id": 0 if "begin" in heard else None,
                "incoming_window": _WINDOW,
                "next_outgoing_id": 0,
                "outgoing_window": _WINDOW,
            }
        if name == "transfer":
            number = self._deliveries
            return {
                "handle": 0,
                "delivery_id": number,
                "delivery_tag": number.to_bytes(4, "big"),
                "message_format": 0,
            }
        if name == "disposition":
            theirs = heard.get("transfer", {})
            return {
                "role": "receiver",
                "first": theirs.get("delivery_id", 0),
                "settled": True,
                "state": "accepted",
            }
        if name == "detach":
            return {"handle": 0, "closed": True}
        return {"mechanism": "ANONYMOUS"} if name == "sasl_init" else {}

    def frame(
        self, name: str, fields: dict[str, Any], channel: int, payload: bytes
    ) -> Callable[[], bytes]:
        """The octets of a frame, worked out when it is its turn."""
        known = _known(name, fields)

        def octets() -> bytes:
            whole = {**self.usual(name), **known}
            if name == "flow" and whole.get("handle") is None and "link_credit" in whole:
                whole = {"handle": 0, "delivery_count": 0, **whole}
            if name == "sasl_outcome":
                whole.setdefault("code", 0)
            if name == "transfer" and not whole.get("more"):
                self._deliveries += 1
            return encode_frame(composite(name, **whole), channel=channel, payload=payload)

        return octets

    def __repr__(self) -> str:
        return f"<Script: {len(self._steps)} steps to go, {len(self.heard)} frames heard>"


def _known(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """*fields* by their full names.

    Raises:
        TypeError: The performative has no such field.
    """
    names = [field for field, _ in TYPES[name][1]]
    known = {_SHORT[key] if _SHORT.get(key) in names else key: fields[key] for key in fields}
    composite(name, **known)
    return known


class Saying:
    """What the script's side says; see :class:`Script`."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def __getattr__(self, name: str) -> Callable[..., Saying]:
        if name not in FRAMES:
            raise AttributeError(f"there is no performative {name!r}")

        def say(*, channel: int = 0, payload: bytes = b"", **fields: Any) -> Saying:
            octets = self._script.frame(name, fields, channel, payload)
            self._script.add(_Step("send", name, octets=octets))
            return self

        return say

    def header(self, octets: bytes = HEADER) -> Saying:
        """The protocol header of AMQP 1.0, or another one."""
        return self.raw(octets)

    def sasl_header(self) -> Saying:
        """The protocol header of the SASL layer."""
        return self.raw(SASL_HEADER)

    def empty(self, *, channel: int = 0) -> Saying:
        """An empty frame, which says only that somebody is there."""
        return self.raw(encode_frame(b"", channel=channel))

    def raw(self, octets: bytes) -> Saying:
        """These octets, be they right or wrong; see ``octets.encode_frame``."""
        self._script.add(_Step("send", "octets", octets=lambda: octets))
        return self

    def end_of_stream(self) -> Saying:
        """Nothing more: half of the stream is closed."""
        self._script.add(_Step("end", "the end"))
        return self


class Expecting:
    """What the script's side wants to hear; see :class:`Script`."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def __getattr__(self, name: str) -> Callable[..., Expecting]:
        if name not in FRAMES:
            raise AttributeError(f"there is no performative {name!r}")

        def expect(
            *, channel: int | None = None, payload: bytes | None = None, **fields: Any
        ) -> Expecting:
            wanted = _known(name, fields)

            def judge(frame: Frame) -> None:
                wrong = _differences(frame, name, wanted, channel, payload)
                if wrong:
                    raise ScriptFailed(f"{name} is expected, with {wrong}; {frame!r} came")

            shown = ", ".join(f"{key}={value!r}" for key, value in fields.items())
            self._script.add(_Step("expect", f"{name}({shown})", name, judge=judge))
            return self

        return expect

    def header(self, octets: bytes = HEADER) -> Expecting:
        """The protocol header of AMQP 1.0, or another one."""

        def judge(frame: Frame) -> None:
            if frame.name != "header" or frame.payload != octets:
                raise ScriptFailed(f"the header {octets!r} is expected, and {frame!r} came")

        self._script.add(_Step("expect", f"the header {octets!r}", "header", judge=judge))
        return self

    def sasl_header(self) -> Expecting:
        """The protocol header of the SASL layer."""
        return self.header(SASL_HEADER)

    def empty(self) -> Expecting:
        """An empty frame."""

        def judge(frame: Frame) -> None:
            if frame.name != "empty":
                raise ScriptFailed(f"an empty frame is expected, and {frame!r} came")

        self._script.add(_Step("expect", "an empty frame", "empty", judge=judge))
        return self

    def nothing(self, *, quiet_s: float = 0.1) -> Expecting:
        """Silence: for *quiet_s* seconds, or of an engine at once."""
        self._script.add(_Step("nothing", "nothing", quiet_s=quiet_s))
        return self

    def end_of_stream(self) -> Expecting:
        """The other side has nothing more to say."""
        self._script.add(_Step("ended", "the end"))
        return self


def _differences(
    frame: Frame, name: str, wanted: dict[str, Any], channel: int | None, payload: bytes | None
) -> str:
    """In which the frame is not what is wanted; empty if it is."""
    if frame.name != name:
        return "that name"
    wrong = [
        f"{key}={value!r}" for key, value in wanted.items() if not _is(frame.fields.get(key), value)
    ]
    if channel is not None and frame.channel != channel:
        wrong.append(f"channel={channel}")
    if payload is not None and frame.payload != payload:
        wrong.append(f"payload={payload!r}")
    return ", ".join(wrong)


def _is(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    if wanted in ("sender", "receiver") and isinstance(value, bool):
        return value is (wanted == "receiver")
    if isinstance(value, Composite):
        if isinstance(wanted, Composite):
            return value.name == wanted.name and all(
                _is(value.fields.get(key), each) for key, each in wanted.fields.items()
            )
        if value.name in ("source", "target"):
            return bool(value.fields.get("address") == wanted)
        if value.name == "error":
            told = value.fields.get("condition"), value.fields.get("description")
            return bool(told == wanted if isinstance(wanted, tuple) else told[0] == wanted)
        return bool(value.name == wanted)
    # An absent boolean is false.
    return bool(value == wanted or (value is None and wanted is False))
