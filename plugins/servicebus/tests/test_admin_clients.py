"""The administration clients of Azure's SDK for Python, unmodified, over HTTPS: Python with threads and with asyncio."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from administered import (
    BEARER,
    CREATED,
    MANAGER,
    MemoryEntities,
    Served,
    serving,
    signed,
)
from amqp_rt_servicebus.atom import MessageCounts, NamespaceFacts
from amqp_rt_servicebus.declarations import (
    Correlation,
    Everything,
    Nothing,
    Queue,
    Rule,
    SasKey,
    Sql,
    Subscription,
    Topic,
)

FOREVER = timedelta(days=10_675_199, seconds=10_085, microseconds=477_581)

#: The SDK asks elements of XML whether they are true, which Python 3.12 warns of.
pytestmark = [
    pytest.mark.req("Z19", "Z21"),
    pytest.mark.filterwarnings("ignore:Testing an element's truth value"),
    pytest.mark.foreign,
    pytest.mark.slow,
]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(MemoryEntities(), str(tmp_path)) as served:
        yield served


class Sdk:
    """A client of Python, whose calls return when they are done; lists are collected."""

    def __init__(self, client: Any, run: Callable[[Any], Any]) -> None:
        self._client = client
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = getattr(self._client, name)(*args, **options)
            if hasattr(result, "__aiter__"):
                return self._run(_collected(result))
            if inspect.isawaitable(result):
                return self._run(result)
            return list(result) if name.startswith("list_") else result

        return call


async def _collected(iterable: Any) -> list[Any]:
    return [each async for each in iterable]


class FixedToken:
    """Credential that has one token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def get_token(self, *scopes: str, **options: Any) -> Any:
        from azure.core.credentials import AccessToken

        return AccessToken(self._token, int(time.time()) + 3600)


class FixedTokenLater(FixedToken):
    """The same for clients of asyncio."""

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        return super().get_token(*scopes, **options)


@pytest.fixture(params=["sync", "asyncio"])
def connect(
    request: pytest.FixtureRequest, served: Served, azure_python: None
) -> Iterator[Callable[..., Sdk]]:
    """Function that makes clients of a connection string, or of a token."""
    later = request.param == "asyncio"
    if later:
        from azure.servicebus.aio import management
    else:
        from azure.servicebus import management  # type: ignore[no-redef]
    made: list[Any] = []
    options = {"connection_verify": served.ca_file, "retry_total": 0}
    client = management.ServiceBusAdministrationClient

    with asyncio.Runner() as runner:
        run = runner.run if later else _done

        def connect(text: str | None = None, *, token: str | None = None) -> Sdk:
            if token is None:
                text = text or served.connection_string()
                made.append(client.from_connection_string(text, **options))
            else:
                credential = FixedTokenLater(token) if later else FixedToken(token)
                made.append(client(served.host, credential, **options))
            return Sdk(made[-1], run)

        yield connect
        for each in made:
            run(each.close())


def _done(result: Any) -> Any:
    return result


@pytest.fixture
def sdk(connect: Callable[..., Sdk]) -> Sdk:
    return connect()


#: Option of the Python SDK → another value than its default, and what the client then reads.
QUEUE_OPTIONS: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(minutes=5),
    "dead_lettering_on_message_expiration": True,
    "default_message_time_to_live": timedelta(days=2, seconds=1.5),
    "duplicate_detection_history_time_window": timedelta(minutes=1),
    "enable_batched_operations": False,
    "enable_express": True,
    "lock_duration": timedelta(seconds=17),
    "max_delivery_count": 3,
    "max_size_in_megabytes": 5120,
    "max_message_size_in_kilobytes": 256,
    "status": "SendDisabled",
    "user_metadata": "<a & 'b'>\n \u00e9\u2713",
}
TOPIC_OPTIONS = {
    name: value
    for name, value in QUEUE_OPTIONS.items()
    if name not in ("dead_lettering_on_message_expiration", "lock_duration", "max_delivery_count")
} | {"support_ordering": True}
SUBSCRIPTION_OPTIONS = {
    name: QUEUE_OPTIONS[name]
    for name in (
        "auto_delete_on_idle",
        "dead_lettering_on_message_expiration",
        "default_message_time_to_live",
        "enable_batched_operations",
        "lock_duration",
        "max_delivery_count",
        "status",
        "user_metadata",
    )
} | {"dead_lettering_on_filter_evaluation_exceptions": False}


