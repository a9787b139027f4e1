"""Whatever a peer says, in whatever pieces: events and a clean end, never an exception."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from conversations import written
from hostile import PROGRAMS, Program, client, passive, server
from hypothesis import given
from hypothesis import strategies as st
from wire import frame

from amqp_rt.core.frames import AMQP_HEADER, EMPTY_FRAME, SASL_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import (
    SaslChallenge,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Received,
    rejected,
)
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.transactions import Declared, TransactionalState

REQUIREMENTS = ("X3", "X26", "T9", "SE1")


def feed(program: Program, data: bytes, size: int = 0) -> Program:
    step = size or max(1, len(data))
    for at in range(0, len(data), step):
        program.hear(data[at : at + step])
    program.end()
    return program


# --- what others have found ------------------------------------------------------------------


def corpus(shared: Path, name: str, *targets: str) -> list[bytes]:
    path = shared / "spec" / "vectors" / name
    if not path.is_file():
        pytest.skip(f"no {name} in the folder shared/")
    with path.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    found = [base64.b64decode(entry["b64"]) for entry in entries if entry["target"] in targets]
    assert len(found) > 100
    return found


@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("role", PROGRAMS)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("proton-fuzz.jsonl", "connection-driver"),
        ("proton-fuzz.jsonl", "proactor-receive"),
        ("go-amqp-fuzz.jsonl", "conn"),
    ],
)
def test_what_once_crashed_others(
    shared: Path, name: str, target: str, role: str, long_run: bool
) -> None:
    make = PROGRAMS[role]
    for number, data in enumerate(corpus(shared, name, target)):
        # A quick run takes every third input octet by octet.
        size = 1 if long_run or (number % 3 == 0 and len(data) < 300) else max(1, len(data) // 9)
        feed(make(), data)
        feed(make(), data, size)
        # How the octets come makes no difference to what the engine itself makes of them.
        whole, cut = feed(passive(make()), data), feed(passive(make()), data, size)
        assert [type(event) for event in cut.events] == [type(event) for event in whole.events]


# --- arbitrary octets ------------------------------------------------------------------------

OPENING = {
    "nothing": b"",
    "header": AMQP_HEADER,
    "sasl": SASL_HEADER,
    "open": AMQP_HEADER + frame(Open(container_id="peer")),
    "begin": AMQP_HEADER
    + frame(Open(container_id="peer"))
    + frame(Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)),
    "logged in": SASL_HEADER + frame(SaslInit("PLAIN", b"x"), kind=1) + AMQP_HEADER,
}


@st.composite
def framed(draw: st.DrawFn) -> bytes:
    """A frame header that tells the truth, mostly, with any body."""
    body = draw(st.binary(max_size=60))
    if draw(st.booleans()):
        body = b"\0\x53" + bytes((draw(st.sampled_from(range(0x10, 0x19))),)) + body
    size = len(body) + 8 + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    doff = draw(st.sampled_from([2, 2, 2, 2, 3, 1]))
    kind = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return struct.pack(">IBBH", max(0, size), doff, kind, draw(st.integers(0, 4))) + body


@pytest.mark.slow
@pytest.mark.req(*REQUIREMENTS)
@given(
    st.sampled_from(sorted(PROGRAMS)),
    st.sampled_from(sorted(OPENING)),
    st.one_of(st.binary(max_size=200), st.lists(framed(), max_size=8).map(b"".join)),
    st.integers(0, 20),
)
def test_any_octets(role: str, opening: str, data: bytes, size: int) -> None:
    feed(PROGRAMS[role](), OPENING[opening] + data, size)


# --- valid frames in any order ---------------------------------------------------------------

numbers = st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
handles = st.sampled_from([0, 0, 0, 1, 1, 2, 7, 8, 0xFFFFFFFF])
maybe = st.one_of(st.none(), numbers)
flags = st.booleans()
errors = st.one_of(
    st.none(),
    st.builds(Error, st.sampled_from(["amqp:not-found", "c" * 300]), st.text(max_size=9)),
)
delivery_states = st.sampled_from(
    [
        None,
        None,
        ACCEPTED,
        ACCEPTED,
        RELEASED,
        MODIFIED_FAILED,
        rejected("amqp:not-found"),
        Received(0, 1),
        Declared(b"t"),
        TransactionalState(b"t", ACCEPTED),
        TransactionalState(b"t"),
    ]
)
termini = st.sampled_from(
    [None, Source(), Source(address="q"), Source(dynamic=True, filter={"f": "g"})]
)
targets = st.sampled_from([None, Target(), Target(address="q"), Coordinator()])
properties = st.sampled_from([None, {"k": "v"}, {"k": [1, 2, {"x": None}]}])

openings = st.builds(
    Open,
    container_id=st.sampled_from(["peer", "", "p" * 1_025]),
    hostname=st.sampled_from([None, "host"]),
    max_frame_size=st.sampled_from([512, 512, 4_096, 0xFFFFFFFF, 511, 0]),
    channel_max=st.sampled_from([0, 1, 65_535, 65_535]),
    idle_time_out=st.sampled_from([None, None, 0, 1, 1_000]),
    properties=properties,
)
begins = st.builds(
    Begin,
    remote_channel=st.sampled_from([None, None, 0, 0, 1, 65_535]),
    next_outgoing_id=numbers,
    incoming_window=numbers,
    outgoing_window=numbers,
    handle_max=st.sampled_from([0, 1, 7, 0xFFFFFFFF]),
    properties=properties,
)
attaches = st.builds(
    Attach,
    name=st.sampled_from(["l", "l", "m", "ours", "", "n" * 600, "n" * 1_025]),
    handle=handles,
    role=flags,
    snd_settle_mode=st.sampled_from([0, 1, 2, 2, 3, 255]),
    rcv_settle_mode=st.sampled_from([0, 0, 1, 2]),
    source=termini,
    target=targets,
    initial_delivery_count=maybe,
    max_message_size=st.sampled_from([None, 0, 5, 0xFFFFFFFFFFFFFFFF]),
    properties=properties,
)
flows = st.builds(
    Flow,
    next_incoming_id=maybe,
    incoming_window=numbers,
    next_outgoing_id=numbers,
    outgoing_window=numbers,
    handle=st.one_of(st.none(), handles),
    delivery_count=maybe,
    link_credit=maybe,
    available=maybe,
    drain=flags,
    echo=flags,
    properties=properties,
)
transfers = st.builds(
    Transfer,
    handle=handles,
    delivery_id=maybe,
    delivery_tag=st.sampled_from([None, b"", b"t", b"tag", b"t" * 32, b"t" * 33]),
    message_format=maybe,
    settled=st.sampled_from([None, True, False]),
    more=flags,
    rcv_settle_mode=st.sampled_from([None, None, None, 0, 1, 7]),
    state=delivery_states,
    resume=st.sampled_from([False, False, False, True]),
    aborted=st.sampled_from([False, False, False, True]),
    batchable=flags,
)
dispositions = st.builds(
    Disposition,
    role=flags,
    first=numbers,
    last=maybe,
    settled=flags,
    state=delivery_states,
    batchable=flags,
)
performatives = st.one_of(
    attaches,
    attaches,
    flows,
    flows,
    transfers,
    transfers,
    transfers,
    dispositions,
    dispositions,
    begins,
    st.builds(Detach, handle=handles, closed=flags, error=errors),
    st.builds(End, error=errors),
    st.one_of(openings, st.builds(Close, error=errors)),
)
amqp_frames = st.builds(
    frame,
    performatives,
    channel=st.sampled_from([0, 0, 0, 0, 1, 3, 4]),
    payload=st.sampled_from([b"", b"x", b"x" * 700]),
)
sasl_frames = st.builds(
    frame,
    st.one_of(
        st.builds(SaslMechanisms, st.sampled_from([("ANONYMOUS",), ("PLAIN", "X")])),
        st.builds(
            SaslInit,
            st.sampled_from(["PLAIN", "ANONYMOUS", "OTHER"]),
            st.sampled_from([None, b"", b"wrong", b"more", b"x" * 8_000]),
        ),
        st.builds(SaslChallenge, st.binary(max_size=5)),
        st.builds(SaslResponse, st.sampled_from([b"", b"wrong", b"more"])),
        st.builds(SaslOutcome, st.integers(0, 5)),
    ),
    kind=st.just(1),
)
pieces = st.one_of(
    amqp_frames,
    amqp_frames,
    amqp_frames,
    amqp_frames,
    amqp_frames,
    sasl_frames,
    st.sampled_from([EMPTY_FRAME, AMQP_HEADER, SASL_HEADER]),
)


@pytest.mark.slow
@pytest.mark.req("X5", *REQUIREMENTS)
@given(
    st.sampled_from(sorted(PROGRAMS)),
    st.sampled_from(sorted(OPENING)),
    st.lists(pieces, max_size=30),
    st.sampled_from(["whole", "frames", "pieces"]),
)
def test_any_frames_in_any_order(role: str, opening: str, said: list[bytes], cut: str) -> None:
    program = PROGRAMS[role]()
    if cut == "frames":
        for octets in [OPENING[opening], *said]:
            program.hear(octets)
        program.end()
    else:
        feed(program, OPENING[opening] + b"".join(said), 0 if cut == "whole" else 11)


BEGUN = (
    OPENING["begin"]
    + frame(Begin(remote_channel=0, next_outgoing_id=0, incoming_window=9, outgoing_window=9), 1)
    + frame(
        Attach(
            name="in",
            handle=0,
            role=False,
            source=Source(),
            target=Target(address="q"),
            initial_delivery_count=0xFFFFFFFE,
        )
    )
    + frame(Attach(name="out", handle=1, role=True, source=Source(address="q"), target=Target()))
    + frame(
        Flow(
            next_incoming_id=0,
            incoming_window=5,
            next_outgoing_id=0,
            outgoing_window=9,
            handle=1,
            delivery_count=0,
            link_credit=9,
        )
    )
)
#: As ``amqp_frames``, but in the session that is begun, and rarely the end of it.
working = st.builds(
    frame,
    st.one_of(transfers, transfers, transfers, flows, flows, dispositions, dispositions, attaches),
    payload=st.sampled_from([b"", b"x", b"x" * 700]),
)


@pytest.mark.slow
@pytest.mark.req("X5", "X10", "X15", "X21", *REQUIREMENTS)
@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.one_of(working, working, amqp_frames), max_size=40),
    st.sampled_from([0, 0, 1, 13]),
)
def test_any_frames_on_working_links(
    serves: bool, answers: bool, said: list[bytes], size: int
) -> None:
    program = server(answers=answers) if serves else client(answers=answers)
    program.hear(BEGUN)
    for octets in said:
        if not answers and len(octets) % 3 == 0:
            program.answer()
        step = size or len(octets)
        for at in range(0, len(octets), step):
            program.hear(octets[at : at + step])
    program.end()


# --- conversations with damage ---------------------------------------------------------------

CONVERSATIONS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "core" / "vectors" / "conversations.json").read_text("utf-8")
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """What one side of a conversation wrote, with octets, or frames, changed, lost or repeated."""
    conversation = draw(st.sampled_from(CONVERSATIONS))
    side = draw(st.sampled_from(["client", "server"]))
    data = bytearray(written(conversation, side))
    for _ in range(draw(st.integers(1, 6))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        what = draw(st.sampled_from(["change", "remove", "insert", "repeat", "swap", "cut"]))
        if what == "change":
            data[at] = draw(
                st.sampled_from([0, 1, 0x40, 0x45, 0x53, 0x70, 0xC0, 0xFF, data[at] ^ 1])
            )
        elif what == "remove":
            del data[at : at + draw(st.integers(1, 4))]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif what == "cut":
            del data[at:]
        else:
            starts = _starts(bytes(data))
            first, second = draw(st.sampled_from(starts)), draw(st.sampled_from(starts))
            one, two = bytes(data[slice(*first)]), bytes(data[slice(*second)])
            if what == "repeat":
                data[second[0] : second[0]] = one
            elif first < second:
                data[slice(*second)] = one
                data[slice(*first)] = two
    return side, bytes(data)


def _starts(data: bytes) -> list[tuple[int, int]]:
    found = []
    at = 0
    while at + 8 <= len(data):
        size = 8 if data[at : at + 4] == b"AMQP" else struct.unpack_from(">I", data, at)[0]
        end = min(len(data), at + max(8, size))
        found.append((at, end))
        at = end
    return found or [(0, len(data))]


@pytest.mark.req("X5", *REQUIREMENTS)
@given(damaged(), st.booleans(), st.sampled_from([0, 0, 1, 50]))
def test_conversations_with_damage(conversation: tuple[str, bytes], sasl: bool, size: int) -> None:
    side, data = conversation
    program = server(sasl=sasl) if side == "client" else client(sasl=sasl)
    feed(program, data, size)


@pytest.mark.slow
@pytest.mark.req("X3", "X5", "X26")
@given(
    st.sampled_from(sorted(PROGRAMS)),
    st.sampled_from(sorted(OPENING)),
    st.lists(pieces, max_size=20),
    st.integers(1, 40),
)
def test_any_frames_mean_the_same_however_they_are_cut(
    role: str, opening: str, said: list[bytes], size: int
) -> None:
    data = OPENING[opening] + b"".join(said)
    whole = feed(passive(PROGRAMS[role]()), data)
    cut = feed(passive(PROGRAMS[role]()), data, size)
    assert [_summary(event) for event in cut.events] == [_summary(event) for event in whole.events]


def _summary(event: Any) -> tuple[str, Any]:
    return type(event).__name__, getattr(event, "error", None)
