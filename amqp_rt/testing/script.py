"""A peer that follows a script: the frames it expects and the frames it sends, in order.

::

    script = Script()
    script.expect.attach(role="receiver", source="q")
    script.send.attach().flow(credit=1)

A script is played against an engine (:meth:`Script.play`), over a trio stream (:meth:`Script.run`),
or at a loopback port for any program to connect to (:meth:`Script.serve`). It writes with a codec
of its own and may break every rule.
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

from ..net.traces.octets import (
    FRAMES,
    HEADER,
    SASL_HEADER,
    TYPES,
    CompositeValue,
    Frame,
    Splitter,
    composite,
    encode_frame,
)

if TYPE_CHECKING:
    from ..events import Event
    from ..fronts.base import ProtocolEngine

__all__ = ["Script", "ScriptFailed"]

#: Default for the seconds that the other side may take for an expected frame.
PATIENCE_S: Final = 5.0
_READ: Final = 65_536
#: Abbreviations of field names.
_SHORT: Final = {"credit": "link_credit", "tag": "delivery_tag", "mechanisms": "sasl_server_mechanisms"}  # fmt: skip
_WINDOW: Final = 2_048


class ScriptFailed(AssertionError):
    """The other side departs from the script."""


class _Step(Struct):
    """A step of a script."""

    #: ``send`` uses ``octets``; ``expect`` checks a frame with ``check``; also ``end``, ``ended``,
    #: ``nothing``.
    kind: str
    text: str
    name: str = ""
    octets: Callable[[], bytes] | None = None
    check: Callable[[Frame], None] | None = None
    quiet_s: float = 0.0


class Script:
    """Steps of a peer: frames to expect and to send.

    ``expect.NAME(**fields)`` requires the next frame to be that performative with these fields;
    each is a value, or a function that is called with the frame's value and returns whether it
    matches. ``send.NAME(**fields)`` sends one; required fields that are not given follow from the
    frames received, and None omits a field. Names are those of the standard with underscores:
    ``open``, ``begin``, ``attach``, ``flow``, ``transfer``, ``disposition``, ``detach``, ``end``,
    ``close``, and those of SASL such as ``sasl_init``. ``role="sender"``, ``source="q"``,
    ``error="amqp:not-found"``, ``state="accepted"`` and ``credit=5`` are abbreviations. Both return
    themselves, so that calls can be chained.

    Args:
        ignore: Frames that are skipped where others are expected; empty frames keep a connection alive.
        timeout_s: Seconds that the other side may take for an expected frame.
    """

    def __init__(
        self, *, ignore: Collection[str] = ("empty",), timeout_s: float = PATIENCE_S
    ) -> None:
        for name in ignore:
            if name not in (*FRAMES, "empty"):
                raise TypeError(f"there is no frame {name!r} to ignore")
        self.ignore = frozenset(ignore)
        self.timeout_s = timeout_s
        #: All frames received, including those skipped.
        self.heard: list[Frame] = []
        self.send = Saying(self)
        self.expect = Expecting(self)
        self._connected = False
        self._steps: deque[_Step] = deque()
        self._frames: deque[Frame] = deque()
        self._splitter = Splitter()
        self._deliveries = 0

    # --- --- frames received ---------------------------------------------------------------

    def last(self, name: str) -> Frame:
        """Return the latest frame named *name*.

        Raises:
            ScriptFailed: There was none.
        """
        for frame in reversed(self.heard):
            if frame.name == name:
                return frame
        raise ScriptFailed(f"no {name} has been heard")

    def hear(self, data: bytes) -> None:
        """Parse octets of the other side."""
        frames = self._splitter.feed(data)
        self.heard += frames
        self._frames += frames

    # --- playing -----------------------------------------------------------------------------

    def play(self, engine: ProtocolEngine, now: float = 0.0) -> list[Event]:
        """Play all steps added so far against *engine*; return its events.

        More steps may be added and played afterwards.

        Raises:
            ScriptFailed: The engine departs from the script.
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
            elif not self._check_frame(step):
                raise ScriptFailed(f"{step.text} is expected, and nothing comes")
        for data in engine.take():
            self.hear(bytes(data))
        return events

    async def run(self, stream: trio.abc.Stream) -> None:
        """Play all steps added so far over *stream*, which stays open.

        Raises:
            ScriptFailed: Another frame arrived, or none in time.
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
                    await self._read(stream, lambda: self._check_frame(step), step)  # noqa: B023
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
        """Play the script to the first client that connects to the yielded URL.

        The end of the block waits for the end of the script. Later connections are refused.

        Raises:
            ScriptFailed: At the end of the block: another frame arrived, none in time, or no client
                connected. If the block raises, its exception becomes the cause.
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
                # The client's exception is probably a consequence of the failure of the script.
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
                raise ScriptFailed("no client has connected") from None
            self._connected = True
            listener.close()
            with connection:
                self._over(connection)
                # Octets after the script are read and ignored, so that the connection is not reset.
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
                if not self._receive(connection, lambda: self._check_frame(step), step):  # noqa: B023
                    raise ScriptFailed(self._late(step))

    def _receive(self, connection: socket.socket, enough: Callable[[], bool], step: _Step) -> bool:
        """Read until *enough* returns true; return False at a timeout."""
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

    # --- --- checking ------------------------------------------------------------------------

    def _check_frame(self, step: _Step) -> bool:
        """Check the next frame; return False if none has arrived.

        Raises:
            ScriptFailed: Another frame has arrived.
        """
        while self._frames:
            frame = self._frames.popleft()
            if frame.name != step.name and frame.name in self.ignore:
                continue
            if step.check is None:
                raise ScriptFailed(f"{step.text} is expected, and {frame!r} came")
            step.check(frame)
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
        """Append a step."""
        self._steps.append(step)

    # --- --- default fields -------------------------------------------------------------------

    def usual(self, name: str) -> dict[str, Any]:
        """Return default fields of performative *name*, derived from the frames received."""
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
            # The answer to a receiver is sent by the sender.
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
        """Return a function that encodes the frame, for use when its turn comes."""
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
    """Return *fields* under their full names.

    Raises:
        TypeError: The performative has no such field.
    """
    names = [field for field, _ in TYPES[name][1]]
    known = {_SHORT[key] if _SHORT.get(key) in names else key: fields[key] for key in fields}
    composite(name, **known)
    return known


