"""Links to ``/management``: pairs of a request link and a reply link of one session.

Requests of RabbitMQ's clients are settled, and their sections may be in any order; a malformed one can only be
answered by ending the link.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator
from typing import Final

from amqp_rt import Broker
from amqp_rt.errors import AmqpError, DecodeError, LocalProtocolError
from amqp_rt.fronts import (
    ACCEPTED,
    SENDER,
    Error,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingLink,
    SendingLink,
    Topology,
)

from .operations import WAITS, Operations
from .renewing import Renewals
from .requests import HttpRequest, HttpResponse, encode_response, read_request

_log = logging.getLogger("amqp_rt.rabbitmq")

#: Requests that a client may have sent without having read the answers.
_WINDOW: Final = 100
#: Work of one turn on the requests of a link, in messages of a purge and requests.
_TURN: Final = 100
#: Octets of a request; those of clients have some hundred.
_REQUEST_MAX: Final = 256 * 1024
_PAIRED: Final = "paired"
_TOO_MUCH: Final = Error(
    "amqp:resource-limit-exceeded",
    "the requests and answers that wait are too large (management_bytes_max): read the answers",
)


class Client:
    """Connection of a client, with the state that its pairs of links share.

    Args:
        broker: The broker.
        link: A link of the connection.
    """

    def __init__(self, broker: Broker, link: ReceivingLink | SendingLink) -> None:
        #: Exclusive queues that are declared in it end with the connection.
        self.topology: Topology = broker.topologies.of(link.peer, link.connection)
        self.renewals = Renewals(broker, link.peer, link.connection)
        #: Pairs by their sessions and names.
        self.pairs: dict[tuple[object, str], ManagementPair] = {}
        #: Octets of requests that wait or are carried out, and of answers that the client has not taken.
        self.held = 0
        self.limits = broker.host.limits

    def forget(self, key: tuple[object, str], pair: ManagementPair) -> None:
        """Remove *pair*, whose links have ended."""
        if self.pairs.get(key) is pair:
            del self.pairs[key]

    def has_room(self, size: int = 0) -> bool:
        """Return whether the client may make the broker hold *size* octets more."""
        return self.held + size <= self.limits.management_bytes_max


class ManagementLinks:
    """Pairs of links to ``/management`` of all connections of a broker's listeners.

    Args:
        broker: The broker.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._clients: dict[object, Client] = {}

    def attach(self, link: ReceivingLink | SendingLink) -> None:
        """Accept *link* as a half of a pair, or refuse it."""
        if link.properties.get(_PAIRED) is not True:
            link.refuse(
                Error(
                    "amqp:not-allowed", "links to /management are paired: set the property paired"
                )
            )
            return
        client = self._client(link)
        key = (link.session, link.name)
        pair = client.pairs.get(key)
        if pair is None:
            most = client.limits.management_pairs_max
            if len(client.pairs) >= most:
                link.refuse(
                    Error(
                        "amqp:resource-limit-exceeded",
                        f"a connection has at most {most} pairs of links to /management"
                        " (management_pairs_max)",
                    )
                )
                return
            operations = Operations(client.topology, link.peer, client.renewals)
            pair = client.pairs[key] = ManagementPair(self._broker, client, operations, key)
        properties = {_paired_key(link): True}
        if link.role == SENDER:
            link.accept(pair, properties=properties)
        else:
            receiving: ReceivingLink = link  # type: ignore[assignment]  # of this role
            receiving.accept(pair, properties=properties, max_message_size=_REQUEST_MAX)

    def _client(self, link: ReceivingLink | SendingLink) -> Client:
        """Return the connection of *link*."""
        connection = link.connection
        found = self._clients.get(connection)
        if found is None:
            found = self._clients[connection] = Client(self._broker, link)

            def close() -> None:
                self._clients.pop(connection).topology.close()

            connection.followers[self] = close
        return found


def _paired_key(link: ReceivingLink | SendingLink) -> object:
    return next(each for each in link.properties if each == _PAIRED)


