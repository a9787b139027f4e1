"""Recorded conversations, ours and another implementation's, played again on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conversations import Player, meaning, written

from amqp_rt.events import Closed, ConnectionFailed

PROTON = (
    "open_close",
    "open_error_close",
    "sasl_anonymous",
    "send_unsettled_accept",
    "send_presettled",
    "multi_frame_transfer",
    "receive_outcomes",
    "drain",
    "settle_second",
    "link_refused",
    "transaction",
)
OTHER = {"client": "server", "server": "client"}


def proton_conversation(shared: Path, name: str) -> dict[str, Any]:
    path = shared / "spec" / "vectors" / "amqp10" / "sessions.json"
    if not path.is_file():
        pytest.skip("no recorded sessions in the folder shared/")
    scenarios = json.loads(path.read_text("utf-8"))["scenarios"]
    assert {scenario["scenario"] for scenario in scenarios} == set(PROTON)
    return next(scenario for scenario in scenarios if scenario["scenario"] == name)


def check(conversation: dict[str, Any], side: str, size: int = 0) -> Player:
    player = Player(conversation, side)
    player.play(size)
    assert meaning(bytes(player.out)) == meaning(written(conversation, side))
    assert not any(isinstance(event, ConnectionFailed) for event in player.events)
    assert sum(isinstance(event, Closed) for event in player.events) == 1
    assert player.engine.finished
    return player


@pytest.mark.req("X1", "X4", "X5", "X12", "X14", "X15", "X16", "X18", "X21", "SE1")
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("name", PROTON)
def test_we_say_what_proton_said(shared: Path, name: str, side: str) -> None:
    conversation = proton_conversation(shared, name)
    check(conversation, side)


# --- our own ---------------------------------------------------------------------------------

OWN = {
    conversation["scenario"]: conversation
    for conversation in json.loads(
        (Path(__file__).parent / "vectors" / "conversations.json").read_text("utf-8")
    )
}
#: Which side our engine can play: where the client was written by hand, only the other.
SIDES = [
    pytest.param(name, side, id=f"{name}-{side}")
    for name, conversation in OWN.items()
    for side in ("client", "server")
    if not (conversation["by_hand"] and side == "client")
]


def play_own(name: str, side: str, size: int = 0) -> None:
    player = Player(OWN[name], side)
    player.play(size)
    assert meaning(bytes(player.out)) == meaning(written(OWN[name], side))
    assert player.engine.finished


@pytest.mark.req("X1", "X5", "X9", "X12", "X13", "X14", "X16", "X19", "X20", "X21", "X23", "X26")
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_we_say_what_we_have_always_said(name: str, side: str) -> None:
    play_own(name, side)


def sizes_of(conversation: dict[str, Any], side: str, *, every: bool) -> list[int]:
    """Sizes of pieces: small ones, and in a long run every one that makes a difference."""
    longest = max(
        len(chunk["hex"]) // 2 for chunk in conversation["chunks"] if chunk["from"] != side
    )
    return [size for size in range(1, longest) if every or size < 24]


@pytest.mark.slow
@pytest.mark.req("X3", "X5")
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_where_the_octets_are_cut_makes_no_difference(name: str, side: str, long_run: bool) -> None:
    for size in sizes_of(OWN[name], side, every=long_run):
        play_own(name, side, size)


@pytest.mark.req("X3", "X5")
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("name", PROTON)
def test_where_protons_octets_are_cut_makes_no_difference(
    shared: Path, name: str, side: str, long_run: bool
) -> None:
    conversation = proton_conversation(shared, name)
    for size in sizes_of(conversation, side, every=long_run):
        check(conversation, side, size)
