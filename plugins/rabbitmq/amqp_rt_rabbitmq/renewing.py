"""Renewal of the token with which a client has logged in (``PUT /auth/tokens``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import trio

from amqp_rt import Broker
from amqp_rt.addresses import host_in, network_of
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Peer

_log = logging.getLogger("amqp_rt.rabbitmq")


class Renewal:
    """Check of one token, in a task: it may have to fetch keys."""

    def __init__(self) -> None:
        self.done = False
        #: Why the token was refused.
        self.error: AmqpError | None = None


class Renewals:
    """Renews the token of one connection.

    Args:
        broker: The broker, in whose tasks tokens are checked.
        peer: The peer.
        connection: What links of the connection have as their ``connection``.
    """

    def __init__(self, broker: Broker, peer: Peer, connection: object) -> None:
        self._container = broker.container
        self._peer = peer
        self._connection = connection

    def begin(self, token: bytes, on_done: Callable[[], None]) -> Renewal:
        """Begin to check *token*, and call *on_done* afterwards.

        The connection has the rights of an accepted token from then on, and no longer those of others.

        Raises:
            AmqpError: The token is not ASCII.
        """
        if not token.isascii():
            raise AmqpError("a token is plain ASCII", condition="amqp:invalid-field")
        renewal = Renewal()
        self._container.start_connection(partial(self._renew, token.decode(), renewal, on_done))
        return renewal

    async def _renew(self, token: str, renewal: Renewal, on_done: Callable[[], None]) -> None:
        try:
            await self._container.entry.renew_token(self._connection, token)
        except AmqpError as error:
            self._note("a token was refused", error)
            renewal.error = error
        except Exception as error:
            # A fault of a validator must not end the broker.
            self._note("a token could not be checked", error)
            renewal.error = AmqpError(
                "the token could not be checked", condition="amqp:internal-error"
            )
        renewal.done = True
        on_done()

    def _note(self, event: str, error: Exception) -> None:
        """Log *event* and its cause, limited for each network: clients can repeat it."""
        address = self._peer.address
        key = (event, network_of(host_in(address)))
        left_out = self._container.log_limiter.admit(key, trio.current_time())
        if left_out is None:
            return
        if isinstance(error, AmqpError):
            _log.info("%s: from %s: %s%s", event, address, error, left_out)
        else:
            _log.error("%s: from %s%s", event, address, left_out, exc_info=error)
