"""Who may send when several want to, and how much of it waits outside the peer's window."""

from __future__ import annotations

from typing import Any

import pytest
from conversations import Frame, frames
from sanity import check

from amqp_rt.core.engine import Engine
from amqp_rt.core.performatives import Disposition, Flow, Transfer
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder

Q = Target(address="q")


def senders(joined: Joined, sessions: int, links: int) -> list[Any]:
    """The client's sending links: *links* in each of *sessions*, each with credit."""
    joined.pump()
    made = []
    for at in range(sessions):
        session = joined.client.begin()
        made += [session.attach_sender(f"{at}/{n}", Recorder(), target=Q) for n in range(links)]
    joined.pump()
    return made


def taken(engine: Engine) -> list[Frame]:
    """The frames that leave with one take."""
    return list(frames(b"".join(engine.take())))


def transfers(engine: Engine) -> list[tuple[int, int]]:
    """(channel, handle) of each transfer that leaves with one take."""
    return [
        (item.channel, item.performative.handle)
        for item in taken(engine)
        if isinstance(item.performative, Transfer)
    ]


@pytest.mark.req("X28")
@pytest.mark.parametrize(("sessions", "links"), [(1, 3), (3, 1), (2, 2), (5, 4)])
def test_whoever_waits_takes_turns(sessions: int, links: int) -> None:
    limits = Limits(frame_size_max=512, output_max=4_096)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(Recorder(credit=5)))
    made = senders(joined, sessions, links)
    for link in made:
        link.send(b"x" * 40_000)
    assert joined.client.output_size <= 4_096 + 512
    order: list[tuple[int, int]] = []
    for _ in range(30):
        order += transfers(joined.client)
    check(joined.client)
    # Each sends within any stretch that is long enough for two rounds of all.
    everybody = {(link.session.channel, link.handle) for link in made}
    stretch = 2 * len(made)
    for at in range(len(made), len(order) - stretch):
        assert set(order[at : at + stretch]) == everybody
    assert len(order) > 10 * len(made)


@pytest.mark.req("X28")
def test_a_session_that_waits_for_its_window_holds_up_nobody() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(credit=100)))
    first, second = senders(joined, 2, 1)
    first.session.remote_incoming_window = 0
    first.send(b"stuck")
    second.send(b"free")
    assert transfers(joined.client) == [(1, 0)]
    assert transfers(joined.client) == []
    joined.server.sessions[0]._session_flow = True
    joined.server.sessions[0]._mark_dirty()
    joined.pump()
    assert [d.payload for d in joined.links[0].endpoint.deliveries] == [b"stuck"]


@pytest.mark.req("X28")
def test_what_waits_is_sent_in_order_however_often_one_asks() -> None:
    limits = Limits(frame_size_max=512, output_max=1_000, session_window=7)
    joined = Joined(limits=limits)
    (link,) = senders(joined, 1, 1)
    for number in range(200):
        link.send(b"%d " % number * 50)
        if number % 3 == 0:
            joined.pump()
    joined.pump()
    assert [d.payload for d in joined.endpoint.deliveries] == [
        b"%d " % number * 50 for number in range(200)
    ]
    check(joined.client)
    check(joined.server)


@pytest.mark.req("X28", "X6")
def test_control_frames_pass_what_waits() -> None:
    limits = Limits(output_max=2_000, frame_size_max=1_000)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(Recorder()))
    joined.pump()
    session = joined.client.begin()
    ours = Recorder(credit=10)
    session.attach_receiver("in", ours, source=Source(address="q"))
    out = session.attach_sender("out", Recorder(), target=Q)
    joined.pump()
    joined.links[1].grant(10)
    joined.pump()
    for _ in range(5):
        out.send(b"x" * 100_000)
    joined.client.take()
    # While half a megabyte waits: a message comes, is settled, and credit is given.
    joined.links[0].send(b"hello")
    for data in joined.server.take():
        joined.client.receive(data, 0.0)
    ours.deliveries[0].settle(ACCEPTED)
    kinds = [type(item.performative) for item in taken(joined.client)]
    # Disposition and flow are behind the frames that had left the queue, and before all the rest.
    urgent = [kind for kind in kinds if kind in (Disposition, Flow)]
    assert Disposition in urgent
    assert Flow in urgent
    assert kinds.index(Disposition) <= 4
    assert out._queue


@pytest.mark.req("X28")
@pytest.mark.parametrize("output_max", [1, 1_000, 10_000])
def test_no_take_is_larger_than_the_bound_and_a_frame(output_max: int) -> None:
    limits = Limits(frame_size_max=512, output_max=output_max)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(Recorder(credit=50)))
    made = senders(joined, 2, 2)
    for link in made:
        for _ in range(10):
            link.send(b"x" * 2_000)
    assert not any(link.writable for link in made)
    while data := joined.client.take():
        assert sum(map(len, data)) < output_max + 512
        joined.server.receive(b"".join(data), 0.0)
    joined.pump()
    assert sum(len(link.endpoint.deliveries) for link in joined.links) == 40
    assert all(link.writable for link in made)


@pytest.mark.req("X28")
def test_room_is_announced_when_there_is_some() -> None:
    limits = Limits(frame_size_max=512, output_max=2_000, session_window=3)
    joined = Joined(limits=limits)
    (link,) = senders(joined, 1, 1)
    endpoint = link.endpoint
    endpoint.credits.clear()
    while link.writable:
        link.send(b"x" * 100)
    assert endpoint.credits == []
    joined.pump()
    assert endpoint.credits
    assert link.writable


def test_an_output_that_is_not_taken_is_announced_once() -> None:
    joined = Joined(limits=Limits(frame_size_max=512, output_max=1_000))
    (link,) = senders(joined, 1, 1)
    calls: list[int] = []
    joined.client.on_output = lambda: calls.append(joined.client.output_size)
    link.send(b"x" * 5_000)
    assert len(calls) == 1
    # As long as more waits than one take holds, each take asks for another.
    takes = 0
    while joined.client.take():
        takes += 1
    assert takes == len(calls)
    assert joined.client.output_size == 0


@pytest.mark.req("X28", "X10")
def test_a_window_of_nothing_lets_control_frames_through() -> None:
    joined = Joined(on_attach=lambda link: link.accept(Recorder(credit=10)))
    (link,) = senders(joined, 1, 1)
    link.session.remote_incoming_window = 0
    sending = link.send(b"x")
    link.detach()
    joined.pump()
    assert link.ended
    assert link.unsettled == [sending]
    assert link.session.next_outgoing_id == 0
