"""The broker beside a test: foreign clients at its port, and how it begins and ends."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from amqp_rt import Container
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.errors import AmqpError
from amqp_rt.testing import LoopbackBroker

PEERS = Path(__file__).parent.parent / "peers"


def foreign(command: list[str], program: str, role: str, **options: Any) -> dict[str, Any]:
    """What a program of tests/peers says at its end."""
    run = subprocess.run(
        [*command, str(PEERS / program), role, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    last: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return last


@pytest.fixture(
    params=[
        pytest.param("proton", marks=pytest.mark.peer("proton")),
        pytest.param("rhea", marks=pytest.mark.peer("rhea")),
    ]
)
def client(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    command = request.getfixturevalue(request.param)
    program = {"proton": "proton_peer.py", "rhea": "rhea_peer.js"}[request.param]
    return lambda role, **options: foreign(command, program, role, **options)


@pytest.mark.req("A21", "P7")
def test_foreign_clients(amqp_broker: LoopbackBroker, client: Callable[..., Any]) -> None:
    work = amqp_broker.declare("work")
    assert client("send", port=amqp_broker.port, address="work", count=3)["sent"] == 3
    assert [message.body for message in work.messages] == [0, 1, 2]
    assert client("receive", port=amqp_broker.port, address="work", count=3)["received"] == 3
    work.wait_empty()


@pytest.mark.req("A21")
@pytest.mark.peer("proton")
def test_a_foreign_client_in_the_same_process(amqp_broker: LoopbackBroker) -> None:
    utils = pytest.importorskip("proton.utils")
    proton = pytest.importorskip("proton")
    work = amqp_broker.declare("work")
    connection = utils.BlockingConnection(amqp_broker.url)
    try:
        connection.create_sender("work").send(proton.Message(body="from proton"))
        (message,) = work.wait_for(1)
        assert message.body == "from proton"
        receiver = connection.create_receiver("work", credit=1)
        assert receiver.receive(timeout=20).body == "from proton"
        assert work.unsettled == 1
        receiver.accept()
        receiver.close()  # proton writes when it is called next
        work.wait_empty()
    finally:
        connection.close()


@pytest.mark.req("A22")
@pytest.mark.peer("proton")
def test_a_foreign_client_waits_in_real_time(
    amqp_broker: LoopbackBroker, proton: list[str]
) -> None:
    """It waits for a message that a day's delay keeps back, and is there to get it."""
    work = amqp_broker.declare(Queue("work"))
    work.send("tomorrow", message_annotations={"x-opt-delivery-delay": 86_400_000})
    assert (work.count, work.delayed) == (0, 1)
    found: list[dict[str, Any]] = []

    def receive() -> None:
        found.append(foreign(proton, "proton_peer.py", "receive", port=amqp_broker.port, address="work", count=1))  # fmt: skip

    thread = threading.Thread(target=receive)
    thread.start()
    work.wait_consumers()
    amqp_broker.advance(86_401)
    thread.join()
    assert found[0]["received"] == 1
    work.wait_empty()


@pytest.mark.req("A21")
def test_subscriptions_of_a_topic_are_looked_at(amqp_broker: LoopbackBroker) -> None:
    amqp_broker.declare(Topic("news"))
    news = amqp_broker.topic("news")
    assert news.subscriptions == []

    async def subscribe() -> None:
        async with (
            Container("anne") as us,
            us.connect(amqp_broker.url) as peer,
            peer.receiver("news", name="all", credit=0) as everything,
            peer.sender("news") as out,
        ):
            mine = peer.receiver("news", name="mine", durable=2, credit=1)
            await mine.wait_attached()
            await everything.wait_attached()
            for n in range(3):
                await out.send(n)
            first = await mine.receive()
            assert [each.name for each in news.subscriptions] == ["all", "mine"]
            assert news.subscription("mine").unsettled == 1
            assert news.subscription("mine").count == 2
            assert [m.body for m in news.subscription("all", container="anne").wait_for(3)] == [
                *range(3)
            ]
            first.accept()
            await mine.suspend()

    trio.run(subscribe)
    (mine,) = news.subscriptions
    assert (mine.name, mine.container, mine.stats.kept) == ("mine", "anne", True)
    assert [message.body for message in mine.messages] == [1, 2]
    assert mine.consumers == 0
    with pytest.raises(AssertionError, match=r"no 3 messages at 'mine'.*it has 2 messages"):
        mine.wait_for(3, timeout_s=0.01)
    with pytest.raises(AmqpError, match="'news' has no subscriptions 'other'; there are: 'mine'"):
        _ = news.subscription("other").messages
    amqp_broker.declare("work")
    with pytest.raises(AmqpError, match="not a topic"):
        _ = amqp_broker.topic("work").subscriptions
    assert news.producers == 0


@pytest.mark.req("A21")
def test_records_of_a_log_are_looked_at(amqp_broker: LoopbackBroker) -> None:
    amqp_broker.declare(Log("clicks", partitions=2))
    clicks = amqp_broker.log("clicks")
    assert (clicks.messages, clicks.count) == ([], 0)
    for n in range(4):
        clicks.send(n)
    assert sorted(message.body for message in clicks.wait_for(4)) == [*range(4)]
    one = amqp_broker.log("clicks/partitions/1")
    assert [message.body for message in one.wait_for(2)] == [1, 3]
    assert one.count == 2
    with pytest.raises(AssertionError, match=r"no 5 messages at 'clicks'.*it has 4 records"):
        clicks.wait_for(5, timeout_s=0.01)


def test_it_runs_within_its_block_only() -> None:
    broker = LoopbackBroker()
    with pytest.raises(RuntimeError, match="use it in `with`"):
        _ = broker.url
    with broker:
        work = broker.declare("work")
        assert broker.url in repr(broker)
        assert repr(work) == "<QueueHandle 'work'>"
    for late in (lambda: broker.url, lambda: work.count, lambda: broker.declare("x")):
        with pytest.raises(RuntimeError, match="does not run"):
            late()
    with pytest.raises(RuntimeError, match="make another"):
        broker.__enter__()


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "such" / "folder"
    with pytest.raises(Exception, match=r"cannot|no such|unable"), LoopbackBroker(store=f"sqlite:{nowhere}/x.db"):  # fmt: skip
        pass
    assert not [t for t in threading.enumerate() if t.name.startswith("amqp_rt loopback")]


def test_what_waits_ends_with_the_broker() -> None:
    said: list[BaseException] = []
    with LoopbackBroker() as broker:
        work = broker.declare("work")
        waits = threading.Event()

        def condition(stats: object) -> bool:
            waits.set()
            return False

        def wait() -> None:
            try:
                work.wait_until(condition, timeout_s=60)
            except RuntimeError as error:
                said.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(20)
    thread.join(20)
    assert [str(error) for error in said] == ["the broker has been stopped"]


def test_its_own_thread_does_not_wait_for_itself(amqp_broker: LoopbackBroker) -> None:
    work = amqp_broker.declare("work")
    with pytest.raises(RuntimeError, match="broker's own thread"):
        work.wait_until(lambda stats: work.count == 0)


def test_declaring(amqp_broker: LoopbackBroker) -> None:
    amqp_broker.declare("work")
    amqp_broker.declare("work")
    with pytest.raises(AmqpError, match="exists as"):
        amqp_broker.declare(Queue("work", priorities=3))
    with pytest.raises(AmqpError, match="queue, topic, log or schedule"):
        amqp_broker.declare("heap:work")
    with pytest.raises(TypeError, match="at least one"):
        amqp_broker.declare()
