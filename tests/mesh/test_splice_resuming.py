"""Links that are suspended and resumed over nodes that join them: cut conversations, and maps that pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chains import Chain
from kept import Inbox, Outbox, Store, frames_of
from wire import transfer

from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, RELEASED, Error, Received
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.unsettled import Unsettled, UnsettledMap

pytestmark = pytest.mark.req("P3", "P5")

#: As the destination agrees to keep them.
TARGET = Target(address="q", timeout=60)
SOURCE = Source(address="q", timeout=60)
#: Frames of 512 octets: every third message takes four, and a map of more than ten entries does not fit.
SMALL = Limits(frame_size_max=512, session_window=16)
BODIES = [
    b"\x00\x53\x75\xa0\x01" + bytes([n])
    if n % 3
    else b"\x00\x53\x75\xb0\x00\x00\x05\xdc" + bytes([n]) * 1500
    for n in range(6)
]
#: A connection of the path is lost, and nodes learn of it; all are lost at once; or the client has given up its connection,
#: and no node has noticed when it attaches again over other nodes.
ALL, STALE = -1, -2
#: The last two conditions are those of a node of the chain which has no connection to the next one.
_LOST = (
    "amqp:connection:forced",
    "amqp:link:detach-forced",
    "amqp:link:stolen",
    "amqp:illegal-state",
    "amqp:not-found",
)


class Sender(Outbox):
    """Sender's endpoint, which learns no other outcome than the receiver's."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        assert error is None or error.condition in _LOST, error
        self.over = link


