"""Distributed transactions (0-10 §dtx): commands, results and exceptions of class dtx over a connection."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import worlds091
from amqp_rt_amqp010.branches import branch_id
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.layouts import ErrorCode, Xid
from amqp_rt_amqp091 import Front as Front091
from amqp_rt_amqp091 import methods as m
from octets010 import Struct, plain
from protocol010 import Session, xid
from worlds010 import Client, World

from amqp_rt import Container
from amqp_rt.broker.branches.endings import BranchEndings
from amqp_rt.broker.branches.peers import PeerBranches
from amqp_rt.broker.nodes import Queue
from amqp_rt.events import Peer
from amqp_rt.fronts import DEFAULT_LIMITS, Error, Limits, XaStatus
from amqp_rt.fronts import Xid as BranchId
from amqp_rt.security.access import Rights

BRANCH = xid(b"global", b"branch", 7)
KEY = BranchId(7, b"global", b"branch")
OK, RB, TIMEOUT = 0, 1, 2
ILLEGAL, NOT_ALLOWED, NOT_FOUND = 409, 530, 404
INVALID, NOT_IMPLEMENTED, LIMIT = 542, 540, 506


class Rules:
    """Rights of the peers: any, unless *denied*."""

    def __init__(self) -> None:
        self.denied = False

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        return Error("amqp:unauthorized-access")

    def decide_anywhere(self, peer: Peer) -> Error | None:
        return Error("amqp:unauthorized-access") if self.denied else None


class Scene:
    """A broker with a queue, and a session that has selected dtx."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, selected: bool = True) -> None:
        self.world = World(limits)
        self.world.host.space().declare(Queue("q"))
        self.rules = Rules()
        self.client = self.connect()
        self.session = self.client.session()
        if selected:
            self.run("select")

    def connect(self) -> Client:
        branches = partial(PeerBranches, self.world.host.services.branches, rights=self.rules)
        return self.world.connect(branches=branches)

    def run(self, command: str, session: Session | None = None, **fields: Any) -> Any:
        """Carry out a command; return the status of its result, if it has one."""
        result = self.client.run(session or self.session, f"dtx.{command}", **fields)
        return (
            result.status if isinstance(result, Struct) and result.name == "xa-result" else result
        )

    def fails(self, command: str, **fields: Any) -> int:
        return self.client.fails(self.session, f"dtx.{command}", **fields)

    def transfer(self, body: bytes) -> None:
        self.session.transfer("", body, key="q", accept_mode=1)
        self.client.pump()

    @property
    def available(self) -> int:
        return self.world.stats("q").available

    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.host.sweep()


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.req("R13")
@pytest.mark.parametrize("one_phase", [True, False])
def test_transfers_have_their_effect_with_the_commit(scene: Scene, one_phase: bool) -> None:
    scene.transfer(b"outside")
    assert scene.run("start", xid=BRANCH) == OK
    scene.transfer(b"one")
    assert scene.run("end", xid=BRANCH) == OK
    scene.transfer(b"outside")
    assert scene.available == 2
    if not one_phase:
        assert scene.run("prepare", xid=BRANCH) == OK
    assert scene.run("commit", xid=BRANCH, one_phase=one_phase) == OK
    assert scene.available == 3
    assert scene.fails("commit", xid=BRANCH) == NOT_FOUND


@pytest.mark.req("R13")
def test_commands_of_one_chunk_are_carried_out_in_their_order(scene: Scene) -> None:
    session = scene.session
    numbers = [session.send("dtx.start", xid=BRANCH)]
    session.transfer("", b"one", key="q", accept_mode=1)
    numbers.append(session.send("dtx.end", xid=BRANCH))
    session.transfer("", b"outside", key="q", accept_mode=1)
    numbers.append(session.send("dtx.prepare", xid=BRANCH))
    numbers.append(session.send("dtx.rollback", xid=BRANCH, sync=True))
    scene.client.pump()
    assert [plain(session.result(number)) for number in numbers] == [
        Struct("xa-result", status=OK)
    ] * 4
    assert scene.available == 1


@pytest.mark.req("R13")
def test_work_is_suspended_and_resumed(scene: Scene) -> None:
    other = xid(b"other", b"", 1)
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    assert scene.run("end", xid=BRANCH, suspend=True) == OK
    assert scene.run("start", xid=other) == OK
    scene.transfer(b"two")
    # A suspended one may be ended, too; work goes on in the other.
    assert scene.run("end", xid=BRANCH) == OK
    scene.transfer(b"three")
    assert scene.run("end", xid=other, suspend=True) == OK
    assert scene.run("start", xid=other, resume=True) == OK
    scene.transfer(b"four")
    assert scene.run("end", xid=other) == OK
    assert scene.run("commit", xid=BRANCH, one_phase=True) == OK
    assert scene.available == 1
    assert scene.run("commit", xid=other, one_phase=True) == OK
    assert scene.available == 4


@pytest.mark.req("R13")
def test_other_sessions_join_and_end_a_branch(scene: Scene) -> None:
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    other = scene.client.session(b"other")
    scene.run("select", other)
    assert scene.run("start", other, xid=BRANCH, join=True) == OK
    other.transfer("", b"two", key="q", accept_mode=1)
    scene.client.pump()
    assert scene.run("end", other, xid=BRANCH) == OK
    assert scene.run("end", xid=BRANCH) == OK
    # To end one takes no select: a coordinator need not work in any.
    third = scene.client.session(b"third")
    assert scene.run("prepare", third, xid=BRANCH) == OK
    assert scene.run("commit", third, xid=BRANCH) == OK
    assert scene.available == 2


@pytest.mark.req("R13")
def test_the_end_of_a_session_makes_its_branches_rollback_only(scene: Scene) -> None:
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    scene.session.detach()
    scene.client.pump()
    scene.session = scene.client.session(b"other")
    assert scene.run("prepare", xid=BRANCH) == RB
    assert scene.run("rollback", xid=BRANCH) == OK
    assert scene.available == 0


@pytest.mark.req("R13")
def test_a_detached_session_keeps_its_work(scene: Scene) -> None:
    session = scene.client.session(b"lasting", timeout=60)
    scene.run("select", session)
    scene.run("start", session, xid=BRANCH)
    session.transfer("", b"one", key="q", accept_mode=1)
    scene.client.pump()
    scene.client.lose()
    scene.client = scene.connect()
    scene.client.resume(session)
    session.transfer("", b"two", key="q", accept_mode=1)
    scene.client.pump()
    assert scene.run("end", session, xid=BRANCH) == OK
    assert scene.run("commit", session, xid=BRANCH, one_phase=True) == OK
    assert scene.available == 2


@pytest.mark.req("R13")
def test_failed_work_is_rolled_back(scene: Scene) -> None:
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    assert scene.run("end", xid=BRANCH, fail=True) == RB
    assert scene.run("start", xid=BRANCH, join=True) == RB
    scene.transfer(b"outside")
    assert scene.available == 1
    assert scene.run("commit", xid=BRANCH) == RB


@pytest.mark.req("R13")
def test_timeouts_are_seconds_and_overdue_work_is_rolled_back(scene: Scene) -> None:
    scene.run("start", xid=BRANCH)
    assert plain(scene.run("get-timeout", xid=BRANCH)) == Struct("get-timeout-result", timeout=60)
    assert scene.run("set-timeout", xid=BRANCH, timeout=100) is None
    assert scene.run("get-timeout", xid=BRANCH).timeout == 100
    scene.run("set-timeout", xid=BRANCH, timeout=0)
    assert scene.run("get-timeout", xid=BRANCH).timeout == 60
    scene.transfer(b"one")
    scene.wait(61)
    assert scene.run("end", xid=BRANCH) == TIMEOUT
    assert scene.run("commit", xid=BRANCH) == TIMEOUT
    assert scene.available == 0


@pytest.mark.req("R13")
def test_recover_returns_an_array_of_xids(scene: Scene) -> None:
    assert plain(scene.run("recover").in_doubt) == []
    others = [xid(b"g" * 64, b"b" * 64, 2**32 - 2), xid(b"", b"", 0)]
    for each in (BRANCH, *others):
        scene.run("start", xid=each)
        scene.run("end", xid=each)
        if each is not BRANCH:
            scene.run("prepare", xid=each)
    assert plain(scene.run("recover").in_doubt) == others
    scene.run("rollback", xid=others[0])
    assert plain(scene.run("recover").in_doubt) == others[1:]


@pytest.mark.req("R13")
@pytest.mark.parametrize("commit", [True, False])
def test_a_decision_of_an_operator_is_reported_until_it_is_forgotten(
    scene: Scene, commit: bool
) -> None:
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    scene.run("end", xid=BRANCH)
    scene.run("prepare", xid=BRANCH)
    branches = scene.world.host.services.branches
    branch = branches.find("", KEY)
    assert branch is not None
    answers: list[Any] = []
    BranchEndings(branches).decide(branch, commit=commit, done=answers.append)
    status = XaStatus.HEURISTIC_COMMIT if commit else XaStatus.HEURISTIC_ROLLBACK
    assert answers == [status]
    assert scene.run("commit", xid=BRANCH) == status
    assert scene.run("rollback", xid=BRANCH) == status
    assert scene.available == commit
    assert scene.run("forget", xid=BRANCH) is None
    assert scene.fails("forget", xid=BRANCH) == NOT_FOUND


#: Commands that fail for a session which has a branch that is active → their codes.
REFUSED: list[tuple[str, dict[str, Any], int]] = [
    ("start", {}, NOT_ALLOWED),
    ("start", {"join": True, "resume": True}, NOT_ALLOWED),
    ("start", {"resume": True}, ILLEGAL),
    ("end", {"suspend": True, "fail": True}, NOT_ALLOWED),
    ("prepare", {}, ILLEGAL),
    ("commit", {}, ILLEGAL),
    ("commit", {"one_phase": True}, ILLEGAL),
    ("rollback", {}, ILLEGAL),
    ("forget", {}, ILLEGAL),
]


@pytest.mark.req("R13")
@pytest.mark.parametrize(
    ("command", "flags", "code"),
    [pytest.param(*row, id=" ".join((row[0], *row[1]))) for row in REFUSED],
)
def test_commands_out_of_order_are_refused(
    scene: Scene, command: str, flags: dict[str, Any], code: int
) -> None:
    scene.run("start", xid=BRANCH)
    assert scene.fails(command, xid=BRANCH, **flags) == code
    assert scene.session.exception is not None
    assert scene.session.exception.class_code == 6


@pytest.mark.req("R13")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("end", ILLEGAL),
        ("prepare", NOT_FOUND),
        ("commit", NOT_FOUND),
        ("rollback", NOT_FOUND),
        ("forget", NOT_FOUND),
        ("get-timeout", NOT_FOUND),
        ("set-timeout", NOT_FOUND),
    ],
)
def test_unknown_branches_are_refused(scene: Scene, command: str, code: int) -> None:
    more = {"timeout": 1} if command == "set-timeout" else {}
    assert scene.fails(command, xid=BRANCH, **more) == code


@pytest.mark.req("R13")
@pytest.mark.parametrize("flag", ["join", "resume"])
def test_only_known_branches_are_joined_or_resumed(scene: Scene, flag: str) -> None:
    assert scene.fails("start", xid=BRANCH, **{flag: True}) == NOT_ALLOWED


# --- select ---


@pytest.mark.req("R13")
@pytest.mark.parametrize("command", ["start", "end"])
def test_select_is_required_for_work(command: str) -> None:
    scene = Scene(selected=False)
    assert scene.fails(command, xid=BRANCH) == ILLEGAL


@pytest.mark.req("R13")
def test_select_may_be_repeated(scene: Scene) -> None:
    scene.run("start", xid=BRANCH)
    scene.run("select")
    scene.transfer(b"one")
    assert scene.run("end", xid=BRANCH) == OK
    assert scene.available == 0


@pytest.mark.req("R13")
@pytest.mark.parametrize(("first", "second"), [("tx", "dtx"), ("dtx", "tx")])
def test_a_session_has_one_kind_of_transactions(first: str, second: str) -> None:
    scene = Scene(selected=False)
    scene.client.run(scene.session, f"{first}.select")
    assert scene.client.fails(scene.session, f"{second}.select") == ILLEGAL


@pytest.mark.req("R13")
@pytest.mark.parametrize("command", ["select", "recover"])
def test_a_peer_without_any_right_has_no_branches(command: str) -> None:
    scene = Scene(selected=False)
    scene.rules.denied = True
    assert scene.fails(command) == ErrorCode.UNAUTHORIZED_ACCESS


@pytest.mark.req("R13")
@pytest.mark.parametrize("command", ["select", "recover", "prepare"])
def test_a_container_without_a_broker_has_none(command: str) -> None:
    client = World().connect()
    fields = {"xid": BRANCH} if command == "prepare" else {}
    assert client.fails(client.session(), f"dtx.{command}", **fields) == NOT_IMPLEMENTED


# --- xids, bounds ---


@pytest.mark.req("R13")
@pytest.mark.parametrize("command", ["start", "end", "prepare", "commit", "rollback", "forget"])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(None, id="absent"),
        pytest.param(Struct("xid", global_id=b"g", branch_id=b"b"), id="without format"),
        pytest.param(xid(b"g", b"b", 0xFFFFFFFF), id="null xid"),
        pytest.param(xid(b"g" * 65, b"", 1), id="long global id"),
        pytest.param(xid(b"", b"b" * 65, 1), id="long branch id"),
    ],
)
def test_a_wrong_xid_is_refused(scene: Scene, command: str, wrong: Struct | None) -> None:
    fields = {} if wrong is None else {"xid": wrong}
    assert scene.fails(command, **fields) == INVALID
    assert scene.session.exception is not None
    assert scene.session.exception.field_index == 0


@pytest.mark.req("R13")
def test_absent_ids_are_empty_and_an_absent_format_is_not_0() -> None:
    assert branch_id(Xid(format=0)) == BranchId(0, b"", b"")
    with pytest.raises(CommandFault, match="format"):
        branch_id(Xid(global_id=b"g", branch_id=b"b"))


@pytest.mark.req("R13")
@pytest.mark.parametrize("timeout", [None, 86_401])
def test_a_wrong_timeout_is_refused(scene: Scene, timeout: int | None) -> None:
    scene.run("start", xid=BRANCH)
    fields = {} if timeout is None else {"timeout": timeout}
    assert scene.fails("set-timeout", xid=BRANCH, **fields) == INVALID


@pytest.mark.req("R13")
def test_a_timeout_that_is_refused_is_told_in_whole_seconds(scene: Scene) -> None:
    scene.run("start", xid=BRANCH)
    assert scene.fails("set-timeout", xid=BRANCH, timeout=2**32 - 1) == INVALID
    assert scene.session.exception is not None
    assert "at most 86400 seconds, not 4294967295" in scene.session.exception.description


@pytest.mark.req("R13")
def test_there_are_so_many_branches_and_no_more() -> None:
    scene = Scene(Limits(branches_max=2))
    for number in range(2):
        scene.run("start", xid=xid(b"%d" % number))
        scene.run("end", xid=xid(b"%d" % number))
    assert scene.fails("start", xid=BRANCH) == LIMIT


@pytest.mark.req("R13")
def test_the_end_waits_for_transfers_that_wait_for_a_right(scene: Scene) -> None:
    """With ``authorize`` a link to the queue is attached first, and the transfer waits for that."""
    scene.client.holds = []
    scene.world.topologies.asks = lambda: True
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    number = scene.session.send("dtx.end", xid=BRANCH, sync=True)
    scene.client.pump()
    assert scene.client.holds
    assert not scene.session.is_complete(number)
    held, scene.client.holds = scene.client.holds, None
    for link in held:
        scene.client.place(link)
    scene.client.pump()
    assert scene.session.is_complete(number)
    assert scene.available == 0
    assert scene.run("commit", xid=BRANCH, one_phase=True) == OK
    assert scene.available == 1


def consumer_of_0_9_1(world: World) -> worlds091.Client:
    """Return a client of 0-9-1 that consumes from the queue."""
    # The same broker behind another front.
    there: Any = copy.copy(world)
    there.front = Front091()
    there.container = Container("server")
    made = worlds091.Client(there)
    made.open()
    made.say(1, m.BasicConsume(queue="q", no_ack=True))
    made.take()
    return made


@pytest.mark.req("R13")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_consumer_of_0_9_1_gets_what_was_committed(scene: Scene, end: str) -> None:
    consumer = consumer_of_0_9_1(scene.world)
    scene.run("start", xid=BRANCH)
    scene.transfer(b"one")
    scene.run("end", xid=BRANCH)
    scene.run("prepare", xid=BRANCH)
    assert not consumer.take()
    scene.run(end, xid=BRANCH)
    assert bool(consumer.take()) is (end == "commit")
    assert scene.available == 0


def subscribe(scene: Scene, session: Session, credit: int) -> None:
    client = scene.client
    client.run(
        session,
        "message.subscribe",
        queue="q",
        destination="d",
        accept_mode=0,
        acquire_mode=0,
    )
    for unit, value in ((1, 0xFFFFFFFF), (0, credit)):
        client.run(session, "message.flow", destination="d", unit=unit, value=value)


@pytest.mark.req("R13")
@pytest.mark.parametrize(
    ("end", "prepared"),
    [
        *(("commit", True), ("commit", False), ("rollback", True), ("rollback", False)),
        # A prepared one would not time out.
        ("timeout", False),
    ],
)
def test_accepts_have_their_effect_with_the_commit(scene: Scene, end: str, prepared: bool) -> None:
    session = scene.session
    scene.transfer(b"one")
    subscribe(scene, session, credit=10)
    (message,) = session.messages
    assert message.id is not None
    scene.run("start", xid=BRANCH)
    session.accept(message.id, sync=True)
    scene.client.pump()
    scene.run("end", xid=BRANCH)
    # It cannot be settled in another way any more.
    session.release(message.id)
    scene.client.pump()
    assert scene.world.stats("q").acquired == 1
    if prepared:
        assert scene.run("prepare", xid=BRANCH) == OK
    if end == "commit":
        assert scene.run("commit", xid=BRANCH, one_phase=not prepared) == OK
    elif end == "rollback":
        assert scene.run("rollback", xid=BRANCH) == OK
    else:
        scene.wait(61)
    scene.client.pump()
    if end == "commit":
        assert len(session.messages) == 1
        assert scene.world.stats("q").acquired == 0
        return
    # It is requeued, and the consumer gets it once more.
    again = session.messages[-1]
    assert len(session.messages) == 2
    assert again.body == b"one"
    assert again.header("delivery-properties").redelivered
    assert again.id is not None
    session.accept(again.id, sync=True)
    scene.client.pump()
    assert (scene.available, scene.world.stats("q").acquired) == (0, 0)


@pytest.mark.req("R13")
def test_a_release_has_its_effect_at_once(scene: Scene) -> None:
    session = scene.session
    scene.transfer(b"one")
    subscribe(scene, session, credit=1)
    (message,) = session.messages
    assert message.id is not None
    scene.run("start", xid=BRANCH)
    session.release(message.id)
    scene.client.pump()
    assert scene.available == 1
    scene.run("end", xid=BRANCH)
    assert scene.run("rollback", xid=BRANCH) == OK
    assert scene.available == 1
