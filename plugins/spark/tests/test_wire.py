"""AMQP in plain calls, with a real broker at the other end."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections, wire
from amqp_rt_spark.data_loss import DataLost
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.outlets import Outlet
from amqp_rt_spark.wire import Wire

from amqp_rt import Message, sync
from amqp_rt.broker import Log, Queue
from amqp_rt.errors import AmqpError, DecodeError, DeliveryRejected, LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.values import Symbol

pytestmark = pytest.mark.req("L1")


def offsets(found: Any) -> list[tuple[int, Any]]:
    return [(offset, message.body) for offset, message in found]


def test_a_range_of_a_log_is_read_again_and_again(served: Any) -> None:
    served.send("one", *range(50))
    with Wire(served.endpoint) as it:
        for credit in (1, 2, 7, 1_000):
            assert offsets(it.read("one", 0, 10, 20, credit=credit)) == [
                (number, number) for number in range(10, 20)
            ]
        assert offsets(it.read("one", 0, 50, 50)) == []
        selected = it.read("one", 0, 0, 50, selector="n = 1")
        assert offsets(selected) == []


@pytest.mark.slow
def test_a_record_says_its_number_whatever_else_it_says(served: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"durable": True, "priority": 9},
        {"delivery_annotations": {Symbol("x-d"): 1}},
        {"message_annotations": {Symbol("x-own"): "a"}},
        # As a log would say it, and untrue.
        {"message_annotations": {Symbol("x-opt-offset"): "7", Symbol("x-opt-sequence-number"): 7}},
        {"message_annotations": {Symbol("x-opt-offset"): b"\xa3\x15x-opt-sequence-numberU\x05"}},
        {"message_annotations": {Symbol("x-big"): "y" * 300}},
    ]
    said = [Message(number, **kinds[number % len(kinds)]) for number in range(300)]
    served.send("one", *said)
    with Wire(served.endpoint) as it:
        found = list(it.read("one", 0, 0, 300))
    assert [(offset, message.body) for offset, message in found] == [(n, n) for n in range(300)]
    for offset, message in found:
        assert message.message_annotations["x-opt-sequence-number"] == offset


def test_a_selector_leaves_records_out_and_the_range_still_ends(served: Any) -> None:
    for number in range(30):
        served.send("one", number, application_properties={"n": number % 3})
    with Wire(served.endpoint) as it:
        for credit in (3, 1_000):
            found = offsets(it.read("one", 0, 5, 25, selector="n = 1", credit=credit))
            assert found == [(number, number) for number in range(5, 25) if number % 3 == 1]


def test_another_log_of_that_name_is_not_read(served: Any) -> None:
    served.send("one", "a")
    with Wire(served.endpoint) as it:
        known = it.call("one", "READ")["incarnation"]
        assert offsets(it.read("one", 0, 0, 1, incarnation=known)) == [(0, "a")]
        served.broker.delete("one")
        served.broker.declare(Log("one", partitions=1))
        served.send("one", "b")
        with pytest.raises(DataLost, match="deleted and made again"):
            list(it.read("one", 0, 0, 1, incarnation=known))


def test_what_retention_has_dropped_is_missed() -> None:
    with sync.Broker(limits=Limits(log_bytes_max=200_000)) as broker:
        broker.declare(Log("small", partitions=1))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        with broker.local() as peer, peer.sender("small") as out:
            for _ in range(400):
                out.send(bytes(2_000))
        with Wire(Endpoint(url)) as it:
            (part,) = it.call("small", "READ")["partitions"]
            first, end = part["first"], part["next"]
            assert 0 < first < end
            with pytest.raises(DataLost, match=f"from 0 to {first - 1} are gone"):
                list(it.read("small", 0, 0, end))
            found = [offset for offset, _ in it.read("small", 0, 0, end, may_lose=True)]
            assert found == list(range(first, end))


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("kept", [0, 5])
def test_what_is_gone_up_to_the_end_is_missed_at_once(
    served: Any, kept: int, batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that no other follows: their absence is only to be asked for."""
    monkeypatch.setattr(wire, "_SILENT_S", 0.05)
    served.send("one", *range(20))
    with Wire(served.endpoint) as it:
        it.call("", "PURGE", name="one", type="amqp_rt.log")
        served.send("one", *range(kept))
        given = {"batches": batches}
        # Planned by a broker that has lost what came after its backup.
        with pytest.raises(DataLost, match=f"from {20 + kept} to 29 are gone"):
            list(it.read("one", 0, 20, 30, **given))
        found = [offset for offset, _ in it.read("one", 0, 0, 30, may_lose=True, **given)]
        assert found == list(range(20, 20 + kept))
        # Messages that arrive during the request are read.
        more = it.read("one", 0, 20, 30 + kept, **given)
        served.send("one", *range(30))
        assert [offset for offset, _ in more] == list(range(20, 30 + kept))


