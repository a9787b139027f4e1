"""Branches against a few lists: whatever sessions do with them, both agree on every answer and message."""

from __future__ import annotations

from typing import Any

import pytest
from branching import XaSession, xid_of
from brokers import World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runs import machine_settings

from amqp_rt.broker.branches.endings import BranchEndings
from amqp_rt.broker.branches.states import REPLIES, Operation, Reply, State
from amqp_rt.broker.nodes import Queue
from amqp_rt.message import Message
from amqp_rt.transactions import XaStatus, Xid

XIDS = [xid_of(number) for number in range(3)]
CONDITIONS = {
    Reply.NOT_ALLOWED: "amqp:not-allowed",
    Reply.NOT_FOUND: "amqp:not-found",
    Reply.ILLEGAL: "amqp:illegal-state",
}
ILLEGAL = "amqp:illegal-state"
#: Ends of branches: their methods and arguments.
ENDS: dict[Operation, tuple[str, dict[str, bool]]] = {
    Operation.PREPARE: ("prepare", {}),
    Operation.COMMIT: ("commit", {}),
    Operation.COMMIT_ONE: ("commit", {"one_phase": True}),
    Operation.ROLL_BACK: ("roll_back", {}),
    Operation.FORGET: ("forget", {}),
}
#: Demarcations likewise.
STARTS = {
    Operation.START: {},
    Operation.JOIN: {"join": True},
    Operation.RESUME: {"resume": True},
}
STOPS = {Operation.END: {}, Operation.FAIL: {"fail": True}, Operation.SUSPEND: {"suspend": True}}


class Known:
    """A branch of the model."""

    def __init__(self, now: float) -> None:
        #: Number of each session → whether it is active.
        self.sessions: dict[int, bool] = {}
        self.posts: list[int] = []
        self.consumed: list[int] = []
        self.prepared = False
        #: Status with which it is dead, or was decided.
        self.dead: XaStatus | None = None
        self.decided: XaStatus | None = None
        self.deadline = now + 60
        self.forget_at = 0.0

    def state_for(self, session: int) -> State:
        if self.decided is not None:
            return State.HEURISTIC
        if self.prepared:
            return State.PREPARED
        if self.dead is not None:
            return State.DEAD
        if not self.sessions:
            return State.IDLE
        active = self.sessions.get(session)
        if active is None:
            active = any(self.sessions.values())
        return State.ACTIVE if active else State.SUSPENDED


class BranchModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(Queue("from"), Queue("to"), volatile=True)
        self.sessions = [XaSession(self.world.host) for _ in range(3)]
        #: Session → the branch in which it works.
        self.current: dict[int, Xid] = {}
        self.known: dict[Xid, Known] = {}
        #: Messages in ``from``, in their order, and in ``to``.
        self.available = list(range(10))
        self.arrived: list[int] = []
        self.bodies = 10
        for body in self.available:
            self.world.host.space().publish("from", Message(body).encode())

    # --- The model ---

    @property
    def now(self) -> float:
        return self.world.time.now

    def undo(self, branch: Known) -> None:
        self.available = sorted(self.available + branch.consumed)
        branch.consumed, branch.posts = [], []

    def apply(self, branch: Known) -> None:
        self.arrived += branch.posts
        branch.consumed, branch.posts = [], []

    def kill(self, branch: Known, status: XaStatus) -> None:
        """Make *branch* dead."""
        if branch.dead is None and not branch.prepared:
            branch.dead = status
            branch.forget_at = self.now + 60
            self.undo(branch)

    def leave(self, session: int, xid: Xid) -> None:
        if self.current.get(session) == xid:
            del self.current[session]

    def reply(self, operation: Operation, session: int, xid: Xid) -> Any:
        """Return the expected answer; OK if the operation is carried out."""
        branch = self.known.get(xid)
        state = State.UNKNOWN if branch is None else branch.state_for(session)
        reply = REPLIES[operation][state]
        if reply in CONDITIONS:
            return CONDITIONS[reply]
        if branch is None or reply is Reply.OK:
            return XaStatus.OK
        return branch.dead if reply is Reply.DEAD else branch.decided

    # --- What may happen ---

    @rule(
        session=st.integers(0, 2),
        xid=st.sampled_from(XIDS),
        operation=st.sampled_from(list(STARTS)),
    )
    def start(self, session: int, xid: Xid, operation: Operation) -> None:
        expected = self.reply(operation, session, xid)
        branch = self.known.get(xid)
        if expected is XaStatus.OK and (
            session in self.current
            or (
                operation is Operation.RESUME and (branch is None or session not in branch.sessions)
            )
        ):
            expected = ILLEGAL
        assert self.sessions[session].demarcate("start", xid, **STARTS[operation]) == expected
        if expected is XaStatus.OK:
            branch = self.known.setdefault(xid, Known(self.now))
            branch.sessions[session] = True
            self.current[session] = xid

    @rule(
        session=st.integers(0, 2),
        xid=st.sampled_from(XIDS),
        operation=st.sampled_from(list(STOPS)),
    )
    def stop(self, session: int, xid: Xid, operation: Operation) -> None:
        expected = self.reply(operation, session, xid)
        branch = self.known.get(xid)
        mine = branch is not None and session in branch.sessions
        if not mine:
            expected = ILLEGAL
        elif operation is Operation.FAIL and expected is XaStatus.OK:
            expected = XaStatus.ROLLED_BACK
        assert self.sessions[session].demarcate("end", xid, **STOPS[operation]) == expected
        if isinstance(expected, XaStatus):
            assert branch is not None
            self.leave(session, xid)
            if operation is Operation.SUSPEND and expected is XaStatus.OK:
                branch.sessions[session] = False
                return
            del branch.sessions[session]
            if operation is Operation.FAIL:
                self.kill(branch, XaStatus.ROLLED_BACK)

    @rule(
        session=st.integers(0, 2), xid=st.sampled_from(XIDS), operation=st.sampled_from(list(ENDS))
    )
    def end(self, session: int, xid: Xid, operation: Operation) -> None:
        expected = self.reply(operation, session, xid)
        branch = self.known.get(xid)
        if branch is not None and branch.sessions and not isinstance(expected, str):
            expected = ILLEGAL
        if branch is not None and branch.dead is not None and isinstance(expected, XaStatus):
            if operation is not Operation.PREPARE or branch.dead is XaStatus.TIMED_OUT:
                del self.known[xid]
            if operation is Operation.ROLL_BACK and branch.dead is XaStatus.ROLLED_BACK:
                expected = XaStatus.OK
        elif expected is XaStatus.OK:
            assert branch is not None
            if operation is Operation.PREPARE:
                branch.prepared = True
            else:
                del self.known[xid]
                if operation in {Operation.COMMIT, Operation.COMMIT_ONE}:
                    self.apply(branch)
                else:
                    self.undo(branch)
        method, options = ENDS[operation]
        assert self.sessions[session].now(method, xid, **options) == expected

    @rule(session=st.integers(0, 2))
    def post(self, session: int) -> None:
        self.bodies += 1
        self.sessions[session].post("to", self.bodies, durable=False)
        if session not in self.current:
            self.arrived.append(self.bodies)
            return
        branch = self.known[self.current[session]]
        if branch.dead is None:
            branch.posts.append(self.bodies)

    @precondition(lambda self: self.available)
    @rule(session=st.integers(0, 2))
    def consume(self, session: int) -> None:
        branch = self.known[self.current[session]] if session in self.current else None
        if branch is not None and branch.dead is not None:
            return
        body = self.sessions[session].consume("from")
        assert body == self.available.pop(0)
        if branch is not None:
            branch.consumed.append(body)

    @rule(session=st.integers(0, 2))
    def close(self, session: int) -> None:
        self.sessions[session].close()
        self.sessions[session] = XaSession(self.world.host)
        self.current.pop(session, None)
        for branch in self.known.values():
            if branch.sessions.pop(session, None) is not None:
                self.kill(branch, XaStatus.ROLLED_BACK)

    @rule(seconds=st.sampled_from([1, 30, 61]))
    def wait(self, seconds: int) -> None:
        self.world.time.now += seconds
        self.world.host.sweep()
        for xid, branch in list(self.known.items()):
            if branch.prepared or branch.decided is not None:
                continue
            if branch.dead is not None:
                if branch.forget_at <= self.now and not branch.sessions:
                    del self.known[xid]
            elif branch.deadline <= self.now:
                self.kill(branch, XaStatus.TIMED_OUT)

    @rule(xid=st.sampled_from(XIDS), seconds=st.sampled_from([0, 10, 100]))
    def set_timeout(self, xid: Xid, seconds: int) -> None:
        branch = self.known.get(xid)
        if branch is not None:
            self.sessions[0].branches.set_timeout(xid, seconds)
            branch.deadline = self.now + (seconds or 60)

    @precondition(
        lambda self: any(each.prepared and not each.decided for each in self.known.values())
    )
    @rule(data=st.data(), commit=st.booleans())
    def decide(self, data: st.DataObject, commit: bool) -> None:
        ready = [xid for xid, each in self.known.items() if each.prepared and not each.decided]
        xid = data.draw(st.sampled_from(ready))
        branch = self.known[xid]
        branches = self.world.host.services.branches
        found = branches.find("", xid)
        assert found is not None
        answers: list[Any] = []
        BranchEndings(branches).decide(found, commit=commit, done=answers.append)
        branch.decided = XaStatus.HEURISTIC_COMMIT if commit else XaStatus.HEURISTIC_ROLLBACK
        assert answers == [branch.decided]
        if commit:
            self.apply(branch)
        else:
            self.undo(branch)

    # --- What always holds ---

    def left(self, address: str) -> list[int]:
        return [Message.decode(each).body for each in self.world.peek(address, 1_000)]

    @invariant()
    def agree(self) -> None:
        assert self.left("from") == self.available
        assert self.left("to") == self.arrived
        acquired = sum(len(each.consumed) for each in self.known.values())
        assert self.world.stats("from").acquired == acquired
        doubt = [xid for xid, each in self.known.items() if each.prepared]
        assert sorted(self.sessions[0].recovered()) == sorted(doubt)
        for number, session in enumerate(self.sessions):
            assert (session.branches.txn_id is None) is (number not in self.current)

    def teardown(self) -> None:
        self.world.check()


BranchModel.TestCase.settings = machine_settings()
TestBranchModel = pytest.mark.slow(pytest.mark.req("R13")(BranchModel.TestCase))
