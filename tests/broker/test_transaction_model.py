"""Transactions against a few lists: whatever is done in and around them, both agree on everything."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Controller, Receiving, World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runs import machine_settings

from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Modified
from amqp_rt.transactions import TransactionalState

OUTCOMES = {"accept": ACCEPTED, "release": RELEASED, "fail": Modified(delivery_failed=True)}


#: Failed messages are requeued at once; ``test_pauses.py`` has the pauses.
UNPAUSED = Limits(retry_pause_s=0)


class Item:
    """A message of the model, in the order of its place."""

    def __init__(self, place: int, body: int) -> None:
        self.place = place
        self.body = body
        self.failures = 0


class Held:
    """A delivery of the model."""

    def __init__(self, item: Item, receiver: Receiving, index: int, acquired: Any) -> None:
        self.item = item
        self.receiver = receiver
        self.index = index
        #: The transactions in which it was acquired and retired.
        self.acquired = acquired
        self.retired: Any = None
        self.outcome = ""
        #: Whether the message cannot return to its consumer.
        self.gone = False


class Open:
    """A transaction of the model."""

    def __init__(self, control: Controller) -> None:
        self.control = control
        self.id = control.declare()
        self.posts: list[int] = []


class TransactionModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(Queue("q"), limits=UNPAUSED)
        self.client = self.world.client()
        self.producer = self.client.sender("q")
        self.controls = [Controller(self.client)]
        self.receivers = [self.client.receiver("q")]
        self.available: list[Item] = []
        self.held: list[Held] = []
        self.open: list[Open] = []
        self.bodies = 0
        self.places = 0

    # --- The model ---

    def put(self, body: int) -> None:
        self.available.append(Item(self.places, body))
        self.places += 1

    def conclude(self, held: Held, outcome: str) -> None:
        self.held.remove(held)
        if outcome == "fail":
            held.item.failures += 1
        if outcome != "accept":
            self.available.append(held.item)
            self.available.sort(key=lambda item: item.place)

    def undo(self, transaction: Open) -> None:
        self.open.remove(transaction)
        for held in list(self.held):
            if held.acquired is transaction or (held.retired is transaction and held.gone):
                self.conclude(held, "release")
            elif held.retired is transaction:
                held.retired = None

    def deliver(self, data: st.DataObject, transaction: Open | None) -> None:
        receiver = data.draw(st.sampled_from(self.receivers))
        txn_id = None if transaction is None else transaction.id
        receiver.link.grant(1, properties={"txn-id": txn_id})
        self.world.pump()
        index = len(receiver.endpoint.deliveries) - 1
        self.held.append(Held(self.available.pop(0), receiver, index, transaction))

    def new_body(self) -> int:
        self.bodies += 1
        return self.bodies

    # --- What may happen ---

    @rule()
    def send(self) -> None:
        body = self.new_body()
        self.producer.send(body)
        self.put(body)

    @precondition(lambda self: len(self.open) < 4)
    @rule(data=st.data())
    def declare(self, data: st.DataObject) -> None:
        self.open.append(Open(data.draw(st.sampled_from(self.controls))))

    @precondition(lambda self: len(self.controls) < 2)
    @rule()
    def attach_control(self) -> None:
        self.controls.append(Controller(self.client))

    @precondition(lambda self: len(self.receivers) < 3)
    @rule()
    def attach(self) -> None:
        self.receivers.append(self.client.receiver("q"))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), settled=st.booleans())
    def post(self, data: st.DataObject, settled: bool) -> None:
        transaction = data.draw(st.sampled_from(self.open))
        transaction.posts.append(self.new_body())
        self.producer.post(transaction.id, self.bodies, settled=settled)

    @precondition(lambda self: self.available)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.deliver(data, None)

    @precondition(lambda self: self.available and self.open)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        self.deliver(data, data.draw(st.sampled_from(self.open)))

    @precondition(lambda self: self.open and any(not held.gone for held in self.held))
    @rule(data=st.data(), kind=st.sampled_from(sorted(OUTCOMES)), settles=st.booleans())
    def retire(self, data: st.DataObject, kind: str, settles: bool) -> None:
        held = data.draw(st.sampled_from([each for each in self.held if not each.gone]))
        transaction = held.retired or held.acquired or data.draw(st.sampled_from(self.open))
        delivery = held.receiver.endpoint.deliveries[held.index]
        state = TransactionalState(transaction.id, OUTCOMES[kind])
        if settles:
            delivery.settle(state)
        else:
            delivery.update(state)
        self.world.pump()
        held.retired, held.outcome, held.gone = transaction, kind, settles

    @precondition(lambda self: any(not (h.retired or h.acquired) for h in self.held))
    @rule(data=st.data(), kind=st.sampled_from(sorted(OUTCOMES)))
    def settle(self, data: st.DataObject, kind: str) -> None:
        free = [held for held in self.held if not (held.retired or held.acquired)]
        held = data.draw(st.sampled_from(free))
        self.conclude(held, kind)
        held.receiver.settle(OUTCOMES[kind], held.index)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        transaction = data.draw(st.sampled_from(self.open))
        assert transaction.control.discharge(transaction.id) == "accepted"
        self.open.remove(transaction)
        for body in transaction.posts:
            self.put(body)
        for held in list(self.held):
            if held.retired is transaction:
                self.conclude(held, held.outcome)
            elif held.acquired is transaction:
                held.acquired = None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        transaction = data.draw(st.sampled_from(self.open))
        assert transaction.control.discharge(transaction.id, fail=True) == "accepted"
        self.undo(transaction)

    @precondition(lambda self: len(self.controls) > 1)
    @rule()
    def lose_control(self) -> None:
        control = self.controls.pop()
        control.link.detach()
        self.world.pump()
        for transaction in [each for each in self.open if each.control is control]:
            self.undo(transaction)

    @precondition(lambda self: len(self.receivers) > 1)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        receiver = data.draw(st.sampled_from(self.receivers))
        self.receivers.remove(receiver)
        receiver.detach()
        for held in [each for each in self.held if each.receiver is receiver]:
            if held.retired is None:
                self.conclude(held, "release")
            else:
                held.gone = True

    # --- What must agree ---

    @invariant()
    def queues_are_consistent(self) -> None:
        self.world.check()

    @invariant()
    def check_waiting(self) -> None:
        messages = [Message.decode(each) for each in self.world.peek("q", 1_000)]
        found = [(message.body, message.delivery_count) for message in messages]
        assert found == [(item.body, item.failures) for item in self.available]
        stats = self.world.stats("q")
        assert (stats.available, stats.acquired) == (len(self.available), len(self.held))
        assert len(self.world.host.transactions) == len(self.open)

    @invariant()
    def check_room(self) -> None:
        posts = sum(len(each.posts) for each in self.open)
        held = self.world.host.space().get("q").held
        assert (held.held, held.pending) == (posts, 0)
        assert self.world.host.memory.held == held.bytes
        assert bool(held.bytes) == bool(posts or self.available or self.held)

    def teardown(self) -> None:
        self.client.cut()
        self.available += [held.item for held in self.held]
        self.available.sort(key=lambda item: item.place)
        stats = self.world.stats("q")
        assert (stats.available, stats.acquired) == (len(self.available), 0)
        assert len(self.world.host.transactions) == 0


TransactionModel.TestCase.settings = machine_settings()
TestTransactionModel = pytest.mark.slow(
    pytest.mark.req("R2", "R3", "R4", "R5", "R7", "R8", "R9")(TransactionModel.TestCase)
)
