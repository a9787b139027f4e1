"""Codecs of payloads: pydantic's models, those of applications and packages, and all faults at once."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field

from amqp_rt import Container, Delivery, Message, node, rpc
from amqp_rt.container import codecs as codecs_module
from amqp_rt.container.codecs import Codecs
from amqp_rt.container.faults import FAULTS_MAX, FAULTS_OCTETS_MAX, SEARCHED_MAX
from amqp_rt.container.payloads import decode_payload
from amqp_rt.errors import CallFailed, DecodeError, DeliveryRejected, EncodeError
from amqp_rt.outcomes import Rejected
from amqp_rt.values import Timestamp

pytestmark = pytest.mark.req("A3")

JSON = "application/json"


class Line(BaseModel):
    sku: str
    quantity: int = Field(ge=1, alias="n")


class Order(BaseModel):
    number: int
    lines: list[Line] = []


class Row(msgspec.Struct):
    a: int
    b: str = ""


# --- Models of pydantic ---


async def test_models_are_payloads_of_nodes_calls_and_receivers() -> None:
    taken: list[Order] = []

    @node("orders")
    async def place(order: Order) -> None:
        taken.append(order)

    @rpc("orders/lines")
    async def lines(order: Order, least: int, row: Row) -> list[Line]:
        assert row == Row(1)
        return [each for each in order.lines if each.quantity >= least]

    @rpc("orders/each")
    async def each(order: Order) -> AsyncIterator[Line]:
        for line in order.lines:
            yield line

    @node("deliveries")
    async def deliveries(delivery: Delivery) -> None:
        taken.append(delivery.decode(Order))

    order = Order(number=1, lines=[Line(sku="A", n=2), Line(sku="B", n=1)])
    nodes = [place, lines, each, deliveries]
    async with Container("shop", nodes=nodes) as shop, shop.local() as peer:
        async with peer.sender("orders") as out:
            await out.send(order)
            await out.send({"number": "2"})  # pydantic is lenient by default
            await out.send(order, content_type="application/msgpack")
            await out.send(order, content_type="amqp-value")
        async with peer.sender("deliveries") as out:
            await out.send([order][0])
        assert taken == [order, Order(number=2), order, order, order]
        found = await peer.call("orders/lines", order, 2, Row(1), reply=list[Line])
        assert found == order.lines[:1]
        assert [line async for line in peer.stream("orders/each", order, reply=Line)] == order.lines
        with pytest.raises(DecodeError) as caught:
            await peer.call("orders/lines", order, 1, Row(1), reply=Line)
        assert caught.value.info["errors"][0]["path"] == "$"  # type: ignore[index]


async def test_faults_of_a_model_reach_the_peer_all_at_once() -> None:
    @node("orders")
    async def place(order: Order) -> None: ...

    @rpc("orders/check")
    async def check(least: int, order: Order) -> None: ...

    bad = {"number": "x", "lines": [{"sku": "A", "n": 0}, {"n": 1}]}
    found = [
        ("$.number", "Input should be a valid integer, unable to parse string as an integer"),
        ("$.lines[0].n", "Input should be greater than or equal to 1"),
        ("$.lines[1].sku", "Field required"),
    ]
    async with Container("shop", nodes=[place, check]) as shop, shop.local() as peer:
        async with peer.sender("orders") as out:
            with pytest.raises(DeliveryRejected, match="and 2 more faults") as caught:
                await out.send(bad)
        assert caught.value.condition == "amqp:decode-error"
        assert _told(caught.value) == found
        with pytest.raises(CallFailed) as failed:
            await peer.call("orders/check", 1, bad)
        assert failed.value.condition == "amqp:decode-error"
        assert failed.value.info["statusCode"] == 400
        assert _told(failed.value) == [(f"$[1]{path[1:]}", said) for path, said in found]


def _told(error: Any) -> list[tuple[str, str]]:
    return [(each["path"], each["message"]) for each in error.info["errors"]]


async def test_a_delivery_that_cannot_be_decoded_is_rejected_with_its_faults() -> None:
    @node("orders")
    async def place(body: Any) -> None: ...

    async with (
        Container("shop", nodes=[place]) as shop,
        shop.local() as peer,
        peer.receiver(dynamic=True) as inward,
        peer.sender(inward.address) as out,
    ):
        receipt = out.send_nowait({"number": "x"})
        delivery = await inward.receive()
        with pytest.raises(DecodeError):
            async with delivery:
                delivery.decode(Order)
        outcome = await receipt.outcome()
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:decode-error"
    assert [path for path, _ in _told(outcome.error)] == ["$.number"]


def test_models_are_in_the_schema() -> None:
    class Mine(msgspec.Struct):
        line: int

    Mine.__name__ = "Line"

    @node("orders")
    async def place(order: Order) -> None: ...

    @node("lines")
    async def line(line: Mine) -> None: ...

    @rpc("several")
    async def several(order: Order, count: int) -> list[Line]:
        return []

    document = Container("shop", nodes=[place, line, several]).asyncapi()
    schemas = document["components"]["schemas"]
    messages = document["components"]["messages"]
    assert messages["node.orders"]["payload"]["properties"]["number"]["type"] == "integer"
    # Two classes of one name, each with its own schema.
    (mine,) = (each for each in schemas.values() if "line" in each["properties"])
    (theirs,) = (each for each in schemas.values() if "sku" in each["properties"])
    assert mine != theirs
    items = messages["node.orders"]["payload"]["properties"]["lines"]["items"]
    assert schemas[items["$ref"].removeprefix("#/components/schemas/")] == theirs
    first, second = messages["rpc.several"]["payload"]["prefixItems"]
    assert first == messages["node.orders"]["payload"]
    assert second == {"type": "integer"}
    assert messages["rpc.several.reply"]["payload"]["type"] == "array"


def test_a_type_that_nobody_claims_is_refused_when_the_container_is_made() -> None:
    class Foreign: ...

    class Holder(BaseModel, arbitrary_types_allowed=False):
        row: int

    @node("a")
    async def strange(body: Foreign) -> None: ...

    @node("b")
    async def mixed(body: dict[str, Holder | Foreign]) -> None: ...

    with pytest.raises(TypeError, match=r"strange: Foreign cannot be decoded .*codecs="):
        Container("c", nodes=[strange])
    with pytest.raises(TypeError, match=r"mixed: dict cannot be decoded: pydantic: Unable to gen"):
        Container("c", nodes=[mixed])


def test_pydantic_is_not_imported_where_no_model_is() -> None:
    code = (
        "import sys; from amqp_rt import Container, node\n"
        "@node('a')\n"
        "async def f(body: dict[str, int]) -> None: ...\n"
        "Container('c', nodes=[f]).asyncapi(); assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message(b"{", content_type=JSON), "Invalid JSON"),
        (Message(b"\xc1", content_type="application/msgpack"), "MessagePack data is malformed"),
        (Message(b"{}", content_type="image/png"), "Order cannot be made of 'image/png'"),
        (Message(Timestamp(5), body_kind="value"), "Input should be"),
        (Message({None: 1}, body_kind="value"), "no form in JSON: "),
        (Message(b"[" * 9999, content_type=JSON), "Invalid JSON: recursion limit exceeded"),
    ],
)
def test_what_is_no_model_is_a_decode_error(message: Message, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        Codecs().decoding(Order)(message, Order)


def test_many_faults_of_a_model_are_bounded() -> None:
    many = Message(b"[%s]" % b",".join([b'"x"'] * 900), content_type=JSON)
    kind = list[Order]
    with pytest.raises(DecodeError, match="and 899 more faults") as caught:
        Codecs().decoding(kind)(many, kind)
    assert 5 < len(caught.value.info["errors"]) <= FAULTS_MAX  # type: ignore[arg-type]
    more = Message(b"[%s]" % b",".join([b"1"] * 1001), content_type=JSON)
    with pytest.raises(DecodeError, match="1001 faults") as caught:
        Codecs().decoding(kind)(more, kind)
    assert not caught.value.info


# --- All faults where msgspec stops at the first ---


@dataclasses.dataclass
class Point:
    x: int
    y: float
    name: str = ""


class Options(TypedDict):
    deep: Annotated[list[Point], msgspec.Meta(max_length=9)]
    flags: dict[str, bool]


class Whole(msgspec.Struct, rename="camel"):
    order_id: Annotated[int, msgspec.Meta(ge=1)]
    options: Options | None
    pair: tuple[int, str]
    parent: Whole | None = None


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (
            {"a": "x", "b": 1},
            Row,
            [("$.a", "Expected `int`, got `str`"), ("$.b", "Expected `str`")],
        ),
        ({"b": 1}, Row, [("$", "Object missing required field `a`"), ("$.b", "Expected `str`")]),
        ([{"a": 1}, {"a": ""}, 5], list[Row], [("$[1].a", "Expected `int`"), ("$[2]", "Expected")]),
        (
            {
                "orderId": 0,
                "options": {"deep": [{"x": ""}], "flags": {"f": 1}},
                "pair": ["", 2],
                "parent": {"orderId": 1, "options": None},
            },
            Whole,
            [
                ("$.orderId", "Expected `int` >= 1"),
                ("$.options.deep[0].x", "Expected `int`, got `str`"),
                ("$.options.deep[0]", "Object missing required field `y`"),
                ("$.options.flags['f']", "Expected `bool`, got `int`"),
                ("$.pair[0]", "Expected `int`, got `str`"),
                ("$.pair[1]", "Expected `str`, got `int`"),
                ("$.parent", "Object missing required field `pair`"),
            ],
        ),
        ({"a": 1}, int | str, [("$", "Expected `int | str`, got `object`")]),
    ],
)
@pytest.mark.parametrize("content_type", [JSON, "application/msgpack", "amqp-value"])
def test_every_fault_is_named(
    value: Any, kind: Any, found: list[tuple[str, str]], content_type: str
) -> None:
    encode: dict[str, Callable[[Any], Any]] = {
        JSON: msgspec.json.encode,
        "application/msgpack": msgspec.msgpack.encode,
    }
    if content_type in encode:
        message = Message(encode[content_type](value), content_type=content_type)
    else:
        message = Message(value, body_kind="value")
    with pytest.raises(DecodeError) as caught:
        decode_payload(Message.decode(message.encode()), kind)
    told = _told(caught.value)
    assert len(told) == len(found)
    for (path, said), (expected_path, expected) in zip(told, found, strict=True):
        assert path == expected_path
        assert said.startswith(expected)


def test_faults_are_bounded_in_number_and_octets() -> None:
    rows = [{"a": "x"}] * 1000
    with pytest.raises(DecodeError) as caught:
        decode_payload(Message(msgspec.json.encode(rows), content_type=JSON), list[Row])
    assert len(caught.value.info["errors"]) == FAULTS_MAX  # type: ignore[arg-type]
    keys = {"k" * 400 + str(at): "x" for at in range(FAULTS_MAX)}
    fields = {f"{'ü' * 180}{at}": (int, ...) for at in range(FAULTS_MAX)}
    wide = msgspec.defstruct("Wide", [(name, int) for name in fields])
    with pytest.raises(DecodeError) as caught:
        decode_payload(
            Message(msgspec.json.encode(dict.fromkeys(fields, "")), content_type=JSON), wide
        )
    errors: Any = caught.value.info["errors"]
    octets = sum(len(each["path"].encode()) + len(each["message"].encode()) for each in errors)
    assert 1 < len(errors) < FAULTS_MAX
    assert octets <= FAULTS_OCTETS_MAX
    with pytest.raises(DecodeError) as caught:
        decode_payload(Message(msgspec.json.encode(keys), content_type=JSON), dict[str, int])
    assert max(len(path) for path, _ in _told(caught.value)) < 220


def test_large_and_deep_payloads_are_not_searched() -> None:
    large = b'{"a":"%s"}' % (b"x" * SEARCHED_MAX)
    with pytest.raises(DecodeError, match="Expected `int`") as caught:
        decode_payload(Message(large, content_type=JSON), Row)
    assert not caught.value.info
    deep: Any = {"a": 1}
    for _ in range(200):
        deep = [deep]
    kind: Any = Row
    for _ in range(199):
        kind = list[kind]
    with pytest.raises(DecodeError) as caught:
        decode_payload(Message(msgspec.json.encode(deep), content_type=JSON), kind)
    ((path, _),) = _told(caught.value)
    assert path.startswith("$[0][0]")


# --- Codecs of applications and of packages ---


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    __hash__ = None  # type: ignore[assignment]


class MoneyCodec:
    """Money as text such as ``12.50``."""

    def claims(self, kind: Any) -> bool:
        return kind is Money

    def decoder(self, kind: Any, media_type: str) -> Callable[[bytes], Any] | None:
        if media_type not in ("application/x-money", ""):
            return None
        return lambda octets: Money(round(100 * float(octets)))

    def encode(self, value: Money, media_type: str | None) -> tuple[str, bytes]:
        if value.cents < 0:
            raise ValueError("debts are not sent")
        return "application/x-money", b"%d.%02d" % divmod(value.cents, 100)

    def schema(self, kind: Any, references: str) -> dict[str, Any] | None:
        return {"type": "string", "format": "money"}


async def test_a_codec_of_the_application_encodes_and_decodes_what_it_claims() -> None:
    taken: list[Money] = []

    @node("payments")
    async def pay(money: Money) -> None:
        taken.append(money)

    @rpc("double")
    async def double(money: Money) -> Money:
        return Money(2 * money.cents)

    with pytest.raises(TypeError, match="Money cannot be decoded from a message"):
        Container("bank", nodes=[pay])
    bank = Container("bank", nodes=[pay, double], codecs=[MoneyCodec()])
    assert (
        bank.asyncapi()["components"]["messages"]["node.payments"]["payload"]["format"] == "money"
    )
    async with bank, bank.local() as peer:
        async with peer.sender("payments") as out:
            await out.send(Money(1250))
            await out.send(b"0.05")
            with pytest.raises(DeliveryRejected, match="could not convert string to float"):
                await out.send(b"much")
            with pytest.raises(DeliveryRejected, match="Money cannot be made of 'text/plain'"):
                await out.send("5", content_type="text/plain")
            with pytest.raises(EncodeError, match="debts are not sent"):
                await out.send(Money(-1))
        assert taken == [Money(1250), Money(5)]
        assert await peer.call("double", Money(20), reply=Money) == Money(40)
        with pytest.raises(TypeError, match="reply=: MoneyCodec cannot be decoded"):
            await peer.call("double", Money(20), reply=MoneyCodec)


async def test_installed_codecs_come_after_those_of_the_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Found:
        name = "money"

        def load(self) -> type[MoneyCodec]:
            return MoneyCodec

    class Rows(MoneyCodec):
        def claims(self, kind: Any) -> bool:
            return kind in (Money, Row)

    groups: list[str] = []

    def installed(*, group: str) -> list[Found]:
        groups.append(group)
        return [Found()]

    monkeypatch.setattr(codecs_module, "entry_points", installed)
    codecs_module._installed.cache_clear()
    try:
        assert isinstance(Codecs().claiming(Money), MoneyCodec)
        first = Rows()
        codecs = Codecs([first])
        assert codecs.claiming(Money) is codecs.claiming(Row) is first
        assert codecs.claiming(Any) is None
        assert groups == ["amqp_rt.codecs"]
    finally:
        codecs_module._installed.cache_clear()


@pytest.mark.parametrize("given", [MoneyCodec, object(), "json"])
def test_what_is_no_codec_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="codecs= takes objects with claims, decoder, encode"):
        Container("c", codecs=[given])


@pytest.mark.parametrize("given", [(b"a/b", b"x"), ("a/b", "x"), (None, None)])
def test_what_a_codec_returns_is_checked(given: Any) -> None:
    class Wrong(MoneyCodec):
        def encode(self, value: Money, media_type: str | None) -> tuple[str, bytes]:
            found: tuple[str, bytes] = given
            return found

    with pytest.raises(EncodeError, match=r"Wrong\.encode returned .*, and not a content-type"):
        Codecs([Wrong()]).encode(Money(1), None)


def test_media_types_of_peers_take_bounded_memory() -> None:
    class Every(MoneyCodec):
        def decoder(self, kind: Any, media_type: str) -> Callable[[bytes], Any] | None:
            return lambda octets: Money(1)

    decode: Any = Codecs([Every()]).decoding(Money)
    for number in range(100):
        decode(Message(b"1", content_type=f"a/{number}"), Money)
    assert len(decode._decoders) <= 16
