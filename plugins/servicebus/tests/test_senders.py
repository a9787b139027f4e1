"""Batches on a link: taken as a whole or not at all, in turns, and in the order of what the link sends."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

from amqp_rt_servicebus.declarations import Queue
from amqp_rt_servicebus.faults import Faults
from amqp_rt_servicebus.messages import BATCH_FORMAT
from amqp_rt_servicebus.nodes import QueueNode, Services
from amqp_rt_servicebus.senders import Sender
from entities import Time, Whole

from amqp_rt import Message
from amqp_rt.broker.building import Memory
from amqp_rt.fronts import Source, Target
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.testing.pairs import Joined, Recorder

WORK = 100
#: Messages of a batch that are read, or put, in that.
OF_A_TURN = 25


def batch(*bodies: object) -> bytes:
    messages = [bytes(Message(body).encode()) for body in bodies]
    return b"".join(b"\x00\x53\x75\xb0" + struct.pack(">I", len(each)) + each for each in messages)


class World:
    """A queue, and a client that sends to it."""

    def __init__(self, *, limit: int = 1 << 30, **options: Any) -> None:
        self.memory = Memory(limit)
        self.unfinished: list[Any] = []
        services = Services(
            self.memory,
            Time(),
            set_alarm=lambda entity, at: None,
            resume_later=self.unfinished.append,
            faults=Faults(),
        )
        self.node = QueueNode(Queue("q", **options), services)
        host: Any = SimpleNamespace(limits=DEFAULT_LIMITS, clock=Time(), transactions=None)
        self.sender = Sender(self.node.intake, self.node.entity, host)
        self.joined = Joined(on_attach=lambda link: link.accept(self.sender))
        self.joined.pump()
        self.client = Recorder()
        session = self.joined.client.begin()
        self.link = session.attach_sender(
            "s", self.client, source=Source(), target=Target(address="q")
        )
        self.joined.pump()

    def send(self, payload: bytes, message_format: int = BATCH_FORMAT) -> Any:
        sending = self.link.send(payload, message_format=message_format)
        self.joined.pump()
        return sending

    def turns(self) -> int:
        count = 0
        while self.unfinished:
            self.memory.work = WORK
            unfinished, self.unfinished[:] = self.unfinished[:], []
            for each in unfinished:
                each.resume()
            count += 1
            assert count < 1_000
        self.joined.pump()
        return count

    @property
    def bodies(self) -> list[Any]:
        found = Whole(self.node.entity).peek(0, 1_000)
        return [Message.decode(each).body for each in found]


def outcome(sending: Any) -> str:
    return type(sending.state).__name__


def test_a_small_batch_is_taken_at_once() -> None:
    world = World()
    sending = world.send(batch("a", "b"))
    assert not world.unfinished
    assert outcome(sending) == "Accepted"
    assert world.bodies == ["a", "b"]
    assert world.memory.held == world.node.entity.bytes


def test_a_large_batch_is_taken_in_turns() -> None:
    world = World()
    world.memory.work = WORK
    sending = world.send(batch(*range(200)))
    assert outcome(sending) == "NoneType"
    # It is read, and then put.
    assert world.turns() >= 2 * 200 / OF_A_TURN - 2
    assert outcome(sending) == "Accepted"
    assert world.bodies == list(range(200))
    assert world.memory.held == world.node.entity.bytes
    assert world.node.entity.shelf.reserved == 0


def test_what_follows_a_batch_on_its_link_comes_after_it() -> None:
    world = World()
    world.memory.work = WORK
    sent = [
        world.send(batch(*range(100))),
        world.send(bytes(Message(100).encode()), 0),
        world.send(batch(101, 102)),
        world.send(bytes(Message(103).encode()), 0),
    ]
    world.turns()
    assert world.bodies == list(range(104))
    assert [outcome(each) for each in sent] == ["Accepted"] * 4


def test_a_malformed_message_refuses_the_whole_batch() -> None:
    world = World()
    world.memory.work = WORK
    sending = world.send(batch(*range(50)) + b"\x00\x53\x75\xa0\x01\xff")
    world.turns()
    assert outcome(sending) == "Rejected"
    assert world.bodies == []
    assert world.memory.held == 0


def test_a_batch_without_room_is_refused_before_it_is_read() -> None:
    world = World(limit=4_000)
    sending = world.send(batch(b"x" * 5_000))
    assert outcome(sending) == "Rejected"
    assert sending.state.error.condition == "amqp:resource-limit-exceeded"
    assert world.memory.held == 0


def test_a_batch_that_is_being_taken_has_its_room() -> None:
    world = World(limit=10_000)
    world.memory.work = WORK
    first = world.send(batch(*(b"x" * 100 for _ in range(50))))
    assert world.memory.held > 5_000
    second = world.send(batch(*(b"y" * 100 for _ in range(50))))
    assert outcome(second) == "Rejected"
    world.turns()
    assert outcome(first) == "Accepted"
    assert len(world.node.entity.shelf) == 50


def test_a_queue_that_is_deleted_drops_the_rest() -> None:
    world = World()
    world.memory.work = WORK
    world.send(batch(*range(100)))
    world.node.delete()
    world.turns()
    assert world.memory.held == 0


def test_messages_count_as_much_as_they_take() -> None:
    world = World()
    (link,) = world.joined.server.sessions[0].links.values()
    assert link.delivery_work > 1
