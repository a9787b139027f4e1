"""Execution of handlers: from the batch of a link to the outcome of each message.

The :class:`Inbox` of a link holds the messages that have arrived and that no worker has started; the
link's credit limits their number. The :class:`Workers` of a route are at most ``slots`` tasks, started on
demand and parked when idle. They take messages from the inboxes in turn, one from each. A batch
wakes one worker; a worker that starts a message while others wait wakes further workers. So
handlers that never block cost one wake-up for each batch, and handlers that block are all running
after a few passes of the scheduler.

``nodes`` creates the workers of a route; ``attaching``, ``relaying`` and ``consuming`` create inboxes as the
endpoints of links. The time of a handler is bounded only for requests: it is cancelled at the deadline, if
the request has one, or when the caller abandons the request.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final, TypeAlias

import trio

from ..codec.plain_messages import PlainReader
from ..fronts.base import (
    IncomingDelivery,
    ReceivingLink,
)
from ..message import MESSAGE_FORMAT, Message
from ..observers import (
    ObservedOperation,
    UnreadObserver,
)
from ..outcomes import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Outcome,
    Rejected,
    Released,
)
from ..trace_context import TRACE_OCTETS
from .callers import CALLER, caller_of
from .credit import CreditWindow, SharedSlots
from .failures import (
    keeps_paused,
    name_of_failure,
    only_cancelled,
    outcome_of_error,
    requested_pause_s,
    without_pause,
)
from .handling import (
    ABANDONED,
    TURN_MESSAGES,
    TURN_REQUESTS,
    TURN_S,
    InboxSteps,
    WorkersSteps,
    octets_of,
    report_defect,
    settle_if_open,
)
from .home import Home
from .observing import ObservedRunSteps
from .raising import RaisedOutcome, Reject
from .routes import Route, RouteBinding, Stats
from .streams import ByteStream

log = logging.getLogger("amqp_rt.handlers")

#: Least and most seconds before a link is asked for its unused credit (:meth:`Workers.rotate_unused_credit`).
_ROTATION_MIN_S: Final = 0.005
_ROTATION_MAX_S: Final = 0.5


class ObservedRun(ObservedRunSteps):
    """Processing of the messages of one link, with observers.

    They are asked about the link with its first message, when its peer is known.

    Args:
        binding: The link and its route.
        run: Processes one message, up to its outcome.
    """

    def __init__(self, binding: RouteBinding, run: Run) -> None:
        takes_octets = run is run_message and binding.route.takes_octets
        super().__init__(binding, run, binding.route.target if takes_octets else None)

    def _bind(self) -> UnreadObserver | None:
        binding = self._binding
        self._link = binding.link
        observer: UnreadObserver | None = binding.observe(
            "serve" if binding.route.kind == "rpc" else "process"
        )
        self._observer = observer
        return observer

    async def _finish(
        self,
        inbox: Inbox,
        delivery: IncomingDelivery,
        worker: Worker,
        rest: Awaitable[Any],
        direct: bool,
        traced: bool,
    ) -> None:
        # Cancelling is passed on, and ends the operation.
        operation = worker.operation
        error: str | None = "cancelled"
        try:
            if direct:
                try:
                    result = await rest
                except BaseException as failure:
                    inbox.workers.failed(inbox, delivery, worker, failure)
                else:
                    inbox.workers.returned(inbox, delivery, result)
                finally:
                    if traced:
                        CALLER.set(None)
            else:
                await rest
            error = self.take_error(delivery, worker, None)
        finally:
            self.end(worker, operation, error)


class Worker:
    """Task of a route, with the state of the message that it processes."""

    __slots__ = (
        "_parked",
        "cancelled",
        "failure",
        "message",
        "operation",
        "scope",
        "task",
        "timed",
    )

    def __init__(self, parked: list[Worker]) -> None:
        self._parked = parked
        self.task = trio.lowlevel.current_task()
        #: Scope of the current work, replaced only after a cancellation: no scope is created for
        #: each message.
        self.scope = trio.CancelScope()
        #: Whether the caller abandoned the request that is being processed.
        self.cancelled = False
        #: Whether ``scope`` has had a deadline, which may have cancelled it.
        self.timed = False
        #: Condition or class of the latest failure of a handler, for observers. Not the exception, which
        #: would keep the connection in memory.
        self.failure: str | None = None
        #: The operation of observers on the present message, to which the others of a batch are added.
        self.operation: ObservedOperation | None = None
        #: The present message, if an observer has decoded it.
        self.message: Message | None = None

    def delivery(self) -> IncomingDelivery | None:
        """Return the delivery that the task processes; None if it waits for one.

        It is read from the frames of the task, so that processing does not have to note it.
        """
        for frame, _ in self.task.iter_await_frames():
            if frame.f_code is _PROCESSING:
                found: IncomingDelivery | None = frame.f_locals.get("delivery")
                return found
        return None

    def abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Handle the cancellation of the task while it waits for a message."""
        self._parked.remove(self)
        return trio.lowlevel.Abort.SUCCEEDED

    def cancel(self) -> None:
        """Cancel the handler, because its caller has given up."""
        self.cancelled = True
        self.scope.cancel()


