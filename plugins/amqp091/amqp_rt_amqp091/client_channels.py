"""Channels of a connection that we opened.

Methods are answered in the order in which they were sent; messages are published, and confirmed if selected;
messages and methods that the server sends unasked go to callbacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from . import faults
from . import methods as m
from .contents import BaseChannel
from .faults import Fault
from .values import ReceivedMessage

if TYPE_CHECKING:
    from .client_engine import ClientEngine

#: Answer of basic.recover, which the specification omits.
_RECOVERED: Final = ("basic.recover-ok",)
#: Called with the answer to a method: a method, a message, or the fault if there will be none.
OnAnswer: TypeAlias = Callable[[m.Method | ReceivedMessage | Fault], None]


class EngineChannel(BaseChannel):
    """A channel of a connection that we opened.

    Its owner sets the callbacks for everything that is no answer: ``on_message`` for deliveries and
    returned messages, ``on_cancel`` with the tags of consumers that the server has cancelled,
    ``on_flow`` when ``flowing`` changes, ``on_end`` with the fault that ended the channel, None if
    we closed it.
    """

    carriers = (m.BasicDeliver, m.BasicReturn, m.BasicGetOk)

    engine: ClientEngine

    def __init__(self, engine: ClientEngine, number: int) -> None:
        super().__init__(number)
        self.engine = engine
        #: Whether the server accepts messages (``channel.flow``).
        self.flowing = True
        #: Fault that ended the channel.
        self.fault: Fault | None = None
        self.on_message: Callable[[ReceivedMessage], None] = _ignore
        self.on_cancel: Callable[[str], None] = _ignore
        self.on_flow: Callable[[], None] = nothing
        self.on_end: Callable[[Fault | None], None] = _ignore
        #: Methods that wait for an answer, with the callbacks for it, in order.
        self._asked: deque[tuple[m.Method, OnAnswer]] = deque()
        self._confirms = False
        self._last_number = 0
        #: Callbacks of unconfirmed messages, by sequence number, in order.
        self._unconfirmed: dict[int, Callable[[bool], None]] = {}

    # --- --- called by the client --------------------------------------------------------

    def ask(self, method: m.Method, on_answer: OnAnswer) -> None:
        """Send *method*; *on_answer* is called with the answer, or with a fault."""
        if self.closing or self.ended:
            on_answer(self.fault or Fault(faults.CHANNEL_ERROR, "the channel is closed"))
            return
        self.write(method)
        self._asked.append((method, on_answer))

    def say(self, method: m.Method) -> None:
        """Send *method*, which has no answer."""
        if not (self.closing or self.ended):
            self.write(method)

    def confirm(self, on_answer: OnAnswer) -> None:
        """Turn on publisher confirms for the channel."""
        self._confirms = True
        self.ask(m.ConfirmSelect(), on_answer)

    def publish(
        self,
        method: m.BasicPublish,
        properties: m.BasicProperties,
        body: bytes,
        on_confirm: Callable[[bool], None] | None = None,
    ) -> None:
        """Publish a message.

        With confirms *on_confirm* is called once: with True for an ack, with False for a nack or if
        the channel ends first.

        Raises:
            Fault: The channel is closed.
            ValueError: A property cannot be encoded, or the properties do not fit a frame. Nothing
                was sent.
        """
        if self.closing or self.ended:
            raise self.fault or Fault(faults.CHANNEL_ERROR, "the channel is closed")
        engine = self.engine
        engine.write_content(self.number, method, properties, body)
        if self._confirms:
            self._last_number += 1
            self._unconfirmed[self._last_number] = on_confirm or _ignore

    def close(self) -> None:
        """Close the channel. Methods without an answer so far fail with a fault."""
        if self.closing or self.ended:
            return
        self.write(m.ChannelClose(reply_code=faults.SUCCESS, reply_text="Goodbye"))
        self.closing = True
        self.end()

    # --- --- methods of the server -------------------------------------------------------

    def _on_method(self, method: m.Method) -> None:
        if isinstance(method, m.BasicAck | m.BasicNack):
            self._on_confirm(method.delivery_tag, method.multiple, isinstance(method, m.BasicAck))
        elif isinstance(method, m.ChannelClose):
            self.fault = Fault(method.reply_code, method.reply_text)
            self.write(m.ChannelCloseOk())
            self.engine.release(self)
        elif isinstance(method, m.ChannelFlow):
            self.flowing = method.active
            self.write(m.ChannelFlowOk(active=method.active))
            self.on_flow()
        elif isinstance(method, m.BasicCancel):
            if not method.no_wait:
                self.write(m.BasicCancelOk(consumer_tag=method.consumer_tag))
            self.on_cancel(method.consumer_tag)
        else:
            self._answer(method, method)

    def _answer(self, method: m.Method, answer: m.Method | ReceivedMessage) -> None:
        if not self._asked or method.name not in (self._asked[0][0].answers or _RECOVERED):
            raise Fault(faults.COMMAND_INVALID, f"{method.name} answers nothing that was asked")
        self._asked.popleft()[1](answer)

    def _on_confirm(self, number: int, multiple: bool, acknowledged: bool) -> None:
        if not multiple:
            told = self._unconfirmed.pop(number, None)
            if told is not None:
                told(acknowledged)
            return
        for each in list(self._unconfirmed):
            if number and each > number:
                break
            self._unconfirmed.pop(each)(acknowledged)

    def _on_content(self, method: m.Method, properties: m.BasicProperties, body: bytes) -> None:
        message = ReceivedMessage(method, properties, body)
        if isinstance(method, m.BasicGetOk):
            self._answer(method, message)
        else:
            self.on_message(message)

    def end(self) -> None:
        """End the channel; all callbacks that wait for something are called with a fault."""
        if not self._end():
            return
        fault = self.fault
        if fault is None and not self.closing:
            fault = self.fault = self.engine.reason()
        why = fault or Fault(faults.CHANNEL_ERROR, "the channel is closed")
        asked, self._asked = self._asked, deque()
        for _, on_answer in asked:
            on_answer(why)
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        for told in unconfirmed.values():
            told(False)
        on_end = self.on_end
        # The callbacks refer to the channel's owner, and the owner to the channel: a reference
        # cycle would keep both alive.
        self.on_message = self.on_cancel = self.on_end = _ignore
        self.on_flow = nothing
        on_end(fault)


def nothing() -> None:
    """Ignore the notification: no callback is set."""


def _ignore(_said: object) -> None:
    """Ignore the value: no callback is set."""