def as_declared(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in options.items()
    }


def shown(properties: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(properties, name) for name in options}


KINDS: dict[str, tuple[type, tuple[str, ...], dict[str, Any]]] = {
    "queue": (Queue, ("a/Queue",), QUEUE_OPTIONS),
    "topic": (Topic, ("a/Topic",), TOPIC_OPTIONS),
    "subscription": (Subscription, ("t", "Sub"), SUBSCRIPTION_OPTIONS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_option_is_created_shown_listed_and_updated(
    served: Served, sdk: Sdk, kind: str
) -> None:
    declared, path, options = KINDS[kind]
    served.entities.declare(("t",), Topic("t"))
    call = {verb: getattr(sdk, f"{verb}_{kind}") for verb in ("create", "get", "update", "delete")}
    everything = getattr(sdk, f"list_{kind}s")
    key = tuple(each.lower() for each in path)

    created = call["create"](*path, **options)
    assert shown(created, options) == options
    assert served.entities.found[key].declared == declared(path[-1], **as_declared(options))
    assert (created.name, created.availability_status) == (path[-1], "Available")
    assert shown(call["get"](*key), options) == options
    listed = {each.name: each for each in everything(*path[:-1])}
    assert shown(listed[path[-1]], options) == options

    for name in options:
        plain = declared(path[-1])
        served.entities.update(path, plain)  # type: ignore[arg-type]
        changed = call["get"](*path)
        # A new instance for each option, so that a failure says which one is lost.
        setattr(changed, name, options[name])
        call["update"](*path[:-1], changed)
        expected = declared(path[-1], **as_declared({name: options[name]}))
        assert served.entities.found[key].declared == expected, name
        assert getattr(call["get"](*path), name) == options[name]

    call["delete"](*path)
    assert key not in served.entities.found
    assert path[-1] not in [each.name for each in everything(*path[:-1])]


def test_the_defaults_are_those_of_the_service(served: Served, sdk: Sdk) -> None:
    queue = sdk.create_queue("q")
    assert served.entities.found["q",].declared == Queue("q")
    assert (queue.lock_duration, queue.max_delivery_count) == (timedelta(minutes=1), 10)
    assert queue.default_message_time_to_live == queue.auto_delete_on_idle == FOREVER
    assert (queue.forward_to, queue.authorization_rules, queue.user_metadata) == (None,) * 3
    # The longest time survives the rounding of Python's timedelta.
    sdk.update_queue(queue)
    assert served.entities.found["q",].declared == Queue("q")


def test_an_update_may_be_a_mapping_or_keywords(served: Served, sdk: Sdk) -> None:
    queue = sdk.create_queue("q", user_metadata="before")
    sdk.update_queue(dict(queue), max_delivery_count=2)
    sdk.update_queue(sdk.get_queue("q"), user_metadata=None)
    assert served.entities.found["q",].declared == Queue("q", max_delivery_count=2)


@pytest.mark.parametrize(
    "option", ["requires_session", "requires_duplicate_detection", "enable_partitioning"]
)
def test_options_of_creation(served: Served, sdk: Sdk, option: str) -> None:
    from azure.core.exceptions import HttpResponseError

    queue = sdk.create_queue("q", **{option: True})
    assert getattr(queue, option) is True
    sdk.update_queue(queue, max_delivery_count=2)
    expected = Queue("q", max_delivery_count=2, **{option: True})
    assert served.entities.found["q",].declared == expected
    with pytest.raises(HttpResponseError, match="is true and cannot be changed") as caught:
        sdk.update_queue(queue, **{option: False})
    assert caught.value.status_code == 400


def test_an_option_that_python_shows_and_never_sends(served: Served, sdk: Sdk) -> None:
    served.entities.declare(("t",), Topic("t", filtering_messages_before_publishing=True))
    assert sdk.get_topic("t").filtering_messages_before_publishing is True


def test_a_subscription_may_require_sessions(served: Served, sdk: Sdk) -> None:
    sdk.create_topic("t", requires_duplicate_detection=True, enable_partitioning=True)
    assert sdk.get_topic("t").requires_duplicate_detection is True
    assert sdk.get_topic("t").enable_partitioning is True
    assert sdk.create_subscription("t", "s", requires_session=True).requires_session is True


def test_forwarding(served: Served, sdk: Sdk) -> None:
    for name in ("target", "dead"):
        sdk.create_queue(name)
    for kind, create in (("queue", sdk.create_queue), ("sub", None)):
        if create is None:
            sdk.create_topic("t")
        path = ("from",) if create else ("t", "from")
        made = (create or sdk.create_subscription)(
            *path, forward_to="target", forward_dead_lettered_messages_to="dead"
        )
        assert made.forward_to == f"sb://{served.host}/target", kind
        assert made.forward_dead_lettered_messages_to == f"sb://{served.host}/dead"
        declared = served.entities.found[path].declared
        assert (declared.forward_to, declared.forward_dead_lettered_messages_to) == (
            "target",
            "dead",
        )
    queue = sdk.get_queue("from")
    queue.forward_to = None
    sdk.update_queue(queue)
    assert served.entities.found["from",].declared.forward_to is None
    assert served.entities.found["from",].declared.forward_dead_lettered_messages_to == "dead"


def test_shared_access_policies(served: Served, sdk: Sdk) -> None:
    from azure.servicebus.management import AccessRights, AuthorizationRule

    policy = AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        claim_value="None",
        rights=[AccessRights.MANAGE, AccessRights.SEND, AccessRights.LISTEN],
        key_name="all",
        primary_key="p<",
        secondary_key="s&",
    )
    bare = AuthorizationRule(
        type="SharedAccessAuthorizationRule", rights=[AccessRights.SEND], key_name="one"
    )
    for create, get in ((sdk.create_queue, sdk.get_queue), (sdk.create_topic, sdk.get_topic)):
        name = f"e{len(served.entities.found)}"
        create(name, authorization_rules=[policy, bare])
        keys = served.entities.found[name,].declared.keys
        assert keys["all"] == SasKey("p<", secondary="s&")
        assert (keys["one"].rights, len(keys["one"].key)) == (("Send",), 44)
        first, second = get(name).authorization_rules
        assert (first.type, first.claim_type) == (
            "SharedAccessAuthorizationRule",
            "SharedAccessKey",
        )
        assert (first.key_name, first.primary_key, first.secondary_key) == ("all", "p<", "s&")
        assert set(first.rights) == {"Manage", "Send", "Listen"}
        assert first.created_at_utc == datetime.fromtimestamp(CREATED, UTC)
        assert second.rights == ["Send"]


def test_runtime_properties(served: Served, sdk: Sdk) -> None:
    sdk.create_queue("q")
    sdk.create_topic("t")
    sdk.create_subscription("t", "s")
    counts = MessageCounts(active=1, dead_letter=2, scheduled=3, transfer=4, transfer_dead_letter=5)
    for path in (("q",), ("t",), ("t", "s")):
        served.entities.holds(
            path, counts=counts, size_in_bytes=99, accessed_at=CREATED + 60, updated_at=CREATED + 1
        )
    at = datetime.fromtimestamp(CREATED, UTC)
    for queue in (sdk.get_queue_runtime_properties("q"), *sdk.list_queues_runtime_properties()):
        assert (queue.name, queue.size_in_bytes, queue.total_message_count) == ("q", 99, 15)
        assert (queue.active_message_count, queue.dead_letter_message_count) == (1, 2)
        assert (queue.scheduled_message_count, queue.transfer_message_count) == (3, 4)
        assert queue.transfer_dead_letter_message_count == 5
        assert queue.created_at_utc == at
        assert queue.updated_at_utc == at + timedelta(seconds=1)
        assert queue.accessed_at_utc == at + timedelta(seconds=60)
    for topic in (sdk.get_topic_runtime_properties("t"), *sdk.list_topics_runtime_properties()):
        assert (topic.name, topic.size_in_bytes, topic.subscription_count) == ("t", 99, 1)
        assert (topic.scheduled_message_count, topic.created_at_utc) == (3, at)
    for subscription in (
        sdk.get_subscription_runtime_properties("t", "s"),
        *sdk.list_subscriptions_runtime_properties("t"),
    ):
        assert (subscription.name, subscription.total_message_count) == ("s", 15)
        assert (subscription.active_message_count, subscription.dead_letter_message_count) == (1, 2)
        assert subscription.transfer_message_count == 4
        assert subscription.transfer_dead_letter_message_count == 5
        assert subscription.accessed_at_utc == at + timedelta(seconds=60)


VALUES: dict[str, Any] = {
    "@text": "a <b>",
    "@int": 5,
    "@long": 2**40,
    "@double": 1.5,
    "@bool": True,
    "@time": datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC),
    "@span": timedelta(days=1, hours=2),
}


