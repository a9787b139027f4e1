"""Arguments of queues, exchanges and bindings by Qpid's names, and the options that they mean."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from uuid import UUID

import pytest
from amqp_rt_amqp010.arguments import (
    KEEPS_LAST,
    MESSAGE_SEQUENCE,
    BindingArguments,
    QueueArguments,
    exchange_arguments,
    plain,
    shown,
)
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.layouts import (
    ExchangeBind,
    ExchangeDeclare,
    ExchangeQuery,
    ExchangeQueryResult,
    QueueDeclare,
    QueueQuery,
    QueueQueryResult,
)
from amqp_rt_amqp010.limits import GROUPS, NESTING_MAX
from amqp_rt_amqp010.subscriptions import SubscriptionArguments
from amqp_rt_amqp010.values import Array, Datetime, Dec32, Str8, Vbin8
from declaring010 import DeclaringSession
from protocol010 import Failed
from served010 import serving

from amqp_rt import Broker
from amqp_rt.broker.bindings import FanoutTable
from amqp_rt.broker.nodes import Queue
from amqp_rt.values import Int, Timestamp

OPTIONS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"qpid.max_count": 5}, {"length_max": 5}),
    ({"qpid.max_count": Int(5), "qpid.max_size": b"600"}, {"length_max": 5, "bytes_max": 600}),
    ({"qpid.max_count": 0, "qpid.max_size": 0}, {"length_max": None, "bytes_max": None}),
    ({"qpid.max_count": 5, "qpid.policy_type": "reject"}, {"length_max": 5, "overflow": "reject"}),
    (
        {"qpid.policy_type": b"ring", "qpid.max_count": 5},
        {"length_max": 5, "overflow": "drop-head"},
    ),
    ({"qpid.policy_type": "ring_strict"}, {"overflow": "drop-head"}),
    ({"qpid.policy_type": "flow_to_disk", "qpid.max_count": 5, "qpid.max_size": 6}, {}),
    ({"qpid.browse-only": 1}, {"browse_only": True}),
    ({"no-local": b"true"}, {}),
    ({"qpid.priorities": 10}, {"priorities": 10}),
    ({"x-qpid-priorities": "4"}, {"priorities": 4}),
    ({"qpid.priorities": 0}, {"priorities": 1}),
    (
        {"qpid.last_value_queue_key": Vbin8(b"stock")},
        {"last_value_key": "application-properties.stock"},
    ),
    (
        {"qpid.last_value_queue_key": "properties.user-id"},
        {"last_value_key": "application-properties.properties.user-id"},
    ),
    ({"qpid.last_value_queue_key": "qpid.subject"}, {"last_value_key": "properties.subject"}),
    (
        {"qpid.last_value_queue": True},
        {"last_value_key": "application-properties.qpid.LVQ_key"},
    ),
    (
        {"qpid.last_value_queue": 1, "qpid.LVQ_key": "k"},
        {"last_value_key": "application-properties.k"},
    ),
    ({"qpid.last_value_queue_no_browse": "false"}, {}),
    (
        {"qpid.group_header_key": "JMSXGroupID", "qpid.shared_msg_group": 1},
        {"groups": GROUPS, "group_key": "properties.group-id"},
    ),
    ({"qpid.group_header_key": b"g"}, {"groups": GROUPS, "group_key": "application-properties.g"}),
    ({"qpid.filter": b"a = 1"}, {"selector": "a = 1"}),
    ({"qpid.queue_msg_sequence": b"n"}, {"number_header": "n"}),
    ({"qpid.queue_msg_sequence": ""}, {}),
    ({"qpid.alert_count": 5, "qpid.file_size": 1, "qpid.flow_stop_count": 9}, {}),
    ({"qpid.paging": True, "qpid.trace.id": b"me", "qpid.fairshare": 3}, {}),
]


@pytest.mark.parametrize(
    ("given", "options"),
    OPTIONS,
    ids=[" ".join(each[0]) + str(at) for at, each in enumerate(OPTIONS)],
)
async def test_arguments_mean_options_of_the_queue(
    given: dict[str, object], options: dict[str, object]
) -> None:
    assert QueueArguments(given).options == options
    async with Broker() as broker:
        here = DeclaringSession(broker)
        here.execute(QueueDeclare(queue="q", arguments=given))
        node = broker.host.space().find("q").declared
        assert isinstance(node, Queue)
        assert {name: getattr(node, name) for name in options} == options
        # The publisher gets no credit that it could wait for.
        assert node.overflow == options.get("overflow", "reject")
        found = here.execute(QueueQuery(queue="q"))
        assert isinstance(found, QueueQueryResult)
        assert found.arguments is not None
        assert found.arguments.keys() == given.keys()


@pytest.mark.parametrize(
    ("auto_delete", "given", "expected"),
    [
        (True, {}, (True, 0)),
        (False, {"qpid.auto_delete_timeout": 30}, (True, 30)),
        (False, {"qpid.auto_delete_timeout": 0}, (False, 0)),
        (
            False,
            {"qpid.lifetime-policy": "manual", "qpid.auto_delete_timeout": 30},
            (False, 30),
        ),
        (False, {"qpid.lifetime-policy": b"delete-if-unused-and-empty"}, (True, 0)),
        (True, {"qpid.auto_delete_timeout": 30}, (True, 30)),
        (True, {"qpid.lifetime-policy": "delete-if-unused"}, (True, 0)),
        (True, {"qpid.lifetime-policy": b"manual"}, (False, 0)),
        (False, {"qpid.lifetime-policy": "delete-on-close"}, (True, 0)),
    ],
    ids=[
        "plain",
        "timeout without the bit",
        "no timeout",
        "manual with a timeout",
        "unused and empty without the bit",
        "timeout",
        "unused",
        "manual",
        "on close without the bit",
    ],
)
async def test_arguments_about_the_life_of_a_queue(
    auto_delete: bool, given: dict[str, object], expected: tuple[bool, float]
) -> None:
    async with Broker() as broker:
        here = DeclaringSession(broker)
        here.execute(QueueDeclare(queue="q", auto_delete=auto_delete, arguments=given))
        assert here.topology is not None
        declared = here.topology.queue("q").declared
        assert declared is not None
        assert (declared.auto_delete, declared.auto_delete_s) == expected


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"qpid.unknown": 1}, 540),
        ({"x-message-ttl": 1}, 540),
        ({"qpid.filter": "a = = 1"}, 542),
        ({"qpid.filter": ""}, 542),
        ({"qpid.queue_msg_sequence": 1}, 542),
        ({"qpid.queue_msg_sequence": "ü"}, 542),
        ({"qpid.queue_msg_sequence": "n" * 101}, 542),
        ({"qpid.filter": "a = '" + "x" * 100_000 + "'"}, 542),
        ({"qpid.group_header_key": 1}, 542),
        ({"qpid.max_count": -1}, 542),
        ({"qpid.max_count": "many"}, 542),
        ({"qpid.max_count": True}, 542),
        ({"qpid.max_count": 2**63}, 542),
        ({"qpid.max_count": "9" * 20}, 542),
        ({"qpid.policy_type": "forget"}, 542),
        ({"qpid.policy_type": 1}, 542),
        ({"qpid.priorities": 257}, 542),
        ({"qpid.last_value_queue_key": b"\xff"}, 542),
        ({"qpid.last_value_queue_key": ""}, 542),
        ({"qpid.last_value_queue": "perhaps"}, 542),
        ({"qpid.last_value_queue": 1.5}, 542),
        ({"qpid.auto_delete_timeout": 2**62}, 542),
        ({"qpid.lifetime-policy": "for ever"}, 542),
        ({"qpid.lifetime-policy": "delete-if-empty"}, 540),
        ({"qpid.alert_count": Dec32(1, 2)}, 542),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, dict) else str(each),
)
def test_wrong_arguments_of_a_queue(given: dict[str, object], code: int) -> None:
    with pytest.raises(CommandFault) as caught:
        QueueArguments(given)
    assert caught.value.code == code


def test_arguments_of_a_type_of_the_application_are_its_own() -> None:
    assert exchange_arguments({"a": b"1"}, "x-own") == {"a": "1"}
    with pytest.raises(CommandFault):
        exchange_arguments({"a": b"1"}, "direct")
    assert exchange_arguments(None, "direct") == {}
    for value, wanted in ((1, True), (b"true", True), (0, False)):
        for name in (MESSAGE_SEQUENCE, KEEPS_LAST):
            assert exchange_arguments({name: value}, "topic") == {name: wanted}
    with pytest.raises(CommandFault) as caught:
        exchange_arguments({MESSAGE_SEQUENCE: "often"}, "topic")
    assert caught.value.code == 542


def test_arguments_of_a_binding() -> None:
    found = BindingArguments(
        {"qpid.exclusive-binding": b"1", "x-scope": "session", "x-match": b"any", "a": Str8("b")}
    )
    assert (found.is_alone, found.is_scoped) == (True, True)
    assert found.known == {"x-match": "any", "a": "b"}
    found.check("headers")
    found.check("x-own")
    selector = BindingArguments({"x-filter-jms-selector": "a = 1"})
    selector.check("topic")
    assert not BindingArguments(None).is_alone
    with pytest.raises(CommandFault):
        found.check("direct")


ID = UUID(int=7)


@pytest.mark.parametrize(
    ("value", "kept", "back"),
    [
        (None, None, None),
        (True, True, True),
        (Int(5), 5, 5),
        (1.5, 1.5, 1.5),
        (Str8("a"), "a", "a"),
        (Vbin8(b"a"), "a", "a"),
        (b"\xff", b"\xff", b"\xff"),
        (ID, ID, ID),
        (Datetime(7), Timestamp(7_000), Datetime(7)),
        ({"a": [b"b"]}, {"a": ["b"]}, {"a": ["b"]}),
        (Array(0x31, [1, 2]), [1, 2], [1, 2]),
    ],
    ids=[
        "void",
        "bool",
        "int",
        "float",
        "str8",
        "vbin8",
        "octets",
        "uuid",
        "datetime",
        "map",
        "array",
    ],
)
def test_values_are_kept_in_types_of_every_protocol(
    value: object, kept: object, back: object
) -> None:
    assert plain(value) == kept
    assert shown(kept) == back
    assert type(shown(kept)) is type(back)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, Dec32(1, 2)], ids=["large", "small", "dec"])
def test_values_that_other_protocols_lack_are_refused(value: object) -> None:
    with pytest.raises(CommandFault) as caught:
        plain({"a": [value]})
    assert caught.value.code == 542


async def test_a_type_of_the_application_is_declared() -> None:
    async with Broker(exchange_types={"x-own": FanoutTable}) as broker:
        here = DeclaringSession(broker)
        here.execute(ExchangeDeclare(exchange="e", type="x-own", arguments={"a": 1}))
        assert here.topology is not None
        assert here.topology.exchange("e").arguments == {"a": 1}


# --- hostile arguments --------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, object]:
    found: dict[str, object] = {"a": 1}
    for _ in range(depth):
        found = {"a": found}
    return found


MANY: dict[str, object] = {f"x-{number}": number for number in range(10_000)}
#: Name → arguments that nothing can be declared with. What is refused for its octets alone has 406.
HOSTILE: dict[str, tuple[dict[str, object], set[int]]] = {
    "10,000 names": (MANY, {406, 540}),
    "10,000 names in a value": ({"qpid.alert_count": MANY}, {406, 540}),
    "a long text": ({"qpid.alert_count": "x" * 100_000}, {406, 540}),
    "a number of 64 bits": ({"qpid.max_count": 2**63}, {540, 542}),
    "a decimal, deep inside": ({"qpid.alert_count": [{"a": [Dec32(1, 2)]}]}, {540, 542}),
    "nested, with a name of nobody": (nested(20), {540}),
}


@pytest.mark.parametrize(("depth", "code"), [(NESTING_MAX, 0), (NESTING_MAX + 1, 506), (200, 506)])
async def test_arguments_are_nested_as_deep_as_the_codec_reads(depth: int, code: int) -> None:
    """Reading them bounds the recursion of all that is done with them later."""
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        # The map of the arguments is a level, and so is the innermost one.
        given = {"qpid.alert_count": nested(depth - 2)}
        if not code:
            await session.call("queue.declare", queue="q", arguments=given)
            found = await session.call("queue.query", queue="q")
            assert found is not None
            assert found.arguments == given
            return
        with pytest.raises(Failed) as caught:
            await session.call("queue.declare", queue="q", arguments=given)
        assert caught.value.code == code


@pytest.mark.parametrize("name", HOSTILE)
async def test_nothing_is_declared_with_hostile_arguments(name: str) -> None:
    given, codes = HOSTILE[name]
    async with Broker() as broker:
        here = DeclaringSession(broker)
        here.execute(QueueDeclare(queue="q"))
        commands = (
            QueueDeclare(queue="new", arguments=given),
            ExchangeDeclare(exchange="new", type="direct", arguments=given),
            ExchangeBind(queue="q", exchange="amq.topic", binding_key="k", arguments=given),
        )
        for command in commands:
            assert here.refusal(command) in codes
        assert here.execute(QueueQuery(queue="new")) == QueueQueryResult()
        assert here.execute(ExchangeQuery(name="new")) == ExchangeQueryResult(not_found=True)
        assert here.topology is not None
        assert not here.topology.bound("amq.topic").queue_matched


# --- the guide ----------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "amqp010.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="the documentation is not here")
def test_the_table_of_the_guide_has_the_arguments_that_are_tested_here() -> None:
    page = GUIDE.read_text("utf-8")
    rows = page.partition("| argument of a queue |")[2].partition("\n\n")[0].splitlines()[2:]
    tested = {name for given, _ in OPTIONS for name in given}
    tested |= {"qpid.auto_delete_timeout", "qpid.lifetime-policy"}
    listed: set[str] = set()
    for line in rows:
        names = re.findall("`([^`]+)`", line.split(" | ")[0])
        effect = line.split(" | ")[1]
        assert names
        for name in names:
            found = set(fnmatch.filter(tested, name))
            assert found, f"{name} has no test"
            listed |= found
            if effect.startswith("none"):
                assert QueueArguments(dict.fromkeys(found, 1)).options == {}
    # Other spellings of Qpid's older clients.
    assert tested - listed == {
        "x-qpid-priorities",
        "qpid.LVQ_key",
        "qpid.last_value_queue_no_browse",
    }


#: Arguments of bindings → whether one is exclusive, and scoped, and what is left for the exchange.
BINDINGS: list[tuple[dict[str, object], str, tuple[bool, bool, list[str]]]] = [
    ({"x-match": "any"}, "headers", (False, False, ["x-match"])),
    ({"qpid.exclusive-binding": 1}, "topic", (True, False, [])),
    ({"x-scope": b"session"}, "topic", (False, True, [])),
    ({"x-apache-selector": "a = 1"}, "direct", (False, False, ["x-apache-selector"])),
]


@pytest.mark.parametrize(("given", "kind", "effect"), BINDINGS, ids=[str(*b[0]) for b in BINDINGS])
def test_each_argument_of_a_binding_has_its_effect(
    given: dict[str, object], kind: str, effect: tuple[bool, bool, list[str]]
) -> None:
    found = BindingArguments(given)
    found.check(kind)
    assert (found.is_alone, found.is_scoped, list(found.known)) == effect


#: Arguments of subscriptions → filters, priority and sync frequency.
SUBSCRIPTIONS: list[tuple[str, object, tuple[list[str], int, int]]] = [
    ("x-apache-selector", "a = 1", (["jms-selector"], 0, 0)),
    ("x-filter-jms-selector", b"a = 1", (["jms-selector"], 0, 0)),
    ("no-local", True, (["no-local"], 0, 0)),
    ("x-priority", -3, ([], -3, 0)),
    ("qpid.sync_frequency", 7, ([], 0, 7)),
]


@pytest.mark.parametrize(("name", "value", "effect"), SUBSCRIPTIONS)
def test_each_argument_of_a_subscription_has_its_effect(
    name: str, value: object, effect: tuple[list[str], int, int]
) -> None:
    found = SubscriptionArguments({name: value})
    assert (list(map(str, found.filters)), found.priority, found.sync_frequency) == effect
    with pytest.raises(CommandFault) as caught:
        SubscriptionArguments({name + "x": value})
    assert caught.value.code == 540


@pytest.mark.skipif(not GUIDE.exists(), reason="the documentation is not here")
@pytest.mark.parametrize(
    ("what", "tested"),
    [
        ("an exchange", {MESSAGE_SEQUENCE, KEEPS_LAST}),
        # The guide has the selector among "others whose names begin with" this.
        (
            "a binding",
            {name for each in BINDINGS for name in each[0]} - {"x-apache-selector"} | {"x-"},
        ),
        ("a subscription", {each[0] for each in SUBSCRIPTIONS}),
    ],
    ids=["exchange", "binding", "subscription"],
)
def test_the_other_tables_of_the_guide_have_the_arguments_that_are_tested_here(
    what: str, tested: set[str]
) -> None:
    _, _, table = GUIDE.read_text("utf-8").partition(f"| argument of {what} |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = [re.findall("`([^`]+)`", line.split(" | ")[0]) for line in rows]
    assert {name for each in named for name in each} - {"session"} == tested


@pytest.mark.skipif(not GUIDE.exists(), reason="the documentation is not here")
def test_arguments_that_the_guide_calls_not_offered_are_refused() -> None:
    text = " ".join(GUIDE.read_text("utf-8").partition("### Not offered")[2].split())
    found = re.findall("`([^`]+)`", text.partition(" and bindings of")[0])
    assert found
    for name in found:
        with pytest.raises(CommandFault) as caught:
            exchange_arguments({name: 1}, "direct")
        assert caught.value.code == 540
