"""Messages on their way through a topic: in turns, in their order, and within the memory of the broker."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.bounds import Bounds
from amqp_rt_servicebus.declarations import Queue, Rule, Sql, Subscription, Topic
from amqp_rt_servicebus.faults import Faults
from amqp_rt_servicebus.messages import application_properties, arrived
from amqp_rt_servicebus.nodes import QueueNode, Services, SubscriptionNode, TopicNode
from amqp_rt_servicebus.router import Router
from amqp_rt_servicebus.stored import Stored
from entities import Time, Whole

from amqp_rt import Message
from amqp_rt.broker.building import Memory

pytestmark = pytest.mark.req("Z14")

#: Work of a turn.
WORK = 100


class World:
    """Topics and queues that are joined as a namespace joins them, with turns that a test gives."""

    def __init__(self, *, limit: int = 1 << 30, bounds: Bounds | None = None) -> None:
        self.memory = Memory(limit)
        self.memory.work = WORK
        self.unfinished: list[Any] = []
        self.services = Services(
            self.memory,
            Time(),
            set_alarm=lambda entity, at: None,
            resume_later=self.unfinished.append,
            bounds=bounds or Bounds(),
            faults=Faults(),
        )
        self.nodes: dict[str, QueueNode | TopicNode] = {}
        self.router = Router(self.nodes.get)

    def queue(self, name: str) -> QueueNode:
        node = self.nodes[name] = QueueNode(Queue(name), self.services)
        self.router.wire(node)
        return node

    def topic(self, name: str, *subscriptions: Subscription) -> TopicNode:
        node = TopicNode(Topic(name), self.services)
        self.nodes[name] = node
        self.router.wire(node)
        for each in subscriptions:
            found = SubscriptionNode(node, each, self.services)
            node.subscriptions[each.name] = found
            self.router.wire(found)
        return node

    def send(self, node: TopicNode | QueueNode, body: object = "m", **fields: Any) -> None:
        node.entity.accept(arrived(bytes(Message(body, **fields).encode())))

    def turns(self) -> list[int]:
        """Give turns until none is asked for; return by how much each went beyond its work."""
        beyond = []
        while self.unfinished:
            self.memory.work = WORK
            unfinished, self.unfinished[:] = self.unfinished[:], []
            for each in unfinished:
                each.resume()
            beyond.append(-min(0, self.memory.work))
            assert len(beyond) < 10_000
        return beyond


def bodies(node: SubscriptionNode | QueueNode) -> list[Any]:
    return [Message.decode(each).body for each in Whole(node.entity).peek(0, 1_000)]


def many(count: int, **options: Any) -> list[Subscription]:
    return [Subscription(f"s{number}", **options) for number in range(count)]


def test_a_message_reaches_few_subscriptions_at_once() -> None:
    world = World()
    topic = world.topic("t", *many(5))
    world.send(topic)
    assert not world.unfinished
    assert [bodies(each) for each in topic.subscriptions.values()] == [["m"]] * 5
    assert world.memory.held == sum(each.entity.bytes for each in topic.subscriptions.values())


def test_a_message_reaches_many_subscriptions_in_turns() -> None:
    world = World()
    topic = world.topic("t", *many(200))
    world.send(topic)
    assert world.unfinished
    reached = sum(len(each.entity.shelf) for each in topic.subscriptions.values())
    assert 0 < reached <= WORK
    beyond = world.turns()
    assert len(beyond) >= 200 * 5 // WORK - 1
    assert max(beyond) <= 10
    assert [bodies(each) for each in topic.subscriptions.values()] == [["m"]] * 200
    assert topic.entity.shelf.reserved == 0
    assert world.memory.held == sum(each.entity.bytes for each in topic.subscriptions.values())


def test_expensive_rules_are_evaluated_in_turns() -> None:
    world = World(bounds=Bounds(steps_max=60_000, rule_steps_max=2_000))
    bomb = " OR ".join(["text LIKE '%a_b%'"] * 9)
    rules = [Rule(f"r{number}", Sql(bomb)) for number in range(300)]
    topic = world.topic("t", Subscription("s", rules), Subscription("other"))
    world.send(topic, "bomb", application_properties={"text": "a" * 300})
    beyond = world.turns()
    # 60,000 steps are 5,000 units of work, 12 for each; one rule takes at most 2,000 steps.
    assert 5_000 / (WORK + 2_000 / 12) <= len(beyond) <= 5_000 / WORK + 2
    assert max(beyond) <= 2_000 / 12 + 10
    assert bodies(topic.subscriptions["other"]) == ["bomb"]


def test_messages_keep_their_order() -> None:
    world = World()
    topic = world.topic("t", *many(150))
    for body in range(5):
        world.send(topic, body)
    world.memory.work = WORK
    world.send(topic, 5)
    world.turns()
    assert [bodies(each) for each in topic.subscriptions.values()] == [list(range(6))] * 150


def test_what_a_later_turn_gives_goes_on_from_there() -> None:
    world = World()
    end = world.queue("end")
    topic = world.topic("t", *many(100, forward_to="end"))
    world.send(topic)
    world.turns()
    assert bodies(end) == ["m"] * 100


def test_subscriptions_and_topics_that_are_deleted_meanwhile_get_nothing_more() -> None:
    world = World()
    topic = world.topic("t", *many(100))
    world.send(topic)
    gone = [each for each in topic.subscriptions.values() if not len(each.entity.shelf)][:10]
    for each in gone:
        del topic.subscriptions[each.declared.name]
        each.delete()
    world.turns()
    assert [len(each.entity.shelf) for each in topic.subscriptions.values()] == [1] * 90
    assert [len(each.entity.shelf) for each in gone] == [0] * 10
    world.memory.work = WORK
    world.send(topic)
    world.send(topic)
    assert world.unfinished
    topic.delete()
    world.turns()
    assert world.memory.held == 0


def test_copies_wait_for_memory() -> None:
    world = World(limit=50_000)
    topic = world.topic("t", *many(3))
    world.memory.work = 1 << 40
    world.send(topic, b"x" * 20_000)
    first, second, third = topic.subscriptions.values()
    assert [len(each.entity.shelf) for each in (first, second, third)] == [1, 1, 0]
    world.turns()
    assert len(third.entity.shelf) == 0
    assert world.memory.held <= 50_000 + 20_100
    first.entity.purge()
    assert world.unfinished
    world.turns()
    assert [len(each.entity.shelf) for each in (first, second, third)] == [0, 1, 1]
    assert world.memory.held == second.entity.bytes + third.entity.bytes


def test_messages_that_wait_leave_room_for_their_first_copies() -> None:
    world = World(limit=50_000)
    topic = world.topic("t", *many(2))
    world.memory.work = 0
    for body in range(2):
        world.send(topic, bytes([body]) * 20_000)
    assert topic.entity.shelf.reserved > 40_000
    world.memory.work = 1 << 40
    taken = []
    for _ in range(4):
        world.turns()
        for each in topic.subscriptions.values():
            taken += [body[0] for body in bodies(each)]
            each.entity.purge()
    assert sorted(taken) == [0, 0, 1, 1]
    assert world.memory.held == 0


def test_clients_get_no_credit_while_too_many_messages_wait() -> None:
    world = World()
    topic = world.topic("t", *many(2))
    topic.entity.limits = topic.entity.limits.__class__(backlog_max=3)
    world.memory.work = 0
    rooms = []
    for _ in range(4):
        rooms.append(topic.entity.room() > 0)
        world.send(topic)
    assert rooms == [True, True, True, False]
    called: list[None] = []
    topic.entity.awaited = True
    topic.entity.on_room = lambda: called.append(None)
    world.turns()
    assert called
    assert topic.entity.room() > 0


def test_a_message_is_dead_lettered_once_whatever_fails_and_when() -> None:
    world = World()
    rules = [Rule(f"r{number}", Sql("text > 5")) for number in range(100)]
    strict = Subscription("s", rules, dead_lettering_on_filter_evaluation_exceptions=True)
    silent = Subscription("u", rules, dead_lettering_on_filter_evaluation_exceptions=False)
    topic = world.topic("t", strict, silent, Subscription("v"))
    world.send(topic, application_properties={"text": "a"})
    world.turns()
    letters = topic.subscriptions["s"].entity.dead_letters
    assert letters is not None
    (number,) = letters.shelf.numbers
    dead = letters.shelf.find(number)
    assert isinstance(dead, Stored)
    assert application_properties(dead)["DeadLetterReason"] == "FilterException"
    quiet = topic.subscriptions["u"].entity.dead_letters
    assert quiet is not None
    assert len(quiet.shelf) == 0
    assert bodies(topic.subscriptions["v"]) == ["m"]


@pytest.mark.parametrize("work", [0, 1, WORK, 1 << 40])
def test_copies_are_bounded_however_they_are_divided(work: int) -> None:
    world = World()
    world.router = Router(world.nodes.get, copies_max=500)
    topic = world.topic("t", *many(10, forward_to="t"))
    world.memory.work = work
    world.send(topic)
    world.turns()
    copies = sum(
        len(part.shelf) for each in topic.subscriptions.values() for part in each.entity.parts
    )
    # Without the bound there would be 10 ** 5.
    assert 300 <= copies <= 600
