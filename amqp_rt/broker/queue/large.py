"""Large messages of a queue: their bodies are stored in pieces, and never in memory as a whole. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import LocalProtocolError
from ...outcomes import ACCEPTED, Outcome
from ..entries import Entry, encode_outgoing, exceeds_link
from .subscriptions import NO_MORE_WORK, Browser, Enlisted, Subscription

if TYPE_CHECKING:
    from .queue import MessageQueue


def _ignore(entry: Entry) -> None:
    """Do nothing."""


class LargeMessages:
    """Messages of a queue that arrive and leave in pieces.

    Args:
        queue: The queue.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        #: Messages with a sequence number whose body is arriving.
        self.arriving: int = 0
        #: Called with an entry that is about to get its sequence number.
        self.before_place: Callable[[Entry], None] = _ignore
        #: Called with a subscription, a delivery begun with the part before the body, and its
        #: entry: the callee sends the pieces of the body and then calls :meth:`finish`.
        self.on_pieces: Callable[[Subscription, Any, Entry], None] | None = None

    def expect(self, entry: Entry) -> None:
        """Give *entry*, whose body is going to arrive, a sequence number and room.

        :meth:`arrive` or :meth:`cancel` follows.
        """
        queue = self._queue
        self.before_place(entry)
        entry.sequence = queue.place_next
        queue.place_next += 1
        size = len(entry.payload)
        queue.bytes += size
        queue.memory.held += size
        self.arriving += 1

    def grow(self, entry: Entry, size: int) -> None:
        """Count *size* more bytes of the body, which are being written to the store."""
        queue = self._queue
        if not queue.deleted:
            entry.rest += size
            queue.bytes += size
            queue.beyond += size

    def cancel(self, entry: Entry) -> None:
        """Withdraw an expected *entry*."""
        queue = self._queue
        if not queue.deleted:
            self.arriving -= 1
            queue.archive(entry)
            queue.notify_room()

    def arrive(self, entry: Entry) -> None:
        """Make an expected *entry*, which is kept completely, AVAILABLE and deliver it."""
        queue = self._queue
        if queue.deleted:
            return
        self.arriving -= 1
        queue.counts.enqueued += 1
        paging = queue.paging
        sequence = entry.sequence
        if sequence < paging.first:
            queue.make_available(entry)
        elif not paging.count:
            paging.end()
            queue.make_available(entry)
        else:
            # It is read together with its neighbours.
            if any(browser.cursor > sequence for browser in queue.browsers.values()):
                # These browsers have passed it: keep it in memory for them, without its body.
                paging.out[sequence] = entry
                queue.make_available(entry)
                for browser in queue.browsers.values():
                    if browser.cursor <= sequence:
                        browser.backlog.append(sequence)
                        browser.backlog.sort(reverse=True)
                queue.distribute()
                return
            for identity, consumer in queue.consumers.items():
                if consumer.cursor > sequence:
                    consumer.cursor = sequence
                    paging.ahead.pop(identity, None)
            paging.leave_to_store(entry)
        queue.distribute()
        queue.notify_room()

    def begin_send(self, subscription: Subscription, entry: Entry) -> bool:
        """Begin to send *entry*; the subscription gets no other message until it is complete."""
        queue = self._queue
        link = subscription.link
        transaction = subscription.acquiring
        settled = subscription.settled
        if subscription.recorder is not None:
            # The recorded state of a delivery would have to include its payload.
            entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        context: Any = None if settled else entry
        enlisted: Enlisted | None = None
        if transaction is not None:
            if not transaction.has_room:
                link.detach(NO_MORE_WORK)
                return False
            context = enlisted = Enlisted(subscription, transaction, entry, acquired=True)
        payload = encode_outgoing(entry, queue.wall()) if entry.altered else entry.payload
        size = len(entry.payload) + entry.rest
        try:
            if 0 < link.max_message_size < size:
                raise LocalProtocolError("the message is larger than the peer takes")
            delivery = link.send(
                payload,
                context,
                settled=settled,
                message_format=entry.message_format,
                state=None if transaction is None else transaction.state,
                more=True,
            )
        except LocalProtocolError as error:
            if exceeds_link(link, error):
                entry.avoid = (entry.avoid or frozenset()) | {subscription.identity}
            return False
        if enlisted is not None and transaction is not None:
            enlisted.delivery = delivery
            transaction.enlist(enlisted)
        entry.attempts += 1
        queue.counts.delivered += 1
        queue.acquired += 1
        if not settled:
            queue.timing.start_lock(subscription, delivery)
        queue.turns.assign_group(subscription, entry)
        self._feed(subscription, delivery, entry)
        return True

    def begin_copy(self, browser: Browser, payload: Any, entry: Entry) -> None:
        """Begin to send a copy of *entry*, which begins with *payload*.

        Raises:
            LocalProtocolError: The message is too large for the link.
        """
        link = browser.link
        if 0 < link.max_message_size < len(entry.payload) + entry.rest:
            raise LocalProtocolError("the message is larger than the peer takes")
        delivery = link.send(
            payload,
            None,
            settled=browser.settled,
            message_format=entry.message_format,
            more=True,
        )
        self._feed(browser, delivery, entry)

    def _feed(self, subscription: Subscription, delivery: Any, entry: Entry) -> None:
        assert self.on_pieces is not None
        subscription.feeding = True
        self.on_pieces(subscription, delivery, entry)

    def finish(
        self, subscription: Subscription, delivery: Any, entry: Entry, outcome: Outcome | None
    ) -> None:
        """Finish the sending of *entry* in pieces.

        *outcome* is None if all pieces were sent, and otherwise the outcome of the abandoned
        delivery, unless that has another one.
        """
        queue = self._queue
        subscription.feeding = False
        subscription.on_writable = None
        if queue.deleted:
            return
        enlisted = delivery.context
        if isinstance(enlisted, Enlisted):
            if outcome is not None:
                # The consumer cannot decide about a message that it did not receive completely.
                enlisted.transaction.fail("a large message could not be sent whole")
            elif subscription.settled and enlisted.outcome is None:
                enlisted.outcome = ACCEPTED
        context = delivery.context
        if isinstance(subscription, Browser) or isinstance(context, Enlisted):
            pass
        elif subscription.settled and (context is None or context is entry):
            queue.conclude(subscription, entry, ACCEPTED if outcome is None else outcome)
            queue.concluded()
        elif outcome is not None and delivery.context is entry:
            delivery.context = outcome
            queue.conclude(subscription, entry, outcome)
            queue.concluded()
        if subscription.link.attached:
            queue.serve(subscription)
