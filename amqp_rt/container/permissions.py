"""Rights of peers at addresses: rules and tokens, and the application's ``authorize``.

Rules and tokens are asked by :func:`amqp_rt.security.access.decide`, always with a node's own name, whichever
alias the peer used. ``authorize`` is asked after them, since it may wait.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias

from ..addresses import is_direct_reply
from ..events import Peer
from ..fronts.base import SENDER, Host, ReceivingLink, SendingLink
from ..outcomes import Error
from ..security.access import (
    MANAGEMENT,
    Access,
    Passage,
    Rights,
    anywhere,
    decide,
    decide_anywhere,
    decide_passages,
)
from ..termini import Coordinator, Source, Target
from .profiles import Profile, address_for

log = logging.getLogger("amqp_rt.container")

#: ``await authorize(peer, address, role)``: whether *peer* may be the ``"sender"`` or the
#: ``"receiver"`` of a link to *address*.
Authorize: TypeAlias = Callable[[Peer, str, str], Awaitable[bool]]


class Permissions:
    """Decides which rights a container's peers have.

    Args:
        access: Rules of access; None for none.
        authorize: The application's own check; None for none.
        hosts: The hosts of the container, which know aliases and the addresses that they created.
        created: Addresses that the container created for links.
    """

    def __init__(
        self,
        access: Access | None,
        authorize: Authorize | None,
        hosts: Sequence[Host],
        created: Collection[str],
    ) -> None:
        self.access = access
        self.authorize = authorize
        self._hosts = hosts
        self._created = created
        #: Whether peers of some listener get rights by tokens only.
        self.takes_tokens = False
        #: Whether a link to the management node takes any right, and not the right to manage.
        self.management_open = False

    @property
    def guarded(self) -> bool:
        """Whether any access control is configured."""
        return self.takes_tokens or not (self.access is None and self.authorize is None)

    def own_name(self, peer: Peer, address: str) -> str:
        """Return the name under which rights to *address*, as used by *peer*, are granted.

        For a node this is its name, whether *address* is a URL, an alias or ``/queues/NAME``; for
        an exchange ``/exchanges/NAME``, for any key.
        """
        name = address_for(peer, address)
        for host in self._hosts:
            name = host.own_name(name, peer.virtual_host)
        return name

    # --- rules and tokens ----------------------------------------------------------------

    def decide(self, peer: Peer, wanted: Rights, address: str) -> Error | None:
        """Return None if rules and tokens give *peer* the right *wanted* at *address*, or why not.

        Like :func:`amqp_rt.security.access.decide`, but applied to the node's own name.
        """
        if peer.trusted or (self.access is None and peer.tokens is None):
            return None
        name = self.own_name(peer, address)
        refused = decide(self.access, peer, wanted, name, called=address)
        if refused is not None and wanted is Rights.SEND and self._is_dynamic(peer, name):
            # Such an address cannot be guessed: a peer that knows it received it in order to
            # answer.
            return decide_anywhere(self.access, peer)
        if refused is not None and name == MANAGEMENT and self._opens_management(peer):
            return refused if Rights.MANAGE in wanted else decide_anywhere(self.access, peer)
        return refused

    def open_management(self) -> None:
        """Let peers with any right attach to the management node, which checks each operation."""
        self.management_open = True

    def _opens_management(self, peer: Peer) -> bool:
        profile: Profile | None = peer.profile
        return self.management_open or (profile is not None and profile.management_open)

    def _is_dynamic(self, peer: Peer, address: str) -> bool:
        # An address of direct replies is still one after its link has ended, or if another member of a mesh has it:
        # nothing else can be there, and a service that answers too late does not lose its channel for that.
        return (
            address in self._created
            or is_direct_reply(address)
            or any(host.is_dynamic(address, peer.virtual_host) for host in self._hosts)
        )

    def decide_link(
        self, link: ReceivingLink | SendingLink, terminus: Source | Target | Coordinator
    ) -> Error | None:
        """Return why the peer may not have *link* to *terminus*, ours; None if it may."""
        if isinstance(terminus, Coordinator) or terminus.dynamic or not terminus.address:
            return self.decide_anywhere(link.peer)
        wanted = Rights.LISTEN if link.role == SENDER else Rights.SEND
        return self.decide(link.peer, wanted, terminus.address)

    def decide_anywhere(self, peer: Peer) -> Error | None:
        """Return None if rules or tokens give *peer* a right at any address, or why not."""
        return decide_anywhere(self.access, peer)

    def has_any(self, peer: Peer) -> bool:
        """Return whether rules or tokens give *peer* a right at any address."""
        return bool(anywhere(self.access, peer))

    def has_any_by_login(self, peer: Peer) -> bool:
        """Return whether rules alone, without tokens, give *peer* a right at any address."""
        return self.access is not None and bool(self.access.anywhere(peer))

    def may_be_sent(self, peer: Peer, address: str) -> bool:
        """Return whether messages that *peer* sent elsewhere may be forwarded to *address*.

        Only rules and tokens are checked, since this cannot wait: the answer is False if
        ``authorize`` would have to be asked.
        """
        if self.authorize is not None:
            return False
        return self.decide(peer, Rights.SEND, address) is None

    # --- with authorize ------------------------------------------------------------------

    async def is_allowed(self, peer: Peer, address: str, role: str) -> bool:
        """Return whether ``authorize`` allows *peer* the *role* at *address*.

        ``authorize`` gets the node's own name, even if the peer used an alias. An exception in it
        is logged and counts as False.
        """
        if self.authorize is None:
            return True
        try:
            name = self.own_name(peer, address)
            if role == "sender" and is_direct_reply(name):
                # A peer that knows such an address received it in order to answer.
                return True
            return bool(await self.authorize(peer, name, role))
        except Exception:
            log.exception("authorize failed for %r", address)
            return False

    async def may_send(self, peer: Peer, address: str) -> Error | None:
        """Return why *peer* may not send to *address*, a ``to`` or ``reply-to``; None if it may."""
        refused = self.decide(peer, Rights.SEND, address)
        if refused is None and not await self.is_allowed(peer, address, "sender"):
            refused = not_authorized(address)
        # A token may have expired while ``authorize`` was running.
        return refused or self.decide(peer, Rights.SEND, address)

    async def may_declare(self, peer: Peer, passages: Sequence[Passage]) -> Error | None:
        """Return why *peer* may not declare a route for messages along *passages*; None if it may.

        ``authorize`` is asked about each passage as for a link that receives from its source and
        one that sends to its target.
        """
        refused = decide_passages(self.decide, peer, passages)
        for each in passages if self.authorize is not None and not peer.trusted else ():
            for address, role in ((each.source, "receiver"), (each.target, "sender")):
                if refused is None and not await self.is_allowed(peer, address, role):
                    refused = not_authorized(address)
        return refused or decide_passages(self.decide, peer, passages)


def not_authorized(address: object) -> Error:
    """Return the error for a peer that ``authorize`` refuses *address*."""
    return Error("amqp:unauthorized-access", f"{address!r} is not for you")
