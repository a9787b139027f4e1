"""The HTTP engine: requests in any pieces, answers in order, and what is refused."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping

import h11
import pytest
from amqp_rt_servicebus.admin_http import (
    BODY_MAX,
    HEAD_MAX,
    IDLE_S,
    OUTPUT_MAX,
    PIPELINED_MAX,
    HttpEngine,
)
from amqp_rt_servicebus.administration import Response
from amqp_rt_servicebus.testing import ServiceBus
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.req("Z19")


def echo(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
    """Answer with the request itself."""
    answer = {"method": method, "target": target, "headers": dict(headers), "body": body.hex()}
    return Response(200, {"content-type": "application/json"}, json.dumps(answer).encode())


def answers(data: bytes, *methods: str) -> list[tuple[int, dict[str, str], bytes]]:
    """Parse answers to requests of *methods*: statuses, headers and bodies."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 22)
    client.receive_data(data)
    found = []
    for number, method in enumerate(methods):
        if number:
            client.start_next_cycle()
        client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        head = client.next_event()
        while isinstance(head, h11.InformationalResponse):
            found.append((head.status_code, {}, b""))
            head = client.next_event()
        assert isinstance(head, h11.Response)
        body = b""
        while isinstance(event := client.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        headers = {name.decode(): value.decode() for name, value in head.headers}
        found.append((head.status_code, headers, body))
    assert client.trailing_data[0] == b""
    return found


def exchange(data: bytes, *methods: str) -> list[tuple[int, dict[str, str], bytes]]:
    engine = HttpEngine(echo, 0)
    engine.receive(data, 0)
    return answers(engine.take(), *methods)


GET = b"GET /q?a=1 HTTP/1.1\r\nHost: h:1\r\n\r\n"
CHUNKED = (
    b"PUT /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
)
BOTH = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
SIZED = b"PUT /s HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"


def test_a_request_reaches_the_handler_whole() -> None:
    (status, headers, body), *_ = exchange(
        b"PUT /s?x=%20 HTTP/1.1\r\nHost: h:1\r\nIf-Match: *\r\nX-A: 1\r\nx-a: 2\r\n"
        b"Content-Length: 3\r\n\r\nabc",
        "PUT",
    )
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body) == {
        "method": "PUT",
        "target": "/s?x=%20",
        "headers": {"host": "h:1", "if-match": "*", "x-a": "1, 2", "content-length": "3"},
        "body": b"abc".hex(),
    }


def test_a_chunked_body_is_joined() -> None:
    ((_, _, body),) = exchange(CHUNKED, "PUT")
    assert bytes.fromhex(json.loads(body)["body"]) == b"abcde"


def test_the_answer_to_head_has_the_headers_of_get_and_no_body() -> None:
    (_, got, _), (_, head, body) = exchange(GET + GET.replace(b"GET", b"HEAD"), "GET", "HEAD")
    assert body == b""
    assert head["content-type"] == got["content-type"]


def test_a_malformed_request_after_head_is_refused_with_a_body() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(GET.replace(b"GET", b"HEAD") + b"nonsense\r\n\r\n", 0)
    _, (status, _, body) = answers(engine.take(), "HEAD", "GET")
    assert (status, engine.closed) == (400, True)
    assert b"malformed" in body


@given(
    requests=st.lists(st.sampled_from([GET, CHUNKED, SIZED]), min_size=1, max_size=4),
    cuts=st.sets(st.integers(0, 600)),
)
def test_pieces_of_any_size_give_the_same_answers_in_order(
    requests: list[bytes], cuts: set[int]
) -> None:
    data = b"".join(requests)
    whole, pieces = HttpEngine(echo, 0), HttpEngine(echo, 0)
    whole.receive(data, 0)
    ends = sorted({each for each in cuts if 0 < each < len(data)} | {len(data)})
    taken, start = b"", 0
    for end in ends:
        pieces.receive(data[start:end], 0)
        taken += pieces.take()
        start = end
    assert taken == whole.take()
    methods = [each.split(b" ", 1)[0].decode() for each in requests]
    targets = [json.loads(body)["target"] for _, _, body in answers(taken, *methods)]
    assert targets == [each.split(b" ", 2)[1].decode() for each in requests]