@pytest.mark.slow
@pytest.mark.parametrize("credit", [3, 1_000])
@pytest.mark.parametrize("selector", ["", "1 = 1"])
def test_nothing_is_sent_that_is_behind_the_end(served: Any, credit: int, selector: str) -> None:
    served.send("one", *range(100))
    with Wire(served.endpoint) as it:
        for first, end in ((0, 1), (7, 27), (60, 99)):
            found: Any = it.records("one", 0, first, end, credit=credit, selector=selector)
            offsets, *_ = next(found)
            link = found.gi_frame.f_locals["link"]
            begun = link.delivery_count - len(offsets)
            for more, *_ in found:
                offsets += more
            assert offsets == list(range(first, end))
            assert link.delivery_count - begun == end - first


@pytest.mark.slow
def test_batches_hold_what_single_messages_do(served: Any) -> None:
    """Of ranges, whatever they are read with; the place of a record is beside it."""
    own = {Symbol("x-own"): "a", Symbol("x-opt-offset"): "7"}
    said = [
        Message(
            number,
            message_annotations=own if number % 3 == 2 else {},
            application_properties={"n": number % 3},
        )
        for number in range(60)
    ]
    served.send("one", *said)
    with Wire(served.endpoint) as it:
        for selector, credit in (("", 1), ("", 1_000), ("n = 2", 1), ("n = 2", 1_000)):
            for first, end in ((0, 60), (7, 8), (20, 59)):
                how: Any = {"selector": selector, "credit": credit}
                single = list(it.read("one", 0, first, end, **how))
                found: list[tuple[int, Any, Any]] = []
                for offsets, payloads, times in it.records(
                    "one", 0, first, end, batches=True, **how
                ):
                    assert times is not None
                    for offset, time_ms, payload in zip(offsets, times, payloads, strict=True):
                        message = Message.decode(payload)
                        assert message.message_annotations == (own if offset % 3 == 2 else {})
                        found.append((offset, message.bare, time_ms))
                assert found == [
                    (offset, message.bare, message.message_annotations["x-opt-enqueued-time"])
                    for offset, message in single
                ]
                wanted = [n for n in range(first, end) if not selector or n % 3 == 2]
                assert [offset for offset, *_ in found] == wanted


