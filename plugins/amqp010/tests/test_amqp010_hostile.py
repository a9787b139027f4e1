"""Any octets and any commands, sent to a real broker: each is answered, and costs nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest
from hostile010 import OPENING, SESSIONS, Bystander, Hostile, conversation, octets_of
from hypothesis import example, given
from hypothesis import strategies as st
from octets010 import Array, Operation, Struct, Typed
from protocol010 import xid
from subscribers010 import World
from tables010 import OPERATIONS, STRUCTS

pytestmark = [pytest.mark.slow, pytest.mark.req("D15", "D19")]


def world_with_bystander() -> tuple[World, Bystander]:
    world = World("q")
    world.publish("q", *[b"m"] * 5)
    return world, Bystander(world)


def nothing_is_held(world: World) -> None:
    """Messages of sessions that have ended are back, except those of prepared branches."""
    if world.host.space().has("q") and not len(world.host.services.branches):
        assert world.stats("q").acquired == 0


# --- a conversation, and changes of it ---------------------------------------------------------------


def test_the_conversation_is_understood() -> None:
    """Otherwise changes of it would test little."""
    world, bystander = world_with_bystander()
    hostile = Hostile(world, opened=False)
    for part in OPENING:
        hostile.feed(part)
    for each in conversation():
        hostile.say(each)
    names = [each.name for each in hostile.answers]
    for name in (
        *("connection.open-ok", "session.attached", "session.timeout", "execution.result"),
        *("message.transfer", "message.accept", "session.expected", "session.confirmed"),
        *("session.completed", "session.known-completed", "session.detached"),
    ):
        assert name in names
    # The queue is deleted under a subscription; the last command subscribes in a transaction without acceptance.
    failures = [each for each in hostile.answers if each.name == "execution.exception"]
    assert [each.error_code for each in failures] == [408, 530]
    bystander.check()
    hostile.end()
    nothing_is_held(world)


#: The conversation in pieces: the opening, and each operation.
PIECES = [*OPENING, *(octets_of(each) for each in conversation())]
_PLACES = st.integers(0, len(PIECES) - 1)
#: What is done to a piece: the kind, the piece, the octet in it, and a number.
_CHANGES = st.tuples(
    st.sampled_from(
        ["bit", "octet", "payload", "insert", "cut", "delete", "repeat", "move", "stop"]
    ),
    _PLACES,
    st.integers(0, 200),
    st.integers(0, 255),
)


def changed(changes: list[tuple[str, int, int, int]]) -> list[bytes]:
    """Return the conversation with *changes*."""
    made = [bytearray(each) for each in PIECES]
    for kind, place, offset, number in changes:
        piece = made[place % len(made)]
        at = offset % (len(piece) or 1)
        if kind == "payload":
            # Past the header of the frame, whose faults end the connection.
            at, kind = (12 + offset % max(1, len(piece) - 12)), "octet"
        if kind == "bit" and piece:
            piece[at] ^= 1 << number % 8
        elif kind == "octet" and at < len(piece):
            piece[at] = number
        elif kind == "insert":
            piece[at:at] = bytes([number]) * (1 + number % 5)
        elif kind == "cut":
            del piece[at : at + 1 + number % 9]
        elif kind == "delete":
            piece.clear()
        elif kind == "repeat":
            made.insert(number % len(made), bytearray(piece))
        elif kind == "move":
            made.insert(number % len(made), made.pop(place % len(made)))
        elif kind == "stop":
            del made[max(1, place) :]
    return [bytes(each) for each in made]


# A session that failed while the outcome of a message was on its way to the queue, which kept the message.
@example([("bit", 28, 0, 0), ("payload", 27, 0, 0)], 64)
@given(st.lists(_CHANGES, min_size=1, max_size=6), st.sampled_from([0, 1, 5, 64, 1000]))
def test_changes_of_a_conversation(changes: list[tuple[str, int, int, int]], size: int) -> None:
    world, bystander = world_with_bystander()
    hostile = Hostile(world, opened=False)
    first, *data = changed(changes)
    if size:
        whole = b"".join(data)
        data = [whole[at : at + size] for at in range(0, len(whole), size)]
    # The client is let in before it goes on.
    hostile.feed(first)
    for each in data:
        if hostile.engine.finished:
            break
        hostile.feed(each)
    bystander.check()
    hostile.end()
    nothing_is_held(world)
    bystander.check()


@given(st.lists(st.binary(max_size=100), max_size=8))
def test_any_octets_after_the_opening(data: list[bytes]) -> None:
    world, bystander = world_with_bystander()
    hostile = Hostile(world)
    hostile.attach(0)
    for each in data:
        hostile.feed(each)
    bystander.check()


# --- any controls and commands -----------------------------------------------------------------------

_NAMES = st.sampled_from(
    [
        *("", "q", "q", "e", "d", "theirs", "amq.topic", "amq.fanout", "amq.headers", "amq.x", "#"),
        *("$management", "/exchanges/e", "topic", "direct", "x" * 200, "s0", "s1", "\udc80"),
    ]
)
_OCTETS = _NAMES.map(lambda name: name.encode("utf-8", "surrogateescape"))
_KEYS = st.sampled_from(
    [
        *("qpid.max_count", "qpid.max_size", "qpid.policy_type", "qpid.last_value_queue_key"),
        *("qpid.priorities", "qpid.auto_delete_timeout", "x-match", "x-scope", "qpid.ive", "a"),
        *("qpid.browse-only", "x-apache-selector", "no-local", "qpid.exclusive-binding"),
    ]
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 200)
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | _OCTETS
    | st.binary(max_size=4).map(lambda octets: Typed("vbin16", octets)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    ),
    max_leaves=4,
)
_BOUNDS = st.sampled_from([0, 1, 2, 5, 9, 40, 2**31 - 1, 2**31, 2**32 - 1])
_XIDS = st.builds(xid, st.sampled_from([b"", b"g", b"h" * 64]), st.sampled_from([b"", b"b"]))
_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "bit": st.booleans(),
    "uint8": st.integers(0, 3) | st.integers(0, 255),
    "uint16": st.sampled_from([0, 1, 2, 100, 65535]),
    "uint32": st.sampled_from([0, 1, 2, 100, 2**32 - 1]),
    "uint64": st.sampled_from([0, 1, 2, 100, 2**63, 2**64 - 1]),
    "datetime": st.sampled_from([0, 1, 2_000_000_000, 2**64 - 1]),
    "sequence-no": _BOUNDS,
    "sequence-set": st.lists(st.tuples(_BOUNDS, _BOUNDS), max_size=3),
    "str8": _OCTETS,
    "str16": _OCTETS,
    "vbin16": _OCTETS,
    "vbin32": _OCTETS,
    "uuid": st.uuids(),
    "map": st.dictionaries(_KEYS, _VALUES, max_size=3),
    "array": st.lists(st.integers(0, 9), max_size=2).map(lambda items: Array("uint8", items)),
    "xid": _XIDS,
    "struct32": st.integers(0, 9).map(lambda number: Struct("xa-result", status=number)),
    "reply-to": st.builds(
        lambda key: Struct("reply-to", **{"routing-key": key}),
        _OCTETS,
    ),
}


def _fields(layout: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: _TYPES[kind] for name, kind in layout.fields})


def _struct(name: str) -> st.SearchStrategy[Struct]:
    return _fields(STRUCTS[name]).map(lambda fields: Struct(name, **fields))


_HEADERS = st.none() | st.lists(
    st.sampled_from(["delivery-properties", "message-properties", "fragment-properties"]).flatmap(
        _struct
    ),
    max_size=3,
)
_SAID = st.sampled_from([name for name in OPERATIONS if not name.startswith("connection.")])
_OPERATIONS = _SAID.flatmap(
    lambda name: st.builds(
        Operation,
        st.just(name),
        _fields(OPERATIONS[name]),
        st.booleans(),
        _HEADERS if name == "message.transfer" else st.none(),
        st.none() | st.binary(max_size=9) if name == "message.transfer" else st.none(),
        st.integers(0, 1),
    )
) | st.sampled_from(conversation())


@given(st.lists(_OPERATIONS, max_size=15))
def test_any_controls_and_commands_with_any_fields(said: list[Operation]) -> None:
    world, bystander = world_with_bystander()
    hostile = Hostile(world)
    for channel in range(len(SESSIONS)):
        hostile.attach(channel)
    for each in said:
        answers = hostile.say(each)
        if hostile.engine.finished:
            break
        for answer in answers:
            if answer.name == "session.detach":
                # A fault has cost the session, and the client goes on with a new one.
                hostile.say(
                    Operation(
                        "session.detached",
                        {"name": answer.name_, "code": 0},
                        channel=answer.channel,
                    )
                )
                hostile.attach(answer.channel)
    bystander.check()
    hostile.end()
    nothing_is_held(world)
    bystander.check()
