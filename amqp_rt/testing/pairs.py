"""Two engines joined in memory, and endpoints that record events.

There is no stream, no task and no clock: time is a number that the test passes, so that a whole
conversation is a few plain calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.engine import Engine
from ..events import AttachRequested, Event, LoginRequested
from ..fronts import amqp10
from ..fronts.base import RECEIVER, ServerOptions
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import ACCEPTED, Error, Outcome


class Recorder:
    """An endpoint for either direction that records all its events.

    Args:
        settle: The outcome that settles each delivery at once; None leaves deliveries unsettled.
        credit: Credit granted when the link attaches, and again after each batch; 0 grants none.
    """

    def __init__(self, *, settle: Outcome | None = None, credit: int = 0) -> None:
        self.settle = settle
        self.credit = credit
        self.attached: list[Any] = []
        self.deliveries: list[Any] = []
        self.batches: list[int] = []
        self.progress: list[Any] = []
        self.outcomes: list[Any] = []
        self.settled: list[Any] = []
        self.flows = 0
        self.credits: list[int] = []
        self.detached: list[tuple[Error | None, bool]] = []

    def on_attached(self, link: Any) -> None:
        """Record that both sides are attached."""
        self.attached.append(link)
        if self.credit and link.role == RECEIVER:
            link.grant(self.credit)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        """Record messages, or the start of streamed ones."""
        self.deliveries += deliveries
        self.batches.append(len(deliveries))
        if self.settle is not None:
            for delivery in deliveries:
                delivery.settle(self.settle)
        if self.credit:
            link.grant(self.credit)

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        """Record more data of streamed messages."""
        self.progress += deliveries

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """Record deliveries settled by the sender."""
        self.settled += deliveries

    def on_flow(self, link: Any) -> None:
        """Record a flow of the sender."""
        self.flows += 1

    def on_credit(self, link: Any) -> None:
        """Record the credit, after a flow of the receiver or when output has room again."""
        self.credits.append(link.credit)

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        """Record outcomes from the receiver."""
        self.outcomes += deliveries

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        """Record the end of the link."""
        self.detached.append((error, closed))


def accept_with(endpoint: Any) -> Callable[[Any], None]:
    """Return an ``on_attach`` callback that accepts every link with *endpoint*."""

    def accept(link: Any) -> None:
        link.accept(endpoint)

    return accept


class Joined:
    """A client and a server engine, with the output of each as the input of the other.

    Args:
        on_attach: Called for each link that the client requests; by default it is accepted with
            ``self.endpoint``, which settles everything as accepted.
        on_login: Called for each :class:`~amqp_rt.events.LoginRequested`.
    """

    def __init__(
        self,
        *,
        client: Engine | None = None,
        server: Engine | None = None,
        limits: Limits = DEFAULT_LIMITS,
        on_attach: Callable[[Any], None] | None = None,
        on_login: Callable[[LoginRequested], list[Event]] | None = None,
    ) -> None:
        self.now = 0.0
        self.endpoint = Recorder(settle=ACCEPTED, credit=100)
        self.client = client or amqp10.client(
            amqp10.ClientOptions(container_id="client", limits=limits), 0.0
        )
        self.server = server or amqp10.Front().server(
            ServerOptions(container_id="server", limits=limits, sasl_required=False), 0.0
        )
        self.on_attach = on_attach or accept_with(self.endpoint)
        self.on_login = on_login
        self.client_events: list[Event] = []
        self.server_events: list[Event] = []
        #: Links that the client requested.
        self.links: list[Any] = []

    def pump(self, *, cut: int = 0) -> None:
        """Carry bytes both ways until both engines are silent.

        Args:
            cut: Deliver the bytes in pieces of this size; 0 delivers them as they come.
        """
        for _ in range(10_000):
            to_server = b"".join(self.client.take())
            to_client = b"".join(self.server.take())
            if not to_server and not to_client:
                return
            for engine, data, events in (
                (self.server, to_server, self.server_events),
                (self.client, to_client, self.client_events),
            ):
                step = cut or max(len(data), 1)
                for at in range(0, len(data), step):
                    self._handle(engine.receive(data[at : at + step], self.now), events)
        raise AssertionError("the engines never stop talking")

    def _handle(self, events: list[Event], seen: list[Event]) -> None:
        for event in events:
            seen.append(event)
            if isinstance(event, AttachRequested):
                self.links.append(event.link)
                self.on_attach(event.link)
            elif isinstance(event, LoginRequested) and self.on_login is not None:
                self._handle(self.on_login(event), seen)
