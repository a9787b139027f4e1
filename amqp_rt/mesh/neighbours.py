"""Connections between neighbours of a mesh: the link of records each way, and the sessions for links of routes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..container.connections import Connection
from ..container.credit import CreditWindow
from ..errors import LocalProtocolError
from ..fronts.base import (
    SND_SETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingLink,
    SendingLink,
)
from ..limits import Limits
from ..outcomes import Error
from ..termini import Source, Target
from .hops import HIGH, LOW, PINNED, STREAMS
from .placed import PlacedLinks
from .splices import Siblings

#: Address of the links of records, and beginning of addresses that name a node.
MESH: Final = "$mesh"
#: Records that a neighbour may send ahead.
_CREDIT: Final = 64
#: Part of the room for frames of a connection that a session for links of a band may have: most messages are of low priority.
#: The rest is for those who come later. What a stream has sent ahead is in front of all other messages on the connection.
_SHARES: Final = {LOW: 1 / 2, HIGH: 1 / 8, STREAMS: 1 / 64, PINNED: 1 / 16}
_FRAMES_MIN: Final = 8
#: A message whose body is one value (Part 3 §3.2.8).
_BODY: Final = b"\x00\x53\x77"


class Sessions:
    """Sessions for links of one use; another one is begun when the last has no room for a link.

    Args:
        connection: The connection to the neighbour.
        of: The session of a peer whose links use these; None for links of many senders.
        window: Frames that the neighbour may send ahead; None for as many as there is room for.
    """

    def __init__(
        self, connection: Connection, of: object = None, *, window: int | None = None
    ) -> None:
        self._connection = connection
        self._window = window
        self.of = of
        self._sessions: list[Any] = []
        #: Links opened and not ended, for pools that end with the last of them.
        self.users = 0
        #: Those of one peer's session: discharges of transactions wait for messages of the others.
        self.siblings = None if of is None else Siblings()

    def attach_sender(self, name: str, endpoint: Any, **options: Any) -> Any:
        """Attach a link on which we send; see ``Opener``."""
        return self._attach("attach_sender", name, endpoint, options)

    def attach_receiver(self, name: str, endpoint: Any, **options: Any) -> Any:
        """Attach a link on which the neighbour sends; see ``Opener``."""
        return self._attach("attach_receiver", name, endpoint, options)

    def _attach(self, method: str, name: str, endpoint: Any, options: Mapping[str, Any]) -> Any:
        self._sessions = [each for each in self._sessions if not each.ended]
        if self._sessions:
            try:
                return getattr(self._sessions[-1], method)(name, endpoint, **options)
            except LocalProtocolError:
                # No handle is left; for other reasons, the next attempt fails as well.
                pass
        if self._connection.engine_over:
            raise LocalProtocolError("the connection to the next node is lost")
        session = self._connection.engine.begin(window=self._window)
        self._sessions.append(session)
        return getattr(session, method)(name, endpoint, **options)

    def end(self) -> None:
        """End the sessions, and with them their links."""
        for each in self._sessions:
            if not each.ended:
                each.end()
        self._sessions.clear()


class RecordSender:
    """Our link of records to a neighbour. Records wait in order for credit.

    Args:
        on_lost: Called when the link has ended, or too many records wait for its credit.
        most: Records that may wait.
    """

    def __init__(self, on_lost: Callable[[str], None], *, most: int) -> None:
        self._on_lost = on_lost
        self._most = most
        #: Error with which the neighbour has refused the link; None if it has not.
        self.refusal: Error | None = None
        self._waiting: deque[bytes] = deque()
        self._link: SendingLink | None = None

    def send(self, record: bytes) -> None:
        """Send *record* when there is credit."""
        link = self._link
        if link is not None and not self._waiting and link.credit > 0 and link.writable:
            link.send(_BODY + record, settled=True)
        elif len(self._waiting) < self._most:
            self._waiting.append(record)
        else:
            self._on_lost(f"mesh_records_waiting_max ({self._most}) records wait for its credit")

    def on_attached(self, link: SendingLink) -> None:
        """Use the link from now on."""
        self._link = link

    def on_credit(self, link: SendingLink) -> None:
        """Send what waits."""
        while self._waiting and link.credit > 0 and link.writable:
            link.send(_BODY + self._waiting.popleft(), settled=True)
        if link.draining and not self._waiting:
            link.drained()

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Do nothing: records are settled."""

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """Report the end of the link."""
        # Members speak 1.0; links of other protocols do not tell a refusal from an end.
        ended: Any = link
        if ended.refused:
            self.refusal = error
        self._link = None
        self._waiting.clear()
        self._on_lost("the link of records has ended")


