"""Messages expire when their time is over, not when a consumer looks at them."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from brokers import World

from amqp_rt import Broker, Message
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.outcomes import ACCEPTED, RELEASED
from amqp_rt.values import Symbol, ULong


def pass_time(world: World, seconds: float) -> None:
    """Let alarms go off that are due, and whatever they have left for later turns."""
    world.time.now += seconds
    world.host.turns.tick()
    while world.host.turns.unfinished:
        world.host.turns.run_pending()


def waiting(world: World, name: str = "q") -> int:
    return world.stats(name).available


@pytest.mark.req("M7")
def test_the_first_message_expires_without_a_sweep() -> None:
    world = World(Queue("q", dead_letter="dead"))
    sender = world.client().sender("q")
    sender.send("a", ttl_s=0.25)
    sender.send("b", ttl_s=0.5)
    sender.send("never")
    pass_time(world, 0.24)
    assert waiting(world) == 3
    pass_time(world, 0.01)
    assert waiting(world) == 2
    pass_time(world, 0.24)
    assert waiting(world) == 2
    pass_time(world, 0.02)
    assert (waiting(world), waiting(world, "dead")) == (1, 2)
    assert world.host.turns.alarms == []


@pytest.mark.req("M7")
def test_times_to_live_of_a_chain_of_queues_add_up_to_their_sum() -> None:
    chain = [Queue(f"q{n}", ttl_s=0.1, dead_letter=f"q{n + 1}") for n in range(5)]
    world = World(*chain, Queue("q5"))
    world.client().sender("q0").send("m")
    for number in range(1, 6):
        pass_time(world, 0.1 - 0.001)
        assert waiting(world, f"q{number}") == 0
        pass_time(world, 0.002)
        assert waiting(world, f"q{number}") == 1


@pytest.mark.req("M7")
def test_a_message_that_is_first_too_late_expires_at_once() -> None:
    world = World(Queue("q", dead_letter="dead"))
    client = world.client()
    sender = client.sender("q")
    sender.send("first")
    sender.send("second", ttl_s=1)
    sender.send("third", ttl_s=3)
    pass_time(world, 2)
    assert waiting(world) == 3
    receiver = client.receiver("q", credit=1)
    pass_time(world, 0.001)
    assert waiting(world, "dead") == 1
    receiver.settle(RELEASED)
    pass_time(world, 2)
    assert (waiting(world), waiting(world, "dead")) == (1, 2)


@pytest.mark.req("M7")
def test_what_came_back_expires_in_time() -> None:
    world = World(Queue("q", dead_letter="dead"))
    client = world.client()
    client.sender("q").send("m", ttl_s=1)
    receiver = client.receiver("q", credit=1)
    pass_time(world, 0.5)
    receiver.settle(RELEASED)
    receiver.detach()
    pass_time(world, 0.5)
    assert waiting(world, "dead") == 1


@pytest.mark.req("M7")
def test_priorities_do_not_hide_what_expires() -> None:
    world = World(Queue("q", priorities=10, dead_letter="dead"))
    sender = world.client().sender("q")
    sender.send("low", ttl_s=1, priority=1)
    sender.send("high", ttl_s=2, priority=9)
    pass_time(world, 2)
    assert waiting(world, "dead") == 2


@pytest.mark.req("M7", "B22")
def test_a_message_that_was_replaced_does_not_hide_what_expires() -> None:
    world = World(Queue("q", priorities=10, last_value_key="key", dead_letter="dead"))
    sender = world.client().sender("q")
    sender.send("replaced", priority=7, application_properties={"key": "a"})
    sender.send("last", ttl_s=5, priority=5, application_properties={"key": "a"})
    pass_time(world, 5)
    assert (waiting(world), waiting(world, "dead")) == (0, 1)


@pytest.mark.req("M7")
def test_a_replaced_message_between_expired_ones_hides_none_of_them() -> None:
    world = World(Queue("q", last_value_key="key", dead_letter="dead"))
    client = world.client()
    sender = client.sender("q")
    sender.send("first", ttl_s=1)
    sender.send("old", application_properties={"key": "k"})
    sender.send("third", ttl_s=1)
    receiver = client.receiver("q", credit=3)
    receiver.settle(RELEASED, 0, 1, 2)
    receiver.detach()
    sender.send("new", application_properties={"key": "k"})
    pass_time(world, 2)
    assert (waiting(world), waiting(world, "dead")) == (1, 2)
    world.check()


@pytest.mark.req("M7")
def test_a_message_behind_a_delayed_one_expires_in_time() -> None:
    world = World(Queue("q", dead_letter="dead"))
    sender = world.client().sender("q")
    delay = {Symbol("x-opt-delivery-delay"): ULong(3_000)}
    sender.send("delayed", message_annotations=delay)
    sender.send("expires", ttl_s=5)
    pass_time(world, 4)
    assert waiting(world) == 2
    pass_time(world, 1)
    assert (waiting(world), waiting(world, "dead")) == (1, 1)


@pytest.mark.req("M7")
def test_backlogs_of_a_topic_expire_in_time() -> None:
    world = World(Topic("t"))
    client = world.client()
    client.receiver("t", credit=0)
    client.sender("t").send("m", ttl_s=0.3)
    assert waiting(world, "t") == 1
    pass_time(world, 0.3)
    assert waiting(world, "t") == 0


@pytest.mark.req("M7")
def test_very_many_messages_expire_in_turns() -> None:
    world = World(Queue("q", ttl_s=1, dead_letter="dead"))
    sender = world.client().sender("q")
    sender.send(*["m"] * 300)
    world.time.now += 1
    world.host.turns.tick()
    assert 0 < waiting(world, "dead") < 300
    before = 0
    while world.host.turns.unfinished:
        before = waiting(world, "dead")
        world.host.turns.run_pending()
        assert waiting(world, "dead") - before <= 50
    assert waiting(world, "dead") == 300


@pytest.mark.req("M7")
def test_a_busy_queue_sets_few_alarms() -> None:
    world = World(Queue("q", ttl_s=1))
    client = world.client()
    sender = client.sender("q")
    receiver = client.receiver("q")
    for number in range(100):
        sender.send("m")
        receiver.grant(1)
        receiver.settle(RELEASED, 2 * number)
        receiver.grant(1)
        receiver.settle(ACCEPTED, 2 * number + 1)
    assert world.host.turns.alarms_set <= 2
    # The queue goes on to watch what comes after all that.
    sender.send("last")
    pass_time(world, 1)
    assert waiting(world) == 0


@pytest.mark.req("M7")
def test_a_clock_that_is_a_hair_early_is_no_trouble() -> None:
    world = World(Queue("q"))
    world.client().sender("q").send("m", ttl_s=1)
    # The wall clock is put back meanwhile.
    held = world.host.space().find("q").held
    held.wall = lambda: world.time.now - 0.5
    pass_time(world, 1)
    assert waiting(world) == 1
    pass_time(world, 0.5)
    assert waiting(world) == 0


@pytest.mark.req("M7")
async def test_a_running_broker_moves_dead_letters_in_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with Broker() as broker:
        chain = [Queue(f"q{n}", ttl_s=0.1, dead_letter=f"q{n + 1}") for n in range(3)]
        for each in (*chain, Queue("q3")):
            await broker.declare(each)
        broker.publish("q0", Message(b"m").encode())
        began = trio.current_time()
        async with broker.local() as peer, peer.receiver("q3") as receiver:
            (await receiver.receive()).accept()
        assert trio.current_time() - began == pytest.approx(0.3, abs=0.02)
