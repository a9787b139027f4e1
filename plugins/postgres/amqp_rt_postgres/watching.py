"""A thread that notices a silent database while nothing is written, and shows the broker's life to it."""

from __future__ import annotations

import logging
import threading
from typing import Final, NamedTuple, Protocol

import psycopg
from psycopg.conninfo import make_conninfo

from .sessions import Session, ask, now
from .urls import StoreUrl

_log = logging.getLogger("amqp_rt.store")

#: Signs of life within ``silent_s``.
_BEATS: Final = 4


class Watched(Protocol):
    """Store, as far as its watch needs it."""

    #: Held while a call uses the connection.
    lock: threading.RLock
    #: The connection; None while there is none.
    session: Session | None
    #: A connection that is about to become the store's, or waits for that; None while no call uses one.
    joining: Session | None
    #: Time after which *joining* has to be given up unless the server works for it.
    until: float
    #: Time of the last answer of the database, by :func:`~amqp_rt_postgres.sessions.now`.
    answered: float

    def disconnected(self, session: Session) -> None:
        """Note that *session* has ended."""


class Call(NamedTuple):
    """A call that waits for the server, as the watch has last seen it."""

    session: Session
    since: float
    traffic: tuple[int, int] | None
    #: Last time at which its data moved or the server worked for it.
    well: float


class Watch:
    """Watch of a store: each connection is asked regularly, or another one about it while a call waits.

    The server sees each question, so that other brokers know that this one lives. If the server does not answer for
    ``silent_s``, or waits for us while we wait for it and no data moves, the connection is ended, and the waiting
    call fails.

    Args:
        store: The store.
        url: Where its database is.
    """

    def __init__(self, store: Watched, url: StoreUrl) -> None:
        self._store = store
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="amqp-rt store watch", daemon=True)
        self._call: Call | None = None
        #: Connection for questions during a long call. It stays until the call has ended, as a sign of life.
        self._other: psycopg.Connection | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; return at once."""
        self._stopped.set()

    def _run(self) -> None:
        pause = self._url.silent_s / _BEATS
        while not self._stopped.wait(pause):
            store = self._store
            if store.lock.acquire(blocking=False):
                try:
                    self._call = None
                    self._end_questions()
                    self._beat(pause)
                finally:
                    store.lock.release()
            elif (session := store.joining or store.session) is not None:
                self._check(session, pause)
        self._end_questions()

    def _check(self, session: Session, pause: float) -> None:
        """End *session* if a call waits on it for a silent server."""
        store = self._store
        since = session.waits_since
        if since is None:
            self._call = None
            return
        at, traffic, before = now(), session.traffic(), self._call
        well = since
        if before is not None and (before.session, before.since) == (session, since):
            well = before.well if traffic == before.traffic else at
        self._call = Call(session, since, traffic, well)
        is_late = session is store.joining and at > store.until
        if at - since < pause and not is_late:
            return
        # Early enough that our question shows our life before silent_s is over, which others count as well.
        if self._serves(session, pause):
            # A long commit or query.
            store.answered = now()
            self._call = Call(session, since, traffic, store.answered)
        elif at - well < self._url.silent_s / 2 and not is_late:
            # A large batch or result on a slow network.
            return
        elif session.waits_since == since and not self._stopped.is_set():
            _log.warning("no answer of %s for %.1f s", self._url.name, now() - well)
            session.cut()

    def _beat(self, pause: float) -> None:
        store = self._store
        session = store.session
        if session is None or self._stopped.is_set():
            return
        why = "it does not answer"
        try:
            if session.ask("SELECT epoch FROM state", self._url.silent_s - pause) is not None:
                store.answered = now()
                return
        except psycopg.Error as error:
            why = " ".join(str(error).split())
        _log.warning("the connection to %s is lost: %s", self._url.name, why)
        session.cut()
        session.close()
        store.disconnected(session)

    def _serves(self, session: Session, within_s: float) -> bool:
        """Return whether the server works for *session*, as it says on another connection, or refuses such a one."""
        try:
            if self._other is None:
                info = session.connection.info
                # Of several servers, the one that the session is connected to.
                place = {"host": info.host, "hostaddr": info.hostaddr or None, "port": info.port}
                self._other = psycopg.connect(
                    make_conninfo(self._url.conninfo, **place),
                    autocommit=True,
                    connect_timeout=max(2, int(within_s)),
                    application_name=session.application,
                )
            row = ask(
                self._other,
                "SELECT state LIKE 'idle%' OR coalesce(wait_event_type, '') = 'Client'"
                f" FROM pg_stat_activity WHERE pid = {session.pid:d}",
                within_s,
            )
        except (psycopg.Error, OSError) as error:
            if self._other is None and "FATAL:" in str(error):
                # It has no connection left, or takes none from us any more: it lives. Only the system watches the session then.
                return True
            row = None
        if row is None:
            self._end_questions()
        return row == ["f"]

    def _end_questions(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other.close()