def test_rules(served: Served, sdk: Sdk) -> None:
    from azure.servicebus.management import (
        CorrelationRuleFilter,
        FalseRuleFilter,
        SqlRuleAction,
        SqlRuleFilter,
        TrueRuleFilter,
    )

    served.entities.declare(("t",), Topic("t"))
    served.entities.declare(("t", "s"), Subscription("s"))
    fields = {
        each: each
        for each in (
            *("correlation_id", "message_id", "to", "reply_to", "label", "session_id"),
            *("reply_to_session_id", "content_type"),
        )
    }
    rules: dict[str, tuple[Any, Any, Rule]] = {
        "none": (FalseRuleFilter(), None, Rule("none", Nothing())),
        "sql": (
            SqlRuleFilter("a < @int", parameters=VALUES),
            SqlRuleAction("SET b = @int", parameters=VALUES),
            Rule(
                "sql",
                Sql("a < @int", parameters=VALUES),
                action="SET b = @int",
                action_parameters=VALUES,
            ),
        ),
        "some": (
            CorrelationRuleFilter(**fields, properties=VALUES),
            None,
            Rule("some", Correlation(**fields, properties=VALUES)),
        ),
        "one": (CorrelationRuleFilter(label="l"), None, Rule("one", Correlation(label="l"))),
    }
    sdk.create_rule("t", "s", "all")
    assert served.entities.found["t", "s", "all"].declared == Rule("all", Everything())
    for name, (condition, action, declared) in rules.items():
        created = sdk.create_rule("t", "s", name, filter=condition, action=action)
        assert served.entities.found["t", "s", name].declared == declared
        listed = {each.name: each for each in sdk.list_rules("t", "s")}
        for rule in (created, sdk.get_rule("t", "s", name), listed[name]):
            assert type(rule.filter) is type(condition)
            assert rule.created_at_utc == datetime.fromtimestamp(CREATED, UTC)
            match condition:
                case CorrelationRuleFilter():
                    expected = vars(condition) | {"properties": condition.properties or {}}
                    assert vars(rule.filter) == expected
                case FalseRuleFilter():
                    assert rule.filter.sql_expression == "1=0"
                case _:
                    assert rule.filter.sql_expression == condition.sql_expression
                    assert rule.filter.parameters == (condition.parameters or {})
            assert (rule.action is None) is (action is None)
            if action is not None:
                assert rule.action.sql_expression == action.sql_expression
                assert rule.action.parameters == VALUES
    assert isinstance(sdk.get_rule("t", "s", "$Default").filter, TrueRuleFilter)

    rule = sdk.get_rule("t", "s", "sql")
    rule.filter, rule.action = CorrelationRuleFilter(properties={"k": 1}), None
    sdk.update_rule("t", "s", rule)
    updated = served.entities.found["t", "s", "sql"].declared
    assert updated == Rule("sql", Correlation(properties={"k": 1}))
    sdk.delete_rule("t", "s", "$Default")
    names = [each.name for each in sdk.list_rules("t", "s")]
    assert names == ["all", "none", "one", "some", "sql"]


