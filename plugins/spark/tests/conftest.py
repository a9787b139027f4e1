"""A broker in a thread of its own, and other fixtures for the tests of the plug-in."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler
from amqp_rt_spark import connections
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.java import NoJava, java_home, session
from amqp_rt_spark.outlets import Outlet
from hypothesis import HealthCheck, settings

from amqp_rt import Message, sync
from amqp_rt.broker import Log, Queue
from amqp_rt.limits import Limits
from amqp_rt.net import carrier

# As in the tests of the runtime, whose configuration does not apply when these run alone.
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
    """A listening broker, with methods for tests."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        (self.url,) = broker.listen("amqp://127.0.0.1:0")
        self.endpoint = Endpoint(self.url, timeout_s=30)

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
        return list(connections.wire(self.endpoint).browse(queue))


def spark_is_missing() -> str:
    """Return the reason why Spark cannot be started here; an empty text if it can."""
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


@pytest.fixture(scope="session", autouse=True)
def logs_keep_their_form() -> Iterator[None]:
    """Stop Spark from giving pytest's handler a format of its own, which all later tests of the process would get.

    pytest adds the handler of `caplog` to loggers that do not propagate, and Spark's format whatever is added.
    """
    try:
        from pyspark.logger import PySparkLogger
    except ImportError:
        yield
        return
    add = PySparkLogger.addHandler

    def keeping(self: Any, handler: logging.Handler) -> None:
        formatter = handler.formatter
        add(self, handler)
        if isinstance(handler, LogCaptureHandler):
            handler.setFormatter(formatter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PySparkLogger, "addHandler", keeping)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long tests in short runs, as in the tests of the runtime."""
    if os.environ.get("AMQP_RT_LONG") == "1":
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark") and (reason := spark_is_missing()):
        if os.environ.get("CI") == "true" and os.environ.get("AMQP_RT_EXPECT") != "compiled":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


#: The optimizing compiler and a parallel collector take half of the time of a short-lived JVM.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

#: Settings of sessions in tests: small, quiet, and on this machine only.
CONF = {
    "spark.driver.defaultJavaOptions": JAVA_OPTIONS,
    "spark.executor.defaultJavaOptions": JAVA_OPTIONS,
    # Spark Connect, where a test starts it, takes a free port.
    "spark.connect.grpc.binding.port": "0",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    # Of a few rows each: compiling a query, and 50 tasks for the log of a table, take longer than the query.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "OFF",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session of Spark that all tests share."""
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
    """Whether this is a long run, with time for thorough tests."""
    return os.environ.get("AMQP_RT_LONG") == "1"


@pytest.fixture(scope="session", autouse=True)
def _brokers_end_quickly() -> Iterator[None]:
    """Shorten the time for which a broker keeps a closed connection whose peer does not close it.

    Spark's workers do not: each test with Spark would end a second later.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrier, "_LINGER_S", 0.05)
        yield


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    # Spark's workers keep their connections and do not answer a close.
    # Few records fit a batch, so that readers meet the end of one often.
    limits = Limits(close_grace_s=0.2, log_batch_bytes_max=400)
    with sync.Broker(limits=limits, store=f"sqlite:{tmp_path / 'broker.db'}") as broker:
        broker.declare(
            Queue("in"), Queue("out"), Log("log", partitions=2), Log("one", partitions=1)
        )
        found = Served(broker)
        yield found
        connections.forget(found.endpoint)


class BrokerProcess:
    """A broker in a process of its own, whose store and address survive restarts.

    Args:
        folder: Folder of its store.
        nodes: Names of queues, and of logs with the numbers of their partitions.
    """

    PROGRAM = """
import signal, sys, threading
from amqp_rt import sync
from amqp_rt.broker import Log, Queue
from amqp_rt.limits import Limits

port, store, nodes = sys.argv[1:]
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
limits = Limits(close_grace_s=0.2, log_batch_bytes_max=400)
with sync.Broker(limits=limits, store="sqlite:" + store) as broker:
    broker.declare(
        *(Log(name, partitions=int(parts)) if parts else Queue(name)
        for name, _, parts in (node.partition(":") for node in nodes.split()))
    )
    broker.listen("amqp://127.0.0.1:" + port)
    print("ready", flush=True)
    stopped.wait()
"""

    def __init__(self, folder: Path, nodes: str = "in out log:2 one:1") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self._nodes = nodes
        self._store = str(folder / "broker.db")
        self.url = f"amqp://127.0.0.1:{self._port}"
        self.endpoint = Endpoint(self.url)
        self.starts = 0
        self._process = self._start()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def restart(self, number: signal.Signals, away_s: float = 0.0) -> None:
        """End the process by a signal, and start another one without waiting until it is ready."""
        self._end(number)
        time.sleep(away_s)
        self._process = self._start()

    def send(self, address: str, *bodies: Any) -> None:
        there = connections.wire(self.endpoint)
        out = Outlet(there, address, timeout_s=30)
        for body in bodies:
            out.send(Message(body, durable=True, message_id=f"message {body}").encode())
        out.finish()

    def bodies(self, queue: str) -> list[Any]:
        found = connections.retried(self.endpoint, lambda there: list(there.browse(queue)))
        return [message.body for message in found]

    def close(self) -> None:
        self._end(signal.SIGKILL)
        connections.forget(self.endpoint)

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        return subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, self._port, self._store, self._nodes],
            stdout=subprocess.PIPE,
        )

    def _end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def broker_process(tmp_path: Path) -> Iterator[BrokerProcess]:
    found = BrokerProcess(tmp_path)
    yield found
    found.close()


@pytest.fixture
def broker_process_with(tmp_path: Path) -> Iterator[Callable[[str], BrokerProcess]]:
    """Return a function that starts a broker in a process of its own, with the given nodes."""
    with contextlib.ExitStack() as open_here:

        def start(nodes: str) -> BrokerProcess:
            found = BrokerProcess(tmp_path, nodes)
            open_here.callback(found.close)
            return found

        yield start


class Relay:
    """A relay between clients and a broker, whose connections can be cut.

    Args:
        port: Port of the broker.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"amqp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._trigger: tuple[bytes, bool] | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all connections."""
        self.cuts += 1
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                _reset(each)

    def cut_at(self, words: bytes, *, heard: bool) -> None:
        """Cut once, when a client sends *words*: with *heard* after forwarding them, so only the answer is lost."""
        self._trigger = words, heard

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            broker = socket.create_connection(("127.0.0.1", self._port))
            self._pairs.append((client, broker))
            for ends, up in (((client, broker), True), ((broker, client), False)):
                threading.Thread(target=self._carry, args=(*ends, up), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65_536):
                trigger = self._trigger
                if up and trigger is not None and trigger[0] in data:
                    self._trigger = None
                    if not trigger[1]:
                        self.cut()
                        return
                    # The answer has no client to go to.
                    self.cuts += 1
                    _reset(source)
                    sink.sendall(data)
                    return
                sink.sendall(data)
        except OSError:
            pass
        _reset(source)
        _reset(sink)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Without lingering, the other end gets a reset, and data on its way is dropped.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@pytest.fixture
def relay(served: Served) -> Iterator[Relay]:
    found = Relay(int(served.url.rpartition(":")[2]))
    yield found
    found.close()
    connections.forget(Endpoint(found.url))
