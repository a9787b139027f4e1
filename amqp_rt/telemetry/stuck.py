"""Detection of what is stuck: deliveries, queues, senders, commits, transactions and handlers that make no progress.

Every few seconds the state at the heads is compared with that of the round before: the oldest delivery of each
session, the counts of each queue, the message of each handler. Nothing is noted for a message, so that an age is known
to within one round. An episode is logged once, when it has lasted long enough, and counted as long as it lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from ..broker.branches.branch import Branch
from ..broker.branches.states import State
from ..broker.host import BrokerHost
from ..broker.kinds.base import Node
from ..broker.producers import Producer
from ..container.container import Container
from ..container.sending import Sender
from ..container.serving import Worker, Workers
from ..events import Peer
from ..fronts.base import SENDER

_log: Final = logging.getLogger("amqp_rt.stuck")

#: Seconds between two rounds.
EVERY_S: Final = 10.0
#: Seconds after which a commit of the store counts as stuck.
COMMIT_S: Final = 10.0
#: Sessions, nodes or workers that are examined before other tasks get their turn.
_SLICE: Final = 250

#: What may be stuck → what that means.
CAUSES: Final = {
    "unsettled": "a consumer has neither settled nor returned a delivery",
    "undelivered": "a queue has messages, a consumer has credit, and nothing is delivered",
    "unattended": "a queue has messages and no consumer",
    "sender": "a sender of a peer has no credit, and its node takes nothing",
    "credit": "messages of a sender of this container wait for credit of its peer",
    "commit": "a commit of the store takes long",
    "transaction": "a transaction is open for long",
    "branch": "a prepared branch of a distributed transaction waits for its coordinator",
    "handler": "a handler takes long for one message",
}
#: Causes that may be meant, such as messages in a queue of dead letters.
_QUIET: Final = frozenset(("unattended",))

_TRIO: Final = str(Path(trio.__file__).parent)
_PACKAGE: Final = str(Path(__file__).parent.parent)


class _Mark(NamedTuple):
    """State of a subject, and since when it has been the same."""

    state: object
    since: float


class StuckWatch:
    """Watch over what is stuck in *container* and its broker; :meth:`run` is its task.

    The results are in ``container.tallies``: the number of subjects by cause, and the oldest unsettled
    delivery of each session.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._marks: dict[tuple[str, object], _Mark] = {}
        #: Subjects whose episode has been logged.
        self._told: set[tuple[str, object]] = set()

    async def run(self) -> None:
        """Look every ten seconds, until cancelled. Returns at once if ``stuck_after_s`` is 0."""
        if self._container.limits.stuck_after_s > 0:
            # Alerts need values from the beginning, not only after the first round.
            self._container.tallies.stuck = dict.fromkeys(CAUSES, 0)
        while self._container.limits.stuck_after_s > 0:
            await trio.sleep(EVERY_S)
            try:
                await self.look()
            except Exception:
                # A fault here must not end the watch; the next round may succeed.
                _log.exception("a round of the watch over what is stuck failed")

    async def look(self) -> None:
        """Compare the present state with that of the round before, and log new episodes.

        If cancelled, the results are those of the round before.
        """
        now = trio.current_time()
        marks: dict[tuple[str, object], _Mark] = {}
        stuck: dict[str, int] = dict.fromkeys(CAUSES, 0)
        told: set[tuple[str, object]] = set()
        after_s = self._container.limits.stuck_after_s
        for steps, subject in enumerate(self._subjects(now), 1):
            if steps % _SLICE == 0:
                await trio.lowlevel.checkpoint()
            if subject is _NOTHING:
                continue
            key = (subject.cause, subject.key)
            before = self._marks.get(key)
            since = subject.since
            if since == inf:
                since = (
                    before.since if before is not None and before.state == subject.state else now
                )
            marks[key] = _Mark(subject.state, since)
            age_s = now - since
            if age_s < (after_s if subject.after_s is None else subject.after_s):
                continue
            stuck[subject.cause] += 1
            told.add(key)
            if key not in self._told:
                self._log(subject, age_s)
        self._marks = marks
        self._told = told
        tallies = self._container.tallies
        tallies.stuck = stuck
        tallies.unsettled_since = {
            key: mark.since for (cause, key), mark in marks.items() if cause == "unsettled"
        }

    def _log(self, subject: _Subject, age_s: float) -> None:
        """Log that *subject* is stuck; of each cause only so many lines at a time, as peers may cause them."""
        container = self._container
        left_out = container.log_limiter.admit(("stuck", subject.cause), trio.current_time())
        if left_out is not None:
            level = logging.INFO if subject.cause in _QUIET else logging.WARNING
            _log.log(
                level, "stuck: %s for %.0f s: %s%s", subject.cause, age_s, subject.text(), left_out
            )

    def _subjects(self, now: float) -> Iterator[_Subject]:
        """Yield everything that might be stuck, and ``_NOTHING`` for what is in order, which takes time too."""
        yield from self._sessions()
        yield from self._senders()
        yield from self._nodes()
        yield from self._store(now)
        yield from self._handlers()

    def _sessions(self) -> Iterator[_Subject]:
        for connection in list(self._container.connections):
            if connection.engine_over:
                continue
            for session in list(connection.engine.sessions.values()):
                head = oldest_of(session)
                yield _NOTHING if head is None else _UnsettledHead(session, head, connection.peer)

    def _senders(self) -> Iterator[_Subject]:
        """Yield the senders of this container, on connections of either direction."""
        container = self._container
        for connection in [*container.dialled, *container.connections]:
            if connection.engine_over:
                continue
            for sender in connection.senders:
                first = sender.starving
                yield _NOTHING if first is None else _Starving(sender, first, connection.peer)

    def _nodes(self) -> Iterator[_Subject]:
        broker = next(
            (each for each in self._container.hosts if isinstance(each, BrokerHost)), None
        )
        for space in [] if broker is None else list(broker.spaces):
            for name in space.names:
                node = space.nodes.get(name)
                yield _NOTHING
                if node is None or node.failure is not None:
                    continue
                for producer in list(node.intake.producers):
                    link = producer.link
                    if link.attached and link.credit <= 0:
                        yield _NoCredit(node, producer)
                queue = node.leased_queue
                if queue is None or not queue.available:
                    continue
                consumers = [each for each in queue.consumers.values() if each.link.attached]
                if not consumers:
                    yield _Undelivered("unattended", node, "no consumer")
                elif any(each.active and each.link.credit > 0 for each in consumers):
                    yield _Undelivered("undelivered", node, f"{len(consumers)} consumers")

    def _store(self, now: float) -> Iterator[_Subject]:
        broker = next(
            (each for each in self._container.hosts if isinstance(each, BrokerHost)), None
        )
        if broker is None:
            return
        services = broker.services
        journal = services.journal
        if journal is not None and journal.commit_began != inf:
            yield _Lasting("commit", journal, journal.commit_began, COMMIT_S, "commit of the store")
        limit_s = services.limits.transaction_s
        behind_s = now - services.clock.monotonic()
        oldest = services.transactions.oldest()
        if oldest is not None:
            link, transaction = oldest
            began = transaction.deadline - limit_s + behind_s
            text = (
                f"transaction {transaction.name} of {link.peer.container_id!r:.100} at {link.peer.address}, "
                f"rolled back after {limit_s:g} s"
            )
            yield _Lasting("transaction", transaction, began, limit_s / 2, text)
        # Prepared branches outlive the process, so that their age is one of the wall clock.
        ahead_s = services.clock.wall() - now
        for branch in services.branches:
            if branch.state is State.PREPARED:
                yield _Lasting("branch", branch, branch.prepared_at - ahead_s, None, _said(branch))
            else:
                yield _NOTHING

    def _handlers(self) -> Iterator[_Subject]:
        for workers in list(self._container.nodes.workers):
            for worker in list(workers.tasks):
                handled = worker.delivery()
                if handled is None:
                    yield _NOTHING
                else:
                    yield _HandlerAtWork(workers, worker, handled)


