"""Receivers with a selector, at peers that support it and at peers that do not."""

from __future__ import annotations

from typing import Any

import pytest
from far_end import FarEnd, connected

from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.errors import LinkRefused
from amqp_rt.termini import Source
from amqp_rt.testing.pairs import Recorder


@pytest.mark.req("M28", "M29")
async def test_a_receiver_gets_what_it_selects() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("work"))
        async with peer.sender("work") as out:
            for number in range(4):
                await out.send(number, priority=number, application_properties={"n": number})
        async with peer.receiver("work", selector="n > 0 AND JMSPriority < 3") as some:
            assert [(await some.receive()).body for _ in range(2)] == [1, 2]
            assert some.source.filter is not None
        with pytest.raises(LinkRefused, match="at "):
            async with peer.receiver("work", selector="n >"):
                pass


@pytest.mark.req("M28")
async def test_a_peer_without_selectors_is_not_taken_for_one_that_has_them() -> None:
    def answer(link: Any) -> None:
        link.accept(Recorder(), source=Source(address=link.source.address))

    far = FarEnd(on_attach=answer)
    async with connected(far) as peer:
        with pytest.raises(LinkRefused, match="does not select"):
            async with peer.receiver("q", selector="a = 1"):
                pass
        # Without one, what a peer leaves out is for the caller to see.
        async with peer.receiver("q", filter={"a": 1}) as everything:
            assert everything.source.filter is None
