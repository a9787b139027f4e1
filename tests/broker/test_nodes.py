"""Answers to attaches, compared with the requests."""

from __future__ import annotations

import re
from typing import Any

import pytest
from brokers import World

from amqp_rt import Broker
from amqp_rt.broker.declarations import declared_by
from amqp_rt.broker.nodes import Log, Queue, Topic, declaration, declaration_of
from amqp_rt.errors import AmqpError
from amqp_rt.fronts.base import RCV_FIRST, RCV_SECOND, SND_MIXED, SND_SETTLED, SND_UNSETTLED
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, RELEASED, Accepted, Error, Modified, Rejected
from amqp_rt.termini import STANDARD_OUTCOMES, Source, Target
from amqp_rt.values import Array, Described, Symbol, ULong


def world() -> World:
    return World(Queue("q"), Topic("t"))


# --- declarations --------------------------------------------------------------------------

WRONG: list[tuple[type, dict[str, Any], str]] = [
    (Queue, {"name": ""}, "1 to 1024 characters"),
    (Topic, {"name": "x" * 1_025}, "1 to 1024 characters"),
    (Queue, {"name": "q", "max_deliveries": -1}, "max_deliveries is at least 0, not -1"),
    (Queue, {"name": "q", "max_attempts": 0}, "max_attempts is at least 1"),
    (Queue, {"name": "q", "ttl_s": -1}, "ttl_s is at least 0"),
    (Queue, {"name": "q", "length_max": 0}, "length_max is at least 1"),
    (Queue, {"name": "q", "bytes_max": 0}, "bytes_max is at least 1"),
    (Queue, {"name": "q", "dead_letter": "q"}, "cannot be its own dead-letter address"),
    (Queue, {"name": "q", "dead_letter": ""}, "dead_letter is an address"),
    (Topic, {"name": "t", "backlog_max": 0}, "backlog_max is at least 1"),
    (Topic, {"name": "t", "backlog_bytes_max": 0}, "backlog_bytes_max is at least 1"),
    (Topic, {"name": "t", "ttl_s": -1}, "ttl_s is at least 0"),
    (Log, {"name": "l", "partitions": 0}, "partitions is at least 1"),
    (Log, {"name": "l", "max_age_s": 0}, "max_age_s is at least 0.001"),
    (Log, {"name": "l", "max_bytes": 0}, "max_bytes is at least 1"),
]


