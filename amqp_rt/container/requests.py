"""Requests and responses over links: calls, streamed replies, deadlines, cancellation.

Requests are sent by one sender per address. Replies arrive on one link, at an address that the peer
creates for it, and are matched by correlation-id. A streamed reply has its own link, so that its
credit limits only its own handler.

A caller that is cancelled, or whose deadline has passed, settles the request: the other side then
cancels its handler. A reply that arrives later is dropped, and its credit is given again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import uuid4

import trio

from ..codec.plain_messages import PlainMessage, PlainReader
from ..errors import (
    AmqpError,
    CallFailed,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    UnreadableReply,
)
from ..fronts.base import IncomingDelivery, ReceivingLink
from ..message import MESSAGE_FORMAT, Message, write_header
from ..outcomes import ACCEPTED, Error
from ..termini import DeleteOnClose, Source, Target
from ..values import Symbol
from .callers import CALLER
from .codecs import Codecs, Decode
from .composing import build_message
from .credit import CreditWindow
from .engines import EngineSession
from .envelopes import Envelopes
from .item_sending import ITEMS_PENDING_MAX, STREAM_END, SendingItems, StreamedItems
from .links import LinkHandle, fresh
from .payloads import Readable, decode_payload
from .pending_calls import PendingCall
from .sending import Sender

if TYPE_CHECKING:
    from .connections import Connection, Session

#: Addresses whose senders are kept attached; beyond these the least recently used idle ones are
#: detached.
_SENDERS_MAX: Final = 64
#: Requests to one address that may be without an outcome at the same time.
_PENDING_MAX: Final = 4096
#: Answered requests that the peer has not settled; beyond these we settle the oldest ourselves.
_ANSWERED_MAX: Final = 256
#: Credit for replies; each reply is processed as it arrives.
_REPLY_CREDIT: Final = 1000
#: Links of streamed replies that are kept attached for the next stream.
_IDLE_STREAMS_MAX: Final = 8


class Outgoing:
    """Request of a call under policies, of which each attempt sends one message."""

    __slots__ = ("address", "args", "deadline", "left", "own", "properties")

    def __init__(
        self,
        address: str,
        args: tuple[Any, ...],
        deadline: float,
        properties: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        self.address = address
        self.args = args
        #: In trio's clock; infinite without one.
        self.deadline = deadline
        self.properties = properties
        #: The properties that the application gave, without the trace context of its caller.
        self.own = own
        #: Whether octets of the last attempt may have reached the peer.
        self.left = False

    def copy(self) -> Outgoing:
        """Return a request of its own for an attempt at the same time."""
        return Outgoing(self.address, self.args, self.deadline, self.properties, self.own)


class _ReplyLink(LinkHandle):
    """Link from an address that the peer creates for it."""

    def __init__(self, session: Session, name: str, credit: int) -> None:
        super().__init__(session, None, name)
        self._credit = credit
        self._window: CreditWindow | None = None

    def _attach_on(self, core: EngineSession) -> Any:
        return core.attach_receiver(
            self.name,
            self,
            source=Source(
                dynamic=True,
                dynamic_node_properties={Symbol("lifetime-policy"): DeleteOnClose()},
            ),
            target=Target(),
        )

    def _begin(self, link: Any) -> None:
        self.address = link.source.address if link.source is not None else None
        self._window = CreditWindow(link, messages=self._credit)
        self._window.opened()

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Process replies that have arrived."""
        raise NotImplementedError

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: replies are not streamed."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: we settle first."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Give credit again for a reply that may have been aborted."""
        if self._window is not None:
            self._window.freed(0, 0)


class _Replies(_ReplyLink):
    """Link of replies, which passes them to the waiting calls."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name, _REPLY_CREDIT)
        self.calls: dict[str, PendingCall] = {}
        self._reader = PlainReader()

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Pass arrived replies to their calls, and drop those without one."""
        window, calls, read = self._window, self.calls, self._reader.read
        for each in deliveries:
            if not each.settled:
                each.settle(ACCEPTED)
            if each.message_format == MESSAGE_FORMAT:
                plain = read(each.payload)
                if plain is not None:
                    call = calls.get(plain.key)
                    if (
                        call is not None
                        and call.reply is None
                        and plain.properties.correlation_id is not None
                    ):
                        # As PendingCall.answer() does, without another call for each reply.
                        call.reply = plain
                        caller = call.caller
                        if caller is not None:
                            call.caller = None
                            trio.lowlevel.reschedule(caller)
                    continue
                try:
                    message = Message.decode(each.payload)
                    key = message.properties.correlation_id
                except DecodeError:
                    key = None
                if isinstance(key, str) and (call := calls.get(key)) is not None:
                    call.answer(message)
        if window is not None:
            window.passed(len(deliveries), sum([len(each.payload) for each in deliveries]))

    def _interrupted(self, error: Error | None) -> None:
        super()._interrupted(error)
        why = "" if error is None else f": {error.description or error.condition}"
        lost = ConnectionLost(f"the connection was lost before the reply came{why}")
        for call in list(self.calls.values()):
            if call.raw is not None:
                call.lose(lost)

    def _fail_waiting(self, error: AmqpError) -> None:
        for call in list(self.calls.values()):
            call.lose(error)


class StreamLink(_ReplyLink):
    """Link of one streamed reply at a time."""

    def __init__(self, session: Session, name: str, credit: int) -> None:
        super().__init__(session, name, credit)
        self.credit = credit
        self.call: PendingCall | None = None
        self._inbox: deque[IncomingDelivery] = deque()

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Queue parts that have arrived, and wake the reader."""
        if self._window is not None:
            self._window.took(len(deliveries), sum([len(each.payload) for each in deliveries]))
        self._inbox += deliveries
        if self.call is not None:
            self.call.wake()
        else:
            self.clear()

    def take(self) -> Message | None:
        """Return the next part of our reply that has arrived, or None.

        Raises:
            UnreadableReply: The part is malformed.
        """
        while self._inbox:
            raw = self._inbox.popleft()
            self._freed(raw)
            if raw.message_format != MESSAGE_FORMAT:
                continue
            try:
                message = Message.decode(raw.payload)
            except DecodeError as error:
                raise _unreadable(error) from None
            if self.call is not None and message.correlation_id == self.call.key:
                return message
        return None

    def clear(self) -> None:
        """Drop parts of a reply that has been abandoned."""
        while self._inbox:
            self._freed(self._inbox.popleft())

    def _freed(self, raw: IncomingDelivery) -> None:
        if not raw.settled:
            raw.settle(ACCEPTED)
        if self._window is not None and raw.link is self._window.link:
            self._window.freed(1, len(raw.payload))

    def _interrupted(self, error: Error | None) -> None:
        super()._interrupted(error)
        self._window = None
        if self.call is not None:
            why = "" if error is None else f": {error.description or error.condition}"
            self.call.lose(ConnectionLost(f"the connection was lost before the reply ended{why}"))

    def _fail_waiting(self, error: AmqpError) -> None:
        if self.call is not None:
            self.call.lose(error)


