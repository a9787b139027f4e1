"""Branches as one session of a peer uses them: rights, associations, and the table of replies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeAlias

from ...errors import AmqpError
from ...events import Peer
from ...fronts.base import LinkConnection
from ...outcomes import Error
from ...security.access import Rights
from ...transactions import XaStatus, Xid
from .branch import Branch
from .endings import BranchEndings, Done
from .registry import Branches
from .states import REPLIES, Operation, Reply, State

#: Address at which the right to manage gives access to branches of all users.
COORDINATOR: Final = "$coordinator"

_CONDITIONS: Final = {
    Reply.NOT_ALLOWED: "amqp:not-allowed",
    Reply.NOT_FOUND: "amqp:not-found",
    Reply.ILLEGAL: "amqp:illegal-state",
}


class PeerRights(Protocol):
    """Rights of peers."""

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        """Return None if *peer* has the right *wanted* at *address*, or why not."""

    def decide_anywhere(self, peer: Peer) -> Error | None:
        """Return None if *peer* has a right at any address, or why not."""


#: An end of a branch: prepares, commits or rolls it back, and calls back.
_Ending: TypeAlias = Callable[[Branch, Done], None]


class PeerBranches:
    """Branches as the sessions of one connection or anchor use them
    (:class:`~amqp_rt.transactions.TransactionBranches`).

    Args:
        branches: All branches of the broker.
        peer: The peer, whose virtual host is known.
        connection: Connection of the links of the session.
        rights: Rights of peers.
    """

    def __init__(
        self, branches: Branches, peer: Peer, connection: LinkConnection, rights: PeerRights
    ) -> None:
        self.connection = connection
        self._branches = branches
        self._endings = BranchEndings(branches)
        self._peer = peer
        self._rights = rights
        #: Branches with which the session is associated.
        self._mine: dict[Branch, None] = {}
        #: The one to which its work belongs.
        self._current: Branch | None = None

    @property
    def txn_id(self) -> bytes | None:
        """Id of the transaction that is the branch to which work belongs now; None for no branch."""
        return None if self._current is None else self._current.work.id

    def check(self) -> None:
        """Check that the peer may use transactions, as a link to the coordinator would be.

        Raises:
            AmqpError: It has no right at any address.
        """
        refused = self._rights.decide_anywhere(self._peer)
        if refused is not None:
            raise refused.raised_as(AmqpError)

    def moved(self, peer: Peer) -> None:
        """Use the rights of *peer* from now on: the session has moved to its connection."""
        self._peer = peer

    # --- Looking up ---

    @property
    def _manages(self) -> bool:
        """Whether the peer has access to branches of all users."""
        return self._rights.decide(self._peer, Rights.MANAGE, COORDINATOR) is None

    def _find(self, xid: Xid) -> Branch | None:
        """Return the branch *xid* if the peer has access to it, and None otherwise."""
        found = self._branches.find(self._peer.virtual_host, xid)
        if found is None or found.user == self._peer.user or self._manages:
            return found
        return None

    def _get(self, xid: Xid) -> Branch:
        """Return the branch *xid*.

        Raises:
            AmqpError: There is none to which the peer has access.
        """
        found = self._find(xid)
        if found is None:
            raise AmqpError(f"there is no branch {xid}", condition="amqp:not-found")
        return found

    def _state_of(self, branch: Branch | None) -> State:
        """Return the state of *branch* from the view of the session."""
        if branch is None:
            return State.UNKNOWN
        state = branch.state
        if state is State.ACTIVE and branch.sessions.get(self) is False:
            # Others continue, but this session has suspended its work.
            return State.SUSPENDED
        return state

    def _reply(self, operation: Operation, branch: Branch | None, xid: Xid) -> XaStatus:
        """Return the status that answers *operation*, OK if it has to be carried out.

        Raises:
            AmqpError: It is refused.
        """
        state = self._state_of(branch)
        reply = REPLIES[operation][state]
        condition = _CONDITIONS.get(reply)
        if condition is not None:
            raise AmqpError(
                f"{operation.value}: branch {xid} is {state.value}", condition=condition
            )
        if branch is None or reply is Reply.OK:
            return XaStatus.OK
        return branch.failure if reply is Reply.DEAD else branch.decided

    # --- Work ---

    def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaStatus:
        """Start a branch, join one, or resume work in one; work belongs to it from now on.

        Raises:
            AmqpError: The state of the branch or the session does not allow it, there are too many
                branches, or join and resume are both set.
        """
        if join and resume:
            raise AmqpError("a branch is joined or resumed", condition="amqp:not-allowed")
        if not (join or resume):
            # An xid that another user has chosen is taken, too.
            branch = self._branches.find(self._peer.virtual_host, xid)
            operation = Operation.START
            if branch is not None and self._find(xid) is None:
                # How far that user has come with it is not shown.
                raise AmqpError(f"start: branch {xid} is known", condition="amqp:not-allowed")
        else:
            branch = self._find(xid)
            operation = Operation.JOIN if join else Operation.RESUME
        status = self._reply(operation, branch, xid)
        if status is not XaStatus.OK:
            return status
        if self._current is not None:
            raise _illegal(f"the session works in branch {self._current.xid}: end that first")
        if branch is None:
            branch = self._branches.open(self._peer.virtual_host, xid, self._peer.user)
        elif branch.busy:
            raise _illegal(f"branch {xid} is being ended")
        elif resume and self not in branch.sessions:
            raise _illegal(f"the session has not suspended its work in branch {xid}")
        self._associate(branch)
        return XaStatus.OK

    def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaStatus:
        """End or suspend the work of the session in a branch; *fail* makes that rollback-only.

        Raises:
            AmqpError: The session has no work there, or suspend and fail are both set.
        """
        if fail and suspend:
            raise AmqpError("work is suspended or has failed", condition="amqp:not-allowed")
        operation = Operation.FAIL if fail else Operation.SUSPEND if suspend else Operation.END
        branch = self._find(xid)
        status = self._reply(operation, branch, xid)
        if branch is None or self not in branch.sessions:
            raise _illegal(f"the session has no work in branch {xid}")
        if status is XaStatus.OK and suspend:
            branch.sessions[self] = False
            self._leave(branch)
            return status
        self._dissociate(branch)
        if fail and status is XaStatus.OK:
            branch.work.fail("its work has failed")
            return branch.failure
        return status

    def when_returned(self, xid: Xid, call: Callable[[], None]) -> None:
        """Call *call* once the queues have got back the messages of a branch that was rolled back.

        Without such a branch it is called at once.
        """
        branch = self._find(xid)
        if branch is None:
            call()
        else:
            branch.work.when_returned(call)

    def _associate(self, branch: Branch) -> None:
        """Let the work of the session belong to *branch*."""
        if not self._mine:
            self.connection.followers[self] = self.close
        self._mine[branch] = None
        self._current = branch
        branch.sessions[self] = True
        self._branches.transactions.lend(self.connection, branch.work)

    def _leave(self, branch: Branch) -> None:
        """Let no more work belong to *branch*."""
        if self._current is branch:
            self._current = None
        self._branches.transactions.take_back(self.connection, branch.work)

    def _dissociate(self, branch: Branch) -> None:
        self._leave(branch)
        branch.sessions.pop(self, None)
        self._mine.pop(branch, None)
        if not self._mine:
            self.connection.followers.pop(self, None)

    def close(self) -> None:
        """Make the branches rollback-only with which the session, which has ended, is associated."""
        for branch in list(self._mine):
            self._dissociate(branch)
            branch.work.fail("a session ended that had work in it")

    # --- Ends ---

    def prepare(self, xid: Xid, done: Done) -> None:
        """Prepare a branch: what is durable in it survives the process.

        Raises:
            AmqpError: The state of the branch does not allow it.
        """
        self._perform(Operation.PREPARE, xid, done)

    def commit(self, xid: Xid, done: Done, *, one_phase: bool = False) -> None:
        """Commit a branch, a prepared one unless *one_phase* is set.

        Raises:
            AmqpError: The state of the branch does not allow it.
        """
        self._perform(Operation.COMMIT_ONE if one_phase else Operation.COMMIT, xid, done)

    def roll_back(self, xid: Xid, done: Done) -> None:
        """Roll back a branch.

        Raises:
            AmqpError: The state of the branch does not allow it.
        """
        self._perform(Operation.ROLL_BACK, xid, done)

    def forget(self, xid: Xid, done: Done) -> None:
        """Forget a branch that an operator has completed.

        Raises:
            AmqpError: The state of the branch does not allow it.
        """
        self._perform(Operation.FORGET, xid, done)

    def _perform(self, operation: Operation, xid: Xid, done: Done) -> None:
        """Carry out *operation* on a branch, and call *done* when that is stored."""
        branch = self._find(xid)
        if branch is not None and branch.when_free(
            partial(self._perform_later, operation, xid, done)
        ):
            return
        status = self._reply(operation, branch, xid)
        if branch is None:
            return
        if branch.sessions:
            raise _illegal(f"{operation.value}: sessions have work in branch {xid}: end that first")
        if status is XaStatus.OK:
            endings: dict[Operation, _Ending] = {
                Operation.PREPARE: self._endings.prepare,
                Operation.COMMIT_ONE: self._endings.commit_one,
                Operation.COMMIT: self._endings.commit,
                Operation.ROLL_BACK: self._endings.roll_back,
                Operation.FORGET: self._endings.forget,
            }
            endings[operation](branch, done)
            return
        if branch.state is State.DEAD:
            if branch.timed_out or operation is not Operation.PREPARE:
                self._branches.forget(branch)
            if operation is Operation.ROLL_BACK and not branch.timed_out:
                status = XaStatus.OK
            branch.work.when_returned(partial(done, status))
            return
        done(status)

    def _perform_later(self, operation: Operation, xid: Xid, done: Done) -> None:
        try:
            self._perform(operation, xid, done)
        except AmqpError as error:
            done(error)

    # --- Others ---

    def recover(self, done: Callable[[list[Xid]], None]) -> None:
        """Call *done* with the branches that are prepared, or were completed by an operator.

        They are those of the user, or all for a peer that may manage ``$coordinator``. Branches that are
        being ended are waited for.
        """
        manages = self._manages

        def found() -> None:
            host, user = self._peer.virtual_host, self._peer.user
            known = self._branches.in_doubt(host)
            done([each.xid for each in known if manages or each.user == user])

        journal = self._branches.journal
        if journal is not None and any(
            each.busy for each in self._branches.of(self._peer.virtual_host)
        ):
            journal.when_kept(found)
        else:
            found()

    def timeout(self, xid: Xid) -> float:
        """Return the timeout of a branch in seconds.

        Raises:
            AmqpError: There is no such branch.
        """
        return self._get(xid).timeout_s

    def set_timeout(self, xid: Xid, seconds: float) -> None:
        """Roll back a branch *seconds* from now, 0 for the default, unless it is prepared by then.

        Raises:
            AmqpError: There is no such branch, or that is too long.
        """
        self._get(xid).set_timeout(seconds)


def _illegal(description: str) -> AmqpError:
    return AmqpError(description, condition="amqp:illegal-state")
