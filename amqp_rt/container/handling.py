"""Steps of workers that never wait: from a message of an inbox to what its handler returns.

Apart from :mod:`.serving`, whose classes add all that waits, so that they can be compiled: each message passes through
them.

A handler is a coroutine, which most often returns without waiting. It is run up to there from a plain function, for
message after message; only if it waits is it handed to the task of the worker, as :class:`Suspended`.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from time import perf_counter
from types import CoroutineType
from typing import Any, Final

import trio
from trio.lowlevel import reschedule

from ..codec.plain_messages import read_data_behind_properties, read_plain_data
from ..codec.sections import PROPERTIES, SECTION_OPENINGS, read_data
from ..compiling import mypyc_attr
from ..errors import DecodeError, LocalProtocolError
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..message import MESSAGE_FORMAT
from ..outcomes import ACCEPTED, MODIFIED_FAILED, Error, Outcome
from ..trace_context import TRACE_OCTETS
from ..transactions import TransactionalState
from .compression import MAGICS
from .credit import CreditWindow, SharedSlots

log = logging.getLogger("amqp_rt.handlers")

#: Messages that a worker processes, and seconds that it may take, before it yields to other tasks.
TURN_MESSAGES: Final = 64
TURN_S: Final = 0.001
#: Requests that a worker processes before it yields, unless more than four times as many wait: their replies leave
#: together, so that the caller goes on with them while the next are processed.
TURN_REQUESTS: Final = 16
#: ``context`` of a request that its caller abandoned before it was started. Otherwise the ``context`` of a request is
#: the time of its arrival while it waits, 0 if it has no deadline, and its :class:`~.serving.Worker` while it is
#: processed.
ABANDONED: Final = object()
#: How messages without a header begin: with properties in the usual encoding. They have no deadline, and the
#: time of their arrival is not needed.
_NO_HEADER: Final = SECTION_OPENINGS[PROPERTIES]


class Suspended:
    """The rest of a coroutine that was started by a plain function and waits: awaiting it runs that rest.

    Args:
        coroutine: The coroutine.
        trap: Object that it has yielded, for the scheduler.
    """

    __slots__ = ("_coroutine", "_passed", "_trap")

    def __init__(self, coroutine: Any, trap: Any) -> None:
        self._coroutine = coroutine
        self._trap = trap
        #: Whether the scheduler has got the trap.
        self._passed = False

    def __await__(self) -> Suspended:
        return self

    def __iter__(self) -> Suspended:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Resume the coroutine with *value*; return what it yields next, at first what it has yielded already."""
        if self._passed:
            return self._coroutine.send(value)
        self._passed = True
        trap, self._trap = self._trap, None
        return trap

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        """Raise an exception in the coroutine; return what it yields next."""
        if value is None and trace is None:
            return self._coroutine.throw(kind)
        return self._coroutine.throw(kind, value, trace)

    def close(self) -> None:
        """End the coroutine, as the end of its task does."""
        self._coroutine.close()

    @property
    def cr_frame(self) -> Any:
        """The frame of the coroutine, for those who look for where a task waits."""
        return self._coroutine.cr_frame

    @property
    def cr_await(self) -> Any:
        """The object that the coroutine awaits."""
        return self._coroutine.cr_await