class Saying:
    """Adds steps that send; see :class:`Script`."""

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
        """Send the protocol header of AMQP 1.0, or other *octets*."""
        return self.raw(octets)

    def sasl_header(self) -> Saying:
        """Send the protocol header of the SASL layer."""
        return self.raw(SASL_HEADER)

    def empty(self, *, channel: int = 0) -> Saying:
        """Send an empty frame, which only keeps a connection alive."""
        return self.raw(encode_frame(b"", channel=channel))

    def raw(self, octets: bytes) -> Saying:
        """Send octets unchanged, right or wrong; see ``octets.encode_frame``."""
        self._script.add(_Step("send", "octets", octets=lambda: octets))
        return self

    def end_of_stream(self) -> Saying:
        """Close our half of the stream."""
        self._script.add(_Step("end", "the end"))
        return self


class Expecting:
    """Adds steps that expect frames; see :class:`Script`."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def __getattr__(self, name: str) -> Callable[..., Expecting]:
        if name not in FRAMES:
            raise AttributeError(f"there is no performative {name!r}")

        def expect(
            *, channel: int | None = None, payload: bytes | None = None, **fields: Any
        ) -> Expecting:
            wanted = _known(name, fields)

            def check(frame: Frame) -> None:
                wrong = _differences(frame, name, wanted, channel, payload)
                if wrong:
                    raise ScriptFailed(f"{name} is expected, with {wrong}; {frame!r} came")

            shown = ", ".join(f"{key}={value!r}" for key, value in fields.items())
            self._script.add(_Step("expect", f"{name}({shown})", name, check=check))
            return self

        return expect

    def header(self, octets: bytes = HEADER) -> Expecting:
        """Expect the protocol header of AMQP 1.0, or other *octets*."""

        def check(frame: Frame) -> None:
            if frame.name != "header" or frame.payload != octets:
                raise ScriptFailed(f"the header {octets!r} is expected, and {frame!r} came")

        self._script.add(_Step("expect", f"the header {octets!r}", "header", check=check))
        return self

    def sasl_header(self) -> Expecting:
        """Expect the protocol header of the SASL layer."""
        return self.header(SASL_HEADER)

    def empty(self) -> Expecting:
        """Expect an empty frame."""

        def check(frame: Frame) -> None:
            if frame.name != "empty":
                raise ScriptFailed(f"an empty frame is expected, and {frame!r} came")

        self._script.add(_Step("expect", "an empty frame", "empty", check=check))
        return self

    def nothing(self, *, quiet_s: float = 0.1) -> Expecting:
        """Expect no frame: for *quiet_s* seconds, or from an engine at once."""
        self._script.add(_Step("nothing", "nothing", quiet_s=quiet_s))
        return self

    def end_of_stream(self) -> Expecting:
        """Expect the end of the other side's half of the stream."""
        self._script.add(_Step("ended", "the end"))
        return self


def _differences(
    frame: Frame, name: str, wanted: dict[str, Any], channel: int | None, payload: bytes | None
) -> str:
    """Return the differences between *frame* and the expected one as text, empty if none."""
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
    if isinstance(value, CompositeValue):
        if isinstance(wanted, CompositeValue):
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
