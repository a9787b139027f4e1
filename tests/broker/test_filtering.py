"""Consumers, browsers and subscribers that want only some of the messages (Part 3 §3.5.8)."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Receiving, World
from hypothesis import given, settings
from hypothesis import strategies as st

from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Modified
from amqp_rt.termini import COPY
from amqp_rt.values import Described, Symbol


def selector(text: str) -> dict[object, object]:
    return {
        Symbol("jms-selector"): Described(Symbol("apache.org:selector-filter:string"), text),
    }


def send(world: World, *kinds: str, to: str = "q") -> None:
    sender = world.client().sender(to)
    for number, kind in enumerate(kinds):
        sender.send(f"{kind}{number}", application_properties={"kind": kind})


def wants(client: Any, kind: str, credit: int = 0, **options: Any) -> Receiving:
    receiver: Receiving = client.receiver(
        options.pop("address", "q"), credit=credit, filter=selector(f"kind = '{kind}'"), **options
    )
    return receiver


@pytest.mark.req("M27", "M28", "M29", "B20")
def test_a_consumer_gets_what_it_wants_and_leaves_the_rest_in_order() -> None:
    world = World(Queue("q"))
    send(world, "a", "b", "a", "b", "c")
    client = world.client()
    only_b = wants(client, "b", credit=10, settle=ACCEPTED)
    assert only_b.bodies == ["b1", "b3"]
    assert only_b.link.source.filter == selector("kind = 'b'")
    rest = client.receiver("q", credit=10, settle=ACCEPTED)
    assert rest.bodies == ["a0", "a2", "c4"]
    sender = world.client().sender("q")
    sender.send("for b", application_properties={"kind": "b"})
    sender.send("for the other", application_properties={"kind": "a"})
    # Of the consumers that may have the message, the one whose turn it is gets it.
    assert rest.bodies[3:] + only_b.bodies[2:] in (
        ["for the other", "for b"],
        ["for b", "for the other"],
    )
    assert world.stats("q").available == 0


@pytest.mark.req("M27")
def test_messages_that_no_consumer_wants_stay_and_delay_no_others() -> None:
    world = World(Queue("q"))
    client = world.client()
    only_b = wants(client, "b", credit=10, settle=ACCEPTED)
    send(world, "a", "a", "b", "a", "b")
    assert only_b.bodies == ["b2", "b4"]
    assert world.stats("q").available == 3


@pytest.mark.req("M22", "M27", "B5")
@pytest.mark.parametrize("outcome", [RELEASED, MODIFIED_FAILED], ids=["released", "modified"])
def test_what_comes_back_goes_to_who_wants_it_first(outcome: Any) -> None:
    world = World(Queue("q"))
    send(world, "b", "a", "b")
    client = world.client()
    first = client.receiver("q", credit=3)
    assert first.bodies == ["b0", "a1", "b2"]
    only_a = wants(client, "a", credit=5, settle=ACCEPTED)
    only_b = wants(client, "b", credit=1)
    for index in (2, 1, 0):
        first.settle(outcome, index)
    assert only_a.bodies == ["a1"]
    assert only_b.bodies == ["b2"]
    only_b.grant(1)
    assert only_b.bodies == ["b2", "b0"]


@pytest.mark.req("M27")
def test_who_attaches_later_gets_of_what_came_back_only_what_it_wants() -> None:
    world = World(Queue("q"))
    send(world, "b", "a", "b")
    client = world.client()
    first = client.receiver("q", credit=3)
    first.settle(RELEASED)
    first.detach()
    assert wants(client, "b", credit=9, settle=ACCEPTED).bodies == ["b0", "b2"]
    assert client.receiver("q", credit=9, settle=ACCEPTED).bodies == ["a1"]


@pytest.mark.req("M29", "B20")
def test_a_browser_sees_what_it_wants() -> None:
    world = World(Queue("q"))
    send(world, "a", "b", "a", "b")
    browser = wants(world.client(), "b", credit=9, distribution_mode=COPY)
    assert browser.bodies == ["b1", "b3"]
    send(world, "a", "b")
    assert browser.bodies == ["b1", "b3", "b1"]
    assert world.stats("q").available == 6


@pytest.mark.req("M29", "B19")
def test_a_subscriber_of_a_topic_gets_what_it_wants() -> None:
    world = World(Topic("t"))
    client = world.client()
    only_a = wants(client, "a", credit=9, address="t")
    everything = client.receiver("t", credit=9)
    send(world, "a", "b", "a", to="t")
    assert only_a.bodies == ["a0", "a2"]
    assert everything.bodies == ["a0", "b1", "a2"]
    # Messages that the subscription does not want are not in its backlog either.
    only_a.settle(ACCEPTED)
    everything.settle(ACCEPTED)
    assert world.stats("t").available == world.stats("t").acquired == 0


@pytest.mark.req("M29")
def test_no_local_leaves_out_what_the_same_container_sent() -> None:
    world = World(Topic("t"))
    mine, other = world.client("mine"), world.client("other")
    no_local = {Symbol("n"): Described(Symbol("apache.org:no-local-filter:list"), [])}
    receiver = mine.receiver("t", credit=9, filter=no_local)
    mine.sender("t").send("from me")
    other.sender("t").send("from another")
    assert receiver.bodies == ["from another"]
    assert receiver.link.source.filter == no_local


@pytest.mark.req("B8", "M29", "X14")
def test_a_filter_that_makes_no_sense_is_refused_and_says_where() -> None:
    world = World(Queue("q"))
    receiver = world.client().receiver("q", filter=selector("kind = "))
    assert receiver.error == "amqp:invalid-field"
    assert world.stats("q").consumers == 0


@pytest.mark.req("M27", "X16")
def test_filters_look_at_many_messages_in_several_goes() -> None:
    world = World(Queue("q"))
    sender = world.client().sender("q")
    for start in range(0, 3_000, 500):
        sender.send(*range(start, start + 500), settled=True, application_properties={"kind": "a"})
    sender.send("here", application_properties={"kind": "b"})
    client = world.client()

    def look_on() -> None:
        for _ in range(5):
            world.host.turns.run_pending()
            world.pump()

    browser = wants(client, "b", credit=1, distribution_mode=COPY)
    assert browser.bodies == []
    look_on()
    assert browser.bodies == ["here"]
    # A drain waits until all of them have been looked at.
    nothing = wants(client, "z")
    nothing.link.grant(5)
    nothing.link.drain()
    world.pump()
    assert nothing.link.credit == 5
    look_on()
    assert nothing.link.credit == 0
    only_b = wants(client, "b", credit=1)
    assert only_b.bodies == []
    look_on()
    assert only_b.bodies == ["here"]


@pytest.mark.slow
@pytest.mark.req("M27", "B5")
@settings(deadline=None)
@given(
    st.lists(st.sampled_from("abc"), max_size=12),
    st.lists(st.sampled_from(["", "a", "b", "c", "ab"]), min_size=1, max_size=4),
    st.data(),
)
def test_everybody_gets_what_is_for_them_in_order(
    kinds: list[str], wishes: list[str], data: st.DataObject
) -> None:
    """Consumers with random wishes come and release; at the end everything was had, in order."""
    world = World(Queue("q"))
    client = world.client()
    half = data.draw(st.integers(0, len(kinds)))
    send(world, *kinds[:half])
    receivers: list[tuple[str, Receiving]] = []
    for wish in wishes:
        listed = ", ".join(f"'{each}'" for each in wish)
        options = {"filter": selector(f"kind IN ({listed})")} if wish else {}
        receivers.append(
            (wish, client.receiver("q", credit=data.draw(st.integers(0, 3)), **options))
        )
    sender = world.client().sender("q")
    for number, kind in enumerate(kinds[half:], half):
        sender.send(f"{kind}{number}", application_properties={"kind": kind})
    for _, receiver in receivers:
        receiver.settle(data.draw(st.sampled_from([RELEASED, ACCEPTED])))
    for wish, receiver in receivers:
        for body in receiver.bodies:
            assert not wish or body[0] in wish
        receiver.detach()
    left = world.stats("q").available
    rest = client.receiver("q", credit=99, settle=ACCEPTED)
    assert len(rest.bodies) == left
    places = [int(body[1:]) for body in rest.bodies]
    assert len(set(places)) == left


@pytest.mark.req("M22", "M27", "B5")
@pytest.mark.parametrize("outcome", [RELEASED, Modified(undeliverable_here=True)], ids=repr)
def test_what_was_taken_out_of_turn_comes_back_to_its_place(outcome: Any) -> None:
    world = World(Queue("q"))
    send(world, "a", "b", "a", "b")
    client = world.client()
    only_b = wants(client, "b", credit=2)
    assert only_b.bodies == ["b1", "b3"]
    only_b.settle(outcome)
    window = client.receiver("q", credit=9, distribution_mode=COPY)
    assert sorted(window.bodies) == ["a0", "a2", "b1", "b3"]
    again = ["b1", "b3"] if outcome is RELEASED else []
    only_b.grant(1)
    assert only_b.bodies == ["b1", "b3", *again[:1]]
    rest = client.receiver("q", credit=9, settle=ACCEPTED)
    assert rest.bodies == [each for each in ("a0", "b1", "a2", "b3") if each not in again[:1]]
    only_b.detach()
    assert rest.bodies[4 - len(again[:1]) :] == again[:1]
    assert world.host.memory.held == 0
