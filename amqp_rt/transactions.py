"""Types of a transaction's control link and of transactional work (Part 4 §4.5).

Defined outside the transport, because nodes that hold messages use them and the transport does not.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from .codec.composites import ANY, BOOLEAN, MANDATORY, any_of, composite
from .errors import AmqpError
from .events import Peer
from .outcomes import Accepted, Modified, Outcome, Received, Rejected, Released
from .values import Described


@composite(0x31, ("global_id", ANY))
class Declare(Struct, gc=False):
    """Ask for a new transaction (§4.5.2)."""

    global_id: Any = None


@composite(0x32, ("txn_id", ANY, MANDATORY), ("fail", BOOLEAN))
class Discharge(Struct, gc=False):
    """End a transaction: commit, or with ``fail`` roll back (§4.5.3)."""

    txn_id: Any
    fail: bool | None = None


@composite(0x33, ("txn_id", ANY, MANDATORY))
class Declared(Struct, gc=False):
    """Outcome of a declare (§4.5.5)."""

    txn_id: Any


@composite(
    0x34, ("txn_id", ANY, MANDATORY), ("outcome", any_of(Accepted, Rejected, Released, Modified))
)
class TransactionalState(Struct, gc=False):
    """State of a delivery inside a transaction (§4.5.8)."""

    txn_id: Any
    outcome: Outcome | Described | None = None


#: State of a delivery (Part 3 §3.4, Part 4 §4.5). States of other specifications are described values.
DeliveryState: TypeAlias = Outcome | Received | Declared | TransactionalState | Described


# --- Distributed transactions (X/Open XA; AMQP 0-10, class dtx) ---

#: Octets of a global transaction id and of a branch qualifier (X/Open XA, ``MAXGTRIDSIZE``, ``MAXBQUALSIZE``).
XID_PART_MAX: Final = 64


class Xid(NamedTuple):
    """Id of a branch of a distributed transaction."""

    format: int
    global_id: bytes
    branch_id: bytes

    def __str__(self) -> str:
        return f"{self.format}:{self.global_id.hex()}:{self.branch_id.hex()}"


class XaStatus(IntEnum):
    """Result of an operation on a branch (AMQP 0-10, domain ``dtx.xa-status``)."""

    OK = 0
    #: The branch was rolled back, for no stated reason or because it took too long.
    ROLLED_BACK = 1
    TIMED_OUT = 2
    #: An operator has completed the branch: perhaps, by a commit, by a rollback, or by some of each.
    HEURISTIC_HAZARD = 3
    HEURISTIC_COMMIT = 4
    HEURISTIC_ROLLBACK = 5
    HEURISTIC_MIXED = 6
    READ_ONLY = 7


#: Called with the result of an operation on a branch, or the error for which it was refused.
BranchDone: TypeAlias = Callable[[XaStatus | AmqpError], None]


class TransactionBranches(Protocol):
    """Branches of distributed transactions of a virtual host, as one session of a peer uses them.

    What the session posts and retires belongs to a branch if its deliveries have a
    :class:`~amqp_rt.transactions.TransactionalState` with :attr:`txn_id`, as in a transaction of a control
    link. When the connection or anchor ends, branches with which the session is associated are rolled back.

    Failures raise, or are passed on as, :class:`~amqp_rt.errors.AmqpError`: ``amqp:illegal-state``,
    ``amqp:not-allowed``, ``amqp:not-found`` also for branches of other users, ``amqp:invalid-field``,
    ``amqp:resource-limit-exceeded``; others if the store cannot keep a change.
    """

    @property
    def txn_id(self) -> bytes | None:
        """Id of the transaction that is the branch to which work belongs now; None for no branch."""

    def check(self) -> None:
        """Check that the peer may use transactions.

        Raises:
            AmqpError: It has no right at any address.
        """

    def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaStatus:
        """Start a branch, join one, or resume work in one; work belongs to it from now on."""

    def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaStatus:
        """End or suspend the work of the session in a branch; *fail* makes that rollback-only."""

    def when_returned(self, xid: Xid, call: Callable[[], None]) -> None:
        """Call *call* once the queues have got back the messages of a branch that was rolled back.

        Without such a branch, or if they have them, it is called at once.
        """

    def prepare(self, xid: Xid, done: BranchDone) -> None:
        """Prepare a branch: what is durable in it survives the process."""

    def commit(self, xid: Xid, done: BranchDone, *, one_phase: bool = False) -> None:
        """Commit a branch, a prepared one unless *one_phase* is set."""

    def roll_back(self, xid: Xid, done: BranchDone) -> None:
        """Roll back a branch."""

    def forget(self, xid: Xid, done: BranchDone) -> None:
        """Forget a branch that an operator has completed."""

    def recover(self, done: Callable[[list[Xid]], None]) -> None:
        """Call *done* with the branches that are prepared, or were completed by an operator."""

    def timeout(self, xid: Xid) -> float:
        """Return the timeout of a branch in seconds."""

    def set_timeout(self, xid: Xid, seconds: float) -> None:
        """Roll back a branch *seconds* from now, 0 for the default, unless it is prepared by then."""

    def moved(self, peer: Peer) -> None:
        """Use the rights of *peer* from now on: the session has moved to its connection."""
