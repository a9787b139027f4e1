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

# --- sessions ----------------------------------------------------------------------------------------

#: Seconds for which the state of a detached session is kept at most, whatever ``request-timeout`` asks.
TIMEOUT_MAX: Final = 3_600
#: Detached sessions of one user, and of all users, whose state is kept; others end when they detach.
DETACHED_USER_MAX: Final = 100
DETACHED_MAX: Final = 1_000
#: Octets that all detached sessions hold together; one that would exceed it ends when it detaches.
DETACHED_OCTETS_MAX: Final = 256 * 1024 * 1024
#: Octets for which a detached session counts beside its name and the commands kept for replay.
SESSION_COST: Final = 4_096
#: Octets and number of commands kept for replay from which on a session offers no room for transfers.
REPLAY_OCTETS_MAX: Final = 4 * 1024 * 1024
REPLAY_MAX: Final = 5_000
#: Likewise for commands that cannot wait for room, such as results; more of them end the session.
URGENT_OCTETS_MAX: Final = 1024 * 1024
URGENT_MAX: Final = 1_000
#: Octets for which each command kept for replay counts beside its own.
COMMAND_COST: Final = 256
#: Octets of commands that arrive on resumption before the peer's ``expected``, :data:`COMMAND_COST` of each
#: included. A client that does not wait for our ``flush`` may replay its whole buffer before that.
WAITING_MAX: Final = 16 * 1024 * 1024
#: Commands handled in one turn after they have waited: a few milliseconds of work.
WAITING_TURN: Final = 200
#: Commands of a session that are being executed, from which on its input should wait.
EXECUTING_MAX: Final = 10_000
#: Commands that a peer may leave incomplete: a part of the circle in which serial numbers have an order.
OUTSTANDING_MAX: Final = 1 << 30
#: Ranges of these: a peer that completes every second command makes one of each.
OUTSTANDING_RANGES_MAX: Final = 65_536
#: Ranges of ``session.completed`` from which on we ask for a timely ``known-completed``.
TIMELY_RANGES: Final = 1_000
