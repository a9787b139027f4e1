"""Bridges of a mesh to brokers outside: our own broker as the outside, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from meshed import Members, client, members, until

from amqp_rt import Broker, Container, Modify, Reject, Release
from amqp_rt.broker import Queue
from amqp_rt.container.recovery import Reconnect
from amqp_rt.errors import LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.mesh import Bridge, Mesh, Pull, Push
from amqp_rt.message import Message
from amqp_rt.values import Symbol

pytestmark = [pytest.mark.req("P6"), pytest.mark.slow]

QUEUES = (Queue("new"), Queue("done"), Queue("raw"))
VIA = Symbol("x-opt-mesh-via")


def bridge(url: str, **options: object) -> Bridge:
    made: dict[str, object] = {
        "pull": [Pull("new", to="new")],
        "push": [Push("done", to="done")],
        "links": "rabbit/*",
        "reconnect": Reconnect(first_delay_s=0.05, delay_max_s=0.1),
        **options,
    }
    return Bridge("rabbit", url, **made)  # type: ignore[arg-type]


@asynccontextmanager
async def outside(*queues: Queue) -> AsyncIterator[tuple[Broker, str]]:
    """Run a broker that is no member."""
    async with Broker(name="outside") as broker:
        await broker.declare(*(queues or QUEUES))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        yield broker, url


def kept(broker: Broker, queue: str) -> int:
    """Return the number of messages of a queue outside, delivered ones included."""
    stats = broker.stats(queue)
    return stats.available + stats.acquired


@asynccontextmanager
async def bridged(url: str, **options: object) -> AsyncIterator[Members]:
    """Run A, where clients and nodes are, and B, which has the bridge."""
    async with members() as made:
        await made.start("A")
        await made.start("B", "A", bridges=[bridge(url, **options)])
        yield made


async def test_messages_are_pulled_and_pushed() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        got: list[str] = []

        @made.boxes["A"].node("new")
        async def new(text: str) -> None:
            got.append(text)

        async with broker.local() as there:
            async with there.sender("new") as out:
                await out.send("in")
            await until(lambda: got == ["in"])
            await made.meshes["A"].reachable("done")
            async with client(made.urls["A"]) as peer, peer.sender("done") as out:
                await out.send("out")
            async with there.receiver("done") as done:
                pushed = await done.receive()
                pushed.accept()
            assert pushed.body == "out"
            assert pushed.message.message_annotations[VIA] == ["mesh"]
        assert made.meshes["B"].stats().bridges == {"rabbit": 1}


async def test_outcomes_are_those_of_the_mesh() -> None:
    """Nothing is accepted outside before the destination has; other outcomes arrive as they are."""
    queues = (
        Queue("new", dead_letter="dead", max_deliveries=2),
        Queue("dead"),
        *QUEUES[1:],
    )
    async with outside(*queues) as (broker, url), bridged(url) as made:
        seen: list[str] = []
        go_on = trio.Event()

        @made.boxes["A"].node("new", slots=1, prefetch=0)
        async def new(text: str) -> None:
            seen.append(text)
            if text == "slow":
                await go_on.wait()
            elif text == "bad":
                raise Reject("it is wrong", condition="app:wrong")
            elif text == "fails":
                raise RuntimeError

        async with broker.local() as there, there.sender("new") as out:
            await out.send("slow")
            await until(lambda: seen == ["slow"])
            # The node has one slot, so that the others stay outside, where the first is not settled.
            await out.send("bad")
            await out.send("fails")
            await trio.sleep(0.1)
            assert kept(broker, "new") == 3
            assert broker.stats("new").acquired == 1
            go_on.set()
            async with there.receiver("dead") as dead:
                found = {}
                for _ in range(2):
                    letter = await dead.receive()
                    found[letter.body] = letter.message.message_annotations
                    letter.accept()
            assert set(found) == {"bad", "fails"}
            assert "it is wrong" in str(found["bad"])
            assert seen.count("fails") == 2
            await until(lambda: not kept(broker, "new"))


async def test_nothing_is_pulled_without_a_destination() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        await until(lambda: made.meshes["B"].stats().bridges["rabbit"])
        async with broker.local() as there, there.sender("new") as out:
            await out.send("one")
            await trio.sleep(0.3)
            assert broker.stats("new").acquired == 0
            got: list[str] = []

            @made.boxes["A"].node("new")
            async def new(text: str) -> None:
                got.append(text)

            await until(lambda: got == ["one"])
            made.boxes["A"].remove("new")
            await until(lambda: not made.meshes["B"].instances("new"))
            await out.send("two")
            await trio.sleep(0.3)
            assert broker.stats("new").acquired == 0
            assert kept(broker, "new") == 1


async def test_credit_to_push_is_that_of_the_broker() -> None:
    queues = (Queue("done", length_max=2), *QUEUES[::2])
    async with outside(*queues) as (broker, url), bridged(url) as made:
        await made.meshes["A"].reachable("done")
        async with client(made.urls["A"]) as peer, peer.sender("done") as out:
            await out.send("1")
            await out.send("2")
            with trio.move_on_after(0.3) as full:
                await out.send("3")
            assert full.cancelled_caught
            assert kept(broker, "done") == 2


async def test_a_message_that_comes_back_is_refused() -> None:
    queues = (Queue("new", dead_letter="dead"), Queue("dead"), *QUEUES[1:])
    async with outside(*queues) as (broker, url), bridged(url) as made:
        got: list[str] = []

        @made.boxes["A"].node("new")
        async def new(text: str) -> None:
            got.append(text)

        async with broker.local() as there, there.sender("new") as out:
            for body, via in (
                ("ours", ["other", "mesh"]),
                ("far", ["one", "other"]),
                ("near", ["other"]),
            ):
                await out.send(Message(body, message_annotations={VIA: via}))
            await until(lambda: got == ["near"])
            async with there.receiver("dead") as dead:
                letter = await dead.receive()
                letter.accept()
            assert letter.body == "far"
            # It has been in this mesh: it stays for other consumers, and is not offered to the bridge again.
            async with there.receiver("new") as other:
                again = await other.receive()
                again.accept()
            assert again.body == "ours"
        assert made.meshes["B"].stats().bridges_refused == {"rabbit": 2}


async def test_a_broker_that_is_down_is_not_offered() -> None:
    async with bridged("amqp://127.0.0.1:1", within=0.2) as made:
        assert made.meshes["B"].stats().bridges == {"rabbit": 0}
        async with client(made.urls["A"]) as peer:
            with pytest.raises(LinkRefused, match="no destination"):
                async with peer.sender("done"):
                    pass


async def test_an_address_that_the_broker_refuses_is_refused_with_its_error() -> None:
    async with outside(Queue("new")) as (_, url), bridged(url) as made:
        await made.meshes["A"].reachable("done")
        async with client(made.urls["A"]) as peer:
            for address in ("done", "rabbit/absent"):
                with pytest.raises(LinkRefused) as refused:
                    async with peer.sender(address):
                        pass
                assert refused.value.condition == "amqp:not-found"


async def test_large_messages_pass_in_pieces() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        got: list[bytes] = []

        @made.boxes["A"].node("new")
        async def new(data: bytes) -> None:
            got.append(data)

        body = bytes(range(256)) * 2_000
        async with broker.local() as there:
            async with there.sender("new") as out:
                await out.send(body)
            await until(lambda: got == [body])
            await made.meshes["A"].reachable("done")
            async with client(made.urls["A"]) as peer, peer.sender("done") as out:
                await out.send(Message(body, message_annotations={VIA: ["other"]}))
            async with there.receiver("done") as done:
                pushed = await done.receive()
                pushed.accept()
            assert pushed.body == body
            assert pushed.message.message_annotations[VIA] == ["other", "mesh"]


async def test_links_lead_outside_with_filters_and_drain() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        await made.meshes["A"].reachable("rabbit/raw")
        async with client(made.urls["A"]) as peer:
            async with peer.sender("rabbit/raw") as out:
                for colour in ("red", "blue"):
                    await out.send(Message(colour, application_properties={"colour": colour}))
            async with peer.receiver("rabbit/raw", selector="colour = 'blue'") as blue:
                one = await blue.receive()
                one.accept()
                assert one.body == "blue"
                assert one.message.message_annotations[VIA] == ["mesh"]
                await blue.drain()
                assert blue.link.credit == 0
            assert kept(broker, "raw") == 1


async def test_the_broker_may_not_attach_here() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        await until(lambda: made.meshes["B"].stats().bridges["rabbit"])
        (there,) = [each for each in broker.container.connections if each.peer.container_id == "B"]
        with pytest.raises(LinkRefused, match="bridge"):
            async with there.sender("anything"):
                pass


async def test_mesh_bridge_sessions_max() -> None:
    limits = Limits(mesh_bridge_sessions_max=2)
    async with outside() as (_, url), members() as made:
        await made.start("B", bridges=[bridge(url)], box_options={"limits": limits})
        await made.meshes["B"].reachable("rabbit/raw")
        async with client(made.urls["B"]) as peer, peer.session() as one, peer.session() as two:
            async with one.sender("rabbit/raw"), two.sender("rabbit/raw"), one.sender("rabbit/raw"):
                with pytest.raises(LinkRefused) as refused:
                    async with peer.sender("rabbit/raw"):
                        pass
                assert refused.value.condition == "amqp:resource-limit-exceeded"
            two.end()
            await trio.sleep(0.2)
            async with peer.sender("rabbit/raw") as out:
                await out.send("one")


async def test_a_bridge_that_leaves_loses_and_doubles_nothing() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        got: list[str] = []

        @made.boxes["A"].node("new", slots=4, prefetch=0)
        async def new(text: str) -> None:
            await trio.sleep(0.01)
            got.append(text)

        async with broker.local() as there, there.sender("new") as out:
            for number in range(200):
                await out.send(str(number))
            await until(lambda: len(got) > 20)
            made.boxes["B"].stop()
            await made.ended["B"].wait()
            left = kept(broker, "new")
            assert 0 < left == 200 - len(got)
            await made.start("C", "A", bridges=[bridge(url)])
            await until(lambda: len(got) == 200)
            assert sorted(got, key=int) == [str(each) for each in range(200)]


class Given(Exception):
    """Raised by a test to roll a transaction back."""


@pytest.mark.parametrize("node", ["A", "B"])
async def test_transactions_are_those_of_the_broker(node: str) -> None:
    async with outside() as (broker, url), bridged(url) as made:
        await made.meshes[node].reachable("rabbit/raw")
        async with client(made.urls[node]) as peer, peer.sender("rabbit/raw") as out:
            async with peer.transaction() as txn:
                await out.send("kept", transaction=txn)
            try:
                async with peer.transaction() as txn:
                    await out.send("dropped", transaction=txn)
                    raise Given
            except Given:
                pass
            assert kept(broker, "raw") == 1


async def test_links_of_two_clients_have_different_names_outside() -> None:
    async with outside() as (broker, url), bridged(url) as made:
        await made.meshes["A"].reachable("rabbit/raw")
        async with client(made.urls["A"], "one") as one, client(made.urls["B"], "two") as two:
            async with (
                one.sender("rabbit/raw", name="same") as first,
                two.sender("rabbit/raw", name="same") as second,
            ):
                await first.send("1")
                await second.send("2")
                await first.send("3")
            assert kept(broker, "raw") == 3


URL = "amqp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"name": ""}, "has a name"),
        ({"name": "a/b"}, "has a name"),
        ({"pull": [], "push": [], "links": ""}, "nothing to do"),
        ({"hops_max": -1}, "at least 0, got -1"),
        ({"links": "rabbit"}, "ends in '/\\*'"),
        ({"links": "ra*bit/*"}, "ends in '/\\*'"),
        ({"links": "/*"}, "needs a name"),
        ({"links": "$mesh/*"}, "reserved"),
        ({"pull": [Pull("new", to="")]}, "is empty"),
        ({"push": [Push("done", to="")]}, "is empty"),
        ({"push": [Push("$management", to="done")]}, "reserved"),
        ({"pull": [Pull("new", to="a"), Pull("new", to="b")]}, "'new' is pulled twice"),
        ({"push": [Push("done", to="a"), Push("done", to="b")]}, "'done' is pushed twice"),
        ({"push": [Push("done", to="new")]}, "'new' outside is both"),
        ({"push": [Push("orders", to="done")], "pull": [Pull("new", to="orders")]}, "'orders' in"),
        ({"push": [Push("rabbit/done", to="done")]}, "below 'rabbit/\\*'"),
    ],
)
def test_mistakes_in_a_bridge(options: dict[str, Any], wrong: str) -> None:
    made = {"name": "rabbit", "pull": [Pull("new", to="new")], "links": "rabbit/*", **options}
    with pytest.raises(ValueError, match=wrong):
        Bridge(made.pop("name"), URL, **made)


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        ({"name": "same", "links": "a/*"}, {"name": "same", "links": "b/*"}, "the name 'same'"),
        ({"push": [Push("done", to="a")]}, {"push": [Push("done", to="b")]}, "links to 'done'"),
        ({"push": [Push("a/done", to="a")]}, {"links": "a/*"}, "links to 'a/done'"),
        ({"links": "a/*"}, {"push": [Push("a/done", to="a")]}, "links to 'a/done'"),
        ({"links": "a/*"}, {"links": "a/b/*"}, "both take links"),
    ],
)
def test_bridges_that_overlap(one: dict[str, Any], other: dict[str, Any], wrong: str) -> None:
    made = [
        Bridge(each.pop("name", name), URL, **each)
        for name, each in (("one", dict(one)), ("other", dict(other)))
    ]
    with pytest.raises(ValueError, match=wrong):
        Mesh(Container("box"), bridges=made)


def test_options_of_a_bridge_are_those_of_connect() -> None:
    for option in ("on_state", "spelled"):
        with pytest.raises(TypeError, match=f"no option '{option}'"):
            Bridge("rabbit", URL, links="rabbit/*", **{option: None})


async def test_settled_messages_are_pulled() -> None:
    async with (
        outside() as (broker, url),
        bridged(url, pull=[Pull("new", to="new", settled=True)]) as made,
    ):
        got: list[str] = []
        go_on = trio.Event()

        @made.boxes["A"].node("new")
        async def new(text: str) -> None:
            await go_on.wait()
            got.append(text)

        async with broker.local() as there, there.sender("new") as out:
            for number in range(3):
                await out.send(str(number))
            # The queue has let them go before they were handled.
            await until(lambda: not kept(broker, "new"))
            assert not got
            go_on.set()
            await until(lambda: len(got) == 3)
            assert sorted(got) == ["0", "1", "2"]


async def test_outcomes_cross_as_they_are() -> None:
    """The broker's queue sees what the handler said, with its annotations."""
    async with outside() as (broker, url), bridged(url) as made:
        seen: list[Message] = []
        outcomes: list[Exception | None] = [
            Release(),
            Modify(annotations={Symbol("x-opt-why"): "later"}),
            None,
        ]

        @made.boxes["A"].node("new", slots=1, prefetch=0)
        async def new(message: Message) -> None:
            seen.append(message)
            if (outcome := outcomes[len(seen) - 1]) is not None:
                raise outcome

        async with broker.local() as there, there.sender("new") as out:
            await out.send("one")
            await until(lambda: len(seen) == 3)
            await until(lambda: not kept(broker, "new"))
        counts = [each.delivery_count for each in seen]
        assert counts == [0, 0, 1]
        why = [each.message_annotations.get(Symbol("x-opt-why")) for each in seen]
        assert why == [None, None, "later"]


