"""Declarations and signatures: what a handler may ask for, and what it is told if it may not."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import date
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pytest

from amqp_rt.addresses import AddressError
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import Router, declared, node, rpc, source
from amqp_rt.container.deliveries import Delivery
from amqp_rt.container.raising import Modify, Reject, Release
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.resources import Resources
from amqp_rt.container.routes import CallNext, Context, Deadline, Route
from amqp_rt.events import Peer
from amqp_rt.message import Message
from amqp_rt.outcomes import Error, Modified, Rejected, Released


class Order(msgspec.Struct):
    sku: str


class Database:
    pass


class CachedDatabase(Database):
    pass


def route(function: Any, *resources: Any) -> Route:
    [(found, declaration)] = declared(function)
    return Route(found, declaration, Resources(resources))


@pytest.mark.req("A1")
def test_a_decorator_marks_the_function_and_returns_it_unchanged() -> None:
    async def place(order: Order) -> None: ...

    assert node("orders")(place) is place
    assert [(found, d.kind, d.address) for found, d in declared(place)] == [
        (place, "node", "orders")
    ]


@pytest.mark.req("A1", "A2")
def test_an_object_declares_its_methods_in_their_order() -> None:
    class Orders:
        @rpc("orders/price")
        async def price(self, sku: str) -> Decimal:
            return Decimal(1)

        @node("orders", slots=8)
        async def place(self, order: Order) -> None: ...

        @source("orders/events", mode="copy")
        async def events(self) -> AsyncIterator[int]:
            yield 1

        @node.link("orders/{region}/raw")
        async def raw(self, link: Any, region: str) -> None: ...

        @node("a")
        @node("b")
        async def both(self, order: Order) -> None: ...

    orders = Orders()
    assert [(f.__name__, d.kind, d.address) for f, d in declared(orders)] == [
        ("price", "rpc", "orders/price"),
        ("place", "node", "orders"),
        ("events", "source", "orders/events"),
        ("raw", "link", "orders/{region}/raw"),
        ("both", "node", "b"),
        ("both", "node", "a"),
    ]
    assert declared(orders)[0][0].__self__ is orders  # type: ignore[attr-defined]


@pytest.mark.req("A1")
def test_inherited_methods_are_declared_too() -> None:
    class Base:
        @node("base")
        async def base(self, order: Order) -> None: ...

    class Derived(Base):
        @node("derived")
        async def derived(self, order: Order) -> None: ...

    assert {d.address for _, d in declared(Derived())} == {"base", "derived"}


@pytest.mark.req("A11")
@pytest.mark.parametrize(
    ("decorator", "slots", "prefetch"),
    [
        (node("x"), 1, 500),
        (rpc("x"), 64, 500),
        (node("x", slots=3, prefetch=0), 3, 0),
        (node("x", streaming=True), 1, 0),
    ],
)
def test_slots_and_prefetch_have_defaults(decorator: Any, slots: int, prefetch: int) -> None:
    def function(x: Any) -> None: ...

    decorator(function)
    [(_, declaration)] = declared(function)
    assert (declaration.slots, declaration.prefetch) == (slots, prefetch)


@pytest.mark.parametrize(
    ("declare", "sentence"),
    [
        (lambda: node("x", slots=0), "'x': slots must be at least 1, not 0"),
        (lambda: node("x", prefetch=-1), "'x': prefetch must not be negative, it is -1"),
        (lambda: node("a/{b"), "a/{b"),
        (lambda: node(""), "empty"),
        (lambda: source("x", mode="both"), "'x': mode is 'copy' or 'move', not 'both'"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_declaration_is_refused_where_it_is_written(declare: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        declare()
    assert sentence in str(caught.value)


def test_a_decorator_without_an_address_says_so() -> None:
    with pytest.raises(TypeError, match=r"@node takes an address, for example @node\('orders'\)"):

        @node  # type: ignore[arg-type]
        async def place(order: Order) -> None: ...


@pytest.mark.req("A3")
@pytest.mark.parametrize(
    ("handler", "payload", "reply"),
    [
        (lambda order: None, Any, Any),
        (lambda: None, None, Any),
    ],
)
def test_a_payload_without_a_type_is_anything(handler: Any, payload: Any, reply: Any) -> None:
    node("x")(handler)
    found = route(handler)
    assert (found.payload, found.reply) == (payload, reply)


@pytest.mark.req("A3")
def test_the_first_free_parameter_takes_the_payload() -> None:
    @rpc("orders/{region}/{number}")
    async def handler(
        region: str,
        peer: Peer,
        order: Annotated[Order, "documented"],
        number: UUID,
        message: Message,
        delivery: Delivery | None,
        database: Database,
        *,
        deadline: Deadline,
        context: Context,
        page: int = 1,
    ) -> list[date]:
        return []

    found = route(handler, CachedDatabase())
    assert found.payload == Annotated[Order, "documented"]
    assert found.reply == list[date]


@pytest.mark.req("A3")
def test_a_request_with_several_arguments_comes_as_a_list() -> None:
    @rpc("add")
    async def add(a: int, b: int, digits: int = 2) -> int:
        return a + b

    assert route(add).payload == tuple[int, int]


@pytest.mark.req("A3")
def test_types_of_an_enclosing_function_are_found() -> None:
    class Local(msgspec.Struct):
        x: int

    class Orders:
        class Inner(msgspec.Struct):
            y: int

        @node("a")
        async def a(self, x: Local) -> None: ...

        @node("b")
        async def b(self, x: Inner) -> None: ...

    assert [Route(f, d, Resources()).payload for f, d in declared(Orders())] == [
        Local,
        Orders.Inner,
    ]


async def one(order: Order, other: Order) -> None: ...
async def two(order: Order, database: Database) -> None: ...
async def three(order: Order, *, region: str) -> None: ...
async def four(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def five(body: AsyncIterator[bytes]) -> None: ...
async def six() -> AsyncIterator[int]:
    yield 1


def seven(order: Order, other) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.req("A3", "A4")
@pytest.mark.parametrize(
    ("decorator", "handler", "sentence"),
    [
        (node("x"), one, "one: no value for other: Order: it is no capture of 'x', and no resource of that type is provided"),
        (node("x"), two, "two: no value for database: Database: it is no capture of 'x', and no resource of that type is provided"),
        (node("x/{area}"), three, "three: no value for region: str: it is no capture of 'x/{area}', and no resource of that type is provided"),
        (node("x"), four, "four: an annotation names 'Missing', which is not defined where the handler can see it"),
        (node("x"), five, "five: body reads the body while it arrives: declare the node with streaming=True"),
        (node("x", streaming=True), two, "two: with streaming=True, order is an AsyncIterator[bytes]"),
        (node("x"), six, "six: a node yields nothing: @rpc streams replies"),
        (node("x"), seven, "seven: no value for 'other': it is no capture of 'x', and has no annotation to find it by"),
    ],
)  # fmt: skip
def test_a_wrong_signature_gets_one_sentence(decorator: Any, handler: Any, sentence: str) -> None:
    def marked() -> None: ...

    decorator(marked)
    [(_, declaration)] = declared(marked)
    with pytest.raises(TypeError) as caught:
        Route(handler, declaration, Resources())
    assert str(caught.value) == sentence


def plain(order: Order) -> None: ...
def plain_source(): ...  # type: ignore[no-untyped-def]
async def any_number(*orders: Order) -> None: ...


@pytest.mark.req("A3")
@pytest.mark.parametrize(
    ("decorator", "handler", "sentence"),
    [
        (source("x"), plain_source, "plain_source: a source is an async generator: `async def` with `yield` in it"),
        (node.link("x"), plain, "plain: the handler of a link is an `async def` without `yield`"),
        (node.link("x"), six, "six: the handler of a link is an `async def` without `yield`"),
        (node("x"), any_number, "any_number: nothing is given to *orders: name each parameter"),
        (rpc("x"), any_number, "any_number: nothing is given to *orders: name each parameter"),
    ],
)  # fmt: skip
def test_what_can_be_no_handler_is_refused_where_it_is_decorated(
    decorator: Any, handler: Any, sentence: str
) -> None:
    with pytest.raises(TypeError) as caught:
        decorator(handler)
    assert str(caught.value).startswith(sentence)
    with pytest.raises(TypeError):
        Container("c").node("y")(any_number)


@pytest.mark.req("A1")
@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        (object(), "object declares no node: decorate it, or a method of it, with @node"),
        (one, "one declares no node"),
        (Order, "Order is a class: give an object, Order(…)"),
    ],
)
def test_what_declares_nothing_is_refused(thing: Any, sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        Container("c", nodes=[thing])
    assert sentence in str(caught.value)


def test_an_address_is_taken_once() -> None:
    container = Container("c")

    @container.node("orders")
    async def first(order: Order) -> None: ...

    with pytest.raises(AddressError, match="second: 'orders' is taken already"):

        @container.rpc("orders")
        async def second(order: Order) -> None: ...

    @container.source("orders")  # the other direction
    async def third() -> AsyncIterator[int]:
        yield 1

    assert [each.kind for each in container.routes] == ["node", "source"]
    container.remove("orders")
    assert container.routes == []
    with pytest.raises(ValueError, match="'orders' is no node of 'c'"):
        container.remove("orders")


@pytest.mark.req("A5")
def test_a_router_puts_prefix_and_middleware_before_its_own() -> None:
    async def outer(call_next: CallNext, context: Context) -> Any: ...
    async def inner(call_next: CallNext, context: Context) -> Any: ...
    async def own(call_next: CallNext, context: Context) -> Any: ...

    @node("place", middleware=[own])
    async def place(order: Order) -> None: ...

    orders = Router("orders/", nodes=[place], middleware=[inner])
    shop = Router("shop/", nodes=[orders], middleware=[outer])

    @shop.rpc("ping")
    async def ping() -> str:
        return "pong"

    assert [(d.address, d.middleware) for _, d in declared(shop)] == [
        ("shop/orders/place", (outer, inner, own)),
        ("shop/ping", (outer,)),
    ]


@pytest.mark.req("A4")
def test_a_resource_is_found_by_its_type_or_by_what_it_is() -> None:
    resources = Resources([CachedDatabase()])
    assert resources.find(CachedDatabase) is CachedDatabase
    assert resources.find(Database) is CachedDatabase
    assert resources.find(Order) is None
    assert resources.find(object) is None


@pytest.mark.req("A4")
def test_two_resources_that_fit_are_one_too_many() -> None:
    class Other(Database):
        pass

    resources = Resources([CachedDatabase(), Other()])
    with pytest.raises(TypeError, match="CachedDatabase and Other are both a Database"):
        resources.find(Database)
    with pytest.raises(TypeError, match="there is a resource of type Other already"):
        resources.provide(Other())


@pytest.mark.req("A4")
def test_a_factory_says_what_it_makes() -> None:
    @asynccontextmanager
    async def typed() -> AsyncIterator[Database]:
        yield Database()

    @asynccontextmanager
    async def untyped():  # type: ignore[no-untyped-def]
        yield Database()

    assert Resources([typed]).find(Database) is Database
    resources = Resources()
    with pytest.raises(TypeError, match=r"has no type of its items: annotate it"):
        resources.provide(untyped)
    resources.provide(untyped, as_type=Database)
    assert resources.find(Database) is Database


@pytest.mark.req("A9")
@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (Reject("bad"), Rejected(Error("amqp:precondition-failed", "bad"))),
        (
            Reject("bad", condition="shop:closed", info={"until": 8}),
            Rejected(Error("shop:closed", "bad", {"until": 8})),
        ),
        (Release(), Released()),
        (Modify(), Modified(delivery_failed=True, undeliverable_here=False)),
        (
            Modify(failed=False, undeliverable_here=True, annotations={"x-opt-a": 1}),
            Modified(False, True, {"x-opt-a": 1}),
        ),
    ],
)
def test_raised_outcomes(raised: Any, outcome: Any) -> None:
    assert raised.outcome == outcome


@pytest.mark.req("A1")
def test_wrapped_and_partial_functions_keep_their_signature() -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Awaitable[None]:
            result: Awaitable[None] = function(*args, **kwargs)
            return result

        return wrapper

    @node("a")
    @logged
    async def handler(order: Order) -> None: ...

    assert route(handler).payload is Order

    async def base(prefix: str, order: Order) -> None: ...

    assert route(node("b")(functools.partial(base, "x"))).payload is Order


def test_a_route_says_what_it_is() -> None:
    @node("orders")
    async def place(order: Order) -> None: ...

    place.__qualname__ = "Orders.place"
    assert repr(route(place)) == "<Route node 'orders': Orders.place>"


def test_a_link_handler_that_is_annotated_as_a_generator_is_refused() -> None:
    async def handler(link: Receiver) -> AsyncIterator[int]:
        raise NotImplementedError

    container = Container("c")
    with pytest.raises(TypeError, match="the handler of a link is an `async def` without `yield`"):
        container.node.link("x")(handler)
