"""Single messages that a client asks for: ``basic.get``."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from amqp_rt.fronts import Error, Source
from amqp_rt.fronts.links import REQUEUED

from . import methods as m
from .consumers import count_ready
from .declaring import Declarations
from .deliveries import DeliveryWriter
from .execution import Execution
from .faults import Fault
from .links import SendingLink
from .outgoing import OutgoingDelivery
from .routes import Routes
from .sessions import Session
from .window import DeliveryWindow

#: Links of a channel for ``basic.get``.
_LINKS_MAX: Final = 256


class Getters:
    """Links of a channel for ``basic.get``, one for each queue and mode of acknowledgement.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        window: Its unacknowledged deliveries.
        writer: Converts messages.
        declarations: Has the queue declared last.
        routes: Messages on their way to queues.
    """

    def __init__(
        self,
        session: Session,
        execution: Execution,
        window: DeliveryWindow,
        writer: DeliveryWriter,
        declarations: Declarations,
        routes: Routes,
    ) -> None:
        self.session = session
        self.execution = execution
        self.window = window
        self.writer = writer
        self.declarations = declarations
        self.routes = routes
        self._links: dict[str, SendingLink] = {}

    def get(self, method: m.BasicGet) -> None:
        """Answer with a message of the queue, or by ``get-empty``."""
        queue = self.declarations.queue_named(method.queue)
        self.routes.when_stored(queue, method, partial(self._get, queue, method))

    def _get(self, queue: str, method: m.BasicGet) -> None:
        session = self.session
        count_ready(session.engine.topology, queue)
        key = f"{'n' if method.no_ack else 'a'}{queue}"
        self.execution.held_up = True
        link = self._links.get(key)
        if link is not None and link.attached:
            self._ask(link)
            return
        if len(self._links) >= _LINKS_MAX:
            self._drop_idle()
        link = SendingLink(
            session,
            self.window,
            partial(self._deliver, queue),
            session.link_name(f"get-{queue}"),
            Source(address=queue, default_outcome=REQUEUED),
            no_ack=method.no_ack,
            prefetch=0,
        )
        link.once = 0
        link.idle = True
        link.on_answer = partial(self._attached, method, link)
        link.on_end = partial(self._detached, method, link)
        self._links[key] = link
        session.request(link)

    def _drop_idle(self) -> None:
        for key, link in list(self._links.items()):
            if not link.held:
                del self._links[key]
                self.session.drop(link)

    def _attached(self, method: m.BasicGet, link: SendingLink, refused: Error | None) -> None:
        session = self.session
        if session.ended:
            return
        if refused is not None:
            session.links.discard(link)
            session.fail(Fault.of(refused), method)
            return
        self._ask(link)

    def _detached(self, method: m.BasicGet, link: SendingLink, error: Error | None) -> None:
        self.session.links.discard(link)
        if link.draining:
            why = error or Error("amqp:not-found", "the queue has gone")
            self.session.fail(Fault.of(why), method)

    def _ask(self, link: SendingLink) -> None:
        """Request a message of the queue."""
        link.on_drained = self._answer_empty
        link.once = 1
        link.draining = True
        link.offer_credit()

    def _deliver(
        self, queue: str, link: SendingLink, payload: bytes, context: Any, settled: bool
    ) -> OutgoingDelivery:
        """Send the message by ``get-ok``.

        Raises:
            LocalProtocolError: The message is malformed.
        """
        session = self.session
        content = self.writer.convert(payload, link)
        delivery = OutgoingDelivery(link, self.window.next_tag(), context, settled)
        delivery.size = len(content.body)
        link.on_drained = None
        link.draining = False
        session.engine.write_content(
            session.number,
            m.BasicGetOk(
                delivery_tag=delivery.number,
                redelivered=content.redelivered,
                exchange=content.exchange,
                routing_key=content.routing_key,
                message_count=count_ready(session.engine.topology, queue),
            ),
            content.properties,
            content.body,
        )
        self.execution.resume()
        return delivery

    def _answer_empty(self) -> None:
        self.session.write(m.BasicGetEmpty())
        self.execution.resume()

    def end(self) -> None:
        """Forget the links, which refer to the session and are ended with it."""
        self._links.clear()