def test_lists_have_pages(served: Served, sdk: Sdk) -> None:
    served.entities.declare(("t",), Topic("t"))
    served.entities.declare(("t", "s"), Subscription("s", []))
    names = [f"e{number:03}" for number in range(105)]
    for name in names:
        served.entities.declare((name,), Queue(name))
        served.entities.declare((f"t-{name}",), Topic(f"t-{name}"))
        served.entities.declare(("t", "s", name), Rule(name))
    assert [each.name for each in sdk.list_queues()] == names
    assert [each.name for each in sdk.list_topics()] == ["t", *(f"t-{each}" for each in names)]
    assert [each.name for each in sdk.list_rules("t", "s")] == names
    served.requests.clear()
    sized = sdk.list_queues(start_index=100, max_page_size=2)
    assert [each.name for each in sized] == names[100:]
    assert len(served.requests) == 3


def test_empty_lists(sdk: Sdk) -> None:
    assert sdk.list_queues() == sdk.list_topics_runtime_properties() == []


def test_the_namespace(served: Served, sdk: Sdk) -> None:
    facts = sdk.get_namespace_properties()
    assert (facts.name, facts.messaging_sku, facts.messaging_units) == ("tests", "Standard", None)
    assert facts.created_at_utc == datetime.fromtimestamp(CREATED, UTC)
    assert facts.modified_at_utc == datetime.fromtimestamp(CREATED + 1, UTC)
    assert (facts.alias, facts.namespace_type) == (None, "Messaging")
    served.entities.facts = NamespaceFacts(
        name="p", created_at=0, modified_at=0, sku="Premium", units=2, alias="other"
    )
    facts = sdk.get_namespace_properties()
    assert (facts.messaging_sku, facts.messaging_units, facts.alias) == ("Premium", 2, "other")


