"""Sessions of peers that work in branches of distributed transactions, made as a front makes them."""

from __future__ import annotations

from itertools import count
from typing import Any

import trio

from amqp_rt.broker.branches.peers import COORDINATOR, PeerBranches
from amqp_rt.broker.host import BrokerHost
from amqp_rt.errors import AmqpError
from amqp_rt.events import Peer
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.base import SENDER
from amqp_rt.fronts.deliveries import FrontDelivery
from amqp_rt.fronts.links import FrontLink, FrontReceivingLink
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error, Outcome
from amqp_rt.security.access import Rights
from amqp_rt.termini import Source, Target
from amqp_rt.transactions import TransactionalState, XaStatus, Xid

_names = count(1)


def xid_of(number: int, branch: bytes = b"b") -> Xid:
    """Return an xid of its own for each *number*."""
    return Xid(7, b"global-%d" % number, branch)


class OpenRights:
    """Rights of all peers: any, but only *operators* manage the coordinator."""

    def __init__(self, *operators: str) -> None:
        self.operators = operators

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        assert (wanted, address) == (Rights.MANAGE, COORDINATOR)
        return None if peer.user in self.operators else Error("amqp:unauthorized-access")

    def decide_anywhere(self, peer: Peer) -> Error | None:
        return Error("amqp:unauthorized-access") if peer.user == "stranger" else None


class Given:
    """A message that was sent to a consumer."""

    def __init__(self, link: TakingLink, payload: Any, context: Any, number: int) -> None:
        self.link = link
        self.payload = payload if isinstance(payload, bytes) else b"".join(payload)
        self.context = context
        self.delivery_id = number
        self.tag = number.to_bytes(8, "big")
        self.settled = self.remote_settled = False
        self.state: Any = None

    @property
    def body(self) -> Any:
        return Message.decode(self.payload).body

    def settle(self, state: Any = None) -> None:
        self.settled = True
        self.state = state


class TakingLink(FrontLink):
    """A consumer with credit for single messages."""

    role = SENDER
    writable = True
    draining = False
    idle = False
    requeues = True
    flow_properties = None

    def __init__(self, session: Any, name: str, source: Source) -> None:
        super().__init__(session, session, name)
        self.source = source
        self.target = Target()
        self.credit = 0
        self.given: list[Given] = []

    def accept(self, endpoint: Any, *, source: Any = None, **options: Any) -> None:
        self.source = source or self.source
        self._accepted(endpoint)

    def send(self, payload: Any, context: Any = None, **options: Any) -> Given:
        self.credit -= 1
        delivery = Given(self, payload, context, len(self.given))
        self.given.append(delivery)
        return delivery

    def offer(self, available: int) -> None:
        pass

    def drained(self) -> None:
        pass

    def _gather(self) -> None:
        self.unsettled = [each for each in self.given if not each.settled]


class XaSession:
    """A session of a peer: it posts, takes and retires, in the branch to which its work belongs."""

    def __init__(
        self,
        host: BrokerHost,
        user: str = "user",
        *,
        virtual_host: str = "",
        rights: OpenRights | None = None,
    ) -> None:
        self.host = host
        self.peer = Peer(container_id="peer", user=user, virtual_host=virtual_host)
        self.anchor = Anchor(DEFAULT_LIMITS, self.peer, f"session-{next(_names)}")
        self.branches = PeerBranches(
            host.services.branches, self.peer, self.anchor, rights or OpenRights()
        )
        self._out: dict[str, FrontReceivingLink] = {}
        self._in: dict[str, TakingLink] = {}

    # --- Work ---

    def _state(self, outcome: Outcome | None = None) -> TransactionalState | None:
        txn_id = self.branches.txn_id
        return None if txn_id is None else TransactionalState(txn_id, outcome)

    def post(self, address: str, body: Any, *, durable: bool = True, **fields: Any) -> list[Any]:
        """Send a message; return the list that gets its outcome."""
        link = self._out.get(address)
        if link is None or link.over:
            name = self.anchor.link_name("out")
            link = FrontReceivingLink(self.anchor, self.anchor, name, Target(address=address))
            self.anchor.request(link)
            self._out[address] = link
            assert self.host.attach(link)
        outcomes: list[Any] = []
        payload = Message(body, durable=durable, **fields).encode()
        link.put([FrontDelivery(link, payload, outcomes.append, self._state())])
        return outcomes

    def take(self, address: str) -> Given | None:
        """Take the next message; None if there is none."""
        link = self._in.get(address)
        if link is None or link.over:
            link = TakingLink(self.anchor, self.anchor.link_name("in"), Source(address=address))
            self.anchor.request(link)
            self._in[address] = link
            assert self.host.attach(link)
        before = len(link.given)
        link.credit = 1
        link.endpoint.on_credit(link)
        link.credit = 0
        return link.given[-1] if len(link.given) > before else None

    def accept(self, delivery: Given) -> None:
        """Accept *delivery*, in the branch if there is one."""
        delivery.state = self._state(ACCEPTED) or ACCEPTED
        delivery.link.endpoint.on_outcomes(delivery.link, [delivery])

    def consume(self, address: str) -> Any:
        """Take and accept the next message; return its body."""
        delivery = self.take(address)
        assert delivery is not None, f"{address!r} has no message"
        self.accept(delivery)
        return delivery.body

    def detach(self, address: str) -> None:
        """End the link that takes from *address*."""
        link = self._in.pop(address)
        link.end(None, True)

    def close(self) -> None:
        """End the session."""
        self.anchor.end()

    # --- Ends of branches, in a broker without a store ---

    def now(self, operation: str, xid: Xid, **options: Any) -> XaStatus | str:
        """Perform *operation*, which has to be answered at once; return the status or the condition."""
        answers: list[Any] = []
        try:
            getattr(self.branches, operation)(xid, answers.append, **options)
        except AmqpError as error:
            return error.condition
        (answer,) = answers
        return answer.condition if isinstance(answer, AmqpError) else answer

    async def ended(self, operation: str, xid: Xid, **options: Any) -> XaStatus | str:
        """Perform *operation*, and wait for its answer; return the status or the condition."""
        answers: list[Any] = []
        answered = trio.Event()

        def done(answer: Any) -> None:
            answers.append(answer)
            answered.set()

        try:
            getattr(self.branches, operation)(xid, done, **options)
        except AmqpError as error:
            return error.condition
        with trio.fail_after(20):
            await answered.wait()
        (answer,) = answers
        return answer.condition if isinstance(answer, AmqpError) else answer

    def demarcate(self, operation: str, xid: Xid, **options: bool) -> XaStatus | str:
        """Start or end work; return the status or the condition."""
        try:
            status: XaStatus = getattr(self.branches, operation)(xid, **options)
        except AmqpError as error:
            return error.condition
        return status

    def recovered(self) -> list[Xid]:
        """Return the branches in doubt."""
        found: list[list[Xid]] = []
        self.branches.recover(found.append)
        return found[0]

    def work(self, xid: Xid, *posts: Any, address: str = "to", **options: bool) -> None:
        """Start a branch, post messages in it, and end the work."""
        assert self.branches.start(xid, **options) is XaStatus.OK
        for body in posts:
            self.post(address, body)
        assert self.branches.end(xid) is XaStatus.OK