class Receiver(Inbox):
    """Receiver's endpoint."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        assert error is None or error.condition in _LOST, error
        self.over = link


class _Served(Chain):
    """Chain whose server accepts links with *serve*."""

    def __init__(self, serve: Callable[[Any], None], nodes: int, limits: Limits) -> None:
        self._serve = serve
        super().__init__(nodes, limits=limits)

    def serve(self, link: Any) -> None:
        self._serve(link)


class Talk:
    """Conversation over nodes, frame by frame, as by ``test_resuming.Conversation``.

    Args:
        store: What both ends keep.
        client_sends: The client is the sender; otherwise the server is.
        before: Conversations that may still use the server's terminus.
    """

    def __init__(
        self,
        store: Store,
        *,
        client_sends: bool,
        nodes: int = 2,
        limits: Limits = SMALL,
        before: Sequence[Talk] = (),
    ) -> None:
        self.store = store
        self.client_sends = client_sends
        self.out, self.box = Sender(store), Receiver(store)
        self.mine, self.theirs = (self.out, self.box) if client_sends else (self.box, self.out)
        self.before = before
        self.rounds = 0
        #: The client has come back elsewhere.
        self.replaced = False
        self.chain = _Served(self.serve, nodes, limits)
        self._queues: dict[tuple[int, bool], list[bytes]] = {}
        self.attach()

    def serve(self, link: Any) -> None:
        """Accept the link at the server, which takes over its terminus."""
        if self.replaced:
            link.refuse(Error("amqp:link:stolen"))
            return
        self.chain.links.append(link)
        for each in self.before:
            each.steal()
        if self.client_sends:
            link.accept(self.box, target=TARGET, unsettled=self.store.target or {})
        else:
            link.accept(self.out, source=SOURCE, unsettled=self.store.source or {})

    def steal(self) -> None:
        """End the server's link, as another one takes over its terminus."""
        if self.theirs.over is None and self.chain.links:
            stale = self.chain.links[-1]
            stolen = Error("amqp:link:stolen")
            stale.detach(stolen)
            stale.end(stolen, False)
        self.keep(self.theirs)

    def attach(self) -> None:
        """Attach the client's link, with what it remembers."""
        session = self.chain.sessions[0]
        if self.client_sends:
            session.attach_sender(
                "l", self.out, target=TARGET, rcv_settle_mode=1, unsettled=self.store.source
            )
        else:
            session.attach_receiver(
                "l", self.box, source=SOURCE, rcv_settle_mode=1, unsettled=self.store.target
            )

    def keep(self, *ends: Any) -> None:
        """Keep the unsettled deliveries of links that have ended."""
        for end in ends:
            if end.over is not None:
                link, end.over = end.over, None
                if end is self.out:
                    self.store.keep_source(link)
                else:
                    self.store.keep_target(link)

    def carry(self) -> bool:
        """Carry a frame of each joint in each direction, in turn; return whether there was any."""
        moved = False
        for at, joint in enumerate(self.chain.joints):
            for back, ours, other in (
                (False, joint.client, joint.server),
                (True, joint.server, joint.client),
            ):
                queue = self._queues.setdefault((at, back), [])
                queue.extend(frames_of(b"".join(ours.take())))
                if queue and self.carried < self.most:
                    joint._handle(other.receive(queue.pop(0), 0.0), [])
                    self.carried += 1
                    moved = True
        return moved

    def run(self, most: int = 1_000_000) -> int:
        """Carry up to *most* frames; return the number carried."""
        self.most, self.carried = most, 0
        while self.carry() or self.carried < most:
            if self.busy():
                continue
            if self.out.over is not None and self.box.over is not None:
                # Suspended because a map was incomplete: attach again.
                self.rounds += 1
                self.keep(self.out, self.box)
                self.attach()
            elif self.store.in_hand:
                self.box.process()
            else:
                break
        return self.carried

    def busy(self) -> bool:
        """Return whether anything is on its way."""
        return any(self._queues.values()) or any(
            engine._dirty or engine._queued or engine.output
            for joint in self.chain.joints
            for engine in (joint.client, joint.server)
        )

    def calm_down(self) -> None:
        """Carry whatever is on its way."""
        self.most = 1_000_000
        while self.carry() or self.busy():
            pass

    def cut(self, place: int) -> None:
        """Lose a connection, or all; then both ends keep what they remember."""
        joints = self.chain.joints
        if place == STALE:
            joints[0].client.receive_eof(0.0)
            joints[0].client.take()
            self.keep(self.mine)
            return
        for at in range(len(joints)) if place == ALL else [place]:
            for back in (False, True):
                self._queues.pop((at, back), None)
            self.chain.cut(at)
        # The other nodes learn of it.
        self.calm_down()
        self.keep(self.out, self.box)
        self.chain.check_empty()

    def follow_up(self) -> None:
        """Carry on after the client has come back elsewhere: nothing of this may count any more."""
        self.replaced = True
        self.calm_down()
        self.chain.cut(0)
        self.calm_down()
        self.chain.check_empty()


def restart(store: Store) -> None:
    """Restart the processes at both ends, which keep only the content of their stores."""
    store.in_hand.clear()
    for entry in (store.target or {}).values():
        if entry.delivery is not None:
            entry.state = entry.delivery.local_state
    for kept in (store.source, store.target):
        for entry in (kept or {}).values():
            entry.delivery = None


@pytest.mark.slow
@pytest.mark.parametrize("client_sends", [True, False], ids=["client sends", "server sends"])
@pytest.mark.parametrize("place", [0, 1, 2, ALL, STALE])
def test_cut_after_every_frame_each_message_is_processed_once(
    client_sends: bool, place: int, long_run: bool
) -> None:
    """The link is attached again over other nodes, which know nothing of it, and cut once more."""
    first = Talk(Store(BODIES, lazy=False), client_sends=client_sends)
    frames = first.run()
    assert first.store.done
    for cut in range(0, frames, 1) if long_run else range(place + 2, frames, 5):
        lazy, again = cut % 2 == 0, 5 + cut * 7 % 60
        store = Store(BODIES, lazy=lazy)
        before: list[Talk] = []
        for most, where in ((cut, place), (again, place), (1_000_000, ALL)):
            talk = Talk(store, client_sends=client_sends, before=before)
            talk.run(most)
            talk.cut(where)
            if where == STALE:
                before.append(talk)
            elif cut % 3 == 0:
                restart(store)
        for each in before:
            each.follow_up()
        assert sorted(store.processed) == sorted(BODIES), (cut, again)
        assert sorted(store.settled) == sorted(BODIES), (cut, again)
        assert store.done, (cut, again)


