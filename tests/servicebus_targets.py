"""Parsers of the Service Bus plug-in as targets of ``fuzz_targets``: documents, requests, SQL, batches, files.

Each target also checks a rule that holds for all input: what was read is written and read again, an error is a
sentence, memory is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from amqp_rt_servicebus.addresses import address_of, place_of
from amqp_rt_servicebus.admin_http import HttpEngine
from amqp_rt_servicebus.administration import (
    AccessRefused,
    Administration,
    EntityNotFound,
    Response,
)
from amqp_rt_servicebus.atom import (
    Described,
    EntityPath,
    NamespaceFacts,
    RuntimeFacts,
    read_entry,
    write_entry,
)
from amqp_rt_servicebus.configuration import Configuration, parse_toml
from amqp_rt_servicebus.declarations import Queue, Rule, SasKey, Subscription, Topic
from amqp_rt_servicebus.emulators import parse_emulator
from amqp_rt_servicebus.entity import Entity
from amqp_rt_servicebus.messages import application_properties, arrived, encoded, split_batch
from amqp_rt_servicebus.options import Options
from amqp_rt_servicebus.requests import Requests
from amqp_rt_servicebus.rules import InvalidRule, TopicRules
from amqp_rt_servicebus.sql import (
    Evaluation,
    EvaluationError,
    InvalidSql,
    parse_action,
    parse_filter,
)
from amqp_rt_servicebus.steps import at_once
from amqp_rt_servicebus.tokens import TokenAuthorizer, resource_of

from amqp_rt.broker.building import Memory
from amqp_rt.config_files import SettingsError
from amqp_rt.errors import DecodeError
from amqp_rt.message import Message
from amqp_rt.values import Byte, Char, Decimal128, Float32, Int, Symbol, Timestamp, UInt, ULong

HOST: Final = "localhost:5672"
_PATHS: Final[dict[type, EntityPath]] = {
    Queue: ("q",),
    Topic: ("t",),
    Subscription: ("t", "s"),
    Rule: ("t", "s", "r"),
}


# --- the administration ----------------------------------------------------------------------------


def atom(data: bytes) -> None:
    """Read an Atom document as each kind of entity; what is written of it reads as the same."""
    for kind, path in _PATHS.items():
        try:
            declared = read_entry(data, HOST, expected=[kind]).declare(path[-1])
        except ValueError as error:
            assert str(error)  # noqa: PT017
            continue
        document = write_entry(
            path, Described(declared, RuntimeFacts(created_at=0.0, updated_at=0.0)), HOST, "tests"
        )
        again = read_entry(document, HOST, expected=[kind]).declare(path[-1])
        # NaN differs from itself, and has one text.
        assert again == declared or repr(again) == repr(declared)
        if isinstance(declared, Rule):
            _match(declared)


def _match(rule: Rule) -> None:
    topic = TopicRules()
    try:
        topic.add("s", [rule])
    except InvalidRule:
        return
    for _ in topic.examine(topic.evaluation(_Fields())):
        pass


class _Entities:
    """Entities that hold what a request has declared, and nothing else."""

    def __init__(self) -> None:
        self.found: dict[EntityPath, Described] = {}

    def declare(self, path: EntityPath, declared: Any) -> None:
        self.found[path] = Described(declared, RuntimeFacts(created_at=0.0, updated_at=0.0))

    update = declare

    def delete(self, path: EntityPath) -> None:
        self.get(path)
        del self.found[path]

    def get(self, path: EntityPath) -> Described:
        if path not in self.found:
            raise EntityNotFound(f"{'/'.join(path)!r:.100} does not exist")
        return self.found[path]

    def queues(self, skip: int, top: int) -> list[Described]:
        return list(self.found.values())[skip : skip + top]

    topics = queues

    def subscriptions(self, topic: str, skip: int, top: int) -> list[Described]:
        return []

    def rules(self, topic: str, subscription: str, skip: int, top: int) -> list[Described]:
        return []

    def namespace(self) -> NamespaceFacts:
        return NamespaceFacts(name="tests", created_at=0.0, modified_at=0.0)


class _Trusting:
    """Judge who finds every token good."""

    def rights(self, token: str, resource: str) -> tuple[str, ...]:
        return ("Manage", "Send", "Listen")


def administration(data: bytes) -> None:
    """Answer the HTTP requests of a connection; each gets an answer that is no failure of ours."""
    administration = Administration(_Entities(), _Trusting())
    failures: list[Exception] = []

    def handle(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        try:
            return administration.handle(method, target, headers, body)
        except Exception as error:
            failures.append(error)
            raise

    engine = HttpEngine(handle, 0.0)
    for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
        if piece:
            engine.receive(piece, 0.0)
    while engine.take():
        pass
    engine.tick(1e9)
    assert engine.closed
    if failures:
        raise failures[0]


# --- SQL -------------------------------------------------------------------------------------------

_APPLICATION: Final[dict[str, object]] = {
    "a": "x" * 200,
    "b": Int(7),
    "c": 2**62,
    "d": ULong(2**64 - 1),
    "e": -1.5,
    "f": Float32(0.5),
    "g": Decimal128(b"\x22" + bytes(14) + b"\x05"),
    "h": True,
    "i": Timestamp(1_700_000_000_000),
    "j": b"octets",
    "k": [1, 2],
    "l": None,
    "m": Symbol("symbol"),
    "n": Byte(-3),
    "o": UInt(9),
    "p": Char("c"),
}


class _Fields:
    """Properties of a message, of every type."""

    def application_properties(self) -> Mapping[str, object]:
        return _APPLICATION

    def system_property(self, name: str) -> object:
        return {
            "Label": "x%_",
            "TimeToLive": timedelta(minutes=1),
            "SequenceNumber": 9,
            "EnqueuedTimeUtc": Timestamp(0),
        }.get(name)


def sql(data: bytes) -> None:
    """Compile a text as a filter and as an action, and evaluate both within their steps."""
    text = data.decode("utf-8", "replace")
    parameters = {"@p": 5, "@q": "x", "@r": None}
    for parse in (parse_filter, parse_action):
        try:
            compiled: Any = parse(text, parameters)
        except InvalidSql as error:
            assert 1 <= error.line <= text.count("\n") + 1  # noqa: PT017
            assert error.column >= 1  # noqa: PT017
            continue
        run = Evaluation(_Fields(), steps_max=20_000)
        try:
            (compiled.evaluate if parse is parse_filter else compiled.apply)(run)
        except EvaluationError as error:
            assert str(error)  # noqa: PT017
        assert run.steps <= 20_000 + len(_APPLICATION)


# --- messages --------------------------------------------------------------------------------------


class _Still:
    """Clock that stands still."""

    def wall(self) -> float:
        return 1_700_000_000.0

    monotonic = wall


def batch(data: bytes) -> None:
    """Take a batch of messages into an entity, change and dead-letter them; all of its memory is given back."""
    try:
        payloads = split_batch(data)
    except DecodeError:
        payloads = [data]
    memory = Memory(1 << 30)
    entity = Entity("q", Options(deliveries_max=1, ttl_s=60), memory, _Still())
    for payload in payloads:
        try:
            stored = arrived(payload)
        except DecodeError:
            continue
        if entity.check(stored) is None:
            entity.put(stored)
    requests = Requests(entity)
    for each in at_once(requests.peek(0, 1_000)):
        Message.decode(each)
    for number in list(entity.shelf.numbers):
        stored_at = entity.shelf.find(number)
        if stored_at is None or stored_at.state != 0:
            continue
        entity.shelf.ready.discard(number)
        entity.lock(stored_at, entity.new_id(), entity.clock.wall())
        assert stored_at.token is not None
        at_once(requests.abandon([stored_at.token], {"change": "x", b"": 1, "a": object()}))
    assert entity.dead_letters is not None
    for number in entity.dead_letters.shelf.numbers:
        dead = entity.dead_letters.shelf.find(number)
        assert dead is not None
        assert application_properties(dead)["DeadLetterReason"] == "MaxDeliveryCountExceeded"
        Message.decode(encoded(dead))
    assert memory.held == sum(len(part.shelf) and part.shelf.bytes for part in entity.parts)
    entity.delete()
    assert memory.held == 0


# --- files -----------------------------------------------------------------------------------------


def configuration(data: bytes) -> None:
    """Read a configuration: our TOML, and the emulators' JSON."""
    text = data.decode("utf-8", "replace")
    for parse in (parse_toml, parse_emulator):
        try:
            found = parse(text, "file")
        except SettingsError as error:
            assert str(error).startswith(("file", "cannot read file"))  # noqa: PT017
            continue
        declarations = found.declarations if isinstance(found, Configuration) else found
        for each in declarations:
            assert each.name


# --- tokens and addresses --------------------------------------------------------------------------


def signature(data: bytes) -> None:
    """Judge a shared access signature, as a token of AMQP and of HTTP, and read its resource as an address."""
    text = data.decode("utf-8", "replace")
    policies = [("", {"k": SasKey("key")}), ("q", {"k": SasKey("other"), "l": SasKey("third")})]
    authorizer = TokenAuthorizer(lambda scope: policies, clock=_Still())
    for token in (text, f"SharedAccessSignature {text}"):
        try:
            assert authorizer.rights(token, text) <= {"Send", "Listen", "Manage"}
        except AccessRefused as error:
            assert str(error)  # noqa: PT017
    place = place_of(address_of(text) or "")
    assert place.path == tuple(each.lower() for each in place.path)
    resource_of(text)


TARGETS: Final[tuple[Callable[[bytes], None], ...]] = (
    atom,
    administration,
    sql,
    batch,
    configuration,
    signature,
)
