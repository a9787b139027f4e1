"""Event loop of our broker under attack, while a regular client is working.

Each attack runs over four connections against a broker with default limits, while a regular client
sends messages through a queue, one after the other. *step_ms* is the longest step of a task in the
broker, in processor time of its thread: how long the loop itself delayed all other tasks. The
elapsed time, which includes the influence of other processes of the machine, is given beside it.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory

from ..contestants import Contestant
from ..processes import Role
from ..rounds import Case, Sample
from . import Plan

#: Titles of the attacks by their names in the role.
ATTACKS = {
    "": "nobody attacks",
    "logins": "failed logins",
    "greetings": "connections that say nonsense",
    "bombs": "arrays of 60,000 nulls in 20 octets",
    "bombs_nested": "lists in lists, 28 deep",
    "bombs_deep": "lists in lists, 2,000 deep",
    "dispositions": "dispositions of all that is unsettled, which settle nothing",
    "drains": "credit that is drained, and echoes",
    "echoes": "flows that ask for an echo",
    "echoes_unread": "the same, and nobody reads",
    "unread": "all the credit there is, and nobody reads",
    "churn": "links that come and go",
    "sessions": "sessions that come and go",
    "partings": "links that give 5,000 messages back, again and again",
    "losses": "connections that are lost with thousands of messages in 64 sessions",
    "links": "connections that are lost with 4,096 links",
    "delays": "messages that are due, and expire, at the same time",
    "selectors": "selectors of 21 patterns, for messages with long texts",
    "selective_subscribers": "messages with long texts for subscribers with such selectors",
    "pieces": "a message without end, an octet a frame",
    "poison": "messages of 500 properties",
    "subscribers": "messages for thousands of subscribers of a topic",
    "commits": "transactions of 10,000 messages",
    "commits_kept": "transactions of 10,000 messages that are stored",
    "queries": "management queries of 99,000 nodes",
    "topics": "0-9-1: messages of 99 keys for an exchange with 2,000 patterns that fit",
    "headers": "0-9-1: messages with 4,000 values for an exchange with 5,000 bindings",
    "fan_out": "0-9-1: messages for 900 queues",
    "nacks": "0-9-1: thousands of messages that are given back, again and again",
    "tables": "0-9-1: headers of 4,000 values",
    "unacked": "0-9-1: connections that are lost with thousands of messages",
    "deletions": "0-9-1: queues of 20,000 messages that are deleted",
    "purges": "0-9-1: queues of 20,000 messages that are purged",
    "rejected": "0-9-1: messages whose rejects send dead letters to 250 queues each",
    "expired": "0-9-1: messages that expire, with as many dead letters",
    "overflown": "0-9-1: messages that overflow, with as many dead letters",
    "pings": "WebSocket pings",
    "fragments": "WebSocket fragments",
    "bus_messages": "Service Bus: small messages that expire",
    "bus_bombs": "Service Bus: messages for a topic whose rules take all steps that they may",
    "bus_rules": "Service Bus: messages for a topic with 10,000 rules",
    "bus_wide": "Service Bus: messages for a topic with 2,000 subscriptions",
    "bus_batches": "Service Bus: batches of 4,500 messages",
    "bus_new_sessions": "Service Bus: 10,000 sessions, and receivers that come and go",
    "bus_full_sessions": "Service Bus: the same for 100,000 messages in sessions",
    "bus_locks": "Service Bus: thousands of locks that end at the same time",
    "bus_abandons": "Service Bus: dispositions that abandon 5,000 messages",
    "bus_numbers": "Service Bus: requests for 2,000 deferred messages by their numbers",
    "bus_schedules": "Service Bus: requests that schedule 2,000 messages",
    "bus_peeks": "Service Bus: requests to peek at 250 of 100,000 messages",
    "bus_listings": "Service Bus: listings of 10,000 sessions",
    "bus_names": "Service Bus: links to entities with hostile names",
    "bus_documents": "Service Bus: Atom documents with many elements, and long rules",
}
_OVER_0_9_1 = (
    "topics", "headers", "fan_out", "nacks", "tables", "unacked", "deletions", "purges", "rejected",
    "expired", "overflown",
)  # fmt: skip
_OVER_WEB = ("pings", "fragments")
_BUS = "bus_"
#: Against a broker that stores durable messages.
_STORED = ("commits_kept",)
#: Messages in the queue for attackers that take without reading.
_FULL = 5_000
#: Small messages in the queue for attackers that return all of them.
_MANY = 50_000
#: Nodes for attacks by management queries; declaring them takes a while.
_NODES = 99_000

_numbers = itertools.count()


def cases(plan: Plan) -> list[Case]:
    servers: dict[str, Role] = {}
    able = plan.field.with_role("guarded")
    return [
        Case(
            "attacked",
            title,
            {
                one.key: partial(sample, plan, one, name, servers)
                for one in able
                if (one.broker091 is not None or name not in _OVER_0_9_1)
                and (one.namespace or not name.startswith(_BUS))
            },
        )
        for name, title in ATTACKS.items()
    ]


def sample(plan: Plan, one: Contestant, name: str, servers: dict[str, Role]) -> Sample:
    stored = name in _STORED
    bus = name.startswith(_BUS)
    key = f"{one.key} with a {'store' if stored else 'namespace'}" if stored or bus else one.key
    if key not in servers:
        many = not stored and not bus and "queries" in ATTACKS
        options: dict[str, object] = {"nodes": _NODES if many else 0, "namespace": bus}
        if stored:
            folder = plan.stack.enter_context(TemporaryDirectory())
            options["store"] = f"sqlite:{folder}/broker.db"
        servers[key] = server = plan.stack.enter_context(one.role("guarded", **options))
        fill(one, server.port, "full", _FULL, 1024)
        fill(one, server.port, "many", _MANY, 8)
        # Load lazily imported modules before the measurement.
        with one.role("attack", what="selectors", port=server.port, seconds=0.2) as first:
            first.result()
    server = servers[key]
    seconds = max(0.5, plan.settings.seconds)
    port = server.port
    if bus or name in _OVER_WEB:
        port = server.ready["bus_port" if bus else "web_port"]
    good = {"address": f"good-{next(_numbers)}", "connections": 0, "active": 1}
    with ExitStack() as stack:
        client = stack.enter_context(one.role("idle", port=server.port, seconds=seconds, **good))
        server.tell()  # Discard the values of the start
        if name:
            attacker = stack.enter_context(
                one.role("attack", what=name, port=port, seconds=seconds)
            )
        done = client.line(20 + 5 * seconds)
        if name:
            attacker.result(20 + 5 * seconds)
        seen = server.tell()
    return {
        "step_ms": seen["step_ms"],
        "step_wall_ms": seen["step_wall_ms"],
        "rate": done["n"] / seconds,
        "longest_ms": done["longest_ms"],
    }


def fill(one: Contestant, port: int, address: str, count: int, size: int) -> None:
    """Put messages into a queue for the attackers to take."""
    with one.role(
        "source", port=port, address=address, size=size, settled=False, seconds=60, count=count, sasl=True
    ) as producer:  # fmt: skip
        producer.result(60)