@pytest.mark.req("P4")
@pytest.mark.parametrize("role", ["edge", "auto"])
async def test_an_edge_has_no_bridges(role: Any) -> None:
    """With the role auto, a container that listens on loopback is an edge."""
    bridge = Bridge("rabbit", URL, links="rabbit/*")
    async with Container("box") as box:
        await box.listen("amqp://127.0.0.1:0")
        with pytest.raises(ValueError, match="bridge 'rabbit': an edge has no bridges"):
            async with Mesh(box, role=role, bridges=[bridge]):
                pass
        async with Mesh(box, role="interior", bridges=[bridge]) as mesh:
            assert mesh.stats().bridges == {"rabbit": 0}


async def test_more_sessions_of_clients_lead_outside_than_one_client_may_have() -> None:
    """Each has one on the member's connection to itself, too."""
    async with outside() as (broker, url), bridged(url) as made, AsyncExitStack() as stack:
        await made.meshes["B"].reachable("rabbit/raw")
        for name in ("one", "two"):
            peer = await stack.enter_async_context(client(made.urls["B"], name))
            for _ in range(35):
                session = await stack.enter_async_context(peer.session())
                out = await stack.enter_async_context(session.sender("rabbit/raw"))
                await out.send("x")
        assert kept(broker, "raw") == 70
