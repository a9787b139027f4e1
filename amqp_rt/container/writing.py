"""Messages whose bodies are written in pieces."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import trio

from ..errors import LinkDetached, LocalProtocolError
from ..fronts.base import OutgoingDelivery
from ..message import Message, write_data
from ..outcomes import ACCEPTED
from .links import fresh

if TYPE_CHECKING:
    from .sending import Receipt, Sender

#: Bytes of a streamed body passed to the link at a time.
_PIECE_MAX: Final = 65_536


class StreamedMessage:
    """Message that is being written; see :meth:`Sender.stream`.

    Memory is bounded: ``write`` waits while the session's window is closed or the output full.
    """

    def __init__(self, sender: Sender, front: Message) -> None:
        self._sender = sender
        self._front = front
        self._receipt: Receipt | None = None
        self._written = False
        #: A write is going on, or was cancelled after the beginning of its section had been sent.
        self._torn = False
        self._over = False

    async def __aenter__(self) -> Self:
        """Wait for credit, after messages that wait already. If cancelled, nothing was sent."""
        if self._receipt is not None:
            raise LocalProtocolError("a stream is one message: ask for another")
        sender = self._sender
        await trio.lowlevel.checkpoint()
        self._receipt = receipt = sender.begin_stream(self._front)
        try:
            while receipt.raw is None and not receipt.done:
                await sender.changes.park()
        except trio.Cancelled:
            if not sender.withdraw(receipt) and sender.open_stream is receipt:
                # Credit arrived in the same pass as the cancellation: the message has begun.
                self._over = True
                self._abort(receipt)
            raise
        if receipt.raw is None:
            await receipt.outcome()  # raises
        return self

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send *data* as the next part of the body, as one data section (Part 3 §3.2.6).

        If cancelled while waiting, part of *data* may have been sent; the message can then only be
        aborted, which the end of the block does.

        Raises:
            LocalProtocolError: Another task is in ``write``, or one was cancelled in it.
            DeliveryRejected: The receiver has rejected the message before its end.
            DeliveryNotAccepted: The receiver has released or modified it before its end.
            LinkDetached: The link has ended.
            ConnectionLost: The connection was lost.
        """
        raw, receipt = self._writing()
        self._refuse_if_torn()
        view = memoryview(data).cast("B")
        head = bytearray()
        write_data(head, len(view))
        await self._wait_until_writable(raw, receipt)
        # Another task may have begun meanwhile.
        self._refuse_if_torn()
        self._written = True
        first = _PIECE_MAX - len(head)
        # Until all of it has been sent the section is open, and nothing else may follow.
        self._torn = True
        raw.write(bytes(head) + bytes(view[:first]))
        for at in range(first, len(view), _PIECE_MAX):
            await self._wait_until_writable(raw, receipt)
            raw.write(bytes(view[at : at + _PIECE_MAX]))
        self._torn = False
        await trio.lowlevel.checkpoint()

    def _refuse_if_torn(self) -> None:
        if self._torn:
            raise LocalProtocolError(
                "a write() of the stream goes on in another task or was cancelled: the message can"
                " only be aborted"
            )

    def _writing(self) -> tuple[OutgoingDelivery, Receipt]:
        receipt = self._receipt
        if receipt is None or receipt.raw is None or self._sender.open_stream is not receipt:
            if receipt is not None and receipt.error is not None and not self._over:
                raise fresh(receipt.error)
            raise LocalProtocolError("the stream is not open: write inside its `async with`")
        return receipt.raw, receipt

    async def _wait_until_writable(self, raw: OutgoingDelivery, receipt: Receipt) -> None:
        while True:
            if receipt.error is not None:
                raise fresh(receipt.error)
            if receipt.done:
                await receipt.accepted()
                raise LinkDetached(
                    "the receiver has accepted the message before its end",
                    condition="amqp:illegal-state",
                )
            # A link that has ended may be waiting for the end of its connection, which gives the reason.
            if raw.link.attached and raw.link.writable:
                return
            await self._sender.changes.park()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the message and wait for its outcome; after an exception, or a ``write`` that was
        cancelled, abort it.

        If cancelled while waiting, the message remains sent and its outcome is dropped.
        """
        receipt = self._receipt
        sender = self._sender
        self._over = True
        if receipt is None or receipt.raw is None or sender.open_stream is not receipt:
            if error is None and receipt is not None:
                await receipt.accepted()
            return
        raw = receipt.raw
        if error is not None or (self._torn and not receipt.done):
            self._abort(receipt)
            if error is None:
                self._refuse_if_torn()
            return
        if receipt.done:
            raw.abort()
        elif raw.link.attached:
            raw.write(self._tail(), more=False)
        else:
            # It fails once it is known whether the connection of the link ends, too.
            await receipt.accepted()
        sender.end_stream(receipt)
        if raw.settled:
            receipt.finish(ACCEPTED)
        await receipt.accepted()

    def _abort(self, receipt: Receipt) -> None:
        """Abort the message that has begun, and let others leave."""
        assert receipt.raw is not None
        receipt.raw.abort()
        self._sender.end_stream(receipt)
        receipt.fail(LinkDetached("the message was aborted", condition="amqp:not-allowed"))

    def _tail(self) -> bytes:
        """Return the sections after the body, led by an empty one if nothing was written."""
        front = self._front
        tail = front.encode()[len(front.encode_front()) :]
        empty = bytearray()
        write_data(empty, 0)
        return tail[len(empty) :] if self._written else tail
