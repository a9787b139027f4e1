"""Atom documents: what is written is read back, in the order of the service; what is refused, and why."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from math import inf, isnan
from typing import Any

import pytest
from administered import CREATED
from amqp_rt_servicebus.atom import (
    ATOM,
    POLICIES_MAX,
    Declared,
    Described,
    EntityPath,
    MessageCounts,
    NamespaceFacts,
    RuntimeFacts,
    id_of,
    read_entry,
    write_entry,
    write_error,
    write_feed,
    write_namespace,
)
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
from amqp_rt_servicebus.rule_documents import CONNECT, moment_text
from amqp_rt_servicebus.timespans import FOREVER
from amqp_rt_servicebus.xml_trees import (
    DEPTH_MAX,
    DOCUMENT_MAX,
    ELEMENTS_MAX,
    DocumentRefused,
    parse,
    tag,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from amqp_rt.values import Timestamp

pytestmark = pytest.mark.req("Z19")

HOST = "localhost:5672"
FACTS = RuntimeFacts(
    created_at=CREATED,
    updated_at=CREATED + 1,
    accessed_at=CREATED + 2,
    size_in_bytes=77,
    counts=MessageCounts(active=1, dead_letter=2, scheduled=3, transfer=4, transfer_dead_letter=5),
    subscription_count=6,
)
PATHS: dict[type, EntityPath] = {
    Queue: ("a/b",),
    Topic: ("a/b",),
    Subscription: ("t", "a"),
    Rule: ("t", "s", "$Default"),
}


def written(declared: Declared, facts: RuntimeFacts = FACTS) -> bytes:
    return write_entry(PATHS[type(declared)], Described(declared, facts), HOST, "tests")


def read(document: bytes, kind: type[Declared], name: str | None = None) -> Any:
    return read_entry(document, HOST, expected=[kind]).declare(name or PATHS[kind][-1])


def entry(content: str) -> bytes:
    return (
        f'<entry xmlns="{ATOM}" xmlns:i="http://www.w3.org/2001/XMLSchema-instance">'
        f'<content type="application/xml">{content}</content></entry>'
    ).encode()


def described(kind: str, options: str) -> bytes:
    return entry(f'<{kind}Description xmlns="{CONNECT}">{options}</{kind}Description>')


# -- what is written is read back --------------------------------------------------------------

# Characters of XML 1.0, and no line ends but "\n": a reader may not tell them apart in an address.
texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff")
    | st.sampled_from("\n\t\r<>&\"'"),
    max_size=12,
)
spans = st.just(inf) | st.integers(0, 10**12).map(lambda each: each / 1000)
names = st.from_regex(r"\A[A-Za-z0-9._~-]{1,20}\Z")
counts = st.integers(1, 2**31 - 1)
#: Keys are in connection strings, where a semicolon ends them.
secrets = texts.map(lambda text: text.replace(";", "")).filter(bool)
keys = st.dictionaries(
    names,
    st.builds(
        SasKey,
        secrets,
        rights=st.sets(st.sampled_from(["Send", "Listen", "Manage"])).map(
            lambda given: tuple(each for each in ("Send", "Listen", "Manage") if each in given)
        ),
        secondary=secrets,
    ),
    max_size=3,
)
moments = st.datetimes(timezones=st.just(UTC))
values = st.dictionaries(
    texts.filter(bool),
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts
    | moments
    | st.timedeltas(min_value=timedelta(days=-10_000), max_value=timedelta(days=10_000)),
    max_size=4,
)
conditions = texts.filter(str.strip)
maybe_text = st.none() | texts
filters = (
    st.just(Everything())
    | st.just(Nothing())
    | st.builds(Sql, conditions, parameters=values)
    | st.builds(
        Correlation,
        correlation_id=maybe_text,
        message_id=maybe_text,
        to=maybe_text,
        reply_to=maybe_text,
        label=maybe_text,
        session_id=maybe_text,
        reply_to_session_id=maybe_text,
        content_type=maybe_text,
        properties=values,
    )
)
statuses = st.sampled_from(["Active", "Disabled", "SendDisabled", "ReceiveDisabled"])
shared = {
    "default_message_time_to_live": spans,
    "auto_delete_on_idle": spans,
    "enable_batched_operations": st.booleans(),
    "status": statuses,
    "user_metadata": maybe_text,
}
stored = {
    "requires_duplicate_detection": st.booleans(),
    "duplicate_detection_history_time_window": spans,
    "max_size_in_megabytes": counts,
    "max_message_size_in_kilobytes": st.none() | counts,
    "enable_partitioning": st.booleans(),
    "enable_express": st.booleans(),
    "keys": keys,
}
received = {
    "lock_duration": spans.filter(bool),
    "max_delivery_count": counts,
    "dead_lettering_on_message_expiration": st.booleans(),
    "forward_dead_lettered_messages_to": st.none() | names,
}
#: Sessions exclude forwarding.
received_by = st.fixed_dictionaries({"requires_session": st.booleans()}) | st.fixed_dictionaries(
    {"forward_to": names}
)
declared_entities = (
    st.builds(
        lambda options, more: Queue("a/b", **options, **more),
        st.fixed_dictionaries(shared | stored | received),
        received_by,
    )
    | st.builds(
        Topic,
        st.just("a/b"),
        **shared,
        **stored,
        support_ordering=st.booleans(),
        filtering_messages_before_publishing=st.booleans(),
    )
    | st.builds(
        lambda options, more: Subscription("a", **options, **more),
        st.fixed_dictionaries(
            shared | received | {"dead_lettering_on_filter_evaluation_exceptions": st.booleans()}
        ),
        received_by,
    )
    | st.builds(
        lambda filter_, action, given: Rule(
            "$Default", filter_, action=action, action_parameters=given if action else {}
        ),
        filters,
        st.none() | conditions,
        values,
    )
)


@given(declared_entities)
def test_each_option_is_read_as_it_was_written(declared: Declared) -> None:
    assert read(written(declared), type(declared)) == declared


@pytest.mark.slow
@settings(max_examples=40)
@given(declared_entities, st.randoms(use_true_random=False))
def test_elements_are_read_in_any_order_and_unknown_ones_ignored(
    declared: Declared, shuffled: random.Random
) -> None:
    root = ET.fromstring(written(declared))
    for parent in list(root.iter()):
        if parent.tag.endswith("}Rights") or parent.tag.endswith("}KeyValueOfstringanyType"):
            continue
        parent.append(ET.Element(f"{{{CONNECT}}}Later"))
        parent.append(ET.Element("{urn:other}LockDuration"))
        children = list(parent)
        shuffled.shuffle(children)
        parent[:] = children
    # The serializer writes carriage returns as they are, which a parser would take for line ends.
    document = ET.tostring(root).replace(b"\r", b"&#13;")
    assert read(document, type(declared)) == declared


def test_nothing_but_a_name_declares_the_defaults_of_the_service() -> None:
    assert read(described("Queue", ""), Queue, "q") == Queue("q")
    assert read(described("Topic", ""), Topic, "t") == Topic("t")
    assert read(described("Subscription", ""), Subscription, "s") == Subscription("s")
    assert read(described("Rule", ""), Rule, "r") == Rule("r")


def test_an_element_that_is_nil_is_absent() -> None:
    document = described("Queue", '<UserMetadata i:nil="true" /><LockDuration i:nil="1" />')
    assert read(document, Queue, "q") == Queue("q")


# -- the order and the forms of the service ----------------------------------------------------


@pytest.mark.parametrize(
    ("model", "declared"),
    [
        (
            "QueueDescription",
            Queue(
                "q",
                forward_to="f",
                forward_dead_lettered_messages_to="d",
                user_metadata="u",
                max_message_size_in_kilobytes=1,
                keys={"k": SasKey("x")},
            ),
        ),
        ("TopicDescription", Topic("q", user_metadata="u", max_message_size_in_kilobytes=1)),
        (
            "SubscriptionDescription",
            Subscription(
                "q", forward_to="f", forward_dead_lettered_messages_to="d", user_metadata="u"
            ),
        ),
    ],
)
def test_elements_have_the_order_of_the_python_sdk(model: str, declared: Declared) -> None:
    models = pytest.importorskip("azure.servicebus.management")._generated.models
    fields = getattr(models, model)._attribute_map.values()
    order = [each.get("xml", {}).get("name", each["type"]) for each in fields]
    order = ["CountDetails" if each == "MessageCountDetails" else each for each in order]
    root = ET.fromstring(written(declared))
    (content,) = root.iterfind(f"{{{ATOM}}}content/{{{CONNECT}}}{model}")
    found = [each.tag.rpartition("}")[2] for each in content]
    # The default rule is an option of creation only; the counts of filters are shown by no client.
    never = {"RuleDescription", "SqlFilterCount", "CorrelationFilterCount"}
    assert found == [each for each in order if each not in never]


#: JavaScript takes the prefix from the only attribute.
COUNTS = (
    '<CountDetails xmlns:d2p1="http://schemas.microsoft.com/netservices/2011/06/servicebus">'
    "<d2p1:ActiveMessageCount>1</d2p1:ActiveMessageCount>"
    "<d2p1:DeadLetterMessageCount>2</d2p1:DeadLetterMessageCount>"
    "<d2p1:ScheduledMessageCount>3</d2p1:ScheduledMessageCount>"
    "<d2p1:TransferDeadLetterMessageCount>5</d2p1:TransferDeadLetterMessageCount>"
    "<d2p1:TransferMessageCount>4</d2p1:TransferMessageCount></CountDetails>"
)


def test_runtime_properties_are_written() -> None:
    text = written(Queue("q", default_message_time_to_live=90)).decode()
    for part in (
        "<DefaultMessageTimeToLive>PT1M30S</DefaultMessageTimeToLive>",
        f"<AutoDeleteOnIdle>{FOREVER}</AutoDeleteOnIdle>",
        "<SizeInBytes>77</SizeInBytes><MessageCount>15</MessageCount>",
        "<CreatedAt>2026-01-02T03:04:05.25Z</CreatedAt>",
        "<UpdatedAt>2026-01-02T03:04:06.25Z</UpdatedAt>",
        "<AccessedAt>2026-01-02T03:04:07.25Z</AccessedAt>",
        COUNTS,
    ):
        assert part in text
    assert "<SubscriptionCount>6</SubscriptionCount>" in written(Topic("t")).decode()


def test_a_time_that_has_not_come_is_the_first_one_of_dotnet() -> None:
    facts = RuntimeFacts(created_at=CREATED, updated_at=inf)
    text = written(Queue("q"), facts).decode()
    assert "<AccessedAt>0001-01-01T00:00:00Z</AccessedAt>" in text
    assert "<UpdatedAt>0001-01-01T00:00:00Z</UpdatedAt>" in text


@pytest.mark.parametrize(
    ("path", "address"),
    [
        (("a/b",), "https://localhost:5672/a/b"),
        (("t", "s"), "https://localhost:5672/t/Subscriptions/s"),
        (("t", "s", "$Default"), "https://localhost:5672/t/Subscriptions/s/Rules/$Default"),
    ],
)
def test_ids_have_the_words_that_javascript_looks_for(path: EntityPath, address: str) -> None:
    assert id_of(path, HOST) == address


def test_a_rule_always_has_an_action() -> None:
    assert '<Action i:type="EmptyRuleAction" />' in written(Rule("$Default")).decode()


@pytest.mark.parametrize(
    ("condition", "element"),
    [
        (Everything(), '<Filter i:type="TrueFilter"><SqlExpression>1=1</SqlExpression>'),
        (Nothing(), '<Filter i:type="FalseFilter"><SqlExpression>1=0</SqlExpression>'),
        (Sql("a<1"), '<Filter i:type="SqlFilter"><SqlExpression>a&lt;1</SqlExpression>'),
        (Correlation(label="l"), '<Filter i:type="CorrelationFilter"><Label>l</Label></Filter>'),
    ],
)
def test_filters_are_written_by_type(condition: Any, element: str) -> None:
    assert element in written(Rule("$Default", condition)).decode()


XSD = 'xmlns:d6p1="http://www.w3.org/2001/XMLSchema"'


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, "boolean", "true"),
        (-5, "int", "-5"),
        (2**31 - 1, "int", "2147483647"),
        (2**31, "long", "2147483648"),
        (-(2**31) - 1, "long", "-2147483649"),
        (1.5, "double", "1.5"),
        (inf, "double", "INF"),
        (-inf, "double", "-INF"),
        (float("nan"), "double", "NaN"),
        ("a&b", "string", "a&amp;b"),
        (datetime(2020, 1, 2, 3, 4, 5, 600000, UTC), "dateTime", "2020-01-02T03:04:05.6Z"),
        (
            datetime(2020, 1, 2, 3, tzinfo=timezone(timedelta(hours=2))),
            "dateTime",
            "2020-01-02T01:00:00Z",
        ),
        (Timestamp(1000), "dateTime", "1970-01-01T00:00:01Z"),
        (Timestamp(2**62), "long", str(2**62)),
        (timedelta(days=1, seconds=90), "duration", "P1DT1M30S"),
        (timedelta(seconds=-1), "duration", "-PT1S"),
        (b"raw", "string", "b'raw'"),
    ],
)
def test_values_have_a_type_with_the_prefix_that_javascript_cuts_off(
    value: object, kind: str, text: str
) -> None:
    document = written(Rule("$Default", Sql("a=@a", parameters={"@a": value}))).decode()
    expected = f'<Value i:type="d6p1:{kind}" {XSD}>{text}</Value>'
    assert f"<Key>@a</Key>{expected}" in document


def test_years_before_1000_have_four_digits() -> None:
    assert moment_text(datetime(1, 2, 3, tzinfo=UTC)) == "0001-02-03T00:00:00Z"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("l28:double", "4", 4.0),
        ("x:INT", "4", None),
        ("int", "4", 4),
        ("d6p1:long", "99999999999", 99999999999),
        ("d6p1:boolean", "True", True),
        ("d6p1:double", "INF", inf),
        ("d6p1:dateTime", "2020-01-01T00:00:00", datetime(2020, 1, 1, tzinfo=UTC)),
        (
            "d6p1:dateTime",
            "2020-01-01T02:00:00.5+02:00",
            datetime(2020, 1, 1, 0, 0, 0, 500000, UTC),
        ),
        ("d6p1:duration", "P1DT3H", timedelta(days=1, hours=3)),
        ("d6p1:string", " x ", " x "),
        ("d6p1:string", "", ""),
    ],
)
def test_typed_values_of_any_prefix_are_read(kind: str, text: str, value: object) -> None:
    document = _with_value(f'<Key>k</Key><Value i:type="{kind}">{text}</Value>')
    if value is None:
        with pytest.raises(DocumentRefused, match="has the type 'INT', not one of string, boolean"):
            read(document, Rule)
    else:
        assert read(document, Rule).filter.parameters == {"k": value}


def _with_value(*pairs: str) -> bytes:
    values = "".join(f"<KeyValueOfstringanyType>{each}</KeyValueOfstringanyType>" for each in pairs)
    return described(
        "Rule",
        '<Filter i:type="SqlFilter"><SqlExpression>a=1</SqlExpression>'
        f"<Parameters>{values}</Parameters></Filter>",
    )


def test_not_a_number_is_read() -> None:
    document = _with_value('<Key>k</Key><Value i:type="d6p1:double">NaN</Value>')
    assert isnan(read(document, Rule).filter.parameters["k"])


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    document = written(Queue("q", user_metadata="a\x00b\ud800c\x1f\ufffe"))
    assert read(document, Queue).user_metadata == "a\ufffdb\ufffdc\ufffd\ufffd"


def test_a_feed_has_its_links_first_the_next_page_second() -> None:
    page: dict[str, Any] = {
        "authority": HOST,
        "namespace": "n",
        "this": "u?a=1&b",
        "following": "v",
    }
    pages = [(("q",), Described(Queue("q"), FACTS)), (("p",), Described(Queue("p"), FACTS))]
    root = ET.fromstring(write_feed("Queues", pages, **page))
    links = root.findall(f"{{{ATOM}}}link")
    assert [each.attrib for each in links] == [
        {"rel": "self", "href": "u?a=1&b"},
        {"rel": "next", "href": "v"},
    ]
    assert [each.text for each in root.iterfind(f"{{{ATOM}}}entry/{{{ATOM}}}title")] == ["q", "p"]
    assert len(list(ET.fromstring(write_feed("Queues", [], **page | {"following": None})))) == 4


def test_the_namespace_is_an_entry() -> None:
    facts = NamespaceFacts(
        name="n&m", created_at=CREATED, modified_at=CREATED, sku="Premium", units=4, alias="a"
    )
    text = write_namespace(facts, HOST).decode()
    assert "<Alias>a</Alias><CreatedTime>2026-01-02T03:04:05.25Z</CreatedTime>" in text
    assert "<MessagingSKU>Premium</MessagingSKU><MessagingUnits>4</MessagingUnits>" in text
    assert "<Name>n&amp;m</Name><NamespaceType>Messaging</NamespaceType>" in text


def test_an_error_has_its_code_and_a_sentence() -> None:
    assert write_error(404, "SubCode=40400. no <q>").endswith(
        b"<Error><Code>404</Code><Detail>SubCode=40400. no &lt;q&gt;</Detail></Error>"
    )


# -- updates -----------------------------------------------------------------------------------


def update(document: bytes, previous: Declared) -> Any:
    return read_entry(document, HOST, expected=[Queue, Topic, Subscription, Rule]).declare(
        "OTHER", previous
    )


def test_an_update_replaces_options_and_keeps_what_cannot_change() -> None:
    before = Queue("q", requires_session=True, enable_partitioning=True, user_metadata="u")
    after = update(described("Queue", "<MaxDeliveryCount>3</MaxDeliveryCount>"), before)
    assert after == Queue(
        "q", requires_session=True, enable_partitioning=True, max_delivery_count=3
    )


@pytest.mark.parametrize(
    "element", ["RequiresSession", "RequiresDuplicateDetection", "EnablePartitioning"]
)
def test_options_of_creation_cannot_change(element: str) -> None:
    same = described("Queue", f"<{element}>false</{element}>")
    assert update(same, Queue("q")) == Queue("q")
    with pytest.raises(ValueError, match=f"queue 'q': {element} is false and cannot be changed"):
        update(described("Queue", f"<{element}>true</{element}>"), Queue("q"))


def test_updates_keep_what_has_operations_of_its_own() -> None:
    topic = Topic("t", [Subscription("s")])
    assert update(described("Topic", ""), topic).subscriptions == (Subscription("s"),)
    subscription = Subscription("s", [Rule("r")])
    document = described(
        "Subscription", "<DefaultRuleDescription><Name>x</Name></DefaultRuleDescription>"
    )
    assert update(document, subscription).rules == (Rule("r"),)


def test_an_update_cannot_change_the_kind() -> None:
    with pytest.raises(ValueError, match="topic 't' cannot become a queue"):
        update(described("Queue", ""), Topic("t"))


def test_a_subscription_begins_with_the_rule_that_is_given() -> None:
    document = described(
        "Subscription",
        '<DefaultRuleDescription><Filter i:type="FalseFilter" /><Name>none</Name>'
        "</DefaultRuleDescription>",
    )
    assert read(document, Subscription).rules == (Rule("none", Nothing()),)
    unnamed = described("Subscription", "<DefaultRuleDescription />")
    assert read(unnamed, Subscription).rules == (Rule("$Default"),)


# -- what is refused ---------------------------------------------------------------------------

POLICY = "<AuthorizationRule><KeyName>{}</KeyName>{}</AuthorizationRule>"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("<LockDuration>5 s</LockDuration>", "LockDuration: '5 s' is not an ISO 8601 duration"),
        ("<LockDuration />", "LockDuration: '' is not an ISO 8601 duration"),
        ("<LockDuration>-PT5S</LockDuration>", "LockDuration: a time of .* is negative"),
        ("<LockDuration>PT0S</LockDuration>", "queue 'q': lock_duration is 0"),
        ("<LockDuration>PT1S</LockDuration>" * 2, "has 2 elements LockDuration, not one"),
        ("<MaxDeliveryCount>0</MaxDeliveryCount>", "queue 'q': max_delivery_count is less than 1"),
        ("<MaxDeliveryCount>1_0</MaxDeliveryCount>", "MaxDeliveryCount: '1_0' is not an integer"),
        ("<MaxDeliveryCount>\u0661</MaxDeliveryCount>", "is not an integer of 64 bits"),
        ("<MaxDeliveryCount>-1</MaxDeliveryCount>", "-1 is not between 0 and 2147483647"),
        ("<MaxDeliveryCount>2147483648</MaxDeliveryCount>", "is not between 0 and 2147483647"),
        (f"<MaxDeliveryCount>{'9' * 5000}</MaxDeliveryCount>", "is not an integer of 64 bits"),
        ("<RequiresSession>yes</RequiresSession>", "RequiresSession: 'yes' is not true or false"),
        (
            "<Status>Creating</Status>",
            "Status: 'Creating' is not Active, Disabled, SendDisabled or",
        ),
        ("<ForwardTo>sb://[::1/q</ForwardTo>", r"ForwardTo: 'sb://\[::1/q' is not an address"),
        (
            "<ForwardTo>sb://other/q</ForwardTo>",
            "'sb://other/q' is in another namespace than 'localhost:5672'",
        ),
        (
            "<ForwardTo>f</ForwardTo><RequiresSession>true</RequiresSession>",
            "an entity that requires sessions cannot forward",
        ),
        (f"<UserMetadata>{'x' * 1025}</UserMetadata>", "user_metadata is longer than 1024"),
        (
            f"<AuthorizationRules>{POLICY.format('', '')}</AuthorizationRules>",
            "AuthorizationRules: a policy has no KeyName",
        ),
        (
            f"<AuthorizationRules>{POLICY.format('a', '') * 2}</AuthorizationRules>",
            "AuthorizationRules: there are two policies 'a'",
        ),
        (
            "<AuthorizationRules>"
            + POLICY.format("a", "<Rights><AccessRights>Read</AccessRights></Rights>")
            + "</AuthorizationRules>",
            "policy 'a': right 'Read' is not one of Manage, Send, Listen",
        ),
        (
            "<AuthorizationRules>"
            + "".join(POLICY.format(each, "") for each in range(POLICIES_MAX + 1))
            + "</AuthorizationRules>",
            f"there are more than {POLICIES_MAX} policies",
        ),
        (
            f"<AuthorizationRules>{POLICY.format('k' * 257, '')}</AuthorizationRules>",
            "KeyName of a policy has more than 256 characters",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(options: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        read(described("Queue", options), Queue, "q")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("<Filter />", "Filter has the type '', not SqlFilter, TrueFilter"),
        ('<Filter i:type="x:Y" />', "Filter has the type 'Y'"),
        ('<Filter i:type="SqlFilter" />', "Filter of the type SqlFilter has no SqlExpression"),
        (
            '<Filter i:type="SqlFilter"><SqlExpression> </SqlExpression></Filter>',
            "has no SqlExpression",
        ),
        ('<Action i:type="X" />', "Action has the type 'X', not SqlRuleAction or EmptyRuleAction"),
        ('<Action i:type="SqlRuleAction" />', "Action of the type SqlRuleAction has no"),
    ],
)
def test_a_wrong_rule_is_one_sentence(options: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(described("Rule", options), Rule)


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (["<Key>k</Key>"], "a value in Parameters has no Key or no Value"),
        (['<Value i:type="a:int">1</Value>'], "has no Key or no Value"),
        (['<Key>k</Key><Value i:type="a:int">x</Value>'], "the value 'k': 'x' is not an integer"),
        (['<Key>k</Key><Value i:type="a:double">x</Value>'], "'x' is not a number"),
        (['<Key>k</Key><Value i:type="a:dateTime">2020-W01-1</Value>'], "is not a time such as"),
        (
            ['<Key>k</Key><Value i:type="a:dateTime">0001-01-01T00:00:00+23:00</Value>'],
            "is not a time",
        ),
        (['<Key>k</Key><Value i:type="a:dateTime">2020-13-01T00:00:00</Value>'], "is not a time"),
        (['<Key>k</Key><Value i:type="a:duration">1</Value>'], "is not an ISO 8601 duration"),
        (['<Key>k</Key><Value i:type="a:int">1</Value>'] * 2, "Parameters has two values 'k'"),
        (["<Key>k</Key><Value>1</Value>"], "the value 'k' has the type ''"),
    ],
)
def test_a_wrong_parameter_is_one_sentence(pairs: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(_with_value(*pairs), Rule)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (b"", "is no well-formed XML: no element found"),
        (b"<entry", "is no well-formed XML"),
        (b"<a>&undeclared;</a>", "is no well-formed XML: undefined entity"),
        (b'<?xml version="1.0" encoding="utf-7"?><a>+ADw-</a>', "is not an Atom entry, but 'a'"),
        (b"<entry />", "is not an Atom entry, but 'entry'"),
        (f'<feed xmlns="{ATOM}" />'.encode(), "is not an Atom entry, but 'feed'"),
        (
            f'<entry xmlns="{ATOM}" />'.encode(),
            "the content of the entry is no description, not one",
        ),
        (entry(""), "no description, not one QueueDescription or TopicDescription"),
        (described("Rule", ""), "is RuleDescription, not one QueueDescription or Topic"),
        (described("EventHub", ""), "is EventHubDescription, not one"),
        (
            entry(f'<QueueDescription xmlns="{CONNECT}" />' * 2),
            "is QueueDescription, QueueDescription, not one",
        ),
    ],
)
def test_other_documents_are_refused(document: bytes, sentence: str) -> None:
    with pytest.raises(DocumentRefused, match=sentence):
        read_entry(document, HOST, expected=[Queue, Topic])


@pytest.mark.parametrize(
    "doctype",
    [
        "<!DOCTYPE entry>",
        '<!DOCTYPE entry SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE entry [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE entry [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]>',
        '<!DOCTYPE entry [<!ENTITY % p SYSTEM "http://localhost/">%p;]>',
    ],
)
def test_a_document_type_is_refused_before_it_declares_anything(doctype: str) -> None:
    with pytest.raises(DocumentRefused, match="has a document type declaration, which is not read"):
        parse(doctype.encode() + entry("&b;&x;"))


@pytest.mark.parametrize(
    ("largest", "above", "sentence"),
    [
        (
            lambda size: b"<a>" * size + b"</a>" * size,
            DEPTH_MAX + 1,
            f"nested more than {DEPTH_MAX} deep",
        ),
        (
            lambda size: b"<a>" + b"<b/>" * (size - 1) + b"</a>",
            ELEMENTS_MAX + 1,
            f"has more than {ELEMENTS_MAX} elements",
        ),
        (
            lambda size: b"<a>" + b"x" * (size - 7) + b"</a>",
            DOCUMENT_MAX + 1,
            f"has {DOCUMENT_MAX + 1} octets; at most {DOCUMENT_MAX} are read",
        ),
    ],
)
def test_documents_are_bounded(largest: Callable[[int], bytes], above: int, sentence: str) -> None:
    parse(largest(above - 1))
    with pytest.raises(DocumentRefused, match=re.escape(sentence)):
        parse(largest(above))


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda each: each.encode(errors="replace"))
)
def test_no_bytes_have_another_effect_than_a_refusal(data: bytes) -> None:
    for document in (data, entry(text_of(data.decode("latin-1")))):
        with pytest.raises(DocumentRefused, match=r"\w+"):
            read_entry(document, HOST, expected=[Queue])


NAMES = ["LockDuration", "Status", "ForwardTo", "AuthorizationRules", "Filter", "Action", "Name"]
trees = st.recursive(
    texts.map(text_of),
    lambda below: st.builds(
        lambda name, kind, content: tag(name, content, i__type=kind),
        st.sampled_from([*NAMES, "SqlExpression", "Parameters", "Key", "Value", "Rights"]),
        st.sampled_from(["", "SqlFilter", "a:int", "SqlRuleAction", "CorrelationFilter"]),
        st.lists(below, max_size=3),
    ),
    max_leaves=8,
)


@given(st.lists(trees, max_size=4).map("".join), st.sampled_from(["Queue", "Subscription", "Rule"]))
def test_no_tree_of_elements_has_another_effect_than_a_refusal(markup: str, kind: str) -> None:
    with suppress(ValueError):
        read_entry(described(kind, markup), HOST, expected=[Queue, Subscription, Rule]).declare("x")


def test_keys_that_are_not_given_are_made() -> None:
    document = described(
        "Queue", f"<AuthorizationRules>{POLICY.format('a', '')}</AuthorizationRules>"
    )
    first, second = (read(document, Queue).keys["a"] for _ in range(2))
    assert len({first.key, first.secondary, second.key, second.secondary}) == 4
    assert (len(first.key), first.rights) == (44, ())
