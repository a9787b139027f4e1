"""A link joined with several, for addresses whose messages all destinations get.

Each node of a tree joins the link that came with one for each edge of the tree that goes on, so that a connection carries
one copy. CopiedMessage share the octets of the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Final, NamedTuple

from ..fronts.base import (
    SND_SETTLED,
    IncomingDelivery,
    OutgoingDelivery,
    ReceivingLink,
    SendingLink,
)
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import RELEASED, Error, rejected
from ..transactions import TransactionalState
from .balance import combined
from .passing import (
    STREAM_ABOVE,
    Opener,
    Passing,
    Room,
    cause_of,
    distributed_target,
    for_client,
    give_up,
    pass_outcome,
    settle_fitting,
)

_NOT_FOUND = Error("amqp:not-found", "no destination of this address can be reached")
_NOT_POSTED: Final = rejected(
    "amqp:not-implemented", "a message for several destinations cannot be part of a transaction"
)


class Edge(NamedTuple):
    """Edge of a tree that goes on from here: a session, the name of a link, and properties of its attach."""

    opener: Opener
    name: str
    properties: Mapping[object, object] | None = None


class CopiedMessage:
    """A message and its copies, one for each branch."""

    def __init__(self, original: IncomingDelivery, *, worst: bool) -> None:
        self.original = original
        self.copies: list[BranchCopy] = []
        self._worst = worst
        self._undecided = 0

    @property
    def read(self) -> bool:
        """Whether the copies need nothing more of the original."""
        original = self.original
        return original.aborted or (
            original.complete and all(each.ended or each.complete for each in self.copies)
        )

    def add(self) -> BranchCopy:
        """Create a copy."""
        copy = BranchCopy(self)
        self.copies.append(copy)
        self._undecided += 1
        return copy

    def decide(self) -> None:
        """Count the outcome of one copy; the last one gives that of the message."""
        self._undecided -= 1
        original = self.original
        if not self._undecided and not original.settled and original.link.attached:
            original.context = None
            states = [each.local_state or RELEASED for each in self.copies]
            settle_fitting(original, combined(states, worst=self._worst))

    def pull(self) -> bool:
        """Read what has arrived of a streamed message, if every copy has used what came before; return whether it did.

        The slowest branch thus holds up the sender, by the window of its session, and nothing is kept for it here.
        """
        original = self.original
        open_copies = [each for each in self.copies if not each.ended]
        if not open_copies:
            # No branch takes the rest.
            original.read_chunks()
            return False
        if any(each.chunks or each.complete for each in open_copies):
            return False
        chunks = original.read_chunks()
        for each in open_copies:
            each.chunks = list(chunks)
            each.complete = original.complete
        return bool(chunks) or original.complete


class BranchCopy:
    """Message as one branch sees it: an incoming delivery whose outcome is one of several."""

    def __init__(self, copies: CopiedMessage) -> None:
        original = copies.original
        self._copies = copies
        self.link = original.link
        self.tag = original.tag
        self.message_format = original.message_format
        self.second = False
        self.resumed = False
        self.state = None
        self.local_state: Any = None
        self.payload = original.payload
        self.streamed = original.streamed
        self.complete = original.complete and not original.streamed
        self.context: Any = None
        #: The branch on which it is sent.
        self.branch: TreeBranch | None = None
        #: Parts of a streamed message that the branch has not sent on.
        self.chunks: list[bytes] = []
        #: The branch takes nothing more.
        self.ended = False

    @property
    def settled(self) -> bool:
        """Whether the sender has settled."""
        return self._copies.original.settled

    @property
    def aborted(self) -> bool:
        """Whether the sender has aborted the message."""
        return self._copies.original.aborted

    def read_chunks(self) -> list[bytes]:
        """Return the parts that the branch has not sent on."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def settle(self, outcome: Any) -> None:
        """Set the outcome of this copy."""
        if self.local_state is None:
            # Settled without a state counts as released, the least of the outcomes.
            self.local_state = for_client(outcome) or RELEASED
            self._copies.decide()
            self.done()

    def done(self) -> None:
        """Note that nothing more is expected of the branch for this copy."""
        if self.branch is not None:
            self.branch.unsettled.pop(self, None)
            self.branch.check_retired()

    def update(self, state: Any) -> None:
        """Do nothing: only the outcome of all is passed on."""