def _ttl_ms(deadline: float) -> int | None:
    """Return the milliseconds until *deadline*, at least 1, as the ``ttl`` of a request; None if it has no end."""
    return None if deadline == inf else max(1, round((deadline - trio.current_time()) * 1000))


class Requests:
    """Calls of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.codecs: Codecs = connection.container.codecs
        self._senders: OrderedDict[str, Sender] = OrderedDict()
        #: Number of tasks that wait for each sender, or start a stream with it.
        self._awaited: Counter[Sender] = Counter()
        self._replies: _Replies | None = None
        self._idle: list[StreamLink] = []
        self._answered: deque[PendingCall] = deque()
        # Keys have the form of UUIDs: a random prefix and a number.
        self._prefix = f"{uuid4()}"[:24]
        self._numbers = count(1)
        #: Distinguishes the calls of this connection from all others.
        self.identity = self._prefix
        self._envelopes = Envelopes("message_id", "reply_to")

    # --- calling -------------------------------------------------------------------------

    async def call(
        self,
        address: str,
        args: tuple[Any, ...],
        kind: Any,
        within: float | None,
        properties: Mapping[str, Any],
    ) -> Any:
        """Send a request and wait for its reply; see :meth:`Connection.call`."""
        caller = CALLER.get()
        if caller is not None:
            within = caller.within(within)
            properties = caller.traced(args, properties)
        if within is None:
            return result(await self._call(address, args, inf, properties), kind)
        reply: Readable | None = None
        deadline = trio.current_time() + within
        with trio.CancelScope(deadline=deadline):
            reply = await self._call(address, args, deadline, properties)
        if reply is None:
            raise DeadlineExceeded(f"{address!r} did not answer within {within:g} s")
        return result(reply, kind)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended permanently: no attempt can succeed."""
        return self._connection.state == "closed"

    async def attempt(self, outgoing: Outgoing) -> Message:
        """Send *outgoing* once and return its reply.

        Raises:
            AmqpError: As :meth:`Connection.call`, except for replies that cannot be decoded.
        """
        reply: Readable | None = None
        address, deadline = outgoing.address, outgoing.deadline
        if deadline == inf:
            reply = await self._call(address, outgoing.args, inf, outgoing.properties, outgoing)
            return answer_of(reply)
        with trio.CancelScope(deadline=deadline):
            reply = await self._call(
                address, outgoing.args, deadline, outgoing.properties, outgoing
            )
        if reply is None:
            raise DeadlineExceeded(f"{address!r} did not answer in time")
        return answer_of(reply)

    async def _call(
        self,
        address: str,
        args: tuple[Any, ...],
        deadline: float,
        properties: Mapping[str, Any],
        outgoing: Outgoing | None = None,
    ) -> Readable:
        if args and type(args[0]) is StreamedItems:
            if outgoing is not None or len(args) > 1:
                raise TypeError(
                    "a stream is the only argument of its call, and cannot be sent twice: call it without policies"
                )
            return await self._call_with_items(address, args[0], deadline, properties)
        while True:
            sender = self._senders.get(address)
            replies = self._replies
            if (
                sender is None
                or replies is None
                or not replies.attached
                or not sender.takes_now(_PENDING_MAX)
            ):
                sender = await self._sender(address)
                replies = await self._reply_link()
                continue
            self._senders.move_to_end(address)
            call = self._request(sender, replies.address, args, deadline, properties)
            replies.calls[call.key] = call
            try:
                sender.submit(call)
                if call.failure is None:
                    # As in park(), without another coroutine for each call.
                    call.caller = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(call.abort)
            finally:
                del replies.calls[call.key]
                if outgoing is not None:
                    outgoing.left = call.raw is not None
                if call.reply is None:
                    call.give_up()
                elif not call.done:
                    # Also if we were cancelled in the pass in which the reply arrived.
                    self._settle_later(call)
            if call.reply is not None:
                return call.reply
            assert call.failure is not None
            if not (call.raw is None and self._connection.state == "recovering"):
                raise fresh(call.failure)
            # The request had not been sent: send it on the next connection, with its new reply
            # address.

    async def _call_with_items(
        self, address: str, items: StreamedItems, deadline: float, properties: Mapping[str, Any]
    ) -> Readable:
        """Send *items* on a link of their own, and return the reply."""
        sender = self._new_sender(address, ITEMS_PENDING_MAX)
        call = PendingCall(sender, self._new_key())
        replies: _Replies | None = None

        async def begin() -> Mapping[str, Any]:
            """Return the properties of the request, with the address of the link of replies as it is now."""
            nonlocal replies
            while True:
                await sender.wait_attached()
                found = await self._reply_link()
                if sender.attached:
                    break
            if replies is not None:
                del replies.calls[call.key]
            replies = found
            replies.calls[call.key] = call
            return self._own_properties(call, replies.address, _ttl_ms(deadline), properties)

        try:
            # No item is taken for a node that refuses the link.
            await begin()
            sending = SendingItems(call, sender, items, begin, properties, self.codecs)
            return await sending.run()
        finally:
            if replies is not None:
                del replies.calls[call.key]
            if call.reply is None:
                call.give_up()
            sender.abandon()

    def _new_key(self) -> str:
        return f"{self._prefix}{next(self._numbers):012x}"

    def _own_properties(
        self,
        call: PendingCall,
        reply_to: str | None,
        ttl_ms: int | None,
        properties: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return *properties* of a request with those that identify its reply."""
        if taken := properties.keys() & {"message_id", "reply_to", "correlation_id"}:
            raise ValueError(f"{min(taken)} is how a call finds its reply: leave it out")
        own: dict[str, Any] = {"message_id": call.key, "reply_to": reply_to}
        if ttl_ms is not None:
            own["ttl_ms"] = ttl_ms
        return {**properties, **own, "correlation_id": None}

    def _request(
        self,
        sender: Sender,
        reply_to: str | None,
        args: tuple[Any, ...],
        deadline: float,
        properties: Mapping[str, Any],
    ) -> PendingCall:
        # _new_key and _ttl_ms, written out: each call of a function counts for the rate of requests.
        call = PendingCall(sender, f"{self._prefix}{next(self._numbers):012x}")
        ttl_ms = None
        if deadline != inf:
            ttl_ms = max(1, round((deadline - trio.current_time()) * 1000))
        payload = None if not args else args[0] if len(args) == 1 else list(args)
        if not properties and not isinstance(payload, Message):
            encoded = self._envelopes.encode(call.key, reply_to, payload, self.codecs.encoding)
            if ttl_ms is not None:
                header = bytearray()
                write_header(header, ttl_ms=ttl_ms)
                encoded = b"".join((header, encoded))
            call.payload = encoded
            return call
        message = build_message(
            payload,
            self._own_properties(call, reply_to, ttl_ms, properties),
            self.codecs.encoding,
        )
        call.payload = message.encode()
        return call

    def _settle_later(self, call: PendingCall) -> None:
        """Let the peer settle an answered request, but settle the oldest beyond the limit."""
        self._answered.append(call)
        if len(self._answered) > _ANSWERED_MAX:
            self._answered.popleft().give_up()

    # --- links ---------------------------------------------------------------------------

    def _new_sender(self, address: str, max_pending: int) -> Sender:
        """Open a sender of requests to *address* with at most *max_pending* of them under way."""
        connection = self._connection
        session = connection.default_session
        sender = Sender(
            session,
            address,
            name=connection.new_name(address),
            max_pending=max_pending,
            keep_waiting=False,
        )
        # An accepted request only notes that, like a message: the reply follows.
        sender._own_receipts = PendingCall
        session.add(sender)
        return sender

    async def _sender(self, address: str) -> Sender:
        """Return the sender to *address*, attached and with room for a request."""
        sender = self._senders.get(address)
        if sender is None or sender.closed:
            sender = self._new_sender(address, _PENDING_MAX)
            self._senders[address] = sender
            self._make_room()
        with self._kept(sender):
            try:
                await sender.wait_attached()
                await sender.wait_for_room()
            except AmqpError:
                if self._senders.get(address) is sender:
                    del self._senders[address]
                raise
        return sender

    @contextmanager
    def _kept(self, sender: Sender) -> Iterator[None]:
        """Keep *sender* from being detached as idle until the waiting task can use it."""
        self._awaited[sender] += 1
        try:
            yield
        finally:
            self._awaited[sender] -= 1
            if not self._awaited[sender]:
                del self._awaited[sender]

    def _make_room(self) -> None:
        """Detach the least recently used senders beyond the limit, if they are idle."""
        surplus = len(self._senders) - _SENDERS_MAX
        for address, sender in list(self._senders.items())[: max(0, surplus)]:
            if sender in self._awaited:
                continue
            if not sender.pending and (sender.attached or sender.closed):
                del self._senders[address]
                sender.abandon()

    async def _reply_link(self) -> _Replies:
        """Return the link of replies, attached."""
        replies = self._replies
        if replies is None or replies.closed:
            session = self._connection.default_session
            replies = _Replies(session, self._connection.new_name("replies"))
            session.add(replies)
            self._replies = replies
        await replies.wait_attached()
        return replies

    # --- streams -------------------------------------------------------------------------

    def stream(
        self,
        address: str,
        args: tuple[Any, ...],
        kind: Any,
        within: float | None,
        credit: int,
        properties: Mapping[str, Any],
    ) -> ReplyStream:
        """Create a stream; see :meth:`Connection.stream`."""
        if credit < 1:
            raise ValueError(f"credit must be at least 1, not {credit}")
        caller = CALLER.get()
        given = properties
        if caller is not None:
            within = caller.within(within)
            given = caller.traced(args, properties)
        deadline = inf if within is None else trio.current_time() + within
        reply = StreamedReply(self, address, args, deadline, credit, given, properties)
        return ReplyStream(reply, kind)

    async def begin(self, stream: StreamedReply) -> tuple[StreamLink, PendingCall]:
        """Send the request of *stream*. If cancelled, nothing was sent."""
        sender = await self._sender(stream.address)
        parts = None
        for each in self._idle:
            if each.attached and each.credit == stream.credit:
                parts = each
                self._idle.remove(each)
                break
        if parts is None:
            session = self._connection.default_session
            name = self._connection.new_name("stream")
            parts = StreamLink(session, name, stream.credit)
            session.add(parts)
        try:
            while not parts.attached:
                with self._kept(sender):
                    await parts.wait_attached()
                if not sender.takes_now(_PENDING_MAX):
                    # The sender may have changed while the reply link attached.
                    sender = await self._sender(stream.address)
            call = self._request(
                sender, parts.address, stream.args, stream.deadline, stream.properties
            )
            parts.call = call
            sender.submit(call)
        except BaseException:
            parts.call = None
            parts.abandon()
            raise
        return parts, call

    def end(self, parts: StreamLink, call: PendingCall, *, complete: bool) -> None:
        """End a stream, and keep or detach its link. Not a checkpoint."""
        parts.call = None
        if not complete:
            call.give_up()
        elif not call.done:
            self._settle_later(call)
        parts.clear()
        if parts.attached and len(self._idle) < _IDLE_STREAMS_MAX:
            self._idle.append(parts)
        else:
            parts.abandon()


class StreamedReply:
    """Streamed reply, from the request to its end."""

    def __init__(
        self,
        requests: Requests,
        address: str,
        args: tuple[Any, ...],
        deadline: float,
        credit: int,
        properties: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        self.address = address
        self.args = args
        self.deadline = deadline
        self.credit = credit
        self.properties = properties
        #: The properties that the application gave, without the trace context of its caller.
        self.own = own
        self.over = False
        self.reading = False
        self._requests = requests
        self._running: tuple[StreamLink, PendingCall] | None = None

    async def next(self) -> Message | None:
        """Return the next part; None at the end. Cancelling loses nothing.

        Raises:
            DeadlineExceeded: The stream did not end in time.
            AmqpError: The stream failed.
        """
        try:
            found = await self._next()
        except AmqpError:
            self.end(complete=False)
            raise
        if found is None:
            self.end(complete=True)
        return found

    async def _next(self) -> Message | None:
        with trio.CancelScope(deadline=self.deadline):
            if self._running is None:
                self._running = await self._requests.begin(self)
            parts, call = self._running
            while True:
                message = parts.take()
                if message is not None:
                    return None if STREAM_END in message.message_annotations else message
                if call.failure is not None:
                    raise fresh(call.failure)
                await call.park()
        raise DeadlineExceeded(f"{self.address!r} did not finish its reply in time")

    def end(self, *, complete: bool) -> None:
        """End the stream; unless it is *complete*, the handler is cancelled."""
        if not self.over:
            self.over = True
            if self._running is not None:
                parts, call = self._running
                self._running = None
                self._requests.end(parts, call, complete=complete)


class ReplyStream:
    """Parts of a streamed reply, decoded; created by ``peer.stream(...)``.

    Iterate over it once. The request is sent when the first part is requested. If the stream is not
    read to the end, its handler is cancelled when the object is deleted, or explicitly by
    ``async with`` or :meth:`aclose`.
    """

    def __init__(self, stream: StreamedReply, kind: Any) -> None:
        self._stream = stream
        self._kind = kind
        self._turn = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next part. Cancelling loses nothing: ask again, or close the stream.

        Raises:
            CallFailed: The handler failed; the parts that it had yielded before have been returned.
            DeadlineExceeded: The stream did not end in time.
            ConnectionLost: The connection was lost; the stream cannot be continued.
            UnreadableReply: A part is not of the requested type.
            BusyResourceError: Another task is reading the stream.
        """
        stream = self._stream
        if stream.reading:
            raise trio.BusyResourceError("another task is reading this stream")
        if stream.over:
            raise StopAsyncIteration
        stream.reading = True
        try:
            message = await stream.next()
        finally:
            stream.reading = False
        if message is None:
            raise StopAsyncIteration
        try:
            value = result(message, self._kind)
        except AmqpError:
            stream.end(complete=False)
            raise
        if message.group_sequence is None:
            # A whole reply instead of a stream.
            stream.end(complete=True)
        self._turn += 1
        if self._turn % 64 == 0:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return value

    async def aclose(self) -> None:
        """End the stream, and cancel its handler if it is still running.

        If cancelled, the stream has ended all the same.
        """
        self._stream.end(complete=False)
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        """Return the stream. Not a checkpoint."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the stream as :meth:`aclose` does. Not a checkpoint."""
        self._stream.end(complete=False)

    def __del__(self) -> None:
        # The loop was left early; ending the stream does not wait.
        self._stream.end(complete=False)

    def __repr__(self) -> str:
        return f"<ReplyStream from {self._stream.address!r}{', over' if self._stream.over else ''}>"


class _Decoded(NamedTuple):
    """Type of replies with its decoding."""

    decode: Decode
    kind: Any


def check_reply(kind: Any, codecs: Codecs) -> Any:
    """Check that replies can be decoded as *kind*, the ``reply=`` of a call.

    Returns:
        What replies are decoded as: *kind*, or with its decoding if that is not the usual one.

    Raises:
        TypeError: Replies cannot; the error names the part of *kind* that is not supported.
    """
    try:
        return codecs.replies[kind]
    except (KeyError, TypeError):
        pass  # Used for the first time; or an annotation that is not hashable.
    if kind is Message:
        return kind
    try:
        decode = codecs.decoding(kind)
    except TypeError as error:
        raise TypeError(f"reply=: {error}") from None
    checked = kind if decode is decode_payload else _Decoded(decode, kind)
    codecs.remember_reply(kind, checked)
    return checked


def result(message: Readable, kind: Any) -> Any:
    """Return the content of a reply as *kind*.

    Raises:
        CallFailed: The reply reports that the request failed.
        DeadlineExceeded: The reply reports that the node's deadline passed.
        UnreadableReply: The reply cannot be decoded as *kind*.
    """
    # A plain message has no application-properties, so it reports no failure.
    try:
        if type(message) is not PlainMessage:
            message = answer_of(message)
            if kind is Message:
                return message
        elif kind is bytes and (octets := message.octets) is not None:
            return octets
        elif kind is Message:
            return Message.decode(message.payload)
        if type(kind) is _Decoded:
            return kind.decode(message, kind.kind)
        return decode_payload(message, kind)
    except DecodeError as error:
        raise _unreadable(error) from error.__cause__


def decode_reply(message: Message, kind: Any) -> Any:
    """Return the content of a reply that is a success as *kind*.

    Raises:
        UnreadableReply: The reply cannot be decoded as *kind*.
    """
    try:
        if kind is Message:
            return message
        if type(kind) is _Decoded:
            return kind.decode(message, kind.kind)
        return decode_payload(message, kind)
    except DecodeError as error:
        raise _unreadable(error) from error.__cause__


def _unreadable(error: DecodeError) -> UnreadableReply:
    return UnreadableReply(error.description, condition=error.condition, info=error.info)


def answer_of(reply: Readable) -> Message:
    """Return *reply* as a message that reports no failure.

    Raises:
        CallFailed: The reply reports that the request failed.
        DeadlineExceeded: The reply reports that the node's deadline passed.
    """
    if isinstance(reply, PlainMessage):
        return Message.decode(reply.payload)
    message = reply
    properties = message.application_properties
    if not properties:
        return message
    status = properties.get("statusCode")
    condition = properties.get("errorCondition")
    if condition is not None or (isinstance(status, int) and status >= 300):
        description = str(properties.get("statusDescription") or "the request failed")
        if status == 408:
            raise DeadlineExceeded(description)
        info: dict[object, object] = {} if status is None else {"statusCode": status}
        body = message.body if message.body_kind == "value" else None
        if isinstance(body, Mapping) and "errors" in body:
            info["errors"] = body["errors"]
        raise CallFailed(
            description, condition=None if condition is None else str(condition), info=info
        )
    return message
