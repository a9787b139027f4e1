"""Handlers of whole links: sources that feed a peer, and handlers of ``@node.link``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

import trio

from ..errors import AmqpError, LinkDetached
from ..fronts.base import SND_MIXED, SND_SETTLED, OutgoingDelivery, ReceivingLink, SendingLink
from ..limits import Limits
from ..message import Message
from ..observers import LinkObserver, ObservedOperation, error_of, error_of_outcome
from ..outcomes import ACCEPTED, Error, Received
from ..termini import Source
from ..trace_context import with_trace
from ..transactions import DeliveryState
from .codecs import Codecs
from .composing import make_message
from .failures import log_failure, only_cancelled
from .handling import TURN_MESSAGES, TURN_S
from .links import LinkHandle, Member
from .raising import RaisedOutcome
from .receiving import Receiver
from .routes import RouteBinding
from .sending import Sender

#: Seconds that a generator has to yield more before a drain is answered.
_DRAIN_PATIENCE_S: Final = 0.01


def _filter(binding: RouteBinding) -> Mapping[object, object]:
    asked = binding.asked
    return (asked.filter if isinstance(asked, Source) else None) or {}


def message_of(value: Any, codecs: Codecs) -> Message:
    """Return a handler's result or item as a message."""
    return value if isinstance(value, Message) else make_message(value, {}, codecs.encoding)


class SourceLink:
    """Link that a ``@source`` generator feeds, as passed to the generator."""

    __slots__ = ("address", "captures", "filter", "link", "peer")

    def __init__(self, binding: RouteBinding) -> None:
        self.link: SendingLink = binding.link
        self.address = binding.address
        self.captures = binding.captures
        self.peer = binding.peer
        #: The filters that the peer requested, by name (Part 3 §3.5.8).
        self.filter: Mapping[object, object] = _filter(binding)

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def properties(self) -> Mapping[object, object]:
        """Link properties of the peer's attach."""
        return self.link.properties

    @property
    def credit(self) -> int:
        """Number of messages that the peer accepts now."""
        return self.link.credit

    @property
    def draining(self) -> bool:
        """Whether the peer requests the available messages now, without waiting for more."""
        return self.link.draining

    def __repr__(self) -> str:
        return f"<SourceLink {self.name!r} from {self.address!r}, credit {self.credit}>"


