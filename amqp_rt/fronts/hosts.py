"""The base of hosts, for those that answer a few of the container's questions only; hosts that list their addresses, or lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ..outcomes import Error, Rejected
from ..termini import Source, Target
from .base import Host, IncomingDelivery, ReceivingEndpoint, ReceivingLink, SendingLink

__all__ = ["BareHost", "ListedHost", "RoutingHost"]


class BareHost:
    """Host without addresses, kept termini, transactions and virtual hosts of its own.

    Subclasses replace :meth:`attach`, and what else they have; see ``fronts.base.Host`` for the questions.
    """

    #: Capabilities that connections offer because of this host.
    capabilities: Sequence[str] = ()

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Return False: there are no addresses."""
        return False

    def kept_source(self, link: SendingLink) -> Source | None:
        """Return None: no sources are kept."""
        return None

    def kept_terminus(self, link: ReceivingLink | SendingLink) -> Source | Target | None:
        """Return None: no termini are kept."""
        return None

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return None: there are no addresses."""
        return None

    def hold_post(self, link: ReceivingLink, delivery: IncomingDelivery) -> None:
        """Do nothing: there are no transactions."""

    def release_post(self, delivery: IncomingDelivery) -> None:
        """Do nothing: there are no transactions."""

    def refuse_post(
        self, link: ReceivingLink, delivery: IncomingDelivery, outcome: Rejected
    ) -> bool:
        """Return False: there are no transactions."""
        return False

    def virtual_host(self, hostname: str) -> str | None:
        """Return *hostname*: the addresses are at every virtual host."""
        return hostname

    def own_name(self, address: str, virtual_host: str) -> str:
        """Return *address*: there are no aliases."""
        return address

    def is_dynamic(self, address: str, virtual_host: str) -> bool:
        """Return False: no addresses are created for links."""
        return False


@runtime_checkable
class ListedHost(Host, Protocol):
    """Host that can list its addresses, so that a node of a mesh can offer them to others."""

    #: Called with each address that has been added or removed, before anything else happens.
    on_address: Callable[[str], None] | None
    #: Whether control links of transactions can be attached.
    coordinates: bool

    def addresses(self) -> Sequence[str]:
        """Return the addresses that any peer can use."""

    def lists(self, address: str) -> bool:
        """Return whether *address* is among them."""


@runtime_checkable
class RoutingHost(Host, Protocol):
    """Host that leads messages for some addresses to other containers."""

    def routes(self, address: str) -> bool:
        """Return whether links of senders to *address* lead to other containers."""
