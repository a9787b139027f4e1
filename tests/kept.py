"""Both ends of a resumable link with their unsettled maps, and the state that survives a connection."""

from __future__ import annotations

from collections import deque
from typing import Any

from amqp_rt.outcomes import ACCEPTED, Error, Received
from amqp_rt.termini import Source, Target
from amqp_rt.unsettled import UnsettledMap


class Store:
    """State that survives: the sender's messages, and those that the receiver has processed."""

    def __init__(self, payloads: list[bytes], *, lazy: bool, credit: int = 3) -> None:
        self.credit = credit
        self.todo: deque[bytes] = deque(payloads)
        self.settled: list[bytes] = []
        self.processed: list[bytes] = []
        #: Whether the receiver is slow: it settles only when the next message arrives, or when nothing
        #: else happens.
        self.lazy = lazy
        self.in_hand: list[Any] = []
        self.source: UnsettledMap | None = None
        self.target: UnsettledMap | None = None

    @property
    def done(self) -> bool:
        return not self.todo and not self.source and not self.target and not self.in_hand

    def keep_source(self, link: Any) -> None:
        """Keep the unsettled deliveries of *link*, which has sent messages and ended."""
        self.source = left = link.remember()
        for entry in left.values():
            entry.payload = entry.context
        for sending in link.unsettled:
            if sending.delivery_id < 0 and sending.tag not in left:
                self.todo.append(sending.context)

    def keep_target(self, link: Any) -> None:
        """Keep the unsettled deliveries of *link*, which has received messages and ended."""
        self.target = link.remember()


class Outbox:
    """Sender's endpoint."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.attached = False
        self.over: Any = None

    def on_attached(self, link: Any) -> None:
        self.attached = True
        assert link.resumed or not self.store.source
        for entry in link.unknown:
            self.store.todo.append(entry.context)
        self.on_credit(link)

    def on_credit(self, link: Any) -> None:
        while self.store.todo and link.credit and link.writable:
            payload = self.store.todo.popleft()
            link.send(payload, payload)

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        for each in deliveries:
            if each.state is not None and not isinstance(each.state, Received):
                assert each.state == ACCEPTED
                each.settle()
                self.store.settled.append(each.context)

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        assert error is None or error.condition == "amqp:connection:forced", error
        self.over = link


class Inbox:
    """Receiver's endpoint with settle mode second, which settles after processing."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.over: Any = None

    def on_attached(self, link: Any) -> None:
        link.grant(self.store.credit)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        for each in deliveries:
            self.store.in_hand.append(each)
            while len(self.store.in_hand) > (self.store.credit - 1 if self.store.lazy else 0):
                self.process()
        link.grant(self.store.credit)

    def process(self) -> None:
        delivery = self.store.in_hand.pop(0)
        self.store.processed.append(delivery.payload)
        delivery.settle(ACCEPTED)

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        assert all(each.settled for each in deliveries)

    def on_flow(self, link: Any) -> None:
        pass

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        assert error is None or error.condition == "amqp:connection:forced", error
        self.over = link


def frames_of(data: bytes) -> list[bytes]:
    found = []
    at = 0
    while at < len(data):
        size = 8 if data[at : at + 4] == b"AMQP" else int.from_bytes(data[at : at + 4], "big")
        found.append(data[at : at + size])
        at += size
    return found


class KeepingHost:
    """Peer whose termini outlive their connections: one link each way, with their unsettled maps."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.out: Any = None
        self.box: Any = None

    def accept(self, link: Any) -> None:
        """Answer an attach request with the stored unsettled map."""
        store = self.store
        if link.role:
            self.box = KeptInbox(store)
            target = Target(address="q", timeout=60)
            link.accept(self.box, target=target, unsettled=store.target or {})
        else:
            self.out = KeptOutbox(store)
            source = Source(address="q", timeout=60)
            link.accept(self.out, source=source, unsettled=store.source or {})


class KeptOutbox(Outbox):
    """Sender's endpoint that stores its unsettled map when its link ends."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        super().on_detached(link, error, closed)
        self.store.keep_source(link)


class KeptInbox(Inbox):
    """Receiver's endpoint that stores its unsettled map when its link ends."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        super().on_detached(link, error, closed)
        self.store.keep_target(link)
