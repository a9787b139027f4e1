"""Interface of a container to the modules that make it up.

Each module declares its needs by one of these Protocols, or by one that adds a few
members, so that no module but ``container.py`` depends on the class ``Container``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio

from ..errors import AmqpError
from ..fronts.base import Host, ReceivingLink, SendingLink
from ..limits import Limits
from ..loglimit import LogLimiter
from ..net.memory import MemoryNetwork
from ..net.reactor import Reactor
from ..net.traces.recording import Traces
from ..net.traces.watching import FrameWatches
from ..observers import Observer
from ..policies import Retry
from ..tallies import Tallies
from .codecs import Codecs
from .permissions import Permissions
from .raising import OnError


class Feed(Protocol):
    """Task that serves one link of a peer; a container waits for its end when it stops."""

    @property
    def finished(self) -> trio.Event:
        """Event that is set when the task has ended."""

    def stop(self) -> None:
        """End the task soon; its link stays until the connection ends."""


class AttachedLinks(Protocol):
    """Registry of the links that peers have attached."""

    def forget(self, link: ReceivingLink | SendingLink) -> None:
        """Remove *link*, which has ended, so that its name is free."""


class Home(Protocol):
    """Container, as the endpoints of links and the tasks of handlers use it."""

    @property
    def name(self) -> str:
        """Container-id that peers see."""

    @property
    def limits(self) -> Limits:
        """Limits of the container and its connections."""

    @property
    def on_error(self) -> OnError:
        """Outcome for a message whose handler raised."""

    @property
    def retry(self) -> Retry | None:
        """Attempts and pauses of a message whose handler raised; None to leave them to its queue."""

    @property
    def log_limiter(self) -> LogLimiter:
        """Limiter of log lines that peers can cause."""

    @property
    def codecs(self) -> Codecs:
        """Codecs of payloads."""

    @property
    def tallies(self) -> Tallies:
        """Counts for operators."""

    @property
    def observers(self) -> Sequence[Observer]:
        """Observers that links are offered to when they attach."""

    @property
    def permissions(self) -> Permissions:
        """Judge of the rights of peers."""

    @property
    def hosts(self) -> Sequence[Host]:
        """Further collections of addresses, such as a broker."""

    @property
    def attaching(self) -> AttachedLinks:
        """Registry of the links that peers have attached."""

    @property
    def feeds(self) -> set[Feed]:
        """Running tasks that serve one link each."""

    @property
    def stopping(self) -> bool:
        """Whether the container has begun to stop, and takes no more links."""

    def start_handler(self, task: Callable[..., Awaitable[Any]], *args: Any) -> bool:
        """Run *task* until it ends or the container stops; return False if it has stopped."""

    def start_connection(self, task: Callable[[], Awaitable[Any]]) -> None:
        """Run *task*, which serves a connection, until it ends or the container does."""

    def fail(self, error: AmqpError) -> None:
        """Make ``serve`` raise *error*, because a node is no longer served."""


class NetworkHome(Home, Protocol):
    """Container, as the tasks that open or accept its connections use it."""

    @property
    def network(self) -> MemoryNetwork:
        """Namespace of ``memory://`` addresses."""

    @property
    def reactor(self) -> Reactor | None:
        """Task that waits for the sockets of all connections; None where there is none."""

    @property
    def traces(self) -> Traces | None:
        """Writer of connection traces; None without one."""

    @property
    def frame_watches(self) -> FrameWatches:
        """Watches of operators, who see the frames of connections that peers open."""

    @property
    def connection_nursery(self) -> trio.Nursery:
        """Nursery of the connections' tasks, open until the container has ended."""