class Workers(WorkersSteps):
    """Tasks of a route, shared by all its links.

    Args:
        route: The route, which has the handler and the number of slots.
        container: The container, in whose nursery the tasks run.
        run: Processes one message, up to its outcome.
    """

    def __init__(self, route: Route, container: Home, run: Run) -> None:
        super().__init__(
            slots=route.capacity,
            tasks=route.slots,
            trace_within=container.limits.trace_context_within,
            # With prefetch each link has a window of its own.
            shared=None if route.prefetch else SharedSlots(route.capacity),
            stats=route.stats,
            turn=TURN_REQUESTS if route.kind == "rpc" else TURN_MESSAGES,
        )
        self.route = route
        self.container = container
        self.inboxes: set[Inbox] = set()
        #: Tasks that have been started, idle ones included.
        self.tasks: set[Worker] = set()
        #: Processes one message, up to its outcome.
        self.run = run
        self._rotating = False
        #: Tasks that wait until no handler runs.
        self._idle = trio.lowlevel.ParkingLot()

    def _start_task(self) -> bool:
        if not self.container.start_handler(self._work):
            return False
        self._started += 1
        return True

    async def _work(self) -> None:
        worker = Worker(self._parked)
        self._woken -= 1
        # The worker may have been started by what a handler of another route did.
        CALLER.set(None)
        self.tasks.add(worker)
        try:
            while True:
                with trio.CancelScope() as worker.scope:
                    worker.cancelled = worker.timed = False
                    await self._work_until_cancelled(worker)
        finally:
            self.tasks.discard(worker)
            self._started -= 1

    async def _work_until_cancelled(self, worker: Worker) -> None:
        """Process message after message; return when the scope of *worker* is cancelled."""
        scope = worker.scope
        count = 0
        since = perf_counter()
        rest: Awaitable[Any] | None
        inbox: Inbox | None
        delivery: IncomingDelivery | None
        while True:
            taken = self._next()
            if taken is None:
                # A worker may wait for long, and must not keep its last connection in memory
                # meanwhile.
                inbox = delivery = rest = None
                if not self.running and self._idle:
                    self._idle.unpark_all()
                self._parked.append(worker)
                await trio.lowlevel.wait_task_rescheduled(worker.abort)
                self._woken -= 1
                count = 0
                since = perf_counter()
                continue
            inbox, delivery = taken
            count, delivery, rest, settles = self._run_turn(inbox, delivery, worker, count, since)
            if rest is not None:
                self.running += 1
                try:
                    if settles:
                        await rest
                    else:
                        # As run_message() goes on.
                        try:
                            result = await rest
                        except BaseException as error:
                            self.failed(inbox, delivery, worker, error)
                        else:
                            self.returned(inbox, delivery, result)
                except Exception as error:
                    report_defect(inbox, delivery, error)
                finally:
                    self.running -= 1
                    inbox.finished(delivery)
                count += 1
            # ``cancel_called`` is read only if necessary, since it reads the clock.
            if worker.cancelled or (worker.timed and scope.cancel_called):
                return
            # A handler that never waits must not keep the connections from being served. The clock is
            # read after every fourth message only, which keeps its cost small.
            if not count & 3 and (count >= TURN_MESSAGES or perf_counter() - since > TURN_S):
                await trio.lowlevel.checkpoint()
                count = 0
                since = perf_counter()

    def answered(self, inbox: Any, delivery: IncomingDelivery, result: object) -> None:
        conclude(inbox, delivery, _returned(result))

    def failed(
        self, inbox: Any, delivery: IncomingDelivery, worker: Worker, error: BaseException
    ) -> None:
        outcome = _outcome_of(inbox, delivery, worker, error)
        if outcome is None:
            try:
                raise error
            finally:
                # Otherwise the error refers to itself by its traceback and this frame.
                del error
        conclude(inbox, delivery, outcome)

    def rotate_unused_credit(self) -> None:
        if self.shared is not None and self.shared.starved and not self._rotating:
            self._rotating = True
            self.container.start_handler(self._rotate)

    async def _rotate(self) -> None:
        assert self.shared is not None
        delay_s = _ROTATION_MIN_S
        try:
            while self.shared.starved:
                seen = self.route.stats.received
                await trio.sleep(delay_s)
                if self.shared.starved:
                    self.shared.rotate()
                if self.route.stats.received == seen:
                    delay_s = min(2 * delay_s, _ROTATION_MAX_S)
                else:
                    delay_s = _ROTATION_MIN_S
        finally:
            self._rotating = False

    def stop(self) -> None:
        """Give no more credit, and release messages that have not been started."""
        if self.shared is not None:
            self.shared.close()
        for inbox in list(self.inboxes):
            inbox.stop()

    def detach(self, error: Error) -> None:
        """Detach the links, except those of anonymous termini, which also serve other addresses."""
        for inbox in list(self.inboxes):
            inbox.detach(error)

    async def wait_idle(self) -> None:
        """Wait until no handler runs and no message waits for one."""
        while self.running or any(inbox.waiting for inbox in self._ring):
            await self._idle.park()


