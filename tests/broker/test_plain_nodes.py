"""Nodes in plain Python that serve the subscriptions of the broker without inheriting from its classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amqp_rt.broker.building import Entry, Subscription, Transactions
from amqp_rt.broker.coordinators import attach_control
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error, Outcome, Rejected
from amqp_rt.termini import Coordinator, Source
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import Declare, Declared, Discharge, TransactionalState

TOO_LATE = Rejected(Error("x:too-late"))


class OneEntry:
    """Node of one message, which answers each outcome with another."""

    def __init__(self) -> None:
        self.entry: Entry | None = Entry(Message("one").encode())
        self.outcomes: list[Any] = []
        self.transactions = Transactions(None, lambda: 0.0)

    def attach(self, link: Any) -> None:
        if isinstance(link.target, Coordinator):
            attach_control(self.transactions, link)
            return
        subscription = Subscription(self, 1, default_outcome=ACCEPTED)
        subscription.transactions = self.transactions
        link.accept(subscription)

    def serve(self, subscription: Subscription) -> None:
        entry, self.entry = self.entry, None
        if entry is not None:
            subscription.link.send(entry.payload, entry, tag=b"its own tag")

    def is_busy(self) -> bool:
        return False

    def conclude(self, subscription: Subscription, entry: Entry, outcome: Any) -> None:
        self.outcomes.append(outcome)

    def settle(self, delivery: Any, entry: Entry, outcome: Any) -> None:
        delivery.settle(TOO_LATE)

    def conclude_left(
        self,
        deliveries: list[Any],
        finish: Callable[[Any], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        for delivery in deliveries:
            finish(delivery)
        if after is not None:
            after()

    def concluded(self) -> None:
        """Deliver nothing more."""

    def unsubscribe(self, subscription: Subscription) -> None:
        self.outcomes.append("left")


def received(node: OneEntry) -> tuple[Joined, Any, Any]:
    """Return both ends, the client's session, and the delivery of the message to it."""
    joined = Joined(on_attach=node.attach)
    joined.pump()
    session = joined.client.begin()
    recorder = Recorder(credit=1)
    session.attach_receiver("r", recorder, source=Source(address="n"))
    joined.pump()
    (delivery,) = recorder.deliveries
    return joined, session, delivery


def updated(joined: Joined, delivery: Any, state: Outcome | TransactionalState) -> None:
    delivery.update(state)
    joined.pump()


def test_a_node_in_plain_python_settles_deliveries_in_its_own_way() -> None:
    node = OneEntry()
    joined, _, delivery = received(node)
    assert delivery.tag == b"its own tag"
    updated(joined, delivery, ACCEPTED)
    assert node.outcomes == [ACCEPTED]
    assert delivery.state == TOO_LATE


def test_it_settles_deliveries_of_a_transaction_too() -> None:
    node = OneEntry()
    joined, session, delivery = received(node)
    control = session.attach_sender("c", Recorder(), source=Source(), target=Coordinator())
    joined.pump()
    declaring = control.send(Message(Declare()).encode())
    joined.pump()
    assert isinstance(declaring.state, Declared)
    txn_id = declaring.state.txn_id
    updated(joined, delivery, TransactionalState(txn_id, ACCEPTED))
    assert node.outcomes == []
    discharging = control.send(Message(Discharge(txn_id, fail=False)).encode())
    joined.pump()
    assert discharging.state == ACCEPTED
    assert node.outcomes == [ACCEPTED]
    assert delivery.state == TOO_LATE
