"""A thread that notices a silent database while nothing is written, and shows the broker's life to it."""

from __future__ import annotations

import logging
import threading
from typing import Final, Protocol

import psycopg

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
    #: Time of the last answer of the database, by :func:`~amqp_rt_postgres.sessions.now`.
    answered: float
    #: Time at which the last call began.
    called: float

    def disconnected(self, session: Session) -> None:
        """Note that *session* has ended."""


class Watch:
    """Watch of a store: each connection is asked regularly, or another one about it while a call waits.

    The server sees each question, so that other brokers know that this one lives. If the server does not answer for
    ``silent_s``, or waits for us while we wait for it, the connection is ended, and the waiting call fails.

    Args:
        store: The store.
        url: Where its database is.
    """

    def __init__(self, store: Watched, url: StoreUrl) -> None:
        self._store = store
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="amqp-rt store watch", daemon=True)

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
                    self._beat(pause)
                finally:
                    store.lock.release()
            elif (session := store.session) is not None:
                silent = now() - max(store.answered, store.called)
                if silent < self._url.silent_s / 2:
                    continue
                if self._serves(session, pause):
                    # A long commit or query.
                    store.answered = now()
                elif store.session is session:
                    _log.warning("no answer of %s for %.1f s", self._url.name, silent)
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
        """Return whether the server works for *session*, as it says on another connection."""
        other: psycopg.Connection | None = None
        try:
            other = psycopg.connect(
                self._url.conninfo, autocommit=True, connect_timeout=max(2, int(within_s))
            )
            row = ask(
                other,
                "SELECT state LIKE 'idle%' OR coalesce(wait_event_type, '') = 'Client'"
                f" FROM pg_stat_activity WHERE pid = {session.pid:d}",
                within_s,
            )
        except (psycopg.Error, OSError):
            return False
        finally:
            if other is not None:
                other.close()
        return row == ["f"]
