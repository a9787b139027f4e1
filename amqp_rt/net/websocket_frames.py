"""Frames of a WebSocket after its handshake (RFC 6455 §5), as a layer without I/O.

AMQP needs octets only: an AMQP frame may extend over several messages, and a message may contain
several frames. So the payload of a message is passed on as it arrives, without waiting for the
rest of its message, and everything sent at once is one message. No extension is negotiated.
"""

from __future__ import annotations

import os
from typing import Final, NoReturn

from ..limits import Limits
from .masking import apply_mask

#: Octets of one message that we send; some peers accept no larger ones.
_MESSAGE: Final = 65_536
#: Octets read at a time. A chunk of small frames takes much longer than one of large frames, so
#: that the larger size is for peers whose last chunk had few frames.
_READ: Final = 65_536
_READ_FRAMES: Final = 8_192
#: Frames that are few in one chunk.
_FEW_FRAMES: Final = 256

#: Opcodes (RFC 6455 §5.2); those from ``_CLOSE`` on are of control frames.
_CONTINUATION: Final = 0
_TEXT: Final = 1
_BINARY: Final = 2
_CLOSE: Final = 8
_PING: Final = 9
_PONG: Final = 10
#: Octets of the largest payload of a control frame.
_CONTROL_MAX: Final = 125

#: Close codes (RFC 6455 §7.4.1).
NORMAL: Final = 1000
MALFORMED: Final = 1002
UNSUPPORTED: Final = 1003
NOT_UTF8: Final = 1007
TOO_BIG: Final = 1009
#: Codes of §7.4.1, and of IANA's registry, that may be in a close frame. From 3000 to 4999 all may.
_CODES: Final = frozenset({*range(1000, 1004), *range(1007, 1015)})


