"""Connections to the host on which the check controls every octet.

A connection waits only for frames that the check expects. It uses the second codec of amqp_rt
(:mod:`amqp_rt.net.traces.octets`) and tracks the few numbers that the standard requires of a peer; checks may
break any rule.
"""

from __future__ import annotations

import socket
import ssl
import time
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from amqp_rt.net.traces.octets import CompositeValue, Frame, Splitter, composite, encode_frame

from .frames import IN_PASSING, error_of, shown
from .links import QUIET_S, Incoming, Outgoing
from .verdicts import Departs, NotOffered, require

if TYPE_CHECKING:
    from .host import Host

_READ: Final = 65_536
#: Our incoming-window, in transfers; no check receives as many.
_WINDOW: Final = 100_000


class Gone(Departs):
    """The host has ended the stream."""


class Channel(Struct):
    """State of a session (Part 2 §2.5.6)."""

    #: Transfer-id of our next transfer.
    next_outgoing_id: int = 0
    #: Transfer-id of the host's next transfer.
    next_incoming_id: int = 0
    next_delivery_id: int = 0
    #: Fields of the host's begin.
    begin: dict[str, Any] = {}
    senders: dict[int, Outgoing] = field(default_factory=dict)
    #: The host's dispositions of our deliveries, by delivery-id.
    outcomes: dict[int, Frame] = field(default_factory=dict)