def test_a_broker_that_sends_no_batches_is_read_all_the_same(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amqp_rt.broker.kinds.logs.RECORD_BATCHES", "unknown")
    served.send("one", *range(20))
    with Wire(served.endpoint) as it:
        found = list(it.records("one", 0, 3, 20, batches=True))
    assert [offset for offsets, *_ in found for offset in offsets] == list(range(3, 20))
    assert {times for *_, times in found} == {None}


def test_a_batch_that_is_none_ends_the_reading(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amqp_rt.broker.log.reading.RECORD_HEAD", struct.Struct(">QqIIx"))
    served.send("one", *range(20))
    with Wire(served.endpoint) as it, pytest.raises(DecodeError, match="a batch of records"):
        list(it.records("one", 0, 0, 20, batches=True))


@pytest.mark.slow
def test_few_batches_are_sent_that_are_behind_the_end(served: Any) -> None:
    """The number of records in earlier batches decides how many batches are requested."""
    served.send("one", *(bytes(80) for _ in range(200)))
    with Wire(served.endpoint) as it:
        found: Any = it.records("one", 0, 10, 100, batches=True)
        offsets, *_ = next(found)
        link = found.gi_frame.f_locals["link"]
        sent = link.delivery_count
        for more, *_ in found:
            offsets += more
        assert offsets == list(range(10, 100))
        # There are three records in a batch.
        assert link.delivery_count - sent <= 90 // 3


def test_probing(served: Any) -> None:
    with Wire(served.endpoint) as it:
        assert it.probe("one", 0, "first") is None
        served.send("one", "a", "b")
        assert it.probe("one", 0, "first") == 0
        assert it.probe("one", 0, "last") == 1


def test_browsing_takes_nothing(served: Any) -> None:
    served.send("in", *range(40))
    with Wire(served.endpoint) as it:
        for _ in range(2):
            assert [each.body for each in it.browse("in", credit=7)] == list(range(40))
        assert [each.body for each in it.browse("in", most=5)] == list(range(5))
        assert it.call("in", "READ")["available"] == 40
        # A reader that stops leaves nothing behind.
        found = it.browse("in", credit=3)
        next(found)
        found.close()
        assert [each.body for each in it.browse("in")] == list(range(40))


@pytest.mark.req("K6")
@pytest.mark.parametrize("says", [True, False])
def test_a_queue_that_is_being_filled_has_an_end(
    served: Any, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the broker says how many there are: some do not."""
    if not says:
        monkeypatch.setattr(Wire, "_available", lambda wire, link, inbox: None)
    served.send("in", *range(40))
    found = []
    with Wire(served.endpoint) as it:
        for message in it.browse("in", credit=15):
            found.append(message.body)
            if len(found) % 2:
                served.send("in", "more")
    assert found[:40] == list(range(40))
    # The one that does not say it has had no more once, which was after a while.
    assert len(found) == 40 if says else 40 < len(found) < 90


def test_staging_and_a_commit(served: Any) -> None:
    claimed = {
        "amqp_rt:producer": "job",
        "amqp_rt:run": "one",
        "amqp_rt:epoch": 0,
        "amqp_rt:part": 0,
        "amqp_rt:attempt": 0,
    }
    payloads = [Message(number).encode() for number in range(25)]
    with Wire(served.endpoint) as it:
        out = Outlet(it, "out", properties=claimed, max_in_flight=4, timeout_s=20)
        for payload in payloads:
            out.send(payload)
        out.finish()
        assert (out.count, out.crc) == (25, zlib.crc32(b"".join(payloads)))
        assert list(it.browse("out")) == []
        body = {"producer": "job", "run": "one", "epoch": 0, "parts": [[0, 0, out.count, out.crc]]}
        for published in (True, False):
            assert it.call("out", "COMMIT-EPOCH", body) == {"published": published}
        assert [each.body for each in it.browse("out")] == list(range(25))


@pytest.mark.slow
@pytest.mark.req("K3")
@pytest.mark.parametrize("address", ["out", "one"])
def test_batches_that_are_staged_outlive_the_broker(tmp_path: Path, address: str) -> None:
    """A restarted broker recounts staged messages and publishes them in order, like single ones."""
    said: list[dict[str, Any]] = [{}, {"ttl_ms": 3_600_000}, {"durable": True, "priority": 9}]
    payloads = [Message(number, **said[number // 250 % 3]).encode() for number in range(1_200)]
    payloads[1_100] = Message(bytes(100_000)).encode()
    asked = []
    for begins in (True, False):
        with sync.Broker(store=f"sqlite:{tmp_path / 'b.db'}") as broker:
            broker.declare(Queue("out"), Log("one", partitions=1))
            (url,) = broker.listen("amqp://127.0.0.1:0")
            with Wire(Endpoint(url)) as it:
                for part in (0, 1) if begins else ():
                    claimed = {
                        "amqp_rt:producer": "job",
                        "amqp_rt:run": "one",
                        "amqp_rt:epoch": 0,
                        "amqp_rt:part": part,
                        "amqp_rt:attempt": 0,
                    }
                    out = Outlet(it, address, properties=claimed, timeout_s=20, batches=part == 0)
                    for payload in payloads:
                        out.send(payload)
                    out.finish()
                    asked.append([part, 0, out.count, out.crc])
                if begins:
                    continue
                assert asked[0][2:] == asked[1][2:] == [1_200, zlib.crc32(b"".join(payloads))]
                body = {"producer": "job", "run": "one", "epoch": 0, "parts": asked}
                for published in (True, False):
                    assert it.call(address, "COMMIT-EPOCH", body) == {"published": published}
                if address == "one":
                    found = [message for _, message in it.read("one", 0, 0, 2_400)]
                else:
                    found = list(it.browse("out"))
                # Single messages and those of batches are the same.
                kept = [(message.bare, message.header) for message in found]
                assert [bare for bare, _ in kept] == [
                    Message.decode(each).bare for each in payloads
                ] * 2
                assert [each.priority for _, each in kept[:1_200]] == [
                    each.priority for _, each in kept[1_200:]
                ]


def test_what_is_not_answered_yet_is_bounded_in_bytes(served: Any) -> None:
    sizes = [40_000, 10, 30_000, 30_001, 150_000, 10, 99_000]
    kept = []
    with Wire(served.endpoint) as it:
        out = Outlet(it, "out", max_bytes=100_000, timeout_s=20)
        for size in sizes:
            out.send(Message(bytes(size)).encode())
            kept.append([len(payload) for _, (payload,) in out._unanswered])
        out.finish()
        assert out.count == len(sizes)
        assert [len(each.body) for each in it.browse("out")] == sizes
    assert all(sum(each) <= 100_000 or len(each) == 1 for each in kept)
    assert max(len(each) for each in kept) == 3


def test_what_is_refused_is_said(served: Any) -> None:
    served.broker.declare(Queue("full", length_max=1, overflow="reject"))
    with Wire(served.endpoint) as it:
        with pytest.raises(LinkRefused, match="cannot send to 'nowhere'"):
            Outlet(it, "nowhere", timeout_s=20)
        with pytest.raises(LinkRefused, match="cannot be read"):
            list(it.browse("nowhere"))
        with pytest.raises(AmqpError, match="READ at 'nowhere'"):
            it.call("nowhere", "READ")
        out = Outlet(it, "full", timeout_s=20)
        out.send(Message(1).encode())
        out.send(Message(2).encode())
        with pytest.raises(DeliveryRejected, match="did not take a message"):
            out.finish()
        skipping = Outlet(it, "full", timeout_s=20, skip=True)
        skipping.send(Message(3).encode())
        skipping.finish()
        assert (skipping.count, skipping.refused) == (0, 1)


def test_a_connection_is_used_again_as_long_as_it_lives(served: Any) -> None:
    first = connections.wire(served.endpoint)
    assert connections.wire(served.endpoint) is first
    first.connection.drop()
    second = connections.wire(served.endpoint)
    assert second is not first
    second.connection.drop()
    assert connections.call(served.endpoint, "one", "READ")["kind"] == "log"


@pytest.mark.slow
def test_logging_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ann:pa:ss\n")
    monkeypatch.setenv("AMQP_SECRET", "ann:pa:ss")
    monkeypatch.setenv("AMQP_WRONG", "ann:other")
    with sync.Broker(users={"ann": "pa:ss"}, plain_in_clear=True) as broker:
        broker.declare(Queue("q"))
        (url,) = broker.listen("amqp://127.0.0.1:0")
        for endpoint in (
            Endpoint(url, credentials_file=str(secret)),
            Endpoint(url, credentials_env="AMQP_SECRET"),
        ):
            with Wire(endpoint) as it:
                assert list(it.browse("q")) == []
        with pytest.raises(AmqpError, match="did not accept the login"):
            Wire(Endpoint(url, credentials_env="AMQP_WRONG"))


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (Endpoint("amqp://u:p@h"), "url holds a password"),
        (Endpoint("amqp://h", credentials_file="/no/such"), "cannot be read: No such file"),
        (Endpoint("amqp://h", credentials_env="NOT_SET_AT_ALL"), "one line, user:password"),
        (Endpoint("amqp://h", mechanism="plain"), "needs credentialsFile or credentialsEnv"),
        (Endpoint("amqp://h", mechanism="gssapi", credentials_env="PATH"), "user:password|not one"),
    ],
)
def test_an_endpoint_that_makes_no_sense(endpoint: Endpoint, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Wire(endpoint)


@pytest.mark.slow
def test_executors_need_no_event_loop() -> None:
    program = (
        "import sys, amqp_rt_spark.connections, amqp_rt_spark.drains, amqp_rt_spark.outlets\n"
        "print(*({'trio', 'anyio', 'asyncio', 'pyspark', 'pyarrow'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr


def test_two_connections_of_one_process_do_not_meet(served: Any) -> None:
    served.send("one", "a")
    with Wire(served.endpoint) as first, Wire(served.endpoint) as second:
        for it in (first, second, first):
            assert it.call("one", "READ")["kind"] == "log"
            assert offsets(it.read("one", 0, 0, 1)) == [(0, "a")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["browse", "selector", "log"])
def test_what_is_not_taken_yet_waits_in_the_socket(served: Any, way: str) -> None:
    """However large the messages are, and however many were asked for."""
    count, size = 60, 200_000
    served.send("in" if way == "browse" else "one", *(bytes(size) for _ in range(count)))
    with Wire(served.endpoint) as it:
        found: Any
        if way == "browse":
            found = it.browsed("in")
        else:
            selector = "" if way == "log" else "1 = 1"
            found = (some for _, some, _ in it.records("one", 0, 0, count, selector=selector))
        taken = 0
        for payloads in found:
            taken += len(payloads)
            assert len(payloads) < 10
        assert taken == count
