"""Entries: messages as nodes hold them, how they are made on arrival and encoded for sending.

The bare message is never decoded, and the payload is sent as received unless its header has to
change. Compiled: each message passes through one of these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from ..annotations import (
    AnnotationPolicy,
    check_annotations,
    check_maps,
    merge_annotations,
)
from ..codec.section_types import Head
from ..codec.sections import (
    MESSAGE_ANNOTATIONS,
    read_annotations,
    reencode,
    walk_head,
    write_annotations,
)
from ..compiling import mypyc_attr
from ..errors import AmqpError, CreditTooSmall, DecodeError, LocalProtocolError
from ..fronts.base import Payload
from ..limits import DEFAULT_LIMITS, Limits
from ..loglimit import LogLimiter
from ..message import JOIN_MAX, MESSAGE_FORMAT
from ..outcomes import Error
from .entry_types import LATER, NOWHERE, Entry, KeptFields, Moves, decode_fields, encode_fields
from .expiry import AUTOMATIC, NEVER, dead_letter_annotations, expiry, remaining_ms
from .queue.schedule import Due, due_of

__all__ = [
    "LATER",
    "NEVER",
    "NOWHERE",
    "Entry",
    "EntryFactory",
    "Moves",
    "UnacceptableMessage",
    "annotate",
    "annotated",
    "dead_letter",
    "encode_outgoing",
    "entry_of",
    "exceeds_link",
    "head_of",
    "restored",
]

#: Largest size in octets of annotations that are remembered and compared with the next message's.
_ENCODED_MAX: Final = 1_024


def moves_after(entry: Entry, source: str, reason: str) -> Moves | None:
    """Return the moves of *entry* once *source* gives it up; None if a consumer caused that."""
    if reason not in AUTOMATIC:
        return None
    before = entry.moves
    return Moves((source,)) if before is None else Moves((*before.queues, source), before.copies)


def entry_of(
    payload: bytes, head: Head, expires_at: float = NEVER, publisher: str | None = None
) -> Entry:
    """Return an entry of the message *payload*, whose sections before the body are *head*."""
    return Entry(
        payload,
        MESSAGE_FORMAT,
        head.durable,
        head.priority,
        head.first_acquirer,
        head.delivery_count,
        expires_at,
        head.ttl_ms is not None,
        publisher=publisher,
    )


def head_of(entry: Entry) -> bytes:
    """Encode the fields of *entry* that a store keeps beside its payload."""
    return encode_fields(
        KeptFields(
            entry.message_format,
            entry.durable,
            entry.priority,
            entry.first_acquirer,
            entry.delivery_count,
            None if entry.expires_at == NEVER else entry.expires_at,
            entry.altered,
            entry.attempts,
            entry.publisher,
            None if entry.due is None else entry.due.at,
            None if entry.due is None else entry.due.delay_s,
            entry.payload if entry.pieces else b"",
            entry.rest,
            entry.pieces,
            entry.returnable,
            entry.moves,
        )
    )


def restored(node: int, sequence: int, head: bytes, payload: bytes) -> Entry:
    """Return the entry that a store has kept at *sequence* of *node*.

    Raises:
        msgspec.DecodeError: *head* was not encoded by :func:`head_of`.
    """
    known = decode_fields(head)
    return Entry(
        known.front if known.pieces else payload,
        known.message_format,
        known.durable,
        known.priority,
        known.first_acquirer,
        known.delivery_count,
        NEVER if known.expires_at is None else known.expires_at,
        known.altered,
        known.attempts,
        sequence,
        None,
        True,
        known.publisher,
        None if known.due_at is None else Due(known.due_at, known.delay_s),
        rest=known.rest,
        pieces=known.pieces,
        origin=(node, sequence) if known.pieces else None,
        returnable=known.returnable,
        moves=known.moves,
    )


class UnacceptableMessage(AmqpError):
    """Message that breaks a rule for which its link is detached (§3.2.10)."""

    default_condition = "amqp:not-implemented"


@mypyc_attr(allow_interpreted_subclasses=True)
class EntryFactory:
    """Intake of a node: turns arriving messages into entries.

    Args:
        annotations: How unknown annotation keys are treated.
        limits: Bounds of header and annotations.
    """

    def __init__(
        self, annotations: AnnotationPolicy = "default", limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.annotations = annotations
        self.limits = limits
        #: Limits log lines about settled messages that are refused.
        self.log_limiter = LogLimiter(limits)
        #: Last message annotations, and what they hold: many publishers repeat the same ones with
        #: each message.
        self._last_encoded = b""
        self._annotations: Mapping[Any, object] = {}

    def make_entry(
        self, payload: bytes, message_format: int, now: float, ttl_s: float | None = None
    ) -> Entry:
        """Return the entry for an encoded message that arrived *now* at a node with *ttl_s*.

        A message of an unknown format is relayed unchanged (§3.2.16).

        Raises:
            DecodeError: Its header or annotations are malformed.
            UnacceptableMessage: Its annotations have a key that must be understood and is not.
        """
        if message_format != MESSAGE_FORMAT:
            return Entry(payload, message_format, expires_at=expiry(None, ttl_s, now))
        head = walk_head(payload, self.limits)
        due: Due | None = None
        encoded = head.message_annotations
        if encoded or head.delivery_annotations:
            annotations = self._annotations if encoded == self._last_encoded else None
            if annotations is None or head.delivery_annotations:
                annotations = self._checked(head)
            if head.delivery_annotations:
                # Delivery annotations are for this hop only (§3.2.2).
                payload = head.header + encoded + head.rest
            due = due_of(annotations, now)
        ttl_ms = head.ttl_ms
        expires_at = NEVER if ttl_ms is None and ttl_s is None else expiry(ttl_ms, ttl_s, now)
        entry = entry_of(payload, head, expires_at)
        if due is not None:
            entry.sequence = LATER
            entry.due = due
        return entry

    def _checked(self, head: Head) -> Mapping[Any, object]:
        """Check the annotations of a message; return the message annotations.

        Raises:
            DecodeError: They are malformed.
            UnacceptableMessage: They have a key that must be understood and is not.
        """
        encoded = head.message_annotations
        delivery: Mapping[Any, object] = read_annotations(head.delivery_annotations, self.limits)
        annotations: Mapping[Any, object] = read_annotations(encoded, self.limits)
        error = check_maps(delivery, annotations, self.annotations)
        if error is not None:
            raise UnacceptableMessage(error.description or "", condition=error.condition)
        if len(encoded) <= _ENCODED_MAX:
            self._last_encoded = encoded
            self._annotations = annotations
        return annotations

    def without_delivery_annotations(self, payload: bytes, message_format: int) -> bytes:
        """Remove the delivery annotations, which end here (§3.2.2), from a message for several nodes.

        :meth:`make_entry` would remove them at each node and make a copy for each. A message that
        :meth:`make_entry` refuses is returned unchanged.
        """
        if message_format != MESSAGE_FORMAT:
            return payload
        try:
            head = walk_head(payload, self.limits)
            if (
                not head.delivery_annotations
                or check_annotations(head, self.annotations, limits=self.limits) is not None
            ):
                return payload
        except DecodeError:
            return payload
        return head.header + head.message_annotations + head.rest


def encode_outgoing(entry: Entry, now: float) -> Payload:
    """Encode an altered *entry* for sending, with its header brought up to date (§3.2.1).

    The ttl is reduced by the time spent here, failed deliveries are counted, and first-acquirer is
    cleared after an earlier acquisition. Returns bytes for a small message, pieces for a large one.
    """
    if entry.message_format != MESSAGE_FORMAT:
        return entry.payload
    head = walk_head(entry.payload)
    pieces = reencode(
        head,
        ttl_ms=None if head.ttl_ms is None else remaining_ms(entry.expires_at, now),
        first_acquirer=entry.first_acquirer and not entry.attempts,
        delivery_count=entry.delivery_count,
    )
    return b"".join(pieces) if len(entry.payload) < JOIN_MAX else pieces


class AttachedLink(Protocol):
    """Link, as far as it is asked whether it is attached."""

    @property
    def attached(self) -> bool: ...


def exceeds_link(link: AttachedLink, error: LocalProtocolError) -> bool:
    """Return whether a message was not sent since the peer never accepts it on *link*, whatever credit it gives."""
    return link.attached and not isinstance(error, CreditTooSmall)


def annotate(entry: Entry, changes: Mapping[Any, object], limits: Limits = DEFAULT_LIMITS) -> None:
    """Merge *changes* into the message annotations (§3.4.5).

    If that would make them larger than ``annotations_max``, all *changes* are dropped, since each
    delivery could add more.
    """
    if entry.message_format != MESSAGE_FORMAT:
        return
    head = walk_head(entry.payload, limits)
    section = merge_annotations(head.message_annotations, changes, limits)
    if len(section) <= max(limits.annotations_max, len(head.message_annotations)):
        entry.payload = head.header + section + head.rest


def annotated(payload: bytes, annotations: Mapping[Any, object]) -> Payload:
    """Return a copy of *payload* with *annotations* merged into its message annotations."""
    head = walk_head(payload)
    if head.message_annotations:
        front = head.header + merge_annotations(head.message_annotations, annotations)
    else:
        out = bytearray(head.header)
        write_annotations(out, MESSAGE_ANNOTATIONS, annotations)
        front = bytes(out)
    rest = head.rest
    return front + rest if len(payload) < JOIN_MAX else [front, rest]


def dead_letter(
    entry: Entry,
    source: str,
    reason: str,
    error: Error | None,
    now: float,
    limits: Limits = DEFAULT_LIMITS,
    moves: Moves | None = None,
) -> Entry:
    """Return the message for a dead-letter address, with its history in the message annotations.

    It has no ttl: an expired message would expire again at once and be lost on the way.
    """
    if entry.message_format != MESSAGE_FORMAT:
        return Entry(entry.payload, entry.message_format, moves=moves)
    head = walk_head(entry.payload)
    annotations = dead_letter_annotations(
        read_annotations(head.message_annotations),
        source,
        reason,
        error,
        now=now,
        delivery_count=entry.delivery_count,
        attempts=entry.attempts,
        history_max=limits.dead_letter_history_max,
    )
    section = merge_annotations(head.message_annotations, annotations)
    pieces = reencode(
        head,
        ttl_ms=None,
        first_acquirer=False,
        delivery_count=entry.delivery_count,
        message_annotations=section,
    )
    return Entry(
        b"".join(pieces),
        MESSAGE_FORMAT,
        entry.durable,
        entry.priority,
        False,
        entry.delivery_count,
        rest=entry.rest,
        pieces=entry.pieces,
        origin=entry.origin,
        returnable=entry.returnable,
        moves=moves,
    )
