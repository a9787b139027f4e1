"""Records of all nodes of a mesh, as one node knows them (pure).

Of each origin the newest records are kept. Newer is the higher epoch, and within an epoch the higher sequence number. The digest
and the tables of versions cover the nodes within reach only, so that nodes which forget the others at different times agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from typing import Final, NamedTuple

from ..limits import DEFAULT_LIMITS, Limits
from .directory import Directory, admit_all
from .records import Addresses, Links, Offer, Version, all_addresses, encode_record

#: Version of an origin of which nothing is known.
UNKNOWN: Final = Version(0, 0, 0)


class Verdict(Enum):
    """Result of putting a record into the database."""

    #: It is in the database now: flood it.
    NEWER = "newer"
    #: It is known, or was a part that is known.
    SAME = "same"
    #: Something newer is known.
    OLDER = "older"
    #: It changes a version that is not known: ask for everything.
    GAP = "gap"
    #: The origin changes too often, or there are too many nodes: ignore it. Digests repair it later.
    REFUSED = "refused"


class Allowance:
    """Rate of events, of which a second's worth may come at once."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._left = float(rate)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Return whether an event at *now* is within the rate, and count it if so."""
        self._left = min(self._left + max(now - self._at, 0.0) * self._rate, self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


#: Lists of one version that are gathered at a time: those of nodes that know or divide it differently.
_LISTS_MAX: Final = 4


class _ListParts(NamedTuple):
    """Parts of a list of addresses, some of which are missing."""

    there: set[int]
    offers: dict[str, Offer]


class _Origin:
    """Records of one node."""

    __slots__ = ("addresses_rate", "gathered", "links", "links_rate", "lists", "mark", "version")

    def __init__(self, rate: int) -> None:
        self.version = UNKNOWN
        self.links: Links | None = None
        self.links_rate = Allowance(rate)
        self.addresses_rate = Allowance(rate)
        #: Epoch and sequence number of lists of which parts are missing; the lists, by their mark and number of parts.
        self.gathered = (0, 0)
        self.lists: dict[tuple[int, int], _ListParts] = {}
        #: Contribution to the digest.
        self.mark = 0


class MeshDatabase:
    """Records of all origins.

    Args:
        limits: ``mesh_nodes_max``, ``mesh_updates_max``, ``mesh_kept_s`` and the limits of :class:`Directory` apply.
        admit: Whether the rules of the mesh let an origin offer an address.
        nodes_max: Nodes to know at most, instead of ``mesh_nodes_max``.
    """

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        admit: Callable[[str, str, Offer], bool] = admit_all,
        *,
        nodes_max: int | None = None,
    ) -> None:
        self._limits = limits
        self._nodes_max = limits.mesh_nodes_max if nodes_max is None else nodes_max
        self._origins: dict[str, _Origin] = {}
        self.directory = Directory(limits, admit)
        #: Links that each origin claims: node → neighbour → cost.
        self.claims: dict[str, Mapping[str, int]] = {}
        #: Nodes out of reach, and since when; the longest first.
        self._out: dict[str, float] = {}
        self._reach: set[str] = set()
        #: Equal for nodes that know the same versions of the nodes within reach; below 2**63.
        self.digest = 0
        #: Records refused, and offers of lists whose parts are incomplete.
        self.refused = 0
        self._waiting_offers = 0

    def __len__(self) -> int:
        return len(self._origins)

    def __contains__(self, origin: str) -> bool:
        return origin in self._origins

    def version(self, origin: str) -> Version:
        """Return the version of what is known of *origin*."""
        entry = self._origins.get(origin)
        return UNKNOWN if entry is None else entry.version

    def links(self, origin: str) -> Links | None:
        """Return the newest record of the links of *origin*."""
        entry = self._origins.get(origin)
        return None if entry is None else entry.links

    def put_links(self, record: Links, now: float, *, ours: bool = False) -> Verdict:
        """Take *record* over if it is newer; our own ones have no rate."""
        entry = self._entry(record.origin, now)
        if entry is None:
            return Verdict.REFUSED
        known = entry.version
        if (record.epoch, record.seq) <= (known.epoch, known.links):
            same = (record.epoch, record.seq) == (known.epoch, known.links)
            return Verdict.SAME if same else Verdict.OLDER
        if not ours and not entry.links_rate.take(now):
            self.refused += 1
            return Verdict.REFUSED
        addresses = known.addresses if record.epoch == known.epoch else 0
        entry.links = record
        self.claims[record.origin] = record.costs
        self._set_version(record.origin, entry, Version(record.epoch, record.seq, addresses))
        return Verdict.NEWER

    def put_addresses(self, record: Addresses, now: float, *, ours: bool = False) -> Verdict:
        """Take *record* over if it is newer: changes at once, a list when all its parts are there."""
        entry = self._entry(record.origin, now)
        if entry is None:
            return Verdict.REFUSED
        known = entry.version
        if (record.epoch, record.seq) <= (known.epoch, known.addresses):
            same = (record.epoch, record.seq) == (known.epoch, known.addresses)
            return Verdict.SAME if same else Verdict.OLDER
        if record.base:
            # Changes are stated as what holds after them, so that they also apply to versions after their base.
            if record.epoch != known.epoch or record.base > known.addresses:
                return Verdict.GAP
        elif entry.lists and (record.epoch, record.seq) < entry.gathered:
            return Verdict.OLDER
        elif (record.epoch, record.seq) == entry.gathered and _list_of(record) in entry.lists:
            return self._add_part(entry, record)
        if not ours and not entry.addresses_rate.take(now):
            self.refused += 1
            return Verdict.REFUSED
        if not record.base:
            if (record.epoch, record.seq) != entry.gathered:
                self._drop_lists(entry)
                entry.gathered = (record.epoch, record.seq)
            elif len(entry.lists) >= _LISTS_MAX:
                self._drop_list(entry, next(iter(entry.lists)))
            entry.lists[_list_of(record)] = _ListParts(set(), {})
            return self._add_part(entry, record)
        for address in record.withdrawn:
            self.directory.remove(record.origin, address)
        for address, offer in record.offers.items():
            self.directory.add(record.origin, address, offer)
        self._set_version(record.origin, entry, Version(known.epoch, known.links, record.seq))
        return Verdict.NEWER

    def _add_part(self, entry: _Origin, record: Addresses) -> Verdict:
        """Add a part of a list; the last one makes the list valid."""
        there, offers = entry.lists[_list_of(record)]
        if record.part in there:
            return Verdict.SAME
        there.add(record.part)
        limits = self._limits
        for address, offer in record.offers.items():
            if (
                len(offers) < limits.mesh_node_addresses_max
                and self._waiting_offers < limits.mesh_addresses_max
            ):
                self._waiting_offers += address not in offers
                offers[address] = offer
            else:
                dropped = self.directory.dropped
                dropped["incomplete list"] = dropped.get("incomplete list", 0) + 1
        if len(there) == record.parts:
            self.directory.replace(record.origin, offers)
            known = entry.version
            links = known.links if record.epoch == known.epoch else 0
            self._set_version(record.origin, entry, Version(record.epoch, links, record.seq))
            self._drop_lists(entry)
        return Verdict.NEWER

    def _drop_lists(self, entry: _Origin) -> None:
        for key in list(entry.lists):
            self._drop_list(entry, key)

    def _drop_list(self, entry: _Origin, key: tuple[int, int]) -> None:
        self._waiting_offers -= len(entry.lists.pop(key).offers)

    def _entry(self, origin: str, now: float) -> _Origin | None:
        """Return the entry of *origin*, a new one if there is room or the one longest out of reach can be forgotten."""
        entry = self._origins.get(origin)
        if entry is not None:
            return entry
        if len(self._origins) >= self._nodes_max:
            oldest = next(iter(self._out), None)
            if oldest is None:
                self.refused += 1
                return None
            self.forget(oldest)
        entry = self._origins[origin] = _Origin(self._limits.mesh_updates_max)
        if origin not in self._reach:
            self._out[origin] = now
        return entry

    def _set_version(self, origin: str, entry: _Origin, version: Version) -> None:
        mark = _mark(origin, version)
        if origin in self._reach:
            self.digest ^= entry.mark ^ mark
        entry.version = version
        entry.mark = mark

    def set_reach(self, reach: set[str], now: float) -> None:
        """Set the nodes within reach; the others are forgotten after ``mesh_kept_s``."""
        if reach == self._reach:
            return
        for origin in self._reach ^ reach:
            entry = self._origins.get(origin)
            if entry is None:
                continue
            self.digest ^= entry.mark
            if origin in reach:
                self._out.pop(origin, None)
            else:
                self._out[origin] = now
        self._reach = reach

    @property
    def expires_at(self) -> float | None:
        """Time at which the next node is forgotten, None if all are within reach."""
        for since in self._out.values():
            return since + self._limits.mesh_kept_s
        return None

    def expire(self, now: float) -> int:
        """Forget nodes that were out of reach for ``mesh_kept_s``; return their number."""
        kept = self._limits.mesh_kept_s
        gone = [origin for origin, since in self._out.items() if since + kept <= now]
        for origin in gone:
            self.forget(origin)
        return len(gone)

    def forget(self, origin: str) -> None:
        """Forget all that is known of *origin*."""
        entry = self._origins.pop(origin)
        if origin in self._reach:
            self.digest ^= entry.mark
        self._drop_lists(entry)
        self._out.pop(origin, None)
        self.claims.pop(origin, None)
        self.directory.replace(origin, {})

    def versions(self, *others: str) -> dict[str, Version]:
        """Return the versions of the nodes within reach, and of *others* of which something is known."""
        names = self._reach.union(others)
        return {name: entry.version for name, entry in self._origins.items() if name in names}

    def missing(self, theirs: Mapping[str, Version]) -> dict[str, Version]:
        """Return our versions of the origins of which *theirs* are newer, to ask for the difference."""
        return {
            origin: ours
            for origin, version in theirs.items()
            if _newer(version, ours := self.version(origin))
        }

    def answers(self, asked: Mapping[str, Version]) -> Iterator[bytes]:
        """Yield the messages that are newer than the versions *asked*, one at a time.

        A caller may pause between two messages for as long as it likes; what changes meanwhile is flooded anyway.
        """
        for origin, version in asked.items():
            entry = self._origins.get(origin)
            if entry is None:
                continue
            ours = entry.version
            newer_epoch = ours.epoch > version.epoch
            if ours.epoch < version.epoch:
                continue
            if (
                entry.links is not None
                and ours.links
                and (newer_epoch or ours.links > version.links)
            ):
                yield encode_record(entry.links)
            if ours.addresses and (newer_epoch or ours.addresses > version.addresses):
                yield from self.list_of(origin)

    def list_of(self, origin: str) -> Iterator[bytes]:
        """Yield the messages that list all addresses of *origin*, as they are at the first one."""
        version = self.version(origin)
        offers = dict(self.directory.of(origin))
        for part in all_addresses(origin, version.epoch, version.addresses, offers, self._limits):
            yield encode_record(part)

    def draining(self, among: Iterable[str]) -> set[str]:
        """Return those of *among* that say they are draining."""
        entries = ((origin, self._origins.get(origin)) for origin in among)
        return {o for o, entry in entries if entry and entry.links and entry.links.draining}


def _list_of(record: Addresses) -> tuple[int, int]:
    return record.mark, record.parts


def _newer(one: Version, other: Version) -> bool:
    """Return whether *one* has something that *other* lacks."""
    if one.epoch != other.epoch:
        return one.epoch > other.epoch
    return one.links > other.links or one.addresses > other.addresses


def _mark(origin: str, version: Version) -> int:
    text = f"{origin}/{version.epoch}/{version.links}/{version.addresses}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def mark_of(origin: str, version: Version) -> int:
    """Return the digest of a database that knows *origin* only, below 2**63."""
    return _mark(origin, version)
