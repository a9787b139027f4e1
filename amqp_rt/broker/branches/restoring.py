"""Restoring prepared branches from the store, when the broker starts and before any link attaches."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from ...errors import AmqpError
from ...stores.base import Stored
from ...transactions import XaStatus, Xid
from ..durable import facts
from ..durable.facts import BranchFact
from ..durable.journal import Journal
from ..entries import LATER, NOWHERE, restored
from ..producers import Inlet
from ..queue.queue import MessageQueue
from .branch import Branch
from .registry import Branches

_log: Final = logging.getLogger("amqp_rt.broker")

#: Messages and bytes read at once.
_READ_MESSAGES: Final = 1_000
_READ_BYTES: Final = 4 * 1024 * 1024


class BranchRestorer:
    """Restores the branches of *branches*.

    Args:
        branches: The branches, none so far.
        journal: The journal of the store.
        find_inlet: Returns the inlet of the node at an address of a virtual host; None or an error if
            there is none.
        queues: Queues by their numbers in the store.
        fetch: Loads a message of a queue that may be in the store only.
    """

    def __init__(
        self,
        branches: Branches,
        journal: Journal,
        find_inlet: Callable[[str, str], Inlet | None],
        queues: Mapping[int, MessageQueue],
        fetch: Callable[[MessageQueue, int], Awaitable[None]],
    ) -> None:
        self._branches = branches
        self._journal = journal
        self._find_inlet = find_inlet
        self._queues = queues
        self._fetch = fetch

    async def restore(self) -> int:
        """Restore all branches: hold the room of their posts, and acquire what they retired.

        Return the highest number of a branch.

        Raises:
            AmqpError: The store cannot be read, or has a branch unknown to this release.
        """
        highest = 0
        for key, value in await facts.BRANCHES.read(self._journal):
            number = facts.number_of(key)
            highest = max(highest, number)
            try:
                fact = facts.BRANCHES.decode(value)
                result = XaStatus(fact.result)
            except (msgspec.DecodeError, ValueError) as error:
                raise AmqpError(
                    f"the store has a branch that this release does not understand: {error}"
                ) from error
            branch = self._branches.make(fact.virtual_host, Xid(*fact.xid), fact.user, number)
            branch.prepared_at = fact.prepared_at
            branch.decided = result
            if result is XaStatus.OK:
                await self._restore_posts(branch, fact)
                await self._restore_retirements(branch, fact)
            branch.work.finish_restoring()
            self._branches.add(branch)
        if highest:
            _log.info("store read: %d branches of distributed transactions", len(self._branches))
        return highest

    async def _restore_posts(self, branch: Branch, fact: BranchFact) -> None:
        """Restore the posts of *branch* in their order."""
        stored = await self._read(branch.work.number, len(fact.posts))
        inlets = [self._find_inlet(fact.virtual_host, each) for each in fact.targets]
        for place, target in enumerate(fact.posts):
            if target < 0:
                # It was not durable.
                continue
            found, inlet = stored.get(place), inlets[target]
            if found is None or inlet is None:
                _log.error(
                    "message lost: posted in branch %s to %.200r: %s",
                    branch.xid,
                    fact.targets[target],
                    "the store lost it" if found is None else "there is no such node",
                )
                continue
            entry = restored(branch.work.number, place, found.head, found.payload)
            branch.work.restore_post(inlet, entry, NOWHERE if entry.due is None else LATER)

    async def _read(self, number: int, count: int) -> dict[int, Stored]:
        """Return the messages of node *number* at its first *count* places, by places."""
        found: dict[int, Stored] = {}
        first = 0
        while first < count:
            read = await self._journal.call(
                self._journal.store.messages, number, first, _READ_MESSAGES, _READ_BYTES
            )
            if not read:
                break
            found.update((each.sequence, each) for each in read)
            first = read[-1].sequence + 1
        return found

    async def _restore_retirements(self, branch: Branch, fact: BranchFact) -> None:
        """Acquire the messages that *branch* retired."""
        for number, sequence, outcome in fact.retired:
            queue = self._queues.get(number)
            if queue is None:
                # Its node or subscription was deleted, and the message with it.
                continue
            await self._fetch(queue, sequence)
            branch.work.restore_retirement(queue, sequence, outcome)
