"""Direct replies to requests (RabbitMQ's extension ``amq.rabbitmq.reply-to``).

Their consumer is a link with a dynamic source: the container creates an address for it that cannot be guessed,
and peers of all protocols send their replies there.
"""

from __future__ import annotations

from functools import partial

from amqp_rt.addresses import REPLY_TO
from amqp_rt.fronts import Error, Source, Symbol

from . import faults
from . import methods as m
from .deliveries import DeliveryWriter
from .execution import Execution
from .faults import Fault
from .links import RepliesLink
from .sessions import Session
from .window import DeliveryWindow


class DirectReplies:
    """Consumer of the replies to requests of one channel.

    A consumer that does not read has at most ``output_max`` bytes waiting for it. Replies of 1.0 wait for room at
    their senders, within the credit of these; those of 0-9-1 and 0-10 are refused, as for an address without a
    consumer.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        window: Numbers the deliveries of the channel.
        writer: Writes the replies.
    """

    def __init__(
        self, session: Session, execution: Execution, window: DeliveryWindow, writer: DeliveryWriter
    ) -> None:
        self.session = session
        self.execution = execution
        self.window = window
        self.writer = writer
        #: Link of the consumer; None if there is none.
        self._link: RepliesLink | None = None

    @property
    def tag(self) -> str | None:
        """Tag of the consumer; None if there is none."""
        return None if self._link is None else self._link.tag

    @property
    def address(self) -> str:
        """Address of the consumer's replies; only those who receive a request know it."""
        source = None if self._link is None else self._link.source
        return "" if source is None else str(source.address)

    def consume(self, method: m.BasicConsume, tag: str) -> None:
        """Start the consumer under *tag*; the channel is held up until it has an address.

        Raises:
            Fault: The channel has one already, or the client wants to acknowledge replies.
        """
        if not method.no_ack:
            raise Fault(
                faults.PRECONDITION_FAILED, f"{REPLY_TO} has no acknowledgements: set no-ack"
            )
        if self._link is not None:
            raise Fault(faults.PRECONDITION_FAILED, "the channel has a consumer of replies already")
        session = self.session
        link = RepliesLink(
            session,
            self.window,
            self.writer.deliver,
            tag,
            Source(dynamic=True, capabilities=(Symbol(REPLY_TO),)),
            no_ack=True,
            prefetch=0,
        )
        link.name = session.link_name(f"consume-{tag}")
        link.on_answer = partial(self._attached, method, link)
        link.on_end = partial(self._detached, link)
        self._link = link
        # Messages published behind this method need the address, and wait for it.
        self.execution.held_up = True
        session.request(link)

    def _attached(self, method: m.BasicConsume, link: RepliesLink, refused: Error | None) -> None:
        session = self.session
        if session.ended:
            return
        if refused is not None:
            self._link = None
            session.links.discard(link)
            session.fail(Fault.of(refused), method)
            return
        if not method.no_wait:
            session.write(m.BasicConsumeOk(consumer_tag=link.tag))
        self.execution.resume()

    def _detached(self, link: RepliesLink, error: Error | None) -> None:
        """Remove the consumer, whose right was revoked, and cancel it."""
        session = self.session
        session.links.discard(link)
        self._link = None
        if session.engine.hears_cancel:
            session.write(m.BasicCancel(consumer_tag=link.tag, no_wait=True))

    def offer_credit(self) -> None:
        """Offer the consumer the credit it has now."""
        if self._link is not None:
            self._link.offer_credit()

    def end(self) -> None:
        """End the consumer, if there is one: its address is not valid any more."""
        link, self._link = self._link, None
        if link is not None:
            self.session.drop(link)