def test_the_connection_is_kept_unless_the_client_closes_it() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(GET, 0)
    assert not engine.closed
    engine.receive(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 0)
    assert engine.closed
    assert len(answers(engine.take(), "GET", "GET")) == 2


def test_http_1_0_closes_after_the_answer() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(b"GET / HTTP/1.0\r\nHost: h\r\n\r\n", 0)
    assert engine.closed
    assert answers(engine.take(), "GET")[0][0] == 200


def test_a_client_that_closes_its_side_still_gets_its_answer() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(GET, 0)
    engine.receive(b"", 0)
    assert engine.closed
    assert answers(engine.take(), "GET")[0][0] == 200
    engine.receive(GET, 0)  # Nothing is read after the end.
    assert engine.take() == b""


def test_a_client_that_waits_before_its_body_is_told_to_continue() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(
        b"PUT /s HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", 0
    )
    assert engine.take().startswith(b"HTTP/1.1 100 ")
    engine.receive(b"abc", 0)
    assert answers(engine.take(), "PUT")[0][0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"Expect: 100-continue\r\nContent-Length: %d" % (BODY_MAX + 1),
        b"Content-Length: %d" % (BODY_MAX + 1),
        b"Content-Length: 99999999999999999999",
    ],
)
def test_a_body_that_is_announced_too_large_is_refused_unread(head: bytes) -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(b"PUT /s HTTP/1.1\r\nHost: h\r\n" + head + b"\r\n\r\n", 0)
    ((status, headers, body),) = answers(engine.take(), "PUT")
    assert (status, headers["connection"], engine.closed) == (413, "close", True)
    assert b"SubCode=41300. the body has more than 1048576 octets" in body


@pytest.mark.parametrize(("size", "status"), [(BODY_MAX, 200), (BODY_MAX + 1, 413)])
def test_a_chunked_body_is_counted(size: int, status: int) -> None:
    engine = HttpEngine(lambda *_: Response(200), 0)
    engine.receive(b"PUT /s HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", 0)
    chunk = 65_536
    for start in range(0, size, chunk):
        piece = b"x" * min(chunk, size - start)
        engine.receive(b"%x\r\n%s\r\n" % (len(piece), piece), 0)
    engine.receive(b"0\r\n\r\n", 0)
    assert answers(engine.take(), "PUT")[0][0] == status
    assert engine.closed is (status != 200)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA b: c\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 2\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        # Two ways to find the end of a body: a proxy may take the other one (RFC 9112 §6.3).
        (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n" + BOTH, 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n" + BOTH, 400),
        (
            b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\nHost: h\r\n\r\n",
            400,
        ),
        (b"PUT / HTTP/1.0\r\nHost: h\r\n" + BOTH, 400),
        (b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"x" * HEAD_MAX, 431),
    ],
)
def test_a_malformed_request_is_answered_and_the_connection_closed(
    data: bytes, status: int
) -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(data, 0)
    ((found, headers, _),) = answers(engine.take(), "GET")
    assert (found, headers["connection"], engine.closed) == (status, "close", True)


def test_a_request_cut_off_by_the_client_is_refused() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(SIZED[:-1], 0)
    engine.receive(b"", 0)
    assert engine.closed
    assert answers(engine.take(), "GET")[0][0] == 400


@pytest.mark.parametrize("method", [b"CONNECT", b"PATCH"])
def test_other_methods_and_upgrades_are_answered_as_requests(method: bytes) -> None:
    engine = HttpEngine(lambda *_: Response(405), 0)
    engine.receive(method + b" h:1 HTTP/1.1\r\nHost: h\r\nUpgrade: x\r\n\r\n" + GET, 0)
    assert [each[0] for each in answers(engine.take(), "GET", "GET")] == [405, 405]


def test_an_idle_connection_closes_silently_after_its_time() -> None:
    engine = HttpEngine(echo, 5)
    assert engine.deadline == 5 + IDLE_S
    engine.tick(5 + IDLE_S - 0.001)
    assert not engine.closed
    engine.tick(5 + IDLE_S)
    assert (engine.closed, engine.take()) == (True, b"")
    assert engine.deadline == float("inf")


