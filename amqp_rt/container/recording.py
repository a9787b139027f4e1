"""Batches of nodes with an inbox: messages that were processed are left out, and the others recorded in one transaction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from ..message import MessageId
from ..outcomes import ACCEPTED, Accepted, Modified, Outcome, Rejected, Released
from .boxes import NodeInbox, refuse_unprocessed
from .raising import RaisedOutcome

#: Address and message-id, by which an inbox distinguishes messages.
RecordKey: TypeAlias = tuple[str, MessageId]


class BatchRecord(Struct):
    """Messages of a batch, as an inbox distinguishes them."""

    keys: list[RecordKey]
    #: Positions of the messages that were processed before. They are accepted even if the handler fails.
    processed: set[int] = set()

    async def process(
        self, inbox: NodeInbox, session: Any, values: Any, call: Callable[[list[Any]], Any]
    ) -> list[Outcome] | None:
        """Call the handler with those of *values* that were not processed, and return the outcomes of all, or None.

        The new messages are recorded in the transaction of *session*. Of a message that the batch has several times,
        the handler gets the first one, whose outcome all of them have. A list of outcomes leaves the transaction to its
        commit, without the records of messages that are not accepted.

        Raises:
            RaisedOutcome: The handler has returned one outcome for all, other than *accepted*.
            TypeError: Middleware has changed the number of messages, or the handler has returned no outcomes.
        """
        self.processed.clear()
        if len(values) != len(self.keys):
            raise TypeError(
                f"a batch with an inbox keeps its messages: middleware has made {len(values)} of {len(self.keys)}"
            )
        places = self._places()
        firsts = [each[0] for each in places]
        async with inbox.recorded_batch(session, [self.keys[at] for at in firsts]) as are_new:
            new = [each for each, is_new in zip(places, are_new, strict=True) if is_new]
            for each, is_new in zip(places, are_new, strict=True):
                if not is_new:
                    self.processed.update(each)
            if not new:
                return None
            result = call([values[each[0]] for each in new])
            result = await result if inspect.isawaitable(result) else result
            refuse_unprocessed(result)
            chosen = outcomes_of(result, len(new))
            left = [
                self.keys[each[0]]
                for each, outcome in zip(new, chosen, strict=True)
                if not isinstance(outcome, Accepted)
            ]
            if left:
                await inbox.forget(session, left)
        outcomes: list[Outcome] = [ACCEPTED] * len(self.keys)
        for each, outcome in zip(new, chosen, strict=True):
            for at in each:
                outcomes[at] = outcome
        return outcomes

    def _places(self) -> list[list[int]]:
        """Return the positions of each message; one that the batch has several times has several."""
        found: dict[tuple[str, type, MessageId], list[int]] = {}
        for at, (address, message_id) in enumerate(self.keys):
            found.setdefault((address, type(message_id), message_id), []).append(at)
        return list(found.values())


def outcomes_of(result: Any, size: int) -> Sequence[Outcome]:
    """Return the outcomes of *size* messages for the *result* of their handler.

    Raises:
        TypeError: *result* is neither None, an outcome, nor one for each message.
    """
    if isinstance(result, list | tuple):
        if len(result) != size:
            raise TypeError(f"a batch of {size} messages needs as many outcomes, got {len(result)}")
        return [_outcome(each) for each in result]
    return [_outcome(result)] * size


def _outcome(result: Any) -> Outcome:
    if result is None:
        return ACCEPTED
    if isinstance(result, Accepted | Rejected | Released | Modified):
        return result
    if isinstance(result, RaisedOutcome):
        return result.outcome
    raise TypeError(f"a batch returns None or outcomes such as Reject(...), not {result!r:.80}")
