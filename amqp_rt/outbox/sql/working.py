"""Sessions of SQLAlchemy, used from trio and from asyncio: in threads, or in the event loop of asyncio.

SQLAlchemy has two kinds of sessions. Those that block are used in worker threads, and work everywhere. Those of
``sqlalchemy.ext.asyncio`` need an event loop of asyncio: a container of :mod:`amqp_rt.aio` runs trio as a guest of
one, in the same thread. Their work is done by a task of asyncio, for which the task of trio waits.

All work is written once, as functions of a session that blocks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import anyio.to_thread
from anyio import CancelScope
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
    """Call *work* with *session* as :func:`call` does, and commit its transaction."""
    return await call(session, _work_and_commit, work, *args, **kwargs)


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
    """Open a session, and close it at the end of the block, which rolls back what is not committed."""
    session = factory()
    try:
        yield session
    finally:
        with CancelScope(shield=True):
            await call(session, Session.close)


async def in_transaction(
    factory: Factory,
    work: Callable[Concatenate[Session, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call *work* in a transaction of its own, and commit it.

    It does not wait for the event loop meanwhile, which may be blocked by a commit of the application: SQLite lets only one
    transaction write.
    """

    def whole(session: Session) -> T:
        with session:
            return _work_and_commit(session, work, *args, **kwargs)

    return await call(factory(), whole)