@pytest.mark.parametrize(("kind", "fields", "sentence"), WRONG)
def test_a_wrong_declaration_says_what_is_wrong(
    kind: type, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        kind(**fields)


def test_a_kind_by_its_name() -> None:
    assert declaration("queue", "x") == Queue("x")
    assert declaration("topic", "x") == Topic("x")
    assert declaration("log", "x") == Log("x")
    assert (Queue("x").kind, Topic("x").kind, Log("x").kind) == ("queue", "topic", "log")
    with pytest.raises(ValueError, match="a queue, a topic or a log, not 'heap'"):
        declaration("heap", "x")
    with pytest.raises(ValueError, match="a queue, a topic or a log, not 'schedule'"):
        declaration("schedule", "x")


DESCRIBED: list[tuple[str, Any]] = [
    ("queue:work", Queue("work")),
    ("queue:a/b:c?dead_letter=a%26b", Queue("a/b:c", dead_letter="a&b")),
    (
        "queue:work?priorities=5&lock_s=1.5&single_active=true&sort_key=",
        "names no field",
    ),
    (
        "queue:work?length_max=5&ttl_s=1.5&single_active=true&overflow=reject",
        Queue("work", length_max=5, ttl_s=1.5, single_active=True, overflow="reject"),
    ),
    ("log:clicks?partitions=3", Log("clicks", partitions=3)),
    ("work", "is not KIND:NAME"),
    ("stack:work", "is not KIND:NAME"),
    ("queue:?priorities=5", "is not KIND:NAME"),
    ("queue:work?prioritys=5", "a queue has no option 'prioritys'; is 'priorities' meant?"),
    ("topic:news?priorities=5", "a topic has no option 'priorities': it has name, "),
    ("queue:work?priorities", "bad query field"),
    ("queue:work?priorities=many", "Expected `int`, got `str` - at `$.priorities`"),
    ("queue:work?overflow=spill", "Invalid enum value 'spill'"),
    ("queue:work?groups=-1", "groups is 0 to 65536"),
]


@pytest.mark.parametrize(("text", "expected"), DESCRIBED, ids=[text for text, _ in DESCRIBED])
def test_a_declaration_in_one_line(text: str, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(AmqpError, match=re.escape(expected)):
            declared_by(text)
    else:
        assert declared_by(text) == expected


def test_a_declaration_of_its_fields() -> None:
    assert declaration_of({"name": "q"}) == Queue("q")
    assert declaration_of({"name": "l", "kind": "log", "max_bytes": 7}) == Log("l", max_bytes=7)
    for fields, sentence in [
        ({"name": "q", "kind": 7}, "a node is a queue, a topic, a log or a schedule, not 7"),
        ({"name": "q", "priorities": "5"}, "Expected `int`, got `str`"),
        ({}, "missing required field `name`"),
    ]:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            declaration_of(fields)


async def test_nodes_made_on_first_use_have_the_options_of_their_pattern() -> None:
    patterns = ["queue:*?dead_letter=dead", "queue:jobs-*?dead_letter=lost&priorities=10"]
    async with Broker(auto_create=patterns) as broker, broker.local() as peer:
        for address in ("jobs-1", "plain", "dead"):
            async with peer.sender(address):
                pass
        assert broker.nodes() == [
            Queue("jobs-1", dead_letter="lost", priorities=10),
            Queue("lost"),
            Queue("plain", dead_letter="dead"),
            Queue("dead"),
        ]


# --- sources -------------------------------------------------------------------------------

SELECTOR = Described(Symbol("apache.org:selector-filter:string"), "a = 1")

#: address, what the receiver asks, what it is answered
SOURCES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("q", {}, {"distribution_mode": "move", "default_outcome": RELEASED}),
    ("q", {"distribution_mode": "move"}, {"distribution_mode": "move"}),
    (
        "q",
        {"distribution_mode": "copy"},
        {"distribution_mode": "copy", "default_outcome": ACCEPTED},
    ),
    ("t", {}, {"distribution_mode": "copy", "default_outcome": ACCEPTED}),
    ("t", {"distribution_mode": "copy"}, {"distribution_mode": "copy"}),
    ("q", {}, {"outcomes": STANDARD_OUTCOMES}),
    (
        "q",
        {"outcomes": ("amqp:released:list", "amqp:accepted:list")},
        {"outcomes": ("amqp:released:list", "amqp:accepted:list")},
    ),
    (
        "q",
        {"default_outcome": Modified(delivery_failed=True)},
        {"default_outcome": Modified(delivery_failed=True)},
    ),
    ("q", {"default_outcome": Rejected()}, {"default_outcome": Rejected()}),
    ("q", {}, {"durable": 0, "expiry_policy": "session-end", "timeout": 0}),
    ("q", {"expiry_policy": "never", "timeout": 9}, {"expiry_policy": "never", "timeout": 0}),
    ("q", {"expiry_policy": "link-detach"}, {"expiry_policy": "link-detach"}),
    ("t", {"expiry_policy": "connection-close"}, {"expiry_policy": "connection-close"}),
    ("t", {"timeout": 60}, {"timeout": 60, "default_outcome": RELEASED}),
    ("q", {"timeout": 2**32 - 1}, {"timeout": Limits().terminus_timeout_max_s}),
    # An answer promises only what holds: nothing durable outlives the session, and a browser
    # leaves nothing behind.
    ("q", {"durable": 2}, {"durable": 0}),
    (
        "q",
        {"distribution_mode": "copy", "timeout": 60, "expiry_policy": "never"},
        {"expiry_policy": "link-detach", "timeout": 0},
    ),
    (
        "q",
        {"filter": {Symbol("f"): SELECTOR, Symbol("g"): Described(Symbol("x:filter"), 1)}},
        {"filter": {Symbol("f"): SELECTOR}},
    ),
    ("q", {"filter": {Symbol("g"): Described(Symbol("x:filter"), 1)}}, {"filter": None}),
    ("q", {"capabilities": ("queue", "x-unknown")}, {"capabilities": ("queue",)}),
    ("t", {"capabilities": ("topic",)}, {"capabilities": ("topic",)}),
    ("q", {}, {"address": "q", "dynamic": False, "dynamic_node_properties": None}),
]


@pytest.mark.req("M31", "M40", "B4", "B20")
@pytest.mark.parametrize(("address", "asked", "answered"), SOURCES, ids=str)
def test_a_source_is_answered_as_it_is(
    address: str, asked: dict[str, Any], answered: dict[str, Any]
) -> None:
    source = world().client().receiver(address, **asked).link.source
    assert {name: getattr(source, name) for name in answered} == answered


#: address, what the receiver asks, why it is refused
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("t", {"distribution_mode": "move"}, "amqp:not-implemented"),
    ("q", {"distribution_mode": "x-other"}, "amqp:not-implemented"),
    ("q", {"outcomes": ("amqp:accepted:list", "x:outcome")}, "amqp:not-implemented"),
    ("q", {"default_outcome": Described(ULong(0x1FF), [])}, "amqp:invalid-field"),
    ("q", {"capabilities": ("topic",)}, "amqp:precondition-failed"),
    ("t", {"capabilities": ("queue",)}, "amqp:precondition-failed"),
    ("nowhere", {}, "amqp:not-found"),
    ("q", {"expiry_policy": "x-tomorrow"}, "amqp:invalid-field"),
    ("q", {"durable": 3}, "amqp:invalid-field"),
    # There is no store here.
    ("q", {"durable": 1, "expiry_policy": "never"}, "amqp:precondition-failed"),
    ("t", {"durable": 2, "timeout": 5}, "amqp:precondition-failed"),
    ("q", {"durable": 1, "distribution_mode": "copy"}, "amqp:not-implemented"),
    ("q", {"capabilities": ("shared",)}, "amqp:not-implemented"),
]


