"""Link resumption: unsettled maps, and the sender's action for each delivery (Part 3 §3.4.6).

The decision table is data; everything here is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from ..codec.primitives import Reader, encode
from ..errors import DecodeError
from ..limits import Limits
from ..outcomes import Received
from ..values import Described
from .frames import encode_state, link_fault
from .performatives import DELIVERY_STATE
from .states import Known, known_of


class Action(Enum):
    """Sender's action for a delivery when the link is resumed."""

    #: Send as a new delivery, since the receiver has no record of it. Not a resumption.
    RESEND = "resend"
    #: Continue where the receiver's data ends.
    CONTINUE = "continue"
    #: Send the whole message again, as the same delivery.
    RESTART = "restart"
    #: Apply the receiver's outcome, then confirm it and settle.
    CONFIRM = "confirm"
    #: Settle: both sides have the same outcome.
    SETTLE = "settle"
    #: Send our outcome, which is the one that took effect, and let the receiver settle.
    RESTATE = "restate"
    #: Let the receiver drop its part of the message, which cannot be used.
    ABORT = "abort"
    #: Send nothing.
    FORGET = "forget"


#: Number of the row (the delivery-tag of the standard's example), state in the sender's map, state
#: in the receiver's map, condition, and action. The condition decides where the same pair occurs
#: twice: whether the sender can continue where the receiver's data ends, or whether the outcomes
#: are equal.
ROWS: Final[tuple[tuple[int, Known, Known, bool | None, Action], ...]] = (
    (1, Known.NULL, Known.ABSENT, None, Action.RESEND),
    (2, Known.NULL, Known.RECEIVED, None, Action.CONTINUE),
    (3, Known.NULL, Known.OUTCOME, None, Action.CONFIRM),
    (4, Known.NULL, Known.NULL, None, Action.RESTART),
    (5, Known.RECEIVED, Known.ABSENT, None, Action.RESEND),
    (6, Known.RECEIVED, Known.RECEIVED, True, Action.CONTINUE),
    (7, Known.RECEIVED, Known.RECEIVED, False, Action.ABORT),
    (8, Known.RECEIVED, Known.OUTCOME, None, Action.CONFIRM),
    (9, Known.RECEIVED, Known.NULL, None, Action.ABORT),
    (10, Known.OUTCOME, Known.ABSENT, None, Action.FORGET),
    (11, Known.OUTCOME, Known.RECEIVED, None, Action.ABORT),
    (12, Known.OUTCOME, Known.OUTCOME, True, Action.SETTLE),
    (13, Known.OUTCOME, Known.OUTCOME, False, Action.RESTATE),
    (14, Known.OUTCOME, Known.NULL, None, Action.ABORT),
)


def _by_pair() -> dict[tuple[Known, Known, bool], Action]:
    found: dict[tuple[Known, Known, bool], Action] = {}
    for _, local, remote, condition, action in ROWS:
        for holds in (True, False):
            if condition is None or condition is holds:
                found[local, remote, holds] = action
    return found


_ACTIONS: Final = _by_pair()


def action_for(local: Any, remote: Any, *, known: bool) -> Action:
    """Return the sender's action for a delivery.

    Args:
        local: The sender's state of the delivery.
        remote: The receiver's state of the delivery.
        known: Whether the delivery is in the receiver's map.
    """
    ours = known_of(local)
    theirs = known_of(remote) if known else Known.ABSENT
    holds = False
    if ours is Known.RECEIVED and theirs is Known.RECEIVED:
        holds = (remote.section_number, remote.section_offset) >= (
            local.section_number,
            local.section_offset,
        )
    elif ours is Known.OUTCOME and theirs is Known.OUTCOME:
        holds = local == remote
    return _ACTIONS[ours, theirs, holds]


# --- positions (§3.4.1) --------------------------------------------------------------------------


def _section_end(payload: bytes, at: int, limits: Limits) -> int:
    """Return the end of the section that begins at *at*; -1 if it is incomplete or malformed."""
    reader = Reader(payload, at, None, limits)
    try:
        reader.skip_value()
    except DecodeError:
        return -1
    return reader.at


def position_after(payload: bytes, limits: Limits) -> Received | None:
    """Return the first position of a message that *payload*, its beginning, does not contain.

    Data that is not a section counts as part of the last one. None if there are more than
    ``resume_sections_max`` sections.
    """
    at = 0
    number = 0
    while at < len(payload):
        if number >= limits.resume_sections_max:
            return None
        end = _section_end(payload, at, limits)
        if end < 0:
            break
        at = end
        number += 1
    return Received(number, len(payload) - at)


def offset_of(payload: bytes, position: Received, limits: Limits) -> int:
    """Return the offset of *position* in *payload*; -1 if it lies beyond the end."""
    at = 0
    for _ in range(min(position.section_number, limits.sections_max)):
        end = _section_end(payload, at, limits) if at < len(payload) else -1
        if end < 0:
            return -1
        at = end
    if position.section_number > limits.sections_max:
        return -1
    at += position.section_offset
    return at if at <= len(payload) else -1


# --- maps ----------------------------------------------------------------------------------------


def whole(payload: Any) -> bytes:
    """Join a payload into one piece."""
    if isinstance(payload, bytes):
        return payload
    return b"" if payload is None else b"".join(payload)


def fitting(states: list[tuple[bytes, Any]], room: int, most: int) -> tuple[dict[Any, Any], bool]:
    """Select the *states* that fit into *room* octets, at most *most* (§2.7.3).

    A state that would take more than half of the room is replaced by null; this costs the sender
    only a further exchange.

    Returns:
        The map, and whether it contains all *states*.
    """
    found: dict[bytes, Any] = {}
    left = room
    for tag, state in states:
        size = len(encode_state(state))
        if size > room // 2:
            state = None
            size = 1
        left -= size + len(tag) + 2
        if left < 0 or len(found) >= most:
            return found, False
        found[tag] = state
    return found, True


def read_unsettled(raw: Any, limits: Limits) -> dict[bytes, Any] | None:
    """Decode the peer's unsettled map: delivery-tag → state.

    Raises:
        Fault: The map has more entries than a session may have unsettled deliveries, or a key or
            value of the wrong type.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise link_fault("amqp:invalid-field", "the unsettled map has keys that are no binaries")
    if len(raw) > limits.unsettled_max:
        raise link_fault(
            "amqp:resource-limit-exceeded",
            f"the unsettled map has {len(raw)} entries, and {limits.unsettled_max} are allowed",
        )
    found: dict[bytes, Any] = {}
    for tag, state in raw.items():
        if not isinstance(tag, bytes):
            raise link_fault("amqp:invalid-field", "a key of the unsettled map is no delivery-tag")
        if len(tag) > limits.delivery_tag_max:
            raise link_fault("amqp:invalid-field", "the delivery-tag is longer than 32 octets")
        found[bytes(tag)] = _read_state(state, limits)
    return found


def _read_state(value: Any, limits: Limits) -> Any:
    if value is None:
        return None
    if not isinstance(value, Described):
        raise link_fault("amqp:invalid-field", "a value of the unsettled map is no delivery state")
    try:
        return DELIVERY_STATE.read(Reader(encode(value), 0, None, limits))
    except DecodeError as error:
        raise link_fault(
            "amqp:invalid-field", f"a state in the unsettled map: {error.description}"
        ) from None
