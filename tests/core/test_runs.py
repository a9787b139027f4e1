"""Runs of whole messages in one chunk have the effects that their frames have one by one."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from wire import begun, frame, transfer

from amqp_rt.core.frames import FrameBuffer, first_transfer, later_transfer, run_head
from amqp_rt.core.performatives import Attach
from amqp_rt.events import AttachRequested
from amqp_rt.limits import Limits
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

LIMITS = Limits(session_window=20)
SIZE_MAX = 300


def message(
    number: int, size: int = 10, *, handle: int = 0, settled: bool = False, more: bool = False
) -> bytes:
    header = first_transfer(0, handle, number, struct.pack(">I", number), settled, more, size)
    return header + bytes([number % 251]) * size


def changed(data: bytes, at: int, octet: int) -> bytes:
    return data[:at] + bytes((octet,)) + data[at + 1 :]


def receiver(name: str, handle: int, engine: Any, **options: Any) -> Any:
    attach = Attach(
        name=name,
        handle=handle,
        role=False,
        source=Source(),
        target=Target(address=name),
        initial_delivery_count=0xFFFFFFFE,
        snd_settle_mode=options.pop("snd_settle_mode", 2),
        rcv_settle_mode=options.pop("rcv_settle_mode", 0),
    )
    (event,) = engine.receive(frame(attach), 0.0)
    assert isinstance(event, AttachRequested)
    event.link.accept(Recorder(), max_message_size=SIZE_MAX, **options)
    event.link.grant(8)
    return event.link


def effects(chunks: list[bytes], **options: Any) -> tuple[Any, int]:
    """Return all that can be seen after *chunks*, and the largest batch of a link."""
    engine = begun(limits=LIMITS)
    links = [receiver("a", 0, engine, **options), receiver("b", 1, engine)]
    session = links[0].session
    endpoints = [link.endpoint for link in links]
    engine.take()
    for chunk in chunks:
        engine.receive(chunk, 0.0)
    seen = [
        (
            *(link.credit, link.delivery_count, link.available, link.attached),
            [
                (
                    *(one.delivery_id, one.tag, one.message_format, one.settled, one.second),
                    *(one.complete, one.size, one.payload or b"".join(one.read_chunks())),
                )
                for one in endpoint.deliveries
            ],
        )
        for link, endpoint in zip(links, endpoints, strict=True)
    ]
    windows = session.next_incoming_id, session.incoming_window, session.ended
    batches = max(max(each.batches, default=0) for each in endpoints)
    return (seen, windows, sorted(session.incoming), b"".join(engine.take())), batches


RUN = [message(number) for number in range(6)]
IN_TWO = message(3, more=True), later_transfer(0, 0, False, 4) + b"last"


@pytest.mark.parametrize(
    ("frames", "options"),
    [
        pytest.param(RUN, {}, id="plain"),
        pytest.param([message(n, n * 20) for n in range(6)], {}, id="sizes"),
        pytest.param([message(n, settled=n % 2 == 1) for n in range(6)], {}, id="settled"),
        pytest.param(RUN, {"rcv_settle_mode": 1}, id="second"),
        pytest.param(RUN, {"snd_settle_mode": 1}, id="presettled-link"),
        pytest.param(RUN, {"streaming": True}, id="streaming"),
        pytest.param([message(n, handle=n % 2) for n in range(8)], {}, id="two-links"),
        pytest.param([message(n) for n in range(12)], {}, id="beyond-the-credit"),
        pytest.param([*RUN[:3], message(3, 400), *RUN[4:]], {}, id="too-large"),
        pytest.param([*RUN[:3], RUN[1], *RUN[4:]], {}, id="id-in-use"),
        pytest.param([*RUN[:3], *IN_TWO, *RUN[4:]], {}, id="several-frames"),
        pytest.param([*RUN[:3], transfer(3), *RUN[4:]], {}, id="another-encoding"),
        pytest.param([*RUN[:3], changed(RUN[3], 25, 3), *RUN[4:]], {}, id="bad-tag"),
        pytest.param([*RUN[:3], changed(RUN[3], 30, 0x52), *RUN[4:]], {}, id="bad-format"),
        pytest.param([*RUN[:3], changed(RUN[3], 12, 19), *RUN[4:]], {}, id="bad-size-of-list"),
        pytest.param([*RUN[:3], changed(RUN[3], 3, 32), RUN[3][32:]], {}, id="frame-too-short"),
        pytest.param([*RUN[:3], message(3, handle=7)], {}, id="unattached-handle"),
        pytest.param([*RUN[:3], changed(RUN[3], 7, 5)], {}, id="another-channel"),
    ],
)  # fmt: skip
def test_a_run_has_the_effects_of_its_frames(frames: list[bytes], options: dict[str, Any]) -> None:
    alone, _ = effects(frames, **options)
    together, largest = effects([b"".join(frames)], **options)
    assert together == alone
    assert largest > 1
    data = b"".join(frames)
    for cut in range(1, len(data), 7):
        assert effects([data[:cut], data[cut:]], **options)[0] == alone


def test_a_run_ends_with_the_work_allowed_in_a_row() -> None:
    engine = begun(limits=LIMITS)
    link = receiver("a", 0, engine)
    engine.work_max = 4
    engine.receive(b"".join(RUN), 0.0)
    assert engine.unread
    assert len(link.endpoint.deliveries) == 4
    engine.receive(b"", 0.0)
    assert len(link.endpoint.deliveries) == 6


def test_work_for_each_delivery_counts() -> None:
    engine = begun(limits=LIMITS)
    link = receiver("a", 0, engine)
    link.delivery_work = 1
    engine.work_max = 6
    engine.receive(b"".join(RUN), 0.0)
    assert engine.unread
    assert len(link.endpoint.deliveries) == 3


def test_frames_of_a_link_begin_as_computed() -> None:
    for handle in (0, 1, 300, 0x01020304):
        assert message(9, handle=handle)[4:20] == run_head(0, handle)
    buffer = FrameBuffer(1_000)
    buffer.feed(RUN[0] + RUN[1][:20])
    assert buffer.next_frame()
    assert buffer.at == len(RUN[0])
