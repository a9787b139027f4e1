"""Resources with the lifetime of one message, and resources that need others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import pytest
import trio

from amqp_rt import Container, Depends, Message, Peer, PerMessage, Reject, node, rpc, source
from amqp_rt.outcomes import ACCEPTED, Modified, Rejected


class Engine:
    def __init__(self) -> None:
        self.log: list[str] = []


class Session:
    def __init__(self, engine: Engine) -> None:
        self.log = engine.log


class Orders:
    def __init__(self, session: Session) -> None:
        self.session = session


@asynccontextmanager
async def session(engine: Engine, message: Message) -> AsyncIterator[Session]:
    engine.log.append(f"begin {message.body}")
    try:
        yield Session(engine)
    except Exception as error:
        engine.log.append(f"rollback {type(error).__name__}")
        raise
    if message.body == "conflict":
        raise RuntimeError("the commit fails")
    engine.log.append("commit")


@asynccontextmanager
async def orders(session: Session) -> AsyncIterator[Orders]:
    yield Orders(session)
    session.log.append("orders end")


PROVIDED = [PerMessage(session), PerMessage(orders)]


@pytest.mark.req("A4", "A9")
@pytest.mark.parametrize(
    ("body", "outcome", "log"),
    [
        ("good", ACCEPTED, ["begin good", "handled", "orders end", "commit"]),
        ("bad", Rejected, ["begin bad", "rollback Reject"]),
        ("worse", Modified(delivery_failed=True), ["begin worse", "rollback ValueError"]),
        (
            "conflict",
            Modified(delivery_failed=True),
            ["begin conflict", "handled", "orders end"],
        ),
    ],
)
async def test_a_session_ends_before_the_outcome_and_its_failure_is_the_messages(
    body: str, outcome: Any, log: list[str]
) -> None:
    engine = Engine()

    @node("orders")
    async def place(order: str, orders: Orders, session: Session) -> None:
        assert orders.session is session, "made once for a message"
        if order == "bad":
            raise Reject("no such article")
        if order == "worse":
            raise ValueError
        engine.log.append("handled")

    async with (
        Container("c", nodes=[place], resources=[engine, *PROVIDED]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        found = await out.send_nowait(body).outcome()
        assert found == outcome or type(found) is outcome
    assert engine.log == log


async def test_each_message_has_its_own() -> None:
    seen: set[int] = set()
    kept: list[Session] = []

    @node("orders", slots=3)
    async def place(order: str, session: Session) -> None:
        kept.append(session)
        seen.add(id(session))
        await trio.lowlevel.checkpoint()

    async with (
        Container("c", nodes=[place], resources=[Engine(), PerMessage(session)]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        await out.send_many(["a", "b", "c"])
    assert len(seen) == 3


async def test_a_streamed_reply_and_a_source_have_theirs_until_they_end() -> None:
    engine = Engine()

    @rpc("numbers")
    async def numbers(count: int, session: Session) -> AsyncIterator[int]:
        for number in range(count):
            session.log.append(f"yield {number}")
            yield number

    @asynccontextmanager
    async def opened(engine: Engine) -> AsyncIterator[Session]:
        engine.log.append("open")
        try:
            yield Session(engine)
        finally:
            engine.log.append("close")

    @source("ticks")
    async def ticks(session: Session) -> AsyncIterator[int]:
        yield 1

    async with (
        Container("c", nodes=[numbers, ticks], resources=[engine, PerMessage(opened)]) as container,
        container.local() as peer,
    ):
        assert [each async for each in peer.stream("numbers", 2)] == [0, 1]
        assert engine.log == ["open", "yield 0", "yield 1", "close"]
        engine.log.clear()
        async with peer.receiver("ticks", credit=1) as receiver:
            (await receiver.receive()).accept()
    assert engine.log == ["open", "close"]


class User(str):
    __slots__ = ()


async def token(message: Message) -> str:
    return str((message.application_properties or {}).get("token", ""))


def user(token: Annotated[str, Depends(token)], peer: Peer) -> User:
    if not token:
        raise Reject("log in first")
    return User(token.upper())


async def test_a_parameter_depends_on_a_function() -> None:
    seen: list[str] = []

    @node("orders")
    async def place(order: str, who: Annotated[User, Depends(user)]) -> None:
        seen.append(who)

    container = Container("c", nodes=[place])
    async with container, container.local() as peer, peer.sender("orders") as out:
        await out.send("o", application_properties={"token": "ann"})
        assert type(await out.send_nowait("o").outcome()) is Rejected
        with container.override(user, User("tester")):
            await out.send("o")
            with (
                pytest.raises(ValueError, match="overridden already"),
                container.override(user, User("other")),
            ):
                pass
    assert seen == ["ANN", "tester"]


async def test_tests_replace_resources() -> None:
    seen: list[object] = []

    @node("orders")
    async def place(order: str, engine: Engine, session: Session) -> None:
        seen.append((engine, session))

    engine, other = Engine(), Engine()
    container = Container("c", nodes=[place], resources=[engine, PerMessage(session)])
    async with container, container.local() as peer, peer.sender("orders") as out:
        stand_in = Session(other)
        with container.override(Engine, other), container.override(Session, stand_in):
            await out.send("o")
    assert seen == [(other, stand_in)]
    assert engine.log == [], "nothing was made of it"


@asynccontextmanager
async def engine_of(name: str) -> AsyncIterator[Engine]:
    yield Engine()


@asynccontextmanager
async def session_of(engine: Engine) -> AsyncIterator[Session]:
    yield Session(engine)


@asynccontextmanager
async def engine_in(session: Session) -> AsyncIterator[Engine]:
    yield Engine()


async def test_resources_of_a_container_need_others_in_any_order() -> None:
    @asynccontextmanager
    async def made() -> AsyncIterator[Engine]:
        yield Engine()

    seen: list[Session] = []

    @node("orders")
    async def place(order: str, session: Session) -> None:
        seen.append(session)

    async with (
        Container("c", nodes=[place], resources=[session_of, made]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        await out.send("o")
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ([engine_of], "the resource Engine needs name: str, and no resource"),
        ([session_of, engine_in], "Session needs Engine needs Session"),
        ([PerMessage(engine_in), session_of], "Session needs engine: Engine.* lives as long"),
    ],
)
async def test_resources_of_a_container_that_cannot_be_made_are_refused(
    resources: list[Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        async with Container("c", resources=resources):
            pass


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ([PerMessage(session_of)], r"place: Session needs engine: Engine, and no resource"),
        ([PerMessage(session_of), PerMessage(engine_in)], "Session needs Engine needs Session"),
    ],
)
def test_values_of_a_message_that_cannot_be_made_are_refused(
    resources: list[Any], text: str
) -> None:
    @node("orders")
    async def place(order: str, session: Session) -> None: ...

    with pytest.raises(TypeError, match=text):
        Container("c", nodes=[place], resources=resources)


def test_what_is_made_for_each_message_is_a_block() -> None:
    with pytest.raises(TypeError, match="@asynccontextmanager function"):
        PerMessage(Engine)


def yields() -> Iterator[User]:
    yield User("ann")


async def yields_later() -> AsyncIterator[User]:
    yield User("ann")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (yields, r"Depends\(yields\): a function that yields is an `async def` with @async"),
        (yields_later, r"Depends\(yields_later\): a function that yields is"),
        (contextmanager(yields), r"Depends\(yields\): a function that yields is"),
        (3, "Depends takes a function, not 3"),
    ],
)
def test_a_dependency_that_would_be_passed_unopened_is_refused(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Depends(make)


DEFAULT: Any = Depends(token)


def test_a_dependency_is_declared_in_the_annotation() -> None:
    async def as_default(order: str, who: User = DEFAULT) -> None: ...

    async def without_function(order: str, who: Annotated[User, Depends]) -> None: ...

    def of_user(who: User = DEFAULT) -> User:
        return who

    async def in_turn(order: str, who: Annotated[User, Depends(of_user)]) -> None: ...

    for handler, text in (
        (as_default, r"as_default: .* write who: Annotated\[T, Depends\(token\)\]"),
        (without_function, r"Depends takes a function: Annotated\[User, Depends\(f\)\]"),
        (in_turn, r"of_user: .* write who: Annotated\[T, Depends\(token\)\]"),
    ):
        with pytest.raises(TypeError, match=text):
            Container("c", nodes=[node("orders")(handler)])


def claims(session: Session) -> str:
    session.log.append("claims")
    return "ann"


def verified(claims: Annotated[str, Depends(claims)]) -> User:
    return User(claims)


async def test_what_only_a_replaced_value_needs_is_not_made() -> None:
    seen: list[User] = []

    @node("orders")
    async def place(order: str, who: Annotated[User, Depends(verified)]) -> None:
        seen.append(who)

    @node("both")
    async def both(
        order: str, who: Annotated[User, Depends(verified)], claims: Annotated[str, Depends(claims)]
    ) -> None:
        seen.append(who)

    engine = Engine()
    container = Container("c", nodes=[place, both], resources=[engine, PerMessage(session)])
    async with (
        container,
        container.local() as peer,
        peer.sender("orders") as orders,
        peer.sender("both") as others,
    ):
        with container.override(verified, User("tester")):
            await orders.send("o")
            assert engine.log == []
            await others.send("o")
            assert engine.log.count("claims") == 1, "the handler itself needs it"
        await orders.send("o")
    assert seen == ["tester", "tester", "ann"]
    assert engine.log.count("claims") == 2


async def test_a_replaced_resource_is_named_as_handlers_name_it() -> None:
    class Fast(Engine): ...

    seen: list[Engine] = []

    @node("orders")
    async def place(order: str, engine: Engine) -> None:
        seen.append(engine)

    stand_in = Engine()
    container = Container("c", nodes=[place], resources=[Fast()])
    async with container, container.local() as peer, peer.sender("orders") as out:
        with container.override(Engine, stand_in):
            await out.send("o")
            with pytest.raises(ValueError, match="overridden already"):
                container.override(Fast, stand_in).__enter__()
    assert seen == [stand_in]
