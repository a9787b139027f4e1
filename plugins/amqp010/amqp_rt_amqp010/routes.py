"""Routes of transfers: the inlets and links of the nodes that they go to."""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from typing import Any, Final, TypeAlias

from amqp_rt.fronts import AmqpError, Error, Target
from amqp_rt.fronts.links import FrontReceivingLink, PublishingLink

from .contexts import Context
from .faults import CommandFault
from .layouts import ErrorCode
from .limits import PUBLISHING_LINKS_MAX

#: Inlet of a node (None if the link itself carries the messages), the link and the node's name.
Way: TypeAlias = tuple[Any, FrontReceivingLink, str]

#: Nodes that are looked up between two checks of the work done, and the cost of that in frames.
_NODES_OF_A_STEP: Final = 10
_STEP_WORK: Final = 5


class Routes:
    """Inlets and links by which a session publishes.

    Args:
        context: The session.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Links to nodes without an inlet, by the names of the nodes.
        self._senders: dict[str, FrontReceivingLink] = {}
        #: Link shared by all messages to nodes that need no link of their own; None if there is none yet.
        self._publishing: PublishingLink | None = None

    def way_to(self, name: str, *, routed: bool) -> Way:
        """Return the inlet of node *name*, or a link to it, which is requested if there is none.

        The right to send to a node is not checked for messages that are *routed* to it by an exchange.

        Raises:
            CommandFault: The node refuses messages from this peer (403), or the session has too many
                links on which messages wait (506).
        """
        context = self._context
        topology = context.topology
        if topology is not None:
            publishing = self._publishing or self._open_publishing()
            inlet = topology.inlet(name, publishing, routed=routed)
            if isinstance(inlet, Error):
                raise CommandFault.of(inlet)
            if inlet is not None:
                return inlet, publishing, name
        link = self._senders.get(name)
        if link is None or link.over:
            link = self._open_link(name)
        return None, link, name

    def _open_publishing(self) -> PublishingLink:
        anchor = self._context.anchor
        link = PublishingLink(anchor, anchor, anchor.link_name("publish"))
        # A node that cannot take a message detaches its link, and settles no delivery behind it.
        link.on_end = self._on_end
        self._publishing = link
        return link

    def _open_link(self, name: str) -> FrontReceivingLink:
        context = self._context
        anchor = context.anchor
        if len(self._senders) >= PUBLISHING_LINKS_MAX:
            self._close_idle_link()
        link = FrontReceivingLink(
            anchor, anchor, anchor.link_name(f"publish-{name}"), Target(address=name)
        )
        self._senders[name] = link
        context.report(anchor.request(link))
        return link

    def _close_idle_link(self) -> None:
        for name, link in self._senders.items():
            if link.over or not link.wait_empty(_nothing):
                del self._senders[name]
                self._context.anchor.drop(link)
                return
        raise CommandFault(
            f"messages wait on {PUBLISHING_LINKS_MAX} links of the session: publish to fewer nodes at a"
            " time",
            ErrorCode.RESOURCE_LIMIT_EXCEEDED,
        )

    def _on_end(self, error: Error | None) -> None:
        self._publishing = None
        why = error or Error("amqp:internal-error", "a node detached the link for publishing")
        self._context.session.fail(CommandFault.of(why))

    def find(
        self,
        exchange: str,
        key: str,
        headers: Mapping[str, object],
        gone: Container[str],
        ways: list[Way],
        *,
        alternate: bool,
    ) -> Generator[int, None, None]:
        """Add to *ways* those of a message, except queues in *gone*; yield the cost of each step in frames.

        Args:
            exchange: The exchange; empty for the default exchange, which routes to the queue named *key*.
            key: The routing key.
            headers: The application headers, as arguments of bindings are compared with them.
            gone: Queues that have been deleted since the beginning.
            ways: The result.
            alternate: Whether a message that is unroutable goes to the alternate exchange.

        Raises:
            CommandFault: There is no such exchange (404), the peer may not send to it (403), or routing
                would take too long (506).
        """
        topology = self._context.topology
        if not exchange:
            ways.append(self.way_to(key, routed=False))
            return
        if topology is None:
            raise _no_exchange(f"there is no exchange {exchange!r:.100}")
        names: dict[str, None] = {}
        try:
            # Alternate exchanges are not chained (rule double-failure of exchange.declare).
            yield from topology.routing(
                exchange, (key,), headers, names, alternate=alternate, chained=False
            )
        except AmqpError as error:
            if error.condition == "amqp:not-found":
                raise _no_exchange(str(error.description)) from error
            raise CommandFault.of(error) from error
        for count, name in enumerate(names, 1):
            if name not in gone:
                ways.append(self.way_to(name, routed=True))
            if not count % _NODES_OF_A_STEP:
                yield _STEP_WORK

    def on_ended(self) -> None:
        """Forget the links, which refer to the session and end with it."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.end(None, True)
        self._senders.clear()


def _nothing() -> None:
    """Do nothing."""


def _no_exchange(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.NOT_FOUND, field_index=0)
