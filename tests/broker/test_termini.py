"""Termini that outlive their links: their deliveries, lifetime, expiry and bounds."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Client, Receiving, Sending, World

from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Outcome, rejected
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.unsettled import Unsettled, UnsettledMap


def world(**options: Any) -> World:
    return World(Queue("q", dead_letter="dead"), Topic("t"), **options)


def resume(client: Client, name: str, unsettled: UnsettledMap | None, **options: Any) -> Receiving:
    """Attach a receiver with its unsettled map."""
    endpoint = Recorder()
    link = client.session.attach_receiver(
        name,
        endpoint,
        source=options.pop("source", None) or Source(**options),
        rcv_settle_mode=RCV_SECOND,
        unsettled=unsettled,
    )
    client.world.pump()
    return Receiving(client.world, link, endpoint)


def kept(here: World, container_id: str = "c") -> int:
    """Return the number of termini for the links of a container."""
    return sum(1 for terminus in here.host.termini if terminus.key[2] == container_id)


def bodies(receiving: Receiving | Sending) -> list[Any]:
    return [Message.decode(each.payload).body for each in receiving.endpoint.deliveries]


# --- when a source expires -------------------------------------------------------------------------

#: End of the link, expiry policy, and whether its timer runs afterwards.
WAYS = [
    ("detach", "link-detach", True),
    ("detach", "session-end", False),
    ("detach", "connection-close", False),
    ("detach", "never", False),
    ("end", "link-detach", True),
    ("end", "session-end", True),
    ("end", "connection-close", False),
    ("end", "never", False),
    ("cut", "link-detach", True),
    ("cut", "session-end", True),
    ("cut", "connection-close", True),
    ("cut", "never", False),
    ("close", "connection-close", True),
    ("close", "never", False),
]


def leave(client: Client, receiver: Receiving, how: str) -> None:
    if how == "detach":
        receiver.detach(closed=False)
    elif how == "end":
        client.session.end()
        client.world.pump()
    elif how == "cut":
        client.cut()
    else:
        client.joined.client.close()
        client.world.pump()


@pytest.mark.req("M39", "X23", "B14")
@pytest.mark.parametrize("timeout", [0, 30])
@pytest.mark.parametrize(("how", "policy", "counts"), WAYS)
def test_a_source_expires_when_its_policy_says(
    how: str, policy: str, counts: bool, timeout: int
) -> None:
    here = world()
    client = here.client("c")
    receiver = client.receiver(
        "q",
        name="l",
        credit=1,
        expiry_policy=policy,
        timeout=timeout,
        default_outcome=rejected("x"),
    )
    here.client().sender("q").send("m")
    assert receiver.bodies == ["m"]
    leave(client, receiver, how)
    # Unsettled deliveries stay acquired as long as the link may be resumed.
    stats = here.stats("q")
    assert stats.acquired == (0 if counts and not timeout else 1)
    if timeout:
        here.time.now += 29
        here.host.sweep()
        assert here.stats("q").acquired == 1
        here.time.now += 2
        here.host.sweep()
        assert here.stats("q").acquired == (0 if counts else 1)
    assert here.stats("dead").available == (1 if counts else 0)
    assert kept(here) == (0 if counts else 1)


@pytest.mark.req("M39")
def test_the_countdown_is_aborted_and_starts_again() -> None:
    here = world()
    here.client().sender("q").send("m")
    for _ in range(3):
        client = here.client("c")
        receiver = client.receiver("q", name="l", credit=1, timeout=30)
        client.cut()
        here.time.now += 20
        here.host.sweep()
        assert kept(here) == 1
        assert receiver.bodies in (["m"], [])
    here.time.now += 11
    here.host.sweep()
    assert kept(here) == 0


@pytest.mark.req("M39")
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_source_that_was_attached_again_does_not_expire(shared: bool) -> None:
    here = world()
    wanted: dict[str, Any] = {"name": "l", "timeout": 30, "credit": 5}
    if shared:
        wanted["capabilities"] = ("shared",)
    address = "t" if shared else "q"
    client = here.client("c")
    client.receiver(address, **wanted)
    client.cut()
    here.time.now += 20
    again = here.client("c").receiver(address, **wanted)
    # The time at which the countdown would have ended has passed.
    here.time.now += 100
    here.host.sweep()
    here.client().sender(address).send("m")
    assert again.bodies == ["m"]
    assert again.endpoint.detached == []
    assert kept(here) == 1


@pytest.mark.req("M39")
def test_a_target_that_was_attached_again_does_not_expire() -> None:
    here = world()
    client = here.client("c")
    target = Target(address="q", timeout=30)
    client.sender("q", name="l", target=target)
    client.cut()
    here.time.now += 20
    again = here.client("c").sender("q", name="l", target=target)
    here.time.now += 100
    here.host.sweep()
    again.send("m")
    assert again.outcomes == [ACCEPTED]
    assert kept(here) == 1


@pytest.mark.req("M39")
@pytest.mark.parametrize("policy", ["session-end", "connection-close"])
def test_what_it_was_attached_to_before_ends_without_a_countdown(policy: str) -> None:
    """Only the session or connection of the last link starts the countdown."""
    here = world()
    before = here.client("c")
    before.receiver("q", name="l", credit=1, expiry_policy=policy).detach(closed=False)
    again = here.client("c").receiver("q", name="l", credit=1, expiry_policy=policy)
    before.session.end()
    before.joined.client.close()
    here.pump()
    here.client().sender("q").send("m")
    assert again.bodies == ["m"]
    assert kept(here) == 1


@pytest.mark.req("M39")
def test_a_later_session_of_the_connection_can_come_for_what_an_earlier_one_left() -> None:
    here = world()
    client = here.client("c")
    client.receiver("t", name="l", expiry_policy="connection-close")
    client.session.end()
    here.pump()
    here.client().sender("t").send(1)
    client.session = client.joined.client.begin()
    again = client.receiver("t", name="l", expiry_policy="connection-close", credit=5)
    assert again.bodies == [1]
    client.session.end()
    here.pump()
    client.joined.client.close()
    here.pump()
    assert kept(here) == 0
    assert here.host.memory.held == 0


@pytest.mark.req("B14")
@pytest.mark.parametrize(
    ("default", "available", "dead", "count"),
    [
        (RELEASED, 1, 0, 0),
        (MODIFIED_FAILED, 1, 0, 1),
        (rejected("x"), 0, 1, 0),
        (ACCEPTED, 0, 0, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["cut", "close", "expire"])
def test_the_default_outcome_is_applied_to_what_a_lost_link_left(
    how: str, default: Outcome, available: int, dead: int, count: int
) -> None:
    here = world()
    client = here.client()
    receiver = client.receiver(
        "q", credit=5, default_outcome=default, timeout=10 if how == "expire" else 0
    )
    here.client().sender("q").send("m")
    assert receiver.link.source.default_outcome == default
    if how == "close":
        receiver.detach()
    else:
        client.cut()
        here.time.now += 11
        here.host.sweep()
    assert (here.stats("q").available, here.stats("dead").available) == (available, dead)
    if available:
        (message,) = here.client().receiver("q", credit=1).messages
        assert message.delivery_count == count


# --- resuming --------------------------------------------------------------------------------------


@pytest.mark.req("X24", "B13", "M26")
@pytest.mark.parametrize("said", [ACCEPTED, RELEASED, rejected("x"), None], ids=str)
def test_an_outcome_that_was_lost_is_heard_when_the_link_comes_back(said: Outcome | None) -> None:
    here = world()
    client = here.client("c")
    first = client.receiver("q", name="l", credit=1, timeout=60, rcv_settle_mode=RCV_SECOND)
    here.client().sender("q").send("m")
    (delivery,) = first.endpoint.deliveries
    client.cut()
    others = here.client().receiver("q", credit=5)
    assert others.bodies == []
    unsettled = {delivery.tag: Unsettled(tag=delivery.tag, state=said, payload=delivery.payload)}
    again = resume(here.client("c"), "l", unsettled, address="q", timeout=60)
    assert again.link.resumed
    again.grant(5)
    stats = here.stats("q")
    if said is None:
        assert stats.acquired == 1
        # The resumed delivery, and no other.
        again.settle(ACCEPTED)
        assert here.stats("q").accepted == 1
    else:
        assert stats.accepted == (1 if said == ACCEPTED else 0)
        assert here.stats("dead").available == (1 if said not in (ACCEPTED, RELEASED) else 0)
    assert here.stats("q").acquired == (1 if said == RELEASED else 0)


@pytest.mark.req("X24", "M26")
def test_what_the_peer_does_not_know_comes_again_at_its_place() -> None:
    here = world()
    client = here.client("c")
    sender = here.client().sender("q")
    sender.send(1, 2, 3)
    client.receiver("q", name="l", credit=2, timeout=60)
    client.cut()
    again = resume(here.client("c"), "l", {}, address="q", timeout=60)
    again.grant(10)
    assert again.bodies == [1, 2, 3]
    assert [message.delivery_count for message in again.messages] == [0, 0, 0]


@pytest.mark.req("X24", "B14")
def test_a_peer_that_remembers_nothing_gets_the_default_outcome() -> None:
    here = world()
    client = here.client("c")
    here.client().sender("q").send(1)
    client.receiver("q", name="l", credit=1, timeout=60, default_outcome=MODIFIED_FAILED)
    client.cut()
    again = here.client("c").receiver("q", name="l", credit=5, timeout=60)
    assert [message.delivery_count for message in again.messages] == [1]
    assert not again.link.resumed


@pytest.mark.req("X24", "X25", "M25")
def test_a_message_that_arrived_in_part_is_completed() -> None:
    here = world()
    body = bytes(range(256)) * 40
    small = Limits(frame_size_max=512)
    client = here.client("c", limits=small)
    receiver = client.receiver("q", name="l", timeout=60)
    here.client().sender("q").send(body)
    receiver.link.grant(1)
    # The first frames arrive, and no more.
    client.joined.server.receive(b"".join(client.joined.client.take()), 0.0)
    data = b"".join(client.joined.server.take())
    client.joined.client.receive(data[:3000], 0.0)
    client.cut()
    client.joined.client.receive_eof(0.0)
    memory = receiver.link.remember()
    (known,) = memory.values()
    assert not known.complete
    again = resume(here.client("c", limits=small), "l", memory, address="q", timeout=60)
    again.grant(5)
    assert bodies(again) == [body]


@pytest.mark.req("X24")
def test_a_link_is_taken_over_with_what_it_holds() -> None:
    """The peer opens another connection before the broker has noticed the loss of the first one."""
    here = world()
    sender = here.client().sender("q")
    sender.send(1, 2)
    first = here.client("c").receiver("q", name="l", credit=1, timeout=60)
    (delivery,) = first.endpoint.deliveries
    unsettled = {delivery.tag: Unsettled(tag=delivery.tag, state=ACCEPTED)}
    again = resume(here.client("c"), "l", unsettled, address="q", timeout=60)
    again.grant(5)
    assert again.bodies == [2]
    assert first.error == "amqp:link:stolen"
    assert here.stats("q").accepted == 1
    assert here.stats("q").consumers == 1


@pytest.mark.req("B9", "M28")
def test_a_link_that_asks_for_something_else_is_another_one() -> None:
    here = World(Queue("q"), Queue("p"), Topic("t"), Topic("u"))
    client = here.client("c")
    here.client().sender("q").send(1)
    client.receiver("q", name="l", credit=1, timeout=60)
    client.cut()
    client = here.client("c")
    client.receiver("p", name="l", timeout=60)
    assert here.stats("q").available == 1
    assert kept(here) == 1
    client.receiver("t", name="s", timeout=60)
    client.cut()
    here.client().sender("t").send(2)
    client = here.client("c")
    assert client.receiver("u", name="s", timeout=60, credit=5).bodies == []
    assert here.stats("t").consumers == here.stats("t").available == 0


def test_deleting_a_node_ends_its_termini() -> None:
    here = world()
    client = here.client("c")
    client.receiver("q", name="r", timeout=60)
    client.sender("q", name="s", target=Target(address="q", timeout=60))
    client.receiver("t", name="t", timeout=60)
    client.cut()
    assert kept(here) == 3
    here.host.space().delete("q")
    here.host.space().delete("t")
    assert kept(here) == 0
    assert here.client("c").receiver("q", name="r", timeout=60).error == "amqp:not-found"


def test_deliveries_that_had_not_left_are_for_others_at_once() -> None:
    here = world()
    small = Limits(session_window=4)
    client = here.client("c", limits=small)
    here.client().sender("q").send(*range(10))
    receiver = client.receiver("q", name="l", timeout=60)
    receiver.link.grant(10)
    client.joined.server.receive(b"".join(client.joined.client.take()), 0.0)
    client.cut()
    held = here.stats("q").acquired
    assert 0 < held < 10
    rest = here.client().receiver("q", credit=20)
    assert rest.bodies == list(range(held, 10))


# --- targets ---------------------------------------------------------------------------------------


def resend(client: Client, name: str, unsettled: UnsettledMap | None, **options: Any) -> Sending:
    endpoint = Recorder()
    link = client.session.attach_sender(
        name, endpoint, target=Target(**options), unsettled=unsettled
    )
    client.world.pump()
    return Sending(client.world, link, endpoint)


@pytest.mark.req("B13", "X24")
def test_a_message_whose_acceptance_was_lost_is_known_again() -> None:
    here = world()
    client = here.client("c")
    sender = client.sender(None, name="l", target=Target(address="q", timeout=60))
    payload = Message("m").encode()
    sending = sender.link.send(payload)
    client.joined.server.receive(b"".join(client.joined.client.take()), 0.0)
    client.cut()  # before the disposition
    assert here.stats("q").available == 1
    unsettled = {sending.tag: Unsettled(tag=sending.tag, payload=payload)}
    again = resend(here.client("c"), "l", unsettled, address="q", timeout=60)
    assert again.outcomes == [ACCEPTED]
    assert again.link.unknown == []
    assert here.stats("q").available == 1
    # Another tag is another message.
    again.send("n")
    assert here.stats("q").available == 2


@pytest.mark.req("B13")
def test_only_so_many_outcomes_are_remembered() -> None:
    here = world(limits=Limits(target_outcomes_max=3))
    client = here.client("c")
    sender = client.sender(None, name="l", target=Target(address="q", timeout=60))
    sendings = [sender.link.send(Message(n).encode()) for n in range(4)]
    client.joined.server.receive(b"".join(client.joined.client.take()), 0.0)
    client.cut()
    unsettled = {
        each.tag: Unsettled(tag=each.tag, payload=Message(n).encode())
        for n, each in enumerate(sendings)
    }
    again = resend(here.client("c"), "l", unsettled, address="q", timeout=60)
    assert [known.tag for known in again.link.unknown] == [sendings[0].tag]


@pytest.mark.req("X24", "M25")
@pytest.mark.parametrize("room", [10_000, 2_000, 1_999])
def test_a_target_keeps_the_beginning_of_a_message(room: int) -> None:
    here = world(limits=Limits(unfinished_bytes_max=room))
    client = here.client("c", limits=Limits(frame_size_max=512))
    payload = Message(b"x" * 5000).encode()
    sender = client.sender(None, name="l", target=Target(address="q", timeout=60))
    sending = sender.link.send(payload[:2000], more=True)
    here.pump()
    client.cut()
    unsettled = {sending.tag: Unsettled(tag=sending.tag, payload=payload)}
    again = resend(here.client("c"), "l", unsettled, address="q", timeout=60)
    if room >= 2_000:
        assert here.host.termini.unfinished == 0
        assert again.outcomes == [ACCEPTED]
        (message,) = here.client().receiver("q", credit=1).messages
        assert message.body == b"x" * 5000
    else:
        # There was no room for the message: its sender starts again.
        assert [known.tag for known in again.link.unknown] == [sending.tag]


# --- bounds ------------------------------------------------------------------------------------------


@pytest.mark.req("B4")
@pytest.mark.parametrize("bound", ["termini_max", "termini_of_container_max"])
def test_termini_are_bounded(bound: str) -> None:
    here = world(limits=Limits(**{bound: 2}))
    client = here.client("c")
    client.receiver("q", timeout=1)
    second = client.receiver("q")
    third = client.receiver("q")
    # Above the bound, a default lifetime is reduced, and a requested one is refused.
    assert second.link.source.expiry_policy == "session-end"
    assert (third.error, third.link.source.expiry_policy) == (None, "link-detach")
    assert client.receiver("q", timeout=1).error == "amqp:resource-limit-exceeded"
    sender = client.sender(None, target=Target(address="q", expiry_policy="never"))
    assert sender.error == "amqp:resource-limit-exceeded"
    other = here.client("d").receiver("q", timeout=1)
    assert other.error == (None if bound != "termini_max" else "amqp:resource-limit-exceeded")
    second.detach()
    assert client.receiver("q", timeout=1).error is None


@pytest.mark.req("B4")
def test_users_do_not_use_up_the_termini_of_others() -> None:
    here = world(limits=Limits(termini_of_container_max=1))
    for user in ("ann", "eve"):
        client = here.client("c")
        client.joined.server.peer.user = user
        assert client.receiver("q", timeout=1).error is None
        assert client.receiver("q", timeout=1).error == "amqp:resource-limit-exceeded"


def test_attaching_and_detaching_leaves_nothing_behind() -> None:
    here = world()
    client = here.client("c")
    for _ in range(50):
        client.receiver("q", name="l", timeout=60).detach(closed=False)
    assert kept(here) == 1
    assert len(here.host.termini._timers) <= 18
    (server,) = [each.joined.server for each in here.clients]
    assert sum(len(session.followers) for session in server.sessions.values()) <= 1
    here.time.now += 61
    client.cut()
    here.time.now += 61
    here.host.sweep()
    assert kept(here) == 0
    assert not here.host.termini._of_container