class WebSocketLayer:
    """Frames of one end of a WebSocket; see :class:`~.channels.Layer`.

    Both directions end together: nothing may follow a close frame (§5.5.1).

    Args:
        limits: The limits of WebSockets are used here.
        client: We are the client, whose frames are masked (§5.3).
    """

    #: The stream below stays open for the peer's close frame.
    half_closes = False

    def __init__(self, limits: Limits, *, client: bool) -> None:
        self.ended = False
        #: Octets to read at a time.
        self.appetite = _READ_FRAMES
        self._client = client
        self._message_max = limits.websocket_message_max
        self._trusted_max = limits.websocket_message_max + limits.websocket_overhead_max
        #: Octets since the last message that had any, and their limit.
        self._unread = 0
        self._unread_max = limits.websocket_stranger_max
        #: The beginning of a header or control frame.
        self._begun = b""
        #: Octets of the current frame's payload still to come, its mask, and the next octet of it.
        self._left = 0
        self._key = b""
        self._phase = 0
        #: The current frame is the last of its message.
        self._last = True
        #: A message has begun, and its octets so far, including those of the frame that is arriving.
        self._within = False
        self._size = 0
        #: Payload of the last ping that has not been answered.
        self._ping: bytes | None = None
        #: Payload that has not been framed.
        self._waiting: list[bytes | memoryview] = []
        self._waiting_size = 0
        self._out: list[bytes | memoryview] = []
        #: We have sent a close frame.
        self._said_close = False
        #: Why the peer's octets are not read any more.
        self._fault = ""

    def trust(self) -> None:
        """Accept messages up to ``websocket_message_max``, now that the peer has logged in."""
        self._unread_max = self._trusted_max

    # --- input ---------------------------------------------------------------------------

    def receive(self, data: bytes) -> bytes:
        """Process octets from below, empty at their end; return the payload of messages.

        Of several pings in *data* the last one is answered (§5.5.3).

        Raises:
            ConnectionError: The peer broke a rule; a close frame with the code is in the output.
        """
        if self._fault:
            raise ConnectionError(self._fault)
        if not data:
            self.ended = True
            return b""
        if self._begun:
            data = self._begun + data
            self._begun = b""
        pieces: list[bytes | memoryview] = []
        frames = at = 0
        end = len(data)
        while at < end and not self.ended:
            if self._left:
                stop = min(at + self._left, end)
                self._count(stop - at)
                pieces.append(self._payload(data, at, stop))
                self._left -= stop - at
                at = stop
            else:
                frames += 1
                begin = self._read_header(data, at, end)
                if not begin:
                    self._begun = data[at:]
                    break
                self._count(begin - at)
                at = begin
            if not self._left:
                self._end_frame()
        self.appetite = _READ if frames <= _FEW_FRAMES else _READ_FRAMES
        self._answer_ping()
        if len(pieces) == 1:
            return bytes(pieces[0])
        return b"".join(pieces)

    def _read_header(self, data: bytes, at: int, end: int) -> int:
        """Read the frame's header at *at*; return where its payload begins, or 0 if some is missing.

        Control frames are read as a whole: where their payload would begin, the next frame does.
        """
        if end - at < 2:
            return 0
        first, second = data[at], data[at + 1]
        opcode = first & 0x0F
        size = second & 0x7F
        self._check_header(first, second)
        begin = at + 2
        if size == 126:
            begin += 2
        elif size == 127:
            begin += 8
        masked = not self._client
        if masked:
            begin += 4
        if opcode >= _CLOSE:
            if begin + size > end:
                return 0
            payload = data[begin : begin + size]
            if masked:
                payload = apply_mask(payload, 0, size, data[begin - 4 : begin], 0)
            self._control(opcode, payload)
            return begin + size
        if begin > end:
            return 0
        if size >= 126:
            size = self._long_size(size, data, at + 2)
        if masked:
            self._key = data[begin - 4 : begin]
            self._phase = 0
        self._begin_frame(opcode, size, last=first >= 0x80)
        return begin

    def _check_header(self, first: int, second: int) -> None:
        """Check the first two octets of a header."""
        opcode = first & 0x0F
        if first & 0x70:
            self._refuse(MALFORMED, "a reserved bit is set in a frame")
        if (second >= 0x80) is self._client:
            self._refuse(
                MALFORMED, "a server's frame is masked" if self._client else "a frame is not masked"
            )
        if opcode >= _CLOSE:
            if opcode > _PONG:
                self._refuse(MALFORMED, f"a frame has the reserved opcode {opcode}")
            if first < 0x80:
                self._refuse(MALFORMED, "a control frame is fragmented")
            if second & 0x7F > _CONTROL_MAX:
                self._refuse(MALFORMED, "a control frame is too large")
        elif opcode > _BINARY:
            self._refuse(MALFORMED, f"a frame has the reserved opcode {opcode}")
        elif self._within is not (opcode == _CONTINUATION):
            self._refuse(
                MALFORMED,
                "a message begins within another"
                if self._within
                else "a message begins with a continuation",
            )
        elif opcode == _TEXT:
            self._refuse(UNSUPPORTED, "AMQP is binary, not text")

    def _long_size(self, kind: int, data: bytes, at: int) -> int:
        """Return the size of a payload that its header gives in 2 or 8 octets at *at*."""
        width = 2 if kind == 126 else 8
        size = int.from_bytes(data[at : at + width], "big")
        if size < 126 or (width == 8 and size < 65_536):
            self._refuse(MALFORMED, f"the size {size} is in {width} octets")
        if size >= 1 << 63:
            self._refuse(MALFORMED, "the size of a frame has its highest bit set")
        return size

    def _begin_frame(self, opcode: int, size: int, *, last: bool) -> None:
        self._size = size if opcode else self._size + size
        if self._size > self._message_max:
            self._refuse(TOO_BIG, "a message is too large")
        self._within = True
        self._left = size
        self._last = last

    def _end_frame(self) -> None:
        """Note the end of a frame, after a control frame once more that of the frame before it."""
        if self._within and self._last:
            self._within = False
            if self._size:
                self._unread = 0

    def _payload(self, data: bytes, at: int, stop: int) -> bytes | memoryview:
        """Return octets of the current frame's payload."""
        if not self._client:
            found = apply_mask(data, at, stop, self._key, self._phase)
            self._phase = (self._phase + stop - at) & 3
            return found
        if at == 0 and stop == len(data):
            return data
        return memoryview(data)[at:stop]

    def _count(self, octets: int) -> None:
        self._unread += octets
        if self._unread > self._unread_max:
            self._refuse(TOO_BIG, "too much has come without a message")

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == _PING:
            self._ping = payload
        elif opcode == _CLOSE:
            self._check_close(payload)
            self.ended = True
            self._ping = None
            # Without a code there is none to return (§7.4.1); otherwise that of the peer (§5.5.1).
            self._close(payload[:2])

    def _check_close(self, payload: bytes) -> None:
        if not payload:
            return
        code = int.from_bytes(payload[:2], "big")
        if len(payload) == 1 or not (code in _CODES or 3000 <= code <= 4999):
            self._refuse(MALFORMED, "a close frame has no valid code")
        try:
            payload[2:].decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(NOT_UTF8, "the reason in a close frame is not UTF-8")

    def _answer_ping(self) -> None:
        if self._ping is not None and not self._said_close:
            self._frame(_PONG, [self._ping], len(self._ping))
        self._ping = None

    def _refuse(self, code: int, why: str) -> NoReturn:
        self._fault = f"WebSocket: {why}"
        self._close(code.to_bytes(2, "big"))
        raise ConnectionError(self._fault)

    # --- output --------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        """Process octets from above.

        Raises:
            ConnectionError: A close frame has been sent.
        """
        if self._said_close:
            raise ConnectionError("the WebSocket has ended")
        size = len(data)
        if self._waiting_size + size <= _MESSAGE:
            self._waiting.append(data)
            self._waiting_size += size
            return
        view = memoryview(data)
        at = 0
        while at < size:
            stop = min(size, at + _MESSAGE - self._waiting_size)
            self._waiting.append(view[at:stop])
            self._waiting_size += stop - at
            at = stop
            if self._waiting_size == _MESSAGE:
                self._frame_waiting()

    def outgoing(self) -> list[bytes | memoryview]:
        """Take the octets to send below now: what has been sent since the last call is one message."""
        self._frame_waiting()
        out = self._out
        if out:
            self._out = []
        return out

    def end(self) -> None:
        """Send a close frame. A second call has no effect."""
        self._close(NORMAL.to_bytes(2, "big"))

    def _close(self, payload: bytes) -> None:
        if not self._said_close:
            self._frame_waiting()
            self._frame(_CLOSE, [payload], len(payload))
            self._said_close = True

    def _frame_waiting(self) -> None:
        if self._waiting_size:
            self._frame(_BINARY, self._waiting, self._waiting_size)
            self._waiting_size = 0
        if self._waiting:
            self._waiting = []

    def _frame(self, opcode: int, payload: list[bytes | memoryview], size: int) -> None:
        """Append one frame, which is a whole message, to the output.

        A client's mask is new for each frame, and not predictable (§5.3, §10.3).
        """
        flag = 0x80 if self._client else 0
        if size < 126:
            head = bytes((0x80 | opcode, flag | size))
        elif size < 65_536:
            head = bytes((0x80 | opcode, flag | 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((0x80 | opcode, flag | 127)) + size.to_bytes(8, "big")
        if self._client:
            key = os.urandom(4)
            whole = payload[0] if len(payload) == 1 else b"".join(payload)
            self._out.append(head + key)
            self._out.append(apply_mask(whole, 0, size, key, 0))
        else:
            self._out.append(head)
            self._out += payload
