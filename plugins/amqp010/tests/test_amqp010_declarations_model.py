"""Declarations of two sessions against a small model: both agree on what exists and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_amqp010.faults import CommandFault
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
    QueueQuery,
    QueueQueryResult,
)
from amqp_rt_amqp010.order import fault_of
from declaring010 import DeclaringSession
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from amqp_rt import Broker
from amqp_rt.errors import AmqpError

QUEUES, EXCHANGES, KEYS = ("p", "q"), ("d", "e", "f"), ("", "k")
queues, exchanges, keys = map(st.sampled_from, (QUEUES, EXCHANGES, KEYS))
alternates = st.sampled_from(("", *EXCHANGES))
types = st.sampled_from(("direct", "fanout"))
sessions = st.integers(0, 1)


class Declaring(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker()
        self.sessions = [DeclaringSession(self.broker) for _ in range(2)]
        #: Exchange → type and alternate.
        self.exchanges: dict[str, tuple[str, str]] = {}
        #: Queue → alternate.
        self.queues: dict[str, str] = {}
        #: Exclusive queue → its session, and whether it goes with that.
        self.owners: dict[str, int] = {}
        self.auto_delete: set[str] = set()
        self.bindings: set[tuple[str, str, str]] = set()
        #: Bindings that end with a session.
        self.scoped: dict[tuple[str, str, str], int] = {}

    def do(self, session: int, command: Command) -> int:
        """Carry out *command*; return its error code, 0 if it succeeded."""
        try:
            self.sessions[session].execute(command)
        except (CommandFault, AmqpError) as error:
            return int(fault_of(error, command).code)
        return 0

    def is_strange(self, session: int, queue: str) -> bool:
        return self.owners.get(queue, session) != session

    @rule(session=sessions, name=exchanges, kind=types, alternate=alternates)
    def declare_exchange(self, session: int, name: str, kind: str, alternate: str) -> None:
        code = self.do(
            session, ExchangeDeclare(exchange=name, type=kind, alternate_exchange=alternate)
        )
        known = self.exchanges.get(name)
        if known is not None:
            assert code == (0 if kind == known[0] and alternate in ("", known[1]) else 530)
        elif alternate and alternate not in self.exchanges:
            assert code == 404
        else:
            assert code == 0
            self.exchanges[name] = (kind, alternate)

    @rule(session=sessions, name=exchanges, if_unused=st.booleans())
    def delete_exchange(self, session: int, name: str, if_unused: bool) -> None:
        code = self.do(session, ExchangeDelete(exchange=name, if_unused=if_unused))
        others = [each[1] for other, each in self.exchanges.items() if other != name]
        if name in (*others, *self.queues.values()):
            assert code == 530
        elif name not in self.exchanges:
            assert code == 404
        elif if_unused and any(each[1] == name for each in self.bindings):
            assert code == 406
        else:
            assert code == 0
            del self.exchanges[name]
            self.forget(lambda each: each[1] == name)

    def forget(self, is_gone: Any) -> None:
        self.bindings = {each for each in self.bindings if not is_gone(each)}
        self.scoped = {each: owner for each, owner in self.scoped.items() if each in self.bindings}

    @rule(
        session=sessions,
        name=queues,
        alternate=alternates,
        exclusive=st.booleans(),
        auto_delete=st.booleans(),
    )
    def declare_queue(
        self, session: int, name: str, alternate: str, exclusive: bool, auto_delete: bool
    ) -> None:
        code = self.do(
            session,
            QueueDeclare(
                queue=name,
                alternate_exchange=alternate,
                exclusive=exclusive,
                auto_delete=auto_delete,
            ),
        )
        if name in self.queues:
            if self.is_strange(session, name):
                assert code == 405
                return
            if alternate not in ("", self.queues[name]):
                assert code == 530
                return
            assert code == 0
        elif alternate and alternate not in self.exchanges:
            assert code == 404
            return
        else:
            assert code == 0
            self.queues[name] = alternate
            if auto_delete:
                self.auto_delete.add(name)
        if exclusive:
            self.owners[name] = session

    @rule(session=sessions, name=queues)
    def delete_queue(self, session: int, name: str) -> None:
        code = self.do(session, QueueDelete(queue=name))
        if name not in self.queues:
            assert code == 404
        elif self.is_strange(session, name):
            assert code == 405
        else:
            assert code == 0
            self.drop(name)

    def drop(self, name: str) -> None:
        del self.queues[name]
        self.owners.pop(name, None)
        self.auto_delete.discard(name)
        self.forget(lambda each: each[0] == name)

    @rule(
        session=sessions,
        queue=queues,
        exchange=exchanges,
        key=keys,
        scoped=st.booleans(),
        alone=st.booleans(),
    )
    def bind(
        self, session: int, queue: str, exchange: str, key: str, scoped: bool, alone: bool
    ) -> None:
        arguments: dict[str, object] = {"x-scope": "session"} if scoped else {}
        if alone:
            arguments["qpid.exclusive-binding"] = True
        code = self.do(
            session,
            ExchangeBind(queue=queue, exchange=exchange, binding_key=key, arguments=arguments),
        )
        if exchange not in self.exchanges or queue not in self.queues:
            assert code == 404
            return
        if self.is_strange(session, queue):
            assert code == 405
            return
        others = {each for each in self.bindings if each[1:] == (exchange, key)} - {
            (queue, exchange, key)
        }
        if alone and any(self.is_strange(session, each[0]) for each in others):
            assert code == 405
            return
        assert code == 0
        if (queue, exchange, key) not in self.bindings:
            self.bindings.add((queue, exchange, key))
            if scoped:
                self.scoped[queue, exchange, key] = session
        if alone:
            self.forget(others.__contains__)

    @rule(session=sessions, queue=queues, exchange=exchanges, key=keys)
    def unbind(self, session: int, queue: str, exchange: str, key: str) -> None:
        code = self.do(session, ExchangeUnbind(queue=queue, exchange=exchange, binding_key=key))
        if queue in self.queues and self.is_strange(session, queue):
            assert code == 405
        elif (queue, exchange, key) not in self.bindings:
            assert code == 404
        else:
            assert code == 0
            self.forget((queue, exchange, key).__eq__)

    @rule(session=sessions)
    def end(self, session: int) -> None:
        self.sessions[session].end()
        self.sessions[session] = DeclaringSession(self.broker)
        for name, owner in list(self.owners.items()):
            if owner == session:
                del self.owners[name]
                if name in self.auto_delete:
                    self.drop(name)
        ended = {each for each, owner in self.scoped.items() if owner == session}
        self.forget(ended.__contains__)

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        here = self.sessions[0]
        for name in EXCHANGES:
            known = self.exchanges.get(name)
            found = here.execute(ExchangeQuery(name=name))
            assert isinstance(found, ExchangeQueryResult)
            assert (found.type if known is None else (found.type,)) == (known and known[:1])
        for queue in QUEUES:
            here = self.sessions[self.owners.get(queue, 0)]
            state = here.execute(QueueQuery(queue=queue))
            assert isinstance(state, QueueQueryResult)
            assert (state.queue is not None) == (queue in self.queues)
            assert (state.alternate_exchange or "") == self.queues.get(queue, "")
            assert state.exclusive == (queue in self.owners)
            if state.queue is not None:
                self.are_bound(here, queue)

    def are_bound(self, here: DeclaringSession, queue: str) -> None:
        for exchange in self.exchanges:
            found = here.execute(ExchangeBound(exchange=exchange, queue=queue, binding_key="k"))
            assert isinstance(found, ExchangeBoundResult)
            matched = not (found.queue_not_matched or found.key_not_matched)
            assert matched == ((queue, exchange, "k") in self.bindings)
            assert found.queue_not_matched == (
                not any(each[:2] == (queue, exchange) for each in self.bindings)
            )


TestDeclaring = pytest.mark.req("D2")(Declaring.TestCase)
