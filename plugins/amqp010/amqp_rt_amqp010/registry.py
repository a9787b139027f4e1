"""Sessions of a broker by their keys: attached ones, and detached ones until their time is up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import inf

from .handlers import CommandHandler
from .limits import (
    DETACHED_MAX,
    DETACHED_OCTETS_MAX,
    DETACHED_USER_MAX,
    SESSION_COST,
    TIMEOUT_MAX,
)
from .sessions import Session, SessionKey


class SessionRegistry:
    """All sessions that have state. Times are seconds of any clock that does not go back.

    A detached session for which there is no room ends at once. None is evicted for another: users cannot
    end sessions of others, and a granted timeout holds for each session that is kept.
    """

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, Session] = {}
        #: Detached session → when it ends.
        self._detached: dict[SessionKey, float] = {}
        #: Sessions whose connection is lost and whose end is due.
        self._ending: dict[SessionKey, Session] = {}
        #: Number of detached sessions for each user that has any.
        self._by_user: dict[str | None, int] = {}
        #: Session → octets for which it counts, and their sum.
        self._costs: dict[SessionKey, int] = {}
        self._octets = 0
        #: When the next one ends; None if that is to be found out.
        self._next: float | None = None
        #: Called when ``deadline`` may have become earlier.
        self.on_deadline: Callable[[], None] = _nothing

    @property
    def detached(self) -> int:
        """Number of detached sessions."""
        return len(self._detached)

    @property
    def deadline(self) -> float | None:
        """When :meth:`tick` is due; None if nothing is kept."""
        if self._ending:
            return -inf
        if self._next is None and self._detached:
            self._next = min(self._detached.values())
        return self._next

    def find(self, key: SessionKey) -> Session | None:
        """Return the session of *key*, or None."""
        return self._sessions.get(key)

    def open(self, key: SessionKey, open_handler: Callable[[Session], CommandHandler]) -> Session:
        """Make a session for *key*, which has none."""
        before = self._ending.pop(key, None)
        if before is not None:
            # A new handler finds released all that the old one held.
            before.end()
        session = Session(key, open_handler)
        self._sessions[key] = session
        return session

    def renew(self, old: Session, open_handler: Callable[[Session], CommandHandler]) -> Session:
        """End *old* and make another session of its key, which takes over its requests."""
        self.remove(old)
        # In this order: a new handler finds released all that the old one held.
        old.end()
        session = self.open(old.key, open_handler)
        session.inherit(old)
        return session

    def granted(self, key: SessionKey, asked_s: int | None) -> int:
        """Return the timeout to grant, in seconds.

        Args:
            key: The session.
            asked_s: The timeout that the peer requests; None for as long as possible.
        """
        if not self._has_place(key.user):
            return 0
        return TIMEOUT_MAX if asked_s is None else min(asked_s, TIMEOUT_MAX)

    def keep(self, session: Session, now: float, *, at_once: bool = True) -> None:
        """Keep the state of *session*, which is being detached, or end it where that is not possible.

        Unless *at_once*, that end is left to :meth:`tick`: a connection may have very many sessions.
        """
        if session.ended:
            return
        key = session.key
        cost = SESSION_COST + session.kept_octets
        # A peer from which no command-point came may not know that this session is a new one: it would
        # take it for one whose state it holds.
        if (
            session.timeout_s == 0
            or not session.receiver.known
            or not self._has_place(key.user)
            or self._octets + cost > DETACHED_OCTETS_MAX
        ):
            self.remove(session)
            if at_once:
                session.end()
            else:
                session.leave()
                self._ending[key] = session
                if len(self._ending) == 1:
                    self.on_deadline()
            return
        self._detached[key] = now + session.timeout_s
        self._by_user[key.user] = self._by_user.get(key.user, 0) + 1
        self._costs[key] = cost
        self._octets += cost
        self._next = None
        session.suspend()
        self.on_deadline()

    def reattach(self, session: Session) -> None:
        """Note that *session* is attached, again if it was detached."""
        key = session.key
        if self._detached.pop(key, None) is None:
            return
        self._next = None
        self._octets -= self._costs.pop(key)
        count = self._by_user.pop(key.user) - 1
        if count:
            self._by_user[key.user] = count

    def remove(self, session: Session) -> None:
        """Forget *session*, whose state ends."""
        self.reattach(session)
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]

    def tick(self, now: float, most: int = DETACHED_MAX) -> None:
        """End sessions whose time is up, at most *most* of them."""
        for key in list(islice(self._ending, most)):
            session = self._ending.pop(key, None)
            # A handler that ends may have opened or ended others.
            if session is not None:
                session.end()
                most -= 1
        deadline = None if self._ending or not most else self.deadline
        if deadline is None or now < deadline:
            return
        for key in [key for key, end in self._detached.items() if end <= now][:most]:
            session = self._sessions.get(key)
            # A handler that ends may have attached or ended others.
            if session is not None and key in self._detached:
                self.remove(session)
                session.end()

    def close(self) -> None:
        """End all sessions."""
        while self._ending:
            self._ending.popitem()[1].end()
        for session in list(self._sessions.values()):
            self.remove(session)
            session.end()

    def _has_place(self, user: str | None) -> bool:
        return len(self._detached) < DETACHED_MAX and self._by_user.get(user, 0) < DETACHED_USER_MAX


def _nothing() -> None:
    """Ignore a changed deadline: no timer is set."""
