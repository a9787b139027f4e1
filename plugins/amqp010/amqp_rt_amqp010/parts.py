"""All parts that carry out the commands of one session. They are made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from amqp_rt.fronts import AmqpError

from .assembling import Assembly
from .branches import Branches
from .declarations import Declarations
from .faults import CommandFault
from .file_staging import FileStaging
from .files import Files
from .fragments import Fragments
from .handlers import Answer, Method
from .layouts import Command, ErrorCode, MessageAccept, MessageTransfer, StreamPublish
from .limits import WORK_OCTETS
from .order import SessionContext, fault_of
from .publishing import Publisher
from .serials import RangeSet
from .settling import Settling
from .streams import Streams
from .subscriptions import Subscriptions
from .transactions import CurrentTransaction, Transactions

#: Cost in frames of a command that declares something, or attaches a link.
_COMMAND_WORK: Final = 20
#: Commands that come with each message: they cost what their frames cost.
_FREQUENT: Final = frozenset((MessageTransfer, MessageAccept, StreamPublish))


class Parts:
    """All that carries out the commands of one session, until that ends.

    Args:
        context: Shared by all of them.
    """

    def __init__(self, context: SessionContext) -> None:
        self.context = context
        declarations = Declarations(context)
        current = CurrentTransaction(context.limits.transaction_work_max)
        self._fragments = fragments = Fragments(context)
        self._publisher = Publisher(context, current, fragments)
        self._transactions = transactions = Transactions(context, current, self._publisher.report)
        self._branches = branches = Branches(context, current, self._publisher.report)
        self.subscriptions = subscriptions = Subscriptions(context, current)
        settling = Settling(context, subscriptions.deliveries, current)
        self._streams = streams = Streams(context, self._publisher)
        self.staging = FileStaging(context, self._publisher, current)
        self._files = files = Files(context, current)
        self.methods: Mapping[type[Command], Method] = {
            **declarations.methods(),
            **fragments.methods(),
            **self._publisher.methods(),
            **transactions.methods(),
            **branches.methods(),
            **subscriptions.methods(),
            **settling.methods(),
            **streams.methods(),
            **self.staging.methods(),
            **files.methods(),
        }

    @property
    def is_congested(self) -> bool:
        """Whether input should wait: as much of it is in hand as may be."""
        return self.context.order.is_congested or self._publisher.is_congested

    # One call for each part that takes part: a connection may have thousands of sessions, which are all
    # suspended or ended with it.

    def on_completed(self, commands: RangeSet) -> None:
        """Return credit, and make room, for the transfers among *commands*, which the peer has completed."""
        self.subscriptions.on_completed(commands)
        self._streams.on_completed(commands)

    def on_ready(self) -> None:
        """Continue to send: the session has room again."""
        self.subscriptions.on_ready()
        self._streams.on_ready()
        self._files.on_ready()

    def on_suspended(self) -> None:
        """Stop sending: the session was detached, and its state is kept."""
        self.subscriptions.on_suspended()
        self._streams.on_suspended()

    def on_resumed(self) -> None:
        """Continue to send: the session is attached again. Subscriptions have no credit then."""
        self._streams.on_resumed()
        self._files.on_resumed()

    def on_ended(self) -> None:
        """End the parts: each before those that it needs."""
        self._files.on_ended()
        self.staging.on_ended()
        self._streams.on_ended()
        self.subscriptions.on_ended()
        self._branches.on_ended()
        self._transactions.on_ended()
        self._publisher.on_ended()
        self._fragments.on_ended()


def carry_out(
    methods: Mapping[type[Command], Method],
    context: SessionContext,
    number: int,
    command: Command,
    assembly: Assembly,
) -> Answer:
    """Carry out *command*, which has the id *number*, by one of *methods*.

    Raises:
        CommandFault: It failed; the session ends.
    """
    method = methods.get(type(command))
    if method is None:
        if not command.TO_SERVER:
            raise CommandFault(f"{command.NAME} is not a command for servers")
        raise CommandFault(f"{command.NAME} is not implemented here", ErrorCode.NOT_IMPLEMENTED)
    connection = context.connection
    if connection is not None and type(command) not in _FREQUENT:
        # What was published and settled before this command has its effect before it.
        connection.flush()
        connection.spend(_COMMAND_WORK + len(assembly.content) // WORK_OCTETS)
    try:
        return method(number, command, assembly)
    except CommandFault as fault:
        fault_of(fault, command)
        raise
    except AmqpError as error:
        raise fault_of(error, command) from error
