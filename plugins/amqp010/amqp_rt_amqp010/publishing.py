"""Publishing: ``message.transfer`` from the client, and the outcomes of queues (0-10 §message)."""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, TypeAlias

from amqp_rt.fronts import Accepted, AmqpError, Error, Rejected, TransactionalState
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.recent import OCTETS_MAX, Recent

from .arguments import MESSAGE_SEQUENCE, plain
from .assembling import Assembly
from .codec import read_entries, write_command
from .content_properties import Content
from .contexts import Connection, Context
from .faults import CommandFault
from .fragments import Fragments
from .handlers import LATER, Answer, Method
from .layouts import (
    AcceptMode,
    Command,
    DeliveryProperties,
    ErrorCode,
    FilePublish,
    FragmentProperties,
    MessageAccept,
    MessageProperties,
    MessageReject,
    MessageTransfer,
    RejectCode,
    StreamPublish,
)
from .limits import HEADS_MAX, RANGES_MAX, UNREPORTED_MAX, WORK_OCTETS
from .messages import payload_of
from .routes import Routes, Way
from .serials import RangeSet
from .transactions import CurrentTransaction

#: A command with header and body, encoded.
Returned: TypeAlias = tuple[bytes, bytes | None, Sequence[bytes]]

#: Queues that a message is handed to between two checks of the work done, and the cost of each in frames.
_QUEUES_OF_A_STEP: Final = 10
_QUEUE_WORK: Final = 5
#: Outcome for a queue that was deleted between two steps of routing a message.
_GONE: Final = Rejected(Error("amqp:not-found", "the queue has been deleted"))
#: Reason for ``message.reject`` → its text.
_TEXTS: Final = {
    RejectCode.UNSPECIFIED: "the message is rejected where it was sent",
    RejectCode.UNROUTABLE: "no queue takes the message",
    RejectCode.IMMEDIATE: "a queue of the message has no subscriber that is ready",
}

#: Conditions of rejections that are faults of the command: no room, and no right.
_FAULTS: Final = frozenset(("amqp:resource-limit-exceeded", "amqp:unauthorized-access"))


class Head:
    """Header segment of a transfer, as far as publishing needs it.

    Args:
        octets: The segment; None if there is none.

    Raises:
        CommandFault: It is malformed (503).
    """

    __slots__ = (
        "_headers",
        "discard",
        "fragment",
        "immediate",
        "octets",
        "resume_id",
        "resume_ttl_ms",
        "routing_key",
        "user_id",
    )

    def __init__(self, octets: bytes | None) -> None:
        self.octets = octets or b""
        self.routing_key = ""
        self.discard = self.immediate = False
        self.user_id: bytes | None = None
        self._headers: Mapping[str, object] | None = None
        self.fragment: FragmentProperties | None = None
        self.resume_id: str | None = None
        self.resume_ttl_ms: int | None = None
        for entry in read_entries(self.octets, MessageTransfer.CODE):
            if isinstance(entry, DeliveryProperties):
                self.routing_key = entry.routing_key or ""
                self.discard = entry.discard_unroutable
                self.immediate = entry.immediate
                self.resume_id = entry.resume_id
                self.resume_ttl_ms = entry.resume_ttl
            elif isinstance(entry, MessageProperties):
                self.user_id = entry.user_id
                self._headers = entry.application_headers
            elif isinstance(entry, FragmentProperties):
                self.fragment = entry

    def headers(self) -> dict[str, object]:
        """Return the application headers as arguments of bindings are compared with them.

        No argument equals a value of a type that is unknown outside of AMQP 0-10.
        """
        found: dict[str, object] = {}
        for name, value in (self._headers or {}).items():
            with suppress(CommandFault):
                found[name] = plain(value)
        return found


