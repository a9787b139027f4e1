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

# --- connections -------------------------------------------------------------------------------------

#: Octets and number of the commands of a session that wait for one that takes steps, :data:`COMMAND_COST` of
#: each included, from which on its connection is not read. A few messages more come with the same read.
HELD_OCTETS_MAX: Final = 4 * 1024 * 1024
HELD_MAX: Final = 1_000
#: Octets of a command, or of a header that is converted, that count as one frame more: each may have thousands
#: of values, which take some milliseconds, and a read of 64 KiB may have several of them.
WORK_OCTETS: Final = 32
#: Channels of one connection: each costs the tables of a session. Listeners may allow fewer.
CHANNELS_MAX: Final = 2_048
#: Longest interval in seconds between heartbeats that a client may ask for.
HEARTBEAT_MAX: Final = 3_600
#: Detached sessions that end in one turn: each may requeue thousands of messages.
EXPIRING_TURN: Final = 5
#: Sessions that end in the turn in which their connection is lost; others follow like those that expire.
LOST_TURN: Final = 100

# --- declarations ------------------------------------------------------------------------------------

#: Groups of messages that a queue with ``qpid.group_header_key`` distinguishes.
GROUPS: Final = 1_024

# --- publishing --------------------------------------------------------------------------------------

#: Links of a session to publish to nodes without an inlet; a new one takes the place of one without work.
PUBLISHING_LINKS_MAX: Final = 256
#: Transfers whose completions wait for memory, from which on no more are read.
UNREPORTED_MAX: Final = 1_000
#: Header segments of one session whose conversions are kept, and half of those that there are.
HEADS_MAX: Final = 16
#: Messages of which some fragments have arrived, of one user and of all.
FRAGMENTED_USER_MAX: Final = 100
FRAGMENTED_MAX: Final = 1_000
#: Octets of these, :data:`CHUNK_COST` of each piece included.
FRAGMENTED_USER_OCTETS_MAX: Final = 64 * 1024 * 1024
FRAGMENTED_OCTETS_MAX: Final = 128 * 1024 * 1024
#: Seconds for which they are kept without a session at most, whatever their resume-ttl is.
RESUME_TTL_MAX: Final = 3_600

# --- subscriptions -----------------------------------------------------------------------------------

#: Subscriptions of a session, cancelled ones included while messages of theirs can be settled.
SUBSCRIPTIONS_MAX: Final = 256
#: Messages of a session that are acquired and not settled, or sent within a window and not complete, from
#: which on nothing more is sent: some 300 octets each, beside the message in its queue.
DELIVERIES_MAX: Final = 131_072
#: Messages sent without being acquired that a session can still acquire: of more, the oldest are forgotten.
COPIES_MAX: Final = 65_536
#: Messages sent to the subscriptions of a connection within one turn; more follow in the next one.
GIVEN_MAX: Final = 100
#: Octets of a header that count as one more of these: the values in it are converted for each consumer.
GIVEN_OCTETS: Final = 128

# --- classes file and stream -------------------------------------------------------------------------

#: Packets of a stream that wait for room on the way to one consumer, and their octets, from which on those of
#: low priority are dropped. Old packets are worth little to a client that does not keep up.
STREAM_WAITING_MAX: Final = 64
STREAM_WAITING_OCTETS_MAX: Final = 1024 * 1024
#: Consumers of one session, of each of both classes.
CONSUMERS_MAX: Final = 256
#: Octets of a delivered file that are hashed in one turn, for the name by which it is staged.
HASHED_TURN: Final = 1024 * 1024
#: Octets of a file that are staged between two checks of the work done.
STAGED_STEP: Final = 1024 * 1024
#: Files that a session has opened and not staged: each open waits for its stage, though another session may
#: have taken its file over.
OPENED_MAX: Final = 100
#: Files on their way to the client of a session, which it has not been sent as a whole, and their octets. They
#: are in memory until the client answers the open.
OUTGOING_FILES_MAX: Final = 32
OUTGOING_FILES_OCTETS_MAX: Final = 32 * 1024 * 1024
#: Octets for which a staged file counts beside its content, header and identifier.
STAGED_COST: Final = 512
