"""Meshes that a message has passed, as an annotation, against messages that circle between meshes and brokers (pure).

The message annotation ``x-opt-mesh-via`` lists the names of meshes, the first one first. A bridge appends the name of its mesh to
a message that leaves, and refuses a message that comes from outside and has been in its mesh, or in too many others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ..annotations import merge_annotations
from ..codec.sections import (
    MESSAGE_ANNOTATIONS,
    SECTION_BEGIN_MAX,
    SECTION_NAMES,
    begin_section,
    read_annotations,
)
from ..errors import AmqpError, DecodeError
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import Error, Modified, Rejected
from ..values import Symbol, ULong

#: The annotation.
VIA: Final = Symbol("x-opt-mesh-via")
#: Names that the list may have.
_NAMES_MAX: Final = 64

#: Octets to send instead of those given; an outcome that refuses the message; None if more octets are needed to decide.
Revised: TypeAlias = "bytes | Rejected | Modified | None"


class ViaWriter:
    """Revision of messages that leave a mesh.

    Args:
        mesh: Name of the mesh.
    """

    def __init__(self, mesh: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._mesh = mesh
        self._limits = limits

    def __call__(self, octets: bytes, complete: bool) -> Revised:
        """Append the name of the mesh to the list of the message that begins with *octets*."""
        try:
            found = _read_via(octets, complete, self._limits)
            if found is None:
                return None
            start, end, names = found
            if len(names) >= _NAMES_MAX:
                return Rejected(
                    Error("amqp:not-allowed", f"the message has passed {len(names)} meshes")
                )
            changed = merge_annotations(
                octets[start:end], {VIA: [*names, self._mesh]}, self._limits
            )
        except AmqpError as error:
            return Rejected(Error.of(error))
        return octets[:start] + changed + octets[end:]


class ViaCheck:
    """Revision of messages that come into a mesh: they pass unchanged, or are refused.

    Args:
        mesh: Name of the mesh.
        hops_max: Meshes that a message may have passed before.
    """

    def __init__(self, mesh: str, hops_max: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._mesh = mesh
        self._hops_max = hops_max
        self._limits = limits
        #: Messages refused since they had been in the mesh, or in too many; in all, and since the last other one.
        self.refused = 0
        self.in_row = 0

    def __call__(self, octets: bytes, complete: bool) -> Revised:
        """Decide about the message that begins with *octets*."""
        try:
            found = _read_via(octets, complete, self._limits)
        except AmqpError as error:
            return Rejected(Error.of(error))
        if found is None:
            return None
        names = found[2]
        if self._mesh in names:
            self._count()
            return Modified(undeliverable_here=True)
        if len(names) > self._hops_max:
            self._count()
            return Rejected(
                Error(
                    "amqp:not-allowed",
                    f"the message has passed {len(names)} meshes, of {self._hops_max} allowed",
                )
            )
        self.in_row = 0
        return octets

    def _count(self) -> None:
        self.refused += 1
        self.in_row += 1


def names_in(annotations: Mapping[Symbol | ULong, object]) -> list[str]:
    """Return the names of the meshes in *annotations*.

    Raises:
        DecodeError: The annotation is no list of names.
    """
    found = annotations.get(VIA)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise DecodeError(f"the annotation {VIA!r} is no list of names of meshes")
    return [str(each) for each in found]


def _read_via(octets: bytes, complete: bool, limits: Limits) -> tuple[int, int, list[str]] | None:
    """Return where the message annotations are, or belong, and the meshes that they name.

    None if *octets* end before that is known.

    Raises:
        DecodeError: The sections before the body, or the annotation, are malformed.
    """
    place = _find_annotations(octets, complete, limits)
    if place is None:
        return None
    start, end = place
    return start, end, names_in(read_annotations(octets[start:end], limits))


def _find_annotations(octets: bytes, complete: bool, limits: Limits) -> tuple[int, int] | None:
    """Return where the message annotations are, or belong; None if *octets* end before that is known.

    Raises:
        DecodeError: The sections before the body are malformed or out of order.
    """
    at, last = 0, 0
    while at < len(octets):
        begun = begin_section(octets[at : at + SECTION_BEGIN_MAX], limits)
        if begun is None:
            break
        code, content, size = begun
        if code > MESSAGE_ANNOTATIONS:
            return at, at
        if code <= last:
            raise DecodeError(f"{SECTION_NAMES[code]} is out of order")
        end = at + content + size
        if end > len(octets):
            break
        if code == MESSAGE_ANNOTATIONS:
            return at, end
        at, last = end, code
    if not complete:
        return None
    if at < len(octets):
        raise DecodeError("the message ends inside a section")
    return at, at
