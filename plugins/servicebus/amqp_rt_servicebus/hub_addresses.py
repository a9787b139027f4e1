"""Addresses of event hubs, their partitions, publishers and consumer groups."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

_GROUPS: Final = "consumergroups"
_PARTITIONS: Final = "partitions"
_PUBLISHERS: Final = "publishers"
#: Digits of a partition's id.
_ID_DIGITS_MAX: Final = 9


class HubAddress(Struct, frozen=True):
    """Address in or of a hub, with the spelling of the client."""

    hub: str
    #: Id of the partition, as text; None if the service chooses it.
    partition: str | None = None
    #: Consumer group of a reader.
    group: str | None = None
    #: Name of a publisher.
    publisher: str | None = None


def hub_address(address: str) -> HubAddress:
    """Return the parts of *address*: ``hub``, ``hub/Partitions/n``, ``hub/Publishers/p`` or
    ``hub/ConsumerGroups/g/Partitions/n``, the fixed words in any case.

    Names of hubs never have these words (:func:`.declarations.check_path`), so that there is one reading.
    """
    parts = address.split("/")
    kind = parts[-2].lower() if len(parts) > 2 else ""
    if kind == _PARTITIONS and len(parts) > 4 and parts[-4].lower() == _GROUPS:
        return HubAddress("/".join(parts[:-4]), partition=parts[-1], group=parts[-3])
    if kind == _PARTITIONS:
        return HubAddress("/".join(parts[:-2]), partition=parts[-1])
    if kind == _PUBLISHERS:
        return HubAddress("/".join(parts[:-2]), publisher=parts[-1])
    return HubAddress(address)


def partition_index(text: str, count: int) -> int | None:
    """Return the index of the partition with the id *text*; None if none of *count* partitions has it."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _ID_DIGITS_MAX):
        return None
    index = int(text)
    return index if index < count and str(index) == text else None
