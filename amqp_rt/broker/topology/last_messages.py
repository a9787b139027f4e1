"""Last messages of exchanges, which new bindings get (``qpid.ive``: initial value exchange)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ...errors import AmqpError
from ...loglimit import LogLimiter, log_loss
from ...outcomes import Error
from ..bindings import KEEPS_LAST, Binding, Exchanges, size_of
from ..host import BrokerHost

_log = logging.getLogger("amqp_rt.broker")

#: Memory in bytes of a remembered message beside its octets and headers.
_COST: Final = 512
#: Lookups (trie nodes and bindings examined) to compare a message with one binding: about two milliseconds.
_LOOKS_MAX: Final = 2_000


class LastMessage(NamedTuple):
    """Message that was published to an exchange, as it was routed."""

    payload: bytes
    message_format: int
    keys: Sequence[str]
    headers: Mapping[str, object]
    #: Container-id of its sender, for consumers that leave out messages of their own.
    publisher: str
    #: Time of the wall clock: its time to live counts from then on.
    arrived_at: float = 0.0

    @property
    def size(self) -> int:
        """Memory in bytes that it takes."""
        return _COST + len(self.payload) + size_of(self.keys) + size_of(self.headers)


class LastMessages:
    """Last message of each exchange of a virtual host that has the argument :data:`~amqp_rt.broker.bindings.KEEPS_LAST`.

    The messages are in memory only, and count towards the bytes of the broker.

    Args:
        host: The broker.
        virtual_host: Name of the virtual host.
        exchanges: Its exchanges.
    """

    def __init__(self, host: BrokerHost, virtual_host: str, exchanges: Exchanges) -> None:
        self._host = host
        self._virtual_host = virtual_host
        self._exchanges = exchanges
        self._last: dict[str, LastMessage] = {}
        self._log_limiter = LogLimiter(host.limits)

    def wanted(self, exchange: str) -> bool:
        """Return whether *exchange* exists and remembers its last message."""
        if not exchange or exchange not in self._exchanges:
            return False
        # A client of 0-9-1 may have given the argument any value.
        return self._exchanges.find(exchange).arguments.get(KEEPS_LAST) in (True, "true")

    def remember(self, exchange: str, message: LastMessage) -> None:
        """Remember *message* if *exchange* wants it, and forget the one before it.

        One that is larger than ``last_message_max``, or for which memory is scarce, is not remembered:
        a new binding gets no message then, rather than an old one.
        """
        self.forget([exchange])
        if not self.wanted(exchange):
            return
        host = self._host
        memory = host.memory
        size = message.size
        if (
            len(message.payload) <= host.limits.last_message_max
            and (memory.held + size) * 8 <= memory.limit * 7
        ):
            memory.held += size
            self._last[exchange] = message._replace(arrived_at=host.clock.wall())

    def forget(self, exchanges: Sequence[str]) -> None:
        """Forget the messages of *exchanges*."""
        memory = self._host.memory
        for name in exchanges:
            message = self._last.pop(name, None)
            if message is not None:
                memory.held -= message.size
                if memory.waiting:
                    memory.notify_waiting()

    def send(self, exchange: str, binding: Binding) -> None:
        """Put the last message of *exchange* into the queue of *binding*, which is new, if it matches.

        A queue that has no room or refuses the message does not get it; the binding is made all the same.
        """
        message = self._last.get(exchange)
        if message is None or binding.destination.is_exchange:
            return
        host = self._host
        name = binding.destination.name
        inlet = host.space(self._virtual_host).get(name).inlet
        error: Error | None = None
        try:
            if self._matches(exchange, binding, message):
                inlet.repeat(
                    message.payload, message.message_format, message.arrived_at, message.publisher
                )
        except AmqpError as caught:
            error = Error.of(caught)
        except Exception as caught:
            error = Error.of(host.fail(inlet, caught))
        if error is not None:
            log_loss(
                _log,
                self._log_limiter,
                host.clock.wall(),
                event="last message of an exchange not added: to",
                address=name,
                payload=message.payload,
                message_format=message.message_format,
                why=f"bound to exchange {exchange!r:.200}",
                error=error,
                key=error.condition,
            )

    def _matches(self, exchange: str, binding: Binding, message: LastMessage) -> bool:
        """Return whether *exchange* routes *message* by *binding* alone.

        A pattern that takes too many lookups for one step counts as one that does not match.
        """
        try:
            table = self._exchanges.empty_table(exchange)
            table.add(binding)
            looked = 0
            for key in message.keys:
                for destination in table.match(key, message.headers):
                    if not isinstance(destination, int):
                        return True
                    looked += destination
                    if looked > _LOOKS_MAX:
                        return False
        except Exception as error:
            # Exchange types of the application may raise any exception.
            raise AmqpError(
                f"the type of the exchange cannot compare it: {error!r:.200}",
                condition="amqp:internal-error",
            ) from error
        return False