@pytest.mark.req("B4", "B8")
@pytest.mark.parametrize(("address", "asked", "condition"), REFUSED, ids=str)
def test_a_source_that_cannot_be_is_refused(
    address: str, asked: dict[str, Any], condition: str
) -> None:
    receiver = world().client().receiver(address, **asked)
    assert receiver.endpoint.attached == []
    assert receiver.error == condition


@pytest.mark.parametrize(
    ("asked", "answered"),
    [(SND_MIXED, SND_UNSETTLED), (SND_UNSETTLED, SND_UNSETTLED), (SND_SETTLED, SND_SETTLED)],
)
@pytest.mark.parametrize("mode", [RCV_FIRST, RCV_SECOND])
def test_settle_modes_are_answered_as_they_are(asked: int, answered: int, mode: int) -> None:
    for address in ("q", "t"):
        receiver = world().client().receiver(address, snd_settle_mode=asked, rcv_settle_mode=mode)
        assert receiver.link.snd_settle_mode == answered
        assert receiver.link.rcv_settle_mode == mode


# --- targets -------------------------------------------------------------------------------


@pytest.mark.req("B4", "M40")
@pytest.mark.parametrize("address", ["q", "t"])
def test_a_target_is_answered_as_it_is(address: str) -> None:
    asked = Target(address=address, expiry_policy="connection-close", capabilities=("x-y",))
    sender = world().client().sender(None, target=asked, source=Source(address="mine"))
    kind = {"q": "queue", "t": "topic"}[address]
    assert sender.link.target == Target(
        address=address, expiry_policy="connection-close", capabilities=(kind,)
    )
    assert sender.link.source == Source(address="mine")
    assert sender.link.max_message_size == Limits().message_size_max


@pytest.mark.req("B8")
@pytest.mark.parametrize(
    ("target", "condition"),
    [
        (Target(address="q", capabilities=("topic",)), "amqp:precondition-failed"),
        (Target(address="nowhere"), "amqp:not-found"),
        (Target(address=7), "amqp:not-found"),
        (Target(address="q", dynamic=True), "amqp:invalid-field"),
        (Target(dynamic=True, capabilities=("queue", "topic")), "amqp:invalid-field"),
        (Target(address="q", expiry_policy="x-tomorrow"), "amqp:invalid-field"),
        (Target(address="q", durable=3), "amqp:invalid-field"),
        (Target(address="q", durable=1, timeout=1), "amqp:precondition-failed"),
    ],
)
def test_a_target_that_cannot_be_is_refused(target: Target, condition: str) -> None:
    sender = world().client().sender(None, target=target)
    assert sender.error == condition
    assert sender.link.credit == 0


