"""One branch of a distributed transaction: its sessions, its work and its end."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol

from ...errors import AmqpError
from ...fronts.base import LinkConnection
from ...limits import Limits
from ...transactions import XaStatus, Xid
from .states import State
from .work import BranchWork


class Association(Protocol):
    """Session that has work in a branch."""

    @property
    def connection(self) -> LinkConnection:
        """Connection of the links of the session."""


class Branch:
    """Branch of a distributed transaction.

    Args:
        virtual_host: Its virtual host.
        xid: Its id.
        user: The user whose sessions may use it; None for the anonymous ones.
        work: Its work.
        monotonic: Clock of its timeout.
        limits: Bounds.
    """

    def __init__(
        self,
        virtual_host: str,
        xid: Xid,
        user: str | None,
        work: BranchWork,
        monotonic: Callable[[], float],
        limits: Limits,
    ) -> None:
        self.virtual_host = virtual_host
        self.xid = xid
        self.user = user
        self.work = work
        work.on_failed = self._failed
        self._monotonic = monotonic
        self._limits = limits
        #: Seconds until it is rolled back unless it is prepared before, when that is, and when it is
        #: forgotten afterwards.
        self.timeout_s = limits.branch_s
        self.deadline = monotonic() + self.timeout_s
        self.forget_at = inf
        self.timed_out = False
        #: Result of an operator's decision; OK for none.
        self.decided = XaStatus.OK
        #: Wall-clock time of its preparation.
        self.prepared_at = 0.0
        #: Sessions with work, and whether each is active or has suspended its work.
        self.sessions: dict[Association, bool] = {}
        #: Whether a change of its state is being stored, and what to do after that.
        self.busy = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def key(self) -> tuple[str, Xid]:
        """Virtual host and xid, which no other branch has."""
        return self.virtual_host, self.xid

    @property
    def state(self) -> State:
        """The present state."""
        if self.decided is not XaStatus.OK:
            return State.HEURISTIC
        if self.work.prepared:
            return State.PREPARED
        if self.work.error is not None:
            return State.DEAD
        if not self.sessions:
            return State.IDLE
        return State.ACTIVE if any(self.sessions.values()) else State.SUSPENDED

    @property
    def failure(self) -> XaStatus:
        """Status with which a dead branch answers."""
        return XaStatus.TIMED_OUT if self.timed_out else XaStatus.ROLLED_BACK

    def set_timeout(self, seconds: float) -> None:
        """Roll back *seconds* from now, 0 for the default, unless the branch is prepared before.

        Raises:
            AmqpError: That is too long.
        """
        most = self._limits.branch_timeout_max_s
        if seconds > most:
            raise AmqpError(
                f"the timeout of a branch is at most {most:.15g} seconds, not {seconds:.15g}",
                condition="amqp:invalid-field",
            )
        self.timeout_s = seconds or self._limits.branch_s
        self.deadline = self._monotonic() + self.timeout_s

    def time_out(self) -> None:
        """Undo the work, because the branch took too long."""
        self.timed_out = True
        description = f"the branch was not prepared within {self.timeout_s:g} seconds"
        self.work.fail(description, "amqp:transaction:timeout")

    def _failed(self) -> None:
        """Note that the work was undone: the branch is remembered for a while."""
        self.forget_at = self._monotonic() + self._limits.branch_kept_s

    def when_free(self, call: Callable[[], None]) -> bool:
        """Call *call* once no change of the state is being stored; return False if none is."""
        if self.busy:
            self._waiting.append(call)
        return self.busy

    def hold(self) -> None:
        """Note that a change of the state is being stored; :meth:`free` follows."""
        self.busy = True

    def free(self) -> None:
        """Note that a change of the state was stored or refused, and continue what waits for that."""
        self.busy = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
