"""Methods in any order with any fields: each is answered, and costs nobody else anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.codec import FIELDS
from amqp_rt_amqp091.lifecycle import Stage
from amqp_rt_amqp091.methods import METHODS, BasicProperties
from amqp_rt_amqp091.values import Decimal, Seconds
from hypothesis import given
from hypothesis import strategies as st
from worlds091 import Client, World

from amqp_rt.fronts import Float32, Int, Short, UByte, UInt

#: Octets that are no text, as the codec hands them on.
_NO_TEXT = "\udcff"
_NAMES = st.sampled_from(
    [
        *(
            "",
            "q",
            "p",
            "amq.topic",
            "amq.direct",
            "amq.headers",
            "e",
            "#",
            "a.*",
            _NO_TEXT,
            "x" * 200,
        ),
        *(
            "amq.rabbitmq.reply-to",
            "amq.x",
            "/exchanges/e",
            "$management",
            "q/$management",
            "topic",
        ),
        *("fanout", "direct", "headers", "system", "x-unknown", "tag"),
    ]
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | _NAMES
    | st.binary(max_size=4)
    | st.integers(0, 1 << 63).map(Seconds)
    | st.builds(Decimal, st.integers(0, 255), st.integers(-(1 << 31), (1 << 31) - 1))
    | st.integers(0, 255).map(UByte)
    | st.integers(-9, 9).map(Short)
    | st.integers(-9, 9).map(Int)
    | st.integers(0, 9).map(UInt)
    | st.floats(width=32).map(Float32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=5,
)
_ARGUMENTS = st.sampled_from(
    [
        *(
            "x-message-ttl",
            "x-expires",
            "x-max-length",
            "x-max-length-bytes",
            "x-overflow",
            "CC",
            "BCC",
        ),
        *("x-dead-letter-exchange", "x-dead-letter-routing-key", "x-max-priority", "x-queue-type"),
        *(
            "x-single-active-consumer",
            "x-stream-offset",
            "x-priority",
            "x-match",
            "alternate-exchange",
        ),
        *("x-delivery-limit", "x-max-age", _NO_TEXT, "a"),
    ]
)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "bit": st.booleans(),
    "octet": st.integers(0, 255),
    "short": st.integers(0, 3) | st.integers(0, 65_535),
    "long": st.integers(0, 3) | st.integers(0, (1 << 32) - 1),
    "longlong": st.integers(0, 3) | st.integers(0, (1 << 64) - 1),
    "timestamp": st.integers(0, (1 << 64) - 1),
    "shortstr": _NAMES,
    "longstr": st.binary(max_size=8),
    "table": st.dictionaries(_ARGUMENTS, _VALUES | _NAMES | st.integers(0, 9), max_size=3),
}


def _methods(code: int) -> st.SearchStrategy[m.Method]:
    return st.builds(METHODS[code], **{name: _FIELDS[kind] for name, kind in FIELDS[code]})


@dataclasses.dataclass
class Content:
    """A publication, or a content without its method."""

    method: m.BasicPublish
    properties: BasicProperties
    body: bytes


_PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        name: _NAMES if kind == "shortstr" else _FIELDS[kind]
        for name, kind in (
            ("content_type", "shortstr"),
            ("headers", "table"),
            ("delivery_mode", "octet"),
            ("priority", "octet"),
            ("correlation_id", "shortstr"),
            ("reply_to", "shortstr"),
            ("expiration", "shortstr"),
            ("message_id", "shortstr"),
            ("timestamp", "timestamp"),
            ("type", "shortstr"),
            ("user_id", "shortstr"),
            ("app_id", "shortstr"),
        )
    },
).map(lambda said: BasicProperties(**said))
_CONTENTS = st.builds(
    Content,
    _methods(m.BasicPublish.code),
    _PROPERTIES,
    st.binary(max_size=9),
)
#: Methods of channels, and seldom one of the connection.
_SAID = (
    st.sampled_from([code for code in METHODS if code >> 16 != 10]).flatmap(_methods)
    | _CONTENTS
    | st.sampled_from(
        [
            m.QueueDeclare(queue="q", durable=True),
            m.QueueBind(queue="q", exchange="amq.topic", routing_key="#"),
            m.BasicConsume(queue="q", consumer_tag="tag"),
            m.BasicGet(queue="q"),
            m.ChannelOpen(),
            m.ConfirmSelect(),
            m.TxSelect(),
        ]
    )
)


def say(client: Client, what: Any) -> None:
    if isinstance(what, Content):
        client.publish(
            1,
            what.method.routing_key,
            what.body,
            exchange=what.method.exchange,
            mandatory=what.method.mandatory,
            properties=what.properties,
        )
    else:
        client.say(1, what)


@pytest.mark.slow
@pytest.mark.req("N7")
@given(st.lists(_SAID, max_size=12))
def test_any_methods_with_any_fields(said: list[Any]) -> None:
    world = World()
    bystander = world.connect()
    bystander.say(1, m.QueueDeclare(queue="theirs", exclusive=True))
    bystander.take()
    client = world.connect()
    for what in said:
        say(client, what)
        if client.engine.finished or client.engine.stage is Stage.CLOSING:
            break
        if 1 not in client.engine.sessions:
            client.say(1, m.ChannelOpen())
        elif client.engine.sessions[1].closing:
            # A fault has cost the channel, and the client goes on with another.
            client.say(1, m.ChannelCloseOk(), m.ChannelOpen())
    client.take()
    bystander.publish(1, "theirs", b"still here")
    bystander.say(1, m.BasicGet(queue="theirs", no_ack=True))
    assert [each.body for each in bystander.contents()] == [b"still here"]
