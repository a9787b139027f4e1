"""Commands of classes exchange and queue at a real broker, without I/O."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from amqp_rt_amqp010.layouts import (
    Command,
    ExchangeBind,
    ExchangeBound,
    ExchangeBoundResult,
    ExchangeDeclare,
    ExchangeDelete,
    ExchangeQuery,
    ExchangeQueryResult,
    ExchangeUnbind,
    QueueDeclare,
    QueueDelete,
    QueuePurge,
    QueueQuery,
    QueueQueryResult,
)
from declaring010 import DeclaringSession

from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.fronts import AmqpError, Limits, Peer, QueueDeclaration
from amqp_rt.message import Message
from amqp_rt.outcomes import Error
from amqp_rt.security.access import Rights

pytestmark = pytest.mark.req("D2")


@asynccontextmanager
async def session(**options: Any) -> AsyncIterator[DeclaringSession]:
    """A session of a new broker."""
    async with Broker(**options) as broker:
        here = DeclaringSession(broker)
        for each in SETUP:
            here.execute(each)
        yield here


#: What every test finds: a direct and a headers exchange, and a bound queue.
SETUP = [
    ExchangeDeclare(exchange="e", type="direct"),
    ExchangeDeclare(exchange="h", type="headers"),
    ExchangeDeclare(exchange="with", type="fanout", alternate_exchange="e"),
    QueueDeclare(queue="q", alternate_exchange="e", arguments={"qpid.max_count": 5}),
    QueueDeclare(queue="unbound"),
    ExchangeBind(queue="q", exchange="e", binding_key="k"),
    ExchangeBind(queue="q", exchange="h", binding_key="k", arguments={"x-match": "any", "a": 1}),
]


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("", "direct"),
        ("amq.direct", "direct"),
        ("amq.topic", "topic"),
        ("amq.fanout", "fanout"),
        ("amq.headers", "headers"),
        ("amq.match", "headers"),
    ],
)
async def test_the_standard_exchanges_are_there(name: str, type_name: str) -> None:
    async with Broker() as broker:
        here = DeclaringSession(broker)
        assert here.execute(ExchangeQuery(name=name)) == ExchangeQueryResult(
            type=type_name, durable=True
        )
        if name:
            here.execute(ExchangeDeclare(exchange=name, type=type_name, passive=True))
            here.execute(ExchangeDeclare(exchange=name, type=type_name))


REFUSED: list[tuple[str, Command, int]] = [
    ("no exchange name", ExchangeDeclare(type="direct"), 542),
    ("empty exchange name", ExchangeDeclare(exchange="", type="direct"), 542),
    ("wrong exchange name", ExchangeDeclare(exchange="a b", type="direct"), 542),
    ("no type", ExchangeDeclare(exchange="new"), 404),
    ("unknown type", ExchangeDeclare(exchange="new", type="xml"), 404),
    ("reserved exchange", ExchangeDeclare(exchange="amq.new", type="direct"), 530),
    ("other type", ExchangeDeclare(exchange="e", type="fanout"), 530),
    ("other type of a standard one", ExchangeDeclare(exchange="amq.direct", type="topic"), 530),
    (
        "other alternate",
        ExchangeDeclare(exchange="with", type="fanout", alternate_exchange="h"),
        530,
    ),
    ("new alternate", ExchangeDeclare(exchange="e", type="direct", alternate_exchange="h"), 530),
    (
        "unknown alternate",
        ExchangeDeclare(exchange="new", type="direct", alternate_exchange="none"),
        404,
    ),
    ("passive of none", ExchangeDeclare(exchange="none", passive=True), 404),
    ("passive, other type", ExchangeDeclare(exchange="e", type="fanout", passive=True), 530),
    (
        "passive, other alternate",
        ExchangeDeclare(exchange="with", alternate_exchange="h", passive=True),
        530,
    ),
    (
        "argument of an exchange",
        ExchangeDeclare(exchange="new", type="direct", arguments={"qpid.unknown": 1}),
        540,
    ),
    ("delete of no exchange name", ExchangeDelete(), 542),
    ("delete of no exchange", ExchangeDelete(exchange="none"), 404),
    ("delete of a standard exchange", ExchangeDelete(exchange="amq.topic"), 530),
    ("delete of an alternate", ExchangeDelete(exchange="e"), 530),
    ("delete of a bound exchange", ExchangeDelete(exchange="h", if_unused=True), 406),
    ("bind without queue", ExchangeBind(exchange="e", binding_key="k"), 542),
    ("bind of no queue", ExchangeBind(queue="none", exchange="e", binding_key="k"), 404),
    ("bind without exchange", ExchangeBind(queue="q", binding_key="k"), 542),
    ("bind to no exchange", ExchangeBind(queue="q", exchange="none"), 404),
    ("argument of a binding", ExchangeBind(queue="q", exchange="e", arguments={"a": 1}), 540),
    ("x-match", ExchangeBind(queue="q", exchange="h", arguments={"x-match": "some"}), 542),
    ("scope", ExchangeBind(queue="q", exchange="e", arguments={"x-scope": "day"}), 542),
    ("unbind of no key", ExchangeUnbind(queue="q", exchange="e", binding_key="other"), 404),
    ("unbind of no queue", ExchangeUnbind(queue="none", exchange="e", binding_key="k"), 404),
    ("unbind of no exchange", ExchangeUnbind(queue="q", exchange="none", binding_key="k"), 404),
    ("unbind without queue", ExchangeUnbind(exchange="e", binding_key="k"), 542),
    ("unbind without exchange", ExchangeUnbind(queue="q", binding_key="k"), 542),
    ("no queue name", QueueDeclare(), 542),
    ("reserved queue", QueueDeclare(queue="amq.new"), 530),
    ("unknown alternate of a queue", QueueDeclare(queue="new", alternate_exchange="none"), 404),
    ("other alternate of a queue", QueueDeclare(queue="q", alternate_exchange="h"), 530),
    ("new alternate of a queue", QueueDeclare(queue="unbound", alternate_exchange="h"), 530),
    ("passive of no queue", QueueDeclare(queue="none", passive=True), 404),
    (
        "passive, other alternate of a queue",
        QueueDeclare(queue="q", alternate_exchange="h", passive=True),
        530,
    ),
    ("argument of a queue", QueueDeclare(queue="new", arguments={"qpid.unknown": 1}), 540),
    ("argument of an existing queue", QueueDeclare(queue="q", arguments={"unknown": 1}), 540),
    ("durable without store", QueueDeclare(queue="new", durable=True), 406),
    ("delete of no queue name", QueueDelete(), 542),
    ("delete of no queue", QueueDelete(queue="none"), 404),
    ("purge of no queue name", QueuePurge(), 542),
    ("purge of no queue", QueuePurge(queue="none"), 404),
]


@pytest.mark.parametrize(
    ("command", "code"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
async def test_a_wrong_declaration_is_refused_with_its_code(command: Command, code: int) -> None:
    async with session() as here:
        assert here.refusal(command) == code


#: Words in the names of refusals above → the faulty field. The first that fits counts; without one there is no
#: single field.
FAULTY = [
    ("durable without store", None),
    ("alternate of a queue", "alternate_exchange"),
    ("delete of an alternate", "exchange"),
    ("alternate", "alternate_exchange"),
    ("of a bound exchange", "if_unused"),
    ("no key", "binding_key"),
    ("argument", "arguments"),
    ("x-match", "arguments"),
    ("scope", "arguments"),
    ("type of a standard", "type"),
    ("type", "type"),
    ("without exchange", "exchange"),
    ("to no exchange", "exchange"),
    ("unbind of no exchange", "exchange"),
    ("queue", "queue"),
    ("exchange", "exchange"),
    ("passive of none", "exchange"),
]


@pytest.mark.req("D19")
@pytest.mark.parametrize(
    ("name", "command"), [each[:2] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
async def test_a_refusal_names_the_faulty_field(name: str, command: Command) -> None:
    field = next(field for words, field in FAULTY if words in name)
    async with session() as here:
        fault = here.fault(command)
        place = None if field is None else command.__struct_fields__.index(field)
        assert (field, fault.field_index) == (field, place)
        assert (fault.class_code, fault.command_code) == divmod(command.CODE, 256)


async def test_durable_and_auto_delete_of_what_exists_are_ignored() -> None:
    async with session() as here:
        here.execute(ExchangeDeclare(exchange="e", type="direct", durable=True, auto_delete=True))
        here.execute(QueueDeclare(queue="q", durable=True, auto_delete=True))
        assert here.execute(ExchangeQuery(name="e")) == ExchangeQueryResult(type="direct")
        found = here.execute(QueueQuery(queue="q"))
        assert isinstance(found, QueueQueryResult)
        assert (found.durable, found.auto_delete) == (False, False)


async def test_queries_of_nothing() -> None:
    async with session() as here:
        assert here.execute(QueueQuery(queue="none")) == QueueQueryResult()
        assert here.execute(QueueQuery()) == QueueQueryResult()
        assert here.execute(ExchangeQuery(name="none")) == ExchangeQueryResult(not_found=True)


async def test_a_query_returns_the_declaration_and_the_counts() -> None:
    async with session() as here:
        assert here.execute(QueueQuery(queue="q")) == QueueQueryResult(
            queue="q",
            alternate_exchange="e",
            arguments={"qpid.max_count": 5},
            message_count=0,
            subscriber_count=0,
        )
        found = here.execute(ExchangeQuery(name="with"))
        assert found == ExchangeQueryResult(type="fanout", arguments={"alternate-exchange": "e"})


def wrong(*parts: str) -> ExchangeBoundResult:
    return ExchangeBoundResult(**{part.replace("-", "_"): True for part in parts})


BOUND: list[tuple[str, ExchangeBound, ExchangeBoundResult]] = [
    ("all", ExchangeBound(exchange="e", queue="q", binding_key="k"), wrong()),
    ("any queue", ExchangeBound(exchange="e", binding_key="k"), wrong()),
    ("any key", ExchangeBound(exchange="e", queue="q"), wrong()),
    ("an empty key is any", ExchangeBound(exchange="e", queue="q", binding_key=""), wrong()),
    ("anything", ExchangeBound(exchange="e"), wrong()),
    ("anything of no binding", ExchangeBound(exchange="with"), wrong()),
    ("no exchange", ExchangeBound(exchange="none", queue="q"), wrong("exchange-not-found")),
    ("no queue", ExchangeBound(exchange="e", queue="none"), wrong("queue-not-found")),
    (
        "neither",
        ExchangeBound(exchange="none", queue="none"),
        wrong("exchange-not-found", "queue-not-found"),
    ),
    ("other queue", ExchangeBound(exchange="e", queue="unbound"), wrong("queue-not-matched")),
    (
        "other queue with a key of others",
        ExchangeBound(exchange="e", queue="unbound", binding_key="k"),
        wrong("queue-not-matched"),
    ),
    (
        "other queue and key",
        ExchangeBound(exchange="e", queue="unbound", binding_key="x"),
        wrong("queue-not-matched", "key-not-matched"),
    ),
    (
        "other key",
        ExchangeBound(exchange="e", queue="q", binding_key="x"),
        wrong("key-not-matched"),
    ),
    (
        "arguments",
        ExchangeBound(exchange="h", queue="q", arguments={"x-match": b"any", "a": 1}),
        wrong(),
    ),
    (
        "other arguments",
        ExchangeBound(exchange="h", queue="q", binding_key="k", arguments={"a": 2}),
        wrong("args-not-matched"),
    ),
    (
        "key and arguments",
        ExchangeBound(exchange="h", queue="q", binding_key="x", arguments={"a": 2}),
        wrong("key-not-matched", "args-not-matched"),
    ),
    ("default exchange", ExchangeBound(queue="q", binding_key="q"), wrong()),
    ("default exchange, any key", ExchangeBound(exchange="", queue="q"), wrong()),
    ("default exchange, any queue", ExchangeBound(binding_key="q"), wrong()),
    (
        "default exchange, other key",
        ExchangeBound(queue="q", binding_key="k"),
        wrong("key-not-matched"),
    ),
    ("default exchange, no such key", ExchangeBound(binding_key="k"), wrong("key-not-matched")),
    ("default exchange, no queue", ExchangeBound(queue="none"), wrong("queue-not-found")),
]


@pytest.mark.parametrize(
    ("command", "expected"), [each[1:] for each in BOUND], ids=[each[0] for each in BOUND]
)
async def test_what_is_bound(command: ExchangeBound, expected: ExchangeBoundResult) -> None:
    async with session() as here:
        assert here.execute(command) == expected


async def test_a_binding_keeps_its_first_arguments() -> None:
    async with session() as here:
        again = ExchangeBind(queue="q", exchange="h", binding_key="k", arguments={"b": 2})
        here.execute(again)
        other = ExchangeBound(exchange="h", queue="q", binding_key="k", arguments={"b": 2})
        assert here.execute(other) == wrong("args-not-matched")
        here.execute(ExchangeUnbind(queue="q", exchange="h", binding_key="k"))
        here.execute(again)
        assert here.execute(other) == wrong()


async def test_an_exclusive_binding_takes_the_key_from_other_queues() -> None:
    async with session() as here:
        here.execute(ExchangeBind(queue="q", exchange="e", binding_key="kept"))
        here.execute(
            ExchangeBind(
                queue="unbound",
                exchange="e",
                binding_key="k",
                arguments={"qpid.exclusive-binding": 1},
            )
        )
        assert here.topology is not None
        assert here.execute(ExchangeBound(exchange="e", queue="q", binding_key="k")) == wrong(
            "key-not-matched"
        )
        assert here.execute(ExchangeBound(exchange="e", queue="q", binding_key="kept")) == wrong()
        assert here.execute(ExchangeBound(exchange="e", queue="unbound")) == wrong()


async def test_an_exclusive_binding_removes_very_many_others_in_steps() -> None:
    async with session() as here:
        assert here.topology is not None
        here.execute(QueueDeclare(queue="late"))
        for number in range(1_000):
            here.topology.bind_queue("q", "h", "many", {"a": number})
        steps = here.topology.bind_alone("unbound", "h", "many", {})
        sizes = [next(steps) for _ in range(21)]
        # All have been checked, the own binding has been added, and the first others are gone.
        assert here.topology.bound("h", "unbound", "many").key_matched
        assert not here.topology.bound("h", "q", "many", {"a": 49}).arguments_matched
        assert here.topology.bound("h", "q", "many", {"a": 50}).arguments_matched
        # What is bound meanwhile has come later, and what is gone meanwhile is no error.
        here.topology.bind_queue("late", "h", "many", {})
        here.execute(QueueDelete(queue="q"))
        sizes += steps
        assert set(sizes) == {50}
        assert len(sizes) == 40
        assert here.topology.bound("h", "late", "many").key_matched


async def test_very_many_bindings_of_a_key_are_removed_in_steps() -> None:
    async with session() as here:
        assert here.topology is not None
        for exchange in ("h", "e2", "once"):
            if exchange != "h":
                here.execute(
                    ExchangeDeclare(
                        exchange=exchange, type="headers", auto_delete=exchange == "once"
                    )
                )
            for number in range(300):
                here.topology.bind_queue("q", exchange, "many", {"a": number})
        here.topology.bind_queue("q", "h", "kept", {})
        steps = here.topology.unbind_key("q", "h", "many")
        assert next(steps) == 50
        assert not here.topology.bound("h", "q", "many", {"a": 49}).arguments_matched
        assert here.topology.bound("h", "q", "many", {"a": 50}).arguments_matched
        # What is bound meanwhile stays, and what is gone meanwhile is no error.
        here.topology.bind_queue("q", "h", "many", {"a": 300})
        assert here.topology.unbind_queue("q", "h", "many", {"a": 299})
        assert list(steps) == [50] * 5
        assert here.topology.bound("h", "q", "many", {"a": 300}).arguments_matched
        assert here.topology.bound("h", "q", "kept").key_matched
        # The exchange is deleted meanwhile, and with its last binding.
        steps = here.topology.unbind_key("q", "e2", "many")
        next(steps)
        here.execute(ExchangeDelete(exchange="e2"))
        assert list(steps) == []
        assert list(here.topology.unbind_key("q", "once", "many")) == [50] * 5
        assert not here.topology.bound("once").exchange


async def test_an_exclusive_binding_to_an_exchange_deleted_meanwhile_is_refused() -> None:
    async with session() as here:
        assert here.topology is not None
        for number in range(100):
            here.topology.bind_queue("q", "h", "many", {"a": number})
        steps = here.topology.bind_alone("unbound", "h", "many", {})
        next(steps)
        here.execute(ExchangeDelete(exchange="h"))
        with pytest.raises(AmqpError, match="h"):
            list(steps)
        here.execute(ExchangeDeclare(exchange="e2", type="headers"))
        for number in range(100):
            here.topology.bind_queue("q", "e2", "many", {"a": number})
        steps = here.topology.bind_alone("unbound", "e2", "many", {})
        # While the bindings of others are removed there is nothing left to refuse.
        assert [next(steps) for _ in range(3)] == [50] * 3
        here.execute(ExchangeDelete(exchange="e2"))
        assert list(steps) == []


async def test_bindings_of_a_session_end_with_it() -> None:
    async with Broker() as broker:
        one, two = DeclaringSession(broker), DeclaringSession(broker)
        one.execute(QueueDeclare(queue="q"))
        scoped = {"x-scope": b"session"}
        for key, arguments in (("stays", None), ("goes", scoped), ("stays", scoped)):
            one.execute(
                ExchangeBind(queue="q", exchange="amq.topic", binding_key=key, arguments=arguments)
            )
        one.execute(QueueDeclare(queue="gone", exclusive=True, auto_delete=True))
        one.execute(ExchangeBind(queue="gone", exchange="amq.topic", arguments=scoped))
        one.end()
        bound = ExchangeBound(exchange="amq.topic", queue="q", binding_key="stays")
        assert two.execute(bound) == wrong()
        bound = ExchangeBound(exchange="amq.topic", queue="q", binding_key="goes")
        assert two.execute(bound) == wrong("key-not-matched")


async def test_a_session_has_so_many_bindings_that_end_with_it() -> None:
    async with session(limits=Limits(scoped_bindings_max=10)) as here:
        for number in range(11):
            bind = ExchangeBind(
                queue="unbound",
                exchange="e",
                binding_key=str(number),
                arguments={"x-scope": "session"},
            )
            if number < 10:
                here.execute(bind)
        assert here.refusal(bind) == 506
        here.execute(ExchangeUnbind(queue="unbound", exchange="e", binding_key="0"))
        here.execute(bind)


async def test_an_exclusive_queue_is_refused_to_strangers_until_its_session_ends() -> None:
    async with Broker() as broker:
        one, two = DeclaringSession(broker), DeclaringSession(broker)
        one.execute(QueueDeclare(queue="q", exclusive=True))
        one.execute(QueueDeclare(queue="q", exclusive=True))
        strangers: list[Command] = [
            QueueDeclare(queue="q"),
            QueueDeclare(queue="q", passive=True),
            QueueDelete(queue="q"),
            QueuePurge(queue="q"),
            QueueQuery(queue="q"),
            ExchangeBind(queue="q", exchange="amq.fanout"),
            ExchangeUnbind(queue="q", exchange="amq.fanout"),
        ]
        assert {two.refusal(each) for each in strangers} == {405}
        one.end()
        found = two.execute(QueueQuery(queue="q"))
        assert isinstance(found, QueueQueryResult)
        assert not found.exclusive
        two.execute(QueueDelete(queue="q"))


def messages(broker: Broker, queue: str, count: int = 1) -> None:
    for number in range(count):
        broker.host.space().publish(queue, Message(f"m{number}").encode())


async def test_a_queue_with_messages_is_deleted_only_if_asked() -> None:
    async with Broker() as broker:
        here = DeclaringSession(broker)
        here.execute(QueueDeclare(queue="q"))
        messages(broker, "q")
        assert here.refusal(QueueDelete(queue="q", if_empty=True)) == 406
        here.execute(QueueDelete(queue="q", if_unused=True))
        assert here.execute(QueueQuery(queue="q")) == QueueQueryResult()


async def test_a_purge_empties_the_queue_in_steps() -> None:
    async with Broker() as broker:
        here = DeclaringSession(broker)
        here.execute(QueueDeclare(queue="q"))
        messages(broker, "q", 3_000)
        here.execute(QueuePurge(queue="q"))
        assert here.work > 400
        found = here.execute(QueueQuery(queue="q"))
        assert isinstance(found, QueueQueryResult)
        assert found.message_count == 0


async def test_a_declaration_outlives_the_broker(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    arguments = {"qpid.max_count": 7, "qpid.auto_delete_timeout": 9}
    async with Broker(store=store) as broker:
        here = DeclaringSession(broker)
        here.execute(ExchangeDeclare(exchange="e", type="headers", durable=True))
        here.execute(
            QueueDeclare(
                queue="q",
                durable=True,
                auto_delete=True,
                alternate_exchange="e",
                arguments=arguments,
            )
        )
        here.execute(ExchangeBind(queue="q", exchange="e", arguments={"x-match": "any", "a": 1}))
    async with Broker(store=store) as broker:
        here = DeclaringSession(broker)
        found = here.execute(QueueQuery(queue="q"))
        assert isinstance(found, QueueQueryResult)
        assert (found.durable, found.auto_delete, found.alternate_exchange) == (True, True, "e")
        assert found.arguments == arguments
        bound = ExchangeBound(exchange="e", queue="q", arguments={"x-match": "any", "a": 1})
        assert here.execute(bound) == wrong()
        assert here.refusal(ExchangeDelete(exchange="e")) == 530
        here.execute(QueueDelete(queue="q"))
        here.execute(ExchangeDelete(exchange="e"))


async def test_nothing_is_declared_at_an_application_without_queues() -> None:
    async with session() as here:
        here.topology = None
        assert here.refusal(QueueDeclare(queue="q")) == 540


async def test_a_queue_of_other_protocols_is_found() -> None:
    async with Broker() as broker:
        here = DeclaringSession(broker)
        assert here.topology is not None
        here.topology.declare_queue(
            QueueDeclaration(name="q", auto_delete=True, arguments={"x-max-length": 3})
        )
        here.execute(QueueDeclare(queue="q", durable=True))
        assert here.execute(QueueQuery(queue="q")) == QueueQueryResult(
            queue="q",
            auto_delete=True,
            arguments={"x-max-length": 3},
            message_count=0,
            subscriber_count=0,
        )


@pytest.mark.req("D4")
async def test_names_of_exchanges(tmp_path: Path) -> None:
    """Letters, digits and what names such as amq.direct have; as long as a str8, of a stored exchange too."""
    longest = "a_Z.0-9:" + "x" * 247
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with session(store=store) as here:
        for name in ("0", "_", "x" * 128):
            here.execute(ExchangeDeclare(exchange=name, type="direct"))
        here.execute(ExchangeDeclare(exchange=longest, type="topic", durable=True))
        for name in ("x" * 256, "a b", "a/b", "ü", "a\n"):
            refused = here.fault(ExchangeDeclare(exchange=name, type="direct"))
            assert (refused.code, refused.field_index) == (542, 0)
    async with Broker(store=store) as broker:
        found = DeclaringSession(broker).execute(ExchangeQuery(name=longest))
        assert found == ExchangeQueryResult(type="topic", durable=True)


@pytest.mark.req("D5")
async def test_names_of_queues() -> None:
    """Names of queues begin with a letter, a digit or an underscore; any text may follow."""
    async with Broker() as broker:
        await broker.declare(Queue("-old"))
        here = DeclaringSession(broker)
        for name in ("x" * 255, "_ü/ß", "0", "Z", "a b\n"):
            here.execute(QueueDeclare(queue=name))
            found = here.execute(QueueQuery(queue=name))
            assert isinstance(found, QueueQueryResult)
            assert found.queue == name
        for name in ("-x", ".x", " x", "ü", "/exchanges/amq.direct/k", "$management", "#"):
            refused = here.fault(QueueDeclare(queue=name))
            assert (refused.code, refused.field_index) == (542, 0)
            assert here.execute(QueueQuery(queue=name)) == QueueQueryResult()
        # One of another protocol is there for clients of this one, too.
        here.execute(QueueDeclare(queue="-old"))
        here.execute(QueueDeclare(queue="-old", passive=True))
        assert here.refusal(QueueDeclare(queue="-new", passive=True)) == 404


#: Command, and a right without which it is refused.
RIGHTS: list[tuple[Command, Rights, str]] = [
    (ExchangeDeclare(exchange="new", type="direct"), Rights.MANAGE, "/exchanges/new"),
    (ExchangeDeclare(exchange="e", type="direct"), Rights.MANAGE, "/exchanges/e"),
    (
        ExchangeDeclare(exchange="new", type="direct", alternate_exchange="e"),
        Rights.SEND,
        "/exchanges/e",
    ),
    (ExchangeDelete(exchange="h"), Rights.MANAGE, "/exchanges/h"),
    (QueueDeclare(queue="new"), Rights.MANAGE, "new"),
    (QueueDeclare(queue="q"), Rights.MANAGE, "q"),
    (QueueDeclare(queue="new", alternate_exchange="e"), Rights.SEND, "/exchanges/e"),
    (QueueDelete(queue="q"), Rights.MANAGE, "q"),
    (QueuePurge(queue="q"), Rights.MANAGE, "q"),
    (ExchangeBind(queue="unbound", exchange="e"), Rights.MANAGE, "unbound"),
    (ExchangeBind(queue="unbound", exchange="e"), Rights.LISTEN, "/exchanges/e"),
    (ExchangeUnbind(queue="q", exchange="e", binding_key="k"), Rights.MANAGE, "q"),
    (
        ExchangeBind(
            queue="unbound",
            exchange="e",
            binding_key="k",
            arguments={"qpid.exclusive-binding": 1},
        ),
        Rights.MANAGE,
        "q",
    ),
]


@pytest.mark.parametrize(
    ("command", "right", "address"),
    RIGHTS,
    ids=[f"{type(each[0]).__name__} {each[2]}" for each in RIGHTS],
)
async def test_each_declaration_takes_its_rights(
    monkeypatch: pytest.MonkeyPatch, command: Command, right: Rights, address: str
) -> None:
    denied = {(right, address)}

    def decide(peer: Peer, wanted: Rights, where: str) -> Error | None:
        refused = any(each in wanted and where == at for each, at in denied)
        return Error("amqp:unauthorized-access", "no") if refused else None

    async with Broker() as broker:
        here = DeclaringSession(broker)
        for each in SETUP:
            here.execute(each)
        monkeypatch.setattr(broker.topologies, "decide", decide)
        assert here.refusal(command) == 403
        denied.clear()
        here.execute(command)


@pytest.mark.parametrize(
    "command",
    [
        QueueQuery(queue="q"),
        QueueDeclare(queue="q", passive=True),
        ExchangeQuery(name="e"),
        ExchangeDeclare(exchange="e", passive=True),
        ExchangeBound(exchange="e", queue="unbound"),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_a_query_takes_any_right(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    allowed: set[Rights] = set()

    def decide(peer: Peer, wanted: Rights, where: str) -> Error | None:
        return None if wanted in allowed else Error("amqp:unauthorized-access", "no")

    async with Broker() as broker:
        here = DeclaringSession(broker)
        for each in SETUP:
            here.execute(each)
        monkeypatch.setattr(broker.topologies, "decide", decide)
        assert here.refusal(command) == 403
        for right in (Rights.LISTEN, Rights.SEND, Rights.MANAGE):
            allowed.clear()
            allowed.add(right)
            here.execute(command)


def steps_of(function: Callable[[], object]) -> int:
    """Return the number of instructions that Python carries out in *function*, without those of the collector."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # Hypothesis has a function that is called when the collector runs.
    collecting = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return count


@pytest.mark.slow
async def test_the_work_of_a_question_does_not_grow_with_the_bindings() -> None:
    async with session() as here:
        here.execute(QueueDeclare(queue="other"))
        topology = here.topology
        assert topology is not None

        def work() -> list[int]:
            questions: list[Command] = [
                ExchangeBound(exchange="h"),
                ExchangeBound(exchange="h", binding_key="none"),
                ExchangeBound(exchange="h", binding_key="7"),
                ExchangeBound(exchange="h", arguments={"a": -1}),
                ExchangeBound(exchange="h", binding_key="7", arguments={"a": -1}),
                ExchangeBound(exchange="h", queue="q", arguments={"a": -1}),
                ExchangeBound(exchange="h", queue="other", binding_key="none"),
                ExchangeBind(
                    exchange="h",
                    queue="other",
                    binding_key="alone",
                    arguments={"qpid.exclusive-binding": 1},
                ),
            ]
            return [steps_of(lambda each=each: here.execute(each)) for each in questions]

        for number in range(100):
            topology.bind_queue("q", "h", str(number), {"a": number})
        work()
        few = work()
        for number in range(100, 100_000):
            topology.bind_queue("q", "h", str(number), {"a": number})
        assert work() == few
