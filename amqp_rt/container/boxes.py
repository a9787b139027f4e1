"""Interfaces of outboxes and inboxes: messages that belong to transactions of an application's own database.

:mod:`amqp_rt.outbox` has implementations; a container knows them only by these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import trio
from msgspec import Struct

from ..errors import AmqpError
from ..message import Message, MessageId
from ..outcomes import Modified, Outcome, Rejected, Released
from .raising import RaisedOutcome, Reject

log = logging.getLogger("amqp_rt.outbox")


class Refused(Struct, frozen=True):
    """Message of an outbox that its receiver has rejected, and that is not sent again unless asked for."""

    id: int
    address: str
    reason: str
    payload: bytes


class Outbox(Protocol):
    """Messages that an application has committed to its own database, to be sent after the commit.

    How a message is added depends on the database: see :class:`~amqp_rt.outbox.SqlOutbox` and
    :class:`~amqp_rt.outbox.SqliteOutbox`.
    """

    # Connections refer to this module, which therefore does not know their class.
    async def run(self, peer: Any) -> None:
        """Send committed messages to *peer*, a connection, until cancelled; :meth:`Connection.relay` calls this.

        A message is removed from the database after the peer has accepted it. Cancellation may leave messages
        that were sent; they are sent again, with the same message-id.

        Raises:
            ConnectionLost: The connection has ended and is not established again.
        """

    async def pending(self) -> int:
        """Return the number of messages that are committed and neither accepted nor rejected."""

    async def flush(self) -> None:
        """Wait until all committed messages have been accepted or rejected, while :meth:`run` sends them.

        Cancellation leaves no trace.
        """

    async def refused(self) -> list[Refused]:
        """Return the rejected messages, which stay until :meth:`retry` or :meth:`drop`."""

    async def retry(self, *ids: int) -> None:
        """Send the rejected messages with these *ids* again."""

    async def drop(self, *ids: int) -> None:
        """Delete the rejected messages with these *ids*."""


class OutboxFeed:
    """Task of a container that sends the messages of its outbox to a peer (:class:`~amqp_rt.container.home.Feed`).

    Args:
        outbox: The outbox.
        peer: Where its messages are sent.
        fail: Called with the error with which sending has ended.
    """

    def __init__(self, outbox: Outbox, peer: Any, fail: Callable[[AmqpError], None]) -> None:
        self.finished = trio.Event()
        self._outbox = outbox
        self._peer = peer
        self._fail = fail
        self._scope = trio.CancelScope()

    def stop(self) -> None:
        """End the task soon. Messages that are not sent stay in the database."""
        self._scope.cancel()

    async def run(self) -> None:
        """Send until :meth:`stop`, or until the connection has ended permanently."""
        try:
            with self._scope:
                await self._outbox.run(self._peer)
        except AmqpError as error:
            if not self._peer.closing:
                self._fail(error)
        except Exception as error:
            # A container that goes on without its outbox would keep its messages back.
            log.exception("outbox failed: %r", self._outbox)
            self._fail(AmqpError(f"{self._outbox!r} has failed: {error}"))
        finally:
            self.finished.set()


class NodeInbox(Protocol):
    """Record of the messages that nodes have processed, written by the transaction of their handlers."""

    @property
    def session_type(self) -> type:
        """Type of the resource in whose transaction messages are recorded; handlers request it too."""

    def session(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction for one message or batch; used where the container provides none of ``session_type``.

        The end of the block commits it, an exception rolls it back.
        """

    def recorded(
        self, session: Any, address: str, message_id: MessageId
    ) -> AbstractAsyncContextManager[bool]:
        """Record a message in the transaction of *session*; the block processes it, unless it gets False: that was done.

        The block leaves the transaction open. If it raises or is cancelled, the transaction has to be rolled back.
        """

    def recorded_batch(
        self, session: Any, messages: Sequence[tuple[str, MessageId]]
    ) -> AbstractAsyncContextManager[Sequence[bool]]:
        """Record different messages, each an address and a message-id, in the transaction of *session*.

        The block gets, for each of them, whether it is to be processed; otherwise as for :meth:`recorded`.
        """

    async def forget(self, session: Any, messages: Sequence[tuple[str, MessageId]]) -> None:
        """Delete the records of *messages* in the transaction of *session*: they have not been processed."""


class Unrecognizable(Reject):
    """Rejection of a message without message-id by an inbox. It is logged, since a queue tells no sender of it."""


class _Returned(RaisedOutcome):
    """Outcome that a handler has returned, raised to roll its transaction back."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the handler has not processed the message")
        self._outcome = outcome

    @property
    def outcome(self) -> Outcome:
        return self._outcome


def refuse_unprocessed(result: Any) -> None:
    """Raise the outcome that a handler has returned, if the message counts as not processed.

    The transaction with the record of the message is rolled back then, so that another delivery is processed.
    """
    if isinstance(result, RaisedOutcome):
        raise result
    if isinstance(result, Rejected | Released | Modified):
        raise _Returned(result)


def recorded_id(address: str, message: Message | None) -> MessageId:
    """Return the message-id by which the inbox of a node at *address* recognizes *message*.

    Raises:
        Unrecognizable: The message has none.
    """
    message_id = None if message is None else message.message_id
    if message_id is None:
        raise Unrecognizable(
            f"{address!r} takes messages with a message-id only: without one, it cannot be recognized"
            " when it is delivered again"
        )
    return message_id
