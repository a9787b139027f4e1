"""A namespace and the client of Azure's SDK for JavaScript, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue, Subscription, Topic
from amqp_rt_servicebus.testing import ServiceBus
from driven import Javascript, Refused

#: Node is a program of others, and takes a second to start.
pytestmark = [pytest.mark.req("Z21"), pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    with ServiceBus(
        Queue("q", lock_duration=30, max_delivery_count=2),
        Queue("s", requires_session=True, lock_duration=30),
        Topic("t", [Subscription("s")]),
    ) as bus:
        yield bus


@pytest.fixture
def client(bus: ServiceBus, azure_javascript: str) -> Iterator[Javascript]:
    client = Javascript(azure_javascript, bus.connection_string)
    yield client
    client.close()


def bodies(messages: list[dict[str, Any]]) -> list[Any]:
    return [each["body"] for each in messages]


def test_messages_are_sent_received_and_completed(bus: ServiceBus, client: Javascript) -> None:
    client("send", "q", [{"body": "a", "applicationProperties": {"n": 1}}, {"body": {"b": 2}}])
    client("open", "r", ["q"])
    first, second = client("receive", "r", 2)
    assert bodies([first, second]) == ["a", {"b": 2}]
    assert (first["applicationProperties"], first["deliveryCount"]) == ({"n": 1}, 0)
    for each in (first, second):
        client("settle", "r", "complete", each["key"])
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


def test_messages_are_deleted_in_the_mode_receive_and_delete(
    bus: ServiceBus, client: Javascript
) -> None:
    client("send", "q", [{"body": "a"}, {"body": "b"}])
    client("open", "r", ["q"], {"receiveMode": "receiveAndDelete"})
    assert bodies(client("receive", "r", 2)) == ["a", "b"]
    assert bus.queue("q").stats.active == 0


def test_each_settlement_has_its_effect(bus: ServiceBus, client: Javascript) -> None:
    client("send", "q", [{"body": each} for each in "abc"])
    client("open", "r", ["q"])
    a, b, c = client("receive", "r", 3)
    client("settle", "r", "abandon", a["key"], {"mark": 1})
    client("settle", "r", "defer", b["key"])
    client(
        "settle",
        "r",
        "deadLetter",
        c["key"],
        {"deadLetterReason": "why", "deadLetterErrorDescription": "because"},
    )
    (again,) = client("receive", "r", 1)
    assert (again["body"], again["deliveryCount"]) == ("a", 1)
    assert again["applicationProperties"] == {"mark": 1}
    (deferred,) = client("deferred", "r", b["key"])
    client("settle", "r", "complete", deferred["key"])
    client("open", "dead", ["q"], {"subQueueType": "deadLetter"})
    (dead,) = client("receive", "dead", 1)
    assert (dead["deadLetterReason"], dead["deadLetterErrorDescription"]) == ("why", "because")
    assert dead["deadLetterSource"] == "q"


def test_a_lock_is_renewed_or_lost(bus: ServiceBus, client: Javascript) -> None:
    client("send", "q", {"body": "a"})
    client("open", "r", ["q"])
    (message,) = client("receive", "r", 1)
    bus.advance(20)
    client("renew", "r", message["key"])
    bus.advance(31)
    with pytest.raises(Refused, match="MessageLockLost"):
        client("settle", "r", "complete", message["key"])
    with pytest.raises(Refused, match="MessageLockLost"):
        client("renew", "r", message["key"])


def test_messages_are_scheduled_cancelled_and_peeked(bus: ServiceBus, client: Javascript) -> None:
    first, _ = client("schedule", "q", [{"body": "a"}, {"body": "b"}], 100_000)
    client("cancel", "q", [first])
    client("open", "r", ["q"])
    (peeked,) = client("peek", "r", 10)
    assert (peeked["body"], peeked["state"]) == ("b", "scheduled")
    (peeked,) = client("peek", "r", 10, {"omitMessageBody": True, "from": "1"})
    assert (peeked.get("body"), peeked["state"]) == (None, "scheduled")
    bus.advance(101)
    assert bodies(client("receive", "r", 1)) == ["b"]


def test_sessions_are_accepted_and_keep_their_state(bus: ServiceBus, client: Javascript) -> None:
    client("send", "s", [{"body": "1", "sessionId": "x"}, {"body": "2", "sessionId": "y"}])
    assert client("accept", "r", ["s"], None) == "x"
    assert client("accept", "other", ["s"], "y") == "y"
    with pytest.raises(Refused, match="SessionCannotBeLocked"):
        client("accept", "third", ["s"], "y")
    assert bodies(client("receive", "r", 1)) == ["1"]
    client("session", "r", "setSessionState", {"step": 1})
    assert client("session", "r", "getSessionState") == {"step": 1}
    client("session", "r", "renewSessionLock")
    client("close", "r")
    assert client("accept", "again", ["s"], None) == "x"
    assert client("session", "again", "getSessionState") == {"step": 1}


def test_rules_are_managed_over_amqp(bus: ServiceBus, client: Javascript) -> None:
    (default,) = client("rules", "t", "s", "list")
    assert (default["name"], default["filter"]) == ("$Default", {"sqlExpression": "1=1"})
    client("rules", "t", "s", "deleteRule", "$Default")
    client(
        "rules",
        "t",
        "s",
        "createRule",
        "sql",
        {"sqlExpression": "a = 1"},
        {"sqlExpression": "SET b = 2"},
    )
    client(
        "rules",
        "t",
        "s",
        "createRule",
        "fields",
        {"subject": "x", "applicationProperties": {"p": 1}},
    )
    sql, fields = client("rules", "t", "s", "list")
    assert (sql["name"], sql["filter"]["sqlExpression"]) == ("sql", "a = 1")
    assert sql["action"]["sqlExpression"] == "SET b = 2"
    assert (fields["filter"]["subject"], fields["filter"]["applicationProperties"]) == (
        "x",
        {"p": 1},
    )
    client("send", "t", [{"body": "1", "applicationProperties": {"a": 1}}, {"body": "2"}])
    assert len(bus.subscription("t", "s").messages) == 1
    with pytest.raises(Refused):
        client("rules", "t", "s", "createRule", "sql", {"sqlExpression": "1=1"})


def test_an_entity_that_does_not_exist_is_refused(client: Javascript) -> None:
    with pytest.raises(Refused, match="MessagingEntityNotFound"):
        client("send", "nowhere", {"body": "a"})


def test_a_wrong_key_is_refused(bus: ServiceBus, azure_javascript: str) -> None:
    text = bus.connection_string.replace("SAS_KEY_VALUE", "guessed")
    client = Javascript(azure_javascript, text)
    try:
        with pytest.raises(Refused, match="UnauthorizedAccess"):
            client("send", "q", {"body": "a"})
    finally:
        client.close()
