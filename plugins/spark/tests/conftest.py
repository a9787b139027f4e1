"""A broker in a thread of its own, as the tests of the plug-in use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import wire
from amqp_rt_spark.java import NoJava, java_home, session
from hypothesis import HealthCheck, settings

from amqp_rt import Message, sync
from amqp_rt.broker import Log, Queue
from amqp_rt.limits import Limits

# As in the tests of the runtime, whose settings are not read when these are run alone.
settings.register_profile(
    "plug-in",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
if os.environ.get("AMQP_RT_LONG") != "1":
    settings.load_profile("plug-in")


class Served:
    """A broker that listens, and what tests do to it."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        (self.url,) = broker.listen("amqp://127.0.0.1:0")
        self.endpoint = wire.Endpoint(self.url, timeout_s=30)

    def send(self, address: str, *messages: Any, **properties: Any) -> None:
        with self.broker.local() as peer, peer.sender(address) as out:
            for message in messages:
                if isinstance(message, Message):
                    out.send(message)
                else:
                    out.send(message, **properties)

    def bodies(self, queue: str) -> list[Any]:
        return [message.body for message in self.messages(queue)]

    def messages(self, queue: str) -> list[Message]:
        return list(wire.wire(self.endpoint).browse(queue))


def spark_is_missing() -> str:
    """Why Spark cannot be started here; an empty text if it can."""
    if os.environ.get("AMQP_RT_EXPECT") == "compiled":
        return "Spark runs with the editable tree"
    try:
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401 - only whether it is there
    except ImportError:
        return "pyspark is not installed (make .venv/spark)"
    try:
        java_home()
    except NoJava as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark") and (reason := spark_is_missing()):
        if os.environ.get("CI") == "true" and os.environ.get("AMQP_RT_EXPECT") != "compiled":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


#: Settings of the sessions of tests: small, quiet, and nowhere but here.
CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "OFF",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one session of Spark of all tests."""
    folder = tmp_path_factory.mktemp("spark")
    conf = {"spark.sql.warehouse.dir": str(folder), "spark.local.dir": str(folder)}
    found = session("local[2,2]", conf={**CONF, **conf})
    yield found
    found.stop()


@pytest.fixture
def spark_conf() -> dict[str, str]:
    return CONF


@pytest.fixture
def long_run_here() -> bool:
    """Whether this is a long run, which has the time to be thorough."""
    return os.environ.get("AMQP_RT_LONG") == "1"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    # Workers of Spark keep their connections, and are not there to answer a close.
    limits = Limits(close_grace_s=0.2)
    with sync.Broker(limits=limits, store=f"sqlite:{tmp_path / 'broker.db'}") as broker:
        broker.declare(
            Queue("in"), Queue("out"), Log("log", partitions=2), Log("one", partitions=1)
        )
        found = Served(broker)
        yield found
        wire.forget(found.endpoint)
