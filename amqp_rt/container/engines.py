"""Interface of engines on which we open links ourselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..fronts.base import (
    LinkConnection,
    ProtocolEngine,
    ReceivingEndpoint,
    SendingEndpoint,
    ServerEngine,
)
from ..outcomes import Error
from ..termini import Coordinator, Source, Target
from ..unsettled import UnsettledMap


class EngineSession(Protocol):
    """Session of an engine.

    The links that it attaches are a ``SendingLink`` and a ``ReceivingLink`` of
    :mod:`amqp_rt.fronts.base`. Their type is Any, since attributes that are settable in these Protocols
    are read-only in the engine.
    """

    #: Called with the peer's error when the session has ended, after its links.
    on_ended: Callable[[Error | None], None]

    @property
    def engine(self) -> ProtocolEngine:
        """Engine of the session."""

    @property
    def ended(self) -> bool:
        """Whether the session has ended or is ending."""

    @property
    def error(self) -> Error | None:
        """Error with which the session ended; None without one."""

    @property
    def state(self) -> str:
        """Name of the session's state in the standard (Part 2 §2.5.5), for display."""

    def attach_sender(
        self,
        name: str,
        endpoint: SendingEndpoint,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        properties: Mapping[object, object] | None = None,
        unsettled: UnsettledMap | None = None,
    ) -> Any:
        """Attach a link on which we send; its endpoint is notified of the result.

        Raises:
            LocalProtocolError: The name is taken, or the peer allows no more links.
        """

    def attach_receiver(
        self,
        name: str,
        endpoint: ReceivingEndpoint,
        *,
        source: Source | None = None,
        target: Target | Coordinator | None = None,
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        streaming: bool = False,
        properties: Mapping[object, object] | None = None,
        unsettled: UnsettledMap | None = None,
    ) -> Any:
        """Attach a link on which the peer sends; its endpoint is notified of the result.

        Raises:
            LocalProtocolError: The name is taken, or the peer allows no more links.
        """

    def end(self, error: Error | None = None) -> None:
        """End the session and its links."""


class ConnectionEngine(ServerEngine, LinkConnection, Protocol):
    """Engine of a connection, opened by either side."""

    @property
    def last_received(self) -> float:
        """Time at which octets of the peer arrived last."""

    def begin(self, *, window: int | None = None, window_bytes: int | None = None) -> EngineSession:
        """Begin a session; it may be used at once.

        Raises:
            LocalProtocolError: The connection is not open, or the peer allows no more sessions.
        """
