"""Body of a message that is read while it arrives, in bounded memory (Part 3 §3.2.6).

Unread data count against the session's window, so that a slow reader slows down the peer; data that
have been read are not kept.
"""

from __future__ import annotations

from collections import deque

import trio

from ..bodies import BodyReader
from ..errors import AmqpError
from ..fronts.base import IncomingDelivery
from ..limits import Limits
from ..message import Message


class ByteStream:
    """Octets of a message's data sections, in the pieces in which they arrive.

    Iterate over it once. It may be left unread: the rest is dropped as it arrives.
    """

    def __init__(self, delivery: IncomingDelivery, limits: Limits) -> None:
        self.delivery = delivery
        self._reader = BodyReader(limits)
        self._pieces: deque[bytes] = deque()
        self._over = False
        self._waiting: trio.lowlevel.Task | None = None

    def on_data(self) -> None:
        """Handle further data, or the end or abort of the message."""
        if self._over:
            self.delivery.read_chunks()
        elif self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(waiting)

    def close(self) -> None:
        """Drop all data of the message, arrived or still to come."""
        self._over = True
        self._pieces.clear()
        self.delivery.read_chunks()

    async def head(self) -> Message:
        """Return the message without its body, as soon as the body begins.

        Raises:
            DecodeError: The sections before the body are malformed, or larger than an assembled
                message may be.
            AmqpError: The sender aborted the message, or its link has ended.
        """
        while self._reader.message is None:
            if not await self._fill():
                return self._reader.finish()
        return self._reader.message

    def __aiter__(self) -> ByteStream:
        return self

    async def __anext__(self) -> bytes:
        """Return the next octets, as many as have arrived. Cancelling loses nothing.

        Raises:
            DecodeError: The next section is not a data section.
            AmqpError: The sender aborted the message, or its link has ended.
        """
        while not self._over:
            while self._pieces:
                if piece := self._pieces.popleft():
                    return piece
            if not await self._fill():
                self._over = True
                self._reader.finish()
        raise StopAsyncIteration

    async def _fill(self) -> bool:
        """Wait for more of the message; return False if all of it has been read."""
        while True:
            complete = self.delivery.complete
            chunks = self.delivery.read_chunks()
            if chunks:
                for chunk in chunks:
                    self._pieces += self._reader.feed(chunk)
                return True
            if complete:
                return False
            if self.delivery.aborted or not self.delivery.link.attached:
                raise AmqpError(
                    "the sender gave up the message before its end",
                    condition="amqp:link:detach-forced",
                )
            if self._waiting is not None:
                raise trio.BusyResourceError("another task is reading the message")
            task = self._waiting = trio.lowlevel.current_task()
            try:
                await trio.lowlevel.wait_task_rescheduled(_abort)
            finally:
                # Awakened, it may be that another task waits by now.
                if self._waiting is task:
                    self._waiting = None


def _abort(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.SUCCEEDED
