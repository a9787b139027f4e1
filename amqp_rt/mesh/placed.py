"""Links of other nodes that end at this one: their number, and what they are told of the load of our nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Protocol

import trio

from ..fronts.base import ReceivingLink
from .loads import Load, write_load

#: Seconds for which a link may be attaching.
_ATTACHING_S: Final = 5.0
#: Links after which those that have ended are searched for.
_SWEEP_LINKS: Final = 64
#: Links that are looked at before other tasks get a turn.
_TURN: Final = 256


class PlacedLinks:
    """Links of one member that end here, whose endpoints do not report their end.

    Those that have ended are searched for whenever the number has doubled, and when it is asked for.
    """

    def __init__(self) -> None:
        self._links: dict[Any, float] = {}
        self._sweep_at = _SWEEP_LINKS

    def add(self, link: Any, now: float) -> None:
        """Count *link*."""
        self._links[link] = now
        if len(self._links) >= self._sweep_at:
            self.sweep(now)
            self._sweep_at = max(2 * len(self._links), _SWEEP_LINKS)

    def sweep(self, now: float) -> int:
        """Forget the links that have ended; return the number of the others."""
        for link, since in list(self._links.items()):
            # A link may be accepted or refused later than it was placed.
            if link.session.ended or (not link.attached and now - since > _ATTACHING_S):
                del self._links[link]
        return len(self._links)

    def attached(self) -> int:
        """Return the number of links that are attached."""
        return sum(each.attached for each in self._links)

    def __len__(self) -> int:
        return len(self._links)


class Loaded(Protocol):
    """Node that processes messages."""

    #: Messages that wait or are processed.
    load: int
    #: Messages that it processes at a time.
    slots: int


class LoadReports:
    """Loads of our nodes, as the first nodes of routes know them from flows.

    Each flow of a link says the load. A link on which none is due gets one when the load has doubled or halved.
    """

    def __init__(self) -> None:
        #: What each link was told last, by the node where it ends.
        self._told: dict[Loaded, dict[ReceivingLink, Load]] = {}

    def __bool__(self) -> bool:
        return bool(self._told)

    def follow(self, node: Loaded, link: ReceivingLink) -> None:
        """Tell the load of *node* with the flows of *link*."""
        self._told.setdefault(node, {})[link] = Load(0, 0)
        link.flow_report = partial(self._properties, node, link)

    def _properties(self, node: Loaded, link: ReceivingLink) -> Mapping[object, object]:
        load = Load(node.load, node.slots)
        self._told.setdefault(node, {})[link] = load
        return write_load(load)

    async def tell(self) -> None:
        """Send a flow to each link that knows another load than that of its node."""
        looked = 0
        for node, told in list(self._told.items()):
            for link, load in list(told.items()):
                looked += 1
                if looked % _TURN == 0:
                    await trio.lowlevel.checkpoint()
                if not link.attached:
                    told.pop(link, None)
                elif _differs(load, Load(node.load, node.slots)):
                    link.report()
            if not told:
                self._told.pop(node, None)


def _differs(old: Load, new: Load) -> bool:
    low, high = sorted((old.load, new.load))
    return old.slots != new.slots or high > 2 * low
