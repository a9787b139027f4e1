"""Streamed requests at the node that answers them: many messages of one link for one handler.

The messages of a stream have the same correlation-id. The first has the reply-to, and the last the annotation
``x-opt-stream-end``. Credit is given again as the handler takes items, which holds the caller back.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Self

import trio

from ..errors import AmqpError, DecodeError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..message import MESSAGE_FORMAT, Message, MessageId
from ..outcomes import ACCEPTED, RELEASED, Accepted, Error, Outcome, Rejected
from ..transactions import TransactionalState
from .handling import TURN_MESSAGES, settle_if_open
from .item_sending import STREAM_END
from .payloads import Readable
from .routes import Deadline, Route, RouteBinding
from .serving import Inbox, Workers

#: Requests of one message have no correlation-id: no end would follow.
_NO_STREAM: Final = (
    "the node takes a stream of items: call it with stream(...), or give the messages a correlation-id and end them with one "
    "that has the annotation x-opt-stream-end"
)


class ItemStream:
    """Items of a streamed request, decoded. Iterate over it once; the rest may be left unread."""

    def __init__(self, inbox: StreamInbox, first: IncomingDelivery) -> None:
        self._inbox = inbox
        self._first = first
        self._route: Route = inbox.route
        self._waiting: deque[tuple[IncomingDelivery, Message]] = deque()
        #: Whether the first message uses room, because it has not been taken.
        self.holds_first = True
        self._count = 0
        #: Items taken since other tasks could run.
        self._turn = 0
        self._error: AmqpError | None = None
        self._over = False
        self._reader: trio.lowlevel.Task | None = None

    def add(self, delivery: IncomingDelivery, message: Message) -> None:
        """Add a message that has arrived, and wake the handler."""
        self._waiting.append((delivery, message))
        self._wake()

    def fail(self, error: AmqpError) -> None:
        """Raise *error* after the items that have arrived."""
        self._error = error
        self._wake()

    def close(self, outcome: Outcome) -> None:
        """Settle the items that have not been taken. The request itself has an outcome of its own."""
        self._over = True
        while self._waiting:
            delivery, _ = self._waiting.popleft()
            if delivery is not self._first:
                settle_if_open(delivery, outcome)
                self._inbox.freed(delivery)

    def _wake(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next item. Cancelling loses nothing.

        Raises:
            DecodeError: The next item is not of the handler's type.
            BusyResourceError: Another task is reading the stream.
        """
        if self._reader is not None:
            raise trio.BusyResourceError("another task is reading this stream")
        while not self._over:
            if self._turn >= TURN_MESSAGES:
                # Taking what has arrived is no checkpoint otherwise.
                self._turn = 0
                await trio.lowlevel.checkpoint()
            elif self._waiting:
                self._turn += 1
                return self._take()
            elif self._error is not None:
                self._over = True
                raise self._error
            else:
                self._turn = 0
                self._reader = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)
        raise StopAsyncIteration

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _take(self) -> Any:
        delivery, message = self._waiting[0]
        ends = STREAM_END in message.message_annotations
        value: Any = None
        if not ends:
            try:
                value = self._route.element(delivery, message)
            except DecodeError as error:
                # The reply reports it, and the items are released after that.
                self._over = True
                raise DecodeError(
                    f"item {self._count}: {error.description}",
                    condition=error.condition,
                    info=error.info,
                ) from None
        self._waiting.popleft()
        self._count += 1
        if delivery is self._first:
            self.holds_first = False
        else:
            settle_if_open(delivery, ACCEPTED)
        self._inbox.freed(delivery)
        if ends:
            self._over = True
            raise StopAsyncIteration
        return value

    def __repr__(self) -> str:
        return f"<ItemStream to {self._inbox.binding.address!r}, {self._count} taken>"


