"""The body of a message while it arrives, in bounded memory (Part 3 §3.2.6).

What nobody has read yet stays in the session's window, so that a slow reader slows the peer
down; what has been read is gone.
"""

from __future__ import annotations

from collections import deque

import trio

from ..errors import AmqpError
from ..fronts.base import IncomingDelivery
from ..limits import Limits
from ..message import BodyReader, Message


class ByteStream:
    """The octets of one message's data sections, in the pieces that they arrive in.

    Iterate it, once. Leaving it unread is allowed: the rest is dropped as it comes.
    """

    def __init__(self, delivery: IncomingDelivery, limits: Limits) -> None:
        self.delivery = delivery
        self._reader = BodyReader(limits)
        self._pieces: deque[bytes] = deque()
        self._over = False
        self._waiting: trio.lowlevel.Task | None = None

    def on_data(self) -> None:
        """More has arrived, or the message has ended or was aborted."""
        if self._over:
            self.delivery.read_chunks()
        elif self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(waiting)

    def close(self) -> None:
        """Drop what has arrived, and what will."""
        self._over = True
        self._pieces.clear()
        self.delivery.read_chunks()

    async def head(self) -> Message:
        """The message without its body, once the body begins.

        Raises:
            DecodeError: What comes before the body is malformed, or larger than an assembled
                message may be.
            AmqpError: The sender gave up the message, or its link is gone.
        """
        while self._reader.message is None:
            if not await self._fill():
                return self._reader.finish()
        return self._reader.message

    def __aiter__(self) -> ByteStream:
        return self

    async def __anext__(self) -> bytes:
        """The next octets, as many as have arrived. Cancelling loses nothing.

        Raises:
            DecodeError: What follows is no data section.
            AmqpError: The sender gave up the message, or its link is gone.
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
        """Wait for more of the message; false if it is all here."""
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
            self._waiting = trio.lowlevel.current_task()
            try:
                await trio.lowlevel.wait_task_rescheduled(_abort)
            finally:
                self._waiting = None


def _abort(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.SUCCEEDED