MANY = [b"\x00\x53\x75\xa0\x01" + bytes([n]) for n in range(150)]


@pytest.mark.parametrize("client_sends", [True, False], ids=["client sends", "server sends"])
def test_incomplete_maps_pass(client_sends: bool) -> None:
    """Deliveries that the maps name are resumed, until the rest can be named (Part 2 §2.6.13)."""
    rounds = 0
    for cut in (100, 300, 500):
        store = Store(MANY, lazy=True, credit=150)
        for most in (cut, 90, 1_000_000):
            talk = Talk(store, client_sends=client_sends)
            talk.run(most)
            talk.cut(ALL)
            rounds += talk.rounds
        assert sorted(store.processed) == MANY, cut
        assert sorted(store.settled) == MANY, cut
        assert store.done, cut
    assert rounds >= 3


def kept_chain(nodes: int = 2) -> Chain:
    """Return a chain whose server keeps its terminus, as the client asks."""
    chain = Chain(nodes, served=Recorder(credit=10))
    chain.accept_options = {"unsettled": {}}
    return chain


def test_the_loss_of_a_link_gives_no_outcomes_where_the_destination_keeps_its_terminus() -> None:
    chain = kept_chain()
    mine = Recorder()
    link = chain.sessions[0].attach_sender("l", mine, target=TARGET, unsettled={})
    chain.pump()
    link.send(b"x" * 10)
    chain.pump()
    chain.cut(1)
    chain.pump()
    assert mine.outcomes == []
    ((error, closed),) = mine.detached
    assert (error and error.condition, closed) == ("amqp:link:detach-forced", False)
    assert list(link.remember()) == [each.tag for each in link.unsettled] != []
    # The server suspends its link too.
    ((error, closed),) = chain.served.detached
    assert not closed
    chain.check_empty()


@pytest.mark.parametrize("client_sends", [True, False], ids=["client sends", "server sends"])
def test_a_client_suspends_its_link_and_the_destination_keeps_what_is_unsettled(
    client_sends: bool,
) -> None:
    chain = kept_chain()
    mine = Recorder(credit=5)
    session = chain.sessions[0]
    if client_sends:
        link = session.attach_sender("l", mine, target=TARGET, rcv_settle_mode=1, unsettled={})
    else:
        link = session.attach_receiver("l", mine, source=SOURCE, rcv_settle_mode=1, unsettled={})
    chain.pump()
    (theirs,) = chain.links
    tag = (link if client_sends else theirs).send(b"x").tag
    chain.pump()
    link.detach(closed=False)
    chain.pump()
    assert mine.outcomes == chain.served.outcomes == []
    assert chain.served.detached == [(None, False)]
    assert list(link.remember()) == list(theirs.remember()) == [tag]
    chain.check_empty()


