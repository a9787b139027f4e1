"""Request and response over links: calls, streamed replies, deadlines, giving up.

Requests leave on one sender per address; replies come on one receiver with an address that the
peer made for it, found by correlation-id. A streamed reply has a receiver of its own, so that its
credit holds back its own handler and nobody else's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from math import inf
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import trio

from ..errors import (
    AmqpError,
    CallFailed,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
)
from ..fronts.base import Payload
from ..message import Message
from ..outcomes import Accepted
from .payloads import decode_payload
from .receiving import Delivery, Receiver
from .sending import Receipt, Sender, make_message, refusal

if TYPE_CHECKING:
    from .connections import Connection

#: Message annotation of the message that ends a streamed reply.
STREAM_END: Final = "x-opt-stream-end"
#: Addresses whose senders are kept attached; the one not used for longest goes first.
_SENDERS_MAX: Final = 256
#: Requests to one address that wait for an outcome at the same time.
_PENDING_MAX: Final = 4096


class _Call(Receipt):
    """A request under way: done when its reply is here, or when there will be none."""

    __slots__ = ("_caller", "failure", "key", "reply")

    def __init__(self, sender: Sender, payload: Payload, key: str) -> None:
        super().__init__(sender, payload, 0)
        self.key = key
        self.reply: Delivery | None = None
        self.failure: AmqpError | None = None
        self._caller: trio.lowlevel.Task | None = None

    def answer(self, reply: Delivery) -> None:
        """The reply has come, maybe before the outcome of the request."""
        self.reply = reply
        self._wake()

    def _resume(self) -> None:
        super()._resume()
        if self._error is not None:
            self.failure = self._error
        elif type(self._outcome) is not Accepted:
            assert self._outcome is not None
            self.failure = refusal(self._outcome)
        else:
            return  # accepted: the reply is on its way
        self._wake()

    def lose(self, error: AmqpError) -> None:
        """There will be no reply."""
        if self.reply is None and self.failure is None:
            self.failure = error
            self._wake()

    def _wake(self) -> None:
        if self._caller is not None:
            caller, self._caller = self._caller, None
            trio.lowlevel.reschedule(caller)

    async def wait(self) -> Delivery:
        """Wait for the reply. Cancelled, the caller gives the request up."""
        if self.reply is None and self.failure is None:
            self._caller = trio.lowlevel.current_task()

            def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
                self._caller = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if self.reply is None:
            assert self.failure is not None
            raise self.failure
        return self.reply


class _ReplyReceiver(Receiver):
    """Hands replies to the calls that wait for them; nobody takes them one by one."""

    def __init__(self, requests: Requests, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._requests = requests

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        super().deliver(link, deliveries)
        while (delivery := self.receive_nowait()) is not None:
            if not delivery.presettled:
                delivery.accept()
            self._requests.on_reply(delivery)

    def on_detached(self, link: Any, error: Any, closed: bool) -> None:
        super().on_detached(link, error, closed)
        self._requests.on_replies_lost()


class Requests:
    """The calls of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._calls: dict[str, _Call] = {}
        self._senders: OrderedDict[str, Sender] = OrderedDict()
        self._replies: _ReplyReceiver | None = None
        self._prefix = token_hex(8)
        self._numbers = count(1)

    # --- what the connection says -----------------------------------------------------------

    def lose(self, error: ConnectionLost) -> None:
        """The connection is gone for good."""
        for call in list(self._calls.values()):
            call.lose(error)

    def on_replies_lost(self) -> None:
        """The reply address is gone, and with it every reply that was under way."""
        error = ConnectionLost("the connection was lost before the reply came")
        for call in list(self._calls.values()):
            call.lose(error)
        if self._replies is not None and self._replies.closed:
            self._replies = None

    def on_reply(self, delivery: Delivery) -> None:
        """A reply; one that nobody waits for any more is dropped."""
        try:
            key = delivery.message.correlation_id
        except DecodeError:
            return
        call = self._calls.get(key) if isinstance(key, str) else None
        if call is not None:
            call.answer(delivery)

    # --- calling -------------------------------------------------------------------------

    async def call(
        self,
        address: str,
        args: tuple[Any, ...],
        reply: Any,
        within: float | None,
        properties: Mapping[str, Any],
    ) -> Any:
        """See :meth:`Connection.call`."""
        if within is None:
            return self._result(await self._call(address, args, None, properties), reply)
        answer: Delivery | None = None
        deadline = trio.current_time() + within
        with trio.CancelScope(deadline=deadline):
            answer = await self._call(address, args, deadline, properties)
        if answer is None:
            raise DeadlineExceeded(f"{address!r} did not answer within {within:g} s")
        return self._result(answer, reply)

    async def _call(
        self,
        address: str,
        args: tuple[Any, ...],
        deadline: float | None,
        properties: Mapping[str, Any],
    ) -> Delivery:
        sender = await self._sender(address)
        replies = await self._reply_address()
        while sender.pending >= sender.max_pending:
            await sender.wait_for_room()
        call = self._request(sender, replies, args, deadline, properties)
        self._calls[call.key] = call
        try:
            sender.submit(call)
            return await call.wait()
        finally:
            del self._calls[call.key]
            if call.reply is None:
                call.give_up()

    def _request(
        self,
        sender: Sender,
        replies: Receiver,
        args: tuple[Any, ...],
        deadline: float | None,
        properties: Mapping[str, Any],
    ) -> _Call:
        key = f"{self._prefix}-{next(self._numbers)}"
        own: dict[str, Any] = {"message_id": key, "reply_to": replies.address, **properties}
        if deadline is not None:
            own["ttl_ms"] = max(1, round((deadline - trio.current_time()) * 1000))
        payload = None if not args else args[0] if len(args) == 1 else list(args)
        if isinstance(payload, Message):
            message = payload.replace(**own)
        else:
            message = make_message(payload, own)
        return _Call(sender, message.encode(), key)

    async def stream(
        self,
        address: str,
        args: tuple[Any, ...],
        reply: Any,
        within: float | None,
        credit: int,
        properties: Mapping[str, Any],
    ) -> AsyncIterator[Any]:
        """See :meth:`Connection.stream`."""
        deadline = inf if within is None else trio.current_time() + within
        sender = await self._sender(address)
        async with self._own_replies(credit, deadline) as replies:
            call = self._request(
                sender, replies, args, None if within is None else deadline, properties
            )
            finished = False
            try:
                sender.submit(call)
                while True:
                    delivery = await self._next(replies, call, deadline)
                    if delivery is None:
                        raise DeadlineExceeded(f"{address!r} did not finish within {within:g} s")
                    with delivery:
                        message = delivery.message
                        if STREAM_END in message.message_annotations:
                            finished = True
                            return
                        value = self._result(delivery, reply)
                    if message.group_sequence is None:
                        # One reply instead of a stream.
                        finished = True
                        yield value
                        return
                    yield value
            except CallFailed:
                finished = True
                raise
            finally:
                if not finished:
                    call.give_up()

    @asynccontextmanager
    async def _own_replies(self, credit: int, deadline: float) -> AsyncIterator[Receiver]:
        replies = self._connection.receiver(dynamic=True, credit=credit)
        with trio.CancelScope(deadline=deadline) as scope:
            await replies.wait_attached()
        if scope.cancelled_caught:
            await replies.close()
            raise DeadlineExceeded("there was no answer within the deadline")
        try:
            yield replies
        finally:
            with trio.CancelScope(shield=True):
                await replies.close()

    @staticmethod
    async def _next(replies: Receiver, call: _Call, deadline: float) -> Delivery | None:
        """The next part of a streamed reply; None if the deadline has passed."""
        if (delivery := replies.receive_nowait()) is not None:
            return delivery
        if call.failure is not None:
            raise call.failure
        found: Delivery | None = None
        failure: AmqpError | None = None

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal failure
            try:
                await call.wait()
            except AmqpError as error:
                failure = error
                scope.cancel()

        with trio.CancelScope(deadline=deadline):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, nursery.cancel_scope)
                try:
                    found = await replies.receive()
                except AmqpError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        if found is None and failure is not None:
            raise failure
        return found

    # --- links ---------------------------------------------------------------------------

    async def _sender(self, address: str) -> Sender:
        sender = self._senders.get(address)
        if sender is None or sender.closed:
            sender = self._connection.sender(address, max_pending=_PENDING_MAX, keep_waiting=False)
            self._senders[address] = sender
            await self._make_room()
        else:
            self._senders.move_to_end(address)
        try:
            await sender.wait_attached()
        except AmqpError:
            if self._senders.get(address) is sender:
                del self._senders[address]
            raise
        return sender

    async def _make_room(self) -> None:
        """Detach the senders that have not been used for longest, if they are idle."""
        for address, sender in list(self._senders.items())[: -_SENDERS_MAX or None]:
            if len(self._senders) <= _SENDERS_MAX:
                return
            if not sender.pending:
                del self._senders[address]
                await sender.close()

    async def _reply_address(self) -> Receiver:
        replies = self._replies
        if replies is None or replies.closed:
            connection = self._connection
            session = connection.default_session
            replies = _ReplyReceiver(
                self,
                session,
                None,
                name=connection.new_name("replies"),
                dynamic=True,
                credit=1000,
            )
            self._replies = replies
            session.add(replies)
        await replies.wait_attached()
        return replies

    # --- replies -------------------------------------------------------------------------

    @staticmethod
    def _result(delivery: Delivery, kind: Any) -> Any:
        message = delivery.message
        properties = message.application_properties
        if properties:
            status = properties.get("statusCode")
            condition = properties.get("errorCondition")
            if condition is not None or (isinstance(status, int) and status >= 300):
                description = str(properties.get("statusDescription") or "")
                if status == 408:
                    raise DeadlineExceeded(description or "the node's deadline passed")
                raise CallFailed(description, condition=str(condition) if condition else None)
        if kind is Message:
            return message
        if kind is Any and message.body_kind is None:
            return None
        return decode_payload(message, kind)
