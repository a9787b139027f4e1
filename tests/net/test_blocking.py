"""The engines in a plain thread, over plain sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import certificates
from wire import OPEN, frame

from amqp_rt import sync
from amqp_rt.addresses import parse_url
from amqp_rt.broker.nodes import Queue
from amqp_rt.clock import SystemClock
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import Open
from amqp_rt.errors import ConnectFailed, ConnectionLost, DeadlineExceeded
from amqp_rt.events import AttachRequested, Event, LoginRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import Limits
from amqp_rt.net.blocking import BlockingConnection, connect_blocking, dial_blocking
from amqp_rt.net.tls import ClientTls, ServerTls
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.security.mechanisms import Anonymous, Plain
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

CLOCK = SystemClock()
DATA = b"\0Su\xb0"


def client_engine(**options: Any) -> Any:
    return amqp10.client(amqp10.ClientOptions(container_id="client", **options), CLOCK.monotonic())


class Server(threading.Thread):
    """Accepts one connection and serves it on the same driver: settles whatever comes, sends
    three messages to whoever asks, lets bob in."""

    def __init__(self, listener: socket.socket, **options: Any) -> None:
        super().__init__(daemon=True)
        self.listener = listener
        self.options = {"container_id": "server", "sasl_required": False} | options
        self.inbox = Recorder(settle=ACCEPTED, credit=100)
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            sock, _ = self.listener.accept()
            engine = amqp10.Front().server(ServerOptions(**self.options), CLOCK.monotonic())
            connection = BlockingConnection(sock, engine, self.handle)
            try:
                connection.run_until(lambda: connection.over, timeout_s=30)
            finally:
                connection.drop()
        except BaseException as error:
            self.fault = error

    def handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AttachRequested):
                link = event.link
                link.accept(self.inbox if hasattr(link, "grant") else Three())
            elif isinstance(event, LoginRequested):
                if event.response == b"\0bob\0pw":
                    self.handle(event.exchange.succeed("bob"))
                else:
                    event.exchange.fail()


class Three(Recorder):
    def on_credit(self, link: Any) -> None:
        while link.credit and len(self.credits) < 3:
            self.credits.append(link.credit)
            link.send(DATA + b"\0\0\0\1" + bytes([len(self.credits)]))


@contextmanager
def serving(**options: Any) -> Iterator[tuple[socket.socket, Server]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener, **options)
        server.start()
        port = listener.getsockname()[1]
        yield dial_blocking(parse_url(f"amqp://127.0.0.1:{port}")), server
        server.join(30)
        assert server.fault is None


@pytest.mark.req("L1")
def test_send_and_receive_without_an_event_loop() -> None:
    with serving() as (sock, server), BlockingConnection(sock, client_engine()) as connection:
        session = connection.engine.begin()
        out, inbox = Recorder(), Recorder(settle=ACCEPTED)
        sender = session.attach_sender("out", out, target=Target(address="q"))
        receiver = session.attach_receiver("in", inbox, source=Source(address="q"))
        connection.run_until(lambda: sender.credit and receiver.attached, timeout_s=10)

        large = bytes(3_000_000)
        deliveries = [
            sender.send(DATA + len(body).to_bytes(4, "big") + body)
            for body in [b"a", b"b" * 1_000, large]
        ]
        receiver.grant(10)
        connection.run_until(lambda: all(each.settled for each in deliveries), timeout_s=30)
        assert [each.state for each in deliveries] == [ACCEPTED] * 3
        connection.run_until(lambda: len(inbox.deliveries) == 3, timeout_s=10)
        assert [each.payload[-1] for each in inbox.deliveries] == [1, 2, 3]
    assert [len(each.payload) for each in server.inbox.deliveries] == [9, 1_008, 3_000_008]
    assert connection.over
    assert connection.error is None


KNOWN = certificates()


@pytest.mark.req("L1", "SE7")
@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_tls_without_an_event_loop(version: Any) -> None:
    """The broker runs in a thread of its own, the client in this one."""
    with sync.Broker(tls=ServerTls(KNOWN.server, minimum=version)) as broker:
        broker.declare(Queue("q"))
        (url,) = broker.listen("amqps://127.0.0.1:0")
        where = parse_url(url)
        engine = client_engine(mechanisms=(Anonymous(),))
        tls = ClientTls(KNOWN.ca)
        with connect_blocking(where, engine, tls=tls) as connection:
            connection.run_until(lambda: engine.open_received, timeout_s=10)
            session = connection.engine.begin()
            out, inbox = Recorder(), Recorder(settle=ACCEPTED)
            sender = session.attach_sender("out", out, target=Target(address="q"))
            receiver = session.attach_receiver("in", inbox, source=Source(address="q"))
            connection.run_until(lambda: sender.credit and receiver.attached, timeout_s=10)
            large = DATA + (2_000_000).to_bytes(4, "big") + bytes(2_000_000)
            deliveries = [sender.send(large) for _ in range(3)]
            receiver.grant(3)
            connection.run_until(lambda: all(each.settled for each in deliveries), timeout_s=30)
            connection.run_until(lambda: len(inbox.deliveries) == 3, timeout_s=30)
            assert {each.payload[-len(large) :] for each in inbox.deliveries} == {large}
        assert connection.error is None
        with pytest.raises(ConnectFailed, match=f"cannot connect to {url}: .*not believed"):
            connect_blocking(where, client_engine())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = parse_url(f"amqps://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ConnectFailed, match=r"timed out|too long"):
            connect_blocking(where, client_engine(), timeout_s=0.1)


@pytest.mark.req("L1", "SE2")
def test_a_login() -> None:
    with serving(sasl_required=True, mechanisms=("PLAIN",)) as (sock, _):
        events: list[Event] = []
        engine = client_engine(mechanisms=(Plain("bob", "pw"),))
        with BlockingConnection(sock, engine, events.extend) as connection:
            connection.run_until(lambda: engine.open_received, timeout_s=10)
        assert [type(event) for event in events][:1] == [Opened]


@pytest.mark.req("L1", "SE2")
def test_a_failed_login_is_a_lost_connection_with_the_reason() -> None:
    with serving(sasl_required=True, mechanisms=("PLAIN",)) as (sock, _):
        engine = client_engine(mechanisms=(Plain("bob", "wrong"),))
        connection = BlockingConnection(sock, engine)
        with pytest.raises(ConnectionLost, match="did not accept the login") as it:
            connection.run_until(lambda: engine.open_received, timeout_s=10)
        assert it.value.condition == "amqp:unauthorized-access"
        connection.drop()


@pytest.mark.req("L1")
def test_what_does_not_come_in_time_is_said_and_the_connection_goes_on() -> None:
    with serving() as (sock, _), BlockingConnection(sock, client_engine()) as connection:
        connection.run_until(lambda: connection.engine.open_received, timeout_s=10)
        with pytest.raises(DeadlineExceeded):
            connection.run_until(lambda: False, timeout_s=0.01)
        assert not connection.over


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.req("L1", "L3")
def test_a_peer_that_vanishes_is_a_lost_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    connection = BlockingConnection(ours, client_engine())
    theirs.close()
    with pytest.raises(ConnectionLost):
        connection.run_until(lambda: False, timeout_s=10)
    connection.drop()


@pytest.mark.req("L1", "L3")
def test_a_silent_peer_does_not_hold_up_the_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.sendall(AMQP_HEADER + OPEN)
    connection = BlockingConnection(ours, client_engine())
    connection.run_until(lambda: connection.engine.open_received, timeout_s=10)
    connection.close(grace_s=0.05)
    assert connection.over


@pytest.mark.req("L1", "L3")
def test_heartbeats_leave_while_it_runs(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=200)))
    connection = BlockingConnection(ours, client_engine())
    connection.run_until(lambda: connection.engine.open_received, timeout_s=10)
    connection.flush(timeout_s=10)
    theirs.recv(65_536)
    theirs.settimeout(10)
    connection.run_for(0.3)
    assert theirs.recv(8) == b"\0\0\0\x08\x02\0\0\0"
    connection.drop()


@pytest.mark.req("L1", "L3")
def test_a_peer_that_does_not_read_is_dropped(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(AMQP_HEADER + OPEN)
    connection = BlockingConnection(ours, client_engine(), limits=Limits(write_stall_s=0.05))
    connection.run_until(lambda: connection.engine.open_received, timeout_s=10)
    for _ in range(100):
        connection.engine.write_bytes(bytes(100_000))
    with pytest.raises(DeadlineExceeded):
        connection.flush(timeout_s=0.001)
    with pytest.raises(ConnectionLost, match="has not read for"):
        connection.flush(timeout_s=10)
    connection.drop()


def test_a_fault_of_the_program_is_raised(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(AMQP_HEADER + OPEN)

    def handle(events: list[Event]) -> None:
        raise ZeroDivisionError

    connection = BlockingConnection(ours, client_engine(), handle)
    with pytest.raises(ZeroDivisionError):
        connection.run_until(lambda: False, timeout_s=10)
    assert connection.over
    connection.drop()


def test_leaving_the_block_by_an_error_drops_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    connection = BlockingConnection(ours, client_engine())
    with pytest.raises(KeyError), connection:
        raise KeyError
    assert connection.over
    while theirs.recv(65_536):
        pass


@pytest.mark.req("L3")
def test_dialling_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with dial_blocking(parse_url(f"amqp+unix://{path}")) as sock:
            assert sock.getpeername() == path


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("amqp://127.0.0.1:1", "nothing listens there"),
        ("amqp://no-such-host.invalid", "the host's name is not known"),
        ("amqp+unix:///no/such/file", "there is no such file or folder"),
        ("amqps://127.0.0.1:1", "nothing listens there"),
        (
            "wss://127.0.0.1",
            "without an event loop there are amqp://, amqps:// and amqp.unix:// only",
        ),
        ("memory://x", "memory is for event loops only"),
    ],
)
def test_why_not_is_one_sentence(url: str, why: str) -> None:
    with pytest.raises(ConnectFailed, match=f"cannot connect to .*: {why}"):
        dial_blocking(parse_url(url))


def test_importing_it_imports_no_event_loop() -> None:
    program = (
        "import sys, amqp_rt.net.blocking, amqp_rt.fronts.amqp10, amqp_rt.security.mechanisms\n"
        "print(*({'trio', 'anyio', 'asyncio'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr
