"""Direct replies to requests (RabbitMQ's extension ``amq.rabbitmq.reply-to``)."""

from __future__ import annotations

import secrets
from typing import Final

from . import faults
from . import methods as m
from .faults import Fault
from .sessions import Session
from .window import DeliveryWindow

#: Pseudo-queue of RabbitMQ's direct reply-to: its consumer receives the replies to its requests.
REPLY_TO: Final = "amq.rabbitmq.reply-to"


class DirectReplies:
    """Consumer of the replies to requests of one channel.

    Args:
        session: The session of the channel.
        window: Numbers the deliveries of the channel.
    """

    def __init__(self, session: Session, window: DeliveryWindow) -> None:
        self.session = session
        self.window = window
        #: Tag of the consumer, None if there is none; address of its replies.
        self.tag: str | None = None
        self.address = ""

    def consume(self, method: m.BasicConsume, tag: str) -> None:
        """Start the consumer under *tag*, with an address of its own.

        Raises:
            Fault: The channel has one already, or the client wants to acknowledge replies.
        """
        if not method.no_ack:
            raise Fault(
                faults.PRECONDITION_FAILED, f"{REPLY_TO} has no acknowledgements: set no-ack"
            )
        if self.tag is not None:
            raise Fault(faults.PRECONDITION_FAILED, "the channel has a consumer of replies already")
        self.tag = tag
        # The address cannot be guessed: only receivers of a request know it.
        self.address = f"{REPLY_TO}.{secrets.token_urlsafe(24)}"
        self.session.engine.replies[self.address] = self.reply
        if not method.no_wait:
            self.session.write(m.BasicConsumeOk(consumer_tag=tag))

    def reply(self, address: str, properties: m.BasicProperties, body: bytes) -> bool:
        """Deliver a reply to this channel; return False if its consumer has gone or does not read.

        A consumer that does not read gets at most ``output_max`` bytes: replies have neither credit
        nor a queue to wait in.
        """
        if self.tag is None or address != self.address or self.session.ended:
            return False
        engine = self.session.engine
        if engine.output_size >= engine.limits.output_max:
            return False
        engine.write_content(
            self.session.number,
            m.BasicDeliver(
                consumer_tag=self.tag, delivery_tag=self.window.next_tag(), routing_key=address
            ),
            properties,
            body,
        )
        return True

    def end(self) -> None:
        """End the consumer, if there is one: its address is not valid any more."""
        self.tag = None
        self.session.engine.replies.pop(self.address, None)
