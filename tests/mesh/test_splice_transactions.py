"""Transactions over nodes that join links: nothing overtakes, and a connection may be lost at each frame."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from brokers import World
from chains import Chain

from amqp_rt.broker.nodes import Queue
from amqp_rt.limits import DEFAULT_LIMITS, KIB, Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.transactions import Declare, Discharge, TransactionalState

pytestmark = pytest.mark.req("P5")


class Brokered(Chain):
    """Client of a broker over two nodes."""

    def __init__(self, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.world = World(Queue("q"), Queue("done"), limits=limits)
        super().__init__(2, limits=limits)

    def serve(self, link: Any) -> None:
        assert self.world.host.attach(link)

    def attach(self, target: Any) -> Any:
        """Attach a link on which the client sends."""
        session = self.sessions[0]
        mine = Recorder()
        return session.attach_sender(f"to {target}", mine, source=Source(), target=target)

    def states(self) -> tuple[int, int]:
        """Return how many messages the queues hold, waiting or unsettled."""
        q, done = (self.world.stats(each) for each in ("q", "done"))
        return q.available + q.acquired, done.available + done.acquired


def moving(chain: Brokered, *, fail: bool = False) -> Iterator[Any]:
    """Move a message from one queue to the other, in a transaction; yields what the client knows of its discharge."""
    session = chain.sessions[0]
    control = chain.attach(Coordinator())
    out = chain.attach(Target(address="done"))
    taken = Recorder()
    source = session.attach_receiver("from", taken, source=Source(address="q"))
    while not (control.credit and out.credit and source.attached):
        yield None
    source.grant(1)
    declared = control.send(Message(Declare()).encode())
    while not (declared.state and taken.deliveries):
        yield None
    txn_id = declared.state.txn_id
    # The client does not wait for the outcome of the message, nor for that of its own outcome.
    out.send(
        Message(bytes(3 * KIB)).encode(), state=TransactionalState(txn_id), tag=b"a longer tag"
    )
    taken.deliveries[0].update(TransactionalState(txn_id, ACCEPTED))
    while not out.writable:
        # Links take turns, frame by frame.
        yield None
    discharged = control.send(Message(Discharge(txn_id, fail)).encode())
    while True:
        yield discharged.state


SMALL = Limits(frame_size_max=512, splice_bytes_max=4 * KIB)


def carried(chain: Brokered, steps: int) -> Iterator[int]:
    """Carry some octets of one connection after the other, up to *steps* times; yields the number of each."""
    quiet = at = 0
    for step in range(steps):
        quiet = 0 if chain.step(at, 256) else quiet + 1
        at = (at + 1) % len(chain.joints)
        if quiet > len(chain.joints) * 2:
            return
        yield step


@pytest.mark.parametrize("fail", [False, True])
def test_a_discharge_does_not_overtake_the_work_before_it(fail: bool) -> None:
    chain = Brokered(limits=SMALL)
    chain.world.client().sender("q").send("a")
    script = moving(chain, fail=fail)
    state = None
    for _ in carried(chain, 10_000):
        state = next(script)
    assert state == ACCEPTED
    assert chain.states() == ((1, 0) if fail else (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_connection_lost_at_any_frame_leaves_all_of_a_transaction_or_nothing(
    lost: int, long_run: bool
) -> None:
    seen = set()
    for cut in range(0, 1_000, 1 if long_run else 3):
        chain = Brokered(limits=SMALL)
        chain.world.client().sender("q").send("a")
        script = moving(chain)
        state, steps = None, 0
        for _ in carried(chain, cut):
            state = next(script)
            steps += 1
        chain.cut(lost)
        for _ in range(3):
            chain.pump()
        assert chain.states() in ((1, 0), (0, 1)), cut
        if state == ACCEPTED:
            assert chain.states() == (0, 1), cut
        assert len(chain.world.host.transactions) == 0, cut
        seen.add((chain.states(), state == ACCEPTED))
        if steps < cut:
            break
    # The last answer may be lost as well.
    assert seen == {((1, 0), False), ((0, 1), False), ((0, 1), True)}
