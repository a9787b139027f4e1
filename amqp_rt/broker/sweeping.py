"""Periodic work: expiry, retention, and whatever else is due by the clock."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Final

import trio

from ..errors import AmqpError
from .scheduler import Steps
from .services import Services

_log: Final = logging.getLogger("amqp_rt.broker")

#: Cost of a step of the sweep over the nodes, in deliveries concluded in the same time.
_WORK_OF_A_STEP: Final = 2


class Sweeper:
    """Periodic work of all nodes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        #: The latest round over the nodes; None before the first one.
        self._round: Steps | None = None

    def sweep(self) -> None:
        """Do periodic work: expire messages, termini, stages and leases, and apply retention.

        Messages at the front of queues expire without a consumer; retention is that of logs in
        memory. Overdue transactions and branches are rolled back.
        """
        services = self._services
        services.turns.tick()
        guard = services.guard
        for roll_back in services.transactions.overdue():
            guard(None, roll_back)
        guard(None, services.branches.sweep)
        services.termini.forget_answered()
        for terminus in services.termini.due():
            guard(terminus.held, terminus.end)
        services.staging.producers.sweep()
        services.leases.sweep()
        if services.routed_addresses is not None:
            guard(None, services.routed_addresses.sweep)
        if self._round is None or self._round.over:
            # Only after the round before has finished: many nodes take more than one turn.
            self._round = services.turns.do_in_turns(self._sweep_nodes(), _WORK_OF_A_STEP)

    def _sweep_nodes(self) -> Generator[None, None, None]:
        """Sweep one node, or one part of a node, in each step."""
        services = self._services
        guard = services.guard
        for duplicates in list(services.windows):
            guard(duplicates, duplicates.expire)
            yield
        for node in list(services.leaving):
            guard(node, node.end_if_due)
            yield
        for node in list(services.expiring):
            guard(node, node.sweep)
            if node.is_empty:
                services.expiring.pop(node, None)
            yield
        for log, node in list(services.logs.items()):
            if log in services.logs and not log.failed:
                guard(node, node.sweep)
            yield

    async def retain(self, interval_s: float) -> None:
        """Apply retention to logs in the store every *interval_s* seconds, until cancelled."""
        services = self._services
        while True:
            await trio.sleep(interval_s)
            for log in list(services.logs):
                if log.failed:
                    continue
                try:
                    await log.retain()
                except AmqpError as error:
                    _log.error("a log goes on without retention for now: %s", error)
                except Exception as error:
                    services.fail(log, error)
