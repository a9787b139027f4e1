"""How many calls a message of 0-9-1 costs, with confirms and acknowledgements."""

from __future__ import annotations

from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.frames import method_frame
from call_counts import Calls, plain_only
from worlds091 import World, published

pytestmark = plain_only

MESSAGES = 64
WARM = 32


def test_a_message_that_is_confirmed_and_acknowledged() -> None:
    world = World()
    client = world.connect(opened=False)
    client.open(channels=2)
    client.say(1, m.QueueDeclare(queue="q"), m.ConfirmSelect())
    client.say(2, m.BasicConsume(queue="q", consumer_tag="c"))
    client.take()
    calls = Calls("amqp_rt", "amqp_rt_amqp091")
    tag = 0
    for counted in (WARM, MESSAGES):
        calls.counts.clear()
        for _ in range(counted):
            data = published(1, "q", b"x" * 100)
            with calls:
                client.engine.receive(data, world.now)
            heard = [method for _, method in client.take()]
            tag += 1
            assert sorted(type(each).__name__ for each in heard) == ["BasicAck", "Content"]
            data = method_frame(2, m.BasicAck(delivery_tag=tag))
            with calls:
                client.engine.receive(data, world.now)
            assert not client.take()
    calls.check(MESSAGES, 131)
