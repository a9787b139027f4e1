"""Which of several brokers uses a store: a lock that elects, and an epoch that fences.

The lock is a session's: the server frees it when the connection of its holder ends. Who gets it increments the epoch,
and each batch begins by updating the row that has the epoch, if it is still the same. That row is locked until the
batch is committed: the winner's update waits for a batch that is being committed, and later ones of the old
broker fail. A batch also writes its number there, so that after a lost connection it is known whether it was kept.

A replica that takes over without the last increment gives the same epoch once more, to another broker. Each term has a
random token as well, which tells the two apart.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Final

import psycopg
from msgspec import Struct

from amqp_rt.errors import AmqpError
from amqp_rt.stores.base import StoreBusy, StoreFailed, StoreLost

from .sessions import Holder, Session, new_application_name, now
from .urls import StoreUrl

__all__ = ["Term", "begin", "connect", "continue_term", "log_safety", "reason_of"]

_log = logging.getLogger("amqp_rt.store")

#: Seconds between attempts to connect again.
_RETRY_S: Final = 0.2
#: Least number of seconds for which a lost connection is tried again.
_REJOIN_MIN_S: Final = 1.0
#: Seconds by which a busy machine may notice a lost connection late.
_LATE_S: Final = 10.0
#: Most seconds for one attempt.
_CONNECT_S: Final = 5.0


class Term(Struct):
    """Time in which one broker uses the store."""

    epoch: int
    #: Random number of the term: an epoch that an asynchronous replica has not got is given again.
    token: int
    #: Number of the last batch that is known to be stored.
    batch: int
    application: str


def reason_of(error: Exception) -> str:
    """Return the text of *error* in one line."""
    return " ".join(str(error).split()) or type(error).__name__


#: Called with each new connection before its first statement, and with the time by :func:`~amqp_rt_postgres.sessions.now`
#: after which it has to be given up unless the server works for it.
Joining = Callable[[Session, float], None]


def _open(
    url: StoreUrl,
    application: str,
    joining: Joining,
    until: float = math.inf,
    within_s: float | None = None,
) -> Session:
    """Return a new connection that is ready for a store."""
    session = Session(url, application, within_s=within_s)
    try:
        joining(session, until)
        session.set_up()
    except BaseException:
        session.close()
        raise
    return session


def begin(session: Session, url: StoreUrl) -> tuple[Term, bool]:
    """Begin a term, if no other broker uses the store; return it, and whether the last one ended cleanly.

    A holder that has been silent for ``silent_s`` is disconnected, so that a later attempt succeeds.

    Raises:
        StoreBusy: Another broker uses it.
        psycopg.Error: The connection is lost.
    """
    if not session.try_lock():
        holder = session.holder()
        if holder is None:
            raise StoreBusy(f"{url.name} has just been in use by another broker")
        _end_silent(session, holder, url.silent_s)
        raise StoreBusy(f"{url.name} is in use by {holder.application} at {holder.address}")
    token = secrets.randbits(63)
    # Waits for a batch of the broker before that is being committed.
    ((epoch, batch, clean),) = session.rows(
        "WITH before AS (SELECT clean FROM state), begun AS"
        " (UPDATE state SET epoch = epoch + 1, token = $1::int8, clean = false RETURNING epoch, batch)"
        " SELECT begun.epoch, begun.batch, before.clean FROM begun, before",
        (token,),
    )
    session.wait_for_locks()
    return Term(epoch, token, batch, session.application), clean


def _end_silent(session: Session, holder: Holder, silent_s: float) -> None:
    """Disconnect the holder of the lock if it has been silent for too long.

    The clock is the server's. A holder for which the server works is not silent, however long that takes.
    """
    if not holder.idle or holder.silent_s < silent_s:
        return
    _log.warning(
        "disconnecting the active broker: %s at %s has been silent for %.1f s",
        holder.application,
        holder.address,
        holder.silent_s,
    )
    try:
        session.terminate(holder.pid)
    except psycopg.Error as error:
        _log.error("the active broker cannot be disconnected: %s", reason_of(error))


def continue_term(
    term: Term, url: StoreUrl, answered: float, joining: Joining
) -> tuple[Session, int]:
    """Connect again and continue *term*; return the connection, and the number of the last batch that is stored.

    Args:
        term: The term.
        url: Where to connect.
        answered: Time of the last answer of the database, by :func:`~amqp_rt_postgres.sessions.now`.
        joining: Called with each connection that is tried.

    Raises:
        StoreLost: Another broker uses the store, the database has lost batches, or it cannot be reached within
            ``rejoin_s`` of its last answer.
    """
    began = now()
    if (silent := began - answered) > url.silent_s + url.rejoin_s + _LATE_S:
        raise StoreLost(
            f"{url.name} has not answered for {silent:.0f} s, in which this machine was stopped: its broker must not go on "
            f"after rejoin_s={url.rejoin_s:g}"
        )
    until = max(answered + url.rejoin_s, began + _REJOIN_MIN_S)
    while True:
        try:
            left = until - now()
            session = _open(url, term.application, joining, until, min(left, _CONNECT_S))
        except psycopg.OperationalError as error:
            if now() >= until:
                raise StoreLost(
                    f"{url.name} cannot be reached again: {reason_of(error)}"
                ) from error
            time.sleep(_RETRY_S)
            continue
        except (psycopg.Error, AmqpError) as error:
            raise _unusable(url, error) from error
        try:
            stored = _continue(session, term, url)
        except psycopg.OperationalError as error:
            session.close()
            if now() >= until:
                raise StoreLost(f"{url.name} has been lost again: {reason_of(error)}") from error
        except psycopg.Error as error:
            session.close()
            raise _unusable(url, error) from error
        except BaseException:
            session.close()
            raise
        else:
            if stored is not None:
                return session, stored
            session.close()
            if now() >= until:
                raise StoreLost(f"{url.name}: our last connection to it does not end")
        time.sleep(_RETRY_S)


def _continue(session: Session, term: Term, url: StoreUrl) -> int | None:
    """Take the lock again; return the number of the last stored batch, None if our last connection still has it."""
    if not session.try_lock():
        holder = session.holder()
        if holder is None:
            return None
        if holder.application != term.application:
            raise _taken(url, holder.application)
        session.terminate(holder.pid)
        return None
    # An update, not a query: with synchronous replication its commit also waits for the batches before it.
    found = session.rows(
        "UPDATE state SET clean = false WHERE epoch = $1::int8 AND token = $2::int8 RETURNING batch",
        (term.epoch, term.token),
    )
    if not found:
        # Or a server took over that has not got the beginning of our term.
        raise _taken(url, "another broker")
    stored: int = found[0][0]
    if stored < term.batch:
        raise StoreLost(
            f"{url.name} has lost the last {term.batch - stored} batches, which were acknowledged: did another server "
            "without synchronous replication take over? Start the broker again to go on with the data that is left"
        )
    session.wait_for_locks()
    return stored


def _unusable(url: StoreUrl, error: Exception) -> StoreLost:
    return StoreLost(f"{url.name} cannot be used again: {reason_of(error)}")


def _taken(url: StoreUrl, who: str) -> StoreLost:
    return StoreLost(f"{url.name} is in use by {who} now: this broker must not go on")


def connect(url: StoreUrl, joining: Joining) -> Session:
    """Connect for the first time; *joining* is called with the connection.

    Raises:
        StoreFailed: The database cannot be reached, or refuses the login.
        AmqpError: The database cannot hold a store.
    """
    try:
        return _open(url, new_application_name(), joining)
    except psycopg.errors.InsufficientPrivilege as error:
        raise StoreFailed(
            f"{url.name} cannot be opened: {reason_of(error)}: the user needs the right to create a schema there, or to "
            "use the one that exists"
        ) from error
    except psycopg.Error as error:
        raise StoreFailed(f"{url.name} cannot be opened: {reason_of(error)}") from error


def log_safety(session: Session, url: StoreUrl) -> None:
    """Write into the log whether the loss of the database's machine can lose acknowledged messages."""
    safety = session.safety()
    if not safety.fsync:
        _log.error(
            "%s has fsync = off: acknowledged messages can be lost with its machine, or the whole database",
            url.name,
        )
    elif safety.standbys:
        _log.info(
            "%s replicates synchronously to %s: the loss of one database machine loses no acknowledged message",
            url.name,
            safety.standbys,
        )
    else:
        _log.warning(
            "%s has no synchronous replica (synchronous_standby_names is empty): the loss of the database machine and "
            "its disk loses acknowledged messages",
            url.name,
        )
