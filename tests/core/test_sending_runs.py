"""Messages sent in a run leave as they do one by one, and a run ends where ``send`` has to look closer."""

from __future__ import annotations

from typing import Any

import pytest
from conversations import frames
from sanity import check

from amqp_rt.core.performatives import Transfer
from amqp_rt.errors import LocalProtocolError
from amqp_rt.limits import Limits
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Joined, Recorder

Q = Target(address="q")


def sender(credit: int = 100, settle_mode: int = 2, **options: Any) -> tuple[Joined, Any]:
    """Return a pair of engines, and the sending link of the client, which has *credit*."""
    sizes = {"max_message_size": options.pop("max_message_size", 0)}
    joined = Joined(
        on_attach=lambda link: link.accept(Recorder(credit=credit, settle=ACCEPTED), **sizes),
        **options,
    )
    joined.pump()
    session = joined.client.begin()
    link = session.attach_sender("l", Recorder(), target=Q, snd_settle_mode=settle_mode)
    joined.pump()
    return joined, link


def effects(joined: Joined, link: Any, sent: list[Any]) -> Any:
    """Return all that can be seen of *sent*, before and after the peer has answered."""
    data = b"".join(joined.client.take())
    seen: list[Any] = [
        data,
        link.credit,
        link.delivery_count,
        link.available,
        link.writable,
        link.session.remote_incoming_window,
        joined.client.output_size,
        [(each.delivery_id, each.tag, each.settled, each.context, each.complete) for each in sent],
    ]
    check(joined.client)
    joined.client_events += joined.client.receive(b"", joined.now)
    joined.server.receive(data, joined.now)
    joined.pump()
    (far,) = joined.links
    seen.append([each.payload for each in far.endpoint.deliveries])
    seen.append([(each.state, each.remote_settled) for each in sent])
    return seen


PAYLOADS = [bytes([65 + size % 26]) * size for size in (0, 1, 100, 300, 7, 2_000)]


@pytest.mark.parametrize("settled", [None, False, True])
@pytest.mark.parametrize("settle_mode", [0, 1, 2])
def test_a_run_has_the_effects_of_single_messages(settled: bool | None, settle_mode: int) -> None:
    if (settled, settle_mode) in ((True, 0), (False, 1)):
        _, link = sender(settle_mode=settle_mode)
        assert link.send_run(PAYLOADS, list(PAYLOADS), settled) == []
        with pytest.raises(LocalProtocolError):
            link.send(b"", settled=settled)
        return
    joined, link = sender(settle_mode=settle_mode)
    link.offer(4)
    one_by_one = effects(
        joined, link, [link.send(each, at, settled=settled) for at, each in enumerate(PAYLOADS)]
    )
    joined, link = sender(settle_mode=settle_mode)
    link.offer(4)
    sent = link.send_run(PAYLOADS, list(range(len(PAYLOADS))), settled)
    assert len(sent) == len(PAYLOADS)
    assert effects(joined, link, sent) == one_by_one


def test_a_run_may_cross_the_end_of_the_counters() -> None:
    joined, link = sender()
    link.tags = link.delivery_count = 0xFFFFFFFE
    joined.links[0].delivery_count = 0xFFFFFFFE
    sent = link.send_run([b"x"] * 4, [None] * 4)
    assert [each.tag[-1] for each in sent] == [0xFF, 0, 1, 2]
    assert link.delivery_count == 2
    joined.pump()
    assert [each.state for each in sent] == [ACCEPTED] * 4


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        pytest.param(b"x" * 600, {"limits": Limits(frame_size_max=512)}, id="two frames"),
        pytest.param(b"x" * 11, {"max_message_size": 10}, id="larger than the peer takes"),
        pytest.param(b"x" * 16_385, {}, id="not to be copied"),
        pytest.param((b"x", b"y"), {}, id="in pieces"),
    ],
)
def test_a_run_ends_before_a_message_that_is_not_like_the_others(
    payload: Any, options: dict[str, Any]
) -> None:
    joined, link = sender(**options)
    sent = link.send_run([b"first", payload, b"last"], [1, 2, 3])
    assert [each.context for each in sent] == [1]
    joined.pump()
    assert [each.payload for each in joined.links[0].endpoint.deliveries] == [b"first"]


def test_a_run_ends_with_the_credit() -> None:
    _, link = sender(credit=2)
    assert len(link.send_run([b"x"] * 3, [0] * 3)) == 2
    assert link.credit == 0
    assert link.send_run([b"x"], [0]) == []


def test_a_run_ends_with_the_window_of_the_session() -> None:
    _, link = sender()
    link.session.remote_incoming_window = 2
    assert len(link.send_run([b"x"] * 3, [0] * 3)) == 2
    assert not link.writable


def test_a_run_ends_with_the_room_for_unsettled_messages() -> None:
    _, link = sender(limits=Limits(unsettled_max=3))
    assert len(link.send_run([b"x"] * 5, [0] * 5)) == 3
    assert not link.writable


def test_a_run_ends_when_the_output_is_full() -> None:
    joined, link = sender(limits=Limits(output_max=4_096))
    # The message that fills the output still leaves, as with send().
    assert len(link.send_run([b"x" * 1_500] * 5, [0] * 5)) == 3
    assert not link.writable
    joined.pump()
    assert link.writable


def test_no_run_passes_a_message_that_waits_or_is_unfinished() -> None:
    joined, link = sender()
    unfinished = link.send(b"begins", more=True)
    assert link.send_run([b"x"], [0]) == []
    unfinished.write(b"ends", more=False)
    link.session.remote_incoming_window = 0
    link.send(b"waits")
    link.session.remote_incoming_window = 10
    assert link.send_run([b"x"], [0]) == []
    joined.pump()
    assert len(link.send_run([b"x"], [0])) == 1
    link.detach()
    assert link.send_run([b"x"], [0]) == []


def test_a_run_wakes_the_driver_once() -> None:
    joined, link = sender()
    woken: list[int] = []
    joined.client.on_output = lambda: woken.append(1)
    joined.client.take()
    link.send_run([b"x"] * 3, [0] * 3)
    assert woken == [1]
    kinds = [type(each.performative) for each in frames(b"".join(joined.client.take()))]
    assert kinds == [Transfer] * 3