class ManagementPair:
    """Both links of a pair: requests are carried out in their order, in turns (ReceivingEndpoint, SendingEndpoint).

    Args:
        broker: The broker, whose turns long requests take.
        client: The connection.
        operations: Carries out requests.
        key: Key among the pairs of the connection, until both links have ended; later links of their name are
            another pair.
    """

    def __init__(
        self,
        broker: Broker,
        client: Client,
        operations: Operations,
        key: tuple[object, str],
    ) -> None:
        self._broker = broker
        self._client = client
        self._operations = operations
        self._key = key
        self._receiving: ReceivingLink | None = None
        self._sending: SendingLink | None = None
        #: Requests with their sizes in octets.
        self._requests: deque[tuple[HttpRequest, int]] = deque()
        self._answers: deque[bytes] = deque()
        #: The reply link has ended: further answers are dropped.
        self._unread = False
        self._work: Generator[int, None, HttpResponse] | None = None
        self._current: tuple[HttpRequest, int] | None = None
        #: The work continues when messages have been stored, or in the next turn.
        self._waits = False

    # --- links -----------------------------------------------------------------------------

    def on_attached(self, link: ReceivingLink | SendingLink) -> None:
        """Begin to take requests, or to send answers."""
        if link.role == SENDER:
            self._sending = link  # type: ignore[assignment]
            self._unread = False
            self._send()
        else:
            self._receiving = link  # type: ignore[assignment]
            self._grant()

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Take requests; a malformed one ends the link, since it has no id to answer to."""
        for each in deliveries:
            try:
                request = read_request(each.payload, self._client.limits)
            except DecodeError as error:
                link.detach(Error.of(error))
                return
            size = len(each.payload)
            if not self._client.has_room(size):
                link.detach(_TOO_MUCH)
                return
            self._requests.append((request, size))
            self._client.held += size
            if not each.settled:
                each.settle(ACCEPTED)
        if not self._waits:
            self.resume()

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: requests are never streamed."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the outcome is final."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Do nothing: credit follows the answers."""

    def on_credit(self, link: SendingLink) -> None:
        """Send the answers that wait."""
        self._send()
        if link.attached:
            link.drained()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Do nothing: answers are settled."""

    def on_detached(
        self, link: ReceivingLink | SendingLink, error: Error | None, closed: bool
    ) -> None:
        """Forget the link; without the other one no answer can be sent."""
        if link is self._sending:
            self._end_answers()
        elif link is self._receiving:
            self._receiving = None
            self._client.held -= sum(size for _, size in self._requests)
            self._requests.clear()
        if self._sending is None and self._receiving is None:
            # There may be answers for a reply link that never came.
            self._end_answers()
            self._client.forget(self._key, self)

    def _end_answers(self) -> None:
        self._sending = None
        self._unread = True
        self._client.held -= sum(map(len, self._answers))
        self._answers.clear()

    # --- requests --------------------------------------------------------------------------

    def resume(self) -> None:
        """Carry out requests as far as one turn allows."""
        self._waits = False
        left = _TURN
        while True:
            if self._work is None:
                if not self._requests:
                    break
                self._current = self._requests.popleft()
                self._work = self._operations.carry_out(self._current[0], self.resume)
            left -= 1
            if left <= 0:
                self._waits = True
                self._broker.host.turns.resume_later(self)
                return
            assert self._current is not None
            request, size = self._current
            try:
                if next(self._work) == WAITS:
                    self._waits = True
                    return
                continue
            except StopIteration as done:
                response: HttpResponse = done.value
            except AmqpError as error:
                response = HttpResponse.of(error)
                _log.debug(
                    "request refused: %s %.200r: %s",
                    request.method,
                    request.path,
                    error,
                )
            self._work = self._current = None
            self._client.held -= size
            self._answer(request, response)
        self._send()

    def _answer(self, request: HttpRequest, response: HttpResponse) -> None:
        if self._unread:
            return
        try:
            answer = encode_response(request, response)
        except AmqpError as error:
            answer = encode_response(request, HttpResponse.of(error))
        self._answers.append(answer)
        self._client.held += len(answer)
        self._send()
        if self._answers and not self._client.has_room() and (link := self._sending) is not None:
            self._end_answers()
            link.detach(_TOO_MUCH)

    def _send(self) -> None:
        link = self._sending
        while self._answers and link is not None and link.attached and link.credit > 0:
            answer = self._answers.popleft()
            self._client.held -= len(answer)
            try:
                link.send(answer, settled=True)
            except LocalProtocolError as error:
                # The client takes no message of this size: it would wait for the answer forever.
                self._end_answers()
                link.detach(Error.of(error))
                break
        self._grant()

    def _grant(self) -> None:
        """Grant credit for as many requests as may wait with their answers."""
        link = self._receiving
        if link is not None and link.attached:
            room = _WINDOW - len(self._requests) - len(self._answers) - link.credit
            if room * 2 >= _WINDOW:
                link.grant(room)
