"""Messages to consumers, as frames of ``basic.deliver``."""

from __future__ import annotations

from typing import Any, Final

from amqp_rt.fronts import AmqpError, LocalProtocolError
from amqp_rt.fronts.recent import OCTETS_MAX
from amqp_rt.fronts.splicing import parts_of

from . import methods as m
from .codec import write_header, write_shortstr
from .contents import BASIC
from .frames import delivered_frames
from .links import SendingLink
from .messages import Content, from_message
from .outgoing import OutgoingDelivery
from .recent import Delivered
from .sessions import Session
from .values import ContentHeader
from .window import DeliveryWindow

_DELIVER_CODE: Final = m.BasicDeliver.code.to_bytes(4, "big")


class DeliveryWriter:
    """Converts messages of queues to 0-9-1 and writes them.

    Args:
        session: The session of the channel.
        window: Numbers the deliveries of the channel.
    """

    def __init__(self, session: Session, window: DeliveryWindow) -> None:
        self.session = session
        self.window = window
        self._engine = session.engine
        #: Parts of deliveries of late, encoded, by the octets of their messages.
        self._recent = session.engine.recents.delivered

    def deliver(
        self, link: SendingLink, payload: bytes, context: Any, settled: bool
    ) -> OutgoingDelivery:
        """Send an encoded AMQP 1.0 message to a consumer by ``basic.deliver``.

        Raises:
            LocalProtocolError: The message is malformed.
        """
        engine, delivered = self._engine, self._recent
        source = link.source
        address = "" if source is None else str(source.address)
        parts = parts_of(payload, address)
        known = None if parts is None else delivered.get(parts.key)
        if parts is None or known is None:
            content = self.convert(payload, link)
            body = content.body
            known = _delivered(content)
            place = b"" if known is None else known.place
            if (
                parts is not None
                and known is not None
                and len(payload) - len(parts.body) <= OCTETS_MAX
            ):
                delivered.put(parts.key, known)
        else:
            content = None
            body = parts.body
            place = parts.place or known.place
        delivery = OutgoingDelivery(link, self.window.next_tag(), context, settled)
        delivery.size = len(body)
        octets = None
        if known is not None:
            octets = delivered_frames(
                self.session.number,
                link.said or _said_to(link),
                delivery.number,
                known.redelivered,
                place,
                known.properties,
                body,
                engine.frame_max_out,
            )
        if octets is not None:
            engine.write_octets(octets)
            return delivery
        # The message needs several frames, or its properties do not fit a frame.
        content = content or self.convert(payload, link)
        engine.write_content(
            self.session.number,
            m.BasicDeliver(
                consumer_tag=link.tag,
                delivery_tag=delivery.number,
                redelivered=content.redelivered,
                exchange=content.exchange,
                routing_key=content.routing_key,
            ),
            content.properties,
            content.body,
        )
        return delivery

    def convert(self, octets: bytes, link: SendingLink) -> Content:
        """Convert an encoded AMQP 1.0 message from *link* to 0-9-1.

        Raises:
            LocalProtocolError: The message is malformed.
        """
        address = "" if link.source is None else str(link.source.address)
        try:
            return from_message(octets, address, self.session.engine.limits)
        except AmqpError as error:
            raise LocalProtocolError(f"the message is malformed: {error.description}") from error


def _delivered(content: Content) -> Delivered | None:
    """Encode the parts of a delivery before its body, for messages alike; None if a value does not
    fit its field.
    """
    try:
        return Delivered(
            content.redelivered,
            write_shortstr(content.exchange) + write_shortstr(content.routing_key),
            write_header(ContentHeader(BASIC, 0, content.properties))[12:],
        )
    except ValueError:
        return None


def _said_to(link: SendingLink) -> bytes:
    """Encode ``basic.deliver`` up to the consumer-tag of *link*, and keep it there."""
    link.said = _DELIVER_CODE + write_shortstr(link.tag)
    return link.said
