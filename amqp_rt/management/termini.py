"""Termini that outlive their connections, as operators see them: ``amqp_rt.terminus``.

DELETE ends one whose link is not attached, with its unsettled deliveries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from ..broker.termini import Termini, Terminus
from ..errors import AmqpError
from ..termini import outlives_connection
from .answering import UnchangeableEntities, attributes


class TerminusEntity(Struct, frozen=True, kw_only=True):
    """Our end of a link, which is kept when the link is lost."""

    #: User, container-id, role and link, each in the notation of URLs, with slashes between them.
    name: str
    user: str | None
    container_id: str
    #: Name of the link, or the common part of the names of those of a shared subscription.
    link: str
    #: The peer's role: ``receiver`` or ``sender``.
    role: str
    address: str
    #: Whether several links share it.
    shared: bool
    #: ``terminus-durability`` (Part 3 §3.5.5): 0 to 2.
    durable: int
    expiry_policy: str
    timeout_s: int
    #: Number of attached links.
    links: int
    #: Seconds until it expires; None if that is not counted at present.
    expires_in_s: float | None


class TerminusCollection(UnchangeableEntities):
    """Termini of a broker (:class:`~amqp_rt.management.answering.Collection`). Only links create them."""

    type_name = "amqp_rt.terminus"
    attributes = TerminusEntity
    operations: Mapping[str, list[str]] = {"READ": [], "DELETE": []}

    def __init__(self, termini: Termini) -> None:
        self._termini = termini

    def rows(self, virtual_host: str) -> Iterator[Mapping[str, Any] | None]:
        """Yield the row of every terminus."""
        for each in self._termini:
            counts = each.key[0] == virtual_host and outlives_connection(each.kept)
            yield attributes(self._entity(each)) if counts else None

    def find(self, name: str, virtual_host: str) -> Mapping[str, Any] | None:
        """Return the row of terminus *name*, None if there is none."""
        found = self._find(name, virtual_host)
        return None if found is None else attributes(self._entity(found))

    def _find(self, name: str, virtual_host: str) -> Terminus | None:
        for each in self._termini:
            counts = each.key[0] == virtual_host and outlives_connection(each.kept)
            if counts and _name_of(each) == name:
                return each
        return None

    def _entity(self, terminus: Terminus) -> TerminusEntity:
        _, user, container_id, sending, link, kind = terminus.key
        left = terminus.deadline - self._termini.clock.monotonic()
        return TerminusEntity(
            name=_name_of(terminus),
            user=user or None,
            container_id=container_id,
            link=link,
            role="receiver" if sending else "sender",
            address=terminus.address,
            shared=bool(kind),
            durable=terminus.kept.durable,
            expiry_policy=str(terminus.kept.expiry_policy),
            timeout_s=terminus.kept.timeout,
            links=len(terminus.links()),
            expires_in_s=round(max(0.0, left), 3) if isfinite(left) else None,
        )

    async def delete(self, name: str, virtual_host: str) -> None:
        """End terminus *name*.

        Raises:
            AmqpError: A link is attached to it.
        """
        found = self._find(name, virtual_host)
        if found is None:
            return
        if found.links():
            raise AmqpError(
                f"a link is attached to the terminus {name!r:.100}: detach it first",
                condition="amqp:resource-locked",
            )
        found.end()


def _name_of(terminus: Terminus) -> str:
    _, user, container_id, sending, link, kind = terminus.key
    role = "receiver" if sending else "sender"
    parts = (user, container_id, f"{role}, {kind}" if kind else role, link)
    return "/".join(quote(each, safe=" ,|") for each in parts)
