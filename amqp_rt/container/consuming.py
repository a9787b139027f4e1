"""Nodes as consumers of the addresses of a peer, such as the queues of a broker.

A ``node`` or ``rpc`` receives from the address, a ``source`` sends to it, and replies go through
the peer's anonymous terminus. Each is a member of the connection's session, and attaches again when
a lost connection has been replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import trio

from ..errors import AmqpError, LinkDetached, LinkRefused
from ..fronts.base import SND_UNSETTLED, ReceivingLink, SendingLink
from ..outcomes import Error
from ..termini import Source, Target
from .engines import EngineSession
from .feeding import SourceFeed
from .links import gone, is_transient
from .replies import Replies, ReplyLink
from .routes import Route, RouteBinding
from .serving import Inbox, Workers

if TYPE_CHECKING:
    from .connections import Connection, Session

log = logging.getLogger("amqp_rt.container")

_NOTHING: Mapping[str, Any] = {}


class _Consumer:
    """A node at an address of a peer, across the connections that replace each other."""

    def __init__(self, session: Session, workers: Workers, relay: _Relay | None) -> None:
        self.session = session
        self.workers = workers
        self.route: Route = workers.route
        self.name = session.connection.new_name(self.route.address)
        self._relay = relay
        self._answered = trio.Event()
        self._error: AmqpError | None = None
        self._over = False

    def attach(self, core: EngineSession) -> None:
        """Attach on *core*, the engine's session."""
        relay = None if self._relay is None else self._relay.reply_link
        binding = RouteBinding(
            self.route,
            self.workers.container,
            self.session.connection,
            None,
            self.route.address,
            _NOTHING,
            relay=relay,
        )
        if self._relay is not None:
            self._relay.bindings[self] = binding
        if self.route.kind == "source":
            feed = _ConsumerFeed(binding, self)
            core.attach_sender(
                self.name, feed, source=Source(), target=Target(address=self.route.address)
            )
        else:
            core.attach_receiver(
                self.name,
                _ConsumerInbox(binding, self.workers, self),
                source=Source(address=self.route.address),
                target=Target(),
                streaming=self.route.streaming,
            )

    def lost(self, error: AmqpError) -> None:
        """End the consumer: its session is lost permanently."""
        self.over(error)

    def attached(self) -> None:
        self._answered.set()

    def over(self, error: AmqpError) -> None:
        """End the consumer with *error*; it will not attach again.

        Before the first answer *error* is raised to the waiting caller, later it fails the
        container.
        """
        if self._over:
            return
        self._over = True
        self.session.remove(self)
        if not self._answered.is_set():
            self._error = error
            self._answered.set()
        elif not self.session.connection.closing:
            log.warning("%s is not served any more: %s", self.route.name, error)
            self.workers.container.fail(error)

    def finished(self) -> None:
        """End without an error: the node was removed, or its source has ended or failed."""
        self._over = True
        self.session.remove(self)

    def detached(self, error: Error | None, closed: bool) -> None:
        """Handle the end of the link, by the peer or with the connection."""
        session = self.session
        if self._over:
            return
        if session.ending:
            if not session.may_be_replaced:
                self.over(gone(LinkDetached, error, self.route.address))
            return
        attached = self._answered.is_set()
        why = gone(LinkDetached if attached else LinkRefused, error, self.route.address)
        if not _returns(self, error, closed, why, attached=attached):
            self.over(why)

    async def wait_attached(self) -> None:
        """Wait for the peer's answer to the attach.

        Raises:
            LinkRefused: The peer refused the link.
        """
        await self._answered.wait()
        if self._error is not None:
            raise self._error


class _ConsumerInbox(Inbox):
    def __init__(self, binding: RouteBinding, workers: Workers, consumer: _Consumer) -> None:
        super().__init__(binding, workers)
        self._consumer = consumer

    def on_attached(self, link: ReceivingLink) -> None:
        # The link exists only from here on, since we asked for it.
        self.binding.link = link
        if self._window is not None:
            self._window.link = link
        if self.workers.container.stopping:
            # Attached again while the container drains: it only has to wait for its handlers.
            self.stop()
        else:
            super().on_attached(link)
        self._consumer.attached()

    def detach(self, error: Error) -> None:
        """End the link, because the node was removed here."""
        self._consumer.finished()
        super().detach(error)

    def on_detached(self, link: ReceivingLink, error: Error | None, closed: bool) -> None:
        super().on_detached(link, error, closed)
        self._consumer.detached(error, closed)


