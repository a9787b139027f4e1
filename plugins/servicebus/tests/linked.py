"""An entity with clients on links, joined in memory."""

from __future__ import annotations

from typing import Any

from amqp_rt_servicebus.messages import BATCH_FORMAT
from amqp_rt_servicebus.senders import Sender
from entities import Bench

from amqp_rt import Message
from amqp_rt.broker.building import Intake, Transactions
from amqp_rt.broker.coordinators import attach_control
from amqp_rt.codec.primitives import write_binary
from amqp_rt.fronts import (
    ACCEPTED,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Outcome,
    Source,
    Target,
    TransactionalState,
)
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.testing.pairs import Joined, Recorder


class Connection:
    """A client with links that send to, receive from, and control transactions of an entity."""

    def __init__(self, **options: Any) -> None:
        self.bench = Bench(**options)
        entity = self.bench.entity
        self.intake = Intake(entity)
        self.intake.duplicates = entity.duplicates
        # The services of a host.
        self.clock = self.bench.time
        self.limits = DEFAULT_LIMITS
        self.transactions = Transactions(None, self.clock.monotonic)
        self.joined = Joined(on_attach=self.attach)
        self.joined.pump()
        self.session = self.joined.client.begin()
        self.names = 0

    def attach(self, link: Any) -> None:
        if isinstance(link.target, Coordinator):
            attach_control(self.transactions, link)
        elif hasattr(link, "send"):
            subscription = self.bench.entity.consume(settled=False)
            subscription.transactions = self.transactions
            link.accept(subscription)
        else:
            entity = self.bench.entity
            link.accept(Sender(self.intake, entity, self))

    def sender(self) -> Any:
        self.names += 1
        link = self.session.attach_sender(f"s{self.names}", Recorder(), target=Target(address="q"))
        self.joined.pump()
        return link

    def send(self, link: Any, message: Message, state: Any = None) -> Any:
        """Send *message*; return the outcome."""
        return self.send_payload(link, bytes(message.encode()), 0, state)

    def send_batch(self, link: Any, messages: list[Message], state: Any = None) -> Any:
        """Send *messages* as a batch, each in a data section; return the outcome."""
        return self.begin_batch(link, messages, state).state

    def begin_batch(self, link: Any, messages: list[Message], state: Any = None) -> Any:
        """Send *messages* as a batch; return the delivery."""
        out = bytearray()
        for each in messages:
            out += b"\x00\x53\x75"
            write_binary(out, bytes(each.encode()))
        return self.begin(link, bytes(out), BATCH_FORMAT, state)

    def send_payload(self, link: Any, payload: bytes, message_format: int, state: Any) -> Any:
        """Send an encoded message; return the outcome."""
        return self.begin(link, payload, message_format, state).state

    def begin(self, link: Any, payload: bytes, message_format: int, state: Any) -> Any:
        """Send an encoded message; return the delivery."""
        delivery = link.send(payload, state=state, message_format=message_format)
        self.joined.pump()
        return delivery

    def may_send(self, peer: Any, address: str) -> None:
        """Return None: everything is allowed."""

    def start(self, task: Any, *arguments: object) -> bool:
        """Return False: nothing waits here."""
        return False

    def has_other(self, link: Any) -> bool:
        """Return False: there is one entity."""
        return False

    def receiver(self, credit: int) -> Recorder:
        self.names += 1
        endpoint = Recorder()
        link = self.session.attach_receiver(f"r{self.names}", endpoint, source=Source(address="q"))
        self.joined.pump()
        link.grant(credit)
        self.joined.pump()
        return endpoint

    def update(self, delivery: Any, state: Outcome | TransactionalState) -> None:
        delivery.update(state)
        self.joined.pump()

    def controller(self) -> Any:
        link = self.session.attach_sender(
            "control", Recorder(), source=Source(), target=Coordinator()
        )
        self.joined.pump()
        return link

    def declare(self, control: Any) -> bytes:
        state = self.send(control, Message(Declare()))
        assert isinstance(state, Declared)
        return state.txn_id

    def discharge(self, control: Any, txn_id: bytes, *, fail: bool) -> None:
        assert self.send(control, Message(Discharge(txn_id, fail))) == ACCEPTED
