"""Branches of distributed transactions: the reply of each operation in each state, and what becomes of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from branching import OpenRights, XaSession, xid_of
from brokers import World

from amqp_rt.broker.branches.endings import BranchEndings
from amqp_rt.broker.branches.states import State
from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import Source
from amqp_rt.transactions import TransactionalState, XaStatus

XID = xid_of(1)
OK, RB, TIMEOUT = XaStatus.OK, XaStatus.ROLLED_BACK, XaStatus.TIMED_OUT
NOT_FOUND, NOT_ALLOWED = "amqp:not-found", "amqp:not-allowed"
ILLEGAL = "amqp:illegal-state"


class Scene:
    """A broker with a queue, and a session that has a branch in some state."""

    def __init__(self, **options: Any) -> None:
        self.world = World(Queue("to"), Queue("from"), volatile=True, **options)
        self.host = self.world.host
        self.session = self.another()

    def another(self, user: str = "user", **options: Any) -> XaSession:
        return XaSession(self.host, user, **options)

    def put(self, *bodies: Any, address: str = "from") -> None:
        for body in bodies:
            self.host.space().publish(address, Message(body, durable=True).encode())

    def left(self, address: str = "to") -> list[Any]:
        """Return the messages that are available at *address*."""
        return [Message.decode(each).body for each in self.world.peek(address, 100)]

    def wait(self, seconds: float) -> None:
        self.world.time.now += seconds
        self.host.sweep()

    def state(self) -> State:
        branch = self.host.services.branches.find("", XID)
        return State.UNKNOWN if branch is None else branch.state

    # --- Ways to each state ---

    def unknown(self) -> None:
        pass

    def active(self) -> None:
        assert self.session.branches.start(XID) is OK

    def suspended(self) -> None:
        self.active()
        assert self.session.branches.end(XID, suspend=True) is OK

    def idle(self) -> None:
        self.session.work(XID, 1)

    def rollback_only(self) -> None:
        self.active()
        assert self.session.branches.end(XID, fail=True) is RB

    def timed_out(self) -> None:
        self.idle()
        self.wait(61)

    def prepared(self) -> None:
        self.idle()
        assert self.session.now("prepare", XID) is OK

    def _decided(self, *, commit: bool) -> None:
        self.prepared()
        branch = self.host.services.branches.find("", XID)
        assert branch is not None
        endings = BranchEndings(self.host.services.branches)
        answers: list[Any] = []
        endings.decide(branch, commit=commit, done=answers.append)
        assert answers == [XaStatus.HEURISTIC_COMMIT if commit else XaStatus.HEURISTIC_ROLLBACK]

    def committed_by_operator(self) -> None:
        self._decided(commit=True)

    def rolled_back_by_operator(self) -> None:
        self._decided(commit=False)


#: Names of the operations → what does them.
OPERATIONS: dict[str, Callable[[XaSession], Any]] = {
    "start": lambda session: session.demarcate("start", XID),
    "join": lambda session: session.demarcate("start", XID, join=True),
    "resume": lambda session: session.demarcate("start", XID, resume=True),
    "end": lambda session: session.demarcate("end", XID),
    "end fail": lambda session: session.demarcate("end", XID, fail=True),
    "suspend": lambda session: session.demarcate("end", XID, suspend=True),
    "prepare": lambda session: session.now("prepare", XID),
    "commit one": lambda session: session.now("commit", XID, one_phase=True),
    "commit": lambda session: session.now("commit", XID),
    "rollback": lambda session: session.now("roll_back", XID),
    "forget": lambda session: session.now("forget", XID),
}
#: The table of the replies. "+" is xa-ok; "!" after it: the branch is unknown afterwards. An end of a branch
#: that is dead comes from a session that has no work there any more.
TABLE = """
            unknown active suspended idle rollback-only timed-out prepared heuristic
