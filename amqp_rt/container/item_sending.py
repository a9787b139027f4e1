"""Streamed requests of a caller: items on a link of their own, of which the credit is the node's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import trio

from ..message import Message
from ..outcomes import Accepted
from ..values import Symbol
from .composing import build_message
from .links import fresh
from .pending_calls import PendingCall
from .sending import Receipt, Sender, refusal

if TYPE_CHECKING:
    from .codecs import Codecs

#: Message annotation of the message that ends a stream.
STREAM_END: Final = Symbol("x-opt-stream-end")
#: Items of one stream that may be without an outcome at the same time.
ITEMS_PENDING_MAX: Final = 200
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
            # A handler that has answered leaves the rest, and then its reply is here already.
            self.sending.fail(refusal(self._outcome))


class SendingItems:
    """Sending of the items of one call, until its reply has arrived.

    Args:
        call: The call.
        sender: Its link, attached and without other messages.
        items: The items.
        properties: Properties of the first message.
        codecs: Codecs of payloads.
    """

    def __init__(
        self,
        call: PendingCall,
        sender: Sender,
        items: StreamedItems,
        properties: Mapping[str, Any],
        codecs: Codecs,
    ) -> None:
        self._call = call
        self._sender = sender
        self._items = items.items
        self._first: Mapping[str, Any] | None = {**properties, "correlation_id": call.key}
        self._others = {"correlation_id": call.key}
        if "compress" in properties:
            self._others["compress"] = properties["compress"]
        self._codecs = codecs.encoding
        self._sent = 0
        self._error: Exception | None = None

    async def run(self) -> Message:
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

    async def _send(self) -> None:
        source: Any = self._items
        try:
            if isinstance(source, AsyncGenerator):
                async with aclosing(source):
                    async for item in source:
                        await self._send_item(item)
            elif isinstance(source, AsyncIterable):
                async for item in source:
                    await self._send_item(item)
            else:
                for item in source:
                    await self._send_item(item)
            self._submit(Message(b"", message_annotations={STREAM_END: True}))
        except Exception as error:
            self.fail(error)

    async def _send_item(self, item: Any) -> None:
        if self._sender.pending >= ITEMS_PENDING_MAX:
            await self._sender.wait_for_room()
        self._submit(item)
        self._sent += 1
        if self._sent % _TURN_ITEMS == 0:
            await trio.lowlevel.checkpoint()

    def _submit(self, item: Any) -> None:
        """Send *item*; the first one is the request.

        Raises:
            AmqpError: The item has no encoding, or the link has ended.
        """
        first, self._first = self._first, None
        payload = build_message(
            item, self._others if first is None else first, self._codecs
        ).encode()
        if first is None:
            self._sender.submit(_ItemReceipt(self._sender, payload, self))
        else:
            self._call.payload = payload
            self._sender.submit(self._call)