def test_a_closed_link_has_outcomes_although_the_destination_keeps_its_terminus() -> None:
    chain = kept_chain()
    mine = Recorder()
    link = chain.sessions[0].attach_sender("l", mine, target=TARGET, unsettled={})
    chain.pump()
    link.send(b"x")
    chain.pump()
    chain.links[0].detach(Error("amqp:resource-deleted"))
    chain.pump()
    assert [each.state for each in mine.outcomes] == [MODIFIED_FAILED]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (None, None),
        (None, {}),
        ({}, None),
        ({b"a": None, b"b": ACCEPTED, b"c": Received(1, 2)}, {b"c": ACCEPTED, b"d": RELEASED}),
    ],
)
def test_maps_pass_as_they_are(ours: Any, theirs: Any) -> None:
    """No map is not the same as an empty one."""
    seen: list[Any] = []

    def serve(link: Any) -> None:
        seen.append(link.remote_unsettled)
        link.accept(Recorder(), unsettled=entries(theirs))

    chain = _Served(serve, 2, Limits())
    mine = Recorder()
    chain.sessions[0].attach_sender("l", mine, target=TARGET, unsettled=entries(ours))
    chain.pump()
    assert seen == [ours]
    (link,) = mine.attached
    assert link.resumed is (ours is not None and theirs is not None)
    if link.resumed:
        # Only the server has no record of the first.
        assert {each.tag: each.state for each in mine.outcomes} == {b"b": ACCEPTED, b"c": ACCEPTED}
        assert [each.tag for each in link.unknown] == [b"a"]
    for splice in chain.splices:
        assert splice.inlet.remote_unsettled is splice.outlet.remote_unsettled is None


def entries(states: dict[bytes, Any] | None, **fields: Any) -> UnsettledMap | None:
    """Return the memory of a link that has a map with *states*."""
    if states is None:
        return None
    return {tag: Unsettled(tag=tag, state=state, **fields) for tag, state in states.items()}


def test_an_abort_of_what_cannot_be_resumed_passes() -> None:
    """The sender has no payload any more, and the receiver has half of the message (rows 7 and 9)."""
    half = entries({b"t": None}, payload=BODIES[0][:700], complete=False)

    def serve(link: Any) -> None:
        served.append(link)
        link.accept(Recorder(), unsettled=half)

    served: list[Any] = []
    chain = _Served(serve, 2, Limits())
    mine = Recorder()
    chain.sessions[0].attach_sender("l", mine, target=TARGET, unsettled=entries({b"t": None}))
    chain.pump()
    assert [each.tag for each in mine.attached[0].unknown] == [b"t"]
    chain.cut(0)
    chain.pump()
    assert served[0].remember() == {}
    chain.check_empty()


def test_resumptions_without_maps_are_ignored() -> None:
    """Ignore ``resume`` of a transfer on a link that was not resumed, where it has no meaning (§2.7.5)."""
    chain = Chain(1)
    chain.sender()
    session = chain.sessions[0]
    handle = next(iter(session.links))
    wire = transfer(0, b"x", tag=b"t", resume=True, handle=handle)
    joint = chain.joints[0]
    joint._handle(joint.server.receive(wire, 0.0), [])
    chain.pump()
    assert chain.served.deliveries == []
    assert chain.links[0].attached


def test_a_map_that_a_node_cannot_pass_whole_is_incomplete_for_both() -> None:
    many = {n.to_bytes(4, "big"): None for n in range(100)}
    seen: list[bool] = []

    def serve(link: Any) -> None:
        seen.append(link.remote_incomplete)
        assert 10 < len(link.remote_unsettled) < 100
        link.accept(Recorder(), unsettled=entries(many, payload=b""))

    chain = _Served(serve, 1, Limits())
    chain.joints[1].client.frame_size_out = 512
    mine = Recorder()
    link = chain.sessions[0].attach_sender(
        "l", mine, target=TARGET, unsettled=entries(many, payload=b"x")
    )
    chain.pump()
    assert seen == [True]
    assert link.incomplete


def test_a_client_with_frames_too_small_for_the_answer_is_told() -> None:
    many = {n.to_bytes(4, "big"): None for n in range(100)}
    served = Recorder()

    def serve(link: Any) -> None:
        link.accept(served, target=TARGET, unsettled=entries(many, payload=b""))

    chain = _Served(serve, 1, Limits())
    chain.joints[0].server.frame_size_out = 512
    mine = Recorder()
    chain.sessions[0].attach_sender("l", mine, target=TARGET, unsettled={})
    chain.pump()
    ((error, closed),) = mine.detached
    assert (error and error.condition, closed) == ("amqp:frame-size-too-small", False)
    assert [closed for _, closed in served.detached] == [False]
    chain.check_empty()