start       +       530    530       530  530           530       530      530
join        530     409    +         +    rb            to        409      409
resume      530     409    +         409  rb            to        409      409
end         409     +      +         409  409           409       409      409
end_fail    409     rb     rb        409  409           409       409      409
suspend     409     +      409       409  409           409       409      409
prepare     404     409    409       +    rb            to!       409      409
commit_one  404     409    409       +!   rb!           to!       409      heur
commit      404     409    409       409  rb!           to!       +!       heur
rollback    404     409    409       +!   +!            to!       +!       heur
forget      404     409    409       409  409           409       409      +!
"""
REPLIES = {
    "+": OK,
    "rb": RB,
    "to": TIMEOUT,
    "530": NOT_ALLOWED,
    "404": NOT_FOUND,
    "409": ILLEGAL,
    "heur": XaStatus.HEURISTIC_COMMIT,
}
WAYS = {
    "unknown": Scene.unknown,
    "active": Scene.active,
    "suspended": Scene.suspended,
    "idle": Scene.idle,
    "rollback-only": Scene.rollback_only,
    "timed-out": Scene.timed_out,
    "prepared": Scene.prepared,
    "heuristic": Scene.committed_by_operator,
}
ROWS = [line.split() for line in TABLE.strip().splitlines()]
CELLS = [
    pytest.param(operation.replace("_", " "), state, cell, id=f"{operation}-{state}")
    for operation, *cells in ROWS[1:]
    for state, cell in zip(ROWS[0], cells, strict=True)
]


@pytest.mark.req("R13")
@pytest.mark.parametrize(("operation", "state", "cell"), CELLS)
def test_each_operation_has_its_reply_in_each_state(operation: str, state: str, cell: str) -> None:
    scene = Scene()
    WAYS[state](scene)
    assert OPERATIONS[operation](scene.session) == REPLIES[cell.rstrip("!")]
    assert (scene.state() is State.UNKNOWN) is (
        cell.endswith("!") or (state == "unknown" and operation != "start")
    )


@pytest.mark.req("R13")
@pytest.mark.parametrize("operation", ["join", "prepare", "commit", "rollback", "forget"])
@pytest.mark.parametrize("state", ["active", "suspended"])
def test_a_branch_with_work_of_a_session_is_joined_by_others_and_not_ended(
    operation: str, state: str
) -> None:
    scene = Scene()
    WAYS[state](scene)
    other = scene.another()
    assert OPERATIONS[operation](other) == (OK if operation == "join" else ILLEGAL)


@pytest.mark.req("R13")
@pytest.mark.parametrize("operation", ["end", "end fail", "suspend", "resume"])
@pytest.mark.parametrize("state", ["active", "suspended", "idle"])
def test_work_is_ended_by_its_session_only(operation: str, state: str) -> None:
    scene = Scene()
    WAYS[state](scene)
    assert OPERATIONS[operation](scene.another()) == ILLEGAL


@pytest.mark.req("R13")
def test_a_session_that_has_suspended_its_work_resumes_it_while_others_continue() -> None:
    scene = Scene()
    scene.suspended()
    other = scene.another()
    assert other.branches.start(XID, join=True) is OK
    assert scene.session.demarcate("end", XID, suspend=True) == ILLEGAL
    assert scene.session.demarcate("start", XID, resume=True) is OK
    assert scene.session.branches.txn_id == other.branches.txn_id is not None


@pytest.mark.req("R13")
def test_a_session_works_in_one_branch_at_a_time() -> None:
    scene = Scene()
    scene.active()
    assert scene.session.demarcate("start", xid_of(2)) == ILLEGAL
    assert scene.session.branches.end(XID, suspend=True) is OK
    assert scene.session.demarcate("start", xid_of(2)) is OK
    assert scene.session.demarcate("start", XID, resume=True) == ILLEGAL
    assert len(scene.host.services.branches) == 2


@pytest.mark.req("R13")
@pytest.mark.parametrize("operation", ["start", "end"])
def test_flags_that_exclude_each_other_are_refused(operation: str) -> None:
    scene = Scene()
    scene.active()
    flags = ("join", "resume") if operation == "start" else ("fail", "suspend")
    assert scene.session.demarcate(operation, XID, **dict.fromkeys(flags, True)) == NOT_ALLOWED
    assert scene.state() is State.ACTIVE


@pytest.mark.req("R13")
@pytest.mark.parametrize("operation", ["end", "end fail", "suspend", "join", "resume"])
def test_a_session_learns_that_the_branch_in_which_it_works_timed_out(operation: str) -> None:
    scene = Scene()
    scene.active()
    scene.session.post("to", 1)
    scene.wait(61)
    assert scene.state() is State.DEAD
    other = scene.another()
    assert other.now("roll_back", XID) == ILLEGAL
    assert OPERATIONS[operation](scene.session) is TIMEOUT
    if operation not in {"join", "resume"}:
        assert scene.session.branches.txn_id is None
        assert other.now("roll_back", XID) is TIMEOUT
    else:
        # It still has to end its work.
        scene.wait(1_000)
        assert scene.session.demarcate("end", XID) is TIMEOUT


# --- Work ---


@pytest.mark.req("R13")
@pytest.mark.parametrize("one_phase", [True, False])
def test_work_takes_effect_with_the_commit(one_phase: bool) -> None:
    scene = Scene()
    scene.put("a", "b")
    session = scene.session
    session.branches.start(XID)
    assert session.consume("from") == "a"
    assert [each.outcome for each in session.post("to", "new")] == [ACCEPTED]
    session.branches.end(XID)
    if not one_phase:
        assert session.now("prepare", XID) is OK
    assert (scene.left("from"), scene.left()) == (["b"], [])
    assert scene.another().now("commit", XID, one_phase=one_phase) is OK
    assert (scene.left("from"), scene.left()) == (["b"], ["new"])
    stats = scene.world.stats("from")
    assert (stats.acquired, stats.accepted) == (0, 1)


@pytest.mark.req("R13")
@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("left", ["attached", "detached", "closed"])
def test_a_rollback_requeues_what_was_consumed_and_drops_what_was_posted(
    prepared: bool, left: str
) -> None:
    scene = Scene()
    scene.put("a", "b")
    session = scene.session
    session.branches.start(XID)
    delivery = session.take("from")
    assert delivery is not None
    session.accept(delivery)
    session.post("to", "new")
    session.branches.end(XID)
    if prepared:
        assert session.now("prepare", XID) is OK
    if left == "detached":
        session.detach("from")
    elif left == "closed":
        session.close()
    other = scene.another()
    assert other.now("roll_back", XID) is OK
    assert (scene.left("from"), scene.left()) == (["a", "b"], [])
    # The consumer cannot settle it any more.
    assert delivery.settled or left != "attached"
    assert scene.world.stats("to").bytes == 0
    assert other.consume("from") == "a"


@pytest.mark.req("R13")
def test_work_outside_of_a_branch_is_not_transactional() -> None:
    scene = Scene()
    session = scene.session
    session.post("to", 1)
    session.work(XID, 2)
    session.post("to", 3)
    assert scene.left() == [1, 3]
    session.branches.start(XID, join=True)
    session.post("to", 4)
    session.branches.end(XID, suspend=True)
    session.post("to", 5)
    session.branches.start(XID, resume=True)
    session.post("to", 6)
    session.branches.end(XID)
    assert scene.left() == [1, 3, 5]
    assert session.now("commit", XID, one_phase=True) is OK
    assert scene.left() == [1, 3, 5, 2, 4, 6]


@pytest.mark.req("R13")
def test_work_of_a_session_that_ends_makes_its_branches_rollback_only() -> None:
    scene = Scene()
    scene.put("a")
    session = scene.session
    session.branches.start(XID)
    session.consume("from")
    session.post("to", 1)
    session.branches.end(XID, suspend=True)
    session.branches.start(xid_of(2))
    session.post("to", 2)
    assert scene.left("from") == []
    session.close()
    assert (scene.left("from"), scene.left()) == (["a"], [])
    other = scene.another()
    for xid in (XID, xid_of(2)):
        assert other.now("prepare", xid) is RB
        assert other.now("commit", xid) is RB
        assert other.now("commit", xid) == NOT_FOUND


@pytest.mark.req("R13")
def test_a_link_of_another_session_cannot_work_in_the_branch() -> None:
    scene = Scene()
    scene.active()
    txn_id = scene.session.branches.txn_id
    assert txn_id is not None
    sender = scene.world.client().sender("to")
    sender.link.send(Message(1).encode(), state=TransactionalState(txn_id))
    scene.world.pump()
    assert sender.error == "amqp:transaction:unknown-id"


@pytest.mark.req("R13")
def test_other_consumers_get_nothing_of_a_branch_before_its_end() -> None:
    scene = Scene()
    scene.put("a")
    scene.session.branches.start(XID)
    scene.session.consume("from")
    scene.session.post("to", "b")
    scene.session.branches.end(XID)
    assert scene.session.now("prepare", XID) is OK
    client = scene.world.client()
    receivers = {address: client.receiver(address, credit=10) for address in ("from", "to")}
    assert [each.bodies for each in receivers.values()] == [[], []]
    assert scene.session.now("commit", XID) is OK
    scene.world.pump()
    assert [each.bodies for each in receivers.values()] == [[], ["b"]]


@pytest.mark.req("R13")
def test_a_delivery_that_gets_an_outcome_outside_of_the_branch_makes_it_rollback_only() -> None:
    scene = Scene()
    scene.put("a")
    session = scene.session
    session.branches.start(XID)
    delivery = session.take("from")
    assert delivery is not None
    session.accept(delivery)
    session.branches.end(XID)
    session.accept(delivery)
    assert scene.state() is State.DEAD
    assert session.now("commit", XID, one_phase=True) is RB


@pytest.mark.req("R13")
def test_a_prepared_branch_is_committed_though_its_consumers_are_gone() -> None:
    scene = Scene()
    scene.put("a")
    session = scene.session
    session.branches.start(XID)
    session.consume("from")
    session.branches.end(XID)
    assert session.now("prepare", XID) is OK
    session.close()
    assert scene.left("from") == []
    assert scene.another().now("commit", XID) is OK
    assert (scene.left("from"), scene.world.stats("from").acquired) == ([], 0)


@pytest.mark.req("R13")
def test_a_topic_gives_its_subscribers_what_a_branch_posted() -> None:
    scene = Scene()
    scene.host.space().declare(Topic("news"))
    receiver = scene.world.client().receiver(None, source=Source(address="news"), credit=5)
    scene.session.work(XID, "a", address="news")
    assert scene.session.now("prepare", XID) is OK
    assert receiver.bodies == []
    assert scene.session.now("commit", XID) is OK
    scene.world.pump()
    assert receiver.bodies == ["a"]


# --- Time ---


@pytest.mark.req("R13")
def test_a_branch_that_takes_too_long_is_undone_at_once_and_remembered_for_a_while() -> None:
    scene = Scene()
    scene.put("a")
    scene.session.branches.start(XID)
    scene.session.consume("from")
    scene.session.post("to", 1)
    scene.session.branches.end(XID)
    scene.wait(59)
    assert scene.left("from") == []
    scene.wait(2)
    assert (scene.left("from"), scene.left()) == (["a"], [])
    scene.wait(59)
    assert scene.session.demarcate("start", XID, join=True) is TIMEOUT
    scene.wait(2)
    assert scene.session.now("commit", XID) == NOT_FOUND


@pytest.mark.req("R13")
def test_a_timeout_counts_from_when_it_is_set() -> None:
    scene = Scene()
    branches = scene.session.branches
    scene.idle()
    assert branches.timeout(XID) == 60
    scene.wait(50)
    branches.set_timeout(XID, 100)
    assert branches.timeout(XID) == 100
    scene.wait(99)
    assert scene.state() is State.IDLE
    branches.set_timeout(XID, 0)
    assert branches.timeout(XID) == 60
    scene.wait(59)
    assert scene.state() is State.IDLE
    scene.wait(2)
    assert scene.state() is State.DEAD


@pytest.mark.req("R13")
def test_a_timeout_has_a_bound_and_a_branch() -> None:
    scene = Scene(limits=Limits(branch_timeout_max_s=100))
    scene.idle()
    scene.session.branches.set_timeout(XID, 100)
    with pytest.raises(AmqpError, match="at most 100 seconds") as raised:
        scene.session.branches.set_timeout(XID, 101)
    assert raised.value.condition == "amqp:invalid-field"
    assert scene.session.branches.timeout(XID) == 100
    for call in (
        lambda: scene.session.branches.timeout(xid_of(2)),
        lambda: scene.session.branches.set_timeout(xid_of(2), 1),
    ):
        with pytest.raises(AmqpError, match="no branch"):
            call()


@pytest.mark.req("R13")
def test_prepared_branches_never_time_out() -> None:
    scene = Scene()
    scene.prepared()
    scene.session.branches.set_timeout(XID, 1)
    scene.wait(1_000_000)
    assert scene.state() is State.PREPARED
    assert scene.session.now("commit", XID) is OK
    assert scene.left() == [1]


# --- Users, bounds, listing ---


@pytest.mark.req("R13")
def test_branches_belong_to_their_user_and_virtual_host() -> None:
    scene = Scene(virtual_hosts=["", "berlin"])
    scene.prepared()
    rights = OpenRights("operator")
    for other in (
        scene.another("other"),
        scene.another("other", rights=rights),
        scene.another(virtual_host="berlin"),
    ):
        assert other.now("commit", XID) == NOT_FOUND
        assert other.now("roll_back", XID) == NOT_FOUND
        assert other.demarcate("start", XID, join=True) == NOT_ALLOWED
        assert other.recovered() == []
        with pytest.raises(AmqpError, match="no branch"):
            other.branches.timeout(XID)
    # The xid is taken, in its virtual host only.
    other = scene.another("other")
    assert other.demarcate("start", XID) == NOT_ALLOWED
    # How far the other user has come is not shown.
    with pytest.raises(AmqpError, match=r"start: branch .* is known \["):
        other.branches.start(XID)
    assert scene.another(virtual_host="berlin").demarcate("start", XID) is OK
    operator = scene.another("operator", rights=rights)
    assert operator.recovered() == [XID]
    assert operator.now("commit", XID) is OK


@pytest.mark.req("R13")
def test_a_peer_without_any_right_has_no_transactions() -> None:
    scene = Scene()
    scene.session.branches.check()
    with pytest.raises(AmqpError) as raised:
        scene.another("stranger").branches.check()
    assert raised.value.condition == "amqp:unauthorized-access"


@pytest.mark.req("R13")
def test_rights_are_those_of_the_connection_that_has_the_session_now() -> None:
    scene = Scene()
    scene.prepared()
    rights = OpenRights("operator")
    other = scene.another("other", rights=rights)
    assert other.recovered() == []
    rights.operators = ("other",)
    other.branches.moved(other.peer)
    assert other.recovered() == [XID]


@pytest.mark.req("R13")
def test_there_are_so_many_branches_and_no_more() -> None:
    scene = Scene(limits=Limits(branches_max=3))
    for number in (1, 2, 3):
        scene.session.work(xid_of(number), number)
    with pytest.raises(AmqpError, match="3 branches") as raised:
        scene.session.branches.start(xid_of(4))
    assert raised.value.condition == "amqp:resource-limit-exceeded"
    assert scene.session.branches.txn_id is None
    # Those that are only remembered make room, and others do not.
    assert scene.session.now("prepare", xid_of(1)) is OK
    scene.wait(61)
    scene.session.work(xid_of(4), 4)
    assert scene.session.now("commit", xid_of(2)) == NOT_FOUND
    assert scene.session.now("prepare", xid_of(3)) is TIMEOUT
    assert scene.session.now("commit", xid_of(1)) is OK
    assert scene.session.now("commit", xid_of(4), one_phase=True) is OK


@pytest.mark.req("R13")
def test_one_user_leaves_places_to_others() -> None:
    scene = Scene(limits=Limits(branches_max=3, branches_user_max=2))
    for number in (1, 2):
        scene.session.work(xid_of(number), number)
        assert scene.session.now("prepare", xid_of(number)) is OK
    with pytest.raises(AmqpError, match="the user has 2 branches") as raised:
        scene.session.branches.start(xid_of(3))
    assert raised.value.condition == "amqp:resource-limit-exceeded"
    scene.another("other").work(xid_of(3), 3)
    assert scene.session.now("commit", xid_of(1)) is OK
    assert scene.session.now("commit", xid_of(2)) is OK


@pytest.mark.req("R13")
def test_the_work_of_a_branch_is_bounded() -> None:
    scene = Scene(limits=Limits(transaction_work_max=2))
    scene.session.branches.start(XID)
    for body in (1, 2):
        assert scene.session.post("to", body)[0].outcome == ACCEPTED
    refused = scene.session.post("to", 3)[0]
    assert refused.outcome.error.condition == "amqp:resource-limit-exceeded"
    scene.session.branches.end(XID)
    assert scene.session.now("commit", XID, one_phase=True) is OK
    assert scene.left() == [1, 2]


@pytest.mark.req("R13")
def test_recover_lists_what_is_prepared_or_was_completed_by_an_operator() -> None:
    scene = Scene()
    scene.committed_by_operator()
    session = scene.session
    for number in (2, 3, 4):
        session.work(xid_of(number), number)
    assert session.now("prepare", xid_of(3)) is OK
    assert session.recovered() == [XID, xid_of(3)]
    assert session.now("forget", XID) is OK
    assert session.now("commit", xid_of(3)) is OK
    assert session.recovered() == []


@pytest.mark.req("R13")
@pytest.mark.parametrize("operation", ["commit", "commit one", "rollback"])
def test_a_decision_of_an_operator_answers_until_it_is_forgotten(operation: str) -> None:
    scene = Scene()
    scene.rolled_back_by_operator()
    assert scene.left() == []
    for _ in range(2):
        assert OPERATIONS[operation](scene.session) is XaStatus.HEURISTIC_ROLLBACK
    scene.wait(10_000)
    assert scene.session.recovered() == [XID]
    assert scene.session.now("forget", XID) is OK
    assert scene.state() is State.UNKNOWN


# --- Nodes with prepared work ---


@pytest.mark.req("R13")
@pytest.mark.parametrize("address", ["to", "from"])
def test_a_node_with_prepared_work_cannot_be_deleted(address: str) -> None:
    scene = Scene()
    scene.put("a")
    scene.session.branches.start(XID)
    scene.session.consume("from")
    scene.session.post("to", 1)
    scene.session.branches.end(XID)
    space = scene.host.space()
    assert scene.session.now("prepare", XID) is OK
    with pytest.raises(AmqpError, match="distributed transactions") as raised:
        space.delete(address)
    assert raised.value.condition == "amqp:precondition-failed"
    assert scene.session.now("commit", XID) is OK
    space.delete(address)
    assert not space.has(address)


@pytest.mark.req("R13")
def test_a_branch_that_is_not_prepared_does_not_keep_a_node() -> None:
    scene = Scene()
    scene.idle()
    scene.host.space().delete("to")
    assert scene.session.now("prepare", XID) is RB
    assert scene.session.now("roll_back", XID) is OK


@pytest.mark.req("R13")
@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_a_node_whose_deletion_is_due_stays_until_the_branch_has_ended(end: str) -> None:
    scene = Scene()
    space = scene.host.space()
    scene.prepared()
    space.delete_when_free("to")
    assert space.has("to")
    space.delete_when_free("from")
    assert not space.has("from")
    assert scene.session.now(end, XID) is OK
    assert not space.has("to")