class _ConsumerFeed(SourceFeed):
    def __init__(self, binding: RouteBinding, consumer: _Consumer) -> None:
        super().__init__(binding)
        self._consumer = consumer

    def on_attached(self, link: SendingLink) -> None:
        super().on_attached(link)
        self._consumer.attached()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        finished = self.finished.is_set()
        super().on_detached(link, error, closed)
        if finished:
            self._consumer.finished()
        else:
            self._consumer.detached(error, closed)


def _returns(
    member: _Consumer | _Relay, error: Error | None, closed: bool, why: AmqpError, *, attached: bool
) -> bool:
    """Arrange to attach again a link that its peer has detached; return whether that is tried."""
    session = member.session
    if is_transient(error, closed):
        return session.returns(member, why, ended=False)
    return attached and error is None and session.returns(member, why, ended=True)


class _Relay:
    """Link for replies to the peer's anonymous terminus."""

    def __init__(self, session: Session, replies: Replies) -> None:
        self.session = session
        self.replies = replies
        self.name = session.connection.new_name("replies")
        self.reply_link: ReplyLink | None = None
        #: Bindings with which the consumers' handlers are called; their replies go to
        #: ``reply_link``.
        self.bindings: dict[_Consumer, RouteBinding] = {}
        self._answered = trio.Event()
        self._error: AmqpError | None = None

    def attach(self, core: EngineSession) -> None:
        """Attach on *core*, the engine's session."""
        self.reply_link = _RelayLink(self)
        for binding in self.bindings.values():
            binding.relay = self.reply_link
        # Unsettled, so that the peer can reject a reply to an address that does not exist: of a settled one it could
        # only tell by detaching the link (Anonymous Terminus 1.0 §2.2.2), on which all replies leave.
        core.attach_sender(
            self.name,
            self.reply_link,
            source=Source(),
            target=Target(),
            snd_settle_mode=SND_UNSETTLED,
        )

    def lost(self, error: AmqpError) -> None:
        """Handle the permanent loss of the session or the link."""
        if not self._answered.is_set():
            self.answered(error)
        elif not self.session.ending:
            log.warning("replies cannot be sent any more: %s", error)
            self.session.connection.container.fail(error)

    def answered(self, error: AmqpError | None = None) -> None:
        """Record the peer's answer to the attach; *error* if it refused the link."""
        if not self._answered.is_set():
            self._error = error
            self._answered.set()

    def detached(self, error: Error | None, closed: bool) -> None:
        """Handle the end of the link, by the peer or with the connection."""
        attached = self._answered.is_set()
        if attached and self.session.ending:
            return
        why = gone(LinkDetached if attached else LinkRefused, error, "the anonymous terminus")
        if not _returns(self, error, closed, why, attached=attached):
            self.lost(why)

    async def wait_attached(self) -> None:
        """Wait for the peer's answer.

        Raises:
            LinkRefused: The peer has no anonymous terminus.
        """
        await self._answered.wait()
        if self._error is not None:
            self.session.remove(self)
            raise self._error


class _RelayLink(ReplyLink):
    def __init__(self, relay: _Relay) -> None:
        super().__init__(relay.replies, "the peer's anonymous terminus")
        self._relay = relay

    def on_attached(self, link: SendingLink) -> None:
        super().on_attached(link)
        self._relay.answered()

    def on_detached(self, link: SendingLink, error: Error | None, closed: bool) -> None:
        super().on_detached(link, error, closed)
        self._relay.detached(error, closed)


async def consume(connection: Connection, workers: Iterable[Workers], replies: Replies) -> None:
    """Attach a link for each of *workers* to the peer of *connection*, and one for *replies* if needed.

    When cancelled, or after a refusal, links that are attached continue.

    Raises:
        TypeError: A node cannot be served at a peer.
        LinkRefused: The peer has no such address, or no anonymous terminus for replies.
        ConnectionLost: The connection was lost.
    """
    session = connection.default_session
    found = list(workers)
    for each in found:
        route = each.route
        if route.pattern.captures or route.kind == "link":
            raise TypeError(
                f"{route.name}: {route.address!r} cannot be served at a peer: only nodes with a "
                "whole address can, and no @node.link"
            )
    relay: _Relay | None = None
    if any(each.route.kind == "rpc" for each in found):
        relay = _Relay(session, replies)
        session.add(relay)
        await relay.wait_attached()
    consumers = [_Consumer(session, each, relay) for each in found]
    for consumer in consumers:
        session.add(consumer)
    for consumer in consumers:
        await consumer.wait_attached()
