"""Sessions of an entity: their messages, locks and state, and receivers that wait for one.

A session exists as long as it has a message, a state or a receiver. One receiver at a time holds its lock, which
covers its messages, later ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from amqp_rt.broker.building import Subscription
from amqp_rt.errors import AmqpError

from .conditions import SERVER_BUSY
from .deadlines import Deadlines
from .numbers import Numbers
from .stored import Stored


class Session:
    """One session."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        #: Sequence numbers of all its messages, and places of those that can be delivered.
        self.numbers = Numbers()
        self.ready = Numbers()
        #: Messages that its receiver has and has not settled, by their places.
        self.in_hand: dict[int, Stored] = {}
        #: The receiver that has the lock, and the wall-clock end of the lock.
        self.holder: Subscription | None = None
        self.until = inf
        self.state: bytes | None = None
        #: Place under which it is listed as free, None if it is not.
        self.listed: int | None = None


class Sessions:
    """Sessions of one entity."""

    def __init__(self) -> None:
        self._all: dict[str, Session] = {}
        #: Free sessions with ready messages, by the place of the first one.
        self._free = Numbers()
        self._by_place: dict[int, Session] = {}
        #: Time of each session's state, the last set at the end.
        self._stated: dict[str, float] = {}
        #: Receivers that wait for a session, in the order in which they came.
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._waited = 0
        #: Ends of locks, by session.
        self.locks: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._all)

    def find(self, session_id: str) -> Session | None:
        """Return the session, None if it does not exist."""
        return self._all.get(session_id)

    def open(self, session_id: str) -> Session:
        """Return the session, which is created if it does not exist."""
        found = self._all.get(session_id)
        if found is None:
            found = self._all[session_id] = Session(session_id)
        return found

    def clear(self) -> Iterator[Session]:
        """Remove all sessions at once; return an iterator that frees one at each step."""
        removed, self._all = self._all, {}
        self._free = Numbers()
        self._by_place = {}
        self._stated = {}
        self._waiting = {}
        self.locks = Deadlines()
        return _popped(removed)

    # --- Locks ---

    def lock(self, session: Session, holder: Subscription, until: float) -> None:
        """Lock *session* for *holder* until that time."""
        session.holder = holder
        self.renew(session, until)
        self.refresh(session)

    def renew(self, session: Session, until: float) -> None:
        """Let the lock of *session* end at *until*."""
        session.until = until
        self.locks.set(session.id, until)

    def unlock(self, session: Session) -> None:
        """Free *session*. It ends if it has no message and no state."""
        session.holder = None
        session.until = inf
        self.locks.discard(session.id)
        self.refresh(session)

    def refresh(self, session: Session) -> None:
        """List *session* as free or not, after its lock or its messages have changed."""
        wanted = session.ready.first if session.holder is None else None
        if wanted != session.listed:
            if session.listed is not None:
                self._free.discard(session.listed)
                del self._by_place[session.listed]
            session.listed = wanted
            if wanted is not None:
                self._free.add(wanted)
                self._by_place[wanted] = session
        if (
            session.holder is None
            and session.state is None
            and not session.numbers
            and not session.in_hand
        ):
            self._all.pop(session.id, None)

    def first_free(self) -> Session | None:
        """Return the free session with the oldest ready message, None if there is none."""
        place = self._free.first
        return None if place is None else self._by_place[place]

    def locked(self) -> list[Session]:
        """Return the sessions that receivers have locked."""
        return [each for each in self._all.values() if each.holder is not None]

    # --- Waiting receivers ---

    def wait(self, on_free: Callable[[], bool], most: int) -> int:
        """Call *on_free* when a session is free; return a number for :meth:`stop_waiting`.

        At most *most* receivers may wait.

        *on_free* returns whether it has taken a session: if not, the next receiver is called.

        Raises:
            AmqpError: Too many receivers wait.
        """
        if len(self._waiting) >= most:
            raise AmqpError(
                f"{most} receivers wait for a session of this entity already: close some",
                condition=SERVER_BUSY,
            )
        self._waited += 1
        self._waiting[self._waited] = on_free
        return self._waited

    def stop_waiting(self, number: int) -> bool:
        """Forget a receiver that waits; return whether it was still waiting."""
        return self._waiting.pop(number, None) is not None

    @property
    def waiting(self) -> int:
        """Number of receivers that wait for a session."""
        return len(self._waiting)

    def serve_waiting(self, most: int) -> int:
        """Let at most *most* receivers that wait take the sessions that are free; return how many may follow."""
        while self._waiting and self._free and most > 0:
            most -= 1
            number = next(iter(self._waiting))
            self._waiting.pop(number)()
        return most

    # --- State ---

    def set_state(self, session: Session, state: bytes | None, at: float) -> None:
        """Set the state of *session*; None removes it."""
        session.state = state
        self._stated.pop(session.id, None)
        if state is not None:
            self._stated[session.id] = at
        self.refresh(session)

    def list_ids(self, since: float | None, skip: int, top: int) -> list[str]:
        """Return ids of sessions.

        Args:
            since: Wall-clock time since which their state was set; None for all sessions that have a
                message or a state, in the order in which they began.
            skip: How many to leave out.
            top: How many to return at most.
        """
        found = self._existing() if since is None else self._stated_since(since)
        return list(islice(found, skip, skip + top))

    def _existing(self) -> Iterator[str]:
        # A function, since mypyc makes a list of a generator expression.
        for each in self._all.values():
            if each.numbers or each.state is not None:
                yield each.id

    def _stated_since(self, since: float) -> Iterator[str]:
        for session_id in reversed(self._stated):
            if self._stated[session_id] < since:
                return
            yield session_id


def _popped(removed: dict[str, Session]) -> Iterator[Session]:
    while removed:
        yield removed.popitem()[1]
