"""Client, nodes and server in a row, joined in memory: each node joins the links that come with links that it opens."""

from __future__ import annotations

from typing import Any

from sanity import check, check_quiet

from amqp_rt.errors import LocalProtocolError
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.mesh.passing import SURGE
from amqp_rt.mesh.splices import Siblings, Splice
from amqp_rt.outcomes import Error
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder

TARGET = Target(address="q")
SOURCE = Source(address="q")


class Chain:
    """Conversation of a client with a server over *nodes* nodes.

    ``joints[0]`` is the connection of the client with the first node, ``joints[-1]`` that of the last node with the server.
    The server's endpoint is ``served``, unless ``server`` refuses or accepts links in another way. The *options* are those of
    the nodes' splices.
    """

    def __init__(
        self, nodes: int = 3, *, limits: Limits = DEFAULT_LIMITS, served: Any = None, **options: Any
    ) -> None:
        self.limits = limits
        self.options = options
        self.served: Any = served or Recorder(credit=100)
        #: Links that the server was asked for.
        self.links: list[Any] = []
        self.splices: list[Splice] = []
        #: The client has one session.
        self.siblings = [Siblings() for _ in range(nodes)]
        self.ended: list[Splice] = []
        self.accept_options: dict[str, Any] = {}
        self.joints: list[Joined] = []
        #: Octets on their way in each direction.
        self._under_way = [(bytearray(), bytearray()) for _ in range(nodes + 1)]
        for at in range(nodes + 1):
            joint = Joined(limits=limits, on_attach=self._attaching(at, nodes))
            joint.pump()
            self.joints.append(joint)
        self.sessions = [joint.client.begin() for joint in self.joints]
        self.pump()

    def _attaching(self, at: int, nodes: int) -> Any:
        def splice(link: Any) -> None:
            try:
                joined = Splice(
                    link,
                    self.sessions[at + 1],
                    link.name,
                    limits=self.limits,
                    siblings=self.siblings[at],
                    **self.options,
                    on_ended=self.ended.append,
                )
            except LocalProtocolError as fault:
                link.refuse(Error.of(fault))
            else:
                self.splices.append(joined)

        return splice if at < nodes else self.serve

    def serve(self, link: Any) -> None:
        """Accept a link at the server; some tests replace this."""
        self.links.append(link)
        link.accept(self.served, **self.accept_options)

    def sender(self, **options: Any) -> tuple[Any, Recorder]:
        """Attach a link on which the client sends; return it with its endpoint."""
        mine = Recorder()
        link = self.sessions[0].attach_sender(
            options.pop("name", "l"), mine, target=TARGET, **options
        )
        self.pump()
        return link, mine

    def receiver(self, **options: Any) -> tuple[Any, Recorder]:
        """Attach a link on which the client receives; return it with its endpoint."""
        mine = Recorder()
        link = self.sessions[0].attach_receiver(
            options.pop("name", "l"), mine, source=SOURCE, **options
        )
        self.pump()
        return link, mine

    def step(self, at: int, size: int = 1 << 30) -> bool:
        """Carry up to *size* octets of joint *at* in each direction; return whether there were any."""
        joint = self.joints[at]
        moved = False
        for under_way, ours, other, seen in (
            (self._under_way[at][0], joint.client, joint.server, joint.server_events),
            (self._under_way[at][1], joint.server, joint.client, joint.client_events),
        ):
            under_way += b"".join(ours.take())
            data = bytes(under_way[:size])
            del under_way[:size]
            if data:
                moved = True
                joint._handle(other.receive(data, 0.0), seen)
        return moved

    def pump(self) -> None:
        """Carry everything until nobody has more to send."""
        for _ in range(500):
            if not sum(self.step(at) for at in range(len(self.joints))):
                self.check()
                return
        raise AssertionError("the engines never stop talking")

    def cut(self, at: int) -> None:
        """Lose the connection of joint *at*, with everything in flight."""
        joint = self.joints[at]
        joint.client.take()
        joint.server.take()
        for under_way in self._under_way[at]:
            under_way.clear()
        joint.client.receive_eof(0.0)
        joint.server.receive_eof(0.0)

    def check(self) -> None:
        """Assert what holds whenever nothing is in flight."""
        for joint in self.joints:
            check(joint.client)
            check(joint.server)
        for splice in self.splices:
            if splice.inlet.attached and splice.outlet.attached:
                assert splice.inlet.credit <= splice.outlet.credit
            assert splice.held <= SURGE * self.limits.splice_bytes_max
        # Each node has done what it can: another look finds nothing to do.
        for joint in self.joints:
            check_quiet(joint.client, joint.server)
        for splice in self.splices:
            if splice.inlet.attached and splice.outlet.attached:
                splice._passing.pump()
                splice._advance(flowed=False)
        assert not any(each.client.take() or each.server.take() for each in self.joints)

    def check_empty(self) -> None:
        """Assert that no node keeps anything of links that have ended."""
        left = [each for each in self.splices if each not in self.ended]
        assert not left, [(each.inlet, each.outlet, each.held) for each in left]
        for joint in self.joints:
            for engine in (joint.client, joint.server):
                assert engine.held == 0
                assert engine.assembling == 0
                for session in engine.sessions.values():
                    assert not session.links
                    assert not session._remote
                    assert not session._names
                    assert not session._outgoing
                    assert not session.incoming
        for splice in self.splices:
            assert splice.held == 0
            assert not splice._passing.waiting
