"""Context of a session: what the parts that carry out its commands share.

A part, such as the subscriptions of a session, refers to the context and to other parts, but never to the
handler, which owns them all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from amqp_rt.fronts import Event, Limits, Peer, Topology, TransactionBranches
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.links import FrontReceivingLink

from .handlers import Answer, Later
from .layouts import Command
from .partial_messages import PartialMessages
from .recent import Recents
from .sessions import Session
from .staged_files import StagedFiles

if TYPE_CHECKING:
    from .deliveries import OutgoingDelivery
    from .links import SendingLink

#: Passes the outcomes of deliveries to the endpoint of their link.
Conclude: TypeAlias = "Callable[[SendingLink, list[OutgoingDelivery]], None]"
#: A command carried out in steps: each yields its work, in frames, or :data:`WAIT`; returns the answer.
Steps: TypeAlias = Generator[int, None, Answer]
#: Yielded by steps that wait for :meth:`Context.wake`.
WAIT: Final = -1


class Thirsty(Protocol):
    """Sender that waits for room in the output, or for the next turn."""

    def offer_credit(self) -> None:
        """Continue to send."""


class Connection(Protocol):
    """Connection that carries a session, as the parts of its handler use it."""

    #: Those that have something to send but no room in the output, or in this turn.
    thirsty: dict[Thirsty, None]
    #: Messages sent to consumers in this turn.
    given: int
    #: Routes found within this chunk, by session and what they follow from; ``flush`` clears it.
    ways: dict[tuple[object, ...], Any]
    #: Conversions of messages that were made before, on any connection.
    recents: Recents
    #: Messages of which some fragments have arrived, on any connection.
    partials: PartialMessages
    #: Files that clients have staged, on any connection.
    staged: StagedFiles

    @property
    def peer(self) -> Peer: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def output_size(self) -> int: ...

    def count_subscriptions(self) -> int:
        """Return the number of subscriptions of all sessions of the connection."""

    def report(self, event: Event) -> None:
        """Queue an event for the owner of the connection."""

    def post(self, way: Any, link: FrontReceivingLink, delivery: FrontDelivery) -> None:
        """Queue a message, for inlet *way* or else for *link*, until the end of this chunk."""

    def answer(self, conclude: Conclude, link: SendingLink, delivery: OutgoingDelivery) -> None:
        """Queue a settlement until the end of this chunk, when *conclude* passes it on."""

    def flush(self) -> None:
        """Pass on everything published and settled so far."""

    def schedule(self, step: Callable[[], None]) -> None:
        """Call *step* soon, in the next call of the driver."""

    def work_later(self, step: Callable[[], None]) -> None:
        """Call *step* in the next ``receive``, after other connections."""

    def spend(self, work: int) -> None:
        """Add *work*, in frames, to the cost of the current frame."""


class Context(Protocol):
    """Shared by the parts of the handler of one session."""

    @property
    def session(self) -> Session:
        """The session: sends commands, completes those of the peer, fails."""

    @property
    def anchor(self) -> Anchor:
        """Session and connection of the links of the session."""

    @property
    def topology(self) -> Topology | None:
        """Queues and exchanges that the peer may declare; None if nothing can be declared."""

    @property
    def branches(self) -> TransactionBranches | None:
        """Branches of distributed transactions that the peer may use; None if there are none."""

    @property
    def connection(self) -> Connection | None:
        """The connection that carries the session; None while it is detached."""

    @property
    def limits(self) -> Limits:
        """Bounds on resources that the peer may use."""

    def report(self, event: Event) -> None:
        """Queue *event* for the container: at once, or when the session is attached again."""

    def run(self, number: int, command: Command, steps: Steps) -> Later:
        """Carry out *command*, which has the id *number*, in steps; commands after it wait for it.

        A :class:`~amqp_rt_amqp010.faults.CommandFault` that *steps* raises ends the session. Steps are
        closed if the session ends before.
        """

    def wake(self) -> None:
        """Continue steps that have yielded :data:`WAIT`; without any, the next :data:`WAIT` does not wait.

        Steps check after each wait that what they waited for has come.
        """