class RecordReceiver:
    """Link of records of a neighbour.

    Args:
        link: The link, requested by the neighbour.
        limits: ``mesh_message_max`` bounds a record.
        on_record: Called with each record.
        on_lost: Called when the link has ended, or carried something else.
    """

    def __init__(
        self,
        link: ReceivingLink,
        limits: Limits,
        on_record: Callable[[bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._window = CreditWindow(link, messages=_CREDIT)
        self._on_record = on_record
        self._on_lost = on_lost
        link.accept(
            self, target=Target(address=MESH), max_message_size=limits.mesh_message_max + len(_BODY)
        )

    def on_attached(self, link: ReceivingLink) -> None:
        """Give the first credit."""
        self._window.opened()

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Pass records on."""
        size = sum([len(each.payload) for each in deliveries])
        self._window.took(len(deliveries), size)
        for each in deliveries:
            payload = each.payload
            if not each.settled:
                self._on_lost("records are sent settled")
                return
            if not payload.startswith(_BODY):
                self._on_lost("a record is a message of one value, without other sections")
                return
            self._on_record(payload[len(_BODY) :])
        self._window.freed(len(deliveries), size)

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: the link is not streaming."""

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Do nothing: records are settled."""

    def on_flow(self, link: ReceivingLink) -> None:
        """Top up the credit."""
        self._window.freed(0, 0)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Report the end of the link."""
        self._window.close()
        self._on_lost("the link of records has ended")


class Neighbour:
    """A connection to another member.

    Args:
        node: Its id; our own for the connection in memory to ourselves, which has no link of records.
        incarnation: Its incarnation.
        connection: The connection, open.
        edge: It is an edge of ours.
        direct: It is no neighbour in the routing, and has no links of records.
        on_lost: Called with the neighbour and a reason when it is to be disconnected.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        connection: Connection,
        *,
        edge: bool = False,
        direct: bool = False,
        limits: Limits,
        on_lost: Callable[[Neighbour, str], None] = lambda neighbour, why: None,
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.connection = connection
        self.edge = edge
        self.direct = direct
        self._limits = limits
        self._on_lost = on_lost
        self._lost = False
        #: Sessions for legs of many senders, on which only we send, by their band.
        self._shared = {band: Sessions(connection, window=1) for band in (LOW, HIGH)}
        self._pinned: dict[object, Sessions] = {}
        self._records = RecordSender(self.lose, most=limits.mesh_records_waiting_max)
        self._receiver: RecordReceiver | None = None
        #: Links that we opened, and links that it opened, which have not ended.
        self.opened = 0
        self.accepted = 0
        #: Links that it opened, and that end here.
        self.placed = PlacedLinks()

    @property
    def usable(self) -> bool:
        """Whether links can be opened."""
        return not self._lost and not self.connection.engine_over

    @property
    def refusal(self) -> Error | None:
        """Error with which it has refused our link of records; None if it has not."""
        return self._records.refusal

    @property
    def heard_at(self) -> float:
        """Time at which octets of it arrived last."""
        return self.connection.engine.last_received if self.usable else -math.inf

    def start(self) -> None:
        """Open the link of records.

        Raises:
            LocalProtocolError: The peer allows no links.
        """
        Sessions(self.connection, window=1).attach_sender(
            f"{MESH}/{self.node}",
            self._records,
            source=Source(),
            target=Target(address=MESH),
            snd_settle_mode=SND_SETTLED,
        )

    def send(self, record: bytes) -> None:
        """Send a record, unless the connection is lost."""
        if not self._lost:
            self._records.send(record)

    def receive_from(
        self, link: ReceivingLink, on_record: Callable[[Neighbour, bytes], None]
    ) -> None:
        """Accept the neighbour's link of records; a second one is refused, and any on a direct connection."""
        if (
            self.direct
            or self._receiver is not None
            or link.snd_settle_mode not in (SND_SETTLED, 2)
        ):
            link.refuse(
                Error("amqp:not-allowed", "there is one link of settled records between neighbours")
            )
            return
        _narrow(link, _CREDIT)
        self._receiver = RecordReceiver(
            link, self._limits, lambda record: on_record(self, record), self.lose
        )

    def lose(self, why: str) -> None:
        """Report, once, that the connection is of no use any more."""
        if not self._lost:
            self._lost = True
            self._on_lost(self, why)

    # --- links of routes -----------------------------------------------------------------------

    def narrow(self, link: ReceivingLink | SendingLink, band: str) -> None:
        """Limit the window of the neighbour's session of *link*, a link of *band*, so that its other sessions get room.

        All sessions of a connection share ``session_window_bytes``, and the first one would get all of it.
        """
        _narrow(link, self._window_of(band))

    def _window_of(self, band: str) -> int:
        frames = self._limits.session_window_bytes // self._limits.frame_size_max
        return max(_FRAMES_MIN, int(_SHARES[band] * frames))

    def opener(self, *, of: object = None, band: str = LOW) -> Sessions:
        """Return the sessions for links that belong to the session *of*, or for legs of *band* without one.

        A leg for messages that are streamed has a session of its own: a message that is not read keeps its window.

        Raises:
            LocalProtocolError: Too many links are open.
        """
        if self.opened >= self._limits.mesh_legs_max:
            raise LocalProtocolError("mesh_legs_max links lead to the next node")
        if of is None:
            return self._shared.get(band) or Sessions(self.connection, window=1)
        found = self._pinned.get(of)
        if found is None:
            window = self._window_of(PINNED)
            found = self._pinned[of] = Sessions(self.connection, of, window=window)
        return found

    def took(self, opener: Sessions) -> None:
        """Count a link that was opened."""
        self.opened += 1
        opener.users += 1

    def gave_back(self, opener: Sessions) -> None:
        """Count the end of a link; sessions that were begun for one of the peer's end with the last of its links."""
        self.opened -= 1
        opener.users -= 1
        if not opener.users and opener is not self._shared[LOW]:
            opener.end()
            if opener.of is not None:
                self._pinned.pop(opener.of, None)

    def __repr__(self) -> str:
        return f"<Neighbour {self.node!r}, {self.opened} links>"


def _narrow(link: ReceivingLink | SendingLink, frames: int) -> None:
    # Members speak 1.0; other protocols have no windows.
    session: Any = link.session
    session.narrow(frames)
