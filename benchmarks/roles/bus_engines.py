"""Growth of the costs of entities of Service Bus, without sockets (``on_amqp_rt.py bus_growth``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from amqp_rt_servicebus.declarations import Correlation, Rule, Sql
from amqp_rt_servicebus.entity import Entity
from amqp_rt_servicebus.messages import arrived
from amqp_rt_servicebus.options import Options
from amqp_rt_servicebus.requests import Requests
from amqp_rt_servicebus.rules import TopicRules
from amqp_rt_servicebus.steps import at_once

from amqp_rt import Message
from amqp_rt.broker.building import Memory

_SESSIONS = 1_000


class _Still:
    def wall(self) -> float:
        return 1_700_000_000.0

    monotonic = wall


class _Fields:
    def application_properties(self) -> dict[str, object]:
        return {"n": 7, "text": "x"}

    def system_property(self, name: str) -> object:
        return "c7" if name == "CorrelationId" else None


def _cost(call: Callable[[], object], seconds: float = 0.4) -> float:
    """Return the seconds of processor time of one *call*."""
    for _ in range(20):
        call()
    count, started = 0, time.process_time()
    while (spent := time.process_time() - started) < seconds:
        for _ in range(10):
            call()
        count += 10
    return spent / count


def _sessions(depth: int) -> float:
    """Take a message for a session, lock the session, peek at it, and delete its oldest message."""
    memory = Memory(1 << 40)
    entity = Entity("q", Options(sessions=True), memory, _Still())
    messages = [
        bytes(Message(b"", group_id=f"s{number}", message_id="m").encode())
        for number in range(min(depth, _SESSIONS))
    ]
    for number in range(depth):
        entity.accept(arrived(messages[number % len(messages)]))
    numbers = iter(range(1 << 60))
    requests = Requests(entity)

    def one() -> None:
        memory.work = 1_000
        number = next(numbers) % len(messages)
        entity.accept(arrived(messages[number]))
        subscription = entity.consume_session(f"s{number}", settled=False)
        at_once(requests.peek(0, 1, session_id=f"s{number}"))
        entity.unsubscribe(subscription)
        at_once(requests.delete_batch(1, 2e9, session_id=f"s{number}"))

    return _cost(one)


def _examine(topic: TopicRules) -> float:
    def one() -> None:
        for _ in topic.examine(topic.evaluation(_Fields())):
            pass

    return _cost(one)


def _correlations(count: int) -> float:
    topic = TopicRules()
    for number in range(count):
        topic.add(f"s{number}", [Rule("r", Correlation(correlation_id=f"c{number}"))])
    return _examine(topic)


def _sql(count: int) -> float:
    topic = TopicRules()
    topic.add("s", [Rule(f"r{number}", Sql(f"n = {number}")) for number in range(count)])
    return _examine(topic) / count


_COSTS: dict[str, tuple[Callable[[int], float], int]] = {
    "sessions": (_sessions, 100_000),
    "correlations": (_correlations, 10_000),
    "copies": (_sql, 10_000),
}


def growth(what: str, quick: bool) -> dict[str, Any]:
    """Return the cost at the largest size, over that at the smallest."""
    cost, most = _COSTS[what]
    small, large = cost(10), cost(most // 10 if quick else most)
    return {"slope": large / small}
