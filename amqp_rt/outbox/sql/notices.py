"""Notices of PostgreSQL (LISTEN and NOTIFY), by which a commit in any process wakes the relays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from ...container.loops import in_asyncio
from .working import close_in_thread, in_thread


async def wait_for_notices(
    engine: Engine, channel: str, wake: Callable[[], None], *, in_loop: bool
) -> None:
    """Call *wake* once when listening, and at each notice on *channel*, until the connection to the database ends.

    Returns at once where the driver cannot be waited for: psycopg can, the versions 2 and 3, and version 3 under asyncio.
    Cancelling ends it.

    Args:
        engine: The database; one connection of its pool is used.
        channel: Name of the channel.
        wake: Called under trio.
        in_loop: Whether the engine is that of an ``AsyncEngine``, whose connections need asyncio.
    """
    if engine.dialect.name != "postgresql":
        return
    if in_loop:
        await in_asyncio(lambda: _listen_in_loop(engine, channel, wake), "notices need asyncio")
    else:
        await _listen(engine, channel, wake)


def _listening(connection: Connection, channel: str) -> Any:
    """Listen with *connection*, which is not used for anything else, and return that of the driver."""
    quoted = connection.dialect.identifier_preparer.quote(channel)
    # No text(), in which a colon begins a parameter.
    connection.exec_driver_sql(f"LISTEN {quoted}")
    # Takes effect with the commit.
    connection.commit()
    driver = connection.connection.driver_connection
    # Closed at the end, not given back to the pool.
    connection.detach()
    return driver


async def _listen(engine: Engine, channel: str, wake: Callable[[], None]) -> None:
    made: list[Connection] = []

    def listen() -> Any:
        made.append(engine.connect())
        return _listening(made[0], channel)

    def close() -> None:
        for connection in made:
            connection.close()

    left: list[bool] = []
    try:
        driver = await in_thread(listen, leave=lambda: left.append(True), close=close)
        read = _reader(driver)
        if read is None:
            return
        wake()
        while not driver.closed:
            await trio.lowlevel.wait_readable(driver.fileno())
            if read():
                wake()
    except DBAPIError:
        raise
    except Exception as error:
        # The driver's own errors, when the connection is lost.
        if isinstance(error, engine.dialect.loaded_dbapi.Error):
            return
        raise
    finally:
        if not left:
            await close_in_thread(close)


def _reader(driver: Any) -> Callable[[], bool] | None:
    """Return a function that reads what has arrived, and returns whether there were notices; None if there is none."""
    if hasattr(driver, "pgconn"):

        def read() -> bool:
            driver.pgconn.consume_input()
            found = False
            while driver.pgconn.notifies() is not None:
                found = True
            return found

        return read
    if hasattr(driver, "poll") and hasattr(driver, "notifies"):

        def poll() -> bool:
            driver.poll()
            found = bool(driver.notifies)
            driver.notifies.clear()
            return found

        return poll
    return None


async def _listen_in_loop(engine: Engine, channel: str, wake: Callable[[], None]) -> None:
    async with AsyncEngine(engine).connect() as connection:
        driver = await connection.run_sync(_listening, channel)
        if not hasattr(driver, "notifies"):
            return
        wake()
        with suppress(engine.dialect.loaded_dbapi.Error):
            async for _ in driver.notifies():
                wake()
