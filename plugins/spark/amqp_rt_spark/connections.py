"""The connections of this process, and operations that are repeated after a loss of the broker.

A process keeps its connections and reuses them, which saves tasks the handshake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from amqp_rt.errors import AmqpError

from .endpoints import Endpoint
from .losses import Patience
from .wire import Wire

#: Connections by process id and endpoint. A forked process must make its own.
_WIRES: Final[dict[tuple[int, Endpoint], Wire]] = {}


def wire(endpoint: Endpoint) -> Wire:
    """Return this process's connection to *endpoint*, made if there is no usable one.

    Raises:
        ConnectFailed: The connection failed; one sentence names the address and the reason.
    """
    key = os.getpid(), endpoint
    found = _WIRES.get(key)
    if found is not None:
        if not found.over:
            return found
        found.connection.drop()
    found = _WIRES[key] = Wire(endpoint)
    return found


def forget(endpoint: Endpoint) -> None:
    """Drop this process's connection to *endpoint*, if there is one."""
    found = _WIRES.pop((os.getpid(), endpoint), None)
    if found is not None:
        found.connection.drop()


Found = TypeVar("Found")


def retried(endpoint: Endpoint, work: Callable[[Wire], Found]) -> Found:
    """Call *work* with this process's connection to *endpoint*, again after each loss of the broker.

    Raises:
        AmqpError: The work failed, or the broker is lost for longer than ``retry_s``.
    """
    patience = Patience(endpoint.retry_s)
    while True:
        try:
            return work(wire(endpoint))
        except AmqpError as error:
            patience.bear(error)
            forget(endpoint)


def call(endpoint: Endpoint, address: str, operation: str, body: Any = None, **given: Any) -> Any:
    """Call ``<address>/$management`` and return the answer, again after each loss of the broker: only for
    operations that may be repeated.

    Raises:
        AmqpError: As for :func:`retried`.
    """
    return retried(endpoint, lambda there: there.call(address, operation, body, **given))


def records(
    endpoint: Endpoint, address: str, partition: int, start: int, end: int, **how: Any
) -> Iterator[tuple[list[int], list[bytes], list[int] | None]]:
    """Yield the records of :meth:`Wire.records`; after a loss of the broker, continue at the next offset.

    Raises:
        AmqpError: As for :meth:`Wire.records` and :func:`retried`.
    """
    patience = Patience(endpoint.retry_s)
    while start < end:
        try:
            for found in wire(endpoint).records(address, partition, start, end, **how):
                # Computed before the yield, since the caller may change the lists.
                after = found[0][-1] + 1
                yield found
                start = after
            return
        except AmqpError as error:
            patience.bear(error, start)
            forget(endpoint)


def browsed(endpoint: Endpoint, address: str, **how: Any) -> Iterator[list[bytes]]:
    """Yield the messages of :meth:`Wire.browsed`; retry after a loss of the broker before the first message.

    A queue has no position at which to continue, so a later loss ends the task, which Spark then repeats.

    Raises:
        AmqpError: As for :meth:`Wire.browsed` and :func:`retried`.
    """
    patience = Patience(endpoint.retry_s)
    begun = False
    while True:
        try:
            for payloads in wire(endpoint).browsed(address, **how):
                begun = True
                yield payloads
            return
        except AmqpError as error:
            if begun:
                raise
            patience.bear(error)
            forget(endpoint)
