"""Claims-based security on the side that takes tokens: the node ``$cbs`` (SE10 to SE16).

Deployed clients ask with application-properties (``operation`` is ``put-token``) and want an answer
(``status-code``); the OASIS draft has the subject ``set-token`` and no answer but the outcome. Both
end in :meth:`TokenWatch.put`.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Final

import trio

from ..errors import AmqpError
from ..message import Message
from ..outcomes import ACCEPTED, Accepted, Error, Rejected
from ..security.tokens import Cbs, Token, TokenRefused, Tokens, scope_of
from ..values import Int
from .routes import RaisedOutcome

if TYPE_CHECKING:
    from .connections import Connection

log = logging.getLogger("amqp_rt.security")

#: ``status-code`` by condition.
_STATUS: Final = {
    "amqp:invalid-field": 400,
    "amqp:decode-error": 400,
    "amqp:resource-limit-exceeded": 403,
    "amqp:not-implemented": 501,
}


class TokenWatch:
    """The tokens of one connection, and their time.

    One task: until there is a token, it waits for the first, which must not take too long where
    the login alone gives no rights; then it sees to it that what a token gave ends with it.
    """

    def __init__(self, connection: Connection, cbs: Cbs) -> None:
        self.tokens = Tokens(connection.container.limits)
        self.tokens.on_changed = self._on_changed
        self._connection = connection
        self._cbs = cbs
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        #: Held while a request is answered. Judging a token may take long, and what came before it must
        #: not take the place of what came after.
        self.turn = trio.Lock()

    async def put(self, kind: str | None, text: str, audience: str | None) -> None:
        """Judge a token and keep it.

        Raises:
            TokenRefused: It is not accepted; nothing has changed.
        """
        limits = self._connection.container.limits
        token = await self._cbs.judge(kind, text, audience, limits)
        self.keep(token)

    def keep(self, token: Token) -> None:
        """Keep a token that has been judged, such as by the login.

        Raises:
            TokenRefused: There are too many, or it has expired while it was judged.
        """
        # From here on the clock that never jumps counts (REL12).
        left = token.expires_at - self._cbs.clock.wall()
        if not left > 0:
            raise TokenRefused("the token has expired")
        self.tokens.put(token, trio.current_time() + left)

    def _on_changed(self) -> None:
        self._changed.set()
        self._connection.container.judge_again(self._connection, "your rights have changed")

    async def run(self, *, owes: bool, known: bool) -> None:
        """Watch until :meth:`stop`.

        A peer that owes one has ``token_deadline_s`` seconds whenever it has none: after the open, and
        after the last one has expired or was deleted. Otherwise one token, put and deleted at once,
        would keep the connection for ever.

        Args:
            owes: The peer has no rights without a token.
            known: It has been let in, by its login or the tokens that came with it.
        """
        connection = self._connection
        deadline_s = connection.container.limits.token_deadline_s
        due = trio.current_time() + deadline_s if owes else inf
        with self._scope:
            while True:
                self._changed = trio.Event()
                if self.tokens.expire(trio.current_time()):
                    connection.container.judge_again(connection, "the token has expired")
                if len(self.tokens):
                    due = inf
                    if not known and not connection.container.got_token(connection):
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
        """The connection is over, and the tokens with it."""
        # The peer has the tokens, and the connection the peer.
        self.tokens.on_changed = _nothing
        self._scope.cancel()


def _nothing() -> None:
    """Follow changes of tokens no more."""


async def answer_cbs(message: Message, watch: TokenWatch) -> Message | Accepted:
    """What ``$cbs`` says to a request.

    Raises:
        RaisedOutcome: A ``set-token`` is refused.
    """
    async with watch.turn:
        return await _answer(message, watch)


async def _answer(message: Message, watch: TokenWatch) -> Message | Accepted:
    subject = message.properties.subject
    given = message.application_properties
    if subject == "set-token" or "operation" not in given:
        # The draft, §3.3: the outcome is the answer.
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
        log.info("a token was refused: %s", error)
        return _reply(_STATUS.get(error.condition, 401), error.description)
    return _reply(202, "OK")


class TokenRejected(RaisedOutcome):
    """A token was refused, and the outcome says it."""

    def __init__(self, error: AmqpError) -> None:
        super().__init__(error.description, condition=error.condition)

    @property
    def outcome(self) -> Rejected:
        """What the sender is told."""
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
            "the request says not what the token is for: set the property name",
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
