"""Unexpected errors: one node goes out of service, and the others continue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ..errors import AmqpError
from ..outcomes import Error
from .kinds.base import Node

_log: Final = logging.getLogger("amqp_rt.broker")


class Faults:
    """Takes nodes out of service after unexpected errors.

    Args:
        owner_of: Returns the node that an object is or belongs to; None if there is none.
    """

    def __init__(self, owner_of: Callable[[object], Node | None]) -> None:
        self._owner_of = owner_of

    def guard(self, owner: object, call: Callable[[], object]) -> None:
        """Call *call*, work of *owner*; an unexpected error takes only its node out of service."""
        try:
            call()
        except Exception as error:
            self.fail(owner, error)

    def fail(self, owner: object, error: Exception) -> AmqpError:
        """Take the node of *owner* out of service, because its work raised *error*.

        The links of the node are detached, and requests for it are refused until the broker is
        restarted and restores it from the store. Later changes of the node in memory are not
        stored; pending writes are.

        Args:
            owner: The node, its queue, topic or log, its inlet, its duplicate-detection window, or
                a subscriber's queue; None for work of no node.
            error: The exception.

        Returns:
            The error with which to refuse the work that failed.
        """
        node = self._owner_of(owner)
        if node is None:
            _log.error("an unexpected error of no node that is there: %r", owner, exc_info=error)
            return AmqpError(
                "an unexpected error in the broker, whose log has it",
                condition="amqp:internal-error",
            )
        name = node.declared.name
        if node.failure is not None:
            _log.debug("the node %r has failed again", name, exc_info=error)
            return node.failure
        _log.error(
            "node failed: %r of virtual host %r: out of service until the broker is started again",
            name,
            node.space.name,
            exc_info=error,
        )
        failure = node.failure = AmqpError(
            f"{name!r} is out of service after an unexpected error, which is in the "
            "broker's log: start the broker again to continue with the contents of its store",
            condition="amqp:internal-error",
        )
        node.stop(failure)
        kept: set[object] = set()
        for terminus in node.termini:
            # Its countdown continues when its peer can attach again, after the restart.
            terminus.frozen = True
            terminus.stop_countdown()
            kept.update(terminus.links())
        refused = Error.of(failure)
        for link in node.links():
            try:
                link.detach(refused, closed=link not in kept)
            except Exception:
                _log.exception("link not detached: %r of %r", link.name, name)
        return failure
