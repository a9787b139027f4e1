"""Tokens on the side that brings them: put before a link attaches, and renewed in time (SE10, SE12).

Whoever connects with ``token=`` gives a provider: a function from an audience to a token. One task
of the connection asks it, puts what it says on the peer's ``$cbs`` and asks again before it expires,
so that links go on without anybody noticing. A link attaches once the token for its address is
there; after a lost connection all of them are put again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio

from ..clock import Clock, SystemClock
from ..errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectionLost,
    DeliveryNotAccepted,
    DeliveryRejected,
)
from ..limits import check_seconds
from ..message import Message
from ..security.access import CBS, MANAGEMENT
from ..security.tokens import CBS_CAPABILITY, SAS_TYPE, BearerToken, sas_token
from ..values import Symbol, Timestamp

if TYPE_CHECKING:
    from .connections import Connection, Member, Session
    from .receiving import Receiver
    from .sending import Sender

log = logging.getLogger("amqp_rt.connections")

#: The part of its life after which a token is renewed, and seconds between attempts that fail.
_RENEWED_AT: Final = 0.75
_AGAIN_S: Final = 5.0
#: Seconds that a token without an expiry is taken to last.
_LIFE_S: Final = 3600.0
#: Seconds that the peer has to judge a token.
_ANSWER_S: Final = 15.0


#: ``provider(audience)``, a plain function or an async one. *audience* is a URI such as
#: ``amqps://host/orders``.
TokenProvider: TypeAlias = Callable[[str], BearerToken | Awaitable[BearerToken]]


class Sas:
    """A provider of shared access signatures, made of a rule's name and key.

    Args:
        name: Of the rule.
        key: Of the rule, as text.
        life_s: Seconds that each lasts.
        clock: Whose wall clock says when that is over.
    """

    def __init__(
        self, name: str, key: str, *, life_s: float = _LIFE_S, clock: Clock | None = None
    ) -> None:
        self._name = name
        self._key = key
        check_seconds("life_s", life_s)
        self._life_s = life_s
        self._clock = clock or SystemClock()

    def __call__(self, audience: str) -> BearerToken:
        """A token for *audience*."""
        expires_at = int(self._clock.wall() + self._life_s)
        return BearerToken(
            sas_token(audience, self._name, self._key, expires_at), expires_at, SAS_TYPE
        )

    def __repr__(self) -> str:
        return f"Sas({self._name!r}, ***)"


class _Audience:
    """One address, and how things stand with its token."""

    def __init__(self, address: str) -> None:
        self.address = address
        #: Links that attach when it is there.
        self.waiting: list[tuple[Member, Session, Any]] = []
        #: Tasks that wait for it.
        self.asked: list[_Asked] = []
        #: The peer has a token for it.
        self.good = False
        #: When it is put or renewed.
        self.due = -inf


class _Asked:
    """A task that waits for a token."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: AmqpError | None = None


