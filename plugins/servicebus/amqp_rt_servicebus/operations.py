"""Operations at ``<entity>/$management``: requests decoded, made, and answered in the types of the service.

Each operation has a method of :class:`Operations`; the table :data:`OPERATIONS` has their names and the rights
that they need. Those about many messages are generators, which are done in steps (:mod:`.in_turns`). A request that fails is answered with the status that belongs to its condition (Service Bus
facts), since the SDKs read both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

import trio
from msgspec import Struct

from amqp_rt import Rights
from amqp_rt.broker.building import Subscription
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Peer
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.management.answering import reply_of
from amqp_rt.message import Message
from amqp_rt.values import Array, Int, Map, Timestamp

from .addresses import place_of
from .conditions import ARGUMENT_ERROR, NOT_ALLOWED, out_of_range, session_lock_lost
from .entity import Entity
from .host import Names, not_found, part_of
from .in_turns import InTurns
from .messages import arrived, milliseconds
from .nodes import AnyNode, SubscriptionNode
from .requests import Requests
from .rule_values import read_rule, write_rule
from .rules import InvalidRule, RuleExists, RuleNotFound, TooManyRules
from .steps import Steps
from .stored import Stored

#: Status of an answer by its error condition; 400 for others.
STATUS: Final[Mapping[str, int]] = {
    "amqp:not-found": 404,
    "amqp:unauthorized-access": 401,
    "amqp:resource-limit-exceeded": 403,
    "amqp:internal-error": 500,
    "amqp:not-implemented": 501,
    "com.microsoft:auth-failed": 401,
    "com.microsoft:message-not-found": 404,
    "com.microsoft:message-lock-lost": 410,
    "com.microsoft:session-lock-lost": 410,
    "com.microsoft:session-cannot-be-locked": 410,
    "com.microsoft:timeout": 408,
    "com.microsoft:server-busy": 503,
    "com.microsoft:entity-already-exists": 409,
    "com.microsoft:precondition-failed": 412,
}
UPDATE_DISPOSITION: Final = "com.microsoft:update-disposition"
ALREADY_EXISTS: Final = "com.microsoft:entity-already-exists"

#: ``last-updated-time`` of a request for the sessions that have a message or a state: the end of .NET's time.
_ALL_SESSIONS_MS: Final = 253_402_300_800_000
#: Rules in one answer.
RULES_MAX: Final = 1_000
_INT_MAX: Final = (1 << 31) - 1
_LONG_MAX: Final = (1 << 63) - 1

#: Status and body of an answer.
Answer: TypeAlias = tuple[int, dict[str, Any]]
#: The answer, or the steps of a request that may take long.
AnswerInSteps: TypeAlias = Answer | Steps[Answer]
_DONE: Final[Answer] = (200, {})


class Asked(Struct, frozen=True):
    """Request, with the entity that it is about."""

    node: AnyNode
    part: Entity
    body: Mapping[Any, Any]
    peer: Peer
    #: Name of the link for which the client asks, None if it names none.
    link_name: str | None

    @property
    def requests(self) -> Requests:
        """Requests to the entity."""
        return Requests(self.part)

    def holder(self, session_id: str) -> Subscription | None:
        """Return the receiver for which the client asks, None if it names none.

        Raises:
            AmqpError: It has ended, and its session is free.
        """
        if self.link_name is None:
            return None
        for subscription in self.part.consumers.values():
            link = subscription.link
            if link.name == self.link_name and link.peer is self.peer:
                return subscription
        raise session_lock_lost(session_id)

    # --- Arguments ---

    def take(self, name: str) -> Any:
        """Return the argument *name*, None if it is null or missing."""
        return self.body.get(name)

    def text(self, name: str) -> str:
        """Return an argument that is a text.

        Raises:
            AmqpError: It is missing or something else.
        """
        value = self.take(name)
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        return str(value)

    def optional_text(self, name: str) -> str | None:
        """Return an argument that is a text or null."""
        return None if self.take(name) is None else self.text(name)

    def integer(self, name: str, default: int | None = None, most: int = _LONG_MAX) -> int:
        """Return an argument that is an integer from 0 to *most*, of any width.

        Raises:
            AmqpError: It is missing and has no *default*, something else, or out of this range.
        """
        value = self.take(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(name, value, "an integer")
        if not 0 <= value <= most:
            raise out_of_range(f"{name} is {int(value)}, not 0 to {most}")
        return int(value)

    def items(self, name: str, kind: type, what: str) -> Iterator[Any]:
        """Return an argument that is a list or an array of *kind*, whose items are examined as they are taken.

        Raises:
            AmqpError: It is something else, or has too many items; while they are taken: an item is something else.
        """
        value = self.take(name)
        if not isinstance(value, Sequence | Array) or isinstance(value, str | bytes):
            raise _wrong(name, value, f"a list of {what}")
        most = self.part.bounds.named_max
        if len(value) > most:
            raise out_of_range(
                f"{name} has {len(value)} items, at most {most}: send several requests"
            )
        return self._examined(name, value, kind, what)

    def _examined(
        self, name: str, items: Sequence[Any] | Array, kind: type, what: str
    ) -> Iterator[Any]:
        for each in items:
            if not isinstance(each, kind) or isinstance(each, bool):
                raise _wrong(f"an item of {name}", each, what)
            yield each

    def tokens(self) -> Iterator[UUID]:
        """Return the lock tokens."""
        return self.items("lock-tokens", UUID, "lock tokens (uuid)")

    def numbers(self) -> Iterator[int]:
        """Return the sequence numbers."""
        return map(int, self.items("sequence-numbers", int, "sequence numbers (long)"))

    def subscription(self) -> SubscriptionNode:
        """Return the subscription that the request is about.

        Raises:
            AmqpError: It is about another kind of entity.
        """
        if not isinstance(self.node, SubscriptionNode) or self.part is not self.node.entity:
            raise AmqpError(
                f"{self.part.path!r} is no subscription, and has no rules", condition=NOT_ALLOWED
            )
        return self.node


def _wrong(name: str, value: object, wanted: str) -> AmqpError:
    return AmqpError(f"{name} is {value!r:.80}, not {wanted}", condition=ARGUMENT_ERROR)


class Operations:
    """Operations on the entities of the namespaces of a broker.

    Args:
        names_for: Returns the entities that a peer reaches, None if there are none for it.
        limits: Bounds of the codec.
    """

    def __init__(
        self, names_for: Callable[[Peer], Names | None], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._names_for = names_for
        self._limits = limits

    def install(self, registry: HookRegistry) -> None:
        """Add the operations to the management nodes."""
        for name, (operation, rights) in OPERATIONS.items():
            registry.add_hook(name, self._hook(name, operation), rights=rights)

    def _hook(
        self, name: str, operation: Callable[[Operations, Asked], AnswerInSteps]
    ) -> Callable[[str, Message, Peer], Awaitable[Message]]:
        async def hook(entity: str, message: Message, peer: Peer) -> Message:
            answer = await self.answer(name, operation, entity, message, peer)
            # Requests of one connection are handled one by one, and others may have their turn in between.
            await trio.lowlevel.checkpoint()
            return answer

        return hook

    async def answer(
        self,
        name: str,
        operation: Callable[[Operations, Asked], AnswerInSteps],
        entity: str,
        message: Message,
        peer: Peer,
    ) -> Message:
        """Return the answer to *message*, which asks for the *operation* *name* on *entity*.

        If that is cancelled, the request is done all the same.
        """
        try:
            asked = self._asked(entity, message, peer)
            fault = asked.part.fault(name)
            if fault is None and name == UPDATE_DISPOSITION:
                fault = asked.part.fault("settle")
            if fault is not None:
                raise fault.raised_as(AmqpError)
            answer = operation(self, asked)
            if isinstance(answer, Generator):
                answer = await InTurns(asked.part, answer).wait()
            status, body = answer
        except AmqpError as error:
            status = STATUS.get(error.condition, 400)
            return reply_of(status, {}, error.description, error.condition)
        return reply_of(status, body, "OK" if status == 200 else "No content")

    def _asked(self, entity: str, message: Message, peer: Peer) -> Asked:
        place = place_of(entity)
        names = self._names_for(peer)
        node = None if names is None else names.node(place.path)
        part = None if node is None else part_of(node, place)
        if node is None or part is None:
            raise not_found(entity).raised_as(AmqpError)
        body = message.body
        if isinstance(body, Map):
            body = dict(body.pairs)
        if not isinstance(body, Mapping):
            raise AmqpError("the body of a request is a map", condition=ARGUMENT_ERROR)
        name = message.application_properties.get("associated-link-name")
        return Asked(node, part, body, peer, str(name) if isinstance(name, str) else None)

    # --- Locks and outcomes ---

    def renew_lock(self, asked: Asked) -> Steps[Answer]:
        """Let the locks of messages begin anew."""
        until, count = yield from asked.requests.renew(asked.tokens())
        return 200, {"expirations": Array([_timestamp(until)] * count, of=Timestamp)}

    def update_disposition(self, asked: Asked) -> Steps[Answer]:
        """Settle locked messages."""
        status = asked.text("disposition-status")
        tokens = asked.tokens()
        session_id = asked.optional_text("session-id")
        changes = asked.take("properties-to-modify")
        changes = dict(changes.pairs) if isinstance(changes, Map) else changes
        if changes is not None and not isinstance(changes, Mapping):
            raise _wrong("properties-to-modify", changes, "a map")
        requests = asked.requests
        match status.lower():
            case "completed":
                yield from requests.complete(tokens, session_id=session_id)
            case "abandoned":
                yield from requests.abandon(tokens, changes, session_id=session_id)
            case "defered" | "deferred":
                yield from requests.defer(tokens, changes, session_id=session_id)
            case "suspended":
                yield from requests.dead_letter(
                    tokens,
                    asked.optional_text("deadletter-reason"),
                    asked.optional_text("deadletter-description"),
                    changes,
                    session_id=session_id,
                )
            case _:
                raise _wrong(
                    "disposition-status", status, "completed, abandoned, suspended or defered"
                )
        return _DONE

    # --- Messages ---

    def receive_by_sequence_number(self, asked: Asked) -> Steps[Answer]:
        """Take deferred messages by their numbers."""
        if (disabled := asked.part.refuse_consumer()) is not None:
            raise disabled.raised_as(AmqpError)
        session_id = asked.optional_text("session-id")
        settled = asked.integer("receiver-settle-mode", 1, 1) == 0
        found = yield from asked.requests.receive_deferred(
            asked.numbers(),
            settled=settled,
            session_id=session_id,
            holder=None if session_id is None else asked.holder(session_id),
        )
        messages: list[dict[str, Any]] = []
        for payload, token in found:
            each: dict[str, Any] = {"message": payload}
            if token is not None:
                each["lock-token"] = token
            messages.append(each)
        return 200, {"messages": messages}

    def peek_message(self, asked: Asked) -> Steps[Answer]:
        """Return copies of messages in any state."""
        found = yield from asked.requests.peek(
            asked.integer("from-sequence-number", 0),
            asked.integer("message-count", 1, _INT_MAX),
            session_id=asked.optional_text("session-id"),
            bodies=asked.take("omit-message-body") is not True,
        )
        return (200, {"messages": [{"message": each} for each in found]}) if found else (204, {})

    def batch_delete_messages(self, asked: Asked) -> Steps[Answer]:
        """Delete active messages."""
        deleted = yield from asked.requests.delete_batch(
            asked.integer("message-count", most=_INT_MAX),
            asked.integer("enqueued-time-utc") / 1000,
            session_id=asked.optional_text("session-id"),
        )
        return (200 if deleted else 204), {"message-count": Int(deleted)}

    def schedule_message(self, asked: Asked) -> Steps[Answer]:
        """Take messages for a later time."""
        if isinstance(asked.node, SubscriptionNode):
            raise AmqpError(
                f"{asked.part.path!r} takes no messages of clients", condition=NOT_ALLOWED
            )
        numbers = yield from asked.requests.schedule(self._scheduled(asked))
        return 200, {"sequence-numbers": Array(numbers, of=int)}

    def _scheduled(self, asked: Asked) -> Iterator[Stored]:
        for each in asked.items("messages", Mapping | Map, "maps with message"):  # type: ignore[arg-type]
            entry = dict(each.pairs) if isinstance(each, Map) else each
            payload = entry.get("message")
            if not isinstance(payload, bytes):
                raise _wrong("message", payload, "binary")
            message = arrived(payload, limits=self._limits)
            message.publisher = asked.peer.container_id
            yield message

    def cancel_scheduled_message(self, asked: Asked) -> Steps[Answer]:
        """Remove messages that are not due yet."""
        yield from asked.requests.cancel_scheduled(asked.numbers())
        return _DONE

    # --- Sessions ---

    def renew_session_lock(self, asked: Asked) -> Answer:
        """Let the lock of a session begin anew."""
        session_id = asked.text("session-id")
        until = asked.requests.renew_session(session_id, asked.holder(session_id))
        return 200, {"expiration": _timestamp(until)}

    def get_session_state(self, asked: Asked) -> Answer:
        """Return the state of a session."""
        session_id = asked.text("session-id")
        state = asked.requests.session_state(session_id, asked.holder(session_id))
        return 200, {"session-state": state}

    def set_session_state(self, asked: Asked) -> Answer:
        """Set or remove the state of a session."""
        session_id = asked.text("session-id")
        state = asked.take("session-state")
        if state is not None and not isinstance(state, bytes):
            raise _wrong("session-state", state, "binary or null")
        asked.requests.set_session_state(session_id, state, asked.holder(session_id))
        return _DONE

    def get_message_sessions(self, asked: Asked) -> Answer:
        """Return ids of sessions."""
        since = asked.take("last-updated-time")
        if since is not None and (isinstance(since, bool) or not isinstance(since, int)):
            raise _wrong("last-updated-time", since, "a timestamp")
        skip = asked.integer("skip", 0, _INT_MAX)
        top = asked.integer("top", 100, _INT_MAX)
        recent = None if since is None or since >= _ALL_SESSIONS_MS else since / 1000
        found = asked.requests.sessions(recent, skip, top)
        if not found:
            return 204, {}
        return 200, {
            "skip": Int(min(skip + len(found), _INT_MAX)),
            "sessions-ids": Array(found, of=str),
        }

    # --- Rules ---

    def add_rule(self, asked: Asked) -> Answer:
        """Add a rule to a subscription."""
        node = asked.subscription()
        try:
            node.add_rule(read_rule(asked.text("rule-name"), asked.take("rule-description")))
        except RuleExists as error:
            raise AmqpError(str(error), condition=ALREADY_EXISTS) from None
        except TooManyRules as error:
            raise AmqpError(str(error), condition="amqp:resource-limit-exceeded") from None
        except (InvalidRule, ValueError) as error:
            raise AmqpError(str(error), condition=ARGUMENT_ERROR) from None
        return _DONE

    def remove_rule(self, asked: Asked) -> Answer:
        """Remove a rule of a subscription."""
        try:
            asked.subscription().rules.remove(asked.text("rule-name"))
        except RuleNotFound as error:
            raise AmqpError(str(error), condition="amqp:not-found") from None
        return _DONE

    def enumerate_rules(self, asked: Asked) -> Answer:
        """Return rules of a subscription."""
        found = asked.subscription().rules.page(
            asked.integer("skip", 0, _INT_MAX), asked.integer("top", 100, _INT_MAX)
        )[:RULES_MAX]
        if not found:
            return 204, {}
        return 200, {"rules": [{"rule-description": write_rule(each)} for each in found]}


class HookRegistry(Protocol):
    """Management nodes of a broker, as far as operations are added to them."""

    def add_hook(
        self,
        operation: str,
        hook: Callable[[str, Message, Peer], Awaitable[Message]],
        *,
        rights: Rights,
    ) -> None:
        """Answer *operation* for peers with *rights* at the entity."""


Operation: TypeAlias = Callable[[Operations, Asked], AnswerInSteps]

_BY_NAME: Final[Mapping[str, tuple[Operation, Rights]]] = {
    "renew-lock": (Operations.renew_lock, Rights.LISTEN),
    "update-disposition": (Operations.update_disposition, Rights.LISTEN),
    "receive-by-sequence-number": (Operations.receive_by_sequence_number, Rights.LISTEN),
    "peek-message": (Operations.peek_message, Rights.LISTEN),
    "batch-delete-messages": (Operations.batch_delete_messages, Rights.LISTEN),
    "schedule-message": (Operations.schedule_message, Rights.SEND),
    "cancel-scheduled-message": (Operations.cancel_scheduled_message, Rights.SEND),
    "renew-session-lock": (Operations.renew_session_lock, Rights.LISTEN),
    "get-session-state": (Operations.get_session_state, Rights.LISTEN),
    "set-session-state": (Operations.set_session_state, Rights.LISTEN),
    "get-message-sessions": (Operations.get_message_sessions, Rights.LISTEN),
    "add-rule": (Operations.add_rule, Rights.MANAGE),
    "remove-rule": (Operations.remove_rule, Rights.MANAGE),
    "enumerate-rules": (Operations.enumerate_rules, Rights.MANAGE),
}
#: Operation → method and rights.
OPERATIONS: Final = {f"com.microsoft:{name}": entry for name, entry in _BY_NAME.items()}


def _timestamp(at: float) -> Timestamp:
    return Timestamp(milliseconds(at))
