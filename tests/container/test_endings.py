"""A connection that ends leaves no reference cycles behind.

A connection has buffers, and Python may collect cycles of old objects only long after.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from certificates import certificates
from references import reference

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.errors import AmqpError
from amqp_rt.message import Message
from amqp_rt.net.tls import ClientTls, ServerTls

KNOWN = certificates()
DOORS = ["memory", "amqp", "amqps", "ws", "wss", "amqp+unix"]


pytestmark = pytest.mark.usefixtures("no_collector")


def kept(connection: Connection) -> dict[str, Callable[[], Any]]:
    """The objects of a connection, by what they are."""
    engine: Any = connection.engine
    found = {"connection": reference(connection), "engine": reference(engine)}
    for session in engine.sessions.values():
        found[f"session {session.channel}"] = reference(session)
        for link in session.links.values():
            found[f"link {link.name}"] = reference(link)
            if link.endpoint is not None:
                found[f"endpoint {link.name}"] = reference(link.endpoint)
    return found


async def use(peer: Connection, *, dynamic: bool) -> None:
    """Every kind of link that a client may have, with something on its way on each."""
    out, back = peer.sender("q"), peer.receiver("q", credit=5)
    topic, heard = peer.receiver("t"), peer.sender("t")
    for link in (out, back, topic, heard):
        await link.wait_attached()
    await heard.send("x")
    await peer.sender("log").send("x")
    for _ in range(10):
        await out.send("x" * 1_000)
    await back.receive()
    await peer.call("$management", Message(None, application_properties={"operation": "QUERY"}))
    if dynamic:
        reply = peer.receiver(dynamic=True)
        await reply.wait_attached()
    # Not answered: what is browsed, what is read of a log, and an outcome that no discharge follows.
    first = {"rabbitmq:stream-offset-spec": "first"}
    await peer.receiver("q", mode="copy", credit=2).receive()
    await peer.receiver("log", credit=2, filter=first).receive()
    async with peer.transaction() as transaction:
        await out.send("x", transaction=transaction)
        (await back.receive()).accept(transaction=transaction)
    with suppress(AmqpError):
        await peer.sender("q/$nowhere").wait_attached()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "cut", "by the broker"])
@pytest.mark.parametrize("door", DOORS)
async def test_nothing_of_a_connection_waits_for_the_collector(
    door: str, end: str, tmp_path: Any
) -> None:
    where = {"memory": "b", "amqp+unix": f"{tmp_path}/s"}.get(door, "127.0.0.1:0")
    async with Broker("b", tls=ServerTls(KNOWN.server)) as broker:
        await broker.declare(Queue("q"), Topic("t"), Log("log"))
        (url,) = await broker.listen(f"{door}://{where}")
        refs: dict[str, Callable[[], Any]] = {}

        async def client(*, task_status: trio.TaskStatus[None]) -> None:
            async with (
                Container("c", network=broker.container.network) as container,
                container.connect(url, reconnect=None, tls=ClientTls(KNOWN.ca)) as peer,
            ):
                await use(peer, dynamic=True)
                (connection,) = broker.container.connections
                refs.update(kept(connection))
                if end == "by the broker":
                    connection.close()
                del connection
                task_status.started()
                if end == "cut":
                    await trio.sleep_forever()
                elif end == "by the broker":
                    await peer.wait_closed()

        async with trio.open_nursery() as nursery:
            with suppress(AmqpError):
                await nursery.start(client)
            if end == "cut":
                nursery.cancel_scope.cancel()
        with trio.move_on_after(5):
            while any(each() is not None for each in refs.values()):  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert len(refs) > 10
        assert [name for name, each in refs.items() if each() is not None] == []