@pytest.mark.req("B9")
def test_a_link_is_established_again_with_other_parameters() -> None:
    here = world()
    client = here.client()
    client.sender("q").send("m")
    link = client.receiver("q", name="l", distribution_mode="copy", credit=1)
    assert link.link.source.distribution_mode == "copy"
    link.detach()
    again = client.receiver("q", name="l", distribution_mode="move", credit=1)
    assert again.link.source.distribution_mode == "move"
    assert link.bodies == again.bodies == ["m"]


# --- dynamic nodes -------------------------------------------------------------------------


@pytest.mark.req("M33", "B2", "M34")
@pytest.mark.parametrize(
    ("capabilities", "kind", "modes"),
    [
        ((), "queue", ["move", "copy"]),
        (("temporary-queue",), "queue", ["move", "copy"]),
        (("temporary-topic",), "topic", ["copy"]),
        (("topic",), "topic", ["copy"]),
    ],
)
@pytest.mark.parametrize("role", ["source", "target"])
def test_a_dynamic_node_is_made_named_and_deleted_with_its_link(
    role: str, capabilities: tuple[str, ...], kind: str, modes: list[str]
) -> None:
    here = world()
    client = here.client("shop/α")
    wishes = {Symbol("x-shade"): "green"}
    end: Any
    if role == "source":
        end = client.receiver(
            None,
            name="replies ! " + "x" * 100,
            dynamic=True,
            capabilities=capabilities,
            dynamic_node_properties=wishes,
        )
        terminus: Any = end.link.source
    else:
        target = Target(dynamic=True, capabilities=capabilities, dynamic_node_properties=wishes)
        end = client.sender(None, name="replies ! " + "x" * 100, target=target)
        terminus = end.link.target
    assert terminus.dynamic
    # Name of container and link, made harmless and bounded, and 128 random bits.
    assert re.fullmatch(r"dynamic/shop-/replies-x{56}/[A-Za-z0-9_-]{22}", terminus.address)
    properties = terminus.dynamic_node_properties
    assert properties["lifetime-policy"] == Described(ULong(0x2B), [])
    assert properties["supported-dist-modes"] == Array([Symbol(mode) for mode in modes], Symbol)
    assert here.stats(terminus.address).kind == kind
    assert here.stats(terminus.address).dynamic
    end.detach()
    assert [declared.name for declared in here.host.space().declarations()] == ["q", "t"]


@pytest.mark.req("B1", "M33")
def test_a_dynamic_address_works_as_reply_to_anywhere() -> None:
    here = world()
    caller, server = here.client(), here.client()
    replies = caller.receiver(None, dynamic=True, credit=10)
    address = replies.link.source.address
    caller.sender("q").send("question", reply_to=address)
    (question,) = server.receiver("q", credit=1).messages
    server.sender(question.reply_to).send("answer")
    assert replies.bodies == ["answer"]


def test_only_the_connection_that_made_a_dynamic_node_may_receive_from_it() -> None:
    here = world()
    owner, other = here.client(), here.client()
    address = owner.receiver(None, dynamic=True).link.source.address
    assert other.receiver(address).error == "amqp:unauthorized-access"
    assert other.receiver(address, distribution_mode="copy").error == "amqp:unauthorized-access"
    other.sender(address).send("m")
    assert owner.receiver(address, credit=1).bodies == ["m"]


@pytest.mark.parametrize("how", ["close", "cut"])
def test_dynamic_nodes_go_with_their_connection(how: str) -> None:
    here = world()
    client, other = here.client(), here.client()
    address = client.receiver(None, dynamic=True).link.source.address
    sender = other.sender(address)
    sender.send("m")
    if how == "cut":
        client.cut()
    else:
        client.joined.client.close()
    here.pump()
    assert sender.error == "amqp:resource-deleted"
    assert [declared.name for declared in here.host.space().declarations()] == ["q", "t"]
    assert here.host.memory.held == 0
    assert not here.host.services.dynamic


