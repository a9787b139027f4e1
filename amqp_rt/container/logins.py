"""SASL mechanisms that a container offers, with the verifiers of their logins (Part 5 §5.3)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import trio

from ..addresses import host_in, network_of
from ..events import Peer
from ..limits import Limits
from ..security.bearer import (
    BearerServer,
    CbsLoginServer,
    MssbCbsServer,
    TokenPlainServer,
    VerifyToken,
    verified_by,
)
from ..security.identities import Users
from ..security.mechanisms import (
    AnonymousServer,
    ExternalServer,
    PlainServer,
    ServerMechanism,
    Verifier,
)
from ..security.scram import HASHES, FindSecret, ScramSecret, ScramServer
from ..security.tokens import Cbs

#: Passwords that are checked at the same time.
_CHECKS_MAX: Final = 2
#: Mechanisms in the order in which they are offered: a client uses the first that it supports.
_RANKS: Final = (
    "EXTERNAL",
    *(f"SCRAM-{each}" for each in HASHES),
    "OAUTHBEARER",
    "XOAUTH2",
    "PLAIN",
    "AMQPCBS",
    "MSSBCBS",
    "ANONYMOUS",
)


def mechanisms_of(
    sasl: Collection[str | ServerMechanism] | None,
    users: Users | Verifier | None,
    tokens: VerifyToken | None,
    cbs: Cbs | None,
    limits: Limits,
) -> dict[str, ServerMechanism]:
    """Return the mechanisms that a container offers, by name; see :class:`Container`.

    The order is that of the offer: unknown mechanisms first, then the strongest.

    Raises:
        ValueError: A name in *sasl* is not known, or needs an argument that was not given.
    """
    if sasl is None:
        sasl = [] if users is None else ["PLAIN"]
        if isinstance(users, Users):
            sasl += [f"SCRAM-{each}" for each in users.scram_hashes]
        sasl += [] if tokens is None else ["OAUTHBEARER", "XOAUTH2"]
        if not sasl:
            # Tokens may arrive with the login or after it.
            sasl = ["ANONYMOUS", *([] if cbs is None else ["AMQPCBS", "OAUTHBEARER", "XOAUTH2"])]
    if tokens is None and cbs is not None:
        tokens = verified_by(cbs, limits)
    found = [
        each if not isinstance(each, str) else _known(each, users, tokens, cbs, limits)
        for each in sasl
    ]
    return _in_order(found)


def with_token_passwords(
    mechanisms: Mapping[str, ServerMechanism], cbs: Cbs, limits: Limits
) -> dict[str, ServerMechanism]:
    """Return *mechanisms* with PLAIN, which takes tokens that *cbs* accepts as passwords."""
    plain = TokenPlainServer(verified_by(cbs, limits), mechanisms.get("PLAIN"))
    return _in_order([*(each for each in mechanisms.values() if each.name != "PLAIN"), plain])


def _in_order(found: Iterable[ServerMechanism]) -> dict[str, ServerMechanism]:
    """Return the mechanisms by name, in the order of the offer."""
    # Mechanisms of the application come first: it has a reason for adding them.
    ranked = sorted(found, key=lambda each: _RANKS.index(each.name) if each.name in _RANKS else -1)
    return {each.name: each for each in ranked}


def _known(
    name: str,
    users: Users | Verifier | None,
    tokens: VerifyToken | None,
    cbs: Cbs | None,
    limits: Limits,
) -> ServerMechanism:
    """Create the mechanism *name*.

    Raises:
        ValueError: There is no such mechanism, or it needs an argument that was not given.
    """
    if name == "ANONYMOUS":
        return AnonymousServer()
    if name == "EXTERNAL":
        return ExternalServer()
    if name == "PLAIN":
        if users is None:
            raise ValueError("sasl has PLAIN, but there are no users: pass users=…")
        return PlainServer(_in_a_thread(users) if isinstance(users, Users) else users)
    if name.startswith("SCRAM-") and name.removeprefix("SCRAM-") in HASHES:
        if not isinstance(users, Users):
            raise ValueError(f"sasl has {name}, but there are no users: pass users=Users(…)")
        return ScramServer(
            name.removeprefix("SCRAM-"), _kept_by(users), iterations=users.scram_iterations
        )
    if name in ("OAUTHBEARER", "XOAUTH2"):
        if tokens is None:
            raise ValueError(f"sasl has {name}, but no validator of tokens: pass tokens=… or cbs=…")
        return BearerServer(name, tokens)
    if name in ("AMQPCBS", "MSSBCBS"):
        if cbs is None:
            raise ValueError(f"sasl has {name}, but no tokens are taken: pass cbs=Cbs(…)")
        return CbsLoginServer(cbs, limits) if name == "AMQPCBS" else MssbCbsServer()
    raise ValueError(f"the mechanism {name!r} is not known: {', '.join(_RANKS)} are")


def _in_a_thread(users: Users) -> Verifier:
    """Return a verifier that checks passwords in worker threads, a few at a time.

    A check is slow on purpose. Logins wait for one in :class:`FairGate`; a password that was right
    before needs no check (:meth:`Users.recall`), so that returning clients do not wait at all.
    """
    gate = FairGate(_CHECKS_MAX)
    limiter = trio.CapacityLimiter(_CHECKS_MAX)

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        if users.recall(user, password):
            await trio.lowlevel.checkpoint()
            return user
        async with gate.turn(network_of(host_in(peer.address))):
            found = await trio.to_thread.run_sync(users.check, user, password, limiter=limiter)
            if found is not None and not users.recall(user, password):
                # The user was deleted, or the password changed, during the check.
                return None
            return found

    return verify


class FairGate:
    """Gate that admits a few tasks at a time; waiting tasks take turns by address.

    With a single line for all, a peer that opens a thousand connections and guesses a password on
    each would keep the others waiting beyond the deadline of the handshake.

    Args:
        places: Tasks that may be inside at the same time.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        #: Waiting tasks by address: the next address first, and for each address the oldest task
        #: first.
        self._waiting: dict[str, dict[trio.Event, None]] = {}

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it within the block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(address)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, address: str) -> None:
        called = trio.Event()
        self._waiting.setdefault(address, {})[called] = None
        try:
            await called.wait()
        except trio.Cancelled:
            if called.is_set():
                self._pass_on()
            else:
                waiting = self._waiting[address]
                del waiting[called]
                if not waiting:
                    del self._waiting[address]
            raise

    def _pass_on(self) -> None:
        """Give a place that has become free to the next address."""
        if not self._waiting:
            self._free += 1
            return
        address = next(iter(self._waiting))
        waiting = self._waiting.pop(address)
        called = next(iter(waiting))
        del waiting[called]
        if waiting:
            # The address goes behind all others.
            self._waiting[address] = waiting
        called.set()


def _kept_by(users: Users) -> FindSecret:
    async def find(user: str, hash_name: str) -> ScramSecret | None:
        return users.scram(user, hash_name)

    return find