class TreeBranch:
    """Link of one edge. Belongs to a :class:`Multicast`."""

    def __init__(self, multicast: Multicast, edge: Edge, limits: Limits) -> None:
        self._multicast = multicast
        came = multicast.inlet
        self.over = False
        #: Gets no new messages; detached when its messages are settled.
        self.retiring = False
        #: Copies without an outcome, with the time at which they arrived, the oldest first.
        self.unsettled: dict[BranchCopy, float] = {}
        #: CopiedMessage of streamed messages that have not been sent on completely.
        self.streams: list[BranchCopy] = []
        self.link: SendingLink = edge.opener.attach_sender(
            edge.name,
            self,
            source=came.source,
            target=came.target,
            snd_settle_mode=came.snd_settle_mode,
            properties=edge.properties,
            desired_capabilities=came.desired_capabilities,
        )
        self.passing = Passing(self.link, frame_max=limits.frame_size_max, keep_tags=False)

    @property
    def credit(self) -> int:
        """Messages that may still be sent, beside those that wait."""
        return self.link.credit - len(self.passing.waiting)

    @property
    def ready(self) -> bool:
        """Whether a message would leave at once."""
        return self.passing.idle and self.link.credit > 0 and self.link.writable

    def take(self, copies: list[Any]) -> int:
        """Send *copies* on, or let them wait; return the bytes that they may take."""
        self.streams += [each for each in copies if each.streamed]
        now = self._multicast.now()
        for each in copies:
            if not each.settled:
                each.branch = self
                self.unsettled[each] = now
        return self.passing.add(copies)

    def stuck(self, since: float) -> int:
        """Return the number of copies without an outcome that arrived before *since*."""
        return sum(1 for _ in takewhile(lambda at: at < since, self.unsettled.values()))

    def check_retired(self) -> None:
        """Detach a branch that is replaced, once nothing of it is under way."""
        if (
            self.retiring
            and not self.over
            and not self.unsettled
            and self.passing.idle
            and (self.link.writable or not self.link.attached)
        ):
            self.link.detach()

    # --- events of the link -----------------------------------------------------------------

    def on_attached(self, link: SendingLink) -> None:
        """Answer the sender once all branches are attached or have ended."""
        self._multicast.answer(None)

    def on_credit(self, link: SendingLink) -> None:
        """Send on what waits; pass the new credit if this branch had the least."""
        self.passing.pump()
        self._multicast.advance(flowed=True)
        if link.draining and self.passing.idle and link.writable:
            link.drained()
            self._multicast.advance(flowed=True)

    def on_outcomes(self, link: SendingLink, deliveries: list[OutgoingDelivery]) -> None:
        """Add to the outcomes of the messages."""
        for sending in deliveries:
            if sending.context is not None:
                pass_outcome(sending, sending.context)

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        """Go on with the other branches; the last one ends the link that came."""
        self.over = True
        self.passing.end()
        self.unsettled.clear()
        for copy in self.streams:
            copy.ended = True
            copy.chunks = []
        self.streams.clear()
        self._multicast.left(cause_of(link, error), closed)


