"""Batches: handlers that get many messages at a time.

The :class:`BatchWorkers` of a route collect messages of all its links. One worker collects at a time; it waits
until the batch is full or its time has passed, while the others run handlers. A message that cannot be decoded is
rejected when it is collected, and takes no place in the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import trio
from msgspec import Struct

from ..fronts.base import IncomingDelivery
from ..message import MessageId
from ..observers import error_of
from ..outcomes import ACCEPTED, RELEASED, Outcome
from .boxes import recorded_id
from .callers import CALLER
from .deliveries import unread
from .failures import failed_outcome, only_cancelled, outcome_of_error
from .handling import InboxSteps, settle_if_open
from .home import Home
from .raising import RaisedOutcome, is_undecodable
from .recording import BatchRecord, outcomes_of
from .routes import Batch, Route
from .serving import Inbox, Worker, Workers, conclude, read_message


class _Collected(Struct):
    """Message of a batch, decoded for the handler."""

    inbox: Inbox
    delivery: IncomingDelivery
    value: Any
    #: Message-id by which the inbox of the node recognizes the message; None without an inbox.
    message_id: MessageId | None

    @property
    def gone(self) -> bool:
        """Whether the link has ended before the handler began: its peer delivers the message again."""
        return not self.delivery.settled and not self.delivery.link.attached


class BatchWorkers(Workers):
    """Workers of a route whose handler gets batches; each worker is a slot for one batch.

    Args:
        route: The route.
        batch: Its bounds.
        container: The container, in whose nursery the tasks run.
    """

    def __init__(self, route: Route, batch: Batch, container: Home) -> None:
        super().__init__(route, container, self._run_batch)
        self._batch = batch
        #: Worker that collects a batch: further messages are its own.
        self._collector: Worker | None = None
        #: Set when more messages have arrived for the collector that waits.
        self._more = trio.Event()
        self._stopped = False

    def put(self, inbox: InboxSteps) -> None:
        """Process the messages of *inbox*, in the batch that is being collected or in a new one."""
        if self._collector is None:
            super().put(inbox)
            return
        self._queue(inbox)
        self._more.set()

    def stop(self) -> None:
        """Give no more credit, release messages that have not been collected, and handle those that have."""
        self._stopped = True
        super().stop()
        self._more.set()

    def _next(self) -> tuple[Inbox, IncomingDelivery] | None:
        # A worker that was woken before another one began to collect finds nothing. The further messages of a turn need
        # no such look: a batch that waits ends the turn.
        return super()._next() if self._collector is None else None

    async def _run_batch(self, inbox: Inbox, delivery: IncomingDelivery, worker: Worker) -> None:
        """Collect a batch that begins with *delivery*, and pass it to the handler.

        The caller gives back the room of *delivery*, this function that of the other messages.
        """
        collected: list[_Collected] = []
        if not self._decode(inbox, delivery, collected):
            return  # The batch begins with a message that it can have.
        try:
            await self._collect(collected, worker)
            await self._handle([each for each in collected if not each.gone], worker)
        except trio.Cancelled:
            # Those that the handler has settled keep their outcomes.
            self.route.stats.released += len(collected)
            for each in collected:
                settle_if_open(each.delivery, RELEASED)
            raise
        finally:
            for each in collected:
                if each.delivery is not delivery:
                    each.inbox.finished(each.delivery)

    async def _collect(self, collected: list[_Collected], worker: Worker) -> None:
        """Add messages to *collected* until the batch is full or its time has passed."""
        self._collector = worker
        batch = self._batch
        size = sum(len(each.delivery.payload) for each in collected)
        deadline = trio.current_time() + batch.within_s
        try:
            while len(collected) < batch.messages and size < batch.bytes:
                found = super()._next()
                if found is None:
                    if self._stopped or trio.current_time() >= deadline:
                        break
                    self._more = trio.Event()
                    with trio.move_on_at(deadline):
                        await self._more.wait()
                    continue
                inbox, delivery = found
                if collected and size + len(delivery.payload) > batch.bytes:
                    inbox.waiting.appendleft(delivery)
                    self._queue(inbox, first=True)
                    break
                if self._decode(inbox, delivery, collected):
                    size += len(delivery.payload)
                else:
                    # Its room is free at once, so that malformed messages do not hold up a batch.
                    inbox.finished(delivery)
        finally:
            self._collector = None
            if self._ring and not self._woken:
                self._wake()

    def _decode(
        self, inbox: Inbox, delivery: IncomingDelivery, collected: list[_Collected]
    ) -> bool:
        """Add the payload of *delivery* to the batch, or reject it; return whether it was added."""
        message_id = None
        try:
            message = read_message(delivery)
            value = self.route.element(delivery, message)
            if self.route.inbox is not None:
                message_id = recorded_id(inbox.binding.address, message)
        except Exception as error:
            # Also what the codec of an application raises by mistake: this message has failed, not the batch.
            conclude(inbox, delivery, outcome_of_error(inbox, delivery, error))
            return False
        collected.append(_Collected(inbox, delivery, value, message_id))
        return True

    async def _handle(self, items: list[_Collected], worker: Worker) -> None:
        """Call the handler, and set the outcomes of *items*."""
        if not items:
            return
        route = self.route
        if worker.operation is not None:
            for each in items[1:]:
                worker.operation.add(unread(each.delivery).read())
        outcomes: Sequence[Outcome]
        record = None
        if route.inbox is not None:
            record = BatchRecord(
                [
                    (each.inbox.binding.address, each.message_id)
                    for each in items
                    if each.message_id is not None
                ]
            )
        try:
            values = [each.value for each in items]
            result = route.open(items[0].inbox.binding, values, record=record)
            if inspect.isawaitable(result):
                result = await result
            outcomes = outcomes_of(result, len(items))
        except trio.Cancelled:
            raise
        except Exception as failure:
            worker.failure = error_of(failure)
            outcomes = _failed(items, failure, () if record is None else record.processed)
        except BaseExceptionGroup as group:
            route.stats.released += len(items)
            for each in items:
                settle_if_open(each.delivery, RELEASED)
            raise only_cancelled(route, group) from None
        finally:
            CALLER.set(None)
        for each, outcome in zip(items, outcomes, strict=True):
            conclude(each.inbox, each.delivery, outcome)


def _failed(
    items: Sequence[_Collected], error: Exception, processed: Collection[int]
) -> list[Outcome]:
    """Return the outcomes of *items*, whose handler ended with *error*: by the attempts of each.

    Those at the positions *processed* have been processed before, and are accepted: another attempt would
    count as a failure of theirs.
    """
    # The error is logged once, outcomes and malformed messages for each of them.
    say = outcome_of_error
    found: list[Outcome] = []
    for at, each in enumerate(items):
        if at in processed:
            found.append(ACCEPTED)
            continue
        found.append(say(each.inbox, each.delivery, error))
        if not isinstance(error, RaisedOutcome) and not is_undecodable(error):
            say = failed_outcome
    return found
