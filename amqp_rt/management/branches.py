"""Branches of distributed transactions that are in doubt, and decisions of operators about them.

Entities of the type ``amqp_rt.branch`` are the branches that are prepared, or that an operator has completed. The
operation ``RESOLVE-BRANCH`` commits a prepared one, or rolls it back, as its application-property *outcome*
demands: ``commit`` or ``rollback``. Its coordinator learns of that when it asks (xa-heurcom, xa-heurrb), and
makes the broker forget the branch; DELETE does so for a coordinator that does not return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import trio
from msgspec import Struct

from ..broker.branches.branch import Branch
from ..broker.branches.endings import BranchEndings, Done
from ..broker.branches.registry import Branches
from ..broker.branches.states import State
from ..errors import AmqpError
from ..message import Message
from ..transactions import XaStatus
from .answering import UnchangeableEntities, attributes, text_of

RESOLVE_BRANCH: Final = "RESOLVE-BRANCH"

_OUTCOMES: Final = {"commit": True, "rollback": False}


class BranchEntity(Struct, frozen=True, kw_only=True):
    """A branch that is in doubt."""

    name: str
    format: int
    #: Octets in hexadecimal digits.
    global_id: str
    branch_id: str
    user: str | None
    #: ``prepared``, or the result of the operator's decision.
    state: str
    #: Wall-clock time of its preparation.
    prepared_at: float


class BranchCollection(UnchangeableEntities):
    """Branches of *branches* that are in doubt (:class:`~amqp_rt.management.answering.Collection`).

    Only coordinators create branches, and they have nothing to change.
    """

    type_name = "amqp_rt.branch"
    attributes = BranchEntity
    operations: Mapping[str, list[str]] = {
        "READ": [],
        "DELETE": [],
        RESOLVE_BRANCH: ["outcome"],
    }

    def __init__(self, branches: Branches) -> None:
        self._branches = branches
        self._endings = BranchEndings(branches)

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        """Yield the row of every branch in doubt."""
        for branch in self._branches.in_doubt(virtual_host):
            yield attributes(_entity_of(branch))

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        """Return the row of branch *name*, None if there is none in doubt."""
        found = self._find(name, virtual_host)
        return None if found is None else attributes(_entity_of(found))

    def _find(self, name: str, virtual_host: str) -> Branch | None:
        for branch in self._branches.in_doubt(virtual_host):
            if str(branch.xid) == name:
                return branch
        return None

    async def delete(self, name: str, virtual_host: str) -> None:
        """Forget branch *name*, which an operator has completed.

        Raises:
            AmqpError: It is not such a branch, or the store refuses the change.
        """
        branch = self._free(name, virtual_host, State.HEURISTIC)
        await _answer(lambda done: self._endings.forget(branch, done))

    async def act(self, operation: str, name: str, message: Message, virtual_host: str) -> None:
        """Commit branch *name*, or roll it back, as *message* demands.

        Raises:
            AmqpError: It is not prepared, the outcome is none, or the store refuses the change.
        """
        outcome = text_of(message, "outcome")
        if outcome not in _OUTCOMES:
            raise AmqpError(
                f"outcome is commit or rollback, not {outcome!r:.50}",
                condition="amqp:invalid-field",
            )
        branch = self._free(name, virtual_host, State.PREPARED)
        await _answer(
            lambda done: self._endings.decide(branch, commit=_OUTCOMES[outcome], done=done)
        )

    def _free(self, name: str, virtual_host: str, state: State) -> Branch:
        """Return branch *name*, which has to be in *state*.

        Raises:
            AmqpError: It is not, or a change of it is being stored.
        """
        branch = self._find(name, virtual_host)
        if branch is None or branch.busy or branch.state is not state:
            raise AmqpError(
                f"branch {name!r:.300} is not {state.value}, or is being ended",
                condition="amqp:precondition-failed",
            )
        return branch


def _entity_of(branch: Branch) -> BranchEntity:
    xid = branch.xid
    state = State.PREPARED.value
    if branch.decided is not XaStatus.OK:
        state = branch.decided.name.lower().replace("_", " ")
    return BranchEntity(
        name=str(xid),
        format=xid.format,
        global_id=xid.global_id.hex(),
        branch_id=xid.branch_id.hex(),
        user=branch.user,
        state=state,
        prepared_at=branch.prepared_at,
    )


async def _answer(begin: Callable[[Done], None]) -> None:
    """Call *begin*, and wait until the change that it begins is stored; cancellation does not undo it.

    Raises:
        AmqpError: It failed.
    """
    answers: list[XaStatus | AmqpError] = []
    answered = trio.Event()

    def done(answer: XaStatus | AmqpError) -> None:
        answers.append(answer)
        answered.set()

    begin(done)
    await answered.wait()
    if isinstance(answers[0], AmqpError):
        raise answers[0]
