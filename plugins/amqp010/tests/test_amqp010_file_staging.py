"""Files of 0-10 that clients stage and publish, at a real broker: restarts, owners, bounds and lies."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_amqp010 import Front, StagingLimits
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.limits import OPENED_MAX, STAGED_COST, STAGED_STEP
from amqp_rt_amqp010.staged_files import StagedFile, StagedFiles
from files010 import open_file, publish, send_file, stage
from hypothesis import given
from hypothesis import strategies as st
from octets010 import Struct
from protocol010 import Failed
from subscribers010 import Attached, World

from amqp_rt.broker.nodes import Queue
from amqp_rt.fronts import DEFAULT_LIMITS
from amqp_rt.security.access import Rights

pytestmark = pytest.mark.req("D18")


def staged_of(world: World) -> StagedFiles:
    return world.front._staged


def bodies(session: Attached, queue: str = "q", destination: str = "d") -> list[bytes]:
    session.subscribe(queue, destination)
    return session.bodies()


def failure(call: Any, *args: Any, **words: Any) -> int | None:
    with pytest.raises(Failed) as caught:
        call(*args, **words)
    return caught.value.code


# --- staging and publishing --------------------------------------------------------------------------


def test_a_staged_file_is_published() -> None:
    world = World("q")
    session = world.client().attach()
    assert open_file(session, "f", 5) == 0
    stage(session, b"whole")
    assert world.stats("q").available == 0
    publish(session, "f")
    assert bodies(session) == [b"whole"]
    assert (len(staged_of(world)), staged_of(world).octets) == (0, 0)


def test_a_file_may_be_empty() -> None:
    world = World("q")
    session = world.client().attach()
    send_file(session, b"")
    assert bodies(session) == [b""]


def test_files_are_staged_in_the_order_of_their_opens() -> None:
    world = World("q")
    session = world.client().attach()
    for name in ("a", "b"):
        open_file(session, name, 1)
    stage(session, b"A")
    stage(session, b"B")
    publish(session, "b")
    publish(session, "a")
    assert bodies(session) == [b"B", b"A"]


def test_publish_may_come_before_the_file_is_staged() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 2)
    number = session.send("file.publish", routing_key="q", identifier="f", sync=True)
    assert not session.state.is_complete(number)
    stage(session, b"ok")
    session.done(number)
    assert bodies(session) == [b"ok"]


def test_a_published_file_is_gone() -> None:
    world = World("q")
    session = world.client().attach()
    send_file(session, b"1")
    assert failure(publish, session, "f") == 404


def test_staging_continues_where_a_lost_connection_left_it() -> None:
    world = World("q")
    client = world.client()
    session = client.attach()
    open_file(session, "f", 6)
    stage(session, b"one")
    client.cut()
    session = world.client().attach(b"other")
    assert open_file(session, "f", 6) == 3
    stage(session, b"two")
    publish(session, "f")
    assert bodies(session) == [b"onetwo"]


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_a_file_is_the_same_however_often_staging_is_interrupted(
    body: bytes, cuts: list[int]
) -> None:
    world = World("q")
    client = world.client()
    for end in (*sorted(min(each, len(body)) for each in cuts), len(body)):
        client.cut()
        client = world.client()
        session = client.attach()
        begin = open_file(session, "f", len(body))
        stage(session, body[begin:end])
    publish(session, "f")
    assert bodies(session) == [body]


def test_a_file_of_another_size_is_another_file() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 6)
    stage(session, b"old")
    assert open_file(session, "f", 3) == 0
    stage(session, b"new")
    publish(session, "f")
    assert bodies(session) == [b"new"]


def test_a_stage_that_was_lost_is_replayed_by_its_session() -> None:
    world = World("q")
    client = world.client()
    session = client.attach(timeout=60)
    open_file(session, "f", 6)
    number = session.state.send(
        "file.stage", headers=[Struct("file-properties", filename="x")], body=b"onetwo"
    )
    client.cut()
    again = world.client().go_on(session.state)
    again.done(number)
    publish(again, "f")
    assert bodies(again) == [b"onetwo"]


def half_stage(session: Attached, body: bytes) -> int:
    """Send the first half of a stage, and lose the connection; return the id of the command."""
    client = session.client
    number = session.state.send(
        "file.stage", headers=[Struct("file-properties", filename="x")], body=body
    )
    octets = b"".join(client.wire.take())
    client._call(octets[: len(octets) // 2])
    client.cut()
    return number


def test_a_stage_that_the_connection_cut_is_continued() -> None:
    world = World("q")
    session = world.client().attach()
    body = os.urandom(300_000)
    open_file(session, "f", len(body))
    half_stage(session, body)
    session = world.client().attach(b"other")
    begin = open_file(session, "f", len(body))
    assert 50_000 < begin < len(body)
    stage(session, body[begin:])
    publish(session, "f")
    assert bodies(session) == [body]


def test_a_stage_that_its_session_repeats_adds_only_what_is_missing() -> None:
    world = World("q")
    session = world.client().attach(timeout=60)
    body = os.urandom(300_000)
    open_file(session, "f", len(body))
    number = half_stage(session, body)
    (file,) = staged_of(world)._files.values()
    assert 50_000 < file.octets < len(body)
    again = world.client().go_on(session.state)
    again.done(number)
    assert file.is_complete
    publish(again, "f")
    assert bodies(again) == [body]


def test_nothing_is_kept_of_a_cut_stage_that_is_longer_than_was_told() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 10)
    half_stage(session, os.urandom(300_000))
    (file,) = staged_of(world)._files.values()
    assert file.octets == 0


def test_large_files_are_staged_in_steps_and_come_whole() -> None:
    world = World("q")
    session = world.client().attach()
    body = os.urandom(STAGED_STEP) * 3 + b"rest"
    send_file(session, body)
    assert bodies(session) == [body]


# --- owners ------------------------------------------------------------------------------------------


def test_the_last_open_owns_a_file() -> None:
    world = World("q")
    first, second = world.client().attach(b"1"), world.client().attach(b"2")
    open_file(first, "f", 6)
    stage(first, b"one")
    open_file(first, "f", 6)
    assert open_file(second, "f", 6) == 3
    assert failure(stage, first, b"two") == 409
    stage(second, b"two")
    publish(second, "f")
    assert bodies(second) == [b"onetwo"]


def test_a_publish_that_waits_fails_if_its_file_is_taken_over() -> None:
    world = World("q")
    first, second = world.client().attach(b"1"), world.client().attach(b"2")
    open_file(first, "f", 3)
    number = first.send("file.publish", routing_key="q", identifier="f")
    assert open_file(second, "f", 3) == 0
    assert failure(first.done, number) == 409
    stage(second, b"abc")
    publish(second, "f")
    assert bodies(second) == [b"abc"]


def test_users_have_files_of_their_own() -> None:
    files = StagedFiles(StagingLimits())
    mine = files.open(("h", "u"), "f", 1, session_name(1))
    assert files.open(("h", "v"), "f", 1, session_name(2)) is not mine
    assert files.open(("i", "u"), "f", 1, session_name(3)) is not mine
    assert files.find(("h", "u"), "f") is mine


def session_name(number: int) -> object:
    return f"session {number}"


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"content_size": 1}, 542),
        ({"identifier": "", "content_size": 1}, 542),
        ({"identifier": "f"}, 542),
        ({"identifier": "f", "content_size": DEFAULT_LIMITS.message_size_max + 1}, 506),
        ({"identifier": "f", "content_size": 2**64 - 1}, 506),
    ],
    ids=["no-identifier", "empty-identifier", "no-size", "too-large", "absurd"],
)
def test_an_open_is_checked(fields: dict[str, Any], code: int) -> None:
    session = World("q").client().attach()
    assert failure(session.call, "file.open", **fields) == code


def test_a_file_is_opened_once_in_a_session() -> None:
    session = World("q").client().attach()
    open_file(session, "f", 1)
    assert failure(open_file, session, "f", 1) == 409


def test_a_stage_follows_an_open() -> None:
    assert failure(stage, World("q").client().attach(), b"x") == 409


def test_a_malformed_header_fails() -> None:
    session = World("q").client().attach()
    open_file(session, "f", 1)
    header = [Struct("delivery-properties", routing_key="x")]
    number = session.state.send("file.stage", headers=header, body=b"x")
    # Properties of another class are no file-properties: they are all absent.
    session.done(number)


def test_more_than_was_told_drops_the_file() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 2)
    assert failure(stage, session, b"abc") == 542
    assert len(staged_of(world)) == 0


def test_less_than_was_told_is_not_published() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 4)
    stage(session, b"abc")
    assert failure(publish, session, "f") == 409
    assert world.stats("q").available == 0
    # It can be continued.
    assert open_file(world.client().attach(b"other"), "f", 4) == 3


def test_less_than_was_told_fails_a_publish_that_waits() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 4)
    number = session.send("file.publish", routing_key="q", identifier="f")
    with pytest.raises(Failed) as caught:
        stage(session, b"abc")
    assert caught.value.code == 409
    assert session.state.exception is not None
    assert session.state.exception.command_id == number


@pytest.mark.parametrize("identifier", ["unknown", "", None])
def test_an_unknown_file_is_not_published(identifier: str | None) -> None:
    session = World("q").client().attach()
    assert failure(session.call, "file.publish", routing_key="q", identifier=identifier) == 404


def test_a_file_that_waits_is_published_once() -> None:
    session = World("q").client().attach()
    open_file(session, "f", 1)
    session.send("file.publish", routing_key="q", identifier="f")
    assert failure(publish, session, "f") == 409


@pytest.mark.parametrize(("exchange", "code"), [("none", 404), ("", 403)], ids=["none", "right"])
def test_a_refused_publish_keeps_the_file(exchange: str, code: int) -> None:
    world = World("q", "r")
    world.denied.add((Rights.SEND, "q"))
    session = world.client().attach()
    open_file(session, "f", 1)
    stage(session, b"1")
    assert failure(publish, session, "f", exchange=exchange) == code
    session = world.client().attach(b"other")
    publish(session, "f", "r")
    assert bodies(session, "r") == [b"1"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [({"mandatory": True}, 312), ({"immediate": True}, 312), ({}, None)],
    ids=["mandatory", "immediate", "neither"],
)
def test_unroutable_files_are_returned(flags: dict[str, bool], code: int | None) -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 1)
    stage(session, b"1", priority=3, filename="n")
    publish(session, "f", "lost", exchange="amq.direct", **flags)
    found = [each for each in session.state.others if each.name == "file.return"]
    assert [each.reply_code for each in found] == ([] if code is None else [code])
    for each in found:
        assert (each.exchange, each.routing_key, each.body) == ("amq.direct", "lost", b"1")
        assert each.headers == [Struct("file-properties", priority=3, filename="n")]
    assert len(staged_of(world)) == 0


def test_files_without_a_consumer_are_returned_if_they_are_immediate() -> None:
    world = World("q")
    session = world.client().attach()
    open_file(session, "f", 1)
    stage(session, b"1")
    publish(session, "f", immediate=True)
    found = [each for each in session.state.others if each.name == "file.return"]
    assert [each.reply_code for each in found] == [313]
    assert world.stats("q").available == 0


def test_a_full_queue_fails_the_publish_and_the_file_is_kept() -> None:
    world = World(Queue("q", length_max=1, overflow="reject"))
    session = world.client().attach()
    send_file(session, b"1")
    open_file(session, "g", 1)
    stage(session, b"2")
    assert failure(publish, session, "g") == 506
    reader = world.client().attach(b"reader")
    reader.subscribe("q")
    (first,) = reader.messages()
    reader.accept(first.id)
    publish(reader, "g")
    assert [each.body for each in reader.messages()] == [b"2"]


# --- transactions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_files_belong_to_the_transaction(commits: bool) -> None:
    world = World("q")
    session = world.client().attach()
    session.call("tx.select")
    open_file(session, "f", 1)
    stage(session, b"1")
    publish(session, "f")
    assert world.stats("q").available == 0
    session.call("tx.commit" if commits else "tx.rollback")
    assert world.stats("q").available == (1 if commits else 0)


def test_a_transaction_takes_staged_files_only() -> None:
    session = World("q").client().attach()
    session.call("tx.select")
    open_file(session, "f", 1)
    assert failure(publish, session, "f") == 409


# --- bounds ------------------------------------------------------------------------------------------


def test_opens_without_a_stage_are_bounded() -> None:
    front = Front(staging=StagingLimits(files_user_max=2 * OPENED_MAX))
    world = World("q", front=front)
    session = world.client().attach()
    for index in range(OPENED_MAX):
        open_file(session, f"f{index}", 1)
    assert failure(open_file, session, "more", 1) == 506
    # They are kept for other sessions, as far as their time goes.
    assert len(staged_of(world)) == OPENED_MAX


def test_two_sessions_that_open_by_turns_make_no_more_than_is_allowed() -> None:
    world = World("q")
    sessions = [world.client().attach(name) for name in (b"1", b"2")]
    for index in range(2 * OPENED_MAX):
        open_file(sessions[index % 2], "f", 1)
    assert failure(open_file, sessions[0], "f", 1) == 506
    assert len(staged_of(world)) == 1


def begun(files: StagedFiles, user: str, name: str, size: int = 0) -> StagedFile:
    return files.open(("h", user), name, size, None)


def test_files_are_counted_for_a_user_and_for_all() -> None:
    files = StagedFiles(StagingLimits(files_user_max=3, files_max=5))
    for index in range(3):
        begun(files, "u", str(index))
    with pytest.raises(CommandFault, match="3 by this user: publish some"):
        begun(files, "u", "more")
    # One that there is can be opened.
    begun(files, "u", "0")
    for index in range(2):
        begun(files, "v", str(index))
    with pytest.raises(CommandFault, match="5 files are staged"):
        begun(files, "w", "more")
    assert len(files) == 5


@pytest.mark.parametrize("bound", ["octets_user_max", "octets_max"])
def test_octets_are_counted_for_a_user_and_for_all(bound: str) -> None:
    size = 100
    cost = STAGED_COST + 1
    limits = {"octets_user_max": 1 << 30, "octets_max": 1 << 30, bound: cost + size}
    files = StagedFiles(StagingLimits(**limits))
    with pytest.raises(CommandFault, match="no room"):
        begun(files, "u", "f", size + 1)
    file = begun(files, "u", "f", size)
    files.append(file, b"x" * size)
    assert files.octets == cost + size
    with pytest.raises(CommandFault) as caught:
        files.describe(file, b"header")
    assert caught.value.code == 506
    assert (len(files), files.octets, file.is_dropped) == (0, 0, True)


def test_files_that_are_never_published_are_dropped_in_time() -> None:
    front = Front(staging=StagingLimits(lifetime_s=60))
    world = World("q", front=front)
    session = world.client().attach()
    open_file(session, "f", 1)
    stage(session, b"1")
    world.pass_time(0)
    world.pass_time(59.9)
    assert len(staged_of(world)) == 1
    # A stage renews it.
    open_file(session, "f", 1)
    world.pass_time(0.2)
    assert len(staged_of(world)) == 1
    world.pass_time(60)
    assert len(staged_of(world)) == 0
    assert staged_of(world).deadline == inf
    assert failure(stage, session, b"") == 409


def test_a_publish_that_waits_fails_with_the_time_of_its_file() -> None:
    world = World("q", front=Front(staging=StagingLimits(lifetime_s=60)))
    session = world.client().attach()
    open_file(session, "f", 1)
    number = session.send("file.publish", routing_key="q", identifier="f")
    world.pass_time(0)
    world.pass_time(60)
    assert failure(session.done, number) == 409


def test_the_front_drops_files_when_it_closes() -> None:
    world = World("q")
    open_file(world.client().attach(), "f", 1)
    world.front.close()
    assert len(staged_of(world)) == 0


# --- on disk -----------------------------------------------------------------------------------------


def test_large_files_are_on_disk_while_they_are_staged(tmp_path: Path) -> None:
    limits = StagingLimits(directory=str(tmp_path), memory_max=1_000)
    world = World("q", front=Front(staging=limits))
    client = world.client()
    session = client.attach()
    body = os.urandom(10_000)
    open_file(session, "f", len(body))
    stage(session, body[:9_000])
    (file,) = staged_of(world)._files.values()
    assert file.store is not None
    assert len(file.tail) <= 1_000
    assert os.fstat(file.store.fileno()).st_size + len(file.tail) == 9_000
    client.cut()
    session = world.client().attach()
    assert open_file(session, "f", len(body)) == 9_000
    stage(session, body[9_000:])
    publish(session, "f")
    assert bodies(session) == [body]
    assert file.store is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_refuses_the_file(tmp_path: Path) -> None:
    limits = StagingLimits(directory=str(tmp_path / "none"), memory_max=10)
    world = World("q", front=Front(staging=limits))
    session = world.client().attach()
    open_file(session, "f", 11)
    assert failure(stage, session, b"x" * 11) == 506
    assert len(staged_of(world)) == 0
    # Small files need no disk.
    send_file(world.client().attach(b"other"), b"x" * 10)
    assert world.stats("q").available == 1
