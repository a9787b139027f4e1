"""The model of the June 2007 draft, sections 1.5 and 2.1 to 2.2.6, statement by statement and over the wire.

Headings name the sections. Declarations and their refusals are in ``test_amqp010_declarations.py``.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from protocol010 import EXPLICIT, Failed
from subscribers010 import Attached, World

pytestmark = pytest.mark.req("D2")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def session(world: World) -> Attached:
    return world.client().attach()


def declare(session: Attached, *queues: str) -> None:
    for queue in queues:
        session.call("queue.declare", queue=queue)


def bind(session: Attached, queue: str, exchange: str, key: str = "", **arguments: object) -> None:
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    session.call(
        "exchange.bind",
        queue=queue,
        exchange=exchange,
        binding_key=key,
        arguments=named or None,
    )


def route(
    session: Attached, exchange: str, key: str, headers: dict[str, Any] | None = None
) -> list[str]:
    """Publish a message; return the names of the queues that have got it, and empty them."""
    properties = None if headers is None else {"application_headers": headers}
    session.done(
        session.state.transfer(
            exchange, b"x", key=key, properties=properties, accept_mode=None, sync=True
        )
    )
    space = session.client.world.host.space()
    found = [name for name in sorted(space.nodes) if space.get(name).stats().available]
    for name in found:
        session.call("queue.purge", queue=name)
    return found


def code_of(session: Attached, name: str, **fields: Any) -> int:
    """Send a command in a session of its own; return the code of its exception, or 0."""
    other = session.client.attach(b"other")
    try:
        other.call(name, **fields)
    except Failed as failed:
        return failed.code or -1
    other.state.detach()
    session.client.world.pump()
    return 0


# --- 1.5: names are case-sensitive --------------------------------------------------------------------


@pytest.mark.req("D1")
def test_exchanges_differ_by_case(session: Attached) -> None:
    found = session.call("exchange.query", name="amq.Direct")
    assert found is not None
    assert found.not_found
    declare(session, "q")
    bind(session, "q", "amq.direct", "k")
    assert code_of(session, "message.transfer", destination="amq.Direct") == 404
    assert code_of(session, "exchange.bind", queue="q", exchange="amq.Direct") == 404
    # Not even the prefix of names that are the broker's is known in another case.
    session.call("exchange.declare", exchange="AMQ.direct", type="fanout")
    bind(session, "q", "AMQ.direct")
    assert route(session, "amq.direct", "other") == []
    assert route(session, "AMQ.direct", "other") == ["q"]
    assert code_of(session, "exchange.declare", exchange="e", type="Direct") == 404


@pytest.mark.req("D1")
def test_queues_keys_and_headers_differ_by_case(session: Attached) -> None:
    declare(session, "q", "Q")
    assert route(session, "", "q") == ["q"]
    assert route(session, "", "Q") == ["Q"]
    bind(session, "q", "amq.direct", "k")
    bind(session, "q", "amq.topic", "usd.*")
    bind(session, "q", "amq.match", colour="red")
    assert route(session, "amq.direct", "K") == []
    assert route(session, "amq.topic", "USD.stock") == []
    for headers in ({"Colour": "red"}, {"colour": "Red"}):
        assert route(session, "amq.match", "", headers) == []
    assert route(session, "amq.match", "", {"colour": "red"}) == ["q"]


@pytest.mark.req("D1", "D10")
def test_sessions_differ_by_case(session: Attached) -> None:
    other = session.client.attach(b"S")
    other.call("queue.declare", queue="own", exclusive=True)
    assert code_of(session, "queue.declare", queue="own", passive=True) == 405
    assert session.state.detached is None


# --- 2.2.3: exchanges ---------------------------------------------------------------------------------


def test_a_direct_exchange_compares_keys(session: Attached) -> None:
    declare(session, "one", "both", "other")
    for queue, key in (("one", "R"), ("both", "R"), ("both", "S"), ("other", "R.S")):
        bind(session, queue, "amq.direct", key)
    assert route(session, "amq.direct", "R") == ["both", "one"]
    assert route(session, "amq.direct", "S") == ["both"]
    assert route(session, "amq.direct", "R.*") == []
    assert route(session, "amq.direct", "") == []


def test_a_fanout_exchange_compares_nothing(session: Attached) -> None:
    declare(session, "one", "two", "unbound")
    bind(session, "one", "amq.fanout")
    bind(session, "two", "amq.fanout", "k")
    assert route(session, "amq.fanout", "whatever") == ["one", "two"]


@pytest.mark.parametrize(
    ("pattern", "matched", "unmatched"),
    [
        # The example of the draft.
        ("*.stock.#", ["usd.stock", "eur.stock.db"], ["stock.nasdaq", "stock", "a.b.stock"]),
        ("STOCK.USD.*", ["STOCK.USD.IBM"], ["STOCK.USD", "STOCK.USD.IBM.N"]),
        ("#", ["", "a", "a.b.c"], []),
        ("*", ["a"], ["", "a.b"]),
        ("a.#.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "a.b", "z.a"]),
    ],
)
def test_a_topic_exchange_matches_words(
    session: Attached, pattern: str, matched: list[str], unmatched: list[str]
) -> None:
    declare(session, "q")
    bind(session, "q", "amq.topic", pattern)
    for key in matched:
        assert route(session, "amq.topic", key) == ["q"], key
    for key in unmatched:
        assert route(session, "amq.topic", key) == [], key


@pytest.mark.parametrize(
    ("arguments", "matched", "unmatched"),
    [
        # All is the default, and a void value is one that the header need not have.
        ({"a": 1, "b": "x"}, [{"a": 1, "b": "x", "c": 0}], [{"a": 1}, {"a": 2, "b": "x"}, {}]),
        ({"x-match": "all", "a": 1, "b": None}, [{"a": 1, "b": "any"}], [{"a": 1}]),
        ({"x-match": "any", "a": 1, "b": "x"}, [{"a": 1}, {"b": "x"}], [{"a": 2}, {"c": 1}, {}]),
        ({"x-match": "any", "a": None}, [{"a": 1}, {"a": "x"}], [{"b": 1}]),
        # Other names with this prefix are reserved, and ignored.
        ({"x-match": "all", "a": 1, "x-other": 5}, [{"a": 1}], [{"x-other": 5}]),
    ],
)
def test_a_headers_exchange_matches_arguments(
    session: Attached,
    arguments: dict[str, Any],
    matched: list[dict[str, Any]],
    unmatched: list[dict[str, Any]],
) -> None:
    declare(session, "q")
    for exchange in ("amq.match", "amq.headers"):
        bind(session, "q", exchange, "k", **arguments)
        for headers in matched:
            # The routing key is not used.
            assert route(session, exchange, "other", headers) == ["q"], headers
        for headers in unmatched:
            assert route(session, exchange, "k", headers) == [], headers


@pytest.mark.req("D4")
def test_the_standard_exchanges_are_declared_again_and_stay(session: Attached) -> None:
    names = ("direct", "fanout", "topic", "headers")
    for name, kind in [*((each, each) for each in names), ("match", "headers")]:
        session.call("exchange.declare", exchange=f"amq.{name}", type=kind, durable=True)
        assert code_of(session, "exchange.delete", exchange=f"amq.{name}") == 530
        found = session.call("exchange.query", name=f"amq.{name}")
        assert found is not None
        assert (found.type, found.durable, found.not_found) == (kind, True, False)


def test_a_message_is_the_same_in_each_queue(session: Attached) -> None:
    queues = ("one", "two", "three")
    declare(session, *queues)
    for queue in queues:
        bind(session, queue, "amq.fanout")
    session.state.transfer(
        "amq.fanout",
        bytes(range(256)),
        key="k",
        delivery={"priority": 3},
        properties={"content_type": "a/b", "application_headers": {"a": [1, "two"]}},
    )
    for queue in queues:
        session.subscribe(queue, queue)
    first, *others = [(each.headers, each.body) for each in session.messages()]
    assert others == [first, first]


# --- 2.1.4 and 2.2.4: queues ----------------------------------------------------------------------------


def test_a_temporary_queue_goes_with_its_consumer(world: World, session: Attached) -> None:
    """Declare, consume, cancel; its bindings go with it."""
    session.call("queue.declare", queue="tmp", auto_delete=True)
    bind(session, "tmp", "amq.topic", "stock.#")
    session.subscribe("tmp", "d")
    session.call("message.cancel", destination="d")
    world.pump()
    assert not world.host.space().has("tmp")
    declare(session, "tmp")
    found = session.call("exchange.bound", exchange="amq.topic", queue="tmp")
    assert found is not None
    assert found.queue_not_matched


def test_one_consumer_gets_messages_in_their_order(session: Attached) -> None:
    declare(session, "q")
    bodies = [b"%d" % number for number in range(30)]
    for number, body in enumerate(bodies):
        session.state.transfer("", body, key="q", delivery={"delivery_mode": 1 + number % 2})
    session.subscribe("q")
    assert session.bodies() == bodies


def test_several_consumers_share_messages(world: World, session: Attached) -> None:
    """Each message goes to one of them, unless it comes back; each of them has its own in order."""
    declare(session, "q")
    consumers = [world.client().attach(b"%d" % number) for number in range(3)]
    for consumer in consumers:
        consumer.subscribe("q", messages=4)
    bodies = [b"%02d" % number for number in range(12)]
    for body in bodies:
        session.state.transfer("", body, key="q", accept_mode=EXPLICIT)
    world.pump()
    found = [consumer.messages() for consumer in consumers]
    for messages in found:
        assert [each.body for each in messages] == sorted(each.body or b"" for each in messages)
    assert sorted(each.body or b"" for each in chain(*found)) == bodies
    # The first consumer has no credit left: what it gives back goes to another one.
    number = found[0][0].id
    assert number is not None
    consumers[0].release(number)
    consumers[1].flow(1)
    (again,) = consumers[1].messages()
    assert again.body == found[0][0].body
    assert consumers[2].messages() == []


# --- 2.2.2: virtual hosts ---------------------------------------------------------------------------------


def test_a_connection_stays_in_its_virtual_host(session: Attached) -> None:
    """There is no way to another one: ``open`` comes once."""
    session.client.say("connection.open", virtual_host="other")
    close = session.client.wire.close_of_broker
    assert close is not None
    assert close.reply_code == 501
