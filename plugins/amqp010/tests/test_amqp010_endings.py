"""What a connection leaves behind: nothing that waits for the collector of cycles.

A connection has buffers, and a broker may go on for long before Python looks for cycles in what is old.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from amqp_rt_amqp010.limits import EXPIRING_TURN, LOST_TURN
from protocol010 import Login, Session
from references import no_collector, reference  # noqa: F401 (a fixture)
from worlds010 import Client, World

from amqp_rt.fronts import Error

pytestmark = pytest.mark.usefixtures("no_collector")


def declares(client: Client, session: Session) -> None:
    client.run(session, "queue.declare", queue="q")
    client.run(session, "queue.declare", queue="mine", exclusive=True, auto_delete=True)
    client.run(session, "exchange.declare", exchange="e", type="topic")
    client.run(session, "exchange.bind", exchange="e", queue="q", binding_key="#")


def publishes(client: Client, session: Session) -> None:
    declares(client, session)
    session.transfer("", b"x" * 1000, key="q")
    session.transfer("e", b"x" * 1000, key="any")
    session.transfer("", b"x", key="nowhere")
    client.pump()


def publishes_half(client: Client, session: Session) -> None:
    """Leave a message incomplete."""
    declares(client, session)
    session.transfer("", b"x" * 100_000, key="q")
    client.feed(b"".join(client.wire.take()[:-1]))


def subscribes(client: Client, session: Session) -> None:
    """Hold messages, some of them settled, some of a subscription that is cancelled."""
    publishes(client, session)
    for name in ("a", "b"):
        client.run(session, "message.subscribe", queue="q", destination=name, accept_mode=0)
        client.run(session, "message.flow", destination=name, unit=1, value=0xFFFF_FFFF)
        client.run(session, "message.flow", destination=name, unit=0, value=1)
    first = session.messages[0]
    session.accept(first.id)
    client.run(session, "message.cancel", destination="b")
    client.run(session, "message.flow", destination="a", unit=0, value=10)


def transacts(client: Client, session: Session) -> None:
    declares(client, session)
    client.run(session, "tx.select")
    session.transfer("", b"x", key="q")
    client.pump()


def fails(client: Client, session: Session) -> None:
    """End a session by a fault, and leave its detach unanswered."""
    client.reads = False
    session.send("queue.delete", queue="nowhere")
    client.pump()


def waits_for_rights(client: Client, session: Session) -> None:
    """Leave requests for links without an answer."""
    declares(client, session)
    client.holds = []
    session.send("message.subscribe", queue="q", destination="d")
    client.pump()
    assert client.holds
    client.holds = None


def attaches_many(client: Client, session: Session) -> None:
    for number in range(5):
        client.session(b"%d" % number, timeout=number)


USES = [
    declares,
    publishes,
    publishes_half,
    subscribes,
    transacts,
    fails,
    waits_for_rights,
    attaches_many,
]


def closes(client: Client) -> None:
    client.say("connection.close", reply_code=200)


def is_closed(client: Client) -> None:
    client.engine.close(Error("amqp:connection:forced", "restart"))
    client.pump()
    if not client.reads:
        client.say("connection.close-ok")


def vanishes(client: Client) -> None:
    client.lose()


def breaks_a_rule(client: Client) -> None:
    client.feed(b"\xff" * 12)
    if not client.engine.finished:
        client.lose()


@pytest.mark.parametrize("use", USES, ids=lambda use: str(use.__name__))
@pytest.mark.parametrize("end", [closes, is_closed, vanishes, breaks_a_rule])
@pytest.mark.parametrize("kept", [0, 60])
def test_nothing_is_left_of_a_connection(
    use: Callable[[Client, Session], None], end: Callable[[Client], None], kept: int
) -> None:
    world = World()
    client = world.connect()
    session = client.session(timeout=kept)
    handler = client.engine.sessions[session.channel]._handler
    use(client, session)
    end(client)
    assert client.engine.finished
    left = reference(client.engine)
    handlers = reference(handler)
    del client, handler, session
    assert left() is None
    # The session may wait for its client.
    world.pass_time(kept)
    assert handlers() is None


def test_very_many_sessions_of_a_lost_connection_end_in_steps() -> None:
    world = World()
    client = world.connect()
    count = LOST_TURN + 3 * EXPIRING_TURN
    handlers = []
    for number in range(count):
        session = client.session(b"%d" % number, timeout=0)
        handlers.append(client.engine.sessions[session.channel]._handler)
        client.run(session, "queue.declare", queue=f"q{number}", exclusive=True, auto_delete=True)
    space = world.host.space()
    client.lose()
    left = reference(client.engine)
    parts = [reference(each) for each in handlers]
    del client, session, handlers
    assert left() is None
    assert [each() is None for each in parts].count(True) == LOST_TURN
    assert not space.has(f"q{LOST_TURN - 1}")
    assert space.has(f"q{LOST_TURN}")
    # One whose client comes back ends before the new one begins.
    again = world.connect()
    latest = again.session(b"%d" % (count - 1), timeout=0)
    assert not space.has(f"q{count - 1}")
    again.run(latest, "queue.declare", queue=f"q{count - 1}", exclusive=True)
    world.pass_time(0)
    assert [each() is None for each in parts].count(True) == LOST_TURN + EXPIRING_TURN + 1
    while world.front.deadline <= world.now:
        world.pass_time(0)
    assert all(each() is None for each in parts)
    assert [space.has(f"q{number}") for number in range(count)].count(True) == 1


def test_nothing_is_left_of_a_login() -> None:
    world = World()
    client = world.connect(
        opened=False, wire={"login": Login.plain("a", "b")}, mechanisms=("PLAIN",)
    )
    client.lets_in = False
    client.wire.start()
    client.pump()
    client.lose()
    left = reference(client.engine)
    del client
    assert left() is None