class Transfer:
    """A transfer, until every queue that it went to has returned an outcome.

    A delivery calls it with its outcome.

    Args:
        publisher: The publisher of its session.
        number: Its command-id.
        explicit: Whether it states the accept-mode *explicit*.
        discard: Whether it may be discarded if it is unroutable.
        awaited: Number of queues that it went to.
        code: Code of its command, for faults.
    """

    __slots__ = (
        "awaited",
        "code",
        "discard",
        "explicit",
        "failed",
        "number",
        "publisher",
        "rejected",
        "taken",
    )

    def __init__(
        self,
        publisher: Publisher,
        number: int,
        *,
        explicit: bool,
        discard: bool,
        awaited: int,
        code: int = MessageTransfer.CODE,
    ) -> None:
        self.publisher = publisher
        self.number = number
        self.explicit = explicit
        self.discard = discard
        self.awaited = awaited
        self.code = code
        self.taken = False
        self.rejected = False
        self.failed = False

    def __call__(self, outcome: Any) -> None:
        """Count the outcome of one queue; complete the transfer after the last one."""
        self.awaited -= 1
        explicit = self.explicit
        if type(outcome) is TransactionalState:
            outcome = outcome.outcome
            explicit = False
        if type(outcome) is Accepted:
            self.taken = True
        elif (
            explicit
            and type(outcome) is Rejected
            and outcome.error is not None
            and outcome.error.condition not in _FAULTS
            and outcome.error.condition != "amqp:not-found"
        ):
            # An application that takes messages judges each of them.
            self.rejected = True
        elif type(outcome) is Rejected and (
            outcome.error is None or outcome.error.condition != "amqp:not-found"
        ):
            self.on_refused(outcome.error)
        # A queue deleted after the message was routed does not count, unless no other one took it.
        if not self.awaited and not self.failed:
            if self.rejected:
                self.publisher.drop(self, RejectCode.UNSPECIFIED)
            elif self.taken:
                self.publisher.finish(self.number, accepted=self.explicit)
            else:
                self.publisher.drop(self, RejectCode.UNROUTABLE)

    def on_refused(self, error: Error | None) -> None:
        """Fail the command, which never completes: a queue has refused the message."""
        self.failed = True
        self.publisher.fail(self.number, error, self.code)

    def on_dropped(self, code: RejectCode) -> None:
        """Reject a message that no queue takes, if that is wanted."""
        if self.explicit and not self.discard:
            self.publisher.reject(self.number, code)


