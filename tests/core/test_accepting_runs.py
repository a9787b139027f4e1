"""Messages accepted in a run have the effects of messages that are accepted one by one."""

from __future__ import annotations

from typing import Any

import pytest
from sanity import check

from amqp_rt.core.links import RCV_SECOND, SND_MIXED
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Joined, Recorder

COUNT = 6
Q = Target(address="q")


class Received:
    """Two engines, of which the server has received ``COUNT`` messages on each of the links "a" and "b"."""

    def __init__(self, **options: Any) -> None:
        self.joined = Joined(on_attach=lambda link: link.accept(Recorder(credit=100)))
        self.joined.pump()
        session = self.joined.client.begin()
        self.senders = [
            session.attach_sender(name, Recorder(), target=Q, snd_settle_mode=SND_MIXED, **options)
            for name in "ab"
        ]
        self.joined.pump()
        for number in range(COUNT):
            for link in self.senders:
                link.send(b"%d" % number, number)
        self.joined.pump()
        self.links = self.joined.links
        self.deliveries = self.links[0].endpoint.deliveries
        assert len(self.deliveries) == COUNT

    def effects(self) -> Any:
        """Return what the server sends, and all that can be seen then."""
        joined = self.joined
        data = b"".join(joined.server.take())
        joined.client.receive(data, joined.now)
        joined.pump()
        check(joined.client)
        check(joined.server)
        return (
            data,
            [(each.local_settled, each.local_state) for each in self.deliveries],
            [
                [(each.context, each.state, each.remote_settled) for each in link.endpoint.outcomes]
                for link in self.senders
            ],
            len(self.senders[0].session.sent_unsettled),
        )


@pytest.mark.parametrize("chosen", [range(COUNT), [0], [0, 1, 3, 4], [5, 3, 4]])
def test_a_run_has_the_effects_of_single_outcomes(chosen: Any) -> None:
    one_by_one = Received()
    for at in chosen:
        one_by_one.deliveries[at].settle(ACCEPTED)
    run = Received()
    assert run.links[0].accept_run([run.deliveries[at] for at in chosen]) == []
    expected = one_by_one.effects()
    assert run.effects() == expected
    assert sorted(context for context, _, _ in expected[2][0]) == sorted(chosen)


def test_a_run_goes_on_with_the_disposition_before_it() -> None:
    it = Received()
    (first, *rest), others = it.deliveries, it.links[1].endpoint.deliveries
    # The deliveries of the two links alternate: 0 a, 1 b, 2 a.
    first.settle(ACCEPTED)
    others[0].settle(ACCEPTED)
    assert it.links[0].accept_run(rest[:1]) == []
    data, _, _, _ = it.effects()
    assert data.count(b"\x00\x53\x15") == 1  # one disposition


def test_what_is_settled_or_has_an_outcome_is_left() -> None:
    it = Received()
    released, settled, foreign = (
        it.deliveries[1],
        it.deliveries[2],
        it.links[1].endpoint.deliveries[0],
    )
    released.settle(RELEASED)
    settled.settled = True
    taken = [it.deliveries[0], released, settled, foreign, it.deliveries[3]]
    assert it.links[0].accept_run(taken) == [released, settled, foreign]
    assert released.local_state == RELEASED
    assert foreign.local_state is None
    _, _, (own, other), left = it.effects()
    assert {context: state for context, state, _ in own} == {
        0: ACCEPTED,
        1: RELEASED,
        3: ACCEPTED,
    }
    assert other == []
    # Of twelve, three have their outcome.
    assert left == 2 * COUNT - 3


def test_links_that_settle_second_or_are_detached_take_no_run() -> None:
    second = Received(rcv_settle_mode=RCV_SECOND)
    assert second.deliveries[0].second
    assert second.links[0].accept_run(second.deliveries) == second.deliveries
    gone = Received()
    gone.senders[0].detach()
    gone.joined.pump()
    assert gone.links[0].accept_run(gone.deliveries) == gone.deliveries
