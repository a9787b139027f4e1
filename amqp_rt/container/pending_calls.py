"""Requests that wait for their reply."""

from __future__ import annotations

import trio

from ..errors import AmqpError
from ..outcomes import Accepted, Outcome
from .links import refusal
from .payloads import Readable
from .sending import Receipt, Sender


class PendingCall(Receipt):
    """Pending request, until its reply has arrived or cannot arrive any more."""

    __slots__ = ("caller", "failure", "key", "reply")

    def __init__(self, sender: Sender, key: str) -> None:
        # As Receipt does, without another call for each request.
        self._sender = sender
        self.payload = b""
        self.message_format = 0
        self.unfinished = False
        self.transaction = None
        self.key = key
        self.reply: Readable | None = None
        self.failure: AmqpError | None = None
        #: The task that waits for the reply.
        self.caller: trio.lowlevel.Task | None = None

    def answer(self, reply: Readable) -> None:
        """Store the reply, which may arrive before the outcome of the request.

        Of one chunk of input the outcome may be handled first, if it comes on another link: the reply that
        explains it still counts.
        """
        if self.reply is None:
            self.reply = reply
            caller = self.caller
            if caller is not None:
                self.caller = None
                trio.lowlevel.reschedule(caller)

    def lose(self, error: AmqpError) -> None:
        """Fail the request: there will be no reply."""
        if self.reply is None and self.failure is None:
            self.failure = error
            self.wake()

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome. If the request was accepted, the reply will follow, and nothing is woken."""
        if type(outcome) is Accepted and self._outcome is None and self.error is None:
            self._outcome = outcome
            self.payload = b""
            self._sender.done(self)
        else:
            super().finish(outcome)

    def _settle(self) -> None:
        super()._settle()
        if self.error is not None:
            self.lose(self.error)
        else:
            assert self._outcome is not None
            self.lose(refusal(self._outcome))

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