class _Subject:
    """Something that may be stuck. Its text is made only if it is logged."""

    cause = ""
    key: object = None
    #: What changes when there is progress.
    state: object = None
    #: Since when it has been as it is; infinite if that is found out by comparing rounds.
    since = inf
    #: Seconds after which it counts as stuck; None for ``stuck_after_s``.
    after_s: float | None = None

    def text(self) -> str:
        """Describe it, with the addresses and names that help to find it."""
        return ""


_NOTHING: Final = _Subject()


class _UnsettledHead(_Subject):
    cause = "unsettled"

    def __init__(self, session: Any, head: Any, peer: Any) -> None:
        self.key = session
        self.state = head
        self._peer = peer

    def text(self) -> str:
        head: Any = self.state
        link = head.link
        source = getattr(link.source, "address", None)
        return (
            f"delivery {head.delivery_id} from {source!r:.200} on link {link.name!r:.100} of "
            f"{self._peer.container_id!r:.100} at {self._peer.address}"
        )


class _NoCredit(_Subject):
    cause = "sender"

    def __init__(self, node: Node, producer: Producer) -> None:
        self.key = producer
        self.state = node.held.counts.enqueued
        self._node = node
        self._producer = producer

    def text(self) -> str:
        link = self._producer.link
        why = self._node.inlet.node.why_full(self._node.name, 0)
        return f"link {link.name!r:.100} of {link.peer.container_id!r:.100} to {self._node.name!r:.200}: {why}"


