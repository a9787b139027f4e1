"""Operations of AMQP 0-10 for the security matrix: each way to make a message move, and each declaration.

``tests/security/test_security_matrix.py`` has the users, their rights and the broker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import trio
from client010 import Attached, Client, connected
from octets010 import Struct
from protocol010 import CREDIT, EXPLICIT, NOT_ACQUIRED, Failed, Login, xid

from amqp_rt.errors import AmqpError
from amqp_rt.net.tls import ClientTls, client_layer, encrypt

Step = Callable[[Attached], Awaitable[Any]]
Operation = Callable[[Any], Awaitable[Any]]

#: Numbers of branches. A branch that fails is known for a while after its session, so that each is a new one.
NUMBERS = count()
#: What a refusal is called in the matrix.
CONDITIONS = {403: "amqp:unauthorized-access"}


@asynccontextmanager
async def holder010(url: str, user: str, tls: ClientTls | None) -> AsyncIterator[Client | None]:
    """Connect *user*, whose password is ``pw``; over TLS if the URL says so.

    None if the user may not open the virtual host, which is the refusal of all operations there.

    Args:
        url: That of the listener.
        user: Name of the user.
        tls: How to judge the broker's certificate.
    """
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    stream: trio.abc.Stream = await trio.open_tcp_stream(host, int(port))
    if scheme == "amqps":
        assert tls is not None
        stream = await encrypt(stream, client_layer(tls, host), within=5)
    async with AsyncExitStack() as stack:
        client: Client | None = None
        try:
            login = Login.plain(user, "pw")
            client = await stack.enter_async_context(connected(stream, login=login))
        except Failed as refused:
            if refused.code != 402:
                raise
        yield client


def on_session(step: Step, *, fails: int | None = None) -> Operation:
    """Return *step* on a session of its own; a refusal raises an error with the name that the matrix has for it.

    Where rights suffice, *step* may fail with the code *fails*.
    """

    async def run(client: Client | None) -> None:
        if client is None:
            raise AmqpError("the virtual host is refused", condition=CONDITIONS[403])
        session = await client.session(b"matrix")
        try:
            await step(session)
            await session.sync()
        except Failed as error:
            if error.code is not None and error.code == fails:
                return
            name = CONDITIONS.get(error.code or 0, f"error code {error.code}")
            raise AmqpError(str(error), condition=name) from error
        finally:
            # A session that failed has been detached by the broker.
            if session.state.detached is None:
                await session.detach()

    return run


def calling(name: str, /, *, fails: int | None = None, **fields: Any) -> Operation:
    """Return the call of one command, which may fail with the code *fails* where rights suffice."""
    return on_session(lambda session: session.call(name, **fields), fails=fails)


def publishing(destination: str = "", key: str = "q", *, select: str = "") -> Operation:
    """Return the transfer of a message, in a transaction or a branch if *select* is its class."""

    async def publish(session: Attached) -> None:
        if select:
            await session.call(f"{select}.select")
        branch = xid(b"%d" % next(NUMBERS))
        if select == "dtx":
            await session.call("dtx.start", xid=branch)
        session.transfer(destination, b"x", key=key, accept_mode=None)
        if select == "tx":
            await session.call("tx.commit")
        if select == "dtx":
            await session.call("dtx.end", xid=branch)
            await session.call("dtx.commit", xid=branch, one_phase=True)

    return on_session(publish)


async def publish_in_fragments(session: Attached) -> None:
    for last in (False, True):
        session.send(
            "message.transfer",
            destination="",
            headers=[
                Struct("delivery-properties", **{"routing-key": "q"}),
                Struct("fragment-properties", first=not last, last=last),
            ],
            body=b"x",
        )
    await session.sync()


async def resume(session: Attached) -> None:
    """Move a message in fragments, of which the first went to an exchange that leads nowhere, to another exchange."""
    session.send(
        "message.transfer",
        destination="",
        headers=[
            Struct(
                "delivery-properties",
                **{"routing-key": "q", "resume-id": "matrix", "resume-ttl": 1},
            ),
            Struct("fragment-properties", first=True, last=False),
        ],
        body=b"x",
    )
    await session.call("message.resume", destination="amq.fanout", resume_id="matrix")
    session.send(
        "message.transfer",
        destination="amq.fanout",
        headers=[Struct("fragment-properties", last=True)],
        body=b"x",
    )
    await session.sync()


def subscribing(queue: str = "q", *, select: str = "") -> Operation:
    """Return the receipt of a message, which is accepted; in a transaction or a branch if *select* is its class."""

    async def consume(session: Attached) -> None:
        if select:
            await session.call(f"{select}.select")
        branch = xid(b"%d" % next(NUMBERS))
        if select == "dtx":
            await session.call("dtx.start", xid=branch)
        await session.subscribe(queue, "d", accept_mode=EXPLICIT, flow_mode=CREDIT, messages=1)
        message = await session.message()
        assert message.id is not None
        await session.done(session.accept(message.id))
        if select == "tx":
            await session.call("tx.commit")
        if select == "dtx":
            await session.call("dtx.end", xid=branch)
            await session.call("dtx.commit", xid=branch, one_phase=True)

    return on_session(consume)


async def browse(session: Attached) -> None:
    await session.subscribe("q", "d", acquire_mode=NOT_ACQUIRED, flow_mode=CREDIT, messages=1)
    await session.message()


async def acquire(session: Attached) -> None:
    await session.subscribe("q", "d", acquire_mode=NOT_ACQUIRED, flow_mode=CREDIT, messages=1)
    message = await session.message()
    result = await session.call("message.acquire", transfers=[(message.id, message.id)])
    assert result is not None
    assert result.transfers == [(message.id, message.id)]


OPERATIONS: dict[str, Operation] = {
    "declare q": calling("queue.declare", queue="q"),
    "declare q passively": calling("queue.declare", queue="q", passive=True),
    "declare passively what is not there": calling("queue.declare", queue="nowhere", passive=True),
    "declare another queue": calling("queue.declare", queue="mine"),
    "declare an exchange": calling("exchange.declare", exchange="mine", type="fanout"),
    "declare an exchange of others passively": calling(
        "exchange.declare", exchange="amq.fanout", passive=True
    ),
    "bind q to an exchange of others": calling("exchange.bind", queue="q", exchange="amq.fanout"),
    "unbind q from an exchange of others": calling(
        "exchange.unbind", queue="q", exchange="amq.fanout"
    ),
    "purge q": calling("queue.purge", queue="q"),
    "delete q": calling("queue.delete", queue="q"),
    "delete a queue that is not there": calling("queue.delete", queue="nowhere"),
    "delete an exchange that is not there": calling("exchange.delete", exchange="nowhere"),
    "query q": calling("queue.query", queue="q"),
    "query a queue that is not there": calling("queue.query", queue="nowhere"),
    "query an exchange of others": calling("exchange.query", name="amq.fanout"),
    "ask for the bindings of q": calling("exchange.bound", queue="q", binding_key="q"),
    "ask for the bindings of an exchange of others": calling(
        "exchange.bound", exchange="amq.fanout"
    ),
    "publish to q": publishing(),
    "publish to q in fragments": on_session(publish_in_fragments),
    "publish to an exchange of others": publishing("amq.fanout"),
    "resume a message to an exchange of others": on_session(resume),
    "publish to q in a transaction": publishing(select="tx"),
    "publish to q in a branch": publishing(select="dtx"),
    "ask for transactions": calling("tx.select"),
    "ask for distributed transactions": calling("dtx.select"),
    "ask for prepared branches": calling("dtx.recover"),
    "subscribe to q": subscribing(),
    "subscribe to q in a transaction": subscribing(select="tx"),
    "subscribe to q in a branch": subscribing(select="dtx"),
    "browse q": on_session(browse),
    "acquire a message of q": on_session(acquire),
    "declare an alias of q passively": calling("queue.declare", queue="alias", passive=True),
    "query an alias of q": calling("queue.query", queue="alias"),
    "purge an alias of q": calling("queue.purge", queue="alias"),
    "publish to an alias of q": publishing(key="alias"),
    "subscribe to an alias of q": subscribing("alias"),
}
PASSAGES: dict[str, Operation] = {
    "declare a queue with the alternate exchange q": calling(
        "queue.declare", queue="new", alternate_exchange="q"
    ),
    "declare an exchange with the alternate exchange q": calling(
        "exchange.declare", exchange="new", type="fanout", alternate_exchange="q"
    ),
    "bind mine to the exchange q": calling("exchange.bind", queue="mine", exchange="q"),
    "bind q to the exchange mine": calling("exchange.bind", queue="q", exchange="mine"),
    "unbind q from the exchange mine": calling(
        "exchange.unbind", fails=404, queue="q", exchange="mine"
    ),
}
