"""The administration client of Azure's SDK for JavaScript, unmodified, over HTTPS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from administered import BEARER, CREATED, KEYS, MemoryEntities, Served, serving
from amqp_rt_servicebus.atom import MessageCounts
from amqp_rt_servicebus.declarations import (
    Correlation,
    Nothing,
    Queue,
    Rule,
    SasKey,
    Sql,
    Subscription,
    Topic,
)
from amqp_rt_servicebus.testing import ServiceBus
from driven import performed

PROGRAM = "administration.js"

#: Node is a program of others, and takes a second to start.
pytestmark = [pytest.mark.req("Z19", "Z21"), pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(MemoryEntities(), str(tmp_path)) as served:
        yield served


@pytest.fixture
def perform(served: Served, azure_javascript: str) -> Callable[..., list[Any]]:
    """Function that has the JavaScript client perform steps, and returns the results."""

    def perform(*steps: list[Any], text: str | None = None, token: str = "") -> list[Any]:
        place = served.host if token else text or served.connection_string()
        return performed(
            azure_javascript, PROGRAM, place, token, steps=steps, ca_file=served.ca_file
        )

    return perform


#: Option of the JavaScript SDK → another value than its default, and ours.
JS_QUEUE_OPTIONS: dict[str, tuple[Any, str, Any]] = {
    "autoDeleteOnIdle": ("PT5M", "auto_delete_on_idle", 300),
    "deadLetteringOnMessageExpiration": (True, "dead_lettering_on_message_expiration", True),
    "defaultMessageTimeToLive": ("P2DT1.5S", "default_message_time_to_live", 172_801.5),
    "duplicateDetectionHistoryTimeWindow": (
        "PT1M",
        "duplicate_detection_history_time_window",
        60,
    ),
    "enableBatchedOperations": (False, "enable_batched_operations", False),
    "enableExpress": (True, "enable_express", True),
    "enablePartitioning": (True, "enable_partitioning", True),
    "lockDuration": ("PT17S", "lock_duration", 17),
    "maxDeliveryCount": (3, "max_delivery_count", 3),
    "maxSizeInMegabytes": (5120, "max_size_in_megabytes", 5120),
    "maxMessageSizeInKilobytes": (256, "max_message_size_in_kilobytes", 256),
    "requiresDuplicateDetection": (True, "requires_duplicate_detection", True),
    "requiresSession": (True, "requires_session", True),
    "status": ("ReceiveDisabled", "status", "ReceiveDisabled"),
    "userMetadata": ("<a & 'b'> \u00e9", "user_metadata", "<a & 'b'> \u00e9"),
}
JS_TOPIC_OPTIONS = {
    name: option
    for name, option in JS_QUEUE_OPTIONS.items()
    if name
    not in (
        "deadLetteringOnMessageExpiration",
        "lockDuration",
        "maxDeliveryCount",
        "requiresSession",
    )
} | {"supportOrdering": (True, "support_ordering", True)}
JS_SUBSCRIPTION_OPTIONS = {
    name: JS_QUEUE_OPTIONS[name]
    for name in (
        "autoDeleteOnIdle",
        "deadLetteringOnMessageExpiration",
        "defaultMessageTimeToLive",
        "enableBatchedOperations",
        "lockDuration",
        "maxDeliveryCount",
        "requiresSession",
        "status",
        "userMetadata",
    )
} | {
    "deadLetteringOnFilterEvaluationExceptions": (
        False,
        "dead_lettering_on_filter_evaluation_exceptions",
        False,
    )
}
JS_KINDS: dict[str, tuple[type, list[str], dict[str, str], dict[str, tuple[Any, str, Any]]]] = {
    "Queue": (Queue, ["a/Q"], {"name": "a/Q"}, JS_QUEUE_OPTIONS),
    "Topic": (Topic, ["a/T"], {"name": "a/T"}, JS_TOPIC_OPTIONS),
    "Subscription": (
        Subscription,
        ["t", "S"],
        {"topicName": "t", "subscriptionName": "S"},
        JS_SUBSCRIPTION_OPTIONS,
    ),
}
#: Options of creation, which an update cannot change.
JS_FIXED = {"requiresSession", "requiresDuplicateDetection", "enablePartitioning"}


@pytest.mark.parametrize("kind", JS_KINDS)
def test_each_option_is_created_shown_listed_and_updated(
    served: Served, perform: Callable[..., list[Any]], kind: str
) -> None:
    declared, path, names, options = JS_KINDS[kind]
    served.entities.declare(("t",), Topic("t"))
    key = tuple(each.lower() for each in path)
    given = {name: value for name, (value, _, _) in options.items()}
    created, got, listed = perform(
        [f"create{kind}", *path, given], [f"get{kind}", *path], [f"list{kind}s", *path[:-1]]
    )
    assert served.entities.found[key].declared == declared(
        path[-1], **{name: value for _, name, value in options.values()}
    )
    wanted = given | names | {"availabilityStatus": "Available"}
    assert created == got == wanted
    assert wanted in listed

    changing = {name: each for name, each in options.items() if name not in JS_FIXED}
    plain = declared(path[-1])
    served.entities.update(path, plain)  # type: ignore[arg-type]
    (before,) = perform([f"get{kind}", *path])
    updated, after = perform(
        [f"update{kind}", *path[:-1], before | {name: value for name, (value, _, _) in changing.items()}]
        if kind != "Subscription"
        else [f"update{kind}", before | {name: value for name, (value, _, _) in changing.items()}],
        [f"get{kind}", *path],
    )  # fmt: skip
    assert served.entities.found[key].declared == declared(
        path[-1], **{name: value for _, name, value in changing.values()}
    )
    assert updated == after == before | {name: given[name] for name in changing}

    exists, _, gone = perform(
        [f"{kind.lower()}Exists", *path], [f"delete{kind}", *path], [f"{kind.lower()}Exists", *path]
    )
    assert (exists, gone, key in served.entities.found) == (True, False, False)


def test_forwarding_and_policies(served: Served, perform: Callable[..., list[Any]]) -> None:
    policy = {
        "claimType": "SharedAccessKey",
        "accessRights": ["Manage", "Send", "Listen"],
        "keyName": "all",
        "primaryKey": "p<",
        "secondaryKey": "s&",
    }
    one = policy | {"accessRights": ["Send"], "keyName": "one"}
    forwards = {"forwardTo": "target", "forwardDeadLetteredMessagesTo": "target"}
    _, queue, single, topic, subscription = perform(
        ["createQueue", "target"],
        ["createQueue", "q", forwards | {"authorizationRules": [policy, one]}],
        ["createQueue", "single", {"authorizationRules": [one]}],
        ["createTopic", "t", {"authorizationRules": [policy]}],
        ["createSubscription", "t", "s", forwards],
    )
    declared = served.entities.found["q",].declared
    assert (declared.forward_to, declared.forward_dead_lettered_messages_to) == ("target",) * 2
    assert declared.keys == {
        "all": SasKey("p<", secondary="s&"),
        "one": SasKey("p<", rights=("Send",), secondary="s&"),
    }
    for each in (queue, subscription):
        assert each["forwardTo"] == each["forwardDeadLetteredMessagesTo"]
        assert each["forwardTo"] == f"sb://{served.host}/target"
    rights = [sorted(each.pop("accessRights")) for each in queue["authorizationRules"]]
    assert rights == [["Listen", "Manage", "Send"], ["Send"]]
    assert [each["keyName"] for each in queue["authorizationRules"]] == ["all", "one"]
    assert single["authorizationRules"] == [one]
    assert topic["authorizationRules"][0]["primaryKey"] == "p<"


def test_runtime_properties_and_the_namespace(
    served: Served, perform: Callable[..., list[Any]]
) -> None:
    entities = served.entities
    counts = MessageCounts(active=1, dead_letter=2, scheduled=3, transfer=4, transfer_dead_letter=5)
    for path, declared in (
        (("q",), Queue("q")),
        (("t",), Topic("t")),
        (("t", "s"), Subscription("s")),
    ):
        entities.declare(path, declared)  # type: ignore[arg-type]
        entities.holds(path, counts=counts, size_in_bytes=99, accessed_at=CREATED + 60)
    queue, queues, topic, topics, subscription, subscriptions, namespace = perform(
        ["getQueueRuntimeProperties", "q"],
        ["listQueuesRuntimeProperties"],
        ["getTopicRuntimeProperties", "t"],
        ["listTopicsRuntimeProperties"],
        ["getSubscriptionRuntimeProperties", "t", "s"],
        ["listSubscriptionsRuntimeProperties", "t"],
        ["getNamespaceProperties"],
    )
    times = {
        "createdAt": "2026-01-02T03:04:05.250Z",
        "modifiedAt": "2026-01-02T03:04:05.250Z",
        "accessedAt": "2026-01-02T03:05:05.250Z",
    }
    numbers = {
        "totalMessageCount": 15,
        "activeMessageCount": 1,
        "deadLetterMessageCount": 2,
        "transferMessageCount": 4,
        "transferDeadLetterMessageCount": 5,
    }
    scheduled = {"scheduledMessageCount": 3, "sizeInBytes": 99}
    assert [queue] == queues == [{"name": "q"} | scheduled | numbers | times]
    assert [topic] == topics == [{"name": "t", "subscriptionCount": 1} | scheduled | times]
    assert [subscription] == subscriptions
    assert subscription == {"topicName": "t", "subscriptionName": "s"} | numbers | times
    assert namespace == {
        "name": "tests",
        "messagingSku": "Standard",
        "createdAt": "2026-01-02T03:04:05.250Z",
        "modifiedAt": "2026-01-02T03:04:06.250Z",
    }


@pytest.mark.smoke
def test_rules(served: Served, perform: Callable[..., list[Any]]) -> None:
    given = {"@text": "a <b>", "@number": 1.5, "@bool": True}
    values = given | {"@time": {"$date": "2020-01-02T03:04:05.000Z"}}
    shown_values = given | {"@time": "2020-01-02T03:04:05.000Z"}
    ours = given | {"@time": datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)}
    fields = {
        "correlationId": "correlation_id",
        "messageId": "message_id",
        "to": "to",
        "replyTo": "reply_to",
        "subject": "label",
        "sessionId": "session_id",
        "replyToSessionId": "reply_to_session_id",
        "contentType": "content_type",
    }
    sql = {"sqlExpression": "a < @number", "sqlParameters": values}
    action = {"sqlExpression": "SET a = @number", "sqlParameters": values}
    some = {each: f"<{each}>" for each in fields}
    served.entities.declare(("t",), Topic("t"))
    results = perform(
        ["createSubscription", "t", "S", {"defaultRuleOptions": {"name": "first", "filter": sql}}],
        ["createRule", "t", "S", "sql", sql, action],
        ["createRule", "t", "S", "some", some | {"applicationProperties": values}],
        ["createRule", "t", "S", "one", {"subject": "l", "applicationProperties": {"k": "v"}}],
        ["getRule", "t", "S", "sql"],
        ["listRules", "t", "S"],
        ["updateRule", "t", "S", {"name": "one", "filter": {"to": "x"}, "action": action}],
        ["getRule", "t", "S", "one"],
        ["ruleExists", "t", "S", "first"],
        ["deleteRule", "t", "S", "first"],
        ["ruleExists", "t", "S", "first"],
    )
    found = served.entities.found
    assert results[8] is True
    assert results[10] is False
    assert ("t", "s", "first") not in found
    assert found["t", "s", "sql"].declared == Rule(
        "sql",
        Sql("a < @number", parameters=ours),
        action="SET a = @number",
        action_parameters=ours,
    )
    assert found["t", "s", "some"].declared == Rule(
        "some",
        Correlation(**{fields[each]: text for each, text in some.items()}, properties=ours),
    )
    assert found["t", "s", "one"].declared == Rule(
        "one", Correlation(to="x"), action="SET a = @number", action_parameters=ours
    )
    sql_shown = sql | {"sqlParameters": shown_values}
    action_shown = action | {"sqlParameters": shown_values}
    assert results[1] == results[4] == {"name": "sql", "filter": sql_shown, "action": action_shown}
    assert results[5] == [
        {"name": "first", "filter": sql_shown, "action": {}},
        {
            "name": "one",
            "filter": {"subject": "l", "applicationProperties": {"k": "v"}},
            "action": {},
        },
        {"name": "some", "filter": some | {"applicationProperties": shown_values}, "action": {}},
        results[1],
    ]
    assert results[7] == {"name": "one", "filter": {"to": "x"}, "action": action_shown}


def test_shows_the_default_rule_of_python(
    served: Served, perform: Callable[..., list[Any]]
) -> None:
    served.entities.declare(("t",), Topic("t"))
    served.entities.declare(("t", "s"), Subscription("s"))
    served.entities.declare(("t", "s", "none"), Rule("none", Nothing()))
    assert perform(["listRules", "t", "s"]) == [
        [
            {"name": "$Default", "filter": {"sqlExpression": "1=1"}, "action": {}},
            {"name": "none", "filter": {"sqlExpression": "1=0"}, "action": {}},
        ]
    ]


def test_lists_have_pages(served: Served, perform: Callable[..., list[Any]]) -> None:
    served.entities.declare(("t",), Topic("t"))
    names = [f"e{number:03}" for number in range(105)]
    for name in names:
        served.entities.declare((name,), Queue(name))
        served.entities.declare(("t", name), Subscription(name, []))
    everything, pages, subscriptions, none = perform(
        ["listQueues"],
        ["byPage", "listQueues", 50],
        ["byPage", "listSubscriptions", 60, "t"],
        ["listRules", "t", names[0]],
    )
    assert [each["name"] for each in everything] == names
    assert [len(each) for each in pages] == [50, 50, 5]
    assert [each["name"] for page in pages for each in page] == names
    assert [each["subscriptionName"] for page in subscriptions for each in page] == names
    assert none == []


def test_failures_have_the_codes_of_the_sdk(
    served: Served, perform: Callable[..., list[Any]]
) -> None:
    served.entities.declare(("q",), Queue("q"))
    results = perform(
        ["getQueue", "nothing"],
        ["deleteTopic", "nothing"],
        ["getRule", "t", "s", "r"],
        ["createQueue", "q"],
        ["createTopic", "Q"],
        ["createQueue", "x", {"lockDuration": "17 s"}],
    )
    assert [(each["code"], each["statusCode"]) for each in results] == [
        *[("MessageEntityNotFoundError", 404)] * 3,
        *[("MessageEntityAlreadyExistsError", 409)] * 2,
        ("ServiceError", 400),
    ]
    assert results[5]["message"].startswith(
        "SubCode=40000. LockDuration: '17 s' is not an ISO 8601 duration"
    )
    for text in (
        served.connection_string(key="wrong"),
        served.connection_string(name="listener", key=KEYS["listener"].key),
    ):
        (refused,) = perform(["getQueue", "q"], text=text)
        assert (refused["code"], refused["statusCode"]) == ("UnauthorizedRequestError", 401)


def test_web_tokens_and_the_flag_of_the_emulator(
    served: Served, perform: Callable[..., list[Any]]
) -> None:
    steps = ["createQueue", "q"], ["createQueue", "p", {"forwardTo": "q"}]
    _, forwarding = perform(*steps, token=BEARER)
    assert forwarding["forwardTo"] == f"sb://{served.host}/q"
    (refused,) = perform(["getQueue", "q"], token="x.y.z")
    assert refused["statusCode"] == 401
    text = f"{served.connection_string()};UseDevelopmentEmulator=true;"
    assert perform(["queueExists", "q"], text=text) == [True]


# --- A namespace with messages ------------------------------------------------------------------


def test_a_namespace_is_administered_at_the_port_of_its_messages(azure_javascript: str) -> None:
    rule = ["createRule", "t", "s", "eu", {"sqlExpression": "region = 'eu'"}]
    steps: list[list[Any]] = [
        ["createQueue", "q", {"maxDeliveryCount": 3}],
        ["createQueue", "Q"],
        ["createTopic", "t"],
        ["createSubscription", "t", "s", {"forwardTo": "q"}],
        ["deleteRule", "t", "s", "$Default"],
        rule,
    ]
    with ServiceBus() as bus:

        def perform(*steps: list[Any]) -> list[Any]:
            return performed(
                azure_javascript, PROGRAM, bus.connection_string, steps=steps, ca_file=bus.ca_file
            )

        queue, again, *_ = perform(*steps)
        assert (queue["name"], queue["maxDeliveryCount"]) == ("q", 3)
        assert again["code"] == "MessageEntityAlreadyExistsError"
        for region in ("eu", "us"):
            bus.topic("t").send("a", application_properties={"region": region})
        counted, listed, gone = perform(
            ["getQueueRuntimeProperties", "q"],
            ["listSubscriptionsRuntimeProperties", "t"],
            ["deleteTopic", "t"],
        )
        assert (counted["activeMessageCount"], counted["totalMessageCount"]) == (1, 1)
        assert [each["subscriptionName"] for each in listed] == ["s"]
        assert "message" not in (gone or {})
        assert bus.queue("q").stats.active == 1
        (missing,) = perform(["getTopic", "t"])
        assert missing["statusCode"] == 404
