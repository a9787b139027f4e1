"""Answers to requests, and the links on which they are sent.

A request names its reply address. This may be an address that this container created for the
caller's link, an address of a host, or that of a link of the caller's own connection; see
:meth:`Replies.path`. A reply waits for the credit of the reply link, and occupies the slot of its
handler meanwhile, so that a caller that does not read its replies slows down only itself.

A caller gives up by settling its request before there is an outcome, or by detaching. Its handler
is cancelled then, as it is when the request's deadline (``ttl``, counted from arrival) has passed.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from secrets import token_urlsafe
from typing import Any, Final, Protocol, cast
from weakref import WeakValueDictionary

import trio

from ..addresses import DIRECT_REPLY
from ..errors import (
    AmqpError,
    DeadlineExceeded,
    DecodeError,
    EncodeError,
    LinkDetached,
    LocalProtocolError,
    UnreadableReply,
)
from ..fronts.base import (
    SND_MIXED,
    SND_SETTLED,
    SND_UNSETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingEndpoint,
    ReceivingLink,
    SendingLink,
)
from ..fronts.links import FrontReceivingLink
from ..message import MESSAGE_FORMAT, Message, MessageId, Properties
from ..outcomes import ACCEPTED, RELEASED, Error, Outcome, Received, Rejected, rejected
from ..security.access import Rights
from ..termini import DeleteOnClose, Source, Target
from ..trace_context import NO_TRACE, TRACE_OCTETS, with_trace
from ..transactions import DeliveryState
from ..values import Int, Symbol
from .callers import CALLER, caller_of
from .composing import make_message
from .credit import CreditWindow
from .envelopes import Envelopes
from .failures import log_failure, name_of_failure, only_cancelled
from .handling import ABANDONED, TURN_MESSAGES, TURN_S, settle_if_open
from .home import Home
from .item_sending import STREAM_END
from .item_streams import StreamInbox
from .payloads import Readable
from .permissions import Permissions
from .profiles import address_for
from .raising import RaisedOutcome, Reject
from .routes import NO_DEADLINE, Deadline, ReplyPath, Route, RouteBinding
from .serving import Inbox, RunningRequests, Worker, count, read_message

log = logging.getLogger("amqp_rt.handlers")

#: Link property of both links of a pair, the ``reply-to`` that stands for the other link, and the
#: capability for pairs (link pairing 1.0).
PAIRED: Final = "paired"
PAIRED_REPLY: Final = "$me"
LINK_PAIR_CAPABILITY: Final = "LINK_PAIR_V1_0"
#: Least ``statusCode`` of failures that are none of the caller, and that of conditions without another.
_FAILURE_STATUS: Final = 500
#: ``statusCode`` of a failure reply by its condition; 500 for any other.
STATUS: Final = {
    "amqp:decode-error": 400,
    "amqp:invalid-field": 400,
    "amqp:precondition-failed": 400,
    "amqp:link:message-size-exceeded": 413,
    "amqp:unauthorized-access": 403,
    "amqp:not-allowed": 403,
    "amqp:not-found": 404,
    "amqp:timeout": 408,
    "amqp:resource-limit-exceeded": 503,
}


class ReplyLink:
    """Sending link for single messages: replies, or messages relayed from other links.

    Messages without credit wait here in order. The number of replies is limited by the tasks that
    wait for them to leave, that of relayed messages by the credit of their incoming link.
    """

    def __init__(self, replies: Replies, address: str) -> None:
        self.address = address
        self._replies = replies
        self.link: SendingLink | None = None
        self._pending: deque[_Pending] = deque()
        self._over = False
        self._flushed: trio.Event | None = None
        #: Links on which other peers send to the address.
        self.forwards: dict[_Follower, None] = {}

    def on_attached(self, link: SendingLink) -> None:
        self.link = link

    def on_credit(self, link: SendingLink) -> None:
        pending = self._pending
        while pending and link.credit and link.writable:
            pending.popleft().send(link)
        if link.draining and not pending:
            link.drained()
        if self._flushed is not None and not pending and link.writable:
            self._flushed.set()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        for each in deliveries:
            if each.remote_settled or not isinstance(each.state, Received | None):
                each.settle()
                if each.context is not None:
                    # Relayed: pass the outcome to the incoming delivery.
                    outcome = RELEASED if each.state is None else each.state
                    each.context.settle(outcome)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        self._over = True
        if self._flushed is not None:
            self._flushed.set()
        gone = LinkDetached(f"the reply link of {self.address!r} is gone")
        for pending in self._pending:
            pending.fail(gone)
        self._pending.clear()
        for each in link.unsettled:
            if each.context is not None:
                each.context.settle(RELEASED)
        link.unsettled = []
        self._replies.remove(self, link)
        for forward in list(self.forwards):
            forward.address_ended()
        self._replies.home.attaching.forget(link)

    @property
    def over(self) -> bool:
        """Whether the link has ended."""
        return self._over

    def shares_session_with(self, link: ReceivingLink) -> bool:
        """Whether both links are in the same session."""
        return self.link is not None and self.link.session is link.session

    def send_nowait(self, payload: Sequence[bytes]) -> bool:
        """Send at once if possible; return whether the message was sent."""
        link = self.link
        if self._over or self._pending or link is None or not (link.credit and link.writable):
            return False
        link.send(payload, settled=link.snd_settle_mode != SND_UNSETTLED)
        return True

    async def flush(self) -> None:
        """Wait until all queued messages have left. Only one task may wait."""
        while not self._over and (
            self._pending or (self.link is not None and not self.link.writable)
        ):
            self._flushed = trio.Event()
            await self._flushed.wait()
        self._flushed = None

    async def send(self, payload: Sequence[bytes]) -> None:
        """Send when there is credit. Not a checkpoint if there is.

        If cancelled, nothing is sent.

        Raises:
            LinkDetached: The link has ended.
            LocalProtocolError: The message is larger than the peer allows.
        """
        if self.send_nowait(payload):
            return
        if self._over:
            raise LinkDetached(f"the reply link of {self.address!r} is gone")
        pending = _Reply(payload, trio.lowlevel.current_task())
        self._pending.append(pending)

        def abort(_raise_cancel: Any) -> trio.lowlevel.Abort:
            self._pending.remove(pending)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if pending.failed is not None:
            raise pending.failed

    def forward(self, delivery: IncomingDelivery, window: CreditWindow) -> None:
        """Forward a message; its outcome is passed back, and *window* is freed when it leaves."""
        relayed = _Relayed(delivery, window)
        link = self.link
        if self._over or link is None:
            relayed.fail(LinkDetached())
        elif self._pending or not (link.credit and link.writable):
            self._pending.append(relayed)
        else:
            relayed.send(link)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address!r}, {len(self._pending)} waiting>"


class DirectReplyLink(ReplyLink):
    """Reply link with an address of RabbitMQ's direct replies.

    Its receiver has unlimited credit: while it takes no message, it does not read. Publishers of protocols without
    credit cannot be held back, and their confirms and commits would wait for such a receiver; their messages are
    refused instead of waiting here.
    """

    def forward(self, delivery: IncomingDelivery, window: CreditWindow) -> None:
        link = self.link
        if (
            isinstance(delivery.link, FrontReceivingLink)
            and link is not None
            and not (link.credit and link.writable)
        ):
            # The address leads nowhere at present: protocols with exchanges return or drop such a message.
            settle_if_open(
                delivery,
                rejected("amqp:not-found", f"the receiver at {self.address!r} does not read"),
            )
            window.freed(1, len(delivery.payload))
        else:
            super().forward(delivery, window)


class _Follower(Protocol):
    """Link to an address that we created."""

    def address_ended(self) -> None:
        """Detach the link: the address was deleted."""


class _Pending:
    """Message that waits for the credit of a reply link."""

    def send(self, link: SendingLink) -> None:
        raise NotImplementedError

    def fail(self, error: AmqpError) -> None:
        raise NotImplementedError


class _Reply(_Pending):
    """Reply whose task waits for it to leave."""

    def __init__(self, payload: Sequence[bytes], task: trio.lowlevel.Task) -> None:
        self.payload = payload
        self.task = task
        self.failed: AmqpError | None = None

    def send(self, link: SendingLink) -> None:
        try:
            link.send(self.payload, settled=link.snd_settle_mode != SND_UNSETTLED)
        except LocalProtocolError as error:
            self.fail(error)
        else:
            trio.lowlevel.reschedule(self.task)

    def fail(self, error: AmqpError) -> None:
        self.failed = error
        trio.lowlevel.reschedule(self.task)


class _Relayed(_Pending):
    """Message that arrived on another link."""

    def __init__(self, delivery: IncomingDelivery, window: CreditWindow) -> None:
        self.delivery = delivery
        self.window = window

    def send(self, link: SendingLink) -> None:
        delivery = self.delivery
        settled = delivery.settled
        if link.snd_settle_mode != SND_MIXED:
            settled = link.snd_settle_mode == SND_SETTLED
        try:
            link.send(
                delivery.payload,
                delivery,
                settled=settled,
                message_format=delivery.message_format,
            )
        except LocalProtocolError as error:
            settle_if_open(delivery, Rejected(Error.of(error)))
        else:
            if settled:
                settle_if_open(delivery, ACCEPTED)  # No other outcome will follow
        self.window.freed(1, len(self.delivery.payload))

    def fail(self, error: AmqpError) -> None:
        settle_if_open(self.delivery, RELEASED)
        self.window.freed(1, len(self.delivery.payload))


class _HostReply:
    """Reply as an incoming delivery for a host: settled and complete."""

    def __init__(self, link: ReceivingLink, payload: bytes) -> None:
        self.link = link
        self.tag = b""
        self.message_format = MESSAGE_FORMAT
        self.settled = True
        self.second = False
        self.state: DeliveryState | None = None
        self.local_state: DeliveryState | None = None
        self.payload = payload
        self.complete = True
        self.aborted = False
        self.streamed = False
        self.resumed = False
        self.context: Any = None

    def read_chunks(self) -> list[bytes]:
        return []

    def settle(self, outcome: DeliveryState) -> None:
        if isinstance(outcome, Rejected):
            log.info("a reply was not taken: %s", outcome.error)

    def update(self, state: DeliveryState) -> None:
        pass


class _HostPort:
    """Link of a reply as passed to a host: it identifies the sender, but cannot be changed."""

    attached = True
    source = target = None

    def __init__(self, link: ReceivingLink) -> None:
        self.name = link.name
        self.peer = link.peer
        self.connection = link.connection

    def detach(self, error: Error | None = None, *, closed: bool = True) -> None:
        """Log the error: a reply that is refused must not end the link of its request."""
        log.info("a reply was not taken: %s", error)


class _HostPath:
    """Path of replies to an address of a host, such as a queue of the broker."""

    def __init__(
        self,
        permissions: Permissions,
        address: str,
        endpoint: ReceivingEndpoint,
        link: ReceivingLink,
    ) -> None:
        self._permissions = permissions
        self._address = address
        self._endpoint = endpoint
        self._link = link

    def send_nowait(self, payload: Sequence[bytes]) -> bool:
        # The right that the caller had when its request began may have ended since.
        refused = self._permissions.decide(self._link.peer, Rights.SEND, self._address)
        if refused is not None:
            log.info("reply not sent: to %.200r: %s", self._address, refused)
            return True
        self._endpoint.deliver(self._link, [_HostReply(self._link, b"".join(payload))])
        return True

    async def send(self, payload: Sequence[bytes]) -> None:
        self.send_nowait(payload)


class _NoPath:
    """Path of replies without a reply address: they are dropped, and the first is logged."""

    def __init__(self, binding: RouteBinding, reply_to: str | None) -> None:
        where = "no reply-to" if reply_to is None else f"the unknown reply-to {reply_to!r}"
        self._note = f"a request to {binding.address!r} has {where}: its reply is dropped"

    def send_nowait(self, payload: Sequence[bytes]) -> bool:
        if self._note:
            log.warning("%s", self._note)
            self._note = ""
        return True

    async def send(self, payload: Sequence[bytes]) -> None:
        self.send_nowait(payload)


def accept_failed(link: ReceivingLink) -> Outcome:
    """Return *accepted*: the reply alone says that the request has failed."""
    return ACCEPTED


class Replies:
    """Reply links of a container, the addresses created for them, and the requests that run."""

    def __init__(self, home: Home) -> None:
        self.home = home
        #: Links by the address that we created, to which replies may be sent from any connection.
        self.dynamic: dict[str, ReplyLink] = {}
        #: Put before the addresses that we create, so that others can find the way to this container.
        self.prefix = ""
        #: Returns the way to an address that another container created; None if the address is none.
        self.elsewhere: Callable[[str], ReplyPath | None] | None = None
        #: Returns the outcome of a request on the link that was answered with the report of a failure of ours.
        self.failed_outcome: Callable[[ReceivingLink], Outcome] = accept_failed
        #: Encodes replies.
        self.envelopes = Envelopes("correlation_id", "to")
        #: All reply links.
        self.links: set[ReplyLink] = set()
        #: Links by connection and by the address of either terminus.
        self._by_address: dict[object, dict[str, list[ReplyLink]]] = {}
        #: Links by connection and name.
        self._by_name: dict[tuple[object, str], ReplyLink] = {}
        #: Running requests by connection, for as long as it has links of requests.
        self._running: WeakValueDictionary[object, RunningRequests] = WeakValueDictionary()
        self._running_max = home.limits.requests_running_max

    def attach_dynamic(self, link: SendingLink) -> None:
        """Create an address for *link*, hard to guess, that exists as long as the link."""
        address = self.prefix + "/".join(
            (link.peer.container_id[:64], link.name[:64], token_urlsafe(16)),
        )
        self._attach_created(link, ReplyLink(self, address))

    def attach_direct(self, link: SendingLink) -> None:
        """Create an address as clients of RabbitMQ know them for *link*, which exists as long as the link."""
        # Such an address has no more than 255 octets in other protocols.
        address = f"{DIRECT_REPLY}{self.prefix}{token_urlsafe(24)}"
        self._attach_created(link, DirectReplyLink(self, address))

    def _attach_created(self, link: SendingLink, reply_link: ReplyLink) -> None:
        asked = link.source or Source()
        address = reply_link.address
        self.links.add(reply_link)
        self.dynamic[address] = reply_link
        link.accept(
            reply_link,
            source=Source(
                address=address,
                dynamic=True,
                dynamic_node_properties={Symbol("lifetime-policy"): DeleteOnClose()},
                distribution_mode="move",
                outcomes=asked.outcomes,
            ),
        )

    def attach(self, link: SendingLink, address: str, source: Source) -> None:
        """Accept *link* for replies of the rpc at *address* (see :meth:`path`)."""
        reply_link = ReplyLink(self, address)
        self.links.add(reply_link)
        by_address = self._by_address.setdefault(link.connection, {})
        for each in self._addresses(link):
            by_address.setdefault(each, []).append(reply_link)
        self._by_name[link.connection, link.name] = reply_link
        link.accept(reply_link, source=source, properties=paired_properties(link))

    @staticmethod
    def _addresses(link: SendingLink) -> set[str]:
        termini = (link.source, link.target)
        return {
            each.address for each in termini if isinstance(each, Source | Target) and each.address
        }

    def remove(self, reply_link: ReplyLink, link: SendingLink) -> None:
        """Remove a link that has ended, with its address."""
        self.links.discard(reply_link)
        if self.dynamic.get(reply_link.address) is reply_link:
            del self.dynamic[reply_link.address]
        if self._by_name.get((link.connection, link.name)) is reply_link:
            del self._by_name[link.connection, link.name]
        by_address = self._by_address.get(link.connection)
        if by_address is None:
            return
        for address, links in list(by_address.items()):
            if reply_link in links:
                links.remove(reply_link)
                if not links:
                    del by_address[address]
        if not by_address:
            del self._by_address[link.connection]

    async def flush(self) -> None:
        """Wait until all messages queued on the links have left."""
        for reply_link in list(self.links):
            await reply_link.flush()

    def path(self, binding: RouteBinding, reply_to: str | None, *, hosts: bool = True) -> ReplyPath:
        """Return the path of replies to a request.

        With a reply-to: an address that we created, an address of a host, or a link of the same
        connection with this address at either terminus, or else with this name, as some clients of CBS
        expect. Without one: the link in the same session
        whose source is the node, as clients of management and CBS expect.

        Args:
            binding: The link of the request.
            reply_to: The request's reply-to.
            hosts: Whether the caller may send to *reply_to*, so that hosts may be used.

        Raises:
            Reject: *reply_to* stands for the other link of a pair, and there is none.
        """
        if reply_to == PAIRED_REPLY:
            return self._pair(binding)
        if binding.relay is not None:
            return binding.relay if reply_to else _NoPath(binding, reply_to)
        if reply_to is not None:
            made = self.dynamic.get(reply_to)
            if made is not None:
                return made
            if hosts and self.elsewhere is not None:
                path = self.elsewhere(reply_to)
                if path is not None:
                    return path
            if hosts and self.home.hosts:
                port = cast("ReceivingLink", _HostPort(binding.link))
                for host in self.home.hosts:
                    # By the node's name, for which the right was checked, not by a URL of it.
                    endpoint = host.relay(address_for(port.peer, reply_to), port)
                    if isinstance(endpoint, Error):
                        break
                    if endpoint is not None:
                        return _HostPath(self.home.permissions, reply_to, endpoint, port)
        links = self._by_address.get(binding.link.connection, {}).get(
            reply_to or binding.address, []
        )
        if reply_to is None:
            links = [each for each in links if each.shares_session_with(binding.link)]
        elif not links:
            named = self._by_name.get((binding.link.connection, reply_to))
            return _NoPath(binding, reply_to) if named is None else named
        return links[-1] if links else _NoPath(binding, reply_to)

    def _pair(self, binding: RouteBinding) -> ReplyPath:
        """Return the other link of the pair to which the request's link belongs.

        Raises:
            Reject: The link belongs to no pair.
        """
        link = binding.link
        if is_paired(link):
            for each in self._by_address.get(link.connection, {}).get(binding.address, []):
                other = each.link
                if (
                    other is not None
                    and other.name == link.name
                    and other.session is link.session
                    and is_paired(other)
                ):
                    return each
        raise Reject(
            f"{PAIRED_REPLY} is the other half of a link pair, and this link has none",
            condition="amqp:invalid-field",
        )

    # --- requests -----------------------------------------------------------------------

    async def answer(self, inbox: Inbox, delivery: IncomingDelivery, worker: Worker) -> None:
        """Pass one request to its handler, and settle it when the reply has been passed to the reply link.

        It is rejected if it cannot be decoded. If its caller abandons it, the caller has settled it.
        """
        if delivery.context is ABANDONED:
            return
        binding = inbox.binding
        route = inbox.route
        deadline = NO_DEADLINE
        message: Readable
        key: MessageId | None
        plain = None
        if not (delivery.message_format or worker.message):
            plain = inbox.reader.read(delivery.payload)
        if plain is not None:
            # Without a header it has no deadline, and without other sections no trace context.
            message, key, reply_to = plain, plain.key, plain.properties.reply_to
            has_context = False
        else:
            try:
                message = worker.message or read_message(delivery)
                reply_to, key = message.properties.reply_to, key_of(message.properties)
                deadline = _deadline_of(delivery, message, worker)
            except (DecodeError, Reject) as error:
                _reject(inbox, delivery, worker, error)
                return
            within = inbox.workers.trace_within
            has_context = (
                deadline is not NO_DEADLINE or delivery.payload.find(TRACE_OCTETS, 0, within) >= 0
            )
        # Here a caller that gives up finds the worker, even while the worker waits.
        delivery.context = worker
        inbox.calls.add(worker)
        running: RunningRequests | None = None
        path: ReplyPath | None = None
        try:
            if binding.relay is None and not self.home.permissions.guarded:
                path = self.dynamic.get(reply_to or "")  # as in path()
            if path is None:
                try:
                    path = await self._find_path(binding, reply_to)
                except Reject as error:
                    _reject(inbox, delivery, worker, error)
                    return
            try:
                requests = inbox.running or self._running_of(inbox)
                if requests.count >= self._running_max:
                    raise _TooMany("the connection has too many requests running")
                requests.count += 1
                running = requests
                if has_context:
                    if deadline.passed:
                        raise DeadlineExceeded("the deadline passed before the request could start")
                    CALLER.set(caller_of(delivery.payload, deadline.at))
                octets = plain.octets if plain is not None and route.takes_octets else None
                if octets is not None:
                    result = route.target(octets)
                elif isinstance(inbox, StreamInbox):
                    result = inbox.open(delivery, message, deadline)
                else:
                    result = route.invoke(binding, delivery, message, deadline)
                if route.awaits or inspect.isawaitable(result):
                    result = await result
                # *accepted* is the whole answer.
                if route.streams or hasattr(type(result), "__anext__"):
                    await _stream(route, Request(self, key, reply_to, path, worker), result)
                elif result is not ACCEPTED:
                    if worker.operation is None and not isinstance(result, Message):
                        codecs = self.home.codecs.encoding
                        payload = [self.envelopes.encode(key, reply_to, result, codecs)]
                    else:
                        payload = Request(self, key, reply_to, path, worker).reply(result)
                    if not path.send_nowait(payload):
                        await _send(path, payload)
                    route.stats.sent += 1
                outcome: Outcome = ACCEPTED
            except Exception as error:
                worker.failure = name_of_failure(error)
                request = Request(self, key, reply_to, path, worker)
                outcome = await self._fail(inbox, delivery, request, error)
        except (trio.Cancelled, BaseExceptionGroup) as error:
            started = None if path is None else Request(self, key, reply_to, path, worker)
            _cancelled(inbox, delivery, worker, started)
            if isinstance(error, trio.Cancelled):
                raise
            raise only_cancelled(route, error) from None
        finally:
            delivery.context = None
            inbox.calls.discard(worker)
            if has_context:
                CALLER.set(None)
                worker.scope.deadline = inf
            if running is not None:
                running.count -= 1
        if outcome is ACCEPTED:
            route.stats.accepted += 1
        else:
            count(route.stats, outcome)
        settle_if_open(delivery, outcome)

    async def _find_path(self, binding: RouteBinding, reply_to: str | None) -> ReplyPath:
        """Return the path of replies; see :meth:`path`.

        Raises:
            Reject: See :meth:`path`.
        """
        # A reply is sent in the caller's name: only to addresses to which the caller may send.
        permissions = self.home.permissions
        hosts = (
            not permissions.guarded
            or reply_to is None
            or reply_to == PAIRED_REPLY
            or await permissions.may_send(binding.link.peer, reply_to) is None
        )
        return self.path(binding, reply_to, hosts=hosts)

    async def _fail(
        self, inbox: Inbox, delivery: IncomingDelivery, request: Request, error: Exception
    ) -> Outcome:
        """Send *error* to the caller, and return the outcome of the request."""
        if isinstance(error, _CallerGone):
            return RELEASED
        if isinstance(error, RaisedOutcome) and not isinstance(error, Reject):
            return error.outcome  # Another receiver may answer: the request itself is released
        outcome: Outcome = ACCEPTED
        # A reply of ours without an encoding, or of a node that the handler has called without a decoding, is
        # no mistake of the caller.
        if isinstance(error, AmqpError) and not isinstance(error, EncodeError | UnreadableReply):
            told = Error.of(error)
            if isinstance(error, DecodeError):
                outcome = Rejected(told)
        else:
            route = inbox.route
            route.stats.failed += 1
            where = f"on a request to {inbox.binding.address!r}"
            log_failure(inbox.binding.container, route, where, error)
            told = Error("amqp:internal-error", f"{inbox.binding.address!r} failed")
        try:
            await request.path.send(request.failure(told))
        except (LinkDetached, LocalProtocolError):
            pass  # The caller has detached
        if outcome is ACCEPTED and STATUS.get(told.condition, _FAILURE_STATUS) >= _FAILURE_STATUS:
            # A failure of ours, which the request's own outcome may report, too.
            settle_if_open(delivery, self.failed_outcome(inbox.binding.link))
        return outcome

    def _running_of(self, inbox: Inbox) -> RunningRequests:
        """Return the count of the running requests of the connection of *inbox*."""
        connection = inbox.binding.link.connection
        running = self._running.get(connection)
        if running is None:
            running = self._running[connection] = RunningRequests()
        inbox.running = running
        return running


def is_paired(link: ReceivingLink | SendingLink) -> bool:
    """Whether *link* belongs to a pair (link pairing 1.0)."""
    return any(str(name) == PAIRED and value is True for name, value in link.properties.items())


def paired_properties(link: ReceivingLink | SendingLink) -> dict[object, object] | None:
    """Return the properties of our attach for *link*: that it is paired, or None."""
    return {Symbol(PAIRED): True} if is_paired(link) else None


class Request:
    """Data of a request that its replies need."""

    __slots__ = (
        "_codecs",
        "_envelopes",
        "correlation_id",
        "path",
        "reply_to",
        "sequence",
        "trace",
    )

    def __init__(
        self,
        replies: Replies,
        key: MessageId | None,
        reply_to: str | None,
        path: ReplyPath,
        worker: Worker,
    ) -> None:
        self._codecs = replies.home.codecs.encoding
        self._envelopes = replies.envelopes
        self.correlation_id = key
        self.reply_to = reply_to
        #: Number of messages sent of a streamed reply; None if the reply is one message.
        self.sequence: int | None = None
        self.path = path
        #: Trace context that the replies carry, that of the operation of observers; usually there is none.
        self.trace = NO_TRACE if worker.operation is None else worker.operation.trace

    def reply(self, value: Any) -> list[bytes]:
        """Return the encoded reply with *value*, or the next message of a streamed one.

        Raises:
            EncodeError: *value* has no encoding.
        """
        if isinstance(value, Message):
            return with_trace(value, self.trace).replace(**self._address()).buffers()
        if self.trace:
            made = make_message(value, self._address(), self._codecs)
            return with_trace(made, self.trace).buffers()
        if self.sequence is None:
            return [self._envelopes.encode(self.correlation_id, self.reply_to, value, self._codecs)]
        return make_message(value, self._address(), self._codecs).buffers()

    def stream_end(self) -> list[bytes]:
        """Return the message without content that ends a streamed reply."""
        return Message(b"", message_annotations={STREAM_END: True}, **self._address()).buffers()

    def failure(self, error: Error) -> list[bytes]:
        """Return the reply that reports *error*; it also ends a stream. The body has the faults of the payload."""
        faults = (error.info or {}).get("errors")
        return Message(
            b"" if faults is None else {"errors": faults},
            application_properties={
                **self.trace,
                "statusCode": Int(STATUS.get(error.condition, _FAILURE_STATUS)),
                "statusDescription": error.description or "",
                "errorCondition": Symbol(error.condition),
            },
            **self._address(),
        ).buffers()

    def _address(self) -> dict[str, Any]:
        if self.sequence is None:
            return {"to": self.reply_to, "correlation_id": self.correlation_id}
        key = self.correlation_id
        return {
            "to": self.reply_to,
            "correlation_id": key,
            "group_id": key.hex() if isinstance(key, bytes) else str(key),
            "group_sequence": self.sequence & 0xFFFFFFFF,
        }


def key_of(properties: Properties) -> MessageId | None:
    """Return the correlation-id of the reply to a request with *properties*.

    The type is kept: ulong, uuid, binary and string are separate key spaces (§3.2.11).
    """
    if properties.correlation_id is None:
        return properties.message_id
    return properties.correlation_id


def _deadline_of(delivery: IncomingDelivery, message: Message, worker: Worker) -> Deadline:
    """Return the deadline of a request, at which *worker* is cancelled.

    Raises:
        DecodeError: The header is malformed.
    """
    ttl_ms = message.header.ttl
    if ttl_ms is None:
        return NO_DEADLINE
    deadline = Deadline(delivery.context + ttl_ms / 1000)
    worker.timed = True
    worker.scope.deadline = deadline.at
    return deadline


def _reject(inbox: Inbox, delivery: IncomingDelivery, worker: Worker, error: AmqpError) -> None:
    """Reject a request for which no handler was started."""
    worker.failure = name_of_failure(error)
    inbox.route.stats.rejected += 1
    settle_if_open(delivery, Rejected(Error.of(error)))


async def _stream(route: Route, request: Request, result: Any) -> None:
    """Send the items of *result* as a streamed reply."""
    request.sequence = 0
    sent = 0
    since = trio.current_time()
    try:
        async for value in result:
            await _send(request.path, request.reply(value))
            request.sequence += 1
            sent += 1
            route.stats.sent += 1
            if sent >= TURN_MESSAGES or trio.current_time() - since > TURN_S:
                await trio.lowlevel.checkpoint()
                sent = 0
                since = trio.current_time()
    finally:
        if hasattr(result, "aclose"):
            await result.aclose()
    await _send(request.path, request.stream_end())


async def _send(path: ReplyPath, payload: list[bytes]) -> None:
    try:
        await path.send(payload)
    except LinkDetached as error:
        raise _CallerGone(error.description) from None


class _CallerGone(AmqpError):
    """The reply link ended before the reply was sent."""


class _TooMany(AmqpError):
    default_condition = "amqp:resource-limit-exceeded"


def _cancelled(
    inbox: Inbox, delivery: IncomingDelivery, worker: Worker, request: Request | None
) -> None:
    """Settle a request whose worker was cancelled; *request* is None if no handler had started."""
    if worker.cancelled:
        inbox.route.stats.cancelled += 1
    elif not worker.scope.cancel_called:
        inbox.route.stats.released += 1
        settle_if_open(delivery, RELEASED)
    else:
        inbox.route.stats.cancelled += 1
        if request is None:
            # The right to send the reply was still being checked.
            settle_if_open(delivery, RELEASED)
            return
        # A cancelled task cannot wait: the reply is sent now or not at all.
        request.path.send_nowait(
            request.failure(Error("amqp:timeout", "the deadline passed before the answer"))
        )
        settle_if_open(delivery, ACCEPTED)