class TokenKeeper:
    """Keeps a connection in tokens.

    Args:
        connection: Whose tokens they are.
        provider: Where they come from.
        set_token: Whether they go by ``set-token`` of the draft (§3.3); None lets that depend on
            whether the peer offers what the draft describes.
        clock: Whose wall clock the expiry of tokens is meant in.
    """

    def __init__(
        self,
        connection: Connection,
        provider: TokenProvider,
        *,
        set_token: bool | None = None,
        clock: Clock | None = None,
    ) -> None:
        #: What audiences begin with; whoever dials sets it.
        self.base = "amqp://localhost/"
        self._connection = connection
        self._provider = provider
        self._clock = clock or SystemClock()
        self._audiences: dict[str, _Audience] = {}
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        #: Around the conversation with the present peer.
        self._conversation = trio.CancelScope()
        #: Whose links need no tokens themselves; made once there is something to put.
        self._session: Session | None = None
        self._links: tuple[Sender, Receiver] | None = None
        self._set_token = set_token
        self._setter: Sender | None = None
        self._count = 0

    # --- what the connection says ------------------------------------------------------------

    def restart(self) -> None:
        """There is another connection: its peer knows of no tokens."""
        self._conversation.cancel()
        for audience in self._audiences.values():
            audience.good = False
            audience.due = -inf
            audience.waiting.clear()
        self._changed.set()

    def admit(self, member: Member, session: Session) -> None:
        """Attach *member* in *session*: now, or when the token for its address is there.

        Raises:
            LocalProtocolError: As ``member.attach``.
        """
        address = _audience_of(getattr(member, "address", None))
        if address is None:
            # It is for no address, and wants no more than that somebody is known.
            good = next((each for each in self._audiences.values() if each.good), None)
            audience = good or self._audience("")
        else:
            audience = self._audience(address)
        if audience.good:
            member.attach(session.core)
        else:
            audience.waiting.append((member, session, session.core))

    async def authorize(self, address: str) -> None:
        """Have a token for *address*, as :meth:`Connection.authorize` says."""
        wanted = _audience_of(address) or ""
        self._audience(wanted)
        await trio.lowlevel.checkpoint()
        if self._scope.cancel_called:
            raise ConnectionLost("the connection was closed")
        # The one before may have failed meanwhile, and then nothing would answer who waits for it.
        audience = self._audience(wanted)
        if not audience.good:
            asked = _Asked()
            audience.asked.append(asked)
            try:
                await asked.done.wait()
            finally:
                if asked in audience.asked:
                    audience.asked.remove(asked)
            if asked.error is not None:
                raise asked.error

    def _audience(self, address: str) -> _Audience:
        found = self._audiences.get(address)
        if found is None:
            found = self._audiences[address] = _Audience(address)
        if not found.good:
            self._changed.set()
        return found

    # --- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Put and renew tokens until :meth:`stop`."""
        with self._scope:
            while True:
                try:
                    await self._connection.wait_open()
                except ConnectionLost:
                    return
                if self._connection.closing:
                    # Until the peer has answered the close, its state is still open.
                    return
                with trio.CancelScope() as self._conversation:
                    await self._converse()
                await trio.lowlevel.checkpoint()

    def stop(self) -> None:
        """The connection is over."""
        self._scope.cancel()
        gone = ConnectionLost("the connection was closed")
        for audience in self._audiences.values():
            _answer(audience, gone)

    async def _converse(self) -> None:
        while True:
            self._changed = trio.Event()
            audience = min(self._audiences.values(), key=lambda each: each.due, default=None)
            if audience is None or audience.due > trio.current_time():
                with trio.CancelScope(deadline=inf if audience is None else audience.due):
                    await self._changed.wait()
                continue
            try:
                await self._renew(audience)
            except AmqpError as error:
                if self._connection.engine_over:
                    # The token was not judged: it is put again on the next connection.
                    return
                self._failed(audience, error)
            except Exception as error:
                log.exception("the token provider failed for %r", audience.address)
                self._failed(audience, AuthenticationFailed(f"the token provider failed: {error}"))

    def _failed(self, audience: _Audience, error: AmqpError) -> None:
        log.warning("no token for %r: %s", audience.address, error)
        audience.due = trio.current_time() + _AGAIN_S
        if audience.good:
            return  # the one before is there as long as it lasts
        del self._audiences[audience.address]
        waiting, audience.waiting = audience.waiting, []
        for member, _, _ in waiting:
            member.lost(
                AuthenticationFailed(
                    f"{audience.address!r}: {error.description}", condition=error.condition
                )
            )
        _answer(audience, error)

    async def _renew(self, audience: _Audience) -> None:
        uri = f"{self.base}{audience.address}"
        found = self._provider(uri)
        token = await found if inspect.isawaitable(found) else found
        since = trio.current_time()
        life_s = _LIFE_S
        if token.expires_at is not None:
            life_s = token.expires_at - self._clock.wall()
        offered = self._connection.peer.offered_capabilities
        drafted = CBS_CAPABILITY in offered if self._set_token is None else self._set_token
        await (self._set(token) if drafted else self._put(uri, token))
        audience.good = True
        audience.due = since + max(life_s * _RENEWED_AT, min(1.0, life_s))
        waiting, audience.waiting = audience.waiting, []
        for member, session, core in waiting:
            session.admitted(member, core)
        _answer(audience, None)

    async def _set(self, token: BearerToken) -> None:
        """Set *token* on the peer: the outcome is the answer (CBS draft §3.3).

        Raises:
            AuthenticationFailed: It does not want it.
        """
        if self._setter is None or self._setter.closed:
            # As §3.2 has it: unsettled, settled first, and these two outcomes.
            self._setter = self._own_session().sender(
                self._node(), settled=False, outcomes=("amqp:accepted:list", "amqp:rejected:list")
            )
        message = Message(
            token.text,
            body_kind="value",
            subject="set-token",
            application_properties={"token-type": token.type},
        )
        try:
            with trio.move_on_after(_ANSWER_S) as timeout:
                await self._setter.wait_attached()
                await self._setter.send(message)
        except (DeliveryRejected, DeliveryNotAccepted) as error:
            raise AuthenticationFailed(
                f"the token was not accepted: {error.description}", condition=error.condition
            ) from None
        if timeout.cancelled_caught:
            raise AuthenticationFailed(f"no answer to a token within {_ANSWER_S:g} s")

    async def _put(self, uri: str, token: BearerToken) -> None:
        """Put *token* on the peer.

        Raises:
            AuthenticationFailed: It does not want it.
        """
        out, replies = await self._cbs()
        self._count += 1
        key = f"token-{self._count}"
        given: dict[str, Any] = {"operation": "put-token", "type": token.type, "name": uri}
        if token.expires_at is not None:
            given["expiration"] = Timestamp(int(token.expires_at * 1000))
        with trio.move_on_after(_ANSWER_S) as timeout:
            await out.send(
                Message(
                    token.text,
                    body_kind="value",
                    message_id=key,
                    reply_to=replies.name,
                    application_properties=given,
                )
            )
            while True:
                async with await replies.receive() as delivery:
                    reply = delivery.message
                if reply.correlation_id == key:
                    break
        if timeout.cancelled_caught:
            raise AuthenticationFailed(f"no answer to a token within {_ANSWER_S:g} s")
        said = reply.application_properties
        status = said.get("status-code", said.get("statusCode"))
        if status not in (200, 202):
            why = said.get("status-description", said.get("statusDescription"))
            raise AuthenticationFailed(f"the token was not accepted ({status}): {why}")

    async def _cbs(self) -> tuple[Sender, Receiver]:
        """Our links to the peer's node for tokens, attached."""
        if self._links is None or any(link.closed for link in self._links):
            for link in self._links or ():
                # One is of no use without the other.
                link.abandon()
            session, address = self._own_session(), self._node()
            name = self._connection.new_name("tokens")
            replies = session.receiver(address, name=name, target=name)
            self._links = session.sender(address), replies
        for link in self._links:
            await link.wait_attached()
        return self._links

    def _own_session(self) -> Session:
        """The session of our links to the peer's node for tokens, made again if it has ended.

        Raises:
            ConnectionLost: The connection is over for good.
            LocalProtocolError: The peer allows no more sessions.
        """
        if self._session is None or self._session.ended:
            self._session = self._connection.session_for_tokens()
        return self._session

    def _node(self) -> str:
        """Where the peer takes tokens (CBS draft §3.1)."""
        node = self._connection.peer.properties.get(Symbol("cbs-node"))
        return node if isinstance(node, str) else CBS


def _answer(audience: _Audience, error: AmqpError | None) -> None:
    asked, audience.asked = audience.asked, []
    for each in asked:
        each.error = error
        each.done.set()


def _audience_of(address: object) -> str | None:
    """The resource whose token a link to *address* needs."""
    if not isinstance(address, str):
        return None
    if address == MANAGEMENT:
        return ""
    return address.removesuffix(f"/{MANAGEMENT}")
