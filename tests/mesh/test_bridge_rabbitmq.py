"""A bridge to RabbitMQ 3.10 with its AMQP 1.0 plug-in, as Debian installs it."""

from __future__ import annotations

import pytest
import trio
from foreign_brokers import foreign_broker
from meshed import client, members, until

from amqp_rt import Modify, connect
from amqp_rt.mesh import Bridge, Pull, Push
from amqp_rt.mesh.bridging import LOOPS_MAX
from amqp_rt.message import Message
from amqp_rt.values import Symbol

VIA = Symbol("x-opt-mesh-via")
OWN = Symbol("x-opt-own")


@pytest.mark.req("P6")
@pytest.mark.slow
@pytest.mark.foreign
async def test_messages_cross_between_a_mesh_and_rabbitmq() -> None:
    with foreign_broker("rabbitmq") as running:
        url = f"amqp://guest:guest@127.0.0.1:{running.port}"
        pull, push = Pull("/queue/new", to="new"), Push("done", to="/queue/done")
        bridge = Bridge("rabbit", url, pull=[pull], push=[push], links="rabbit/*")
        async with members() as made:
            got: list[Message] = []
            box = await made.start("A")

            @box.node("new", slots=1, prefetch=0)
            async def new(message: Message) -> None:
                got.append(message)
                if [each.body for each in got] == ["in"]:
                    raise Modify("not yet")

            await made.start("B", "A", bridges=[bridge])
            await made.meshes["A"].reachable("done")
            async with client(made.urls["A"]) as peer:
                async with peer.sender("done") as out:
                    await out.send(Message("out", message_annotations={OWN: "x"}))
                # Links lead to any address of the broker.
                async with peer.receiver("rabbit//queue/done") as done:
                    pushed = await done.receive()
                    pushed.accept()
                assert pushed.body == "out"
                assert pushed.message.message_annotations == {OWN: "x", VIA: ["mesh"]}

            async with connect(url) as there, there.sender("/queue/new") as out:
                await out.send(Message("in", message_annotations={OWN: "x"}))
                # RabbitMQ would end the session at "modified", which it does not know: the message is released.
                await until(lambda: len(got) == 2)
                assert [each.body for each in got] == ["in", "in"]
                assert got[1].message_annotations == {OWN: "x"}

                # RabbitMQ offers a message that has been here again at once, and is given a pause.
                await out.send(Message("ours", message_annotations={VIA: ["mesh"]}))

                def refused() -> int:
                    return made.meshes["B"].stats().bridges_refused["rabbit"]

                await until(lambda: refused() >= LOOPS_MAX)
                async with there.receiver("/queue/new") as other:
                    ours = await other.receive()
                    ours.accept()
                count = refused()
                await trio.sleep(0.5)
                assert refused() == count < 2 * LOOPS_MAX
                assert ours.body == "ours"
                assert len(got) == 2
