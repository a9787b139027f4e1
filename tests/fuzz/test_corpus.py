"""The corpus of every target: what parsers are given, what once broke one, and what grows out of it.

A quick run replays the files and a few hundred changes of them, the same ones every time; a long one
changes them for a minute each, and prints what reproduces a finding.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
QUICK = 100
LONG_S = 60.0
#: Targets of which one input costs more than some others: an event loop, files, five engines.
SLOW = {"websocket": 20, "frames": 50, "sasl": 50, "store": 8, "engine010": 20, "http": 10}
#: Octets that mean something to some parser.
PIECES = [
    *(bytes([each]) for each in (0, 1, 0x40, 0x53, 0x7F, 0x80, 0xFF)),
    *(b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\x00\x53\x10", b"\xf0\x00\x00\x00\x05"),
    *(b"AMQP\x00\x01\x00\x00", b"\xc0\x00\x00", b"\x45", b"(", b"'", b"%", b"=", b"\0"),
]


def seeds(target: str) -> list[bytes]:
    files = sorted((CORPUS / target).iterdir())
    return [file.read_bytes() for file in files]


def changed(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """*data* with a few changes."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(made))
        what = chance.randrange(6)
        if what == 0 and made:
            made[at % len(made)] ^= 1 << chance.randrange(8)
        elif what == 1 and made:
            made[at % len(made)] = chance.randrange(256)
        elif what == 2:
            made[at:at] = chance.choice(PIECES)
        elif what == 3:
            del made[at : at + chance.randint(1, 8)]
        elif what == 4:
            made[at:at] = made[at : at + chance.randint(1, 64)] * chance.randint(1, 8)
        else:
            other = chance.choice(others)
            made[at:] = other[chance.randint(0, len(other)) :]
    return bytes(made[:65_536])


def grown(target: str, seed: int) -> Iterator[bytes]:
    """Changes of the corpus of *target*, without end."""
    chance = random.Random(seed)
    known = seeds(target)
    while True:
        yield changed(chance.choice(known), chance, known)


@pytest.mark.slow
@pytest.mark.req("SE18", "T9")
@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_is_survived(target: str) -> None:
    known = seeds(target)
    assert known, f"{target} has no corpus"
    for data in known:
        TARGETS[target](data)


@pytest.mark.slow
@pytest.mark.req("SE18", "T9")
@pytest.mark.parametrize("target", TARGETS)
def test_what_grows_out_of_it_is_survived(target: str, long_run: bool) -> None:
    seed = random.SystemRandom().getrandbits(32) if long_run else 1
    until = time.monotonic() + LONG_S
    for number, data in enumerate(grown(target, seed)):
        if time.monotonic() > until if long_run else number >= SLOW.get(target, QUICK):
            break
        try:
            TARGETS[target](data)
        except Exception as error:
            # To be kept in the corpus, as what once broke it.
            error.add_note(f"{target} with seed {seed}, input {number}: {data!r}")
            raise


def test_every_folder_of_the_corpus_has_its_target() -> None:
    assert {each.name for each in CORPUS.iterdir()} == set(TARGETS)
