"""Requests that wait for their reply."""

from __future__ import annotations

import trio

from ..errors import AmqpError
from ..message import Message
from ..outcomes import Accepted
from .sending import Receipt, Sender, refusal


class PendingCall(Receipt):
    """Pending request, until its reply has arrived or cannot arrive any more."""

    __slots__ = ("caller", "failure", "key", "reply")

    def __init__(self, sender: Sender, key: str) -> None:
        super().__init__(sender, b"")
        self.key = key
        self.reply: Message | None = None
        self.failure: AmqpError | None = None
        #: The task that waits for the reply.
        self.caller: trio.lowlevel.Task | None = None

    def answer(self, reply: Message) -> None:
        """Store the reply, which may arrive before the outcome of the request.

        Of one chunk of input the outcome may be handled first, if it comes on another link: the reply that
        explains it still counts.
        """
        if self.reply is None:
            self.reply = reply
            self.wake()

    def lose(self, error: AmqpError) -> None:
        """Fail the request: there will be no reply."""
        if self.reply is None and self.failure is None:
            self.failure = error
            self.wake()

    def _settle(self) -> None:
        super()._settle()
        if self.error is not None:
            self.lose(self.error)
        elif type(self._outcome) is not Accepted:
            assert self._outcome is not None
            self.lose(refusal(self._outcome))
        # Accepted: the reply will follow.

    def wake(self) -> None:
        """Wake the caller, if it waits."""
        if self.caller is not None:
            caller, self.caller = self.caller, None
            trio.lowlevel.reschedule(caller)

    async def park(self) -> None:
        """Wait until woken. Cancelling changes nothing."""
        self.caller = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self.abort)

    def abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Handle the cancellation of the waiting task."""
        self.caller = None
        return trio.lowlevel.Abort.SUCCEEDED
