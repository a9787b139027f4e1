"""Sessions of SQLAlchemy, used from trio and from asyncio: in threads, or in the event loop of asyncio.

SQLAlchemy has two kinds of sessions. Those that block are used in worker threads, and work everywhere. Those of
``sqlalchemy.ext.asyncio`` need an event loop of asyncio: a container of :mod:`amqp_rt.aio` runs trio as a guest of
one, in the same thread. Their work is done by a task of asyncio, for which the task of trio waits.

All work is written once, as functions of a session that blocks. A thread cannot be interrupted: where a database no longer answers, a
cancelled caller leaves the thread alone, and with it the session or connection, which that thread closes when the call ends.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from threading import Lock
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar

import anyio.to_thread
from anyio import CancelScope, CapacityLimiter, get_cancelled_exc_class, move_on_after
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from ...container.loops import in_asyncio

P = ParamSpec("P")
T = TypeVar("T")

#: Maker of the sessions of an application.
Factory: TypeAlias = sessionmaker[Any] | async_sessionmaker[Any]
#: Errors of a database that is not there, has restarted, or is locked: another attempt may succeed.
PASSING_ERRORS: Final = (OperationalError, InterfaceError, NoConnectionFree)
#: Seconds for which a cancelled caller waits for the end of a call, before it leaves the thread alone; and for which
#: the end of a session is waited for.
STOP_S: Final = 1.0
#: Seconds between two looks whether that call has ended.
_LOOK_S: Final = 0.02
#: Key in ``Session.info`` of sessions that were left to a thread.
_LEFT: Final = "amqp_rt.left"

_log = logging.getLogger("amqp_rt.outbox")


class _ThreadCall(Generic[T]):
    """Call in a thread, which its caller can leave alone.

    Args:
        work: The call.
        leave: Called by the caller when it leaves.
        close: Called by the thread after the end of a call that was left.
    """

    def __init__(
        self, work: Callable[[], T], leave: Callable[[], object], close: Callable[[], object]
    ) -> None:
        self._work = work
        self._leave = leave
        self._close = close
        self._lock = Lock()
        self._left = False
        self._begun = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.ended = False

    def run(self) -> T | None:
        """Make the call, in the thread; not if its caller has left before."""
        with self._lock:
            if self._left:
                return None
            self._begun = True
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        with self._lock:
            self.ended = True
            if not self._left:
                return self.result()
        try:
            self._close()
        except Exception as error:
            _log.info("a connection to the database that did not answer is closed: %s", error)
        return None

    def result(self) -> T:
        """Return the result of the call, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    @property
    def runs(self) -> bool:
        """Whether the call has begun and not ended."""
        return self._begun and not self.ended

    def leave(self) -> bool:
        """Leave the call unless it has ended; return whether it was left."""
        with self._lock:
            if self.ended:
                return False
            if self._begun:
                self._leave()
            self._left = True
            return True


async def in_thread(
    work: Callable[[], T], *, leave: Callable[[], object], close: Callable[[], object]
) -> T:
    """Call *work* in a thread. Cancellation waits ``STOP_S`` seconds for its end.

    Then *leave* is called, the cancellation takes place, and the thread calls *close* when *work* ends.
    """
    call = _ThreadCall(work, leave, close)
    try:
        await anyio.to_thread.run_sync(call.run, abandon_on_cancel=True)
    except get_cancelled_exc_class():
        with move_on_after(STOP_S, shield=True):
            while call.runs:  # noqa: ASYNC110 (only a cancelled caller asks)
                await anyio.sleep(_LOOK_S)
        if call.leave():
            raise
    return call.result()


async def close_in_thread(close: Callable[[], object]) -> None:
    """Call *close* in a thread, in any case, and wait at most ``STOP_S`` seconds for its end."""
    with move_on_after(STOP_S, shield=True):
        # With a limiter of its own the thread starts at once, so that nothing can leave the call before it has begun.
        await anyio.to_thread.run_sync(close, abandon_on_cancel=True, limiter=CapacityLimiter(1))


async def call_or_leave(
    session: Session | AsyncSession,
    work: Callable[Concatenate[Session, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call *work* with *session*, which nothing else uses, as :func:`call` does.

    Cancellation waits ``STOP_S`` seconds for a call in a thread. Then the thread has the session, and closes it
    (:func:`was_left`).
    """
    if isinstance(session, AsyncSession):
        return await call(session, work, *args, **kwargs)
    return await in_thread(
        partial(work, session, *args, **kwargs),
        leave=partial(session.info.__setitem__, _LEFT, True),
        close=session.close,
    )


def was_left(session: Session | AsyncSession | None) -> bool:
    """Return whether a thread has *session*, which must not be used any more."""
    return session is not None and _LEFT in session.info


async def call(
    session: Session | AsyncSession,
    work: Callable[Concatenate[Session, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call *work* with *session*: in a thread, or with a session for asyncio in its event loop.

    Cancellation waits for a call in a thread; one in an event loop is cancelled.

    Raises:
        RuntimeError: The session needs asyncio, and the caller runs under trio alone.
    """
    if isinstance(session, AsyncSession):
        return await in_asyncio(
            partial(session.run_sync, work, *args, **kwargs),
            "sessions of sqlalchemy.ext.asyncio need asyncio: use a container of amqp_rt.aio, or under trio"
            " a sessionmaker of sqlalchemy.orm",
        )
    return await anyio.to_thread.run_sync(partial(work, session, *args, **kwargs))


def kind_of_sessions(factory: Factory) -> type:
    """Return the class of the sessions that *factory* makes, as applications name it.

    Raises:
        TypeError: It makes no sessions.
    """
    if not isinstance(factory, sessionmaker | async_sessionmaker):
        raise TypeError(
            "a session_factory is a sessionmaker of sqlalchemy.orm or an async_sessionmaker of sqlalchemy.ext.asyncio,"
            f" not {factory!r:.80}"
        )
    kind: type = factory.class_
    if isinstance(factory, sessionmaker):
        # Each makes a class of its own, derived from the one that it was given.
        kind = kind.__bases__[0]
    return kind


async def committed(
    session: Session | AsyncSession,
    work: Callable[Concatenate[Session, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call *work* with *session* as :func:`call_or_leave` does, and commit its transaction."""
    return await call_or_leave(session, _work_and_commit, work, *args, **kwargs)


def _work_and_commit(
    session: Session,
    work: Callable[Concatenate[Session, P], T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    result = work(session, *args, **kwargs)
    session.commit()
    return result


@asynccontextmanager
async def opened(factory: Factory) -> AsyncIterator[Any]:
    """Open a session, and close it at the end of the block, which rolls back what is not committed.

    If the database does not answer, a thread goes on with that after ``STOP_S`` seconds.
    """
    session = factory()
    try:
        yield session
    finally:
        if isinstance(session, AsyncSession):
            with CancelScope(shield=True):
                await call(session, Session.close)
        elif not was_left(session):
            await close_in_thread(session.close)


async def in_transaction(
    factory: Factory,
    work: Callable[Concatenate[Session, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call *work* in a transaction of its own, and commit it. Cancelled, it ends as :func:`call_or_leave` does.

    It does not wait for the event loop meanwhile, which may be blocked by a commit of the application: SQLite lets only one
    transaction write.
    """

    def whole(session: Session) -> T:
        with session:
            return _work_and_commit(session, work, *args, **kwargs)

    return await call_or_leave(factory(), whole)
