"""Rules of class file that need a store, or all classes of content."""

from __future__ import annotations

from pathlib import Path

import pytest
from files010 import Receiver, send_file
from octets010 import Struct
from served010 import serving
from subscribers010 import World

from amqp_rt.broker.nodes import Queue

pytestmark = pytest.mark.req("D18")


def test_a_queue_takes_content_of_all_classes() -> None:
    world = World("q")
    session = world.client().attach()
    session.done(session.state.transfer("", b"message", key="q", sync=True))
    send_file(session, b"file")
    session.call(
        "stream.publish",
        headers=[Struct("stream-properties", priority=1)],
        body=b"packet",
        routing_key="q",
    )
    assert world.stats("q").available == 3
    receiver = Receiver(session)
    receiver.consume()
    assert [each.body for each in receiver.run()] == [b"file"]
    session.call("stream.consume", queue="q", consumer_tag="c")
    assert session.state.others[-1].body == b"packet"
    session.subscribe("q")
    assert session.bodies() == [b"message"]


async def test_files_outlive_the_broker(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store'}"
    async with serving(store=store) as served, served.client() as client:
        await served.broker.declare(Queue("q"))
        session = await client.session(b"s")
        await session.call("file.open", identifier="f", content_size=4)
        header = [Struct("file-properties", filename="n")]
        await session.call("file.stage", headers=header, body=b"file")
        await session.call("file.publish", routing_key="q", identifier="f")
    async with serving(store=store) as served, served.client() as client:
        await served.broker.declare(Queue("q"))
        session = await client.session(b"s")
        await session.call("file.consume", queue="q", consumer_tag="c")
        others = session.state.others
        await session.until(lambda: others[-1].name == "file.open")
        await session.call("file.open-ok", staged_size=0)
        await session.until(lambda: others[-1].name == "file.deliver")
        assert (others[-2].body, others[-2].headers) == (b"file", header)