class Publisher:
    """Carries out ``message.transfer``.

    Args:
        context: The session.
        current: Its current transaction.
        fragments: Its incomplete messages.
    """

    def __init__(self, context: Context, current: CurrentTransaction, fragments: Fragments) -> None:
        self._context = context
        self._current = current
        self._fragments = fragments
        self._routes = Routes(context)
        self._heads: Recent[bytes, Head] = Recent(HEADS_MAX)
        #: Last transfer of a message in fragments → all those that state the accept-mode explicit.
        self._joined: dict[int, RangeSet] = {}
        #: Transfers that all their queues have answered, which are completed in the next turn.
        self._finished: list[int] = []
        #: Those of them that are accepted, and rejected, before that.
        self._accepted = RangeSet()
        self._rejected: dict[RejectCode, RangeSet] = {}
        #: Commands that return content to the client before that, with header and body.
        self._returned: list[Returned] = []
        #: Whether their completion waits until memory is no longer scarce.
        self._waits = False

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {MessageTransfer: self.transfer}

    @property
    def is_congested(self) -> bool:
        """Whether no more transfers should be read: as many as may be wait for memory."""
        return self._waits and len(self._finished) >= UNREPORTED_MAX

    # --- transfers --------------------------------------------------------------------------------

    def transfer(self, number: int, command: MessageTransfer, assembly: Assembly) -> Answer:
        """Hand a message to the queues that it is routed to; it completes when all have answered.

        Raises:
            CommandFault: There is no such exchange (404), the peer may not publish there, or gives
                another user's id (403), or the content is malformed (503).
        """
        connection = self._context.connection
        assert connection is not None
        try:
            return self._transfer(connection, number, command, assembly)
        except (CommandFault, AmqpError):
            # The transfers before it are not affected.
            connection.flush()
            raise

    def _transfer(
        self, connection: Connection, number: int, command: MessageTransfer, assembly: Assembly
    ) -> Answer:
        context = self._context
        if command.accept_mode not in (None, 0, 1):
            raise _wrong_mode("accept-mode", command.accept_mode, 1)
        if command.acquire_mode not in (None, 0, 1):
            raise _wrong_mode("acquire-mode", command.acquire_mode, 2)
        head = self._head_of(assembly.header)
        if head.user_id is not None:
            self._check_user(head.user_id)
        fragment = head.fragment
        explicit = command.accept_mode == AcceptMode.EXPLICIT
        if fragment is not None and not (fragment.first and fragment.last):
            message = self._fragments.add(
                number,
                command.destination or "",
                fragment,
                assembly,
                resume_id=head.resume_id,
                resume_ttl_ms=head.resume_ttl_ms,
                explicit=explicit,
            )
            if message is None:
                return None
            self._joined[number] = message.numbers
            assembly = message.joined(assembly)
            head = self._head_of(assembly.header)
        exchange = command.destination or ""
        if not exchange and not head.immediate:
            way = connection.ways.get((self, head.routing_key))
            if way is None:
                way = self._routes.way_to(head.routing_key, routed=False)
                connection.ways[self, head.routing_key] = way
            ways = [way]
        else:
            # Routes are found once for the messages of one chunk that are alike: no other command runs
            # between them. Whether a subscriber is ready changes with each message.
            key = (self, exchange, head.octets, explicit)
            found = None if head.immediate else connection.ways.get(key)
            if found is None or len(found) > _QUEUES_OF_A_STEP:
                return context.run(
                    number, command, self._spread(number, command, assembly, head, found)
                )
            ways = found
        transfer = Transfer(
            self, number, explicit=explicit, discard=head.discard, awaited=len(ways)
        )
        if not ways:
            self.drop(transfer, RejectCode.UNROUTABLE)
            return LATER
        payload = payload_of(
            assembly.header, assembly.body or (), exchange=exchange, recents=connection.recents
        )
        state = self._current.state
        if state is not None:
            self._current.posted += len(ways)
        for inlet, link, _ in ways:
            connection.post(inlet, link, FrontDelivery(link, payload, transfer, state))
        return LATER

    def _head_of(self, octets: bytes | None) -> Head:
        if octets is None:
            return Head(None)
        head = self._heads.get(octets)
        if head is None:
            connection = self._context.connection
            if connection is not None:
                connection.spend(len(octets) // WORK_OCTETS)
            head = Head(octets)
            if len(octets) <= OCTETS_MAX:
                self._heads.put(octets, head)
        return head

    def _check_user(self, user_id: bytes) -> None:
        user = self._context.anchor.peer.user
        if user is not None and user.encode() != user_id:
            raise CommandFault(
                f"user-id is {user_id!r:.50}, and the connection is that of {user!r:.50}",
                ErrorCode.UNAUTHORIZED_ACCESS,
            )

    def _payload_of(self, exchange: str, assembly: Assembly, number: int) -> bytes:
        connection = self._context.connection
        return payload_of(
            assembly.header,
            assembly.body or (),
            exchange=exchange,
            number=number,
            recents=None if connection is None else connection.recents,
        )

    def _spread(
        self,
        number: int,
        command: MessageTransfer,
        assembly: Assembly,
        head: Head,
        ways: list[Way] | None,
    ) -> Generator[int, None, Answer]:
        """Hand a message to all queues that it is routed to; yield the cost of each step in frames.

        All of them share one payload.
        """
        try:
            yield from self._spread_to(number, command, assembly, head, ways)
        except (CommandFault, AmqpError):
            self._flush()
            raise
        return LATER

    def _spread_to(
        self,
        number: int,
        command: MessageTransfer,
        assembly: Assembly,
        head: Head,
        ways: list[Way] | None,
    ) -> Generator[int, None, None]:
        context = self._context
        explicit = command.accept_mode == AcceptMode.EXPLICIT
        exchange = command.destination or ""
        topology = context.topology
        deletions: AbstractContextManager[Container[str]] = nullcontext(())
        if topology is not None:
            deletions = topology.deletions()
        order = 0
        remembers = False
        state = self._current.state
        with deletions as gone:
            if ways is None:
                ways = []
                headers = head.headers()
                yield from self._routes.find(
                    exchange,
                    head.routing_key,
                    headers,
                    gone,
                    ways,
                    alternate=not (explicit or head.discard),
                )
                ways = [each for each in ways if each[2] not in gone]
                # Not before, so that queues get messages of all sessions in the order of these numbers, as
                # long as one step serves all queues of a message: between two steps other sessions publish.
                if topology is not None and exchange:
                    order = topology.count_message(exchange, MESSAGE_SEQUENCE)
                    remembers = topology.remembers(exchange)
                    if remembers and state is None:
                        payload = self._payload_of(exchange, assembly, order)
                        topology.remember(exchange, (head.routing_key,), headers, payload)
                connection = context.connection
                # Each message of an exchange that numbers or remembers them is one of a kind.
                alike = not (head.immediate or order or remembers)
                if connection is not None and alike:
                    connection.ways[self, exchange, head.octets, explicit] = ways
            transfer = Transfer(
                self, number, explicit=explicit, discard=head.discard, awaited=len(ways)
            )
            if not ways:
                self.drop(transfer, RejectCode.UNROUTABLE)
                return
            if head.immediate and not (yield from self._are_ready(ways)):
                self.drop(transfer, RejectCode.IMMEDIATE)
                return
            payload = self._payload_of(exchange, assembly, order)
            yield from self._post(transfer, payload, ways, gone, state)

    def spread_content(
        self,
        command: FilePublish | StreamPublish,
        transfer: Transfer,
        content: Content,
        state: TransactionalState | None,
    ) -> Generator[int, None, Answer]:
        """Hand content of class file or stream to the queues that it is routed to, in steps.

        Args:
            command: The command, which completes when all queues have answered.
            transfer: Called with the outcomes.
            content: The message.
            state: The transaction that it belongs to; None for none.

        Raises:
            CommandFault: There is no such exchange (404), or the peer may not publish there (403).
        """
        topology = self._context.topology
        deletions: AbstractContextManager[Container[str]] = nullcontext(())
        if topology is not None:
            deletions = topology.deletions()
        try:
            with deletions as gone:
                ways: list[Way] = []
                yield from self._routes.find(
                    command.exchange or "",
                    command.routing_key or "",
                    content.headers,
                    gone,
                    ways,
                    alternate=not command.mandatory,
                )
                ways = [each for each in ways if each[2] not in gone]
                transfer.awaited = len(ways)
                if not ways:
                    self.drop(transfer, RejectCode.UNROUTABLE)
                elif command.immediate and not (yield from self._are_ready(ways)):
                    self.drop(transfer, RejectCode.IMMEDIATE)
                else:
                    yield from self._post(transfer, content.payload, ways, gone, state)
        finally:
            self._flush()
        return LATER

    def _are_ready(self, ways: list[Way]) -> Generator[int, None, bool]:
        """Return whether each queue has a subscriber that can take a message now."""
        # Subscribers may have no credit after the messages before this one.
        self._flush()
        topology = self._context.topology
        for count, (_, _, name) in enumerate(ways, 1):
            if topology is None or not topology.is_ready(name):
                return False
            if not count % _QUEUES_OF_A_STEP:
                yield _QUEUES_OF_A_STEP
        return True

    def _post(
        self,
        transfer: Transfer,
        payload: bytes,
        ways: list[Way],
        gone: Container[str],
        state: Any,
    ) -> Generator[int, None, None]:
        for count, (inlet, link, name) in enumerate(ways, 1):
            connection = self._context.connection
            if connection is None:
                # An outcome has ended the session.
                return
            if name in gone:
                transfer(_GONE)
            else:
                if state is not None:
                    self._current.posted += 1
                connection.post(inlet, link, FrontDelivery(link, payload, transfer, state))
            if not count % _QUEUES_OF_A_STEP:
                self._flush()
                yield _QUEUE_WORK * _QUEUES_OF_A_STEP

    def _flush(self) -> None:
        connection = self._context.connection
        if connection is not None:
            connection.flush()

    # --- outcomes ---------------------------------------------------------------------------------

    def fail(self, number: int, error: Error | None, code: int) -> None:
        """End the session: a queue has refused the message of command *number*, which has *code*."""
        if error is None:
            fault = CommandFault("a queue has rejected the message", ErrorCode.INTERNAL_ERROR)
        else:
            fault = CommandFault.of(error)
        fault.class_code, fault.command_code = code >> 8, code & 0xFF
        self._context.session.fail(fault, number)

    def drop(self, transfer: Transfer, code: RejectCode) -> None:
        """Complete *transfer*, which no queue takes; reject or return it if that is wanted."""
        transfer.on_dropped(code)
        self.finish(transfer.number, accepted=False)

    def reject(self, number: int, code: RejectCode) -> None:
        """Reject transfer *number* before it completes."""
        self._answer(number, self._rejected.setdefault(code, RangeSet()))

    def give_back(self, returned: Returned) -> None:
        """Send *returned* before the command that published it completes."""
        self._returned.append(returned)

    def _answer(self, number: int, answered: RangeSet) -> None:
        """Add transfer *number* to *answered*, and those of the fragments that it ends."""
        answered.add(number)
        fragments = self._joined.get(number)
        if fragments is not None:
            answered.update(fragments)

    def finish(self, number: int, *, accepted: bool) -> None:
        """Complete transfer *number* in the next turn, after ``message.accept`` if it is *accepted*."""
        if accepted:
            self._answer(number, self._accepted)
        self._joined.pop(number, None)
        self._finished.append(number)
        if len(self._finished) == 1:
            self._context.session.at_turn(self._report_unless_scarce)

    def _report_unless_scarce(self) -> None:
        topology = self._context.topology
        self._waits = topology is not None and topology.scarce(self._on_room)
        if not self._waits:
            self.report()

    def _on_room(self) -> None:
        self._context.session.at_turn(self._report_unless_scarce)

    def report(self) -> None:
        """Complete all transfers that their queues have answered, though memory may be scarce."""
        self._waits = False
        session = self._context.session
        accepted, self._accepted = self._accepted, RangeSet()
        rejected, self._rejected = self._rejected, {}
        returned, self._returned = self._returned, []
        finished, self._finished = self._finished, []
        for octets, header, body in returned:
            session.send(octets, header, body, urgent=True)
        for some in _parts_of(accepted):
            session.send(write_command(MessageAccept(transfers=some)), urgent=True)
        for code, numbers in rejected.items():
            for some in _parts_of(numbers):
                command = MessageReject(transfers=some, code=code, text=_TEXTS[code])
                session.send(write_command(command), urgent=True)
        for number in finished:
            session.complete(number)

    def on_ended(self) -> None:
        """Forget the links and what is finished."""
        self._routes.on_ended()
        self._finished.clear()
        self._returned.clear()
        self._joined.clear()


def _wrong_mode(name: str, mode: int | None, field_index: int) -> CommandFault:
    return CommandFault(
        f"{name} is 0 or 1, not {mode}", ErrorCode.INVALID_ARGUMENT, field_index=field_index
    )


def _parts_of(numbers: RangeSet) -> list[RangeSet]:
    """Divide *numbers* into sets that fit a field each."""
    if numbers.range_count < RANGES_MAX:
        return [numbers] if numbers else []
    ranges = numbers.ranges()
    return [
        RangeSet(ranges[start : start + RANGES_MAX - 1])
        for start in range(0, len(ranges), RANGES_MAX - 1)
    ]