class Peer:
    """Our end of one connection."""

    def __init__(self, host: Host, wire: socket.socket) -> None:
        self.host = host
        self.patience_s = host.patience_s
        #: Fields of the host's open.
        self.greeting: dict[str, Any] = {}
        #: Our channel → session.
        self.channels: dict[int, Channel] = {}
        #: The host's channel → ours.
        self._ours: dict[int, int] = {}
        self._wire = wire
        self._splitter = Splitter()
        self._frames: list[Frame] = []
        #: Frames that arrived while another one was expected.
        self._aside: list[Frame] = []
        self._over = False

    # --- --- sending ---------------------------------------------------------------------------

    def raw(self, octets: bytes) -> None:
        """Send octets as they are."""
        try:
            self._wire.settimeout(self.patience_s)
            self._wire.sendall(octets)
        except OSError:
            # The reason has arrived before, or the next read reports the end of the stream.
            pass

    def send(self, name: str, /, *, channel: int = 0, payload: bytes = b"", **fields: Any) -> None:
        """Send a performative with exactly these fields."""
        self.raw(encode_frame(composite(name, **fields), channel=channel, payload=payload))

    def open(self, **fields: Any) -> None:
        """Send open; fields that are None are left out."""
        self.send("open", **{"container_id": f"kit-{token_hex(4)}", "hostname": self.host.name, **fields})  # fmt: skip

    def begin(self, channel: int = 0, **fields: Any) -> Frame:
        """Begin a session and return the host's begin.

        Raises:
            Departs: The answer is missing, or for another channel.
        """
        whole = {
            "next_outgoing_id": 0,
            "incoming_window": _WINDOW,
            "outgoing_window": _WINDOW,
            **fields,
        }
        self.expect_channel(channel, whole["next_outgoing_id"])
        self.send("begin", channel=channel, **whole)
        answer = self.hear("begin")
        require(
            answer.fields.get("remote_channel") == channel,
            f"our begin on channel {channel} is answered by {answer!r}",
        )
        return answer

    def expect_channel(self, channel: int, next_outgoing_id: int = 0) -> None:
        """Track the numbers of a session that we begin on *channel*."""
        self.channels[channel] = Channel(next_outgoing_id, next_delivery_id=next_outgoing_id)

    def flow(self, channel: int = 0, **fields: Any) -> None:
        """Send flow with the current numbers of the session."""
        known = self.channels[channel]
        self.send(
            "flow",
            channel=channel,
            **{
                "next_incoming_id": known.next_incoming_id,
                "incoming_window": _WINDOW,
                "next_outgoing_id": known.next_outgoing_id,
                "outgoing_window": _WINDOW,
                **fields,
            },
        )

    # --- links ---------------------------------------------------------------------------------

    def attach(self, role: str, *, channel: int = 0, handle: int = 0, **fields: Any) -> Frame:
        """Send attach and return the host's attach.

        Raises:
            NotOffered: The host refuses the link (Part 2 §2.6.3), or ends the session for it.
        """
        sends = role == "sender"
        name = fields.setdefault("name", f"link-{token_hex(4)}")
        if sends:
            fields.setdefault("initial_delivery_count", 0)
        self.send("attach", channel=channel, handle=handle, role=role, **fields)
        answer = self.hear("attach", "end", "close", passing={*IN_PASSING, "disposition"})
        if answer.name != "attach":
            raise NotOffered(f"the host answers attach with {error_of(answer)}")
        require(answer.fields.get("name") == name, f"attach of {name!r} is answered by {answer!r}")
        require(
            bool(answer.fields.get("role")) is sends,
            f"attach of a {role} is answered by one in the same role",
        )
        if answer.fields.get("target" if sends else "source") is None:
            refusal = self.hear("detach", "end", "close", passing={*IN_PASSING, "disposition"})
            raise NotOffered(error_of(refusal))
        return answer

    def sender(self, target: Any, *, channel: int = 0, handle: int = 0, **fields: Any) -> Outgoing:
        """Attach a link that we send on.

        Raises:
            NotOffered: The host refuses it; the text is its error.
        """
        fields = {"source": composite("source"), "target": target, **fields}
        count = fields.setdefault("initial_delivery_count", 0)
        # Credit may arrive together with the attach.
        link = Outgoing(self, channel, handle, {}, count)
        waiting = self.channels[channel].senders
        waiting[-1 - handle] = link
        try:
            link.answer = self.attach("sender", channel=channel, handle=handle, **fields).fields
        finally:
            waiting.pop(-1 - handle, None)
        waiting[int(link.answer["handle"])] = link
        return link

    def receiver(
        self, source: Any, *, channel: int = 0, handle: int = 1, **fields: Any
    ) -> Incoming:
        """Attach a link that we receive on, without credit.

        Raises:
            NotOffered: The host refuses it; the text is its error.
        """
        fields = {"source": source, "target": composite("target"), **fields}
        answer = self.attach("receiver", channel=channel, handle=handle, **fields).fields
        return Incoming(self, channel, handle, answer, answer.get("initial_delivery_count", 0))

    # --- --- receiving -------------------------------------------------------------------------

    def next(self, within: float | None = None) -> Frame | None:
        """Return the next frame, None if none arrives in time.

        Raises:
            Gone: The host has ended the stream.
            Departs: The octets are not AMQP.
        """
        if self._aside:
            return self._aside.pop(0)
        until = time.monotonic() + (self.patience_s if within is None else within)
        while not self._frames:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._read(left)
        frame = self._frames.pop(0)
        if frame.fault:
            raise Departs(f"the host writes {frame!r}")
        self._note(frame)
        return frame

    def _read(self, within: float) -> None:
        if self._over:
            raise Gone("the host has ended the stream")
        self._wire.settimeout(within)
        try:
            data = self._wire.recv(_READ)
        except (TimeoutError, ssl.SSLWantReadError):
            return
        except OSError:
            data = b""
        if not data:
            self._over = True
        self._frames += self._splitter.feed(data)

    def _note(self, frame: Frame) -> None:
        fields = frame.fields
        if frame.name == "begin" and "remote_channel" in fields:
            ours = fields["remote_channel"]
            self._ours[frame.channel] = ours
            if (begun := self.channels.get(ours)) is not None:
                begun.begin = fields
                begun.next_incoming_id = fields.get("next_outgoing_id", 0)
            return
        channel = self.channels.get(self._ours.get(frame.channel, -1))
        if channel is None:
            return
        if frame.name == "transfer":
            channel.next_incoming_id = (channel.next_incoming_id + 1) % 2**32
        elif frame.name == "flow" and fields.get("handle") in channel.senders:
            channel.senders[fields["handle"]].granted(fields)
        elif frame.name == "disposition" and fields.get("role") is True:
            first = fields.get("first", 0)
            count = (fields.get("last", first) - first) % 2**32 + 1
            for step in range(min(count, _WINDOW)):
                channel.outcomes[(first + step) % 2**32] = frame

    def hear(
        self,
        *names: str,
        within: float | None = None,
        passing: frozenset[str] | set[str] = IN_PASSING,
    ) -> Frame:
        """Return the next frame of *names*, skipping those of *passing*.

        Raises:
            Departs: Another frame arrives, or none in time.
        """
        wanted = " or ".join(names)
        patience = self.patience_s if within is None else within
        until = time.monotonic() + patience
        while True:
            try:
                frame = self.next(until - time.monotonic())
            except Gone:
                raise Gone(f"{wanted} is expected, and the host ends the stream") from None
            if frame is None:
                raise Departs(f"{wanted} is expected, and nothing arrives in {patience:g} s")
            if frame.name in names:
                return frame
            if frame.name not in passing:
                raise Departs(f"{wanted} is expected, and {shown(frame)} arrives")

    def put_aside(self, frames: list[Frame]) -> None:
        """Queue *frames*, which arrived too early, before all others."""
        self._aside = frames + self._aside

    def silence(self, seconds: float = QUIET_S, *, passing: frozenset[str] = IN_PASSING) -> None:
        """Check that only frames of *passing* arrive for *seconds*.

        Raises:
            Departs: Another frame arrives.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            frame = self.next(left)
            if frame is not None and frame.name not in passing:
                raise Departs(f"nothing is expected, and this arrives: {shown(frame)}")

    def gone(self) -> None:
        """Check that the host ends the stream; frames before the end are ignored.

        Raises:
            Departs: It does not, in time.
        """
        until = time.monotonic() + self.patience_s
        try:
            while (left := until - time.monotonic()) > 0:
                self.next(left)
        except Gone:
            return
        raise Departs(f"the host does not end the stream in {self.patience_s:g} s")

    def fault(self, *names: str, conditions: tuple[str, ...] = ()) -> Frame:
        """Return the frame of *names* by which the host reports an error.

        Args:
            names: ``detach``, ``end`` or ``close``: the scopes that the error may have.
            conditions: Conditions that the standard allows; none means any.

        Raises:
            Departs: No error arrives, or one of another scope or condition.
        """
        over = {*IN_PASSING, "attach", "begin", "open", "disposition"} - set(names)
        wanted = " or ".join(names)
        try:
            frame = self.hear(*names, *({"detach", "end", "close"} - set(names)), passing=over)
        except Gone:
            raise Departs(f"the host ends the stream without {wanted}") from None
        require(frame.name in names, f"{wanted} is expected, and {shown(frame)} arrives")
        error = frame.fields.get("error")
        require(error is not None, f"the host sends {frame.name} without an error")
        condition = error.fields.get("condition") if isinstance(error, CompositeValue) else error
        require(
            not conditions or condition in conditions,
            f"the host sends {frame.name} with {condition}, expected {' or '.join(conditions)}",
        )
        return frame

    def echo(self, channel: int = 0) -> Frame:
        """Request an echo for the session, without a link, and return the answer.

        Raises:
            Departs: No answer arrives.
        """
        self.flow(channel, echo=True)
        return self.hear("flow", passing={"empty", "disposition"})

    def alive(self, channel: int = 0) -> None:
        """Check that the session still works: it can be ended without an error.

        Raises:
            Departs: The host ended it with an error, or does not answer.
        """
        self.send("end", channel=channel)
        frame = self.hear("end", passing=IN_PASSING | {"disposition", "transfer", "detach"})
        require(frame.fields.get("error") is None, f"the session goes on, but for {shown(frame)}")

    def close(self) -> None:
        """Close the connection, and wait up to a second for the host's close."""
        if not self._over:
            self.send("close")
        until = time.monotonic() + 1
        while not self._over and (left := until - time.monotonic()) > 0:
            self._frames.clear()
            try:
                self._read(left)
            except Departs:
                break
            if any(frame.name == "close" for frame in self._frames):
                break
        self._wire.close()
        self._over = True

    def cut(self) -> None:
        """Close the stream without closing the connection first."""
        self._wire.close()
        self._over = True
