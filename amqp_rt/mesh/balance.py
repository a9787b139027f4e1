"""The choice between legs: which of several ways gets the next message.

Pure: time and chance are arguments. A :class:`Standing` is kept for each leg, and says how fast it answers, how busy it is, and
whether it is ejected. :func:`choose` takes one of those that have credit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..outcomes import Accepted, Modified, Rejected, Released

#: Seconds in which an observation loses about two thirds of its weight.
DECAY_S = 10.0
#: Latency of a leg that has not answered yet: every leg is tried before a second message waits for the first answer.
FIRST_S = 0.001
#: *rejected*, *modified* and *released* count as if they had taken this many times the usual latency: failing is fast, and
#: would otherwise attract messages.
FAILURE_FACTOR = 10.0
#: Latencies that are kept of one destination, for quantiles.
LATENCIES_MAX = 256
#: Failures in a row that eject a leg, for this long at first; the time doubles with each ejection in a row.
FAILURES_MAX = 5
EJECTED_S = 5.0
EJECTED_MAX_S = 60.0


#: Names of the usual outcomes, in lower case.
_NAMES: dict[type, str] = {
    each: each.__name__.lower() for each in (Accepted, Modified, Rejected, Released)
}


class Answers:
    """Outcomes from one destination, and the latencies of the latest ones."""

    __slots__ = ("_latest", "outcomes")

    def __init__(self) -> None:
        #: Number of outcomes by their names in lower case.
        self.outcomes: dict[str, int] = {}
        self._latest: deque[float] = deque(maxlen=LATENCIES_MAX)

    def count(self, outcome: object, took_s: float) -> None:
        """Count *outcome*, which took *took_s* seconds."""
        name = _NAMES.get(type(outcome)) or type(outcome).__name__.lower()
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
        self._latest.append(took_s)

    def count_accepted(self, took_s: list[float]) -> None:
        """Count messages that were accepted, with the seconds that each took."""
        self.outcomes["accepted"] = self.outcomes.get("accepted", 0) + len(took_s)
        self._latest.extend(took_s)

    def quantile(self, share: float) -> float | None:
        """Return the latency that *share* of the latest messages did not exceed; None without any."""
        found = sorted(self._latest)
        return found[min(int(share * len(found)), len(found) - 1)] if found else None


class Standing:
    """Latency, load and failures of one leg.

    Latency is a peak EWMA: a slower answer counts at once, a faster one gradually.

    Args:
        cost: Cost of the path.
        zone: Zone of the destination.
        slots: Messages that the destination handles at a time; 0 if that is unknown.
        weight: Share of the messages that it wants, relative to others; at least 1.
    """

    __slots__ = (
        "_failures",
        "_updated",
        "cost",
        "ejected_s",
        "ejected_until",
        "latency",
        "load",
        "outstanding",
        "slots",
        "usual",
        "weight",
        "zone",
    )

    def __init__(self, *, cost: int = 1, zone: str = "", slots: int = 0, weight: int = 1) -> None:
        self.cost = cost
        self.zone = zone
        self.slots = slots
        self.weight = weight
        #: Messages waiting and running there, as the destination reports.
        self.load = 0
        #: Unsettled messages that we have sent there.
        self.outstanding = 0
        #: Seconds that an answer takes; 0 until there is one.
        self.latency = 0.0
        #: The same of messages that were accepted.
        self.usual = 0.0
        self._updated = 0.0
        self._failures = 0
        self.ejected_s = 0.0
        self.ejected_until = -math.inf

    def answered(self, outcome: object, took_s: float, now: float, *, usual_s: float = 0.0) -> None:
        """Count an answer that took *took_s* seconds, where one of any leg usually takes *usual_s*.

        A failure counts as slow in comparison with the usual latency, and not with that of the failures before: it would
        grow with each of them, and some messages fail everywhere.
        """
        if (
            type(outcome) is Accepted
            and now == self._updated
            and took_s <= self.usual <= self.latency
            and not self._failures
            and not self.ejected_s
        ):
            # One of several at a time, which changes nothing after the slowest of them.
            return
        failed = type(outcome) is Rejected or type(outcome) is Modified
        if failed or type(outcome) is Released:
            took_s = FAILURE_FACTOR * max(took_s, self.usual, usual_s)
        else:
            self.usual = self._averaged(self.usual, took_s, now)
        self.latency = self._averaged(self.latency, took_s, now)
        self._updated = now
        if type(outcome) is Released:
            # Nothing failed, and nothing shows that the next message will not.
            return
        if not failed:
            self._failures = 0
            if now >= self.ejected_until:
                # A success while ejected is of a message sent before, and proves nothing.
                self.ejected_s = 0.0
            return
        self._failures += 1
        if self._failures >= FAILURES_MAX and now >= self.ejected_until:
            self._failures = 0
            self.ejected_s = min(2 * self.ejected_s or EJECTED_S, EJECTED_MAX_S)
            self.ejected_until = now + self.ejected_s

    def _averaged(self, before: float, took_s: float, now: float) -> float:
        if took_s >= before:
            return took_s
        keep = math.exp(-max(0.0, now - self._updated) / DECAY_S)
        return took_s + (before - took_s) * keep

    def score(self, now: float) -> float:
        """Return the expected time until a further message is answered; the least is the best."""
        latency = self.latency or FIRST_S
        if not self.outstanding and self.latency:
            # Without messages there are no answers that could show an improvement.
            latency *= math.exp(-max(0.0, now - self._updated) / DECAY_S)
        return latency * (max(self.outstanding, self.load) + 1) / ((self.slots or 1) * self.weight)

    @property
    def busy(self) -> bool:
        """Whether all slots are taken."""
        return 0 < self.slots <= max(self.outstanding, self.load)


#: Anything that has a standing; the legs of a fan.
L = TypeVar("L")


def eligible(legs: Sequence[L], standing: Callable[[L], Standing], *, now: float) -> list[L]:
    """Return the legs that are not ejected.

    At most half of all legs are: of more, those ejected longest return first. If many fail, the cause is not one of them.
    """
    out = [each for each in legs if standing(each).ejected_until > now]
    surplus = len(out) - len(legs) // 2
    if surplus > 0:
        out.sort(key=lambda each: standing(each).ejected_until)
        out = out[surplus:]
    gone = {id(each) for each in out}
    return [each for each in legs if id(each) not in gone]


def nearest(legs: Sequence[L], standing: Callable[[L], Standing]) -> list[L]:
    """Return the legs of least cost."""
    least = min((standing(each).cost for each in legs), default=0)
    return [each for each in legs if standing(each).cost == least]


def choose(
    ready: Sequence[L],
    standing: Callable[[L], Standing],
    *,
    zone: str,
    now: float,
    random: Callable[[], float],
) -> L:
    """Return the leg for the next message: the better of two that are drawn.

    Two suffice against herds: all who know the same best leg would choose it at once.

    Args:
        ready: Legs that have credit and are eligible; at least one.
        standing: Returns the standing of a leg.
        zone: Our own zone, whose legs are preferred while one of them is not busy; empty for none.
        now: Seconds, of any monotonic clock.
        random: Returns numbers from 0 to 1, without 1.
    """
    if zone and len(ready) > 1:
        near = [each for each in ready if standing(each).zone == zone and not standing(each).busy]
        ready = near or ready
    count = len(ready)
    first = int(random() * count)
    if count == 1:
        return ready[0]
    second = int(random() * (count - 1))
    second += second >= first
    a, b = ready[first], ready[second]
    return b if standing(b).score(now) < standing(a).score(now) else a


#: Ranks of outcomes of a message with several destinations.
_RANKS: dict[str, int] = {"Rejected": 0, "Accepted": 1, "Modified": 2, "Released": 3}


def combined(outcomes: Sequence[object], *, worst: bool = False) -> object:
    """Return the outcome of a message from those of all its copies; at least one.

    A rejection counts most, then an acceptance, since the message was handled somewhere, then *modified*, then *released*. With
    *worst* an acceptance counts least: it needs all of them.
    """

    def rank(outcome: object) -> int:
        name = type(outcome).__name__
        return 4 if worst and name == "Accepted" else _RANKS.get(name, 2)

    return min(outcomes, key=rank)