def test_each_answer_begins_the_time_anew() -> None:
    engine = HttpEngine(echo, 0)
    engine.receive(GET, 20)
    engine.tick(IDLE_S)
    assert (engine.closed, engine.deadline) == (False, 20 + IDLE_S)


@pytest.mark.parametrize("begun", [SIZED[:10], SIZED[:-1]])
def test_a_request_that_drips_is_refused_when_its_time_is_over(begun: bytes) -> None:
    engine = HttpEngine(echo, 0)
    for number, octet in enumerate(begun):
        engine.receive(bytes((octet,)), number * 0.1)
    engine.tick(IDLE_S)
    ((status, _, _),) = answers(engine.take(), "GET")
    assert (status, engine.closed) == (408, True)


def test_requests_wait_while_answers_are_not_taken() -> None:
    handled = []

    def large(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        handled.append(target)
        return Response(200, {}, b"x" * (OUTPUT_MAX // 2))

    engine = HttpEngine(large, 0)
    engine.receive(GET * 6, 0)
    assert (len(handled), engine.blocked) == (2, True)
    taken = b""
    while data := engine.take():
        taken += data
    assert len(answers(taken, *["GET"] * 6)) == len(handled) == 6


def test_a_client_that_only_writes_is_closed() -> None:
    engine = HttpEngine(lambda *_: Response(200, {}, b"x" * OUTPUT_MAX), 0)
    engine.receive(GET, 0)
    block = GET * 1000
    for _ in range(PIPELINED_MAX // len(block)):
        engine.receive(block, 0)
    assert not engine.closed
    engine.receive(block, 0)
    assert engine.closed
    taken = engine.take()
    assert [each[0] for each in answers(taken, "GET", "GET")] == [200, 400]


def test_a_failing_handler_is_answered_by_500_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(*_: object) -> Response:
        raise KeyError("a secret")

    engine = HttpEngine(failing, 0)
    with caplog.at_level(logging.ERROR):
        engine.receive(GET + GET, 0)
    found = answers(engine.take(), "GET", "GET")
    assert [each[0] for each in found] == [500, 500]
    assert b"secret" not in found[0][2]
    assert "administration failed: GET /q" in caplog.text


@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
def test_no_bytes_break_the_engine(pieces: list[bytes], valid_first: bool) -> None:
    engine = HttpEngine(echo, 0)
    if valid_first:
        engine.receive(GET, 0)
    for piece in filter(None, pieces):
        engine.receive(piece, 0)
        engine.take()
    engine.receive(b"", 0)
    engine.tick(IDLE_S)
    engine.take()
    assert engine.closed


def test_requests_that_follow_each_other_are_answered_a_few_at_a_time() -> None:
    answered: list[str] = []

    def handle(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        answered.append(target)
        return Response(200)

    engine = HttpEngine(handle, 0.0)
    head = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
    engine.receive(b"".join(head % number for number in range(20)), 0.0)
    assert len(answered) == 8
    assert engine.unread
    calls = 1
    while engine.unread:
        engine.go_on(0.0)
        calls += 1
    assert answered == [f"/{number}" for number in range(20)]
    assert calls == 3
    # One with a body of a few thousand octets takes as long as all of those.
    engine = HttpEngine(handle, 0.0)
    put = b"PUT /q HTTP/1.1\r\nHost: x\r\nContent-Length: 4096\r\n\r\n" + b"x" * 4096
    engine.receive(put * 3, 0.0)
    assert len(answered) == 20 + 1
    engine.go_on(0.0)
    assert len(answered) == 20 + 2


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
    ],
)
def test_nothing_behind_a_request_of_two_lengths_is_answered(lengths: bytes) -> None:
    request = b"PUT /q HTTP/1.1\r\nHost: h\r\n" + lengths + b"\r\n0\r\n\r\n" + GET
    with (
        ServiceBus() as bus,
        socket.create_connection(("127.0.0.1", bus.port), timeout=10) as client,
    ):
        client.sendall(request)
        heard = b""
        while data := client.recv(65_536):
            heard += data
    # The server has closed the connection.
    assert heard.startswith(b"HTTP/1.1 400 ")
    assert heard.count(b"HTTP/1.1 ") == 1
