"""Connections to the database: their settings, pipelines of a batch, questions with a deadline, and the lock of a store."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import psycopg
from msgspec import Struct
from psycopg import pq
from psycopg.conninfo import make_conninfo

from amqp_rt.errors import AmqpError
from amqp_rt.stores.base import StoreFailed

from .arrays import register
from .schema import prepare_schema
from .urls import StoreUrl

#: Oldest version of the server: it has ``client_connection_check_interval``.
_VERSION_MIN: Final = 140_000
#: First number of the advisory locks of stores; the second one follows from the schema.
_LOCK_CLASS: Final = 0x616D7170
#: Settings of the server for our connections. Plans are made once: every statement goes by a primary key. The server
#: notices a silent broker as the broker notices a silent server.
_SETTINGS: Final = """
SET client_min_messages = warning; SET jit = off; SET plan_cache_mode = force_generic_plan;
SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
SET default_transaction_isolation = 'read committed'; SET lock_timeout = 5000; SET statement_timeout = 0;
SET idle_session_timeout = 0; SET idle_in_transaction_session_timeout = 0; SET bytea_output = 'hex'; SET client_connection_check_interval = 2000;
SET tcp_keepalives_idle = 2; SET tcp_keepalives_interval = 1; SET tcp_keepalives_count = 4; SET tcp_user_timeout = 6000
"""
#: Function of the server that warns of a change whose wait for a replica was cancelled; the text may be in any language.
_CANCELLED_WAIT: Final = "SyncRepWaitForLSN"
_HOLDER: Final = """
SELECT a.pid, a.application_name, coalesce(host(a.client_addr), 'this machine'),
    coalesce(a.state LIKE 'idle%%' OR a.wait_event_type = 'Client', false),
    coalesce(extract(epoch FROM clock_timestamp() - (SELECT max(b.state_change) FROM pg_stat_activity b
        WHERE b.application_name = a.application_name AND b.datname = a.datname)), 0)::float8
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s AND l.objid = %s AND l.objsubid = 2
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

#: Clock that also counts the time in which the machine sleeps.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux's ``struct tcp_info``.
_TRAFFIC: Final = struct.Struct("=QQ")
_TRAFFIC_AT: Final = 120

#: A statement of a batch with ``$1`` …, and its parameters.
Statement = tuple[str, Sequence[Any]]


class Holder(NamedTuple):
    """Session that has the lock of a store."""

    pid: int
    application: str
    address: str
    #: Whether the server waits for it, and for how many seconds nothing has come, on other connections of its broker neither.
    idle: bool
    silent_s: float


class Safety(Struct, frozen=True):
    """Settings of the server on which the safety of data depends."""

    standbys: str
    synchronous_commit: str
    fsync: bool


def now() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def new_application_name() -> str:
    """Return a name under which the connections of one store are known to the server."""
    return f"amqp-rt {secrets.token_hex(4)} {socket.gethostname()[:32]} {os.getpid()}"


class Session:
    """A connection that may hold the lock of its store, once :meth:`set_up` has been called.

    Args:
        url: Where to connect.
        application: Name of the connection; see :func:`new_application_name`.
        within_s: Seconds for connecting, for each host; None for that of the URL. libpq takes two at least.

    Raises:
        psycopg.OperationalError: The server cannot be reached, or refuses the login.
    """

    def __init__(self, url: StoreUrl, application: str, *, within_s: float | None = None) -> None:
        self._url = url
        self.application = application
        conninfo = url.conninfo
        if within_s is not None:
            conninfo = make_conninfo(conninfo, connect_timeout=max(2, round(within_s)))
        self.connection = psycopg.connect(
            conninfo,
            autocommit=True,
            cursor_factory=psycopg.RawCursor,
            application_name=application,
        )
        self._is_unreplicated = False
        self.connection.add_notice_handler(self._on_notice)
        # A copy, whose number is ours until we close it: another thread may end the connection.
        self._socket = socket.socket(fileno=os.dup(self.connection.pgconn.socket))
        #: Time at which the call that waits for the server began, by :func:`now`; None while none waits.
        self.waits_since: float | None = None
        #: The server's process.
        self.pid: int = self.connection.info.backend_pid

    def set_up(self) -> None:
        """Make the settings of a store, and its tables if there are none. The connection is to be closed if that fails.

        Raises:
            AmqpError: The server, or a pooler before it, cannot hold a store.
            psycopg.Error: The connection is lost, or the user may not do it.
        """
        self.waits_since = now()
        self._make_settings()
        self.waits_since = None

    def _make_settings(self) -> None:
        connection = self.connection
        if connection.info.server_version < _VERSION_MIN:
            raise StoreFailed(
                f"{self._url.name} has PostgreSQL {connection.info.server_version // 10_000}: a store needs 14 or later"
            )
        # First: what is set on a pooler's session stays for its other clients.
        self._refuse_pooler()
        for setting in _SETTINGS.split(";"):
            connection.execute(setting.strip().encode())
        register(connection)
        # Always set, so that a weaker setting does not hold for this session when the server reads its files again.
        ((commit,),) = self.rows("SHOW synchronous_commit")
        strong = b"remote_apply" if commit == "remote_apply" else b"on"
        connection.execute(b"SET synchronous_commit = " + strong)
        prepare_schema(connection, self._url.schema)

    def _refuse_pooler(self) -> None:
        """Refuse a connection that ends at a pooler, since the session with the lock would belong to it."""
        ((pid,),) = self.rows("SELECT pg_backend_pid()")
        if pid != self.pid:
            raise AmqpError(
                f"{self._url.name} is a connection pooler, such as pgbouncer: give the address of the database itself, "
                "because the session that has the lock of the store must be the broker's own",
                condition="amqp:not-allowed",
            )

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.source_function == _CANCELLED_WAIT:
            self._is_unreplicated = True

    def _require_replica(self) -> None:
        """Close the connection if the server has answered a change before its replica had it: the result is in doubt."""
        if self._is_unreplicated:
            self.close()
            raise psycopg.OperationalError(
                "the wait for a replica was cancelled, for example by pg_cancel_backend: whether it has the change is unknown"
            )

    @property
    def broken(self) -> bool:
        """Whether the connection has ended."""
        return self.connection.closed or self.connection.pgconn.status == pq.ConnStatus.BAD

    def close(self) -> None:
        """Close the connection, which frees the lock."""
        with suppress(psycopg.Error, OSError):
            self.connection.close()
        self._socket.close()

    def cut(self) -> None:
        """End the connection from another thread: a call that waits for the server fails."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def traffic(self) -> tuple[int, int] | None:
        """Return the octets that the other end has acknowledged and sent; None if the system does not tell."""
        if (option := getattr(socket, "TCP_INFO", None)) is None or sys.platform != "linux":
            return None
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, option, _TRAFFIC_AT + _TRAFFIC.size)
            acknowledged, received = _TRAFFIC.unpack_from(info, _TRAFFIC_AT)
        except (OSError, struct.error):
            return None
        return acknowledged, received

    def wait_for_locks(self) -> None:
        """Let statements wait for locks as long as it takes, which they do not while a term begins."""
        self.rows("SELECT set_config('lock_timeout', '0', false)")

    # -- statements --------------------------------------------------------------------------------

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; octets are bytes."""
        outer, self.waits_since = self.waits_since, now()
        try:
            cursor = self.connection.execute(
                query.encode(), parameters, prepare=bool(parameters), binary=True
            )
        except psycopg.Error as error:
            self._close_if_ended(error)
            raise
        finally:
            self.waits_since = outer
        found = cursor.fetchall()
        self._require_replica()
        return found

    def run(self, statements: Sequence[Statement]) -> None:
        """Run *statements* in one transaction and one round trip.

        Raises:
            psycopg.Error: It failed. It was rolled back, unless the connection was lost: then the result is unknown.
        """
        connection = self.connection
        self.waits_since = now()
        try:
            with connection.pipeline():
                connection.execute(b"BEGIN", prepare=True)
                for text, parameters in statements:
                    connection.execute(text.encode(), parameters, prepare=True)
                connection.execute(b"COMMIT", prepare=True)
        except psycopg.Error as error:
            self._close_if_ended(error)
            if not self.broken:
                try:
                    connection.rollback()
                except psycopg.Error:
                    self.close()
            raise
        finally:
            self.waits_since = None
        self._require_replica()

    def _close_if_ended(self, error: psycopg.Error) -> None:
        """Close the connection if it ends with *error*, although libpq has not noticed that yet.

        The server's last message may be read before the end of the stream, and the pipeline cannot be left then.
        """
        is_last = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
        if is_last or self.connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            self.close()

    def ask(self, query: str, within_s: float) -> list[str] | None:
        """Return the first row of *query*; see :func:`ask`."""
        return ask(self.connection, query, within_s)

    # -- the lock ----------------------------------------------------------------------------------

    @property
    def _lock(self) -> tuple[int, int]:
        return _LOCK_CLASS, zlib.crc32(self._url.schema.encode()) & 0x7FFFFFFF

    def try_lock(self) -> bool:
        """Take the lock of the store, which this session keeps until it ends; return whether it is free."""
        ((taken,),) = self.rows("SELECT pg_try_advisory_lock($1::int4, $2::int4)", self._lock)
        return bool(taken)

    def unlock(self) -> None:
        """Free the lock of the store."""
        self.rows("SELECT pg_advisory_unlock($1::int4, $2::int4)", self._lock)

    def holder(self) -> Holder | None:
        """Return the session that has the lock, None if there is none."""
        query = (
            _HOLDER.replace("%%", "%")
            .replace("%s", "$1::int4::oid", 1)
            .replace("%s", "$2::int4::oid")
        )
        found = self.rows(query, self._lock)
        return Holder(*found[0]) if found else None

    def terminate(self, pid: int) -> None:
        """End another session of the same user.

        Raises:
            psycopg.Error: The user may not.
        """
        self.rows("SELECT pg_terminate_backend($1::int4)", (pid,))

    def safety(self) -> Safety:
        """Return the settings on which the safety of data depends."""
        (row,) = self.rows(
            "SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit'),"
            " current_setting('fsync')"
        )
        return Safety(row[0], row[1], row[2] == "on")


def ask(connection: psycopg.Connection, query: str, within_s: float) -> list[str] | None:
    """Return the first row of *query*, empty if there is none, or None without an answer in *within_s* seconds.

    After None the connection cannot be used any more.

    Raises:
        psycopg.Error: The connection is lost, or the server refuses the query.
    """
    pgconn = connection.pgconn
    until = now() + within_s
    pgconn.send_query(query.encode())
    pgconn.flush()
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    row: list[str] = []
    while True:
        while pgconn.is_busy():
            left = until - now()
            if left <= 0:
                return None
            poll.poll(left * 1000)
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            return row
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.OperationalError(result.error_message.decode("utf-8", "replace"))
        if result.ntuples:
            row = [(result.get_value(0, at) or b"").decode() for at in range(result.nfields)]
