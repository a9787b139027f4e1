"""Streamed requests of a caller: items on a link of their own, of which the credit is the node's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import trio

from ..message import Message
from ..outcomes import Accepted, Outcome, Released
from ..values import Symbol
from .composing import build_message
from .links import fresh, refusal
from .payloads import Readable
from .pending_calls import PendingCall
from .sending import Receipt, Sender

if TYPE_CHECKING:
    from .codecs import Codecs

#: Message annotation of the message that ends a stream.
STREAM_END: Final = Symbol("x-opt-stream-end")
#: Items of one stream that may be without an outcome at the same time.
ITEMS_PENDING_MAX: Final = 200
#: Properties of a call that describe the bodies of its messages.
_OF_BODIES: Final = ("compress", "content_encoding", "content_type")
#: Items sent before other tasks run.
_TURN_ITEMS: Final = 64


class StreamedItems:
    """Items to send as one request; made by :func:`stream`."""

    def __init__(self, items: AsyncIterable[Any] | Iterable[Any]) -> None:
        self.items = items

    def __repr__(self) -> str:
        return f"stream({self.items!r:.80})"


def stream(items: AsyncIterable[Any] | Iterable[Any]) -> StreamedItems:
    """Mark what a call sends as the items of one streamed request.

    ``await peer.call("sum", stream(rows), reply=int)``. They are taken from *items*, once, as the node takes them, and each is sent as a message. An async generator is
    closed when the call ends.

    Raises:
        TypeError: *items* cannot be iterated over.
    """
    given: object = items
    if not isinstance(given, AsyncIterable | Iterable) or isinstance(given, str | bytes):
        raise TypeError(f"stream() takes what can be iterated over, not {items!r:.80}")
    return StreamedItems(items)


class _ItemReceipt(Receipt):
    """Receipt of one item, which ends the call if the item does not arrive."""

    __slots__ = ("sending",)

    def __init__(self, sender: Sender, payload: bytes, sending: SendingItems) -> None:
        super().__init__(sender, payload)
        self.sending = sending

    def _settle(self) -> None:
        super()._settle()
        if self.error is not None:
            self.sending.fail(self.error)
        elif type(self._outcome) is not Accepted:
            assert self._outcome is not None
            self.sending.refused(self._outcome)


class SendingItems:
    """Sending of the items of one call, until its reply has arrived.

    Args:
        call: The call.
        sender: Its link, attached and without other messages.
        items: The items.
        begin: Waits for the links, and returns the properties of the first message. It is called when that
            has to be sent: the connection may have been replaced while the first item was waited for.
        properties: Properties of the call, of which all messages have those of the body.
        codecs: Codecs of payloads.
    """

    def __init__(
        self,
        call: PendingCall,
        sender: Sender,
        items: StreamedItems,
        begin: Callable[[], Awaitable[Mapping[str, Any]]],
        properties: Mapping[str, Any],
        codecs: Codecs,
    ) -> None:
        self._call = call
        self._sender = sender
        self._items = items.items
        self._begin = begin
        self._begun = False
        #: Whether the node takes more items.
        self._wanted = True
        self._others: dict[str, Any] = {
            name: properties[name] for name in _OF_BODIES if name in properties
        }
        self._others["correlation_id"] = call.key
        self._codecs = codecs.encoding
        self._sent = 0
        self._error: Exception | None = None

    async def run(self) -> Readable:
        """Send the items and return the reply. If cancelled, the request is abandoned by the caller.

        Raises:
            Exception: What the iteration over the items has raised.
            AmqpError: As :meth:`Connection.call`.
        """
        call = self._call
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            while call.reply is None and call.failure is None and self._error is None:
                await call.park()
            # Also closes the iterator, where it is.
            nursery.cancel_scope.cancel()
        if call.reply is not None:
            return call.reply
        if call.failure is not None:
            raise fresh(call.failure)
        assert self._error is not None
        raise self._error

    def fail(self, error: Exception) -> None:
        """End the call with *error*, unless it has ended."""
        if self._error is None:
            self._error = error
            self._call.wake()

    def refused(self, outcome: Outcome) -> None:
        """Handle the *outcome* of an item that was not accepted."""
        if type(outcome) is Released and type(self._call.known_outcome) is Accepted:
            # The handler has answered without the rest, and a large reply may still be on its way.
            self._wanted = False
        else:
            self.fail(refusal(outcome))

    async def _send(self) -> None:
        source: Any = self._items
        try:
            if isinstance(source, AsyncGenerator):
                async with aclosing(source):
                    async for item in source:
                        if not await self._send_item(item):
                            return
            elif isinstance(source, AsyncIterable):
                async for item in source:
                    if not await self._send_item(item):
                        return
            else:
                for item in source:
                    if not await self._send_item(item):
                        return
            await self._submit(Message(b"", message_annotations={STREAM_END: True}))
        except Exception as error:
            self.fail(error)

    async def _send_item(self, item: Any) -> bool:
        """Send *item*; return whether more items are wanted."""
        if self._sender.pending >= ITEMS_PENDING_MAX:
            await self._sender.wait_for_room()
            if not self._wanted:
                return False
        await self._submit(item)
        self._sent += 1
        if self._sent % _TURN_ITEMS == 0:
            await trio.lowlevel.checkpoint()
        return self._wanted

    async def _submit(self, item: Any) -> None:
        """Send *item*; the first one is the request.

        Raises:
            AmqpError: The item has no encoding, or the link has ended.
        """
        if self._begun:
            payload = build_message(item, self._others, self._codecs).encode()
            self._sender.submit(_ItemReceipt(self._sender, payload, self))
            return
        # Nothing is waited for after this: replies have an address of the connection that sends the request.
        properties = {**await self._begin(), "correlation_id": self._call.key}
        self._begun = True
        self._call.payload = build_message(item, properties, self._codecs).encode()
        self._sender.submit(self._call)
