"""Records of the node itself: versions, the rate of changes, and what others say in its name (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from ..limits import Limits
from .records import NUMBER_MAX, Addresses, Links, Offer, all_addresses, portions

#: Incarnations of namesakes that are remembered.
_RIVALS_MAX: Final = 8
#: Times that another incarnation must have exceeded our answers, within so many seconds, before it counts as living. Records of
#: a dead one with different epochs can survive in several places, but each of them is heard above our answer once.
_LIVES_AFTER: Final = 8
_LIVES_WITHIN_S: Final = 10.0


class NameLost(Exception):
    """The node has to leave the mesh: its id belongs to another one, or its epochs are exhausted."""


class Origination:
    """Announcements of one node about itself.

    Args:
        node: Its id.
        incarnation: Random number of this start of the node, not 0.
        wall_s: Seconds since 1970 at its start; a wrong clock costs a round trip.
        zone: Its zone, for the choice between destinations.
        urls: Where it listens.
        limits: ``mesh_updates_max`` applies to links and to addresses.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        *,
        wall_s: int,
        zone: str,
        urls: tuple[str, ...],
        limits: Limits,
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.epoch = max(wall_s, 1)
        self._zone = zone
        self._urls = urls
        self._limits = limits
        self._pause_s = 1 / limits.mesh_updates_max
        self._links_seq = 0
        self._addresses_seq = 0
        #: Whether links, or addresses, have changed since they were announced.
        self.links_changed = True
        self.addresses_changed = True
        self._links_from = -inf
        self._addresses_from = -inf
        #: The links, and whether the node drains, as they were announced last.
        self._claimed: tuple[dict[str, int], bool] = ({}, False)
        #: The addresses as they were announced last; and whether to announce all of them again.
        self._announced: dict[str, Offer] = {}
        self._anew = False
        #: Records in our name that were not ours.
        self.contested = 0
        #: Other incarnation that uses our id → how often it exceeded our answer, since when.
        self._rivals: dict[int, tuple[int, float]] = {}

    @property
    def due(self) -> float:
        """Time from which the next announcement may be made, infinite if nothing has changed."""
        return min(
            self._links_from if self.links_changed else inf,
            self._addresses_from if self.addresses_changed else inf,
        )

    def links(self, costs: Mapping[str, int], *, draining: bool, now: float) -> Links | None:
        """Return the record to flood, None if nothing changed or the last one was too recent."""
        if not self.links_changed or now < self._links_from:
            return None
        self.links_changed = False
        # A line that does not come up again, or only for an instant, concerns no other node.
        if self._links_seq and (dict(costs), draining) == self._claimed:
            return None
        self._claimed = (dict(costs), draining)
        self._links_from = now + self._pause_s
        self._links_seq += 1
        return Links(
            *(self.node, self.epoch, self.incarnation, self._links_seq),
            *(self._zone, draining, self._urls, dict(costs)),
        )

    def addresses(self, offers: Mapping[str, Offer], *, now: float) -> list[Addresses]:
        """Return the records to flood: the changes if they fit one message, else all *offers*."""
        if not self.addresses_changed or now < self._addresses_from:
            return []
        self.addresses_changed = False
        if self._anew:
            # As if nothing had been announced: all of them, with a number of their own.
            self._anew = False
            self._addresses_from = now + self._pause_s
            self._addresses_seq += 1
            self._announced = dict(offers)
            return all_addresses(self.node, self.epoch, self._addresses_seq, offers, self._limits)
        before = self._announced
        changed = {name: each for name, each in offers.items() if before.get(name) != each}
        withdrawn = {name: None for name in before if name not in offers}
        base = self._addresses_seq
        if base and not changed and not withdrawn:
            return []
        self._addresses_from = now + self._pause_s
        self._addresses_seq += 1
        self._announced = dict(offers)
        if base and len(list(portions({**changed, **withdrawn}, self._limits))) == 1:
            head = (self.node, self.epoch, base, self._addresses_seq, 0, 1)
            return [Addresses(*head, changed, tuple(withdrawn))]
        return all_addresses(self.node, self.epoch, self._addresses_seq, offers, self._limits)

    def announce_anew(self) -> None:
        """Announce all addresses with the next announcement."""
        self._anew = self.addresses_changed = True

    def claim(self, epoch: int) -> None:
        """Announce everything anew in an epoch above *epoch*, which somewhere counts as ours.

        Raises:
            NameLost: There is no higher epoch.
        """
        self.contested += 1
        self._claim_above(epoch)

    def contest(self, record: Links, now: float) -> None:
        """Answer a record in our name that is newer than ours, or differs from it.

        The record of an earlier start is dead: it never exceeds our answer. Of living namesakes, which answer each other, the lower
        incarnation leaves.

        Raises:
            NameLost: The namesake lives and has the higher incarnation, or there is no higher epoch.
        """
        self.contested += 1
        other = record.incarnation
        if other != self.incarnation:
            times, since = self._rivals.pop(other, (0, now))
            if now - since > _LIVES_WITHIN_S:
                times, since = 0, now
            times += record.epoch > self.epoch
            if times >= _LIVES_AFTER and other > self.incarnation:
                raise NameLost(f"another node of the mesh has the id {self.node!r} as well")
            if len(self._rivals) >= _RIVALS_MAX:
                del self._rivals[next(iter(self._rivals))]
            self._rivals[other] = (times, since)
        self._claim_above(record.epoch)

    def _claim_above(self, epoch: int) -> None:
        if epoch + 1 >= NUMBER_MAX:
            raise NameLost(f"no epoch is left for {self.node!r}: another node used the last one")
        self.links_changed = self.addresses_changed = True
        if epoch < self.epoch:
            # Numbers of this epoch may have been announced already: used again, they would be no news to others.
            return
        self.epoch = epoch + 1
        self._links_seq = self._addresses_seq = 0
        self._announced = {}
