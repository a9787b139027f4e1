"""Connections to the container itself, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio
from msgspec import Struct

from ..errors import AuthenticationFailed, ConnectFailed, ConnectionLost
from ..events import Certificate
from ..fronts.amqp10 import ClientMechanism, client
from ..limits import Limits
from ..net.driver import run_connection
from ..net.memory import memory_stream_pair
from .connections import Connection
from .recovery import client_options, closing_grace

if TYPE_CHECKING:
    from .container import Container


class Visitor(Struct, frozen=True, kw_only=True):
    """User of another protocol, such as HTTP, for whom a connection is opened: it logs in as every peer does."""

    #: Mechanisms with the user's credentials, best first; without any there is no SASL layer.
    mechanisms: tuple[ClientMechanism, ...]
    #: The user's address, for logs, limits and the back-off of failed logins.
    address: str
    #: Container-id that operators see.
    container_id: str
    #: Whether the other protocol runs over TLS, and the certificate that the user has presented there.
    secure: bool = False
    certificate: Certificate | None = None


@asynccontextmanager
async def local(
    container: Container,
    virtual_host: str = "",
    *,
    visitor: Visitor | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[Connection]:
    """Connect to *container* itself, without a socket; leaving the block closes the connection.

    Engines, states, credit and errors are the same as over a network. If cancelled while
    connecting, nothing remains.

    Args:
        container: The container.
        virtual_host: Its virtual host.
        visitor: Who connects: a user with the rights, limits and delays of a connection over the network. None
            for the process itself, which is trusted.
        limits: Limits of our end, whose ``channel_max`` holds for both; by default the container's.

    Raises:
        AuthenticationFailed: The login of *visitor* failed.
        ConnectFailed: The connection of *visitor* was refused for another reason.
    """
    ours, theirs = memory_stream_pair()
    connection = Connection(container, dialled=True)
    options = client_options(container, limits or container.limits)
    options.hostname = virtual_host or None
    if visitor is not None:
        options.mechanisms = visitor.mechanisms
        options.container_id = visitor.container_id
    engine = client(options, trio.current_time())
    engine.peer.address = "local"
    engine.peer.virtual_host = virtual_host
    connection.start(engine)
    scope = trio.CancelScope()
    stopped = trio.Event()
    left = trio.Event()

    async def run() -> None:
        try:
            with scope:
                await run_connection(ours, engine, connection.handle, limits=container.limits)
        finally:
            connection.lose(connection.lost_error())
            stopped.set()

    accepting = partial(container.entry.accept, theirs)
    if visitor is None:
        accepting = partial(accepting, address="local", trusted=True)
    else:
        accepting = partial(
            accepting,
            address=visitor.address,
            secure=visitor.secure,
            certificate=visitor.certificate,
        )

    async def accept() -> None:
        try:
            await accepting()
        finally:
            left.set()

    container.start_connection(accept)
    container.start_connection(run)
    hasty = True
    try:
        try:
            await connection.wait_open()
        except ConnectionLost as error:
            if visitor is None:
                raise
            raise _refused(connection, error) from None
        yield connection
        hasty = False
    finally:
        try:
            with closing_grace(hasty=hasty):
                await connection.aclose()
        finally:
            scope.cancel()
            with trio.CancelScope(shield=True):
                await stopped.wait()
                await left.wait()


def _refused(connection: Connection, error: ConnectionLost) -> ConnectFailed:
    """Return the error for a visitor whose connection ended with *error* before it was open."""
    ended = connection.ended_with
    why = error.description if ended is None else ended.description or str(ended.condition)
    kind = ConnectFailed
    if error.condition == "amqp:unauthorized-access" and not connection.stood:
        kind = AuthenticationFailed
    return kind(why, condition=error.condition, info=error.info)
