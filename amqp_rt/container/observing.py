"""Steps of observed senders, receipts and handlers that never wait.

Apart from :mod:`.observed` and :mod:`.serving`, whose classes add all that waits, so that they can be compiled: each
observed message passes through them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..compiling import mypyc_attr
from ..errors import DecodeError
from ..fronts.base import IncomingDelivery, OutgoingDelivery, Payload
from ..message import MESSAGE_FORMAT, Message, MessageId
from ..observers import error_of, error_of_outcome, log_failed
from ..outcomes import ACCEPTED, Accepted
from ..trace_context import NO_TRACE, TRACE_OCTETS, with_trace
from ..unread import UnreadMessage
from .callers import CALLER, caller_of
from .composing import build_message, make_message
from .encoding import encode_plain, encode_traced
from .handling import InboxSteps, Suspended, octets_of
from .sending import Sender
from .submitting import ReceiptSteps, SenderSteps

#: What every sender does without observers.
_encode: Final[Any] = Sender.encode


@mypyc_attr(allow_interpreted_subclasses=True)
class ObservedReceiptSteps(ReceiptSteps):
    """State of an :class:`~.observed.ObservedReceipt`, and its steps."""

    def __init__(
        self,
        sender: ObservedSenderSteps,
        payload: Payload,
        message_format: int = 0,
        *,
        unfinished: bool = False,
        transaction: Any = None,
    ) -> None:
        super().__init__(
            sender, payload, message_format, unfinished=unfinished, transaction=transaction
        )
        #: The operation on the message; None once it has ended. It was begun when the message was encoded, just before.
        #: One on a message that was encoded already is begun here, and its trace context is not written.
        self.operation: Any
        if sender.encoded:
            sender.encoded = False
            self.operation, sender.begun = sender.begun, None
        else:
            self.operation = sender.begin_operation(None)

    def _settle(self) -> None:
        super()._settle()
        if self.operation is None:
            return
        if self.error is not None:
            self.end_operation(error_of(self.error))
        elif type(self._outcome) is Accepted:
            self.end_operation(None)
        else:
            self.end_operation(error_of_outcome(self._outcome))

    def end_operation(self, error: str | None) -> None:
        """End the operation, if it has not ended."""
        # Applications may keep receipts for long, and a span is many objects.
        operation, self.operation = self.operation, None
        if operation is not None:
            operation.end(error)


def end_accepted(deliveries: list[OutgoingDelivery]) -> None:
    """End the operations of accepted messages, as when their receipts settle, which does not happen one by one."""
    for each in deliveries:
        receipt = each.context
        if (
            isinstance(receipt, ObservedReceiptSteps)
            and each.remote_settled
            and type(each.state) is Accepted
        ):
            receipt.end_operation(None)


class _BarePayload(UnreadMessage):
    """Payload that is sent without properties; a message is made of it if an observer reads it."""

    __slots__ = ("_codecs", "_content")

    def __init__(self, content: object, codecs: Any) -> None:
        self.payload = self.message = None
        self._content = content
        self._codecs = codecs

    def read(self) -> Message | None:
        """Return the message, without the trace context that it will have; None if the payload has no encoding."""
        if self.message is None:
            try:
                self.message = make_message(self._content, {}, self._codecs)
            except Exception:
                # Encoding it for sending raises the same, to the sender.
                return None
        return self.message

    def trace(self) -> Mapping[str, str]:
        """Return that there is none yet."""
        return NO_TRACE

    def ids(self) -> tuple[MessageId | None, MessageId | None]:
        """Return that there are none."""
        return None, None


@mypyc_attr(allow_interpreted_subclasses=True)
class ObservedSenderSteps(SenderSteps):
    """State of an :class:`~.observed.ObservedSending`, and its steps."""

    _observer: Any = None
    _bound: bool = False
    #: The operation of the message encoded last, while :attr:`encoded`.
    begun: Any = None
    #: Whether the message encoded last has no receipt yet.
    encoded: bool = False

    def _bind_observer(self) -> Any:
        """Bind the observers of the container to the link, whose address and peer may have become known."""
        raise NotImplementedError

    def _bind(self) -> Any:
        if not self._bound:
            self._bound = self._stage == "attached"
            self._observer = self._bind_observer()
        return self._observer

    def begin_operation(self, message: Message | None) -> Any:
        """Begin an operation on *message*; None stands for one that has been encoded already."""
        observer = self._bind()
        return None if observer is None else observer.begin(message)

    def encode(self, message: object, properties: Any) -> Payload:
        """Begin the operation, write its trace context, and encode the message.

        Nothing may wait between this and the receipt of the message.

        Raises:
            EncodeError: A value has no encoding.
            LocalProtocolError: The message is for the anonymous terminus and has no ``to``.
        """
        observer = self._observer if self._bound else self._bind()
        self.encoded = False
        operation: Any = None
        payload: Payload
        try:
            if observer is None:
                payload = _encode(self, message, properties)
            elif properties or self._anonymous or isinstance(message, Message):
                built = build_message(message, properties, self._codecs)
                operation = observer.begin(built)
                if operation is not None:
                    built = with_trace(built, operation.trace, in_place=built is not message)
                payload = _encode(self, built, {})
            else:
                operation = observer.begin_unread(_BarePayload(message, self._codecs))
                trace: Any = NO_TRACE if operation is None else operation.trace
                if trace:
                    payload = encode_traced(message, trace, self._codecs)
                else:
                    payload = encode_plain(message, self._codecs)
        except BaseException as error:
            if operation is not None:
                operation.end(error_of(error))
            raise
        self.begun = operation
        self.encoded = True
        return payload


@mypyc_attr(allow_interpreted_subclasses=True)
class ObservedRunSteps:
    """Processing of the messages of one link, with observers: the steps of :class:`~.serving.ObservedRun`.

    Args:
        binding: The link and its route.
        run: Processes one message, up to its outcome.
        direct: The handler, if it can be called with the octets of a message and nothing else.
    """

    def __init__(self, binding: Any, run: Any, direct: Any) -> None:
        self._binding = binding
        self._run = run
        self._direct = direct
        #: The link whose observer is known.
        self._link: Any = None
        self._observer: Any = None

    def _bind(self) -> Any:
        """Ask the observers of the container about the link; return one for all of them."""
        raise NotImplementedError

    def _finish(
        self, inbox: Any, delivery: Any, worker: Any, rest: Any, direct: bool, traced: bool
    ) -> Any:
        """Await *rest* of a handler, and end the operation of *worker*.

        Args:
            inbox: The inbox of *delivery*.
            delivery: The message.
            worker: The worker.
            rest: What the handler waits for.
            direct: Whether *rest* has the result of the handler, so that *delivery* is to be settled.
            traced: Whether the caller is known to the handler.
        """
        raise NotImplementedError

    def __call__(self, inbox: InboxSteps, delivery: Any, worker: Any) -> Any:
        """Process one message up to where its handler waits.

        Returns:
            The rest to be awaited, which settles the message; ``ACCEPTED`` if the handler has returned nothing, and the message
            is to be accepted; None if the message is settled.
        """
        observer = self._observer if self._link is self._binding.link else self._bind()
        if observer is None:
            return self._run(inbox, delivery, worker)
        readable = delivery.complete and delivery.message_format == MESSAGE_FORMAT
        found = UnreadMessage(delivery.payload if readable else None)
        operation: Any = observer.begin_unread(found)
        # What an observer has decoded is not decoded again for the handler.
        worker.message = found.message
        worker.failure = None
        worker.operation = operation
        if operation is not None:
            operation.enter()
        direct = traced = waits = False
        rest: Any = None
        error: str | None = "cancelled"
        try:
            octets = None
            if self._direct is not None:
                try:
                    octets = octets_of(delivery)
                except DecodeError:
                    pass  # It is raised again below, and becomes the outcome
            if octets is None:
                begun = self._run(inbox, delivery, worker)
                try:
                    rest = Suspended(begun, begun.send(None))
                except StopIteration:
                    pass
            else:
                # What run_message() does, without a coroutine for each message.
                direct = True
                workers = inbox.workers
                payload: bytes = delivery.payload
                traced = payload.find(TRACE_OCTETS, 0, workers.trace_within) >= 0
                if traced:
                    CALLER.set(caller_of(payload))
                rest = workers.start(inbox, self._direct, delivery, worker, octets)
            if rest is not None and rest is not ACCEPTED:
                waits = True
                return self._finish(inbox, delivery, worker, rest, direct, traced)
            error = self.take_error(delivery, worker, rest)
            return rest
        finally:
            if not waits:
                if traced:
                    CALLER.set(None)
                self.end(worker, operation, error)

    def take_error(self, delivery: IncomingDelivery, worker: Any, rest: object) -> str | None:
        """Return why the handler, or its outcome, has failed; None if it has not. *rest* as :meth:`__call__` returns it."""
        failure: str | None = worker.failure
        worker.failure = None
        if failure is None and rest is None and delivery.local_state is not ACCEPTED:
            return error_of_outcome(delivery.local_state)
        return failure

    def end(self, worker: Any, operation: Any, error: str | None) -> None:
        """End *operation*, whose handler has run."""
        worker.operation = worker.message = None
        if operation is not None:
            # A message that the handler has accepted is settled after this: what is raised must not fail it.
            try:
                operation.leave()
                operation.end(error)
            except Exception as failure:
                log_failed("end", operation, failure)
