"""Limits on input of the wire format, each with its reason.

Limits that a listener sets (frames before open, size of messages) come from
:class:`amqp_rt.limits.Limits`.
"""

from __future__ import annotations

from typing import Final

#: Levels of maps, lists, arrays and structs within each other.
NESTING_MAX: Final = 32
#: Values of one control, command or header, nested ones included: some milliseconds of work.
ELEMENTS_MAX: Final = 4_096
#: Octets of a control, command or header segment. A sequence-set alone may have 65,535 octets.
SEGMENT_MAX: Final = 64 * 1024
#: Octets of all assemblies of a connection that are incomplete, :data:`CHUNK_COST` included.
PARTIAL_MAX: Final = 64 * 1024 * 1024
#: Octets for which each held payload of a frame counts beside its own: memory of the object, so that
#: messages in frames of one octet do not take many times the memory that they count for.
CHUNK_COST: Final = 64
#: The same for an assembly without any payload, of which each channel and track may have one.
ASSEMBLY_COST: Final = 512
#: Most ranges that one sequence-set can hold: its size has two octets.
RANGES_MAX: Final = 8_191