def test_dynamic_nodes_are_bounded_for_each_connection() -> None:
    here = World(limits=Limits(dynamic_nodes_max=2))
    client = here.client()
    first, _ = (client.receiver(None, dynamic=True) for _ in range(2))
    assert client.receiver(None, dynamic=True).error == "amqp:resource-limit-exceeded"
    assert here.client().receiver(None, dynamic=True).error is None
    first.detach()
    assert client.receiver(None, dynamic=True).error is None


@pytest.mark.req("B8")
@pytest.mark.parametrize(
    ("asked", "condition"),
    [
        ({"address": "mine"}, "amqp:invalid-field"),
        ({"capabilities": ("queue", "topic")}, "amqp:invalid-field"),
        ({"capabilities": ("topic",), "distribution_mode": "move"}, "amqp:not-implemented"),
        ({"outcomes": ("x:outcome",)}, "amqp:not-implemented"),
    ],
)
def test_a_dynamic_source_that_cannot_be_is_refused(asked: dict[str, Any], condition: str) -> None:
    here = world()
    source = Source(dynamic=True, **asked)
    assert here.client().receiver(None, source=source).error == condition
    assert [declared.name for declared in here.host.space().declarations()] == ["q", "t"]


def test_the_outcome_types_of_the_answer_are_those_of_the_text() -> None:
    source = world().client().receiver("q").link.source
    assert list(source.outcomes) == list(STANDARD_OUTCOMES)
    assert not isinstance(source.default_outcome, Accepted | Error)


# --- aliases ---------------------------------------------------------------------------------


@pytest.mark.req("B3", "B4")
def test_an_alias_is_an_address_like_any_other() -> None:
    here = World(Queue("work/v2", aliases=("work", "jobs")), Topic("t"))
    client = here.client("c")
    sender = client.sender("work")
    # A peer that uses an alias gets the alias in the answer, and can pass it on.
    assert sender.link.target.address == "work"
    sender.send("m", reply_to="jobs")
    receiver = client.receiver("jobs", name="l", timeout=60, credit=1)
    assert receiver.link.source.address == "jobs"
    assert receiver.bodies == ["m"]
    client.cut()
    # The alias is the same node: under its name the link continues.
    here.client("c").receiver("work/v2", name="l", timeout=60)
    assert here.stats("work/v2").consumers == 1
    assert [each.name for each in here.host.space().declarations()] == ["work/v2", "t"]


@pytest.mark.req("B3")
def test_a_node_has_so_many_aliases() -> None:
    here = World(limits=Limits(aliases_max=2))
    here.host.space().declare(Queue("q", aliases=("a", "b")))
    for declare, name in ((here.host.space().declare, "p"), (here.host.space().update, "q")):
        with pytest.raises(AmqpError, match="at most 2 aliases, not 3") as caught:
            declare(Queue(name, aliases=("a", "b", "c")))
        assert caught.value.condition == "amqp:resource-limit-exceeded"


@pytest.mark.req("B3")
def test_an_alias_means_one_node() -> None:
    here = World(Queue("q", aliases=("a",)), Topic("t"))
    for wrong in (Queue("a"), Queue("p", aliases=("a",)), Queue("p", aliases=("t",))):
        with pytest.raises(AmqpError) as refused:
            here.host.space().declare(wrong)
        assert refused.value.condition == "amqp:precondition-failed"
    assert [each.name for each in here.host.space().declarations()] == ["q", "t"]
    here.host.space().delete("q")
    assert here.client().receiver("a").error == "amqp:not-found"
    here.host.space().declare(Queue("a"))
    assert here.client().receiver("a").error is None
    for name in ("", "q", "x" * 1_025):
        with pytest.raises(ValueError, match="an alias is another address"):
            Queue("q", aliases=(name,))


@pytest.mark.parametrize("value", ["5", True, b"1"])
def test_a_number_has_to_be_one(value: Any) -> None:
    with pytest.raises(TypeError, match="ttl_s is a number, not "):
        Queue("q", ttl_s=value)
