"""Health of a container: whether it works, and whether work may be sent to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from .connections import Connection


class ContainerHealth(Struct, frozen=True):
    """Health of a container at a time."""

    #: Whether the container runs. An answer also proves that its event loop does.
    live: bool
    #: Whether it takes work: it has started, is reachable or connected, and does not stop.
    ready: bool
    #: Why it is not ready, a sentence each; empty if it is.
    reasons: tuple[str, ...] = ()


@runtime_checkable
class ReportingHost(Protocol):
    """Host that may be unable to take work although its container runs, such as a broker without its store."""

    def unready(self) -> Iterable[str]:
        """Return why the host takes no work, a sentence each; nothing if it does."""


class Reachable(Protocol):
    """Container, as far as its health needs it."""

    @property
    def name(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def hosts(self) -> Sequence[object]: ...
    @property
    def dialled(self) -> Collection[Connection]: ...


def health_of(
    container: Reachable, listeners: Collection[str], *, running: bool
) -> ContainerHealth:
    """Return the health of *container*, which is bound to *listeners*.

    It is *running* from its first startup hook to its last shutdown hook.
    """
    reasons = tuple(_reasons(container, listeners, running))
    return ContainerHealth(running, not reasons, reasons)


def _reasons(container: Reachable, listeners: Collection[str], running: bool) -> Iterator[str]:
    if container.stopping:
        yield f"{container.name!r} {'is stopping' if running else 'has stopped'}"
    elif not container.ready:
        yield f"{container.name!r} has not started"
    elif not listeners and not container.dialled:
        yield f"{container.name!r} neither listens nor is connected"
    for connection in container.dialled:
        if connection.state != "open":
            where = "a peer" if connection.engine_over else connection.peer.address
            yield f"the connection to {where} is {connection.state}"
    for host in container.hosts:
        if isinstance(host, ReportingHost):
            yield from host.unready()
