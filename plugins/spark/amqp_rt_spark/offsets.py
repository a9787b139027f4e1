"""Offsets of streams of logs, as Spark keeps them in a checkpoint.

An offset identifies the log by its incarnation beside its address: a log that was deleted and created again is
a different one, whose offsets denote other records. Its keys are sorted, since Spark compares the texts of two
offsets. Beside each number is the era of the record before it, which changes when the broker is started: a
store restored from a backup gives new records numbers that other records had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .logs import LogState

_VERSION: Final = 1

#: Address → incarnation, and partition → offset.
Positions = dict[str, tuple[str, dict[int, int]]]
#: Address and partition → the era of the record before the offset there.
Eras = dict[tuple[str, int], str]


def offset_of(positions: Positions, eras: Eras | None = None) -> dict[str, Any]:
    """Return *positions*, and their *eras* as far as known, as an offset for the checkpoint."""
    found: dict[str, Any] = {}
    for address, (incarnation, parts) in sorted(positions.items()):
        known = {
            str(part): era for part in sorted(parts) if (era := (eras or {}).get((address, part)))
        }
        found[address] = {
            **({"e": known} if known else {}),
            "id": incarnation,
            "p": {str(part): parts[part] for part in sorted(parts)},
        }
    return {"logs": found, "v": _VERSION}


def eras_of(offset: Mapping[str, Any]) -> Eras:
    """Return the eras in *offset*, which :func:`offset_of` made; older checkpoints have none."""
    return {
        (str(address), int(part)): str(era)
        for address, each in offset["logs"].items()
        for part, era in each.get("e", {}).items()
    }


def positions_of(offset: Mapping[str, Any]) -> Positions:
    """Return the positions in *offset*, which :func:`offset_of` made.

    Raises:
        ValueError: The offset is not one of logs.
    """
    if offset.get("v") != _VERSION or not isinstance(offset.get("logs"), Mapping):
        raise ValueError(f"the checkpoint holds no offset of logs, but {str(offset)[:200]}")
    return {
        str(address): (
            str(each["id"]),
            {int(part): int(number) for part, number in each["p"].items()},
        )
        for address, each in offset["logs"].items()
    }


def renamed(offset: Mapping[str, Any], states: Mapping[str, LogState]) -> Mapping[str, Any]:
    """Return *offset*, from a checkpoint, with the current names of its logs.

    A log gets another name when one broker becomes several, or the reverse, and when a broker is reached
    under another URL. Its incarnation stays.
    """
    now = {state.incarnation: name for name, state in states.items() if state.incarnation}
    known = offset["logs"]
    names = {
        name: now.get(each["id"], name) if name not in states else name
        for name, each in known.items()
    }
    if len(set(names.values())) < len(names):
        # Two logs would become one; the reader of the offset reports that.
        return offset
    return {**offset, "logs": {names[name]: each for name, each in known.items()}}
