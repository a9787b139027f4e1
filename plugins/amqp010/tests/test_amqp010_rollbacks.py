"""Large transactions of 0-10 and those whose transfers wait: limits, steps, and what a rollback drops."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from amqp_rt_amqp010 import order
from amqp_rt_amqp010.layouts import ErrorCode
from call_counts import plain_only
from octets010 import Struct
from protocol010 import CREDIT, UNLIMITED, Failed, xid
from subscribers010 import Attached, World

from amqp_rt.broker.branches.peers import PeerBranches
from amqp_rt.broker.nodes import Queue
from amqp_rt.events import Peer
from amqp_rt.fronts import Error, Limits
from amqp_rt.security.access import Rights

BRANCH, OTHER = xid(b"one"), xid(b"other")
OK, ROLLED_BACK = 0, 1


class AllRights:
    """Rights of peers that may use transactions, and manage nothing."""

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        return Error("amqp:unauthorized-access")

    def decide_anywhere(self, peer: Peer) -> Error | None:
        return None


class Scene:
    """A session with transactions of class *kind*, at a broker with *queues*."""

    def __init__(self, kind: str, *queues: str | Queue, **options: Any) -> None:
        self.kind = kind
        self.world = World(*queues, **options)
        self.session = self.attach(b"s")

    def attach(self, name: bytes = b"other") -> Attached:
        branches = partial(PeerBranches, self.world.host.services.branches, rights=AllRights())
        client = self.world.client(branches=branches)
        session = client.attach(name)
        session.call(f"{self.kind}.select")
        return session

    def ask(self) -> None:
        """Ask for the right to send with each queue, so that its link has credit and waits for room."""
        self.world.topologies.asks = lambda: True

    def begin(self) -> None:
        if self.kind == "dtx":
            self.status("start", BRANCH)

    def status(self, command: str, branch: Struct, **fields: Any) -> int:
        result = self.session.call(f"dtx.{command}", xid=branch, **fields)
        assert result is not None
        return int(result.status)

    def commit(self) -> None:
        if self.kind == "tx":
            self.session.call("tx.commit")
        else:
            assert self.status("end", BRANCH) == OK
            assert self.status("commit", BRANCH, one_phase=True) == OK

    def roll_back(self) -> None:
        if self.kind == "tx":
            self.session.call("tx.rollback")
        else:
            assert self.status("end", BRANCH, fail=True) == ROLLED_BACK
            assert self.status("rollback", BRANCH) == OK

    def hold(self, count: int) -> list[int]:
        """Put *count* messages into the queue, and get them; return their ids."""
        self.world.publish("q", *[b"x"] * count)
        self.session.subscribe("q", flow_mode=CREDIT, messages=UNLIMITED)
        found: list[int] = []
        while len(found) < count:
            some = [each.id for each in self.session.messages() if each.id is not None]
            assert some
            found += some
        return found

    def post(self, count: int = 1, queue: str = "q") -> list[int]:
        """Send transfers, and carry octets until nothing is left to do; return their ids."""
        state = self.session.state
        sent = [state.transfer("", b"posted", key=queue, accept_mode=1) for _ in range(count)]
        self.world.pump()
        return sent

    def turn(self) -> None:
        """Let the broker work for one turn."""
        self.world.host.turns.run_pending()
        self.session.client.step()

    def is_complete(self, number: int) -> bool:
        return self.session.state.is_complete(number)


@pytest.fixture(params=["tx", "dtx"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- limits -----------------------------------------------------------------------------------------


@pytest.mark.req("R12", "R13", "R8")
@pytest.mark.parametrize("posts", [0, 15])
@pytest.mark.parametrize("width", [1, 5, 20])
def test_a_transaction_has_so_much_work_and_no_more(kind: str, posts: int, width: int) -> None:
    limits = Limits(transaction_work_max=20)
    scene = Scene(kind, "q", Queue("other"), limits=limits)
    held = scene.hold(60)

    def accept(numbers: list[int]) -> None:
        for at in range(0, len(numbers), width):
            scene.session.accept(*numbers[at : at + width])

    scene.begin()
    scene.post(posts, "other")
    accept(held[: 20 - posts])
    scene.commit()
    assert scene.world.stats("q").acquired == 40 + posts
    assert scene.world.stats("other").available == posts
    scene.begin()
    scene.post(posts, "other")
    with pytest.raises(Failed) as caught:
        accept(held[20 - posts : 41 - posts])
    assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    # It was rolled back with its session.
    assert scene.world.stats("q").available == 40 + posts
    assert scene.world.stats("other").available == posts


@pytest.mark.req("R12", "R13", "R8")
def test_a_transfer_beyond_the_work_of_a_transaction_ends_the_session(kind: str) -> None:
    scene = Scene(kind, "q", limits=Limits(transaction_work_max=20))
    scene.begin()
    scene.post(20)
    scene.commit()
    assert scene.world.stats("q").available == 20
    scene.begin()
    *_, last = scene.post(21)
    with pytest.raises(Failed) as caught:
        scene.session.done(last)
    assert caught.value.code == ErrorCode.RESOURCE_LIMIT_EXCEEDED
    assert scene.world.stats("q").available == 20


@pytest.mark.req("R13")
def test_work_of_other_sessions_counts_in_a_branch() -> None:
    scene = Scene("dtx", "q", Queue("other"), limits=Limits(transaction_work_max=20))
    held = scene.hold(30)
    scene.begin()
    other = scene.attach()
    joined = other.call("dtx.start", xid=BRANCH, join=True)
    assert joined is not None
    assert joined.status == OK
    for _ in range(15):
        other.state.transfer("", b"", key="other", accept_mode=1)
    scene.world.pump()
    scene.session.accept(*held[:6])
    # The branch is rollback-only, and the messages that were not accepted in it are held as before.
    assert scene.status("end", BRANCH) == ROLLED_BACK
    scene.session.release(*held)
    assert scene.world.stats("q").requeued == 30


# --- steps ------------------------------------------------------------------------------------------


@pytest.mark.req("R12")
@pytest.mark.parametrize("outcome", ["release", "reject", None])
def test_a_rollback_settles_many_messages_in_steps(outcome: str | None) -> None:
    scene = Scene("tx", "q")
    held = scene.hold(1_000)
    scene.session.call("message.cancel", destination="d")
    scene.session.accept(*held)
    if outcome is not None:
        scene.session.done(
            scene.session.send(f"message.{outcome}", transfers=[(held[0], held[-1])])
        )
    state = scene.session.state
    number = state.send("tx.rollback", sync=True)
    after = state.send("queue.query", queue="q", sync=True)
    seen: set[int] = set()
    while not scene.is_complete(number):
        assert not scene.is_complete(after)
        scene.turn()
        seen.add(scene.world.stats("q").acquired)
    if outcome is None:
        assert seen == {1_000}
    else:
        assert len(seen) > 5
        assert scene.world.stats("q").acquired == 0
    result = scene.session.done(after)
    assert result is not None
    assert result.message_count == (1_000 if outcome == "release" else 0)


@pytest.mark.req("R12")
def test_a_queue_deleted_between_the_steps_of_a_rollback_takes_its_messages() -> None:
    scene = Scene("tx", "q", "other")
    held = scene.hold(500)
    scene.session.call("message.cancel", destination="d")
    scene.session.accept(*held)
    scene.session.done(scene.session.send("message.release", transfers=[(held[0], held[-1])]))
    number = scene.session.state.send("tx.rollback", sync=True)
    while scene.world.stats("q").acquired == 500:
        scene.turn()
    assert not scene.is_complete(number)
    scene.world.host.space().delete("q")
    scene.session.done(number)
    scene.post(1, "other")
    scene.commit()
    assert scene.world.stats("other").available == 1


@pytest.mark.req("R12")
@pytest.mark.parametrize("outcome", ["release", "reject"])
def test_a_session_that_ends_between_the_steps_of_a_rollback_keeps_its_outcomes(
    outcome: str,
) -> None:
    scene = Scene("tx", "q")
    held = scene.hold(500)
    scene.session.call("message.cancel", destination="d")
    scene.session.accept(*held)
    # The client holds the last message as before, so that it is requeued in any case.
    scene.session.done(scene.session.send(f"message.{outcome}", transfers=[(held[0], held[-2])]))
    scene.session.state.send("tx.rollback", sync=True)
    while scene.world.stats("q").acquired == 500:
        scene.turn()
    assert 1 < scene.world.stats("q").acquired < 500
    scene.session.client.cut()
    stats = scene.world.stats("q")
    assert stats.acquired == 0
    assert stats.available == (1 if outcome == "reject" else 500)


class Returning(Scene):
    """A session whose branch, with very many accepted messages, is being rolled back by *command*.

    The queue has got back some of the messages, and the command is not complete.
    """

    COUNT = 6_000

    def __init__(self, command: str) -> None:
        super().__init__("dtx", "q", "other")
        self.second = self.attach()
        held = self.hold(self.COUNT)
        self.session.call("message.cancel", destination="d")
        self.begin()
        self.session.accept(*held)
        state = self.session.state
        if command == "end":
            self.number = state.send("dtx.end", xid=BRANCH, fail=True, sync=True)
        else:
            assert self.status("end", BRANCH) == OK
            if command == "prepared":
                assert self.status("prepare", BRANCH) == OK
            self.number = state.send("dtx.rollback", xid=BRANCH, sync=True)
        while self.world.stats("q").acquired == self.COUNT:
            assert not self.is_complete(self.number)
            self.session.client.step()
        assert 0 < self.world.stats("q").acquired < self.COUNT
        self.session.client.step()
        assert not self.is_complete(self.number)


@pytest.fixture(params=["end", "rollback", "prepared"])
def returning(request: pytest.FixtureRequest) -> Returning:
    return Returning(str(request.param))


@pytest.mark.req("R13")
def test_the_rollback_of_a_branch_completes_when_the_queue_has_all_messages_back(
    returning: Returning,
) -> None:
    while not returning.is_complete(returning.number):
        before = returning.world.stats("q").acquired
        returning.turn()
    assert before > 0
    assert returning.world.stats("q").available == returning.COUNT


@pytest.mark.req("R13")
def test_a_queue_deleted_while_a_branch_is_rolled_back_lets_that_complete(
    returning: Returning,
) -> None:
    returning.world.host.space().delete("q")
    returning.session.done(returning.number)
    # The session goes on.
    assert returning.status("start", OTHER) == OK
    returning.post(1, "other")
    assert returning.status("end", OTHER) == OK
    assert returning.status("commit", OTHER, one_phase=True) == OK
    assert returning.world.stats("other").available == 1


@plain_only
@pytest.mark.req("R13")
def test_an_error_of_the_queue_while_a_branch_is_rolled_back_lets_that_complete(
    returning: Returning, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = returning.world.host.space().get("q").intake.node

    def fail(*args: object) -> None:
        raise OSError("the disk fails")

    monkeypatch.setattr(queue, "conclude", fail)
    returning.turn()
    assert not returning.is_complete(returning.number)
    monkeypatch.undo()
    returning.session.done(returning.number)
    assert returning.world.host.space().get("q").stats().failure is not None


@pytest.mark.req("R13")
def test_a_session_that_ends_while_its_branch_is_rolled_back_loses_nothing(
    returning: Returning,
) -> None:
    returning.session.client.cut()
    stats = returning.world.stats("q")
    assert (stats.available, stats.acquired) == (returning.COUNT, 0)


@pytest.mark.req("R13")
def test_a_broker_that_stops_while_a_branch_is_rolled_back_finishes_that(
    returning: Returning,
) -> None:
    returning.world.host.turns.finish()
    stats = returning.world.stats("q")
    assert (stats.available, stats.acquired) == (returning.COUNT, 0)
    returning.session.client.step()
    assert returning.is_complete(returning.number)


@pytest.mark.req("R13")
def test_a_branch_that_failed_is_rolled_back_when_the_queue_has_all_messages_back() -> None:
    returning = Returning("end")
    # Its session has made it rollback-only; another rolls it back at once.
    other = returning.second
    number = other.state.send("dtx.rollback", xid=BRANCH, sync=True)
    other.client.step()
    assert returning.world.stats("q").acquired > 0
    assert not other.state.is_complete(number)
    result = other.done(number)
    assert result is not None
    assert result.status == OK
    assert returning.world.stats("q").available == returning.COUNT


@plain_only
@pytest.mark.parametrize("name", ["accept", "release", "reject", "acquire"])
def test_held_messages_are_looked_through_in_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene("tx", "q", "other")
    held = scene.hold(3_000)
    command = f"message.{name}"
    if name == "acquire":
        scene.session.call("message.cancel", destination="d")
        scene.session.call("message.release", transfers=[(held[0], held[-1])])
        scene.session.subscribe("q", "copies", acquire_mode=1, flow_mode=CREDIT)
        assert len(scene.session.messages()) == 3_000
    monkeypatch.setattr(order, "_WORK_MAX", 5)
    number = scene.session.state.send(command, transfers=[(1 << 28, 1 << 30)], sync=True)
    turns = 0
    while not scene.is_complete(number):
        scene.turn()
        turns += 1
    assert turns > 5


# --- transfers that wait ----------------------------------------------------------------------------


@pytest.mark.req("R12", "R13")
@pytest.mark.parametrize("waits_for", ["room", "right"])
def test_a_rollback_drops_transfers_that_wait(kind: str, waits_for: str) -> None:
    scene = Scene(kind, Queue("q", length_max=2))
    scene.ask()
    if waits_for == "right":
        scene.session.client.holds = holds = []
    scene.begin()
    sent = scene.post(25)
    assert not scene.is_complete(sent[-1])
    scene.roll_back()
    assert all(map(scene.is_complete, sent))
    if waits_for == "right":
        scene.session.client.holds = None
        for link in holds:
            scene.session.client.place(link)
        scene.world.pump()
    # No link waits for room, and none holds any.
    intake = scene.world.host.space().find("q").intake
    assert not intake.producers
    assert intake.promised == 0
    assert scene.world.stats("q").available == 0
    # Others publish, and the session does again, in a new transaction.
    scene.world.publish("q", b"first")
    scene.begin()
    scene.post(1)
    scene.commit()
    scene.session.subscribe("q")
    assert scene.session.bodies() == [b"first", b"posted"]


@pytest.mark.req("R13")
def test_transfers_from_before_a_branch_stay_though_it_is_rolled_back() -> None:
    scene = Scene("dtx", Queue("q", length_max=2))
    scene.ask()
    outside = scene.post(3)
    scene.begin()
    inside = scene.post(3)
    scene.roll_back()
    assert all(map(scene.is_complete, inside))
    assert not scene.is_complete(outside[-1])
    scene.session.subscribe("q", messages=10)
    assert len(scene.session.messages()) == 2
    scene.session.accept(*(each.id for each in scene.session.state.messages if each.id is not None))
    scene.session.done(outside[-1])
    assert len(scene.session.messages()) == 1


@pytest.mark.req("R13")
def test_another_branch_fails_without_the_transfers_of_the_present_one() -> None:
    scene = Scene("dtx", Queue("q", length_max=2))
    scene.ask()
    assert scene.status("start", OTHER) == OK
    assert scene.status("end", OTHER, suspend=True) == OK
    scene.world.publish("q", b"1", b"2")
    scene.begin()
    (sent,) = scene.post(1)
    assert scene.status("end", OTHER, fail=True) == ROLLED_BACK
    assert not scene.is_complete(sent)
    other = scene.attach()
    other.subscribe("q")
    other.accept(*(each.id for each in other.messages() if each.id is not None))
    scene.session.done(sent)
    scene.commit()
    assert other.bodies() == [b"posted"]