class Multicast:
    """Link that a peer requested, joined with one for each edge of a tree.

    The peer is answered when every edge has answered or refused, with the least size, and is refused if all have. Credit is
    the least of the branches. A message has the outcome of all its copies by rank (``balance.combined``); a branch that ends
    counts as *modified* for what had begun to leave, otherwise as *released*. Receivers settle first: the outcome of a
    message is known only after the receivers' own.

    Args:
        came: The link that the peer requested, not answered yet.
        edges: Where the tree goes on; at least one.
        skip_slow: Skip settled messages for a branch that has no credit or room. Effective on links that send settled
            messages only; their credit is then the most of the branches.
        worst: Let *accepted* count least, so that it needs all destinations.
        limits: As for a splice.
        refuse: Called with the error instead of ``came.refuse``.
        on_ended: Called once, when all links have ended.
        on_left: Called with each branch that has ended, if the link that came stays without branches; without it, that ends
            with the last branch.
        now: The clock, in seconds, if ``TreeBranch.stuck`` is called.

    Raises:
        LocalProtocolError: No link can be opened for the first edge. The peer has not been answered. Later edges that
            cannot be opened count as refused.
    """

    def __init__(
        self,
        came: ReceivingLink,
        edges: Iterable[Edge],
        *,
        skip_slow: bool = False,
        worst: bool = False,
        limits: Limits = DEFAULT_LIMITS,
        refuse: Callable[[Error], None] | None = None,
        on_ended: Callable[[Multicast], None] = lambda multicast: None,
        on_left: Callable[[TreeBranch], None] | None = None,
        now: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.inlet = came
        self.now = now
        self._on_left = on_left
        #: CopiedMessage that slow branches did not get.
        self.skipped = 0
        #: Settled messages that arrived when there was no branch.
        self._undelivered = 0
        self._skips = skip_slow and came.snd_settle_mode == SND_SETTLED
        self._worst = worst
        self._limits = limits
        self._room = Room(limits)
        self._refuse = refuse or came.refuse
        self._on_ended = on_ended
        self._answered = False
        self._inlet_over = False
        self._ending: tuple[Error | None, bool] | None = None
        #: Streamed messages that have not been read completely.
        self._streams: list[CopiedMessage] = []
        self.branches: list[TreeBranch] = []
        self.branches.extend(TreeBranch(self, each, limits) for each in edges)

    @property
    def held(self) -> int:
        """Bytes of messages that wait for the slowest branch; copies share their octets."""
        return max((each.passing.held for each in self.branches), default=0)

    @property
    def dropped(self) -> int:
        """Number of settled copies that were lost because a link ended."""
        return self._undelivered + sum(each.passing.dropped for each in self.branches)

    def add(self, edge: Edge) -> TreeBranch:
        """Open a further branch, for the messages that arrive from now on.

        Raises:
            LocalProtocolError: No link can be opened.
        """
        branch = TreeBranch(self, edge, self._limits)
        self.branches.append(branch)
        return branch

    def retire(self, branch: TreeBranch) -> None:
        """Send nothing new to *branch*, and detach it when its messages are settled."""
        branch.retiring = True
        branch.check_retired()
        self.advance(flowed=True)

    # --- attaching and ending ------------------------------------------------------------------

    def answer(self, error: Error | None) -> None:
        """Answer the peer if no branch is open any more; *error* is the latest refusal."""
        if self._answered or any(
            not each.over and not each.link.attached for each in self.branches
        ):
            return
        self._answered = True
        links = [each.link for each in self.branches if not each.over]
        if not links:
            self._inlet_over = True
            self._refuse(error or _NOT_FOUND)
            return
        sizes = [each.max_message_size for each in links if each.max_message_size]
        self.inlet.accept(
            self,
            target=distributed_target(self.inlet),
            max_message_size=min(sizes, default=0),
            stream_above=STREAM_ABOVE,
            rcv_settle_mode=0,
        )

    def left(self, error: Error | None, closed: bool) -> None:
        """Handle the end of a branch."""
        self.answer(error)
        if all(each.over for each in self.branches):
            if self._inlet_over:
                self._on_ended(self)
                return
            if self._on_left is None:
                self.inlet.detach(error, closed=closed)
                return
        self.advance(flowed=True)
        if self._on_left is not None:
            for each in [each for each in self.branches if each.over]:
                self.branches.remove(each)
                self._on_left(each)

    def on_attached(self, link: ReceivingLink) -> None:
        """Give the first credit."""
        self.advance(flowed=True)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        """Detach the branches when they have sent on what had arrived completely."""
        self._inlet_over = True
        self._ending = cause_of(link, error), closed
        if all(each.over for each in self.branches):
            self._on_ended(self)
        else:
            self.advance(flowed=False)

    # --- messages ----------------------------------------------------------------------------

    def deliver(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Copy messages to all branches."""
        batches: dict[TreeBranch, list[BranchCopy]] = {
            each: [] for each in self.branches if not each.over and not each.retiring
        }
        for delivery in deliveries:
            if type(delivery.state) is TransactionalState and not delivery.settled:
                delivery.settle(_NOT_POSTED)
                continue
            copies = CopiedMessage(delivery, worst=self._worst)
            for branch, batch in batches.items():
                if self._skips and (not branch.ready or len(batch) >= branch.credit):
                    self.skipped += 1
                    continue
                batch.append(copies.add())
            if delivery.streamed:
                self._streams.append(copies)
            if not batches:
                # The last branch ended while the message was on its way: no copy can decide its outcome.
                self._undelivered += delivery.settled
                give_up(delivery, begun=False)
            elif not delivery.settled:
                delivery.context = copies
        size = max([branch.take(batch) for branch, batch in batches.items() if batch], default=0)
        if size:
            self._room.took(len(deliveries), size)
        self.advance(flowed=False)

    def on_data(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Send on more of streamed messages."""
        self.advance(flowed=False)

    def on_settled(self, link: ReceivingLink, deliveries: list[IncomingDelivery]) -> None:
        """Settle the copies of what the sender has settled."""
        for delivery in deliveries:
            copies = delivery.context
            if delivery.settled and copies is not None:
                delivery.context = None
                for copy in copies.copies:
                    sending, copy.context = copy.context, None
                    if sending is not None:
                        sending.context = None
                        sending.settle()
                    copy.done()

    def on_flow(self, link: ReceivingLink) -> None:
        """Top up the credit, for example after a message that was aborted."""
        self.advance(flowed=False)

    # --- flow ----------------------------------------------------------------------------------

    def advance(self, *, flowed: bool) -> None:
        """Send on what the branches can take; give the sender the credit of the slowest, or end the branches."""
        branches = [each for each in self.branches if not each.over]
        moved = True
        while moved:
            for branch in branches:
                branch.passing.pump()
                branch.streams = [
                    each for each in branch.streams if each.chunks or not each.complete
                ]
            moved = sum(each.pull() for each in self._streams) > 0
        self._streams = [each for each in self._streams if not each.read]
        if self._ending is not None:
            for branch in branches:
                if branch.link.writable or not branch.link.attached:
                    branch.passing.drop()
                    branch.link.detach(self._ending[0], closed=self._ending[1])
            return
        inlet = self.inlet
        if not inlet.attached:
            return
        for branch in branches:
            branch.check_retired()
        credit_of = [each.credit for each in branches if not each.over and not each.retiring]
        target = (max if self._skips else min)(credit_of, default=0)
        waiting = max([len(each.passing.waiting) for each in branches], default=0)
        room = self._room.further(waiting, self.held) if waiting else self._room.alone
        target = max(0, min(target, room))
        credit = inlet.credit
        if target < credit or (target > credit and (flowed or 2 * (target - credit) >= target)):
            inlet.grant(target)