class SourceFeed:
    """Feed of one link by the generator of a ``@source``, no faster than the link's credit."""

    def __init__(self, binding: RouteBinding) -> None:
        self.binding = binding
        self.route = binding.route
        self.link: SendingLink = binding.link
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None
        #: Whether the generator has yielded a message that has not been sent.
        self._holds = False
        self._answering_drain = False
        #: Observer of the messages; None without observers.
        self._observer: LinkObserver | None = None
        self._unsettled: set[OutgoingDelivery] = set()
        self.finished = trio.Event()
        self.route.stats.links += 1

    def on_attached(self, link: SendingLink) -> None:
        self.link = self.binding.link = link
        self._observer = self.binding.observe("send")
        self.binding.container.feeds.add(self)
        self.binding.container.start_handler(self._run)

    def on_credit(self, link: SendingLink) -> None:
        self._drain_soon()
        self._wake()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        for each in deliveries:
            if each.remote_settled or not isinstance(each.state, Received | None):
                each.settle()
                self._unsettled.discard(each)
                if each.context is not None:
                    each.context.end(error_of_outcome(each.state))
        self._wake()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self.stop()
        for each in self._unsettled:
            if each.context is not None:
                each.context.end("amqp:link:detached")
        self.binding.container.feeds.discard(self)
        self.binding.container.attaching.forget(link)
        self.route.stats.links -= 1

    def stop(self) -> None:
        """Close the generator. The link stays until its connection ends."""
        self._scope.cancel()

    async def _run(self) -> None:
        error: Error | None = None
        with self._scope:
            try:
                await self._feed()
            except trio.Cancelled:
                raise
            except Exception as failure:
                error = reason(self.binding, failure)
            except BaseExceptionGroup as group:
                raise only_cancelled(self.route, group) from None
            finally:
                self.finished.set()
        if not self._scope.cancelled_caught:
            # To the peer, a detach is the end of the source, but here only the container may be
            # stopping.
            self.link.detach(error)

    async def _feed(self) -> None:
        route = self.route
        link = self.link
        values = route.open(self.binding, SourceLink(self.binding))
        if inspect.isawaitable(values):
            values = await values
        settled = link.snd_settle_mode == SND_SETTLED or (
            link.snd_settle_mode == SND_MIXED and route.mode == "copy"
        )
        outcome: DeliveryState | None = None
        count = 0
        since = trio.current_time()
        async with aclosing(values):
            while True:
                try:
                    value = await values.asend(outcome)
                except StopAsyncIteration:
                    break
                message = message_of(value, self.binding.container.codecs)
                operation = None if self._observer is None else self._observer.begin(message)
                if operation is None:
                    sending = await self._send(message, None, settled=settled)
                else:
                    sending = await self._send_observed(message, operation, settled=settled)
                self._drain_soon()
                route.stats.sent += 1
                if not settled:
                    self._unsettled.add(sending)
                if route.mode == "move":
                    while sending in self._unsettled:
                        await self._wait()
                    outcome = ACCEPTED if settled else sending.state
                count += 1
                if count >= TURN_MESSAGES or trio.current_time() - since > TURN_S:
                    await trio.lowlevel.checkpoint()
                    count = 0
                    since = trio.current_time()
        # The end of a source ends the link, once all messages are settled and have left.
        while self._unsettled or (link.attached and not link.writable):
            await self._wait()
        link.drained()

    async def _send(
        self, message: Message, operation: ObservedOperation | None, *, settled: bool
    ) -> OutgoingDelivery:
        link = self.link
        payload = message.buffers()
        self._holds = True
        while not (link.credit and link.writable):
            await self._wait()
        sending = link.send(payload, operation, settled=settled)
        self._holds = False
        return sending

    async def _send_observed(
        self, message: Message, operation: ObservedOperation, *, settled: bool
    ) -> OutgoingDelivery:
        """Send *message* with the trace context of *operation*, which ends with its outcome or an exception."""
        traced = with_trace(message, operation.trace)
        try:
            sending = await self._send(traced, operation, settled=settled)
        except BaseException as error:
            operation.end("cancelled" if not isinstance(error, Exception) else error_of(error))
            raise
        if settled:
            operation.end()
        return sending

    def _drain_soon(self) -> None:
        link = self.link
        if link.draining and link.credit and not self._answering_drain:
            self._answering_drain = True
            self.binding.container.start_handler(self._answer_drain)

    async def _answer_drain(self) -> None:
        """Return unused credit once the generator has had time to use it."""
        await trio.sleep(_DRAIN_PATIENCE_S)
        self._answering_drain = False
        if not self._holds:
            self.link.drained()

    async def _wait(self) -> None:
        """Wait for an event of the link."""
        self._task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(_abort)
        finally:
            self._task = None

    def _wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)


def _abort(_raise_cancel: Any) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.SUCCEEDED


def reason(binding: RouteBinding, failure: Exception) -> Error:
    """Return the error for the peer whose link's handler ended with *failure*, and log it."""
    if isinstance(failure, RaisedOutcome):
        return Error.of(failure)
    route = binding.route
    route.stats.failed += 1
    log_failure(binding.container, route, f"for a link to {binding.address!r}", failure)
    return Error("amqp:internal-error", "its handler failed")


