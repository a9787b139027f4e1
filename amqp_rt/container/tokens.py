"""Tokens on the client side: put before a link attaches, and renewed before they expire.

With ``token=`` a client passes a provider: a function from an audience to a token. One task of the
connection calls it, puts the token at the peer's ``$cbs`` and renews it before it expires, so that
links are not interrupted. A link attaches once the token for its address has been put; after a lost
connection all tokens are put again.
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
    from .connections import Connection, Session
    from .engines import EngineSession
    from .links import Member
    from .receiving import Receiver
    from .sending import Sender

log = logging.getLogger("amqp_rt.connections")

#: Fraction of a token's lifetime after which it is renewed, and seconds between failed attempts.
_RENEWED_AT: Final = 0.75
_AGAIN_S: Final = 5.0
#: Assumed lifetime of a token without an expiry, in seconds.
_LIFE_S: Final = 3600.0
#: Seconds that the peer has to answer a token.
_ANSWER_S: Final = 15.0


#: ``provider(audience)``, a plain or an async function. *audience* is a URI such as
#: ``amqps://host/orders``.
TokenProvider: TypeAlias = Callable[[str], BearerToken | Awaitable[BearerToken]]


class Sas:
    """Provider of shared access signatures, created from a rule's name and key.

    Args:
        name: Name of the rule.
        key: Key of the rule, as text.
        life_s: Seconds that each token is valid.
        clock: Clock whose wall time determines the expiry.
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
        """Create a token for *audience*."""
        expires_at = int(self._clock.wall() + self._life_s)
        return BearerToken(
            sas_token(audience, self._name, self._key, expires_at), expires_at, SAS_TYPE
        )

    def __repr__(self) -> str:
        return f"Sas({self._name!r}, ***)"


class _Audience:
    """Address, with the state of its token."""

    def __init__(self, address: str) -> None:
        self.address = address
        #: Links that attach when the token has been put.
        self.waiting: list[tuple[Member, Session, EngineSession | None]] = []
        #: Tasks that wait for the token.
        self.asked: list[_Asked] = []
        #: Whether the peer has a token for the address.
        self.good = False
        #: Time at which the token is to be put or renewed.
        self.due = -inf


class _Asked:
    """Task that waits for a token."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: AmqpError | None = None


class TokenKeeper:
    """Task of a connection that puts and renews its tokens.

    Args:
        connection: The connection that needs the tokens.
        provider: Function that returns the tokens.
        set_token: Whether to use ``set-token`` of the draft (§3.3); None uses it if the peer offers
            the draft's capability.
        clock: Clock whose wall time determines the expiry of tokens.
    """

    def __init__(
        self,
        connection: Connection,
        provider: TokenProvider,
        *,
        set_token: bool | None = None,
        clock: Clock | None = None,
    ) -> None:
        #: First part of the audiences; set by the dialler.
        self.base = "amqp://localhost/"
        self._connection = connection
        self._provider = provider
        self._clock = clock or SystemClock()
        self._audiences: dict[str, _Audience] = {}
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        #: Cancel scope of the exchange with the current peer.
        self._conversation = trio.CancelScope()
        #: Session whose links need no tokens themselves; created for the first token.
        self._session: Session | None = None
        self._links: tuple[Sender, Receiver] | None = None
        self._set_token = set_token
        self._setter: Sender | None = None
        self._count = 0

    # --- called by the connection ------------------------------------------------------------

    def restart(self) -> None:
        """Mark all tokens as missing: the peer of a new connection has none."""
        self._conversation.cancel()
        for audience in self._audiences.values():
            audience.good = False
            audience.due = -inf
            audience.waiting.clear()
        self._changed.set()

    def admit(self, member: Member, session: Session) -> None:
        """Attach *member* in *session*, now or when the token for its address has been put.

        Raises:
            LocalProtocolError: As ``member.attach``.
        """
        address = _audience_of(getattr(member, "address", None))
        if address is None:
            # The link has no address, and only needs a peer that has some token.
            good = next((each for each in self._audiences.values() if each.good), None)
            audience = good or self._audience("")
        else:
            audience = self._audience(address)
        if audience.good:
            assert session.core is not None
            member.attach(session.core)
        else:
            audience.waiting.append((member, session, session.core))

    async def authorize(self, address: str) -> None:
        """Put a token for *address*; see :meth:`Connection.authorize`."""
        wanted = _audience_of(address) or ""
        self._audience(wanted)
        await trio.lowlevel.checkpoint()
        if self._scope.cancel_called:
            raise ConnectionLost("the connection was closed")
        # The previous entry may have failed during the checkpoint, and its waiting tasks would get
        # no answer.
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
                    # The state remains open until the peer has answered the close.
                    return
                with trio.CancelScope() as self._conversation:
                    await self._converse()
                await trio.lowlevel.checkpoint()

    def stop(self) -> None:
        """Stop: the connection has ended, and waiting tasks get ``ConnectionLost``."""
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
                    # The token was not checked: it is put again on the next connection.
                    return
                self._failed(audience, error)
            except Exception as error:
                log.exception("the token provider failed for %r", audience.address)
                self._failed(audience, AuthenticationFailed(f"the token provider failed: {error}"))

    def _failed(self, audience: _Audience, error: AmqpError) -> None:
        log.warning("no token for %r: %s", audience.address, error)
        audience.due = trio.current_time() + _AGAIN_S
        if audience.good:
            return  # The previous token is valid until it expires
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
        """Set *token* at the peer, where the outcome is the answer (CBS draft §3.3).

        Raises:
            AuthenticationFailed: The peer does not accept it.
        """
        if self._setter is None or self._setter.closed:
            # As in §3.2: unsettled, the sender settles first, and these two outcomes.
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
        """Put *token* at the peer.

        Raises:
            AuthenticationFailed: The peer does not accept it.
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
        """Return our links to the peer's node for tokens, attached."""
        if self._links is None or any(link.closed for link in self._links):
            for link in self._links or ():
                # Neither link is of use without the other.
                link.abandon()
            session, address = self._own_session(), self._node()
            name = self._connection.new_name("tokens")
            replies = session.receiver(address, name=name, target=name)
            self._links = session.sender(address), replies
        for link in self._links:
            await link.wait_attached()
        return self._links

    def _own_session(self) -> Session:
        """Return the session of our links to the peer's token node, begun again if it ended.

        Raises:
            ConnectionLost: The connection has ended permanently.
            LocalProtocolError: The peer allows no more sessions.
        """
        if self._session is None or self._session.ended:
            self._session = self._connection.session_for_tokens()
        return self._session

    def _node(self) -> str:
        """Return the address of the peer's node for tokens (CBS draft §3.1)."""
        node = self._connection.peer.properties.get(Symbol("cbs-node"))
        return node if isinstance(node, str) else CBS


def _answer(audience: _Audience, error: AmqpError | None) -> None:
    asked, audience.asked = audience.asked, []
    for each in asked:
        each.error = error
        each.done.set()


def _audience_of(address: object) -> str | None:
    """Return the resource whose token a link to *address* needs."""
    if not isinstance(address, str):
        return None
    if address == MANAGEMENT:
        return ""
    return address.removesuffix(f"/{MANAGEMENT}")
