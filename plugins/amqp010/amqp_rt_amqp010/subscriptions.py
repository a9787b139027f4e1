"""Subscriptions of a session, and their credit: commands of class message that name a destination.

Messages to subscriptions are transfers to the client (0-10, ``message.subscribe`` to ``message.stop``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from amqp_rt.fronts import AmqpError, Error, Source, Symbol
from amqp_rt.fronts.links import REQUEUED

from .arguments import NO_LOCAL
from .assembling import Assembly
from .contexts import WAIT, Context, Steps
from .credit import UNLIMITED
from .deliveries import Deliveries
from .faults import CommandFault
from .handlers import Answer, Method
from .layouts import (
    AcceptMode,
    AcquireMode,
    Command,
    CreditUnit,
    ErrorCode,
    FlowMode,
    MessageCancel,
    MessageFlow,
    MessageFlush,
    MessageSetFlowMode,
    MessageStop,
    MessageSubscribe,
)
from .limits import SUBSCRIPTIONS_MAX
from .links import SendingLink
from .serials import RangeSet
from .transactions import CurrentTransaction, TransactionMode

_EXCLUSIVE: Final = Symbol("exclusive")
_PRIORITY: Final = Symbol("priority")
_COPY: Final = Symbol("copy")
_SELECTOR: Final = Symbol("jms-selector")
_NO_LOCAL: Final = Symbol("no-local")
#: Conditions of refused links → faulty field. Others, such as too many consumers, are about no single one.
_FIELD_OF: Final = {
    "amqp:not-found": "queue",
    "amqp:resource-locked": "queue",
    "amqp:unauthorized-access": "queue",
    "amqp:invalid-field": "arguments",
}
_DELETED: Final = Error("amqp:resource-deleted", "the queue of a subscription has been deleted")


class Subscriptions:
    """Subscriptions of a session, by destination, and those cancelled whose messages can be settled.

    Args:
        context: Context of the session.
        current: Its current transaction.
    """

    def __init__(self, context: Context, current: CurrentTransaction) -> None:
        self.context = context
        self.deliveries = Deliveries(self._tidy)
        #: Bound on those active and cancelled together.
        self.most = SUBSCRIPTIONS_MAX
        self._current = current
        self._active: dict[str, SendingLink] = {}
        self._cancelled: dict[SendingLink, None] = {}
        #: Subscriptions that wait for the answer of the container: no more than one, as commands are in order.
        self._requested = 0

    def __len__(self) -> int:
        """Return the number of subscriptions, requested and cancelled ones included."""
        return len(self._active) + len(self._cancelled) + self._requested

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {
            MessageSubscribe: self.subscribe,
            MessageCancel: self.cancel,
            MessageSetFlowMode: self.set_flow_mode,
            MessageFlow: self.flow,
            MessageFlush: self.flush,
            MessageStop: self.stop,
        }

    # --- commands ---------------------------------------------------------------------------------

    def subscribe(self, number: int, command: MessageSubscribe, assembly: Assembly) -> Answer:
        """Attach a link to a queue; commands after it wait for that.

        Raises:
            CommandFault: The destination is in use (530), there are too many subscriptions (506), or a
                field or an argument is wrong (542) or unknown (540).
        """
        destination = command.destination or ""
        if not command.queue:
            raise _invalid("a subscription needs the name of a queue", 0)
        if destination in self._active:
            text = f"destination {destination!r} is in use in this session"
            raise CommandFault(text, ErrorCode.NOT_ALLOWED, field_index=1)
        if command.resume_id or command.resume_ttl:
            text = (
                "transfers of a subscription cannot be resumed: leave out resume-id and resume-ttl"
            )
            field = "resume_id" if command.resume_id else "resume_ttl"
            raise CommandFault(text, ErrorCode.NOT_IMPLEMENTED, field=field)
        self._make_place()
        self._check_connection()
        link = self._link_of(command, destination)
        link.on_answer = partial(_note_answer, link, self.context)
        link.on_end = partial(self._ended, link)
        return self.context.run(number, command, self._attaching(link))

    def cancel(self, number: int, command: MessageCancel, assembly: Assembly) -> None:
        """End a subscription; the client can still settle messages that it has got.

        Raises:
            CommandFault: There is no such subscription (404).
        """
        link = self._find(command.destination)
        del self._active[link.destination]
        link.zero()
        if not link.held:
            self.context.anchor.drop(link)
            return
        # The link ends with the last of its messages.
        self._cancelled[link] = None
        link.on_end = partial(self._forget, link)
        link.idle = True
        topology = self.context.topology
        if topology is not None:
            topology.idle(link.address)

    def set_flow_mode(self, number: int, command: MessageSetFlowMode, assembly: Assembly) -> None:
        """Set the flow mode of a subscription.

        Raises:
            CommandFault: There is no such subscription (404), no such mode (542), or the mode changes while
                there is credit (406).
        """
        link = self._find(command.destination)
        mode = FlowMode(_code(command.flow_mode, FlowMode.WINDOW, "flow-mode", 1))
        if not link.set_mode(mode):
            text = f"subscription {link.destination!r} has credit: stop it before its flow mode changes"
            raise CommandFault(text, ErrorCode.PRECONDITION_FAILED, field_index=1)

    def flow(self, number: int, command: MessageFlow, assembly: Assembly) -> None:
        """Add credit; an absent value sets no limit.

        Raises:
            CommandFault: There is no such subscription (404), or no such unit (542).
        """
        link = self._find(command.destination)
        unit = _code(command.unit, CreditUnit.BYTE, "unit", 1)
        link.balance.add(unit, UNLIMITED if command.value is None else command.value)
        link.offer_credit()

    def flush(self, number: int, command: MessageFlush, assembly: Assembly) -> Answer:
        """Send what is available, as far as credit goes; then credit is 0.

        Raises:
            CommandFault: There is no such subscription (404).
        """
        link = self._find(command.destination)
        return self.context.run(number, command, self._draining(link))

    def stop(self, number: int, command: MessageStop, assembly: Assembly) -> None:
        """Set credit to 0.

        Raises:
            CommandFault: There is no such subscription (404).
        """
        self._find(command.destination).zero()

    # --- hooks of the session ---------------------------------------------------------------------

    def on_completed(self, commands: RangeSet) -> None:
        """Return credit for the transfers among *commands*."""
        windowed = self.deliveries.windowed
        if not windowed:
            return
        moved: dict[SendingLink, None] = {}
        connection = self.context.connection
        if connection is not None:
            connection.spend(commands.work_among(windowed))
        for number in commands.among(windowed):
            link = windowed.pop(number)
            link.balance.complete(number)
            moved[link] = None
        for link in moved:
            link.offer_credit()
        self._use_room()

    def on_ready(self) -> None:
        """Continue to send: the session has room again."""
        for link in list(self._active.values()):
            link.offer_credit()

    def on_suspended(self) -> None:
        """Zero all credit; messages that the client has not settled stay acquired."""
        for link in list(self._active.values()):
            link.zero()

    def on_ended(self) -> None:
        """Forget the links, which refer to the session and end with it."""
        self._active.clear()
        self._cancelled.clear()
        self.deliveries.tidy = _nothing

    # --- private ----------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """End cancelled subscriptions without messages, and use room for more."""
        for link in [each for each in self._cancelled if not each.held]:
            self.context.anchor.drop(link)
            self._forget(link, None)
        self._use_room()

    def _use_room(self) -> None:
        """Continue to send if there were too many deliveries and are not any more."""
        deliveries = self.deliveries
        if deliveries.has_room_again:
            deliveries.was_full = False
            self.on_ready()

    def _find(self, destination: str | None) -> SendingLink:
        link = self._active.get(destination or "")
        if link is None:
            text = f"there is no subscription {destination or ''!r} in this session"
            raise CommandFault(text, ErrorCode.NOT_FOUND, field_index=0)
        return link

    def _make_place(self) -> None:
        """Make place for one more subscription.

        Cancelled ones with copies only are ended for that, the oldest first.

        Raises:
            CommandFault: There are too many.
        """
        if len(self._active) + len(self._cancelled) < self.most:
            return
        held = self.deliveries.held
        for link in self._cancelled:
            if not any(number in held for number in link.held):
                self.context.anchor.drop(link)
                self._forget(link, None)
                return
        raise CommandFault(
            f"a session has at most {self.most} subscriptions, with cancelled ones whose"
            " messages are not settled",
            ErrorCode.RESOURCE_LIMIT_EXCEEDED,
        )

    def _check_connection(self) -> None:
        """Check that the connection has room for one more subscription.

        Raises:
            CommandFault: Its sessions have too many together.
        """
        connection = self.context.connection
        most = self.context.limits.connection_subscriptions_max
        if connection is not None and connection.count_subscriptions() >= most:
            raise CommandFault(
                f"a connection has at most {most} subscriptions (connection_subscriptions_max): use another one",
                ErrorCode.RESOURCE_LIMIT_EXCEEDED,
            )

    def _link_of(self, command: MessageSubscribe, destination: str) -> SendingLink:
        accept_mode = AcceptMode(_code(command.accept_mode, AcceptMode.NONE, "accept-mode", 2))
        acquire_mode = AcquireMode(
            _code(command.acquire_mode, AcquireMode.NOT_ACQUIRED, "acquire-mode", 3)
        )
        if self._current.mode is TransactionMode.LOCAL and accept_mode != AcceptMode.EXPLICIT:
            raise CommandFault(
                "a session with transactions has subscriptions with accept-mode explicit only",
                ErrorCode.NOT_ALLOWED,
                field_index=2,
            )
        if command.exclusive and acquire_mode == AcquireMode.NOT_ACQUIRED:
            text = "a subscription that acquires no messages cannot be exclusive"
            raise CommandFault(text, ErrorCode.NOT_IMPLEMENTED, field_index=4)
        arguments = SubscriptionArguments(command.arguments or {})
        if self._excludes_own(command.queue or ""):
            arguments.filters[_NO_LOCAL] = "true"
        source = Source(address=command.queue, default_outcome=REQUEUED)
        if arguments.filters:
            source.filter = arguments.filters
        if acquire_mode == AcquireMode.NOT_ACQUIRED:
            source.distribution_mode = _COPY
        link = SendingLink(
            self.context,
            self.deliveries,
            destination,
            source,
            accept_mode=accept_mode,
            acquire_mode=acquire_mode,
            sync_frequency=arguments.sync_frequency,
        )
        properties: dict[object, object] = {}
        if command.exclusive:
            properties[_EXCLUSIVE] = True
        if arguments.priority:
            properties[_PRIORITY] = arguments.priority
        link.properties = properties
        return link

    def _excludes_own(self, queue: str) -> bool:
        """Return whether *queue* was declared with ``no-local``, which clients of JMS state there."""
        topology = self.context.topology
        if topology is None:
            return False
        try:
            declared = topology.declaration(queue)
        except AmqpError:
            # The attach tells, or creates the queue.
            return False
        return declared is not None and declared.arguments.get(NO_LOCAL) is True

    def _attaching(self, link: SendingLink) -> Steps:
        context = self.context
        self._requested = 1
        try:
            context.report(context.anchor.request(link))
            while not link.answered:
                yield WAIT
        finally:
            self._requested = 0
        if link.refusal is not None:
            context.anchor.drop(link)
            field = _FIELD_OF.get(str(link.refusal.condition), "")
            raise CommandFault.of(link.refusal, field=field)
        if not link.over:
            self._active[link.destination] = link
        return None

    def _draining(self, link: SendingLink) -> Steps:
        # Also without credit a subscription may be among those that wait for room.
        link.draining = link.credit > 0
        link.offer_credit()
        while link.draining:
            yield WAIT
        link.zero()
        return None

    def _ended(self, link: SendingLink, error: Error | None) -> None:
        """End the session: a queue of it was deleted, or the right to receive was revoked."""
        self.context.anchor.links.pop(link, None)
        if self._active.get(link.destination) is link:
            del self._active[link.destination]
        self.context.session.fail(CommandFault.of(error or _DELETED))

    def _forget(self, link: SendingLink, error: Error | None) -> None:
        """Forget a cancelled subscription, which has ended."""
        self.context.anchor.links.pop(link, None)
        self._cancelled.pop(link, None)


class SubscriptionArguments:
    """Arguments of a subscription.

    Args:
        arguments: As the client gave them.

    Raises:
        CommandFault: One is unknown (540), or its value is wrong (542).
    """

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.priority = 0
        self.sync_frequency = 0
        self.filters: dict[object, object] = {}
        for name, value in arguments.items():
            match name:
                case "x-apache-selector" | "x-filter-jms-selector":
                    # Clients of JMS send an empty one for none.
                    if value not in ("", b"", None):
                        self.filters[_SELECTOR] = _text(name, value)
                case "no-local":
                    if value is True or value in (1, "true"):
                        self.filters[_NO_LOCAL] = "true"
                case "x-priority":
                    self.priority = _number(name, value, -(1 << 31))
                case "qpid.sync_frequency":
                    self.sync_frequency = _number(name, value, 0)
                case _:
                    text = f"subscriptions have no argument {name!r:.100}"
                    raise CommandFault(text, ErrorCode.NOT_IMPLEMENTED, field_index=7)


def _note_answer(link: SendingLink, context: Context, refused: Error | None) -> None:
    """Note the container's answer to the attach request of *link*."""
    link.answered = True
    link.refusal = refused
    context.wake()


def _nothing() -> None:
    """Tidy nothing: the session has ended."""


def _text(name: str, value: object) -> str:
    """Return a text; clients in C++ and Python 2 send octets."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _invalid(f"argument {name} is not in UTF-8: {value!r:.100}", 7) from None
    if isinstance(value, str):
        return value
    raise _invalid(f"argument {name} is a text, not {value!r:.100}", 7)


def _number(name: str, value: object, least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31:
        return int(value)
    raise _invalid(f"argument {name} is a number of 31 bits, not {value!r:.100}", 7)


def _code(value: int | None, most: int, name: str, index: int) -> int:
    """Return a code of *name*: from 0, which stands for an absent one as well, to *most*."""
    if value is None:
        return 0
    if value > most:
        raise _invalid(f"there is no {name} {value}", index)
    return value


def _invalid(text: str, index: int) -> CommandFault:
    return CommandFault(text, ErrorCode.INVALID_ARGUMENT, field_index=index)
