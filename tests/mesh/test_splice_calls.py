"""Number of function calls that a node on the way takes for a message, beside those of an end without a node."""

from __future__ import annotations

import pytest
from call_counts import Calls, plain_only
from chains import Chain

from amqp_rt.outcomes import ACCEPTED
from amqp_rt.testing.pairs import Recorder

pytestmark = plain_only

MESSAGES = 64


def count(chain: Chain, *, settled: bool) -> tuple[float, float]:
    """Send messages one per chunk, then accept them; return the calls of the nodes' engines, and of both ends, for each."""
    link, _ = chain.sender()
    chain.links[0].grant(1_000)
    chain.pump()
    middle, ends = Calls(), Calls()

    def carry() -> None:
        moved = True
        while moved:
            moved = False
            for at, joint in enumerate(chain.joints):
                first, last = at == 0, at == len(chain.joints) - 1
                for ours, other, is_end in (
                    (joint.client, joint.server, (first, last)),
                    (joint.server, joint.client, (last, first)),
                ):
                    with ends if is_end[0] else middle:
                        data = b"".join(ours.take())
                    if data:
                        moved = True
                        with ends if is_end[1] else middle:
                            other.receive(data, 0.0)

    for at in range(2 * MESSAGES):
        if at == MESSAGES:
            carry()
            middle.counts.clear()
            ends.counts.clear()
        with ends:
            link.send(bytes(100), settled=settled)
        carry()
        if not settled:
            with ends:
                chain.served.deliveries[-1].settle(ACCEPTED)
            carry()
    assert len(chain.served.deliveries) == 2 * MESSAGES
    return middle.counts.total() / MESSAGES, ends.counts.total() / MESSAGES


@pytest.mark.parametrize("settled", [True, False])
def test_a_node_takes_little_more_calls_than_both_ends(settled: bool) -> None:
    """A node does what both ends do, and joins them: at most a fifth of that is its own."""
    _, ends = count(Chain(0, served=Recorder()), settled=settled)
    middle, _ = count(Chain(1, served=Recorder()), settled=settled)
    assert 0 < middle <= 1.2 * ends
