"""Publishing on a channel: ``basic.publish``, returned messages and the outcomes of queues."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from msgspec.structs import replace

from amqp_rt.addresses import REPLY_TO
from amqp_rt.fronts import Accepted, AmqpError, Error, Rejected, Topology, TransactionalState
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.recent import OCTETS_MAX
from amqp_rt.fronts.splicing import joined

from . import faults
from . import methods as m
from .confirms import Confirms
from .execution import Execution
from .faults import Fault
from .links import Way
from .messages import Invalid, front_of, to_arguments, to_message
from .replies import DirectReplies
from .routes import Routes, keys_of
from .sessions import Session
from .transactions import Transactions

#: Queues that a message is handed to between two checks of the work done, and the cost of each in
#: frames.
_QUEUES_OF_A_STEP: Final = 10
_QUEUE_WORK: Final = 5
#: Outcome for a queue that was deleted between two steps of routing a message.
_GONE: Final = Rejected(Error("amqp:not-found", "the queue has been deleted"))


class Publication:
    """A published message, until every queue that it went to has returned an outcome.

    Args:
        publisher: The publisher of its channel.
        number: Its sequence number for publisher confirms, 0 if it is not confirmed.
        method: Its ``basic.publish``.
        content: Properties and body to return if it is unroutable; None unless it is mandatory.
        awaited: Number of queues it went to.
    """

    __slots__ = (
        *("awaited", "content", "failed", "method", "number", "publisher", "taken", "unroutable"),
    )

    def __init__(
        self,
        publisher: Publisher,
        number: int,
        method: m.BasicPublish,
        content: tuple[m.BasicProperties, bytes] | None,
        awaited: int,
    ) -> None:
        self.publisher = publisher
        self.number = number
        self.method = method
        self.content = content
        self.awaited = awaited
        self.failed = False
        self.unroutable = 0
        self.taken = False

    def on_outcome(self, outcome: Any) -> None:
        """Count the outcome of one queue; confirm or return the message after the last one."""
        self.awaited -= 1
        if type(outcome) is TransactionalState:
            outcome = outcome.outcome
        if type(outcome) is Rejected and outcome.error is not None:
            if outcome.error.condition == "amqp:not-found":
                self.unroutable += 1
            else:
                self.failed = True
                if not self.number:
                    self.publisher.session.report_refusal(outcome)
        elif type(outcome) is Accepted:
            self.taken = True
        else:
            self.failed = True
        if not self.awaited:
            # A queue deleted after the message was routed does not count, unless no other queue
            # took it.
            if self.unroutable and not self.taken and self.content is not None:
                self.publisher.give_back(self.method, *self.content)
            if self.number:
                self.publisher.confirms.confirm(self.number, acknowledged=not self.failed)


class Publisher:
    """Carries out ``basic.publish``.

    The channel sets the octets of the current message, as its frames arrive: they are keys of the
    caches, so that conversions and routes are found once for messages alike.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        routes: Finds the nodes that messages go to.
        confirms: Numbers messages and confirms them, where the client has selected that.
        transactions: The transactions of the channel.
        replies: The consumer of replies to requests.
    """

    def __init__(
        self,
        session: Session,
        execution: Execution,
        routes: Routes,
        confirms: Confirms,
        transactions: Transactions,
        replies: DirectReplies,
    ) -> None:
        self.session = session
        self.execution = execution
        self.routes = routes
        self.confirms = confirms
        self.transactions = transactions
        self.replies = replies
        #: Octets of the current ``basic.publish``, and of the properties in its content header.
        self.method_octets = b""
        self.header_octets = b""
        #: Exchange and routing key of the current ``basic.publish`` as encoded annotations.
        self.place: bytes | None = None

    def select_confirms(self, method: m.ConfirmSelect) -> None:
        """Confirm the messages published from now on."""
        if self.transactions.control is not None:
            raise Fault(faults.PRECONDITION_FAILED, "a channel with transactions has no confirms")
        self.confirms.selected = True
        if not method.nowait:
            self.session.write(m.ConfirmSelectOk())

    def publish(self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes) -> None:
        """Hand a message to the queues that it is routed to.

        Raises:
            Fault: A property is invalid, or the client may not publish there.
        """
        if method.immediate:
            raise Fault(faults.NOT_IMPLEMENTED, "immediate is not offered: use a TTL of 0")
        engine = self.session.engine
        peer = engine.peer
        user = properties.user_id
        if user is not None and peer.user is not None and user != peer.user:
            raise Fault(
                faults.PRECONDITION_FAILED,
                f"user-id is {user!r:.50}, and the connection is that of {peer.user!r:.50}",
            )
        if properties.reply_to == REPLY_TO:
            if self.replies.tag is None:
                raise Fault(
                    faults.PRECONDITION_FAILED,
                    f"consume from {REPLY_TO} before you ask for replies",
                )
            properties = replace(properties, reply_to=self.replies.address)
            # Another channel has another reply address, so these octets must not be a cache key.
            self.header_octets = b""
        number = self.confirms.next_number() if self.confirms.selected else 0
        exchange = method.exchange
        # Routes are found once for the messages of one chunk with equal method and properties: no
        # other method runs between them.
        key = (self.session.number, self.method_octets, self.header_octets)
        ways = engine.ways.get(key) if self.header_octets else None
        headers = properties.headers
        copied = headers is not None and ("CC" in headers or "BCC" in headers)
        if ways is None and not exchange and not copied:
            ways = engine.ways[key] = [self.routes.way_to(method.routing_key, routed=False)]
        if ways is None or len(ways) > _QUEUES_OF_A_STEP:
            self.execution.run(self._spread(method, properties, body, number, ways))
            return
        parts = self._prepare(method, properties, body, number, len(ways))
        if parts is not None:
            for way, link, _ in ways:
                engine.post(way, link, FrontDelivery(link, *parts))

    def _spread(
        self,
        method: m.BasicPublish,
        properties: m.BasicProperties,
        body: bytes,
        number: int,
        ways: list[Way] | None,
    ) -> Generator[int, None, None]:
        """Hand a message to all queues that it is routed to; yield the cost of each step in frames.

        All of them share one payload.
        """
        engine = self.session.engine
        topology = engine.topology
        deletions: AbstractContextManager[Container[str]] = nullcontext(())
        if topology is not None and method.exchange:
            deletions = topology.deletions()
        with deletions as gone:
            if ways is None:
                ways = yield from self.routes.find(method, properties, gone)
                if topology is not None and topology.remembers(method.exchange):
                    self._remember(topology, method, properties, body)
                else:
                    key = (self.session.number, self.method_octets, self.header_octets)
                    engine.ways[key] = ways
            parts = self._prepare(method, properties, body, number, len(ways))
            if parts is None:
                return
            on_outcome = parts[1]
            for count, (way, link, name) in enumerate(ways, 1):
                if name not in gone:
                    engine.post(way, link, FrontDelivery(link, *parts))
                elif on_outcome is not None:
                    on_outcome(_GONE)
                if not count % _QUEUES_OF_A_STEP:
                    engine.flush()
                    yield _QUEUE_WORK * _QUEUES_OF_A_STEP

    def _remember(
        self,
        topology: Topology,
        method: m.BasicPublish,
        properties: m.BasicProperties,
        body: bytes,
    ) -> None:
        """Make the message the last one of its exchange, unless it belongs to a transaction."""
        if self.transactions.control is None:
            headers = properties.headers or {}
            topology.remember(
                method.exchange,
                keys_of(
                    method.routing_key, properties, self.session.engine.limits.routing_keys_max
                ),
                to_arguments(headers),
                self._payload(method, _without_blind_copies(properties), body),
            )

    def _prepare(
        self,
        method: m.BasicPublish,
        properties: m.BasicProperties,
        body: bytes,
        number: int,
        awaited: int,
    ) -> tuple[bytes, Callable[[Any], None] | None, Any] | None:
        """Return payload, callback for outcomes and transactional state of a message's deliveries.

        With no queue (*awaited* is 0), return or drop the message at once; the result is None.
        """
        headers = properties.headers
        seen = properties
        if headers is not None and "BCC" in headers:
            seen = _without_blind_copies(properties)
        if not awaited:
            self._nowhere(method, seen, body, number)
            return None
        payload = self._payload(method, seen, body)
        on_outcome: Callable[[Any], None] | None = None
        if number or method.mandatory:
            content = (seen, body) if method.mandatory else None
            on_outcome = Publication(self, number, method, content, awaited).on_outcome
        transactions = self.transactions
        state = None
        if transactions.control is not None:
            state = TransactionalState(transactions.txn_id)
        return payload, on_outcome, state

    def _payload(self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes) -> bytes:
        """Encode the message as AMQP 1.0, from the cached front if there is one.

        Raises:
            Fault: A property is invalid.
        """
        octets, place = self.header_octets, self.place
        fronts = self.session.engine.recents.fronts
        front = fronts.get(octets) if octets else None
        try:
            if front is None:
                front = front_of(properties)
                if front is not None and octets and len(octets) <= OCTETS_MAX:
                    fronts.put(octets, front)
            if front is None or place is None:
                return to_message(
                    properties, body, exchange=method.exchange, routing_key=method.routing_key
                )
        except (Invalid, AmqpError) as error:
            raise Fault(faults.PRECONDITION_FAILED, str(error)) from error
        return joined(front, place, body)

    def _nowhere(
        self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes, number: int
    ) -> None:
        """Return an unroutable message if it is mandatory, and confirm it."""
        if method.mandatory:
            self.give_back(method, properties, body)
        if number:
            self.confirms.confirm(number, acknowledged=True)

    def give_back(self, method: m.BasicPublish, properties: m.BasicProperties, body: bytes) -> None:
        """Return an unroutable mandatory message to its publisher."""
        if self.session.ended:
            return
        self.session.engine.write_content(
            self.session.number,
            m.BasicReturn(
                reply_code=faults.NO_ROUTE,
                reply_text=faults.NAMES[faults.NO_ROUTE],
                exchange=method.exchange,
                routing_key=method.routing_key,
            ),
            properties,
            body,
        )


def _without_blind_copies(properties: m.BasicProperties) -> m.BasicProperties:
    """Return *properties* without the header BCC, which consumers do not see."""
    headers = properties.headers
    if headers is None or "BCC" not in headers:
        return properties
    others = {name: value for name, value in headers.items() if name != "BCC"}
    return replace(properties, headers=others)
