"""Claims-based security on the side that accepts tokens: the node ``$cbs``.

Deployed clients send a request in application-properties (``operation`` is ``put-token``) and
expect a response message (``status-code``); the OASIS draft uses the subject ``set-token``, and the
outcome is the only answer. Both end in :meth:`TokenWatch.put`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final

import trio

from ..addresses import host_in, network_of
from ..errors import AmqpError
from ..message import Message
from ..outcomes import ACCEPTED, Accepted, Error, Rejected
from ..security.tokens import Cbs, Token, TokenRefused, Tokens, scope_of
from ..values import Int
from .raising import RaisedOutcome

if TYPE_CHECKING:
    from .connections import Connection

log = logging.getLogger("amqp_rt.security")

#: ``status-code`` of a response by the error's condition.
_STATUS: Final = {
    "amqp:invalid-field": 400,
    "amqp:decode-error": 400,
    "amqp:resource-limit-exceeded": 403,
    "amqp:not-implemented": 501,
}


class TokenWatch:
    """Tokens of one connection, and their expiry.

    One task runs for it. Without a token it waits for the first, with a deadline if the login alone
    gives no rights; later it removes the rights of expired tokens.

    Args:
        connection: The connection.
        cbs: The policy for tokens.
        admit: Admits a peer that has put its first token; returns False if it closed the connection.
    """

    def __init__(
        self, connection: Connection, cbs: Cbs, admit: Callable[[Connection], bool]
    ) -> None:
        self.tokens = Tokens(connection.container.limits)
        self.tokens.on_changed = self._on_changed
        self._connection = connection
        self._cbs = cbs
        self._admit = admit
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        #: Held while a request is answered. Checking a token may take long, and an earlier request
        #: must not overwrite the result of a later one.
        self.turn = trio.Lock()

    async def put(self, kind: str | None, text: str, audience: str | None) -> None:
        """Check a token and keep it.

        Raises:
            TokenRefused: The token is not accepted; nothing has changed.
        """
        limits = self._connection.container.limits
        token = await self._cbs.validate(kind, text, audience, limits)
        self.keep(token)

    def keep(self, token: Token) -> None:
        """Keep a token that was checked before, for example by the login.

        Raises:
            TokenRefused: There are too many tokens, or this one expired while it was checked.
        """
        self.tokens.put(token, self._expiry(token))

    async def renew(self, text: str) -> None:
        """Check a token of the connection's user, and keep it in place of all others.

        Raises:
            TokenRefused: The token is not accepted, or its subject is another user; nothing has changed.
        """
        async with self.turn:
            connection = self._connection
            token = await self._cbs.validate(None, text, None, connection.container.limits)
            user = connection.peer.user
            if user is not None and token.subject != user:
                raise TokenRefused("the token is for another user than the one that has logged in")
            self.tokens.replace(token, self._expiry(token))

    def _expiry(self, token: Token) -> float:
        """Return the expiry of *token* on the monotonic clock, which never jumps.

        Raises:
            TokenRefused: It has expired.
        """
        left = token.expires_at - self._cbs.clock.wall()
        if not left > 0:
            raise TokenRefused("the token has expired")
        return trio.current_time() + left

    def note_refusal(self, error: AmqpError) -> None:
        """Log that a token was refused because of *error*, limited for each network: peers can repeat it."""
        address = self._connection.peer.address
        key = ("a token was refused", network_of(host_in(address)))
        left_out = self._connection.container.log_limiter.admit(key, trio.current_time())
        if left_out is not None:
            log.info("a token was refused: from %s: %s%s", address, error, left_out)

    def _on_changed(self) -> None:
        self._changed.set()
        self._connection.container.attaching.reauthorize(
            self._connection, "your rights have changed"
        )

    async def run(self, *, owes: bool, known: bool) -> None:
        """Watch the tokens until :meth:`stop`.

        A peer that owes a token has ``token_deadline_s`` seconds whenever it has none: after the
        open, and after the last one has expired or was deleted. Otherwise one token, put and
        deleted at once, would keep the connection open for ever.

        Args:
            owes: The peer has no rights without a token.
            known: The peer has been admitted, by its login or the tokens that came with it.
        """
        connection = self._connection
        deadline_s = connection.container.limits.token_deadline_s
        due = trio.current_time() + deadline_s if owes else inf
        with self._scope:
            while True:
                self._changed = trio.Event()
                if self.tokens.expire(trio.current_time()):
                    connection.container.attaching.reauthorize(connection, "the token has expired")
                if len(self.tokens):
                    due = inf
                    if not known and not self._admit(connection):
                        return
                    known = True
                elif owes:
                    due = min(due, trio.current_time() + deadline_s)
                    if trio.current_time() >= due:
                        log.warning("no token came from %s", connection.peer.address)
                        connection.close(
                            Error(
                                "amqp:unauthorized-access",
                                f"no valid token within {deadline_s:g} seconds",
                            )
                        )
                        return
                with trio.CancelScope(deadline=min(due, self.tokens.next_expiry)):
                    await self._changed.wait()

    def stop(self) -> None:
        """Stop watching: the connection has ended, and its tokens with it."""
        # The peer refers to the tokens and the connection to the peer: this callback closes a
        # cycle.
        self.tokens.on_changed = _nothing
        self._scope.cancel()


def _nothing() -> None:
    """Replace the callback for changed tokens after the end of the connection."""


async def answer_cbs(message: Message, watch: TokenWatch) -> Message | Accepted:
    """Answer a request to ``$cbs``.

    Raises:
        RaisedOutcome: A ``set-token`` is refused.
    """
    async with watch.turn:
        return await _answer(message, watch)


async def _answer(message: Message, watch: TokenWatch) -> Message | Accepted:
    subject = message.properties.subject
    given = message.application_properties
    if subject == "set-token" or "operation" not in given:
        # In the draft (§3.3) the outcome is the answer.
        kind = given.get("token-type")
        try:
            await watch.put(_text(kind), _token(message), None)
        except AmqpError as error:
            raise TokenRejected(error) from None
        return ACCEPTED
    operation = given["operation"]
    try:
        if operation == "put-token":
            audience = _audience(message)
            await watch.put(_text(given.get("type")), _token(message), audience)
        elif operation == "delete-token":
            if not watch.tokens.drop(scope_of(_audience(message))):
                return _reply(404, "there is no such token")
        else:
            raise TokenRefused(
                "the operations are put-token and delete-token", condition="amqp:not-implemented"
            )
    except AmqpError as error:
        watch.note_refusal(error)
        return _reply(_STATUS.get(error.condition, 401), error.description)
    return _reply(202, "OK")


class TokenRejected(RaisedOutcome):
    """Refusal of a token that is reported by the outcome."""

    def __init__(self, error: AmqpError) -> None:
        super().__init__(error.description, condition=error.condition)

    @property
    def outcome(self) -> Rejected:
        """Outcome that the sender gets."""
        return Rejected(Error.of(self))


def _reply(status: int, description: str) -> Message:
    return Message(
        None,
        application_properties={"status-code": Int(status), "status-description": description},
    )


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str) else None


def _audience(message: Message) -> str:
    name = message.application_properties.get("name")
    if not isinstance(name, str) or not name:
        raise TokenRefused(
            "the request has no audience for the token: set the property name",
            condition="amqp:invalid-field",
        )
    return str(name)


def _token(message: Message) -> str:
    body = message.body
    if isinstance(body, bytes):
        try:
            body = body.decode("ascii")
        except UnicodeDecodeError:
            body = None
    if not isinstance(body, str) or not body:
        raise TokenRefused(
            "the body must be the token, as a string in an amqp-value",
            condition="amqp:invalid-field",
        )
    return body
