"""Commands of classes exchange and queue: declare, delete, bind, purge, query (0-10 §exchange, §queue)."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Final

from amqp_rt.broker.bindings import LONG_NAME_MAX, is_exchange_name
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Exchange, QueueDeclaration, QueueState, Topology

from .arguments import BindingArguments, QueueArguments, exchange_arguments, shown
from .assembling import Assembly
from .contexts import WAIT, Context
from .faults import CommandFault
from .handlers import Answer, Method
from .layouts import (
    Command,
    ErrorCode,
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

#: Prefix of names that clients must not declare.
_RESERVED: Final = "amq."
#: Argument of an exchange that names its alternate, as the broker keeps it.
_ALTERNATE: Final = "alternate-exchange"
#: Field of the commands that names it.
_ALTERNATE_FIELD: Final = "alternate_exchange"
_RESERVED_NAME: Final = f"names that begin with {_RESERVED!r} are the broker's"
#: What the name of a queue begins with (0-10 §queue, domain ``name``).
_FIRST: Final = re.compile(r"[A-Za-z0-9_]")
#: Work of one step of a purge, in frames.
_PURGE_WORK: Final = 200


class Declarations:
    """Queues, exchanges and bindings that the peer of one session declares, deletes and queries.

    The methods carry out one command each, and raise :class:`~amqp_rt_amqp010.faults.CommandFault` or the
    errors of the topology, which the handler of the session turns into faults.

    Args:
        context: The session.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {
            ExchangeDeclare: self.declare_exchange,
            ExchangeDelete: self.delete_exchange,
            ExchangeQuery: self.query_exchange,
            ExchangeBind: self.bind,
            ExchangeUnbind: self.unbind,
            ExchangeBound: self.query_bindings,
            QueueDeclare: self.declare_queue,
            QueueDelete: self.delete_queue,
            QueuePurge: self.purge_queue,
            QueueQuery: self.query_queue,
        }

    @property
    def _topology(self) -> Topology:
        topology = self._context.topology
        if topology is None:
            raise CommandFault("nothing can be declared here", ErrorCode.NOT_IMPLEMENTED)
        return topology

    # --- exchanges --------------------------------------------------------------------------------

    def declare_exchange(self, number: int, command: ExchangeDeclare, assembly: Assembly) -> Answer:
        """Create an exchange, or check that there is one of that type and alternate exchange.

        ``durable`` and ``auto-delete`` of an existing one are ignored (rules ``sticky``).
        """
        name = _required(command.exchange, "exchange")
        wanted, alternate = command.type or "", command.alternate_exchange or ""
        if not is_exchange_name(name, LONG_NAME_MAX):
            raise CommandFault(
                f"no exchange can be named {name!r:.80}: names have up to {LONG_NAME_MAX} letters, digits,"
                " '-', '_', '.' and ':'",
                ErrorCode.INVALID_ARGUMENT,
                field="exchange",
            )
        if command.passive:
            with _Blaming(not_found="exchange"):
                found = self._topology.exchange(name)
            if wanted not in ("", found.type):
                raise _not_allowed(f"exchange {name!r:.80} has the type {found.type!r}", "type")
            if alternate not in ("", found.alternate):
                raise _not_allowed(
                    f"exchange {name!r:.80} has the alternate {found.alternate!r}", _ALTERNATE_FIELD
                )
            return None
        if name.startswith(_RESERVED) and not self._has_exchange(name):
            raise _not_allowed(_RESERVED_NAME, "exchange")
        arguments = exchange_arguments(command.arguments, wanted)
        if alternate:
            arguments[_ALTERNATE] = alternate
        declared = Exchange(
            name=name,
            type=wanted,
            durable=command.durable,
            auto_delete=command.auto_delete,
            arguments=arguments,
        )
        try:
            with _Blaming(not_found=_ALTERNATE_FIELD):
                self._topology.declare_exchange(declared, sticky=True, name_max=LONG_NAME_MAX)
        except AmqpError as error:
            fault = CommandFault.of(error)
            if error.condition == "amqp:not-implemented":
                fault.code, fault.field = ErrorCode.NOT_FOUND, "type"
            elif error.condition == "amqp:not-allowed":
                found = self._topology.exchange(name)
                fault.field = _ALTERNATE_FIELD if wanted == found.type else "type"
            raise fault from error
        return None

    def _has_exchange(self, name: str) -> bool:
        return self._find_exchange(name) is not None

    def _find_exchange(self, name: str) -> Exchange | None:
        try:
            return self._topology.exchange(name)
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
            return None

    def delete_exchange(self, number: int, command: ExchangeDelete, assembly: Assembly) -> Answer:
        """Delete an exchange with its bindings, unless it is the alternate of a queue or exchange."""
        name = _required(command.exchange, "exchange")
        if name.startswith(_RESERVED):
            raise _not_allowed(f"exchange {name!r:.80} is the broker's", "exchange")
        with _Blaming(
            not_found="exchange", not_allowed="exchange", precondition_failed="if_unused"
        ):
            self._topology.delete_exchange(name, if_unused=command.if_unused, unless_alternate=True)
        return None

    def query_exchange(self, number: int, command: ExchangeQuery, assembly: Assembly) -> Answer:
        """Return type, durability and arguments of an exchange; of none, that it is not found."""
        name = command.name or ""
        # That of the default exchange, which is everybody's, takes no right.
        found = self._find_exchange(name) if name else Exchange(name="", durable=True)
        if found is None:
            return ExchangeQueryResult(not_found=True)
        arguments = {key: shown(value) for key, value in found.arguments.items()}
        return ExchangeQueryResult(
            type=found.type, durable=found.durable, arguments=arguments or None
        )

    # --- bindings ---------------------------------------------------------------------------------

    def bind(self, number: int, command: ExchangeBind, assembly: Assembly) -> Answer:
        """Bind a queue to an exchange; a binding of that queue and key keeps its arguments."""
        queue = _required(command.queue, "queue")
        exchange = _required(command.exchange, "exchange")
        key = command.binding_key or ""
        arguments = BindingArguments(command.arguments)
        with _Blaming(not_found="exchange"):
            arguments.check(self._topology.exchange(exchange).type)
        scoped = arguments.is_scoped
        if arguments.is_alone:
            steps = self._binding_alone(queue, exchange, key, arguments.known, scoped=scoped)
            return self._context.run(number, command, steps)
        with _Blaming(not_found="queue", resource_locked="queue"):
            self._topology.bind_queue(
                queue, exchange, key, arguments.known, once=True, scoped=scoped
            )
        return None

    def _binding_alone(
        self,
        queue: str,
        exchange: str,
        key: str,
        arguments: Mapping[str, object],
        *,
        scoped: bool,
    ) -> Generator[int, None, Answer]:
        with _Blaming(not_found="queue", resource_locked="queue"):
            yield from self._topology.bind_alone(queue, exchange, key, arguments, scoped=scoped)
        return None

    def unbind(self, number: int, command: ExchangeUnbind, assembly: Assembly) -> Answer:
        """Remove the binding of a queue to an exchange by its key."""
        queue = _required(command.queue, "queue")
        exchange = _required(command.exchange, "exchange")
        key = command.binding_key or ""
        return self._context.run(number, command, self._unbinding(queue, exchange, key))

    def _unbinding(self, queue: str, exchange: str, key: str) -> Generator[int, None, Answer]:
        missing = "queue" if self._has_exchange(exchange) else "exchange"
        with _Blaming(not_found=missing, resource_locked="queue"):
            found = yield from self._topology.unbind_key(queue, exchange, key)
        if not found:
            raise CommandFault(
                f"queue {queue!r:.80} is not bound to exchange {exchange!r:.80} with the key {key!r:.80}",
                ErrorCode.NOT_FOUND,
                field="binding_key",
            )
        return None

    def query_bindings(self, number: int, command: ExchangeBound, assembly: Assembly) -> Answer:
        """Return what there is of a binding; a field that is absent or empty matches any.

        What is wrong is told by field. Where a queue is bound, but not so, the key and the arguments
        are compared with its bindings only; where it is not, with those of all queues.
        """
        exchange, queue = command.exchange or "", command.queue or None
        key = command.binding_key or None
        arguments = BindingArguments(command.arguments).known if command.arguments else None
        if not exchange:
            return self._default_bound(queue, key, has_arguments=arguments is not None)
        found = self._topology.bound(exchange, queue, key, arguments)
        if not (found.exchange and found.queue):
            return ExchangeBoundResult(
                exchange_not_found=not found.exchange, queue_not_found=not found.queue
            )
        if found.arguments_matched or (queue is None and key is None and arguments is None):
            return ExchangeBoundResult()
        among = queue if found.queue_matched else None
        key_matched = found.key_matched or (
            among is None and self._topology.bound(exchange, None, key).key_matched
        )
        # Among the bindings of that key if there are any.
        of_key = key if key_matched else None
        return ExchangeBoundResult(
            queue_not_matched=queue is not None and not found.queue_matched,
            key_not_matched=key is not None and not key_matched,
            args_not_matched=arguments is not None
            and not self._topology.bound(exchange, among, of_key, arguments).arguments_matched,
        )

    def _default_bound(
        self, queue: str | None, key: str | None, *, has_arguments: bool
    ) -> ExchangeBoundResult:
        """Answer for the default exchange, to which each queue is bound by its name."""
        if queue is not None and self._find_queue(queue) is None:
            return ExchangeBoundResult(queue_not_found=True)
        if key is None:
            key_matched = True
        elif queue is None:
            key_matched = self._find_queue(key) is not None
        else:
            key_matched = key == queue
        return ExchangeBoundResult(key_not_matched=not key_matched, args_not_matched=has_arguments)

    # --- queues -----------------------------------------------------------------------------------

    def declare_queue(self, number: int, command: QueueDeclare, assembly: Assembly) -> Answer:
        """Create a queue, or check that there is one with that alternate exchange.

        ``durable`` and ``auto-delete`` of an existing one are ignored (rules ``pre-existence``).
        """
        name = _required(command.queue, "queue")
        alternate = command.alternate_exchange or ""
        if command.passive:
            with _Blaming(not_found="queue", resource_locked="queue"):
                declared = self._topology.declaration(name)
            before = "" if declared is None else declared.alternate
            if alternate not in ("", before):
                raise _not_allowed(
                    f"queue {name!r:.80} has the alternate {before!r:.80}", _ALTERNATE_FIELD
                )
            return None
        if name.startswith(_RESERVED):
            raise _not_allowed(_RESERVED_NAME, "queue")
        if not _FIRST.match(name) and self._find_queue(name) is None:
            # Queues of other protocols may have such names, and are found.
            raise CommandFault(
                f"no queue can be named {name!r:.80}: names begin with a letter, a digit or '_'",
                ErrorCode.INVALID_ARGUMENT,
                field="queue",
            )
        arguments = QueueArguments(command.arguments)
        auto_delete = command.auto_delete
        if arguments.auto_delete is not None:
            auto_delete = arguments.auto_delete
        with _Blaming(
            not_found=_ALTERNATE_FIELD, not_allowed=_ALTERNATE_FIELD, resource_locked="queue"
        ):
            self._topology.declare_queue(
                QueueDeclaration(
                    name=name,
                    durable=command.durable,
                    exclusive=command.exclusive,
                    auto_delete=auto_delete,
                    auto_delete_s=arguments.auto_delete_s,
                    keeps_messages=arguments.keeps_messages,
                    arguments=arguments.known,
                    options=arguments.options,
                    alternate=alternate,
                    outlives_owner=True,
                    sticky=True,
                )
            )
        return None

    def delete_queue(self, number: int, command: QueueDelete, assembly: Assembly) -> Answer:
        """Delete a queue; its messages go to its alternate exchange."""
        name = _required(command.queue, "queue")

        def step() -> Answer:
            condition = ""
            if command.if_unused != command.if_empty:
                condition = "if_unused" if command.if_unused else "if_empty"
            with _Blaming(
                not_found="queue", resource_locked="queue", precondition_failed=condition
            ):
                self._topology.delete_queue(
                    name, if_unused=command.if_unused, if_empty=command.if_empty
                )
            return None

        return self._after_stored(number, command, name, step)

    def purge_queue(self, number: int, command: QueuePurge, assembly: Assembly) -> Answer:
        """Remove the messages of a queue that no subscriber has, in steps."""
        name = _required(command.queue, "queue")

        return self._context.run(number, command, self._purging(name))

    def _purging(self, name: str) -> Generator[int, None, Answer]:
        storing = self._storing(name)
        if storing is not None:
            yield from storing
        with _Blaming(not_found="queue", resource_locked="queue"):
            for _ in self._topology.purge_queue(name):
                yield _PURGE_WORK
        return None

    def query_queue(self, number: int, command: QueueQuery, assembly: Assembly) -> Answer:
        """Return the declaration and the counts of a queue; of none, an empty struct."""
        name = command.queue or ""
        if not name:
            return QueueQueryResult()
        return self._after_stored(number, command, name, lambda: self._query(name))

    def _query(self, name: str) -> QueueQueryResult:
        state = self._find_queue(name)
        if state is None:
            return QueueQueryResult()
        declared = state.declared or QueueDeclaration()
        arguments = {key: shown(value) for key, value in declared.arguments.items()}
        return QueueQueryResult(
            queue=name,
            alternate_exchange=declared.alternate or None,
            durable=declared.durable,
            exclusive=declared.exclusive,
            auto_delete=declared.auto_delete,
            arguments=arguments or None,
            message_count=state.messages,
            subscriber_count=state.consumers,
        )

    def _find_queue(self, name: str) -> QueueState | None:
        try:
            return self._topology.queue(name)
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
            return None

    # --- order ----------------------------------------------------------------------------------

    def _after_stored(
        self, number: int, command: Command, queue: str, step: Callable[[], Answer]
    ) -> Answer:
        """Return the answer of *step*, called once the messages published to *queue* before are in it."""
        storing = self._storing(queue)
        if storing is None:
            return step()

        def steps() -> Generator[int, None, Answer]:
            yield from storing
            return step()

        return self._context.run(number, command, steps())

    def _storing(self, queue: str) -> Generator[int, None, None] | None:
        """Return steps that wait for messages that are being stored for *queue*; None if there are none.

        Such a message is in no queue yet, although the peer sent it before the command.
        """
        is_stored = False

        def on_stored() -> None:
            nonlocal is_stored
            is_stored = True
            self._context.wake()

        if not self._topology.wait_stored(queue, on_stored):
            return None

        def steps() -> Generator[int, None, None]:
            while not is_stored:
                yield WAIT

        return steps()


def _required(name: str | None, field: str) -> str:
    """Return *name*, the value of *field*, which must not be absent or empty.

    Raises:
        CommandFault: It is.
    """
    if not name:
        raise CommandFault(f"the {field} has no name", ErrorCode.INVALID_ARGUMENT, field=field)
    return name


class _Blaming:
    """Block in which errors of the topology get the name of the faulty field, by their conditions.

    Not a generator: since Python 3.13 a failed block of ``contextlib`` stays in memory until the collector runs.

    Args:
        fields: Name of a condition, such as ``not_found`` → name of the field.

    Raises:
        CommandFault: The topology has refused something, for one of these conditions.
    """

    def __init__(self, **fields: str) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, AmqpError):
            condition = str(error.condition).removeprefix("amqp:").replace("-", "_")
            if field := self._fields.get(condition):
                raise CommandFault.of(error, field=field) from error


def _not_allowed(why: str, field: str) -> CommandFault:
    return CommandFault(why, ErrorCode.NOT_ALLOWED, field=field)
