"""Ends of branches: prepare, commit, rollback, forget, and the decisions of operators.

Each calls back with a status or an error once the change is stored. Until then the branch is busy:
requests about it wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from ...errors import AmqpError
from ...outcomes import Error
from ...transactions import XaStatus
from ..durable import facts
from ..durable.answers import InDoubt
from ..durable.facts import BranchFact
from ..durable.units import Unit
from .branch import Branch
from .registry import Branches

#: Called with the result of an operation, or the reason for which it failed.
Done: TypeAlias = Callable[[XaStatus | AmqpError], None]


class BranchEndings:
    """Ends the branches of *branches*. The callers check the states."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    def prepare(self, branch: Branch, done: Done) -> None:
        """Prepare *branch*; if that fails, its work is undone."""
        branches = self._branches
        work = branch.work
        branch.busy = True
        branch.prepared_at = branches.clock.wall()
        if branches.journal is not None:
            work.number = branches.new_number()

        def prepared(error: Error | None) -> None:
            if error is None:
                self._answer(branch, done, XaStatus.OK)
            elif isinstance(error, InDoubt):
                # The store is given up, and takes no rollback either. The branch stays in doubt until the
                # broker is started again and reads whether it was prepared.
                branch.decided = XaStatus.HEURISTIC_HAZARD
                self._answer(branch, done, error.raised_as(AmqpError))
            else:
                self._answer(branch, done, branch.failure)

        work.discharge(partial(work.prepare, fact_of(branch), prepared))

    def commit_one(self, branch: Branch, done: Done) -> None:
        """Commit *branch*, which is not prepared."""
        work = branch.work
        branch.busy = True

        def committed(error: Error | None) -> None:
            if isinstance(error, InDoubt):
                branch.decided = XaStatus.HEURISTIC_HAZARD
                self._answer(branch, done, branch.decided)
                return
            self._branches.forget(branch)
            self._answer(branch, done, XaStatus.OK if error is None else branch.failure)

        def end() -> None:
            if work.error is None:
                work.commit(committed)
            else:
                committed(work.error)

        work.discharge(end)

    def commit(self, branch: Branch, done: Done) -> None:
        """Commit *branch*, which is prepared; if that fails, it stays so."""
        branch.busy = True
        branch.work.commit_prepared(
            partial(self._remove, branch), partial(self._ended, branch, done, XaStatus.OK)
        )

    def roll_back(self, branch: Branch, done: Done) -> None:
        """Roll *branch* back; a prepared one stays so if that fails."""
        work = branch.work
        branch.busy = True
        if work.prepared:
            ended = partial(self._ended, branch, done, XaStatus.OK)
            work.roll_back_prepared(partial(self._remove, branch), ended)
            return

        def end() -> None:
            work.roll_back()
            self._branches.forget(branch)
            work.when_returned(partial(self._answer, branch, done, XaStatus.OK))

        work.discharge(end)

    def _ended(self, branch: Branch, done: Done, status: XaStatus, error: Error | None) -> None:
        """Answer the end of a prepared branch."""
        if error is None:
            self._branches.forget(branch)
            self._answer(branch, done, status)
        elif isinstance(error, InDoubt):
            branch.decided = XaStatus.HEURISTIC_HAZARD
            self._answer(branch, done, branch.decided)
        else:
            self._answer(branch, done, error.raised_as(AmqpError))

    def decide(self, branch: Branch, *, commit: bool, done: Done) -> None:
        """Commit *branch*, which is prepared, or roll it back, because an operator decides so.

        It is remembered, with that result, until it is forgotten.
        """
        branch.busy = True
        status = XaStatus.HEURISTIC_COMMIT if commit else XaStatus.HEURISTIC_ROLLBACK

        def note(unit: Unit) -> None:
            fact = fact_of(branch)
            fact.result = status
            facts.BRANCHES.put(unit, facts.key_of(branch.work.number), fact)

        def decided(error: Error | None) -> None:
            if error is None:
                branch.decided = status
                self._branches.release()
                self._answer(branch, done, status)
            else:
                self._ended(branch, done, status, error)

        end = branch.work.commit_prepared if commit else branch.work.roll_back_prepared
        end(note if self._branches.journal is not None else _nothing, decided)

    def forget(self, branch: Branch, done: Done) -> None:
        """Forget *branch*, which an operator has completed."""
        journal = self._branches.journal
        if journal is None:
            self._ended(branch, done, XaStatus.OK, None)
            return
        branch.busy = True
        unit = Unit(partial(self._ended, branch, done, XaStatus.OK))
        self._remove(branch, unit)
        unit.then(partial(self._ended, branch, done, XaStatus.OK, None))
        journal.add(unit)

    def _remove(self, branch: Branch, unit: Unit) -> None:
        """Remove the record of *branch* in *unit*."""
        if branch.work.number:
            facts.BRANCHES.remove(unit, facts.key_of(branch.work.number))

    def _answer(self, branch: Branch, done: Done, result: XaStatus | AmqpError) -> None:
        branch.busy = False
        try:
            done(result)
        finally:
            branch.free()


def fact_of(branch: Branch) -> BranchFact:
    """Return the record of *branch*, without its work."""
    return BranchFact(
        branch.virtual_host,
        branch.user,
        (branch.xid.format, branch.xid.global_id, branch.xid.branch_id),
        [],
        [],
        [],
        prepared_at=branch.prepared_at,
    )


def _nothing(unit: Unit) -> None:
    """Write nothing: there is no store."""
