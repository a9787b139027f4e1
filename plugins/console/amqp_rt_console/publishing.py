"""Publish messages for a request, within a time, and only while its client waits for the answer."""

from __future__ import annotations

from typing import Final, Protocol

import trio
from starlette.requests import Request

from amqp_rt import Message, Sender
from amqp_rt.errors import AmqpError
from amqp_rt.outcomes import Accepted, Outcome

from .problems import Problem, problem_of
from .sessions import WITHIN_S

#: Seconds in which messages may be accepted after the client has ended its direction of the connection: it may still
#: read the answer, or be gone.
_LEFT_S: Final = 1.0
#: Messages, and octets of them, that are sent in one step of the event loop.
_TURN_MESSAGES: Final = 64
_TURN_OCTETS: Final = 256 * 1024


class Sent(Protocol):
    """Receipt of a message, as senders give it."""

    @property
    def done(self) -> bool:
        """Whether the outcome, or the cause of its absence, is known."""

    @property
    def known_outcome(self) -> Outcome | None:
        """Outcome, if it is known."""

    def withdraw(self) -> bool:
        """Withdraw the message if it has not left yet; return whether it was withdrawn."""

    async def accepted(self) -> Outcome:
        """Wait for the outcome, and raise an AmqpError if it is not *accepted*."""


async def publish(request: Request, address: str, message: Message, copies: int = 1) -> None:
    """Send *copies* of a message to *address*, with the rights of the request's session, until all are accepted.

    Those that are not accepted in time are withdrawn, and so are those of a client that leaves. If cancelled, some may
    have been accepted.

    Raises:
        Problem: The user may not send there, or not all were accepted; it names the number that was.
    """
    receipts: list[Sent] = []
    refused: AmqpError | None = None
    with trio.move_on_after(WITHIN_S) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, request, scope)
            # Nurseries would wrap an exception in a group.
            try:
                async with request.state.session.connection.sender(address) as out:
                    await _submit(out, message, copies, receipts)
                    refused = await _outcomes(receipts)
            except AmqpError as error:
                refused = error
            nursery.cancel_scope.cancel()
    accepted = sum(type(each.known_outcome) is Accepted for each in receipts)
    if accepted == copies:
        return
    count = f"{accepted:,} of {copies:,} messages were accepted"
    if refused is None:
        raise Problem(504, f"{address!r:.100}: {count} within {WITHIN_S:g} s", "amqp:timeout")
    problem = problem_of(refused)
    if accepted:
        problem.detail = f"{count}, then: {problem.detail}"
    raise problem


async def _submit(out: Sender, message: Message, copies: int, receipts: list[Sent]) -> None:
    """Send *copies* until one is refused; their receipts go to *receipts*."""
    payload = out.encode(message, {})
    turn = max(1, min(_TURN_MESSAGES, _TURN_OCTETS // len(payload)))
    for number in range(1, copies + 1):
        await out.wait_for_room()
        receipt = out.send_payload_nowait(payload)
        receipts.append(receipt)
        if not number % turn:
            await trio.lowlevel.checkpoint()
            if receipts[0].done and type(receipts[0].known_outcome) is not Accepted:
                return


async def _outcomes(receipts: list[Sent]) -> AmqpError | None:
    """Wait for the outcomes, and return the first refusal: messages that had not left by then are withdrawn."""
    refused: AmqpError | None = None
    for receipt in receipts:
        try:
            await receipt.accepted()
        except AmqpError as error:
            if refused is None:
                refused = error
                for each in receipts:
                    each.withdraw()
    return refused


async def _watch(request: Request, scope: trio.CancelScope) -> None:
    """Shorten the deadline of *scope* when the client ends its direction of the connection."""
    try:
        while (await request.receive())["type"] != "http.disconnect":
            pass
    except OSError:
        pass
    scope.deadline = min(scope.deadline, trio.current_time() + _LEFT_S)