class StreamInbox(Inbox):
    """Streamed requests of one link; endpoint of the link.

    The first message of each stream is the request that waits for a worker. The others wait in the stream.
    """

    def __init__(self, binding: RouteBinding, workers: Workers) -> None:
        super().__init__(binding, workers)
        self._by_key: dict[MessageId, ItemStream] = {}
        self._by_request: dict[IncomingDelivery, tuple[MessageId | None, ItemStream]] = {}

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Begin streams, and add messages to those that are open."""
        if any(type(each.state) is TransactionalState for each in deliveries):
            super().deliver(link, deliveries)  # which detaches the link
            return
        for each in deliveries:
            self._place(link, each)

    def _place(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        message, key, failure = _read(delivery)
        stream = None if key is None else self._by_key.get(key)
        if stream is None and (failure is None or not self._by_request):
            if message is not None and message.properties.reply_to is None:
                # The rest of a stream that has ended, or of one whose beginning went elsewhere.
                self._took(link, delivery)
                settle_if_open(delivery, RELEASED)
                self.freed(delivery)
                return
            stream = ItemStream(self, delivery)
            self._by_request[delivery] = key, stream
            if key is not None:
                self._by_key[key] = stream
            if message is not None and key is None:
                stream.fail(DecodeError(_NO_STREAM))
            elif message is not None:
                stream.add(delivery, message)
            super().deliver(link, [delivery])
            return
        self._took(link, delivery)
        if stream is not None and message is not None:
            stream.add(delivery, message)
            return
        assert failure is not None
        for _, each in self._by_request.values():
            each.fail(failure)
        settle_if_open(delivery, Rejected(Error.of(failure)))
        self.freed(delivery)

    def _took(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Count an item that has arrived, as :meth:`deliver` counts requests."""
        self.route.stats.received += 1
        self.workers.load += 1
        if self._window is not None:
            self._window.took(1, len(delivery.payload))

    def open(self, delivery: IncomingDelivery, message: Readable, deadline: Deadline) -> Any:
        """Call the handler with the items of the stream that began with *delivery*, whose message is *message*."""
        whole = message if isinstance(message, Message) else Message.decode(message.payload)
        return self.route.open(
            self.binding,
            self.stream_of(delivery),
            delivery=delivery,
            message=whole,
            deadline=deadline,
        )

    def freed(self, delivery: IncomingDelivery) -> None:
        """Give back the room of a message that the handler has taken, or that is dropped."""
        super().finished(delivery)

    def stream_of(self, delivery: IncomingDelivery) -> ItemStream:
        """Return the stream that began with *delivery*."""
        return self._by_request[delivery][1]

    def finished(self, delivery: IncomingDelivery) -> None:
        """End the stream of a request that has been answered, or is not started."""
        if self._end(delivery).holds_first:
            self.freed(delivery)
        if not self._open and not self._by_request and self._window is not None:
            self._window.close()

    def _end(self, delivery: IncomingDelivery) -> ItemStream:
        key, stream = self._by_request.pop(delivery)
        if key is not None and self._by_key.get(key) is stream:
            del self._by_key[key]
        # A handler may have answered before the end; otherwise nothing of the stream was processed.
        stream.close(ACCEPTED if isinstance(delivery.local_state, Accepted) else RELEASED)
        return stream

    def stop(self) -> None:
        """Take no more requests, but let handlers that run get the rest of their streams."""
        self._open = False
        self._give_back()
        if not self._by_request and self._window is not None:
            self._window.close()

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Drop the streams that wait for a handler, and cancel the handlers of the others."""
        waiting = list(self.waiting)
        super().on_detached(link, error, closed)
        for each in waiting:
            # Their requests have been counted out already.
            self._end(each)


def _read(
    delivery: IncomingDelivery,
) -> tuple[Message | None, MessageId | None, DecodeError | None]:
    """Return the message of *delivery* and its correlation-id, or why it is none."""
    if delivery.message_format != MESSAGE_FORMAT:
        return None, None, DecodeError(f"message-format {delivery.message_format:#x} is not known")
    try:
        message = Message.decode(delivery.payload)
        key = message.properties.correlation_id
        STREAM_END in message.message_annotations  # noqa: B015  # decodes them here
    except DecodeError as error:
        return None, None, error
    return message, key, None