def test_failures_are_the_exceptions_of_the_sdk(
    served: Served, connect: Callable[..., Sdk]
) -> None:
    from azure.core.exceptions import (
        ClientAuthenticationError,
        HttpResponseError,
        ResourceExistsError,
        ResourceNotFoundError,
    )

    sdk = connect()
    queue = sdk.create_queue("q")
    for failing, kind in (
        (lambda: sdk.get_queue("nothing"), ResourceNotFoundError),
        (lambda: sdk.delete_queue("nothing"), ResourceNotFoundError),
        (lambda: sdk.get_subscription("nothing", "s"), ResourceNotFoundError),
        (lambda: sdk.create_subscription("nothing", "s"), ResourceNotFoundError),
        (lambda: sdk.create_queue("q"), ResourceExistsError),
        (lambda: sdk.create_topic("Q"), ResourceExistsError),
    ):
        with pytest.raises(kind):
            failing()
    with pytest.raises(HttpResponseError, match=r"queue 'q': max_delivery_count") as caught:
        sdk.update_queue(queue, max_delivery_count=0)
    # The sentence is the message, not only the body.
    assert caught.value.message.startswith("SubCode=40000. queue 'q': max_delivery_count is less")
    assert (caught.value.status_code, caught.value.model.code) == (400, 400)
    sdk.delete_queue("q")
    with pytest.raises(ResourceNotFoundError):
        sdk.update_queue(queue)

    for text in (
        served.connection_string(key="wrong"),
        served.connection_string(name="listener"),
    ):
        with pytest.raises(ClientAuthenticationError):
            connect(text).get_queue("q")


def test_a_signature_instead_of_a_key(served: Served, connect: Callable[..., Sdk]) -> None:
    token = signed(MANAGER, f"sb://{served.host}/")
    sdk = connect(f"Endpoint=sb://{served.host}/;SharedAccessSignature={token}")
    assert sdk.create_queue("q").name == "q"


def test_a_web_token(served: Served, connect: Callable[..., Sdk]) -> None:
    from azure.core.exceptions import ClientAuthenticationError

    sdk = connect(token=BEARER)
    sdk.create_queue("q")
    assert sdk.create_queue("p", forward_to="q").forward_to == f"sb://{served.host}/q"
    with pytest.raises(ClientAuthenticationError):
        connect(token="x.y.z").get_queue("q")


def test_the_flag_of_the_emulator_changes_nothing(
    served: Served, connect: Callable[..., Sdk]
) -> None:
    text = f"{served.connection_string()};UseDevelopmentEmulator=true;"
    assert connect(text).create_queue("q").name == "q"
