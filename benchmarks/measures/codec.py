"""Codec alone: nanoseconds to encode and decode messages and frequent frames.

The message has five properties, three application-properties and 100 bytes of data, the same for
all contestants. Contestants that encode frames in C below their interface have no rows for frames.
"""

from __future__ import annotations

from collections.abc import Callable

from ..contestants import Contestant
from ..rounds import Case, Sample
from . import Plan

CASES = {
    "message_encode": "message, make and encode",
    "message_decode": "message, decode all of it",
    "body_decode": "message, decode the body only",
    "transfer_encode": "transfer frame, encode",
    "transfer_decode": "transfer frame, decode",
    "disposition_encode": "disposition frame, encode",
    "disposition_decode": "disposition frame, decode",
}


def cases(plan: Plan) -> list[Case]:
    rows: dict[str, dict[str, Callable[[], Sample]]] = {name: {} for name in CASES.values()}
    for contestant in plan.field.with_role("codec"):
        for row, taken in _samples(plan, contestant).items():
            rows[row][contestant.key] = taken
    return [Case("codec", name, runs) for name, runs in rows.items() if runs]


def _samples(plan: Plan, contestant: Contestant) -> dict[str, Callable[[], Sample]]:
    """Return functions that take the samples of each row from one process for each round."""
    found: dict[str, list[float]] = {}

    def measure() -> None:
        seconds = plan.settings.seconds / 8
        with contestant.role("codec", seconds=seconds) as role:
            for name, value in role.result(patience_s=60 + 20 * seconds).items():
                if name in CASES:
                    found.setdefault(name, []).append(value)

    def take(name: str) -> Callable[[], Sample]:
        def sample() -> Sample:
            if not found.get(name):
                measure()
            return {"ns": found[name].pop(0)}

        return sample

    measure()
    return {CASES[name]: take(name) for name in found}