@mypyc_attr(allow_interpreted_subclasses=True)
class WorkersSteps:
    """State of :class:`~.serving.Workers`, and its steps.

    Args:
        slots: Messages that are processed at a time.
        tasks: Tasks at most.
        trace_within: Octets of a message that are searched for a trace context.
        shared: The slots that links without prefetch share; None if each link has its own window.
        stats: Counts of the route.
        turn: Messages of a turn, unless more than four times as many wait; ``TURN_MESSAGES`` at most.
    """

    def __init__(
        self,
        slots: int,
        tasks: int,
        trace_within: int,
        shared: SharedSlots | None,
        stats: Any,
        turn: int = TURN_MESSAGES,
    ) -> None:
        self.slots = slots
        self.trace_within = trace_within
        self.shared = shared
        self.running = 0
        #: Messages that wait or are processed, of all links.
        self.load = 0
        self._stats = stats
        self._turn = turn
        self._ring: deque[Any] = deque()
        self._parked: list[Any] = []
        self._tasks = tasks
        self._started = 0
        #: Number of woken workers that have not looked for a message yet.
        self._woken = 0

    def put(self, inbox: InboxSteps) -> None:
        """Process the messages of *inbox*, in turn with the other inboxes."""
        if not inbox.queued:
            inbox.queued = True
            self._ring.append(inbox)
        if self._woken:
            return
        if self._parked:
            # As in _wake(), without another call for each batch.
            self._woken = 1
            reschedule(self._parked.pop().task)
        else:
            self._wake()

    def _queue(self, inbox: InboxSteps, *, first: bool = False) -> None:
        """Put *inbox* into the ring without waking a worker."""
        if not inbox.queued:
            inbox.queued = True
            if first:
                self._ring.appendleft(inbox)
            else:
                self._ring.append(inbox)

    def _wake(self) -> None:
        if self._parked:
            reschedule(self._parked.pop().task)
        elif not (self._started < self._tasks and self._start_task()):
            return
        self._woken += 1

    def _start_task(self) -> bool:
        """Start another worker; return whether that was possible."""
        raise NotImplementedError

    def rotate_unused_credit(self) -> None:
        """Start asking links for unused credit, if a link has none while others hold some unused."""
        raise NotImplementedError

    def _next(self) -> Any:
        """Return the next message and its inbox, from the link whose turn it is; None if there is none."""
        ring = self._ring
        while ring:
            inbox: InboxSteps = ring[0]
            waiting = inbox.waiting
            delivery = waiting.popleft() if waiting else None
            if not waiting:
                ring.popleft()
                inbox.queued = False
            elif len(ring) > 1:
                ring.rotate(-1)
            if delivery is not None:
                return inbox, delivery
        return None

    def _run_turn(
        self, inbox: InboxSteps, delivery: Any, worker: Any, count: int, since: float
    ) -> tuple[int, Any, Any, bool]:
        """Process *delivery*, and those behind it in the same inbox, until a handler waits or the turn ends.

        Args:
            inbox: The inbox of *delivery*.
            delivery: The first message.
            worker: The worker.
            count: Messages of this turn before.
            since: When the turn began, by ``perf_counter``.

        Returns:
            The messages of the turn so far, or ``TURN_MESSAGES`` if it is over; the message whose handler waits
            and the object to be awaited for it, None and None if there is none; True if awaiting that object also settles
            the message, False if it returns the handler's result.
        """
        ring, waiting, takes_octets = self._ring, inbox.waiting, inbox.direct is not None
        most = TURN_MESSAGES
        if self._turn < most:
            most = min(most, max(self._turn, len(waiting) >> 2))
        # Messages whose handlers have returned nothing: they are settled together.
        accepted: list[Any] = []
        self.running += 1
        try:
            while True:
                octets = self._octets_of(delivery) if takes_octets else None
                rest: Any = None
                try:
                    if octets is None:
                        begun = inbox.run(inbox, delivery, worker)
                        if type(begun) is CoroutineType:
                            try:
                                rest = Suspended(begun, begun.send(None))
                            except StopIteration:
                                pass
                        else:
                            rest = begun
                    else:
                        rest = self.start(inbox, inbox.direct, delivery, worker, octets)
                except Exception as error:
                    report_defect(inbox, delivery, error)
                finally:
                    if rest is None:
                        inbox.finished(delivery)
                if rest is ACCEPTED:
                    accepted.append(delivery)
                elif rest is not None:
                    # Further workers go on with the messages behind it, at most two at a time.
                    if self._woken < 2 and ring and (self._parked or self._started < self._tasks):
                        self._wake()
                    return count, delivery, rest, octets is None
                count += 1
                if count >= most:
                    return TURN_MESSAGES, None, None, False
                if (
                    len(ring) != 1
                    or ring[0] is not inbox
                    or len(waiting) < 2
                    or (octets is None and (worker.cancelled or worker.timed))
                ):
                    return count, None, None, False
                # The clock is read after every fourth message only, which keeps its cost small.
                if not count & 3 and perf_counter() - since > TURN_S:
                    return TURN_MESSAGES, None, None, False
                delivery = waiting.popleft()
        finally:
            self.running -= 1
            if accepted:
                self._stats.accepted += len(accepted)
                inbox.accept(accepted)

    def _octets_of(self, delivery: Any) -> Any:
        """Return the octets for a handler that takes nothing else; None if the message needs more than that.

        These are malformed messages, bodies other than one data section, those that may be compressed, and messages
        that may have a trace context.
        """
        if delivery.message_format:
            return None
        payload: bytes = delivery.payload
        octets = read_plain_data(payload)
        if octets is None:
            try:
                octets = read_data(payload)
            except DecodeError:
                return None
            if octets is None or payload.find(TRACE_OCTETS, 0, self.trace_within) >= 0:
                return None
        return None if octets[:2] in MAGICS else octets

    def start(self, inbox: InboxSteps, call: Any, delivery: Any, worker: Any, octets: bytes) -> Any:
        """Call the handler *call*; return its rest if it waits, ``ACCEPTED`` if it has returned nothing.

        In all other cases *delivery* is settled, and None is returned.
        """
        try:
            result = call(octets)
            if type(result) is CoroutineType:
                try:
                    return Suspended(result, result.send(None))
                except StopIteration as stop:
                    result = stop.value
            elif result is not None and inspect.isawaitable(result):
                return result
        except BaseException as error:
            self.failed(inbox, delivery, worker, error)
        else:
            if result is None:
                return ACCEPTED
            self.answered(inbox, delivery, result)
        return None

    def returned(self, inbox: InboxSteps, delivery: Any, result: Any) -> None:
        """Settle *delivery*, whose handler has returned *result*."""
        if result is None:
            self._stats.accepted += 1
            settle_if_open(delivery, ACCEPTED)
        else:
            self.answered(inbox, delivery, result)

    def answered(self, inbox: InboxSteps, delivery: Any, result: object) -> None:
        """Settle *delivery*, whose handler has returned *result*, which is not None."""
        raise NotImplementedError

    def failed(self, inbox: InboxSteps, delivery: Any, worker: Any, error: BaseException) -> None:
        """Settle *delivery*, whose handler has raised *error*; raise what has to be passed on."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class InboxSteps:
    """State of :class:`~.serving.Inbox`, and its steps.

    Args:
        route: The route.
        workers: The workers that process the messages.
        window: The credit window of the link; None if the links of the route share its slots.
    """

    def __init__(self, route: Any, workers: WorkersSteps, window: CreditWindow | None) -> None:
        self.route = route
        self.workers: WorkersSteps = workers
        self.waiting: deque[Any] = deque()
        #: Whether the inbox is in the ring of the workers.
        self.queued = False
        #: Failed messages that are held for the pause before their outcome.
        self.held: dict[Any, Outcome] = {}
        #: Processes one message, up to its outcome.
        self.run: Any = None
        #: The handler, if it can be called with the octets of a message and nothing else.
        self.direct: Any = None
        self._open = True
        self._window = window

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        size = 0
        for each in deliveries:
            if type(each.state) is TransactionalState:
                # The effects of a handler cannot be rolled back, and it must not run before the
                # discharge.
                link.detach(Error("amqp:not-implemented", "nodes take part in no transactions"))
                return
            size += len(each.payload)
        count = len(deliveries)
        workers = self.workers
        self.route.stats.received += count
        workers.load += count
        if self._window is not None:
            self._window.took(count, size)
        elif workers.shared is not None:
            workers.shared.took(link, count)
            workers.rotate_unused_credit()
        if self.route.kind == "rpc":
            now = 0.0
            for each in deliveries:
                if each.context is not ABANDONED:
                    if not now and not each.payload.startswith(_NO_HEADER):
                        now = trio.current_time()
                    each.context = now
        self.waiting += deliveries
        if not self._open:
            self._give_back()
        if self.waiting:
            workers.put(self)

    def _give_back(self) -> None:
        """Release the messages that wait, unless their sender has settled them."""
        raise NotImplementedError

    def accept(self, deliveries: list[Any]) -> None:
        """Accept *deliveries*, at least one, unless they have an outcome, and give back their room."""
        octets = 0
        for each in deliveries:
            octets += len(each.payload)
        left = deliveries
        # Links of other protocols settle messages one by one.
        run = getattr(deliveries[0].link, "accept_run", None)
        try:
            if run is not None:
                left = run(deliveries)
        except Exception as error:
            report_defect(self, deliveries[0], error)
        for each in left:
            try:
                settle_if_open(each, ACCEPTED)
            except Exception as error:
                report_defect(self, each, error)
        self._free(len(deliveries), octets)

    def finished(self, delivery: IncomingDelivery) -> None:
        """Give back the room of *delivery*, which a worker has finished, unless it is held."""
        if not self.held or delivery not in self.held:
            self._free(1, len(delivery.payload))

    def _free(self, count: int, octets: int) -> None:
        """Give back the room of *count* messages, of *octets* in all."""
        workers = self.workers
        workers.load -= count
        if self._window is not None:
            self._window.freed(count, octets)
        elif workers.shared is not None:
            workers.shared.freed(count)
            # The slot may have gone to an idle link, and while it was taken no link held unused credit.
            workers.rotate_unused_credit()


def octets_of(delivery: IncomingDelivery) -> bytes | None:
    """Return the body of a message of data, if it is not compressed; else None.

    Raises:
        DecodeError: The message is malformed.
    """
    if delivery.message_format != MESSAGE_FORMAT:
        return None
    octets = read_data_behind_properties(delivery.payload)
    if octets is None:
        octets = read_data(delivery.payload)
    # The content-encoding decides.
    return None if octets is None or octets[:2] in MAGICS else octets


def report_defect(inbox: Any, delivery: IncomingDelivery, error: Exception) -> None:
    """Log *error* of this package, since those of handlers have become outcomes. It must not stop the worker."""
    log.error("a message to %r could not be handled", inbox.binding.address, exc_info=error)
    settle_if_open(delivery, MODIFIED_FAILED)


def settle_if_open(delivery: IncomingDelivery, outcome: Outcome) -> None:
    """Settle *delivery*, unless the handler has settled it itself."""
    if not delivery.settled:
        try:
            delivery.settle(outcome)
        except LocalProtocolError:
            pass  # The outcome set by the handler remains