#: Code that has the message of a worker among its local variables.
_PROCESSING: Final = Workers._work_until_cancelled.__code__


class RunningRequests:
    """Number of requests of one connection that are being processed."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class Inbox(InboxSteps):
    """Messages of one link that have not been started; endpoint of the link.

    The link calls the methods of :class:`~amqp_rt.fronts.base.ReceivingEndpoint`.

    Args:
        binding: The link and its route.
        workers: The workers that process the messages.
        window: The credit window of an anonymous terminus, whose link serves other addresses too; None if
            the link is for this route alone.
    """

    route: Route
    workers: Workers

    def __init__(
        self, binding: RouteBinding, workers: Workers, window: CreditWindow | None = None
    ) -> None:
        self._owns_credit = window is None
        if window is None and workers.shared is None:
            route = binding.route
            window = CreditWindow(binding.link, messages=route.prefetch, slots=route.capacity)
        super().__init__(binding.route, workers, window)
        self.binding = binding
        #: Workers that process a request of this link.
        self.calls: set[Worker] = set()
        #: Reads requests that differ in a key and the body only.
        self.reader = PlainReader()
        #: Requests of the link's connection that run; None before the first one.
        self.running: RunningRequests | None = None
        #: Set when the messages that were held have their outcomes, because no more are taken.
        self._unheld: trio.Event | None = None
        observers = binding.container.observers
        #: Processes one message; with observers, it also tells them of it.
        self.run = workers.run if not observers else ObservedRun(binding, workers.run)
        if self.run is run_message and self.route.takes_octets:
            self.direct = self.route.target
        workers.inboxes.add(self)
        self.route.stats.links += 1

    def on_attached(self, link: ReceivingLink) -> None:
        # The link may be on another connection than before.
        self.running = None
        if self._window is not None:
            self._window.opened()
        elif self.workers.shared is not None:
            self.workers.shared.add(link)
            self.workers.rotate_unused_credit()

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        for each in deliveries:
            if isinstance(each.context, ByteStream):
                each.context.on_data()

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Cancel the handlers of requests that their callers have settled, which abandons them."""
        for each in deliveries:
            abandon(each)

    def on_flow(self, link: ReceivingLink) -> None:
        if self._window is not None:
            self._window.freed(0, 0)
        elif self.workers.shared is not None:
            self.workers.shared.flowed(link)
            self.workers.rotate_unused_credit()

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Drop waiting messages, which the peer will redeliver, and cancel requests of the link.

        Messages that the peer has settled exist only here: they are still handled, except for requests,
        whose callers have gone.
        """
        self._open = False
        calls = self.route.kind == "rpc"
        kept = [each for each in self.waiting if each.settled and each.complete and not calls]
        dropped = len(self.waiting) - len(kept)
        self.workers.load -= dropped
        self.waiting.clear()
        self.waiting += kept
        for worker in self.calls:
            worker.cancel()
        self._end_holds()
        if self._window is not None:
            self._window.close()
        elif self.workers.shared is not None:
            self.workers.shared.remove(link)
            self.workers.shared.freed(dropped)
            self.workers.rotate_unused_credit()
        self.retire()
        self.binding.container.attaching.forget(link)

    @property
    def over(self) -> bool:
        """Whether the inbox is closed: it releases unsettled messages that still arrive."""
        return not self._open

    def hold(self, delivery: IncomingDelivery, outcome: Outcome) -> bool:
        """Hold a failed *delivery* for the pause that *outcome* requests; return whether that is done.

        It is not where the peer keeps the message for that time, requests none, or has its outcome.
        The slot is free meanwhile, and the room is not. The end of the inbox ends the pause.
        """
        pause_s = requested_pause_s(outcome)
        if not pause_s or not self._open or keeps_paused(delivery.link):
            return False
        if delivery.settled or delivery.local_state is not None:
            return False
        container = self.workers.container
        pause_s = min(pause_s, container.limits.retry_held_max_s)
        if not container.start_handler(self._hold, delivery, pause_s):
            return False
        self.held[delivery] = without_pause(outcome)
        return True

    async def _hold(self, delivery: IncomingDelivery, pause_s: float) -> None:
        if self._unheld is None:
            self._unheld = trio.Event()
        try:
            with trio.move_on_after(pause_s):
                await self._unheld.wait()
        finally:
            self._end_hold(delivery)

    def _end_hold(self, delivery: IncomingDelivery) -> None:
        outcome = self.held.pop(delivery, None)
        if outcome is not None:
            settle_if_open(delivery, outcome)
            self.finished(delivery)

    def _end_holds(self) -> None:
        """Set the outcomes of the messages that are held, before the link may be detached."""
        for each in list(self.held):
            self._end_hold(each)
        if self._unheld is not None:
            self._unheld.set()

    def stop(self) -> None:
        """Take back the credit and release messages that have not been started.

        Messages that the sender has settled exist only here: they are still handled.
        """
        self._open = False
        self._end_holds()
        if self._window is not None and self._owns_credit:
            self._window.close()
        self._give_back()

    def detach(self, error: Error) -> None:
        """Detach the link, if it is for this route alone."""
        if self._owns_credit:
            self.binding.link.detach(error)
        else:
            self.retire()

    def retire(self) -> None:
        """Remove the inbox: it gets no more messages, even if its link continues."""
        if self in self.workers.inboxes:
            self.workers.inboxes.remove(self)
            self.route.stats.links -= 1

    def _give_back(self) -> None:
        kept = [each for each in self.waiting if each.settled]
        for each in self.waiting:
            if not each.settled:
                self.route.stats.released += 1
                each.settle(RELEASED)
                self.finished(each)
        self.waiting.clear()
        self.waiting += kept


def abandon(delivery: IncomingDelivery) -> bool:
    """Abandon *delivery*, which its sender has settled, if it is a request to a handler.

    A running handler is cancelled, and a waiting request is not started.

    Returns:
        Whether it is such a request.
    """
    context = delivery.context
    if isinstance(context, Worker):
        context.cancel()
    elif type(context) is float:
        delivery.context = ABANDONED
    else:
        return context is ABANDONED
    return True


async def run_message(inbox: Inbox, delivery: IncomingDelivery, worker: Worker) -> None:
    """Pass one message to the handler of a node, and settle it with the outcome."""
    route = inbox.route
    outcome: Outcome | None
    traced = False
    try:
        octets = octets_of(delivery) if route.takes_octets else None
        message = None if octets is not None else worker.message or read_message(delivery)
        within = inbox.workers.trace_within
        if delivery.payload.find(TRACE_OCTETS, 0, within) >= 0:
            traced = True
            CALLER.set(caller_of(delivery.payload))
        if message is None:
            # As in invoke(), without creating a message.
            result = route.target(octets)
        else:
            result = route.invoke(inbox.binding, delivery, message)
        if route.awaits or (result is not None and inspect.isawaitable(result)):
            result = await result
        outcome = ACCEPTED if result is None else _returned(result)
    except BaseException as error:
        outcome = _outcome_of(inbox, delivery, worker, error)
        if outcome is None:
            raise
    finally:
        if traced:
            CALLER.set(None)
    if outcome is ACCEPTED:
        route.stats.accepted += 1
        settle_if_open(delivery, outcome)
    else:
        conclude(inbox, delivery, outcome)


def _outcome_of(
    inbox: Inbox, delivery: IncomingDelivery, worker: Worker, error: BaseException
) -> Outcome | None:
    """Return the outcome for *error* of a handler; None if *error* is to be raised further.

    Raises:
        BaseException: What is to be raised instead of a group.
    """
    if isinstance(error, Exception):
        worker.failure = name_of_failure(error)
        return outcome_of_error(inbox, delivery, error)
    if isinstance(error, trio.Cancelled | BaseExceptionGroup):
        inbox.route.stats.released += 1
        settle_if_open(delivery, RELEASED)
        if isinstance(error, BaseExceptionGroup):
            raise only_cancelled(inbox.route, error) from None
    return None


def conclude(inbox: Inbox, delivery: IncomingDelivery, outcome: Outcome) -> None:
    """Count *outcome* of a handler, and settle *delivery* with it unless it is held for a pause."""
    count(inbox.route.stats, outcome)
    if outcome is ACCEPTED or not inbox.hold(delivery, outcome):
        settle_if_open(delivery, outcome)


async def run_streamed(inbox: Inbox, delivery: IncomingDelivery, worker: Worker) -> None:
    """Pass a message whose body is still arriving to its handler; see :func:`run_message`."""
    route = inbox.route
    stats = route.stats
    stream = ByteStream(delivery, inbox.binding.container.limits)
    delivery.context = stream
    outcome: Outcome
    message: Message | None = None
    try:
        message = await stream.head()
        CALLER.set(caller_of(message))
        result = route.open(inbox.binding, stream, delivery=delivery, message=message)
        if inspect.isawaitable(result):
            result = await result
        outcome = ACCEPTED if result is None else _returned(result)
    except trio.Cancelled:
        stats.released += 1
        settle_if_open(delivery, RELEASED)
        raise
    except Exception as error:
        worker.failure = name_of_failure(error)
        if delivery.aborted or not (delivery.complete or delivery.link.attached):
            # The sender aborted the message, or its link has ended: there is no outcome to send, and the
            # handler has not failed.
            stats.cancelled += 1
            log.info("%s: a message was not finished by its sender: %s", route.name, error)
            return
        attempts = None if message is None else message.delivery_count
        outcome = outcome_of_error(inbox, delivery, error, count=attempts)
    except BaseExceptionGroup as group:
        stats.released += 1
        settle_if_open(delivery, RELEASED)
        raise only_cancelled(route, group) from None
    finally:
        CALLER.set(None)
        stream.close()
    count(stats, outcome)
    if outcome is ACCEPTED or not inbox.hold(delivery, outcome):
        settle_if_open(delivery, outcome)


def read_message(delivery: IncomingDelivery) -> Message:
    """Decode the message of *delivery*.

    Raises:
        Reject: The message-format is not known (Part 2 §2.7.5 ``message-format``).
        DecodeError: The message is malformed.
    """
    if delivery.message_format != MESSAGE_FORMAT:
        raise Reject(
            f"message-format {delivery.message_format:#x} is not known here",
            condition="amqp:not-implemented",
        )
    return Message.decode(delivery.payload)


def count(stats: Stats, outcome: Outcome) -> None:
    """Add *outcome* to the statistics of a route."""
    if outcome is ACCEPTED or isinstance(outcome, Accepted):
        stats.accepted += 1
    elif isinstance(outcome, Rejected):
        stats.rejected += 1
    elif isinstance(outcome, Released):
        stats.released += 1
    else:
        stats.modified += 1


def _returned(result: Any) -> Outcome:
    """Return the outcome for a handler's result, *accepted* unless it is an outcome itself."""
    if isinstance(result, Accepted | Rejected | Released | Modified):
        return result
    return result.outcome if isinstance(result, RaisedOutcome) else ACCEPTED


#: Function with which a worker processes a message: :func:`run_message`, :func:`run_streamed`, or for
#: requests :meth:`Replies.answer <amqp_rt.container.replies.Replies.answer>`, which alone uses the worker.
Run: TypeAlias = Callable[[Inbox, IncomingDelivery, Worker], Awaitable[None]]
