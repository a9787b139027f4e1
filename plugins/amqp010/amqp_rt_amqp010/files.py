"""Consumers of class file: ``file.qos``, ``consume``, ``cancel``, ``ack`` and ``reject`` (0-10 §file)."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any, Final

from amqp_rt.errors import CreditTooSmall
from amqp_rt.fronts import (
    ACCEPTED,
    RELEASED,
    Error,
    LocalProtocolError,
    Modified,
    Outcome,
    Payload,
    Rejected,
    Source,
)

from .assembling import Assembly
from .codec import write_command
from .consumers import (
    ConsumerLink,
    check_consume,
    no_global,
    source_of,
    start_consumer,
    take_consumer,
)
from .content_properties import FILE, from_payload
from .contexts import Context
from .deliveries import Deliveries, OutgoingDelivery
from .faults import CommandFault
from .file_outbox import FileOutbox, OutgoingFile
from .handlers import Answer, Method
from .layouts import (
    AcceptMode,
    AcquireMode,
    Command,
    ErrorCode,
    FileAck,
    FileCancel,
    FileConsume,
    FileConsumeOk,
    FileOpenOk,
    FileProperties,
    FileQos,
    FileQosOk,
    FileReject,
)
from .limits import CONSUMERS_MAX
from .links import SendingLink
from .serials import RangeSet
from .settling import Settling
from .transactions import CurrentTransaction
from .windows import Window

_CREDIT: Final = 1 << 31
_REJECTED: Final = Rejected(Error("amqp-0-10:rejected", "the client has rejected the file"))
#: A requeued file does not come back to the consumer that has rejected it.
_REQUEUED: Final = Modified(delivery_failed=True, undeliverable_here=True)


class FileLink(ConsumerLink):
    """Link of a consumer of class file.

    A file without acknowledgement is accepted when it has been delivered: until then it stays in its queue.

    Args:
        files: The consumers of the session.
        context: Its context.
        tag: Tag of the consumer.
        source: The queue, with filters.
        acks: Whether the client acknowledges files.
    """

    def __init__(
        self, files: Files, context: Context, tag: str, source: Source, *, acks: bool
    ) -> None:
        super().__init__(
            context,
            files.deliveries,
            tag,
            source,
            accept_mode=AcceptMode.EXPLICIT,
            acquire_mode=AcquireMode.PRE_ACQUIRED,
        )
        self._files = files
        self._acks = acks

    @property
    def credit(self) -> int:
        """Files that may be sent now, as far as their sizes are unknown."""
        files = self._files
        if (
            not self.attached
            or not self.started
            or self.idle
            or self.session_context.connection is None
        ):
            return 0
        if files.outbox.is_full or files.deliveries.is_full:
            return 0
        return 0 if self._acks and files.window.is_full else _CREDIT

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: Any = None,
        more: bool = False,
    ) -> OutgoingDelivery:
        """Send one file: the client is asked where to begin before its content is sent.

        Raises:
            CreditTooSmall: The window has no room for it.
            LocalProtocolError: There is no credit, or 0-10 cannot carry the message.
        """
        files = self._files
        connection = self.session_context.connection
        if self.credit <= 0 or connection is None:
            raise LocalProtocolError(f"consumer {self.destination!r} has no credit")
        if more or message_format != 0:
            raise LocalProtocolError("0-10 sends messages of format 0, and whole, here")
        content = from_payload(
            payload if isinstance(payload, bytes) else b"".join(payload),
            FileProperties,
            address=self.address,
            limits=self.session_context.limits,
            recents=connection.recents,
        )
        size = sum(map(len, content.body))
        if self._acks and not files.window.covers(size):
            raise CreditTooSmall(f"the window has no room for a file of {size} octets")
        delivery = OutgoingDelivery(self, next(files.tags), context, False)
        self.held[delivery.number] = delivery
        self.deliveries.held[delivery.number] = delivery
        if self._acks:
            files.window.add(delivery.number, size)
        connection.given += 1
        files.outbox.add(OutgoingFile(self, delivery, content, size))
        return delivery

    def on_delivered(self, delivery: OutgoingDelivery) -> None:
        """Accept a file that the client does not acknowledge."""
        if not self._acks:
            self._files.conclude([delivery], ACCEPTED)

    def forget(self, delivery: OutgoingDelivery) -> None:
        """Remove *delivery*, to which no later command can refer; its room can be used."""
        super().forget(delivery)
        files = self._files
        files.window.remove(delivery.number)
        files.outbox.forget(delivery)
        self.session_context.session.at_turn(files.offer)


class Files:
    """Consumers of class file of a session, and those cancelled whose files can be settled.

    Args:
        context: Context of the session.
        current: Its current transaction, to which acknowledgements belong while there is one.
    """

    def __init__(self, context: Context, current: CurrentTransaction) -> None:
        self._context = context
        self.window = Window()
        self.deliveries = Deliveries(self._tidy)
        self.outbox = FileOutbox(context, self.offer)
        self.tags = count(1)
        self._settling = Settling(context, self.deliveries, current)
        self._consumers: dict[str, FileLink] = {}
        self._cancelled: dict[FileLink, None] = {}

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {
            FileQos: self.qos,
            FileConsume: self.consume,
            FileCancel: self.cancel,
            FileOpenOk: self.open_ok,
            FileAck: self.ack,
            FileReject: self.reject,
        }

    # --- commands ---------------------------------------------------------------------------------

    def qos(self, number: int, command: FileQos, assembly: Assembly) -> None:
        """Set how much the consumers of the session are sent before the client has acknowledged it.

        Raises:
            CommandFault: It is to apply to the connection (540).
        """
        if command.global_:
            raise no_global(2)
        self.window.count_max = command.prefetch_count or 0
        self.window.size_max = command.prefetch_size or 0
        self._context.session.send(write_command(FileQosOk()), urgent=True)
        self.offer()

    def consume(self, number: int, command: FileConsume, assembly: Assembly) -> Answer:
        """Attach a consumer to a queue; commands after it wait for that.

        Raises:
            CommandFault: Queue or tag are empty, or the tag is in use (530), there are too many consumers
                (506), or an argument is unknown (540).
        """
        tag = command.consumer_tag or ""
        check_consume(command.queue, tag, self._consumers, command.arguments, 6)
        if len(self._consumers) + len(self._cancelled) >= CONSUMERS_MAX:
            text = f"{len(self._cancelled)} cancelled consumers have files that are not settled"
            raise CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED)
        source = source_of(command.queue or "", FILE, no_local=command.no_local)
        link = FileLink(self, self._context, tag, source, acks=not command.no_ack)
        answer = FileConsumeOk(consumer_tag=tag)
        return start_consumer(self._context, number, command, link, self._consumers, answer)

    def cancel(self, number: int, command: FileCancel, assembly: Assembly) -> None:
        """End a consumer; the client can still settle files that were delivered, others go back.

        Raises:
            CommandFault: There is no such consumer (404).
        """
        link = take_consumer(self._consumers, command.consumer_tag)
        link.idle = True
        self._cancelled[link] = None
        link.on_end = partial(self._forget, link)
        self.conclude(self.outbox.withdraw(link), RELEASED)
        topology = self._context.topology
        if topology is not None:
            topology.idle(link.address)
        self._context.session.at_turn(self._tidy)

    def open_ok(self, number: int, command: FileOpenOk, assembly: Assembly) -> None:
        """Stage the file that was opened first, from where the client says, and deliver it.

        Raises:
            CommandFault: No file is open (409), or it has fewer octets (542).
        """
        self.outbox.continue_at(command.staged_size or 0)

    def ack(self, number: int, command: FileAck, assembly: Assembly) -> Answer:
        """Accept files: at once, or with the transaction of the session.

        Raises:
            CommandFault: The tag is not that of a file that was delivered, and is not settled (542).
        """
        tag = command.delivery_tag or 0
        if not command.multiple:
            self._check(tag)
            return self._settling.accept_all(number, command, RangeSet([(tag, tag)]))
        if tag > self.outbox.delivered:
            raise _unknown(tag)
        first = next(iter(self.deliveries.held), 0)
        last = tag or self.outbox.delivered
        transfers = RangeSet([(first, last)]) if 0 < first <= last else None
        return self._settling.accept_all(number, command, transfers)

    def reject(self, number: int, command: FileReject, assembly: Assembly) -> Answer:
        """Reject a file, or make it available to others; at once, whatever the transaction.

        It becomes a dead letter if this session has all that could get it: "the server MUST NOT deliver the message
        to the same client within the context of the current session".

        Raises:
            CommandFault: The tag is not that of a file that was delivered, and is not settled (542).
        """
        tag = command.delivery_tag or 0
        link = self._check(tag, enlisted=True).link
        outcome = _REQUEUED if command.requeue and self._is_alone(link) else _REJECTED
        return self._settling.settle(number, command, RangeSet([(tag, tag)]), outcome)

    # --- hooks of the session ---------------------------------------------------------------------

    def on_ready(self) -> None:
        """Continue to send: the session has room again."""
        self.offer()

    def on_resumed(self) -> None:
        """Continue to send: the session is attached again."""
        self.offer()

    def on_ended(self) -> None:
        """Release the files that the client has not got; forget the links, which end with the session."""
        for link in list(self._consumers.values()):
            self.conclude(self.outbox.withdraw(link), RELEASED)
        self._consumers.clear()
        self._cancelled.clear()
        self.outbox.clear()
        self.deliveries.tidy = _nothing

    # --- for the links ----------------------------------------------------------------------------

    def offer(self) -> None:
        """Continue to send, and offer room to the queues."""
        self.outbox.send_waiting()
        self._tidy()
        for link in list(self._consumers.values()):
            link.offer_credit()

    def conclude(self, deliveries: list[OutgoingDelivery], outcome: Outcome) -> None:
        """Give *deliveries* an outcome that no command of the client waits for."""
        chosen = [each for each in deliveries if not each.remote_settled and not each.settled]
        self._settling.pass_on(chosen, outcome, None)

    # --- private ----------------------------------------------------------------------------------

    def _check(self, tag: int, *, enlisted: bool = False) -> OutgoingDelivery:
        """Return the delivery *tag*, which the client can settle."""
        delivery = self.deliveries.held.get(tag)
        if (
            delivery is None
            or tag > self.outbox.delivered
            or delivery.remote_settled
            or (delivery.enlisted and not enlisted)
        ):
            raise _unknown(tag)
        return delivery

    def _is_alone(self, link: SendingLink) -> bool:
        """Return whether *link* is the only consumer of this session at its queue."""
        return not any(
            each is not link and each.address == link.address for each in self._consumers.values()
        )

    def _tidy(self) -> None:
        """End cancelled consumers that have no files."""
        for link in [each for each in self._cancelled if not each.held]:
            self._context.anchor.drop(link)
            self._cancelled.pop(link, None)

    def _forget(self, link: FileLink, error: Error | None) -> None:
        self._cancelled.pop(link, None)


def _unknown(tag: int) -> CommandFault:
    text = f"delivery-tag {tag}: no such file was delivered in this session, or it is settled"
    return CommandFault(text, ErrorCode.INVALID_ARGUMENT, field_index=0)


def _nothing() -> None:
    """Tidy nothing: the session has ended."""
