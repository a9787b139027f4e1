"""How busy a destination is, as the flows of links between nodes say it (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ..values import Symbol

#: Property of a flow: the load of the node, and its slots. Nodes between pass it on.
LOAD: Final = Symbol("x-opt-load")
_MAX: Final = 0xFFFFFFFF


class Load(NamedTuple):
    """How busy a node is."""

    #: Messages that wait or are processed there, of all its links.
    load: int
    #: Messages that it processes at a time; 0 if that is not known.
    slots: int


def write_load(load: Load) -> dict[object, object]:
    """Return the properties of a flow that tell *load*."""
    return {LOAD: [min(load.load, _MAX), min(load.slots, _MAX)]}


def read_load(properties: Mapping[object, object] | None) -> Load | None:
    """Return the load that the properties of a flow tell; None if there is none, or it is malformed."""
    value = None if properties is None else properties.get(LOAD)
    if not isinstance(value, list) or len(value) != 2:
        return None
    load, slots = value
    if not (isinstance(load, int) and isinstance(slots, int) and load >= 0 and slots >= 0):
        return None
    return Load(int(load), int(slots))
