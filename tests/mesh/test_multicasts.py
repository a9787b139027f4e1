"""A link joined with several: every destination gets a copy, and the sender one outcome."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sanity import check, check_quiet

from amqp_rt.limits import DEFAULT_LIMITS, KIB, Limits
from amqp_rt.mesh.balance import combined
from amqp_rt.mesh.multicasts import Edge, Multicast
from amqp_rt.mesh.passing import SURGE
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, rejected
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState

pytestmark = pytest.mark.req("P2")
REJECTED = rejected("amqp:not-allowed", "no")


class Served(Recorder):
    """Destination that grants credit once, or refuses."""

    def __init__(self, credit: int, refusal: Error | None) -> None:
        super().__init__()
        self.first_credit = credit
        self.refusal = refusal
        self.options: dict[str, Any] = {}
        self.link: Any = None

    def serve(self, link: Any) -> None:
        self.link = link
        if self.refusal is not None:
            link.refuse(self.refusal)
        else:
            link.accept(self, **self.options)
            link.grant(self.first_credit)


class Tree:
    """A sender, a node, and its destinations; with ``deep`` a further node is before the last two of these."""

    def __init__(
        self,
        credits: tuple[int, ...] = (10, 10, 10),  # noqa: A002
        *,
        limits: Limits = DEFAULT_LIMITS,
        deep: bool = False,
        refusals: dict[int, Error] | None = None,
        **options: Any,
    ) -> None:
        self.limits = limits
        self.options = options
        self.joints: list[Joined] = []
        self.multicasts: list[Multicast] = []
        self.ended: list[Multicast] = []
        self.served = [
            Served(credit, (refusals or {}).get(at)) for at, credit in enumerate(credits)
        ]
        edges = [Edge(self.joined(each.serve), "e") for each in self.served]
        if deep:
            inner = edges[1:]
            edges = [edges[0], Edge(self.joined(self.splitting(inner)), "e")]
        self.session = self.joined(self.splitting(edges))
        self.mine = Recorder()

    def splitting(self, edges: list[Edge]) -> Any:
        def split(link: Any) -> None:
            self.multicasts.append(
                Multicast(
                    link, edges, limits=self.limits, on_ended=self.ended.append, **self.options
                )
            )

        return split

    def joined(self, on_attach: Any) -> Any:
        joint = Joined(limits=self.limits, on_attach=on_attach)
        joint.pump()
        self.joints.append(joint)
        return joint.client.begin()

    def sender(self, **options: Any) -> Any:
        link = self.session.attach_sender("s", self.mine, target=Target(address="q"), **options)
        self.pump()
        return link

    def pump(self) -> None:
        for _ in range(500):
            if not sum(self.carry(each) for each in self.joints):
                break
        else:
            raise AssertionError("the engines never stop talking")
        for joint in self.joints:
            check(joint.client)
            check(joint.server)
            check_quiet(joint.client, joint.server)
        # Each node has done what it can: another look finds nothing to do.
        for each in self.multicasts:
            if not each._inlet_over:
                each.advance(flowed=False)
        assert not any(each.client.take() or each.server.take() for each in self.joints)

    def carry(self, joint: Joined) -> bool:
        moved = False
        for ours, other in ((joint.client, joint.server), (joint.server, joint.client)):
            data = b"".join(ours.take())
            if data:
                moved = True
                joint._handle(other.receive(data, 0.0), [])
        return moved

    def cut(self, joint: Joined) -> None:
        joint.client.take()
        joint.server.take()
        joint.client.receive_eof(0.0)
        joint.server.receive_eof(0.0)
        self.pump()

    def check_empty(self) -> None:
        assert len(self.ended) == len(self.multicasts)
        for joint in self.joints:
            for engine in (joint.client, joint.server):
                assert engine.held == 0
                for session in engine.sessions.values():
                    assert not session.links
                    assert not session._outgoing
                    assert not session.incoming


@pytest.mark.req("P3")
@pytest.mark.parametrize("size", [10, 3 * KIB])
@pytest.mark.parametrize("settled", [False, True])
def test_a_message_that_arrives_when_the_last_branch_has_ended_is_released(
    settled: bool, size: int
) -> None:
    left: list[Any] = []
    tree = Tree((10,), limits=Limits(frame_size_max=KIB), on_left=left.append)
    link = tree.sender()
    # The message and the end of the only branch pass each other.
    sending = link.send(bytes(size), settled=settled)
    tree.served[0].link.detach()
    tree.carry(tree.joints[0])
    (multicast,) = tree.multicasts
    assert len(left) == 1
    tree.pump()
    assert sending.state == (None if settled else RELEASED)
    assert multicast.dropped == settled
    assert link.credit == 0
    link.detach()
    tree.pump()
    tree.check_empty()


@pytest.mark.parametrize("deep", [False, True])
def test_every_destination_gets_a_copy(deep: bool) -> None:
    tree = Tree(deep=deep)
    link = tree.sender()
    sending = link.send(b"\x00Soctets")
    tree.pump()
    assert [[each.payload for each in at.deliveries] for at in tree.served] == [
        [b"\x00Soctets"]
    ] * 3
    for at, each in enumerate(tree.served):
        assert not tree.mine.outcomes, at
        each.deliveries[0].settle(ACCEPTED)
        tree.pump()
    assert tree.mine.outcomes == [sending]
    assert sending.state == ACCEPTED
    assert sending.settled
    link.detach()
    tree.pump()
    tree.check_empty()


@pytest.mark.parametrize(
    ("outcomes", "wanted", "worst"),
    [
        ((ACCEPTED, REJECTED, RELEASED), REJECTED, REJECTED),
        ((RELEASED, MODIFIED_FAILED, ACCEPTED), ACCEPTED, MODIFIED_FAILED),
        ((RELEASED, MODIFIED_FAILED, RELEASED), MODIFIED_FAILED, MODIFIED_FAILED),
        ((RELEASED, RELEASED, RELEASED), RELEASED, RELEASED),
        ((RELEASED, RELEASED, ACCEPTED), ACCEPTED, RELEASED),
    ],
)
@pytest.mark.parametrize("as_worst", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_the_outcome_of_all(
    outcomes: Any, wanted: Any, worst: Any, as_worst: bool, deep: bool
) -> None:
    tree = Tree(deep=deep, worst=as_worst)
    sending = tree.sender().send(b"x")
    tree.pump()
    for each, outcome in zip(tree.served, outcomes, strict=True):
        each.deliveries[0].settle(outcome)
    tree.pump()
    assert sending.state == (worst if as_worst else wanted)


@pytest.mark.parametrize("deep", [False, True])
def test_the_credit_is_the_least(deep: bool) -> None:
    tree = Tree((10, 7, 3), deep=deep)
    link = tree.sender()
    assert link.credit == 3
    for _ in range(3):
        link.send(b"x")
    tree.pump()
    assert link.credit == 0
    tree.served[2].link.grant(100)
    tree.pump()
    assert link.credit == 4
    tree.served[1].link.grant(0)
    tree.pump()
    assert link.credit == 0


def test_the_credit_grows_while_messages_are_small() -> None:
    tree = Tree((500, 500), limits=Limits(frame_size_max=512, splice_bytes_max=4 * KIB))
    link = tree.sender()
    assert link.credit == 8, "each may take a frame"
    for _ in range(80):
        link.send(b"x")
        tree.pump()
    assert 4 * SURGE <= link.credit <= 8 * SURGE
    link.send(bytes(400))
    tree.pump()
    link.send(bytes(400))
    tree.pump()
    assert link.credit <= 10


def test_a_slow_branch_is_skipped_by_settled_messages() -> None:
    tree = Tree((10, 1), skip_slow=True)
    link = tree.sender(snd_settle_mode=1)
    assert link.credit == 10
    for at in range(5):
        link.send(b"%d" % at)
    tree.pump()
    assert [each.payload for each in tree.served[0].deliveries] == [b"0", b"1", b"2", b"3", b"4"]
    assert [each.payload for each in tree.served[1].deliveries] == [b"0"]
    assert tree.multicasts[0].skipped == 4
    tree.served[1].link.grant(1)
    tree.pump()
    link.send(b"5")
    tree.pump()
    assert tree.served[1].deliveries[-1].payload == b"5"


def test_a_slow_branch_is_not_skipped_by_unsettled_messages() -> None:
    tree = Tree((10, 1), skip_slow=True)
    assert tree.sender().credit == 1


def test_refusals_of_some_edges_leave_the_others() -> None:
    gone = Error("amqp:not-found", "no")
    tree = Tree(refusals={1: gone})
    link = tree.sender()
    assert link.attached
    sending = link.send(b"x")
    tree.pump()
    for at in (0, 2):
        tree.served[at].deliveries[0].settle(ACCEPTED)
    tree.pump()
    assert sending.state == ACCEPTED


def test_refusals_of_all_edges_refuse_the_sender() -> None:
    gone = Error("amqp:unauthorized-access", "no")
    tree = Tree(refusals=dict.fromkeys(range(3), gone))
    tree.sender()
    assert tree.mine.detached == [(gone, True)]
    assert not tree.mine.attached
    tree.check_empty()


@pytest.mark.parametrize("others", [ACCEPTED, RELEASED])
def test_a_lost_branch_counts_as_modified(others: Any) -> None:
    tree = Tree()
    link = tree.sender()
    sending = link.send(b"x")
    tree.pump()
    tree.cut(tree.joints[0])
    assert not tree.mine.detached
    for each in tree.served[1:]:
        each.deliveries[0].settle(others)
    tree.pump()
    assert sending.state == (ACCEPTED if others == ACCEPTED else MODIFIED_FAILED)
    # The rest of the tree goes on, with its credit.
    assert link.credit > 0
    again = link.send(b"y")
    tree.pump()
    for each in tree.served[1:]:
        each.deliveries[1].settle(RELEASED)
    tree.pump()
    assert again.state == RELEASED


def test_the_last_branch_ends_the_link() -> None:
    tree = Tree((5, 5))
    link = tree.sender()
    sending = link.send(b"x")
    tree.pump()
    tree.served[0].link.detach()
    tree.pump()
    assert not tree.mine.detached
    error = Error("amqp:resource-deleted", "gone")
    tree.served[1].link.detach(error)
    tree.pump()
    assert tree.mine.detached == [(error, True)]
    assert sending.state == MODIFIED_FAILED
    assert not link.attached
    tree.check_empty()


@pytest.mark.parametrize("settled", [False, True])
def test_messages_sent_just_before_the_detach_arrive(settled: bool) -> None:
    tree = Tree()
    link = tree.sender()
    for _ in range(10):
        link.send(bytes(100), settled=settled)
    link.detach()
    tree.pump()
    assert [len(each.deliveries) for each in tree.served] == [10, 10, 10]
    tree.check_empty()


def test_the_sender_may_settle_before_the_outcome() -> None:
    tree = Tree()
    sending = tree.sender().send(b"x")
    tree.pump()
    sending.settle()
    tree.pump()
    for each in tree.served:
        assert each.settled == each.deliveries
    assert not tree.mine.outcomes


@pytest.mark.parametrize("settled", [False, True])
def test_a_large_message_waits_for_the_slowest_branch(settled: bool) -> None:
    limits = Limits(frame_size_max=4096, session_window_bytes=64 * KIB, output_max=8 * KIB)
    tree = Tree((10, 10), limits=limits)
    for each in tree.served:
        each.options = {"streaming": True}
    link = tree.sender()
    sending = link.send(bytes(300_000), more=True, settled=settled)
    got = [0, 0]

    def read(at: int) -> None:
        got[at] += sum(map(len, tree.served[at].deliveries[0].read_chunks()))

    # Only the first destination reads; the node does not keep what the other has not taken.
    for _ in range(30):
        tree.pump()
        read(0)
    assert 0 < got[0] < 300_000
    node = tree.multicasts[0]
    kept = sum(
        len(chunk) for branch in node.branches for copy in branch.streams for chunk in copy.chunks
    )
    assert kept <= 64 * KIB
    for _ in range(60):
        tree.pump()
        read(0)
        read(1)
    assert got == [300_000, 300_000]
    sending.write(b"end", more=False)
    for _ in range(3):
        tree.pump()
        read(0)
        read(1)
    assert got == [300_003, 300_003]
    assert all(each.deliveries[0].complete for each in tree.served)
    if not settled:
        for each in tree.served:
            each.deliveries[0].settle(ACCEPTED)
        tree.pump()
        assert sending.state == ACCEPTED
    link.detach()
    tree.pump()
    tree.check_empty()


def test_a_stream_goes_on_without_a_lost_branch() -> None:
    tree = Tree((10, 10), limits=Limits(frame_size_max=4096))
    for each in tree.served:
        each.options = {"streaming": True}
    link = tree.sender()
    sending = link.send(bytes(20_000), more=True)
    tree.pump()
    tree.cut(tree.joints[0])
    sending.write(bytes(20_000), more=False)
    tree.pump()
    delivery = tree.served[1].deliveries[0]
    assert len(b"".join(delivery.read_chunks())) == 40_000
    delivery.settle(RELEASED)
    tree.pump()
    assert sending.state == MODIFIED_FAILED
    link.detach()
    tree.pump()
    tree.check_empty()


@pytest.mark.parametrize("lost", [False, True])
def test_an_abort_reaches_all_branches(lost: bool) -> None:
    tree = Tree((10, 10), limits=Limits(frame_size_max=4096))
    for each in tree.served:
        each.options = {"streaming": True}
    link = tree.sender()
    sending = link.send(bytes(20_000), more=True)
    tree.pump()
    if lost:
        tree.cut(tree.joints[-1])
    else:
        sending.abort()
        tree.pump()
    assert all(each.deliveries[0].aborted for each in tree.served)
    if not lost:
        link.send(b"next")
        tree.pump()
        assert all(len(each.deliveries) == 2 for each in tree.served)
        link.detach()
        tree.pump()
    tree.check_empty()


def test_messages_of_transactions_are_rejected() -> None:
    tree = Tree()
    sending = tree.sender().send(b"x", state=TransactionalState(b"t", None))
    tree.pump()
    assert sending.state.error.condition == "amqp:not-implemented"
    assert not any(each.deliveries for each in tree.served)


def test_a_drain_of_one_destination_is_answered() -> None:
    tree = Tree()
    link = tree.sender()
    tree.served[1].link.drain()
    tree.pump()
    assert tree.served[1].link.credit == 0
    assert link.credit == 0
    tree.served[1].link.grant(5)
    tree.pump()
    assert link.credit == 5


@pytest.mark.parametrize("seed", range(60))
def test_any_use_leaves_true_outcomes_and_nothing_else(seed: int) -> None:
    """Messages of all kinds, credit in any order, outcomes of any kind, and branches that are lost at any time."""
    chance = random.Random(seed)
    limits = Limits(frame_size_max=512, splice_bytes_max=4 * KIB, output_max=1)
    tree = Tree((4, 4, 4), limits=limits, deep=chance.random() < 0.5)
    for each in tree.served:
        each.options = {"streaming": True}
    link = tree.sender()
    sent: list[Any] = []
    lost = False

    def settle(each: Served, outcome: Any) -> None:
        for delivery in each.deliveries:
            delivery.read_chunks()
            if delivery.complete and delivery.link.attached and not delivery.settled:
                delivery.settle(delivery.local_state or outcome)

    for _ in range(80):
        served = chance.choice(tree.served)
        what = chance.randrange(12)
        if what < 3:
            served.link.grant(chance.choice([0, 1, 5, 20]))
        elif what < 7 and link.attached and link.credit and link._current is None:
            body = bytes(chance.choice([0, 100, 600, 3_000]))
            sent.append(link.send(body, settled=chance.random() < 0.3, more=chance.random() < 0.3))
        elif what < 8 and link.attached and link._current is not None:
            if chance.random() < 0.2:
                sent.pop().abort()
            else:
                sent[-1].write(bytes(chance.choice([0, 700])), more=chance.random() < 0.5)
        elif what < 10:
            settle(served, chance.choice([ACCEPTED, RELEASED, MODIFIED_FAILED, REJECTED]))
        elif what < 11:
            served.link.drain()
        elif chance.random() < 0.15:
            lost = True
            joint = chance.choice(tree.joints[:-1])
            joint.client.take()
            joint.server.take()
            joint.client.receive_eof(0.0)
            joint.server.receive_eof(0.0)
        for joint in tree.joints:
            if chance.random() < 0.6:
                tree.carry(joint)
        for multicast in tree.multicasts:
            assert multicast.held <= SURGE * limits.splice_bytes_max
    if link.attached and link._current is not None:
        sent[-1].write(b"", more=False)
    for _ in range(30):
        for each in tree.served:
            each.link.grant(50)
            settle(each, ACCEPTED)
        tree.pump()
    if link.attached:
        assert not [each for each in sent if not each.settled]
    if not lost:
        arrived = [[one for one in each.deliveries if not one.aborted] for each in tree.served]
        assert [len(each) for each in arrived] == [len(sent)] * 3
        for sending, *copies in zip(sent, *arrived, strict=True):
            if sending.state is not None:
                assert sending.state == combined([each.local_state for each in copies])
    link.detach()
    tree.pump()
    tree.check_empty()
