"""Receiving the messages of a queue, which the caller settles."""

from __future__ import annotations

from typing import Any, Self

from amqp_rt.errors import AmqpError, LinkDetached
from amqp_rt.termini import Source
from amqp_rt.values import Symbol

from .link_ends import Basket
from .spelling import selector_filter
from .wire import Wire


class Drain:
    """Receives the messages of a queue, and leaves them unsettled for the caller to settle.

    The link has a session of its own, which ends with it: some brokers keep unsettled deliveries of a
    detached link until its session ends (RabbitMQ 3), and all release them then.

    Raises:
        LinkRefused: The queue cannot be read.
        AmqpError: The broker ignores the selector, and would send unwanted messages; or it sends settled.
    """

    def __init__(self, wire: Wire, address: str, *, selector: str = "") -> None:
        self._wire = wire
        self._address = address
        self._basket = Basket()
        self._session = wire.engine.begin()
        filters: dict[Any, Any] | None = None
        if selector:
            filters = {Symbol("selector"): selector_filter(selector)}
        try:
            self._link = wire.receive(
                address,
                self._basket,
                Source(address=address, filter=filters),
                session=self._session,
            )
            # RabbitMQ before 4.0 echoes any filter, and supports none.
            known = not wire.engine.peer_miscounts and (self._link.source.filter or {})
            if selector and not (known and Symbol("selector") in known):
                raise AmqpError(
                    f"{address!r} cannot be read with a selector: the broker passes it over",
                    condition="amqp:not-implemented",
                )
            if self._link.snd_settle_mode == 1:
                raise AmqpError(
                    f"{address!r} sends messages settled: they would be lost if the task failed",
                    condition="amqp:not-implemented",
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def over(self) -> bool:
        """Whether the link has ended: unsettled deliveries are redelivered to others."""
        return self._basket.over or self._wire.over

    def take(self, most: int) -> list[Any]:
        """Receive up to *most* deliveries: fewer only if the queue runs empty.

        Raises:
            LinkDetached: The link has ended.
        """
        link, basket = self._link, self._basket
        basket.answered = False
        # RabbitMQ before 4.0 ends the session when fewer messages are available than are to be drained;
        # but its flow reports how many there are.
        crashes = self._wire.engine.peer_miscounts
        link.grant(most, echo=crashes)
        if not crashes:
            link.drain()

        def done() -> bool:
            if basket.over:
                return True
            none_left = link.credit == 0 or (crashes and basket.answered and link.available == 0)
            return none_left and not link.arriving

        self._wire.wait(done, self._wire.endpoint.timeout_s)
        if basket.over:
            raise self._wire.ended(basket, f"reading {self._address!r} has ended", LinkDetached)
        found, basket.ready = basket.ready, []
        return found

    def close(self) -> None:
        """Detach the link and end its session, which releases unsettled deliveries; settled ones stay so."""
        connection = self._wire.connection
        if connection.over:
            return
        try:
            if not self._basket.over and self._basket.attached:
                # The peer's detach shows that it has processed everything before.
                self._link.detach()
                self._wire.wait(lambda: self._basket.over, self._wire.endpoint.timeout_s)
            self._session.end()
            connection.flush(timeout_s=self._wire.endpoint.timeout_s)
        except AmqpError:
            # The next use of the connection notices the loss.
            pass
