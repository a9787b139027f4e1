"""Settling deliveries: ``basic.ack``, ``basic.reject``, ``basic.nack`` and ``basic.recover``."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from amqp_rt.fronts import ACCEPTED, Outcome, Rejected
from amqp_rt.fronts.links import REQUEUED

from . import faults
from . import methods as m
from .consumers import Consumers
from .execution import Execution
from .faults import Fault
from .links import SendingLink
from .outgoing import OutgoingDelivery
from .sessions import Session
from .transactions import Transactions
from .window import DeliveryWindow

#: Outcome of a reject or nack without requeue: the message is dead-lettered.
DISCARDED: Final = Rejected()
#: Deliveries that are settled between two checks of the work done, and the cost of each in frames:
#: settling one may send another.
_DELIVERIES_OF_A_STEP: Final = 10
_DELIVERY_WORK: Final = 5


class Settlement:
    """Passes the outcomes that a client sends to the queues.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        window: Its unacknowledged deliveries.
        consumers: Its consumers, which get the credit that becomes free.
        transactions: Its transactions, to which settlements belong where it has them.
    """

    def __init__(
        self,
        session: Session,
        execution: Execution,
        window: DeliveryWindow,
        consumers: Consumers,
        transactions: Transactions,
    ) -> None:
        self.session = session
        self.execution = execution
        self.window = window
        self.consumers = consumers
        self.transactions = transactions

    def acknowledge(self, method: m.BasicAck) -> None:
        """Accept deliveries."""
        self.settle(method.delivery_tag, multiple=method.multiple, outcome=ACCEPTED)

    def reject(self, method: m.BasicReject) -> None:
        """Requeue or dead-letter a delivery."""
        outcome = REQUEUED if method.requeue else DISCARDED
        self.settle(method.delivery_tag, multiple=False, outcome=outcome)

    def nack(self, method: m.BasicNack) -> None:
        """Requeue or dead-letter deliveries (RabbitMQ's extension)."""
        outcome = REQUEUED if method.requeue else DISCARDED
        self.settle(method.delivery_tag, multiple=method.multiple, outcome=outcome)

    def recover(self, method: m.BasicRecover) -> None:
        """Requeue all deliveries of the channel, and answer."""
        self._recover(method.requeue)
        self.session.write(m.BasicRecoverOk())

    def recover_async(self, method: m.BasicRecoverAsync) -> None:
        """Requeue all deliveries of the channel, without an answer."""
        self._recover(method.requeue)

    def _recover(self, requeue: bool) -> None:
        if not requeue:
            raise Fault(
                faults.NOT_IMPLEMENTED, "messages go back to their queues: recover with requeue"
            )
        unacked = self.window.unacked.values()
        self._settle_all([each for each in unacked if not each.enlisted], REQUEUED)

    def settle(self, tag: int, *, multiple: bool, outcome: Outcome) -> None:
        """Settle the delivery with *tag* with *outcome*; with *multiple*, all up to it (§1.8.3.13).

        Raises:
            Fault: No unsettled delivery has this tag.
        """
        unacked = self.window.unacked
        if not multiple:
            found = unacked.get(tag)
            if found is None or found.enlisted:
                raise Fault(faults.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
            self._settle([found], outcome)
            return
        if tag and (tag > self.window.last_tag or not any(n <= tag for n in unacked)):
            raise Fault(faults.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        chosen = []
        for number, delivery in unacked.items():
            if tag and number > tag:
                break
            if not delivery.enlisted:
                chosen.append(delivery)
        self._settle_all(chosen, outcome)

    def _settle_all(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Settle *deliveries* with *outcome*; many of them a few at a time."""
        if len(deliveries) <= _DELIVERIES_OF_A_STEP:
            self.session.engine.spend(_DELIVERY_WORK * len(deliveries))
            self._settle(deliveries, outcome)
        else:
            self.execution.run(self._settle_in_steps(deliveries, outcome))

    def _settle_in_steps(
        self, deliveries: list[OutgoingDelivery], outcome: Outcome
    ) -> Generator[int, None, None]:
        unacked = self.window.unacked
        size = _DELIVERIES_OF_A_STEP
        for at in range(0, len(deliveries), size):
            # Some may have been settled or taken away since.
            chosen = [each for each in deliveries[at : at + size] if each.number in unacked]
            self._settle(chosen, outcome)
            self.session.engine.flush()
            yield _DELIVERY_WORK * size

    def _settle(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Settle *deliveries* with *outcome*: enlisted in the transaction if the channel has one,
        else with the other settlements of this chunk.
        """
        if self.transactions.control is not None:
            self.transactions.enlist(deliveries, outcome)
            return
        engine = self.session.engine
        for delivery in deliveries:
            link = delivery.link
            link.forget(delivery)
            # A detached link belongs to a queue deleted meanwhile: settling has no effect.
            if link.attached:
                delivery.state = outcome
                delivery.settled = True
                delivery.remote_settled = True
                engine.answer(self.conclude, link, delivery)

    def conclude(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Pass outcomes of *deliveries* to the queue, then offer the credit that became free."""
        if link.attached:
            link.endpoint.on_outcomes(link, deliveries)
            self.consumers.after_settling(link)
            if self.window.prefetch_all or self.window.prefetch_size:
                self.consumers.offer_credit()
