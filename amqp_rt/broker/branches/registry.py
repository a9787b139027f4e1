"""Registry of the branches of a broker: their number, timeouts, and nodes with prepared work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from ...clock import Clock
from ...errors import AmqpError
from ...limits import Limits
from ...transactions import Xid
from ..durable.journal import Journal
from ..producers import Intake
from ..transactions import Transactions
from .branch import Branch
from .states import State
from .work import BranchWork

#: States in which a branch is listed by ``recover``.
IN_DOUBT: Final = (State.PREPARED, State.HEURISTIC)


class WorkNode(Protocol):
    """Node of a broker in which branches have work."""

    intake: Intake

    def owns(self, owner: object) -> bool:
        """Return whether *owner* is the node or a part of it."""


class Branches:
    """Branches of distributed transactions of all virtual hosts.

    Args:
        journal: Stores prepared branches; None to keep them in memory.
        transactions: Gives links access to the work of branches.
        clock: Clock of timeouts and preparations.
        limits: Bounds.
        new_number: Returns a number unused in the store.
        guard: Makes a call, whose exception is logged.
    """

    def __init__(
        self,
        journal: Journal | None,
        transactions: Transactions,
        clock: Clock,
        limits: Limits,
        new_number: Callable[[], int],
        guard: Callable[[object, Callable[[], object]], None],
    ) -> None:
        self.journal = journal
        self.transactions = transactions
        self.clock = clock
        self.limits = limits
        self.new_number = new_number
        self._guard = guard
        #: Virtual host and xid → branch, oldest first.
        self._branches: dict[tuple[str, Xid], Branch] = {}
        #: Nodes to be deleted once no prepared branch has work there, with the calls that do so.
        self._leaving: dict[WorkNode, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._branches)

    def find(self, virtual_host: str, xid: Xid) -> Branch | None:
        """Return the branch *xid* of *virtual_host*; None if there is none."""
        return self._branches.get((virtual_host, xid))

    def of(self, virtual_host: str) -> list[Branch]:
        """Return the branches of *virtual_host*, oldest first."""
        return [each for each in self._branches.values() if each.virtual_host == virtual_host]

    def __iter__(self) -> Iterator[Branch]:
        """Return the branches of all virtual hosts, oldest first. They may change meanwhile."""
        return iter(list(self._branches.values()))

    def in_doubt(self, virtual_host: str) -> list[Branch]:
        """Return the branches of *virtual_host* that are prepared or were completed by an operator."""
        return [each for each in self.of(virtual_host) if each.state in IN_DOUBT]

    def open(self, virtual_host: str, xid: Xid, user: str | None) -> Branch:
        """Create a branch of *user*.

        Raises:
            AmqpError: There are too many.
        """
        own = [each for each in self.of(virtual_host) if each.user == user]
        if len(own) >= self.limits.branches_user_max and not self._make_room(own):
            raise AmqpError(
                f"the user has {len(own)} branches of distributed transactions already",
                condition="amqp:resource-limit-exceeded",
            )
        if len(self._branches) >= self.limits.branches_max and not self._make_room(
            self._branches.values()
        ):
            raise AmqpError(
                f"the broker has {len(self._branches)} branches of distributed transactions already",
                condition="amqp:resource-limit-exceeded",
            )
        branch = self.make(virtual_host, xid, user, 0)
        self.add(branch)
        return branch

    def make(self, virtual_host: str, xid: Xid, user: str | None, number: int) -> Branch:
        """Return a new branch; *number* is that of its prepared work in the store, 0 without one."""
        work = BranchWork(
            self.transactions.new_id(),
            self.journal,
            self.limits.transaction_work_max,
            self.transactions.do_in_turns,
            number,
        )
        return Branch(virtual_host, xid, user, work, self.clock.monotonic, self.limits)

    def _make_room(self, branches: Iterable[Branch]) -> bool:
        """Forget the first of *branches* that is dead and has no sessions; return whether there was one."""
        for branch in branches:
            if branch.state is State.DEAD and not branch.sessions and not branch.busy:
                self.forget(branch)
                return True
        return False

    def add(self, branch: Branch) -> None:
        """Add *branch*."""
        self._branches[branch.key] = branch

    def forget(self, branch: Branch) -> None:
        """Remove *branch*, which has ended."""
        if self._branches.get(branch.key) is branch:
            del self._branches[branch.key]
        self.release()

    # --- Time ---

    def sweep(self) -> None:
        """Roll back overdue branches, and forget those that ended so long ago; called periodically."""
        now = self.clock.monotonic()
        for branch in list(self._branches.values()):
            if branch.busy or branch.state in IN_DOUBT:
                continue
            if branch.state is State.DEAD:
                if branch.forget_at <= now and not branch.sessions:
                    self.forget(branch)
            elif branch.deadline <= now:
                self._guard(None, branch.time_out)

    # --- Nodes with prepared work ---

    def holds(self, node: WorkNode) -> bool:
        """Return whether a prepared branch has work in *node*."""

        def owns(place: object) -> bool:
            return place is node.intake or node.owns(place)

        return any(
            each.state is State.PREPARED and each.work.touches(owns)
            for each in self._branches.values()
        )

    def check_free(self, node: WorkNode, name: str) -> None:
        """Check that no prepared branch has work in *node*, which has this *name*.

        Raises:
            AmqpError: One has.
        """
        if self._branches and self.holds(node):
            raise AmqpError(
                f"{name!r} has work of distributed transactions that are prepared: have them committed or"
                " rolled back first",
                condition="amqp:precondition-failed",
            )

    def wait_free(self, node: WorkNode, call: Callable[[], object]) -> bool:
        """Call *call* once no prepared branch has work in *node*; return False if none has."""
        if not self._branches or not self.holds(node):
            return False
        self._leaving[node] = call
        return True

    def release(self) -> None:
        """Make the calls for nodes that have no prepared work any more."""
        for node, call in list(self._leaving.items()):
            if not self.holds(node):
                del self._leaving[node]
                self._guard(node, call)
