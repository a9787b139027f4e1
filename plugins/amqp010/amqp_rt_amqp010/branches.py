"""Distributed transactions of a session (0-10 §dtx, X/Open XA), in branches of the broker."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Final, cast

from amqp_rt.fronts import (
    XID_PART_MAX,
    AmqpError,
    TransactionBranches,
    XaStatus,
)
from amqp_rt.fronts import Xid as BranchId

from .assembling import Assembly
from .contexts import WAIT, Context
from .faults import CommandFault
from .handlers import Answer, Method
from .layouts import (
    Command,
    DtxCommit,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRecover,
    DtxRollback,
    DtxSelect,
    DtxSetTimeout,
    DtxStart,
    ErrorCode,
    GetTimeoutResult,
    RecoverResult,
    XaResult,
    Xid,
)
from .transactions import BrokerReply, CurrentTransaction, TransactionMode, drop_posts, posts_wait
from .type_codes import STRUCT32
from .values import Array

#: Position of the xid in each command that has one.
_XID: Final = 0
#: Format of the null xid of X/Open XA: -1, in the 32 bits that 0-10 has for it.
_NULL_FORMAT: Final = 0xFFFFFFFF
#: Position of the timeout in ``dtx.set-timeout``.
_TIMEOUT: Final = 1


class Branches:
    """Carries out the commands of class dtx.

    Args:
        context: The session.
        current: Its current transaction.
        before_end: Called before work is ended: completes transfers that came before it.
    """

    def __init__(
        self, context: Context, current: CurrentTransaction, before_end: Callable[[], None]
    ) -> None:
        self._context = context
        self._current = current
        self._before_end: Callable[[], None] | None = before_end
        #: The branch to which transfers and accepts belong now; None if there is none.
        self._worked_on: BranchId | None = None

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {
            DtxSelect: self.select,
            DtxStart: self.start,
            DtxEnd: self.end,
            DtxPrepare: self.prepare,
            DtxCommit: self.commit,
            DtxRollback: self.roll_back,
            DtxForget: self.forget,
            DtxRecover: self.recover,
            DtxGetTimeout: self.timeout,
            DtxSetTimeout: self.set_timeout,
        }

    @property
    def _branches(self) -> TransactionBranches:
        """Branches of the broker.

        Raises:
            CommandFault: It has none (540).
        """
        branches = self._context.branches
        if branches is None:
            raise CommandFault(
                "there are no distributed transactions here", ErrorCode.NOT_IMPLEMENTED
            )
        return branches

    # --- Work -----------------------------------------------------------------------------------

    def select(self, number: int, command: DtxSelect, assembly: Assembly) -> Answer:
        """Use distributed transactions on the session from now on.

        It may be repeated, as clients select at least once.

        Raises:
            CommandFault: The session uses local transactions (409), or there are no distributed ones (540).
            AmqpError: The peer has no right at any address.
        """
        self._branches.check()
        if self._current.mode is not TransactionMode.DISTRIBUTED:
            self._current.select(TransactionMode.DISTRIBUTED)
        return None

    def start(self, number: int, command: DtxStart, assembly: Assembly) -> Answer:
        """Let transfers and accepts belong to a branch from now on.

        Raises:
            CommandFault: Dtx was not selected (409), or the xid is wrong (542).
            AmqpError: The broker refuses it.
        """
        xid = self._begun(command.xid)
        branches = self._branches
        status = branches.start(xid, join=command.join, resume=command.resume)
        txn_id = branches.txn_id
        if status is XaStatus.OK and txn_id is not None:
            self._current.begin(txn_id)
            self._worked_on = xid
        return XaResult(status=int(status))

    def end(self, number: int, command: DtxEnd, assembly: Assembly) -> Answer:
        """End or suspend the work in a branch, after the transfers that came before.

        With *fail* it completes when the queues have the messages back that were accepted in the branch.

        Raises:
            CommandFault: Dtx was not selected (409), or the xid is wrong (542).
            AmqpError: The broker refuses it.
        """
        xid = self._begun(command.xid)
        return self._context.run(number, command, self._end(xid, command))

    def _end(self, xid: BranchId, command: DtxEnd) -> Generator[int, None, Answer]:
        branches = self._branches
        txn_id = branches.txn_id
        if command.fail and xid == self._worked_on and txn_id is not None:
            # They would wait for room that may never come, only to be rolled back.
            yield from drop_posts(self._context, txn_id)
        while not command.fail and posts_wait(self._context):
            yield WAIT
        status = branches.end(xid, fail=command.fail, suspend=command.suspend)
        if branches.txn_id is None:
            # The broker settles deliveries that were accepted in the branch when that ends.
            self._current.leave()
            self._worked_on = None
        if command.fail:
            reply = BrokerReply(self._context)
            branches.when_returned(xid, partial(reply, None))
            while not reply.has_come:
                yield WAIT
        if self._before_end is not None:
            self._before_end()
        return XaResult(status=int(status))

    def _begun(self, xid: Xid | None) -> BranchId:
        """Return the id of the branch in which work begins or ends.

        Raises:
            CommandFault: Dtx was not selected (409, class grammar), or the xid is wrong (542).
        """
        if self._current.mode is not TransactionMode.DISTRIBUTED:
            raise CommandFault(
                "the session has no distributed transactions: select them first",
                ErrorCode.ILLEGAL_STATE,
            )
        return branch_id(xid)

    # --- Ends of branches -----------------------------------------------------------------------

    def prepare(self, number: int, command: DtxPrepare, assembly: Assembly) -> Answer:
        """Prepare a branch; completes when that is durable.

        Raises:
            CommandFault: The xid is wrong (542).
            AmqpError: The broker refuses it.
        """
        reply = BrokerReply(self._context)
        self._branches.prepare(branch_id(command.xid), reply)
        return self._context.run(number, command, self._status(reply))

    def commit(self, number: int, command: DtxCommit, assembly: Assembly) -> Answer:
        """Commit a branch; completes when that is durable.

        Raises:
            CommandFault: The xid is wrong (542).
            AmqpError: The broker refuses it.
        """
        reply = BrokerReply(self._context)
        self._branches.commit(branch_id(command.xid), reply, one_phase=command.one_phase)
        return self._context.run(number, command, self._status(reply))

    def roll_back(self, number: int, command: DtxRollback, assembly: Assembly) -> Answer:
        """Roll back a branch; completes when the messages consumed in it are requeued.

        Raises:
            CommandFault: The xid is wrong (542).
            AmqpError: The broker refuses it.
        """
        reply = BrokerReply(self._context)
        self._branches.roll_back(branch_id(command.xid), reply)
        return self._context.run(number, command, self._status(reply))

    def forget(self, number: int, command: DtxForget, assembly: Assembly) -> Answer:
        """Forget a branch that an operator has completed.

        Raises:
            CommandFault: The xid is wrong (542).
            AmqpError: The broker refuses it.
        """
        reply = BrokerReply(self._context)
        self._branches.forget(branch_id(command.xid), reply)
        return self._context.run(number, command, self._forgotten(reply))

    def _forgotten(self, reply: BrokerReply) -> Generator[int, None, Answer]:
        yield from self._status(reply)
        return None

    def _status(self, reply: BrokerReply) -> Generator[int, None, Answer]:
        """Wait for the status of an end, and return it as a result."""
        while not reply.has_come:
            yield WAIT
        status = reply.value
        if isinstance(status, AmqpError):
            raise status
        return XaResult(status=int(cast("XaStatus", status)))

    # --- Others ---------------------------------------------------------------------------------

    def recover(self, number: int, command: DtxRecover, assembly: Assembly) -> Answer:
        """Return the branches that are prepared, or were completed by an operator.

        Raises:
            CommandFault: There are no distributed transactions (540).
        """
        self._branches.check()
        reply = BrokerReply(self._context)
        self._branches.recover(reply)
        return self._context.run(number, command, self._recovered(reply))

    def _recovered(self, reply: BrokerReply) -> Generator[int, None, Answer]:
        while not reply.has_come:
            yield WAIT
        xids: list[object] = [
            Xid(format=each.format, global_id=each.global_id, branch_id=each.branch_id)
            for each in cast("list[BranchId]", reply.value)
        ]
        return RecoverResult(in_doubt=Array(STRUCT32, xids))

    def timeout(self, number: int, command: DtxGetTimeout, assembly: Assembly) -> Answer:
        """Return the timeout of a branch in seconds.

        Raises:
            CommandFault: The xid is wrong (542).
            AmqpError: There is no such branch.
        """
        return GetTimeoutResult(timeout=int(self._branches.timeout(branch_id(command.xid))))

    def set_timeout(self, number: int, command: DtxSetTimeout, assembly: Assembly) -> Answer:
        """Set the timeout of a branch; 0 is the default.

        Raises:
            CommandFault: The xid or the timeout is wrong (542).
            AmqpError: There is no such branch, or that is too long.
        """
        xid = branch_id(command.xid)
        if command.timeout is None:
            raise CommandFault(
                "a timeout is set to a number of seconds",
                ErrorCode.INVALID_ARGUMENT,
                field_index=_TIMEOUT,
            )
        self._branches.set_timeout(xid, command.timeout)
        return None

    def on_ended(self) -> None:
        """Forget the publisher; the broker rolls back branches with work of the session."""
        self._before_end = None


def branch_id(xid: Xid | None) -> BranchId:
    """Return the id of the branch that *xid* names; absent ids are empty.

    Raises:
        CommandFault: There is no xid or no format, the xid is the null xid of X/Open XA, or an id is longer
            than X/Open XA permits (542).
    """
    if xid is None or xid.format is None:
        raise _wrong_xid("a branch is named by an xid with a format")
    if xid.format == _NULL_FORMAT:
        raise _wrong_xid("format 0xFFFFFFFF (-1) is that of the null xid, which names no branch")
    global_id, branch = xid.global_id or b"", xid.branch_id or b""
    if max(len(global_id), len(branch)) > XID_PART_MAX:
        raise _wrong_xid(f"the ids of an xid have at most {XID_PART_MAX} octets")
    return BranchId(xid.format, global_id, branch)


def _wrong_xid(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.INVALID_ARGUMENT, field_index=_XID)
