"""Renewal of the token with which a client has logged in (``PUT /auth/tokens``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from amqp_rt import Broker
from amqp_rt.errors import AmqpError

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
        connection: What links of the connection have as their ``connection``.
    """

    def __init__(self, broker: Broker, connection: object) -> None:
        self._container = broker.container
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
            _log.info("a token was refused: %s", error)
            renewal.error = error
        except Exception:
            # A fault of a validator must not end the broker.
            _log.exception("a token could not be checked")
            renewal.error = AmqpError(
                "the token could not be checked", condition="amqp:internal-error"
            )
        renewal.done = True
        on_done()
