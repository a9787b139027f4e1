"""Inlets of exchanges: messages of 1.0 peers go to the queues to which an exchange routes them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Generator, Mapping, Sequence
from typing import Final

from ...errors import AmqpError
from ...fronts.base import IncomingDelivery, ReceivingEndpoint, ReceivingLink
from ...loglimit import LogLimiter
from ...message import Message
from ...outcomes import RELEASED, Error, Rejected, Released, rejected
from ...transactions import TransactionalState
from ..transactions import UNKNOWN_TRANSACTION
from .copies import Copies, Copy
from .declared import DeclaredSpace, Deletions
from .last_messages import LastMessage

_log = logging.getLogger("amqp_rt.broker")

#: Credit of a link that sends to an exchange.
_WINDOW: Final = 1_000
#: Condition with which a queue that is out of service refuses everything.
_FAILED: Final = "amqp:internal-error"
#: Limit of one turn's work on messages to an exchange, in frames, and number of queues between two
#: checks of it.
_WORK_MAX: Final = 200
_QUEUES_OF_A_STEP: Final = 10
_TOO_LONG: Final = rejected(
    "amqp:resource-limit-exceeded",
    "the exchange leads to too many queues for a message of a transaction: send it outside of one",
)
_GONE: Final = rejected("amqp:not-found", "the queue has been deleted")


class ExchangeInlet:
    """Endpoint for messages of 1.0 peers to an exchange (fronts.base.ReceivingEndpoint)."""

    def __init__(self, space: DeclaredSpace, name: str, key: str, log_limiter: LogLimiter) -> None:
        self._space = space
        self._host = space.host
        self._log_limiter = log_limiter
        self._name = name
        self._key = key
        #: Deliveries that wait for their turn, and the remaining work on the current one.
        self._waiting: deque[tuple[ReceivingLink, IncomingDelivery]] = deque()
        self._work: Generator[int, None, None] | None = None

    def on_attached(self, link: ReceivingLink) -> None:
        """Grant a fixed credit: queues without room refuse, as room in all cannot be promised."""
        link.grant(_WINDOW)

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Put each message into all its queues; release those without a queue.

        Long work continues in later turns, and later deliveries wait for it.
        """
        for delivery in deliveries:
            if type(delivery.state) is TransactionalState:
                self._deliver_now(link, delivery)
            else:
                self._waiting.append((link, delivery))
        if self._work is None:
            self.resume()
        self.on_flow(link)

    def _deliver_now(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Handle a post of a transaction at once, since the discharge may precede the next turn.

        A message with more work than one turn allows is refused before any queue gets it.
        """
        if self._host.transactions.find_for(link, delivery) is None:
            link.detach(UNKNOWN_TRANSACTION)
            return
        left = _WORK_MAX
        names: dict[str, None] = {}
        try:
            for work in self._route(delivery, names):
                left -= work
                if left <= 0:
                    break
        except Exception as error:
            self._refuse(link, delivery, error)
            return
        if left <= 0 or len(names) > _WORK_MAX:
            self._settle(link, delivery, _TOO_LONG)
            return
        for _ in self._distribute(link, delivery, names, ()):
            pass

    def resume(self) -> None:
        """Work on the waiting deliveries as far as one turn allows."""
        left = _WORK_MAX
        while self._work is not None or self._waiting:
            if self._work is None:
                self._work = self._spread(*self._waiting.popleft())
            for work in self._work:
                left -= work
                if left <= 0:
                    self._host.turns.resume_later(self)
                    return
            self._work = None

    def _route(
        self, delivery: IncomingDelivery, names: dict[str, None]
    ) -> Generator[int, None, tuple[tuple[str], Mapping[str, object]]]:
        """Add to *names* the queues to which the exchange routes a message of AMQP 1.0.

        Without a key in the address, the routing key is the message's subject. Yields the work done
        since the last step, in frames; returns its keys and headers.

        Raises:
            AmqpError: There is no such exchange, or the message is malformed.
        """
        message = Message.decode(delivery.payload, self._host.limits)
        keys = (self._key or message.subject or "",)
        headers = message.application_properties
        yield from self._space.exchanges.routing(self._name, keys, headers, names)
        return keys, headers

    def _spread(
        self, link: ReceivingLink, delivery: IncomingDelivery
    ) -> Generator[int, None, None]:
        """Put a message into its queues; yield the work done since the last step, in frames."""
        names: dict[str, None] = {}
        with Deletions(self._space) as gone:
            try:
                found = yield from self._route(delivery, names)
            except Exception as error:
                # Deliveries behind this one must not be affected.
                self._refuse(link, delivery, error)
                return
            if self._space.last_messages.wanted(self._name):
                self._remember(link, delivery, *found)
            yield from self._distribute(link, delivery, names, gone)

    def _remember(
        self,
        link: ReceivingLink,
        delivery: IncomingDelivery,
        keys: Sequence[str],
        headers: Mapping[str, object],
    ) -> None:
        """Remember the message of *delivery*, which is in no transaction, for new bindings."""
        message_format = delivery.message_format
        payload = self._host.services.entry_factory.without_delivery_annotations(
            delivery.payload, message_format
        )
        self._space.last_messages.remember(
            self._name,
            LastMessage(payload, message_format, keys, headers, link.peer.container_id),
        )

    def _settle(
        self, link: ReceivingLink, delivery: IncomingDelivery, outcome: Rejected | Released
    ) -> None:
        """Settle *delivery*, which no queue takes; in a transaction by its rules."""
        if not self._host.refuse_post(link, delivery, outcome):
            delivery.settle(outcome)

    def _refuse(self, link: ReceivingLink, delivery: IncomingDelivery, error: Exception) -> None:
        """Reject *delivery*, which cannot be routed because of *error*."""
        if not isinstance(error, AmqpError):
            # Exchange types of the application, for example, may raise any exception.
            left_out = self._log_limiter.admit(self._name, self._host.clock.wall())
            if left_out is not None:
                _log.error(
                    "message not routed: exchange %.200r of virtual host %r: unexpected error%s",
                    self._name,
                    self._space.name,
                    left_out,
                    exc_info=error,
                )
            error = AmqpError(
                f"exchange {self._name!r:.200}: an unexpected error, which is in the broker's log",
                condition=_FAILED,
            )
        self._settle(link, delivery, Rejected(Error.of(error)))

    def _distribute(
        self,
        link: ReceivingLink,
        delivery: IncomingDelivery,
        names: dict[str, None],
        gone: Container[str],
    ) -> Generator[int, None, None]:
        host = self._host
        found: list[tuple[str, ReceivingEndpoint]] = []
        for name in names:
            each = None if name in gone else host.relay(name, link)
            if isinstance(each, Error) and each.condition == _FAILED:
                # A queue that is out of service must not miss its copy: the sender has to retry.
                self._settle(link, delivery, Rejected(each))
                return
            if each is not None and not isinstance(each, Error):
                found.append((name, each))
            if len(found) % _QUEUES_OF_A_STEP == _QUEUES_OF_A_STEP - 1:
                yield _QUEUES_OF_A_STEP
        if not found:
            self._settle(link, delivery, RELEASED)
        elif len(found) == 1 and len(names) < _QUEUES_OF_A_STEP:
            found[0][1].deliver(link, [delivery])
        else:
            payload = host.services.entry_factory.without_delivery_annotations(
                delivery.payload, delivery.message_format
            )
            copies = Copies(delivery, len(found), payload)
            for at, (name, inlet) in enumerate(found, 1):
                copy = Copy(copies)
                try:
                    if name in gone:
                        copy.settle(_GONE)
                    else:
                        inlet.deliver(link, [copy])
                except Exception as error:
                    # The other queues get their copies, and the sender gets this error.
                    self._settle(link, copy, Rejected(Error.of(host.fail(inlet, error))))
                if not at % _QUEUES_OF_A_STEP:
                    yield 5 * _QUEUES_OF_A_STEP

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: only complete messages are handled."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the outcome is final."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Grant more credit if the link has little, unless too many deliveries wait."""
        if link.attached and link.credit * 2 <= _WINDOW and len(self._waiting) < _WINDOW:
            link.grant(_WINDOW)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Do nothing: no room was reserved for the link."""
