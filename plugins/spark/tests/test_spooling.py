"""Queues of any broker, streamed by way of files; and other people's brokers, ours included."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foreign_brokers
import pytest
from amqp_rt_spark import connections, spooling
from amqp_rt_spark.batch import Batch
from amqp_rt_spark.data_loss import DataLost
from amqp_rt_spark.drains import Drain
from amqp_rt_spark.endpoints import Endpoint
from amqp_rt_spark.leasing import LeaseStream
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import read_options
from amqp_rt_spark.outlets import Outlet
from amqp_rt_spark.spooling import (
    Epoch,
    Plan,
    Share,
    SpoolFile,
    SpoolStream,
    epoch_of,
    epoch_offset,
    had_no_more,
    identities,
    spooled,
)
from amqp_rt_spark.writing import Sink, Task

from amqp_rt import Message
from amqp_rt.errors import AmqpError, LinkDetached

pytestmark = pytest.mark.req("K6")

EVERYTHING = SimpleNamespace()


def stream(url: str, folder: Path, **given: str) -> SpoolStream:
    said = {
        "url": url,
        "address": "in",
        "mode": "spool",
        "spoolDir": str(folder),
        "columns": "body",
    }
    return SpoolStream(read_options({**said, **given}, "source"))


def moved(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def batch(it: SpoolStream, start: Any, end: Any) -> list[Any]:
    """The bodies of a batch, read as its tasks do."""
    return [row[0] for share in moved(it.partitions(start, end)) for row in moved(it).read(share)]


def logged(it: SpoolStream, start: Any, limit: Any = EVERYTHING) -> Any:
    """The next offset, as a checkpoint gives it back."""
    return json.loads(json.dumps(it.latestOffset(start, limit)))


# --- Files ---------------------------------------------------------------------------------------


def written(path: Path, *payloads: bytes, dry: bool = False) -> bool:
    with SpoolFile(path) as file:
        for payload in payloads:
            file.add(payload, payload[:1].rjust(16, bytes(1)))
        return file.publish(dry=dry)


def test_a_file_is_there_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolFile(path) as file:
        file.add(b"nothing", bytes(16))
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []
    assert written(path, b"one", b"", b"two" * 1_000, dry=True)
    assert not written(path, b"other")
    assert list(spooled(path)) == [b"one", b"", b"two" * 1_000]
    assert identities(path) == {bytes(15) + b"o", bytes(15) + b"t"}
    assert had_no_more(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("how", ["short", "cut", "flipped"])
def test_a_file_that_is_damaged_is_not_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.spool"
    written(path, b"one", b"two")
    octets = bytearray(path.read_bytes())
    if how == "flipped":
        octets[22] ^= 1
    path.write_bytes(octets[: {"short": 5, "cut": -3}.get(how)])
    with pytest.raises(DataLost, match="is damaged"):
        list(spooled(path))


# --- Offsets and plans ---------------------------------------------------------------------------


def test_an_offset_is_text_in_order() -> None:
    epoch = Epoch("x", 3, {"b": Plan((2, 3)), "a": Plan((1,), 100)})
    found = epoch_offset(epoch)
    assert json.dumps(found) == (
        '{"epoch": 3, "plan": {"a": {"bytes": 100, "tasks": [1]}, "b": {"bytes": null, "tasks": [2, 3]}}, '
        '"spool": "x", "v": 1}'
    )
    assert epoch_of(json.loads(json.dumps(found))) == epoch
    for other in ({}, {"v": 1, "leases": {}}, {"v": 2, "epoch": 0, "spool": "", "plan": {}}):
        with pytest.raises(ValueError, match="holds no offset of a spool"):
            epoch_of(other)


@pytest.mark.parametrize(
    ("given", "rows", "tasks"),
    [
        ({}, None, [3333, 3333, 3333]),
        ({"maxMessagesPerTrigger": "7"}, None, [6]),
        ({"maxMessagesPerTrigger": "7"}, 5, [4]),
        ({"maxMessagesPerTrigger": "1"}, None, [0]),
        ({"maxMessagesPerTrigger": "8", "minPartitions": "3"}, None, [2, 2, 3]),
        ({"maxMessagesPerTrigger": "9", "maxMessagesPerPartition": "3"}, None, [2, 3, 3]),
    ],
)
def test_a_batch_is_shared_out(
    served: Any, tmp_path: Path, given: dict[str, str], rows: int | None, tasks: list[int]
) -> None:
    served.send("in", "x")
    it = stream(served.url, tmp_path, **given)
    limit = SimpleNamespace() if rows is None else SimpleNamespace(max_rows=rows)
    plan = epoch_of(logged(it, it.initialOffset(), limit)).plans["in"]
    assert list(plan.tasks) == tasks


def test_several_queues_are_one_stream(served: Any, tmp_path: Path) -> None:
    served.send("in", *(f"in {number}" for number in range(6)))
    served.send("out", *(f"out {number}" for number in range(6)))
    it = stream(served.url, tmp_path, address="in,out", maxMessagesPerTrigger="7")
    start = it.initialOffset()
    end = logged(it, start)
    found = Counter(body.partition(b" ")[0] for body in batch(it, start, end))
    assert found == {b"in": 4, b"out": 3}
    later = logged(it, end)
    assert Counter(each.partition(b" ")[0] for each in batch(it, end, later)) == {
        b"in": 2,
        b"out": 3,
    }
    assert logged(it, later) == later


# --- Batches -------------------------------------------------------------------------------------


def test_a_batch_is_the_same_when_it_is_done_again(served: Any, tmp_path: Path) -> None:
    bodies = [f"{number}".encode() for number in range(20)]
    served.send("in", *(str(number) for number in range(20)))
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="10")
    start = it.initialOffset()
    assert it.partitions(start, start) == []
    end = logged(it, start)
    found = batch(it, start, end)
    assert found == bodies[:10]
    # Other partitions, another process, more messages: it is as it was planned.
    other = stream(served.url, tmp_path, maxMessagesPerTrigger="3", minPartitions="5")
    assert batch(other, start, end) == found
    assert list(other.read(None)) == []
    assert served.bodies("in") == [str(number) for number in range(10, 20)]
    later = logged(other, end)
    assert batch(other, end, later) == bodies[10:13]


def test_files_go_when_they_are_not_needed_any_more(served: Any, tmp_path: Path) -> None:
    it = stream(served.url, tmp_path / "spool")
    at = it.initialOffset()
    for number in range(4):
        served.send("in", f"{number}")
        end = logged(it, at)
        assert batch(it, at, end) == [b"%d" % number]
        at = end
    it.commit(at)
    (folder,) = (tmp_path / "spool").iterdir()
    assert sorted(int(each.name) for each in folder.iterdir()) == [3, 4]


def test_messages_that_come_again(served: Any, tmp_path: Path) -> None:
    """Others let go of them: they are no doubles, though they say that they come again."""
    served.send("in", *(Message(str(number), message_id=f"m{number}") for number in range(5)))
    with Drain(connections.wire(served.endpoint), "in") as drain:
        assert len(drain.take(9)) == 5
    it = stream(served.url, tmp_path)
    start = it.initialOffset()
    end = logged(it, start)
    assert len(batch(it, start, end)) == 5
    # Send a message of another name with the same content, and one with other content.
    served.send("in", Message("0", message_id="m5"), Message("1", message_id="m0"))
    with Drain(connections.wire(served.endpoint), "in") as drain:
        assert len(drain.take(9)) == 2
    later = logged(it, end)
    assert batch(it, end, later) == [b"0", b"1"]


def test_two_attempts_of_a_task_at_once(served: Any, tmp_path: Path) -> None:
    """The second one gives back what it has."""
    served.send("in", *(str(number) for number in range(10)))
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="5")
    start = it.initialOffset()
    end = logged(it, start)
    (share,) = it.partitions(start, end)
    publish, others = SpoolFile.publish, []

    def late(file: SpoolFile, *, dry: bool) -> bool:
        if not others:
            others.append(0)
            others.extend(stream(served.url, tmp_path).read(share))
        return publish(file, dry=dry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpoolFile, "publish", late)
        found = list(it.read(share))
    assert found == others[1:]
    assert [row[0] for row in found] == [b"0", b"5", b"6", b"7", b"8"]
    assert served.bodies("in") == ["1", "2", "3", "4", "9"]


def test_a_driver_that_was_thought_dead_takes_nothing_along(served: Any, tmp_path: Path) -> None:
    """It has planned the batch, and goes on after another one has done it."""
    served.send("in", "a", "b", "c")
    old, new = (stream(served.url, tmp_path, maxMessagesPerTrigger="3") for _ in range(2))
    start = old.initialOffset()
    end = logged(old, start)
    # The old one holds the first message.
    assert batch(new, start, end) == [b"b", b"c"]
    assert batch(old, start, end) == [b"b", b"c"]
    assert served.bodies("in") == ["a"]
    later = logged(new, end)
    assert batch(new, end, later) == [b"a"]


def test_a_stream_ends_by_itself_where_a_queue_had_no_more(served: Any, tmp_path: Path) -> None:
    served.send("in", *(str(number) for number in range(8)))
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="5")
    it.prepareForTriggerAvailableNow()
    at, found = it.initialOffset(), []
    while (end := logged(it, at)) != at:
        found.append(batch(it, at, end))
        # Another sender is faster than the query.
        served.send("in", *(f"more {number}" for number in range(2)))
        at = end
    assert [len(each) for each in found] == [5, 5, 2]
    assert it.reportLatestOffset() is None


def test_bounds_by_bytes(served: Any, tmp_path: Path) -> None:
    served.send("in", *(bytes(1_000) for _ in range(50)))
    it = stream(
        served.url, tmp_path, maxMessagesPerTrigger="50", maxBytesPerTrigger="10000", credit="3"
    )
    start = it.initialOffset()
    end = logged(it, start, SimpleNamespace(max_bytes=10_000))
    assert 10 <= len(batch(it, start, end)) <= 13


def test_large_messages_arrive_whole(served: Any, tmp_path: Path) -> None:
    served.send("in", *(bytes([number]) * 300_000 for number in range(4)))
    it = stream(served.url, tmp_path, credit="2")
    start = it.initialOffset()
    assert [len(each) for each in batch(it, start, logged(it, start))] == [300_000] * 4


def test_a_selector_leaves_the_rest(served: Any, tmp_path: Path) -> None:
    for number in range(6):
        served.send("in", str(number), application_properties={"odd": bool(number % 2)})
    it = stream(served.url, tmp_path, selector="odd = TRUE")
    start = it.initialOffset()
    end = logged(it, start)
    assert batch(it, start, end) == [b"1", b"3", b"5"]
    assert logged(it, end) == end
    assert served.bodies("in") == ["0", "2", "4"]


# --- What is refused, and what is noticed --------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"spoolDir": "relative"}, "a path from the root on"),
        ({"spoolDir": "s3://bucket/spool"}, "not a URL"),
        ({"startingOffsets": "latest"}, "no offsets to start at"),
        ({"startingTimestamp": "1"}, "no offsets to start at"),
        ({"minMessagesPerTrigger": "2"}, "needs the number of waiting messages"),
        ({"endingTimestamp": "1"}, "a stream has no end"),
    ],
)
def test_what_a_spool_cannot_do(tmp_path: Path, given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        stream("amqp://h", tmp_path, **given)


def test_a_spool_needs_a_folder_and_a_stream(tmp_path: Path) -> None:
    said = {"url": "amqp://h", "address": "in", "mode": "spool"}
    with pytest.raises(ValueError, match="needs the option spoolDir"):
        SpoolStream(read_options(said, "source"))
    with pytest.raises(ValueError, match="is for streams"):
        Batch(read_options(said, "source"))
    there = read_options({**said, "spoolDir": f"file://{tmp_path}"}, "source")
    assert there.spool_dir == str(tmp_path)


def test_a_folder_is_of_one_checkpoint(served: Any, tmp_path: Path) -> None:
    served.send("in", "a", "b")
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="1")
    start = it.initialOffset()
    end = logged(it, start)
    assert batch(it, start, end) == [b"a"]
    with pytest.raises(ValueError, match="holds messages of another checkpoint"):
        stream(served.url, tmp_path).latestOffset(start)
    with pytest.raises(ValueError, match="does another query use this checkpoint"):
        it.partitions(epoch_offset(Epoch("other", 0, {})), end)
    served.send("in", "c")
    later = logged(it, end)
    batch(it, end, later)
    elsewhere = tmp_path / "elsewhere"
    strict = stream(served.url, elsewhere)
    with pytest.raises(DataLost, match="spoolDir was emptied, or is another folder"):
        strict.partitions(end, later)
    lax = stream(served.url, elsewhere, failOnDataLoss="false")
    assert batch(lax, end, later) == []


@pytest.mark.req("K3")
def test_a_checkpoint_that_is_older_than_its_folder(served: Any, tmp_path: Path) -> None:
    """A plan of fewer tasks would pass over files that nothing else has."""
    served.send("in", *(str(number) for number in range(9)))
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="3")
    start = it.initialOffset()
    backup = logged(it, start)
    assert batch(it, start, backup) == [b"0", b"1", b"2"]
    wide = stream(served.url, tmp_path, maxMessagesPerTrigger="4", minPartitions="3")
    end = logged(wide, backup)
    assert batch(wide, backup, end) == [b"3", b"4", b"5", b"6"]
    with pytest.raises(ValueError, match="holds messages of epoch 2, and the checkpoint ends at 1"):
        logged(it, backup)
    # Nothing is deleted, and the latest checkpoint goes on.
    assert batch(it, backup, end) == [b"3", b"4", b"5", b"6"]
    assert batch(it, end, logged(it, end)) == [b"7", b"8"]


def test_a_folder_that_workers_do_not_see(served: Any, tmp_path: Path) -> None:
    served.send("in", "a", "b")
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="9")
    start = it.initialOffset()
    (share,) = it.partitions(start, logged(it, start))
    unseen = Share("in", str(tmp_path / "nowhere" / "x.spool"), 5, None)
    with pytest.raises(DataLost, match="that the driver and all workers see"):
        list(it.read(unseen))
    assert [row[0] for row in it.read(share)] == [b"a", b"b"]
    for path in share.before:
        os.unlink(path)
    with pytest.raises(DataLost, match="was spoolDir emptied"):
        list(it.read(share))


def test_a_connection_that_ends_before_it_is_kept(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.send("in", "a", "b")
    it = stream(served.url, tmp_path, maxMessagesPerTrigger="9", retryTimeout="0")
    start = it.initialOffset()
    (share,) = it.partitions(start, logged(it, start))
    monkeypatch.setattr(Drain, "over", True)
    with pytest.raises(LinkDetached, match="delivered its messages to others"):
        list(it.read(share))
    monkeypatch.undo()
    assert [row[0] for row in it.read(share)] == [b"a", b"b"]


def test_there_is_no_such_queue(served: Any, tmp_path: Path) -> None:
    it = stream(served.url, tmp_path, address="nowhere")
    with pytest.raises(AmqpError, match="nowhere"):
        it.latestOffset(it.initialOffset())


# --- RabbitMQ ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[Any]:
    """RabbitMQ with its AMQP 1.0 plug-in; names of queues that nobody has used."""
    with foreign_brokers.foreign_broker("rabbitmq") as running:
        url = f"amqp://127.0.0.1:{running.port}"
        numbers = iter(range(1_000))
        yield SimpleNamespace(
            url=url,
            endpoint=read_options({"url": url, "address": "x"}, "source").endpoint,
            fresh=lambda: running.address(f"spool{next(numbers)}"),
        )
        connections.forget(Endpoint(url))


def put(there: Any, queue: str, *messages: Message) -> None:
    out = Outlet(connections.wire(there.endpoint), queue, timeout_s=30)
    for message in messages:
        out.send(message.encode())
    out.finish()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_queue_of_rabbitmq_is_streamed(rabbitmq: Any, tmp_path: Path) -> None:
    queue = rabbitmq.fresh()
    put(rabbitmq, queue, *(Message(b"%d" % number) for number in range(50)))
    it = stream(rabbitmq.url, tmp_path, address=queue, maxMessagesPerTrigger="20", credit="7")
    it.prepareForTriggerAvailableNow()
    at, found = it.initialOffset(), []
    while (end := logged(it, at)) != at:
        found.append(batch(it, at, end))
        assert batch(stream(rabbitmq.url, tmp_path, address=queue), at, end) == found[-1]
        at = end
    assert [len(each) for each in found] == [20, 20, 10]
    assert list(chain(*found)) == [b"%d" % number for number in range(50)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("named", [True, False])
def test_a_task_on_rabbitmq_ends_before_it_accepts(
    rabbitmq: Any, tmp_path: Path, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = rabbitmq.fresh()
    names = [{"message_id": f"m{number}"} if named else {} for number in range(30)]
    put(rabbitmq, queue, *(Message(b"%d" % number, **name) for number, name in enumerate(names)))
    it = stream(rabbitmq.url, tmp_path, address=queue, maxMessagesPerTrigger="12")
    start = it.initialOffset()
    end = logged(it, start)
    (share,) = it.partitions(start, end)
    publish = SpoolFile.publish

    def killed(file: SpoolFile, *, dry: bool) -> bool:
        publish(file, dry=dry)
        connections.forget(rabbitmq.endpoint)
        raise RuntimeError("killed")

    monkeypatch.setattr(SpoolFile, "publish", killed)
    with pytest.raises(RuntimeError, match="killed"):
        list(it.read(share))
    monkeypatch.undo()
    found = [row[0] for row in it.read(share)]
    it.prepareForTriggerAvailableNow()
    at = end
    while (end := logged(it, at)) != at:
        found += batch(it, at, end)
        at = end
    counted = Counter(found)
    assert set(counted) == {b"%d" % number for number in range(30)}
    # Eleven messages were in the file and not accepted, beside the one that the driver has taken.
    assert counted.total() == (30 if named else 41)


@pytest.mark.timeout(180)
def test_rabbitmq_ignores_selectors_and_takes_messages_away(rabbitmq: Any, tmp_path: Path) -> None:
    """Both would give something else than what was asked for, so both are refused."""
    queue = rabbitmq.fresh()
    put(rabbitmq, queue, Message(b"a"))
    it = stream(rabbitmq.url, tmp_path, address=queue, selector="a = 1")
    with pytest.raises(AmqpError, match="passes it over"):
        it.latestOffset(it.initialOffset())
    said = {"url": rabbitmq.url, "address": queue, "mode": "browse"}
    browsing = Batch(read_options(said, "source"))
    (snapshot,) = browsing.partitions()
    with pytest.raises(AmqpError, match="would take messages away"):
        list(browsing.read(snapshot))
    it = stream(rabbitmq.url, tmp_path, address=queue)
    start = it.initialOffset()
    assert batch(it, start, logged(it, start)) == [b"a"]


@pytest.mark.timeout(180)
def test_what_takes_our_broker_says_so_on_rabbitmq(rabbitmq: Any) -> None:
    said = {"url": rabbitmq.url, "address": rabbitmq.fresh()}
    log = LogStream(read_options(said, "source"))
    lease = LeaseStream(read_options({**said, "mode": "lease", "group": "g"}, "source"))
    for begin in (log.initialOffset, lease.initialOffset, Batch(log.options).partitions):
        with pytest.raises(AmqpError, match=r"RabbitMQ at .* are streamed with mode=spool"):
            begin()
    sink = Sink(read_options(said, "sink"), ["body"], streaming=True)
    with pytest.raises(AmqpError, match="set delivery=at-least-once"):
        sink.send([], Task(0, 0))


@pytest.mark.req("K1")
@pytest.mark.timeout(180)
def test_rows_are_written_to_rabbitmq_and_read_back(rabbitmq: Any, tmp_path: Path) -> None:
    queue = rabbitmq.fresh()
    said = {"url": rabbitmq.url, "address": queue, "delivery": "at-least-once"}
    options = read_options({**said, "dedupColumn": "key"}, "sink")
    sink = Sink(options, ["body", "key", "subject"], streaming=True)
    rows = [{"body": b"%d" % number, "key": number, "subject": "s"} for number in range(20)]
    written = sink.send(rows, Task(0, 0))
    assert (written.count, written.staged) == (20, False)
    assert not sink.publish([written])
    it = stream(rabbitmq.url, tmp_path, address=queue, columns="body,properties")
    start = it.initialOffset()
    (share, *others) = it.partitions(start, logged(it, start))
    found = [row for each in (share, *others) for row in it.read(each)]
    assert [(row[0], row[1][0], row[1][4]) for row in found] == [
        (b"%d" % number, str(number), "s") for number in range(20)
    ]


def test_what_has_no_name_and_what_is_no_message() -> None:
    assert spooling._identity(b"\x00") == (bytes(16), False)
    # Without a header nobody says that it comes for the first time.
    assert spooling._identity(Message(b"a").encode()) == (bytes(16), True)
    fresh = Message(b"a", message_id=1, first_acquirer=True).encode()
    assert spooling._identity(fresh)[1] is False
    name, again = spooling._identity(Message(b"a", message_id=1, delivery_count=2).encode())
    assert (len(name), again) == (16, True)
    other, _ = spooling._identity(Message(b"b", message_id=1).encode())
    assert other != name
