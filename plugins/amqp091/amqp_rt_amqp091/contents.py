"""Common part of the channels of both roles: methods, and content put together (0-9-1 §4.2.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from . import faults
from . import methods as m
from .codec import read_header, read_method
from .faults import Fault
from .frames import BODY, HEADER, METHOD, Frame

if TYPE_CHECKING:
    from .connection import Connection

BASIC: Final = 60
#: Values of a table that cost as much work as one frame of a message.
VALUES_OF_A_FRAME: Final = 4


def values_in(value: object) -> int:
    """Return the number of values in a table or array, including those of nested ones."""
    if isinstance(value, dict):
        return len(value) + sum(map(values_in, value.values()))
    if isinstance(value, list):
        return len(value) + sum(map(values_in, value))
    return 0


class BaseChannel:
    """A channel of a connection, opened by either side.

    Args:
        engine: The connection.
        number: The channel number.
    """

    #: Methods that this role receives with content.
    carriers: ClassVar[tuple[type[m.Method], ...]] = ()

    engine: Connection

    def __init__(self, number: int) -> None:
        self.number = number
        #: Whether close was sent: everything before the answer is dropped.
        self.closing = False
        #: Whether the channel has ended.
        self.ended = False
        # Content received so far.
        self._carrier: m.Method | None = None
        self._properties: m.BasicProperties | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        self._body_due = 0

    @property
    def channel(self) -> int:
        """Channel number, under the name that AMQP 1.0 sessions have for it."""
        return self.number

    def write(self, method: m.Method) -> None:
        """Send a method."""
        self.engine.write(self.number, method)

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame of this channel.

        Raises:
            Fault: The frame is not allowed now, or its method failed.
        """
        if self.closing:
            self._on_frame_while_closing(frame)
        else:
            self.take(frame)

    def _on_frame_while_closing(self, frame: Frame) -> None:
        """Drop everything but close and close-ok (§1.4.2.5)."""
        if frame.type != METHOD:
            return
        method = read_method(frame.payload)
        if isinstance(method, m.ChannelClose):
            self.write(m.ChannelCloseOk())
            self.engine.release(self)
        elif isinstance(method, m.ChannelCloseOk):
            self.engine.release(self)

    def take(self, frame: Frame) -> None:
        """Handle a frame whose turn it is.

        Raises:
            Fault: The frame is not allowed now, or its method failed.
        """
        kind = frame.type
        if kind == BODY:
            self._on_body(frame.payload)
        elif kind == HEADER:
            self._on_header(frame.payload)
        elif kind == METHOD:
            if self._carrier is not None:
                raise Fault(
                    faults.UNEXPECTED_FRAME, "a method came before the content was complete"
                )
            self._on_method_octets(frame.payload)

    def _on_method_octets(self, payload: bytes) -> None:
        self.engine.context = method = read_method(payload)
        arguments = getattr(method, "arguments", None)
        if arguments:
            self.engine.spend(values_in(arguments) // VALUES_OF_A_FRAME)
        if isinstance(method, self.carriers):
            self._carrier = method
        else:
            self._on_method(method)

    def _on_header(self, payload: bytes) -> None:
        if self._carrier is None or self._properties is not None:
            raise Fault(faults.UNEXPECTED_FRAME, "a content header came without its method")
        header = read_header(payload)
        if header.properties.headers:
            self.engine.spend(values_in(header.properties.headers) // VALUES_OF_A_FRAME)
        if header.class_id != BASIC:
            raise Fault(
                faults.UNEXPECTED_FRAME, f"a content header of class {header.class_id}, not basic"
            )
        self._begin(header.properties, header.body_size)

    def _begin(self, properties: m.BasicProperties, size: int) -> None:
        """Start collecting *size* octets of content.

        Raises:
            Fault: They are more than ``message_size_max``.
        """
        self._properties = properties
        most = self.engine.limits.message_size_max
        if size > most:
            raise Fault(faults.CONTENT_TOO_LARGE, f"a message has at most {most} octets of content")
        self._body_due = size
        if not size:
            self._complete(b"")

    def _on_body(self, payload: bytes) -> None:
        if self._properties is None:
            raise Fault(faults.UNEXPECTED_FRAME, "a content body came without its header")
        size = len(payload)
        if size == self._body_due and not self._body:
            self._complete(payload)
            return
        self._body_size += size
        if self._body_size > self._body_due:
            raise Fault(
                faults.FRAME_ERROR,
                f"more octets of content than the {self._body_due} of its header",
            )
        if payload:
            # Holding empty frames would cost memory without a bound.
            self._body.append(payload)
            self.engine.hold(size)
        if self._body_size == self._body_due:
            body = b"".join(self._body)
            self._forget_body()
            self._complete(body)

    def _complete(self, body: bytes) -> None:
        method, properties = self._carrier, self._properties
        assert method is not None
        assert properties is not None
        self._carrier = self._properties = None
        self._on_content(method, properties, body)

    def _forget_body(self) -> None:
        self.engine.let_go(self._body_size)
        self._body = []
        self._body_size = 0

    def flush(self) -> None:
        """Write what was put off, such as confirms."""

    def end(self) -> None:
        """End the channel and drop its state."""
        raise NotImplementedError

    def _end(self) -> bool:
        """Do the part of the end that both roles share; return False if it was done before."""
        if self.ended:
            return False
        self.ended = True
        self._forget_body()
        return True

    def _on_method(self, method: m.Method) -> None:
        """Handle a method without content."""
        raise NotImplementedError

    def _on_content(self, method: Any, properties: m.BasicProperties, body: bytes) -> None:
        """Handle a method with its complete content."""
        raise NotImplementedError
