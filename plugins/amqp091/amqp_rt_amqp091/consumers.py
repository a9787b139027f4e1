"""Consumers of a channel: ``basic.consume``, ``basic.cancel``, and the bounds on deliveries."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Final

from amqp_rt.addresses import REPLY_TO
from amqp_rt.fronts import AmqpError, Error, Source, Symbol, Timestamp, Topology
from amqp_rt.fronts.links import REQUEUED

from . import faults
from . import methods as m
from .declaring import Declarations
from .deliveries import DeliveryWriter
from .execution import Execution
from .faults import Fault
from .links import SendingLink
from .replies import DirectReplies
from .sessions import Session
from .values import Seconds
from .window import DeliveryWindow

_EXCLUSIVE: Final = Symbol("exclusive")
_PRIORITY: Final = Symbol("priority")
_OFFSET: Final = Symbol("rabbitmq:stream-offset-spec")


class Consumers:
    """Consumers of a channel, by tag.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        window: The bounds that the consumers share.
        writer: Writes their messages.
        declarations: Has the queue declared last.
        replies: The consumer of replies to requests.
    """

    def __init__(
        self,
        session: Session,
        execution: Execution,
        window: DeliveryWindow,
        writer: DeliveryWriter,
        declarations: Declarations,
        replies: DirectReplies,
    ) -> None:
        self.session = session
        self.execution = execution
        self.window = window
        self.writer = writer
        self.declarations = declarations
        self.replies = replies
        self._by_tag: dict[str, SendingLink] = {}

    # --- bounds on deliveries ------------------------------------------------------------

    def set_bounds(self, method: m.BasicQos) -> None:
        """Set the prefetch of the channel, or of the consumers started from now on."""
        window = self.window
        window.prefetch_size = method.prefetch_size
        if method.global_:
            window.prefetch_all = method.prefetch_count
        else:
            # RabbitMQ's interpretation: the count applies to each consumer started from now on.
            window.prefetch = method.prefetch_count
        self.session.write(m.BasicQosOk())
        self.offer_credit()

    def set_flow(self, method: m.ChannelFlow) -> None:
        """Stop or restart the deliveries of the channel."""
        self.window.flowing = method.active
        self.session.write(m.ChannelFlowOk(active=method.active))
        if method.active:
            self.offer_credit()

    def offer_credit(self) -> None:
        """Offer every consumer of the channel the credit it has now."""
        for link in list(self._by_tag.values()):
            link.offer_credit()
        self.replies.offer_credit()

    def after_settling(self, link: SendingLink) -> None:
        """Offer *link* the credit that became free, or end it if it was cancelled and is done."""
        if link.once is None:
            link.offer_credit()
        elif not link.held and link.tag not in self._by_tag and link.tag != link.name:
            # The consumer was cancelled, and this was its last unsettled delivery.
            self.session.drop(link)

    # --- starting and ending -------------------------------------------------------------

    def consume(self, method: m.BasicConsume) -> None:
        """Start a consumer; the channel is held up until its link is attached.

        Raises:
            Fault: Its tag is in use, or the channel has too many links.
        """
        session = self.session
        tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
        if tag in self._by_tag or tag == self.replies.tag:
            raise Fault(faults.NOT_ALLOWED, f"consumer tag {tag!r} is in use on this channel")
        if method.queue == REPLY_TO:
            self.replies.consume(method, tag)
            return
        queue = self.declarations.queue_named(method.queue)
        handle_max = session.engine.limits.handle_max
        if len(session.links) > handle_max:
            raise Fault(
                faults.RESOURCE_ERROR,
                f"a channel has at most {handle_max} consumers and the like",
            )
        count_ready(session.engine.topology, queue)
        arguments = method.arguments
        source = Source(address=queue, default_outcome=REQUEUED)
        offset = arguments.get("x-stream-offset")
        if offset is not None:
            source.filter = {_OFFSET: _offset(offset)}
        link = SendingLink(
            session,
            self.window,
            self.writer.deliver,
            tag,
            source,
            no_ack=method.no_ack,
            prefetch=self.window.prefetch,
        )
        link.name = session.link_name(f"consume-{tag}")
        properties: dict[object, object] = {}
        if method.exclusive:
            properties[_EXCLUSIVE] = True
        priority = arguments.get("x-priority")
        if isinstance(priority, int) and not isinstance(priority, bool):
            properties[_PRIORITY] = int(priority)
        link.properties = properties
        link.on_answer = partial(self._attached, method, link)
        link.on_end = partial(self._detached, link)
        self.execution.held_up = True
        session.request(link)
        self.execution.lets_publish = True

    def _attached(self, method: m.BasicConsume, link: SendingLink, refused: Error | None) -> None:
        session = self.session
        if session.ended:
            return
        if refused is not None:
            session.links.discard(link)
            if refused.condition == "amqp:resource-locked":
                # Another consumer is exclusive, or this one asked to be while others consume.
                refused = Error("amqp:unauthorized-access", refused.description)
            session.fail(Fault.of(refused), method)
            return
        self._by_tag[link.tag] = link
        if not method.no_wait:
            session.write(m.BasicConsumeOk(consumer_tag=link.tag))
        self.execution.resume()

    def _detached(self, link: SendingLink, error: Error | None) -> None:
        """Remove a consumer whose queue was deleted or whose right was revoked, and cancel it.

        Only clients with the capability ``consumer_cancel_notify`` receive ``basic.cancel``.
        """
        session = self.session
        session.links.discard(link)
        if self._by_tag.pop(link.tag, None) is link and session.engine.hears_cancel:
            session.write(m.BasicCancel(consumer_tag=link.tag, no_wait=True))

    def cancel(self, method: m.BasicCancel) -> None:
        """End a consumer; the client can still settle its deliveries."""
        session = self.session
        tag = method.consumer_tag
        link = self._by_tag.pop(tag, None)
        if link is not None:
            link.on_end = partial(self._cancelled, link)
            link.once = 0
            if link.held:
                # The link ends with the last of its deliveries.
                link.idle = True
                topology = session.engine.topology
                if topology is not None and link.source is not None:
                    topology.idle(str(link.source.address))
            else:
                session.drop(link)
        elif tag == self.replies.tag:
            self.replies.end()
        if not method.no_wait:
            session.write(m.BasicCancelOk(consumer_tag=tag))

    def _cancelled(self, link: SendingLink, error: Error | None) -> None:
        self.session.links.discard(link)

    def end(self) -> None:
        """Forget the links, which refer to the session and are ended with it."""
        self._by_tag.clear()


def count_ready(topology: Topology | None, queue: str) -> int:
    """Return the number of messages ready in *queue*, 0 if there is no such queue.

    A missing queue is no error here: it may be created on first use, or be a node of the
    application. The answer to the link's attach decides.

    Raises:
        AmqpError: The queue is exclusive to another connection.
    """
    if topology is None:
        return 0
    try:
        return topology.queue(queue).messages
    except AmqpError as error:
        # The attach of the link reports the missing right.
        if error.condition not in ("amqp:not-found", "amqp:unauthorized-access"):
            raise
        return 0


def _offset(value: object) -> object:
    """Convert ``x-stream-offset`` to the value of an AMQP 1.0 filter."""
    if isinstance(value, Seconds):
        return Timestamp(value.value * 1000)
    return value