class ServedReceiver(Receiver):
    """Receiver on a link that the peer attached, for the handler of a ``@node.link``.

    Iterating over it ends when the peer detaches without an error, and when the container stops.
    """

    def __init__(self, handler: LinkHandler, binding: RouteBinding) -> None:
        super().__init__(
            handler,
            binding.address,
            name=binding.link.name,
            credit=binding.route.prefetch,
            streaming=binding.route.streaming,
        )
        self.binding = binding
        self._handler = handler

    def on_attached(self, link: ReceivingLink) -> None:
        super().on_attached(link)
        self.address = self.binding.address
        self._handler.start()

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        if error is None and not self.closed:
            # A regular detach by the sender means that no more messages follow.
            self._ended = True
        super().on_detached(link, error, closed)
        self._handler.ended(link)


class ServedSender(Sender):
    """Sender on a link that the peer attached, for the handler of a ``@node.link``."""

    def __init__(self, handler: LinkHandler, binding: RouteBinding) -> None:
        super().__init__(handler, binding.address, name=binding.link.name)
        self.binding = binding
        #: The filters that the peer requested, by name (Part 3 §3.5.8).
        self.filter: Mapping[object, object] = _filter(binding)
        self._handler = handler

    def on_attached(self, link: SendingLink) -> None:
        super().on_attached(link)
        # The target is the peer's own address; ours is the source.
        self.address = self.binding.address
        self._handler.start()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        super().on_detached(link, error, closed)
        self._handler.ended(link)

    def finish(self) -> None:
        """Cancel the handler, which cannot notice otherwise that the container stops."""
        self._handler.cancel()


class LinkHandler:
    """Handler of a ``@node.link`` for one link, which is detached when the handler returns."""

    #: Only the peer can attach again a link that it attached.
    ending = False
    may_be_replaced = False

    def __init__(self, binding: RouteBinding) -> None:
        self.binding = binding
        self.handle: ServedReceiver | ServedSender
        self.finished = trio.Event()
        self._scope = trio.CancelScope()
        self._stopped = False
        binding.route.stats.links += 1

    def receive(self) -> ServedReceiver:
        """Create the endpoint of a link on which the peer sends."""
        self.handle = handle = ServedReceiver(self, self.binding)
        return handle

    def send(self) -> ServedSender:
        """Create the endpoint of a link on which the peer receives."""
        self.handle = handle = ServedSender(self, self.binding)
        return handle

    def start(self) -> None:
        """Start the handler, now that the link is attached."""
        self.binding.container.feeds.add(self)
        self.binding.container.start_handler(self._run)

    @property
    def limits(self) -> Limits:
        """Limits of the connection."""
        return self.binding.container.limits

    @property
    def codecs(self) -> Codecs:
        """Codecs of payloads."""
        return self.binding.container.codecs

    def add(self, member: Member) -> None:
        """Do nothing: the peer's attach attaches the link, not ours."""

    def remove(self, member: Member) -> None:
        """Do nothing when the handle has closed its link."""

    def follow(self, member: LinkHandle, error: Error) -> bool:
        """Return False: the peer attached the link, and redirects are for it to follow."""
        return False

    def returns(self, member: Member, error: AmqpError, *, ended: bool) -> bool:
        """Return False: the peer attached the link, and may attach it again."""
        return False

    def ended(self, link: ReceivingLink | SendingLink) -> None:
        """Remove the link, which has ended; the handler is notified by its handle."""
        self.binding.route.stats.links -= 1
        self.binding.container.attaching.forget(link)

    def stop(self) -> None:
        """Let the handler finish. The link stays until its connection ends."""
        self._stopped = True
        self.handle.finish()

    def cancel(self) -> None:
        """Cancel the handler."""
        self._scope.cancel()

    async def _run(self) -> None:
        with self._scope:
            await self._handle()

    async def _handle(self) -> None:
        error: Error | None = None
        route = self.binding.route
        try:
            await route.open(self.binding, self.handle)
        except trio.Cancelled:
            raise
        except LinkDetached:
            pass  # The handler waited for more, and the peer has detached
        except Exception as failure:
            error = reason(self.binding, failure)
        except BaseExceptionGroup as group:
            raise only_cancelled(route, group) from None
        finally:
            self.finished.set()
            self.binding.container.feeds.discard(self)
            if error is not None or not self._stopped:
                self.binding.link.detach(error)