class _Starving(_Subject):
    cause = "credit"

    def __init__(self, sender: Sender, first: object, peer: Peer) -> None:
        self.key = sender
        self.state = first
        self._sender = sender
        self._peer = peer

    def text(self) -> str:
        sender = self._sender
        return (
            f"link {sender.name!r:.100} to {sender.address!r:.200} of {self._peer.container_id!r:.100} "
            f"at {self._peer.address}: {sender.pending} messages without an outcome"
        )


class _Undelivered(_Subject):
    def __init__(self, cause: str, node: Node, who: str) -> None:
        self.cause = cause
        self.key = node
        self.state = node.held.counts.delivered
        self._node = node
        self._who = who

    def text(self) -> str:
        return f"{self._node.kind} {self._node.name!r:.200}: {self._node.held.available} messages, {self._who}"


class _Lasting(_Subject):
    def __init__(
        self, cause: str, key: object, since: float, after_s: float | None, text: str
    ) -> None:
        self.cause = cause
        self.key = key
        self.state = since
        self.since = since
        self.after_s = after_s
        self._text = text

    def text(self) -> str:
        return self._text


class _HandlerAtWork(_Subject):
    cause = "handler"

    def __init__(self, workers: Workers, worker: Worker, delivery: object) -> None:
        self.key = worker
        self.state = delivery
        self._workers = workers
        self._worker = worker

    def text(self) -> str:
        route = self._workers.route
        return f"{route.name} at {route.address!r:.200}, which waits in {line_of(self._worker)}"


def oldest_of(session: Any) -> Any:
    """Return the oldest delivery that the peer of *session* has not settled; None if there is none.

    Of protocols whose links hold their deliveries, it is the one with the lowest number among the first ones of the links.
    """
    sent = getattr(session, "sent_unsettled", None)
    if sent is not None:
        return next(iter(sent.values()), None)
    heads = [
        next(iter(link.held.values()))
        for link in session.links.values()
        if link.role == SENDER and getattr(link, "held", None)
    ]
    return min(heads, key=_number_of, default=None)


def _number_of(delivery: Any) -> int:
    number: int = delivery.delivery_id
    return number


def _said(branch: Branch) -> str:
    """Describe *branch*, whose xid is the choice of a peer."""
    where = f" of virtual host {branch.virtual_host!r:.100}" if branch.virtual_host else ""
    return f"branch {str(branch.xid)!r:.200} of user {branch.user!r:.100}{where}"


def line_of(worker: Worker) -> str:
    """Return the innermost line of the application in which *worker* waits, or that of this package."""
    found = outermost = "an unknown line"
    for frame, line in worker.task.iter_await_frames():
        file = frame.f_code.co_filename
        if file.startswith(_TRIO):
            continue
        text = f"{Path(file).name}:{line} ({frame.f_code.co_name})"
        if file.startswith(_PACKAGE):
            outermost = text
        else:
            found = text
    return outermost if found == "an unknown line" else found
